"""Rules of ops along channels: uses beside their cases, and what they refuse."""

import numpy as np
import pytest
from one_op import FULL, HEIGHT, INVARIANT, PARTIAL, WIDTH, Const, OneOp, image, numbers

from rewriters.errors import NotTileableError
from rewriters.tiling.tile_planner import Grid


@pytest.fixture(autouse=True)
def fresh_keras():
    """No Keras here: nothing to clean up."""


VARIANTS = [
    ("ArgMax", {"input": image(), "dimension": Const(3), "output_type": np.int32}),
    ("ArgMin", {"input": image(3, 4, HEIGHT, WIDTH, 2), "dimension": Const(4)}),
    ("Any", {"input": image() > 1.5, "axis": Const([-1])}),
    ("Cumsum", {"x": image(), "axis": Const(-1), "reverse": True}),
    ("Roll", {"input": image(), "shift": Const(2), "axis": Const(3)}),
    ("Roll", {"input": image(), "shift": Const([1, 2]), "axis": Const([3, 3])}),
    ("GatherV2", {"params": image(9, 5), "indices": numbers(3, HEIGHT, WIDTH) - 1, "axis": Const(0)}),
    ("GatherV2", {"params": image(9), "indices": numbers() - 1, "axis": Const(0)}),
    ("GatherV2", {"params": image(3, HEIGHT, WIDTH, 5), "indices": Const(2), "axis": Const(-1)}),
    ("OneHot", {"indices": numbers(), "depth": Const(9), "on_value": Const(1), "off_value": Const(0)}),
    ("Pack", {"values": [image(), image(seed=1), image(seed=2)], "axis": 4}),
    ("Unpack", {"value": image(3, 4, HEIGHT, WIDTH, 3), "num": 3, "axis": -1}),
    ("TopKV2", {"input": numbers(), "k": Const(3)}),
    ("EnsureShape", {"input": image(3, 4, HEIGHT, WIDTH, 2), "shape": [3, None, HEIGHT, WIDTH, 2]}),
]


@pytest.mark.parametrize(("op_type", "operands"), VARIANTS, ids=[f"{v[0]}{n}" for n, v in enumerate(VARIANTS)])
@pytest.mark.parametrize("batch_known", [True, False], ids=["known", "unknown"])
def test_other_uses_on_tiles_equal_op_on_image(op_type, operands, batch_known):
    assert not OneOp(op_type, operands, batch_known).differing(Grid(1, (1, 1)), Grid(2, (6, 5)), Grid(1, (3, 1)))


REFUSED = [
    ("ArgMax", {"input": image(), "dimension": Const(1)}, "F", "reduces over an axis of the image"),
    ("ArgMax", {"input": image(), "dimension": Const(0)}, "F", "or over the batch"),
    ("ArgMax", {"input": image(), "dimension": Const(3)}, "P", "ArgMax is not linear in a gradient"),
    ("Cumsum", {"x": image(), "axis": Const(2)}, "F", "needs all rows before each row"),
    ("Roll", {"input": image(), "shift": Const([1]), "axis": Const([1])}, "F", "needs rows from both ends"),
    ("GatherV2", {"params": image(), "indices": Const([1]), "axis": Const(2)}, "F", "works along an axis"),
    ("GatherV2", {"params": image(), "indices": numbers(3, 2), "axis": Const(3), "batch_dims": 1}, "F", "each image"),
    (
        "GatherV2",
        {"params": image(9, 4), "indices": numbers(3, HEIGHT, WIDTH), "axis": Const(0)},
        "FF",
        "by image data",
    ),
    ("Pack", {"values": [image(), image()], "axis": 3}, "FP", "of forward values and gradients"),
    ("Pack", {"values": [image(), image()], "axis": 3}, "FI", "the same for all tiles"),
    ("Pack", {"values": [image(), image()], "axis": 0}, "FF", "along the batch|is no image|another axis order"),
    ("Unpack", {"value": image(), "num": WIDTH, "axis": 2}, "F", "works along an axis"),
    ("Bitcast", {"input": image(), "type": np.int32}, "F", "a dtype of another size"),
    (
        "LRNGrad",
        {name: image().astype("f") for name in ("input_grads", "input_image", "output_image")},
        "FP",
        "not linear in forward values",
    ),
]


@pytest.mark.parametrize(
    ("op_type", "operands", "kinds", "reason"), REFUSED, ids=[f"{r[0]}-{r[2]}-{n}" for n, r in enumerate(REFUSED)]
)
def test_rule_refuses_with_reason(op_type, operands, kinds, reason):
    one_op = OneOp(op_type, operands)
    given = tuple({"F": FULL, "P": PARTIAL, "I": INVARIANT}[letter] for letter in kinds)
    with pytest.raises(NotTileableError, match=reason):
        one_op.result_kind(given + (INVARIANT,) * (len(one_op.node.inputs) - len(given)))
