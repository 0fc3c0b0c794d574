"""Abstract domain of batch analysis: how a tensor of a training step relates to the samples of the batch.

Each tensor has a kind (`BatchKind`), a batch axis if it has one, and a scaling exponent: the power of the number of
micro-batches by which it is larger for the batch than for a micro-batch. A mean over the batch has exponent 0, a sum 1,
the gradient of a mean with respect to one sample -1. Forward and backward tensors are treated alike.

`interpreter.py` visits the graph. `axis_rules.py` and `movement_rules.py` have the rules for layouts,
`scaling_rules.py` those for exponents.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable
from fractions import Fraction

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.batch_semantics.trace_comparison import BatchAxis, TraceComparison
from rewriters.ir.graph import Node, Tensor

__all__: list[str] = []


class BatchKind(enum.Enum):
    """Relations of a tensor to the samples of the batch."""

    INVARIANT = "has one value for all micro-batches"
    UNIFORM = "is as long as the batch, independent of its data, and has one value for all samples"
    INDEXED = "is as long as the batch, independent of its data, and has a value for each sample number"
    PER_SAMPLE = "has rows for each sample that depend on that sample alone"
    SUMMED = "is a sum over samples"


Exponent = Fraction | float | None

DATA_INDEPENDENT = frozenset((BatchKind.INVARIANT, BatchKind.UNIFORM, BatchKind.INDEXED))
"""Kinds that depend on the batch by its size at most."""


@dataclasses.dataclass(frozen=True)
class BatchLayout:
    """Kind of a tensor and position of its samples.

    Attributes:
        kind: Relation to the samples.
        axis: Batch axis.
        adds_samples: Whether the op that computes the tensor sums over samples.
    """

    kind: BatchKind = BatchKind.INVARIANT
    axis: BatchAxis | None = None
    adds_samples: bool = False


@dataclasses.dataclass(frozen=True)
class AbstractValue:
    """Facts about one tensor.

    Attributes:
        layout: Kind and batch axis.
        exponent: Scaling exponent; `None` if unknown, infinity if all entries are zero for all data.
        is_exact: Whether concatenating or adding the values of micro-batches reproduces that of the batch.
        unknown_since: First op after which the exponent is unknown.
    """

    layout: BatchLayout = BatchLayout()
    exponent: Exponent = Fraction(0)
    is_exact: bool = True
    unknown_since: Node | None = None

    @property
    def kind(self) -> BatchKind:
        """Relation to the samples."""
        return self.layout.kind

    @property
    def is_irregular(self) -> bool:
        """Return whether the tensor is independent of data, and its dependence on the batch size is no known power."""
        return self.kind in DATA_INDEPENDENT and self.exponent is None

    @property
    def is_zero(self) -> bool:
        """Return whether all entries are zero for all data."""
        return self.exponent == math.inf

    @property
    def combining_exponent(self) -> Exponent:
        """Exponent of the factor that the added or concatenated values of micro-batches need."""
        is_sum = self.kind in (BatchKind.INVARIANT, BatchKind.SUMMED)
        return self.exponent - 1 if is_sum and self.exponent is not None else self.exponent


class CrossSampleError(Exception):
    """Raised by a rule if a row of the result depends on several samples, or if a sum is used nonlinearly."""


class UnsupportedUseError(Exception):
    """Raised by a rule that does not cover this use of the op."""


class NonlinearError(Exception):
    """Raised if the result of an op does not scale as a power of its operand does."""


class IrregularScalingError(Exception):
    """Raised for a number that differs for the batch by no power of the number of micro-batches."""


class MixedScalingError(Exception):
    """Raised for an op that adds values of different exponents."""


class BatchOp:
    """Operands and results of an op as rules see them.

    Args:
        analysis: Analysis of the step as traced for one micro-batch.
        sizes: Comparison of the two traces.
        node: The op.
        values: Abstract values of its operands.
    """

    def __init__(
        self, analysis: GraphAnalysis, sizes: TraceComparison, *, node: Node, values: list[AbstractValue]
    ) -> None:
        self.node = node
        self.values = values
        self.sizes = sizes
        self.analysis = analysis
        self.outs = [node.out(index) for index in range(len(node.outputs))]

    def shape(self, position: int) -> tuple[int | None, ...]:
        """Return the shape of an operand.

        Raises:
            UnsupportedUseError: If its rank is unknown.
        """
        return _shape(self.node.inputs[position])

    def out_shape(self, index: int = 0) -> tuple[int | None, ...]:
        """Return the shape of a result.

        Raises:
            UnsupportedUseError: If its rank is unknown.
        """
        return _shape(self.outs[index])

    def axis(self, position: int) -> BatchAxis | None:
        """Return the batch axis of an operand, data-independent operands included."""
        return self.values[position].layout.axis

    def of_kind(self, kind: BatchKind) -> list[int]:
        """Return the positions of the operands of a kind."""
        return [position for position, value in enumerate(self.values) if value.kind is kind]

    def ints(self, position: int) -> tuple[int, ...]:
        """Return the value of an integer operand.

        Raises:
            UnsupportedUseError: If it is not constant.
        """
        value = self.analysis.evaluate(self.node.inputs[position])
        numbers = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(number, int) for number in numbers):
            raise UnsupportedUseError
        return numbers  # type: ignore[return-value]

    def may_grow(self, index: int = 0) -> bool:
        """Return whether the size of a result may depend on the batch size."""
        return any(self.sizes.batch_dims(self.outs[index]))


def _shape(tensor: Tensor) -> tuple[int | None, ...]:
    if tensor.shape is None:
        raise UnsupportedUseError
    return tensor.shape


def common_axis(axes: Iterable[BatchAxis]) -> BatchAxis:
    """Return the batch axis of operands that an op reads row by row.

    Raises:
        CrossSampleError: If their samples lie in different places.
    """
    first, *others = axes
    for other in others:
        if other.dim != first.dim:
            raise CrossSampleError
        if first.entries is None:
            first = other
        elif other.entries is not None and other != first:
            raise CrossSampleError
    return first
