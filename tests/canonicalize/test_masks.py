"""Masks as comparisons of positions: equal to the original ones; what only looks like a mask stays."""

import numpy as np
import pytest
import tensorflow as tf

from rewriters.canonicalize import canonicalize
from rewriters.step_importer import StepImporter

ROWS, COLUMNS = 7, 9


def rewritten(function, *arguments):
    """Return the op types of the canonical graph, its result, and that of the original."""
    concrete_fn = tf.function(lambda *values: [function(*values)], autograph=False).get_concrete_function(*arguments)
    graph = canonicalize.read_canonical(concrete_fn)
    importer = StepImporter(graph, concrete_fn)
    got = tf.function(lambda *values: importer(values), autograph=False)(*arguments)
    (want,) = concrete_fn(*arguments)
    return {node.op for node in graph.nodes.values()}, np.array(tf.nest.flatten(got)[0]), np.array(want)


def ones(dtype=tf.bool, *leading):
    """Return ones, made by an op as those of large tensors."""
    return tf.fill([*leading, ROWS, COLUMNS], tf.ones([], dtype))


def band(below, above):
    return tf.linalg.band_part(ones(), below, above)


def selected(mask, scores):
    return tf.where(mask, scores, -1.0)


SCORES = np.arange(2 * 3 * ROWS * COLUMNS, dtype="float64").reshape(2, 3, ROWS, COLUMNS)


@pytest.mark.parametrize("limits", [(-1, 0), (0, -1), (2, 1), (1, -1), (-1, 3)], ids=str)
@pytest.mark.parametrize("add_axes", ["slice", "expand", "reshape"])
def test_bands_become_comparisons(limits, add_axes):
    def function(scores):
        mask = band(*limits)
        if add_axes == "slice":
            mask = mask[None, None]
        elif add_axes == "expand":
            mask = tf.expand_dims(mask, 0)
        else:
            mask = tf.reshape(mask, [1, 1, ROWS, COLUMNS])
        return selected(mask, scores)

    ops, got, want = rewritten(function, SCORES)
    assert "MatrixBandPart" not in ops and ops & {"LessEqual", "GreaterEqual"}
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("compare", [tf.greater_equal, tf.greater, tf.less_equal, tf.less, tf.equal])
def test_cumulative_sums_become_positions(compare):
    def function(scores):
        rows, columns = (tf.cumsum(ones(tf.int32, 1), axis) for axis in (-2, 2))
        return selected(compare(rows, columns), scores[:, 0])

    ops, got, want = rewritten(function, SCORES)
    assert "Cumsum" not in ops
    np.testing.assert_array_equal(got, want)


def test_a_conjunction_with_ones_disappears():
    def function(scores):
        return selected(tf.logical_and(tf.ones_like(scores, tf.bool), band(-1, 0)[None, None]), scores)

    ops, got, want = rewritten(function, SCORES)
    assert "LogicalAnd" not in ops
    np.testing.assert_array_equal(got, want)


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
    _, got, want = rewritten(STAY[case], SCORES)
    np.testing.assert_array_equal(got, want)
