"""Merging of equal constants."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from rewriters.analysis.autodiff_roles import gradient_seed_constants
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize.canonicalize import CanonicalMode, read_canonical
from rewriters.canonicalize.merge_constants import MAX_BYTES
from rewriters.ir.static_values import constant


def _constants(function, *arguments, merge=True):
    concrete = tf.function(function).get_concrete_function(*arguments)
    graph = read_canonical(concrete, CanonicalMode.EXACT, merge_constants=merge)
    return [constant(node) for node in graph.nodes.values() if node.op == "Const"], graph


X = tf.TensorSpec((2, 3))


@pytest.mark.parametrize(("merge", "count"), [(True, 1), (False, 3)])
def test_merge_constants_equal_values(merge, count):
    values, _ = _constants(lambda x: tf.sin(x * 0.3) * 0.3 + tf.constant(0.3), X, merge=merge)
    assert len(values) == count and all(value == np.float32(0.3) for value in values)


def test_merge_constants_other_types_and_shapes_stay():
    def function(x):
        return x * 2.0 + tf.constant([2.0]) + tf.cast(tf.cast(x, tf.float64) * tf.constant(2.0, tf.float64), x.dtype)

    values, _ = _constants(function, X)
    assert sorted((value.dtype.name, value.shape) for value in values) == [
        ("float32", ()),
        ("float32", (1,)),
        ("float64", ()),
    ]


def _equal_to(graph, value):
    return [n for n in graph.nodes.values() if n.op == "Const" and np.array_equal(constant(n), np.float32(value))]


def test_merge_constants_one_that_waits_stays():
    def function(x):
        with tf.control_dependencies([tf.debugging.assert_greater(x, 0.0)]):
            late = tf.constant(0.3)
        return x * 0.3, x + 0.3 + late

    _, graph = _constants(function, X)
    assert [bool(node.control_inputs) for node in _equal_to(graph, 0.3)] == [True, False]


def test_merge_constants_large_ones_stay():
    count = MAX_BYTES // 4 + 1
    ones = np.ones(count, np.float32)
    values, _ = _constants(lambda x: (x * ones) * ones, tf.TensorSpec((count,)))
    assert len(values) == 2


def test_merge_constants_gradient_seeds_stay():
    weight = tf.Variable(1.0)

    def function(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.sin(x * weight) + tf.constant(1.0))
        return loss, tape.gradient(loss, weight, output_gradients=tf.constant(1.0))

    _, graph = _constants(function, X)
    assert len(_equal_to(graph, 1.0)) == 2
    assert [seed.node for seed in gradient_seed_constants(graph)] == _equal_to(graph, 1.0)[1:]


def test_merge_constants_one_of_an_optimizer_keeps_later_forward_ops_forward():
    """Two networks in one step: a constant of the first update is read by the second network."""
    first, second = (tf.Variable(np.ones((3, 3, 2, 2), np.float32)) for _ in range(2))

    def function(x):
        losses = []
        for number, weight in enumerate((first, second)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.tanh(tf.nn.conv2d(x * (0.3 if number else 0.4), weight, 1, "SAME")))
            gradient = tape.gradient(loss, weight)
            with tf.name_scope(f"update{number}"):
                weight.assign_sub(tf.constant(0.3) * gradient)
            losses.append(loss)
        return losses

    _, graph = _constants(function, tf.TensorSpec((2, 8, 8, 2)))
    analysis = GraphAnalysis(graph, ("update0", "update1"))
    forward = [node.op for node in analysis.order if node.op in ("Conv2D", "Tanh") and node not in analysis.backward]
    assert len(_equal_to(graph, 0.3)) == 1 and sorted(forward) == ["Conv2D", "Conv2D", "Tanh", "Tanh"]
