"""Tuning of the number of swapped tensors and of their prefetch distance (TFLMS, section 5.2), by the memory model."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Iterator

from rewriters.device.peak_memory import Peak
from rewriters.emission.tile_pass import SegmentPlan, tile_skeleton
from rewriters.ir.graph import Node
from rewriters.swapping.swap_pass import Swap, insert_swaps, plan_swaps
from rewriters.swapping.tiers import HostSkeletonTier, HostTier, SkeletonTier
from tflms_sft._params.swap_params import SwapParams
from tflms_sft._planner.swap_planner import check_names, make_tier, no_room, out_seconds, prepared, swapped_seconds
from tflms_sft._planner.traced_step import TracedStep, predict

PREFETCH_DISTANCES = (1, 2, 3, 5, 8, 12, 18, 27, 40)
"""Values of `lb` that are tried. A transfer that begins earlier ends early enough anyway."""

MAX_FEWER_RATIO = 1.05
"""Peak of a number of swaps, over the lowest of more of them or a limit, above which fewer are not tried."""

COUNT_TOLERANCE = 0.02
"""Tolerance of the search for the fewest swaps that fit, as a fraction of a number that does."""


class SwapSearch:
    """A step with any number of swaps, as the memory model predicts it.

    Args:
        traced: The step.
        plans: Its segments.
        params: Tensors to swap at most, and their least prefetch distance.

    Raises:
        SwapError: For names that are not in the step, and for a tier that is not available.
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
        self._swaps: dict[int, list[Swap]] = {}
        self._peaks: dict[tuple[int, int], Peak] = {}

    def swaps(self, lb: int) -> list[Swap]:
        """Return all possible swaps with a prefetch distance, in the order of the search for tensors."""
        if lb not in self._swaps:
            options = dataclasses.replace(self.params.options(), lb=lb)
            self._swaps[lb] = plan_swaps(self._analysis, options, self._traced.batch).swaps
        return self._swaps[lb]

    def peak(self, count: int, lb: int, limit: int | None = None) -> Peak:
        """Return the predicted peak with the first `count` swaps; one above `limit` need not be the worst."""
        if (count, lb) in self._peaks:
            return self._peaks[count, lb]
        peak = self._modelled(count, lb, limit)
        if limit is None or peak.peak_bytes <= limit:  # Modelling stops at the first state above the limit.
            self._peaks[count, lb] = peak
        return peak

    def _modelled(self, count: int, lb: int, limit: int | None) -> Peak:
        tier = HostSkeletonTier() if self._on_host else SkeletonTier()
        result = insert_swaps(self._analysis, self.swaps(lb)[:count], tier, self.params.max_in_flight)
        away: frozenset[Node] = frozenset(result.swap_outs if self._on_host else ())
        slow = out_seconds(self._traced, result.swap_outs, self.params)
        return predict(self._traced, self._plans, limit=limit, graph=result.graph, away=away, slow=slow)[0]

    def tuned(self, limit: int, fits: int | None = None) -> SwapParams | None:
        """Return the fewest tensors, and for them the largest `lb`, with which the step fits; `None` if none do.

        Args:
            limit: Bytes.
            fits: Number of swaps with which the step fits, if known.
        """
        lb = self.params.lb
        count = self._fewest(lb, limit, fits)
        if count is None:
            return None
        tensors = [swap.tensor for swap in self.swaps(lb)[:count]]

        def is_infeasible(bound: int) -> bool:
            # A tensor without a trigger that far ahead would not be swapped.
            is_same = [swap.tensor for swap in self.swaps(bound)[:count]] == tensors
            return not is_same or self.peak(count, bound, limit).peak_bytes > limit

        higher = [bound for bound in PREFETCH_DISTANCES if lb < bound <= self.params.ub]
        index = bisect.bisect_left(higher, True, key=is_infeasible)
        lb = higher[index - 1] if index else lb
        return dataclasses.replace(self.params, n_tensors=count, lb=lb)

    def seconds(self, params: SwapParams, seconds: float) -> float:
        """Return the time of the step with tuned parameters, given its time without swaps."""
        return swapped_seconds(self._traced, self._analysis.graph, self._selected(params), params, seconds)

    def has_room(self, params: SwapParams) -> bool:
        """Return whether there are space and files enough now for the swaps of tuned parameters."""
        return not no_room(self._tier, self._selected(params), self._traced.batch)

    def _selected(self, params: SwapParams) -> list[Swap]:
        return self.swaps(params.lb)[: params.n_tensors if params.n_tensors >= 0 else None]

    @functools.cached_property
    def smallest(self) -> tuple[int, Peak] | None:
        """Number of swaps with the lowest peak of those tried, and that peak; `None` without swaps."""
        best: tuple[int, Peak] | None = None
        for count, peak in self._from_all_down(self.params.lb):
            if best is None or peak.peak_bytes < best[1].peak_bytes:
                best = count, peak
        return best

    def _from_all_down(self, lb: int, limit: int | None = None) -> Iterator[tuple[int, Peak]]:
        """Yield numbers of swaps with their peaks, from all down as long as a lower peak can be expected.

        With more swaps more transfers are under way, and the allocator's memory is more fragmented, so that fewer may
        need slightly less.
        """
        total = len(self.swaps(lb))
        counts = sorted({max(total * quarters // 4, 1) for quarters in (4, 3, 2, 1)}, reverse=True) if total else []
        lowest = math.inf if limit is None else limit
        for count in counts:
            peak = self.peak(count, lb, limit)
            yield count, peak
            lowest = min(lowest, peak.peak_bytes)
            if peak.peak_bytes > MAX_FEWER_RATIO * lowest:
                return

    def _fewest(self, lb: int, limit: int, fits: int | None) -> int | None:
        """Return nearly the fewest swaps that fit, by bisection below a number that does."""
        down = self._from_all_down(lb, limit)
        high = fits or next((count for count, peak in down if peak.peak_bytes <= limit), None)
        if high is None:
            return None
        low, tolerance = 0, max(1, int(COUNT_TOLERANCE * high))
        while high - low > tolerance:
            middle = (low + high) // 2
            if self.peak(middle, lb, limit).peak_bytes > limit:
                low = middle
            else:
                high = middle
        return high
