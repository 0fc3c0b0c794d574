"""What a tensor of a training step is with regard to the samples of a batch.

The graph is gone through once, and of each tensor it is found out: is it the same for all micro-batches, does it have
a row for each sample that depends on that sample alone, or is it a sum over samples; if it is as long as the batch and
not made of its data, is it the same for each sample, or does it go by their numbers; and by which power of the number
of micro-batches it is larger for the batch than for a micro-batch. A mean over the batch is not larger, a sum is, and
the gradient of a mean by one sample is smaller. Forward and backward values are gone through alike.

It is gone through in `interpreter.py`; what operations do to samples is in `axis_rules.py` and `movement_rules.py`,
what they do to powers in `scaling_rules.py`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.ir.graph import Node, Tensor
from rewriters.pipelining.micro_batch_reduction import BatchGrowth

__all__: list[str] = []


class BatchKind(enum.Enum):
    """What a tensor holds of samples."""

    EVEN = "the same for all micro-batches"
    ALIKE = "as long as the batch, not made of its data, and the same for each sample"
    PLACES = "as long as the batch, not made of its data, and another one for each sample"
    ROWS = "a row for each sample"
    SUM = "a sum over samples"


WITHOUT_DATA = frozenset((BatchKind.EVEN, BatchKind.ALIKE, BatchKind.PLACES))
"""Kinds of what depends on the batch by its size at most."""


@dataclasses.dataclass(frozen=True)
class Axis:
    """Where samples lie.

    Attributes:
        dim: The dimension.
        before: Times that it holds all samples, one after another; `None` if that does not matter.
        within: Entries of a sample that follow each other in it.
    """

    dim: int
    before: int | None = None
    within: int | None = None

    def moved(self, dim: int) -> Axis:
        """The same in another dimension."""
        return dataclasses.replace(self, dim=dim)


@dataclasses.dataclass(frozen=True)
class Made:
    """What an operation makes of samples.

    Attributes:
        kind: What the result holds.
        axis: Where its samples lie.
        ragged: Whether the number of rows depends on data.
        positions: In an axis like this one the result says where rows are.
        added: Whether samples are added up.
    """

    kind: BatchKind = BatchKind.EVEN
    axis: Axis | None = None
    ragged: bool = False
    positions: Axis | None = None
    added: bool = False


@dataclasses.dataclass(frozen=True)
class AbstractValue:
    """What is known of a tensor.

    Attributes:
        made: What it holds of samples.
        power: Power of the number of micro-batches by which it is larger for the batch; `None` if that is not known.
        exact: Whether rows of micro-batches are those of the batch, and sums add up to that of the batch.
        state: The operation that read a variable, if it depends on what micro-batches before it have written.
        lost: The operation after which the power is not known.
        mixed: Whether that one added what has different powers.
        odd: Whether it is known to go with the size of the batch by what is no power.
        cut: Whether it is not made of data, and a part of what is made for the whole batch.
        zero: Whether it is all zeros, whatever the data of batches of these sizes, as gradients of labels that are all
            zero are: of such a value any power is right.
    """

    made: Made = Made()
    power: Fraction | None = Fraction(0)
    exact: bool = True
    state: Node | None = None
    lost: Node | None = None
    mixed: bool = False
    odd: bool = False
    cut: bool = False
    zero: bool = False

    @property
    def kind(self) -> BatchKind:
        """What it holds of samples."""
        return self.made.kind

    @property
    def goes_with_size(self) -> bool:
        """Whether it is not made of data, and known to be another one for the batch."""
        return self.kind in WITHOUT_DATA and bool(self.odd or self.power)

    @property
    def to_sum(self) -> Fraction | None:
        """Power that values of micro-batches, added up or put together, are multiplied by to give that of the batch."""
        put_together = self.kind in (BatchKind.ROWS, BatchKind.ALIKE, BatchKind.PLACES)
        return self.power if self.power is None or put_together else self.power - 1


class CrossSampleError(Exception):
    """Raised by a rule: a row of the result depends on several samples, or a sum is used as such."""


class NotKnownError(Exception):
    """Raised by a rule: what this use of the operation does is not known."""


class NotLinearError(Exception):
    """Raised for an operation to which it matters that a value is larger for a micro-batch."""


class NoPowerError(Exception):
    """Raised for a number that is known to be larger for the batch, by no power of the number of micro-batches."""


class MixedError(Exception):
    """Raised for an operation that adds what has different powers."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the traces for the batch and for a part of it tell of a tensor.

    Attributes:
        whole: The shape of a tensor in the step as traced for the batch.
        values: Of a tensor that is computed from constants and sizes, its value here and in the step as traced for the
            batch, if that is another trace; `None` for one that is not known.
        growth: How much larger a tensor is for the batch; `None` if not just longer along some axes.
        parts: Number of micro-batches.
        samples: Samples of a micro-batch; `None` if that is not known.
    """

    whole: Callable[[Tensor], Any]
    values: Callable[[Tensor], tuple[Any, Any]]
    growth: Callable[[Tensor], BatchGrowth | None]
    parts: int
    samples: int | None

    def dims(self, tensor: Tensor) -> tuple[set[int], set[int]]:
        """Dimensions whose size goes with that of the batch, and those of which that is not known."""
        if tensor.shape is None:
            return set(), set()
        whole = self.whole(tensor)
        if whole is None or len(whole) != len(tensor.shape):
            whole = tensor.shape
        pairs = list(enumerate(zip(tensor.shape, whole, strict=True)))
        return {d for d, (a, b) in pairs if a is not None and a != b}, {d for d, (a, _) in pairs if a is None}

    def axis(self, tensor: Tensor) -> Axis | None:
        """Where a tensor is as long as the batch, by its size alone; `None` if it is not, or that is not known."""
        certain, maybe = self.dims(tensor)
        dims = certain or (maybe if len(maybe) == 1 else set())
        return Axis(min(dims)) if dims else None


class Op:
    """An operation as rules see it."""

    def __init__(self, analysis: GraphAnalysis, sizes: Sizes, node: Node, values: list[AbstractValue]) -> None:
        self.node = node
        self.values = values
        self.sizes = sizes
        self.analysis = analysis
        self.outs = [node.out(index) for index in range(len(node.outputs))]

    def shape(self, position: int) -> tuple[int | None, ...]:
        """Shape of an operand."""
        return _shape(self.node.inputs[position])

    def out_shape(self, index: int = 0) -> tuple[int | None, ...]:
        """Shape of a result."""
        return _shape(self.outs[index])

    def axis(self, position: int) -> Axis | None:
        """Where the samples of an operand lie; also of one that is as long as the batch and the same for all."""
        return self.values[position].made.axis

    def of(self, kind: BatchKind) -> list[int]:
        """Positions of operands of a kind."""
        return [position for position, value in enumerate(self.values) if value.kind is kind]

    def is_ragged(self, positions: Iterable[int]) -> bool:
        """Whether the number of rows of an operand depends on data."""
        return any(self.values[position].made.ragged for position in positions)

    def ints(self, position: int) -> tuple[int, ...]:
        """Value of an integer operand.

        Raises:
            NotKnownError: If it is computed when the step runs.
        """
        value = self.analysis.evaluate(self.node.inputs[position])
        numbers = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(number, int) for number in numbers):
            raise NotKnownError
        return numbers  # type: ignore[return-value]

    def scales(self, index: int = 0) -> bool:
        """Whether the size of a result may go with that of the batch."""
        return any(self.sizes.dims(self.outs[index]))


def _shape(tensor: Tensor) -> tuple[int | None, ...]:
    if tensor.shape is None:
        raise NotKnownError
    return tensor.shape


def met(axes: Iterable[Axis]) -> Axis:
    """Where samples of operands lie that are taken together row by row.

    Raises:
        JoinsError: If those of one lie otherwise than those of another.
    """
    first, *others = axes
    for other in others:
        if other.dim != first.dim:
            raise CrossSampleError
        if first.within is None:
            first = other
        elif other.within is not None and other != first:
            raise CrossSampleError
    return first
