"""Operations on windows: what becomes one on images of windows, and what must not."""

import numpy as np
import pytest
import tensorflow as tf
from canonical_functions import canonical
from equivalence import TOLERANCE, error
from graph_rewrites import step as rewriting

from rewriters.canonicalize.windows_to_images import fold_windows_into_images

RANDOM = np.random.RandomState(0)
BATCH, COUNTS, WINDOW, CHANNELS = 3, (2, 5), (4, 3), 6
PIXELS, WINDOWS = 12, 10


def images():
    return tf.constant(RANDOM.normal(size=(BATCH, 8, 15, CHANNELS)))


def partitioned(x):
    """Return the windows of images, `(batch * windows, pixels, channels)`."""
    x = tf.transpose(tf.reshape(x, [-1, 2, 4, 5, 3, CHANNELS]), [0, 1, 3, 2, 4, 5])
    return tf.reshape(x, [-1, PIXELS, CHANNELS])


def joined(x):
    """Return images of windows with any number of channels."""
    channels = x.shape[-1]
    x = tf.transpose(tf.reshape(x, [-1, *COUNTS, *WINDOW, channels]), [0, 1, 3, 2, 4, 5])
    return tf.reshape(x, [-1, 8, 15, channels])


def constant(*shape):
    return tf.constant(RANDOM.normal(size=shape))


def projections(x):
    """Return three parts of the channels that are transposed to the front, for two heads."""
    parts = tf.transpose(tf.reshape(x, [-1, PIXELS, 3, 2, 1]), [2, 0, 3, 1, 4])
    return tf.reshape(tf.transpose(parts[0] * parts[1] + parts[2], [0, 2, 1, 3]), [-1, PIXELS, 2])


def attention(x):
    scores = tf.matmul(x, x, transpose_b=True)
    return tf.matmul(tf.nn.softmax(scores), x)


def masked(x):
    """Add a constant for each window."""
    x = tf.reshape(x, [-1, WINDOWS, PIXELS, CHANNELS]) + MASK[None]
    return tf.reshape(x, [-1, PIXELS, CHANNELS])


MASK = constant(WINDOWS, PIXELS, CHANNELS)
VECTOR, TABLE, MATRIX = constant(CHANNELS), constant(1, PIXELS, CHANNELS), constant(CHANNELS, 4)
MATRICES = constant(1, CHANNELS, 4)
KERNEL = constant(3, CHANNELS, 4)

FOLDED = {
    "nothing": lambda x: x,
    "arithmetic": lambda x: tf.nn.relu(x) * 2.0 + VECTOR - TABLE,
    "a constant for each window": masked,
    "a bias": lambda x: tf.nn.bias_add(x, VECTOR),
    "moments of a pixel": lambda x: (x - tf.reduce_mean(x, -1, keepdims=True)) / tf.math.reduce_std(x, -1, True),
    "a mean over pixels": lambda x: x + tf.reduce_mean(x, 1, keepdims=True),
    "a maximum without its dimension": lambda x: x * tf.reduce_max(x, 1)[:, None],
    "attention": attention,
    "a product with a matrix": lambda x: tf.tensordot(x, MATRIX, 1),
    "a product over windows": lambda x: tf.tensordot(x, tf.einsum("wpc,wpd->cd", x, x), 1),
    "projections": projections,
    "parts of the channels": lambda x: tf.concat([*tf.split(x, [1, 2, 3], -1)[::-1], x[..., 1:5:2]], -1),
    "equal parts": lambda x: tf.add_n(tf.split(x, 3, -1)),
    "unstacked channels": lambda x: tf.stack(tf.unstack(x, axis=-1)[::-1], -1),
    "a stack before the windows": lambda x: tf.reduce_sum(tf.stack([x, x * x]), 0),
    "repeated channels": lambda x: tf.tile(x, [1, 1, 2]),
    "a broadcast": lambda x: x + tf.broadcast_to(tf.reduce_sum(x, -1, True), tf.shape(x)),
    "cropped pixels": lambda x: tf.concat([x[:, 3:], x[:, :3]], 1),
    "a new dimension": lambda x: tf.squeeze(tf.expand_dims(x, 1) * 2.0, 1),
    "a size": lambda x: x / tf.cast(tf.shape(x)[0], x.dtype),
    "a softmax of many dimensions": lambda x: tf.reshape(
        tf.nn.softmax(tf.reshape(x, [-1, 2, 2, 3, 2, 3])), [-1, PIXELS, CHANNELS]
    ),
    "an empty part": lambda x: tf.concat([x[:, 3:3], x], 1),
}

UNKNOWN_AFTER = {"a stack before the windows", "repeated channels", "a maximum without its dimension"}
"""Ops with windows in another dimension than the first, or in several, or of unknown shape, if the batch is unknown."""

KEPT = {
    "a convolution": lambda x: tf.nn.conv1d(x, KERNEL, 1, "SAME"),
    "a sum along windows": lambda x: tf.cumsum(x, 0),
    "other windows first": lambda x: tf.reverse(x, [0]),
    "half of the windows": lambda x: tf.concat([x[1:], x[:1]], 0),
    "a broadcast of matrices": lambda x: tf.einsum("...ij,...jk->...ik", x, MATRICES),
    "nine dimensions": lambda x: tf.reshape(tf.reshape(x, [-1, 2, 2, 3, 1, 2, 3, 1])[..., 0], [-1, PIXELS, CHANNELS]),
    "windows with other windows": lambda x: tf.tensordot(tf.einsum("wpc,vpc->wv", x, x), x, 1),
}


def step(what):
    """Return an op on windows and its gradient by the images."""
    function = FOLDED.get(what) or KEPT[what]

    def loss_and_gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = joined(function(partitioned(x)))
            loss = tf.reduce_sum(y * tf.sin(y), [1, 2, 3])
        return y, loss, tape.gradient(loss, x)

    return loss_and_gradient


def worst(what, x, function):
    pairs = zip(tf.nest.flatten(function(x)), tf.nest.flatten(step(what)(x)), strict=True)
    return max(error(got, want) for got, want in pairs)


def windows_in(nodes):
    """Return the ops with a result whose first dimension holds the windows of all images."""
    shapes = {node: [shape for _, shape in node.outputs if shape and len(shape) > 2] for node in nodes}
    return [node for node, known in shapes.items() if any(shape[0] == BATCH * WINDOWS for shape in known)]


@pytest.mark.parametrize("what", FOLDED)
def test_fold_windows_computes_same_values_on_images(what):
    x = images()
    function, nodes = canonical(step(what), x)
    assert not windows_in(nodes)
    assert worst(what, x, function) < TOLERANCE


@pytest.mark.parametrize("what", sorted(FOLDED.keys() - UNKNOWN_AFTER))
def test_fold_windows_of_an_unknown_batch_computes_same_values(what):
    x = images()
    function, nodes = canonical(step(what), x, known=False)
    merging = [
        node.name
        for node in nodes
        if node.op == "Reshape" and (node.inputs[0].shape or ())[1:3] == COUNTS and len(node.out().shape or ()) == 3
    ]
    assert not merging
    assert worst(what, x, function) < TOLERANCE


@pytest.mark.parametrize("what", KEPT)
@pytest.mark.parametrize("known", (True, False), ids=("known", "unknown"))
def test_windows_that_an_op_combines_stay(what, known):
    x = images()
    function, nodes = canonical(step(what), x, known=known)
    assert not known or windows_in(nodes)
    assert worst(what, x, function) < TOLERANCE


def repeated(x, y):
    product = tf.einsum("bti,ij->btj", tf.reshape(x[:1], [-1, 8 * 15, CHANNELS]), MATRIX)
    return tf.reduce_sum(tf.broadcast_to(product, [tf.shape(y)[0], 8 * 15, 4]), [1, 2])


def apart(x, y):
    return tf.reduce_sum(partitioned(x) * 2.0, 0) * tf.reduce_sum(partitioned(y) * 3.0, 0)


@pytest.mark.parametrize("function", (repeated, apart))
def test_unknown_batch_is_repeated_and_batches_that_no_op_combines_may_differ(function):
    x, y = images(), tf.concat([images(), images()], 0)
    new, _ = canonical(function, x, y, known=False)
    assert error(new(x, y), function(x, y)) < TOLERANCE


def test_one_row_of_windows_with_several_heads_is_folded():
    def function(x):
        windows = tf.transpose(tf.reshape(x, [-1, 1, 8, 5, 3, CHANNELS]), [0, 1, 3, 2, 4, 5])
        pixels = tf.nn.relu(tf.reshape(windows, [-1, 24, CHANNELS]))
        heads = tf.transpose(tf.reshape(pixels, [-1, 24, 2, 3]), [0, 2, 1, 3])
        y = tf.matmul(tf.nn.softmax(tf.matmul(heads, heads, transpose_b=True)), heads)
        y = tf.reshape(tf.transpose(y, [0, 2, 1, 3]), [-1, 1, 5, 8, 3, CHANNELS])
        return tf.reshape(tf.transpose(y, [0, 1, 3, 2, 4, 5]), [-1, 8, 15, CHANNELS])

    x = images()
    new, nodes = canonical(function, x)
    (softmax,) = (node for node in nodes if "Softmax" in (node.op, node.kernel))
    assert softmax.out().shape[0] == BATCH
    assert error(new(x), function(x)) < TOLERANCE


@pytest.mark.parametrize("known", (True, False), ids=("known", "unknown"))
def test_windows_of_other_rows_and_columns_are_not_confused(known):
    """Ten windows for each image, in two rows of one image and in five rows of the other."""

    def function(x, y):
        windows = tf.transpose(tf.reshape(y, [-1, 5, 4, 2, 3, CHANNELS]), [0, 1, 3, 2, 4, 5])
        return joined((partitioned(x) + 1.0) * tf.reshape(windows, [-1, PIXELS, CHANNELS]))

    x, y = images(), constant(BATCH, 20, 6, CHANNELS)
    new, _ = canonical(function, x, y, known=known)
    assert error(new(x, y), function(x, y)) < TOLERANCE


def test_fold_windows_attention_in_windows():
    rewriting(fold_windows_into_images).check("""
        graph(x: float32[2,4,6,3])
        split = float32[2,2,2,2,3,3] Reshape(x, [-1, 2, 2, 2, 3, 3])
        turned = float32[2,2,2,2,3,3] Transpose(split, [0, 1, 3, 2, 4, 5])
      - windows = float32[8,6,3] Reshape(turned, [-1, 6, 3])
      - scores = float32[8,6,6] BatchMatMulV2(windows, windows) {adj_y=True}
      - weights = float32[8,6,6] Softmax(scores)
      - mean = float32[8,1,6] Mean(weights, 1) {keep_dims=True}
      - values = float32[8,1,3] Einsum(mean, windows) {N=2, equation="abc,acd->abd"}
      - sum = float32[8,6,3] AddV2(windows, values)
      - back = float32[2,2,2,2,3,3] Reshape(sum, [-1, 2, 2, 2, 3, 3])
      - late = float32[2,4,6,3] Exp(x) after [weights]
      - return back, late
      + late = float32[2,4,6,3] Exp(x) after [weights/Softmax]
      + windows/Reshape = float32[2,2,2,6,3] Reshape(turned, [2, 2, 2, 6, 3])
      + scores/BatchMatMulV2 = float32[2,2,2,6,6] BatchMatMulV2(windows/Reshape, windows/Reshape) {adj_y=True}
      + weights/Softmax = float32[2,2,2,6,6] Softmax(scores/BatchMatMulV2)
      + mean/Mean = float32[2,2,2,1,6] Mean(weights/Softmax, [3]) {keep_dims=True}
      + values/Einsum = float32[2,2,2,1,3] Einsum(mean/Mean, windows/Reshape) {N=2, equation="efgbc,efgcd->efgbd"}
      + sum/AddV2 = float32[2,2,2,6,3] AddV2(windows/Reshape, values/Einsum)
      + back/Reshape = float32[2,2,2,2,3,3] Reshape(sum/AddV2, [2, 2, 2, 2, 3, 3])
      + return back/Reshape, late
    """)


def test_fold_windows_that_an_op_combines_or_that_are_returned_stay():
    rewriting(fold_windows_into_images).check("""
        graph(x: float32[2,4,6,3])
        windows = float32[8,6,3] Reshape(x, [-1, 6, 3])
        relu = float32[8,6,3] Relu(windows)
        sums = float32[8,6,3] Cumsum(relu, 0)
        back = float32[2,4,6,3] Reshape(sums, [2, 4, 6, 3])
        others = float32[8,6,3] Reshape(back, [-1, 6, 3])
        tanh = float32[8,6,3] Tanh(others)
        return back, tanh
    """)
