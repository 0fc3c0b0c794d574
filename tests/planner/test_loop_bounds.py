"""Test lower bounds of peaks against the memory model, and loops that sets of checkpoints share."""

import pytest
from checkpoint_sets import dropping_sets, smallest_segment
from equivalence import keras_step
from nets import bottlenecks, chain, u_net

from rewriters.emission.loop_signature import program_signature
from rewriters.emission.tile_pass import plan_segment
from rewriters.estimates.op_cost import CostModel
from rewriters.tiling.tile_planner import Grid, Halo
from tflms_sft._barriers.barriers import Barriers
from tflms_sft._barriers.tiled_loops import TiledLoops
from tflms_sft._params.swap_params import SwapParams
from tflms_sft._planner.swap_search import SwapSearch
from tflms_sft._search.segment_tilings import LoopEstimates
from tflms_sft._search.traced_step import analyse_step, least_peak, predict

ALLOCATORS = {"exact": {"maps_pages": True}, "best fit": {"has_allocator_stats": True, "grows": False}}


def traced(net):
    return analyse_step(keras_step(net, (24, 20), 2, steps=1).concrete_fn)


def segments_of(barriers):
    pairs = zip(barriers.selections, dropping_sets(barriers), strict=True)
    return [barriers.segment("segment1", selection, dropped) for selection, family in pairs for dropped in family]


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("net", [chain, u_net, pytest.param(bottlenecks, marks=pytest.mark.slow)])
def test_no_peak_is_below_its_lower_bound(net, allocator, plan_with):
    plan_with(**ALLOCATORS[allocator])
    step = traced(net)
    for segment in segments_of(Barriers(step)):
        for halo, tiles in ((h, n) for h in Halo for n in (1, 3)):
            plans = [plan_segment(step.analysis, segment, Grid(1, (tiles, 1)), Grid(2, (2 * tiles, 1)), halo)]
            bound, peak = least_peak(step, plans), predict(step, plans).peak.peak_bytes
            assert 0.4 * peak <= bound <= peak
    swaps = SwapSearch(step, plans, SwapParams(tier="disk", min_bytes=0))
    for count in (0, len(swaps.swaps(1)) // 2, len(swaps.swaps(1))):
        assert bound <= swaps.peak(count, 1).peak_bytes


@pytest.mark.parametrize("halo", Halo)
def test_sets_of_checkpoints_share_equal_loops_under_their_own_names(halo):
    step = traced(chain)
    barriers, estimates, costs = Barriers(step), LoopEstimates(step), CostModel(step.analysis, step.batch, step.rates)
    first = segments_of(barriers)[0]
    segments = [first, smallest_segment(barriers), barriers.segment("segment1", barriers.selections[0])]
    assert segments[0].loop_specs[0] is segments[2].loop_specs[0]
    assert len(segments[0].loop_specs) != len(segments[1].loop_specs), "so that names differ"
    for segment in segments:
        loops = TiledLoops(estimates, segment, halo=halo)
        grids = [grids[-1] for grids in loops.grids]
        remaining = iter(grids)
        alone = type(loops._planner)(step.analysis, segment).tile_loops(lambda loop, grids=remaining: next(grids))
        for number, grid in enumerate(grids):
            assert loops.estimate(number, grid).seconds > 0  # Plans of equal loops take this time.
        shared = loops.planned(grids).loops
        assert [loop.name for loop in shared] == [loop.name for loop in alone]
        assert [loop.grid for loop in shared] == [loop.grid for loop in alone]
        assert [loop.reads for loop in shared] == [loop.reads for loop in alone]
        for one, other in zip(shared, alone, strict=True):
            assert program_signature(step.analysis, segment, one) == program_signature(step.analysis, segment, other)
            assert step.costs.tile_loop(one) == pytest.approx(costs.tile_loop(other))
