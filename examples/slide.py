"""Trains a U-Net on slides in files, none of which is whole in memory, and draws the memory over time.

Run by `python -m examples.slide`. The slides are zarr arrays that the program makes from a public photograph, with its
brightness in four classes as the mask. Each size is trained in a process of its own, within one budget, and its
predictions are written to a zarr array. The picture shows that memory does not grow with the slide.

The exit code is 0 only if the memory of every training beyond that of the idle process is within the budget.
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
SAMPLE_SECONDS = 0.1
MIB, GIB = 2**20, 2**30
IDLE_MARGIN_BYTES = 64 * MIB
"""Memory of Python, TensorFlow and zarr that differs from run to run."""


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


def build(size: int) -> Any:
    """Return a model that reads slides and masks from files."""
    import keras

    import tflms_sft

    slides = tflms_sft.ImageReader("zarr", (size, size, 3), fill_missing_chunks=True, name="slides")
    masks = tflms_sft.ImageReader("zarr", (size, size), fill_missing_chunks=True, name="masks")
    paths = keras.Input((), dtype="string", name="paths")
    model = tflms_sft.ReadingModel(paths, unet(slides(paths)), labels=masks)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    return model


def train(*, slide: str, mask: str, size: int, budget: int, steps: int, result: str, emit: _child.Emit) -> None:
    """Train, predict, and emit the plan, the losses and the memory beyond that of the idle process."""
    import keras
    import tensorflow as tf

    import tflms_sft

    keras.utils.set_random_seed(0)
    model = build(size)
    callback = tflms_sft.MemoryBudget(budget, verbose=0)
    data = tf.data.Dataset.from_tensor_slices(([slide] * steps, [mask] * steps)).batch(1, drop_remainder=True)
    idle = _child.status_bytes("VmRSS")
    _child.reset_peak_rss()
    history = model.fit(data, shuffle=False, verbose=0, callbacks=[callback]).history
    emit({"plan": callback.plan.headline(), "loss": history["loss"][0], "accuracy": history["accuracy"][0]})
    results = keras.Input((), dtype="string", name="results")
    writer = tflms_sft.ImageWriter("zarr", dtype="uint8")
    predictor = keras.Model([*model.inputs, results], writer(keras.ops.argmax(model.output, -1), results))
    predictor.predict([tf.constant([slide]), tf.constant([result])], verbose=0, callbacks=[callback])
    emit({"predict": callback.predict_plan.headline(), "bytes": _child.status_bytes("VmHWM") - idle})


def draw(runs: dict[int, _child.Outcome], path: Path) -> None:
    """Draw the memory of the processes over time."""
    with memory_axes(path, "RSS", "lower right") as axes:
        for size, outcome in runs.items():
            label = f"{size:,} px, {size * size * 12 / GIB:.2f} GiB as float32"
            times = [sample.seconds for sample in outcome.samples]
            axes.plot(times, [sample.rss / GIB for sample in outcome.samples], linewidth=1.2, label=label)


def run(size: int, options: argparse.Namespace, folder: Path) -> tuple[_child.Outcome, bool]:
    """Train on one size in a process of its own; return the outcome, and whether memory is within the budget."""
    slide, mask = folder / "slide.zarr", folder / "mask.zarr"
    write_slide(slide, mask, size)
    arguments = {"slide": str(slide), "mask": str(mask), "size": size, "budget": options.budget, "steps": options.steps}
    events: list[dict[str, Any]] = []
    outcome = _child.run_child(
        "examples.slide:train",
        {**arguments, "result": str(folder / f"result-{size}.zarr")},
        env=_child.TRUE_RSS_ENV,
        on_event=events.append,
        sample_seconds=SAMPLE_SECONDS,
    )
    for path in folder.iterdir():
        shutil.rmtree(path)
    if not outcome.ok:
        print(f"{size} px failed: {outcome.error or outcome.how_it_ended()}\n{outcome.log_tail()}", file=sys.stderr)
        return outcome, False
    figures = {key: value for event in events for key, value in event.items()}
    fits = figures["bytes"] <= options.budget + IDLE_MARGIN_BYTES
    print(f"{size} x {size}: {figures['plan']}")
    print(f"  loss {figures['loss']:.4f}, accuracy {figures['accuracy']:.3f}; predict: {figures['predict']}")
    print(f"  {'ok' if fits else 'FAILED'}: {figures['bytes'] / MIB:.0f} MiB beyond the idle process", flush=True)
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
    add("--budget", type=_arguments.size, default=256 * MIB, help="bytes, such as 256MiB; default: 256MiB")
    add("--steps", type=_arguments.positive, default=2, help="training steps; default: %(default)s")
    add("--output", type=Path, default=Path("demo-output"), help="folder of the picture; default: %(default)s")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train on all sizes; return 1 if one fails or exceeds the budget."""
    options = parse_arguments(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="tflms-sft-slides-") as folder:
        runs = {size: run(size, options, Path(folder)) for size in options.sizes}
    picture = options.output / "slide-memory.png"
    draw({size: outcome for size, (outcome, _) in runs.items()}, picture)
    print(f"Picture: {picture}")
    return 0 if all(fits for _, fits in runs.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
