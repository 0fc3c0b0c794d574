"""Ops that read a region of an image from a file, or write one.

A region read is a stateless Python call with five operands: keys, one for each image of a batch; begin and size of a
region, with the batch as the first dimension; begin and size of the region that is read next, whose size is 0 after the
last tile. In the original step, it reads whole images. In a tile loop, each iteration reads the rows of its own
tile, so that the image is never whole in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from rewriters.ir import tf_internals
from rewriters.ir.graph import Graph, Node

__all__: list[str] = []

REGION_READ = "_region_read"
"""Attribute of a Python call that reads a region."""

REGION_WRITE = "_region_write"
"""Attribute of a Python call that writes a region."""

NUM_BUFFERED_REGIONS = 2
"""Regions in memory: that of the iteration, and the next one."""


def read_images(
    read: Callable[..., np.ndarray],
    keys: Any,
    shape: Sequence[int | None],
    dtype: Any,
    shape_in_files: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Any:
    """Return whole images of a batch.

    Args:
        read: Returns a region as an array. Arguments are the five operands as arrays. The op holds a weak reference.
        keys: A vector with the key of each image, strings or integers.
        shape: Shape of an image; `None` for sizes that depend on the file.
        dtype: Type of its numbers.
        shape_in_files: Returns the shape of the images with the given keys. It is needed where sizes are `None`, and
            held weakly.

    Returns:
        A tensor of shape `(batch, *shape)`.
    """
    keys, begin = _at_run_time(keys), tf.zeros([len(shape) + 1], tf.int64)
    if None in shape:
        image_size = tf.ensure_shape(tf.numpy_function(shape_in_files, [keys], tf.int64, stateful=False), [len(shape)])
    else:
        image_size = tf.constant(list(shape), tf.int64)
    size = tf.concat([tf.shape(keys, out_type=tf.int64), image_size], 0)
    images = tf.numpy_function(read, [keys, begin, size, begin, begin], dtype, stateful=False)
    images.set_shape([*keys.shape, *shape])
    _mark(images, REGION_READ)
    return images


def source_of_keys(keys: Any) -> Any:
    """Return the tensor of which keys are a copy or a cast."""
    while keys.op.type in ("Identity", "Cast"):
        keys = keys.op.inputs[0]
    return keys


def _mark(result: Any, attribute: str) -> None:
    if not tf.executing_eagerly():
        tf_internals.set_attr(result.op, attribute, tf.compat.v1.AttrValue(b=True))


def _at_run_time(keys: Any) -> Any:
    """Return keys that are no constant: constant folding would run a call with constant keys once for all steps."""
    if tf.executing_eagerly() or tf.get_static_value(keys) is None:
        return keys
    result = tf.numpy_function(_same, [keys], keys.dtype, stateful=True)
    result.set_shape(keys.shape)
    return result


def _same(keys: np.ndarray) -> np.ndarray:
    return keys


def write_images(write: Callable[..., np.ndarray], images: Any, keys: Any) -> Any:
    """Write whole images of a batch, and return the number of values written for each image.

    The op is a sum over the image: in a tile loop, each iteration writes its region, and the numbers add up.

    Args:
        write: Writes a region, and returns the number of its values for each image. Arguments are arrays: the values,
            the key of each image, and the begin of the region with the batch as the first dimension. The op holds a
            weak reference.
        images: The images.
        keys: A vector with the key of each image, strings or integers.

    Returns:
        A vector of integers. TensorFlow drops the write from a graph that does not use it.
    """
    keys, begin = _at_run_time(keys), tf.zeros([images.shape.rank], tf.int64)
    numbers = tf.numpy_function(write, [images, keys, begin], tf.int64, stateful=False)
    numbers.set_shape(keys.shape)
    _mark(numbers, REGION_WRITE)
    return numbers


def is_region_write(node: Node) -> bool:
    """Return whether an op writes images to files."""
    return REGION_WRITE in node.attrs


def is_region_read(node: Node) -> bool:
    """Return whether an op reads images from files."""
    return REGION_READ in node.attrs


def has_known_shape(node: Node) -> bool:
    """Return whether all sizes of the images that an op reads are known, the batch size aside."""
    shape = node.out().shape
    return shape is not None and None not in shape[1:]


def region_reads(graph: Graph) -> list[Node]:
    """Return all ops of a step that read images from files."""
    return [node for node in graph.nodes.values() if is_region_read(node)]
