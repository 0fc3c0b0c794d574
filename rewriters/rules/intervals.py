"""Half-open intervals along one axis, for all tiles of that axis.

`Interval.lo[t], Interval.hi[t]` are the rows of tile `t`. Height and width are independent, so a region is one
`Interval` per axis, and planning a grid of 64 x 64 tiles handles vectors of 64, not 4,096 rectangles.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

__all__: list[str] = []

INT64 = np.dtype(np.int64)

MAX_CACHED_TILES = 64
"""Tiles up to which an interval is cached: enough for searches, without the finest grids, which take kilobytes each."""


@dataclasses.dataclass(frozen=True, eq=False)
class Interval:
    """Rows `[lo[t], hi[t])` of every tile `t`; empty where `hi <= lo`."""

    lo: np.ndarray
    hi: np.ndarray

    # Cached: a search constructs equal intervals 100,000 times. The arrays are never written to.
    @functools.cached_property
    def size(self) -> np.ndarray:
        """Rows of each tile."""
        return np.maximum(self.hi - self.lo, 0)

    @functools.cached_property
    def key(self) -> tuple[bytes, bytes]:
        """Return a key that is equal for equal intervals."""
        return self.lo.tobytes(), self.hi.tobytes()

    def same(self, other: Interval) -> bool:
        """Return whether both intervals hold the same rows for every tile."""
        return self is other or self.key == other.key

    def hull(self, other: Interval) -> Interval:
        """Return the smallest interval that holds both; an empty one adds nothing."""
        if other is self:
            return self
        empty_self, empty_other = self.size == 0, other.size == 0
        lo = np.where(empty_self, other.lo, np.where(empty_other, self.lo, np.minimum(self.lo, other.lo)))
        hi = np.where(empty_self, other.hi, np.where(empty_other, self.hi, np.maximum(self.hi, other.hi)))
        return Interval(lo, hi)

    def clip(self, extent: int) -> Interval:
        """Return the part inside `[0, extent)`."""
        # `np.clip` is several times slower for arrays of this size.
        lo = np.minimum(np.maximum(self.lo, 0), extent)
        return Interval(lo, np.maximum(np.minimum(self.hi, extent), lo))

    def shift(self, offset: int) -> Interval:
        """Return the interval moved by `offset` rows."""
        return Interval(self.lo + offset, self.hi + offset)

    def times(self, factor: int) -> Interval:
        """Return the interval scaled by `factor`: the rows of blocks of this size."""
        return Interval(self.lo * factor, self.hi * factor)

    def blocks(self, size: int) -> Interval:
        """Return the blocks of `size` rows that cover the interval."""
        return Interval(self.lo // size, -((-self.hi) // size))

    def nonempty(self, extent: int) -> Interval:
        """Return the interval with one row in `[0, extent)` for each empty tile: kernels need non-empty operands."""
        lo = np.where(self.size == 0, np.minimum(np.maximum(self.lo, 0), extent - 1), self.lo)
        return Interval(lo, np.maximum(self.hi, lo + 1))

    def inside(self, extent: int) -> Interval:
        """Return the part inside `[0, extent)`, at least one row; cached for intervals of few tiles."""
        is_cached = self.lo.size <= MAX_CACHED_TILES and self.lo.dtype == self.hi.dtype == np.int64
        return _inside(*self.key, extent) if is_cached else self.clip(extent).nonempty(extent)

    def covers(self, other: Interval) -> bool:
        """Return whether every non-empty tile of `other` lies inside this one."""
        return bool(np.all((other.size == 0) | ((self.lo <= other.lo) & (self.hi >= other.hi))))


@functools.lru_cache(2**16)
def _inside(lo: bytes, hi: bytes, extent: int) -> Interval:
    rows = Interval(np.frombuffer(lo, np.int64), np.frombuffer(hi, np.int64))
    return rows.clip(extent).nonempty(extent)


@functools.lru_cache(2**12)
def whole(extent: int, tiles: int) -> Interval:
    """Return all `extent` rows for each of `tiles` tiles."""
    return Interval(np.zeros(tiles, np.int64), np.full(tiles, extent, np.int64))


@functools.lru_cache(2**12)
def partition(extent: int, tiles: int) -> Interval:
    """Return `extent` rows split as evenly as possible, larger tiles first.

    With more tiles than rows the last ones are empty.
    """
    base, extra = divmod(extent, tiles)
    sizes = np.array([base + (1 if t < extra else 0) for t in range(tiles)], np.int64)
    hi = np.cumsum(sizes)
    return Interval(hi - sizes, hi)


def hull_of(intervals: Sequence[Interval]) -> Interval:
    """Return the hull of one or more intervals."""
    result = intervals[0]
    for other in intervals[1:]:
        result = result.hull(other)
    return result


@dataclasses.dataclass(frozen=True, eq=False)
class CropPad:
    """Cropping and padding that turn the rows of a tile into the rows that an op needs.

    Attributes:
        begin: First row to keep, counted from the tile's first.
        size: Rows to keep.
        before: Rows of padding before them.
        after: Rows of padding after them.
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
    """Return the cropping and padding from rows `have` to rows `need`; cached for intervals of few tiles."""
    is_cached = have.lo.size <= MAX_CACHED_TILES and {i.dtype for i in (have.lo, have.hi, need.lo, need.hi)} == {INT64}
    return _cached_fit(*have.key, *need.key) if is_cached else _fit(have, need)


@functools.lru_cache(2**12)
def _cached_fit(*keys: bytes) -> CropPad:
    have_lo, have_hi, need_lo, need_hi = (np.frombuffer(key, np.int64) for key in keys)
    return _fit(Interval(have_lo, have_hi), Interval(need_lo, need_hi))


def _fit(have: Interval, need: Interval) -> CropPad:
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
        in_extent: Rows of the side that windows slide over.
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
        """Return the input rows that windows `out` cover, padding included (may leave the image)."""
        lo = out.lo * self.stride - self.pad
        hi = (out.hi - 1) * self.stride - self.pad + self.span
        return Interval(lo, np.where(out.size == 0, lo, hi))

    def windows_overlapping(self, rows: Interval) -> Interval:
        """Return the windows that overlap input `rows`, at least one per tile.

        A tile of rows without a window (stride larger than kernel, or rows past the last window) gets one existing
        window: kernels require non-empty operands, and its result is cropped or zero.
        """
        lo = -((-(rows.lo + self.pad - self.span + 1)) // self.stride)
        hi = (rows.hi - 1 + self.pad) // self.stride + 1
        lo = np.clip(lo, 0, self.out_extent - 1)
        return Interval(lo, np.clip(np.maximum(hi, lo + 1), 1, self.out_extent))
