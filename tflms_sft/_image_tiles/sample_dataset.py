"""Turns batches of images into batches of their tiles, with sample weights that keep Keras's loss unchanged.

Keras takes the mean over a batch, and the mean of these means over replicas. Overlapping tiles compute some pixels of
the result twice. So each pixel gets a Keras *sample weight*: 0 in all tiles but one. There the weight is the factor
from the mean over the pixels of all tiles to the mean over the pixels of the images. With equally many tiles per
replica, loss and gradients then equal those of the whole images up to rounding. Anything that Keras computes from the
result or the gradients of a single replica is refused.
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
from tflms_sft._util.keras_internals import has_mask
from tflms_sft._util.text import shortened

__all__: list[str] = []

_REDUCTIONS = {"mean": ("mean", "sum_over_batch_size"), "sum": ("sum",)}
_MAX_NAMES = 4
_CLIPPING = ("clipnorm", "clipvalue", "global_clipnorm")


def sample_parallel(model: Any, dataset: Any, parts: Sequence[int], loss_reduction: str = "mean") -> Any:
    """Return a data set of image tiles, on which training equals training on the whole images up to rounding.

    Each batch of images becomes a batch of tiles: first the first tile of all images, then the second, and so on. The
    data set suits `fit` and `evaluate` of a model that was built under `tf.distribute.MirroredStrategy`. With as many
    replicas as parts, each replica gets the same tile of all images; the number of tiles may also be a multiple of the
    number of replicas. Metrics count each pixel once if they are `weighted_metrics`.

    The function refuses models whose results would change, as far as the model shows it: padding, BatchNorm in training
    mode, losses of activations, losses that mix or mask pixels, and gradients clipped per replica. So call it after
    `compile`; loss and optimizer of a custom loop are unknown. Dropout and noise are drawn per tile, so more than once
    for some pixels; a warning names their layers.

    Args:
        model: A Keras model without padding, with one image of free sizes and one result, channels last.
        dataset: A `tf.data.Dataset` of batches, (images, labels) or (images, labels, weights), of known image size.
            Labels and weights have the size of the result, (batch, rows, columns); labels may have channels.
        parts: Number of tiles along each axis, such as (2, 2).
        loss_reduction: Reduction of the loss over pixels: `"mean"`, as in Keras's losses, or `"sum"`.

    Returns:
        A `tf.data.Dataset` of batches (tiles, labels, weights).

    Raises:
        RewriteError: If an operation of the model pads, or mixes rows of the whole image.
        ValueError: If a size is not valid, with the nearest valid sizes; if replicas would get unequally many tiles; if
            the loss, the optimizer or a layer treats tiles as images.
        TypeError: If `dataset` is no data set.
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
    for axis, rows in zip(axes, sizes, strict=True):
        axis.check_rows(rows, "rows of the images")
    tiles = tuple(axis.split(*pair) for axis, *pair in zip(axes, sizes, parts, strict=True))
    tiler = _BatchTiler(axes, tiles, _pixels(model, axes, sizes), loss_reduction == "mean")
    _check_sizes(model, tiler, specs)
    _check_replicas(model, math.prod(parts), specs[0].shape[0])
    _check_loss(model, specs[1].shape, tiler.pixels_of_tile, loss_reduction)
    _check_layers(model)
    _warn_of_randomness(tiling.draws)
    return dataset.map(tiler, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


@dataclasses.dataclass(frozen=True)
class _BatchTiler:
    """Cuts batches of images into batches of tiles. `pixels` are the sizes of the whole result along all axes."""

    axes: tuple[AxisTiling, ...]
    tiles: tuple[tuple[SampleTile, ...], ...]
    pixels: tuple[int, ...]
    is_mean: bool

    @property
    def sizes_of_tile(self) -> dict[int, int]:
        """Rows of each tile, by dimension of the image."""
        return {axis.dim: tiles[0].end - tiles[0].begin for axis, tiles in zip(self.axes, self.tiles, strict=True)}

    @property
    def pixels_of_tile(self) -> tuple[int, ...]:
        """Shape of the result of a tile, without the batch and channels."""
        return _with_rows(self.pixels, {axis.dim: axis.result_rows(self.sizes_of_tile[axis.dim]) for axis in self.axes})

    def __call__(self, images: Any, labels: Any, weights: Any = None) -> tuple[Any, Any, Any]:
        """Return the tiles, labels and weights of a batch."""
        import tensorflow as tf

        batches = [self._cut(tile, images, labels, weights) for tile in itertools.product(*self.tiles)]
        tile_images, tile_labels, tile_weights = (tf.concat(parts, 0) for parts in zip(*batches, strict=True))
        return tile_images, tile_labels, tile_weights

    def _cut(self, tile: tuple[SampleTile, ...], images: Any, labels: Any, weights: Any) -> tuple[Any, Any, Any]:
        import keras
        import tensorflow as tf

        image_slices = self._slices([slice(part.begin, part.end) for part in tile])
        result_slices = self._slices([slice(*axis.result_of(part)) for axis, part in zip(self.axes, tile, strict=True)])
        shape = self.pixels_of_tile
        # Keras divides by the pixels of all tiles instead of those of the images.
        num_tiles = math.prod(map(len, self.tiles))
        factor = num_tiles * math.prod(shape) / math.prod(self.pixels) if self.is_mean else 1.0
        tile_weights = tf.fill([tf.shape(images)[0], *shape], tf.constant(factor, keras.config.floatx()))
        for axis, part in zip(self.axes, tile, strict=True):
            counts = np.zeros([shape[axis.dim - 1], *[1] * (len(shape) - axis.dim)])
            counts[part.keep] = 1
            tile_weights *= tf.constant(counts, tile_weights.dtype)
        if weights is not None:
            tile_weights *= tf.cast(weights[result_slices], tile_weights.dtype)
        return images[image_slices], labels[result_slices], tile_weights

    def _slices(self, rows: Sequence[slice]) -> tuple[slice, ...]:
        slices = [slice(None)] * (self.axes[-1].dim + 1)
        for axis, part in zip(self.axes, rows, strict=True):
            slices[axis.dim] = part
        return tuple(slices)


def _with_rows(pixels: Sequence[int], rows: dict[int, int]) -> tuple[int, ...]:
    """Return a shape with other rows in some dimensions; dimensions count the batch."""
    return tuple(rows.get(dim, length) for dim, length in enumerate(pixels, 1))


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
            "`dataset` must yield batches (images, labels) or (images, labels, weights) of dense tensors, with images "
            f"of static size. Received: a data set of {specs!r}. Set the size with `tf.ensure_shape` in `dataset.map`."
        )
    return specs


def _pixels(model: Any, axes: Sequence[AxisTiling], sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the whole result, without the batch and channels."""
    shape = model.outputs[0].shape
    if len(shape) != len(model.inputs[0].shape) or axes[-1].dim != len(shape) - 2:
        raise ValueError(
            "`model` must have an image and a result of shape (batch, rows, ..., channels), of equal rank. Received: "
            f"an image of shape {model.inputs[0].shape}, a result of shape {shape}. Pass a model without pooling or "
            "flattening of the whole image."
        )
    pairs = zip(axes, sizes, strict=True)
    return _with_rows(shape[1:-1], {axis.dim: axis.result_rows(rows) for axis, rows in pairs})


def _check_sizes(model: Any, tiler: _BatchTiler, specs: tuple[Any, ...]) -> None:
    sizes, image = tiler.sizes_of_tile, model.inputs[0].shape
    if any(image[dim] not in (None, rows) for dim, rows in sizes.items()):
        raise ValueError(
            f"`model` must take tiles of {_shown(sizes.values())} rows. Received: a model of images of shape {image}. "
            "Leave its size open with keras.Input((None, ..., channels))."
        )
    for name, spec in zip(("labels", "weights"), specs[1:], strict=False):
        ranks = [len(tiler.pixels) + 1, len(tiler.pixels) + 2][: 2 if name == "labels" else 1]
        if spec.shape.rank not in ranks or tuple(spec.shape[1 : ranks[0]]) != tiler.pixels:
            raise ValueError(
                f"`dataset` must have {name} of {_shown(tiler.pixels)} pixels, the size of the results of `model`. "
                f"Received: {name} of shape {spec.shape}."
            )


def _shown(sizes: Iterable[int]) -> str:
    return " x ".join(map(str, sizes))


# Anything that would treat tiles as images --------------------------------------------------------------------------


def _check_replicas(model: Any, tiles: int, batch: int | None) -> None:
    replicas = model.distribute_strategy.num_replicas_in_sync
    if tiles * (batch or 1) % replicas:
        images = f"batches of {batch} images" if batch else "batches of any number of images"
        raise ValueError(
            f"The number of tiles in a batch must be a multiple of the {replicas} replicas of the model's strategy. "
            f"Received: `parts` of {tiles} tiles per image, in {images}. Use a multiple of {replicas} tiles, or "
            "batches of one suitable size (drop_remainder=True)."
        )
    optimizer = getattr(model, "optimizer", None)
    clipping = [name for name in _CLIPPING if getattr(optimizer, name, None) is not None]
    if replicas > 1 and clipping:
        raise ValueError(
            f"`{clipping[0]}` of the optimizer clips the gradients of each replica, here of tiles, before they are "
            f"added up. Received: {clipping[0]}={getattr(optimizer, clipping[0])!r}. Leave it out, or use one replica."
        )


def _check_layers(model: Any) -> None:
    regularized = sum(weight.regularizer is not None for weight in model.trainable_weights)
    if len(model.losses) > regularized:
        raise ValueError(
            f"`model` has {len(model.losses) - regularized} loss(es) of activations (`activity_regularizer` or "
            "`add_loss`), which count activations near the borders of tiles more than once. Leave these losses out."
        )


def _warn_of_randomness(draws: Sequence[str]) -> None:
    if draws:
        warnings.warn(
            "`model` draws random numbers per tile, so more than once for pixels near the borders of tiles: "
            f"{shortened(draws, _MAX_NAMES)}. It trains, but with other random numbers than on whole images.",
            stacklevel=3,
        )


def _check_loss(model: Any, labels: Any, pixels: tuple[int, ...], loss_reduction: str) -> None:
    """Check that the compiled loss has a value for each pixel, and reduces them as the argument says."""
    import keras

    losses = keras.tree.flatten(model.loss) if getattr(model, "compiled", False) else []
    if losses and loss_reduction == "mean" and has_mask(model.outputs[0]):
        _refuse_masks("a model whose result has a mask, such as that of a layer `Masking`")
    if len(losses) != 1 or losses[0] in ("crossentropy", "ce"):  # Keras chooses these by the labels.
        return
    loss = keras.losses.get(losses[0])
    reduction = getattr(loss, "reduction", _REDUCTIONS["mean"][0])
    if reduction not in _REDUCTIONS[loss_reduction]:
        expected = " or ".join(f'"{name}"' for name in _REDUCTIONS[loss_reduction])
        raise ValueError(
            f'`loss_reduction="{loss_reduction}"` needs a loss with reduction={expected}. '
            f"Received: a model that was compiled with {losses[0]!r}, reduction={reduction!r}."
        )
    channels = labels[len(pixels) + 1 :]
    values, masked = _values_of(loss, (2, *pixels, *channels), (2, *pixels, model.outputs[0].shape[-1]))
    if values != (2, *pixels):
        raise ValueError(
            "The loss must have a value for each pixel. Received: a model that was compiled with "
            f"{losses[0]!r}, whose values have the shape {values} for 2 images with results of {_shown(pixels)} "
            "pixels. Use a loss that reduces over channels alone."
        )
    if loss_reduction == "mean" and masked:
        _refuse_masks(f"a model that was compiled with {losses[0]!r}")


def _refuse_masks(received: str) -> None:
    raise ValueError(
        "`model` must not mask pixels (`ignore_class`, a mask), because the mean over the other pixels counts those in "
        f"several tiles more than once. Received: {received}. Use weights of 0 in `dataset` for masked pixels, or sums "
        '(`reduction="sum"` of the loss, and `loss_reduction="sum"`).'
    )


def _values_of(loss: Any, labels: tuple[int, ...], results: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
    """Return the shape of the values of a loss before their reduction, and whether they have a mask."""
    import keras
    import tensorflow as tf

    if len(labels) < len(results) and results[-1] == 1:  # Keras expands labels before it calls a function.
        labels = (*labels, 1)
    arguments = (tf.TensorSpec(shape, keras.config.floatx()) for shape in (labels, results))
    masked = []

    def values(*arguments: Any) -> Any:
        result = getattr(loss, "call", loss)(*arguments)
        masked.append(has_mask(result))
        return result

    function = tf.function(values, autograph=False)
    return tuple(function.get_concrete_function(*arguments).output_shapes), any(masked)
