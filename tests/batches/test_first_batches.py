"""Tests of peeking at the batches of a measured step."""

import itertools
import time

import numpy as np
import pytest
import tensorflow as tf

from tflms_sft._batches import first_batches
from tflms_sft._batches.first_batches import PeekedBatches, can_peek


def iterator(number=5, batch=2):
    images = np.arange(number * 12, dtype="float32").reshape(number, 3, 4)
    data = tf.data.Dataset.from_tensor_slices(({"image": images}, np.arange(number))).batch(batch)
    return iter(data)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_peeked_batches_replay_keeps_unknown_shapes(number):
    """The dataset has batches of two, two and one."""
    data = iterator()
    taken = PeekedBatches(data, number)
    again = taken.replay()
    assert again.element_spec == data.element_spec and again.element_spec[1].shape == [None]
    wanted, got = list(iterator())[:number], list(itertools.islice(again, number))
    for want, have in zip(wanted, got, strict=True):
        np.testing.assert_array_equal(have[0]["image"], want[0]["image"])
        np.testing.assert_array_equal(have[1], want[1])
    assert len(list(data)) == 3 - number
    assert taken.bytes_on_device()[0] == 2 * 12 * 4


def test_peeked_batches_at_end_raises_stop_iteration():
    data = iterator(1)
    assert len(list(PeekedBatches(data, 4).replay())) == 1
    with pytest.raises(StopIteration):
        PeekedBatches(data, 4)


def test_can_peek_tensors_of_data_sets_but_not_other_iterators():
    ragged = tf.data.Dataset.from_tensors(tf.ragged.constant([[1.0], [1.0, 2.0]]))
    structures = ragged.window(1)
    assert can_peek(iterator()) and can_peek(iter(ragged))
    assert not can_peek(iter(structures)) and not can_peek(iter([1]))


def test_replayed_ragged_batch_keeps_its_spec():
    ragged = tf.data.Dataset.from_tensors(tf.ragged.constant([[1.0], [1.0, 2.0]]))
    peeked = PeekedBatches(iter(ragged), 1)
    replayed = peeked.replay()
    assert replayed.element_spec == peeked.spec
    assert next(replayed).to_list() == [[1.0], [1.0, 2.0]]


def test_wait_until_stable_returns_after_constant_values():
    begun, asked = time.monotonic(), []

    def look():
        asked.append(time.monotonic())
        return min(len(asked), 10)

    first_batches.wait_until_stable(0.1, look)
    assert len(asked) > 10 and asked[-1] - asked[9] >= 0.1 and time.monotonic() - begun < first_batches.MAX_WAIT_SECONDS


def test_wait_until_stable_ends_at_max_wait(monkeypatch):
    monkeypatch.setattr(first_batches, "MAX_WAIT_SECONDS", 0.2)
    asked = []
    first_batches.wait_until_stable(0.1, lambda: asked.append(0) or len(asked))
    assert 2 < len(asked) < 30
