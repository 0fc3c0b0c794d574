"""Steps of two layers in float64, and their comparison with the same steps in micro-batches on one device."""

import numpy as np
import tensorflow as tf
from pipelined import error

import tflms_sft
from tflms_sft import PipelineParams
from tflms_sft._pipeline.micro_batch_check import check_micro_batches
from tflms_sft._trace.batch_traces import trace

X = np.random.default_rng(0).normal(size=(8, 3))
mean = tf.reduce_mean


def first(x, w):
    return tf.tanh(x @ w[0])


def net(x, w):
    return tf.tanh(first(x, w) @ w[1])


def size(x):
    return tf.cast(tf.shape(x)[0], "float64")


def spectrum(x, w):
    return tf.signal.fft(tf.cast(net(x, w), "complex128"))


def step_of(loss, result=None, update=None, before=None, after=None, state=0.0):
    """Return a step of two layers, and its variables; the last one, `state` at first, is for `before` and `after`."""
    w = [tf.Variable(np.eye(3) + 0.1 * number) for number in range(2)]
    own = tf.Variable(np.float64(state), name="own")

    @tf.function(autograph=False)
    def step(x):
        if before:
            before(x, w, own)
        with tf.GradientTape() as tape:
            value = loss(x, w, own)
        gradients = tape.gradient(value, w)
        if update:
            gradients = update(gradients, x, value, w)
        for variable, gradient in zip(w, gradients, strict=True):
            if gradient is not None:
                variable.assign_sub(0.1 * gradient)
        if after:
            after(x, value, own)
        return value if result is None else result(x, w)

    return step, [*w, own]


def params(count=2, **options):
    return PipelineParams(1, "basic", count, ["CPU:0"], **options)


def judge(step, *args, **options):
    """Check a step that is traced and not run."""
    return check_micro_batches(trace(step, params(**options), args or (X,), {}), params(**options))


def same(step, variables, *args, steps=2, **options):
    """Assert that the step in micro-batches has the original results and variables; return the notes of its plan."""
    args = args or (X,)
    rewritten = tflms_sft.rewrite(step, params(**options), *args)
    start, outcomes = [v.numpy() for v in variables], []
    for function in (step, rewritten):
        results = [np.array(v) for _ in range(steps) for v in tf.nest.flatten(function(*map(tf.constant, args)))]
        outcomes.append([*results, *(v.numpy() for v in variables)])
        for variable, value in zip(variables, start, strict=True):
            variable.assign(value)
    assert max(error(got, want) for want, got in zip(*outcomes, strict=True)) < 1e-12
    return rewritten.plan.notes
