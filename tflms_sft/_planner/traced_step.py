"""From a traced step and parameters to a rewritten graph and its plan."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from typing import Any

from rewriters.analysis.autodiff_roles import is_autodiff_name
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize.canonicalize import CanonicalMode, read_canonical
from rewriters.device.peak_memory import AllocationTrace, Peak, graph_peak, graph_schedule
from rewriters.emission.loop_emitter import loop_input_tensors, loop_output_tensors
from rewriters.emission.tile_pass import SegmentPlan, loop_nodes, tile_segments, tile_skeleton
from rewriters.estimates.loop_memory import IterationModelCache
from rewriters.estimates.op_cost import NOMINAL, CostModel, MachineRates
from rewriters.estimates.unmodelled import unmodelled
from rewriters.ir import tf_internals
from rewriters.ir.graph import Graph, Node, Tensor
from rewriters.tiling.ft_segments import SkippedOps
from rewriters.tiling.segment import Segment
from rewriters.tiling.tile_planner import TileLoop
from tflms_sft._report.peak_report import NamedSizes, PeakNames, largest_tensors, transient_memory
from tflms_sft._report.plan import Plan
from tflms_sft._report.plan_records import Prediction
from tflms_sft._report.segment_report import describe_segment, shares
from tflms_sft._trace.layer_names import LayerRecord, display_names, part_name
from tflms_sft._util.text import shortened

MOST_OUTLINES = 8
"""Schedules of outlines that are kept, of a megabyte or so each."""

MOST_NAMES = 3
"""Names after which a list in a note is cut short."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A plan for the whole step with what the model says of it."""

    plans: list[SegmentPlan]
    peak: Peak
    time_ratio: float


@dataclasses.dataclass
class TracedStep:
    """A traced step, ready to be planned.

    Attributes:
        concrete_fn: The step.
        analysis: Of its normalised graph.
        record: Keras layers seen while it was traced.
        batch: Batch size to plan for.
        batch_is_fixed: Whether the graph knows it.
        variables: Bytes of each variable.
        forward: Names of ops that are forward for sure, where a layer's name misleads.
        rates: Of the machine.
        correction: What an earlier plan was measured to take, over what was predicted.
        outlines: Schedules of outlines, and names of their loops, by what the loops read and make.
        loop_memory: Memory estimates of planned tile loops.
        prepared: Its graph as swaps are planned for it, by the bytes from which on results are large, and scopes.
    """

    concrete_fn: Any
    analysis: GraphAnalysis
    record: LayerRecord
    batch: int
    batch_is_fixed: bool
    variables: list[int]
    forward: Container[str] = ()
    rates: MachineRates = NOMINAL
    correction: float = 1.0
    outlines: dict[Hashable, tuple[AllocationTrace, dict[tuple[str, str], str]]] = dataclasses.field(
        init=False, default_factory=dict, repr=False
    )
    loop_memory: IterationModelCache = dataclasses.field(init=False, default_factory=IterationModelCache, repr=False)
    prepared: dict[Hashable, GraphAnalysis] = dataclasses.field(init=False, default_factory=dict, repr=False)

    def go_by(self, rates: MachineRates) -> None:
        """Take these rates, and forget the times that went by others."""
        self.rates = rates
        for name in ("costs", "seconds"):
            self.__dict__.pop(name, None)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of all variables."""
        return sum(self.variables)

    @functools.cached_property
    def costs(self) -> CostModel:
        """Times of operations."""
        return CostModel(self.analysis, self.batch, self.rates)

    @functools.cached_property
    def seconds(self) -> float:
        """Time of the step as it was."""
        return self.costs.step(self.analysis.order)

    @functools.cached_property
    def plain(self) -> Candidate:
        """The step as it was, which searches compare with again and again."""
        return Candidate([], *predict(self, []))


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Without Python's cyclic garbage collector: a graph is a hundred thousand objects that are all in use.

    The collector walks them again and again while they are made, for a third of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def analyse_step(
    concrete_fn: Any,
    record: LayerRecord | None = None,
    batch: int | None = None,
    mode: CanonicalMode = CanonicalMode.TILING,
) -> TracedStep:
    """Read and analyse a traced step.

    Args:
        concrete_fn: A concrete function.
        record: Keras layers seen while it was traced.
        batch: Batch size where the graph leaves it open.
        mode: Rewritings that canonicalization may do; see `CanonicalMode`.

    Raises:
        RewriteError: For `TILING`, if gradients are hidden inside a function or loop; else, if there are none.
    """
    graph = read_canonical(concrete_fn, mode)
    record = record or LayerRecord()
    misleading = any(is_autodiff_name(call.layer) for call in record.calls)
    forward: Container[str] = record.layer_of_op.keys() if misleading else ()
    analysis = GraphAnalysis(graph, forward=forward)
    if mode is CanonicalMode.TILING:
        analysis.refuse_hidden_gradients()
    else:  # What leaves the device comes back for the backward phase.
        analysis.require_backward()
    known = _static_batch(graph, len(concrete_fn.inputs) - len(concrete_fn.captured_inputs))
    return TracedStep(
        concrete_fn,
        analysis,
        record,
        known or batch or 1,
        known is not None,
        tf_internals.variable_sizes(concrete_fn),
        forward,
    )


def _static_batch(graph: Graph, num_arguments: int) -> int | None:
    """The leading size of the first image argument, or of the first argument that has one."""
    shapes = [t.shape for t in graph.inputs[:num_arguments] if t.shape]
    ranked = sorted(shapes, key=lambda shape: -len(shape))
    return ranked[0][0] if ranked else 1


def predict(
    traced: TracedStep,
    plans: list[SegmentPlan],
    limit: int | None = None,
    graph: Graph | None = None,
    away: Container[Node] = (),
    slow: Mapping[Node, float] | None = None,
) -> tuple[Peak, float]:
    """Peak and relative cost of the step with these tile loops.

    Args:
        traced: The step.
        plans: Its segments.
        limit: A peak above it need not be the worst.
        graph: The rewritten graph if it exists already; an outline of it gives the same to a few bytes.
        away: Ops of that graph whose results are not in the device's memory.
        slow: Ops of that graph that go on beside others, and for how many seconds.
    """
    if graph is None:
        found, loops = _outlined(traced, plans)
    else:
        loops = loop_nodes(graph)
        of = op_times(traced, plans, loops)
        names = set(loops.values())
        found = graph_schedule(
            graph, names, traced.batch, traced.variables, away=away, slow=slow, seconds=lambda node: of(node.name)
        )
    turns = {
        loops[plan.segment.name, tile_loop.name]: traced.loop_memory.iterations(tile_loop, traced.batch)
        for plan in plans
        for tile_loop in plan.loops
    }
    peak = graph_peak(found, turns, limit)
    return peak, seconds_of(traced, plans) / traced.seconds


def op_times(
    traced: TracedStep, plans: list[SegmentPlan], loops: Mapping[tuple[str, str], str]
) -> Callable[[str], float]:
    """What each op of a rewritten graph takes, by its name; nothing, if neither the step nor a loop is known by it."""
    costs, known = traced.costs, traced.analysis.graph.nodes
    taken = {
        loops[plan.segment.name, tile_loop.name]: costs.tile_loop(tile_loop)
        for plan in plans
        for tile_loop in plan.loops
    }
    return lambda name: taken.get(name) or (costs.op(known[name]) if name in known else 0.0)


def _outlined(traced: TracedStep, plans: list[SegmentPlan]) -> tuple[AllocationTrace, dict[tuple[str, str], str]]:
    """The schedule of an outline, and names of its loops; searches ask for loops in other tiles again and again."""
    own = traced.outlines
    key = tuple((plan.segment, tuple(_borders(plan.segment, tile_loop) for tile_loop in plan.loops)) for plan in plans)
    if key not in own:
        while len(own) >= MOST_OUTLINES:
            del own[next(iter(own))]
        graph = tile_skeleton(traced.analysis, plans) if plans else traced.analysis.graph
        loops = loop_nodes(graph)
        own[key] = graph_schedule(graph, set(loops.values()), traced.batch, traced.variables), loops
    return own[key]


def _borders(segment: Segment, tile_loop: TileLoop) -> Hashable:
    """All that an outline shows of a loop: what it reads, waits for, and makes."""
    return (
        tile_loop.name,
        tuple(loop_input_tensors(tile_loop, segment)),
        tuple(tile_loop.reads),
        tuple(loop_output_tensors(tile_loop)),
    )


def seconds_of(traced: TracedStep, plans: list[SegmentPlan]) -> float:
    """Time of the step with these tile loops."""
    costs = traced.costs
    tiled = costs.step({n for plan in plans for n in (*plan.segment.forward, *plan.segment.backward)})
    return traced.seconds - tiled + sum(costs.tile_loop(tile_loop) for plan in plans for tile_loop in plan.loops)


def emit_and_describe(
    traced: TracedStep, plans: list[SegmentPlan], left: Sequence[SkippedOps], budget: int | None
) -> tuple[Graph, Plan]:
    """Emit the graph and describe it."""
    analysis = traced.analysis
    graph = tile_segments(analysis, plans) if plans else analysis.graph
    names = display_names(analysis.graph, traced.record)
    original = prediction(traced, [], analysis.graph, names, predict(traced, [], limit=0))
    predicted = original
    if plans:
        # A budget has to be kept in every state of the device's memory, as the search saw to, by an outline;
        # otherwise a fresh one tells enough.
        seen, limit = (tile_skeleton(analysis, plans), None) if budget else (graph, 0)
        predicted = prediction(traced, plans, seen, names, predict(traced, plans, limit, seen))
    *parts, rest = shares(traced.costs, plans, traced.seconds)
    plan = Plan(
        changed=bool(plans),
        batch=traced.batch,
        batch_is_fixed=traced.batch_is_fixed,
        segments=tuple(
            describe_segment(traced.costs, traced.loop_memory, plan, share=share, names=names)
            for plan, share in zip(plans, parts, strict=True)
        ),
        rest_waiting_bytes=rest.waiting_bytes,
        rest_time_share=rest.time_share,
        left_alone=reasons(traced, left),
        original=original,
        predicted=predicted,
        memory_budget=budget,
        notes=_notes(traced),
    )
    return graph, plan


def _notes(traced: TracedStep) -> tuple[str, ...]:
    """What the prediction leaves out, by layer."""
    ops = [node.name for node in unmodelled(traced.analysis)]
    if not ops:
        return ()
    names = dict.fromkeys(part_name(traced.record, op) or op for op in ops)
    shown = shortened(list(names), MOST_NAMES)
    return (f"not in the predicted peak, because only a run tells: what is kept inside of {shown}",)


def prediction(
    traced: TracedStep, plans: list[SegmentPlan], graph: Graph, names: Mapping[Tensor, str], found: tuple[Peak, float]
) -> Prediction:
    """As a plan reports it.

    Args:
        traced: The step.
        plans: Its segments.
        graph: The rewritten graph, or an outline of it, that was predicted.
        names: Layers of tensors of the original.
        found: What `predict` told.
    """
    peak, ratio = found
    shown = PeakNames(traced.analysis, traced.record, names)
    return Prediction(
        peak_bytes=peak.peak_bytes,
        fixed_bytes=traced.fixed_bytes,
        time_ratio=ratio,
        largest=largest_tensors(shown, graph, peak),
        timeline=peak.timeline,
        progress=_progress(traced, plans, graph, peak.timeline),
        seconds=ratio * traced.seconds,
        own=transient_memory(shown, plans, graph, peak, traced.loop_memory, traced.batch),
    )


def at_peak(traced: TracedStep, plans: list[SegmentPlan], peak: Peak) -> tuple[NamedSizes, NamedSizes]:
    """What is largest at a predicted peak, and what is taken only while something runs, as a plan reports them."""
    graph = tile_skeleton(traced.analysis, plans) if plans else traced.analysis.graph
    shown = PeakNames(traced.analysis, traced.record, display_names(traced.analysis.graph, traced.record))
    transient = transient_memory(shown, plans, graph, peak, traced.loop_memory, traced.batch)
    return largest_tensors(shown, graph, peak), transient


def _progress(
    traced: TracedStep, plans: list[SegmentPlan], graph: Graph, timeline: Sequence[tuple[str, int]]
) -> tuple[float, ...]:
    """Time gone, over that of the original step, when each op begins."""
    seconds = op_times(traced, plans, loop_nodes(graph))
    *begins, _ = itertools.accumulate((seconds(name) for name, _ in timeline), initial=0.0)
    return tuple(round(done / traced.seconds, 6) for done in begins)


def reasons(traced: TracedStep, left: Sequence[SkippedOps]) -> tuple[tuple[str, str], ...]:
    """(what, why), each layer once with its first reason."""
    reasons: dict[str, str] = {}
    for item in left:
        names = list(dict.fromkeys(_layer_name(traced, op) for op in (item.name, item.last) if op))
        reasons.setdefault(" to ".join(names), item.reason)
    return tuple(reasons.items())


def _layer_name(traced: TracedStep, op: str) -> str:
    call = traced.record.call_of(op)
    return op if call is None else f"layer {call.layer!r} ({call.kind})"


def unsupported_layers(traced: TracedStep, left: Sequence[SkippedOps]) -> list[str]:
    """Layers that this version cannot tile, by name."""
    return [name for name, _ in reasons(traced, left)]
