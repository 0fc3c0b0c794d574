"""Tensors that a loop receives and computes, in the order of the traced function's arguments and results.

Most images that a loop slices are arguments of full size. An iteration reads or fills its own slice of two kinds:
images in files, and images that repeat a single number, as the gradient of a mean does.
"""

from __future__ import annotations

import numpy as np

from rewriters.ir.graph import Tensor
from rewriters.ir.op_traits import Trait, ops_with, traits_of
from rewriters.ir.region_reads import is_region_read
from rewriters.ir.static_values import constant
from rewriters.tiling.segment import Segment
from rewriters.tiling.tile_planner import TileLoop

__all__: list[str] = []

BATCH_DIM = 0

_ALIASES = ops_with(Trait.FORWARDS_BUFFER)
_REPEATS = ops_with(Trait.REPEATS)


def loop_operand(tensor: Tensor) -> Tensor:
    """Return the tensor that a loop receives in order to slice an image: keys of files, a number, or the image."""
    if is_region_read(tensor.node):
        return tensor.node.inputs[0]
    return repeated_number(tensor) or tensor


def repeated_number(tensor: Tensor) -> Tensor | None:
    """Return the tensor with a single entry that an image repeats; `None` for any other image."""
    node = tensor.node
    while node.op in _ALIASES and len(node.outputs) == 1 and node.inputs[0].dtype == tensor.dtype:
        node = node.inputs[0].node
    if node.op not in _REPEATS:
        return None
    (value,) = (operand for position, operand in enumerate(node.inputs) if position != traits_of(node.op).shape_operand)
    return value if value.shape is not None and all(size == 1 for size in value.shape) else None


def real_number(tensor: Tensor) -> np.ndarray | None:
    """Return the value of a constant real number without axes; `None` for any other tensor."""
    return constant(tensor.node) if tensor.shape == () and tensor.dtype.is_floating else None


def loop_input_tensors(tile_loop: TileLoop, segment: Segment) -> list[Tensor]:
    """Return the tensors that a loop receives, in the order of the traced function's arguments.

    Images that are sliced are replaced by their `loop_operand`.
    """
    source = batch_source(tile_loop, segment)
    batch = [] if source is None else [source]
    saved = [carry.saved for carry in tile_loop.carries.values() if carry.saved is not None]
    sliced = map(loop_operand, [*batch, *tile_loop.reads])
    return list(dict.fromkeys([*sliced, *tile_loop.invariants, *saved]))


def batch_source(tile_loop: TileLoop, segment: Segment) -> Tensor | None:
    """Return a tensor whose leading dimension is the run-time batch size; `None` if no image enters the loop."""
    # Entries of another device may have another batch size.
    devices = {node.device for node in tile_loop.body}
    local = [tensor for tensor in segment.entries if tensor.node.device in devices]
    for candidates in (tile_loop.reads, local, segment.entries):
        shaped = [(t.shape[BATCH_DIM], t) for t in candidates if t.shape and repeated_number(t) is None]
        unknown = [t for size, t in shaped if size is None]
        if shaped:
            return unknown[0] if unknown else max(shaped, key=lambda pair: pair[0] or 0)[1]
    return None


def loop_output_tensors(tile_loop: TileLoop) -> list[Tensor]:
    """Return the tensors that a loop computes, in the order of the traced function's results."""
    return [*tile_loop.writes, *tile_loop.accumulates, *tile_loop.reductions, *(save.saved for save in tile_loop.saves)]
