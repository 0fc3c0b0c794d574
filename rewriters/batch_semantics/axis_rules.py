"""What operations do to the samples of a batch: the one table of it, with `movement_rules.py`.

A rule says where the samples of a result lie, or that it joins them. Operations that the registry can tile and that are
not listed here work on images apart from each other, which are the first dimension. One without a rule at all is not
known: if its result is as long as the batch, it is taken to go row by row, which is said.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from rewriters.batch_semantics.domain import (
    WITHOUT_DATA,
    Axis,
    BatchKind,
    CrossSampleError,
    Made,
    NotKnownError,
    Op,
    met,
)
from rewriters.errors import NotTileableError
from rewriters.ir.graph import Node
from rewriters.ir.static_values import is_inexact
from rewriters.rules.contraction import Einsum
from rewriters.rules.elementwise import ELEMENTWISE, LinearIn, channel_dim
from rewriters.rules.registry import find_rule

__all__: list[str] = []

Rule = Callable[[Op], list[Made]]

_RULES: dict[str, Rule] = {}

SHAPE_OPERANDS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Reshape", "BroadcastTo", "Tile", "ExpandDims", "ArgMax", "ArgMin", "Transpose"), (1,)),
    **dict.fromkeys(("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm", "Cumsum"), (1,)),
    **dict.fromkeys(("Fill", "RandomUniform", "RandomStandardNormal", "StatelessRandomUniformV2"), (0,)),
    **dict.fromkeys(("StatelessRandomNormalV2", "StatelessRandomGetKeyCounter", "TruncatedNormal"), (0,)),
    **dict.fromkeys(("Conv2DBackpropInput", "Conv3DBackpropInputV2", "DepthwiseConv2dNativeBackpropInput"), (0,)),
    **dict.fromkeys(("Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter"), (1,)),
    **dict.fromkeys(("AvgPoolGrad", "AvgPool3DGrad"), (0,)),
    **dict.fromkeys(("ResizeBilinearGrad", "ResizeBicubicGrad", "ResizeNearestNeighborGrad"), (1,)),
    **dict.fromkeys(("ResizeBilinear", "ResizeBicubic", "ResizeArea", "ResizeNearestNeighbor"), (1,)),
    "StridedSlice": (1, 2, 3),
    "StridedSliceGrad": (0, 1, 2, 3),
    "Slice": (1, 2),
    "UnsortedSegmentSum": (2,),
    "ScatterNd": (2,),
    "GatherV2": (2,),
    "SparseTensorDenseMatMul": (2,),
}
"""Operands that are sizes, axes and such: what they are made of has nothing to do with values."""

LENGTHS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Pad", "PadV2", "MirrorPad", "OneHot", "SplitV", "SparseToDense", "TopKV2"), (1,)),
    **dict.fromkeys(("Bincount", "DenseBincount", "Multinomial", "StatelessMultinomial"), (1,)),
    **dict.fromkeys(("UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentProd"), (2,)),
    "MatrixDiagV3": (1, 2, 3),
    "LinSpace": (2,),
    "Range": (0, 1, 2),
}
"""Operands that tell how long a result is, and what of it is where: not what it is, if it is as long as the batch."""


def rule(*op_types: str) -> Callable[[Rule], Rule]:
    """Register a rule."""

    def add(function: Rule) -> Rule:
        for op_type in op_types:
            if op_type in _RULES:
                raise ValueError(f"`{op_type}` already has a rule. Received: {function!r}. Remove one of the two.")
            _RULES[op_type] = function
        return function

    return add


def batch_kind_of(op: Op) -> list[Made]:
    """What an operation makes, for each of its results.

    Raises:
        JoinsError: If it joins samples.
        NotKnownError: If there is no rule for it, or not for this use.
    """
    if all(value.kind in WITHOUT_DATA for value in op.values) and not op.node.stateful:
        return _without_data(op)
    if op.of(BatchKind.PLACES):
        raise CrossSampleError  # Not cut: of several micro-batches each would have that of the first.
    return _by_rule(op)


def _by_rule(op: Op) -> list[Made]:
    found = _RULES.get(op.node.op)
    if found is not None:
        return found(op)
    try:
        data = find_rule(op.node).data(op.analysis.view(op.node))
    except NotTileableError:
        raise NotKnownError from None
    return _images(op, data)


_SPREADS = frozenset(("Fill", "OnesLike", "ZerosLike"))
_MULTIPLIES = frozenset(("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum", "EuclideanNorm", "Prod"))
"""Operations that go with the number of what they take together, in another way than `_adds` tells."""


def _without_data(op: Op) -> list[Made]:
    """Of what is not of data: as long as the batch or not, and if so, whether each sample has the same."""
    places = op.of(BatchKind.PLACES)
    axes = [op.sizes.axis(tensor) for tensor in op.outs]
    if not any(axes):
        if places or (op.of(BatchKind.ALIKE) and op.node.op in _MULTIPLIES):
            raise CrossSampleError
        return [Made(added=_adds(op)) for _ in axes]
    if op.node.op in _SPREADS:
        return [Made(BatchKind.ALIKE, axis) if axis else Made() for axis in axes]
    own = [] if places else _alike(op)
    return own or [Made(BatchKind.PLACES, axis) if axis else Made() for axis in axes]


def _alike(op: Op) -> list[Made]:
    """Where the rules for samples have it that each of them has the same, as each operand has; else nothing."""
    if not op.of(BatchKind.ALIKE):
        axis = op.sizes.axis(op.outs[0])
        repeats = op.node.op == "Tile" and axis is not None and op.shape(0)[axis.dim] == 1
        return [Made(BatchKind.ALIKE, axis)] if repeats or op.node.op == "BroadcastTo" else []
    alike = (
        dataclasses.replace(v.made, kind=BatchKind.ROWS) if v.kind is BatchKind.ALIKE else v.made for v in op.values
    )
    values = [dataclasses.replace(v, made=what) for v, what in zip(op.values, alike, strict=True)]
    try:
        found = _by_rule(Op(op.analysis, op.sizes, op.node, values))
    except (CrossSampleError, NotKnownError):
        return []
    return [
        dataclasses.replace(w, kind=BatchKind.ALIKE if w.kind is BatchKind.ROWS else BatchKind.EVEN, added=False)
        for w in found
    ]


def _adds(op: Op) -> bool:
    """Whether what is the same for all micro-batches is added up over as many entries as there are samples."""
    if op.node.op not in ("Sum", "BiasAddGrad", "MatMul", "L2Loss") or not op.node.inputs:
        return False
    return op.axis(0) is not None and bool(op.sizes.dims(op.node.inputs[0])[0])


def _all(op: Op, what: Made) -> list[Made]:
    return [what] * len(op.outs)


def sum_of(op: Op, added: bool = True) -> list[Made]:
    """All results are sums over samples; `added`: this operation adds them up."""
    return _all(op, Made(BatchKind.SUM, added=added))


def rows_at(op: Op, axis: Axis, ragged: bool = False, positions: Axis | None = None) -> list[Made]:
    """All results have rows for samples along an axis."""
    return _all(op, Made(BatchKind.ROWS, axis, ragged, positions))


# Row by row -------------------------------------------------------------------------------------------------


_ELEMENTWISE = (
    "Angle Betainc BiasAdd BitwiseOr BitwiseXor Bucketize CheckNumerics Complex ComplexAbs Conj Digamma EnsureShape "
    "Igamma Imag Invert LeftShift LogicalXor NextAfter Polygamma Real RightShift Select TruncateDiv TruncateMod Zeta"
)
"""Those that the registry does not have, or not as such."""


@rule(*ELEMENTWISE, *_ELEMENTWISE.split())
def _elementwise(op: Op) -> list[Made]:
    """By broadcasting."""
    rank = len(op.out_shape())
    lined = op.node.op == "Select" and len(op.shape(0)) < rank  # Its condition has one entry for each row.
    axes, of_rows = [], op.of(BatchKind.ROWS)
    for position, value in enumerate(op.values):
        axis = op.axis(position)
        if value.kind is not BatchKind.SUM and axis is not None:
            first = lined and position == 0
            axes.append(axis if first else axis.moved(axis.dim + rank - len(op.shape(position))))
    if not of_rows:
        return _linear(op)
    if op.of(BatchKind.SUM):
        raise CrossSampleError
    kept = op.values[0].made.positions if op.node.op in ("Cast", "Identity") else None
    return rows_at(op, met(axes), op.is_ragged(of_rows), kept)


_LINEAR = frozenset("Add AddN AddV2 BiasAdd CheckNumerics Complex Conj EnsureShape Imag Real Sub".split())


def _linear(op: Op) -> list[Made]:
    """Of sums over samples and what is the same for all: linear in the sums, or they are used as such."""
    sums = op.of(BatchKind.SUM)
    if op.node.op in ("ZerosLike", "OnesLike"):
        return _all(op, Made())
    if op.node.op == "Cast" and is_inexact(op.node.inputs[0].dtype) and not is_inexact(op.outs[0].dtype):
        raise CrossSampleError
    if op.node.op in _LINEAR:
        return sum_of(op, added=False)
    if op.node.op in ("Select", "SelectV2") and 0 not in sums:
        return sum_of(op, added=False)
    found = registered_rule(op.node)
    if isinstance(found, LinearIn) and len(sums) == 1 and sums[0] in found.positions:
        return sum_of(op, added=False)
    raise CrossSampleError


def registered_rule(node: Node) -> object:
    """That of the registry for tiles, `None` if it has none."""
    try:
        return find_rule(node)
    except NotTileableError:
        return None


def _images(op: Op, data: Sequence[int]) -> list[Made]:
    """Of an operation on images: they lie in the first dimension, all that is no image is the same for all."""
    if op.of(BatchKind.SUM) or any(position not in data for position in op.of(BatchKind.ROWS)):
        raise CrossSampleError
    axis = met(axis for position in data if (axis := op.axis(position)) is not None)
    if axis.dim != 0:
        raise CrossSampleError
    return rows_at(op, axis, op.is_ragged(data))


@rule("ExtractImagePatches", "ImageProjectiveTransformV3", "AdjustContrastv2", "SpaceToDepth", "DepthToSpace",
      "InTopK", "InTopKV2", "LRN", "FractionalMaxPool", "ResizeBicubic", "ResizeArea", "ResizeBicubicGrad",
      "MaxPoolWithArgmax", "MaxPoolGradGrad", "MaxPool3DGradGrad", "SparseSoftmaxCrossEntropyWithLogits",
      "SoftmaxCrossEntropyWithLogits")  # fmt: skip
def _rows_first(op: Op) -> list[Made]:
    return _images(op, range(len(op.values)))


_TRAILING = {
    **dict.fromkeys(("Softmax", "LogSoftmax", "TopK", "TopKV2", "RGBToHSV", "HSVToRGB", "FFT", "IFFT"), 1),
    **dict.fromkeys(("RFFT", "IRFFT"), 1),
    **dict.fromkeys(("MatrixDiag", "MatrixDiagV3", "Cross"), 1),
    **dict.fromkeys(("FFT2D", "IFFT2D", "RFFT2D", "IRFFT2D"), 2),
    **dict.fromkeys(("MatrixBandPart", "MatrixDiagPartV3", "MatrixInverse"), 2),
    **dict.fromkeys(("MatrixDeterminant", "Cholesky", "SelfAdjointEigV2", "Svd", "Qr"), 2),
    **dict.fromkeys(("FFT3D", "IFFT3D", "RFFT3D", "IRFFT3D", "AdjustHue", "AdjustSaturation"), 3),
}
"""Operations that take together what lies in so many of the last dimensions."""


@rule(*_TRAILING)
def _trailing(op: Op) -> list[Made]:
    if op.of(BatchKind.SUM):
        raise CrossSampleError
    axis = met(axis for p in op.of(BatchKind.ROWS) if (axis := op.axis(p)) is not None)
    if axis.dim >= len(op.shape(0)) - _TRAILING[op.node.op]:
        raise CrossSampleError
    return rows_at(op, axis, op.is_ragged(op.of(BatchKind.ROWS)))


# Sizes and draws --------------------------------------------------------------------------------------------


@rule("Shape", "ShapeN", "Size", "Rank")
def _sizes(op: Op) -> list[Made]:
    """The same for all micro-batches, if the number of rows does not depend on data."""
    return sum_of(op) if op.is_ragged(op.of(BatchKind.ROWS)) and op.node.op != "Rank" else _all(op, Made())


# Added up ---------------------------------------------------------------------------------------------------


@rule("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm", "ArgMax", "ArgMin")
def _reduction(op: Op) -> list[Made]:
    if op.values[0].kind is BatchKind.SUM:
        if op.node.op not in ("Sum", "Mean") or (op.node.op == "Mean" and not is_inexact(op.outs[0].dtype)):
            raise CrossSampleError
        return sum_of(op, added=False)
    axis, rank = op.values[0].made.axis, len(op.shape(0))
    assert axis is not None
    axes = {number % rank for number in op.ints(1)}
    if op.node.op == "Sum" and op.shape(0)[axis.dim] == 1 and not op.sizes.dims(op.outs[0])[0]:
        axes.add(axis.dim)  # Of a single sample autodiff leaves out the sum over samples, as the other trace shows.
    if axis.dim in axes:
        mean = op.node.op == "Mean"
        uneven = op.values[0].made.ragged or not is_inexact(op.outs[0].dtype)
        if op.node.op not in ("Sum", "Mean") or (mean and uneven):
            raise CrossSampleError
        return sum_of(op, added=not mean)
    kept = "keep_dims" in op.node.attrs and op.node.attrs["keep_dims"].b
    gone = 0 if kept else sum(number < axis.dim for number in axes)
    return rows_at(op, axis.moved(axis.dim - gone), op.values[0].made.ragged)


@rule("L2Loss")
def _l2_loss(op: Op) -> list[Made]:
    if op.of(BatchKind.SUM):
        raise CrossSampleError
    return sum_of(op)


@rule("BiasAddGrad")
def _bias_grad(op: Op) -> list[Made]:
    axis = op.axis(0)
    if op.of(BatchKind.SUM):
        return sum_of(op, added=False)
    if axis is None or axis.dim == channel_dim(op.node, len(op.shape(0))):
        raise CrossSampleError
    return sum_of(op)


@rule("Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter")
def _filter_grad(op: Op) -> list[Made]:
    _images(op, [0, 2])
    return sum_of(op)


def _labels(op: Op) -> list[str]:
    """One letter for each dimension of two operands and the result."""
    if op.node.op == "Einsum":
        found = find_rule(op.node)
        assert isinstance(found, Einsum)
        try:
            return found.labels(op.analysis.view(op.node))
        except NotTileableError:
            raise NotKnownError from None
    first, second = ("transpose_a", "transpose_b") if op.node.op == "MatMul" else ("adj_x", "adj_y")
    count = len(op.out_shape()) - 2
    letters = "abcdefghijklmnopqrstuvw"[:count]

    def own(position: int, pair: str, turned: bool) -> str:
        batch = letters[count - (len(op.shape(position)) - 2) :]
        return batch + (pair[::-1] if turned else pair)

    attrs = op.node.attrs
    return [own(0, "xy", attrs[first].b), own(1, "yz", attrs[second].b), letters + "xz"]


@rule("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum")
def _product(op: Op) -> list[Made]:
    """Samples stay rows, or both operands have them where products are added up."""
    *operands, out = _labels(op)
    sums, rows = op.of(BatchKind.SUM), op.of(BatchKind.ROWS)
    if sums:
        if rows or len(sums) > 1:
            raise CrossSampleError
        return sum_of(op, added=False)
    axes = {p: axis for p in range(len(operands)) if (axis := op.axis(p)) is not None}
    letters = {operands[p][axis.dim] for p, axis in axes.items()}
    if len(letters) != 1:
        raise CrossSampleError
    (letter,) = letters
    axis = met(axis.moved(0) for axis in axes.values())
    for position, own in enumerate(operands):
        if position not in axes and letter in own and op.shape(position)[own.index(letter)] != 1:
            raise CrossSampleError
    if letter in out:
        return rows_at(op, axis.moved(out.index(letter)), op.is_ragged(rows))
    return sum_of(op)


@rule("UnsortedSegmentSum", "SegmentSum")
def _segments(op: Op) -> list[Made]:
    """Rows put back to where they were taken from, or added up."""
    data, ids = op.values[0], op.values[1]
    if data.kind is BatchKind.SUM or ids.kind is BatchKind.SUM:
        raise CrossSampleError
    if ids.made.positions is not None:
        return rows_at(op, ids.made.positions.moved(0))
    if op.scales():
        raise NotKnownError
    axes = [axis for p in (0, 1) if (axis := op.axis(p)) is not None]
    if met(axes).dim >= len(op.shape(1)):
        axis = met(axes)  # Segments of what each sample has.
        return rows_at(op, axis.moved(axis.dim - len(op.shape(1)) + 1))
    return sum_of(op)


@rule("ScatterNd")
def _scatter(op: Op) -> list[Made]:
    if op.of(BatchKind.SUM):
        raise CrossSampleError
    if op.scales():
        raise NotKnownError
    return sum_of(op)


@rule("DenseBincount", "Bincount", "HistogramFixedWidth")
def _count(op: Op) -> list[Made]:
    if op.scales() or op.of(BatchKind.SUM):
        raise NotKnownError
    return sum_of(op)


@rule("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
def _batch_norm(op: Op) -> list[Made]:
    if op.node.attrs["is_training"].b:
        raise CrossSampleError
    axis = _images(op, [0])[0].axis
    assert axis is not None
    return [Made(BatchKind.ROWS, axis), *(Made() for _ in op.outs[1:])]


@rule("FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3")
def _batch_norm_grad(op: Op) -> list[Made]:
    axis = op.axis(0)
    if axis is None:
        raise CrossSampleError
    return [Made(BatchKind.ROWS, axis), *(Made(BatchKind.SUM, added=True) for _ in op.outs[1:])]
