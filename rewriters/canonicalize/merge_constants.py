"""Constant merging: one constant for all small ones with the same value.

Every layer and every variable's update brings axes, shapes, rates and small numbers of its own. They are a quarter of
the ops of a deep network, and all analyses visit them.
"""

from __future__ import annotations

from collections.abc import Hashable

from rewriters.analysis.autodiff_roles import is_seed
from rewriters.ir.graph import Graph, Tensor

__all__: list[str] = []

MAX_BYTES = 1024
"""Bytes of the largest constants that are compared."""


def merge_constants(graph: Graph) -> bool:
    """Let consumers of equal constants read the first of them, in place.

    Constants that gradients read alone, or that autodiff created, are not merged with others, because roles of ops are
    found by them. Constants that wait for other ops, that ops wait for, and results of the graph stay, too.

    Args:
        graph: The graph, which is edited.

    Returns:
        Whether any were merged.
    """
    consumers = graph.consumers()
    excluded = {tensor.node for tensor in graph.outputs}
    excluded.update(before for node in graph.nodes.values() for before in node.control_inputs)
    first: dict[Hashable, Tensor] = {}
    merged: dict[Tensor, Tensor] = {}
    for node in graph.nodes.values():
        if node.op != "Const" or node.control_inputs or node in excluded or node.out().num_bytes() > MAX_BYTES:
            continue
        only_gradients = all(is_seed(consumer) for consumer, _ in consumers.get(node.out(), ()))
        key = (node.attrs["value"].SerializeToString(), node.device, is_seed(node), only_gradients)
        source = first.setdefault(key, node.out())
        if source.node is not node:
            merged[node.out()] = source
    for tensor in merged:
        for consumer, position in consumers.get(tensor, ()):
            consumer.inputs[position] = merged[tensor]
        del graph.nodes[tensor.node.name]
    graph.aliases = {name: merged.get(tensor, tensor) for name, tensor in graph.aliases.items()}
    return bool(merged)
