"""A graph as text: one line for each op, in the order of the program; equal graphs have equal texts."""

import re

import numpy as np
import pytest
import tensorflow as tf
from graph_text import parsed

from rewriters.ir.graph import LoopName, Metadata, Node
from rewriters.ir.graph_reader import from_concrete_function
from rewriters.ir.text import graph_text, op_line

STEP = """graph(
  x: float32[2,8,8,3],
  kernel: resource of float32[3,3,3,4],
):
  read = float32[3,3,3,4] ReadVariableOp(kernel)
  conv = float32[2,8,8,4] Conv2D(x, read) {padding="SAME", strides=[1, 1, 1, 1]}
  mean = float32[1,1,1,4] Mean(conv, [0, 1, 2]) {keep_dims=True} after [read] on GPU:0
  both = (float32[4], int32[4]) TopKV2(mean, 3)
  open = float32[?,4] AddN(both, both) {N=2}
  wait = NoOp() after [conv, open]
  assign = AssignSubVariableOp(kernel, read) after [wait]
  effects assign
  return open, float64:0.5, both:1
"""


def traced(function, *specs):
    return from_concrete_function(tf.function(function, autograph=False).get_concrete_function(*specs))


def test_graph_text_shows_each_part_of_an_op():
    assert graph_text(parsed(STEP)) == STEP


def test_graph_text_new_op_stands_above_its_first_consumer():
    graph = parsed(STEP)
    conv = graph.nodes["conv"]
    copy = graph.add(
        Node("copy", "Identity", [conv.inputs[0]], attrs=dict(conv.attrs), outputs=conv.inputs[0].node.outputs)
    )
    conv.inputs[0] = copy.out()
    lines = graph_text(graph).splitlines()
    assert [line.split()[0] for line in lines[4:7]] == ["read", "copy", "conv"]


def test_graph_text_metadata_are_a_comment_that_op_line_lacks():
    node = parsed(STEP).nodes["conv"]
    node.metadata = Metadata("conv_1", "forward", 2, LoopName("segment1", "forward", "4x1"))
    assert str(node.metadata) == "layer conv_1, forward, stage 2, tile loop segment1/forward 4x1"
    assert op_line(node) == 'conv = float32[2,8,8,4] Conv2D(x, read) {padding="SAME", strides=[1, 1, 1, 1]}'


@pytest.mark.parametrize(("value", "literal"), [(2, "2"), ([0.5, 1.0], "[0.5, 1.0]"), (np.int64(3), "int64:3")])
def test_graph_text_small_constants_stand_in_the_place_of_operands(value, literal):
    graph = traced(lambda: tf.identity(tf.constant(value), "out"))
    assert f"Identity({literal})" in graph_text(graph)
    assert "Const()" in graph_text(graph, inline_constants=False)


def test_graph_text_large_constants_differ_by_a_hash():
    texts = [graph_text(traced(lambda v=v: tf.identity(np.full(100, v)))) for v in (1.0, 1.0, 2.0)]
    assert texts[0] == texts[1] != texts[2]
    assert re.search(r"Const\(\) \{value=#[0-9a-f]{8}\}", texts[0])


def test_graph_text_long_lists_of_control_inputs_are_cut_with_a_hash_of_all():
    def waiting(number):
        def function(x):
            before = [tf.raw_ops.NoOp(name=f"before_{index}") for index in range(number)]
            with tf.control_dependencies(before):
                return tf.identity(x)

        return graph_text(traced(function, tf.TensorSpec((), "float32")))

    assert "after [before_0, before_1, before_10, before_11 and 16 more #" in waiting(20)
    assert re.search(r"\n  #[0-9a-f]{8}: before_0, before_1, .*before_9\n", waiting(20))


def test_graph_text_body_of_a_loop_stands_below_it_with_initial_values():
    def function(x):
        return tf.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a * 2.0), [tf.constant(0), x])

    lines = [line.strip() for line in graph_text(traced(function, tf.TensorSpec((4,), "float32"))).splitlines()]
    body = lines[lines.index("body(") :]
    assert any(re.fullmatch(r"\S+: float32\[4\] = x,", line) for line in body)
    assert any(re.fullmatch(r"\S+ = float32\[4\] Mul\(\S+, 2.0\)", line) for line in body)


def test_graph_text_names_of_functions_do_not_occur():
    def function(x):
        return tf.cond(tf.reduce_sum(x) > 0, lambda: x * 2.0, lambda: x - 1.0)

    spec = tf.TensorSpec((4,), "float32")
    first, second = traced(function, spec), traced(function, spec)
    assert first.to_graph_def() != second.to_graph_def()
    assert graph_text(first) == graph_text(second)
    assert "branch_0(" in graph_text(first) and "Sub(" in graph_text(first)


def test_graph_text_cycle_is_shown():
    graph = parsed(STEP)
    graph.nodes["read"].control_inputs = [graph.nodes["assign"]]
    lines = graph_text(graph).splitlines()
    assert len(lines) == len(STEP.splitlines()) and "ReadVariableOp(kernel) after [assign]" in graph_text(graph)
