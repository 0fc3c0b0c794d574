"""What has a value for each pixel, but no batch, becomes one image: weights, positions, masks.

An elementwise operation spreads it over the batch by itself, whether it has a first dimension of one or none. With
one its axes are those of the images, so that tiles are cut from it as from them. Its gradient, a sum over the batch, is
one image, too.
"""

from __future__ import annotations

import tensorflow as tf

from rewriters.ir.graph import Graph, Node, Tensor
from rewriters.ir.static_values import StaticEvaluator, int_constant, type_attr
from rewriters.rules.elementwise import ELEMENTWISE
from rewriters.rules.reduction import REDUCTIONS

__all__: list[str] = []

RANKS = (3, 4, 5)
"""Dimensions of a batch of images."""


def add_batch_axis(graph: Graph, evaluate: StaticEvaluator) -> bool:
    """Give what has no batch one of one image, in place.

    Returns:
        Whether there was any.
    """
    images: dict[tuple[Tensor, str], Tensor] = {}
    mapping: dict[Tensor, Tensor] = {}
    for node in graph.topological():
        if node.op in ELEMENTWISE:
            rank = len(node.out().shape or ())
            for position, tensor in enumerate(node.inputs):
                if rank in RANKS and len(tensor.shape or ()) == rank - 1 and _is_image(tensor):
                    if (tensor, node.device) not in images:
                        images[tensor, node.device] = _expanded(graph, node, tensor)
                    node.inputs[position] = images[tensor, node.device]
        elif node.op in REDUCTIONS and not node.attrs["keep_dims"].b and not node.control_inputs:
            axes = evaluate.reduction_axes(node) or set()
            if 0 in axes and len(node.inputs[0].shape or ()) in RANKS and _has_pixels(node.out()):
                mapping[node.out()] = _kept(graph, node, axes)
    graph.replace_tensors(mapping)
    graph.prune()
    return bool(images or mapping)


def _has_pixels(tensor: Tensor) -> bool:
    """More than a value for each channel."""
    shape = tensor.shape
    return shape is not None and None not in shape and any(size != 1 for size in shape[:-1])


def _is_image(tensor: Tensor) -> bool:
    """Whether pixels may have other values; a value that is repeated is read as it is (`shrink_broadcasts.py`)."""
    source = tensor
    while source.node.op in ("Cast", "Identity"):
        source = source.node.inputs[0]
    return _has_pixels(tensor) and source.node.op not in ("Fill", "BroadcastTo")


def _expanded(graph: Graph, node: Node, tensor: Tensor) -> Tensor:
    first = int_constant(graph, f"{tensor.node.name}/batch", 0, tf.int32).out()
    attrs = {"T": type_attr(tensor.dtype), "Tdim": type_attr(tf.int32)}
    outputs = [(tensor.dtype, (1, *(tensor.shape or ())))]
    return graph.add_beside(node, "ExpandDims", [tensor, first], attrs, outputs).out()


def _kept(graph: Graph, node: Node, axes: set[int]) -> Tensor:
    """The same reduction that keeps its dimensions, and a reshape."""
    dtype, source = node.outputs[0][0], node.inputs[0].shape or ()
    kept = tuple(1 if dim in axes else size for dim, size in enumerate(source))
    attrs = dict(node.attrs) | {"keep_dims": tf.compat.v1.AttrValue(b=True)}
    image = graph.add_beside(node, node.op, list(node.inputs), attrs, [(dtype, kept)])
    shape = tuple(int(size or 0) for size in node.out().shape or ())
    sizes = int_constant(graph, f"{node.name}/pixels", shape, tf.int32).out()
    attrs = {"T": type_attr(dtype), "Tshape": type_attr(tf.int32)}
    return graph.add_beside(node, "Reshape", [image.out(), sizes], attrs, [(dtype, shape)]).out()
