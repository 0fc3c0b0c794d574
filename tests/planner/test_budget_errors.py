"""Errors of budgets that no plan meets, or none that is fast enough: what they name fits, and what would help."""

import dataclasses
import math
import re
from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf
from gradients import gradient_step
from gradients import model_of as model_of_image
from keras import layers

import tflms_sft
from rewriters.estimates.op_cost import NOMINAL
from tflms_sft import AutoParams, BudgetError, MemoryBudget
from tflms_sft._planner.budget_search import _fastest_tiles, least_memory, plans_within_budget
from tflms_sft._search.traced_step import analyse_step, seconds_of
from tflms_sft._trace.step_tracing import trace_step


def remedy(step, budget, batch, **options):
    with pytest.raises(BudgetError) as caught:
        tflms_sft.rewrite(step, AutoParams(budget, max_slowdown=math.inf, **options), tf.TensorSpec((batch, 64, 64, 3)))
    return str(caught.value), caught.value.smallest_bytes


def small_step():
    keras.config.set_floatx("float32")
    image = x = keras.Input((64, 64, 3))
    for _ in range(3):
        x = layers.Conv2D(8, 3, padding="same", activation="relu")(x)
    return gradient_step(model_of_image(image, x))


def test_budget_error_estimates_a_batch_that_fits():
    step = small_step()
    _, smallest = remedy(step, "100KiB", 8, swap=False)
    text, _ = remedy(step, smallest // 2, 8, swap=False)
    count = int(re.search(r"shrink the batch: (\d) instead of 8 is estimated to fit", text).group(1))
    assert 2 <= count <= 5
    assert tflms_sft.rewrite(step, AutoParams(int(0.55 * smallest), swap=False), tf.TensorSpec((count, 64, 64, 3))).plan


def test_budget_error_names_the_time_and_a_headroom_that_suffices():
    step, images = small_step(), tf.TensorSpec((8, 64, 64, 3))
    text, smallest = remedy(step, "100KiB", 8, swap=False)
    assert "`headroom=" not in text
    plan = tflms_sft.rewrite(step, AutoParams(smallest, swap=False, max_slowdown=math.inf), images).plan
    assert f"or more (about {plan.predicted.time_ratio:.2f}x the time), or" in text
    budget = int(0.95 * smallest)
    (headroom,) = re.findall("or `headroom=([0-9.]+)` with the same budget", remedy(step, budget, 8, swap=False)[0])
    assert tflms_sft.rewrite(step, AutoParams(budget, swap=False, headroom=float(headroom)), images).plan.changed
    concrete_fn, record = trace_step(step, (images,), {})
    traced = analyse_step(concrete_fn, record, 8)
    traced = dataclasses.replace(traced, excess_bytes=budget // 50)
    with pytest.raises(BudgetError, match="Leave more of the budget free") as caught:
        next(plans_within_budget(traced, AutoParams(budget, swap=False)))
    assert "with the same budget" not in str(caught.value)


def test_budget_error_of_one_image_estimates_its_pixels():
    step = small_step()
    _, smallest = remedy(step, "100KiB", 1, swap=False)
    text, _ = remedy(step, int(0.7 * smallest), 1, swap=False)
    assert re.search(r"shrink the image: one image with (5|6)\d% of the pixels is estimated to fit", text)


def test_budget_error_names_half_precision_where_it_may_fit():
    step = small_step()
    _, smallest = remedy(step, "100KiB", 8, swap=False)
    budget = int(0.8 * smallest)
    assert "mixed_bfloat16" in remedy(step, budget, 8, swap=False)[0]
    assert "mixed_bfloat16" not in remedy(step, smallest // 2, 8, swap=False)[0]
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        half = small_step()
    finally:
        keras.config.set_dtype_policy(before)
    assert tflms_sft.rewrite(half, AutoParams(budget, swap=False), tf.TensorSpec((8, 64, 64, 3))).plan
    assert "mixed_bfloat16" not in remedy(half, budget // 2, 8, swap=False)[0]


def test_budget_error_below_variables_says_so():
    image = x = keras.Input((64, 64, 3))
    step = gradient_step(keras.Model(image, layers.Dense(50)(layers.Flatten()(layers.Conv2D(4, 3)(x)))))
    text, _ = remedy(step, "1MiB", 1)
    (enough,) = re.findall(r'Pass memory_budget="(\w+)" or more .*: weights and optimizer slots alone are \d', text)
    plan = tflms_sft.rewrite(step, AutoParams(enough), tf.TensorSpec((1, 64, 64, 3))).plan
    assert plan.predicted.peak_bytes <= 0.9 * plan.memory_budget


def rolled(x):
    return keras.ops.roll(x, 1, axis=0)


def test_budget_error_names_a_budget_that_fewer_swaps_meet():
    """With all swaps more transfers are under way, and the peak is half as high again as with three of four."""
    image = keras.Input((32, 32, 3))
    x = layers.Dense(32, activation="softmax")(rolled(image))
    x = layers.Conv2D(16, 3, padding="same", activation="relu")(rolled(x))
    x = layers.Conv2D(128, 1, activation="sigmoid")(rolled(x))
    step = gradient_step(model_of_image(image, x))
    spec = tf.TensorSpec((8, 32, 32, 3))
    with pytest.raises(BudgetError) as caught:
        tflms_sft.rewrite(step, AutoParams("1MiB"), spec)
    plan = tflms_sft.rewrite(step, AutoParams(caught.value.smallest_bytes), spec).plan
    (named,) = re.findall(r"\(about ([0-9.]+)x the time\)", str(caught.value))
    assert plan.changed and 1.0 < plan.predicted.time_ratio <= float(named) + 0.005, "a search may find a faster one"


def test_budget_without_room_for_swaps_names_the_room(monkeypatch):
    image = x = keras.Input((32, 32, 3))
    for _ in range(3):
        x = rolled(layers.Conv2D(16, 3, padding="same", activation="relu")(x))
    step = gradient_step(model_of_image(image, x))
    spec = tf.TensorSpec((8, 32, 32, 3))
    with pytest.raises(BudgetError) as caught:
        tflms_sft.rewrite(step, AutoParams("1MiB"), spec)
    for module in ("swap_search", "swap_planner"):
        monkeypatch.setattr(f"tflms_sft._planner.{module}.no_room", lambda *_: "`spill_dir` has too little space.")
    with pytest.raises(tflms_sft.SwapError, match="too little space"):
        tflms_sft.rewrite(step, AutoParams(caught.value.smallest_bytes), spec)


def test_plan_above_max_slowdown_is_refused_with_a_faster_budget():
    """The named budget gives a plan of at most twice the time, and the named `max_slowdown` the slow plan."""
    concrete_fn, record = trace_step(small_step(), (tf.TensorSpec((2, 64, 64, 3)),), {})
    traced = analyse_step(concrete_fn, record, 2)
    traced = dataclasses.replace(traced, rates=NOMINAL)
    params = AutoParams(1000, headroom=0, swap=False, max_slowdown=math.inf)
    params = dataclasses.replace(params, memory_budget=least_memory(traced, params).peak.peak_bytes)

    def time_ratio(**changes):
        plans = next(plans_within_budget(traced, dataclasses.replace(params, **changes))).plans
        return seconds_of(traced, plans) / traced.seconds if plans else 1

    assert time_ratio() > 2
    with pytest.raises(
        BudgetError, match=r"`memory_budget` makes this step slow.* at most max_slowdown=2\. "
    ) as caught:
        time_ratio(max_slowdown=2)
    text, budget = str(caught.value), caught.value.smallest_bytes
    assert budget > params.memory_budget and time_ratio(memory_budget=budget, max_slowdown=2) <= 2
    (accepted,) = re.findall("or `max_slowdown=([0-9]+)` to train with this plan", text)
    assert time_ratio(max_slowdown=int(accepted)) > 2


@pytest.mark.parametrize(("given", "error"), [(0.9, ValueError), (float("nan"), ValueError), ("2", TypeError)])
def test_max_slowdown_is_checked(given, error):
    with pytest.raises(error, match="`max_slowdown` must be a number from 1 on. Received: max_slowdown="):
        MemoryBudget("1GiB", max_slowdown=given)


def test_smallest_plan_competes_with_a_slow_one():
    class Search:
        """A search that has a slow plan, until it models the smallest one."""

        plans = [SimpleNamespace(time_ratio=5.0)]

        @property
        def smallest(self):
            self.plans.append(SimpleNamespace(time_ratio=3.0))
            return SimpleNamespace(peak=SimpleNamespace(peak_bytes=100))

        def fastest_within(self, limit):
            return min(self.plans, key=lambda plan: plan.time_ratio)

    assert _fastest_tiles(Search(), 99).time_ratio == 5.0
    assert _fastest_tiles(Search(), 100).time_ratio == 3.0
