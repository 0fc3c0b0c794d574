"""Tiles of given loops between barriers: the fewest with which iterations, or the whole step, stay within a limit."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence

from rewriters.emission.tile_pass import LOOP_SCOPE, SegmentPlan
from rewriters.tiling.barrier_planner import BarrierPlanner
from rewriters.tiling.row_planner import RowBarrierPlanner
from rewriters.tiling.segment import Segment
from rewriters.tiling.tile_grids import loop_grids, thinned
from rewriters.tiling.tile_planner import Grid, Halo
from tflms_sft._search.segment_tilings import LoopEstimate, LoopEstimates, fastest_fitting
from tflms_sft._search.traced_step import Candidate, TracedStep, predict

MIN_ITERATION_FRACTION = 1 / 32
"""Bytes of the smallest iterations that are tried, over those of the largest tensor that a loop writes."""

MAX_STALE = 3
"""Consecutive predictions without a lower peak after which no more tiles are tried."""

EXCESS_FACTOR = 1.05
"""Bytes by which an iteration has to shrink, over those by which the step exceeds the limit while it runs."""

SHRINKAGE = 0.6
"""Least bytes of an iteration in more tiles, over those before."""


GRID_GROWTH = 4.0
"""Tiles of a grid of which a loop is estimated, over those of the one before."""

MAX_SECONDS_GROWTH = 8.0
"""Time of a loop, over its time in the fewest tiles, from which on no more tiles are estimated."""

SMALL_ITERATION = 1 / 128
"""Bytes of an iteration, over the peak of the original step, from which on no more tiles are estimated."""


class TiledLoops:
    """A segment with barriers, each of whose loops may run in any number of tiles.

    Args:
        estimates: Estimates of loops.
        segment: The segment.
        halo: How tiles get the rows that they share.
        programs: A number for each loop that equal loops share (`LoopEstimates.programs`).
    """

    def __init__(
        self,
        estimates: LoopEstimates,
        segment: Segment,
        *,
        halo: Halo = Halo.RECOMPUTE,
        programs: Sequence[int] | None = None,
    ) -> None:
        self.segment = segment
        self.halo = halo
        self._estimates = estimates
        planner = RowBarrierPlanner if halo is Halo.CARRY else BarrierPlanner
        self._planner = planner(estimates.traced.analysis, segment)
        self._programs = estimates.programs(segment) if programs is None else programs

    @functools.cached_property
    def grids(self) -> list[list[Grid]]:
        """Grids to try for each loop, from one tile up."""
        analysis, batch = self._estimates.traced.analysis, self._estimates.traced.batch
        splits = (self._planner.split(loop) for loop in self.segment.loop_specs)
        return [loop_grids(analysis, split, batch, self.halo is Halo.CARRY) for split in splits]

    def estimate(self, number: int, grid: Grid) -> LoopEstimate:
        """Return memory and time of one of the loops in a grid."""
        loop = self.segment.loop_specs[number]
        return self._estimates.of(self._key(number, grid), lambda: self._planner.tile_loop(loop, grid))

    def costs(self) -> list[list[tuple[float, float]]]:
        """Return bytes of an iteration and time for more and more tiles of each loop; every second is interpolated."""
        return [self._costs(number) for number in range(len(self.segment.loop_specs))]

    def _costs(self, number: int) -> list[tuple[float, float]]:
        small, pairs = SMALL_ITERATION * self._estimates.traced.plain.peak.peak_bytes, list[tuple[float, float]]()
        for grid in thinned(self.grids[number], GRID_GROWTH):
            estimate = self.estimate(number, grid)
            num_bytes, seconds = estimate.num_bytes, estimate.seconds
            if pairs:  # Bytes fall as a power of the number of tiles, and time rises linearly.
                before, faster = pairs[-1]
                part = 1 / (1 + GRID_GROWTH**0.5)
                pairs.append(((before * num_bytes) ** 0.5, faster + part * (seconds - faster)))
            pairs.append((num_bytes, seconds))
            if num_bytes <= small or seconds > MAX_SECONDS_GROWTH * pairs[0][1]:
                break
        return pairs

    def _key(self, number: int, grid: Grid) -> Hashable:
        return (self._programs[number], self.halo is Halo.CARRY, grid)  # Hashes of enums are slow.

    def fitting_grids(self, limit: Callable[[int], float]) -> list[Grid]:
        """Return for each loop the fewest tiles of which an iteration takes at most `limit(number)` bytes.

        Where more tiles are faster, these are taken; where no grid fits, the finest one.
        """
        return [self._fitting(number, limit(number)) or grids[-1] for number, grids in enumerate(self.grids)]

    def _fitting(self, number: int, limit: float) -> Grid | None:
        return fastest_fitting(self.grids[number], limit, functools.partial(self.estimate, number))

    def small_iterations(self, limit: float) -> list[Grid]:
        """Return the fewest tiles of which an iteration takes at most `limit` bytes, or as many more than the least.

        Some bytes are taken in any number of tiles, such as those of filters in the layout of a kernel.
        """
        return [
            self._fitting(number, limit)
            or self._fitting(number, limit + self.estimate(number, grids[-1]).num_bytes)
            or grids[-1]
            for number, grids in enumerate(self.grids)
        ]

    def planned(self, grids: Sequence[Grid]) -> SegmentPlan:
        """Plan the loops in these grids."""
        remaining = iter(grids)
        loops = self._planner.tile_loops(lambda loop: next(remaining))
        keys = (self._key(number, grid) for number, grid in enumerate(grids))
        return SegmentPlan(self.segment, list(map(self._estimates.shared, keys, loops)), self.halo)


def plan_for_capacity(traced: TracedStep, segment: Segment, capacity: int | None, halo: Halo) -> SegmentPlan:
    """Plan loops in the fewest tiles of which an iteration takes `capacity` bytes, or as many more than the least.

    Without a capacity an iteration may take as much as the largest tensor that a loop writes.
    """
    loops = TiledLoops(LoopEstimates(traced), segment, halo=halo)
    return loops.planned(loops.small_iterations(capacity or _largest_result(traced, segment)))


def _largest_result(traced: TracedStep, segment: Segment) -> int:
    """Return the bytes of the largest tensor that a loop writes."""
    return max((t.num_bytes(traced.batch) for loop in segment.loop_specs for t in loop.writes), default=1)


def loop_numbers(candidate: Candidate, plan: SegmentPlan) -> dict[str, int]:
    """Return the number of the loop of each op in the timeline of a candidate that belongs to one of a segment."""
    scopes = {f"{LOOP_SCOPE}{plan.segment.name}/{loop.name}": number for number, loop in enumerate(plan.loops)}
    names = ((name, "/".join(name.split("/")[:3])) for name, _ in candidate.peak.timeline)
    return {name: scopes[scope] for name, scope in names if scope in scopes}


class LoopsWithin:
    """Loops of a segment in the fewest tiles with which the step stays within a limit.

    Args:
        traced: The step that is predicted.
        estimates: Estimates of loops, which may be those of a step without files.
        segment: The segment.

    Attributes:
        segment: The segment.
    """

    def __init__(self, traced: TracedStep, estimates: LoopEstimates, segment: Segment) -> None:
        self.segment = segment
        self._traced = traced
        programs = estimates.programs(segment)
        self._loops = {halo: TiledLoops(estimates, segment, halo=halo, programs=programs) for halo in Halo}

    @functools.cached_property
    def smallest(self) -> Candidate:
        """Plan with small iterations."""
        loops = self._loops[Halo.RECOMPUTE]
        num_bytes = MIN_ITERATION_FRACTION * _largest_result(self._traced, loops.segment)
        return predict(self._traced, [loops.planned(loops.small_iterations(num_bytes))])

    @functools.cached_property
    def _small_bytes(self) -> list[int]:
        """Bytes of an iteration of each loop in the plan with small iterations."""
        (plan,) = self.smallest.plans
        return [self._traced.loop_memory.peak_bytes(loop, self._traced.batch) for loop in plan.loops]

    @functools.cached_property
    def _bytes_beside(self) -> list[int]:
        """Bytes alive while each loop runs in the plan with small iterations, without its iterations."""
        peaks = self._peaks(self.smallest)
        return [peaks.get(number, 0) - num_bytes for number, num_bytes in enumerate(self._small_bytes)]

    def _peaks(self, candidate: Candidate) -> dict[int, int]:
        """Return the largest bytes while each loop runs."""
        (plan,) = candidate.plans
        numbers, peaks = loop_numbers(candidate, plan), dict[int, int]()
        for name, num_bytes in candidate.peak.timeline:
            if name in numbers:
                peaks[numbers[name]] = max(num_bytes, peaks.get(numbers[name], 0))
        return peaks

    def coarsest_seconds(self) -> list[float]:
        """Return the time of each loop in the fewest tiles."""
        loops = self._loops[Halo.RECOMPUTE]
        return [loops.estimate(number, grids[0]).seconds for number, grids in enumerate(loops.grids)]

    def holds(self, candidate: Candidate) -> bool:
        """Return whether a candidate has the loops of this segment."""
        return any(plan.segment is self.segment for plan in candidate.plans)

    def fastest_within(self, halo: Halo, limit: int) -> Candidate | None:
        """Return the plan with the fewest tiles found with which the step stays within `limit` bytes.

        The first grids give each loop the bytes that the tensors alive beside it leave. Sizes of iterations change the
        fragmentation, so that the memory model of the whole step may exceed the limit. Loops that run then get smaller
        iterations. If the peak does not fall, all loops get smaller iterations.
        """
        loops, rooms = self._loops[halo], [float(limit - beside) for beside in self._bytes_beside]
        floors, lowest, stale = list(map(float, self._small_bytes)), math.inf, 0
        while stale <= MAX_STALE:
            grids = loops.fitting_grids(list(map(max, rooms, floors)).__getitem__)
            candidate = predict(self._traced, [loops.planned(grids)])
            if candidate.peak.peak_bytes <= limit:
                return candidate
            excess = {number: peak - limit for number, peak in self._peaks(candidate).items() if peak > limit}
            if not excess:  # Other ops exceed the limit.
                break
            iterations = [loops.estimate(number, grid).num_bytes for number, grid in enumerate(grids)]
            stale = 0 if candidate.peak.peak_bytes < lowest else stale + 1
            lowest = min(lowest, candidate.peak.peak_bytes)
            if stale:
                rooms = [min(room, SHRINKAGE * size) for room, size in zip(rooms, iterations, strict=True)]
            for number, num_bytes in excess.items():
                smaller = iterations[number] - EXCESS_FACTOR * num_bytes
                rooms[number] = max(smaller, SHRINKAGE * iterations[number])
                floors[number] = min(floors[number], max(smaller, 0.0))
        return self.smallest if self.smallest.peak.peak_bytes <= limit else None
