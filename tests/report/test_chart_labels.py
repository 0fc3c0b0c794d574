"""Tests of the texts in charts: inside of the figure, without overlaps, short enough for their place."""

import itertools
import re

import pytest
from sample_plans import LOOPS, a_plan, prediction

from rewriters.pipelining.schedule_simulator import simulate
from rewriters.pipelining.schedules import make
from tflms_sft import Measurement, Timeline
from tflms_sft._report.memory_chart import FIXED_NAME, MAX_NAME_LENGTH, OTHERS_NAME, draw_plan, memory_at_peak
from tflms_sft._report.op_names import short_op_names
from tflms_sft._report.schedule_chart import draw_schedule, time_unit

pytest.importorskip("matplotlib")

LONG = (
    "an iteration of the backward loop of segment1 ("
    + "loss 'sparse_categorical_crossentropy' (Cast), " * 4
    + "image -> pool)"
)


def texts_of(figure):
    """Return the texts of a figure with their boxes in pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    FigureCanvasAgg(figure).draw()
    hidden = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        for tick in axis.get_major_ticks():  # Those outside of the axis exist but are not drawn.
            if not low <= tick.get_loc() <= high:
                hidden |= {tick.label1, tick.label2}
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    return [(text.get_text(), text.get_window_extent()) for text in texts if text not in hidden]


def check_labels(figure):
    texts = texts_of(figure)
    width, height = figure.bbox.width, figure.bbox.height
    for text, box in texts:
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1, f"cut off: {text}"
    for (one, first), (two, second) in itertools.combinations(texts, 2):
        apart = first.x1 <= second.x0 + 1 or second.x1 <= first.x0 + 1
        apart |= first.y1 <= second.y0 + 1 or second.y1 <= first.y0 + 1
        assert apart, f"overlapping: {one!r} and {two!r}"


def narrow_loops(ratio):
    """Return a timeline of many short loops."""
    count = 150
    names = [f"sft/segment{1 + number // 2}/{('forward', 'backward')[number % 2]}/while" for number in range(count)]
    timeline = tuple((name, 2**20 * (1 + number % 7)) for number, name in enumerate(names))
    return {"timeline": timeline, "progress": tuple(ratio * number / count for number in range(count))}


def measurement(peak, loops=()):
    points = tuple((number * 1e-4, peak - number) for number in range(100))
    name = "gradient_tape/functional_1/" + "a_long_block_name_1/" * 8 + "convolution/Conv2DBackpropFilter"
    return Measurement(peak + 5 * 2**20, "statistics", (Timeline("CPU:0", peak, ((name, peak // 2),), points, loops),))


LOOP_TIMES = (("segment1/forward", 0.0, 0.003), ("segment1/backward", 0.004, 0.009))
CASES = {
    "usual": ({}, (None, None)),
    "budget near the top": ({"memory_budget": 2**28 + 2**25}, (None, None)),
    "budget above": ({"memory_budget": 2**40}, (None, Measurement(2**26, "a test"))),
    "long names": ({"predicted": prediction(2**26, 1.25, own=((LONG, 2**25),))}, (None, None)),
    "narrow loops": ({"predicted": prediction(2**26, 1.25, **narrow_loops(1.25))}, (None, None)),
    "measured": ({}, (measurement(2**28), measurement(2**26, LOOP_TIMES))),
    "not rewritten": ({"changed": False, "swaps": ()}, (None, None)),
}


@pytest.mark.parametrize("case", CASES)
def test_labels_of_memory_chart_are_apart_and_inside(case):
    options, measured = CASES[case]
    check_labels(draw_plan(a_plan(**options), None, *measured))


def test_budget_line_is_below_the_names_of_loops():
    axes = draw_plan(a_plan(memory_budget=2**28 + 2**25), None, None, None).axes[0]
    (line,) = [line for line in axes.get_lines() if line.get_label().startswith("budget")]
    assert line.get_ydata()[0] < 0.9 * axes.get_ylim()[1]


@pytest.mark.parametrize(("name", "micro_batches", "replicas"), [("1f1b", 4, 1), ("master", 4, 1), ("gpipe", 8, 2)])
def test_labels_of_schedule_chart_are_apart_and_inside(name, micro_batches, replicas):
    simulation = simulate(make(name, 4, micro_batches, replicas), [4e-4] * 4, [8e-4] * 4, activations=[2**30] * 4)
    figure = draw_schedule(simulation)
    check_labels(figure)
    assert figure.axes[0].get_xlabel() == "predicted time (ms)"


def test_schedule_chart_shows_given_peaks():
    simulation = simulate(make("gpipe", 2, 2), [1.0] * 2, [2.0] * 2)
    labels = [text.get_text() for text in draw_schedule(simulation, None, [2**20, 2**21]).axes[1].get_yticklabels()]
    assert [label.rpartition(", ")[2] for label in labels] == ["peak 1.00 MiB", "peak 2.00 MiB"]


def test_time_unit_is_the_largest_that_is_at_most_the_time():
    assert [time_unit(seconds)[0] for seconds in (3.0, 0.5, 2e-5, 0.0)] == ["s", "ms", "µs", "µs"]


def test_memory_at_peak_adds_up():
    items = [(f"t{number}", 100 - number) for number in range(8)] + [("tiny", 1)]
    shown = memory_at_peak(items, 300, 1300)
    assert shown[0] == (FIXED_NAME, 300) and shown[-1] == (OTHERS_NAME, 1300 - 300 - 100 - 99 - 98 - 97)
    assert sum(size for _, size in shown) == 1300
    assert memory_at_peak([("one", 995), ("tiny", 5)], 0, 1000) == [("one", 995)], "no bars that say nothing"


def test_bars_are_percentages_of_the_peak_as_in_the_page():
    plan = a_plan(predicted=prediction(1000 * 2**20, 1.25, fixed_bytes=0, largest=(("one", 992 * 2**20),)))
    assert draw_plan(plan, None, None, None).axes[1].texts[0].get_text().split() == ["992", "MiB", "99", "%", "one"]
    assert re.search("<td[^>]*>992 MiB</td><td[^>]*>99 %</td>", plan.to_html())


def test_long_names_keep_both_ends():
    plan = a_plan(predicted=prediction(2**26, 1.25, own=((LONG, 2**25),)))
    text = draw_plan(plan, None, None, None).axes[1].texts[0].get_text()
    assert (
        "an iteration of the backward loop of segment1" in text and " ... " in text and text.endswith("image -> pool)")
    )
    assert len(text) <= MAX_NAME_LENGTH + 18


def test_waits_for_swaps_are_spread_over_the_step():
    axes = draw_plan(a_plan(), None, None, None).axes[0]
    assert "waits for swaps spread evenly" in axes.get_xlabel()
    places = axes.get_lines()[1].get_xdata()
    assert places == pytest.approx([0, 1.25 * 8 / 27, 1.25 * 2 / 3, 1.25]), "the last of three ops has a third"


@pytest.mark.parametrize("progress", [(0.0, 0.4, 1.0), (0.0, 0.4, 1.25)])
def test_last_loop_ends_with_the_step_that_waits_for_swaps(progress):
    timeline = ((LOOPS[0], 2**25), ("update", 2**20), (LOOPS[1], 2**26))
    axes = draw_plan(
        a_plan(predicted=prediction(2**26, 1.25, timeline=timeline, progress=progress)), None, None, None
    ).axes
    ends = [patch.get_x() + patch.get_width() for patch in axes[0].patches]
    assert max(ends) == pytest.approx(1.25)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("functional_1/conv_1/Relu", "conv_1/Relu"),
        ("gradient_tape/functional_1/conv_1/convolution/Back", "conv_1/convolution/Back (backward)"),
        ("sft/s/backward/while/body/_3/while/gradient_tape/f/c/Back", "c/Back (in the backward loop of s)"),
        ("micro_1/sft/s/forward/while/body/_3/while/PadV2", "PadV2 (in the forward loop of s)"),
        ("sft/segment1/forward/Empty_2", "result of the forward loop of segment1 (Empty_2)"),
        ("sft/segment1/backward2/while", "the backward loop 2 of segment1"),
        ("sft/segment1/forward2/truediv", "truediv (beside the forward loop 2 of segment1)"),
        ("lms/functional_1/conv_1/Relu/swap_in_0", "conv_1/Relu, swapped in"),
        ("f/lstm/while/body/_1/f/lstm/while/cell/mul", "lstm/cell/mul"),
        ("compile_loss/mse/Mean", "compile_loss/mse/Mean"),
        ("adam/Cast_2", "adam/Cast_2"),
    ],
)
def test_names_of_measured_ops_are_short(name, text):
    assert short_op_names([name]) == {name: text}


def test_names_of_ops_keep_models_that_tell_them_apart():
    layers = [f"{scope}{model}/conv/Relu" for model in ("generator", "critic") for scope in ("", "micro_0/")]
    texts = short_op_names([*layers, "critic/dense/Relu", "gradient_tape/critic/conv/Relu"])
    assert list(texts.values()) == [
        "generator/conv/Relu",
        "generator/conv/Relu",
        "critic/conv/Relu",
        "critic/conv/Relu",
        "dense/Relu",
        "conv/Relu (backward)",
    ]
