"""Trains a vision transformer on tiles of a stained tissue section, plain, within a memory budget, or with swaps.

    python -m examples.vit_pathology --memory-budget 60MiB --compare
    python -m examples.vit_pathology --image section.png --tile-size 512 --patch-size 8 --memory-budget 1GiB

It learns whether a tile has more of the brown stain (DAB) than most. The amount is computed from the colours by
scikit-image (Ruifrok and Johnston, 2001), so that any section with that stain can be used. Without an image it takes
the section of a colon that comes with scikit-image.

Attention compares each patch with all others: memory grows with the fourth power of the tile's edge. A budget lets
attention run by tiles of queries.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples import _training

if TYPE_CHECKING:
    import keras
    import numpy as np
    import tensorflow as tf

LEARNING_RATE = 1e-3
WIDTH, HEADS, BLOCKS = 32, 4, 4


# ----------------------------------------------------------------------------------------------------------
# The network.


def build_model(tile_size: int, patch_size: int) -> keras.Model:
    """Returns a vision transformer (Dosovitskiy et al., ICLR 2021) with a mean over tokens, compiled."""
    from keras import Input, Model, layers, losses, optimizers

    tile = Input((tile_size, tile_size, 3), name="tile")
    x = layers.Conv2D(WIDTH, patch_size, patch_size, name="patches")(tile)
    tokens = (tile_size // patch_size) ** 2
    x = layers.Reshape((tokens, WIDTH))(x)
    x = layers.Add()([x, layers.Embedding(tokens, WIDTH, name="positions")(_indices(tokens))])
    for _ in range(BLOCKS):
        y = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(y, y)])
        y = layers.Dense(4 * WIDTH, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(WIDTH)(y)])
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    model = Model(tile, layers.Dense(1, name="stained")(x), name="vit")
    model.compile(
        optimizers.Adam(LEARNING_RATE),
        losses.BinaryCrossentropy(from_logits=True),
        metrics=["accuracy"],
        # XLA would fuse the plain step's operations, which changes roundings; rewritten steps run without it.
        jit_compile=False,
    )
    return model


def _indices(tokens: int) -> Any:
    import numpy as np

    return np.arange(tokens)[None]


# ----------------------------------------------------------------------------------------------------------
# The section.


def read_section(path: Path | None) -> np.ndarray:
    """Returns the pixels of a photograph, from 0 to 255, with red, green and blue.

    Raises:
        _training.UserError: It is no picture in colour.
    """
    from skimage import data, io

    if path is None:
        return data.immunohistochemistry()
    try:
        pixels = io.imread(path)
    except (OSError, ValueError, SyntaxError) as error:
        raise _training.UserError(f"--image: {path} cannot be read: {error}") from None
    if pixels.ndim != 3 or pixels.shape[2] < 3:
        raise _training.UserError(f"--image: expected a picture in colour. Received: {path} of shape {pixels.shape}")
    return pixels[..., :3]


def stain_of(section: np.ndarray) -> np.ndarray:
    """Returns the amount of the brown stain for each pixel."""
    from skimage.color import rgb2hed

    return rgb2hed(section)[..., 2]


def cut_tiles(section: np.ndarray, stain: np.ndarray, options: argparse.Namespace) -> tf.data.Dataset:
    """Returns batches of (tiles from -1 to 1, whether they have more stain than half of the tiles), for all epochs."""
    import numpy as np
    import tensorflow as tf

    random = np.random.default_rng(options.seed)
    edge = options.tile_size
    count = options.epochs * options.steps * options.batch_size
    corners = random.integers(0, np.array(section.shape[:2]) - edge + 1, size=(count, 2))
    amounts = np.array([stain[top : top + edge, left : left + edge].mean() for top, left in corners])
    labels = (amounts > np.median(amounts)).astype(np.float32)[:, None]
    pixels = tf.constant(section)

    def cut(corner: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        tile = tf.slice(pixels, tf.concat([corner, [0]], 0), [edge, edge, 3])
        return tf.cast(tile, tf.float32) / 127.5 - 1, label

    tiles = tf.data.Dataset.from_tensor_slices((corners.astype(np.int32), labels)).map(cut)
    return tiles.batch(options.batch_size, drop_remainder=True)


# ----------------------------------------------------------------------------------------------------------
# The program.


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = _training.new_parser("vit_pathology", __doc__)
    add = parser.add_argument_group("section").add_argument
    positive = _training.whole_number(1)
    add("--image", type=Path, metavar="FILE", help="photograph of a section (default: that of a colon)")
    add("--tile-size", type=positive, default=256, metavar="N", help="edge of the tiles (default: %(default)s)")
    add("--patch-size", type=positive, default=8, metavar="N", help="edge of a patch (default: %(default)s)")
    _training.add_options(parser, batch_size=2, epochs=3, steps=4)
    options = parser.parse_args(arguments)
    _training.check_options(parser, options)
    if options.tile_size % options.patch_size:
        parser.error(
            f"--tile-size must be divisible by --patch-size. Received: {options.tile_size} and {options.patch_size}"
        )
    if options.image and not options.image.is_file():
        parser.error(f"--image: no such file. Received: {options.image}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains on the section of the command line, or on that of a colon."""
    options = parse_arguments(arguments)
    section = read_section(options.image)
    if min(section.shape[:2]) < options.tile_size:
        raise _training.UserError(
            f"--tile-size {options.tile_size} is more than the section has, {section.shape[0]} x {section.shape[1]}"
        )
    print(f"Section of {section.shape[0]} x {section.shape[1]} pixels", flush=True)
    build = functools.partial(build_model, options.tile_size, options.patch_size)
    _training.train(build, functools.partial(cut_tiles, section, stain_of(section), options), options)


if __name__ == "__main__":
    sys.exit(_training.command(main))
