"""Reductions over some axes of the image alone: strip pooling and normalisation along rows, whole steps on tiles."""

from collections.abc import Callable
from typing import Any

import pytest
from between_convolutions import check_on_tiles, normed, plain, step_between
from keras import layers, ops

Layers = Callable[[Any], Any]


def strip_pooling(x: Any) -> Any:
    """Q. Hou et al., "Strip Pooling: Rethinking Spatial Pooling for Scene Parsing" (2020)."""
    rows = layers.Conv2D(4, (3, 1), padding="same")(ops.mean(x, axis=2, keepdims=True))
    columns = layers.Conv2D(4, (1, 3), padding="same")(ops.mean(x, axis=1, keepdims=True))
    return x * ops.sigmoid(rows + columns)


def less_maximum(x: Any) -> Any:
    return x - ops.max(x, axis=1, keepdims=True)


def normalised_rows(x: Any) -> Any:
    mean = ops.mean(x, axis=2, keepdims=True)
    return (x - mean) / ops.sqrt(ops.mean((x - mean) ** 2, axis=2, keepdims=True) + 1e-3)


def dimension_dropped(x: Any) -> Any:
    return x * ops.expand_dims(ops.tanh(ops.sum(x, axis=2)), 2)


def axial(x: Any) -> Any:
    """Sums over one axis of a volume, and over two of them."""
    return x + ops.tanh(ops.mean(x, axis=1, keepdims=True)) * ops.tanh(ops.min(x, axis=(2, 3), keepdims=True))


NETS: dict[str, tuple[int, Layers, Layers]] = {
    "strip pooling": (2, plain, strip_pooling),
    "strip pooling, normed": (2, normed, strip_pooling),
    "maximum": (2, plain, less_maximum),
    "maximum, normed": (2, normed, less_maximum),
    "normalised rows": (2, plain, normalised_rows),
    "normalised rows, normed": (2, normed, normalised_rows),
    "dimension dropped": (2, normed, dimension_dropped),
    "axial": (3, plain, axial),
}
GRIDS = {2: [(3, 2), (5, 1), (2, 4, 3)], 3: [(2, 2, 3), (2, 3, 1, 2)]}
CASES = [(name, grid) for name, (rank, *_) in NETS.items() for grid in range(len(GRIDS[rank]))]


@pytest.mark.parametrize(("name", "grid"), CASES)
def test_reduction_over_some_axes_on_tiles_equals_plain(name, grid):
    rank, norm, middle = NETS[name]
    step = step_between(rank, norm, middle, known_batch=grid == 0, steps=3)
    fast = check_on_tiles(step, GRIDS[rank][grid])
    ops_outside = fast.concrete_function.graph.get_operations()
    assert not {op.type for op in ops_outside}.intersection(("Max", "Min", "Sigmoid", "SigmoidGrad", "Conv3D"))
