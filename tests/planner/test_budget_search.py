"""Test plans of tiles, swaps or both for a budget, and `LMSParams.tuned`."""

import functools
import math
import os
import re
import types
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from devices import ONEDNN
from equivalence import keras_step
from gradients import gradient_step
from gradients import model_of as model_of_image
from keras import layers
from nets import conv

import tflms_sft
from rewriters.estimates.op_cost import DIRECT
from tflms_sft import AutoParams, BudgetError, LMSParams, MemoryBudget
from tflms_sft._machine.memory_info import free_memory
from tflms_sft._params.swap_params import SwapParams
from tflms_sft._planner.budget_search import (
    TILE_PEAK_FRACTIONS,
    BudgetPlan,
    FeasiblePlan,
    limit_of,
    swaps_alone,
)
from tflms_sft._planner.swap_planner import NothingToSwapError, apply_swaps
from tflms_sft._planner.swap_search import SwapSearch
from tflms_sft._report.summary import excess_remedy
from tflms_sft._search.traced_step import analyse_step
from tflms_sft._trace.step_tracing import trace_step

IMAGES = np.random.default_rng(0).normal(size=(2, 64, 64, 3)).astype("float32")
VOLUMES = np.random.default_rng(0).normal(size=(8, 16, 16, 16, 2)).astype("float32")
LABELS = np.arange(8) % 2


def tileable(x):
    for _ in range(6):
        x = layers.Conv2D(16, 3, padding="same", activation="relu")(x)
    return x


def volumetric(x):
    """Apply layers that roll the batch, so that tiles save nothing."""
    for _ in range(8):
        x = layers.ReLU()(keras.ops.roll(layers.Conv3D(8, (1, 3, 3), padding="same")(x), 1, axis=0))
    return x


def normed_volumes(x):
    for _ in range(4):
        x = layers.ReLU()(layers.BatchNormalization()(layers.Conv3D(8, (1, 3, 3), padding="same")(x)))
    return x


def mixed(x):
    """Apply layers of which half can be tiled."""
    x = tileable(x)
    for _ in range(4):
        x = layers.ReLU()(keras.ops.roll(layers.Conv2D(16, 3, padding="same")(x), 1, axis=0))
    return x


def data_for(body):
    return IMAGES if body in (tileable, mixed) else VOLUMES


def model_of(body):
    keras.utils.set_random_seed(1)
    image = keras.Input(data_for(body).shape[1:], name="photo")
    pool = layers.GlobalAveragePooling2D if data_for(body) is IMAGES else layers.GlobalAveragePooling3D
    model = keras.Model(image, layers.Dense(2)(pool()(body(image))))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    return model


def step_of(model):
    return tf.function(lambda x, y: model.train_step((x, y)))


@functools.cache
def step_for(body):
    """Return a training step, and the bytes that it needs as it is."""
    step, data = step_of(model_of(body)), data_for(body)
    plain = tflms_sft.rewrite(step, AutoParams("8GiB"), data, LABELS[: len(data)]).plan
    return step, plain.original.peak_bytes


def plan_for(body, part, **options):
    (step, peak_bytes), data = step_for(body), data_for(body)
    budget = int(part * peak_bytes / 0.9)
    return tflms_sft.rewrite(step, AutoParams(budget, **options), data, LABELS[: len(data)]).plan, budget


def traced_volumes():
    concrete_fn, record = trace_step(step_for(normed_volumes)[0], (VOLUMES, LABELS), {})
    return analyse_step(concrete_fn, record, len(VOLUMES))


def test_budget_above_peak_leaves_step_unchanged():
    plan, _ = plan_for(tileable, 1.2)
    assert not plan.changed and not plan.swaps and not plan.notes


def test_budget_with_slow_transfers_plans_tiles(set_rates):
    set_rates(copied=1e7)
    plan, budget = plan_for(tileable, 0.6)
    assert plan.segments and not plan.swaps and 1 < plan.predicted.time_ratio < 1.5
    assert plan.predicted.peak_bytes <= 0.9 * budget


def test_budget_where_no_tiles_fit_plans_swaps():
    plan, budget = plan_for(volumetric, 0.6)
    assert plan.swaps and not plan.segments and plan.predicted.peak_bytes <= 0.9 * budget
    assert "swaps, because no tiles fit" in plan.notes and "swaps, because no tiles fit" in plan.summary()


def test_feasible_plan_with_swaps_has_the_peak_of_its_step():
    traced = traced_volumes()
    limit = int(0.8 * traced.plain.peak.peak_bytes)
    feasible = swaps_alone(traced, SwapParams(min_bytes=0), limit)
    swapped = apply_swaps(traced, traced.analysis.graph, feasible.plan.swaps)
    assert feasible.peak_bytes == swapped.peak(None).peak_bytes < limit


def test_budget_with_fast_transfers_plans_swaps(set_rates):
    set_rates(copied=1e12)
    plan, budget = plan_for(tileable, 0.8)
    assert plan.swaps and not plan.segments and plan.predicted.peak_bytes <= 0.9 * budget
    assert plan.notes[-1].startswith("swaps, because tiles would take 1.")
    assert 1 < plan.predicted.time_ratio < 1.01
    assert plan.predicted.seconds == pytest.approx(plan.predicted.time_ratio * plan.original.seconds)


def test_plan_without_swappable_tensors_falls_back_to_tiles(set_rates, monkeypatch):
    calls = []

    def swap(*arguments):
        calls.append(arguments)
        raise NothingToSwapError("Nothing can be swapped.")

    set_rates(copied=1e12)
    monkeypatch.setattr("tflms_sft._rewrite.rewrite.apply_swaps", swap)
    plan, budget = plan_for(tileable, 0.8)
    assert calls and plan.segments and not plan.swaps and plan.predicted.peak_bytes <= 0.9 * budget

    monkeypatch.setattr(
        "tflms_sft._planner.budget_search.feasible_plans",
        lambda *_: [FeasiblePlan(BudgetPlan([], [], LMSParams()), 1.0, 1)],
    )
    monkeypatch.setattr("tflms_sft._planner.budget_search.LeastMemory.within", lambda *_: iter(()))
    smallest = []
    for may_swap in (True, False):
        with pytest.raises(BudgetError, match="is too small for this step") as caught:
            tflms_sft.rewrite(
                step_of(model_of(tileable)),
                AutoParams("1KiB", swap=may_swap, max_slowdown=math.inf),
                IMAGES,
                LABELS[:2],
            )
        smallest.append(caught.value.smallest_bytes)
    assert smallest[0] == smallest[1]


@pytest.mark.slow
def test_tiles_with_swaps_are_no_slower_than_either(set_rates, monkeypatch):
    set_rates(copied=3e9)
    monkeypatch.setattr("tflms_sft._planner.budget_search.MAX_TIME_RATIO_ALONE", 1.0)
    times = {}
    for together in ((), TILE_PEAK_FRACTIONS):
        monkeypatch.setattr("tflms_sft._planner.budget_search.TILE_PEAK_FRACTIONS", together)
        plan, budget = plan_for(mixed, 0.6)
        times[bool(together)] = plan.predicted.time_ratio
        assert plan.predicted.peak_bytes <= 0.9 * budget
    assert times[True] <= times[False]


def test_swapped_seconds_equal_copied_bytes_over_rate(set_rates):
    set_rates(copied=1e9)
    plan, _ = plan_for(volumetric, 0.6)
    out = sum(swap.num_bytes for swap in plan.swaps)
    back = sum(swap.num_bytes * len(swap.controls) for swap in plan.swaps)
    assert plan.predicted.seconds == pytest.approx(plan.original.seconds + (out + back) / 1e9)


def test_swapped_step_serialises_concurrent_gradients(plan_with, set_rates):
    """Compare with the original step, whose two gradients of a convolution share the cores while one unfolds."""
    gradients = dict.fromkeys(("Conv3DBackpropInputV2", "Conv3DBackpropFilterV2", DIRECT), 1e8)
    seconds = {}
    for threads in (1, 4):
        plan_with(intra_op_threads=threads)
        set_rates(copied=1e9, unfolded=gradients)
        plan, _ = plan_for(volumetric, 0.6)
        copied = sum(swap.num_bytes * (1 + len(swap.controls)) for swap in plan.swaps) / 1e9
        seconds[threads] = plan.original.seconds, plan.predicted.seconds - copied
    assert seconds[1] == pytest.approx((seconds[1][0],) * 2)
    assert seconds[4][0] < 0.8 * seconds[1][0] and seconds[4][1] == pytest.approx(seconds[1][1])


@pytest.mark.slow
def test_tiles_with_swaps_lower_the_smallest_budget():
    step = step_of(model_of(mixed))
    smallest = {}
    for name, swap in (("tiles", False), ("both", True)):
        with pytest.raises(BudgetError) as caught:
            tflms_sft.rewrite(step, AutoParams("100KiB", swap=swap), IMAGES, LABELS[:2])
        smallest[name] = caught.value.smallest_bytes
    assert smallest["both"] < smallest["tiles"]
    plan = tflms_sft.rewrite(step, AutoParams(int(1.05 * smallest["both"])), IMAGES, LABELS[:2]).plan
    assert plan.swaps and plan.predicted.peak_bytes <= 0.95 * smallest["both"]
    assert any("because" in note for note in plan.notes)


def test_budget_without_swaps_raises_where_no_tiles_fit():
    with pytest.raises(BudgetError, match="Not tiled: "):
        plan_for(volumetric, 0.6, swap=False)


def test_larger_budget_swaps_fewer_tensors():
    small, large = (plan_for(volumetric, part)[0] for part in (0.6, 0.85))
    assert 0 < len(large.swaps) < len(small.swaps)


def test_budget_with_swap_params_obeys_them(tmp_path):
    swap = LMSParams(tier="disk", spill_dir=tmp_path, incl_types="Relu", min_bytes=0)
    plan, _ = plan_for(volumetric, 0.85, swap=swap)
    assert plan.swaps and all("Relu" in s.tensor or "re_lu" in s.tensor for s in plan.swaps)
    step, budget = step_of(model_of(volumetric)), plan.memory_budget
    listed = tflms_sft.rewrite(step, [AutoParams(budget), swap], VOLUMES, LABELS).plan
    assert [s.num_bytes for s in listed.swaps] == [s.num_bytes for s in plan.swaps]
    with pytest.raises(ValueError, match="restricts swaps twice"):
        tflms_sft.rewrite(step, [AutoParams(budget, swap=False), swap], VOLUMES, LABELS)
    with pytest.raises(TypeError, match="`swap` must be a bool or `LMSParams"):
        AutoParams("1GiB", swap="disk")


def test_swap_params_names_of_original_ops_are_accepted_after_tiling():
    step = step_of(model_of(mixed))
    tiles = tflms_sft.SFTParams((2, 2), [tflms_sft.SegmentSpec("photo", "conv2d_3")])
    both = [tiles, LMSParams(excl_scopes="conv2d_1", min_bytes=0)]
    assert tflms_sft.rewrite(step, both, IMAGES, LABELS[:2]).plan.swaps
    wrong = LMSParams(excl_scopes="conf2d_1")
    for params in (AutoParams("4MiB", swap=wrong), [tiles, wrong]):
        with pytest.raises(tflms_sft.SwapError, match="`excl_scopes` names nothing in the step.*Nearest: .*conv2d"):
            tflms_sft.rewrite(step, params, IMAGES, LABELS[:2])


@pytest.mark.parametrize("net", ("normed", pytest.param("enlarged", marks=pytest.mark.slow)))
def test_smallest_budget_of_error_and_above_are_met(net):
    """Try budgets where neither the limit of swapped tensors nor the steps between grids may leave a gap."""

    def body(x):
        x = layers.Conv2D(16, 3, padding="same", activation="relu")(x)
        x = layers.BatchNormalization()(x) if net == "normed" else layers.MaxPooling2D()(x)
        x = layers.Conv2D(16, 3, padding="same", activation="relu")(x)
        return layers.Conv2D(2, 1)(x if net == "normed" else layers.UpSampling2D()(x))

    image = keras.Input((96, 88, 3))
    model = keras.Model(image, body(image))

    @tf.function
    def step(images):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(images, training=True) ** 2)
        return loss, tape.gradient(loss, model.trainable_variables)

    images = tf.TensorSpec((2, 96, 88, 3))
    with pytest.raises(BudgetError) as caught:
        tflms_sft.rewrite(step, AutoParams("1KiB"), images)
    smallest = caught.value.smallest_bytes
    assert f"({smallest} bytes, headroom of 10% included)" in str(caught.value) and "(1024 bytes)" in str(caught.value)
    for factor in (1, 1.02, 1.1, 1.3):
        plan = tflms_sft.rewrite(step, AutoParams(int(factor * smallest)), images).plan
        assert plan.predicted.peak_bytes < 0.9 * factor * smallest + 64  # The numbers of a few files.


@pytest.mark.parametrize(("body", "part"), [(volumetric, 0.6), pytest.param(mixed, 0.5, marks=pytest.mark.slow)])
def test_fit_with_budget_equals_plain_training(body, part, capfd):
    """Train on batches of 4, 4 and 1, in float32, as TensorFlow pools no volumes in float64."""
    data = np.concatenate([data_for(body)[:2]] * 5)[:9]
    labels = np.arange(9) % 2
    models = [model_of(body), model_of(body)]
    plain = tflms_sft.rewrite(step_of(models[0]), AutoParams("8GiB"), data[:4], labels[:4]).plan
    callback = MemoryBudget(int(part * plain.original.peak_bytes / 0.9))
    for model, callbacks in zip(models, ([callback], []), strict=True):
        model.fit(data, labels, batch_size=4, epochs=2, callbacks=callbacks, shuffle=False, verbose=0)
    assert callback.plan.batch == 4 and not callback.plan.batch_is_fixed
    if body is volumetric:
        assert callback.plan.swaps and "because" in capfd.readouterr().out
    assert callback.plan.changed
    for a, b in zip(*(model.variables for model in models), strict=True):
        assert np.allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("excess", [7, 120, 500, 980])
def test_excess_remedy_headroom_covers_measured_excess(excess):
    (headroom,) = re.findall("`headroom=([0-9.]+)`", excess_remedy(excess, 1000, 1000 - excess, is_used=True))
    assert excess <= 1000 * float(headroom) < excess + 10
    assert "More `headroom` does not help" in excess_remedy(excess, 1000, 1001 - excess, is_used=True)


def test_limit_is_lower_by_the_bytes_that_an_earlier_plan_exceeded_its_prediction_by():
    """The excess over a small peak must not scale with the peak of a large step."""
    params = AutoParams(1000, headroom=0.1)
    limits = [limit_of(types.SimpleNamespace(excess_bytes=excess), params) for excess in (0, 300)]
    assert limits == [900, 600]


def test_excess_remedy_in_fresh_process_names_no_other():
    assert excess_remedy(500, 1000, 500, is_used=False) == "Leave more of the budget free, such as `headroom=0.5`."
    assert not excess_remedy(500, 1000, 600, is_used=False)


# Slow plans ---------------------------------------------------------------------------------------------------


def larger_budgets(plan):
    """Return the time ratios of a plan's note, by the ratio of the budgets."""
    notes = [note for note in plan.notes if note.startswith("a larger budget is much faster: ")]
    pairs = re.findall("(a quarter more|twice as much) (?:takes at most )?([0-9.]+)x", "".join(notes))
    return {{"a quarter more": 1.25, "twice as much": 2}[words]: float(ratio) for words, ratio in pairs}


def test_slow_plan_notes_time_with_larger_budgets():
    image = x = keras.Input((24, 24, 3))
    for _ in range(3):
        x = layers.Conv2D(8, 3, padding="same", activation="relu")(x)
    step, images = gradient_step(model_of_image(image, x)), np.zeros((1, 24, 24, 3), "float32")
    with pytest.raises(BudgetError) as caught:
        tflms_sft.rewrite(step, AutoParams("1KiB", swap=False, max_slowdown=math.inf), images)

    def planned(factor):
        params = AutoParams(int(factor * caught.value.smallest_bytes), swap=False, max_slowdown=math.inf)
        return tflms_sft.rewrite(step, params, images).plan

    plan = planned(1.01)
    ratios = larger_budgets(plan)
    assert (
        plan.predicted.time_ratio > 2
        and "  a larger budget is much faster: a quarter more takes at most " in plan.summary()
    )
    for factor, ratio in ratios.items():
        assert ratio < 0.91 * plan.predicted.time_ratio
        assert planned(1.01 * factor).predicted.time_ratio == pytest.approx(ratio, abs=0.01)
    assert (2 in ratios) == (ratios[1.25] > 2)
    fast = planned(3)
    assert fast.changed and fast.predicted.time_ratio < 2 and not larger_budgets(fast)


def test_slow_plan_of_swaps_notes_fewer_swaps_with_larger_budget(set_rates):
    set_rates(copied=1e6)
    plan, _ = plan_for(volumetric, 0.48, max_slowdown=math.inf)
    assert plan.swaps and plan.predicted.time_ratio > 2
    assert any(note.startswith("a larger budget is ") for note in plan.notes)


# Tuned --------------------------------------------------------------------------------------------------------


def test_tuned_swaps_fewest_tensors_with_longest_prefetch():
    step, peak_bytes = step_for(normed_volumes)
    tuned = {}
    for part in (0.65, 0.75):
        budget = int(part * peak_bytes / 0.9)
        params = LMSParams.tuned(step, budget, VOLUMES, LABELS, tier="disk", min_bytes=0)
        plan = tflms_sft.rewrite(step, params, VOLUMES, LABELS).plan
        assert plan.predicted.peak_bytes <= 0.9 * budget and len(plan.swaps) == params.n_tensors
        fewer = LMSParams(tier="disk", min_bytes=0, n_tensors=params.n_tensors - 1)
        assert tflms_sft.rewrite(step, fewer, VOLUMES, LABELS).plan.predicted.peak_bytes > 0.9 * budget * 0.99
        tuned[part] = params
    assert tuned[0.75].n_tensors < tuned[0.65].n_tensors and tuned[0.75].lb > 1


@pytest.mark.parametrize("options", [{"lb": 5}, {"lb": 12, "ctrld_strategy": "direct_order"}, {}])
def test_smallest_budget_of_tuned_swaps_can_be_met(options, monkeypatch):
    """With a long prefetch distance all swaps need more memory than three quarters of them."""
    # Tests predict without the scratch memory of kernels, which a measurement has.
    monkeypatch.setattr("tflms_sft._rewrite.swap_tuning._measured", lambda *_: 0)
    keras.utils.set_random_seed(1)
    image = keras.Input((64, 64, 3))
    x = image
    for _ in range(10):
        x = layers.Conv2D(16, 3, padding="same", activation="relu")(x)
    model = keras.Model(image, layers.Dense(2)(layers.GlobalAveragePooling2D()(x)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    step, labels = step_of(model), np.arange(8) % 2
    images = np.random.default_rng(0).normal(size=(8, 64, 64, 3)).astype("float32")
    with pytest.raises(BudgetError) as caught:
        LMSParams.tuned(step, "100KiB", images, labels, tier="disk", min_bytes=0, **options)
    smallest = caught.value.smallest_bytes
    params = LMSParams.tuned(step, smallest, images, labels, tier="disk", min_bytes=0, **options)
    assert tflms_sft.rewrite(step, params, images, labels).plan.predicted.peak_bytes <= 0.9 * smallest
    with pytest.raises(BudgetError):
        LMSParams.tuned(step, int(0.99 * smallest), images, labels, tier="disk", min_bytes=0, **options)


def swap_search(**options):
    """Return the search for swaps of a network of volumes."""
    return SwapSearch(traced_volumes(), [], SwapParams(min_bytes=0, **options))


def test_peak_above_a_limit_is_not_taken_for_the_highest(plan_with):
    plan_with(has_allocator_stats=True, min_counted_bytes=0, grows=True)
    search = swap_search(tier="disk")
    count = len(search.swaps(1))
    first_state = search.peak(count, 1, limit=1).peak_bytes
    assert first_state < search.peak(count, 1).peak_bytes == swap_search(tier="disk").peak(count, 1).peak_bytes


@pytest.mark.parametrize(
    ("options", "lowest"), [({"max_in_flight": 1}, 4), ({"max_in_flight": 1, "lb": 5}, 2), ({}, 2)]
)
def test_lowest_peak_of_swaps_is_searched_beyond_a_rise_unless_one_returns_at_a_time(options, lowest, monkeypatch):
    search = swap_search(tier="disk", **options)
    total = len(search.swaps(1))
    peaks = {total: 100, total * 3 // 4: 110, total // 2: 90, total // 4: 130}
    monkeypatch.setattr(search, "swaps", lambda lb: [None] * total)
    monkeypatch.setattr(search, "peak", lambda count, lb, limit=None: SimpleNamespace(peak_bytes=peaks[count]))
    assert search.smallest[0] == total * lowest // 4


def test_tuned_with_measured_peak_over_budget_swaps_more(monkeypatch):
    step, peak_bytes = step_for(normed_volumes)
    budget = int(0.85 * peak_bytes / 0.9)
    counts = []

    def measured(step, params, arguments):
        counts.append(params.n_tensors)
        return budget + budget // 10 if len(counts) == 1 else budget

    monkeypatch.setattr("tflms_sft._rewrite.swap_tuning._measured", measured)
    params = LMSParams.tuned(step, budget, VOLUMES, LABELS, tier="disk", min_bytes=0)
    assert len(counts) == 2 and params.n_tensors == counts[1] > counts[0]
    monkeypatch.setattr("tflms_sft._rewrite.swap_tuning._measured", lambda *_: 2 * budget)
    with pytest.raises(BudgetError, match="too small for this step with swaps alone.*headroom of 10% included"):
        LMSParams.tuned(step, budget, VOLUMES, LABELS, tier="disk", min_bytes=0)


def test_tuned_without_batch_or_memory_raises():
    step, _ = step_for(normed_volumes)
    specs = tf.TensorSpec((None, 16, 16, 16, 2)), tf.TensorSpec((None,), tf.int64)
    with pytest.raises(tflms_sft.RewriteError, match="The batch size is unknown, and a budget needs one"):
        LMSParams.tuned(step, "1GiB", *specs, tier="disk", min_bytes=0)
    with pytest.raises(BudgetError, match="lower `min_bytes`, or use `AutoParams`") as caught:
        LMSParams.tuned(step, "100KiB", VOLUMES, LABELS, tier="disk", min_bytes=0)
    assert caught.value.smallest_bytes > 2**20 and caught.value.tensor
    with pytest.raises(tflms_sft.SwapError, match="`incl_types` names nothing"):
        LMSParams.tuned(step, "1GiB", VOLUMES, LABELS, tier="disk", incl_types="Rule")


# As much as there is -----------------------------------------------------------------------------------------


def test_auto_budget_equals_free_memory(monkeypatch):
    step, peak_bytes = step_for(tileable)
    monkeypatch.setattr("tflms_sft._params.tile_params.free_device_memory", lambda devices: peak_bytes // 2)
    plan = tflms_sft.rewrite(step, AutoParams("auto"), IMAGES, LABELS[:2]).plan
    assert plan.memory_budget == int(0.9 * (peak_bytes // 2 + plan.original.fixed_bytes))
    assert plan.changed and plan.predicted.peak_bytes <= 0.9 * plan.memory_budget
    assert AutoParams() == AutoParams("auto")
    model = model_of(tileable)
    callback = MemoryBudget(verbose=0)
    model.fit(IMAGES, LABELS[:2], batch_size=2, verbose=0, callbacks=[callback])
    assert callback.plan.memory_budget == plan.memory_budget


def test_free_memory_is_below_physical_memory():
    assert 2**20 < free_memory() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_long_rows_are_cut_where_they_slow_filter_gradients_down(plan_with, set_rates):
    """Rows of 200 pixels exceed the cache, rows of 100 do not."""
    plan_with(**ONEDNN)
    step = keras_step(lambda x: conv(8, name="out")(conv(8)(conv(8)(x))), (64, 200), floatx="float32", steps=1)
    plain = tflms_sft.rewrite(step.function, AutoParams("8GiB", swap=False), *step.specs).plan.original.peak_bytes
    columns = {}
    for slowdown in (1.0, 20.0):
        set_rates(long_row_bytes=100 * 16 * 4, long_row_slowdown=slowdown)
        plan = tflms_sft.rewrite(step.function, AutoParams(int(0.8 * plain), swap=False), *step.specs).plan
        columns[slowdown] = [segment.backward_num_tiles[-1] for segment in plan.segments]
    assert max(columns[1.0]) < min(columns[20.0]), columns
