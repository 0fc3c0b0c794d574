"""What depends on no data is not computed before it is needed.

The executor runs what is ready. An optimizer's `momentum * velocity` is ready when a step begins: without an edge that
holds it back, a copy of all weights waits through the forward and the backward phase for the gradients to come.
"""

from __future__ import annotations

from rewriters.analysis import Analysis
from rewriters.graph import Graph, Node

__all__: list[str] = []


def start_late(analysis: Analysis, min_bytes: int, batch: int) -> Graph:
    """A new graph in which large values of variables alone wait for what they are combined with.

    Args:
        analysis: Of a step.
        min_bytes: Results below are left alone.
        batch: Size of an unknown batch.
    """
    graph = analysis.graph.copy()
    for node in analysis.order:
        control = _control(analysis, node, min_bytes, batch)
        if control is not None:
            graph.nodes[node.name].control_inputs.append(graph.nodes[control.name])
    return graph


def _control(analysis: Analysis, node: Node, min_bytes: int, batch: int) -> Node | None:
    """The last of the operations whose results the node's is combined with first; `None` if it may start at once."""
    if node in analysis.data or node.stateful or not node.inputs:
        return None
    if sum(node.out(index).num_bytes(batch) for index in range(len(node.outputs))) < min_bytes:
        return None
    readers = {reader for index in range(len(node.outputs)) for reader, _ in analysis.readers.get(node.out(index), ())}
    waiting = {reader for reader in analysis.successors[node]} - readers
    if not readers or waiting or not readers <= analysis.data:
        return None
    # No operand of the first reader in γ comes after the node, so that no cycle comes about.
    first = min(readers, key=analysis.position.__getitem__)
    operands = [tensor.node for tensor in first.inputs if tensor.node in analysis.data]
    return max(operands, key=analysis.position.__getitem__, default=None)
