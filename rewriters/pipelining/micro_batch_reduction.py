"""Reductions: how the values of micro-batches become one value for the update or the caller of a step.

Rows are concatenated, sums are added, means are averaged. Other values, and those of unknown reduction, are refused.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.errors import PipelineError
from rewriters.ir.graph import Node, Tensor
from rewriters.ir.static_values import is_inexact
from rewriters.pipelining.step_partition import StepPartition

__all__: list[str] = []

_USED = "is a result of the step or an operand of the update"
_REMEDY = "Return a row for each sample, a sum or a mean over the batch, or use `micro_batches=1`."


class MicroBatchReduction(enum.Enum):
    """Ways to combine the values of micro-batches."""

    MEAN = "mean"
    SUM = "sum"
    CONCAT = "concatenated"
    SCALED_CONCAT = "concatenated, times their fraction of the batch"
    LAST = "value of the last micro-batch"


@dataclasses.dataclass(frozen=True)
class BatchGrowth:
    """Growth of a tensor from the step for a micro-batch to the step for the batch.

    Attributes:
        axes: Axes whose size is multiplied by the number of micro-batches.
        rows: Entries of the first axis for each sample; 0 if that is no integer, or unknown.
    """

    axes: tuple[int, ...]
    rows: int = 0


@dataclasses.dataclass(frozen=True)
class UnrollSpec:
    """Specification of the micro-batches of a step.

    Attributes:
        micro_batches: Number of micro-batches.
        growth: Returns how much larger a tensor is for the batch; `None` if it does not grow along some axes only.
        is_mean: Tells whether a gradient or a loss is a mean over the batch rather than a sum; `None` if unknown.
        counterpart: Returns the op of the step as traced for the batch that a constant corresponds to, or `None`.
        order: Returns the order in which micro-batches compute a tensor.
        factors: Factor of an operand in each micro-batch, by op name and position, such as its fraction of a total.
        gradients_are_means: Whether gradients of unknown reduction are means.
        reductions: Reductions that the user declares, by output position.
    """

    micro_batches: int
    growth: Callable[[Tensor], BatchGrowth | None]
    is_mean: Callable[[Tensor], bool | None]
    counterpart: Callable[[Node], Node | None] = dataclasses.field(default=lambda node: node)
    order: Callable[[Tensor], Sequence[int]] = dataclasses.field(default=lambda tensor: ())
    factors: Mapping[tuple[str, int], float] = dataclasses.field(default_factory=dict)
    gradients_are_means: bool = True
    reductions: Mapping[int, MicroBatchReduction] = dataclasses.field(default_factory=dict)


class ReductionChooser:
    """Chooses the reduction of each value that leaves micro-batches.

    Args:
        analysis: Analysis of the step as traced for one micro-batch.
        parts: Partition of the step.
        spec: Specification of the micro-batches.
    """

    def __init__(self, analysis: GraphAnalysis, parts: StepPartition, spec: UnrollSpec) -> None:
        self._parts = parts
        self._spec = spec
        self._gradients = set(parts.gradients)
        self._backward = analysis.backward
        self._results = set(analysis.graph.outputs)
        self._declared = {analysis.graph.outputs[position]: how for position, how in spec.reductions.items()}

    def of(self, tensor: Tensor) -> MicroBatchReduction:
        """Return the reduction of a tensor.

        Raises:
            PipelineError: If it has none, or an unknown one.
        """
        if tensor.node not in self._parts.batch_dependent:
            return MicroBatchReduction.LAST
        if tensor in self._declared:
            return self._declared[tensor]
        growth = self._spec.growth(tensor)
        # Sparse gradients pair rows with indices, so that number and order of the rows do not matter.
        sparse = tensor.node in self._backward and tensor not in self._results
        if growth is None and sparse and tensor.shape and tensor.shape[0] is None:
            growth = BatchGrowth((0,), 1)
        if growth is None:
            raise PipelineError(
                f"{_shown(tensor)} {_USED}, but its size may depend on the "
                f"batch size in an unknown way. Trace the step with a known batch size. {_REMEDY}"
            )
        if not growth.axes:
            return self._of_one_value(tensor)
        if growth.axes != (0,):
            axes = " and ".join(map(str, growth.axes))
            raise PipelineError(
                f"{_shown(tensor)} {_USED}, and has the batch along axis {axes}, but rows "
                "are concatenated along the first axis. Transpose it, leave it out, or use `micro_batches=1`."
            )
        if not sparse and growth.rows != 1:
            raise PipelineError(
                f"{_shown(tensor)} {_USED}, and has several rows for each sample, whose "
                "order is unknown. Return it with the batch as its first axis, or use `micro_batches=1`."
            )
        scaled = tensor in self._gradients and self._mean(tensor)
        return MicroBatchReduction.SCALED_CONCAT if scaled else MicroBatchReduction.CONCAT

    def _of_one_value(self, tensor: Tensor) -> MicroBatchReduction:
        """Return the reduction of a tensor without a batch axis."""
        if is_inexact(tensor.dtype):
            return MicroBatchReduction.MEAN if self._mean(tensor) else MicroBatchReduction.SUM
        if tensor.dtype.is_integer and self._spec.is_mean(tensor) is False:
            return MicroBatchReduction.SUM
        kind = "is not a sum over the batch" if tensor.dtype.is_integer else "has no batch axis"
        raise PipelineError(
            f"{_shown(tensor)} {_USED}, but has dtype {tensor.dtype.name} and {kind}, so it "
            f"cannot be combined. Leave it out. {_REMEDY}"
        )

    def _mean(self, tensor: Tensor) -> bool:
        known = self._spec.is_mean(tensor)
        if known is not None:
            return known
        if tensor in self._gradients or tensor.node in self._backward:
            return self._spec.gradients_are_means
        raise PipelineError(
            f"{_shown(tensor)} {_USED}, but may be a sum or a mean over the batch. Leave it "
            f"out, or declare it in `reductions`. {_REMEDY}"
        )


def _shown(tensor: Tensor) -> str:
    return f"`{tensor.name}` ({tensor.node.op}, of shape {tensor.shape} for a micro-batch)"
