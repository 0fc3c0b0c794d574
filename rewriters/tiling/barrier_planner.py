"""Tile loops of a segment with barriers: every turn gathers the rows that its own part needs.

Each tensor that a loop writes, and each sum that it makes, is split over its *own* extent, so that every element is
written and counted once. What a turn needs for that is followed backwards through the operations, as forward values
are; gradients are images like others.
"""

from __future__ import annotations

from collections.abc import Callable

from rewriters.analysis.autodiff_roles import reads_shape_only
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.ir.graph import Node, Tensor, predecessors
from rewriters.rules.intervals import whole
from rewriters.rules.registry import AxisPlan, TileKind, find_rule
from rewriters.tiling.barrier_levels import BarrierLevels
from rewriters.tiling.checkpoint_selection import CheckpointSelection, LoopSpec
from rewriters.tiling.segment import Segment
from rewriters.tiling.tile_planner import Grid, Region, RowDemand, TileLoop

__all__: list[str] = []


def barrier_segment(
    analysis: GraphAnalysis,
    name: str,
    roles: BarrierLevels,
    storage: CheckpointSelection,
    kept: set[Tensor] | None = None,
) -> Segment:
    """The tiled operations and sums of a graph as one segment.

    Args:
        analysis: Of the graph.
        name: Of the segment.
        roles: Its operations.
        storage: What exists whole.
        kept: As for `CheckpointSelection.loop_specs`.
    """
    nodes = analysis.sorted({*roles.tiled, *roles.sums})
    loops = storage.loop_specs(kept)
    made = {node.out(index) for node in nodes for index in range(len(node.outputs))}
    outer = [t for node in nodes for t in node.inputs if t not in made]
    entries = list(dict.fromkeys(t for t in outer if roles.kinds.get(t) is TileKind.FULL))
    backward = [node for node in nodes if node in analysis.backward]
    exits = sorted(storage.exits, key=lambda t: (analysis.position[t.node], t.index))
    return Segment(
        name,
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
        loop_specs=loops,
    )


class BarrierPlanner(RowDemand):
    """Plans the phases of one segment with barriers."""

    def __init__(self, analysis: GraphAnalysis, segment: Segment) -> None:
        super().__init__(analysis, segment.kinds)
        self.segment = segment
        self._latest: dict[str, tuple[Grid, TileLoop]] = {}

    def tile_loops(self, grid_of: Callable[[LoopSpec], Grid]) -> list[TileLoop]:
        """One for each loop, with the tiles that `grid_of` gives it.

        Searches ask for nearly the same again and again: loops that have the tiles they had last time are the same.
        """
        numbers = {True: 0, False: 0}
        result = []
        for loop in self.segment.loop_specs:
            numbers[loop.backward] += 1
            name, grid = f"{'backward' if loop.backward else 'forward'}{numbers[loop.backward]}", grid_of(loop)
            if name not in self._latest or self._latest[name][0] != grid:
                self._latest[name] = grid, self.tile_loop(loop, grid, name)
            result.append(self._latest[name][1])
        return result

    def clamped(self, loop: LoopSpec, grid: Grid) -> Grid:
        """No more tiles than the smallest image that the loop writes or sums up has rows."""
        most = [min(extents) for extents in zip(*map(self.extents, self.split(loop)), strict=True)]
        return Grid(grid.batch, tuple(min(count, rows) for count, rows in zip(grid.spatial, most, strict=True)))

    def split(self, loop: LoopSpec) -> list[Tensor]:
        """Images of which each turn has its own part."""
        return [*loop.writes, *(self._summed(node) for node in loop.plain_sums), *(m.image for m in loop.moments)]

    def _summed(self, node: Node) -> Tensor:
        return node.inputs[find_rule(node).summed(self.analysis.view(node))]

    def tile_loop(self, loop: LoopSpec, grid: Grid, name: str = "") -> TileLoop:
        """The loop with `grid`, clamped."""
        grid = self.clamped(loop, grid)
        cells = {tensor: self.cells_of(tensor, grid) for tensor in self.split(loop)}
        wanted: dict[Tensor, Region] = {t: cells[t] for t in (*loop.writes, *(m.image for m in loop.moments))}
        sums = loop.plain_sums
        sum_plans = {node: self._part(node, grid, cells[self._summed(node)]) for node in sums}
        for node, plan in sum_plans.items():
            self.want(node, plan, wanted)
        tiled = [node for node in loop.body if node not in sum_plans]
        regions, plans = self.operand_rows_for_result(tiled, wanted, set(loop.reads), grid)
        plans.update(sum_plans)
        body = [node for node in loop.body if node in plans]
        reads, invariants = self.inputs(body, plans, set(loop.reads))
        reads += [m.image for m in loop.moments if m.image in loop.reads and m.image not in reads]
        reductions = [t for m in loop.moments for t in (m.mean, m.variance)] + [node.out() for node in sums]
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

    def _part(self, node: Node, grid: Grid, cell: Region) -> tuple[AxisPlan, ...]:
        """The plan of a sum over the image. With a single tile it runs as it stands: the same bits come out."""
        view, rule = self.analysis.view(node), find_rule(node)
        if any(count != 1 for count in grid.spatial):
            return tuple(rule.operand_rows_for_reduction(view, axis, cell[axis]) for axis in range(len(cell)))
        full = [self.kinds.get(t) is TileKind.FULL for t in node.inputs]
        return tuple(
            AxisPlan(
                None,
                None,
                [whole(view.extent(t, axis), 1) if f else None for t, f in zip(node.inputs, full, strict=True)],
            )
            for axis in range(len(cell))
        )


def has_barriers(analysis: GraphAnalysis, roles: BarrierLevels) -> bool:
    """Whether a forward operation on tiles waits for a sum over the image."""
    sums, tiled = set(roles.sums), set(roles.tiled)
    waits: set[Node] = set()
    for node in analysis.order:
        if node in analysis.backward or reads_shape_only(node):
            continue
        if any(other in sums or other in waits for other in predecessors(node)):
            if node in tiled:
                return True
            waits.add(node)
    return False
