"""Operations on matrices of pixels: what becomes one on images, and what must not."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from canonical_functions import canonical
from equivalence import TOLERANCE, batches_of, error, model_step
from graph_rewrites import passes, step
from keras import layers

import tflms_sft
from rewriters.canonicalize.canonicalize import Canonicalization, CanonicalMode
from rewriters.canonicalize.matrices_to_images import fold_matrices_into_images
from rewriters.ir.device_detection import planned_device
from rewriters.rules.contraction import CROSS_ENTROPIES, run_per_pixel

RANDOM = np.random.RandomState(0)


def numbers(*shape):
    return tf.constant(RANDOM.normal(size=shape))


def twice(x):
    return tf.tensordot(tf.tensordot(x, tf.ones((3, 5), x.dtype), 1), tf.eye(5, dtype=x.dtype), 1)


def by_channel(x):
    return tf.reshape(tf.reshape(x, [-1, 3]) * tf.constant([1.0, 2.0, 3.0], x.dtype), [-1])


SAME = {
    "log-softmax over all pixels": lambda x: tf.nn.log_softmax(tf.reshape(x, [-1]) * 2.0),
    "softmax over classes": lambda x: tf.reshape(tf.nn.softmax(tf.reshape(x, [-1, 3])), tf.shape(x)),
    "one label for all classes": lambda x: tf.nn.softmax_cross_entropy_with_logits(x[..., :1], x),
    "labels of half the pixels": lambda x: tf.nn.softmax_cross_entropy_with_logits(x[:1], x[1:]),
    "sparse labels": lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits(tf.argmax(x, -1), x * 0.5),
    "two products": twice,
    "a weight for each channel": by_channel,
}


@pytest.mark.parametrize("what", SAME)
@pytest.mark.parametrize("known", (True, False), ids=("known", "unknown"))
def test_fold_matrices_step_computes_same_values(what, known):
    x = numbers(2, 4, 5, 3)
    function, _ = canonical(SAME[what], x, known=known)
    pairs = zip(tf.nest.flatten(function(x)), tf.nest.flatten(SAME[what](x)), strict=True)
    assert max(error(got, want) for got, want in pairs) < TOLERANCE


def weights(*shapes):
    return [tf.Variable(RANDOM.normal(size=shape)) for shape in shapes]


def transposed_labels(w, x):
    labels = tf.transpose(tf.nn.softmax(tf.nn.conv2d(x, w[2], 1, "SAME")), (0, 2, 1, 3))
    logits = tf.nn.conv2d(tf.nn.relu(tf.nn.conv2d(x, w[0], 1, "SAME")), w[1], 1, "SAME")
    return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels, logits))


def gate_by_einsum(w, x):
    x = tf.nn.relu(tf.nn.conv2d(x, w[0], 1, "SAME"))
    gate = tf.sigmoid(tf.reduce_mean(x, [1, 2], keepdims=True))
    return tf.reduce_mean(tf.sin(tf.nn.conv2d(tf.einsum("...c,...c->...c", x, gate), w[1], 1, "SAME")))


@pytest.mark.parametrize("loss_of", (transposed_labels, gate_by_einsum))
@pytest.mark.parametrize("known", (True, False), ids=("known", "unknown"))
def test_fold_matrices_images_of_different_sizes_stay_exact(loss_of, known):
    w = weights((3, 3, 2, 4), (3, 3, 4, 3), (3, 3, 2, 3))

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            loss = loss_of(w, x)
        return loss, tape.gradient(loss, w[:2])

    x = numbers(3, 12, 12, 2)
    spec = x if known else tf.TensorSpec((None, 12, 12, 2), x.dtype)
    fast = tflms_sft.rewrite(step, tflms_sft.SFTParams(num_tiles=(3, 2), memory_capacity=1), spec)
    assert fast.plan.segments
    pairs = zip(tf.nest.flatten(fast(x)), tf.nest.flatten(step(x)), strict=True)
    assert max(error(got, want) for got, want in pairs) < TOLERANCE


@pytest.mark.parametrize("known", (True, False), ids=("known", "unknown"))
def test_fold_matrices_convnext_blocks_run_in_tiles(known):
    """Blocks of ConvNeXt, with residual connections."""
    keras.config.set_floatx("float64")
    x = image = keras.Input((14, 12, 2), batch_size=3 if known else None)
    x = layers.Conv2D(4, 2, 2)(x)
    for _ in range(2):
        y = layers.LayerNormalization()(layers.Conv2D(4, 3, padding="same", groups=4)(x))
        x = x + layers.Dense(4)(layers.Dense(8, activation="gelu")(y))
    model = keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    arguments = {"optimizer": keras.optimizers.SGD(0.1, momentum=0.9), "loss": loss}
    training = model_step(model, batches_of([3, 3], (14, 12, 2)), known, arguments)
    fast = tflms_sft.rewrite(training.concrete_fn, tflms_sft.SFTParams(num_tiles=(3, 2)))
    assert all("reduces over the image" in why for _, why in fast.plan.left_alone)
    want, got = training.run(training.concrete_fn), training.run(fast.concrete_function)
    assert max(error(got[key], want[key]) for key in want) < TOLERANCE


@pytest.mark.parametrize("op", CROSS_ENTROPIES)
def test_fold_matrices_cross_entropy_of_images_of_unknown_size_equals_original(op):
    """Tiles that take rows from their neighbours may lose their static shape."""
    features = numbers(2, 3, 4, 5)
    labels = tf.constant(RANDOM.randint(0, 5, (2, 3, 4))) if op.startswith("Sparse") else tf.nn.softmax(features + 1)
    specs = [tf.TensorSpec([None] * t.shape.rank, t.dtype) for t in (features, labels)]
    device = planned_device()
    unknown = tf.function(lambda f, y: run_per_pixel(op, device, f, y), input_signature=specs)
    for got, want in zip(unknown(features, labels), run_per_pixel(op, device, features, labels), strict=True):
        assert got.shape == want.shape and error(got, want) < TOLERANCE


def test_fold_matrices_dense_layer_and_its_gradients():
    passes(lambda graph: Canonicalization(CanonicalMode.TILING)).check("""
        graph(x: float32[2,4,5,3], w: float32[3,2], b: float32[2], dy: float32[2,4,5,2])
      - pixels = float32[40,3] Reshape(x, [-1, 3])
      - product = float32[40,2] MatMul(pixels, w)
      - biased = float32[40,2] BiasAdd(product, b)
      - y = float32[2,4,5,2] Reshape(biased, [2, 4, 5, 2])
      - flat = float32[40,2] Reshape(dy, [-1, 2])
      - gradient = float32[40,2] ReluGrad(flat, biased)
      - db = float32[2] BiasAddGrad(gradient)
      - dx = float32[40,3] MatMul(gradient, w) {transpose_b=True}
      - dw = float32[3,2] MatMul(pixels, gradient) {transpose_a=True}
      - image = float32[2,4,5,3] Reshape(dx, [2, 4, 5, 3])
      - late = float32[2,4,5,3] Exp(x) after [dx]
      - return y, image, dw, db, late
      + late = float32[2,4,5,3] Exp(x) after [dx/Reshape]
      + product/Einsum = float32[2,4,5,2] Einsum(x, w) {N=2, equation="abcy,yz->abcz"}
      + biased/BiasAdd = float32[2,4,5,2] BiasAdd(product/Einsum, b)
      + gradient/ReluGrad = float32[2,4,5,2] ReluGrad(dy, biased/BiasAdd)
      + db/BiasAddGrad = float32[2] BiasAddGrad(gradient/ReluGrad)
      + dx/Einsum = float32[2,4,5,3] Einsum(gradient/ReluGrad, w) {N=2, equation="abcy,zy->abcz"}
      + dw/Einsum = float32[3,2] Einsum(x, gradient/ReluGrad) {N=2, equation="abcy,abcz->yz"}
      + dx/Reshape = float32[40,3] Reshape(dx/Einsum, [-1, 3])
      + return biased/BiasAdd, dx/Einsum, dw/Einsum, db/BiasAddGrad, late
    """)


def test_fold_matrices_cross_entropy_is_called_on_images():
    step(fold_matrices_into_images, run=False).check("""
        graph(scores: float32[2,4,5,3], labels: int32[2,4,5])
        pixels = float32[40,3] Reshape(scores, [-1, 3])
        flat = int32[40] Reshape(labels, [-1])
        loss = (float32[40], float32[40,3]) SparseSoftmaxCrossEntropyWithLogits(pixels, flat)
      + loss/PartitionedCall = (float32[2,4,5], float32[2,4,5,3]) PartitionedCall(scores, labels)
              {_per_pixel="SparseSoftmaxCrossEntropyWithLogits"}
      - losses = float32[2,4,5] Reshape(loss, [2, 4, 5])
      + losses = float32[2,4,5] Reshape(loss/PartitionedCall, [2, 4, 5])
      + loss/Reshape = float32[40] Reshape(loss/PartitionedCall, [-1])
      + loss/Reshape_1 = float32[40,3] Reshape(loss/PartitionedCall:1, [-1, 3])
        return losses
    """)


def test_fold_matrices_products_of_all_pixels_and_of_other_images_stay():
    step(fold_matrices_into_images).check("""
        graph(x: float32[2,4,5,3], y: float32[2,5,4,3])
        pixels = float32[40,3] Reshape(x, [-1, 3])
        others = float32[40,3] Reshape(y, [-1, 3])
        all = float32[40,40] MatMul(pixels, pixels) {transpose_b=True}
        both = float32[3,3] MatMul(pixels, others) {transpose_a=True}
        row = float32[120] Reshape(x, [-1])
        softmax = float32[120] Softmax(row)
        return all, both, softmax
    """)
