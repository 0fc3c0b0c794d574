"""Test moments of a step, and the search for paths that the memory model of the step accepts."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from gradients import gradient_step, model_of
from keras import Input, layers

from rewriters.emission.file_buffers import FileBuffers
from tflms_sft._search import priced_search
from tflms_sft._search.moments import StepMoments
from tflms_sft._search.priced_paths import PricedPaths
from tflms_sft._search.priced_search import PricedSearch, _key
from tflms_sft._search.traced_step import analyse_step

MOMENTS = StepMoments(3, {"first": 0, "third": 2, "gradient of third": 3, "gradient of first": 5})


def traced_pyramid(size=96):
    image = x = Input((size, size, 3), batch_size=1)
    for filters in (8, 8, 16):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = layers.MaxPooling2D(2)(x)
    step = gradient_step(model_of(image, x), tf.TensorSpec((1, size, size, 3)))
    return analyse_step(step.get_concrete_function())


def test_backward_moments_mirror_forward_ones():
    assert MOMENTS.usage((MOMENTS.forward(0, 1), 1), (MOMENTS.backward(0, 1), 2)).tolist() == [1, 0, 0, 0, 0, 2]
    assert MOMENTS.usage((MOMENTS.forward(1, 3), 1), (MOMENTS.backward(1, 3), 2)).tolist() == [0, 1, 1, 2, 2, 0]


def test_saved_tensors_stay_until_the_backward_pass_of_their_reader():
    assert MOMENTS.usage((MOMENTS.saved(0, 0), 1)).tolist() == [1, 1, 1, 1, 1, 1]
    assert MOMENTS.usage((MOMENTS.saved(0, 1), 1)).tolist() == [1, 1, 1, 1, 1, 0]
    assert MOMENTS.usage((MOMENTS.saved(2, 3), 1)).tolist() == [0, 0, 1, 0, 0, 0], "read by ops after the last interval"


def test_peaks_of_moments_are_those_of_their_ops_and_loops():
    timeline = [("first", 10), ("other", 12), ("loop", 30), ("third", 20), ("gradient of third", 25), ("update", 26)]
    peaks = MOMENTS.peaks(timeline, {"loop": MOMENTS.forward(1, 3)})
    np.testing.assert_array_equal(peaks, [12, 30, 30, 26, np.nan, np.nan])


@pytest.fixture(scope="module")
def searched():
    traced = traced_pyramid()
    search = PricedSearch(traced)
    plain = traced.plain.peak.peak_bytes
    limits = [int(fraction * plain) for fraction in (0.8, 0.5, 0.3)]
    return traced, search, [(limit, search.fastest_within(limit)) for limit in limits]


def test_plans_stay_within_their_limits_and_larger_limits_are_no_slower(searched):
    traced, search, found = searched
    assert all(plan is not None and plan.peak.peak_bytes <= limit for limit, plan in found)
    ratios = [search.fastest_within(limit).time_ratio for limit, _ in found]
    assert ratios == sorted(ratios) and ratios[0] < ratios[-1]
    assert search.smallest.peak.peak_bytes <= found[-1][1].peak.peak_bytes < traced.plain.peak.peak_bytes


def test_paths_that_another_limit_has_modelled_correct_the_next_ones(searched, monkeypatch):
    _, search, found = searched
    graph, available, corrected = search._priced.graph, found[1][0] - searched[0].held_bytes, []
    graph.forget_corrections()
    first, correct = search._proposed(available).path, graph.correct
    assert _key(first) in search._paths
    monkeypatch.setattr(graph, "correct", lambda path, *rest: corrected.append(path) or correct(path, *rest))
    search._search(found[1][0])
    assert _key(corrected[0]) == _key(first) and len(corrected) > 1


def test_corrections_of_time_move_the_path_and_can_be_forgotten(searched):
    _, search, _ = searched
    priced, count = search._priced, search._stretches.moments.count
    limits = np.full(count, 0.6 * searched[0].plain.peak.peak_bytes)
    before = priced.fastest_within(limits).path
    slower = [10 * before.seconds] * len(before.steps)
    priced.graph.correct_seconds(before, slower)
    after = priced.fastest_within(limits).path
    assert before.seconds < after.seconds < 10 * before.seconds
    priced.graph.forget_corrections()
    assert priced.fastest_within(limits).path.seconds == before.seconds


def test_sums_of_seconds_agree_with_the_predicted_time():
    """Ops of an interval that a segment leaves untiled, and those of others that it tiles, are counted once."""
    image = x = Input((48, 40, 3))
    for _ in range(3):
        x = layers.Conv2D(8, 3, dilation_rate=2, padding="same", activation="silu")(x)
    step = gradient_step(model_of(image, x), tf.TensorSpec((4, 48, 40, 3)))
    traced = analyse_step(step.get_concrete_function())
    search = PricedSearch(traced)
    search.fastest_within(int(0.7 * traced.plain.peak.peak_bytes))
    for modelled in search._paths.values():
        seconds = search._stretches.outside_seconds + modelled.path.seconds
        assert seconds == pytest.approx(modelled.time_ratio * traced.seconds, rel=0.12)
    assert any(modelled.time_ratio > 1.1 for modelled in search._paths.values())


def test_sums_of_bytes_of_the_original_step_are_its_own(searched):
    """Moments of the original step in a memory without fragmentation."""
    traced, search, _ = searched
    untiled = [stretch for stretch in search._stretches.stretches if stretch.ways[0].choice.blocks.grid is None]
    total = traced.held_bytes + np.sum([stretch.ways[0].usage for stretch in untiled], axis=0)
    assert 0.6 * traced.plain.peak.peak_bytes < total.max() <= traced.plain.peak.peak_bytes


def test_corrections_move_the_path_and_can_be_forgotten(searched):
    search = PricedSearch(searched[0])
    priced, count = search._priced, search._stretches.moments.count
    limits = np.full(count, 0.5 * searched[0].plain.peak.peak_bytes)
    before = priced.fastest_within(limits).path
    priced.graph.correct(before, limits, search._stretches.moments)
    after = priced.fastest_within(limits).path
    assert after is None or {id(step.stretch) for step in after.steps}.isdisjoint(id(s.stretch) for s in before.steps)
    priced.graph.forget_corrections()
    again = priced.fastest_within(limits).path
    assert again.seconds == before.seconds and np.array_equal(again.usage, before.usage)


def test_path_near_another_one_fits_and_is_the_same_where_it_fits_already(searched):
    search = PricedSearch(searched[0])
    priced: PricedPaths = search._priced
    loose = np.full(search._stretches.moments.count, 0.6 * searched[0].plain.peak.peak_bytes)
    solution = priced.fastest_within(loose)
    tight = 0.8 * loose
    near = priced.near(solution.path, tight, solution.prices)
    assert np.all(near.usage <= tight * (1 + 1e-9)) and near.seconds >= solution.path.seconds
    assert priced.near(near, tight, solution.prices).seconds <= near.seconds


def test_files_take_results_only_where_they_save_time(set_min_file_bytes):
    set_min_file_bytes(2**12)
    traced = traced_pyramid()
    plain = traced.plain.peak.peak_bytes
    with_files = PricedSearch(dataclasses.replace(traced, files=FileBuffers("/tmp", 1)))
    loose, tight = with_files.fastest_within(int(0.9 * plain)), with_files.smallest
    assert loose.files is None or len(loose.files.tensors) < 3
    assert tight.files is not None and tight.files.tensors
    assert tight.peak.peak_bytes < PricedSearch(traced).smallest.peak.peak_bytes


def test_search_in_memory_shares_estimates_and_uses_no_files(set_min_file_bytes):
    set_min_file_bytes(2**12)
    traced = traced_pyramid(48)
    search = PricedSearch(dataclasses.replace(traced, files=FileBuffers("/tmp", 1)))
    assert search.smallest.files is not None
    known = {id(way) for stretch in search._stretches.stretches for way in stretch.ways}
    smallest = search.in_memory.smallest
    stretches = search.in_memory._stretches.stretches
    assert all(id(way) in known for stretch in stretches for way in stretch.ways), "nothing is estimated again"
    assert all(len(places) == 1 for stretch in stretches for places in stretch.homes)
    assert not any(way.choice.rows_in_files for stretch in stretches for way in stretch.ways)
    assert smallest.files is None and smallest.plans
    assert search.smallest.peak.peak_bytes <= smallest.peak.peak_bytes < traced.plain.peak.peak_bytes
    assert search.in_memory.in_memory is search.in_memory


def test_order_of_a_plan_is_the_one_with_less_memory(searched, monkeypatch):
    traced, _, found = searched
    orders = []
    predict = priced_search.predict

    def recorded(step, plans):
        orders.append(predict(step, plans))
        return orders[-1]

    monkeypatch.setattr(priced_search, "predict", recorded)
    chosen = priced_search._with_least_memory(traced, found[1][1].plans)
    assert [one.order for one in orders] == [priced_search.MemoryOrder.DELAYED, priced_search.MemoryOrder.SERIAL]
    assert chosen.peak.peak_bytes == min(one.peak.peak_bytes for one in orders)
