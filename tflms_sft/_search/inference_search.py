"""Tile plans of a step without gradients: which segments, how many tiles, which blocks stay untiled.

Nothing is saved for a backward pass, so that each stretch of blocks has to fit by itself. The bytes of a stretch are
estimates. A plan is accepted when the memory model of the whole rewritten step agrees, so a search tries several
targets for the chains.
"""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
import math

from rewriters.tiling.ft_segments import find_components
from tflms_sft._search.block_choices import BlockChoice, rung, target_bytes
from tflms_sft._search.inference_blocks import InferenceBlocks, LiveTensors
from tflms_sft._search.segment_plans import segment_plans
from tflms_sft._search.segment_tilings import LoopEstimates
from tflms_sft._search.traced_step import Candidate, TracedStep, predict

SMALLEST_PLANS = 6
"""Plans for the lowest targets, of which the smallest is taken."""

MAX_OVERESTIMATE = 1.2
"""Bytes that the chains of a step without gradients may sum up to, over what the liveness model says of the step."""

Segmentation = tuple[tuple[int, BlockChoice], ...]
"""Blocks to run in tiles, each choice with the number of its component."""


class InferenceSearch:
    """Tile plans of one step without gradients, each made for a target that its chains of blocks meet.

    A budget takes the plan for the highest target that the model of the whole step accepts. A larger budget meets that
    target no later, so that it gets no slower plan.

    Attributes:
        left: Ops that cannot be tiled, with reasons.
    """

    def __init__(self, traced: TracedStep) -> None:
        components, self.left = find_components(traced.analysis)
        live, estimates = LiveTensors(traced), LoopEstimates(traced)
        self._traced = traced
        self._chains = [InferenceBlocks(estimates, component, live) for component in components]
        self._highest = rung(2 * traced.plain.peak.peak_bytes)  # A target that the original step meets.

    @property
    def in_memory(self) -> InferenceSearch:
        """This search, which decides on no files."""
        return self

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
        """Return the tiled choices of the fastest path through each chain for a target; `None` if a chain has none."""
        tiled: list[tuple[int, BlockChoice]] = []
        for number, chain in enumerate(self._chains):
            choices = fastest_path(chain, target - self._traced.held_bytes)
            if choices is None:
                return None
            tiled += [(number, choice) for choice in choices if choice.grid is not None]
        return tuple(tiled)

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
            if candidate is self._traced.plain or len(peaks) > SMALLEST_PLANS:
                break
        return peaks[min(peaks)]


def fastest_path(blocks: InferenceBlocks, budget: int) -> tuple[BlockChoice, ...] | None:
    """Return the choices of the fastest path through a component of which every one fits; `None` if none does.

    A* (P. E. Hart, N. J. Nilsson and B. Raphael, "A Formal Basis for the Heuristic Determination of Minimum Cost
    Paths", 1968) over bounds. Tilings are expensive to estimate, so the queue holds a stretch with the lower bound of
    its tilings, and only the stretches that get to its head are expanded. The bound ignores that tiles may skip rows
    that no result needs, as convolutions with strides and without padding leave behind: of two paths that differ by no
    more than those rows the slower may be returned.
    """
    order, finished = itertools.count(), set[int]()
    queue: list[tuple[float, int, float, tuple[BlockChoice, ...], int | None]] = [(0.0, next(order), 0.0, (), None)]

    def push(seconds: float, choices: tuple[BlockChoice, ...], end: int) -> None:
        heapq.heappush(queue, (seconds + blocks.least_seconds(end), next(order), seconds, choices, None))

    while queue:
        _, _, seconds, choices, tiled_end = heapq.heappop(queue)
        begin = choices[-1].last if choices else 0
        if tiled_end is not None:
            options = blocks.options(begin, tiled_end)
            for tilings in options.tilings if options is not None else ():
                for choice in tilings.fitting(budget):
                    push(seconds + choice.seconds, (*choices, choice), tiled_end)
        elif begin == blocks.bounds[-1]:
            return choices
        elif begin not in finished:
            finished.add(begin)
            for end in blocks.bounds[blocks.bounds.index(begin) + 1 :]:
                options = blocks.options(begin, end)
                if options is None:
                    continue
                if options.untiled.fits(budget):
                    push(seconds + options.untiled.seconds, (*choices, options.untiled), end)
                least = min((tilings.least_seconds(budget) for tilings in options.tilings[:1]), default=math.inf)
                if least < math.inf:
                    bound = seconds + least + blocks.least_seconds(end)
                    heapq.heappush(queue, (bound, next(order), seconds, choices, end))
    return None
