"""Steps whose loops are inside of functions that TensorFlow calls: tapes of tapes, persistent tapes, `tf.function`."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tflms_sft

STEPS, FEATURES = 5, 3


class Persistent(keras.Model):
    """Gradients of two losses by one tape."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            error = tf.reduce_mean((self(x, training=True) - y) ** 2)
            size = tf.reduce_mean(tf.abs(self(x, training=True)))
        first, second = (tape.gradient(loss, self.trainable_variables) for loss in (error, size))
        self.optimizer.apply([a + 0.1 * b for a, b in zip(first, second, strict=True)], self.trainable_variables)
        return {"loss": error}


class Penalty(keras.Model):
    """A gradient of a gradient through the loop."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                result = self(x, training=True)
            penalty = tf.reduce_mean(inner.gradient(result, x) ** 2)
            loss = tf.reduce_mean((result - y) ** 2) + penalty
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


class Function(layers.Layer):
    """A loop inside of a `tf.function`."""

    def build(self, shape):
        self.weight = self.add_weight(shape=(shape[-1], shape[-1]))

    def call(self, x):
        @tf.function
        def loop(x):
            state = (0, tf.zeros_like(x[:, 0]))
            return tf.while_loop(
                lambda i, _: i < STEPS, lambda i, h: (i + 1, tf.tanh(h @ self.weight + x[:, i])), state
            )[1]

        return loop(x)


CASES = {
    "persistent tape": (Persistent, lambda: layers.SimpleRNN(4)),
    "gradient of a gradient": (Penalty, lambda: layers.GRU(4)),
    "function": (keras.Model, Function),
}


def trained(case, callbacks):
    """Return losses and variables after training from the same start."""
    model_type, layer = CASES[case]
    keras.utils.set_random_seed(0)
    sequence = keras.Input((STEPS, FEATURES))
    model = model_type(sequence, layers.Dense(1)(layer()(sequence)))
    model.compile("adam", "mse", jit_compile=False)
    random = np.random.default_rng(0)
    data = random.random((8, STEPS, FEATURES)), random.random((8, 1))
    history = model.fit(*data, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    model.evaluate(*data, verbose=0, callbacks=callbacks) if model_type is keras.Model else None
    return [*history.history["loss"], *(np.array(v) for v in (*model.variables, *model.optimizer.variables))]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "callback", (lambda: tflms_sft.MemoryBudget("1GiB"), lambda: tflms_sft.LMS(min_bytes=1)), ids=("budget", "swaps")
)
def test_loops_in_called_functions_train_as_before(case, callback):
    keras.config.set_floatx("float64")
    rewritten = [callback()]
    for got, want in zip(trained(case, rewritten), trained(case, []), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)
    assert rewritten[0].plan is not None
