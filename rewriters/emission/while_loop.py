"""Emits a `tf.while_loop` over tiles, in ascending or descending order.

Its state is a list of variables, each with an initial value: buffers, sums, carried rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
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
    states: Sequence[Sequence[LoopState]],
    body: Callable[[Any, list[list[Any]]], list[list[Any]]],
    order: IterationOrder,
) -> list[list[Any]]:
    """Run `body(tile, values)` for every tile, one iteration at a time, and return the final values of the variables.

    Args:
        num_iterations: Number of tiles, an integer or a scalar tensor.
        states: The variables, in groups.
        body: Maps the index of the tile and the values of the variables to the new values, in the same groups.
        order: Order of the tiles.
    """
    num_iterations = tf.convert_to_tensor(num_iterations, tf.int32)

    def step(iteration: Any, values: list[list[Any]]) -> tuple[Any, list[list[Any]]]:
        tile = iteration if order is IterationOrder.ASCENDING else num_iterations - 1 - iteration
        return iteration + 1, body(tile, values)

    _, values = tf.while_loop(
        lambda iteration, _: iteration < num_iterations,
        step,
        (tf.constant(0), [[state.initial for state in group] for group in states]),
        shape_invariants=(tf.TensorShape([]), [[tf.TensorShape(state.shape) for state in group] for group in states]),
        parallel_iterations=1,
    )
    return values
