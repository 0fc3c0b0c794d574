"""Attention in tiles of queries: losses, gradients and variables after three steps equal the original."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import TOLERANCE, Step, error, model_step
from keras import layers

import tflms_sft

pytestmark = pytest.mark.usefixtures("double_precision")

SLOW = pytest.mark.slow
LENGTH, WIDTH, CLASSES, BATCH, STEPS = 13, 8, 5, 2, 3


def multi_head(x, **options):
    return layers.MultiHeadAttention(2, 4)(x, x, **options)


def grouped(x):
    return layers.GroupQueryAttention(4, 4, 2)(x, x, use_causal_mask=True)


def dot(x):
    return layers.Attention()([layers.Dense(WIDTH)(x), layers.Dense(WIDTH)(x), layers.Dense(WIDTH)(x)])


def scaled_dot(x):
    query, value = layers.Dense(WIDTH)(x), layers.Dense(WIDTH)(x)
    return layers.Attention(use_scale=True)([query, value], use_causal_mask=True)


def additive(x):
    return layers.AdditiveAttention()([layers.Dense(WIDTH)(x), layers.Dense(WIDTH)(x)])


def shorter_keys(x):
    """Attend to pairs of tokens."""
    pairs = layers.AveragePooling1D(2, padding="same")(x)
    return layers.MultiHeadAttention(2, 4)(x, pairs)


def written_out(x):
    """Compute attention with products of matrices, heads in front."""
    query, key, value = (
        keras.ops.transpose(keras.ops.reshape(layers.Dense(WIDTH)(x), (-1, LENGTH, 2, WIDTH // 2)), (0, 2, 1, 3))
        for _ in range(3)
    )
    scores = keras.ops.softmax(keras.ops.matmul(query, keras.ops.transpose(key, (0, 1, 3, 2))) / 2.0)
    heads = keras.ops.transpose(keras.ops.matmul(scores, value), (0, 2, 1, 3))
    return layers.Dense(WIDTH)(keras.ops.reshape(heads, (-1, LENGTH, WIDTH)))


def soft_capped(x):
    """Cap the scores, as some language models do."""
    query, key, value = (layers.Dense(WIDTH)(x) for _ in range(3))
    scores = keras.ops.einsum("btd,bsd->bts", query, key)
    scores = 5.0 * keras.ops.tanh(scores / 5.0)
    return keras.ops.einsum("bts,bsd->btd", keras.ops.softmax(scores), value)


def biased(x):
    """Add a learned bias for each distance between query and key."""
    query, key, value = (layers.Dense(WIDTH)(x) for _ in range(3))
    table = layers.Embedding(2 * LENGTH, 1)
    distances = np.arange(LENGTH)[:, None] - np.arange(LENGTH)[None, :] + LENGTH
    bias = keras.ops.squeeze(table(keras.ops.convert_to_tensor(distances[None])), -1)
    scores = keras.ops.einsum("btd,bsd->bts", query, key) + bias
    return keras.ops.einsum("bts,bsd->btd", keras.ops.softmax(scores), value)


def masked_by_matrix(x):
    """Hide later tokens by a matrix without axes of images and heads."""
    query, key, value = (keras.ops.reshape(layers.Dense(WIDTH)(x), (-1, LENGTH, 2, WIDTH // 2)) for _ in range(3))
    scores = keras.ops.einsum("bqhd,bkhd->bhqk", query, key)
    positions = keras.ops.arange(LENGTH)
    distances = keras.ops.cast(positions[:, None] - positions[None], scores.dtype)
    scores = keras.ops.where(positions[:, None] >= positions[None], scores - 0.1 * distances, -1e9)
    heads = keras.ops.einsum("bhqk,bkhd->bqhd", keras.ops.softmax(scores), value)
    return layers.Dense(WIDTH)(keras.ops.reshape(heads, (-1, LENGTH, WIDTH)))


class ScoreBias(layers.Layer):
    """Adds a learned number for each head, query and key."""

    def build(self, shape):
        self.bias = self.add_weight(shape=shape[1:], initializer="normal")

    def call(self, scores):
        return scores + self.bias


def with_learned_bias(x):
    """Add a learned matrix of queries and keys, whose gradient sums over the batch."""
    query, key, value = (keras.ops.reshape(layers.Dense(WIDTH)(x), (-1, LENGTH, 2, WIDTH // 2)) for _ in range(3))
    scores = ScoreBias()(keras.ops.einsum("bqhd,bkhd->bhqk", query, key))
    heads = keras.ops.einsum("bhqk,bkhd->bqhd", keras.ops.softmax(scores), value)
    return layers.Dense(WIDTH)(keras.ops.reshape(heads, (-1, LENGTH, WIDTH)))


def with_dropout(x):
    """Drop probabilities, and numbers of tokens."""
    return layers.Dropout(0.3, seed=2)(layers.MultiHeadAttention(2, 4, dropout=0.4, seed=1)(x, x))


def with_noise(x):
    """Add noise to tokens, and multiply them by noise."""
    return multi_head(layers.GaussianDropout(0.3, seed=2)(layers.GaussianNoise(0.3, seed=1)(x)))


def between_pixels(image):
    """Attend from each pixel to all pixels."""
    return layers.MultiHeadAttention(2, 4, attention_axes=(1, 2))(image, image)


def between_pixels_written_out(image):
    """Attend from each pixel to all pixels, with axes of height and width for both."""
    query, key, value = (layers.Conv2D(4, 1)(image) for _ in range(3))
    scores = keras.ops.einsum("bhwc,bxyc->bhwxy", query, key)
    shape = scores.shape
    weights = keras.ops.softmax(keras.ops.reshape(scores, (BATCH, *shape[1:3], -1)))
    weights = keras.ops.reshape(weights, (BATCH, *shape[1:]))
    return layers.Conv2D(WIDTH, 1)(keras.ops.einsum("bhwxy,bxyc->bhwc", weights, value))


ATTENTION = {
    "noise": with_noise,
    "dropout": with_dropout,
    "multi head": multi_head,
    "causal": lambda x: multi_head(x, use_causal_mask=True),
    "grouped": grouped,
    "dot": dot,
    "scaled dot": scaled_dot,
    "additive": additive,
    "shorter keys": shorter_keys,
    "written out": written_out,
    "soft capped": soft_capped,
    "biased": biased,
    "masked by matrix": masked_by_matrix,
    "learned bias": with_learned_bias,
}


def transformer(attend, masked):
    """Return class scores per token of a block with attention and a multilayer perceptron."""
    tokens = keras.Input((LENGTH, WIDTH))
    x = layers.Masking()(tokens) if masked else tokens
    x = layers.Add()([x, attend(layers.LayerNormalization()(x))])
    y = layers.Dense(2 * WIDTH, activation="gelu")(layers.LayerNormalization()(x))
    x = layers.Add()([x, layers.Dense(WIDTH)(y)])
    return keras.Model(tokens, layers.Dense(CLASSES)(x))


def attention_step(attend, known_batch=True, masked=False, batch=BATCH, **options):
    """Return three training steps of a transformer; every third token is masked."""
    keras.utils.set_random_seed(0)
    model = transformer(attend, masked)
    random = np.random.default_rng(0)
    batches = []
    for _ in range(STEPS):
        tokens = random.normal(size=(batch, LENGTH, WIDTH))
        tokens[:, 1::3] *= not masked
        batches.append((tokens, random.integers(CLASSES, size=(batch, LENGTH)).astype("int32")))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    arguments = {
        "optimizer": keras.optimizers.SGD(0.1, momentum=0.9, **options),
        "loss": loss,
        "metrics": ["accuracy"],
        "jit_compile": False,
    }
    return model_step(model, batches, known_batch, arguments)


def differing(step, params, is_tiled=True):
    """Return the results that differ in the rewritten step, with their errors."""
    rewritten = tflms_sft.rewrite(step.function, params, *step.specs)
    left = str(rewritten.plan).partition("not rewritten:")[2]
    assert not is_tiled or (rewritten.plan.segments and "Einsum" not in left and "MatMul" not in left)
    want, got = step.run(step.concrete_fn), step.run(rewritten)
    errors = {name: error(got[name], want[name]) for name in want}
    return {name: value for name, value in errors.items() if not value <= TOLERANCE}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_in_tiles_equals_the_original(name):
    assert not differing(attention_step(ATTENTION[name]), tflms_sft.SFTParams(num_tiles=(1, 4)))


@pytest.mark.parametrize("attend", [between_pixels, between_pixels_written_out])
def test_attention_between_pixels_equals_the_original(attend):
    keras.utils.set_random_seed(0)
    image = keras.Input((7, 6, WIDTH), batch_size=BATCH)
    x = layers.Conv2D(WIDTH, 3, padding="same", activation="relu")(image)
    model = keras.Model(image, layers.Conv2D(CLASSES, 3, padding="same")(x + attend(x)))
    random = np.random.default_rng(0)
    sizes = (BATCH, *image.shape[1:])
    batches = [(random.normal(size=sizes), random.integers(CLASSES, size=sizes[:-1])) for _ in range(STEPS)]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = model_step(
        model, batches, True, {"optimizer": keras.optimizers.SGD(0.1, momentum=0.9), "loss": loss, "jit_compile": False}
    )
    assert not differing(step, tflms_sft.SFTParams(num_tiles=(3, 1)))
    assert not differing(step, tflms_sft.SFTParams(num_tiles=(7, 1)))


@pytest.mark.parametrize("name", [name if name == "dropout" else pytest.param(name, marks=SLOW) for name in ATTENTION])
def test_tiles_of_one_token_and_an_unknown_batch_equal_the_original(name):
    step = attention_step(ATTENTION[name], known_batch=False)
    assert not differing(step, tflms_sft.SFTParams(num_tiles=(1, LENGTH)))


def test_padding_mask_and_causal_mask():
    step = attention_step(ATTENTION["causal"], masked=True)
    assert not differing(step, tflms_sft.SFTParams(num_tiles=(1, 4)))


def test_gradients_of_sequences_of_several_lengths_are_accumulated():
    step = attention_step(ATTENTION["causal"], masked=True, gradient_accumulation_steps=2)
    assert not differing(step, tflms_sft.SFTParams(num_tiles=(1, 4)))


def test_more_tiles_than_tokens_become_one_for_each_token():
    step = attention_step(ATTENTION["causal"])
    params = tflms_sft.SFTParams(num_tiles=(1, LENGTH + 1))
    (segment,) = tflms_sft.rewrite(step.function, params, *step.specs).plan.segments
    assert segment.num_tiles == (1, 1, LENGTH) and any("too few rows" in note for note in segment.notes)
    assert not differing(step, params)


@pytest.mark.parametrize("name", ["causal", "dropout"])
def test_images_and_tokens_are_split(name):
    step = attention_step(ATTENTION[name])
    assert not differing(step, tflms_sft.SFTParams(num_tiles={"batch": 2, "length": 3}))


@pytest.mark.parametrize("name", ["causal", "dropout"])
def test_a_batch_of_one_image(name):
    assert not differing(attention_step(ATTENTION[name], batch=1), tflms_sft.SFTParams(num_tiles=(1, 4)))


def test_dropout_is_split_along_the_batch_alone():
    assert not differing(
        attention_step(with_dropout, batch=3), tflms_sft.SFTParams(num_tiles={"batch": 2, "length": 1})
    )


@pytest.fixture
def policy(request):
    """Compute in the types of a policy, with weights of 32 bits."""
    before = keras.config.dtype_policy()
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy(request.param)
    yield
    keras.config.set_dtype_policy(before)


def results(name, params=None):
    """Return the results of three steps, of the original ones without parameters."""
    step = attention_step(ATTENTION[name])
    if params is None:
        return list(step.run(step.concrete_fn).values())
    rewritten = tflms_sft.rewrite(step.function, params, *step.specs)
    assert rewritten.plan.segments
    return list(step.run(rewritten).values())


@pytest.mark.parametrize("policy", ["float32"], indirect=True)
def test_single_precision_draws_the_same_numbers(policy):
    """A count of the generator gives four numbers of 32 bits, and two of 64 bits."""
    want, got = results("dropout"), results("dropout", tflms_sft.SFTParams(num_tiles=(1, 4)))
    assert max(map(error, got, want)) < 1e-4


@pytest.mark.parametrize("policy", ["mixed_bfloat16"], indirect=True)
def test_half_precision_is_as_near_to_single_precision_as_the_original(policy):
    all_in_tiles = tflms_sft.SFTParams(num_tiles=(1, 4), memory_capacity=1)
    want, got = results("causal"), results("causal", all_in_tiles)
    keras.config.set_dtype_policy("float32")
    exact = results("causal")
    errors = [max(map(error, found, exact)) for found in (want, got)]
    assert 1e-4 < errors[1] < 2 * errors[0], errors


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_hand_written_steps_run_in_tiles(known):
    """Rows are gathered from a variable, and scores of words are a product of matrices."""
    keras.config.set_floatx("float64")
    random = np.random.default_rng(0)
    table, heads, scores = (tf.Variable(random.normal(size=size)) for size in ((20, 8), (8, 24), (8, 20)))
    words = random.integers(20, size=(BATCH, LENGTH))

    def step(words, targets):
        with tf.GradientTape() as tape:
            query, key, value = tf.split(tf.matmul(tf.gather(table, words), heads), 3, axis=-1)
            weights = tf.nn.softmax(tf.matmul(query, key, transpose_b=True))
            logits = tf.matmul(tf.matmul(weights, value), scores)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits))
        variables = [table, heads, scores]
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        return loss

    spec = tf.TensorSpec((BATCH if known else None, LENGTH), words.dtype)
    function = tf.function(step, autograph=False)
    traced = Step(function.get_concrete_function(spec, spec), [table, heads, scores], [(words, words)] * 2, function)
    rewritten = tflms_sft.rewrite(traced.concrete_fn, tflms_sft.SFTParams(num_tiles=(1, 4)))
    largest = rewritten.plan.predicted.largest[0][1]
    assert largest < BATCH * LENGTH * 20 * 8  # Scores of all words and tokens.
    want, got = traced.run(traced.concrete_fn), traced.run(rewritten.concrete_function)
    assert max(error(got[name], want[name]) for name in want) < TOLERANCE


def test_unknown_length_is_refused_with_a_budget():
    function = attention_step(multi_head).function
    spec = tf.TensorSpec((BATCH, None, WIDTH), tf.float64), tf.TensorSpec((BATCH, None), tf.int32)
    with pytest.raises(tflms_sft.RewriteError, match=r"`data_0:0` is unknown: \(2, None, 8\).*each length has a plan"):
        tflms_sft.rewrite(function, tflms_sft.AutoParams("1GiB"), *spec)


def test_gradient_of_a_learned_bias_is_summed_over_the_batch_in_the_loop():
    step, batch = attention_step(with_learned_bias, batch=16), 16
    plan = tflms_sft.rewrite(step.function, tflms_sft.SFTParams(num_tiles=(1, 13)), *step.specs).plan
    scores_bytes = batch * 2 * LENGTH * LENGTH * 8
    assert plan.predicted.largest[0][1] < scores_bytes


def test_rows_of_a_variable_are_gathered_and_updated():
    """An update of rows has the shape of their indices, and not that of the variable."""
    keras.config.set_floatx("float64")
    random = np.random.default_rng(0)
    table, heads = tf.Variable(random.normal(size=(20, 8))), tf.Variable(random.normal(size=(8, 8)))
    words = random.integers(20, size=(BATCH, LENGTH))

    def step(words):
        with tf.GradientTape() as tape:
            rows = tf.gather(table, words)
            query = tf.matmul(rows, heads)
            loss = tf.reduce_mean(tf.square(tf.matmul(tf.nn.softmax(tf.matmul(query, rows, transpose_b=True)), rows)))
        gradients = tape.gradient(loss, [table, heads])
        table.scatter_sub(tf.IndexedSlices(0.1 * gradients[0].values, gradients[0].indices))
        heads.assign_sub(0.1 * gradients[1])
        return loss

    function = tf.function(step, autograph=False)
    spec = tf.TensorSpec((BATCH, LENGTH), words.dtype)
    traced = Step(function.get_concrete_function(spec), [table, heads], [(words,)] * 2, function)
    rewritten = tflms_sft.rewrite(traced.concrete_fn, tflms_sft.SFTParams(num_tiles=(1, 4)))
    want, got = traced.run(traced.concrete_fn), traced.run(rewritten.concrete_function)
    assert max(error(got[name], want[name]) for name in want) < TOLERANCE
