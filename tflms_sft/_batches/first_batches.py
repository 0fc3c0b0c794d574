"""Peeking at the first batches, so that the data set is idle while the first step is measured.

A data set prefetches batches while a step runs; on a CPU it does so in the memory that is measured. The first batch is
therefore fetched before the step. Then the callback waits until prefetching has filled its buffer, and nothing takes
another batch during the measurement.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from rewriters.ir.device_detection import planned_device

MIN_STABLE_SECONDS = 0.05
"""Shortest time for which the bytes in use must be constant."""

MAX_WAIT_SECONDS = 5.0
"""Longest wait: a data set may prefetch hundreds of batches."""

_POLL_SECONDS = 0.01


_TENSOR_SPECS = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)


def can_peek(iterator: Any) -> bool:
    """Tell whether batches can be taken out of an iterator and replayed: it is of a data set of tensors."""
    if not isinstance(iterator, tf.data.Iterator):
        return False
    return all(isinstance(spec, _TENSOR_SPECS) for spec in tf.nest.flatten(iterator.element_spec))


def varies_in_size(iterator: Any, *, leading: bool = False) -> bool:
    """Tell whether batches of a data set may differ in size along other axes than the first; with `leading`, along any.

    Components of ragged and sparse tensors always may.
    """
    specs, first = tf.nest.flatten(iterator.element_spec), 0 if leading else 1
    return any(not isinstance(spec, tf.TensorSpec) or spec.shape.rank and None in spec.shape[first:] for spec in specs)


class PeekedBatches:
    """The batches of one execution, the first of which has been fetched already.

    Args:
        iterator: Iterator of a data set. The batches behind these remain in it.
        number: Number of batches at most. Those behind the first are fetched when they are needed; each replaces
            another one and so does not change the measured peak.

    Attributes:
        first: The first batch.
        spec: Specs of a batch, possibly with unknown sizes.

    Raises:
        StopIteration: If the iterator is exhausted.
    """

    def __init__(self, iterator: Any, number: int) -> None:
        begun = time.monotonic()
        self.first = next(iterator)
        self._fetch_seconds = time.monotonic() - begun
        self._iterator, self._number = iterator, number
        self.spec = iterator.element_spec

    def replay(self) -> Any:
        """Return an iterator over these batches with the element spec of the original iterator."""
        spec = self.spec
        if self._number > 1 or not all(isinstance(leaf, tf.TensorSpec) for leaf in tf.nest.flatten(spec)):

            def generate() -> Iterator[Any]:
                yield self.first
                yield from itertools.islice(self._iterator, self._number - 1)

            return iter(tf.data.Dataset.from_generator(generate, output_signature=spec))

        def with_spec(*batch: Any) -> Any:  # Without a copy.
            flat = zip(tf.nest.flatten(batch), tf.nest.flatten(spec), strict=True)
            relaxed = [tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=spec.shape) for tensor, spec in flat]
            return tf.nest.pack_sequence_as(spec, relaxed)

        return iter(tf.data.Dataset.from_tensors(self.first).map(with_spec))

    def wait_until_prefetched(self) -> None:
        """Wait until the data set has prefetched all the batches that it buffers.

        The bytes in use may be constant while one batch is prepared, so they must be constant for as long as the first
        batch took. A device without memory statistics is not measured and needs no wait.
        """
        if not planned_device().has_allocator_stats:
            return
        wait_until_stable(min(max(self._fetch_seconds, MIN_STABLE_SECONDS), MAX_WAIT_SECONDS), _bytes_in_use)

    def bytes_on_device(self) -> list[int]:
        """Return the sizes of those tensors of the first batch that lie in the measured memory."""
        tensors = tf.nest.flatten(self.first, expand_composites=True)
        return [int(tf.size(t)) * t.dtype.size for t in tensors if t.device.endswith(planned_device().name)]


def _bytes_in_use() -> int:
    return int(tf.config.experimental.get_memory_info(planned_device().name)["current"])


def wait_until_stable(stable_seconds: float, read: Callable[[], int]) -> None:
    """Wait until `read` has returned one value for `stable_seconds`, at most `MAX_WAIT_SECONDS`."""
    end = time.monotonic() + MAX_WAIT_SECONDS
    last, since = read(), time.monotonic()
    while time.monotonic() < min(since + stable_seconds, end):
        time.sleep(_POLL_SECONDS)
        value = read()
        if value != last:
            last, since = value, time.monotonic()
