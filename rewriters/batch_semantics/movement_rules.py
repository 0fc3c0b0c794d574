"""Rules for the layouts of ops that move rows or look them up; `axis_rules.py` has those of all other ops."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from rewriters.batch_semantics.axis_rules import registered_rule, rows_at, rule
from rewriters.batch_semantics.domain import (
    BatchKind,
    BatchLayout,
    BatchOp,
    CrossSampleError,
    UnsupportedUseError,
    common_axis,
)
from rewriters.batch_semantics.trace_comparison import BatchAxis
from rewriters.errors import NotTileableError
from rewriters.rules.slicing import AxisSlice, Sliced

__all__: list[str] = []

_MovementRule = Callable[[BatchOp, BatchAxis], list[BatchLayout]]


def _movement(*op_types: str, data: int = 0) -> Callable[[_MovementRule], _MovementRule]:
    """Register a rule for ops that move the rows of one operand.

    Args:
        op_types: Types of the ops.
        data: Position of the operand; samples in another operand are mixed with it.
    """

    def add(function: _MovementRule) -> _MovementRule:
        @rule(*op_types)
        def apply(op: BatchOp) -> list[BatchLayout]:
            axis = op.axis(data)
            if axis is None or any(p != data for p in op.of_kind(BatchKind.PER_SAMPLE)):
                raise CrossSampleError
            return function(op, axis)

        return function

    return add


@_movement("Reshape", "ExpandDims", "Squeeze")
def _reshape(op: BatchOp, axis: BatchAxis) -> list[BatchLayout]:
    """Locate samples by the number of elements before and after the batch axis."""
    old, new = op.shape(0), op.out_shape()
    before, after = math.prod(_static(old[: axis.dim])), math.prod(_static(old[axis.dim + 1 :]))
    repeats, entries = _split_extent(op, axis, old)
    grown, unknown = op.sizes.batch_dims(op.outs[0])
    for dim in sorted(grown or unknown):
        new_before, new_after = math.prod(_static(new[:dim])), math.prod(_static(new[dim + 1 :]))
        if axis.entries is None and (new_before, new[dim]) == (before, old[axis.dim]):
            return rows_at(op, axis.moved(dim))  # The axis is unchanged.
        if not before * repeats % new_before and not after * entries % new_after:
            new_axis = BatchAxis(dim, before * repeats // new_before, after * entries // new_after)
            return rows_at(op, new_axis)
    raise CrossSampleError


def _static(shape: Sequence[int | None]) -> list[int]:
    if None in shape:
        raise UnsupportedUseError
    return [size or 1 for size in shape]


def _split_extent(
    op: BatchOp, axis: BatchAxis, shape: Sequence[int | None], like: int | None = None
) -> tuple[int, int]:
    """Return the number of batches along an axis, and of entries of each sample.

    An axis of unknown order, along which all samples have one value, is taken to hold one batch; or one with `like`
    entries of each sample, if these divide its size.
    """
    if axis.entries is not None:
        return axis.repeats or 1, axis.entries
    size, samples = shape[axis.dim], op.sizes.samples
    entries = 1 if size is None or samples is None else max(size // samples, 1)
    return (entries // like, like) if like and entries % like == 0 else (1, entries)


@_movement("Transpose")
def _transpose(op: BatchOp, axis: BatchAxis) -> list[BatchLayout]:
    return rows_at(op, axis.moved(op.ints(1).index(axis.dim)))


def _slices(op: BatchOp) -> list[AxisSlice]:
    registered = registered_rule(op.node)
    assert isinstance(registered, Sliced)
    try:
        return registered.cuts(op.analysis.view(op.node))
    except NotTileableError:
        raise UnsupportedUseError from None


@_movement("StridedSlice", "Slice")
def _slice(op: BatchOp, axis: BatchAxis) -> list[BatchLayout]:
    cut = next(cut for cut in _slices(op) if cut.dim == axis.dim)
    if cut.out is None or cut.stride != 1:
        raise CrossSampleError
    size = op.out_shape()[cut.out]
    if size == op.shape(0)[axis.dim] and cut.begin == 0:
        return rows_at(op, axis.moved(cut.out))
    batch = None if op.sizes.samples is None else op.sizes.samples * (axis.entries or 1)
    if batch is None or size is None or cut.begin % batch or size % batch:
        raise CrossSampleError
    return rows_at(op, BatchAxis(cut.out, size // batch, axis.entries))


@_movement("StridedSliceGrad", data=4)
def _slice_grad(op: BatchOp, axis: BatchAxis) -> list[BatchLayout]:
    cut = next((cut for cut in _slices(op) if cut.out == axis.dim), None)
    if cut is None:
        raise CrossSampleError
    if cut.dim is None:
        raise UnsupportedUseError
    extent, size = op.out_shape()[cut.dim], op.shape(4)[axis.dim]
    if extent == size:
        return rows_at(op, axis.moved(cut.dim))
    _, entries = _split_extent(op, axis, op.shape(4))
    batch = None if op.sizes.samples is None else op.sizes.samples * entries
    if batch is None or extent is None or size is None or cut.stride != 1:
        raise CrossSampleError
    if cut.begin % batch or size % batch or extent % batch:
        raise CrossSampleError
    return rows_at(op, BatchAxis(cut.dim, extent // batch, entries))


@rule("ConcatV2")
def _concat(op: BatchOp) -> list[BatchLayout]:
    """Concatenate features of samples, or whole batches."""
    data = range(len(op.values) - 1)
    (dim,) = (number % len(op.out_shape()) for number in op.ints(len(op.values) - 1))
    axes = [op.axis(p) for p in data]
    axis = common_axis(axis for axis in axes if axis is not None)
    if axis.dim != dim:
        return rows_at(op, axis)
    if None in axes:
        raise CrossSampleError
    if op.sizes.samples is None:
        raise UnsupportedUseError
    extents = [_split_extent(op, part, op.shape(p), axis.entries) for p, part in enumerate(axes) if part is not None]
    if len({entries for _, entries in extents}) > 1:
        raise CrossSampleError
    return rows_at(op, BatchAxis(dim, sum(repeats for repeats, _ in extents), extents[0][1]))


@rule("Pack")
def _pack(op: BatchOp) -> list[BatchLayout]:
    axis = common_axis(axis for p in range(len(op.values)) if (axis := op.axis(p)) is not None)
    new_dim = op.node.attrs["axis"].i % len(op.out_shape())
    return rows_at(op, axis.moved(axis.dim + (new_dim <= axis.dim)))


@_movement("Unpack")
def _unpack(op: BatchOp, axis: BatchAxis) -> list[BatchLayout]:
    dim = op.node.attrs["axis"].i % len(op.shape(0))
    if axis.dim == dim:
        raise CrossSampleError
    return rows_at(op, axis.moved(axis.dim - (dim < axis.dim)))


@_movement("Split", data=1)
@_movement("SplitV")
def _split(op: BatchOp, axis: BatchAxis) -> list[BatchLayout]:
    data, dim_at = (1, 0) if op.node.op == "Split" else (0, 2)
    if axis.dim != op.ints(dim_at)[0] % len(op.shape(data)):
        return rows_at(op, axis)
    batch = None if op.sizes.samples is None else op.sizes.samples * (axis.entries or 1)
    lengths = [op.out_shape(index)[axis.dim] for index in range(len(op.outs))]
    if batch is None or any(length is None or length % batch for length in lengths):
        raise CrossSampleError
    return [
        BatchLayout(BatchKind.PER_SAMPLE, BatchAxis(axis.dim, (length or 0) // batch, axis.entries))
        for length in lengths
    ]


@_movement("ReverseV2", "Roll", "Cumsum")
@_movement("Cumprod", "CumulativeLogsumexp")
def _along_axes(op: BatchOp, axis: BatchAxis) -> list[BatchLayout]:
    if axis.dim in {number % len(op.shape(0)) for number in op.ints(2 if op.node.op == "Roll" else 1)}:
        raise CrossSampleError
    return rows_at(op, axis)


@_movement("Pad", "MirrorPad", "MirrorPadGrad")
@_movement("PadV2")
def _pad(op: BatchOp, axis: BatchAxis) -> list[BatchLayout]:
    paddings, _ = op.sizes.values(op.node.inputs[1])
    if not isinstance(paddings, np.ndarray):
        raise UnsupportedUseError
    if paddings[axis.dim].any():
        raise CrossSampleError
    return rows_at(op, axis)


@rule("Tile", "BroadcastTo")
def _repeat(op: BatchOp) -> list[BatchLayout]:
    """Repeat along other axes than that of the batch."""
    axis, old, new = op.axis(0), op.shape(0), op.out_shape()
    if axis is None or any(p for p in op.of_kind(BatchKind.PER_SAMPLE)):
        raise CrossSampleError
    dim = axis.dim + len(new) - len(old)
    if new[dim] != old[axis.dim]:
        raise CrossSampleError
    return rows_at(op, axis.moved(dim))


@_movement("SpaceToBatchND", "BatchToSpaceND")
def _space_to_batch(op: BatchOp, axis: BatchAxis) -> list[BatchLayout]:
    if axis.dim:
        raise CrossSampleError
    block, repeats = math.prod(op.ints(1)), axis.repeats or 1
    if op.node.op == "SpaceToBatchND":
        return rows_at(op, BatchAxis(0, block * repeats, axis.entries))
    if repeats % block:
        raise CrossSampleError
    return rows_at(op, BatchAxis(0, repeats // block, axis.entries))


# Lookups ----------------------------------------------------------------------------------------------------


@_movement("OneHot")
def _one_hot(op: BatchOp, axis: BatchAxis) -> list[BatchLayout]:
    new_dim = op.node.attrs["axis"].i % len(op.out_shape())
    return rows_at(op, axis.moved(axis.dim + (new_dim <= axis.dim)))


@rule("Gather", "GatherV2")
def _gather(op: BatchOp) -> list[BatchLayout]:
    """Look up rows of a table."""
    table, index = op.values[0], op.values[1]
    along = 0 if op.node.op == "Gather" else op.ints(2)[0] % len(op.shape(0))
    batch_dims = op.node.attrs["batch_dims"].i if "batch_dims" in op.node.attrs else 0
    table_axis, index_axis = op.axis(0), index.layout.axis
    if table.kind is BatchKind.PER_SAMPLE and table_axis is not None and table_axis.dim == along:
        raise CrossSampleError
    axes = []
    if table_axis is not None:
        is_before = table_axis.dim < along
        axes.append(table_axis.moved(table_axis.dim + (0 if is_before else len(op.shape(1)) - batch_dims - 1)))
    if index_axis is not None:
        is_before = index_axis.dim < batch_dims
        axes.append(index_axis.moved(index_axis.dim + (0 if is_before else along - batch_dims)))
    return rows_at(op, common_axis(axes))


@rule("RandomShuffle", "Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2", "Where")
def _mixes(op: BatchOp) -> list[BatchLayout]:
    raise CrossSampleError


@_movement("ResourceGather", data=1)
def _gather_weights(op: BatchOp, axis: BatchAxis) -> list[BatchLayout]:
    return rows_at(op, axis)


@rule("GatherNd")
def _gather_nd(op: BatchOp) -> list[BatchLayout]:
    table, index = op.values[0], op.values[1]
    if table.kind is not BatchKind.INVARIANT or index.kind is not BatchKind.PER_SAMPLE or index.layout.axis is None:
        raise UnsupportedUseError
    if index.layout.axis.dim == len(op.shape(1)) - 1:
        raise CrossSampleError
    return rows_at(op, index.layout.axis)
