"""Networks without padding on parts of an image: the formulas of Seal et al., the rules, and what networks compute."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers
from sample_nets import described

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.analysis.receptive_field import repetition
from rewriters.canonicalize.canonicalize import read_canonical
from rewriters.errors import RewriteError
from rewriters.rules.intervals import Interval, Window
from tflms_sft.unets import TABLE_1, Architecture, sample_tiling

SMALL, MEDIUM_1, MEDIUM_2, LARGE = TABLE_1


# Formulas -----------------------------------------------------------------------------------------------------------


def test_architecture_of_table_1_matches_paper():
    assert [model.epsilon for model in TABLE_1] == [92, 230, 188, 380]
    assert [model.smallest for model in TABLE_1] == [188, 470, 380, 764]
    assert [model.alignment for model in TABLE_1] == [16, 16, 32, 64]
    assert [model.table_1_parameters() for model in TABLE_1] == [72301856, 232687904, 289357088, 1157578016]
    assert SMALL.result_rows(572) == 388  # Ronneberger et al., figure 1.
    assert SMALL.encoder_rows(572) == (572, 284, 140, 68, 32)
    assert SMALL.decoder_rows(572) == (56, 104, 200, 392)
    assert SMALL.repeated(10000, 6) == pytest.approx((10000 / 6 + 184) ** 2 / (10000 / 6) ** 2)


def test_equation_6_is_neither_necessary_nor_sufficient():
    assert SMALL.printed_bound == 212
    assert SMALL.admits(188) and not SMALL.admits(213)
    assert [rows for rows in range(170, 240) if SMALL.admits(rows)] == [188, 204, 220, 236]
    for model, rows in itertools.product(TABLE_1, (192, 512, 1024, 1434)):
        assert not model.admits(rows)
    assert (SMALL.nearest(1434), SMALL.nearest(100), SMALL.nearest(204)) == ((1420, 1436), (188,), (204,))
    with pytest.raises(ValueError, match="`rows` must be 188 plus a multiple of 16.*rows=1434. Nearest: 1420 or 1436"):
        SMALL.result_rows(1434)


def runs(architecture, rows):
    """Level by level: the rows of the result, if every pool takes all rows and every level has some."""
    lost = architecture.lost * architecture.convolutions
    for _ in range(architecture.levels - 1):
        rows -= lost
        if rows < 2 or rows % 2:
            return None
        rows //= 2
    rows -= lost
    for _ in range(architecture.levels - 1):
        if rows < 1:
            return None
        rows = 2 * rows - lost
    return rows if rows > 0 else None


@settings(deadline=None)
@given(st.integers(2, 5), st.integers(1, 4), st.integers(1, 3))
def test_admits_equals_level_by_level_arithmetic(levels, convolutions, half):
    architecture = Architecture("any", levels, convolutions, kernel=2 * half + 1)
    for rows in range(1, architecture.smallest + 3 * architecture.alignment):
        assert architecture.admits(rows) == (runs(architecture, rows) is not None)
        if architecture.admits(rows):
            assert architecture.result_rows(rows) == runs(architecture, rows)


def test_architecture_memory_equals_sizes_of_tensors():
    """Equations 9 and 10, but that the image of a level counts as one channel."""
    architecture = Architecture("little", 3, 2, filters=2)
    model, rows = described(architecture, 60, filters=2), 60
    graph = read_canonical(tf.function(model).get_concrete_function(tf.TensorSpec((1, rows, rows, 1))))
    made = {"Conv2D": [], "ConcatV2": []}
    for node in GraphAnalysis(graph).order:
        if node.op in made and node.out().shape[-1] > 1:
            made[node.op].append(node.out().num_bytes(1) // 4)
    convolutions = [sum(made["Conv2D"][2 * place : 2 * place + 2]) for place in range(5)]
    images = [own**2 for own in architecture.encoder_rows(rows)]
    assert [size - image for size, image in zip(architecture.memory(rows), images, strict=False)] == convolutions[:3]
    beside = [put + own for put, own in zip(made["ConcatV2"], convolutions[3:], strict=True)]
    assert list(architecture.memory(rows)[3:]) == beside


# The rules agree ----------------------------------------------------------------------------------------------------


def same_as(architecture, tiling):
    assert [axis.axis for axis in tiling.axes] == [0, 1]
    for axis in tiling.axes:
        assert (axis.halo_before, axis.halo_after) == (architecture.epsilon, architecture.epsilon)
        assert (axis.alignment, axis.smallest, axis.scale) == (architecture.alignment, architecture.smallest, 1)
        assert (axis.smallest_result, axis.dim) == (architecture.smallest_result, axis.axis + 1)
        rows = architecture.smallest + 3 * architecture.alignment
        assert axis.admits(rows) and not axis.admits(rows + 1)
        assert axis.result_rows(rows) == architecture.result_rows(rows)
        assert axis.nearest(rows + 1) == architecture.nearest(rows + 1)


@pytest.mark.parametrize("architecture", TABLE_1, ids=lambda model: model.name)
def test_sample_tiling_equals_formulas(architecture):
    rows = architecture.smallest + 8 * architecture.alignment
    same_as(architecture, sample_tiling(described(architecture, rows)))


@pytest.mark.parametrize("crop", ["layers", "as it comes"])
def test_sample_tiling_of_free_model_probes_valid_size(crop):
    architecture = Architecture("little", 3, 1)
    model = described(architecture, None, crop=crop)
    same_as(architecture, sample_tiling(model))
    if crop == "layers":
        with pytest.raises(
            ValueError, match="`model` cannot be traced. Received: size=101. Keras's error: .*Concatenate"
        ):
            sample_tiling(model, size=101)
    else:
        same_as(architecture, sample_tiling(model, size=(101, 103)))


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 3))
@settings(deadline=None)
def test_sample_tiling_scale_equals_window_strides(kernel, stride, dilation, pad):
    span = (kernel - 1) * dilation + 1
    large = 40 * stride + span
    small = (large + pad - span) // stride + 1
    window = Window(kernel, stride, dilation, pad, large, small)
    rows = np.arange(small)
    found = repetition(window.rows_covered(Interval(rows, rows + 1)), large)
    assert (found.period, found.advance) == (1, stride)
    assert found.needs(3, 9) == (3 * stride - pad, 8 * stride - pad + span)
    if span >= stride:
        rows = np.arange(large)
        back = repetition(window.windows_overlapping(Interval(rows, rows + 1)), small)
        assert (back.period, back.advance) == (stride, 1)
        middle = window.windows_overlapping(Interval(np.array([15 * stride]), np.array([18 * stride + 1])))
        assert back.needs(15 * stride, 18 * stride + 1) == (middle.lo[0], middle.hi[0])


# What networks compute ----------------------------------------------------------------------------------------------


def strided(x):
    x = layers.Conv2D(2, 5, strides=2, activation="relu")(x)
    return layers.AveragePooling2D(3, 2)(layers.Conv2D(2, (3, 2))(x))


def repeated(x):
    """More rows come out than go in."""
    x = layers.Conv2D(2, 3, activation="relu")(layers.UpSampling2D((2, 3))(x))
    return layers.Cropping2D(((1, 2), (0, 1)))(x)


def dilated(x):
    wide = layers.Conv2D(2, 3, dilation_rate=2)(x)
    return layers.Concatenate()([wide, layers.Cropping2D(2)(x)])


def back_and_forth(x):
    """A transposed convolution whose windows overlap, with the borders that have fewer of them cut off."""
    x = layers.MaxPool2D(3, 2)(x)
    return layers.Cropping2D(2)(layers.Conv2DTranspose(2, 4, strides=2)(layers.Conv2D(2, 1)(x)))


def at_odds(x):
    """One pool leaves nothing over of an odd number of rows, the other one of an even number."""
    return layers.Concatenate()([layers.MaxPool2D(2)(layers.Conv2D(2, 2)(x)), layers.MaxPool2D(2)(x)])


def u_net(x):
    return described(Architecture("little", 3, 1), None)(x)


@pytest.fixture
def float64():
    keras.config.set_floatx("float64")


def parts(tiling, rows, more):
    """Sizes of an image and of its tiles, near `rows`."""
    image = [axis.nearest(rows)[-1] for axis in tiling.axes]
    return image, [axis.nearest(axis.smallest + more)[-1] for axis in tiling.axes]


@pytest.mark.parametrize(
    "body", [strided, repeated, dilated, back_and_forth, at_odds, u_net], ids=lambda body: body.__name__
)
def test_tiles_compose_whole_result_and_gradients(body, float64):
    image = keras.Input((None, None, 1))
    model = keras.Model(image, body(image))
    tiling = sample_tiling(model)
    sizes, tile_sizes = parts(tiling, 61, 9)
    x = tf.random.stateless_normal((1, *sizes, 1), (1, 2), dtype=tf.float64)
    with tf.GradientTape() as tape:
        whole = model(x)
        loss = tf.reduce_sum(whole**3)
    wanted = tape.gradient(loss, model.trainable_variables)
    assert list(whole.shape[1:3]) == [axis.result_rows(own) for axis, own in zip(tiling.axes, sizes, strict=True)]

    made = np.full(whole.shape, np.nan)
    sums = [tf.zeros_like(own) for own in wanted]
    tiles = tiling.tiles(sizes, tile_sizes)
    assert len(tiles) > 3
    for tall, wide in tiles:
        tiling.check((tall.begin, tall.end), (wide.begin, wide.end))
        with tf.GradientTape() as tape:
            result = model(x[:, tall.begin : tall.end, wide.begin : wide.end])[:, tall.keep, wide.keep]
            loss = tf.reduce_sum(result**3)
        assert np.all(np.isnan(made[:, tall.first : tall.last, wide.first : wide.last])), "twice"
        made[:, tall.first : tall.last, wide.first : wide.last] = result
        sums = [one + own for one, own in zip(sums, tape.gradient(loss, model.trainable_variables), strict=True)]
    np.testing.assert_allclose(made, whole, rtol=1e-12, atol=1e-14)
    for one, own in zip(sums, wanted, strict=True):
        np.testing.assert_allclose(one, own, rtol=1e-10, atol=1e-10 * np.max(np.abs(own)))


@st.composite
def chains(draw):
    """Windows one after the other: (layer, rows of a window, rows between them)."""
    kinds = draw(st.lists(st.sampled_from(["convolution", "pool", "up", "repeat"]), max_size=3))
    chain = []
    for kind in ("convolution", *kinds):
        stride = draw(st.integers(1, 3))
        chain.append((kind, stride if kind in ("up", "repeat") else draw(st.integers(1, 4)), stride))
    return chain


@settings(deadline=None, max_examples=12, derandomize=True)
@given(chains())
def test_random_window_chains_in_tiles_equal_whole(chain):
    keras.config.set_floatx("float64")
    made = {"convolution": layers.Conv1D, "up": layers.Conv1DTranspose}
    steps = keras.Input((None, 1))
    x = steps
    for kind, window, stride in chain:
        if kind in made:
            x = made[kind](2, window, strides=stride, activation="tanh")(x)
        else:
            x = (layers.MaxPool1D(window, stride) if kind == "pool" else layers.UpSampling1D(stride))(x)
    model = keras.Model(steps, x)
    (axis,) = sample_tiling(model).axes

    def counted(rows):
        for kind, window, stride in chain:
            if kind in ("up", "repeat"):
                rows *= stride
            elif rows < window or (rows - window) % stride:
                return None
            else:
                rows = (rows - window) // stride + 1
        return rows

    some = range(1, axis.smallest + 3 * axis.alignment)
    if any(map(counted, some)):
        for rows in some:
            assert axis.admits(rows) == (counted(rows) is not None)
            assert not axis.admits(rows) or axis.result_rows(rows) == counted(rows)
    size = axis.smallest + 7 * axis.alignment
    image = tf.random.stateless_normal((1, size, 1), (1, 2), dtype=tf.float64)
    least = next(rows for rows in range(axis.smallest, size) if axis.admits(rows) and axis.result_rows(rows) >= 1)
    tiles = axis.tiles(size, least + 2 * axis.alignment)
    parts = [model(image[:, tile.begin : tile.end])[:, tile.keep] for tile in tiles]
    np.testing.assert_allclose(tf.concat(parts, 1), model(image), rtol=1e-12, atol=1e-14)


def test_misaligned_tile_differs_and_is_refused(float64):
    architecture = Architecture("little", 3, 1)
    model = described(architecture, None, filters=2)
    (axis, _) = sample_tiling(model).axes
    x = tf.random.stateless_normal((1, 62, 62, 1), (1, 2), dtype=tf.float64)
    whole, rows = model(x), axis.nearest(axis.smallest + 9)[-1]
    error = {
        begin: np.max(np.abs(model(x[:, begin : begin + rows]) - whole[:, begin : begin + axis.result_rows(rows)]))
        for begin in (0, 3, 4, 6)
    }
    scale = np.max(np.abs(whole))
    assert error[0] < 1e-12 * scale and error[4] < 1e-12 * scale
    assert error[3] > 1e-2 * scale and error[6] > 1e-2 * scale
    axis.check(4, 4 + rows)
    for begin, nearest in ((3, "0 and 4"), (6, "4 and 8")):
        with pytest.raises(ValueError, match=f"begin at multiples of 4, the nearest at {nearest}"):
            axis.check(begin, begin + rows)
    both = r"of axis 0 .*multiples of 4, the nearest at 0 and 4; `end - begin` must be .*end - begin=30. Nearest: 30"
    with pytest.raises(
        ValueError, match=both.replace("=30. Nearest: 30", f"={rows + 1}. Nearest: {rows} or {rows + 4}")
    ):
        axis.check(1, rows + 2)


def test_tiles_of_standard_unet_overlap_and_count_rows_once():
    (axis, _) = sample_tiling(described(SMALL, 572)).axes
    tiles = axis.tiles(572, 236)
    assert [(t.begin, t.end) for t in tiles] == [(begin, begin + 236) for begin in range(0, 337, 48)]
    assert [(t.first, t.last) for t in tiles][-2:] == [(292, 340), (340, 388)]
    assert [t.keep for t in tiles][:2] == [slice(0, 52), slice(4, 52)]
    assert axis.tiles(572, 572) == ((0, 572, 0, 388, 0),)
    with pytest.raises(ValueError, match="`tile_rows` must be at least 204, .*: tiles begin 16 rows .* yields 4 rows"):
        axis.tiles(572, 188)
    with pytest.raises(ValueError, match="`rows` must be 188 plus a multiple of 16"):
        axis.tiles(1434, 236)
    with pytest.raises(ValueError, match="`tile_rows` must be at most the image's 572. Received: tile_rows=588"):
        axis.tiles(572, 588)


def test_sample_tiling_of_sequences_and_volumes_has_axes():
    steps = keras.Input((101, 2))
    (axis,) = sample_tiling(keras.Model(steps, layers.MaxPool1D(2)(layers.Conv1D(2, 4)(steps)))).axes
    assert (axis.alignment, axis.scale, axis.smallest, axis.halo_before, axis.halo_after) == (2, 2, 5, 1, 2)
    volume = keras.Input((40, 50, 61, 1))
    x = layers.Conv3D(1, (3, 1, 5), strides=(1, 1, 2))(volume)
    axes = sample_tiling(keras.Model(volume, x)).axes
    assert [(axis.axis, axis.alignment, axis.smallest) for axis in axes] == [(0, 1, 3), (1, 1, 1), (2, 2, 5)]


def test_sample_tiling_halo_may_be_asymmetric():
    """Three rows are cropped above and one below, and a convolution takes one more on either side."""
    image = keras.Input((64, 64, 1))
    x = layers.Conv2D(1, 3)(layers.Cropping2D(((3, 1), (0, 0)))(image))
    high, wide = sample_tiling(keras.Model(image, x)).axes
    assert (high.halo_before, high.halo_after, high.smallest) == (4, 2, 7)
    assert (wide.halo_before, wide.halo_after, wide.smallest) == (1, 1, 3)


# Refusals -----------------------------------------------------------------------------------------------------------


def refused(body, error, text, size=64, **options):
    image = keras.Input((size, size, 2))
    with pytest.raises(error, match=text):
        sample_tiling(keras.Model(image, body(image)), **options)


def test_sample_tiling_of_padding_network_is_refused():
    text = (
        r"conv2d.* \(Conv2D\) pads its image, and would pad tiles .*padding='valid'.*tile the network with `SFTParams`"
    )
    refused(layers.Conv2D(2, 3, padding="same"), RewriteError, text)
    refused(layers.Conv2DTranspose(2, 4, strides=2), RewriteError, r"\(Conv2DBackpropInput\) pads its image")
    refused(lambda x: keras.ops.pad(x, [[0, 0], [1, 1], [0, 0], [0, 0]], "reflect"), RewriteError, "pads its image")
    refused(lambda x: keras.ops.flip(x, axis=1), RewriteError, "cannot run on tiles of an image: it reverses its rows")
    refused(layers.GlobalAveragePooling2D(keepdims=True), RewriteError, "is no image|cannot run on tiles of an image")
    refused(lambda x: x * layers.GlobalMaxPooling2D(keepdims=True)(x), RewriteError, "cannot run on tiles of an image")


def test_sample_tiling_of_normalisation_depends_on_training():
    image = keras.Input((64, 64, 2))
    model = keras.Model(image, layers.BatchNormalization()(layers.Conv2D(2, 3)(image)))
    assert [axis.halo_before for axis in sample_tiling(model).axes] == [1, 1]
    with pytest.raises(RewriteError, match="cannot run on tiles of an image"):
        sample_tiling(model, training=True)


def test_sample_tiling_of_invalid_fixed_size_is_refused():
    architecture = Architecture("little", 3, 1)
    model = described(architecture, 64, crop="as it comes")
    text = "fixed size of 64 rows, of which .*MaxPool.* drops the last ones.*Received: model=<Func.* 62 or 66 rows"
    with pytest.raises(ValueError, match=text):
        sample_tiling(model)


def test_sample_tiling_with_wrong_arguments_is_refused():
    text = "of shape .* is not an image of static size, or no convolution or pooling determines its axes"
    steps = keras.Input((100, 2))
    with pytest.raises(RewriteError, match=text):
        sample_tiling(keras.Model(steps, layers.UpSampling1D(2)(steps)))
    refused(
        layers.Conv2D(2, 3),
        RewriteError,
        "computes 6 rows from 8, too few to find .* Trace the network for a larger",
        8,
    )
    image, other = keras.Input((None, None, 1)), keras.Input((None, None, 1))
    with pytest.raises(ValueError, match="one image and one result. Received: .* Wrap a subclassed model: keras.Model"):
        sample_tiling(keras.Model([image, other], layers.Add()([image, other])))
    with pytest.raises(ValueError, match="`size` needs 2 numbers, one for each free dimension. Received: size=.100"):
        sample_tiling(keras.Model(image, layers.Conv2D(1, 3)(image)), size=[100])
