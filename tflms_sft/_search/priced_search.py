"""Tile plans of a step without barriers by prices on memory.

The paths of `priced_paths.py` count sums of estimates. The memory model of the whole step knows more: fragmentation,
updates of weights that wait, temporary results. So a search proposes the fastest paths for limits of decreasing size,
and moves each until the model accepts it: the bytes that the sums lack correct the stretches of a path, each at its own
moments, and a path near it is sought within the limit.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from rewriters.emission.tile_pass import SegmentPlan
from rewriters.scheduling.memory_order import MemoryOrder
from rewriters.tiling.ft_segments import find_components
from tflms_sft._search.block_chain import BlockChain
from tflms_sft._search.chain_stretches import ChainStretches
from tflms_sft._search.priced_paths import PricedPaths, Solution
from tflms_sft._search.stretch_graph import Path
from tflms_sft._search.traced_step import Candidate, TracedStep, predict, tile_loop_names

SMALLER_SUMS, EXCESSIVE_SUMS = (0.9, 0.8, 0.7, 0.6), (1.12, 1.25)
"""Limits of the sums, over the limit of the step, for which paths are proposed after the limit itself.

Sums may exceed the bytes of the model, because the worst states of the allocator need not meet.
"""

LARGER_SUMS = (1.01, 1.15, 1.35)
"""Limits of the sums, over the smallest that a path meets, where none meets the limit of the step."""

MAX_MOVES = 8
"""Corrections of a proposed path."""

MAX_PATHS = 4
"""Paths that are modelled for a limit before any is moved; each corrects the sums of the next."""

MARGIN = 0.02
"""Fraction of the limit by which it is lowered if a move leads back to a path that does not fit."""

LOWER_RATIO, MAX_LOWER_ROUNDS = 0.95, 8
"""Limit of an attempt to go below the smallest plan so far, over its peak; and attempts."""


@dataclasses.dataclass(frozen=True)
class ModelledPath:
    """A path with the prediction of the whole step. Planned loops are large, and are not kept.

    Attributes:
        path: The path.
        time_ratio: Predicted time over that of the original step.
        peak_bytes: Predicted peak.
        lacking: Bytes that the sums of the path lack at each moment.
    """

    path: Path
    time_ratio: float
    peak_bytes: int
    lacking: np.ndarray


class PricedSearch:
    """Tile plans of one step without barriers (`TileSearch`).

    Attributes:
        left: Ops that cannot be tiled, with reasons.
    """

    def __init__(self, traced: TracedStep) -> None:
        components, self.left = find_components(traced.analysis)
        self._traced = traced
        self._chains = [BlockChain(traced, component) for component in components]
        self._paths: dict[tuple[int, ...], ModelledPath] = {}
        self._searched: set[int] = set()

    @functools.cached_property
    def _stretches(self) -> ChainStretches:
        return ChainStretches(self._traced, self._chains)

    @functools.cached_property
    def _priced(self) -> PricedPaths:
        return PricedPaths(self._stretches.stretches)

    @functools.cached_property
    def in_memory(self) -> PricedSearch:
        """The search among plans without files, with the estimates of this one."""
        if self._traced.files is None:
            return self
        search = PricedSearch(dataclasses.replace(self._traced, files=None))
        if self._chains:
            search._stretches = self._stretches.in_memory()
        return search

    def proposed(self, target: int) -> Candidate | None:
        """Return the plan for a target, whether its step meets it or not."""
        return (self.fastest_within(target) or self.smallest) if self._chains else None

    def fastest_within(self, limit: int) -> Candidate | None:
        """Return the fastest plan found whose step stays within `limit` bytes; plans of other limits count."""
        if self._traced.plain.peak.peak_bytes <= limit:
            return self._traced.plain
        if self._chains and limit not in self._searched:
            self._search(limit)
            self._searched.add(limit)
        best = self._best(limit)
        return None if best is None else self._planned(best.path)[0]

    def _best(self, limit: int) -> ModelledPath | None:
        """Return the fastest path so far whose step stays within a limit."""
        return min((one for one in self._paths.values() if one.peak_bytes <= limit), key=_rank, default=None)

    @functools.cached_property
    def smallest(self) -> Candidate:
        """Plan with the lowest peak found, equal after any search."""
        if not self._chains:
            return self._traced.plain
        before, self._paths = self._paths, {}
        smallest = self._find_smallest()
        self._paths |= before
        plain = self._traced.plain
        if smallest is None or smallest.peak_bytes >= plain.peak.peak_bytes:
            return plain
        return self._planned(smallest.path)[0]

    def _find_smallest(self) -> ModelledPath | None:
        self._move_within(int(self._least_sum) + self._traced.held_bytes, self._least_sum)
        for _ in range(MAX_LOWER_ROUNDS):
            smallest = min(self._paths.values(), key=_peak_bytes, default=None)
            if smallest is None:
                break
            limit = int(LOWER_RATIO * smallest.peak_bytes)
            available = limit - self._traced.held_bytes
            if not self._move_within(limit, available):
                self._move_within(limit, LARGER_SUMS[0] * self._least_sum)
            if smallest is min(self._paths.values(), key=_peak_bytes):
                break
        return smallest

    @functools.cached_property
    def _least_sum(self) -> float:
        """Smallest limit found that the sums of a path meet, without corrections."""
        return self._priced.least_limit(2 * self._traced.plain.peak.peak_bytes)

    # Search ---------------------------------------------------------------------------------------------------

    def _search(self, limit: int) -> None:
        """Model paths until no smaller sums of bytes promise a faster plan."""
        available = limit - self._traced.held_bytes
        if available <= 0:
            return
        self._priced.graph.forget_corrections()
        modelled = set[tuple[int, ...]]()
        for _ in range(MAX_PATHS):
            solution = self._proposed(available)
            if solution.path is None or _key(solution.path) in modelled:
                break
            modelled.add(_key(solution.path))
            self._model(solution.path)
        if self._move_within(limit, available):
            for fraction in SMALLER_SUMS:
                if not self._move_within(limit, fraction * available):
                    break
        for fraction in EXCESSIVE_SUMS:
            self._move_within(limit, fraction * available)
        if self._best(limit) is None:
            for fraction in LARGER_SUMS:
                self._move_within(limit, fraction * self._least_sum)

    def _proposed(self, available: float) -> Solution:
        """Return the fastest path whose sums, with corrections, are `available` bytes at most."""
        return self._priced.fastest_within(np.full(self._stretches.moments.count, available))

    def _move_within(self, limit: int, available: float) -> bool:
        """Move the fastest path within some sum until the step stays within a limit.

        Returns:
            Whether there is such a path, and it is faster than the best plan within the limit.
        """
        self._priced.graph.forget_corrections()
        solution = self._proposed(available)
        if solution.path is None:
            return False
        best, seconds = self._best(limit), self._stretches.outside_seconds + solution.path.seconds
        if best is not None and seconds >= best.time_ratio * self._traced.seconds:
            return False
        path, margin, modelled = solution.path, 0.0, set[tuple[int, ...]]()
        for _ in range(MAX_MOVES):
            if _key(path) not in modelled:
                modelled.add(_key(path))
                self._model(path)
            elif self._paths[_key(path)].peak_bytes > limit:
                margin += MARGIN * limit
            else:
                break
            limits = np.full(self._stretches.moments.count, limit - self._traced.held_bytes - margin)
            path = self._priced.near(path, limits, solution.prices)
        return True

    def _model(self, path: Path) -> None:
        """Model the step of a path once, and correct its stretches by the bytes that their sums lack."""
        stretches = self._stretches
        if _key(path) not in self._paths:
            candidate, of_loop = self._planned(path)
            peaks = stretches.moments.peaks(candidate.peak.timeline, of_loop)
            sums = np.sum([step.usage for step in path.steps], axis=0)
            lacking = np.nan_to_num(peaks - self._traced.held_bytes - sums)
            self._paths[_key(path)] = ModelledPath(path, candidate.time_ratio, candidate.peak.peak_bytes, lacking)
        lacking = self._paths[_key(path)].lacking
        self._priced.graph.correct(path, lacking, stretches.moments)

    def _planned(self, path: Path) -> tuple[Candidate, dict[str, slice]]:
        """Return the plan of a path with its prediction, and the moments of its loops."""
        traced = self._traced
        plans, in_files = self._stretches.planned(path)
        if traced.files is not None:
            files = dataclasses.replace(traced.files, tensors=in_files) if in_files else None
            traced = dataclasses.replace(traced, files=files)
        planned = [plan for plan in plans if plan is not None]
        if not planned:
            return traced.plain, {}
        names = tile_loop_names(traced, planned)
        return _with_least_memory(traced, planned), self._stretches.moments_of_loops(path, plans, names)


def _with_least_memory(traced: TracedStep, plans: list[SegmentPlan]) -> Candidate:
    """Return the prediction of a step in tiles in the order that needs less memory."""
    orders = (MemoryOrder.DELAYED, MemoryOrder.SERIAL) if traced.analysis.backward else (traced.order,)
    candidates = (predict(dataclasses.replace(traced, order=order), plans) for order in orders)
    return min(candidates, key=lambda candidate: candidate.peak.peak_bytes)


def _key(path: Path) -> tuple[int, ...]:
    """Return a key of the options of a path."""
    return tuple(id(option) for step in path.steps for option in step.options)


def _rank(modelled: ModelledPath) -> tuple[float, int]:
    """Return a sort key: faster first, and among equals the one that needs less memory."""
    return modelled.time_ratio, modelled.peak_bytes


def _peak_bytes(modelled: ModelledPath) -> int:
    return modelled.peak_bytes
