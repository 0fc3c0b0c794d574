"""Every use of a TensorFlow interface that is not public, in one place.

If a new TensorFlow breaks the project, it breaks here. Each function says what
it stands in for and why the public interface is not enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import func_graph, function_def_to_graph, op_def_registry
from tensorflow.python.ops import handle_data_util

__all__: list[str] = []


def is_stateful(op_type: str) -> bool:
    """Whether TensorFlow registers `op_type` as stateful (unknown types count as stateful)."""
    op_def = op_def_registry.get(op_type)
    return True if op_def is None else bool(op_def.is_stateful)


def control_outputs(concrete_fn: Any) -> list[Any]:
    """Operations that a traced function runs for their effect alone."""
    return list(concrete_fn.graph.control_outputs)


def trace_func_graph(name: str, function: Callable[..., Any], specs: Sequence[tf.TypeSpec]) -> Any:
    """Trace `function` into a graph of its own, without automatic control dependencies.

    A `tf.function` would chain the loop's operations to effects that are not there.
    """
    return func_graph.func_graph_from_py_func(
        name, function, list(specs), {}, add_control_dependencies=False
    )


def function_body(function_def: Any) -> tuple[Any, dict[str, str]]:
    """A library function as a `GraphDef`, and flat names of its tensors.

    `FunctionDef` names tensors `node:output_arg:index`; a graph needs `node:index`.
    """
    return function_def_to_graph.function_def_to_graph_def(function_def)


def captures(concrete_fn: Any) -> list[tuple[Any, Any]]:
    """Pairs (captured outer tensor, placeholder inside) of a traced function."""
    return list(concrete_fn.graph.captures)


def default_func_graph() -> Any:
    """The function graph being traced, or None outside of a trace."""
    graph = tf.compat.v1.get_default_graph()
    return graph if isinstance(graph, func_graph.FuncGraph) else None


def copy_handle_data(source: Any, target: Any) -> None:
    """Tell a resource placeholder which variable it stands for; reads have no shape otherwise."""
    if source.dtype == tf.resource:
        handle_data_util.copy_handle_data(source, target)


def create_op(op_type: str, operands: Sequence[Any], dtypes: Sequence[Any], attrs: Any, name: str) -> list[Any]:
    """Add any op, by type, to the graph being traced. `tf.raw_ops` wants attributes as Python values."""
    graph = tf.compat.v1.get_default_graph()
    operation = graph._create_op_internal(
        op_type, [tf.convert_to_tensor(t) for t in operands], list(dtypes), attrs=dict(attrs), name=name
    )
    return list(operation.outputs)


def pack_outputs(concrete_fn: Any, flat: Sequence[Any]) -> Any:
    """Flat results in the structure that the traced function returned (`None` leaves kept)."""
    structured = concrete_fn.structured_outputs
    remaining = iter(flat)
    leaves = [None if leaf is None else next(remaining) for leaf in tf.nest.flatten(structured)]
    return tf.nest.pack_sequence_as(structured, leaves)


def register_functions(library: Any) -> None:
    """Make loop bodies known to the eager runtime; importing a graph tells only the graph.

    They are known already while the graph that they were traced in is alive. Adding
    them again counts a reference, so that they outlive it.
    """
    eager = context.context()
    eager.ensure_initialized()
    for function_def in library.function:
        eager.add_function_def(function_def)


def unregister_functions(names: Sequence[str]) -> None:
    """Give back what `register_functions` counted."""
    eager = context.context()
    for name in names:
        eager.remove_function(name)
