"""A step in micro-batches: which part runs how often, and that it computes the same."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from pipelined import accumulating_step, batches, compiled, hand_step, largest_error, net, run, train_step

import tflms_sft
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize import canonicalize
from rewriters.errors import PipelineError
from rewriters.pipelining.micro_batch_reduction import BatchGrowth, UnrollSpec
from rewriters.pipelining.micro_batch_unroll import unroll_micro_batches
from rewriters.pipelining.step_partition import EffectHints, split_step
from tflms_sft import PipelineParams

pytestmark = pytest.mark.usefixtures("double_precision")

TOLERANCE = 1e-12
HERE = ["CPU:0"] * 4


def in_parts(step, count, *args, **options):
    """The step in micro-batches, one after another on one device."""
    params = PipelineParams(1, "basic", count, ["CPU:0"], **options)
    return tflms_sft.rewrite(step, params, *args)


def analysed(step, *specs):
    return GraphAnalysis(
        canonicalize.read_canonical(step.get_concrete_function(*specs), canonicalize.CanonicalMode.EXACT)
    )


def specs(batch=4):
    return tf.TensorSpec((batch, 8, 8, 3), "float64"), tf.TensorSpec((batch,), "int64")


def descending(loss_of, result=lambda x, loss: loss):
    """A step that descends a loss of a weight and the arguments, and the weight."""
    w = tf.Variable(np.eye(3))

    @tf.function
    def step(*args):
        with tf.GradientTape() as tape:
            loss = loss_of(w, *args)
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return result(args[0], loss)

    return step, w


def mean_loss(w, x):
    return tf.reduce_mean(tf.tanh(x @ w))


def sum_loss(w, x):
    return tf.reduce_sum(tf.tanh(x @ w))


# Parts ------------------------------------------------------------------------------------------------------


def test_split_step_of_training_step_partitions_ops():
    analysis = analysed(train_step(compiled(net(HERE), "adam")), *specs())
    parts = split_step(analysis, [0, 1])
    kinds = {"Conv2D", "Conv2DBackpropFilter", "TanhGrad", "SparseSoftmaxCrossEntropyWithLogits"}
    for node in analysis.order:
        if node.op in kinds:
            assert node in parts.per_micro_batch and node in parts.batch_dependent
        if "adam" in node.name and any(t.node in parts.update for t in node.inputs):
            assert node in parts.update
    shared = {n for n in analysis.order if n not in parts.per_micro_batch and n not in parts.update}
    weights = [n for n in shared if n.op == "ReadVariableOp" and "functional_1" in n.name]
    assert len(weights) == 10, "kernels and biases are read once for all micro-batches"
    assert not any(n.op in kinds for n in shared)
    assert len(parts.carried_variables) == 2, "totals of loss and accuracy"
    once = [n for n in shared if n.may_write_variable]
    assert len(once) == 3, "the optimizer's iterations, and the numbers of samples seen, which depend on no data"
    metrics = {n.name for n in once} - {"adam/AssignVariableOp", "adam/AssignAddVariableOp"}
    told = split_step(analysis, [0, 1], EffectHints(per_micro_batch=metrics))
    assert len(told.carried_variables) >= 4, (
        "who knows that they belong to metrics has them counted for each micro-batch"
    )


def test_unroll_carries_state_and_adds_gradients_in_order():
    analysis = analysed(train_step(compiled(net(HERE), "momentum")), *specs())
    parts = split_step(analysis, [0, 1])
    order = [2, 0, 1]
    made = unroll_micro_batches(
        analysis, parts, UnrollSpec(3, lambda t: BatchGrowth(()), lambda t: True, order=lambda t: order)
    )
    made.graph.execution_order()
    for handle in parts.carried_variables:
        touching = [n for n in analysis.order if handle in n.variable_handles and n in parts.per_micro_batch]
        (first,) = (n for n in touching if n.op == "ReadVariableOp" and not n.control_inputs)
        (last,) = (n for n in touching if n.op == "ReadVariableOp" and n.control_inputs)
        for number in (1, 2):
            assert made.clones[last][number - 1] in made.clones[first][number].control_inputs
    for gradient in parts.gradients:
        copies = made.clones[gradient.node]
        (start,) = (n for n in made.graph.nodes.values() if copies[2] in [t.node for t in n.inputs] and n.op == "AddV2")
        assert [t.node for t in start.inputs] == [copies[2], copies[0]]
        (end,) = (n for n in made.graph.nodes.values() if start in [t.node for t in n.inputs] and n.op == "AddV2")
        assert [t.node for t in end.inputs] == [start, copies[1]]
    assert not any(n.op == "AddN" and len(n.inputs) == 3 for n in made.graph.nodes.values())


def test_unroll_of_one_micro_batch_equals_original_graph():
    step = hand_step(compiled(net(HERE), "momentum"))
    analysis = analysed(step, *specs())
    made = unroll_micro_batches(
        analysis, split_step(analysis, [0, 1]), UnrollSpec(1, lambda t: BatchGrowth(()), lambda t: True)
    ).graph
    assert {n.name: n.op for n in made.nodes.values()} == {n.name: n.op for n in analysis.graph.nodes.values()}


# Equality ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("optimizer", "count"), [("adam", 4), ("momentum", 2), ("momentum", 8)])
@pytest.mark.parametrize("make", [train_step, hand_step])
def test_steps_in_micro_batches_equal_original_steps(make, optimizer, count):
    """Loss, metrics, logits, gradients, and after five steps every weight, slot and counter."""
    model = compiled(net(HERE), optimizer)
    step = make(model)
    rewritten = in_parts(step, count, *batches(1)[0])
    assert largest_error(run(model, rewritten, batches()), run(model, step, batches())) < TOLERANCE


@pytest.mark.parametrize("options", [{"groups": 2}, {"groups": 4, "dilation_rate": 2}])
def test_grouped_convolutions_equal_original_step(options):
    """On CPUs XLA compiles them, each with the handle of its weight: they are made of convolutions that can be seen."""
    keras.utils.set_random_seed(1)
    image = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, activation="tanh")(layers.Conv2D(4, 3, activation="tanh")(image))
    x = layers.Conv2D(8, 3, padding="same", **options)(x)
    model = compiled(keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(x))), "adam")
    step = train_step(model)
    rewritten = in_parts(step, 4, *batches(1)[0])
    assert rewritten.plan.notes == ()
    assert largest_error(run(model, rewritten, batches()), run(model, step, batches())) < TOLERANCE


def test_sum_loss_equals_original_step():
    step, w = descending(sum_loss, lambda x, loss: (loss, tf.reduce_mean(x), tf.reduce_sum(tf.cast(x > 0, tf.int32))))
    x = np.random.default_rng(0).normal(size=(6, 3))
    assert compared(step, [w], x, count=3, loss_reduction="sum") < TOLERANCE
    combined = [how for _, how in in_parts(step, 3, x, loss_reduction="sum").plan.pipeline.results]
    assert combined == ["sum", "mean", "sum"]
    with pytest.raises(PipelineError, match='a sum over the batch, as traces .*: pass `loss_reduction="sum"`'):
        in_parts(step, 3, x)


def test_penalty_with_sum_loss_is_refused():
    w = tf.Variable(np.eye(3))

    def step(reduce, penalty):
        @tf.function
        def step(x):
            with tf.GradientTape() as tape:
                loss = reduce(tf.tanh(x @ w)) + penalty * tf.reduce_sum(w * w)
            gradient = tape.gradient(loss, w)
            w.assign_sub(0.1 * gradient)
            return loss, gradient

        return step

    x = np.random.default_rng(0).normal(size=(6, 3))
    mean = step(tf.reduce_mean, 0.1)
    with pytest.raises(PipelineError, match='a mean over the batch, .*: pass `loss_reduction="mean"`'):
        in_parts(mean, 3, x, loss_reduction="sum")
    rewritten = in_parts(mean, 3, x)
    start = w.numpy()
    want = [np.array(value) for value in mean(x)] + [w.numpy()]
    w.assign(start)
    assert largest_error([np.array(value) for value in rewritten(x)] + [w.numpy()], want) < TOLERANCE
    with pytest.raises(PipelineError, match="such as a penalty on weights, to a sum over the batch"):
        in_parts(step(tf.reduce_sum, 0.1), 3, x, loss_reduction="sum")


def test_batch_norm_is_refused_or_equals_accumulation_loop():
    model = compiled(net(HERE, norm=True), "momentum")
    step = hand_step(model)
    with pytest.raises(PipelineError, match=r"mix samples of the batch: layer 'norm0' \(BatchNormalization\), .*"
                       r'`batch_norm="micro"`'):  # fmt: skip
        in_parts(step, 2, *batches(1)[0])
    rewritten = in_parts(train_step(model), 2, *batches(1)[0], batch_norm="micro")
    assert (
        "computed per micro-batch, as with gradient accumulation, because they mix samples" in rewritten.plan.summary()
    )
    counted = len(model.metrics_variables)
    got = run(model, rewritten, batches())[-len_of(model) : -counted]
    want = run(model, accumulating_step(model, 2), batches())[-len_of(model) : -counted]
    assert largest_error(got, want) < TOLERANCE
    plain = run(model, step, batches())[-len_of(model) : -counted]
    assert largest_error(got, plain) > 1e-4, "which is another step than the one that was traced"


def len_of(model):
    return len(model.variables) + len(model.optimizer.variables) + len(model.metrics_variables)


def test_metrics_without_consumers_equal_original_step():
    """Nothing in the graph tells the number of losses from a number of steps but who counts."""
    model = compiled(net(HERE), "momentum")
    mean, steps = keras.metrics.Mean(), tf.Variable(0, dtype="int64")

    @tf.function(autograph=False)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = model.loss(y, model(x, training=True))
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        mean.update_state(loss)
        steps.assign_add(1)

    rewritten = in_parts(step, 4, *batches(1)[0])
    start = [np.array(v) for v in (*model.variables, *model.optimizer.variables)]
    found = []
    for function in (step, rewritten):
        for variable, value in zip((*model.variables, *model.optimizer.variables), start, strict=True):
            variable.assign(value)
        mean.reset_state()
        steps.assign(0)
        for batch in batches(3):
            function(*map(tf.constant, batch))
        assert steps.numpy() == 3 and model.optimizer.iterations.numpy() == 3
        found.append(np.array(mean.result()))
        counted = np.array(mean.variables[1])
        assert counted == 3, "each micro-batch counts as its part of the batch"
    np.testing.assert_allclose(found[1], found[0], rtol=TOLERANCE)


def test_clipping_and_learning_rate_schedule_equal_original_step():
    model = net(HERE)
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    model.compile(keras.optimizers.SGD(rate, momentum=0.9, global_clipnorm=0.05), "mse", jit_compile=False)
    model.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.optimizer.build(model.trainable_variables)
    step = hand_step(model)
    rewritten = in_parts(step, 2, *batches(1)[0])
    assert largest_error(run(model, rewritten, batches()), run(model, step, batches())) < TOLERANCE


def test_dropout_draws_per_micro_batch():
    image = keras.Input((400,))
    drop = layers.Dropout(0.5, seed=3)
    model = keras.Model(image, layers.Dense(3)(drop(image)))
    model.compile(keras.optimizers.SGD(0.0), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.optimizer.build(model.trainable_variables)

    @tf.function(autograph=False)
    def step(x, y):
        with tf.GradientTape() as tape:
            dropped = drop(x, training=True)
            loss = model.loss(y, model.layers[-1](dropped))
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return dropped

    x, y = np.ones((4, 400)), np.zeros(4, "int32")
    rewritten = in_parts(step, 2, x, y)
    before = np.array(drop.seed_generator.state)
    first, second = (np.array(rewritten(x, y)) for _ in range(2))
    assert first.shape == (4, 400) and set(np.unique(first)) == {0.0, 2.0}
    masks = [first[:2], first[2:], second[:2], second[2:]]
    for number, mask in enumerate(masks):
        assert all(not np.array_equal(mask, other) for other in masks[:number])
    assert (np.array(drop.seed_generator.state) - before)[1] == 4, "one draw for each"


# Refusals ---------------------------------------------------------------------------------------------------


def test_uneven_known_batch_is_refused():
    step = hand_step(compiled(net(HERE), "momentum"))
    with pytest.raises(ValueError, match="Received: a batch of 8, micro_batches=3"):
        in_parts(step, 3, *batches(1)[0])
    with pytest.raises(PipelineError, match="traced for a fixed batch size, .* Pass the `tf.function` with example"):
        in_parts(step.get_concrete_function(*specs()), 2)


def test_loss_over_sum_of_weights_is_refused():
    def loss_of(w, x, weights):
        return tf.reduce_sum(tf.reduce_sum(tf.tanh(x @ w), axis=1) * weights) / tf.reduce_sum(weights)

    step, _ = descending(loss_of)
    with pytest.raises(PipelineError, match=r"mix samples of the batch: `truediv` \(RealDiv\)"):
        in_parts(step, 2, np.ones((4, 3)), np.ones(4))


def test_two_updates_and_shared_state_are_refused():
    descend, w = descending(mean_loss)
    with pytest.raises(PipelineError, match="computes gradients after an update of the same step, .* Split the step"):
        in_parts(tf.function(lambda x: (descend(x), descend(x))), 2, np.ones((4, 3)))

    @tf.function
    def normed(x):
        w.assign(w / tf.norm(w) + 0 * tf.reduce_mean(x))
        return descend(x)

    with pytest.raises(PipelineError, match="Both the forward phase and the update .* write a variable"):
        in_parts(normed, 2, np.ones((4, 3)))


def test_bool_results_are_refused():
    step, _ = descending(mean_loss, lambda x, loss: tf.reduce_any(x > 0))
    with pytest.raises(PipelineError, match="has dtype bool and has no batch axis, .* Leave it out"):
        in_parts(step, 2, np.ones((4, 3)))


# What updates read besides gradients ------------------------------------------------------------------------


def compared(step, variables, *args, count=2, **options):
    """The largest difference between the results and variables of three steps."""
    rewritten = in_parts(step, count, *args, **options)
    start = [v.numpy() for v in variables]
    found = []
    for function in (step, rewritten):
        results = [np.array(v) for _ in range(3) for v in tf.nest.flatten(function(*map(tf.constant, args)))]
        found.append([*results, *(v.numpy() for v in variables)])
        for variable, value in zip(variables, start, strict=True):
            variable.assign(value)
    return largest_error(found[1], found[0])


def test_update_that_divides_by_batch_size_equals_original_step():
    """As it is traced for a part of the batch, it would divide by the size of that."""
    w = tf.Variable(np.eye(3))

    @tf.function
    def step(x):
        size = tf.shape(x)[0]
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(x @ w))
        w.assign_sub(0.1 * tape.gradient(loss, w) / tf.cast(size, "float64"))
        return loss, size, tf.cast(size, "float64") * 2

    x = np.random.default_rng(0).normal(size=(6, 3))
    open_step = tf.function(step.python_function, input_signature=[tf.TensorSpec((None, 3), "float64")])
    for traced in (step, open_step):
        assert compared(traced, [w], x, count=3, loss_reduction="sum") < TOLERANCE


def test_update_that_reads_a_loss_equals_original_step():
    w = tf.Variable(np.eye(3))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(x @ w), name="loss")
        w.assign_sub(loss * tape.gradient(loss, w))
        return loss

    assert compared(step, [w], np.random.default_rng(0).normal(size=(6, 3)), count=3) < TOLERANCE


def test_sparse_embedding_gradients_equal_original_step():
    words = keras.Input((5,), dtype="int32")
    x = layers.Dense(4, activation="tanh")(layers.Embedding(11, 6)(words))
    model = keras.Model(words, layers.Dense(3)(layers.Flatten()(x)))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.optimizer.build(model.trainable_variables)

    @tf.function(autograph=False)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = model.loss(y, model(x, training=True))
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    data = np.random.default_rng(0).integers(0, 11, size=(8, 5)).astype("int32"), np.arange(8) % 3
    own = [v.value for v in (*model.variables, *model.optimizer.variables)]
    assert compared(step, own, *data, count=4) < TOLERANCE


def test_several_losses_and_results_equal_original_step():
    image = keras.Input((6,))
    x = layers.Dense(6, activation="gelu")(image)
    model = keras.Model(image, [layers.Dense(3)(x), layers.Dense(1)(x)])
    losses = [keras.losses.SparseCategoricalCrossentropy(from_logits=True), "mse"]
    model.compile(keras.optimizers.Adam(0.01), losses, loss_weights=[1.0, 0.3], metrics=[["accuracy"], ["mae"]])
    model.optimizer.build(model.trainable_variables)
    x, y = np.random.default_rng(0).normal(size=(8, 6)), np.arange(8) % 3
    model._symbolic_build(data_batch=(x, (y, x[:, :1])))
    step = tf.function(lambda x, y, z: model.train_step((x, (y, z))), autograph=False)
    own = [v.value for v in (*model.variables, *model.optimizer.variables, *model.metrics_variables)]
    assert compared(step, own, x, y, x[:, :1], count=4) < TOLERANCE


def test_mixed_precision_with_loss_scaling_equals_original_step():
    """Gradients are unscaled, and looked at for infinities, once they are those of the whole batch."""
    keras.config.set_floatx("float32")
    policy = keras.mixed_precision.Policy("mixed_float16")
    image = keras.Input((6,))
    x = layers.Dense(6, activation="relu", dtype=policy)(image)
    model = keras.Model(image, layers.Dense(3, dtype="float32")(x))
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), auto_scale_loss=False)
    optimizer.build(model.trainable_variables)

    @tf.function(autograph=False)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = model.loss(y, model(x, training=True))
            scaled = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)
        return loss

    x = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
    own = [v.value for v in (*model.variables, *optimizer.variables)]
    assert compared(step, own, x, np.arange(8) % 3, count=2) < 5e-3
    assert optimizer.inner_optimizer.iterations.numpy() == 0, "put back"


def test_losses_of_different_reductions_are_refused():
    w, v = tf.Variable(np.eye(3)), tf.Variable(np.eye(3))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(x @ w)) + tf.reduce_mean(tf.tanh(x @ v))
        for variable, gradient in zip([w, v], tape.gradient(loss, [w, v]), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    with pytest.raises(PipelineError, match="Some gradients are sums over the batch and some are means"):
        in_parts(step, 2, np.ones((4, 3)))


def test_loss_reduction_of_open_batch_is_inferred():
    known, _ = descending(sum_loss)
    step = tf.function(known.python_function, input_signature=[tf.TensorSpec((None, 3), "float64")])
    x = np.ones((4, 3))
    with pytest.raises(PipelineError, match='pass `loss_reduction="sum"`'):
        in_parts(step, 2, x)
    told = in_parts(step, 2, x, loss_reduction="sum").plan.notes
    assert len(told) == 1 and "runs as one micro-batch" in told[0], "a sum divides by nothing, whatever the batch"
