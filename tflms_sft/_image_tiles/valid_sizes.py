"""Valid image sizes of a network without padding: a smallest size, plus multiples of an alignment.

Two sources yield the parameters of this lattice: the formulas of a paper (`Architecture`), and the
rules by which this package cuts tiles (`AxisTiling`).
"""

from __future__ import annotations

from fractions import Fraction
from typing import Protocol

__all__: list[str] = []


class _SizeLattice(Protocol):
    """Parameters of the valid sizes along one axis."""

    @property
    def smallest(self) -> int:
        """Rows of the smallest valid image."""

    @property
    def smallest_result(self) -> int:
        """Rows of the result of the smallest image."""

    @property
    def alignment(self) -> int:
        """Difference between adjacent valid sizes, in rows."""

    @property
    def scale(self) -> Fraction:
        """Rows of the image per row of the result."""

    def admits(self, rows: int) -> bool: ...

    def check_rows(self, rows: int, argument: str = "rows") -> None: ...


class ImageSizes:
    """Mixin of methods for valid sizes. Subclasses have the attributes of `_SizeLattice`."""

    def admits(self: _SizeLattice, rows: int) -> bool:
        """Return whether the size of an image or tile is valid, so that no pooling or stride leaves rows over.

        Args:
            rows: Rows of the image or tile.
        """
        return rows >= self.smallest and (rows - self.smallest) % self.alignment == 0

    def nearest(self: _SizeLattice, rows: int) -> tuple[int, ...]:
        """Return the size itself if it is valid, otherwise the adjacent valid sizes.

        Args:
            rows: Rows of the image or tile.
        """
        return _nearest(self, rows)

    def result_rows(self: _SizeLattice, rows: int) -> int:
        """Return the rows of the result of an image or tile; N - 2 ε without strides.

        Args:
            rows: Rows of the image or tile.

        Raises:
            ValueError: If the size is not valid, with the nearest valid sizes.
        """
        self.check_rows(rows)
        return self.smallest_result + int((rows - self.smallest) / self.scale)

    def check_rows(self: _SizeLattice, rows: int, argument: str = "rows") -> None:
        """Check that the size of an image or tile is valid.

        Args:
            rows: Rows of the image or tile.
            argument: Name of the argument in the error.

        Raises:
            ValueError: If the size is not valid, with the nearest valid sizes.
        """
        if not self.admits(rows):
            nearest = " or ".join(map(str, _nearest(self, rows)))
            raise ValueError(
                f"`{argument}` must be {self.smallest} plus a multiple of {self.alignment}, so that no layer drops "
                f"rows. Received: {argument}={rows}. Nearest: {nearest}."
            )


def _nearest(lattice: _SizeLattice, rows: int) -> tuple[int, ...]:
    if rows <= lattice.smallest:
        return (lattice.smallest,)
    below = rows - (rows - lattice.smallest) % lattice.alignment
    return (rows,) if below == rows else (below, below + lattice.alignment)
