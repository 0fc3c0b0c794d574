"""Where a tensor lives that tiles are read from and written to.

A loop touches whole tensors through this interface alone, so that another
residence (host memory, a file) is another class and nothing else changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

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


def allocate(shape: Any, dtype: tf.DType, zero: bool) -> Any:
    """A tensor on the device.

    `Empty` rather than `zeros`: Grappler folds a large constant fill into the graph.
    """
    return tf.raw_ops.Empty(shape=shape, dtype=dtype, init=zero)


class DeviceBuffer:
    """A tensor on the device of the loop.

    A loop variable with a single reader is updated in place, so that writing a tile
    costs the tile and not the tensor.
    """

    def __init__(self, tensor: Any) -> None:
        self.handle = tensor

    def read(self, region: Sequence[Span]) -> Any:
        """The values of a region; the tensor itself if the region is all of it."""
        return self._read(region, _corners(region))

    def _read(self, region: Sequence[Span], corners: tuple[Any, Any] | None) -> Any:
        if corners is None:
            return self.handle
        begin, end = corners
        value = tf.raw_ops.StridedSlice(
            input=self.handle, begin=begin, end=end, strides=[1] * len(region), **_masks(region)
        )
        dims = [dim if span is None else _static(span[1]) for span, dim in zip(region, self.handle.shape, strict=True)]
        value.set_shape(dims)
        return value

    def write(self, region: Sequence[Span], value: Any) -> Any:
        """The tensor with a region replaced."""
        return self._write(region, _corners(region), value)

    def _write(self, region: Sequence[Span], corners: tuple[Any, Any] | None, value: Any) -> Any:
        if corners is None:
            value.set_shape(self.handle.shape)
            return value
        begin, end = corners
        result = tf.raw_ops.TensorStridedSliceUpdate(
            input=self.handle, begin=begin, end=end, strides=[1] * len(region), value=value, **_masks(region)
        )
        result.set_shape(self.handle.shape)
        return result

    def accumulate(self, region: Sequence[Span], value: Any) -> Any:
        """The tensor with `value` added to a region."""
        corners = _corners(region)
        return self._write(region, corners, self._read(region, corners) + value)


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
