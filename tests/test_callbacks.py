"""`SFT` and `MemoryBudget` under `fit`, `budget` around hand-written loops: as plain training, and taken out after."""

import copy
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tflms_sft
from tflms_sft import SFT, BudgetError, MemoryBudget, RewriteError, SegmentError, SegmentSpec

X = np.random.default_rng(0).normal(size=(10, 24, 24, 3))
Y = np.arange(10) % 3
SETTINGS = {"verbose": 0, "shuffle": False}
BUDGET = "700KiB"
"""For float64 batches of 4: less than the plain step needs, enough for tiles."""


def net(norm=False, blocks=1, size=24, floatx="float64", **compiled):
    """A compiled classifier, with the same initial weights every time."""
    keras.config.set_floatx(floatx)
    keras.utils.set_random_seed(1)
    image = x = keras.Input((size, size, 3), name="photo")
    for number in range(blocks):
        x = layers.Conv2D(6, 3, padding="same", activation="relu", name=f"conv{number}a")(x)
        if norm:
            x = layers.BatchNormalization(name=f"norm{number}")(x)
        x = layers.Conv2D(6, 3, padding="same", activation="relu", name=f"conv{number}b")(x)
        x = layers.MaxPool2D(2, name=f"pool{number}")(x)
    model = keras.Model(image, layers.Dense(3, name="head")(layers.GlobalAveragePooling2D()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    arguments = {"optimizer": sgd, "loss": loss, "metrics": ["accuracy"], "weighted_metrics": [], **compiled}
    model.compile(**{"jit_compile": False, **arguments})
    return model


def tiles(**options):
    return SFT((2, 3), **{"verbose": 0, **options})


def budgeted(**options):
    return MemoryBudget(BUDGET, **{"verbose": 0, **options})


both = pytest.mark.parametrize("make", [tiles, budgeted], ids=["SFT", "MemoryBudget"])


each_slowly = pytest.mark.parametrize(
    "make", [pytest.param(tiles, marks=pytest.mark.slow), budgeted], ids=["SFT", "MemoryBudget"]
)
"""The budget, and in the long list tiles as told."""


def state(model):
    """Every variable: weights, optimizer slots, seeds, states of metrics."""
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return [np.array(variable) for variable in variables]


def same(model, plain, tolerance=1e-10):
    got, want = state(model), state(plain)
    assert len(got) == len(want) and len(plain.optimizer.variables) > 2  # Slots too.
    return all(np.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(got, want, strict=True))


def same_history(got, want):
    assert list(got.history) == list(want.history) and "loss" in want.history
    return all(np.allclose(got.history[key], want.history[key], rtol=1e-10, atol=0) for key in want.history)


def is_plain(model):
    """Nothing of a rewritten step is in the model."""
    return not any("tflms" in name for name in model.__dict__) and not (
        {"train_step", "make_train_function"} & set(model.__dict__) or "Installation" in repr(model.train_function)
    )


def fitted(callback, fit, **compiled):
    """A model trained with the callback and one without, compared."""
    model, plain = net(**compiled), net(**compiled)
    got, want = fit(model, [callback]), fit(plain, [])
    assert callback.plan.changed and callback.plan.segments
    assert same_history(got, want)
    assert same(model, plain)
    assert is_plain(model)
    return callback.plan


# The same results as plain training ------------------------------------------------------------------------


@both
def test_arrays_with_a_partial_last_batch(make):
    plan = fitted(make(), lambda m, c: m.fit(X, Y, batch_size=4, epochs=2, callbacks=c, **SETTINGS))
    assert plan.batch == 4 and not plan.batch_is_fixed


@pytest.mark.parametrize("drop", [pytest.param(False, marks=pytest.mark.slow), True], ids=["unknown", "known"])
def test_datasets_with_known_and_with_unknown_batch(drop):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4, drop_remainder=drop)
    plan = fitted(budgeted(), lambda m, c: m.fit(data, epochs=2, callbacks=c, **SETTINGS), optimizer="adam")
    assert (plan.batch, plan.batch_is_fixed) == (4, drop)


@each_slowly
def test_several_steps_in_one_execution(make):
    x, y = np.concatenate([X, X, X])[:26], np.concatenate([Y, Y, Y])[:26]  # 7 batches: 3, 3 and 1, the last partial.
    fitted(make(), lambda m, c: m.fit(x, y, batch_size=4, epochs=2, callbacks=c, **SETTINGS), steps_per_execution=3)


@pytest.mark.slow
def test_generators_and_steps_per_epoch():
    def batches():
        while True:
            yield X[:4], Y[:4]
            yield X[4:8], Y[4:8]

    fitted(tiles(), lambda m, c: m.fit(batches(), steps_per_epoch=3, epochs=2, callbacks=c, **SETTINGS))


@pytest.mark.slow
def test_shuffled_batches_are_the_same_ones():
    def fit(model, callbacks):
        keras.utils.set_random_seed(7)
        return model.fit(X, Y, batch_size=4, epochs=2, verbose=0, callbacks=callbacks)

    fitted(tiles(), fit)


@pytest.mark.slow
def test_sample_weights():
    weights = np.linspace(0, 2, 10)
    fitted(tiles(), lambda m, c: m.fit(X, Y, batch_size=4, sample_weight=weights, callbacks=c, **SETTINGS))


@pytest.mark.slow
def test_class_weights():
    weights = {0: 0.5, 1: 1.0, 2: 3.0}
    fitted(tiles(), lambda m, c: m.fit(X, Y, batch_size=4, class_weight=weights, callbacks=c, **SETTINGS))


@pytest.mark.slow
def test_validation_runs_beside_it():
    fitted(tiles(), lambda m, c: m.fit(X, Y, batch_size=4, epochs=2, validation_data=(X, Y), callbacks=c, **SETTINGS))


def test_images_of_unknown_size_are_planned_from_the_first_batch():
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
def test_named_segments():
    specs = [SegmentSpec("photo", "pool0", num_tiles=(3, 3)), SegmentSpec("pool0", "pool1")]
    callback = SFT((2, 2), specs, verbose=0)
    plan = fitted(callback, lambda m, c: m.fit(X, Y, batch_size=4, callbacks=c, **SETTINGS), blocks=2)
    assert [segment.num_tiles for segment in plan.segments] == [(1, 3, 3), (1, 2, 2)]


# One training after another -------------------------------------------------------------------------------


@each_slowly
def test_a_second_fit_with_the_same_callback(make):
    callback = make()
    model, plain = net(), net()
    for _ in range(2):
        got = model.fit(X, Y, batch_size=4, callbacks=[callback], **SETTINGS)
        assert callback.plan.changed and is_plain(model)
        assert same_history(got, plain.fit(X, Y, batch_size=4, **SETTINGS))
    assert same(model, plain)


@pytest.mark.slow
def test_plain_and_rewritten_trainings_in_turn():
    model, plain = net(), net()
    for callbacks in ([], [tiles()], [], [budgeted()]):
        model.fit(X, Y, batch_size=4, callbacks=callbacks, **SETTINGS)
        plain.fit(X, Y, batch_size=4, **SETTINGS)
    assert same(model, plain)


def test_the_same_callback_on_another_model_and_another_size():
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
def test_compiling_anew_between_trainings():
    callback = tiles()
    model, plain = net(), net()
    for optimizer in ("adam", "sgd"):
        for each, callbacks in ((model, [callback]), (plain, [])):
            each.compile(optimizer, each.loss, jit_compile=False)
            each.fit(X, Y, batch_size=4, callbacks=callbacks, **SETTINGS)
    assert all(np.allclose(a, b, atol=1e-10) for a, b in zip(state(model), state(plain), strict=True))


class Raise(keras.callbacks.Callback):
    """Ends a training in another callback, where nobody else can see it."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def on_train_batch_end(self, batch, logs=None):
        raise self.error


def interrupted(model, *callbacks, error=KeyboardInterrupt):
    with pytest.raises(error):
        model.fit(X, Y, batch_size=4, callbacks=[*callbacks, Raise(error)], **SETTINGS)


@each_slowly
def test_a_plain_fit_after_an_interrupt_in_another_callback(make):
    model, plain = net(), net()
    interrupted(model, make())
    interrupted(plain)
    got = model.fit(X, Y, batch_size=4, **SETTINGS)
    assert is_plain(model), "Keras said nothing, but the next training took the rewritten step out"
    assert same_history(got, plain.fit(X, Y, batch_size=4, **SETTINGS))
    assert same(model, plain)


@pytest.mark.slow
def test_training_by_batches_after_an_interrupt_is_plain():
    model, plain = net(), net()
    interrupted(model, tiles())
    interrupted(plain)
    assert np.allclose(model.train_on_batch(X[:4], Y[:4]), plain.train_on_batch(X[:4], Y[:4]))
    assert is_plain(model)
    assert same(model, plain)


def test_a_rewritten_fit_after_an_interrupt():
    model, plain = net(), net()
    callback = tiles()
    interrupted(model, callback)
    interrupted(plain)
    model.fit(X, Y, batch_size=4, callbacks=[callback], **SETTINGS)
    plain.fit(X, Y, batch_size=4, **SETTINGS)
    assert callback.plan.changed and is_plain(model)
    assert same(model, plain)


@pytest.mark.slow
def test_a_budget_after_an_interrupt():
    model = net()
    interrupted(model, tiles())
    with tflms_sft.budget(model, BUDGET, verbose=0) as installed:
        model.train_on_batch(X[:4], Y[:4])
    assert installed.plan.changed and is_plain(model)


@pytest.mark.slow
def test_compiling_anew_after_an_interrupt_keeps_what_was_compiled():
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
def test_an_error_in_a_step_leaves_the_model_as_it_was(make):
    model, plain = failing(), failing()
    original = model.train_step
    for each, callbacks in ((model, [make()]), (plain, [])):
        with pytest.raises(tf.errors.InvalidArgumentError, match="third batch"):
            each.fit(X, Y, batch_size=4, callbacks=callbacks, **SETTINGS)
    assert is_plain(model) and model.train_step == original
    assert same(model, plain)
    for each in (model, plain):
        each.count.assign(-10)
        each.fit(X, Y, batch_size=4, **SETTINGS)
    assert same(model, plain)


@pytest.mark.parametrize(
    ("callback", "error", "text"),
    [
        (MemoryBudget("10KiB", verbose=0), BudgetError, "smallest plan found needs"),
        (SFT(segments=[SegmentSpec("photo", "pol")], verbose=0), SegmentError, "Nearest: 'pool"),
        (SFT((13, 1), [SegmentSpec("photo", "pool0")], verbose=0), ValueError, "Use at most 12"),
    ],
    ids=["budget", "name", "tiles"],
)
def test_what_cannot_be_done_is_told_in_the_first_step_and_changes_nothing(callback, error, text):
    model, plain = net(), net()
    with pytest.raises(error, match=text):
        model.fit(X, Y, batch_size=4, callbacks=[callback], **SETTINGS)
    assert is_plain(model) and callback.plan is None
    for each in (model, plain):
        each.fit(X, Y, batch_size=4, **SETTINGS)
    assert same(model, plain)


def test_a_train_step_set_on_the_model_itself_is_put_back():
    model = net()
    inner = model.train_step
    model.train_step = own = lambda data: inner(data)
    callback = tiles()
    model.fit(X, Y, batch_size=4, callbacks=[callback], **SETTINGS)
    assert callback.plan.changed
    assert model.__dict__["train_step"] is own


def test_a_callback_that_freezes_a_layer_has_the_rewritten_step_traced_anew():
    class Freeze(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                self.model.get_layer("conv0a").trainable = False
                self.model.make_train_function(force=True)

    class Watch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.plain = is_plain(self.model)

    model, plain, watch = net(), net(), Watch()
    model.fit(X, Y, batch_size=4, epochs=2, callbacks=[tiles(), Freeze(), watch], **SETTINGS)
    plain.fit(X, Y, batch_size=4, epochs=2, callbacks=[Freeze()], **SETTINGS)
    assert not watch.plain and is_plain(model)
    assert all(np.allclose(a, b, atol=1e-10) for a, b in zip(model.get_weights(), plain.get_weights(), strict=True))


# What else goes on during a training --------------------------------------------------------------------


def test_a_model_is_saved_during_training(tmp_path):
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
def test_a_model_is_copied_during_training(copied):
    class Copy(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.copy = copied(self.model)

    model, copying = net(), Copy()
    model.fit(X, Y, batch_size=4, callbacks=[tiles(), copying], **SETTINGS)
    assert is_plain(copying.copy)
    copying.copy.compile("sgd", model.loss)
    copying.copy.fit(X, Y, batch_size=4, **SETTINGS)


@pytest.mark.slow
def test_evaluate_and_predict_during_training_are_plain():
    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.loss = self.model.evaluate(X, Y, verbose=0, return_dict=True)["loss"]
            self.outputs = self.model.predict(X, verbose=0)

    looks = Look(), Look()
    for look, callbacks in zip(looks, ([tiles()], []), strict=True):
        net().fit(X, Y, batch_size=4, callbacks=[*callbacks, look], **SETTINGS)
    assert np.isclose(looks[0].loss, looks[1].loss, rtol=1e-10)
    assert np.allclose(looks[0].outputs, looks[1].outputs, rtol=1e-10)


# XLA, eager, and other settings of the model ----------------------------------------------------------


def test_xla_is_off_during_the_training_says_so_and_is_on_again_after(capsys):
    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.jit = self.model.jit_compile

    model, look = net(jit_compile=True), Look()
    model.fit(X, Y, batch_size=4, callbacks=[SFT((2, 2)), look], **SETTINGS)
    assert look.jit is False
    assert model.jit_compile is True
    assert "XLA (`jit_compile`) is off for this training" in capsys.readouterr().out


@pytest.mark.slow
def test_xla_is_not_mentioned_where_it_was_off(capsys):
    net().fit(X, Y, batch_size=4, callbacks=[SFT((2, 2))], **SETTINGS)
    assert "XLA" not in capsys.readouterr().out


@both
def test_eager_models_are_refused_with_the_remedy(make):
    model = net(run_eagerly=True)
    with pytest.raises(RewriteError, match="runs eagerly, so there is no graph to rewrite.*`run_eagerly=False`"):
        model.fit(X, Y, batch_size=4, callbacks=[make()], **SETTINGS)
    assert is_plain(model)


def test_functions_that_run_eagerly_are_refused_with_the_remedy():
    model = net()
    tf.config.run_functions_eagerly(True)
    try:
        with pytest.raises(RewriteError, match=r"Call `tf.config.run_functions_eagerly\(False\)`"):
            with tflms_sft.budget(model, BUDGET):
                raise AssertionError("not reached")
    finally:
        tf.config.run_functions_eagerly(False)
    assert is_plain(model)


class Undecided(keras.Model):
    """Its layers get their weights when it is first called, not when it is built."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = layers.Conv2D(4, 3, activation="relu"), layers.Dense(3)

    def call(self, x):
        return self.head(tf.reduce_mean(self.conv(x), [1, 2]))


@pytest.mark.filterwarnings("ignore:`build..` was called on layer")
def test_a_model_that_is_built_without_weights_is_left_as_it_was():
    model = Undecided()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.build((None, 24, 24, 3))
    with pytest.raises(RewriteError, match="has no weights yet. Call it on a batch first"):
        model.fit(X, Y, callbacks=[tiles()], **SETTINGS)
    model(X[:1])
    model.fit(X, Y, callbacks=[tiles(segments=[SegmentSpec("data", "conv2d")])], **SETTINGS)


def test_a_model_of_which_nothing_trains_is_refused():
    model = net()
    model.trainable = False
    with pytest.raises(RewriteError, match="has no trainable weights, so a step computes no gradients"):
        with tflms_sft.budget(model, "1GiB"):
            raise AssertionError("not reached")


@pytest.mark.parametrize("verbose", ("x", 2, None))
def test_verbose_is_checked(verbose):
    with pytest.raises(ValueError, match="`verbose` must be 0 or 1. Received: verbose="):
        SFT(verbose=verbose)


def test_a_used_callback_can_be_copied():
    callback = tiles()
    net().fit(X, Y, callbacks=[callback], **SETTINGS)
    callback.set_model(None)
    assert copy.deepcopy(callback).plan.headline() == callback.plan.headline()


def test_a_partial_batch_after_whole_ones_in_a_hand_written_loop():
    """Keras traces it for any batch; the plan holds for the first one's size."""
    model, plain = net(), net()
    with tflms_sft.budget(model, BUDGET, verbose=0) as installed:
        for start, stop in ((0, 4), (4, 8), (8, 10)):
            got = model.train_on_batch(X[start:stop], Y[start:stop])
            want = plain.train_on_batch(X[start:stop], Y[start:stop])
            assert np.allclose(got, want)
    assert installed.plan.changed and same(model, plain)


def test_images_of_another_size_than_the_first_are_an_error_with_the_remedy():
    def images():
        yield X[:4], Y[:4]
        yield X[:4, :20], Y[:4]

    signature = (tf.TensorSpec((None, None, 24, 3), tf.float64), tf.TensorSpec((None,), tf.int64))
    data = tf.data.Dataset.from_generator(images, output_signature=signature)
    model = net(size=None)
    text = "planned for images of 24x24.*Train on images of one size"
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
        model.fit(data, callbacks=[tiles()], **SETTINGS)
    assert is_plain(model)


def test_replicas_are_refused_with_the_remedy():
    class Replicas:
        num_replicas_in_sync = 2

    model = net()
    model._distribute_strategy = Replicas()
    with pytest.raises(RewriteError, match="trains on 2 replicas .*not supported yet"):
        with tflms_sft.budget(model, "1GiB"):
            raise AssertionError("not reached")


def test_batches_that_are_not_dense_are_refused_with_the_remedy():
    model = net()
    ragged = tf.RaggedTensor.from_tensor(tf.constant(Y[:, None]))
    data = tf.data.Dataset.from_tensor_slices((X, ragged)).batch(4)
    with pytest.raises(RewriteError, match="holds a RaggedTensor; only dense tensors can be rewritten"):
        model.fit(data, callbacks=[tiles()], **SETTINGS)
    assert is_plain(model)


def test_models_that_are_not_ready_are_refused_with_the_remedy():
    image = keras.Input((8, 8, 3))
    model = keras.Model(image, layers.Conv2D(2, 3)(image), name="mine")
    with pytest.raises(RewriteError, match="'mine' is not compiled with an optimizer. Call `model.compile` first"):
        with tflms_sft.budget(model, "1GiB"):
            raise AssertionError("not reached")
    unbuilt = keras.Sequential([layers.Conv2D(2, 3)], name="mine")
    unbuilt.compile("sgd", "mse")
    with pytest.raises(RewriteError, match="'mine' has no weights yet. Call it on a batch first"):
        with tflms_sft.budget(unbuilt, "1GiB"):
            raise AssertionError("not reached")
    with pytest.raises(TypeError, match="`model` must be a compiled `keras.Model`. Received: None"):
        with tflms_sft.budget(None, "1GiB"):
            raise AssertionError("not reached")
    with pytest.raises(TypeError, match="`memory_budget` must be an int"):
        with tflms_sft.budget(net(), 1.5):
            raise AssertionError("not reached")


# Two at once -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [(tiles, budgeted), (budgeted, budgeted), (tiles, tiles)])
def test_two_callbacks_that_rewrite_are_refused(first, second):
    model = net()
    with pytest.raises(ValueError, match="Two things rewrite the train step of model '.*' at once") as error:
        model.fit(X, Y, batch_size=4, callbacks=[first(), second()], **SETTINGS)
    for callback in (first(), second()):
        assert f"the callback `{type(callback).__name__}`" in str(error.value)
    assert "`SFT` takes several in `segments=`" in str(error.value)
    assert is_plain(model)
    model.fit(X, Y, batch_size=4, callbacks=[first()], **SETTINGS)


def test_a_callback_inside_of_a_budget_is_refused_and_the_budget_stays():
    model = net()
    with tflms_sft.budget(model, BUDGET, verbose=0) as installed:
        with pytest.raises(ValueError, match="at once: `budget` and the callback `SFT`"):
            model.fit(X, Y, batch_size=4, callbacks=[tiles()], **SETTINGS)
        with pytest.raises(ValueError, match="at once: `budget` and `budget`"):
            with tflms_sft.budget(model, BUDGET):
                raise AssertionError("not reached")
        model.train_on_batch(X[:4], Y[:4])
        assert installed.plan.changed
    assert is_plain(model)


@pytest.mark.slow
def test_a_plain_fit_inside_of_a_budget_is_rewritten():
    model, plain = net(), net()
    with tflms_sft.budget(model, BUDGET, verbose=0) as installed:
        model.fit(X, Y, batch_size=4, **SETTINGS)
    plain.fit(X, Y, batch_size=4, **SETTINGS)
    assert installed.plan.changed and is_plain(model)
    assert same(model, plain)


@pytest.mark.slow
def test_two_models_at_a_time_do_not_disturb_each_other():
    first, second = net(), net()
    with tflms_sft.budget(first, BUDGET, verbose=0) as one, tflms_sft.budget(second, BUDGET, verbose=0) as two:
        first.train_on_batch(X[:4], Y[:4])
        second.train_on_batch(X[:4], Y[:4])
    assert one.plan.changed and two.plan.changed and one.plan is not two.plan
    assert is_plain(first) and is_plain(second)


class TrainsOnItsOwn(keras.callbacks.Callback):
    """One more step or training inside of a training; notes whether the steps of the outer one are rewritten."""

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
def test_a_callback_may_train_on_its_own(make, inner):
    model, plain = net(), net()
    outer, other = TrainsOnItsOwn(inner), TrainsOnItsOwn(inner)
    callback = make()
    model.fit(X, Y, batch_size=4, callbacks=[callback, outer], **SETTINGS)
    plain.fit(X, Y, batch_size=4, callbacks=[other], **SETTINGS)
    assert callback.plan.changed and outer.rewritten == [True] * 3
    assert same(model, plain) and is_plain(model)


# Normalisation that trains ----------------------------------------------------------------------------------


def test_trainable_normalisation_is_told_by_layer_name():
    callback = MemoryBudget("100KiB", verbose=0)
    with pytest.raises(BudgetError, match=r"Left as they are: layer 'norm0' \(BatchNormalization\)"):
        net(norm=True).fit(X, Y, batch_size=4, callbacks=[callback], **SETTINGS)
    callback = tiles()
    net(norm=True).fit(X, Y, batch_size=4, callbacks=[callback], **SETTINGS)
    reasons = dict(callback.plan.left_alone)
    assert "freeze it with `trainable=False`" in reasons["layer 'norm0' (BatchNormalization)"]


@pytest.mark.slow
def test_frozen_normalisation_is_tiled():
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


def test_train_on_batch_within_a_budget():
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


def test_a_hand_written_function_over_train_step_within_a_budget():
    model, plain = net(), net()
    with tflms_sft.budget(model, BUDGET, verbose=0) as installed:
        got = loop(model)
    assert installed.plan.changed and is_plain(model)
    assert np.allclose(got, loop(plain), rtol=1e-10)
    assert same(model, plain)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_inside_of_a_budget_takes_it_out(error):
    model = net()
    with pytest.raises(error):
        with tflms_sft.budget(model, BUDGET, verbose=0):
            model.train_on_batch(X[:4], Y[:4])
            raise error
    assert is_plain(model)
    model.train_on_batch(X[:4], Y[:4])


def test_a_budget_that_cannot_be_met_is_told_by_the_first_batch():
    model, plain = net(), net()
    with pytest.raises(BudgetError, match="smallest plan found needs"):
        with tflms_sft.budget(model, "10KiB"):
            model.train_on_batch(X[:4], Y[:4])
    assert is_plain(model)
    model.train_on_batch(X[:4], Y[:4])
    plain.train_on_batch(X[:4], Y[:4])
    assert same(model, plain)


# What is printed ----------------------------------------------------------------------------------------------


def test_one_line_at_the_start_and_one_after_the_first_step(capsys, monkeypatch):
    monkeypatch.setattr("tflms_sft._install.reset_peak", lambda: None)
    callback = SFT((2, 3))
    net().fit(X, Y, batch_size=4, epochs=2, callbacks=[callback], **SETTINGS)
    start, peak = capsys.readouterr().out.splitlines()
    assert start == f"tflms-sft: {callback.plan.headline()}"
    assert start.startswith("tflms-sft: 1 segment(s) in 2x3 tiles, predicted peak ")
    assert peak.startswith("tflms-sft: peak of the first step not measured")
    assert callback.plan.measured is None


@pytest.mark.parametrize(("peak", "over"), [(500 * 2**10, False), (2**20, True)])
def test_the_measured_peak_is_printed_next_to_the_predicted_one(capsys, monkeypatch, peak, over):
    measured = tflms_sft.Measurement(peak, "a test")
    monkeypatch.setattr("tflms_sft._install.reset_peak", lambda: 0)
    monkeypatch.setattr("tflms_sft._install.read_peak", lambda in_use, own, tiers: measured)
    callback = MemoryBudget(BUDGET)
    net().fit(X, Y, batch_size=4, callbacks=[callback], **SETTINGS)
    start, line = capsys.readouterr().out.splitlines()
    assert start.endswith(", budget 700 KiB")
    assert line.startswith(
        f"tflms-sft: measured peak {'1.00 MiB' if over else '500 KiB'} in the first step, predicted "
    )
    assert ("OVER the budget of 700 KiB: lower `memory_budget` or raise `headroom`" in line) == over
    assert callback.plan.measured is measured


def test_a_budget_that_fits_says_so(capsys):
    callback = MemoryBudget("1GiB")
    net().fit(X, Y, batch_size=4, callbacks=[callback], **SETTINGS)
    assert not callback.plan.changed
    assert "tflms-sft: nothing rewritten, predicted peak " in capsys.readouterr().out


def test_budgets_for_loops_print_the_same_lines(capsys):
    model = net()
    with tflms_sft.budget(model, BUDGET) as installed:
        model.train_on_batch(X[:4], Y[:4])
    start, _ = capsys.readouterr().out.splitlines()
    assert start == f"tflms-sft: {installed.plan.headline()}"


@pytest.mark.slow
def test_nothing_is_printed_if_not_wanted(capsys):
    net().fit(X, Y, batch_size=4, callbacks=[tiles()], **SETTINGS)
    with tflms_sft.budget(net(), BUDGET, verbose=0):
        pass
    assert capsys.readouterr().out == ""


def test_there_is_no_plan_before_the_first_training():
    assert tiles().plan is None and budgeted().plan is None


# Several images ---------------------------------------------------------------------------------------------


def test_two_images_of_different_sizes_that_the_trace_does_not_know():
    """Keras traces for unknown sizes; each input keeps those of its own first batch."""
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
    images = random.normal(size=(4, 24, 20, 3)), random.normal(size=(4, 10, 12, 3))
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
