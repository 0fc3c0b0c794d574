"""Products of images and matrices: which become one `Einsum`, and that results and gradients stay equal."""

import numpy as np
import pytest
import tensorflow as tf
from equivalence import TOLERANCE, Step, error

import tflms_sft
from rewriters.canonicalize import canonicalize
from rewriters.step_importer import StepImporter

RANDOM = np.random.RandomState(0)


def numbers(*shape):
    return tf.constant(RANDOM.normal(size=shape))


def with_gradients(function):
    """Return a function that adds the gradients by all arguments."""

    def call(*arguments):
        with tf.GradientTape() as tape:
            tape.watch(arguments)
            result = function(*arguments)
            loss = tf.reduce_sum(tf.sin(result))
        return [result, *tape.gradient(loss, arguments)]

    return call


def canonical(function, *arrays, known=True):
    """Return the canonical function, and the types of its ops."""
    specs = [tf.TensorSpec(a.shape if known else (None, *a.shape[1:]), a.dtype) for a in arrays]
    concrete_fn = tf.function(function, autograph=False).get_concrete_function(*specs)
    graph = canonicalize.read_canonical(concrete_fn)
    importer = StepImporter(graph, concrete_fn)
    return tf.function(lambda *args: importer(args), autograph=False), [n.op for n in graph.nodes.values()]


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize("shape", [(2, 7, 3), (2, 5, 4, 3), (2, 3, 4, 2, 3)], ids=len)
def test_product_of_image_and_matrix_and_its_gradients_become_einsums(shape, transposed, known):
    function = with_gradients(lambda image, matrix: tf.matmul(image, matrix, transpose_b=transposed))
    arrays = numbers(*shape), numbers(4, 3) if transposed else numbers(3, 4)
    matrix = arrays[1]
    # The matrix must have a known shape: only batches are open.
    call, ops = canonical(lambda image: function(image, matrix), arrays[0], known=known)
    assert ops.count("Einsum") == 3 and "BatchMatMulV2" not in ops
    for got, want in zip(call(arrays[0]), function(*arrays), strict=True):
        assert got.shape == want.shape and error(got, want) < TOLERANCE


def one_image_for_all(image):
    return tf.matmul(image[:1], image, transpose_a=True)


STAY = {
    "other images": (lambda x: tf.matmul(x, x[:, ::5], transpose_b=True), (2, 5, 4, 3), 1),
    "matrix from the left": (lambda x: tf.matmul(tf.ones((6, 5), x.dtype), x), (2, 5, 3), 1),
    "transposed image": (lambda x: tf.matmul(x, tf.ones((5, 6), x.dtype), transpose_a=True), (2, 5, 3), 1),
    "summed over other axes": (lambda x: tf.reduce_sum(tf.matmul(x, x, transpose_a=True), [0, 2]), (2, 5, 4, 3), 1),
    "kept axes": (lambda x: tf.reduce_sum(tf.matmul(x, x, transpose_a=True), [0], keepdims=True), (2, 5, 3), 1),
    "one image for all": (lambda x: tf.reduce_sum(one_image_for_all(x), [0]), (2, 5, 3), 1),
    "both transposed": (
        lambda x: tf.reduce_sum(tf.matmul(x, tf.transpose(x, [0, 2, 1]), transpose_a=True, transpose_b=True), [0]),
        (2, 5, 3),
        1,
    ),
}


@pytest.mark.parametrize("case", STAY)
def test_other_products_stay(case):
    function, shape, count = STAY[case]
    x = numbers(*shape)
    call, ops = canonical(lambda x: [function(x)], x)
    assert ops.count("BatchMatMulV2") == count and "Einsum" not in ops
    assert error(call(x)[0], function(x)) < TOLERANCE


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("sides", [(False, True), (True, False), (True, True), (False, False)])
def test_products_of_images_become_einsums(sides, known):
    first, second = sides

    def function(x):
        return [tf.matmul(x, x if first != second else tf.transpose(x, [0, 1, 3, 2]), first, second)]

    x = numbers(2, 5, 4, 3)
    call, ops = canonical(function, x, known=known)
    assert "Einsum" in ops and "BatchMatMulV2" not in ops
    assert error(call(x)[0], function(x)[0]) < TOLERANCE


def test_product_that_waits_stays():
    def function(x):
        matrix = tf.ones((3, 2), x.dtype)
        with tf.control_dependencies([tf.debugging.assert_all_finite(x, "finite")]):
            return [tf.matmul(x, matrix)]

    concrete_fn = tf.function(function).get_concrete_function(tf.TensorSpec((2, 5, 4, 3), tf.float64))
    (node,) = (n for n in canonicalize.read_canonical(concrete_fn).nodes.values() if n.op == "BatchMatMulV2")
    assert node.control_inputs


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_dense_layers_on_images_run_in_tiles(known):
    """As Keras before 3.15 computes them."""
    weights = [tf.Variable(numbers(*shape)) for shape in ((3, 3, 2, 4), (4, 8), (8,), (8, 4), (3, 3, 4, 3))]

    def step(images, labels):
        with tf.GradientTape() as tape:
            x = tf.nn.conv2d(images, weights[0], 1, "SAME")
            x += tf.matmul(tf.nn.gelu(tf.matmul(x, weights[1]) + weights[2]), weights[3])
            x = tf.reduce_mean(tf.nn.conv2d(x, weights[4], 1, "SAME"), [1, 2])
            loss = tf.reduce_mean(tf.square(x - labels))
        gradients = tape.gradient(loss, weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    batches = [(numbers(3, 14, 12, 2), numbers(3, 3)) for _ in range(2)]
    specs = [tf.TensorSpec(a.shape if known else (None, *a.shape[1:]), a.dtype) for a in batches[0]]
    traced = Step(tf.function(step, autograph=False).get_concrete_function(*specs), weights, batches)
    fast = tflms_sft.rewrite(traced.concrete_fn, tflms_sft.SFTParams(num_tiles=(3, 2)))
    assert fast.plan.segments and all("reduces over the image" in why for _, why in fast.plan.left_alone)
    want, got = traced.run(traced.concrete_fn), traced.run(fast.concrete_function)
    assert max(error(got[key], want[key]) for key in want) < TOLERANCE


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_products_with_a_transposed_matrix_transpose_nothing(known):
    """Scores of words from a table of embeddings, and the gradient of the table."""
    table = numbers(6, 3)

    def function(words, image):
        with tf.GradientTape() as tape:
            tape.watch([table, image])
            scores = tf.einsum("abc,cd->abd", image, tf.transpose(table))
            loss = tf.reduce_sum(tf.sin(scores) * tf.gather(words, 1, axis=-1)[..., None])
        return [scores, *tape.gradient(loss, [table, image])]

    arrays = numbers(2, 7, 3), numbers(2, 7, 3)
    call, ops = canonical(function, *arrays, known=known)
    assert ops.count("Einsum") == 3 and "Transpose" not in ops
    for got, want in zip(call(*arrays), function(*arrays), strict=True):
        assert got.shape == want.shape and error(got, want) < TOLERANCE


def test_transposed_and_not_transposed_results_are_both_computed():
    def function(x, y):
        product = tf.einsum("abc,abd->cd", x, y)
        return [product, tf.transpose(product), tf.einsum("cd,abc->abd", tf.transpose(tf.transpose(product)), x)]

    arrays = numbers(2, 7, 3), numbers(2, 7, 4)
    call, _ = canonical(function, *arrays)
    for got, want in zip(call(*arrays), function(*arrays), strict=True):
        assert got.shape == want.shape and error(got, want) < TOLERANCE
