"""Rewritten steps that are written by hand: two optimizers, several heads, effects, custom gradients."""

import numpy as np
import pytest
import tensorflow as tf
from equivalence import Cut, Step, differing, error, rewrite
from hand_written import KERNELS, conv_op, descend, descending, hand_written, images, one_loss, three_layers, weights

import tflms_sft
from rewriters.errors import NotTileableError
from tflms_sft import SFTParams


def test_two_optimizers_around_update_equal_plain():
    """A GAN's step: the generator learns from a discriminator that has just been updated."""
    make = weights((3, 3, 3, 4), (3, 3, 4, 3))
    judge = weights((3, 3, 3, 4), (4,), (3, 3, 4, 2))

    def generate(z):
        return conv_op(tf.nn.relu(conv_op(z, make[0])), make[1])

    def score(x, name):
        x = tf.identity(x, f"{name}_in")
        x = tf.nn.leaky_relu(conv_op(x, judge[0], 2) + judge[1])
        return tf.reduce_mean(tf.identity(conv_op(x, judge[2]), f"{name}_out"))

    def body(real, z):
        with tf.GradientTape() as tape:
            judge_loss = tf.nn.softplus(score(generate(z), "fake")) + tf.nn.softplus(-score(real, "real"))
        judge_gradients = tape.gradient(judge_loss, judge)
        descend(judge, judge_gradients)
        with tf.GradientTape() as tape:
            make_loss = tf.nn.softplus(-score(tf.identity(generate(z), "made"), "again"))
        make_gradients = tape.gradient(make_loss, make)
        descend(make, make_gradients)
        return judge_loss, make_loss, judge_gradients, make_gradients

    step = hand_written(body, [*make, *judge], [a + b for a, b in zip(images(), images(), strict=True)])
    sides = [Cut(f"{name}_in", f"{name}_out", (2, 3)) for name in ("fake", "real", "again")]
    assert not differing(step, *sides)
    assert not differing(step, Cut(("z", "made"), "again_out", (2, 2)))


def test_two_heads_on_one_trunk_equal_plain():
    w = weights((3, 3, 3, 4), (3, 3, 4, 2), (5, 5, 4, 3), (1, 1, 2, 2))

    def forward(x):
        trunk = tf.nn.relu(conv_op(x, w[0]))
        fine = tf.identity(conv_op(tf.nn.tanh(conv_op(trunk, w[1])), w[3]), "fine")
        coarse = tf.identity(conv_op(tf.nn.relu(trunk), w[2], 3), "coarse")
        return tf.reduce_mean(fine**2) + 0.3 * tf.reduce_mean(tf.abs(coarse))

    step = descending(forward, w)
    assert not differing(step, Cut(exit=("fine", "coarse"), grid=(3, 4)))
    assert not differing(step, Cut(exit="fine", grid=(3, 4)))


def test_exit_smaller_than_grid_equals_plain():
    """Tiles beyond the last row of an exit must add nothing to the gradient."""
    w = weights((3, 3, 3, 4), (13, 14, 4, 2), (12, 12, 4, 2))

    def forward(x):
        trunk = tf.nn.relu(conv_op(tf.nn.tanh(conv_op(x, w[0])), tf.ones((3, 3, 4, 4), "float64")))
        pixel = tf.identity(tf.nn.conv2d(trunk, w[1], 1, "VALID"), "pixel")
        corner = tf.identity(tf.nn.conv2d(trunk, w[2], 1, "VALID"), "corner")
        return tf.reduce_mean(trunk**2) + tf.reduce_mean(pixel) + tf.reduce_mean(corner**2)

    assert not differing(descending(forward, w), Cut(exit=("pixel", "corner"), grid=(4, 5)))


def test_different_batch_sizes_in_segment_equal_plain():
    """One template beside a batch: its gradient must be counted once, not once per batch tile."""
    w = weights((3, 3, 3, 4), (3, 3, 4, 2), (3, 3, 3, 4), (3, 3, 4, 2))

    def body(x, template):
        with tf.GradientTape() as tape:
            many = tf.identity(conv_op(tf.nn.relu(conv_op(x, w[0])), w[1]), "many")
            one = tf.identity(conv_op(tf.nn.relu(conv_op(template, w[2])), w[3]), "one")
            loss = tf.reduce_mean((many - one) ** 2)
        gradients = tape.gradient(loss, w)
        descend(w, gradients)
        return loss, gradients

    batches = [a + b for a, b in zip(images(), images(shape=(1, 13, 14, 3)), strict=True)]
    step = hand_written(body, w, batches, known_batch=True)
    assert not differing(step, Cut(("x", "template"), ("many", "one"), (2, 2), batch=2))


def test_returned_input_gradient_equals_plain():
    w = weights(*KERNELS)
    step = one_loss(lambda x: tf.reduce_mean(three_layers(x, w) ** 2), w)
    assert not differing(step, Cut(grid=(3, 2), batch=2))


def exact_or_refused(step, *cuts):
    """The reason for a refusal; otherwise the numbers must be right."""
    try:
        assert not differing(step, *cuts, needs_backward=False)
    except NotTileableError as refused:
        return str(refused)
    return None


@pytest.mark.parametrize("activation", [tf.nn.relu, tf.nn.softplus], ids=["relu", "softplus"])
def test_gradient_penalty_is_exact_or_refused(activation):
    w = weights(*KERNELS)

    def forward(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            score = tf.reduce_mean(three_layers(x, w, activation))
        slope = tape.gradient(score, x)
        return score + tf.reduce_mean((tf.sqrt(tf.reduce_sum(slope**2, [1, 2, 3])) - 1.0) ** 2)

    reason = exact_or_refused(one_loss(forward, w), Cut(grid=(2, 2)))
    assert reason is None or "its backward pass goes through" in reason


def test_called_functions_are_inlined():
    w = weights(*KERNELS)
    calls = tf.Variable(0, dtype="int64")

    @tf.function
    def layer(x, kernel):
        calls.assign_add(1)
        return tf.nn.relu(conv_op(x, kernel))

    @tf.function
    def net(x):
        return tf.identity(conv_op(layer(layer(x, w[0]), w[1]), w[2]), "out")

    step = one_loss(lambda x: tf.reduce_mean(net(x) ** 2), w)
    step = Step(step.concrete_fn, [*w, calls], step.batches)
    assert not differing(step, Cut(grid=(2, 3)))


def test_print_in_segment_prints_same(tmp_path):
    w = weights(*KERNELS)
    printed = tmp_path / "printed"

    def forward(x):
        hidden = tf.nn.relu(conv_op(x, w[0]))
        tf.print("mean", tf.reduce_mean(hidden), output_stream=f"file://{printed}")
        return tf.reduce_mean(three_layers(hidden, w[1:]) ** 2)

    step = one_loss(forward, w)
    rewritten = rewrite(step.concrete_fn, Cut(grid=(2, 2)))
    step.run(step.concrete_fn)
    plain = printed.read_text()
    printed.unlink()
    step.run(rewritten.function)
    lines = zip(plain.splitlines(), printed.read_text().splitlines(), strict=True)
    assert plain.count("mean") == len(step.batches)
    assert all(error(float(a.split()[1]), float(b.split()[1])) < 1e-10 for a, b in lines)
    assert not differing(step, Cut(grid=(2, 2)))


def checked_in_segment(x, kernel):
    hidden = tf.nn.relu(conv_op(x, kernel))
    tf.debugging.assert_less(hidden, tf.constant(1e3, "float64"), "too large")
    tf.debugging.assert_all_finite(hidden, "not finite")
    return hidden


def checked_before_segment(x, kernel):
    with tf.control_dependencies([tf.debugging.assert_less(x, tf.constant(1e3, "float64"), "too large")]):
        return tf.nn.relu(conv_op(x, kernel))


@pytest.mark.parametrize("checked", [checked_in_segment, checked_before_segment])
def test_assertion_fires(checked):
    w = weights(*KERNELS)
    step = one_loss(lambda x: tf.reduce_mean(three_layers(checked(x, w[0]), w[1:]) ** 2), w)
    assert not differing(step, Cut(grid=(2, 2)))
    function = rewrite(step.concrete_fn, Cut(grid=(2, 2))).function
    with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
        function(tf.constant(step.batches[0][0] * 1e6))


def test_failed_check_before_segment_ends_step():
    w = weights(*KERNELS)

    def forward(x):
        hidden = tf.debugging.assert_all_finite(tf.nn.relu(conv_op(x, w[0])), "not finite")
        return tf.reduce_mean(three_layers(hidden, w[1:]) ** 2)

    step = one_loss(forward, w)
    with pytest.raises(NotTileableError, match="leave the segment and come back through `VerifyFinite"):
        rewrite(step.concrete_fn, Cut(grid=(2, 2)))


def test_size_behind_assertion_is_static():
    w = weights(*KERNELS)

    def forward(x):
        hidden = tf.nn.relu(conv_op(x, w[0]))
        with tf.control_dependencies([tf.debugging.assert_less(x, tf.constant(1e3, "float64"))]):
            size = tf.raw_ops.Shape(input=hidden)
        return tf.reduce_sum(three_layers(hidden, w[1:]) ** 2) / tf.cast(size[1], "float64")

    step = descending(forward, w, known_batch=True)
    assert not differing(step, Cut(grid=(2, 2)))
    assert not differing(step, Cut(grid=(2, 2), stored=("Relu",)))


def test_inner_shapes_stay_static():
    w = weights(*KERNELS)

    def forward(x):
        hidden = tf.nn.relu(conv_op(x, w[0]))
        count = tf.cast(tf.reduce_prod(tf.shape(hidden)), "float64")
        return tf.reduce_sum(three_layers(hidden, w[1:]) ** 2) / count

    assert not differing(one_loss(forward, w), Cut(grid=(2, 2), batch=2))


@pytest.mark.parametrize("size", (tf.size, lambda x: tf.reduce_prod(tf.shape(x)), tf.rank, lambda x: tf.shape(x)[0]))
def test_size_of_removed_tensor_equals_plain(size):
    w = weights(*KERNELS)

    def forward(x):
        hidden = tf.nn.relu(conv_op(x, w[0]))
        return tf.reduce_sum(three_layers(hidden, w[1:]) ** 2) / tf.cast(size(hidden), "float64")

    assert not differing(one_loss(forward, w), Cut(grid=(2, 2)))


def test_inexact_gradient_is_cast_outside_loop():
    """Parts of a gradient that are cast to integers do not add up to the whole one, cast."""
    w = weights(*KERNELS)

    def body(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(three_layers(x, w) ** 2)
        return loss, tf.cast(tape.gradient(loss, x), "int32")

    assert not differing(hand_written(body, w, images()), Cut(grid=(2, 2)))


def test_unreturned_loss_needs_no_forward_loop():
    w = weights(*KERNELS)

    def body(x, target):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.identity((three_layers(x, w) - target) ** 2, "last"))
        descend(w, tape.gradient(loss, w))

    batches = [a + b for a, b in zip(images(), images(), strict=True)]
    specs = [tf.TensorSpec((None, *a.shape[1:]), a.dtype) for a in batches[0]]
    step = Step(tf.function(body).get_concrete_function(*specs), w, batches)
    cut = Cut(("x", "target"), "last", (2, 3), batch=2)
    assert not differing(step, cut)
    loops = [n.name for n in rewrite(step.concrete_fn, cut).graph.nodes.values() if n.op.endswith("While")]
    assert loops == ["sft/segment0/backward/while"]
    stored = Cut(("x", "target"), "last", (2, 3), backward_grid=(1, 2), stored=("Relu",))
    assert not differing(step, stored)
    assert len([n for n in rewrite(step.concrete_fn, stored).graph.nodes.values() if n.op.endswith("While")]) == 2


def test_op_keeps_its_device():
    w = weights(*KERNELS)

    def forward(x):
        with tf.device("/device:CPU:0"):
            return tf.reduce_sum(three_layers(x, w) ** 2)

    step = one_loss(forward, w)
    graph = rewrite(step.concrete_fn, Cut(grid=(2, 2))).graph
    nodes = [node for function in graph.library.function for node in function.node_def if node.op == "Conv2D"]
    assert nodes and all("CPU:0" in node.device for node in nodes)
    assert not differing(step, Cut(grid=(2, 2)))


def test_slice_of_batch_in_segment_is_refused():
    w = weights(*KERNELS)

    def forward(x):
        half = tf.slice(conv_op(x, w[0]), [0, 0, 0, 0], [tf.shape(x)[0] // 2, 13, 14, 4])
        return tf.reduce_mean(three_layers(half, w[1:]) ** 2)

    with pytest.raises(NotTileableError, match="a slice of the batch by a size computed at run time"):
        rewrite(one_loss(forward, w).concrete_fn, Cut(grid=(2, 2)))


def test_sum_in_custom_gradient_is_refused():
    """A consumer of a sum over the image must not get the sum over one tile."""
    w = weights(*KERNELS)

    @tf.custom_gradient
    def activation(x):
        def gradient(dy):
            total = tf.reduce_sum(dy * tf.sign(x), [0, 1, 2], keepdims=True)
            return dy * tf.where(x > 0, total, tf.zeros_like(total))

        return tf.nn.relu(x) + 0.1 * x, gradient

    step = one_loss(lambda x: tf.reduce_mean(three_layers(x, w, activation) ** 2), w)
    with pytest.raises(NotTileableError, match="it depends on a reduction over the image"):
        rewrite(step.concrete_fn, Cut(grid=(2, 2)))


def test_single_image_of_unknown_batch_equals_plain():
    """Its leading size is unknown as well, and not the batch."""
    w = weights(*KERNELS)

    def forward(x):
        out = three_layers(x, w)
        return tf.reduce_mean((out - out[:1]) ** 2)

    assert not differing(one_loss(forward, w), Cut(grid=(2, 2)))


@pytest.mark.parametrize("params", (SFTParams((2, 2)), tflms_sft.LMSParams(tier="disk", min_bytes=0)))
def test_ops_controlled_by_argument_equal_plain(params):
    """And a number among the arguments, which has no batch."""
    weight = tf.Variable(np.random.default_rng(0).normal(size=(3, 3, 4, 4)))

    def step(images, gate):
        with tf.GradientTape() as tape:
            with tf.control_dependencies([gate]):
                y = tf.nn.relu(tf.nn.conv2d(images, weight, 1, "SAME"))
            loss = tf.reduce_sum(tf.nn.relu(tf.nn.conv2d(y, weight, 1, "SAME")))
        return loss, tape.gradient(loss, weight)

    arguments = tf.constant(np.random.default_rng(1).normal(size=(2, 16, 16, 4))), tf.constant(1.0)
    found = tflms_sft.rewrite(tf.function(step), params, *arguments)
    assert found.plan.changed and found.plan.batch == 2
    for got, want in zip(found(*arguments), step(*arguments), strict=True):
        assert np.allclose(got, want, rtol=1e-12, atol=0)


def test_keyword_only_defaults_are_kept():
    weight = tf.Variable(np.ones((3, 3, 4, 4)))

    @tf.function
    def step(images, *, scale=2.0, gate=None):
        with tf.GradientTape() as tape:
            loss = scale * tf.reduce_sum(tf.nn.relu(tf.nn.conv2d(images, weight, 1, "SAME")) ** 2)
        return loss, tape.gradient(loss, weight)

    images = tf.constant(np.random.default_rng(1).normal(size=(2, 16, 16, 4)))
    fast = tflms_sft.rewrite(step, SFTParams((2, 2)), images)
    for got, want in zip(fast(images), step(images), strict=True):
        assert np.allclose(got, want, rtol=1e-12, atol=0)
    assert float(fast(images, scale=2.0)[0]) == float(fast(images)[0])
    with pytest.raises(TypeError, match="rewritten for one signature"):
        fast(images, scale=3.0)
