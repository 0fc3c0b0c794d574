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
    offset = _offset(sizes, tensor)
    if offset is None:
        return False
    seen, stack = {tensor}, [(tensor, offset)]
    while stack:
        current, offset = stack.pop()
        for consumer, position in analysis.consumers.get(current, ()):
            if consumer in ignored or reads_shape_only(consumer) or _indexes_batch(consumer, position, sizes, offset):
                continue
            if consumer.op not in ops_with(Trait.INDEX_ARITHMETIC) or not consumer.out().dtype.is_integer:
                return False
            if consumer.out() not in seen:
                seen.add(consumer.out())
                # Indices to which data add keep the offset of the part that is known.
                known = _offset(sizes, consumer.out())
                stack.append((consumer.out(), offset if known is None else known))
    return True


def _offset(sizes: TraceComparison, tensor: Tensor) -> np.ndarray | None:
    """Return the number by which each entry grows from one micro-batch to the next; `None` if it is unknown.

    The last axis holds the coordinates of `GatherNd` and `ScatterNd`; along the others the offset is the same.
    """
    here, whole = sizes.values(tensor)
    if not tensor.dtype.is_integer or not isinstance(here, np.ndarray) or not isinstance(whole, np.ndarray):
        return None
    if not here.shape or whole.shape != (sizes.count * here.shape[0], *here.shape[1:]):
        return None
    offsets = (whole.reshape(sizes.count, *here.shape) - here).reshape(sizes.count, -1, here.shape[-1])
    is_regular = (offsets == offsets[1, :1] * np.arange(sizes.count)[:, None, None]).all()
    return offsets[1, 0] if is_regular else None


def _indexes_batch(consumer: Node, position: int, sizes: TraceComparison, offset: np.ndarray) -> bool:
    """Tell whether an operand holds indices into a batch, by which each micro-batch finds its own rows."""
    if _INDEX_OPERANDS.get(consumer.op) != position:
        return False
    indexed = consumer.out() if consumer.op in ("ScatterNd", "UnsortedSegmentSum") else consumer.inputs[0]
    growth, rows = sizes.growth(indexed), (indexed.shape or (None,))[0]
    if growth is not None and growth.axes != (0,):
        return False
    shape, expected = consumer.inputs[position].shape, [rows] * len(offset)
    if consumer.op in ("GatherNd", "ScatterNd") and shape and shape[-1] == len(offset):
        expected[1:] = [0] * (len(offset) - 1)
    return rows is None or offset.tolist() == expected
