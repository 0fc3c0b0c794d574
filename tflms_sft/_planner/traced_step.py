"""The traced step that planners work on, the prediction of its peak and time, and the report of a plan."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gc
import itertools
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rewriters.analysis.autodiff_roles import is_autodiff_name
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize.canonicalize import CanonicalMode, read_canonical
from rewriters.device.loop_lists import add_loop_facts, loop_iterations
from rewriters.device.peak_memory import AllocationTrace, IterationTrace, Peak, graph_peak, graph_schedule
from rewriters.emission.file_buffers import FileBuffers
from rewriters.emission.loop_tensors import loop_input_tensors, loop_output_tensors
from rewriters.emission.tile_pass import SegmentPlan, loop_nodes, tile_segments, tile_skeleton
from rewriters.estimates.loop_memory import IterationModelCache
from rewriters.estimates.op_cost import NOMINAL, CostModel, MachineRates, sum_in_order
from rewriters.estimates.unmodelled import unmodelled
from rewriters.ir import tf_internals
from rewriters.ir.device_model import DeviceModel
from rewriters.ir.graph import Graph, Node, Tensor
from rewriters.ir.graph_pass import run_pass
from rewriters.scheduling.updates_after_reads import RunUpdatesAfterReads
from rewriters.tiling.ft_segments import SkippedOps
from rewriters.tiling.segment import Segment
from rewriters.tiling.tile_planner import TileLoop
from tflms_sft._machine.memory_info import exceeds_page_cache
from tflms_sft._report.peak_report import (
    FRAGMENTATION,
    NamedSizes,
    PeakNames,
    largest_tensors,
    saved_in_loops,
    transient_memory,
)
from tflms_sft._report.plan import Plan
from tflms_sft._report.plan_records import Prediction
from tflms_sft._report.segment_report import describe_segment, shares
from tflms_sft._report.summary import MAX_LARGEST
from tflms_sft._report.summary import transient_memory as transient_texts
from tflms_sft._trace.layer_names import LayerRecord, display_names, part_name
from tflms_sft._trace.step_tracing import arguments_of
from tflms_sft._util.byte_sizes import format_bytes
from tflms_sft._util.text import shortened

MAX_SKELETONS = 8
"""Traces of skeletons that are cached, of about a megabyte each."""

MAX_NAMES = 3
"""Names after which a list in a note is cut short."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A plan for the whole step with its prediction.

    Attributes:
        plans: Segments to tile.
        peak: Predicted peak.
        time_ratio: Predicted time over that of the original step.
    """

    plans: list[SegmentPlan]
    peak: Peak
    time_ratio: float


@dataclasses.dataclass
class TracedStep:
    """A traced step, ready to be planned.

    Attributes:
        concrete_fn: The step.
        analysis: Analysis of its canonical graph.
        record: Keras layers seen while it was traced.
        batch: Batch size to plan for.
        batch_is_fixed: Whether the graph fixes the batch size.
        variables: Bytes of each variable.
        forward: Names of ops that are forward in spite of their names: those of layers with misleading names, and ops
            of gradients that the loss depends on.
        devices: GPUs of several replicas, whose loops run concurrently; empty for one replica, and on a CPU.
        rates: Rates of the machine.
        excess_bytes: Measured less predicted peak of an earlier plan, which the limit of all plans is reduced by.
        in_used_process: Whether much other memory had been in use in the process before the earlier plan ran.
        files: Rule that selects the results of tile loops that lie in files; `None` to hold all in memory.
        found: Called with the time, over that of the original step, of each plan that a search finds within the budget.
        skeletons: Traces of skeletons, and names of their loops, by the reads and results of the loops.
        loop_memory: Memory estimates of planned tile loops.
        prepared: Analyses of its graph prepared for swaps: without copies by scopes, and with large ops in order by the
            minimum bytes of large results, and scopes.
    """

    concrete_fn: Any
    analysis: GraphAnalysis
    record: LayerRecord
    batch: int
    batch_is_fixed: bool
    variables: list[int]
    forward: Container[str] = ()
    devices: Sequence[str] = ()
    rates: MachineRates = NOMINAL
    excess_bytes: int = 0
    in_used_process: bool = False
    files: FileBuffers | None = None
    found: Callable[[float], None] | None = dataclasses.field(default=None, repr=False)
    skeletons: dict[Hashable, tuple[AllocationTrace, dict[tuple[str, str], str]]] = dataclasses.field(
        init=False, default_factory=dict, repr=False
    )
    loop_memory: IterationModelCache = dataclasses.field(init=False, repr=False)
    prepared: dict[Hashable, GraphAnalysis] = dataclasses.field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.loop_memory = IterationModelCache(self.device, self.files)

    def use_rates(self, rates: MachineRates) -> None:
        """Set the rates of the machine, and drop the cached times that depend on them."""
        self.rates = rates
        for name in ("costs", "seconds"):
            self.__dict__.pop(name, None)

    @property
    def device(self) -> DeviceModel:
        """The device that the step is planned for."""
        return self.analysis.graph.device

    @property
    def fixed_bytes(self) -> int:
        """Bytes of all variables."""
        return sum(self.variables)

    @functools.cached_property
    def held_bytes(self) -> int:
        """Bytes of all variables and arguments."""
        return self.fixed_bytes + sum(t.num_bytes(self.batch) for t in self.analysis.graph.inputs)

    def resident_bytes(self, tensor: Tensor) -> int:
        """Return the bytes in memory of an image that a loop writes: none if it lies in a file."""
        return 0 if self.files is not None and self.files.holds(tensor) else tensor.num_bytes(self.batch)

    @functools.cached_property
    def costs(self) -> CostModel:
        """Cost model of the ops."""
        return CostModel(self.analysis, self.batch, self.rates)

    @functools.cached_property
    def seconds(self) -> float:
        """Time of the original step."""
        return self.costs.step(self.analysis.order)

    @functools.cached_property
    def loop_iterations(self) -> dict[str, list[IterationTrace]]:
        """Allocations of an iteration of each loop of the original step, by the loop's name."""
        return loop_iterations(self.analysis.graph, self.batch)

    @functools.cached_property
    def plain(self) -> Candidate:
        """Prediction of the original step."""
        return Candidate([], *predict(self, []))


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's cyclic garbage collector while a graph of a hundred thousand objects is built.

    All of them stay in use, and the collector's walks over them take a third of the time.
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
    *,
    merge_constants: bool = True,
    keep_devices: bool = True,
    sizes: Mapping[int, int] | None = None,
) -> TracedStep:
    """Read and analyse a traced step.

    Args:
        concrete_fn: A concrete function.
        record: Keras layers seen while it was traced.
        batch: Batch size where the graph leaves it open.
        mode: Rewritings that canonicalization may do; see `CanonicalMode`.
        merge_constants: Whether to merge equal constants; not for a step that is compared with another trace.
        keep_devices: Whether ops keep the devices that they were traced on.
        sizes: Leading sizes of the arguments to plan for, by position, as far as they are known.

    Raises:
        RewriteError: For `TILING`, if gradients are hidden inside a function or loop; else, if there are none.
    """
    fixed_batch = _static_batch(concrete_fn)
    planned_batch = fixed_batch or batch or 1
    sizes = _sizes_unlike(planned_batch, concrete_fn, sizes or {})
    graph = read_canonical(concrete_fn, mode, merge_constants=merge_constants, sizes=sizes)
    for node in graph.nodes.values() if not keep_devices else ():
        node.device = ""
    record = record or LayerRecord()
    misleading = any(is_autodiff_name(call.layer) for call in record.calls)
    forward: Collection[str] = record.layer_of_op.keys() if misleading else ()
    analysis = GraphAnalysis(graph, forward=forward)
    if analysis.differentiated:  # In a graph with loops, data flow no longer shows that they are forward.
        forward = {*forward, *(node.name for node in analysis.differentiated)}
    if mode is CanonicalMode.TILING:
        analysis.refuse_hidden_gradients()
    else:  # A swapped tensor, or one sent to a stage, returns for the backward pass.
        analysis.require_backward()
    return TracedStep(
        concrete_fn,
        analysis,
        record,
        planned_batch,
        fixed_batch is not None,
        tf_internals.variable_sizes(concrete_fn),
        forward,
    )


def with_sizes(traced: TracedStep, sizes: Mapping[int, int]) -> TracedStep:
    """Return a traced step for other leading sizes of its arguments, by position; static sizes stay.

    Args:
        traced: The step.
        sizes: Leading sizes of all open arguments, by position.
    """
    position = _batch_position(traced.concrete_fn)
    batch = traced.batch if traced.batch_is_fixed or position is None else sizes.get(position, traced.batch)
    sizes = _sizes_unlike(batch, traced.concrete_fn, sizes)
    if not sizes and not traced.analysis.graph.sizes:
        return dataclasses.replace(traced, batch=batch)
    graph = traced.analysis.graph.copy()
    graph.sizes = sizes
    for node in graph.nodes.values():
        node.loop = None  # Facts for other sizes.
    add_loop_facts(graph)
    return dataclasses.replace(traced, analysis=GraphAnalysis(graph, forward=traced.forward), batch=batch)


def _sizes_unlike(batch: int, concrete_fn: Any, sizes: Mapping[int, int]) -> dict[int, int]:
    """Return the leading sizes of open arguments, by position; nothing if all of them are the batch size."""
    shapes = [tensor.shape for tensor in arguments_of(concrete_fn)]
    is_open = {position for position, shape in enumerate(shapes) if shape.rank and shape[0] is None}
    sizes = {position: size for position, size in sizes.items() if position in is_open}
    return {} if set(sizes.values()) <= {batch} else sizes


def _batch_position(concrete_fn: Any) -> int | None:
    """Return the position of the first argument of the highest rank, which has the batch axis; `None` without axes."""
    ranks = [tensor.shape.rank or 0 for tensor in arguments_of(concrete_fn)]
    return ranks.index(max(ranks)) if any(ranks) else None


def _static_batch(concrete_fn: Any) -> int | None:
    """Return the batch size of a traced step; `None` if it is open, 1 without arguments that have axes."""
    position = _batch_position(concrete_fn)
    return 1 if position is None else arguments_of(concrete_fn)[position].shape[0]


def predict(traced: TracedStep, plans: list[SegmentPlan], *, limit: int | None = None) -> tuple[Peak, float]:
    """Return the peak of the step with tile loops, as `predicted_peak` does, and its time over the original step's."""
    return predicted_peak(traced, plans, limit=limit), time_ratio(traced, plans)


def predicted_peak(
    traced: TracedStep,
    plans: list[SegmentPlan],
    *,
    limit: int | None = None,
    graph: Graph | None = None,
    away: Container[Node] = (),
    slow: Mapping[Node, float] | None = None,
    order: Sequence[Node] | None = None,
) -> Peak:
    """Return the peak of the step with tile loops.

    Args:
        traced: The step.
        plans: Its segments.
        limit: Bytes; modelling stops at a peak above it, which need not be the highest.
        graph: The rewritten graph if it exists already; by default its skeleton, which agrees to a few bytes.
        away: Ops of that graph whose results are not in the device's memory.
        slow: Ops of that graph that run concurrently with others, with their seconds.
        order: Order of the ops of that graph, if it is known.
    """
    if graph is None:
        trace, loops = _skeleton_trace(traced, plans)
    else:
        loops = loop_nodes(graph)
        of = op_times(traced, plans, loops)
        names = set(loops.values())
        trace = graph_schedule(
            graph,
            names,
            traced.batch,
            traced.variables,
            away=away,
            slow=slow,
            seconds=lambda node: of(node.name),
            order=order,
        )
    iterations = {
        loops[plan.segment.name, tile_loop.name]: traced.loop_memory.iterations(tile_loop, traced.batch)
        for plan in plans
        for tile_loop in plan.loops
    }
    of_original = traced.loop_iterations if graph is None else loop_iterations(graph, traced.batch)
    return graph_peak(trace, {**of_original, **iterations}, limit, max(len(traced.devices), 1))


def op_times(
    traced: TracedStep, plans: list[SegmentPlan], loops: Mapping[tuple[str, str], str]
) -> Callable[[str], float]:
    """Return a function from the name of an op of a rewritten graph to its seconds; 0 for unknown ops."""
    costs, nodes = traced.costs, traced.analysis.graph.nodes
    loop_seconds = {
        loops[plan.segment.name, tile_loop.name]: costs.tile_loop(tile_loop)
        for plan in plans
        for tile_loop in plan.loops
    }
    return lambda name: loop_seconds.get(name) or (costs.op(nodes[name]) if name in nodes else 0.0)


def _skeleton_trace(traced: TracedStep, plans: list[SegmentPlan]) -> tuple[AllocationTrace, dict[tuple[str, str], str]]:
    """Return the trace of a skeleton, and names of its loops; plans that differ in the number of tiles share it."""
    skeletons = traced.skeletons
    key = tuple((plan.segment, tuple(_borders(plan.segment, tile_loop) for tile_loop in plan.loops)) for plan in plans)
    if key not in skeletons:
        while len(skeletons) >= MAX_SKELETONS:
            del skeletons[next(iter(skeletons))]
        graph = tile_skeleton(traced.analysis, plans, traced.files) if plans else traced.analysis.graph
        loops = loop_nodes(graph)
        skeletons[key] = graph_schedule(graph, set(loops.values()), traced.batch, traced.variables), loops
    return skeletons[key]


def _borders(segment: Segment, tile_loop: TileLoop) -> Hashable:
    """Return all that a skeleton shows of a loop: its inputs, reads and outputs."""
    return (
        tile_loop.name,
        tuple(loop_input_tensors(tile_loop, segment)),
        tuple(tile_loop.reads),
        tuple(loop_output_tensors(tile_loop)),
    )


def seconds_of(traced: TracedStep, plans: list[SegmentPlan]) -> float:
    """Return the time of the step with tile loops, transfers to and from files included."""
    costs = traced.costs
    tiled = costs.step({n for plan in plans for n in (*plan.segment.forward, *plan.segment.backward)})
    loops = [tile_loop for plan in plans for tile_loop in plan.loops]
    seconds = traced.seconds - tiled + sum_in_order(map(costs.tile_loop, loops))
    sizes = sizes_in_files(traced, plans)
    written, read = sum(size for size, _ in sizes), sum(size * times for size, times in sizes)
    return traced.rates.with_files(seconds, written, read, exceeds_page_cache(written)) if sizes else seconds


def time_ratio(traced: TracedStep, plans: list[SegmentPlan]) -> float:
    """Return the time of the step with tile loops over that of the original step."""
    return seconds_of(traced, plans) / traced.seconds


def least_peak(traced: TracedStep, plans: Sequence[SegmentPlan], *, swapped: bool = False) -> int:
    """Return a lower bound of the predicted peak in bytes; it takes much less time than `predicted_peak`.

    While a loop runs, variables, arguments, the tensors that it reads, its results and an iteration are in memory. So
    are tensors that an earlier loop has written and a later one reads, unless they are swapped.

    Args:
        traced: The step.
        plans: Its segments.
        swapped: Whether any tensor may be swapped while no loop uses it.
    """
    iterations = (
        num_bytes + traced.loop_memory.peak_bytes(tile_loop, traced.batch)
        for plan in plans
        for tile_loop, num_bytes in zip(plan.loops, bytes_beside_iterations(traced, plan, swapped=swapped), strict=True)
    )
    return max(iterations, default=0)


def bytes_beside_iterations(traced: TracedStep, plan: SegmentPlan, *, swapped: bool = False) -> list[int]:
    """Return a lower bound of the bytes alive beside the iterations of each loop, in any number of tiles.

    Each result of a loop counts as a tensor of its own, because a later loop may recompute a tensor. Results that no
    loop reads do not count, and neither do operands from outside, which may share the memory of an argument.
    """
    uses: dict[tuple[Tensor, int], list[int]] = {}  # By tensor and loop that writes it: that loop, then its readers.
    writer: dict[Tensor, int] = {}
    for number, tile_loop in enumerate(plan.loops):
        for tensor in tile_loop.reads:
            if tensor in writer:
                uses.setdefault((tensor, writer[tensor]), [writer[tensor]]).append(number)
        writer.update(dict.fromkeys(loop_output_tensors(tile_loop), number))
    # Loops run one after another on each device.
    ordered = len({node.device for tile_loop in plan.loops for node in tile_loop.body}) == 1
    sizes = [traced.held_bytes] * len(plan.loops)
    for (tensor, first), numbers in uses.items():
        num_bytes = traced.resident_bytes(tensor)
        for number in range(first, numbers[-1] + 1) if ordered and not swapped else numbers:
            sizes[number] += num_bytes
    return sizes


def sizes_in_files(traced: TracedStep, plans: Iterable[SegmentPlan]) -> list[tuple[int, int]]:
    """Return the bytes of each result of a loop that lies in a file, and the number of loops that read it."""
    loops = [tile_loop for plan in plans for tile_loop in plan.loops]
    written = [] if traced.files is None else [t for tile_loop in loops for t in traced.files.results(tile_loop)]
    reads = collections.Counter(tensor for tile_loop in loops for tensor in tile_loop.reads)
    return [(tensor.num_bytes(traced.batch), reads[tensor]) for tensor in written]


def peak_file_bytes(traced: TracedStep, plans: Iterable[SegmentPlan]) -> int:
    """Return an upper bound of the bytes of files that exist concurrently.

    A file exists until the last loop that reads it has ended, and the loop after it may have begun. A file that an op
    outside of the loops reads may exist until the step ends. All segments may have their largest files at one time.
    """
    peak_bytes, files = 0, traced.files
    if files is None:
        return 0
    for plan in plans:
        sizes, body = [0] * len(plan.loops), {node for tile_loop in plan.loops for node in tile_loop.body}
        last = {tensor: number for number, tile_loop in enumerate(plan.loops) for tensor in tile_loop.reads}
        for first, tile_loop in enumerate(plan.loops):
            for tensor in files.results(tile_loop):
                is_read_outside = any(reader not in body for reader, _ in traced.analysis.consumers.get(tensor, ()))
                end = last.get(tensor, first)
                end = len(sizes) if is_read_outside or end == first else end + 2
                for number in range(first, min(end, len(sizes))):
                    sizes[number] += tensor.num_bytes(traced.batch)
        peak_bytes += max(sizes, default=0)
    return peak_bytes


def emit_and_describe(
    traced: TracedStep, plans: list[SegmentPlan], left: Sequence[SkippedOps], budget: int | None
) -> tuple[Graph, Plan]:
    """Emit the graph, and return it with its plan.

    Args:
        traced: The step.
        plans: Its segments.
        left: Ops that cannot be tiled, with reasons.
        budget: Bytes, if the plan was made for a budget.
    """
    analysis = traced.analysis
    if plans:
        graph = tile_segments(analysis, plans, traced.files)
    else:
        graph = run_pass(RunUpdatesAfterReads(()), analysis.graph).graph
    names = display_names(analysis.graph, traced.record)
    # For a budget, predict as the search did: by a skeleton, and for every state of the device's memory.
    # Otherwise memory is assumed to be fresh.
    limit = None if budget else 0
    original_peak, ratio = predict(traced, [], limit=limit)
    original = prediction(traced, [], analysis.graph, names, (original_peak, ratio))
    predicted = original
    if plans:
        seen = tile_skeleton(analysis, plans, traced.files) if budget else graph
        peak = predicted_peak(traced, plans, limit=limit, graph=seen)
        predicted = prediction(traced, plans, seen, names, (peak, time_ratio(traced, plans)))
    *parts, outside = shares(traced.costs, plans, traced.seconds)
    plan = Plan(
        changed=bool(plans),
        batch=traced.batch,
        batch_is_fixed=traced.batch_is_fixed,
        segments=tuple(
            describe_segment(traced.costs, traced.loop_memory, plan, share=share, names=names)
            for plan, share in zip(plans, parts, strict=True)
        ),
        rest_waiting_bytes=outside.waiting_bytes,
        rest_time_share=outside.time_share,
        left_alone=reasons(traced, left),
        original=original,
        predicted=predicted,
        memory_budget=budget,
        file_bytes=peak_file_bytes(traced, plans),
        notes=(*_loop_note(traced, original_peak), *_notes(traced)),
    )
    return graph, plan


def _loop_note(traced: TracedStep, peak: Peak) -> tuple[str, ...]:
    """Return a note of the loop whose tensor lists are among the largest tensors at the original step's peak."""
    if not traced.loop_iterations:
        return ()
    _, loops, _ = at_peak(traced, [], dataclasses.replace(peak, largest=peak.largest[:MAX_LARGEST]))
    return tuple(f"the original step saves {format_bytes(size)} inside {name}" for name, size in loops[:1])


def _notes(traced: TracedStep) -> tuple[str, ...]:
    """Return a note of the layers whose memory the prediction leaves out."""
    ops = [node.name for node in unmodelled(traced.analysis)]
    if not ops:
        return ()
    names = dict.fromkeys(_layer_name(traced, op) for op in ops)
    shown = shortened(list(names), MAX_NAMES)
    return (f"not in the predicted peak: memory inside of {shown}, which `tflms_sft.measure` shows",)


def peak_names(traced: TracedStep) -> PeakNames:
    """Return the display names of tensors and ops of the step."""
    return PeakNames(traced.analysis, traced.record, display_names(traced.analysis.graph, traced.record))


def prediction(
    traced: TracedStep,
    plans: list[SegmentPlan],
    graph: Graph,
    names: Mapping[Tensor, str],
    predicted: tuple[Peak, float],
) -> Prediction:
    """Return a prediction as a plan reports it.

    Args:
        traced: The step.
        plans: Its segments.
        graph: The rewritten graph, or its skeleton, that was predicted.
        names: Layers of tensors of the original graph.
        predicted: Peak and time ratio from `predict`.
    """
    peak, ratio = predicted
    shown = PeakNames(traced.analysis, traced.record, names)
    largest = largest_tensors(shown, plans, graph, peak)
    if peak.fragmentation_bytes:
        largest = tuple(sorted((*largest, (FRAGMENTATION, peak.fragmentation_bytes)), key=lambda item: -item[1]))
    return Prediction(
        peak_bytes=peak.peak_bytes,
        fixed_bytes=traced.fixed_bytes,
        time_ratio=ratio,
        largest=largest,
        timeline=peak.timeline,
        progress=_progress(traced, plans, graph, peak.timeline),
        seconds=ratio * traced.seconds,
        own=transient_memory(shown, plans, graph, peak, traced.loop_memory, traced.batch),
    )


def at_peak(traced: TracedStep, plans: list[SegmentPlan], peak: Peak) -> tuple[NamedSizes, NamedSizes, NamedSizes]:
    """Return what takes most memory at a predicted peak, as a plan reports it.

    Returns:
        The largest tensors, tensor lists excluded; the loops with the bytes of their lists; memory of running ops.
    """
    graph = tile_skeleton(traced.analysis, plans, traced.files) if plans else traced.analysis.graph
    shown = peak_names(traced)
    transient = transient_memory(shown, plans, graph, peak, traced.loop_memory, traced.batch)
    tensors = dataclasses.replace(peak, largest=tuple(item for item in peak.largest if item[0] not in graph.nodes))
    return largest_tensors(shown, plans, graph, tensors), saved_in_loops(shown, graph, peak), transient


def _progress(
    traced: TracedStep, plans: list[SegmentPlan], graph: Graph, timeline: Sequence[tuple[str, int]]
) -> tuple[float, ...]:
    """Return the time at which each op begins, over that of the original step."""
    seconds = op_times(traced, plans, loop_nodes(graph))
    *begins, _ = itertools.accumulate((seconds(name) for name, _ in timeline), initial=0.0)
    return tuple(round(done / traced.seconds, 6) for done in begins)


def reasons(traced: TracedStep, left: Sequence[SkippedOps]) -> tuple[tuple[str, str], ...]:
    """Return pairs of a layer and the first reason why it cannot be tiled."""
    reasons: dict[str, str] = {}
    shown = peak_names(traced)
    for item in left:
        names = list(dict.fromkeys(_layer_name(traced, op) for op in (item.name, item.last) if op))
        reasons.setdefault(" to ".join(names), shown.in_text(item.reason, traced.analysis.graph))
    return tuple(reasons.items())


def _layer_name(traced: TracedStep, op: str) -> str:
    return part_name(traced.record, op) or f"op {op!r}"


def takes_most(traced: TracedStep, plans: list[SegmentPlan], peak: Peak) -> tuple[str, str]:
    """Return a text about the largest users of memory at a peak, for an error, and the name of the largest tensor.

    Memory of running ops, and the tensor lists of the loop that saves most, are part of the text if they exceed the
    largest tensor.
    """
    tensors, loops, running_sizes = at_peak(traced, plans, peak)
    name, size = tensors[0] if tensors else ("the variables", traced.fixed_bytes)
    others = [(num_bytes, f"saved inside {loop}") for loop, num_bytes in loops[:1]]
    others += [(num_bytes, text) for text, num_bytes in transient_texts(running_sizes)]
    larger = [f"{format_bytes(num_bytes)} are {text}, " for num_bytes, text in others if num_bytes > size]
    return f"{''.join(larger)}`{name}` is {format_bytes(size)}", name
