"""Large operations one after another, in an order that frees memory before it takes more.

TensorFlow's executor runs what is ready, on several threads: both branches of a block at once, whose gradients are
then all there at once, and differently from run to run. Operations use all cores by themselves, and a GPU computes in
one stream, so that nothing is lost if the large ones wait for each other; the peak is lower, and can be predicted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rewriters.analysis.autodiff_roles import reads_shape_only
from rewriters.device.kernel_scratch import ConcurrencyGroup, is_conv_or_pool_grad, takes_memory
from rewriters.device.properties import forwards_input_buffer, may_fuse_with_consumer, may_run_in_place
from rewriters.ir.graph import Graph, Node, Tensor, predecessors

__all__: list[str] = []

MOST_LOOKED_AT = 100
"""Operations that are looked at to find out what operands need."""


def serialize_large_ops(
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
    lines = {True: _OpChain(), False: _OpChain()}  # of the backward phase, of the forward phase alone
    readers = graph.consumers()
    done: set[Node] = set()
    at_once: set[Node] = set()
    for node, moved, read in _Order(graph, batch).run():
        done.add(node)
        at_once |= _fusion_group(node, readers, done)
        free = forwards_input_buffer(node) or not node.inputs or node.op == "ReadVariableOp" or reads_shape_only(node)
        if free or node.name in untouched:
            continue
        phases = (True,) if node.name in backward else (True, False)
        if moved >= max(min_bytes, 1):
            line = lines[phases[-1]]
            before = [*line.readers, *([line.last] if line.last is not None else [])]
            if node not in at_once:
                node.control_inputs.extend(other for other in before if other not in predecessors(node))
            for phase in phases:
                lines[phase] = _OpChain(node, list(before) if node in at_once else [])
        elif read >= max(min_bytes, 1):
            for phase in phases:
                lines[phase].readers.append(node)


def serialize_scratch_groups(graph: Graph) -> None:
    """Add control edges between operations whose kernels take much memory while they run, in the executor's order.

    Args:
        graph: A rewritten step; it is edited.
    """
    if not any(map(takes_memory, graph.nodes.values())):
        return
    groups: dict[str, ConcurrencyGroup[Node]] = {}
    for node in filter(takes_memory, graph.execution_order()):
        _join(groups.setdefault(node.device, ConcurrencyGroup()), node)


def serialize_layer_gradients(nodes: Iterable[Node]) -> None:
    """Have the gradients of each layer wait for those of the layer that is gone back through before it.

    Gradients of inputs would run ahead of those of filters, and what these read wait for them.

    Args:
        nodes: What a device does one after another, in an order in which it can.
    """
    group: ConcurrencyGroup[Node] = ConcurrencyGroup(is_conv_or_pool_grad)
    for node in nodes:
        _join(group, node)


def _join(group: ConcurrencyGroup[Node], node: Node) -> None:
    node.control_inputs.extend(other for other in group.before(node) if other not in predecessors(node))
    group.add(node, node)


def _fusion_group(node: Node, readers: Mapping[Tensor, Sequence[tuple[Node, int]]], done: Container[Node]) -> set[Node]:
    """What must not wait for what runs after a node: a reader that it may be made one with, and its other operands.

    The two would be one operation then, which waits for itself.
    """
    found: set[Node] = set()
    while len(reading := readers.get(node.out(), ()) if len(node.outputs) == 1 else ()) == 1:
        reader = reading[0][0]
        if not may_fuse_with_consumer(node, reader):
            break
        stack = [reader]
        while stack:
            current = stack.pop()
            if current not in found and current not in done:
                found.add(current)
                stack.extend(predecessors(current))
        node = reader
    return found


@dataclasses.dataclass
class _OpChain:
    """What the next large operation waits for.

    Attributes:
        last: The one before it.
        readers: What has read large tensors since, for something small, such as a filter's gradient: what they read
            is not free before they have ended.
    """

    last: Node | None = None
    readers: list[Node] = dataclasses.field(default_factory=list)


class _Need(NamedTuple):
    """Bytes that it takes to make something at the worst moment, and those that stay of it."""

    peak: int
    kept: int


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
        self._by_rank: dict[Node, Iterator[Node]] = {}
        self._find_buffers()

    def _find_buffers(self) -> None:
        """Which tensor's memory each tensor is, and who reads that memory."""
        for node in self._rank:
            for tensor in node.inputs:
                self._readers.setdefault(self._root.setdefault(tensor, tensor), set()).add(node)
            for index in range(len(node.outputs)):
                shared = forwards_input_buffer(node) and node.inputs
                self._root[node.out(index)] = self._root[node.inputs[0]] if shared else node.out(index)

    def run(self) -> Iterator[tuple[Node, int, int]]:
        """Nodes in order, with the bytes that each takes or, if that is more, frees; and those that it reads."""
        for goal in sorted((node for node in self._rank if not self._after[node]), key=self._rank.__getitem__):
            stack = [goal]
            while stack:
                node = stack[-1]
                if node in self._done:
                    stack.pop()
                elif self._waiting[node]:
                    stack.append(self._first(node))
                else:
                    stack.pop()
                    yield from self._do(node)

    def _first(self, node: Node) -> Node:
        """Which operation before a node to do first: of its operands the one that needs most beyond what stays of it.

        The order of R. Sethi and J. D. Ullman, "The Generation of Optimal Code for Arithmetic Expressions" (1970), with
        bytes for registers. It is best for trees, which a few operations may be, but not a whole phase: there, and
        among operations that a node only waits for, the one that is ready first is done first.
        """
        if len(predecessors(node)) > MOST_LOOKED_AT:  # Looked at once, not again after each of them.
            if node not in self._by_rank:
                self._by_rank[node] = iter(sorted(predecessors(node), key=self._rank.__getitem__))
            return next(other for other in self._by_rank[node] if other not in self._done)
        missing = [other for other in dict.fromkeys(predecessors(node)) if other not in self._done]
        operands = {tensor.node for tensor in node.inputs}
        if len(missing) > 1 and operands.issuperset(missing):
            known: dict[Node, _Need] = {}
            needs = {other: self._need(other, known) for other in missing}
            if len(known) <= MOST_LOOKED_AT:
                return min(missing, key=lambda other: (needs[other].kept - needs[other].peak, self._rank[other]))
        return min(missing, key=self._rank.__getitem__)

    def _need(self, node: Node, known: dict[Node, _Need]) -> _Need:
        """What it takes to make a node's results, operands that are not there yet included."""
        if node in known or len(known) > MOST_LOOKED_AT:
            return known.get(node, _Need(0, 0))
        known[node] = _Need(0, 0)  # counts as looked at
        missing = [other for other in dict.fromkeys(predecessors(node)) if other not in self._done]
        peak = held = 0
        for need in sorted((self._need(other, known) for other in missing), key=lambda need: need.kept - need.peak):
            peak = max(peak, held + need.peak)
            held += need.kept
        taken, freed = self._moves(node)
        made = [buffer for buffer in self._made(node) if buffer.node in missing]
        in_place = may_run_in_place(node) and any(buffer.num_bytes(self._batch) == taken for buffer in made)
        known[node] = _Need(
            max(peak, held + (0 if in_place else taken)),
            held + taken - freed - sum(buffer.num_bytes(self._batch) for buffer in made),
        )
        return known[node]

    def _do(self, node: Node) -> Iterator[tuple[Node, int, int]]:
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
            yield current, max(taken, freed), sum(b.num_bytes(self._batch) for b in self._made(current))
            for other in self._after[current]:
                self._waiting[other] -= 1
            ready = set(self._after[current])
            for buffer in self._made(current):
                if len(self._readers[buffer]) == 1:  # It would free the buffer; of several none would.
                    ready |= self._readers[buffer]
            for other in sorted(ready, key=self._rank.__getitem__, reverse=True):
                if other not in self._done and not self._waiting[other]:
                    takes, frees = self._moves(other)
                    if frees > takes:
                        pending.append(other)

    def _moves(self, node: Node) -> tuple[int, int]:
        """Bytes that a node takes, and that nobody needs after it."""
        results = (node.out(index) for index in range(len(node.outputs)))
        taken = sum(t.num_bytes(self._batch) for t in results if self._root[t] == t)
        last = [buffer for buffer in self._made(node) if self._readers[buffer] == {node}]
        return taken, sum(buffer.num_bytes(self._batch) for buffer in last)

    def _made(self, node: Node) -> list[Tensor]:
        """The memory that a node reads, except that of arguments, variables and constants."""
        return [buffer for buffer in dict.fromkeys(self._root[t] for t in node.inputs) if buffer.node.inputs]
