"""TensorFlow's graph optimizers on steps for a GPU: those that stay on leave loops, swaps and buffers as they are."""

import collections
import dataclasses
import functools

import keras
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.python.eager import context

import tflms_sft
from benchmarks import _graph_optimizers as optimizers
from rewriters.device import gpu_kernels
from rewriters.device.cards import CARDS
from rewriters.emission import buffers
from rewriters.ir.device_model import planning_for

CARD = CARDS["a100-40"]
SIZE, BATCH = 32, 2
TILE_ROW_BYTES = 16 * 8 * 4
"""One row of pixels of a tile of the smallest image."""


def conv(x, filters, norm):
    x = layers.Conv2D(filters, 3, padding="same", activation=None if norm else "relu")(x)
    return layers.ReLU()(layers.BatchNormalization()(x)) if norm else x


def image_net(norm):
    image = keras.Input((SIZE, SIZE, 8))
    x = layers.MaxPooling2D(2)(conv(conv(image, 16, norm), 16, norm))
    return keras.Model(image, layers.Dense(4)(layers.GlobalAveragePooling2D()(conv(x, 32, norm))))


def deep_net():
    x = image = keras.Input((256, 256, 3), name="image")
    for filters in (64, 128, 256):
        x = layers.MaxPooling2D(2, name=f"pool{filters}")(conv(conv(x, filters, False), filters, False))
    return keras.Model(image, layers.Dense(4)(layers.GlobalAveragePooling2D()(x)))


def volume_net():
    image = keras.Input((16, 16, 16, 4))
    x = layers.Conv3D(8, 3, padding="same", activation="relu")(image)
    x = layers.Conv3D(8, 3, padding="same")(layers.MaxPooling3D(2)(x))
    return keras.Model(image, layers.Dense(4)(layers.GlobalAveragePooling3D()(x)))


SWAPS = tflms_sft.LMSParams(tier="host", n_tensors=4, min_bytes=1)
TILES = tflms_sft.SFTParams(num_tiles=(2, 2))
SEGMENTS = [
    tflms_sft.SegmentSpec(first, last, num_tiles=(2, 2)) for first, last in (("image", "pool64"), ("pool64", "pool128"))
]
STEPS = {
    "tiles": (functools.partial(image_net, False), TILES),
    "tiles with statistics": (functools.partial(image_net, True), dataclasses.replace(TILES, memory_capacity=1)),
    "strips that carry rows": (
        functools.partial(image_net, False),
        tflms_sft.SFTParams(num_tiles=(4, 1), halo="carry"),
    ),
    "two segments": (deep_net, tflms_sft.SFTParams(segments=SEGMENTS)),
    "volume": (volume_net, tflms_sft.SFTParams(num_tiles=(2, 2, 2))),
    "swaps": (functools.partial(image_net, False), SWAPS),
    "tiles and swaps": (functools.partial(image_net, False), [TILES, SWAPS]),
}


@functools.cache
def rewritten(name):
    """Return a rewritten training step for a GPU."""
    build, params = STEPS[name]
    floatx, rounds = keras.config.floatx(), tf.config.experimental.tensor_float_32_execution_enabled()
    keras.config.set_floatx("float32")
    keras.utils.set_random_seed(0)
    tf.config.experimental.enable_tensor_float_32_execution(True)
    try:
        model = build()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", jit_compile=False)
        model.optimizer.build(model.trainable_variables)
        specs = tf.TensorSpec((BATCH, *model.input_shape[1:])), tf.TensorSpec((BATCH, 4))
        step = tf.function(lambda x, y: model.train_step((x, y))["loss"], autograph=False)
        with planning_for(CARD.device_model):
            return tflms_sft.rewrite(step, params, *specs)
    finally:
        keras.config.set_floatx(floatx)
        tf.config.experimental.enable_tensor_float_32_execution(rounds)


@functools.cache
def graph(name):
    """Return the graph of a step before the optimizers."""
    return optimizers.placed(rewritten(name).concrete_function)


@functools.cache
def after(name, off=gpu_kernels.SWITCHED_OFF):
    """Return the graph of a step after the optimizers; its GPU has little more memory than the step needs."""
    return optimizers.optimized(graph(name), CARD, off, memory_bytes=memory(name))


def memory(name):
    return int(1.05 * rewritten(name).plan.predicted.peak_bytes)


def names(graph, *op_types):
    return {node.name for node in graph.graph_def.node if node.op in op_types}


each_step = pytest.mark.parametrize("name", STEPS)


@pytest.mark.parametrize("name", ["tiles with statistics", "strips that carry rows", "tiles and swaps"])
def test_the_graph_is_that_of_the_eager_runtime(name):
    """The runtime, without optimizers, lowers loops to the same ops; only ops without a result differ."""
    step = rewritten(name)
    inputs = step.concrete_function.inputs[:2]
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        with context.collect_graphs(optimized=True) as graphs:
            step(*(tf.ones(tensor.shape, tensor.dtype) for tensor in inputs))
    finally:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})
    of_runtime = max(graphs, key=lambda one: len(one.node))
    counts = [collections.Counter(n.op for n in one.node) for one in (of_runtime, graph(name).graph_def)]
    for count in counts:
        del count["NoOp"]
    assert counts[0] == counts[1]


@each_step
def test_rewritten_steps_get_no_copies_and_no_fused_kernels(name):
    figures = optimizers.optimizer_figures(after(name))
    assert figures["convolutions"] >= 6
    assert figures["transposes"] == (0, 0)
    assert figures["sums"] == (0, 0)
    assert figures["channels_first"] == figures["fused"] == figures["swaps"] == 0
    assert not optimizers.failure(graph(name), CARD, gpu_kernels.SWITCHED_OFF)


@pytest.mark.parametrize("name", ["tiles", "strips that carry rows"])
def test_by_default_loops_would_get_transposes_and_fused_kernels(name):
    figures = optimizers.optimizer_figures(after(name, ()))
    assert figures["transposes"][1] > 0
    assert figures["channels_first"] == figures["convolutions"]
    assert figures["fused"] > 0


@pytest.mark.parametrize("name", ["tiles with statistics"])
def test_by_default_the_layout_optimizer_fails_or_transposes(name):
    """With statistics over the image it builds a cycle and gives up; its success would add transposes."""
    figures = optimizers.optimizer_figures(after(name, ()))
    if figures["transposes"] == (0, 0):
        assert "cycle" in optimizers.failure(graph(name), CARD)


def test_by_default_tensorflow_would_swap_tensors_of_loops():
    off = tuple(name for name in gpu_kernels.SWITCHED_OFF if name != "memory_optimization")
    assert optimizers.optimizer_figures(after("two segments", off))["swaps"] > 0


def test_by_default_tensorflow_would_change_sums_in_loops():
    """The memory optimizer replaces sums by a temporary variable, which begins as a constant of the same size."""
    off = tuple(name for name in gpu_kernels.SWITCHED_OFF if name != "memory_optimization")
    graph = after("tiles with statistics", off)
    assert optimizers.optimizer_figures(graph)["sums"][1] > 0
    assert optimizers.largest_constant(graph) > TILE_ROW_BYTES


def padding_values(graph):
    """Return how many paddings have a value from each op type."""
    ops = {node.name: node.op for node in graph.graph_def.node}
    return collections.Counter(ops[node.input[2]] for node in graph.graph_def.node if node.op == "PadV2")


@pytest.mark.parametrize("name", ["tiles", "strips that carry rows"])
def test_values_of_paddings_stay_on_the_host(name):
    assert set(padding_values(after(name))) == {"HostConst"}


def test_constants_on_the_host_would_be_folded():
    graph = optimizers.placed(rewritten("tiles").concrete_function)
    for node in graph.graph_def.node:
        node.attr.pop(buffers.NOT_FOLDED, None)
    assert padding_values(optimizers.optimized(graph, CARD, gpu_kernels.SWITCHED_OFF))["Const"] > 0


@each_step
def test_loops_keep_their_ops(name):
    before, now = graph(name), after(name)
    changes = optimizers.changes(before, now)
    assert changes["moved"] == changes["placed_elsewhere"] == 0
    assert changes["added"][1] <= 0.02 * len(before.graph_def.node)
    assert names(before, "LoopCond") == names(now, "LoopCond")
    enters = [node.attr["parallel_iterations"].i for node in now.graph_def.node if node.op == "Enter"]
    assert set(enters) <= {1}
    assert bool(enters) == (name != "swaps")


@each_step
def test_buffers_and_their_updates_stay(name):
    in_place = ("Empty", "TensorStridedSliceUpdate", "InplaceUpdate", "InplaceAdd")
    before = names(graph(name), *in_place)
    assert before == names(after(name), *in_place)
    assert len(before) >= 4 or name == "swaps"
    marked = [{n.name for n in one.graph_def.node if "_tflms_sft_own" in n.attr} for one in (graph(name), after(name))]
    assert marked[0] == marked[1]


@pytest.mark.parametrize("name", ["swaps", "tiles and swaps"])
def test_swaps_stay_behind_their_triggers(name):
    """Two swap-ins of a tensor with one trigger may become one; none may lose its tensor or its trigger."""
    before, now = (
        [node for node in one.graph_def.node if node.device.endswith("CPU:0") and node.op == "Identity"]
        for one in (graph(name), after(name))
    )
    triggered = [node for node in before if len(node.input) > 1]
    assert len(triggered) >= 2
    for node in before:
        same = [other.name for other in now if other.input[0] == node.input[0]]
        triggers = [operand.removeprefix("^") for operand in node.input[1:]]
        assert any(all(optimizers.reaches(after(name), op, other) for op in triggers) for other in same)


@each_step
def test_no_image_becomes_a_constant(name):
    assert optimizers.largest_constant(after(name)) < TILE_ROW_BYTES


def test_a_step_in_a_function_of_the_user_runs_without_the_optimizers(tmp_path):
    weights = tf.Variable(tf.ones((3, 3, 4, 4)))
    count = tf.Variable(0)

    @tf.function(autograph=False)
    def step(x):
        count.assign_add(1)
        return tf.reduce_sum(tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, weights, 1, "SAME"), [1.0, 2.0, 3.0, 4.0])))

    images = tf.ones((1, SIZE, SIZE, 4))
    with planning_for(CARD.device_model):
        fast = tflms_sft.rewrite(step, tflms_sft.SFTParams(num_tiles=(1, 1)), images)
        ours = tf.function(lambda x: (fast(x), tf.identity(count)), autograph=False)
        theirs = tf.function(lambda x: (fast.concrete_function(x), tf.identity(count)), autograph=False)
        assert not runs_fused(ours, images, tmp_path / "ours")
        assert runs_fused(theirs, images, tmp_path / "theirs")
        value, number = ours(images)
    assert value == step(images)
    assert number == 5
    assert count == 6


def runs_fused(function, images, folder):
    """Return whether a function runs a fused convolution: the profile of a run names the ops."""
    function(images)
    tf.profiler.experimental.start(str(folder))
    function(images)
    tf.profiler.experimental.stop()
    return any(b"FusedConv2D" in file.read_bytes() for file in folder.rglob("*.xplane.pb"))
