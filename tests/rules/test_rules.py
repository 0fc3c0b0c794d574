"""Op rules: each op on tiles equals the op on the full image."""

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf
from one_op import FULL, HEIGHT, INVARIANT, PARTIAL, WIDTH, Const, OneOp, flags, image, numbers
from rule_cases import CASES, POOL, convolution_case, filter_gradient_case, max_pool_gradient_case

from rewriters.errors import NotTileableError
from rewriters.ir.graph import Node
from rewriters.ir.graph_reader import from_tf_graph
from rewriters.ir.static_values import StaticEvaluator
from rewriters.rules import convolution, pooling
from rewriters.rules.axis_layouts import Layouts
from rewriters.rules.intervals import Interval, Window, whole
from rewriters.rules.registry import OpView, Rule, add_rule, find_rule, not_tileable, registered
from rewriters.tiling import tile_planner
from rewriters.tiling.tile_planner import Grid

# One case for every rule ------------------------------------------------------------------------------------


WITHOUT_CASES = {"PyFuncStateless", "StatelessRandomUniformV2", "StatelessRandomNormalV2", "MatMul"}
"""Ops that write to files (`tests/sources`), or have no image among their operands (`test_random_numbers.py`,
`tests/equivalence/test_samples.py`)."""


def test_registry_every_rule_has_case():
    assert set(CASES) | WITHOUT_CASES == set(registered())


@pytest.mark.parametrize("op_type", sorted(CASES))
def test_rule_on_tiles_equals_op_on_image(op_type):
    assert not OneOp(op_type, CASES[op_type]()).differing(Grid(2, (6, 5)))


NOT_ZERO = {
    "input": image(),
    "paddings": Const([[0, 0], [7, 1], [0, 0], [2, 0]]),
    "constant_values": Const(np.float64(5)),
}


def pads(*sides, batch=(0, 0)):
    return Const([batch, *sides, [0, 0]])


def patches(size, stride):
    return {"ksizes": [1, size, size, 1], "strides": [1, stride, stride, 1], "rates": [1, 1, 1, 1]}


VOLUME = (3, 5, HEIGHT, WIDTH, 2)
VARIANTS = [
    ("Sum", {"input": image(), "axis": Const([0, 1, 2]), "keep_dims": True}),
    ("Sum", {"input": image(), "axis": Const([-2, 0, 1, 3])}),
    *(
        (op_type, {"input": image(low=0.9, high=1.2), "axis": Const(axes), "keep_dims": keep})
        for op_type in ("Sum", "Mean", "Max", "Min", "Prod")
        for axes, keep in (
            ([0, 1, 2], True),
            ([1, 2], False),
            ([-3, 2, 3], True),
            ([0, 1, 2, 3], False),
            ([0], True),
            ([0, -1], True),
            ([1], True),
            ([2], False),
            ([-1, 1], True),
        )
    ),
    ("Tile", {"input": image(1, 1, 1, 4), "multiples": Const([3, HEIGHT, WIDTH, 1])}),
    ("Tile", {"input": image(3, 1, 1, 1), "multiples": Const([1, HEIGHT, WIDTH, 4])}),
    ("Tile", {"input": image(3, HEIGHT, WIDTH, 2), "multiples": Const([1, 1, 1, 3])}),
    ("Tile", {"input": image(3, HEIGHT, 1, 2), "multiples": Const([1, 1, WIDTH, 1])}),
    ("Pad", {"input": image(), "paddings": Const([[0, 0], [9, 9], [0, 8], [0, 0]])}),
    ("PadV2", NOT_ZERO),
    ("Slice", {"input": image(), "begin": Const([0, 11, 0, 0]), "size": Const([-1, 2, 14, 4])}),
    ("ConcatV2", {"values": [image(seed=1), image(seed=2), image(seed=3)], "axis": Const(3)}),
    ("Add", {"x": image(), "y": image(3, 1, 1, 4)}),
    ("AddV2", {"x": image(4), "y": image()}),
    ("Mul", {"x": image(1, 1, 1, 1), "y": image()}),
    ("Mul", {"x": image(), "y": image(3, HEIGHT, 1, 4)}),
    ("Mul", {"x": image(), "y": image(1, HEIGHT, WIDTH, 1)}),
    ("SelectV2", {"condition": flags(), "t": Const(np.float64(0)), "e": image()}),
    ("SelectV2", {"condition": flags(3, HEIGHT, 1, 1), "t": image(), "e": image(seed=1)}),
    ("MaxPool", {"input": numbers().astype(float), "ksize": [1, 5, 5, 1], "strides": [1, 1, 1, 1], "padding": "SAME"}),
    ("AvgPool", {"value": image(), "ksize": [1, 5, 4, 1], "strides": [1, 1, 3, 1], "padding": "SAME"}),
    ("BiasAdd", {"value": image(), "bias": image(HEIGHT), "data_format": "NCHW"}),
    ("BiasAddGrad", {"out_backprop": image(), "data_format": "NCHW"}),
    ("Transpose", {"x": image(), "perm": Const([0, 2, 3, 1])}),
    ("Einsum", {"inputs": [image(), image()], "equation": "bhwc,bhwd->cd"}),
    ("Einsum", {"inputs": [image(), image()], "equation": "bhwc,bhwc->bhw"}),
    ("Einsum", {"inputs": [image(5, 4), image()], "equation": "dc,b...c->b...d"}),
    ("Einsum", {"inputs": [image(), image(4, 5)], "equation": "bhwc,cd->bwhd"}),
    ("Conv2D", convolution_case(False) | {"dilations": [1, 2, 3, 1], "strides": [1, 1, 1, 1]}),
    # Along channels.
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
    # Ops that move pixels or interpolate between them.
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
        for size, flags in (((7, 30), {"half_pixel_centers": True}), ((25, 9), {"align_corners": True}), ((36, 5), {}))
    ),
]


@pytest.mark.parametrize(("op_type", "operands"), VARIANTS, ids=[f"{v[0]}{n}" for n, v in enumerate(VARIANTS)])
@pytest.mark.parametrize("batch_known", [pytest.param(True, marks=pytest.mark.slow), False], ids=["known", "unknown"])
def test_rule_other_uses_equal_op_on_image(op_type, operands, batch_known):
    """The case of each rule has a batch of known size, so that its other uses rarely need one."""
    assert not OneOp(op_type, operands, batch_known).differing(Grid(2, (6, 5)))


@pytest.mark.parametrize("block", ([1, 3], [2, 1], [1, 1]))
def test_space_to_batch_axis_without_blocks_equals_op(block):
    """The paddings are then those of `Pad`, and the crops those of a slice."""
    there = {"input": image(), "block_shape": Const(block), "paddings": Const([[2, 1], [1, 0]])}
    parts = image(3 * block[0] * block[1], 5, 4, 2)
    back = {"input": parts, "block_shape": Const(block), "crops": Const([[1, 0], [0, 2]])}
    for op_type, operands in (("SpaceToBatchND", there), ("BatchToSpaceND", back)):
        assert not OneOp(op_type, operands).differing(Grid(1, (1, 1)), Grid(2, (3, 2)), Grid(1, (6, 5)))


@pytest.mark.parametrize(
    "op_type",
    "Conv2DBackpropInput DepthwiseConv2dNativeBackpropInput AvgPool AvgPoolGrad MaxPoolGrad Slice "
    "MirrorPad ResizeBicubic ResizeBilinear ReverseV2".split(),
)
def test_rule_with_unknown_batch_equals_op_on_image(op_type):
    assert not OneOp(op_type, CASES[op_type](), batch_known=False).differing(Grid(1, (1, 1)), Grid(2, (2, 3)))


# What rules refuse ------------------------------------------------------------------------------------------

SQUARE = {"strides": [1, 1, 1, 1], "padding": "SAME"}
CONV = {"input": image(), "filter": image(3, 3, 4, 2), **SQUARE}

REFUSED = [
    ("Relu", {"features": image()}, "P", "Relu is not linear in a gradient"),
    ("Mul", {"x": image(), "y": image()}, "PP", r"not linear in the gradient\(s\) at operand\(s\) \[0, 1\]"),
    ("RealDiv", {"x": image(), "y": image()}, "FP", r"not linear in the gradient\(s\) at operand\(s\) \[1\]"),
    ("ReluGrad", {"gradients": image(), "features": image()}, "FP", "not linear"),
    ("AddV2", {"x": image(), "y": image()}, "FP", "adds forward values to a gradient"),
    ("AddN", {"inputs": [image(), image(), image()]}, "PPF", "adds forward values to a gradient"),
    ("Sub", {"x": image(), "y": image(4)}, "PI", "adds forward values to a gradient"),
    ("Mul", {"x": image(3, 1, 1, 4), "y": image()}, "PF", "broadcasts a gradient over the image or the batch"),
    ("Mul", {"x": image(1, HEIGHT, WIDTH, 4), "y": image()}, "PF", "broadcasts a gradient over the image or the batch"),
    ("AddV2", {"x": image(3, 1, 1, 4), "y": image()}, "PP", "broadcasts a gradient"),
    ("Add", {"x": image(), "y": image(WIDTH, 4)}, "FI", "not the same for all tiles"),
    ("Add", {"x": image(), "y": image()}, "FI", "not the same for all tiles"),
    ("SelectV2", {"condition": flags(), "t": image(), "e": image()}, "PFF", "selection by a gradient"),
    ("SelectV2", {"condition": flags(), "t": image(), "e": image()}, "FPF", "between a gradient and forward values"),
    ("Select", {"condition": flags(3), "x": image(), "y": image()}, "IFF", "one condition per image"),
    ("Conv2D", CONV, "FF", "its filter is computed from image data"),
    ("Conv2DBackpropFilter", filter_gradient_case(False), "FIF", "forward values on one side and a gradient"),
    ("Conv2DBackpropFilter", filter_gradient_case(False), "PIP", "forward values on one side and a gradient"),
    ("MaxPool", {"input": image(), **POOL}, "P", "MaxPool of a gradient"),
    ("AvgPool", {"value": image(), **POOL}, "P", "AvgPool of a gradient"),
    ("MaxPool", {"input": image(), **POOL, "ksize": [1, 1, 1, 2], "strides": [1, 1, 1, 2]}, "F", "batch or channels"),
    ("MaxPoolGrad", max_pool_gradient_case(), "FFF", "needs forward values and one gradient"),
    ("AvgPoolGrad", CASES["AvgPoolGrad"](), "IF", "AvgPoolGrad of forward values"),
    ("BiasAddGrad", {"out_backprop": image()}, "F", "reduces over the image"),
    ("Mean", {"input": image(), "axis": Const([1, 2])}, "F", "reduces over the image"),
    ("Sum", {"input": image(), "axis": Const([0, 1, 2])}, "F", "reduces over the image"),
    ("Sum", {"input": image(), "axis": Const([1, 2])}, "P", "reduces over the image"),
    ("Max", {"input": image(), "axis": Const([0, 1, 2])}, "P", "reduces over the image"),
    ("Max", {"input": image(), "axis": Const([3]), "keep_dims": True}, "P", "Max is not linear in a gradient"),
    ("Sum", {"input": image(), "axis": numbers(1)}, "FI", "axes computed at run time"),
    ("AddV2", {"x": image(), "y": image(WIDTH, 4)}, "FF", "has fewer axes than the output"),
    ("PadV2", NOT_ZERO, "P", "padded with a value other than zero"),
    ("Pad", {"input": image(), "paddings": Const([[1, 0], [0, 0], [0, 0], [0, 0]])}, "F", "padding of the batch"),
    ("Pad", {"input": image(), "paddings": numbers(4, 2)}, "FI", "padding computed at run time"),
    (
        "Slice",
        {"input": image(), "begin": Const([1, 0, 0, 0]), "size": Const([2, 5, 5, 4])},
        "F",
        "a slice of the batch",
    ),
    ("Slice", {"input": image(), "begin": numbers(4), "size": Const([-1, 5, 5, 4])}, "FI", "computed at run time"),
    ("ConcatV2", {"values": [image(), image()], "axis": Const(1)}, "FF", "another axis than the channels"),
    ("ConcatV2", {"values": [image(), image()], "axis": Const(3)}, "FP", "forward values and gradients"),
    ("ConcatV2", {"values": [image(), image()], "axis": Const(3)}, "FI", "the same for all tiles"),
    ("Tile", {"input": image(3, 1, 1, 4), "multiples": Const([1, HEIGHT, 1, 1])}, "P", "broadcasts a gradient"),
    ("Tile", {"input": image(3, 2, 1, 4), "multiples": Const([1, HEIGHT, 1, 1])}, "F", "repetition of an image"),
    ("Tile", {"input": image(3, 1, 1, 4), "multiples": Const([2, 1, 1, 1])}, "F", "over the batch"),
    ("Split", {"axis": Const(2), "value": image(), "num_split": 2}, "IF", "another axis than the channels"),
    ("Einsum", {"inputs": [image(), image()], "equation": "bhwc,bhwd->cd"}, "FF", "reduces over the image"),
    ("Einsum", {"inputs": [image(), image()], "equation": "bhwc,bhwc->bhwc"}, "PP", "two gradients"),
    ("Einsum", {"inputs": [image(), image()], "equation": "bhwc,bvwc->bhvc"}, "FF", "different axis orders"),
    ("Einsum", {"inputs": [image(), image(WIDTH, 5)], "equation": "bhwc,wv->bhvc"}, "FI", "combines different pixels"),
    ("Einsum", {"inputs": [image(), image(4, 5)], "equation": "bhwc,cd->bhwd"}, "FF", "combines different pixels"),
    ("Einsum", {"inputs": [image(), image(3, 1, 1, 4)], "equation": "...c,...c->...c"}, "FF", "broadcasts one image"),
    (
        "Einsum",
        {"inputs": [image(), image(1, HEIGHT, WIDTH, 4)], "equation": "...c,...c->...c"},
        "FF",
        "broadcasts one",
    ),
    ("Einsum", {"inputs": [image(3, HEIGHT, WIDTH, WIDTH)], "equation": "bhww->bhw"}, "F", "diagonal"),
    # Along channels.
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
    # Ops that move pixels.
    ("MirrorPad", {"input": image(), "paddings": pads([0, 0], [0, 0], batch=[1, 0]), "mode": "REFLECT"}, "F", "batch"),
    ("MirrorPad", {"input": image(), "paddings": numbers(4, 2), "mode": "REFLECT"}, "P", "computed at run time"),
    ("ReverseV2", {"tensor": image(), "axis": Const([0])}, "F", "a reversal of the batch"),
    ("ReverseV2", {"tensor": image(), "axis": numbers(1)}, "P", "computed at run time"),
]


@pytest.mark.parametrize(
    ("op_type", "operands", "kinds", "reason"), REFUSED, ids=[f"{r[0]}-{r[2]}-{n}" for n, r in enumerate(REFUSED)]
)
def test_rule_refuses_with_reason(op_type, operands, kinds, reason):
    one_op = OneOp(op_type, operands)
    letters = {"F": FULL, "P": PARTIAL, "I": INVARIANT}
    given_kinds = tuple(letters[letter] for letter in kinds)
    padded = given_kinds + (INVARIANT,) * (len(one_op.node.inputs) - len(given_kinds))
    with pytest.raises(NotTileableError, match=reason):
        one_op.result_kind(padded)


def test_rule_refuses_unknown_image_size():
    graph = tf.Graph()
    with graph.as_default():
        x = tf.raw_ops.Placeholder(dtype=tf.float32, shape=(None, None, 8, 3))
        tf.raw_ops.MaxPool(input=x, **POOL, name="pool")
    read = from_tf_graph(graph, [], [], [])
    node = read.nodes["pool"]
    layouts = Layouts()
    view = OpView(node, StaticEvaluator(read), layouts, read.device)
    layouts.find(find_rule(node).anchors(view), [], [])
    with pytest.raises(NotTileableError, match="unknown image size"):
        find_rule(node).operand_rows_for_result(view, 0, Interval(np.array([0]), np.array([1])))


# The registry -----------------------------------------------------------------------------------------------


def test_add_rule_refuses_second_rule():
    with pytest.raises(ValueError, match="`Conv2D` already has a rule.*Remove one"):
        add_rule("Conv2D", Rule())
    with pytest.raises(ValueError, match="`MatMul` already has a rule"):
        add_rule("MatMul", Rule())
    with pytest.raises(ValueError, match="`Relu` already has a rule.*'because'"):
        not_tileable("because", "Relu")


def test_find_rule_reason_of_missing_and_not_tileable_differ():
    with pytest.raises(NotTileableError, match="no tiling rule for op type FancyNewOp"):
        find_rule(Node("n", "FancyNewOp"))
    with pytest.raises(NotTileableError, match="it mixes all pixels of an image"):
        find_rule(Node("n", "BatchMatMulV2"))


def test_registered_returns_copy():
    registered().clear()
    assert "Conv2D" in registered()


# Rules broken on purpose ------------------------------------------------------------------------------------


def one_row_up(method: Callable[..., Interval]) -> Callable[..., Interval]:
    return lambda self, rows: method(self, rows).shift(-1)


def wrong_padding(in_extent: int, span: int, stride: int) -> int:
    out = -(-in_extent // stride)
    return (max((out - 1) * stride + span - in_extent, 0) + 1) // 2  # The odd row before instead of after.


UP, OVERLAPPING = one_row_up(Window.rows_covered), one_row_up(Window.windows_overlapping)
BREAKS = [
    ("gather off by one", "Conv2D", (Window, "rows_covered", UP)),
    ("gather off by one", "MaxPoolGrad", (Window, "rows_covered", UP)),
    ("gather off by one", "Conv2DBackpropFilter", (Window, "rows_covered", UP)),
    ("touch off by one", "Conv2DBackpropInput", (Window, "windows_overlapping", OVERLAPPING)),
    ("SAME of the wrong side", "Conv2D", (convolution, "same_padding", wrong_padding)),
    ("SAME of the wrong side", "AvgPool", (convolution, "same_padding", wrong_padding)),
    ("zero instead of the lowest", "MaxPool", (pooling.MaxPool, "fill", 0.0)),
    ("divisor of VALID", "AvgPool", (pooling, "rescaled", lambda e, op, p, value, w: value)),
    ("rows of another tile", "BiasAddGrad", (tile_planner, "partition", lambda n, t: whole(n, t))),
]


@pytest.mark.parametrize(("what", "op_type", "change"), BREAKS, ids=[f"{b[1]}: {b[0]}" for b in BREAKS])
def test_case_detects_broken_rule(what, op_type, change, monkeypatch):
    stride = {"strides": [1, 2, 2, 1]} if "strides" in CASES[op_type]() else {}
    operands = CASES[op_type]() | stride
    if op_type in ("MaxPool", "AvgPool"):
        operands = {key: -np.abs(v) if isinstance(v, np.ndarray) else v for key, v in operands.items()}
    grid = Grid(1, (3, 3))
    assert not OneOp(op_type, operands).differing(grid)
    monkeypatch.setattr(*change)
    try:
        noticed = bool(OneOp(op_type, operands).differing(grid))
    except AssertionError as refused:
        noticed = "lacks rows" in str(refused)  # The planner's own check came first.
    assert noticed
