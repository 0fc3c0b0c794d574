"""Reads regions of images from files, one ahead of the region that a step uses."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tflms_sft._sources.formats import Fingerprint
from tflms_sft._sources.random_view import RandomView, parse_key
from tflms_sft._sources.source import ImageReadError, Region, Source

__all__: list[str] = []

MAX_OPEN_IMAGES = 16
"""Images that stay open, those used last."""

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
    """Raise the error of a read or a write instead of TensorFlow's."""
    _errors.clear()
    try:
        yield
    except tf.errors.OpError:
        if not _errors:
            raise
        error = _errors.pop()
        raise error from error.__cause__


@dataclasses.dataclass(frozen=True)
class ImageSpec:
    """Images that a reader expects.

    Attributes:
        open: Opens a file.
        fingerprint: Returns the state of a file, which differs after a change.
        shape: Shape of an image; `None` for sizes that differ.
        dtype: Type of its numbers.
        axes: Dimension of the file for each dimension of the image; `None` for equal dimensions.
        remedy: What to do if the shape is another one.
    """

    open: Callable[[str], Source]
    fingerprint: Callable[[str], Fingerprint]
    shape: tuple[int | None, ...]
    dtype: np.dtype
    axes: tuple[int, ...] | None = None
    remedy: str = "Pass None for sizes that differ"

    @property
    def known_shape(self) -> tuple[int, ...]:
        """The sizes that do not differ."""
        return tuple(size for size in self.shape if size is not None)

    def check(self, source: Source) -> tuple[int | None, ...]:
        """Return the dimension of a file for each dimension of the image; `None` for channels that the file lacks.

        Raises:
            ValueError: If the file has another shape or type.
        """
        dtype = source.dtype.newbyteorder("=")
        if dtype != self.dtype:
            raise ValueError(f"it has numbers of type {dtype}, expected {self.dtype}. Pass dtype={str(dtype)!r}")
        rank = len(source.shape)
        axes: tuple[int | None, ...] = self.axes or tuple(range(rank))
        if self.axes is None and self._fits((*source.shape, 1)):
            axes = (*axes, None)
        shape = tuple(1 if axis is None else source.shape[axis] for axis in axes if axis is None or axis < rank)
        ignored = [size for axis, size in enumerate(source.shape) if axis not in axes]
        if not self._fits(shape) or any(size != 1 for size in ignored):
            permuted = self.axes is None and any(map(self._fits, itertools.permutations(source.shape)))
            remedy = "Pass the order of its dimensions as `axes`" if permuted else self.remedy
            raise ValueError(f"it has the shape {source.shape}, expected {self.shape}. {remedy}")
        return axes

    def _fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether an image may have a shape."""
        pairs = zip(shape, self.shape, strict=False)
        return len(shape) == len(self.shape) and all(expected in (None, size) for size, expected in pairs)


@dataclasses.dataclass(frozen=True)
class OpenImage:
    """An image that is open.

    Attributes:
        source: Its file.
        axes: Dimension of the file for each dimension of the image.
        fingerprint: State of the file when it was opened.
    """

    source: Source
    axes: tuple[int | None, ...]
    fingerprint: Fingerprint

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the image."""
        return tuple(1 if axis is None else self.source.shape[axis] for axis in self.axes)

    def read(self, region: Region) -> np.ndarray:
        """Return a region."""
        places = {axis: part for axis, part in zip(self.axes, region, strict=True) if axis is not None}
        rank = len(self.source.shape)
        parts = tuple(places.get(axis, slice(0, 1)) for axis in range(rank))
        values, expected = np.asarray(self.source[parts]), tuple(part.stop - part.start for part in parts)
        if values.shape != expected:
            raise ValueError(f"reading it gave numbers of shape {values.shape}, expected {expected}. Is it truncated?")
        if values.dtype.newbyteorder("=") != self.source.dtype.newbyteorder("="):
            raise ValueError(f"its region has numbers of type {values.dtype}, expected {self.source.dtype}")
        values = values.astype(self.source.dtype.newbyteorder("="), copy=False)
        order = [axis for axis in self.axes if axis is not None]
        order += [axis for axis in range(rank) if axis not in places]
        return values.transpose(order).reshape([part.stop - part.start for part in region])


class _ReadAhead:
    """A region that a thread reads.

    Attributes:
        begin: First position along each dimension.
        size: Size along each dimension.
    """

    def __init__(self, read: Callable[[], np.ndarray], begin: np.ndarray, size: np.ndarray) -> None:
        self.begin, self.size = tuple(begin), tuple(size)
        self._read = read
        self._values: np.ndarray | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="tflms-sft read ahead", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._values = self._read()
        except BaseException as error:  # Raised again by the read that needs the region.
            self._error = error

    def result(self) -> np.ndarray:
        """Return the region when it has been read.

        Raises:
            ImageReadError: If it cannot be read.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._values is not None
        return self._values


class RegionReads:
    """Reads regions of batches of images, for `rewriters.ir.region_reads.read_images`.

    While a region is used, a thread reads the next one of the same images.

    Args:
        spec: Images that are expected.
        paths: Files by index; `None` if the keys are paths.
        view: Views of the images, which the keys name; `None` for the images themselves.
    """

    def __init__(self, spec: ImageSpec, paths: Sequence[str] | None, view: RandomView | None = None) -> None:
        self._spec = spec
        self._paths = paths
        self._view = view
        self._lock = threading.Lock()
        self._images: collections.OrderedDict[str, OpenImage] = collections.OrderedDict()
        self._ahead: dict[tuple[Any, ...], _ReadAhead] = {}
        self._planned: dict[tuple[int, ...], RegionReads] = {}
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
                    self._ahead[images] = _ReadAhead(lambda: self._read(images, begin, size), begin, size)
            return values
        except ImageReadError as error:
            record_error(error)
            raise

    def of_shape(self, shape: tuple[int, ...]) -> RegionReads:
        """Return reads for a step that is planned for one shape of images."""
        if shape not in self._planned:
            remedy = "The step is planned for one shape: rewrite it for each one"
            self._planned[shape] = RegionReads(dataclasses.replace(self._spec, shape=shape, remedy=remedy), self._paths)
        return self._planned[shape]

    def shape(self, keys: Sequence[Any]) -> tuple[int, ...]:
        """Return the shape of the images of a batch.

        Raises:
            ImageReadError: If an image cannot be opened, or if the images have different shapes.
        """
        try:
            paths = [self._path(key.decode() if isinstance(key, bytes) else key) for key in keys]
            shapes = {path: self._image_shape(path) for path in paths}
            first, *others = shapes
            for path in others:
                if shapes[path] != shapes[first]:
                    raise ImageReadError(
                        f"The images of a batch must have one shape. Received: {shapes[first]} of `{first}` and "
                        f"{shapes[path]} of `{path}`. Use batches of one image."
                    )
            return shapes[first]
        except ImageReadError as error:
            record_error(error)
            raise

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            self._images.clear()
        for reads in self._planned.values():
            reads.close()

    def _take(self, images: tuple[Any, ...], begin: np.ndarray, size: np.ndarray) -> np.ndarray:
        """Return a region, which may have been read ahead."""
        with self._lock:
            ahead = self._ahead.pop(images, None)
            while len(self._ahead) >= MAX_READS_AHEAD:  # Those of steps that ended early.
                del self._ahead[next(iter(self._ahead))]
        if ahead is not None and (ahead.begin, ahead.size) == (tuple(begin), tuple(size)):
            return ahead.result()
        return self._read(images, begin, size)

    def _read(self, images: tuple[Any, ...], begin: np.ndarray, size: np.ndarray) -> np.ndarray:
        (first, *corner), (count, *sizes) = begin.tolist(), size.tolist()
        region = tuple(slice(start, start + length) for start, length in zip(corner, sizes, strict=True))
        keys = images[first : first + count]
        if len(keys) == 1:
            return self._read_view(keys[0], region)[None]
        result = np.empty([count, *sizes], self._spec.dtype)
        for number, key in enumerate(keys):
            result[number] = self._read_view(key, region)
        return result

    def _read_view(self, key: Any, region: Region) -> np.ndarray:
        """Return a region of an image, or of its view."""
        key = key.decode() if isinstance(key, bytes) else key
        if self._view is None:
            return self._read_image(self._path(key), region)
        key, view = parse_key(key, self._view, self._view.shape(self._spec.known_shape))
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
            return self._opened(path).read(region)

    def _image_shape(self, path: str) -> tuple[int, ...]:
        with self._errors(path, "open"):
            return self._opened(path).shape

    @contextlib.contextmanager
    def _errors(self, path: str, action: str) -> Iterator[None]:
        """Raise errors of an image as `ImageReadError`."""
        try:
            yield
        except Exception as error:
            with self._lock:
                self._images.pop(path, None)  # A repaired file is opened again.
            reason = str(error).rstrip(".") if isinstance(error, (OSError, ValueError)) and str(error) else repr(error)
            raise ImageReadError(f"Cannot {action} the image `{path}`: {reason}.") from error

    def _opened(self, path: str) -> OpenImage:
        """Return an image that is open, opened now if necessary.

        Raises:
            OSError: If the file has changed since it was opened.
        """
        state = self._spec.fingerprint(path)
        with self._lock:
            image = self._images.get(path)
            if image is None:
                source = self._spec.open(path)
                image = self._images[path] = OpenImage(source, self._spec.check(source), state)
                if len(self._images) > MAX_OPEN_IMAGES:
                    self._images.popitem(last=False)
            self._images.move_to_end(path)
        if image.fingerprint != state:
            raise OSError("the file has changed since it was opened")
        return image
