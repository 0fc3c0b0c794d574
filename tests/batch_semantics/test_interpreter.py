"""Steps in which sizes of tensors do not show that micro-batches compute something else are refused."""

import numpy as np
import pytest
import tensorflow as tf

import tflms_sft
from rewriters.errors import PipelineError
from tflms_sft import PipelineParams

X = np.random.default_rng(0).normal(size=(8, 3))
ROWS = np.random.default_rng(1).normal(size=(8, 3))
mean, total = tf.reduce_mean, tf.reduce_sum


class Step:
    """A step of two layers on eight samples, whose loss and result get the output, the input and the step."""

    def __init__(self, loss=None, result=None, write=None):
        self.w = [tf.Variable(np.eye(3) + 0.1 * n) for n in range(2)]
        self.bank = tf.Variable(ROWS, trainable=False)
        self.counts = tf.Variable(np.zeros(9), trainable=False)
        self.metric = tf.Variable(np.float64(0), trainable=False)

        @tf.function(autograph=False)
        def step(x):
            with tf.GradientTape() as tape:
                out = tf.tanh(tf.tanh(x @ self.w[0]) @ self.w[1])
                value = mean(tf.square(out)) if loss is None else loss(out, x, self)
            for variable, gradient in zip(self.w, tape.gradient(value, self.w), strict=True):
                if gradient is not None:
                    variable.assign_sub(0.1 * gradient)
            if write is not None:
                write(x, self)
            return value if result is None else result(out, x, self)

        self.function = step

    def refused(self):
        params = PipelineParams(1, "basic", 4, ["CPU:0"])
        with pytest.raises(PipelineError) as error:
            tflms_sft.rewrite(self.function, params, X)
        return str(error.value)


def number(x):
    return tf.shape(x)[0]


def numbers(x):
    return tf.range(number(x))


def real(value):
    return tf.cast(value, "float64")


def positive(x):
    return tf.cast(x[:, 0] > 0, "int32")


def unknown_rows(x):
    rows = tf.numpy_function(lambda a: a, [x], tf.float64, stateful=False)
    return tf.ensure_shape(rows, [None, 3])


POSITIONS = {
    "rows of a variable": lambda out, x, s: mean(tf.square(out - tf.gather(s.bank, numbers(x)))),
    "rows of a trained variable": lambda out, x, s: mean(out * tf.gather(s.w[1], numbers(x) % 3)),
    "entries of a variable": lambda out, x, s: mean(
        tf.square(
            out - tf.raw_ops.ResourceGatherNd(resource=s.bank.handle, indices=numbers(x)[:, None], dtype="float64")
        )
    ),
    "draws by a constant": lambda out, x, s: mean(
        out * real(tf.random.categorical(1e9 * tf.constant(ROWS)[: number(x)], 1))
    ),
    "draws by a sample number": lambda out, x, s: mean(
        out * real(tf.random.categorical(1e9 * real(tf.one_hot(numbers(x) % 3, 3)), 1))
    ),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_lookups_and_draws_by_sample_number_are_refused(name):
    assert "an entry for each sample" in Step(POSITIONS[name]).refused()


WRITES = {
    "added by sample number": lambda x, s: s.counts.scatter_add(tf.IndexedSlices(x[:, 0], numbers(x))),
    "added to the row of the total": lambda x, s: s.counts.scatter_add(
        tf.IndexedSlices(x[:1, 0], total(positive(x))[None])
    ),
    "added to the row of the size": lambda x, s: s.counts.scatter_add(tf.IndexedSlices([total(x)], number(x)[None])),
    "a metric by sample number": lambda x, s: s.metric.assign_add(total(x[:, 0] * real(numbers(x)))),
    "a metric by noise": lambda x, s: s.metric.assign_add(
        total(x[:, 0] * tf.random.stateless_normal([number(x)], (1, 2), dtype="float64"))
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_by_sample_number_are_refused(name):
    assert Step(write=WRITES[name]).refused()


RESULTS = {
    "an integer sum as a condition": lambda out, x, s: tf.cast(tf.cast(total(positive(x)), "bool"), "int32"),
    "a rounded quotient": lambda out, x, s: tf.raw_ops.Div(x=total(positive(x)), y=3),
    "values that occur": lambda out, x, s: tf.math.bincount(positive(x), minlength=2, maxlength=2, binary_output=True),
    "a decision times the size": lambda out, x, s: tf.cast(tf.reduce_all(x[:, 0] > -1), "int32") * number(x),
    "rows over the size": lambda out, x, s: out / real(number(x)),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_that_are_no_sums_and_no_rows_are_refused(name):
    assert Step(result=RESULTS[name]).refused()


LOSSES = {
    "a mean spread over unknown rows": lambda out, x, s: total(tf.broadcast_to(mean(out), tf.shape(unknown_rows(x)))),
    "a mean tiled to unknown rows": lambda out, x, s: total(tf.tile(mean(out)[None], tf.shape(unknown_rows(x))[:1])),
    "pairs of samples without a rule": lambda out, x, s: mean(
        out * mean(tf.math.igamma(1 + abs(x[:, :1]), tf.transpose(1 + abs(x[:, :1]))), 1, keepdims=True)
    ),
    "a row that data choose": lambda out, x, s: mean(out) * s.w[1][total(positive(x)) % 3, 0],
    "a draw by a mean": lambda out, x, s: mean(out) * real(tf.random.categorical(1e9 * mean(x, 0)[None], 1)[0, 0]),
    "a draw by the size": lambda out, x, s: mean(out) * real(tf.random.uniform([], number(x) - 1, number(x), "int32")),
}


LOSSES |= {
    "rows of every second sample": lambda out, x, s: mean(tf.square(tf.gather_nd(out, (numbers(x) % 2)[:, None]))),
    "rows of a repeated batch": lambda out, x, s: mean(
        tf.square(tf.gather_nd(tf.repeat(out, 2, 0), numbers(x)[:, None]))
    ),
    "segments of equal values": lambda out, x, s: (
        mean(out)
        * tf.math.unsorted_segment_sum(tf.fill([number(x)], s.bank[0, 0]), tf.zeros([number(x)], "int32"), 1)[0]
    ),
    "a scatter of equal values": lambda out, x, s: (
        mean(out) * tf.scatter_nd(tf.zeros([number(x), 1], "int32"), tf.fill([number(x)], s.bank[0, 0]), [1])[0]
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_mix_samples_without_a_sign_in_sizes_are_refused(name):
    assert Step(LOSSES[name]).refused()


def test_class_histogram_of_ones_equals_original_step():
    """Ones, which do not depend on data, are added to the rows that data choose."""
    step = Step(write=lambda x, s: s.counts.scatter_add(tf.IndexedSlices(tf.ones([number(x)], "float64"),
                                                                        tf.argmax(x, 1))))  # fmt: skip
    variables = [*step.w, step.counts]
    start = [v.numpy() for v in variables]
    step.function(tf.constant(X))
    expected = [v.numpy() for v in variables]
    for variable, value in zip(variables, start, strict=True):
        variable.assign(value)
    tflms_sft.rewrite(step.function, PipelineParams(1, "basic", 4, ["CPU:0"]), X)(tf.constant(X))
    for variable, value in zip(variables, expected, strict=True):
        np.testing.assert_allclose(variable.numpy(), value, rtol=1e-12)


PYTHON = {
    "a layer is left out": lambda out, x, s: mean(tf.tanh(out) if x.shape[0] == 8 else out),
    "another layer": lambda out, x, s: mean(tf.tanh(out) if x.shape[0] == 8 else tf.sigmoid(out)),
    "another variable": lambda out, x, s: mean(out @ s.w[0 if x.shape[0] == 8 else 1]),
}


@pytest.mark.parametrize("name", PYTHON)
def test_python_that_decides_by_the_batch_size_is_refused(name):
    assert "Python code of the step depends on the batch size" in Step(PYTHON[name]).refused()


def test_rows_of_a_shared_lookup_are_not_returned_for_one_micro_batch():
    rows = lambda x, s: tf.gather(s.bank, tf.zeros([number(x)], "int32"))  # noqa: E731
    step = Step(lambda out, x, s: mean(out * rows(x, s)), lambda out, x, s: rows(x, s))
    assert "runs once, depends on the batch size" in step.refused()
