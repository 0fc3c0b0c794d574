"""Finds the op that triggers a swap-in: early enough to overlap the transfer, late enough to save memory (TFLMS).

Le et al., "TFLMS: Large Model Support in TensorFlow by Graph Rewriting" (2018), section 4.3. All operands of a swap-in
exist early: without a control edge the runtime reads a tensor back as soon as it has been written. Where the paper
takes one of several candidates at random, this module takes the first in the graph's order, so that rewriting is
deterministic.

One condition is added. Not all backward ops run late: autodiff reads the shape of an activation, which exists as soon
as the activation does, and a swap-in triggered by it would run at once. So a control op must not be ready earlier than
the op that reads the tensor (`delay_early_ops.earliest_forward_level`).
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Callable, Container, Iterable, Iterator, Mapping

from rewriters.ir.graph import Graph, Node, predecessors

__all__: list[str] = []


class TriggerSearch:
    """Both strategies of TFLMS over one graph.

    Args:
        graph: Graph before swapping.
        backward: Ops of the backward phase and the update.
        levels: Topological order γ, by default `graph.levels()`.
        ready: Level of the forward phase at which each op can run, by default the same for all.
        fixed: Ops that must not be control ops.
    """

    def __init__(
        self,
        graph: Graph,
        backward: Container[Node],
        *,
        levels: Mapping[Node, int] | None = None,
        ready: Mapping[Node, int] | None = None,
        fixed: Container[Node] = (),
    ) -> None:
        self.level = dict(levels if levels is not None else graph.levels())
        self.ready = dict.fromkeys(self.level, 0) if ready is None else ready
        self._backward = backward
        self._fixed = fixed
        self._order = {node: index for index, node in enumerate(self.level)}
        _, self._successors = graph.dependencies()
        self._readers: dict[Node, list[Node]] = {node: [] for node in self.level}
        for node in self.level:
            for before in dict.fromkeys(tensor.node for tensor in node.inputs):
                self._readers[before].append(node)

    def direct_order(
        self, source: Node, target: Node, lb: int, ub: int, is_early: Callable[[Node], bool] | None = None
    ) -> Node | None:
        """Algorithm 1: return an ancestor of the target that precedes it by `lb` to `ub - 2` in γ; `None` without one.

        Args:
            source: Producer of the tensor (f1).
            target: Consumer of the tensor (f2).
            lb: Lower bound of the distance to the target (σ_l).
            ub: Upper bound (σ_u); as printed in the paper, distances of `ub` and `ub - 1` are not tried.
            is_early: Whether a swap-in after an op is early enough; without such an op the farthest one is taken.
        """
        return _first_early(self._direct_candidates(source, target, lb, ub), is_early)

    def _direct_candidates(self, source: Node, target: Node, lb: int, ub: int) -> Iterator[Node]:
        """Yield an op of each level, the nearest to the target first."""
        lowest = max(self.level[target] - ub + 1, self.level[source])
        for level, ancestors in self._ancestors_by_level(target, lowest):
            if level <= self.level[target] - lb:
                candidates = [node for node in ancestors if self._may_trigger(node, target)]
                if candidates:
                    yield self._first(candidates)

    def _may_trigger(self, node: Node, target: Node) -> bool:
        """Return whether a node may be a control op: it can run no earlier than the target."""
        if node in self._fixed:
            return False
        return target not in self._backward or self.ready[node] >= self.ready[target]

    def _ancestors_by_level(self, target: Node, lowest: int) -> Iterator[tuple[int, list[Node]]]:
        """Yield the ancestors above a level, by level, highest level first."""
        seen = {target}
        heap: list[tuple[int, int, Node]] = []

        def push(node: Node) -> None:
            for before in predecessors(node):
                if before not in seen and self.level[before] > lowest:
                    seen.add(before)
                    heapq.heappush(heap, (-self.level[before], self._order[before], before))

        push(target)
        while heap:
            level, nodes = -heap[0][0], list[Node]()
            while heap and -heap[0][0] == level:
                nodes.append(heapq.heappop(heap)[2])
            yield level, nodes
            for node in nodes:
                push(node)

    def chain_rule(
        self, source: Node, target: Node, lb: int, ub: int, is_early: Callable[[Node], bool] | None = None
    ) -> Node | None:
        """Algorithm 2: return a backward consumer of a forward op `lb` to `ub` after the source; `None` without one.

        The gradient of an op reads operands and results of the op, so that it runs shortly before the target does.

        Args:
            source: Producer of the tensor (f1).
            target: Consumer of the tensor (f2).
            lb: Lower bound of the distance from the source, in forward ops (σ_l).
            ub: Upper bound (σ_u).
            is_early: As for `direct_order`.
        """
        return _first_early(self._chain_candidates(source, target, lb, ub), is_early)

    def _chain_candidates(self, source: Node, target: Node, lb: int, ub: int) -> Iterator[Node]:
        """Yield backward consumers, those of the forward ops nearest to the source first."""
        current, following = collections.deque([source]), dict[Node, None]()
        closed: set[Node] = set()
        while current:
            if ub == 0 or lb > ub:
                return
            node = current.popleft()
            readers = self._readers[node]
            if lb <= 0:
                candidates = [r for r in readers if r in self._backward and self._between(source, r, target)]
                if candidates:
                    yield self._first(candidates)
            following.update(dict.fromkeys(r for r in readers if r not in self._backward and r not in closed))
            closed.add(node)
            if not current:
                lb, ub = lb - 1, ub - 1
                current, following = collections.deque(following), {}

    def _between(self, source: Node, node: Node, target: Node) -> bool:
        """Return whether a node lies above the source in γ and is an ancestor of the target."""
        low, high = self.level[source], self.level[target]
        return low < self.level[node] < high and self._may_trigger(node, target) and self._reaches(node, target)

    def _reaches(self, node: Node, target: Node) -> bool:
        """Return whether a path leads to the target; only nodes below the target in γ can lie on it."""
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


def _first_early(candidates: Iterable[Node], is_early: Callable[[Node], bool] | None) -> Node | None:
    """Return the first op that is early enough, otherwise the last op; `None` without ops."""
    node = None
    for node in candidates:
        if is_early is None or is_early(node):
            break
    return node
