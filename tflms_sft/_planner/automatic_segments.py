"""Ends of automatic segments in requested tiles, chosen by the cost model.

A longer segment saves fewer tensors, but its tiles recompute wider halos. The search goes through the same stretches as
the search for a budget (`tflms_sft/_search/chain_stretches.py`), with one way to tile each, and weighs memory
against time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

import numpy as np

from rewriters.emission.loop_signature import segment_signature
from rewriters.emission.tile_pass import SegmentPlan
from rewriters.errors import NotTileableError
from rewriters.estimates.op_cost import sum_in_order
from rewriters.tiling.ft_segments import TileableComponent, find_components, recomputes, try_segment
from rewriters.tiling.segment import Segment
from rewriters.tiling.tile_planner import Grid
from tflms_sft._barriers.barrier_stretches import BarrierStretches
from tflms_sft._barriers.barriers import Barriers
from tflms_sft._search.block_chain import BlockChain, SegmentTiling
from tflms_sft._search.block_choices import BlockChoice
from tflms_sft._search.chain_stretches import ChainStretches
from tflms_sft._search.moments import StepMoments
from tflms_sft._search.priced_paths import PricedPaths
from tflms_sft._search.stretch_graph import Path, Stretch
from tflms_sft._search.traced_step import Candidate, TracedStep, predict, predicted_peak

TIME_EXPONENT = 1.5
"""Weight of time against memory: 1 % more time has to save this many per cent of memory."""

MAX_PEAK_FRACTION = 0.97
"""Peak of a plan that is worth its time, over that of the original step."""

MAX_CUTS = 24
"""Places in a component where an automatic segment may end."""

LIMIT_RATIO = 0.88
"""Limit of the bytes of a path, over that of the one before."""

MAX_PREDICTED = 3
"""Plans, of those for all limits, whose whole step is predicted."""

LEAST_FACTOR = 1.01
"""Limit of the bytes of the segment that saves the fewest, over the smallest one that some path meets."""

UNLIMITED_BYTES = 2.0**62

PlanSegment = Callable[[Segment], SegmentPlan]
"""Plans a segment in the requested tiles; raises `NotTileableError` if they are impossible."""


def best_candidate(traced: TracedStep, candidates: Iterable[Candidate], max_fraction: float) -> Candidate | None:
    """Return the candidate with the lowest product of memory and weighted time; `None` if none saves memory.

    Candidates are predicted for fresh memory. `max_fraction` is the highest peak, over that of the original step.
    """
    original = predicted_peak(traced, [], limit=0)
    best, lowest = None, math.inf
    for candidate in candidates:
        fraction = candidate.peak.peak_bytes / original.peak_bytes
        score = fraction * max(candidate.time_ratio, 1.0) ** TIME_EXPONENT
        if candidate.plans and fraction <= max_fraction and score < lowest:
            best, lowest = candidate, score
    return best


class RequestedSearch:
    """Segments of a training step without barriers in requested tiles.

    Attributes:
        left: Ops that cannot be tiled, with reasons.
    """

    def __init__(self, traced: TracedStep, plan: PlanSegment) -> None:
        components, self.left = find_components(traced.analysis)
        self._traced = traced
        self._chains = [_RequestedBlocks(traced, component, plan) for component in components]

    def candidates(self) -> Iterator[Candidate]:
        """Yield the plans of the paths with the best estimated scores, predicted for fresh memory."""
        if not self._chains:
            return
        stretches = ChainStretches(self._traced, self._chains)
        traced, scores = self._traced, dict[Path, float]()
        for path in _paths(traced, stretches.stretches, stretches.moments):
            seconds = max(stretches.outside_seconds + path.seconds, traced.seconds)
            num_bytes = traced.held_bytes + float(path.usage.max())
            scores[path] = num_bytes * (seconds / traced.seconds) ** TIME_EXPONENT
        for path in heapq.nsmallest(MAX_PREDICTED, scores, key=scores.__getitem__):
            plans = [plan for plan in stretches.planned(path)[0] if plan is not None]
            yield predict(traced, plans, limit=0)


class RequestedLevels:
    """Levels of a training step with barriers in requested tiles: each stays untiled, or runs in these tiles."""

    def __init__(self, traced: TracedStep, barriers: Barriers, plan: PlanSegment) -> None:
        self._traced = traced
        self._plan = plan
        self._stretches = BarrierStretches(traced, barriers, self._costs)

    def _costs(self, segment: Segment) -> list[list[tuple[float, float]]]:
        """Return bytes of an iteration and time of each loop of a segment in the requested tiles."""
        memory, costs, batch = self._traced.loop_memory, self._traced.costs, self._traced.batch
        return [[(memory.peak_bytes(loop, batch), costs.tile_loop(loop))] for loop in self._plan(segment).loops]

    def candidates(self) -> Iterator[Candidate]:
        """Yield plans from the most bytes to the fewest, predicted for fresh memory.

        All paths are predicted, because sums miss the time of loops between levels of other families.
        """
        stretches = self._stretches
        for path in _paths(self._traced, stretches.stretches, stretches.levels.moments):
            chosen = stretches.plan(path)
            if len(chosen.untiled) < stretches.levels.count:
                yield predict(self._traced, [self._plan(stretches.segment("segment1", chosen))], limit=0)

    def smallest(self, name: str) -> Segment:
        """Return the segment whose levels all run in tiles and that saves the fewest bytes."""
        tiled = [stretch for stretch in self._stretches.stretches if self._stretches.is_tiled(stretch)]
        priced, limits = PricedPaths(tiled), np.full(self._stretches.levels.moments_count, UNLIMITED_BYTES)
        path = priced.fastest_within(limits).path
        assert path is not None
        limits[:] = LEAST_FACTOR * priced.least_limit(float(path.usage.max()))
        path = priced.fastest_within(limits).path or path
        return self._stretches.segment(name, self._stretches.plan(path))


def _paths(traced: TracedStep, stretches: Sequence[Stretch], moments: StepMoments) -> Iterator[Path]:
    """Yield the fastest path for each limit that one meets, from the original step's peak down."""
    priced, limits = PricedPaths(stretches), np.full(moments.count, float(traced.plain.peak.peak_bytes))
    solution = priced.fastest_within(limits)
    while solution.path is not None:
        yield solution.path
        limits[:] = LIMIT_RATIO * min(limits[0], float(solution.path.usage.max()))
        solution = priced.fastest_within(limits, solution.prices)


class _RequestedTiling:
    """The one tiling of a segment that a user requests (`SegmentTiling`)."""

    candidates = ()

    def __init__(self, segment: Segment, choice: BlockChoice) -> None:
        assert choice.grid is not None
        self.segment = segment
        self.grids = [choice.grid]
        self._choice = choice

    def choice(self, grid: Grid) -> BlockChoice:
        """Return the requested tiles."""
        del grid
        return self._choice

    def with_checkpoints(self, choice: BlockChoice, count: int) -> BlockChoice:
        """Return a choice, which has no checkpoints."""
        del count
        return choice

    def row_bytes(self, choice: BlockChoice) -> int:
        """Return the bytes of the rows that one loop saves for the other."""
        return choice.saved_bytes


class _RequestedBlocks(BlockChain):
    """A component of a training step whose segments run in requested tiles."""

    def __init__(self, traced: TracedStep, component: TileableComponent, plan: PlanSegment) -> None:
        super().__init__(traced, component, MAX_CUTS)
        self._plan = plan
        self._choices: dict[Hashable, BlockChoice] = {}

    def tilings(self, first: int, last: int) -> Sequence[SegmentTiling]:
        """Return the requested tiling of blocks; none if it recomputes nothing, or is impossible."""
        if self._is_too_long(first, last):
            return []
        with contextlib.suppress(NotTileableError):
            segment = try_segment(self._traced.analysis, self.component, range(first, last), set(), "candidate")
            if not recomputes(segment):
                return []  # Only a budget tells whether less scratch memory is worth the time.
            key = segment_signature(self._traced.analysis, segment)  # Equal blocks of a deep network share it.
            if key not in self._choices:
                self._choices[key] = self._choice(segment, first, last)
            return [_RequestedTiling(segment, dataclasses.replace(self._choices[key], first=first, last=last))]
        return []

    def _choice(self, segment: Segment, first: int, last: int) -> BlockChoice:
        batch, plan, memory = self._traced.batch, self._plan(segment), self._traced.loop_memory
        return BlockChoice(
            first=first,
            last=last,
            grid=plan.loops[-1].grid,
            forward_grid=plan.loops[0].grid,
            halo=plan.halo,
            saved_bytes=sum(save.saved.num_bytes(batch) for loop in plan.loops for save in loop.saves),
            working_bytes=max(memory.allocated_bytes(loop, batch) for loop in plan.loops),
            seconds=sum_in_order(map(self._traced.costs.tile_loop, plan.loops)),
        )
