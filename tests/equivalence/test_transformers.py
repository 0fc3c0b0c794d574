"""Networks of convolutions and attention in tiles: all that three steps compute, in double precision."""

import keras
import numpy as np
import pytest
from equivalence import TOLERANCE, error, noise_step
from keras import layers, ops

import tflms_sft

pytestmark = pytest.mark.usefixtures("double_precision")

WIDTH, CLASSES, BATCH, STEPS = 8, 3, 2, 3


class Positions(layers.Layer):
    """Adds a learned vector for each position."""

    def build(self, shape):
        self.table = self.add_weight(shape=(1, *shape[1:]), initializer="normal")

    def call(self, x):
        return x + self.table


class ClassToken(layers.Layer):
    """Puts a learned token in front of a sequence."""

    def build(self, shape):
        self.token = self.add_weight(shape=(1, 1, shape[2]), initializer="normal")

    def call(self, x):
        return ops.concatenate([ops.broadcast_to(self.token, (ops.shape(x)[0], 1, x.shape[2])), x], 1)


def block(x, memory=None, causal=False):
    """Return a transformer block; with a memory, queries attend to it."""
    y = layers.LayerNormalization()(x)
    attention = layers.MultiHeadAttention(2, WIDTH // 2)
    x = layers.Add()([x, attention(y, y if memory is None else memory, use_causal_mask=causal)])
    y = layers.Dense(2 * WIDTH, activation="gelu")(layers.LayerNormalization()(x))
    return layers.Add()([x, layers.Dense(WIDTH)(y)])


class GroupedAttention(layers.Layer):
    """Attention as in Gemma: groups of heads share keys, rotary positions, a soft cap, and a sliding causal window."""

    groups, heads, size, window, cap = 2, 2, 4, 11, 5.0

    def build(self, shape):
        width = self.groups * self.size
        self.queries, self.output_projection = layers.Dense(self.heads * width), layers.Dense(shape[-1])
        self.keys_and_values = layers.Dense(2 * width)
        self.queries.build(shape)
        self.keys_and_values.build(shape)
        self.output_projection.build((*shape[:-1], self.heads * width))

    def rotated(self, x):
        positions = ops.arange(x.shape[1], dtype=x.dtype)[:, None] / ops.cast(2.0 ** np.arange(self.size // 2), x.dtype)
        sine, cosine = (ops.reshape(f(positions), (1, -1, *[1] * (len(x.shape) - 3), 2)) for f in (ops.sin, ops.cos))
        first, second = ops.split(x, 2, -1)
        return ops.concatenate([first * cosine - second * sine, second * cosine + first * sine], -1)

    def call(self, x):
        length = x.shape[1]
        queries = ops.reshape(self.queries(x), (-1, length, self.groups, self.heads, self.size))
        both = ops.reshape(self.keys_and_values(x), (-1, length, 2, self.groups, self.size))
        queries, keys = self.rotated(queries), self.rotated(both[:, :, 0])
        scores = self.cap * ops.tanh(ops.einsum("btkgh,bskh->bkgts", queries, keys) / (2.0 * self.cap))
        distance = np.arange(length)[:, None] - np.arange(length)
        mask = (distance >= 0) & (distance < self.window)
        weights = ops.softmax(ops.where(mask, scores, -1e9))
        y = ops.einsum("bkgts,bskh->btkgh", weights, both[:, :, 1])
        return self.output_projection(ops.reshape(y, (-1, length, self.groups * self.heads * self.size)))


def tokens_of(image, patch):
    return layers.Reshape((-1, WIDTH))(layers.Conv2D(WIDTH, patch, patch)(image))


def vision_transformer(class_token):
    image = keras.Input((80, 96, 3))
    x = tokens_of(image, 4)
    x = Positions()(ClassToken()(x) if class_token else x)
    x = layers.LayerNormalization()(block(block(x)))
    pooled = x[:, 0] if class_token else layers.GlobalAveragePooling1D()(x)
    return keras.Model(image, layers.Dense(CLASSES)(pooled))


def transformer_unet():
    """Return a U-Net with attention at its bottom."""
    image = keras.Input((96, 96, 3))
    skip = layers.Conv2D(WIDTH, 3, padding="same", activation="relu")(image)
    x = layers.Reshape((24, 24, WIDTH))(block(Positions()(tokens_of(skip, 4))))
    x = layers.Concatenate()([layers.Conv2DTranspose(WIDTH, 4, 4)(x), skip])
    return keras.Model(image, layers.Conv2D(CLASSES, 1)(layers.Conv2D(WIDTH, 3, padding="same")(x)))


def reduced_attention():
    """Return a segmentation network whose keys are one for four tokens, with a depthwise convolution of tokens."""
    image = keras.Input((96, 96, 3))
    x = layers.Conv2D(WIDTH, 7, 4, padding="same")(image)
    tokens = layers.Reshape((-1, WIDTH))(x)
    y = layers.LayerNormalization()(tokens)
    keys = tokens_of(layers.Reshape((24, 24, WIDTH))(y), 2)
    tokens = layers.Add()([tokens, layers.MultiHeadAttention(2, WIDTH // 2)(y, layers.LayerNormalization()(keys))])
    y = layers.Reshape((24, 24, WIDTH))(layers.Dense(WIDTH)(layers.LayerNormalization()(tokens)))
    y = layers.Activation("gelu")(layers.DepthwiseConv2D(3, padding="same")(y))
    tokens = layers.Add()([tokens, layers.Dense(WIDTH)(layers.Reshape((-1, WIDTH))(y))])
    x = layers.UpSampling2D(4, interpolation="bilinear")(layers.Reshape((24, 24, WIDTH))(tokens))
    return keras.Model(image, layers.Conv2D(CLASSES, 1)(x))


def convolutions_of_tokens():
    """Return attention and a gated depthwise convolution, as for speech."""
    tokens = keras.Input((301, WIDTH))
    x = block(tokens)
    y = layers.Conv1D(2 * WIDTH, 1)(layers.LayerNormalization()(x))
    value, gate = ops.split(y, 2, -1)
    y = layers.DepthwiseConv1D(5, padding="same")(value * ops.sigmoid(gate))
    y = layers.Conv1D(WIDTH, 1)(layers.Activation("silu")(layers.LayerNormalization()(y)))
    return keras.Model(tokens, layers.Dense(CLASSES)(layers.Add()([x, y])))


def tower_and_attention():
    """Return convolutions with pools, then attention, as for genomes; a positive number per class and position."""
    x = sequence = keras.Input((256, 4))
    for _ in range(2):
        x = layers.MaxPooling1D(2)(layers.Conv1D(WIDTH, 5, padding="same", activation="gelu")(x))
    x = block(block(Positions()(x)))
    return keras.Model(sequence, layers.Dense(CLASSES, activation="softplus")(x))


def captioner():
    """Return words that attend to the tokens of an image."""
    image, words = keras.Input((40, 32, 3)), keras.Input((37, WIDTH))
    x = block(block(words, causal=True), memory=block(tokens_of(image, 4)))
    return keras.Model([image, words], layers.Dense(CLASSES)(x))


def language_model():
    x = tokens = keras.Input((37, WIDTH))
    x = Positions()(x)
    for _ in range(3):
        x = block(x, causal=True)
    return keras.Model(tokens, layers.Dense(CLASSES)(layers.LayerNormalization()(x)))


def grouped_heads():
    """Return a decoder of words, with tied embeddings, root mean square norms and gated perceptrons."""
    tokens = keras.Input((37,), dtype="int32")
    embedding = layers.Embedding(CLASSES, WIDTH)
    x = embedding(tokens) * WIDTH**0.5
    for _ in range(2):
        x = x + GroupedAttention()(layers.RMSNormalization()(x))
        y = layers.RMSNormalization()(x)
        x = x + layers.Dense(WIDTH)(layers.Dense(2 * WIDTH, "gelu")(y) * layers.Dense(2 * WIDTH)(y))
    x = layers.RMSNormalization()(x)
    return keras.Model(tokens, ops.matmul(x, ops.transpose(embedding.embeddings)))


NETS = {
    "vision transformer": lambda: vision_transformer(class_token=False),
    "class token": lambda: vision_transformer(class_token=True),
    "transformer unet": transformer_unet,
    "reduced attention": reduced_attention,
    "convolutions of tokens": convolutions_of_tokens,
    "tower and attention": tower_and_attention,
    "captioner": captioner,
    "language model": language_model,
    "grouped heads": grouped_heads,
}


def net_step(name, known_batch=True):
    """Return three training steps of a network, with a class or a number for each output."""
    keras.utils.set_random_seed(0)
    return noise_step(NETS[name](), CLASSES, BATCH, STEPS, known_batch, is_real=name.startswith("tower"))


def differing(step, params):
    """Return the results that differ in the rewritten step, with their errors."""
    rewritten = tflms_sft.rewrite(step.function, params, *step.specs)
    left = str(rewritten.plan).partition("not rewritten:")[2]
    assert rewritten.plan.segments and "Einsum" not in left and "MatMul" not in left
    want, got = step.run(step.concrete_fn), step.run(rewritten)
    errors = {name: error(got[name], want[name]) for name in want}
    return {name: value for name, value in errors.items() if not value <= TOLERANCE}


SIBLINGS = {"class token", "convolutions of tokens", "tower and attention", "language model"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SIBLINGS else name for name in NETS]
)
def test_a_plan_within_a_budget_gives_equal_results(name):
    step = net_step(name)
    unlimited = tflms_sft.rewrite(step.function, tflms_sft.AutoParams("1GiB"), *step.specs).plan
    budget = int(0.8 * unlimited.original.peak_bytes)
    assert not differing(step, tflms_sft.AutoParams(budget))


@pytest.mark.parametrize("name", ["language model", "grouped heads", pytest.param("captioner", marks=pytest.mark.slow)])
def test_tiles_with_an_unknown_batch_give_equal_results(name):
    assert not differing(net_step(name, known_batch=False), tflms_sft.SFTParams(num_tiles=(1, 5)))


def test_each_length_has_a_plan():
    """The length of a batch is that of its longest sequence; shorter ones end with padding, which a mask removes."""
    random = np.random.default_rng(0)
    batches = [random.integers(1, 20, size=(2, length)).astype("int32") for length in (24, 31, 24)]
    for words in batches:
        words[1, -5:] = 0

    def weights_after(*callbacks):
        keras.utils.set_random_seed(0)
        words = keras.Input((None,), dtype="int32")
        x = block(layers.Embedding(20, 8, mask_zero=True)(words), causal=True)
        model = keras.Model(words, layers.Dense(20)(x))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, weighted_metrics=["accuracy"], jit_compile=False)
        for batch in batches:
            model.fit(batch, batch, batch_size=2, verbose=0, callbacks=list(callbacks))
        return [np.array(variable.numpy()) for variable in model.variables]

    callback = tflms_sft.SFT((1, 3), verbose=0)
    expected, got = weights_after(), weights_after(callback)
    assert callback.plan.segments
    assert max(error(a, b) for a, b in zip(got, expected, strict=True)) < TOLERANCE
