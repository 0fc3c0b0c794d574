"""Max and average pooling and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from rewriters.errors import NotTileableError
from rewriters.ir.graph import Tensor
from rewriters.rules.axis_layouts import Anchor, AxisMap
from rewriters.rules.convolution import padding_before
from rewriters.rules.elementwise import require_format, sides_by_format, spatial_dims
from rewriters.rules.intervals import Interval, Window
from rewriters.rules.registry import AxisPlan, Emitter, OpView, Rule, TileKind, tiling_rule

__all__: list[str] = []


class Pooling(Rule):
    """Geometry shared by all pools; `large` and `small` name the sides."""

    def large(self, op: OpView) -> Tensor:
        """Return the side that windows slide over."""
        return op.node.inputs[0]

    def small(self, op: OpView) -> Tensor:
        """Return the side with one row per window."""
        return op.node.out()

    def window(self, op: OpView, axis: int) -> Window:
        """Return the geometry along one axis."""
        dim = spatial_dims(op.node, len(self.large(op).shape or ()))[axis]
        kernel, stride = op.attr_ints("ksize")[dim], op.attr_ints("strides")[dim]
        rows = op.extent(self.large(op), axis)
        pad = padding_before(op.node, dim, rows, kernel, stride)
        return Window(kernel, stride, 1, pad, rows, op.extent(self.small(op), axis))

    def windows(self, op: OpView) -> list[Window]:
        """Return the geometry along all axes."""
        return [self.window(op, axis) for axis in op.axes(self.large(op))]

    def anchors(self, op: OpView) -> list[Anchor]:
        """Anchor both sides by the data format."""
        sides = [op.node.inputs[position] for position in self.data(op)]
        return sides_by_format(op.node, [*sides, op.node.out()])

    def links(self, op: OpView) -> list[AxisMap]:
        """Return no links: both sides are anchored."""
        return []

    def check(self, op: OpView) -> None:
        """Refuse pools over batch or channels and other layouts."""
        require_format(op, [self.large(op), self.small(op)])
        image = spatial_dims(op.node, len(op.attr_ints("ksize")))
        for name in ("ksize", "strides"):
            sizes = op.attr_ints(name)
            if any(size != 1 for dim, size in enumerate(sizes) if dim not in image):
                raise NotTileableError(f"pooling over batch or channels ({name}={sizes})")

    def valid(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Run the op with VALID padding on operands that are padded already."""
        if emitter.is_whole(op.node):
            return emitter.clone(op.node, operands)
        extra: dict[str, Any] = {"explicit_paddings": []} if "explicit_paddings" in op.node.attrs else {}
        return emitter.clone(op.node, operands, padding="VALID", **extra)


class Pool(Pooling):
    """Forward pooling."""

    def data(self, op: OpView) -> list[int]:
        """Return the image."""
        return [0]

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return `FULL` for forward values."""
        self.check(op)
        if kinds[0] is not TileKind.FULL:
            raise NotTileableError(f"{op.node.op} of a gradient")
        return TileKind.FULL

    def operand_rows_for_result(self, op: OpView, axis: int, out: Interval) -> AxisPlan:
        """Require the rows below the windows `out`."""
        return AxisPlan(out, out, [self.window(op, axis).rows_covered(out)])


@tiling_rule("MaxPool", "MaxPool3D")
class MaxPool(Pool):
    """Max pooling, whose padding is the lowest number."""

    fill = "lowest"

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Run without padding, which is part of the operand."""
        return self.valid(emitter, op, operands)


@tiling_rule("MaxPoolGrad", "MaxPool3DGrad")
class MaxPoolGrad(Pooling):
    """Gradient of max pooling. Operands: input, output, gradient of the output.

    Ties are resolved as in the full-size op. The output is recomputed from the input, which exists in any case: it need
    not be checkpointed, and oneDNN has a fused kernel for a maximum and its gradient in one place, which takes a
    hundredth of the time in 3-D.
    """

    def shape_operands(self, op: OpView) -> list[int]:
        """Return the output, which `emit` recomputes."""
        return [1]

    def data(self, op: OpView) -> list[int]:
        """Return all three operands."""
        return [0, 1, 2]

    def small(self, op: OpView) -> Tensor:
        """Return the side of the output gradient."""
        return op.node.inputs[2]

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return `PARTIAL`: the op is linear in the gradient alone."""
        self.check(op)
        if kinds[0] is not TileKind.FULL or kinds[1] is not TileKind.FULL or kinds[2] is not TileKind.PARTIAL:
            raise NotTileableError(f"{op.node.op} needs forward values and one gradient")
        return TileKind.PARTIAL

    def result_kind_gathered(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return `FULL` for three images."""
        self.check(op)
        if any(kind is not TileKind.FULL for kind in kinds):
            raise NotTileableError(f"{op.node.op} needs three images")
        return TileKind.FULL

    def operand_rows_for_result(self, op: OpView, axis: int, out: Interval) -> AxisPlan:
        """Require the windows that overlap rows `out`, and all rows below these."""
        window = self.window(op, axis)
        small = window.windows_overlapping(out)
        computed = window.rows_covered(small)
        return AxisPlan(out, computed, [computed, None, small])

    def operand_fill(self, op: OpView, position: int) -> float | str:
        """Pad the input as in `MaxPool`."""
        return "lowest" if position == 0 else 0.0

    def result_rows_from_operands(self, op: OpView, axis: int, parts: Sequence[Interval | None]) -> AxisPlan:
        """Plan for all rows that the gradient's windows cover."""
        window = self.window(op, axis)
        small = parts[2]
        assert small is not None
        rows = window.rows_covered(small)
        return AxisPlan(rows.clip(window.in_extent), rows, [rows, None, small])

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Run without padding, which is part of the operands."""
        attrs = op.node.attrs
        padding = "VALID" if not emitter.is_whole(op.node) else attrs["padding"].s.decode()
        explicit = {} if padding != "EXPLICIT" else {"explicit_paddings": list(attrs["explicit_paddings"].list.i)}
        pool = tf.raw_ops.MaxPool3D if op.node.op == "MaxPool3DGrad" else tf.raw_ops.MaxPool
        output = pool(
            input=operands[0],
            ksize=op.attr_ints("ksize"),
            strides=op.attr_ints("strides"),
            padding=padding,
            data_format=attrs["data_format"].s.decode(),
            **explicit,
        )
        return self.valid(emitter, op, [operands[0], output, operands[2]])


def tap_counts(window: Window) -> np.ndarray:
    """Return the taps of each window inside the image: the divisor of `SAME` average pooling."""
    first = np.arange(window.out_extent) * window.stride - window.pad
    return np.minimum(first + window.kernel, window.in_extent) - np.maximum(first, 0)


def rescaled(emitter: Emitter, op: OpView, position: int | None, value: Any, windows: Sequence[Window]) -> Any:
    """Replace the divisor of VALID, the full window, by the number of taps inside the image."""
    for axis, window in enumerate(windows):
        factors = window.kernel / tap_counts(window)
        if np.any(factors != 1.0):
            value = value * emitter.axis_values(op.node, position, factors, axis, value.dtype)
    return value


@tiling_rule("AvgPool", "AvgPool3D")
class AvgPool(Pool):
    """Average pooling: the mean of the taps inside the image."""

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Average with zero padding, which adds nothing to the sum, then correct the divisor."""
        (value,) = self.valid(emitter, op, operands)
        if emitter.is_whole(op.node):
            return [value]
        return [rescaled(emitter, op, None, value, self.windows(op))]


@tiling_rule("AvgPoolGrad", "AvgPool3DGrad")
class AvgPoolGrad(Pooling):
    """Gradient of average pooling. Operands: shape of the input, gradient of the output."""

    def shape_operands(self, op: OpView) -> list[int]:
        """Return the shape operand."""
        return [0]

    def data(self, op: OpView) -> list[int]:
        """Return the gradient."""
        return [1]

    def large(self, op: OpView) -> Tensor:
        """Return the output."""
        return op.node.out()

    def small(self, op: OpView) -> Tensor:
        """Return the side of the gradient."""
        return op.node.inputs[1]

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return the kind of the gradient: the op is linear."""
        self.check(op)
        if kinds[1] is not TileKind.PARTIAL:
            raise NotTileableError(f"{op.node.op} of forward values")
        return TileKind.PARTIAL

    def result_kind_gathered(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return `FULL` for an image."""
        self.check(op)
        if kinds[1] is not TileKind.FULL:
            raise NotTileableError(f"{op.node.op} of a tensor that is the same for all tiles")
        return TileKind.FULL

    def operand_rows_for_result(self, op: OpView, axis: int, out: Interval) -> AxisPlan:
        """Require the windows that overlap rows `out`."""
        window = self.window(op, axis)
        small = window.windows_overlapping(out)
        return AxisPlan(out, window.rows_covered(small), [None, small])

    def result_rows_from_operands(self, op: OpView, axis: int, parts: Sequence[Interval | None]) -> AxisPlan:
        """Plan for all rows that the gradient's windows cover."""
        window = self.window(op, axis)
        small = parts[1]
        assert small is not None
        rows = window.rows_covered(small)
        return AxisPlan(rows.clip(window.in_extent), rows, [None, small])

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Rescale the gradient, then spread it evenly."""
        small = operands[1]
        large = op.node.out().shape
        assert large is not None
        if emitter.is_whole(op.node):
            return emitter.clone(op.node, [tf.stack([emitter.batch_size(small), *large[1:]]), small])
        windows = self.windows(op)
        small = rescaled(emitter, op, 1, small, windows)
        shape = tf.shape(small)
        sizes: list[Any] = [shape[0], *large[1:]]
        for dim, window in zip(spatial_dims(op.node, len(large)), windows, strict=True):
            sizes[dim] = (shape[dim] - 1) * window.stride + window.kernel
        return self.valid(emitter, op, [tf.stack(sizes), small])
