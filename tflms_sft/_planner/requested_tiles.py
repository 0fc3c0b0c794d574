"""Segments and tiles as `SFTParams` say."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.emission.tile_pass import SegmentPlan, plan_segment
from rewriters.errors import NotTileableError, SegmentError
from rewriters.estimates.loop_memory import iteration_peak_bytes
from rewriters.ir.graph import Node, Tensor, nodes_between
from rewriters.pipelining.stage_assignment import Stages
from rewriters.tiling.barrier_planner import BarrierPlanner
from rewriters.tiling.extents import min_rows
from rewriters.tiling.ft_segments import SkippedOps, auto_segments, next_name
from rewriters.tiling.segment import Segment, build_segment, forward_ops
from rewriters.tiling.tile_planner import Grid, Halo
from tflms_sft._params.tile_counts import NumTiles, axis_names, parse_num_tiles
from tflms_sft._params.tile_params import SegmentSpec, SFTParams
from tflms_sft._planner.barrier_search import Barriers, fitted, largest
from tflms_sft._planner.tile_grids import auto_grids, fewest, first_axis
from tflms_sft._planner.traced_step import TracedStep
from tflms_sft._trace.layer_names import display_names, resolve

NEARLY = 1.1
"""What a turn may take over what it takes in most tiles, where it takes more than wanted with any number of them."""


@dataclasses.dataclass(frozen=True)
class RequestedTiles:
    """What a user says of the tiles of a segment; `None` is for the program to choose."""

    tiles: NumTiles | None
    backward: NumTiles | None
    halo: Halo


@dataclasses.dataclass(frozen=True)
class StageBounds:
    """Stages of a pipeline, which no segment may go beyond.

    Attributes:
        stages: Of the operations.
        cuts: Names of what stages end with.
    """

    stages: Stages
    cuts: Sequence[str]

    def members(self, analysis: GraphAnalysis, stage: int) -> set[Node]:
        """Operations that may run in a loop of a stage; what has no stage, such as a constant, may in any."""
        return {node for node in analysis.order if self.stages.of.get(node, stage) == stage}

    def of_segment(self, spec: SegmentSpec, ops: Iterable[Node]) -> int:
        """The stage of a segment that is asked for by name.

        Raises:
            SegmentError: If it goes over a cut.
        """
        found = sorted({self.stages.of[node] for node in ops if node in self.stages.of})
        if len(found) > 1:
            cuts = ", ".join(repr(name) for name in self.cuts[found[0] : found[-1]])
            raise SegmentError(
                f"{_shown(spec)} goes over the cut(s) {cuts} of the pipeline, from stage {found[0]} to stage "
                f"{found[-1]}: a tile loop runs on one device. Let a segment end at each, and another one begin there."
            )
        return found[0] if found else 0


def plan_sft(
    traced: TracedStep, params: SFTParams, staging: StageBounds | None = None
) -> tuple[list[SegmentPlan], list[SkippedOps]]:
    """Segments and tiles as the parameters say, in a pipeline each in one stage."""
    asked = RequestedTiles(
        parse_num_tiles(params.num_tiles, "num_tiles"), _backward(params.backward_num_tiles), Halo(params.halo)
    )
    if params.segments != "auto":
        return _explicit(traced, params, asked, staging), []
    if staging is None:
        segments, left = _auto(traced, params, {}, None)
    else:
        segments, left, names = [], [], dict[str, int]()
        for stage in range(staging.stages.count):
            found, more = _auto(traced, params, names, staging.members(traced.analysis, stage))
            segments += found
            left += more
    alone = len(segments) == 1 and bool(segments[0].loop_specs)
    for tiles in (asked.tiles, asked.backward):
        if tiles is not None and segments and not alone:
            # Smaller segments get fewer tiles; the largest one has to have enough rows.
            largest_one = max(segments, key=lambda segment: _most_rows(traced, segment))
            check_tiles(traced, largest_one, _grid(traced, largest_one, tiles), tiles.argument)
    plans = []
    for segment in segments:
        if alone:
            return [_planned(traced, segment, asked, params.memory_capacity, clamp=False)], left
        try:
            plans.append(_planned(traced, segment, asked, params.memory_capacity, clamp=True))
        except NotTileableError as error:
            left.append(SkippedOps(segment.name, str(error)))
    return plans, left


def _auto(
    traced: TracedStep, params: SFTParams, names: dict[str, int], allowed: set[Node] | None
) -> tuple[list[Segment], list[SkippedOps]]:
    """Segments of a step, or of the operations of it that may run on tiles; `names` counts them."""
    barriers = Barriers(traced, allowed)
    if barriers.present:  # All that can be tiled, with as few tensors waiting for the backward phase as pays.
        return [barriers.segment(next_name(names), barriers.fewest)], barriers.left
    return auto_segments(traced.analysis, params.memory_capacity, traced.batch, names, allowed)


def _backward(value: Any) -> NumTiles | None:
    return None if value is None else parse_num_tiles(value, "backward_num_tiles")


def _grid(traced: TracedStep, segment: Segment, tiles: NumTiles | None) -> Grid:
    """What was asked for, for the axes that a segment has."""
    assert tiles is not None
    return tiles.grid(axis_names(traced.analysis, segment))


def _explicit(
    traced: TracedStep, params: SFTParams, asked: RequestedTiles, staging: StageBounds | None
) -> list[SegmentPlan]:
    taken: set[Node] = set()
    used: dict[Node, SegmentSpec] = {}
    plans = []
    for number, spec in enumerate(params.segments, 1):
        segment = _named_segment(traced, spec, f"segment{number}", taken, used, staging)
        taken.update(segment.backward)
        used.update(dict.fromkeys(segment.forward, spec))
        own = RequestedTiles(
            asked.tiles if spec.num_tiles is None else parse_num_tiles(spec.num_tiles, "num_tiles"),
            asked.backward if spec.backward_num_tiles is None else _backward(spec.backward_num_tiles),
            asked.halo if spec.halo is None else Halo(spec.halo),
        )
        try:
            plans.append(_planned(traced, segment, own, params.memory_capacity, clamp=False))
        except NotTileableError as error:
            raise SegmentError(f"{_shown(spec)} cannot be tiled: {error}") from None
    return plans


def _shown(spec: SegmentSpec) -> str:
    return f"The segment entry={spec.entry!r}, exit={spec.exit!r}"


def _named_segment(
    traced: TracedStep,
    spec: SegmentSpec,
    name: str,
    taken: set[Node],
    used: Mapping[Node, SegmentSpec],
    staging: StageBounds | None,
) -> Segment:
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
    shared = analysis.sorted(ops & used.keys())
    if shared:
        other = used[shared[0]]
        raise SegmentError(
            f"{_shown(spec)} overlaps the segment entry={other.entry!r}, exit={other.exit!r} at "
            f"{_with_layer(traced, f'`{shared[0].name}` ({shared[0].op})')}. Let one end where the other begins."
        )
    if staging is not None:
        stage = staging.of_segment(spec, ops)
        taken = taken | (analysis.backward - staging.members(analysis, stage))
    named = {t: n for n in spec.stored_names for t in resolve(n, "stored", graph, traced.record)}
    stored = frozenset(named)
    outside = list(dict.fromkeys(n for t, n in named.items() if t.node not in ops))
    if outside:
        raise SegmentError(f"{_shown(spec)}: `stored` names {outside}, which the segment does not make.")
    try:
        segment = build_segment(analysis, name, ops, taken, stored - set(exits))
    except NotTileableError as error:
        barriers = Barriers(traced, _with_backward(analysis, ops) - taken, stored)
        if not barriers.present:
            raise SegmentError(f"{_shown(spec)} cannot be tiled: {_with_layer(traced, error)}") from None
        whole = [t for t in exits if t not in barriers.exits]
        if whole:
            why = next((f": {left.reason}" for left in barriers.left if left.name == whole[0].node.name), "")
            made = _with_layer(traced, f"`{whole[0].node.name}` ({whole[0].node.op})")
            raise SegmentError(
                f"{_shown(spec)}: {made} does not run on tiles{why}. Let the segment end at an operation before it."
            ) from None
        unknown = list(dict.fromkeys(n for t, n in named.items() if not barriers.stores(t)))
        if unknown:
            raise SegmentError(f"{_shown(spec)}: `stored` names {unknown}, which do not run on tiles.") from None
        segment = barriers.segment(name, barriers.fewest)
    extra = [t for t in segment.exits if t not in exits]
    segment.notes.extend(f"`{t.name}` is needed outside as well and is an exit" for t in extra)
    return segment


def _with_backward(analysis: GraphAnalysis, ops: set[Node]) -> set[Node]:
    """Forward operations with the backward ones that read what they make, or lie between such."""
    made = [node.out(index) for node in ops for index in range(len(node.outputs))]
    readers = {r for t in made for r, _ in analysis.consumers.get(t, ()) if r in analysis.backward}
    return ops | readers | nodes_between(readers, analysis.successors, analysis.position)


def _with_layer(traced: TracedStep, error: object) -> str:
    """An error text with the Keras layer of the op that it names."""
    text = str(error)
    for op, call in traced.record.layer_of_op.items():
        if f"`{op}`" in text:
            return f"{text} (layer {call.layer!r}, {call.kind})"
    return text


def check_tiles(traced: TracedStep, segment: Segment, grid: Grid, argument: str = "num_tiles") -> None:
    """Refuse more tiles than an exit, or a gradient that comes in, has rows.

    More batch tiles than samples are empty and skipped at run time.

    Raises:
        ValueError: With the numbers.
    """
    labels = axis_names(traced.analysis, segment)
    for tensor in _limiting(traced, segment):
        for axis, (name, rows) in enumerate(zip(labels, traced.analysis.extents(tensor) or (), strict=True)):
            if rows is not None and grid.spatial[axis] > rows:
                names = display_names(traced.analysis.graph, traced.record)
                what = f"{names.get(tensor, tensor.name)!r}, {'the exit' if tensor in segment.exits else 'split'}"
                entries = ", ".join(repr(names.get(t, t.name)) for t in segment.entries)
                received = grid.spatial if grid.batch == 1 else (grid.batch, *grid.spatial)
                raise ValueError(
                    f"`{argument}` asks for {grid.spatial[axis]} tiles along the {name}, and {what} in "
                    f"{segment.name} (from {entries}), has {rows} row(s). Use at most {rows}. "
                    f"Received: {argument}={received}."
                )


def _limiting(traced: TracedStep, segment: Segment) -> list[Tensor]:
    """Tensors that must have at least one row for each tile.

    Loops between barriers get no more tiles than they have rows anyway; the largest one has to have enough.
    """
    if segment.loop_specs:
        gatherer = BarrierPlanner(traced.analysis, segment)
        # What loops sum counts too: there may be none that writes an image.
        split = [tensor for loop in segment.loop_specs for tensor in gatherer.split(loop)]
        return sorted(split, key=lambda t: traced.analysis.extents(t) or (), reverse=True)[:1]
    return [*segment.exits, *segment.grad_entries]


def _most_rows(traced: TracedStep, segment: Segment) -> tuple[int, ...]:
    """The most tiles along each axis."""
    return min_rows(traced.analysis, _limiting(traced, segment))


def _check_width(traced: TracedStep, segment: Segment, grid: Grid, argument: str) -> None:
    """Refuse tiles that are no rows.

    Raises:
        ValueError: With what to use instead.
    """
    names = axis_names(traced.analysis, segment)
    most = _most_rows(traced, segment)
    along = first_axis(most)
    others = [str(name) for axis, name in enumerate(names) if axis != along and grid.spatial[axis] > 1]
    if others:
        count = min(grid.num_tiles // grid.batch, most[along])
        rows = tuple(count if axis == along else 1 for axis in range(len(names)))
        use = rows if grid.batch == 1 else (grid.batch, *rows)
        raise ValueError(
            f'`halo="carry"` hands rows on along the {names[along]}, so tiles cannot split the {" and ".join(others)}. '
            f"Received: {argument}={grid}. Use as many along the {names[along]}, such as {argument}={use}, "
            'or `halo="recompute"`.'
        )


def _checked(traced: TracedStep, segment: Segment, tiles: NumTiles, halo: Halo, clamp: bool) -> Grid:
    """The grid that is asked for, or with `clamp` one with no more tiles than there are rows.

    Raises:
        ValueError: If there cannot be such tiles.
    """
    grid = _grid(traced, segment, tiles)
    if clamp:
        most = _most_rows(traced, segment)
        grid = Grid(grid.batch, tuple(min(count, rows) for count, rows in zip(grid.spatial, most, strict=True)))
    if halo is Halo.CARRY:
        _check_width(traced, segment, grid, tiles.argument)
    if not clamp:
        check_tiles(traced, segment, grid, tiles.argument)
    return grid


def _planned(
    traced: TracedStep, segment: Segment, asked: RequestedTiles, capacity: int | None, clamp: bool
) -> SegmentPlan:
    back = None
    if asked.backward is not None:
        back = _checked(traced, segment, asked.backward, asked.halo, clamp)
    if asked.tiles is not None:
        grid = _checked(traced, segment, asked.tiles, asked.halo, clamp)
        return plan_segment(traced.analysis, segment, grid, back, asked.halo)
    if segment.loop_specs:
        return fitted(traced, segment, capacity or largest(traced, segment), asked.halo)
    limit = capacity or sum(t.num_bytes(traced.batch) for t in (*segment.entries, *segment.exits))
    analysis, batch = traced.analysis, traced.batch

    def turn(grid: Grid) -> int:
        plan = plan_segment(analysis, segment, grid, back, asked.halo)
        return max(iteration_peak_bytes(tile_loop, batch) for tile_loop in plan.loops)

    grids = auto_grids(analysis, segment, batch, asked.halo is Halo.CARRY)
    found = fewest(grids, lambda grid: turn(grid) <= limit)
    if found is None:  # What kernels take for themselves, say, is there with any number of tiles.
        least = NEARLY * turn(grids[-1])
        found = fewest(grids, lambda grid: turn(grid) <= least)
    return plan_segment(analysis, segment, found or grids[-1], back, asked.halo)
