"""Steps written by hand, without Keras; a helper, no test."""

import numpy as np
import tensorflow as tf
from equivalence import Step

KERNELS = ((3, 3, 3, 4), (3, 3, 4, 4), (3, 3, 4, 3))


def weights(*shapes):
    """Float64 variables, and random numbers to start them with."""
    random = np.random.default_rng(1)
    return [tf.Variable(random.normal(size=shape) * 0.5, dtype="float64") for shape in shapes]


def images(batches=2, shape=(2, 13, 14, 3)):
    """One batch per step."""
    random = np.random.default_rng(2)
    return [(random.normal(size=shape),) for _ in range(batches)]


def conv_op(x, w, stride=1):
    return tf.nn.conv2d(x, w, stride, "SAME")


def hand_written(body, variables, batches, known_batch=False):
    """`body` traced for images of any batch size, or of that of the first batch."""
    specs = [tf.TensorSpec(a.shape if known_batch else (None, *a.shape[1:]), a.dtype) for a in batches[0]]
    return Step(tf.function(body).get_concrete_function(*specs), variables, batches)


def descend(variables, gradients):
    for variable, gradient in zip(variables, gradients, strict=True):
        variable.assign_sub(0.1 * gradient)


def three_layers(x, w, activation=tf.nn.relu):
    for kernel in w:
        x = activation(conv_op(x, kernel))
    return tf.identity(x, "out")


def descending(forward, w, known_batch=False):
    """A step that descends `forward(x)`."""

    def body(x):
        with tf.GradientTape() as tape:
            loss = forward(x)
        gradients = tape.gradient(loss, w)
        descend(w, gradients)
        return loss, gradients

    return hand_written(body, w, images(), known_batch)


def one_loss(forward, w, batches=None):
    """A step that descends `forward(x)`, traced for an unknown batch; it returns the gradient of its images, too."""

    def body(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = forward(x)
        *gradients, of_input = tape.gradient(loss, [*w, x])
        descend(w, gradients)
        return loss, gradients, of_input

    return hand_written(body, w, batches or images())
