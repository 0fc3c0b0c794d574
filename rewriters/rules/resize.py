"""Images resized, nearest and bilinear, and the gradients.

A kernel finds out from the sizes of the whole image where a row comes from. A tile has others, so that the rows and
their weights are looked up in tables, made here as the kernels make them, in float32.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from rewriters.errors import NotTileableError
from rewriters.ir.graph import Node, Tensor
from rewriters.rules.axis_layouts import Anchor, AxisMap
from rewriters.rules.elementwise import require_format, sides_by_format
from rewriters.rules.intervals import Interval
from rewriters.rules.registry import AxisPlan, Emitter, OpView, Rule, TileKind, tiling_rule

__all__: list[str] = []


@dataclasses.dataclass(frozen=True)
class Table:
    """Where every row of the resized image comes from, along one axis.

    Attributes:
        lower: First row.
        upper: Second row.
        weight: Of the second row; float32.
    """

    lower: np.ndarray
    upper: np.ndarray
    weight: np.ndarray


def table(node: Node, nearest: bool, in_extent: int, out_extent: int) -> Table:
    """The table of an op of TensorFlow's `image_resizer_state.h` and `resize_nearest_neighbor_op.cc`."""
    one = np.float32(1)
    if node.attrs["align_corners"].b and out_extent > 1:
        scale = np.float32(in_extent - 1) / np.float32(out_extent - 1)
    else:
        scale = np.float32(in_extent) / np.float32(out_extent)
    rows = np.arange(out_extent).astype(np.float32)
    half = node.attrs["half_pixel_centers"].b
    if nearest:
        at = (rows + np.float32(0.5)) * scale if half else rows * scale
        near = np.floor(at + np.float32(0.5)) if node.attrs["align_corners"].b else np.floor(at)
        lower = np.clip(near, 0, in_extent - 1).astype(np.int64)
        return Table(lower, lower, np.zeros(out_extent, np.float32))
    at = (rows + np.float32(0.5)) * scale - np.float32(0.5) if half else rows * scale
    below = np.floor(at)
    lower = np.maximum(below, 0).astype(np.int64)
    upper = np.minimum(np.ceil(at), in_extent - one).astype(np.int64)
    return Table(lower, upper, (at - below).astype(np.float32))


class Resize(Rule):
    """Rows come from where the table says; shared by the ops and their gradients."""

    def small(self, op: OpView) -> Tensor:
        """The image before resizing."""
        return op.node.inputs[0]

    def large(self, op: OpView) -> Tensor:
        """The image after resizing."""
        return op.node.out()

    def data(self, op: OpView) -> list[int]:
        """The image."""
        return [0]

    def shape_operands(self, op: OpView) -> list[int]:
        """The size."""
        return [1]

    def anchors(self, op: OpView) -> list[Anchor]:
        """Channels last."""
        return sides_by_format(op.node, [op.node.inputs[0], op.node.out()])

    def links(self, op: OpView) -> list[AxisMap]:
        """None: both sides are known."""
        return []

    def table(self, op: OpView, axis: int) -> Table:
        """Along one axis."""
        nearest = op.node.op.startswith("ResizeNearest")
        return table(op.node, nearest, op.extent(self.small(op), axis), op.extent(self.large(op), axis))

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Linear, but a bilinear op computes in float32 whatever goes in."""
        require_format(op, [self.small(op), self.large(op)])
        for axis in op.axes(op.node.out()):
            self.table(op, axis)
        if kinds[0] is TileKind.PARTIAL and not op.node.inputs[0].dtype.is_floating:
            raise NotTileableError("a gradient that is no floating point number")
        return kinds[0]


@tiling_rule("ResizeNearestNeighbor", "ResizeBilinear")
class Resized(Resize):
    """Operands: image, size."""

    def operand_rows_for_result(self, op: OpView, axis: int, out: Interval) -> AxisPlan:
        """The rows that the wanted ones come from."""
        where = self.table(op, axis)
        return AxisPlan(out, out, [Interval(where.lower[out.lo], where.upper[out.hi - 1] + 1), None])

    def result_rows_from_operands(self, op: OpView, axis: int, parts: Sequence[Interval | None]) -> AxisPlan:
        """The rows that come from the gradient's."""
        assert parts[0] is not None
        return self.operand_rows_for_result(op, axis, _coming_from(self.table(op, axis), parts[0]))

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Along the width first, as the kernel does."""
        if emitter.is_whole(op.node):
            return emitter.clone(op.node, [operands[0], list(self.large(op).shape[1:3])])  # type: ignore[index]
        value = operands[0]
        bilinear = op.node.op == "ResizeBilinear"
        if bilinear:
            value = tf.cast(value, tf.float32)
        for axis in reversed(op.axes(op.node.out())):
            where, dim = self.table(op, axis), op.dim(op.node.out(), axis)
            first = tf.gather(value, emitter.axis_positions(op.node, 0, where.lower, axis), axis=dim)
            if not bilinear:
                value = first
                continue
            second = tf.gather(value, emitter.axis_positions(op.node, 0, where.upper, axis), axis=dim)
            weight = emitter.axis_values(op.node, None, where.weight, axis, tf.float32)
            value = first + (second - first) * weight
        return [value]


def _coming_from(where: Table, rows: Interval) -> Interval:
    """Rows of the resized image that come from `rows` of the other one; at least one."""
    last = len(where.lower)
    lo = np.minimum(np.searchsorted(where.upper, rows.lo, "left"), last - 1)
    hi = np.searchsorted(where.lower, rows.hi, "left")
    return Interval(lo, np.maximum(hi, lo + 1))


@tiling_rule("ResizeNearestNeighborGrad", "ResizeBilinearGrad")
class ResizedGrad(Resize):
    """Operands: gradient of the resized image; size, or the image before."""

    def small(self, op: OpView) -> Tensor:
        """The output."""
        return op.node.out()

    def large(self, op: OpView) -> Tensor:
        """The gradient's side."""
        return op.node.inputs[0]

    def operand_rows_for_result(self, op: OpView, axis: int, out: Interval) -> AxisPlan:
        """The rows that came from the wanted ones."""
        return AxisPlan(out, out, [_coming_from(self.table(op, axis), out), None])

    def result_rows_from_operands(self, op: OpView, axis: int, parts: Sequence[Interval | None]) -> AxisPlan:
        """The rows that the gradient's came from. It is needed with those around it, which are zero."""
        where, rows = self.table(op, axis), parts[0]
        assert rows is not None
        return self.operand_rows_for_result(op, axis, Interval(where.lower[rows.lo], where.upper[rows.hi - 1] + 1))

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Every pixel is the weighted sum of those that came from it, of which there are a few.

        As in the kernels products are of the gradient's type, and sums of the result's.
        """
        parts = [operands[0]]
        for axis in op.axes(op.node.out()):
            parts = [moved for part in parts for moved in self._weighted(emitter, op, part, axis)]
        return [functools.reduce(operator.add, [tf.cast(part, op.node.out().dtype) for part in parts])]

    def _weighted(self, emitter: Emitter, op: OpView, value: Any, axis: int) -> Iterator[Any]:
        """The first, second, ... row that came from each row, with its weight."""
        dim = op.dim(op.node.out(), axis)
        for rows, weights in _contributions(self.table(op, axis), op.extent(op.node.out(), axis)):
            held = emitter.axis_positions(op.node, 0, rows, axis)
            part = tf.gather(value, tf.clip_by_value(held, 0, tf.shape(value)[dim] - 1), axis=dim)
            yield part * emitter.axis_values(op.node, None, weights, axis, value.dtype)


def _contributions(where: Table, rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """For the first, second, ... resized row that comes from each row: which it is, and its weight."""
    found: list[list[tuple[int, float]]] = [[] for _ in range(rows)]
    for at, (lower, upper, weight) in enumerate(zip(where.lower, where.upper, where.weight, strict=True)):
        found[lower].append((at, float(np.float32(1) - weight)))
        if weight:
            found[upper].append((at, float(weight)))
    most = max(map(len, found))
    padded = [[*own, *[(own[-1][0] if own else 0, 0.0)] * (most - len(own))] for own in found]
    return [
        (np.array([own[number][0] for own in padded]), np.array([own[number][1] for own in padded]))
        for number in range(most)
    ]
