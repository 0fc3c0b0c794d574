"""Tests of the names in reports of a peak."""

import html
import re

import keras
import pytest
import tensorflow as tf
from gradients import gradient_step
from keras import layers

import tflms_sft
from rewriters.device import kernel_scratch, properties
from tflms_sft import AutoParams, BudgetError, LMSParams, SegmentSpec, SFTParams
from tflms_sft._report.summary import transient_memory

SPEC = tf.TensorSpec((2, 32, 32, 3), tf.float64)
TILES = SFTParams((4, 4), [SegmentSpec("photo", "pool")])


def step():
    """Use float64, for which oneDNN has no kernels."""
    keras.config.set_floatx("float64")
    image = x = keras.Input((32, 32, 3), name="photo")
    for name in ("first", "second"):
        x = layers.Conv2D(8, 3, padding="same", activation="relu", name=name)(x)
    x = layers.GlobalAveragePooling2D(name="mean")(layers.MaxPool2D(name="pool")(x))
    return gradient_step(keras.Model(image, layers.Dense(1)(x)))


@pytest.fixture
def unfolding(monkeypatch):
    """Give the kernels of convolution gradients a MiB of scratch."""
    if not properties.name().startswith("CPU"):
        pytest.skip("kernels of other devices take nothing that is known")
    monkeypatch.setattr(kernel_scratch, "L3_BYTES", 2**20)


def refusal(params):
    with pytest.raises(BudgetError, match="smallest plan found needs") as caught:
        tflms_sft.rewrite(step(), params, SPEC)
    return caught.value


@pytest.mark.usefixtures("unfolding")
def test_budget_error_names_largest_kernel():
    error = refusal(AutoParams("1KiB", swap=False))
    turn = r"of which [\d.]+ KiB are an iteration of segment1/backward \(photo -> \w+\), .* of it "
    kernel = r"kernel scratch of (first|second) \(Conv2DBackprop\w+, backward\), `.*` is [\d.]+ KiB and variables"
    assert re.search(turn + kernel, str(error)), error
    assert error.tensor.endswith("backward)") and "/" not in error.tensor, "the largest tensor, by its layer"
    plan = tflms_sft.rewrite(step(), AutoParams(error.smallest_bytes, swap=False), SPEC).plan
    assert error.tensor in [name for name, _ in plan.predicted.largest]


@pytest.mark.usefixtures("unfolding")
def test_budget_error_of_tuned_names_largest_kernel(tmp_path):
    with pytest.raises(BudgetError, match=r"of which [\d.]+ MiB are kernel scratch of second \(Conv2DBackprop"):
        LMSParams.tuned(step(), "100KiB", SPEC, tier="disk", spill_dir=tmp_path, min_bytes=0)


@pytest.mark.usefixtures("unfolding")
def test_transient_memory_of_iteration_and_kernel_is_reported():
    plan = tflms_sft.rewrite(step(), TILES, SPEC).plan
    ((kernel, taken),) = plan.original.own
    assert kernel.startswith("kernel scratch of second (Conv2DBackprop") and taken > 2**20
    (turn, whole_turn), (inner, part) = plan.predicted.own
    assert turn == "an iteration of segment1/backward (photo -> pool)"
    assert inner.startswith("kernel scratch of ") and 2**19 < part < whole_turn < plan.predicted.peak_bytes
    lines = plan.summary().splitlines()
    first = lines[next(n for n, line in enumerate(lines) if line.endswith("largest at the predicted peak:")) + 1]
    assert f"{turn}, " in first and first.endswith(f" of it {inner}")
    assert html.escape(inner) in plan.to_html()


def test_transient_memory_without_scratch_is_empty():
    """Depthwise convolutions need no scratch."""
    image = keras.Input((32, 32, 3), name="photo")
    x = layers.DepthwiseConv2D(3, activation="relu")(layers.DepthwiseConv2D(3, activation="relu")(image))
    plain = gradient_step(keras.Model(image, layers.GlobalAveragePooling2D()(x)))
    plan = tflms_sft.rewrite(plain, AutoParams("1GiB"), tf.TensorSpec((2, 32, 32, 3))).plan
    assert not plan.predicted.own and "own memory" not in plan.summary()


def test_largest_tensors_have_layer_names():
    plan = tflms_sft.rewrite(step(), TILES, SPEC).plan
    for prediction in (plan.original, plan.predicted):
        assert all("/" not in name for name, size in prediction.largest if size > 2**10), prediction.largest
    names = {name for name, _ in plan.original.largest}
    assert {"first (Conv2D)", "pool (MaxPoolGrad, backward)"} <= names


def test_transient_memory_text_names_parts():
    assert transient_memory(()) == []
    items = (("an iteration", 3 * 2**20), ("a kernel", 2**20))
    assert transient_memory(items) == [("an iteration, 1.00 MiB of it a kernel", 3 * 2**20)]
    items = (("an iteration", 2**20 + 9), ("a kernel", 2**20))
    assert transient_memory(items) == [("an iteration, nearly all of it a kernel", 2**20 + 9)]
