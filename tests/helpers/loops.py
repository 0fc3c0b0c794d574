"""Steps with loops: recurrent layers, `tf.map_fn` and a hand-written loop; a helper, no test."""

import keras
import numpy as np
import tensorflow as tf
from equivalence import Step, model_step
from keras import layers

STEPS, BATCH = 5, 3

LENGTH = 9
"""Iterations of loops written by hand."""


def warp(pair):
    """Sample an image at displaced positions, bilinearly along its rows."""
    image, displacement = pair
    rows, columns, _ = image.shape
    place = tf.range(columns, dtype=image.dtype)[None] + displacement[..., 0]
    place = tf.clip_by_value(place, 0.0, columns - 1.001)
    left = tf.floor(place)
    weight = (place - left)[..., None]
    row = tf.repeat(tf.range(rows)[:, None], columns, 1)
    first = tf.cast(left, tf.int32)
    near = tf.gather_nd(image, tf.stack([row, first], -1))
    far = tf.gather_nd(image, tf.stack([row, first + 1], -1))
    return near * (1 - weight) + far * weight


class Warp(layers.Layer):
    """Warps each image of a batch by its displacements."""

    def call(self, image, displacement):
        spec = tf.TensorSpec(image.shape[1:], image.dtype)
        return tf.map_fn(warp, (image, displacement), fn_output_signature=spec)


def registration(image):
    field = layers.Conv2D(1, 3, padding="same")(layers.Conv2D(4, 3, padding="same", activation="relu")(image))
    return Warp(name="warp")(image, field)


def sequence(layer):
    return lambda x: layer()(x)


def stacked(x):
    x = layers.GRU(4, return_sequences=True)(x)
    return layers.LSTM(3, return_sequences=True)(layers.Dense(5, activation="tanh")(x))


NETS = {
    "gru": (sequence(lambda: layers.GRU(4, return_sequences=True, name="gru")), (STEPS, 6)),
    "lstm": (sequence(lambda: layers.LSTM(4, name="lstm", recurrent_dropout=0.25, seed=1)), (STEPS, 6)),
    "conv_lstm": (sequence(lambda: layers.ConvLSTM2D(2, 3, return_sequences=True)), (STEPS, 6, 7, 2)),
    "bidirectional": (sequence(lambda: layers.Bidirectional(layers.GRU(4, return_sequences=True))), (STEPS, 6)),
    "stacked": (stacked, (STEPS, 6)),
    "map_fn": (registration, (8, 16, 1)),
}
"""Layers of a network and the shape of a sample."""


def loop_model(name, seed=0):
    """A network with a loop, without a compiled optimizer."""
    keras.utils.set_random_seed(seed)
    net, shape = NETS[name]
    image = keras.Input(shape, batch_size=BATCH)
    return keras.Model(image, layers.Dense(2)(layers.Flatten()(net(image))))


def loop_batches(name, steps=3):
    random, shape = np.random.default_rng(0), NETS[name][1]
    return [(random.random((BATCH, *shape)), random.random((BATCH, 2))) for _ in range(steps)]


def loop_step(name, steps=3):
    """A step of `NETS[name]` in float64 that returns loss and gradients, and updates with Adam."""
    keras.config.set_floatx("float64")
    return model_step(
        loop_model(name), loop_batches(name, steps), True, {"optimizer": keras.optimizers.Adam(0.01), "loss": "mse"}
    )


def while_step(x, weight):
    """A hand-written loop with a state."""
    with tf.GradientTape() as tape:
        _, y = tf.while_loop(lambda i, _: i < 6, lambda i, y: (i + 1, tf.tanh(y @ weight) + y), (0, x))
        loss = tf.reduce_sum(y**2)
    return loss, tape.gradient(loss, weight)


def nested_step(x, weight):
    """A loop inside of `tf.map_fn`: the outer loop saves the lists of the inner loop."""
    with tf.GradientTape() as tape:

        def run(sample):
            return tf.while_loop(
                lambda i, _: i < 3, lambda i, y: (i + 1, tf.tanh(tf.linalg.matvec(weight, y))), (0, sample)
            )[1]

        loss = tf.reduce_sum(tf.map_fn(run, x) ** 2)
    return loss, tape.gradient(loss, weight)


def twice_step(x, weight):
    """A loop with two backward loops, which read the same lists."""
    with tf.GradientTape(persistent=True) as tape:
        _, y = tf.while_loop(lambda i, _: i < 4, lambda i, y: (i + 1, tf.tanh(y @ weight)), (0, x))
        first, second = tf.reduce_sum(y**2), tf.reduce_sum(tf.sin(y))
    return tape.gradient(first, weight), tape.gradient(second, weight)


def growing_step(x, weight):
    """A loop that appends to a list of unknown size; the stacked list is transposed and summed."""
    with tf.GradientTape() as tape:
        states = tf.TensorArray(x.dtype, 0, dynamic_size=True, clear_after_read=False, element_shape=x.shape)
        _, states = tf.while_loop(
            lambda i, _: i < LENGTH,
            lambda i, states: (i + 1, states.write(i + 1, tf.tanh(states.read(i) @ weight))),
            (0, states.write(0, tf.sin(x))),
        )
        loss = tf.reduce_sum(tf.transpose(states.stack(), (1, 0, 2)) ** 2)
    return loss, tape.gradient(loss, weight)


def branch_step(x, weight, condition=lambda i, _: tf.equal(i % 3, 0)):
    """A loop with a conditional, of which one branch saves two tensors and the other one saves none."""
    with tf.GradientTape() as tape:

        def body(i, y):
            y = tf.tanh(y @ weight)
            return i + 1, tf.cond(condition(i, y), lambda: tf.tanh(tf.sigmoid(tf.sin(y))) + y, lambda: tf.sin(y))

        _, y = tf.while_loop(lambda i, _: i < LENGTH, body, (0, x))
        loss = tf.reduce_sum(y**2)
    return loss, tape.gradient(loss, weight)


def unknown_branch_step(x, weight):
    """A loop whose branches depend on data."""
    return branch_step(x, weight, lambda i, y: tf.reduce_sum(y) > 0)


def unbounded_growing_step(x, weight):
    """A loop whose list grows by an unknown number of elements."""
    count = tf.cast(tf.reduce_sum(x), tf.int32)
    states = tf.TensorArray(x.dtype, 0, dynamic_size=True, element_shape=x.shape)
    _, states = tf.while_loop(
        lambda i, _: i < count, lambda i, states: (i + 1, states.write(i, tf.tanh(x @ weight))), (0, states)
    )
    return tf.reduce_sum(states.stack(), 0), weight


def unbounded_step(x, weight):
    """A loop whose number of iterations depends on data."""
    count = tf.cast(tf.reduce_sum(x), tf.int32)
    with tf.GradientTape() as tape:
        _, y = tf.while_loop(lambda i, _: i < count, lambda i, y: (i + 1, tf.tanh(y @ weight)), (0, x))
        loss = tf.reduce_sum(y**2)
    return loss, tape.gradient(loss, weight)


def step_with_weight(function, size=4, steps=3):
    """A step that calls `function` with a batch and a weight, and updates the weight by its last result."""
    weight = tf.Variable(np.random.default_rng(1).random((size, size)), dtype=tf.float64)

    def step(x):
        results = function(x, weight)
        weight.assign_sub(0.01 * results[-1])
        return results

    batches = [(np.random.default_rng(number).random((BATCH, size)),) for number in range(steps)]
    specs = [tf.TensorSpec((BATCH, size), tf.float64)]
    traced = tf.function(step, input_signature=specs)
    return Step(traced.get_concrete_function(), [weight], batches, traced, specs)


def adversarial_step(batch=64, units=24):
    """A training step of a recurrent GAN: an update of the discriminator, then one of the generator."""
    shape = (batch, STEPS, units)
    generator = keras.Sequential([keras.Input(shape[1:]), layers.LSTM(units, return_sequences=True)])
    discriminator = keras.Sequential([keras.Input(shape[1:]), layers.GRU(units), layers.Dense(1)])
    for model in (generator, discriminator):
        model.compile("adam")
        model.optimizer.build(model.trainable_variables)
    seeds = keras.random.SeedGenerator(5)

    @tf.function(input_signature=[tf.TensorSpec(shape)])
    def step(x):
        for model, sign in ((discriminator, 1.0), (generator, -1.0)):
            noise = keras.random.normal(shape, seed=seeds)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.nn.softplus(sign * discriminator(generator(noise))))
                if model is discriminator:
                    loss += tf.reduce_mean(tf.nn.softplus(-discriminator(x)))
            weights = model.trainable_variables
            model.optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    return step
