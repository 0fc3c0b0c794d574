"""Chooses the number of tiles of a segment within a budget, by estimates of the memory and time of its loops.

A search spends its time on planning loops, so few are planned. Of long segments only some grids are planned, and the
rest is interpolated. Segments and loops that differ in names only, as the blocks of a deep network do, share their
estimates. The chosen loops are planned themselves, and modelled with the whole step.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence

from rewriters.emission.loop_signature import loop_signature, segment_signature
from rewriters.emission.tile_pass import planner_for
from rewriters.errors import NotTileableError
from rewriters.estimates.loop_memory import Results
from rewriters.estimates.op_cost import CostModel, sum_in_order
from rewriters.ir.graph import Node, Tensor
from rewriters.tiling.checkpoint_selection import LoopSpec
from rewriters.tiling.extents import max_tiles
from rewriters.tiling.one_loop import in_one_loop, with_final_sums
from rewriters.tiling.segment import Segment
from rewriters.tiling.tile_grids import auto_grids, coarsest_fitting, fastest, first_axis, thinned
from rewriters.tiling.tile_planner import Grid, Halo, TileLoop
from tflms_sft._search.block_choices import BlockChoice
from tflms_sft._search.traced_step import TracedStep

GRID_GROWTH = 1.15
"""Tiles of a grid that is tried, over those of the one before."""

PLANNED_GROWTH = 2.5
"""Tiles of a grid that is planned, over those of the one before; the grids between are interpolated."""

FORWARD_COARSENING = (4, 2, 1)
"""Ratios of backward to forward tiles along each axis that are tried: a forward iteration keeps less alive."""

MAX_CHECKPOINTS = 8
"""Inner tensors of a segment that may be checkpointed."""

MIN_SAVED_TIME_FRACTION = 0.005
"""Fraction of a step's time that checkpointing a tensor has to save."""


# Loops ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LoopEstimate:
    """Memory and time of a loop in some number of tiles.

    Attributes:
        num_bytes: Peak of an iteration.
        saved_bytes: Rows that are saved for another loop.
        times: Returns `seconds` and `least_seconds`. A search needs those of few grids.
    """

    num_bytes: int
    saved_bytes: int
    times: Callable[[], tuple[float, float]]

    @property
    def seconds(self) -> float:
        """Time of all iterations."""
        return self.times()[0]

    @property
    def least_seconds(self) -> float:
        """Lower bound of the time in as many tiles or more."""
        return self.times()[1]


UNTILEABLE = LoopEstimate(num_bytes=2**62, saved_bytes=0, times=lambda: (math.inf, 0.0))
"""Estimate of a loop that cannot run in its grid."""


class LoopEstimates:
    """Estimates of loops by number of tiles; loops that differ in names only share them."""

    def __init__(self, traced: TracedStep) -> None:
        self.traced = traced
        self._programs: dict[Hashable, int] = {}
        self._estimates: dict[Hashable, LoopEstimate] = {}
        self._results: dict[Hashable, Results] = {}
        self._numbers: dict[LoopSpec, int] = {}
        self._last: tuple[Hashable, TileLoop] | None = None

    def programs(self, segment: Segment) -> list[int]:
        """Return for each loop of a segment with barriers a number that equal loops share."""
        return [self._program(segment, loop) for loop in segment.loop_specs]

    def _program(self, segment: Segment, loop: LoopSpec) -> int:
        if loop not in self._numbers:
            key = loop_signature(self.traced.analysis, segment.kinds, loop)
            self._numbers[loop] = self._programs.setdefault(key, len(self._programs))
        return self._numbers[loop]

    def of(self, key: Hashable, plan: Callable[[], TileLoop]) -> LoopEstimate:
        """Return the estimate of a program with its halo and grid, for which `plan` plans the loop."""
        if key not in self._estimates:
            try:
                loop = self.shared(key, plan())
            except NotTileableError:  # Such as more tiles than rows that can be carried.
                return self._estimates.setdefault(key, UNTILEABLE)
            batch, costs = self.traced.batch, self.traced.costs
            saved_bytes = sum(self.traced.resident_bytes(save.saved) for save in loop.saves)

            @functools.cache
            def times() -> tuple[float, float]:
                # Planned loops are large, and only the last one is cached.
                loop = self._last[1] if self._last is not None and self._last[0] == key else plan()
                return costs.tile_loop(loop), costs.lower_bound.tile_loop(loop)

            peak_bytes = self.traced.loop_memory.peak_bytes(loop, batch)
            self._estimates[key] = LoopEstimate(peak_bytes, saved_bytes, times)
        return self._estimates[key]

    def shared(self, key: Hashable, loop: TileLoop) -> TileLoop:
        """Return a loop, bound to the estimates of equal loops in the same grid."""
        self._last = key, loop
        self.traced.loop_memory.bind(loop, self._results.setdefault(key, {}))
        if key in self._estimates:
            self.traced.costs.bind(loop, self._estimates[key].seconds)
        return loop


def fastest_fitting(grids: Sequence[Grid], limit: float, estimate: Callable[[Grid], LoopEstimate]) -> Grid | None:
    """Return the fastest grid, of grids with more and more tiles, whose iterations take at most `limit` bytes each.

    It is `None` if none fits.
    """
    grid = coarsest_fitting(grids, lambda grid: estimate(grid).num_bytes, limit)
    if grid is None:
        return None
    return fastest(grids, grid, lambda grid: (estimate(grid).seconds, estimate(grid).least_seconds))


# Segments ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CheckpointCandidate:
    """An inner tensor of a segment that is worth checkpointing.

    Attributes:
        tensor: The tensor.
        spared: Ops that its checkpoint spares from recomputation, given those of the candidates before it.
    """

    tensor: Tensor
    spared: frozenset[Node]


@dataclasses.dataclass(frozen=True)
class TilingEstimate:
    """Memory and time of a segment in some number of tiles, without checkpoints of inner tensors.

    Attributes:
        iteration_bytes: Bytes that an iteration of the backward loop takes of the allocator.
        saved_bytes: Rows that one loop saves for the other.
        seconds: Time of both loops.
        coarsening: Backward tiles along each axis over forward ones.
        savings: Seconds that the checkpoint of each candidate saves, given those before it.
    """

    iteration_bytes: float
    saved_bytes: float
    seconds: float
    coarsening: int
    savings: tuple[float, ...]

    def towards(self, other: TilingEstimate, tiles: float, first: int, last: int) -> TilingEstimate:
        """Interpolate between this estimate, for `first` tiles, and the other one, for `last` tiles.

        The bytes of an iteration scale with the size of a tile. Time and borders grow with the number of tiles.
        """
        linear = (tiles - first) / (last - first)
        logarithmic = math.log(tiles / first) / math.log(last / first)

        def between(low: float, high: float) -> float:
            return low + linear * (high - low)

        return TilingEstimate(
            self.iteration_bytes ** (1 - logarithmic) * other.iteration_bytes**logarithmic,
            between(self.saved_bytes, other.saved_bytes),
            between(self.seconds, other.seconds),
            min(self.coarsening, other.coarsening),
            tuple(map(between, self.savings, other.savings)),
        )


class EstimateCache:
    """Estimates of segments; those that differ in names only share them."""

    def __init__(self) -> None:
        self._tilings: dict[Hashable, dict[Grid, TilingEstimate]] = {}
        self._candidates: dict[Hashable, list[tuple[int, int, list[int]]]] = {}

    def tilings(self, key: Hashable) -> dict[Grid, TilingEstimate]:
        """Return the estimates by grid of a segment with its halo."""
        return self._tilings.setdefault(key, {})

    def candidates(self, traced: TracedStep, key: Hashable, segment: Segment) -> list[CheckpointCandidate]:
        """Return the tensors of a segment that are worth checkpointing, the best first."""
        nodes = [*segment.forward, *segment.backward]
        if key not in self._candidates:
            number = {node: position for position, node in enumerate(nodes)}
            self._candidates[key] = [
                (number[one.tensor.node], one.tensor.index, sorted(number[node] for node in one.spared))
                for one in _checkpoint_candidates(traced, segment)
            ]
        return [
            CheckpointCandidate(nodes[position].out(index), frozenset(nodes[other] for other in spared))
            for position, index, spared in self._candidates[key]
        ]


def segment_tilings(
    traced: TracedStep, segment: Segment, blocks: tuple[int, int], estimates: EstimateCache, *, is_last: bool
) -> list[SegmentTilings]:
    """Return the tilings of a segment: in one loop if possible, and for each way to get halos.

    Args:
        traced: The step.
        segment: The segment.
        blocks: Its first position in its component, and one past the last.
        estimates: Estimates of equal segments, to which the tilings add.
        is_last: Whether the segment ends its component, so that its loop may sum its results.
    """
    ways = [(segment, halo) for halo in Halo]
    if is_last and not segment.backward:
        ways.insert(0, (with_final_sums(traced.analysis, segment), Halo.RECOMPUTE))
    only_one = in_one_loop(traced.analysis, segment, set())
    if only_one is not None:
        ways.insert(0, (only_one, Halo.RECOMPUTE))
    result = []
    for one, halo in ways:
        key = segment_signature(traced.analysis, one)
        candidates = estimates.candidates(traced, key, one)
        known = estimates.tilings((key, halo))
        result.append(SegmentTilings(traced, one, blocks=blocks, halo=halo, candidates=candidates, estimates=known))
    return result


class SegmentTilings:
    """A segment in any number of tiles, with any of the candidates checkpointed.

    The arguments are those of `segment_tilings`.

    Attributes:
        segment: The segment.
        grids: Grids to try, each with more tiles than the one before.
        candidates: Inner tensors that are worth checkpointing, the best first.
    """

    def __init__(
        self,
        traced: TracedStep,
        segment: Segment,
        *,
        blocks: tuple[int, int],
        halo: Halo,
        candidates: Sequence[CheckpointCandidate],
        estimates: dict[Grid, TilingEstimate],
    ) -> None:
        self.segment = segment
        self.grids = thinned(auto_grids(traced.analysis, segment, traced.batch, halo is Halo.CARRY), GRID_GROWTH)
        self.candidates = candidates
        self._traced = traced
        self._blocks = blocks
        self._halo = halo
        self._planner = planner_for(traced.analysis, segment, halo)
        self._estimates = estimates
        # A ratio that is too large for few tiles is so for more.
        self._coarsenings: tuple[int, ...] = FORWARD_COARSENING if segment.backward else (1,)
        sizes = (candidate.tensor.num_bytes(traced.batch) for candidate in candidates)
        self._checkpoint_bytes = list(itertools.accumulate(sizes, initial=0))
        self._planned_positions = self._to_plan()

    def _to_plan(self) -> list[int]:
        """Return the positions of the grids that are planned: each has many more tiles, or strips of equal height."""
        limits = max_tiles(self._traced.analysis, self.segment)
        rows, carries = limits[first_axis(limits)], self._halo is Halo.CARRY
        positions = [0]
        for position, grid in enumerate(self.grids):
            is_equal = carries and rows % math.prod(grid.spatial) == 0  # Such strips carry the fewest rows.
            has_grown = grid.num_tiles >= PLANNED_GROWTH * self.grids[positions[-1]].num_tiles
            if position and (is_equal or has_grown or position == len(self.grids) - 1):
                positions.append(position)
        return positions

    def with_checkpoints(self, choice: BlockChoice, count: int) -> BlockChoice:
        """Return a choice with the first `count` candidates checkpointed, and their bytes saved."""
        assert choice.grid is not None
        return dataclasses.replace(
            choice,
            saved_bytes=choice.saved_bytes + self._checkpoint_bytes[count],
            seconds=choice.seconds - sum_in_order(self._estimate(choice.grid).savings[:count]),
            checkpoints=frozenset(candidate.tensor for candidate in self.candidates[:count]),
        )

    def choice(self, grid: Grid) -> BlockChoice:
        """Return the segment in a grid: the saved bytes are those of rows, and the working bytes of an iteration."""
        estimate = self._estimate(grid)
        first, last = self._blocks
        return BlockChoice(
            first=first,
            last=last,
            grid=grid,
            forward_grid=_coarser(grid, estimate.coarsening),
            halo=self._halo,
            one_loop=self.segment.one_loop,
            saved_bytes=math.ceil(estimate.saved_bytes),
            working_bytes=math.ceil(estimate.iteration_bytes),
            seconds=estimate.seconds,
        )

    def row_bytes(self, choice: BlockChoice) -> int:
        """Return the bytes of the rows that one loop of a choice saves for the other."""
        assert choice.grid is not None
        return math.ceil(self._estimate(choice.grid).saved_bytes)

    def _estimate(self, grid: Grid) -> TilingEstimate:
        """Return the estimate of a planned grid, or interpolate between the two planned ones around it."""
        index = self.grids.index(grid)
        after = bisect.bisect_left(self._planned_positions, index)
        if self._planned_positions[after] == index:
            return self._planned(grid)
        first, last = (self.grids[self._planned_positions[number]] for number in (after - 1, after))
        return self._planned(first).towards(self._planned(last), grid.num_tiles, first.num_tiles, last.num_tiles)

    def _planned(self, grid: Grid) -> TilingEstimate:
        """Return the estimate of a grid from its planned loops, which are large and not cached."""
        if grid not in self._estimates:
            batch, costs = self._traced.batch, self._traced.costs
            coarsening, loops = self._loops(grid)
            saved_bytes = sum(save.saved.num_bytes(batch) for loop in loops for save in loop.saves)
            savings = tuple(self._saving(costs, loops[-1], candidate) for candidate in self.candidates)
            seconds = sum_in_order(map(costs.tile_loop, loops))
            iteration_bytes = self._traced.loop_memory.allocated_bytes(loops[-1], batch)
            self._estimates[grid] = TilingEstimate(iteration_bytes, saved_bytes, seconds, coarsening, savings)
        return self._estimates[grid]

    def _saving(self, costs: CostModel, backward: TileLoop, candidate: CheckpointCandidate) -> float:
        """Return the seconds that a checkpoint saves in the backward loop, given those of the candidates before."""
        spared = candidate.spared.intersection(backward.body)
        return sum_in_order(costs.op_in_loop(backward, node) for node in spared)

    def _loops(self, grid: Grid) -> tuple[int, list[TileLoop]]:
        """Plan the loops with the coarsest forward grid that needs no more memory than the backward loop.

        Each tile costs halos, and one more read of the weights.
        """
        memory, batch = self._traced.loop_memory, self._traced.batch
        for coarsening in self._coarsenings:
            forward = _coarser(grid, coarsening)
            loops = self._planner.tile_loops(forward, grid)
            if forward == grid or len(loops) == 1:
                break
            if memory.allocated_bytes(loops[0], batch) <= memory.allocated_bytes(loops[-1], batch):
                break
        self._coarsenings = self._coarsenings[self._coarsenings.index(coarsening) :]
        return coarsening, loops


def _coarser(grid: Grid, ratio: int) -> Grid:
    """Return a grid with `ratio` times fewer tiles along each axis."""
    return Grid(grid.batch, tuple(-(-count // ratio) for count in grid.spatial))


def _checkpoint_candidates(traced: TracedStep, segment: Segment) -> list[CheckpointCandidate]:
    """Return inner tensors to checkpoint, greedily by the time that they save for their size, in one tile."""
    if segment.one_loop or not segment.backward:
        return []
    analysis, batch = traced.analysis, traced.batch
    grid = auto_grids(analysis, segment, batch)[0]
    backward = planner_for(analysis, segment, Halo.RECOMPUTE).tile_loops(grid, grid)[-1]
    seconds = {n: traced.costs.op_in_loop(backward, n) for n in backward.body if n not in analysis.backward}
    wanted = [t for n in backward.body if n in analysis.backward for t in n.inputs if t.node in seconds]
    available, recomputed = set(segment.available), _recomputed(wanted, segment.available, seconds)
    candidates: list[CheckpointCandidate] = []
    while len(candidates) < MAX_CHECKPOINTS:
        options, before = [], _sum_of(recomputed, seconds)
        for tensor in (node.out(index) for node in recomputed for index in range(len(node.outputs))):
            if analysis.entries_per_image(tensor) != 1:
                continue  # Space-to-batch folding scatters the images of an iteration.
            saved = before - _sum_of(_recomputed(wanted, available | {tensor}, seconds), seconds)
            if saved > MIN_SAVED_TIME_FRACTION * traced.seconds:
                options.append((saved / tensor.num_bytes(batch), tensor.name, saved, tensor))
        if not options:
            break
        _, _, _, tensor = max(options)
        available.add(tensor)
        remaining = _recomputed(wanted, available, seconds)
        candidates.append(CheckpointCandidate(tensor, frozenset(recomputed - remaining)))
        recomputed = remaining
    return candidates


def _sum_of(nodes: Iterable[Node], seconds: Mapping[Node, float]) -> float:
    """Return the time of the ops that have one."""
    return sum_in_order(seconds.get(node, 0.0) for node in nodes)


def _recomputed(wanted: Iterable[Tensor], available: Container[Tensor], within: Container[Node]) -> set[Node]:
    """Return the ops of `within` that have to run for the wanted tensors."""
    nodes: set[Node] = set()
    stack = list(wanted)
    while stack:
        tensor = stack.pop()
        if tensor not in available and tensor.node in within and tensor.node not in nodes:
            nodes.add(tensor.node)
            stack.extend(tensor.node.inputs)
    return nodes
