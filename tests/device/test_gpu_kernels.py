"""Memory of convolutions on a GPU, against what one allocated, and TensorFlow's options of a rewritten step there."""

import concurrent.futures
import functools
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from devices import device_with, planning_for_card
from tensorflow.python.eager import context

import tflms_sft
from benchmarks import _results
from rewriters.canonicalize.canonicalize import read_canonical
from rewriters.device import gpu_kernels
from rewriters.device.kernel_scratch import op_scratch
from rewriters.ir import tf_internals
from rewriters.ir.device_detection import planned_device

MEASURED = json.loads((_results.RESULTS / "gpu_nvidia_h200.json").read_text())
OPS = {"forward": "Conv2D", "input gradient": "Conv2DBackpropInput", "filter gradient": "Conv2DBackpropFilter"}
BATCH = 4


@pytest.fixture
def gpu():
    """Plan for a GPU with tensor cores."""
    with planning_for_card("h200"):
        yield


@pytest.fixture
def tf32():
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    yield tf.config.experimental.enable_tensor_float_32_execution
    tf.config.experimental.enable_tensor_float_32_execution(before)


def predicted(kind, size, channels, taps, stride):
    """Return the predicted scratch of a convolution, or of a gradient, of square images."""
    out = -(-size // stride)
    shapes = {
        "images": (BATCH, size, size, channels),
        "filter": (taps, taps, channels, channels),
        "gradient": (BATCH, out, out, channels),
    }
    kwargs = {"strides": [1, stride, stride, 1], "padding": "SAME"}
    calls = {
        "forward": ("images", "filter", lambda x, y: tf.raw_ops.Conv2D(input=x, filter=y, **kwargs)),
        "input gradient": (
            "filter",
            "gradient",
            lambda x, y: tf.raw_ops.Conv2DBackpropInput(
                input_sizes=shapes["images"], filter=x, out_backprop=y, **kwargs
            ),
        ),
        "filter gradient": (
            "images",
            "gradient",
            lambda x, y: tf.raw_ops.Conv2DBackpropFilter(
                input=x, filter_sizes=shapes["filter"], out_backprop=y, **kwargs
            ),
        ),
    }
    first, second, run = calls[kind]
    function = tf.function(run, input_signature=[tf.TensorSpec(shapes[first]), tf.TensorSpec(shapes[second])])
    graph = read_canonical(function.get_concrete_function())
    (node,) = [node for node in graph.nodes.values() if node.op == OPS[kind]]
    return op_scratch(node, BATCH, graph.device)


@pytest.mark.parametrize("limit", ["default", "64MiB"])
@pytest.mark.parametrize("rounding", ["tf32", "float32"])
def test_scratch_is_near_what_a_gpu_allocated(rounding, limit, gpu, tf32, monkeypatch):
    tf32(rounding == "tf32")
    if limit != "default":
        monkeypatch.setenv("TF_CUDNN_WORKSPACE_LIMIT_IN_MB", limit.removesuffix("MiB"))
    ratios = []
    for name, (measured, _, image, windows) in MEASURED[f"workspace/{rounding}-{limit}"]["convolutions"].items():
        taps, channels, size, kind = (part.strip() for part in name.split(","))
        taps, stride = (int(number) for number in taps.replace("x", "/").split("/")[1:])
        size = predicted(kind, int(size.split()[0]), int(channels.split()[0]), taps, stride)
        ratios.append((size + image + windows) / (measured + image + windows))
        assert 0.7 < ratios[-1] < 1.8, name
    assert 0.95 <= np.median(ratios) <= 1.2


def test_limit_of_the_workspace_bounds_it(gpu, tf32, monkeypatch):
    tf32(False)
    full = predicted("filter gradient", 512, 64, 3, 1)
    monkeypatch.setenv("TF_CUDNN_WORKSPACE_LIMIT_IN_MB", "64")
    limited = predicted("filter gradient", 512, 64, 3, 1)
    assert full - limited == 2.25 * 2 * 2**28 + 16 * 9 * 64 * 64 * 4 - 64 * 2**20
    monkeypatch.setenv("TF_CUDNN_WORKSPACE_LIMIT_IN_MB", "much")
    assert predicted("filter gradient", 512, 64, 3, 1) == full


@pytest.mark.parametrize(
    ("capability", "dtype", "is_last"),
    [(8.0, "float32", True), (7.5, "float32", False), (7.5, "float16", True), (7.5, "bfloat16", False)],
)
def test_channels_stay_last_where_tensor_cores_compute(capability, dtype, is_last, gpu, tf32):
    tf32(True)
    device = device_with(compute_capability=capability)
    assert gpu_kernels.computes_channels_last(tf.as_dtype(dtype), device) == is_last


def test_a_product_of_matrices_has_no_scratch(gpu, tf32):
    tf32(False)
    assert predicted("forward", 64, 16, 1, 1) == 0
    assert predicted("forward", 64, 16, 1, 2) > 0


def test_tiles_count_the_operands_of_forward_convolutions(gpu, tf32):
    def peak(is_rounded):
        tf32(is_rounded)
        return tflms_sft.rewrite(step, tflms_sft.SFTParams(num_tiles=(4, 4)), images).plan.predicted.peak_bytes

    layers = [keras.layers.Conv2D(32, 3, padding="same", activation="relu") for _ in range(3)]
    model = keras.Sequential([keras.Input((256, 256, 32)), *layers])
    images = tf.zeros((1, 256, 256, 32))
    step = tf.function(lambda x: tf.reduce_sum(model(x, training=False)), autograph=False)
    tile = 64 * 64 * 32 * 4
    assert 1.9 * tile < peak(False) - peak(True) < 2.6 * tile


def switched_off():
    """Return the optimizers that are off for functions which this thread calls now."""
    return off_in(tf_internals.function_config())


def off_in(config):
    rewrite = config.graph_options.rewrite_options
    off = {name for name in gpu_kernels.SWITCHED_OFF if name.endswith(("optimizer", "remapping"))}
    off = {name for name in off if getattr(rewrite, name) == rewrite.OFF}
    return off | ({"memory_optimization"} if rewrite.memory_optimization == rewrite.NO_MEM_OPT else set())


ALL_OFF = set(gpu_kernels.SWITCHED_OFF)


@pytest.fixture
def pretended(plan_with):
    """Pretend that there is a GPU, for the options of TensorFlow's optimizers alone."""
    plan_with(name="GPU:0")
    yield
    assert not switched_off()


def test_rewritten_steps_run_without_three_optimizers_on_a_gpu(monkeypatch, plan_with):
    seen = []
    rewritten = tflms_sft.rewrite(tf.function(tf.reduce_sum), tflms_sft.SFTParams(), tf.ones((2, 3)))
    plan_with(name="GPU:0")
    monkeypatch.setattr(rewritten, "_function", lambda *_: seen.append(switched_off()))
    rewritten(tf.ones((2, 3)))
    assert seen == [ALL_OFF]
    assert not switched_off()


def test_options_return_after_the_last_of_two_users(pretended):
    tf.config.optimizer.set_experimental_options({"remapping": False})
    try:
        with gpu_kernels.without_gpu_optimizers():
            with gpu_kernels.without_gpu_optimizers():
                assert switched_off() == ALL_OFF
            assert switched_off() == ALL_OFF
        assert switched_off() == {"remapping"}
    finally:
        tf.config.optimizer.set_experimental_options({"remapping": None})


def test_options_that_change_within_stay():
    try:
        with tf_internals.functions_without(gpu_kernels.SWITCHED_OFF):
            tf.config.optimizer.set_experimental_options({"remapping": False})
        assert switched_off() == {"remapping"}
    finally:
        tf.config.optimizer.set_experimental_options({"remapping": None})


def test_a_thread_keeps_its_optimizers(pretended):
    with gpu_kernels.without_gpu_optimizers(), concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert not pool.submit(switched_off).result()


def test_records_of_a_run_have_the_options_of_the_eager_runtime(monkeypatch, plan_with):
    seen, session = [], tf.compat.v1.Session

    def watched(*, graph, config):
        seen.append(off_in(config))
        return session(graph=graph, config=config)

    step = tf.function(lambda x: x + 1, autograph=False).get_concrete_function(tf.TensorSpec([2]))
    monkeypatch.setattr(tf.compat.v1, "Session", watched)
    tf_internals.step_stats(step, [tf.ones(2)])
    plan_with(name="GPU:0")
    with gpu_kernels.without_gpu_optimizers():
        tf_internals.step_stats(step, [tf.ones(2)])
    assert seen == [set(), ALL_OFF]


def test_a_fit_runs_its_steps_alone_without_three_optimizers(monkeypatch):
    traced, called, between = [], [], []

    class Watched(keras.layers.Layer):
        def call(self, x):
            traced.append(switched_off())
            return x

    layers = [keras.Input((8, 8, 3)), keras.layers.Conv2D(3, 1), Watched(), keras.layers.GlobalMaxPooling2D()]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    call = context.Context.call_function

    def watched(self, name, *arguments):
        if b"iterator" in name:
            called.append(switched_off())
        return call(self, name, *arguments)

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_, **__: between.append(switched_off()))
    off = functools.partial(tf_internals.functions_without, gpu_kernels.SWITCHED_OFF)
    monkeypatch.setattr("tflms_sft._keras.train_step_patch.without_gpu_optimizers", off)
    monkeypatch.setattr(context.Context, "call_function", watched)
    model.fit(np.zeros((4, 8, 8, 3)), np.zeros((4, 3)), 2, verbose=0, callbacks=[tflms_sft.SFT(verbose=0), callback])
    assert traced[-1] == ALL_OFF
    assert called == [ALL_OFF, ALL_OFF]
    assert between == [set(), set()]


def test_scratch_scales_with_the_pixels(gpu, tf32):
    tf32(False)
    assert predicted("forward", 64, 16, 3, 1) == 4 * predicted("forward", 32, 16, 3, 1) - 3 * (3 * 3 * 16 * 16 * 4)


@pytest.mark.parametrize(("dtype", "copies"), (("float64", 2), ("float32", 2), ("float16", 3)))
def test_scratch_of_softmax_is_two_tensors_of_its_result_shape(dtype, copies, gpu):
    """As an H200 allocated them for 2 GiB of scores; sums have 32 bits at least."""
    spec = tf.TensorSpec((BATCH, 8, 16, 16), dtype)
    traced = tf.function(tf.nn.softmax, input_signature=[spec], autograph=False).get_concrete_function()
    (node,) = [node for node in read_canonical(traced).nodes.values() if node.op == "Softmax"]
    assert op_scratch(node, BATCH, planned_device()) == copies * node.out().num_bytes(BATCH)
