"""Ops on blocks of rows: reshapes, space-to-batch and its inverse.

A reshape may add a dimension to an image, or drop one, or split its channels into groups, as in a group normalisation.
It may also join an axis with the next dimension: `(batch, height, 2, width, channels)` to `(batch, 2 * height, width,
channels)` repeats pixels. A row of one side is then a *block* of rows of the other.

Space-to-batch makes every second (third, ...) row an image of its own; dilated convolutions are traced with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import tensorflow as tf

from rewriters.errors import NotTileableError
from rewriters.ir.static_values import constant
from rewriters.rules.axis_layouts import AxisMap
from rewriters.rules.intervals import Interval
from rewriters.rules.registry import AxisPlan, Emitter, OpView, Rule, TileKind, tiling_rule

__all__: list[str] = []

Group = tuple[list[int], list[int]]
"""Neighbouring dimensions of one shape, and those of another one that have the same elements."""


def groups(have: Sequence[int], want: Sequence[int]) -> list[Group] | None:
    """Return the smallest groups of dimensions that a reshape maps to one another, without dimensions of size one."""
    ins, outs = ([dim for dim, size in enumerate(shape) if size != 1] for shape in (have, want))
    result: list[Group] = []
    while ins and outs:
        left, right = [ins.pop(0)], [outs.pop(0)]
        while (sizes := [math.prod(have[dim] for dim in left), math.prod(want[dim] for dim in right)])[0] != sizes[1]:
            pending, group = (ins, left) if sizes[0] < sizes[1] else (outs, right)
            if not pending:
                return None
            group.append(pending.pop(0))
        result.append((left, right))
    return None if ins or outs else result


class Blocks(Rule):
    """Base of ops with a block of rows on one side per row of the other."""

    cheap = True
    moves_rows = True

    def shape_operands(self, op: OpView) -> list[int]:
        """Return the operands that hold shapes and sizes."""
        return list(range(1, len(op.node.inputs)))

    def data(self, op: OpView) -> list[int]:
        """Return the image."""
        return [0]

    def block(self, op: OpView, axis: int) -> Fraction:
        """Return the rows of the output per row of the operand."""
        raise NotImplementedError

    def offset(self, op: OpView, axis: int) -> int:
        """Return the rows before the image on the side with more rows: padding, or cropped rows. Negative for `Pad`."""
        del op, axis
        return 0

    def operand_rows_for_result(self, op: OpView, axis: int, out: Interval) -> AxisPlan:
        """Require the rows that `out` consists of; the op computes full blocks."""
        factor, offset = self.block(op, axis), self.offset(op, axis)
        needs: list[Interval | None] = [None] * len(op.node.inputs)
        if factor >= 1:
            size = int(factor)
            blocks = out.shift(offset).blocks(size)
            needs[0] = blocks
            return AxisPlan(out, blocks.times(size).shift(-offset), needs)
        needs[0] = out.times(int(1 / factor)).shift(-offset)
        return AxisPlan(out, out, needs)

    def result_rows_from_operands(self, op: OpView, axis: int, parts: Sequence[Interval | None]) -> AxisPlan:
        """Plan for the rows that a gradient's rows become, or become a part of."""
        factor, offset = self.block(op, axis), self.offset(op, axis)
        assert parts[0] is not None
        extent = op.extent(op.node.out(), axis)
        if factor >= 1:
            out = parts[0].times(int(factor)).shift(-offset)
        else:
            out = parts[0].shift(offset).blocks(int(1 / factor))
        return self.operand_rows_for_result(op, axis, out.clip(extent).nonempty(extent))


@tiling_rule("Reshape", "ExpandDims", "Squeeze")
class View(Blocks):
    """Reshape: equal elements in equal order, for each image by itself."""

    def _groups(self, op: OpView) -> list[Group]:
        source, out = op.node.inputs[0].shape, op.node.out().shape
        if not source or not out or None in (*source[1:], *out[1:]):
            raise NotTileableError("a reshape of a tensor of unknown shape")
        matching = groups(source[1:], out[1:])  # type: ignore[arg-type]
        if matching is None:
            raise NotTileableError("a reshape that changes the number of entries of an image")
        return [([dim + 1 for dim in ins], [dim + 1 for dim in outs]) for ins, outs in matching]

    def links(self, op: OpView) -> list[AxisMap]:
        """Link the outermost dimensions of each group."""
        sizes, source, out = op.evaluate.sizes, op.node.inputs[0], op.node.out()
        try:
            moves = self._groups(op)
        except NotTileableError:
            return []
        if sizes.of(source) != sizes.of(out):
            return []
        return [AxisMap(source, out, {0: 0} | {ins[0]: outs[0] for ins, outs in moves})]

    def block(self, op: OpView, axis: int) -> Fraction:
        """Return the ratio of the extents of output and operand."""
        return Fraction(op.extent(op.node.out(), axis), op.extent(op.node.inputs[0], axis))

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return the kind of the operand; each axis must be alone in its group, or before channels."""
        source, out, sizes = op.node.inputs[0], op.node.out(), op.evaluate.sizes
        if not sizes.assume_equal(sizes.of(source), sizes.of(out)):
            raise NotTileableError("a reshape that changes the number of images")
        op.check_axes([source, out])
        outermost = {(ins[0], outs[0]) for ins, outs in self._groups(op)}
        for axis in op.axes(out):
            rows = (op.extent(source, axis), op.extent(out, axis))
            if rows != (1, 1) and (op.dim(source, axis), op.dim(out, axis)) not in outermost:
                raise NotTileableError("a reshape that merges several axes of an image")
            if rows[0] % rows[1] and rows[1] % rows[0]:
                raise NotTileableError("a reshape that splits rows unevenly")
        if op.layout(source).batch_fold != op.layout(out).batch_fold:
            raise NotTileableError("a reshape that changes the number of images")
        return kinds[0]

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Reshape to the shape of a tile."""
        return [tf.reshape(operands[0], emitter.made_shape(op.node))]


class PixelsAndImages(Blocks):
    """Base of space-to-batch and its inverse."""

    cheap = False
    """Results between the two cannot be checkpointed, so the result of one is better checkpointed than recomputed."""

    def _sizes(self, op: OpView) -> list[int]:
        """Return the block size of every dimension."""
        block = [1, *op.ints(1)]
        return block + [1] * (len(op.node.out().shape or ()) - len(block))

    def size(self, op: OpView, axis: int) -> int:
        """Return the block size along an axis."""
        dim = op.dim(op.node.out(), axis)
        return 1 if dim is None else self._sizes(op)[dim]

    def offset(self, op: OpView, axis: int) -> int:
        """Return the rows of padding, or the cropped rows, before the image."""
        dim = op.dim(op.node.out(), axis)
        rows = constant(op.node.inputs[2].node)
        if rows is None:
            raise NotTileableError("padding computed at run time")
        return int(rows[dim - 1][0]) if dim is not None and dim <= len(rows) else 0

    def _entries(self, op: OpView) -> Fraction:
        raise NotImplementedError

    def links(self, op: OpView) -> list[AxisMap]:
        """Link all dimensions to themselves."""
        source, out = op.node.inputs[0], op.node.out()
        if source.shape is None or out.shape is None or op.evaluate.ints(op.node.inputs[1]) is None:
            return []
        return [AxisMap(source, out, {dim: dim for dim in range(len(out.shape))}, self._entries(op))]

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return the kind of the operand; channels must not be folded."""
        source, out = op.layout(op.node.inputs[0]), op.layout(op.node.out())
        blocks = {dim for dim, size in enumerate(self._sizes(op)) if size != 1}
        if source.dims != out.dims or not blocks <= set(out.dims):
            raise NotTileableError(f"{op.node.op} of channels")
        if source.batch_fold * self._entries(op) != out.batch_fold:
            raise NotTileableError(f"{op.node.op} without a matching space-to-batch before it")
        for axis in op.axes(op.node.out()):
            self.offset(op, axis)
        return kinds[0]


@tiling_rule("SpaceToBatchND")
class SpaceToBatch(PixelsAndImages):
    """Space-to-batch: every n-th row, from each of the first n rows on, is an image of its own."""

    def block(self, op: OpView, axis: int) -> Fraction:
        """Return 1/n: one row of the output per n rows of the operand."""
        return Fraction(1, self.size(op, axis))

    def offset(self, op: OpView, axis: int) -> int:
        """Return the offset; along an axis without blocks the output is the side with more rows, as for `Pad`."""
        padding = super().offset(op, axis)
        return padding if self.size(op, axis) > 1 else -padding

    def _entries(self, op: OpView) -> Fraction:
        return Fraction(math.prod(self._sizes(op)))

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Run without padding, which is part of the operand."""
        block = op.ints(1)
        return [tf.raw_ops.SpaceToBatchND(input=operands[0], block_shape=block, paddings=[[0, 0]] * len(block))]


@tiling_rule("BatchToSpaceND")
class BatchToSpace(PixelsAndImages):
    """Batch-to-space: the inverse of space-to-batch."""

    def block(self, op: OpView, axis: int) -> Fraction:
        """Return n: as many rows of the output per row of the operand."""
        return Fraction(self.size(op, axis))

    def _entries(self, op: OpView) -> Fraction:
        return Fraction(1, math.prod(self._sizes(op)))

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Run without cropping, which follows."""
        block = op.ints(1)
        return [tf.raw_ops.BatchToSpaceND(input=operands[0], block_shape=block, crops=[[0, 0]] * len(block))]
