"""Test levels of steps with barriers, the tiles of their loops, and the search for levels and tensors."""

import dataclasses
import json

import numpy as np
import pytest
from checkpoint_sets import dropping_sets, smallest_segment
from equivalence import keras_step
from nets import bottlenecks, chain, u_net

from rewriters.emission.file_buffers import FileBuffers
from rewriters.tiling.tile_planner import Halo
from tflms_sft._barriers.barrier_search import BarrierSearch, _SumLimits
from tflms_sft._barriers.barrier_stretches import LevelPlan
from tflms_sft._barriers.barriers import Barriers
from tflms_sft._barriers.step_levels import StepLevels
from tflms_sft._barriers.tiled_loops import LoopsWithin
from tflms_sft._planner.budget_plan import BudgetPlan
from tflms_sft._rewrite.plan_recipe import plan_from, recipe_of
from tflms_sft._search.segment_tilings import LoopEstimates
from tflms_sft._search.traced_step import analyse_step


def traced_step(net, shape=(192, 160)):
    return analyse_step(keras_step(net, shape, 2, steps=1, floatx="float32").concrete_fn)


@pytest.fixture(scope="module")
def searched():
    traced = traced_step(u_net)
    search, plain = BarrierSearch(traced, Barriers(traced)), traced.plain.peak.peak_bytes
    limits = [int(fraction * plain) for fraction in (0.97, 0.7, 0.5)]
    return traced, search, [(limit, search.fastest_within(limit)) for limit in limits]


def test_ops_of_a_layer_are_of_one_level():
    """The ops of a variance do not wait for the mean, which its loop computes; a gradient is of the level it reads."""
    traced = traced_step(chain)
    barriers = Barriers(traced)
    of, backward = StepLevels(traced.analysis, barriers.levels).of, traced.analysis.backward
    moments = [(pair.mean.node, node, node.inputs[0].node) for node, pair in barriers.levels.moments.items()]
    assert len(moments) == 3 and all(len({of[node] for node in nodes}) == 1 for nodes in moments)
    forward = [of[node] for node in traced.analysis.order if node.op == "Conv2D"]
    filters = [of[node] for node in traced.analysis.order if node.op == "Conv2DBackpropFilter"]
    assert filters == forward[::-1] and len(set(forward)) == 3
    assert max(of.values()) == max(of[node] for node in of if node not in backward)


def test_loops_of_a_level_run_at_its_moments(searched):
    traced, search, _ = searched
    barriers, levels = Barriers(traced), search._stretches.levels
    for dropped in dropping_sets(barriers)[0]:
        specs = barriers.segment("segment1", barriers.selections[0], dropped).loop_specs
        moments = levels.of_loops(specs)
        assert all((moment >= levels.count) == spec.backward for moment, spec in zip(moments, specs, strict=True))
        assert moments == sorted(moments)


def test_plans_stay_within_their_limits_and_larger_limits_are_no_slower(searched):
    _, search, found = searched
    assert all(plan is not None and plan.peak.peak_bytes <= limit for limit, plan in found)
    ratios = [plan.time_ratio for _, plan in found]
    assert ratios == sorted(ratios) and ratios[0] < 1.2
    assert search.fastest_within(found[0][0]).time_ratio == ratios[0], "found again"
    assert search.smallest.peak.peak_bytes <= min(plan.peak.peak_bytes for _, plan in found)


def test_smallest_plan_is_equal_after_any_search(searched):
    """An error names its peak, and the search within that budget has to find it again."""
    traced, search, _ = searched
    assert search.smallest.peak.peak_bytes == BarrierSearch(traced, Barriers(traced)).smallest.peak.peak_bytes
    assert search.fastest_within(search.smallest.peak.peak_bytes) is not None


def test_recipes_restore_levels_tensors_and_tiles(searched):
    traced, search, found = searched
    barriers = Barriers(traced)
    stored, dropped = map(frozenset, (barriers.selections[0].stored, barriers.selections[0].droppable()))
    recomputed = search._loops(LevelPlan(frozenset((1,)), stored, dropped, frozenset())).smallest
    assert recomputed.plans[0].segment.dropped
    for candidate in (recomputed, *(candidate for _, candidate in found)):
        (plan,) = candidate.plans
        recipe = json.loads(json.dumps(recipe_of(traced, BudgetPlan(candidate.plans, []), None)))
        (again,) = plan_from(traced, recipe).plans
        assert again.segment.stored == plan.segment.stored and again.segment.dropped == plan.segment.dropped
        assert [(loop.grid, loop.body, loop.reads, loop.writes) for loop in again.loops] == [
            (loop.grid, loop.body, loop.reads, loop.writes) for loop in plan.loops
        ]


def test_large_budgets_leave_levels_untiled():
    traced = traced_step(bottlenecks)
    barriers = Barriers(traced)
    plan = BarrierSearch(traced, barriers).fastest_within(int(0.97 * traced.plain.peak.peak_bytes)).plans[0]
    assert 0 < len(plan.segment.forward) + len(plan.segment.backward) < len(barriers.nodes) // 2


@pytest.mark.parametrize("net", [u_net, pytest.param(bottlenecks, marks=pytest.mark.slow)])
def test_no_set_of_checkpoints_of_a_family_is_faster(net):
    """Checkpoints at the smallest frontiers, with all levels in tiles, are among the plans."""
    traced = traced_step(net)
    barriers, estimates = Barriers(traced), LoopEstimates(traced)
    pairs = zip(barriers.selections, dropping_sets(barriers), strict=True)
    segments = [barriers.segment("segment1", selection, dropped) for selection, family in pairs for dropped in family]
    within = [LoopsWithin(traced, estimates, segment) for segment in segments]
    smallest = min(loops.smallest.peak.peak_bytes for loops in within)
    for limit in (int(0.8 * traced.plain.peak.peak_bytes), int(1.02 * smallest)):
        others = filter(None, (loops.fastest_within(Halo.RECOMPUTE, limit) for loops in within))
        found = BarrierSearch(traced, barriers).fastest_within(limit)
        assert found.time_ratio <= 1.02 * min(other.time_ratio for other in others)


def test_loops_fit_in_tiles_between_those_of_small_and_large_iterations():
    traced = traced_step(chain)
    loops = LoopsWithin(traced, LoopEstimates(traced), smallest_segment(Barriers(traced)))
    large = loops.fastest_within(Halo.RECOMPUTE, 10 * traced.plain.peak.peak_bytes)
    assert large.time_ratio < loops.smallest.time_ratio and loops.smallest.peak.peak_bytes < large.peak.peak_bytes
    limit = (large.peak.peak_bytes + loops.smallest.peak.peak_bytes) // 2
    between = loops.fastest_within(Halo.RECOMPUTE, limit)
    assert large.time_ratio < between.time_ratio < loops.smallest.time_ratio and between.peak.peak_bytes <= limit
    assert loops.fastest_within(Halo.RECOMPUTE, traced.held_bytes) is None


def test_results_in_files_lower_the_smallest_peak(tmp_path, set_min_file_bytes):
    set_min_file_bytes(2**11)
    traced = traced_step(u_net)
    with_files = dataclasses.replace(traced, files=FileBuffers(str(tmp_path), traced.batch))
    search = BarrierSearch(with_files, Barriers(traced))
    smallest, in_memory = search.smallest, search.in_memory.smallest
    assert smallest.files is not None and smallest.files.tensors and in_memory.files is None
    assert smallest.peak.peak_bytes < in_memory.peak.peak_bytes
    limit = (smallest.peak.peak_bytes + in_memory.peak.peak_bytes) // 2
    assert search.in_memory.fastest_within(limit) is None or search.fastest_within(limit).files is not None
    assert search.fastest_within(limit).peak.peak_bytes <= limit
    homes = [home for stretch in search._stretches.stretches for group in stretch.homes for home in group]
    assert not np.any([home.usage for home in homes if home.choice in smallest.files.tensors])


def test_limits_of_sums_fall_by_lacking_bytes_and_with_each_path_that_does_not_fit():
    limits = _SumLimits(np.array([100.0, 200.0]))
    assert limits.at_moments.tolist() == [100, 200]
    limits.change(np.array([10.0, -5.0]), fits=False)
    assert limits.at_moments.tolist() == [90, 200], "more bytes than the model counts raise no limit"
    limits.change(np.array([20.0, 20.0]), fits=False)
    assert limits.at_moments == pytest.approx([95 - 15, 190 - 10])
    assert limits.change_for_known(fits=False)
    assert limits.at_moments == pytest.approx([100 * 0.95**2 - 15, 200 * 0.95**2 - 10])
    limits.change(np.array([15.0, 10.0]), fits=True)
    assert limits.at_moments == pytest.approx([85, 190])


def test_limits_of_sums_rise_a_little_where_a_path_is_found_again_or_none_is():
    limits = _SumLimits(np.array([100.0]))
    assert not limits.raise_for_none(), "a lower bound of bytes does not fit"
    limits.change(np.array([40.0]), fits=True)
    raised = [limits.change_for_known(fits=True) for _ in range(3)]
    assert raised == [True, True, False]
    assert limits.raise_for_none() and limits.at_moments.tolist() == [80]
