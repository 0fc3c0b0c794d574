"""How what each micro-batch makes becomes one value, where the update or the caller of a step asks for it.

What has a row for each sample is put one after another, sums are added up, means are averaged. What is none of these,
or is not known to be, has no one value, and is refused.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.errors import PipelineError
from rewriters.ir.graph import Node, Tensor
from rewriters.ir.op_traits import Trait, ops_with
from rewriters.ir.static_values import is_inexact
from rewriters.pipelining.step_partition import StepPartition
from rewriters.rules.elementwise import Pointwise
from rewriters.rules.registry import registered

__all__: list[str] = []

_REMEDY = "Return a row for each sample, a sum or a mean over the batch, or use `micro_batches=1`."


class MicroBatchReduction(enum.Enum):
    """What becomes of a value that each micro-batch has."""

    MEAN = "mean"
    SUM = "sum"
    CONCAT = "concatenated"
    SCALED_CONCAT = "concatenated, times their part of the batch"
    LAST = "value after the last one"


@dataclasses.dataclass(frozen=True)
class BatchGrowth:
    """How much larger a tensor is in the step for the batch than in that for a micro-batch.

    Attributes:
        axes: Those along which it is as many times as long as there are micro-batches.
        rows: Entries of its first axis for each sample; 0 if that is no whole number, or not known.
    """

    axes: tuple[int, ...]
    rows: int = 0


class ReductionChooser:
    """Decides how values become one.

    Args:
        analysis: Of the step as traced for one micro-batch.
        parts: Its parts.
        is_mean: See `UnrollSpec`.
        growth: See `UnrollSpec`.
        gradients_are_means: See `UnrollSpec`.
        declared: Reductions that the user declares.
    """

    def __init__(
        self,
        analysis: GraphAnalysis,
        parts: StepPartition,
        is_mean: Callable[[Tensor], bool | None],
        growth: Callable[[Tensor], BatchGrowth | None],
        gradients_are_means: bool,
        declared: Mapping[Tensor, MicroBatchReduction] | None = None,
    ) -> None:
        self._declared = declared or {}
        self._parts = parts
        self._is_mean = is_mean
        self._growth = growth
        self._gradients = set(parts.gradients)
        self._backward = analysis.backward
        self._results = set(analysis.graph.outputs)
        self._gradients_are_means = gradients_are_means

    def of(self, tensor: Tensor) -> MicroBatchReduction:
        """How a tensor becomes one.

        Raises:
            PipelineError: If it has no one value, or none that is known.
        """
        if tensor.node not in self._parts.batch_dependent:
            return MicroBatchReduction.LAST
        if tensor in self._declared:
            return self._declared[tensor]
        growth = self._growth(tensor)
        # Rows of sparse gradients go with their indices; how many there are, and in which order, does not matter.
        sparse = tensor.node in self._backward and tensor not in self._results
        if growth is None and sparse and tensor.shape and tensor.shape[0] is None:
            growth = BatchGrowth((0,), 1)
        if growth is None:
            raise PipelineError(
                f"{_shown(tensor)} is read or returned, and its size is not known to go with that of the batch: of "
                f"several micro-batches there is no one value. Give the step a batch of known size. {_REMEDY}"
            )
        if not growth.axes:
            return self._of_one_value(tensor)
        if growth.axes != (0,):
            axes = " and ".join(map(str, growth.axes))
            raise PipelineError(
                f"{_shown(tensor)} is read or returned, and has the batch along axis {axes}: micro-batches are put "
                "together along the first. Transpose it, leave it out, or use `micro_batches=1`."
            )
        if not sparse and not self._in_order(tensor):
            raise PipelineError(
                f"{_shown(tensor)} is read or returned, and has several rows for each sample, of which it is not known "
                "that those of a sample follow each other. Return it with the batch as its first axis, or use "
                "`micro_batches=1`."
            )
        scaled = tensor in self._gradients and self._mean(tensor)
        return MicroBatchReduction.SCALED_CONCAT if scaled else MicroBatchReduction.CONCAT

    def _of_one_value(self, tensor: Tensor) -> MicroBatchReduction:
        """Of what has no batch axis."""
        if is_inexact(tensor.dtype):
            return MicroBatchReduction.MEAN if self._mean(tensor) else MicroBatchReduction.SUM
        if tensor.dtype.is_integer and self._adds_up(tensor):
            return MicroBatchReduction.SUM
        kind = "is no sum over the batch" if tensor.dtype.is_integer else "has no batch axis"
        raise PipelineError(
            f"{_shown(tensor)} is of type {tensor.dtype.name}, {kind}, and is read or returned: of several "
            f"micro-batches there is no one value. Leave it out. {_REMEDY}"
        )

    def _mean(self, tensor: Tensor) -> bool:
        known = self._is_mean(tensor)
        if known is not None:
            return known
        if tensor in self._gradients or tensor.node in self._backward:
            return self._gradients_are_means
        raise PipelineError(
            f"{_shown(tensor)} is read or returned, and is not known to be a sum or a mean over the batch: of several "
            f"micro-batches there is no one value. Leave it out. {_REMEDY}"
        )

    def _adds_up(self, tensor: Tensor) -> bool:
        """Whether an integer is a sum over the batch, or made of such sums alone."""
        node = tensor.node
        if node.op == "Sum":
            growth = self._growth(node.inputs[0])
            return growth is None or bool(growth.axes)
        if node.op in ops_with(Trait.ADDITIVE):
            return all(map(self._adds_up, node.inputs))
        whole = node.op == "Cast" and node.inputs[0].dtype.is_integer
        return (whole or node.op in ops_with(Trait.KEEPS_MAGNITUDE)) and self._adds_up(node.inputs[0])

    def _in_order(self, tensor: Tensor) -> bool:
        """Whether the first axis has the samples in their order, all rows of one after another."""
        growth = self._growth(tensor)
        if growth is None or growth.axes != (0,):
            return False
        node = tensor.node
        if growth.rows == 1 or node.op == "Placeholder":
            return True
        if not (node.op in ops_with(Trait.KEEPS_ROW_ORDER) or _is_pointwise(node) or _multiplies_rows(node)):
            return False
        return all(self._in_order(t) for t in node.inputs if (found := self._growth(t)) is None or found.axes)


def _is_pointwise(node: Node) -> bool:
    """Of a `ConcatV2`, which counts as such for what has no rows to add, rows may follow others."""
    return isinstance(registered().get(node.op), Pointwise) and node.op != "ConcatV2"


def _multiplies_rows(node: Node) -> bool:
    return node.op == "MatMul" and not node.attrs["transpose_a"].b


def _shown(tensor: Tensor) -> str:
    return f"`{tensor.name}` ({tensor.node.op}, of shape {tensor.shape} for a micro-batch)"
