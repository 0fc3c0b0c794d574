"""Reads regions of images from files, one ahead of the region that a step uses."""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import tensorflow as tf

from tflms_sft._sources.open_images import OpenImages
from tflms_sft._sources.random_view import RandomView, parse_key
from tflms_sft._sources.source import ImageReadError, Region

__all__: list[str] = []

MAX_NAMED = 3
"""Images that an error names."""

MAX_READS_AHEAD = 4
"""Regions that are read ahead for several inputs or devices."""


_errors: collections.deque[OSError] = collections.deque(maxlen=1)
"""The latest error of a read or a write."""


def record_error(error: OSError) -> OSError:
    """Note an error of a read or a write, which TensorFlow reports as an error of its own, and return it."""
    _errors.append(error)
    return error


@contextlib.contextmanager
def read_errors() -> Iterator[None]:
    """Raise, instead of an error of TensorFlow, the one of the read or write that caused it."""
    _errors.clear()
    try:
        yield
    except tf.errors.OpError:
        if not _errors:
            raise
        error = _errors.pop()
        raise error from error.__cause__


def _in_thread(read: Callable[[], np.ndarray]) -> Future[np.ndarray]:
    """Read in a daemon thread: a pool of threads would keep Python from exiting while a read hangs."""
    values: Future[np.ndarray] = Future()

    def run() -> None:
        try:
            values.set_result(read())
        except BaseException as error:
            values.set_exception(error)

    threading.Thread(target=run, name="tflms-sft read ahead", daemon=True).start()
    return values


class RegionReads:
    """Reads regions of batches of images, for `rewriters.ir.region_reads.read_images`.

    While a region is used, a thread reads the next one of the same images.

    Args:
        images: The images, of which some are open.
        paths: Files by index; `None` if the keys are paths.
        view: Views of the images, which the keys name; `None` for the images themselves.
        planned_shape: Shape of all images if a step is planned for it; `None` for any shape.
    """

    def __init__(
        self,
        images: OpenImages,
        paths: Sequence[str] | None,
        view: RandomView | None = None,
        planned_shape: tuple[int, ...] | None = None,
    ) -> None:
        self._images = images
        self._paths = paths
        self._view = view
        self._planned_shape = planned_shape
        self._lock = threading.Lock()
        self.ahead: dict[tuple[Any, ...], tuple[list[int], Future[np.ndarray]]] = {}
        self._of_shapes: dict[tuple[int, ...], RegionReads] = {}
        # TensorFlow refers to the function of an op weakly.
        self.read = functools.partial(self)

    def __call__(
        self, keys: np.ndarray, begin: np.ndarray, size: np.ndarray, next_begin: np.ndarray, next_size: np.ndarray
    ) -> np.ndarray:
        """Return a region, and begin to read the next one.

        Args:
            keys: Path or index of each image.
            begin: First position along each dimension, the batch first.
            size: Size along each dimension.
            next_begin: Begin of the next region.
            next_size: Its size, with a 0 if there is none.

        Raises:
            ImageReadError: If the region cannot be read.
        """
        try:
            images = tuple(keys.tolist())
            values = self._take(images, begin, size)
            if np.all(next_size):
                begin, size = next_begin.copy(), next_size.copy()
                with self._lock:
                    self.ahead[images] = [*begin, *size], _in_thread(lambda: self._read(images, begin, size))
            return values
        except ImageReadError as error:
            record_error(error)
            raise

    def of_shape(self, shape: tuple[int, ...]) -> RegionReads:
        """Return reads for a step that is planned for one shape of images."""
        return self._of_shapes.setdefault(shape, RegionReads(self._images, self._paths, self._view, shape))

    def shape(self, keys: Sequence[Any]) -> tuple[int, ...]:
        """Return the shape of the images of a batch.

        Raises:
            ImageReadError: If an image cannot be opened, or if the images have different shapes.
        """
        try:
            paths = [self._path(key.decode() if isinstance(key, bytes) else key) for key in keys]
            shapes = {path: self._image_shape(path) for path in paths}
            if not shapes:
                raise ImageReadError("A batch must name at least one image. Received: no path or index.")
            if len({*shapes.values()}) != 1:
                received = " and ".join(f"{shape} of `{path}`" for path, shape in [*shapes.items()][:MAX_NAMED])
                raise ImageReadError(
                    f"The images of a batch must have one shape. Received: {received}. Use batches of one image."
                )
            return next(iter(shapes.values()))
        except ImageReadError as error:
            record_error(error)
            raise

    def close(self) -> None:
        """Close all files."""
        self._images.close()

    def _take(self, images: tuple[Any, ...], begin: np.ndarray, size: np.ndarray) -> np.ndarray:
        """Return a region, which may have been read ahead."""
        with self._lock:
            place, values = self.ahead.pop(images, (None, None))
            while len(self.ahead) >= MAX_READS_AHEAD:  # Those of steps that ended early.
                del self.ahead[next(iter(self.ahead))]
        if values is not None and place == [*begin, *size]:
            return values.result()
        return self._read(images, begin, size)

    def _read(self, images: tuple[Any, ...], begin: np.ndarray, size: np.ndarray) -> np.ndarray:
        (first, *corner), (count, *sizes) = begin.tolist(), size.tolist()
        region = tuple(slice(start, start + length) for start, length in zip(corner, sizes, strict=True))
        keys = images[first : first + count]
        if len(keys) == 1:
            return self._read_view(keys[0], region)[None]
        result = np.empty([count, *sizes], self._images.spec.dtype)
        for number, key in enumerate(keys):
            result[number] = self._read_view(key, region)
        return result

    def _read_view(self, key: Any, region: Region) -> np.ndarray:
        """Return a region of an image, or of its view."""
        key = key.decode() if isinstance(key, bytes) else key
        if self._view is None:
            return self._read_image(self._path(key), region)
        key, view = parse_key(key, self._view, self._view.shape(self._images.spec.all_sizes))
        return view.shown(self._read_image(self._path(key), view.source_region(region)))

    def _path(self, key: str | int) -> str:
        if self._paths is None:
            return str(key)
        if not 0 <= int(key) < len(self._paths):
            raise ImageReadError(f"There is no image {key}. Expected: an index from 0 to {len(self._paths) - 1}.")
        return self._paths[int(key)]

    def _read_image(self, path: str, region: Region) -> np.ndarray:
        place = ", ".join(f"{part.start}:{part.stop}" for part in region)
        with self._errors(path, f"read the region [{place}] of"):
            return self._images.opened(path, self._planned_shape).read(region)

    def _image_shape(self, path: str) -> tuple[int, ...]:
        with self._errors(path, "open"):
            return self._images.opened(path).shape

    @contextlib.contextmanager
    def _errors(self, path: str, action: str) -> Iterator[None]:
        """Raise errors of an image as `ImageReadError`."""
        try:
            yield
        except Exception as error:
            self._images.forget(path)  # A repaired file is opened again.
            reason = str(error).rstrip(".") if isinstance(error, (OSError, ValueError)) and str(error) else repr(error)
            raise ImageReadError(f"Cannot {action} the image `{path}`: {reason}.") from error
