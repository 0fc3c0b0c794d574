"""Attention in windows, in tiles: all that three steps compute, in double precision."""

import itertools

import keras
import numpy as np
import pytest
from equivalence import TOLERANCE, error, model_step, noise_step
from keras import layers, ops

import tflms_sft
from rewriters.canonicalize.canonicalize import read_canonical

pytestmark = pytest.mark.usefixtures("double_precision")

WIDTH, HEADS, CLASSES, BATCH, STEPS = 8, 2, 3, 2, 3


class WindowAttention(layers.Layer):
    """Attention of the pixels of a window, with a learned bias for each relative position, as in Swin Transformers."""

    def __init__(self, window, mask=None, dropout=0.0):
        super().__init__()
        self.window, self.mask = window, mask
        self.dropout = layers.Dropout(dropout)

    def build(self, shape):
        channels = shape[-1]
        self.projections = layers.Dense(3 * channels)
        self.output_projection = layers.Dense(channels)
        self.projections.build(shape)
        self.output_projection.build(shape)
        places = np.array([*itertools.product(*map(range, self.window))])
        distances = places[:, None] - places[None] + np.array(self.window) - 1
        sizes = [2 * size - 1 for size in self.window]
        self.index = np.ravel_multi_index(np.moveaxis(distances, -1, 0), sizes).astype("int32")
        self.table = self.add_weight(shape=(int(np.prod(sizes)), HEADS), initializer="normal")

    def call(self, x, training=None):
        pixels, channels = x.shape[1:]
        joined = ops.reshape(self.projections(x), (-1, pixels, 3, HEADS, channels // HEADS))
        joined = ops.transpose(joined, (2, 0, 3, 1, 4))
        queries, keys, values = joined[0], joined[1], joined[2]
        scores = ops.matmul(queries * (channels // HEADS) ** -0.5, ops.transpose(keys, (0, 1, 3, 2)))
        bias = ops.reshape(ops.take(self.table, self.index.reshape(-1), axis=0), (pixels, pixels, HEADS))
        scores = scores + ops.transpose(bias, (2, 0, 1))[None]
        if self.mask is not None:
            scores = ops.reshape(scores, (-1, len(self.mask), HEADS, pixels, pixels))
            scores = scores + ops.cast(self.mask[None, :, None], scores.dtype)
            scores = ops.reshape(scores, (-1, HEADS, pixels, pixels))
        y = ops.matmul(self.dropout(ops.softmax(scores), training=training), values)
        return self.output_projection(ops.reshape(ops.transpose(y, (0, 2, 1, 3)), (-1, pixels, channels)))


class JoinedHeads(layers.Layer):
    """Attention whose heads are joined with the batch."""

    def build(self, shape):
        self.projections = [layers.Dense(shape[-1]) for _ in range(3)]
        for projection in self.projections:
            projection.build(shape)

    def call(self, x):
        pixels, channels = x.shape[1:]
        size = channels // HEADS

        def heads_of(projection):
            heads = ops.transpose(ops.reshape(projection(x), (-1, pixels, HEADS, size)), (0, 2, 1, 3))
            return ops.reshape(heads, (-1, pixels, size))

        queries, keys, values = map(heads_of, self.projections)
        y = ops.matmul(ops.softmax(ops.matmul(queries, ops.transpose(keys, (0, 2, 1)))), values)
        y = ops.transpose(ops.reshape(y, (-1, HEADS, pixels, size)), (0, 2, 1, 3))
        return ops.reshape(y, (-1, pixels, channels))


def order_of_windows(axes):
    """Return the order that brings the dimensions of windows before those of their pixels, and its inverse."""
    order = (0, *range(1, 2 * axes, 2), *range(2, 2 * axes + 1, 2), 2 * axes + 1)
    return order, tuple(int(dim) for dim in np.argsort(order))


def in_windows(x, window, layer):
    """Return the results of a layer for the windows of an image or volume."""
    *sizes, channels = x.shape[1:]
    counts = [size // side for size, side in zip(sizes, window, strict=True)]
    order, inverse = order_of_windows(len(sizes))
    pairs = itertools.chain(*zip(counts, window, strict=True))
    x = ops.transpose(ops.reshape(x, (-1, *pairs, channels)), order)
    x = layer(ops.reshape(x, (-1, int(np.prod(window)), channels)))
    return ops.reshape(ops.transpose(ops.reshape(x, (-1, *counts, *window, channels)), inverse), (-1, *sizes, channels))


def mask_of(sizes, window, shift):
    """Return the mask that keeps pixels apart which a shift brought into the same window."""
    regions = np.zeros(sizes)
    parts = [(slice(-side), slice(-side, -shift), slice(-shift, None)) for side in window]
    for number, places in enumerate(itertools.product(*parts)):
        regions[places] = number
    counts = [size // side for size, side in zip(sizes, window, strict=True)]
    regions = regions.reshape([1, *itertools.chain(*zip(counts, window, strict=True)), 1])
    regions = regions.transpose(order_of_windows(len(sizes))[0]).reshape(-1, int(np.prod(window)))
    return np.where(regions[:, None] != regions[:, :, None], -100.0, 0.0)


def block(x, window, shift=0, dropout=0.0):
    """Return a block of a Swin Transformer."""
    axes = tuple(range(1, len(window) + 1))
    mask = mask_of(x.shape[1:-1], window, shift) if shift else None
    y = layers.LayerNormalization()(x)
    y = ops.roll(y, (-shift,) * len(axes), axes) if shift else y
    y = in_windows(y, window, WindowAttention(window, mask, dropout))
    x = x + (ops.roll(y, (shift,) * len(axes), axes) if shift else y)
    y = layers.Dense(2 * x.shape[-1], activation="gelu")(layers.LayerNormalization()(x))
    return x + layers.Dense(x.shape[-1])(y)


def swin_unet(dropout=0.0):
    """Return a U-Net of Swin blocks with one level below the top."""
    image = keras.Input((48, 40, 3))
    x = skip = block(block(layers.Conv2D(WIDTH, 2, 2)(image), (4, 4), 0, dropout), (4, 4), 2, dropout)
    x = ops.concatenate([x[:, i::2, j::2] for i in range(2) for j in range(2)], -1)
    x = layers.Dense(2 * WIDTH, use_bias=False)(layers.LayerNormalization()(x))
    x = block(x, (4, 5))
    x = layers.Concatenate()([layers.Conv2DTranspose(WIDTH, 2, 2)(x), skip])
    return keras.Model(image, layers.Conv2D(CLASSES, 1)(layers.Conv2DTranspose(WIDTH, 2, 2)(x)))


def swin_volumes():
    volume = keras.Input((16, 16, 8, 1))
    x = layers.Conv3D(WIDTH, 2, 2)(volume)
    x = block(block(x, (2, 4, 2)), (2, 4, 2), 1)
    return keras.Model(volume, layers.Conv3D(CLASSES, 1)(layers.Conv3DTranspose(WIDTH, 2, 2)(x)))


def multi_head_attention():
    """Return a network whose whole transformer block runs on windows."""

    def block_of_window(x):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(y, y)
        return x + layers.Dense(WIDTH)(layers.Dense(2 * WIDTH, activation="gelu")(layers.LayerNormalization()(x)))

    image = keras.Input((48, 40, 3))
    x = in_windows(layers.Conv2D(WIDTH, 2, 2)(image), (6, 5), block_of_window)
    x = ops.roll(in_windows(ops.roll(ops.roll(x, -3, 1), -2, 2), (6, 5), block_of_window), (3, 2), (1, 2))
    return keras.Model(image, layers.Conv2D(CLASSES, 1)(layers.Conv2DTranspose(WIDTH, 2, 2)(x)))


def joined_heads():
    image = keras.Input((48, 40, 3))
    x = layers.Conv2D(WIDTH, 2, 2)(image)
    x = x + in_windows(x, (4, 5), JoinedHeads())
    return keras.Model(image, layers.Conv2D(CLASSES, 1)(layers.Conv2DTranspose(WIDTH, 2, 2)(x)))


NETS = {
    "Swin U-Net": swin_unet,
    "dropout": lambda: swin_unet(0.3),
    "volumes": swin_volumes,
    "multi-head attention": multi_head_attention,
    "heads joined with the batch": joined_heads,
}


def net_step(name, known_batch=True):
    """Return three training steps of a network."""
    keras.utils.set_random_seed(0)
    return noise_step(NETS[name](), CLASSES, BATCH, STEPS, known_batch)


def differing(step, params):
    """Return the results that differ in the rewritten step, with their errors."""
    rewritten = tflms_sft.rewrite(step.function, params, *step.specs)
    left = str(rewritten.plan).partition("not rewritten:")[2]
    assert rewritten.plan.segments and "number of images" not in left and "Einsum" not in left, left
    outside = [op.name for op in rewritten.concrete_function.graph.get_operations() if op.type == "Roll"]
    assert not outside, "tiles take their rows themselves, in gradients, too"
    want, got = step.run(step.concrete_fn), step.run(rewritten)
    errors = {name: error(got[name], want[name]) for name in want}
    return {name: value for name, value in errors.items() if not value <= TOLERANCE}


@pytest.mark.parametrize("name", NETS)
def test_a_plan_within_a_budget_gives_equal_results(name):
    step = net_step(name)
    original = tflms_sft.rewrite(step.function, tflms_sft.AutoParams("1GiB"), *step.specs).plan.original
    budget = int(0.4 * original.peak_bytes)
    assert not differing(step, tflms_sft.AutoParams(budget, swap=False))


@pytest.mark.parametrize("name", NETS)
def test_tiles_with_an_unknown_batch_give_equal_results(name):
    tiles = (2, 2, 1) if name == "volumes" else (3, 2)
    assert not differing(net_step(name, known_batch=False), tflms_sft.SFTParams(num_tiles=tiles))


def test_frames_that_are_joined_with_the_batch_stay():
    """A convolution works on frames, so that ops between convolutions keep the shape of frames, too."""
    frames = keras.Input((5, 16, 16, 3))
    x = ops.reshape(frames, (-1, 16, 16, 3))
    x = layers.Conv2D(4, 3, padding="same")(ops.relu(layers.Conv2D(4, 3, padding="same")(x)))
    model = keras.Model(frames, ops.reshape(x, (-1, 5, 16, 16, 4)))
    batches = [(np.ones((BATCH, 5, 16, 16, 3)), np.ones((BATCH, 5, 16, 16, 4)))]
    step = model_step(model, batches, True, {"optimizer": "sgd", "loss": "mse", "jit_compile": False})
    graph = read_canonical(step.concrete_fn)
    (relu,) = (node for node in graph.nodes.values() if node.op == "Relu")
    assert relu.out().shape == (5 * BATCH, 16, 16, 4)
