"""Plans strips that carry the rows they share: LR-CNN's two-phase sharing (2PS, section IV-A) on the joint graph.

Z. Wang et al., "LR-CNN: Lightweight Row-centric Convolutional Neural Network Training for Memory Reduction" (2024).
A plan differs in one thing from that of overlapping strips: an iteration computes only those demanded rows of a tensor
that no earlier iteration computed. The planner finds these rows once, for the finest strips, in a walk back from the
exits. Each loop then uses some of the borders of the finest strips, so that forward and backward loop may have
different numbers of strips (III-C).
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

MAX_RECOMPUTE_FLOPS_PER_BYTE = 20.0
"""Flops per byte of a result up to which its rows are recomputed rather than carried."""

MAX_WALKS = 6
"""Walks over a loop to find frontiers, the last one with an even partition."""


class CarryingRows(RowDemand):
    """Demand of strips that compute the rows no earlier strip computed, and receive the rows above that they need.

    A walk over the finest strips, during which `_recording` is true, finds the frontiers. Later walks look them up.
    """

    def __init__(self, analysis: GraphAnalysis, segment: Segment) -> None:
        super().__init__(analysis, segment)  # type: ignore[arg-type]
        self._carrying: set[Node] = set()
        self._written: set[Tensor] = set()
        self._frontiers: dict[Node, Frontier] = {}
        self._recording = False
        self._fine = 1
        self._borders = np.arange(2)

    def _begin(self, borders: np.ndarray) -> None:
        """Start a walk over the strips between some borders of the finest strips."""
        self._borders = borders
        self.carries = {}

    @property
    def _has_one_strip(self) -> bool:
        """True if the loop has one iteration, which computes full-size tensors, rows that nothing needs included."""
        return len(self._borders) == 2

    def _num_rows(self, tensor: Tensor) -> int:
        return self.extents(tensor)[self.row_axis]

    def _carries_rows(self, node: Node) -> bool:
        """Return whether all results of an op can be split along the row axis."""
        for tensor in (node.out(index) for index in range(len(node.outputs))):
            layout = self.analysis.layouts.of(tensor)
            if layout is None or layout.dims[self.row_axis] is None or layout.batch_fold != 1:
                return False
        return True

    def computed_rows(self, node: Node, demanded: Region) -> Region:
        """Return the rows that no earlier strip computed."""
        if node not in self._carrying or self._has_one_strip or not self._carries_rows(node):
            return super().computed_rows(node, demanded)
        if self._recording:
            results = [node.out(index) for index in range(len(node.outputs))]
            is_written = not self._written.isdisjoint(results)
            rows = demanded[self.row_axis]
            start, end = (0, self._num_rows(results[0])) if is_written else (int(rows.lo.min()), None)
            self._frontiers[node] = Frontier.of(rows, start, end)
        return with_rows(demanded, self.row_axis, refilled(self._frontiers[node].new(self._borders)))

    def held_rows(
        self, node: Node, demanded: Region, plan: tuple[AxisPlan, ...], available: Container[Tensor]
    ) -> tuple[tuple[AxisPlan, ...], Region]:
        """Return the computed rows, and the received rows above them if any of these is demanded."""
        if node not in self._carrying or self._has_one_strip or node not in self._frontiers:
            return super().held_rows(node, demanded, plan, available)
        frontier, rows = self._frontiers[node], demanded[self.row_axis]
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
        self._written = {*segment.exits, *segment.stored}
        self._incoming: dict[Tensor, Frontier | None] = {}
        self._walked: tuple[int, int] | None = None
        self._gradients = [n for n in segment.backward if segment.kinds[n.out()] is not TileKind.FULL]
        self._derived = [n for n in segment.backward if segment.kinds[n.out()] is TileKind.FULL]
        self._gradient_operands = {tensor for node in self._gradients for tensor in node.inputs}

    def tile_loops(self, grid: Grid, backward_grid: Grid) -> list[TileLoop]:
        """Plan the forward loop, from top to bottom, and the backward loop, from bottom to top."""
        self.row_axis = row_axis(grid, backward_grid)
        segment = self.segment
        counts = grid.spatial[self.row_axis], backward_grid.spatial[self.row_axis]
        if max(counts) == 1:
            return TilePlanner(self.analysis, segment).tile_loops(grid, backward_grid)
        smallest = min((*segment.exits, *segment.grad_entries), key=self._num_rows)
        self._fine = self._num_rows(smallest)
        if self._fine < max(counts):
            raise NotTileableError(f"`{smallest.name}` has {self._fine} rows, fewer than the {max(counts)} tiles")
        if self._walked != (self.row_axis, self._fine):
            self._walked = (self.row_axis, self._fine)
            self._find_frontiers()
        borders, backward_borders = (balanced_partition(self._weights(), tiles) for tiles in counts)
        loops = []
        saves: list[SavedRows] = []
        if segment.backward:
            self._begin(backward_borders)
            regions, plans = self.backward_rows(backward_grid)
            saves = self._saves(regions, borders)
            loops.append(self.backward_loop(backward_grid, regions, plans))
        if segment.exits or segment.stored or saves:
            self._begin(borders)
            loops.insert(0, self._forward(grid, saves))
        return loops

    # Frontiers -----------------------------------------------------------------------------------------------

    def _find_frontiers(self) -> None:
        """Find the frontiers of gradients, from the incoming ones, then those of forward values, from the demand."""
        segment = self.segment
        axes = len(self.extents((*segment.exits, *segment.grad_entries)[0]))
        grid = Grid(1, tuple(self._fine if axis == self.row_axis else 1 for axis in range(axes)))
        self._frontiers, self._incoming, self._recording = {}, {}, True
        self._begin(np.arange(self._fine + 1))
        operands = {t for node in segment.forward for t in node.inputs}
        cells = {t: self.cells_of(t, grid) for t in self._written if t not in operands}
        self.operand_rows_for_result(segment.forward, dict(cells), set(segment.entries), grid)
        demand: dict[Tensor, Region] = {}
        if segment.backward:
            self._incoming = {t: self._matching_frontier(t) for t in segment.grad_entries}
            _, plans = self._support(self._gradients, {t: self.cells_of(t, grid) for t in segment.grad_entries}, grid)
            for node in self._gradients:
                self.demand_operands(node, plans[node], demand)
            self.operand_rows_for_result(self._derived, demand, segment.available, grid)
            demand = {t: rows for t, rows in demand.items() if t not in segment.available}
        self.operand_rows_for_result(segment.forward, demand | cells, set(segment.entries), grid)
        self._recording = False

    def _weights(self) -> np.ndarray:
        """Return the bytes of carried forward values above each border of the finest strips; rows if there are none."""
        weights = np.zeros(self._fine + 1)
        for node in self._carrying & self._frontiers.keys():
            for tensor in (node.out(index) for index in range(len(node.outputs))):
                weights += self._frontiers[node].done * (tensor.num_bytes() / self._num_rows(tensor))
        return weights if weights[-1] > weights[0] else np.arange(self._fine + 1.0)

    def _matching_frontier(self, gradient: Tensor) -> Frontier | None:
        """Return the frontier of the forward tensor that an op reads beside an incoming gradient, if there is one.

        With equal frontiers, an iteration recomputes no row of the forward tensor for the sake of the gradient.
        """
        rows = self._num_rows(gradient)
        stack = [n for n in self.segment.backward if gradient in n.inputs]
        consumers: set[Node] = set()
        while stack:
            node = stack.pop()
            if node in consumers:
                continue
            consumers.add(node)
            stack += [t.node for t in node.inputs if self.kinds[t] is TileKind.FULL and t.node in self._backward_nodes]
        producers = [t.node for node in consumers for t in node.inputs if t.node in self._frontiers]
        producers = [node for node in producers if self._num_rows(node.out()) == rows]
        if not producers:
            return None
        last = self._frontiers[max(producers, key=self.analysis.position.__getitem__)]
        done = last.done.copy()
        done[0], done[-1] = 0, rows
        return Frontier(done, done) if np.all(np.diff(done) > 0) else None

    def cells_of(self, tensor: Tensor, grid: Grid) -> Region:
        """Return the rows that each strip writes of a tensor: its computed rows, or its cell of an even partition."""
        frontier = self._frontiers.get(tensor.node) if tensor in self._written else self._incoming.get(tensor)
        if frontier is not None:
            rows = frontier.new(self._borders)
        else:
            rows = cells(self._num_rows(tensor), self._fine, self._borders)
        return with_rows(super().cells_of(tensor, grid), self.row_axis, rows)

    def gradient_rows(self, node: Node, plan: tuple[AxisPlan, ...]) -> Region:
        """Return the rows of a gradient that no later iteration adds to; all computed rows if strips share none."""
        region = super().gradient_rows(node, plan)
        results = [node.out(index) for index in range(len(node.outputs))]
        if self._has_one_strip or not self._carries_rows(node) or self._gradient_operands.isdisjoint(results):
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

    def _saves(self, regions: dict[Tensor, Region], borders: np.ndarray) -> list[SavedRows]:
        """Return the forward rows to save, and let the backward loop, of the given regions, read its rows from them."""
        saves = []
        for tensor, carry in list(self.carries.items()):
            if self.kinds[tensor] is not TileKind.FULL:
                continue
            layout = self.analysis.layouts.of(tensor)
            assert layout is not None
            sizes = [int(rows.size[0]) for rows in regions[tensor]]
            sizes[self.row_axis] = int(carry.received.size.sum())
            saved = stand_in(tensor, layout.dims, sizes)
            empty = Interval(carry.received.hi, carry.received.hi)
            self.carries[tensor] = CarriedRows(carry.received, empty, saved)
            rows = slots(self._frontiers[tensor.node], borders, self._borders)
            saves.append(SavedRows(tensor, saved, rows, regions[tensor]))
        return saves

    def _forward(self, grid: Grid, saves: list[SavedRows]) -> TileLoop:
        cells = {tensor: self.cells_of(tensor, grid) for tensor in self.written()}
        demand = dict(cells)
        for save in saves:
            for rows, _ in save.slots:
                region = demand.get(save.tensor)
                hull = rows if region is None else region[self.row_axis].hull(rows)
                demand[save.tensor] = with_rows(save.region, self.row_axis, hull)
        return self.forward_loop(grid, cells, demand=demand, saves=saves)


class RowBarrierPlanner(CarryingRows, BarrierPlanner):
    """Plans the tile loops of one segment with barriers in rows; each loop carries the rows that its strips share."""

    def __init__(self, analysis: GraphAnalysis, segment: Segment) -> None:
        super().__init__(analysis, segment)
        self._cells: dict[Tensor, Interval] = {}
        self._cheap: dict[tuple[Node, ...], set[Node]] = {}

    def tile_loop(self, loop: LoopSpec, grid: Grid, name: str = "") -> TileLoop:
        """Plan one loop with a grid, which is clamped."""
        grid = self.clamped(loop, grid)
        self.row_axis = row_axis(grid)
        key = tuple(loop.body)
        if key not in self._cheap:
            self._cheap[key] = cheap_to_recompute(self.analysis, (node for node in loop.body if node not in loop.sums))
        self._carrying, self._fine = set(loop.body) - self._cheap[key], grid.spatial[self.row_axis]
        if self._fine == 1:
            return BarrierPlanner(self.analysis, self.segment).tile_loop(loop, grid, name)
        self._written = set(self.split(loop))
        self._find_frontiers(loop, grid)
        self._begin(np.arange(self._fine + 1))
        return super().tile_loop(loop, grid, name)

    def _find_frontiers(self, loop: LoopSpec, grid: Grid) -> None:
        """Walk until each strip writes and reduces those rows that it computes for other ops, if this converges."""
        self._recording = True
        self._cells = {}
        even = np.arange(self._fine + 1)
        for attempt in range(MAX_WALKS):
            self._frontiers = {}
            self._begin(even)
            super().tile_loop(loop, grid)
            frontiers = {t: self._frontiers[t.node] for t in self._written if t.node in self._frontiers}
            new_cells = {t: frontier.new(self._borders) for t, frontier in frontiers.items()}
            new_cells = {t: rows for t, rows in new_cells.items() if np.all(rows.size > 0)}
            if new_cells.keys() == self._cells.keys() and all(new_cells[t].same(self._cells[t]) for t in new_cells):
                break
            if attempt == MAX_WALKS - 2:
                new_cells = {}  # An even partition is correct, too, but carries more rows.
            elif attempt == MAX_WALKS - 1:
                break
            self._cells = new_cells
        self._recording = False

    def cells_of(self, tensor: Tensor, grid: Grid) -> Region:
        """Return the rows that each strip writes or reduces of a tensor."""
        region = super().cells_of(tensor, grid)
        return with_rows(region, self.row_axis, self._cells[tensor]) if tensor in self._cells else region


def cheap_to_recompute(analysis: GraphAnalysis, body: Iterable[Node]) -> set[Node]:
    """Return the ops whose rows are recomputed rather than carried: few flops, at most one window from the entries.

    Examples are the first convolution of a network, from three channels to many, and a normalisation of a stored
    tensor. Carried rows cost a copy into a larger buffer.
    """
    costs: dict[Node, tuple[int, float]] = {}
    for node in body:
        size = sum(node.out(index).num_bytes() for index in range(len(node.outputs)))
        flops = find_rule(node).flops(analysis.view(node), 1) / max(size, 1)
        operands = [costs[t.node] for t in node.inputs if t.node in costs]
        windows = max((number for number, _ in operands), default=0) + _has_overlapping_windows(analysis, node)
        costs[node] = (windows, flops + sum(operand_flops for _, operand_flops in operands))
    return {node for node, (windows, flops) in costs.items() if windows <= 1 and flops <= MAX_RECOMPUTE_FLOPS_PER_BYTE}


def _has_overlapping_windows(analysis: GraphAnalysis, node: Node) -> bool:
    """Return whether neighbouring rows of an op's result share rows of an operand."""
    view = analysis.view(node)
    for axis, extent in enumerate(analysis.extents(node.out()) or ()):
        if extent is None or extent < 2:
            continue
        row = np.array([extent // 2 - 1])  # A row inside of the image: rules may look its operand rows up in a table.
        one, two = (find_rule(node).operand_rows_for_result(view, axis, Interval(row, row + size)) for size in (1, 2))
        for a, b in zip(one.needs, two.needs, strict=True):
            if a is not None and b is not None and 2 * a.size[0] > b.size[0]:
                return True
    return False


def row_axis(*grids: Grid) -> int:
    """Return the axis that the grids split, the first one if they split none.

    Raises:
        NotTileableError: If they split several axes.
    """
    split = {axis for grid in grids for axis, count in enumerate(grid.spatial) if count != 1}
    if len(split) > 1:
        shown = " and ".join(map(str, grids))
        raise NotTileableError(f'`halo="carry"` needs strips, tiles along one axis. Received: {shown} tiles')
    return min(split, default=0)
