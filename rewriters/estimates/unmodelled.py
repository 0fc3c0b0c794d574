"""Ops whose memory no estimate includes, because the graph does not determine it."""

from __future__ import annotations

import tensorflow as tf

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.ir.graph import PER_PIXEL, Node

__all__: list[str] = []


def unmodelled(analysis: GraphAnalysis) -> list[Node]:
    """Return the forward ops whose memory the graph does not determine; predictions do not include it.

    They are tensor lists, loops, branches and calls of the original step, and `Where`.
    """
    nodes = []
    for node in analysis.order:
        if node not in analysis.data or node in analysis.backward or PER_PIXEL in node.attrs:
            continue
        is_list = any(dtype == tf.variant for dtype, _ in node.outputs)
        has_body = any(value.HasField("func") for value in node.attrs.values())
        if is_list or (has_body and not _is_assertion(node)) or node.op == "Where":
            nodes.append(node)
    return nodes


def _is_assertion(node: Node) -> bool:
    """Return whether an op with a body is the guard of an assertion, whose results are scalars."""
    return all(dtype == tf.bool and shape == () for dtype, shape in node.outputs)
