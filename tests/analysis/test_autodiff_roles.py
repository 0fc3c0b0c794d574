"""Forward and backward roles."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import keras_step

import tflms_sft
from rewriters.analysis.autodiff_roles import gradients, in_scope, is_seed, reads_shape_only, scope_test
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize import canonicalize
from rewriters.errors import RewriteError
from rewriters.ir.graph import Node


def analysed(body, *specs):
    return GraphAnalysis(canonicalize.read_canonical(tf.function(body, autograph=False).get_concrete_function(*specs)))


def backward(analysis, op_type):
    """Return whether each op of a type, in order, is backward."""
    return [node in analysis.backward for node in analysis.order if node.op == op_type]


IMAGE = tf.TensorSpec((2, 8, 8, 3), tf.float32)


def test_backward_nodes_of_training_step():
    def net(x):
        x = keras.layers.Conv2D(4, 3, activation="relu")(x)
        x = keras.layers.Conv2DTranspose(4, 3, activation="relu")(x)
        return keras.layers.MaxPool2D(2)(x)

    step = keras_step(net, (9, 9), floatx="float32")
    analysis = GraphAnalysis(canonicalize.read_canonical(step.concrete_fn))
    for op_type in ("Relu", "MaxPool", "BiasAdd", "Mean"):
        assert set(backward(analysis, op_type)) == {False}
    for op_type in ("Conv2DBackpropFilter", "ReluGrad", "MaxPoolGrad", "BiasAddGrad"):
        assert set(backward(analysis, op_type)) == {True}, op_type
    # A convolution is the gradient of a transposed one, which is the gradient of a convolution.
    assert backward(analysis, "Conv2D") == [False, True]
    assert backward(analysis, "Conv2DBackpropInput") == [False]
    analysis.require_backward()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_gradients_lie_between_autodiff_and_update(optimizer):
    """There is one gradient per weight, with clipping, a regulariser, custom gradients, and a layer that is called
    twice.
    """

    def net(x):
        twice = keras.layers.Conv2D(3, 3, padding="same", activation="silu", kernel_regularizer="l2")
        return twice(twice(x))

    options = {"sgd": {"momentum": 0.9, "nesterov": True}, "adam": {"clipnorm": 1.0, "weight_decay": 0.1}}[optimizer]
    made = {"sgd": keras.optimizers.SGD, "adam": keras.optimizers.Adam}[optimizer](0.1, **options)
    step = keras_step(net, (9, 9), floatx="float32", optimizer=made)
    analysis = GraphAnalysis(canonicalize.read_canonical(step.concrete_fn))
    found = gradients(analysis.graph, analysis.order, analysis.backward)
    assert sorted(t.shape for t in found) == sorted([(3, 3, 3, 3), (3,), (3, 3), (3,)])


def test_backward_nodes_exclude_forward_pass_after_update():
    w = tf.Variable(tf.ones((3, 3, 3, 2)))

    def body(x):
        losses = []
        for _ in range(2):
            with tf.GradientTape() as tape:
                losses.append(tf.reduce_sum(tf.tanh(tf.nn.conv2d(x, w, 1, "SAME"))))
            w.assign_sub(tape.gradient(losses[-1], w))
        return losses

    analysis = analysed(body, IMAGE)
    assert backward(analysis, "Conv2D") == [False, False] and backward(analysis, "Tanh") == [False, False]
    assert backward(analysis, "TanhGrad") == [True, True]


def test_backward_nodes_of_tf_gradients():
    def body(x, w):
        y = tf.reduce_sum(tf.tanh(tf.nn.conv2d(x, w, 1, "SAME")))
        return tf.gradients(y, w), tf.gradients(y * y, w)

    analysis = analysed(body, IMAGE, tf.TensorSpec((3, 3, 3, 2), tf.float32))
    assert backward(analysis, "Conv2D") == [False]
    assert set(backward(analysis, "Conv2DBackpropFilter")) == {True}
    assert set(backward(analysis, "TanhGrad")) == {True}


W = (0.1 * np.arange(9.0, dtype="float32").reshape(3, 3), 0.2 * np.eye(3, dtype="float32"))


def tape_gradient(target, source):
    """Return the function `target` of `source` and its gradient by an inner tape."""
    with tf.GradientTape() as tape:
        tape.watch(source)
        value = target(source)
    return value, tape.gradient(value, source)


def penalised(net, x):
    """WGAN-GP."""
    score, slope = tape_gradient(net, x)
    return tf.reduce_mean(score) + tf.reduce_mean((tf.norm(slope, axis=1) - 1.0) ** 2)


def scalar_target(net, x):
    """R1: the inner result is a scalar, as the loss is."""
    return tf.reduce_mean(tape_gradient(lambda x: tf.reduce_sum(net(x)), x)[1] ** 2)


def second_derivatives(net, x):
    def slope(x):
        return tape_gradient(net, x)[1]

    value, slopes = tape_gradient(slope, x)
    return tf.reduce_mean((value * slopes) ** 2)


def by_tf_gradients(net, x):
    (slope,) = tf.gradients(net(x), x)
    return tf.reduce_mean(slope**2 + tf.gradients(slope, x)[0] ** 2)


def attacked(net, x):
    """The inner gradient changes an operand, and is not differentiated."""
    _, slope = tape_gradient(lambda x: tf.reduce_mean(net(x) ** 2), x)
    return tf.reduce_mean(net(x + tf.sign(slope)) ** 2)


def adapted(net, x):
    """MAML: the loss after one step of descent."""
    _, slope = tape_gradient(lambda shift: tf.reduce_mean(net(x + shift) ** 2), tf.zeros(3))
    return tf.reduce_mean(net(x - 0.1 * slope) ** 2)


def forward_mode(net, x):
    with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as accumulator:
        value = net(x)
    return tf.reduce_mean(accumulator.jvp(value) ** 2)


def recomputed(net, x):
    return plain(tf.recompute_grad(net), x)


def plain(net, x):
    return tf.reduce_mean(net(x) ** 2)


def two_losses(net, x):
    """One call of autodiff with two results."""
    return [plain(net, x), tf.reduce_mean(tf.nn.silu(net(2.0 * x)))]


LOSSES = (penalised, scalar_target, second_derivatives, by_tf_gradients, attacked, adapted, forward_mode, recomputed)


@pytest.mark.parametrize(
    ("loss_of", "updated", "rows"),
    [
        *((loss, False, 4) for loss in (*LOSSES, plain, two_losses)),
        *((loss, True, None) for loss in (penalised, by_tf_gradients, attacked, two_losses)),
    ],
)
def test_gradients_that_a_loss_depends_on_are_forward(loss_of, updated, rows):
    """All that a loss depends on is forward, and all other ops of autodiff are backward."""
    weights = [tf.Variable(value) for value in W]

    def net(x):  # `silu` has a custom gradient, whose ops are in no scope.
        return tf.tanh(tf.nn.relu(tf.nn.silu(x @ weights[0])) @ weights[1])

    def body(x):
        losses, gradients_of = [], []
        for loss_function in (loss_of, plain) if updated else (loss_of,):
            with tf.GradientTape() as tape:
                losses.append(loss_function(net, x))
            gradients_of.append(tape.gradient(losses[-1], weights))
            if updated:
                for variable, gradient in zip(weights, gradients_of[-1], strict=True):
                    variable.assign_sub(0.1 * gradient)
        return gradients_of, losses

    concrete_fn = tf.function(body, autograph=False).get_concrete_function(tf.TensorSpec((rows, 3)))
    analysis = GraphAnalysis(canonicalize.read_canonical(concrete_fn, merge_constants=True))
    losses = [tensor.node for tensor in analysis.graph.outputs if tensor.shape == ()]
    expected, stack = set(losses), list(losses)
    while stack:
        sources = {tensor.node for tensor in stack.pop().inputs} - expected
        expected |= sources
        stack += sources
    assert losses and [node.name for node in analysis.order if node in expected & analysis.backward] == []
    others = (n for n in analysis.order if is_seed(n) and n.op != "Const" and n not in expected)
    assert [node.name for node in others if node not in analysis.backward] == []
    assert any(is_seed(node) for node in expected) == (loss_of not in (plain, two_losses, recomputed))


def test_gradients_of_scaled_loss_are_backward():
    """An optimizer that scales the loss tests whether gradients are finite: no loss depends on the test."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "silu"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    optimizer.build(model.trainable_variables)

    def body(x):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(penalised(model, x))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    concrete_fn = tf.function(body).get_concrete_function(tf.TensorSpec((4, 3)))
    analysis = GraphAnalysis(canonicalize.read_canonical(concrete_fn))
    assert analysis.differentiated and analysis.differentiated.isdisjoint(analysis.backward)
    (loss,) = (tensor.node for tensor in analysis.graph.outputs)
    assert loss not in analysis.backward and backward(analysis, "MatMul").count(True) > 2


def test_forward_derived_nodes_of_custom_gradient_are_backward():
    @tf.custom_gradient
    def activation(x):
        def gradient(dy):
            return dy * tf.cos(x * 3.0)

        return tf.sin(x * 3.0), gradient

    def body(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(activation(tf.exp(x)))
        return y, tape.gradient(y, x)

    analysis = analysed(body, IMAGE)
    assert backward(analysis, "Exp") == [False] and backward(analysis, "Sin") == [False]
    assert backward(analysis, "Cos") == [True]
    derived = {node.op for node in analysis.forward_derived}
    assert "Cos" in derived and not {"Sin", "Exp"} & derived
    assert analysis.forward_derived <= analysis.backward


def test_forward_derived_nodes_exclude_results_and_forward_operands():
    def body(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.exp(x)
        gradient = tape.gradient(y, x)
        shown, used = tf.sin(x), tf.cos(x)
        return gradient * shown, shown, tf.reduce_sum(used), gradient * used

    analysis = analysed(body, IMAGE)
    assert backward(analysis, "Sin") == [False] and backward(analysis, "Cos") == [False]


def test_backward_nodes_include_named_scopes():
    def body(x):
        with tf.name_scope("my_gradients"):
            return tf.sin(x) * 2.0

    concrete_fn = tf.function(body, autograph=False).get_concrete_function(IMAGE)
    graph = canonicalize.read_canonical(concrete_fn)
    assert not GraphAnalysis(graph).backward
    with pytest.raises(RewriteError, match="no backward part.*Pass the function that computes gradients"):
        GraphAnalysis(graph).require_backward()
    assert {"Sin", "Mul"} <= {node.op for node in GraphAnalysis(graph, ("my_gradients/",)).backward}


def test_data_dependent_nodes_include_activations_not_weights():
    v = tf.Variable(tf.ones((3, 3, 3, 2)))

    def body(x):
        kernel = v / tf.norm(v)
        noise = tf.random.normal((2, 8, 8, 3))
        return tf.nn.conv2d(x + noise, kernel, 1, "SAME")

    analysis = analysed(body, IMAGE)
    data = {node.op for node in analysis.data}
    assert {"Conv2D", "AddV2", "RandomStandardNormal"} <= data
    assert not {"RealDiv", "ReadVariableOp"} & data


@pytest.mark.parametrize(
    ("name", "op_type", "seed"),
    [
        ("gradient_tape/mul", "Mul", True),
        ("model/gradient_tape/mul", "Mul", True),
        ("gradients/AddN", "AddN", True),
        ("gradients_1/AddN", "AddN", True),
        ("call/gradients_12/x", "Mul", True),
        ("x", "ReluGrad", True),
        ("x", "DepthwiseConv2dNativeBackpropFilter", True),
        ("x", "Conv2DBackpropInput", False),
        ("my_gradients/x", "Mul", False),
        ("gradient_tape", "Mul", False),
    ],
)
def test_is_seed_by_scope_or_type(name, op_type, seed):
    assert is_seed(Node(name, op_type)) == seed


def test_reads_shape_only_for_shape_ops():
    assert reads_shape_only(Node("n", "ShapeN")) and not reads_shape_only(Node("n", "Relu"))


def test_backward_nodes_exclude_layer_named_like_autodiff_scope():
    """The ops of the layer are forward, and a plan exists as for any other name."""

    def headline(name):
        image = keras.Input((24, 24, 3), batch_size=1)
        x = keras.layers.Conv2D(4, 3, activation="relu", name=name)(image)
        x = keras.layers.Conv2D(4, 3, activation="relu")(x)
        model = keras.Model(image, keras.layers.Dense(2)(keras.layers.GlobalAveragePooling2D()(x)))
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        callback = tflms_sft.SFT((2, 2), verbose=0)
        model.fit(np.zeros((1, 24, 24, 3)), np.zeros(1), batch_size=1, verbose=0, callbacks=[callback])
        return callback.plan.headline()

    assert headline("gradients") == headline("gradient_tape") == headline("first")
    assert headline("first").startswith("1 segment(s)")


def test_branches_that_draw_are_data_and_others_are_not():
    """A filter that a branch normalises is no data; noise that a branch draws is."""
    weight = tf.Variable(tf.ones((3, 3, 2, 2)))
    seed = tf.Variable([1, 2])

    def body(x):
        normal = tf.cond(tf.reduce_all(weight == 0.0), lambda: weight + 1.0, lambda: weight / tf.norm(weight))
        noise = tf.cond(
            weight[0, 0, 0, 0] > 0.0,
            lambda: tf.random.stateless_truncated_normal((1, 8, 8, 2), seed),
            lambda: tf.zeros((1, 8, 8, 2)),
        )
        later = tf.cond(weight[0, 0, 0, 0] > 0.0, lambda: tf.random.normal((1, 8, 8, 2)), lambda: x * 0.0)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.conv2d(x + noise + later, tf.identity(normal, "filter"), 1, "SAME"))
        return loss, tape.gradient(loss, weight)

    analysis = analysed(body, tf.TensorSpec((1, 8, 8, 2)))
    (convolution,) = (node for node in analysis.order if node.op == "Conv2D")
    image, filters = (tensor.node for tensor in convolution.inputs)
    branches = [node for node in analysis.order if node.op in ("If", "StatelessIf")]
    assert len(branches) == 3 and sum(node in analysis.data for node in branches) == 2
    assert image in analysis.data and filters not in analysis.data


def test_scope_test_agrees_with_in_scope():
    scopes = ("a", "b/c", "/d/")
    names = ("a", "x/a", "ab", "b", "b/c", "x/b/c/y", "b/x/c", "d/y", "x/d", "xd")
    test = scope_test(scopes)
    assert [test(name) for name in names] == [any(in_scope(name, scope) for scope in scopes) for name in names]
    assert [name for name in names if test(name)] == ["a", "x/a", "b/c", "x/b/c/y", "d/y", "x/d"]
    assert not scope_test(())("a")
