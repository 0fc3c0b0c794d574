"""Broadcast operands of elementwise ops are read from their source, and the step computes the same bits."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import Step, keras_step
from graph_changes import changed, step_of
from keras import layers

from rewriters.canonicalize import canonicalize
from rewriters.ir.graph import ancestors
from rewriters.swapping.shrink_broadcasts import ShrinkBroadcasts

RNG = np.random.default_rng(0)


def shrunk(step):
    return changed(step, lambda analysis: ShrinkBroadcasts(lambda _: analysis))


def full_size(graph, op):
    """Return the shapes of results of an op type that have the size of an image."""
    shapes = [node.outputs[0][1] for node in graph.nodes.values() if node.op == op]
    return [shape for shape in shapes if shape and len(shape) == 4 and shape[1] != 1]


@pytest.mark.parametrize("dtype", ("float64", "float32"))
@pytest.mark.parametrize("known", (True, False), ids=("known", "unknown"))
def test_shrink_broadcasts_batch_norm_training_has_no_copies(known, dtype):
    def net(x):
        x = layers.BatchNormalization()(layers.Conv2D(4, 3)(x))
        return layers.Conv2D(4, 3)(layers.LayerNormalization()(layers.ReLU()(x)))

    keras.config.set_floatx(dtype)
    step = keras_step(net, (12, 16), 2, known, keras.optimizers.Adam(), steps=4)
    before = canonicalize.read_canonical(step.concrete_fn)
    graph, same = shrunk(step)
    assert same
    for op, fewer in (("Tile" if known else "BroadcastTo", 2), ("RealDiv", 2), ("AddN", 1)):
        assert len(full_size(before, op)) - len(full_size(graph, op)) >= fewer, op


@pytest.mark.parametrize("known", (True, False), ids=("known", "unknown"))
@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x + tf.broadcast_to(tf.reduce_mean(x, (1, 2), keepdims=True), tf.shape(x)) / 3.0,
        lambda x, y: x * tf.tile(tf.reduce_sum(x, (0, 1, 2), keepdims=True), (tf.shape(x)[0], 4, 5, 1)),
        lambda x, y: tf.fill(tf.shape(x), tf.reduce_sum(y)) - x,
        lambda x, y: tf.add_n([tf.fill(tf.shape(x), tf.reduce_sum(y)), tf.exp(x)]),
        lambda x, y: tf.add_n([tf.fill(tf.shape(x), tf.reduce_sum(y)), tf.exp(x), tf.abs(y), tf.math.sign(x)]),
        lambda x, y: tf.fill(tf.shape(x), tf.reduce_sum(y)) ** 2 + x,
        lambda x, y: tf.maximum(tf.cast(tf.fill((4, 5, 2), tf.reduce_sum(y)), x.dtype), x),
    ],
)
def test_shrink_broadcasts_broadcasting_op_reads_source(function, known):
    step = step_of(function, (3, 4, 5, 2), (3, 4, 5, 2), known=known)
    graph, same = shrunk(step)
    assert same
    assert not any(node.op in ("Fill", "Tile", "BroadcastTo", "AddN") for node in graph.nodes.values())


@pytest.mark.parametrize(
    "function",
    [
        lambda x: tf.tile(x, (1, 2, 1, 1)) + 1.0,
        lambda x: tf.nn.conv2d(tf.fill((2, 4, 4, 1), tf.reduce_sum(x)), tf.ones((3, 3, 1, 1), x.dtype), 1, "SAME"),
        lambda x: tf.reduce_sum(tf.fill((7, 7), tf.reduce_sum(x)) * 2.0),
        lambda x: tf.fill((2, 3), tf.reduce_sum(x)),
        lambda x: tf.fill((2, 3), tf.reduce_sum(x)) + tf.fill((3,), tf.reduce_sum(x)),
        lambda x: tf.add_n([x, x + tf.fill(tf.shape(x), tf.reduce_sum(x)), x * x]) + 1.0,
        lambda x: x * 3.0 + (tf.fill(tf.shape(x), tf.reduce_sum(x)) + tf.exp(x)),
        lambda x: tf.concat([x, tf.fill(tf.shape(x), tf.reduce_sum(x)) * 3.0], -1),
    ],
)
def test_shrink_broadcasts_consumer_of_full_size_keeps_copy(function):
    step = step_of(function, (2, 4, 4, 1))
    graph, same = shrunk(step)
    assert same and any(node.op in ("Tile", "Fill") for node in graph.nodes.values())


def test_shrink_broadcasts_sizes_that_may_differ_keep_bits():
    """A gather of one row is broadcast to the rows of the other operand, whose number is known at run time only."""
    step = step_of(lambda x: (tf.gather(x, [1]) + tf.fill((1, 2), x[0, 0])) * x, (3, 2), known=False)
    _, same = shrunk(step)
    assert same


def test_shrink_broadcasts_control_edges_move_to_source():
    variable = tf.Variable(1.0, dtype="float64")

    def function(x):
        before = variable.read_value()
        with tf.control_dependencies([before]):
            repeated = tf.fill(tf.shape(x), tf.reduce_sum(x))
        with tf.control_dependencies([repeated]):
            variable.assign_add(tf.reduce_sum(x))
        return repeated / 2.0 + x * before

    step = step_of(function, (2, 3))
    step = Step(step.concrete_fn, [variable], step.batches)
    graph, same = shrunk(step)
    assign = next(node for node in graph.nodes.values() if node.op == "AssignAddVariableOp")
    assert same and any(n.op == "ReadVariableOp" for n in ancestors(assign.control_inputs))


def test_shrink_broadcasts_add_n_of_tensor_lists_is_not_rewritten():
    weight = tf.Variable(RNG.normal(size=(3, 3, 2, 2)))

    def function(x):
        with tf.GradientTape() as tape:
            held = tf.nn.relu(tf.nn.conv2d(x, weight, 1, "SAME"))
            many = tf.raw_ops.TensorListFromTensor(tensor=held, element_shape=[4, 4, 2])
            a, b, c = (
                tf.raw_ops.TensorListGetItem(
                    input_handle=many, index=index, element_shape=[4, 4, 2], element_dtype=x.dtype
                )
                for index in (0, 1, 0)
            )
            loss = tf.reduce_sum(a * b + tf.exp(c))
        weight.assign_sub(1e-3 * tape.gradient(loss, weight))
        return loss

    step = step_of(function, (2, 4, 4, 2))
    step = Step(step.concrete_fn, [weight], step.batches)
    graph, same = shrunk(step)
    assert same and any(n.op == "AddN" and n.outputs[0][0] == tf.variant for n in graph.nodes.values())
