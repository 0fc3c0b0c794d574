"""Convolutions: forward, transposed, and both gradients, dense and depthwise.

One geometry serves all. A convolution slides over its *large* side and has one row of its *small* side per window. Each
op is one of three:

- a map from large to small: the rows below the windows;
- a map from small to large: the rows that windows cover, as in the transposed convolution and the input gradient;
- a correlation of both sides: the filter gradient, a reduction over the image.

If one side is a gradient, its rows outside of the tile are zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from rewriters.errors import NotTileableError
from rewriters.ir.graph import Node, Tensor
from rewriters.rules.axis_layouts import Anchor, AxisMap
from rewriters.rules.elementwise import require_format, sides_by_format, spatial_dims
from rewriters.rules.intervals import Interval, Window
from rewriters.rules.registry import AxisPlan, Emitter, OpView, Rule, TileKind, tiling_rule

__all__: list[str] = []


def same_padding(in_extent: int, span: int, stride: int) -> int:
    """Return the rows of `SAME` padding before the first row (the odd one comes after the last)."""
    out = -(-in_extent // stride)
    return max((out - 1) * stride + span - in_extent, 0) // 2


def padding_before(node: Node, dim: int, in_extent: int, span: int, stride: int) -> int:
    """Return the rows of padding before the image along a dimension, by the op's `padding` attribute."""
    mode = node.attrs["padding"].s
    if mode == b"SAME":
        return same_padding(in_extent, span, stride)
    if mode == b"EXPLICIT":
        return int(node.attrs["explicit_paddings"].list.i[2 * dim])
    return 0


class Convolution(Rule):
    """Base of all convolutions: roles of the operands, geometry, kinds.

    Attributes:
        large: Operand on the large side, `None` if it is the output.
        small: Operand on the small side, `None` if it is the output.
        filter: Operand that is the filter, `None` if it is the output.
    """

    own_memory = True

    large: int | None = None
    small: int | None = None
    filter: int | None = None

    def data(self, op: OpView) -> list[int]:
        """Return the sides that are operands."""
        return [p for p in (self.large, self.small) if p is not None]

    def side(self, op: OpView, position: int | None) -> Tensor:
        """Return the tensor of one side."""
        return op.node.out() if position is None else op.node.inputs[position]

    def filter_rows(self, op: OpView, axis: int) -> int:
        """Return the taps of the filter along an axis."""
        shape = self.side(op, self.filter).shape
        if shape is None or shape[axis] is None:
            raise NotTileableError("the filter has an unknown shape")
        return int(shape[axis])  # type: ignore[arg-type]

    def window(self, op: OpView, axis: int) -> Window:
        """Return the geometry along one axis, from full-size shapes."""
        node = op.node
        dim = spatial_dims(node, len(self.side(op, self.large).shape or ()))[axis]
        stride = op.attr_ints("strides")[dim]
        dilation = (op.attr_ints("dilations") or [1] * (dim + 1))[dim]
        kernel = self.filter_rows(op, axis)
        rows = op.extent(self.side(op, self.large), axis)
        span = (kernel - 1) * dilation + 1
        pad = padding_before(node, dim, rows, span, stride)
        return Window(kernel, stride, dilation, pad, rows, op.extent(self.side(op, self.small), axis))

    def check(self, op: OpView, kinds: Sequence[TileKind]) -> None:
        """Refuse attributes that no convolution rule supports."""
        sides = [self.side(op, self.large), self.side(op, self.small)]
        require_format(op, sides)
        for axis in op.axes(sides[0]):
            self.window(op, axis)
        large, taps = sides[0].shape, self.side(op, self.filter).shape
        if len(op.attr_ints("strides")) != len(large or ()) or len(taps or ()) != len(large or ()):
            raise NotTileableError("its filter has another number of axes than the image")
        if self.filter is not None and kinds[self.filter] is not TileKind.INVARIANT:
            raise NotTileableError("its filter is computed from image data")

    def anchors(self, op: OpView) -> list[Anchor]:
        """Anchor both sides by the data format."""
        return sides_by_format(op.node, [self.side(op, self.large), self.side(op, self.small)])

    def links(self, op: OpView) -> list[AxisMap]:
        """Return no links: both sides are anchored."""
        return []

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return the kind of the operand: a map from one side to the other is linear."""
        self.check(op, kinds)
        (position,) = self.data(op)
        return kinds[position]

    def flops(self, op: OpView, batch: int) -> float:
        """Return two operations per tap, output channel and pixel of the small side; 0 if a size is unknown."""
        small, taps = self.side(op, self.small).shape or (), self.side(op, self.filter).shape or ()
        sizes = [*((small[dim] for dim in spatial_dims(op.node, len(small))) if small else [None]), *(taps or [None])]
        if None in sizes:
            return 0.0
        images = batch if small[0] is None else small[0]
        return 2.0 * images * math.prod(float(size or 0) for size in sizes)

    def weights(self, op: OpView) -> list[Tensor]:
        """Return the filter."""
        return [self.side(op, self.filter)]

    def cost_operand(self, op: OpView) -> int | None:
        """Return the side with one row per window."""
        return self.small

    def valid(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Run the op with VALID padding on operands that are padded already."""
        if emitter.is_whole(op.node):
            return emitter.clone(op.node, operands)
        return emitter.clone(op.node, operands, padding="VALID", explicit_paddings=[])


@tiling_rule("Conv2D", "Conv3D", "DepthwiseConv2dNative")
class LargeToSmall(Convolution):
    """Convolution, or gradient of a transposed one."""

    large, small, filter = 0, None, 1

    def operand_rows_for_result(self, op: OpView, axis: int, out: Interval) -> AxisPlan:
        """Require the rows below the windows `out`."""
        return AxisPlan(out, out, [self.window(op, axis).rows_covered(out), None])

    def result_rows_from_operands(self, op: OpView, axis: int, parts: Sequence[Interval | None]) -> AxisPlan:
        """Plan for the windows that overlap the gradient's rows; its other rows are zero."""
        window = self.window(op, axis)
        assert parts[0] is not None
        out = window.windows_overlapping(parts[0])
        return AxisPlan(out, out, [window.rows_covered(out), None])

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Run without padding, which is part of the operand."""
        return self.valid(emitter, op, operands)


@tiling_rule("Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput")
class SmallToLarge(Convolution):
    """Input gradient of a convolution, or transposed convolution."""

    large, small, filter = None, 2, 1

    def shape_operands(self, op: OpView) -> list[int]:
        """Return the operand that holds the size of the output."""
        return [0]

    def operand_rows_for_result(self, op: OpView, axis: int, out: Interval) -> AxisPlan:
        """Require the windows that overlap rows `out`."""
        window = self.window(op, axis)
        small = window.windows_overlapping(out)
        return AxisPlan(out, window.rows_covered(small), [None, None, small])

    def result_rows_from_operands(self, op: OpView, axis: int, parts: Sequence[Interval | None]) -> AxisPlan:
        """Plan for all rows that the windows of the gradient cover, inside the image."""
        window = self.window(op, axis)
        small = parts[2]
        assert small is not None
        rows = window.rows_covered(small)
        return AxisPlan(rows.clip(window.in_extent), rows, [None, None, small])

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Run with the size of the tile."""
        small = operands[2]
        large = op.node.out().shape
        assert large is not None
        sizes: list[Any] = [emitter.batch_size(small), *large[1:]]
        if not emitter.is_whole(op.node):
            shape = tf.shape(small)
            for axis, dim in enumerate(spatial_dims(op.node, len(large))):
                window = self.window(op, axis)
                sizes[dim] = (shape[dim] - 1) * window.stride + window.span
        return self.valid(emitter, op, [tf.stack(sizes), operands[1], small])


@tiling_rule("Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter")
class SidesToFilter(Convolution):
    """Filter gradient: a reduction over the image, one part per tile."""

    large, small, filter = 0, 2, None

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return `REDUCED`; one side must be a gradient, the other forward values."""
        self.check(op, kinds)
        if sorted(k.value for k in (kinds[0], kinds[2])) != ["full", "partial"]:
            raise NotTileableError("a filter gradient needs forward values on one side and a gradient on the other")
        return TileKind.REDUCED

    def result_kind_gathered(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return `REDUCED` for two sides of true values."""
        self.check(op, kinds)
        if TileKind.INVARIANT in (kinds[0], kinds[2]):
            raise NotTileableError("a filter gradient needs an image on both sides")
        return TileKind.REDUCED

    def summed(self, op: OpView) -> int:
        """Return the side with one row per window: each window counts once."""
        return 2

    def operand_rows_for_reduction(self, op: OpView, axis: int, cell: Interval) -> AxisPlan:
        """Require the windows of the cell and the rows below them."""
        return AxisPlan(None, None, [self.window(op, axis).rows_covered(cell), None, cell])

    def result_rows_from_operands(self, op: OpView, axis: int, parts: Sequence[Interval | None]) -> AxisPlan:
        """Plan for the windows that overlap the gradient, whichever side holds it."""
        window = self.window(op, axis)
        if parts[2] is not None:
            small = parts[2]
        else:
            assert parts[0] is not None
            small = window.windows_overlapping(parts[0])
        return AxisPlan(None, None, [window.rows_covered(small), None, small])

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Run with the size operand of the filter, which does not depend on the tile."""
        return self.valid(emitter, op, operands)
