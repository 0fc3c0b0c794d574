"""What the turns of a loop cost."""

import pytest
from equivalence import Cut, keras_step, plan
from keras import layers
from nets import conv

from rewriters import normalise
from rewriters.analysis import Analysis
from rewriters.cost import FLOPS_PER_BYTE, WEIGHTS_FACTOR, op_cost, phase_cost, step_cost, turn_cost
from rewriters.tiles import Halo

IMAGES = 4
FILTERS = ((3, 3, 3, 4), (3, 3, 4, 5), (1, 1, 3, 4), (1, 1, 4, 5))


def two(size):
    """Two convolutions, with filters of so many pixels a side."""
    return lambda x: conv(5, size, name="out")(conv(4, size)(x))


def pooled(x):
    return layers.MaxPooling2D(2, name="out")(conv(4)(x))


def phases(body, grid, batch=1, halo=Halo.RECOMPUTE):
    """The loops of a segment."""
    step = keras_step(body, (12, 10), IMAGES, steps=1)
    analysis = Analysis(normalise.read(step.concrete_fn))
    (found,) = plan(analysis, [Cut(grid=grid, batch=batch, halo=halo)])
    return analysis, found.phases


@pytest.mark.parametrize("body", [two(3), pooled])
def test_one_turn_costs_what_the_operations_do(body):
    analysis, found = phases(body, (1, 1))
    for phase in found:
        assert phase_cost(analysis, phase, IMAGES) == pytest.approx(step_cost(analysis, phase.body, IMAGES))


# Tiles of the batch have no halos, nor have convolutions of single pixels.
@pytest.mark.parametrize(
    ("size", "grid", "batch", "halo"),
    [
        (3, (1, 1), 2, Halo.RECOMPUTE),
        (3, (1, 1), 9, Halo.RECOMPUTE),
        (1, (4, 1), 1, Halo.RECOMPUTE),
        (1, (4, 1), 1, Halo.CARRY),
        (1, (4, 2), 2, Halo.RECOMPUTE),
    ],
)
def test_every_turn_moves_weights_and_their_gradients_once_more(size, grid, batch, halo):
    analysis, found = phases(two(size), grid, batch, halo)
    turns, seen = min(batch, IMAGES) * grid[0] * grid[1], set()
    for phase in found:
        for node in phase.body:
            if "Conv2D" in node.op:
                (filter_,) = [t for t in (*node.inputs, node.out()) if t.shape in FILTERS]
                more = (turns - 1) * FLOPS_PER_BYTE * WEIGHTS_FACTOR * filter_.num_bytes(IMAGES)
                one = op_cost(analysis, node, IMAGES)
                # Operands that hold a shape count as well.
                assert turn_cost(analysis, phase, node, IMAGES) == pytest.approx(one + more, rel=0.05)
                seen.add(node.op)
    assert seen == {"Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter"}


def test_no_turn_moves_more_than_its_part_of_a_pool_that_is_made_again():
    analysis, found = phases(pooled, (1, 1), IMAGES)
    (pool,) = [node for phase in found for node in phase.body if node.op == "MaxPoolGrad"]
    assert pool.inputs[1] not in found[-1].regions, "the pool's result, which nothing else reads"
    assert turn_cost(analysis, found[-1], pool, IMAGES) == pytest.approx(op_cost(analysis, pool, IMAGES))
