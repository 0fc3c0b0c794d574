"""Losses of derivatives of a network with respect to its inputs, as of physics-informed networks."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import TOLERANCE, Step, error

import tflms_sft
from benchmarks._longest_segments import longest_segments

POINTS = 1000


pytestmark = pytest.mark.usefixtures("fresh_keras")


def flow_step(points: int | None, weighted: Callable[[Any], Any] = lambda residual: residual) -> Step:
    """Three steps of a network for a flow: first and second derivatives, and a constant of the equation as a weight."""
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(0)
    net = keras.Sequential([keras.Input((2,)), *(keras.layers.Dense(12, a) for a in ("tanh", "silu", "tanh"))])
    net.add(keras.layers.Dense(2))
    viscosity = tf.Variable(0.1, name="viscosity", dtype="float64")
    weights = [*net.trainable_variables, viscosity]
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(weights)

    def function(xt: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            x, t = xt[:, :1], xt[:, 1:]
            with tf.GradientTape() as second:
                second.watch(x)
                with tf.GradientTape(persistent=True) as first:
                    first.watch([x, t])
                    raw = net(tf.concat([x, t], 1), training=True)
                    u = x * (1.0 - x) * raw[:, :1]
                u_x, u_t = first.gradient(u, x), first.gradient(u, t)
            u_xx = second.gradient(u_x, x)
            residual = u_t + u * u_x - tf.exp(viscosity) * u_xx
            loss = tf.reduce_mean(weighted(residual) ** 2) + tf.reduce_mean((u - raw[:, 1:]) ** 2)
        gradients = tape.gradient(loss, weights)
        optimizer.apply(gradients, weights)
        return {"loss": loss, "gradients": gradients}

    spec = tf.TensorSpec((points, 2), tf.float64)
    concrete_fn = tf.function(function, autograph=False).get_concrete_function(spec)
    random = np.random.default_rng(0)
    batches = [(random.random((POINTS, 2)),) for _ in range(3)]
    return Step(concrete_fn, [*net.variables, viscosity, *optimizer.variables], batches)


def check(step: Step, fast: Any) -> None:
    want, got = step.run(step.concrete_fn), step.run(fast.concrete_function)
    assert list(want) == list(got)
    assert max(error(got[key], want[key]) for key in want) < TOLERANCE


def test_swapped_step_equals_original():
    """Tensors that the inner backward passes save for the outer one are swapped, too."""
    step = flow_step(POINTS)
    fast = tflms_sft.rewrite(step.concrete_fn, tflms_sft.LMSParams(min_bytes="1KiB"))
    check(step, fast)
    names = [swap.tensor for swap in fast.plan.swaps]
    for part in ("(TanhGrad)", "'gradient_tape/gradient_tape/"):
        assert any(part in name for name in names), names


@pytest.mark.parametrize("points", [POINTS, None])
def test_tiled_step_equals_original(points):
    """Points are independent of each other up to the means of the loss, and run in tiles along the batch."""
    step = flow_step(points)
    with longest_segments():
        fast = tflms_sft.rewrite(step.concrete_fn, tflms_sft.SFTParams(num_tiles={"batch": 3}))
    check(step, fast)
    (segment,) = fast.plan.segments
    assert segment.num_tiles[0] == 3 if points else segment.notes
    # A product that depends on weights alone, of the ones with which a gradient starts, exists in full size.
    products = [op.name for op in fast.concrete_function.graph.get_operations() if op.type == "MatMul"]
    assert len(products) <= 1, products


def test_step_with_mean_over_points_equals_original():
    """Each residual is divided by the mean of all: the tiles of a second loop wait for all of a first one."""
    step = flow_step(POINTS, lambda residual: residual / tf.reduce_mean(tf.abs(residual)))
    fast = tflms_sft.rewrite(step.concrete_fn, tflms_sft.SFTParams(num_tiles={"batch": 3}))
    check(step, fast)
    assert fast.plan.segments[0].num_loops > 2


@pytest.mark.parametrize("fraction", [0.6, 0.2])
def test_step_within_budget_equals_original(fraction):
    step = flow_step(POINTS)
    original = tflms_sft.rewrite(step.concrete_fn, tflms_sft.AutoParams("1GiB")).plan.original.peak_bytes
    fast = tflms_sft.rewrite(step.concrete_fn, tflms_sft.AutoParams(int(fraction * original)))
    check(step, fast)
    assert fast.plan.predicted.peak_bytes <= fraction * original and fast.plan.segments
