"""Emits what row tiles hand on: rows that come in are joined with those that a turn makes, and others go out.

Nothing here writes in place behind TensorFlow's back: a value of a turn, unlike a variable of the loop, may have other
readers. An update of a strided slice copies where it has to, and otherwise the few rows alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from rewriters.carries import Carry, Save, offsets, shape_of
from rewriters.graph import Tensor
from rewriters.intervals import Interval
from rewriters.loops import LoopState
from rewriters.results import Turn, Whole
from rewriters.storage import DeviceBuffer, Span, allocate, replaced, stacked
from rewriters.tiles import Region, with_rows

__all__: list[str] = []


def received(turn: Turn, tensor: Tensor, carry: Carry, source: Any, images: Any) -> Any:
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
    turn: Turn, tensor: Tensor, value: Any, rows: Any, carry: Carry, region: Region, need: Region, fill: float | str
) -> Any:
    """The rows `need` of a tensor, from those that the turn made and those that it received above them.

    One copy: what was made is moved into place, with room for the others.
    """
    axis = turn.row_axis
    new = with_rows(region, axis, Interval(carry.received.hi, region[axis].hi))
    result = turn.moved(value, new, need, fill, tensor)
    lo = np.clip(carry.received.lo, need[axis].lo, need[axis].hi)
    wanted = Interval(lo, np.maximum(np.clip(carry.received.hi, need[axis].lo, need[axis].hi), lo))
    inner = tuple(Interval(np.maximum(h.lo, n.lo), np.minimum(h.hi, n.hi)) for h, n in zip(region, need, strict=True))
    inner = with_rows(inner, axis, wanted)
    part = turn.moved(rows, with_rows(region, axis, carry.received), inner, 0.0, tensor)
    spans: list[Span] = [None] * len(tensor.shape or ())
    for at, (dim, own, whole) in enumerate(zip(turn.dims(tensor), inner, need, strict=True)):
        if dim is not None and not own.same(whole):
            spans[dim] = (turn.lookup(own.lo - whole.lo, at), turn.lookup(own.size, at))
    return replaced(result, spans, part)


def completed(
    turn: Turn, tensor: Tensor, value: Any, rows: Any, carry: Carry, made: Region, region: Region
) -> tuple[Any, Any]:
    """The rows of a gradient to which no later turn adds, and its part of others, for the next turn.

    Args:
        turn: The turn.
        tensor: The gradient.
        value: The turn's own part.
        rows: What the turns before added to rows that this one completes.
        carry: Which rows are received and passed on.
        made: Rows of the turn's own part.
        region: Rows that it completes; one of zeros where it completes none.
    """
    axis = turn.row_axis
    done = Interval(carry.passed.hi, carry.received.hi)

    def part(rows: Interval) -> Any:
        return turn.moved(value, made, with_rows(region, axis, rows), 0.0, tensor)

    last = part(carry.received) + rows
    if np.all(carry.received.lo >= carry.passed.hi):
        result = _replaced_rows(turn, tensor, part(done), last, done, carry.received)
        passed = part(carry.passed)
    else:  # Rows thinner than what they share: some are handed on from turn to turn.
        both = Interval(carry.passed.lo, carry.received.hi)
        total = _replaced_rows(turn, tensor, part(both), last, both, carry.received)
        result, passed = (
            turn.moved(total, with_rows(region, axis, both), with_rows(region, axis, rows), 0.0, tensor)
            for rows in (done, carry.passed)
        )
    return turn.moved(result, with_rows(region, axis, done), region, 0.0, tensor), passed


def _replaced_rows(turn: Turn, tensor: Tensor, value: Any, rows: Any, have: Interval, where: Interval) -> Any:
    """A value that holds the rows `have`, with some of them replaced."""
    axis = turn.row_axis
    spans: list[Span] = [None] * len(tensor.shape or ())
    spans[turn.row_dim(tensor)] = (turn.lookup(where.lo - have.lo, axis), turn.lookup(where.size, axis))
    return replaced(value, spans, rows)


class PassedOn:
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

    def update(self, turn: Turn, values: Sequence[Any]) -> list[Any]:
        """Those for the next turn."""
        del values
        rows = turn.passed_on(self.tensor)
        rows.set_shape((None, *self._shape[1:]))
        return [rows]

    def final(self, values: Sequence[Any]) -> list[Any]:
        """Nobody needs them any more."""
        del values
        return []


class Saved:
    """Rows that a forward loop keeps for the backward loop, one tile's after the other's."""

    def __init__(self, save: Save, region: Region) -> None:
        self.tensors = [save.saved]
        self._save = save
        self._region = region

    def initial(self, loop: Whole) -> list[LoopState]:
        """Anything: every row is written."""
        saved = self._save.saved
        assert saved.shape is not None
        dims = [loop.batch if dim is None else int(dim) for dim in saved.shape]
        with tf.device(saved.node.device or None):
            return [LoopState(allocate(stacked(dims), saved.dtype, False), saved.shape)]

    def update(self, turn: Turn, values: Sequence[Any]) -> list[Any]:
        """With the rows at the borders that lie in this tile."""
        (handle,) = values
        tensor = self._save.tensor
        for rows, places in self._save.slots:
            spans: list[Span] = [None] * len(handle.shape)
            spans[0] = turn.images() if tensor.shape is not None and tensor.shape[0] != 1 else None
            axis = turn.row_axis
            spans[turn.row_dim(tensor)] = (turn.lookup(places, axis), turn.lookup(rows.size, axis))
            handle = DeviceBuffer(handle).write(spans, turn.fit(tensor, with_rows(self._region, axis, rows), 0.0))
        return [handle]

    def final(self, values: Sequence[Any]) -> list[Any]:
        """As they are."""
        return list(values)
