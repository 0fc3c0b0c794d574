"""Matrices of pixels become images again.

TensorFlow multiplies matrices and takes cross-entropies of matrices, so images pass through a reshape to one row per
pixel and another one back. Tiles can be cut from images only. Here operations between such reshapes are made anew on
the image: a product with a matrix becomes an `Einsum`, elementwise operations stay what they are, and a
cross-entropy becomes a call of a function that does the reshapes itself, whatever the size of its image. What is left
at the end is made a matrix there.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from rewriters.ir.graph import PER_PIXEL, Graph, Node, Tensor
from rewriters.ir.static_values import StaticEvaluator, int_constant, type_attr
from rewriters.rules.contraction import CROSS_ENTROPIES, run_per_pixel
from rewriters.rules.elementwise import ELEMENTWISE

__all__: list[str] = []


def fold_matrices_into_images(graph: Graph, evaluate: StaticEvaluator) -> bool:
    """Make operations on matrices of pixels anew on images, in place.

    Returns:
        Whether there were any.
    """
    return _Unfolding(graph, evaluate).run()


class _Unfolding:
    """One pass over a graph.

    Attributes:
        images: For matrices of pixels the image that holds the same numbers.
    """

    def __init__(self, graph: Graph, evaluate: StaticEvaluator) -> None:
        self.graph = graph
        self.evaluate = evaluate
        self.images: dict[Tensor, Tensor] = {}

    def run(self) -> bool:
        """Go through the graph once."""
        made: dict[Tensor, Tensor] = {}
        changed = False
        readers = self.graph.consumers()
        read = {tensor.node for tensor in (*readers, *self.graph.outputs) if readers.get(tensor, True)}
        for node in self.graph.topological():
            if node not in read or node.control_inputs:  # What is kept for its effect alone was made anew before.
                continue
            if node.op == "Reshape":
                changed |= self._reshape(node)
                continue
            results = self._made_anew(node)
            for index, result in enumerate(results):
                made[node.out(index)] = result
        self.graph.replace_tensors({old: self._folded(old, new) for old, new in made.items()})
        return changed or bool(made)

    def _reshape(self, node: Node) -> bool:
        """One of a matrix of pixels is one of the image."""
        changed = node.inputs[0] in self.images
        if changed:
            node.inputs[0] = self.images[node.inputs[0]]
        source, (_, out) = node.inputs[0], node.outputs[0]
        if source.shape is None or len(source.shape) < 2 or None in source.shape[1:] or out is None:
            return changed
        matrix = len(out) == 2 and self._channels(node) == source.shape[-1]
        # A vector has no channels, but where all other sizes are one it has nothing else: the gradient of a bias.
        pixels = source.shape[1:-1] if matrix or len(source.shape) > 2 else source.shape[1:]
        if (matrix or len(out) == 1) and math.prod(size or 0 for size in pixels) > 1:
            self.images[node.out()] = source
        return changed

    def _channels(self, node: Node) -> Any:
        """Columns that a reshape is told, if need be by what its shape is packed of."""
        told = node.inputs[1]
        if (size := node.outputs[0][1][1]) is not None:  # type: ignore[index]
            return size
        if told.node.op == "Pack":
            return self.evaluate(told.node.inputs[-1])
        value = self.evaluate(told)
        return value[-1] if isinstance(value, tuple) else None

    def _made_anew(self, node: Node) -> Sequence[Tensor]:
        if not any(tensor in self.images for tensor in node.inputs):
            return ()
        replace = _REPLACEMENTS.get(node.op)
        return replace(self, node) if replace is not None else ()

    def _folded(self, old: Tensor, new: Tensor) -> Tensor:
        """The result as it was, for those that read it so."""
        if old not in self.images:
            return new
        assert new.shape is not None and old.shape is not None
        shape = (-1, int(new.shape[-1] or 0)) if len(old.shape) == 2 else (-1,)
        told = int_constant(self.graph, f"{old.node.name}/pixels", shape, tf.int32).out()
        attrs = {"T": type_attr(old.dtype), "Tshape": type_attr(tf.int32)}
        return self.graph.add_beside(old.node, "Reshape", [new, told], attrs, [(old.dtype, old.shape)]).out()

    def alike(self, tensors: Sequence[Tensor]) -> bool:
        """Whether images have as many pixels along every axis, and as many axes."""
        first, *others = (self.pixels(tensor) for tensor in tensors)
        same = self.evaluate.sizes.assume_equal
        return first is not None and all(
            other is not None and len(other) == len(first) and all(map(same, other, first)) for other in others
        )

    def pixels(self, matrix: Tensor) -> tuple[Any, ...] | None:
        """Sizes of the image of a matrix of pixels, without channels."""
        image, rank = self.images[matrix], len(matrix.shape or ())
        shape = self.evaluate.shape(image)
        return None if shape is None or None in shape else shape[:-1] if rank == 2 else shape

    def matrices(self, node: Node) -> list[Tensor]:
        """The operands that are matrices of pixels."""
        return [tensor for tensor in node.inputs if tensor in self.images]


def _product(unfolding: _Unfolding, node: Node) -> Sequence[Tensor]:
    """Pixels times a matrix; or both sides pixels, summed over them: the gradient of that matrix."""
    a, b = node.inputs
    transposed_a, transposed_b = node.attrs["transpose_a"].b, node.attrs["transpose_b"].b
    if a in unfolding.images and b not in unfolding.images and not transposed_a:
        image = unfolding.images[a]
        assert image.shape is not None
        pixels, operands = string.ascii_lowercase[: len(image.shape) - 1], [image, b]
        equation = f"{pixels}y,{'zy' if transposed_b else 'yz'}->{pixels}z"
        shape = None if b.shape is None else (*image.shape[:-1], b.shape[0 if transposed_b else 1])
    elif a in unfolding.images and b in unfolding.images and transposed_a and not transposed_b:
        if not unfolding.alike([a, b]):
            return ()
        operands = [unfolding.images[a], unfolding.images[b]]
        pixels = string.ascii_lowercase[: len(operands[0].shape or ()) - 1]
        equation, shape = f"{pixels}y,{pixels}z->yz", tuple((t.shape or ())[-1] for t in operands)
    else:
        return ()
    if shape is None or None in shape[1:]:
        return ()
    attrs = {
        "equation": tf.compat.v1.AttrValue(s=equation.encode()),
        "N": tf.compat.v1.AttrValue(i=2),
        "T": type_attr(node.outputs[0][0]),
    }
    made = unfolding.graph.add_beside(node, "Einsum", operands, attrs, [(node.outputs[0][0], shape)]).out()
    if b not in unfolding.images:
        unfolding.images[node.out()] = made
    return [made]


def _elementwise(unfolding: _Unfolding, node: Node) -> Sequence[Tensor]:
    """The same on the image."""
    matrices = unfolding.matrices(node)
    ranks = {len(tensor.shape or ()) for tensor in matrices}
    others = [tensor.shape for tensor in node.inputs if tensor not in unfolding.images]
    if ranks == {1} and "Softmax" in node.op:  # Over all pixels.
        return ()
    if len(ranks) != 1 or any(shape is None or len(shape) >= max(ranks) for shape in others):
        return ()
    if not unfolding.alike(matrices) or ("data_format" in node.attrs and node.attrs["data_format"].s != b"NHWC"):
        return ()
    operands = [unfolding.images.get(tensor, tensor) for tensor in node.inputs]
    shape = unfolding.images[matrices[0]].shape
    assert shape is not None
    if ranks == {2}:
        last = [1 if not t.shape else t.shape[-1] for t in operands]
        shape = (*shape[:-1], next((size for size in last if size != 1), 1))
    if None in shape[1:]:
        return ()
    made = unfolding.graph.add_beside(node, node.op, operands, dict(node.attrs), [(node.outputs[0][0], shape)]).out()
    unfolding.images[node.out()] = made
    return [made]


def _bias_gradient(unfolding: _Unfolding, node: Node) -> Sequence[Tensor]:
    """The sum over all pixels."""
    image = unfolding.images[node.inputs[0]]
    if node.attrs["data_format"].s != b"NHWC" or len(node.inputs[0].shape or ()) != 2:
        return ()
    return [unfolding.graph.add_beside(node, node.op, [image], dict(node.attrs), node.outputs).out()]


def _expand(unfolding: _Unfolding, node: Node) -> Sequence[Tensor]:
    """A dimension for channels."""
    image = unfolding.images.get(node.inputs[0])
    if image is None or len(node.inputs[0].shape or ()) != 1 or unfolding.evaluate(node.inputs[1]) not in (-1, 1):
        return ()
    assert image.shape is not None
    last = int_constant(unfolding.graph, f"{node.name}/channels", -1, tf.int32).out()
    attrs = dict(node.attrs) | {"Tdim": type_attr(tf.int32)}
    outputs = [(image.dtype, (*image.shape, 1))]
    made = unfolding.graph.add_beside(node, "ExpandDims", [image, last], attrs, outputs).out()
    unfolding.images[node.out()] = made
    return [made]


def _cross_entropy(unfolding: _Unfolding, node: Node) -> Sequence[Tensor]:
    """A call of a function that makes matrices of images."""
    if not all(tensor in unfolding.images for tensor in node.inputs) or not unfolding.alike(node.inputs):
        return ()
    features, labels = (unfolding.images[tensor] for tensor in node.inputs)
    assert features.shape and labels.shape
    classes = () if node.op.startswith("Sparse") else features.shape[-1:]
    if labels.shape[1:] != (*features.shape[1:-1], *classes):  # The kernel spreads one label over all classes.
        return ()
    function = tf.function(lambda *images: run_per_pixel(node.op, *images), autograph=False)
    shapes = [(*[None] * (len(shape) - 1), shape[-1]) for shape in (features.shape, labels.shape)]
    specs = [tf.TensorSpec(shape, t.dtype) for shape, t in zip(shapes, (features, labels), strict=True)]
    definition = function.get_concrete_function(*specs).function_def
    unfolding.graph.library.function.append(definition)
    values = tf.compat.v1.AttrValue.ListValue
    attrs = {
        "Tin": tf.compat.v1.AttrValue(list=values(type=[t.dtype.as_datatype_enum for t in (features, labels)])),
        "Tout": tf.compat.v1.AttrValue(list=values(type=[features.dtype.as_datatype_enum] * 2)),
        "f": tf.compat.v1.AttrValue(func=tf.compat.v1.NameAttrList(name=definition.signature.name)),
        PER_PIXEL: tf.compat.v1.AttrValue(s=node.op.encode()),
    }
    outputs = [(features.dtype, features.shape[:-1]), (features.dtype, features.shape)]
    made = unfolding.graph.add_beside(node, "PartitionedCall", [features, labels], attrs, outputs)
    for index in range(2):
        unfolding.images[node.out(index)] = made.out(index)
    return [made.out(0), made.out(1)]


_Replacement = Callable[[_Unfolding, Node], Sequence[Tensor]]
_REPLACEMENTS: dict[str, _Replacement] = {
    "MatMul": _product,
    "BiasAddGrad": _bias_gradient,
    "ExpandDims": _expand,
    **dict.fromkeys((*ELEMENTWISE, "BiasAdd", "Softmax", "LogSoftmax"), _elementwise),
    **dict.fromkeys(CROSS_ENTROPIES, _cross_entropy),
}
