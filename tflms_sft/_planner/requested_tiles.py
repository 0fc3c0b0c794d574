"""Segments and tiles that `SFTParams` request."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rewriters.analysis.convex_sets import nodes_between
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.emission.tile_pass import SegmentPlan, plan_segment
from rewriters.errors import NotTileableError, SegmentError
from rewriters.estimates.loop_memory import iteration_peak_bytes
from rewriters.ir.graph import Node, Tensor
from rewriters.pipelining.stage_assignment import Stages
from rewriters.tiling.barrier_planner import BarrierPlanner
from rewriters.tiling.extents import min_rows
from rewriters.tiling.ft_segments import SkippedOps, auto_segments, next_name
from rewriters.tiling.segment import Segment, build_segment, forward_ops
from rewriters.tiling.tile_grids import auto_grids, coarsest_fitting, first_axis
from rewriters.tiling.tile_planner import Grid, Halo
from tflms_sft._barriers.barriers import Barriers
from tflms_sft._barriers.tiled_loops import plan_for_capacity
from tflms_sft._params.tile_counts import NumTiles, axis_names, parse_num_tiles
from tflms_sft._params.tile_params import SegmentSpec, SFTParams
from tflms_sft._planner.automatic_segments import (
    MAX_PEAK_FRACTION,
    PlanSegment,
    RequestedLevels,
    RequestedSearch,
    best_candidate,
)
from tflms_sft._search.traced_step import Candidate, TracedStep, predict
from tflms_sft._trace.layer_names import resolve

MAX_ITERATION_GROWTH = 1.1
"""Bytes of an iteration, over those in the finest grid, where no grid meets the capacity."""


@dataclasses.dataclass(frozen=True)
class RequestedTiles:
    """Tiles of a segment as a user requests them.

    Attributes:
        tiles: Tiles of the forward loop; `None` leaves the choice to the program.
        backward: Tiles of the backward loop; `None` stands for those of the forward loop.
        halo: How tiles get the rows that they share.
    """

    tiles: NumTiles | None
    backward: NumTiles | None
    halo: Halo


@dataclasses.dataclass(frozen=True)
class StageBounds:
    """Stages of a pipeline, which bound its segments.

    Attributes:
        stages: Stages of the ops.
        cuts: Names of the layers or ops that stages end with.
    """

    stages: Stages
    cuts: Sequence[str]

    def members(self, analysis: GraphAnalysis, stage: int) -> set[Node]:
        """Return the ops that may run in a loop of a stage; an op without a stage, such as a constant, may in any."""
        return {node for node in analysis.order if self.stages.of.get(node, stage) == stage}

    def of_segment(self, spec: SegmentSpec, ops: Iterable[Node]) -> int:
        """Return the stage of a segment that is named by its ends.

        Raises:
            SegmentError: If it crosses a cut.
        """
        numbers = sorted({self.stages.of[node] for node in ops if node in self.stages.of})
        if len(numbers) > 1:
            cuts = ", ".join(repr(name) for name in self.cuts[numbers[0] : numbers[-1]])
            raise SegmentError(
                f"{_text_of(spec)} crosses the cut(s) {cuts} of the pipeline, from stage {numbers[0]} to stage "
                f"{numbers[-1]}, but a tile loop runs on one device. End a segment at each cut, and begin one there."
            )
        return numbers[0] if numbers else 0


def plan_sft(
    traced: TracedStep, params: SFTParams, staging: StageBounds | None = None
) -> tuple[list[SegmentPlan], list[SkippedOps]]:
    """Return the planned segments of the parameters, in a pipeline each in one stage, and the ops without."""
    request = RequestedTiles(
        parse_num_tiles(params.num_tiles, "num_tiles"), _backward(params.backward_num_tiles), Halo(params.halo)
    )
    if params.segments != "auto":
        return _explicit(traced, params, request, staging), []
    if staging is None:
        return _automatic(traced, params, request)
    segments, left, names = [], [], dict[str, int]()
    plan = _planner_of(traced, request, params.memory_capacity)
    for stage in range(staging.stages.count):
        members = staging.members(traced.analysis, stage)
        of_stage, skipped = _longest_segments(traced, params, plan, names=names, allowed=members)
        segments += of_stage
        left += skipped
    return _candidate(traced, segments, plan).plans, left


def _planner_of(traced: TracedStep, request: RequestedTiles, capacity: int | None) -> PlanSegment:
    """Return a function that plans a segment in the requested tiles, or in fewer where it has few rows."""
    return lambda segment: _planned(traced, segment, request, capacity, clamp=True)


def _automatic(
    traced: TracedStep, params: SFTParams, request: RequestedTiles
) -> tuple[list[SegmentPlan], list[SkippedOps]]:
    """Return the planned segments of a step, and the ops without."""
    plan, max_fraction = _planner_of(traced, request, params.memory_capacity), MAX_PEAK_FRACTION
    barriers = Barriers(traced)
    if params.memory_capacity is not None or not traced.analysis.backward:
        segments, left = _longest_segments(traced, params, plan, names={})
        candidates, max_fraction = iter([_candidate(traced, segments, plan)]), 1.0
    elif barriers.present:
        left, candidates = barriers.left, _with_barriers(traced, barriers, plan)
    else:
        search = RequestedSearch(traced, plan)
        left, candidates = search.left, search.candidates()
    best = best_candidate(traced, candidates, max_fraction)
    if best is None:
        return [], [*left, *_unprofitable(traced, barriers, request)]
    for segment_plan in best.plans:
        _note_lowered_tiles(traced, segment_plan, request)
    return best.plans, left


def _with_barriers(traced: TracedStep, barriers: Barriers, plan: PlanSegment) -> Iterator[Candidate]:
    """Yield plans with levels in requested tiles; none if these are impossible."""
    with contextlib.suppress(NotTileableError):
        yield from RequestedLevels(traced, barriers, plan).candidates()


def _longest_segments(
    traced: TracedStep,
    params: SFTParams,
    plan: PlanSegment,
    *,
    names: dict[str, int],
    allowed: set[Node] | None = None,
) -> tuple[list[Segment], list[SkippedOps]]:
    """Return the longest segments of a step, or of its `allowed` ops, and the ops without; `names` counts segments."""
    barriers = Barriers(traced, allowed)
    if barriers.present:
        with contextlib.suppress(NotTileableError):
            return [RequestedLevels(traced, barriers, plan).smallest(next_name(names))], barriers.left
        return [], barriers.left
    return auto_segments(traced.analysis, params.memory_capacity, traced.batch, names, allowed)


def _candidate(traced: TracedStep, segments: Iterable[Segment], plan: PlanSegment) -> Candidate:
    """Return the plan of segments in requested tiles, without those that cannot have them, for fresh memory."""
    plans = []
    for segment in segments:
        with contextlib.suppress(NotTileableError):
            plans.append(plan(segment))
    return predict(traced, plans, limit=0)


def _unprofitable(traced: TracedStep, barriers: Barriers, request: RequestedTiles) -> list[SkippedOps]:
    """Return the record of the ops that could run in tiles, but would need as much memory as they do untiled."""
    nodes = [node for node in traced.analysis.sorted(barriers.nodes) if node not in traced.analysis.backward]
    if not nodes:
        return []
    tiles = "tiles" if request.tiles is None else f"{request.tiles} tiles"
    return [SkippedOps(nodes[0].name, f"in {tiles} these ops would need as much memory as untiled", nodes[-1].name)]


def _note_lowered_tiles(traced: TracedStep, plan: SegmentPlan, request: RequestedTiles) -> None:
    """Note in a segment that it has fewer tiles than requested, because an exit has too few rows."""
    for tiles, grid in ((request.tiles, plan.loops[0].grid), (request.backward, plan.loops[-1].grid)):
        requested = grid if tiles is None else tiles.grid(axis_names(traced.analysis, plan.segment))
        if grid.spatial != requested.spatial:
            plan.segment.notes.append(f"{grid} tiles instead of {requested}, because a split tensor has too few rows")


def _backward(value: Any) -> NumTiles | None:
    return None if value is None else parse_num_tiles(value, "backward_num_tiles")


def _explicit(
    traced: TracedStep, params: SFTParams, request: RequestedTiles, staging: StageBounds | None
) -> list[SegmentPlan]:
    segments: list[tuple[SegmentSpec, Segment]] = []
    plans = []
    for number, spec in enumerate(params.segments, 1):
        of_spec = RequestedTiles(
            request.tiles if spec.num_tiles is None else parse_num_tiles(spec.num_tiles, "num_tiles"),
            request.backward if spec.backward_num_tiles is None else _backward(spec.backward_num_tiles),
            request.halo if spec.halo is None else Halo(spec.halo),
        )
        plan = functools.partial(_planned, traced, request=of_spec, capacity=params.memory_capacity, clamp=False)
        try:
            segment = _named_segment(traced, spec, f"segment{number}", segments, staging, plan)
            segments.append((spec, segment))
            plans.append(plan(segment))
        except NotTileableError as error:
            raise SegmentError(f"{_text_of(spec)} cannot be tiled: {error}") from None
    return plans


def _text_of(spec: SegmentSpec) -> str:
    return f"The segment entry={spec.entry!r}, exit={spec.exit!r}"


def _named_segment(
    traced: TracedStep,
    spec: SegmentSpec,
    name: str,
    others: Sequence[tuple[SegmentSpec, Segment]],
    staging: StageBounds | None,
    plan: PlanSegment,
) -> Segment:
    """Return the segment of a specification, given the segments of those before it, and its tiles.

    Raises:
        SegmentError: If there is no such segment, or if it cannot be tiled.
    """
    analysis = traced.analysis
    entries, exits = _resolved(traced, spec.entries, "entry"), _resolved(traced, spec.exits, "exit")
    ops = forward_ops(analysis, entries, exits)
    missing = list(dict.fromkeys(n for t, n in exits.items() if t.node not in ops))
    if missing:
        same = " They are the same." if entries.keys() == exits.keys() else ""
        raise SegmentError(
            f"{_text_of(spec)}: no path of forward ops leads from the entry to {missing}.{same} "
            "Name an exit that depends on the entry."
        )
    _refuse_overlap(traced, spec, ops, others)
    backward_ops = {node for _, segment in others for node in segment.backward}
    if staging is not None:
        stage = staging.of_segment(spec, ops)
        backward_ops |= analysis.backward - staging.members(analysis, stage)
    stored = _resolved(traced, spec.stored_names, "stored")
    outside = list(dict.fromkeys(n for t, n in stored.items() if t.node not in ops))
    if outside:
        raise SegmentError(
            f"{_text_of(spec)}: `stored` must name tensors that the segment computes. Received: {outside}. Leave "
            "them out, or extend the segment."
        )
    try:
        segment = build_segment(analysis, name, ops, backward_ops, frozenset(stored.keys() - exits.keys()))
    except NotTileableError as error:
        barriers = Barriers(traced, _with_backward(analysis, ops) - backward_ops, stored)
        if not barriers.present:
            raise SegmentError(f"{_text_of(spec)} cannot be tiled: {_with_layer(traced, error)}") from None
        _refuse_untiled(traced, spec, barriers, exits, stored)
        segment = RequestedLevels(traced, barriers, plan).smallest(name)
    extra = [t for t in segment.exits if t not in exits]
    segment.notes.extend(f"`{t.name}` is also an exit, because ops outside of the segment read it" for t in extra)
    return segment


def _resolved(traced: TracedStep, names: Iterable[str], argument: str) -> dict[Tensor, str]:
    """Return the tensors that names denote, each with its name."""
    return {t: name for name in names for t in resolve(name, argument, traced.analysis.graph, traced.record)}


def _refuse_overlap(
    traced: TracedStep, spec: SegmentSpec, ops: set[Node], others: Iterable[tuple[SegmentSpec, Segment]]
) -> None:
    """Refuse ops of a segment that belong to another one.

    Raises:
        SegmentError: With the first of them.
    """
    used = {node: other for other, segment in others for node in segment.forward}
    shared = traced.analysis.sorted(ops & used.keys())
    if shared:
        other = used[shared[0]]
        raise SegmentError(
            f"{_text_of(spec)} overlaps the segment entry={other.entry!r}, exit={other.exit!r} at "
            f"{_with_layer(traced, f'`{shared[0].name}` ({shared[0].op})')}. End one where the other begins."
        )


def _refuse_untiled(
    traced: TracedStep,
    spec: SegmentSpec,
    barriers: Barriers,
    exits: Iterable[Tensor],
    stored: Mapping[Tensor, str],
) -> None:
    """Refuse exits and checkpointed tensors of a segment with barriers that do not run in tiles.

    Raises:
        SegmentError: With the first such exit, or all such checkpointed tensors.
    """
    untiled = next((t.node for t in exits if t not in barriers.exits), None)
    if untiled is not None:
        why = next((f": {left.reason}" for left in barriers.left if left.name == untiled.name), "")
        op = _with_layer(traced, f"`{untiled.name}` ({untiled.op})")
        raise SegmentError(
            f"{_text_of(spec)}: {op} does not run in tiles{why}. End the segment at an op before it."
        ) from None
    unknown = list(dict.fromkeys(n for t, n in stored.items() if not barriers.stores(t)))
    if unknown:
        raise SegmentError(
            f"{_text_of(spec)}: `stored` must name tensors that run in tiles. Received: {unknown}. Leave them out."
        ) from None


def _with_backward(analysis: GraphAnalysis, ops: set[Node]) -> set[Node]:
    """Return forward ops with the backward ones that read their results, or lie between such."""
    results = [node.out(index) for node in ops for index in range(len(node.outputs))]
    consumers = {r for t in results for r, _ in analysis.consumers.get(t, ()) if r in analysis.backward}
    return ops | consumers | nodes_between(consumers, analysis.successors, analysis.position)


def _with_layer(traced: TracedStep, error: object) -> str:
    """Return an error text with the Keras layer of the op that it names."""
    text = str(error)
    for op, call in traced.record.layer_of_op.items():
        if f"`{op}`" in text:
            return f"{text} (layer {call.layer!r}, {call.kind})"
    return text


def check_tiles(traced: TracedStep, segment: Segment, grid: Grid, argument: str) -> None:
    """Refuse more tiles than an exit, or a gradient at the entry of the backward loop, has rows.

    Batch tiles beyond the number of samples are empty, and skipped at run time.

    Raises:
        ValueError: With the numbers.
    """
    labels = axis_names(traced.analysis, segment)
    for tensor in _limiting(traced, segment):
        for axis, (name, rows) in enumerate(zip(labels, traced.analysis.extents(tensor) or (), strict=True)):
            if rows is not None and grid.spatial[axis] > rows:
                role = "the exit" if tensor in segment.exits else "a split tensor"
                shown = repr(traced.names.get(tensor, tensor.name))
                entries = ", ".join(repr(traced.names.get(t, t.name)) for t in segment.entries)
                received = grid.spatial if grid.batch == 1 else (grid.batch, *grid.spatial)
                raise ValueError(
                    f"`{argument}` must be at most {rows} along the {name}, the rows of {shown}, {role} of "
                    f"{segment.name} (from {entries}). Received: {argument}={received}. Use fewer tiles."
                )


def _limiting(traced: TracedStep, segment: Segment) -> list[Tensor]:
    """Return the tensors that need at least one row for each tile.

    Loops between barriers never get more tiles than rows; only the largest of their tensors needs enough.
    """
    if segment.loop_specs:
        gatherer = BarrierPlanner(traced.analysis, segment)
        # Inputs of reductions count, too: there may be no loop that writes an image.
        split = [tensor for loop in segment.loop_specs for tensor in gatherer.split(loop)]
        return sorted(split, key=lambda t: traced.analysis.extents(t) or (), reverse=True)[:1]
    return segment.split


def _max_tiles(traced: TracedStep, segment: Segment) -> tuple[int, ...]:
    """Return the maximum number of tiles along each axis."""
    return min_rows(traced.analysis, _limiting(traced, segment))


def _check_width(traced: TracedStep, segment: Segment, grid: Grid, argument: str) -> None:
    """Refuse tiles that are no strips of full width.

    Raises:
        ValueError: With a grid of strips to use instead.
    """
    names = axis_names(traced.analysis, segment)
    limits = _max_tiles(traced, segment)
    along = first_axis(limits)
    others = [str(name) for axis, name in enumerate(names) if axis != along and grid.spatial[axis] > 1]
    if others:
        count = min(grid.num_tiles // grid.batch, limits[along])
        rows = tuple(count if axis == along else 1 for axis in range(len(names)))
        use = rows if grid.batch == 1 else (grid.batch, *rows)
        raise ValueError(
            f'`halo="carry"` carries rows along the {names[along]}, so tiles cannot split the {" and ".join(others)}. '
            f"Received: {argument}={grid}. Use as many along the {names[along]}, such as {argument}={use}, "
            'or `halo="recompute"`.'
        )


def _checked(traced: TracedStep, segment: Segment, tiles: NumTiles, halo: Halo, clamp: bool) -> Grid:
    """Return the requested grid, or with `clamp` one with no more tiles than there are rows.

    Raises:
        ValueError: If there cannot be such tiles.
    """
    grid = tiles.grid(axis_names(traced.analysis, segment))
    if clamp:
        limits = _max_tiles(traced, segment)
        grid = Grid(grid.batch, tuple(min(count, limit) for count, limit in zip(grid.spatial, limits, strict=True)))
    if halo is Halo.CARRY:
        _check_width(traced, segment, grid, tiles.argument)
    if not clamp:
        check_tiles(traced, segment, grid, tiles.argument)
    return grid


def _planned(
    traced: TracedStep, segment: Segment, request: RequestedTiles, capacity: int | None, clamp: bool
) -> SegmentPlan:
    back = None
    if request.backward is not None:
        back = _checked(traced, segment, request.backward, request.halo, clamp)
    if request.tiles is not None:
        grid = _checked(traced, segment, request.tiles, request.halo, clamp)
        return plan_segment(traced.analysis, segment, grid, back, request.halo)
    if segment.loop_specs:
        return plan_for_capacity(traced, segment, capacity, request.halo)
    limit = capacity or sum(t.num_bytes(traced.batch) for t in (*segment.entries, *segment.exits))
    analysis, batch = traced.analysis, traced.batch

    def iteration_bytes(grid: Grid) -> int:
        plan = plan_segment(analysis, segment, grid, back, request.halo)
        return max(iteration_peak_bytes(analysis, tile_loop, batch) for tile_loop in plan.loops)

    grids = auto_grids(analysis, segment, batch, request.halo is Halo.CARRY)
    fitting = coarsest_fitting(grids, iteration_bytes, limit)
    if fitting is None:  # Some bytes are taken in any number of tiles, such as scratch of kernels.
        lowest = MAX_ITERATION_GROWTH * iteration_bytes(grids[-1])
        fitting = coarsest_fitting(grids, iteration_bytes, lowest)
    return plan_segment(analysis, segment, fitting or grids[-1], back, request.halo)
