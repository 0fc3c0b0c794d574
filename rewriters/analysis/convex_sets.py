"""Convex sets of nodes: those that can become one node without a cycle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rewriters.ir.graph import Node, predecessors

__all__: list[str] = []


def descendants(nodes: Iterable[Node], successors: Mapping[Node, Iterable[Node]]) -> set[Node]:
    """Return nodes and all that wait for them: an edge from any other node to one of them closes no cycle.

    Args:
        nodes: The nodes to start from.
        successors: Nodes that wait for each node.
    """
    seen: set[Node] = set(nodes)
    stack = list(seen)
    while stack:
        new = [node for node in successors[stack.pop()] if node not in seen]
        seen.update(new)
        stack.extend(new)
    return seen


def nodes_between(
    nodes: Iterable[Node], successors: Mapping[Node, Sequence[Node]], order: Mapping[Node, int]
) -> set[Node]:
    """Return the nodes outside of the set that lie on a path from the set back into it.

    A set without such nodes is convex: it can become one node without a cycle.
    """
    inside = set(nodes)
    if not inside:
        return set()
    low, high = min(order[n] for n in inside), max(order[n] for n in inside)
    after: set[Node] = set()
    stack = [s for n in inside for s in successors[n] if s not in inside]
    while stack:
        node = stack.pop()
        if node in after or order[node] >= high:
            continue
        after.add(node)
        stack.extend(s for s in successors[node] if s not in inside)
    before: set[Node] = set()
    stack = [p for n in inside for p in predecessors(n) if p in after]
    while stack:
        node = stack.pop()
        if node in before or order[node] <= low:
            continue
        before.add(node)
        stack.extend(p for p in predecessors(node) if p in after and p not in before)
    return before
