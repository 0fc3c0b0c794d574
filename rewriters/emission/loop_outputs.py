"""Outputs of tile loops: full-size tensors written cell by cell, accumulated gradients, reductions, moments, rows.

An output owns some state variables of the loop. It gives their initial values, updates them in each iteration and
turns their final values into tensors.
"""

from __future__ import annotations

import abc
import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from rewriters.emission.buffers import DeviceBuffer, FileBuffer, Span, empty_buffer, stacked
from rewriters.emission.file_buffers import accumulator_dtype
from rewriters.emission.loop_program import Accumulate, Carry, LoopProgram, MergeMoments, Part, Reduce, Save, Write
from rewriters.emission.loop_tensors import BATCH_DIM
from rewriters.emission.tile_place import LoopContext, TilePlace
from rewriters.emission.while_loop import LoopState
from rewriters.ir.graph import Tensor
from rewriters.rules.registry import Combination
from rewriters.tiling.row_frontiers import shape_of
from rewriters.tiling.tile_planner import TileLoop

__all__: list[str] = []


class Iteration(Protocol):
    """An iteration of the loop, as its outputs see it.

    Attributes:
        place: Place of its tile.
    """

    place: TilePlace

    @property
    def loop(self) -> LoopContext:
        """Return the loop."""

    def value(self, part: Part) -> Any:
        """Return the value of a part."""


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

    def __init__(self, output: Write) -> None:
        super().__init__(output.part.tensor)
        self._part = output.part

    def initial(self, loop: LoopContext) -> list[LoopState]:
        """Return an uninitialised buffer: the iterations write every element."""
        return [initial_state(loop, self.tensors[0], self.tensors[0].dtype, zero=False)]

    def update(self, iteration: Iteration, values: Sequence[Any]) -> list[Any]:
        """Write the cell into the buffer."""
        (tensor,) = self.tensors
        assert self._part.region is not None
        spans = iteration.place.spans(tensor, self._part.region)
        return [_buffer(iteration, tensor, values[0]).write(spans, iteration.value(self._part))]


class ScatterAddOutput(LoopOutput):
    """A gradient to which each iteration adds its rows; rows of several tiles may overlap."""

    def __init__(self, output: Accumulate) -> None:
        super().__init__(output.part.tensor)
        self._part = output.part

    def initial(self, loop: LoopContext) -> list[LoopState]:
        """Return a buffer of zeros."""
        return [initial_state(loop, self.tensors[0], accumulator_dtype(self.tensors[0].dtype), zero=True)]

    def update(self, iteration: Iteration, values: Sequence[Any]) -> list[Any]:
        """Add the rows to the buffer."""
        (tensor,) = self.tensors
        assert self._part.region is not None
        spans = iteration.place.spans(tensor, self._part.region)
        part = tf.cast(iteration.value(self._part), values[0].dtype)
        return [_buffer(iteration, tensor, values[0]).accumulate(spans, part)]


_COMBINE = {
    Combination.ADD: (tf.add, 0),
    Combination.MULTIPLY: (tf.multiply, 1),
    Combination.MAXIMUM: (tf.maximum, -math.inf),
    Combination.MINIMUM: (tf.minimum, math.inf),
}
"""Binary op of each reduction, and its neutral element."""


class ReductionOutput(LoopOutput):
    """A reduction over the image, for the batch or for each image, or over the batch or some axes, for each pixel."""

    def __init__(self, output: Reduce) -> None:
        super().__init__(output.part.tensor)
        self._output = output
        self._combine, self._neutral = _COMBINE[output.combination]

    def initial(self, loop: LoopContext) -> list[LoopState]:
        """Return a buffer of neutral elements."""
        (tensor,) = self.tensors
        adds = self._output.combination is Combination.ADD
        dtype = accumulator_dtype(tensor.dtype) if adds else tensor.dtype
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
        part, spans = tf.cast(iteration.value(self._output.part), values[0].dtype), self._spans(iteration)
        part.set_shape(_part_shape(tensor, spans))
        part = self._combine(_read(iteration, spans, values[0]), part)
        return [_written(iteration, spans, values[0], part)]

    def _spans(self, iteration: Iteration) -> list[Span] | None:
        (tensor,), place, cell = self.tensors, iteration.place, self._output.cell
        spans: list[Span] | None = place.image_spans(tensor) if self._output.per_image else None
        if cell is None:
            return spans
        assert tensor.shape is not None
        spans = spans or [None] * len(tensor.shape)
        for axis, (dim, rows) in enumerate(cell):
            if dim is not None and not np.all(rows.size == tensor.shape[dim]):
                spans[dim] = (place.lookup(rows.lo, axis), place.lookup(rows.size, axis))
        return spans


class MergedMoments(LoopOutput):
    """Mean and variance in one loop, merged from those of the tiles.

    T. F. Chan, G. H. Golub and R. J. LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances" (1979), equation 2.1: two samples have `n` and `m` numbers, means `a` and `b`, and sums of squared
    differences `S` and `T`. With `d = b - a` their union has the mean `a + d m / (n + m)` and the sum
    `S + T + d^2 n m / (n + m)`. A difference of mean squares would suffer from cancellation.
    """

    def __init__(self, output: MergeMoments) -> None:
        super().__init__(output.pair.mean, output.pair.variance)
        self._output = output
        self._moments = output.pair

    def initial(self, loop: LoopContext) -> list[LoopState]:
        """Return zeros for the count of numbers, their mean, and the sum of their squared differences from it."""
        mean = self._moments.mean
        return [initial_state(loop, mean, accumulator_dtype(mean.dtype), zero=True) for _ in range(3)]

    def update(self, iteration: Iteration, values: Sequence[Any]) -> list[Any]:
        """Merge the moments of the iteration into the variables."""
        per_image = BATCH_DIM not in self._moments.axes
        spans = iteration.place.image_spans(self._moments.mean) if per_image else None
        count, mean, squares = (_read(iteration, spans, value) for value in values)
        image = tf.cast(iteration.value(self._output.part), count.dtype)
        axes = list(self._moments.axes)
        shape = tf.shape(image)
        # On a GPU, `Prod` would compute it in the memory of the GPU, the products of scalars on the host.
        tile_count = tf.cast(functools.reduce(operator.mul, [shape[axis] for axis in axes]), count.dtype)
        # An op that still has to read the image's shape would keep the differences from overwriting the image.
        with tf.control_dependencies([shape]):
            tile_mean = tf.reduce_mean(image, axes, keepdims=True)
        differences = tf.math.squared_difference(image, tile_mean)
        if self._output.has_one_tile:
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


class CarriedState(LoopOutput):
    """State variable with rows that one iteration passes to the next."""

    def __init__(self, output: Carry) -> None:
        super().__init__()
        self._part = output.part
        self.tensor = output.part.tensor

    def initial(self, loop: LoopContext) -> list[LoopState]:
        """Return zero rows of one image; the batch size is not known before the first iteration."""
        layout, region, row_axis = loop.analysis.layouts.of(self.tensor), self._part.region, loop.tile_loop.row_axis
        assert layout is not None and region is not None
        rows = [None if axis == row_axis else int(rows.size[0]) for axis, rows in enumerate(region)]
        shape = shape_of(self.tensor, layout.dims, rows)
        sizes = [0 if dim == layout.dims[row_axis] else size or 1 for dim, size in enumerate(shape)]
        with tf.device(self.tensor.node.device or None):
            empty = tf.zeros(sizes, self.tensor.dtype)
        return [LoopState(empty, (None, *shape[1:]))]

    def update(self, iteration: Iteration, values: Sequence[Any]) -> list[Any]:
        """Return the rows for the next iteration."""
        (before,), rows = values, iteration.value(self._part)
        rows.set_shape(before.shape)
        return [rows]

    def final(self, values: Sequence[Any]) -> list[Any]:
        """Return nothing: no op reads the rows after the last iteration."""
        del values
        return []


class SavedState(LoopOutput):
    """Buffer of rows that a forward loop saves for the backward loop, tile after tile."""

    def __init__(self, output: Save) -> None:
        super().__init__(output.save.saved)
        self._output = output

    def initial(self, loop: LoopContext) -> list[LoopState]:
        """Return an uninitialised buffer: the iterations write every row."""
        saved = self._output.save.saved
        return [initial_state(loop, saved, saved.dtype, zero=False)]

    def update(self, iteration: Iteration, values: Sequence[Any]) -> list[Any]:
        """Write the rows at the borders of backward tiles that lie in this tile."""
        (handle,), tensor, place = values, self._output.save.tensor, iteration.place
        axis = iteration.loop.tile_loop.row_axis
        dim = place.dims(tensor)[axis]
        assert dim is not None
        for part, (rows, places) in zip(self._output.parts, self._output.save.slots, strict=True):
            spans: list[Span] = [None] * len(handle.shape)
            spans[BATCH_DIM] = place.batch_span if tensor.shape and tensor.shape[BATCH_DIM] != 1 else None
            spans[dim] = (place.lookup(places, axis), place.lookup(rows.size, axis))
            handle = DeviceBuffer(handle, iteration.loop.device).write(spans, iteration.value(part))
        return [handle]


def outputs_of(program: LoopProgram) -> list[LoopOutput]:
    """Return the outputs of a loop, and the rows that it carries, each with its state variables."""
    return [_EMITTERS[type(output)](output) for output in program.outputs]


_EMITTERS = {
    Write: TiledOutput,
    Accumulate: ScatterAddOutput,
    Reduce: ReductionOutput,
    MergeMoments: MergedMoments,
    Save: SavedState,
    Carry: CarriedState,
}
