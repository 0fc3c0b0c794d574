"""Gradients of gradients in critics with and without normalisation: whole steps with everything on tiles."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from between_convolutions import check_on_tiles
from equivalence import Step
from keras import layers

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize import canonicalize
from rewriters.tiling.barrier_levels import assign_levels
from rewriters.tiling.barrier_planner import has_nonlinear_gradients

SIZE = (14, 11)


def block(x: Any, activation: str, norm: Any = None, strides: int = 1) -> Any:
    x = layers.Conv2D(4, 3, padding="same", strides=strides)(x)
    return layers.Activation(activation)(x if norm is None else norm()(x))


def critic(activation: str = "leaky_relu", norm: Any = None) -> Callable[[Any], Any]:
    return lambda x: block(block(block(x, activation, norm), activation, norm, strides=2), activation, norm)


def spectral(x: Any) -> Any:
    for _ in range(3):
        x = layers.LeakyReLU()(layers.SpectralNormalization(layers.Conv2D(4, 3, padding="same"))(x))
    return x


CRITICS = {
    "leaky": critic(),
    "tanh": critic("tanh"),
    "silu": critic("silu"),
    "layers": critic(norm=layers.LayerNormalization),
    "groups": critic(norm=lambda: layers.GroupNormalization(2)),
    "instances": critic(norm=lambda: layers.GroupNormalization(-1)),
    "batch": critic(norm=layers.BatchNormalization),
    "pooled": lambda x: block(layers.MaxPooling2D(2)(block(layers.AveragePooling2D(2)(block(x, "elu")), "elu")), "elu"),
    "upsampled": lambda x: block(layers.UpSampling2D(2)(block(block(x, "relu"), "softplus")), "tanh"),
    "spectral": spectral,
}


def wgan_gp(model: Any, x: Any) -> Any:
    """The loss of WGAN-GP: the norm of the gradient is one."""
    x = 0.3 * x
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = model(x, training=True)
    norm = tf.sqrt(tf.reduce_sum(tf.square(tape.gradient(y, x)), axis=[1, 2, 3]) + 1e-3)
    return tf.reduce_mean(y) + 10.0 * tf.reduce_mean((norm - 1.0) ** 2)


def r1(model: Any, x: Any) -> Any:
    """The R1 penalty at the data."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = model(x, training=True)
        total = tf.reduce_sum(y)
    penalty = tf.reduce_mean(tf.reduce_sum(tf.square(tape.gradient(total, x)), axis=[1, 2, 3]))
    return tf.reduce_mean(tf.nn.softplus(-y)) + 0.5 * penalty


def no_penalty(model: Any, x: Any) -> Any:
    return tf.reduce_mean(model(x, training=True) ** 2)


def critic_step(name: str, loss: Callable[[Any, Any], Any], known_batch: bool) -> Step:
    keras.config.set_floatx("float64")
    image = keras.Input((*SIZE, 2), batch_size=3 if known_batch else None)
    model = keras.Model(image, layers.Dense(1)(layers.GlobalAveragePooling2D()(CRITICS[name](image))))
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)

    def step(x: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            value = loss(model, x)
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return {"loss": value, "gradients": [g for g in gradients if g is not None]}

    spec = tf.TensorSpec((3 if known_batch else None, *SIZE, 2), tf.float64)
    concrete_fn = tf.function(step, autograph=False).get_concrete_function(spec)
    random = np.random.default_rng(0)
    variables = {id(v): v for v in (*model.variables, *optimizer.variables)}
    return Step(concrete_fn, list(variables.values()), [(random.normal(size=(3, *SIZE, 2)),) for _ in range(3)])


def image_ops(fast: Any) -> set[str]:
    """The types of the ops outside of the loops that run on images alone."""
    types = {op.type for op in fast.concrete_function.graph.get_operations()}
    ends = ("Relu", "ReluGrad", "TanhGrad", "EluGrad", "SigmoidGrad", "Pool", "PoolGrad", "Filter", "Conv2D")
    return {name for name in types if name.endswith(ends)}


@pytest.mark.parametrize("loss", [wgan_gp, r1])
@pytest.mark.parametrize("name", sorted(CRITICS.keys() - {"spectral"}))
def test_penalised_critic_on_tiles_equals_plain(name, loss):
    # With an unknown batch, the second gradient of `tf.repeat` has ten dimensions of unknown size.
    known_batch = loss is r1 or name == "upsampled"
    fast = check_on_tiles(critic_step(name, loss, known_batch), (3, 2) if known_batch else (2, 4, 3))
    assert len(fast.plan.segments) == 1 and not fast.plan.left_alone
    assert not image_ops(fast)


@pytest.mark.parametrize("loss", [wgan_gp, no_penalty])
def test_spectrally_normalised_critic_on_tiles_equals_plain(loss):
    """The power iteration runs outside of the loops, once."""
    step = critic_step("spectral", loss, known_batch=True)
    fast = check_on_tiles(step, (3, 2), left_alone=("spectral_normalization",))
    assert not image_ops(fast)


@pytest.mark.parametrize(
    ("name", "loss"), [("leaky", r1), ("layers", wgan_gp), ("leaky", no_penalty), ("silu", no_penalty)]
)
def test_has_nonlinear_gradients_of_penalties_alone(name, loss):
    analysis = GraphAnalysis(canonicalize.read_canonical(critic_step(name, loss, True).concrete_fn))
    assert has_nonlinear_gradients(analysis, assign_levels(analysis)) == (loss is not no_penalty)
