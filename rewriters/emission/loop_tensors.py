"""Tensors that a loop receives and computes, in the order of the traced function's arguments and results."""

from __future__ import annotations

from rewriters.ir.graph import Tensor
from rewriters.ir.region_reads import loop_operand
from rewriters.tiling.segment import Segment
from rewriters.tiling.tile_planner import TileLoop

__all__: list[str] = []

BATCH_DIM = 0


def loop_input_tensors(tile_loop: TileLoop, segment: Segment) -> list[Tensor]:
    """Return the tensors that a loop receives, in the order of the traced function's arguments.

    They have full size, except for images in files, of which a loop that slices them receives the keys.
    """
    source = batch_source(tile_loop, segment)
    batch = [] if source is None else [source]
    saved = [carry.saved for carry in tile_loop.carries.values() if carry.saved is not None]
    sliced = map(loop_operand, [*batch, *tile_loop.reads])
    return list(dict.fromkeys([*sliced, *tile_loop.invariants, *saved]))


def batch_source(tile_loop: TileLoop, segment: Segment) -> Tensor | None:
    """Return a tensor whose leading dimension is the run-time batch size; `None` if no image enters the loop."""
    # The loop's own operands come first: entries of another device may have another batch size.
    for candidates in (tile_loop.reads, segment.entries):
        shaped = [(t.shape[BATCH_DIM], t) for t in candidates if t.shape]
        unknown = [t for size, t in shaped if size is None]
        if shaped:
            return unknown[0] if unknown else max(shaped, key=lambda pair: pair[0] or 0)[1]
    return None


def loop_output_tensors(tile_loop: TileLoop) -> list[Tensor]:
    """Return the tensors that a loop computes, in the order of the traced function's results."""
    return [*tile_loop.writes, *tile_loop.accumulates, *tile_loop.reductions, *(save.saved for save in tile_loop.saves)]
