"""Constant folding: values that depend only on constants and static shapes, such as the logarithm of the batch size.

They are computed by TensorFlow's own kernels, as in the step, so that op semantics are not implemented twice.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from rewriters.analysis.autodiff_roles import reads_shape_only
from rewriters.ir.graph import Graph, Node, Tensor
from rewriters.ir.static_values import constant, op_attrs

__all__: list[str] = []

_MAX_ENTRIES = 1 << 16
"""Entries of a tensor up to which it is folded; larger ones are data."""

_OPAQUE = (tf.resource, tf.variant, tf.string)


class ConstantFolder:
    """Values of a graph that depend only on constants and static shapes, computed on demand."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._values: dict[Tensor, np.ndarray] | None = None

    def __call__(self, tensor: Tensor) -> np.ndarray | None:
        """Return the value of a tensor; `None` if it depends on more, is large, or cannot be computed."""
        if tensor.node.op == "Const":
            return constant(tensor.node)
        if self._values is None:
            self._values = self._computed()
        return self._values.get(tensor)

    def _computed(self) -> dict[Tensor, np.ndarray]:
        """Compute tensors in one call."""
        graph_def = tf.compat.v1.GraphDef(versions=self._graph.versions)
        name_of: dict[Tensor, str] = {}
        for node in self._graph.execution_order():
            if reads_shape_only(node):
                for index, (tensor, value) in enumerate(_sizes(node)):
                    name = f"{node.name}/known_{index}"
                    attrs = {**op_attrs(dtype=tensor.dtype), "value": _tensor(value)}
                    _add(graph_def, name, "Const", [], attrs)
                    name_of[tensor] = name
            elif _is_pure(node) and all(t in name_of for t in node.inputs):
                _add(graph_def, node.name, node.op, [name_of[t] for t in node.inputs], node.attrs)
                name_of.update((node.out(index), f"{node.name}:{index}") for index in range(len(node.outputs)))
        wanted = [t for t in name_of if t.node.op != "Const"]
        names = [name_of[t] if ":" in name_of[t] else f"{name_of[t]}:0" for t in wanted]
        if not wanted:
            return {}
        try:
            with tf.init_scope(), tf.device("/CPU:0"):
                function = tf.compat.v1.wrap_function(
                    lambda: tf.graph_util.import_graph_def(graph_def, name="", return_elements=names), []
                )
                return {t: value.numpy() for t, value in zip(wanted, function(), strict=True)}
        except (tf.errors.OpError, ValueError, TypeError):
            return {}  # The step itself would fail, too: unknown.


def _add(graph_def: Any, name: str, op: str, inputs: list[str], attrs: Any) -> None:
    node_def = graph_def.node.add(name=name, op=op, input=inputs)
    for key, value in attrs.items():
        node_def.attr[key].CopyFrom(value)


def _tensor(value: Any) -> Any:
    return tf.compat.v1.AttrValue(tensor=tf.make_tensor_proto(value))


def _sizes(node: Node) -> list[tuple[Tensor, np.ndarray]]:
    """Return the result of a shape query, if the shapes are known."""
    result = []
    for index, (operand, (dtype, _)) in enumerate(zip(node.inputs, node.outputs, strict=True)):
        shape = operand.shape
        if shape is not None and (None not in shape or node.op == "Rank"):
            sizes = [size or 0 for size in shape]
            value = {"Size": math.prod(sizes), "Rank": len(sizes)}.get(node.op, sizes)
            result.append((node.out(index), np.array(value, dtype.as_numpy_dtype)))
    return result


def _is_pure(node: Node) -> bool:
    """Return whether an operation is a small computation on its operands alone."""
    if node.stateful or node.op == "Placeholder" or not (node.inputs or node.op == "Const"):
        return False
    if any(value.HasField("func") or value.list.func for value in node.attrs.values()):
        return False
    return all(
        shape is not None and math.prod(d or 1 for d in shape) <= _MAX_ENTRIES and dtype not in _OPAQUE
        for dtype, shape in node.outputs
    )
