"""Device memory and concurrent transfers on a GPU. Skipped on machines without a GPU."""

import numpy as np
import pytest
import tensorflow as tf

import tflms_sft
from rewriters.ir import tf_internals

pytestmark = pytest.mark.gpu

ROWS, COLUMNS, LAYERS = 16384, 1024, 12
LEAST_MEMORY = {"tier": "host", "ctrld_strategy": "direct_order", "fuse_swapins": True, "max_in_flight": 1}


@pytest.fixture(scope="module")
def step():
    """Products: their kernels take next to no memory of their own."""
    rng = np.random.default_rng(0)
    with tf.device("GPU:0"):
        weights = [tf.Variable(rng.normal(size=(COLUMNS, COLUMNS)).astype("float32") / 32) for _ in range(LAYERS)]

    @tf.function
    def function(x):
        with tf.GradientTape() as tape:
            y = x
            for weight in weights:
                y = tf.nn.silu(tf.matmul(y, weight))
            loss = tf.reduce_mean(y**2)
        gradients = tape.gradient(loss, weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(1e-3 * gradient)
        return loss, gradients

    function.weights = weights
    return function


@pytest.fixture(scope="module")
def images():
    return tf.constant(np.random.default_rng(1).normal(size=(ROWS, COLUMNS)).astype("float32"))


def results(function, weights, x):
    start = [weight.numpy() for weight in weights]
    found = [np.array(v) for _ in range(3) for v in tf.nest.flatten(function(x))] + [w.numpy() for w in weights]
    for weight, value in zip(weights, start, strict=True):
        weight.assign(value)
    return found


def test_gpu_swaps_halve_memory_and_equal_plain(step, images):
    fast = tflms_sft.rewrite(step, tflms_sft.LMSParams(**LEAST_MEMORY), images)
    for got, want in zip(*(results(f, step.weights, images) for f in (fast, step)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
    plain, swapped = (tflms_sft.measure(function, images) for function in (step, fast))
    assert "GPU:0" in swapped.source
    assert swapped.peak_bytes < 0.5 * plain.peak_bytes
    assert abs(fast.plan.predicted.peak_bytes - swapped.peak_bytes) < 0.25 * swapped.peak_bytes
    assert abs(fast.plan.original.peak_bytes - plain.peak_bytes) < 0.25 * plain.peak_bytes


def test_gpu_transfers_run_concurrently_with_kernels(step, images):
    fast = tflms_sft.rewrite(step, tflms_sft.LMSParams(**{**LEAST_MEMORY, "lb": 4, "max_in_flight": 2}), images)
    copies, kernels = [], []
    for found in tf_internals.step_stats(fast.concrete_function, [images]).dev_stats:
        if "stream" in found.device or "memcpy" in found.device:
            for node in found.node_stats:
                begin = node.all_start_micros
                is_copy = "memcpy" in f"{found.device} {node.node_name} {node.timeline_label}".lower()
                (copies if is_copy else kernels).append((begin, begin + node.op_end_rel_micros))
    assert len(copies) >= 2 * len(fast.plan.swaps) and kernels
    overlapping = sum(any(a < d and c < b for c, d in kernels) for a, b in copies)
    assert overlapping >= len(copies) // 2


def test_gpu_timelines_cover_gpu_and_host(step, images):
    fast = tflms_sft.rewrite(step, tflms_sft.LMSParams(**LEAST_MEMORY), images)
    found = tflms_sft.measure(fast, images, timelines=True)
    assert [line.device for line in found.timelines][:1] == ["GPU:0"]
    assert any(line.device == "CPU:0" and line.peak_bytes > 0 for line in found.timelines)
    assert abs(found.timelines[0].peak_bytes - found.peak_bytes) < 0.25 * found.peak_bytes
