"""Text of a graph: one line for each op, in the order of the program.

    graph(
      images: float32[?,64,64,3],
      kernel: resource of float32[3,3,3,8],
    ):
      read = float32[3,3,3,8] ReadVariableOp(kernel)
      conv = float32[?,64,64,8] Conv2D(images, read) {padding="SAME", strides=[1, 1, 1, 1]}  # layer conv_1, forward
      mean = float32[8] Mean(conv, [0, 1, 2]) after [read] on GPU:0
      ...
      effects update
      return loss

A line holds name, results (dtype and shape, `?` for an unknown size), op type, operands, attributes that differ from
the default, control inputs, device and metadata. Attributes that hold types are left out: operands and results show
them. Small constants stand in the place of operands; those that are neither int32 nor float32 name their dtype. Bodies
of loops, branches and calls are indented blocks below their op.

Ops stand in creation order, producers of operands first: a new op stands above its first consumer, and a new control
edge moves no line. Long lists of control inputs end in a hash, under which all names stand below the graph. Texts can
be compared, because names of functions, which differ in every process, do not occur.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from rewriters.ir import tf_internals
from rewriters.ir.graph import BRANCHES, LOOPS, Graph, Node, Shape, Tensor, producers
from rewriters.ir.loop_bodies import branches_of, called_function, function_names, function_of
from rewriters.ir.op_traits import Trait, ops_with

__all__: list[str] = []

MAX_INLINE_ELEMENTS = 8
"""Elements up to which a constant is written in the place of an operand; a larger one shows a hash of its value."""

MAX_NAMES = 12
"""Control inputs or effects up to which all names are written; of more, some names and a hash of all."""

INDENT, METADATA_MARK = "  ", "  # "

_HIDDEN = frozenset(
    (
        "_gradient_op_type",
        "_has_manual_control_dependencies",
        "_lower_using_switch_merge",
        "_num_original_outputs",
        "_read_only_resource_inputs",
        "_stateful_parallelism",
        "_user_specified_name",
        "output_shapes",
        "token",
    )
)
"""Attributes in which TensorFlow notes how an op was traced, shapes of loops, and numbers of Python functions."""

_CALLS = ops_with(Trait.CALL)
_PLAIN_NUMBERS = (tf.int32, tf.float32)
"""Types of numbers that a literal does not name."""


def graph_text(graph: Graph, *, inline_constants: bool = True, bodies: bool = True) -> str:
    """Return a graph as text.

    Args:
        graph: The graph.
        inline_constants: Whether small constants stand in the place of operands.
        bodies: Whether bodies of loops, branches and calls follow their op.
    """
    return "\n".join(_lines(graph, "graph", inline_constants, bodies, {}, ())) + "\n"


def op_line(node: Node, *, with_edges: bool = True) -> str:
    """Return the line of one op, with the names of all operands and without metadata; control inputs on request."""
    return _line(node, {}, with_edges=with_edges, with_metadata=False)


def _lines(
    graph: Graph, title: str, inline: bool, bodies: bool, seen: dict[str, str], operands: Sequence[str]
) -> Iterator[str]:
    """Yield the lines of a graph.

    Args:
        graph: The graph.
        title: Word above its arguments.
        inline: Whether small constants stand in the place of operands.
        bodies: Whether bodies follow their op.
        seen: Op below which the body of a function stands, by the function's name.
        operands: Operands that the arguments of a body begin with.
    """
    literals = _literals(graph) if inline else {}
    given = {tensor.node for tensor in graph.inputs}
    yield f"{title}("
    for tensor, operand in itertools.zip_longest(graph.inputs, operands):
        begin = f" = {operand}" if operand else ""
        yield f"{INDENT}{tensor.node.name}: {_argument(graph, tensor)}{begin},"
    yield "):"
    for node in _program_order(graph):
        if node in literals or node in given:
            continue
        yield INDENT + _line(node, literals)
        for line in _bodies(graph, node, inline, seen, literals) if bodies else ():
            yield 2 * INDENT + line
    if graph.keep:
        yield f"{INDENT}effects {_names(graph.keep)}"
    yield f"{INDENT}return {', '.join(_operands(graph.outputs, literals))}".rstrip()
    cut = {_names(group): group for group in (graph.keep, *(node.control_inputs for node in graph.nodes.values()))}
    for text, group in cut.items():
        if len(set(group)) > MAX_NAMES:
            yield f"{INDENT}{text.rpartition(' ')[2]}: {', '.join(sorted({node.name for node in group}))}"


def _program_order(graph: Graph) -> list[Node]:
    """Return the nodes in creation order, but each behind the producers of its operands, unless on a cycle."""
    placed: dict[Node, None] = {}
    begun: set[Node] = set()
    for root in graph.nodes.values():
        stack = [] if root in begun else [root]
        while stack:
            begun.add(stack[-1])
            before = [other for other in producers(stack[-1]) if other not in begun]
            if before:
                stack.append(before[0])
            else:
                placed.setdefault(stack.pop())
    return list(placed)


def _argument(graph: Graph, tensor: Tensor) -> str:
    """Return the type of an argument; of a variable's handle, also the type of the variable."""
    text = f"{tensor.dtype.name}{shape_text(tensor.shape)}"
    if tensor.node.name not in graph.variables:
        return text
    dtype, shape = graph.variables[tensor.node.name]
    return f"{tensor.dtype.name} of {dtype.name}{shape_text(shape)}"


def _names(nodes: Iterable[Node]) -> str:
    """Return the names of nodes whose order has no meaning."""
    names = sorted({node.name for node in nodes})
    if len(names) <= MAX_NAMES:
        return ", ".join(names)
    shown = MAX_NAMES // 3
    return f"{', '.join(names[:shown])} and {len(names) - shown} more #{_hash(repr(names).encode())}"


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]


def _literals(graph: Graph) -> dict[Node, str]:
    """Return the texts of the constants that stand in the place of operands."""
    waited_for = {before for node in graph.nodes.values() for before in node.control_inputs}
    constants = (node for node in graph.nodes.values() if node.op == "Const" and node not in waited_for)
    return {
        node: _literal(tf.make_ndarray(node.attrs["value"].tensor), node.outputs[0][0])
        for node in constants
        if _is_small(node) and not node.control_inputs and not node.device
    }


def _is_small(node: Node) -> bool:
    dtype, shape = node.outputs[0]
    is_number = dtype.is_floating or dtype.is_integer or dtype.is_bool
    return is_number and shape is not None and math.prod(size or 0 for size in shape) <= MAX_INLINE_ELEMENTS


def _literal(value: np.ndarray, dtype: tf.DType) -> str:
    return ("" if dtype in _PLAIN_NUMBERS else f"{dtype.name}:") + _number_text(value, dtype)


def _number_text(value: np.ndarray, dtype: tf.DType) -> str:
    if dtype.is_floating:
        text = np.vectorize(lambda number: float(f"{float(number):.6g}"), otypes=[object])(value).tolist()
    else:
        text = value.tolist()
    return str(text)


def _line(node: Node, literals: dict[Node, str], *, with_edges: bool = True, with_metadata: bool = True) -> str:
    results = [f"{dtype.name}{shape_text(shape)}" for dtype, shape in node.outputs]
    result = results[0] if len(results) == 1 else f"({', '.join(results)})"
    left = f"{node.name} = {result} " if results else f"{node.name} = "
    parts = [f"{left}{node.op}({', '.join(_operands(node.inputs, literals))})"]
    attrs = ", ".join(f"{key}={text}" for key, text in _attributes(node))
    parts += [f"{{{attrs}}}"] if attrs else []
    parts += [f"after [{_names(node.control_inputs)}]"] if node.control_inputs and with_edges else []
    parts += [f"on {node.device}"] if node.device else []
    metadata = str(node.metadata) if with_metadata else ""
    return " ".join(parts) + (f"{METADATA_MARK}{metadata}" if metadata else "")


def shape_text(shape: Shape) -> str:
    """Return a shape as text, with `?` for an unknown size and `[...]` for an unknown rank."""
    return "[...]" if shape is None else f"[{','.join('?' if size is None else str(size) for size in shape)}]"


def _operands(tensors: Iterable[Tensor], literals: dict[Node, str]) -> list[str]:
    return [literals.get(t.node) or (t.name if t.index else t.node.name) for t in tensors]


def _attributes(node: Node) -> Iterator[tuple[str, str]]:
    defaults = _defaults(node.op)
    types = tf_internals.type_attributes(node.op)
    for key in sorted(node.attrs):
        value = node.attrs[key]
        if key not in types and key not in _HIDDEN and defaults.get(key) != value and not function_names(value):
            yield key, _attribute(value, node)


@functools.cache
def _defaults(op_type: str) -> dict[str, Any]:
    return tf_internals.default_attributes(op_type)


def _attribute(value: Any, node: Node) -> str:
    """Return the value of an attribute as text."""
    kind = value.WhichOneof("value")
    if kind == "tensor":
        array, dtype = tf.make_ndarray(value.tensor), node.outputs[0][0]
        if _is_small(node):
            return _number_text(array, dtype)
        return f"#{_hash(repr(array.tolist()).encode() if dtype == tf.string else array.tobytes())}"
    if kind == "list":
        (items,) = [items for _, items in value.list.ListFields()] or [()]
        return f"[{', '.join(_item(item) for item in items)}]"
    return _item(getattr(value, kind)) if kind else "none"


def _item(item: Any) -> str:
    if isinstance(item, bytes):
        return f'"{item.decode(errors="replace")}"'
    if isinstance(item, float):
        return f"{item:.6g}"
    if hasattr(item, "unknown_rank"):
        return shape_text(None if item.unknown_rank else tuple(None if d.size < 0 else d.size for d in item.dim))
    return str(item)


def _bodies(graph: Graph, node: Node, inline: bool, seen: dict[str, str], literals: dict[Node, str]) -> Iterator[str]:
    """Yield the lines of the functions that an op runs: the body of a loop, branches, or a called function."""
    names = [name for value in node.attrs.values() for name in function_names(value)]
    if not names:
        return
    specs = [f"{tensor.dtype.name}{shape_text(tensor.shape)}" for tensor in node.inputs]
    first = seen.setdefault(", ".join([*names, *specs]), node.name)
    if first != node.name:
        yield f"as {first}"
        return
    if node.op in LOOPS:
        functions = [("body", function_of(graph, node, "body"))]
    elif node.op in BRANCHES:
        functions = [(f"branch_{number}", branch) for number, branch in enumerate(branches_of(graph, node) or [])]
    else:
        functions = [("call", called_function(graph, node) if node.op in _CALLS else None)]
    for title, function in functions:
        if function is None:
            yield f"{title}: not shown, its function cannot be imported"
        else:
            operands = _operands(node.inputs, literals) if node.op in LOOPS else ()
            yield from _lines(function, title, inline, True, seen, operands)
