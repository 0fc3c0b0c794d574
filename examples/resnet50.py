"""Trains ResNet-50 on a folder of pictures, plain, within a memory budget, or with activations swapped out.

    python -m examples.resnet50 --lms --compare
    python -m examples.resnet50 --images photos --image-size 224 --batch-size 32 --epochs 20 --lms

A folder has one subfolder per class. Without one the network learns which of four photographs (they come with
scikit-image) a crop was taken from. Its batch normalisations are in training mode.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from examples import _training

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

LEARNING_RATE = 1e-4
SMALLEST_IMAGE = 32  # ResNet-50 halves it five times
PHOTOGRAPHS = ("astronaut", "cat", "coffee", "rocket")  # in scikit-image's wheel: nothing is downloaded
CROPS = 8  # of each photograph
CROP_SIZE = 160


def build_model(image_size: int, classes: int) -> keras.Model:
    """Returns an untrained ResNet-50, compiled."""
    import keras

    model = keras.applications.ResNet50(
        weights=None,
        input_shape=(image_size, image_size, 3),
        classes=classes,
        classifier_activation=None,
    )
    model.compile(
        keras.optimizers.Adam(LEARNING_RATE),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        # XLA would fuse the plain step's operations, which changes roundings; rewritten steps run without it.
        jit_compile=False,
    )
    return model


def load_pictures(folder: Path, options: argparse.Namespace) -> tuple[tf.data.Dataset, list[str]]:
    """Returns batches of (pictures from -1 to 1, classes), and the names of the classes.

    Raises:
        _training.UserError: There are no pictures, or only those of one class.
    """
    import keras

    try:
        pictures = keras.utils.image_dataset_from_directory(
            folder,
            image_size=(options.image_size, options.image_size),
            batch_size=None,
            crop_to_aspect_ratio=True,
            seed=options.seed,
            verbose=False,
        )
    except ValueError as error:
        raise _training.UserError(f"--images: there are no pictures in {folder}: {error}") from None
    names = pictures.class_names
    if len(names) < 2:
        raise _training.UserError(
            f"--images: expected at least two subfolders, one per class. Received: {folder} with {', '.join(names)}"
        )
    if len(pictures) < options.batch_size:
        raise _training.UserError(f"--batch-size {options.batch_size} is more than the {len(pictures)} pictures")
    # Full batches only: the statistics of a last one of a few pictures would be noise.
    batches = pictures.map(_scale).batch(options.batch_size, drop_remainder=True)
    # With --steps an epoch ends where the user says, and the next one goes on from there.
    return (batches.repeat() if options.steps else batches).prefetch(1), names


def _scale(picture: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return picture / 127.5 - 1, label


def write_crops(folder: Path, seed: int) -> None:
    """Writes random crops of photographs as pictures, in one subfolder per photograph."""
    import numpy as np
    from skimage import data, io

    random = np.random.default_rng(seed)
    for name in PHOTOGRAPHS:
        photograph = getattr(data, name)()
        (folder / name).mkdir()
        for number in range(CROPS):
            top, left = (random.integers(0, extent - CROP_SIZE + 1) for extent in photograph.shape[:2])
            crop = photograph[top : top + CROP_SIZE, left : left + CROP_SIZE]
            io.imsave(folder / name / f"{number:02}.png", crop, check_contrast=False)


def first_unreadable(folder: Path) -> Path | None:
    """Returns a picture that TensorFlow cannot decode, None if there is none."""
    import tensorflow as tf

    for path in sorted(folder.rglob("*.*")):
        try:
            tf.io.decode_image(tf.io.read_file(str(path)), expand_animations=False)
        except tf.errors.OpError:
            return path
    return None


def train(folder: Path, options: argparse.Namespace) -> None:
    """Trains on a folder of pictures."""
    import tensorflow as tf

    pictures, names = load_pictures(folder, options)
    print(f"Pictures of {len(names)} classes: {', '.join(names)}", flush=True)
    build = functools.partial(build_model, options.image_size, len(names))
    try:
        _training.train(build, lambda: load_pictures(folder, options)[0], options)
    except tf.errors.InvalidArgumentError:
        path = first_unreadable(folder)  # TensorFlow's message does not name it
        if path is None:
            raise
        raise _training.UserError(f"--images: this picture cannot be decoded: {path}") from None


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = _training.new_parser("resnet50", __doc__)
    add = parser.add_argument_group("pictures").add_argument
    add("--images", type=Path, metavar="DIR", help="one subfolder per class (default: crops of photographs)")
    size = _training.whole_number(SMALLEST_IMAGE)
    add("--image-size", type=size, default=128, metavar="N", help="scale to N x N (default: %(default)s)")
    _training.add_options(parser, batch_size=8, epochs=3, steps=None)
    options = parser.parse_args(arguments)
    _training.check_options(parser, options)
    if options.images and not options.images.is_dir():
        parser.error(f"--images: no such directory. Received: {options.images}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains on the pictures of the command line, or on crops."""
    options = parse_arguments(arguments)
    if options.images:
        train(options.images, options)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_crops(Path(folder), options.seed)
        train(Path(folder), options)


if __name__ == "__main__":
    sys.exit(_training.command(main))
