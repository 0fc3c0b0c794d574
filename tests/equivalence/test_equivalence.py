"""The rewritten step gives the numbers of the plain one: results, gradients, weights, slots, metric state."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import Cut, differing, error, keras_step, rewrite
from hand_written import KERNELS, one_loss, three_layers, weights
from keras import layers
from nets import PLAIN, conv, dense_block, frozen_norm, residual, separable, unet, vgg

from rewriters.errors import NotTileableError
from rewriters.rules.elementwise import Additive
from rewriters.rules.intervals import Window
from rewriters.rules.registry import TileKind


def fresh():
    """Reset names and seeds, so that initial weights equal those at the start of the test."""
    keras.backend.clear_session(free_memory=False)
    keras.config.set_floatx("float32")
    keras.utils.set_random_seed(0)


each_net = pytest.mark.parametrize("net", PLAIN, ids=lambda net: net.__name__)


@each_net
def test_tiled_net_equals_plain(net):
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
def test_tiled_net_of_odd_size_equals_plain(net, size, grid):
    assert not differing(keras_step(net, size, steps=1), Cut(grid=grid))


@pytest.mark.parametrize("net", [vgg, unet], ids=lambda net: net.__name__)
@pytest.mark.parametrize(
    ("known", "sizes"), [(True, [3, 3]), (False, [3, 3]), (False, [3, 3, 2, 1])], ids=["known", "unknown", "partial"]
)
def test_batch_and_image_tiles_equal_plain(net, known, sizes):
    step = keras_step(net, (19, 22), sizes, known)
    assert not differing(step, Cut(grid=(2, 2), batch=4))


def test_batch_tiles_equal_plain():
    assert not differing(keras_step(residual, (19, 22), [4, 3], False), Cut(grid=(1, 1), batch=2))


@pytest.mark.parametrize(
    ("net", "stored"), [(vgg, ("pool3",)), (vgg, ("conv3", "conv4")), (residual, ("stem", "block2"))]
)
def test_stored_inner_tensors_equal_plain(net, stored):
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
def test_chained_segments_equal_plain(net, cuts):
    assert not differing(keras_step(net), *cuts)


@pytest.mark.parametrize("backward", [(1, 1), (5, 2), (4, 4)])
def test_backward_loop_with_other_grid_equals_plain(backward):
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
def test_tiled_step_with_each_optimizer_equals_plain(optimizer):
    assert not differing(keras_step(vgg, (19, 22), optimizer=optimizer()), Cut(grid=(2, 3)))


def test_tiled_step_with_regularizers_and_metrics_equals_plain():
    def net(x):
        x = conv(4, kernel_regularizer=keras.regularizers.L2(0.1), bias_regularizer=keras.regularizers.L1L2(0.01))(x)
        return conv(4, name="out", kernel_regularizer=keras.regularizers.L1L2(0.01, 0.1))(x)

    metrics = {"metrics": ["accuracy"], "weighted_metrics": ["sparse_categorical_crossentropy"]}
    assert not differing(keras_step(net, (19, 22), compile_args=metrics), Cut(grid=(3, 2)))


def test_tiled_float32_gradients_equal_plain():
    step = keras_step(residual, floatx="float32", steps=1)
    assert not differing(step, Cut(grid=(3, 3)), tolerance=2e-5)


@pytest.mark.parametrize(("policy", "scale"), [("mixed_float16", 2.0**15), ("mixed_bfloat16", 1.0)])
def test_tiled_half_precision_sums_are_no_worse(policy, scale):
    exact = keras_step(vgg, (19, 22), floatx="float32", steps=1)
    want = exact.run(exact.concrete_fn)
    fresh()
    keras.config.set_dtype_policy(policy)
    step = keras_step(vgg, (19, 22), floatx="float32", steps=1)
    plain, tiled = step.run(step.concrete_fn), step.run(rewrite(step.concrete_fn, Cut()).function)
    for name in (name for name in want if "gradients" in name):
        far = error(plain[name] / scale, want[name])
        assert error(tiled[name] / scale, want[name]) <= max(1.5 * far, 0.04), name


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
    assert not [name for name in plain if not np.array_equal(plain[name], again[name])], "plain step not deterministic"
    tiled = step.run(rewrite(step.concrete_fn, *cuts).function)
    return [name for name in plain if not np.array_equal(plain[name], tiled[name])]


@each_net
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_single_tile_equals_plain_bitwise(net, known, no_grappler):
    assert not bitwise(keras_step(net, known_batch=known), Cut(grid=(1, 1)))


@pytest.mark.parametrize("net", [vgg, residual], ids=lambda net: net.__name__)
def test_single_tile_after_grappler_equals_plain_bitwise(net):
    assert not bitwise(keras_step(net), Cut(grid=(1, 1)))


def test_exit_shape_read_by_mask_in_segment_equals_plain():
    """The loop would wait for its own exit."""

    def net(x):
        first = conv(4, name="first")(x)
        head = layers.GlobalAveragePooling2D()(first)
        second = conv(4, name="second")(layers.Dropout(0.3, seed=1)(first))
        return second * layers.Reshape((1, 1, 4))(layers.Dense(4)(head))

    step = keras_step(net, (11, 12), [3, 3, 1], known_batch=False)
    assert not differing(step, Cut("input", ("first", "second"), (2, 2)))
    assert not differing(step, Cut("input", ("first", "second"), (2, 2), batch=2))


@pytest.mark.parametrize("layer", [layers.Dropout, layers.SpatialDropout2D, layers.GaussianNoise])
def test_tiled_random_layers_draw_same_numbers(layer):
    def net(x):
        return conv(3, name="out")(conv(3)(layer(0.4)(conv(4)(x))))

    assert not differing(keras_step(net, (11, 12), [2, 2, 1], known_batch=False), Cut(grid=(2, 3), batch=2))


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_custom_gradient_in_segment_materialises_nothing(known):
    """silu's gradient also computes from its input alone; that is no reason to keep the input."""
    step = keras_step(separable, (19, 22), known_batch=known)
    (segment,) = rewrite(step.concrete_fn, Cut()).segments
    assert len(segment.exits) == 1 and not segment.notes


def test_stored_input_of_custom_gradient_equals_plain():
    """Tensors that the backward pass derives from the exit are then computed outside the loop, and are no gradients."""

    def net(x):
        x = layers.Activation("silu")(conv(4, activation=None, name="kept")(conv(3)(x)))
        return conv(3, name="out")(conv(3)(x))

    assert not differing(keras_step(net, (11, 12)), Cut(grid=(2, 3), stored=("kept",)))


def test_tiled_activity_regularizers_equal_plain():
    def net(x):
        x = conv(4, activity_regularizer=keras.regularizers.L2(0.1))(conv(4)(x))
        return conv(3, name="out")(conv(4)(x))

    assert not differing(keras_step(net, (11, 12)), Cut(grid=(2, 3)))


# Activations ------------------------------------------------------------------------------------------------

NOT_ACTIVATIONS = ("get", "serialize", "deserialize")
NOT_ELEMENTWISE = {"glu": "halves the channels", "sparsemax": "sorts the channels, and sorting has no rule"}
WITH_ARGUMENTS = {"threshold": functools.partial(keras.activations.threshold, threshold=0.3, default_value=0.1)}
ACTIVATIONS = [
    name
    for name, value in sorted(vars(keras.activations).items())
    if callable(value) and not name.startswith("_") and name not in (*NOT_ACTIVATIONS, *NOT_ELEMENTWISE)
]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_tiled_activations_equal_plain(name):
    function = WITH_ARGUMENTS.get(name, getattr(keras.activations, name))

    def net(x):
        x = layers.Activation(lambda t: function(t))(conv(4, activation=None)(x))
        return conv(3, name="out")(x)

    assert not differing(keras_step(net, (11, 12), steps=2), Cut(grid=(2, 3)))


# The comparison notices -------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", [vgg, residual, unet], ids=lambda net: net.__name__)
def test_equivalence_notices_halo_off_by_one(net, monkeypatch):
    gather = Window.rows_covered
    monkeypatch.setattr(Window, "rows_covered", lambda self, out: gather(self, out).shift(1))
    step = keras_step(net, (19, 22), steps=1)
    try:
        found = differing(step, Cut(grid=(2, 3)))
    except AssertionError:
        return  # The emitter finds rows missing first.
    assert len(found) > 3


def test_equivalence_notices_affine_op_taken_for_linear(monkeypatch):
    """The kind check is what keeps forward values from being counted once per overlapping tile."""
    w = weights(*KERNELS)

    @tf.custom_gradient
    def affine(x):
        return x * 1.0, lambda dy: dy + tf.tanh(x)

    step = one_loss(lambda x: tf.reduce_mean(three_layers(x, w, lambda t: tf.nn.relu(affine(t))) ** 2), w)
    with pytest.raises(NotTileableError, match="adds forward values to a gradient"):
        rewrite(step.concrete_fn, Cut(grid=(2, 2)))
    honest = Additive.result_kind

    def blind(self, op, kinds):
        return TileKind.PARTIAL if TileKind.PARTIAL in kinds else honest(self, op, kinds)

    monkeypatch.setattr(Additive, "result_kind", blind)
    assert differing(step, Cut(grid=(2, 2)))


# At length --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@each_net
@pytest.mark.parametrize("size", [(37, 50), (50, 63), (63, 37)], ids=str)
@pytest.mark.parametrize("grid", [(1, 1), (1, 3), (2, 2), (5, 3)], ids=str)
@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("optimizer", [keras.optimizers.SGD, keras.optimizers.Adam], ids=["sgd", "adam"])
def test_combined_features_equal_plain(net, size, grid, known, optimizer):
    step = keras_step(net, size, [3, 3, 3 if known else 2], known, optimizer(0.01))
    assert not differing(step, Cut(grid=grid, batch=1 if known else 4))
