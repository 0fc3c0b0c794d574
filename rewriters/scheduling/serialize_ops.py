"""Runs large ops one after another, in an order that frees memory before it takes more.

TensorFlow's executor runs every op that is ready, on several threads. Both branches of a block then run concurrently
and their gradients exist concurrently, in an order that differs from run to run. An op uses all cores by itself, and a
GPU computes in one stream, so that serial execution costs no time. It lowers the peak and makes it predictable.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rewriters.analysis.autodiff_roles import reads_shape_only
from rewriters.device.kernel_scratch import ConcurrencyGroup, is_conv_or_pool_grad, takes_memory
from rewriters.device.merged_kernels import may_merge
from rewriters.device.op_buffers import allocates, forwards_input_buffer, may_run_in_place
from rewriters.ir.graph import Graph, Node, Tensor, ancestors, predecessors
from rewriters.scheduling.control_edges import ControlEdge, EdgePass

__all__: list[str] = []

MAX_VISITED_OPS = 100
"""Ops visited at most to estimate the memory that operands need."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SerializeLargeOps(EdgePass):
    """Brings ops that take or free much memory into one order, so that fewer of their results exist concurrently.

    The forward phase never waits for the backward phase. Shapes of activations that autodiff reads belong to the
    backward phase here.

    Attributes:
        backward: Names of the ops of the backward phase and the update.
        fixed: Names of ops that must get no more control edges.
        min_bytes: Bytes from which on an op is large.
        batch: Batch size, where the graph leaves it open.
    """

    backward: Container[str]
    fixed: Container[str]
    min_bytes: int
    batch: int

    def edges(self, graph: Graph) -> Iterator[ControlEdge]:
        """Yield edges between large ops."""
        chains: dict[tuple[str, bool], _OpChain] = collections.defaultdict(_OpChain)  # by device, and whether backward
        consumers, min_bytes = graph.consumers(), max(self.min_bytes, 1)
        done: set[Node] = set()
        unordered: set[Node] = set()
        for node, moved_bytes, read_bytes in _MemoryOrder(graph, self.batch).run():
            done.add(node)
            unordered |= _fusion_group(node, consumers, done)
            if _takes_no_memory(node) or node.name in self.fixed:
                continue
            device, phases = graph.device_of(node), (True,) if node.name in self.backward else (True, False)
            if moved_bytes >= min_bytes:
                chain = chains[device, phases[-1]]
                before = [*chain.consumers, *([chain.last] if chain.last is not None else [])]
                if node not in unordered:
                    yield from (ControlEdge(node, other) for other in before if other not in predecessors(node))
                for phase in phases:
                    chains[device, phase] = _OpChain(node, list(before) if node in unordered else [])
            elif read_bytes >= min_bytes:
                for phase in phases:
                    chains[device, phase].consumers.append(node)


def _takes_no_memory(node: Node) -> bool:
    return forwards_input_buffer(node) or not node.inputs or node.op == "ReadVariableOp" or reads_shape_only(node)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SerializeScratchGroups(EdgePass):
    """Runs ops whose kernels take much scratch memory one after another, in the executor's order on each device.

    Attributes:
        fixed: Names of ops that must get no more control edges.
    """

    fixed: Container[str] = ()

    def edges(self, graph: Graph) -> Iterator[ControlEdge]:
        """Yield edges between those ops."""
        member = functools.partial(takes_memory, device=graph.device)
        if not any(map(member, graph.nodes.values())):
            return
        groups: dict[str, ConcurrencyGroup[Node]] = {}
        for node in filter(member, graph.execution_order()):
            if node.name not in self.fixed:
                yield from _join(groups.setdefault(graph.device_of(node), ConcurrencyGroup(member)), node)


def layer_gradient_edges(nodes: Iterable[Node]) -> Iterator[ControlEdge]:
    """Yield edges by which the gradients of each layer wait for those of the layer differentiated before it.

    Otherwise gradients of inputs run ahead of gradients of filters, whose operands then occupy memory. `nodes` are ops
    that a device runs one after another, in a possible order.
    """
    group: ConcurrencyGroup[Node] = ConcurrencyGroup(is_conv_or_pool_grad)
    for node in nodes:
        yield from _join(group, node)


def _join(group: ConcurrencyGroup[Node], node: Node) -> Iterator[ControlEdge]:
    yield from [ControlEdge(node, other) for other in group.before(node) if other not in predecessors(node)]
    group.add(node, node)


def _fusion_group(
    node: Node, consumers: Mapping[Tensor, Sequence[tuple[Node, int]]], done: Container[Node]
) -> set[Node]:
    """Return ops that must not wait for any op that runs after a node: a consumer it may be fused with, and operands.

    An op fused of both would wait for itself.
    """
    group: set[Node] = set()
    while len(reads := consumers.get(node.out(), ()) if len(node.outputs) == 1 else ()) == 1:
        consumer = reads[0][0]
        if not may_merge(node, consumer):
            break
        if consumer not in done:
            group |= ancestors([consumer], lambda other: [b for b in predecessors(other) if b not in done])
        node = consumer
    return group


@dataclasses.dataclass
class _OpChain:
    """Ops that the next large op waits for.

    Attributes:
        last: Large op before it.
        consumers: Later ops that read large tensors and return small ones, such as a filter's gradient. They keep
            the tensors alive until they end.
    """

    last: Node | None = None
    consumers: list[Node] = dataclasses.field(default_factory=list)


class _Need(NamedTuple):
    """Memory to compute an op's results.

    Attributes:
        peak: Most bytes at a time.
        remaining: Bytes that stay allocated afterwards.
    """

    peak: int
    remaining: int


class _MemoryOrder:
    """Order of ops: depth first from the last ops; an op that frees memory runs as soon as it can."""

    def __init__(self, graph: Graph, batch: int) -> None:
        self._batch = batch
        self._rank = {node: number for number, node in enumerate(graph.execution_order())}
        self._waiting, self._after = graph.dependencies()
        self._num_bytes: dict[Tensor, int] = {}
        self._allocated: dict[Node, int] = {}
        self._read_buffers: dict[Node, list[Tensor]] = {}
        self._readers: dict[Tensor, set[Node]] = {}
        self._done: set[Node] = set()
        self._by_rank: dict[Node, Iterator[Node]] = {}
        self._find_buffers()

    def _find_buffers(self) -> None:
        """Find the buffers that each op allocates and reads, their sizes, and the ops that read each buffer.

        Buffers of arguments, variables and constants do not count as read.
        """
        root: dict[Tensor, Tensor] = {}
        for node in self._rank:
            buffers = dict.fromkeys(root.setdefault(tensor, tensor) for tensor in node.inputs)
            for buffer in buffers:
                self._readers.setdefault(buffer, set()).add(node)
            self._read_buffers[node] = [buffer for buffer in buffers if buffer.node.inputs]
            shared = bool(node.inputs) and forwards_input_buffer(node)
            self._allocated[node] = 0
            for index in range(len(node.outputs)):
                tensor = node.out(index)
                root[tensor] = root[node.inputs[0]] if shared else tensor
                self._num_bytes[tensor] = tensor.num_bytes(self._batch)
                self._allocated[node] += 0 if shared else self._num_bytes[tensor]

    def run(self) -> Iterator[tuple[Node, int, int]]:
        """Yield nodes in order, with the bytes that each takes or, if more, frees, and the bytes that it reads."""
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
        """Return the predecessor to run first: the operand with the largest peak beyond the bytes that remain of it.

        The order of R. Sethi and J. D. Ullman, "The Generation of Optimal Code for Arithmetic Expressions" (1970), with
        bytes for registers. It is optimal for trees. A few ops may be a tree, a whole phase is not: there, and among
        ops that a node only waits for, the op that is ready first runs first.
        """
        if len(predecessors(node)) > MAX_VISITED_OPS:  # Sorted once, not again after each of them.
            if node not in self._by_rank:
                self._by_rank[node] = iter(sorted(predecessors(node), key=self._rank.__getitem__))
            return next(other for other in self._by_rank[node] if other not in self._done)
        missing = [other for other in dict.fromkeys(predecessors(node)) if other not in self._done]
        operands = {tensor.node for tensor in node.inputs}
        if len(missing) > 1 and operands.issuperset(missing):
            known: dict[Node, _Need] = {}
            needs = {other: self._need(other, known) for other in missing}
            if len(known) <= MAX_VISITED_OPS:
                return min(missing, key=lambda other: (needs[other].remaining - needs[other].peak, self._rank[other]))
        return min(missing, key=self._rank.__getitem__)

    def _need(self, node: Node, known: dict[Node, _Need]) -> _Need:
        """Return the memory to compute a node's results, including operands that do not exist yet."""
        if node in known or len(known) > MAX_VISITED_OPS:
            return known.get(node, _Need(0, 0))
        known[node] = _Need(0, 0)  # counts as visited
        missing = [other for other in dict.fromkeys(predecessors(node)) if other not in self._done]
        peak = held = 0
        needs = [self._need(other, known) for other in missing]
        for need in sorted(needs, key=lambda need: need.remaining - need.peak):
            peak = max(peak, held + need.peak)
            held += need.remaining
        allocated, freed = self._allocated[node], self._freed(node)
        new_sizes = [self._num_bytes[buffer] for buffer in self._read_buffers[node] if buffer.node in missing]
        in_place = allocated in new_sizes and may_run_in_place(node)
        known[node] = _Need(max(peak, held + (0 if in_place else allocated)), held + allocated - freed - sum(new_sizes))
        return known[node]

    def _do(self, node: Node) -> Iterator[tuple[Node, int, int]]:
        """Yield a node, and all ops that can then run and free more than they take."""
        pending = [node]
        while pending:
            current = pending.pop()
            if current in self._done:
                continue
            moved = max(self._allocated[current], self._freed(current))
            buffers = self._read_buffers[current]
            self._done.add(current)
            for buffer in buffers:
                self._readers[buffer].discard(current)
            yield current, moved, sum(self._num_bytes[buffer] for buffer in buffers)
            for other in self._after[current]:
                self._waiting[other] -= 1
            ready = set(self._after[current])
            for buffer in buffers:
                if len(self._readers[buffer]) == 1:  # The last reader frees the buffer.
                    ready |= self._readers[buffer]
            for other in sorted(ready, key=self._rank.__getitem__, reverse=True):
                if other not in self._done and not self._waiting[other] and self._needs_no_memory(other):
                    pending.append(other)

    def _needs_no_memory(self, node: Node) -> bool:
        """Return whether an op frees more than it allocates, or writes its result over an operand, never a variable."""
        freed, allocated = self._freed(node), self._allocated[node]
        if freed != allocated or not may_run_in_place(node):
            return freed > allocated
        last = [buffer for buffer in self._read_buffers[node] if self._readers[buffer] == {node}]
        return any(self._num_bytes[buffer] == freed > 0 and allocates(buffer.node) for buffer in last)

    def _freed(self, node: Node) -> int:
        """Return the bytes that a node frees: of the buffers of which it is the last reader."""
        return sum(self._num_bytes[buffer] for buffer in self._read_buffers[node] if self._readers[buffer] == {node})
