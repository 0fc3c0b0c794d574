"""Tiles of images that lie in files: an iteration reads its own region and names the next one, which is read ahead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from rewriters.emission.buffers import Span, corner_and_size, static_sizes
from rewriters.ir import tf_internals
from rewriters.ir.graph import Tensor

__all__: list[str] = []


def read_region(tensor: Tensor, keys: Any, batch: Any, spans: Sequence[Span], following: Sequence[Span]) -> Any:
    """Emit a read of a region.

    Args:
        tensor: The images, result of a region read (`rewriters/ir/region_reads.py`).
        keys: Value of its keys.
        batch: Batch size, an integer or a scalar tensor.
        spans: Place of the region.
        following: Place of the region that is read next.

    Returns:
        The region.
    """
    node, shape = tensor.node, tensor.shape
    assert shape is not None
    corners = [*corner_and_size(spans, [batch, *shape[1:]]), *corner_and_size(following, [batch, *shape[1:]])]
    operands = [tf.cast(vector, tf.int64) for vector in corners]
    (value,) = tf_internals.create_op(node.op, [keys, *operands], [tensor.dtype], node.attrs, node.name, "")
    value.set_shape(static_sizes(spans, shape))
    return value
