"""Symbolic leading sizes: equal ones are equal in every run of TensorFlow, others may differ."""

import numpy as np
import pytest
import tensorflow as tf
from equivalence import Cut, differing, rewrite
from hand_written import KERNELS, one_loss, three_layers, weights

import tflms_sft
from rewriters.errors import NotTileableError
from rewriters.ir.graph_reader import from_concrete_function
from rewriters.ir.static_values import StaticEvaluator
from rewriters.ir.symbolic_dims import SymbolicDim

SIZE = 5

KEPT = {
    "elementwise": lambda x: x * 2.0 + x,
    "a bias": lambda x: tf.nn.bias_add(x, tf.ones([4])),
    "a convolution": lambda x: tf.nn.conv2d(x, tf.ones((3, 3, 4, 2)), 2, "SAME"),
    "a transposed convolution": lambda x: tf.nn.conv2d_transpose(
        x, tf.ones((2, 2, 3, 4)), (tf.shape(x)[0], 12, 16, 3), 2
    ),
    "rows and columns": lambda x: x[:, 1:3, ::2],
    "one row": lambda x: x[:, 0],
    "an ellipsis": lambda x: x[..., 1:3],
    "a slice": lambda x: tf.slice(x, [0, 1, 0, 0], [-1, 2, 2, 4]),
    "a slice of the batch's size": lambda x: tf.slice(x, [0, 1, 0, 0], [tf.shape(x)[0], 2, 2, 4]),
    "a reshape": lambda x: tf.reshape(x, [-1, 6 * 8 * 4]),
    "a reshape by the batch": lambda x: tf.reshape(x, [tf.shape(x)[0], 48, 4]),
    "a concatenation": lambda x: tf.concat([x, x], -1),
    "a split": lambda x: tf.split(x, 2, 3)[1],
    "unstacked rows": lambda x: tf.unstack(x, axis=1)[2],
    "copies of rows": lambda x: tf.tile(x, [1, 2, 1, 1]),
    "copies of an image": lambda x: tf.tile(tf.ones((1, 2)), tf.stack([tf.shape(x)[0], 1])),
    "zeros": lambda x: tf.zeros(tf.shape(x)),
    "random numbers": lambda x: tf.random.stateless_uniform(tf.shape(x)[:2], [1, 2]),
    "a broadcast": lambda x: tf.broadcast_to(1.0, tf.shape(x)),
    "another order": lambda x: tf.transpose(x, [0, 3, 1, 2]),
    "padding of rows": lambda x: tf.pad(x, [[0, 0], [1, 1], [0, 0], [0, 0]]),
    "means": lambda x: tf.reduce_mean(x, [1, 2]),
    "means from the end": lambda x: tf.reduce_mean(x, [-3, -2]),
    "a product of matrices": lambda x: tf.reduce_mean(x, [1, 2]) @ tf.ones((4, 3)),
    "a squeeze": lambda x: tf.squeeze(x[:, :1], 1),
    "a lookup": lambda x: tf.gather(tf.ones((9, 2)), tf.argmax(x, -1)),
    "selected channels": lambda x: tf.gather(x, [1, 0, 1], axis=3),
    "a new axis": lambda x: x[:, tf.newaxis],
}

CHANGED = {
    "the first image": lambda x: x[:1],
    "all but the first": lambda x: x[1:],
    "backwards": lambda x: x[::-2],
    "a head": lambda x: tf.slice(x, [0, 0, 0, 0], [tf.shape(x)[0] // 2, 6, 8, 4]),
    "another shape": lambda x: tf.reshape(x, [-1, 4]),
    "another batch": lambda x: tf.concat([x, x], 0),
    "a gather": lambda x: tf.gather(x, tf.range(tf.shape(x)[0] // 2)),
    "a gather by images": lambda x: tf.gather(x, tf.cast(x[:, 0, 0, 0], tf.int32)),
    "a mask": lambda x: tf.boolean_mask(x, tf.range(tf.shape(x)[0]) > 1),
    "copies": lambda x: tf.tile(x, [2, 1, 1, 1]),
    "rows first": lambda x: tf.transpose(x, [3, 0, 1, 2]),
    "more images": lambda x: tf.pad(x, [[0, 1], [0, 0], [0, 0], [0, 0]]),
    "sums of the batch": lambda x: tf.reduce_sum(tf.reshape(x, [2, -1, 4]), [0]),
    "channels by images": lambda x: tf.matmul(x[:, 0, 0], x[:, 0, 1], transpose_b=True)[0],
    "another unknown size": lambda x: x[:, 0, 0] + tf.ones(tf.shape(x[:1])[:1])[:, tf.newaxis],
}


def sizes(function):
    """Return the evaluator, the leading sizes of result and argument, and TensorFlow's result."""
    spec = tf.TensorSpec((None, 6, 8, 4), tf.float32)
    concrete_fn = tf.function(function, autograph=False).get_concrete_function(spec)
    graph = from_concrete_function(concrete_fn)
    evaluate = StaticEvaluator(graph)
    of = evaluate.sizes.of
    return evaluate, of(graph.outputs[0]), of(graph.inputs[0]), concrete_fn(tf.zeros((SIZE, 6, 8, 4))).shape[0]


@pytest.mark.parametrize("name", KEPT)
def test_leading_size_propagates_through_op(name):
    evaluate, got, batch, true = sizes(KEPT[name])
    assert evaluate.sizes.assume_equal(got, batch) and true == SIZE


@pytest.mark.parametrize("name", CHANGED)
def test_leading_size_that_may_differ_is_not_batch(name):
    evaluate, got, batch, _ = sizes(CHANGED[name])
    assert not evaluate.sizes.assume_equal(got, batch) and isinstance(got, (SymbolicDim, int))


MULTIPLES = {
    "a reshape of pixels to images": (lambda x: tf.reshape(x, [-1, 8, 4]), 6),
    "a product": (lambda x: tf.zeros([6 * tf.shape(x)[0], 2]), 6),
    "a multiple of a multiple": (lambda x: tf.reshape(tf.reshape(x, [-1, 3, 8, 4]), [-1, 8, 4]), 6),
    "a part of a multiple": (lambda x: tf.reshape(tf.reshape(x, [-1, 8, 4]), [-1, 3, 8, 4]), 2),
    "space to batch": (lambda x: tf.space_to_batch(x, [2, 1], [[0, 0], [0, 0]]), 2),
}


@pytest.mark.parametrize("name", MULTIPLES)
def test_leading_size_is_a_multiple_of_the_batch(name):
    function, factor = MULTIPLES[name]
    evaluate, got, batch, true = sizes(function)
    assert true == factor * SIZE
    assert evaluate.sizes.provably_equal(got, evaluate.sizes.multiple(batch, factor))
    assert not evaluate.sizes.assume_equal(got, evaluate.sizes.multiple(batch, factor + 1))
    assert not evaluate.sizes.assume_equal(got, batch)


def two(combine):
    """Return the graph of a function of two arguments of unknown leading sizes, and these sizes."""
    specs = [tf.TensorSpec((None, 3), tf.float32)] * 2
    graph = from_concrete_function(tf.function(combine, autograph=False).get_concrete_function(*specs))
    return graph, StaticEvaluator(graph).sizes


def test_assume_equal_of_arguments_records_pair():
    graph, found = two(lambda x, y: x + y)
    a, b, both = map(found.of, (*graph.inputs, graph.outputs[0]))
    assert both.arguments == {0, 1} and graph.same_size == set()
    assert found.assume_equal(a, a) and graph.same_size == set()
    assert found.assume_equal(both, a) and graph.same_size == {(0, 1)}
    assert found.assume_equal(a, b) and graph.same_size == {(0, 1)}
    assert graph.copy().same_size == {(0, 1)}


def test_are_combined_if_op_reads_images_of_both():
    for shape, expected in (((None, 5, 4), True), ((None, 4), False)):
        specs = [tf.TensorSpec(shape)] * 3
        step = tf.function(lambda x, y, z: (x + y, tf.tanh(z)), autograph=False)
        graph = from_concrete_function(step.get_concrete_function(*specs))
        found = StaticEvaluator(graph).sizes
        a, b, c = map(found.of, graph.inputs)
        assert found.are_combined(a, a) and found.are_combined(a, b) is expected and not found.are_combined(a, c)
        assert graph.same_size == set()


def test_are_combined_for_product_of_both_arguments():
    specs = [tf.TensorSpec((None, 5, 4))] * 2
    step = tf.function(lambda x, mask: (x * mask) + x, autograph=False)
    graph = from_concrete_function(step.get_concrete_function(*specs))
    found = StaticEvaluator(graph).sizes
    graph.same_size.clear()
    (product,) = [node.out() for node in graph.nodes.values() if node.op == "Mul"]
    assert found.are_combined(found.of(product), found.of(graph.inputs[0])) and graph.same_size == set()


def test_assume_equal_refuses_numbers_and_unrelated_sizes():
    graph, found = two(lambda x, y: x + y)
    assert (
        found.assume_equal(3, 3)
        and not found.assume_equal(3, 4)
        and not found.assume_equal(3, found.of(graph.inputs[0]))
    )
    assert not found.assume_equal(SymbolicDim(), SymbolicDim())


def test_provably_equal_records_nothing_and_follows_assumptions():
    graph, sizes = two(lambda x, y: x + y)
    a, b, both = map(sizes.of, (*graph.inputs, graph.outputs[0]))
    assert sizes.provably_equal(a, a) and sizes.provably_equal(3, 3) and not sizes.provably_equal(a, 3)
    assert not sizes.provably_equal(a, b) and not sizes.provably_equal(a, both) and graph.same_size == set()
    assert sizes.assume_equal(a, b) and sizes.provably_equal(a, both) and sizes.provably_equal(a, b)


# In a step --------------------------------------------------------------------------------------------------


def difference_step(x, reference):
    """Return loss and gradients of a difference; a single reference is broadcast over the batch."""
    kernel = tf.constant(np.random.default_rng(0).normal(size=(3, 3, 3, 3)))
    with tf.GradientTape() as tape:
        tape.watch([x, reference, kernel])
        y = tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME", name="c"))
        loss = tf.reduce_mean((y - tf.nn.conv2d(reference, kernel, 1, "SAME", name="d")) ** 2)
    return loss, tape.gradient(loss, [x, reference, kernel])


def pair(*batches):
    random = np.random.default_rng(1)
    return [tf.constant(random.normal(size=(batch, 8, 9, 3))) for batch in batches]


SPECS = [tflms_sft.SegmentSpec("x", "c"), tflms_sft.SegmentSpec("reference", "d")]


def rewritten(*batches):
    specs = [tf.TensorSpec((batch, 8, 9, 3), tf.float64) for batch in batches]
    return tflms_sft.rewrite(tf.function(difference_step), tflms_sft.SFTParams((2, 2), SPECS), *specs)


def test_step_with_two_equal_unknown_sizes_equals_original():
    step = rewritten(None, None)
    assert step.plan.changed
    for batch in (1, 3):
        want = difference_step(*pair(batch, batch))
        got = step(*pair(batch, batch))
        for a, b in zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_step_with_different_sizes_raises_with_remedy():
    step = rewritten(None, None)
    with pytest.raises(tf.errors.InvalidArgumentError, match="taken to have the same leading size.*known sizes"):
        step(*pair(3, 1))


def test_step_of_known_different_sizes_equals_original():
    step = rewritten(3, 1)
    got, want = step(*pair(3, 1)), difference_step(*pair(3, 1))
    for a, b in zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_segment_ends_at_images_of_unequal_batch():
    w = weights(*KERNELS)

    def forward(x):
        out = three_layers(x, w)
        return tf.reduce_mean(tf.nn.relu(tf.subtract(out, tf.identity(out[:1], "first")), name="last") ** 2)

    step = one_loss(forward, w)
    with pytest.raises(NotTileableError, match="may have different batch sizes"):
        rewrite(step.concrete_fn, Cut(("out", "first"), "last", (2, 2)))
    assert not differing(step, Cut(grid=(2, 2)))


def joined(x, reference):
    """Concatenate two batches, and use a part of the result."""
    kernel = tf.constant(np.random.default_rng(0).normal(size=(3, 3, 3, 3)))
    with tf.GradientTape() as tape:
        tape.watch([x, reference, kernel])
        y = tf.nn.relu(tf.nn.conv2d(tf.concat([x, reference], 0), kernel, 1, "SAME"))
        first = tf.slice(tf.nn.conv2d(y, kernel, 1, "SAME"), [0, 0, 0, 0], [tf.shape(x)[0], 8, 9, 3])
        loss = tf.reduce_mean(tf.nn.relu(first + 0.1) ** 2) + tf.reduce_mean(y)
    return loss, tape.gradient(loss, [x, reference, kernel])


def test_step_with_concatenated_batches_equals_original():
    specs = [tf.TensorSpec((None, 8, 9, 3), tf.float64)] * 2
    params = tflms_sft.SFTParams((2, 2), [tflms_sft.SegmentSpec("concat", "Conv2D_1")])
    step = tflms_sft.rewrite(tf.function(joined), params, *specs)
    assert step.plan.changed
    for sizes_ in ((2, 3), (3, 1), (2, 2)):
        got, want = step(*pair(*sizes_)), joined(*pair(*sizes_))
        for a, b in zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
