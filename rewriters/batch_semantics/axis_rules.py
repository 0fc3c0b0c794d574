"""Rules for layouts: where the samples lie in the results of an op, or that it mixes samples.

`movement_rules.py` has the rules of ops that move rows. An op that the tile registry covers and that has no rule here
works on each image of the first dimension. An op without any rule is unknown: if its result is as long as the batch, it
is taken to keep samples apart, and the plan notes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from rewriters.analysis.autodiff_roles import reads_shape_only
from rewriters.batch_semantics.domain import (
    DATA_INDEPENDENT,
    BatchKind,
    BatchLayout,
    BatchOp,
    CrossSampleError,
    UnsupportedUseError,
    common_axis,
)
from rewriters.batch_semantics.scaling_rules import ADDITIVE, linear_operands
from rewriters.batch_semantics.trace_comparison import BatchAxis
from rewriters.errors import NotTileableError
from rewriters.ir.graph import Node
from rewriters.ir.op_traits import OP_TRAITS, Trait, ops_with
from rewriters.ir.static_values import is_inexact
from rewriters.rules.contraction import einsum_labels
from rewriters.rules.elementwise import ELEMENTWISE, channel_dim
from rewriters.rules.registry import find_rule

__all__: list[str] = []

Rule = Callable[[BatchOp], list[BatchLayout]]

_RULES: dict[str, Rule] = {}

SHAPE_OPERANDS: dict[str, tuple[int, ...]] = {
    **{op_type: (t.shape_operand,) for op_type, t in OP_TRAITS.items() if t.shape_operand is not None},
    **dict.fromkeys(ops_with(Trait.REDUCTION) | ops_with(Trait.CONV_FILTER_GRADIENT), (1,)),
    **dict.fromkeys(
        ("Cumsum", "DepthwiseConv2dNativeBackpropFilter", "EuclideanNorm", "ExpandDims", "Transpose"), (1,)
    ),
    **dict.fromkeys(("ResizeBilinearGrad", "ResizeBicubicGrad", "ResizeNearestNeighborGrad"), (1,)),
    **dict.fromkeys(("ResizeBilinear", "ResizeBicubic", "ResizeArea", "ResizeNearestNeighbor"), (1,)),
    **dict.fromkeys(("AvgPoolGrad", "AvgPool3DGrad", "DepthwiseConv2dNativeBackpropInput"), (0,)),
    **dict.fromkeys(("RandomUniform", "RandomStandardNormal", "StatelessRandomUniformV2"), (0,)),
    **dict.fromkeys(("StatelessRandomNormalV2", "TruncatedNormal"), (0,)),
    **dict.fromkeys(("GatherV2", "ScatterNd", "SparseTensorDenseMatMul", "UnsortedSegmentSum"), (2,)),
    "MatrixDiagV3": (2, 3),
    "Slice": (1, 2),
    "StridedSlice": (1, 2, 3),
    "StridedSliceGrad": (0, 1, 2, 3),
}
"""Operands that are sizes, axes or positions. A step whose data decide one of them is refused."""


def rule(*op_types: str) -> Callable[[Rule], Rule]:
    """Register a rule.

    Raises:
        ValueError: If an op type has one.
    """

    def add(function: Rule) -> Rule:
        for op_type in op_types:
            if op_type in _RULES:
                raise ValueError(f"`{op_type}` already has a rule. Received: {function!r}. Remove one of the two.")
            _RULES[op_type] = function
        return function

    return add


def infer_layouts(op: BatchOp) -> list[BatchLayout]:
    """Return the layouts of an op's results.

    Raises:
        CrossSampleError: If the op mixes samples.
        UnsupportedUseError: If no rule covers it, or this use of it.
    """
    if all(value.kind in DATA_INDEPENDENT for value in op.values) and not op.node.stateful:
        return _data_independent(op)
    sums, linear = op.of_kind(BatchKind.SUMMED), linear_operands(op)
    if sums and op.node.op in ("OnesLike", "ZerosLike"):
        return [BatchLayout()]
    if sums and set(sums) <= set(linear) and (len(sums) == 1 or op.node.op in ADDITIVE):
        if op.of_kind(BatchKind.PER_SAMPLE):
            raise CrossSampleError
        return sum_of(op, adds_samples=False)
    return _apply_rule(op)


def _apply_rule(op: BatchOp) -> list[BatchLayout]:
    """Return the layouts by rule; all rules but that of sizes are for samples, and not for sums over them."""
    has_sums = bool(op.of_kind(BatchKind.SUMMED)) and not reads_shape_only(op.node)
    registered = _RULES.get(op.node.op)
    if registered is not None:
        if has_sums:
            raise CrossSampleError
        return registered(op)
    try:
        data = find_rule(op.node).data(op.analysis.view(op.node))
    except NotTileableError:
        raise UnsupportedUseError from None
    if has_sums:
        raise CrossSampleError
    return _images(op, data)


_FILLS = frozenset(("Fill", "OnesLike", "ZerosLike"))
_SUMS = frozenset(("BiasAddGrad", "L2Loss", "MatMul", "Sum"))
_READS_ONE_ENTRY = (ops_with(Trait.REDUCTION) - {"Prod", "Sum"}) | frozenset(
    "Gather GatherV2 Slice StridedSlice".split()
)
"""Ops whose result does not depend on the number of equal entries that they read."""


def _data_independent(op: BatchOp) -> list[BatchLayout]:
    """Return layouts of results that do not depend on data, by their sizes."""
    is_indexed = bool(op.of_kind(BatchKind.INDEXED))
    axes = [op.sizes.axis(tensor) for tensor in op.outs]
    if not any(axes):
        is_known = reads_shape_only(op.node) or op.node.op in _SUMS | _READS_ONE_ENTRY
        if is_indexed or (op.of_kind(BatchKind.UNIFORM) and not is_known):
            raise CrossSampleError
        return [BatchLayout(adds_samples=_sums_invariant(op)) for _ in axes]
    if op.node.op in _FILLS:
        return [BatchLayout(BatchKind.UNIFORM, axis) if axis else BatchLayout() for axis in axes]
    uniform = [] if is_indexed else _uniform(op)
    return uniform or [BatchLayout(BatchKind.INDEXED, axis) if axis else BatchLayout() for axis in axes]


def _uniform(op: BatchOp) -> list[BatchLayout]:
    """Return layouts if all samples have one value by the rules, as in each operand; else an empty list."""
    if not op.of_kind(BatchKind.UNIFORM):
        axis = op.sizes.axis(op.outs[0])
        repeats = op.node.op == "Tile" and axis is not None and op.shape(0)[axis.dim] == 1
        return [BatchLayout(BatchKind.UNIFORM, axis)] if repeats or op.node.op == "BroadcastTo" else []

    def as_samples(layout: BatchLayout) -> BatchLayout:
        is_uniform = layout.kind is BatchKind.UNIFORM
        return dataclasses.replace(layout, kind=BatchKind.PER_SAMPLE) if is_uniform else layout

    values = [dataclasses.replace(value, layout=as_samples(value.layout)) for value in op.values]
    try:
        layouts = _apply_rule(BatchOp(op.analysis, op.sizes, node=op.node, values=values))
    except (CrossSampleError, UnsupportedUseError):
        return []
    kinds = {BatchKind.PER_SAMPLE: BatchKind.UNIFORM}
    return [
        dataclasses.replace(layout, kind=kinds.get(layout.kind, BatchKind.INVARIANT), adds_samples=False)
        for layout in layouts
    ]


def _sums_invariant(op: BatchOp) -> bool:
    """Return whether an op sums a data-independent operand over as many entries as there are samples."""
    if op.node.op not in _SUMS:
        return False
    return op.axis(0) is not None and bool(op.sizes.batch_dims(op.node.inputs[0])[0])


def sum_of(op: BatchOp, adds_samples: bool = True) -> list[BatchLayout]:
    """Return layouts of sums over samples, which the op adds itself if `adds_samples`."""
    return [BatchLayout(BatchKind.SUMMED, adds_samples=adds_samples)] * len(op.outs)


def rows_at(op: BatchOp, axis: BatchAxis) -> list[BatchLayout]:
    """Return layouts of rows for samples along an axis."""
    return [BatchLayout(BatchKind.PER_SAMPLE, axis)] * len(op.outs)


# Row by row -------------------------------------------------------------------------------------------------


_ELEMENTWISE = (
    "Angle BiasAdd Bucketize CheckNumerics Complex ComplexAbs Conj EnsureShape Imag "
    "Invert LeftShift LogicalXor Real RightShift Select TruncateDiv TruncateMod"
)
"""Elementwise ops that the tile registry lacks, or lists as something else."""


@rule(*ELEMENTWISE, *_ELEMENTWISE.split())
def _elementwise(op: BatchOp) -> list[BatchLayout]:
    """Broadcast."""
    rank, axes = len(op.out_shape()), []
    has_row_condition = op.node.op == "Select" and len(op.shape(0)) < rank  # One entry for each row.
    for position, value in enumerate(op.values):
        axis = op.axis(position)
        if value.kind is not BatchKind.SUMMED and axis is not None:
            is_condition = has_row_condition and position == 0
            axes.append(axis if is_condition else axis.moved(axis.dim + rank - len(op.shape(position))))
    return rows_at(op, common_axis(axes))


def registered_rule(node: Node) -> object:
    """Return the rule of the tile registry, `None` if it has none."""
    try:
        return find_rule(node)
    except NotTileableError:
        return None


def _images(op: BatchOp, data: Sequence[int]) -> list[BatchLayout]:
    """Return layouts of an op on images along the first dimension of the `data` operands."""
    if any(position not in data for position in op.of_kind(BatchKind.PER_SAMPLE)):
        raise CrossSampleError
    axis = common_axis(axis for position in data if (axis := op.axis(position)) is not None)
    if axis.dim != 0:
        raise CrossSampleError
    return rows_at(op, axis)


@rule("ExtractImagePatches", "ImageProjectiveTransformV3", "AdjustContrastv2", "SpaceToDepth", "DepthToSpace",
      "InTopK", "InTopKV2", "LRN", "FractionalMaxPool", "ResizeBicubic", "ResizeArea", "ResizeBicubicGrad",
      "MaxPoolWithArgmax", "MaxPoolGradGrad", "MaxPool3DGradGrad", "SparseSoftmaxCrossEntropyWithLogits",
      "SoftmaxCrossEntropyWithLogits")  # fmt: skip
def _rows_first(op: BatchOp) -> list[BatchLayout]:
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
"""Number of last dimensions that an op combines."""


@rule(*_TRAILING)
def _trailing(op: BatchOp) -> list[BatchLayout]:
    samples = op.of_kind(BatchKind.PER_SAMPLE)
    axis = common_axis(axis for p in samples if (axis := op.axis(p)) is not None)
    if axis.dim >= len(op.shape(0)) - _TRAILING[op.node.op]:
        raise CrossSampleError
    return rows_at(op, axis)


# Sizes ------------------------------------------------------------------------------------------------------


@rule("Shape", "ShapeN", "Size", "Rank")
def _sizes(op: BatchOp) -> list[BatchLayout]:
    return [BatchLayout()] * len(op.outs)


# Reductions -------------------------------------------------------------------------------------------------


@rule("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm", "ArgMax", "ArgMin")
def _reduction(op: BatchOp) -> list[BatchLayout]:
    is_mean, is_inexact_result = op.node.op == "Mean", is_inexact(op.outs[0].dtype)
    is_linear = op.node.op == "Sum" or (is_mean and is_inexact_result)
    layout = op.values[0].layout
    axis, rank = layout.axis, len(op.shape(0))
    assert axis is not None
    axes = {number % rank for number in op.ints(1)}
    if op.node.op == "Sum" and op.shape(0)[axis.dim] == 1 and not op.sizes.batch_dims(op.outs[0])[0]:
        axes.add(axis.dim)  # Autodiff omits the sum over a single sample, as the trace for the batch shows.
    if axis.dim in axes:
        if not is_linear:
            raise CrossSampleError
        return sum_of(op, adds_samples=not is_mean)
    keeps_dims = "keep_dims" in op.node.attrs and op.node.attrs["keep_dims"].b
    removed = 0 if keeps_dims else sum(number < axis.dim for number in axes)
    return rows_at(op, axis.moved(axis.dim - removed))


@rule("L2Loss")
def _l2_loss(op: BatchOp) -> list[BatchLayout]:
    return sum_of(op)


@rule("BiasAddGrad")
def _bias_grad(op: BatchOp) -> list[BatchLayout]:
    axis = op.axis(0)
    if axis is None or axis.dim == channel_dim(op.node, len(op.shape(0))):
        raise CrossSampleError
    return sum_of(op)


@rule("Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "DepthwiseConv2dNativeBackpropFilter")
def _filter_grad(op: BatchOp) -> list[BatchLayout]:
    _images(op, [0, 2])
    return sum_of(op)


def _labels(op: BatchOp) -> list[str]:
    """Return the dimensions of two operands and the result as one letter each."""
    if op.node.op == "Einsum":
        try:
            return einsum_labels(op.node)
        except NotTileableError:
            raise UnsupportedUseError from None
    first, second = ("transpose_a", "transpose_b") if op.node.op == "MatMul" else ("adj_x", "adj_y")
    count = len(op.out_shape()) - 2
    letters = "abcdefghijklmnopqrstuvw"[:count]

    def labels(position: int, pair: str, is_transposed: bool) -> str:
        batch = letters[count - (len(op.shape(position)) - 2) :]
        return batch + (pair[::-1] if is_transposed else pair)

    attrs = op.node.attrs
    return [labels(0, "xy", attrs[first].b), labels(1, "yz", attrs[second].b), letters + "xz"]


@rule("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum")
def _product(op: BatchOp) -> list[BatchLayout]:
    """Keep samples as rows, or contract over them."""
    *operands, out = _labels(op)
    axes = {p: axis for p in range(len(operands)) if (axis := op.axis(p)) is not None}
    letters = {operands[p][axis.dim] for p, axis in axes.items()}
    if len(letters) != 1:
        raise CrossSampleError
    (letter,) = letters
    axis = common_axis(axis.moved(0) for axis in axes.values())
    for position, labels in enumerate(operands):
        if position not in axes and letter in labels and op.shape(position)[labels.index(letter)] != 1:
            raise CrossSampleError
    if letter in out:
        return rows_at(op, axis.moved(out.index(letter)))
    return sum_of(op)


@rule("UnsortedSegmentSum", "SegmentSum")
def _segments(op: BatchOp) -> list[BatchLayout]:
    """Sum each sample's segments, or sum over samples."""
    if op.may_grow():
        raise UnsupportedUseError
    axis = common_axis(axis for p in (0, 1) if (axis := op.axis(p)) is not None)
    if axis.dim >= len(op.shape(1)):
        return rows_at(op, axis.moved(axis.dim - len(op.shape(1)) + 1))
    return sum_of(op)


@rule("ScatterNd", "DenseBincount", "Bincount", "HistogramFixedWidth")
def _scatter(op: BatchOp) -> list[BatchLayout]:
    if op.may_grow():
        raise UnsupportedUseError
    if "binary_output" in op.node.attrs and op.node.attrs["binary_output"].b:
        raise CrossSampleError
    return sum_of(op)


@rule("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
def _batch_norm(op: BatchOp) -> list[BatchLayout]:
    if op.node.attrs["is_training"].b:
        raise CrossSampleError
    rows, *_ = _images(op, [0])
    return [rows, *(BatchLayout() for _ in op.outs[1:])]


@rule("FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3")
def _batch_norm_grad(op: BatchOp) -> list[BatchLayout]:
    axis = op.axis(0)
    if axis is None:
        raise CrossSampleError
    sums = (BatchLayout(BatchKind.SUMMED, adds_samples=True) for _ in op.outs[1:])
    return [BatchLayout(BatchKind.PER_SAMPLE, axis), *sums]
