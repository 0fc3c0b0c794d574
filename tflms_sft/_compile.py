"""From a traced step and parameters to a rewritten graph and its plan."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

from rewriters import _tf_private
from rewriters.analysis import Analysis
from rewriters.cost import phase_cost, step_cost
from rewriters.errors import NotTileableError, SegmentError
from rewriters.ft import LeftAlone, auto_segments
from rewriters.graph import Graph, Node, Tensor
from rewriters.memory import Peak, graph_peak, unmodelled
from rewriters.normalise import read
from rewriters.roles import is_autodiff_name
from rewriters.segments import Segment, build_segment, forward_ops
from rewriters.sft import SegmentPlan, loop_nodes, outline, plan_segment, tile_segments
from rewriters.tiles import Grid, Phase
from rewriters.turns import loop_turns, phase_scratch
from tflms_sft._names import LayerRecord, display_names, resolve
from tflms_sft._params import SegmentSpec, SFTParams, parse_num_tiles
from tflms_sft._plan import Plan, PlannedSegment, Prediction
from tflms_sft._text import shortened

AUTO_TILES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
"""Tiles per axis that are tried, fewest first."""


MOST_NAMES = 3
"""Names after which a list in a note is cut short."""


@dataclasses.dataclass
class Traced:
    """A traced step, ready to be planned.

    Attributes:
        concrete_fn: The step.
        analysis: Of its normalised graph.
        record: Keras layers seen while it was traced.
        batch: Batch size to plan for.
        batch_is_fixed: Whether the graph knows it.
        variables: Bytes of each variable.
        forward: Names of ops that are forward for sure, where a layer's name misleads.
    """

    concrete_fn: Any
    analysis: Analysis
    record: LayerRecord
    batch: int
    batch_is_fixed: bool
    variables: list[int]
    forward: Container[str] = ()

    @property
    def fixed_bytes(self) -> int:
        """Bytes of all variables."""
        return sum(self.variables)

    @functools.cached_property
    def cost(self) -> float:
        """Arithmetic of the step as it was."""
        return step_cost(self.analysis, self.analysis.order, self.batch)


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


def analyse(concrete_fn: Any, record: LayerRecord | None = None, batch: int | None = None) -> Traced:
    """Read and analyse a traced step.

    Args:
        concrete_fn: A concrete function.
        record: Keras layers seen while it was traced.
        batch: Batch size where the graph leaves it open.

    Raises:
        RewriteError: If it computes no gradients.
    """
    graph = read(concrete_fn)
    record = record or LayerRecord()
    misleading = any(is_autodiff_name(call.layer) for call in record.calls)
    forward: Container[str] = record.layer_of_op.keys() if misleading else ()
    analysis = Analysis(graph, forward=forward)
    analysis.require_backward()
    known = _static_batch(graph, len(concrete_fn.inputs) - len(concrete_fn.captured_inputs))
    return Traced(
        concrete_fn,
        analysis,
        record,
        known or batch or 1,
        known is not None,
        _tf_private.variable_sizes(concrete_fn),
        forward,
    )


def _static_batch(graph: Graph, num_arguments: int) -> int | None:
    """The leading size of the first image argument, or of the first argument that has one."""
    shapes = [t.shape for t in graph.inputs[:num_arguments] if t.shape]
    ranked = sorted(shapes, key=lambda shape: -len(shape))
    return ranked[0][0] if ranked else 1


def plan_sft(traced: Traced, params: SFTParams) -> tuple[list[SegmentPlan], list[LeftAlone]]:
    """Segments and tiles as the parameters say."""
    grid = parse_num_tiles(params.num_tiles, "num_tiles")
    backward = None if params.backward_num_tiles is None else parse_num_tiles(params.backward_num_tiles, "")
    if params.segments != "auto":
        return _explicit(traced, params, grid, backward), []
    segments, left = auto_segments(traced.analysis, params.memory_capacity, traced.batch, {})
    for asked in (grid, backward):
        if asked is not None and segments:  # Smaller segments get fewer tiles; the largest one has to have enough rows.
            check_tiles(traced, max(segments, key=_most_tiles), asked)
    plans = []
    for segment in segments:
        try:
            plans.append(_planned(traced, segment, grid, backward, params.memory_capacity, clamp=True))
        except NotTileableError as error:
            left.append(LeftAlone(segment.name, str(error)))
    return plans, left


def _explicit(traced: Traced, params: SFTParams, grid: Grid | None, backward: Grid | None) -> list[SegmentPlan]:
    taken: set[Node] = set()
    used: set[Node] = set()
    plans = []
    for number, spec in enumerate(params.segments, 1):
        segment = _named_segment(traced, spec, f"segment{number}", taken, used)
        taken.update(segment.backward)
        used.update(segment.forward)
        own = grid if spec.num_tiles is None else parse_num_tiles(spec.num_tiles, "num_tiles")
        back = backward if spec.backward_num_tiles is None else parse_num_tiles(spec.backward_num_tiles, "")
        try:
            plans.append(_planned(traced, segment, own, back, params.memory_capacity, clamp=False))
        except NotTileableError as error:
            raise SegmentError(f"{_shown(spec)} cannot be tiled: {error}") from None
    return plans


def _shown(spec: SegmentSpec) -> str:
    return f"The segment entry={spec.entry!r}, exit={spec.exit!r}"


def _named_segment(traced: Traced, spec: SegmentSpec, name: str, taken: set[Node], used: set[Node]) -> Segment:
    """The segment between two names."""
    analysis, graph = traced.analysis, traced.analysis.graph
    entries = [t for n in spec.entries for t in resolve(n, "entry", graph, traced.record)]
    exits = [t for n in spec.exits for t in resolve(n, "exit", graph, traced.record)]
    ops = forward_ops(analysis, entries, exits)
    missing = [n for n in spec.exits if any(t.node not in ops for t in resolve(n, "exit", graph, traced.record))]
    if missing:
        same = " They are the same." if set(entries) == set(exits) else ""
        raise SegmentError(
            f"{_shown(spec)}: no path of forward operations leads from the entry to {missing}.{same} "
            "Name an exit that depends on the entry."
        )
    shared = analysis.sorted(ops & used)
    if shared:
        raise SegmentError(f"{_shown(spec)} overlaps another segment at `{shared[0].name}` ({shared[0].op}).")
    stored = frozenset(t for n in spec.stored_names for t in resolve(n, "stored", graph, traced.record))
    outside = sorted(t.name for t in stored if t.node not in ops)
    if outside:
        raise SegmentError(f"{_shown(spec)}: `stored` names {outside}, which the segment does not make.")
    try:
        segment = build_segment(analysis, name, ops, taken, stored - set(exits))
    except NotTileableError as error:
        raise SegmentError(f"{_shown(spec)} cannot be tiled: {_with_layer(traced, error)}") from None
    extra = [t for t in segment.exits if t not in exits]
    segment.notes.extend(f"`{t.name}` is needed outside as well and is an exit" for t in extra)
    return segment


def _with_layer(traced: Traced, error: Exception) -> str:
    """An error text with the Keras layer of the op that it names."""
    text = str(error)
    for op, call in traced.record.layer_of_op.items():
        if f"`{op}`" in text:
            return f"{text} (layer {call.layer!r}, {call.kind})"
    return text


def check_tiles(traced: Traced, segment: Segment, grid: Grid) -> None:
    """Refuse more tiles than an exit, or a gradient that comes in, has rows.

    More batch tiles than samples are empty and skipped at run time.

    Raises:
        ValueError: With the numbers.
    """
    for tensor in (*segment.exits, *segment.grad_entries):
        assert tensor.shape is not None
        for axis, name in enumerate(("height", "width")):
            rows = tensor.shape[axis + 1]
            if rows is not None and grid.spatial[axis] > rows:
                names = display_names(traced.analysis.graph, traced.record)
                where = f"{names.get(tensor, tensor.name)!r}" if tensor in segment.exits else "a gradient on its way"
                into = ", ".join(repr(names.get(t, t.name)) for t in segment.entries)
                raise ValueError(
                    f"`num_tiles` asks for {grid.spatial[axis]} tiles along the {name}, and {where} to {into} "
                    f"({segment.name}) has {rows} row(s). Use at most {rows}. Received: num_tiles={grid}."
                )


def _most_tiles(segment: Segment) -> tuple[int, ...]:
    shapes = [t.shape for t in (*segment.exits, *segment.grad_entries) if t.shape is not None]
    return tuple(min(int(shape[axis] or 1) for shape in shapes) for axis in (1, 2))


def clamped(segment: Segment, grid: Grid) -> Grid:
    """A grid with no more tiles than the segment's exits have rows."""
    most = _most_tiles(segment)
    return Grid(grid.batch, tuple(min(count, rows) for count, rows in zip(grid.spatial, most, strict=True)))


def auto_grids(segment: Segment, batch: int) -> list[Grid]:
    """Grids to try, from one tile up, each with more tiles than the one before.

    The batch is split first, which costs no halo; then the longer side of a tile, so that halos stay small.
    """
    most = [min(rows, AUTO_TILES[-1]) for rows in _most_tiles(segment)]
    counts = [[n for n in AUTO_TILES if n < rows] + [rows] for rows in most]
    shapes = [t.shape for t in segment.exits or segment.grad_entries if t.shape is not None]
    shape = max(shapes, key=lambda s: int(s[1] or 1) * int(s[2] or 1))
    extents = [int(shape[1] or 1), int(shape[2] or 1)]
    at = [0, 0]
    grids = [Grid(images, (counts[0][0], counts[1][0])) for images in (*(n for n in AUTO_TILES if n < batch), batch)]
    while any(index + 1 < len(steps) for index, steps in zip(at, counts, strict=True)):
        _, axis = max(
            (extents[axis] / counts[axis][at[axis]], -axis) for axis in (0, 1) if at[axis] + 1 < len(counts[axis])
        )
        at[-axis] += 1
        grids.append(Grid(batch, (counts[0][at[0]], counts[1][at[1]])))
    return grids


def fewest(grids: Sequence[Grid], fits: Callable[[Grid], bool]) -> Grid | None:
    """The first grid that fits, given that with it all later ones do.

    Halos make that nearly true and not always: a grid before may fit as well.
    """
    index = bisect.bisect_left(grids, True, key=fits)
    return grids[index] if index < len(grids) else None


def _planned(
    traced: Traced, segment: Segment, grid: Grid | None, backward: Grid | None, capacity: int | None, clamp: bool
) -> SegmentPlan:
    if grid is not None:
        if clamp:
            grid = clamped(segment, grid)
            backward = backward and clamped(segment, backward)
        else:
            check_tiles(traced, segment, grid)
            check_tiles(traced, segment, backward or grid)
        return plan_segment(traced.analysis, segment, grid, backward)
    limit = capacity or sum(t.num_bytes(traced.batch) for t in (*segment.entries, *segment.exits))
    analysis, batch = traced.analysis, traced.batch

    def fits(tiles: Grid) -> bool:
        plan = plan_segment(analysis, segment, tiles, backward)
        return max(phase_scratch(phase, batch) for phase in plan.phases) <= limit

    grids = auto_grids(segment, batch)
    return plan_segment(analysis, segment, fewest(grids, fits) or grids[-1], backward)


def predict(
    traced: Traced,
    plans: list[SegmentPlan],
    limit: int | None = None,
    graph: Graph | None = None,
    away: Container[Node] = (),
    slow: Container[Node] = (),
) -> tuple[Peak, float]:
    """Peak and relative cost of the step with these tile loops.

    Args:
        traced: The step.
        plans: Its segments.
        limit: A peak above it need not be the worst.
        graph: The rewritten graph if it exists already; an outline of it gives the same to a few bytes.
        away: Ops of that graph whose results are not in the device's memory.
        slow: Ops of that graph that end only when others wait for them.
    """
    batch, analysis = traced.batch, traced.analysis
    if graph is None:
        graph = outline(analysis, plans) if plans else analysis.graph
    loops = loop_nodes(graph)
    turns = {
        loops[plan.segment.name, phase.name]: loop_turns(phase, batch) for plan in plans for phase in plan.phases
    }
    peak = graph_peak(graph, turns, batch, traced.variables, limit, away, slow)
    whole = traced.cost
    tiled = step_cost(analysis, {n for p in plans for n in (*p.segment.forward, *p.segment.backward)}, batch)
    loop_cost = sum(phase_cost(analysis, phase, batch) for plan in plans for phase in plan.phases)
    return peak, (whole - tiled + loop_cost) / max(whole, 1.0)


def finish(
    traced: Traced, plans: list[SegmentPlan], left: Sequence[LeftAlone], budget: int | None
) -> tuple[Graph, Plan]:
    """Emit the graph and describe it."""
    analysis = traced.analysis
    original, _ = predict(traced, [], limit=0)
    graph = tile_segments(analysis, plans) if plans else analysis.graph
    # A budget has to be kept in every state of the device's memory; otherwise a fresh one tells enough.
    if plans and budget:
        peak, ratio = predict(traced, plans)  # As the search did.
    else:
        peak, ratio = predict(traced, plans, limit=0, graph=graph) if plans else (original, 1.0)
    names = display_names(analysis.graph, traced.record)
    plan = Plan(
        changed=bool(plans),
        batch=traced.batch,
        batch_is_fixed=traced.batch_is_fixed,
        segments=tuple(_described(traced, plan, names) for plan in plans),
        left_alone=_reasons(traced, left),
        original=prediction(original, traced.fixed_bytes, 1.0),
        predicted=prediction(peak, traced.fixed_bytes, ratio),
        memory_budget=budget,
        notes=_notes(traced),
    )
    return graph, plan


def _notes(traced: Traced) -> tuple[str, ...]:
    """What the prediction leaves out, by layer."""
    names = list(dict.fromkeys(_layer_name(traced, node.name) for node in unmodelled(traced.analysis)))
    if not names:
        return ()
    shown = shortened(names, MOST_NAMES)
    return (f"not in the predicted peak, because only a run tells: what is kept inside of {shown}",)


def prediction(peak: Peak, fixed_bytes: int, ratio: float) -> Prediction:
    """As a plan reports it."""
    return Prediction(peak.peak_bytes, fixed_bytes, ratio, peak.largest, peak.timeline)


def _reasons(traced: Traced, left: Sequence[LeftAlone]) -> tuple[tuple[str, str], ...]:
    """(what, why), each layer once with its first reason."""
    reasons: dict[str, str] = {}
    for item in left:
        call = traced.record.layer_of_op.get(item.name)
        hint = ""
        if call is not None and call.kind == "BatchNormalization" and call.trainable:
            hint = "; its statistics in training mode are not supported yet, freeze it with `trainable=False`"
        names = list(dict.fromkeys(_layer_name(traced, op) for op in (item.name, item.last) if op))
        reasons.setdefault(" to ".join(names), item.reason + hint)
    return tuple(reasons.items())


def _layer_name(traced: Traced, op: str) -> str:
    call = traced.record.layer_of_op.get(op)
    return op if call is None else f"layer {call.layer!r} ({call.kind})"


def _described(traced: Traced, plan: SegmentPlan, names: Mapping[Tensor, str]) -> PlannedSegment:
    segment = plan.segment
    forward, backward = plan.phase("forward"), plan.phase("backward")
    ends = forward.writes if forward else segment.grad_entries

    def rows(tensor: Tensor) -> tuple[int, int]:
        phase = plan.phases[0]
        region = phase.cells.get(tensor) or phase.regions[tensor]
        return int(region[0].size.max()), int(region[1].size.max())

    def shown(tensors: Sequence[Tensor]) -> tuple[str, ...]:
        return tuple(names.get(t, t.name) for t in tensors)

    return PlannedSegment(
        name=segment.name,
        entries=shown(segment.entries),
        exits=shown(segment.exits),
        num_tiles=_counts(forward),
        backward_num_tiles=_counts(backward),
        stored=shown(sorted(segment.stored, key=lambda t: t.name)),
        forward_ops=len(segment.forward),
        backward_ops=len(segment.backward),
        tile_bytes=tuple(phase_scratch(phase, traced.batch) for phase in plan.phases),
        tile_rows=(rows(ends[0]), rows(segment.entries[0])),
        notes=tuple(segment.notes),
    )


def _counts(phase: Phase | None) -> tuple[int, ...]:
    """Tiles along (batch, height, width); nothing without a loop."""
    return () if phase is None else (phase.grid.batch, *phase.grid.spatial)


def unsupported_layers(traced: Traced, left: Sequence[LeftAlone]) -> list[str]:
    """Layers that this version cannot tile, by name."""
    return [name for name, _ in _reasons(traced, left)]
