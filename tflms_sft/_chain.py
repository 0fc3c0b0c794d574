"""A component as a chain of blocks, and the cheapest way through it within a budget.

Between two cuts the blocks either stay as they are (their activations wait for the backward pass) or
lie in a segment with some number of tiles (its exit waits, and every turn recomputes). Along the chain,
bytes that wait add up. The cheapest way is a shortest path over (bytes waiting, time) pairs.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import heapq
import itertools
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

import numpy as np

from rewriters.errors import NotTileableError
from rewriters.ft import Component, try_segment
from rewriters.graph import Node, Tensor
from rewriters.memory import op_scratch, together
from rewriters.segments import Segment
from rewriters.sft import planner_for
from rewriters.tiles import Grid, Halo, Phase
from rewriters.turns import phase_scratch
from tflms_sft._blocks import backward_positions
from tflms_sft._compile import Traced
from tflms_sft._grids import auto_grids, thinned

MAX_CUTS = 8
"""Most places where a segment may end; in a longer network they are spread over what it keeps."""

MORE = 1.4
"""Tiles of a grid that is tried, over those of the one before."""

FORWARD = (4, 2, 1)
"""Backward tiles along each axis over forward ones that are tried: a forward turn keeps less."""

MOST_STORED = 8
"""Inner tensors of a segment that may be stored."""

LEAST_SAVED = 0.005
"""Part of a step's work below which a tensor is not worth storing."""


@dataclasses.dataclass(frozen=True)
class Storable:
    """An inner tensor of a segment that is worth storing.

    Attributes:
        tensor: The tensor.
        spared: Operations that are not to be run again once it is stored, too, after those that come before it.
    """

    tensor: Tensor
    spared: frozenset[Node]


@dataclasses.dataclass(frozen=True)
class Choice:
    """What to do with the blocks from one cut to another.

    Attributes:
        first: First position in the component.
        last: One past the last position.
        grid: Tiles, or `None` to leave the blocks as they are.
        forward: Tiles of the forward loop, if they are others.
        waits: Bytes that it leaves waiting for the backward pass.
        needs: Bytes that it needs on top while it runs.
        cost: Seconds (`rewriters/cost.py`).
        halo: Where tiles have the rows from that they share.
        stored: Inner tensors that wait, too, instead of being recomputed.
    """

    first: int
    last: int
    grid: Grid | None
    waits: int
    needs: int
    cost: float
    halo: Halo = Halo.RECOMPUTE
    stored: frozenset[Tensor] = frozenset()
    forward: Grid | None = None


@dataclasses.dataclass(frozen=True)
class Path:
    """Choices from the start of a component up to a cut."""

    waits: int
    cost: float
    choices: tuple[Choice, ...]

    def followed_by(self, choice: Choice) -> Path:
        """The path up to the end of what is chosen."""
        return Path(self.waits + choice.waits, self.cost + choice.cost, (*self.choices, choice))


class Chain:
    """One component as a chain of blocks."""

    def __init__(self, traced: Traced, component: Component) -> None:
        self.traced = traced
        self.component = component
        self.bounds = self._bounds()
        self._tiled: dict[tuple[int, int], list[Tiles]] = {}
        self._plain: dict[tuple[int, int], Choice] = {}
        self._positions: dict[Node, float] | None = None

    def _bounds(self) -> list[int]:
        """Where segments may begin and end: `MAX_CUTS` of the component's cuts.

        First those that keep less than the cuts on both sides, such as pools; then, of each stretch of
        the network that keeps about as much for the backward pass, the one that keeps least.
        """
        analysis, batch, component = self.traced.analysis, self.traced.batch, self.component
        size = len(component.nodes)
        inner = [cut for cut in component.cuts if cut < size - 1]
        # What nobody waits for, such as a convolution before its bias, would wait as the entry of a segment.
        inner = [cut for cut in inner if self._saved(component.cut_tensor(analysis, cut).node)] or inner
        kept = {cut: component.cut_tensor(analysis, cut).num_bytes(batch) for cut in inner}
        # Of neighbours that keep the same amount the first and the last are enough: the last leaves more to recompute,
        # the first less for rows to hand on.
        inner = [
            cut
            for i, cut in enumerate(inner)
            if 0 in (i, i + 1 - len(inner)) or not kept[inner[i - 1]] == kept[cut] == kept[inner[i + 1]]
        ]
        around = [np.inf, *(kept[cut] for cut in inner), np.inf]
        lows = [c for i, c in enumerate(inner) if around[i] >= kept[c] <= around[i + 2]]
        own = np.array([sum(t.num_bytes(batch) for t in self._saved(node)) for node in component.nodes])
        before = np.cumsum(own) - own
        stretches: dict[int, int] = {}
        for cut in inner:
            stretch = int(before[cut] * MAX_CUTS // (before[-1] + 1))
            stretches[stretch] = min(stretches.get(stretch, cut), cut, key=kept.__getitem__)
        ranked = [*sorted(lows, key=kept.__getitem__), *sorted(stretches.values(), key=kept.__getitem__)]
        return [0, *(cut + 1 for cut in sorted(list(dict.fromkeys(ranked))[:MAX_CUTS])), size]

    def _saved(self, node: Node) -> list[Tensor]:
        """Outputs of a forward op that wait for the backward pass."""
        analysis = self.traced.analysis
        outputs = [node.out(index) for index in range(len(node.outputs))]
        return [t for t in outputs if any(r in analysis.backward for r, _ in analysis.readers.get(t, ()))]

    def cheapest(self, budget: int) -> Path | None:
        """The cheapest path of which every block fits.

        Paths grow in the order of what they cost at least (A*, P. E. Hart, N. J. Nilsson and B. Raphael, "A Formal
        Basis for the Heuristic Determination of Minimum Cost Paths", 1968), so that few ways to tile are planned: the
        rest of a path costs no less than its blocks as they are, and a tiling no less than that in one tile. Several
        tiles may leave out rows that no result needs, which convolutions without padding and with strides have: of
        two paths that differ by no more than those the dearer may be returned.
        """
        end = self.bounds[-1]
        least_waiting: dict[int, int] = {}
        order = itertools.count()
        queue: list[tuple[float, int, Path, int, int | None]] = [(0.0, next(order), Path(0, 0.0, ()), 0, None)]
        while queue:
            _, _, path, first, last = heapq.heappop(queue)
            if last is None:
                if first == end:
                    return path
                if path.waits >= least_waiting.get(first, path.waits + 1):
                    continue
                least_waiting[first] = path.waits
                found = list(self._extended(path, first, budget))
            else:
                tilings = (tiles.fitting(budget - path.waits) for tiles in self._tilings(first, last))
                found = [(path.followed_by(choice), last, None) for choice in itertools.chain(*tilings)]
            for new, at, following in found:
                least = self._least(new, at, following, budget)
                heapq.heappush(queue, (least, next(order), new, at, following))
        return None

    def _extended(self, path: Path, first: int, budget: int) -> Iterator[tuple[Path, int, int | None]]:
        """Each with where it is and, if the blocks from there are still to be tiled, where those end."""
        for last in self.bounds[self.bounds.index(first) + 1 :]:
            plain = self._plain_choice(first, last)
            if path.waits + plain.waits + plain.needs <= budget:
                yield path.followed_by(plain), last, None
            if self._tilings(first, last):
                yield path, first, last

    def _least(self, path: Path, at: int, last: int | None, budget: int) -> float:
        """Least cost of all paths that go on from one; `last` as for `_extended`."""
        cost = path.cost
        if last is not None:
            cost += self._tilings(at, last)[0].least_cost(budget - path.waits)
            at = last
        return cost if at == self.bounds[-1] else cost + self._plain_choice(at, self.bounds[-1]).cost

    def lowest(self) -> int:
        """Bytes without which no choice does."""
        low, high = 1.0, 4.0 * max(self._plain_choice(self.bounds[0], self.bounds[-1]).waits, 1)
        while high > 1.01 * low:
            middle = math.sqrt(low * high)
            if self.cheapest(int(middle)) is None:
                low = middle
            else:
                high = middle
        return int(high)

    def _plain_choice(self, first: int, last: int) -> Choice:
        if (first, last) not in self._plain:
            analysis, batch = self.traced.analysis, self.traced.batch
            nodes = self.component.nodes[first:last]
            backward = self._backward(first, last)
            waits = sum(tensor.num_bytes(batch) for node in nodes for tensor in self._saved(node))
            made = [node.out(index) for node in (*nodes, *backward) for index in range(len(node.outputs))]
            # What comes back from behind the blocks is there, too.
            made += [tensor for node in backward for tensor in node.inputs if tensor.node in analysis.backward]
            pairs = together({node: op_scratch(node, batch) for node in backward}, backward)
            scratch = max((*pairs.values(), *(op_scratch(node, batch) for node in nodes)))
            # Two gradients at once, and both kernels of a convolution.
            needs = 2 * max(tensor.num_bytes(batch) for tensor in made) + scratch
            costs = self.traced.costs.step((*nodes, *backward))
            self._plain[first, last] = Choice(first, last, None, waits, needs, costs)
        return self._plain[first, last]

    def _backward(self, first: int, last: int) -> list[Node]:
        """Backward ops of blocks."""
        if self._positions is None:
            self._positions = backward_positions(self.traced.analysis, self.component)
        return [node for node, position in self._positions.items() if first <= position < last]

    def _tilings(self, first: int, last: int) -> list[Tiles]:
        """Ways to tile the blocks; none if they are no segment."""
        if (first, last) not in self._tiled:
            found: list[Tiles] = []
            with contextlib.suppress(NotTileableError):
                segment = try_segment(self.traced.analysis, self.component, range(first, last), set(), "candidate")
                stored = _worth_storing(self.traced, segment)
                found = [Tiles(self.traced, segment, (first, last), halo, stored) for halo in Halo]
            self._tiled[first, last] = found
        return self._tiled[first, last]


class Tiles:
    """A segment in any number of tiles, with any of its inner tensors stored.

    Only the numbers of tiles that are asked for are planned: more tiles need less, and cost more.
    """

    def __init__(
        self,
        traced: Traced,
        segment: Segment,
        blocks: tuple[int, int],
        halo: Halo,
        stored: Sequence[Storable],
    ) -> None:
        self._traced = traced
        self._segment = segment
        self._blocks = blocks
        self._halo = halo
        self._planner = planner_for(traced.analysis, segment, halo)
        self._grids = thinned(auto_grids(traced.analysis, segment, traced.batch, halo is Halo.CARRY), MORE)
        self._exits = sum(tensor.num_bytes(traced.batch) for tensor in segment.exits)
        self._choices: dict[Grid, Choice] = {}
        self._savings: dict[Grid, list[float]] = {}
        self._stored = stored

    def fitting(self, budget: int) -> Iterator[Choice]:
        """The fewest tiles that fit; and the fewest with the tensors stored that save most for their size."""
        grid = self._fewest(budget)
        if grid is None:
            return
        yield self._choice(grid)
        for number, storable in enumerate(self._stored, 1):
            budget -= storable.tensor.num_bytes(self._traced.batch)
            grid = self._fewest(budget)
            if grid is None:
                return
            yield self._storing(self._choice(grid), number)

    def least_cost(self, budget: int) -> float:
        """What any number of tiles costs at least: one tile, with as much stored as fits."""
        choice, batch = self._choice(self._grids[0]), self._traced.batch
        sizes = itertools.accumulate(storable.tensor.num_bytes(batch) for storable in self._stored)
        fitting = sum(size <= budget - choice.waits for size in sizes)
        return self._storing(choice, fitting).cost

    def _storing(self, choice: Choice, number: int) -> Choice:
        """A choice with the first so many tensors stored."""
        assert choice.grid is not None
        stored = self._stored[:number]
        return dataclasses.replace(
            choice,
            waits=choice.waits + sum(storable.tensor.num_bytes(self._traced.batch) for storable in stored),
            cost=choice.cost - sum(self._savings[choice.grid][:number]),
            stored=frozenset(storable.tensor for storable in stored),
        )

    def _fewest(self, budget: int) -> Grid | None:
        """The fewest tiles that fit.

        More tiles need less, but more rows save more borders: what both come to falls first and rises then.
        """

        def may_fit(grid: Grid) -> bool:
            return self._choice(grid).needs + self._exits <= budget

        before = math.inf
        for grid in self._grids[bisect.bisect_left(self._grids, True, key=may_fit) :]:
            choice = self._choice(grid)
            if choice.waits + choice.needs <= budget:
                return grid
            if choice.waits + choice.needs >= before:
                return None
            before = choice.waits + choice.needs
        return None

    def _choice(self, grid: Grid) -> Choice:
        if grid not in self._choices:
            batch = self._traced.batch
            forward, phases = self._phases(grid)  # Not kept: they are large, and a search plans hundreds.
            waits = self._exits + sum(save.saved.num_bytes(batch) for phase in phases for save in phase.saves)
            grads = (*self._segment.grad_entries, *self._segment.grad_exits, *self._segment.reductions)
            needs = phase_scratch(phases[-1], batch) + sum(t.num_bytes(batch) for t in grads)
            cost = sum(map(self._traced.costs.phase, phases))
            self._choices[grid] = Choice(*self._blocks, grid, waits, needs, cost, self._halo, forward=forward)
            self._savings[grid] = [self._saving(phases[-1], storable) for storable in self._stored]
        return self._choices[grid]

    def _saving(self, backward: Phase, storable: Storable) -> float:
        """Work that a loop does not do once a tensor is stored, too, after those that come before it."""
        spared = storable.spared.intersection(backward.body)
        return sum(self._traced.costs.turns(backward, node) for node in spared)

    def _phases(self, grid: Grid) -> tuple[Grid, list[Phase]]:
        """Loops with as few forward tiles, of some numbers, as need no more memory than the backward ones.

        Each tile has halos and reads the weights once more.
        """
        batch = self._traced.batch
        for part in FORWARD:
            forward = Grid(grid.batch, tuple(-(-count // part) for count in grid.spatial))
            phases = self._planner.phases(forward, grid)
            if forward == grid or len(phases) == 1:
                break
            if phase_scratch(phases[0], batch) <= phase_scratch(phases[-1], batch):
                break
        return forward, phases


def _worth_storing(traced: Traced, segment: Segment) -> list[Storable]:
    """Inner tensors to store, one after the other: those first that save most work for their size, in one tile."""
    analysis, batch = traced.analysis, traced.batch
    grid = auto_grids(analysis, segment, batch)[0]
    backward = planner_for(analysis, segment, Halo.RECOMPUTE).phases(grid, grid)[-1]
    cost = {n: traced.costs.turns(backward, n) for n in backward.body if n not in analysis.backward}
    wanted = [t for n in backward.body if n in analysis.backward for t in n.inputs if t.node in cost]
    available, left = set(segment.available), _recomputed(wanted, segment.available, cost)
    found: list[Storable] = []
    while len(found) < MOST_STORED:
        options, before = [], _cost_of(left, cost)
        for tensor in (node.out(index) for node in left for index in range(len(node.outputs))):
            if analysis.entries_per_image(tensor) != 1:
                continue  # Where pixels have been made images, the images of a turn do not lie together.
            rest = _recomputed(wanted, available | {tensor}, cost)
            saved = before - _cost_of(rest, cost)
            if saved > LEAST_SAVED * traced.seconds:
                options.append((saved / tensor.num_bytes(batch), tensor.name, saved, tensor))
        if not options:
            break
        _, _, _, tensor = max(options)
        available.add(tensor)
        rest = _recomputed(wanted, available, cost)
        found.append(Storable(tensor, frozenset(left - rest)))
        left = rest
    return found


def _cost_of(nodes: Iterable[Node], cost: Mapping[Node, float]) -> float:
    """Work of those that have a cost."""
    return sum(cost.get(node, 0.0) for node in nodes)


def _recomputed(wanted: Iterable[Tensor], available: Container[Tensor], within: Container[Node]) -> set[Node]:
    """Operations of some that have to run for the wanted tensors."""
    found: set[Node] = set()
    stack = list(wanted)
    while stack:
        tensor = stack.pop()
        if tensor not in available and tensor.node in within and tensor.node not in found:
            found.add(tensor.node)
            stack.extend(tensor.node.inputs)
    return found
