"""Child processes of `benchmarks.pipeline`: stages that sleep, a small network, and the papers' networks.

A child has as many logical CPU devices as it needs. They have to be made before anything else is done with
TensorFlow, so that each is a process of its own.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks import _child

if TYPE_CHECKING:
    import keras

CLASSES = 2
"""Of the classifier: classical papillary carcinoma, or its tall cell variant."""

CHANNELS = 4
"""Of the images of the U-Nets."""

WIDTH = 16
"""Filters of the small network."""

RECORDED = 5
"""Runs whose allocations are recorded."""


def logical_devices(count: int) -> list[str]:
    """Makes logical CPU devices, and threads enough for each to work while others do; returns their names."""
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    tf.config.threading.set_inter_op_parallelism_threads(count + 4)
    return [f"CPU:{number}" for number in range(count)]


# Stages of known length ---------------------------------------------------------------------------------------------


def sleeping_step(devices: Sequence[str], forward: float, backward: float) -> Any:
    """A training step whose stages take a fixed time, each with a weight on its device.

    Args:
        devices: One for each stage.
        forward: Seconds in which each sleeps forward.
        backward: The same backward.
    """
    import tensorflow as tf

    def slept(seconds: float, value: Any, *others: Any) -> Any:
        def sleep(array: Any, *_: Any) -> Any:
            time.sleep(seconds)
            return array

        result = tf.numpy_function(sleep, [value, *others], value.dtype, stateful=False)
        result.set_shape(value.shape)
        return result

    @tf.custom_gradient
    def work(value: Any) -> Any:
        def gradient(incoming: Any) -> Any:
            return slept(backward, incoming, value)  # It reads what its stage made, which tells whose it is.

        return slept(forward, value), gradient

    weights = []
    for number, device in enumerate(devices):
        with tf.device(device):
            weights.append(tf.Variable(1.0, name=f"weight{number}"))

    def step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            value = batch
            for number, weight in enumerate(weights):
                value = tf.identity(work(value * weight), name=f"stage{number}")
            loss = tf.reduce_mean(tf.square(value))
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(1e-3 * gradient)
        return loss

    function = tf.function(step, autograph=False)
    function.weights = weights
    return function


def time_sleeping(
    *, schedule: str, stages: int, micro_batches: int, forward: float, backward: float, steps: int, emit: _child.Emit
) -> dict[str, Any]:
    """Returns seconds of the steps of a rewritten step whose stages sleep, and whether it computed what it should."""
    del emit
    devices = logical_devices(stages)
    import tensorflow as tf

    import tflms_sft

    step = sleeping_step(devices, forward, backward)
    batch = tf.random.stateless_uniform((micro_batches, 4), (1, 2))
    cuts: Any = [f"stage{number}" for number in range(stages - 1)] or 1
    rewritten = tflms_sft.rewrite(step, tflms_sft.PipelineParams(cuts, schedule, micro_batches, devices), batch)
    expected = _after_a_step(step, step.weights, batch)
    found = _after_a_step(rewritten, step.weights, batch)  # It also pays for graph optimisation.
    load, seconds = os.getloadavg()[0], []
    for _ in range(steps):
        began = time.perf_counter()
        rewritten(batch).numpy()
        seconds.append(time.perf_counter() - began)
    return {
        "seconds": seconds,
        "median": statistics.median(seconds),
        "load_average": load,
        "off_by": max(abs(a / b - 1) for a, b in zip(found, expected, strict=True)),
    }


def _after_a_step(step: Any, weights: Sequence[Any], batch: Any) -> list[float]:
    """The loss and the weights after one step; they are put back."""
    start = [weight.numpy() for weight in weights]
    found = [float(step(batch)), *(float(weight.numpy()) for weight in weights)]
    for weight, value in zip(weights, start, strict=True):
        weight.assign(value)
    return found


# Memory of each device ----------------------------------------------------------------------------------------------


def even_network(image_size: int, stages: int) -> keras.Model:
    """Builds a network whose stages are alike: six convolutions each, all of one resolution."""
    import keras

    keras.utils.set_random_seed(0)
    x = image = keras.Input((image_size, image_size, WIDTH))
    for stage in range(stages):
        for part in "abcdef":
            x = keras.layers.Conv2D(WIDTH, 3, padding="same", activation="relu", name=f"conv{stage}{part}")(x)
    return keras.Model(image, keras.layers.Dense(CLASSES)(keras.layers.GlobalAveragePooling2D()(x)))


def device_memory(
    *, schedule: str, stages: int, micro_batches: int, samples: int, image_size: int, emit: _child.Emit
) -> dict[str, Any]:
    """Returns the peak of each device, predicted and by its allocation records: the median of some runs.

    What crosses is not copied between logical CPU devices: it counts for who made it alone, and in the prediction for
    who reads it too, as between devices with memories of their own.

    Args:
        schedule: Name of it.
        stages: Of the network.
        micro_batches: Of a step.
        samples: Of a micro-batch.
        image_size: Height and width.
        emit: Not used.
    """
    del emit
    devices = logical_devices(stages)
    import numpy as np
    import tensorflow as tf

    import tflms_sft

    model = even_network(image_size, stages)
    cuts = tflms_sft.stage_devices(model, [f"conv{stage}f" for stage in range(stages - 1)], devices)
    step = _compiled_step(model)
    random = np.random.default_rng(1)
    batch = samples * micro_batches
    images = tf.constant(random.normal(size=(batch, image_size, image_size, WIDTH)), tf.float32)
    labels = tf.constant(random.integers(CLASSES, size=batch), tf.int32)
    params = tflms_sft.PipelineParams(cuts, schedule, micro_batches, devices)
    rewritten = tflms_sft.rewrite(step, params, images, labels)
    peaks: dict[str, list[int]] = {name: [] for name in devices}
    for _ in range(RECORDED):
        for line in tflms_sft.measure(rewritten, images, labels, timelines=True).timelines:
            peaks[line.device].append(line.peak_bytes)
    given = sum(int(tensor.shape.num_elements()) * tensor.dtype.size for tensor in (images, labels))
    told = rewritten.plan.pipeline
    return {
        "samples": batch,
        "predicted_bytes": list(told.peak_bytes),
        "measured_bytes": [statistics.median(peaks[name]) - (given if name == devices[0] else 0) for name in devices],
        "argument_bytes": given,
    }


def _compiled_step(model: keras.Model) -> Any:
    """A training step of a Keras model with cross-entropy and plain SGD, as a `tf.function`."""
    import keras
    import tensorflow as tf

    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    return tf.function(lambda images, labels: model.train_step((images, labels))["loss"], autograph=False)


# The papers' networks -----------------------------------------------------------------------------------------------


def resnet_v2(image_size: int, blocks: int = 12) -> keras.Model:
    """Builds a ResNet v2 of 9 * blocks + 2 layers, as the example of Keras defines it; 12 blocks are ResNet-110-v2.

    He et al., "Identity Mappings in Deep Residual Networks", 2016: three groups of bottleneck blocks, normalisation and
    activation before each convolution. Its end is a mean over all of the image, so that images may be of any size.

    Args:
        image_size: Height and width.
        blocks: In each of the three groups.
    """
    import keras

    layers = keras.layers

    def before(x: Any) -> Any:
        return layers.Activation("relu")(layers.BatchNormalization()(x))

    def convolved(x: Any, filters: int, size: int, stride: int = 1) -> Any:
        return layers.Conv2D(filters, size, stride, padding="same", kernel_initializer="he_normal")(x)

    image = keras.Input((image_size, image_size, 3))
    x = before(convolved(image, 16, 3))
    narrow = 16
    for group in range(3):
        wide = 4 * narrow if group == 0 else 2 * narrow
        for block in range(blocks):
            stride = 2 if group and not block else 1
            y = convolved(x if not group and not block else before(x), narrow, 1, stride)
            y = convolved(before(y), narrow, 3)
            y = convolved(before(y), wide, 1)
            if not block:
                x = convolved(x, wide, 1, stride)
            x = layers.Add(name=f"block{group}_{block}")([x, y])
        narrow = wide
    x = layers.GlobalAveragePooling2D()(before(x))
    return keras.Model(image, layers.Dense(CLASSES)(x), name=f"resnet{9 * blocks + 2}_v2")


def unet(image_size: int, levels: int, convolutions: int, filters: int = 64, kernel: int = 3) -> keras.Model:
    """Builds a U-Net as `tflms_sft.unets.Architecture` describes it: no padding, copies cropped and put beside.

    Levels end with the layers "level0", "level1", ... on the way down, and "level0_up" is the last on the way up.
    """
    import keras

    layers = keras.layers

    def stack(x: Any, level: int, name: str) -> Any:
        for number in range(convolutions):
            last = number == convolutions - 1
            # Zeros are faster to make than random numbers, and nothing here is run.
            options = {"activation": "relu", "kernel_initializer": "zeros"} | ({"name": name} if last else {})
            x = layers.Conv2D(filters * 2**level, kernel, **options)(x)
        return x

    x = image = keras.Input((image_size, image_size, CHANNELS))
    kept = []
    for level in range(levels):
        x = stack(x, level, f"conv{level}")
        if level < levels - 1:
            kept.append(x)
            x = layers.MaxPooling2D(2, name=f"level{level}")(x)
    for level in reversed(range(levels - 1)):
        x = layers.Conv2DTranspose(filters * 2**level, 2, 2, kernel_initializer="zeros", name=f"up{level}")(x)
        more = kept[level].shape[1] - x.shape[1]
        crop = layers.Cropping2D((more // 2, more - more // 2))(kept[level])
        x = stack(layers.Concatenate()([crop, x]), level, f"level{level}_up")
    return keras.Model(image, layers.Conv2D(CLASSES, 1, name="logits")(x))


def stages_of(
    *, network: str, options: dict[str, Any], stages: int | list[str], image_size: int, emit: _child.Emit
) -> dict[str, Any]:
    """Returns what the plan says of a network's stages for one image; it is traced and not run.

    Args:
        network: "resnet_v2" or "unet".
        options: Of the function of that name, but for the size of the image.
        stages: Their number, or layers to cut at.
        image_size: Height and width.
        emit: Not used.
    """
    del emit
    import tensorflow as tf

    import tflms_sft

    began = time.perf_counter()
    model = {"resnet_v2": resnet_v2, "unet": unet}[network](image_size, **options)
    labels = model.output_shape[1:-1]
    specs = tf.TensorSpec((1, *model.input_shape[1:])), tf.TensorSpec((1, *labels), tf.int32)
    count = stages if isinstance(stages, int) else len(stages) + 1
    params = tflms_sft.PipelineParams(stages, devices=["CPU:0"] * count)
    plan = tflms_sft.rewrite(_compiled_step(model), params, *specs).plan
    told = plan.pipeline
    return {
        "parameters": int(sum(weight.shape.num_elements() for weight in model.trainable_variables)),
        "layers": len(model.layers),
        "plain_peak_bytes": plan.original.peak_bytes,
        "seconds_to_plan": time.perf_counter() - began,
        "stages": [
            {
                "exit": stage.exit or "the loss",
                "weight_bytes": stage.weight_bytes,
                "waiting_bytes": stage.waiting_bytes,
                "forward": stage.forward_seconds,
                "backward": stage.backward_seconds,
                "transfer": stage.transfer_seconds,
                "peak_bytes": peak,
            }
            for stage, peak in zip(told.stages, told.peak_bytes, strict=True)
        ],
    }
