"""A tile loop as a `tf.while_loop` with named state and a direction.

State is generic: a variable with an initial value and an update per turn. Buffers,
sums and rows that are handed on are states.
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
    """One variable that a loop carries.

    Attributes:
        initial: Value before the first turn.
        shape: Shape that holds in every turn (unknown sizes are `None`).
    """

    initial: Any
    shape: tuple[int | None, ...]


def emit_while_loop(
    turns: Any,
    states: Sequence[LoopState],
    body: Callable[[Any, list[Any]], Sequence[Any]],
    direction: IterationOrder,
) -> list[Any]:
    """Run `body(tile, values)` for every tile, one turn at a time.

    Args:
        turns: Number of tiles, a number or a scalar tensor.
        states: The variables.
        body: Maps the tile's index and the variables to their new values.
        direction: Whether tile 0 or the last tile comes first.

    Returns:
        Final values of the variables.
    """
    turns = tf.convert_to_tensor(turns, tf.int32)

    def step(turn: Any, *values: Any) -> tuple[Any, ...]:
        tile = turn if direction is IterationOrder.ASCENDING else turns - 1 - turn
        return (turn + 1, *body(tile, list(values)))

    shapes = (tf.TensorShape([]), *(tf.TensorShape(state.shape) for state in states))
    result = tf.while_loop(
        lambda turn, *_: turn < turns,
        step,
        (tf.constant(0), *(state.initial for state in states)),
        shape_invariants=shapes,
        parallel_iterations=1,
    )
    return list(result[1:])
