"""Trains a 3-D U-Net of Swin Transformer blocks on a NIfTI volume, plain, within a memory budget, or with swaps.

    python -m examples.swin_unet3d --memory-budget 90MiB --compare
    python -m examples.swin_unet3d --volume scan.nii.gz --labels seg.nii.gz --volume-size 96 --memory-budget 4GiB

Data and options are those of `examples.unet3d`. Attention works in windows of 4 x 4 x 4 tokens, which every second
block shifts by half of a window (Liu et al., ICCV 2021); a token is a cube of 2 x 2 x 2 voxels.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from examples import _training, unet3d

if TYPE_CHECKING:
    import keras

WIDTH, HEADS, LEVELS = 16, 2, 2
PATCH, WINDOW = 2, 4
STRIDE = PATCH * WINDOW * 2 ** (LEVELS - 1)
MASKED = -100.0  # added to the scores of pairs of tokens that a shift brought together


def build_model(edge: int, classes: int) -> keras.Model:
    """Returns the network with Dice loss, compiled."""
    from keras import Input, Model, layers

    scan = Input((edge, edge, edge, 1), name="scan")
    x = layers.Conv3D(WIDTH, PATCH, PATCH, name="patches")(scan)
    skips = []
    for level in range(LEVELS):
        x = block(block(x, shift=0), shift=WINDOW // 2)
        if level < LEVELS - 1:
            skips.append(x)
            x = layers.Conv3D(2 * x.shape[-1], 2, 2)(layers.LayerNormalization()(x))
    for skip in reversed(skips):
        x = layers.Conv3DTranspose(skip.shape[-1], 2, 2)(x)
        x = block(layers.Dense(skip.shape[-1])(layers.Concatenate()([skip, x])), shift=0)
    x = layers.Conv3DTranspose(WIDTH, PATCH, PATCH, activation="gelu")(x)
    x = layers.Conv3D(WIDTH, 3, padding="same", activation="gelu")(layers.Concatenate()([scan, x]))
    scores = layers.Conv3D(classes, 1, activation="softmax", name="classes")(x)
    return unet3d.compiled(Model(scan, scores, name="swin_unet3d"))


def block(x: Any, shift: int) -> Any:
    """Returns a transformer block whose attention works in windows, shifted by a number of tokens."""
    from keras import layers, ops

    y = layers.LayerNormalization()(x)
    y = ops.roll(y, (-shift,) * 3, (1, 2, 3)) if shift else y
    y = attention(y, shift)
    x = layers.Add()([x, ops.roll(y, (shift,) * 3, (1, 2, 3)) if shift else y])
    y = layers.Dense(2 * x.shape[-1], activation="gelu")(layers.LayerNormalization()(x))
    return layers.Add()([x, layers.Dense(x.shape[-1])(y)])


def attention(x: Any, shift: int) -> Any:
    """Returns the results of attention between the tokens of each window."""
    from keras import layers, ops

    *sizes, channels = x.shape[1:]
    counts = [size // WINDOW for size in sizes]
    tokens, size = WINDOW**3, channels // HEADS
    x = ops.reshape(x, (-1, counts[0], WINDOW, counts[1], WINDOW, counts[2], WINDOW, channels))
    x = ops.reshape(ops.transpose(x, (0, 1, 3, 5, 2, 4, 6, 7)), (-1, tokens, channels))
    # Queries, keys and values of all heads: (3, windows, heads, tokens, size).
    parts = ops.transpose(ops.reshape(layers.Dense(3 * channels)(x), (-1, tokens, 3, HEADS, size)), (2, 0, 3, 1, 4))
    scores = ops.matmul(parts[0] * size**-0.5, ops.transpose(parts[1], (0, 1, 3, 2)))
    if shift:
        mask = mask_of(sizes, shift)
        scores = ops.reshape(scores, (-1, len(mask), HEADS, tokens, tokens)) + ops.cast(mask, scores.dtype)
        scores = ops.reshape(scores, (-1, HEADS, tokens, tokens))
    y = ops.transpose(ops.matmul(ops.softmax(scores), parts[2]), (0, 2, 1, 3))
    y = layers.Dense(channels)(ops.reshape(y, (-1, tokens, channels)))
    y = ops.transpose(ops.reshape(y, (-1, *counts, WINDOW, WINDOW, WINDOW, channels)), (0, 1, 4, 2, 5, 3, 6, 7))
    return ops.reshape(y, (-1, *sizes, channels))


def mask_of(sizes: Sequence[int], shift: int) -> Any:
    """Returns the additive attention mask of each window, of shape (windows, 1, tokens, tokens).

    A shift brings tokens from both ends of the volume into one window. They must not attend to each other.
    """
    import itertools

    import numpy as np

    regions = np.zeros(sizes)
    parts = (slice(-WINDOW), slice(-WINDOW, -shift), slice(-shift, None))
    for number, places in enumerate(itertools.product(parts, repeat=3)):
        regions[places] = number
    pairs = itertools.chain(*((size // WINDOW, WINDOW) for size in sizes))
    windows = regions.reshape(*pairs).transpose(0, 2, 4, 1, 3, 5).reshape(-1, 1, WINDOW**3)
    return np.where(windows[..., None] != windows[:, :, None], MASKED, 0.0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains on the volume of the command line, or on a phantom."""
    unet3d.main(arguments, "swin_unet3d", __doc__, build_model, STRIDE)


if __name__ == "__main__":
    sys.exit(_training.command(main))
