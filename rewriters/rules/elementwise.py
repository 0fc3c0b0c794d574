"""Elementwise ops: each pixel of the result needs the same pixel of the operands only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from rewriters.errors import NotTileableError
from rewriters.ir.device_model import DeviceModel
from rewriters.ir.graph import PER_PIXEL, Node, Tensor
from rewriters.ir.op_traits import Trait, ops_with, traits_of
from rewriters.ir.static_values import constant
from rewriters.rules.axis_layouts import Anchor, AxisMap
from rewriters.rules.intervals import Interval, hull_of, whole
from rewriters.rules.registry import AxisPlan, Emitter, OpView, Rule, TileKind, add_rule, not_tileable, tiling_rule

__all__: list[str] = []


RESULT_ROWS = -1
"""Stands for the rows of the result in the rows of an operand."""


def broadcasts(op: OpView, position: int, axis: int) -> bool:
    """Return whether operand `position` has one row where the output has many."""
    operand, out = op.node.inputs[position], op.node.out()
    dim = op.dim(out, axis)
    if dim is None:
        return False
    assert out.shape is not None
    return aligned(operand, len(out.shape))[dim] == 1 != op.extent(out, axis)


def aligned(tensor: Tensor, rank: int) -> tuple[int | None, ...]:
    """Return a shape as broadcasting extends it to another rank."""
    if tensor.shape is None:
        raise NotTileableError(f"operand `{tensor.name}` has an unknown rank")
    return (1,) * (rank - len(tensor.shape)) + tensor.shape


def spreads(op: OpView, position: int) -> bool:
    """Return whether operand `position` has one row, or one image, where the output has many."""
    operand, out = op.node.inputs[position].shape, op.node.out().shape
    if any(broadcasts(op, position, axis) for axis in op.axes(op.node.out())):
        return True
    return operand is None or out is None or len(operand) < len(out) or operand[0] == 1 != out[0]


def check_ranks(op: OpView, kinds: Sequence[TileKind], read_whole: Sequence[int] = ()) -> None:
    """Refuse operands whose rows do not line up with those of the output, except those that are read whole."""
    out = op.node.out()
    layout = op.layout(out)
    assert out.shape is not None
    for position, (operand, kind) in enumerate(zip(op.node.inputs, kinds, strict=True)):
        if position in read_whole:
            continue
        shape = aligned(operand, len(out.shape))
        varies = any(dim is not None and shape[dim] != 1 for dim in layout.dims)
        if kind is TileKind.INVARIANT:
            if varies or shape[0] != 1:
                raise NotTileableError(
                    f"operand `{operand.name}` of shape {operand.shape} is not the same for all tiles"
                )
            continue
        if len(operand.shape or ()) < len(out.shape):  # Broadcasting aligns the batch with another dimension.
            raise NotTileableError(f"operand `{operand.name}` of shape {operand.shape} has fewer axes than the output")
        # The operand may have its axes in other dimensions, or one row where the output has many.
        has_rows = any(rows != 1 for rows in op.layout(operand).extents(operand))
        if not (varies or has_rows or kind is TileKind.PARTIAL):
            continue
        if not lie_alike(op, operand):
            raise NotTileableError(f"operand `{operand.name}` of shape {operand.shape} has other axes than the output")


def lie_alike(op: OpView, operand: Tensor) -> bool:
    """Return whether the axes of an operand lie in the dimensions of the output's."""
    out = op.node.out()
    one, other = op.layout(operand), op.layout(out)
    if len(one.dims) != len(other.dims) or one.batch_fold != other.batch_fold:
        return False
    shape = aligned(operand, len(out.shape or ()))
    pairs = enumerate(zip(one.dims, other.dims, strict=True))
    return all(a == b or op.extent(operand, axis) == 1 == (1 if b is None else shape[b]) for axis, (a, b) in pairs)


def run_per_pixel(op: str, device: DeviceModel, features: Any, *others: Any) -> list[Any]:
    """Run an op of matrices on the pixels of images.

    Args:
        op: Type of a softmax, of a cross-entropy, or of the test whether a class is among the best.
        device: The device.
        features: `(..., classes)`.
        others: Labels, of the shape of `features`, with or without the classes; for the test also the number of classes
            that count as the best.

    Returns:
        The result of a softmax; loss, without the classes, and its gradient by `features` of a cross-entropy; or the
            result of the test, without the classes.
    """
    shape = tf.shape(features)
    # Concatenated rows may have lost a static size.
    classes = shape[-1] if features.shape[-1] is None else features.shape[-1]
    matrix = tf.reshape(features, [-1, classes])
    if not others:
        return [tf.reshape(getattr(tf.raw_ops, op)(logits=matrix), shape)]
    labels, *number = others
    if number:
        is_among_best = tf.raw_ops.InTopKV2(predictions=matrix, targets=tf.reshape(labels, [-1]), k=number[0])
        return [tf.reshape(is_among_best, shape[:-1])]
    if labels.dtype == tf.int32 and device.is_gpu:
        labels = tf.cast(labels, tf.int64)  # The kernel that reshapes int32 reads host memory.
    flat = tf.reshape(labels, [-1] if op.startswith("Sparse") else [-1, classes])
    loss, gradient = getattr(tf.raw_ops, op)(features=matrix, labels=flat)
    return [tf.reshape(loss, shape[:-1]), tf.reshape(gradient, shape)]


class Pointwise(Rule):
    """Elementwise and nonlinear: forward values in, forward values out.

    Between barriers, an operand that is broadcast along the axes of the result and has axes of its own is read whole:
    the mask of the keys for tiles of queries.
    """

    cheap = True

    def links(self, op: OpView) -> list[AxisMap]:
        """Link equal dimensions; of operands that broadcast each other, link the one with the earlier axes."""
        links = super().links(op)
        shapes = {link.source: link.source.shape or () for link in links}
        alone = {
            tensor: [
                dim
                for dim, size in enumerate(shape)
                if dim and size != 1 and all(other[dim] == 1 for t, other in shapes.items() if t != tensor)
            ]
            for tensor, shape in shapes.items()
        }
        dims = [min(alone[tensor]) for tensor in shapes if alone[tensor]]
        if len(dims) < 2:
            return links
        return [link for link in links if not alone[link.source] or min(alone[link.source]) == min(dims)]

    def read_whole(self, op: OpView) -> list[int]:
        """Return the operands that have axes of their own, and one row along those of the result."""
        out = op.node.out()
        return [
            position
            for position in self.data(op)
            if len(op.node.inputs[position].shape or ()) == len(out.shape or ())
            and op.layouts.of(op.node.inputs[position]) is not None
            and op.layouts.of(out) is not None
            and self._has_other_axes(op, op.node.inputs[position])
        ]

    def _has_other_axes(self, op: OpView, operand: Tensor) -> bool:
        layout, shape = op.layout(op.node.out()), operand.shape or ()
        has_rows = any(rows != 1 for rows in op.layout(operand).extents(operand))
        is_broadcast = all(dim is None or shape[dim] == 1 for dim in layout.dims)
        return has_rows and is_broadcast and not lie_alike(op, operand)

    def result_kind_gathered(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return the kind of the result if all operands are true values."""
        read_whole = self.read_whole(op)
        if not read_whole:
            return self.result_kind(op, kinds)
        images = {position for position, kind in enumerate(kinds) if kind is TileKind.FULL}
        if images.issubset(read_whole):
            raise NotTileableError(f"no operand of {op.node.op} has the axes of its result")
        check_ranks(op, kinds, [position for position in read_whole if position in images])
        return TileKind.FULL

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return `FULL`; refuse partial operands."""
        check_ranks(op, kinds)
        if TileKind.PARTIAL in kinds:
            raise NotTileableError(f"{op.node.op} is not linear in a gradient")
        return TileKind.FULL

    def operand_rows_for_result(self, op: OpView, axis: int, out: Interval) -> AxisPlan:
        """Require rows `out` of every operand."""
        return AxisPlan(out, out, self._rows(op, axis, out))

    def result_rows_from_operands(self, op: OpView, axis: int, parts: Sequence[Interval | None]) -> AxisPlan:
        """Plan for the hull of the rows of all partial operands."""
        held = [part for part in parts if part is not None]
        out = hull_of(held).clip(op.extent(op.node.out(), axis))
        return AxisPlan(out, out, self._rows(op, axis, out))

    def _rows(self, op: OpView, axis: int, out: Interval) -> list[Interval | None]:
        rows = op.once(
            ("rows", axis), lambda: [self._operand_rows(op, axis, one) for one in range(len(op.node.inputs))]
        )
        return [None if one is None else out if one is RESULT_ROWS else whole(one, len(out.lo)) for one in rows]

    def _operand_rows(self, op: OpView, axis: int, position: int) -> int | None:
        """Return the rows of an operand in each tile: a number, `RESULT_ROWS`, or `None` for one without rows."""
        operand = op.node.inputs[position]
        if position in self.read_whole(op):
            return op.extent(operand, axis)
        if position not in self.data(op) or len(operand.shape or ()) < len(op.node.out().shape or ()):
            return None
        return 1 if broadcasts(op, position, axis) else RESULT_ROWS


class LinearIn(Pointwise):
    """Elementwise and linear in some operands, one of which may be a gradient.

    Args:
        positions: Operands in which the op is linear while the others are forward values.
    """

    def __init__(self, positions: Sequence[int]) -> None:
        self.positions = tuple(positions)

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return `PARTIAL` for exactly one partial operand in a linear position."""
        check_ranks(op, kinds)
        partial = [p for p, kind in enumerate(kinds) if kind is TileKind.PARTIAL]
        if not partial:
            return TileKind.FULL
        if len(partial) > 1 or partial[0] not in self.positions:
            raise NotTileableError(f"{op.node.op} is not linear in the gradient(s) at operand(s) {partial}")
        if spreads(op, partial[0]):
            raise NotTileableError(f"{op.node.op} broadcasts a gradient over the image or the batch")
        return TileKind.PARTIAL


@tiling_rule("Cast")
class Cast(LinearIn):
    """Linear between floating point types; a cast to an integer rounds, and rounded parts do not add up."""

    def __init__(self) -> None:
        super().__init__((0,))

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return `PARTIAL` for a gradient that stays real or complex."""
        types = (op.node.inputs[0].dtype, op.node.out().dtype)
        if kinds[0] is TileKind.PARTIAL and not all(dtype.is_floating or dtype.is_complex for dtype in types):
            raise NotTileableError(f"a gradient cast from {types[0].name} to {types[1].name} is rounded")
        return super().result_kind(op, kinds)


class Additive(Pointwise):
    """Addition and subtraction: either all operands are gradients or none is."""

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return `PARTIAL` for all-partial operands; refuse a mixture, which is affine."""
        check_ranks(op, kinds)
        if all(kind is TileKind.PARTIAL for kind in kinds):
            if any(spreads(op, position) for position in range(len(kinds))):
                raise NotTileableError(f"{op.node.op} broadcasts a gradient over the image or the batch")
            return TileKind.PARTIAL
        if TileKind.PARTIAL in kinds:
            raise NotTileableError(f"{op.node.op} adds forward values to a gradient: tiles would count them twice")
        return TileKind.FULL


class Select(Pointwise):
    """`condition ? x : y`: linear in a gradient if the other branch is zero or a gradient too."""

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return the kind of the branches; the condition must not be a gradient."""
        check_ranks(op, kinds)
        if op.node.op == "Select" and len(op.node.inputs[0].shape or ()) == 1:
            raise NotTileableError("a selection by one condition per image")
        branches = {1: kinds[1], 2: kinds[2]}
        if TileKind.PARTIAL not in kinds:
            return TileKind.FULL
        if kinds[0] is TileKind.PARTIAL:
            raise NotTileableError("a selection by a gradient is not linear in it")
        for position, kind in branches.items():
            if kind is not TileKind.PARTIAL and not is_zero(op.node.inputs[position]):
                raise NotTileableError(
                    "it selects between a gradient and forward values, so its result is not linear in the gradient"
                )
            if kind is TileKind.PARTIAL and spreads(op, position):
                raise NotTileableError("a selection broadcasts a gradient over the image or the batch")
        return TileKind.PARTIAL


def is_zero(tensor: Tensor) -> bool:
    """Return whether a tensor is zero by construction."""
    node = tensor.node
    if node.op == "ZerosLike":
        return True
    if node.op in ("Fill", "BroadcastTo", "Reshape", "Cast", "Identity"):
        return is_zero(node.inputs[1 if node.op == "Fill" else 0])
    value = constant(node)
    return value is not None and not np.any(value)


@tiling_rule("BiasAdd")
class BiasAdd(Pointwise):
    """Addition of a vector over the channels."""

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return the kind of the image; the bias must lie along its channels."""
        require_channels(op, op.node.out())
        if kinds[1] is not TileKind.INVARIANT:
            raise NotTileableError("its bias is computed from image data")
        if kinds[0] is TileKind.PARTIAL:
            raise NotTileableError("BiasAdd adds forward values to a gradient: tiles would count them twice")
        return kinds[0]

    def anchors(self, op: OpView) -> list[Anchor]:
        """Anchor the output if channels come first: with channels last a token with several heads may be meant."""
        return sides_by_format(op.node, [op.node.out()]) if has_channels_first(op.node) else []

    def data(self, op: OpView) -> list[int]:
        """Return the image; the bias is passed in full size."""
        return [0]


@tiling_rule("ZerosLike")
class Zeros(Pointwise):
    """Zeros of the kind of the operand, as in the gradient of `Maximum` for the smaller operand."""

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return the kind of the operand; only its shape matters."""
        check_ranks(op, kinds)
        return kinds[0]


@tiling_rule("Softmax", "LogSoftmax")
class OverChannels(Pointwise):
    """Normalisation along the last dimension."""

    def channels(self, op: OpView) -> list[tuple[Tensor, int]]:
        """Return the last dimension."""
        image = op.node.inputs[0]
        return [(image, len(image.shape) - 1)] if image.shape else []

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return `FULL`; the last dimension must hold channels."""
        out = op.node.out()
        rank = len(out.shape or ())
        if rank - 1 not in op.layout(out).others(rank):
            raise NotTileableError("it works along an axis of the image")
        return super().result_kind(op, kinds)

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Run the op, or the body of a called function inline."""
        if PER_PIXEL in op.node.attrs:
            return run_per_pixel(op.node.kernel, op.device, *operands)
        return emitter.clone(op.node, operands)


def spatial_dims(node: Node, rank: int) -> tuple[int, ...]:
    """Return the dimensions of the axes according to the `data_format` attribute."""
    layout = node.attrs.get("data_format")
    if layout is not None and b"VECT" in layout.s:
        raise NotTileableError(f'data_format "{layout.s.decode()}": channels are in two dimensions')
    first = layout is not None and layout.s.startswith(b"NC")
    return tuple(range(2, rank) if first else range(1, rank - 1))


def channel_dim(node: Node, rank: int) -> int:
    """Return the dimension of the channels according to the `data_format` attribute."""
    return 1 if spatial_dims(node, rank)[-1:] == (rank - 1,) else rank - 1


def sides_by_format(node: Node, tensors: Sequence[Tensor]) -> list[Anchor]:
    """Return layouts by the `data_format`. Tensors of rank 3 have none: they may hold a sequence."""
    return [(t, spatial_dims(node, len(t.shape))) for t in tensors if t.shape is not None and len(t.shape) in (4, 5)]


def has_channels_first(node: Node) -> bool:
    """Return whether the `data_format` attribute puts the channels before the axes."""
    return "data_format" in node.attrs and node.attrs["data_format"].s.startswith(b"NC")


def require_format(op: OpView, tensors: Sequence[Tensor]) -> None:
    """Refuse images whose axes lie in other dimensions than the `data_format` says."""
    for tensor in tensors:
        layout, dims = op.layout(tensor), spatial_dims(op.node, len(tensor.shape or ()))
        here = len(layout.dims) == len(dims) and all(
            a == b or op.extent(tensor, axis) == 1 == (tensor.shape or ())[b]
            for axis, (a, b) in enumerate(zip(layout.dims, dims, strict=False))
        )
        if not here:
            raise NotTileableError(f"the axes of `{tensor.name}` do not match the `data_format` of {op.node.op}")


def require_channels(op: OpView, tensor: Tensor) -> None:
    """Refuse an image with an axis where the `data_format` has the channels."""
    if channel_dim(op.node, len(tensor.shape or ())) in op.layout(tensor).dims:
        raise NotTileableError(f"{op.node.op} works along an axis of the image")


ELEMENTWISE = ops_with(Trait.ELEMENTWISE)
"""Op types whose result has the shape to which the operands are broadcast."""

_ADDITIVE = ops_with(Trait.ADDITIVE)
_LINEAR = frozenset(op_type for op_type in ELEMENTWISE if traits_of(op_type).linear_in)
_OWN_RULES = frozenset(("Cast", "SelectV2"))

for _op_type in sorted(ELEMENTWISE - _ADDITIVE - _LINEAR - _OWN_RULES):
    add_rule(_op_type, Pointwise())
for _op_type in sorted(_LINEAR):
    add_rule(_op_type, LinearIn(traits_of(_op_type).linear_in))
for _op_type in sorted(_ADDITIVE):
    add_rule(_op_type, Additive())
for _op_type in ("Select", "SelectV2"):
    add_rule(_op_type, Select())

not_tileable(
    "it mixes all pixels of an image",
    "BatchMatMul",
    "BatchMatMulV2",
    "BatchMatMulV3",
)


def identity(operands: Sequence[Any]) -> list[Any]:
    """Return the operand: fitting it has moved its rows already."""
    return [operands[0]]
