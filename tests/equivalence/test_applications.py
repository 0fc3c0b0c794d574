"""Networks as people use them: whole, with segments found automatically."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tflms_sft
from benchmarks import _nets

SIZE = 96
LARGER = {"InceptionV3": 139}
"""With less the last layers have one pixel, and of two of those normalisation makes little more than a sign: what comes
out hangs on last digits, the more so after three steps."""


TRAINED = [
    "VGG16",
    "ResNet50",
    "ResNet50V2",
    "DenseNet121",
    "MobileNetV2",
    "MobileNetV3Small",
    "EfficientNetB0",
    "EfficientNetV2B0",
    "InceptionV3",
    "Xception",
    "NASNetMobile",
    "ConvNeXtTiny",
]


def _trained(name: str, floatx: str) -> keras.Model:
    """With normalisation in training mode; weights are the same whatever the precision."""
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(floatx)  # Once it has been asked for it no longer follows the other.
    return _nets.application(name, LARGER.get(name, SIZE))


def _noise(name: str) -> np.ndarray:
    size = LARGER.get(name, SIZE)
    return np.random.RandomState(0).normal(size=(2, size, size, 3))


def _gradients_of(model: keras.Model) -> Any:
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function(autograph=False)
    def gradients(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        return loss, tape.gradient(loss, model.trainable_variables)

    return gradients


def _one_step(model: keras.Model, start: Any, function: Any, images: Any, labels: Any) -> tuple[Any, Any]:
    """Gradients, and the moving statistics after the step."""
    model.set_weights(start)
    _, found = function(images, labels)
    return [np.array(g, np.float64) for g in found], [np.array(v, np.float64) for v in model.non_trainable_variables]


def _shaken(noise: np.ndarray, seed: int, dtype: Any) -> np.ndarray:
    """Images whose last digits are others."""
    return noise * (1 + np.finfo(dtype).eps * np.random.RandomState(seed).choice([-1, 1], noise.shape))


def _furthest(got: Any, want: Any, floor: float) -> float:
    return max((np.abs(a - b).max() / max(np.abs(b).max(), floor) for a, b in zip(got, want, strict=True)), default=0.0)


def _apart(got: Any, want: Any) -> float:
    """Distance of all together, relative to the length of `want`."""
    differences = sum(((a - b) ** 2).sum() for a, b in zip(got, want, strict=True))
    return float(np.sqrt(differences / sum((b**2).sum() for b in want)))


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_applications_float32_error_equals_plain_error(name: str) -> None:
    """Gradients within 5e-5 and moving statistics within 1e-6, or as far as float32 itself is off.

    As they are initialised many of these networks magnify a difference in the last digit of an image a hundred thousand
    times. So far is the plain step in float32 from the same step in float64, or would be with other last digits.
    """
    noise = _noise(name)
    labels = tf.constant([1, 2])
    model = _trained(name, "float32")
    start, step, images = model.get_weights(), _gradients_of(model), tf.constant(noise, tf.float32)
    fast = tflms_sft.rewrite(step, tflms_sft.SFTParams(num_tiles=(3, 2)), images, labels)
    assert fast.plan.changed
    plain, tiled = (_one_step(model, start, function, images, labels) for function in (step, fast))
    shaken = [tf.constant(_shaken(noise, seed, np.float32), tf.float32) for seed in range(5)]
    others = [_one_step(model, start, step, other, labels) for other in shaken]
    model = _trained(name, "float64")
    exact = _one_step(model, start, _gradients_of(model), tf.constant(noise), labels)
    largest = max(np.abs(g).max() for g in exact[0])
    assert largest > 1e-3, "the comparison would be empty: the gradients have faded"
    for part, floor, limit in ((0, 1e-4 * largest, 5e-5), (1, 1e-3, 1e-6)):
        rounding = max(_furthest(found[part], exact[part], floor) for found in (plain, *others))
        assert _furthest(tiled[part], exact[part], floor) <= limit + 3 * rounding
        if exact[part]:
            rounding = max(_apart(found[part], exact[part]) for found in (plain, *others))
            assert _apart(tiled[part], exact[part]) <= limit + 3 * rounding


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_applications_three_float64_steps_equal_plain(name: str) -> None:
    """Every weight, slot and moving statistic, where rounding can hide nothing; all that works on images is tiled.

    To 1e-9, or a few times what other last digits of the images come to: ResNet-50 magnifies these ten million times.
    """
    model = _trained(name, "float64")
    optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
    optimizer.build(model.trainable_variables)
    gradients = _gradients_of(model)

    @tf.function(autograph=False)
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        loss, found = gradients(images, labels)
        optimizer.apply(found, model.trainable_variables)
        return loss

    noise = 60 * _noise(name)
    images, shaken, labels = tf.constant(noise), tf.constant(_shaken(noise, 0, np.float64)), tf.constant([1, 2])
    has_barriers = name not in ("VGG16", "ConvNeXtTiny")  # Of these only the first layers are worth tiles.
    capacity = 1 if has_barriers else None
    fast = tflms_sft.rewrite(step, tflms_sft.SFTParams(num_tiles=(3, 2), memory_capacity=capacity), images, labels)
    if not has_barriers:
        assert fast.plan.segments and "normal" not in str(fast.plan.left_alone)
    else:
        assert fast.plan.segments[0].num_loops > 60
        assert all("reduces over the image" in reason for _, reason in fast.plan.left_alone)  # InceptionV3 ends so.
        assert fast.plan.predicted.peak_bytes < fast.plan.original.peak_bytes
    variables = [*model.variables, *optimizer.variables]
    start = [np.array(variable) for variable in variables]
    found = []
    for function, batch in ((step, images), (fast, images), (step, shaken)):
        for variable, value in zip(variables, start, strict=True):
            variable.assign(value)
        losses = [np.array(function(batch, labels)) for _ in range(3)]
        found.append([*losses, *(np.array(variable) for variable in variables)])
    plain, tiled, other = found
    assert _furthest(tiled, plain, 1e-3) <= max(1e-9, 3 * min(_furthest(other, plain, 1e-3), 1e-8))
