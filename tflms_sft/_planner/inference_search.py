"""Tiles for a step without gradients, within a budget.

In training what waits for the backward phase adds up (`chain_search.py`). Here nothing waits but what later operations
read, such as the skips of a U-Net, so each part of the network has to fit by itself: what goes in, what comes out, what
is alive across it, and one turn between. A part may begin and end anywhere; one that fits on whole images stays as it
is.

The plans are those for a ladder of targets that is the same for all budgets: for each the fastest way through the
network of which every part meets it, a shortest path. A budget takes the one for the highest target with which the
memory model of the whole step agrees. What a smaller budget accepts a larger one reaches no later, so it gets no
slower plan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from rewriters.analysis.autodiff_roles import reads_shape_only
from rewriters.device import properties
from rewriters.device.kernel_scratch import op_scratch
from rewriters.device.peak_memory import most_alive
from rewriters.emission.tile_pass import SegmentPlan, plan_segment, planner_for
from rewriters.errors import NotTileableError
from rewriters.estimates.loop_memory import iteration_peak_bytes
from rewriters.ir.graph import Tensor
from rewriters.tiling.ft_segments import TileableComponent, find_components, try_segment
from rewriters.tiling.segment import Segment
from rewriters.tiling.tile_planner import Grid, Halo
from tflms_sft._planner.target_ladder import RUNG, rung
from tflms_sft._planner.tile_grids import auto_grids, fastest, thinned
from tflms_sft._planner.traced_step import Candidate, TracedStep, predict

MOST_CUTS = 6
"""Places in a component where a segment may begin or end."""

MORE = 2.0
"""Tiles of a grid that is tried, over those of the one before."""

OVERRATED = 1.2
"""Most that the parts of a plan may need by their own sums, over what the memory model says of the step."""

MOST_SMALLEST = 6
"""Plans among which the smallest is looked for, those for the lowest targets."""


@dataclasses.dataclass(frozen=True)
class ForwardBlockChoice:
    """What to do with a part of a component.

    Attributes:
        first: First position.
        last: One past the last position.
        grid: Tiles, or `None` to leave it as it is.
        halo: Where tiles have the rows from that they share.
        needs: Bytes alive while it runs, what is alive across it included.
        seconds: Its time.
        least: Time that neither it nor more tiles fall below.
    """

    first: int
    last: int
    grid: Grid | None
    halo: Halo
    needs: int
    seconds: float
    least: float


class ForwardSearch:
    """Tile plans of a step without gradients.

    Attributes:
        left: What cannot be tiled.
    """

    def __init__(self, traced: TracedStep) -> None:
        self._traced = traced
        components, self.left = find_components(traced.analysis)
        alive = _Alive(traced)
        self._lines = [ComponentPath(traced, component, alive) for component in components]
        self._known: dict[tuple[tuple[int, ForwardBlockChoice], ...], Candidate] = {}

    def cheapest(self, limit: int) -> Candidate | None:
        """The fastest plan found whose step stays below `limit` bytes."""
        for candidate in self._down_from(rung(int(OVERRATED * limit)), limit):
            if candidate.peak.peak_bytes <= limit:
                return candidate
        return None

    def proposed(self, target: int) -> Candidate | None:
        """What is proposed for a target, whether its step meets it or not."""
        return next(self._down_from(rung(target)), None)

    @functools.cached_property
    def smallest(self) -> Candidate:
        """The plan with the lowest peak that is found, one that a budget of as much finds."""
        peaks: dict[int, Candidate] = {self._traced.plain.peak.peak_bytes: self._traced.plain}
        for step in range(self._lowest, self._highest):
            path = self._path(step)
            if path is not None:
                candidate = self._candidate(path)
                if RUNG**step <= OVERRATED * candidate.peak.peak_bytes:
                    peaks.setdefault(candidate.peak.peak_bytes, candidate)
            if len(peaks) > MOST_SMALLEST:
                break
        return peaks[min(peaks)]

    @property
    def _highest(self) -> int:
        """A target that the step meets as it is."""
        return rung(2 * self._traced.plain.peak.peak_bytes)

    @functools.cached_property
    def _lowest(self) -> int:
        """The lowest target that all parts can meet."""
        low, high = 0, self._highest
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._path(middle) is not None else (middle, high)
        return high

    def _down_from(self, step: int, limit: int | None = None) -> Iterator[Candidate]:
        """Plans for lower and lower targets, each once."""
        seen: set[tuple[tuple[int, ForwardBlockChoice], ...]] = set()
        for target in range(min(step, self._highest), 0, -1):
            path = self._path(target)
            if path is None:
                return
            if path not in seen:
                seen.add(path)
                yield self._candidate(path, limit)

    def _path(self, step: int) -> tuple[tuple[int, ForwardBlockChoice], ...] | None:
        """For a target, what is tiled, each with the number of its component."""
        found: list[tuple[int, ForwardBlockChoice]] = []
        for number, line in enumerate(self._lines):
            path = line.fastest(int(RUNG**step))
            if path is None:
                return None
            found += [(number, choice) for choice in path if choice.grid is not None]
        return tuple(found)

    def _candidate(self, path: tuple[tuple[int, ForwardBlockChoice], ...], limit: int | None = None) -> Candidate:
        if not path:
            return self._traced.plain
        if path not in self._known:
            plans = [
                self._lines[number].planned(choice, f"segment{position}")
                for position, (number, choice) in enumerate(path, 1)
            ]
            candidate = Candidate(plans, *predict(self._traced, plans, limit))
            if limit is not None and candidate.peak.peak_bytes > limit:
                return candidate  # Of its states the first that is over.
            self._known[path] = candidate
        return self._known[path]


class _Alive:
    """Bytes that are alive across a part of a step."""

    def __init__(self, traced: TracedStep) -> None:
        analysis, batch = traced.analysis, traced.batch
        self._analysis = analysis
        self._batch = batch
        self.held = traced.fixed_bytes + sum(t.num_bytes(batch) for t in analysis.graph.inputs)
        end = len(analysis.order)
        last = {tensor: end for tensor in analysis.graph.outputs}
        for node in reversed(analysis.order):  # Who reads what is passed on reads the original.
            for tensor in () if reads_shape_only(node) else node.inputs:
                until = last.get(node.out(), -1) if properties.forwards_input_buffer(node) else -1
                last[tensor] = max(last.get(tensor, -1), until, analysis.position[node])
        self._last = last
        made = [
            t
            for t in last
            if properties.allocates(t.node) and not properties.forwards_input_buffer(t.node) and self._counts(t)
        ]
        self._tensors = made
        self._made_at = np.array([analysis.position[t.node] for t in made])
        self._read_until = np.array([last[t] for t in made])
        self._sizes = np.array([t.num_bytes(batch) for t in made], dtype=np.int64)

    def _counts(self, tensor: Tensor) -> bool:
        return tensor.node in self._analysis.data

    def across(self, segment: Segment) -> int:
        """Bytes of what is made before a segment and read after it, its entries aside."""
        first, last = (self._analysis.position[segment.forward[i]] for i in (0, -1))
        index = np.flatnonzero((self._made_at < first) & (self._read_until > last))
        own = {*segment.entries, *segment.forward}
        return sum(int(self._sizes[i]) for i in index if not {self._tensors[i], self._tensors[i].node} & own)

    def entries(self, segment: Segment) -> list[Tensor]:
        """Entries that take memory; arguments are held anyway."""
        return [t for t in segment.entries if properties.allocates(t.node)]

    def read_later(self, segment: Segment) -> list[Tensor]:
        """Entries that operations after the segment read as well."""
        end = self._analysis.position[segment.forward[-1]]
        return [t for t in self.entries(segment) if self._last.get(t, -1) > end]


class _Part:
    """A part of a component, as it is or in any number of tiles."""

    def __init__(self, traced: TracedStep, segment: Segment, positions: range, alive: _Alive) -> None:
        self._traced = traced
        self._segment = segment
        self._positions = positions
        batch, entries = traced.batch, alive.entries(segment)
        self._beside = alive.held + alive.across(segment)
        self._ends = sum(t.num_bytes(batch) for t in (*entries, *segment.exits))
        order = [*dict.fromkeys(t.node for t in entries), *segment.forward]
        scratch = {node: (op_scratch(node, batch),) for node in segment.forward}
        most = most_alive(order, batch, [*segment.exits, *alive.read_later(segment)], scratch)
        seconds, least = (costs.step(segment.forward) for costs in (traced.costs, traced.costs.lower_bound))
        needs = self._beside + most
        self.plain = ForwardBlockChoice(positions.start, positions.stop, None, Halo.RECOMPUTE, needs, seconds, least)
        self._grids = {
            halo: thinned(auto_grids(traced.analysis, segment, batch, halo is Halo.CARRY), MORE) for halo in Halo
        }
        self._planners = {halo: planner_for(traced.analysis, segment, halo) for halo in Halo}
        self._tiled: dict[tuple[Halo, Grid], ForwardBlockChoice | None] = {}

    def fastest(self, target: int) -> ForwardBlockChoice | None:
        """Of what meets a target the fastest: whole images, the fewest tiles, or more where those are faster."""
        whole = [self.plain] if self.plain.needs <= target else []
        if (whole and self.plain.least >= self.plain.seconds) or self._beside + self._ends > target:
            return self.plain if whole else None
        options = (self._fewest(halo, target) for halo in Halo)
        return min([*whole, *filter(None, options)], key=lambda choice: choice.seconds, default=None)

    def _fewest(self, halo: Halo, target: int) -> ForwardBlockChoice | None:
        grids, low, high = self._grids[halo], -1, len(self._grids[halo])
        while high - low > 1:  # More tiles need less.
            middle = (low + high) // 2
            choice = self._choice(halo, grids[middle])
            if choice is not None and choice.needs <= target:
                high = middle
            else:
                low = middle
        if high == len(grids):
            return None
        return self._choice(halo, fastest(grids, grids[high], functools.partial(self._seconds, halo)))

    def _seconds(self, halo: Halo, grid: Grid) -> tuple[float, float]:
        choice = self._choice(halo, grid)
        return (math.inf, 0.0) if choice is None else (choice.seconds, choice.least)

    def _choice(self, halo: Halo, grid: Grid) -> ForwardBlockChoice | None:
        if (halo, grid) not in self._tiled:
            self._tiled[halo, grid] = None
            with contextlib.suppress(NotTileableError):
                (tile_loop,) = self._planners[halo].tile_loops(grid, grid)
                needs = self._beside + self._ends + iteration_peak_bytes(tile_loop, self._traced.batch)
                seconds, least = (
                    costs.tile_loop(tile_loop) for costs in (self._traced.costs, self._traced.costs.lower_bound)
                )
                first, last = self._positions.start, self._positions.stop
                self._tiled[halo, grid] = ForwardBlockChoice(first, last, grid, halo, needs, seconds, least)
        return self._tiled[halo, grid]


class ComponentPath:
    """A component as a line of parts."""

    def __init__(self, traced: TracedStep, component: TileableComponent, alive: _Alive) -> None:
        self._traced = traced
        self._component = component
        self._alive = alive
        self._bounds = _bounds(traced, component)
        self._parts: dict[tuple[int, int], _Part | None] = {}
        own = [traced.costs.lower_bound.op(node) for node in component.nodes]
        self._after = [sum(own[first:]) for first in range(len(own) + 1)]

    def fastest(self, target: int) -> list[ForwardBlockChoice] | None:
        """The fastest choices for all of it that meet a target.

        Ways through it grow in the order of what they take at least (A*, as in `chain_search.py`), so that few parts
        are planned in tiles.
        """
        order = itertools.count()
        queue: list[tuple[float, int, float, list[ForwardBlockChoice], int | None]] = [
            (0.0, next(order), 0.0, [], None)
        ]
        reached: set[int] = set()
        while queue:
            _, _, seconds, path, last = heapq.heappop(queue)
            at = path[-1].last if path else 0
            if last is None:
                if at == self._bounds[-1]:
                    return path
                if at not in reached:
                    reached.add(at)
                    for last in self._bounds[self._bounds.index(at) + 1 :]:
                        if self._part(at, last) is not None:
                            heapq.heappush(queue, (seconds + self._seconds(at), next(order), seconds, path, last))
                continue
            choice = self._part(at, last).fastest(target)  # type: ignore[union-attr]
            if choice is not None:
                seconds += choice.seconds
                least = seconds + self._seconds(last)
                heapq.heappush(queue, (least, next(order), seconds, [*path, choice], None))
        return None

    def _seconds(self, first: int) -> float:
        """Of what is left from a position, at the least."""
        return self._after[first]

    def _part(self, first: int, last: int) -> _Part | None:
        if (first, last) not in self._parts:
            self._parts[first, last] = None
            with contextlib.suppress(NotTileableError):
                segment = self._segment(first, last, "candidate")
                self._parts[first, last] = _Part(self._traced, segment, range(first, last), self._alive)
        return self._parts[first, last]

    def _segment(self, first: int, last: int, name: str) -> Segment:
        return try_segment(self._traced.analysis, self._component, range(first, last), set(), name)

    def planned(self, choice: ForwardBlockChoice, name: str) -> SegmentPlan:
        """The loop of what is tiled."""
        assert choice.grid is not None
        segment = self._segment(choice.first, choice.last, name)
        return plan_segment(self._traced.analysis, segment, choice.grid, halo=choice.halo)


def _bounds(traced: TracedStep, component: TileableComponent) -> list[int]:
    """Where parts may begin and end: `MOST_CUTS` places, with the ends.

    First those that fewer bytes cross than the places on both sides, such as pools; then, of each stretch of the
    component that takes about as long, the place that fewest cross.
    """
    nodes = component.nodes
    crossing = _crossing(traced, component)
    places = [p for p in range(len(nodes) - 1) if not _ends_in_place(traced, component, p)]
    steps = [list(group)[-1] for _, group in itertools.groupby(places, key=crossing.__getitem__)]
    around = [math.inf, *(crossing[p] for p in steps), math.inf]
    lows = [p for i, p in enumerate(steps) if around[i] > crossing[p] < around[i + 2]]
    seconds = np.cumsum([traced.costs.op(node) for node in nodes])
    stretches: dict[int, int] = {}
    for place in reversed(places):
        stretch = int(seconds[place] * MOST_CUTS / (seconds[-1] * 1.001))
        stretches[stretch] = min(stretches.get(stretch, place), place, key=crossing.__getitem__)
    ranked = [*sorted(lows, key=crossing.__getitem__), *sorted(stretches.values(), key=crossing.__getitem__)]
    return [0, *sorted(place + 1 for place in list(dict.fromkeys(ranked))[:MOST_CUTS]), len(nodes)]


def _crossing(traced: TracedStep, component: TileableComponent) -> Sequence[int]:
    """For each position the bytes that the operations up to it make for later ones."""
    analysis, batch = traced.analysis, traced.batch
    position = {node: number for number, node in enumerate(component.nodes)}
    change = [0] * (len(position) + 1)
    for node, number in position.items():
        for tensor in (node.out(index) for index in range(len(node.outputs))):
            last = max((position.get(r, -1) for r, _ in analysis.consumers.get(tensor, ())), default=-1)
            if last > number:
                change[number] += tensor.num_bytes(batch)
                change[last] -= tensor.num_bytes(batch)
    return list(itertools.accumulate(change[:-1]))


def _ends_in_place(traced: TracedStep, component: TileableComponent, position: int) -> bool:
    """Whether the next operation would write over what an operation makes, such as an activation after its bias."""
    node = component.nodes[position]
    readers = {reader for reader, _ in traced.analysis.consumers.get(node.out(), ())}
    return len(readers) == 1 and all(map(properties.may_run_in_place, readers))
