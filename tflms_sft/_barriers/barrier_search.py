"""Tile plans of a training step with barriers by prices on memory.

A path of `barrier_stretches.py` fixes the loops: which levels stay untiled, and which tensors are stored, dropped, or
in files. The tiles of its loops are those with which the memory model of the whole step stays within the limit
(`tiled_loops.py`). The bytes that the model sees beyond the sums, such as fragmentation, differ little from path to
path: the next one is sought within limits that are lower by so much at each moment.
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

MAX_PATHS = 10
"""Paths that are modelled for a limit."""

TIGHTENING, MIN_TIGHTNESS = 0.95, -2
"""Factor of the limits, once the lacking bytes of a path are known, and its least exponent.

The exponent rises with each path that does not fit, and falls where a path that fits is found again.
"""

MAX_STALE_PLANS, STALE_TIME_RATIO = 2, 0.99
"""Plans in a row that fit, and their time over the least before them, after which no more are sought."""

SMALL_GAP = 0.01
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
            self._model_paths(target, MAX_PROPOSED)
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
        self._model_families(limit, self._model_paths(limit, MAX_PATHS))
        fastest = self._best(limit)
        if fastest is not None and fastest.plans:
            self._try_carried_halos(fastest, limit)

    def _model_paths(self, limit: int, count: int) -> float:
        """Model paths, each for the limit less the bytes that the sums of those before it lack.

        Args:
            limit: Limit of the step in bytes.
            count: Maximum number of paths.

        Returns:
            Time of the fastest step that fits in seconds, infinity if none does.
        """
        self._priced.graph.forget_corrections()
        limits = _SumLimits(np.full(self._levels.moments_count, float(limit - self._traced.held_bytes)))
        modelled, fitting = dict[LevelPlan, float](), list[float]()
        for _ in range(count):
            solution = self._priced.fastest_within(limits.at_moments)
            if solution.path is None:
                if not limits.raise_for_none():
                    break
                continue
            plan = self._stretches.plan(solution.path)
            if plan in modelled:
                if not limits.change_for_known(fits=modelled[plan] < np.inf):
                    break
                continue
            modelled[plan] = self._model(plan, limit)
            limits.change(self._lacking(solution.path, plan), fits=modelled[plan] < np.inf)
            fitting += [modelled[plan]] if modelled[plan] < np.inf else []
            bound = self._stretches.outside_seconds + solution.bound
            if _is_settled(fitting) or min(fitting, default=np.inf) <= (1 + SMALL_GAP) * bound:
                break
        return min(fitting, default=np.inf)

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

    def _lacking(self, path: Path, plan: LevelPlan) -> np.ndarray:
        """Return the bytes that the sums of a path lack at each moment, in small iterations.

        The time of its stretches is corrected, in the fewest tiles: a loop between levels of another family reads other
        tensors than one among levels of its own.
        """
        stretches, levels, candidate = self._stretches, self._levels, self._in_small_iterations(plan)
        of_loop, coarsest = dict[str, slice](), np.zeros(levels.moments_count)
        for of_segment in candidate.plans:
            moments = levels.of_loops(of_segment.segment.loop_specs)
            numbers = loop_numbers(candidate, of_segment)
            of_loop |= {name: slice(moments[n], moments[n] + 1) for name, n in numbers.items()}
            np.add.at(coarsest, moments, self._loops(plan).coarsest_seconds())
        peaks = levels.moments.peaks(candidate.peak.timeline, of_loop)
        lacking: np.ndarray = np.nan_to_num(peaks - self._traced.held_bytes - stretches.usage_in_small_iterations(path))
        self._priced.graph.correct_seconds(path, stretches.seconds_beyond(path, coarsest))
        return lacking


class _SumLimits:
    """Limits at each moment that the sums of the next path have to meet.

    They are lower than those of the step by the bytes that the memory model adds to the sums of modelled paths.

    Args:
        available: Limits of the step, in bytes, without the bytes that every plan holds.
    """

    def __init__(self, available: np.ndarray) -> None:
        self._available = available
        self._lacking: np.ndarray | None = None
        self._tightness = 0

    @property
    def at_moments(self) -> np.ndarray:
        """Bytes at each moment."""
        lacking = 0.0 if self._lacking is None else self._lacking
        limits: np.ndarray = np.maximum(self._available * TIGHTENING**self._tightness - lacking, 0.0)
        return limits

    def change(self, lacking: np.ndarray, *, fits: bool) -> None:
        """Change the limits by a modelled path: the bytes that its sums lack, and whether it fits."""
        lacking, was_known = np.maximum(lacking, 0.0), self._lacking is not None
        self._lacking = lacking if self._lacking is None else (self._lacking + lacking) / 2
        self._tightness = max(self._tightness, 0) + 1 if was_known and not fits else 0

    def change_for_known(self, *, fits: bool) -> bool:
        """Change the limits after a modelled path was found again, and return whether they may change so far."""
        self._tightness = min(self._tightness, 0) - 1 if fits else max(self._tightness, 0) + 1
        return self._tightness >= MIN_TIGHTNESS

    def raise_for_none(self) -> bool:
        """Raise limits that no path meets, and return whether they were raised."""
        self._tightness = 0
        if self._lacking is None:
            return False
        self._lacking = self._lacking / 2
        return True


def _is_settled(seconds: Sequence[float]) -> bool:
    """Return whether the last plans gain little, given the time of each that fits in the order of the search."""
    before, last = seconds[:-MAX_STALE_PLANS], seconds[-MAX_STALE_PLANS:]
    return bool(before) and min(last) > STALE_TIME_RATIO * min(before)


def _rank(candidate: Candidate) -> tuple[float, int]:
    """Return a sort key: faster first, and among equals the one that needs less memory."""
    return candidate.time_ratio, candidate.peak.peak_bytes


def _peak_bytes(candidate: Candidate) -> int:
    return candidate.peak.peak_bytes
