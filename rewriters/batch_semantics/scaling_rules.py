"""Rules for scaling exponents: the exponent of a result, given those of the operands.

A product has the sum of the exponents, a sum needs one exponent for all operands, and a linear op keeps the exponent.
Any other op is nonlinear: a value that differs for a micro-batch, as gradients of means do, would give another result.
A tensor that is zero for all data has the exponent infinity: so have its products, and sums ignore it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from rewriters.analysis.autodiff_roles import is_seed
from rewriters.batch_semantics.domain import (
    DATA_INDEPENDENT,
    BatchOp,
    Exponent,
    IrregularScalingError,
    MixedScalingError,
    NonlinearError,
)
from rewriters.ir.op_traits import OP_TRAITS, Trait, ops_with
from rewriters.ir.static_values import is_inexact
from rewriters.rules.elementwise import ELEMENTWISE

__all__: list[str] = []

ADDITIVE = ops_with(Trait.ADDITIVE) | frozenset(
    "BiasAdd Complex ConcatV2 MatrixDiagPartV3 MatrixDiagV3 Pack PadV2 Select SelectV2".split()
)
"""Ops that add, concatenate or select their operands."""

_PRODUCTS = (
    frozenset(op_type for op_type, traits in OP_TRAITS.items() if traits.linear_in == (0, 1))
    | ops_with(Trait.FUSION_ROOT)
    | ops_with(Trait.CONV_INPUT_GRADIENT)
    | ops_with(Trait.CONV_FILTER_GRADIENT)
    | ops_with(Trait.DEPTHWISE_GRADIENT)
    | frozenset(("BatchMatMul", "BatchMatMulV3", "Einsum", "SparseTensorDenseMatMul"))
)
_QUOTIENTS = frozenset(("Div", "DivNoNan", "FloorDiv", "RealDiv"))
_SCALE_FREE = ops_with(Trait.SHAPE_QUERY) | frozenset(("IsFinite", "IsInf", "IsNan", "OnesLike", "ZerosLike"))
"""Ops whose result does not depend on the scale of the operands."""

_LINEAR_IN_FIRST = (
    "AvgPool AvgPool3D BatchToSpaceND BiasAddGrad BroadcastTo CheckNumerics Conj Cumsum DepthToSpace EnsureShape "
    "ExpandDims ExtractImagePatches FFT FFT2D FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3 Gather "
    "GatherNd GatherV2 IFFT IFFT2D Imag IRFFT IRFFT2D MatrixBandPart Mean MirrorPad MirrorPadGrad Pad Real Reshape "
    "ResizeBilinear ResizeBilinearGrad ResizeNearestNeighbor ResizeNearestNeighborGrad ReverseV2 RFFT RFFT2D Roll "
    "SegmentSum Slice SpaceToBatchND SpaceToDepth SplitV Squeeze StridedSlice Sum Tile Transpose Unpack "
    "UnsortedSegmentSum".split()
)
_LINEAR: dict[str, int] = {
    **{op_type: traits.linear_in[0] for op_type, traits in OP_TRAITS.items() if len(traits.linear_in) == 1},
    **dict.fromkeys(_LINEAR_IN_FIRST, 0),
    **dict.fromkeys(("AvgPoolGrad", "AvgPool3DGrad", "Fill", "MaxPoolGradWithArgmax", "ScatterNd", "Split"), 1),
    **dict.fromkeys(("MaxPoolGrad", "MaxPool3DGrad", "MaxPoolGradGrad", "MaxPool3DGradGrad"), 2),
    "StridedSliceGrad": 4,
}
"""Position of the operand in which an op is linear, while the others are forward values."""

_RELATIVE_ERRORS = {2: 2e-2, 4: 1e-6}
"""Rounding error of a ratio, by the bytes of its type; 1e-10 for others."""


def linear_operands(op: BatchOp) -> Sequence[int]:
    """Return the positions of the operands in which an op is linear; in one of them at a time, unless it is additive.

    A cast to integers, and means and quotients of integers, round; a cast to booleans compares.
    """
    kind = op.node.op
    if kind in _QUOTIENTS and not is_inexact(op.outs[0].dtype):
        return ()
    if kind == "Mean" or (kind == "Cast" and is_inexact(op.node.inputs[0].dtype)):
        return (0,) if is_inexact(op.outs[0].dtype) else ()
    if kind == "Cast":
        return () if op.outs[0].dtype.name == "bool" else (0,)
    if kind in ADDITIVE:
        return _terms(op)
    if kind in _PRODUCTS:
        return _factors(op)
    return (_LINEAR[kind],) if kind in _LINEAR else ()


def scaling_exponent(op: BatchOp) -> Exponent:
    """Return the exponent of an op's results, not counting samples that it adds; `None` if an operand's is unknown.

    Raises:
        MixedScalingError: If it adds values of different exponents.
        NonlinearError: If its result is no power of an operand whose exponent is not 0.
    """
    kind, exponents = op.node.op, [value.exponent for value in op.values]
    if kind in _SCALE_FREE:
        return math.inf if kind == "ZerosLike" else Fraction(0)
    positions = linear_operands(op)
    if kind in ADDITIVE:
        return _common_exponent(op, positions)
    if kind in _PRODUCTS:
        return _total([exponents[p] for p in positions])
    rounds = kind == "FloorDiv" or not is_inexact(op.outs[0].dtype)
    if kind in _QUOTIENTS and (not rounds or is_seed(op.node)):  # Autodiff divides sizes by `FloorDiv`.
        divisor = exponents[1]
        return None if divisor is None or divisor == math.inf else _total([exponents[0], -divisor])
    others = _require_unscaled(op, [p for p in range(len(exponents)) if p not in positions])
    return others if others is None or not positions else exponents[positions[0]]


def exponent_between(here: Any, whole: Any, count: int) -> Exponent:
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
        return Fraction(0) if part.any() else math.inf
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


def _total(exponents: Sequence[Exponent]) -> Exponent:
    known = [exponent for exponent in exponents if exponent is not None]
    return None if len(known) < len(exponents) and math.inf not in known else sum(known, Fraction(0))


def _terms(op: BatchOp) -> list[int]:
    """Return the positions of the operands that an op adds or selects from."""
    last = len(op.values) - 1
    if op.node.op in ("MatrixDiagPartV3", "MatrixDiagV3", "PadV2"):
        return [0, last]
    positions = {"Select": [1, 2], "SelectV2": [1, 2], "ConcatV2": list(range(last))}
    return positions.get(op.node.op, list(range(last + 1)))


def _factors(op: BatchOp) -> list[int]:
    """Return the positions of the factors of a product; integer operands of an inexact product are sizes or indices."""
    has_inexact_result = any(is_inexact(t.dtype) for t in op.outs)
    return [p for p, t in enumerate(op.node.inputs) if is_inexact(t.dtype) or not has_inexact_result]


def _require_unscaled(op: BatchOp, positions: Sequence[int]) -> Exponent:
    """Return exponent 0, `None` if that of an operand is unknown.

    Raises:
        NonlinearError: If an operand differs for a micro-batch.
    """
    is_elementwise = op.node.op in ELEMENTWISE
    read = [p for p in positions if is_elementwise or is_inexact(op.node.inputs[p].dtype)]
    exponents = [op.values[p].exponent for p in read]
    if any(exponent not in (0, math.inf, None) for exponent in exponents):
        raise NonlinearError
    return None if None in exponents else Fraction(0)


def _common_exponent(op: BatchOp, terms: Sequence[int]) -> Exponent:
    """Return the exponent of an op that needs one exponent for all its terms; terms of zeros do not count."""
    exponents = {op.values[p].exponent for p in terms} - {math.inf}
    if None in exponents:
        return None
    if len(exponents) > 1:
        if all(op.values[p].kind in DATA_INDEPENDENT for p in terms):
            return None
        raise MixedScalingError
    return exponents.pop() if exponents else math.inf
