"""Selects the outputs of a tile loop: buffers, sums, reductions, and rows that are carried or saved."""

from __future__ import annotations

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.emission.loop_outputs import LoopOutput, MergedMoments, ReductionOutput, ScatterAddOutput, TiledOutput
from rewriters.emission.row_carries import CarriedState, SavedState
from rewriters.rules.registry import find_rule
from rewriters.tiling.tile_planner import TileLoop

__all__: list[str] = []


def outputs_of(analysis: GraphAnalysis, tile_loop: TileLoop) -> list[LoopOutput]:
    """Return the outputs of a loop, and the rows that it carries, each with its state variables."""
    outputs: list[LoopOutput] = [TiledOutput(tensor, tile_loop.cells[tensor]) for tensor in tile_loop.writes]
    outputs += [ScatterAddOutput(tensor, tile_loop.regions[tensor]) for tensor in tile_loop.accumulates]
    one_tile = tile_loop.grid.num_tiles == 1
    outputs += [MergedMoments(pair, tile_loop.cells[pair.image], one_tile) for pair in tile_loop.moments]
    merged = {tensor for pair in tile_loop.moments for tensor in (pair.mean, pair.variance)}
    for tensor in tile_loop.reductions:
        if tensor not in merged:
            rule, view = find_rule(tensor.node), analysis.view(tensor.node)
            per_image, cell = rule.per_image(view), None
            if rule.per_pixel(view):
                rows = tile_loop.cells[tensor.node.inputs[rule.summed(view)]]
                cell = list(zip(rule.result_dims(view), rows, strict=True))
            outputs.append(ReductionOutput(tensor, combination=rule.combined(view), per_image=per_image, cell=cell))
    outputs += [SavedState(save) for save in tile_loop.saves]
    for tensor, carry in tile_loop.carries.items():
        layout = analysis.layouts.of(tensor)
        assert layout is not None
        if carry.saved is None:
            outputs.append(
                CarriedState(tensor, dims=layout.dims, region=tile_loop.regions[tensor], axis=tile_loop.row_axis)
            )
    return outputs
