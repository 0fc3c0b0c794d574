"""Bicubic resizing and its gradient.

A kernel derives source rows and weights from the sizes of the full image, so they are looked up in tables. These are
computed as in TensorFlow's `resize_bicubic_op.cc`, in float32.

R. G. Keys, "Cubic Convolution Interpolation for Digital Image Processing" (1981).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from rewriters.errors import NotTileableError
from rewriters.ir.graph import Tensor
from rewriters.rules.axis_layouts import Anchor, AxisMap
from rewriters.rules.elementwise import require_format, sides_by_format
from rewriters.rules.pixel_maps.row_tables import RowMap, RowTable
from rewriters.rules.registry import Emitter, OpView, TileKind, tiling_rule

__all__: list[str] = []

STEPS = 2**10
"""Fractions of a row at which the kernels tabulate the cubic."""


def cubic_weights(parameter: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the weights of a near and a far row, by their distance from 0 to 1, or from 1 to 2, in `STEPS`."""
    near = (np.arange(STEPS + 1) / STEPS).astype(np.float32).astype(np.float64)
    far = (near + 1).astype(np.float32).astype(np.float64)
    a = parameter
    near_weights = ((a + 2) * near - (a + 3)) * near * near + 1
    far_weights = ((a * far - 5 * a) * far + 8 * a) * far - 4 * a
    return near_weights.astype(np.float32), far_weights.astype(np.float32)


@functools.lru_cache(2**8)
def bicubic_table(in_extent: int, out_extent: int, align_corners: bool, half_pixel_centers: bool) -> RowTable:
    """Return the four source rows of every resized row, with their weights, along one axis.

    With half-pixel centers, rows outside of the image have no weight. Otherwise the row at the border stands for them.
    """
    if align_corners and in_extent > 1 and out_extent > 1:
        scale = np.float32(in_extent - 1) / np.float32(out_extent - 1)
    else:
        scale = np.float32(in_extent) / np.float32(out_extent)
    rows, half = np.arange(out_extent).astype(np.float32), np.float32(0.5)
    at = (rows + half) * scale - half if half_pixel_centers else rows * scale
    below = np.floor(at)
    step = np.rint((at - below) * np.float32(STEPS)).astype(np.int64)
    near, far = cubic_weights(-0.5 if half_pixel_centers else -0.75)
    weights = np.stack([far[step], near[step], near[STEPS - step], far[STEPS - step]])
    sources = below.astype(np.int64) + np.arange(-1, 3)[:, None]
    inside = np.clip(sources, 0, in_extent - 1)
    if half_pixel_centers:
        weights = np.where(sources == inside, weights, np.float32(0))
        total = functools.reduce(np.add, weights)
        scaled = np.abs(total) >= np.float32(1000) * np.finfo(np.float32).tiny
        weights = np.where(scaled, weights * (np.float32(1) / np.where(scaled, total, np.float32(1))), weights)
    return RowTable(inside, weights, in_extent)


@tiling_rule("ResizeBicubic", "ResizeBicubicGrad")
class ResizedBicubic(RowMap):
    """Resizing. Operands: image, size. Or its gradient: gradient of the resized image, image before."""

    cheap = False
    axes_in_order = True

    def _sides(self, op: OpView) -> tuple[Tensor, Tensor]:
        """Return the image before and after resizing."""
        sides = op.node.inputs[0], op.node.out()
        return sides if op.node.op == "ResizeBicubic" else (sides[1], sides[0])

    def anchors(self, op: OpView) -> list[Anchor]:
        """Anchor both sides with channels last."""
        return sides_by_format(op.node, self._sides(op))

    def links(self, op: OpView) -> list[AxisMap]:
        """Return no links: both sides are anchored."""
        return []

    def table(self, op: OpView, axis: int) -> RowTable:
        """Return the map along one axis."""
        small, large = self._sides(op)
        flags = op.node.attrs["align_corners"].b, op.node.attrs["half_pixel_centers"].b
        table = bicubic_table(op.extent(small, axis), op.extent(large, axis), *flags)
        return table if op.node.op == "ResizeBicubic" else table.transposed

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return the kind of the operand; a gradient must be of a real type."""
        require_format(op, self._sides(op))
        for axis in op.axes(op.node.out()):
            self.table(op, axis)
        if kinds[0] is TileKind.PARTIAL and not op.node.inputs[0].dtype.is_floating:
            raise NotTileableError("a gradient of an integer dtype")
        return kinds[0]

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Interpolate in the type of the result, along the height first, as the kernels do."""
        if emitter.is_whole(op.node) and op.node.op == "ResizeBicubic":
            return emitter.clone(op.node, [operands[0], list(self._sides(op)[1].shape[1:3])])  # type: ignore[index]
        return [self.mapped(emitter, op, tf.cast(operands[0], op.node.out().dtype))]
