"""Ops along the channels of each pixel: extremes and their places, one-hot codes, lookups, stacks, cumulative sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from rewriters.errors import NotTileableError
from rewriters.ir.graph import Tensor
from rewriters.rules.axis_layouts import AxisMap
from rewriters.rules.elementwise import identity, is_zero
from rewriters.rules.intervals import Interval, hull_of, whole
from rewriters.rules.registry import AxisPlan, Emitter, OpView, Rule, TileKind, tiling_rule

__all__: list[str] = []


class AlongChannels(Rule):
    """Base of ops whose result, at each pixel, depends on the channels of that pixel alone.

    Args:
        linear: Whether the op is linear in its images.
    """

    cheap = True

    reason = "it works along an axis of the image, or along the batch"
    """Reason for users why the op cannot run on tiles along other dimensions."""

    def __init__(self, linear: bool = False) -> None:
        self.linear = linear

    def data(self, op: OpView) -> list[int]:
        """Return the image."""
        return [0]

    def dims(self, op: OpView) -> set[int]:
        """Return the dimensions of the image along which the op works; by default the last one."""
        return {rank_of(self.image(op)) - 1}

    def moves(self, op: OpView) -> Mapping[int, int]:
        """Return the dimensions of the result by those of the image; by default they are equal."""
        return {dim: dim for dim in range(rank_of(self.image(op)))}

    def image(self, op: OpView) -> Tensor:
        """Return the first image operand."""
        return op.node.inputs[self.data(op)[0]]

    def links(self, op: OpView) -> list[AxisMap]:
        """Link the dimensions of all images and results."""
        try:
            moves = self.moves(op)
        except NotTileableError:
            return []
        images = [op.node.inputs[position] for position in self.data(op)]
        results = [op.node.out(index) for index in range(len(op.node.outputs))]
        known = all(tensor.shape is not None for tensor in (*images, *results))
        return [AxisMap(image, out, moves) for image in images for out in results] if known and not moves.get(0) else []

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return the kind of the images; the op must not work along an axis of the image."""
        images = [op.node.inputs[position] for position in self.data(op)]
        for image in images:
            if self.dims(op).intersection({0, *op.layout(image).dims}) or self.moves(op).get(0):
                raise NotTileableError(self.reason)
            for index in range(len(op.node.outputs)):
                require_moved(op, image, op.node.out(index), self.moves(op))
        image_kinds = [kinds[position] for position in self.data(op)]
        if TileKind.INVARIANT in image_kinds:
            raise NotTileableError(f"{op.node.op} of image data with a tensor that is the same for all tiles")
        if TileKind.PARTIAL not in image_kinds:
            return TileKind.FULL
        if not self.linear:
            raise NotTileableError(f"{op.node.op} is not linear in a gradient")
        full = [t for t, kind in zip(images, image_kinds, strict=True) if kind is TileKind.FULL]
        if not all(map(is_zero, full)):
            raise NotTileableError(f"{op.node.op} of forward values and gradients")
        return TileKind.PARTIAL

    def operand_rows_for_result(self, op: OpView, axis: int, out: Interval) -> AxisPlan:
        """Require rows `out` of the images."""
        images = self.data(op)
        return AxisPlan(out, out, [out if position in images else None for position in range(len(op.node.inputs))])

    def result_rows_from_operands(self, op: OpView, axis: int, parts: Sequence[Interval | None]) -> AxisPlan:
        """Plan for the hull of the gradients' rows."""
        return self.operand_rows_for_result(op, axis, hull_of([part for part in parts if part is not None]))


def rank_of(tensor: Tensor) -> int:
    """Return the number of dimensions."""
    if tensor.shape is None:
        raise NotTileableError(f"operand `{tensor.name}` has an unknown rank")
    return len(tensor.shape)


def require_moved(op: OpView, image: Tensor, out: Tensor, moves: Mapping[int, int]) -> None:
    """Refuse a result whose axes lie in other dimensions than those to which the op moves them."""
    op.check_axes([image, out])
    if op.layout(image).batch_fold != op.layout(out).batch_fold:
        raise NotTileableError("it folds pixels of an image into the batch, or unfolds them")
    for axis, dim in enumerate(op.layout(image).dims):
        moved = None if dim is None else moves.get(dim)
        if moved != op.dim(out, axis) and not op.extent(image, axis) == op.extent(out, axis) == 1:
            raise NotTileableError("its result has another axis order than the image")


def dims_of(op: OpView, position: int, rank: int) -> set[int]:
    """Return the dimensions in an operand, counted from the front."""
    dims = vector_of(op.evaluate(op.node.inputs[position]))
    if not all(isinstance(dim, int) for dim in dims):
        raise NotTileableError(f"operand {position} (`{op.node.inputs[position].name}`) is computed at run time")
    return {int(dim) % rank for dim in dims}


def vector_of(value: Any) -> tuple[Any, ...]:
    """Return a value as a vector; a number is a vector of one entry."""
    return value if isinstance(value, tuple) else (value,)


def without(dims: set[int], rank: int) -> dict[int, int]:
    """Return the places of the dimensions that remain when some disappear."""
    remaining = [dim for dim in range(rank) if dim not in dims]
    return {dim: place for place, dim in enumerate(remaining)}


for _op_type in ("TopKV2", "RGBToHSV", "HSVToRGB", "LRN"):
    tiling_rule(_op_type)(AlongChannels)


@tiling_rule("ArgMax", "ArgMin", "All", "Any")
class Extreme(AlongChannels):
    """Reduction of the channels. Operands: image, dimensions."""

    reason = "it reduces over an axis of the image, or over the batch"

    def dims(self, op: OpView) -> set[int]:
        """Return the reduced dimensions."""
        return dims_of(op, 1, rank_of(op.node.inputs[0]))

    def moves(self, op: OpView) -> Mapping[int, int]:
        """Return the dimensions that remain."""
        keep = "keep_dims" in op.node.attrs and op.node.attrs["keep_dims"].b
        return super().moves(op) if keep else without(self.dims(op), rank_of(op.node.inputs[0]))


@tiling_rule("Cumsum", linear=True)
@tiling_rule("Cumprod")
class Cumulative(AlongChannels):
    """Cumulative sum or product. Operands: image, dimension."""

    reason = "a cumulative sum or product along an axis of the image needs all rows before each row"

    def dims(self, op: OpView) -> set[int]:
        """Return the dimension of the accumulation."""
        return dims_of(op, 1, rank_of(op.node.inputs[0]))


@tiling_rule("Roll", linear=True)
class Roll(AlongChannels):
    """Cyclic shift. Operands: image, shifts, dimensions.

    Between barriers a shift of rows reads the image whole in each tile: the rows of a tile may come from both ends.
    """

    reason = "a roll along an axis of the image needs rows from both ends"

    def dims(self, op: OpView) -> set[int]:
        """Return the shifted dimensions."""
        return dims_of(op, 2, rank_of(op.node.inputs[0]))

    def read_whole(self, op: OpView) -> list[int]:
        """Return the image if its rows are shifted."""
        layout = op.layouts.of(op.node.inputs[0])
        return [] if layout is None or self.dims(op).isdisjoint(layout.dims) else [0]

    def result_kind_gathered(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return `FULL` for shifted rows, too."""
        image, out = op.node.inputs[0], op.node.out()
        if 0 in self.dims(op):
            raise NotTileableError("a roll along the batch")
        if not self.read_whole(op):
            return self.result_kind(op, kinds)
        require_moved(op, image, out, self.moves(op))
        if kinds[0] is not TileKind.FULL:
            raise NotTileableError("a roll of a tensor that is the same for all tiles")
        self._shifts(op)
        return TileKind.FULL

    def _shifts(self, op: OpView) -> list[int]:
        """Return the shift along each dimension."""
        rank = rank_of(op.node.out())
        shifts = [0] * rank
        values, places = (vector_of(op.evaluate(operand)) for operand in op.node.inputs[1:])
        if not all(isinstance(number, int) for number in (*values, *places)):
            raise NotTileableError("a roll whose shift is computed at run time")
        for shift, place in zip(values, places, strict=True):
            shifts[int(place) % rank] += int(shift)
        return shifts

    def operand_rows_for_result(self, op: OpView, axis: int, out: Interval) -> AxisPlan:
        """Require rows `out`, or all rows if rows are shifted."""
        plan = super().operand_rows_for_result(op, axis, out)
        if self.read_whole(op):
            plan.needs[0] = whole(op.extent(op.node.inputs[0], axis), len(out.lo))
        return plan

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Gather the rows of the tile from where they were before the shift."""
        if not self.read_whole(op):
            return emitter.clone(op.node, operands)
        (result, *_), out, shifts = operands, op.node.out(), self._shifts(op)
        for axis, dim in enumerate(op.layout(out).dims):
            if dim is not None:
                rows = (np.arange(op.extent(out, axis)) - shifts[dim]) % op.extent(out, axis)
                result = tf.gather(result, emitter.axis_positions(op.node, 0, rows, axis), axis=dim)
                shifts[dim] = 0
        moved = {place: shift for place, shift in enumerate(shifts) if shift}
        return [tf.roll(result, [*moved.values()], [*moved]) if moved else result]


def inverted(moves: Mapping[int, int]) -> dict[int, int]:
    """Return the dimensions of the source by those of the target."""
    return {place: dim for dim, place in moves.items()}


@tiling_rule("OneHot")
class NewChannels(AlongChannels):
    """Values in new channels: one-hot codes. Operands: indices, depth, value of one, value of zero."""

    def dims(self, op: OpView) -> set[int]:
        """Return no dimension: the channels are new."""
        return set()

    def moves(self, op: OpView) -> Mapping[int, int]:
        """Return the dimensions around the new one."""
        rank = rank_of(op.node.inputs[0])
        return inverted(without({op.node.attrs["axis"].i % (rank + 1)}, rank + 1))


@tiling_rule("Pack", linear=True)
class Pack(NewChannels):
    """Stack of images along new channels."""

    def data(self, op: OpView) -> list[int]:
        """Return all operands."""
        return list(range(len(op.node.inputs)))


@tiling_rule("Unpack", linear=True)
class Unpack(AlongChannels):
    """One result per channel."""

    def dims(self, op: OpView) -> set[int]:
        """Return the dimension of the channels."""
        return {op.node.attrs["axis"].i % rank_of(op.node.inputs[0])}

    def moves(self, op: OpView) -> Mapping[int, int]:
        """Return the dimensions that remain."""
        return without(self.dims(op), rank_of(op.node.inputs[0]))


@tiling_rule("GatherV2")
class Gather(AlongChannels):
    """Selection of channels, or lookup in a table by an image of indices. Operands: table, indices, dimension."""

    def __init__(self) -> None:
        super().__init__(linear=True)

    def _dim(self, op: OpView) -> int:
        (dim,) = dims_of(op, 2, rank_of(op.node.inputs[0]))
        if op.node.attrs["batch_dims"].i:
            raise NotTileableError("a lookup with a table for each image")
        return dim

    def data(self, op: OpView) -> list[int]:
        """Return the indices of a lookup along the first dimension of a table; otherwise the gathered image."""
        value = op.evaluate(op.node.inputs[2])
        return [1] if value == 0 or not isinstance(value, int) else [0]

    def dims(self, op: OpView) -> set[int]:
        """Return the dimension of the selected channels."""
        return {self._dim(op)} if self.data(op) == [0] else set()

    def moves(self, op: OpView) -> Mapping[int, int]:
        """Return the dimensions before and after those of the indices."""
        dim, added = self._dim(op), rank_of(op.node.inputs[1]) - 1
        if self.data(op) == [1]:
            return super().moves(op)
        return {old: old if old < dim else old + added for old in range(rank_of(op.node.inputs[0])) if old != dim}

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return the kind of the image; the other operand must be the same for all tiles."""
        (position,) = self.data(op)
        if kinds[1 - position] is not TileKind.INVARIANT:
            raise NotTileableError("a lookup of image data by image data")
        return super().result_kind(op, kinds)


@tiling_rule("LRNGrad")
class ResponseNormalizationGrad(AlongChannels):
    """Gradient of a local response normalisation. Operands: gradient, image, result."""

    def data(self, op: OpView) -> list[int]:
        """Return all operands."""
        return [0, 1, 2]

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return the kind of the gradient, in which the op is linear."""
        if TileKind.PARTIAL in kinds[1:]:
            raise NotTileableError("LRNGrad is not linear in forward values")
        super().result_kind(op, [TileKind.FULL if kind is TileKind.PARTIAL else kind for kind in kinds])
        return kinds[0]


@tiling_rule("Bitcast")
class Bitcast(AlongChannels):
    """Bits of each entry as another type of the same size."""

    def dims(self, op: OpView) -> set[int]:
        """Return no dimension."""
        return set()

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return `FULL`; the number of entries must not change."""
        if rank_of(op.node.inputs[0]) != rank_of(op.node.out()):
            raise NotTileableError("a bitcast to a dtype of another size")
        return super().result_kind(op, kinds)


@tiling_rule("EnsureShape", linear=True)
class EnsureShape(AlongChannels):
    """Check of a static shape, which holds for the full image."""

    def dims(self, op: OpView) -> set[int]:
        """Return no dimension."""
        return set()

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Return the operand: a tile has another shape."""
        return identity(operands)
