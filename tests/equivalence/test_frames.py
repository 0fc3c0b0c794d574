"""Sequences of images: each frame is an image, and frames of neighbouring layers are connected directly."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from between_convolutions import check_on_tiles
from equivalence import TOLERANCE, Step, batches_of, error, model_step
from keras import layers

import tflms_sft
from rewriters.canonicalize.canonicalize import CanonicalMode, read_canonical
from rewriters.step_importer import StepImporter

FRAMES, SIZE = 3, (13, 12)
EVERY = layers.TimeDistributed


class RecurrentConvolution(layers.Layer):
    """A convolutional recurrence over the frames, written as a Python loop."""

    def build(self, shape: Any) -> None:
        self.of_frame = layers.Conv2D(4, 3, padding="same")
        self.of_state = layers.Conv2D(4, 3, padding="same")
        self.of_frame.build((shape[0], *shape[2:]))
        self.of_state.build((shape[0], *shape[2:4], 4))

    def call(self, x: Any) -> Any:
        frames = tf.unstack(x, axis=1)
        states = [tf.tanh(self.of_frame(frames[0]))]
        for frame in frames[1:]:
            states.append(tf.tanh(self.of_frame(frame) + self.of_state(states[-1])))
        return tf.stack(states, axis=1)


def classifier(x: Any) -> Any:
    x = EVERY(layers.Conv2D(4, 3, padding="same", activation="relu"))(x)
    x = EVERY(layers.MaxPooling2D())(x)
    return EVERY(layers.Conv2D(5, 3, strides=2, activation="relu"))(x)


def normed(x: Any) -> Any:
    x = EVERY(layers.BatchNormalization())(EVERY(layers.Conv2D(4, 3, padding="same"))(x))
    return EVERY(layers.Conv2D(5, 3, padding="same", activation="relu"))(layers.LayerNormalization()(x))


def residual(x: Any) -> Any:
    """The sum reads whole sequences; their gradient is that of the frames and another one."""
    x = EVERY(layers.Conv2D(4, 3, padding="same"))(x)
    y = EVERY(layers.Conv2D(4, 3, padding="same", activation="relu"))(layers.LayerNormalization()(x))
    return EVERY(layers.Conv2D(3, 3))(layers.Add()([x, y]))


def unrolled(x: Any) -> Any:
    x = EVERY(layers.Conv2D(4, 3, padding="same", activation="relu"))(x)
    return EVERY(layers.Conv2D(3, 3))(RecurrentConvolution()(x))


def decoder(x: Any) -> Any:
    x = EVERY(layers.Conv2D(4, 3, strides=2, padding="same", activation="relu"))(x)
    return EVERY(layers.Conv2DTranspose(4, 3, strides=2, padding="same"))(EVERY(layers.UpSampling2D())(x))


def waiting(x: Any) -> Any:
    """The gradient of the activation waits for that of its result by a control edge."""
    x = EVERY(layers.Conv2D(4, 3, padding="same", activation="silu"))(x)
    return EVERY(layers.Conv2D(5, 3, activation="silu"))(x)


NETS = {
    "classifier": classifier,
    "normed": normed,
    "residual": residual,
    "unrolled": unrolled,
    "decoder": decoder,
    "waiting": waiting,
}


def step_of(net: Callable[[Any], Any], known_batch: bool, steps: int = 2) -> Step:
    """Return the step of a network of frames that ends in a recurrent layer, in float64."""
    keras.config.set_floatx("float64")
    video = keras.Input((FRAMES, *SIZE, 2), batch_size=2 if known_batch else None)
    x = layers.LSTM(4)(EVERY(layers.GlobalAveragePooling2D())(net(video)))
    model = keras.Model(video, layers.Dense(3)(x))
    arguments = {
        "optimizer": keras.optimizers.SGD(0.1, momentum=0.9),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    }
    return model_step(model, batches_of([2] * steps, (FRAMES, *SIZE, 2)), known_batch, arguments)


def image_ops(function: Any, *types: str) -> list[str]:
    """Return the names of the ops of some types whose result has five dimensions, outside of loops."""
    ops = function.graph.get_operations()
    return [op.name for op in ops if op.type in types and op.outputs[0].shape.rank == 5]


@pytest.mark.parametrize("known_batch", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_frames_on_tiles_equal_plain(name, known_batch):
    step = step_of(NETS[name], known_batch)
    moving = ("Transpose", "StridedSliceGrad", "Pack")
    assert len(image_ops(step.concrete_fn, *moving)) > FRAMES
    fast = check_on_tiles(step, (3, 2))
    assert not image_ops(fast.concrete_function, *moving)


@pytest.mark.parametrize("name", NETS)
def test_swapped_frames_equal_plain(name):
    step = step_of(NETS[name], known_batch=True)
    swapped = tflms_sft.rewrite(step.concrete_fn, tflms_sft.LMSParams(tier="disk", min_bytes=2**12))
    assert swapped.plan.swaps
    want, got = step.run(step.concrete_fn), step.run(swapped.concrete_function)
    assert max(error(got[key], want[key]) for key in want) < TOLERANCE


def gradients_of(function: Callable[[Any], Any]) -> Any:
    """Return a function for the gradient of a sum, weighted by position, and that of its argument."""

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x * x)
            weights = tf.reshape(tf.range(1, tf.size(y) + 1), tf.shape(y))
            loss = tf.reduce_sum(y * tf.cast(weights, y.dtype))
        return tape.gradient(loss, x), y

    return step


def transposed(x: tf.Tensor) -> tf.Tensor:
    return tf.transpose(x, (1, 0, 2, 3, 4))


def some_frames(x: tf.Tensor) -> tf.Tensor:
    """Read one frame twice and another not at all: zeros stay in the gradient."""
    return tf.stack([x[:, 0], x[:, 0] * 2.0, x[:, 2]], 1)


def frames_from_the_end(x: tf.Tensor) -> tf.Tensor:
    frames = transposed(x)
    return transposed(tf.stack([frames[-1], frames[-2], frames[-3]]))


def batch_as_frames(x: tf.Tensor) -> tf.Tensor:
    return tf.stack([x[1], x[0] + x[1]])


def rows_as_frames(x: tf.Tensor) -> tf.Tensor:
    """Slice another dimension, and mix up the rest: the transposition has to stay."""
    turned = tf.transpose(x, (1, 0, 3, 2, 4))
    return tf.stack([turned[0] * 2.0, turned[1], turned[2]], 2)


def ranges(x: tf.Tensor) -> tf.Tensor:
    return tf.concat([x[:, :2] * 2.0, x[:, 2:]], 1)


def whole_and_frames(x: tf.Tensor) -> tf.Tensor:
    return x + tf.stack([frame * (index + 1.0) for index, frame in enumerate(tf.unstack(x, axis=1))], 1)


def shared(x: tf.Tensor) -> tf.Tensor:
    """Three whole readers beside the frames."""
    frames = tf.stack([x[:, index] * (index + 1.0) for index in range(3)], 1)
    return frames + x * 2.0 + tf.tanh(x) + tf.exp(x)


def gradients_in_parts(x: tf.Tensor) -> tf.Tensor:
    """Add up the gradients of some frames before those of the others, as autodiff does with large ones."""
    parts = [tf.identity(x), tf.identity(x)]
    return tf.stack([parts[index % 2][:, index] * (index + 1.0) for index in range(3)], 1)


CONNECTED = [gradients_in_parts, frames_from_the_end, rows_as_frames, whole_and_frames]
KEPT = [some_frames, batch_as_frames, ranges, shared]


@pytest.mark.parametrize("use", CONNECTED + KEPT, ids=lambda use: use.__name__)
def test_canonical_graph_of_any_use_of_frames_equals_plain(use):
    x = np.random.default_rng(0).normal(size=(2, 3, 4, 5, 2))
    plain = tf.function(gradients_of(use), autograph=False)
    concrete_fn = plain.get_concrete_function(tf.TensorSpec(x.shape, tf.float64))
    graph = read_canonical(concrete_fn, CanonicalMode.EXACT)
    pads_gradients = any(node.op == "StridedSliceGrad" for node in graph.nodes.values())
    assert pads_gradients == (use in KEPT)
    importer = StepImporter(graph, concrete_fn)
    canonical = tf.function(lambda x: importer([x]), autograph=False)
    for want, got in zip(plain(tf.constant(x)), canonical(tf.constant(x)), strict=True):
        # AddN begins with the operand whose memory it may reuse, and which one that is depends on threads.
        np.testing.assert_allclose(got, want, rtol=1e-14)


def checked_by_canonical(function: Callable[..., Any], *arrays: np.ndarray, specs: Any = None) -> Any:
    """Compare a function with its canonical graph, and return the latter."""
    plain = tf.function(function, autograph=False)
    concrete_fn = plain.get_concrete_function(*(specs or [tf.TensorSpec(a.shape, a.dtype) for a in arrays]))
    graph = read_canonical(concrete_fn, CanonicalMode.EXACT)
    importer = StepImporter(graph, concrete_fn)
    canonical = tf.function(lambda *args: importer(args), autograph=False)
    tensors = [tf.constant(a) for a in arrays]
    tf.nest.map_structure(np.testing.assert_array_equal, tf.nest.flatten(plain(*tensors)), list(canonical(*tensors)))
    return graph


def test_stacks_of_unknown_rank_stay():
    pair = np.array([1.0, 2.0]), np.array([3.0, 4.0])
    specs = [tf.TensorSpec(None, tf.float64)] * 2
    graph = checked_by_canonical(lambda a, b: tf.unstack(tf.stack([a, b], axis=1), num=2, axis=0), *pair, specs=specs)
    assert any(node.op == "Unpack" for node in graph.nodes.values())


def test_frames_of_a_stack_that_waits_for_an_assertion_stay():
    def step(a, b):
        with tf.control_dependencies([tf.debugging.assert_positive(b)]):
            checked = tf.identity(b)
        return tf.stack([a, checked])[0] * 2.0, tf.stack([a, b])[0] * 3.0

    graph = checked_by_canonical(step, np.ones((2, 3)), np.ones((2, 3)))
    slices = [node for node in graph.nodes.values() if node.op == "StridedSlice"]
    assert len(slices) == 1, "the frame of the other stack is read directly"
