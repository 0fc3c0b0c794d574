"""Full-size tensors of which loops read and write regions.

A loop accesses full-size tensors through `DeviceBuffer` alone. Another place to store them, such as a file, is a
subclass of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from rewriters.ir import tf_internals
from rewriters.ir.device_model import DeviceModel

__all__: list[str] = []

NOT_FOLDED = "_tpu_not_folded"
"""Attribute of constants that TensorFlow does not replace."""

Span = tuple[Any, Any] | None
"""Begin and size along one dimension, integers or scalar tensors; `None` for the full dimension."""


def empty_buffer(shape: Any, dtype: tf.DType, zero: bool, device: DeviceModel) -> Any:
    """Return an uninitialised or zeroed tensor on a device, which is the current one.

    It is the result of `Empty` because Grappler would fold a large constant fill into the graph. A GPU has no such
    kernel for booleans, and the loop's state would lie on the host.
    """
    if dtype == tf.bool and device.is_gpu:
        return tf.cast(tf.raw_ops.Empty(shape=shape, dtype=tf.uint8, init=zero), tf.bool)
    return tf.raw_ops.Empty(shape=shape, dtype=dtype, init=zero)


def host_scalar(value: Any, dtype: tf.DType, device: DeviceModel) -> Any:
    """Return a constant for an operand that kernels read in host memory; 0 may have any type.

    A GPU holds the values of `Const` in its own memory, from which TensorFlow would copy them in each iteration. In a
    loop TensorFlow's constant folding would replace `HostConst` by `Const`, unless the op has attributes of a TPU
    (tensorflow/core/grappler/optimizers/constant_folding.cc).
    """
    constant = tf.constant(value, dtype) if value else tf.zeros([], dtype)
    if not device.is_gpu:
        return constant
    attrs = {**constant.op.node_def.attr, NOT_FOLDED: tf.compat.v1.AttrValue(b=True)}
    (result,) = tf_internals.create_op("HostConst", [], [dtype], attrs, "constant", "")
    return result


class DeviceBuffer:
    """A tensor on the device of the loop.

    Writes change it in place, so that writing a tile costs as much as the tile and not as the tensor. The tensor must
    have no other consumer that may run after a write, and memory of its own. A state variable has to begin as a result
    of `empty_buffer`, since a write to a constant would show in the next step. The result of another op may be written
    to if the op never forwards its operand and is not merged with equal ops. Methods that change the tensor return the
    handle for the next iteration.

    Attributes:
        handle: Value of the loop's state variable.
    """

    def __init__(self, tensor: Any, device: DeviceModel) -> None:
        self.handle = tensor
        self._device = device

    def read(self, region: Sequence[Span], shared: bool = False) -> Any:
        """Return the values of a region; the tensor itself if the region is the full tensor.

        Args:
            region: The region.
            shared: Whether the result may be a view of the tensor, which keeps the tensor alive. Do not use a view
                that outlives the iteration or is written to.
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
        value.set_shape(static_sizes(region, self.handle.shape))
        return value

    def _read_rows(self, region: Sequence[Span], dim: int) -> Any:
        """Return rows of a single image as a view: TensorFlow slices the first dimension of a tensor without a copy."""
        shape = self.handle.shape.as_list()
        matrices = DeviceBuffer(tf.reshape(self.handle, [-1, *shape[dim + 1 :]]), self._device)
        rows = matrices.read(region[dim:])
        return tf.reshape(rows, [*shape[:dim], rows.shape[0] or -1, *shape[dim + 1 :]])

    def write(self, region: Sequence[Span], value: Any) -> Any:
        """Return the tensor with a region replaced."""
        return self._changed(region, value, tf.raw_ops.InplaceUpdate, lambda: value)

    def accumulate(self, region: Sequence[Span], value: Any) -> Any:
        """Return the tensor with `value` added to a region."""
        return self._changed(region, value, tf.raw_ops.InplaceAdd, lambda: self.read(region) + value)

    def _changed(self, region: Sequence[Span], value: Any, in_place: Any, replacement: Callable[[], Any]) -> Any:
        """Apply an in-place op to a region, or replace the region if the device has no such ops."""
        corners = _corners(region)
        if corners is None:
            result = replacement()
        elif self._device.writes_in_place:
            result = self._written_in_place(region, value, in_place)
        else:
            result = replaced(self.handle, region, replacement())
        result.set_shape(self.handle.shape)
        return result

    def _written_in_place(self, region: Sequence[Span], value: Any, in_place: Any) -> Any:
        rows = RowView(self.handle, region)
        return rows.restored(in_place(x=rows.matrix(self.handle), i=rows.index, v=rows.matrix(value)))


class FileBuffer(DeviceBuffer):
    """A tensor in mapped pages of a file, on a device that writes in place.

    A write of the full tensor copies the value into the file. The value in place of the tensor would stay in memory.
    """

    def _changed(self, region: Sequence[Span], value: Any, in_place: Any, replacement: Callable[[], Any]) -> Any:
        """Apply an in-place op to a region."""
        del replacement
        if _corners(region) is None:
            region = [(0, tf.shape(self.handle)[0]), *region[1:]]
        result = self._written_in_place(region, value, in_place)
        result.set_shape(self.handle.shape)
        return result


def shared_dim(shape: Sequence[int | None], cut: Sequence[bool]) -> int | None:
    """Return the dimension along which a part is contiguous in the tensor's memory; `None` if there is none."""
    dims = [dim for dim, cuts in enumerate(cut) if cuts]
    if len(dims) != 1 or None in shape[dims[0] + 1 :] or any(size != 1 for size in shape[: dims[0]]):
        return None
    return dims[0]


def replaced(tensor: Any, region: Sequence[Span], value: Any) -> Any:
    """Return a tensor with a region replaced, in place if the tensor has no other consumer."""
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
    """A tensor as a matrix whose rows are contiguous and lie entirely inside or outside of a region.

    `InplaceUpdate` and `InplaceAdd` copy entire rows. A strided assignment copies number by number, which takes many
    times as long on a CPU. Both ops write into their operand even if it has other consumers: see `DeviceBuffer`.

    Attributes:
        index: Numbers of the rows inside of the region.
    """

    def __init__(self, tensor: Any, region: Sequence[Span]) -> None:
        self._shape = [dim if dim is not None else tf.shape(tensor)[i] for i, dim in enumerate(tensor.shape)]
        self._split = max(i for i, span in enumerate(region) if span is not None) + 1
        self._width = math.prod(self._shape[self._split :])
        self.index = tf.reshape(self._positions(region), [-1])

    def _positions(self, region: Sequence[Span]) -> Any:
        """Return row numbers, with one axis for each dimension up to the last one that the region splits."""
        result: Any = 0
        for dim, span in enumerate(region[: self._split]):
            begin, size = (0, self._shape[dim]) if span is None else span
            positions = tf.range(size) + begin
            result = tf.expand_dims(result * self._shape[dim], -1) + positions
        return result

    def matrix(self, tensor: Any) -> Any:
        """Return the tensor, or a value of the region, as a matrix."""
        return tf.reshape(tensor, [-1, self._width])

    def restored(self, matrix: Any) -> Any:
        """Return a matrix in the shape of the tensor."""
        return tf.reshape(matrix, stacked(self._shape))


def static_sizes(region: Sequence[Span], shape: Sequence[int | None]) -> list[int | None]:
    """Return the sizes of a region of a tensor with a static shape; `None` for sizes that vary."""
    parts = zip(region, shape, strict=True)
    sizes = [full if span is None else span[1] for span, full in parts]
    return [size if isinstance(size, int) else None for size in sizes]


def _corners(region: Sequence[Span]) -> tuple[Any, Any] | None:
    """Return the first position and one past the last along each dimension; `None` for the full tensor."""
    if all(span is None for span in region):
        return None
    begin = [0 if span is None else span[0] for span in region]
    end = [0 if span is None else span[0] + span[1] for span in region]
    return stacked(begin), stacked(end)


def corner_and_size(region: Sequence[Span], sizes: Sequence[Any]) -> tuple[Any, Any]:
    """Return the first position and the size of a region along each dimension of a tensor with the given sizes."""
    begin = [0 if span is None else span[0] for span in region]
    size = [full if span is None else span[1] for span, full in zip(region, sizes, strict=True)]
    return stacked(begin), stacked(size)


def _masks(region: Sequence[Span]) -> dict[str, int]:
    mask = sum(1 << dim for dim, span in enumerate(region) if span is None)
    return {"begin_mask": mask, "end_mask": mask}


def stacked(values: Sequence[Any]) -> Any:
    """Return a vector of integers and scalar tensors; a constant if all are integers."""
    if all(isinstance(value, int) for value in values):
        return tf.constant(list(values), tf.int32)
    return tf.stack([tf.cast(value, tf.int32) for value in values])
