"""Indices of rows that do not depend on data, such as the sample numbers that gradients of `tf.gather` scatter by.

They differ for the batch by an offset for each micro-batch, and each micro-batch counts its rows from 0. Any other
value that is as long as the batch, independent of its data and different between samples has to be an argument of the
step: a step that is traced for a micro-batch contains the values of the first micro-batch alone.
"""

from __future__ import annotations

from collections.abc import Container

import numpy as np

from rewriters.analysis.autodiff_roles import reads_shape_only
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.batch_semantics.trace_comparison import TraceComparison
from rewriters.ir.graph import Node, Tensor
from rewriters.ir.op_traits import Trait, ops_with

__all__: list[str] = []

_INDEX_OPERANDS = {"GatherNd": 1, "GatherV2": 1, "ScatterNd": 0, "UnsortedSegmentSum": 1}
"""Position of the operand that holds indices, by op type."""


def are_batch_indices(
    analysis: GraphAnalysis, sizes: TraceComparison, tensor: Tensor, ignored: Container[Node]
) -> bool:
    """Tell whether micro-batches can use a data-independent value as indices of their own rows.

    Args:
        analysis: Analysis of the step as traced for one micro-batch.
        sizes: Comparison of the traces for the batch and for a micro-batch.
        tensor: The value.
        ignored: Consumers that do not count.
    """
    here, whole = sizes.values(tensor)
    if not tensor.dtype.is_integer or not isinstance(here, np.ndarray) or not isinstance(whole, np.ndarray):
        return False
    if whole.shape != (sizes.count * here.shape[0], *here.shape[1:]):
        return False
    offsets = (whole.reshape(sizes.count, *here.shape) - here).reshape(sizes.count, -1)
    if not (offsets == offsets[1, :1] * np.arange(sizes.count)[:, None]).all():
        return False
    seen, stack = {tensor}, [tensor]
    while stack:
        current = stack.pop()
        for consumer, position in analysis.consumers.get(current, ()):
            if consumer in ignored or reads_shape_only(consumer) or _indexes_batch(consumer, position, sizes):
                continue
            if consumer.op not in ops_with(Trait.INDEX_ARITHMETIC) or not consumer.out().dtype.is_integer:
                return False
            if consumer.out() not in seen:
                seen.add(consumer.out())
                stack.append(consumer.out())
    return True


def _indexes_batch(consumer: Node, position: int, sizes: TraceComparison) -> bool:
    """Tell whether an operand holds indices into a tensor whose first axis is the batch."""
    if _INDEX_OPERANDS.get(consumer.op) != position:
        return False
    is_scatter = consumer.op in ("ScatterNd", "UnsortedSegmentSum")
    indexed = sizes.growth(consumer.out() if is_scatter else consumer.inputs[0])
    return indexed is None or indexed.axes == (0,)
