"""Tuning of the number of swapped tensors and of their prefetch distance (TFLMS, section 5.2), by the memory model."""

from __future__ import annotations

import bisect
import copy
import dataclasses
import functools

from rewriters.device.peak_memory import Peak
from rewriters.emission.tile_pass import SegmentPlan, tile_skeleton
from rewriters.ir.graph import Node
from rewriters.swapping.swap_pass import Swap, insert_swaps
from rewriters.swapping.tiers import HostSkeletonTier, HostTier, SkeletonTier
from tflms_sft._params.swap_params import SwapParams
from tflms_sft._planner.swap_planner import (
    AUTOMATIC_LEAD,
    SwapTiming,
    check_names,
    make_tier,
    no_room,
    overlaps,
    prepared,
    swapped_seconds,
)
from tflms_sft._search.traced_step import TracedStep

PREFETCH_DISTANCES = (1, 2, 3, 5, 8, 12, 18, 27, 40)
"""Values of `lb` that are tried. A transfer that begins earlier ends early enough anyway."""

MAX_FEWER_RATIO = 1.05
"""A peak, over the lowest one so far, above which the search for the lowest peak tries no fewer swaps."""

COUNT_TOLERANCE = 0.02
"""Tolerance of the search for the fewest swaps that fit, as a fraction of a number that does."""


class SwapSearch:
    """A step with any number of swaps, as the memory model predicts it.

    Args:
        traced: The step.
        plans: Its segments.
        params: Tensors to swap at most, and their least prefetch distance.

    Attributes:
        params: The parameters with the lead and the number of concurrent swap-outs that need least memory, if these
            are automatic.

    Raises:
        SwapError: For names that are not in the step, and for a tier that is not available.
    """

    def __init__(self, traced: TracedStep, plans: list[SegmentPlan], params: SwapParams) -> None:
        self._traced = traced
        self._plans = plans
        self._tier = make_tier(params, traced.device)
        self._on_host = isinstance(self._tier, HostTier)
        graph = tile_skeleton(traced.analysis, plans, traced.files) if plans else traced.analysis.graph
        check_names(traced, graph, params)
        self._analysis = prepared(traced, graph, params)
        self._timing = SwapTiming(traced, plans, self._analysis, params)
        automatic = overlaps(traced, params) and params.lead is None
        self._use(params, 0.0 if params.lead is None else params.lead, 1 if automatic else None)
        self._with_lead: SwapSearch | None = None
        if automatic:
            self._with_lead = copy.copy(self)
            self._with_lead._use(params, AUTOMATIC_LEAD, None)

    def _use(self, params: SwapParams, lead: float, max_in_flight: int | None) -> None:
        """Set the parameters of this search, without results of another one."""
        self.params = dataclasses.replace(params, lead=lead, max_in_flight=params.max_in_flight or max_in_flight)
        self._swaps: dict[int, list[Swap]] = {}
        self._peaks: dict[tuple[int, int], Peak] = {}

    def swaps(self, lb: int) -> list[Swap]:
        """Return all possible swaps with a prefetch distance, in the order of the search for tensors."""
        if lb not in self._swaps:
            self._swaps[lb] = self._timing.plan(dataclasses.replace(self.params, lb=lb)).swaps
        return self._swaps[lb]

    def _first(self, count: int, lb: int) -> list[Swap]:
        """Return the first `count` swaps; a lead depends on all other swaps."""
        if count and self.params.lead:
            return self._timing.plan(dataclasses.replace(self.params, lb=lb, n_tensors=count)).swaps
        return self.swaps(lb)[: count if count >= 0 else None]

    def peak(self, count: int, lb: int, limit: int | None = None) -> Peak:
        """Return the predicted peak with the first `count` swaps; one above `limit` need not be the worst."""
        if (count, lb) in self._peaks:
            return self._peaks[count, lb]
        tier = HostSkeletonTier() if self._on_host else SkeletonTier()
        swaps = self._first(count, lb)
        result = insert_swaps(self._analysis, swaps, tier, self._timing.in_flight(self.params, swaps))
        away: frozenset[Node] = frozenset(result.swap_outs if self._on_host else ())
        peak = self._timing.peak(result, self.params, away, limit)
        if limit is None or peak.peak_bytes <= limit:  # Else modelling stopped at the first state above the limit.
            self._peaks[count, lb] = peak
        return peak

    def tuned(self, limit: int) -> SwapParams | None:
        """Return the fewest tensors, and for them the largest `lb`, with which the step fits; `None` if none do.

        An automatic lead needs more swaps. It is chosen if it is faster in spite of that.
        """
        params = self._fewest_swaps(limit)
        ahead = None if self._with_lead is None else self._with_lead._fewest_swaps(limit)
        if params is None or ahead is None:
            return params or ahead
        return min(ahead, params, key=lambda params: self.seconds(params, self._traced.seconds))

    def _fewest_swaps(self, limit: int) -> SwapParams | None:
        """Return the parameters for the lead of this search."""
        lb = self.params.lb
        count = self._fewest(limit)
        if count is None:
            return None
        in_flight = self._timing.in_flight(self.params, self._first(count, lb))
        params = dataclasses.replace(self.params, n_tensors=count, max_in_flight=in_flight)
        if params.lead:
            return params
        tensors = [swap.tensor for swap in self.swaps(lb)[:count]]

        def is_infeasible(bound: int) -> bool:
            # A tensor without a trigger that far ahead would not be swapped.
            is_same = [swap.tensor for swap in self.swaps(bound)[:count]] == tensors
            return not is_same or self.peak(count, bound, limit).peak_bytes > limit

        higher = [bound for bound in PREFETCH_DISTANCES if lb < bound <= self.params.ub]
        index = bisect.bisect_left(higher, True, key=is_infeasible)
        return dataclasses.replace(params, lb=higher[index - 1] if index else lb)

    def seconds(self, params: SwapParams, seconds: float) -> float:
        """Return the time of the step with tuned parameters, given its time without swaps."""
        swaps, waiting = self._selected(params), None
        if overlaps(self._traced, params):
            waiting = self._timing.waiting_seconds(self._timing.inserted(params, swaps))
        return swapped_seconds(self._traced, self._analysis.graph, swaps, params, seconds, waiting)

    def has_room(self, params: SwapParams) -> bool:
        """Return whether there are space and files enough now for the swaps of tuned parameters."""
        return not no_room(self._tier, self._selected(params), self._traced.batch)

    def peak_bytes(self, params: SwapParams) -> int:
        """Return the predicted peak of the step with tuned parameters."""
        return self._search_for(params).peak(params.n_tensors, params.lb).peak_bytes

    def _selected(self, params: SwapParams) -> list[Swap]:
        return self._search_for(params)._first(params.n_tensors, params.lb)

    def _search_for(self, params: SwapParams) -> SwapSearch:
        """Return the search whose lead tuned parameters have."""
        return self._with_lead if self._with_lead is not None and params.lead else self

    @functools.cached_property
    def smallest(self) -> tuple[int, Peak] | None:
        """Number of swaps with the lowest peak of those tried, and that peak; `None` without swaps.

        All of the swaps, three quarters, half and a quarter of them are tried. With more swaps more transfers are under
        way, and the allocator's memory is more fragmented, so that fewer may need less. If tensors return one at a
        time, each just before it is needed, the search ends where the peak rises by more than `MAX_FEWER_RATIO`.
        """
        total, lb = len(self.swaps(self.params.lb)), self.params.lb
        one_at_a_time = lb == 1 and self.params.max_in_flight == 1
        best: tuple[int, Peak] | None = None
        counts = {max(total * quarters // 4, 1) for quarters in (4, 3, 2, 1)} if total else set()
        for count in sorted(counts, reverse=True):
            peak = self.peak(count, lb, None if best is None else best[1].peak_bytes)
            if best is None or peak.peak_bytes < best[1].peak_bytes:
                best = count, peak
            elif one_at_a_time and peak.peak_bytes > MAX_FEWER_RATIO * best[1].peak_bytes:
                break
        return best

    def _fewest(self, limit: int) -> int | None:
        """Return nearly the fewest swaps that fit, by bisection below a number that does."""
        high, lb = len(self.swaps(self.params.lb)), self.params.lb
        if not high:
            return None
        if self.peak(high, lb).peak_bytes > limit:
            if self.smallest is None or self.smallest[1].peak_bytes > limit:
                return None
            high = self.smallest[0]
        low, tolerance = 0, max(1, int(COUNT_TOLERANCE * high))
        while high - low > tolerance:
            middle = (low + high) // 2
            if self.peak(middle, lb, limit).peak_bytes > limit:
                low = middle
            else:
                high = middle
        return high
