"""Audit of GPU kernels and of copies between host and GPU, without a GPU, and what tile loops emit for one."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from devices import planning_for_card
from keras import layers

import tflms_sft
from rewriters.device.cards import CARDS
from rewriters.device.kernel_audit import audit_kernels, reads_gpu_memory
from rewriters.emission.buffers import empty_buffer
from rewriters.errors import RewriteError
from rewriters.ir.device_detection import planned_device
from rewriters.ir.graph_reader import from_concrete_function

pytestmark = pytest.mark.skipif(not tf.test.is_built_with_cuda(), reason="needs a build with GPU kernels")

SIZE, BATCH = 24, 2
TILES = tflms_sft.SFTParams(num_tiles=(2, 2))


def audit(function, *specs):
    """Return the audit of a function of tensors."""
    return audit_kernels(tf.function(function, input_signature=specs, autograph=False).get_concrete_function())


def loop_of(part, image):
    """Run a loop of four iterations over strips of an image, and return the sum of `part` of each."""

    def body(number, total):
        return number + 1, total + tf.reduce_sum(part(image, number))

    return tf.while_loop(lambda number, _: number < 4, body, (tf.constant(0), tf.zeros([])), parallel_iterations=1)[1]


def strip(image, number):
    """Return a strip of an image."""
    return image[:, 8 * number : 8 * number + 8]


CONDITION = (1, 1)
"""Copies of the condition to the host and to the GPU: `tf.function` adds an identity, which runs on the GPU."""


def doubled(value):
    """Call a Python function."""
    return tf.ensure_shape(tf.numpy_function(lambda x: 2 * x, [value], tf.float32), value.shape)


IMAGE, LABELS = tf.TensorSpec((1, 32, 32, 8)), tf.TensorSpec((1, 32, 32, 8), tf.int32)


# What the audit finds ---------------------------------------------------------------------------------------


def test_a_loop_over_strips_of_floats_has_no_copies():
    result = audit(lambda image: loop_of(strip, image), IMAGE)
    assert not result.missing and not result.host_tensors and not result.num_swaps
    (loop,) = result.loops
    assert (loop.small_to_host, loop.small_to_gpu, loop.tensors) == (*CONDITION, ())


def test_a_slice_of_an_int32_image_is_in_host_memory_and_copied_in_each_iteration():
    result = audit(lambda image: loop_of(lambda x, i: tf.cast(strip(x, i), tf.float32), image), LABELS)
    (tensor,), (loop,) = result.host_tensors, result.loops
    assert (tensor.op, tensor.dtype, tensor.where) == ("StridedSlice", "int32", loop.loop)
    assert loop.tensors == (tensor,) and loop.num_bytes == tensor.num_bytes > 1024
    assert not result.missing


def test_a_python_function_in_a_loop_has_no_gpu_kernel_and_copies_its_operand():
    result = audit(lambda image: loop_of(lambda x, i: doubled(strip(x, i)), image), IMAGE)
    (missing,), (loop,) = result.missing, result.loops
    assert (missing.op, missing.dtype, missing.where) == ("PyFunc", "float32", loop.loop)
    assert {tensor.op for tensor in loop.tensors} == {"StridedSlice", "PyFunc"}


def test_an_op_on_an_explicit_cpu_is_a_swap():
    def on_cpu(image, number):
        held = strip(image, number)
        with tf.device("/CPU:0"):
            return doubled(held)

    result = audit(lambda image: loop_of(lambda x, i: tf.identity(on_cpu(x, i)), image), IMAGE)
    assert not result.missing and not result.host_tensors and not any(loop.tensors for loop in result.loops)
    assert result.num_swaps == 2


def test_a_gathered_position_is_copied_to_the_host():
    def gathered(image, number):
        return image[:, tf.gather(tf.constant([0, 8, 16, 24]), number) :]

    (loop,) = audit(lambda image: loop_of(gathered, image), IMAGE).loops
    assert loop.small_to_host == CONDITION[0] + 1, "the position"
    assert loop.small_to_gpu == CONDITION[1] + 2, "the table and the number of the strip"


def test_kernels_depend_on_the_type():
    def missing(dtype):
        return audit(lambda x: tf.nn.depth_to_space(x, 2), tf.TensorSpec((1, 8, 8, 4), dtype)).missing

    assert [(m.op, m.dtype, m.where) for m in missing("float64")] == [("DepthToSpace", "float64", "")]
    assert not missing("float32")


def test_shapes_and_constants_follow_their_neighbours():
    def on_cpu(image):
        with tf.device("/CPU:0"):
            held = tf.identity(image)
        shape, ones = tf.raw_ops.Shape(input=held), tf.constant(np.ones((32, 32, 8), np.float32))
        with tf.device("/CPU:0"):
            return held * ones, shape

    result = audit(on_cpu, IMAGE)
    assert result.num_swaps == 2, "the image to the CPU, and the product from it"
    assert not result.copies[0].tensors and not result.copies[0].small_to_host


def test_ops_of_branches_and_calls_are_audited():
    def function(image):
        called = tf.function(doubled, autograph=False)
        branch = tf.cond(image[0, 0, 0, 0] > 0, lambda: called(image), lambda: image)
        return loop_of(lambda x, i: tf.cond(i > 2, lambda: called(strip(x, i)), lambda: strip(x, i)), branch)

    result = audit(function, IMAGE)
    assert [missing.op for missing in result.missing] == ["PyFunc"] * 2
    assert [missing.where.count("/") > 1 for missing in result.missing] == [True, True], "call in a branch, in a loop"
    (loop,) = result.loops
    assert loop.tensors, "copies of a branch are those of the loop around it"


def test_a_build_without_gpu_kernels_is_refused(monkeypatch):
    monkeypatch.setattr(tf.test, "is_built_with_cuda", lambda: False)
    with pytest.raises(RewriteError, match="no GPU kernels to check"):
        audit(lambda image: image, IMAGE)


# Steps in tiles ---------------------------------------------------------------------------------------------


def classifier(x):
    x = layers.Conv2D(4, 3, padding="same", activation="relu")(x)
    x = layers.MaxPool2D(3, 2, padding="same", name="pool")(x)
    x = layers.Conv2D(4, 3, padding="same", activation="relu", name="out")(x)
    return layers.Dense(3)(layers.GlobalAveragePooling2D()(x))


def normed(x):
    x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(4, 3, padding="same")(x)))
    x = layers.UpSampling2D(2)(layers.MaxPool2D(2)(layers.DepthwiseConv2D(3, padding="same")(x)))
    return layers.Dense(3)(layers.GlobalAveragePooling2D()(layers.BatchNormalization()(x)))


def per_pixel(x):
    return layers.Conv2D(3, 1)(layers.Conv2D(4, 3, padding="same", activation="relu")(x))


def causal(x):
    """Causal attention between all pixels."""
    tokens = layers.Reshape((SIZE * SIZE, 3))(x)
    return layers.Dense(3)(layers.MultiHeadAttention(2, 4)(tokens, tokens, use_causal_mask=True))


def step_of(net):
    """Return a training step with class numbers as int32 labels, per pixel if the network has an output for each."""
    image = keras.Input((SIZE, SIZE, 3))
    model = keras.Model(image, net(image))
    shape = (BATCH, *model.output.shape[1:-1])

    def step(images, labels):
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        return [loss, *tape.gradient(loss, [weight.value for weight in model.trainable_weights])]

    specs = tf.TensorSpec((BATCH, SIZE, SIZE, 3)), tf.TensorSpec(shape, tf.int32)
    random = np.random.default_rng(1)
    data = random.standard_normal(specs[0].shape, "float32"), random.integers(3, size=shape, dtype="int32")
    return tf.function(step, input_signature=specs, autograph=False), data


STRIPS = tflms_sft.SFTParams(segments=[tflms_sft.SegmentSpec("pool", "out", num_tiles=(3, 1), halo="carry")])
CASES = {
    "tiles": (classifier, TILES),
    "strips": (classifier, STRIPS),
    "barriers": (normed, TILES),
    "label map": (per_pixel, TILES),
    "attention": (causal, TILES),
    "swaps": (classifier, tflms_sft.LMSParams(tier="host", n_tensors=3, min_bytes=1)),
}


@pytest.mark.parametrize("case", CASES)
def test_rewritten_step_has_all_kernels_and_no_copies(case):
    net, params = CASES[case]
    step, data = step_of(net)
    with planning_for_card("h200"):
        rewritten = tflms_sft.rewrite(step, params)
    result = audit_kernels(rewritten.concrete_function)
    assert not result.missing and not result.host_tensors
    assert bool(result.loops) == bool(rewritten.plan.segments) and bool(result.num_swaps) == bool(rewritten.plan.swaps)
    assert rewritten.plan.segments or rewritten.plan.swaps
    assert not any(loop.tensors or loop.small_to_host for loop in result.loops)
    # The step in tiles for the CPU, which other tests compare with the original: both round alike.
    expected = tflms_sft.rewrite(step, params) if rewritten.plan.segments else step
    for want, got in zip(expected(*data), rewritten(*data), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)


def test_uninitialised_booleans_have_a_gpu_kernel():
    """A loop may write a boolean for each pixel, such as whether its class is right."""
    device = CARDS["h200"].device_model(planned_device())
    traced = tf.function(lambda: empty_buffer((2, 3), tf.bool, True, device), autograph=False).get_concrete_function()
    assert not audit_kernels(traced).missing
    assert traced().dtype == tf.bool and not np.any(traced())


def test_kernels_that_compare_int32_read_host_memory_and_casts_the_memory_of_the_gpu():
    def function(labels):
        return tf.cast(labels, tf.float32), tf.raw_ops.Equal(x=labels, y=labels)

    traced = tf.function(function, input_signature=[LABELS], autograph=False).get_concrete_function()
    graph = from_concrete_function(traced)
    ops = {node.op: node for node in graph.nodes.values()}
    assert not reads_gpu_memory(graph, ops["Cast"], ops["Cast"].inputs[0]), "plans are for the CPU"
    graph.device = CARDS["h200"].device_model(graph.device)
    assert reads_gpu_memory(graph, ops["Cast"], ops["Cast"].inputs[0])
    assert not reads_gpu_memory(graph, ops["Equal"], ops["Equal"].inputs[0])
