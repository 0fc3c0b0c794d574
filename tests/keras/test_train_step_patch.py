"""Tests of installing and restoring patches: consecutive trainings, errors, interrupts, refused models."""

import copy
import gc
import itertools
import pickle
import weakref

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
    is_plain,
    measure_steps,
    net,
    same,
    same_history,
    state,
    tiles,
)

import tflms_sft
from tflms_sft import SFT, BudgetError, MemoryBudget, RewriteError, SegmentError, SegmentSpec
from tflms_sft._batches import batch_limits
from tflms_sft._keras.step_planner import Excesses
from tflms_sft._util.keras_internals import PREDICTION, TRAINING

pytestmark = pytest.mark.usefixtures("cached_plans")

# One training after another -------------------------------------------------------------------------------


@each_slowly
def test_step_patch_second_fit_with_same_callback_equals_original(make):
    callback = make()
    model, plain = net(), net()
    for _ in range(2):
        got = model.fit(X, Y, batch_size=4, callbacks=[callback], **SETTINGS)
        assert callback.plan.changed and is_plain(model)
        assert same_history(got, plain.fit(X, Y, batch_size=4, **SETTINGS))
    assert same(model, plain)


@pytest.mark.slow
def test_step_patch_alternating_with_original_equals_original():
    model, plain = net(), net()
    for callbacks in ([], [tiles()], [], [budgeted()]):
        model.fit(X, Y, batch_size=4, callbacks=callbacks, **SETTINGS)
        plain.fit(X, Y, batch_size=4, **SETTINGS)
    assert same(model, plain)


def test_step_patch_callback_reused_on_other_model_is_planned_again():
    callback = tiles()
    fit = {"batch_size": 4, **SETTINGS}
    net().fit(X, Y, callbacks=[callback], **fit)
    first = callback.plan
    model, plain = net(size=16), net(size=16)
    model.fit(X[:, :16, :16], Y, callbacks=[callback], **fit)
    plain.fit(X[:, :16, :16], Y, **fit)
    assert callback.plan is not first and callback.plan.segments[0].tile_rows[0] == (4, 3)
    assert same(model, plain)


@pytest.mark.slow
def test_step_patch_after_compile_equals_original():
    callback = tiles()
    model, plain = net(), net()
    for optimizer in ("adam", "sgd"):
        for each, callbacks in ((model, [callback]), (plain, [])):
            each.compile(optimizer, each.loss, jit_compile=False)
            each.fit(X, Y, batch_size=4, callbacks=callbacks, **SETTINGS)
    assert all(np.allclose(a, b, atol=1e-10) for a, b in zip(state(model), state(plain), strict=True))


class Raise(keras.callbacks.Callback):
    """Raises an error in another callback, which Keras reports to no other callback."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def on_train_batch_end(self, batch, logs=None):
        raise self.error


def interrupted(model, *callbacks, error=KeyboardInterrupt):
    with pytest.raises(error):
        model.fit(X, Y, batch_size=4, callbacks=[*callbacks, Raise(error)], **SETTINGS)


@each_slowly
def test_step_patch_after_foreign_interrupt_next_fit_runs_original(make):
    model, plain = net(), net()
    interrupted(model, make())
    interrupted(plain)
    got = model.fit(X, Y, batch_size=4, **SETTINGS)
    assert is_plain(model), "Keras said nothing, but the next training took the rewritten step out"
    assert same_history(got, plain.fit(X, Y, batch_size=4, **SETTINGS))
    assert same(model, plain)


@pytest.mark.slow
def test_step_patch_after_interrupt_train_on_batch_runs_original():
    model, plain = net(), net()
    interrupted(model, tiles())
    interrupted(plain)
    assert np.allclose(model.train_on_batch(X[:4], Y[:4]), plain.train_on_batch(X[:4], Y[:4]))
    assert is_plain(model)
    assert same(model, plain)


def test_step_patch_after_interrupt_next_fit_is_rewritten():
    model, plain = net(), net()
    callback = tiles()
    interrupted(model, callback)
    interrupted(plain)
    model.fit(X, Y, batch_size=4, callbacks=[callback], **SETTINGS)
    plain.fit(X, Y, batch_size=4, **SETTINGS)
    assert callback.plan.changed and is_plain(model)
    assert same(model, plain)


@pytest.mark.slow
def test_step_patch_after_interrupt_budget_is_accepted():
    model = net()
    interrupted(model, tiles())
    with tflms_sft.budget(model, BUDGET, verbose=0) as installed:
        model.train_on_batch(X[:4], Y[:4])
    assert installed.plan.changed and is_plain(model)


@pytest.mark.slow
def test_step_patch_compile_after_interrupt_keeps_new_jit_setting():
    model = net(jit_compile=True)
    interrupted(model, tiles())
    model.compile("sgd", model.loss, jit_compile=False)
    model.fit(X, Y, batch_size=4, **SETTINGS)
    assert is_plain(model) and model.jit_compile is False


class FailingLater(keras.Model):
    """Its step fails from the third batch on."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.count = self.add_weight(name="count", initializer="zeros", trainable=False, dtype="int32")

    def train_step(self, data):
        self.count.assign_add(1)
        with tf.control_dependencies([tf.debugging.assert_less(self.count.value, 3, "third batch")]):
            return super().train_step(data)


def failing():
    model = net()
    result = FailingLater(model.inputs, model.outputs)
    result.compile("adam", model.loss, jit_compile=False)
    return result


@each_slowly
def test_step_patch_after_step_error_restores_model(make):
    model, plain = failing(), failing()
    original = model.train_step
    for each, callbacks in ((model, [make()]), (plain, [])):
        with pytest.raises(tf.errors.InvalidArgumentError, match="third batch"):
            each.fit(X, Y, batch_size=4, callbacks=callbacks, **SETTINGS)
    assert is_plain(model) and model.train_step == original
    assert same(model, plain)


def test_step_patch_refusal_in_first_step_restores_model():
    model, plain = net(), net()
    refusals = [
        (MemoryBudget("10KiB", verbose=0), BudgetError, "smallest plan found needs"),
        (SFT(segments=[SegmentSpec("photo", "pol")], verbose=0), SegmentError, "Nearest: 'pool"),
        (SFT((2, 2), batch_shape=(8, 9, 24, 3), verbose=0), ValueError, r"None, 24, 24, 3.*batch_shape=\(8, 9"),
        (
            SFT((2, 2), batch_shape=(8, 24, 24), verbose=0),
            ValueError,
            r"`batch_shape` .*: \(None, 24, 24, 3\)\. Received",
        ),
        (SFT((13, 1), [SegmentSpec("photo", "pool0")], verbose=0), ValueError, "must be at most 12"),
    ]
    for callback, error, text in refusals:
        with pytest.raises(error, match=text):
            model.fit(X, Y, batch_size=4, callbacks=[callback], **SETTINGS)
        assert is_plain(model) and callback.plan is None
    for each in (model, plain):
        each.fit(X, Y, batch_size=4, **SETTINGS)
    assert same(model, plain)


def test_batch_shape_with_added_channels_is_accepted():
    image = keras.Input((24, 24))
    x = keras.layers.Conv2D(4, 3, activation="relu")(keras.layers.Reshape((24, 24, 1))(image))
    model = keras.Model(image, keras.layers.Dense(3)(keras.layers.GlobalAveragePooling2D()(x)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    callback = MemoryBudget("1GiB", batch_shape=(4, 24, 24, 1), verbose=0)
    model.fit(X[..., 0], Y, batch_size=4, callbacks=[callback], **SETTINGS)
    assert callback.plan is not None


def test_step_patch_instance_train_step_is_restored():
    model = net()
    inner = model.train_step
    model.train_step = own = lambda data: inner(data)
    callback = tiles()
    model.fit(X, Y, batch_size=4, callbacks=[callback], **SETTINGS)
    assert callback.plan.changed
    assert model.__dict__["train_step"] is own


@both
def test_step_patch_retraces_after_freezing_in_callback(make):
    class Freeze(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                self.model.get_layer("conv0a").trainable = False
                self.model.make_train_function(force=True)

    class Watch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.plain = is_plain(self.model)

    model, plain, watch = net(), net(), Watch()
    model.fit(X, Y, batch_size=4, epochs=2, callbacks=[make(), Freeze(), watch], **SETTINGS)
    plain.fit(X, Y, batch_size=4, epochs=2, callbacks=[Freeze()], **SETTINGS)
    assert not watch.plain and is_plain(model)
    assert all(np.allclose(a, b, atol=1e-10) for a, b in zip(model.get_weights(), plain.get_weights(), strict=True))


# XLA, eager, and other settings of the model ----------------------------------------------------------


def test_step_patch_jit_compile_is_off_in_fit_and_restored(capsys):
    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.jit = self.model.jit_compile

    model, look = net(jit_compile=True), Look()
    model.fit(X, Y, batch_size=4, callbacks=[SFT((2, 2)), look], **SETTINGS)
    assert look.jit is False
    assert model.jit_compile is True
    assert "XLA (`jit_compile`) is off for this training" in capsys.readouterr().out


def test_check_model_eager_functions_are_refused():
    model = net()
    tf.config.run_functions_eagerly(True)
    try:
        with pytest.raises(RewriteError, match=r"Call `tf.config.run_functions_eagerly\(False\)`"):
            with tflms_sft.budget(model, BUDGET):
                raise AssertionError("not reached")
    finally:
        tf.config.run_functions_eagerly(False)
    assert is_plain(model)


@pytest.mark.parametrize("verbose", ("x", 2, None))
def test_checked_verbose_invalid_value_is_refused(verbose):
    with pytest.raises(ValueError, match="`verbose` must be 0 or 1. Received: verbose="):
        SFT(verbose=verbose)


def test_callback_after_fit_can_be_copied():
    callback = tiles()
    net().fit(X, Y, callbacks=[callback], **SETTINGS)
    callback.set_model(None)
    for copied in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert copied.plan.headline() == callback.plan.headline()


@pytest.mark.parametrize("kind", ["train", "test"])
def test_error_while_the_function_is_made_restores_model(kind):
    model, name = net(jit_compile=True), f"make_{kind}_function"
    make = getattr(model, name)

    def fail(force=False):
        if force:
            raise OSError("no function today")
        make()

    object.__setattr__(model, name, fail)
    calls = [lambda: (model.fit if kind == "train" else model.evaluate)(X, Y, callbacks=[tiles()], verbose=0)]
    if kind == "train":
        calls.append(lambda: tflms_sft.budget(model, BUDGET, verbose=0).__enter__())
    for call in calls:
        with pytest.raises(OSError, match="no function today"):
            call()
        assert model.jit_compile is True and getattr(model, name) is fail
        assert f"{kind}_step" not in model.__dict__ and not any("tflms" in each for each in model.__dict__)
    object.__delattr__(model, name)
    assert is_plain(model)


def test_excess_is_forgotten_with_its_model():
    """Cross-validation trains new models with one callback, and Python reuses the addresses of old ones."""

    class Model:
        """Stands for a model, of which nothing is read."""

    model, excesses = Model(), Excesses()
    excesses.set(model, TRAINING, 1500)
    assert excesses.of(model, TRAINING) == 1500
    assert excesses.of(model, PREDICTION) == excesses.of(Model(), TRAINING) == 0
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


def test_error_while_a_later_plan_is_traced_restores_model(monkeypatch):
    """Keras calls no callback after an error in another one."""
    peaks, model, forced = iter([600 * 2**10, 750 * 2**10]), net(), []
    measure_steps(monkeypatch, lambda step_bytes: next(peaks))
    make = model.make_train_function

    def fail(force=False):
        forced.append(force)
        if forced.count(True) > 1:
            raise OSError("no function today")
        make(force)

    object.__setattr__(model, "make_train_function", fail)
    with pytest.raises(OSError, match="no function today"):
        model.fit(X[:8], Y[:8], batch_size=4, epochs=2, callbacks=[budgeted(verbose=1)], **SETTINGS)
    object.__delattr__(model, "make_train_function")
    assert is_plain(model)


def test_training_inside_callback_before_a_new_plan_equals_original(monkeypatch):
    """The plan after an excess is traced from the rewritten step, which the training inside has removed."""

    class TrainsBetweenEpochs(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.train_on_batch(X[:4], Y[:4])

    peaks = itertools.chain([600 * 2**10, 750 * 2**10], itertools.repeat(600 * 2**10))
    measure_steps(monkeypatch, lambda step_bytes: next(peaks))
    model, plain, callback, plans = net(), net(), budgeted(verbose=1), []
    look = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: plans.append(callback.plan))
    for each, callbacks in ((model, [callback, look]), (plain, [])):
        callbacks.append(TrainsBetweenEpochs())
        each.fit(X[:8], Y[:8], batch_size=4, epochs=2, callbacks=callbacks, **SETTINGS)
    assert plans[1] is plans[0] is not plans[2] is plans[3] and plans[2].changed
    assert same(model, plain)


def test_batch_limit_partial_batch_in_custom_loop_runs():
    """Keras traces any batch size; the plan holds for that of the first batch."""
    model, plain = net(), net()
    with tflms_sft.budget(model, BUDGET, verbose=0) as installed:
        for start, stop in ((0, 4), (4, 8), (8, 10)):
            got = model.train_on_batch(X[start:stop], Y[start:stop])
            want = plain.train_on_batch(X[start:stop], Y[start:stop])
            assert np.allclose(got, want)
    assert installed.plan.changed and same(model, plain)


def growing():
    """Batches of 4, then of 6."""
    while True:
        yield X[:4], Y[:4]
        yield X[4:], Y[4:]


def test_batch_limit_larger_batch_of_original_step_runs():
    fit = {"steps_per_epoch": 2, **SETTINGS}
    model, plain = net(), net()
    callback = tflms_sft.MemoryBudget("100MiB", verbose=0)
    got, want = model.fit(growing(), callbacks=[callback], **fit), plain.fit(growing(), **fit)
    assert not callback.plan.changed and callback.plan.batch == 4
    assert same_history(got, want) and same(model, plain)


def test_batch_limit_larger_batch_of_original_step_is_predicted(monkeypatch):
    """Predicted twice as large first, because sizes that grow once may grow again; else it gets a plan of its own."""
    fit = {"steps_per_epoch": 4, **SETTINGS}
    model, of_six = net(), tflms_sft.MemoryBudget("100MiB", batch_shape=(6, 24, 24, 3), verbose=0)
    model.fit(growing(), callbacks=[of_six], **fit)
    assert of_six.plan.batch == 6
    peak, asked = of_six.plan.predicted.peak_bytes, []

    def predicted(traced, plans):
        asked.append(traced.batch)
        return predicted_peak(traced, plans)

    predicted_peak = batch_limits.predicted_peak
    monkeypatch.setattr(batch_limits, "predicted_peak", predicted)
    callback = tflms_sft.MemoryBudget(int(1.01 * peak / 0.9), verbose=0)
    model.fit(growing(), callbacks=[callback], **fit)
    assert asked == [12, 6] and not callback.plan.changed and callback.plan.batch == 4
    callback = tflms_sft.MemoryBudget(int(0.95 * peak / 0.9), verbose=0)
    model.fit(growing(), callbacks=[callback], **fit)
    assert callback.plan.changed and callback.plan.batch == 6 and is_plain(model)


def test_batch_limit_larger_batch_that_cannot_be_planned_runs_and_is_told(capsys):
    """With several steps per execution no batch gets a plan of its own; plain training would run it."""
    model, plain = net(steps_per_execution=2), net(steps_per_execution=2)
    small = tflms_sft.MemoryBudget("1GiB", verbose=0)
    net().fit(X[:4], Y[:4], batch_size=4, callbacks=[small], **SETTINGS)
    callback = tflms_sft.MemoryBudget(int(1.05 * small.plan.predicted.peak_bytes / 0.9))
    fit = {"steps_per_epoch": 2, **SETTINGS}
    got, want = model.fit(growing(), callbacks=[callback], **fit), plain.fit(growing(), **fit)
    assert not callback.plan.changed and same_history(got, want) and same(model, plain)
    out = capsys.readouterr().out
    assert out.count("a batch of 6 is predicted to need") == 1
    assert "The step was planned for 4, is not rewritten, and runs this batch, too." in out


def test_batch_limit_larger_batch_of_tiled_step_is_planned_or_refused():
    model, plain, callback = net(), net(), budgeted()
    fit = {"steps_per_epoch": 2, **SETTINGS}
    got, want = model.fit(growing(), callbacks=[callback], **fit), plain.fit(growing(), **fit)
    assert callback.plan.changed and callback.plan.batch == 6
    assert same_history(got, want) and same(model, plain)
    model = net(steps_per_execution=2)
    text = "^The plan holds for batches of up to 4 images. Give the largest batch as `batch_shape=`. Received: 6.$"
    with pytest.raises(tflms_sft.RewriteError, match=text):
        model.fit(growing(), callbacks=[budgeted()], **fit)
    assert is_plain(model)


def test_check_model_unready_model_is_refused():
    image = keras.Input((8, 8, 3))
    model = keras.Model(image, layers.Conv2D(2, 3)(image), name="mine")
    with pytest.raises(RewriteError, match="'mine' is not compiled with an optimizer. Call `model.compile` first"):
        with tflms_sft.budget(model, "1GiB"):
            raise AssertionError("not reached")
    with pytest.raises(TypeError, match="`model` must be a compiled `keras.Model`. Received: None"):
        with tflms_sft.budget(None, "1GiB"):
            raise AssertionError("not reached")
    with pytest.raises(TypeError, match="`memory_budget` must be a whole number of bytes"):
        with tflms_sft.budget(net(), 1.5):
            raise AssertionError("not reached")


# Two at once -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [(tiles, budgeted), (budgeted, budgeted), (tiles, tiles)])
def test_step_patch_two_callbacks_are_refused(first, second):
    model = net()
    with pytest.raises(ValueError, match="The train step of model '.*' is rewritten twice") as error:
        model.fit(X, Y, batch_size=4, callbacks=[first(), second()], **SETTINGS)
    for callback in (first(), second()):
        assert f"the callback `{type(callback).__name__}`" in str(error.value)
    assert "`SFT` accepts several segments in `segments=`" in str(error.value)
    assert is_plain(model)
    model.fit(X, Y, batch_size=4, callbacks=[first()], **SETTINGS)


def test_step_patch_callback_inside_budget_is_refused():
    model = net()
    with tflms_sft.budget(model, BUDGET, verbose=0) as installed:
        with pytest.raises(ValueError, match="twice: by `budget` and by the callback `SFT`"):
            model.fit(X, Y, batch_size=4, callbacks=[tiles()], **SETTINGS)
        with pytest.raises(ValueError, match="twice: by `budget` and by `budget`"):
            with tflms_sft.budget(model, BUDGET):
                raise AssertionError("not reached")
        model.train_on_batch(X[:4], Y[:4])
        assert installed.plan.changed
    assert is_plain(model)


@pytest.mark.slow
def test_budget_context_fit_inside_is_rewritten():
    model, plain = net(), net()
    with tflms_sft.budget(model, BUDGET, verbose=0) as installed:
        model.fit(X, Y, batch_size=4, **SETTINGS)
    plain.fit(X, Y, batch_size=4, **SETTINGS)
    assert installed.plan.changed and is_plain(model)
    assert same(model, plain)


@pytest.mark.slow
def test_step_patch_two_models_are_independent():
    first, second = net(), net()
    with tflms_sft.budget(first, BUDGET, verbose=0) as one, tflms_sft.budget(second, BUDGET, verbose=0) as two:
        first.train_on_batch(X[:4], Y[:4])
        second.train_on_batch(X[:4], Y[:4])
    assert one.plan.changed and two.plan.changed and one.plan is not two.plan
    assert is_plain(first) and is_plain(second)


class TrainsOnItsOwn(keras.callbacks.Callback):
    """Runs a step or training inside a training, and records whether the outer steps are rewritten."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.rewritten = []

    def on_train_batch_begin(self, batch, logs=None):
        self.rewritten.append(not is_plain(self.model))

    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            self.inner(self.model)


@pytest.mark.parametrize(
    "inner",
    (
        lambda model: model.train_on_batch(X[4:8], Y[4:8]),
        lambda model: model.fit(X[4:8], Y[4:8], **SETTINGS),
        lambda model: model.fit(X[4:8], Y[4:8], callbacks=[tiles()], **SETTINGS),
    ),
    ids=("train_on_batch", "fit", "rewritten fit"),
)
@both
def test_step_patch_training_inside_callback_is_resumed(make, inner):
    model, plain = net(), net()
    outer, other = TrainsOnItsOwn(inner), TrainsOnItsOwn(inner)
    callback = make()
    model.fit(X, Y, batch_size=4, callbacks=[callback, outer], **SETTINGS)
    plain.fit(X, Y, batch_size=4, callbacks=[other], **SETTINGS)
    assert callback.plan.changed and outer.rewritten == [True] * 3
    assert same(model, plain) and is_plain(model)
