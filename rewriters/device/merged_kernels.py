"""Ops that TensorFlow merges into one kernel after a graph has been rewritten.

A merged op waits for everything that one of its parts waits for. A path that leaves one part and comes back to another
one, through a swap-in for example, then closes a cycle, and the step fails before it starts. These merges do not look
for such a path:

- oneDNN's layout pass merges a convolution with its padding and its bias (`may_fuse_with_consumer`), and the gradients
  of a filter and of a bias that read the same gradient (tensorflow/core/common_runtime/mkl_layout_pass.cc);
- constant folding moves a constant factor into the product that alone reads the scaled tensor (`may_move_constant`).

Grappler's remapper fuses no contraction that has control edges (tensorflow/core/grappler/optimizers/remapper.cc). Its
fusions of convolutions count here all the same, those of matrix products do not.
"""

from __future__ import annotations

import graphlib
from collections.abc import Iterable, Mapping, Sequence

from rewriters.device import properties
from rewriters.ir.graph import Graph, Node, Tensor
from rewriters.ir.op_traits import Trait, ops_with

__all__: list[str] = []

_MERGE_ROOTS = ops_with(Trait.FUSION_ROOT) - ops_with(Trait.MATRIX_PRODUCT)
_MERGE_ROOTS |= ops_with(Trait.FUSED_PADDING) | ops_with(Trait.SCALES)
"""First ops of merges."""

_GRADIENT_OPERAND = 2
"""Operand of the gradient of a filter that is the gradient of the convolution's result."""

Consumers = Mapping[Tensor, Sequence[tuple[Node, int]]]


def may_merge(node: Node, reader: Node | None = None) -> bool:
    """Return whether TensorFlow may merge an op into its only consumer; into any consumer if none is given."""
    return properties.may_fuse_with_consumer(node, reader) or properties.may_move_constant(node, reader)


def bias_gradients(nodes: Iterable[Node], consumers: Consumers) -> list[tuple[Node, Node]]:
    """Return each gradient of a bias with each gradient of a filter that oneDNN may merge it with.

    Two layers whose results are added have one gradient, and two pairs each. oneDNN does not merge ops of which one
    waits for the other, and such pairs are left out (`rewriters/scheduling/separate_gradients.py`).
    """
    if not properties.merges_bias_gradients():
        return []
    return [
        (reader, node)
        for node in nodes
        if node.op == "Conv2DBackpropFilter"
        for reader, _ in consumers[node.inputs[_GRADIENT_OPERAND]]
        if reader.op == "BiasAddGrad" and node not in reader.control_inputs
    ]


def merged_ops(nodes: Iterable[Node], consumers: Consumers) -> dict[Node, Node]:
    """Return for each op that may be merged the op that absorbs it, which another one may absorb in turn.

    Args:
        nodes: The nodes of a graph.
        consumers: (node, operand position) pairs that read each tensor.
    """
    nodes = list(nodes)
    merged = dict(bias_gradients(nodes, consumers))
    for node in nodes:
        if node.op not in _MERGE_ROOTS:
            continue
        while node not in merged and len(node.outputs) == 1:
            reads = consumers.get(node.out(), ())
            if len(reads) != 1 or not may_merge(node, reads[0][0]):
                break
            merged[node] = reads[0][0]
            node = reads[0][0]
    return merged


def cycle_of_merged(graph: Graph) -> list[str]:
    """Return the names of up to eight ops of a cycle that TensorFlow's merges would close; empty without one."""
    merged = merged_ops(graph.nodes.values(), graph.consumers())

    def kernel(node: Node) -> Node:
        while node in merged:
            node = merged[node]
        return node

    waits: dict[Node, set[Node]] = {}
    for node in graph.nodes.values():
        if node.op == "Const":  # Its control edges only keep it from existing early, and TensorFlow folds it.
            continue
        merged_kernel = kernel(node)
        # An op that waits for a product with a constant waits for nothing once that is moved.
        waits_for = [control for control in node.control_inputs if not properties.may_move_constant(control)]
        for before in (*(tensor.node for tensor in node.inputs), *waits_for):
            if kernel(before) is not merged_kernel:
                waits.setdefault(merged_kernel, set()).add(kernel(before))
    try:
        graphlib.TopologicalSorter(waits).prepare()
    except graphlib.CycleError as error:
        return [node.name for node in error.args[1][:8]]
    return []
