"""Measured and predicted peaks of a step with a loop, with the statistics of oneDNN's allocator; a program, no test.

Arguments: a spill directory, and for recurrent layers in training a budget, `smallest` or `middle`, or the name of a
step of `loops.py`.
"""

import os
import sys

os.environ["TF_ENABLE_ONEDNN_OPTS"] = "1"

import keras
import loops
import numpy as np
import tensorflow as tf
from children import say
from keras import layers

import tflms_sft

SIZE, BATCH, FEATURES = 512, 16, 128


def gradient_step():
    """Return a step that displaces the rows of images: elements of 1 MiB, which the statistics count."""
    keras.utils.set_random_seed(0)
    image = keras.Input((SIZE, SIZE, 1), batch_size=BATCH)
    model = keras.Model(image, loops.Warp(name="warp")(image, layers.Conv2D(1, 3, padding="same")(image)))

    @tf.function
    def step(images, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(images, training=True) - targets) ** 2)
        return loss, tape.gradient(loss, model.trainable_variables)

    return step


def largest_peak(step, batch):
    return max(tflms_sft.measure(step, *batch).peak_bytes for _ in range(5))


def trained(budget):
    """Train two recurrent layers within the smallest budget, or twice that, and print the peaks of the first step."""
    keras.utils.set_random_seed(0)
    random = np.random.default_rng(0)
    data = random.random((8, 6, 48, 48, 3), dtype="float32"), random.random((8, 48, 48, 8), dtype="float32")
    cells = [layers.ConvLSTM2D(16, 3, padding="same", return_sequences=True), layers.ConvLSTM2D(8, 3, padding="same")]
    model = keras.Sequential([keras.Input(data[0].shape[1:]), *cells])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", jit_compile=False)

    def fit(num_bytes):
        callback = tflms_sft.MemoryBudget(num_bytes, verbose=0)
        model.fit(*data, batch_size=4, steps_per_epoch=1, verbose=0, callbacks=[callback])
        return callback.plan

    try:
        fit(1)
    except tflms_sft.BudgetError as error:
        smallest = error.smallest_bytes
    num_bytes = smallest if budget == "smallest" else 2 * smallest
    plan = fit(num_bytes)
    say("budget", num_bytes)
    say("predicted", plan.predicted.peak_bytes)
    say("measured", plan.measured.peak_bytes)


def hand_written(name):
    """Print the peaks of a step with elements of 1 MiB, as it is and with its lists swapped."""
    random = np.random.default_rng(0)
    weight = tf.Variable(random.random((FEATURES, FEATURES)) / FEATURES, dtype=tf.float32)
    batch = [random.random((2**18 // FEATURES, FEATURES), dtype="float32")]
    step = tf.function(lambda x: getattr(loops, name)(x, weight))
    swapped = tflms_sft.rewrite(step, tflms_sft.LMSParams(spill_dir=sys.argv[1], tier="disk"), *batch)
    say("plain measured", largest_peak(step, batch))
    say("plain predicted", swapped.plan.original.peak_bytes)
    say("swapped measured", largest_peak(swapped, batch))
    say("swapped predicted", swapped.plan.predicted.peak_bytes)


def main():
    step, random = gradient_step(), np.random.default_rng(0)
    batch = [random.random((BATCH, SIZE, SIZE, 1), dtype="float32") for _ in range(2)]
    swapped = tflms_sft.rewrite(step, tflms_sft.LMSParams(spill_dir=sys.argv[1], tier="disk"), *batch)
    say("plain measured", largest_peak(step, batch))
    say("plain predicted", swapped.plan.original.peak_bytes)
    say("swapped measured", largest_peak(swapped, batch))
    say("swapped predicted", swapped.plan.predicted.peak_bytes)
    say("swapped bytes", swapped.plan.swapped_bytes)


if __name__ == "__main__":
    choice = sys.argv[2] if len(sys.argv) > 2 else ""
    if choice in ("smallest", "middle"):
        trained(choice)
    else:
        hand_written(choice) if choice else main()
