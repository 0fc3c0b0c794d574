"""Automatic leads and concurrent swap-outs in plans for a graphics card, by the models alone."""

import dataclasses

import keras
import pytest
import tensorflow as tf
from devices import planning_for_card
from keras import layers

from rewriters.device.peak_memory import graph_peak, graph_schedule
from rewriters.estimates.op_cost import NOMINAL
from rewriters.swapping.swap_pass import insert_swaps
from rewriters.swapping.tiers import HostSkeletonTier
from tflms_sft._params.swap_params import SwapParams
from tflms_sft._planner.swap_planner import SwapTiming, apply_swaps, prepared
from tflms_sft._planner.swap_search import SwapSearch
from tflms_sft._search.traced_step import analyse_step

LEAST_MEMORY = {"min_bytes": 40_000, "ctrld_strategy": "direct_order", "fuse_swapins": True}


def convolutions(x):
    for filters in (8, 16, 32):
        for _ in range(8):
            x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = layers.AveragePooling2D(2)(x)
    return x


@pytest.fixture(scope="module")
def step():
    return train_step()


def train_step():
    """Trace a training step that returns no gradients: these would have to exist at its end."""
    image = keras.Input((64, 64, 3), batch_size=2)
    model = keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(convolutions(image))))
    model.compile("sgd", "mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    step = tf.function(lambda x, y: model.train_step((x, y)), autograph=False)
    return step.get_concrete_function(tf.TensorSpec((2, 64, 64, 3)), tf.TensorSpec((2, 3)))


@pytest.fixture
def card():
    with planning_for_card("h200"):
        yield


def traced_with(step, copied, **rates):
    """Return a step with rates at which all swap-ins of all tensors take as long as the step if `copied` is 1."""
    traced = analyse_step(step)
    traced = dataclasses.replace(traced, rates=dataclasses.replace(NOMINAL, **{"overlapped": True, **rates}))
    size = (8 + 4 + 2) * 64 * 64 * 8 * 2 * 4
    traced = dataclasses.replace(traced, rates=dataclasses.replace(traced.rates, copied=copied * size / traced.seconds))
    return traced


def timing(traced, params):
    return SwapTiming(traced, [], prepared(traced, traced.analysis.graph, params), params)


@pytest.mark.parametrize(("copied", "ratio"), [(0.5, 0.8), (2, 0.5), (10, 0.9)])
def test_automatic_parameters_make_a_step_faster(step, card, copied, ratio):
    traced, params = traced_with(step, copied), SwapParams(**LEAST_MEMORY)
    fast = apply_swaps(traced, traced.analysis.graph, params)
    slow = apply_swaps(traced, traced.analysis.graph, dataclasses.replace(params, lead=0, max_in_flight=1))
    print(fast.waiting / traced.seconds, slow.waiting / traced.seconds)
    assert fast.waiting < ratio * slow.waiting


def test_explicit_parameters_hold(step, card):
    traced = traced_with(step, 2)
    params = SwapParams(**LEAST_MEMORY, lead=2.5, max_in_flight=3)
    assert timing(traced, params).resolved(params) == params
    automatic = SwapParams(**LEAST_MEMORY)
    resolved = timing(traced, automatic).resolved(automatic)
    assert resolved.lead == 1.0 and 1 <= resolved.max_in_flight <= 3
    assert dataclasses.replace(resolved, lead=None, max_in_flight=None) == automatic


@pytest.mark.parametrize(("copied", "expected"), [(1000, 2), (0.1, 3)])
def test_concurrent_swap_outs_follow_the_link(step, card, copied, expected):
    params = SwapParams(**LEAST_MEMORY)
    assert timing(traced_with(step, copied), params).resolved(params).max_in_flight == expected


def test_without_overlap_nothing_is_automatic(step):
    params = SwapParams(**LEAST_MEMORY, tier="disk")
    for traced in (traced_with(step, 2), traced_with(step, 2, overlapped=False)):
        resolved = timing(traced, params).resolved(params)
        assert (resolved.lead, resolved.max_in_flight) == (0.0, 2)


@pytest.mark.parametrize(
    ("copied", "fraction", "ratio"), [(3, 0.0, 1.0), (3, 0.1, 0.92), (3, 0.3, 0.97), (10, 0.15, 1.0)]
)
def test_search_keeps_the_budget_and_is_no_slower_than_without_leads(step, card, copied, fraction, ratio):
    """The budget is a fraction of the way from the lowest peak with swaps to that of the original step."""
    traced, params = traced_with(step, copied), SwapParams(**LEAST_MEMORY)
    search = SwapSearch(traced, [], params)
    without = SwapSearch(traced, [], dataclasses.replace(params, lead=0, max_in_flight=1))
    smallest, original = without.smallest[1].peak_bytes, traced.plain.peak.peak_bytes
    limit = int(smallest + fraction * (original - smallest))
    tuned, slower = search.tuned(limit), without.tuned(limit)
    seconds = search.seconds(tuned, traced.seconds)
    print(tuned.n_tensors, tuned.lead, slower.n_tensors, slower.lb, seconds, without.seconds(slower, traced.seconds))
    assert seconds <= ratio * without.seconds(slower, traced.seconds)
    swapped = apply_swaps(traced, traced.analysis.graph, tuned)
    assert swapped.peak(None).peak_bytes <= limit
    assert traced.seconds + swapped.waiting == pytest.approx(seconds, rel=0.02)


@pytest.mark.parametrize("lead", (0.0, 1.0))
def test_search_takes_the_faster_one_of_both_leads(step, card, lead, monkeypatch):
    search = SwapSearch(traced_with(step, 3), [], SwapParams(**LEAST_MEMORY))
    monkeypatch.setattr(search, "seconds", lambda params, seconds: abs(params.lead - lead))
    assert search.tuned(10**9).lead == lead


@pytest.mark.parametrize("copied", (0.5, 2, 10))
def test_predicted_peak_is_no_lower_than_in_the_simulated_order(step, card, copied):
    traced = traced_with(step, copied)
    params = SwapParams(**LEAST_MEMORY)
    of = timing(traced, params)
    resolved = of.resolved(params)
    swaps = of.plan(resolved).swaps
    result = insert_swaps(prepared(traced, traced.analysis.graph, params), swaps, HostSkeletonTier(), 2)
    away = frozenset(result.swap_outs)
    order = of._simulated(result).order
    trace = graph_schedule(result.graph, (), traced.batch, traced.variables, away=away, order=order)
    peak = graph_peak(trace, {}).peak_bytes
    assert 0.5 * peak < of.peak(result, resolved, away, None).peak_bytes >= peak
