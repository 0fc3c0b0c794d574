"""Random numbers without state, as of dropout, for the rows of a tile.

The generator is a function of a key and of a counter. Each value of the counter gives a group of numbers, which fill
the result in order, on all devices (tensorflow/core/kernels/random_op_cpu.h, stateless_random_ops_v2.cc). A tile draws
the numbers of its rows with a later counter. Ops on images draw all numbers together: rows of a tile of an image lie in
many places.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from rewriters.errors import NotTileableError
from rewriters.rules.intervals import Interval
from rewriters.rules.registry import AxisPlan, Emitter, OpView, Rule, TileKind, tiling_rule

__all__: list[str] = []


@tiling_rule("StatelessRandomUniformV2", "StatelessRandomNormalV2")
class RandomNumbers(Rule):
    """Random numbers of sequences; the operands are a shape, a key, a counter and an algorithm."""

    cheap = True
    moves_rows = True

    def data(self, op: OpView) -> list[int]:
        """Return no operand."""
        return []

    def shape_operands(self, op: OpView) -> list[int]:
        """Return the shape."""
        return [0]

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Refuse: without barriers each iteration slices the numbers, which are drawn once."""
        raise NotTileableError("it draws random numbers")

    def result_kind_gathered(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return `FULL` for sequences."""
        out = op.node.out()
        split = [dim for dim in op.layout(out).dims if dim is not None]
        if len(split) != 1 or len(op.layout(out).dims) < 2:
            raise NotTileableError("it draws random numbers for images")
        return TileKind.FULL

    def operand_rows_for_result(self, op: OpView, axis: int, out: Interval) -> AxisPlan:
        """Require no rows."""
        return AxisPlan(out, out, [None] * len(op.node.inputs))

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Draw the numbers of the tile: together if they lie in one place, otherwise for each place."""
        _, key, counter, algorithm = operands
        sizes = tf.cast(emitter.made_shape(op.node), op.node.inputs[0].dtype)
        spans = emitter.result_spans(op.node)
        dims = [dim for dim, span in enumerate(spans) if span is not None]
        if not dims:
            return emitter.clone(op.node, [sizes, key, counter, algorithm])
        full = [emitter.whole_batch(), *(op.node.out().shape or ())[1:]]
        last = dims[-1]
        inner = math.prod(full[last + 1 :])
        begin, rows = spans[last]  # type: ignore[misc]
        group = numbers_per_count(op.node.out().dtype)

        def draw(place: Any) -> Any:
            """Return the numbers of the tile's rows at the flat index `place` of the outer dimensions."""
            first = (place * tf.cast(full[last], tf.int64) + tf.cast(begin, tf.int64)) * inner
            count = tf.cast(rows, tf.int64) * inner
            numbers = getattr(tf.raw_ops, op.node.op)(
                shape=[count + group - 1],
                key=key,
                counter=later(counter, first // group),
                alg=algorithm,
                dtype=op.node.out().dtype,
            )
            return tf.slice(numbers, [first % group], [count])

        if last == 0:
            return [tf.reshape(draw(tf.zeros([], tf.int64)), sizes)]
        places = tf.zeros([1], tf.int64)
        for size, span in zip(full[:last], spans[:last], strict=True):
            first, number = (0, size) if span is None else span
            indices = tf.cast(first, tf.int64) + tf.range(tf.cast(number, tf.int64))
            places = tf.reshape(places[:, None] * tf.cast(size, tf.int64) + indices[None], [-1])
        spec = tf.TensorSpec([None], op.node.out().dtype)
        drawn = tf.map_fn(draw, places, parallel_iterations=1, fn_output_signature=spec)
        return [tf.reshape(drawn, sizes)]


def numbers_per_count(dtype: tf.DType) -> int:
    """Return the random numbers per value of the counter, each of which has 32 bits or, in double precision, 64."""
    return 2 if dtype == tf.float64 else 4


def later(counter: Any, steps: Any) -> Any:
    """Return a counter of 128 bits, in two parts with the lower one first, after some steps."""
    low, high = tf.unstack(tf.bitcast(counter, tf.uint64))
    new = low + tf.cast(steps, tf.uint64)
    return tf.bitcast(tf.stack([new, high + tf.cast(new < low, tf.uint64)]), counter.dtype)
