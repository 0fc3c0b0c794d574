"""Rows of every tensor for every tile (SFT's tile and buffer sizes, section 4.3, Listing 4).

The listing walks the segment backwards from its terminal ops and widens each
input by scale and delta. Here the same walk works on exact intervals, per axis
and for all tiles at once, so borders, odd sizes and strides need no special
case, and it is made twice:

- forward values: backwards from what is wanted (exits, stored tensors, operands of
  backward ops) to the entries;
- gradients: forwards from the tiles of the incoming gradients to what they reach.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Container, Mapping, Sequence
from typing import Any

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.ir.graph import Node, Tensor
from rewriters.rules.axis_layouts import Layouts
from rewriters.rules.intervals import Interval, partition, whole
from rewriters.rules.registry import AxisPlan, TileKind, find_rule
from rewriters.tiling.barrier_levels import MomentPair
from rewriters.tiling.row_frontiers import CarriedRows, SavedRows
from rewriters.tiling.segment import Segment

__all__: list[str] = []

Region = tuple[Interval, ...]
"""One interval per spatial axis."""


def with_rows(region: Region, axis: int, rows: Interval) -> Region:
    """A region with other rows along one axis."""
    return (*region[:axis], rows, *region[axis + 1 :])


def covers(have: Region, need: Region) -> bool:
    """Whether every tile of one region lies inside the other."""
    return all(h.covers(n) for h, n in zip(have, need, strict=True))


class Halo(enum.Enum):
    """Where a tile has the rows from that it shares with its neighbours."""

    RECOMPUTE = "recompute"
    CARRY = "carry"


class IterationOrder(enum.Enum):
    """In which order a loop walks its tiles."""

    ASCENDING = 1
    DESCENDING = -1


@dataclasses.dataclass(frozen=True)
class Grid:
    """Numbers of tiles.

    Attributes:
        batch: Tiles along the batch, at most its size at run time.
        spatial: Tiles along each axis: height and width, or depth, height and width.
    """

    batch: int
    spatial: tuple[int, ...]

    @property
    def num_tiles(self) -> int:
        """Tiles in all."""
        total = self.batch
        for count in self.spatial:
            total *= count
        return total

    def __str__(self) -> str:
        text = "x".join(str(count) for count in self.spatial)
        return text if self.batch == 1 else f"{self.batch}x{text}"


@dataclasses.dataclass(eq=False)
class TileLoop:
    """One tile loop.

    Attributes:
        name: `"forward"` or `"backward"`; with a number where there are several.
        grid: Numbers of tiles.
        direction: Order of the tiles.
        body: Ops of one turn, in topological order.
        regions: Rows of each tensor that a turn holds.
        values: Tensors of which those rows are values; the others are gradients, that may be parts of sums.
        plans: Per op and axis, what it makes and what its operands must hold.
        writes: Tensors of which each turn writes its own cell of a whole one.
        accumulates: Gradients whose regions are added into a whole one.
        reductions: Tensors that are summed over the turns.
        reads: Whole tensors that are sliced.
        invariants: Tensors that are passed whole.
        cells: Partition of the written tensors.
        backward: Whether it belongs to the backward phase.
        layouts: Where the axes of its tensors lie.
        moments: Variances among the reductions that are computed together with their means.
        replaces: Operations of the graph that the loop stands for; others it runs again.
        carries: Tensors of which a turn has rows from its neighbour. The region of a forward value holds these and
            the ones it makes; that of a gradient those that it completes.
        saves: Carried rows that are kept for the backward loop.
        row_axis: The axis along which rows are carried.
        cache: What others derive from the phase; it lives as long.
    """

    name: str
    grid: Grid
    direction: IterationOrder
    body: list[Node]
    regions: dict[Tensor, Region]
    values: set[Tensor]
    plans: dict[Node, tuple[AxisPlan, ...]]
    writes: list[Tensor]
    accumulates: list[Tensor]
    reductions: list[Tensor]
    reads: list[Tensor]
    invariants: list[Tensor]
    cells: dict[Tensor, Region]
    backward: bool
    layouts: Layouts
    moments: list[MomentPair] = dataclasses.field(default_factory=list)
    replaces: list[Node] = dataclasses.field(default_factory=list)
    carries: dict[Tensor, CarriedRows] = dataclasses.field(default_factory=dict)
    saves: list[SavedRows] = dataclasses.field(default_factory=list)
    row_axis: int = 0
    cache: dict[Any, Any] = dataclasses.field(default_factory=dict, repr=False)


class RowDemand:
    """The rows that operands must hold, for operations whose results are wanted."""

    def __init__(self, analysis: GraphAnalysis, kinds: Mapping[Tensor, TileKind]) -> None:
        self.analysis = analysis
        self.kinds = kinds

    def extents(self, tensor: Tensor) -> tuple[int, ...]:
        """Rows along each axis."""
        extents = self.analysis.extents(tensor)
        assert extents is not None and None not in extents, tensor
        return extents  # type: ignore[return-value]

    def cells_of(self, tensor: Tensor, grid: Grid) -> Region:
        """The partition of a tensor into the cells of a grid. A tile beyond the last row gets that row once more."""
        return tuple(
            partition(extent, tiles).inside(extent)
            for extent, tiles in zip(self.extents(tensor), grid.spatial, strict=True)
        )

    def one_tile(self, node: Node, grid: Grid) -> tuple[AxisPlan, ...] | None:
        """With a single tile every op sees whole tensors and runs as it stands: the same bits come out."""
        view, rule = self.analysis.view(node), find_rule(node)
        if any(count != 1 for count in grid.spatial) or rule.moves_rows:
            return None
        plans = []
        rebuilt = rule.shape_operands(view)
        reduced = self.kinds[node.out()] is TileKind.REDUCED
        for axis in range(len(grid.spatial)):
            needs: list[Interval | None] = [
                whole(view.extent(t, axis), 1)
                if self.kinds[t] in (TileKind.FULL, TileKind.PARTIAL) and position not in rebuilt
                else None
                for position, t in enumerate(node.inputs)
            ]
            out = None if reduced else whole(view.extent(node.out(), axis), 1)
            plans.append(AxisPlan(out, out, needs))
        return tuple(plans)

    def want(self, node: Node, plan: tuple[AxisPlan, ...], wanted: dict[Tensor, Region]) -> None:
        """Add what an op needs of forward tensors, clipped to the image."""
        for position, tensor in enumerate(node.inputs):
            if self.kinds[tensor] is not TileKind.FULL or plan[0].needs[position] is None:
                continue
            extents = self.extents(tensor)
            need = tuple(
                p.needs[position].inside(extent)  # type: ignore[union-attr]
                for p, extent in zip(plan, extents, strict=True)
            )
            old = wanted.get(tensor)
            wanted[tensor] = need if old is None else tuple(a.hull(b) for a, b in zip(old, need, strict=True))

    def operand_rows_for_result(
        self, nodes: list[Node], wanted: dict[Tensor, Region], available: set[Tensor], grid: Grid
    ) -> tuple[dict[Tensor, Region], dict[Node, tuple[AxisPlan, ...]]]:
        """Regions of forward tensors, from the wanted ones back to what is available; unwanted ops are left out."""
        plans: dict[Node, tuple[AxisPlan, ...]] = {}
        for node in reversed(nodes):
            outs = [node.out(i) for i in range(len(node.outputs))]
            regions = [wanted[t] for t in outs if t in wanted and t not in available]
            if not regions:
                continue
            view, rule = self.analysis.view(node), find_rule(node)
            out = regions[0]
            for other in regions[1:]:
                out = tuple(a.hull(b) for a, b in zip(out, other, strict=True))
            made = self.made(node, out)
            plan = self.one_tile(node, grid) or tuple(
                rule.operand_rows_for_result(view, axis, made[axis]) for axis in range(len(grid.spatial))
            )
            plan, held = self.hold(node, out, plan, available)
            plans[node] = plan
            for tensor in outs:
                if tensor not in available:
                    wanted[tensor] = held
            self.want(node, plan, wanted)
        return wanted, plans

    def made(self, node: Node, wanted: Region) -> Region:
        """Of the rows that are wanted of an op's results, those that a tile makes itself."""
        del node
        return wanted

    def hold(
        self, node: Node, wanted: Region, plan: tuple[AxisPlan, ...], available: Container[Tensor]
    ) -> tuple[tuple[AxisPlan, ...], Region]:
        """The final plan of an op, and the rows of its results that a tile then holds, unless they are `available`."""
        del node, wanted, available
        return plan, tuple(p.kept for p in plan)  # type: ignore[misc]

    def inputs(
        self, body: Sequence[Node], plans: Mapping[Node, tuple[AxisPlan, ...]], available: Container[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Whole tensors that are sliced, and those that are passed whole."""
        made = {node.out(i) for node in body for i in range(len(node.outputs))}
        reads, invariants = dict[Tensor, None](), dict[Tensor, None]()
        for node in body:
            rebuilt = find_rule(node).shape_operands(self.analysis.view(node))
            for position, tensor in enumerate(node.inputs):
                if position in rebuilt:
                    continue
                if self.kinds[tensor] is TileKind.INVARIANT or plans[node][0].needs[position] is None:
                    if tensor not in made:
                        invariants[tensor] = None
                elif tensor not in made or tensor in available:
                    reads[tensor] = None
        return list(reads), list(invariants)


class TilePlanner(RowDemand):
    """Plans the phases of one segment."""

    def __init__(self, analysis: GraphAnalysis, segment: Segment) -> None:
        super().__init__(analysis, segment.kinds)
        self.segment = segment

    def tile_loops(self, grid: Grid, backward_grid: Grid) -> list[TileLoop]:
        """The tile loops of a segment without barriers: forward, then recompute and backward.

        There is no forward loop if nothing outside of the segment waits for it, such as a loss that is not returned.
        """
        result = [self.forward(grid)] if self.segment.exits or self.segment.stored else []
        if self.segment.backward:
            result.append(self.backward(backward_grid))
        return result

    def forward(self, grid: Grid) -> TileLoop:
        """Exits and stored tensors from the entries."""
        segment = self.segment
        writes = [*segment.exits, *sorted(segment.stored - set(segment.exits), key=lambda t: t.name)]
        cells = {tensor: self.cells_of(tensor, grid) for tensor in writes}
        regions, plans = self.operand_rows_for_result(segment.forward, dict(cells), set(segment.entries), grid)
        return self._tile_loop("forward", grid, segment.forward, regions, plans, writes, [], [], cells)

    def backward(self, grid: Grid) -> TileLoop:
        """Gradients from the incoming ones, forward values recomputed as far as needed."""
        segment = self.segment
        gradients = [n for n in segment.backward if segment.kinds[n.out()] is not TileKind.FULL]
        derived = [n for n in segment.backward if segment.kinds[n.out()] is TileKind.FULL]
        cells = {tensor: self.cells_of(tensor, grid) for tensor in segment.grad_entries}
        regions, plans = self._support(gradients, dict(cells), grid)
        wanted: dict[Tensor, Region] = {}
        for node in gradients:
            self.want(node, plans[node], wanted)
        full, full_plans = self.operand_rows_for_result([*segment.forward, *derived], wanted, segment.available, grid)
        regions.update(full)
        plans.update(full_plans)
        return self._tile_loop(
            "backward",
            grid,
            [*segment.forward, *segment.backward],
            regions,
            plans,
            [],
            segment.grad_exits,
            segment.reductions,
            {},
        )

    def _support(
        self, nodes: list[Node], regions: dict[Tensor, Region], grid: Grid
    ) -> tuple[dict[Tensor, Region], dict[Node, tuple[AxisPlan, ...]]]:
        """Regions of gradients, following them from the incoming ones."""
        plans: dict[Node, tuple[AxisPlan, ...]] = {}
        for node in nodes:
            view, rule = self.analysis.view(node), find_rule(node)
            parts = [regions.get(t) if self.segment.kinds[t] is TileKind.PARTIAL else None for t in node.inputs]
            plan = self.one_tile(node, grid) or tuple(
                rule.result_rows_from_operands(view, axis, [None if p is None else p[axis] for p in parts])
                for axis in range(len(grid.spatial))
            )
            plans[node] = plan
            if self.segment.kinds[node.out()] is TileKind.PARTIAL:
                reached = self.reached(node, plan)
                regions.update((node.out(index), reached) for index in range(len(node.outputs)))
        return regions, plans

    def reached(self, node: Node, plan: tuple[AxisPlan, ...]) -> Region:
        """The rows of a gradient that a tile holds."""
        del node
        return tuple(p.kept for p in plan)  # type: ignore[misc]

    def _tile_loop(
        self,
        name: str,
        grid: Grid,
        nodes: list[Node],
        regions: dict[Tensor, Region],
        plans: dict[Node, tuple[AxisPlan, ...]],
        writes: list[Tensor],
        accumulates: list[Tensor],
        reductions: list[Tensor],
        cells: dict[Tensor, Region],
    ) -> TileLoop:
        body = [node for node in nodes if node in plans]
        available = self.segment.available if name == "backward" else set[Tensor]()
        reads, invariants = self.inputs(body, plans, available)
        values = {t for t in regions if self.segment.kinds[t] is TileKind.FULL}
        return TileLoop(
            name,
            grid,
            IterationOrder.ASCENDING,
            body,
            regions,
            values,
            plans,
            writes,
            accumulates,
            reductions,
            reads,
            invariants,
            cells,
            backward=name == "backward",
            layouts=self.analysis.layouts,
            replaces=self.segment.backward if name == "backward" else self.segment.forward,
        )
