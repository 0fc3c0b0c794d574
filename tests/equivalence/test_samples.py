"""Networks without images, whose samples are independent up to reductions over the batch: tiles along the batch."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import TOLERANCE, Step, error
from keras import layers

import tflms_sft
from benchmarks._longest_segments import longest_segments
from tflms_sft._params.request import parse_request
from tflms_sft._rewrite.rewrite import rewrite_concrete
from tflms_sft._trace.layer_names import LayerRecord

SAMPLES, FEATURES, CLASSES = 37, 6, 4

pytestmark = pytest.mark.usefixtures("fresh_keras")


def dense(x: Any) -> Any:
    return layers.Dense(CLASSES)(layers.Dense(9, "gelu", kernel_regularizer="l2")(layers.Dense(8, "relu")(x)))


def normalised(x: Any) -> Any:
    for norm in (layers.BatchNormalization(), layers.LayerNormalization(), layers.UnitNormalization()):
        x = layers.Activation("tanh")(norm(layers.Dense(7)(x)))
    return layers.Dense(CLASSES)(x)


def joined(x: Any) -> Any:
    a, b = layers.Dense(5, "silu")(x), layers.Dense(3, "softplus")(x)
    x = layers.Concatenate()([a, b, a[:, 1:3]])
    return layers.Dense(CLASSES)(layers.Multiply()([x, layers.Dense(1, "sigmoid")(x)]))


def softmax_loss(y: Any, labels: Any) -> Any:
    return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(labels, y, from_logits=True))


def squared_loss(y: Any, labels: Any) -> Any:
    return tf.reduce_mean((y - tf.one_hot(labels, CLASSES, dtype=y.dtype)) ** 2)


def pairwise_loss(y: Any, labels: Any) -> Any:
    """All pairs of samples, by a Gram matrix."""
    y = tf.tanh(y)
    return tf.reduce_mean((tf.matmul(y, y, transpose_b=True) - 0.5) ** 2) + squared_loss(y, labels)


def outer_loss(y: Any, labels: Any) -> Any:
    """Shapes (batch, 1) and (batch,), which broadcast to all pairs of samples."""
    y = tf.tanh(y)
    return tf.reduce_mean((y[:, :1] - y[:, 1]) ** 2) + squared_loss(y, labels)


def batch_loss(y: Any, labels: Any) -> Any:
    """Statistics of the batch, one of which is a maximum, in the middle of the arithmetic of each sample."""
    y = tf.exp(y - tf.reduce_max(y, 0, keepdims=True)) / tf.reduce_sum(tf.abs(y))
    return squared_loss(y / tf.norm(y, axis=0, keepdims=True), labels)


def looked_up_loss(y: Any, labels: Any) -> Any:
    """Each sample is compared with another one of the batch."""
    y = tf.tanh(y)
    return tf.reduce_mean((y - tf.gather(y, labels)) ** 2) + squared_loss(y, labels)


def step_of(network: Callable[[Any], Any], loss_of: Callable[[Any, Any], Any], samples: int | None) -> Step:
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(0)
    features = keras.Input((FEATURES,))
    model = keras.Model(features, network(features))
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)

    def function(x: Any, labels: Any) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = loss_of(model(x, training=True), labels) + sum(model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return {"loss": loss, "gradients": gradients}

    specs = (tf.TensorSpec((samples, FEATURES), tf.float64), tf.TensorSpec((samples,), tf.int32))
    random = np.random.default_rng(0)
    batches = [
        (random.normal(size=(SAMPLES, FEATURES)), random.integers(CLASSES, size=SAMPLES).astype("int32"))
        for _ in range(3)
    ]
    concrete_fn = tf.function(function, autograph=False).get_concrete_function(*specs)
    variables = {id(v): v for v in (*model.variables, *optimizer.variables)}
    return Step(concrete_fn, list(variables.values()), batches)


@pytest.mark.parametrize("samples", [SAMPLES, None])
@pytest.mark.parametrize(
    ("network", "loss_of"),
    [
        (dense, squared_loss),
        (dense, softmax_loss),
        (normalised, squared_loss),
        (joined, softmax_loss),
        (joined, pairwise_loss),
        (dense, outer_loss),
        (dense, batch_loss),
        (joined, looked_up_loss),
    ],
)
def test_tiles_of_batch_equal_plain(network, loss_of, samples):
    step = step_of(network, loss_of, samples)
    request = parse_request(tflms_sft.SFTParams(num_tiles={"batch": 3}))
    with longest_segments():
        fast = rewrite_concrete(step.concrete_fn, LayerRecord(), SAMPLES, request)
    combines_samples = loss_of in (pairwise_loss, outer_loss, looked_up_loss)  # What remains may be too little to tile.
    assert fast.plan.segments or (combines_samples and fast.plan.left_alone)
    want, got = step.run(step.concrete_fn), step.run(fast.concrete_function)
    assert list(want) == list(got)
    assert max(error(got[key], want[key]) for key in want) < TOLERANCE
