"""Constant merging: one constant for all small ones with the same value.

Layers and optimizers each create their own constants for axes, shapes and rates. In a network of 244 convolutions,
5,887 of 23,092 ops are constants, with 139 values. All analyses visit all ops.
"""

from __future__ import annotations

from collections.abc import Hashable

from rewriters.analysis.autodiff_roles import gradient_seed_constants, is_seed, is_zero_gradient
from rewriters.ir.graph import Graph, Tensor
from rewriters.ir.graph_pass import GraphPass, PassResult

__all__: list[str] = []

MAX_BYTES = 1024
"""Bytes of the largest constants that are compared."""


class MergeConstants(GraphPass[PassResult]):
    """Lets consumers of equal constants read the first of them.

    These constants stay as they are:

    - constants that only gradients read, or that autodiff created, beside others: autodiff roles are derived from them;
    - gradients of ones and zeros: which of several backward passes belong to a loss is derived from them;
    - constants that wait for ops, or that ops wait for;
    - results of the graph.
    """

    def call(self, graph: Graph) -> PassResult:
        """Merge constants in a copy of the graph."""
        new = graph.copy()
        merged = _equal_constants(new)
        for node in new.nodes.values():
            if any(tensor in merged for tensor in node.inputs):
                node.inputs = [merged.get(tensor, tensor) for tensor in node.inputs]
        for tensor in merged:
            del new.nodes[tensor.node.name]
        new.aliases = {name: merged.get(tensor, tensor) for name, tensor in new.aliases.items()}
        return PassResult(new if merged else graph, bool(merged))


def _equal_constants(graph: Graph) -> dict[Tensor, Tensor]:
    """Return for each constant that another one can replace that other one."""
    consumers = graph.consumers()
    excluded = {tensor.node for tensor in (*graph.outputs, *gradient_seed_constants(graph))}
    excluded.update(node for node in graph.nodes.values() if is_zero_gradient(node))
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
    return merged
