"""What a step computes with the size of the batch: the same in micro-batches, or refused, and never something else."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from pipelined import largest_error

import tflms_sft
from rewriters.errors import PipelineError
from tflms_sft import Pipeline, PipelineParams

pytestmark = pytest.mark.usefixtures("double_precision")

TOLERANCE = 1e-12
ROWS, LONG = tf.TensorSpec((None, 3), "float64"), tf.TensorSpec((None, None, 3), "float64")
INDEXED = "an entry for each sample that does not depend on the data"
NO_POWER = "computes with .*which depends on the batch size in a way"
mean = tf.reduce_mean


def real(number):
    return tf.cast(number, "float64")


class Step:
    """A step of `loss(rows, x, *more)` and what it has of variables; `more` are its arguments besides."""

    def __init__(self, loss, specs=(ROWS,), result=None):
        self.w = tf.Variable(np.eye(3) + 0.1)
        self.seen = tf.Variable(0.0, dtype="float64", trainable=False)
        self.five = tf.Variable(5, dtype="int32", trainable=False)
        self.table = tf.Variable(np.arange(1.0, 41.0), trainable=False)
        self.variables = [self.w, self.seen]

        def step(x, *more):
            with tf.GradientTape() as tape:
                value = loss(self, tf.tanh(x @ self.w), x, *more)
            gradient = tape.gradient(value, self.w)
            self.w.assign_sub(0.1 * gradient)
            return (value, gradient) if result is None else result(self, x)

        self.function, self.specs = tf.function(step, autograph=False), specs
        self.open = tf.function(step, autograph=False, input_signature=specs)

    def rewritten(self, data, told, **options):
        """By example arguments for a step of any batch, or by arguments of known sizes."""
        params = PipelineParams(1, "basic", 4, ["CPU:0"], **options)
        if told == "known":
            return tflms_sft.rewrite(self.function, params, *data)
        return tflms_sft.rewrite(self.open, params, *data)

    def error(self, rewritten, data):
        """How far results and variables are off."""
        start, found = [v.numpy() for v in self.variables], []
        for function in (self.open, rewritten):
            values = [tf.nest.flatten(function(*map(tf.constant, arguments))) for arguments in data]
            found.append([np.array(v) for v in (*(v for several in values for v in several), *self.variables)])
            for variable, value in zip(self.variables, start, strict=True):
                variable.assign(value)
        return largest_error(found[1], found[0])


def batch(size, *axes):
    return np.random.default_rng(size).normal(size=(size, *axes, 3))


# By what is not known ---------------------------------------------------------------------------------------

SIZES = {
    "above a variable": lambda s, n: tf.where(n > s.five, real(2), real(1)),
    "a branch above a variable": lambda s, n: tf.cond(n > s.five, lambda: real(2), lambda: real(1)),
    "both are so": lambda s, n: tf.cond((n > s.five) & (s.five > 2), lambda: real(2), lambda: real(1)),
    "rest of a variable": lambda s, n: real(1 + 100 * s.five % n),
    "parts of a variable": lambda s, n: real(100 * s.five // n),
    "bits": lambda s, n: real(tf.bitwise.bitwise_and(s.five, n)),
    "a sum with a variable": lambda s, n: real(n + s.five),
    "the least": lambda s, n: real(tf.minimum(n, s.five)),
    "a power": lambda s, n: tf.exp(-s.table[0] * real(n)),
    "a row": lambda s, n: s.table[n],
    "a row of whole numbers": lambda s, n: real(tf.cast(s.table, "int32")[n]),
    "a place": lambda s, n: real(tf.searchsorted(s.table, [real(n)])[0]),
    "a place among whole numbers": lambda s, n: real(tf.searchsorted(tf.cast(s.table, "int32"), [n])[0]),
    "a small number beside it": lambda s, n: real(n) / (real(n) + 1e-7),
}


@pytest.mark.parametrize("told", ["example", "known"])
@pytest.mark.parametrize("number", SIZES.values(), ids=SIZES)
def test_batch_size_combined_with_variable_is_refused(number, told):
    step = Step(lambda s, rows, x: mean(rows) * number(s, tf.shape(x)[0]))
    with pytest.raises(PipelineError, match=f"{NO_POWER}|mix samples"):
        step.rewritten([batch(8)], told)


@pytest.mark.parametrize("told", ["example", "known"])
def test_integer_product_of_size_and_variable_equals_original_step(told):
    """What was refused as a sum was right, and what it was to be changed to was not."""
    step = Step(lambda s, rows, x: tf.reduce_sum(rows) / real(tf.shape(x)[0] * s.five))
    assert step.error(step.rewritten([batch(8)], told), [[batch(8)]]) < TOLERANCE
    with pytest.raises(PipelineError, match="Gradients are a mean"):
        step.rewritten([batch(8)], told, loss_reduction="sum")


# By rows ----------------------------------------------------------------------------------------------------

DECIDED = {
    "a branch": lambda rows, x, n: tf.cond(n > 4, lambda: rows, lambda: 2 * rows),
    "turned by": lambda rows, x, n: tf.roll(rows, n // 4, 1),
    "a column": lambda rows, x, n: rows[:, n // 8 : n // 8 + 1],
    "a gathered column": lambda rows, x, n: tf.gather(rows, n // 8, axis=1),
    "places by data": lambda rows, x, n: rows[:, 0] * tf.gather(np.arange(99.0), tf.cast(x[:, 0] > 0, n.dtype) * n),
}


@pytest.mark.parametrize("told", ["example", "known"])
@pytest.mark.parametrize("rows_of", DECIDED.values(), ids=DECIDED)
def test_rows_decided_by_batch_size_are_refused(rows_of, told):
    step = Step(lambda s, rows, x: mean(rows_of(rows, x, tf.shape(x)[0])))
    with pytest.raises(PipelineError, match=f"{NO_POWER}|{INDEXED}"):
        step.rewritten([batch(8)], told)


@pytest.mark.parametrize(
    ("rows_of", "name"),
    [
        (lambda rows, n: tf.nn.leaky_relu(rows, alpha=0.1 * n), "alpha"),
        (lambda rows, n: tf.cumsum(rows, 1, reverse=n > 4)[:, :1], "reverse"),
    ],
)
def test_op_attributes_set_by_batch_size_are_refused(rows_of, name):
    step = Step(lambda s, rows, x: mean(rows_of(rows, x.shape[0])))
    with pytest.raises(PipelineError, match=f"has another `{name}` for a micro-batch than for the batch"):
        step.rewritten([batch(8)], "known")


def test_layer_that_branches_on_batch_size_under_fit_is_refused():
    class Layer(keras.layers.Layer):
        def call(self, x):
            return tf.cond(tf.shape(x)[0] > 4, lambda: x, lambda: 2 * x)

    image = keras.Input((3,))
    x = Layer(name="branched")(keras.layers.Dense(3, name="first")(image))
    model = keras.Model(image, keras.layers.Dense(1)(x))
    model.compile("sgd", "mse", jit_compile=False)
    callback = Pipeline(["first"], "gpipe", 4, ["CPU:0"] * 2)
    with pytest.raises(PipelineError, match=f"'branched' .Layer. {NO_POWER}"):
        model.fit(batch(8), np.ones((8, 1)), batch_size=8, verbose=0, callbacks=[callback])


# By other sizes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_concrete", [True, False])
def test_open_batch_without_example_is_refused_with_remedy(as_concrete):
    step = Step(lambda s, rows, x: mean(rows)).open
    function = step.get_concrete_function() if as_concrete else step
    with pytest.raises(
        PipelineError, match="batch size of the step is unknown, but 4 micro-batches .* example arguments"
    ):
        tflms_sft.rewrite(function, PipelineParams(1, "basic", 4, ["CPU:0"]))


@pytest.mark.parametrize(
    "number", [lambda n, k: real(tf.minimum(n, k)) / real(n), lambda n, k: tf.where(n > k, real(2), real(1))]
)
def test_open_table_compared_with_batch_size_is_refused(number):
    step = Step(lambda s, rows, x, k: mean(rows) * number(tf.shape(x)[0], tf.shape(k)[0]), (ROWS, ROWS))
    with pytest.raises(PipelineError, match=f"{NO_POWER}|neither a sum nor a mean"):
        step.rewritten([batch(8), batch(5)], "example", batched=[0])


@pytest.mark.parametrize(
    "loss",
    [
        lambda s, rows, x: mean(rows),
        lambda s, rows, x: mean(mean(rows, [1, 2])),
        lambda s, rows, x: tf.reduce_sum(rows) / real(tf.size(x)),
        lambda s, rows, x: tf.reduce_sum(rows) / real(tf.shape(x)[0] * tf.shape(x)[1] * 3),
        lambda s, rows, x: mean(tf.tanh(tf.tensordot(rows, tf.eye(3, dtype="float64"), 1))),
        lambda s, rows, x: mean(tf.concat([rows, rows[:, :1]], 1)),
    ],
    ids=["mean", "mean of means", "size", "sizes", "dense", "joined"],
)
def test_means_over_an_open_axis_equal_original_step(loss):
    step, data = Step(loss, (LONG,)), [[batch(8, 5)], [batch(12, 7)], [batch(6, 1)]]
    assert step.error(step.rewritten(data[0], "example"), data) < TOLERANCE


@pytest.mark.parametrize(
    "number",
    [
        lambda n, t: tf.where(n > 5, real(2), real(1)),
        lambda n, t: tf.where(n > t, real(2), real(1)),
        lambda n, t: tf.cond(n > t, lambda: real(2), lambda: real(1)),
        lambda n, t: real(tf.minimum(n, t)) / real(n),
        lambda n, t: real(n * t % 5 + 1),
    ],
    ids=["above", "longer", "branch", "least", "rest"],
)
def test_batch_size_combined_with_open_axis_is_refused(number):
    step = Step(lambda s, rows, x: mean(rows) * number(tf.shape(x)[0], tf.shape(x)[1]), (LONG,))
    with pytest.raises(PipelineError, match=f"{NO_POWER}|neither a sum nor a mean"):
        step.rewritten([batch(8, 5)], "example")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_open_axis_that_decides_how_losses_are_combined_is_refused(reduction):
    """With two micro-batches a factor of 2 is a power of their number, so that a mean looks like a sum."""
    step = Step(lambda s, rows, x: mean(rows) * tf.where(tf.shape(x)[0] > tf.shape(x)[1], real(2), real(1)), (LONG,))
    params = PipelineParams(1, "basic", 2, ["CPU:0"], loss_reduction=reduction)
    with pytest.raises(PipelineError, match="Gradients are a"):
        tflms_sft.rewrite(step.open, params, batch(8, 5))


# Not refused ------------------------------------------------------------------------------------------------


def hidden_count(s, rows, x):
    s.seen.assign_add(real(tf.shape(rows)[0]))
    return mean(rows)


def hidden_rate(s, rows, x):
    s.seen.assign(0.5 * s.seen + 1 / real(tf.shape(rows)[0]))
    return mean(rows)


ALLOWED = {
    "guarded": lambda s, rows, x: tf.reduce_sum(rows) / real(tf.maximum(tf.shape(x)[0], 1)),
    "guarded by a branch": lambda s, rows, x: mean(rows) * tf.where(tf.shape(x)[0] > 0, real(1), real(0)),
    "a part of all sizes": lambda s, rows, x: tf.reduce_sum(rows) / real(tf.shape(x))[0],
    "count of a hidden tensor": hidden_count,
    "rate of a hidden tensor": hidden_rate,
}


@pytest.mark.parametrize("name", ALLOWED)
def test_sizes_that_scale_as_a_power_equal_original_step(name):
    step, data = Step(ALLOWED[name]), [[batch(size)] for size in (8, 12, 6)]
    assert step.error(step.rewritten(data[0], "example"), data) < TOLERANCE


PLACED = {
    "rows by place": lambda s, rows, x: mean(rows * s.table[: tf.shape(x)[0], None]),
    "numbers of samples": lambda s, rows, x: mean(rows * real(tf.range(tf.shape(x)[0]))[:, None]),
    "noise of a hidden size": lambda s, rows, x: mean(
        rows * tf.random.stateless_uniform(tf.shape(rows), [1, 2], dtype="float64")
    ),
}


@pytest.mark.parametrize("name", PLACED)
@pytest.mark.parametrize("batch_norm", ["refuse", "micro"])
def test_values_that_differ_between_samples_are_refused(name, batch_norm):
    with pytest.raises(PipelineError, match=f"{INDEXED}.* Pass it as an argument"):
        Step(PLACED[name]).rewritten([batch(8)], "example", batch_norm=batch_norm)


def test_generator_draws_per_micro_batch_of_any_size():
    """Other numbers than the plain step, as dropout does, and it goes on."""
    generator = tf.random.Generator.from_seed(1)
    step = Step(lambda s, rows, x: mean(rows * generator.uniform(tf.shape(rows), dtype="float64")))
    rewritten, start = step.rewritten([batch(8)], "example"), generator.state.numpy()
    first, second = (rewritten(tf.constant(batch(8)))[0].numpy() for _ in range(2))
    assert first != second and (generator.state.numpy() != start).any()


@pytest.mark.parametrize(
    "result",
    [lambda s, n: s.seen / n, lambda s, n: s.seen * n, lambda s, n: s.seen + n, lambda s, n: tf.pow(s.seen, 1 / n)],
)
def test_results_of_written_variable_and_size_are_refused(result):
    """Each micro-batch would make one with its own size; the plan took the last."""

    def loss(s, rows, x):
        s.seen.assign_add(tf.reduce_sum(tf.square(rows)))
        return mean(rows)

    step = Step(loss, result=lambda s, x: result(s, real(tf.shape(x)[0])))
    with pytest.raises(PipelineError, match=f"is computed from the batch size and from a variable|{NO_POWER}"):
        step.rewritten([batch(8)], "known")
    step = Step(loss, result=lambda s, x: tf.sqrt(2 * s.seen + 1))
    assert step.error(step.rewritten([batch(8)], "known"), [[batch(8)]] * 2) < TOLERANCE


# Arguments --------------------------------------------------------------------------------------------------


def test_batches_given_by_keyword_equal_original_step():
    """In no order of their names."""
    w = tf.Variable(np.eye(3) + 0.1)

    @tf.function
    def step(x, index, codes):
        with tf.GradientTape() as tape:
            loss = mean(tf.square(tf.tanh(x @ w) - tf.gather(codes, index)))
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss

    given = {"x": batch(8), "index": np.arange(8), "codes": batch(10)}
    params = PipelineParams(1, "basic", 4, ["CPU:0"], batched=["x", "index"])
    rewritten, start, found = tflms_sft.rewrite(step, params, **given), w.numpy(), []
    for function in (step, rewritten):
        found.append([np.array(function(**{name: tf.constant(value) for name, value in given.items()})), w.numpy()])
        w.assign(start)
    assert largest_error(*found) < TOLERANCE


def test_input_signature_of_known_batch_is_refused_with_remedy():
    step = Step(lambda s, rows, x: mean(rows), (tf.TensorSpec((8, 3), "float64"),))
    for data in ([], [batch(8)]):
        with pytest.raises(PipelineError, match="no `input_signature`, or trace it with a batch of `None`"):
            step.rewritten(data, "example")


def test_number_that_equals_the_size_of_a_micro_batch_is_not_taken_for_it():
    """In the trace for a micro-batch both are 2; with tiles, too, the traces are compared constant by constant."""
    image = x = keras.Input((8, 8, 3))
    for name in ("first", "second"):
        x = keras.layers.Conv2D(4, 3, padding="same", activation="relu")(x)
        x = keras.layers.Conv2D(4, 3, padding="same", activation="tanh", name=name)(x)
    model = keras.Model(image, keras.layers.Dense(3)(keras.layers.GlobalAveragePooling2D()(x)))
    weights = model.trainable_variables

    def step(x, y):
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
            loss = tf.reduce_sum(losses) / tf.constant(float(x.shape[0]), "float64")
            penalty = tf.constant(2.0, "float64") * tf.reduce_sum(weights[0] * weights[0])
            total = loss + penalty
        return loss, penalty, total, tape.gradient(total, weights)

    batch = tf.constant(np.random.default_rng(0).normal(size=(4, 8, 8, 3))), tf.constant([0, 1, 2, 0])
    pipeline = PipelineParams(["first"], "gpipe", 2, ["CPU:0"] * 2, placement="copy")
    function = tf.function(step, autograph=False)
    rewritten = tflms_sft.rewrite(function, [tflms_sft.SFTParams((2, 2)), pipeline], *batch)
    pairs = zip(tf.nest.flatten(rewritten(*batch)), tf.nest.flatten(function(*batch)), strict=True)
    assert max(float(tf.reduce_max(abs(got - want))) for got, want in pairs) < TOLERANCE
