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

from collections.abc import Mapping, Sequence

from rewriters.ir.graph import Graph, Node, Tensor, cycle_in
from rewriters.ir.op_traits import Trait, ops_with

__all__: list[str] = []

_FUSION_ROOTS = ops_with(Trait.FUSION_ROOT)
_EPILOGUES = ops_with(Trait.FUSION_EPILOGUE)
_PADDING = ops_with(Trait.FUSED_PADDING)
_SCALES = ops_with(Trait.SCALES)

_MERGE_ROOTS = (_FUSION_ROOTS - ops_with(Trait.MATRIX_PRODUCT)) | _PADDING | _SCALES
"""First ops of merges."""

_GRADIENT_OPERAND = 2
"""Operand of the gradient of a filter that is the gradient of the convolution's result."""

Consumers = Mapping[Tensor, Sequence[tuple[Node, int]]]


def may_fuse_with_consumer(node: Node, reader: Node | None = None) -> bool:
    """Return whether TensorFlow may fuse an operation with its consumer, such as a convolution and its bias.

    oneDNN fuses regardless of control edges: nodes before the consumer must not wait for the operation.
    `reader` is its only consumer; any if it is not given.
    """
    if node.op in _PADDING:
        return reader is None or reader.op in _FUSION_ROOTS
    return node.op in _FUSION_ROOTS | _EPILOGUES and (reader is None or reader.op in _EPILOGUES)


def may_move_constant(node: Node, reader: Node | None = None) -> bool:
    """Return whether TensorFlow may compute the constant factor of an op with that of its only consumer.

    (x * 2) * c becomes x * (2 * c) once c is a constant (`ConstantPushDown` in TensorFlow's constant folding). Ops that
    wait for the first product then wait for c. `reader` is its only consumer; any if it is not given.
    """
    has_constant = node.op in _SCALES and any(tensor.node.op == "Const" for tensor in node.inputs)
    return has_constant and (reader is None or reader.op in _SCALES)


def may_merge(node: Node, reader: Node | None = None) -> bool:
    """Return whether TensorFlow may merge an op into its only consumer; into any consumer if none is given."""
    return may_fuse_with_consumer(node, reader) or may_move_constant(node, reader)


def bias_gradients(graph: Graph, consumers: Consumers) -> list[tuple[Node, Node]]:
    """Return each gradient of a bias with each gradient of a filter that oneDNN may merge it with.

    Two layers whose results are added have one gradient, and two pairs each. oneDNN does not merge ops of which one
    waits for the other, and such pairs are left out (`rewriters/scheduling/separate_gradients.py`).
    """
    if not graph.device.uses_onednn:
        return []
    return [
        (reader, node)
        for node in graph.nodes.values()
        if node.op == "Conv2DBackpropFilter"
        for reader, _ in consumers[node.inputs[_GRADIENT_OPERAND]]
        if reader.op == "BiasAddGrad" and node not in reader.control_inputs
    ]


def merged_ops(graph: Graph, consumers: Consumers) -> dict[Node, Node]:
    """Return for each op that may be merged the op that absorbs it, which another one may absorb in turn."""
    merged = dict(bias_gradients(graph, consumers))
    for node in graph.nodes.values():
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
    merged = merged_ops(graph, graph.consumers())

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
        waits_for = [control for control in node.control_inputs if not may_move_constant(control)]
        for before in (*(tensor.node for tensor in node.inputs), *waits_for):
            if kernel(before) is not merged_kernel:
                waits.setdefault(merged_kernel, set()).add(kernel(before))
    return cycle_in(waits)
