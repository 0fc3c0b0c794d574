"""Declared facts about a step (`per_sample`, `reductions`): accepted if a run confirms them, else refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from micro_batched import X, mean, net, same, step_of

import tflms_sft
from rewriters.errors import PipelineError
from tflms_sft import PipelineParams


def params(**options):
    return PipelineParams(1, "basic", 2, ["CPU:0"], **options)


def reversed_twice(x, w, _):
    """Keeps samples apart, which no rule shows."""
    z = tf.reverse(net(x, w), [0], name="turn")
    return mean(tf.square(tf.reverse(z, [0], name="back")))


def test_per_sample_of_ops_that_undo_each_other_equals_original_step():
    with pytest.raises(PipelineError, match="mix samples of the batch"):
        tflms_sft.rewrite(step_of(reversed_twice)[0], params(), X)
    step, variables = step_of(reversed_twice)
    ops = step.get_concrete_function(tf.TensorSpec(X.shape, "float64")).graph.get_operations()
    names = [op.name for op in ops if op.type == "ReverseV2"]
    assert same(step, variables, per_sample=names) == ()


def test_per_sample_of_an_op_that_mixes_samples_is_refused_with_the_difference():
    step, variables = step_of(lambda x, w, _: mean(net(x, w) * tf.reverse(x, [0], name="turn")))
    start = [variable.numpy() for variable in variables]
    with pytest.raises(PipelineError, match=r"on random data .* differs by .* Correct `per_sample` or `reductions`"):
        tflms_sft.rewrite(step, params(per_sample=["turn"]), X)
    for variable, value in zip(variables, start, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_reductions_of_outputs_without_a_rule_are_confirmed_or_refused():
    w = tf.Variable(np.eye(3))

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            rows = tf.tanh(x @ w)
            loss = mean(rows)
        w.assign_sub(0.1 * tape.gradient(loss, w))
        apart = tf.reverse(tf.reverse(rows, [0]), [0])
        return {"apart": apart, "mean": mean(apart)}

    with pytest.raises(PipelineError, match="mix samples of the batch"):
        tflms_sft.rewrite(step, params(), X)
    assert same(step, [w], reductions={"apart": "rows", "mean": "mean"}) == ()
    with pytest.raises(PipelineError, match="on random data output 1 differs by"):
        tflms_sft.rewrite(step, params(reductions={"apart": "rows", "mean": "sum"}), X)


def test_declarations_of_an_open_batch_are_confirmed():
    step, variables = step_of(lambda x, w, _: mean(net(x, w)), lambda x, w: tf.reverse(tf.reverse(x, [0]), [0]))
    step = tf.function(step.python_function, input_signature=[tf.TensorSpec((None, 3), "float64")], autograph=False)
    notes = same(step, variables, reductions={"0": "rows"})
    assert len(notes) == 1 and "runs as one micro-batch" in notes[0]


def test_declarations_of_a_step_that_draws_random_numbers_are_refused():
    step, _ = step_of(lambda x, w, _: mean(net(x, w) * tf.random.uniform(tf.shape(x), dtype="float64")))
    with pytest.raises(PipelineError, match="cannot be confirmed, .* other results in a second run"):
        tflms_sft.rewrite(step, params(reductions={"0": "mean"}), X)


def reversed_logarithms(shift):
    """Return a step whose declared output is finite on random data only with a shift, and its variable."""
    w = tf.Variable(np.eye(3))

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            rows = tf.math.log(x @ w - 2.0 + shift)
            loss = mean(rows)
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return {"mean": mean(tf.reverse(tf.reverse(rows, [0]), [0]))}

    return step, w


def test_declarations_of_a_step_with_nan_are_refused():
    step, w = reversed_logarithms(0.0)
    with pytest.raises(PipelineError, match="cannot be confirmed, .* gives NaN or infinity"):
        tflms_sft.rewrite(step, params(reductions={"mean": "sum"}), X)
    np.testing.assert_array_equal(w.numpy(), np.eye(3))


def test_declarations_of_a_step_with_logarithms_are_confirmed_or_refused():
    step, w = reversed_logarithms(2.0)
    with pytest.raises(PipelineError, match="on random data output 0 differs by"):
        tflms_sft.rewrite(step, params(reductions={"mean": "sum"}), X)
    assert tflms_sft.rewrite(step, params(reductions={"mean": "mean"}), X).plan.pipeline.micro_batches == 2


def test_declared_names_that_do_not_exist_are_refused():
    step, _ = step_of(lambda x, w, _: mean(net(x, w)))
    with pytest.raises(PipelineError, match="`per_sample` must name layers or ops .* 'nowhere' is unknown. Nearest: "):
        tflms_sft.rewrite(step, params(per_sample=["nowhere"]), X)
    with pytest.raises(PipelineError, match=r"`reductions` must name outputs of the step: \['0'\].* \['loss'\] cannot"):
        tflms_sft.rewrite(step, params(reductions={"loss": "mean"}), X)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"per_sample": "layer"}, TypeError, "`per_sample` must be a list of names"),
        ({"reductions": ["loss"]}, TypeError, "`reductions` must be a dict"),
        ({"reductions": {"loss": "max"}}, ValueError, '`reductions` must map to "mean", "sum" or "rows"'),
        ({"reductions": {"loss": "mean"}, "batch_norm": "micro"}, ValueError, "batch_norm=.micro.`, which"),
    ],
)
def test_declarations_of_wrong_type_are_refused(options, error, text):
    with pytest.raises(error, match=text):
        params(**options)


class Reversal(layers.Layer):
    """Reverses the batch `times` times."""

    def __init__(self, times, **options):
        super().__init__(**options)
        self.times = times

    def call(self, x):
        for _ in range(self.times):
            x = tf.reverse(x, [0])
        return x


def trained_weights(times, callbacks):
    keras.utils.set_random_seed(1)
    image = keras.Input((4,), dtype="float64")
    x = layers.Dense(5, activation="tanh", name="hidden")(image)
    model = keras.Model(image, layers.Dense(3)(Reversal(times, name="reversal")(x)))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", jit_compile=False)
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(16, 4)), generator.normal(size=(16, 3))
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    return model.get_weights()


def declared_pipeline():
    return tflms_sft.Pipeline(["hidden"], "gpipe", 4, ["CPU:0"] * 2, per_sample=["reversal"], verbose=0)


def test_per_sample_layer_under_fit_is_confirmed_or_refused():
    keras.config.set_floatx("float64")
    expected = trained_weights(2, [])
    for weight, actual in zip(expected, trained_weights(2, [declared_pipeline()]), strict=True):
        np.testing.assert_allclose(actual, weight, rtol=0, atol=1e-10)
    with pytest.raises(PipelineError, match="the step has other results: .* differs by"):
        trained_weights(1, [declared_pipeline()])
