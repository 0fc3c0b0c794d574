"""Graphs with tile loops as text: the ops around the loops, and the bodies."""

import re

import pytest
import tensorflow as tf
from equivalence import Cut, plan
from graph_rewrites import assert_lines, new_lines

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize.canonicalize import read_canonical
from rewriters.emission import file_buffers, tile_pass
from rewriters.ir.loop_bodies import function_of
from rewriters.ir.text import graph_text

pytestmark = pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="loops on a GPU have other ops")


def tiled(*cuts, files=None):
    """Return the text of a step of two convolutions, and its graph with tile loops."""
    shapes = {"w1": (3, 3, 2, 2), "b": (2,), "w2": (3, 3, 2, 2)}
    weights = {name: tf.Variable(tf.ones(shape, tf.float64), name=name) for name, shape in shapes.items()}
    last = tf.Variable(0.0, dtype=tf.float64)

    def step(x):
        with tf.GradientTape() as tape:
            y = tf.nn.bias_add(tf.nn.conv2d(x, weights["w1"], 1, "SAME"), weights["b"])
            y = tf.nn.conv2d(tf.nn.relu(y, "one"), weights["w2"], 1, "SAME", name="two")
            loss = tf.reduce_sum(y, name="loss")
        last.assign(loss, name="metric")
        for name, gradient in tape.gradient(loss, weights).items():
            weights[name].assign_sub(gradient, name=f"update_{name}")

    function = tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec((2, 8, 8, 2), tf.float64))
    analysis = GraphAnalysis(read_canonical(function))
    return graph_text(analysis.graph), tile_pass.tile_segments(analysis, plan(analysis, cuts), files)


def images_in_body(graph):
    """Return the lines of the backward loop's body that compute numbers of floating point."""
    lines = graph_text(function_of(graph, graph.nodes["sft/segment0/backward/while"], "body")).splitlines()
    return [line for line in lines if " = float64[" in line]


def test_tile_pass_loops_of_two_segments_wait_for_each_other_and_for_updates_between_them():
    before, graph = tiled(Cut("input", "one", (2, 1)), Cut("one", "two", (2, 1)))
    lines = new_lines(before, graph_text(graph, bodies=False))
    assert_lines(
        [line for line in lines if "StatelessWhile" not in line],
        """
        sft/segment1/forward/Empty = float64[2,8,8,2] Empty([2, 8, 8, 2]) after [sft/segment1/forward/start]
        sft/segment0/forward/Empty = float64[2,8,8,2] Empty([2, 8, 8, 2]) after [sft/segment0/forward/start]
        loss = float64[] Sum(sft/segment1/forward/while:3, [0, 1, 2, 3])
        sft/segment0/backward/Empty = float64[2] Empty([2]) {init=True} after [sft/segment0/backward/start]
        sft/segment0/backward/Empty_1 = float64[3,3,2,2] Empty([3, 3, 2, 2]) {init=True} after
              [sft/segment0/backward/start]
        sft/segment1/backward/Empty = float64[2,8,8,2] Empty([2, 8, 8, 2]) {init=True} after
              [sft/segment1/backward/start]
        sft/segment1/backward/Empty_1 = float64[3,3,2,2] Empty([3, 3, 2, 2]) {init=True} after
              [sft/segment1/backward/start]
        update_w1 = AssignSubVariableOp(Conv2D/ReadVariableOp/resource, sft/segment0/backward/while:4) after
              [Conv2D/ReadVariableOp]
        update_b = AssignSubVariableOp(BiasAdd/ReadVariableOp/resource, sft/segment0/backward/while:3) after
              [BiasAdd/ReadVariableOp]
        update_w2 = AssignSubVariableOp(two/ReadVariableOp/resource, sft/segment1/backward/while:4) after
              [two/ReadVariableOp]
        sft/segment0/forward/start = NoOp()
        sft/segment0/backward/start = NoOp() after [sft/segment0/forward/while, sft/segment1/backward/while, update_w2]
        sft/segment1/forward/start = NoOp() after [sft/segment0/forward/while]
        sft/segment1/backward/start = NoOp() after [gradient_tape/Reshape, sft/segment0/forward/while,
              sft/segment1/forward/while]
    """,
    )


def test_tile_pass_body_recomputes_rows_of_neighbouring_tiles():
    _, graph = tiled(Cut("input", "two", (2, 1)))
    assert_lines(
        images_in_body(graph),
        """
        while/StridedSlice = float64[2,?,8,2] StridedSlice(Placeholder_7, while/stack, while/stack_1, [1, 1, 1, 1])
                {begin_mask=13, end_mask=13}
        while/PadV2 = float64[?,?,?,?] PadV2(while/StridedSlice, while/Reshape, float64:0.0)
        while/Conv2D = float64[?,?,?,2] Conv2D(while/PadV2, Placeholder_8) {padding="VALID", strides=[1, 1, 1, 1]}
        while/BiasAdd = float64[?,?,?,2] BiasAdd(while/Conv2D, Placeholder_9)
        while/one = float64[?,?,?,2] Relu(while/BiasAdd)
        while/Reshape_1 = float64[] Reshape(Placeholder_10, [])
        while/Fill = float64[2,4,8,2] Fill([2, 4, 8, 2], while/Reshape_1)
        while/gradient_tape/Conv2DBackpropInput = float64[2,6,10,2] Conv2DBackpropInput(while/stack_4, Placeholder_11,
                while/Fill) {padding="VALID", strides=[1, 1, 1, 1]}
        while/StridedSlice_1 = float64[2,?,?,2] StridedSlice(while/gradient_tape/Conv2DBackpropInput, while/stack_5,
                while/stack_6, [1, 1, 1, 1]) {begin_mask=9, end_mask=9}
        while/zeros_1 = float64[] Const() {value=0.0} after [while/Fill]
        while/PadV2_1 = float64[?,?,?,?] PadV2(while/one, while/Reshape_2, while/zeros_1)
        while/gradient_tape/Conv2DBackpropFilter = float64[?,?,?,?] Conv2DBackpropFilter(while/PadV2_1, Placeholder_12,
                while/Fill) {padding="VALID", strides=[1, 1, 1, 1]}
        while/gradient_tape/ReluGrad = float64[2,?,?,2] ReluGrad(while/StridedSlice_1, while/one)
        while/gradient_tape/BiasAdd/BiasAddGrad = float64[2] BiasAddGrad(while/gradient_tape/ReluGrad)
        while/gradient_tape/Conv2DBackpropFilter_1 = float64[?,?,?,?] Conv2DBackpropFilter(while/PadV2, Placeholder_13,
                while/gradient_tape/ReluGrad) {padding="VALID", strides=[1, 1, 1, 1]} after
                [while/gradient_tape/Conv2DBackpropFilter, while/gradient_tape/Conv2DBackpropInput]
        while/Add_9 = float64[3,3,2,2] AddV2(Placeholder_3, while/gradient_tape/Conv2DBackpropFilter)
        while/Add_10 = float64[2] AddV2(Placeholder_4, while/gradient_tape/BiasAdd/BiasAddGrad)
        while/Add_11 = float64[3,3,2,2] AddV2(Placeholder_5, while/gradient_tape/Conv2DBackpropFilter_1)
    """,
    )


def test_tile_pass_body_carries_rows_of_neighbouring_tiles():
    _, graph = tiled(Cut("input", "two", (2, 1), halo="carry"))
    assert_lines(
        [line for line in images_in_body(graph) if re.search("StridedSlice|Inplace", line)],
        """
        while/StridedSlice = float64[2,?,8,2] StridedSlice(Placeholder_8, while/stack, while/stack_1, [1, 1, 1, 1])
                {begin_mask=13, end_mask=13}
        while/PadV2 = float64[?,?,?,?] PadV2(while/StridedSlice, while/Reshape, float64:0.0)
        while/InplaceAdd = float64[120,2] InplaceAdd(while/Reshape_4, while/Reshape_3, while/Reshape_5)
        while/Reshape_6 = float64[2,6,10,2] Reshape(while/InplaceAdd, [2, 6, 10, 2])
        while/StridedSlice_1 = float64[2,?,?,2] StridedSlice(while/Reshape_6, while/stack_8, while/stack_9,
                [1, 1, 1, 1]) {begin_mask=9, end_mask=9}
        while/StridedSlice_2 = float64[2,?,?,2] StridedSlice(while/Reshape_6, while/stack_10, while/stack_11,
                [1, 1, 1, 1]) {begin_mask=9, end_mask=9}
        while/StridedSlice_3 = float64[?,?,?,?] StridedSlice(while/PadV2_1, while/stack_13, while/stack_14,
                while/StridedSlice_3/strides) {begin_mask=9, end_mask=9}
        while/gradient_tape/ReluGrad = float64[2,?,?,2] ReluGrad(while/StridedSlice_1, while/StridedSlice_3)
        while/StridedSlice_4 = float64[2,?,8,2] StridedSlice(while/StridedSlice, while/stack_15, while/stack_16,
                while/StridedSlice_4/strides) {begin_mask=13, end_mask=13}
        while/PadV2_2 = float64[?,?,?,?] PadV2(while/StridedSlice_4, while/Reshape_8, while/zeros_2)
    """,
    )


def test_tile_pass_results_of_loops_lie_in_files(set_min_file_bytes):
    set_min_file_bytes(0)
    before, graph = tiled(Cut("input", "one", (2, 1)), files=file_buffers.FileBuffers("/tmp", 2))
    lines = new_lines(before, graph_text(graph))
    assert_lines(
        [line for line in lines if "PyFunc" in line or " metric = " in line or " update_w2" in line],
        """
        sft/segment0/forward/PyFunc/input_0 = string[] Const() {value=#3b461a5f} on /job:localhost/replica:0/task:0
        sft/segment0/forward/PyFunc = float64[...] PyFunc(sft/segment0/forward/PyFunc/input_0, [2, 8, 8, 2]) after
              [sft/segment0/forward/start] on /job:localhost/replica:0/task:0
        sft/segment0/forward/EnsureShape = float64[2,8,8,2] EnsureShape(sft/segment0/forward/PyFunc) {shape=[2,8,8,2]}
        while/PyFunc = int64[...] PyFunc() after [while/Reshape_4] on /job:localhost/replica:0/task:0
        while/Identity = float64[2,8,8,2] Identity(while/Reshape_4) after [while/PyFunc]
        metric = AssignVariableOp(metric/resource, loss) {validate_shape=True} after [sft/segment0/forward/while]
        while/PyFunc = int64[...] PyFunc() after [while/Add_8, while/Add_9] on /job:localhost/replica:0/task:0
        while/Identity = float64[2] Identity(while/Add_8) after [while/PyFunc]
        update_w2 = AssignSubVariableOp(two/ReadVariableOp/resource, gradient_tape/Conv2DBackpropFilter) after
              [sft/segment0/forward/while, two/ReadVariableOp]
        sft/segment0/backward/start = NoOp() after [gradient_tape/Conv2DBackpropInput, sft/segment0/forward/while,
              update_w2]
    """,
    )
