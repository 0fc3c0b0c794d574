"""Tile loops and swaps inside of the stages of a pipeline: the same numbers, in their place, in fewer bytes."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from children import printed
from pipelined import (
    CUTS,
    HERE,
    INSIDE,
    LONG_INSIDE,
    batches,
    compiled,
    fitted,
    hand_step,
    largest_error,
    net,
    run,
    tiles,
    train_step,
)

import tflms_sft
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize import canonicalize
from rewriters.errors import PipelineError, RewriteError, SegmentError, SwapError
from rewriters.pipelining.stage_assignment import assign_stages, scheduled_ops
from rewriters.pipelining.stage_passes import StagedStep, with_swaps, with_tiles
from rewriters.pipelining.step_partition import split_step
from rewriters.rules.intervals import Window
from rewriters.swapping.swap_pass import SwapOptions
from rewriters.swapping.tiers import SkeletonTier
from tflms_sft import AutoParams, LMSParams, Pipeline, PipelineParams, SegmentSpec, SFTParams
from tflms_sft._keras.rewriting_callback import trained_by
from tflms_sft._params.request import parse_request
from tflms_sft._planner.requested_tiles import StageBounds, plan_sft
from tflms_sft._search.traced_step import TracedStep, analyse_step
from tflms_sft._trace.layer_names import LayerRecord

pytestmark = pytest.mark.usefixtures("double_precision")

TOLERANCE = 1e-10
SWAPPED = 1e-12
"""Swaps and placement change no number, so that what is left are the sums of micro-batches."""

SWAPS = LMSParams(tier="disk", min_bytes=1)


@pytest.fixture(scope="module")
def found():
    """What needs several devices."""
    return printed("pipelined.py", "inside")


@pytest.fixture(scope="module")
def long_found():
    return printed("pipelined.py", "inside", "long")


# On devices -------------------------------------------------------------------------------------------------


def check(result, what, count):
    assert result["error"] < (TOLERANCE if what in ("tiles", "rows", "both") else SWAPPED)
    tiled, swapped = what in ("tiles", "rows", "both"), what in ("swaps", "host", "both")
    assert len(result["segments"]) == (4 if tiled else 0) and result["stages"] == ([0, 1, 2, 3] if tiled else [])
    inner = result["inner"]
    assert inner is None or not tiled or inner >= 4 * 2 * 3 * count, "both loops of each stage, in 3 turns at least"
    assert not result["strayed"]
    assert (result["swaps"] > 0) == swapped
    if swapped:  # A mean over pixels, of a few bytes, may stay.
        assert max(result["waiting"]) < 1000


@pytest.mark.parametrize(("kind", "what", "schedule", "count"), INSIDE)
def test_staged_three_steps_equal_plain(found, kind, what, schedule, count):
    """Logs, and then all weights, slots, counters and states of metrics; loops run on their stage's device."""
    check(found[f"{kind} {what} {schedule} {count}"], what, count)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "what", "schedule", "count"), LONG_INSIDE)
def test_staged_three_steps_in_all_schedules_equal_plain(long_found, kind, what, schedule, count):
    check(long_found[f"{kind} {what} {schedule} {count}"], what, count)


@pytest.mark.slow
def test_staged_replicas_equal_plain(long_found):
    assert long_found["hybrid"]["error"] < TOLERANCE and long_found["hybrid"]["devices"] == 8


def test_staged_fit_equals_plain(found):
    """Validation, which runs plain, included."""
    assert found["fit"]["error"] < TOLERANCE
    assert found["fit"]["segments"] == 4 and found["fit"]["swaps"] > 0


def test_tiled_stages_need_less_memory(found):
    """By allocation records, and as predicted."""
    plain, tiled = found["bytes"]["plain"], found["bytes"]["tiled"]
    for number, device in enumerate(["CPU:0", "CPU:1"]):
        assert tiled["measured"][device] < 0.5 * plain["measured"][device]
        assert tiled["predicted"][number] < 0.5 * plain["predicted"][number]
        arguments = 4 * 64 * 64 * 8 * 8 if number == 0 else 0  # Whole on the first device before they are cut.
        assert tiled["measured"][device] - arguments < 1.1 * tiled["predicted"][number]


# The graph --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def staged():
    """A step in stages, with what is planned for it."""
    keras.config.set_floatx("float64")
    specs = tf.TensorSpec((2, 8, 8, 3), "float64"), tf.TensorSpec((2,), "int64")
    step = hand_step(compiled(net(HERE, skip=True, deep=True), "momentum")).get_concrete_function(*specs)
    analysis = GraphAnalysis(canonicalize.read_canonical(step))
    forward = (node for node in analysis.order if "gradient_tape" not in node.name)
    by_name = {node.name.split("functional_1/")[-1]: node for node in forward}
    cuts = [[by_name[f"stage{number}_1/Tanh"].out()] for number in range(3)]
    stages = assign_stages(analysis, cuts)
    traced = TracedStep(step, analysis, LayerRecord(), 2, True, [])
    plans, _ = plan_sft(traced, SFTParams((2, 2)), StageBounds(stages, CUTS))
    return StagedStep(analysis, split_step(analysis, [0, 1]), stages, [0, 1]), plans


def edges_between_stages(staged):
    """Control edges of what is in slots that lead to another stage."""
    of = staged.stages.of
    slotted = set(scheduled_ops(staged.analysis, staged.parts, staged.stages))
    return {(c.name, n.name) for n in slotted for c in n.control_inputs if c in slotted and of[c] != of[n]}


def test_pass_edges_stay_in_their_stage(staged):
    plain, plans = staged
    tiled = with_tiles(plain, plans)
    swapped = with_swaps(tiled, SwapOptions(), tier=SkeletonTier(), batch=2, max_in_flight=2)
    assert not edges_between_stages(plain) and not edges_between_stages(tiled) and not edges_between_stages(swapped)
    assert len(swapped.swaps) >= 4 and len(swapped.outs) == len(swapped.swaps)
    names = [node.name for node in scheduled_ops(swapped.analysis, swapped.parts, swapped.stages)]
    assert all(out.name in names for out in swapped.outs)
    ways = [name for name in names if "/swap_in_" in name and name[-1].isdigit()]
    assert len(ways) == sum(len(swap.swap_ins) for swap in swapped.swaps)
    assert all(node.op == "PyFunc" for node in swapped.stages.fixed)
    stage_of = {node.name: stage for node, stage in swapped.stages.of.items()}
    copies = [{stage_of[reader.name] for reader in way.readers} for swap in swapped.swaps for way in swap.swap_ins]
    assert all(len(stages) == 1 for stages in copies), "a device reads its own copy from the host"


def test_loops_have_the_part_and_stage_of_their_ops(staged):
    plain, plans = staged
    tiled = with_tiles(plain, plans)
    assert [plan.segment.name for plan in plans] == [f"segment{number}" for number in range(1, 5)]
    for node, tile_loop in tiled.tile_loops.items():
        if node.op == "Const":
            continue
        stages = {plain.stages.of[own] for own in tile_loop.body if own in plain.stages.of}
        assert {tiled.stages.of[node]} == stages
        assert node in tiled.parts.per_micro_batch and (node in tiled.analysis.backward) == tile_loop.backward
    gradients = [tiled.traced(tensor).name for tensor in tiled.parts.gradients]
    assert gradients == [tensor.name for tensor in plain.parts.gradients]
    assert len({tensor for tensor in tiled.parts.gradients if tensor.node in tiled.tile_loops}) >= 8, (
        "weights of layers"
    )
    assert {t.node.name: s for t, s in tiled.stages.owner.items()} == {
        t.node.name: s for t, s in plain.stages.owner.items()
    }


# The face ---------------------------------------------------------------------------------------------------


def test_staged_plan_lists_all_passes():
    step = train_step(compiled(net(HERE, skip=True, deep=True), "adam"))
    pipeline = PipelineParams(CUTS, "1f1b", 4, HERE)
    plain = tflms_sft.rewrite(step, pipeline, *batches(1)[0]).plan
    plan = tflms_sft.rewrite(step, [SFTParams((2, 2)), SWAPS, pipeline], *batches(1)[0]).plan
    assert [stage.segments for stage in plan.pipeline.stages] == [(f"segment{number}",) for number in range(1, 5)]
    assert [segment.exits for segment in plan.segments][:3] == [(name,) for name in CUTS]
    text = plan.summary()
    for part in (
        "schedule '1f1b'",
        "4 segment(s) in 2 rows x 2 columns of tiles",
        "tensor(s) of",
        "swap-in(s) per micro-batch",
        "inside the stages, for one micro-batch:",
        "stage0 -> stage1",
        "swap to disk",
        "swapped in after the previous slot",
        "tiled",
    ):
        assert part in text
    assert "inside the stages" in plan.to_html() and "inside the stages" not in plain.summary()
    forward, before = ({one for one in own.pipeline.crossing if one[1] < one[2]} for own in (plan, plain))
    assert forward == before, "what is swapped goes by way of the tier to who reads it later"
    for now, before in zip(plan.pipeline.stages, plain.pipeline.stages, strict=True):
        assert now.waiting_bytes < before.waiting_bytes and now.exit == before.exit
        assert now.backward_seconds > before.backward_seconds, "computed again, and read from a disk"


def test_verify_passes_for_tiles_and_swaps_in_stages():
    model = compiled(net(HERE, skip=True, deep=True), "momentum")
    params = [SFTParams((2, 2)), SWAPS, PipelineParams(CUTS, "1f1b", 2, HERE)]
    proof = tflms_sft.verify(model, batches(1)[0], params)
    assert len(proof.plan.segments) == 4 and len(proof.plan.swaps) >= 4 and proof.plan.pipeline.micro_batches == 2
    assert proof.ok and not proof.not_compared
    assert "18 gradient(s)" in proof.summary()


def segments_of(plan):
    return [(s.name, s.entries, s.exits, s.num_tiles, s.backward_num_tiles, s.stored) for s in plan.segments]


def swaps_of(plan):
    return [(swap.tensor, swap.readers, swap.controls) for swap in plan.swaps]


def test_verify_passes_for_the_trained_pipeline():
    """On a batch of any size."""
    callback = Pipeline(CUTS, "gpipe", 2, HERE, tiles=SFTParams((2, 2)), swaps=SWAPS, verbose=0)
    model = compiled(net(HERE, deep=True), "momentum")
    x, y = (np.concatenate(one)[:12] for one in zip(*batches(2), strict=True))
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[callback])
    assert not callback.plan.batch_is_fixed
    proof = tflms_sft.verify(model, (x[:2], y[:2]), callback)
    assert proof.ok and proof.plan.batch == 2
    both = proof.plan, callback.plan
    (segments, trained), (swaps, swapped) = ([of(plan) for plan in both] for of in (segments_of, swaps_of))
    assert len(segments) == 4 and segments == trained
    assert len(swaps) >= 4 and swaps == swapped
    one = dataclasses.replace(proof.plan.pipeline, stages=proof.plan.pipeline.stages[:-1])
    with pytest.raises(RewriteError, match="another plan than the training; they differ in stage 3. "):
        trained_by(callback, model).check(dataclasses.replace(proof.plan, pipeline=one))
    fixed = dataclasses.replace(trained_by(callback, model), plan=dataclasses.replace(proof.plan, batch_is_fixed=True))
    with pytest.raises(ValueError, match="`batch` must be a multiple of .* pipeline, 2. Received: a batch of 3."):
        fixed.require_even((x[:3], y[:3]))


def test_verify_finds_a_broken_loop_in_a_stage(monkeypatch):
    """Every window is off by one row."""
    gather = Window.rows_covered
    monkeypatch.setattr(Window, "rows_covered", lambda self, rows: gather(self, rows).shift(1))
    params = [SFTParams((2, 2)), PipelineParams(CUTS, "gpipe", 2, HERE)]
    proof = tflms_sft.verify(compiled(net(HERE, deep=True), "momentum"), batches(1)[0], params)
    assert not proof.ok and len(proof.plan.segments) == 4
    assert not proof.outputs.ok and not proof.gradients.ok


def test_analysed_graph_of_stages_with_tiles_is_not_edited(monkeypatch):
    """Its devices are those that its analysis has seen."""
    graphs = []

    def devices_of(graph):
        return {name: node.device for name, node in graph.nodes.items()}

    def analysed(*args, **options):
        traced = analyse_step(*args, **options)
        graphs.append((traced.analysis.graph, devices_of(traced.analysis.graph)))
        return traced

    monkeypatch.setattr("tflms_sft._pipeline.build.analyse_step", analysed)
    model = compiled(net(HERE, deep=True), "momentum")

    def train(x, y):
        with tf.device("CPU:0"):
            return model.train_step((x, y))

    params = [SFTParams((2, 2)), PipelineParams(CUTS, "gpipe", 2, HERE)]
    rewritten = tflms_sft.rewrite(tf.function(train, autograph=False), params, *batches(1)[0])
    assert len(rewritten.plan.segments) == 4 and graphs
    assert all(devices_of(graph) == before for graph, before in graphs)


def test_order_of_parameters_does_not_matter():
    pipeline, sft = PipelineParams(2), SFTParams((2, 2))
    assert (
        parse_request([pipeline, sft, SWAPS])
        == parse_request([sft, pipeline, SWAPS])
        == parse_request((sft, SWAPS, pipeline))
    )
    with pytest.raises(ValueError, match="must have `LMSParams` last"):
        parse_request([SWAPS, pipeline, sft])


def test_staged_fit_on_one_device_with_open_batch_equals_plain():
    """The last of which is not even."""
    callback = Pipeline(CUTS, "gpipe", 2, HERE, swaps=LMSParams(tier="disk", min_bytes=1), verbose=0)
    got = fitted([callback], size=19)
    assert callback.plan.swaps and callback.plan.swap_tier == "disk" and not callback.plan.batch_is_fixed
    assert largest_error(got, fitted([], size=19)) < SWAPPED


# What is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "error", "text"),
    [
        ([AutoParams("1GiB"), PipelineParams(2)], ValueError, "must not combine a budget with a pipeline"),
        ([PipelineParams(2), PipelineParams(2)], TypeError, "each at most once"),
        ([PipelineParams(2), "1GiB"], TypeError, r"For a budget: `AutoParams\('1GiB'\)`"),
    ],
)
def test_invalid_parameter_lists_are_refused(params, error, text):
    with pytest.raises(error, match=text):
        parse_request(params)


def test_callbacks_refuse_parameters_of_another_kind():
    with pytest.raises(TypeError, match=r"`tiles` must be `SFTParams\(...\)` or None. Received: tiles=3"):
        Pipeline(2, tiles=3)
    with pytest.raises(TypeError, match=r"`swaps` must be `LMSParams\(...\)` or None. Received: swaps=True"):
        Pipeline(2, swaps=True)


def test_segment_across_a_cut_is_refused():
    step = train_step(compiled(net(HERE, deep=True), "adam"))
    pipeline = PipelineParams(CUTS, "gpipe", 2, HERE)

    def tiled(entry, end):
        params = SFTParams(segments=[SegmentSpec(entry, end, num_tiles=(2, 2))])
        return tflms_sft.rewrite(step, [params, pipeline], *batches(1)[0])

    text = "crosses the cut.s. 'stage0', 'stage1' of the pipeline, .* End a segment at each cut"
    with pytest.raises(SegmentError, match=text):
        tiled("input_layer", "stage2")
    model = compiled(net(HERE, deep=True), "adam")
    step = train_step(model)
    rewritten = tiled("stage0", "stage1")
    assert [stage.segments for stage in rewritten.plan.pipeline.stages] == [(), ("segment1",), (), ()]
    assert largest_error(run(model, rewritten, batches(2)), run(model, step, batches(2))) < TOLERANCE


def test_swaps_without_candidates_are_noted():
    step = train_step(compiled(net(HERE), "momentum"))
    pipeline = PipelineParams(CUTS, "gpipe", 2, HERE)
    with pytest.raises(SwapError, match="tensor.s. that could be swapped, the largest of"):
        tflms_sft.rewrite(step, [LMSParams(tier="disk", min_bytes="1GiB"), pipeline], *batches(1)[0])
    with pytest.raises(SwapError, match="`excl_types` names nothing in the step"):
        tflms_sft.rewrite(step, [LMSParams(tier="disk", excl_types=("Conv9D",)), pipeline], *batches(1)[0])


def test_staged_batch_norm_is_refused_as_without_tiles():
    step = train_step(compiled(net(HERE, norm=True, deep=True), "momentum"))
    with pytest.raises(PipelineError, match=r"layer 'norm0' \(BatchNormalization\)"):
        tflms_sft.rewrite(step, [tiles(), PipelineParams(CUTS, "gpipe", 2, HERE)], *batches(1)[0])
    params = [tiles(), PipelineParams(CUTS, "gpipe", 2, HERE, batch_norm="micro")]
    assert len(tflms_sft.rewrite(step, params, *batches(1)[0]).plan.segments) == 4
