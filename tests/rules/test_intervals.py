"""Intervals against sets of rows."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rewriters.rules.intervals import Interval, Window, hull_of, partition, whole


def interval(rows: list[tuple[int, int]]) -> Interval:
    """Return an interval from (first row, number of rows) per tile."""
    lo = np.array([first for first, _ in rows], np.int64)
    return Interval(lo, lo + np.array([size for _, size in rows], np.int64))


def rows_of(value: Interval) -> list[set[int]]:
    return [set(range(lo, hi)) for lo, hi in zip(value.lo, value.hi, strict=True)]


tiles = st.lists(st.tuples(st.integers(-9, 20), st.integers(0, 9)), min_size=1, max_size=4)
extents = st.integers(1, 12)
windows = st.builds(
    lambda kernel, stride, dilation, pad, out: Window(
        kernel, stride, dilation, pad, max((out - 1) * stride + (kernel - 1) * dilation + 1 - 2 * pad, 1), out
    ),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 4),
    st.integers(1, 8),
)


def taps(window: Window, number: int) -> set[int]:
    """Return the rows of window `number`, padding included."""
    return {number * window.stride - window.pad + tap * window.dilation for tap in range(window.kernel)}


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 9))
def test_partition_covers_rows_once_larger_tiles_first(extent, count):
    rows = rows_of(partition(extent, count))
    assert [row for tile in rows for row in sorted(tile)] == list(range(extent))
    sizes = [len(tile) for tile in rows]
    assert len(sizes) == count and sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


def test_partition_examples():
    assert partition(10, 3).lo.tolist() == [0, 4, 7] and partition(10, 3).hi.tolist() == [4, 7, 10]
    assert partition(2, 4).size.tolist() == [1, 1, 0, 0]
    assert whole(5, 2).lo.tolist() == [0, 0] and whole(5, 2).hi.tolist() == [5, 5]


@settings(deadline=None)
@given(st.lists(st.tuples(*[st.tuples(st.integers(-5, 9), st.integers(0, 6))] * 3), min_size=1, max_size=4))
def test_hull_is_smallest_cover(rows):
    parts = [interval([tile[part] for tile in rows]) for part in range(3)]
    hull = hull_of(parts)
    for tile, found in enumerate(rows_of(hull)):
        union = set().union(*(rows_of(part)[tile] for part in parts))
        assert found == (set(range(min(union), max(union) + 1)) if union else set())
    assert all(hull.covers(part) for part in parts)


@settings(deadline=None)
@given(tiles, extents)
def test_clip_keeps_rows_inside(rows, extent):
    value = interval(rows)
    clipped = value.clip(extent)
    assert rows_of(clipped) == [tile & set(range(extent)) for tile in rows_of(value)]
    assert np.all(clipped.lo >= 0) and np.all(clipped.hi <= extent) and np.all(clipped.hi >= clipped.lo)


@settings(deadline=None)
@given(tiles, st.integers(-9, 9))
def test_shift_moves_every_row(rows, offset):
    value = interval(rows)
    assert rows_of(value.shift(offset)) == [{row + offset for row in tile} for tile in rows_of(value)]


@settings(deadline=None)
@given(tiles, extents)
def test_nonempty_fills_empty_tiles_only(rows, extent):
    clipped = interval(rows).clip(extent)
    for before, after in zip(rows_of(clipped), rows_of(clipped.nonempty(extent)), strict=True):
        assert after == before or (not before and len(after) == 1 and after <= set(range(extent)))


@settings(deadline=None)
@given(tiles, tiles)
def test_covers_and_same_compare_rows(some, others):
    size = min(len(some), len(others))
    a, b = interval(some[:size]), interval(others[:size])
    assert a.covers(b) == all(y <= x for x, y in zip(rows_of(a), rows_of(b), strict=True))
    assert a.same(a) and a.same(b) == (some[:size] == others[:size])


@settings(deadline=None)
@given(windows, tiles)
def test_rows_covered_is_hull_of_taps(window, rows):
    out = interval(rows)
    for numbers, found in zip(rows_of(out), rows_of(window.rows_covered(out)), strict=True):
        covered = set().union(*(taps(window, number) for number in numbers))
        assert found == (set(range(min(covered), max(covered) + 1)) if covered else set())


@settings(deadline=None)
@given(windows, st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=4))
def test_windows_overlapping_is_every_window_with_a_row(window, rows):
    value = interval(rows)
    for tile, found in zip(rows_of(value), rows_of(window.windows_overlapping(value)), strict=True):
        spans = {
            number: range(min(taps(window, number)), max(taps(window, number)) + 1)
            for number in range(window.out_extent)
        }
        meeting = {number for number, span in spans.items() if tile.intersection(span)}
        if meeting:
            assert found == meeting
        else:
            assert len(found) == 1 and found <= set(spans)


@settings(deadline=None)
@given(windows, tiles)
def test_rows_covered_contains_rows_of_windows_overlapping(window, rows):
    """Every row with a tap lies in one of the windows that overlap it."""
    value = interval(rows).clip(window.in_extent).nonempty(window.in_extent)
    gathered = window.rows_covered(window.windows_overlapping(value))
    tapped = set().union(*(taps(window, number) for number in range(window.out_extent)))
    for tile, below in zip(rows_of(value), rows_of(gathered), strict=True):
        assert tile & tapped <= below


def test_inside_of_narrow_integers_equals_that_of_wide_ones():
    """The cache reads the bytes of its keys as 64-bit integers."""
    narrow = Interval(np.array([-1, 3], np.int32), np.array([2, 9], np.int32))
    assert rows_of(narrow.inside(6)) == rows_of(interval([(-1, 3), (3, 6)]).inside(6)) == [{0, 1}, {3, 4, 5}]
