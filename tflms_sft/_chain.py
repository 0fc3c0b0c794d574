"""A component as a chain of blocks, and the cheapest way through it within a budget.

Between two cuts the blocks either stay as they are (their activations wait for the backward pass) or
lie in a segment with some number of tiles (its exit waits, and every turn recomputes). Along the chain,
bytes that wait add up. The cheapest way is a shortest path over (bytes waiting, time) pairs, of which
only the undominated ones are kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from rewriters.cost import op_cost, phase_cost, step_cost
from rewriters.errors import NotTileableError
from rewriters.ft import Component, try_segment
from rewriters.graph import Node, Tensor
from rewriters.memory import op_scratch
from rewriters.segments import Segment
from rewriters.sft import planner_for
from rewriters.tiles import Grid, Halo, Phase
from rewriters.turns import phase_scratch
from tflms_sft._compile import Traced
from tflms_sft._grids import auto_grids, fewest

MAX_CUTS = 8
"""Most places where a segment may end; in a longer network they are spread over what it keeps."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """What to do with the blocks from one cut to another.

    Attributes:
        first: First position in the component.
        last: One past the last position.
        grid: Tiles, or `None` to leave the blocks as they are.
        halo: Where tiles have the rows from that they share.
        waits: Bytes that it leaves waiting for the backward pass.
        needs: Bytes that it needs on top while it runs.
        cost: Arithmetic.
    """

    first: int
    last: int
    grid: Grid | None
    waits: int
    needs: int
    cost: float
    halo: Halo = Halo.RECOMPUTE


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
        self._segments: dict[tuple[int, int], Segment | None] = {}
        self._tiles: dict[tuple[int, int], list[Tiles]] = {}
        self._plain: dict[tuple[int, int], Choice] = {}

    def _bounds(self) -> list[int]:
        """Where segments may begin and end: `MAX_CUTS` of the component's cuts.

        First those that keep less than the cuts on both sides, such as pools; then, of each stretch of
        the network that keeps about as much for the backward pass, the one that keeps least.
        """
        analysis, batch, component = self.traced.analysis, self.traced.batch, self.component
        size = len(component.nodes)
        inner = [cut for cut in component.cuts if cut < size - 1]
        kept = {cut: component.cut_tensor(analysis, cut).num_bytes(batch) for cut in inner}
        # Of neighbours that keep the same amount the last one is enough: it leaves more to recompute.
        inner = [c for i, c in enumerate(inner) if i + 1 == len(inner) or kept[inner[i + 1]] != kept[c]]
        around = [np.inf, *(kept[cut] for cut in inner), np.inf]
        lows = [c for i, c in enumerate(inner) if around[i] > kept[c] < around[i + 2]]
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
        """Leaving the blocks as they are, and the fewest tiles with which they fit."""
        result = []
        plain = self._plain_choice(first, last)
        if plain.waits + plain.needs <= budget:
            result.append(plain)
        for tiles in self._tilings(first, last):
            grid = tiles.fewest(budget)
            if grid is not None:
                waits, needs = tiles.waits(grid), tiles.needs(grid)
                result.append(Choice(first, last, grid, waits, needs, tiles.cost(grid), tiles.halo))
        return result

    def _plain_choice(self, first: int, last: int) -> Choice:
        if (first, last) not in self._plain:
            analysis, batch = self.traced.analysis, self.traced.batch
            nodes = self.component.nodes[first:last]
            saved: dict[Tensor, None] = {}
            grads: list[int] = [0]
            costs = 0.0
            readers: dict[Node, None] = {}
            for node in nodes:
                costs += op_cost(analysis, node, batch)
                for index in range(len(node.outputs)):
                    tensor = node.out(index)
                    later = [r for r, _ in analysis.readers.get(tensor, ()) if r in analysis.backward]
                    readers.update(dict.fromkeys(later))
                    if later:
                        saved[tensor] = None
                    grads.append(tensor.num_bytes(batch))
            waits = sum(tensor.num_bytes(batch) for tensor in saved)
            costs += step_cost(analysis, readers, batch)
            # Two gradients at once, and both kernels of a convolution.
            needs = 2 * max(grads) + 2 * max((op_scratch(node, batch) for node in (*nodes, *readers)), default=0)
            self._plain[first, last] = Choice(first, last, None, waits, needs, costs)
        return self._plain[first, last]

    def _tilings(self, first: int, last: int) -> list[Tiles]:
        """Ways to tile the blocks; none if they are no segment."""
        if (first, last) not in self._tiles:
            try:
                segment = try_segment(self.traced.analysis, self.component, range(first, last), set(), "candidate")
            except NotTileableError:
                self._tiles[first, last] = []
            else:
                self._tiles[first, last] = [Tiles(self.traced, segment, halo) for halo in Halo]
        return self._tiles[first, last]


class Tiles:
    """A segment in any number of tiles.

    Attributes:
        halo: Where they have the rows from that they share.
    """

    def __init__(self, traced: Traced, segment: Segment, halo: Halo) -> None:
        self.halo = halo
        self._traced = traced
        self._segment = segment
        self._planner = planner_for(traced.analysis, segment, halo)
        self._grids = auto_grids(traced.analysis, segment, traced.batch, halo is Halo.CARRY)
        self._phases: dict[Grid, list[Phase]] = {}
        self._costs: dict[Grid, float] = {}

    def fewest(self, budget: int) -> Grid | None:
        """The fewest tiles with which the segment stays within so many bytes."""

        def taken(index: int) -> int:
            return self.waits(self._grids[index]) + self.needs(self._grids[index])

        # Rows are saved for every tile, so that at some point more of them take more again.
        last = len(self._grids) - 1 if self.halo is Halo.RECOMPUTE else _lowest(len(self._grids), taken)
        return fewest(self._grids[: last + 1], lambda grid: self.waits(grid) + self.needs(grid) <= budget)

    def waits(self, grid: Grid) -> int:
        """Bytes that wait for the backward pass: exits, and rows that are carried."""
        saved = [save.saved for phase in self._loops(grid) for save in phase.saves]
        return sum(t.num_bytes(self._traced.batch) for t in (*self._segment.exits, *saved))

    def needs(self, grid: Grid) -> int:
        """Bytes that the loops take while they run; a turn of the backward one is the larger one."""
        segment, batch = self._segment, self._traced.batch
        grads = (*segment.grad_entries, *segment.grad_exits, *segment.reductions)
        return phase_scratch(self._loops(grid)[-1], batch) + sum(t.num_bytes(batch) for t in grads)

    def cost(self, grid: Grid) -> float:
        """Arithmetic, with about the forward tiles that the plan will have: to find them takes longer."""
        if grid not in self._costs:
            coarser = Grid(grid.batch, tuple(-(-count // 2) for count in grid.spatial))
            phases = self._planner.phases(coarser, grid)
            self._costs[grid] = sum(phase_cost(self._traced.analysis, phase, self._traced.batch) for phase in phases)
        return self._costs[grid]

    def _loops(self, grid: Grid) -> list[Phase]:
        if grid not in self._phases:
            self._phases[grid] = self._planner.phases(grid, grid)
        return self._phases[grid]


def _lowest(size: int, value: Callable[[int], int]) -> int:
    """Where a sequence of numbers that fall and then rise is lowest."""
    low, high = 0, size - 1
    while low < high:
        middle = (low + high) // 2
        if value(middle) <= value(middle + 1):
            high = middle
        else:
            low = middle + 1
    return low


def _keep(front: list[Path], new: Path) -> None:
    """Add a path unless one with less waiting costs no more; drop those that it beats."""
    if any(old.waits <= new.waits and old.cost <= new.cost for old in front):
        return
    front[:] = [old for old in front if not (new.waits <= old.waits and new.cost <= old.cost)]
    front.append(new)
