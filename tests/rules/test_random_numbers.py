"""Random numbers by rows: a later counter gives the later numbers of the same op. Networks: `test_attention.py`."""

import numpy as np
import pytest
import tensorflow as tf

from rewriters.rules import random_numbers

OPS = ("StatelessRandomUniformV2", "StatelessRandomNormalV2")


def drawn(op, count, counter, dtype):
    key, _ = tf.raw_ops.StatelessRandomGetKeyCounter(seed=[3, 7])
    return getattr(tf.raw_ops, op)(shape=[count], key=key, counter=counter, alg=1, dtype=dtype).numpy()


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("op", OPS)
def test_later_counters_give_later_numbers(op, dtype):
    _, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=[3, 7])
    steps, group = 5, random_numbers.numbers_per_count(dtype)
    all_numbers = drawn(op, 100, counter, dtype)
    later = drawn(op, 40, random_numbers.later(counter, tf.constant(steps, tf.int64)), dtype)
    np.testing.assert_array_equal(all_numbers[steps * group : steps * group + 40], later)
    assert len(set(map(float, all_numbers))) > 50


def test_a_counter_carries_over():
    counter = tf.constant([2**64 - 2, 5], tf.uint64)
    np.testing.assert_array_equal(random_numbers.later(counter, tf.constant(3, tf.int64)), [1, 6])
