"""Functions of loops as graphs: the number of iterations, shapes of a body, and a body written back."""

import numpy as np
import pytest
import tensorflow as tf

from rewriters.ir import tf_internals
from rewriters.ir.graph import LOOPS
from rewriters.ir.graph_reader import from_concrete_function
from rewriters.ir.loop_bodies import add_body, branch_runs, function_of, function_reads, num_iterations
from rewriters.ir.static_values import StaticEvaluator
from rewriters.ir.symbolic_dims import SymbolicDim


def loop_of(function, shape=(3, 4)):
    """Return a graph with one loop, and the loop."""
    traced = tf.function(function, input_signature=[tf.TensorSpec(shape)]).get_concrete_function()
    graph = from_concrete_function(traced)
    return graph, next(node for node in graph.nodes.values() if node.op in LOOPS)


def counted(function, shape=(3, 4)):
    graph, loop = loop_of(function, shape)
    initial = [StaticEvaluator(graph)(tensor) for tensor in loop.inputs]
    return num_iterations(function_of(graph, loop, "body"), function_of(graph, loop, "cond"), initial)


def loop(start, goes_on, change, **options):
    return lambda x: tf.while_loop(goes_on, lambda i, y: (change(i), tf.tanh(y)), (start, x), **options)[1]


@pytest.mark.parametrize(
    ("function", "count"),
    (
        (loop(0, lambda i, y: i < 5, lambda i: i + 1), 5),
        (loop(1, lambda i, y: i <= 6, lambda i: i + 2), 3),
        (loop(7, lambda i, y: i > 0, lambda i: i - 2), 4),
        (loop(7, lambda i, y: 0 <= i, lambda i: i - 1), 8),
        (loop(0, lambda i, y: i < 9, lambda i: i + 1, maximum_iterations=4), 4),
        (loop(0, lambda i, y: tf.reduce_sum(y) > 0, lambda i: i + 1, maximum_iterations=4), 4),
        (loop(0, lambda i, y: tf.reduce_sum(y) > 0, lambda i: i + 1), None),
        (loop(0, lambda i, y: i < tf.shape(y)[0], lambda i: i + 1), 3),
        (lambda x: tf.map_fn(tf.tanh, x), 3),
    ),
)
def test_num_iterations_counter_of_constants_is_counted(function, count):
    assert counted(function) == count


@pytest.mark.parametrize(
    ("condition", "runs"),
    (
        (lambda i, y: tf.equal(i % 3, 0), [2, 5]),
        (lambda i, y: tf.logical_and(i > 2, tf.logical_not(i >= 6)), [3, 4]),
        (lambda i, y: 2 * i - 1 < 4, [2, 5]),
        (lambda i, y: tf.reduce_sum(y) > 0, None),
        (lambda i, y: tf.logical_or(i > 2, tf.reduce_sum(y) > 0), None),
    ),
)
def test_branch_runs_condition_of_counter_is_evaluated(condition, runs):
    """The counter begins with 1 and runs to 7."""

    def step(x):
        def body(i, y):
            return i + 1, tf.cond(condition(i, y), lambda: tf.tanh(y), lambda: tf.sin(y))

        return tf.while_loop(lambda i, _: i < 8, body, (1, x))[1]

    graph, node = loop_of(step)
    initial = [StaticEvaluator(graph)(tensor) for tensor in node.inputs]
    found = branch_runs(function_of(graph, node, "body"), initial, 7)
    assert list(found.values()) == ([] if runs is None else [runs])


@pytest.mark.parametrize("index", (-1, 0, 5))
def test_branch_runs_index_out_of_range_runs_last_branch(index):
    def step(x):
        def body(i, y):
            return i + 1, tf.switch_case(i + index, [lambda: tf.tanh(y), lambda: tf.sin(y), lambda: tf.cos(y)])

        return tf.while_loop(lambda i, _: i < 4, body, (0, x))[1]

    graph, node = loop_of(step)
    initial = [StaticEvaluator(graph)(tensor) for tensor in node.inputs]
    (found,) = branch_runs(function_of(graph, node, "body"), initial, 4).values()
    assert found == {-1: [1, 1, 2], 0: [1, 1, 2], 5: [0, 0, 4]}[index]


def test_num_iterations_open_batch_is_symbol():
    assert isinstance(counted(lambda x: tf.map_fn(tf.tanh, x), (None, 4)), SymbolicDim)


def test_function_of_body_with_variable_has_shapes():
    weight = tf.Variable(tf.ones((4, 6)))
    graph, node = loop_of(lambda x: tf.map_fn(lambda row: tf.linalg.matvec(tf.transpose(weight), row), x))
    body = function_of(graph, node, "body")
    (read,) = [inner for inner in body.nodes.values() if inner.op == "ReadVariableOp"]
    assert read.out().shape == (4, 6)


def test_function_reads_operand_of_condition_is_found():
    graph, node = loop_of(loop(0, lambda i, y: tf.reduce_sum(y) > 0, lambda i: i + 1))
    position = next(number for number, tensor in enumerate(node.inputs) if tensor.shape == (3, 4))
    counter = next(number for number, tensor in enumerate(node.inputs) if tensor.dtype == tf.int32)
    assert function_reads(graph, node, "cond", position) and not function_reads(graph, node, "cond", counter)


def test_add_body_same_function_again_runs_the_same():
    graph, node = loop_of(loop(0, lambda i, y: i < 5, lambda i: i + 1))
    name = add_body(graph, function_of(graph, node, "body"), "again")
    other = add_body(graph, function_of(graph, node, "body"), "again")
    assert name != other and {name, other} <= {function.signature.name for function in graph.library.function}
    attr = tf.compat.v1.AttrValue()
    attr.func.name = name
    node.attrs["body"] = attr
    tf_internals.register_functions(graph.library)
    values = np.ones((3, 4), "float32")
    (result,) = tf.compat.v1.wrap_function(
        lambda x: tf.graph_util.import_graph_def(
            graph.to_graph_def(), input_map={graph.inputs[0].name: x}, return_elements=[t.name for t in graph.outputs]
        ),
        [tf.TensorSpec((3, 4))],
    )(tf.constant(values))
    want = values
    for _ in range(5):
        want = np.tanh(want)
    np.testing.assert_allclose(result, want, rtol=1e-6)
