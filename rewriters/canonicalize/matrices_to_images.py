"""Folds matrices of pixels into images.

TensorFlow's matrix product and cross-entropy take matrices, so images pass through a reshape to one row per pixel and
another one back. Tiles can be cut from images alone. This module rewrites the ops between such reshapes to ops on the
image. A product with a matrix becomes an `Einsum`; elementwise ops keep their type. A cross-entropy becomes a call of a
function that reshapes images of any size itself. Consumers that need the matrix read a reshape of the image.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from rewriters.canonicalize.image_products import add_einsum
from rewriters.canonicalize.per_pixel_calls import add_per_pixel_call
from rewriters.ir.graph import Graph, Node, Tensor
from rewriters.ir.static_values import StaticEvaluator, add_constant, op_attrs
from rewriters.rules.contraction import CLASSIFICATIONS
from rewriters.rules.elementwise import ELEMENTWISE

__all__: list[str] = []


def fold_matrices_into_images(graph: Graph, evaluate: StaticEvaluator) -> bool:
    """Replace ops on matrices with a row for each pixel by ops on images, which tiles can cut."""
    return _MatrixFolder(graph, evaluate).run()


class _MatrixFolder:
    """One walk over a graph.

    Attributes:
        images: Image with the same numbers, for each matrix of pixels.
    """

    def __init__(self, graph: Graph, evaluate: StaticEvaluator) -> None:
        self.graph = graph
        self.evaluate = evaluate
        self.images: dict[Tensor, Tensor] = {}

    def run(self) -> bool:
        """Walk over the graph once, and return whether it changed."""
        replaced: dict[Tensor, Tensor] = {}
        changed = False
        readers = self.graph.consumers()
        read = {tensor.node for tensor in (*readers, *self.graph.outputs) if readers.get(tensor, True)}
        for node in self.graph.execution_order():
            if node not in read or node.control_inputs:  # Unread nodes were replaced in an earlier round.
                continue
            if node.op == "Reshape":
                changed |= self._reshape(node)
                continue
            for index, result in enumerate(self._rewritten(node)):
                replaced[node.out(index)] = result
        originals = {old: self._as_original(old, new) for old, new in replaced.items()}
        self.graph.replace_tensors(originals, waits=True)
        return changed or bool(replaced)

    def _reshape(self, node: Node) -> bool:
        """Let a reshape read the image of a matrix, and record the image of its result; return whether it changed."""
        changed = node.inputs[0] in self.images
        if changed:
            node.inputs[0] = self.images[node.inputs[0]]
        source, (_, out) = node.inputs[0], node.outputs[0]
        if source.shape is None or len(source.shape) < 2 or None in source.shape[1:] or out is None:
            return changed
        matrix = len(out) == 2 and self._channels(node) == source.shape[-1]
        # A vector of one value per pixel has no channels; the gradient of a bias is a vector over channels.
        pixels = source.shape[1:-1] if matrix or len(source.shape) > 2 else source.shape[1:]
        if (matrix or len(out) == 1) and math.prod(size or 0 for size in pixels) > 1:
            self.images[node.out()] = source
        return changed

    def _channels(self, node: Node) -> Any:
        """Return the number of columns of a reshape, if need be from the operands of the `Pack` that is its shape."""
        shape = node.inputs[1]
        if (size := node.outputs[0][1][1]) is not None:  # type: ignore[index]
            return size
        if shape.node.op == "Pack":
            return self.evaluate(shape.node.inputs[-1])
        value = self.evaluate(shape)
        return value[-1] if isinstance(value, tuple) else None

    def _rewritten(self, node: Node) -> Sequence[Tensor]:
        """Add the ops on images that replace a node; return their results, none if the node stays."""
        if not any(tensor in self.images for tensor in node.inputs):
            return ()
        replace = _REPLACEMENTS.get(node.op)
        return replace(self, node) if replace is not None else ()

    def _as_original(self, old: Tensor, new: Tensor) -> Tensor:
        """Return the new result in the shape of the old one."""
        if old not in self.images:
            return new
        assert new.shape is not None and old.shape is not None
        shape = (-1, int(new.shape[-1] or 0)) if len(old.shape) == 2 else (-1,)
        sizes = add_constant(self.graph, f"{old.node.name}/pixels", shape, tf.int32)
        attrs = op_attrs(T=old.dtype, Tshape=tf.int32)
        return self.graph.add_beside(old.node, "Reshape", [new, sizes], attrs, [(old.dtype, old.shape)]).out()

    def have_equal_pixels(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether the images of matrices have the same numbers of pixels along all axes."""
        first, *others = (self.pixels(tensor) for tensor in tensors)
        same = self.evaluate.sizes.assume_equal
        return first is not None and all(
            other is not None and len(other) == len(first) and all(map(same, other, first)) for other in others
        )

    def pixels(self, matrix: Tensor) -> tuple[Any, ...] | None:
        """Return the sizes of the image of a matrix, without channels."""
        image, rank = self.images[matrix], len(matrix.shape or ())
        shape = self.evaluate.shape(image)
        return None if shape is None or None in shape else shape[:-1] if rank == 2 else shape

    def matrices(self, node: Node) -> list[Tensor]:
        """Return the operands that are matrices of pixels."""
        return [tensor for tensor in node.inputs if tensor in self.images]


def _product(folder: _MatrixFolder, node: Node) -> Sequence[Tensor]:
    """Rewrite a product of pixels and a matrix, or of two matrices of pixels: the gradient of that matrix."""
    a, b = node.inputs
    transposed_a, transposed_b = node.attrs["transpose_a"].b, node.attrs["transpose_b"].b
    if a in folder.images and b not in folder.images and not transposed_a:
        image = folder.images[a]
        assert image.shape is not None
        pixels, operands = string.ascii_lowercase[: len(image.shape) - 1], [image, b]
        equation = f"{pixels}y,{'zy' if transposed_b else 'yz'}->{pixels}z"
        shape = None if b.shape is None else (*image.shape[:-1], b.shape[0 if transposed_b else 1])
    elif a in folder.images and b in folder.images and transposed_a and not transposed_b:
        if not folder.have_equal_pixels([a, b]):
            return ()
        operands = [folder.images[a], folder.images[b]]
        pixels = string.ascii_lowercase[: len(operands[0].shape or ()) - 1]
        equation, shape = f"{pixels}y,{pixels}z->yz", tuple((t.shape or ())[-1] for t in operands)
    else:
        return ()
    if shape is None or None in shape[1:]:
        return ()
    product = add_einsum(folder.graph, node, equation, operands, shape)
    if b not in folder.images:
        folder.images[node.out()] = product
    return [product]


def _elementwise(folder: _MatrixFolder, node: Node) -> Sequence[Tensor]:
    """Rewrite an elementwise op, or one over channels."""
    matrices = folder.matrices(node)
    ranks = {len(tensor.shape or ()) for tensor in matrices}
    others = [tensor.shape for tensor in node.inputs if tensor not in folder.images]
    if ranks == {1} and "Softmax" in node.op:  # It would reduce over all pixels.
        return ()
    if len(ranks) != 1 or any(shape is None or len(shape) >= max(ranks) for shape in others):
        return ()
    if not folder.have_equal_pixels(matrices) or (
        "data_format" in node.attrs and node.attrs["data_format"].s != b"NHWC"
    ):
        return ()
    operands = [folder.images.get(tensor, tensor) for tensor in node.inputs]
    shape = folder.images[matrices[0]].shape
    assert shape is not None
    if ranks == {2}:
        last = [1 if not t.shape else t.shape[-1] for t in operands]
        shape = (*shape[:-1], next((size for size in last if size != 1), 1))
    if None in shape[1:]:
        return ()
    image = folder.graph.add_beside(node, node.op, operands, dict(node.attrs), [(node.outputs[0][0], shape)]).out()
    folder.images[node.out()] = image
    return [image]


def _bias_gradient(folder: _MatrixFolder, node: Node) -> Sequence[Tensor]:
    """Rewrite the gradient of a bias: a sum over all pixels."""
    image = folder.images[node.inputs[0]]
    if node.attrs["data_format"].s != b"NHWC" or len(node.inputs[0].shape or ()) != 2:
        return ()
    return [folder.graph.add_beside(node, node.op, [image], dict(node.attrs), node.outputs).out()]


def _expand(folder: _MatrixFolder, node: Node) -> Sequence[Tensor]:
    """Rewrite the op that adds a dimension for channels."""
    image = folder.images.get(node.inputs[0])
    if image is None or len(node.inputs[0].shape or ()) != 1 or folder.evaluate(node.inputs[1]) not in (-1, 1):
        return ()
    assert image.shape is not None
    last = add_constant(folder.graph, f"{node.name}/channels", -1, tf.int32)
    attrs = {**node.attrs, **op_attrs(Tdim=tf.int32)}
    outputs = [(image.dtype, (*image.shape, 1))]
    expanded = folder.graph.add_beside(node, "ExpandDims", [image, last], attrs, outputs).out()
    folder.images[node.out()] = expanded
    return [expanded]


def _classification(folder: _MatrixFolder, node: Node) -> Sequence[Tensor]:
    """Replace a cross-entropy, or a test of classes, by a call of a function that reshapes images to matrices."""
    matrices, others = node.inputs[:2], node.inputs[2:]
    if not all(tensor in folder.images for tensor in matrices) or not folder.have_equal_pixels(matrices):
        return ()
    features, labels = (folder.images[tensor] for tensor in matrices)
    assert features.shape and labels.shape
    classes = features.shape[-1:] if node.op == "SoftmaxCrossEntropyWithLogits" else ()
    if labels.shape[1:] != (*features.shape[1:-1], *classes):  # The kernel broadcasts one label over all classes.
        return ()
    shapes = [features.shape[:-1], features.shape]
    outputs = [(dtype, shape) for (dtype, _), shape in zip(node.outputs, shapes, strict=False)]
    call = add_per_pixel_call(folder.graph, node, [features, labels, *others], outputs)
    results = [call.out(index) for index in range(len(outputs))]
    folder.images.update((node.out(index), result) for index, result in enumerate(results))
    return results


_Replacement = Callable[[_MatrixFolder, Node], Sequence[Tensor]]
_REPLACEMENTS: dict[str, _Replacement] = {
    "MatMul": _product,
    "BiasAddGrad": _bias_gradient,
    "ExpandDims": _expand,
    **dict.fromkeys((*ELEMENTWISE, "BiasAdd", "Softmax", "LogSoftmax"), _elementwise),
    **dict.fromkeys(CLASSIFICATIONS, _classification),
}
