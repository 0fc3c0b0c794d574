"""Stages on several devices: the same numbers, where every operation is, and in which order devices run them.

Devices have to be made before TensorFlow begins, so one process with eight logical CPUs runs all that need them.
"""

import dataclasses
import itertools
import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from children import printed
from pipelined import CUTS, HERE, SCHEDULES, batches, compiled, fitted, hand_step, largest_error, net, run, train_step

import tflms_sft
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize import canonicalize
from rewriters.errors import PipelineError
from rewriters.ir.graph import predecessors
from rewriters.ir.graph_pass import run_pass
from rewriters.pipelining import pipeline_pass
from rewriters.pipelining.micro_batch_reduction import BatchGrowth, UnrollSpec
from rewriters.pipelining.schedule_simulator import simulate
from rewriters.pipelining.schedules import Direction, Schedule, Slot, make
from rewriters.pipelining.stage_assignment import assign_stages
from rewriters.pipelining.step_partition import split_step
from tflms_sft import Pipeline, PipelineParams

pytestmark = pytest.mark.usefixtures("double_precision")

TOLERANCE = 1e-12


@pytest.fixture(scope="module")
def found():
    """What needs several devices."""
    return printed("pipelined.py")


# On devices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "count"), SCHEDULES)
def test_pipeline_five_steps_equal_plain(found, schedule, count):
    """Logs, and then all weights, slots, counters and states of metrics."""
    result = found[f"{schedule} {count}"]
    assert result["error"] < TOLERANCE
    if count == 1:
        assert result["bit equal"]


@pytest.mark.parametrize(("schedule", "count"), SCHEDULES)
def test_ops_run_on_the_device_of_their_slot(found, schedule, count):
    result = found[f"{schedule} {count}"]
    assert result["placed"] > 50 * count and not result["misplaced"]
    assert result["layers"] >= 4 * 2 * count and not result["strayed"]


@pytest.mark.parametrize(("schedule", "count"), SCHEDULES)
def test_devices_run_slots_sequentially(found, schedule, count):
    """As recorded in a run: nothing of a slot begins before what is in the slot before has ended."""
    result = found[f"{schedule} {count}"]
    assert result["slots"] == 2 * 4 * count
    assert not result["early"]


def test_pipeline_replicas_equal_plain(found):
    result = found["hybrid"]
    assert result["error"] < TOLERANCE
    assert result["devices"] == 8


def test_variables_are_placed_or_read_remotely(found):
    result = found["placement"]
    assert "variable(s) are not on the device of their stage" in result["refused"]
    assert "tflms_sft.stage_devices(model, cuts, devices)" in result["refused"]
    assert "of stage 1 is on" in result["refused"] and "and should be on /device:CPU:1" in result["refused"]
    assert result["copied"] < TOLERANCE
    assert result["moved"] == [0, 0, 1, 1, 2, 2, 3, 3, 3, 3]
    assert result["cuts"] == CUTS
    assert result["slots beside"]
    assert result["same outputs"] and result["error"] < TOLERANCE
    assert result["stale"] < TOLERANCE, "what was traced before is traced again"
    assert "The optimizer of `model` is built" in result["too late"]


def test_conditional_updates_equal_plain(found):
    assert found["bodies"].keys() == {"loss scale", "accumulation"}
    assert max(found["bodies"].values()) < TOLERANCE


@pytest.mark.parametrize("case", ["1f1b 4 1", "1f1b 2 2"])
def test_uneven_batches_run_in_their_stages(found, case):
    """Even ones run in their slots, in a step that takes both."""
    result = found[f"uneven {case}"]
    assert result["error"] < TOLERANCE
    for kind, count in {"even": 4, "uneven": 1}.items():
        where = result.get(kind)
        if where is not None:
            assert where["placed"] > 50 * count and not where["misplaced"]
            assert where["layers"] >= 4 * 2 * count and not where["strayed"]
            assert where["slots"] == 2 * 4 * count and not where["early"]


@pytest.mark.parametrize("placement", ["check", "copy"])
def test_predicted_peaks_count_update_and_weights_per_device(found, placement):
    predicted, measured = found["peaks"][placement]
    assert all(got > 0 for got in measured)
    # Logical CPUs make no copies, and run a part of the update after another or at once.
    most = 1.3 if placement == "check" else 2.2
    assert all(0.98 * got < told < most * got for told, got in zip(predicted, measured, strict=True)), found["peaks"]
    if placement == "copy":
        assert predicted[0] > 3 * predicted[1], "which has all variables"


# The graph --------------------------------------------------------------------------------------------------


def piped(schedule, skip=False, optimizer="momentum", deep=False):
    """A pipeline as a graph, with what it was made of."""
    specs = tf.TensorSpec((2, 8, 8, 3), "float64"), tf.TensorSpec((2,), "int64")
    step = hand_step(compiled(net(HERE, skip, deep=deep), optimizer)).get_concrete_function(*specs)
    analysis = GraphAnalysis(canonicalize.read_canonical(step, canonicalize.CanonicalMode.EXACT))
    forward = (node for node in analysis.order if "gradient_tape" not in node.name)
    by_name = {node.name.split("functional_1/")[-1]: node for node in forward}
    stages = assign_stages(analysis, [[by_name[f"stage{number}_1/Tanh"].out()] for number in range(3)])
    rows, one = BatchGrowth((0,), 1), BatchGrowth(())
    growth = lambda tensor: rows if tensor.shape[:1] == (2,) else one  # noqa: E731
    request = UnrollSpec(schedule.micro_batches, growth, lambda tensor: True)
    devices = pipeline_pass.Devices([f"/device:CPU:{number}" for number in range(schedule.num_devices)], {})
    pipelining = pipeline_pass.PipelinePass(
        analysis=analysis,
        parts=split_step(analysis, [0, 1]),
        stages=stages,
        request=request,
        schedule=schedule,
        devices=devices,
    )
    return run_pass(pipelining, analysis.graph)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(("name", "count"), [*SCHEDULES, ("1f1b", 7), ("gpipe", 3), ("master", 5)])
def test_longest_path_takes_the_simulated_time(name, count, skip):
    """A slot's time is counted where its operations begin, so that each path through it has it once."""
    schedule = make(name, 4, count)
    built = piped(schedule, skip)
    order = built.graph.execution_order()
    for seed in range(3):
        random = np.random.default_rng(seed)
        forward, backward = (random.uniform(1, 10, size=4) for _ in range(2))
        times = {Direction.FORWARD: forward, Direction.BACKWARD: backward}
        weight = {}
        for slot, nodes in built.slots.items():
            inside = set(nodes)
            for node in nodes:
                if not inside.intersection(t.node for t in node.inputs):
                    weight[node] = times[slot.kind][slot.stage]
        ends = {}
        for node in order:
            ends[node] = max((ends[before] for before in predecessors(node)), default=0.0) + weight.get(node, 0.0)
        want = simulate(schedule, list(forward), list(backward))
        assert max(ends.values()) == pytest.approx(want.seconds)
        for slot, end in built.ends.items():
            assert ends[end] == pytest.approx(want.ends[slot])


def test_slots_keep_gradient_operands_and_end_in_order():
    schedule = make("1f1b", 4, 3)
    built = piped(schedule, skip=True)
    for device, slots in enumerate(schedule.devices):
        before = None
        for slot in slots:
            end = built.ends[slot]
            assert end.op == "NoOp" and end.device == f"/device:CPU:{device}"
            assert before is None or before in end.control_inputs
            kinds = {node.op for node in built.slots[slot]}
            assert (
                kinds & {"Conv2D"} if slot.kind is Direction.FORWARD else kinds & {"Conv2DBackpropFilter", "TanhGrad"}
            )
            assert not kinds & {"Const", "ReadVariableOp", "AssignVariableOp", "Shape"}
            assert {node.device for node in built.slots[slot]} == {end.device}
            before = end
    named = [node.name for slot in built.slots.values() for node in slot]
    assert len(named) == len(set(named)), "in one slot each"
    assert "pipeline/stage_1/forward_2" in built.graph.nodes


def test_layer_gradients_wait_for_those_of_the_next_layer():
    """Else those of inputs run ahead, what gradients of filters read waits, and a device holds more than predicted."""
    schedule = make("1f1b", 4, 2)
    built = piped(schedule, deep=True)
    pairs = 0
    for slot, nodes in built.slots.items():
        gradients = [node for node in nodes if "Backprop" in node.op]
        assert not gradients or slot.kind is Direction.BACKWARD
        behind = [n for n in gradients if "functional_1/conv" in n.name]
        before = [n for n in gradients if "functional_1/inner" in n.name]
        for first, second in itertools.product(behind, before):
            assert first in second.control_inputs or first in {t.node for t in second.inputs}
            pairs += 1
    assert pairs == 2 * (3 * 4 + 2)  # Nothing goes back into the image.


def test_transfers_have_no_constants_and_only_slices_of_arguments():
    built = piped(make("gpipe", 4, 2))
    readers = built.graph.consumers()
    for node in built.graph.nodes.values():
        if node.op == "Const":
            assert {reader.device for reader, _ in readers.get(node.out(), ())} <= {node.device}
        if node.op == "Split":
            assert node.device == pipeline_pass.HOST
    arguments = built.graph.inputs[:2]
    assert {reader.op for argument in arguments for reader, _ in readers[argument]} == {"Split"}


def test_deadlocked_order_is_refused():
    backward_first = tuple(
        (Slot(Direction.BACKWARD, 0, stage), Slot(Direction.FORWARD, 0, stage)) for stage in range(4)
    )
    with pytest.raises(PipelineError, match="cannot run in the order of the schedule 'wrong': The graph has a cycle"):
        piped(Schedule("wrong", 4, 1, backward_first))


@pytest.mark.parametrize("stages", [1, ["cut"]])
def test_second_order_gradient_crosses_stages_once(stages):
    w = [tf.Variable(np.eye(4)), tf.Variable(np.eye(4))]

    @tf.function
    def step(x):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_mean(tf.tanh(tf.tanh(x @ w[0], name="cut") @ w[1]))
            penalty = tf.reduce_mean(tape.gradient(loss, x) ** 2)
            loss = loss + penalty
        for variable, gradient in zip(w, outer.gradient(loss, w), strict=True):
            variable.assign_sub(gradient)
        return loss

    x = np.random.default_rng(0).normal(size=(4, 4))
    rewritten = tflms_sft.rewrite(step, PipelineParams(stages, devices=HERE[: 1 if stages == 1 else 2]), x)
    start = [v.numpy() for v in w]
    want = [step(x).numpy(), *(v.numpy() for v in w)]
    for variable, value in zip(w, start, strict=True):
        variable.assign(value)
    assert largest_error([rewritten(x).numpy(), *(v.numpy() for v in w)], want) == 0


# The face ---------------------------------------------------------------------------------------------------


def test_plan_lists_stages_slots_times_and_bytes():
    step = train_step(compiled(net(HERE, skip=True), "adam"))
    plan = tflms_sft.rewrite(step, PipelineParams(CUTS, "1f1b", 4, HERE), *batches(1)[0]).plan
    told = plan.pipeline
    assert plan.changed and told.schedule == "1f1b" and told.micro_batches == 4
    assert [stage.exit for stage in told.stages] == [*CUTS, ""]
    assert set(told.stages[3].entries) == {"stage0", "stage2"}
    for number, stage in enumerate(told.stages[:3]):
        weights = 8 * (3 * 3 * (3 if number == 0 else 4) * 4 + 4)
        assert 3 * weights <= stage.weight_bytes <= 3 * weights + 8 * 8, "weights and two slots of Adam each"
    assert told.slots[3] == ("F0.3", "B0.3", "F1.3", "B1.3", "F2.3", "B2.3", "F3.3", "B3.3")
    assert told.stages[0].transfer_bytes == 2 * 8 * 8 * 4 * 8
    assert all(peak > stage.weight_bytes for peak, stage in zip(told.peak_bytes, told.stages, strict=True))
    assert plan.predicted.peak_bytes == max(told.peak_bytes) and plan.predicted.seconds == told.seconds > 0
    text = plan.summary()
    for part in ("4 stage(s) on 1 device(s), 4 micro-batch(es), schedule '1f1b'", "stage0 (0 -> 3", "device 3"):
        assert part in text
    assert told.simulation().seconds == pytest.approx(told.seconds)
    page = plan.to_html()
    assert "Work of each device over one training step" in page and "Sent forward" in page
    assert json.loads(plan.to_json())["pipeline"]["stages"][1]["exit"] == "stage1"


@pytest.mark.parametrize(("schedule", "count"), [("basic", 1), ("1f1b", 4)])
def test_verify_passes_for_a_pipeline(schedule, count):
    """Gradients too, which are put together."""
    model = compiled(net(HERE, skip=True), "momentum")
    proof = tflms_sft.verify(model, batches(1)[0], PipelineParams(CUTS, schedule, count, HERE))
    assert proof.ok and not proof.not_compared
    assert "10 gradient(s)" in proof.summary() and proof.plan.pipeline.schedule == schedule


def test_fewer_micro_batches_have_fewer_control_edges():
    step = train_step(compiled(net(HERE), "momentum"))
    data = batches(1)[0]
    plans = [tflms_sft.rewrite(step, PipelineParams(CUTS, name, 8, HERE), *data).plan for name in ("gpipe", "1f1b")]
    gpipe, less = (plan.pipeline.peak_bytes for plan in plans)
    assert less[0] < gpipe[0] and less[3] < 0.65 * gpipe[3]


@pytest.mark.parametrize("stages", [2, 3, 4, "auto"])
def test_stages_by_number_are_balanced_and_reproducible(stages):
    model = compiled(net(HERE), "momentum")
    step = train_step(model)
    devices = HERE[: 3 if stages == "auto" else stages]
    rewritten = tflms_sft.rewrite(step, PipelineParams(stages, "gpipe", 2, devices), *batches(1)[0])
    told = rewritten.plan.pipeline.stages
    assert len(told) == len(devices)
    waiting = [stage.waiting_bytes for stage in told]
    assert max(waiting) <= 3.1 * min(waiting), "two of the four blocks in a stage, what it reads counted"
    assert {stage.exit for stage in told[:-1]} <= {f"{kind}{n}" for kind in ("conv", "stage") for n in range(4)}
    assert largest_error(run(model, rewritten, batches(2)), run(model, step, batches(2))) < TOLERANCE


def test_stage_cuts_prefer_pooling():
    keras.utils.set_random_seed(0)
    image = x = keras.Input((16, 16, 3))
    for number in range(5):
        x = keras.layers.Conv2D(4, 3, padding="same", activation="relu", name=f"conv{number}")(x)
        if number == 0:
            x = keras.layers.MaxPool2D(2, name="pool")(x)
    model = keras.Model(image, keras.layers.Dense(3)(keras.layers.GlobalAveragePooling2D()(x)))
    step = train_step(compiled(model, "momentum", 16))
    (first, _) = tflms_sft.rewrite(step, PipelineParams(2, devices=HERE[:2]), *batches(1, 16)[0]).plan.pipeline.stages
    assert first.exit == "pool"


@pytest.mark.parametrize(
    ("params", "error", "text"),
    [
        ({"stages": ["stage0", "stgae1"]}, tflms_sft.SegmentError, "`stages` names nothing in the step.*'stage1'"),
        ({"stages": ["stage1", "stage0"]}, PipelineError, "must be given from the input to the loss"),
        ({"stages": 40}, PipelineError, "`stages` must be at most .* Received: stages=40"),
        ({"stages": CUTS, "devices": None}, ValueError, "needs 4 devices, .* This program has 1"),
        (
            {"stages": CUTS, "devices": ["CPU:0"] * 3 + ["GPU:7"]},
            ValueError,
            "`devices` must name .* Received: .'GPU:7'.",
        ),
    ],
)
def test_unsupported_pipelines_are_refused(params, error, text):
    step = train_step(compiled(net(HERE), "momentum"))
    devices = ["CPU:0"] * 40 if params["stages"] == 40 else HERE
    if isinstance(params["stages"], list) and len(params["stages"]) == 2:
        devices = HERE[:3]
    with pytest.raises(error, match=text):
        tflms_sft.rewrite(step, PipelineParams(**{"devices": devices, **params}), *batches(1)[0])


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"stages": 0}, ValueError, "`stages` must be at least 1. Received: stages=0"),
        ({"stages": "block1"}, ValueError, r"To cut there: stages=\['block1'\]"),
        ({"stages": ["a", "a"]}, ValueError, r"names a cut twice: \['a'\]"),
        ({"stages": 2.0}, TypeError, '`stages` must be a number, "auto", or a list'),
        ({"schedule": "zigzag"}, ValueError, "`schedule` must be one of 'basic', 'gpipe'"),
        ({"schedule": "mast"}, ValueError, "`micro_batches` must be even"),
        ({"micro_batches": 0}, ValueError, "`micro_batches` must be at least 1"),
        ({"micro_batches": 1.5}, TypeError, "`micro_batches` must be an integer"),
        ({"data_replicas": 0}, ValueError, "`data_replicas` must be at least 1"),
        ({"devices": "GPU:0"}, TypeError, "`devices` must be a list of at least one device name"),
        ({"devices": ["the fast one"]}, ValueError, '`devices` must have names such as "GPU:0"'),
        ({"devices": ["GPU:0"], "stages": 2}, ValueError, r"each of 2 stage\(s\): 2 in total\. Received: 1 in devices"),
        ({"loss_reduction": "max"}, ValueError, '`loss_reduction` must be "mean" or "sum"'),
        ({"batch_norm": "sync"}, ValueError, '`batch_norm` must be "refuse" or "micro"'),
        ({"placement": "move"}, ValueError, '`placement` must be "check" or "copy"'),
    ],
)
def test_invalid_pipeline_params_are_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        PipelineParams(**arguments)


def test_params_without_cuts_have_one_stage():
    """So that what `stage_devices` returns can always be given on."""
    assert PipelineParams([]) == PipelineParams(()) == PipelineParams(1) and PipelineParams([]).num_stages == 1


def test_pipeline_params_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PipelineParams().stages = 3


# Under `fit` ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2])
def test_pipeline_fit_and_metrics_equal_plain(steps, capsys):
    callback = Pipeline(CUTS, "1f1b", 4, HERE)
    got = fitted([callback], steps=steps, validation_split=0.0)
    assert largest_error(got, fitted([], steps=steps)) < TOLERANCE
    assert "4 micro-batch(es), schedule '1f1b'" in capsys.readouterr().out
    assert [stage.exit for stage in callback.plan.pipeline.stages] == [*CUTS, ""]
    assert callback.plan.batch == 8


def test_validation_runs_plain_with_a_notice(capsys):
    callback = Pipeline(CUTS, "gpipe", 2, HERE)
    x, y = batches(1)[0]
    got = fitted([callback], validation_data=(x, y))
    assert largest_error(got, fitted([], validation_data=(x, y))) < TOLERANCE
    assert "validation is not rewritten: pipelines are for training only" in capsys.readouterr().out


def test_open_batch_is_predicted_by_the_first_batch():
    callback = Pipeline(CUTS, "gpipe", 4, HERE, verbose=0)
    got = fitted([callback], size=20)
    assert largest_error(got, fitted([], size=20)) < TOLERANCE
    assert not callback.plan.batch_is_fixed and callback.plan.batch == 8
    image, number = 2 * 8 * 8 * 4 * 8, 8
    assert callback.plan.pipeline.stages[0].transfer_bytes in (image, image + number), "and maybe how many there are"


def test_batch_norm_under_fit_is_refused_or_micro():
    with pytest.raises(PipelineError, match=r"layer 'norm0' \(BatchNormalization\)"):
        fitted([Pipeline(CUTS, "gpipe", 4, HERE, verbose=0)], norm=True)
    callback = Pipeline(CUTS, "gpipe", 1, HERE, verbose=0)
    assert largest_error(fitted([callback], norm=True), fitted([], norm=True)) < TOLERANCE


@pytest.mark.parametrize("cuts", [2, 3, ["stage1"]])
def test_stage_devices_cuts_like_a_pipeline(cuts):
    model = net(HERE)
    devices = HERE[: cuts if isinstance(cuts, int) else 2]
    found = tflms_sft.stage_devices(model, cuts, devices)
    step = train_step(compiled(model, "momentum"))
    told = tflms_sft.rewrite(step, PipelineParams(cuts, devices=devices), *batches(1)[0]).plan.pipeline
    assert [stage.exit for stage in told.stages[:-1]] == list(found)


def test_stage_devices_names_a_layer_with_several_calls():
    """As a list of cuts has it: each of its calls is in one cut."""
    images, shared = [keras.Input((8, 8, 3)) for _ in range(2)], keras.layers.Conv2D(4, 3, name="shared")
    x = keras.layers.Conv2D(4, 3, name="top")(keras.layers.Concatenate()([shared(image) for image in images]))
    model = keras.Model(images, keras.layers.GlobalAveragePooling2D()(x))
    cuts = tflms_sft.stage_devices(model, ["shared"], HERE[:2])
    assert cuts == ("shared",)
    model.compile("sgd", keras.losses.MeanSquaredError(), jit_compile=False)
    plan = tflms_sft.rewrite(train_step_of(model), PipelineParams(cuts, devices=HERE[:2]), *of_two_images()).plan
    assert [stage.exit for stage in plan.pipeline.stages] == ["shared/1, shared/2", ""]


def train_step_of(model):
    return tf.function(lambda a, b, y: model.train_step(((a, b), y)), autograph=False)


def of_two_images():
    (x, _), (y, _) = batches(2)
    return x, y, np.ones((8, 4))


@pytest.mark.parametrize(
    ("model", "error", "text"),
    [
        (lambda: 3, TypeError, "`model` must be a Keras model. Received: model=3"),
        (lambda: keras.Sequential([keras.layers.Dense(3)]), ValueError, "`model` must be built"),
        (lambda: compiled(net(HERE), "adam"), ValueError, "The optimizer of `model` is built, so its slots would stay"),
    ],
)
def test_stage_devices_refuses_unsupported_models(model, error, text):
    with pytest.raises(error, match=text):
        tflms_sft.stage_devices(model(), 2, HERE[:2])


def test_stage_devices_takes_inputs_for_a_subclassed_model():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = keras.layers.Dense(4, name="first"), keras.layers.Dense(3, name="second")

        def call(self, x):
            return self.second(keras.ops.tanh(self.first(x)))

    model = Own()
    model(np.ones((2, 5)))
    with pytest.raises(TypeError, match="`model` must declare its inputs"):
        tflms_sft.stage_devices(model, ["first"], HERE[:2])
    assert tflms_sft.stage_devices(model, ["first"], HERE[:2], inputs=np.ones((2, 5))) == ("first",)


def test_stage_devices_cuts_an_uncalled_sequential_model():
    layers = [keras.Input((5,)), keras.layers.Dense(4, name="first"), keras.layers.Dense(3, name="second")]
    assert tflms_sft.stage_devices(keras.Sequential(layers), ["first"], HERE[:2]) == ("first",)
