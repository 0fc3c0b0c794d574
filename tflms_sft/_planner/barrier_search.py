"""Tile plans for steps with barriers: which tensors wait for the backward phase, and how many tiles each loop gets."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Sequence

from rewriters.emission.loop_signature import loop_signature
from rewriters.emission.tile_pass import SegmentPlan
from rewriters.estimates.loop_memory import Results
from rewriters.ir.graph import Node, Tensor
from rewriters.tiling.barrier_levels import assign_levels
from rewriters.tiling.barrier_planner import BarrierPlanner, barrier_segment, has_barriers
from rewriters.tiling.checkpoint_selection import CheckpointSelection, LoopSpec
from rewriters.tiling.ft_segments import refused
from rewriters.tiling.row_planner import RowBarrierPlanner
from rewriters.tiling.segment import Segment
from rewriters.tiling.tile_planner import Grid, Halo, TileLoop
from tflms_sft._planner.target_ladder import RUNG, rung
from tflms_sft._planner.tile_grids import fastest, fewest, loop_grids
from tflms_sft._planner.traced_step import Candidate, TracedStep, predict

FINEST = 1 / 32
"""Bytes of the smallest turns that are tried, over those of the largest tensor that a loop writes."""

CHEAP_FLOPS = (0.0, 40.0)
"""For each byte that an operation makes, what running it again may take for it not to be stored; from the fastest on.

A convolution of one tap from few channels to many is like that, such as the last one of a bottleneck, or a transposed
one on the way up: it reads little, and what it makes is large.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class CheckpointSet:
    """One way to have what the backward phase needs.

    Attributes:
        storage: What exists whole at some time.
        tensors: Of that, what waits for the backward phase; the rest is made again.
    """

    storage: CheckpointSelection
    tensors: frozenset[Tensor]


class Barriers:
    """All operations of a step that run on tiles, as one segment with barriers.

    Attributes:
        left: Forward operations on images that do not.
        families: Ways to have what the backward phase needs: of each family the one that keeps most, and so makes
            least again, first.
        fewest: The one that keeps least of those that store all that is dear.
    """

    def __init__(
        self, traced: TracedStep, allowed: Container[Node] | None = None, stored: Iterable[Tensor] = ()
    ) -> None:
        self._traced = traced
        self._roles = assign_levels(traced.analysis, allowed)
        self.left = [refused(traced.analysis, node, why) for node, why in self._roles.refused.items()]
        found = [
            CheckpointSelection(traced.analysis, self._roles, traced.batch, frozenset(stored), flops)
            for flops in CHEAP_FLOPS
        ]
        self._storage = found[0]
        different = [storage for storage in found[1:] if storage.stored != found[0].stored]
        self.families = [
            [CheckpointSet(s, frozenset(kept)) for kept in s.checkpoints()] for s in (found[0], *different)
        ]
        self.fewest = self.families[0][-1]

    @property
    def present(self) -> bool:
        """Whether there is a barrier at all, and a backward phase."""
        return has_barriers(self._traced.analysis, self._roles) and any(
            node in self._traced.analysis.backward for node in (*self._roles.tiled, *self._roles.sums)
        )

    def segment(self, name: str, way: CheckpointSet) -> Segment:
        """The segment, with checkpoints."""
        return barrier_segment(self._traced.analysis, name, self._roles, way.storage, set(way.tensors))

    def stores(self, tensor: Tensor) -> bool:
        """Whether a tensor is whole at some time."""
        return tensor in self._storage.stored

    @property
    def nodes(self) -> set[Node]:
        """Operations that run on tiles, or sum up what does."""
        return {*self._roles.tiled, *self._roles.sums}

    @property
    def exits(self) -> set[Tensor]:
        """Images that operations outside read, and all sums."""
        return self._storage.exits | {node.out() for node in self._roles.sums}


@dataclasses.dataclass(frozen=True)
class LoopEstimate:
    """A loop in some number of tiles.

    Attributes:
        num_bytes: What a turn takes.
        saved: Bytes of the rows that are saved for another loop.
        seconds: Time of all turns.
        least: Time that neither they nor more turns fall below.
    """

    num_bytes: int
    saved: int
    seconds: float
    least: float


class LoopEstimates:
    """What is known of loops in numbers of tiles; loops that differ in their names alone are one.

    Args:
        traced: The step.
    """

    def __init__(self, traced: TracedStep) -> None:
        self.traced = traced
        self._programs: dict[Hashable, int] = {}
        self._turns: dict[Hashable, LoopEstimate] = {}
        self._memory: dict[Hashable, Results] = {}

    def programs(self, segment: Segment) -> list[int]:
        """For each loop of a segment a number, the same for all loops that do the same."""
        return [self._program(segment, loop) for loop in segment.loop_specs]

    def _program(self, segment: Segment, loop: LoopSpec) -> int:
        key = loop_signature(self.traced.analysis, segment.kinds, loop)
        return self._programs.setdefault(key, len(self._programs))

    def of(self, key: Hashable, tile_loop: Callable[[], TileLoop]) -> LoopEstimate:
        """Of a program, its halo and grid; `phase` plans it."""
        if key not in self._turns:
            planned = self.shared(key, tile_loop())
            batch = self.traced.batch
            saved = sum(save.saved.num_bytes(batch) for save in planned.saves)
            costs = self.traced.costs
            taken, least = costs.tile_loop(planned), costs.lower_bound.tile_loop(planned)
            self._turns[key] = LoopEstimate(self.traced.loop_memory.peak_bytes(planned, batch), saved, taken, least)
        return self._turns[key]

    def shared(self, key: Hashable, tile_loop: TileLoop) -> TileLoop:
        """Return the loop, bound to the memory estimates of other loops of its program."""
        self.traced.loop_memory.bind(tile_loop, self._memory.setdefault(key, {}))
        return tile_loop


class TiledLoops:
    """A segment with barriers, any of whose loops may run in any number of tiles.

    Args:
        turns: What is known of them.
        segment: The segment.
        halo: Where turns have the rows from that they share.
        programs: A number for each loop, the same for those that do the same (`LoopEstimates.programs`).
    """

    def __init__(
        self, turns: LoopEstimates, segment: Segment, halo: Halo = Halo.RECOMPUTE, programs: Sequence[int] | None = None
    ) -> None:
        self.segment = segment
        self.halo = halo
        self._turns = turns
        self._gatherer = (RowBarrierPlanner if halo is Halo.CARRY else BarrierPlanner)(turns.traced.analysis, segment)
        self._programs = turns.programs(segment) if programs is None else programs

    @functools.cached_property
    def grids(self) -> list[list[Grid]]:
        """For each loop those to try, from one tile up."""
        analysis, batch = self._turns.traced.analysis, self._turns.traced.batch
        splits = (self._gatherer.split(loop) for loop in self.segment.loop_specs)
        return [loop_grids(analysis, split, batch, self.halo is Halo.CARRY) for split in splits]

    def turn(self, number: int, grid: Grid) -> LoopEstimate:
        """One of the loops in some number of tiles."""
        loop = self.segment.loop_specs[number]
        return self._turns.of(self._key(number, grid), lambda: self._gatherer.tile_loop(loop, grid))

    def _key(self, number: int, grid: Grid) -> Hashable:
        return (self._programs[number], self.halo, grid)

    def fewest(self, most: Callable[[int], float]) -> list[Grid]:
        """For each loop the fewest tiles of which a turn takes no more than `most` says, or the most tiles.

        More of them where those are faster.
        """

        def seconds(number: int, grid: Grid) -> tuple[float, float]:
            turn = self.turn(number, grid)
            return turn.seconds, turn.least

        def of_loop(number: int) -> Grid:
            limit, grids = most(number), self.grids[number]
            found = fewest(grids, lambda grid: self.turn(number, grid).num_bytes <= limit) or grids[-1]
            return fastest(grids, found, functools.partial(seconds, number))

        return [of_loop(number) for number in range(len(self.grids))]

    def planned(self, grids: Sequence[Grid]) -> SegmentPlan:
        """The loops in these tiles."""
        remaining = iter(grids)
        tile_loops = self._gatherer.tile_loops(lambda loop: next(remaining))
        shared = [
            self._turns.shared(self._key(n, g), p) for n, (g, p) in enumerate(zip(grids, tile_loops, strict=True))
        ]
        return SegmentPlan(self.segment, shared, self.halo)


def fitted(traced: TracedStep, segment: Segment, limit: float, halo: Halo = Halo.RECOMPUTE) -> SegmentPlan:
    """Loops with the fewest tiles of which a turn takes `limit` bytes, beyond what one row takes."""
    looped = TiledLoops(LoopEstimates(traced), segment, halo)
    return looped.planned(small_turns(looped, limit))


def small_turns(looped: TiledLoops, limit: float) -> list[Grid]:
    """Grids for `fitted`. Filters in a kernel's own layout, say, are there with any number of tiles."""
    return looped.fewest(lambda number: limit + looped.turn(number, looped.grids[number][-1]).num_bytes)


def largest(traced: TracedStep, segment: Segment) -> int:
    """Bytes of the largest tensor that a loop writes."""
    return max((t.num_bytes(traced.batch) for loop in segment.loop_specs for t in loop.writes), default=1)


class CheckpointPlan:
    """One way to have what the backward phase needs, with turns of any size.

    Args:
        turns: What is known of loops.
        segment: With the checkpoints of this way.
    """

    def __init__(self, turns: LoopEstimates, segment: Segment) -> None:
        self._traced = turns.traced
        programs = turns.programs(segment)
        self._looped = {halo: TiledLoops(turns, segment, halo, programs) for halo in Halo}
        self._sizes: dict[tuple[Halo, int], tuple[int, list[Grid]]] = {}
        self._smallest: Candidate | None = None
        self._seen = 0

    @property
    def least_bytes(self) -> int:
        """What the step needs in small turns, or less, as far as `fits` has looked."""
        return self._seen if self._smallest is None else self._smallest.peak.peak_bytes

    @functools.cached_property
    def least(self) -> float:
        """Seconds that its loops take at least, in any number of tiles."""
        looped = self._looped[Halo.RECOMPUTE]
        return sum(looped.turn(number, grids[0]).least for number, grids in enumerate(looped.grids))

    @property
    def smallest(self) -> Candidate:
        """In small turns."""
        if self._smallest is None:
            self._smallest = self._candidate(self._looped[Halo.RECOMPUTE], self._small)
        return self._smallest

    @functools.cached_property
    def _small(self) -> list[Grid]:
        looped = self._looped[Halo.RECOMPUTE]
        return small_turns(looped, FINEST * largest(self._traced, looped.segment))

    def _candidate(self, looped: TiledLoops, grids: Sequence[Grid], limit: int | None = None) -> Candidate:
        plan = looped.planned(grids)
        return Candidate([plan], *predict(self._traced, [plan], limit))

    @functools.cached_property
    def _beside(self) -> tuple[list[int], int]:
        """Bytes that are taken while each loop runs, without its turns; and the most while none does."""
        (plan,) = self.smallest.plans
        prefixes = [f"sft/{plan.segment.name}/{tile_loop.name}/" for tile_loop in plan.loops]
        timeline = self.smallest.peak.timeline
        taken = [max(size for name, size in timeline if name.startswith(prefix)) for prefix in prefixes]
        scratch = [self._traced.loop_memory.peak_bytes(tile_loop, self._traced.batch) for tile_loop in plan.loops]
        outside = max((size for name, size in timeline if not name.startswith(tuple(prefixes))), default=0)
        return [whole - own for whole, own in zip(taken, scratch, strict=True)], outside

    def cheapest(self, halo: Halo, limit: int) -> Candidate | None:
        """The largest turns, of those for a ladder of targets, with which the step stays below `limit` bytes.

        The targets are the same for all limits. Which of them fit is estimated from what is alive beside each loop;
        then the memory model of the whole step has to agree.
        """
        if not self.fits(limit):
            return None
        low = rung(self.smallest.peak.peak_bytes) - 1
        high = rung(2 * self._traced.plain.peak.peak_bytes) + 1
        first = bisect.bisect_right(range(low, high), limit, key=lambda step: self._estimate(halo, step)[0]) + low - 1
        tried: dict[tuple[Grid, ...], Candidate] = {}

        def fitting(step: int) -> Candidate | None:
            if step <= low:
                return self.smallest
            grids = tuple(self._estimate(halo, step)[1])
            if grids not in tried:
                tried[grids] = self._candidate(self._looped[halo], grids, limit)
            return tried[grids] if tried[grids].peak.peak_bytes <= limit else None

        # Down from there in larger and larger steps until one fits, and back up to the highest that does.
        above, step = first + 1, first
        while (found := fitting(step)) is None:
            above, step = step, 2 * step - first - 1
        step = max(step, low)
        while above - step > 1:
            middle = (above + step) // 2
            better = fitting(middle)
            above, step, found = (middle, step, found) if better is None else (above, middle, better)
        return found

    def fits(self, limit: int) -> bool:
        """Whether small turns do; a peak above `limit` need not be the worst, and is not kept."""
        if self._smallest is None:
            found = self._candidate(self._looped[Halo.RECOMPUTE], self._small, limit)
            self._seen = max(self._seen, found.peak.peak_bytes)
            if found.peak.peak_bytes > limit:
                return False
            self._smallest = found
        return self._smallest.peak.peak_bytes <= limit

    def _estimate(self, halo: Halo, step: int) -> tuple[int, list[Grid]]:
        """The fewest tiles for a target, and about the peak with them."""
        if (halo, step) not in self._sizes:
            looped, (beside, outside) = self._looped[halo], self._beside
            target = int(RUNG**step)
            grids = looped.fewest(lambda number: target - beside[number])
            turns = [looped.turn(number, grid) for number, grid in enumerate(grids)]
            peak = max(taken + turn.num_bytes for taken, turn in zip(beside, turns, strict=True))
            self._sizes[halo, step] = max(outside, peak) + sum(turn.saved for turn in turns), grids
        return self._sizes[halo, step]


class BarrierSearch:
    """Tile plans of a step with barriers, as `TileSearch` gives those of others.

    Attributes:
        left: What cannot be tiled.
    """

    def __init__(self, traced: TracedStep, barriers: Barriers) -> None:
        self._traced = traced
        self._barriers = barriers
        self.left = barriers.left
        self._turns = LoopEstimates(traced)
        self._found: dict[CheckpointSet, CheckpointPlan] = {}
        inputs = sum(t.num_bytes(traced.batch) for t in traced.analysis.graph.inputs)
        self._held = traced.fixed_bytes + inputs
        # A first guess, as if operations ran whole.
        self._beside = traced.plain.peak.peak_bytes - self._bytes(barriers.families[0][0])

    def _way(self, kept: CheckpointSet) -> CheckpointPlan:
        if kept not in self._found:
            self._found[kept] = CheckpointPlan(self._turns, self._barriers.segment("segment1", kept))
        return self._found[kept]

    def _promising(self, limit: int) -> Iterator[list[CheckpointPlan]]:
        """Of each family the ways of which small turns fit, the one that keeps most, and makes least again, first."""
        for family in self._barriers.families:
            yield [self._way(kept) for kept in family[self._first(family, limit) :]]

    def _first(self, family: Sequence[CheckpointSet], limit: int) -> int:
        """Position of the first way of which small turns fit; those after it keep less.

        To see whether one fits takes its time. What one takes beside what waits the next takes, too, within a few per
        cent: every other attempt at most is where that does not suggest, in the middle.
        """

        def suggested(beside: int) -> int:
            return bisect.bisect_left(family, True, key=lambda kept: self._bytes(kept) + beside <= limit)

        low, high, guided = suggested(self._held) - 1, len(family), True
        while high - low > 1:
            middle = min(max(suggested(self._beside), low + 1), high - 1) if guided else (low + high) // 2
            fits = self._fits(family[middle], limit)
            guided = fits or not guided
            low, high = (low, middle) if fits else (middle, high)
        return high

    def _bytes(self, kept: CheckpointSet) -> int:
        """What waits for the backward phase."""
        return sum(tensor.num_bytes(self._traced.batch) for tensor in kept.tensors)

    def _fits(self, kept: CheckpointSet, limit: int) -> bool:
        """Whether small turns do."""
        way = self._way(kept)
        fits = way.fits(limit)
        self._beside = way.least_bytes - self._bytes(kept)
        return fits

    def cheapest(self, limit: int) -> Candidate | None:
        """The fastest plan found whose step stays below `limit` bytes.

        A way that takes longer at best than what was found is not looked at; nor is handing rows on where the fastest
        plan has none.
        """
        found: Candidate | None = None
        rest = self._traced.seconds - self._traced.costs.step(self._barriers.nodes)
        for way in itertools.chain.from_iterable(self._promising(limit)):
            if found is not None and found.time_ratio * self._traced.seconds <= rest + way.least:
                continue
            for halo in Halo:
                best = way.cheapest(halo, limit)
                if best is not None and (found is None or _rank(best) < _rank(found)):
                    found = best
                if best is None or all(max(tile_loop.grid.spatial) == 1 for tile_loop in best.plans[0].loops):
                    break
        return found

    @functools.cached_property
    def smallest(self) -> Candidate:
        """The plan with the lowest peak that is found."""
        ways = (self._way(kept) for family in self._barriers.families for kept in family)
        candidates = [self._traced.plain, *(way.smallest for way in ways)]
        return min(candidates, key=lambda candidate: candidate.peak.peak_bytes)

    def proposed(self, target: int) -> Candidate | None:
        """What is proposed for a target, whether its step meets it or not."""
        return self.cheapest(target) or self.smallest


def _rank(candidate: Candidate) -> tuple[float, int]:
    """Faster first; among equals the one that needs less memory."""
    return candidate.time_ratio, candidate.peak.peak_bytes
