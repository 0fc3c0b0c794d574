"""Rewrites masks of attention, so that a tile computes its rows of them.

A causal mask is a triangle of a matrix of ones, or a comparison of cumulative sums of ones along both axes. These
matrices are as large as the scores of one head. A comparison of the positions of queries and keys is equal to the mask,
and reads two vectors. A conjunction with ones repeats a mask for all images and heads. Its readers broadcast their
operands themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from rewriters.ir.graph import Graph, Node, Tensor
from rewriters.ir.op_traits import Trait, ops_with
from rewriters.ir.static_values import StaticEvaluator, constant, op_attrs

__all__: list[str] = []

_COMPARISONS = ops_with(Trait.COMPARISON)
_ALIASES = ops_with(Trait.FORWARDS_BUFFER)

_POSITIONS = tf.float32
"""Type of positions: a GPU compares `int32` on the host, and a CPU takes twice as long for `int64`."""

_MAX_POSITIONS = 2**24
"""Positions that the type represents exactly."""


def rewrite_masks(graph: Graph, evaluate: StaticEvaluator) -> bool:
    """Replace causal masks by comparisons of positions, and masks repeated for images by single ones."""
    replaced: dict[Tensor, Tensor] = {}
    consumers = graph.consumers()
    for node in list(graph.nodes.values()):
        if node.control_inputs or not node.inputs or len(node.outputs) != 1 or node.out().dtype != tf.bool:
            continue
        adds_axes = node.op in _ALIASES or node.op == "StridedSlice"
        if adds_axes and node.inputs[0].node.op == "MatrixBandPart":
            mask = _band(graph, node, evaluate)
        elif node.op in _COMPARISONS and all(tensor.node.op == "Cumsum" for tensor in node.inputs):
            mask = _comparison(graph, node, evaluate)
        elif node.op == "LogicalAnd":
            mask = _without_ones(node, [reader for reader, _ in consumers.get(node.out(), ())])
        else:
            continue
        if mask is not None and node.out() not in graph.outputs:
            replaced[node.out()] = mask
    graph.replace_tensors(replaced, waits=True)
    return bool(replaced)


def _is_true(tensor: Tensor) -> bool:
    """Return whether a tensor of booleans is true everywhere."""
    return tensor.dtype == tf.bool and _is_one(tensor)


def _comparison(graph: Graph, node: Node, evaluate: StaticEvaluator) -> Tensor | None:
    """Add the comparison of positions that is equal to one of cumulative sums of ones along different axes."""
    shape, dims = node.out().shape, []
    if not shape:
        return None
    for tensor in node.inputs:
        dim = evaluate(tensor.node.inputs[1])
        attrs = tensor.node.attrs
        is_plain = not attrs["exclusive"].b and not attrs["reverse"].b and not tensor.node.control_inputs
        if not isinstance(dim, int) or not is_plain or tensor.shape != shape or not _is_one(tensor.node.inputs[0]):
            return None
        dims.append(dim % len(shape))
    is_matrix = all(size == 1 for dim, size in enumerate(shape) if dim not in dims)
    if dims[0] == dims[1] or not is_matrix or not _are_positions(shape):
        return None
    positions = [_positions(graph, node, dim, shape) for dim in dims]
    return graph.add_beside(node, node.op, positions, {**node.attrs, **op_attrs(T=_POSITIONS)}, node.outputs).out()


def _are_positions(sizes: Sequence[int | None]) -> bool:
    """Return whether all positions along dimensions of these sizes are known, and represented exactly."""
    return all(size is not None and size <= _MAX_POSITIONS for size in sizes)


def _is_one(tensor: Tensor) -> bool:
    """Return whether a tensor is 1 everywhere."""
    node = tensor.node
    if node.op == "OnesLike":
        return True
    value = constant(node.inputs[1].node if node.op == "Fill" else node)
    return value is not None and bool(np.all(value == 1))


def _band(graph: Graph, reshape: Node, evaluate: StaticEvaluator) -> Tensor | None:
    """Add the comparison that is equal to a band of ones with more axes of size 1; `None` for other results."""
    band, shape = reshape.inputs[0].node, reshape.out().shape
    ones, below, above = band.inputs
    rows_and_columns = ones.shape
    if not _is_true(ones) or band.control_inputs or rows_and_columns is None or len(rows_and_columns) != 2:
        return None
    if not _are_positions(rows_and_columns) or shape is None or len(shape) < 3:
        return None
    if shape[-2:] != rows_and_columns or set(shape[:-2]) - {1}:
        return None
    if reshape.op == "StridedSlice" and any(stride < 1 for stride in evaluate.ints(reshape.inputs[3]) or (0,)):
        return None
    limits = [limit for limit in map(evaluate, (below, above)) if isinstance(limit, int)]
    if len(limits) < 2:
        return None
    rows = _positions(graph, reshape, len(shape) - 2, shape)
    sides = []
    for op, limit in zip(("GreaterEqual", "LessEqual"), limits, strict=True):
        if limit >= 0:
            sign = 1 if op == "LessEqual" else -1
            columns = _positions(graph, reshape, len(shape) - 1, shape, -sign * limit)
            attrs = op_attrs(T=_POSITIONS)
            sides.append(graph.add_beside(reshape, op, [columns, rows], attrs, [(tf.bool, shape)]).out())
    if len(sides) == 2:
        return graph.add_beside(reshape, "LogicalAnd", sides, {}, [(tf.bool, shape)]).out()
    return sides[0] if sides else None


def _positions(graph: Graph, near: Node, dim: int, shape: Sequence[int | None], offset: int = 0) -> Tensor:
    """Add the positions along one dimension of a mask, which broadcast over the others."""
    size = shape[dim]
    assert size is not None
    sizes = tuple(size if other == dim else 1 for other in range(len(shape)))
    values = (np.arange(size) + offset).astype(_POSITIONS.as_numpy_dtype).reshape(sizes)
    attrs = op_attrs(dtype=_POSITIONS) | {"value": tf.compat.v1.AttrValue(tensor=tf.make_tensor_proto(values))}
    return graph.add_beside(near, "Const", [], attrs, [(_POSITIONS, sizes)]).out()


def _without_ones(node: Node, readers: Sequence[Node]) -> Tensor | None:
    """Return the operand of a conjunction with ones, if all its readers broadcast it themselves."""
    others = [tensor for tensor in node.inputs if not _is_true(tensor)]
    if len(others) != 1 or not others[0].shape or len(others[0].shape) != len(node.out().shape or ()):
        return None
    return others[0] if all(_broadcasts_condition(reader, node.out()) for reader in readers) else None


def _broadcasts_condition(reader: Node, condition: Tensor) -> bool:
    """Return whether an op selects by a condition, and has the shape of its other operands."""
    if reader.op != "SelectV2" or reader.inputs[0] != condition or condition in reader.inputs[1:]:
        return False
    return any(tensor.shape == reader.out().shape and tensor.shape is not None for tensor in reader.inputs[1:])
