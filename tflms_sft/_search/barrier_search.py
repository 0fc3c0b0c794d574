"""Tile plans of steps with barriers: which tensors are checkpointed, and in how many tiles each loop runs.

Barriers cut a step into tile loops that follow one another. Loops have no bounds to choose, so there are no paths:
a set of checkpoints fixes the loops, and a target from the ladder of `block_choices.py` fixes the tiles of each.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence

from rewriters.emission.tile_pass import LOOP_SCOPE, SegmentPlan
from rewriters.estimates.op_cost import sum_in_order
from rewriters.ir.graph import Node, Tensor
from rewriters.tiling.barrier_levels import assign_levels
from rewriters.tiling.barrier_planner import BarrierPlanner, barrier_segment, has_barriers, has_nonlinear_gradients
from rewriters.tiling.checkpoint_selection import CheckpointSelection
from rewriters.tiling.ft_segments import refused
from rewriters.tiling.row_planner import RowBarrierPlanner
from rewriters.tiling.segment import Segment
from rewriters.tiling.tile_grids import loop_grids
from rewriters.tiling.tile_planner import Grid, Halo
from tflms_sft._search.block_choices import rung, target_bytes
from tflms_sft._search.segment_tilings import LoopEstimate, LoopEstimates, fastest_fitting
from tflms_sft._search.traced_step import Candidate, TracedStep, bytes_beside_iterations, least_peak, predict

MIN_ITERATION_FRACTION = 1 / 32
"""Bytes of the smallest iterations that are tried, over those of the largest tensor that a loop writes."""

CHEAP_FLOPS_PER_BYTE = (0.0, 40.0, 500.0)
"""Work per byte of its result up to which an op is recomputed rather than checkpointed; the fastest plans first.

A convolution of one tap from few channels to many is below the second, such as the last one of a bottleneck, or a
transposed one on the way up: it reads little, and its result is large. A convolution of three taps along each axis
between few channels is below the third, as those of a U-Net at full resolution, whose results fill most of the memory.
"""

MAX_FAILURES = 2
"""Consecutive sets without a lower peak after which the search for the lowest peak ends."""


@dataclasses.dataclass(frozen=True, eq=False)
class CheckpointSet:
    """Tensors that are checkpointed for the backward pass.

    Attributes:
        selection: Tensors that are materialised at some time.
        tensors: Those of them that are saved for the backward pass; the others are recomputed.
    """

    selection: CheckpointSelection
    tensors: frozenset[Tensor]

    def num_bytes(self, traced: TracedStep) -> int:
        """Return the bytes that are saved in memory for the backward pass."""
        return sum(map(traced.resident_bytes, self.tensors))


class Barriers:
    """All ops of a step that run in tiles, as one segment with barriers.

    Args:
        traced: The step.
        allowed: Ops that may run in tiles; by default all.
        stored: Tensors to materialise in any case.

    Attributes:
        left: Forward ops on images that cannot be tiled, with reasons.
        families: Sets of checkpoints in families; in each the one that saves most, and recomputes least, comes first.
        smallest: The set with the fewest bytes of those that save every expensive tensor.
    """

    def __init__(
        self, traced: TracedStep, allowed: Container[Node] | None = None, stored: Iterable[Tensor] = ()
    ) -> None:
        self._traced = traced
        self._levels = assign_levels(traced.analysis, allowed)
        self.left = [refused(traced.analysis, node, why) for node, why in self._levels.refused.items()]
        first, *others = [
            CheckpointSelection(
                traced.analysis, self._levels, batch=traced.batch, extra=frozenset(stored), cheap_flops=flops
            )
            for flops in CHEAP_FLOPS_PER_BYTE
        ]
        self._selection = first
        selections = (first, *(other for other in others if other.stored != first.stored))
        self.families = [
            [CheckpointSet(selection, frozenset(tensors)) for tensors in selection.checkpoints()]
            for selection in selections
        ]
        self.smallest = self.families[0][-1]
        self._segments: dict[CheckpointSelection, Segment] = {}
        self._numbers = {one: (f, s) for f, family in enumerate(self.families) for s, one in enumerate(family)}

    @property
    def present(self) -> bool:
        """Return whether there is a barrier, or an op that needs true values of gradients, and a backward pass."""
        analysis, levels = self._traced.analysis, self._levels
        if not any(node in analysis.backward for node in (*levels.tiled, *levels.sums)):
            return False
        return has_barriers(analysis, levels) or has_nonlinear_gradients(analysis, levels)

    def segment(self, name: str, checkpoints: CheckpointSet) -> Segment:
        """Return the segment with a set of checkpoints."""
        selection = checkpoints.selection
        if selection not in self._segments:
            self._segments[selection] = barrier_segment(self._traced.analysis, name, self._levels, selection)
        loops = selection.loop_specs(set(checkpoints.tensors))
        number = self._numbers.get(checkpoints)
        return dataclasses.replace(self._segments[selection], name=name, loop_specs=loops, checkpoint_set=number)

    def stores(self, tensor: Tensor) -> bool:
        """Return whether a tensor is materialised at some time."""
        return tensor in self._selection.stored

    @property
    def nodes(self) -> set[Node]:
        """Ops that run in tiles, or reduce over tiles."""
        return {*self._levels.tiled, *self._levels.sums}

    @property
    def exits(self) -> set[Tensor]:
        """Images that ops outside read, and all reductions."""
        return self._selection.exits | {node.out() for node in self._levels.sums}


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
        self._planner.latest = estimates.latest[halo]
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

    def _key(self, number: int, grid: Grid) -> Hashable:
        return (self._programs[number], self.halo is Halo.CARRY, grid)  # Hashes of enums are slow.

    def fitting_grids(self, limit: Callable[[int], float]) -> list[Grid]:
        """Return for each loop the fewest tiles of which an iteration takes at most `limit(number)` bytes.

        Where more tiles are faster, these are taken; where no grid fits, the finest one.
        """
        return [
            fastest_fitting(grids, limit(number), functools.partial(self.estimate, number)) or grids[-1]
            for number, grids in enumerate(self.grids)
        ]

    def small_iterations(self, limit: float) -> list[Grid]:
        """Return the fewest tiles of which an iteration takes at most `limit` bytes more than in the finest grid.

        Some bytes are taken in any number of tiles, such as those of filters in the layout of a kernel.
        """
        return self.fitting_grids(lambda number: limit + self.estimate(number, self.grids[number][-1]).num_bytes)

    def planned(self, grids: Sequence[Grid]) -> SegmentPlan:
        """Plan the loops in these grids."""
        remaining = iter(grids)
        loops = self._planner.tile_loops(lambda loop: next(remaining))
        keys = (self._key(number, grid) for number, grid in enumerate(grids))
        return SegmentPlan(self.segment, list(map(self._estimates.shared, keys, loops)), self.halo)


def plan_for_capacity(traced: TracedStep, segment: Segment, capacity: int | None, halo: Halo) -> SegmentPlan:
    """Plan loops in the fewest tiles of which an iteration takes `capacity` bytes, beyond those of the finest grid.

    Without a capacity an iteration may take as much as the largest tensor that a loop writes.
    """
    loops = TiledLoops(LoopEstimates(traced), segment, halo=halo)
    return loops.planned(loops.small_iterations(capacity or _largest_result(traced, segment)))


def _largest_result(traced: TracedStep, segment: Segment) -> int:
    """Return the bytes of the largest tensor that a loop writes."""
    return max((t.num_bytes(traced.batch) for loop in segment.loop_specs for t in loop.writes), default=1)


class CheckpointPlan:
    """The loops of a segment with one set of checkpoints, in any number of tiles."""

    def __init__(self, estimates: LoopEstimates, segment: Segment) -> None:
        self._traced = estimates.traced
        programs = estimates.programs(segment)
        self._loops = {halo: TiledLoops(estimates, segment, halo=halo, programs=programs) for halo in Halo}
        self._targets: dict[tuple[Halo, int], tuple[int, list[Grid]]] = {}
        self._smallest: Candidate | None = None

    @functools.cached_property
    def bound_bytes(self) -> int:
        """Lower bound of the peak of the step with small iterations."""
        return least_peak(self._traced, [self._small_plan])

    @functools.cached_property
    def least_bytes(self) -> int:
        """Peak of the step with small iterations; a lower bound of it until `fits` has modelled the whole step."""
        return self.bound_bytes

    def may_fit_with_swaps(self, limit: int) -> bool:
        """Return whether each loop alone, in its finest grid or with small iterations, stays within `limit` bytes."""
        beside = bytes_beside_iterations(self._traced, self._small_plan, swapped=True)
        small = [tile_loop.grid for tile_loop in self._small_plan.loops]

        def fits(number: int, loops: TiledLoops) -> bool:
            grids = {loops.grids[number][-1], small[number]}
            return any(beside[number] + loops.estimate(number, grid).num_bytes <= limit for grid in grids)

        return all(any(fits(number, loops) for loops in self._loops.values()) for number in range(len(small)))

    @functools.cached_property
    def least_seconds(self) -> float:
        """Lower bound of the time of the loops, in any number of tiles."""
        loops = self._loops[Halo.RECOMPUTE]
        return sum_in_order(loops.estimate(number, grids[0]).least_seconds for number, grids in enumerate(loops.grids))

    @property
    def smallest(self) -> Candidate:
        """Plan with small iterations."""
        if self._smallest is None:
            self._smallest = predict(self._traced, [self._small_plan])
            self.least_bytes = self._smallest.peak.peak_bytes
        return self._smallest

    @functools.cached_property
    def _small_plan(self) -> SegmentPlan:
        loops = self._loops[Halo.RECOMPUTE]
        num_bytes = MIN_ITERATION_FRACTION * _largest_result(self._traced, loops.segment)
        return loops.planned(loops.small_iterations(num_bytes))

    @functools.cached_property
    def _bytes_beside(self) -> tuple[list[int], int]:
        """Bytes alive while each loop runs, without its iterations; and the peak while none runs."""
        (plan,) = self.smallest.plans
        peaks, outside = dict[str, int](), 0
        for name, size in self.smallest.peak.timeline:
            scope, segment, loop, *_ = *name.split("/"), "", ""
            if f"{scope}/" == LOOP_SCOPE and segment == plan.segment.name:
                peaks[loop] = max(size, peaks.get(loop, 0))
            else:
                outside = max(size, outside)
        memory, batch = self._traced.loop_memory, self._traced.batch
        return [peaks[tile_loop.name] - memory.peak_bytes(tile_loop, batch) for tile_loop in plan.loops], outside

    def fastest_within(self, halo: Halo, limit: int) -> Candidate | None:
        """Return the plan for the highest target with which the step stays within `limit` bytes.

        The estimated bytes beside each loop suggest the first target. The memory model of the whole step has to agree:
        targets fall in growing strides until one fits, and rise to the highest that does.
        """
        if not self.fits(limit):
            return None
        low = rung(self.smallest.peak.peak_bytes) - 1
        high = rung(2 * self._traced.plain.peak.peak_bytes) + 1
        first = bisect.bisect_right(range(low, high), limit, key=lambda step: self._for_target(halo, step)[0]) + low - 1
        modelled: dict[tuple[Grid, ...], Candidate] = {}

        def fitting(step: int) -> Candidate | None:
            if step <= low:
                return self.smallest
            grids = tuple(self._for_target(halo, step)[1])
            if grids not in modelled:
                modelled[grids] = predict(self._traced, [self._loops[halo].planned(grids)], limit=limit)
            return modelled[grids] if modelled[grids].peak.peak_bytes <= limit else None

        above, step = first + 1, first
        while (best := fitting(step)) is None:
            above, step = step, 2 * step - first - 1
        step = max(step, low)
        while above - step > 1:
            middle = (above + step) // 2
            higher = fitting(middle)
            above, step, best = (middle, step, best) if higher is None else (above, middle, higher)
        return min(best, self.smallest, key=_rank)  # A target below the bytes beside a loop asks for the finest grid.

    def may_fit(self, limit: int) -> bool:
        """Return whether the lower bound of the step's peak stays within `limit` bytes."""
        return self.least_bytes <= limit

    def fits(self, limit: int) -> bool:
        """Return whether the step with small iterations stays within `limit` bytes."""
        if self._smallest is None and self.least_bytes <= limit:
            candidate = predict(self._traced, [self._small_plan], limit=limit)
            self.least_bytes = candidate.peak.peak_bytes
            if self.least_bytes <= limit:  # Else modelling stopped at the first state above the limit.
                self._smallest = candidate
        return self.least_bytes <= limit

    def _for_target(self, halo: Halo, step: int) -> tuple[int, list[Grid]]:
        """Return the estimated peak for a target, and the fewest tiles of each loop."""
        if (halo, step) not in self._targets:
            loops, (beside, outside) = self._loops[halo], self._bytes_beside
            grids = loops.fitting_grids(lambda number: target_bytes(step) - beside[number])
            estimates = [loops.estimate(number, grid) for number, grid in enumerate(grids)]
            peak = max(other + estimate.num_bytes for other, estimate in zip(beside, estimates, strict=True))
            saved_bytes = sum(estimate.saved_bytes for estimate in estimates)
            self._targets[halo, step] = max(outside, peak) + saved_bytes, grids
        return self._targets[halo, step]


class BarrierSearch:
    """Tile plans of a step with barriers (`TileSearch`).

    Attributes:
        left: Ops that cannot be tiled, with reasons.
    """

    def __init__(self, traced: TracedStep, barriers: Barriers) -> None:
        self._traced = traced
        self._barriers = barriers
        self.left = barriers.left
        self._estimates = LoopEstimates(traced)
        self._plans: dict[CheckpointSet, CheckpointPlan] = {}
        self._fastest: dict[int, Candidate | None] = {}
        self._too_small = 0
        """Largest limit for which no plan was found. The search may miss one that only `smallest` finds."""
        self._bytes_beside = traced.held_bytes  # A lower bound.

    @property
    def in_memory(self) -> BarrierSearch:
        """This search, which decides on no files."""
        return self

    @functools.cached_property
    def _seconds_outside(self) -> float:
        """Time of the ops that never run in tiles."""
        return self._traced.seconds - self._traced.costs.step(self._barriers.nodes)

    def _plan(self, checkpoints: CheckpointSet) -> CheckpointPlan:
        if checkpoints not in self._plans:
            self._plans[checkpoints] = CheckpointPlan(self._estimates, self._barriers.segment("segment1", checkpoints))
        return self._plans[checkpoints]

    def least_seconds(self, limit: int) -> float:
        """Return the least time of the sets whose checkpoints alone stay within `limit` bytes."""
        return min(self._least_seconds_of(family, limit) for family in self._barriers.families)

    def may_fit_with_swaps(self, limit: int) -> bool:
        """Return false if no set of checkpoints, with any swaps, can stay within `limit` bytes."""
        sets = (one for family in self._barriers.families for one in reversed(family))
        return any(self._plan(checkpoints).may_fit_with_swaps(limit) for checkpoints in sets)

    def _least_seconds_of(self, family: Sequence[CheckpointSet], limit: int) -> float:
        """Return a lower bound of the time of a family's sets within `limit` bytes; later ones recompute more."""
        first = self._first_within(family, limit, self._traced.held_bytes)
        return self._least_seconds(self._plan(family[first])) if first < len(family) else math.inf

    def _least_seconds(self, plan: CheckpointPlan) -> float:
        return self._seconds_outside + plan.least_seconds

    def _first_within(self, family: Sequence[CheckpointSet], limit: int, beside: int) -> int:
        """Return the position of the first set with which a step stays within `limit` bytes, by the bytes beside it."""
        traced = self._traced
        return bisect.bisect_left(family, True, key=lambda one: one.num_bytes(traced) + beside <= limit)

    def _first_fitting(self, family: Sequence[CheckpointSet], limit: int) -> int:
        """Return the position of the first set that fits with small iterations; those after it save less.

        Modelling one set takes long. Lower bounds of the peak show where to begin.
        """
        first = self._first_within(family, limit, self._traced.held_bytes) - 1
        first = self._first(family, limit, first, CheckpointPlan.may_fit)
        if first == len(family) or self._fits(family[first], limit, CheckpointPlan.fits):
            return first
        return self._first(family, limit, first, CheckpointPlan.fits)

    def _first(
        self, family: Sequence[CheckpointSet], limit: int, low: int, fits: Callable[[CheckpointPlan, int], bool]
    ) -> int:
        """Return the position of the first set after `low` that fits.

        The bytes beside the checkpoints of one set predict those of the next within a few per cent, so the search tries
        that prediction; after a failure it tries the last set, and the middle once.
        """
        high, guided = len(family), True
        while high - low > 1:
            middle = (low + high) // 2
            if guided:
                middle = min(max(self._first_within(family, limit, self._bytes_beside), low + 1), high - 1)
            middle_fits = self._fits(family[middle], limit, fits)
            if not middle_fits and high == len(family) > middle + 1:
                if not self._fits(family[-1], limit, fits):
                    return high
                high = len(family) - 1
            guided = middle_fits or not guided
            low, high = (low, middle) if middle_fits else (middle, high)
        return high

    def _fits(self, checkpoints: CheckpointSet, limit: int, fits: Callable[[CheckpointPlan, int], bool]) -> bool:
        """Return whether a set fits with small iterations, and note the bytes beside its checkpoints."""
        plan = self._plan(checkpoints)
        result = fits(plan, limit)
        self._bytes_beside = plan.least_bytes - checkpoints.num_bytes(self._traced)
        return result

    def fastest_within(self, limit: int) -> Candidate | None:
        """Return the fastest plan found whose step stays within `limit` bytes."""
        if limit not in self._fastest and limit > self._too_small:
            self._fastest[limit] = self._search_within(limit)
            if self._fastest[limit] is None:
                self._too_small = limit
        return self._fastest.get(limit)

    def _search_within(self, limit: int) -> Candidate | None:
        """Try the sets of each family that fit, up to the first whose lower bound is slower than the best plan."""
        candidates: list[Candidate] = []
        fastest = math.inf
        for family in self._barriers.families:
            if fastest < math.inf and self._least_seconds_of(family, limit) >= fastest:
                continue
            for plan in map(self._plan, family[self._first_fitting(family, limit) :]):
                if self._least_seconds(plan) >= fastest:
                    break
                candidates += _with_halos(plan, limit)
                ratios = (candidate.time_ratio for candidate in candidates)
                fastest = min(ratios, default=math.inf) * self._traced.seconds
        return min(candidates, key=_rank, default=None)

    @functools.cached_property
    def smallest(self) -> Candidate:
        """Plan with the lowest peak found, equal after any search; sets with the lowest bounds are tried first."""
        best, failures = self._traced.plain, 0
        plans = [self._plan(checkpoints) for family in self._barriers.families for checkpoints in family]
        for plan in sorted(plans, key=lambda plan: plan.bound_bytes):
            if plan.fits(best.peak.peak_bytes - 1):
                best, failures = plan.smallest, 0
            else:
                failures += 1
            if failures == MAX_FAILURES:
                break
        return best

    def proposed(self, target: int) -> Candidate | None:
        """Return the plan for a target, whether its step meets it or not."""
        return self.fastest_within(target) or self.smallest


def _with_halos(plan: CheckpointPlan, limit: int) -> Iterator[Candidate]:
    """Yield the plans of a set that fit; carried halos are tried where recomputed ones split rows at all."""
    for halo in Halo:
        candidate = plan.fastest_within(halo, limit)
        if candidate is not None:
            yield candidate
        if candidate is None or all(max(loop.grid.spatial) == 1 for loop in candidate.plans[0].loops):
            return


def _rank(candidate: Candidate) -> tuple[float, int]:
    """Return a sort key: faster first, and among equals the one that needs less memory."""
    return candidate.time_ratio, candidate.peak.peak_bytes
