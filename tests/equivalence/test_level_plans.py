"""Test that steps with barriers equal the original ones whichever levels run in tiles, and wherever tensors lie."""

import numpy as np
import pytest
from equivalence import TOLERANCE, error, keras_step
from nets import bottlenecks, u_net

import tflms_sft
from rewriters.tiling.tile_planner import Halo
from tflms_sft._barriers.barrier_search import BarrierSearch
from tflms_sft._barriers.barrier_stretches import LevelPlan
from tflms_sft._search.traced_step import predict

pytestmark = pytest.mark.usefixtures("double_precision")


def random_candidate(search, seed):
    """Return a plan of random levels and tensors, in random grids, and its levels and tensors."""
    random, stretches = np.random.default_rng(seed), search._stretches
    tensors = sorted({tensor for lives in stretches._lives for tensor in lives}, key=lambda tensor: tensor.name)

    def some(of, part):
        return frozenset(one for one in of if random.random() < part)

    stored = some(tensors, 0.7)
    in_files = some(stored, 0.5) if search._traced.files is not None else frozenset()
    untiled = frozenset((random.integers(stretches.levels.count),))
    plan = LevelPlan(untiled, stored, some(stored, 0.6), in_files)
    within = search._loops(plan)
    loops = within._loops[random.choice([*Halo])]
    grids = [of_loop[random.integers(min(len(of_loop), 8))] for of_loop in loops.grids]
    return predict(within._traced, [loops.planned(grids)]), plan


@pytest.mark.parametrize("with_files", [False, True], ids=["memory", "files"])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("net", [u_net, pytest.param(bottlenecks, marks=pytest.mark.slow)])
def test_random_levels_in_tiles_equal_original(net, seed, with_files, tmp_path, monkeypatch, set_min_file_bytes):
    set_min_file_bytes(2**9)
    found = []

    def fastest_within(search, limit):
        del limit
        found.extend([] if found else [random_candidate(search, seed)])
        return found[0][0]

    monkeypatch.setattr(BarrierSearch, "fastest_within", fastest_within)
    step = keras_step(net, (24, 20), 2, steps=3)
    plain = tflms_sft.rewrite(step.function, tflms_sft.AutoParams("1GiB"), *step.specs).plan.original.peak_bytes
    swap = tflms_sft.LMSParams(tier="disk", spill_dir=tmp_path, min_bytes="1GiB") if with_files else False
    params = tflms_sft.AutoParams(plain // 2, swap=swap, max_slowdown=1e9)
    rewritten = tflms_sft.rewrite(step.function, params, *step.specs)
    plan = found[0][1]
    assert rewritten.plan.segments and plan.untiled and plan.dropped
    assert (rewritten.plan.file_bytes > 0) == bool(plan.in_files) == with_files
    want, got = step.run(step.concrete_fn), step.run(rewritten)
    assert {name for name in want if not error(got[name], want[name]) <= TOLERANCE} == set()
    assert len(want) > 20 and all(np.all(np.isfinite(value)) for value in got.values())
