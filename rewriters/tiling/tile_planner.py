"""Plans tile loops: the rows of every tensor in every tile (SFT's tile and buffer sizes, section 4.3, Listing 4).

The listing walks a segment backwards from its terminal ops and widens each operand by scale and delta. Here the walk
works on exact intervals, for each axis and for all tiles at once, so that borders, odd sizes and strides are no special
cases. A segment takes two walks:

- forward values: backwards from the demanded tensors (exits, stored tensors, operands of backward ops) to the entries;
- gradients: forwards from the tiles of the incoming gradients to the outgoing ones.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Container, Mapping, Sequence

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.errors import NotTileableError
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
    """Return a region with other rows along one axis."""
    return (*region[:axis], rows, *region[axis + 1 :])


def covers(have: Region, need: Region) -> bool:
    """Return whether `have` contains `need` in every tile."""
    return all(h.covers(n) for h, n in zip(have, need, strict=True))


class Halo(enum.Enum):
    """Source of the rows that a tile shares with its neighbours."""

    RECOMPUTE = "recompute"
    CARRY = "carry"


class IterationOrder(enum.Enum):
    """Order in which a loop visits its tiles."""

    ASCENDING = 1
    DESCENDING = -1


@dataclasses.dataclass(frozen=True)
class Grid:
    """Numbers of tiles.

    Attributes:
        batch: Tiles along the batch; at run time at most the batch size.
        spatial: Tiles along each axis: height and width, or depth, height and width.
    """

    batch: int
    spatial: tuple[int, ...]

    @property
    def num_tiles(self) -> int:
        """Number of tiles of the full batch."""
        total = self.batch
        for count in self.spatial:
            total *= count
        return total

    def __str__(self) -> str:
        text = "x".join(str(count) for count in self.spatial)
        return text if self.batch == 1 else f"{self.batch}x{text}"


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class TileLoop:
    """A planned loop over the tiles of a grid.

    Attributes:
        name: `"forward"` or `"backward"`, followed by a number in a segment that has several loops of a kind.
        grid: Numbers of tiles.
        order: Order of the tiles.
        body: Ops of one iteration, in topological order.
        regions: Rows of each tensor that an iteration holds.
        values: Tensors of which an iteration holds values. The others are gradients, which may be partial sums.
        plans: For each op and axis, the rows that the op computes and the rows that its operands must hold.
        writes: Tensors of which each iteration writes its own cell of the full-size tensor.
        accumulates: Gradients whose regions are added into a full-size gradient.
        reductions: Tensors that are summed over the iterations.
        reads: Full-size tensors that an iteration slices.
        invariants: Tensors that every iteration reads in full.
        cells: Partition of the written tensors.
        backward: Whether the loop belongs to the backward phase.
        layouts: Spatial axes of its tensors.
        moments: Variances among the reductions that are computed together with their means.
        replaces: Ops of the graph that the loop replaces; the other ops of the body are recomputed.
        carries: Tensors of which an iteration receives rows from its neighbour. The region of a forward value holds
            the received and the computed rows, that of a gradient the rows that the iteration completes.
        saves: Carried rows that the forward loop saves for the backward loop.
        row_axis: The axis along which rows are carried.
    """

    name: str
    grid: Grid
    order: IterationOrder = IterationOrder.ASCENDING
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
    replaces: list[Node]
    carries: dict[Tensor, CarriedRows]
    saves: list[SavedRows] = dataclasses.field(default_factory=list)
    row_axis: int


class RowDemand:
    """Computes the rows that the operands of ops must hold, from the rows that are demanded of their results.

    Attributes:
        carries: Rows that the loop being planned carries from one iteration to the next. Only row planners fill it.
        row_axis: The axis along which rows are carried.
    """

    def __init__(self, analysis: GraphAnalysis, kinds: Mapping[Tensor, TileKind]) -> None:
        self.analysis = analysis
        self.kinds = kinds
        self.carries: dict[Tensor, CarriedRows] = {}
        self.row_axis = 0

    def extents(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the rows of a tensor along each axis."""
        extents = self.analysis.extents(tensor)
        assert extents is not None and None not in extents, tensor
        return extents  # type: ignore[return-value]

    def cells_of(self, tensor: Tensor, grid: Grid) -> Region:
        """Return the partition of a tensor into the cells of a grid; a tile beyond the last row repeats that row."""
        return tuple(
            partition(extent, tiles).inside(extent)
            for extent, tiles in zip(self.extents(tensor), grid.spatial, strict=True)
        )

    def untiled_plan(self, node: Node, grid: Grid) -> tuple[AxisPlan, ...] | None:
        """Return the plan of an op in a single tile, `None` for several tiles.

        The op reads full-size tensors and runs unchanged, so that its result has the same bits as in the original step.
        """
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

    def demand_operands(self, node: Node, plan: tuple[AxisPlan, ...], demand: dict[Tensor, Region]) -> None:
        """Add the rows that an op needs of forward tensors, clipped to the image, to `demand`."""
        for position, tensor in enumerate(node.inputs):
            if self.kinds[tensor] is not TileKind.FULL or plan[0].needs[position] is None:
                continue
            extents = self.extents(tensor)
            need = tuple(
                p.needs[position].inside(extent)  # type: ignore[union-attr]
                for p, extent in zip(plan, extents, strict=True)
            )
            other = demand.get(tensor)
            demand[tensor] = need if other is None else tuple(a.hull(b) for a, b in zip(other, need, strict=True))

    def operand_rows_for_result(
        self, nodes: list[Node], demand: dict[Tensor, Region], available: set[Tensor], grid: Grid
    ) -> tuple[dict[Tensor, Region], dict[Node, tuple[AxisPlan, ...]]]:
        """Return the regions of forward tensors and the plans of ops, from the demanded tensors back to available ones.

        Args:
            nodes: Ops in topological order. Those whose results nothing demands get no plan.
            demand: Demanded rows of some tensors. The method adds the rows of all others.
            available: Tensors that exist in full size.
            grid: Numbers of tiles.
        """
        plans: dict[Node, tuple[AxisPlan, ...]] = {}
        for node in reversed(nodes):
            results = [node.out(i) for i in range(len(node.outputs))]
            regions = [demand[t] for t in results if t in demand and t not in available]
            if not regions:
                continue
            view, rule = self.analysis.view(node), find_rule(node)
            region = regions[0]
            for other in regions[1:]:
                region = tuple(a.hull(b) for a, b in zip(region, other, strict=True))
            computed = self.computed_rows(node, region)
            plan = self.untiled_plan(node, grid) or tuple(
                rule.operand_rows_for_result(view, axis, computed[axis]) for axis in range(len(grid.spatial))
            )
            plan, held = self.held_rows(node, region, plan, available)
            plans[node] = plan
            for tensor in results:
                if tensor not in available:
                    demand[tensor] = held
            self.demand_operands(node, plan, demand)
        return demand, plans

    def computed_rows(self, node: Node, demanded: Region) -> Region:
        """Return the rows of an op's results that a tile computes itself."""
        del node
        return demanded

    def held_rows(
        self, node: Node, demanded: Region, plan: tuple[AxisPlan, ...], available: Container[Tensor]
    ) -> tuple[tuple[AxisPlan, ...], Region]:
        """Return the plan of an op, which a subclass may change, and the rows of its results that a tile keeps.

        Results that are `available` exist in full size.
        """
        del node, demanded, available
        return plan, tuple(p.kept for p in plan)  # type: ignore[misc]

    def inputs(
        self, body: Sequence[Node], plans: Mapping[Node, tuple[AxisPlan, ...]], available: Container[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the full-size tensors that a loop slices, and the tensors that it reads in full."""
        results = {node.out(i) for node in body for i in range(len(node.outputs))}
        reads, invariants = dict[Tensor, None](), dict[Tensor, None]()
        for node in body:
            rebuilt = find_rule(node).shape_operands(self.analysis.view(node))
            for position, tensor in enumerate(node.inputs):
                if position in rebuilt:
                    continue
                if self.kinds[tensor] is TileKind.INVARIANT or plans[node][0].needs[position] is None:
                    if tensor not in results:
                        invariants[tensor] = None
                elif tensor not in results or tensor in available:
                    reads[tensor] = None
        return list(reads), list(invariants)


class TilePlanner(RowDemand):
    """Plans the tile loops of one segment without barriers."""

    BACKWARD_ORDER = IterationOrder.ASCENDING

    def __init__(self, analysis: GraphAnalysis, segment: Segment) -> None:
        super().__init__(analysis, segment.kinds)
        self.segment = segment

    def tile_loops(self, grid: Grid, backward_grid: Grid) -> list[TileLoop]:
        """Plan the forward loop and the backward loop, which recomputes forward values, or the only loop of both.

        The plan has no forward loop if no op outside of the segment reads its exits, as with a loss that the step
        does not return. It has no backward loop if the segment has no backward ops.
        """
        if self.segment.one_loop:
            return [self.only_loop(backward_grid)]
        segment = self.segment
        loops = [self.forward(grid)] if segment.exits or segment.stored or segment.sums else []
        if segment.backward:
            loops.append(self.backward(backward_grid))
        return loops

    def forward(self, grid: Grid) -> TileLoop:
        """Plan the loop that computes exits and stored tensors from the entries."""
        cells = {tensor: self.cells_of(tensor, grid) for tensor in self.written()}
        demand = dict(cells)
        sums = self._sum_plans(grid, demand)
        return self.forward_loop(grid, cells, demand=demand, sums=sums)

    def written(self) -> list[Tensor]:
        """Return the tensors that the forward loop writes: exits, then stored tensors by name."""
        segment = self.segment
        return [*segment.exits, *sorted(segment.stored - set(segment.exits), key=lambda t: t.name)]

    def forward_loop(
        self,
        grid: Grid,
        cells: dict[Tensor, Region],
        *,
        demand: dict[Tensor, Region],
        saves: Sequence[SavedRows] = (),
        sums: Mapping[Node, tuple[AxisPlan, ...]] | None = None,
    ) -> TileLoop:
        """Build the forward loop.

        Args:
            grid: Numbers of tiles.
            cells: Cells of the written tensors.
            demand: Rows that an iteration must hold of some tensors. Becomes the regions of the loop.
            saves: Rows that the loop saves for the backward loop.
            sums: Plans of the reductions over the image.
        """
        segment, sums = self.segment, sums or {}
        regions, plans = self.operand_rows_for_result(segment.forward, demand, set(segment.entries), grid)
        plans.update(sums)
        body = [node for node in segment.forward if node in plans]
        reads, invariants = self.inputs(body, plans, set())
        return TileLoop(
            name="forward",
            grid=grid,
            body=body,
            regions=regions,
            values=self._values(regions),
            plans=plans,
            writes=list(cells),
            accumulates=[],
            reductions=[node.out() for node in sums],
            reads=reads,
            invariants=invariants,
            cells=cells,
            backward=False,
            layouts=self.analysis.layouts,
            replaces=segment.forward,
            carries=self.carries,
            saves=list(saves),
            row_axis=self.row_axis,
        )

    def backward(self, grid: Grid) -> TileLoop:
        """Plan the loop that computes gradients from the incoming ones, and recomputes the forward values it reads."""
        return self.backward_loop(grid, *self.backward_rows(grid))

    def only_loop(self, grid: Grid) -> TileLoop:
        """Plan the loop that computes exits, and gradients from the incoming ones."""
        segment = self.segment
        cells = {tensor: self.cells_of(tensor, grid) for tensor in segment.exits}
        demand = dict(cells)
        sums = self._sum_plans(grid, demand)
        regions, plans = self.backward_rows(grid, demand)
        loop = self.backward_loop(grid, regions, plans | sums)
        replaces = [*segment.forward, *segment.backward]
        reductions = [*(node.out() for node in sums), *segment.reductions]
        return dataclasses.replace(loop, writes=list(cells), cells=cells, reductions=reductions, replaces=replaces)

    def _sum_plans(self, grid: Grid, demand: dict[Tensor, Region]) -> dict[Node, tuple[AxisPlan, ...]]:
        """Return the plans of the reductions over the image, and add the rows that they need to `demand`."""
        sums = {node: self._sum_plan(node, grid) for node in self.segment.sums}
        for node, plan in sums.items():
            self.demand_operands(node, plan, demand)
        return sums

    def _sum_plan(self, node: Node, grid: Grid) -> tuple[AxisPlan, ...]:
        """Return the plan of a reduction of results over the image, to which each pixel contributes once."""
        view, rule = self.analysis.view(node), find_rule(node)
        image = node.inputs[rule.summed(view)]
        if any(tiles > rows for tiles, rows in zip(grid.spatial, self.extents(image), strict=True)):
            raise NotTileableError("there are more tiles than rows, and a sum would count some rows twice")
        cell = self.cells_of(image, grid)
        return self.untiled_plan(node, grid) or tuple(
            rule.operand_rows_for_reduction(view, axis, cell[axis]) for axis in range(len(cell))
        )

    def backward_rows(
        self, grid: Grid, written: Mapping[Tensor, Region] | None = None
    ) -> tuple[dict[Tensor, Region], dict[Node, tuple[AxisPlan, ...]]]:
        """Return the regions of the tensors and the plans of the ops of the backward loop.

        Args:
            grid: Numbers of tiles.
            written: Rows of forward tensors that an iteration computes in any case.
        """
        segment = self.segment
        gradients = [n for n in segment.backward if segment.kinds[n.out()] is not TileKind.FULL]
        derived = [n for n in segment.backward if segment.kinds[n.out()] is TileKind.FULL]
        cells = {tensor: self.cells_of(tensor, grid) for tensor in segment.grad_entries}
        regions, plans = self._support(gradients, cells, grid)
        demand = dict(written or {})
        for node in gradients:
            self.demand_operands(node, plans[node], demand)
        full, full_plans = self.operand_rows_for_result([*segment.forward, *derived], demand, segment.available, grid)
        return regions | full, plans | full_plans

    def backward_loop(
        self, grid: Grid, regions: dict[Tensor, Region], plans: dict[Node, tuple[AxisPlan, ...]]
    ) -> TileLoop:
        """Build the backward loop from the result of `backward_rows`."""
        segment = self.segment
        body = [node for node in (*segment.forward, *segment.backward) if node in plans]
        reads, invariants = self.inputs(body, plans, segment.available)
        return TileLoop(
            name="backward",
            grid=grid,
            order=self.BACKWARD_ORDER,
            body=body,
            regions=regions,
            values=self._values(regions),
            plans=plans,
            writes=[],
            accumulates=segment.grad_exits,
            reductions=segment.reductions,
            reads=reads,
            invariants=invariants,
            cells={},
            backward=True,
            layouts=self.analysis.layouts,
            replaces=segment.backward,
            carries=self.carries,
            row_axis=self.row_axis,
        )

    def _values(self, regions: Mapping[Tensor, Region]) -> set[Tensor]:
        return {tensor for tensor in regions if self.segment.kinds[tensor] is TileKind.FULL}

    def _support(
        self, nodes: list[Node], regions: dict[Tensor, Region], grid: Grid
    ) -> tuple[dict[Tensor, Region], dict[Node, tuple[AxisPlan, ...]]]:
        """Follow gradients from the incoming ones, whose `regions` are given; return all regions and the plans."""
        plans: dict[Node, tuple[AxisPlan, ...]] = {}
        for node in nodes:
            view, rule = self.analysis.view(node), find_rule(node)
            parts = [regions.get(t) if self.segment.kinds[t] is TileKind.PARTIAL else None for t in node.inputs]
            plan = self.untiled_plan(node, grid) or tuple(
                rule.result_rows_from_operands(view, axis, [None if p is None else p[axis] for p in parts])
                for axis in range(len(grid.spatial))
            )
            plans[node] = plan
            if self.segment.kinds[node.out()] is TileKind.PARTIAL:
                held = self.gradient_rows(node, plan)
                regions.update((node.out(index), held) for index in range(len(node.outputs)))
        return regions, plans

    def gradient_rows(self, node: Node, plan: tuple[AxisPlan, ...]) -> Region:
        """Return the rows of a gradient that a tile holds."""
        del node
        return tuple(p.kept for p in plan)  # type: ignore[misc]
