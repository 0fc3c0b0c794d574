"""U-Nets with BatchNorm, Dice loss and odd sizes, in two dimensions and three: all that a step computes."""

import keras
import numpy as np
import pytest
from equivalence import TOLERANCE, error, model_step
from keras import layers

import tflms_sft

CONV = {2: layers.Conv2D, 3: layers.Conv3D}
TRANSPOSED = {2: layers.Conv2DTranspose, 3: layers.Conv3DTranspose}
SIZES = {2: (37, 26), 3: (13, 10, 11)}
KNOWN_OR_NOT = pytest.mark.parametrize(
    "known_batch", (pytest.param(True, marks=pytest.mark.slow), False), ids=("known", "unknown")
)


def block(x, filters, rank):
    for _ in range(2):
        x = layers.ReLU()(layers.BatchNormalization()(CONV[rank](filters, 3, padding="same")(x)))
    return x


def down(x, filters, rank):
    """TensorFlow pools no volumes in float64."""
    return layers.MaxPooling2D(2, padding="same")(x) if rank == 2 else CONV[3](filters, 2, 2, "same")(x)


def up(x, skip, filters, rank, how):
    """Upsample to the size of the skip tensor, which may be odd."""
    if how == "transposed":
        x = TRANSPOSED[rank](filters, 2, strides=2)(x)
    elif how == "nearest":
        x = (layers.UpSampling2D if rank == 2 else layers.UpSampling3D)(2)(x)
    else:
        x = layers.Resizing(*skip.shape[1:3], interpolation="bilinear")(x)
    crops = tuple((0, have - want) for have, want in zip(x.shape[1:-1], skip.shape[1:-1], strict=True))
    return (layers.Cropping2D if rank == 2 else layers.Cropping3D)(crops)(x)


def dice(pixels, numbers):
    """One probability for each pixel."""
    labels = numbers.integers(0, 2, (2, *pixels, 1)).astype("float64")
    return 1, "sigmoid", keras.losses.Dice(), labels


def sparse(pixels, numbers):
    """Logits, and one label for each pixel."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return 3, None, loss, numbers.integers(0, 3, (2, *pixels))


def categorical(pixels, numbers):
    """Logits, and a distribution for each pixel."""
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    return 4, None, loss, np.eye(4)[numbers.integers(0, 4, (2, *pixels))]


def u_net(rank, how, known_batch, target=dice):
    keras.config.set_floatx("float64")
    x = image = keras.Input((*SIZES[rank], 2), batch_size=2 if known_batch else None)
    skips = []
    for filters in (3, 4):
        skips.append(block(x, filters, rank))
        x = down(skips[-1], filters, rank)
    x = block(x, 5, rank)
    for filters, skip in zip((4, 3), reversed(skips), strict=True):
        x = block(layers.Concatenate()([skip, up(x, skip, filters, rank, how)]), filters, rank)
    numbers = np.random.default_rng(0)
    classes, activation, loss, _ = target(SIZES[rank], numbers)
    model = keras.Model(image, CONV[rank](classes, 1, activation=activation)(x))
    images = [numbers.normal(size=(2, *SIZES[rank], 2)) for _ in range(2)]
    batches = [(image, target(SIZES[rank], numbers)[-1]) for image in images]
    arguments = {"optimizer": keras.optimizers.SGD(0.1, momentum=0.9), "loss": loss}
    return model_step(model, batches, known_batch, arguments)


@pytest.mark.parametrize(
    ("rank", "how"),
    [
        (2, "transposed"),
        (2, "nearest"),
        pytest.param(2, "resized", marks=pytest.mark.slow),
        pytest.param(3, "transposed", marks=pytest.mark.slow),
        pytest.param(3, "nearest", marks=pytest.mark.slow),
    ],
)
@KNOWN_OR_NOT
def test_unet_equals_plain(rank, how, known_batch):
    step = u_net(rank, how, known_batch)
    counts = (3, 2) if rank == 2 else (2, 3, 2)
    fast = tflms_sft.rewrite(step.concrete_fn, tflms_sft.SFTParams(num_tiles=counts))
    (segment,) = fast.plan.segments
    assert segment.num_loops > 20
    assert fast.plan.predicted.peak_bytes < fast.plan.original.peak_bytes
    same(step, fast)


def same(step, fast):
    want, got = step.run(step.concrete_fn), step.run(fast.concrete_function)
    assert set(want) == set(got)
    assert max(error(got[name], want[name]) for name in want) < TOLERANCE


@pytest.mark.parametrize("target", (pytest.param(sparse, marks=pytest.mark.slow), categorical))
@KNOWN_OR_NOT
def test_pixel_cross_entropies_run_in_tiles(target, known_batch):
    step = u_net(2, "nearest", known_batch, target)
    fast = tflms_sft.rewrite(step.concrete_fn, tflms_sft.SFTParams(num_tiles=(3, 2, 2)))
    assert not fast.plan.left_alone
    ops = {node.op for node in fast.concrete_function.graph.as_graph_def().node}
    assert not any("CrossEntropy" in op or "Call" in op for op in ops), "a part of it is left outside"
    same(step, fast)
