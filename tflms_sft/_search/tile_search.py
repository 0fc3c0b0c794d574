"""Tile plans of a whole step within a budget: which segments, how many tiles, which blocks stay untiled.

The sums of bytes along a chain of blocks (`block_search.py`) are estimates. A plan is accepted when the liveness model
of the whole rewritten step agrees, so a search tries several targets for the chains.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence

from rewriters.tiling.ft_segments import SkippedOps, find_components
from tflms_sft._search.block_search import BlockChoice, ComponentBlocks, fastest_path, rung, target_bytes
from tflms_sft._search.inference_blocks import InferenceBlocks, LiveTensors
from tflms_sft._search.segment_plans import segment_plans
from tflms_sft._search.segment_tilings import LoopEstimates
from tflms_sft._search.traced_step import Candidate, TracedStep, predict

MAX_LOWER_ROUNDS = 4
"""Attempts to go below the smallest plan of a training step, before an error names it."""

LOWER_RATIO = 0.95
"""Limit of such an attempt, over the smallest peak so far."""

SMALLEST_TRAINING_PLANS, SMALLEST_INFERENCE_PLANS = 3, 6
"""Plans for the lowest targets, of which the smallest is taken."""

RUNGS_BETWEEN_SMALLEST = 3
"""Steps on the ladder between the targets of such plans of a training step."""

MAX_OVERESTIMATE = 1.2
"""Bytes that the chains of a step without gradients may sum up to, over what the liveness model says of the step."""

Segmentation = tuple[tuple[int, BlockChoice], ...]
"""Blocks to run in tiles, each choice with the number of its component."""


class ChainSearch:
    """Tile plans of one step without barriers, each made for a target that its chains of blocks meet.

    Attributes:
        left: Ops that cannot be tiled, with reasons.
    """

    weighs_files = False

    def __init__(self, traced: TracedStep, chains: Sequence[ComponentBlocks], left: list[SkippedOps]) -> None:
        self.left = left
        self._traced = traced
        self._chains = chains
        self._highest = rung(2 * traced.plain.peak.peak_bytes)  # A target that the original step meets.

    def may_fit_with_swaps(self, limit: int) -> bool:
        """Return true: this search has no lower bounds."""
        return True

    def least_seconds(self, limit: int) -> float:
        """Return 0: a bound of the time takes as long as the search."""
        return 0.0

    def proposed(self, target: int) -> Candidate | None:
        """Return the plan for a target, whether its step meets it or not."""
        return self._candidate(target, {}) if self._chains else None

    @functools.cached_property
    def _lowest(self) -> int:
        """Lowest target that all chains can meet."""
        return bisect.bisect_left(
            range(self._highest), True, key=lambda step: self._segmentation(target_bytes(step)) is not None
        )

    def _candidate(
        self, target: int, modelled: dict[Segmentation, Candidate], limit: int | None = None
    ) -> Candidate | None:
        """Return the plan for a target; `None` if the chains cannot meet it.

        `modelled` has the plans of this search, each of which is modelled once. A peak above `limit` need not be the
        worst.
        """
        segmentation = self._segmentation(target)
        if segmentation is None:
            return None
        if not segmentation:
            return self._traced.plain
        if segmentation not in modelled:
            choices = [(self._chains[n].component, choice) for n, choice in segmentation]
            plans = [plan for plan in segment_plans(self._traced, choices) if plan is not None]
            modelled[segmentation] = predict(self._traced, plans, limit=limit)
        return modelled[segmentation]

    def _segmentation(self, target: int) -> Segmentation | None:
        """Return the fastest choices of all chains for a target; bytes saved by one chain are there for the next."""
        available = target - self._traced.held_bytes
        tiled: list[tuple[int, BlockChoice]] = []
        for number, chain in enumerate(self._chains):
            path = fastest_path(chain, available)
            if path is None:
                return None
            available -= path.saved_bytes
            tiled += [(number, choice) for choice in path.choices if choice.grid is not None]
        return tuple(tiled)


class InferenceSearch(ChainSearch):
    """Tile plans of one step without gradients.

    A budget takes the plan for the highest target that the model of the whole step accepts. A larger budget meets that
    target no later, so that it gets no slower plan.
    """

    def __init__(self, traced: TracedStep) -> None:
        components, left = find_components(traced.analysis)
        live, estimates = LiveTensors(traced), LoopEstimates(traced)
        super().__init__(traced, [InferenceBlocks(estimates, component, live) for component in components], left)

    def fastest_within(self, limit: int) -> Candidate | None:
        """Return the fastest plan found whose step stays within `limit` bytes."""
        modelled: dict[Segmentation, Candidate] = {}
        for step in range(min(rung(int(MAX_OVERESTIMATE * limit)), self._highest), 0, -1):
            candidate = self._candidate(target_bytes(step), modelled, limit)
            if candidate is None or candidate.peak.peak_bytes <= limit:
                return candidate
        return None

    @functools.cached_property
    def smallest(self) -> Candidate:
        """Plan with the lowest peak found, one that `fastest_within` finds for a limit of as much."""
        modelled: dict[Segmentation, Candidate] = {}
        peaks = {self._traced.plain.peak.peak_bytes: self._traced.plain}
        for step in range(self._lowest, self._highest):
            candidate = self._candidate(target_bytes(step), modelled)
            if candidate is not None and target_bytes(step) <= MAX_OVERESTIMATE * candidate.peak.peak_bytes:
                peaks.setdefault(candidate.peak.peak_bytes, candidate)
            if candidate is self._traced.plain or len(peaks) > SMALLEST_INFERENCE_PLANS:
                break
        return peaks[min(peaks)]


def _peak_bytes(candidate: Candidate) -> int:
    return candidate.peak.peak_bytes
