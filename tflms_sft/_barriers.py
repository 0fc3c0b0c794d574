"""Tile plans for steps with barriers: which tensors wait for the backward phase, and how many tiles each loop gets."""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable

from rewriters.barriers import find_roles
from rewriters.ft import LeftAlone
from rewriters.gather import Gatherer, barrier_segment, has_barriers
from rewriters.graph import Node, Tensor
from rewriters.segments import Segment
from rewriters.sft import SegmentPlan
from rewriters.stored import Loop, Storage
from rewriters.tiles import Grid
from rewriters.turns import phase_scratch
from tflms_sft._compile import Candidate, Traced, predict
from tflms_sft._grids import fewest, loop_grids

TURNS = (1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125)
"""Bytes of a turn that are tried, over those of the largest tensor that a loop writes."""


Scratch = dict[tuple[object, ...], int]
"""Bytes that a turn of a loop takes."""


class Barriers:
    """All operations of a step that run on tiles, as one segment with barriers.

    Attributes:
        left: Forward operations on images that do not.
        checkpoints: Sets of tensors that may wait for the backward phase, the first one all.
    """

    def __init__(self, traced: Traced, allowed: Container[Node] | None = None, stored: Iterable[Tensor] = ()) -> None:
        self._traced = traced
        self._roles = find_roles(traced.analysis, allowed)
        self.left = [LeftAlone(node.name, f"{node.op}: {why}") for node, why in self._roles.refused.items()]
        self._storage = Storage(traced.analysis, self._roles, traced.batch, frozenset(stored))
        self.checkpoints = self._storage.checkpoints()

    @property
    def present(self) -> bool:
        """Whether there is a barrier at all, and a backward phase."""
        return has_barriers(self._traced.analysis, self._roles) and any(
            node in self._traced.analysis.backward for node in (*self._roles.tiled, *self._roles.sums)
        )

    def segment(self, name: str, kept: set[Tensor]) -> Segment:
        """The segment, with checkpoints."""
        return barrier_segment(self._traced.analysis, name, self._roles, self._storage, kept)

    def stores(self, tensor: Tensor) -> bool:
        """Whether a tensor is whole at some time."""
        return tensor in self._storage.stored

    @property
    def exits(self) -> set[Tensor]:
        """Tensors that operations outside read."""
        return self._storage.exits


def fitted(traced: Traced, segment: Segment, limit: float, known: Scratch | None = None) -> SegmentPlan:
    """Loops with the fewest tiles of which a turn takes `limit` bytes, beyond what one row takes.

    Args:
        traced: The step.
        segment: With barriers.
        limit: Bytes.
        known: What is known of turns; it is added to.
    """
    gatherer = Gatherer(traced.analysis, segment)
    scratch = {} if known is None else known

    def turn(loop: Loop, grid: Grid) -> int:
        key = (loop.level, tuple(loop.body), tuple(loop.writes), grid)
        if key not in scratch:
            scratch[key] = phase_scratch(gatherer.phase(loop, grid), traced.batch)
        return scratch[key]

    def grid_of(loop: Loop) -> Grid:
        grids = loop_grids(traced.analysis, gatherer.split(loop), traced.batch)
        # Filters in a kernel's own layout, say, are there with any number of tiles.
        most = limit + turn(loop, grids[-1])
        return fewest(grids, lambda grid: turn(loop, grid) <= most) or grids[-1]

    return SegmentPlan(segment, gatherer.phases(grid_of))


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
        self._plans: dict[tuple[int, float], SegmentPlan] = {}
        self._exact: dict[tuple[int, float], Candidate] = {}
        self._scratch: Scratch = {}

    def cheapest(self, limit: int) -> Candidate | None:
        """A plan whose step stays below `limit` bytes, with as little arithmetic as is found.

        Whatever is made again in the backward phase costs about the same, so that the first set of checkpoints that
        fits is taken; then the largest turns that fit with it.
        """
        found: Candidate | None = None
        for number in range(len(self._barriers.checkpoints)):
            smallest = self._candidate(number, TURNS[-1], limit)
            if smallest.peak.peak_bytes > limit:
                continue
            best = self._coarsest(number, limit) or smallest
            if found is not None and best.time_ratio >= found.time_ratio:
                break
            found = best
        return found

    def _coarsest(self, number: int, limit: int) -> Candidate | None:
        for part in TURNS[:-1]:
            candidate = self._candidate(number, part, limit)
            if candidate.peak.peak_bytes <= limit:
                return candidate
        return None

    @functools.cached_property
    def smallest(self) -> Candidate:
        """The plan with the lowest peak that is found."""
        numbers = range(len(self._barriers.checkpoints))
        plain = Candidate([], *predict(self._traced, []))
        return min([plain, *(self._candidate(n, TURNS[-1]) for n in numbers)], key=_peak_bytes)

    def proposed(self, target: int) -> Candidate | None:
        """What is proposed for a target, whether its step meets it or not."""
        return self.cheapest(target) or self.smallest

    def _candidate(self, number: int, part: float, limit: int | None = None) -> Candidate:
        """Whether a peak above `limit` is the worst is not found out, nor remembered."""
        key = (number, part)
        if key not in self._exact:
            segment = self._barriers.segment("segment1", self._barriers.checkpoints[number])
            size = part * largest(self._traced, segment)
            if key not in self._plans:
                self._plans[key] = fitted(self._traced, segment, size, self._scratch)
            plan = self._plans[key]
            candidate = Candidate([plan], *predict(self._traced, [plan], limit))
            if limit is not None and candidate.peak.peak_bytes > limit:
                return candidate
            self._exact[key] = candidate
        return self._exact[key]


def _peak_bytes(candidate: Candidate) -> int:
    return candidate.peak.peak_bytes
