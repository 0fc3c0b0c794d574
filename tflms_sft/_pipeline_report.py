"""What a pipeline takes: times and bytes of its stages, and the plan that says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rewriters import _tf_private
from rewriters.cost import Costs
from rewriters.graph import Node, Tensor
from rewriters.memory import most_alive
from rewriters.micro import Parts
from rewriters.pipeline import Pipelined
from rewriters.schedules import Pass, Schedule
from rewriters.scratch import op_scratch
from rewriters.simulator import draw, simulate
from rewriters.stages import Stages, crossings
from tflms_sft._calibration import kept_rates
from tflms_sft._compile import Traced, analyse, predict, prediction
from tflms_sft._names import display_names
from tflms_sft._pipeline_plan import PlannedPipeline, PlannedStage
from tflms_sft._plan import Plan

if TYPE_CHECKING:
    from tflms_sft._micro_batches import Traces


class _Stage:
    """Operations of a stage for one micro-batch, in order."""

    def __init__(self, traced: Traced, parts: Parts, stages: Stages, number: int) -> None:
        analysis = traced.analysis
        own = [n for n in analysis.order if n in parts.repeated and stages.of.get(n) == number]
        self.number = number
        self.batch = traced.batch
        self.readers = analysis.readers
        self.forward = [n for n in own if n not in analysis.backward]
        self.backward = [n for n in own if n in analysis.backward]

    def waiting(self) -> list[Tensor]:
        """What the backward phase reads of what is there after the forward phase."""
        made = set(self.backward)
        read = (t for node in self.backward for t in node.inputs if t.node not in made)
        # What a later stage's backward phase sends is there only while it is read.
        return [t for t in dict.fromkeys(read) if not t.node.op == "Const" and not self._is_gradient(t)]

    def _is_gradient(self, tensor: Tensor) -> bool:
        return tensor in self.incoming

    incoming: frozenset[Tensor] = frozenset()

    def working(self, nodes: Sequence[Node]) -> int:
        """The most that is alive of what some of its operations make."""
        inside = set(nodes)
        outside = [
            node.out(index)
            for node in nodes
            for index in range(len(node.outputs))
            if any(reader not in inside for reader, _ in self.readers.get(node.out(index), ()))
        ]
        scratch = {node: op_scratch(node, self.batch) for node in nodes}
        return most_alive(nodes, self.batch, outside, scratch)


def planned(
    traces: Traces,
    traced: Traced,
    parts: Parts,
    stages: Stages,
    schedule: Schedule,
    devices: Sequence[str],
    built: Pipelined,
    cuts: Sequence[Sequence[Tensor]],
) -> Plan:
    """Describe a pipeline."""
    whole = traced if traces.micro is traces.whole else analyse(traces.whole, None, None, for_tiles=False)
    whole.go_by(kept_rates())
    traced.go_by(kept_rates())
    analysis = traced.analysis
    names = display_names(analysis.graph, traced.record)
    crossing = crossings(analysis, stages)
    costs = Costs(analysis, traced.batch, traced.rates)
    weights = _weights(traces, traced, stages)
    found = []
    forward_times, backward_times, activations, peaks = [], [], [], []
    for number in range(stages.count):
        stage = _Stage(traced, parts, stages, number)
        stage.incoming = frozenset(t for t, _, _ in crossing if t.node in analysis.backward)
        waiting = sum(t.num_bytes(traced.batch) for t in stage.waiting() if t.node in parts.repeated)
        forward_times.append(costs.step(stage.forward))
        backward_times.append(costs.step(stage.backward))
        activations.append(waiting)
        peaks.append({Pass.FORWARD: stage.working(stage.forward), Pass.BACKWARD: stage.working(stage.backward)})
        sent = {t for t, source, _ in crossing if source == number and t.node not in analysis.backward}
        come = [t for t, source, target in crossing if target == number and source < number]
        found.append(
            PlannedStage(
                number,
                tuple(devices[index] for index in schedule.devices_of(number)),
                tuple(dict.fromkeys(names.get(t, t.name) for t in come)),
                ", ".join(names.get(t, t.name) for t in cuts[number]) if number < len(cuts) else "",
                len(stage.forward),
                len(stage.backward),
                weights[number],
                waiting,
                forward_times[-1],
                backward_times[-1],
                sum(t.num_bytes(traced.batch) for t in sent),
                sum(t.num_bytes(traced.batch) for t in sent) / traced.rates.copied,
            )
        )
    transfer = [stage.transfer_seconds for stage in found[:-1]]
    simulation = simulate(schedule, forward_times, backward_times, transfer)
    peak_bytes = _peaks(schedule, weights, activations, peaks)
    pipeline = PlannedPipeline(
        schedule.name,
        schedule.micro_batches,
        schedule.data_replicas,
        tuple(found),
        tuple(devices),
        tuple(tuple(f"{slot.kind.value}{slot.micro_batch}.{slot.stage}" for slot in own) for own in schedule.devices),
        peak_bytes,
        simulation.seconds,
        simulation.bubble,
        tuple((names.get(t, t.name), a, b, t.num_bytes(traced.batch)) for t, a, b in crossing),
        _results(built, traced),
        draw(simulation),
    )
    whole_names = display_names(whole.analysis.graph, whole.record)
    original = prediction(whole, [], whole.analysis.graph, whole_names, predict(whole, [], limit=0))
    after = type(original)(
        max(peak_bytes), max(weights), simulation.seconds / whole.seconds, (), (), (), simulation.seconds
    )
    return Plan(
        changed=True,
        batch=whole.batch,
        batch_is_fixed=whole.batch_is_fixed,
        segments=(),
        left_alone=(),
        original=original,
        predicted=after,
        pipeline=pipeline,
    )


def _weights(traces: Traces, traced: Traced, stages: Stages) -> list[int]:
    """Bytes of the variables of each stage, those that the update writes beside its weights included."""
    analysis = traced.analysis
    count = len(traces.micro.inputs) - len(traces.micro.captured_inputs)
    handles_of = analysis.graph.inputs[count:]
    sizes = _tf_private.sizes_of_variables(traces.micro)
    found = [0] * stages.count
    stage_of = {**stages.beside, **stages.owner}
    for handle, size in zip(handles_of, sizes, strict=True):
        if size:
            found[stage_of.get(handle, 0)] += size  # Counters and metrics are few bytes.
    return found


def _peaks(
    schedule: Schedule, weights: Sequence[int], activations: Sequence[int], working: Sequence[Mapping[Pass, int]]
) -> tuple[int, ...]:
    """Of each device: its weights, what waits of micro-batches under way, and what the slot that runs makes."""
    result = []
    for number, slots in enumerate(schedule.devices):
        held = sum(weights[stage] for stage in schedule.stages_on(number))
        alive, most = 0, 0
        for slot in slots:
            most = max(most, alive + working[slot.stage][slot.kind])
            alive += activations[slot.stage] if slot.kind is Pass.FORWARD else -activations[slot.stage]
            most = max(most, alive)
        result.append(held + most)
    return tuple(result)


def _results(built: Pipelined, traced: Traced) -> tuple[tuple[str, str], ...]:
    """How each result that micro-batches make was put together."""
    outputs = traced.analysis.graph.outputs
    return tuple((t.name, built.combined[t].value) for t in dict.fromkeys(outputs) if t in built.combined)
