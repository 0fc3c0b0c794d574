"""Adds a batch axis of size 1 to tensors with a value for each pixel but no batch: weights, positions, masks.

An elementwise op broadcasts such a tensor over the batch, with or without that axis. With it the axes are those of
images, so that tiles are cut from the tensor as from images. The gradient, a sum over the batch, becomes one image too.
A mask of queries and keys gets an axis of heads first, in an earlier round of canonicalization.
"""

from __future__ import annotations

import tensorflow as tf

from rewriters.ir.graph import Graph, Node, Tensor
from rewriters.ir.static_values import StaticEvaluator, add_constant, op_attrs
from rewriters.rules.elementwise import ELEMENTWISE
from rewriters.rules.reduction import REDUCTIONS

__all__: list[str] = []

IMAGE_RANKS = (3, 4, 5)
"""Ranks of a batch of images."""


def add_batch_axis(graph: Graph, evaluate: StaticEvaluator) -> bool:
    """Add a batch axis of size 1 to operands of elementwise ops, and to results of reductions over the batch."""
    images: dict[tuple[Tensor, str], Tensor] = {}
    mapping: dict[Tensor, Tensor] = {}
    for node in graph.execution_order():
        if node.op in ELEMENTWISE:
            rank = len(node.out().shape or ())
            for position, tensor in enumerate(node.inputs):
                if rank in IMAGE_RANKS and 1 < len(tensor.shape or ()) < rank and _is_image(tensor):
                    if (tensor, node.device) not in images:
                        images[tensor, node.device] = _expand(graph, node, tensor)
                    node.inputs[position] = images[tensor, node.device]
        elif node.op in REDUCTIONS and not node.attrs["keep_dims"].b and not node.control_inputs:
            axes = evaluate.reduction_axes(node) or set()
            if node.inputs[0].node.op == "BatchMatMulV2":  # The sum may become the gradient of a matrix.
                continue
            if 0 in axes and len(node.inputs[0].shape or ()) in IMAGE_RANKS and _has_pixels(node.out()):
                mapping[node.out()] = _reduce_to_image(graph, node, axes)
    graph.replace_tensors(mapping, waits=True)
    graph.prune()
    return bool(images or mapping)


def _has_pixels(tensor: Tensor) -> bool:
    """Return whether a tensor has more than one value for each channel."""
    shape = tensor.shape
    return shape is not None and None not in shape and any(size != 1 for size in shape[:-1])


def _is_image(tensor: Tensor) -> bool:
    """Return whether pixels may differ; sources of broadcast values are read directly (`shrink_broadcasts.py`)."""
    source = tensor
    while source.node.op in ("Cast", "Identity"):
        source = source.node.inputs[0]
    return _has_pixels(tensor) and source.node.op not in ("Fill", "BroadcastTo")


def _expand(graph: Graph, node: Node, tensor: Tensor) -> Tensor:
    first = add_constant(graph, f"{tensor.node.name}/batch", 0, tf.int32)
    attrs = op_attrs(T=tensor.dtype, Tdim=tf.int32)
    outputs = [(tensor.dtype, (1, *(tensor.shape or ())))]
    return graph.add_beside(node, "ExpandDims", [tensor, first], attrs, outputs).out()


def _reduce_to_image(graph: Graph, node: Node, axes: set[int]) -> Tensor:
    """Add a copy of a reduction that keeps its dimensions, and a reshape to the original result."""
    dtype, source = node.outputs[0][0], node.inputs[0].shape or ()
    image_shape = tuple(1 if dim in axes else size for dim, size in enumerate(source))
    attrs = {**node.attrs, **op_attrs(keep_dims=True)}
    image = graph.add_beside(node, node.op, list(node.inputs), attrs, [(dtype, image_shape)])
    shape = tuple(int(size or 0) for size in node.out().shape or ())
    sizes = add_constant(graph, f"{node.name}/pixels", shape, tf.int32)
    return graph.add_beside(
        node, "Reshape", [image.out(), sizes], op_attrs(T=dtype, Tshape=tf.int32), [(dtype, shape)]
    ).out()
