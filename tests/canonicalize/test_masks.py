"""Masks as comparisons of positions: equal to the original ones; what only looks like a mask stays."""

import numpy as np
import pytest
import tensorflow as tf
from canonical_functions import canonical
from graph_rewrites import step

from rewriters.canonicalize.masks import rewrite_masks

ROWS, COLUMNS = 7, 9


def ones(dtype=tf.bool, *leading):
    """Return ones, made by an op as those of large tensors."""
    return tf.fill([*leading, ROWS, COLUMNS], tf.ones([], dtype))


def band(below, above):
    return tf.linalg.band_part(ones(), below, above)


def selected(mask, scores):
    return tf.where(mask, scores, -1.0)


SCORES = np.arange(2 * 3 * ROWS * COLUMNS, dtype="float64").reshape(2, 3, ROWS, COLUMNS)


def other_mask():
    return tf.constant(np.arange(ROWS * COLUMNS).reshape(1, ROWS, COLUMNS) % 3 == 0)


STAY = {
    "conjunction": lambda scores: selected(tf.logical_and(band(-1, 0), other_mask()), scores),
    "conjunction of other rank": lambda scores: selected(tf.logical_and(band(-1, 0), other_mask()[None]), scores),
    "comparison of other rank": lambda scores: selected(tf.equal(band(-1, 0), other_mask()[None]), scores),
    "comparison": lambda scores: selected(tf.equal(band(-1, 0), other_mask()), scores),
    "selection": lambda scores: selected(tf.where(band(-1, 0), other_mask(), ~other_mask()), scores),
    "backwards": lambda scores: selected(band(-1, 0)[None, ::-1], scores),
    "other matrix": lambda scores: selected(tf.linalg.band_part(other_mask()[0], -1, 0)[None], scores),
    "stacked": lambda scores: selected(tf.stack([band(-1, 0)] * 3), scores),
    "exclusive": lambda scores: selected(
        tf.cumsum(ones(tf.int32, 1), -2, exclusive=True) >= tf.cumsum(ones(tf.int32, 1), -1), scores[:, 0]
    ),
    "one axis": lambda scores: selected(
        tf.cumsum(ones(tf.int32, 1), -2) >= 2 * tf.cumsum(ones(tf.int32, 1), -2), scores[:, 0]
    ),
    "one for each image": lambda scores: tf.cast(
        tf.cumsum(tf.ones([3, ROWS, COLUMNS], tf.int32), 1) >= tf.cumsum(tf.ones([3, ROWS, COLUMNS], tf.int32), 2),
        tf.float64,
    ),
    "result": lambda scores: band(-1, 0)[None, None],
    "read as numbers": lambda scores: tf.cast(
        tf.logical_and(tf.ones_like(scores, tf.bool), band(-1, 0)[None, None]), tf.float64
    ),
}


@pytest.mark.parametrize("case", STAY)
def test_other_masks_keep_their_values(case):
    scores = tf.constant(SCORES)
    function, _ = canonical(STAY[case], scores)
    np.testing.assert_array_equal(function(scores), STAY[case](scores))


def test_rewrite_masks_bands_and_cumulative_sums_compare_positions():
    step(rewrite_masks).check("""
        graph(scores: float32[2,3,3])
        ones = bool[3,3] Fill([3, 3], bool:True)
        triangle = bool[3,3] MatrixBandPart(ones, -1, 0)
        mask = bool[1,3,3] ExpandDims(triangle, 0)
        band = bool[3,3] MatrixBandPart(ones, 1, 2)
        other = bool[1,3,3] Reshape(band, [1, 3, 3])
        numbers = int32[1,3,3] Fill([1, 3, 3], 1)
        rows = int32[1,3,3] Cumsum(numbers, -2)
        columns = int32[1,3,3] Cumsum(numbers, 2)
        sums = bool[1,3,3] Greater(rows, columns)
      + mask/LessEqual = bool[1,3,3] LessEqual([[[0.0, 1.0, 2.0]]], [[[0.0], [1.0], [2.0]]])
      - first = float32[2,3,3] SelectV2(mask, scores, 0.0)
      + first = float32[2,3,3] SelectV2(mask/LessEqual, scores, 0.0)
      + other/GreaterEqual = bool[1,3,3] GreaterEqual([[[1.0, 2.0, 3.0]]], [[[0.0], [1.0], [2.0]]])
      + other/LessEqual = bool[1,3,3] LessEqual([[[-2.0, -1.0, 0.0]]], [[[0.0], [1.0], [2.0]]])
      + other/LogicalAnd = bool[1,3,3] LogicalAnd(other/GreaterEqual, other/LessEqual)
      - second = float32[2,3,3] SelectV2(other, first, 0.5)
      + second = float32[2,3,3] SelectV2(other/LogicalAnd, first, 0.5)
      + sums/Greater = bool[1,3,3] Greater([[[0.0], [1.0], [2.0]]], [[[0.0, 1.0, 2.0]]])
      - third = float32[2,3,3] SelectV2(sums, second, 0.25)
      + third = float32[2,3,3] SelectV2(sums/Greater, second, 0.25)
        return third
    """)


def test_rewrite_masks_selections_read_through_a_conjunction_with_ones():
    step(rewrite_masks).check("""
        graph(scores: float32[2,5,3], mask: bool[1,5,3])
        ones = bool[2,5,3] Fill([2, 5, 3], bool:True)
        both = bool[2,5,3] LogicalAnd(ones, mask)
      - selected = float32[2,5,3] SelectV2(both, scores, 0.0)
      + selected = float32[2,5,3] SelectV2(mask, scores, 0.0)
        same = bool[2,5,3] LogicalAnd(ones, mask)
        number = float32[2,5,3] Cast(same)
        return selected, number
    """)
