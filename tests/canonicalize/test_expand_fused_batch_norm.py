"""Fused batch normalisation, which TensorFlow has in single precision only, written out and on tiles."""

import numpy as np
import pytest
import tensorflow as tf
from equivalence import error
from graph_rewrites import Rewriting, traced

import tflms_sft
from rewriters.canonicalize import canonicalize

CHANNELS = 4


class Fused:
    """A step with one normalisation between two convolutions, which keeps moving statistics."""

    def __init__(self, is_training, factor, layout="NHWC"):
        random = np.random.RandomState(0)
        self.is_training, self.factor, self.layout = is_training, factor, layout
        values = [
            random.normal(size=(3, 3, 2, CHANNELS)),
            random.normal(size=(3, 3, CHANNELS, 3)),
            random.uniform(0.5, 2, CHANNELS),
            random.normal(size=CHANNELS),
        ]
        self.weights = [tf.Variable(value, dtype=tf.float32) for value in values]
        self.statistics = [tf.Variable(tf.fill([CHANNELS], value)) for value in (0.1, 0.9)]
        self.step = tf.function(self._step, autograph=False)

    def _step(self, images):
        first, second, scale, offset = self.weights
        mean, variance = self.statistics
        with tf.GradientTape() as tape:
            x = tf.nn.conv2d(images, first, 1, "SAME")
            x = tf.transpose(x, (0, 3, 1, 2)) if self.layout == "NCHW" else x
            x, *found = tf.raw_ops.FusedBatchNormV3(
                x=x,
                scale=scale,
                offset=offset,
                mean=mean,
                variance=variance,
                data_format=self.layout,
                is_training=self.is_training,
                exponential_avg_factor=self.factor,
            )[:3]
            x = tf.transpose(x, (0, 2, 3, 1)) if self.layout == "NCHW" else x
            loss = tf.reduce_mean(tf.sin(tf.nn.conv2d(tf.nn.relu(x), second, 2, "SAME")))
        gradients = tape.gradient(loss, self.weights)
        for variable, value in zip(self.statistics, found, strict=True):
            variable.assign(value)
        return loss, *gradients

    def run(self, function, images):
        for variable, value in zip(self.statistics, (0.1, 0.9), strict=True):
            variable.assign(tf.fill([CHANNELS], value))
        return [np.array(value) for value in (*function(images), *self.statistics)]


@pytest.mark.parametrize("is_training", (True, False), ids=("training", "frozen"))
@pytest.mark.parametrize("factor", (1.0, 0.3))
@pytest.mark.parametrize("known_batch", (True, False), ids=("known", "unknown"))
@pytest.mark.parametrize("layout", ("NHWC", "NCHW"))
def test_fused_batch_norm_on_tiles_equals_original(is_training, factor, known_batch, layout):
    """The gradient has no CPU kernel for channels first; expanded it needs none."""
    fused = Fused(is_training, factor, layout)
    images = tf.constant(np.random.RandomState(1).normal(size=(3, 14, 11, 2)), tf.float32)
    spec = images if known_batch else tf.TensorSpec((None, 14, 11, 2))
    fast = tflms_sft.rewrite(fused.step, tflms_sft.SFTParams(num_tiles=(3, 2), memory_capacity=1), spec)
    (segment,) = fast.plan.segments
    assert all("Mean: it reduces over the image" in reason for _, reason in fast.plan.left_alone)
    assert segment.num_loops > 2 if is_training else segment.num_loops == 2
    plain = Fused(is_training, factor)
    want, got = plain.run(plain.step, images), fused.run(fast, images)
    assert max(error(g, w) for g, w in zip(got, want, strict=True)) < 2e-5


def test_fused_batch_norm_gradient_in_branch_stays_fused():
    """A gradient inside of a branch is not expanded, and kernels store other values than the expansion."""

    def step(x, dy, flag):
        scale = tf.ones([CHANNELS])
        fused = tf.raw_ops.FusedBatchNormV3(x=x, scale=scale, offset=scale, mean=scale, variance=scale)
        y, *_, first, second, third = fused

        def gradient():
            return tf.raw_ops.FusedBatchNormGradV3(
                y_backprop=dy, x=x, scale=scale, reserve_space_1=first, reserve_space_2=second, reserve_space_3=third
            )[0]

        return y, tf.cond(flag, gradient, lambda: dy)

    specs = [tf.TensorSpec((2, 8, 7, CHANNELS))] * 2 + [tf.TensorSpec((), tf.bool)]
    ops = [
        node.op for node in canonicalize.read_canonical(tf.function(step).get_concrete_function(*specs)).nodes.values()
    ]
    assert "FusedBatchNormV3" in ops


def test_fused_batch_norm_colocated_op_is_imported():
    def step(x):
        scale = tf.ones([CHANNELS])
        y = tf.raw_ops.FusedBatchNormV3(x=x, scale=scale, offset=scale, mean=scale, variance=scale)[0]
        with tf.compat.v1.colocate_with(y.op):
            return tf.nn.relu(y) + 1.0

    concrete_fn = tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec((2, 8, 7, CHANNELS)))
    assert "Relu" in [node.op for node in canonicalize.read_canonical(concrete_fn).nodes.values()]


def fused(mode=canonicalize.CanonicalMode.TILING):
    return Rewriting(lambda graph: canonicalize.read_canonical(traced(graph), mode), run=True)


def test_expand_fused_batch_norm_in_training_reduces_over_the_images():
    fused().check("""
      - graph(x: float32[?,4,5,3], scale: float32[3])
      + graph(Placeholder: float32[?,4,5,3], Placeholder_1: float32[3])
      - norm = (float32[?,4,5,3], float32[3], float32[3], float32[3], float32[3], float32[...]) FusedBatchNormV3(x,
              scale, scale, scale, scale)
      - return norm
      + norm/Mean = float32[1,1,1,3] Mean(Placeholder, [0, 1, 2]) {keep_dims=True}
      + norm/SquaredDifference = float32[?,4,5,3] SquaredDifference(Placeholder, norm/Mean)
      + norm/Mean_1 = float32[1,1,1,3] Mean(norm/SquaredDifference, [0, 1, 2]) {keep_dims=True}
      + norm/Reshape = float32[3] Reshape(norm/Mean, [-1])
      + norm/Reshape_1 = float32[3] Reshape(norm/Mean_1, [-1])
      + norm/add = float32[3] AddV2(norm/Reshape_1, 0.0001)
      + norm/Rsqrt = float32[3] Rsqrt(norm/add)
      + norm/mul_3 = float32[3] Mul(norm/Rsqrt, Placeholder_1)
      + norm/sub_1 = float32[?,4,5,3] Sub(Placeholder, norm/Reshape)
      + norm/mul_4 = float32[?,4,5,3] Mul(norm/sub_1, norm/mul_3)
      + norm/add_1 = float32[?,4,5,3] AddV2(norm/mul_4, Placeholder_1)
      + norm/Identity = float32[?,4,5,3] Identity(norm/add_1)
      + Identity = float32[?,4,5,3] Identity(norm/Identity)
      + return Identity
    """)


@pytest.mark.parametrize("mode", canonicalize.CanonicalMode)
def test_expand_fused_batch_norm_gradient_of_other_statistics_stays_fused(mode):
    fused(mode).check("""
      - graph(x: float32[2,4,5,3], scale: float32[3])
      + graph(Placeholder: float32[2,4,5,3], Placeholder_1: float32[3])
      - gradient = (float32[2,4,5,3], float32[3], float32[3], float32[0], float32[0]) FusedBatchNormGradV3(x, x, scale,
              scale, scale, scale)
      + gradient = (float32[2,4,5,3], float32[3], float32[3], float32[0], float32[0]) FusedBatchNormGradV3(Placeholder,
              Placeholder, Placeholder_1, Placeholder_1, Placeholder_1, Placeholder_1)
      - return gradient
      + Identity = float32[2,4,5,3] Identity(gradient)
      + return Identity
    """)
