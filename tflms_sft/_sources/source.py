"""Interface of a file that holds an image, and the error of one that cannot be read."""

from __future__ import annotations

from typing import Protocol

import numpy as np

__all__ = ["ImageReadError", "ImageWriteError"]

Region = tuple[slice, ...]
"""Begin and end along each dimension of an image."""


class ImageReadError(OSError):
    """Raised for an image that cannot be read. The message names file and reason, and the region if one was read.

    After a step that was rewritten in tiles, weights, optimizer slots and statistics are as before the step. But
    assignments in conditions, such as those of a `LossScaleOptimizer`, may have run.
    """


class ImageWriteError(OSError):
    """Raised for an image that cannot be written. The message names the file and the region."""


class Source(Protocol):
    """An image in a file that is open for reading.

    Attributes:
        shape: Shape of the image.
        dtype: Type of its numbers.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def __getitem__(self, region: Region) -> np.ndarray:
        """Return the numbers of a region, which lies inside of the image."""
