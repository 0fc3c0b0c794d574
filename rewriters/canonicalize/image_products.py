"""Rewrites products of an image and a matrix, their gradients, and products of images to `Einsum` ops.

Keras before version 3.15 computes a dense layer on an image as a `BatchMatMulV2` of the image and its kernel, and
`tf.matmul` does so in any version. That op views the last two axes of the image as a matrix and multiplies each by the
kernel. An `Einsum` names the axes, so that the rules see a product per pixel. The gradient of the kernel is a
`BatchMatMulV2` of two images that sums over one axis only; a `Sum` over the others follows. Both together become one
`Einsum`, which reduces over the image. Attention multiplies images with each other.

A product with a transposed matrix, such as scores of words from a table of embeddings, names the axes of the matrix
itself. Otherwise the transposed copies of a vocabulary and of its gradient would be as large as the vocabulary.
"""

from __future__ import annotations

import string
from collections.abc import Sequence

from rewriters.ir.graph import Graph, Node, Shape, Tensor
from rewriters.ir.static_values import StaticEvaluator, op_attrs

__all__: list[str] = []


def rewrite_image_products(graph: Graph, evaluate: StaticEvaluator) -> bool:
    """Replace matrix products of images that were reshaped to matrices by products of the images."""
    replaced: dict[Tensor, Tensor] = {}
    summed = {node.inputs[0] for node in graph.nodes.values() if node.op == "Sum"}
    for node in list(graph.nodes.values()):
        if node.control_inputs:
            continue
        if node.op == "BatchMatMulV2":
            product = _product_with_matrix(graph, node)
            if product is None and node.out() not in summed:  # The sum may become the gradient of a matrix.
                product = _product_of_images(graph, node, evaluate)
        elif node.op == "Sum":
            product = _gradient_of_matrix(graph, node, evaluate)
        else:
            continue
        if product is not None:
            replaced[node.out()] = product
    graph.replace_tensors(replaced, waits=True)
    return _absorb_transposes(graph, evaluate) or bool(replaced)


def _absorb_transposes(graph: Graph, evaluate: StaticEvaluator) -> bool:
    """Let `Einsum` ops read matrices that are not transposed, and return transposed matrices."""
    sources = {n.out(): n.inputs[0] for n in graph.nodes.values() if _transposes_matrix(n, evaluate)}
    if not sources:
        return False
    consumers, replaced = graph.consumers(), dict[Tensor, Tensor]()
    for node in list(graph.nodes.values()):
        if node.op != "Einsum" or node.control_inputs or b"." in node.attrs["equation"].s:
            continue
        terms, result = node.attrs["equation"].s.decode().replace(" ", "").split("->")
        operands = [
            (labels[::-1], sources[tensor]) if tensor in sources else (labels, tensor)
            for labels, tensor in zip(terms.split(","), node.inputs, strict=True)
        ]
        tensor, readers = node.out(), consumers.get(node.out(), [])
        if len(readers) == 1 and tensor not in graph.outputs and readers[0][0].out() in sources:
            tensor, result = readers[0][0].out(), result[::-1]
            # The kernel transposes a result whose first axis is not one of the first operand.
            operands.sort(key=lambda operand: result[0] not in operand[0])
        if tensor != node.out() or any(t in sources for t in node.inputs):
            equation = f"{','.join(labels for labels, _ in operands)}->{result}"
            replaced[tensor] = add_einsum(graph, node, equation, [t for _, t in operands], tensor.shape)
    graph.replace_tensors(replaced, waits=True)
    return bool(replaced)


def _transposes_matrix(node: Node, evaluate: StaticEvaluator) -> bool:
    return node.op == "Transpose" and not node.control_inputs and evaluate(node.inputs[1]) == (1, 0)


def _product_with_matrix(graph: Graph, node: Node) -> Tensor | None:
    """Add the product of an image, `(batch, ..., a)`, and a matrix, `(a, b)` or transposed."""
    image, matrix = node.inputs
    if (
        not image.shape
        or len(image.shape) < 3
        or matrix.shape is None
        or len(matrix.shape) != 2
        or _is_adjoint(node, 0)
    ):
        return None
    is_transposed = _is_adjoint(node, 1)
    columns = matrix.shape[0 if is_transposed else 1]
    if image.dtype.is_complex or None in (*image.shape[1:], columns):
        return None
    pixels = string.ascii_lowercase[: len(image.shape) - 1]
    equation = f"{pixels}y,{'zy' if is_transposed else 'yz'}->{pixels}z"
    return add_einsum(graph, node, equation, [image, matrix], (*image.shape[:-1], columns))


def _product_of_images(graph: Graph, node: Node, evaluate: StaticEvaluator) -> Tensor | None:
    """Add the product of the matrices in the last two dimensions of two tensors whose other dimensions are equal."""
    first, second = node.inputs
    shape = node.out().shape
    if not first.shape or not second.shape or not shape or len(first.shape) < 3 or first.dtype.is_complex:
        return None
    if len(first.shape) != len(second.shape) or None in (*first.shape[1:], *second.shape[1:]):
        return None
    if first.shape[1:-2] != second.shape[1:-2]:
        return None
    if not evaluate.sizes.assume_equal(evaluate.sizes.of(first), evaluate.sizes.of(second)):
        return None
    others = string.ascii_lowercase[: len(first.shape) - 2]
    rows, columns = ("yx" if _is_adjoint(node, 0) else "xy"), ("zy" if _is_adjoint(node, 1) else "yz")
    return add_einsum(graph, node, f"{others}{rows},{others}{columns}->{others}xz", [first, second], shape)


def _gradient_of_matrix(graph: Graph, node: Node, evaluate: StaticEvaluator) -> Tensor | None:
    """Add the sum over all pixels of the products of two images, `(batch, ..., a)` and `(batch, ..., b)`."""
    product = node.inputs[0].node
    if product.op != "BatchMatMulV2" or product.control_inputs or node.attrs["keep_dims"].b:
        return None
    first, second = product.inputs
    if not _is_adjoint(product, 0) or _is_adjoint(product, 1) or first.dtype.is_complex:
        return None
    if not first.shape or not second.shape or len(first.shape) != len(second.shape) or len(first.shape) < 3:
        return None
    if None in (*first.shape[1:], *second.shape[1:]) or first.shape[1:-1] != second.shape[1:-1]:
        return None
    if evaluate.reduction_axes(node) != set(range(len(first.shape) - 2)):
        return None
    if not evaluate.sizes.assume_equal(evaluate.sizes.of(first), evaluate.sizes.of(second)):
        return None
    pixels = string.ascii_lowercase[: len(first.shape) - 1]
    return add_einsum(graph, node, f"{pixels}y,{pixels}z->yz", [first, second], (first.shape[-1], second.shape[-1]))


def _is_adjoint(product: Node, position: int) -> bool:
    return bool(product.attrs["adj_y" if position else "adj_x"].b)


def add_einsum(graph: Graph, near: Node, equation: str, operands: Sequence[Tensor], shape: Shape) -> Tensor:
    """Add an `Einsum` op, such as `"aby,yz->abz"`, with the device and dtype of a replaced op; return its result."""
    dtype = near.outputs[0][0]
    attrs = op_attrs(equation=equation, N=len(operands), T=dtype)
    return graph.add_beside(near, "Einsum", operands, attrs, [(dtype, shape)]).out()
