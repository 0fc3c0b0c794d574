"""Trains networks on slides in files, none of which is whole in memory, and draws the memory over time.

Run by `python -m examples.slide`. The slides are zarr arrays that the program makes from a public photograph, with its
brightness in four classes as the mask. A U-Net learns the class of each pixel, and its predictions are written to a
zarr array. A residual network with batch normalisation learns the class of each slide, with tensors between its tile
loops in files. Each network and size is trained in a process of its own, within one budget. The pictures show that
memory does not grow with the slide.

The exit code is 0 only if the last step of every training adds at most the budget to the memory before it.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import _arguments, _child
from examples._memory_picture import memory_axes

CHUNK = 512
"""Height and width of a chunk of a slide."""
CLASSES = 4
NETWORKS = ("unet", "resnet")
SAMPLE_SECONDS = 0.1
MIB, GIB = 2**20, 2**30


def write_slide(slide: Path, mask: Path, size: int) -> None:
    """Write a slide and its mask: a photograph, repeated, and its brightness in classes."""
    import numpy as np
    import zarr
    from skimage import data

    photograph = data.astronaut()[:CHUNK, :CHUNK]
    classes = (photograph.mean(-1) * CLASSES / 256).astype("uint8")
    for path, pixels in ((slide, photograph), (mask, classes)):
        colours = pixels.shape[2:]
        shape, chunks = (size, size, *colours), (CHUNK, CHUNK, *colours)
        array = zarr.create_array(str(path), shape=shape, chunks=chunks, dtype="uint8")
        for row in range(0, size, CHUNK):
            strip = np.roll(pixels, row // CHUNK, axis=0)
            repeated = np.concatenate([strip] * -(-size // CHUNK), axis=1)
            array[row : row + CHUNK] = repeated[: size - row, :size]


def unet(image: Any) -> Any:
    """Return the scores of the classes: a U-Net with two levels and 8 filters at its top."""
    from keras import layers

    def convolutions(x: Any, filters: int) -> Any:
        for _ in range(2):
            x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        return x

    top = convolutions(layers.Rescaling(1 / 255)(image), 8)
    bottom = convolutions(layers.MaxPooling2D(2)(top), 16)
    x = layers.Concatenate()([top, layers.Conv2DTranspose(8, 2, 2)(bottom)])
    return layers.Conv2D(CLASSES, 1)(convolutions(x, 8))


def resnet(image: Any) -> Any:
    """Return the scores of the classes of each slide: a network with three residual blocks and batch normalisation."""
    from keras import layers

    def normalised(x: Any, filters: int, strides: int = 1) -> Any:
        x = layers.Conv2D(filters, 3, strides, padding="same", use_bias=False)(x)
        return layers.BatchNormalization()(x)

    x = layers.ReLU()(normalised(layers.Rescaling(1 / 255)(image), 16, 2))
    for filters, strides in ((16, 1), (32, 2), (64, 2)):
        y = normalised(layers.ReLU()(normalised(x, filters, strides)), filters)
        shortcut = x if strides == 1 else layers.Conv2D(filters, 1, strides)(x)
        x = layers.ReLU()(layers.Add()([shortcut, y]))
    return layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x))


def build(network: str, size: int) -> Any:
    """Return a model that reads slides, and for a U-Net masks, from files."""
    import keras

    import tflms_sft

    slides = tflms_sft.ImageReader("zarr", (size, size, 3), fill_missing_chunks=True, name="slides")
    paths = keras.Input((), dtype="string", name="paths")
    if network == "unet":
        masks = tflms_sft.ImageReader("zarr", (size, size), fill_missing_chunks=True, name="masks")
        model = tflms_sft.ReadingModel(paths, unet(slides(paths)), labels=masks)
    else:
        model = keras.Model(paths, resnet(slides(paths)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    return model


def train(
    *, network: str, slide: str, mask: str, size: int, budget: int, steps: int, result: str, emit: _child.Emit
) -> None:
    """Train, predict classes of pixels, and emit plans, losses and the memory of the last training step.

    The first step also traces and plans, and TensorFlow keeps some memory after it, whatever the size of the slide.
    """
    import keras
    import tensorflow as tf

    import tflms_sft

    keras.utils.set_random_seed(0)
    model = build(network, size)
    callback = tflms_sft.MemoryBudget(budget, verbose=0)
    labels = [mask] * steps if network == "unet" else [1] * steps
    data = tf.data.Dataset.from_tensor_slices(([slide] * steps, labels)).batch(1, drop_remainder=True)
    step_bytes: list[int] = []

    class StepMemory(keras.callbacks.Callback):  # type: ignore[misc]
        """Measures the memory of each step beyond that of the process before it."""

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            _child.reset_peak_rss()
            step_bytes.append(-_child.status_bytes("VmRSS"))

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            step_bytes[-1] += _child.status_bytes("VmHWM")

    history = model.fit(data, shuffle=False, verbose=0, callbacks=[callback, StepMemory()]).history
    plan, figures = callback.plan, {"loss": history["loss"][0], "bytes": step_bytes[-1]}
    emit({"plan": plan.headline(), "file_bytes": plan.file_bytes, **figures})
    if network == "unet":
        results = keras.Input((), dtype="string", name="results")
        writer = tflms_sft.ImageWriter("zarr", dtype="uint8")
        predictor = keras.Model([*model.inputs, results], writer(keras.ops.argmax(model.output, -1), results))
        predictor.predict([tf.constant([slide]), tf.constant([result])], verbose=0, callbacks=[callback])
        emit({"predict": callback.predict_plan.headline()})


def draw(runs: dict[int, _child.Outcome], path: Path) -> None:
    """Draw the memory of the processes over time."""
    with memory_axes(path, "RSS", "lower right") as axes:
        for size, outcome in sorted(runs.items(), reverse=True):  # The smaller ones end sooner: their lines lie above.
            label = f"{size:,} px, {size * size * 12 / GIB:.2f} GiB as float32"
            times = [sample.seconds for sample in outcome.samples]
            axes.plot(times, [sample.rss / GIB for sample in outcome.samples], linewidth=1.2, label=label)


def run(network: str, size: int, options: argparse.Namespace, folder: Path) -> tuple[_child.Outcome, bool]:
    """Train a network on one size in a child process; return the outcome, and whether memory is within the budget."""
    slide, mask = folder / "slide.zarr", folder / "mask.zarr"
    write_slide(slide, mask, size)
    arguments = {"network": network, "slide": str(slide), "mask": str(mask), "size": size, "steps": options.steps}
    events: list[dict[str, Any]] = []
    outcome = _child.run_child(
        "examples.slide:train",
        {**arguments, "budget": options.budget, "result": str(folder / f"result-{size}.zarr")},
        env=_child.TRUE_RSS_ENV,
        on_event=events.append,
        sample_seconds=SAMPLE_SECONDS,
    )
    for path in folder.iterdir():
        shutil.rmtree(path)
    if not outcome.ok:
        print(
            f"{network}, {size} px failed: {outcome.error or outcome.how_it_ended()}\n{outcome.log_tail()}",
            file=sys.stderr,
        )
        return outcome, False
    figures = {key: value for event in events for key, value in event.items()}
    fits = figures["bytes"] <= options.budget
    print(f"{network}, {size} x {size}: {figures['plan']}")
    print(f"  loss {figures['loss']:.4f}, {figures['file_bytes'] / MIB:,.0f} MiB on the disk between tile loops")
    if "predict" in figures:
        print(f"  predict: {figures['predict']}")
    print(
        f"  {'ok' if fits else 'FAILED'}: {figures['bytes'] / MIB:.0f} MiB in the last step beyond those before it",
        flush=True,
    )
    return outcome, fits


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = _arguments.parser("examples.slide", __doc__)
    add = parser.add_argument
    add(
        "--sizes",
        type=_arguments.positive,
        nargs="+",
        default=[2048, 4096, 8192],
        metavar="N",
        help="heights of slides",
    )
    add("--networks", nargs="+", choices=NETWORKS, default=NETWORKS, metavar="NAME", help="default: unet resnet")
    add("--budget", type=_arguments.size, default=256 * MIB, help="bytes, such as 256MiB; default: 256MiB")
    add(
        "--steps",
        type=_arguments.positive,
        default=2,
        help="steps; the last is judged; default: %(default)s",
    )
    add("--output", type=Path, default=Path("demo-output"), help="folder of the pictures; default: %(default)s")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train all networks on all sizes; return 1 if one fails or exceeds the budget."""
    options = parse_arguments(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    all_fit = True
    for network in options.networks:
        with tempfile.TemporaryDirectory(prefix="tflms-sft-slides-") as folder:
            runs = {size: run(network, size, options, Path(folder)) for size in options.sizes}
        picture = options.output / f"slide-memory-{network}.png"
        draw({size: outcome for size, (outcome, _) in runs.items()}, picture)
        print(f"Picture: {picture}", flush=True)
        all_fit = all_fit and all(fits for _, fits in runs.values())
    return 0 if all_fit else 1


if __name__ == "__main__":
    sys.exit(main())
