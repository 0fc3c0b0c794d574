"""Ends of automatic segments in requested tiles, chosen by the cost model.

A longer segment saves fewer tensors, but its tiles recompute wider halos. The search goes through the same chains of
blocks as the search for a budget (`block_search.py`), with one tiling for each stretch of blocks, and weighs memory
against time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from rewriters.emission.loop_signature import segment_signature
from rewriters.emission.tile_pass import SegmentPlan
from rewriters.errors import NotTileableError
from rewriters.estimates.op_cost import sum_in_order
from rewriters.tiling.ft_segments import TileableComponent, find_components, recomputes, try_segment
from rewriters.tiling.segment import Segment
from tflms_sft._search.block_search import BlockChoice, target_bytes
from tflms_sft._search.tile_search import ChainSearch, Segmentation
from tflms_sft._search.traced_step import Candidate, TracedStep, predicted_peak
from tflms_sft._search.training_blocks import TrainingBlocks

TIME_EXPONENT = 1.5
"""Weight of time against memory: 1 % more time has to save this many per cent of memory."""

MAX_PEAK_FRACTION = 0.97
"""Peak of a plan that is worth its time, over that of the original step."""

MAX_CUTS = 24
"""Places in a component where an automatic segment may end."""

RUNGS_BETWEEN_TARGETS = 2
"""Steps on the ladder between two targets that are tried."""

MAX_PREDICTED = 3
"""Plans, of those for all targets, whose whole step is predicted."""

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


class RequestedSearch(ChainSearch):
    """Segments of a training step without barriers in requested tiles."""

    def __init__(self, traced: TracedStep, plan: PlanSegment) -> None:
        components, left = find_components(traced.analysis)
        super().__init__(traced, [_RequestedBlocks(traced, component, plan) for component in components], left)

    def candidates(self) -> Iterator[Candidate]:
        """Yield the plans for the targets with the best estimated scores, predicted for fresh memory."""
        modelled: dict[Segmentation, Candidate] = {}
        scores = self._scores()
        for target in heapq.nsmallest(MAX_PREDICTED, scores, key=scores.__getitem__):
            candidate = self._candidate(target, modelled, limit=0)
            if candidate is not None:
                yield candidate

    def _scores(self) -> dict[int, float]:
        """Return the estimated score of each target below which some blocks have to run in tiles."""
        scores: dict[int, float] = {}
        segmentations = set()
        for target in map(target_bytes, range(self._lowest, self._highest, RUNGS_BETWEEN_TARGETS)):
            segmentation = self._segmentation(target)
            if not segmentation:
                break
            if segmentation not in segmentations:
                segmentations.add(segmentation)
                seconds = [choice.seconds - self._untiled_seconds(number, choice) for number, choice in segmentation]
                slowdown = 1 + max(sum_in_order(seconds), 0.0) / self._traced.seconds
                scores[target] = target * slowdown**TIME_EXPONENT
        return scores

    def _untiled_seconds(self, number: int, choice: BlockChoice) -> float:
        options = self._chains[number].options(choice.first, choice.last)
        assert options is not None
        return options.untiled.seconds


class _RequestedTiling:
    """The one tiling of a stretch of blocks that a user requests (`Tilings`)."""

    def __init__(self, choice: BlockChoice) -> None:
        self._choice = choice

    def least_seconds(self, budget: int) -> float:
        """Return the time if the tiling fits; otherwise infinity."""
        return self._choice.seconds if self._choice.fits(budget) else math.inf

    def fitting(self, budget: int) -> Iterator[BlockChoice]:
        """Yield the tiling if it fits."""
        if self._choice.fits(budget):
            yield self._choice


class _RequestedBlocks(TrainingBlocks):
    """A component of a training step whose segments run in requested tiles."""

    def __init__(self, traced: TracedStep, component: TileableComponent, plan: PlanSegment) -> None:
        super().__init__(traced, component, MAX_CUTS)
        self._plan = plan
        self._choices: dict[Hashable, BlockChoice] = {}

    def _requested(self, first: int, last: int) -> Sequence[_RequestedTiling]:
        if self._is_too_long(first, last):
            return []
        with contextlib.suppress(NotTileableError):
            segment = try_segment(self._traced.analysis, self.component, range(first, last), set(), "candidate")
            if not recomputes(segment):
                return []  # Only a budget tells whether less scratch memory is worth the time.
            key = segment_signature(self._traced.analysis, segment)  # Equal blocks of a deep network share it.
            if key not in self._choices:
                self._choices[key] = self._choice(segment, first, last)
            return [_RequestedTiling(dataclasses.replace(self._choices[key], first=first, last=last))]
        return []

    def _choice(self, segment: Segment, first: int, last: int) -> BlockChoice:
        batch, plan = self._traced.batch, self._plan(segment)
        saves = [save.saved for loop in plan.loops for save in loop.saves]
        gradients = (*segment.grad_entries, *segment.grad_exits, *segment.reductions)
        iteration_bytes = max(self._traced.loop_memory.peak_bytes(loop, batch) for loop in plan.loops)
        return BlockChoice(
            first=first,
            last=last,
            grid=plan.loops[-1].grid,
            forward_grid=plan.loops[0].grid,
            halo=plan.halo,
            saved_bytes=sum(tensor.num_bytes(batch) for tensor in (*segment.exits, *saves)),
            working_bytes=iteration_bytes + sum(tensor.num_bytes(batch) for tensor in gradients),
            seconds=sum_in_order(map(self._traced.costs.tile_loop, plan.loops)),
        )
