"""Where a tensor lives that tiles are read from and written to.

A loop touches whole tensors through this interface alone, so that another
residence (host memory, a file) is another class and nothing else changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from rewriters.device import properties

__all__: list[str] = []

Span = tuple[Any, Any] | None
"""(begin, size) along one dimension, numbers or scalar tensors; `None` for all of it."""


class Buffer(Protocol):
    """A whole tensor, by regions. Methods that change it return the changed handle for the next turn."""

    @property
    def handle(self) -> Any:
        """What the loop carries from turn to turn."""

    def read(self, region: Sequence[Span]) -> Any:
        """The values of a region."""

    def write(self, region: Sequence[Span], value: Any) -> Any:
        """Put `value` into a region."""

    def accumulate(self, region: Sequence[Span], value: Any) -> Any:
        """Add `value` to a region."""


def empty_buffer(shape: Any, dtype: tf.DType, zero: bool) -> Any:
    """A tensor on the device.

    `Empty` rather than `zeros`: Grappler folds a large constant fill into the graph.
    """
    return tf.raw_ops.Empty(shape=shape, dtype=dtype, init=zero)


class DeviceBuffer:
    """A tensor on the device of the loop.

    What is written is changed in place, so that writing a tile costs the tile and not the tensor. The tensor must have
    no other reader that might come after the change, and memory of its own: as a loop variable it has to begin as what
    `empty_buffer` made anew (a constant would be another one in the next step), and the result of an op will do if the
    op never gives its operand back and is kept apart from equal ones.
    """

    def __init__(self, tensor: Any) -> None:
        self.handle = tensor

    def read(self, region: Sequence[Span], shared: bool = False) -> Any:
        """The values of a region; the tensor itself if the region is all of it.

        Args:
            region: Which.
            shared: Whether it may be the same memory, which then lives as long. It is not for what lasts, nor for what
                is written to.
        """
        corners = _corners(region)
        if corners is None:
            return self.handle
        dim = shared_dim(self.handle.shape, [span is not None for span in region])
        if shared and dim:
            return self._read_rows(region, dim)
        begin, end = corners
        value = tf.raw_ops.StridedSlice(
            input=self.handle, begin=begin, end=end, strides=[1] * len(region), **_masks(region)
        )
        dims = [dim if span is None else _static(span[1]) for span, dim in zip(region, self.handle.shape, strict=True)]
        value.set_shape(dims)
        return value

    def _read_rows(self, region: Sequence[Span], dim: int) -> Any:
        """Rows of the only image: TensorFlow cuts a tensor along its first dimension without a copy."""
        shape = self.handle.shape.as_list()
        rows = DeviceBuffer(tf.reshape(self.handle, [-1, *shape[dim + 1 :]])).read(region[dim:])
        return tf.reshape(rows, [*shape[:dim], rows.shape[0] or -1, *shape[dim + 1 :]])

    def write(self, region: Sequence[Span], value: Any) -> Any:
        """The tensor with a region replaced."""
        return self._changed(region, value, tf.raw_ops.InplaceUpdate, lambda: value)

    def accumulate(self, region: Sequence[Span], value: Any) -> Any:
        """The tensor with `value` added to a region."""
        return self._changed(region, value, tf.raw_ops.InplaceAdd, lambda: self.read(region) + value)

    def _changed(self, region: Sequence[Span], value: Any, in_place: Any, replacement: Callable[[], Any]) -> Any:
        """The tensor with what an operation in place makes of a region, or with `replacement`."""
        corners = _corners(region)
        if corners is None:
            result = replacement()
        elif properties.writes_in_place():
            rows = RowView(self.handle, region)
            result = rows.restored(in_place(x=rows.of(self.handle), i=rows.index, v=rows.of(value)))
        else:
            result = replaced(self.handle, region, replacement())
        result.set_shape(self.handle.shape)
        return result


def shared_dim(shape: Sequence[int | None], cut: Sequence[bool]) -> int | None:
    """The dimension along which a part of a tensor is one piece of its memory; `None` if it is not."""
    dims = [dim for dim, cuts in enumerate(cut) if cuts]
    if len(dims) != 1 or None in shape[dims[0] + 1 :] or any(size != 1 for size in shape[: dims[0]]):
        return None
    return dims[0]


def replaced(tensor: Any, region: Sequence[Span], value: Any) -> Any:
    """A tensor with a region replaced; the same memory if nobody else reads it."""
    corners = _corners(region)
    if corners is None:
        return value
    begin, end = corners
    strides = [1] * len(region)
    result = tf.raw_ops.TensorStridedSliceUpdate(
        input=tensor, begin=begin, end=end, strides=strides, value=value, **_masks(region)
    )
    result.set_shape(tensor.shape)
    return result


class RowView:
    """A tensor as a matrix whose rows are contiguous and lie wholly inside or outside of a region.

    `InplaceUpdate` and `InplaceAdd` copy whole rows. A strided assignment copies number by number, which takes many
    times as long on a CPU. They write into their operand whoever else may read it: see `DeviceBuffer`.

    Attributes:
        index: The rows inside of the region.
    """

    def __init__(self, tensor: Any, region: Sequence[Span]) -> None:
        self._shape = [dim if dim is not None else tf.shape(tensor)[i] for i, dim in enumerate(tensor.shape)]
        self._split = max(i for i, span in enumerate(region) if span is not None) + 1
        self._width = math.prod(self._shape[self._split :])
        self.index = tf.reshape(self._positions(region), [-1])

    def _positions(self, region: Sequence[Span]) -> Any:
        """Row numbers, one axis for each dimension that is split."""
        result: Any = 0
        for dim, span in enumerate(region[: self._split]):
            begin, size = (0, self._shape[dim]) if span is None else span
            own = tf.range(size) + begin
            result = tf.expand_dims(result * self._shape[dim], -1) + own
        return result

    def of(self, tensor: Any) -> Any:
        """The tensor as such a matrix."""
        return tf.reshape(tensor, [-1, self._width])

    def restored(self, matrix: Any) -> Any:
        """Back to the whole tensor's shape."""
        return tf.reshape(matrix, stacked(self._shape))


def _static(size: Any) -> int | None:
    return size if isinstance(size, int) else None


def _corners(region: Sequence[Span]) -> tuple[Any, Any] | None:
    """First and one past the last position along each dimension; `None` for the whole tensor."""
    if all(span is None for span in region):
        return None
    begin = [0 if span is None else span[0] for span in region]
    end = [0 if span is None else span[0] + span[1] for span in region]
    return stacked(begin), stacked(end)


def _masks(region: Sequence[Span]) -> dict[str, int]:
    mask = sum(1 << dim for dim, span in enumerate(region) if span is None)
    return {"begin_mask": mask, "end_mask": mask}


def stacked(values: Sequence[Any]) -> Any:
    """A vector of numbers and scalar tensors; a constant if there are only numbers."""
    if all(isinstance(value, int) for value in values):
        return tf.constant(list(values), tf.int32)
    return tf.stack([tf.cast(value, tf.int32) for value in values])
