"""Adds calls of functions that run an op of matrices on the pixels of images."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from rewriters.ir.device_model import DeviceModel
from rewriters.ir.graph import PER_PIXEL, Graph, Node, Tensor
from rewriters.rules.elementwise import run_per_pixel

__all__: list[str] = []


def add_per_pixel_call(graph: Graph, near: Node, operands: Sequence[Tensor], outputs: Sequence[Any]) -> Node:
    """Add a call of a function that runs a softmax, or an op on scores and labels.

    Args:
        graph: The graph.
        near: The op on matrices, for its type and its device.
        operands: The images, then others.
        outputs: (dtype, shape) of every result.
    """
    shapes = [(*[None] * (len(tensor.shape or ()) - 1), *(tensor.shape or ())[-1:]) for tensor in operands]
    specs = tuple(tf.TensorSpec(shape, t.dtype) for shape, t in zip(shapes, operands, strict=True))
    definition = _definition(near.kernel, specs, graph.device)
    if all(known.signature.name != definition.signature.name for known in graph.library.function):
        graph.library.function.append(definition)
    attr = tf.compat.v1.AttrValue
    attrs = {
        "Tin": attr(list=attr.ListValue(type=[t.dtype.as_datatype_enum for t in operands])),
        "Tout": attr(list=attr.ListValue(type=[dtype.as_datatype_enum for dtype, _ in outputs])),
        "f": attr(func=tf.compat.v1.NameAttrList(name=definition.signature.name)),
        PER_PIXEL: attr(s=near.kernel.encode()),
    }
    return graph.add_beside(near, "PartitionedCall", operands, attrs, outputs)


@functools.cache
def _definition(kernel: str, specs: tuple[tf.TensorSpec, ...], device: DeviceModel) -> Any:
    """Return the function that runs a kernel on operands of some shapes on a device; graphs share it."""
    function = tf.function(lambda *images: run_per_pixel(kernel, device, *images), autograph=False)
    return function.get_concrete_function(*specs).function_def
