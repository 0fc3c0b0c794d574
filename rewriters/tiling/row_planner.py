"""Plans row tiles that hand on what they share: LR-CNN's two-phase sharing (2PS, section IV-A) on the joint graph.

Z. Wang et al., "LR-CNN: Lightweight Row-centric Convolutional Neural Network Training for Memory Reduction" (2024).
A plan is that of overlapping tiles of full width but for one thing: of what is wanted of a tensor a turn makes only
the rows that no turn before it made. Which those are is found once, for the finest tiles, walking back from the exits;
the loops then take every border of these or some, so that both may have numbers of tiles of their own (III-C).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable

import numpy as np

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.errors import NotTileableError
from rewriters.ir.graph import Node, Tensor
from rewriters.rules.intervals import Interval
from rewriters.rules.registry import AxisPlan, TileKind, find_rule
from rewriters.tiling.barrier_planner import BarrierPlanner
from rewriters.tiling.checkpoint_selection import LoopSpec
from rewriters.tiling.row_frontiers import (
    CarriedRows,
    Frontier,
    SavedRows,
    balanced_partition,
    cells,
    refilled,
    slots,
    stand_in,
)
from rewriters.tiling.segment import Segment
from rewriters.tiling.tile_planner import Grid, IterationOrder, Region, RowDemand, TileLoop, TilePlanner, with_rows

__all__: list[str] = []

FEW_FLOPS = 20.0
"""For each byte that is made, what may be computed again for it not to be kept."""

MOST_WALKS = 6
"""Walks over a loop to find frontiers, the last one with even parts."""


class CarryingRows(RowDemand):
    """Tiles that make of a value what no tile before them made, and hold the rows above it that they need as well.

    Frontiers are found in a walk over the finest tiles, while `_recording`, and looked up in the walks after it.
    """

    def __init__(self, analysis: GraphAnalysis, segment: Segment) -> None:
        super().__init__(analysis, segment)  # type: ignore[arg-type]
        self._carrying: set[Node] = set()
        self._whole: set[Tensor] = set()
        self._frontiers: dict[Node, Frontier] = {}
        self._recording = False
        self._fine = 1
        self._borders = np.arange(2)

    def _begin(self, at: np.ndarray) -> None:
        self._borders = at
        self.carries = {}

    @property
    def _in_one_turn(self) -> bool:
        """Whether the loop has one turn, which sees whole tensors, also rows that nothing needs."""
        return len(self._borders) == 2

    def _num_rows(self, tensor: Tensor) -> int:
        return self.extents(tensor)[self.row_axis]

    def _carries_rows(self, node: Node) -> bool:
        """Whether all that an op makes can be cut along the axis of the rows."""
        for tensor in (node.out(index) for index in range(len(node.outputs))):
            layout = self.analysis.layouts.of(tensor)
            if layout is None or layout.dims[self.row_axis] is None or layout.batch_fold != 1:
                return False
        return True

    def made(self, node: Node, wanted: Region) -> Region:
        """The rows that no tile before made."""
        if node not in self._carrying or self._in_one_turn or not self._carries_rows(node):
            return super().made(node, wanted)
        if self._recording:
            results = [node.out(index) for index in range(len(node.outputs))]
            whole = self._whole.intersection(results)
            rows = wanted[self.row_axis]
            end = self._num_rows(results[0]) if whole else None
            self._frontiers[node] = Frontier.of(rows, 0 if whole else int(rows.lo.min()), end)
        return with_rows(wanted, self.row_axis, refilled(self._frontiers[node].new(self._borders)))

    def hold(
        self, node: Node, wanted: Region, plan: tuple[AxisPlan, ...], available: Container[Tensor]
    ) -> tuple[tuple[AxisPlan, ...], Region]:
        """The rows that are made, below those that are received if any of them is wanted."""
        if node not in self._carrying or self._in_one_turn or node not in self._frontiers:
            return super().hold(node, wanted, plan, available)
        frontier, rows = self._frontiers[node], wanted[self.row_axis]
        new = frontier.new(self._borders)
        plan = tuple(dataclasses.replace(p, kept=new) if axis == self.row_axis else p for axis, p in enumerate(plan))
        carry = CarriedRows(frontier.carried(self._borders[:-1]), frontier.carried(self._borders[1:]))
        held = new
        if np.any((rows.size > 0) & (rows.lo < new.lo)):
            results = (node.out(index) for index in range(len(node.outputs)))
            self.carries.update((tensor, carry) for tensor in results if tensor not in available)
            held = Interval(carry.received.lo, new.hi)
        return plan, with_rows(tuple(p.kept for p in plan), self.row_axis, held)  # type: ignore[misc]


class RowPlanner(CarryingRows, TilePlanner):
    """Plans the tile loops of one segment without barriers in rows."""

    BACKWARD_ORDER = IterationOrder.DESCENDING

    def __init__(self, analysis: GraphAnalysis, segment: Segment) -> None:
        super().__init__(analysis, segment)
        self._carrying = set(segment.forward) - cheap_to_recompute(analysis, segment.forward)
        self._backward_nodes = set(segment.backward)
        self._whole = {*segment.exits, *segment.stored}
        self._incoming: dict[Tensor, Frontier | None] = {}
        self._walked: tuple[int, int] | None = None
        gradients = (node for node in segment.backward if segment.kinds[node.out()] is not TileKind.FULL)
        self._handed_on = {tensor for node in gradients for tensor in node.inputs}

    def tile_loops(self, grid: Grid, backward_grid: Grid) -> list[TileLoop]:
        """Forward, from top to bottom; then recompute and backward, from bottom to top."""
        self.row_axis = row_axis(grid, backward_grid)
        segment = self.segment
        number, backward_number = grid.spatial[self.row_axis], backward_grid.spatial[self.row_axis]
        if max(number, backward_number) == 1:
            return TilePlanner(self.analysis, segment).tile_loops(grid, backward_grid)
        least = min((*segment.exits, *segment.grad_entries), key=self._num_rows)
        self._fine = self._num_rows(least)
        if self._fine < max(number, backward_number):
            tiles = max(number, backward_number)
            raise NotTileableError(f"`{least.name}` has {self._fine} rows, fewer than the {tiles} tiles")
        if self._walked != (self.row_axis, self._fine):
            self._walked = (self.row_axis, self._fine)
            self._find_frontiers()
        at, backward_at = (balanced_partition(self._weights(), tiles) for tiles in (number, backward_number))
        loops = []
        saves: list[SavedRows] = []
        if segment.backward:
            self._begin(backward_at)
            regions, plans = self.backward_rows(backward_grid)
            saves = self._saves(regions, at)
            loops.append(self.backward_loop(backward_grid, regions, plans))
        if segment.exits or segment.stored or saves:
            self._begin(at)
            loops.insert(0, self._forward(grid, saves))
        return loops

    # Frontiers -----------------------------------------------------------------------------------------------

    def _find_frontiers(self) -> None:
        """Walk the finest tiles: gradients as they come in, then forward values as they are wanted."""
        segment = self.segment
        axes = len(self.extents((*segment.exits, *segment.grad_entries)[0]))
        grid = Grid(1, tuple(self._fine if axis == self.row_axis else 1 for axis in range(axes)))
        self._frontiers, self._incoming, self._recording = {}, {}, True
        self._begin(np.arange(self._fine + 1))
        read = {t for node in segment.forward for t in node.inputs}
        written = {t: self.cells_of(t, grid) for t in self._whole if t not in read}
        self.operand_rows_for_result(segment.forward, dict(written), set(segment.entries), grid)
        wanted: dict[Tensor, Region] = {}
        if segment.backward:
            self._incoming = {t: self._alongside(t) for t in segment.grad_entries}
            gradients = [n for n in segment.backward if segment.kinds[n.out()] is not TileKind.FULL]
            derived = [n for n in segment.backward if segment.kinds[n.out()] is TileKind.FULL]
            _, plans = self._support(gradients, {t: self.cells_of(t, grid) for t in segment.grad_entries}, grid)
            for node in gradients:
                self.want(node, plans[node], wanted)
            self.operand_rows_for_result(derived, wanted, segment.available, grid)
            wanted = {t: rows for t, rows in wanted.items() if t not in segment.available}
        self.operand_rows_for_result(segment.forward, wanted | written, set(segment.entries), grid)
        self._recording = False

    def _weights(self) -> np.ndarray:
        """Bytes of the forward values above each border of the finest tiles; rows alone if none is handed on."""
        found = np.zeros(self._fine + 1)
        for node in self._carrying & self._frontiers.keys():
            for tensor in (node.out(index) for index in range(len(node.outputs))):
                found += self._frontiers[node].done * (tensor.num_bytes() / self._num_rows(tensor))
        return found if found[-1] > found[0] else np.arange(self._fine + 1.0)

    def _alongside(self, gradient: Tensor) -> Frontier | None:
        """The frontier of the forward tensor that an incoming gradient first meets: it then meets no rows twice."""
        rows = self._num_rows(gradient)
        readers = [n for n in self.segment.backward if gradient in n.inputs]
        below: set[Node] = set()
        while readers:
            node = readers.pop()
            if node in below:
                continue
            below.add(node)
            readers += [
                t.node for t in node.inputs if self.kinds[t] is TileKind.FULL and t.node in self._backward_nodes
            ]
        met = [t.node for node in below for t in node.inputs if t.node in self._frontiers]
        met = [node for node in met if self._num_rows(node.out()) == rows]
        if not met:
            return None
        last = self._frontiers[max(met, key=self.analysis.position.__getitem__)]
        done = last.done.copy()
        done[0], done[-1] = 0, rows
        return Frontier(done, done) if np.all(np.diff(done) > 0) else None

    def cells_of(self, tensor: Tensor, grid: Grid) -> Region:
        """What each tile writes of a tensor: the rows that it makes, or its part of an even partition."""
        frontier = self._frontiers.get(tensor.node) if tensor in self._whole else self._incoming.get(tensor)
        if frontier is not None:
            own = frontier.new(self._borders)
        else:
            own = cells(self._num_rows(tensor), self._fine, self._borders)
        return with_rows(super().cells_of(tensor, grid), self.row_axis, own)

    def reached(self, node: Node, plan: tuple[AxisPlan, ...]) -> Region:
        """The rows of a gradient to which no later turn adds, if any are shared; else all that the op reaches."""
        region = super().reached(node, plan)
        results = [node.out(index) for index in range(len(node.outputs))]
        if self._in_one_turn or not self._carries_rows(node) or self._handed_on.isdisjoint(results):
            return region
        if self._recording:
            self._frontiers[node] = Frontier.of(region[self.row_axis], 0)
        frontier = self._frontiers[node]
        carry = CarriedRows(frontier.carried(self._borders[1:]), frontier.carried(self._borders[:-1]))
        if not np.any(carry.received.size):
            return region
        self.carries.update((tensor, carry) for tensor in results)
        return with_rows(region, self.row_axis, refilled(frontier.new(self._borders)))

    # Loops ---------------------------------------------------------------------------------------------------

    def _saves(self, regions: dict[Tensor, Region], at: np.ndarray) -> list[SavedRows]:
        """What the forward loop keeps of forward values, and where the backward loop reads it."""
        found = []
        for tensor, carry in list(self.carries.items()):
            if self.kinds[tensor] is not TileKind.FULL:
                continue
            layout = self.analysis.layouts.of(tensor)
            assert layout is not None
            sizes = [int(rows.size[0]) for rows in regions[tensor]]
            sizes[self.row_axis] = int(carry.received.size.sum())
            saved = stand_in(tensor, layout.dims, sizes)
            nothing = Interval(carry.received.hi, carry.received.hi)
            self.carries[tensor] = CarriedRows(carry.received, nothing, saved)
            rows = slots(self._frontiers[tensor.node], at, self._borders)
            found.append(SavedRows(tensor, saved, rows, regions[tensor]))
        return found

    def _forward(self, grid: Grid, saves: list[SavedRows]) -> TileLoop:
        cells = {tensor: self.cells_of(tensor, grid) for tensor in self.written()}
        demand = dict(cells)
        for save in saves:
            for rows, _ in save.slots:
                old = demand.get(save.tensor)
                hull = rows if old is None else old[self.row_axis].hull(rows)
                demand[save.tensor] = with_rows(save.region, self.row_axis, hull)
        return self.forward_loop(grid, cells, demand=demand, saves=saves)


class RowBarrierPlanner(CarryingRows, BarrierPlanner):
    """Plans the phases of one segment with barriers in rows: each loop hands on what its turns share."""

    def __init__(self, analysis: GraphAnalysis, segment: Segment) -> None:
        super().__init__(analysis, segment)
        self._cells: dict[Tensor, Interval] = {}
        self._free: dict[tuple[Node, ...], set[Node]] = {}

    def tile_loop(self, loop: LoopSpec, grid: Grid, name: str = "") -> TileLoop:
        """The loop with `grid`, clamped."""
        grid = self.clamped(loop, grid)
        self.row_axis = row_axis(grid)
        key = tuple(loop.body)
        if key not in self._free:
            self._free[key] = cheap_to_recompute(self.analysis, (node for node in loop.body if node not in loop.sums))
        self._carrying, self._fine = set(loop.body) - self._free[key], grid.spatial[self.row_axis]
        if self._fine == 1:
            return BarrierPlanner(self.analysis, self.segment).tile_loop(loop, grid, name)
        self._whole = set(self.split(loop))
        self._find_frontiers(loop, grid)
        self._begin(np.arange(self._fine + 1))
        return super().tile_loop(loop, grid, name)

    def _find_frontiers(self, loop: LoopSpec, grid: Grid) -> None:
        """Walk until what is written or summed up of each tensor in a turn is what others need then, if that ends."""
        self._recording = True
        self._cells = {}
        even = np.arange(self._fine + 1)
        for attempt in range(MOST_WALKS):
            self._frontiers = {}
            self._begin(even)
            super().tile_loop(loop, grid)
            found = {t: f.new(self._borders) for t in self._whole if (f := self._frontiers.get(t.node)) is not None}
            found = {t: rows for t, rows in found.items() if np.all(rows.size > 0)}
            if found.keys() == self._cells.keys() and all(found[t].same(self._cells[t]) for t in found):
                break
            if attempt == MOST_WALKS - 2:
                found = {}  # Even parts do as well: more rows wait for them.
            elif attempt == MOST_WALKS - 1:
                break
            self._cells = found
        self._recording = False

    def cells_of(self, tensor: Tensor, grid: Grid) -> Region:
        """What each tile writes or sums up of a tensor."""
        even = super().cells_of(tensor, grid)
        return with_rows(even, self.row_axis, self._cells[tensor]) if tensor in self._cells else even


def cheap_to_recompute(analysis: GraphAnalysis, body: Iterable[Node]) -> set[Node]:
    """Operations whose rows are made again rather than kept: of few flops, and one window at most from the entries.

    Such as the first convolution of a network, which makes many channels of three, and a normalisation of what a loop
    before has stored: to hand rows on, they are copied to where there is room for more.
    """
    taken: dict[Node, tuple[int, float]] = {}
    for node in body:
        size = sum(node.out(index).num_bytes() for index in range(len(node.outputs)))
        flops = find_rule(node).flops(analysis.view(node), 1) / max(size, 1)
        above = [taken[t.node] for t in node.inputs if t.node in taken]
        windows = max((number for number, _ in above), default=0) + _widens(analysis, node)
        taken[node] = (windows, flops + sum(amount for _, amount in above))
    return {node for node, (windows, flops) in taken.items() if windows <= 1 and flops <= FEW_FLOPS}


def _widens(analysis: GraphAnalysis, node: Node) -> bool:
    """Whether neighbouring rows of an op's result share rows of what it reads."""
    view = analysis.view(node)
    for axis, extent in enumerate(analysis.extents(node.out()) or ()):
        if extent is None or extent < 2:
            continue
        at = np.array([extent // 2 - 1])  # Rules may look rows up that an image has.
        one, two = (find_rule(node).operand_rows_for_result(view, axis, Interval(at, at + number)) for number in (1, 2))
        for a, b in zip(one.needs, two.needs, strict=True):
            if a is not None and b is not None and 2 * a.size[0] > b.size[0]:
                return True
    return False


def row_axis(*grids: Grid) -> int:
    """The axis that is split, the first if none is.

    Raises:
        NotTileableError: If several are.
    """
    split = {axis for grid in grids for axis, count in enumerate(grid.spatial) if count != 1}
    if len(split) > 1:
        shown = " and ".join(map(str, grids))
        raise NotTileableError(f"rows that hand on what they share are split along one axis, and {shown} tiles are not")
    return min(split, default=0)
