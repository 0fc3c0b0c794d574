"""Ops that could run long before their consumers are delayed, and the step computes the same bits."""

import keras
import pytest
import tensorflow as tf
from equivalence import Cut, Step, differing, keras_step, rewrite
from graph_changes import RNG, changed, step_of
from keras import layers
from nets import conv

from rewriters.analysis.autodiff_roles import is_seed
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize import canonicalize
from rewriters.device.merged_kernels import may_move_constant
from rewriters.ir.graph import ancestors
from rewriters.scheduling.delay_early_ops import MIN_DELAYED_BYTES, DelayEarlyOps, earliest_forward_level
from rewriters.swapping import swap_pass


def delayed(step, min_bytes=1):
    return changed(step, lambda analysis: DelayEarlyOps(analysis, min_bytes, 2))


@pytest.mark.parametrize("min_bytes", [1, 2**30])
def test_in_swap_order_small_optimizer_values_wait_for_gradients(min_bytes):
    step = keras_step(lambda x: conv(12)(conv(12)(conv(12)(x))), (12, 10), 2, optimizer=keras.optimizers.SGD(0.1, 0.9))
    graph = canonicalize.read_canonical(step.concrete_fn, canonicalize.CanonicalMode.EXACT)
    early = [
        node.name
        for node in graph.nodes.values()
        if node.op == "Mul"
        and "sgd" in node.name.lower()
        and node.out().num_bytes() >= MIN_DELAYED_BYTES
        and not any(is_seed(before) for before in ancestors([node]))
    ]
    assert len(early) >= 2, "momentum times velocity is ready when the step begins"
    prepared = swap_pass.in_swap_order(swap_pass.without_copies(graph), min_bytes, 2).graph
    for name in early:
        assert any(is_seed(before) for before in ancestors([prepared.nodes[name]])), name


def test_delay_early_ops_momentum_waits_for_gradient():
    def net(x):
        return layers.Conv2D(8, 3)(layers.Conv2D(8, 3)(x))

    step = keras_step(net, (12, 16), 2, True, keras.optimizers.SGD(0.1, momentum=0.9), steps=4)
    before = canonicalize.read_canonical(step.concrete_fn)
    graph, same = delayed(step)
    assert same
    waiting = [n for n in graph.nodes.values() if len(n.control_inputs) > len(before.nodes[n.name].control_inputs)]
    assert len([n for n in waiting if n.name.lower().startswith("sgd/")]) >= 4
    backward = GraphAnalysis(before).backward
    assert all(
        before.nodes[n.control_inputs[-1].name] in backward for n in waiting if n.name.lower().startswith("sgd/")
    )
    large, _ = delayed(step, min_bytes=2000)
    assert sum(len(n.control_inputs) for n in large.nodes.values()) < sum(
        len(n.control_inputs) for n in graph.nodes.values()
    )


def test_delay_early_ops_factor_of_gradient_waits_for_gradient():
    """The gradient of silu has a factor that depends on activations alone."""

    def net(x):
        for _ in range(3):
            x = keras.ops.silu(layers.Conv2D(4, 3)(x))
        return x

    step = keras_step(net, (16, 16), 2, steps=4)
    before = GraphAnalysis(canonicalize.read_canonical(step.concrete_fn))
    early = [n.name for n in before.forward_derived if n.outputs[0][1] and len(n.outputs[0][1]) == 4]
    graph, same = delayed(step)
    after = GraphAnalysis(graph)
    ready, was = earliest_forward_level(after), earliest_forward_level(before)
    (last,) = {ready[node] for node in after.backward if node.op == "Conv2DBackpropInput"}
    assert same and len(early) >= 3
    for name in early:
        assert was[before.graph.nodes[name]] < last == ready[graph.nodes[name]]


def test_delay_early_ops_wait_for_product_with_constant_does_not_count():
    """TensorFlow folds the constant factors of `tf.nn.moments`' gradient, and what waited for their product starts."""

    def net(x):
        return layers.LayerNormalization()(layers.Conv2D(4, 3)(layers.LayerNormalization()(layers.Conv2D(4, 3)(x))))

    step = keras_step(net, (12, 16), 2)
    before = GraphAnalysis(canonicalize.read_canonical(step.concrete_fn))
    early = [node.name for node in before.order if node.name.endswith("moments/sub") and node in before.backward]
    assert len(early) == 2 and all(before.graph.nodes[name].control_inputs for name in early)
    graph, same = delayed(step)
    assert same
    for name in early:
        waits = [node for node in graph.nodes[name].control_inputs if not may_move_constant(node)]
        assert any(is_seed(before) for before in ancestors(waits)), name


def test_delay_early_ops_operand_of_delayed_op_is_delayed():
    weight = tf.Variable(RNG.normal(size=(3, 3, 2, 2)))

    def function(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.conv2d(x, weight, 1, "SAME") ** 2)
        gradient = tape.gradient(loss, weight)
        factor = tf.sin(tf.exp(weight, name="first"), name="second")
        weight.assign_sub(1e-3 * gradient * factor)
        return loss

    step = step_of(function, (2, 4, 4, 2))
    step = Step(step.concrete_fn, [weight], step.batches)
    graph, same = delayed(step)
    assert same and all(graph.nodes[name].control_inputs for name in ("first", "second"))


def test_delay_early_ops_values_that_depend_on_each_other_close_no_cycle():
    """The op that one early value would wait for depends on another early value."""

    def function(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.nn.silu(tf.nn.silu(x) * x) * tf.sigmoid(x))
        return tape.gradient(y, x)

    step = step_of(function, (2, 4, 4, 1))
    graph, same = delayed(step)
    assert same and graph.levels()


def test_delay_early_ops_bias_does_not_wait_for_its_convolution():
    """oneDNN fuses a convolution and its bias; the fused op would wait for itself."""

    def net(x):
        return layers.Conv2D(4, 3)(keras.ops.relu(layers.Conv2D(4, 3)(x)))

    step = keras_step(net, (12, 16), 2)
    graph, same = delayed(step)
    assert same
    biases = [node for node in graph.nodes.values() if node.op == "BiasAdd" and node.inputs[0].node.op == "Conv2D"]
    assert len(biases) == 2
    for node in biases:
        assert node.inputs[0].node not in ancestors([node.inputs[1].node])


def test_delay_early_ops_control_input_or_result_is_not_delayed():
    weight = tf.Variable(RNG.normal(size=(3, 3)))

    def function(x):
        scaled, returned = weight * 2.0, weight * 3.0
        with tf.control_dependencies([scaled]):
            y = tf.exp(x)
        return tf.matmul(y, scaled), returned

    step = step_of(function, (2, 3))
    step = Step(step.concrete_fn, [weight], step.batches)
    graph, same = delayed(step)
    assert same and not any(n.control_inputs for n in graph.nodes.values() if n.op == "Mul")


def test_delay_early_ops_delayed_zeros_are_no_constant():
    def function(x):
        zeros, ones = tf.fill(x.shape, tf.constant(0, x.dtype)), tf.fill(x.shape, tf.constant(1, x.dtype))
        return tf.stack([tf.exp(x), zeros, ones])

    graph, same = delayed(step_of(function, (2, 3)))
    fills = [node for node in graph.nodes.values() if node.op == "Fill"]
    assert same and all(node.control_inputs for node in fills)
    assert [node.inputs[1].node.op for node in fills] == ["Empty", "Const"]


def test_in_swap_order_delays_zeros_that_are_no_constant():
    step = step_of(lambda x: tf.stack([tf.exp(x), tf.fill(x.shape, tf.constant(0, x.dtype))]), (2, 3))
    graph = swap_pass.in_swap_order(swap_pass.without_copies(canonicalize.read_canonical(step.concrete_fn)), 1, 2).graph
    (fill,) = (node for node in graph.nodes.values() if node.op == "Fill" and node.control_inputs)
    assert fill.inputs[1].node.op == "Empty"


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
def test_delay_optimizer_ops_values_of_variables_wait_for_loops(make, held):
    """With a regularised loss a weight times a constant is part of each gradient, and could be computed at once."""
    step = keras_step(regularised, (12, 16), 2, optimizer=make(), steps=3)
    cuts = (Cut("input", "second", (3, 2)), Cut("second", "third", (2, 2)))
    assert not differing(step, *cuts)
    before, graph = canonicalize.read_canonical(step.concrete_fn), rewrite(step.concrete_fn, *cuts).graph
    loops = {node for node in graph.nodes.values() if node.op == "StatelessWhile"}
    assert len(loops) == 4
    waiting = [n for n in graph.nodes.values() if n.name in before.nodes and len(n.outputs) == 1 and n not in loops]
    waiting = [n for n in waiting if len(n.control_inputs) > len(before.nodes[n.name].control_inputs)]
    large = [n for n in waiting if n.out().shape == (3, 3, 16, 16)]
    # Both larger filters have values that wait for the result of a loop.
    assert len(large) >= 2 * held
    assert all(loops & ancestors([n.control_inputs[-1]]) for n in large)


@pytest.mark.parametrize("stored", ((), ("second",)), ids=("recomputed", "stored"))
@pytest.mark.parametrize("halo", ("recompute", "carry"))
def test_layer_gradients_in_loop_body_run_layer_by_layer(halo, stored):
    """Operands of a filter's gradient stay allocated until it has run."""
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
    for name in filters:  # oneDNN fuses the two.
        assert biases[nodes[name].input[2]] not in _before(nodes, name)


def _before(nodes, name):
    """Return the names of all ancestors of an op of a function."""
    ancestors, stack = set(), [name]
    while stack:
        operands = (operand.lstrip("^").partition(":")[0] for operand in nodes[stack.pop()].input)
        new = [operand for operand in operands if operand in nodes and operand not in ancestors]
        ancestors.update(new)
        stack.extend(new)
    return ancestors
