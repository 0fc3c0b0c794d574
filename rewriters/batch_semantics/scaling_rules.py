"""Rules for scaling exponents: the exponent of a result, given those of the operands.

A product has the sum of the exponents, a sum needs one exponent for all operands, a square root halves it. Any other op
is nonlinear: a value that differs for a micro-batch, as gradients of means do, would give another result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import numpy as np

from rewriters.analysis.autodiff_roles import is_seed
from rewriters.batch_semantics.domain import (
    DATA_INDEPENDENT,
    BatchOp,
    IrregularScalingError,
    MixedScalingError,
    NonlinearError,
)
from rewriters.ir.static_values import constant, is_inexact
from rewriters.ir.symbolic_dims import SymbolicDim
from rewriters.rules.elementwise import ELEMENTWISE

__all__: list[str] = []

_ADDS = frozenset(("Add", "AddN", "AddV2", "BiasAdd", "Complex", "ConcatV2", "Pack", "Select", "SelectV2", "Sub"))
_EXTREMES = frozenset(("Maximum", "Minimum"))
_COMPARES = frozenset(("Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "NotEqual"))
_SCALE_FREE = frozenset(
    "Angle ArgMax ArgMin IsFinite IsInf IsNan OnesLike Rank Shape ShapeN Sign Size Where ZerosLike LogicalAnd "
    "LogicalNot LogicalOr All Any".split()
)
"""Ops whose result does not depend on the scale of the operands."""

_PRODUCTS = frozenset(
    "BatchMatMul BatchMatMulV2 BatchMatMulV3 Conv2D Conv2DBackpropFilter Conv2DBackpropInput Conv3D "
    "Conv3DBackpropFilterV2 Conv3DBackpropInputV2 Cross DepthwiseConv2dNative DepthwiseConv2dNativeBackpropFilter "
    "DepthwiseConv2dNativeBackpropInput Einsum MatMul Mul MulNoNan SparseTensorDenseMatMul".split()
)
_ACTIVATION_GRADIENTS = {
    **dict.fromkeys(("TanhGrad", "SigmoidGrad"), 1),
    **dict.fromkeys(("EluGrad", "SeluGrad", "SoftplusGrad", "SoftsignGrad"), 0),
}
"""Position of the incoming gradient in gradients of activations, which are products with it."""

_QUOTIENTS = frozenset(("Div", "DivNoNan", "FloorDiv", "RealDiv", "Xdivy"))

_ONE = Fraction(1)
_DEGREES: dict[str, dict[int, Fraction]] = {
    "Square": {0: Fraction(2)},
    "L2Loss": {0: Fraction(2)},
    "Sqrt": {0: Fraction(1, 2)},
    "Rsqrt": {0: Fraction(-1, 2)},
    "Inv": {0: Fraction(-1)},
    "Reciprocal": {0: Fraction(-1)},
    "SqrtGrad": {0: Fraction(-1), 1: _ONE},
    "RsqrtGrad": {0: Fraction(3), 1: _ONE},
    "InvGrad": {0: Fraction(2), 1: _ONE},
    "ReciprocalGrad": {0: Fraction(2), 1: _ONE},
    "ReluGrad": {0: _ONE},
    "Relu6Grad": {0: _ONE},
    "LeakyReluGrad": {0: _ONE},
    "MaxPoolGrad": {2: _ONE},
    "MaxPool3DGrad": {2: _ONE},
    "MaxPoolGradWithArgmax": {1: _ONE},
    "MaxPoolGradGrad": {2: _ONE},
    "MaxPool3DGradGrad": {2: _ONE},
    "AvgPoolGrad": {1: _ONE},
    "AvgPool3DGrad": {1: _ONE},
    "FusedBatchNormGrad": {0: _ONE},
    "FusedBatchNormGradV2": {0: _ONE},
    "FusedBatchNormGradV3": {0: _ONE},
    "StridedSliceGrad": {4: _ONE},
    "Split": {1: _ONE},
    "ScatterNd": {1: _ONE},
    "PadV2": {0: _ONE},
    "OneHot": {},
}
"""Degrees of results as monomials of operands, by op type and operand position."""

_LINEAR_IN_FIRST = frozenset(
    "Abs AvgPool AvgPool3D BatchToSpaceND BiasAddGrad BroadcastTo CheckNumerics ComplexAbs Conj Cumsum DepthToSpace "
    "EnsureShape EuclideanNorm ExpandDims ExtractImagePatches FFT FFT2D FFT3D Gather GatherNd GatherV2 Identity "
    "IFFT IFFT2D IFFT3D Imag IRFFT IRFFT2D IRFFT3D LeakyRelu MatrixBandPart MatrixDiag MatrixDiagPartV3 "
    "MatrixDiagV3 Max MaxPool MaxPool3D Mean Min MirrorPad MirrorPadGrad Neg Pad PreventGradient Real Relu Reshape "
    "ResizeBilinear ResizeBilinearGrad ResizeNearestNeighbor ResizeNearestNeighborGrad ReverseV2 RFFT RFFT2D RFFT3D "
    "Roll SegmentSum Slice Snapshot SpaceToBatchND SpaceToDepth SplitV Squeeze StopGradient StridedSlice Sum Tile "
    "TopK TopKV2 Transpose Unpack UnsortedSegmentSum".split()
)
"""Ops that are linear in their first operand."""

_PADDED = frozenset(("MatrixDiagPartV3", "MatrixDiagV3"))
"""Ops that fill entries which the first operand does not cover from another operand."""

_ENTRY_OPERANDS = {"Fill": (1,), "PadV2": (0, 2)}
"""Operands that supply all entries of the result, where other operands do not."""

_RELATIVE_ERRORS = {2: 2e-2, 4: 1e-6}
"""Rounding error of a ratio, by the bytes of its type; 1e-10 for others."""


def scaling_exponent(op: BatchOp) -> Fraction | None:
    """Return the exponent of an op's results, not counting samples that it adds; `None` if an operand's is unknown.

    Raises:
        MixedScalingError: If it adds values of different exponents.
        NonlinearError: If its result is no power of an operand whose exponent is not 0.
    """
    kind, exponents = op.node.op, [value.exponent for value in op.values]
    if kind in _SCALE_FREE:
        return Fraction(0)
    if kind in _ADDS | _EXTREMES | _COMPARES | {"SquaredDifference"}:
        return _common_exponent(op)
    if kind == "Cast":
        rounds = is_inexact(op.node.inputs[0].dtype) and not is_inexact(op.outs[0].dtype)
        return _require_unscaled(op) if rounds and op.outs[0].dtype.name != "bool" else exponents[0]
    if kind in _PRODUCTS or kind in _ACTIVATION_GRADIENTS:
        return _total((_ONE, exponents[p]) for p in _factors(op))
    if kind in _QUOTIENTS and (kind != "FloorDiv" or is_seed(op.node)):  # Autodiff divides sizes by `FloorDiv`.
        return _total([(_ONE, exponents[0]), (-_ONE, exponents[1])])
    if kind == "Pow":
        power = constant(op.node.inputs[1].node)
        if power is not None and power.ndim == 0:
            return _total([(Fraction(float(power)).limit_denominator(64), exponents[0])])
    if kind in _LINEAR_IN_FIRST:
        return exponents[0] if exponents else Fraction(0)
    if kind in _DEGREES:
        return _total((degree, exponents[position]) for position, degree in _DEGREES[kind].items())
    return _require_unscaled(op)


def scaled_operands(op: BatchOp) -> Iterable[int]:
    """Return the positions of the operands that `scaling_exponent` accounts for, whatever their types."""
    kind, every = op.node.op, range(len(op.values))
    if kind in _SCALE_FREE | _QUOTIENTS | {"Cast", "SquaredDifference"}:
        return every
    if kind in _PRODUCTS or kind in _ACTIVATION_GRADIENTS:
        return _factors(op)
    if kind in _ADDS | _EXTREMES | _COMPARES:
        return _terms(op)
    return every[:1] if kind in _LINEAR_IN_FIRST else _DEGREES.get(kind, ())


def is_structurally_zero(op: BatchOp) -> bool:
    """Return whether all inexact results of an op are zero because operands are."""
    kind, zero = op.node.op, [value.is_zero for value in op.values]
    if kind in _PRODUCTS:
        return any(is_zero and is_inexact(t.dtype) for is_zero, t in zip(zero, op.node.inputs, strict=True))
    if kind in _ADDS | _EXTREMES | {"SquaredDifference"}:
        return all(zero[p] for p in _terms(op))
    if kind in _ACTIVATION_GRADIENTS:
        return zero[_ACTIVATION_GRADIENTS[kind]]
    if kind in _QUOTIENTS:
        return zero[0] and not zero[1]
    if kind == "Cast" or kind in _LINEAR_IN_FIRST - _PADDED:
        return zero[:1] == [True]
    if kind in _ENTRY_OPERANDS:
        return all(zero[p] for p in _ENTRY_OPERANDS[kind])
    return kind == "ZerosLike" or any(zero[p] for p, degree in _DEGREES.get(kind, {}).items() if degree > 0)


def exponent_between(here: Any, whole: Any, count: int) -> Fraction | None:
    """Return the exponent that leads from a value for a micro-batch to that for the batch; `None` if one is unknown.

    Values of different lengths are compared by their distinct entries.

    Args:
        here: Value for a micro-batch.
        whole: Value for the batch.
        count: Number of micro-batches.

    Raises:
        IrregularScalingError: If the values differ by no power of `count`.
    """
    if here is None or whole is None:
        return None
    if isinstance(here, SymbolicDim):
        return Fraction(1)
    try:
        kind = complex if np.iscomplexobj(here) else float
        part, batch = np.asarray(here, kind), np.asarray(whole, kind)
    except (TypeError, ValueError):
        return Fraction(0) if isinstance(here, np.ndarray) and np.array_equal(here, whole) else None
    if part.shape != batch.shape:
        part, batch = np.unique(part), np.unique(batch)
        if part.shape != batch.shape:
            return None
    if np.array_equal(part, batch, equal_nan=True):
        return Fraction(0)
    nonzero = (part != 0) | (batch != 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = batch[nonzero] / part[nonzero]
    ratio = float(ratios[0].real)
    tolerance = _RELATIVE_ERRORS.get(getattr(here, "dtype", np.dtype(float)).itemsize, 1e-10)
    if not 0 < ratio < math.inf or not np.allclose(ratios, ratio, rtol=tolerance, atol=0):
        raise IrregularScalingError
    exponent = math.log(ratio) / math.log(count)
    fraction = Fraction(exponent).limit_denominator(4)
    if abs(exponent - fraction) > tolerance:
        raise IrregularScalingError
    return fraction


def _total(terms: Iterable[tuple[Fraction, Fraction | None]]) -> Fraction | None:
    total = Fraction(0)
    for degree, exponent in terms:
        if exponent is None:
            return None
        total += degree * exponent
    return total


def _factors(op: BatchOp) -> list[int]:
    """Return the positions of the factors of a product; integer operands of an inexact product are sizes or indices."""
    has_inexact_result = any(is_inexact(t.dtype) for t in op.outs)
    return [p for p, t in enumerate(op.node.inputs) if is_inexact(t.dtype) or not has_inexact_result]


def _require_unscaled(op: BatchOp) -> Fraction | None:
    """Return exponent 0, `None` if one of an operand is unknown.

    Raises:
        NonlinearError: If an operand has another exponent than 0.
    """
    pairs, is_elementwise = zip(op.values, op.node.inputs, strict=True), op.node.op in ELEMENTWISE
    exponents = [value.exponent for value, t in pairs if is_elementwise or is_inexact(t.dtype)]
    if any(exponents):
        raise NonlinearError
    return None if None in exponents else Fraction(0)


def _terms(op: BatchOp) -> list[int]:
    """Return the positions of the operands that an op adds, selects from or compares."""
    positions = {"Select": [1, 2], "SelectV2": [1, 2], "ConcatV2": list(range(len(op.values) - 1))}
    return positions.get(op.node.op, list(range(len(op.values))))


def _common_exponent(op: BatchOp) -> Fraction | None:
    """Return the exponent of an op that needs one exponent for all its terms."""
    kind, terms = op.node.op, _terms(op)
    terms = [p for p in terms if not op.values[p].is_zero] or terms[:1]
    exponents = [op.values[p].exponent for p in terms]
    if None in exponents:
        return None
    first = exponents[0]
    assert first is not None
    if len(set(exponents)) > 1:
        if all(op.values[p].kind in DATA_INDEPENDENT for p in terms):
            return None
        raise MixedScalingError if kind in _ADDS else NonlinearError
    return Fraction(0) if kind in _COMPARES else 2 * first if kind == "SquaredDifference" else first
