"""Tile plans for steps with barriers: which tensors wait for the backward phase, and how many tiles each loop gets."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container, Iterable

from rewriters.barriers import find_roles
from rewriters.ft import LeftAlone
from rewriters.gather import Gatherer, barrier_segment, has_barriers
from rewriters.graph import Node, Tensor
from rewriters.rows import RowGatherer
from rewriters.segments import Segment
from rewriters.sft import SegmentPlan
from rewriters.stored import Loop, Storage
from rewriters.tiles import Grid, Halo
from rewriters.turns import phase_scratch
from tflms_sft._compile import Candidate, Traced, predict
from tflms_sft._grids import fewest, loop_grids

FINEST = 1 / 32
"""Bytes of the smallest turns that are tried, over those of the largest tensor that a loop writes."""

ROOM = 0.97
"""Part of the room beside what is alive while a loop runs that its turns may take."""

LESS_ROOM = 0.6
"""Of that, what they may take if it turns out to be too much: memory is in pieces."""

MAX_ROUNDS = 12
"""Attempts to find how large turns may be."""

CHEAP_FLOPS = (0.0, 40.0)
"""For each byte that an operation makes, what running it again may take for it not to be stored; from the fastest on.

A convolution of one tap from few channels to many is like that, such as the last one of a bottleneck, or a transposed
one on the way up: it reads little, and what it makes is large.
"""

Scratch = dict[tuple[object, ...], int]
"""Bytes that a turn of a loop takes."""


@dataclasses.dataclass(frozen=True)
class Kept:
    """One way to have what the backward phase needs.

    Attributes:
        storage: What exists whole at some time.
        tensors: Of that, what waits for the backward phase; the rest is made again.
    """

    storage: Storage
    tensors: frozenset[Tensor]


class Barriers:
    """All operations of a step that run on tiles, as one segment with barriers.

    Attributes:
        left: Forward operations on images that do not.
        ways: To have what the backward phase needs, about the fastest first.
        fewest: The one that keeps least of those that store all that is dear.
    """

    def __init__(self, traced: Traced, allowed: Container[Node] | None = None, stored: Iterable[Tensor] = ()) -> None:
        self._traced = traced
        self._roles = find_roles(traced.analysis, allowed)
        self.left = [LeftAlone(node.name, f"{node.op}: {why}") for node, why in self._roles.refused.items()]
        found = [
            Storage(traced.analysis, self._roles, traced.batch, frozenset(stored), flops) for flops in CHEAP_FLOPS
        ]
        self._storage = found[0]
        different = [storage for storage in found[1:] if storage.stored != found[0].stored]
        ways = [[Kept(s, frozenset(kept)) for kept in s.checkpoints()] for s in (found[0], *different)]
        self.fewest = ways[0][-1]
        self.ways = [way for own in ways for way in own]

    @property
    def present(self) -> bool:
        """Whether there is a barrier at all, and a backward phase."""
        return has_barriers(self._traced.analysis, self._roles) and any(
            node in self._traced.analysis.backward for node in (*self._roles.tiled, *self._roles.sums)
        )

    def segment(self, name: str, way: Kept) -> Segment:
        """The segment, with checkpoints."""
        return barrier_segment(self._traced.analysis, name, self._roles, way.storage, set(way.tensors))

    def stores(self, tensor: Tensor) -> bool:
        """Whether a tensor is whole at some time."""
        return tensor in self._storage.stored

    @property
    def exits(self) -> set[Tensor]:
        """Images that operations outside read, and all sums."""
        return self._storage.exits | {node.out() for node in self._roles.sums}


def fitted(
    traced: Traced, segment: Segment, limit: float, halo: Halo = Halo.RECOMPUTE, known: Scratch | None = None
) -> SegmentPlan:
    """Loops with the fewest tiles of which a turn takes `limit` bytes, beyond what one row takes.

    Args:
        traced: The step.
        segment: With barriers.
        limit: Bytes.
        halo: Where turns have the rows from that they share.
        known: What is known of turns; it is added to.
    """
    turns = _Turns(traced, segment, {} if known is None else known, halo)
    # Filters in a kernel's own layout, say, are there with any number of tiles.
    return turns.plan(lambda loop, grids: limit + turns.num_bytes(loop, grids[-1]))


class _Turns:
    """The turns of the loops of a segment with barriers."""

    def __init__(self, traced: Traced, segment: Segment, known: Scratch, halo: Halo = Halo.RECOMPUTE) -> None:
        self._traced = traced
        self._segment = segment
        self._known = known
        self._rows_only = halo is Halo.CARRY
        self._gatherer = (RowGatherer if self._rows_only else Gatherer)(traced.analysis, segment)

    def num_bytes(self, loop: Loop, grid: Grid) -> int:
        """Bytes that a turn takes."""
        key = (loop.level, tuple(loop.body), tuple(loop.writes), grid)
        if key not in self._known:
            self._known[key] = phase_scratch(self._gatherer.phase(loop, grid), self._traced.batch)
        return self._known[key]

    def plan(self, most: Callable[[Loop, list[Grid]], float]) -> SegmentPlan:
        """Every loop with the fewest tiles of which a turn takes no more than `most` says, or with the most tiles."""

        def grid_of(loop: Loop) -> Grid:
            split = self._gatherer.split(loop)
            grids = loop_grids(self._traced.analysis, split, self._traced.batch, self._rows_only)
            limit = most(loop, grids)
            return fewest(grids, lambda grid: self.num_bytes(loop, grid) <= limit) or grids[-1]

        halo = Halo.CARRY if self._rows_only else Halo.RECOMPUTE
        return SegmentPlan(self._segment, self._gatherer.phases(grid_of), halo)


def largest(traced: Traced, segment: Segment) -> int:
    """Bytes of the largest tensor that a loop writes."""
    return max((t.num_bytes(traced.batch) for loop in segment.loops for t in loop.writes), default=1)


class BarrierSearch:
    """Tile plans of a step with barriers, as `TileSearch` gives those of others.

    Attributes:
        left: What cannot be tiled.
    """

    def __init__(self, traced: Traced, barriers: Barriers) -> None:
        self._traced = traced
        self._barriers = barriers
        self.left = barriers.left
        self._plans: dict[int, SegmentPlan] = {}
        self._exact: dict[int, Candidate] = {}
        self._scratch: dict[Halo, Scratch] = {halo: {} for halo in Halo}

    def cheapest(self, limit: int) -> Candidate | None:
        """A plan whose step stays below `limit` bytes, with as little work as is found.

        Whatever is made again in the backward phase costs about the same, so that the first set of checkpoints that
        fits is taken; then the largest turns that fit with it, with the rows that they share made again or handed on.
        """
        found: Candidate | None = None
        for number in range(len(self._barriers.ways)):
            smallest = self._candidate(number, limit)
            if smallest.peak.peak_bytes > limit:
                continue
            best = self._coarser(smallest, limit, Halo.RECOMPUTE)
            if any(max(phase.grid.spatial) > 1 for phase in best.plans[0].phases):
                best = min(best, self._coarser(smallest, limit, Halo.CARRY), key=_time_ratio)
            if found is not None and best.time_ratio >= found.time_ratio:
                break
            found = best
        return found

    def _coarser(self, found: Candidate, limit: int, halo: Halo) -> Candidate:
        """The plan with turns as large as there is room for, loop by loop: small ones are for where memory is short."""
        (plan,) = found.plans
        loops, turns = plan.segment.loops, _Turns(self._traced, plan.segment, self._scratch[halo], halo)
        scratch = (phase_scratch(phase, self._traced.batch) for phase in plan.phases)
        beside = [taken - own for taken, own in zip(_taken(found), scratch, strict=True)]
        rooms = {id(loop): ROOM * (limit - taken) for loop, taken in zip(loops, beside, strict=True)}
        for _ in range(MAX_ROUNDS):
            coarser = turns.plan(lambda loop, _: rooms[id(loop)])
            candidate = Candidate([coarser], *predict(self._traced, [coarser], limit))
            if candidate.peak.peak_bytes <= limit:
                return candidate
            over = [loop for loop, taken in zip(loops, _taken(candidate), strict=True) if taken > limit]
            for loop in over or loops:
                rooms[id(loop)] *= LESS_ROOM
        return found

    @functools.cached_property
    def smallest(self) -> Candidate:
        """The plan with the lowest peak that is found."""
        numbers = range(len(self._barriers.ways))
        plain = Candidate([], *predict(self._traced, []))
        return min([plain, *(self._candidate(n) for n in numbers)], key=_peak_bytes)

    def proposed(self, target: int) -> Candidate | None:
        """What is proposed for a target, whether its step meets it or not."""
        return self.cheapest(target) or self.smallest

    def _candidate(self, number: int, limit: int | None = None) -> Candidate:
        """One of the ways, in small turns; whether a peak above `limit` is the worst is not found out."""
        if number not in self._exact:
            if number not in self._plans:
                segment = self._barriers.segment("segment1", self._barriers.ways[number])
                size = FINEST * largest(self._traced, segment)
                self._plans[number] = fitted(self._traced, segment, size, known=self._scratch[Halo.RECOMPUTE])
            plan = self._plans[number]
            candidate = Candidate([plan], *predict(self._traced, [plan], limit))
            if limit is not None and candidate.peak.peak_bytes > limit:
                return candidate
            self._exact[number] = candidate
        return self._exact[number]


def _taken(candidate: Candidate) -> list[int]:
    """Bytes that are taken while each of the loops runs."""
    (plan,) = candidate.plans
    prefixes = [f"sft/{plan.segment.name}/{phase.name}/" for phase in plan.phases]
    return [max(size for name, size in candidate.peak.timeline if name.startswith(prefix)) for prefix in prefixes]


def _peak_bytes(candidate: Candidate) -> int:
    return candidate.peak.peak_bytes


def _time_ratio(candidate: Candidate) -> float:
    return candidate.time_ratio
