"""What micro-batches make, put together: rows, sums and means are those of the batch, and all else is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from pipelined import largest_error

import tflms_sft
from rewriters.errors import PipelineError
from tflms_sft import PipelineParams

pytestmark = pytest.mark.usefixtures("double_precision")

TOLERANCE = 1e-12
mean = tf.reduce_mean


def descending(loss_and_result):
    """A step that returns a loss and something else, and its weight."""
    w = tf.Variable(np.eye(3) + 0.1)

    @tf.function(autograph=False)
    def step(*args):
        with tf.GradientTape() as tape:
            loss, result = loss_and_result(w, *args)
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss, result

    return step, w


def descending_alone(loss, returned):
    """A step that returns its loss twice or nothing, and its weight."""
    w = tf.Variable(np.eye(3) + 0.1)

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            value = loss(w, x)
        w.assign_sub(0.1 * tape.gradient(value, w))
        return (value, value) if returned else ()

    return step, w


def returning(result, loss=mean):
    """The same with what is made of the features."""

    def loss_and_result(w, x):
        features = tf.tanh(x @ w)
        return loss(features), result(features)

    return descending(loss_and_result)


def compared(made, *args, count=2, example=None, **options):
    """The largest difference of results and weight after two steps, and how results were put together."""
    step, w = made
    if example is not None:
        step = tf.function(step.python_function, input_signature=example, autograph=False)
    rewritten = tflms_sft.rewrite(step, PipelineParams(1, "basic", count, ["CPU:0"], **options), *args)
    start, found = w.numpy(), []
    for function in (step, rewritten):
        results = [np.array(v) for _ in range(2) for v in tf.nest.flatten(function(*map(tf.constant, args)))]
        found.append([*results, w.numpy()])
        w.assign(start)
    assert [value.shape for value in found[0]] == [value.shape for value in found[1]]
    return largest_error(found[1], found[0]), [how for _, how in rewritten.plan.pipeline.results]


X = np.random.default_rng(0).normal(size=(8, 3))
OPEN = tf.TensorSpec((None, 3), "float64")


def whole(x):
    return tf.cast(tf.cast(x, "float64") * 100, "int32")


@pytest.mark.parametrize("example", [None, (OPEN,)], ids=["known", "open"])
@pytest.mark.parametrize(
    ("result", "how"),
    [
        (lambda h: h[:, 0] > 0, "concatenated"),
        (lambda h: tf.argmax(h, axis=1), "concatenated"),
        (lambda h: mean(h, axis=0), "mean"),
        (lambda h: 100 * mean(h) + 1, "mean"),
        (lambda h: mean(tf.math.top_k(h, 2).values), "mean"),
        (lambda h: tf.reduce_sum(h + 1), "sum"),
        (lambda h: tf.math.count_nonzero(h > 0) - tf.reduce_sum(tf.cast(h > 0.5, "int64")), "sum"),
    ],
    ids=["bools", "argmax", "mean of classes", "scaled mean", "largest two", "sum", "counts"],
)
def test_results_equal_those_of_the_batch(result, how, example):
    error, found = compared(returning(result), X, example=example)
    assert error < TOLERANCE and found == ["mean", how]


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (tf.transpose, "has the batch along axis 1"),
        (lambda h: tf.stack([h, h]), "has the batch along axis 1"),
        (lambda h: tf.tanh(tf.reshape(h, [-1])), "several rows for each sample"),
        (lambda h: tf.reshape(tf.transpose(h), [-1]), "several rows for each sample"),
        (lambda h: tf.concat([h, h], axis=0), "several rows for each sample"),
        (lambda h: tf.shape(h)[0] * tf.reduce_sum(whole(h)), "dtype int32 and is not a sum over the batch"),
        (lambda h: tf.reduce_max(whole(h)), r"mix samples of the batch: .* \(Max\)"),
        (lambda h: tf.reduce_sum(tf.reduce_max(whole(h), axis=0)), r"mix samples of the batch: .* \(Max\)"),
        (lambda h: mean(whole(h)), r"mix samples of the batch: .* \(Mean\)"),
        (lambda h: tf.argmax(h[:, 0]), r"mix samples of the batch: .* \(ArgMax\)"),
        (lambda h: tf.argmax(h - mean(h, 0), -1), r"mix samples of the batch: .* \(Sub\)"),
        (lambda h: tf.equal(h, tf.reduce_max(h)), r"mix samples of the batch: .* \(Max\)"),
        (lambda h: h > mean(h), r"mix samples of the batch: .* \(Greater\)"),
        (lambda h: tf.argsort(tf.argsort(h[:, 0])), r"mix samples of the batch: .* \(TopKV2\)"),
        (lambda h: tf.reduce_sum(whole(h[:, :1] == tf.transpose(h[:, :1]))), r"mix samples of the batch: .*\(Equal\)"),
        (lambda h: tf.where(h[:, 0] > 0), r"mix samples of the batch: .* \(Where\)"),
        (lambda h: tf.unique(whole(h[:, 0]))[0], r"mix samples of the batch: .* \(Unique\)"),
        (lambda h: tf.reduce_sum(h) + mean(h), "may be a sum or a mean over the batch"),
        (lambda h: 1 + tf.reduce_sum(whole(h)), "adds a value that does not depend on the batch"),
        (lambda h: tf.cast(1 + tf.reduce_sum(whole(h)), "float64"), "adds a value that does not depend on the batch"),
        (lambda h: 1 + tf.reduce_sum(h), "adds a value that does not depend on the batch, .* to a sum over the batch"),
    ],
)
def test_results_without_reduction_are_refused(result, text):
    with pytest.raises(PipelineError, match=text):
        compared(returning(result), X)


def test_squeezed_batch_of_one_sample_is_refused():
    with pytest.raises(PipelineError, match=r"mix samples of the batch: `Squeeze` \(Squeeze\)"):
        compared(returning(lambda h: tf.squeeze(h[:, :1])), X, count=8)


def test_results_of_open_batch_are_refused_likewise():
    with pytest.raises(PipelineError, match="has the batch along axis 1"):
        compared(returning(tf.transpose), X, example=(OPEN,))
    step, w = returning(lambda h: (h, tf.transpose(h)), tf.reduce_sum)
    with pytest.raises(PipelineError, match="has the batch along axis 1"):
        compared((step, w), X, example=(OPEN,), loss_reduction="sum")


# As long as the batch, but not made of its data --------------------------------------------------------------

INDEXED = "an entry for each sample that does not depend on the data"
ROWS = np.random.default_rng(1).normal(size=(8, 3))


def by_position(rows):
    """A step whose samples are weighted by something that their numbers select."""

    def loss_and_result(w, x, *more):
        found = rows(x, *more)
        return mean(tf.tanh(x @ w) * found), found

    return descending(loss_and_result)


def numbers(x):
    return tf.cast(tf.range(tf.shape(x)[0]), "float64")[:, None]


def noise(x):
    return tf.random.stateless_normal(tf.shape(x), [1, 2], dtype="float64")


@pytest.mark.parametrize("example", [None, (OPEN,)], ids=["known", "open"])
@pytest.mark.parametrize("rows", [numbers, noise])
def test_sample_numbers_and_noise_are_refused(rows, example):
    with pytest.raises(PipelineError, match=INDEXED):
        compared(by_position(rows), X, example=example)


def test_values_that_are_equal_for_all_samples_equal_original_step():
    error, _ = compared(by_position(lambda x: tf.ones(tf.shape(x), "float64")), X, example=(OPEN,))
    assert error < TOLERANCE


@pytest.mark.parametrize("kind", [tf.constant, tf.Variable])
def test_table_rows_by_sample_number_are_refused(kind):
    bank = kind(ROWS)
    with pytest.raises(PipelineError, match=INDEXED):
        compared(by_position(lambda x: bank[: x.shape[0]]), X, count=4)


@pytest.mark.parametrize("example", [None, (OPEN, tf.TensorSpec((None,), "int64"))], ids=["known", "open"])
def test_column_of_each_sample_equals_original_step(example):
    """The gradient of `tf.gather` with `batch_dims` scatters by sample numbers."""

    def loss_and_result(w, x, y):
        chosen = tf.gather(tf.tanh(x @ w), y, batch_dims=1)
        return mean(chosen), chosen

    error, found = compared(descending(loss_and_result), X, np.arange(8) % 3, example=example)
    assert error < TOLERANCE and found == ["mean", "concatenated"]


def sized(x):
    return tf.cast(tf.shape(x)[0], "float64")


def two(x):
    return tf.concat([x, -x], axis=0)


def half(x):
    """Labels of two batches that lie behind each other, as a discriminator has them."""
    rows = tf.stack([tf.shape(x)[0], 1])
    return tf.concat([tf.ones(rows, "float64"), tf.zeros(rows, "float64")], axis=0)


def turned(rows):
    """Those of each sample behind each other, not those of each batch."""
    return tf.reshape(tf.transpose(tf.reshape(rows, [2, -1])), [-1, 1])


WEIGHTED = {
    "labels of two": (lambda h, x: mean(tf.square(two(h) - half(x))), "mean"),
    "labels of two on an axis": (lambda h, x: mean(tf.stack([h, -h]) * tf.reshape(half(x), [2, -1, 1])), "mean"),
    "ones over the size": (lambda h, x: tf.reduce_sum(h * (tf.ones_like(x) / sized(x))), "mean"),
    "a constant of one over the size": (lambda h, x: tf.reduce_sum(h * np.full(x.shape, 1 / x.shape[0])), "mean"),
}
NUMBERED = {
    "numbers over the size": lambda h, x: tf.reduce_sum(h * numbers(x) / sized(x)),
    "numbers over it, on their own": lambda h, x: tf.reduce_sum(h * (numbers(x) / sized(x))),
    "numbers from the middle": lambda h, x: mean(h * (numbers(x) - tf.cast(tf.shape(x)[0] // 2, "float64"))),
    "each number twice": lambda h, x: mean(tf.repeat(h, 2, 0) * tf.repeat(numbers(x), 2, 0)),
    "the first is heavier": lambda h, x: mean(h * (0.5 + tf.cast(numbers(x) < 1, "float64"))),
}


def test_keras_discriminator_equals_original_step():
    class Discriminator(keras.Model):
        def __init__(self):
            super().__init__()
            self.head = keras.layers.Dense(1, kernel_initializer=keras.initializers.RandomNormal(seed=1))
            self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)

        def call(self, x):
            return self.head(x)

        def train_step(self, data):
            real, fake = data
            count = tf.shape(real)[0]
            labels = tf.concat([tf.ones((count, 1)), tf.zeros((count, 1))], axis=0)
            with tf.GradientTape() as tape:
                loss = self.loss_fn(labels, self(tf.concat([fake, real], axis=0), training=True))
            weights = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"loss": loss}

    found = []
    for callbacks in ([], [tflms_sft.Pipeline(1, "basic", 2, devices=["CPU:0"], verbose=0)]):
        model = Discriminator()
        model.compile(keras.optimizers.SGD(0.1), jit_compile=False)
        model(X)
        model.fit(X, X**2, batch_size=8, shuffle=False, verbose=0, callbacks=callbacks)
        found.append(model.get_weights())
    assert largest_error(found[1], found[0]) < TOLERANCE


@pytest.mark.parametrize("returned", [True, False], ids=["loss", "no loss"])
@pytest.mark.parametrize("name", WEIGHTED)
def test_sample_weights_equal_original_step(name, returned):
    """Whether or not the step returns its loss: without it the forward product is not there, its gradient is."""
    loss, reduction = WEIGHTED[name]
    made = descending_alone(lambda w, x: loss(x @ w, x), returned)
    error, _ = compared(made, X, loss_reduction=reduction)
    assert error < TOLERANCE
    other = "sum" if reduction == "mean" else "mean"
    with pytest.raises(PipelineError, match=f'pass `loss_reduction="{reduction}"`'):
        compared(made, X, loss_reduction=other)


@pytest.mark.parametrize("returned", [True, False], ids=["loss", "no loss"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", NUMBERED)
def test_weights_by_sample_numbers_are_refused(name, reduction, returned):
    made = descending_alone(lambda w, x: NUMBERED[name](x @ w, x), returned)
    with pytest.raises(PipelineError, match=INDEXED):
        compared(made, X, loss_reduction=reduction)


@pytest.mark.parametrize(
    ("rows", "op"),
    [
        (lambda x: noise(two(x)), "Mul"),
        (lambda x: tf.tile(numbers(x), [2, 1]), "Mul"),
        (lambda x: turned(half(x)), "Mul"),
        (lambda x: tf.broadcast_to(turned(half(x)), tf.shape(two(x))), "Mul"),
    ],
    ids=["noise", "numbers", "labels of each sample", "and spread"],
)
def test_values_laid_out_unlike_two_batches_are_refused(rows, op):
    with pytest.raises(PipelineError, match=rf"mix samples of the batch: `\w+` \({op}\)|{INDEXED}"):
        compared(descending(lambda w, x: (mean(two(tf.tanh(x @ w)) * rows(x)), mean(x))), X)


def test_noise_looked_up_by_data_is_refused():
    index = np.array([1, 0, 3, 2, 1, 0, 3, 2])

    def loss_and_result(w, x, index):
        return mean(x @ w + tf.gather_nd(noise(x), index[:, None])), mean(x)

    with pytest.raises(PipelineError, match=INDEXED):
        compared(descending(loss_and_result), X, index)


def test_row_indices_count_from_first_sample_of_micro_batch():
    """The score of each sample's own class, which `tf.gather_nd` finds by numbers of samples."""
    labels = np.arange(8) % 3

    def loss_and_result(w, x, y):
        features = tf.tanh(x @ w)
        places = tf.stack([tf.range(tf.shape(x)[0], dtype="int64"), y], axis=1)
        return mean(tf.gather_nd(features, places)), mean(features)

    try:
        error, _ = compared(descending(loss_and_result), X, labels)
    except PipelineError as refused:  # As a `GatherNd` that may mix samples.
        assert "GatherNd" in str(refused)
    else:
        assert error < TOLERANCE


@pytest.mark.parametrize("turned", [lambda rows: rows[::-1], lambda rows: (rows + 1) % tf.size(rows)])
@pytest.mark.parametrize("returned", [True, False])
def test_row_indices_of_other_samples_are_refused(turned, returned):
    def loss(w, x):
        return mean(tf.gather_nd(tf.tanh(x @ w), turned(tf.range(tf.shape(x)[0]))[:, None]) * x)

    with pytest.raises(PipelineError, match=INDEXED):
        compared(descending_alone(loss, returned), X)


@pytest.mark.parametrize("samples", [slice(4), slice(3), slice(None, None, 2)])
@pytest.mark.parametrize("returned", [True, False])
def test_subset_of_samples_is_refused(samples, returned):
    def loss(w, x):
        count = tf.shape(x)[0] // 2
        return mean((x @ w)[: count if samples.stop == 4 else samples.stop : samples.step])

    with pytest.raises(PipelineError, match=rf"mix samples of the batch: `[\w/]+` \((StridedSlice|MatMul)\)|{INDEXED}"):
        compared(descending_alone(loss, returned), X)


def test_value_with_two_batch_axes_is_refused():
    def loss_and_result(w, x):
        features = tf.tanh(x @ w)
        return mean(tf.linalg.band_part(tf.eye(x.shape[0], dtype="float64") + 1, 1, 0) @ features), mean(features)

    with pytest.raises(PipelineError, match="mix samples"):
        compared(descending(loss_and_result), X)


# Which arguments are cut -------------------------------------------------------------------------------------

CODES = np.random.default_rng(2).normal(size=(8, 3))


def to_codes(w, x, codes):
    """How far samples are from the nearest of some codes, which are no batch."""
    distances = tf.norm(tf.tanh(x @ w)[:, None] - codes[None], axis=-1)
    return mean(tf.reduce_min(distances, axis=1)), tf.argmin(distances, axis=1)


@pytest.mark.parametrize("batched", [["args_0"], [0]])
@pytest.mark.parametrize("example", [None, (OPEN, OPEN)], ids=["known", "open"])
def test_arguments_without_batch_axis_are_not_split(batched, example):
    error, _ = compared(descending(to_codes), X, CODES, example=example, batched=batched)
    assert error < TOLERANCE


@pytest.mark.parametrize("number", [4, 5])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_number_of_codes_does_not_affect_reduction(number, reduction):
    def loss_and_result(w, x, codes):
        reduce = mean if reduction == "mean" else tf.reduce_sum
        return reduce(tf.tanh(x @ w)) + tf.reduce_sum(tf.square(codes @ w)), mean(x)

    codes = tf.TensorSpec((number, 3), "float64")
    step = descending(loss_and_result)
    if reduction == "mean":
        assert compared(step, X, CODES[:number], example=(OPEN, codes))[0] < TOLERANCE
    else:
        with pytest.raises(PipelineError, match="adds a value that does not depend on the batch"):
            compared(step, X, CODES[:number], example=(OPEN, codes), loss_reduction="sum")


def test_open_batch_by_keyword_equals_original_step():
    w = tf.Variable(np.eye(3) + 0.1)

    @tf.function(autograph=False)
    def step(scale, x, codes):
        with tf.GradientTape() as tape:
            loss = mean(tf.tanh(x @ w)) * scale + mean(tf.square(codes @ w))
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss

    specs = [tf.TensorSpec((), "float64"), OPEN, tf.TensorSpec((4, 3), "float64")]
    open_step = tf.function(step.python_function, input_signature=specs, autograph=False)
    scale = tf.TensorSpec((), "float64")
    rewritten = tflms_sft.rewrite(open_step, PipelineParams(1, "basic", 2, ["CPU:0"]), scale, x=X, codes=CODES[:4])
    got = rewritten(tf.constant(2.0, "float64"), x=X, codes=CODES[:4])
    w.assign(np.eye(3) + 0.1)
    np.testing.assert_allclose(got, step(tf.constant(2.0, "float64"), x=X, codes=CODES[:4]), rtol=1e-12)


@pytest.mark.parametrize("example", [None, (OPEN,)], ids=["known", "open"])
def test_captured_tensor_as_long_as_batch_is_refused(example):
    outside = tf.constant(ROWS)
    with pytest.raises(PipelineError, match="cannot be traced for 4 samples.* as arguments of the step"):
        compared(returning(mean, lambda h: mean(h * outside)), X, example=example)


def test_arguments_of_different_open_sizes_equal_original_step():
    """They run as one micro-batch."""
    step, w = descending(lambda w, x, codes: (mean(tf.tanh(x @ w)), mean(codes)))
    step = tf.function(step.python_function, input_signature=[OPEN, OPEN], autograph=False)
    rewritten = tflms_sft.rewrite(step, PipelineParams(1, "basic", 2, ["CPU:0"]), X, CODES)
    start = w.numpy()
    got = [np.array(value) for value in rewritten(X, CODES[:6])]
    w.assign(start)
    assert largest_error(got, [np.array(value) for value in step(tf.constant(X), tf.constant(CODES[:6]))]) < TOLERANCE


@pytest.mark.parametrize(
    ("batched", "error", "text"),
    [
        ("x", TypeError, "`batched` must be a list of names or positions. Received: batched='x'"),
        ([1.5], TypeError, "`batched` must be a list of names or positions"),
        ([], ValueError, "`batched` must name at least one argument"),
        (["x", "nothing"], ValueError, r"is unknown or .* The arguments are \['args_0', 'args_1'\]"),
        ([2], ValueError, "`batched` must name arguments of the step that have axes, .* 2 is unknown"),
        ([0, 1], ValueError, "arguments of one leading size"),
    ],
)
def test_batched_names_that_do_not_exist_are_refused(batched, error, text):
    step, _ = descending(to_codes)
    with pytest.raises(error, match=text):
        tflms_sft.rewrite(step, PipelineParams(1, "basic", 2, ["CPU:0"], batched=batched), X, CODES[:6])
