"""Tests of models that Keras trains though they have steps of their own, lazy layers, or are no `keras.Model`."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer as Trainer
from training import SETTINGS, X, Y, is_plain, measure_steps

import tflms_sft
from tflms_sft import SFT, BudgetError, MemoryBudget, RewriteError

pytestmark = pytest.mark.filterwarnings("ignore:`build..` was called on layer")

STEPS = 3


@pytest.fixture(autouse=True)
def double_precision():
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(7)


def convolutions(size=24, filters=6, name=None):
    image = x = keras.Input((size, size, 3))
    for _ in range(3):
        x = layers.Conv2D(filters, 3, padding="same", activation="tanh")(x)
    return keras.Model(image, layers.Conv2D(3, 3, padding="same")(x), name=name)


class Adversaries(keras.Model):
    """Two networks and two optimizers in one step, as in a GAN; `call` is never used."""

    def __init__(self):
        super().__init__()
        self.generator, self.critic = convolutions(name="generator"), convolutions(name="critic")

    def compile(self, **kwargs):
        super().compile(**kwargs)
        self.optimizers = {"generator": keras.optimizers.Adam(1e-3), "critic": keras.optimizers.SGD(1e-2, momentum=0.9)}

    def train_step(self, images):
        images = images[0] if isinstance(images, tuple) else images
        tf.debugging.assert_all_finite(images, "images")
        with tf.GradientTape(persistent=True) as tape:
            fake = self.generator(images, training=True)
            critic_loss = tf.reduce_mean(self.critic(fake) ** 2) + tf.reduce_mean((self.critic(images) - 1) ** 2)
            generator_loss = tf.reduce_mean((self.critic(fake) - 1) ** 2)
        for name, loss in (("generator", generator_loss), ("critic", critic_loss)):
            weights = getattr(self, name).trainable_variables
            self.optimizers[name].apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"generator": generator_loss, "critic": critic_loss}


class PartlyTrained(keras.Model):
    """Layers without weights before the first step; the optimizer is for the head alone."""

    def __init__(self):
        super().__init__()
        self.body = keras.Sequential([layers.Conv2D(6, 3, activation="tanh") for _ in range(3)])
        self.head = layers.Conv2D(3, 1)

    def train_step(self, data):
        images, labels = data
        with tf.GradientTape() as tape:
            logits = tf.reduce_mean(self.head(self.body(images)), [1, 2])
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))
        weights = self.head.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        for metric in self.metrics:
            metric.update_state(*((loss,) if metric.name == "loss" else (labels, logits)))
        return self.get_metrics_result()


class LazyLayers(keras.Model):
    """Layers that are created before the first call."""

    def build(self, shape):
        self.convs = [layers.Conv2D(6, 3, activation="tanh") for _ in range(3)]
        self.head = layers.Dense(3)

    def call(self, images):
        for conv in self.convs:
            images = conv(images)
        return self.head(tf.reduce_mean(images, [1, 2]))


class TrainerAndLayer(Trainer, layers.Layer):
    """A trainer that is no `keras.Model`, as in Keras's own tests."""

    def __init__(self):
        layers.Layer.__init__(self)
        Trainer.__init__(self)
        self.body, self.head = convolutions(), layers.Dense(3)

    def call(self, images):
        return self.head(tf.reduce_mean(self.body(images), [1, 2]))


class OwnVariable(layers.Layer):
    """A layer whose weight is a `tf.Variable`, which it creates in the first call."""

    def build(self, shape):
        self.scale = tf.Variable(tf.ones((shape[-1],), tf.float64))

    def call(self, images):
        return images * self.scale


def sequential(*more):
    convs = [layers.Conv2D(6, 3, activation="tanh") for _ in range(3)]
    return keras.Sequential([*convs, *more, layers.GlobalAveragePooling2D(), layers.Dense(3)])


MODELS = {
    "two optimizers": Adversaries,
    "optimizer for a part": PartlyTrained,
    "lazy layers": LazyLayers,
    "trainer and layer": TrainerAndLayer,
    "sequential without input": sequential,
    "sequential with a tf.Variable": lambda: sequential(OwnVariable()),
}


def compiled(make, **kwargs):
    keras.utils.set_random_seed(7)
    model = make()
    if not isinstance(model, Adversaries):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        kwargs = {"optimizer": keras.optimizers.Adam(1e-3), "loss": loss, "metrics": ["accuracy"], **kwargs}
    model.compile(jit_compile=False, **kwargs)
    return model


def variables(model):
    """Return the values of all variables: weights, slots of all optimizers, metrics."""
    optimizers = [model.optimizer, *getattr(model, "optimizers", {}).values()]
    slots = [v for optimizer in optimizers for v in optimizer.variables]
    return [np.array(v) for v in (*model.variables, *slots, *model.metrics_variables)]


def assert_same(model, plain):
    got, want = variables(model), variables(plain)
    assert len(got) == len(want) > 8
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


def fit(model, *callbacks, data=(X[:4], Y[:4])):
    keras.utils.set_random_seed(7)  # Lazy layers draw their weights here.
    return model.fit(*data, batch_size=4, epochs=STEPS, callbacks=list(callbacks), **SETTINGS).history


# Steps of their own, and models without weights --------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_fit_custom_trainer_equals_plain(name):
    roomy = MemoryBudget("1GiB", verbose=0)
    fit(compiled(MODELS[name]), roomy)
    assert not roomy.plan.changed
    model, plain = compiled(MODELS[name]), compiled(MODELS[name])
    callback = MemoryBudget(int(0.85 * roomy.plan.predicted.peak_bytes), headroom=0, verbose=0)
    got, want = fit(model, callback), fit(plain)
    assert callback.plan.changed and callback.plan.predicted.peak_bytes < roomy.plan.predicted.peak_bytes
    assert list(got) == list(want)
    for key in want:
        np.testing.assert_allclose(got[key], want[key], rtol=1e-10)
    assert_same(model, plain)
    assert is_plain(model)


def test_fit_optimizer_for_a_part_has_slots_of_that_part_alone():
    model = compiled(PartlyTrained)
    fit(model, SFT((2, 2), verbose=0))
    slots = [v for v in model.optimizer.variables if v.shape.rank]
    assert len(slots) == 2 * len(model.head.trainable_variables)


def test_fit_optimizer_for_a_part_of_a_built_model_equals_plain():
    def built():
        model = compiled(PartlyTrained)
        model.head(model.body(X[:1]))
        model.built = True
        return model

    model, plain = built(), built()
    fit(model, SFT((2, 2), verbose=0))
    fit(plain)
    assert_same(model, plain)


class LazyCell(layers.Layer):
    """A recurrent cell whose layer is built when it is called for the first time."""

    state_size = 4

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(4, activation="tanh")

    def call(self, x, states):
        state = self.dense(keras.ops.concatenate([x, states[0]], -1))
        return state, [state]


def test_fit_cell_that_is_built_in_the_first_step_equals_plain():
    losses, data = [], np.random.default_rng(0).normal(size=(8, 5, 3))
    for callbacks in ([], [MemoryBudget("1GiB", verbose=0)]):
        keras.utils.set_random_seed(1)
        sequence = keras.Input((5, 3))
        model = keras.Model(sequence, layers.Dense(1)(layers.RNN(LazyCell())(sequence)))
        model.compile("adam", "mse", jit_compile=False)
        losses.append(model.fit(data, np.ones((8, 1)), epochs=3, callbacks=callbacks, **SETTINGS).history["loss"])
        assert len(model.trainable_variables) == 4
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)


def test_budget_custom_trainer_trains_on_batches():
    model, plain = compiled(LazyLayers), compiled(LazyLayers)
    keras.utils.set_random_seed(7)
    with tflms_sft.budget(model, "1GiB", verbose=0) as patch:
        got = model.train_on_batch(X[:4], Y[:4])
    keras.utils.set_random_seed(7)
    assert np.allclose(got, plain.train_on_batch(X[:4], Y[:4])) and patch.plan is not None
    assert_same(model, plain)


@pytest.mark.parametrize("name", ["lazy layers", "sequential without input", "trainer and layer"])
def test_evaluate_and_predict_model_without_weights_equal_plain(name):
    callback = SFT((2, 2), verbose=0)
    got = compiled(MODELS[name]).predict(X, batch_size=4, verbose=0, callbacks=[callback])
    plain = compiled(MODELS[name])
    np.testing.assert_allclose(got, plain.predict(X, batch_size=4, verbose=0), rtol=1e-10)
    assert callback.predict_plan.changed
    got = compiled(MODELS[name]).evaluate(X, Y, batch_size=4, verbose=0, callbacks=[callback])
    plain = compiled(MODELS[name])
    np.testing.assert_allclose(got, plain.evaluate(X, Y, batch_size=4, verbose=0), rtol=1e-10)
    assert callback.evaluate_plan.changed


@pytest.mark.parametrize("name", MODELS)
def test_verify_custom_trainer_agrees(name):
    batch = X[:4] if name == "two optimizers" else (X[:4], Y[:4])
    assert tflms_sft.verify(compiled(MODELS[name]), batch, tflms_sft.SFTParams((2, 2)))


# Models without a graph ------------------------------------------------------------------------------------


def test_fit_eager_model_within_budget_trains_plain_with_notice(capsys):
    model, plain = compiled(sequential, run_eagerly=True), compiled(sequential, run_eagerly=True)
    got, want = fit(model, MemoryBudget("1GiB")), fit(plain)
    assert got == want and is_plain(model)
    assert_same(model, plain)
    notice = "training is not rewritten: Model 'sequential.*' runs eagerly, .* Compile it with `run_eagerly=False`."
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and re.search(notice, lines[0])


def test_fit_eager_model_above_budget_raises(monkeypatch):
    measure_steps(monkeypatch, lambda step_bytes: 3 * 2**20)
    fit(compiled(sequential, run_eagerly=True), MemoryBudget("3MiB", verbose=0))
    with pytest.raises(BudgetError, match="The first step used 3.00 MiB, .* Received: memory_budget=2.00 MiB. Model"):
        fit(compiled(sequential, run_eagerly=True), MemoryBudget("2MiB", verbose=0))


def test_fit_eager_model_with_explicit_tiles_is_refused():
    with pytest.raises(RewriteError, match="runs eagerly, so there is no graph to rewrite"):
        fit(compiled(sequential, run_eagerly=True), SFT((2, 2), verbose=0))


# Composite tensors -----------------------------------------------------------------------------------------


class Sparse(keras.Model):
    """Images beside a sparse input."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.side = convolutions(), layers.Dense(3), layers.Dense(3, use_bias=False)

    def call(self, inputs):
        images, words = inputs
        if isinstance(words, tf.SparseTensor):  # Keras makes ragged tensors dense.
            words = tf.sparse.to_dense(words)
        total = tf.reduce_sum(words, axis=1, keepdims=True)
        return self.head(tf.reduce_mean(self.body(images), [1, 2])) + self.side(total)


@pytest.mark.parametrize("batch", [2, 3])
def test_fit_ragged_batches_of_open_size_are_not_taken_to_have_one_value_per_row(batch):
    class Embedded(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = layers.Embedding(30, 4), layers.Dense(1)

        def call(self, words):
            return self.head(tf.reduce_mean(self.embedding(words.to_tensor()), 1))

    words = tf.ragged.constant([[1, 2, 3], [4], [5, 6], [7, 8, 9, 10], [11], [12, 13]], dtype=tf.int64)
    data = tf.data.Dataset.from_tensor_slices((words, np.ones((6, 1)))).batch(batch)
    losses = []
    for callbacks in ([], [tflms_sft.MemoryBudget("1GiB", verbose=0)]):
        keras.utils.set_random_seed(0)
        model = Embedded()
        model.compile("sgd", "mse")
        losses.append(model.fit(data, verbose=0, shuffle=False, callbacks=callbacks).history["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-10)


@pytest.mark.parametrize("kind", ["sparse", "ragged"])
@pytest.mark.filterwarnings("ignore:.*looks like it has unbuilt state")
def test_fit_composite_input_equals_plain(kind):
    words = np.where(np.arange(20).reshape(4, 5) % 5 <= np.arange(4)[:, None], 1.0 + np.arange(20).reshape(4, 5), 0.0)
    tensor = tf.sparse.from_dense(words) if kind == "sparse" else tf.RaggedTensor.from_tensor(words, padding=0.0)
    data = tf.data.Dataset.from_tensors(((X[:4], tensor), Y[:4])).repeat(2)
    model, plain = compiled(Sparse), compiled(Sparse)
    callback = SFT((2, 2), verbose=0)
    got = model.fit(data, epochs=2, callbacks=[callback], **SETTINGS).history
    want = plain.fit(data, epochs=2, **SETTINGS).history
    assert callback.plan.changed and is_plain(model)
    np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-10)
    assert_same(model, plain)


@pytest.mark.filterwarnings("ignore:.*looks like it has unbuilt state")
def test_predict_sparse_input_equals_plain():
    words = tf.sparse.from_dense(np.eye(4, 5))
    data = tf.data.Dataset.from_tensors(((X[:4], words),))
    callback = SFT((2, 2), verbose=0)
    got = compiled(Sparse).predict(data, verbose=0, callbacks=[callback])
    np.testing.assert_allclose(got, compiled(Sparse).predict(data, verbose=0), rtol=1e-10)
    assert callback.predict_plan is not None


# Accumulated gradients, and models that are compiled again ---------------------------------------------------


@pytest.mark.parametrize("make", [lambda: SFT((2, 2), verbose=0), lambda: MemoryBudget("400KiB", verbose=0)])
def test_fit_with_accumulated_gradients_equals_plain(make):
    def built():
        model = convolutional_classifier()
        optimizer = keras.optimizers.Adam(1e-2, gradient_accumulation_steps=2)
        model.compile(optimizer, model.loss, metrics=["accuracy"], jit_compile=False)
        return model

    model, plain, callback = built(), built(), make()
    got = model.fit(X, Y, batch_size=2, epochs=2, callbacks=[callback], **SETTINGS).history
    want = plain.fit(X, Y, batch_size=2, epochs=2, **SETTINGS).history
    assert callback.plan.changed
    np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-10)
    assert_same(model, plain)


def convolutional_classifier():
    keras.utils.set_random_seed(7)
    body = convolutions(size=24)
    model = keras.Model(body.inputs, layers.Dense(3)(layers.GlobalAveragePooling2D()(body.outputs[0])))
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    return model


def test_fit_frozen_then_unfrozen_plans_again_and_equals_plain():
    callback = SFT((2, 2), verbose=0)

    def trained(callbacks):
        model, plans = convolutional_classifier(), []
        for frozen in (True, False):
            for layer in model.layers[:3]:
                layer.trainable = not frozen
            model.compile(keras.optimizers.Adam(1e-2), model.loss, metrics=["accuracy"], jit_compile=False)
            model.fit(X, Y, batch_size=2, epochs=2, callbacks=callbacks, **SETTINGS)
            plans.append(callback.plan)
        return model, plans

    model, (frozen, unfrozen) = trained([callback])
    plain, _ = trained([])
    assert frozen is not unfrozen and unfrozen.changed
    assert unfrozen.original.seconds > frozen.original.seconds
    assert_same(model, plain)
