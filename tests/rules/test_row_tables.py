"""Tables of the rows that an op moves or interpolates between, and rules that are broken on purpose."""

import numpy as np
import pytest
import tensorflow as tf
from one_op import OneOp
from rule_cases import CASES

from rewriters.rules.intervals import partition
from rewriters.rules.pixel_maps import mirror, subpixel
from rewriters.rules.pixel_maps.mirror import mirror_table
from rewriters.rules.pixel_maps.row_tables import RowMap, RowTable
from rewriters.tiling.tile_planner import Grid


def first_tap(self, emitter, op, value):
    for axis in op.axes(op.node.out()):
        rows = emitter.axis_positions(op.node, 0, self.table(op, axis).rows[0], axis)
        value = tf.gather(value, rows, axis=op.dim(op.node.out(), axis))
    return value


SOURCES, OVERLAPPING = RowTable.sources, subpixel.Window.windows_overlapping
ROWS_BELOW = RowTable, "sources", lambda self, out: SOURCES(self, out).shift(1)
BORDER = mirror, "mirror_table", lambda extent, before, after, _: mirror_table(extent, before, after, 0)
FIRST_TAP = RowMap, "mapped", first_tap
BLOCK_TOO_LOW = subpixel.Window, "windows_overlapping", lambda self, rows: OVERLAPPING(self, rows).shift(-1)
BREAKS = [
    ("MirrorPad", "rows below", ROWS_BELOW),
    ("MirrorPad", "border repeated", BORDER),
    ("MirrorPadGrad", "border repeated", BORDER),
    ("MirrorPadGrad", "first tap only", FIRST_TAP),
    ("ReverseV2", "rows below", ROWS_BELOW),
    ("ResizeBicubic", "rows below", ROWS_BELOW),
    ("ResizeBicubicGrad", "first tap only", FIRST_TAP),
    ("DepthToSpace", "one block too low", BLOCK_TOO_LOW),
    ("SpaceToDepth", "one block too low", BLOCK_TOO_LOW),
]


@pytest.mark.parametrize(("op_type", "what", "change"), BREAKS, ids=[f"{b[0]} {b[1]}" for b in BREAKS])
def test_case_detects_broken_rule(op_type, what, change, monkeypatch):
    monkeypatch.setattr(*change)
    try:
        noticed = bool(OneOp(op_type, CASES[op_type]()).differing(Grid(1, (3, 3))))
    except (AssertionError, tf.errors.InvalidArgumentError):
        noticed = True  # The planner's check, or the kernel's, came first.
    assert noticed


def matrix(table):
    """The table as a dense matrix."""
    dense = np.zeros((table.rows.shape[1], table.in_extent))
    weights = np.ones(table.rows.shape) if table.weights is None else table.weights
    for tap in range(len(table.rows)):
        np.add.at(dense, (np.arange(len(dense)), table.rows[tap]), weights[tap])
    return dense


@pytest.mark.parametrize(("before", "after", "offset"), [(0, 0, 1), (4, 2, 1), (6, 6, 1), (7, 3, 0), (0, 7, 0)])
def test_mirror_table_equals_numpy_pad(before, after, offset):
    table, rows = mirror_table(7, before, after, offset), np.arange(7)
    assert np.array_equal(table.rows[0], np.pad(rows, (before, after), "reflect" if offset else "symmetric"))
    assert table.is_identity == (before == after == 0)
    assert np.array_equal(matrix(table.transposed), matrix(table).T)
    assert np.array_equal(matrix(table.transposed.transposed), matrix(table))


def test_row_table_sources_are_smallest_interval():
    table = mirror_table(9, 5, 4, 1).transposed
    tiles = partition(9, 4)
    have, dense = table.sources(tiles), matrix(table)
    for tile, (lo, hi) in enumerate(zip(tiles.lo, tiles.hi, strict=True)):
        needed = np.flatnonzero(dense[lo:hi].any(axis=0))
        assert (have.lo[tile], have.hi[tile]) == (needed[0], needed[-1] + 1)


def test_row_table_transposed_row_without_source_stays_near():
    table = RowTable(np.array([[3, 3, 9]]), None, 12).transposed
    assert np.array_equal(matrix(table), np.eye(12)[[3, 3, 9]].T)
    assert int(table.rows[:, 8].max()) == 1 and int(table.rows[:, 11].min()) == 2
