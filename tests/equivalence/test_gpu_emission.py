"""Tile loops as they are emitted for a GPU, run on the CPU: three steps of training equal those of the original."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from devices import planning_for_card
from equivalence import TOLERANCE, Cut, Step, differing, error, keras_step, model_step
from keras import layers
from nets import conv

import tflms_sft


def pooled(x):
    """Return maxima over windows that reach beyond the image, which are padded with the lowest number."""
    return conv(4, name="out")(layers.MaxPooling2D(3, 2, padding="same")(conv(4)(x) - 5.0))


def chain(x):
    return conv(4, name="out")(conv(5, 5)(conv(4)(x)))


NETS = {"pooled": pooled, "chain": chain}
CUTS = {"tiles": Cut(), "batch": Cut(grid=(1, 3), batch=2), "strips": Cut(grid=(5, 1), halo="carry")}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("net", NETS)
def test_loops_for_a_gpu_equal_the_original(net, cut):
    step = keras_step(NETS[net], (37, 24), 3, optimizer=keras.optimizers.SGD(0.1, momentum=0.9), steps=3)
    with planning_for_card("h200"):
        assert not differing(step, CUTS[cut])


def label_map_step(loss):
    """Return three training steps of a network with normalisation, and a class number for each pixel."""
    keras.config.set_floatx("float64")
    image = keras.Input((24, 20, 3))
    x = layers.ReLU()(layers.BatchNormalization()(conv(4)(image)))
    model = keras.Model(image, layers.Conv2D(3, 1)(conv(4)(x)))
    random = np.random.default_rng(2)
    batches = [(random.normal(size=(2, 24, 20, 3)), random.integers(3, size=(2, 24, 20), dtype="int32"))] * 3
    arguments = {"optimizer": keras.optimizers.SGD(0.1, momentum=0.9), "loss": loss, "jit_compile": False}
    return model_step(model, batches, True, arguments)


def sparse(labels, logits):
    """Return the cross-entropy of each pixel; its labels stay int32."""
    return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(labels, tf.int32), logits)


def one_hot(labels, logits):
    return tf.reduce_sum((logits - tf.one_hot(tf.cast(labels, tf.int32), 3, dtype=logits.dtype)) ** 2, axis=-1)


@pytest.mark.parametrize("loss", [sparse, one_hot])
def test_loops_with_a_label_map_for_a_gpu_equal_the_original(loss):
    step: Step = label_map_step(loss)
    with planning_for_card("h200"):
        rewritten = tflms_sft.rewrite(step.function, tflms_sft.SFTParams(num_tiles=(3, 2)), *step.specs)
    assert rewritten.plan.segments
    want, got = step.run(step.concrete_fn), step.run(rewritten)
    assert list(want) == list(got)
    assert {name: error(got[name], want[name]) for name in want if error(got[name], want[name]) > TOLERANCE} == {}


def test_loops_with_an_int32_map_as_an_argument_equal_the_original():
    """Slices of the map are taken as uint32, and read as int32 by every op."""

    def step(images, classes):
        with tf.GradientTape() as tape:
            tape.watch(kernel := tf.convert_to_tensor(weights))
            features = tf.nn.relu(tf.nn.conv2d(images, kernel, 1, "SAME"))
            loss = tf.reduce_mean(features * tf.cast(classes, tf.float64)[..., tf.newaxis])
        weights.assign_sub(0.1 * tape.gradient(loss, kernel))
        return loss

    random = np.random.default_rng(3)
    weights = tf.Variable(random.normal(size=(3, 3, 3, 4)))
    start = weights.numpy()
    data = random.normal(size=(2, 24, 20, 3)), random.integers(-4, 5, size=(2, 24, 20), dtype="int32")
    function = tf.function(step, autograph=False)
    with planning_for_card("h200"):
        rewritten = tflms_sft.rewrite(function, tflms_sft.SFTParams(num_tiles=(3, 2)), *data)
    assert rewritten.plan.segments
    results = []
    for run in (function, rewritten):
        weights.assign(start)
        results.append([*(run(*map(tf.constant, data)).numpy() for _ in range(3)), weights.numpy()])
    for want, got in zip(*results, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)
