"""Test where automatic segments end in requested tiles, and that no plan needs more memory than the original step."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import TOLERANCE, error, keras_step
from gradients import gradient_step, model_of
from keras import layers
from nets import u_net

import tflms_sft
from tflms_sft import AutoParams, SegmentSpec, SFTParams


def residual_blocks(size=64, count=8, filters=8, dtype="float32"):
    """Return the step of residual blocks of one size, in which halos add up."""
    keras.config.set_floatx(dtype)
    keras.utils.set_random_seed(3)
    image = keras.Input((size, size, 3), batch_size=1, name="photo")
    x = layers.Conv2D(filters, 3, padding="same", name="first")(image)
    for _ in range(count):
        y = layers.Conv2D(2 * filters, 3, padding="same", activation="relu")(x)
        x = layers.Add()([x, layers.Conv2D(filters, 3, padding="same")(y)])
    x = layers.Conv2D(filters, 3, padding="same", name="last")(x)
    return gradient_step(model_of(image, x)), tf.TensorSpec((1, size, size, 3), dtype)


def pyramid(size=64, depth=3):
    """Return the step of convolutions and pools."""
    image = x = keras.Input((size, size, 3), batch_size=1, name="photo")
    for number in range(depth):
        x = layers.Conv2D(8, 3, padding="same", activation="relu")(x)
        x = layers.MaxPool2D(2, name=f"pool{number}")(x)
    return gradient_step(model_of(image, x)), tf.TensorSpec((1, size, size, 3), x.dtype)


def fraction(plan):
    return plan.predicted.peak_bytes / plan.original.peak_bytes


def test_automatic_segments_of_equal_blocks_beat_the_longest_segment():
    step, image = residual_blocks()
    longest = tflms_sft.rewrite(step, SFTParams((2, 2), [SegmentSpec("photo", "last")]), image).plan
    plan = tflms_sft.rewrite(step, SFTParams((2, 2)), image).plan
    assert len(plan.segments) >= 3
    assert plan.predicted.time_ratio < 0.7 * longest.predicted.time_ratio
    assert fraction(plan) < fraction(longest) and fraction(plan) < 0.5


def test_automatic_segments_compute_the_original_step():
    step, image = residual_blocks(size=63, count=4, dtype="float64")
    rewritten = tflms_sft.rewrite(step, SFTParams((2, 2)), image)
    assert len(rewritten.plan.segments) >= 2
    images = np.random.default_rng(0).normal(size=image.shape)
    for got, want in zip(tf.nest.flatten(rewritten(images)), tf.nest.flatten(step(images)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("tiles", [(1, 1), (1, 2), (2, 2), (8, 8), (64, 64)])
@pytest.mark.parametrize("size", [16, 64])
def test_automatic_segments_never_need_more_memory(size, tiles):
    for step, image in (residual_blocks(size, count=3), pyramid(size)):
        plan = tflms_sft.rewrite(step, SFTParams(tiles), image).plan
        assert plan.predicted.peak_bytes <= plan.original.peak_bytes
        assert "MORE" not in plan.headline()
        assert plan.changed or any("as much memory as untiled" in reason for _, reason in plan.left_alone)


def test_automatic_segments_lower_tiles_of_small_exits_with_note():
    step, image = pyramid(64, depth=4)
    plan = tflms_sft.rewrite(step, SFTParams((40, 1)), image).plan
    assert plan.changed and fraction(plan) < 1
    assert max(segment.num_tiles[1] for segment in plan.segments) < 40
    assert "tiles instead of 40x1, because a split tensor has too few rows" in plan.summary()


def test_budget_plan_is_compared_with_original_in_the_same_state_of_memory():
    """Both peaks are those of the worst state: a budget between the fresh and the worst peak rewrites something."""
    step, image = residual_blocks(size=64, count=3)
    worst = tflms_sft.rewrite(step, AutoParams("1GiB"), image).plan.original.peak_bytes
    for part in np.linspace(0.5, 1.0, 9):
        plan = tflms_sft.rewrite(step, AutoParams(int(part * worst), headroom=0), image).plan
        assert plan.original.peak_bytes == worst
        assert plan.predicted.peak_bytes <= min(worst, part * worst) and "MORE" not in plan.headline()


def test_levels_that_are_not_worth_their_time_stay_untiled():
    """With a capacity all levels run in tiles. Both steps equal the original one."""
    step = keras_step(u_net, (64, 48), 2, steps=3)
    part, whole = (
        tflms_sft.rewrite(step.function, SFTParams((3, 2), memory_capacity=capacity), *step.specs)
        for capacity in (None, 1)
    )
    ops = [len(rewritten.plan.segments) and rewritten.plan.segments[0].forward_ops for rewritten in (part, whole)]
    assert 0 < ops[0] < ops[1] and part.plan.predicted.time_ratio < 0.9 * whole.plan.predicted.time_ratio
    assert fraction(part.plan) < 0.97
    want = step.run(step.concrete_fn)
    for rewritten in (part, whole):
        got = step.run(rewritten)
        assert max(error(got[name], want[name]) for name in want) < TOLERANCE
