"""Outputs of tile loops: full-size tensors written cell by cell, accumulated gradients, reductions, moments.

An output owns some state variables of the loop. It gives their initial values, updates them in each iteration and
turns their final values into tensors.
"""

from __future__ import annotations

import abc
import functools
import math
import operator
from collections.abc import Sequence, Set
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from rewriters.emission.buffers import DeviceBuffer, FileBuffer, Span, empty_buffer, stacked
from rewriters.emission.file_buffers import FileBuffers, accumulator_dtype
from rewriters.emission.while_loop import LoopState
from rewriters.ir.device_model import DeviceModel
from rewriters.ir.graph import Tensor
from rewriters.rules.intervals import Interval
from rewriters.rules.registry import Combination
from rewriters.tiling.barrier_levels import MomentPair
from rewriters.tiling.row_frontiers import CarriedRows
from rewriters.tiling.tile_planner import Region, TileLoop

__all__: list[str] = []


class LoopContext(Protocol):
    """The loop, as its outputs see it.

    Attributes:
        batch: Batch size, an integer or a scalar tensor.
        device: The device.
        files: Rule that selects the results in files; `None` if all are in memory.
        in_files: Results in files.
    """

    batch: Any
    device: DeviceModel
    files: FileBuffers | None
    in_files: Set[Tensor]


class Iteration(Protocol):
    """An iteration of the loop, as its outputs see it.

    Attributes:
        row_axis: The axis along which rows are carried.
    """

    row_axis: int

    @property
    def loop(self) -> LoopContext:
        """Return the loop."""

    def value(self, tensor: Tensor) -> Any:
        """Return the rows of a tensor that the iteration computed."""

    def fit(self, tensor: Tensor, need: Region, fill: float | str) -> Any:
        """Return the rows `need` of an image from the rows that the iteration holds."""

    def spans(self, tensor: Tensor, region: Region) -> list[Span]:
        """Return the place of a region in the full-size image."""

    def batch_span(self) -> Span:
        """Return the span of the batch that the iteration covers; `None` for the full batch."""

    def lookup(self, values: np.ndarray, axis: int) -> Any:
        """Return the entry of `values`, which has one for each tile along an axis, for the tile of this iteration."""

    def crop_and_pad(
        self, value: Any, have: Region, need: Region, fill: float | str, tensor: Tensor, shared: bool = True
    ) -> Any:
        """Crop and pad a value of `tensor` from the rows `have` to `need`; `shared` as in `DeviceBuffer.read`."""

    def carried_rows(self, tensor: Tensor) -> CarriedRows:
        """Return the rows of a tensor that are received and passed on."""

    def row_dim(self, tensor: Tensor) -> int:
        """Return the dimension along which rows of a tensor are carried."""

    def dims(self, tensor: Tensor) -> tuple[int | None, ...]:
        """Return the index of the dimension of each spatial axis; `None` for an axis that the tensor lacks."""

    def rows_to_pass(self, tensor: Tensor) -> Any:
        """Return the rows of a tensor for the next iteration."""


class LoopOutput(abc.ABC):
    """An output of a loop.

    Attributes:
        tensors: Tensors that it yields.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = list(tensors)

    @abc.abstractmethod
    def initial(self, loop: LoopContext) -> list[LoopState]:
        """Return its state variables with their initial values."""

    @abc.abstractmethod
    def update(self, iteration: Iteration, values: Sequence[Any]) -> list[Any]:
        """Return the values of its variables after an iteration."""

    def final(self, values: Sequence[Any]) -> list[Any]:
        """Return the values of its tensors from the final values of its variables; by default of the only one."""
        return [tf.cast(values[0], self.tensors[0].dtype)]


def _buffer(iteration: Iteration, tensor: Tensor, handle: Any) -> DeviceBuffer:
    """Return the full-size result whose state variable is `handle`."""
    buffer = FileBuffer if tensor in iteration.loop.in_files else DeviceBuffer
    return buffer(handle, iteration.loop.device)


def loop_state_dtype(tile_loop: TileLoop, tensor: Tensor) -> tf.DType:
    """Return the dtype in which a loop holds a result: float32 for most sums in half precision.

    Maxima, minima and products of half precision stay in it; they are small, and count as if they were sums.
    """
    is_sum = tensor in tile_loop.accumulates or tensor in tile_loop.reductions
    return accumulator_dtype(tensor.dtype) if is_sum else tensor.dtype


def initial_state(loop: LoopContext, tensor: Tensor, dtype: tf.DType, zero: bool) -> LoopState:
    """Return the state variable of a result, in memory or in a file; without `zero` every element is written."""
    assert tensor.shape is not None
    dims = [loop.batch if dim is None else int(dim) for dim in tensor.shape]
    shape = stacked(dims) if dims else []
    with tf.device(tensor.node.device or None):
        if loop.files is not None and tensor in loop.in_files:
            return LoopState(tf.ensure_shape(loop.files.buffer(shape, dtype, zero), tensor.shape), tensor.shape)
        return LoopState(empty_buffer(shape, dtype, zero, loop.device), tensor.shape)


class TiledOutput(LoopOutput):
    """A tensor of which each iteration writes its own cell."""

    def __init__(self, tensor: Tensor, cell: Region) -> None:
        super().__init__(tensor)
        self._cell = cell

    def initial(self, loop: LoopContext) -> list[LoopState]:
        """Return an uninitialised buffer: the iterations write every element."""
        return [initial_state(loop, self.tensors[0], self.tensors[0].dtype, zero=False)]

    def update(self, iteration: Iteration, values: Sequence[Any]) -> list[Any]:
        """Write the cell into the buffer."""
        (tensor,) = self.tensors
        part = iteration.fit(tensor, self._cell, 0.0)
        return [_buffer(iteration, tensor, values[0]).write(iteration.spans(tensor, self._cell), part)]


class ScatterAddOutput(LoopOutput):
    """A gradient to which each iteration adds its rows; rows of several tiles may overlap."""

    def __init__(self, tensor: Tensor, region: Region) -> None:
        super().__init__(tensor)
        self._region = region

    def initial(self, loop: LoopContext) -> list[LoopState]:
        """Return a buffer of zeros."""
        return [initial_state(loop, self.tensors[0], accumulator_dtype(self.tensors[0].dtype), zero=True)]

    def update(self, iteration: Iteration, values: Sequence[Any]) -> list[Any]:
        """Add the rows to the buffer."""
        (tensor,) = self.tensors
        part = tf.cast(iteration.value(tensor), values[0].dtype)
        return [_buffer(iteration, tensor, values[0]).accumulate(iteration.spans(tensor, self._region), part)]


_COMBINE = {
    Combination.ADD: (tf.add, 0),
    Combination.MULTIPLY: (tf.multiply, 1),
    Combination.MAXIMUM: (tf.maximum, -math.inf),
    Combination.MINIMUM: (tf.minimum, math.inf),
}
"""Binary op of each reduction, and its neutral element."""


class ReductionOutput(LoopOutput):
    """A reduction over the image, for the batch or for each image, or over the batch or some axes, for each pixel.

    Args:
        tensor: Result of the reduction.
        combination: Combines the results of two iterations.
        per_image: Whether each image has a result of its own.
        cell: For each axis its dimension in the result, `None` if it is reduced, and the rows of an iteration. `None`
            for a reduction over all axes.
    """

    def __init__(
        self,
        tensor: Tensor,
        *,
        combination: Combination,
        per_image: bool = False,
        cell: Sequence[tuple[int | None, Interval]] | None = None,
    ) -> None:
        super().__init__(tensor)
        self._combine, self._neutral = _COMBINE[combination]
        self._adds = combination is Combination.ADD
        self._per_image = per_image
        self._cell = cell

    def initial(self, loop: LoopContext) -> list[LoopState]:
        """Return a buffer of neutral elements."""
        (tensor,) = self.tensors
        dtype = accumulator_dtype(tensor.dtype) if self._adds else tensor.dtype
        state = initial_state(loop, tensor, dtype, zero=True)
        neutral = self._neutral
        if neutral == 0:
            return [state]
        if math.isinf(neutral) and not dtype.is_floating:
            neutral = dtype.min if neutral < 0 else dtype.max
        # Grappler would fold a fill into a constant, and the loop would then write into the constant.
        return [LoopState(state.initial + tf.constant(neutral, dtype), state.shape)]

    def update(self, iteration: Iteration, values: Sequence[Any]) -> list[Any]:
        """Combine the result of the iteration with the buffer."""
        (tensor,) = self.tensors
        part, spans = tf.cast(iteration.value(tensor), values[0].dtype), self._spans(iteration)
        part.set_shape(_part_shape(tensor, spans))
        part = self._combine(_read(iteration, spans, values[0]), part)
        return [_written(iteration, spans, values[0], part)]

    def _spans(self, iteration: Iteration) -> list[Span] | None:
        (tensor,) = self.tensors
        if self._cell is None:
            return _image_spans(iteration, tensor) if self._per_image else None
        assert tensor.shape is not None
        spans: list[Span] = [None] * len(tensor.shape)
        if self._per_image:
            spans = _image_spans(iteration, tensor)
        for axis, (dim, rows) in enumerate(self._cell):
            if dim is not None and not np.all(rows.size == tensor.shape[dim]):
                spans[dim] = (iteration.lookup(rows.lo, axis), iteration.lookup(rows.size, axis))
        return spans


class MergedMoments(LoopOutput):
    """Mean and variance in one loop, merged from those of the tiles.

    T. F. Chan, G. H. Golub and R. J. LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances" (1979), equation 2.1: two samples have `n` and `m` numbers, means `a` and `b`, and sums of squared
    differences `S` and `T`. With `d = b - a` their union has the mean `a + d m / (n + m)` and the sum
    `S + T + d^2 n m / (n + m)`. A difference of mean squares would suffer from cancellation.
    """

    def __init__(self, moments: MomentPair, cell: Region, alone: bool) -> None:
        """Create the output.

        Args:
            moments: The pair of reductions.
            cell: Pixels of an iteration.
            alone: Whether there is a single tile. Its moments are computed as in the original step, to the same bits.
        """
        super().__init__(moments.mean, moments.variance)
        self._moments = moments
        self._cell = cell
        self._alone = alone
        self._per_image = 0 not in moments.axes

    def initial(self, loop: LoopContext) -> list[LoopState]:
        """Return zeros for the count of numbers, their mean, and the sum of their squared differences from it."""
        mean = self._moments.mean
        return [initial_state(loop, mean, accumulator_dtype(mean.dtype), zero=True) for _ in range(3)]

    def update(self, iteration: Iteration, values: Sequence[Any]) -> list[Any]:
        """Merge the moments of the iteration into the variables."""
        spans = _image_spans(iteration, self._moments.mean) if self._per_image else None
        count, mean, squares = (_read(iteration, spans, value) for value in values)
        image = tf.cast(iteration.fit(self._moments.image, self._cell, 0.0), count.dtype)
        axes = list(self._moments.axes)
        shape = tf.shape(image)
        # On a GPU, `Prod` would compute it in the memory of the GPU, the products of scalars on the host.
        tile_count = tf.cast(functools.reduce(operator.mul, [shape[axis] for axis in axes]), count.dtype)
        # An op that still has to read the image's shape would keep the differences from overwriting the image.
        with tf.control_dependencies([shape]):
            tile_mean = tf.reduce_mean(image, axes, keepdims=True)
        differences = tf.math.squared_difference(image, tile_mean)
        if self._alone:
            variance = tf.reduce_mean(differences, axes, keepdims=True)
            moments = (tf.ones_like(count), tile_mean, variance)
            return [_written(iteration, None, value, part) for value, part in zip(values, moments, strict=True)]
        tile_squares = tf.reduce_sum(differences, axes, keepdims=True)
        total = count + tile_count
        difference = tile_mean - mean
        merged = [
            total,
            mean + difference * (tile_count / total),
            squares + tile_squares + tf.square(difference) * (count * tile_count / total),
        ]
        with tf.control_dependencies(merged):  # All three variables are read before one of them is written.
            return [_written(iteration, spans, value, part) for value, part in zip(values, merged, strict=True)]

    def final(self, values: Sequence[Any]) -> list[Any]:
        """Return mean and variance, cast to the dtypes of the tensors."""
        count, mean, squares = values
        variance = squares / count
        if not self._moments.keep_dims:
            variance = tf.squeeze(variance, list(self._moments.axes))
        results = [tf.cast(value, t.dtype) for value, t in zip((mean, variance), self.tensors, strict=True)]
        for value, tensor in zip(results, self.tensors, strict=True):
            value.set_shape(tensor.shape)
        return results


def _image_spans(iteration: Iteration, tensor: Tensor) -> list[Span]:
    """Return the place of the results for the images of an iteration."""
    assert tensor.shape is not None
    return [iteration.batch_span(), *([None] * (len(tensor.shape) - 1))]


def _read(iteration: Iteration, spans: list[Span] | None, value: Any) -> Any:
    """Return the part of a buffer in `spans`, or the full buffer if they are `None`."""
    return value if spans is None else DeviceBuffer(value, iteration.loop.device).read(spans)


def _written(iteration: Iteration, spans: list[Span] | None, value: Any, part: Any) -> Any:
    if spans is None:
        part.set_shape(value.shape)
        return part
    return DeviceBuffer(value, iteration.loop.device).write(spans, part)


def _part_shape(tensor: Tensor, spans: list[Span] | None) -> list[int | None]:
    """Return the static shape of a part, which shape inference drops where the size of the tile varies."""
    assert tensor.shape is not None
    cut = spans or [None] * len(tensor.shape)
    return [size if span is None else None for size, span in zip(tensor.shape, cut, strict=True)]
