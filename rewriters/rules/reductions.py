"""Sums over the image (one summand per tile) and reductions over the channels (pointwise)."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from rewriters.errors import NotTileableError
from rewriters.graph import Tensor
from rewriters.intervals import Interval, hull_of, whole
from rewriters.registry import SPATIAL_DIMS, AxisPlan, Combination, Emitter, Kind, OpView, Rule, tiling_rule
from rewriters.rules.elementwise import require_nhwc

__all__: list[str] = []

BARRIER = "it reduces over the image, so that everything after it waits for all tiles"


class SumOverImage(Rule):
    """Adds up a gradient over batch, height and width."""

    def reach(self, op: OpView, axis: int, parts: Sequence[Interval | None]) -> AxisPlan:
        """The gradient's rows."""
        rows = [part for part in parts if part is not None]
        needs: list[Interval | None] = [None] * len(op.node.inputs)
        needs[0] = hull_of(rows)
        return AxisPlan(None, None, needs)

    def data(self, op: OpView) -> list[int]:
        """The image."""
        return [0]

    def summed(self, op: OpView) -> int:
        """The image."""
        return 0


@tiling_rule("BiasAddGrad")
class BiasAddGrad(SumOverImage):
    """The gradient of a bias."""

    def result(self, op: OpView, kinds: Sequence[Kind]) -> Kind:
        """A sum of a gradient."""
        require_nhwc(op.node)
        if kinds[0] is not Kind.PARTIAL:
            raise NotTileableError(BARRIER)
        return Kind.REDUCED

    def gathered(self, op: OpView, kinds: Sequence[Kind]) -> Kind:
        """A sum of an image."""
        require_nhwc(op.node)
        if kinds[0] is not Kind.FULL:
            raise NotTileableError("BiasAddGrad of a tensor that is the same for all tiles")
        return Kind.REDUCED


_COMBINED = {
    "Sum": Combination.ADD,
    "Mean": Combination.ADD,
    "Max": Combination.MAXIMUM,
    "Min": Combination.MINIMUM,
    "Prod": Combination.MULTIPLY,
}


@tiling_rule(*_COMBINED)
class Reduce(SumOverImage):
    """Over channels: pointwise. Over the whole image: a reduction. Else a barrier."""

    cheap = True

    def axes(self, op: OpView) -> set[int]:
        """The axes that disappear, counted from the front.

        Raises:
            NotTileableError: If they, or the operand's rank, are not known.
        """
        shape, value = op.node.inputs[0].shape, op.evaluate(op.node.inputs[1])
        if shape is None:
            raise NotTileableError("a reduction of a tensor of unknown rank")
        axes = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(axis, int) for axis in axes):
            raise NotTileableError("a reduction over axes computed at run time")
        return {int(axis) % len(shape) for axis in axes}  # type: ignore[arg-type]

    def _over_channels(self, op: OpView) -> bool:
        return self.axes(op) <= {3}

    def _check(self, op: OpView) -> None:
        shape = op.node.inputs[0].shape
        if shape is None or len(shape) != 4:
            raise NotTileableError("a reduction of a tensor that is not (batch, height, width, channels)")
        if self._over_channels(op) and not op.node.attrs["keep_dims"].b:
            raise NotTileableError("a reduction over channels that drops the axis")

    def result(self, op: OpView, kinds: Sequence[Kind]) -> Kind:
        """By the axes, and by linearity."""
        self._check(op)
        if self._over_channels(op):
            if kinds[0] is Kind.PARTIAL and op.node.op not in ("Sum", "Mean"):
                raise NotTileableError(f"{op.node.op} is not linear in a gradient")
            return kinds[0]
        if op.node.op == "Sum" and kinds[0] is Kind.PARTIAL and self.axes(op) >= {0, *SPATIAL_DIMS}:
            return Kind.REDUCED
        raise NotTileableError(BARRIER)

    def gathered(self, op: OpView, kinds: Sequence[Kind]) -> Kind:
        """By the axes; each image may have a result of its own."""
        self._check(op)
        if kinds[0] is not Kind.FULL:
            raise NotTileableError("a reduction of a tensor that is the same for all tiles")
        if self._over_channels(op):
            return Kind.FULL
        if op.node.op == "Mean" and not op.node.inputs[0].dtype.is_floating:
            raise NotTileableError("a mean of integers: each part would be rounded")
        if self.axes(op) >= set(SPATIAL_DIMS):
            return Kind.REDUCED
        raise NotTileableError("it reduces over one side of the image alone")

    def combined(self, op: OpView) -> Combination:
        """By the op's type."""
        return _COMBINED[op.node.op]

    def per_image(self, op: OpView) -> bool:
        """Unless it reduces over the batch too."""
        return 0 not in self.axes(op)

    def demand(self, op: OpView, axis: int, out: Interval) -> AxisPlan:
        """The same rows."""
        return AxisPlan(out, out, [out, None])

    def reach(self, op: OpView, axis: int, parts: Sequence[Interval | None]) -> AxisPlan:
        """The same rows, or a sum over them."""
        plan = super().reach(op, axis, parts)
        if self._over_channels(op):
            return AxisPlan(plan.needs[0], plan.needs[0], plan.needs)
        return plan

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """On the tile as on the image; a part of a mean is divided by what is in the whole image.

        Parts of half precision numbers are summed up in float32, as the parts themselves are.
        """
        alone = emitter.is_whole(op.node) and (self.per_image(op) or emitter.has_all_images())
        if op.node.op not in ("Sum", "Mean") or self._over_channels(op) or alone:
            return emitter.clone(op.node, operands)
        axes = sorted(self.axes(op))
        image = tf.cast(operands[0], tf.float32) if operands[0].dtype in (tf.float16, tf.bfloat16) else operands[0]
        total = tf.reduce_sum(image, axes, op.node.attrs["keep_dims"].b)
        if op.node.op == "Sum":
            return [total]
        return [total / tf.cast(divisor(emitter, op.node.inputs[0], axes), total.dtype)]


def divisor(emitter: Emitter, image: Tensor, axes: Sequence[int]) -> Any:
    """Numbers that a mean over these axes of a whole image is made of."""
    assert image.shape is not None
    images = 1 if image.shape[0] == 1 else emitter.whole_batch()
    return functools.reduce(operator.mul, (images if axis == 0 else image.shape[axis] for axis in axes))


@tiling_rule("Tile", "BroadcastTo")
class Spread(Rule):
    """One value per image, or for all, on every pixel (the gradient of a mean), or one channel on all of them."""

    cheap = True
    moves_rows = True

    def rebuilt(self, op: OpView) -> list[int]:
        """Sizes."""
        return [1]

    def data(self, op: OpView) -> list[int]:
        """What is spread."""
        return [0]

    def _over_image(self, op: OpView, axis: int) -> bool:
        return op.extent(op.node.inputs[0], axis) == 1

    def result(self, op: OpView, kinds: Sequence[Kind]) -> Kind:
        """Over the image forward values alone: the parts of a gradient would be counted in each tile."""
        operand, out = op.node.inputs[0].shape, op.node.out().shape
        if operand is None or out is None or len(operand) != 4 or len(out) != 4 or None in (operand[3], out[3]):
            raise NotTileableError("a repetition of a tensor that is not (batch, height, width, channels)")
        over_image = [self._over_image(op, axis) for axis in range(len(SPATIAL_DIMS))]
        if any(not over and operand[d] != out[d] for over, d in zip(over_image, SPATIAL_DIMS, strict=True)):
            raise NotTileableError("a repetition of an image")
        one_image = kinds[0] is Kind.INVARIANT and operand[0] == 1
        if not (one_image or self._same_batch(op)):
            raise NotTileableError("a repetition over the batch")
        if kinds[0] is Kind.PARTIAL and any(
            over and op.extent(op.node.out(), axis) != 1 for axis, over in enumerate(over_image)
        ):
            raise NotTileableError(f"{op.node.op} spreads a gradient over the image")
        return kinds[0] if kinds[0] is Kind.PARTIAL else Kind.FULL

    def _same_batch(self, op: OpView) -> bool:
        operand, out = op.node.inputs[0], op.node.out()
        assert operand.shape is not None and out.shape is not None
        if operand.shape[0] is not None and out.shape[0] is not None:
            return operand.shape[0] == out.shape[0]
        sizes, value = op.evaluate.sizes, op.evaluate(op.node.inputs[1])
        if op.node.op == "Tile":
            return isinstance(value, tuple) and value[0] == 1
        return isinstance(value, tuple) and (value[0] == -1 or sizes.same(value[0], sizes.of(operand)))

    def demand(self, op: OpView, axis: int, out: Interval) -> AxisPlan:
        """The same rows, or the only one."""
        return AxisPlan(out, out, [whole(1, len(out.lo)) if self._over_image(op, axis) else out, None])

    def reach(self, op: OpView, axis: int, parts: Sequence[Interval | None]) -> AxisPlan:
        """The same rows."""
        assert parts[0] is not None
        return self.demand(op, axis, parts[0])

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """As many rows as are wanted."""
        operand, out = op.node.inputs[0].shape, op.node.out().shape
        assert operand is not None and out is not None
        channels = int(out[3] or 1) // int(operand[3] or 1)
        value = operands[0] if channels == 1 else tf.tile(operands[0], [1, 1, 1, channels])
        return [emitter.spread(op.node, value)]
