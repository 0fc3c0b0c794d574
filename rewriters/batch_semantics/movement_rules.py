"""What operations that move rows, or look them up, do to the samples of a batch: the second part of the table."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rewriters.batch_semantics.axis_rules import registered_rule, rows_at, rule, sum_of
from rewriters.batch_semantics.domain import Axis, BatchKind, CrossSampleError, Made, NotKnownError, Op, met
from rewriters.errors import NotTileableError
from rewriters.rules.slicing import AxisSlice, Sliced

__all__: list[str] = []


def _moved(op: Op, position: int) -> Axis:
    """Where the samples of the one operand that matters lie; sums go on as sums."""
    axis = op.values[position].made.axis
    if axis is None or any(p != position for p in op.of(BatchKind.ROWS) + op.of(BatchKind.SUM)):
        raise CrossSampleError
    return axis


def _is_sum(op: Op, position: int) -> bool:
    return op.values[position].kind is BatchKind.SUM and len(op.of(BatchKind.SUM)) == 1 and not op.of(BatchKind.ROWS)


@rule("Reshape", "ExpandDims", "Squeeze")
def _reshape(op: Op) -> list[Made]:
    """By the number of elements before and behind each sample."""
    if _is_sum(op, 0):
        return sum_of(op, added=False)
    axis, have, want = _moved(op, 0), op.shape(0), op.out_shape()
    what = op.values[0].made
    if what.ragged:
        if axis.dim or math.prod(_known(have[1:])) != math.prod(_known(want[1:])):
            raise NotKnownError
        return rows_at(op, axis, True, what.positions)
    before, behind = math.prod(_known(have[: axis.dim])), math.prod(_known(have[axis.dim + 1 :]))
    times, within = _layout(op, axis, have)
    before, behind = before * times, behind * within
    certain, maybe = op.sizes.dims(op.outs[0])
    dims = certain or maybe
    for dim in sorted(dims):
        ahead, after = math.prod(_known(want[:dim])), math.prod(_known(want[dim + 1 :]))
        if axis.within is None and (ahead, want[dim]) == (math.prod(_known(have[: axis.dim])), have[axis.dim]):
            return rows_at(op, axis.moved(dim), positions=what.positions)  # Along it nothing moves, however it lies.
        if not before % ahead and not behind % after:
            return rows_at(op, Axis(dim, before // ahead, behind // after), positions=what.positions)
    raise CrossSampleError


def _known(shape: Sequence[int | None]) -> list[int]:
    if None in shape:
        raise NotKnownError
    return [size or 1 for size in shape]


def _layout(op: Op, axis: Axis, shape: Sequence[int | None], of_others: int | None = None) -> tuple[int, int]:
    """Times that a dimension holds all samples, and entries of each; where nobody said, samples follow each other.

    Or they are laid out with as many entries each `of_others`, which what is the same along the dimension may be taken
    to be.
    """
    if axis.within is not None:
        return axis.before or 1, axis.within
    size, samples = shape[axis.dim], op.sizes.samples
    entries = 1 if size is None or samples is None else max(size // samples, 1)
    return (entries // of_others, of_others) if of_others and entries % of_others == 0 else (1, entries)


@rule("Transpose")
def _transpose(op: Op) -> list[Made]:
    if _is_sum(op, 0):
        return sum_of(op, added=False)
    axis = _moved(op, 0)
    return rows_at(op, axis.moved(op.ints(1).index(axis.dim)), op.values[0].made.ragged)


def _cuts(op: Op) -> list[AxisSlice]:
    found = registered_rule(op.node)
    assert isinstance(found, Sliced)
    try:
        return found.cuts(op.analysis.view(op.node))
    except NotTileableError:
        raise NotKnownError from None


def _taken(op: Op, axis: Axis, cut: AxisSlice, shape: Sequence[int | None], part: Sequence[int | None]) -> Axis:
    """What a slice has of samples: all of them, maybe of several times that the batch is there."""
    if cut.out is None or cut.stride != 1:
        raise CrossSampleError
    if part[cut.out] == shape[axis.dim] and cut.begin == 0:
        return axis.moved(cut.out)
    size = None if op.sizes.samples is None else op.sizes.samples * (axis.within or 1)
    taken = part[cut.out]
    if size is None or taken is None or cut.begin % size or taken % size:
        raise CrossSampleError
    return Axis(cut.out, taken // size, axis.within)


@rule("StridedSlice", "Slice")
def _slice(op: Op) -> list[Made]:
    if _is_sum(op, 0):
        return sum_of(op, added=False)
    axis = _moved(op, 0)
    what = op.values[0].made
    try:
        cut = next(cut for cut in _cuts(op) if cut.dim == axis.dim)
    except NotKnownError:
        if what.ragged:  # Of rows whose number is not known it does not take all.
            raise CrossSampleError from None
        raise
    if what.ragged:
        if cut.out is None or cut.size is not None:
            raise CrossSampleError
        return rows_at(op, axis.moved(cut.out), True, what.positions)
    return rows_at(op, _taken(op, axis, cut, op.shape(0), op.out_shape()))


@rule("StridedSliceGrad")
def _slice_grad(op: Op) -> list[Made]:
    if _is_sum(op, 4):
        return sum_of(op, added=False)
    axis = _moved(op, 4)
    cut = next((cut for cut in _cuts(op) if cut.out == axis.dim), None)
    if cut is None:
        raise CrossSampleError
    if cut.dim is None:
        raise NotKnownError
    whole = Axis(cut.dim, axis.before, axis.within)
    if op.out_shape()[cut.dim] != op.shape(4)[axis.dim]:
        _, within = _layout(op, axis, op.shape(4))
        size = None if op.sizes.samples is None else op.sizes.samples * within
        extent, part = op.out_shape()[cut.dim], op.shape(4)[axis.dim]
        if size is None or extent is None or part is None or cut.stride != 1:
            raise CrossSampleError
        if cut.begin % size or part % size or extent % size:
            raise CrossSampleError
        whole = Axis(cut.dim, extent // size, within)
    return rows_at(op, whole)


@rule("ConcatV2")
def _concat(op: Op) -> list[Made]:
    """Beside each other, or whole batches behind each other."""
    data = range(len(op.values) - 1)
    (dim,) = (number % len(op.out_shape()) for number in op.ints(len(op.values) - 1))
    if op.of(BatchKind.SUM):
        if op.of(BatchKind.ROWS):
            raise CrossSampleError
        return sum_of(op, added=False)
    axes = [op.axis(p) for p in data]
    axis = met(axis for axis in axes if axis is not None)
    if axis.dim != dim:
        return rows_at(op, axis, op.is_ragged(data))
    if None in axes or op.is_ragged(data):
        raise CrossSampleError
    if op.sizes.samples is None:
        raise NotKnownError
    layouts = [_layout(op, own, op.shape(p), axis.within) for p, own in enumerate(axes) if own is not None]
    if len({within for _, within in layouts}) > 1:
        raise CrossSampleError
    return rows_at(op, Axis(dim, sum(before for before, _ in layouts), layouts[0][1]))


@rule("Pack")
def _pack(op: Op) -> list[Made]:
    if op.of(BatchKind.SUM):
        if op.of(BatchKind.ROWS):
            raise CrossSampleError
        return sum_of(op, added=False)
    axis = met(axis for p in range(len(op.values)) if (axis := op.axis(p)) is not None)
    new = op.node.attrs["axis"].i % len(op.out_shape())
    return rows_at(op, axis.moved(axis.dim + (new <= axis.dim)), op.is_ragged(op.of(BatchKind.ROWS)))


@rule("Unpack")
def _unpack(op: Op) -> list[Made]:
    if _is_sum(op, 0):
        return sum_of(op, added=False)
    axis, gone = _moved(op, 0), op.node.attrs["axis"].i % len(op.shape(0))
    if axis.dim == gone:
        raise CrossSampleError
    return rows_at(op, axis.moved(axis.dim - (gone < axis.dim)))


@rule("Split", "SplitV")
def _split(op: Op) -> list[Made]:
    position, dim_at = (1, 0) if op.node.op == "Split" else (0, 2)
    if _is_sum(op, position):
        return sum_of(op, added=False)
    axis = _moved(op, position)
    if axis.dim != op.ints(dim_at)[0] % len(op.shape(position)):
        return rows_at(op, axis)
    size = None if op.sizes.samples is None else op.sizes.samples * (axis.within or 1)
    lengths = [op.out_shape(index)[axis.dim] for index in range(len(op.outs))]
    if size is None or any(length is None or length % size for length in lengths):
        raise CrossSampleError
    return [Made(BatchKind.ROWS, Axis(axis.dim, (length or 0) // size, axis.within)) for length in lengths]


@rule("ReverseV2", "Roll", "Cumsum", "Cumprod", "CumulativeLogsumexp")
def _along_axes(op: Op) -> list[Made]:
    if _is_sum(op, 0) and op.node.op in ("ReverseV2", "Roll", "Cumsum"):
        return sum_of(op, added=False)
    axis = _moved(op, 0)
    if axis.dim in {number % len(op.shape(0)) for number in op.ints(2 if op.node.op == "Roll" else 1)}:
        raise CrossSampleError
    return rows_at(op, axis)


@rule("Pad", "PadV2", "MirrorPad", "MirrorPadGrad")
def _pad(op: Op) -> list[Made]:
    if _is_sum(op, 0) and op.node.op != "PadV2":
        return sum_of(op, added=False)
    axis = _moved(op, 0)
    paddings, _ = op.sizes.values(op.node.inputs[1])
    if not isinstance(paddings, np.ndarray):
        raise NotKnownError
    if paddings[axis.dim].any():
        raise CrossSampleError
    return rows_at(op, axis)


@rule("Tile", "BroadcastTo")
def _spread(op: Op) -> list[Made]:
    """A batch that is repeated is there several times; a sum that each sample gets joins them."""
    if _is_sum(op, 0):
        if op.scales():
            raise CrossSampleError
        return sum_of(op, added=False)
    axis, have, want = _moved(op, 0), op.shape(0), op.out_shape()
    here = axis.dim + len(want) - len(have)
    if op.values[0].made.ragged or have[axis.dim] is None or want[here] == have[axis.dim]:
        return rows_at(op, axis.moved(here), op.values[0].made.ragged)
    if op.node.op == "BroadcastTo":
        raise CrossSampleError
    times = (want[here] or 0) // (have[axis.dim] or 1)
    return rows_at(op, Axis(here, times * (axis.before or 1), axis.within))


@rule("SpaceToBatchND", "BatchToSpaceND")
def _pixels(op: Op) -> list[Made]:
    if _is_sum(op, 0) or (axis := _moved(op, 0)).dim:
        raise CrossSampleError
    block = math.prod(op.ints(1))
    if op.node.op == "SpaceToBatchND":
        return rows_at(op, Axis(0, block * (axis.before or 1), axis.within))
    if (axis.before or 1) % block:
        raise CrossSampleError
    return rows_at(op, Axis(0, (axis.before or 1) // block, axis.within))


# Looked up --------------------------------------------------------------------------------------------------


@rule("OneHot")
def _one_hot(op: Op) -> list[Made]:
    axis, rank = _moved(op, 0), len(op.out_shape())
    new = op.node.attrs["axis"].i % rank
    return rows_at(op, axis.moved(axis.dim + (new <= axis.dim)), op.values[0].made.ragged)


@rule("Where")
def _where(op: Op) -> list[Made]:
    """Positions of rows, of which there are as many as data say."""
    axis = _moved(op, 0)
    if axis.dim:
        raise NotKnownError
    return rows_at(op, Axis(0), True, axis if len(op.shape(0)) == 1 else None)


@rule("Gather", "GatherV2")
def _gather(op: Op) -> list[Made]:
    """Rows of a table; of samples only those that a mask has chosen."""
    table, index = op.values[0], op.values[1]
    along = 0 if op.node.op == "Gather" else op.ints(2)[0] % len(op.shape(0))
    alike = op.node.attrs["batch_dims"].i if "batch_dims" in op.node.attrs else 0
    if index.kind is BatchKind.SUM:
        raise CrossSampleError
    if table.kind is BatchKind.SUM:
        if index.kind is BatchKind.ROWS:
            raise CrossSampleError
        return sum_of(op, added=False)
    of_table, of_index = op.axis(0), index.made.axis
    if table.kind is BatchKind.ROWS and of_table is not None and of_table.dim == along:
        if index.made.positions is None or index.made.positions.moved(along) != of_table or alike:
            raise CrossSampleError
        return rows_at(op, Axis(along), True)
    places = []
    if of_table is not None:
        moved = of_table.dim if of_table.dim < along else of_table.dim + len(op.shape(1)) - alike - 1
        places.append(of_table.moved(moved))
    if of_index is not None:
        places.append(of_index.moved(of_index.dim if of_index.dim < alike else of_index.dim + along - alike))
    return rows_at(op, met(places), index.made.ragged or table.made.ragged)


@rule("RandomShuffle", "Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2")
def _mixes(op: Op) -> list[Made]:
    axis = _moved(op, 0)
    if axis.dim == 0 or op.node.op != "RandomShuffle":
        raise CrossSampleError
    return rows_at(op, axis)


@rule("ResourceGather")
def _gather_weights(op: Op) -> list[Made]:
    axis = _moved(op, 1)
    return rows_at(op, axis, op.values[1].made.ragged)


@rule("GatherNd")
def _gather_nd(op: Op) -> list[Made]:
    table, index = op.values[0], op.values[1]
    if table.cut or table.kind is BatchKind.SUM:
        raise CrossSampleError  # Of what is not of data each micro-batch has a part, and the index may name any entry.
    if table.kind is not BatchKind.EVEN or index.kind is not BatchKind.ROWS or index.made.axis is None:
        raise NotKnownError
    if index.made.axis.dim == len(op.shape(1)) - 1:
        raise CrossSampleError
    return rows_at(op, index.made.axis, index.made.ragged)
