"""Emits a `tf.while_loop` over tiles, in ascending or descending order.

Its state is a list of variables, each with an initial value: buffers, sums, carried rows.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from rewriters.tiling.tile_planner import IterationOrder

__all__: list[str] = []


@dataclasses.dataclass
class LoopState:
    """A variable of a loop.

    Attributes:
        initial: Value before the first iteration.
        shape: Shape in every iteration, with `None` for sizes that vary.
    """

    initial: Any
    shape: tuple[int | None, ...]


def emit_while_loop(
    num_iterations: Any,
    states: Sequence[LoopState],
    body: Callable[[Any, list[Any]], Sequence[Any]],
    order: IterationOrder,
) -> list[Any]:
    """Run `body(tile, values)` for every tile, one iteration at a time.

    Args:
        num_iterations: Number of tiles, an integer or a scalar tensor.
        states: The variables.
        body: Maps the index of the tile and the values of the variables to the new values.
        order: Order of the tiles.

    Returns:
        Final values of the variables.
    """
    num_iterations = tf.convert_to_tensor(num_iterations, tf.int32)

    def step(iteration: Any, *values: Any) -> tuple[Any, ...]:
        tile = iteration if order is IterationOrder.ASCENDING else num_iterations - 1 - iteration
        return (iteration + 1, *body(tile, list(values)))

    shapes = (tf.TensorShape([]), *(tf.TensorShape(state.shape) for state in states))
    result = tf.while_loop(
        lambda iteration, *_: iteration < num_iterations,
        step,
        (tf.constant(0), *(state.initial for state in states)),
        shape_invariants=shapes,
        parallel_iterations=1,
    )
    return list(result[1:])


def grouped(values: Sequence[Any], sizes: Sequence[int]) -> Iterator[list[Any]]:
    """Yield consecutive groups of the values."""
    remaining = iter(values)
    return (list(itertools.islice(remaining, size)) for size in sizes)
