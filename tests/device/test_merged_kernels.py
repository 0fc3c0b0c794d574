"""Cycles that only exist once TensorFlow has merged ops into one kernel."""

import keras
import pytest
import tensorflow as tf
from equivalence import keras_step
from keras import layers
from swapping import swapped

from rewriters.device import properties
from rewriters.device.merged_kernels import cycle_of_merged
from rewriters.ir.graph import Graph, Node

EDGE = [(tf.float32, (1,))]


@pytest.fixture(autouse=True)
def onednn(monkeypatch):
    """Plan as with oneDNN, whichever this machine has."""
    monkeypatch.setattr(properties, "merges_bias_gradients", lambda: True)


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


@pytest.mark.parametrize(
    ("lines", "is_cycle"),
    [
        ((*GRADIENTS, "back = Identity(x) after db", "dw = Conv2DBackpropFilter(back sizes dy)"), True),
        ((*GRADIENTS, "back = Identity(x) after dy", "dw = Conv2DBackpropFilter(back sizes dy)"), False),
        ((*GRADIENTS, "dw = Conv2DBackpropFilter(x sizes dy) after db"), False),
        (("x = Relu()", "conv = Conv2D(x x)", "back = Identity(x) after conv", "y = AddV2(conv back)"), True),
        (("x = Relu()", "conv = Conv2D(x x)", "back = Identity(x) after x", "y = AddV2(conv back)"), False),
        (("x = Relu()", "conv = Conv2D(x x)", "back = Identity(conv)", "y = AddV2(conv back)"), False),
        (("x = Relu()", "c = Conv2D(x x)", "r = Relu(c)", "back = Identity(x) after c", "y = AddV2(r back)"), True),
    ],
    ids=("bias first", "no path", "direct edge", "fused", "fused, no path", "two readers", "fused chain"),
)
def test_cycle_of_merged_ops_is_found(lines, is_cycle):
    assert bool(cycle(*lines)) is is_cycle


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
