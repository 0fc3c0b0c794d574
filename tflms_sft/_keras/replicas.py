"""Steps on several replicas: one rewritten step for all replicas together.

Keras runs a step once per replica inside `strategy.run`. Each replica stops where gradients, moving statistics and
metrics are merged across replicas, which a function traced inside a replica cannot contain. The call of `strategy.run`
is therefore replaced by one step whose arguments are the batches of all replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from rewriters.ir import tf_internals

__all__: list[str] = []


class StrategyProxy:
    """A `tf.distribute.Strategy` that runs the step of a model differently and forwards everything else.

    Args:
        strategy: The strategy.
        is_step: Tells whether a function that is passed to `run` is the step.
        replacement: Called in place of the step with the same arguments, outside of any replica.
    """

    def __init__(self, strategy: Any, is_step: Callable[[Any], bool], replacement: Callable[..., Any]) -> None:
        self._strategy = strategy
        self._is_step = is_step
        self._replacement = replacement

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Class of the strategy, because Keras tests for some classes."""
        return type(self._strategy)

    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        """Run a function as `tf.distribute.Strategy.run` does, or the replacement of the step."""
        if self._is_step(fn):
            return self._replacement(*args, **(kwargs or {}))
        return self._strategy.run(fn, args, kwargs, options)


def num_replicas(strategy: Any) -> int:
    """Return the number of replicas of a strategy; 1 for `None`."""
    return 1 if strategy is None else int(strategy.num_replicas_in_sync)


def merges_replicas(strategy: Any) -> bool:
    """Tell whether a step ends in merge calls, which a function traced inside a replica cannot contain.

    The update of a `MirroredStrategy` does so also with one device, as on a machine with one GPU.
    """
    return num_replicas(strategy) > 1 or isinstance(strategy, tf.distribute.MirroredStrategy)


class Replicas:
    """Converts between the step per replica and one function over the tensors of all replicas.

    Args:
        strategy: The strategy.
        step: The step of one replica on its share of a batch.
    """

    def __init__(self, strategy: Any, step: Callable[[Any], Any]) -> None:
        self._strategy = strategy
        self._step = step
        self._results: Any = None

    @property
    def devices(self) -> tuple[str, ...]:
        """GPUs of several replicas; empty for one replica, and on CPU devices, which share their memory."""
        names = [tf_internals.short_device(name) for name in self._strategy.extended.worker_devices]
        return tuple(names) if len(names) > 1 and all(name.startswith("GPU") for name in names) else ()

    def split(self, values: Any) -> Any:
        """Return each distributed value as a tuple with one tensor per replica."""
        return tf.nest.map_structure(lambda value: tuple(self._strategy.experimental_local_results(value)), values)

    def step(self, shares: Any) -> Any:
        """Run the step of every replica, and return each result as a tuple with one tensor per replica."""
        self._results = self._strategy.run(self._step, args=(self.merge(shares),))
        return self.split(self._results)

    def merge(self, shares: Any) -> Any:
        """Return the distributed batch whose shares per replica are given; the inverse of `split`."""
        if isinstance(shares, tuple) and all(share is None or tf.is_tensor(share) for share in shares):
            return self._distributed(shares)
        if isinstance(shares, dict):
            return {key: self.merge(share) for key, share in shares.items()}
        inner = map(self.merge, shares)
        return type(shares)(*inner) if hasattr(shares, "_fields") else type(shares)(inner)

    def pack_results(self, tensors: Any) -> Any:
        """Return flat results of `step` in the structure that `strategy.run` returns."""
        flat, packed = iter(tf.nest.flatten(tensors)), []
        for value in tf.nest.flatten(self._results):
            shares = tuple(next(flat) for _ in self._strategy.experimental_local_results(value))
            packed.append(self._distributed(shares))
        return tf.nest.pack_sequence_as(self._results, packed)

    def _distributed(self, shares: tuple[Any, ...]) -> Any:
        if len(shares) == 1:  # The replicas share one value.
            return shares[0]
        return self._strategy.experimental_distribute_values_from_function(
            lambda context: shares[context.replica_id_in_sync_group]
        )
