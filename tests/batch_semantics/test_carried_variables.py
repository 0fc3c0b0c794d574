"""Variables that micro-batches write or read: they equal those of the original step, or the step is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from micro_batched import X, first, judge, mean, net, same, size, step_of

from rewriters.errors import PipelineError
from tflms_sft import Pipeline


@pytest.mark.parametrize(
    "effects",
    [
        {"before": lambda x, w, own: own.assign(0.9 * own + 0.1 * mean(first(x, w)))},
        {"after": lambda x, value, own: own.assign(value)},
    ],
)
def test_variables_that_do_not_add_up_are_refused_by_name(effects):
    with pytest.raises(PipelineError, match="they mix samples of the batch: variable 'own:0'"):
        judge(step_of(lambda x, w, _: mean(net(x, w)), **effects)[0])


def totals_and(write):
    """A step that also writes two variables, by its results."""
    w = tf.Variable(np.eye(3), name="w")
    own, other = (tf.Variable(0.5, dtype="float64", name=name) for name in ("own", "other"))

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            made = x @ w
            value = mean(tf.square(made))
        w.assign_sub(0.1 * tape.gradient(value, w))
        write(own, other, tf.reduce_sum(made))
        return value

    return step, [w, own, other]


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (lambda own, other, total: [own.assign(0.0), own.assign_add(total)], "own"),
        (lambda own, other, total: [own.assign(0.9 * own), own.assign_add(0.1 * total)], "own"),
        (lambda own, other, total: [own.assign_add(1.0), own.assign_add(total)], "own"),
        (lambda own, other, total: [own.assign_add(total), other.assign_add(own.read_value())], "other"),
        (lambda own, other, total: [other.assign(own.read_value()), own.assign_add(total)], "other"),
        (lambda own, other, total: [own.assign_add(total), other.assign(tf.maximum(other, own))], "other"),
    ],
)
def test_writes_that_depend_on_another_write_are_refused_by_name(write, name):
    with pytest.raises(PipelineError, match=f"they mix samples of the batch: variable '{name}:0'"):
        judge(totals_and(write)[0])


def test_several_added_sums_equal_original_step():
    step, variables = totals_and(lambda own, other, total: [own.assign_add(total), own.assign_add(2 * total)])
    assert same(step, variables, steps=3) == ()


@pytest.mark.parametrize(
    "effects",
    [
        {"before": lambda x, w, own: own.assign_add(1.0)},
        {"after": lambda x, value, own: own.assign_add(1.0)},
        {"after": lambda x, value, own: own.assign_add(value)},
        {"after": lambda x, value, own: own.assign_add(tf.reduce_sum(x))},
        {"after": lambda x, value, own: own.assign(own + size(x))},
    ],
)
def test_counters_and_totals_equal_original_step(effects):
    """One that counts steps is written once; the loss of a micro-batch counts as its part of the batch."""
    after = effects.get("after")
    anneals = after is None or "1.0" in str(after.__code__.co_consts)

    def loss(x, w, own):
        return mean(net(x, w)) * (tf.exp(-own) if anneals else 1.0)

    assert same(*step_of(loss, **effects), steps=3) == ()


@pytest.mark.parametrize("chosen", [False, True])
def test_update_that_reads_a_total_equals_original_step_or_is_refused(chosen):
    """Of what data chooses of it, each micro-batch would read a part before the others have written."""
    w, total = tf.Variable(np.eye(3)), tf.Variable(np.zeros(3), name="total")

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            value = mean(tf.tanh(x @ w))
        gradient = tape.gradient(value, w)
        total.assign_add(tf.reduce_sum(x, axis=0))
        read = tf.gather(total, tf.cast(x[:, 0] > 0, "int32")) if chosen else total.read_value()
        w.assign_sub(0.1 * gradient * tf.reduce_sum(read * tf.reduce_sum(gradient)))
        return value

    if not chosen:
        assert same(step, [w, total], steps=3) == ()
        return
    with pytest.raises(PipelineError, match="mix samples of the batch: variable 'total:0'"):
        judge(step)


@pytest.mark.parametrize("is_per_sample", [False, True])
def test_counter_that_seeds_noise_counts_steps(is_per_sample):
    """The noise of a step is that of the original one; other noise for each sample is refused."""
    w, counter = tf.Variable(np.eye(3)), tf.Variable(3, dtype="int64", name="counter")

    @tf.function(autograph=False)
    def step(x):
        seed = tf.stack([counter.read_value(), tf.constant(0, "int64")])
        flip = tf.sign(tf.random.stateless_uniform([], seed, -1, 1, "float64"))
        own = tf.random.stateless_normal(tf.shape(x)[:1] if is_per_sample else [], seed, dtype="float64")
        with tf.GradientTape() as tape:
            value = mean(tf.square((flip * x + own[..., None]) @ w))
        w.assign_sub(0.1 * tape.gradient(value, w))
        counter.assign_add(1)
        return value, counter.read_value(), flip

    if is_per_sample:
        with pytest.raises(PipelineError, match="an entry for each sample that does not depend on the data"):
            judge(step)
    else:
        assert same(step, [w, counter], steps=3) == ()


TOTALS = {
    "read before": (lambda before, after, value, x: before, False),
    "read before and after": (lambda before, after, value, x: after - before, False),
    "read after": (lambda before, after, value, x: after * 2, True),
    "a loss over a total": (lambda before, after, value, x: value / after, False),
    "samples over a total": (lambda before, after, value, x: x / after, False),
    "a loss and a total": (lambda before, after, value, x: value + after, False),
    "both, apart": (lambda before, after, value, x: (value, after), True),
}


@pytest.mark.parametrize("name", TOTALS)
def test_results_of_a_total_equal_original_step_or_are_refused(name):
    result, right = TOTALS[name]
    w, own = tf.Variable(np.eye(3)), tf.Variable(np.float64(1), name="own")

    @tf.function(autograph=False)
    def step(x):
        before = own.read_value()
        with tf.GradientTape() as tape:
            value = mean(tf.tanh(x @ w))
        w.assign_sub(0.1 * tape.gradient(value, w))
        own.assign_add(tf.reduce_sum(tf.abs(x)))
        return result(before, own.read_value(), value, x)

    if right:
        assert same(step, [w, own]) == ()
    else:
        with pytest.raises(PipelineError, match="they mix samples of the batch: variable 'own:0'"):
            judge(step)


def fitted(metrics, callbacks, reduction="sum_over_batch_size"):
    keras.utils.set_random_seed(1)
    image = keras.Input((3,))
    model = keras.Model(image, layers.Dense(2)(image))
    model.compile(keras.optimizers.SGD(0.1), keras.losses.MeanSquaredError(reduction), metrics=metrics)
    return model.fit(X, X[:, :2] ** 2, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=callbacks).history


def test_sum_loss_under_fit_equals_original_history():
    want = fitted([], [], "sum")["loss"]
    callback = Pipeline(1, "basic", 2, ["CPU:0"], loss_reduction="sum", verbose=0)
    np.testing.assert_allclose(fitted([], [callback], "sum")["loss"], want, rtol=1e-6)


def test_metric_that_does_not_add_up_is_noted():
    def furthest(y, predicted):
        return keras.ops.max(keras.ops.abs(y - predicted))

    callback = Pipeline(1, "basic", 2, ["CPU:0"], verbose=0)
    fitted([furthest, "mae"], [callback])
    (note,) = callback.plan.notes
    assert "a metric may differ, because it does not add up over micro-batches: `Max` (Max)" in note
