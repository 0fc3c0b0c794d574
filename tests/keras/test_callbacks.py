"""Tests that `SFT` and `MemoryBudget` in `fit`, and `budget` around loops, equal plain training."""

import collections
import copy
import pickle
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from training import (
    BUDGET,
    SETTINGS,
    X,
    Y,
    both,
    budgeted,
    each_slowly,
    fitted,
    is_plain,
    measure_steps,
    net,
    same,
    same_history,
    tiles,
)

import tflms_sft
from tflms_sft import SFT, BudgetError, MemoryBudget, SegmentSpec
from tflms_sft._search.traced_step import TracedStep

pytestmark = pytest.mark.usefixtures("cached_plans")

# The same results as plain training ------------------------------------------------------------------------


@both
def test_fit_arrays_with_partial_last_batch_equals_original(make):
    plan = fitted(make(), lambda m, c: m.fit(X, Y, batch_size=4, epochs=2, callbacks=c, **SETTINGS))
    assert plan.batch == 4 and not plan.batch_is_fixed


@pytest.mark.parametrize("drop", [pytest.param(False, marks=pytest.mark.slow), True], ids=["unknown", "known"])
def test_fit_dataset_with_static_or_unknown_batch_equals_original(drop):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4, drop_remainder=drop)
    plan = fitted(budgeted(), lambda m, c: m.fit(data, epochs=2, callbacks=c, **SETTINGS), optimizer="adam")
    assert (plan.batch, plan.batch_is_fixed) == (4, drop)


@each_slowly
def test_fit_steps_per_execution_equals_original(make):
    x, y = np.concatenate([X, X, X])[:26], np.concatenate([Y, Y, Y])[:26]  # 7 batches: 3, 3 and 1, the last partial.
    fitted(make(), lambda m, c: m.fit(x, y, batch_size=4, epochs=2, callbacks=c, **SETTINGS), steps_per_execution=3)


@pytest.mark.slow
def test_fit_generator_with_steps_per_epoch_equals_original():
    def batches():
        while True:
            yield X[:4], Y[:4]
            yield X[4:8], Y[4:8]

    fitted(tiles(), lambda m, c: m.fit(batches(), steps_per_epoch=3, epochs=2, callbacks=c, **SETTINGS))


@pytest.mark.slow
def test_fit_shuffle_uses_equal_batches():
    def fit(model, callbacks):
        keras.utils.set_random_seed(7)
        return model.fit(X, Y, batch_size=4, epochs=2, verbose=0, callbacks=callbacks)

    fitted(tiles(), fit)


@pytest.mark.slow
def test_fit_sample_weights_equals_original():
    weights = np.linspace(0, 2, 10)
    fitted(tiles(), lambda m, c: m.fit(X, Y, batch_size=4, sample_weight=weights, callbacks=c, **SETTINGS))


@pytest.mark.slow
def test_fit_class_weights_equals_original():
    weights = {0: 0.5, 1: 1.0, 2: 3.0}
    fitted(tiles(), lambda m, c: m.fit(X, Y, batch_size=4, class_weight=weights, callbacks=c, **SETTINGS))


@pytest.mark.slow
def test_fit_validation_equals_original():
    fitted(tiles(), lambda m, c: m.fit(X, Y, batch_size=4, epochs=2, validation_data=(X, Y), callbacks=c, **SETTINGS))


def test_fit_unknown_image_size_is_planned_from_first_batch():
    def unsized(**_):
        keras.config.set_floatx("float64")
        keras.utils.set_random_seed(1)
        image = keras.Input((None, None, 3))
        x = layers.Conv2D(4, 3, padding="same", activation="relu", name="a")(image)
        x = layers.Conv2D(4, 3, padding="same", activation="relu", name="b")(x)
        model = keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))
        model.compile("sgd", "mse")
        return model

    def images():
        for start in (0, 4, 8):
            yield X[start : start + 4], np.ones((len(X[start : start + 4]), 3))

    signature = tf.TensorSpec((None, None, None, 3), tf.float64), tf.TensorSpec((None, 3), tf.float64)
    data = tf.data.Dataset.from_generator(images, output_signature=signature)
    data = data.apply(tf.data.experimental.assert_cardinality(3))
    model, plain, callback = unsized(), unsized(), tiles()
    assert same_history(model.fit(data, callbacks=[callback], **SETTINGS), plain.fit(data, **SETTINGS))
    assert callback.plan.changed and callback.plan.batch == 4
    assert all(np.allclose(a, b, atol=1e-10) for a, b in zip(model.get_weights(), plain.get_weights(), strict=True))


@pytest.mark.slow
def test_sft_named_segments_are_tiled():
    specs = [SegmentSpec("photo", "pool0", num_tiles=(3, 3)), SegmentSpec("pool0", "pool1")]
    callback = SFT((2, 2), specs, verbose=0)
    plan = fitted(callback, lambda m, c: m.fit(X, Y, batch_size=4, callbacks=c, **SETTINGS), blocks=2)
    assert [segment.num_tiles for segment in plan.segments] == [(1, 3, 3), (1, 2, 2)]


# What else goes on during a training --------------------------------------------------------------------


def test_model_save_during_fit_works(tmp_path):
    path = str(tmp_path / "model.keras")
    saving = keras.callbacks.ModelCheckpoint(path)
    model = net()
    model.fit(X, Y, batch_size=4, callbacks=[tiles(), saving], **SETTINGS)
    loaded = keras.models.load_model(path)
    assert is_plain(loaded)
    assert all(np.array_equal(a, b) for a, b in zip(loaded.get_weights(), model.get_weights(), strict=True))


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), keras.models.clone_model],
    ids=["deepcopy", "pickle", "clone"],
)
def test_model_clone_during_fit_works(copied):
    class Copy(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.copy = copied(self.model)

    model, copying = net(), Copy()
    model.fit(X, Y, batch_size=4, callbacks=[tiles(), copying], **SETTINGS)
    assert is_plain(copying.copy)
    copying.copy.compile("sgd", model.loss)
    copying.copy.fit(X, Y, batch_size=4, **SETTINGS)


@pytest.mark.slow
def test_evaluate_and_predict_inside_fit_run_original():
    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.loss = self.model.evaluate(X, Y, verbose=0, return_dict=True)["loss"]
            self.outputs = self.model.predict(X, verbose=0)

    looks = Look(), Look()
    for look, callbacks in zip(looks, ([tiles()], []), strict=True):
        net().fit(X, Y, batch_size=4, callbacks=[*callbacks, look], **SETTINGS)
    assert np.isclose(looks[0].loss, looks[1].loss, rtol=1e-10)
    assert np.allclose(looks[0].outputs, looks[1].outputs, rtol=1e-10)


# Normalisation that trains ----------------------------------------------------------------------------------


def test_batch_norm_in_training_mode_is_tiled_between_barriers(capsys):
    callback = tiles()
    net(norm=True).fit(X, Y, batch_size=4, callbacks=[callback], **SETTINGS)
    (segment,) = callback.plan.segments
    assert segment.num_loops >= 4 and not callback.plan.left_alone
    assert "loops between barriers" in callback.plan.summary()
    assert capsys.readouterr().out == "", "with `verbose=0`"


@pytest.mark.slow
def test_batch_norm_frozen_is_tiled():
    def frozen():
        model = net(norm=True)
        for layer in model.layers:
            layer.trainable = not isinstance(layer, layers.BatchNormalization)
        model.compile("adam", model.loss, jit_compile=False)
        return model

    model, plain, callback = frozen(), frozen(), tiles()
    model.fit(X, Y, batch_size=4, callbacks=[callback], **SETTINGS)
    plain.fit(X, Y, batch_size=4, **SETTINGS)
    assert len(callback.plan.segments) == 1
    assert [name for name, _ in callback.plan.left_alone if "norm" in name] == []
    assert same(model, plain)


# Hand-written loops -----------------------------------------------------------------------------------------


def test_budget_with_train_on_batch_equals_original():
    model, plain = net(), net()
    with tflms_sft.budget(model, BUDGET, verbose=0) as installed:
        assert installed.plan is None
        for start in (0, 4):
            got = model.train_on_batch(X[start : start + 4], Y[start : start + 4], return_dict=True)
            want = plain.train_on_batch(X[start : start + 4], Y[start : start + 4], return_dict=True)
            assert np.isclose(got["loss"], want["loss"], rtol=1e-10)
    assert installed.plan.changed and installed.plan.memory_budget == 700 * 2**10
    assert is_plain(model)
    assert same(model, plain)


def loop(model):
    """Two steps of a hand-written `tf.function`."""
    step = tf.function(lambda data: model.train_step(data))
    return [float(step((tf.constant(X[i : i + 4]), tf.constant(Y[i : i + 4])))["loss"]) for i in (0, 4)]


def test_budget_with_custom_train_function_equals_original():
    model, plain = net(), net()
    with tflms_sft.budget(model, BUDGET, verbose=0) as installed:
        got = loop(model)
    assert installed.plan.changed and is_plain(model)
    assert np.allclose(got, loop(plain), rtol=1e-10)
    assert same(model, plain)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_budget_after_error_restores_model(error):
    model = net()
    with pytest.raises(error):
        with tflms_sft.budget(model, BUDGET, verbose=0):
            model.train_on_batch(X[:4], Y[:4])
            raise error
    assert is_plain(model)
    model.train_on_batch(X[:4], Y[:4])


def test_budget_infeasible_raises_in_first_step():
    model, plain = net(), net()
    with pytest.raises(BudgetError, match="smallest plan found needs"):
        with tflms_sft.budget(model, "10KiB"):
            model.train_on_batch(X[:4], Y[:4])
    assert is_plain(model)
    model.train_on_batch(X[:4], Y[:4])
    plain.train_on_batch(X[:4], Y[:4])
    assert same(model, plain)


# What is printed ----------------------------------------------------------------------------------------------


def test_verbose_prints_plan_and_peak(capsys, monkeypatch):
    measure_steps(monkeypatch, None)
    callback = SFT((2, 3))
    assert callback.plan is None
    net().fit(X, Y, batch_size=4, epochs=2, callbacks=[callback], **SETTINGS)
    start, peak = capsys.readouterr().out.splitlines()
    assert "XLA" not in start and start == f"tflms-sft: {callback.plan.headline()}"
    assert start.startswith("tflms-sft: 1 segment(s) in 2 rows x 3 columns of tiles, predicted peak ")
    assert peak.startswith("tflms-sft: peak of the first step not measured")
    assert callback.plan.measured is None


@pytest.fixture
def measured_peaks(monkeypatch):
    """Replace the measured peaks of the next steps; the last one is that of all further steps."""
    peaks = []
    measure_steps(monkeypatch, lambda step_bytes: peaks.pop(0) if len(peaks) > 1 else peaks[0])
    return peaks


def test_peak_line_has_measured_and_predicted_peak(capsys, measured_peaks, plan_with):
    """If both are far apart, it names the size of tensors that count."""
    plan_with(min_counted_bytes=2**15)
    measured_peaks += [100 * 2**10, 690 * 2**10]
    callback = MemoryBudget(BUDGET)
    for _ in range(2):
        net().fit(X, Y, batch_size=4, callbacks=[callback], **SETTINGS)
    start, low, _, near = capsys.readouterr().out.splitlines()
    assert start.endswith(", budget 700 KiB")
    assert low.startswith("tflms-sft: measured peak 100 KiB in the first step, predicted ") and "OVER" not in low
    assert low.endswith("; this device does not count tensors below 32 KiB") and "does not count" not in near
    assert callback.plan.measured.peak_bytes == 690 * 2**10


def test_step_over_budget_is_planned_again(capsys, measured_peaks, monkeypatch):
    """The second plan keeps trace, analysis and estimates."""
    counts, kept = collections.Counter(), set()

    def once(traced, name, compute, computed=TracedStep.once):
        counts[name] += name not in traced.models.parts
        kept.add((id(traced.concrete_fn), id(traced.analysis), id(traced.models)))
        return computed(traced, name, compute)

    monkeypatch.setattr(TracedStep, "once", once)
    monkeypatch.setenv("TFLMS_SFT_PLAN_CACHE", "off")
    measured_peaks += [750 * 2**10, 600 * 2**10]
    plans = []

    class Watching(MemoryBudget):
        def on_train_batch_end(self, batch, logs=None):
            plans.append(self.plan)

    fitted(Watching(BUDGET), lambda m, c: m.fit(X, Y, batch_size=4, epochs=2, callbacks=c, **SETTINGS))
    assert len(kept) == 1 and {"search None", "costs", "plain", "seconds"} <= counts.keys()
    assert set(counts.values()) == {1}
    first, second = plans[0], plans[-1]
    assert first is not second and second.measured.peak_bytes == 600 * 2**10
    limit = 0.9 * second.memory_budget - (750 * 2**10 - first.predicted.peak_bytes)
    assert second.predicted.peak_bytes <= limit < first.predicted.peak_bytes
    lines = [line for line in capsys.readouterr().out.splitlines() if "measured peak" in line]
    assert lines[0].endswith("OVER the budget of 700 KiB: planning again with the measured peak")
    assert len(lines) == 2 and "OVER" not in lines[1]


def test_later_step_over_budget_is_said_once_and_next_epoch_is_planned_again(capsys, measured_peaks):
    measured_peaks += [kib * 2**10 for kib in (600, 750, 760, 600)]
    plans = []

    class Watching(MemoryBudget):
        def on_epoch_end(self, epoch, logs=None):
            super().on_epoch_end(epoch, logs)
            plans.append(self.plan)

    fitted(Watching(BUDGET), lambda m, c: m.fit(X, Y, batch_size=4, epochs=3, callbacks=c, **SETTINGS))
    first, second, third = plans
    assert first is not second and second is third
    limit = 0.9 * first.memory_budget - (750 * 2**10 - first.predicted.peak_bytes)
    assert second.predicted.peak_bytes <= limit < first.predicted.peak_bytes
    lines = [line for line in capsys.readouterr().out.splitlines() if "a later step used" in line]
    assert lines == [
        "tflms-sft: a later step used 750 KiB, more than its budget of 700 KiB; the next epoch is planned again with "
        "this peak."
    ]


def test_later_step_over_budget_without_smaller_plan_trains_on(measured_peaks):
    measured_peaks += [600 * 2**10, 2**30]
    callback = budgeted()
    with pytest.warns(UserWarning) as warned:
        fitted(callback, lambda m, c: m.fit(X, Y, batch_size=4, epochs=3, callbacks=c, **SETTINGS))
    excess, kept = (str(one.message) for one in warned if str(one.message).startswith("tflms-sft: "))
    assert "a later step used 1.00 GiB, more than its budget of 700 KiB" in excess
    assert kept == "tflms-sft: no plan has a smaller peak; training continues with the present plan."


def test_later_step_over_budget_without_epochs_gives_a_remedy(capsys, measured_peaks):
    measured_peaks += [600 * 2**10, 750 * 2**10, 760 * 2**10]
    model = net()
    with tflms_sft.budget(model, "700KiB") as installed:
        for _ in range(3):
            model.train_on_batch(X[:4], Y[:4])
    start, *lines = capsys.readouterr().out.splitlines()
    assert start == f"tflms-sft: {installed.plan.headline()}"
    (line,) = (line for line in lines if "a later step used" in line)
    assert line.endswith("a later step used 750 KiB, more than its budget of 700 KiB; pass a larger `headroom`.")


earlier_work = pytest.mark.parametrize("is_used", [False, True], ids=["fresh", "used"])


@earlier_work
def test_step_over_budget_twice_raises(monkeypatch, is_used):
    peaks = iter([750 * 2**10, 720 * 2**10])
    measure_steps(monkeypatch, lambda step_bytes: next(peaks), earlier=is_used * 2**30)
    model = net()
    with pytest.raises(BudgetError, match="exceeds `memory_budget`, although .* measured 720 KiB") as caught:
        model.fit(X, Y, batch_size=4, epochs=2, callbacks=[MemoryBudget(BUDGET)], **SETTINGS)
    assert caught.value.smallest_bytes == 720 * 2**10 and is_plain(model)
    assert re.search(
        "eave more of the budget free, such as `headroom=0.[0-9]+`. Or raise the budget", str(caught.value)
    )
    told = "In a process that has trained before.* more fragmented: train in a fresh process, or leave"
    assert bool(re.search(told, str(caught.value))) == is_used


@earlier_work
def test_replanning_infeasible_raises_with_measured_excess(monkeypatch, is_used):
    peak = 7 * 2**20
    measure_steps(monkeypatch, lambda step_bytes: peak, earlier=is_used * 2**30)
    with pytest.raises(BudgetError, match=r"An earlier plan took 6\.[0-9]+ MiB more than predicted\.") as caught:
        net().fit(X, Y, batch_size=4, epochs=2, callbacks=[MemoryBudget(BUDGET)], **SETTINGS)
    assert ("more fragmented: train in a fresh process. More `headroom` does not help" in str(caught.value)) == is_used
    peak = 600 * 2**10
    callback = MemoryBudget(int(1.001 * caught.value.smallest_bytes))
    net().fit(X, Y, batch_size=4, epochs=2, callbacks=[callback], **SETTINGS)
    assert not callback.plan.changed, "the number is at most what the original step needs"
    peak = 7 * 2**20
    with pytest.raises(BudgetError) as caught:  # Now it is the original step that took more.
        net().fit(X, Y, batch_size=4, epochs=2, callbacks=[callback], **SETTINGS)
    assert caught.value.smallest_bytes > 6 * 2**20


def test_budget_without_rewriting_prints_headline(capsys):
    callback = MemoryBudget("1GiB")
    net().fit(X, Y, batch_size=4, callbacks=[callback], **SETTINGS)
    assert not callback.plan.changed
    assert "tflms-sft: nothing rewritten, predicted peak " in capsys.readouterr().out


# Several images ---------------------------------------------------------------------------------------------


def test_fit_two_inputs_of_unknown_sizes_equals_original():
    """Keras traces unknown sizes; each input is planned for the size of its own first batch."""
    keras.config.set_floatx("float64")

    def two():
        keras.utils.set_random_seed(3)
        large, small = (keras.Input((None, None, 3), name=name) for name in ("large", "small"))
        parts = []
        for x in (large, small):
            for _ in range(2):
                x = layers.Conv2D(3, 3, padding="same", activation="relu")(x)
            parts.append(layers.GlobalAveragePooling2D()(x))
        model = keras.Model([large, small], layers.Dense(2)(layers.Concatenate()(parts)))
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", jit_compile=False)
        return model

    random = np.random.default_rng(0)
    images = random.normal(size=(4, 24, 20, 3)), random.normal(size=(4, 20, 22, 3))
    shapes = tuple((None, None, None, 3) for _ in images)
    signature = tuple(tf.TensorSpec(s, tf.float64) for s in shapes), tf.TensorSpec((None, 2), tf.float64)

    def data():
        pairs = [((images[0][i : i + 2], images[1][i : i + 2]), np.ones((2, 2))) for i in (0, 2)]
        known = tf.data.experimental.assert_cardinality(len(pairs))
        return tf.data.Dataset.from_generator(lambda: iter(pairs), output_signature=signature).apply(known)

    model, plain, callback = two(), two(), SFT((2, 2), verbose=0)
    model.fit(data(), callbacks=[callback], verbose=0, shuffle=False)
    plain.fit(data(), verbose=0, shuffle=False)
    assert len(callback.plan.segments) == 2
    assert same(model, plain)
