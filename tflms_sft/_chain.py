"""A component as a chain of blocks, and the cheapest way through it within a budget.

Between two cuts the blocks either stay as they are (their activations wait for the backward pass) or
lie in a segment with some number of tiles (its exit waits, and every turn recomputes). Along the chain,
bytes that wait add up. The cheapest way is a shortest path over (bytes waiting, time) pairs, of which
only the undominated ones are kept.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Container, Iterable, Iterator, Mapping

import numpy as np

from rewriters.cost import phase_cost, step_cost, turn_cost
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

MOST_STORED = 8
"""Inner tensors of a segment that may be stored."""

LEAST_SAVED = 0.005
"""Part of a step's arithmetic below which a tensor is not worth storing."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """What to do with the blocks from one cut to another.

    Attributes:
        first: First position in the component.
        last: One past the last position.
        grid: Tiles, or `None` to leave the blocks as they are.
        waits: Bytes that it leaves waiting for the backward pass.
        needs: Bytes that it needs on top while it runs.
        cost: Arithmetic.
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


@dataclasses.dataclass(frozen=True)
class Path:
    """Choices from the start of a component up to a cut."""

    waits: int
    cost: float
    choices: tuple[Choice, ...]


class Chain:
    """One component as a chain of blocks."""

    def __init__(self, traced: Traced, component: Component) -> None:
        self.traced = traced
        self.component = component
        self.bounds = self._bounds()
        self._tiled: dict[tuple[int, int], list[Choice]] = {}
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
        """The cheapest path of which every block fits."""
        fronts: dict[int, list[Path]] = {self.bounds[0]: [Path(0, 0.0, ())]}
        for start, first in enumerate(self.bounds[:-1]):
            for path in fronts.get(first, []):
                for last in self.bounds[start + 1 :]:
                    for choice in self._options(first, last, budget - path.waits):
                        new = Path(path.waits + choice.waits, path.cost + choice.cost, (*path.choices, choice))
                        _keep(fronts.setdefault(last, []), new)
        ends = fronts.get(self.bounds[-1], [])
        return min(ends, key=lambda path: path.cost) if ends else None

    def lowest(self) -> int:
        """Bytes without which no choice does."""
        low, high = 1, max(self._plain_choice(self.bounds[0], self.bounds[-1]).waits * 4, 1)
        while low < high:
            middle = (low + high) // 2
            if self.cheapest(middle) is None:
                low = middle + max(middle // 100, 1)
            else:
                high = middle
        return low

    def _options(self, first: int, last: int, budget: int) -> list[Choice]:
        """Leaving the blocks as they are, or tiling them, as far as that fits."""
        options = [self._plain_choice(first, last), *self._tilings(first, last)]
        return [choice for choice in options if choice.waits + choice.needs <= budget]

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
            costs = step_cost(analysis, (*nodes, *backward), batch)
            self._plain[first, last] = Choice(first, last, None, waits, needs, costs)
        return self._plain[first, last]

    def _backward(self, first: int, last: int) -> list[Node]:
        """Backward ops of blocks."""
        if self._positions is None:
            self._positions = backward_positions(self.traced.analysis, self.component)
        return [node for node, position in self._positions.items() if first <= position < last]

    def _tilings(self, first: int, last: int) -> list[Choice]:
        """Ways to tile the blocks of which no other is better in every respect; none if they are no segment."""
        if (first, last) not in self._tiled:
            found: list[Choice] = []
            with contextlib.suppress(NotTileableError):
                segment = try_segment(self.traced.analysis, self.component, range(first, last), set(), "candidate")
                tilings = [Tiles(self.traced, segment, halo) for halo in Halo]
                found = [choice for tiles in tilings for choice in tiles.choices(first, last)]
            self._tiled[first, last] = _undominated(found)
        return self._tiled[first, last]


class Tiles:
    """A segment in any number of tiles, with any of its inner tensors stored."""

    def __init__(self, traced: Traced, segment: Segment, halo: Halo) -> None:
        self._traced = traced
        self._segment = segment
        self._halo = halo
        self._planner = planner_for(traced.analysis, segment, halo)
        self._grids = thinned(auto_grids(traced.analysis, segment, traced.batch, halo is Halo.CARRY), MORE)

    def choices(self, first: int, last: int) -> Iterator[Choice]:
        """With every number of tiles that is tried; and with the tensors stored that save most for their size."""
        grads = (*self._segment.grad_entries, *self._segment.grad_exits, *self._segment.reductions)
        batch, stored = self._traced.batch, None
        for grid in self._grids:
            phases = self._planner.phases(grid, grid)
            saves = [save.saved for phase in phases for save in phase.saves]
            waits = sum(t.num_bytes(batch) for t in (*self._segment.exits, *saves))
            needs = phase_scratch(phases[-1], batch) + sum(t.num_bytes(batch) for t in grads)
            cost = sum(phase_cost(self._traced.analysis, phase, batch) for phase in self._costing(grid, phases))
            yield Choice(first, last, grid, waits, needs, cost, self._halo)
            # About the same for any number of tiles.
            stored = worth_storing(self._traced, self._segment, phases[-1]) if stored is None else stored
            chosen: frozenset[Tensor] = frozenset()
            for tensor, saved in stored:
                chosen |= {tensor}
                waits, cost = waits + tensor.num_bytes(batch), cost - saved
                yield Choice(first, last, grid, waits, needs, cost, self._halo, chosen)

    def _costing(self, grid: Grid, phases: list[Phase]) -> list[Phase]:
        """With about the forward tiles that the plan will have: fewer halos."""
        if self._halo is Halo.CARRY or len(phases) == 1:
            return phases
        return [self._planner.forward(Grid(grid.batch, tuple(-(-count // 2) for count in grid.spatial))), phases[-1]]


def worth_storing(traced: Traced, segment: Segment, backward: Phase) -> list[tuple[Tensor, float]]:
    """Inner tensors to store, one after the other, each with the arithmetic that it saves: most for its size first."""
    analysis, batch = traced.analysis, traced.batch
    cost = {n: turn_cost(analysis, backward, n, batch) for n in backward.body if n not in analysis.backward}
    wanted = [t for n in backward.body if n in analysis.backward for t in n.inputs if t.node in cost]
    available, left = set(segment.available), _recomputed(wanted, segment.available)
    found: list[tuple[Tensor, float]] = []
    while len(found) < MOST_STORED:
        options, before = [], _cost_of(left, cost)
        for tensor in (node.out(index) for node in left for index in range(len(node.outputs))):
            rest = _recomputed(wanted, available | {tensor})
            saved = before - _cost_of(rest, cost)
            if saved > LEAST_SAVED * traced.cost:
                options.append((saved / tensor.num_bytes(batch), tensor.name, saved, tensor))
        if not options:
            break
        _, _, saved, tensor = max(options)
        found.append((tensor, saved))
        available.add(tensor)
        left = _recomputed(wanted, available)
    return found


def _cost_of(nodes: Iterable[Node], cost: Mapping[Node, float]) -> float:
    """Arithmetic of those that have a cost."""
    return sum(cost.get(node, 0.0) for node in nodes)


def _recomputed(wanted: Iterable[Tensor], available: Container[Tensor]) -> set[Node]:
    """Operations that have to run for the wanted tensors."""
    found: set[Node] = set()
    stack = list(wanted)
    while stack:
        tensor = stack.pop()
        if tensor not in available and tensor.node not in found:
            found.add(tensor.node)
            stack.extend(tensor.node.inputs)
    return found


def _undominated(choices: Iterable[Choice]) -> list[Choice]:
    """Without those beside which another one waits for less, needs less and costs less."""
    found: list[Choice] = []
    for new in sorted(choices, key=lambda choice: (choice.cost, choice.waits, choice.needs)):
        if not any(old.waits <= new.waits and old.waits + old.needs <= new.waits + new.needs for old in found):
            found.append(new)
    return found


def _keep(front: list[Path], new: Path) -> None:
    """Add a path unless one with less waiting costs no more; drop those that it beats."""
    if any(old.waits <= new.waits and old.cost <= new.cost for old in front):
        return
    front[:] = [old for old in front if not (new.waits <= old.waits and new.cost <= old.cost)]
    front.append(new)
