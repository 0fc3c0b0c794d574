"""Report of a pipeline: times and bytes of its stages, and the plan."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Container, Mapping, Sequence

import tensorflow as tf

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize.canonicalize import CanonicalMode
from rewriters.device.kernel_scratch import op_scratch
from rewriters.device.peak_memory import concurrent_scratch, most_alive
from rewriters.emission.tile_pass import SegmentPlan, loop_nodes
from rewriters.ir import tf_internals
from rewriters.ir.graph import LOOPS, Node, Tensor
from rewriters.pipelining.pipeline_pass import Pipelined, owner_device
from rewriters.pipelining.schedule_simulator import draw, simulate
from rewriters.pipelining.schedules import Direction, Schedule
from rewriters.pipelining.stage_assignment import Stages, scheduled_ops, stage_transfers
from rewriters.pipelining.stage_passes import StagedStep
from rewriters.swapping.swap_pass import Swap
from rewriters.swapping.tiers import DiskTier, HostTier
from rewriters.tiling.ft_segments import SkippedOps
from tflms_sft._params import device_names
from tflms_sft._params.swap_params import SwapParams
from tflms_sft._planner.plan_description import described_segments, prediction, reasons
from tflms_sft._planner.swap_planner import with_swap_records
from tflms_sft._report.pipeline_plan import PlannedPipeline, PlannedStage
from tflms_sft._report.plan import Plan, amend_plan
from tflms_sft._report.plan_records import PlannedSwap, Prediction
from tflms_sft._search.traced_step import TracedStep, analyse_step, predict
from tflms_sft._trace.batch_traces import BatchTraces
from tflms_sft._trace.layer_names import captured, display_names

WITH_THE_SLOT = "the previous slot"
"""Start of a swap-in that no op in its own slot triggers."""


@dataclasses.dataclass(frozen=True)
class Inside:
    """Tile loops and swaps inside of stages.

    Attributes:
        staged: The step of a micro-batch with them.
        plans: Segments to tile.
        left: Ops that cannot be tiled, with reasons.
        tier: Destination of swapped tensors, if any.
        swaps: Parameters of the swaps.
    """

    staged: StagedStep
    plans: Sequence[SegmentPlan] = ()
    left: Sequence[SkippedOps] = ()
    tier: HostTier | DiskTier | None = None
    swaps: SwapParams | None = None


@dataclasses.dataclass(frozen=True)
class Planned:
    """Inputs of a pipeline's plan.

    Attributes:
        traces: The step.
        traced: Its analysis for one micro-batch, without tile loops and swaps.
        inside: Tile loops and swaps.
        cuts: Tensors that stages end with.
        schedule: Slots of the devices.
        devices: Their names.
        built: The pipeline.
        where: Devices of variables by their handles, where they are known.
    """

    traces: BatchTraces
    traced: TracedStep
    inside: Inside
    cuts: Sequence[Sequence[Tensor]]
    schedule: Schedule
    devices: Sequence[str]
    built: Pipelined
    where: Mapping[Tensor, str]

    @property
    def staged(self) -> StagedStep:
        """Staged step of a micro-batch."""
        return self.inside.staged

    @property
    def stages(self) -> Stages:
        """Stages of the step."""
        return self.staged.stages

    @property
    def analysis(self) -> GraphAnalysis:
        """Analysis of the step, with tile loops and swaps."""
        return self.staged.analysis

    @functools.cached_property
    def crossings(self) -> list[tuple[Tensor, int, int]]:
        """Tensors sent between stages; a swapped tensor is sent as a key of its tier."""
        return [item for item in stage_transfers(self.analysis, self.stages) if item[0].node not in self.staged.outs]

    @functools.cached_property
    def sizes_of_variables(self) -> list[tuple[Tensor, int]]:
        """Bytes of each variable, by its handle."""
        handles = (handle for handle, _ in captured(self.traces.micro, self.analysis.graph))
        return list(zip(handles, tf_internals.sizes_of_variables(self.traces.micro), strict=True))

    @functools.cached_property
    def names(self) -> Mapping[Tensor, str]:
        """Layer names of tensors."""
        return display_names(self.analysis.graph, self.traced.record)


class _Stage:
    """Ops of a stage for one micro-batch, in order, and the bytes of its weights and of the optimizer's slots."""

    def __init__(self, planned: Planned, number: int) -> None:
        analysis, parts, outs = planned.analysis, planned.staged.parts, planned.staged.outs
        stage_ops = [n for n in analysis.order if n in parts.per_micro_batch and planned.stages.of.get(n) == number]
        self.planned = planned
        self.batch = planned.traced.batch
        self.readers = analysis.consumers
        self.tile_loops = planned.staged.tile_loops
        self.forward = [n for n in stage_ops if n not in analysis.backward]
        self.backward = [n for n in stage_ops if n in analysis.backward]
        forward = {n for n in parts.per_micro_batch if n not in analysis.backward and n not in outs}
        # A tensor that the backward phase of a later stage sends is alive only while it is read.
        read = dict.fromkeys(t for node in self.backward for t in node.inputs if t.node in forward)
        self.waiting_bytes = sum(t.num_bytes(self.batch) for t in read)
        sizes, owner, beside = planned.sizes_of_variables, planned.stages.owner, planned.stages.beside
        self.weight_bytes = sum(size for handle, size in sizes if owner.get(handle) == number)
        # Counters and metrics belong to no stage, and count as slots of the first one.
        slots = (size for handle, size in sizes if handle not in owner and beside.get(handle, 0) == number)
        self.slot_bytes = sum(slots)

    def working(self, nodes: Sequence[Node]) -> int:
        """Return the peak bytes of the results of some ops."""
        inside, away = set(nodes), self.planned.staged.outs
        results = (node.out(index) for node in nodes for index in range(len(node.outputs)))
        outside = [t for t in results if any(reader not in inside for reader, _ in self.readers.get(t, ()))]
        here = [node for node in nodes if node not in away]
        scratch = concurrent_scratch({node: self._own_bytes(node) for node in here}, here, self.planned.traced.device)
        return most_alive(here, self.batch, outside, scratch)

    def _own_bytes(self, node: Node) -> int:
        """Return the bytes that an op needs while it runs; for a loop, those of an iteration."""
        if node in self.tile_loops:
            return (
                self.planned.traced.loop_memory.peak_bytes(self.tile_loops[node], self.batch) if node.op in LOOPS else 0
            )
        return op_scratch(node, self.batch, self.planned.traced.device)

    def seconds(self, nodes: Sequence[Node]) -> float:
        """Return the predicted time of some ops, with swaps running concurrently."""
        planned, costs = self.planned, self.planned.traced.costs
        known = planned.traced.analysis.graph.nodes
        step_seconds = costs.step([known[node.name] for node in nodes if node.name in known])
        step_seconds += sum(
            costs.tile_loop(self.tile_loops[node]) for node in nodes if node in self.tile_loops and node.op in LOOPS
        )
        if planned.inside.swaps is None:
            return step_seconds
        inside = {node.name for node in nodes}
        out = sum(node.inputs[0].num_bytes(self.batch) for node in nodes if node in planned.staged.outs)
        back = sum(
            swap.tensor.num_bytes(self.batch)
            for swap in planned.staged.swaps
            for way in swap.swap_ins
            if any(reader.name in inside for reader in way.readers)
        )
        to_disk = isinstance(planned.inside.tier, DiskTier) and not planned.inside.swaps.page_cache
        return planned.traced.rates.swapped(step_seconds, out, back, to_disk)


def plan_of(planned: Planned) -> Plan:
    """Return the plan of a pipeline."""
    traces, traced, schedule, names = planned.traces, planned.traced, planned.schedule, planned.names
    one = schedule.micro_batches == 1
    whole = traced if one else analyse_step(traces.whole, None, traces.batch, CanonicalMode.EXACT)
    whole = dataclasses.replace(whole, rates=traced.rates)
    stages = [_Stage(planned, number) for number in range(planned.stages.count)]
    described = tuple(_described(planned, number, stage) for number, stage in enumerate(stages))
    simulation = simulate(
        schedule,
        [stage.forward_seconds for stage in described],
        [stage.backward_seconds for stage in described],
        [stage.transfer_seconds for stage in described[:-1]],
    )
    pipeline = PlannedPipeline(
        schedule=schedule.name,
        micro_batches=schedule.micro_batches,
        data_replicas=schedule.data_replicas,
        stages=described,
        devices=tuple(planned.devices),
        slots=tuple(tuple(f"{s.kind.value}{s.micro_batch}.{s.stage}" for s in slots) for slots in schedule.devices),
        peak_bytes=_peaks(planned, stages),
        seconds=simulation.seconds,
        idle=simulation.bubble,
        crossing=tuple((names.get(t, t.name), a, b, t.num_bytes(traced.batch)) for t, a, b in planned.crossings),
        results=_results(planned),
        chart=draw(simulation),
    )
    original = prediction(whole, predict(whole, [], limit=0), whole.analysis.graph)
    fixed = max(stage.weight_bytes + stage.slot_bytes for stage in stages)
    ratio = simulation.seconds / whole.seconds
    after = Prediction(max(pipeline.peak_bytes), fixed, ratio, (), seconds=simulation.seconds)
    segments, outside = described_segments(traced, planned.inside.plans)
    plan = Plan(
        changed=True,
        batch=whole.batch,
        batch_is_fixed=whole.batch_is_fixed,
        segments=segments,
        rest_waiting_bytes=outside.waiting_bytes,
        rest_time_share=outside.time_share,
        left_alone=reasons(traced, planned.inside.left),
        original=original,
        predicted=after,
        pipeline=pipeline,
    )
    return plan if planned.inside.tier is None else _with_swaps(planned, planned.inside.tier, plan)


def _with_swaps(planned: Planned, tier: HostTier | DiskTier, plan: Plan) -> Plan:
    """Return the plan with the swaps of one micro-batch."""
    staged = planned.staged
    plan = with_swap_records(plan, planned.traced, staged.analysis.graph, staged.swaps, staged.left, tier)
    slotted = set(scheduled_ops(staged.analysis, staged.parts, staged.stages))
    pairs = zip(staged.swaps, plan.swaps, strict=True)
    return amend_plan(plan, swaps=tuple(_in_stages(planned, slotted, swap, record) for swap, record in pairs))


def _in_stages(planned: Planned, slotted: Container[Node], swap: Swap, planned_swap: PlannedSwap) -> PlannedSwap:
    """Move swap-ins that another stage would trigger to the slot of their consumers."""
    nodes, of = planned.analysis.graph.nodes, planned.stages.of
    controls = []
    for way, name in zip(swap.swap_ins, planned_swap.controls, strict=True):
        control, stages = nodes[way.control.name], {of.get(nodes[reader.name]) for reader in way.readers}
        controls.append(name if control in slotted and {of[control]} == stages else WITH_THE_SLOT)
    return dataclasses.replace(planned_swap, controls=tuple(controls))


def _described(planned: Planned, number: int, stage: _Stage) -> PlannedStage:
    traced, cuts, names = planned.traced, planned.cuts, planned.names
    analysis, batch = planned.analysis, traced.batch
    forward = [(t, a, b) for t, a, b in planned.crossings if t.node not in analysis.backward]
    sent = sum(t.num_bytes(batch) for t in {t for t, source, _ in forward if source == number})
    come = dict.fromkeys(names.get(t, t.name) for t, source, target in forward if source < number == target)
    return PlannedStage(
        number=number,
        devices=tuple(planned.devices[index] for index in _devices_of(planned.schedule, number)),
        entries=tuple(come),
        exit=", ".join(traced.names.get(t, t.name) for t in cuts[number]) if number < len(cuts) else "",
        forward_ops=len(stage.forward),
        backward_ops=len(stage.backward),
        weight_bytes=stage.weight_bytes + stage.slot_bytes,
        waiting_bytes=stage.waiting_bytes,
        forward_seconds=stage.seconds(stage.forward),
        backward_seconds=stage.seconds(stage.backward),
        transfer_bytes=sent,
        transfer_seconds=sent / traced.rates.copied,
        segments=_names_in(planned, number),
    )


def _names_in(planned: Planned, number: int) -> tuple[str, ...]:
    """Return the names of the segments of a stage."""
    by_name = {node.name: stage for node, stage in planned.stages.of.items()}
    loops = {
        segment: by_name[name] for (segment, _), name in loop_nodes(planned.analysis.graph).items() if name in by_name
    }
    return tuple(p.segment.name for p in planned.inside.plans if loops.get(p.segment.name) == number)


def _devices_of(schedule: Schedule, stage: int) -> list[int]:
    """Return the devices that run a stage, the owner of its weights first."""
    first = owner_device(schedule, stage)
    return [first, *(other for other in schedule.devices_of(stage) if other != first)]


def _peaks(planned: Planned, stages: Sequence[_Stage]) -> tuple[int, ...]:
    """Return the predicted peak of each device: variables and their copies, accumulated gradients, activations.

    Activations are the tensors saved for the backward pass and the results of a slot, or at the end of the update.
    """
    schedule = planned.schedule
    working = [
        {Direction.FORWARD: stage.working(stage.forward), Direction.BACKWARD: stage.working(stage.backward)}
        for stage in stages
    ]
    variable_bytes, weight_bytes = _variables_on(planned)
    result = []
    for number, slots in enumerate(schedule.devices):
        read = sum(stages[stage].weight_bytes for stage in schedule.stages_on(number))
        homes = [stage for stage in schedule.stages_on(number) if owner_device(schedule, stage) == number]
        copies = read - weight_bytes[number]
        added = sum(stages[stage].weight_bytes for stage in homes) if schedule.micro_batches > 1 else 0
        alive, most = 0, 0
        for slot in slots:
            most = max(most, alive + working[slot.stage][slot.kind])
            waiting = stages[slot.stage].waiting_bytes
            alive += waiting if slot.kind is Direction.FORWARD else -waiting
            most = max(most, alive)
        result.append(variable_bytes[number] + max(copies + added + most, _of_update(planned, number)))
    return tuple(result)


def _variables_on(planned: Planned) -> tuple[list[int], list[int]]:
    """Return the bytes of variables on each device, and those of the weights of its own stages.

    A variable of unknown device counts on the device of its stage.
    """
    stages, schedule = planned.stages, planned.schedule
    variable_bytes, weight_bytes = [0] * len(planned.devices), [0] * len(planned.devices)
    for handle, size in planned.sizes_of_variables:
        stage = stages.owner.get(handle, stages.beside.get(handle))
        number = owner_device(schedule, stage or 0)
        place = planned.where.get(handle, planned.devices[number])
        if not device_names.is_same_device(planned.devices[number], place):
            number = next((n for n, name in enumerate(planned.devices) if device_names.is_same_device(name, place)), -1)
        if number >= 0:  # Else it is on a device that runs nothing.
            variable_bytes[number] += size
            weight_bytes[number] += size if handle in stages.owner and stage in schedule.stages_on(number) else 0
    return variable_bytes, weight_bytes


def _of_update(planned: Planned, number: int) -> int:
    """Return the bytes of a device during the update: gradients, values computed from them, and received tensors."""
    batch = planned.traced.batch
    graph = planned.built.graph
    names = {node.name for node in planned.staged.parts.update}
    update = [n for n in graph.execution_order() if n.name in names]
    here = [n for n in update if n.device and device_names.is_same_device(n.device, planned.devices[number])]
    here = [n for n in here if n.op != "ReadVariableOp"]  # A read of a variable on its device allocates nothing.
    computed, local = set(update), set(here)
    inputs = {t for node in here for t in node.inputs if t.node not in local and t.dtype != tf.resource}
    gradients = {t for t in inputs if t.node not in computed and t.node.op != "ReadVariableOp"}
    come = [t for t in inputs - gradients if not device_names.is_same_device(t.node.device, planned.devices[number])]
    largest = max((t.num_bytes(batch) for t in come), default=0)  # Each is read as soon as it arrives.
    return sum(t.num_bytes(batch) for t in gradients) + largest + most_alive(here, batch)


def _results(planned: Planned) -> tuple[tuple[str, str], ...]:
    """Return the reduction of each result of micro-batches."""
    outputs, combined = planned.analysis.graph.outputs, planned.built.combined
    return tuple((planned.staged.traced(t).name, combined[t].value) for t in dict.fromkeys(outputs) if t in combined)
