"""Plans of steps with loops for a budget: errors name the loop's layer, and the planner swaps lists."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from gradients import gradient_step
from keras import layers
from loops import Warp

import tflms_sft
from tflms_sft import AutoParams, BudgetError

IMAGES = np.zeros((8, 128, 128, 1), "float32")


@pytest.fixture
def step():
    image = keras.Input(IMAGES.shape[1:], batch_size=len(IMAGES))
    field = layers.Conv2D(1, 3, padding="same")(image)
    return gradient_step(keras.Model(image, Warp(name="warp")(image, field)))


def predicted(step):
    return tflms_sft.rewrite(step, AutoParams("8GiB"), IMAGES).plan


def test_plan_within_budget_loop_of_step_is_named_with_its_bytes(step):
    plan = predicted(step)
    assert any(name == "saved inside the loop of layer 'warp' (Warp)" for name, _ in plan.original.largest)
    assert any("MiB inside the loop of layer 'warp' (Warp)" in note for note in plan.notes)
    assert not any("not in the predicted peak" in note for note in plan.notes)


def test_plans_within_budget_too_small_names_loop_with_its_bytes(step):
    text = r"of which [\d.]+ MiB are saved inside the loop of layer 'warp' \(Warp\), "
    with pytest.raises(BudgetError, match=text):
        tflms_sft.rewrite(step, AutoParams("1MiB", swap=False), IMAGES)


def test_plans_within_budget_tiles_cannot_help_swaps_lists(step):
    peak = predicted(step).predicted.peak_bytes
    rewritten = tflms_sft.rewrite(step, AutoParams(int(0.8 * peak)), IMAGES)
    swaps = [swap for swap in rewritten.plan.swaps if "in every iteration" in swap.tensor]
    assert swaps and rewritten.plan.predicted.peak_bytes <= 0.8 * peak
    for got, want in zip(tf.nest.flatten(rewritten(IMAGES)), tf.nest.flatten(step(IMAGES)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_described_swaps_of_loop_move_half_of_saved_bytes(step):
    plan = tflms_sft.rewrite(step, tflms_sft.LMSParams(min_bytes=0), IMAGES).plan
    moved = sum(swap.num_bytes for swap in plan.swaps if "in every iteration" in swap.tensor)
    saved = dict(plan.original.largest)["saved inside the loop of layer 'warp' (Warp)"]
    assert moved >= saved / 2


def test_plans_within_budget_too_small_leaves_out_small_lists():
    """Once all elements are swapped, a list holds numbers."""
    sequence = keras.Input((16, 32))
    step = gradient_step(keras.Model(sequence, layers.LSTM(160, return_sequences=True)(sequence)))
    with pytest.raises(BudgetError, match=r"headroom of 10% included\), of which `[^`]+` is [\d.]+ MiB and variables"):
        tflms_sft.rewrite(step, AutoParams("1KiB"), tf.TensorSpec((512, 16, 32)))
