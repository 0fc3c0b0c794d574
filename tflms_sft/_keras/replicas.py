"""Training on several replicas: the step that is rewritten is that of all of them together.

Keras runs `train_step` once for each replica, and what a replica does ends where gradients, moving statistics and
metrics of all are joined. A function traced inside of a replica cannot contain that, so Keras's call of
`strategy.run` is replaced, by one step that has the batches of all replicas as arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

__all__: list[str] = []


class RunInstead:
    """A strategy that runs one function in another way, and is itself in everything else.

    Args:
        strategy: The strategy.
        function: What Keras asks it to run.
        instead: Gets the same arguments, outside of any replica.
    """

    def __init__(self, strategy: Any, function: Callable[..., Any], instead: Callable[..., Any]) -> None:
        self._strategy = strategy
        self._function = function
        self._instead = instead

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """That of the strategy: Keras asks for some kinds."""
        return type(self._strategy)

    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """As `tf.distribute.Strategy.run`."""
        if fn == self._function:
            return self._instead(*args, **(kwargs or {}))
        return self._strategy.run(fn, args, kwargs, options)


def number_of(strategy: Any) -> int:
    """Replicas of a strategy, or of none."""
    return 1 if strategy is None else int(strategy.num_replicas_in_sync)


def joins(strategy: Any) -> bool:
    """Whether steps end in what no function traced inside of a replica can contain.

    Of a mirrored strategy the update does, also with one device, as on a machine with one GPU.
    """
    return number_of(strategy) > 1 or isinstance(strategy, tf.distribute.MirroredStrategy)


class Replicas:
    """The train step of all replicas of a model as a function of tensors, and back.

    Args:
        strategy: The strategy.
        step: What each replica does with its part of a batch.
    """

    def __init__(self, strategy: Any, step: Callable[[Any], Any]) -> None:
        self._strategy = strategy
        self._step = step
        self._results: Any = None

    def apart(self, values: Any) -> Any:
        """Each value as a tuple with one for each replica."""
        return tf.nest.map_structure(lambda value: tuple(self._strategy.experimental_local_results(value)), values)

    def step(self, parts: Any) -> Any:
        """What the replicas make of a batch, each result as a tuple again."""
        self._results = self._strategy.run(self._step, args=(self.together(parts),))
        return self.apart(self._results)

    def together(self, parts: Any) -> Any:
        """The batch of which `parts` are what the replicas have."""
        if isinstance(parts, tuple) and all(part is None or tf.is_tensor(part) for part in parts):
            return self._joined(parts)
        if isinstance(parts, dict):
            return {key: self.together(part) for key, part in parts.items()}
        inner = map(self.together, parts)
        return type(parts)(*inner) if hasattr(parts, "_fields") else type(parts)(inner)

    def results(self, found: Any) -> Any:
        """The results as Keras takes them from `strategy.run`."""
        flat, packed = iter(tf.nest.flatten(found)), []
        for value in tf.nest.flatten(self._results):
            packed.append(self._joined(tuple(next(flat) for _ in self._strategy.experimental_local_results(value))))
        return tf.nest.pack_sequence_as(self._results, packed)

    def _joined(self, parts: tuple[Any, ...]) -> Any:
        if len(parts) == 1:  # The replicas have it in common.
            return parts[0]
        return self._strategy.experimental_distribute_values_from_function(
            lambda context: parts[context.replica_id_in_sync_group]
        )
