"""Emits carried rows: joins received rows with those that an iteration computes, and passes rows on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from rewriters.emission.buffers import DeviceBuffer, Span, replaced, stacked
from rewriters.emission.loop_outputs import Iteration, LoopContext, LoopOutput, initial_state
from rewriters.emission.while_loop import LoopState
from rewriters.ir import tf_internals
from rewriters.ir.graph import Tensor
from rewriters.rules.intervals import Interval
from rewriters.tiling.row_frontiers import CarriedRows, SavedRows, offsets, shape_of
from rewriters.tiling.tile_planner import Region, with_rows

__all__: list[str] = []


def received(iteration: Iteration, tensor: Tensor, carry: CarriedRows, source: Any, images: Any) -> Any:
    """Return the rows of a tensor that an iteration receives.

    Args:
        iteration: The iteration.
        tensor: Tensor whose rows are carried.
        carry: The carried rows.
        source: State variable of the loop, or the tensor that holds all saved rows.
        images: Batch size of the iteration.
    """
    axis = iteration.row_axis
    dim, size = iteration.row_dim(tensor), iteration.lookup(carry.received.size, axis)
    if carry.saved is not None:
        spans: list[Span] = [None] * len(source.shape)
        spans[0] = _batch_span(iteration, tensor)
        spans[dim] = (iteration.lookup(offsets(carry.received), axis), size)
        return DeviceBuffer(source, iteration.loop.device).read(spans)
    # The last tile of some images passes on no rows, so that its batch size may differ from that of the next images.
    sizes = [1 if tensor.shape is not None and tensor.shape[0] == 1 else images, *source.shape[1:]]
    sizes[dim] = size
    return tf.reshape(source, stacked(sizes))


def _batch_span(iteration: Iteration, tensor: Tensor) -> Span:
    return iteration.batch_span() if tensor.shape is not None and tensor.shape[0] != 1 else None


def joined(
    iteration: Iteration,
    tensor: Tensor,
    *,
    value: Any,
    above: Any,
    region: Region,
    need: Region,
    fill: float | str,
    shared: bool = True,
) -> Any:
    """Return the rows `need` of a tensor from the computed rows and the received rows above them, with one copy.

    The computed rows are padded, and the received rows written into the padding.

    Args:
        iteration: The iteration.
        tensor: The tensor.
        value: Computed rows.
        above: Received rows.
        region: Computed and received rows.
        need: Rows of the result.
        fill: Value of rows outside of the image.
        shared: As in `DeviceBuffer.read`.
    """
    axis, carry = iteration.row_axis, iteration.carried_rows(tensor).received
    computed = with_rows(region, axis, Interval(carry.hi, region[axis].hi))
    result = iteration.crop_and_pad(value, computed, need, fill, tensor, shared)
    inner = tuple(_intersection(have, needed) for have, needed in zip(region, need, strict=True))
    inner = with_rows(inner, axis, _intersection(carry, need[axis]))
    if not np.any(inner[axis].size):
        return result
    part = iteration.crop_and_pad(above, with_rows(region, axis, carry), inner, 0.0, tensor)
    tf_internals.prevent_cse(result)
    return DeviceBuffer(result, iteration.loop.device).write(_spans_in(iteration, tensor, have=need, rows=inner), part)


def _spans_in(iteration: Iteration, tensor: Tensor, *, have: Region, rows: Region) -> list[Span]:
    """Return the place of `rows` in a value that holds `have`."""
    spans: list[Span] = [None] * len(tensor.shape or ())
    for axis, (dim, held, part) in enumerate(zip(iteration.dims(tensor), have, rows, strict=True)):
        if dim is not None and not held.same(part):
            spans[dim] = (iteration.lookup(part.lo - held.lo, axis), iteration.lookup(part.size, axis))
    return spans


def _intersection(rows: Interval, others: Interval) -> Interval:
    """Return the rows in both intervals; an empty interval inside `others` where there are none."""
    lo = np.clip(rows.lo, others.lo, others.hi)
    return Interval(lo, np.maximum(np.clip(rows.hi, others.lo, others.hi), lo))


def finish_gradient_rows(
    iteration: Iteration,
    tensor: Tensor,
    *,
    value: Any,
    partial_sums: Any,
    computed: Region,
    region: Region,
    in_place: bool,
) -> tuple[Any, Any]:
    """Return the rows of a gradient that no later iteration adds to, and the partial sums for the next iteration.

    Args:
        iteration: The iteration.
        tensor: The gradient.
        value: Rows that the iteration computed.
        partial_sums: Sums of earlier iterations, in rows that this one completes or passes on.
        computed: Rows of `value`.
        region: Rows that the iteration completes; one row of zeros where it completes none.
        in_place: Whether no other op reads `value`.
    """
    axis, carry = iteration.row_axis, iteration.carried_rows(tensor)
    done, both = Interval(carry.passed.hi, carry.received.hi), Interval(carry.passed.lo, carry.received.hi)
    if not computed[axis].covers(both):
        wider = with_rows(computed, axis, computed[axis].hull(both))
        value, computed, in_place = iteration.crop_and_pad(value, computed, wider, 0.0, tensor), wider, False
    spans = _spans_in(iteration, tensor, have=computed, rows=with_rows(region, axis, carry.received))
    buffer = DeviceBuffer(value, iteration.loop.device)
    if in_place:
        total = buffer.accumulate(spans, partial_sums)
    else:
        total = replaced(value, spans, buffer.read(spans) + partial_sums)
    finished, passed = (with_rows(region, axis, rows) for rows in (done, carry.passed))
    result = iteration.crop_and_pad(total, computed, finished, 0.0, tensor)
    passed_rows = iteration.crop_and_pad(total, computed, passed, 0.0, tensor, shared=False)
    return iteration.crop_and_pad(result, finished, region, 0.0, tensor), passed_rows


class CarriedState(LoopOutput):
    """State variable with rows that one iteration passes to the next."""

    def __init__(self, tensor: Tensor, *, dims: Sequence[int | None], region: Region, axis: int) -> None:
        super().__init__()
        self.tensor = tensor
        sizes = [None if other == axis else int(rows.size[0]) for other, rows in enumerate(region)]
        self._shape = shape_of(tensor, dims, sizes)
        self._dim = dims[axis]

    def initial(self, loop: LoopContext) -> list[LoopState]:
        """Return zero rows of one image; the batch size is not known before the first iteration."""
        del loop
        with tf.device(self.tensor.node.device or None):
            sizes = [0 if dim == self._dim else size or 1 for dim, size in enumerate(self._shape)]
            empty = tf.zeros(sizes, self.tensor.dtype)
        return [LoopState(empty, (None, *self._shape[1:]))]

    def update(self, iteration: Iteration, values: Sequence[Any]) -> list[Any]:
        """Return the rows for the next iteration."""
        del values
        rows = iteration.rows_to_pass(self.tensor)
        rows.set_shape((None, *self._shape[1:]))
        return [rows]

    def final(self, values: Sequence[Any]) -> list[Any]:
        """Return nothing: no op reads the rows after the last iteration."""
        del values
        return []


class SavedState(LoopOutput):
    """Buffer of rows that a forward loop saves for the backward loop, tile after tile."""

    def __init__(self, save: SavedRows) -> None:
        super().__init__(save.saved)
        self._save = save

    def initial(self, loop: LoopContext) -> list[LoopState]:
        """Return an uninitialised buffer: the iterations write every row."""
        saved = self._save.saved
        return [initial_state(loop, saved, saved.dtype, zero=False)]

    def update(self, iteration: Iteration, values: Sequence[Any]) -> list[Any]:
        """Write the rows at the borders of backward tiles that lie in this tile."""
        (handle,) = values
        tensor, axis = self._save.tensor, iteration.row_axis
        for rows, places in self._save.slots:
            spans: list[Span] = [None] * len(handle.shape)
            spans[0] = _batch_span(iteration, tensor)
            spans[iteration.row_dim(tensor)] = (iteration.lookup(places, axis), iteration.lookup(rows.size, axis))
            part = iteration.fit(tensor, with_rows(self._save.region, axis, rows), 0.0)
            handle = DeviceBuffer(handle, iteration.loop.device).write(spans, part)
        return [handle]
