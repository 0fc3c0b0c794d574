"""What the turns of a loop cost."""

import pytest
from equivalence import Cut, keras_step, plan
from nets import conv

from rewriters import normalise
from rewriters.analysis import Analysis
from rewriters.cost import FILTER_FACTOR, FLOPS_PER_BYTE, phase_cost, step_cost, turn_cost

IMAGES = 4


def phases(grid, batch=1):
    """Loops of two convolutions; tiles that split the batch alone have no halos."""
    step = keras_step(lambda x: conv(5, name="out")(conv(4)(x)), (12, 10), IMAGES, steps=1)
    analysis = Analysis(normalise.read(step.concrete_fn))
    (found,) = plan(analysis, [Cut(grid=grid, batch=batch)])
    return analysis, found.phases


def test_one_turn_costs_what_the_operations_do():
    analysis, found = phases((1, 1))
    for phase in found:
        assert phase_cost(analysis, phase, IMAGES) == pytest.approx(step_cost(analysis, phase.body, IMAGES))


@pytest.mark.parametrize("batch", [2, 4, 9])
def test_every_turn_moves_filters_and_their_gradients_once_more(batch):
    analysis, found = phases((1, 1), batch)
    turns = min(batch, IMAGES)
    filters, seen = ((3, 3, 3, 4), (3, 3, 4, 5)), set()
    for phase in found:
        for node in phase.body:
            if "Conv2D" in node.op:
                one = step_cost(analysis, [node], IMAGES)
                (filter_,) = [t for t in (*node.inputs, node.out()) if t.shape in filters]
                more = (turns - 1) * FLOPS_PER_BYTE * FILTER_FACTOR * filter_.num_bytes(IMAGES)
                assert turn_cost(analysis, phase, node, IMAGES) == pytest.approx(one + more, rel=1e-2)
                seen.add(node.op)
    assert seen == {"Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter"}
