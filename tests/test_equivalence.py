"""The rewritten step gives the numbers of the plain one: results, gradients, weights, slots, metric state."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import Cut, Step, differing, error, keras_step, rewrite
from keras import layers

from rewriters.errors import NotTileableError
from rewriters.intervals import Window
from rewriters.registry import Kind
from rewriters.rules.elementwise import Additive


def fresh():
    """The same names and the same initial weights as at the start of the test."""
    keras.backend.clear_session(free_memory=False)
    keras.config.set_floatx("float32")
    keras.utils.set_random_seed(0)


@pytest.fixture(autouse=True)
def fresh_keras():
    """As in every test, without the full garbage collection: it takes as long as a small test."""
    fresh()
    yield
    fresh()


# Nets -------------------------------------------------------------------------------------------------------


def conv(filters, kernel=3, **options):
    return layers.Conv2D(filters, kernel, **{"padding": "same", "activation": "relu", **options})


def vgg(x):
    for filters in (3, 4):
        x = conv(filters)(x)
        x = conv(filters, name=f"conv{filters}")(x)
        x = layers.MaxPool2D(2, name=f"pool{filters}")(x)
    return conv(5, name="out")(x)


def residual(x):
    x = conv(4, 7, strides=2)(x)
    x = layers.MaxPool2D(3, 2, padding="same", name="stem")(x)
    for strides in (1, 2):
        shortcut = conv(5, 1, strides=strides, activation=None)(x)
        y = conv(5, strides=strides)(x)
        y = conv(5, activation=None)(y)
        x = layers.Activation("relu", name=f"block{strides}")(layers.Add()([shortcut, y]))
    y = conv(5, activation=None)(conv(5)(x))
    return layers.Activation("relu", name="out")(layers.Add()([x, y]))


def separable(x):
    x = conv(4, strides=2, activation="silu")(x)
    x = layers.DepthwiseConv2D(5, padding="same", activation="gelu")(x)
    x = layers.ZeroPadding2D(((0, 1), (1, 2)))(x)
    x = layers.DepthwiseConv2D(3, strides=2, activation="silu", depth_multiplier=2)(x)
    x = layers.SeparableConv2D(4, 3, padding="same", activation="silu")(x)
    return layers.AveragePooling2D(3, 2, padding="same", name="out")(x)


def unet(x):
    wide = conv(3)(x)
    deep = layers.ZeroPadding2D(((0, wide.shape[1] % 2), (0, wide.shape[2] % 2)))(wide)
    deep = conv(4)(layers.MaxPool2D(2)(deep))
    up = layers.Conv2DTranspose(3, 2, strides=2, activation="relu")(deep)
    up = layers.Conv2DTranspose(3, 3, padding="same")(up)
    wide = layers.ZeroPadding2D(((0, up.shape[1] - wide.shape[1]), (0, up.shape[2] - wide.shape[2])))(wide)
    return conv(3, name="out")(layers.Concatenate()([wide, up]))


def dense_block(x):
    x = conv(3, activation=None)(x)
    for _ in range(3):
        x = layers.Concatenate()([x, conv(2)(x)])
    return layers.AveragePooling2D(2, name="out")(x)


def frozen_norm(x):
    for number in range(2):
        norm = layers.BatchNormalization(
            beta_initializer="random_normal",
            gamma_initializer="random_normal",
            moving_mean_initializer="random_normal",
        )
        norm.trainable = False
        x = layers.Activation("relu", name=f"relu{number}")(norm(conv(4, activation=None)(x)))
    return conv(3, name="out")(x)


NETS = [vgg, residual, separable, unet, dense_block, frozen_norm]
each_net = pytest.mark.parametrize("net", NETS, ids=lambda net: net.__name__)


@each_net
def test_tiles_compute_what_the_plain_step_computes(net):
    assert not differing(keras_step(net, steps=3), Cut(grid=(2, 3)))


@pytest.mark.parametrize(
    ("net", "size", "grid"),
    [
        (vgg, (50, 53), (5, 3)),
        (vgg, (63, 37), (1, 2)),
        (residual, (50, 63), (3, 1)),
        (residual, (63, 50), (3, 3)),
        (separable, (50, 37), (4, 2)),
        (separable, (63, 63), (5, 3)),
        (unet, (50, 50), (5, 3)),
        (unet, (63, 37), (2, 5)),
        (dense_block, (63, 50), (5, 3)),
        (frozen_norm, (37, 63), (4, 4)),
    ],
)
def test_odd_sizes_and_uneven_grids(net, size, grid):
    assert not differing(keras_step(net, size, steps=1), Cut(grid=grid))


@pytest.mark.parametrize("net", [vgg, unet], ids=lambda net: net.__name__)
@pytest.mark.parametrize(
    ("known", "sizes"),
    [(True, [3, 3]), (False, [3, 3]), (False, [3, 3, 2, 1])],
    ids=["known", "unknown", "partial"],
)
def test_batch_tiles(net, known, sizes):
    step = keras_step(net, (19, 22), sizes, known)
    assert not differing(step, Cut(grid=(2, 2), batch=4))


def test_batch_tiles_alone():
    assert not differing(keras_step(residual, (19, 22), [4, 3], False), Cut(grid=(1, 1), batch=2))


@pytest.mark.parametrize(
    ("net", "stored"), [(vgg, ("pool3",)), (vgg, ("conv3", "conv4")), (residual, ("stem", "block2"))]
)
def test_inner_tensors_can_be_stored(net, stored):
    step = keras_step(net)
    cut = Cut(grid=(2, 3), stored=stored)
    assert not differing(step, cut)
    (segment,) = rewrite(step.concrete_fn, cut).segments
    assert len(segment.stored) == len(stored)


@pytest.mark.parametrize(
    ("net", "cuts"),
    [
        (vgg, [Cut("input", "pool3", (4, 4)), Cut("pool3", "out", (2, 3))]),
        (vgg, [Cut("pool3", "out", (2, 3)), Cut("input", "pool3", (4, 4))]),
        (residual, [Cut("input", "stem"), Cut("stem", "block2", (3, 2)), Cut("block2", "out", (2, 1))]),
        (residual, [Cut("input", "block1"), Cut("block2", "out", (1, 2), batch=2)]),
        (vgg, [Cut("input", "conv3", (3, 3)), Cut("conv3", "conv4", (1, 4)), Cut("conv4", "out", (4, 1))]),
    ],
)
def test_segments_can_be_chained(net, cuts):
    assert not differing(keras_step(net), *cuts)


@pytest.mark.parametrize("backward", [(1, 1), (5, 2), (4, 4)])
def test_the_backward_loop_may_have_a_grid_of_its_own(backward):
    assert not differing(keras_step(residual), Cut(grid=(2, 3), backward_grid=backward))


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
        lambda: keras.optimizers.Adam(1e-2),
        lambda: keras.optimizers.SGD(0.1, clipnorm=0.01),
        lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.01),
        lambda: keras.optimizers.Adam(1e-2, clipvalue=0.001, weight_decay=0.1),
    ],
    ids=["momentum", "adam", "clipnorm", "global_clipnorm", "clipvalue"],
)
def test_optimizers(optimizer):
    assert not differing(keras_step(vgg, (19, 22), optimizer=optimizer()), Cut(grid=(2, 3)))


def test_weight_regularizers_and_metrics():
    def net(x):
        x = conv(4, kernel_regularizer=keras.regularizers.L2(0.1), bias_regularizer="l1")(x)
        return conv(4, name="out", kernel_regularizer=keras.regularizers.L1L2(0.01, 0.1))(x)

    metrics = {"metrics": ["accuracy"], "weighted_metrics": ["sparse_categorical_crossentropy"]}
    assert not differing(keras_step(net, (19, 22), compile_args=metrics), Cut(grid=(3, 2)))


def test_float32_gradients_of_one_step():
    step = keras_step(residual, floatx="float32", steps=1)
    assert not differing(step, Cut(grid=(3, 3)), tolerance=2e-5)


@pytest.mark.parametrize(("policy", "scale"), [("mixed_float16", 2.0**15), ("mixed_bfloat16", 1.0)])
def test_half_precision_sums_are_no_worse_than_plain_ones(policy, scale):
    exact = keras_step(vgg, (19, 22), floatx="float32", steps=1)
    want = exact.run(exact.concrete_fn)
    fresh()
    keras.config.set_dtype_policy(policy)
    step = keras_step(vgg, (19, 22), floatx="float32", steps=1)
    plain, tiled = step.run(step.concrete_fn), step.run(rewrite(step.concrete_fn, Cut()).function)
    for name in (name for name in want if "gradients" in name):
        far = error(plain[name] / scale, want[name])
        assert error(tiled[name] / scale, want[name]) <= max(1.5 * far, 0.03), name


@pytest.fixture
def no_grappler():
    """Grappler rewrites arithmetic by what stands around it, and in a loop other things stand around it."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False, **before})


def bitwise(step, *cuts):
    """Names of what is not the same to the last bit; the plain step must agree with itself."""
    plain = step.run(step.concrete_fn)
    again = step.run(step.concrete_fn)
    assert not [name for name in plain if not np.array_equal(plain[name], again[name])], (
        "plain step not deterministic"
    )
    tiled = step.run(rewrite(step.concrete_fn, *cuts).function)
    return [name for name in plain if not np.array_equal(plain[name], tiled[name])]


@each_net
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_one_tile_is_the_same_to_the_last_bit(net, known, no_grappler):
    assert not bitwise(keras_step(net, known_batch=known), Cut(grid=(1, 1)))


@pytest.mark.parametrize("net", [vgg, residual], ids=lambda net: net.__name__)
def test_one_tile_is_the_same_to_the_last_bit_after_grappler(net):
    assert not bitwise(keras_step(net), Cut(grid=(1, 1)))


# Loops written by hand --------------------------------------------------------------------------------------


def weights(*shapes):
    """Float64 variables, and random numbers to start them with."""
    random = np.random.default_rng(1)
    return [tf.Variable(random.normal(size=shape) * 0.5, dtype="float64") for shape in shapes]


def images(batches=2, shape=(2, 13, 14, 3)):
    """One batch per step."""
    random = np.random.default_rng(2)
    return [(random.normal(size=shape),) for _ in range(batches)]


def conv_op(x, w, stride=1):
    return tf.nn.conv2d(x, w, stride, "SAME")


def hand_written(body, variables, batches):
    """`body` traced for images of any batch size."""
    specs = [tf.TensorSpec((None, *a.shape[1:]), a.dtype) for a in batches[0]]
    return Step(tf.function(body).get_concrete_function(*specs), variables, batches)


def descend(variables, gradients):
    for variable, gradient in zip(variables, gradients, strict=True):
        variable.assign_sub(0.1 * gradient)


def test_two_optimizers_that_read_variables_before_and_after_an_update():
    """As a GAN's step: the generator learns from a discriminator that has just been updated."""
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


def test_two_heads_on_one_trunk():
    w = weights((3, 3, 3, 4), (3, 3, 4, 2), (5, 5, 4, 3), (1, 1, 2, 2))

    def body(x):
        with tf.GradientTape() as tape:
            trunk = tf.nn.relu(conv_op(x, w[0]))
            fine = tf.identity(conv_op(tf.nn.tanh(conv_op(trunk, w[1])), w[3]), "fine")
            coarse = tf.identity(conv_op(tf.nn.relu(trunk), w[2], 3), "coarse")
            loss = tf.reduce_mean(fine**2) + 0.3 * tf.reduce_mean(tf.abs(coarse))
        gradients = tape.gradient(loss, w)
        descend(w, gradients)
        return loss, gradients

    step = hand_written(body, w, images())
    assert not differing(step, Cut(exit=("fine", "coarse"), grid=(3, 4)))
    assert not differing(step, Cut(exit="fine", grid=(3, 4)))


def test_an_exit_smaller_than_the_grid():
    """Tiles beyond the last row of an exit must add nothing to the gradient."""
    w = weights((3, 3, 3, 4), (13, 14, 4, 2), (12, 12, 4, 2))

    def body(x):
        with tf.GradientTape() as tape:
            trunk = tf.nn.relu(conv_op(tf.nn.tanh(conv_op(x, w[0])), tf.ones((3, 3, 4, 4), "float64")))
            pixel = tf.identity(tf.nn.conv2d(trunk, w[1], 1, "VALID"), "pixel")
            corner = tf.identity(tf.nn.conv2d(trunk, w[2], 1, "VALID"), "corner")
            loss = tf.reduce_mean(trunk**2) + tf.reduce_mean(pixel) + tf.reduce_mean(corner**2)
        gradients = tape.gradient(loss, w)
        descend(w, gradients)
        return loss, gradients

    step = hand_written(body, w, images())
    assert not differing(step, Cut(exit=("pixel", "corner"), grid=(4, 5)))


def test_images_of_different_batch_in_one_segment():
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
    specs = [tf.TensorSpec(a.shape, a.dtype) for a in batches[0]]
    step = Step(tf.function(body).get_concrete_function(*specs), w, batches)
    assert not differing(step, Cut(("x", "template"), ("many", "one"), (2, 2), batch=2))


def three_layers(x, w, activation=tf.nn.relu):
    for kernel in w:
        x = activation(conv_op(x, kernel))
    return tf.identity(x, "out")


def one_loss(forward, w, batches=None):
    """A step that descends `forward(x)`, traced for an unknown batch."""

    def body(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = forward(x)
        *gradients, of_input = tape.gradient(loss, [*w, x])
        descend(w, gradients)
        return loss, gradients, of_input

    return hand_written(body, w, batches or images())


KERNELS = ((3, 3, 3, 4), (3, 3, 4, 4), (3, 3, 4, 3))


def test_the_gradient_of_the_input_may_be_a_result():
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
def test_a_gradient_penalty_is_exact_or_refused(activation):
    w = weights(*KERNELS)

    def forward(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            score = tf.reduce_mean(three_layers(x, w, activation))
        slope = tape.gradient(score, x)
        return score + tf.reduce_mean((tf.sqrt(tf.reduce_sum(slope**2, [1, 2, 3])) - 1.0) ** 2)

    reason = exact_or_refused(one_loss(forward, w), Cut(grid=(2, 2)))
    assert reason is None or "its backward pass goes through" in reason


def test_functions_called_by_the_step_are_inlined():
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


def test_a_print_inside_a_segment_prints_what_it_did(tmp_path):
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


def test_an_assertion_inside_a_segment_still_fires():
    w = weights(*KERNELS)

    def forward(x):
        hidden = tf.nn.relu(conv_op(x, w[0]))
        tf.debugging.assert_less(hidden, tf.constant(1e3, "float64"), "too large")
        tf.debugging.assert_all_finite(hidden, "not finite")
        return tf.reduce_mean(three_layers(hidden, w[1:]) ** 2)

    step = one_loss(forward, w)
    assert not differing(step, Cut(grid=(2, 2)))
    function = rewrite(step.concrete_fn, Cut(grid=(2, 2))).function
    with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
        function(tf.constant(step.batches[0][0] * 1e6))


def test_a_check_that_the_segment_waits_for_ends_it():
    w = weights(*KERNELS)

    def forward(x):
        hidden = tf.debugging.assert_all_finite(tf.nn.relu(conv_op(x, w[0])), "not finite")
        return tf.reduce_mean(three_layers(hidden, w[1:]) ** 2)

    step = one_loss(forward, w)
    with pytest.raises(NotTileableError, match="leave the segment and come back through `VerifyFinite"):
        rewrite(step.concrete_fn, Cut(grid=(2, 2)))


def test_a_segment_waits_for_an_assertion_on_its_input():
    w = weights(*KERNELS)

    def forward(x):
        with tf.control_dependencies([tf.debugging.assert_less(x, tf.constant(1e3, "float64"), "too large")]):
            hidden = tf.nn.relu(conv_op(x, w[0]))
        return tf.reduce_mean(three_layers(hidden, w[1:]) ** 2)

    step = one_loss(forward, w)
    assert not differing(step, Cut(grid=(2, 2)))
    with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
        rewrite(step.concrete_fn, Cut(grid=(2, 2))).function(tf.constant(step.batches[0][0] * 1e6))


def test_shapes_of_inner_tensors_stay_known():
    w = weights(*KERNELS)

    def forward(x):
        hidden = tf.nn.relu(conv_op(x, w[0]))
        count = tf.cast(tf.reduce_prod(tf.shape(hidden)), "float64")
        return tf.reduce_sum(three_layers(hidden, w[1:]) ** 2) / count

    assert not differing(one_loss(forward, w), Cut(grid=(2, 2), batch=2))


@pytest.mark.parametrize("size", (tf.size, lambda x: tf.reduce_prod(tf.shape(x)), tf.rank, lambda x: tf.shape(x)[0]))
def test_a_size_of_what_is_not_there_any_more(size):
    w = weights(*KERNELS)

    def forward(x):
        hidden = tf.nn.relu(conv_op(x, w[0]))
        return tf.reduce_sum(three_layers(hidden, w[1:]) ** 2) / tf.cast(size(hidden), "float64")

    assert not differing(one_loss(forward, w), Cut(grid=(2, 2)))


def test_the_shape_of_an_exit_from_which_the_segment_makes_a_mask():
    """The loop would wait for its own exit."""

    def net(x):
        first = conv(4, name="first")(x)
        head = layers.GlobalAveragePooling2D()(first)
        second = conv(4, name="second")(layers.Dropout(0.3, seed=1)(first))
        return second * layers.Reshape((1, 1, 4))(layers.Dense(4)(head))

    step = keras_step(net, (11, 12), [3, 3, 1], known_batch=False)
    assert not differing(step, Cut("input", ("first", "second"), (2, 2)))
    assert not differing(step, Cut("input", ("first", "second"), (2, 2), batch=2))


def test_a_gradient_that_is_rounded_is_cast_whole():
    """Parts of a gradient that are cast to integers do not add up to the whole one, cast."""
    w = weights(*KERNELS)

    def body(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(three_layers(x, w) ** 2)
        return loss, tf.cast(tape.gradient(loss, x), "int32")

    assert not differing(hand_written(body, w, images()), Cut(grid=(2, 2)))


def test_a_loss_that_is_not_returned_needs_no_forward_loop():
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


def test_an_op_stays_on_the_device_that_it_was_given():
    w = weights(*KERNELS)

    def forward(x):
        with tf.device("/device:CPU:0"):
            return tf.reduce_sum(three_layers(x, w) ** 2)

    step = one_loss(forward, w)
    graph = rewrite(step.concrete_fn, Cut(grid=(2, 2))).graph
    nodes = [node for function in graph.library.function for node in function.node_def if node.op == "Conv2D"]
    assert nodes and all("CPU:0" in node.device for node in nodes)
    assert not differing(step, Cut(grid=(2, 2)))


def test_a_part_of_the_batch_is_refused():
    w = weights(*KERNELS)

    def forward(x):
        half = tf.slice(conv_op(x, w[0]), [0, 0, 0, 0], [tf.shape(x)[0] // 2, 13, 14, 4])
        return tf.reduce_mean(three_layers(half, w[1:]) ** 2)

    with pytest.raises(NotTileableError, match="a slice of the batch by a size computed at run time"):
        rewrite(one_loss(forward, w).concrete_fn, Cut(grid=(2, 2)))


@pytest.mark.parametrize("layer", [layers.Dropout, layers.SpatialDropout2D, layers.GaussianNoise])
def test_random_layers_draw_what_they_drew(layer):
    def net(x):
        return conv(3, name="out")(conv(3)(layer(0.4)(conv(4)(x))))

    assert not differing(keras_step(net, (11, 12), [2, 2, 1], known_batch=False), Cut(grid=(2, 3), batch=2))


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_custom_gradients_keep_nothing_whole(known):
    """silu's gradient also computes from its input alone; that is no reason to keep the input."""
    step = keras_step(separable, (19, 22), known_batch=known)
    (segment,) = rewrite(step.concrete_fn, Cut()).segments
    assert len(segment.exits) == 1 and not segment.notes


def test_the_input_of_a_custom_gradient_may_be_stored():
    """What the backward pass derives from it is then made outside of the loop, and is no gradient."""

    def net(x):
        x = layers.Activation("silu")(conv(4, activation=None, name="kept")(conv(3)(x)))
        return conv(3, name="out")(conv(3)(x))

    assert not differing(keras_step(net, (11, 12)), Cut(grid=(2, 3), stored=("kept",)))


def test_a_sum_inside_a_custom_gradient_is_refused():
    """What reads a sum over the image must not get one tile's part of it."""
    w = weights(*KERNELS)

    @tf.custom_gradient
    def activation(x):
        def gradient(dy):
            total = tf.reduce_sum(dy * tf.sign(x), [0, 1, 2], keepdims=True)
            return dy * tf.where(x > 0, total, tf.zeros_like(total))

        return tf.nn.relu(x) + 0.1 * x, gradient

    step = one_loss(lambda x: tf.reduce_mean(three_layers(x, w, activation) ** 2), w)
    with pytest.raises(NotTileableError, match="it waits for a sum over the image"):
        rewrite(step.concrete_fn, Cut(grid=(2, 2)))


def test_activity_regularizers():
    def net(x):
        x = conv(4, activity_regularizer=keras.regularizers.L2(0.1))(conv(4)(x))
        return conv(3, name="out")(conv(4)(x))

    assert not differing(keras_step(net, (11, 12)), Cut(grid=(2, 3)))


def test_one_image_taken_from_an_unknown_batch():
    """Its leading size is unknown as well, and not the batch."""
    w = weights(*KERNELS)

    def forward(x):
        out = three_layers(x, w)
        return tf.reduce_mean((out - out[:1]) ** 2)

    assert not differing(one_loss(forward, w), Cut(grid=(2, 2)))


# Activations ------------------------------------------------------------------------------------------------

NOT_ACTIVATIONS = ("get", "serialize", "deserialize")
NOT_ELEMENTWISE = {
    "glu": "halves the channels",
    "sparsemax": "sorts the channels, and sorting has no rule",
}
WITH_ARGUMENTS = {
    "threshold": functools.partial(keras.activations.threshold, threshold=0.3, default_value=0.1)
}
ACTIVATIONS = [
    name
    for name, value in sorted(vars(keras.activations).items())
    if callable(value) and not name.startswith("_") and name not in (*NOT_ACTIVATIONS, *NOT_ELEMENTWISE)
]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    function = WITH_ARGUMENTS.get(name, getattr(keras.activations, name))

    def net(x):
        x = layers.Activation(lambda t: function(t))(conv(4, activation=None)(x))
        return conv(3, name="out")(x)

    assert not differing(keras_step(net, (11, 12), steps=2), Cut(grid=(2, 3)))


# The comparison notices -------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", [vgg, residual, unet], ids=lambda net: net.__name__)
def test_halo_rows_that_are_off_by_one_are_noticed(net, monkeypatch):
    gather = Window.gather
    monkeypatch.setattr(Window, "gather", lambda self, out: gather(self, out).shift(1))
    step = keras_step(net, (19, 22), steps=1)
    with contextlib.suppress(AssertionError):  # The emitter may find rows missing first.
        assert len(differing(step, Cut(grid=(2, 3)))) > 3


def test_affine_ops_taken_for_linear_are_noticed(monkeypatch):
    """The kind check is what keeps forward values from being counted once per overlapping tile."""
    w = weights(*KERNELS)

    @tf.custom_gradient
    def affine(x):
        return x * 1.0, lambda dy: dy + tf.tanh(x)

    step = one_loss(lambda x: tf.reduce_mean(three_layers(x, w, lambda t: tf.nn.relu(affine(t))) ** 2), w)
    with pytest.raises(NotTileableError, match="adds forward values to a gradient"):
        rewrite(step.concrete_fn, Cut(grid=(2, 2)))
    honest = Additive.result

    def blind(self, op, kinds):
        return Kind.PARTIAL if Kind.PARTIAL in kinds else honest(self, op, kinds)

    monkeypatch.setattr(Additive, "result", blind)
    assert differing(step, Cut(grid=(2, 2)))


# At length --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@each_net
@pytest.mark.parametrize("size", [(37, 50), (50, 63), (63, 37)], ids=str)
@pytest.mark.parametrize("grid", [(1, 1), (1, 3), (2, 2), (5, 3)], ids=str)
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("optimizer", [keras.optimizers.SGD, keras.optimizers.Adam], ids=["sgd", "adam"])
def test_everything_with_everything(net, size, grid, known, optimizer):
    step = keras_step(net, size, [3, 3, 3 if known else 2], known, optimizer(0.01))
    assert not differing(step, Cut(grid=grid, batch=1 if known else 4))
