"""Ops whose memory no estimate includes, because the graph does not determine it."""

from __future__ import annotations

import tensorflow as tf

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.ir.graph import PER_PIXEL, Node

__all__: list[str] = []


def unmodelled(analysis: GraphAnalysis) -> list[Node]:
    """Return the forward ops whose memory the graph does not determine; predictions do not include it.

    They are calls of the original step, `Where`, and the tensor lists, loops and conditionals that
    `device/loop_lists.py` cannot read.
    """
    nodes = []
    for node in analysis.order:
        if node not in analysis.data or node in analysis.backward or PER_PIXEL in node.attrs:
            continue
        is_list = any(node.out(i).dtype == tf.variant and not _is_modelled(node, i) for i in range(len(node.outputs)))
        if is_list or not _is_read_op(node):
            nodes.append(node)
    return nodes


def _is_modelled(node: Node, index: int) -> bool:
    return node.loop is not None and index in node.loop.lists


def _is_read_op(node: Node) -> bool:
    """Return whether the memory of an op is in its shapes, or in its facts and those of the ops of its body."""
    body = None if node.loop is None else node.loop.body
    if body is not None:
        return all(_is_read_op(inner) for inner in body.nodes.values())
    has_function = any(value.HasField("func") or value.list.func for value in node.attrs.values())
    return node.op != "Where" and (not has_function or _is_assertion(node))


def _is_assertion(node: Node) -> bool:
    """Return whether an op with a body is the guard of an assertion, whose results are scalars."""
    return all(dtype == tf.bool and shape == () for dtype, shape in node.outputs)
