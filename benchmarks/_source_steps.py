"""Measurements of `benchmarks.sources`, each in a child process of its own."""

from __future__ import annotations

import math
import os
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks import _alternation, _child, _nets
from examples import slide

Figures = dict[str, Any]

NETS_WITH_FILES = ("residual", "resnet50")
"""Networks whose tensors between tile loops lie in files."""
MAX_WARM_SIZE = 4096
"""Largest images, in pixels a side, of which the second step of VGG-16 is measured."""


def write(*, folder: str, size: int, emit: _child.Emit) -> None:
    """Write the slide of `examples.slide`, and its mask."""
    del emit
    slide.write_slide(Path(folder, "image"), Path(folder, "mask"), size)


def _classifier(net: str, size: int) -> Any:
    """Return a classifier of slides in files, of `benchmarks._nets` or the residual one of `examples.slide`."""
    import keras

    import tflms_sft

    keras.utils.set_random_seed(0)
    paths = keras.Input((), dtype="string")
    image = tflms_sft.ImageReader("zarr", (size, size, 3), fill_missing_chunks=True)(paths)
    scaled = keras.layers.Rescaling(1 / 255)(image)
    scores = slide.resnet(image) if net == "residual" else getattr(_nets, net)(size)(scaled)
    model = keras.Model(paths, scores)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    return model


def _model(size: int, in_files: bool) -> Any:
    """Return the U-Net of `examples.slide` for images in files or in memory."""
    import keras

    import tflms_sft

    keras.utils.set_random_seed(0)
    inputs, masks = keras.Input((size, size, 3), dtype="uint8"), None
    image = inputs
    if in_files:
        inputs = keras.Input((), dtype="string")
        image, masks = (
            tflms_sft.ImageReader("zarr", (size, size, *colours), fill_missing_chunks=True) for colours in ((3,), ())
        )
        image = image(inputs)
    model = tflms_sft.ReadingModel(inputs, slide.unet(image), labels=masks)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, metrics=["accuracy"], jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    return model


def _step(size: int, folder: str, in_files: bool, net: str) -> tuple[Any, list[Any]]:
    """Return the training step of a network and its arguments."""
    import tensorflow as tf
    import zarr

    paths = [str(Path(folder) / name) for name in ("image", "mask")]
    model = _model(size, in_files) if net == "unet" else _classifier(net, size)
    arguments = [tf.constant([path]) if in_files else tf.constant(zarr.open_array(path)[...][None]) for path in paths]
    if net != "unet":
        arguments[1] = tf.constant([1])

    @tf.function(input_signature=[tf.TensorSpec(t.shape, t.dtype) for t in arguments], autograph=False)
    def step(image: Any, target: Any) -> Any:
        return model.train_step((image, target))

    return step, arguments


def _budgeted(folder: str, size: int, budget: int, net: str) -> tuple[Any, list[Any], int]:
    """Return a rewritten step, its arguments, and its budget, of VGG-16 at most a quarter of the original memory."""
    import tflms_sft

    step, arguments = _step(size, folder, True, net)
    if net == "vgg16":
        plain = tflms_sft.rewrite(step, tflms_sft.AutoParams("1TiB", swap=False)).plan.original.peak_bytes
        budget = min(budget, plain // 4)
    swap = tflms_sft.LMSParams(tier="disk", spill_dir=folder) if net in NETS_WITH_FILES else False
    return tflms_sft.rewrite(step, tflms_sft.AutoParams(budget, swap=swap)), arguments, budget


def memory(*, folder: str, size: int, budget: int, net: str, emit: _child.Emit) -> Figures:
    """Run a step on an image in a file; return its memory beyond that of the process before the step.

    Of residual networks it is the second step: after the first one TensorFlow keeps some 75 MiB for images of any size.
    The time of VGG-16 is that of the second step with images of at most `MAX_WARM_SIZE`, whose first step takes
    noticeably longer; its memory is beyond that before the first step, because TensorFlow's allocator keeps the memory
    of freed tensors.
    """
    emit({"pid": os.getpid()})
    step, arguments, budget = _budgeted(folder, size, budget, net)
    if net in NETS_WITH_FILES:
        step(*arguments)["loss"].numpy()
    idle = _child.status_bytes("VmRSS")
    _child.reset_peak_rss()
    if net == "vgg16" and size <= MAX_WARM_SIZE:
        step(*arguments)["loss"].numpy()
    emit({"ready": True})
    began = time.perf_counter()
    loss = float(step(*arguments)["loss"].numpy())
    ended = time.perf_counter()
    tiles = [segment.tile_rows[-1] for segment in step.plan.segments]
    return {
        "budget": budget,
        "headline": step.plan.headline(),
        "predicted_bytes": step.plan.predicted.peak_bytes,
        "original_bytes": step.plan.original.peak_bytes,
        "file_bytes": step.plan.file_bytes,
        "tile_bytes": max(math.prod(tile) * 4 for tile in tiles),
        "idle_bytes": idle,
        "rss_bytes": _child.status_bytes("VmHWM") - idle,
        "began": began,
        "ended": ended,
        "loss": loss,
    }


def repeat(*, folder: str, size: int, budget: int, net: str, emit: _child.Emit) -> None:
    """Run a step on an image in a file whenever the parent requests it, and emit its seconds."""
    emit({"pid": os.getpid()})
    step, arguments, _ = _budgeted(folder, size, budget, net)
    _alternation.repeat(lambda: step(*arguments)["loss"].numpy(), folder, emit)


def times(*, folder: str, size: int, budget: int, runs: int, emit: _child.Emit) -> Figures:
    """Run a rewritten step on an image in memory and on the same one in a file, alternately."""
    del emit
    import tflms_sft

    steps = {}
    for name, in_files in (("memory", False), ("file", True)):
        step, arguments = _step(size, folder, in_files, "unet")
        steps[name] = tflms_sft.rewrite(step, tflms_sft.AutoParams(budget, swap=False)), arguments
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(runs + 1):
        for name, (step, arguments) in steps.items():
            began = time.perf_counter()
            losses[name].append(float(step(*arguments)["loss"].numpy()))
            seconds[name].append(time.perf_counter() - began)
    pairs = zip(seconds["memory"][1:], seconds["file"][1:], strict=True)
    ratios = sorted(file / memory for memory, file in pairs)
    return {
        "headlines": {name: step.plan.headline() for name, (step, _) in steps.items()},
        "seconds": {name: values[1:] for name, values in seconds.items()},
        "losses": losses,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }
