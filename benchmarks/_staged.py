"""Child processes of `benchmarks.pipeline`: stages that sleep, a small network, and the papers' networks.

Each measurement has a process of its own, because logical CPU devices must be created before TensorFlow is used.
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
"""Classes of the images: classical papillary carcinoma, and its tall cell variant."""

CHANNELS = 4
"""Channels of the images of U-Nets."""

WIDTH = 16
"""Filters of each convolution of the small network."""

RECORDED_RUNS = 5
"""Runs whose allocations are recorded."""


def logical_devices(count: int) -> list[str]:
    """Create logical CPU devices, with enough threads for all of them to work concurrently; return their names."""
    import tensorflow as tf

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    tf.config.threading.set_inter_op_parallelism_threads(count + 4)
    return [f"CPU:{number}" for number in range(count)]


# Stages of known length ---------------------------------------------------------------------------------------------


def sleeping_step(devices: Sequence[str], forward: float, backward: float) -> Any:
    """Return a training step whose stages take a fixed time, each with a weight on its device.

    Args:
        devices: Device of each stage.
        forward: Seconds of a stage in the forward pass.
        backward: Seconds of a stage in the backward pass.
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
            return slept(backward, incoming, value)  # Reads a tensor of its stage, which assigns it to this stage.

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
    """Return the times of a rewritten step whose stages sleep, and the largest difference from the original step."""
    del emit
    devices = logical_devices(stages)
    import tensorflow as tf

    import tflms_sft

    step = sleeping_step(devices, forward, backward)
    batch = tf.random.stateless_uniform((micro_batches, 4), (1, 2))
    cuts: Any = [f"stage{number}" for number in range(stages - 1)] or 1
    rewritten = tflms_sft.rewrite(step, tflms_sft.PipelineParams(cuts, schedule, micro_batches, devices), batch)
    expected = _after_a_step(step, step.weights, batch)
    results = _after_a_step(rewritten, step.weights, batch)  # Includes graph optimisation, which is not timed.
    load, seconds = os.getloadavg()[0], []
    for _ in range(steps):
        began = time.perf_counter()
        rewritten(batch).numpy()
        seconds.append(time.perf_counter() - began)
    return {
        "seconds": seconds,
        "median": statistics.median(seconds),
        "load_average": load,
        "off_by": max(abs(a / b - 1) for a, b in zip(results, expected, strict=True)),
    }


def _after_a_step(step: Any, weights: Sequence[Any], batch: Any) -> list[float]:
    """Return the loss and the weights after one step, and restore the weights."""
    start = [weight.numpy() for weight in weights]
    results = [float(step(batch)), *(float(weight.numpy()) for weight in weights)]
    for weight, value in zip(weights, start, strict=True):
        weight.assign(value)
    return results


# Memory of each device ----------------------------------------------------------------------------------------------


def even_network(image_size: int, stages: int) -> keras.Model:
    """Build a network of equal stages: six convolutions each, at one resolution."""
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
    """Return the peak of each device, predicted, and measured by allocation records: the median of some runs.

    Logical CPU devices do not copy the tensors that they transfer. The measurement counts such a tensor for the
    sending device alone. The prediction counts it for the receiving device, too, as for devices with separate memories.

    Args:
        schedule: Name of the schedule.
        stages: Number of stages.
        micro_batches: Number of micro-batches.
        samples: Samples of a micro-batch.
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
    for _ in range(RECORDED_RUNS):
        for line in tflms_sft.measure(rewritten, images, labels, timelines=True).timelines:
            peaks[line.device].append(line.peak_bytes)
    argument_bytes = sum(int(tensor.shape.num_elements()) * tensor.dtype.size for tensor in (images, labels))
    device_arguments = {devices[0]: argument_bytes}
    return {
        "samples": batch,
        "predicted_bytes": list(rewritten.plan.pipeline.peak_bytes),
        "measured_bytes": [statistics.median(peaks[name]) - device_arguments.get(name, 0) for name in devices],
        "argument_bytes": argument_bytes,
    }


def _compiled_step(model: keras.Model) -> Any:
    """Return the training step of a Keras model with cross-entropy and SGD without momentum, as a `tf.function`."""
    import keras
    import tensorflow as tf

    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    return tf.function(lambda images, labels: model.train_step((images, labels))["loss"], autograph=False)


# The papers' networks -----------------------------------------------------------------------------------------------


def resnet_v2(image_size: int, blocks: int = 12) -> keras.Model:
    """Build a ResNet v2 of 9 * blocks + 2 layers, as in the example of Keras; 12 blocks are ResNet-110-v2.

    He et al., "Identity Mappings in Deep Residual Networks" (2016): three groups of bottleneck blocks, with
    normalisation and activation before each convolution. A mean over the image follows, so that images may have any
    size.

    Args:
        image_size: Height and width.
        blocks: Blocks in each of the three groups.
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
    """Build a U-Net as in `tflms_sft.unets.Architecture`: no padding, and cropped skip connections.

    Levels end with the layers "level0", "level1", ... on the way down, and with ..., "level0_up" on the way up.
    """
    import keras

    layers = keras.layers

    def stack(x: Any, level: int, name: str) -> Any:
        for number in range(convolutions):
            last = number == convolutions - 1
            # Zeros are initialised faster than random numbers, and the network is not run.
            options = {"activation": "relu", "kernel_initializer": "zeros"} | ({"name": name} if last else {})
            x = layers.Conv2D(filters * 2**level, kernel, **options)(x)
        return x

    x = image = keras.Input((image_size, image_size, CHANNELS))
    skips = []
    for level in range(levels):
        x = stack(x, level, f"conv{level}")
        if level < levels - 1:
            skips.append(x)
            x = layers.MaxPooling2D(2, name=f"level{level}")(x)
    for level in reversed(range(levels - 1)):
        x = layers.Conv2DTranspose(filters * 2**level, 2, 2, kernel_initializer="zeros", name=f"up{level}")(x)
        border = skips[level].shape[1] - x.shape[1]
        crop = layers.Cropping2D((border // 2, border - border // 2))(skips[level])
        x = stack(layers.Concatenate()([crop, x]), level, f"level{level}_up")
    return keras.Model(image, layers.Conv2D(CLASSES, 1, name="logits")(x))


def stages_of(
    *, network: str, options: dict[str, Any], stages: int | list[str], image_size: int, emit: _child.Emit
) -> dict[str, Any]:
    """Return the planned stages of a network for one image; the step is traced but not run.

    Args:
        network: "resnet_v2" or "unet".
        options: Arguments of the function of that name, without the image size.
        stages: Number of stages, or layers to cut at.
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
            for stage, peak in zip(plan.pipeline.stages, plan.pipeline.peak_bytes, strict=True)
        ],
    }
