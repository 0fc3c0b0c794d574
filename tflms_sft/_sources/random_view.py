"""Random crops, flips and quarter turns of images in files: a tile of a view is a region of the file."""

from __future__ import annotations

import dataclasses
import operator
import random
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tflms_sft._sources.source import Region

__all__ = ["RandomView"]

SEPARATOR = "\x1f"
"""Between the path and the numbers of a view in a key."""


@keras.saving.register_keras_serializable("tflms_sft")
class RandomView:
    """Random crops, flips and quarter turns, drawn for each image of a batch in training.

    A reader with a view reads only the regions of the file that its tiles show. Readers with one view object get equal
    draws: pass it to the reader of the images and to that of their masks.

        view = tflms_sft.RandomView(crop=(4096, 4096), flips=(0, 1), turns=True, seed=1)
        slides = tflms_sft.ImageReader("zarr", (65536, 65536, 3), view=view)
        masks = tflms_sft.ImageReader("zarr", (65536, 65536), view=view)

    A reader draws at each call with `training=True`. The n-th draws of all readers with one view are equal. Outside
    of training nothing is flipped or turned, and the crop is the centre.

    Args:
        crop: Sizes of the crop along the first axes; `None` for the full image.
        flips: Axes along which an image is flipped with probability 1/2.
        turns: Whether the first two axes are turned by 0 to 3 quarter turns. They must have equal sizes.
        seed: Seed of the draws; `None` for a seed that `keras.utils.set_random_seed` determines.

    Attributes:
        counts: Number of draws of each reader.

    Raises:
        ValueError: For sizes or axes that are no integers, or too small.
    """

    def __init__(
        self,
        crop: Sequence[int] | None = None,
        flips: Sequence[int] = (),
        turns: bool = False,
        seed: int | None = None,
    ) -> None:
        self.crop = None if crop is None else integers("crop", crop, 1)
        self.flips = tuple(sorted({*integers("flips", flips, 0)}))
        self.turns = bool(turns)
        self.seed = random.randrange(2**31) if seed is None else int(seed)
        self.counts: list[Any] = []

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a view of images.

        Args:
            shape: Shape of an image.

        Raises:
            ValueError: If images of this shape have no such view.
        """
        crop = self.crop or ()
        if len(crop) > len(shape) or any(part > full for part, full in zip(crop, shape, strict=False)):
            raise ValueError(f"`crop` must lie inside of the image. Received: crop={crop} and shape={shape}.")
        if any(axis >= len(shape) for axis in self.flips):
            raise ValueError(f"`flips` must be axes of the image. Received: flips={self.flips} and shape={shape}.")
        result = (*crop, *shape[len(crop) :])
        if self.turns and result[0] != result[1]:
            raise ValueError(f"`turns` requires equal sizes along the first two axes. Received: {result[:2]}.")
        return result

    def keys(self, paths: Any, shape: tuple[int, ...], count: Any) -> Any:
        """Return keys that name a view of each image of a batch.

        Args:
            paths: A vector of strings.
            shape: Shape of an image.
            count: Number of draws of the reader, a variable that this draw increases; `None` outside of training.
        """
        space = [full - part for full, part in zip(shape, self.crop or (), strict=False)]
        zeros = tf.zeros_like(paths, tf.int64)
        offsets = [zeros + room // 2 for room in space]
        flips, turns = [zeros for _ in self.flips], zeros
        if count is not None:
            draws = self._draws(tf.shape(paths)[0], count)
            offsets = [tf.cast(draw * (room + 1), tf.int64) for room, draw in zip(space, draws, strict=False)]
            *flip_draws, turn_draw = draws[len(space) :]
            flips = [tf.cast(draw * 2, tf.int64) for draw in flip_draws]
            turns = tf.cast(turn_draw * 4, tf.int64) if self.turns else zeros
        numbers = [tf.as_string(number) for number in (*offsets, *flips, turns)]
        return tf.strings.join([paths, tf.strings.join(numbers, ",")], SEPARATOR)

    def _draws(self, batch: Any, count: Any) -> list[Any]:
        """Return a vector of numbers in [0, 1) for each offset, flip and turn.

        A reader that has drawn less often than another one, such as after a step that failed, continues with the
        number of that one.
        """
        others = [tf.convert_to_tensor(other) for other in self.counts]
        number = tf.maximum(tf.convert_to_tensor(count) + 1, tf.reduce_max(tf.stack(others)))
        count.assign(number)
        draws = len(self.crop or ()) + len(self.flips) + 1
        return tf.unstack(tf.random.stateless_uniform((draws, batch), [self.seed, number]), draws)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        return {"crop": self.crop, "flips": self.flips, "turns": self.turns, "seed": self.seed}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> RandomView:
        """Return a view with the arguments of `get_config`.

        Args:
            config: The arguments.
        """
        return cls(**config)


def integers(argument: str, values: Sequence[int], least: int) -> tuple[int, ...]:
    """Return an argument as a tuple of integers, each of at least `least`."""
    try:
        numbers = tuple(map(operator.index, values))
    except TypeError:
        numbers = (least - 1,)
    if any(number < least for number in numbers):
        raise ValueError(
            f"`{argument}` must be a sequence of integers of at least {least}. Received: {argument}={values!r}."
        )
    return numbers


@dataclasses.dataclass(frozen=True)
class DrawnView:
    """A view of one image.

    Attributes:
        shape: Shape of the view.
        offsets: First position of the crop along the first axes.
        flips: Axes that are flipped, after the crop.
        turns: Quarter turns of the first two axes, after the flips.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    flips: tuple[int, ...]
    turns: int

    def source_region(self, region: Region) -> Region:
        """Return the region of the image that a region of the view shows."""
        parts = list(region)
        for _ in range(self.turns):
            rows, columns = parts[:2]
            size = self.shape[0]
            parts[:2] = columns, slice(size - rows.stop, size - rows.start)
        for axis in self.flips:
            size = self.shape[axis]
            parts[axis] = slice(size - parts[axis].stop, size - parts[axis].start)
        for axis, offset in enumerate(self.offsets):
            parts[axis] = slice(parts[axis].start + offset, parts[axis].stop + offset)
        return tuple(parts)

    def shown(self, values: np.ndarray) -> np.ndarray:
        """Return a region of the image as the view shows it."""
        return np.rot90(np.flip(values, self.flips), self.turns) if self.flips or self.turns else values


def parse_key(key: str, view: RandomView, shape: tuple[int, ...]) -> tuple[str, DrawnView]:
    """Return the path and the view, which has a `shape`, of a key that `view.keys` made."""
    path, text = key.rsplit(SEPARATOR, 1)
    *numbers, turns = map(int, text.split(","))
    count = len(view.crop or ())
    flips = tuple(axis for axis, is_flipped in zip(view.flips, numbers[count:], strict=True) if is_flipped)
    return path, DrawnView(shape, tuple(numbers[:count]), flips, turns)
