"""Keeps oneDNN from merging the gradients of a filter and of a bias into one op.

The merged op waits for all that either of them waits for. Swaps lead from one to the other: a swap-in may wait for
an op that follows the gradient of the bias, and the gradient of the filter reads it. The merge would close a cycle
(`merged_kernels.py`). TensorFlow merges only ops with equal control edges, so one edge between them is enough.
"""

from __future__ import annotations

from collections.abc import Iterator

from rewriters.device.merged_kernels import bias_gradients
from rewriters.ir.graph import Graph, Node, ancestors
from rewriters.scheduling.control_edges import ControlEdge, EdgePass

__all__: list[str] = []


class SeparateGradients(EdgePass):
    """Lets each gradient of a bias wait for the gradients of filters that oneDNN could merge it with."""

    def edges(self, graph: Graph) -> Iterator[ControlEdge]:
        """Yield an edge for each pair, unless the gradient of the filter waits for that of the bias."""
        pairs = bias_gradients(graph, graph.consumers())
        level = graph.levels() if pairs else {}
        before: dict[Node, set[Node]] = {}
        for bias, of_filter in pairs:
            if level[bias] < level[of_filter]:  # Only then a path may lead from one to the other.
                before.setdefault(of_filter, ancestors([of_filter]))
            if bias not in before.get(of_filter, ()):
                yield ControlEdge(bias, of_filter)
