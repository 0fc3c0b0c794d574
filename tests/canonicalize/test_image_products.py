"""Products of images and matrices: which become one `Einsum`, and that results and gradients stay equal."""

import numpy as np
import pytest
import tensorflow as tf
from equivalence import TOLERANCE, Step, error
from graph_rewrites import step

import tflms_sft
from rewriters.canonicalize.image_products import rewrite_image_products

RANDOM = np.random.RandomState(0)


def numbers(*shape):
    return tf.constant(RANDOM.normal(size=shape))


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
def test_dense_layers_on_images_run_in_tiles(known):
    """As Keras before 3.15 computes them."""
    weights = [tf.Variable(numbers(*shape)) for shape in ((3, 3, 2, 4), (4, 8), (8,), (8, 4), (3, 3, 4, 3))]

    def train(images, labels):
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
    traced = Step(tf.function(train, autograph=False).get_concrete_function(*specs), weights, batches)
    fast = tflms_sft.rewrite(traced.concrete_fn, tflms_sft.SFTParams(num_tiles=(3, 2)))
    assert fast.plan.segments and all("reduces over the image" in why for _, why in fast.plan.left_alone)
    want, got = traced.run(traced.concrete_fn), traced.run(fast.concrete_function)
    assert max(error(got[key], want[key]) for key in want) < TOLERANCE


def test_rewrite_image_products_products_and_ops_that_wait_for_them():
    step(rewrite_image_products).check("""
        graph(x: float32[?,7,4,4], row: float32[?,4,3], w: float32[4,2], turned: float32[2,3])
        y = float32[?,7,4,4] Tanh(x)
        plain = float32[?,7,4,2] BatchMatMulV2(x, w)
        adjoint = float32[?,4,2] BatchMatMulV2(row, turned) {adj_y=True}
      - late = float32[?,4,3] Exp(row) after [plain]
      + late = float32[?,4,3] Exp(row) after [plain/Einsum]
        product = float32[?,7,4,4] BatchMatMulV2(x, y) {adj_x=True}
        gradient = float32[4,4] Sum(product, [0, 1])
        a = float32[?,7,4,4] BatchMatMulV2(x, y)
        b = float32[?,7,4,4] BatchMatMulV2(x, y) {adj_x=True}
        c = float32[?,7,4,4] BatchMatMulV2(x, y) {adj_y=True}
        d = float32[?,7,4,4] BatchMatMulV2(x, y) {adj_x=True, adj_y=True}
      - return adjoint, late, gradient, a, b, c, d
      + plain/Einsum = float32[?,7,4,2] Einsum(x, w) {N=2, equation="abcy,yz->abcz"}
      + adjoint/Einsum = float32[?,4,2] Einsum(row, turned) {N=2, equation="aby,zy->abz"}
      + gradient/Einsum = float32[4,4] Einsum(x, y) {N=2, equation="abcy,abcz->yz"}
      + a/Einsum = float32[?,7,4,4] Einsum(x, y) {N=2, equation="abxy,abyz->abxz"}
      + b/Einsum = float32[?,7,4,4] Einsum(x, y) {N=2, equation="abyx,abyz->abxz"}
      + c/Einsum = float32[?,7,4,4] Einsum(x, y) {N=2, equation="abxy,abzy->abxz"}
      + d/Einsum = float32[?,7,4,4] Einsum(x, y) {N=2, equation="abyx,abzy->abxz"}
      + return adjoint/Einsum, late, gradient/Einsum, a/Einsum, b/Einsum, c/Einsum, d/Einsum
    """)


def test_rewrite_image_products_transposed_matrices_are_not_copied():
    step(rewrite_image_products).check("""
        graph(words: float32[2,7,3], table: float32[6,3])
        turned = float32[3,6] Transpose(table, [1, 0])
        scores = float32[2,7,6] Einsum(words, turned) {N=2, equation="abc,cd->abd"}
      + scores/Einsum = float32[2,7,6] Einsum(words, table) {N=2, equation="abc,dc->abd"}
      - gradient = float32[3,6] Einsum(words, scores) {N=2, equation="abc,abd->cd"}
      + gradient = float32[3,6] Einsum(words, scores/Einsum) {N=2, equation="abc,abd->cd"}
        of_table = float32[6,3] Transpose(gradient, [1, 0])
        both = float32[3,3] Einsum(words, words) {N=2, equation="abc,abd->cd"}
        of_both = float32[3,3] Transpose(both, [1, 0])
      - return of_table, both, of_both
      + gradient/Einsum = float32[6,3] Einsum(scores/Einsum, words) {N=2, equation="abd,abc->dc"}
      + return gradient/Einsum, both, of_both
    """)


def test_rewrite_image_products_other_products_stay():
    step(rewrite_image_products).check("""
        graph(x: float32[2,5,4], square: float32[2,4,4], small: float32[2,1,4,4], a: float32[5,5])
        left = float32[2,5,4] BatchMatMulV2(a, x)
        turned = float32[2,4,5] BatchMatMulV2(x, a) {adj_x=True}
        first = float32[1,5,4] Slice(x, [0, 0, 0], [1, 5, 4])
        one = float32[2,4,4] BatchMatMulV2(first, x) {adj_x=True}
        of_one = float32[4,4] Sum(one, 0)
        all = float32[2,4,4] BatchMatMulV2(x, x) {adj_x=True}
        kept = float32[1,4,4] Sum(all, 0) {keep_dims=True}
        other = float32[2,4] Sum(all, 1)
        both = float32[2,4,4] BatchMatMulV2(square, square) {adj_x=True, adj_y=True}
        of_both = float32[4,4] Sum(both, 0)
        wide = float32[2,2,4,4] Tile(small, [1, 2, 1, 1])
        fewer = float32[2,2,4,4] BatchMatMulV2(wide, small)
        waits = float32[2,5,5] BatchMatMulV2(x, x) {adj_y=True} after [other]
        return left, turned, of_one, kept, other, of_both, fewer, waits
    """)
