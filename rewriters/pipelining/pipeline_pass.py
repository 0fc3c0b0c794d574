"""Pipeline pass: places a step in stages on several devices and orders its micro-batches by a schedule.

Jain et al., "GEMS: GPU-Enabled Memory-Aware Model-Parallelism System for Distributed DNN Training" (2020), and Seal et
al., "Toward Large-Scale Image Segmentation on Summit" (2020), run pipelines by programs of their own with explicit
messages. Here the joint graph is rewritten: every operation is placed on a device, and TensorFlow sends what crosses.
Its executor starts whatever is ready, so a schedule is control edges: what a device does for one micro-batch in one
phase of one stage is a slot, which ends in a `NoOp`, and the next slot of the device begins after it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import tensorflow as tf

from rewriters.analysis import summation_order
from rewriters.analysis.graph_analysis import GraphAnalysis, require_analysed
from rewriters.errors import PipelineError, RewriteError
from rewriters.ir.graph import LOOPS, Graph, Node, Tensor
from rewriters.ir.graph_pass import GraphPass, PassError, PassResult, check_interface, record_state
from rewriters.ir.legality import Stage
from rewriters.ir.static_values import op_attrs
from rewriters.pipelining.micro_batch_reduction import MicroBatchReduction, UnrollSpec
from rewriters.pipelining.micro_batch_unroll import Origin, Role, UnrolledStep, unroll_micro_batches
from rewriters.pipelining.schedules import Direction, Schedule, Slot
from rewriters.pipelining.stage_assignment import Stages, scheduled_ops
from rewriters.pipelining.step_partition import StepPartition
from rewriters.scheduling.serialize_ops import layer_gradient_edges

__all__: list[str] = []

HOST = "/device:CPU:0"
"""Device that splits arguments, so that only slices of them are sent."""


@dataclasses.dataclass(frozen=True)
class Devices:
    """Devices of the schedule and of variables.

    Attributes:
        names: Names of the devices of the schedule, in its order.
        of_variable: Device of each variable whose place is known, by its handle.
    """

    names: Sequence[str]
    of_variable: Mapping[Tensor, str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pipelined(PassResult):
    """Graph of a pipeline, with its slots.

    Attributes:
        slots: Ops of each slot, in execution order.
        ends: Final `NoOp` of each slot.
        combined: Reduction of each tensor that leaves micro-batches.
    """

    slots: Mapping[Slot, list[Node]]
    ends: Mapping[Slot, Node]
    combined: Mapping[Tensor, MicroBatchReduction]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelinePass(GraphPass[Pipelined]):
    """Rewrites a step into a pipeline.

    Arguments take the whole batch, so that their shapes differ from those of the step for one micro-batch. An effect
    may run once for each micro-batch.

    Attributes:
        analysis: Analysis of the step as traced for one micro-batch.
        parts: Partition of the step.
        stages: Stages of the step.
        request: Specification of the micro-batches; the schedule gives their order.
        schedule: Slots of each device, in order.
        devices: Devices of the schedule and of variables.
    """

    stage = Stage.PIPELINED

    analysis: GraphAnalysis
    parts: StepPartition
    stages: Stages
    request: UnrollSpec
    schedule: Schedule
    devices: Devices

    def requires(self, graph: Graph) -> None:
        """Check that the analysis belongs to the graph."""
        require_analysed(graph, self.analysis)

    def call(self, graph: Graph) -> Pipelined:
        """Unroll micro-batches, place ops, and add the edges of the schedule.

        Raises:
            PipelineError: If slots wait for each other, or a value cannot be combined.
        """
        del graph
        request = dataclasses.replace(self.request, order=self._micro_batch_order)
        unrolled = unroll_micro_batches(self.analysis, self.parts, request)
        graph = unrolled.graph
        record_state(graph, "unroll_micro_batches", unroll_micro_batches.__doc__ or "")
        _Placement(self, unrolled).run()
        record_state(graph, "place_ops", _Placement.__doc__ or "")
        slots = self._slots(unrolled)
        ends = self._hold_to_schedule(graph, slots, self._merged(unrolled))
        record_state(graph, "hold_to_schedule", self._hold_to_schedule.__doc__ or "")
        try:
            graph.execution_order()
        except RewriteError as error:
            raise PipelineError(
                f"The stages of this step cannot run in the order of the schedule {self.schedule.name!r}: {error} Use "
                "another schedule, or other cuts."
            ) from None
        # Automatic control dependencies would bring all effects into one line, of micro-batches one after another too.
        effects = (node for node in graph.nodes.values() if node.stateful and not node.variable_handles)
        graph.unordered = {node.name for node in effects if node.inputs or node.control_inputs}
        return Pipelined(graph=graph, changed=True, slots=slots, ends=ends, combined=unrolled.combined)

    def ensures(self, before: Graph, after: Graph) -> None:
        """Check that arguments, captured variables and results are the same, and every written variable still is."""
        check_interface(before, after, same_shapes=False)
        missing = _written_variables(before) - _written_variables(after)
        if missing:
            raise PassError(f"variables are no longer written: {sorted(missing)[:5]}")

    def _micro_batch_order(self, tensor: Tensor) -> list[int]:
        """Return micro-batches in the order in which they compute a tensor, by their positions on their devices."""
        kind = Direction.BACKWARD if tensor.node in self.analysis.backward else Direction.FORWARD
        stage = self.stages.of.get(tensor.node, self.stages.count - 1)
        positions = {
            slot.micro_batch: position
            for slots in self.schedule.devices
            for position, slot in enumerate(slots)
            if slot.kind is kind and slot.stage == stage
        }
        return sorted(positions, key=lambda number: (positions[number], number))

    def _slots(self, unrolled: UnrolledStep) -> dict[Slot, list[Node]]:
        """Return the ops of each slot, with the gradient sums that its device computes."""
        slots: dict[Slot, list[Node]] = {slot: [] for slot in self.schedule.slots()}
        slotted = scheduled_ops(self.analysis, self.parts, self.stages)
        for node in slotted:
            kind = Direction.BACKWARD if node in self.analysis.backward else Direction.FORWARD
            for number, copy in enumerate(unrolled.clones[node]):
                slots[Slot(kind, number, self.stages.of[node])].append(copy)
        needed = {t.node for t in self.parts.gradients if t.node in self.parts.per_micro_batch}.union(slotted)
        for node, origin in unrolled.origin.items():
            if origin.role is Role.ADD and origin.micro_batch is not None and origin.source in needed:
                kind = Direction.BACKWARD if origin.source in self.analysis.backward else Direction.FORWARD
                slot = Slot(kind, origin.micro_batch, self.stages.of.get(origin.source, self.stages.count - 1))
                if self.schedule.device_of(slot) == owner_device(self.schedule, slot.stage):
                    slots[slot].append(node)
        return slots

    def _merged(self, unrolled: UnrolledStep) -> set[Node]:
        """Return sums that TensorFlow flattens into others: a control edge would prevent that and change rounding."""
        flattened, role = summation_order.flattenable_sums(self.analysis), Role.MICRO_BATCH
        return {n for n, origin in unrolled.origin.items() if origin.role is role and origin.source in flattened}

    def _hold_to_schedule(
        self, graph: Graph, slots: Mapping[Slot, Sequence[Node]], merged: set[Node]
    ) -> dict[Slot, Node]:
        """Add edges by which each device runs its slots in order; return the final `NoOp` of each slot."""
        ends: dict[Slot, Node] = {}
        for name, device_slots in zip(self.devices.names, self.schedule.devices, strict=True):
            before: Node | None = None
            for slot in device_slots:
                nodes = slots[slot]
                for node, other in list(layer_gradient_edges(nodes)):
                    node.control_inputs.append(other)
                inside = set(nodes)
                end = Node(_name(slot), "NoOp", device=name)
                followed = {t.node for node in nodes for t in node.inputs}
                followed.update(c for node in nodes for c in node.control_inputs)
                end.control_inputs = [node for node in nodes if node not in followed and node not in merged]
                if before is not None:
                    for node in nodes:
                        operands = {t.node for t in node.inputs}
                        if not inside.intersection(operands) and node not in merged:
                            node.control_inputs.append(before)
                    end.control_inputs.append(before)
                ends[slot] = before = graph.add(end)
        return ends


def _written_variables(graph: Graph) -> set[str]:
    nodes = (node for node in graph.nodes.values() if node.may_write_variable)
    return {handle.name for node in nodes for handle in node.variable_handles}


def owner_device(schedule: Schedule, stage: int) -> int:
    """Return the index of the device that keeps the weights of a stage: that of the first micro-batch."""
    return schedule.device_of(Slot(Direction.FORWARD, 0, stage))


class _Placement:
    """Assigns a device to every op: that of its slot, of its variable, or of its operands."""

    def __init__(self, spec: PipelinePass, unrolled: UnrolledStep) -> None:
        self.stages = spec.stages
        self.schedule = spec.schedule
        self.devices = spec.devices
        self.graph = unrolled.graph
        self.origin = unrolled.origin

    def run(self) -> None:
        order = self.graph.execution_order()
        late = []
        for node in order:
            if node.op == "Const":
                continue
            stage = self.stages.of.get(self.origin[node].source)
            node.metadata = dataclasses.replace(node.metadata, stage=stage)
            device = self._device(node, self.origin[node])
            if device is None:
                late.append(node)
            else:
                node.device = device
        reading = self._readers() if late else {}
        for node in reversed(late):  # Ops without a stage, and without placed operands, follow their consumers.
            readers = reading.get(node, ())
            node.device = next((reader.device for reader in readers if reader.device), HOST)
        self._spread_constants()
        self._bring_to_loops()

    def _readers(self) -> dict[Node, list[Node]]:
        readers_of: dict[Node, list[Node]] = {}
        for tensor, readers in self.graph.consumers().items():
            readers_of.setdefault(tensor.node, []).extend(reader for reader, _ in readers)
        return readers_of

    def _device(self, node: Node, origin: Origin) -> str | None:
        if node.op == "Placeholder":
            return ""
        if origin.role is Role.SPLIT:
            return HOST
        if origin.source in self.stages.fixed:
            return origin.source.device
        for handle in origin.source.variable_handles if origin.role in (Role.MICRO_BATCH, Role.SHARED) else ():
            if handle in self.devices.of_variable:
                return self.devices.of_variable[handle]
        stage = self.stages.of.get(origin.source)
        if stage is not None:
            if origin.role is Role.MICRO_BATCH:
                slot = Slot(Direction.FORWARD, origin.micro_batch or 0, stage)
                return self.devices.names[self.schedule.device_of(slot)]
            return self.devices.names[owner_device(self.schedule, stage)]
        placed = [t for t in node.inputs if t.node.device]
        if not placed:
            return None
        # The update of a weight is where its gradient and its slots are, not where a number is that it is scaled with.
        return max(placed, key=lambda tensor: tensor.num_bytes()).node.device

    def _spread_constants(self) -> None:
        """Copy constants to each device that reads them, so that none is sent."""
        readers = self.graph.consumers()
        results = set(self.graph.outputs)
        for node in [node for node in self.graph.nodes.values() if node.op == "Const"]:
            by_device: dict[str, list[Node]] = {}
            for reader, _ in readers.get(node.out(), ()):
                by_device.setdefault(reader.device, []).append(reader)
            first, *others = by_device or [HOST]
            node.device = first
            for number, device in enumerate(others, 1):
                name = f"{node.name}/on_device_{number}"
                new = self.graph.new_node(name, "Const", attrs=node.attrs, device=device, outputs=node.outputs)
                self.origin[new] = self.origin[node]
                for reader in by_device[device]:
                    reader.inputs = [new.out() if t == node.out() else t for t in reader.inputs]
            assert node.out() not in results or node.device

    def _bring_to_loops(self) -> None:
        """Copy the operands of each loop to its device before the loop begins.

        TensorFlow keeps each loop variable on the device of its initial value, and would send loop invariants in every
        iteration.
        """
        brought: dict[tuple[Tensor, str], Tensor] = {}
        for loop in [node for node in self.graph.nodes.values() if node.op in LOOPS]:
            for position, tensor in enumerate(loop.inputs):
                if tensor.node.device == loop.device or tensor.dtype in (tf.resource, tf.variant):
                    continue
                key = tensor, loop.device
                if key not in brought:
                    node = self.graph.new_node(
                        f"{tensor.node.name}/for_loop",
                        "Identity",
                        [tensor],
                        attrs=op_attrs(T=tensor.dtype),
                        device=loop.device,
                        outputs=[(tensor.dtype, tensor.shape)],
                    )
                    self.origin[node] = Origin(Role.COMBINE, loop)
                    brought[key] = node.out()
                loop.inputs[position] = brought[key]


def _name(slot: Slot) -> str:
    phase = "forward" if slot.kind is Direction.FORWARD else "backward"
    return f"pipeline/stage_{slot.stage}/{phase}_{slot.micro_batch}"
