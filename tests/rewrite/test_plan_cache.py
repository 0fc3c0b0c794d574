"""Test plans in files: saved ones, and the cache of later processes."""

import dataclasses
import functools
import json
import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from golden_nets import residual, train_step, unet_2d, vgg
from training import SETTINGS, X, Y, net

import tflms_sft
from rewriters.ir.device_detection import planned_device
from tflms_sft import AutoParams, BudgetError, MemoryBudget, RewriteError
from tflms_sft._planner import budget_search
from tflms_sft._rewrite.plan_cache import code_hash
from tflms_sft._util import progress

FRACTIONS = {vgg: 0.5, residual: 0.85, unet_2d: 0.6}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TFLMS_SFT_PLAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def specs_of(model):
    images = tf.TensorSpec((4, *model.input_shape[1:]))
    return images, tf.TensorSpec((4, *model.output_shape[1:-1]), tf.int32)


def planned(build, params):
    keras.config.set_floatx("float32")
    model = build()
    return tflms_sft.rewrite(train_step(model), params, *specs_of(model)).plan


@functools.cache
def budget_of(build):
    return int(FRACTIONS[build] * planned(build, AutoParams("1GiB")).original.peak_bytes)


@functools.cache
def plan_of_vgg():
    """Return a plan for a budget, which the tests do not change."""
    return planned(vgg, AutoParams(budget_of(vgg), headroom=0))


@pytest.fixture
def no_search(monkeypatch):
    """Return a function after which a search fails."""

    def search(*args, **kwargs):
        raise AssertionError("a search was started")

    return lambda: monkeypatch.setattr(budget_search, "_search", search)


@pytest.mark.parametrize("build", FRACTIONS, ids=lambda build: build.__name__)
def test_cached_plan_of_equal_step_needs_no_search(build, cache, no_search):
    """The second model has other names of layers."""
    params = AutoParams(budget_of(build), headroom=0)
    first = planned(build, params)
    assert first.changed and list(cache.iterdir())
    no_search()
    second = planned(build, params)
    for field in ("predicted", "original"):
        assert getattr(first, field).peak_bytes == getattr(second, field).peak_bytes
        assert getattr(first, field).time_ratio == pytest.approx(getattr(second, field).time_ratio)
    assert [s.num_tiles for s in first.segments] == [s.num_tiles for s in second.segments]
    assert len(first.swaps) == len(second.swaps)


def test_cache_of_other_budget_or_step_is_not_used(cache, no_search):
    budget = budget_of(unet_2d)
    planned(unet_2d, AutoParams(budget, headroom=0))
    no_search()
    for build, params in ((unet_2d, AutoParams(budget - 1, headroom=0)), (vgg, AutoParams(budget, headroom=0))):
        with pytest.raises(AssertionError, match="a search was started"):
            planned(build, params)


def test_cache_of_other_kernels_is_not_used(cache, plan_with, no_search):
    """Nominal rates are the same with and without oneDNN."""
    params = AutoParams(budget_of(vgg), headroom=0)
    planned(vgg, params)
    plan_with(has_allocator_stats=not planned_device().has_allocator_stats)
    no_search()
    with pytest.raises(AssertionError, match="a search was started"):
        planned(vgg, params)


def test_cache_of_other_code_is_not_used(cache, no_search, monkeypatch):
    """Between two commits of one version the planner may change."""
    params = AutoParams(budget_of(vgg), headroom=0)
    planned(vgg, params)
    monkeypatch.setattr("tflms_sft._rewrite.plan_cache.code_hash", lambda: "changed")
    no_search()
    with pytest.raises(AssertionError, match="a search was started"):
        planned(vgg, params)


@pytest.mark.parametrize("folder", ["_barriers", "_planner", "_search", "tiling"])
def test_hash_of_the_code_covers_all_packages_that_plan(folder, monkeypatch):
    before, read = code_hash.__wrapped__(), Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path.parent.name == folder))
    assert code_hash.__wrapped__() != before


def leaky(slope):
    """Return a function that builds a net in which the slope is an attribute of an op alone."""

    def build():
        image = x = keras.Input((48, 48, 3), name="photo")
        for _ in range(3):
            x = keras.layers.LeakyReLU(negative_slope=slope)(keras.layers.Conv2D(8, 3, padding="same")(x))
        return keras.Model(image, keras.layers.Dense(3)(keras.layers.GlobalAveragePooling2D()(x)))

    return build


def test_cache_of_step_with_other_attributes_is_not_used(cache, no_search):
    params = AutoParams(int(0.6 * planned(leaky(0.2), AutoParams("1GiB")).original.peak_bytes), headroom=0)
    assert planned(leaky(0.2), params).changed
    no_search()
    planned(leaky(0.2), params)
    with pytest.raises(AssertionError, match="a search was started"):
        planned(leaky(0.3), params)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 0}'])
def test_damaged_cache_is_replaced(cache, text):
    params = AutoParams(budget_of(vgg), headroom=0)
    first = planned(vgg, params)
    (path,) = [path for path in cache.iterdir() if json.loads(path.read_text())["segments"]]
    path.write_text(text)
    assert planned(vgg, params).headline() == first.headline()
    assert json.loads(path.read_text())["segments"]


def test_unwritable_cache_is_ignored(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TFLMS_SFT_PLAN_CACHE", str(tmp_path / "file"))
    assert planned(vgg, AutoParams(budget_of(vgg), headroom=0)).changed


def test_saved_plan_trains_without_search_as_plain(tmp_path, no_search):
    path = tmp_path / "plan.json"
    model, plain, callback = net(), net(), MemoryBudget("700KiB", verbose=0)
    model.fit(X, Y, batch_size=4, callbacks=[callback], **SETTINGS)
    assert callback.plan.changed
    callback.plan.save(path)
    no_search()
    model, saved = net(), MemoryBudget(plan=path, verbose=0)
    got = model.fit(X, Y, batch_size=4, callbacks=[saved], **SETTINGS).history
    assert saved.plan.headline() == callback.plan.headline()
    assert f"plan read from '{path}', without a search" in saved.plan.notes
    assert not any("read from" in note for note in callback.plan.notes)
    np.testing.assert_allclose(got["loss"], plain.fit(X, Y, batch_size=4, **SETTINGS).history["loss"], rtol=1e-10)
    for a, b in zip(model.variables, plain.variables, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("given", "shown"), [({}, "700 KiB"), ({"memory_budget": "800KiB"}, "800 KiB")])
def test_saved_plan_has_one_budget_in_all_lines(given, shown, tmp_path, monkeypatch, capsys):
    """Training, validation and the file that is saved again: that of the file, if no budget is given."""
    path, first = tmp_path / "plan.json", MemoryBudget("700KiB", verbose=0)
    net().fit(X[:4], Y[:4], batch_size=4, callbacks=[first], **SETTINGS)
    first.plan.save(path)
    monkeypatch.setattr(progress, "SLOW_SECONDS", 0.001)
    saved = MemoryBudget(**given, plan=path)
    net().fit(X[:4], Y[:4], batch_size=4, validation_data=(X[:4], Y[:4]), callbacks=[saved], **SETTINGS)
    out = capsys.readouterr().out
    assert f"tflms-sft: planning for a budget of {shown} ...\n" in out and "the free memory" not in out
    assert set(re.findall(r"budget (?:of )?(\d+ \S+?B)\b", out)) == {shown}
    assert out.count(f", budget {shown}") == 2  # The headlines of training and validation.
    saved.plan.save(path)
    assert json.loads(path.read_text())["memory_budget"] == saved.evaluate_plan.memory_budget


def segmenter():
    """Return a network that classifies pixels."""
    keras.utils.set_random_seed(0)
    image = keras.Input((32, 32, 3), batch_size=2)
    x = image
    for _ in range(3):
        x = keras.layers.Conv2D(8, 3, padding="same", activation="relu")(x)
    model = keras.Model(image, keras.layers.Conv2D(3, 1)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, jit_compile=False)
    return model


def test_saved_plan_of_one_loop_trains_as_plain(tmp_path, no_search):
    """The loss of each pixel is known in the loop of the forward ops, so that backward ops run in it too."""
    keras.config.set_floatx("float64")
    random, path = np.random.default_rng(0), tmp_path / "plan.json"
    images, labels = random.normal(size=(4, 32, 32, 3)), random.integers(3, size=(4, 32, 32))
    histories, variables = [], []
    for arguments in (None, {"memory_budget": "400KiB"}, {"plan": path}):
        model = segmenter()
        callbacks = [] if arguments is None else [MemoryBudget(**arguments, verbose=0)]
        fitted = model.fit(images, labels, batch_size=2, callbacks=callbacks, **SETTINGS)
        histories.append(fitted.history["loss"])
        variables.append(model.get_weights())
        for callback in callbacks:
            assert any(segment.one_loop for segment in callback.plan.segments)
            callback.plan.save(path)
            no_search()
    for got, weights in zip(histories[1:], variables[1:], strict=True):
        np.testing.assert_allclose(got, histories[0], rtol=1e-10)
        for a, b in zip(weights, variables[0], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


def test_unusable_plan_file_is_refused_with_reason(tmp_path):
    path, other = tmp_path / "plan.json", tmp_path / "other.json"
    plan_of_vgg().save(path)
    removed = tmp_path / "removed.json"
    for file in (other, removed):
        file.write_text("no plan")
    reasons = {
        AutoParams(plan=path): "is for another step, batch size (that of a smaller last batch counts, too) or version",
        AutoParams("1MiB", plan=str(other)): "holds no plan that can be read",
        AutoParams("1MiB", plan=str(removed)): "does not exist",
    }
    removed.unlink()
    for params, reason in reasons.items():
        with pytest.raises(RewriteError, match=f"`plan` must name a file that .*', which {re.escape(reason)}"):
            planned(leaky(0.2), params)
    with pytest.raises(TypeError, match="`plan` must be a path. Received: plan=3"):
        AutoParams("1MiB", plan=3)


@pytest.mark.parametrize("params", (AutoParams, tflms_sft.MemoryBudget))
def test_plan_that_is_no_file_is_refused_at_construction(params, tmp_path):
    for path in ("none.json", tmp_path / "none.json", tmp_path):
        received = re.escape(f"Received: plan={str(path)!r}.")
        with pytest.raises(ValueError, match=f"`plan` must be an existing file that `Plan.save` wrote. {received}"):
            params(plan=path)


def test_saved_plan_above_budget_is_refused_before_training(tmp_path):
    path, plan = tmp_path / "plan.json", plan_of_vgg()
    plan.save(path)
    peak = plan.predicted.peak_bytes
    assert planned(vgg, AutoParams(peak, plan=path)).predicted.peak_bytes == peak
    with pytest.raises(BudgetError, match="`memory_budget` is too small for the saved plan. Received: ") as caught:
        planned(vgg, AutoParams(peak - 1, plan=path))
    assert caught.value.smallest_bytes == peak and caught.value.tensor


def rolled():
    """Build a network of moves of all rows, which no tiles split."""
    image = keras.Input((64, 64, 3))
    x = keras.layers.Conv2D(8, 1)(image)
    for shift in range(1, 7):
        x = keras.ops.tanh(keras.ops.roll(x, shift, axis=1))
    return keras.Model(image, x)


def test_saved_plan_with_swaps_is_refused_without(tmp_path):
    """A changed copy of a plan is saved like the plan."""
    path = tmp_path / "plan.json"
    peak_bytes = planned(rolled, AutoParams("1GiB")).original.peak_bytes
    plan = planned(rolled, AutoParams(int(0.8 * peak_bytes), headroom=0))
    assert plan.swaps
    dataclasses.replace(plan, notes=()).save(path)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.notes = ()
    assert planned(rolled, AutoParams(plan=path)).swaps
    with pytest.raises(RewriteError, match="`plan` must not swap with `swap=False`. Received: plan='.*', which swaps"):
        planned(rolled, AutoParams(plan=path, swap=False))


def test_save_plan_of_explicit_parameters_is_refused(tmp_path):
    plan = planned(vgg, tflms_sft.SFTParams((2, 2)))
    with pytest.raises(ValueError, match="Only a plan for a budget can be saved"):
        plan.save(tmp_path / "plan.json")
