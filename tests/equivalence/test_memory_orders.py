"""Test that steps in tiles equal the original ones in each order of large ops, with chosen results in files."""

import dataclasses

import keras
import numpy as np
import pytest
from equivalence import TOLERANCE, error, keras_step

import tflms_sft
from rewriters.scheduling.memory_order import MemoryOrder
from tflms_sft._search import priced_search, traced_step
from tflms_sft._search.traced_step import analyse_step, skeleton

pytestmark = pytest.mark.usefixtures("double_precision")

FRACTION = 0.4
"""Budget over the peak of the original step."""


@pytest.fixture(autouse=True)
def small_ops(monkeypatch):
    """Order the ops of small nets, too."""
    monkeypatch.setattr(traced_step, "MIN_ORDERED_BYTES", 2**8)


def pyramid(x):
    for filters in (4, 6):
        x = keras.layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = keras.layers.Conv2D(filters, 3, padding="same", activation="tanh")(x)
        x = keras.layers.MaxPooling2D(2)(x)
    return keras.layers.Conv2D(5, 3, padding="same")(x)


def planned(step, tmp_path, *, with_files, order, monkeypatch):
    """Return a rewritten step within a budget, and the choice of which it is made."""
    predict, choices = priced_search.predict, []

    def in_order(traced, plans):
        choices.append(predict(dataclasses.replace(traced, order=order), plans))
        return choices[-1]

    monkeypatch.setattr(priced_search, "_with_least_memory", in_order)
    swap = tflms_sft.LMSParams(tier="disk", spill_dir=tmp_path, min_bytes="1GiB") if with_files else False
    original = tflms_sft.rewrite(step.function, tflms_sft.AutoParams("1GiB"), *step.specs).plan.original
    params = tflms_sft.AutoParams(int(FRACTION * original.peak_bytes), headroom=0, swap=swap, max_slowdown=100)
    return tflms_sft.rewrite(step.function, params, *step.specs), choices


@pytest.mark.parametrize("with_files", [False, True], ids=["memory", "files"])
@pytest.mark.parametrize("order", MemoryOrder)
def test_step_in_tiles_equals_original_in_each_order(
    order, with_files, tmp_path, monkeypatch, set_rates, set_min_file_bytes
):
    set_min_file_bytes(2**11)
    set_rates(copied=1e11)
    step = keras_step(pyramid, (64, 48), steps=3)
    rewritten, choices = planned(step, tmp_path, with_files=with_files, order=order, monkeypatch=monkeypatch)
    plan = rewritten.plan
    assert plan.segments and not plan.swaps and {choice.order for choice in choices} == {order}
    if with_files:
        chosen = [len(choice.files.tensors) for choice in choices if choice.files is not None]
        assert plan.file_bytes > 0 and len(set(chosen)) > 1, "not all results of loops"
    want, got = step.run(step.concrete_fn), step.run(rewritten)
    assert {name for name in want if not error(got[name], want[name]) <= TOLERANCE} == set()
    assert len(want) > 20 and all(np.all(np.isfinite(value)) for value in got.values())


def test_orders_add_control_edges_and_no_ops():
    traced = analyse_step(keras_step(pyramid, (128, 96), steps=1, floatx="float32").concrete_fn)
    (plan,) = priced_search.PricedSearch(traced).fastest_within(traced.plain.peak.peak_bytes // 2).plans[:1]
    graphs = [skeleton(dataclasses.replace(traced, order=order), [plan]) for order in MemoryOrder]
    assert len({tuple(sorted(graph.nodes)) for graph in graphs}) == 1
    numbers = [sum(len(node.control_inputs) for node in graph.nodes.values()) for graph in graphs]
    assert numbers[0] <= numbers[1] < numbers[2]
