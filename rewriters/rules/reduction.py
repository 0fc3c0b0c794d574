"""Reductions: over the image (one part per tile) and over the channels (per pixel)."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from rewriters.errors import NotTileableError
from rewriters.ir.graph import Tensor
from rewriters.ir.region_reads import is_region_write
from rewriters.rules.axis_layouts import Anchor, AxisMap
from rewriters.rules.elementwise import has_channels_first, lie_alike, require_channels, sides_by_format
from rewriters.rules.intervals import Interval, hull_of, whole
from rewriters.rules.registry import AxisPlan, Combination, Emitter, OpView, Rule, TileKind, tiling_rule

__all__: list[str] = []

BARRIER = "it reduces over the image, so that everything after it waits for all tiles"


class SumOverImage(Rule):
    """Reduction of a gradient over batch, height and width."""

    def result_rows_from_operands(self, op: OpView, axis: int, parts: Sequence[Interval | None]) -> AxisPlan:
        """Plan for the gradient's rows."""
        rows = [part for part in parts if part is not None]
        needs: list[Interval | None] = [None] * len(op.node.inputs)
        needs[0] = hull_of(rows)
        return AxisPlan(None, None, needs)

    def data(self, op: OpView) -> list[int]:
        """Return the image."""
        return [0]

    def summed(self, op: OpView) -> int:
        """Return the image."""
        return 0


@tiling_rule("BiasAddGrad")
class BiasAddGrad(SumOverImage):
    """Gradient of a bias."""

    def anchors(self, op: OpView) -> list[Anchor]:
        """Anchor the image if channels come first, as for `BiasAdd`."""
        return sides_by_format(op.node, op.node.inputs) if has_channels_first(op.node) else []

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return `REDUCED` for a gradient."""
        require_channels(op, op.node.inputs[0])
        if kinds[0] is not TileKind.PARTIAL:
            raise NotTileableError(BARRIER)
        return TileKind.REDUCED

    def result_kind_gathered(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return `REDUCED` for an image."""
        require_channels(op, op.node.inputs[0])
        if kinds[0] is not TileKind.FULL:
            raise NotTileableError("BiasAddGrad of a tensor that is the same for all tiles")
        return TileKind.REDUCED


_COMBINED = {
    "Sum": Combination.ADD,
    "Mean": Combination.ADD,
    "Max": Combination.MAXIMUM,
    "Min": Combination.MINIMUM,
    "Prod": Combination.MULTIPLY,
}
REDUCTIONS = frozenset(_COMBINED)
"""Op types with a rule that reduces operand 0 over the axes in operand 1."""


@tiling_rule(*_COMBINED)
class Reduce(SumOverImage):
    """Reduction over channels (per pixel), or over the full image or the batch. Other axes are refused."""

    cheap = True

    def axes(self, op: OpView) -> set[int]:
        """Return the reduced axes, counted from the front.

        Raises:
            NotTileableError: If the axes, or the operand's rank, are unknown.
        """
        if op.node.inputs[0].shape is None:
            raise NotTileableError("a reduction of a tensor of unknown rank")
        axes = op.evaluate.reduction_axes(op.node)
        if axes is None:
            raise NotTileableError("a reduction over axes computed at run time")
        return axes

    def channels(self, op: OpView) -> list[tuple[Tensor, int]]:
        """Return the reduced dimensions if the result keeps them, as that of a normalisation does."""
        axes = op.evaluate.reduction_axes(op.node) if op.node.attrs["keep_dims"].b else None
        return [(op.node.inputs[0], dim) for dim in axes or ()]

    def _over_channels(self, op: OpView) -> bool:
        return self.axes(op).isdisjoint({0, *op.layout(op.node.inputs[0]).dims})

    def _check_dims(self, op: OpView) -> None:
        """Refuse a result whose layout puts the axes into other dimensions."""
        image, out = op.node.inputs[0], op.node.out()
        keep, axes = op.node.attrs["keep_dims"].b, self.axes(op)
        moved = [dim if dim is None or keep else dim - sum(a < dim for a in axes) for dim in op.layout(image).dims]
        if len(op.layout(out).dims) != len(moved) or any(
            op.dim(out, axis) != dim and not op.extent(image, axis) == 1 == op.extent(out, axis)
            for axis, dim in enumerate(moved)
        ):
            raise NotTileableError("its result has another axis order than the image")

    def _over_batch(self, op: OpView) -> bool:
        """Return whether the op reduces over the batch, which keeps one entry, and maybe channels."""
        axes, sides = self.axes(op), self._sides(op)
        return 0 in axes and bool(sides) and axes.isdisjoint(sides) and op.node.attrs["keep_dims"].b

    def per_pixel(self, op: OpView) -> bool:
        """Return whether the op reduces over the batch, or over some axes of the image, but not over all of them."""
        axes, sides = self.axes(op), self._sides(op)
        keeps_batch = 0 not in axes and not axes.isdisjoint(sides)
        return self._over_batch(op) or (keeps_batch and not axes >= sides)

    def result_dims(self, op: OpView) -> tuple[int | None, ...]:
        """Return the dimension of the result that holds each axis; `None` for a reduced axis."""
        axes, keep = self.axes(op), op.node.attrs["keep_dims"].b
        return tuple(
            None if dim is None or dim in axes else dim if keep else dim - sum(a < dim for a in axes)
            for dim in op.layout(op.node.inputs[0]).dims
        )

    def _sides(self, op: OpView) -> set[int | None]:
        """Return the dimensions along which an image has more than one row."""
        image = op.node.inputs[0]
        return {op.dim(image, axis) for axis in op.axes(image) if op.extent(image, axis) != 1}

    def _over_image(self, op: OpView) -> bool:
        return self.axes(op) >= self._sides(op)

    def links(self, op: OpView) -> list[AxisMap]:
        """Link the dimensions that remain; those of a sum over the batch only if it has pixels."""
        image, out = op.node.inputs[0], op.node.out()
        try:
            axes = self.axes(op)
        except NotTileableError:
            return []
        if image.shape is None or out.shape is None:
            return []
        has_pixels = op.node.attrs["keep_dims"].b and sum(size != 1 for size in out.shape) > 1
        if 0 in axes and not has_pixels:
            return []
        left = [dim for dim in range(len(image.shape)) if op.node.attrs["keep_dims"].b or dim not in axes]
        return [AxisMap(image, out, {dim: new for new, dim in enumerate(left)})] if len(left) == len(out.shape) else []

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return the kind by the reduced axes, and by linearity."""
        if self._over_channels(op):
            self._check_dims(op)
            if kinds[0] is TileKind.PARTIAL and op.node.op not in ("Sum", "Mean"):
                raise NotTileableError(f"{op.node.op} is not linear in a gradient")
            return kinds[0]
        if op.node.op == "Sum" and kinds[0] is TileKind.PARTIAL:
            if self._over_batch(op):
                self._check_dims(op)
                return TileKind.PARTIAL
            if self._over_image(op) and 0 in self.axes(op):
                return TileKind.REDUCED
        raise NotTileableError(BARRIER)

    def result_kind_gathered(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return the kind by the reduced axes; each image may have its own result."""
        if kinds[0] is not TileKind.FULL:
            raise NotTileableError("a reduction of a tensor that is the same for all tiles")
        if self._over_channels(op):
            self._check_dims(op)
            return TileKind.FULL
        if op.node.op == "Mean" and not op.node.inputs[0].dtype.is_floating:
            raise NotTileableError("a mean of integers: partial means would be rounded")
        if self._over_batch(op):
            self._check_dims(op)
        if self._over_image(op) or self.per_pixel(op):
            if self.per_image(op) and op.layout(op.node.inputs[0]).batch_fold != 1:
                raise NotTileableError("a reduction of images whose pixels are folded into the batch")
            return TileKind.REDUCED
        raise NotTileableError("it reduces over the batch and over some axes of the image, but not over all of them")

    def combined(self, op: OpView) -> Combination:
        """Return the combination of the op type."""
        return _COMBINED[op.node.op]

    def per_image(self, op: OpView) -> bool:
        """Return whether the op keeps the batch."""
        return 0 not in self.axes(op)

    def operand_rows_for_result(self, op: OpView, axis: int, out: Interval) -> AxisPlan:
        """Require rows `out` of the image."""
        return AxisPlan(out, out, [out, None])

    def result_rows_from_operands(self, op: OpView, axis: int, parts: Sequence[Interval | None]) -> AxisPlan:
        """Plan for the rows of the gradient, or for a reduction over them."""
        plan = super().result_rows_from_operands(op, axis, parts)
        if self._over_channels(op) or self._over_batch(op):
            return AxisPlan(plan.needs[0], plan.needs[0], plan.needs)
        return plan

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Run on the tile; divide a part of a mean by the number of entries of the full image.

        Parts in half precision are accumulated in float32, as the parts themselves are computed.
        """
        alone = emitter.is_whole(op.node) and (self.per_image(op) or emitter.has_all_images())
        if op.node.op not in ("Sum", "Mean") or self._over_channels(op) or alone:
            return emitter.clone(op.node, operands)
        axes = sorted(self.axes(op))
        image = tf.cast(operands[0], tf.float32) if operands[0].dtype in (tf.float16, tf.bfloat16) else operands[0]
        total = tf.reduce_sum(image, axes, op.node.attrs["keep_dims"].b)
        if op.node.op == "Sum":
            return [total]
        return [total / tf.cast(divisor(emitter, op, axes), total.dtype)]


@tiling_rule("PyFuncStateless")
class WriteToFile(SumOverImage):
    """Write of images to files, which adds up the numbers of values written. Operands: images, keys, begin."""

    def check(self, op: OpView) -> None:
        """Refuse other Python calls."""
        if not is_region_write(op.node):
            raise NotTileableError("it runs Python code")

    def data(self, op: OpView) -> list[int]:
        """Return the images."""
        self.check(op)
        return [0]

    def links(self, op: OpView) -> list[AxisMap]:
        """Return no links: the result has no axes of an image."""
        return []

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Refuse, as a reduction over the image."""
        self.check(op)
        raise NotTileableError(BARRIER)

    def result_kind_gathered(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return `REDUCED` for images."""
        self.check(op)
        if kinds[0] is not TileKind.FULL or op.layout(op.node.inputs[0]).batch_fold != 1:
            raise NotTileableError("it writes a tensor that is the same for all tiles, or folded into the batch")
        return TileKind.REDUCED

    def per_image(self, op: OpView) -> bool:
        """Return true: each image has its number."""
        return True

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Write at the place of the tile."""
        spans = emitter.operand_spans(op.node, 0)
        begin = tf.stack([tf.cast(0 if span is None else span[0], tf.int64) for span in spans])
        return emitter.clone(op.node, [operands[0], operands[1], begin])


def divisor(emitter: Emitter, op: OpView, axes: Sequence[int]) -> Any:
    """Return the number of entries that a mean over these axes of a full-size image averages."""
    image = op.node.inputs[0]
    assert image.shape is not None
    images = 1 if image.shape[0] == 1 else emitter.whole_batch() * op.layout(image).batch_fold
    return functools.reduce(operator.mul, (images if axis == 0 else image.shape[axis] for axis in axes))


@tiling_rule("Tile", "BroadcastTo")
class Spread(Rule):
    """Broadcast of one value, one per image, or one channel over all pixels, as in the gradient of a mean."""

    cheap = True
    moves_rows = True

    def shape_operands(self, op: OpView) -> list[int]:
        """Return the shape operand."""
        return [1]

    def data(self, op: OpView) -> list[int]:
        """Return the operand that is broadcast."""
        return [0]

    def _over_image(self, op: OpView, axis: int) -> bool:
        return op.extent(op.node.inputs[0], axis) == 1

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return the kind; over the image forward values only, as each tile would count a gradient's part."""
        operand, out = op.node.inputs[0].shape, op.node.out().shape
        if operand is None or out is None or len(operand) != len(out) or None in (*operand[1:], *out[1:]):
            raise NotTileableError("a repetition of a tensor of unknown shape")
        over_image = [self._over_image(op, axis) for axis in op.axes(op.node.out())]
        if any(
            not over and op.extent(op.node.inputs[0], axis) != op.extent(op.node.out(), axis)
            for axis, over in enumerate(over_image)
        ):
            raise NotTileableError("a repetition of an image")
        if not lie_alike(op, op.node.inputs[0]):
            raise NotTileableError("a repetition whose result has another axis order than its operand")
        if kinds[0] is TileKind.INVARIANT and not (operand[0] == 1 and all(over_image)):
            raise NotTileableError(
                "a repetition of an image that is the same for all tiles, such as a mean over the batch"
            )
        if kinds[0] is not TileKind.INVARIANT and not self._same_batch(op):
            raise NotTileableError("a repetition over the batch")
        if kinds[0] is TileKind.PARTIAL and any(
            over and op.extent(op.node.out(), axis) != 1 for axis, over in enumerate(over_image)
        ):
            raise NotTileableError(f"{op.node.op} broadcasts a gradient over the image")
        return kinds[0] if kinds[0] is TileKind.PARTIAL else TileKind.FULL

    def _same_batch(self, op: OpView) -> bool:
        operand, out = op.node.inputs[0], op.node.out()
        assert operand.shape is not None and out.shape is not None
        if operand.shape[0] is not None and out.shape[0] is not None:
            return operand.shape[0] == out.shape[0]
        sizes, value = op.evaluate.sizes, op.evaluate(op.node.inputs[1])
        if op.node.op == "Tile":
            return isinstance(value, tuple) and value[0] == 1
        return isinstance(value, tuple) and (value[0] == -1 or sizes.assume_equal(value[0], sizes.of(operand)))

    def operand_rows_for_result(self, op: OpView, axis: int, out: Interval) -> AxisPlan:
        """Require rows `out`, or the only row."""
        return AxisPlan(out, out, [whole(1, len(out.lo)) if self._over_image(op, axis) else out, None])

    def result_rows_from_operands(self, op: OpView, axis: int, parts: Sequence[Interval | None]) -> AxisPlan:
        """Plan for the rows of the gradient."""
        assert parts[0] is not None
        return self.operand_rows_for_result(op, axis, parts[0])

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Broadcast to the rows of the tile."""
        operand, out = op.node.inputs[0].shape, op.node.out().shape
        assert operand is not None and out is not None
        others = op.layout(op.node.out()).others(len(out))
        counts = [int(out[d] or 1) // int(operand[d] or 1) if d in others else 1 for d in range(len(out))]
        again = any(count != 1 != operand[d] for d, count in enumerate(counts))
        value = tf.tile(operands[0], counts) if again else operands[0]
        return [tf.broadcast_to(value, emitter.made_shape(op.node))]
