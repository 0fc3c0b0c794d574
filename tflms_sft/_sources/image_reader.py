"""The layer that reads images from files."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from rewriters.ir.region_reads import read_images
from tflms_sft._sources.formats import FORMATS, OPENERS, Fingerprint, check_format, fingerprint
from tflms_sft._sources.open_images import ImageSpec, OpenImages
from tflms_sft._sources.open_shapes import unknown_sizes_of_traced_step
from tflms_sft._sources.random_view import RandomView
from tflms_sft._sources.region_reads import RegionReads
from tflms_sft._sources.source import Source

__all__ = ["ImageReader"]

REMOTE = "://"

DTYPES = (
    *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "bool"),
    *("float16", "float32", "float64"),
)


@keras.saving.register_keras_serializable("tflms_sft")
class ImageReader(keras.layers.Layer):
    """A Keras layer that reads images from files, by tiles if the step is rewritten.

    The inputs of the layer are paths, one for each image of a batch, or indices of `paths`. Without rewriting, the
    layer reads whole images. In a step that is rewritten in tiles, each iteration of a loop reads its own tile, halo
    included, while the previous tile is computed, so that no image is whole in memory.

        reader = tflms_sft.ImageReader("zarr", shape=(65536, 65536, 3), dtype="uint8")
        paths = keras.Input((), dtype="string")
        x = keras.layers.Rescaling(1 / 255)(reader(paths))

    Args:
        source: Format of the files: `"zarr"` (versions 2 and 3), `"tiff"` (pyramids too), `"openslide"`, `"nifti"`,
            `"hdf5"` or `"numpy"`. Otherwise a function that opens a path and returns an object with `shape`, `dtype`
            and `__getitem__`, which receives a slice for each dimension.
        shape: Shape of each image, for instance `(height, width, channels)`; `None` for sizes that differ from image to
            image. Images of a batch must then have one shape. `fit`, `evaluate` and `predict` plan for each shape.
        dtype: Type of its numbers.
        paths: Paths of all images, if the inputs are indices.
        array: Name of the array in a zarr group or HDF5 file; number of the series of a TIFF file. Other formats ignore
            it.
        level: Level of a pyramid in zarr, TIFF or slides, 0 for full resolution. Other formats ignore it.
        axes: Dimension of the file for each dimension of the image, such as `(1, 2, 0)` for a file with channels first.
            Dimensions that are not listed must have the size 1. Default: the same order as in the image, where a file
            without channels is an image with one channel.
        view: Random crops, flips and quarter turns.
        fill_missing_chunks: Whether zarr chunks without a file hold the fill value, as zarr writes them by default;
            otherwise they are an error.
        name: Name of the layer.

    Attributes:
        image_shape: Shape of each image in its file.
        output_image_shape: Shape of each image, or of its view.
        supports_jit: False: XLA compiles no Python calls.
        view_count: Number of draws of views; `None` without a view.

    Raises:
        ValueError: For an unknown format or an invalid shape, type or order of axes.
        ImportError: If the package of the format is not installed.

    An image that cannot be read raises `ImageReadError` in a rewritten step, and TensorFlow's `UnknownError` with the
    same message otherwise.
    """

    def __init__(
        self,
        source: str | Callable[[str], Source],
        shape: Sequence[int | None],
        dtype: str = "uint8",
        *,
        paths: Sequence[str] | None = None,
        array: str | None = None,
        level: int = 0,
        axes: Sequence[int] | None = None,
        view: RandomView | None = None,
        fill_missing_chunks: bool = False,
        name: str | None = None,
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"`dtype` must be one of {DTYPES}. Received: dtype={dtype!r}.")
        # Keras would convert indices in floating point to the type of the images, 299.0 to 43, before they are checked.
        super().__init__(name=name, dtype=dtype, trainable=False, autocast=False)
        self.supports_jit = False
        check_format("source", source, FORMATS)
        self.image_shape = _image_shape(shape)
        if axes is not None and (len(axes) != len(self.image_shape) or len({*axes}) != len(axes) or min(axes) < 0):
            raise ValueError(
                f"`axes` must name a different dimension of the file for each dimension of the image. Received: "
                f"axes={axes!r} and shape={shape!r}."
            )
        if isinstance(paths, str) or (paths is not None and not len(paths)):
            raise ValueError(f"`paths` must be a sequence of at least one path. Received: paths={paths!r}.")
        self.source = source
        self.paths = None if paths is None else [str(path) for path in paths]
        self._options: dict[str, Any] = {"array": array, "level": level, "fill_missing_chunks": fill_missing_chunks}
        self._axes = None if axes is None else tuple(axes)
        numbers = np.dtype(tf.as_dtype(dtype).as_numpy_dtype)
        spec = ImageSpec(self._open, self._fingerprint, self.image_shape, numbers, self._axes, view is not None)
        self.view = view
        if view is not None and None in self.image_shape:
            raise ValueError(f"A reader with a `view` needs all sizes. Received: shape={shape!r}.")
        self.output_image_shape = self.image_shape if view is None else view.shape(spec.all_sizes)
        self.view_count = None
        if view is not None:
            self.view_count = self.add_weight(
                shape=(), dtype="int64", initializer="zeros", trainable=False, name="view_count"
            )
            view.counts.append(self.view_count)
        self._images = OpenImages(spec)
        self._reads = RegionReads(self._images, self.paths, view)
        # TensorFlow refers to the function of an op weakly.
        self._read = self._reads.read
        self._shape_in_files = functools.partial(_as_array, self._reads)

    def _open(self, path: str) -> Source:
        if callable(self.source):
            return self.source(path)
        return OPENERS[self.source](path, **self._options)

    def _fingerprint(self, path: str) -> Fingerprint:
        if callable(self.source):
            return ()  # The user's function decides what a path is.
        if REMOTE in path:
            raise ValueError("remote files are not read. Copy it to a local disk")
        return fingerprint(path, self._options["array"], self._options["level"])

    def call(self, keys: Any, training: bool = False) -> Any:
        """Return the images of a batch.

        Args:
            keys: Paths or indices, of shape `(batch,)`.
            training: Whether views are drawn.
        """
        self._check_keys(keys)
        if self.paths is not None:
            keys = tf.cast(keys, tf.int64)
        if self.view is not None:
            text = keys if self.paths is None else tf.as_string(keys)
            keys = self.view.keys(text, self._images.spec.all_sizes, self.view_count if training else None)
        shape, read, unknown_sizes = self.output_image_shape, self._read, unknown_sizes_of_traced_step()
        if None in shape and unknown_sizes is not None:
            shape = unknown_sizes.shape(self, keys)
            read = self._reads.of_shape(shape).read
        return read_images(read, keys, shape, self.compute_dtype, self._shape_in_files)

    def _check_keys(self, keys: Any) -> None:
        """Refuse keys that are no vector of paths or indices."""
        dtype, is_text = keras.backend.standardize_dtype(keys.dtype), self.paths is None
        if not (dtype == "string" if is_text else keras.backend.is_int_dtype(dtype)):
            expected = "strings with paths" if is_text else "integers, indices of `paths`"
            raise ValueError(f"The input of `{self.name}` must be {expected}. Received: dtype={dtype!r}.")
        if tf.TensorShape(keys.shape).rank != 1:
            raise ValueError(f"The input of `{self.name}` must have the shape (batch,). Received: {keys.shape}.")

    def shape_in_files(self, keys: Any) -> tuple[int, ...]:
        """Return the shape of the images of a batch from the headers of their files.

        Args:
            keys: Paths or indices, of shape `(batch,)`, as an array or an eager tensor.

        Raises:
            ImageReadError: If an image cannot be opened, or if the images have different shapes.
            ValueError: If the keys are no vector.
        """
        keys = np.asarray(keys)
        if keys.ndim != 1:
            raise ValueError(f"`keys` must have the shape (batch,). Received: keys={keys.tolist()!r}.")
        return self._reads.shape(keys.tolist())

    def compute_output_spec(self, keys: Any, training: bool = False) -> keras.KerasTensor:
        """Return shape and type of a batch of images.

        Args:
            keys: Symbolic paths or indices.
            training: Not used.
        """
        del training
        self._check_keys(keys)
        return keras.KerasTensor((keys.shape[0], *self.output_image_shape), self.compute_dtype)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments.

        Raises:
            ValueError: If `source` is a function, which cannot be saved.
        """
        if callable(self.source):
            raise ValueError(f"`{self.name}` cannot be saved: its `source` is a function. Expected a format.")
        arguments = {"source": self.source, "shape": self.image_shape, "dtype": self.compute_dtype, "name": self.name}
        view = keras.saving.serialize_keras_object(self.view)
        return {**arguments, "paths": self.paths, "axes": self._axes, "view": view, **self._options}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ImageReader:
        """Return a reader with the arguments of `get_config`.

        Args:
            config: The arguments.
        """
        return cls(**{**config, "view": keras.saving.deserialize_keras_object(config.get("view"))})

    def close(self) -> None:
        """Close all files, which stay open for the next read otherwise."""
        self._reads.close()


def _image_shape(shape: Any) -> tuple[int | None, ...]:
    """Return the argument `shape` of a reader as a tuple of at least two sizes."""
    try:
        sizes = tuple(None if size is None else operator.index(size) for size in shape)
    except TypeError:
        sizes = ()
    if len(sizes) < 2 or any(size is not None and size < 1 for size in sizes):
        raise ValueError(
            f"`shape` must have at least two sizes, each a positive integer or None. Received: shape={shape!r}."
        )
    return sizes


def _as_array(reads: RegionReads, keys: np.ndarray) -> np.ndarray:
    """Return the shape of the images of a batch as an array."""
    return np.array(reads.shape(keys.tolist()), np.int64)
