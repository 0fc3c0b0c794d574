"""Tile plans of a training step with barriers by prices on memory.

A path of `barrier_stretches.py` fixes the loops: which levels stay untiled, and which tensors are stored, dropped, or
in files. The tiles of its loops are those with which the memory model of the whole step stays within the limit
(`tiled_loops.py`). The bytes that the model sees beside the iterations correct the stretches of the next path.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from rewriters.tiling.tile_planner import Halo
from tflms_sft._barriers.barrier_stretches import BarrierStretches, LevelPlan
from tflms_sft._barriers.barriers import Barriers
from tflms_sft._barriers.step_levels import StepLevels
from tflms_sft._barriers.tiled_loops import LoopsWithin, TiledLoops, loop_numbers
from tflms_sft._search.priced_paths import PricedPaths
from tflms_sft._search.segment_tilings import LoopEstimates
from tflms_sft._search.stretch_graph import Path
from tflms_sft._search.traced_step import Candidate, TracedStep

SUM_FRACTIONS = ((1.0, 4), (0.9, 4), (0.8, 2), (0.65, 2), (0.5, 1), (0.35, 1))
"""Limits of the sums, over the limit of the step, for which a first path is sought; and paths that are modelled.

Each path corrects the sums of the next.
"""

MAX_FITTING = 8
"""Plans that fit a limit after which no more are sought."""

MAX_STALE_PLANS, STALE_TIME_RATIO = 2, 0.99
"""Plans in a row that fit, and their time over the least before them, after which no more are sought."""

SMALL_GAP = 0.02
"""Time of the best plan above the bound of the sums, over the bound, at which the search ends."""

MAX_EXCESS = 1.005
"""Peak in small iterations, over the limit, from which on no tiles of a path are tried."""

MAX_SUM = 1.1
"""Sum of the bytes of a family's plan, over the limit, up to which it is modelled, because sums may be too large."""

SMALLEST_FACTORS = (1.01, 1.15, 1.35)
"""Limits of the sums, over the least that a path meets, for the plan that needs least."""

MAX_PROPOSED = 2
"""Paths that are modelled for a plan that need not be the fastest."""

MAX_PLANS = 24
"""Maximum number of cached plans. Their loops are large."""


class BarrierSearch:
    """Tile plans of a step with barriers (`TileSearch`).

    Attributes:
        left: Ops that cannot be tiled, with reasons.
    """

    def __init__(self, traced: TracedStep, barriers: Barriers, estimates: LoopEstimates | None = None) -> None:
        self._traced = traced
        self._barriers = barriers
        self._estimates = estimates or LoopEstimates(dataclasses.replace(traced, files=None))
        self.left = barriers.left
        self._plans: dict[LevelPlan, LoopsWithin] = {}
        self._candidates: list[Candidate] = []
        self._searched: set[int] = set()

    @functools.cached_property
    def in_memory(self) -> BarrierSearch:
        """The search among plans without files, with the estimates of this one."""
        if self._traced.files is None:
            return self
        return BarrierSearch(dataclasses.replace(self._traced, files=None), self._barriers, self._estimates)

    def proposed(self, target: int) -> Candidate | None:
        """Return a plan for a target from a short search, whether its step meets it or not."""
        if self._traced.plain.peak.peak_bytes <= target:
            return self._traced.plain
        if target not in self._searched and target > self._traced.held_bytes:
            self._model_paths(target, 1.0, MAX_PROPOSED, {})
        return self._best(target) or self.smallest

    def fastest_within(self, limit: int) -> Candidate | None:
        """Return the fastest plan found whose step stays within `limit` bytes; plans of other limits count."""
        if self._traced.plain.peak.peak_bytes <= limit:
            return self._traced.plain
        if limit not in self._searched:
            self._searched.add(limit)
            self._search(limit)
        return self._best(limit)

    def _best(self, limit: int) -> Candidate | None:
        """Return the fastest plan so far whose step stays within a limit."""
        return min((one for one in self._candidates if one.peak.peak_bytes <= limit), key=_rank, default=None)

    @functools.cached_property
    def smallest(self) -> Candidate:
        """Plan with the lowest peak found, equal after any search."""
        least, count = self._priced.least_limit(2 * self._traced.plain.peak.peak_bytes), self._levels.moments_count
        self._priced.graph.forget_corrections()
        paths = (self._priced.fastest_within(np.full(count, factor * least)).path for factor in SMALLEST_FACTORS)
        plans = [self._stretches.plan(path) for path in paths if path is not None]
        plans += (family.plan for family in self._stretches.of_families)
        smallest = min((self._traced.plain, *map(self._in_small_iterations, plans)), key=_peak_bytes)
        self._candidates.append(smallest)
        return smallest

    @functools.cached_property
    def _stretches(self) -> BarrierStretches:
        return BarrierStretches(
            self._traced, self._barriers, lambda segment: TiledLoops(self._estimates, segment).costs()
        )

    @property
    def _levels(self) -> StepLevels:
        return self._stretches.levels

    @functools.cached_property
    def _priced(self) -> PricedPaths:
        return PricedPaths(self._stretches.stretches)

    def _search(self, limit: int) -> None:
        """Model paths for a limit, then the plans of families, and the fastest of all with carried halos."""
        if limit <= self._traced.held_bytes:
            return
        modelled: dict[LevelPlan, float] = {}
        for fraction, count in SUM_FRACTIONS:
            bound = self._model_paths(limit, fraction, count, modelled)
            if min(modelled.values(), default=np.inf) <= (1 + SMALL_GAP) * bound:
                break
        self._model_families(limit, min(modelled.values(), default=np.inf))
        fastest = self._best(limit)
        if fastest is not None and fastest.plans:
            self._try_carried_halos(fastest, limit)

    def _model_paths(self, limit: int, fraction: float, count: int, modelled: dict[LevelPlan, float]) -> float:
        """Model paths, each with the corrections of those before it, until none promises a faster plan.

        Args:
            limit: Limit of the step in bytes.
            fraction: Limit of the sums of the first path, over that of the step.
            count: Maximum number of paths.
            modelled: Time of the step in seconds by plan, infinity for a plan that does not fit; paths are added.

        Returns:
            Lower bound of the time of all paths, by the sums with the corrections of the last one.
        """
        limits = np.full(self._levels.moments_count, limit - self._traced.held_bytes)
        self._priced.graph.forget_corrections()
        seen, bound, prices = set[LevelPlan](), 0.0, None
        for number in range(count):
            solution = self._priced.fastest_within(limits * (1.0 if number else fraction), prices)
            bound, prices = self._stretches.outside_seconds + solution.bound, solution.prices
            fitting = [seconds for seconds in modelled.values() if seconds < np.inf]
            if solution.path is None or bound >= min(fitting, default=np.inf) or _is_settled(fitting):
                break
            plan = self._stretches.plan(solution.path)
            if plan in seen:
                break
            seen.add(plan)
            if plan not in modelled:
                modelled[plan] = self._model(plan, limit)
            self._correct(solution.path, plan)
        return bound

    def _model_families(self, limit: int, best: float) -> None:
        """Model the plans with all levels in tiles that save all tensors of a family, unless slower than `best`.

        Near the smallest budget they often fit where no other path does, because sums lack fragmentation.
        """
        for family in self._stretches.of_families:
            if family.seconds < best and self._traced.held_bytes + family.num_bytes <= MAX_SUM * limit:
                best = min(best, self._model(family.plan, limit))

    def _model(self, plan: LevelPlan, limit: int) -> float:
        """Model the loops of a path within a limit, and return the time of the step; infinity if it does not fit."""
        small = self._in_small_iterations(plan)
        if not small.plans or small.peak.peak_bytes > MAX_EXCESS * limit:
            return np.inf
        candidate = self._loops(plan).fastest_within(Halo.RECOMPUTE, limit)
        if candidate is None:
            return np.inf
        self._candidates.append(candidate)
        return candidate.time_ratio * self._traced.seconds

    def _in_small_iterations(self, plan: LevelPlan) -> Candidate:
        """Return the loops of a path in small iterations; the original step if no level runs in tiles."""
        if len(plan.untiled) == self._levels.count:
            return self._traced.plain
        return self._loops(plan).smallest

    def _try_carried_halos(self, fastest: Candidate, limit: int) -> None:
        """Model the loops of the fastest plan with carried halos, where recomputed ones split rows at all."""
        loops = next((one for one in self._plans.values() if one.holds(fastest)), None)
        if loops is None or all(max(loop.grid.spatial) == 1 for loop in fastest.plans[0].loops):
            return
        candidate = loops.fastest_within(Halo.CARRY, limit)
        if candidate is not None:
            self._candidates.append(candidate)

    def _loops(self, plan: LevelPlan) -> LoopsWithin:
        """Return the loops of a path."""
        if plan not in self._plans:
            while len(self._plans) >= MAX_PLANS:
                del self._plans[next(iter(self._plans))]
            traced = self._traced
            segment = self._stretches.segment("segment1", plan)
            files = traced.files
            if files is not None:
                files = dataclasses.replace(files, tensors=plan.in_files) if plan.in_files else None
            self._plans[plan] = LoopsWithin(dataclasses.replace(traced, files=files), self._estimates, segment)
        return self._plans[plan]

    def _correct(self, path: Path, plan: LevelPlan) -> None:
        """Correct the stretches of a path by what their sums lack of its loops.

        These are bytes in small iterations, and time in the fewest tiles: a loop between levels of another family reads
        other tensors than one among levels of its own.
        """
        stretches, levels, candidate = self._stretches, self._levels, self._in_small_iterations(plan)
        of_loop, coarsest = dict[str, slice](), np.zeros(levels.moments_count)
        for of_segment in candidate.plans:
            moments = levels.of_loops(of_segment.segment.loop_specs)
            numbers = loop_numbers(candidate, of_segment)
            of_loop |= {name: slice(moments[n], moments[n] + 1) for name, n in numbers.items()}
            np.add.at(coarsest, moments, self._loops(plan).coarsest_seconds())
        peaks = levels.moments.peaks(candidate.peak.timeline, of_loop)
        lacking = np.nan_to_num(peaks - self._traced.held_bytes - stretches.usage_in_small_iterations(path))
        seconds = stretches.seconds_beyond(path, coarsest)
        self._priced.graph.correct(path, lacking, levels.moments, stretches.bounds, seconds)


def _is_settled(seconds: Sequence[float]) -> bool:
    """Return whether enough plans are modelled, given the time of each that fits in the order of the search."""
    before, last = seconds[:-MAX_STALE_PLANS], seconds[-MAX_STALE_PLANS:]
    return len(seconds) >= MAX_FITTING or (bool(before) and min(last) > STALE_TIME_RATIO * min(before))


def _rank(candidate: Candidate) -> tuple[float, int]:
    """Return a sort key: faster first, and among equals the one that needs less memory."""
    return candidate.time_ratio, candidate.peak.peak_bytes


def _peak_bytes(candidate: Candidate) -> int:
    return candidate.peak.peak_bytes
