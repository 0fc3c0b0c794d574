"""Batches of images as batches of their tiles, with weights that make of Keras's loss that of the whole images.

Keras takes a mean over a batch, and over replicas the mean of their means. Tiles that overlap make some pixels of the
result twice. So each pixel gets a weight, as Keras's *sample weights*: 0 in all tiles but one, and there what the mean
over the pixels of all tiles has to be multiplied by to be one over the pixels of the images. As long as replicas have
equally many tiles the loss and the gradients are then, to rounding, those of the whole images, under `fit` and in loops
that call a Keras loss. What Keras does with the result or the gradients of a replica by itself is refused.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tflms_sft._image_tiles.sample_tiling import AxisTiling, SampleTile, sample_tiling
from tflms_sft._util.text import shortened

__all__: list[str] = []

_REDUCTIONS = {"mean": ("mean", "sum_over_batch_size"), "sum": ("sum",)}
_MOST_NAMES = 4
_CLIPPING = ("clipnorm", "clipvalue", "global_clipnorm")


def sample_parallel(model: Any, dataset: Any, parts: Sequence[int], loss_reduction: str = "mean") -> Any:
    """A data set of images as one of their tiles, on which training is, to rounding, that on the whole images.

    Each batch becomes one with so many tiles of each image, first the first tile of all of them. It is what `fit` and
    `evaluate` of a model take that was made under `tf.distribute.MirroredStrategy`: with as many replicas as parts
    each gets the same tile of all images. It can have a multiple of them, or of one replica. Metrics count pixels once
    if they are `weighted_metrics`.

    Refused is what would not be the same, as far as the model shows it: padding, BatchNorm in training mode, losses of
    activations, losses that join pixels or leave some out, gradients that are clipped before replicas have added them
    up. So call it after `compile`; of a custom loop neither loss nor optimizer is known. Dropout and noise are drawn
    for each tile, so for some pixels more than once, and never for whole images: a warning names their layers.

    Args:
        model: A Keras model without padding, of one image whose sizes it leaves open, and one result, channels last.
        dataset: A `tf.data.Dataset` of batches, (images, labels) or (images, labels, weights), whose sizes it knows.
            Labels and weights have the size of the result, (batch, rows, columns); labels may have channels.
        parts: Into how many tiles images are cut along each axis, such as (2, 2).
        loss_reduction: What the loss makes of pixels, "mean" or "sum". Defaults to "mean", as Keras's losses.

    Returns:
        A `tf.data.Dataset` of batches (tiles, labels, weights).

    Raises:
        RewriteError: If an operation of the model pads, or mixes rows of the whole image.
        ValueError: If sizes do not go, with the nearest that do; if replicas would get unequally many tiles; if the
            loss, the optimizer or a layer would see the tiles for images.
        TypeError: If `dataset` is none.
    """
    import tensorflow as tf

    if loss_reduction not in _REDUCTIONS:
        raise ValueError(f'`loss_reduction` must be "mean" or "sum". Received: loss_reduction={loss_reduction!r}.')
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            "`dataset` must be a tf.data.Dataset of batches; of arrays it is "
            f"tf.data.Dataset.from_tensor_slices((images, labels)).batch(2). Received: dataset={dataset!r}."
        )
    tiling = sample_tiling(model, training=True)
    axes = tiling.axes
    if len(parts) != len(axes):
        raise ValueError(f"`parts` needs {len(axes)} numbers, one for each axis. Received: parts={parts!r}.")
    specs = _specs(dataset)
    sizes = [specs[0].shape[axis.dim] for axis in axes]
    for axis, own in zip(axes, sizes, strict=True):
        axis.check_rows(own, "rows of the images")
    along = tuple(axis.split(*pair) for axis, *pair in zip(axes, sizes, parts, strict=True))
    cut = _BatchTiler(axes, along, _pixels(model, axes, sizes), loss_reduction == "mean")
    _check_sizes(model, cut, specs)
    _check_replicas(model, math.prod(parts), specs[0].shape[0])
    _check_loss(model, specs[1].shape, cut.pixels_of_tile, loss_reduction)
    _check_layers(model)
    _warn_of(tiling.draws)
    return dataset.map(cut, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


@dataclasses.dataclass(frozen=True)
class _BatchTiler:
    """Cuts batches.

    Attributes:
        axes: Along which.
        along: The tiles, along each axis.
        pixels: Sizes of the whole result, without the batch and channels.
        mean: Whether the loss is one over pixels, not a sum.
    """

    axes: tuple[AxisTiling, ...]
    along: tuple[tuple[SampleTile, ...], ...]
    pixels: tuple[int, ...]
    mean: bool

    @property
    def sizes_of_tile(self) -> dict[int, int]:
        """Rows of each tile, by the dimension of the image."""
        return {axis.dim: own[0].end - own[0].begin for axis, own in zip(self.axes, self.along, strict=True)}

    @property
    def pixels_of_tile(self) -> tuple[int, ...]:
        """As `pixels`, of the result of a tile."""
        return _with_rows(self.pixels, {axis.dim: axis.result_rows(self.sizes_of_tile[axis.dim]) for axis in self.axes})

    def __call__(self, images: Any, labels: Any, weights: Any = None) -> tuple[Any, Any, Any]:
        """What a batch becomes."""
        import tensorflow as tf

        batches = [self._of_tile(tile, images, labels, weights) for tile in itertools.product(*self.along)]
        of_images, of_labels, of_weights = (tf.concat(own, 0) for own in zip(*batches, strict=True))
        return of_images, of_labels, of_weights

    def _of_tile(self, tile: tuple[SampleTile, ...], images: Any, labels: Any, weights: Any) -> tuple[Any, Any, Any]:
        import keras
        import tensorflow as tf

        of_image = self._slices([slice(own.begin, own.end) for own in tile])
        of_result = self._slices([slice(*axis.result_of(own)) for axis, own in zip(self.axes, tile, strict=True)])
        shape = self.pixels_of_tile
        # Keras divides by the pixels of all tiles, where the images' are to be divided by.
        factor = math.prod(map(len, self.along)) * math.prod(shape) / math.prod(self.pixels) if self.mean else 1.0
        own_weights = tf.fill([tf.shape(images)[0], *shape], tf.constant(factor, keras.config.floatx()))
        for axis, own in zip(self.axes, tile, strict=True):
            counts = np.zeros([shape[axis.dim - 1], *[1] * (len(shape) - axis.dim)])
            counts[own.keep] = 1
            own_weights *= tf.constant(counts, own_weights.dtype)
        if weights is not None:
            own_weights *= tf.cast(weights[of_result], own_weights.dtype)
        return images[of_image], labels[of_result], own_weights

    def _slices(self, rows: Sequence[slice]) -> tuple[slice, ...]:
        found = [slice(None)] * (self.axes[-1].dim + 1)
        for axis, own in zip(self.axes, rows, strict=True):
            found[axis.dim] = own
        return tuple(found)


def _with_rows(pixels: Sequence[int], rows: dict[int, int]) -> tuple[int, ...]:
    """Sizes in which the rows of some dimensions, counted with the batch, are others."""
    return tuple(rows.get(dim, own) for dim, own in enumerate(pixels, 1))


# Sizes --------------------------------------------------------------------------------------------------------------


def _specs(dataset: Any) -> tuple[Any, ...]:
    import tensorflow as tf

    specs = dataset.element_spec
    if (
        not isinstance(specs, tuple)
        or len(specs) not in (2, 3)
        or not all(isinstance(spec, tf.TensorSpec) and spec.shape.rank for spec in specs)
        or None in specs[0].shape[1:]
    ):
        raise ValueError(
            "`dataset` must have batches (images, labels) or (images, labels, weights) that are tensors, and know the "
            f"size of the images. Received: a data set of {specs!r}."
        )
    return specs


def _pixels(model: Any, axes: Sequence[AxisTiling], sizes: Sequence[int]) -> tuple[int, ...]:
    """Sizes of the whole result, without the batch and channels."""
    shape = model.outputs[0].shape
    if len(shape) != len(model.inputs[0].shape) or axes[-1].dim != len(shape) - 2:
        raise ValueError(
            "`model` must have an image and a result whose last dimension are channels, and the ones before rows. "
            f"Received: an image of shape {model.inputs[0].shape}, a result of shape {shape}."
        )
    pairs = zip(axes, sizes, strict=True)
    return _with_rows(shape[1:-1], {axis.dim: axis.result_rows(own) for axis, own in pairs})


def _check_sizes(model: Any, cut: _BatchTiler, specs: tuple[Any, ...]) -> None:
    wanted, image = cut.sizes_of_tile, model.inputs[0].shape
    if any(image[dim] not in (None, rows) for dim, rows in wanted.items()):
        raise ValueError(
            f"`model` must take tiles of {_shown(wanted.values())} rows; leave its size open with keras.Input((None, "
            f"..., channels)). Received: a model of images of shape {image}."
        )
    for name, spec in zip(("labels", "weights"), specs[1:], strict=False):
        ranks = [len(cut.pixels) + 1, len(cut.pixels) + 2][: 2 if name == "labels" else 1]
        if spec.shape.rank not in ranks or tuple(spec.shape[1 : ranks[0]]) != cut.pixels:
            raise ValueError(
                f"`dataset` must have {name} of {_shown(cut.pixels)} pixels, as the results that `model` makes of its "
                f"images. Received: {name} of shape {spec.shape}."
            )


def _shown(sizes: Iterable[int]) -> str:
    return " x ".join(map(str, sizes))


# What would see tiles for images ------------------------------------------------------------------------------------


def _check_replicas(model: Any, tiles: int, batch: int | None) -> None:
    replicas = model.distribute_strategy.num_replicas_in_sync
    if tiles * (batch or 1) % replicas:
        images = f"batches of {batch} images" if batch else "batches of any number of images"
        raise ValueError(
            f"`parts` must make a number of tiles that goes evenly to the {replicas} replicas of the model's strategy: "
            f"each takes a mean of its own. Received: {tiles} tiles of an image, in {images}. Take a multiple of "
            f"{replicas} tiles, or batches of one size (drop_remainder=True) that makes them one."
        )
    optimizer = getattr(model, "optimizer", None)
    clipping = [name for name in _CLIPPING if getattr(optimizer, name, None) is not None]
    if replicas > 1 and clipping:
        raise ValueError(
            f"`{clipping[0]}` of the optimizer clips the gradients of each replica before they are added up, which are "
            f"those of tiles here. Received: {clipping[0]}={getattr(optimizer, clipping[0])!r}. Leave it out, or use "
            "one replica."
        )


def _check_layers(model: Any) -> None:
    regularized = sum(weight.regularizer is not None for weight in model.trainable_weights)
    if len(model.losses) > regularized:
        raise ValueError(
            f"`model` has {len(model.losses) - regularized} loss(es) of activations (`activity_regularizer` or "
            "`add_loss`), and activations near the borders of tiles are there more than once. Leave them out."
        )


def _warn_of(draws: Sequence[str]) -> None:
    if draws:
        warnings.warn(
            "`model` draws random numbers for each tile, so for pixels near the borders of tiles more than once, and "
            f"never for the whole image: {shortened(draws, _MOST_NAMES)}. It trains, but by other numbers than on "
            "whole images.",
            stacklevel=3,
        )


def _check_loss(model: Any, labels: Any, pixels: tuple[int, ...], loss_reduction: str) -> None:
    """See that the loss the model was compiled with has a value for each pixel, and makes of them what was said."""
    import keras

    found = keras.tree.flatten(model.loss) if getattr(model, "compiled", False) else []
    if found and loss_reduction == "mean" and _has_mask(model.outputs[0]):
        _refuse_masks("a model whose result has a mask, as layers like `Masking` make it")
    if len(found) != 1 or found[0] in ("crossentropy", "ce"):  # Keras's own, which it chooses by the labels.
        return
    loss = keras.losses.get(found[0])
    reduction = getattr(loss, "reduction", _REDUCTIONS["mean"][0])
    if reduction not in _REDUCTIONS[loss_reduction]:
        wanted = " or ".join(f'"{name}"' for name in _REDUCTIONS[loss_reduction])
        raise ValueError(
            f'`loss_reduction="{loss_reduction}"` is of a loss with reduction={wanted}. '
            f"Received: a model that was compiled with {found[0]!r}, reduction={reduction!r}."
        )
    channels = labels[len(pixels) + 1 :]
    values, masked = _values_of(loss, (2, *pixels, *channels), (2, *pixels, model.outputs[0].shape[-1]))
    if values != (2, *pixels):
        raise ValueError(
            "The loss must have a value for each pixel, so that each can count once. Received: a model that was "
            f"compiled with {found[0]!r}, which makes values of shape {values} of results of {_shown(pixels)} pixels "
            "of 2 images."
        )
    if loss_reduction == "mean" and masked:
        _refuse_masks(f"a model that was compiled with {found[0]!r}")


def _refuse_masks(what: str) -> None:
    raise ValueError(
        "`model` leaves pixels out (`ignore_class`, a mask), and means over what is left divide by the pixels that "
        f"tiles have more than once too. Received: {what}. Use weights of 0 in `dataset` for those pixels, or sums "
        '(`reduction="sum"` of the loss, and `loss_reduction="sum"`).'
    )


def _values_of(loss: Any, labels: tuple[int, ...], results: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
    """The shape of what a loss makes of results before it adds up, and whether it masks some of that."""
    import keras
    import tensorflow as tf

    if len(labels) < len(results) and results[-1] == 1:  # As Keras does before it calls a function.
        labels = (*labels, 1)
    arguments = (tf.TensorSpec(shape, keras.config.floatx()) for shape in (labels, results))
    masked = []

    def values(*arguments: Any) -> Any:
        found = getattr(loss, "call", loss)(*arguments)
        masked.append(_has_mask(found))
        return found

    function = tf.function(values, autograph=False)
    return tuple(function.get_concrete_function(*arguments).output_shapes), any(masked)


def _has_mask(value: Any) -> bool:
    """Whether a loss is to leave some of it out."""
    return getattr(value, "_keras_mask", None) is not None
