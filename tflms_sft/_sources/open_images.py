"""Images in files that stay open between reads."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import threading
from collections.abc import Callable

import numpy as np

from tflms_sft._sources.formats import Fingerprint
from tflms_sft._sources.source import Region, Source

__all__: list[str] = []

MAX_OPEN_IMAGES = 16
"""Images that stay open, those used last."""


@dataclasses.dataclass(frozen=True)
class ImageSpec:
    """Images that a reader expects.

    Attributes:
        open: Opens a file.
        fingerprint: Returns the state of a file, which differs after a change.
        shape: Shape of an image; `None` for sizes that differ.
        dtype: Type of its numbers.
        axes: Dimension of the file for each dimension of the image; `None` for equal dimensions.
        has_view: Whether views of the images are drawn, for which all sizes must be known.
    """

    open: Callable[[str], Source]
    fingerprint: Callable[[str], Fingerprint]
    shape: tuple[int | None, ...]
    dtype: np.dtype
    axes: tuple[int, ...] | None = None
    has_view: bool = False

    @property
    def all_sizes(self) -> tuple[int, ...]:
        """Shape of images of which all sizes are known."""
        assert None not in self.shape
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
            raise ValueError(f"it has the shape {source.shape}, expected {self.shape}. {self._remedy(source, shape)}")
        return axes

    def _remedy(self, source: Source, shape: tuple[int, ...]) -> str:
        """Return what to do if a file has another shape; `shape` has its sizes in the order of the image."""
        if self.axes is None and any(map(self._fits, itertools.permutations(source.shape))):
            return "Pass the order of its dimensions as `axes`"
        if len(shape) != len(self.shape) or len(shape) != len(source.shape):
            return "Pass a `shape` with a size for each dimension of the file, or the dimensions to read as `axes`"
        if self.has_view:
            return "A reader with a `view` needs files of one shape"
        return "Pass the sizes of the file as `shape`, with None for those that differ from file to file"

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


class OpenImages:
    """Images of one reader, of which the latest stay open."""

    def __init__(self, spec: ImageSpec) -> None:
        self.spec = spec
        self._lock = threading.Lock()
        self._images: collections.OrderedDict[str, OpenImage] = collections.OrderedDict()

    def opened(self, path: str, shape: tuple[int, ...] | None = None) -> OpenImage:
        """Return an image that is open, opened now if necessary.

        Args:
            path: Its file.
            shape: Shape that a step is planned for; `None` for any shape that the reader allows.

        Raises:
            OSError: If the file cannot be opened, or if it has changed since it was opened.
            ValueError: If it has another shape or type.
        """
        state = self.spec.fingerprint(path)
        with self._lock:
            image = self._images.get(path)
            if image is None:
                source = self.spec.open(path)
                image = self._images[path] = OpenImage(source, self.spec.check(source), state)
                if len(self._images) > MAX_OPEN_IMAGES:
                    self._images.popitem(last=False)
            self._images.move_to_end(path)
        if image.fingerprint != state:
            raise OSError(
                "the file has changed since it was opened. Call `close` of the reader before you replace files"
            )
        if shape not in (None, image.shape):
            raise ValueError(
                f"it has the shape {image.shape}, but the step is planned for {shape}. Call `tflms_sft.rewrite` once "
                "for each shape of images"
            )
        return image

    def forget(self, path: str) -> None:
        """Close an image."""
        with self._lock:
            self._images.pop(path, None)

    def close(self) -> None:
        """Close all images."""
        with self._lock:
            self._images.clear()
