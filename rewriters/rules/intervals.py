"""Half-open intervals along one axis, for all tiles of that axis at once.

`Interval.lo[t], Interval.hi[t]` are the rows of tile `t`. Height and width are
independent of each other, so a region is one `Interval` per axis and planning a
grid of 64 x 64 tiles handles vectors of 64, not 4,096 rectangles.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

__all__: list[str] = []

MOST_KEPT = 64
"""Tiles of intervals that are kept: all that searches try, but not the finest ones, of which each takes kilobytes."""


@dataclasses.dataclass(frozen=True, eq=False)
class Interval:
    """`[lo[t], hi[t])` for every tile `t`; empty where `hi <= lo`."""

    lo: np.ndarray
    hi: np.ndarray

    # Kept, as a search asks for the same some hundred thousand times; the arrays are never written to.
    @functools.cached_property
    def size(self) -> np.ndarray:
        """Rows of each tile."""
        return np.maximum(self.hi - self.lo, 0)

    @functools.cached_property
    def key(self) -> tuple[bytes, bytes]:
        """Equal for two that hold the same rows for every tile."""
        return self.lo.tobytes(), self.hi.tobytes()

    def same(self, other: Interval) -> bool:
        """Whether both hold the same rows for every tile."""
        return self is other or self.key == other.key

    def hull(self, other: Interval) -> Interval:
        """Smallest interval that holds both; an empty one adds nothing."""
        if other is self:
            return self
        empty_self, empty_other = self.size == 0, other.size == 0
        lo = np.where(empty_self, other.lo, np.where(empty_other, self.lo, np.minimum(self.lo, other.lo)))
        hi = np.where(empty_self, other.hi, np.where(empty_other, self.hi, np.maximum(self.hi, other.hi)))
        return Interval(lo, hi)

    def clip(self, extent: int) -> Interval:
        """The part inside `[0, extent)`."""
        # Not `np.clip`, which takes several times as long for so few numbers.
        lo = np.minimum(np.maximum(self.lo, 0), extent)
        return Interval(lo, np.maximum(np.minimum(self.hi, extent), lo))

    def shift(self, offset: int) -> Interval:
        """Moved by `offset` rows."""
        return Interval(self.lo + offset, self.hi + offset)

    def times(self, factor: int) -> Interval:
        """The rows of which each of these is `factor`."""
        return Interval(self.lo * factor, self.hi * factor)

    def blocks(self, size: int) -> Interval:
        """The blocks of `size` rows that hold these rows."""
        return Interval(self.lo // size, -((-self.hi) // size))

    def nonempty(self, extent: int) -> Interval:
        """With one row inside `[0, extent)` where a tile is empty: kernels want non-empty operands."""
        lo = np.where(self.size == 0, np.minimum(np.maximum(self.lo, 0), extent - 1), self.lo)
        return Interval(lo, np.maximum(self.hi, lo + 1))

    def inside(self, extent: int) -> Interval:
        """The part inside `[0, extent)`, or one row of it: the same object for the same rows of not too many tiles."""
        if self.lo.size > MOST_KEPT:
            return self.clip(extent).nonempty(extent)
        assert self.lo.itemsize == self.hi.itemsize == np.int64().itemsize
        return _inside(*self.key, extent)

    def covers(self, other: Interval) -> bool:
        """Whether every non-empty tile of `other` lies inside this one."""
        return bool(np.all((other.size == 0) | ((self.lo <= other.lo) & (self.hi >= other.hi))))


@functools.lru_cache(2**16)
def _inside(lo: bytes, hi: bytes, extent: int) -> Interval:
    rows = Interval(np.frombuffer(lo, np.int64), np.frombuffer(hi, np.int64))
    return rows.clip(extent).nonempty(extent)


@functools.lru_cache(2**12)
def whole(extent: int, tiles: int) -> Interval:
    """All `extent` rows for each of `tiles` tiles."""
    return Interval(np.zeros(tiles, np.int64), np.full(tiles, extent, np.int64))


@functools.lru_cache(2**12)
def partition(extent: int, tiles: int) -> Interval:
    """`extent` rows split as evenly as possible, larger tiles first.

    With more tiles than rows the last ones are empty.
    """
    base, extra = divmod(extent, tiles)
    sizes = np.array([base + (1 if t < extra else 0) for t in range(tiles)], np.int64)
    hi = np.cumsum(sizes)
    return Interval(hi - sizes, hi)


def hull_of(intervals: Sequence[Interval]) -> Interval:
    """Hull of one or more intervals."""
    result = intervals[0]
    for other in intervals[1:]:
        result = result.hull(other)
    return result


@dataclasses.dataclass(frozen=True, eq=False)
class CropPad:
    """How the rows that a tile has become the rows that an op needs: cut, then padded.

    Attributes:
        begin: First row to cut out, counted from the first that is there.
        size: Rows to cut out.
        before: Rows of padding before them.
        after: Rows of padding behind them.
        crops: Whether any tile loses a row.
        pads: Whether any tile is padded.
    """

    begin: np.ndarray
    size: np.ndarray
    before: np.ndarray
    after: np.ndarray
    crops: bool
    pads: bool


def fit(have: Interval, need: Interval) -> CropPad:
    """The way from the rows `have` to the rows `need`."""
    lo = np.clip(need.lo, have.lo, have.hi)
    hi = np.maximum(np.clip(need.hi, have.lo, have.hi), lo)
    before = np.where(hi > lo, lo - need.lo, need.size)
    after = need.size - before - (hi - lo)
    crops = not (np.array_equal(lo, have.lo) and np.array_equal(hi, have.hi))
    return CropPad(lo - have.lo, hi - lo, before, after, crops, bool(np.any(before) or np.any(after)))


@dataclasses.dataclass(frozen=True)
class Window:
    """Geometry of a sliding window along one axis.

    Attributes:
        kernel: Window size in taps.
        stride: Rows between windows.
        dilation: Rows between taps.
        pad: Rows of padding before the first input row.
        in_extent: Rows of the side that is slid over.
        out_extent: Number of windows.
    """

    kernel: int
    stride: int
    dilation: int
    pad: int
    in_extent: int
    out_extent: int

    @property
    def span(self) -> int:
        """Rows that one window covers."""
        return (self.kernel - 1) * self.dilation + 1

    def rows_covered(self, out: Interval) -> Interval:
        """Input rows that windows `out` cover, padding included (may leave the image)."""
        lo = out.lo * self.stride - self.pad
        hi = (out.hi - 1) * self.stride - self.pad + self.span
        return Interval(lo, np.where(out.size == 0, lo, hi))

    def windows_overlapping(self, rows: Interval) -> Interval:
        """Windows that meet input `rows`, at least one per tile.

        A tile of rows that no window meets (stride larger than kernel, or rows
        past the last window) gets one existing window all the same: kernels
        want non-empty operands, and what it adds is cropped or zero.
        """
        lo = -((-(rows.lo + self.pad - self.span + 1)) // self.stride)
        hi = (rows.hi - 1 + self.pad) // self.stride + 1
        lo = np.clip(lo, 0, self.out_extent - 1)
        return Interval(lo, np.clip(np.maximum(hi, lo + 1), 1, self.out_extent))
