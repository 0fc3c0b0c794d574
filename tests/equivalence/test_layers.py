"""Keras layers of every rank and layout between convolutions, whole steps: with and without barriers, any batch.

Everything in them that works on images has to run on tiles.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from between_convolutions import check_on_tiles, normed, plain, step_between
from equivalence import TOLERANCE, Step, batches_of, error, model_step
from keras import layers

import tflms_sft

GRIDS = {1: [(5,), (2, 4)], 2: [(3, 2), (2, 4, 1)], 3: [(2, 2, 3), (2, 3, 1, 2)]}


def grouped(x):
    return layers.GroupNormalization(2 if x.shape[-1] % 2 == 0 else -1)(x)


def channels_first(x):
    x = layers.BatchNormalization(axis=1)(layers.Permute((3, 1, 2))(x))
    return layers.Permute((2, 3, 1))(layers.ReLU()(layers.MaxPooling2D(2, data_format="channels_first")(x)))


def pyramid(x):
    small = layers.AveragePooling2D(2, padding="same")(x)
    large = layers.UpSampling2D(2)(small)[:, : x.shape[1], : x.shape[2]]
    return layers.Concatenate()([x, large])


def sliced(x):
    x = layers.Concatenate()([x[..., :2], x[..., 1:]])[:, 1:-1, ::2]
    return x * keras.ops.mean(x, axis=-1)[..., None]


def dropped(x):
    x = layers.SpatialDropout2D(0.3, seed=2)(layers.Dropout(0.3, seed=1)(x))
    return layers.GaussianNoise(0.3, seed=1)(x)


def root_mean_square(x):
    return getattr(layers, "RMSNormalization", layers.UnitNormalization)()(x)  # Keras 3.8 has no such layer.


def shared(x):
    """Both calls add one tensor, and TensorFlow sums it before the other operands."""
    conv = layers.Conv2D(4, 3, padding="same", bias_initializer="random_normal")
    return layers.Add()([conv(x), conv(layers.MaxPooling2D(3, 1, padding="same")(x))])


def spectral(x):
    """A filter that is scaled, and assigned to its variable, in a branch of the step."""
    return layers.LeakyReLU()(layers.SpectralNormalization(layers.Conv2D(4, 3, padding="same"))(x))


class Positions(layers.Layer):
    """A weight and a number that is no weight for each pixel, with and without a first dimension."""

    def build(self, shape):
        sizes = shape[1:-1]
        self.weight = self.add_weight(shape=(1, *sizes, 1), initializer="random_normal")
        self.distance = np.hypot.reduce(np.indices(sizes) / 7.0, axis=0)[..., None]

    def call(self, x):
        return keras.ops.tanh(x + self.weight) * self.distance - self.weight


NETS = {
    "conv 3-D": (3, plain, lambda x: layers.Conv3D(4, 3, strides=2, padding="same")(x)),
    "transposed 3-D": (3, normed, lambda x: layers.Conv3DTranspose(3, 3, strides=2, padding="same")(x)),
    "upsampling 3-D": (3, normed, lambda x: layers.UpSampling3D((2, 1, 2))(x)),
    "dilated 3-D": (3, plain, lambda x: layers.Conv3D(4, 3, dilation_rate=2, padding="same")(x)),
    "cropping 3-D": (3, normed, lambda x: layers.ZeroPadding3D(1)(layers.Cropping3D(((1, 2), (0, 1), (1, 0)))(x))),
    "groups 3-D": (3, grouped, plain),
    "pooling 1-D": (1, plain, lambda x: layers.MaxPooling1D(2)(layers.Conv1D(4, 3, strides=2, padding="same")(x))),
    "causal 1-D": (1, normed, lambda x: layers.Conv1D(4, 3, padding="causal", dilation_rate=2)(x)),
    "separable 1-D": (1, normed, lambda x: layers.SeparableConv1D(4, 3, padding="same")(layers.UpSampling1D(3)(x))),
    "transposed 1-D": (
        1,
        normed,
        lambda x: layers.AveragePooling1D(3, 2, "same")(layers.Conv1DTranspose(4, 3, strides=2)(x)),
    ),
    "dilated": (2, plain, lambda x: layers.Conv2D(4, 3, dilation_rate=2, padding="same")(x)),
    "dilated along one axis": (2, normed, lambda x: layers.Conv2D(4, 3, dilation_rate=(1, 3), padding="same")(x)),
    "dilated in depth": (3, plain, lambda x: layers.Conv3D(4, 3, dilation_rate=(2, 1, 1), padding="same")(x)),
    "dilated, and no window": (
        1,
        plain,
        lambda x: layers.BatchNormalization()(layers.Conv1D(3, 1, dilation_rate=2, padding="same")(x)),
    ),
    "a sum of a tensor with itself": (
        2,
        normed,
        lambda x: (lambda y: layers.Add()([y, y]))(layers.BatchNormalization()(x)),
    ),
    "one layer twice, summed": (2, normed, shared),
    "one tap, dilated": (1, normed, lambda x: layers.Conv1D(1, 1, dilation_rate=2, padding="same")(x)),
    "dilated and normed": (2, normed, lambda x: layers.Conv2D(4, 3, dilation_rate=(2, 3))(x)),
    "dilated depthwise": (2, normed, lambda x: layers.DepthwiseConv2D(3, dilation_rate=2, padding="same")(x)),
    "upsampling": (2, plain, lambda x: layers.UpSampling2D(2)(x)),
    "upsampling and normed": (2, normed, lambda x: layers.UpSampling2D((3, 2))(x)),
    "bilinear": (2, normed, lambda x: layers.UpSampling2D((2, 3), interpolation="bilinear")(x)),
    "resizing": (2, normed, lambda x: layers.Resizing(17, 9)(x)),
    "resizing, nearest": (2, normed, lambda x: layers.Resizing(17, 9, interpolation="nearest")(x)),
    "cropping": (2, normed, lambda x: layers.Cropping2D(((1, 2), (0, 1)))(x)),
    "groups": (2, grouped, plain),
    "channels first": (2, normed, channels_first),
    "pyramid": (2, normed, pyramid),
    "slices": (2, normed, sliced),
    "dropout": (2, normed, dropped),
    "convolution in groups": (2, normed, lambda x: layers.Conv2D(6, 3, groups=2, strides=(2, 1), padding="same")(x)),
    "one channel per group": (2, normed, lambda x: layers.Conv2D(8, (3, 2), groups=4)(x)),
    "one channel per group, dilated": (2, normed, lambda x: layers.Conv2D(4, 3, groups=4, dilation_rate=2)(x)),
    "one channel per group, strides": (2, plain, lambda x: layers.Conv2D(4, 3, groups=4, strides=(1, 2))(x)),
    "convolution in groups, 1-D": (1, normed, lambda x: layers.Conv1D(6, 3, groups=2, dilation_rate=2)(x)),
    "convolution in groups, 3-D": (3, plain, lambda x: layers.Conv3D(4, 3, groups=2, padding="same")(x)),
    "dense": (2, normed, lambda x: layers.Dense(5, activation="gelu")(x)),
    "dense, 1-D": (1, normed, lambda x: layers.Dense(5)(layers.Dense(3, use_bias=False)(x))),
    "dense, 3-D": (3, normed, lambda x: layers.EinsumDense("bdhwc,cx->bdhwx", (None, None, None, 3))(x)),
    "over channels": (2, normed, lambda x: layers.UnitNormalization()(root_mean_square(x))),
    "slopes for each pixel": (2, normed, lambda x: layers.PReLU("random_normal")(x)),
    "slopes for each pixel, no barrier": (2, plain, lambda x: layers.PReLU("random_normal")(x)),
    "positions": (2, normed, lambda x: Positions()(x)),
    "positions, no barrier": (3, plain, lambda x: Positions()(x)),
    "weights for each pixel": (1, normed, lambda x: layers.LayerNormalization(axis=(1, 2))(x)),
    "weights for each pixel, 3-D": (3, plain, lambda x: layers.PReLU("random_normal")(x)),
    "spectral normalization": (2, plain, lambda x: spectral(spectral(x))),
    "spectral normalization and barriers": (2, normed, lambda x: spectral(spectral(x))),
    "shared slopes": (2, normed, lambda x: layers.LayerNormalization()(layers.PReLU(shared_axes=[1, 2])(x))),
}


def check(name, known_batch, num_tiles):
    rank, norm, middle = NETS[name]
    check_on_tiles(step_between(rank, norm, middle, known_batch=known_batch), num_tiles)


@pytest.mark.parametrize("norm", (plain, normed))
@pytest.mark.parametrize("known", (True, False), ids=("known", "unknown"))
def test_locally_weighted_single_row_equals_plain(norm, known):
    """Its axes lie elsewhere in between, and a sum over the batch has as many dimensions of one as it."""
    keras.config.set_floatx("float64")
    image = keras.Input((8, 1, 2), batch_size=3 if known else None)
    x = norm(layers.Conv2D(4, 3, padding="same", activation="relu")(image))
    x = layers.PReLU("random_normal")(layers.Permute((1, 3, 2))(x))
    x = layers.Permute((1, 3, 2))(x - keras.ops.mean(x, axis=-4))
    x = layers.Conv2D(4, 3, padding="same", activation="relu")(x)
    model = keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    arguments = {"optimizer": keras.optimizers.SGD(0.1), "loss": loss}
    step = model_step(model, batches_of([3, 3], (8, 1, 2)), known, arguments)
    fast = tflms_sft.rewrite(step.concrete_fn, tflms_sft.SFTParams(num_tiles=(3, 1)))
    want, got = step.run(step.concrete_fn), step.run(fast.concrete_function)
    assert max(error(got[key], want[key]) for key in want) < TOLERANCE


@pytest.mark.parametrize("name", ("Attention", "AdditiveAttention"))
def test_attention_between_convolutions_equals_plain(name):
    keras.config.set_floatx("float64")
    image = keras.Input((48, 2), batch_size=3)
    x = layers.Conv1D(40, 3, padding="same", activation="relu")(image)
    x = layers.Conv1D(4, 3, padding="same", activation="relu")(x)
    x = layers.Conv1D(5, 3, padding="same", activation="relu")(getattr(layers, name)()([x, x]))
    model = keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = model_step(model, batches_of([3, 3], (48, 2)), True, {"optimizer": keras.optimizers.SGD(0.1), "loss": loss})
    fast = tflms_sft.rewrite(step.concrete_fn, tflms_sft.SFTParams(num_tiles=(4,)))
    assert fast.plan.segments and not any("attention" in where for where, _ in fast.plan.left_alone)
    want, got = step.run(step.concrete_fn), step.run(fast.concrete_function)
    assert max(error(got[key], want[key]) for key in want) < TOLERANCE


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if NETS[n][0] == 3 else n for n in NETS])
def test_layer_between_convolutions_equals_plain(name):
    check(name, False, GRIDS[NETS[name][0]][1])


@pytest.mark.slow
@pytest.mark.parametrize("num_tiles", (0, 1), ids=("one batch tile", "two"))
@pytest.mark.parametrize("name", NETS)
def test_layer_between_convolutions_with_known_batch_equals_plain(name, num_tiles):
    check(name, True, GRIDS[NETS[name][0]][num_tiles])


class Roll(layers.Layer):
    """An op that cannot run in tiles."""

    def call(self, x):
        return keras.ops.roll(x, 3, axis=1)


@pytest.mark.parametrize("halo", ("recompute", "carry"))
@pytest.mark.parametrize(
    "layer",
    (
        lambda: layers.Conv2D(6, 3, padding="same", activation="relu", name="single"),
        lambda: layers.Conv2D(6, 3, strides=2, use_bias=False, name="single"),
        lambda: layers.DepthwiseConv2D(3, padding="same", activation="relu", name="single"),
        lambda: layers.MaxPooling2D(3, 2, name="single"),
    ),
    ids=("conv", "strides", "depthwise", "pool"),
)
def test_single_convolution_and_its_gradients_run_in_tiles(layer, halo):
    """No tensor inside is saved, but the kernels of the gradients take less scratch memory for a tile."""
    keras.config.set_floatx("float64")
    image = keras.Input((13, 12, 2))
    x = Roll(name="before")(layers.Conv2D(4, 3, padding="same")(image))
    x = Roll(name="after")(layer()(x))
    model = keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(layers.Conv2D(4, 3)(x))))
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = model_step(model, batches_of([3, 3], (13, 12, 2)), False, {"optimizer": optimizer, "loss": loss})
    rolls = [op for op in step.concrete_fn.graph.get_operations() if op.type == "Roll"]
    segments = [tflms_sft.SegmentSpec(rolls[0].outputs[0].name, rolls[1].inputs[0].name)]
    grid = (3, 2) if halo == "recompute" else (3, 1)
    fast = tflms_sft.rewrite(step.concrete_fn, tflms_sft.SFTParams(grid, segments, halo=halo))
    (segment,) = fast.plan.segments
    assert segment.backward_ops and segment.num_loops == 2
    want, got = step.run(step.concrete_fn), step.run(fast.concrete_function)
    assert max(error(got[key], want[key]) for key in want) < TOLERANCE


def test_single_convolution_of_images_that_two_phases_read_runs_in_tiles():
    """The update lies between the gradients of the two phases, so that none of them joins the loop."""
    weight = tf.Variable(np.random.default_rng(0).normal(size=(3, 3, 2, 4)))

    def function(x):
        x = tf.roll(x, 3, 1)
        losses = []
        for name in ("first", "second"):
            with tf.GradientTape() as tape:
                losses.append(tf.reduce_mean(tf.nn.conv2d(x, weight, 1, "SAME", name=name) ** 2))
            weight.assign_sub(0.3 * tape.gradient(losses[-1], weight))
        return losses

    images = np.random.default_rng(1).normal(size=(2, 13, 12, 2))
    concrete = tf.function(function).get_concrete_function(tf.constant(images))
    step = Step(concrete, [weight], [(images,)] * 2)
    fast = tflms_sft.rewrite(concrete, tflms_sft.SFTParams((4, 1), [tflms_sft.SegmentSpec("Roll:0", "first")]))
    want, got = step.run(concrete), step.run(fast.concrete_function)
    assert fast.plan.segments and max(error(got[key], want[key]) for key in want) < TOLERANCE
