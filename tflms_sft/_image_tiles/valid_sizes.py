"""Which sizes of images a network takes that does not pad: the smallest of them, and multiples of so many rows more.

The same few numbers are known of a network from two sources, the formulas of a paper and the rules by which this
package cuts tiles. What follows from them is here.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Protocol

__all__: list[str] = []


class _Known(Protocol):
    """What there is to know of the sizes along one axis."""

    @property
    def smallest(self) -> int:
        """Rows of the smallest image of which nothing is left over."""

    @property
    def smallest_result(self) -> int:
        """Rows of the result that it has."""

    @property
    def alignment(self) -> int:
        """Rows by which sizes may differ."""

    @property
    def scale(self) -> Fraction:
        """Rows of the image for each row of the result."""

    def admits(self, rows: int) -> bool: ...

    def check_rows(self, rows: int, argument: str = "rows") -> None: ...


class ImageSizes:
    """Which sizes go, for a class that knows what `_Known` has."""

    def admits(self: _Known, rows: int) -> bool:
        """Whether an image, or a tile, of so many rows leaves nothing over.

        Args:
            rows: Of the image.
        """
        return rows >= self.smallest and (rows - self.smallest) % self.alignment == 0

    def nearest(self: _Known, rows: int) -> tuple[int, ...]:
        """The size itself if it goes; otherwise those next to it that do.

        Args:
            rows: Of an image.
        """
        return _nearest(self, rows)

    def result_rows(self: _Known, rows: int) -> int:
        """Rows of the result of an image, or a tile; without strides N - 2 ε.

        Args:
            rows: Of the image.

        Raises:
            ValueError: If it leaves something over, with the nearest sizes that do not.
        """
        self.check_rows(rows)
        return self.smallest_result + int((rows - self.smallest) / self.scale)

    def check_rows(self: _Known, rows: int, argument: str = "rows") -> None:
        """See that an image, or a tile, of so many rows leaves nothing over.

        Args:
            rows: Of the image.
            argument: What an error calls them.

        Raises:
            ValueError: If it does, with the nearest sizes that do not.
        """
        if not self.admits(rows):
            nearest = " or ".join(map(str, _nearest(self, rows)))
            raise ValueError(
                f"`{argument}` must be {self.smallest} or that and a multiple of {self.alignment}, so that nothing is "
                f"left over. Received: {argument}={rows}. Nearest: {nearest}."
            )


def _nearest(known: _Known, rows: int) -> tuple[int, ...]:
    if rows <= known.smallest:
        return (known.smallest,)
    below = rows - (rows - known.smallest) % known.alignment
    return (rows,) if below == rows else (below, below + known.alignment)
