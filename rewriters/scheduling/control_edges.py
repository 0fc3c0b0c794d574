"""Adds control edges to a graph, the edit that passes of this package have in common."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rewriters.ir.graph import Graph, Node
from rewriters.ir.graph_pass import GraphPass, PassResult, record_state

__all__: list[str] = []


class ControlEdge(NamedTuple):
    """A control edge to add.

    Attributes:
        node: Op that waits.
        before: Op that must have run before it.
    """

    node: Node
    before: Node


class EdgePass(GraphPass[PassResult]):
    """A pass that adds control edges, and may edit the ops that wait for others."""

    @abc.abstractmethod
    def edges(self, graph: Graph) -> Iterable[ControlEdge]:
        """Return the edges to add; their ops may belong to another copy of the graph, and are found by name."""

    def edit(self, graph: Graph, node: Node) -> None:
        """Edit an op with a new edge; the default changes nothing."""
        del graph, node

    def call(self, graph: Graph) -> PassResult:
        """Return a copy of a graph with the edges, or the graph itself if there are none to add."""
        return _with_edges(graph, [self])


class EdgePasses(GraphPass[PassResult]):
    """Runs several passes on one copy of a graph: a copy and its checks take longer than most of these passes."""

    def __init__(self, passes: Sequence[EdgePass]) -> None:
        """Prepare the pass.

        Args:
            passes: Each sees the edges of those before it. One that reads an analysis of the graph comes first.
        """
        self.passes = passes
        self.new_stateful_ops = frozenset[str]().union(*(edge_pass.new_stateful_ops for edge_pass in passes))

    def requires(self, graph: Graph) -> None:
        """Check what the passes need of the graph."""
        for edge_pass in self.passes:
            edge_pass.requires(graph)

    def call(self, graph: Graph) -> PassResult:
        """Return a copy of a graph with the edges of all passes, or the graph itself if there are none to add."""
        return _with_edges(graph, self.passes)


def _with_edges(graph: Graph, passes: Sequence[EdgePass]) -> PassResult:
    new = graph.copy()
    changed = add_edges(new, passes)
    return PassResult(new if changed else graph, changed)


def add_edges(graph: Graph, passes: Iterable[EdgePass]) -> bool:
    """Edit a graph: add the edges of passes, one pass after another; return whether there are any."""
    changed = False
    for edge_pass in passes:
        edges = list(edge_pass.edges(graph))
        for node, before in edges:
            waiting = graph.nodes[node.name]
            waiting.control_inputs.append(graph.nodes[before.name])
            edge_pass.edit(graph, waiting)
        if edges:
            changed = True
            record_state(graph, edge_pass.name, type(edge_pass).__doc__ or "")
    return changed
