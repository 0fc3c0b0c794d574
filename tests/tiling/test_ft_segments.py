"""SFT's analyses on small networks: FT-compatible dimensions, cuts, and the partition by memory capacity."""

import itertools

import keras
import pytest
import tensorflow as tf
from gradients import gradient_step
from keras import layers

from rewriters.analysis.graph_analysis import GraphAnalysis, check_forward
from rewriters.canonicalize.canonicalize import read_canonical
from rewriters.errors import NotTileableError
from rewriters.rules.registry import TileKind, find_rule
from rewriters.tiling import ft_segments


def analysed(body, size=32, channels=3):
    image = keras.Input((size, size, channels))
    model = keras.Model(image, layers.GlobalAveragePooling2D()(body(image)))
    step = gradient_step(model)
    return GraphAnalysis(read_canonical(step.get_concrete_function(tf.TensorSpec((1, size, size, channels)))))


def conv(filters=4, kernel=3, **options):
    return layers.Conv2D(filters, kernel, **{"padding": "same", "activation": "relu", **options})


def forward(analysis, op):
    """Return the first forward op of a type."""
    return next(n for n in analysis.order if n.op == op and n not in analysis.backward)


# Operators --------------------------------------------------------------------------------------------------


def test_check_forward_partial_sums_are_refused(monkeypatch):
    """Forward values of a tile are read as final, so that no rule may return a part of a sum for them."""
    analysis = analysed(conv())
    relu = forward(analysis, "Relu")
    monkeypatch.setattr(type(find_rule(relu)), "result_kind", lambda *_: TileKind.PARTIAL)
    with pytest.raises(NotTileableError, match="its result is a sum over tiles"):
        check_forward(analysis, relu)


@pytest.mark.parametrize(
    ("layer", "op", "expected"),
    [
        (conv(), "Conv2D", (1, 2)),
        (conv(padding="valid"), "Conv2D", (1, 2)),
        (conv(kernel=5), "Conv2D", (1, 4)),
        (conv(kernel=1), "Conv2D", (1, 0)),
        (conv(strides=2), "Conv2D", (2, 1)),
        (layers.MaxPool2D(2), "MaxPool", (2, 0)),
        (layers.MaxPool2D(3, 2), "MaxPool", (2, 1)),
        (layers.AveragePooling2D(2), "AvgPool", (2, 0)),
        (conv(), "Relu", (1, 0)),
        (conv(), "BiasAdd", (1, 0)),
        (layers.DepthwiseConv2D(3), "DepthwiseConv2dNative", (1, 2)),
    ],
    ids=range(11),
)
def test_scale_and_delta_equal_table_4(layer, op, expected):
    analysis = analysed(layer, size=200)
    node = forward(analysis, op)
    assert [ft_segments.scale_and_delta(analysis, node, 0, axis) for axis in (0, 1)] == [expected, expected]


def test_scale_and_delta_differ_by_axis():
    analysis = analysed(conv(kernel=(3, 5)), size=200)
    node = forward(analysis, "Conv2D")
    assert [ft_segments.scale_and_delta(analysis, node, 0, axis) for axis in (0, 1)] == [(1, 2), (1, 4)]


def test_segment_dimensions_are_intersection_of_op_dimensions():
    analysis = analysed(lambda x: layers.MaxPool2D(2)(conv()(x)))
    tiled = [forward(analysis, op) for op in ("Conv2D", "BiasAdd", "Relu", "MaxPool")]
    for node in tiled:
        assert ft_segments.ft_dimensions(analysis, node) == {"batch", "height", "width"}
    mean = forward(analysis, "Mean")
    assert ft_segments.ft_dimensions(analysis, mean) == frozenset()
    assert ft_segments.segment_dimensions(analysis, tiled) == {"batch", "height", "width"}
    assert ft_segments.segment_dimensions(analysis, [*tiled, mean]) == frozenset()


# Cuts -------------------------------------------------------------------------------------------------------


def chain(x):
    return layers.MaxPool2D(2)(conv()(conv()(x)))


def residual(x):
    x = conv()(x)
    for _ in range(2):
        x = layers.Add()([x, conv()(conv()(x))])
    return x


def unet(x):
    wide = conv()(x)
    deep = conv()(layers.MaxPool2D(2)(wide))
    up = layers.Conv2DTranspose(4, 2, strides=2)(deep)
    return conv()(layers.Concatenate()([wide, up]))


def on_every_path(analysis, nodes):
    """Return the positions of the ops on every path from the first op to the last, by enumeration of all paths."""
    position = {node: index for index, node in enumerate(nodes)}
    after = {
        index: sorted(
            {
                position[reader]
                for i in range(len(node.outputs))
                for reader, _ in analysis.consumers.get(node.out(i), ())
                if reader in position
            }
        )
        for node, index in position.items()
    }

    def paths(index):
        if not after[index]:
            return [[index]]
        return [[index, *tail] for follower in after[index] for tail in paths(follower)]

    all_paths = paths(0)
    assert {path[-1] for path in all_paths} == {len(nodes) - 1}
    return sorted(set.intersection(*map(set, all_paths))), all_paths


@pytest.mark.parametrize(("body", "forks"), [(chain, False), (residual, True), (unet, True)])
def test_cuts_are_post_dominators(body, forks):
    analysis = analysed(body)
    (component,), _ = ft_segments.find_components(analysis)
    expected, paths = on_every_path(analysis, component.nodes)
    assert (len(paths) > 1) == forks
    assert component.cuts == expected == ft_segments.post_dominators(analysis, component.nodes)
    assert (len(expected) < len(component.nodes)) == forks
    for cut in component.cuts:
        assert component.cut_tensor(analysis, cut).node is component.nodes[cut]


def test_cuts_ignore_entry_read_after_cut():
    (component,), _ = ft_segments.find_components(analysed(lambda x: layers.Add()([x, conv(3)(x)])))
    assert [node.op for node in component.nodes] == ["Conv2D", "BiasAdd", "Relu", "AddV2"]
    assert component.cuts == [0, 1, 2, 3]


# Partition --------------------------------------------------------------------------------------------------

NODES = ["Conv2D", "BiasAdd", "Relu", "MaxPool"] * 3
"""Bytes of each op's output, in float32 with 4 channels: 16 KiB for 32x32, 4 KiB, 1 KiB, and 256 B at the end."""


def three_blocks(x):
    for _ in range(3):
        x = layers.MaxPool2D(2)(conv()(x))
    return x


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [
        (None, [(0, 12)]),
        (255, [(0, 12)]),  # All tensors exceed the capacity: one segment.
        (256, [(0, 12)]),  # Only the last tensor fits; it ends the segment anyway.
        (1023, [(0, 12)]),
        (1024, [(0, 8)]),  # The third block fits ("may tile").
        (4095, [(0, 8)]),
        (4096, [(0, 4)]),
        (16383, [(0, 4)]),
        (16384, []),
        (10**9, []),
    ],
)
def test_find_segments_end_at_first_tensor_within_capacity(capacity, expected):
    analysis = analysed(three_blocks)
    (component,), _ = ft_segments.find_components(analysis)
    assert [node.op for node in component.nodes] == NODES
    assert [node.out().num_bytes() for node in component.nodes[3::4]] == [4096, 1024, 256]
    ranges = ft_segments.find_segments(analysis, component, capacity, 1)
    assert ranges == [range(*bounds) for bounds in expected]


def test_find_segments_small_tensor_between_large_ones_ends_segment():
    def hourglass(x):
        x = layers.MaxPool2D(4)(conv()(x))
        x = layers.Conv2DTranspose(4, 4, strides=4, use_bias=False)(x)
        return conv()(x)

    analysis = analysed(hourglass)
    (component,), _ = ft_segments.find_components(analysis)
    ops = [node.op for node in component.nodes]
    assert ops == ["Conv2D", "BiasAdd", "Relu", "MaxPool", "Conv2DBackpropInput", "Conv2D", "BiasAdd", "Relu"]
    assert ft_segments.find_segments(analysis, component, 2000, 1) == [range(0, 4), range(4, 8)]
    assert ft_segments.find_segments(analysis, component, 500, 1) == [range(0, 8)]


def test_find_segments_capacity_counts_batch():
    analysis = analysed(three_blocks)
    (component,), _ = ft_segments.find_components(analysis)
    sizes = [node.out().num_bytes(5) for node in component.nodes]
    assert sizes == [node.out().num_bytes(1) for node in component.nodes], "the batch is known here"


# Components -------------------------------------------------------------------------------------------------


def squeeze_and_excite(x):
    x = conv()(x)
    for _ in range(2):
        gate = layers.Dense(4, activation="sigmoid")(layers.GlobalAveragePooling2D(keepdims=True)(x))
        x = conv()(layers.Multiply()([x, gate]))
    return x


def test_find_components_detour_outside_gives_convex_components():
    analysis = analysed(squeeze_and_excite)
    components, left = ft_segments.find_components(analysis)
    assert [[node.op for node in c.nodes] for c in components] == [
        ["Conv2D", "BiasAdd", "Relu"],
        ["Mul", "Conv2D", "BiasAdd", "Relu"],
        ["Mul", "Conv2D", "BiasAdd", "Relu"],
    ]
    assert [item.name.rpartition("/")[2] for item in left] == ["Mean"] * 3
    for component in components:
        assert is_convex(analysis, component.nodes)


def is_convex(analysis, nodes):
    inside, below = set(nodes), set()
    for node in analysis.order:
        inputs = [tensor.node for tensor in node.inputs]
        if node in inside:
            if any(before in below for before in inputs):
                return False
        elif any(before in inside or before in below for before in inputs):
            below.add(node)
    return True


def test_find_components_partition_tileable_ops():
    analysis = analysed(lambda x: squeeze_and_excite(unet(x)))
    components, _ = ft_segments.find_components(analysis)
    for one, other in itertools.combinations(components, 2):
        assert not set(one.nodes) & set(other.nodes)
    held = {node for c in components for node in c.nodes}
    convolutions = {n for n in analysis.order if n.op == "Conv2D" and n not in analysis.backward}
    assert convolutions and convolutions <= held


def test_auto_segments_are_numbered_and_share_no_backward_op():
    analysis = analysed(squeeze_and_excite)
    segments, _ = ft_segments.auto_segments(analysis, None, 1, {})
    assert [segment.name for segment in segments] == [f"segment{n}" for n in range(1, len(segments) + 1)]
    assert len(segments) >= 2
    for one, other in itertools.combinations(segments, 2):
        assert not set(one.backward) & set(other.backward)
        assert not set(one.forward) & set(other.forward)


# Skipped ops -----------------------------------------------------------------------------------------


def whole(x):
    """A layer that no rule tiles."""
    return layers.Lambda(lambda t: tf.roll(t, [1], [1]))(x)


def test_saved_bytes_are_bytes_not_saved_for_backward():
    analysis = analysed(lambda x: conv(name="two")(conv(name="one")(x)))
    (segment,), _ = ft_segments.auto_segments(analysis, None, 1, {})
    assert ft_segments.saved_bytes(analysis, segment, 1) == 4 * 32 * 32 * 4, (
        "the first of two activations; the image is there"
    )


def test_saved_bytes_subtract_entry_read_by_recomputation_only():
    """The original step saves the first activation; with tiles, the step saves the operand of its op."""

    def body(*extra_layers):
        def build(x):
            for layer in (whole, layers.Activation("relu"), *extra_layers, whole):
                x = layer(x)
            return x

        return build

    segments, left = ft_segments.auto_segments(analysed(body(conv(activation=None))), None, 1, {})
    assert segments == [] and any("would save as many bytes" in item.reason for item in left)
    analysis = analysed(body(conv(3), conv(3)))
    (segment,), _ = ft_segments.auto_segments(analysis, None, 1, {})
    assert ft_segments.saved_bytes(analysis, segment, 1) == (2 - 1) * 3 * 32 * 32 * 4


def test_auto_segments_volumes_skip_ops_that_mix_axes():
    image = keras.Input((8, 8, 8, 2))
    model = keras.Model(image, layers.Flatten()(layers.ReLU()(layers.Conv3D(2, 3)(image))))

    @tf.function
    def step(images):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(images) ** 2)
        return loss, tape.gradient(loss, model.trainable_variables)

    read_step = GraphAnalysis(read_canonical(step.get_concrete_function(tf.zeros((1, 8, 8, 8, 2)))))
    (component, *_), left = ft_segments.find_components(read_step)
    assert {"Conv3D", "Relu"} <= {node.op for node in component.nodes}
    assert left[0].reason == "Reshape: `functional_1/flatten_1/Reshape:0` of shape (1, 432) is no image"
