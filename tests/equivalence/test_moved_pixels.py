"""Ops that move pixels or interpolate between them, between convolutions, as whole steps on tiles."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from between_convolutions import check_on_tiles, normed, plain, step_between
from equivalence import TOLERANCE
from keras import layers

STEPS = 3


@dataclasses.dataclass(frozen=True)
class Net:
    """A network with an op in the middle.

    Attributes:
        rank: Number of axes.
        middle: The layers between two convolutions.
        ops: Op types that must run inside the loops alone.
        size: Size of the images, odd where the op allows it.
        norm: Normalisation after each convolution.
        tolerance: Largest difference. TensorFlow resizes in float32: parts of a gradient that several tiles add up are
            rounded to it, unlike the sum, except in a segment with barriers.
    """

    rank: int
    middle: Callable[[Any], Any]
    ops: str
    size: tuple[int, ...] | None = None
    norm: Callable[[Any], Any] = plain
    tolerance: float = TOLERANCE


class Function(layers.Layer):
    """A layer without weights."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def call(self, x: Any) -> Any:
        return self.function(x)


def mirrored(mode: str, *paddings: tuple[int, int]) -> Callable[[Any], Any]:
    return lambda x: Function(lambda y: tf.pad(y, [[0, 0], *paddings, [0, 0]], mode))(x)


def cycle_gan(x: Any) -> Any:
    """A residual block of CycleGAN."""
    y = layers.Conv2D(4, 3, activation="relu")(mirrored("REFLECT", (1, 1), (1, 1))(x))
    y = normed(layers.Conv2D(4, 3)(mirrored("REFLECT", (1, 1), (1, 1))(y)))
    return mirrored("REFLECT", (3, 3), (3, 3))(layers.Add()([x, y]))


def reversed_along(*dims: int) -> Callable[[Any], Any]:
    return lambda x: Function(lambda y: tf.reverse(y, dims))(x)


def sub_pixel(x: Any) -> Any:
    x = layers.Conv2D(18, 3, padding="same", activation="relu")(Function(lambda y: tf.nn.space_to_depth(y, 2))(x))
    return Function(lambda y: tf.nn.depth_to_space(y, 3))(x)


def resized(size: tuple[int, int], **flags: bool) -> Callable[[Any], Any]:
    flags = flags or {"half_pixel_centers": True}
    return lambda x: Function(lambda y: tf.cast(tf.raw_ops.ResizeBicubic(images=y, size=size, **flags), y.dtype))(x)


def cropped_channels(x: Any) -> Any:
    """Selects channels by their places, shifts them and sums them up."""
    return Function(lambda y: tf.cumsum(tf.roll(tf.stack(tf.unstack(y, axis=-1)[1:], axis=-1), [1], [3]), axis=-1))(x)


def table_of_classes(x: Any) -> Any:
    """Weights each pixel by the class that it most resembles."""

    def weighted(y: tf.Tensor) -> tf.Tensor:
        classes = tf.argmax(y, axis=-1)
        weights = tf.gather(tf.constant([0.5, 2.0, 1.0, 3.0], y.dtype), classes)
        return y * weights[..., None] + tf.one_hot(classes, 4, dtype=y.dtype)

    return Function(weighted)(x)


def patches_of_noise(x: Any) -> Any:
    """Patches of an image that needs no gradient, as at the entry of a vision transformer."""
    window = {"ksizes": [1, 3, 3, 1], "strides": [1, 1, 1, 1], "rates": [1, 2, 2, 1], "padding": "SAME"}
    return Function(lambda y: tf.raw_ops.ExtractImagePatches(images=tf.stop_gradient(y), **window))(x)


BICUBIC = "ResizeBicubic ResizeBicubicGrad"
MIRROR = "MirrorPad MirrorPadGrad"
NETS = {
    "reflection": Net(2, mirrored("REFLECT", (3, 3), (3, 3)), MIRROR),
    "reflection, normed": Net(2, mirrored("REFLECT", (3, 3), (3, 3)), MIRROR, norm=normed),
    "reflection wider than a tile": Net(2, mirrored("REFLECT", (12, 7), (0, 11)), MIRROR),
    "symmetric": Net(2, mirrored("SYMMETRIC", (13, 2), (1, 12)), MIRROR),
    "symmetric, normed": Net(2, mirrored("SYMMETRIC", (4, 0), (1, 5)), MIRROR, norm=normed),
    "reflection 1-D": Net(1, mirrored("REFLECT", (5, 9)), MIRROR),
    "reflection 3-D": Net(3, mirrored("REFLECT", (2, 2), (3, 1), (0, 6)), MIRROR),
    "residual block of CycleGAN": Net(2, cycle_gan, MIRROR),
    "sub-pixel convolution": Net(2, sub_pixel, "DepthToSpace SpaceToDepth", (14, 22)),
    "sub-pixel convolution, normed": Net(2, sub_pixel, "DepthToSpace SpaceToDepth", (14, 22), norm=normed),
    "bicubic": Net(2, lambda x: layers.UpSampling2D((2, 3), interpolation="bicubic")(x), BICUBIC, tolerance=1e-6),
    "bicubic, normed": Net(2, resized((31, 7)), BICUBIC, norm=normed),
    "bicubic, smaller": Net(2, resized((9, 5)), BICUBIC, norm=normed),
    "bicubic, corners": Net(2, resized((25, 20), align_corners=True), BICUBIC, tolerance=1e-6),
    "reversed": Net(2, reversed_along(1), "ReverseV2"),
    "reversed, all": Net(2, reversed_along(1, 2, 3), "ReverseV2", norm=normed),
    "reversed channels": Net(2, reversed_along(-1), "ReverseV2"),
    "reversed 1-D": Net(1, reversed_along(1), "ReverseV2", norm=normed),
    "reversed 3-D": Net(3, reversed_along(1, 3), "ReverseV2"),
    "channels": Net(2, cropped_channels, "Pack Unpack Cumsum Roll"),
    "channels, normed": Net(2, cropped_channels, "Unpack Cumsum Roll", norm=normed),
    "channels 1-D": Net(1, lambda x: Function(lambda y: tf.reverse(tf.cumsum(y, -1), [-1]))(x), "Cumsum"),
    "patches": Net(2, lambda x: layers.Concatenate()([x, patches_of_noise(x)]), "ExtractImagePatches"),
    "lookup": Net(2, table_of_classes, "ArgMax GatherV2 OneHot"),
    "lookup, normed": Net(2, table_of_classes, "ArgMax GatherV2 OneHot", norm=normed),
    # Each tile needs rows from both ends, so that the planner leaves a part of the backward pass untiled.
    "both directions": Net(1, lambda x: layers.Concatenate()([x, reversed_along(1)(x)]), ""),
}
GRIDS = {1: [(5,), (2, 4)], 2: [(3, 2), (5, 1), (2, 4, 3)], 3: [(2, 2, 3), (2, 3, 1, 2)]}
CASES = [(name, grid) for name, net in NETS.items() for grid in range(len(GRIDS[net.rank]))]


def check(name: str, num_tiles: tuple[int, ...], known_batch: bool, **params: Any) -> None:
    net = NETS[name]
    step = step_between(net.rank, net.norm, net.middle, known_batch=known_batch, size=net.size, steps=STEPS)
    fast = check_on_tiles(step, num_tiles, net.tolerance, **params)
    before, after = image_ops(step.concrete_fn), image_ops(fast.concrete_function)
    assert before.issuperset(net.ops.split()) and after.isdisjoint(net.ops.split())


def image_ops(function: Any) -> set[str]:
    """The types of the ops in a graph, except in loops, whose results have three dimensions or more."""
    ops = function.graph.get_operations()
    return {op.type for op in ops if any((tensor.shape.rank or 0) > 2 for tensor in op.outputs)}


@pytest.mark.parametrize(("name", "grid"), CASES)
def test_moved_pixels_on_tiles_equal_plain(name, grid):
    check(name, GRIDS[NETS[name].rank][grid], known_batch=grid == 0)


@pytest.mark.parametrize("name", [name for name, net in NETS.items() if net.rank == 2])
def test_moved_pixels_with_carried_rows_equal_plain(name):
    check(name, (4, 1), known_batch=False, halo="carry")
