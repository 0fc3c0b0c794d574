"""Mirroring: padding by reflection, its gradient, and reversal."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from rewriters.errors import NotTileableError
from rewriters.rules.data_movement import paddings_of, require_alike
from rewriters.rules.pixel_maps.row_tables import RowMap, RowTable
from rewriters.rules.registry import Emitter, OpView, TileKind, tiling_rule

__all__: list[str] = []


@functools.lru_cache(2**10)
def mirror_table(extent: int, before: int, after: int, offset: int) -> RowTable:
    """Return the map of `MirrorPad` along one axis.

    Args:
        extent: Rows of the image.
        before: Rows of padding before it.
        after: Rows of padding after it.
        offset: 1 for `REFLECT`, which does not repeat the row at the border, 0 for `SYMMETRIC`.
    """
    rows = np.arange(-before, extent + after)
    rows = np.where(rows < 0, offset - 1 - rows, rows)
    rows = np.where(rows >= extent, 2 * extent - 1 - offset - rows, rows)
    return RowTable(rows[None], None, extent)


@tiling_rule("MirrorPad", "MirrorPadGrad")
class MirrorPad(RowMap):
    """Padding by reflection, or its gradient. Operands: image, rows of padding."""

    def table(self, op: OpView, axis: int) -> RowTable:
        """Return the map of the padding, or the transposed map for the gradient."""
        is_gradient = op.node.op == "MirrorPadGrad"
        image = op.node.out() if is_gradient else op.node.inputs[0]
        dim = op.dim(image, axis)
        before, after = (0, 0) if dim is None else paddings_of(op)[dim]
        offset = int(op.node.attrs["mode"].s == b"REFLECT")
        table = mirror_table(op.extent(image, axis), before, after, offset)
        return table.transposed if is_gradient else table

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return the kind of the operand, because mirroring is linear."""
        if paddings_of(op)[0] != [0, 0]:
            raise NotTileableError("padding of the batch")
        require_alike(op)
        return kinds[0]

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Gather the rows along the axes; the op itself pads the channels."""
        paddings = paddings_of(op)
        if emitter.is_whole(op.node):
            return emitter.clone(op.node, [operands[0], paddings])
        value = self.mapped(emitter, op, operands[0])
        dims = op.layout(op.node.out()).dims
        channels = [[0, 0] if dim in dims else pair for dim, pair in enumerate(paddings)]
        return emitter.clone(op.node, [value, channels]) if any(map(any, channels)) else [value]


@tiling_rule("ReverseV2")
class Reverse(RowMap):
    """Reversal along axes and channels. Operands: image, dimensions."""

    def _dims(self, op: OpView) -> set[int]:
        """Return the reversed dimensions, counted from the front."""
        rank = len(op.node.out().shape or ())
        return {dim % rank for dim in op.ints(1)}

    def table(self, op: OpView, axis: int) -> RowTable:
        """Return the reversed rows, or the identity for another axis."""
        rows, dim = np.arange(op.extent(op.node.out(), axis)), op.dim(op.node.out(), axis)
        return RowTable(rows[None, ::-1] if dim in self._dims(op) else rows[None], None, len(rows))

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return the kind of the operand, because a reversal is linear."""
        if 0 in self._dims(op):
            raise NotTileableError("a reversal of the batch")
        require_alike(op)
        return kinds[0]

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Gather the rows along the axes, and reverse the channels."""
        dims = self._dims(op)
        if emitter.is_whole(op.node):
            return emitter.clone(op.node, [operands[0], sorted(dims)])
        channels = sorted(dims.difference(op.layout(op.node.out()).dims))
        value = self.mapped(emitter, op, operands[0])
        return [tf.reverse(value, channels) if channels else value]
