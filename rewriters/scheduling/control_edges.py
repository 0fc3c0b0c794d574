"""Adds control edges to a copy of a graph: the one edit that passes of this package make."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from rewriters.ir.graph import Graph, Node
from rewriters.ir.graph_pass import PassResult

__all__: list[str] = []


class ControlEdge(NamedTuple):
    """A control edge to add.

    Attributes:
        node: Op that waits.
        before: Op that must have run before it.
    """

    node: Node
    before: Node


def add_control_edges(graph: Graph, edges: Iterable[ControlEdge]) -> PassResult:
    """Return a copy of a graph with more control edges, or the graph itself if there are none to add.

    Args:
        graph: The graph; it is not edited.
        edges: Edges between nodes of `graph`.
    """
    edges = list(edges)
    if not edges:
        return PassResult(graph, changed=False)
    new = graph.copy()
    for node, before in edges:
        new.nodes[node.name].control_inputs.append(new.nodes[before.name])
    return PassResult(new, changed=True)
