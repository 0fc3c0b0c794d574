"""Delays assignments to variables until all files have been read, so that a read that fails changes no variable."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

from rewriters.ir.graph import Graph, ancestors
from rewriters.ir.region_reads import region_reads
from rewriters.scheduling.control_edges import ControlEdge, EdgePass

__all__: list[str] = []


@dataclasses.dataclass(frozen=True)
class RunUpdatesAfterReads(EdgePass):
    """Lets each assignment wait for the tile loops that read files, and for whole images that are read.

    Attributes:
        loops: Names of the loops that read files.
    """

    loops: Collection[str]

    def edges(self, graph: Graph) -> Iterator[ControlEdge]:
        """Yield edges from reads to assignments, but not to those on which a read depends, such as of a random seed."""
        reads = [*(graph.nodes[name] for name in self.loops), *region_reads(graph)]
        before = ancestors(reads)
        for node in graph.nodes.values():
            if node.stateful and not node.outputs and node not in before:
                for read in reads:
                    yield ControlEdge(node, read)
