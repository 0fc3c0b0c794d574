"""Networks as people use them: whole, with segments found automatically."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

import tflms_sft

SIZE = 96


def _frozen(name: str) -> keras.Model:
    base = getattr(keras.applications, name)(
        weights=None, include_top=False, input_shape=(SIZE, SIZE, 3), pooling="avg"
    )
    model = keras.Model(base.input, keras.layers.Dense(5)(base.output))
    random = np.random.RandomState(3)
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.trainable = False
    # As initialised, frozen normalisation lets activations fade to nothing in deep nets, and errors with them.
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.gamma.assign(random.uniform(0.8, 1.6, layer.gamma.shape))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", ["VGG16", "VGG19", "ResNet50", "MobileNetV2", "DenseNet121", "Xception"])
def test_gradients_of_one_float32_step_are_those_of_the_plain_step(name: str) -> None:
    model = _frozen(name)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def gradients(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        return loss, tape.gradient(loss, model.trainable_variables)

    images = tf.constant(np.random.RandomState(0).normal(size=(2, SIZE, SIZE, 3)), tf.float32)
    labels = tf.constant([1, 2])
    step = tflms_sft.rewrite(gradients, tflms_sft.SFTParams(num_tiles=(2, 2)), images, labels)
    assert step.plan.changed
    plain_loss, plain = gradients(images, labels)
    loss, found = step(images, labels)
    assert abs(float(loss - plain_loss)) <= 2e-5 * abs(float(plain_loss))
    largest = max(float(tf.reduce_max(tf.abs(g))) for g in plain)
    assert largest > 1e-3, "the comparison would be empty: the gradients have faded"
    for variable, a, b in zip(model.trainable_variables, found, plain, strict=True):
        scale = max(float(tf.reduce_max(tf.abs(b))), 1e-4 * largest)
        error = float(tf.reduce_max(tf.abs(a - b))) / scale
        assert error <= 2e-5, f"{variable.path}: {error}"


TRAINED = ["ResNet50V2", "MobileNetV2", "MobileNetV3Small", "EfficientNetB0", "Xception"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_normalisation_in_training_mode(name: str) -> None:
    """In float64: loss, gradients and moving statistics of one step; all that works on images is tiled."""
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(0)
    base = getattr(keras.applications, name)(
        weights=None, include_top=False, input_shape=(SIZE, SIZE, 3), pooling="avg"
    )
    model = keras.Model(base.input, keras.layers.Dense(5)(base.output))
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0  # Steps that draw the same numbers are another test's.
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function(autograph=False)
    def gradients(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        return loss, tape.gradient(loss, model.trainable_variables)

    images = tf.constant(60 * np.random.RandomState(0).normal(size=(2, SIZE, SIZE, 3)))
    labels = tf.constant([1, 2])
    fast = tflms_sft.rewrite(gradients, tflms_sft.SFTParams(num_tiles=(3, 2)), images, labels)
    assert not fast.plan.left_alone and fast.plan.segments[0].num_loops > 60
    assert fast.plan.predicted.peak_bytes < fast.plan.original.peak_bytes
    start = [np.array(variable) for variable in model.variables]
    found = []
    for function in (gradients, fast):
        for variable, value in zip(model.variables, start, strict=True):
            variable.assign(value)
        loss, grads = function(images, labels)
        found.append([np.array(v) for v in (loss, *grads, *model.non_trainable_variables)])
    largest = max(np.abs(value).max() for value in found[0][1 : 1 + len(model.trainable_variables)])
    assert largest > 1e-3, "the comparison would be empty: the gradients have faded"
    for want, got in zip(*found, strict=True):
        assert np.abs(got - want).max() <= 1e-9 * max(np.abs(want).max(), 1e-4 * largest)
