"""Tests of `measure`: peaks, timelines, and restored variables."""

import functools
import math
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from gradients import gradient_step, model_of
from keras import layers
from pipelined import train_step
from training import net as classifier

import tflms_sft
from rewriters.ir import device_detection, tf_internals
from rewriters.ir.device_detection import planned_device
from tflms_sft import PipelineParams, SFTParams
from tflms_sft._report.op_names import short_op_names
from tflms_sft._report.plan_records import Measurement
from tflms_sft._rewrite.peak_statistics import read_peak, reset_peak
from tflms_sft._util.byte_sizes import format_bytes

SIZE = 128


def test_first_call_above_its_budget_warns_once(monkeypatch):
    """A device without statistics compares nothing, so the statistics are replaced."""
    budget, reads = 700 * 1024, []

    def read_peak(in_use, step_bytes, tiers):
        reads.append(step_bytes)
        return tflms_sft.Measurement(int(1.06 * budget), "allocator statistics")

    statistics = SimpleNamespace(reset_peak=lambda tiers: 0, read_peak=read_peak)
    monkeypatch.setattr("tflms_sft._rewrite.rewritten_step.peak_statistics", statistics)
    images = tf.random.normal((4, 24, 24, 3), dtype=tf.float64)
    step = tflms_sft.rewrite(gradient_step(classifier()), tflms_sft.AutoParams(budget), images)
    tf.function(step)(images)
    assert not reads
    predicted = step.plan.predicted.peak_bytes
    headroom = math.ceil(100 * (int(1.06 * budget) - predicted) / budget) / 100
    with pytest.warns(UserWarning) as caught:
        step(images)
    assert [str(warning.message) for warning in caught] == [
        f"tflms-sft: the first call used 742 KiB, predicted {format_bytes(predicted)}, more than its budget of "
        f"700 KiB. Leave more of the budget free, such as `headroom={headroom:g}`."
    ]
    assert step.plan.measured.peak_bytes == int(1.06 * budget) and 4 * 24 * 24 * 3 * 8 in reads[0]
    step(images)
    assert len(reads) == 1


def net(size=SIZE):
    """Depthwise, because the scratch of other convolutions depends on the processor's cache."""
    image = x = keras.Input((size, size, 8))
    for _ in range(4):
        x = layers.DepthwiseConv2D(3, padding="same", activation="relu")(x)
    return model_of(image, x)


IMAGES = np.random.default_rng(0).normal(size=(2, SIZE, SIZE, 8)).astype("float32")


@pytest.fixture
def records(monkeypatch):
    """Use allocation records even if the device keeps statistics."""
    without_statistics = SimpleNamespace(reset_peak=lambda tiers=(): None)
    monkeypatch.setattr("tflms_sft._rewrite.measure.peak_statistics", without_statistics)


@pytest.mark.usefixtures("records")
def test_measure_peak_is_in_range_of_activations():
    step = gradient_step(net())
    found = tflms_sft.measure(step, IMAGES)
    activations = 4 * IMAGES.nbytes  # What the backward pass needs of four layers.
    variables = sum(4 * int(tf.size(v)) for v in step.model.variables)
    assert activations + variables < found.peak_bytes < 3 * (activations + variables)
    assert found.source == "allocation records of one step"


@pytest.mark.usefixtures("records")
def test_measure_timeline_rises_to_peak_and_falls():
    found = tflms_sft.measure(gradient_step(net()), IMAGES)
    (line,) = found.timelines
    times, alive = zip(*line.points, strict=True)
    assert times[0] == 0 and list(times) == sorted(times) and times[-1] > 0
    assert max(alive) == found.peak_bytes
    assert alive[-1] < found.peak_bytes / 2


def test_measure_timeline_peak_agrees_with_allocator():
    """The order of ops varies slightly between the two runs."""
    step = gradient_step(net())
    found = tflms_sft.measure(step, IMAGES, timelines=True)
    (line,) = found.timelines
    assert line.device == "CPU:0" and abs(line.peak_bytes - found.peak_bytes) < 0.25 * found.peak_bytes
    assert all(size > 0 for _, size in line.largest) and line.largest[0][1] >= IMAGES.nbytes
    assert tflms_sft.measure(step, IMAGES).timelines == () or not planned_device().has_allocator_stats


def test_measure_timeline_includes_arrays_read_from_disk(tmp_path):
    """No allocator records such arrays."""
    params = tflms_sft.LMSParams(tier="disk", spill_dir=tmp_path, min_bytes=IMAGES.nbytes)
    fast = tflms_sft.rewrite(gradient_step(net()), params, IMAGES)
    planned = fast.plan
    found = tflms_sft.measure(fast, IMAGES, timelines=True)
    assert fast.plan.measured is found and planned.measured is None, "a plan does not change"
    (line,) = found.timelines
    assert any("/swap_in_" in name and size == IMAGES.nbytes for name, size in line.largest)
    end = sum(4 * int(tf.size(v)) for v in fast.concrete_function.variables) + IMAGES.nbytes
    assert line.points[-1][1] - end < 0.1 * IMAGES.nbytes, "everything was given back"


def piped(params, open_batch):
    """Measure a step in two stages and two micro-batches, for a fixed or an open batch size."""
    keras.utils.set_random_seed(1)
    image = x = keras.Input((SIZE, SIZE, 8))
    for number in range(4):
        x = layers.DepthwiseConv2D(3, padding="same", activation="relu", name=f"layer{number}")(x)
    model = keras.Model(image, layers.GlobalAveragePooling2D()(x))
    model.compile("sgd", "mse", jit_compile=False)
    images, labels = np.concatenate([IMAGES, IMAGES]), np.ones((2 * len(IMAGES), 8), "float32")
    model._symbolic_build(data_batch=(images, labels))
    specs = [tf.TensorSpec((len(images), *images.shape[1:])), tf.TensorSpec((len(images), 8))]
    pipeline = PipelineParams(["layer1"], "gpipe", 2, ["CPU:0"] * 2)
    step = train_step(model)
    if open_batch:
        signature = [tf.TensorSpec((None, *spec.shape[1:])) for spec in specs]
        step = tf.function(step.python_function, input_signature=signature, autograph=False)
    step = tflms_sft.rewrite(step, [params, pipeline], *specs)
    assert (step._importer.other is not None) == open_batch
    return tflms_sft.measure(step, images, labels)


@pytest.mark.usefixtures("records")
def test_measure_peak_of_unknown_batch_includes_disk_arrays(tmp_path):
    """An open batch size selects one of two called functions."""
    swaps = tflms_sft.LMSParams(tier="disk", spill_dir=tmp_path, min_bytes=IMAGES[0].nbytes)
    fixed, free = (piped(swaps, open_batch) for open_batch in (False, True))
    for found in (fixed, free):
        (line,) = found.timelines
        read = [name for name, size in line.largest if "/swap_in_" in name and size == IMAGES.nbytes]
        assert len(read) >= 3 and all(name.startswith("micro_") for name in read)
        assert line.points[-1][1] - line.points[0][1] < IMAGES.nbytes, "everything was given back"
    apart = abs(fixed.peak_bytes - free.peak_bytes)
    assert apart < 2.5 * IMAGES.nbytes, "the order of a run varies; what was read is half of it"


@pytest.mark.usefixtures("records")
@pytest.mark.parametrize("open_batch", [False, True])
def test_measure_timeline_has_loops_of_each_micro_batch(open_batch):
    (line,) = piped(SFTParams((4, 1)), open_batch).timelines
    loops = [loop for loop, *_ in line.loops]
    assert loops and all(loops.count(loop) == 2 for loop in loops)
    assert {loop.partition("/")[2] for loop in loops} == {"forward", "backward"}
    assert all(0 <= begin < end <= line.points[-1][0] for _, begin, end in line.loops)
    in_loops = short_op_names(name for name, _ in line.largest if "/while/body/" in name)
    assert in_loops and all("ward loop of segment" in name for name in in_loops.values())


def test_step_stats_names_ops_of_branches():
    @tf.function
    def step(x, number):
        def inner():
            return tf.cond(number > 5, lambda: tf.sin(x), lambda: tf.exp(x))

        return tf.switch_case(number, [lambda: tf.cos(x), inner]) + tf.cond(number > 0, lambda: tf.tan(x), inner)

    arguments = tf.ones(3), tf.constant(1)
    concrete_fn = step.get_concrete_function(*arguments)
    types = dict(tf_internals.operations(concrete_fn.graph))
    assert {"Sin", "Exp", "Cos", "Tan"} <= {operation.type for operation in types.values()}
    times = tf_internals.times(tf_internals.step_stats(concrete_fn, arguments))
    ran = [types[name].type for name in times if name in types]
    assert ran.count("Exp") == ran.count("Tan") == 1 and not {"Sin", "Cos"} & {*ran}


@pytest.mark.usefixtures("records")
def test_measure_rewritten_step_has_lower_peak():
    step = gradient_step(net())
    plain = tflms_sft.measure(step, IMAGES).peak_bytes
    fast = tflms_sft.rewrite(step, SFTParams((4, 4)), IMAGES)
    assert tflms_sft.measure(fast, IMAGES).peak_bytes - IMAGES.nbytes < 0.75 * (plain - IMAGES.nbytes)


def test_measure_step_types_agree():
    step = gradient_step(net())
    by_function = tflms_sft.measure(step, IMAGES).peak_bytes
    by_keyword = tflms_sft.measure(step, images=IMAGES).peak_bytes
    by_concrete = tflms_sft.measure(step.get_concrete_function(IMAGES), tf.constant(IMAGES)).peak_bytes
    assert np.allclose([by_keyword, by_concrete], by_function, rtol=0.3)


@pytest.fixture(params=["records", "statistics"])
def either_way(request, monkeypatch):
    """Parametrised by whether the device keeps statistics."""
    statistics = request.param == "statistics"
    replaced = SimpleNamespace(
        reset_peak=lambda tiers=(): 0 if statistics else None,
        read_peak=lambda in_use, own, tiers: Measurement(1, "statistics"),
    )
    monkeypatch.setattr("tflms_sft._rewrite.measure.peak_statistics", replaced)
    return request.param


def test_measure_restores_all_variables(either_way):
    keras.utils.set_random_seed(0)
    image = keras.Input((16, 16, 3))
    x = layers.BatchNormalization()(layers.Conv2D(4, 3)(image))
    x = layers.GlobalAveragePooling2D()(layers.Dropout(0.5)(x))
    model = keras.Model(image, layers.Dense(2)(x))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    images, labels = np.random.default_rng(0).normal(size=(4, 16, 16, 3)).astype("float32"), np.arange(4) % 2
    model.fit(images, labels, verbose=0)
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    before = [np.array(v) for v in variables]
    step = tf.function(lambda x, y: model.train_step((x, y)))
    rewritten = tflms_sft.rewrite(step, SFTParams((2, 2)), images, labels)
    for measured in (step, rewritten):
        assert either_way in tflms_sft.measure(measured, images, labels).source
        assert all(np.array_equal(a, v) for a, v in zip(before, variables, strict=True))
    step(images, labels)
    assert not all(np.array_equal(a, v) for a, v in zip(before, variables, strict=True))


def test_measure_after_error_restores_variables():
    variable = tf.Variable(1.0)

    @tf.function
    def step(x):
        variable.assign_add(1.0)
        with tf.control_dependencies([tf.debugging.assert_positive(x)]):
            return variable * x

    with pytest.raises(tf.errors.InvalidArgumentError):
        tflms_sft.measure(step, tf.constant(-1.0))
    assert float(variable) == 1.0


@pytest.mark.parametrize("step", [None, "step", lambda x: x])
def test_measure_other_object_is_refused(step):
    with pytest.raises(
        TypeError, match="`step` must be a rewritten step, a `tf.function` or a `ConcreteFunction`"
    ) as e:
        tflms_sft.measure(step, 1)
    assert f"of type {type(step).__name__}" in str(e.value)


@pytest.fixture
def set_memory_info(monkeypatch):
    """Return a function that sets the statistics of all devices, as a function of the name of one."""
    return functools.partial(monkeypatch.setattr, "tensorflow.config.experimental.get_memory_info")


@pytest.mark.parametrize(("peak", "expected"), ((0, None), (800, None), (1100, 1100)))
def test_read_peak_below_step_bytes_is_none(set_memory_info, peak, expected):
    """Some allocators count only blocks above a size."""
    set_memory_info(lambda name: {"peak": peak, "current": 0})
    found = read_peak(0, [600, 400])
    assert (found and found.peak_bytes) == expected


def test_read_peak_adds_uncounted_small_blocks(set_memory_info, plan_with):
    """oneDNN's CPU allocator keeps no statistics of blocks below 256 KiB."""
    set_memory_info(lambda name: {"peak": 1500, "current": 0})
    plan_with(min_counted_bytes=500, maps_pages=True)
    assert read_peak(650, [600, 400, 300]).peak_bytes == 1500 - 50 + 700
    many = [400] * 10
    assert read_peak(0, many).peak_bytes == 1500 + sum(many), "more than what is seen"
    assert read_peak(0, [600, 1000, *many]) is None, "not even what is counted"


def test_peaks_of_replicas_are_added_up(monkeypatch, set_memory_info, plan_with):
    peaks, reset = {"GPU:0": 1500, "GPU:1": 1700}, []
    info = {name: {"peak": peak, "current": 100} for name, peak in peaks.items()}
    set_memory_info(info.__getitem__)
    monkeypatch.setattr("tensorflow.config.experimental.reset_memory_stats", reset.append)
    plan_with(min_counted_bytes=0, maps_pages=True)
    assert reset_peak((), tuple(peaks)) == 200 and reset == list(peaks)
    measured = read_peak(200, [50], (), tuple(peaks))
    assert measured.peak_bytes == 3200 - (200 - 50)
    assert measured.source == "allocator statistics of GPU:0 + GPU:1"


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize(("seen_from", "expected"), [(0, 0), (256, 0), (2**18, 2**18), (2**30, 0)])
def test_counted_from_is_determined_by_trial(monkeypatch, set_memory_info, seen_from, expected, traced):
    """Also while Keras traces a step, where ops allocate nothing."""
    sizes, found = [], []

    def info(name):
        return {"current": sum(size for size in sizes if size >= seen_from)}

    set_memory_info(info)
    monkeypatch.setattr("tensorflow.identity", lambda value: tf.executing_eagerly() and sizes.append(value.shape[0]))

    @tf.autograph.experimental.do_not_convert
    def probe():
        found.append(device_detection._min_counted_bytes("CPU:0"))

    (tf.function(probe) if traced else probe)()
    assert found == [expected]


def test_measure_timeline_uncopyable_variable_is_named():
    keys = tf.lookup.KeyValueTensorInitializer(tf.constant([1, 2]), tf.constant([3.0, 4.0]))
    table = tf.lookup.StaticHashTable(keys, 0.0)
    weight = tf.Variable(1.0)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(table.lookup(x)) * weight
        return tape.gradient(loss, weight)

    with pytest.raises(TypeError, match="a resource that is no variable .a lookup table"):
        tflms_sft.measure(step, tf.constant([1, 2]), timelines=True)
