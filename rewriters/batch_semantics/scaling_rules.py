"""By which power of the number of micro-batches a result is larger, given those of the operands.

A product has the sum of the powers, a sum needs the same of all its operands, a square root halves it. Whatever else is
done to a value that is larger for a micro-batch than for the batch, as gradients of means are, gives another result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import numpy as np

from rewriters.analysis.autodiff_roles import is_seed
from rewriters.batch_semantics.domain import WITHOUT_DATA, MixedError, NoPowerError, NotLinearError, Op
from rewriters.ir.static_values import constant, is_inexact
from rewriters.ir.symbolic_dims import SymbolicDim
from rewriters.rules.elementwise import ELEMENTWISE

__all__: list[str] = []

_ADDS = frozenset(("Add", "AddN", "AddV2", "BiasAdd", "Complex", "ConcatV2", "Pack", "Select", "SelectV2", "Sub"))
_EXTREMES = frozenset(("Maximum", "Minimum"))
_COMPARES = frozenset(("Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "NotEqual"))
_NUMBERS = frozenset(
    "Angle ArgMax ArgMin IsFinite IsInf IsNan OnesLike Rank Shape ShapeN Sign Size Where ZerosLike LogicalAnd "
    "LogicalNot LogicalOr All Any".split()
)
"""Those whose result is the same whatever the operands are multiplied by."""

_PRODUCTS = frozenset(
    "BatchMatMul BatchMatMulV2 BatchMatMulV3 Conv2D Conv2DBackpropFilter Conv2DBackpropInput Conv3D "
    "Conv3DBackpropFilterV2 Conv3DBackpropInputV2 Cross DepthwiseConv2dNative DepthwiseConv2dNativeBackpropFilter "
    "DepthwiseConv2dNativeBackpropInput Einsum MatMul Mul MulNoNan SparseTensorDenseMatMul".split()
)
_ACTIVATION_GRADIENTS = {
    **dict.fromkeys(("TanhGrad", "SigmoidGrad"), 1),
    **dict.fromkeys(("EluGrad", "SeluGrad", "SoftplusGrad", "SoftsignGrad"), 0),
}
"""Gradients of activations: products of what comes in, in these operands, and of what goes by the other one."""

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
"""For each operand that matters the degree in which a result goes with it."""

_FIRST = frozenset(
    "Abs AvgPool AvgPool3D BatchToSpaceND BiasAddGrad BroadcastTo CheckNumerics ComplexAbs Conj Cumsum DepthToSpace "
    "EnsureShape EuclideanNorm ExpandDims ExtractImagePatches FFT FFT2D FFT3D Gather GatherNd GatherV2 Identity "
    "IFFT IFFT2D IFFT3D Imag IRFFT IRFFT2D IRFFT3D LeakyRelu MatrixBandPart MatrixDiag MatrixDiagPartV3 "
    "MatrixDiagV3 Max MaxPool MaxPool3D Mean Min MirrorPad MirrorPadGrad Neg Pad PreventGradient Real Relu Reshape "
    "ResizeBilinear ResizeBilinearGrad ResizeNearestNeighbor ResizeNearestNeighborGrad ReverseV2 RFFT RFFT2D RFFT3D "
    "Roll SegmentSum Slice Snapshot SpaceToBatchND SpaceToDepth SplitV Squeeze StopGradient StridedSlice Sum Tile "
    "TopK TopKV2 Transpose Unpack UnsortedSegmentSum".split()
)
"""Those whose result is as much larger as the first operand is."""

_PADDED = frozenset(("MatrixDiagPartV3", "MatrixDiagV3"))
"""Operations with another operand that fills what the first one leaves free."""

_ENTRIES = {"Fill": (1,), "PadV2": (0, 2)}
"""Operands that all entries of a result come from, of operations that have others beside them."""


_ROUNDING = {2: 2e-2, 4: 1e-6}
"""How far numbers of so many bytes may be off, relatively."""


def scaling_exponent(op: Op) -> Fraction | None:
    """The power of an operation's results, samples that it adds up left out; `None` if one of an operand is not known.

    Raises:
        MixedError: If it adds what has different powers.
        NotLinearError: If it matters to it that an operand is larger for a micro-batch.
    """
    kind, powers = op.node.op, [value.power for value in op.values]
    if kind in _NUMBERS:
        return Fraction(0)
    if kind in _ADDS | _EXTREMES | _COMPARES | {"SquaredDifference"}:
        return _alike(op)
    if kind == "Cast":
        rounds = is_inexact(op.node.inputs[0].dtype) and not is_inexact(op.outs[0].dtype)
        return _as_it_is(op) if rounds and op.outs[0].dtype.name != "bool" else powers[0]
    if kind in _PRODUCTS or kind in _ACTIVATION_GRADIENTS:
        return _total((_ONE, powers[p]) for p in _multiplied(op))
    if kind in _QUOTIENTS and (kind != "FloorDiv" or is_seed(op.node)):  # Autodiff divides sizes by such that do.
        return _total([(_ONE, powers[0]), (-_ONE, powers[1])])
    if kind == "Pow":
        exponent = constant(op.node.inputs[1].node)
        if exponent is not None and exponent.ndim == 0:
            return _total([(Fraction(float(exponent)).limit_denominator(64), powers[0])])
    if kind in _FIRST:
        return powers[0] if powers else Fraction(0)
    if kind in _DEGREES:
        return _total((degree, powers[position]) for position, degree in _DEGREES[kind].items())
    return _as_it_is(op)


def counted(op: Op) -> Iterable[int]:
    """Return the positions of the operands that `scaling_exponent` reads, whatever their types."""
    kind, every = op.node.op, range(len(op.values))
    if kind in _NUMBERS | _QUOTIENTS | {"Cast", "SquaredDifference"}:
        return every
    if kind in _PRODUCTS or kind in _ACTIVATION_GRADIENTS:
        return _multiplied(op)
    if kind in _ADDS | _EXTREMES | _COMPARES:
        return _taken_alike(op)
    return every[:1] if kind in _FIRST else _DEGREES.get(kind, ())


def is_structurally_zero(op: Op) -> bool:
    """Whether those of an operation's results that are no integers are all zeros because operands are."""
    kind, zero = op.node.op, [value.zero for value in op.values]
    if kind in _PRODUCTS:
        return any(own and is_inexact(t.dtype) for own, t in zip(zero, op.node.inputs, strict=True))
    if kind in _ADDS | _EXTREMES | {"SquaredDifference"}:
        return all(zero[p] for p in _taken_alike(op))
    if kind in _ACTIVATION_GRADIENTS:
        return zero[_ACTIVATION_GRADIENTS[kind]]
    if kind in _QUOTIENTS:
        return zero[0] and not zero[1]
    if kind == "Cast" or kind in _FIRST - _PADDED:
        return zero[:1] == [True]
    if kind in _ENTRIES:
        return all(zero[p] for p in _ENTRIES[kind])
    return kind == "ZerosLike" or any(zero[p] for p, degree in _DEGREES.get(kind, {}).items() if degree > 0)


def power_of(here: Any, whole: Any, parts: int) -> Fraction | None:
    """The power by which something is larger for the batch that is known, here for a micro-batch; `None` if it is not.

    Of two that are of different lengths it is that of the numbers in them, in whichever order and however often.

    Raises:
        NoPowerError: If it is larger, and by no power of the number of micro-batches.
    """
    if here is None or whole is None:
        return None
    if isinstance(here, SymbolicDim):
        return Fraction(1)
    try:
        kind = complex if np.iscomplexobj(here) else float
        mine, other = np.asarray(here, kind), np.asarray(whole, kind)
    except (TypeError, ValueError):
        return Fraction(0) if isinstance(here, np.ndarray) and np.array_equal(here, whole) else None
    if mine.shape != other.shape:
        mine, other = np.unique(mine), np.unique(other)
        if mine.shape != other.shape:
            return None
    if np.array_equal(mine, other, equal_nan=True):
        return Fraction(0)
    some = (mine != 0) | (other != 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = other[some] / mine[some]
    first = float(ratios[0].real)
    rounding = _ROUNDING.get(getattr(here, "dtype", np.dtype(float)).itemsize, 1e-10)
    if not 0 < first < math.inf or not np.allclose(ratios, first, rtol=rounding, atol=0):
        raise NoPowerError
    exponent = math.log(first) / math.log(parts)
    near = Fraction(exponent).limit_denominator(4)
    if abs(exponent - near) > rounding:
        raise NoPowerError
    return near


def _total(terms: Iterable[tuple[Fraction, Fraction | None]]) -> Fraction | None:
    total = Fraction(0)
    for degree, own in terms:
        if own is None:
            return None
        total += degree * own
    return total


def _multiplied(op: Op) -> list[int]:
    """Positions of the operands that a product is made of; of rounded numbers the others are sizes and places."""
    rounded = any(is_inexact(t.dtype) for t in op.outs)
    return [p for p, t in enumerate(op.node.inputs) if is_inexact(t.dtype) or not rounded]


def _as_it_is(op: Op) -> Fraction | None:
    """Of an operation that is to have the same operands for the batch."""
    pairs, each = zip(op.values, op.node.inputs, strict=True), op.node.op in ELEMENTWISE
    powers = [value.power for value, t in pairs if each or is_inexact(t.dtype)]
    if any(powers):
        raise NotLinearError
    return None if None in powers else Fraction(0)


def _taken_alike(op: Op) -> list[int]:
    """Positions of the operands that an operation takes for the same kind of thing."""
    positions = {"Select": [1, 2], "SelectV2": [1, 2], "ConcatV2": list(range(len(op.values) - 1))}
    return positions.get(op.node.op, list(range(len(op.values))))


def _alike(op: Op) -> Fraction | None:
    """Of an operation that takes its operands for the same kind of thing."""
    kind, places = op.node.op, _taken_alike(op)
    places = [p for p in places if not op.values[p].zero] or places[:1]
    own = [op.values[p].power for p in places]
    if None in own:
        return None
    first = own[0]
    assert first is not None
    if len(set(own)) > 1:
        if all(op.values[p].kind in WITHOUT_DATA for p in places):
            return None
        raise MixedError if kind in _ADDS else NotLinearError
    return Fraction(0) if kind in _COMPARES else 2 * first if kind == "SquaredDifference" else first
