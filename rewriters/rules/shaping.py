"""Ops that move pixels without computing: pad, slice, concatenate and split over channels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from rewriters.errors import NotTileableError
from rewriters.intervals import Interval, hull_of
from rewriters.registry import SPATIAL_DIMS, AxisPlan, Emitter, Kind, OpView, Rule, tiling_rule
from rewriters.rules.elementwise import Pointwise, identity
from rewriters.values import constant

__all__: list[str] = []


class Shift(Rule):
    """The output is the input moved along the image; fitting the operand does all the work."""

    moves_rows = True
    cheap = True

    def rebuilt(self, op: OpView) -> list[int]:
        """Offsets."""
        return list(range(1, len(op.node.inputs)))

    def data(self, op: OpView) -> list[int]:
        """The image."""
        return [0]

    def offset(self, op: OpView, axis: int) -> int:
        """Input row of output row 0."""
        raise NotImplementedError

    def result(self, op: OpView, kinds: Sequence[Kind]) -> Kind:
        """Moving is linear."""
        for axis in range(len(SPATIAL_DIMS)):
            self.offset(op, axis)
        return kinds[0]

    def demand(self, op: OpView, axis: int, out: Interval) -> AxisPlan:
        """The moved rows; those outside of the image are padding."""
        needs: list[Interval | None] = [None] * len(op.node.inputs)
        needs[0] = out.shift(self.offset(op, axis))
        return AxisPlan(out, out, needs)

    def reach(self, op: OpView, axis: int, parts: Sequence[Interval | None]) -> AxisPlan:
        """The gradient's rows, moved; what falls outside of the output is cut."""
        assert parts[0] is not None
        extent = op.extent(op.node.out(), axis)
        out = parts[0].shift(-self.offset(op, axis)).clip(extent).nonempty(extent)
        return self.demand(op, axis, out)


@tiling_rule("Pad", "PadV2")
class Pad(Shift):
    """Constant padding; over the image it is the fill value of the operand."""

    def _paddings(self, op: OpView) -> list[list[int]]:
        paddings = constant(op.node.inputs[1].node)
        if paddings is None or paddings.shape != (4, 2):
            raise NotTileableError("padding computed at run time")
        return paddings.tolist()

    def offset(self, op: OpView, axis: int) -> int:
        """Minus the rows of padding before the image."""
        return -self._paddings(op)[SPATIAL_DIMS[axis]][0]

    def _value(self, op: OpView) -> float:
        if len(op.node.inputs) < 3:
            return 0.0
        value = constant(op.node.inputs[2].node)
        if value is None:
            raise NotTileableError("padding with a value computed at run time")
        return float(value)

    def operand_fill(self, op: OpView, position: int) -> float | str:
        """What the op pads with."""
        return self._value(op)

    def result(self, op: OpView, kinds: Sequence[Kind]) -> Kind:
        """A gradient can be padded with zeros only."""
        if self._paddings(op)[0] != [0, 0]:
            raise NotTileableError("padding of the batch")
        if self._value(op) != 0.0 and kinds[0] is Kind.PARTIAL:
            raise NotTileableError("a gradient padded with a value other than zero")
        return super().result(op, kinds)

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Only channels are left to pad."""
        before, after = self._paddings(op)[3]
        if before == after == 0:
            return identity(operands)
        value = tf.constant(self._value(op), operands[0].dtype)
        return [tf.raw_ops.PadV2(input=operands[0], paddings=[[0, 0]] * 3 + [[before, after]], constant_values=value)]


@tiling_rule("Slice")
class Slice(Shift):
    """A fixed window of the image and of the channels; the gradient of `Pad` and of a concatenation."""

    def offset(self, op: OpView, axis: int) -> int:
        """First row taken."""
        return op.ints(1)[SPATIAL_DIMS[axis]]

    def result(self, op: OpView, kinds: Sequence[Kind]) -> Kind:
        """The batch is taken whole."""
        if len(op.ints(1)) != 4:
            raise NotTileableError("a slice of a tensor that is not (batch, height, width, channels)")
        source, out = op.node.inputs[0].shape, op.node.out().shape
        if op.ints(1)[0] != 0 or source is None or out is None or source[0] != out[0]:
            raise NotTileableError("a slice of the batch")
        size = op.evaluate(op.node.inputs[2])
        sizes = op.evaluate.sizes
        whole = isinstance(size, tuple) and (size[0] == -1 or sizes.same(size[0], sizes.of(op.node.inputs[0])))
        if source[0] is None and not whole:
            raise NotTileableError("a slice of the batch by a size computed at run time")
        return super().result(op, kinds)

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Only channels are left to cut."""
        source, out = op.node.inputs[0].shape, op.node.out().shape
        assert source is not None and out is not None
        if source[3] == out[3]:
            return identity(operands)
        return [tf.slice(operands[0], [0, 0, 0, op.ints(1)[3]], [-1, -1, -1, out[3]])]


@tiling_rule("ConcatV2")
class Concat(Pointwise):
    """Along the channels, all forward values or all gradients."""

    def data(self, op: OpView) -> list[int]:
        """All but the axis."""
        return list(range(len(op.node.inputs) - 1))

    def result(self, op: OpView, kinds: Sequence[Kind]) -> Kind:
        """Concatenation over the image or the batch is refused."""
        axis = op.evaluate(op.node.inputs[-1])
        shape = op.node.out().shape
        if axis not in (3, -1) or shape is None or len(shape) != 4:
            raise NotTileableError("a concatenation along another axis than the channels")
        image = kinds[:-1]
        if Kind.INVARIANT in image:
            raise NotTileableError("a concatenation of image data with a tensor that is the same for all tiles")
        if Kind.PARTIAL in image and Kind.FULL in image:
            raise NotTileableError("a concatenation of forward values and gradients")
        return image[0]


@tiling_rule("Split", "SplitV")
class Split(Rule):
    """Along the channels; every output holds the same rows."""

    cheap = True

    def data(self, op: OpView) -> list[int]:
        """The image (second operand of `Split`, first of `SplitV`)."""
        return [1 if op.node.op == "Split" else 0]

    def result(self, op: OpView, kinds: Sequence[Kind]) -> Kind:
        """Splitting is linear."""
        axis = op.evaluate(op.node.inputs[0 if op.node.op == "Split" else 2])
        (position,) = self.data(op)
        shape = op.node.inputs[position].shape
        if axis not in (3, -1) or shape is None or len(shape) != 4:
            raise NotTileableError("a split along another axis than the channels")
        return kinds[position]

    def demand(self, op: OpView, axis: int, out: Interval) -> AxisPlan:
        """The same rows."""
        needs: list[Interval | None] = [None] * len(op.node.inputs)
        needs[self.data(op)[0]] = out
        return AxisPlan(out, out, needs)

    def reach(self, op: OpView, axis: int, parts: Sequence[Interval | None]) -> AxisPlan:
        """The same rows."""
        return self.demand(op, axis, hull_of([part for part in parts if part is not None]))
