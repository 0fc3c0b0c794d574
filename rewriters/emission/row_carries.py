"""Emits what row tiles hand on: rows that come in are joined with those that a turn makes, and others go out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from rewriters.emission.buffers import DeviceBuffer, Span, empty_buffer, replaced, stacked
from rewriters.emission.loop_outputs import Iteration, Whole
from rewriters.emission.while_loop import LoopState
from rewriters.ir import tf_internals
from rewriters.ir.graph import Tensor
from rewriters.rules.intervals import Interval
from rewriters.tiling.row_frontiers import CarriedRows, SavedRows, offsets, shape_of
from rewriters.tiling.tile_planner import Region, with_rows

__all__: list[str] = []


def received(turn: Iteration, tensor: Tensor, carry: CarriedRows, source: Any, images: Any) -> Any:
    """The rows that a turn has of a tensor from elsewhere.

    Args:
        turn: The turn.
        tensor: Whose rows they are.
        carry: Which.
        source: The loop's variable; or, for saved rows, the tensor that holds all of them.
        images: How many images there are.
    """
    axis = turn.row_axis
    dim, size = turn.row_dim(tensor), turn.lookup(carry.received.size, axis)
    if carry.saved is not None:
        spans: list[Span] = [None] * len(source.shape)
        spans[0] = turn.images() if tensor.shape is not None and tensor.shape[0] != 1 else None
        spans[dim] = (turn.lookup(offsets(carry.received), axis), size)
        return DeviceBuffer(source).read(spans)
    # Of no rows the last turn of some images says nothing about how many images the next has.
    sizes = [1 if tensor.shape is not None and tensor.shape[0] == 1 else images, *source.shape[1:]]
    sizes[dim] = size
    return tf.reshape(source, stacked(sizes))


def joined(
    turn: Iteration,
    tensor: Tensor,
    value: Any,
    above: Any,
    region: Region,
    need: Region,
    fill: float | str,
    shared: bool = True,
) -> Any:
    """The rows `need` of a tensor, from those that the turn made and those that it received above them.

    One copy: what was made is moved to where there is room for the others.

    Args:
        turn: The turn.
        tensor: Whose rows they are.
        value: The rows that it made.
        above: Those that it received.
        region: Both.
        need: Those that are wanted.
        fill: What rows outside of the image are.
        shared: As for `DeviceBuffer.read`.
    """
    axis, received = turn.row_axis, turn.carry(tensor).received
    new = with_rows(region, axis, Interval(received.hi, region[axis].hi))
    result = turn.moved(value, new, need, fill, tensor, shared)
    inner = tuple(_common(have, wanted) for have, wanted in zip(region, need, strict=True))
    inner = with_rows(inner, axis, _common(received, need[axis]))
    if not np.any(inner[axis].size):
        return result
    part = turn.moved(above, with_rows(region, axis, received), inner, 0.0, tensor)
    tf_internals.prevent_cse(result)
    return DeviceBuffer(result).write(_places(turn, tensor, need, inner), part)


def _places(turn: Iteration, tensor: Tensor, have: Region, rows: Region) -> list[Span]:
    """Where some rows lie in what a turn has."""
    spans: list[Span] = [None] * len(tensor.shape or ())
    for axis, (dim, whole, own) in enumerate(zip(turn.dims(tensor), have, rows, strict=True)):
        if dim is not None and not whole.same(own):
            spans[dim] = (turn.lookup(own.lo - whole.lo, axis), turn.lookup(own.size, axis))
    return spans


def _common(rows: Interval, others: Interval) -> Interval:
    """The rows that are in both; none of `others` where there is none."""
    lo = np.clip(rows.lo, others.lo, others.hi)
    return Interval(lo, np.maximum(np.clip(rows.hi, others.lo, others.hi), lo))


def finish_gradient_rows(
    turn: Iteration, tensor: Tensor, value: Any, rows: Any, made: Region, region: Region, in_place: bool
) -> tuple[Any, Any]:
    """The rows of a gradient to which no later turn adds, and the sums so far of others, for the next turn.

    Args:
        turn: The turn.
        tensor: The gradient.
        value: The turn's own part.
        rows: What the turns before added to rows that this one completes, or hands on.
        made: Rows of the turn's own part.
        region: Rows that it completes; one of zeros where it completes none.
        in_place: Whether nobody else reads the turn's own part.
    """
    axis, carry = turn.row_axis, turn.carry(tensor)
    done, both = Interval(carry.passed.hi, carry.received.hi), Interval(carry.passed.lo, carry.received.hi)
    if not made[axis].covers(both):
        wider = with_rows(made, axis, made[axis].hull(both))
        value, made, in_place = turn.moved(value, made, wider, 0.0, tensor), wider, False
    spans = _places(turn, tensor, made, with_rows(region, axis, carry.received))
    buffer = DeviceBuffer(value)
    total = buffer.accumulate(spans, rows) if in_place else replaced(value, spans, buffer.read(spans) + rows)
    result = turn.moved(total, made, with_rows(region, axis, done), 0.0, tensor)
    passed = turn.moved(total, made, with_rows(region, axis, carry.passed), 0.0, tensor, False)
    return turn.moved(result, with_rows(region, axis, done), region, 0.0, tensor), passed


class CarriedState:
    """Rows that go from turn to turn."""

    def __init__(self, tensor: Tensor, dims: Sequence[int | None], region: Region, axis: int) -> None:
        self.tensors: list[Tensor] = []
        self.tensor = tensor
        sizes = [None if at == axis else int(rows.size[0]) for at, rows in enumerate(region)]
        self._shape = shape_of(tensor, dims, sizes)
        self._dim = dims[axis]

    def initial(self, loop: Whole) -> list[LoopState]:
        """No rows, of an image: the first turn knows how many images it has."""
        del loop
        with tf.device(self.tensor.node.device or None):
            sizes = [0 if at == self._dim else size or 1 for at, size in enumerate(self._shape)]
            none = tf.zeros(sizes, self.tensor.dtype)
        return [LoopState(none, (None, *self._shape[1:]))]

    def update(self, turn: Iteration, values: Sequence[Any]) -> list[Any]:
        """Those for the next turn."""
        del values
        rows = turn.passed_on(self.tensor)
        rows.set_shape((None, *self._shape[1:]))
        return [rows]

    def final(self, values: Sequence[Any]) -> list[Any]:
        """Nobody needs them any more."""
        del values
        return []


class SavedState:
    """Rows that a forward loop keeps for the backward loop, one tile's after the other's."""

    def __init__(self, save: SavedRows) -> None:
        self.tensors = [save.saved]
        self._save = save

    def initial(self, loop: Whole) -> list[LoopState]:
        """Anything: every row is written."""
        saved = self._save.saved
        assert saved.shape is not None
        dims = [loop.batch if dim is None else int(dim) for dim in saved.shape]
        with tf.device(saved.node.device or None):
            return [LoopState(empty_buffer(stacked(dims), saved.dtype, False), saved.shape)]

    def update(self, turn: Iteration, values: Sequence[Any]) -> list[Any]:
        """With the rows at the borders that lie in this tile."""
        (handle,) = values
        tensor = self._save.tensor
        for rows, places in self._save.slots:
            spans: list[Span] = [None] * len(handle.shape)
            spans[0] = turn.images() if tensor.shape is not None and tensor.shape[0] != 1 else None
            axis = turn.row_axis
            spans[turn.row_dim(tensor)] = (turn.lookup(places, axis), turn.lookup(rows.size, axis))
            own = turn.fit(tensor, with_rows(self._save.region, axis, rows), 0.0)
            handle = DeviceBuffer(handle).write(spans, own)
        return [handle]

    def final(self, values: Sequence[Any]) -> list[Any]:
        """As they are."""
        return list(values)
