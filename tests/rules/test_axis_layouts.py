"""Axis layouts, and refusals of ops whose operands have other layouts."""

import os
import subprocess
import sys
import textwrap
from fractions import Fraction

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import Step, error
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

import tflms_sft
from rewriters.analysis.graph_analysis import GraphAnalysis, check_forward
from rewriters.canonicalize import canonicalize
from rewriters.errors import NotTileableError
from rewriters.ir.graph import Node
from rewriters.rules.axis_layouts import AxisMap, Layout, Layouts
from rewriters.rules.reshape import groups
from rewriters.tiling.barrier_levels import assign_levels
from tflms_sft import SFTParams


def analysis_of(function, *shapes):
    specs = [tf.TensorSpec(shape) for shape in shapes]
    return GraphAnalysis(
        canonicalize.read_canonical(tf.function(function, autograph=False).get_concrete_function(*specs))
    )


def layouts_of(function, *shapes):
    """Return the layouts of all tensors that are images, by op type."""
    analysis = analysis_of(function, *shapes)
    found = {}
    for node in analysis.order:
        for index in range(len(node.outputs)):
            layout = analysis.layouts.of(node.out(index))
            if layout is not None and node in analysis.data:
                found.setdefault(node.op, []).append(layout)
    return found


# Following axes ---------------------------------------------------------------------------------------------


def tensor(name, *shape):
    return Node(name, "Placeholder", outputs=[(tf.float32, shape)]).out()


def test_layouts_propagate_from_anchor_in_both_directions():
    a, b, c = tensor("a", None, 8, 6, 3), tensor("b", None, 3, 8, 6), tensor("c", None, 3, 8, 6)
    found = Layouts()
    found.find(
        [(b, (2, 3))], [AxisMap(a, b, {0: 0, 3: 1, 1: 2, 2: 3}), AxisMap(b, c, {i: i for i in range(4)})], [a, b, c]
    )
    assert [found.of(t).dims for t in (a, b, c)] == [(1, 2), (2, 3), (2, 3)]


def test_layouts_may_drop_axis_of_one_row_only():
    row, sequence, image = tensor("row", None, 1, 9, 3), tensor("sequence", None, 9, 3), tensor("image", None, 4, 9, 3)
    found = Layouts()
    moves = {0: 0, 2: 1, 3: 2}
    lost = tensor("lost", None, 9, 3)
    found.find([(row, (1, 2)), (image, (1, 2))], [AxisMap(row, sequence, moves), AxisMap(image, lost, moves)], [])
    assert found.of(sequence) == Layout((None, 1)) and found.of(sequence).extents(sequence) == (1, 9)
    assert found.of(lost) is None


def test_layouts_batch_fold_after_space_to_batch():
    image, mixed, again = tensor("image", None, 8, 8, 2), tensor("mixed", None, 4, 4, 2), tensor("again", None, 8, 8, 2)
    same = {i: i for i in range(4)}
    found = Layouts()
    found.find(
        [(mixed, (1, 2))], [AxisMap(image, mixed, same, Fraction(4)), AxisMap(mixed, again, same, Fraction(1, 4))], []
    )
    assert [found.of(t).batch_fold for t in (image, mixed, again)] == [1, 4, 1]


def test_layouts_default_is_channels_last():
    found = Layouts()
    image, volume, table = tensor("image", 2, 5, 6, 3), tensor("volume", 2, 4, 5, 6, 3), tensor("table", 2, 5, 3)
    found.find([], [], [image, volume, table])
    assert (found.of(image).dims, found.of(volume).dims, found.of(table)) == ((1, 2), (1, 2, 3), None)
    assert found.of(volume).others(5) == [4]


def test_layouts_of_sequence_have_one_row():
    found = layouts_of(lambda x: layers.MaxPooling1D(2)(tf.nn.relu(x)), (None, 12, 3))
    assert found["Relu"] == [Layout((None, 1))] and found["MaxPool"] == [Layout((1, 2))]


def test_layouts_of_groups_and_channels_first():
    norm = layers.GroupNormalization(2)
    norm.build((2, 9, 8, 4))

    def pooled(x):
        return tf.nn.max_pool2d(x, 2, 2, "SAME")

    grouped = layouts_of(lambda x: norm(pooled(x)), (2, 9, 8, 4))
    assert grouped["SquaredDifference"] == [Layout((1, 2))]  # Of five dimensions.
    first = layouts_of(lambda x: tf.nn.relu(tf.transpose(pooled(x), [0, 3, 1, 2])), (2, 9, 8, 4))
    assert first["Relu"] == [Layout((2, 3))]


# What a reshape does ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("have", "want", "found"),
    [
        ((9, 8, 4), (9, 8, 2, 2), [([0], [0]), ([1], [1]), ([2], [2, 3])]),
        ((6, 2, 5, 3), (12, 5, 3), [([0, 1], [0]), ([2], [1]), ([3], [2])]),
        ((1, 9, 3), (9, 3), [([1], [0]), ([2], [1])]),
        ((4, 6), (6, 4), [([0, 1], [0, 1])]),
        ((4, 6), (5, 5), None),
        ((1, 1), (), []),
    ],
)
def test_groups_of_joined_or_split_dimensions(have, want, found):
    assert groups(have, want) == found


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
def test_groups_are_minimal_and_hold_equal_elements(sizes, data):
    """Joining any neighbouring dimensions is recognised, up to dimensions of size one."""
    ends = sorted(data.draw(st.sets(st.integers(1, len(sizes) - 1)))) if len(sizes) > 1 else []
    parts = [sizes[a:b] for a, b in zip([0, *ends], [*ends, len(sizes)], strict=True)]
    joined = [int(tf.reduce_prod(part)) for part in parts]
    found = groups(sizes, joined)
    assert found is not None
    assert sorted(dim for ins, _ in found for dim in ins) == [dim for dim, size in enumerate(sizes) if size != 1]
    for ins, outs in found:
        assert tf.reduce_prod([sizes[dim] for dim in ins]) == tf.reduce_prod([joined[dim] for dim in outs])


# What is refused --------------------------------------------------------------------------------------------


REFUSED = {
    "rows of two axes joined": (lambda x: tf.reshape(tf.nn.relu(x), [2, 72, 4]), "Reshape", "no image|several axes"),
    "images apart": (lambda x: tf.nn.relu(tf.reshape(x, [4, 9, 4, 4])), "Reshape", "number of"),
    "turned around": (lambda x: tf.nn.relu(x)[:, ::-1], "StridedSlice", "reverses an image"),
    "a single row": (lambda x: tf.nn.relu(x)[:, 3], "StridedSlice", "single row|no image"),
    "some images": (lambda x: tf.nn.relu(x)[:1], "StridedSlice", "slice of the batch"),
    "softmax over an axis": (lambda x: tf.nn.softmax(tf.transpose(x, [0, 3, 1, 2])), "Softmax", "along an axis"),
    "axes exchanged": (lambda x: x[:, :8] + tf.transpose(x[:, :8], [0, 2, 1, 3]), "AddV2", "has other axes"),
    "images for channels": (
        lambda x: tf.transpose(tf.nn.relu(x), [3, 1, 2, 0]),
        "Transpose",
        "of the batch or of image axes",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_rule_that_loses_axes_is_refused(what):
    function, op, reason = REFUSED[what]
    analysis = analysis_of(lambda x: function(tf.nn.max_pool2d(x, 1, 1, "SAME")), (2, 9, 8, 4))
    node = next(node for node in analysis.order if node.op == op)
    with pytest.raises(NotTileableError, match=reason):
        check_forward(analysis, node)


def test_rule_that_combines_different_axes_is_refused():
    """Additive attention combines rows along one dimension with rows along another."""

    def pairs(x):
        rows = tf.squeeze(tf.nn.max_pool2d(x, 1, 1, "SAME"), 1)
        return tf.expand_dims(rows, 2) + tf.expand_dims(rows, 1)

    analysis = analysis_of(pairs, (2, 1, 8, 4))
    node = next(node for node in analysis.order if node.op == "AddV2")
    with pytest.raises(NotTileableError, match="has other axes"):
        check_forward(analysis, node)


def test_folded_images_with_full_size_consumer_are_not_tiled():
    def step(x, w):
        with tf.GradientTape() as tape:
            tape.watch(w)
            mixed = tf.space_to_batch(tf.nn.conv2d(x, w, 1, "SAME"), [2, 2], [[0, 0], [0, 0]])
            loss = tf.reduce_sum(tf.reverse(tf.nn.relu(mixed), [0]) * tf.reduce_mean(mixed))
        return tape.gradient(loss, w)

    analysis = analysis_of(step, (3, 8, 6, 2), (3, 3, 2, 2))
    roles = assign_levels(analysis)
    assert any(node.op == "Conv2D" for node in roles.tiled)
    assert not any(analysis.entries_per_image(node.out()) != 1 for node in roles.tiled)
    assert any("folded into the batch" in reason for reason in roles.refused.values())


def test_tiles_along_missing_axis_are_refused():
    image = keras.Input((12, 10, 3))
    x = layers.Conv2D(3, 3, activation="relu")(layers.Conv2D(3, 3, activation="relu")(image))
    model = keras.Model(image, layers.GlobalAveragePooling2D()(x))
    model.compile("sgd", "mse", jit_compile=False)
    data = tf.zeros((2, 12, 10, 3)), tf.zeros((2, 3))
    with pytest.raises(ValueError, match=r"names \['depth'\], but the tiled tensor has the axes batch, height, width"):
        model.fit(*data, verbose=0, callbacks=[tflms_sft.SFT(num_tiles={"depth": 2}, verbose=0)])


@pytest.mark.parametrize("options", [{"num_tiles": (4,)}, {"num_tiles": {"length": 4}}, {"num_tiles": (1, 4)}])
@pytest.mark.parametrize("halo", ["recompute", "carry"])
def test_sequence_ops_via_images_are_tiled_along_length(options, halo):
    """All operands and results of this segment lie between `ExpandDims` and `Squeeze`."""
    keras.config.set_floatx("float64")
    x = photo = keras.Input((64, 3), name="photo")
    x = layers.Conv1D(4, 3, padding="same")(x)
    x = layers.SeparableConv1D(5, 3, padding="same", activation="tanh", name="separable")(x)
    model = keras.Model(photo, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))
    sequences = tf.random.stateless_normal((2, 64, 3), [1, 2], dtype=tf.float64)

    @tf.function
    def step(sequences):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(sequences) ** 2)
        return loss, tape.gradient(loss, model.trainable_variables)

    concrete_fn = step.get_concrete_function(sequences)
    ops = [op for op in concrete_fn.graph.get_operations() if "separable" in op.name and "gradient" not in op.name]
    first = next(op.name for op in ops if op.type == "ExpandDims")
    last = next(op.name for op in reversed(ops) if op.type == "Conv2D")
    spec = tflms_sft.SegmentSpec(first, last, **options)
    fast = tflms_sft.rewrite(step, tflms_sft.SFTParams(segments=[spec], halo=halo), sequences)
    assert fast.plan.segments[0].num_tiles == (1, 1, 4)
    traced = Step(concrete_fn, model.variables, [[sequences]])
    want, got = traced.run(concrete_fn), traced.run(fast.concrete_function)
    assert max(error(got[name], want[name]) for name in want) < 1e-10


@pytest.mark.parametrize("params", [SFTParams(), SFTParams(num_tiles=(1, 4), halo="carry")], ids=["tiles", "rows"])
def test_max_pool_grad_outside_of_segment_equals_original(params):
    """The gradient would recompute the maximum in a loop, but the ops between both belong to no segment."""
    keras.config.set_floatx("float32")
    image = keras.Input((41, 3))
    x = layers.Conv1D(4, 5, padding="causal", dilation_rate=2, activation="relu")(image)
    x = layers.UpSampling1D(2)(layers.SeparableConv1D(5, 3, padding="same")(layers.MaxPool1D(2)(x)))
    model = keras.Model(image, layers.Conv1DTranspose(3, 4, strides=3, padding="same")(x)[:, 1:-2:2])
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(images, wanted):
        with tf.GradientTape() as tape:
            tape.watch(images)
            loss = tf.reduce_mean((model(images) - wanted) ** 2)
        gradients = tape.gradient(loss, [*model.trainable_variables, images])
        optimizer.apply(gradients[:-1], model.trainable_variables)
        return loss, gradients

    numbers = np.random.default_rng(0)
    shapes = (2, 41, 3), (2, *model.output.shape[1:])
    arguments = [tf.constant(numbers.normal(size=shape), tf.float32) for shape in shapes]
    concrete_fn = step.get_concrete_function(*arguments)
    traced = Step(concrete_fn, [*model.variables, *optimizer.variables], [arguments, arguments])
    fast = tflms_sft.rewrite(step, params, *arguments)
    assert fast.plan.segments
    want, got = traced.run(concrete_fn), traced.run(fast.concrete_function)
    assert max(error(got[name], want[name]) for name in want) < 1e-5


CHANNELS_FIRST = """
    import os
    os.environ["TF_ENABLE_ONEDNN_OPTS"] = "1"
    import keras, numpy as np, tensorflow as tf, tflms_sft
    from keras import layers
    from equivalence import error, model_step

    keras.utils.set_random_seed(0)
    keras.config.set_image_data_format("channels_first")
    image = x = keras.Input((3, 14, 12), batch_size=3)
    for filters in (4, 4, 5):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization(axis=1)(x))
    x = layers.Conv2DTranspose(4, 3, strides=2, padding="same")(x)
    model = keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))
    noise = np.random.RandomState(0)
    batches = [(noise.normal(size=(3, 3, 14, 12)).astype("float32"), np.arange(3, dtype="int32")) for _ in range(2)]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = model_step(model, batches, True, {"optimizer": keras.optimizers.SGD(0.1), "loss": loss})
    want = step.run(step.concrete_fn)
    tiled = tflms_sft.rewrite(step.concrete_fn, tflms_sft.SFTParams(num_tiles=(3, 2)))
    got = step.run(tiled.concrete_function)
    assert set(got) == set(want) and not tiled.plan.left_alone
    print(tiled.plan.segments[0].num_loops, max(error(got[key], want[key]) for key in want))
"""


def test_channels_first_convolutions_equal_original():
    """On the CPU only oneDNN has these kernels, in float32; other tests run without it."""
    code = textwrap.dedent(CHANNELS_FIRST)
    path = os.pathsep.join(sys.path)
    env = os.environ | {"PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    loops, off = done.stdout.split()[-2:]
    assert int(loops) > 6
    assert float(off) < 1e-5
