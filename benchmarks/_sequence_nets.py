"""Networks of `benchmarks.sequences`, imported in child processes alone, and their training steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

WIDTH, CLASSES, BATCH = 16, 3, 2
"""Channels of a token, classes, and batch of the small transformers."""
VOCABULARY = 50257
"""Words of the language model, as many as GPT-2 has."""
WINDOW = 4
"""Height and width of a window of attention."""


class Positions(layers.Layer):
    """Adds a learned vector for each position."""

    def build(self, shape: Any) -> None:
        """Create the vectors."""
        self.table = self.add_weight(shape=(1, *shape[1:]), initializer="normal")

    def call(self, x: Any) -> Any:
        """Return the sum."""
        return x + self.table


class ClassToken(layers.Layer):
    """Puts a learned token in front of a sequence."""

    def build(self, shape: Any) -> None:
        """Create the token."""
        self.token = self.add_weight(shape=(1, 1, shape[2]), initializer="normal")

    def call(self, x: Any) -> Any:
        """Return the longer sequence."""
        return ops.concatenate([ops.broadcast_to(self.token, (ops.shape(x)[0], 1, x.shape[2])), x], 1)


def block(x: Any, heads: int = 2, memory: Any = None, causal: bool = False, growth: int = 2) -> Any:
    """Return a transformer block with a multilayer perceptron of `growth` times the channels.

    Queries attend to the memory if there is one, otherwise to the normalised tokens themselves.
    """
    width = x.shape[-1]
    y = layers.LayerNormalization()(x)
    attention = layers.MultiHeadAttention(heads, width // heads)
    x = layers.Add()([x, attention(y, y if memory is None else memory, use_causal_mask=causal)])
    y = layers.Dense(growth * width, activation="gelu")(layers.LayerNormalization()(x))
    return layers.Add()([x, layers.Dense(width)(y)])


def unet(size: int) -> keras.Model:
    """Return a U-Net with three levels, 16 filters at its top and 4 classes per pixel."""
    x = image = keras.Input((size, size, 3))
    skips = []

    def convolutions(x: Any, filters: int) -> Any:
        for _ in range(2):
            x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        return x

    for filters in (16, 32, 64):
        x = convolutions(x, filters)
        skips.append(x)
        x = layers.MaxPooling2D(2)(x)
    x = convolutions(x, 128)
    for filters, skip in zip((64, 32, 16), reversed(skips), strict=True):
        x = layers.Conv2DTranspose(filters, 2, 2)(x)
        x = convolutions(layers.Concatenate()([skip, x]), filters)
    return keras.Model(image, layers.Conv2D(4, 1)(x))


def head(size: int) -> keras.Model:
    """Return a dense layer from 256 channels to a vocabulary of 32,768 words."""
    tokens = keras.Input((size, 256))
    return keras.Model(tokens, layers.Dense(32768)(tokens))


def attention(size: int) -> keras.Model:
    """Return one causal attention layer with four heads and 64 channels."""
    tokens = keras.Input((size, 64))
    return keras.Model(tokens, layers.MultiHeadAttention(4, 16)(tokens, tokens, use_causal_mask=True))


def language_model(size: int) -> keras.Model:
    """Return a causal decoder as GPT-2 has it, with two blocks, 64 channels and four heads; its embeddings are tied."""
    words = keras.Input((size,), dtype="int32")
    embedding = layers.ReversibleEmbedding(VOCABULARY, 64)
    x = Positions()(embedding(words))
    for _ in range(2):
        x = block(x, heads=4, causal=True, growth=4)
    return keras.Model(words, embedding(layers.LayerNormalization()(x), reverse=True))


def tokens_of(image: Any, patch: int) -> Any:
    """Return a sequence with a token for each patch of an image."""
    return layers.Reshape((-1, WIDTH))(layers.Conv2D(WIDTH, patch, patch)(image))


def vision_transformer(size: int, class_token: bool = False) -> keras.Model:
    """Return a vision transformer with two blocks and patches of four pixels a side."""
    image = keras.Input((size, size, 3))
    x = tokens_of(image, 4)
    x = Positions()(ClassToken()(x) if class_token else x)
    x = layers.LayerNormalization()(block(block(x)))
    pooled = x[:, 0] if class_token else layers.GlobalAveragePooling1D()(x)
    return keras.Model(image, layers.Dense(CLASSES)(pooled))


def transformer_unet(size: int) -> keras.Model:
    """Return a U-Net with attention at its bottom."""
    image = keras.Input((size, size, 3))
    skip = layers.Conv2D(WIDTH, 3, padding="same", activation="relu")(image)
    x = layers.Reshape((size // 4, size // 4, WIDTH))(block(Positions()(tokens_of(skip, 4))))
    x = layers.Concatenate()([layers.Conv2DTranspose(WIDTH, 4, 4)(x), skip])
    return keras.Model(image, layers.Conv2D(CLASSES, 1)(layers.Conv2D(WIDTH, 3, padding="same")(x)))


def reduced_attention(size: int) -> keras.Model:
    """Return a segmentation network whose keys are one for four tokens, with a depthwise convolution of tokens."""
    image = keras.Input((size, size, 3))
    grid = (size // 4, size // 4)
    tokens = layers.Reshape((-1, WIDTH))(layers.Conv2D(WIDTH, 7, 4, padding="same")(image))
    y = layers.LayerNormalization()(tokens)
    keys = layers.LayerNormalization()(tokens_of(layers.Reshape((*grid, WIDTH))(y), 2))
    tokens = layers.Add()([tokens, layers.MultiHeadAttention(2, WIDTH // 2)(y, keys)])
    y = layers.Dense(2 * WIDTH)(layers.LayerNormalization()(tokens))
    y = layers.DepthwiseConv2D(3, padding="same")(layers.Reshape((*grid, 2 * WIDTH))(y))
    y = layers.Reshape((-1, 2 * WIDTH))(layers.Activation("gelu")(y))
    x = layers.Reshape((*grid, WIDTH))(layers.Add()([tokens, layers.Dense(WIDTH)(y)]))
    x = layers.UpSampling2D(4, interpolation="bilinear")(x)
    return keras.Model(image, layers.Conv2D(CLASSES, 1)(x))


def convolutions_of_tokens(size: int) -> keras.Model:
    """Return attention and a gated depthwise convolution, as for speech."""
    tokens = keras.Input((size, WIDTH))
    x = block(tokens)
    value, gate = ops.split(layers.Conv1D(2 * WIDTH, 1)(layers.LayerNormalization()(x)), 2, -1)
    y = layers.DepthwiseConv1D(5, padding="same")(value * ops.sigmoid(gate))
    y = layers.Conv1D(WIDTH, 1)(layers.Activation("silu")(layers.LayerNormalization()(y)))
    return keras.Model(tokens, layers.Dense(CLASSES)(layers.Add()([x, y])))


def tower_and_attention(size: int) -> keras.Model:
    """Return convolutions with pools, then attention, as for genomes; a positive number per class and position."""
    x = sequence = keras.Input((size, 4))
    for _ in range(2):
        x = layers.MaxPooling1D(2)(layers.Conv1D(WIDTH, 5, padding="same", activation="gelu")(x))
    x = block(block(Positions()(x)))
    return keras.Model(sequence, layers.Dense(CLASSES, activation="softplus")(x))


def captioner(size: int) -> keras.Model:
    """Return a decoder of words that attends to the tokens of an image of 192 pixels a side."""
    image, words = keras.Input((192, 192, 3)), keras.Input((size, WIDTH))
    x = block(block(words, causal=True), memory=block(tokens_of(image, 4)))
    return keras.Model([image, words], layers.Dense(CLASSES)(x))


def decoder(size: int) -> keras.Model:
    """Return a causal decoder with three blocks."""
    tokens = keras.Input((size, WIDTH))
    x = Positions()(tokens)
    for _ in range(3):
        x = block(x, causal=True)
    return keras.Model(tokens, layers.Dense(CLASSES)(layers.LayerNormalization()(x)))


def window_attention(size: int) -> keras.Model:
    """Return a segmentation network with attention in windows, the second time shifted by half of a window."""
    image = keras.Input((size, size, 3))
    x = layers.Conv2D(WIDTH, 2, 2)(image)
    for shift in (0, WINDOW // 2):
        x = _in_windows(ops.roll(x, (-shift, -shift), (1, 2)) if shift else x)
        x = ops.roll(x, (shift, shift), (1, 2)) if shift else x
    return keras.Model(image, layers.Conv2D(CLASSES, 1)(layers.Conv2DTranspose(WIDTH, 2, 2)(x)))


def _in_windows(x: Any) -> Any:
    """Return the result of a transformer block for each window of an image."""
    height, width, channels = x.shape[1:]
    x = ops.reshape(x, (-1, height // WINDOW, WINDOW, width // WINDOW, WINDOW, channels))
    x = block(ops.reshape(ops.transpose(x, (0, 1, 3, 2, 4, 5)), (-1, WINDOW * WINDOW, channels)))
    x = ops.reshape(x, (-1, height // WINDOW, width // WINDOW, WINDOW, WINDOW, channels))
    return ops.reshape(ops.transpose(x, (0, 1, 3, 2, 4, 5)), (-1, height, width, channels))


NETS: dict[str, tuple[Callable[[int], keras.Model], int]] = {
    "unet": (unet, 4),
    "head": (head, 1),
    "attention": (attention, 1),
    "language-model": (language_model, 1),
    "vision-transformer": (vision_transformer, BATCH),
    "class-token": (lambda size: vision_transformer(size, class_token=True), BATCH),
    "transformer-unet": (transformer_unet, BATCH),
    "reduced-attention": (reduced_attention, BATCH),
    "convolutions-of-tokens": (convolutions_of_tokens, BATCH),
    "tower-and-attention": (tower_and_attention, BATCH),
    "captioner": (captioner, BATCH),
    "decoder": (decoder, BATCH),
    "window-attention": (window_attention, BATCH),
}
"""Function from a size to a network, and the batch, by name."""
REAL_TARGETS = ("attention", "tower-and-attention")
"""Networks that are trained to return numbers. All others return scores of classes."""


def training_step(net: str, size: int) -> tuple[Any, list[tf.Tensor]]:
    """Return a training step, a `tf.function`, and a batch of noise for it.

    Args:
        net: Name of the network.
        size: Height and width of an image, or tokens of a sequence.
    """
    keras.utils.set_random_seed(0)
    build, batch = NETS[net]
    model = build(size)
    random = np.random.default_rng(0)

    def noise(tensor: Any) -> np.ndarray:
        shape = (batch, *tensor.shape[1:])
        return random.integers(VOCABULARY, size=shape) if tensor.dtype == "int32" else random.normal(size=shape)

    arrays = [(noise(tensor), tensor.dtype) for tensor in model.inputs]
    shape = (batch, *model.output.shape[1:])
    is_real = net in REAL_TARGETS
    arrays.append(
        (random.normal(size=shape), "float32") if is_real else (random.integers(shape[-1], size=shape[:-1]), "int32")
    )
    loss = "mse" if is_real else keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metrics = ["accuracy"] if net == "unet" else None
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, metrics=metrics, jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    tensors = [tf.constant(array, dtype) for array, dtype in arrays]

    @tf.function(input_signature=[tf.TensorSpec(t.shape, t.dtype) for t in tensors], autograph=False)
    def step(*arguments: tf.Tensor) -> Any:
        *inputs, targets = arguments
        return model.train_step((inputs if len(inputs) > 1 else inputs[0], targets))

    return step, tensors
