"""Large operations one after another, in an order that frees memory before it takes more.

TensorFlow's executor runs what is ready, on several threads: both branches of a block at once, whose gradients are
then all there at once, and differently from run to run. Operations use all cores by themselves, and a GPU computes in
one stream, so that nothing is lost if the large ones wait for each other; the peak is lower, and can be predicted.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from rewriters.device import passes_on
from rewriters.graph import Graph, Node, Tensor, predecessors

__all__: list[str] = []


def serialise(
    graph: Graph, backward: Container[str], untouched: Container[str], min_bytes: int, batch: int
) -> None:
    """Add control edges that bring operations which take or free much memory into one order.

    The forward phase never waits for the backward phase, of which the shapes of activations are a part.

    Args:
        graph: A step; it is edited.
        backward: Names of the operations of the backward phase and the update.
        untouched: Names of operations that must have no more control edges.
        min_bytes: What is much.
        batch: Size of an unknown batch.
    """
    last: Node | None = None
    last_forward: Node | None = None
    for node, moved in _Order(graph, batch).run():
        free = passes_on(node) or not node.inputs or node.op == "ReadVariableOp"
        if moved < max(min_bytes, 1) or free or node.name in untouched:
            continue
        before = last if node.name in backward else last_forward
        if before is not None and before not in predecessors(node):
            node.control_inputs.append(before)
        last = node
        last_forward = last_forward if node.name in backward else node


class _Order:
    """Depth first from what has to be done in the end, except that what frees memory runs as soon as it can."""

    def __init__(self, graph: Graph, batch: int) -> None:
        self._graph = graph
        self._batch = batch
        self._rank = {node: number for number, node in enumerate(graph.execution_order())}
        self._after: dict[Node, list[Node]] = {node: [] for node in self._rank}
        self._waiting: dict[Node, int] = {}
        for node in self._rank:
            before = dict.fromkeys(predecessors(node))
            self._waiting[node] = len(before)
            for other in before:
                self._after[other].append(node)
        self._root: dict[Tensor, Tensor] = {}
        self._readers: dict[Tensor, set[Node]] = {}
        self._done: set[Node] = set()
        self._find_buffers()

    def _find_buffers(self) -> None:
        """Which tensor's memory each tensor is, and who reads that memory."""
        for node in self._rank:
            for tensor in node.inputs:
                self._readers.setdefault(self._root.setdefault(tensor, tensor), set()).add(node)
            for index in range(len(node.outputs)):
                shared = passes_on(node) and node.inputs
                self._root[node.out(index)] = self._root[node.inputs[0]] if shared else node.out(index)

    def run(self) -> Iterator[tuple[Node, int]]:
        """Nodes in order, with the bytes that each takes or, if that is more, frees."""
        for goal in sorted((node for node in self._rank if not self._after[node]), key=self._rank.__getitem__):
            stack = [goal]
            while stack:
                node = stack[-1]
                if node in self._done:
                    stack.pop()
                elif self._waiting[node]:
                    missing = [other for other in dict.fromkeys(predecessors(node)) if other not in self._done]
                    stack.append(min(missing, key=self._rank.__getitem__))
                else:
                    stack.pop()
                    yield from self._do(node)

    def _do(self, node: Node) -> Iterator[tuple[Node, int]]:
        """A node, and all that then can run and frees more than it takes."""
        pending = [node]
        while pending:
            current = pending.pop()
            if current in self._done:
                continue
            taken, freed = self._moves(current)
            self._done.add(current)
            for tensor in current.inputs:
                self._readers[self._root[tensor]].discard(current)
            yield current, max(taken, freed)
            for other in self._after[current]:
                self._waiting[other] -= 1
            ready = {o for t in current.inputs for o in self._readers[self._root[t]]} | set(self._after[current])
            for other in sorted(ready, key=self._rank.__getitem__, reverse=True):
                if other not in self._done and not self._waiting[other]:
                    takes, frees = self._moves(other)
                    if frees > takes:
                        pending.append(other)

    def _moves(self, node: Node) -> tuple[int, int]:
        """Bytes that a node takes, and that nobody needs after it."""
        results = (node.out(index) for index in range(len(node.outputs)))
        taken = sum(t.num_bytes(self._batch) for t in results if self._root[t] == t)
        buffers = {self._root[tensor] for tensor in node.inputs}
        last = [buffer for buffer in buffers if self._readers[buffer] == {node} and buffer.node.inputs]
        return taken, sum(buffer.num_bytes(self._batch) for buffer in last)
