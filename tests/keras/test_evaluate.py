"""Tests that `evaluate`, `predict` and validation equal the original, and that models are restored."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from training import SETTINGS, X, Y, budgeted, is_plain, net, same, same_history, tiles

from tflms_sft import LMS, SFT, BudgetError, MemoryBudget, RewriteError, SegmentError, SegmentSpec

PLAIN = {"batch_size": 4, "verbose": 0}


def small(**options):
    """Return a budget below the original peak and above the smallest plan."""
    return MemoryBudget("140KiB", **{"verbose": 0, **options})


each = pytest.mark.parametrize("make", [tiles, small], ids=["SFT", "MemoryBudget"])


def trained(**options):
    """A model with optimizer slots, and running statistics of data."""
    model = net(**options)
    model.fit(X, Y, batch_size=4, **SETTINGS)
    return model


def changed(plan):
    return plan.changed and plan.segments and not any(segment.backward_ops for segment in plan.segments)


@each
def test_predict_partial_last_batch_equals_original(make):
    model, callback = trained(norm=True), make()
    got = model.predict(X, callbacks=[callback], **PLAIN)
    assert changed(callback.predict_plan) and callback.plan is None and callback.evaluate_plan is None
    assert is_plain(model)
    assert got.shape == (10, 3) and np.allclose(got, model.predict(X, **PLAIN), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("make", [tiles, pytest.param(small, marks=pytest.mark.slow)], ids=["SFT", "MemoryBudget"])
def test_evaluate_loss_and_metrics_equal_original(make):
    model, callback = trained(norm=True), make()
    got = model.evaluate(X, Y, callbacks=[callback], **PLAIN)
    states = [np.array(variable) for variable in model.metrics_variables]
    assert changed(callback.evaluate_plan) and callback.predict_plan is None and is_plain(model)
    assert np.allclose(got, model.evaluate(X, Y, **PLAIN), rtol=1e-10)
    want = [np.array(variable) for variable in model.metrics_variables]
    assert len(want) > 2 and all(np.allclose(*pair, rtol=1e-10) for pair in zip(states, want, strict=True))


def test_validation_under_budget_is_planned_once(capsys):
    callback, model, plain = budgeted(verbose=1), net(), net()
    fit = {"batch_size": 4, "epochs": 3, "validation_data": (X[:6], Y[:6]), **SETTINGS}
    got, want = model.fit(X, Y, callbacks=[callback], **fit), plain.fit(X, Y, **fit)
    assert "val_loss" in want.history and same_history(got, want) and same(model, plain) and is_plain(model)
    assert callback.plan.changed and callback.plan is not callback.evaluate_plan
    assert callback.evaluate_plan.memory_budget == callback.plan.memory_budget
    # Slots are on the device while a model is validated, too.
    assert callback.evaluate_plan.predicted.fixed_bytes >= sum(np.array(v).nbytes for v in model.optimizer.variables)
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("tflms-sft: validation: ")]) == 1


@pytest.mark.slow
def test_validation_under_sft_is_tiled():
    callback, model, plain = tiles(), net(norm=True), net(norm=True)
    fit = {"batch_size": 4, "epochs": 2, "validation_data": (X, Y), **SETTINGS}
    got, want = model.fit(X, Y, callbacks=[callback], **fit), plain.fit(X, Y, **fit)
    assert same_history(got, want) and same(model, plain) and is_plain(model)
    assert changed(callback.evaluate_plan) and callback.evaluate_plan.segments[0].num_tiles == (1, 2, 3)


def test_evaluate_steps_per_execution_equals_original():
    model, callback = net(steps_per_execution=2), tiles()
    want = model.evaluate(X, Y, **PLAIN), model.predict(X, **PLAIN)
    got = [model.evaluate(X, Y, callbacks=[callback], **PLAIN), model.predict(X, callbacks=[callback], **PLAIN)]
    assert np.allclose(got[0], want[0], rtol=1e-10) and np.allclose(got[1], want[1], rtol=1e-10, atol=1e-12)
    assert changed(callback.evaluate_plan) and changed(callback.predict_plan) and is_plain(model)


def test_predict_uncompiled_model_from_dataset_equals_original():
    keras.config.set_floatx("float64")
    model, callback = net(), tiles()
    model = keras.Model(model.input, model.output)
    data = tf.data.Dataset.from_tensor_slices(X).batch(4)
    got = model.predict(data, verbose=0, callbacks=[callback])
    assert changed(callback.predict_plan) and np.allclose(got, model.predict(data, verbose=0), rtol=1e-10, atol=1e-12)


def test_evaluate_jit_compile_is_restored(capsys):
    model, callback = net(jit_compile=True), tiles(verbose=1)
    model.predict(X, callbacks=[callback], **PLAIN)
    assert changed(callback.predict_plan) and model.jit_compile is True and is_plain(model)
    assert "tflms-sft: predict: 1 segment(s)" in (text := capsys.readouterr().out) and "XLA" in text


# What goes wrong -------------------------------------------------------------------------------------------


class Fails(keras.callbacks.Callback):
    def on_test_batch_begin(self, batch, logs=None):
        raise KeyError("mine")


def test_evaluate_after_foreign_error_runs_original():
    model = net()
    want = model.evaluate(X, Y, **PLAIN)
    with pytest.raises(KeyError, match="mine"):
        model.evaluate(X, Y, callbacks=[tiles(), Fails()], **PLAIN)
    assert model.evaluate(X, Y, **PLAIN) == want and is_plain(model)


def test_evaluate_infeasible_budget_restores_model():
    model = net()
    for run, data in ((model.evaluate, (X, Y)), (model.predict, (X,))):
        with pytest.raises(BudgetError, match="^(evaluate|predict): `memory_budget` is too small for this step"):
            run(*data, callbacks=[MemoryBudget("1KiB", verbose=0)], **PLAIN)
        assert is_plain(model)


def test_validation_error_restores_train_step():
    model = net()
    with pytest.raises(tf.errors.InvalidArgumentError, match="label"):
        model.fit(X, Y, batch_size=4, validation_data=(X, Y + 7), callbacks=[tiles()], **SETTINGS)
    assert is_plain(model)


def test_validation_not_rewritable_runs_original_with_notice(capsys):
    """The evaluation does not contain the layer that the segment ends at."""
    callback = SFT(segments=[SegmentSpec("photo", "pool0", num_tiles=(2, 2))])
    histories, fit = [], {"batch_size": 4, "epochs": 2, "validation_data": (X, Y), **SETTINGS}
    for callbacks in ([callback], []):
        model = net()
        model.test_step = own = lambda data, model=model: {"mean": tf.reduce_mean(model.layers[1](data[0]))}
        histories.append(model.fit(X, Y, callbacks=callbacks, **fit))
        assert model.__dict__["test_step"] is own
    assert same_history(*histories) and "val_mean" in histories[1].history
    assert callback.plan.changed and callback.evaluate_plan is None
    assert capsys.readouterr().out.count("tflms-sft: validation is not rewritten, and the budget does not") == 1


def test_evaluate_unknown_segment_is_refused():
    model = net()
    with pytest.raises(SegmentError, match="nowhere"):
        model.evaluate(X, Y, callbacks=[SFT(segments=[SegmentSpec("nowhere", "pool0")], verbose=0)], **PLAIN)
    assert is_plain(model)


def test_predict_under_lms_runs_original_with_notice(capsys):
    model, callback = net(), LMS()
    model.predict(X, callbacks=[callback], **PLAIN)
    assert callback.predict_plan is None and is_plain(model)
    assert "predict is not rewritten: without a backward pass" in capsys.readouterr().out


def test_evaluate_two_callbacks_are_refused():
    model = net()
    with pytest.raises(ValueError, match="The test step of model .* is rewritten twice"):
        model.evaluate(X, Y, callbacks=[tiles(), small()], **PLAIN)
    assert is_plain(model)


def test_evaluate_eager_model_is_refused():
    model = net(run_eagerly=True)
    with pytest.raises(RewriteError, match="runs eagerly"):
        model.predict(X, callbacks=[tiles()], **PLAIN)
