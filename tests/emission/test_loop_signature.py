"""Loops share a body if, and only if, they run the same program."""

import pytest
from equivalence import Cut, differing, keras_step, rewrite
from keras import layers, ops

GRID = (2, 3)


def block(x, number, *, pads=((1, 1), (1, 1)), kernel=3, strides=1, slope=0.2, scale=2.0, pool=layers.MaxPooling2D):
    """A block whose exit has the shape of its entry for all options but one."""
    x = layers.ZeroPadding2D(pads)(x)
    x = layers.Conv2D(3, kernel, padding="same", strides=strides)(x)
    x = layers.LeakyReLU(slope)(x)
    return pool(3, strides=1, padding="valid", name=f"out{number}")(x * scale)


def chain(**second):
    """Return a step of two blocks, the second with other options."""
    return lambda x: block(block(x, 1), 2, **second)


def cuts(first=GRID, second=GRID):
    return Cut("input", "out1", first), Cut("out1", "out2", second)


def bodies(step, *cuts, loops=4):
    """Return the names of the body functions of the loops."""
    nodes = [n for n in rewrite(step.concrete_fn, *cuts).graph.nodes.values() if n.op in ("While", "StatelessWhile")]
    assert len(nodes) == loops
    return {loop.attrs["body"].func.name for loop in nodes}


@pytest.mark.parametrize("known_batch", (True, False))
def test_program_signature_equal_blocks_share_bodies(known_batch):
    step = keras_step(chain(), batch=2, known_batch=known_batch)
    assert len(bodies(step, *cuts())) == 3  # The first block's image needs no gradient, so its backward loop differs.
    assert differing(step, *cuts()) == {}


def test_program_signature_three_equal_blocks_have_bodies_of_two():
    step = keras_step(lambda x: block(block(block(x, 1), 2), 3))
    ends = ("input", "out1", "out2", "out3")
    three = [Cut(a, b, GRID) for a, b in zip(ends, ends[1:], strict=False)]
    assert len(bodies(step, *three, loops=6)) == 3
    assert differing(step, *three) == {}


@pytest.mark.parametrize(
    "second",
    (
        {"pads": ((2, 0), (1, 1))},
        {"kernel": 1},
        {"strides": 2},
        {"slope": 0.3},
        {"scale": 3.0},
        {"pool": layers.AveragePooling2D},
    ),
)
def test_program_signature_different_blocks_have_own_bodies(second):
    step = keras_step(chain(**second))
    assert len(bodies(step, *cuts())) == 4
    assert differing(step, *cuts()) == {}


def test_program_signature_different_grids_have_own_bodies():
    step = keras_step(chain())
    assert len(bodies(step, *cuts((2, 3), (3, 2)))) == 4
    assert differing(step, *cuts((2, 3), (3, 2))) == {}


@pytest.mark.parametrize(("offset", "shared"), ((0, True), (2, False)))
def test_program_signature_includes_static_operands(offset, shared):
    """Slices of equal size from different channels differ in the value of one operand."""

    def block(x, number, offset):
        x = ops.slice(layers.Conv2D(6, 3, padding="same")(x), (0, 0, 0, offset), (2, 37, 40, 3))
        return layers.ReLU(name=f"out{number}")(x)

    step = keras_step(lambda x: block(block(x, 1, 0), 2, offset))
    # The backward loops hold gradients of the convolutions alone; the first one needs none of its entry.
    assert len(bodies(step, *cuts())) == (3 if shared else 4)
    assert differing(step, *cuts()) == {}
