"""When a swapped tensor comes back: TFLMS's search for control operations.

Le et al., "TFLMS: Large Model Support in TensorFlow by Graph Rewriting" (2018), section 4.3. A swap-in has no operand
that is not there early; without a control edge the runtime reads a tensor back as soon as it was written. Where the
paper takes one candidate at random, here it is the one that comes first in the graph's order, so that the same graph
is always rewritten the same way.

One thing is added. Not all of the backward phase runs late: the shape of an activation, which autodiff asks for, is
known as soon as the activation is, and what it triggered would be back at once. So a control operation must not be
ready before the operation that reads the tensor is (`late.readiness`).
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Container, Iterable, Iterator, Mapping

from rewriters.ir.graph import Graph, Node, predecessors

__all__: list[str] = []


class TriggerSearch:
    """Both strategies over one graph.

    Args:
        graph: As it is before swapping.
        backward: Operations of the backward phase and the update.
        levels: The topological order γ; that of `graph.levels()` if it is not given.
        ready: How far the forward phase has to have come before an operation can run; the same for all if it is not
            given.
        untouched: Operations that must not be control operations.
    """

    def __init__(
        self,
        graph: Graph,
        backward: Container[Node],
        levels: Mapping[Node, int] | None = None,
        ready: Mapping[Node, int] | None = None,
        untouched: Container[Node] = (),
    ) -> None:
        self.level = dict(levels if levels is not None else graph.levels())
        self.ready = dict.fromkeys(self.level, 0) if ready is None else ready
        self._backward = backward
        self._untouched = untouched
        self._order = {node: index for index, node in enumerate(self.level)}
        self._successors: dict[Node, list[Node]] = {node: [] for node in self.level}
        for node in self.level:
            for before in dict.fromkeys(predecessors(node)):
                self._successors[before].append(node)
        self._readers: dict[Node, list[Node]] = {node: [] for node in self.level}
        for node in self.level:
            for before in dict.fromkeys(tensor.node for tensor in node.inputs):
                self._readers[before].append(node)

    def direct_order(self, source: Node, target: Node, lb: int, ub: int) -> Node | None:
        """Algorithm 1: an operation that comes `lb` to `ub` before the target in γ and from which it is reached.

        Args:
            source: What makes the tensor (f1).
            target: What reads it (f2).
            lb: Lower bound of the distance to the target (σ_l).
            ub: Upper bound (σ_u).
        """
        lowest = max(self.level[target] - ub + 1, self.level[source])
        for level, ancestors in self._ancestors_by_level(target, lowest):
            if level <= self.level[target] - lb:
                found = [node for node in ancestors if self._may_trigger(node, target)]
                if found:
                    return self._first(found)
        return None

    def _may_trigger(self, node: Node, target: Node) -> bool:
        """Whether a node may be a control operation: it runs as late as the target, not as soon as some activation."""
        if node in self._untouched:
            return False
        return target not in self._backward or self.ready[node] >= self.ready[target]

    def _ancestors_by_level(self, target: Node, lowest: int) -> Iterator[tuple[int, list[Node]]]:
        """Ancestors above a level, those that come latest first."""
        seen = {target}
        heap: list[tuple[int, int, Node]] = []

        def push(node: Node) -> None:
            for before in predecessors(node):
                if before not in seen and self.level[before] > lowest:
                    seen.add(before)
                    heapq.heappush(heap, (-self.level[before], self._order[before], before))

        push(target)
        while heap:
            level, found = -heap[0][0], list[Node]()
            while heap and -heap[0][0] == level:
                found.append(heapq.heappop(heap)[2])
            yield level, found
            for node in found:
                push(node)

    def chain_rule(self, source: Node, target: Node, lb: int, ub: int) -> Node | None:
        """Algorithm 2: a backward reader of a forward operation that comes `lb` to `ub` after the source.

        The gradient of an operation reads what the operation reads or makes, so the backward phase passes by there
        shortly before it arrives at the target.

        Args:
            source: What makes the tensor (f1).
            target: What reads it (f2).
            lb: Lower bound of the distance from the source, in forward operations (σ_l).
            ub: Upper bound (σ_u).
        """
        current, following = collections.deque([source]), dict[Node, None]()
        closed: set[Node] = set()
        while current:
            if ub == 0 or lb > ub:
                return None
            node = current.popleft()
            readers = self._readers[node]
            if lb <= 0:
                found = [r for r in readers if r in self._backward and self._between(source, r, target)]
                if found:
                    return self._first(found)
            following.update(dict.fromkeys(r for r in readers if r not in self._backward and r not in closed))
            closed.add(node)
            if not current:
                lb, ub = lb - 1, ub - 1
                current, following = collections.deque(following), {}
        return None

    def _between(self, source: Node, node: Node, target: Node) -> bool:
        """Whether a node comes after the source, and the target after it and because of it."""
        low, high = self.level[source], self.level[target]
        return low < self.level[node] < high and self._may_trigger(node, target) and self._reaches(node, target)

    def _reaches(self, node: Node, target: Node) -> bool:
        """Whether there is a path; only nodes below the target in γ can lie on it."""
        stack, seen, limit = [node], {node}, self.level[target]
        while stack:
            for after in self._successors[stack.pop()]:
                if after is target:
                    return True
                if after not in seen and self.level[after] < limit:
                    seen.add(after)
                    stack.append(after)
        return False

    def _first(self, nodes: Iterable[Node]) -> Node:
        return min(nodes, key=self._order.__getitem__)
