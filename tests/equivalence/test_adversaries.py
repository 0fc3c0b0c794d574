"""Networks that are called for several batches in a step, as those that train against each other are, in stages."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from pipelined import error

import tflms_sft
from rewriters.errors import SegmentError
from tflms_sft import PipelineParams

RANDOM = np.random.default_rng(0)
REAL, FAKE = RANDOM.normal(size=(2, 8, 8, 8, 3))
CODES, PART = RANDOM.normal(size=(8, 5)), RANDOM.random((8, 1, 1, 1))
cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True, dtype="float64")
mean = tf.reduce_mean


@pytest.fixture(autouse=True)
def in_float64(fresh_keras):
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(1)


def critic():
    """Its second-order gradients go through poolings, paddings, joined channels and a normalisation of each image."""
    image = keras.Input((8, 8, 3))
    x = layers.Conv2D(4, 3, padding="same", activation="swish", name="first")(image)
    x = layers.Concatenate()([x, layers.Conv2D(4, 3, padding="same", activation="leaky_relu")(x)])
    x = layers.MaxPooling2D(name="pool")(layers.ZeroPadding2D()(x))
    x = layers.Flatten(name="flat")(layers.LayerNormalization()(x))
    return keras.Model(image, layers.Dense(1, name="score")(x))


def generator():
    codes = keras.Input((5,))
    x = layers.Reshape((8, 8, 3), name="image")(layers.Dense(8 * 8 * 3)(codes))
    return keras.Model(codes, layers.Conv2D(3, 3, padding="same", activation="tanh")(x))


def discriminated(net, real, fake, part):
    of_real, of_fake = net(real, training=True), net(fake, training=True)
    return cross_entropy(tf.ones_like(of_real), of_real) + cross_entropy(tf.zeros_like(of_fake), of_fake)


def wasserstein(net, real, fake, part):
    return mean(net(fake, training=True)) - mean(net(real, training=True))


def hinge(net, real, fake, part):
    return mean(tf.nn.relu(1.0 - net(real, training=True))) + mean(tf.nn.relu(1.0 + net(fake, training=True)))


def gradient_penalty(net, real, fake, part):
    """Gulrajani et al., "Improved Training of Wasserstein GANs", 2017, equation 3."""
    between = part * real + (1.0 - part) * fake
    with tf.GradientTape() as tape:
        tape.watch(between)
        scores = net(between, training=True)
    norm = tf.sqrt(tf.reduce_sum(tf.square(tape.gradient(scores, between)), axis=[1, 2, 3]))
    return wasserstein(net, real, fake, part) + 10.0 * mean(tf.square(norm - 1.0))


def penalty_at_data(net, real, fake, part):
    """R1: Mescheder et al., "Which Training Methods for GANs do actually Converge?", 2018, equation 9."""
    with tf.GradientTape() as tape:
        tape.watch(real)
        of_real = net(real, training=True)
        total = tf.reduce_sum(of_real)
    penalty = mean(tf.reduce_sum(tf.square(tape.gradient(total, real)), axis=[1, 2, 3]))
    return mean(tf.nn.softplus(-of_real)) + mean(tf.nn.softplus(net(fake, training=True))) + 5.0 * penalty


def critic_step(loss):
    net, optimizer = critic(), keras.optimizers.Adam(1e-3)
    optimizer.build(net.trainable_variables)

    @tf.function
    def step(real, fake, part):
        with tf.GradientTape() as tape:
            value = loss(net, real, fake, part)
        optimizer.apply_gradients(
            zip(tape.gradient(value, net.trainable_variables), net.trainable_variables, strict=True)
        )
        return value

    return step, [*net.variables, *optimizer.variables]


def joint_step():
    """Gradients of both networks, and then both updates."""
    nets = critic(), generator()
    optimizers = [keras.optimizers.Adam(1e-3), keras.optimizers.Adam(1e-3)]
    for net, optimizer in zip(nets, optimizers, strict=True):
        optimizer.build(net.trainable_variables)

    @tf.function
    def step(real, codes):
        with tf.GradientTape(persistent=True) as tape:
            of_fake = nets[0](nets[1](codes, training=True), training=True)
            of_real = nets[0](real, training=True)
            wrong = cross_entropy(tf.ones_like(of_fake), of_fake)
            right = cross_entropy(tf.ones_like(of_real), of_real) + cross_entropy(tf.zeros_like(of_fake), of_fake)
        found = [tape.gradient(right, nets[0].trainable_variables), tape.gradient(wrong, nets[1].trainable_variables)]
        for net, optimizer, own in zip(nets, optimizers, found, strict=True):
            optimizer.apply_gradients(zip(own, net.trainable_variables, strict=True))
        return right, wrong

    return step, [v for owner in (*nets, *optimizers) for v in owner.variables]


def same(step, variables, cuts, *arguments, schedule="1f1b"):
    """Three steps plain and in four micro-batches; the rewritten one."""
    params = PipelineParams(cuts, schedule, 4, ["CPU:0"] * (len(cuts) + 1))
    rewritten = tflms_sft.rewrite(step, params, *arguments)
    start, found = [v.numpy() for v in variables], []
    for function in (step, rewritten):
        results = [np.array(r) for _ in range(3) for r in tf.nest.flatten(function(*map(tf.constant, arguments)))]
        found.append([*results, *(v.numpy() for v in variables)])
        for variable, value in zip(variables, start, strict=True):
            variable.assign(value)
    assert max(error(got, want) for want, got in zip(*found, strict=True)) < 1e-11
    assert max(error(now, before) for now, before in zip(found[0][-len(start) :], start, strict=True)) > 1e-4
    return rewritten


@pytest.mark.parametrize("loss", [discriminated, wasserstein, hinge, gradient_penalty, penalty_at_data])
def test_critic_step_equals_plain(loss):
    rewritten = same(*critic_step(loss), ["first", "pool"], REAL, FAKE, PART)
    assert rewritten.plan.notes == ()


class Adversary(keras.Model):
    """Trains a critic under `fit`, with a metric of its loss."""

    def __init__(self, net, loss):
        super().__init__()
        self.net, self.loss_of = net, loss
        self.told = keras.metrics.Mean(name="told")

    def train_step(self, data):
        with tf.GradientTape() as tape:
            value = self.loss_of(self.net, *data)
        weights = self.net.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(value, weights), weights, strict=True))
        self.told.update_state(value)
        return {"told": self.told.result(), "loss": value}

    @property
    def metrics(self):
        return [self.told]

    def call(self, inputs):
        return self.net(inputs)


def fitted(loss, callbacks):
    """Two epochs with a last batch of three samples: what is told, and all variables."""
    keras.utils.set_random_seed(1)
    model = Adversary(critic(), loss)
    model.compile(optimizer=keras.optimizers.Adam(1e-3), jit_compile=False)
    batches = tf.data.Dataset.from_tensor_slices((REAL, FAKE, PART)).repeat(2).take(11).batch(8)
    model.build((None, 8, 8, 3))
    told = model.fit(batches, epochs=2, verbose=0, shuffle=False, callbacks=callbacks).history
    return [np.array(value) for value in (told["told"], told["loss"], *model.net.variables, *model.optimizer.variables)]


@pytest.mark.parametrize("loss", [discriminated, gradient_penalty, penalty_at_data])
def test_critic_fit_equals_plain(loss):
    pipeline = tflms_sft.Pipeline(["first", "pool"], "gpipe", 4, ["CPU:0"] * 3, verbose=0)
    got, want = fitted(loss, [pipeline]), fitted(loss, [])
    assert max(error(value, other) for value, other in zip(got, want, strict=True)) < 1e-11
    assert [stage.exit for stage in pipeline.plan.pipeline.stages][0].startswith("first/1, first/2")


def test_linear_last_stage_equals_plain():
    same(*critic_step(wasserstein), ["first", "flat"], REAL, FAKE, PART, schedule="mast")


def test_two_updates_of_earlier_gradients_equal_plain():
    same(*joint_step(), ["pool"], REAL, CODES)


def test_cut_at_shared_layer_applies_to_each_call():
    step, _ = critic_step(discriminated)
    plan = tflms_sft.rewrite(step, PipelineParams(["first"], devices=["CPU:0"] * 2), REAL, FAKE, PART).plan
    assert plan.pipeline.stages[0].exit == "first/1, first/2"
    first, rest = (8 * sum(np.prod(w.shape) for w in own) for own in (critic().weights[:2], critic().weights[2:]))
    told = [stage.weight_bytes for stage in plan.pipeline.stages]
    assert 3 * first <= told[0] < 3 * first + 32 and told[1] == 3 * rest, "with Adam's slots, and a counter"


def test_cut_ignores_call_after_update():
    """The call reads updated variables, so it belongs to the update, which runs once per batch."""
    net, optimizer = critic(), keras.optimizers.Adam(1e-3)
    optimizer.build(net.trainable_variables)

    @tf.function
    def step(real):
        with tf.GradientTape() as tape:
            value = mean(tf.square(net(real, training=True)))
        weights = net.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(value, weights), weights, strict=True))
        return value, net(real, training=False)

    same(step, [*net.variables, *optimizer.variables], ["first", "pool"], REAL)


def test_cut_at_recursive_layer_is_ambiguous():
    again = layers.Conv2D(3, 3, padding="same", name="again")
    again.build((None, 8, 8, 3))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = mean(tf.square(again(again(x))))
        return tape.gradient(loss, again.trainable_variables)

    with pytest.raises(SegmentError, match="`stages` is ambiguous: layer 'again' is called 2 times"):
        tflms_sft.rewrite(step, PipelineParams(["again"], devices=["CPU:0"] * 2), REAL)
