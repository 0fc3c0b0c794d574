"""Rules of ops that move pixels or interpolate between them: uses beside their cases, and what they refuse."""

import numpy as np
import pytest
import tensorflow as tf
from one_op import FULL, HEIGHT, INVARIANT, PARTIAL, WIDTH, Const, OneOp, image, numbers
from rule_cases import CASES

from rewriters.errors import NotTileableError
from rewriters.rules.intervals import partition
from rewriters.rules.pixel_maps import mirror, subpixel
from rewriters.rules.pixel_maps.mirror import mirror_table
from rewriters.rules.pixel_maps.row_tables import RowMap, RowTable
from rewriters.tiling.tile_planner import Grid


@pytest.fixture(autouse=True)
def fresh_keras():
    """No Keras here: nothing to clean up."""


def pads(*sides):
    return Const([[0, 0], *sides, [0, 0]])


def patches(size, stride):
    return {"ksizes": [1, size, size, 1], "strides": [1, stride, stride, 1], "rates": [1, 1, 1, 1]}


VOLUME = (3, 5, HEIGHT, WIDTH, 2)
VARIANTS = [
    ("MirrorPad", {"input": image(), "paddings": pads([HEIGHT, 1], [1, WIDTH]), "mode": "SYMMETRIC"}),
    ("MirrorPad", {"input": image(), "paddings": pads([0, 0], [3, 3]), "mode": "REFLECT"}),
    ("MirrorPad", {"input": image(*VOLUME), "paddings": pads([4, 2], [0, 7], [3, 3]), "mode": "REFLECT"}),
    ("MirrorPadGrad", {"input": image(), "paddings": pads([6, 1], [0, 7]), "mode": "SYMMETRIC"}),
    ("MirrorPadGrad", {"input": image(*VOLUME), "paddings": pads([2, 0], [4, 4], [0, 6]), "mode": "REFLECT"}),
    ("ReverseV2", {"tensor": image(), "axis": Const([2])}),
    ("ReverseV2", {"tensor": image(), "axis": Const([3])}),
    ("ReverseV2", {"tensor": image(*VOLUME), "axis": Const([-2, 1])}),
    ("SpaceToDepth", {"input": image(3, 15, 12, 2), "block_size": 3}),
    ("DepthToSpace", {"input": image(3, 7, 6, 18), "block_size": 3}),
    ("ExtractImagePatches", {"images": image(), **patches(4, 4), "padding": "VALID"}),
    ("ExtractImagePatches", {"images": image(), **patches(2, 5), "padding": "SAME"}),
    ("ExtractImagePatches", {"images": image(), **patches(5, 2), "padding": "SAME"}),
    ("ResizeBicubic", {"images": image().astype("f"), "size": Const([7, 40]), "half_pixel_centers": True}),
    ("ResizeBicubic", {"images": numbers(), "size": Const([25, 9]), "align_corners": True}),
    ("ResizeBicubic", {"images": image(3, 9, 8, 3).astype("f"), "size": Const([12, 24])}),
    *(
        ("ResizeBicubicGrad", {"grads": image(3, *size, 2).astype("f"), "original_image": image(3, 12, 9, 2), **flags})
        for size, flags in (
            ((7, 30), {"half_pixel_centers": True}),
            ((25, 9), {"align_corners": True}),
            ((36, 5), {}),
        )
    ),
]


@pytest.mark.parametrize(("op_type", "operands"), VARIANTS, ids=[f"{v[0]}{n}" for n, v in enumerate(VARIANTS)])
@pytest.mark.parametrize("batch_known", [True, False], ids=["known", "unknown"])
def test_other_uses_on_tiles_equal_op_on_image(op_type, operands, batch_known):
    assert not OneOp(op_type, operands, batch_known).differing(Grid(1, (1, 1)), Grid(2, (6, 5)), Grid(1, (3, 1)))


REFUSED = [
    ("MirrorPad", {"input": image(), "paddings": Const([[1, 0], [0, 0], [0, 0], [0, 0]]), "mode": "REFLECT"}, "batch"),
    ("MirrorPad", {"input": image(), "paddings": numbers(4, 2), "mode": "REFLECT"}, "computed at run time"),
    ("ReverseV2", {"tensor": image(), "axis": Const([0])}, "a reversal of the batch"),
    ("ReverseV2", {"tensor": image(), "axis": numbers(1)}, "computed at run time"),
]


@pytest.mark.parametrize(("op_type", "operands", "reason"), REFUSED)
def test_rule_refuses_with_reason(op_type, operands, reason):
    one_op = OneOp(op_type, operands)
    for kind in (FULL, PARTIAL):
        with pytest.raises(NotTileableError, match=reason):
            one_op.result_kind((kind, INVARIANT))


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
    grid = Grid(1, (3, 3))
    assert not OneOp(op_type, CASES[op_type]()).differing(grid)
    monkeypatch.setattr(*change)
    try:
        noticed = bool(OneOp(op_type, CASES[op_type]()).differing(grid))
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
