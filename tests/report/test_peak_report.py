"""Tests of the names in reports of a peak."""

import html
import math
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from gradients import gradient_step
from keras import layers
from loops import adversarial_step

import tflms_sft
from rewriters.canonicalize.canonicalize import CanonicalMode
from rewriters.device.peak_memory import Peak
from rewriters.emission.tile_pass import tile_skeleton
from rewriters.ir.device_detection import planned_device
from tflms_sft import AutoParams, BudgetError, LMSParams, SegmentSpec, SFTParams
from tflms_sft._planner.requested_tiles import plan_sft
from tflms_sft._report.peak_report import PeakNames, largest_tensors
from tflms_sft._report.summary import transient_memory
from tflms_sft._search.traced_step import analyse_step
from tflms_sft._trace.layer_names import display_names
from tflms_sft._trace.step_tracing import trace_step

SPEC = tf.TensorSpec((2, 32, 32, 3), tf.float64)
SPEC32 = tf.TensorSpec((2, 32, 32, 3))
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
def unfolding(plan_with):
    """Give the kernels of convolution gradients a MiB of scratch."""
    if planned_device().is_gpu:
        pytest.skip("kernels of other devices take nothing that is known")
    plan_with(l3_bytes=2**20)


def refusal(params):
    with pytest.raises(BudgetError, match="smallest plan found needs") as caught:
        tflms_sft.rewrite(step(), params, SPEC)
    return caught.value


@pytest.mark.usefixtures("unfolding")
def test_budget_error_names_largest_kernel():
    error = refusal(AutoParams("1KiB", swap=False))
    turn = r"of which [\d.]+ KiB are an iteration of the backward loop of segment1 \(photo -> \w+\), .* of it "
    kernel = r"kernel scratch of (first|second) \(Conv2DBackprop\w+, backward\), `.*` is [\d.]+ KiB and variables"
    assert re.search(turn + kernel, str(error)), error
    assert error.tensor.endswith("backward)") and "/" not in error.tensor, "the largest tensor, by its layer"
    params = AutoParams(error.smallest_bytes, swap=False, max_slowdown=math.inf)
    plan = tflms_sft.rewrite(step(), params, SPEC).plan
    assert error.tensor in [name for name, _ in plan.predicted.largest]


@pytest.mark.usefixtures("unfolding")
def test_budget_error_of_tuned_names_largest_kernel(tmp_path):
    with pytest.raises(BudgetError, match=r"of which [\d.]+ MiB are kernel scratch of second \(Conv2DBackprop"):
        LMSParams.tuned(step(), "100KiB", SPEC, tier="disk", spill_dir=tmp_path, min_bytes=0)


def test_transient_memory_of_branch_is_reported():
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.cond(tf.reduce_sum(x) > 0, lambda: tf.reduce_sum(tf.exp(tf.sin(x))), lambda: tf.reduce_sum(x))
        return y, tape.gradient(y, x)

    ((branch, taken),) = tflms_sft.rewrite(tf.function(step), AutoParams("1GiB"), np.ones((64, 1024))).plan.original.own
    assert branch.startswith("a branch of ") and taken >= 64 * 1024 * 8


@pytest.mark.usefixtures("unfolding")
def test_transient_memory_of_iteration_and_kernel_is_reported():
    plan = tflms_sft.rewrite(step(), TILES, SPEC).plan
    ((kernel, taken),) = plan.original.own
    assert kernel.startswith("kernel scratch of second (Conv2DBackprop") and taken > 2**20
    (turn, whole_turn), (inner, part) = plan.predicted.own
    assert turn == "an iteration of the backward loop of segment1 (photo -> pool)"
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


def test_op_without_layer_is_described():
    image = keras.Input((32, 32, 3), name="photo")
    model = keras.Model(image, layers.Conv2D(4, 3, name="only")(image))

    @tf.function
    def plain(images):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(images) ** 2)
        return loss, tape.gradient(loss, model.trainable_variables)

    plan = tflms_sft.rewrite(plain, AutoParams("1GiB"), SPEC32).plan
    names = [name for name, _ in plan.original.largest]
    assert "op 'gradient_tape/Tile' (Tile)" in names and not any(":" in name for name in names), names


def test_zeros_for_a_result_without_gradient_have_the_layer_of_their_reader():
    step = adversarial_step()
    concrete_fn, record = trace_step(step, (), {})
    traced = analyse_step(concrete_fn, record, mode=CanonicalMode.TILING)
    names = PeakNames(traced.analysis, record, display_names(traced.analysis.graph, record))
    zeros = [node.name for node in traced.analysis.order if node.name.startswith("zeros_like")]
    assert zeros and all(re.fullmatch(r"gru\w* \(ZerosLike(, backward)?\)", names.op(name)) for name in zeros), zeros
    (argument,) = (t.node.name for t in traced.analysis.graph.inputs if t.dtype == tf.float32)
    assert names.op(argument) == f"argument {argument!r} of the step"
    assert names.op("no such op") == "no such op"
    draw = next(node.name for node in traced.analysis.order if node.op == "StatelessRandomNormalV2")
    assert names.op(draw) == f"op {draw!r} (StatelessRandomNormalV2)"


def test_swapped_tensors_have_layer_names():
    """In the graph with swaps: elements of loops, tensors of tile loops, and their copies."""
    plan = tflms_sft.rewrite(step(), [TILES, LMSParams(min_bytes=0, tier="disk")], SPEC).plan
    assert plan.swaps and all("/" not in swap.tensor for swap in plan.swaps), plan.swaps
    assert all("/" not in name for name, size in plan.predicted.largest if size > 2**10), plan.predicted.largest
    plan = tflms_sft.rewrite(adversarial_step(), LMSParams(min_bytes=0, tier="disk")).plan
    elements = {swap.tensor for swap in plan.swaps if swap.tensor.endswith(" in every iteration")}
    assert all(re.fullmatch(r"(gru|lstm)\w* \((a state|\w+)\) in every iteration", name) for name in elements), elements
    assert any("(a state)" in name for name in elements)
    (name,) = {name for name, reason in plan.not_swapped if reason == "the step does not compute its gradient"}
    assert re.fullmatch(r"lstm\w* \(While\)", name)


def test_swapped_in_tensor_at_peak_is_named_after_its_source():
    concrete_fn, record = trace_step(step(), (SPEC,), {})
    traced = analyse_step(concrete_fn, record, 2)
    graph = traced.analysis.graph
    names = PeakNames(traced.analysis, record, display_names(graph, record))
    pool = next(node.name for node in graph.nodes.values() if node.op == "MaxPool")
    assert names.tensor_called(f"lms/{pool}/swap_in_0:0", graph) == "pool, swapped in"
    (conv,) = (node.name for node in graph.nodes.values() if node.op == "Conv2D" and node.inputs[0].node.op != "Relu")
    text = names.in_text(f"`{conv}` (Conv2D) reads `{pool}:0` with `lb`", graph)
    assert text == "`first` (Conv2D) reads `pool` with `lb`"
    assert names.tensor_called("lms/other_1/swap_in_0:0", graph) == "lms/other_1/swap_in_0:0"


def test_results_of_loops_have_names():
    image = x = keras.Input((64, 64, 3), name="photo")
    for block in ("one", "two"):
        for part in "ab":
            x = layers.Conv2D(8, 3, padding="same", activation="relu", name=f"{block}_{part}")(x)
        x = layers.MaxPool2D(name=f"pool_{block}")(x)
    spec = tf.TensorSpec((2, 64, 64, 3))
    model = keras.Model(image, layers.Dense(1)(layers.GlobalAveragePooling2D(name="mean")(x)))
    concrete_fn, record = trace_step(gradient_step(model), (spec,), {})
    traced = analyse_step(concrete_fn, record, 2)
    names = PeakNames(traced.analysis, record, display_names(traced.analysis.graph, record))
    plans, _ = plan_sft(traced, SFTParams((4, 1), [SegmentSpec("photo", "pool_two")], halo="carry"))
    graph = tile_skeleton(traced.analysis, plans)
    forward = graph.nodes["sft/segment1/forward/while"]
    peak = Peak(9, "", tuple((forward.out(index).name, 9) for index in range(len(forward.outputs))), (), 0)
    first, *others = (name for name, _ in largest_tensors(names, plans, graph, peak))
    assert first == "pool_two" and others
    assert all(re.fullmatch(r"halo rows of \w+", name) for name in others), others
    assert names.tensor_called("sft/segment1/backward4/while:2", graph) == "output 2 of the backward loop 4 of segment1"
    name = "lms/sft/segment1/forward/while_3/swap_in_0:0"
    assert names.tensor_called(name, graph) == "output 3 of the forward loop of segment1, swapped in"
