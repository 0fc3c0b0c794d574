"""Batches that micro-batches do not cut evenly, such as the last one of an epoch: the training is the same."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from pipelined import (
    CUTS,
    HERE,
    OPEN,
    compiled,
    fitted,
    hand_step,
    largest_error,
    net,
    of_sizes,
    run,
    tiles,
    train_step,
)
from swapping import file_bytes, num_unread

import tflms_sft
from rewriters.errors import PipelineError
from rewriters.step_importer import StepImporter
from tflms_sft import LMSParams, Pipeline, PipelineParams
from tflms_sft._pipeline import build

pytestmark = pytest.mark.usefixtures("double_precision")

TOLERANCE = 1e-12
SWAPS = LMSParams(tier="disk", min_bytes=1)
OPEN_ROWS = (tf.TensorSpec((None, 3), "float64"),)
SIZES = 8, 6, 4, 3, 8, 1
"""Of batches that four micro-batches cut evenly or not; the last are fewer."""


@functools.cache
def plain(size, steps=1):
    """What a plain training comes to."""
    return fitted([], size=size, steps=steps)


def any_size(step, *params, count=4, **options):
    """The step for batches of any size, with batches of 8 in micro-batches, one after another on one device."""
    pipeline = PipelineParams(1, "basic", count, ["CPU:0"], **options)
    return tflms_sft.rewrite(open_step(step), [*params, pipeline], *of_sizes(8)[0])


def open_step(step, specs=OPEN):
    return tf.function(step.python_function, input_signature=specs, autograph=False)


# Under `fit` ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "size", "steps"),
    [("gpipe", 22, 1), ("1f1b", 19, 2), ("mast", 22, 1)],
    ids=["gpipe", "fewer samples than micro-batches, several steps at once", "mast"],
)
def test_fit_with_uneven_last_batch_equals_plain_fit(schedule, size, steps, capsys):
    """Losses, metrics, weights and slots after two epochs."""
    callback = Pipeline(CUTS, schedule, 4, HERE)
    assert largest_error(fitted([callback], size=size, steps=steps), plain(size, steps)) < TOLERANCE
    note = "a batch of another size than 8, such as the last one of an epoch, runs as one micro-batch"
    assert note in callback.plan.notes and note in capsys.readouterr().out and note in callback.plan.summary()
    assert callback.plan.pipeline.micro_batches == 4


def test_fit_with_several_outputs_weighs_losses_as_keras():
    """It weighs them by the size of a batch where it knows that when it traces, and not where it does not."""
    x, y = of_sizes(8)[0][0].reshape(8, -1)[:7], np.arange(21.0).reshape(7, 3)
    found = []
    for callbacks in ([], [Pipeline(["first"], "gpipe", 2, HERE[:2], verbose=0)]):
        keras.utils.set_random_seed(1)
        image = keras.Input((x.shape[1],))
        z = keras.layers.Dense(3, activation="tanh", name="first")(image)
        model = keras.Model(image, [keras.layers.Dense(3, name=name)(z) for name in "pq"])
        model.compile(keras.optimizers.SGD(0.01), ["mse", "mae"], jit_compile=False)
        told = model.fit(x, [y, y], batch_size=4, epochs=2, verbose=0, shuffle=False, callbacks=callbacks).history
        values = [*model.variables, *model.metrics_variables]
        found.append([*map(np.array, told.values()), *(value.numpy() for value in values)])
    assert largest_error(*found) < TOLERANCE and len(found[0]) > 10


def test_data_replicas_with_uneven_batch_equal_plain_fit():
    callback = Pipeline(CUTS, "1f1b", 2, ["CPU:0"] * 8, 2, verbose=0)
    assert largest_error(fitted([callback], size=22), plain(22)) < TOLERANCE
    assert "another size than 8" in callback.plan.notes[-1]


def test_first_batch_of_uneven_size_is_refused_before_it_runs():
    """And the model is as it was."""
    callback = Pipeline(CUTS, "gpipe", 4, HERE, verbose=0)
    text = "must divide the batch size. Received: a batch of 6, .* Use batches whose size is a multiple of 4"
    with pytest.raises(ValueError, match=text):
        fitted([callback], size=6)
    assert callback.plan is None
    with pytest.raises(ValueError, match="Received: a batch of 8, micro_batches=3"):
        fitted([Pipeline(CUTS, "gpipe", 3, HERE, verbose=0)], size=22)


def test_plan_of_known_batch_has_no_notes():
    """Of one micro-batch, and of a batch of known size."""
    step = train_step(compiled(net(HERE), "momentum"))
    for count, data in ((1, OPEN), (4, of_sizes(8)[0])):
        assert tflms_sft.rewrite(step, PipelineParams(CUTS, "gpipe", count, HERE), *data).plan.notes == ()


# Steps of one's own -----------------------------------------------------------------------------------------


def test_open_step_with_any_batch_size_equals_original_step():
    """Its loss, gradients and logits too, in their structure."""
    model = compiled(net(HERE, skip=True), "adam")
    step = hand_step(model)
    rewritten, whole, data = any_size(step), step.get_concrete_function(*OPEN), of_sizes(*SIZES)
    assert largest_error(run(model, rewritten, data), run(model, whole, data)) < TOLERANCE
    for batch in data[:2]:
        got, want = rewritten(*batch), whole(*map(tf.constant, batch))
        tf.nest.assert_same_structure(got, want, expand_composites=True)
        assert [t.shape for t in tf.nest.flatten(got)] == [t.shape for t in tf.nest.flatten(want)]


def test_tiles_and_swaps_in_stages_with_uneven_batches_equal_original_step():
    """Nothing is left to be read, whichever way a batch goes, and no file after a step that fails."""
    model = compiled(net(HERE, deep=True), "adam")
    step = train_step(model)
    params = [tiles(), SWAPS, PipelineParams(["stage1"], "gpipe", 2, HERE[:2])]
    rewritten = tflms_sft.rewrite(open_step(step), params, *of_sizes(8)[0])
    data = of_sizes(8, 5, 1)
    assert largest_error(run(model, rewritten, data), run(model, step, data)) < TOLERANCE
    assert len(rewritten.plan.segments) >= 2 and len(rewritten.plan.swaps) >= 2
    stores = [tier.store for tier in rewritten.tiers]
    assert len(stores) == 2
    assert all(num_unread(store) == 0 < file_bytes(store) for store in stores)
    (x, y), _, _ = data
    with pytest.raises(tf.errors.InvalidArgumentError, match="have the same leading size"):
        rewritten(x, y[:4])
    assert all(num_unread(store) == file_bytes(store) == 0 for store in stores)


def rows_of(*sizes):
    """Batches of rows."""
    return [(np.random.default_rng(0).normal(size=(size, 3)),) for size in sizes]


def furthest(step, rewritten, variables, data):
    """The largest difference between the results, and the variables, after each batch."""
    start, found = [np.array(v) for v in variables], []
    for function in (step, rewritten):
        results = (function(*map(tf.constant, batch)) for batch in data)
        found.append([np.array(v) for result in results for v in (*tf.nest.flatten(result), *variables)])
        for variable, value in zip(variables, start, strict=True):
            variable.assign(value)
    return largest_error(found[1], found[0])


def test_step_with_input_signature_equals_original_step():
    w = tf.Variable(np.eye(3) + 0.1)

    @tf.function(input_signature=[tf.TensorSpec((None, 3), "float64")])
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(x @ w)) / tf.cast(tf.shape(x)[0], "float64")
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss

    data = rows_of(8, 5, 12, 1)
    rewritten = tflms_sft.rewrite(step, PipelineParams(1, "basic", 4, ["CPU:0"]), *data[0])
    assert furthest(step, rewritten, [w], data) < TOLERANCE
    with pytest.raises(PipelineError, match="Gradients are a mean"):
        tflms_sft.rewrite(step, PipelineParams(1, "basic", 4, ["CPU:0"], loss_reduction="sum"), *data[0])


@pytest.mark.parametrize("example", ["array", "spec", "keyword"])
@pytest.mark.parametrize("rows", [8, 10])
def test_open_table_of_any_size_equals_original_step(rows, example):
    """What divides by its size divides by that, whatever the pipeline was made for."""
    w = tf.Variable(np.eye(3) + 0.1)

    @tf.function(input_signature=[tf.TensorSpec((None, 3), "float64")] * 2)
    def step(x, codes):
        with tf.GradientTape() as tape:
            mean = tf.reduce_sum(codes) / tf.cast(tf.shape(codes)[0], "float64")
            loss = tf.reduce_mean(tf.tanh(x @ w)) * mean
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss

    random = np.random.default_rng(0)
    examples = [random.normal(size=(8, 3)), random.normal(size=(10, 3))]
    if example == "spec":
        examples[1] = tf.TensorSpec((None, 3), "float64")
    params = PipelineParams(1, "basic", 4, ["CPU:0"], batched=[0])
    named = dict(zip(("x", "codes"), examples, strict=True)) if example == "keyword" else {}
    rewritten = tflms_sft.rewrite(step, params, *(() if named else examples), **named)
    data = [(random.normal(size=(size, 3)), random.normal(size=(rows, 3))) for size in (8, 12, 5, 8)]
    assert furthest(step, rewritten, [w], data) < TOLERANCE


@pytest.mark.parametrize(
    "number",
    [
        lambda size: 1 / tf.cast(tf.minimum(size, 16), "float64"),
        lambda size: tf.cast(1 + size // 30, "float64") / tf.cast(size, "float64"),
        lambda size: tf.cast(tf.where(size > 32, 2, 1), "float64") / tf.cast(size, "float64"),
        lambda size: tf.cond(size > 32, lambda: np.float64(2), lambda: np.float64(1)) / tf.cast(size, "float64"),
        lambda size: 1 / tf.cast(size // 2, "float64"),
        lambda size: tf.cast(tf.where(size > 1, 2, 1), "float64") / tf.cast(size, "float64"),
        lambda size: tf.cast(1 + size % 2, "float64") / tf.cast(size, "float64"),
    ],
    ids=["least", "steps", "large", "branch", "half", "single", "odd"],
)
def test_sizes_that_scale_differently_in_other_batches_equal_original_step(number):
    """Those run as one micro-batch."""
    w = tf.Variable(np.eye(3) + 0.1)

    @tf.function(input_signature=OPEN_ROWS, autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(x @ w)) * number(tf.shape(x)[0])
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss

    data = rows_of(8, 40, 3)
    rewritten = tflms_sft.rewrite(step, PipelineParams(1, "basic", 2, ["CPU:0"]), *data[0])
    assert furthest(step, rewritten, [w], data) < TOLERANCE


@pytest.mark.parametrize(
    ("write", "dtype"),
    [
        (lambda own, size: own.assign_add(size), "int32"),
        (lambda own, size: own.assign(size), "int32"),
        (lambda own, size: own.assign(tf.maximum(own, size)), "int32"),
        (lambda own, size: own.assign_add(size // 2), "int32"),
        (lambda own, size: own.assign_add(1 / tf.cast(size, "float64")), "float64"),
        (lambda own, size: own.assign(own * (1 - 0.01 * tf.cast(size, "float64"))), "float64"),
        (lambda own, size: tf.cond(size > 5, lambda: own.assign_add(1.0), lambda: own.assign_add(0.0)), "float64"),
    ],
    ids=["total", "last", "largest", "halves", "inverse", "decay", "branch"],
)
@pytest.mark.parametrize("stages", [1, 2])
def test_variable_written_from_batch_size_equals_original_step(write, dtype, stages):
    """And not that of a micro-batch, or as often as there are micro-batches."""
    w, own = [tf.Variable(np.eye(3) + 0.1 * number) for number in range(2)], tf.Variable(1, dtype=dtype)

    @tf.function(input_signature=OPEN_ROWS)
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.tanh(x @ w[0]) @ w[1]))
        for variable, gradient in zip(w, tape.gradient(loss, w), strict=True):
            variable.assign_sub(0.1 * gradient)
        write(own, tf.shape(x)[0])
        return loss, own.read_value()

    params = PipelineParams(stages, "gpipe", 4, ["CPU:0"] * stages)
    data = rows_of(8, 6, 4, 12)
    assert furthest(step, tflms_sft.rewrite(step, params, *data[0]), [*w, own], data) < TOLERANCE


def test_gradients_of_variable_written_from_batch_size_equal_original_step():
    w, own = tf.Variable(np.eye(3) + 0.1), tf.Variable(1.0, dtype="float64")

    @tf.function(input_signature=OPEN_ROWS)
    def step(x):
        own.assign(tf.cast(tf.shape(x)[0], "float64"))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(x @ w)) / own
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss

    data = rows_of(8, 6)
    rewritten = tflms_sft.rewrite(step, PipelineParams(1, "basic", 4, ["CPU:0"]), *data[0])
    assert furthest(step, rewritten, [w, own], data) < TOLERANCE


@pytest.mark.parametrize(
    "extra",
    [
        lambda rows, u: 0.0 * tf.reduce_sum(rows * u),
        lambda rows, u: tf.reduce_mean(tf.zeros_like(rows) * tf.reduce_sum(u)),
    ],
    ids=["weight of zero", "zeros"],
)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_zero_gradients_are_accepted_with_any_reduction(extra, reduction):
    """Which nobody needs to know."""
    w, u = tf.Variable(np.eye(3) + 0.1), tf.Variable(np.ones(3))

    @tf.function(input_signature=OPEN_ROWS)
    def step(x):
        with tf.GradientTape() as tape:
            rows = tf.tanh(x @ w)
            loss = getattr(tf, f"reduce_{reduction}")(tf.square(rows)) + extra(rows, u)
        gradients = tape.gradient(loss, [w, u])
        for variable, gradient in zip((w, u), gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss, gradients

    data = rows_of(8, 6)
    rewritten = tflms_sft.rewrite(step, PipelineParams(1, "basic", 4, ["CPU:0"], loss_reduction=reduction), *data[0])
    assert furthest(step, rewritten, [w, u], data) < TOLERANCE


def test_shapes_in_branch_for_one_size_do_not_hold_for_other_sizes():
    """TensorFlow's optimizer would, of an update that adds the whole batch to what is of a known size there."""
    w = tf.Variable(np.eye(3) + 0.1)

    @tf.function(input_signature=[tf.TensorSpec((None, 3), "float64")])
    def step(x):
        with tf.GradientTape() as tape:
            rows = tf.squeeze(tf.reshape(tf.tanh(x @ w), [tf.shape(x)[0], 1, 3]), 1)
            loss = tf.reduce_mean(tf.square(rows))
        gradient = tape.gradient(loss, w)
        total = tf.reduce_sum(gradient)
        w.assign_sub(0.1 * gradient + 0.01 * tf.reduce_mean(tf.add_n([x * total, rows * total])))
        return loss

    data = rows_of(8, 5, 12, 1)
    rewritten = tflms_sft.rewrite(step, PipelineParams(1, "basic", 4, ["CPU:0"]), *data[0])
    assert furthest(step, rewritten, [w], data) < TOLERANCE


def test_sum_loss_with_uneven_batches_equals_original_step():
    model = compiled(net(HERE), "momentum")
    model.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    model.optimizer.learning_rate = 0.01
    step, data = hand_step(model), of_sizes(*SIZES)
    rewritten, whole = any_size(step, loss_reduction="sum"), step.get_concrete_function(*OPEN)
    assert largest_error(run(model, rewritten, data), run(model, whole, data)) < TOLERANCE


def test_batch_norm_of_uneven_batch_has_its_whole_statistics():
    model = compiled(net(HERE, norm=True), "momentum")
    step = hand_step(model)
    rewritten, whole = any_size(step, batch_norm="micro"), step.get_concrete_function(*OPEN)
    errors = [largest_error(run(model, rewritten, data), run(model, whole, data)) for data in map(of_sizes, (6, 8))]
    assert errors[0] < TOLERANCE and errors[1] > 1e-4


@pytest.mark.parametrize("result", ["nothing", "argument", "slices"])
def test_results_of_all_structures_equal_original_step(result):
    """Of a step that reads a table from outside, too large to be a constant of the trace."""
    w, table = tf.Variable(np.eye(3) + 0.1), tf.constant(np.arange(300.0).reshape(100, 3))

    @tf.function(autograph=False, input_signature=[*OPEN_ROWS, tf.TensorSpec((None,), "int32")])
    def step(x, rows):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(tf.gather(w, rows) * x + tf.gather(table, rows)))
        gradient = tape.gradient(loss, w)
        w.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        return {"nothing": None, "argument": (x, loss), "slices": {"gradient": gradient, "none": None}}[result]

    start, random = w.numpy(), np.random.default_rng(0)
    data = [(random.normal(size=(size, 3)), np.arange(size, dtype="int32") % 3) for size in (4, 5, 1, 2)]
    rewritten = tflms_sft.rewrite(step, PipelineParams(1, "basic", 2, ["CPU:0"]), *data[0])
    found = []
    for function in (step, rewritten):
        values = []
        for batch in data:
            got = function(*map(tf.constant, batch))
            values += [got] if got is None else [tf.convert_to_tensor(t) for t in tf.nest.flatten(got) if t is not None]
            values.append(w.numpy())
        found.append([np.array(value) for value in values if value is not None])
        w.assign(start)
    assert largest_error(found[1], found[0]) < TOLERANCE


def test_arguments_of_different_sizes_are_refused():
    rewritten = any_size(hand_step(compiled(net(HERE), "momentum")))
    ((x, y),) = of_sizes(8)
    for images, labels in ((8, 4), (6, 4), (4, 6)):
        with pytest.raises(tf.errors.InvalidArgumentError, match="same first dimension"):
            rewritten(x[:images], y[:labels])


def test_verify_of_uneven_batch_passes():
    """Its gradients too, which are those of one micro-batch."""
    model = compiled(net(HERE), "momentum")
    callback = Pipeline(CUTS, "gpipe", 4, HERE, verbose=0)
    x, y = (np.concatenate(parts) for parts in zip(*of_sizes(8, 6), strict=True))
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[callback])
    proof = tflms_sft.verify(model, of_sizes(6)[0], callback)
    assert proof.ok and not proof.not_compared and "10 gradient(s)" in proof.summary()


def test_verify_of_broken_uneven_batch_fails(monkeypatch):
    class BrokenImporter(StepImporter):
        def __init__(self, graph, *args):
            if not any(node.op == "Split" for node in graph.nodes.values()):
                next(node for node in graph.nodes.values() if node.op == "Tanh").op = "Sigmoid"
            super().__init__(graph, *args)

    model = compiled(net(HERE), "momentum")
    with monkeypatch.context() as patched:
        patched.setattr(build, "StepImporter", BrokenImporter)
        rewritten = any_size(hand_step(model))
    ((x, y),) = of_sizes(8)
    assert tflms_sft.verify(rewritten, (x, y))
    found = tflms_sft.verify(rewritten, (x[:6], y[:6]))
    assert not found.outputs.ok and not found.gradients.ok
