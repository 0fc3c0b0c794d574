"""Networks in stages, and steps that accumulate gradients by hand; a helper, no test."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from tflms_sft._differences import difference as error

CUTS = ["stage0", "stage1", "stage2"]
BATCH = 8


def net(devices, skip=False, norm=False, size=8):
    """Four stages; a connection may skip from the first to the last."""
    keras.utils.set_random_seed(1)
    image = x = keras.Input((size, size, 3))
    kept = None
    for number in range(4):
        with tf.device(devices[number]):
            x = layers.Conv2D(4, 3, padding="same", name=f"conv{number}")(x)
            if norm:
                x = layers.BatchNormalization(name=f"norm{number}")(x)
            if number == 3 and skip:
                x = layers.Multiply()([x, kept])
                x = layers.Concatenate()([x, kept])
            x = layers.Activation("tanh", name=f"stage{number}")(x)
            kept = x if number == 0 else kept
    with tf.device(devices[3]):
        x = layers.Dense(3, name="head")(layers.GlobalAveragePooling2D()(x))
    return keras.Model(image, x)


def optimizers():
    return {"adam": keras.optimizers.Adam(0.01), "momentum": keras.optimizers.SGD(0.1, momentum=0.9)}


def compiled(model, optimizer):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizers()[optimizer], loss, metrics=["accuracy"], jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    model._symbolic_build(data_batch=batches(1)[0])
    return model


def batches(count=5, size=8):
    random = np.random.default_rng(0)
    return [(random.normal(size=(BATCH, size, size, 3)), np.arange(BATCH) % 3) for _ in range(count)]


def variables(model):
    return [*model.variables, *model.optimizer.variables, *model.metrics_variables]


def train_step(model):
    """Keras's own, with the loss of the batch and the gradients beside the logs."""

    def function(x, y):
        return model.train_step((x, y))

    return tf.function(function, autograph=False)


def hand_step(model):
    """A custom loop: returns the loss, gradients and logits."""

    def function(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = model.loss(y, logits)
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)
        return {"loss": loss, "logits": logits, "gradients": gradients}

    return tf.function(function, autograph=False)


def accumulating_step(model, parts):
    """The same by hand: gradients of parts of the batch added up, then one update."""

    def function(x, y):
        totals, losses = None, []
        for part_x, part_y in zip(tf.split(x, parts), tf.split(y, parts), strict=True):
            with tf.GradientTape() as tape:
                logits = model(part_x, training=True)
                losses.append(model.loss(part_y, logits))
            found = tape.gradient(losses[-1], model.trainable_variables)
            totals = found if totals is None else [a + b for a, b in zip(totals, found, strict=True)]
        model.optimizer.apply([total / parts for total in totals], model.trainable_variables)
        return tf.add_n(losses) / parts

    return tf.function(function, autograph=False)


def run(model, step, data):
    """Results of every step, and every variable after the last, from where the model stands; it is put back."""
    start = [np.array(v) for v in variables(model)]
    found = [np.array(value) for batch in data for value in tf.nest.flatten(step(*map(tf.constant, batch)))]
    found += [np.array(v) for v in variables(model)]
    for variable, value in zip(variables(model), start, strict=True):
        variable.assign(value)
    return found


def largest_error(got, want):
    assert len(got) == len(want)
    return max(error(a, b) for a, b in zip(got, want, strict=True))
