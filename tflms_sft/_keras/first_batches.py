"""Batches that are taken out of a data set before a step on them is measured.

A data set prepares batches beside the step, in the same memory where the device is a CPU: what Keras makes of arrays
has several of them ahead. What it takes meanwhile is none of the step's. So the first batch is fetched before, it is
waited for until the data set has as many ahead as it wants, and then nobody takes one from it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from rewriters.device import properties

QUIET_SECONDS = 0.05
"""How long nothing may have changed, at least."""

MOST_SECONDS = 5.0
"""How long is waited at most: a data set may prepare hundreds of batches, one after another."""

_PAUSE_SECONDS = 0.01


def can_be_taken(iterator: Any) -> bool:
    """Whether batches of dense tensors can be taken out of an iterator and be handed on by another one."""
    if not isinstance(iterator, tf.data.Iterator):
        return False
    return all(isinstance(spec, tf.TensorSpec) for spec in tf.nest.flatten(iterator.element_spec))


class PeekedBatches:
    """The batches of an execution, out of an iterator.

    Args:
        iterator: Of a data set; what is left in it comes afterwards.
        number: How many at most. Those behind the first stay where they are until they are asked for: there may be
            many. As each is replaced by another one, they do not count either.

    Attributes:
        first: The first batch.

    Raises:
        StopIteration: If there are none left.
    """

    def __init__(self, iterator: Any, number: int) -> None:
        begun = time.monotonic()
        self.first = next(iterator)
        self._seconds = time.monotonic() - begun
        self._iterator, self._number = iterator, number

    def again(self) -> Any:
        """An iterator of these batches, whose shapes are as unknown as they were."""
        spec = self._iterator.element_spec
        if self._number > 1:

            def generate() -> Iterator[Any]:
                yield self.first
                yield from itertools.islice(self._iterator, self._number - 1)

            return iter(tf.data.Dataset.from_generator(generate, output_signature=spec))

        def unknown(*batch: Any) -> Any:  # Without a copy.
            flat = zip(tf.nest.flatten(batch), tf.nest.flatten(spec), strict=True)
            relaxed = [tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=spec.shape) for tensor, spec in flat]
            return tf.nest.pack_sequence_as(spec, relaxed)

        return iter(tf.data.Dataset.from_tensors(self.first).map(unknown))

    def wait_until_quiet(self) -> None:
        """Wait until the data set has prepared what it wants to have ahead.

        While it prepares one batch nothing need change for as long as that takes, which the first one tells. Where
        the device keeps no statistics nobody can tell, and nothing is measured.
        """
        if not properties.has_allocator_stats():
            return
        _wait_until_quiet(min(max(self._seconds, QUIET_SECONDS), MOST_SECONDS), _in_use)

    def on_device(self) -> list[int]:
        """Sizes of the tensors of one batch that are in the memory that is measured."""
        tensors = tf.nest.flatten(self.first)
        return [int(tf.size(t)) * t.dtype.size for t in tensors if t.device.endswith(properties.name())]


def _in_use() -> int:
    return int(tf.config.experimental.get_memory_info(properties.name())["current"])


def _wait_until_quiet(quiet: float, look: Callable[[], int]) -> None:
    end = time.monotonic() + MOST_SECONDS
    seen, since = look(), time.monotonic()
    while time.monotonic() < min(since + quiet, end):
        time.sleep(_PAUSE_SECONDS)
        now = look()
        if now != seen:
            seen, since = now, time.monotonic()
