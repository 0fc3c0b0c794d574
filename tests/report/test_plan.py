"""Tests of `Plan`: summary, JSON, chart."""

import dataclasses
import html
import json
import re
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from gradients import gradient_step
from keras import layers

import tflms_sft
from tflms_sft import AutoParams, LMSParams, SegmentSpec, SFTParams
from tflms_sft._report.memory_chart import MAX_LARGEST, Span, merge_spans
from tflms_sft._report.op_names import short_op_names
from tflms_sft._report.plan_records import PlannedSwap
from tflms_sft._report.summary import grid_text, rows, segments_text
from tflms_sft._util.byte_sizes import format_bytes

IMAGES = np.zeros((2, 32, 32, 3), "float32")


@pytest.fixture(autouse=True)
def fresh_keras():
    """One step, shared by all tests."""


@pytest.fixture(scope="module")
def step():
    keras.backend.clear_session()
    image = keras.Input((32, 32, 3), name="photo")
    x = layers.Conv2D(8, 3, padding="same", activation="relu", name="one")(image)
    x = layers.Conv2D(8, 3, padding="same", activation="relu", name="two")(x)
    x = layers.MaxPool2D(2, name="pool")(x)
    x = layers.Conv2D(8, 3, padding="same", activation="relu", name="three")(x)
    x = layers.Conv2D(8, 3, padding="same", activation="relu", name="four")(x)
    return gradient_step(keras.Model(image, layers.GlobalAveragePooling2D(name="mean")(x)))


@pytest.fixture(scope="module")
def plan(step):
    specs = [SegmentSpec("photo", "pool", num_tiles=(4, 2), backward_num_tiles=(2, 2)), SegmentSpec("pool", "four")]
    return tflms_sft.rewrite(step, SFTParams((3, 1), specs), IMAGES).plan


def test_headline_has_segments_tiles_and_peaks(plan):
    assert plan.headline().startswith("2 segment(s) in 4 rows x 2 columns, 3 rows of tiles, predicted peak ")
    assert " instead of " in plan.headline() and "x the time" in plan.headline()
    assert "budget" not in plan.headline()


def test_summary_has_row_for_each_segment(plan):
    first, headings, rule, one, two, rest, whole, *lines = plan.summary().splitlines()
    assert first == f"Plan for batch 2: {plan.headline()}"
    columns = ["segment", "layers", "decision", "tiles", "saved for backward", "after", "time"]
    assert re.split(r"  +", headings.strip()) == columns
    assert set(rule) == {" ", "-"} and len({len(line) for line in (headings, rule, one, two, rest, whole)}) == 1
    cells = [re.split(r"  +", line.strip()) for line in (one, two, rest, whole)]
    assert cells[0][:4] == ["segment1", "photo -> pool", "tiles, recompute", "4 rows x 2 columns / 2 rows x 2 columns"]
    assert cells[1][:4] == ["segment2", "pool -> four", "tiles, recompute", "3 rows"]
    assert cells[2][:4] == ["-", "everything else", "not rewritten", "-"]
    assert cells[3][0] == "step" and cells[3][-1] == f"100 -> {100 * plan.predicted.time_ratio:.0f} %"
    assert lines[0].startswith("  segment1: an iteration reads 12x18 of the entry, writes 4x8 of the exit and takes ")
    assert any(line.startswith("  weights and optimizer slots: ") for line in lines)
    assert "measured" not in plan.summary()


def test_waiting_bytes_count_saved_tensors(plan):
    """Two convolutions of 32x32x8 floats and a pool of 16x16x8 are saved before; then only tensors between segments."""
    image, small = 2 * 32 * 32 * 8 * 4, 2 * 16 * 16 * 8 * 4
    assert plan.segments[0].waiting_bytes == (2 * image + small, small)
    assert plan.segments[1].waiting_bytes == (2 * small, small)  # The gradient of the last relu reads it.
    assert max(plan.rest_waiting_bytes) < 1024


def test_time_shares_sum_to_step(plan):
    parts = [plan.rest_time_share, *(segment.time_share for segment in plan.segments)]
    assert sum(before for before, _ in parts) == pytest.approx(1.0)
    assert sum(after for _, after in parts) == pytest.approx(plan.predicted.time_ratio)
    assert all(after > before > 0.1 for before, after in parts[1:])
    assert plan.rest_time_share[0] == plan.rest_time_share[1]


def test_summary_has_row_for_swaps(step):
    fast = tflms_sft.rewrite(step, [SFTParams((3, 1), [SegmentSpec("photo", "pool")]), LMSParams(min_bytes=1)], IMAGES)
    after = {decision: after for _, _, decision, _, _, after, _ in rows(fast.plan)}
    assert after["swap to disk"] == f"-{format_bytes(fast.plan.swapped_bytes)}"
    whole = sum(pair[1] for pair in (fast.plan.rest_waiting_bytes, fast.plan.segments[0].waiting_bytes))
    assert after[""] == format_bytes(whole - fast.plan.swapped_bytes)


def test_summary_has_measured_peak_and_source(plan):
    measured = dataclasses.replace(plan, measured=tflms_sft.Measurement(2**20, "a test"))
    assert "  measured peak: 1.00 MiB (a test)" in measured.summary().splitlines()


def test_summary_lists_layers_not_rewritten(step):
    lines = tflms_sft.rewrite(step, SFTParams((2, 2)), IMAGES).plan.summary().splitlines()
    reason = lines[lines.index("  not rewritten:") + 1]
    assert reason.startswith("    layer 'mean' (GlobalAveragePooling2D): Mean: it reduces over the image")


def test_plan_str_is_summary(plan):
    assert repr(plan) == f"<Plan for batch 2: {plan.headline()}>" and "\n" not in repr(plan)
    assert str(plan) == f"{plan}" == plan.summary()
    frame = plan._repr_html_()
    source = frame.removeprefix('<iframe srcdoc="').partition('"')[0]
    known = re.compile("[^0-9a-f][0-9a-f]{10}[^0-9a-f]|p[0-9a-f]{10}|m[0-9a-f]{10}")  # What matplotlib makes up.
    assert known.sub("", html.unescape(source)) == known.sub("", plan.to_html()) and frame.count("<") == 2


def test_headline_of_swaps_has_time(plan):
    swap = PlannedSwap("a", 2**20, (("b",),), ("c",))
    alone = dataclasses.replace(plan, segments=(), swaps=(swap,), swap_tier="disk")
    assert alone.headline().endswith(f", about {plan.predicted.time_ratio:.2f}x the time")
    equal = dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, time_ratio=1.004))
    assert equal.headline().endswith(", about the same time")


def test_summary_notes_unused_batch_tiles(step):
    plan = tflms_sft.rewrite(step, SFTParams({"batch": 7, "height": 2}), IMAGES).plan
    assert {segment.num_tiles for segment in plan.segments} == {(2, 2, 1)}
    assert "  a batch of 2 uses only 2 of the 7 tiles along the batch" in plan.summary()


def test_left_alone_reason_of_metrics_is_specific():
    image = keras.Input((16, 16, 3), batch_size=1)
    x = keras.layers.Conv2D(4, 3, padding="same")(image)
    model = keras.Model(image, keras.layers.Conv2D(3, 1)(keras.layers.BatchNormalization()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def summed(y, y_pred):
        return tf.reduce_mean(tf.cumsum(y_pred, axis=1))

    model.compile("sgd", loss, metrics=[summed], jit_compile=False)
    model._symbolic_build(data_batch=(np.zeros((1, 16, 16, 3)), np.zeros((1, 16, 16))))
    step = tf.function(lambda x, y: model.train_step((x, y)))
    specs = tf.TensorSpec((1, 16, 16, 3), keras.config.floatx()), tf.TensorSpec((1, 16, 16), tf.int64)
    plan = tflms_sft.rewrite(step, tflms_sft.SFTParams((2, 2)), *specs).plan
    lines = [line.strip() for line in plan.summary().splitlines()]
    reason = "a cumulative sum or product along an axis of the image needs all rows before each row"
    assert f"op 'Cumsum': Cumsum: {reason}; only metrics or results need it" in lines
    assert "not in the predicted peak" not in plan.summary()  # A cross-entropy of pixels is.


def test_summary_counts_further_unswapped_tensors(plan):
    left = tuple((f"tensor{number}:0", "a reason") for number in range(8))
    lines = dataclasses.replace(plan, not_swapped=left).summary().splitlines()
    found = [line for line in lines if line.startswith("  not swapped: ")]
    assert found[0] == "  not swapped: tensor0:0: a reason" and len(found) == 6
    assert found[-1] == "  not swapped: 3 more (`plan.not_swapped`)"


def test_summary_of_unknown_batch_names_batch_size(step):
    specs = [SegmentSpec("photo", "pool")]
    plan = tflms_sft.rewrite(step, SFTParams((2, 2), specs), tf.TensorSpec((None, 32, 32, 3))).plan
    assert plan.summary().startswith("Plan for any batch, bytes for batch 1: ")


def test_headline_without_rewriting_has_budget(step):
    plan = tflms_sft.rewrite(step, AutoParams("1GiB"), IMAGES).plan
    assert plan.headline().startswith("nothing rewritten, predicted peak ")
    assert plan.headline().endswith(", budget 1.00 GiB")


def test_headline_warns_only_if_printed_peak_grows(plan):
    for more, told in ((2**12, False), (2**26, True)):
        before = dataclasses.replace(plan.original, peak_bytes=2**30)
        after = dataclasses.replace(plan.predicted, peak_bytes=2**30 + more)
        headline = dataclasses.replace(plan, original=before, predicted=after).headline()
        assert ("MORE than before" in headline) is told


def test_to_json_has_every_field(plan):
    told = json.loads(plan.to_json())
    assert set(told) == {field.name for field in dataclasses.fields(plan)} - {"recipe"}
    assert told["changed"] is True and told["batch"] == 2 and told["batch_is_fixed"] is True
    assert told["measured"] is None and told["memory_budget"] is None
    first = told["segments"][0]
    assert set(first) == {field.name for field in dataclasses.fields(tflms_sft.PlannedSegment)}
    assert (first["entries"], first["exits"], first["num_tiles"]) == (["photo"], ["pool"], [1, 4, 2])
    for name in ("original", "predicted"):
        assert told[name]["peak_bytes"] == getattr(plan, name).peak_bytes
        assert max(amount for _, amount in told[name]["timeline"]) == told[name]["peak_bytes"]


def test_to_json_round_trips_records(plan):
    told = json.loads(plan.to_json(indent=None))

    def tuples(value):
        return tuple(map(tuples, value)) if isinstance(value, list) else value

    def rebuilt(kind, fields):
        return kind(**{name: tuples(value) for name, value in fields.items()})

    assert rebuilt(tflms_sft.Prediction, told["predicted"]) == plan.predicted
    assert tuple(rebuilt(tflms_sft.PlannedSegment, s) for s in told["segments"]) == plan.segments


def test_prediction_of_original_is_independent_of_tiles(plan, step):
    whole = tflms_sft.rewrite(step, AutoParams("1GiB"), IMAGES).plan
    assert plan.original == whole.original
    assert whole.predicted.time_ratio == 1.0 < plan.predicted.time_ratio < 2.5
    assert plan.predicted.fixed_bytes == sum(4 * int(tf.size(v)) for v in step.model.trainable_variables)


def test_largest_of_loop_outputs_have_layer_names(step):
    """`pool` is written by one loop and read by the other."""
    specs = [SegmentSpec("photo", "pool", stored="one"), SegmentSpec("pool", "four")]
    for params in (SFTParams((3, 1), specs), AutoParams("420KiB", headroom=0, swap=False)):
        plan = tflms_sft.rewrite(step, params, IMAGES).plan
        assert plan.segments and not any(name.startswith("sft/") for name, _ in plan.predicted.largest)
        assert {"one", "two", "pool"} & {name for name, _ in plan.predicted.largest}
        assert len(plan.predicted.progress) == len(plan.predicted.timeline)


@pytest.mark.parametrize("measured", [None, tflms_sft.Measurement(2**20, "a test")])
def test_plot_writes_png_and_returns_figure(plan, tmp_path, measured):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    figure = dataclasses.replace(plan, measured=measured, memory_budget=2**20).plot(str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
    axes, bars = figure.axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    measured_label = ["rewritten step: measured peak 1.00"] if measured else []
    expected = ["original step: peak", "rewritten step: peak", *measured_label, "budget: 1.00 MiB"]
    assert len(labels) == len(expected) and all(map(str.startswith, labels, expected))
    found = [text.get_text() for text in bars.texts]
    name, size = plan.predicted.own[0]
    assert size > plan.predicted.largest[0][1], "a turn"
    assert 2 <= len(found) <= MAX_LARGEST + 1 and format_bytes(size) in found[0] and found[0].endswith(name)


def shaded(axes):
    """Return (name, begin, end) of the shaded segments."""
    spans = [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in axes.patches]
    return [(text.get_text().split()[0], *span) for text, span in zip(axes.texts, spans, strict=True)]


def test_plot_shades_loops_of_segments(plan):
    pytest.importorskip("matplotlib")
    axes, _ = plan.plot().axes
    found = shaded(axes)
    assert [name for name, *_ in found] == ["segment1", "segment2", "segment2", "segment1"]
    ends = [place for _, *span in found for place in span]
    assert ends == sorted(ends) and ends[-1] <= plan.predicted.time_ratio + 1e-6  # They are rounded.
    for name, segment in zip(("segment1", "segment2"), plan.segments, strict=True):
        width = sum(end - begin for other, begin, end in found if other == name)
        assert width == pytest.approx(segment.time_share[1], rel=1e-3)


def test_merge_spans_joins_consecutive_loops():
    first, second = Span("a", False, 0.0, 0.1), Span("a", False, 0.105, 0.2)
    spans = [first, second, Span("a", True, 0.2, 0.3), Span("b", True, 0.3, 1)]
    assert merge_spans(spans, 0.01) == [Span("a", False, 0.0, 0.2), *spans[2:]]


def test_plot_with_timelines_has_second_panel(step, tmp_path):
    pytest.importorskip("matplotlib")
    fast = tflms_sft.rewrite(step, SFTParams((4, 1), [SegmentSpec("photo", "pool")]), IMAGES)
    before, after = (tflms_sft.measure(function, IMAGES, timelines=True) for function in (step, fast))
    assert fast.plan.measured is after
    (line,) = after.timelines
    assert [loop for loop, *_ in line.loops] == ["segment1/forward", "segment1/backward"]
    assert all(0 <= begin < end <= line.points[-1][0] for _, begin, end in line.loops)
    figure = fast.plan.plot(tmp_path / "plan.png", before)
    predicted, below, measured, below_measured = figure.axes
    for bars, largest in ((below, fast.plan.predicted.own), (below_measured, line.largest)):
        assert bars.get_title(loc="left") == "In use at the peak of the rewritten step"
        (name,) = short_op_names([largest[0][0]]).values()
        assert any(name[-20:] in text.get_text() for text in bars.texts)
    assert [name for name, *_ in shaded(measured)] == [name for name, *_ in shaded(predicted)] == ["segment1"] * 2
    lines = {line.get_label().split(":")[0]: line for line in measured.get_lines()}
    for found, label in ((before, "original step"), (after, "rewritten step")):
        assert max(lines[label].get_ydata()) == pytest.approx(found.timelines[0].peak_bytes / 2**20)
        assert lines[label].get_label().startswith(f"{label}: peak ")


@pytest.mark.parametrize("argument", ["before", "after"])
def test_plot_other_objects_are_refused(plan, argument):
    with pytest.raises(TypeError, match=f"`{argument}` must be a `Measurement`, .* Received: {argument}=3 of"):
        plan.plot(**{argument: 3})


def test_plot_file_has_given_name(plan, tmp_path):
    pytest.importorskip("matplotlib")
    plan.plot(tmp_path / "picture")
    assert [path.name for path in tmp_path.iterdir()] == ["picture"]
    with pytest.raises(IsADirectoryError):
        plan.plot(tmp_path)


def test_plot_without_path_returns_figure(plan):
    pytest.importorskip("matplotlib")
    assert plan.plot().axes


@pytest.mark.parametrize(
    ("counts", "sizes", "text"),
    [
        ((2, 8, 1), (16, 64), "2 images x 8 rows"),
        ((1, 8, 1), (16, 64), "groups x 8 rows"),
        ((1, 6, 6), (16, 16), "6 rows x 6 columns"),
        ((1, 1, 6), (64, 16), "6 columns"),
        ((1, 1, 6), (1, 16), "6 spans"),
        ((2, 64), (16,), "2 sequences x 64 spans"),
        ((1, 2, 4, 3), (8, 8, 8), "2 slices x 4 rows x 3 columns"),
        ((1, 1, 1), (64, 64), "1 tile"),
    ],
)
def test_tile_counts_name_their_axes(counts, sizes, text):
    segment = SimpleNamespace(tile_rows=(sizes, sizes), num_tiles=counts, backward_num_tiles=counts)
    plan = SimpleNamespace(batch=2, segments=(segment,))
    if text.startswith("groups"):
        plan.batch, counts, text = 8, (4, *counts[1:]), f"4 {text}"
        segment.num_tiles = segment.backward_num_tiles = counts
    assert grid_text(plan, segment, counts) == text
    assert segments_text(plan) == f"1 segment(s) in {text}" + ("" if text == "1 tile" else " of tiles")
