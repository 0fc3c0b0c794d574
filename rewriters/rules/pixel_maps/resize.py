"""Resizing, nearest and bilinear, and its gradients.

A kernel derives the source row of each row from the sizes of the full image. A tile has other sizes, so source rows and
weights are looked up in tables. These are computed as in the kernels, in float32.
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
    """Source rows of every row of the resized image, along one axis.

    Attributes:
        lower: First source row.
        upper: Second source row.
        weight: Weight of the second source row; float32.
    """

    lower: np.ndarray
    upper: np.ndarray
    weight: np.ndarray


def table(node: Node, nearest: bool, in_extent: int, out_extent: int) -> Table:
    """Return the table of an op, as in TensorFlow's `image_resizer_state.h` and `resize_nearest_neighbor_op.cc`."""
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
    """Base of resizing ops and their gradients."""

    def small(self, op: OpView) -> Tensor:
        """Return the image before resizing."""
        return op.node.inputs[0]

    def large(self, op: OpView) -> Tensor:
        """Return the image after resizing."""
        return op.node.out()

    def data(self, op: OpView) -> list[int]:
        """Return the image."""
        return [0]

    def shape_operands(self, op: OpView) -> list[int]:
        """Return the size operand."""
        return [1]

    def anchors(self, op: OpView) -> list[Anchor]:
        """Anchor both sides with channels last."""
        return sides_by_format(op.node, [op.node.inputs[0], op.node.out()])

    def links(self, op: OpView) -> list[AxisMap]:
        """Return no links: both sides are anchored."""
        return []

    def table(self, op: OpView, axis: int) -> Table:
        """Return the table along one axis."""
        nearest = op.node.op.startswith("ResizeNearest")
        return table(op.node, nearest, op.extent(self.small(op), axis), op.extent(self.large(op), axis))

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return the kind of the operand; a gradient must be of a real type."""
        require_format(op, [self.small(op), self.large(op)])
        for axis in op.axes(op.node.out()):
            self.table(op, axis)
        if kinds[0] is TileKind.PARTIAL and not op.node.inputs[0].dtype.is_floating:
            raise NotTileableError("a gradient of an integer dtype")
        return kinds[0]


@tiling_rule("ResizeNearestNeighbor", "ResizeBilinear")
class Resized(Resize):
    """Resizing. Operands: image, size."""

    def operand_rows_for_result(self, op: OpView, axis: int, out: Interval) -> AxisPlan:
        """Require the source rows of `out`."""
        where = self.table(op, axis)
        return AxisPlan(out, out, [Interval(where.lower[out.lo], where.upper[out.hi - 1] + 1), None])

    def result_rows_from_operands(self, op: OpView, axis: int, parts: Sequence[Interval | None]) -> AxisPlan:
        """Plan for the rows whose source rows hold the gradient."""
        assert parts[0] is not None
        return self.operand_rows_for_result(op, axis, _coming_from(self.table(op, axis), parts[0]))

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Interpolate along the width first, as the kernel does."""
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
    """Return the rows of the resized image with source rows in `rows`; at least one."""
    last = len(where.lower)
    lo = np.minimum(np.searchsorted(where.upper, rows.lo, "left"), last - 1)
    hi = np.searchsorted(where.lower, rows.hi, "left")
    return Interval(lo, np.maximum(hi, lo + 1))


@tiling_rule("ResizeNearestNeighborGrad", "ResizeBilinearGrad")
class ResizedGrad(Resize):
    """Gradient of resizing. Operands: gradient of the resized image; size, or the image before."""

    def small(self, op: OpView) -> Tensor:
        """Return the output."""
        return op.node.out()

    def large(self, op: OpView) -> Tensor:
        """Return the side of the gradient."""
        return op.node.inputs[0]

    def operand_rows_for_result(self, op: OpView, axis: int, out: Interval) -> AxisPlan:
        """Require the resized rows whose source rows are in `out`."""
        return AxisPlan(out, out, [_coming_from(self.table(op, axis), out), None])

    def result_rows_from_operands(self, op: OpView, axis: int, parts: Sequence[Interval | None]) -> AxisPlan:
        """Plan for the source rows of the gradient, which is needed with the rows around it, which are zero."""
        where, rows = self.table(op, axis), parts[0]
        assert rows is not None
        return self.operand_rows_for_result(op, axis, Interval(where.lower[rows.lo], where.upper[rows.hi - 1] + 1))

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Sum the weighted resized rows of every source row.

        As in the kernels products have the gradient's type, and sums the result's.
        """
        parts = [operands[0]]
        for axis in op.axes(op.node.out()):
            parts = [moved for part in parts for moved in self._weighted(emitter, op, part, axis)]
        return [functools.reduce(operator.add, [tf.cast(part, op.node.out().dtype) for part in parts])]

    def _weighted(self, emitter: Emitter, op: OpView, value: Any, axis: int) -> Iterator[Any]:
        """Yield the first, second, ... resized row of each source row, with its weight."""
        dim = op.dim(op.node.out(), axis)
        for rows, weights in _contributions(self.table(op, axis), op.extent(op.node.out(), axis)):
            held = emitter.axis_positions(op.node, 0, rows, axis)
            part = tf.gather(value, tf.clip_by_value(held, 0, tf.shape(value)[dim] - 1), axis=dim)
            yield part * emitter.axis_values(op.node, None, weights, axis, value.dtype)


def _contributions(where: Table, rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return index and weight of the first, second, ... resized row of each source row."""
    rows_of: list[list[tuple[int, float]]] = [[] for _ in range(rows)]
    for at, (lower, upper, weight) in enumerate(zip(where.lower, where.upper, where.weight, strict=True)):
        rows_of[lower].append((at, float(np.float32(1) - weight)))
        if weight:
            rows_of[upper].append((at, float(weight)))
    most = max(map(len, rows_of))
    padded = [
        [*contributions, *[(contributions[-1][0] if contributions else 0, 0.0)] * (most - len(contributions))]
        for contributions in rows_of
    ]
    return [
        (
            np.array([contributions[number][0] for contributions in padded]),
            np.array([contributions[number][1] for contributions in padded]),
        )
        for number in range(most)
    ]
