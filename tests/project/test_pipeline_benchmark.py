"""Computations, refusals and networks of `benchmarks.pipeline`, without its measurements."""

import json

import numpy as np
import pytest
import tensorflow as tf

import tflms_sft
from benchmarks import _pipeline_models, _staged, pipeline
from rewriters.pipelining.schedule_simulator import simulate
from rewriters.pipelining.schedules import make
from tflms_sft import gems, unets

EVEN = [
    {"weight_bytes": 10, "waiting_bytes": 100, "forward": 1.0, "backward": 2.0, "transfer": 0.0, "peak_bytes": 130}
    for _ in range(4)
]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["speed"], "parts must be among ['schedules', 'memory', 'models']. Received: ['speed']"),
        (["--schedules", "zigzag"], "--schedules: invalid choice: 'zigzag'"),
        (["--steps", "0"], "--steps: must be at least 1. Received: 0"),
        (["--unets", "tiny"], "--unets: invalid choice: 'tiny'"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        pipeline.parse_arguments(arguments)
    assert message in capsys.readouterr().err


# Verdicts -------------------------------------------------------------------------------------------------------


def figures(slower=1.0, off_by=0.0):
    """Return results of steps whose times are a multiple of the simulated times."""
    found = []
    for name in ("basic", "mast", "master"):
        seconds = simulate(make(name, 4, 4), [0.04] * 4, [0.08] * 4).seconds
        own = {"schedule": name, "stages": 4, "micro_batches": 4, "simulated": seconds, "idle": 0.5}
        found.append({**own, "median": seconds * (1 if name == "basic" else slower), "off_by": off_by})
    return found


def kept(promises):
    return [promise.kept for promise in promises]


def test_time_targets_are_judged():
    assert kept(pipeline.schedule_promises(figures())) == [True] * 4
    assert kept(pipeline.schedule_promises(figures(slower=1.09))) == [True, True, False, True], "MASTER gains 1.23 only"
    assert kept(pipeline.schedule_promises(figures(slower=1.5))) == [False, False, False, True]
    assert kept(pipeline.schedule_promises(figures(off_by=1e-3))) == [True, True, True, False]
    assert kept(pipeline.schedule_promises(figures()[1:])) == [True, None, None, True], "no basic to compare with"
    assert kept(pipeline.schedule_promises([])) == [None] * 4
    assert pipeline.Promise("so", False).line() == "BROKEN: so"


def test_time_target_of_mast_needs_four_micro_batches():
    basic, mast = (simulate(make(name, 4, 2), [0.04] * 4, [0.08] * 4).seconds for name in ("basic", "mast"))
    assert basic / mast == pytest.approx(8 / 7)
    assert mast == pytest.approx(gems.mast_printed([0.04] * 4, [0.08] * 4))


def test_memory_targets_are_judged():
    def found(basic, mast):
        rows = (("basic", 1, basic), ("mast", 2, mast))
        return [{"schedule": name, "micro_batches": m, "measured_bytes": [50, b]} for name, m, b in rows]

    assert kept(pipeline.memory_promises(found(100, 125))) == [True]
    assert kept(pipeline.memory_promises(found(100, 126))) == [False]
    assert kept(pipeline.memory_promises(found(100, 126)[:1])) == [None]


# Models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("amounts", "count", "ends"),
    [
        ([3, 1, 1, 1], 2, [1]),
        ([1, 1, 1, 3], 2, [3]),
        ([5], 1, []),
        ([1, 1, 1], 3, [1, 2]),
        ([2, 2, 9, 2, 2], 3, [2, 3]),
    ],
)
def test_balanced_cuts_have_the_least_maximum(amounts, count, ends):
    assert _pipeline_models.balanced(amounts, count) == ends


@pytest.mark.parametrize("architecture", unets.TABLE_1, ids=lambda one: one.name)
def test_unet_cuts_name_layers_of_the_network(architecture):
    rows = architecture.nearest(1434)[0]
    cuts = _pipeline_models.level_cuts(architecture, rows, 6)
    assert len(set(cuts)) == 5
    small = _staged.unet(architecture.smallest, architecture.levels, architecture.convolutions, filters=1)
    order = [layer.name for layer in small.layers]
    assert sorted(cuts, key=order.index) == cuts
    assert small.output_shape[1] == architecture.result_rows(architecture.smallest)


def test_predictions_equal_simulator_and_formulas():
    found = _pipeline_models.predicted(EVEN, "master", 4)
    assert found.seconds == pytest.approx(gems.master([1.0] * 4, [2.0] * 4, 4))
    assert found.speedup == pytest.approx(4 * 12 / found.seconds)
    assert found.peak_bytes == (10 + 10 + 100 + 20,) * 4, (
        "two stages' weights, what waits of one, and what a slot needs"
    )
    assert _pipeline_models.predicted(EVEN, "basic", 3).speedup == 1
    assert _pipeline_models.predicted(EVEN, "gpipe", 4).peak_bytes == (10 + 400 + 20,) * 4


def test_stored_results_keep_all_promises():
    report = json.loads((pipeline._results.RESULTS / "pipeline.json").read_text(encoding="utf-8"))
    assert report["promises"] and all(promise["kept"] for promise in report["promises"])


# Steps --------------------------------------------------------------------------------------------------------


def test_sleeping_step_sleeps_in_its_stages():
    """Forward and backward, each once for a micro-batch; and it computes what it did."""
    step = _staged.sleeping_step(["CPU:0"] * 3, 0.0, 0.0)
    batch = tf.random.stateless_uniform((2, 4), (1, 2))
    params = tflms_sft.PipelineParams(["stage0", "stage1"], "gpipe", 2, ["CPU:0"] * 3)
    rewritten = tflms_sft.rewrite(step, params, batch)
    operations = rewritten.concrete_function.graph.get_operations()
    assert sum(operation.type == "PyFuncStateless" for operation in operations) == 2 * 3 * 2
    assert all(stage.backward_ops for stage in rewritten.plan.pipeline.stages)
    want, got = (_staged._after_a_step(run, step.weights, batch) for run in (step, rewritten))
    assert np.allclose(got, want, rtol=1e-6) and len(want) == 4


def test_staged_network_is_planned_without_a_run():
    told = _staged.stages_of(
        network="unet",
        options={"levels": 2, "convolutions": 1, "filters": 4},
        stages=["level0", "up0"],
        image_size=unets.Architecture("small", 2, 1).smallest,
        emit=None,
    )
    assert [stage["exit"] for stage in told["stages"]] == ["level0", "up0", "the loss"]
    assert all(stage["forward"] > 0 and stage["peak_bytes"] > 0 for stage in told["stages"])
