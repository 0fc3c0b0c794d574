"""Merging of equal constants."""

import numpy as np
import tensorflow as tf
from graph_rewrites import passes

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize.canonicalize import CanonicalMode, read_canonical
from rewriters.canonicalize.merge_constants import MAX_BYTES, MergeConstants
from rewriters.ir.static_values import constant


def merged(function, *arguments):
    """Return the canonical graph of a function, and the values of its constants."""
    concrete = tf.function(function).get_concrete_function(*arguments)
    graph = read_canonical(concrete, CanonicalMode.EXACT, merge_constants=True)
    return graph, [constant(node) for node in graph.nodes.values() if node.op == "Const"]


def test_merge_constants_large_ones_stay():
    count = MAX_BYTES // 4 + 1
    ones = np.ones(count, np.float32)
    _, values = merged(lambda x: (x * ones) * ones, tf.TensorSpec((count,)))
    assert len(values) == 2


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

    graph, values = merged(function, tf.TensorSpec((2, 8, 8, 2)))
    analysis = GraphAnalysis(graph, ("update0", "update1"))
    forward = [node.op for node in analysis.order if node.op in ("Conv2D", "Tanh") and node not in analysis.backward]
    assert sum(np.array_equal(value, np.float32(0.3)) for value in values) == 1
    assert sorted(forward) == ["Conv2D", "Conv2D", "Tanh", "Tanh"]


def merging():
    return passes(lambda graph: MergeConstants(), inline_constants=False)


def test_merge_constants_equal_constants_are_one():
    merging().check("""
        graph(x: float32[2])
        literal = float32[] Const() {value=0.3}
        a = float32[2] Mul(x, literal)
      - literal_1 = float32[] Const() {value=0.3}
      - b = float32[2] Mul(a, literal_1)
      + b = float32[2] Mul(a, literal)
        literal_2 = float32[1] Const() {value=[0.3]}
        c = float32[2] AddV2(b, literal_2)
        literal_3 = float64[] Const() {value=0.3}
        return c, literal_3
    """)


def test_merge_constants_that_wait_or_are_awaited_or_returned_stay():
    merging().check("""
        graph(x: float32[2])
        first = float32[] Const() {value=2.0}
        late = float32[] Const() {value=2.0} after [x]
        awaited = float32[] Const() {value=2.0}
        result = float32[] Const() {value=2.0}
        far = float32[] Const() {value=2.0} on GPU:0
        a = float32[2] Mul(x, first)
        b = float32[2] Mul(a, late) after [awaited]
        c = float32[2] Mul(b, awaited)
        d = float32[2] Mul(c, far)
        return d, result
    """)


def test_merge_constants_of_autodiff_are_apart():
    merging().check("""
        graph(x: float32[2])
        one = float32[] Const() {value=1.0}
        sum = float32[2] AddV2(x, one)
        seed = float32[] Const() {value=1.0}
        gradient_tape/axes = int32[1] Const() {value=[0]}
        gradient_tape/one = float32[] Const() {value=1.0}
      - gradient_tape/scale = float32[] Const() {value=1.0}
        gradient_tape/zero = float32[] Const() {value=0.0}
        none = float32[] Const() {value=0.0}
        gradient_tape/a = float32[2] Mul(x, seed)
        gradient_tape/b = float32[2] Mul(gradient_tape/a, gradient_tape/one)
      - gradient_tape/c = float32[2] Mul(gradient_tape/b, gradient_tape/scale)
      + gradient_tape/c = float32[2] Mul(gradient_tape/b, gradient_tape/one)
        gradient_tape/d = float32[2] Maximum(gradient_tape/c, gradient_tape/zero)
        out = float32[2] Maximum(sum, none)
        return out, gradient_tape/d
    """)
