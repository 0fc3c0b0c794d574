"""Plans the tile loops of a segment with barriers, in which every iteration gathers the rows that it needs.

A loop splits each tensor that it writes, and each operand of a reduction, over the extent of that tensor. So every
element is written once and counted once. The planner follows the rows that an iteration needs backwards through the
ops. Gradients are images like others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from rewriters.analysis.autodiff_roles import reads_shape_only
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.errors import NotTileableError
from rewriters.ir.graph import Node, Tensor, predecessors
from rewriters.ir.op_traits import is_gradient_kernel
from rewriters.rules.elementwise import Additive, Pointwise
from rewriters.rules.intervals import whole
from rewriters.rules.registry import AxisPlan, TileKind, find_rule
from rewriters.tiling.barrier_levels import BarrierLevels
from rewriters.tiling.checkpoint_selection import CheckpointSelection, LoopSpec
from rewriters.tiling.segment import Segment
from rewriters.tiling.tile_planner import Grid, Region, RowDemand, TileLoop

__all__: list[str] = []

LatestPlans = dict[LoopSpec, tuple[Grid, TileLoop]]
"""The latest plan of each loop, with the grid that was asked for; the plan's own grid may be coarser."""


def barrier_segment(
    analysis: GraphAnalysis,
    name: str,
    roles: BarrierLevels,
    storage: CheckpointSelection,
    checkpoints: set[Tensor] | None = None,
) -> Segment:
    """Return the tiled ops and the reductions of a graph as one segment.

    Args:
        analysis: Analysis of the graph.
        name: Name of the segment.
        roles: Sorts and levels of its ops.
        storage: Tensors that exist in full size.
        checkpoints: As in `CheckpointSelection.loop_specs`.
    """
    nodes = analysis.sorted({*roles.tiled, *roles.sums})
    loop_specs = storage.loop_specs(checkpoints)
    results = {node.out(index) for node in nodes for index in range(len(node.outputs))}
    outer = [t for node in nodes for t in node.inputs if t not in results]
    entries = list(dict.fromkeys(t for t in outer if roles.kinds.get(t) is TileKind.FULL))
    backward = [node for node in nodes if node in analysis.backward]
    exits = sorted(storage.exits, key=lambda t: (analysis.position[t.node], t.index))
    return Segment(
        name=name,
        entries=[t for t in entries if t.node not in analysis.backward],
        exits=[t for t in exits if t.node not in analysis.backward],
        forward=[node for node in nodes if node not in analysis.backward],
        backward=backward,
        kinds=dict(roles.kinds),
        grad_entries=[t for t in entries if t.node in analysis.backward],
        grad_exits=[t for t in exits if t.node in analysis.backward],
        reductions=[node.out() for node in roles.sums],
        invariants=list(dict.fromkeys(t for t in outer if roles.kinds.get(t) is not TileKind.FULL)),
        stored=frozenset(storage.stored - storage.exits),
        loop_specs=loop_specs,
    )


class BarrierPlanner(RowDemand):
    """Plans the tile loops of one segment with barriers.

    Attributes:
        latest: Latest plan of each loop, because consecutive candidates of a search differ in few loops. Planners of
            segments with other checkpoints may share it.
    """

    def __init__(self, analysis: GraphAnalysis, segment: Segment) -> None:
        super().__init__(analysis, segment.kinds)
        self.segment = segment
        self.latest: LatestPlans = {}

    def tile_loops(self, grid_of: Callable[[LoopSpec], Grid]) -> list[TileLoop]:
        """Plan all loops, each with the grid that `grid_of` returns."""
        numbers = {True: 0, False: 0}
        tile_loops = []
        for spec in self.segment.loop_specs:
            numbers[spec.backward] += 1
            name, grid = f"{'backward' if spec.backward else 'forward'}{numbers[spec.backward]}", grid_of(spec)
            if spec not in self.latest or self.latest[spec][0] != grid:
                self.latest[spec] = grid, self.tile_loop(spec, grid, name)
            elif self.latest[spec][1].name != name:
                self.latest[spec] = grid, dataclasses.replace(self.latest[spec][1], name=name)
            tile_loops.append(self.latest[spec][1])
        return tile_loops

    def clamped(self, loop: LoopSpec, grid: Grid) -> Grid:
        """Return a grid with at most as many tiles as the smallest image that the loop splits has rows."""
        max_tiles = [min(extents) for extents in zip(*map(self.extents, self.split(loop)), strict=True)]
        return Grid(grid.batch, tuple(min(count, rows) for count, rows in zip(grid.spatial, max_tiles, strict=True)))

    def split(self, loop: LoopSpec) -> list[Tensor]:
        """Return the images that the loop splits: those that it writes and those that it reduces."""
        reduced = (self._reduced_operand(node) for node in loop.plain_sums)
        return [*loop.writes, *reduced, *(pair.image for pair in loop.moments)]

    def _reduced_operand(self, node: Node) -> Tensor:
        return node.inputs[find_rule(node).summed(self.analysis.view(node))]

    def tile_loop(self, loop: LoopSpec, grid: Grid, name: str = "") -> TileLoop:
        """Plan one loop with a grid, which is clamped."""
        grid = self.clamped(loop, grid)
        cells = {tensor: self.cells_of(tensor, grid) for tensor in self.split(loop)}
        images = [pair.image for pair in loop.moments]
        demand: dict[Tensor, Region] = {tensor: cells[tensor] for tensor in (*loop.writes, *images)}
        sums = loop.plain_sums
        sum_plans = {node: self._reduction_plan(node, grid, cells[self._reduced_operand(node)]) for node in sums}
        for node, plan in sum_plans.items():
            self.demand_operands(node, plan, demand)
        tiled = [node for node in loop.body if node not in sum_plans]
        regions, plans = self.operand_rows_for_result(tiled, demand, set(loop.reads), grid)
        plans.update(sum_plans)
        body = [node for node in loop.body if node in plans]
        reads, invariants = self.inputs(body, plans, set(loop.reads))
        reads += [image for image in images if image in loop.reads and image not in reads]
        reductions = [t for pair in loop.moments for t in (pair.mean, pair.variance)] + [node.out() for node in sums]
        return TileLoop(
            name=name,
            grid=grid,
            body=body,
            regions=regions,
            values=set(regions),
            plans=plans,
            writes=loop.writes,
            accumulates=[],
            reductions=reductions,
            reads=reads,
            invariants=invariants,
            cells=cells,
            backward=loop.backward,
            layouts=self.analysis.layouts,
            moments=loop.moments,
            replaces=loop.replaces,
            carries=self.carries,
            row_axis=self.row_axis,
        )

    def _reduction_plan(self, node: Node, grid: Grid, cell: Region) -> tuple[AxisPlan, ...]:
        """Return the plan of a reduction over the image; with a single tile the op runs unchanged, to the same bits."""
        view, rule = self.analysis.view(node), find_rule(node)
        if any(count != 1 for count in grid.spatial):
            return tuple(rule.operand_rows_for_reduction(view, axis, cell[axis]) for axis in range(len(cell)))
        images = [t if self.kinds.get(t) is TileKind.FULL else None for t in node.inputs]
        needs = [[None if t is None else whole(view.extent(t, axis), 1) for t in images] for axis in range(len(cell))]
        return tuple(AxisPlan(None, None, axis_needs) for axis_needs in needs)


def has_barriers(analysis: GraphAnalysis, roles: BarrierLevels) -> bool:
    """Return whether a tiled forward op depends on a reduction over the image, or reads all rows of an image."""
    if any(node not in analysis.backward and find_rule(node).read_whole(analysis.view(node)) for node in roles.tiled):
        return True
    sums, tiled = set(roles.sums), set(roles.tiled)
    dependent: set[Node] = set()
    for node in analysis.order:
        if node in analysis.backward or reads_shape_only(node):
            continue
        if any(other in sums or other in dependent for other in predecessors(node)):
            if node in tiled:
                return True
            dependent.add(node)
    return False


def has_nonlinear_gradients(analysis: GraphAnalysis, roles: BarrierLevels) -> bool:
    """Return whether a tiled op is nonlinear in gradients of images, as in a gradient of a gradient.

    Such an op needs true values of its rows. A segment without barriers has only the part of each gradient that comes
    from one tile.
    """
    gradients: set[Node] = set()
    for node in analysis.order:
        is_by_autodiff = node in analysis.backward or node in analysis.differentiated
        if (is_gradient_kernel(node.op) and is_by_autodiff) or any(t.node in gradients for t in node.inputs):
            gradients.add(node)
    return any(_is_nonlinear(analysis, roles, node, gradients) for node in roles.tiled if node in gradients)


def _is_nonlinear(analysis: GraphAnalysis, roles: BarrierLevels, node: Node, gradients: set[Node]) -> bool:
    """Return whether the rule of a tiled elementwise op refuses parts of the gradients of images that it reads.

    Sums are linear in all gradients together.
    """
    rule = find_rule(node)
    if not isinstance(rule, Pointwise) or isinstance(rule, Additive):
        return False
    kinds = [
        TileKind.PARTIAL if t.node in gradients and set(analysis.extents(t) or (1,)) != {1} else roles.kinds[t]
        for t in node.inputs
    ]
    try:
        rule.result_kind(analysis.view(node), kinds)
    except NotTileableError:
        return TileKind.PARTIAL in kinds
    return False
