"""Values that stay small, and values that are made late: the same bits from a graph that needs less."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import Cut, Step, differing, keras_step, rewrite
from graph_changes import changed
from keras import layers

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize import canonicalize
from rewriters.ir.graph import ancestors
from rewriters.scheduling.delay_early_ops import DelayEarlyOps, earliest_forward_level
from rewriters.swapping.shrink_broadcasts import ShrinkBroadcasts

RNG = np.random.default_rng(0)


def of(function, *shapes, known=True, dtype="float64"):
    """A step of a function of arrays."""
    specs = [tf.TensorSpec(shape if known else (None, *shape[1:]), dtype) for shape in shapes]
    batches = [[RNG.normal(size=shape).astype(dtype) for shape in shapes]] * 2
    return Step(tf.function(function).get_concrete_function(*specs), [], batches)


def whole(graph, op):
    """Results of a type of operation that are as large as an image."""
    shapes = [node.outputs[0][1] for node in graph.nodes.values() if node.op == op]
    return [shape for shape in shapes if shape and len(shape) == 4 and shape[1] != 1]


@pytest.mark.parametrize("dtype", ("float64", "float32"))
@pytest.mark.parametrize("known", (True, False), ids=("known", "unknown"))
def test_normalisation_in_training_mode_repeats_nothing(known, dtype):
    def net(x):
        x = layers.BatchNormalization()(layers.Conv2D(4, 3)(x))
        return layers.Conv2D(4, 3)(layers.LayerNormalization()(layers.ReLU()(x)))

    keras.config.set_floatx(dtype)
    step = keras_step(net, (12, 16), 2, known, keras.optimizers.Adam(), steps=4)
    before = canonicalize.read_canonical(step.concrete_fn)
    graph, same = changed(step, lambda analysis: ShrinkBroadcasts(lambda _: analysis))
    assert same
    for op, fewer in (("Tile" if known else "BroadcastTo", 2), ("RealDiv", 2), ("AddN", 1)):
        assert len(whole(before, op)) - len(whole(graph, op)) >= fewer, op


@pytest.mark.parametrize("known", (True, False), ids=("known", "unknown"))
@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x + tf.broadcast_to(tf.reduce_mean(x, (1, 2), keepdims=True), tf.shape(x)) / 3.0,
        lambda x, y: x * tf.tile(tf.reduce_sum(x, (0, 1, 2), keepdims=True), (tf.shape(x)[0], 4, 5, 1)),
        lambda x, y: tf.fill(tf.shape(x), tf.reduce_sum(y)) - x,
        lambda x, y: tf.add_n([tf.fill(tf.shape(x), tf.reduce_sum(y)), tf.exp(x)]),
        lambda x, y: tf.add_n([tf.fill(tf.shape(x), tf.reduce_sum(y)), tf.exp(x), tf.abs(y), tf.math.sign(x)]),
        lambda x, y: tf.fill(tf.shape(x), tf.reduce_sum(y)) ** 2 + x,
        lambda x, y: tf.maximum(tf.cast(tf.fill((4, 5, 2), tf.reduce_sum(y)), x.dtype), x),
    ],
)
def test_an_operation_that_repeats_its_operands_reads_them_small(function, known):
    step = of(function, (3, 4, 5, 2), (3, 4, 5, 2), known=known)
    graph, same = changed(step, lambda analysis: ShrinkBroadcasts(lambda _: analysis))
    assert same
    assert not any(node.op in ("Fill", "Tile", "BroadcastTo", "AddN") for node in graph.nodes.values())


@pytest.mark.parametrize(
    "function",
    [
        lambda x: tf.tile(x, (1, 2, 1, 1)) + 1.0,
        lambda x: tf.nn.conv2d(tf.fill((2, 4, 4, 1), tf.reduce_sum(x)), tf.ones((3, 3, 1, 1), x.dtype), 1, "SAME"),
        lambda x: tf.reduce_sum(tf.fill((7, 7), tf.reduce_sum(x)) * 2.0),
        lambda x: tf.fill((2, 3), tf.reduce_sum(x)),
        lambda x: tf.fill((2, 3), tf.reduce_sum(x)) + tf.fill((3,), tf.reduce_sum(x)),
        lambda x: tf.add_n([x, x + tf.fill(tf.shape(x), tf.reduce_sum(x)), x * x]) + 1.0,
        lambda x: x * 3.0 + (tf.fill(tf.shape(x), tf.reduce_sum(x)) + tf.exp(x)),
        lambda x: tf.concat([x, tf.fill(tf.shape(x), tf.reduce_sum(x)) * 3.0], -1),
    ],
)
def test_who_needs_the_whole_has_it(function):
    step = of(function, (2, 4, 4, 1))
    graph, same = changed(step, lambda analysis: ShrinkBroadcasts(lambda _: analysis))
    assert same and any(node.op in ("Tile", "Fill") for node in graph.nodes.values())


def test_sizes_that_may_differ_are_not_taken_for_equal():
    """One row of a gather is repeated to all rows of the other: what is small then is known only when it runs."""
    step = of(lambda x: (tf.gather(x, [1]) + tf.fill((1, 2), x[0, 0])) * x, (3, 2), known=False)
    _, same = changed(step, lambda analysis: ShrinkBroadcasts(lambda _: analysis))
    assert same


def test_order_is_kept():
    variable = tf.Variable(1.0, dtype="float64")

    def function(x):
        before = variable.read_value()
        with tf.control_dependencies([before]):
            repeated = tf.fill(tf.shape(x), tf.reduce_sum(x))
        with tf.control_dependencies([repeated]):
            variable.assign_add(tf.reduce_sum(x))
        return repeated / 2.0 + x * before

    step = of(function, (2, 3))
    step = Step(step.concrete_fn, [variable], step.batches)
    graph, same = changed(step, lambda analysis: ShrinkBroadcasts(lambda _: analysis))
    assign = next(node for node in graph.nodes.values() if node.op == "AssignAddVariableOp")
    assert same and any(n.op == "ReadVariableOp" for n in ancestors(assign.control_inputs))


def test_lists_of_tensors_are_added_up_as_they_were():
    weight = tf.Variable(RNG.normal(size=(3, 3, 2, 2)))

    def function(x):
        with tf.GradientTape() as tape:
            held = tf.nn.relu(tf.nn.conv2d(x, weight, 1, "SAME"))
            many = tf.raw_ops.TensorListFromTensor(tensor=held, element_shape=[4, 4, 2])
            a, b, c = (
                tf.raw_ops.TensorListGetItem(
                    input_handle=many, index=index, element_shape=[4, 4, 2], element_dtype=x.dtype
                )
                for index in (0, 1, 0)
            )
            loss = tf.reduce_sum(a * b + tf.exp(c))
        weight.assign_sub(1e-3 * tape.gradient(loss, weight))
        return loss

    step = of(function, (2, 4, 4, 2))
    step = Step(step.concrete_fn, [weight], step.batches)
    graph, same = changed(step, lambda analysis: ShrinkBroadcasts(lambda _: analysis))
    assert same and any(n.op == "AddN" and n.outputs[0][0] == tf.variant for n in graph.nodes.values())


# Late ---------------------------------------------------------------------------------------------------------


def test_momentum_waits_for_the_gradient():
    def net(x):
        return layers.Conv2D(8, 3)(layers.Conv2D(8, 3)(x))

    step = keras_step(net, (12, 16), 2, True, keras.optimizers.SGD(0.1, momentum=0.9), steps=4)
    before = canonicalize.read_canonical(step.concrete_fn)
    graph, same = changed(step, lambda analysis: DelayEarlyOps(analysis, 1, 2))
    assert same
    waiting = [n for n in graph.nodes.values() if len(n.control_inputs) > len(before.nodes[n.name].control_inputs)]
    assert len([n for n in waiting if n.name.startswith("sgd/")]) >= 4
    backward = GraphAnalysis(before).backward
    assert all(before.nodes[n.control_inputs[-1].name] in backward for n in waiting if n.name.startswith("sgd/"))
    large, _ = changed(step, lambda analysis: DelayEarlyOps(analysis, 2000, 2))
    assert sum(len(n.control_inputs) for n in large.nodes.values()) < sum(
        len(n.control_inputs) for n in graph.nodes.values()
    )


def test_what_a_gradient_is_multiplied_with_waits_for_it():
    """The gradient of silu needs a value that is computed from activations alone."""

    def net(x):
        for _ in range(3):
            x = keras.ops.silu(layers.Conv2D(4, 3)(x))
        return x

    step = keras_step(net, (16, 16), 2, steps=4)
    before = GraphAnalysis(canonicalize.read_canonical(step.concrete_fn))
    early = [n.name for n in before.forward_derived if n.outputs[0][1] and len(n.outputs[0][1]) == 4]
    graph, same = changed(step, lambda analysis: DelayEarlyOps(analysis, 1, 2))
    after = GraphAnalysis(graph)
    ready, was = earliest_forward_level(after), earliest_forward_level(before)
    (last,) = {ready[node] for node in after.backward if node.op == "Conv2DBackpropInput"}
    assert same and len(early) >= 3
    for name in early:
        assert was[before.graph.nodes[name]] < last == ready[graph.nodes[name]]


def test_what_is_computed_for_something_that_waits_waits_too():
    weight = tf.Variable(RNG.normal(size=(3, 3, 2, 2)))

    def function(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.conv2d(x, weight, 1, "SAME") ** 2)
        gradient = tape.gradient(loss, weight)
        factor = tf.sin(tf.exp(weight, name="first"), name="second")
        weight.assign_sub(1e-3 * gradient * factor)
        return loss

    step = of(function, (2, 4, 4, 2))
    step = Step(step.concrete_fn, [weight], step.batches)
    graph, same = changed(step, lambda analysis: DelayEarlyOps(analysis, 1, 2))
    assert same and all(graph.nodes[name].control_inputs for name in ("first", "second"))


def test_waiting_makes_no_cycle():
    """What one early value would wait for is computed from another."""

    def function(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.nn.silu(tf.nn.silu(x) * x) * tf.sigmoid(x))
        return tape.gradient(y, x)

    step = of(function, (2, 4, 4, 1))
    graph, same = changed(step, lambda analysis: DelayEarlyOps(analysis, 1, 2))
    assert same and graph.levels()


def test_what_is_added_to_a_convolution_does_not_wait_for_it():
    """oneDNN makes a convolution and its bias one operation, which would then wait for itself."""

    def net(x):
        return layers.Conv2D(4, 3)(keras.ops.relu(layers.Conv2D(4, 3)(x)))

    step = keras_step(net, (12, 16), 2)
    graph, same = changed(step, lambda analysis: DelayEarlyOps(analysis, 1, 2))
    assert same
    found = [node for node in graph.nodes.values() if node.op == "BiasAdd" and node.inputs[0].node.op == "Conv2D"]
    assert len(found) == 2
    for node in found:
        assert node.inputs[0].node not in ancestors([node.inputs[1].node])


def test_a_value_that_others_wait_for_or_that_is_returned_starts_at_once():
    weight = tf.Variable(RNG.normal(size=(3, 3)))

    def function(x):
        scaled, returned = weight * 2.0, weight * 3.0
        with tf.control_dependencies([scaled]):
            y = tf.exp(x)
        return tf.matmul(y, scaled), returned

    step = of(function, (2, 3))
    step = Step(step.concrete_fn, [weight], step.batches)
    graph, same = changed(step, lambda analysis: DelayEarlyOps(analysis, 1, 2))
    assert same and not any(n.control_inputs for n in graph.nodes.values() if n.op == "Mul")


# Late, beside loops -------------------------------------------------------------------------------------------


def regularised(x, activation="silu"):
    for name in ("first", "second", "third"):
        x = layers.Conv2D(16, 3, padding="same", kernel_regularizer="l2", activation=activation, name=name)(x)
    return x


@pytest.mark.parametrize(
    ("make", "held"),
    [
        (lambda: keras.optimizers.SGD(0.1, momentum=0.9), 2),
        (lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True), 2),
        (lambda: keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1, clipnorm=0.1), 2),
        (lambda: keras.optimizers.Adam(1e-2, amsgrad=True), 1),
        (lambda: keras.optimizers.Ftrl(1e-2), 1),
    ],
    ids=("momentum", "nesterov", "clipped", "adam", "ftrl"),
)
def test_what_an_update_makes_of_variables_waits_for_the_loops(make, held):
    """With a regularised loss a weight times a constant is part of each gradient, and could be there from the start."""
    step = keras_step(regularised, (12, 16), 2, optimizer=make(), steps=3)
    cuts = (Cut("input", "second", (3, 2)), Cut("second", "third", (2, 2)))
    assert not differing(step, *cuts)
    before, graph = canonicalize.read_canonical(step.concrete_fn), rewrite(step.concrete_fn, *cuts).graph
    loops = {node for node in graph.nodes.values() if node.op == "StatelessWhile"}
    assert len(loops) == 4
    waiting = [n for n in graph.nodes.values() if n.name in before.nodes and len(n.outputs) == 1 and n not in loops]
    waiting = [n for n in waiting if len(n.control_inputs) > len(before.nodes[n.name].control_inputs)]
    large = [n for n in waiting if n.out().shape == (3, 3, 16, 16)]
    # Of both larger filters, in each of which a loop's result is waited for.
    assert len(large) >= 2 * held
    assert all(loops & ancestors([n.control_inputs[-1]]) for n in large)


@pytest.mark.parametrize("stored", ((), ("second",)), ids=("recomputed", "stored"))
@pytest.mark.parametrize("halo", ("recompute", "carry"))
def test_a_turn_goes_back_through_a_layer_when_the_filters_of_those_above_are_done(halo, stored):
    """Until then what their gradients read is there."""
    step = keras_step(lambda x: regularised(x, "relu"), (12, 16), 2)
    rewritten = rewrite(step.concrete_fn, Cut("input", "third", (3, 1), halo=halo, stored=stored))
    bodies = [f for f in rewritten.graph.library.function if any(n.op == "Conv2DBackpropInput" for n in f.node_def)]
    assert len(bodies) == 1
    nodes = {node.name: node for node in bodies[0].node_def}
    reached = {name: _before(nodes, name) for name, node in nodes.items() if node.op == "Conv2DBackpropInput"}
    filters = [name for name, node in nodes.items() if node.op == "Conv2DBackpropFilter"]
    assert len(filters) == 3 and len(reached) == 2
    assert sorted(len(before.intersection(filters)) for before in reached.values()) in ([0, 1], [1, 2])
    biases = {nodes[name].input[0]: name for name in nodes if nodes[name].op == "BiasAddGrad"}
    assert len(biases) == 3
    for name in filters:  # oneDNN makes the two one.
        assert biases[nodes[name].input[2]] not in _before(nodes, name)


def _before(nodes, name):
    """Names of all that an operation of a function waits for."""
    found, stack = set(), [name]
    while stack:
        operands = (operand.lstrip("^").partition(":")[0] for operand in nodes[stack.pop()].input)
        new = [operand for operand in operands if operand in nodes and operand not in found]
        found.update(new)
        stack.extend(new)
    return found
