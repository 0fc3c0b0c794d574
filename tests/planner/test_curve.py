"""Test the time of a step against its budget, and that `rewrite` makes the same plans."""

import itertools
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tflms_sft
from tflms_sft import AutoParams


@pytest.fixture(scope="module")
def step_and_batch():
    image = x = keras.Input((64, 64, 3))
    for filters in (8, 16):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.MaxPooling2D()(layers.ReLU()(layers.BatchNormalization()(x)))
    model = keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    batch = np.zeros((2, 64, 64, 3), "float32"), np.zeros(2, "int32")
    return tf.function(lambda x, y: model.train_step((x, y)), autograph=False), batch


@pytest.fixture(scope="module")
def curve(step_and_batch):
    step, batch = step_and_batch
    return tflms_sft.curve(step, *batch, budgets=5, swap=False)


def test_curve_spans_smallest_budget_to_original_step(curve):
    assert len(curve.points) == 5 and curve.points[0].kind == "original step"
    assert curve.points[0].peak_bytes == curve.original_bytes and curve.points[0].time_ratio == 1.0
    assert curve.points[-1].kind == "tiles" and curve.points[-1].peak_bytes < 0.5 * curve.original_bytes
    ratios = [one.budget_bytes / other.budget_bytes for one, other in itertools.pairwise(curve.points)]
    assert ratios == pytest.approx([ratios[0]] * 4, rel=1e-3)


def test_points_of_larger_budgets_take_no_longer(curve):
    ratios = [point.time_ratio for point in curve.points]
    assert ratios == sorted(ratios) and ratios[-1] > 1.2
    assert all(point.peak_bytes <= (1 - curve.headroom) * point.budget_bytes for point in curve.points)


def test_points_are_the_plans_of_rewrite(step_and_batch, curve):
    step, batch = step_and_batch
    smallest = curve.points[-1]
    plan = tflms_sft.rewrite(step, AutoParams(smallest.budget_bytes, swap=False, max_slowdown=1e9), *batch).plan
    assert plan.predicted.time_ratio == pytest.approx(smallest.time_ratio)
    assert plan.predicted.peak_bytes == pytest.approx(smallest.peak_bytes, abs=1000)


def test_given_budgets_keep_those_that_no_plan_meets(step_and_batch):
    step, batch = step_and_batch
    found = tflms_sft.curve(step, *batch, budgets=["10kB", "1GiB"], headroom=0.2)
    assert [point.kind for point in found.points] == ["original step", "no plan"]
    assert found.headroom == 0.2 and found.points[1].time_ratio is None
    assert str(found).splitlines()[-1].split()[1:4] == ["KiB", "-", "-"]


def test_table_json_and_chart_show_each_budget(curve, tmp_path):
    assert len(str(curve).splitlines()) == 2 + len(curve.points)
    assert [point["kind"] for point in json.loads(curve.to_json())["points"]] == [one.kind for one in curve.points]
    figure = curve.plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 5000
    assert list(figure.axes[0].lines[0].get_ydata()) == [point.time_ratio for point in curve.points]


@pytest.mark.parametrize(
    ("budgets", "error", "text"),
    [
        (0, ValueError, "at least 1"),
        ([], ValueError, "at least one size"),
        ("8GiB", TypeError, "list of sizes"),
        (True, TypeError, "list of sizes"),
        (["8G"], ValueError, "Write"),
    ],
)
def test_wrong_budgets_are_refused(step_and_batch, budgets, error, text):
    step, batch = step_and_batch
    with pytest.raises(error, match=text):
        tflms_sft.curve(step, *batch, budgets=budgets)
