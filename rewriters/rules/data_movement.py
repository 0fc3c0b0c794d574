"""Ops that move pixels: pad, concatenate and split over channels, transpose."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import tensorflow as tf

from rewriters.errors import NotTileableError
from rewriters.ir.static_values import constant
from rewriters.rules.axis_layouts import AxisMap
from rewriters.rules.elementwise import Pointwise, identity, lie_alike
from rewriters.rules.intervals import Interval, hull_of
from rewriters.rules.registry import AxisPlan, Emitter, OpView, Rule, TileKind, find_rule, tiling_rule
from rewriters.rules.reshape import Blocks

__all__: list[str] = []


def require_alike(op: OpView) -> None:
    """Refuse an op whose operand and result have their axes in different dimensions."""
    out = op.node.out()
    (operand,) = (op.node.inputs[position] for position in find_rule(op.node).data(op))
    if op.layout(out).batch_fold != op.layout(operand).batch_fold:
        raise NotTileableError("it folds pixels of an image into the batch, or unfolds them")
    for axis in op.axes(out):
        if op.dim(out, axis) != op.dim(operand, axis) and not op.extent(out, axis) == op.extent(operand, axis) == 1:
            raise NotTileableError("its result has another axis order than its operand")


def is_over_channels(op: OpView, dim: Any) -> bool:
    """Return whether a dimension of the output is neither batch nor axis."""
    out = op.node.out()
    rank = len(out.shape or ())
    return isinstance(dim, int) and dim % rank in op.layout(out).others(rank)


def paddings_of(op: OpView) -> list[list[int]]:
    """Return the rows of padding before and after each dimension: operand 1 of a padding op."""
    paddings = op.evaluate(op.node.inputs[1])
    if not isinstance(paddings, np.ndarray) or not all(isinstance(rows, (int, np.integer)) for rows in paddings.flat):
        raise NotTileableError("padding computed at run time")
    return [[int(rows) for rows in pair] for pair in paddings]


@tiling_rule("Pad", "PadV2")
class Pad(Blocks):
    """Constant padding. Over the image it is the fill value of the operand, and fitting the operand is the whole op."""

    def block(self, op: OpView, axis: int) -> Fraction:
        """Return 1: each row stays one row."""
        del op, axis
        return Fraction(1)

    def offset(self, op: OpView, axis: int) -> int:
        """Return minus the rows of padding before the image."""
        dim = op.dim(op.node.out(), axis)
        return 0 if dim is None else -paddings_of(op)[dim][0]

    def _value(self, op: OpView) -> float:
        if len(op.node.inputs) < 3:
            return 0.0
        value = constant(op.node.inputs[2].node)
        if value is None:
            raise NotTileableError("padding with a value computed at run time")
        return float(value)

    def operand_fill(self, op: OpView, position: int) -> float | str:
        """Return the constant of the padding."""
        return self._value(op)

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return the kind of the operand; a gradient may be padded with zeros only."""
        if paddings_of(op)[0] != [0, 0]:
            raise NotTileableError("padding of the batch")
        if self._value(op) != 0.0 and kinds[0] is TileKind.PARTIAL:
            raise NotTileableError("a gradient padded with a value other than zero")
        require_alike(op)
        return kinds[0]

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Pad the channels; the axes are padded already."""
        dims = op.layout(op.node.out()).dims
        left = [[0, 0] if dim in dims else pair for dim, pair in enumerate(paddings_of(op))]
        if not any(map(any, left)):
            return identity(operands)
        value = tf.constant(self._value(op), operands[0].dtype)
        return [tf.raw_ops.PadV2(input=operands[0], paddings=left, constant_values=value)]


@tiling_rule("ConcatV2")
class Concat(Pointwise):
    """Concatenation along the channels, of forward values or of gradients."""

    def data(self, op: OpView) -> list[int]:
        """Return all operands but the axis."""
        return list(range(len(op.node.inputs) - 1))

    def read_whole(self, op: OpView) -> list[int]:
        """Return nothing: each operand gives the rows of the tile."""
        del op
        return []

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return the kind of the operands; refuse a concatenation over the image or the batch."""
        if not is_over_channels(op, op.evaluate(op.node.inputs[-1])):
            raise NotTileableError("a concatenation along another axis than the channels")
        if not all(lie_alike(op, op.node.inputs[position]) for position in self.data(op)):
            raise NotTileableError("a concatenation of images with different axis orders")
        image = kinds[:-1]
        if TileKind.INVARIANT in image:
            raise NotTileableError("a concatenation of image data with a tensor that is the same for all tiles")
        if TileKind.PARTIAL in image and TileKind.FULL in image:
            raise NotTileableError("a concatenation of forward values and gradients")
        return image[0]


@tiling_rule("Split", "SplitV")
class Split(Rule):
    """Split along the channels; every output holds the rows of the operand."""

    cheap = True

    def data(self, op: OpView) -> list[int]:
        """Return the image (second operand of `Split`, first of `SplitV`)."""
        return [1 if op.node.op == "Split" else 0]

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return the kind of the operand: a split is linear."""
        axis = op.evaluate(op.node.inputs[0 if op.node.op == "Split" else 2])
        (position,) = self.data(op)
        if not is_over_channels(op, axis):
            raise NotTileableError("a split along another axis than the channels")
        require_alike(op)
        return kinds[position]

    def operand_rows_for_result(self, op: OpView, axis: int, out: Interval) -> AxisPlan:
        """Require rows `out` of the image."""
        needs: list[Interval | None] = [None] * len(op.node.inputs)
        needs[self.data(op)[0]] = out
        return AxisPlan(out, out, needs)

    def result_rows_from_operands(self, op: OpView, axis: int, parts: Sequence[Interval | None]) -> AxisPlan:
        """Plan for the rows of the gradient."""
        return self.operand_rows_for_result(op, axis, hull_of([part for part in parts if part is not None]))


@tiling_rule("Transpose")
class Transpose(Rule):
    """Transposition between channels first and channels last; the batch stays the first dimension."""

    cheap = True

    def data(self, op: OpView) -> list[int]:
        """Return the image."""
        return [0]

    def links(self, op: OpView) -> list[AxisMap]:
        """Link dimensions by the permutation."""
        order = op.evaluate.ints(op.node.inputs[1])
        if not order or order[0] != 0:
            return []
        return [AxisMap(op.node.inputs[0], op.node.out(), {old: new for new, old in enumerate(order)})]

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return the kind of the operand: a transposition is linear."""
        order = op.ints(1)
        source, out = op.layout(op.node.inputs[0]), op.layout(op.node.out())
        moved = tuple(None if dim is None else order.index(dim) for dim in source.dims)
        if order[0] != 0 or moved != out.dims:
            raise NotTileableError("a transposition of the batch or of image axes")
        return kinds[0]

    def operand_rows_for_result(self, op: OpView, axis: int, out: Interval) -> AxisPlan:
        """Require rows `out` of the image."""
        return AxisPlan(out, out, [out, None])

    def result_rows_from_operands(self, op: OpView, axis: int, parts: Sequence[Interval | None]) -> AxisPlan:
        """Plan for the rows of the gradient."""
        assert parts[0] is not None
        return self.operand_rows_for_result(op, axis, parts[0])
