"""How many tensors to swap and how early to fetch them: the tuning of TFLMS, section 5.2, by the memory model."""

from __future__ import annotations

import bisect
import dataclasses

from rewriters.device.peak_memory import Peak
from rewriters.emission.tile_pass import SegmentPlan, tile_skeleton
from rewriters.ir.graph import Node
from rewriters.swapping.swap_pass import Swap, insert_swaps, plan_swaps
from rewriters.swapping.tiers import HostTier, SkeletonTier
from tflms_sft._params.swap_params import SwapParams
from tflms_sft._planner.swap_planner import check_names, make_tier, no_room, out_seconds, prepared, swapped_seconds
from tflms_sft._planner.traced_step import TracedStep, predict

LOWER_BOUNDS = (1, 2, 3, 5, 8, 12, 18, 27, 40)
"""Values of `lb` that are tried. Farther ahead nothing is gained: a transfer has long ended."""


class SwapSearch:
    """A step with any number of swaps, as the memory model sees it.

    Args:
        traced: The step.
        plans: Its segments.
        params: What to swap at most, and how early to fetch it at least.

    Raises:
        SwapError: For names that are not in the step, and a tier that is not there.
    """

    def __init__(self, traced: TracedStep, plans: list[SegmentPlan], params: SwapParams) -> None:
        self.params = params
        self._traced = traced
        self._plans = plans
        self._tier = make_tier(params)
        self._on_host = isinstance(self._tier, HostTier)
        graph = tile_skeleton(traced.analysis, plans) if plans else traced.analysis.graph
        check_names(traced, graph, params)
        self._analysis = prepared(traced, graph, params)
        self._planned: dict[int, list[Swap]] = {}

    def planned(self, lb: int) -> list[Swap]:
        """All swaps there may be, those first that the search meets first."""
        if lb not in self._planned:
            options = dataclasses.replace(self.params.options(), lb=lb)
            self._planned[lb] = plan_swaps(self._analysis, options, self._traced.batch).swaps
        return self._planned[lb]

    def peak(self, count: int, lb: int, limit: int | None = None) -> Peak:
        """Predicted peak with the first `count` swaps; one above `limit` need not be the worst."""
        tier = HostTier() if self._on_host else SkeletonTier()
        swaps = self.planned(lb)[:count]
        graph, outs = insert_swaps(self._analysis, swaps, tier, self.params.max_in_flight)
        away: frozenset[Node] = frozenset(outs if self._on_host else ())
        slow = out_seconds(self._traced, outs, self.params)
        return predict(self._traced, self._plans, limit, graph, away, slow)[0]

    def tuned(self, limit: int) -> SwapParams | None:
        """The fewest tensors, and for them the largest `lb`, with which the step fits; `None` if it never does."""
        lb = self.params.lb
        count = self._fewest(lb, limit)
        if count is None:
            return None
        wanted = [swap.tensor for swap in self.planned(lb)[:count]]

        def too_early(bound: int) -> bool:
            # What has no control operation that far ahead would not be swapped: it must be the same tensors.
            same = [swap.tensor for swap in self.planned(bound)[:count]] == wanted
            return not same or self.peak(count, bound, limit).peak_bytes > limit

        higher = [bound for bound in LOWER_BOUNDS if lb < bound <= self.params.ub]
        found = bisect.bisect_left(higher, True, key=too_early)
        lb = higher[found - 1] if found else lb
        return dataclasses.replace(self.params, n_tensors=count, lb=lb)

    def seconds(self, params: SwapParams, seconds: float) -> float:
        """Time of the step with what `tuned` found, which takes `seconds` without."""
        return swapped_seconds(self._traced, self._analysis.graph, self._chosen(params), params, seconds)

    def has_room(self, params: SwapParams) -> bool:
        """Whether what `tuned` found can be swapped now: there may be too little space, or too few files."""
        return not no_room(self._tier, self._chosen(params), self._traced.batch)

    def _chosen(self, params: SwapParams) -> list[Swap]:
        return self.planned(params.lb)[: params.n_tensors if params.n_tensors >= 0 else None]

    def smallest(self) -> tuple[int, Peak] | None:
        """How many tensors need least of some numbers that are tried, and that peak; `None` if none can be swapped."""
        found = [(count, self.peak(count, self.params.lb)) for count in self._counts(self.params.lb)]
        return min(found, key=lambda one: one[1].peak_bytes) if found else None

    def _counts(self, lb: int) -> list[int]:
        """All, and fewer: with more swaps more is under way, and the allocator has more pieces."""
        most = len(self.planned(lb))
        return sorted({max(most * part // 4, 1) for part in (4, 3, 2, 1)}, reverse=True) if most else []

    def _fewest(self, lb: int, limit: int) -> int | None:
        """By bisection, from a number that fits: mostly more swaps need less memory."""
        high = next((count for count in self._counts(lb) if self.peak(count, lb, limit).peak_bytes <= limit), None)
        if high is None:
            return None
        low = 0
        while high - low > 1:
            middle = (low + high) // 2
            if self.peak(middle, lb, limit).peak_bytes > limit:
                low = middle
            else:
                high = middle
        return high
