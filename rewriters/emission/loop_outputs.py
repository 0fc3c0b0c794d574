"""What a tile loop makes: whole tensors written cell by cell, gradients added up, reductions, moments.

Each is a few variables of the loop, with what they are at first, what a turn makes of them, and what they are worth in
the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from rewriters.emission.buffers import DeviceBuffer, Span, empty_buffer, stacked
from rewriters.emission.while_loop import LoopState
from rewriters.ir.graph import Tensor
from rewriters.rules.registry import Combination
from rewriters.tiling.barrier_levels import MomentPair
from rewriters.tiling.row_frontiers import CarriedRows
from rewriters.tiling.tile_planner import Region

__all__: list[str] = []


class Whole(Protocol):
    """The loop, as a result sees it."""

    batch: Any


class Iteration(Protocol):
    """A turn of the loop, as a result sees it.

    Attributes:
        row_axis: The axis along which rows are carried.
    """

    row_axis: int

    def value(self, tensor: Tensor) -> Any:
        """What the turn made of a tensor."""

    def fit(self, tensor: Tensor, need: Region, fill: float | str) -> Any:
        """Rows of an image that the turn holds."""

    def spans(self, tensor: Tensor, region: Region) -> list[Span]:
        """Where a region of an image lies in the whole one."""

    def images(self) -> Span:
        """The images of the batch that the turn works on; `None` for all."""

    def lookup(self, values: np.ndarray, axis: int) -> Any:
        """Number of this turn's tile in a vector over the tiles of an axis."""

    def moved(
        self, value: Any, have: Region, need: Region, fill: float | str, tensor: Tensor, shared: bool = True
    ) -> Any:
        """Crop and pad a value of `tensor`; whether it may be the same memory."""

    def carry(self, tensor: Tensor) -> CarriedRows:
        """Which rows of a tensor come and go."""

    def row_dim(self, tensor: Tensor) -> int:
        """The dimension along which rows of a tensor are carried."""

    def dims(self, tensor: Tensor) -> tuple[int | None, ...]:
        """The dimensions of a tensor that are its axes."""

    def passed_on(self, tensor: Tensor) -> Any:
        """Rows for the next turn."""


class LoopOutput(Protocol):
    """Something that a loop makes."""

    tensors: list[Tensor]

    def initial(self, loop: Whole) -> list[LoopState]:
        """Its variables."""

    def update(self, turn: Iteration, values: Sequence[Any]) -> list[Any]:
        """The variables after a turn."""

    def final(self, values: Sequence[Any]) -> list[Any]:
        """The tensors."""


def accumulator_dtype(dtype: tf.DType) -> tf.DType:
    """Sums of half precision numbers are kept in float32."""
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


def _state(loop: Whole, tensor: Tensor, dtype: tf.DType, zero: bool) -> LoopState:
    assert tensor.shape is not None
    dims = [loop.batch if dim is None else int(dim) for dim in tensor.shape]
    with tf.device(tensor.node.device or None):
        return LoopState(empty_buffer(stacked(dims) if dims else [], dtype, zero), tensor.shape)


class TiledOutput:
    """A tensor of which each turn writes its own cell."""

    def __init__(self, tensor: Tensor, cell: Region) -> None:
        self.tensors = [tensor]
        self._cell = cell

    def initial(self, loop: Whole) -> list[LoopState]:
        """Anything: every element is written."""
        return [_state(loop, self.tensors[0], self.tensors[0].dtype, zero=False)]

    def update(self, turn: Iteration, values: Sequence[Any]) -> list[Any]:
        """The cell in its place."""
        (tensor,) = self.tensors
        part = turn.fit(tensor, self._cell, 0.0)
        return [DeviceBuffer(values[0]).write(turn.spans(tensor, self._cell), part)]

    def final(self, values: Sequence[Any]) -> list[Any]:
        """As it is."""
        return list(values)


class ScatterAddOutput:
    """A gradient to which each turn adds its part; parts may overlap."""

    def __init__(self, tensor: Tensor, region: Region) -> None:
        self.tensors = [tensor]
        self._region = region

    def initial(self, loop: Whole) -> list[LoopState]:
        """Zeros."""
        return [_state(loop, self.tensors[0], accumulator_dtype(self.tensors[0].dtype), zero=True)]

    def update(self, turn: Iteration, values: Sequence[Any]) -> list[Any]:
        """The part added in its place."""
        (tensor,) = self.tensors
        part = tf.cast(turn.value(tensor), values[0].dtype)
        return [DeviceBuffer(values[0]).accumulate(turn.spans(tensor, self._region), part)]

    def final(self, values: Sequence[Any]) -> list[Any]:
        """In the tensor's own type."""
        return [tf.cast(values[0], self.tensors[0].dtype)]


_COMBINE = {
    Combination.ADD: (tf.add, None),
    Combination.MULTIPLY: (tf.multiply, 1),
    Combination.MAXIMUM: (tf.maximum, -math.inf),
    Combination.MINIMUM: (tf.minimum, math.inf),
}
"""How two parts become one, and what no part is; `None` is zero."""


class ReductionOutput:
    """A reduction over the image, of the batch or of each image; or over the batch, of each pixel.

    Args:
        tensor: What it makes.
        combination: How parts become one.
        per_image: Whether each image has a result of its own.
        cell: Of a reduction over the batch alone, the pixels of a turn.
    """

    def __init__(
        self, tensor: Tensor, combination: Combination, per_image: bool = False, cell: Region | None = None
    ) -> None:
        self.tensors = [tensor]
        self._combine, self._neutral = _COMBINE[combination]
        self._adds = combination is Combination.ADD
        self._per_image = per_image
        self._cell = cell

    def initial(self, loop: Whole) -> list[LoopState]:
        """What changes no result."""
        (tensor,) = self.tensors
        dtype = accumulator_dtype(tensor.dtype) if self._adds else tensor.dtype
        state = _state(loop, tensor, dtype, zero=True)
        if self._neutral is None:
            return [state]
        neutral = self._neutral
        if math.isinf(neutral) and not dtype.is_floating:
            neutral = dtype.min if neutral < 0 else dtype.max
        # Not a fill: it would be folded into a constant, and that be written to.
        return [LoopState(state.initial + tf.constant(neutral, dtype), state.shape)]

    def update(self, turn: Iteration, values: Sequence[Any]) -> list[Any]:
        """The part combined with what the whole one has in its place."""
        (tensor,) = self.tensors
        part, spans = tf.cast(turn.value(tensor), values[0].dtype), self._spans(turn)
        part.set_shape(_part_shape(tensor, spans))
        return [_written(spans, values[0], self._combine(_read(spans, values[0]), part))]

    def _spans(self, turn: Iteration) -> list[Span] | None:
        (tensor,) = self.tensors
        if self._cell is not None:
            return turn.spans(tensor, self._cell)
        return _images(turn, tensor) if self._per_image else None

    def final(self, values: Sequence[Any]) -> list[Any]:
        """In the tensor's own type."""
        return [tf.cast(values[0], self.tensors[0].dtype)]


class MergedMoments:
    """Mean and variance in one loop, merged from those of the parts.

    T. F. Chan, G. H. Golub and R. J. LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances" (1979), equation 2.1: of two parts with `n` and `m` numbers, means `a` and `b` and sums of squared
    differences `S` and `T`, the difference `d = b - a` gives the mean `a + d m / (n + m)` and the sum
    `S + T + d^2 n m / (n + m)`. A difference of mean squares would cancel.
    """

    def __init__(self, moments: MomentPair, cell: Region, alone: bool) -> None:
        """`alone` if there is one part only: it is computed as the step did, to the same bits."""
        self.tensors = [moments.mean, moments.variance]
        self._moments = moments
        self._cell = cell
        self._alone = alone
        self._per_image = 0 not in moments.axes

    def initial(self, loop: Whole) -> list[LoopState]:
        """Of no numbers: how many they are, their mean, and their squared differences from it."""
        mean = self._moments.mean
        return [_state(loop, mean, accumulator_dtype(mean.dtype), zero=True) for _ in range(3)]

    def update(self, turn: Iteration, values: Sequence[Any]) -> list[Any]:
        """With those of a part."""
        where = _images(turn, self._moments.mean) if self._per_image else None
        count, mean, squares = (_read(where, value) for value in values)
        image = tf.cast(turn.fit(self._moments.image, self._cell, 0.0), count.dtype)
        axes = list(self._moments.axes)
        shape = tf.shape(image)
        number = tf.cast(tf.reduce_prod([shape[axis] for axis in axes]), count.dtype)
        own = tf.reduce_mean(image, axes, keepdims=True)
        differences = tf.math.squared_difference(image, own)
        if self._alone:
            one, spread = tf.ones_like(count), tf.reduce_mean(differences, axes, keepdims=True)
            return [_written(None, v, p) for v, p in zip(values, (one, own, spread), strict=True)]
        own_squares = tf.reduce_sum(differences, axes, keepdims=True)
        total = count + number
        difference = own - mean
        new = [
            total,
            mean + difference * (number / total),
            squares + own_squares + tf.square(difference) * (count * number / total),
        ]
        with tf.control_dependencies(new):  # All three are read before one of them is written.
            return [_written(where, value, part) for value, part in zip(values, new, strict=True)]

    def final(self, values: Sequence[Any]) -> list[Any]:
        """Mean and variance, in the tensors' own type."""
        count, mean, squares = values
        variance = squares / count
        if not self._moments.keep_dims:
            variance = tf.squeeze(variance, list(self._moments.axes))
        results = [tf.cast(value, t.dtype) for value, t in zip((mean, variance), self.tensors, strict=True)]
        for value, tensor in zip(results, self.tensors, strict=True):
            value.set_shape(tensor.shape)
        return results


def _images(turn: Iteration, tensor: Tensor) -> list[Span]:
    """Where the results for the images of a turn are."""
    assert tensor.shape is not None
    return [turn.images(), *([None] * (len(tensor.shape) - 1))]


def _read(spans: list[Span] | None, value: Any) -> Any:
    """A part of a reduction; all of it without spans."""
    return value if spans is None else DeviceBuffer(value).read(spans)


def _written(spans: list[Span] | None, value: Any, part: Any) -> Any:
    if spans is None:
        part.set_shape(value.shape)
        return part
    return DeviceBuffer(value).write(spans, part)


def _part_shape(tensor: Tensor, spans: list[Span] | None) -> list[int | None]:
    """Inference loses it where the tile's size is not constant."""
    assert tensor.shape is not None
    cut = spans or [None] * len(tensor.shape)
    return [size if span is None else None for size, span in zip(tensor.shape, cut, strict=True)]
