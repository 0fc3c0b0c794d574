"""Ops whose memory the graph does not tell, so that no estimate includes it."""

from __future__ import annotations

import tensorflow as tf

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.ir.graph import PER_PIXEL, Node

__all__: list[str] = []


def unmodelled(analysis: GraphAnalysis) -> list[Node]:
    """Forward ops that hold memory of which the graph does not tell how much: the prediction leaves it out.

    Lists of tensors, loops, branches and calls that the step brought along, and masks.
    """
    found = []
    for node in analysis.order:
        if node not in analysis.data or node in analysis.backward or PER_PIXEL in node.attrs:
            continue
        lists = any(dtype == tf.variant for dtype, _ in node.outputs)
        inner = any(value.HasField("func") for value in node.attrs.values()) and not _checks_only(node)
        if lists or inner or node.op == "Where":
            found.append(node)
    return found


def _checks_only(node: Node) -> bool:
    """Whether an op with a body makes no tensor of a size worth counting: the guard of an assertion."""
    return all(dtype == tf.bool and shape == () for dtype, shape in node.outputs)
