"""Valid image sizes of a network without padding: a smallest size, plus multiples of an alignment.

Two sources yield the parameters of this lattice: the formulas of a paper (`Architecture`), and the
rules by which this package cuts tiles (`AxisTiling`).
"""

from __future__ import annotations

from typing import Any

__all__: list[str] = []


class ImageSizes:
    """Mixin of methods for valid sizes along one axis. Subclasses have the attributes.

    Attributes:
        smallest: Rows of the smallest valid image.
        smallest_result: Rows of the result of the smallest image.
        alignment: Difference between adjacent valid sizes, in rows.
        scale: Rows of the image per row of the result.
    """

    def admits(self: Any, rows: int) -> bool:
        """Return whether the size of an image or tile is valid, so that no pooling or stride leaves rows over.

        Args:
            rows: Rows of the image or tile.
        """
        return rows >= self.smallest and (rows - self.smallest) % self.alignment == 0

    def nearest(self: Any, rows: int) -> tuple[int, ...]:
        """Return the size itself if it is valid, otherwise the adjacent valid sizes.

        Args:
            rows: Rows of the image or tile.
        """
        if rows <= self.smallest:
            return (self.smallest,)
        below = rows - (rows - self.smallest) % self.alignment
        return (rows,) if below == rows else (below, below + self.alignment)

    def result_rows(self: Any, rows: int) -> int:
        """Return the rows of the result of an image or tile; N - 2 ε without strides.

        Args:
            rows: Rows of the image or tile.

        Raises:
            ValueError: If the size is not valid, with the nearest valid sizes.
        """
        self.check_rows(rows)
        return self.smallest_result + int((rows - self.smallest) / self.scale)

    def check_rows(self: Any, rows: int, argument: str = "rows") -> None:
        """Check that the size of an image or tile is valid.

        Args:
            rows: Rows of the image or tile.
            argument: Name of the argument in the error.

        Raises:
            ValueError: If the size is not valid, with the nearest valid sizes.
        """
        if not self.admits(rows):
            nearest = " or ".join(map(str, self.nearest(rows)))
            raise ValueError(
                f"`{argument}` must be {self.smallest} plus a multiple of {self.alignment}, so that no layer drops "
                f"rows. Received: {argument}={rows}. Nearest: {nearest}."
            )
