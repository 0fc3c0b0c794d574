"""Ops whose memory no estimate includes, because the graph does not determine it."""

from __future__ import annotations

import tensorflow as tf

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.ir.graph import LOOPS, PER_PIXEL, Graph, Node

__all__: list[str] = []


def unmodelled(analysis: GraphAnalysis) -> list[Node]:
    """Return the forward ops whose memory the graph does not determine; predictions do not include it.

    They are branches and calls of the original step, `Where`, and the tensor lists and loops that
    `device/loop_lists.py` cannot read.
    """
    nodes = []
    for node in analysis.order:
        if node not in analysis.data or node in analysis.backward or PER_PIXEL in node.attrs:
            continue
        is_list = any(node.out(i).dtype == tf.variant and not _is_modelled(node, i) for i in range(len(node.outputs)))
        has_body = any(value.HasField("func") for value in node.attrs.values())
        has_body = has_body and (node.loop is None or node.loop.body is None or not _is_read(node.loop.body))
        if is_list or (has_body and not _is_assertion(node)) or node.op == "Where":
            nodes.append(node)
    return nodes


def _is_modelled(node: Node, index: int) -> bool:
    return node.loop is not None and index in node.loop.lists


def _is_read(body: Graph) -> bool:
    """Return whether a loop's body contains only ops whose memory it determines."""
    return not any(
        node.op == "Where"
        or (node.op in LOOPS and (node.loop is None or node.loop.body is None or not _is_read(node.loop.body)))
        or (node.op not in LOOPS and any(value.HasField("func") for value in node.attrs.values()))
        for node in body.nodes.values()
    )


def _is_assertion(node: Node) -> bool:
    """Return whether an op with a body is the guard of an assertion, whose results are scalars."""
    return all(dtype == tf.bool and shape == () for dtype, shape in node.outputs)
