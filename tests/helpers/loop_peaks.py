"""Measured and predicted peaks of a step with a loop, with the statistics of oneDNN's allocator; a program, no test.

Arguments: a spill directory.
"""

import os
import sys

os.environ["TF_ENABLE_ONEDNN_OPTS"] = "1"

import keras
import numpy as np
import tensorflow as tf
from children import say
from keras import layers
from loops import Warp

import tflms_sft

SIZE, BATCH = 512, 16


def gradient_step():
    """Return a step that displaces the rows of images: elements of 1 MiB, which the statistics count."""
    keras.utils.set_random_seed(0)
    image = keras.Input((SIZE, SIZE, 1), batch_size=BATCH)
    model = keras.Model(image, Warp(name="warp")(image, layers.Conv2D(1, 3, padding="same")(image)))

    @tf.function
    def step(images, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(images, training=True) - targets) ** 2)
        return loss, tape.gradient(loss, model.trainable_variables)

    return step


def largest_peak(step, batch):
    return max(tflms_sft.measure(step, *batch).peak_bytes for _ in range(5))


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
    main()
