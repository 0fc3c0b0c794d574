"""Cycles that only exist once TensorFlow has merged ops into one kernel."""

import itertools
import math

import keras
import pytest
import tensorflow as tf
from devices import ONEDNN
from equivalence import keras_step
from keras import layers
from swapping import swapped

import tflms_sft
from rewriters.device.merged_kernels import cycle_of_merged
from rewriters.ir.graph import Graph, Node
from rewriters.swapping import swap_pass

EDGE = [(tf.float32, (1,))]


@pytest.fixture(autouse=True)
def onednn(plan_with):
    """Plan as with oneDNN, whichever this machine has."""
    plan_with(**ONEDNN)


def cycle(*lines):
    """Return the cycle of a graph of lines `name = op(operands) after other ops`."""
    nodes = {}
    for line in lines:
        text, _, after = line.partition(" after ")
        name, _, call = text.partition(" = ")
        op, _, operands = call.rstrip(")").partition("(")
        inputs = [nodes[operand].out() for operand in operands.split()]
        nodes[name] = Node(name, op, inputs, control_inputs=[nodes[each] for each in after.split()], outputs=EDGE)
    return cycle_of_merged(Graph(nodes, [], [], list(nodes.values()), tf.compat.v1.GraphDef().library, None))


GRADIENTS = ("x = Relu()", "sizes = Const()", "dy = Relu()", "db = BiasAddGrad(dy)")
TWO = ("dw2 = Conv2DBackpropFilter(x sizes dy)",)


@pytest.mark.parametrize(
    ("lines", "is_cycle"),
    [
        ((*GRADIENTS, "back = Identity(x) after db", "dw = Conv2DBackpropFilter(back sizes dy)"), True),
        ((*GRADIENTS, "back = Identity(x) after dy", "dw = Conv2DBackpropFilter(back sizes dy)"), False),
        ((*GRADIENTS, "dw = Conv2DBackpropFilter(x sizes dy) after db"), False),
        ((*GRADIENTS, *TWO, "back = Identity(x) after db", "dw = Conv2DBackpropFilter(back sizes dy)"), True),
        ((*GRADIENTS, *TWO, "back = Identity(x) after x", "dw = Conv2DBackpropFilter(back sizes dy)"), False),
        (("x = Relu()", "conv = Conv2D(x x)", "back = Identity(x) after conv", "y = AddV2(conv back)"), True),
        (("x = Relu()", "conv = Conv2D(x x)", "back = Identity(x) after x", "y = AddV2(conv back)"), False),
        (("x = Relu()", "conv = Conv2D(x x)", "back = Identity(conv)", "y = AddV2(conv back)"), False),
        (("x = Relu()", "c = Conv2D(x x)", "r = Relu(c)", "back = Identity(x) after c", "y = AddV2(r back)"), True),
        (("x = Relu()", "c = Const()", "half = Mul(x c)", "dx = Sub(x x) after half", "y = Mul(half dx)"), False),
        (("x = Relu()", "dot = MatMul(x x)", "back = Identity(x) after dot", "y = AddV2(dot back)"), False),
    ],
    ids=(
        *(
            "bias first",
            "no path",
            "direct edge",
            "two filters",
            "two filters, no path",
            "fused",
            "fused, no path",
            "two readers",
            "fused chain",
        ),
        *("constant moved", "product that others wait for"),
    ),
)
def test_cycle_of_merged_ops_is_found(lines, is_cycle):
    assert bool(cycle(*lines)) is is_cycle


def test_budget_is_kept_by_tiles_if_swaps_would_close_a_cycle(monkeypatch):
    x = tf.random.normal((256, 2))
    model = keras.Sequential([keras.Input((2,)), *(layers.Dense(32, "tanh") for _ in range(3)), layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    step = tf.function(lambda x: model.train_step((x, x[:, :1])), autograph=False)
    whole = tflms_sft.rewrite(step, tflms_sft.AutoParams("1GiB"), x).plan.original.peak_bytes
    params = tflms_sft.AutoParams(int(0.6 * whole / 0.9), max_slowdown=math.inf)
    monkeypatch.setattr(swap_pass, "_add_unless_cyclic", lambda *_: None)
    cycles = itertools.chain.from_iterable(itertools.repeat(([], ["op"])))  # Before swaps, and with them.
    monkeypatch.setattr(swap_pass, "cycle_of_merged", lambda graph: next(cycles))
    with pytest.raises(tflms_sft.SwapError, match=r"TensorFlow would merge ops around \['op'\]"):
        tflms_sft.rewrite(step, tflms_sft.LMSParams(tier="disk", page_cache=True, min_bytes=1), x)
    plan = tflms_sft.rewrite(step, params, x).plan
    assert plan.segments and not plan.swaps


def branches(x):
    """Convolutions with biases, two of which read one tensor, as in the critic of a GAN."""
    for width in (8, 16, 8):
        y = layers.Conv2D(width, 3, padding="same")(layers.ReLU()(x))
        y = layers.AveragePooling2D(2)(layers.Conv2D(width, 3, padding="same")(layers.ReLU()(y)))
        x = layers.Add()([y, layers.AveragePooling2D(2)(layers.Conv2D(width, 1)(x))])
    return x


@pytest.mark.parametrize("strategy", ("chain_rule", "direct_order"))
@pytest.mark.parametrize("lb", (1, 3))
def test_swaps_close_no_cycle_of_merged_ops(strategy, lb):
    """Swap-ins, waits for releases and the order of large ops may lead from one gradient of a layer to the other."""
    step = keras_step(branches, (16, 16), 2, True, keras.optimizers.Adam())
    result = swapped(step, ctrld_strategy=strategy, lb=lb)
    assert result.plan.swaps and not cycle_of_merged(result.graph)
