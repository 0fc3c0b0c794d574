"""Values that are as long as the batch but do not depend on its data: sample numbers, seeded noise, table rows.

A step that is traced for a micro-batch contains such a value for that micro-batch alone, so that all micro-batches
would read the numbers of the first one. The emitter computes such a value for the whole batch and splits it as it
splits arguments. Indices, such as the rows of `tf.gather_nd`, are not split: each micro-batch counts its rows from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Any

import numpy as np

from rewriters.analysis.autodiff_roles import reads_shape_only
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.errors import PipelineError
from rewriters.ir.graph import Node, Tensor
from rewriters.ir.op_traits import Trait, ops_with
from rewriters.pipelining.micro_batch_reduction import BatchGrowth
from rewriters.pipelining.step_partition import MicroBatchUse, StepPartition, data_independent_ops

__all__: list[str] = []

_INDEX_ARITHMETIC = ops_with(Trait.INDEX_ARITHMETIC)

_INDEX_OPERANDS = {
    **dict.fromkeys(("GatherNd", "GatherV2", "TensorScatterUpdate", "TensorScatterAdd"), 1),
    "ScatterNd": 0,
    "UnsortedSegmentSum": 1,
}
"""Position of the operand that holds indices, by op type."""


class BatchSizedValues:
    """Decides how micro-batches read values that do not depend on data.

    Args:
        analysis: Analysis of the step as traced for one micro-batch.
        parts: Partition of the step.
        growth: Returns how much larger a tensor is for the batch, `None` if that is unknown.
        is_uniform: Tells whether all samples have the same value in a tensor, so that every slice is right.
    """

    def __init__(
        self,
        analysis: GraphAnalysis,
        parts: StepPartition,
        growth: Callable[[Tensor], BatchGrowth | None],
        is_uniform: Callable[[Tensor], bool],
    ) -> None:
        self._analysis = analysis
        self._parts = parts
        # Autodiff's values belong to one micro-batch, such as one over the number of its samples.
        self.forward = data_independent_ops(analysis, parts) - analysis.backward
        self._growth = growth
        self._is_uniform = is_uniform
        self._uses: dict[Tensor, MicroBatchUse] = {}

    def use(self, tensor: Tensor) -> MicroBatchUse:
        """Return how micro-batches read a tensor.

        Raises:
            PipelineError: If each micro-batch needs its slice, and the tensor cannot be split.
        """
        if tensor not in self._uses:
            self._uses[tensor] = self._use(tensor)
        return self._uses[tensor]

    def _use(self, tensor: Tensor) -> MicroBatchUse:
        source = tensor.node
        if source not in self.forward or source.op == "Placeholder" or not tensor.shape:
            return MicroBatchUse.SAME
        growth, is_sized = self._growth(tensor), source in self._parts.per_micro_batch
        if growth is None and not (is_sized and None in tensor.shape):
            return MicroBatchUse.SAME
        if (growth is not None and not growth.axes) or self._is_uniform(tensor):
            return MicroBatchUse.SAME
        # Without consumers in the forward phase those of the backward phase decide.
        uses = set(self._ends(tensor, self._analysis.backward)) or set(self._ends(tensor, ()))
        if uses == {MicroBatchUse.INDEX}:
            return MicroBatchUse.INDEX
        if growth is None or growth.axes != (0,) or len(uses) > 1:
            why = (
                "it is used as values and as indices"
                if len(uses) > 1
                else "its batch axis is not the first, or unknown"
            )
            raise cannot_split(tensor, why)
        return MicroBatchUse.SLICE

    def _ends(self, tensor: Tensor, ignored: Container[Node]) -> Iterator[MicroBatchUse]:
        """Yield the use by each consumer, through index arithmetic; `ignored` consumers are left out."""
        seen, stack = {tensor}, [tensor]
        while stack:
            current = stack.pop()
            for consumer, position in self._analysis.consumers.get(current, ()):
                if consumer in self._parts.update or consumer in ignored or reads_shape_only(consumer):
                    continue
                if current.dtype.is_integer and _is_batch_index(consumer, position, self._growth):
                    yield MicroBatchUse.INDEX
                elif consumer.op in _INDEX_ARITHMETIC and current.dtype.is_integer and consumer.out().dtype.is_integer:
                    if consumer.out() not in seen:
                        seen.add(consumer.out())
                        stack.append(consumer.out())
                else:
                    yield MicroBatchUse.SLICE


def cannot_split(tensor: Tensor, why: str) -> PipelineError:
    """Return the error for a batch-sized value that cannot be split between micro-batches."""
    return PipelineError(
        f"`{tensor.name}` ({tensor.node.op}) is as long as the batch and does not depend on its data, so each "
        f"micro-batch needs its own slice; it cannot be split: {why}. Pass it as an argument of the step, trace the "
        "step with a known batch size, or use `micro_batches=1`."
    )


def is_offset_by_micro_batch(here: Any, whole: Any, count: int) -> bool:
    """Tell whether indices for the batch are those for a micro-batch plus a constant offset per micro-batch.

    Args:
        here: Indices for a micro-batch; `None`, unknown, counts as offset.
        whole: Indices for the batch.
        count: Number of micro-batches.
    """
    if not isinstance(here, np.ndarray) or not isinstance(whole, np.ndarray):
        return True
    if whole.shape != (count * here.shape[0], *here.shape[1:]):
        return False
    offsets = (whole.reshape(count, *here.shape) - here).reshape(count, -1)
    return bool((offsets == offsets[1, :1] * np.arange(count)[:, None]).all())


def _is_batch_index(consumer: Node, position: int, growth: Callable[[Tensor], BatchGrowth | None]) -> bool:
    """Tell whether an operand holds indices into a tensor whose first axis is the batch."""
    if _INDEX_OPERANDS.get(consumer.op) != position:
        return False
    is_scatter = consumer.op in ("ScatterNd", "UnsortedSegmentSum")
    indexed = growth(consumer.out() if is_scatter else consumer.inputs[0])
    return indexed is None or indexed.axes == (0,)
