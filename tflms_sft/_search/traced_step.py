"""The traced step that planners work on, and the prediction of its peak and time."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Collection, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from rewriters.analysis.autodiff_roles import is_autodiff_name
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize.canonicalize import CanonicalMode, read_canonical
from rewriters.device.loop_lists import add_loop_facts, loop_iterations
from rewriters.device.peak_memory import AllocationTrace, IterationTrace, Peak, graph_peak, graph_schedule
from rewriters.emission.file_buffers import FileBuffers
from rewriters.emission.loop_tensors import loop_input_tensors, loop_output_tensors
from rewriters.emission.tile_pass import SegmentPlan, loop_nodes, tile_skeleton
from rewriters.estimates.loop_memory import IterationModelCache
from rewriters.estimates.op_cost import NOMINAL, CostModel, MachineRates, sum_in_order
from rewriters.ir import tf_internals
from rewriters.ir.device_model import DeviceModel
from rewriters.ir.graph import Graph, Node, Tensor
from rewriters.scheduling.memory_order import MemoryOrder, in_memory_order
from rewriters.tiling.segment import Segment
from rewriters.tiling.tile_planner import TileLoop
from tflms_sft._machine.memory_info import exceeds_page_cache
from tflms_sft._trace.layer_names import LayerRecord, display_names
from tflms_sft._trace.step_tracing import arguments_of

MIN_ORDERED_BYTES = 2**18
"""Bytes of a result from which on an op is large in a `MemoryOrder`."""

MAX_SKELETONS = 8
"""Traces of skeletons that are cached, of about a megabyte each."""

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A plan for the whole step with its prediction.

    Attributes:
        plans: Segments to tile.
        peak: Predicted peak.
        time_ratio: Predicted time over that of the original step.
        files: Rule that selects the results of loops that lie in files, if any.
        order: Control edges of the step in tiles.
    """

    plans: list[SegmentPlan]
    peak: Peak
    time_ratio: float
    files: FileBuffers | None = None
    order: MemoryOrder = MemoryOrder.EXECUTOR


@dataclasses.dataclass(frozen=True)
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
        order: Control edges of the step in tiles.
        mode: Mode of canonicalization.
        found: Called with the time, over that of the original step, of each plan that a search finds within the budget.
        models: Models of memory and time. A copy shares them unless it differs in what they depend on.
    """

    concrete_fn: Any
    analysis: GraphAnalysis
    record: LayerRecord
    batch: int
    batch_is_fixed: bool
    variables: Sequence[int]
    forward: Container[str] = ()
    devices: Sequence[str] = ()
    rates: MachineRates = NOMINAL
    excess_bytes: int = 0
    in_used_process: bool = False
    files: FileBuffers | None = None
    order: MemoryOrder = MemoryOrder.EXECUTOR
    mode: CanonicalMode = CanonicalMode.TILING
    found: Callable[[float], None] | None = dataclasses.field(default=None, repr=False)
    models: StepModels = dataclasses.field(default=None, repr=False)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        basis = (self.analysis, self.batch, tuple(self.variables), tuple(self.devices), self.rates, self.files)
        if self.models is None or self.models.basis != basis:
            object.__setattr__(self, "models", StepModels(basis, IterationModelCache(self.analysis, self.files)))

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

    @property
    def loop_memory(self) -> IterationModelCache:
        """Memory estimates of planned tile loops."""
        return self.models.loop_memory

    @property
    def costs(self) -> CostModel:
        """Cost model of the ops."""
        return self.once("costs", lambda: CostModel(self.analysis, self.batch, self.rates))

    @property
    def seconds(self) -> float:
        """Time of the original step."""
        return self.once("seconds", lambda: self.costs.step(self.analysis.order))

    @property
    def loop_iterations(self) -> dict[str, list[IterationTrace]]:
        """Allocations of an iteration of each loop of the original step, by the loop's name."""
        return self.once("loop_iterations", lambda: loop_iterations(self.analysis.graph, self.batch))

    @property
    def plain(self) -> Candidate:
        """Prediction of the original step."""
        return self.once("plain", lambda: predict(self, []))

    @functools.cached_property
    def names(self) -> Mapping[Tensor, str]:
        """Layer names of tensors, for plans and errors."""
        return display_names(self.analysis.graph, self.record)

    def once(self, name: str, compute: Callable[[], T]) -> T:
        """Return a part of the models, which is computed when it is first needed."""
        parts = self.models.parts
        if name not in parts:
            parts[name] = compute()
        result: T = parts[name]
        return result


@dataclasses.dataclass
class StepModels:
    """Models of the memory and time of a step, which searches fill.

    Attributes:
        basis: All that they depend on.
        loop_memory: Memory estimates of planned tile loops.
        parts: Cost model, predictions of the original step, and the search for tiles, by name.
        skeletons: Traces of skeletons, and names of their loops, by the reads and results of the loops.
        prepared: Analyses of the graph prepared for swaps: without copies by scopes, and with large ops in order by the
            minimum bytes of large results, and scopes.
    """

    basis: tuple[Any, ...]
    loop_memory: IterationModelCache
    parts: dict[str, Any] = dataclasses.field(default_factory=dict)
    skeletons: dict[Hashable, tuple[AllocationTrace, dict[tuple[str, str], str]]] = dataclasses.field(
        default_factory=dict
    )
    prepared: dict[Hashable, GraphAnalysis] = dataclasses.field(default_factory=dict)


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
    record = record or LayerRecord()
    graph = read_canonical(concrete_fn, mode, merge_constants=merge_constants, sizes=sizes, layer_of=record.layer_of)
    for node in graph.nodes.values() if not keep_devices else ():
        node.device = ""
    misleading = any(is_autodiff_name(call.layer) for call in record.calls)
    forward: Collection[str] = record.layer_of_op.keys() if misleading else ()
    analysis = GraphAnalysis(graph, forward=forward)
    if analysis.differentiated:  # In a graph with loops, data flow no longer shows that they are forward.
        forward = {*forward, *(node.name for node in analysis.differentiated)}
    if mode is CanonicalMode.TILING:
        analysis.refuse_hidden_gradients()
    else:  # A swapped tensor, or one sent to a stage, returns for the backward pass.
        analysis.require_backward()
    analysis.mark_roles()
    return TracedStep(
        concrete_fn,
        analysis,
        record,
        planned_batch,
        fixed_batch is not None,
        tf_internals.variable_sizes(concrete_fn),
        forward,
        mode=mode,
    )


def with_sizes(traced: TracedStep, sizes: Mapping[int, int]) -> TracedStep:
    """Return a traced step for other leading sizes of all its open arguments, by position; static sizes stay."""
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


def predict(traced: TracedStep, plans: list[SegmentPlan], *, limit: int | None = None) -> Candidate:
    """Return a plan with its prediction; `limit` is that of `predicted_peak`."""
    peak = predicted_peak(traced, plans, limit=limit)
    return Candidate(plans, peak, time_ratio(traced, plans), traced.files, traced.order)


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
    skeletons = traced.models.skeletons
    borders = ((plan.segment, tuple(_borders(plan.segment, tile_loop) for tile_loop in plan.loops)) for plan in plans)
    key = (traced.order, *borders)
    if key not in skeletons:
        while len(skeletons) >= MAX_SKELETONS:
            del skeletons[next(iter(skeletons))]
        graph = skeleton(traced, plans) if plans else traced.analysis.graph
        loops = loop_nodes(graph)
        skeletons[key] = graph_schedule(graph, set(loops.values()), traced.batch, traced.variables), loops
    return skeletons[key]


def skeleton(traced: TracedStep, plans: list[SegmentPlan]) -> Graph:
    """Return the graph of a step in tiles, with loops that have no bodies."""
    return in_order(traced, tile_skeleton(traced.analysis, plans, traced.files))


def in_order(traced: TracedStep, graph: Graph) -> Graph:
    """Return the graph of a step in tiles with the control edges of the step's order."""
    if traced.order is MemoryOrder.EXECUTOR:
        return graph
    scopes = backward_scopes(graph)
    analysis = GraphAnalysis(graph, scopes, traced.forward)
    return in_memory_order(analysis, MIN_ORDERED_BYTES, traced.batch, scopes, traced.forward, order=traced.order).graph


def backward_scopes(graph: Graph, scopes: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the scopes of ops that are backward: the given ones, and those of backward loops with their buffers."""
    loops = (name for (_, phase), name in loop_nodes(graph).items() if phase.startswith("backward"))
    return (*scopes, *(name.rpartition("/")[0] for name in loops))


def original_allocations(traced: TracedStep) -> AllocationTrace:
    """Return the allocations of the original step, without those of iterations of its loops."""
    return _skeleton_trace(traced, [])[0]


def tile_loop_names(traced: TracedStep, plans: list[SegmentPlan]) -> dict[tuple[str, str], str]:
    """Return the names of the tile loops in a rewritten graph, by segment and loop."""
    return _skeleton_trace(traced, plans)[1]


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


def least_peak(traced: TracedStep, plans: Sequence[SegmentPlan]) -> int:
    """Return a lower bound of the peak of a step with any swaps; it takes much less time than `predicted_peak`.

    While a loop runs, variables, arguments, the results of earlier loops that it reads, its own results that a later
    loop reads, and an iteration are in memory. Operands from outside may share the memory of an argument.
    """
    most = 0
    for plan in plans:
        writers: dict[Tensor, int] = {}
        beside: list[dict[tuple[Tensor, int], None]] = [{} for _ in plan.loops]
        for number, tile_loop in enumerate(plan.loops):
            for tensor in (tensor for tensor in tile_loop.reads if tensor in writers):
                result = tensor, writers[tensor]  # A later loop may compute the same tensor again.
                beside[number][result] = beside[writers[tensor]][result] = None
            writers.update(dict.fromkeys(loop_output_tensors(tile_loop), number))
        for tile_loop, results in zip(plan.loops, beside, strict=True):
            num_bytes = sum(traced.resident_bytes(tensor) for tensor, _ in results)
            most = max(most, num_bytes + traced.loop_memory.peak_bytes(tile_loop, traced.batch))
    return traced.held_bytes + most if most else 0


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
