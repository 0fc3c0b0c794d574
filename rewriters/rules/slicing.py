"""Slices and their gradients, as traced from indexing, cropping layers, and gradients of padding and concatenation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from rewriters.errors import NotTileableError
from rewriters.ir.graph import Node, Tensor
from rewriters.rules.axis_layouts import AxisMap
from rewriters.rules.intervals import Interval, Window
from rewriters.rules.registry import AxisPlan, Emitter, OpView, Rule, TileKind, tiling_rule

__all__: list[str] = []


@dataclasses.dataclass(frozen=True)
class AxisSlice:
    """One entry of an index, with `...` expanded.

    Attributes:
        dim: Dimension that is indexed; `None` for a new dimension.
        out: Dimension of the result; `None` if it disappears.
        begin: First entry.
        size: Number of entries; `None` for all of an unknown number.
        stride: Distance between entries.
    """

    dim: int | None
    out: int | None
    begin: int = 0
    size: int | None = 1
    stride: int = 1


def cuts(node: Node, shape: Sequence[int | None], bounds: Sequence[Sequence[int]]) -> list[AxisSlice]:
    """Return the slice of every dimension of a tensor.

    Args:
        node: `StridedSlice` or `StridedSliceGrad`, for its masks.
        shape: Shape of the sliced tensor.
        bounds: Begin, end and stride by entry of the index.

    Raises:
        NotTileableError: If the slice is unknown when the step is traced.
    """

    def has(mask: str, position: int) -> bool:
        return bool(node.attrs[f"{mask}_mask"].i >> position & 1)

    entries = range(len(bounds[0]))
    new = {position for position in entries if has("new_axis", position) and not has("ellipsis", position)}
    used = sum(position not in new and not has("ellipsis", position) for position in entries)
    slices: list[AxisSlice] = []
    dim = out = 0
    for position in (*entries, None):
        if position is None or has("ellipsis", position):
            for _ in range(len(shape) - used if position is not None else len(shape) - dim):
                slices.append(AxisSlice(dim, out, 0, shape[dim]))
                dim, out = dim + 1, out + 1
        elif position in new:
            slices.append(AxisSlice(None, out))
            out += 1
        else:
            gone = has("shrink_axis", position)
            first, last = (None if has(mask, position) else int(bounds[i][position]) for i, mask in _ENDS)
            begin, size = _taken(shape[dim], first, last, bounds[2][position], gone)
            slices.append(AxisSlice(dim, None if gone else out, begin, size, 1 if gone else bounds[2][position]))
            dim, out = dim + 1, out if gone else out + 1
    return slices


_ENDS = ((0, "begin"), (1, "end"))


def _taken(size: int | None, first: int | None, last: int | None, stride: int, gone: bool) -> tuple[int, int | None]:
    """Return first entry and number of entries of a slice along one dimension."""
    if size is None:
        if first not in (None, 0) or last is not None or stride != 1 or gone:
            raise NotTileableError("a slice along a dimension of unknown size")
        return 0, None
    if gone:
        return (first or 0) % size, 1
    indices = range(size)[first:last:stride]
    return indices.start, len(indices)


class Sliced(Rule):
    """Base of slices: a window of one row that moves by its stride along the axes; channels are sliced freely."""

    moves_rows = True
    cheap = True
    image = 0
    """Operand that is the image."""
    bounds = (1, 2, 3)
    """Operands that are begin, end and stride."""

    def shape_operands(self, op: OpView) -> list[int]:
        """Return the shape and the bounds."""
        return [position for position in range(len(op.node.inputs)) if position != self.image]

    def data(self, op: OpView) -> list[int]:
        """Return the image."""
        return [self.image]

    def sides(self, op: OpView) -> tuple[Tensor, Tensor]:
        """Return the sliced tensor and the slice."""
        raise NotImplementedError

    def cuts(self, op: OpView) -> list[AxisSlice]:
        """Return the slice of every dimension."""
        sliced, _ = self.sides(op)
        if sliced.shape is None:
            raise NotTileableError("a slice of a tensor of unknown rank")
        return cuts(op.node, sliced.shape, [op.ints(position) for position in self.bounds])

    def _by_dim(self, op: OpView) -> dict[int, AxisSlice]:
        return {cut.dim: cut for cut in self.cuts(op) if cut.dim is not None}

    def window(self, op: OpView, axis: int) -> Window:
        """Return the geometry along an axis."""
        sliced, part = self.sides(op)
        dim = op.dim(sliced, axis)
        cut = AxisSlice(None, None) if dim is None else self._by_dim(op)[dim]
        return Window(1, cut.stride, 1, -cut.begin, op.extent(sliced, axis), op.extent(part, axis))

    def links(self, op: OpView) -> list[AxisMap]:
        """Link the dimensions that remain."""
        sliced, part = self.sides(op)
        try:
            entries = self._by_dim(op)
        except NotTileableError:
            return []
        if part.shape is None or not entries or entries[0].out != 0:
            return []
        return [AxisMap(sliced, part, {dim: cut.out for dim, cut in entries.items() if cut.out is not None})]

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return the kind of the operand: a slice is linear. The batch must not be cut."""
        sliced, part = self.sides(op)
        entries = self._by_dim(op)
        assert sliced.shape is not None
        if entries[0].out != 0 or entries[0].begin != 0 or entries[0].size != sliced.shape[0] or entries[0].stride != 1:
            raise NotTileableError("a slice of the batch")
        op.check_axes([sliced, part])
        for axis in op.axes(sliced):
            dim = op.dim(sliced, axis)
            if dim is None:
                continue
            if entries[dim].stride < 1:
                raise NotTileableError("a slice that reverses an image")
            if entries[dim].out != op.dim(part, axis) and op.extent(sliced, axis) != 1:
                raise NotTileableError("a slice of a single row of an image")
        return kinds[self.image]

    def _bounds(self, op: OpView) -> dict[str, Any]:
        """Return the bounds for a tile: all its rows along the axes, and the op's own for channels."""
        sliced, _ = self.sides(op)
        axes = op.layout(sliced).dims
        entries = self.cuts(op)
        moved = [cut.dim is not None and cut.out is not None and (cut.dim == 0 or cut.dim in axes) for cut in entries]
        ends = [cut.begin + (cut.size or 0) * cut.stride for cut in entries]

        def mask(positions: Iterable[bool]) -> int:
            return sum(1 << position for position, marked in enumerate(positions) if marked)

        return {
            "begin": [0 if every else cut.begin for every, cut in zip(moved, entries, strict=True)],
            "end": ends,
            "strides": [cut.stride for cut in entries],
            "begin_mask": mask(moved),
            "end_mask": mask(every or end < 0 for every, end in zip(moved, ends, strict=True)),
            "shrink_axis_mask": mask(cut.dim is not None and cut.out is None for cut in entries),
            "new_axis_mask": mask(cut.dim is None for cut in entries),
        }


@tiling_rule("StridedSlice")
class StridedSlice(Sliced):
    """Strided slice. Operands: image, begin, end, stride."""

    def sides(self, op: OpView) -> tuple[Tensor, Tensor]:
        """Return operand and output."""
        return op.node.inputs[0], op.node.out()

    def operand_rows_for_result(self, op: OpView, axis: int, out: Interval) -> AxisPlan:
        """Require the source rows of `out`, and the rows between them."""
        others: list[Interval | None] = [None] * (len(op.node.inputs) - 1)
        return AxisPlan(out, out, [self.window(op, axis).rows_covered(out), *others])

    def result_rows_from_operands(self, op: OpView, axis: int, parts: Sequence[Interval | None]) -> AxisPlan:
        """Plan for the rows of the gradient that are in the slice."""
        assert parts[0] is not None
        return self.operand_rows_for_result(op, axis, self.window(op, axis).windows_overlapping(parts[0]))

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Slice the channels; the axes are sliced already."""
        return [tf.raw_ops.StridedSlice(input=operands[0], **self._bounds(op))]


@tiling_rule("Slice")
class Slice(StridedSlice):
    """Slice. Operands: image, begin, size."""

    def cuts(self, op: OpView) -> list[AxisSlice]:
        """Return the slice of every dimension, by the sizes of the result."""
        sizes = op.node.out().shape
        if sizes is None:
            raise NotTileableError("a slice of a tensor of unknown rank")
        return [
            AxisSlice(dim, dim, begin, size) for dim, (begin, size) in enumerate(zip(op.ints(1), sizes, strict=True))
        ]

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return the kind of the operand; an unknown batch must provably be kept in full."""
        image = op.node.inputs[0]
        size, sizes = op.evaluate(op.node.inputs[2]), op.evaluate.sizes
        every = isinstance(size, tuple) and (size[0] == -1 or sizes.assume_equal(size[0], sizes.of(image)))
        if image.shape is not None and image.shape[0] is None and not every:
            raise NotTileableError("a slice of the batch by a size computed at run time")
        return super().result_kind(op, kinds)


@tiling_rule("StridedSliceGrad")
class StridedSliceGrad(Sliced):
    """Gradient of a strided slice. Operands: shape, begin, end, stride, gradient of the slice."""

    image = 4
    bounds = (1, 2, 3)

    def sides(self, op: OpView) -> tuple[Tensor, Tensor]:
        """Return output and operand."""
        return op.node.out(), op.node.inputs[4]

    def operand_rows_for_result(self, op: OpView, axis: int, out: Interval) -> AxisPlan:
        """Require the rows of `out` that are in the slice; the others are zero."""
        return self._made(op, axis, self.window(op, axis).windows_overlapping(out), out)

    def result_rows_from_operands(self, op: OpView, axis: int, parts: Sequence[Interval | None]) -> AxisPlan:
        """Plan for the rows that the slice had taken."""
        assert parts[4] is not None
        window = self.window(op, axis)
        return self._made(op, axis, parts[4], window.rows_covered(parts[4]).clip(window.in_extent))

    def _made(self, op: OpView, axis: int, part: Interval, out: Interval) -> AxisPlan:
        return AxisPlan(out, self.window(op, axis).rows_covered(part), [None, None, None, None, part])

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Run with the bounds of the tile, from the first row in the slice to the last."""
        shape = emitter.made_shape(op.node)
        return [tf.raw_ops.StridedSliceGrad(shape=shape, dy=operands[4], **self._bounds(op))]
