"""Measurements of `benchmarks.sources`, each in a child process of its own."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks import _child

Figures = dict[str, Any]

CHUNK = 512
"""Height and width of a chunk of an image in a file."""
CLASSES = 4


def write(*, folder: str, size: int, emit: _child.Emit) -> None:
    """Write a square image and its mask as zarr arrays: a photograph, repeated, and its brightness in classes."""
    del emit
    import numpy as np
    import zarr
    from skimage import data

    photograph = data.astronaut()[:CHUNK, :CHUNK]
    mask = (photograph.mean(-1) * CLASSES / 256).astype("uint8")
    for name, pixels in (("image", photograph), ("mask", mask)):
        rest = pixels.shape[2:]
        array = zarr.create_array(
            str(Path(folder) / name),
            shape=(size, size, *rest),
            chunks=(CHUNK, CHUNK, *rest),
            dtype="uint8",
            config={"write_empty_chunks": True},
        )
        for row in range(0, size, CHUNK):
            strip = np.roll(pixels, row // CHUNK, axis=0)
            width = -(-size // CHUNK)
            array[row : row + CHUNK] = np.tile(strip, (1, width, *(1 for _ in rest)))[: size - row, :size]


def _model(size: int, folder: str | None) -> Any:
    """Return a small U-Net that segments an image of a file, or of memory if there is no folder."""
    import keras
    from keras import layers

    import tflms_sft

    keras.utils.set_random_seed(0)

    def convolutions(x: Any, filters: int) -> Any:
        for _ in range(2):
            x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        return x

    in_files = folder is not None
    inputs = keras.Input((), dtype="string") if in_files else keras.Input((size, size, 3), dtype="uint8")
    x = tflms_sft.ImageReader("zarr", (size, size, 3))(inputs) if in_files else inputs
    top = convolutions(layers.Rescaling(1 / 255)(x), 8)
    x = layers.Conv2DTranspose(8, 2, 2)(convolutions(layers.MaxPooling2D(2)(top), 16))
    outputs = layers.Conv2D(CLASSES, 1)(convolutions(layers.Concatenate()([top, x]), 8))
    masks = tflms_sft.ImageReader("zarr", (size, size)) if in_files else None
    model = tflms_sft.ReadingModel(inputs, outputs, labels=masks)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, metrics=["accuracy"], jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    return model


def _step(size: int, folder: str, in_files: bool, budget: int) -> tuple[Any, list[Any]]:
    """Return a rewritten step, and its arguments."""
    import tensorflow as tf
    import zarr

    import tflms_sft

    paths = [str(Path(folder) / name) for name in ("image", "mask")]
    model = _model(size, folder if in_files else None)
    arguments = [tf.constant([path]) if in_files else tf.constant(zarr.open_array(path)[...][None]) for path in paths]

    @tf.function(input_signature=[tf.TensorSpec(t.shape, t.dtype) for t in arguments], autograph=False)
    def step(image: Any, mask: Any) -> Any:
        return model.train_step((image, mask))

    return tflms_sft.rewrite(step, tflms_sft.AutoParams(budget, swap=False)), arguments


def memory(*, folder: str, size: int, budget: int, emit: _child.Emit) -> Figures:
    """Run one step on an image in a file; return its memory beyond that of the process before the step."""
    del emit
    step, arguments = _step(size, folder, True, budget)
    idle = _child.status_bytes("VmRSS")
    _child.reset_peak_rss()
    began = time.perf_counter()
    loss = float(step(*arguments)["loss"].numpy())
    seconds = time.perf_counter() - began
    (segment,) = step.plan.segments
    height, width = segment.tile_rows[-1]
    return {
        "headline": step.plan.headline(),
        "predicted_bytes": step.plan.predicted.peak_bytes,
        "original_bytes": step.plan.original.peak_bytes,
        "tile_bytes": height * width * 4,
        "idle_bytes": idle,
        "rss_bytes": _child.status_bytes("VmHWM") - idle,
        "seconds": seconds,
        "loss": loss,
    }


def times(*, folder: str, size: int, budget: int, runs: int, emit: _child.Emit) -> Figures:
    """Run a rewritten step on an image in memory and on the same one in a file, alternately."""
    del emit
    steps = {name: _step(size, folder, in_files, budget) for name, in_files in (("memory", False), ("file", True))}
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
