"""Static evaluation equals TensorFlow."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import keras_step
from hypothesis import given, settings
from hypothesis import strategies as st

from rewriters.ir import tf_internals
from rewriters.ir.graph import Node
from rewriters.ir.graph_reader import from_concrete_function
from rewriters.ir.static_values import StaticEvaluator, constant
from rewriters.ir.symbolic_dims import SymbolicDim

SIZE = 5
"""Batch size at run time."""


def known(value, batch=SIZE):
    """Return an evaluated value as nested lists, with the batch size for symbols."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple):
        return [known(v, batch) for v in value]
    return batch if isinstance(value, SymbolicDim) else value


def evaluated(function, *specs):
    """Return the evaluator's values of the results of `function`."""
    concrete_fn = tf.function(function, autograph=False).get_concrete_function(*specs)
    graph = from_concrete_function(concrete_fn)
    evaluate = StaticEvaluator(graph)
    return [evaluate(t) for t in graph.outputs], concrete_fn


def shape_of(x):
    return tf.raw_ops.Shape(input=x)


def strided(x, begin, end, **masks):
    return tf.raw_ops.StridedSlice(input=x, begin=[begin], end=[end], strides=[1], **masks)


MATRIX = np.arange(8, dtype="int32").reshape(4, 2)

EXPRESSIONS = {
    "Shape": lambda s, x: s,
    "ShapeN": lambda s, x: tf.raw_ops.ShapeN(input=[x[:, 0], x])[1],
    "Identity": lambda s, x: tf.identity(s),
    "Cast": lambda s, x: tf.cast(s, tf.int64),
    "StridedSlice, one": lambda s, x: strided(s, 2, 3, shrink_axis_mask=1),
    "StridedSlice, batch": lambda s, x: strided(s, 0, 1, shrink_axis_mask=1),
    "StridedSlice, last": lambda s, x: strided(s, -1, 0, shrink_axis_mask=1),
    "StridedSlice, head": lambda s, x: strided(s, 0, 2),
    "StridedSlice, masks": lambda s, x: strided(s, 1, 1, begin_mask=1, end_mask=1),
    "StridedSlice, backwards": lambda s, x: s[::-1],
    "Slice": lambda s, x: tf.raw_ops.Slice(input=s, begin=[1], size=[2]),
    "Slice to the end": lambda s, x: tf.raw_ops.Slice(input=s, begin=[2], size=[-1]),
    "Slice of a matrix": lambda s, x: tf.raw_ops.Slice(input=MATRIX, begin=[1, 0], size=[2, -1]),
    "Gather": lambda s, x: tf.gather(s, [3, 0]),
    "Gather one": lambda s, x: tf.gather(s, 1),
    "Pack": lambda s, x: tf.raw_ops.Pack(values=[s[0], 7, s[2]]),
    "Pack of vectors": lambda s, x: tf.reshape(tf.stack([s[:2], s[2:]]), [-1]),
    "Pack of vectors, interleaved": lambda s, x: tf.reshape(tf.stack([s[:2], s[2:]], axis=1), [-1]),
    "Pack of vectors, from the end": lambda s, x: tf.reshape(tf.stack([s[:2], s[2:]], axis=-1), [-1]),
    "Concat": lambda s, x: tf.raw_ops.ConcatV2(values=[s[:1], [3], s[2:]], axis=0),
    "Concat of matrices": lambda s, x: tf.reshape(tf.concat([tf.constant(MATRIX), tf.constant(MATRIX)], 1), [16]),
    "Paddings in the gradient of a slice": lambda s, x: tf.reshape(
        tf.raw_ops.ConcatV2(values=[tf.reshape([0, 1, 2, 0], [4, 1]), tf.reshape(s - s, [4, 1])], axis=1), [8]
    ),
    "Reshape to a scalar": lambda s, x: tf.reshape(s[1:2], []),
    "Reshape to a vector": lambda s, x: tf.reshape(s[0], [1]),
    "Reshape of a matrix": lambda s, x: tf.reshape(tf.constant(MATRIX), [8]),
    "Prod": lambda s, x: tf.reduce_prod(s[1:]),
    "Prod with ones and a batch": lambda s, x: tf.reduce_prod(tf.concat([s[:1], [1, 1]], 0)),
    "Prod over no axes": lambda s, x: tf.raw_ops.Prod(input=s[1:], axis=tf.zeros([0], tf.int32)),
    "Prod of nothing": lambda s, x: tf.reduce_prod(s[4:]),
    "Add": lambda s, x: tf.raw_ops.Add(x=s[1:], y=3),
    "AddV2": lambda s, x: tf.raw_ops.AddV2(x=s[1:], y=s[1:]),
    "Sub": lambda s, x: s[1:] - [1, 2, 3],
    "Sub of the batch from itself": lambda s, x: s - s,
    "Mul": lambda s, x: 2 * s[2],
    "FloorDiv": lambda s, x: (s[1:] - 9) // 4,
    "FloorMod": lambda s, x: (s[1:] - 9) % 4,
    "Maximum": lambda s, x: tf.maximum(s[1:], 6),
    "Minimum": lambda s, x: tf.minimum(6, s[1:]),
    "Range": lambda s, x: tf.range(s[3], s[2], 2),
    "Fill": lambda s, x: tf.fill(s[3:], s[1]),
    "ConcatOffset": lambda s, x: tf.raw_ops.ConcatOffset(concat_dim=3, shape=[s, s, s])[2],
    "ConcatOffset, from the end": lambda s, x: tf.raw_ops.ConcatOffset(concat_dim=-1, shape=[s, s])[1],
}


@pytest.mark.parametrize("name", EXPRESSIONS)
@pytest.mark.parametrize("batch", [SIZE, None], ids=["known", "unknown"])
def test_static_evaluator_equals_tensorflow(name, batch):
    spec = tf.TensorSpec((batch, 9, 8, 2), tf.float32)
    (value,), concrete_fn = evaluated(lambda x: EXPRESSIONS[name](shape_of(x), x), spec)
    want = np.array(concrete_fn(tf.zeros((SIZE, 9, 8, 2)))).tolist()
    assert known(value) == want


UNKNOWN = {
    "arithmetic on the batch": lambda s, x: s + 1,
    "product with the batch": lambda s, x: tf.reduce_prod(s),
    "two operands of the batch": lambda s, x: s[0] // 2,
    "a number from data": lambda s, x: tf.cast(x[0, 0, 0, 0], tf.int32),
    "a float": lambda s, x: tf.constant(1.5) + 0 * x[0, 0, 0, 0],
    "a range up to the batch": lambda s, x: tf.range(s[0]),
    "division by zero": lambda s, x: s[1] // (s[1] - 9),
    "the end of a vector": lambda s, x: tf.gather(s, s[1]),
    "a matrix of one number": lambda s, x: tf.fill([4, 2], s[1]),
    "a product of a matrix": lambda s, x: tf.reduce_prod(tf.constant(MATRIX)),
    "a column": lambda s, x: tf.gather(tf.constant(MATRIX), 1, axis=1),
    "another axis": lambda s, x: tf.raw_ops.StridedSlice(input=s, begin=[0], end=[4], strides=[1], new_axis_mask=1),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_static_evaluator_unknown_value_is_none(name):
    spec = tf.TensorSpec((None, 9, 8, 2), tf.float32)
    (value,), _ = evaluated(lambda x: UNKNOWN[name](shape_of(x), x), spec)
    assert value is None


def test_static_evaluator_unknown_inner_size_is_not_batch():
    (value, first), _ = evaluated(lambda x: (shape_of(x), shape_of(x)[0]), tf.TensorSpec((None, None, 3), tf.float32))
    assert isinstance(first, SymbolicDim) and value == (first, None, 3)


def test_ints_of_partly_known_vector_is_none():
    (_,), concrete_fn = evaluated(lambda x: shape_of(x), tf.TensorSpec((None, 3), tf.float32))
    graph = from_concrete_function(concrete_fn)
    evaluate = StaticEvaluator(graph)
    assert evaluate.ints(graph.outputs[0]) is None
    assert evaluate.shape(graph.inputs[0]) == (evaluate.sizes.of(graph.inputs[0]), 3)
    (_,), concrete_fn = evaluated(lambda x: shape_of(x), tf.TensorSpec((2, 3), tf.float32))
    graph = from_concrete_function(concrete_fn)
    assert StaticEvaluator(graph).ints(graph.outputs[0]) == (2, 3)


def test_large_constant_is_not_evaluated():
    (value,), _ = evaluated(lambda: tf.zeros([65], tf.int32))
    assert value is None
    assert constant(Node("n", "NoOp")) is None


@st.composite
def broadcast_shapes(draw):
    """Draw two shapes that broadcast against each other."""
    out = draw(st.lists(st.sampled_from([2, 3]), max_size=4))
    shapes = []
    for _ in range(2):
        rank = draw(st.integers(0, len(out)))
        shapes.append(tuple(draw(st.sampled_from([1, size])) for size in out[len(out) - rank :]))
    return shapes


def gradient_axes(shapes, batch_known=True):
    """Return evaluated and true axes over which the gradients of two operands are summed."""
    specs = [tf.TensorSpec(shape if batch_known else (None, *shape[1:]), tf.float32) for shape in shapes]
    values, concrete_fn = evaluated(
        lambda x, y: tf.raw_ops.BroadcastGradientArgs(s0=shape_of(x), s1=shape_of(y)), *specs
    )
    return values, [tuple(v.numpy().tolist()) for v in concrete_fn(*(tf.zeros(shape) for shape in shapes))]


@settings(deadline=None, max_examples=60, derandomize=True)
@given(broadcast_shapes())
def test_broadcast_gradient_args_equal_tensorflow(shapes):
    values, want = gradient_axes(shapes)
    rank = max(map(len, shapes))
    sizes = np.array([(1,) * (rank - len(shape)) + shape for shape in shapes]).reshape(2, rank)
    # TensorFlow also sums over axes of size 1 on both sides, which changes nothing.
    idle = {axis for axis in range(rank) if np.all(sizes[:, axis] == 1)}
    assert [set(value) - idle for value in values] == [set(axes) - idle for axes in want]


@pytest.mark.parametrize(
    ("shapes", "axes"),
    [
        ([(SIZE, 4, 3), (SIZE, 4, 3)], [(), ()]),
        ([(SIZE, 4, 3), (SIZE, 1, 3)], [(), (1,)]),
        ([(SIZE, 1, 3), (SIZE, 4, 1)], [(1,), (2,)]),
    ],
)
def test_broadcast_gradient_of_equal_batches_needs_no_sum(shapes, axes):
    values, want = gradient_axes(shapes, batch_known=False)
    assert values == axes and want == axes


@pytest.mark.parametrize("other", [(1, 4, 3), (3,), (4, 1), ()])
def test_broadcast_gradient_of_batch_and_one_needs_sum(other):
    specs = [tf.TensorSpec((None, 4, 3), tf.float32), tf.TensorSpec(other, tf.float32)]
    values, concrete_fn = evaluated(
        lambda x, y: tf.raw_ops.BroadcastGradientArgs(s0=shape_of(x), s1=shape_of(y)), *specs
    )
    want = concrete_fn(tf.zeros((SIZE, 4, 3)), tf.zeros(other))
    assert [list(v) for v in values] == [w.numpy().tolist() for w in want]


def fetched(concrete_fn, graph, tensors, arguments):
    """Return TensorFlow's values of tensors inside of a step."""
    graph = graph.copy()
    graph.outputs = [graph.nodes[t.node.name].out(t.index) for t in tensors]
    graph.keep = []
    graph.prune()

    @tf.function(autograph=False)
    def run(*args):
        captured = [tf_internals.default_func_graph().capture(t) for t in concrete_fn.captured_inputs]
        fed = zip(graph.inputs, [*args, *captured], strict=True)
        return tf.graph_util.import_graph_def(
            graph.to_graph_def(), {t.name: v for t, v in fed}, [t.name for t in graph.outputs], ""
        )

    return run(*map(tf.constant, arguments))


@pytest.mark.parametrize("batch_known", [True, False], ids=["known", "unknown"])
def test_static_values_of_training_step_equal_run_time_values(batch_known):
    def net(x):
        x = keras.layers.Conv2D(4, 3, activation="silu")(x)
        y = keras.layers.Conv2DTranspose(4, 3, padding="same")(x)
        x = keras.layers.Concatenate()([x, y, keras.layers.Dropout(0.5)(x)])
        return keras.layers.LayerNormalization()(x)

    step = keras_step(net, (9, 10), SIZE, batch_known, keras.optimizers.Adam(global_clipnorm=1.0))
    graph = from_concrete_function(step.concrete_fn)
    evaluate = StaticEvaluator(graph)
    tensors = [
        node.out(index)
        for node in graph.nodes.values()
        for index in range(len(node.outputs))
        if node.op not in ("Const", "Placeholder") and node.outputs[index][0].is_integer
    ]
    values = {t: evaluate(t) for t in tensors}
    found = [t for t, value in values.items() if value is not None and None not in np.ravel(known(value))]
    assert len(found) > 10
    for tensor, want in zip(found, fetched(step.concrete_fn, graph, found, step.batches[0]), strict=True):
        assert known(values[tensor]) == want.numpy().tolist(), tensor.name
