"""The layer that writes images to files, by tiles if the step is rewritten."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from rewriters.ir.region_reads import write_images
from tflms_sft._sources.formats import check_format
from tflms_sft._sources.region_reads import record_error
from tflms_sft._sources.source import ImageWriteError

__all__ = ["ImageWriter"]

Target = Any
"""An array with `__setitem__`, which receives a slice for each dimension."""

DEFAULT_CHUNK = 512
"""Height and width of the chunks of a zarr array."""


def create_zarr(path: str, shape: tuple[int, ...], dtype: np.dtype) -> Target:
    """Create a zarr array."""
    import zarr

    chunks = tuple(min(size, DEFAULT_CHUNK) for size in shape)
    return zarr.create_array(path, shape=shape, chunks=chunks, dtype=dtype, config={"write_empty_chunks": True})


def _is_zarr_array(folder: Path) -> bool:
    """Return whether a folder is a zarr array; a group of arrays is none, although it also has a `zarr.json`."""
    try:
        return (folder / ".zarray").exists() or json.loads((folder / "zarr.json").read_bytes())["node_type"] == "array"
    except (OSError, ValueError, TypeError, KeyError):
        return False


def create_numpy(path: str, shape: tuple[int, ...], dtype: np.dtype) -> Target:
    """Create an `.npy` file."""
    return np.lib.format.open_memmap(path, "w+", dtype, shape)


CREATORS: dict[str, Callable[[str, tuple[int, ...], np.dtype], Target]] = {"zarr": create_zarr, "numpy": create_numpy}
"""Functions that create a file, by format. Arguments: path, shape and type."""


@dataclasses.dataclass
class _OpenTarget:
    """A file that is written, and the number of its values that are missing."""

    array: Target
    missing: int


class RegionWrites:
    """Writes regions of batches of images, for `rewriters.ir.region_reads.write_images`.

    A file is created with the first region of its image, and closed with the last. Without a shape of the images, each
    is written whole and may have any shape.
    """

    def __init__(
        self, create: Callable[[str, tuple[int, ...], np.dtype], Target], shape: tuple[int, ...] | None, overwrite: bool
    ) -> None:
        self._create = create
        self._shape = shape
        self._overwrite = overwrite
        self._open: dict[str, _OpenTarget] = {}
        self._lock = threading.Lock()

    def __call__(self, values: np.ndarray, keys: np.ndarray, begin: np.ndarray) -> np.ndarray:
        """Write a region of each image; return the number of values of each.

        Args:
            values: The regions, with the batch as the first dimension.
            keys: Paths of the files of the full batch.
            begin: First position along each dimension, the batch first.

        Raises:
            ImageWriteError: If a region cannot be written.
        """
        first, *corner = begin.tolist()
        region = tuple(slice(start, start + size) for start, size in zip(corner, values.shape[1:], strict=True))
        paths = [key.decode() for key in keys.tolist()]
        if len({*paths}) != len(paths):
            raise record_error(ImageWriteError(f"Several images of a batch have one path. Received: {paths}."))
        for path, image in zip(paths[first : first + len(values)], values, strict=True):
            self._write(path, region, image)
        return np.full(len(values), math.prod(values.shape[1:]), np.int64)

    def _write(self, path: str, region: tuple[slice, ...], image: np.ndarray) -> None:
        try:
            with self._lock:
                if all(part.start == 0 for part in region):  # Also after a step that ended early.
                    shape = image.shape if self._shape is None else self._shape
                    self._open[path] = _OpenTarget(self._created(path, shape, image.dtype), math.prod(shape))
                target = self._open[path]
            target.array[region] = image
            target.missing -= image.size
            if not target.missing:
                with self._lock:
                    del self._open[path]
        except Exception as error:
            place = ", ".join(f"{part.start}:{part.stop}" for part in region)
            reason = str(error) or type(error).__name__
            problem = f"Cannot write the region [{place}] of the image `{path}`: {reason.rstrip('.')}."
            raise record_error(ImageWriteError(problem)) from error

    def _created(self, path: str, shape: tuple[int, ...], dtype: np.dtype) -> Target:
        if os.path.lexists(path):
            if not self._overwrite and path not in self._open:
                raise FileExistsError("it exists. Remove it, or pass `overwrite=True`")
            if not os.path.isdir(path):
                os.remove(path)
            elif _is_zarr_array(Path(path)):
                shutil.rmtree(path)
            else:
                raise FileExistsError("it is a folder, but no zarr array. Write to another path, or remove it")
        return self._create(path, shape, dtype)


@keras.saving.register_keras_serializable("tflms_sft")
class ImageWriter(keras.layers.Layer):
    """A Keras layer that writes images to files, by tiles under a budget.

    `predict` returns whole results. A model that ends in this layer writes them instead, each tile when it is computed,
    and returns the number of values written for each image:

        results = keras.Input((), dtype="string")
        writer = tflms_sft.ImageWriter("zarr")
        predictor = keras.Model([paths, results], writer(model(paths), results))
        predictor.predict(data, callbacks=[tflms_sft.MemoryBudget("4GiB")])

    The model must return these numbers: TensorFlow drops a write whose number nothing uses. Under `SFT`, an image is
    written when all of its tiles are computed, so that the whole result is in memory.

    Args:
        target: Format of the files, `"zarr"` or `"numpy"`. Otherwise a function that creates a file, and returns an
            object with `__setitem__`, which receives a slice for each dimension. Arguments are path, shape and type.
        dtype: Type of the numbers.
        overwrite: Whether to replace files that exist; otherwise they are an error.
        name: Name of the layer.

    Attributes:
        supports_jit: False: XLA compiles no Python calls.

    Raises:
        ValueError: For an unknown format.
        ImportError: If the package of the format is not installed.
    """

    def __init__(
        self,
        target: str | Callable[[str, tuple[int, ...], np.dtype], Target],
        dtype: str = "float32",
        *,
        overwrite: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name, dtype=dtype, trainable=False)
        self.supports_jit = False
        check_format("target", target, CREATORS)
        self.target = target
        self.overwrite = overwrite
        self._writes: dict[tuple[int, ...] | None, Any] = {}

    def call(self, images: Any, paths: Any) -> Any:
        """Write the images of a batch, and return the number of values written for each.

        Args:
            images: Images, with the batch first. Those of unknown size are written whole.
            paths: Paths of their files, of shape `(batch,)`.
        """
        create = self.target if callable(self.target) else CREATORS[self.target]
        shape = None if None in images.shape[1:] else tuple(images.shape[1:])
        if shape not in self._writes:  # TensorFlow refers to the function of an op weakly.
            self._writes[shape] = functools.partial(RegionWrites(create, shape, self.overwrite))
        return write_images(self._writes[shape], tf.cast(images, self.compute_dtype), tf.reshape(paths, [-1]))

    def compute_output_spec(self, images: Any, paths: Any) -> keras.KerasTensor:
        """Return shape and type of the numbers.

        Args:
            images: Symbolic images.
            paths: Symbolic paths.
        """
        return keras.KerasTensor((images.shape[0] or paths.shape[0],), "int64")

    def get_config(self) -> dict[str, Any]:
        """Return the arguments.

        Raises:
            ValueError: If `target` is a function, which cannot be saved.
        """
        if callable(self.target):
            raise ValueError(f"`{self.name}` cannot be saved: its `target` is a function. Expected a format.")
        return {"target": self.target, "dtype": self.compute_dtype, "overwrite": self.overwrite, "name": self.name}
