"""Ops in loop bodies: their order, and rows that a plan does not provide."""

from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf
from equivalence import Cut, find, keras_step, plan, rewrite_as
from nets import conv

import tflms_sft
from rewriters.emission.loop_tensors import batch_source
from rewriters.errors import RewriteError
from rewriters.ir.graph import Node
from rewriters.rules.intervals import Interval


def test_loop_that_holds_too_few_rows_is_refused():
    """Rows that are missing inside of the image would be padded, which is right only outside of it."""

    def planned(analysis):
        (segment,) = plans = plan(analysis, [Cut("input", "second", (3, 2))])
        regions, first = segment.loops[0].regions, find(analysis, "first")
        rows, columns = regions[first]
        regions[first] = Interval(rows.lo, rows.hi - 1), columns
        return plans

    def net(x):
        return conv(4, name="second")(conv(4, name="first")(x))

    with pytest.raises(RewriteError, match="fewer rows of `.*first.*` than an op in it reads, .* Please report it"):
        rewrite_as(keras_step(net, (12, 16), 2).concrete_fn, planned)


def test_numbers_are_constants_of_the_iteration():
    """TensorFlow then turns the cube into products, as in the original step."""

    def cubed(x):
        return keras.layers.Conv2D(4, 3)(keras.ops.power(conv(4)(x), 3.0))

    step = keras_step(cubed, (16, 16))
    rewritten = tflms_sft.rewrite(step.function, tflms_sft.SFTParams((2, 2)), *step.specs)
    exponents = [
        next((other.op for other in function.node_def if other.name == node.input[1].split(":")[0]), "argument")
        for function in rewritten.concrete_function.graph.as_graph_def().library.function
        for node in function.node_def
        if node.op == "Pow" and "gradient" not in node.name
    ]
    assert exponents and set(exponents) == {"Const"}


def test_loop_without_images_has_the_batch_size_of_its_device():
    """A loop that broadcasts a sum reads no image, and replicas may have batches of different sizes."""
    first, second = (
        Node(f"image{n}", "Placeholder", device=f"/CPU:{n}", outputs=[(tf.float32, (None, 8, 8, 3))]) for n in range(2)
    )
    segment = SimpleNamespace(entries=[first.out(), second.out()])
    broadcast = Node("mean", "Tile", device="/CPU:1", outputs=[(tf.float32, (None, 8, 8, 3))])
    assert batch_source(SimpleNamespace(reads=[], body=[broadcast]), segment) == second.out()
    assert batch_source(SimpleNamespace(reads=[first.out()], body=[broadcast]), segment) == first.out()
    elsewhere = Node("mean", "Tile", device="/CPU:2", outputs=[(tf.float32, (None, 8, 8, 3))])
    assert batch_source(SimpleNamespace(reads=[], body=[elsewhere]), segment) == first.out()
