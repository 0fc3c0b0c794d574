"""The chart of a plan: bytes alive over a step, original and rewritten, and the memory in use at the peak."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from tflms_sft._report.op_names import short_op_names
from tflms_sft._report.plan_records import Measurement, PlanRecord, Prediction, Timeline
from tflms_sft._report.schedule_chart import draw_schedule, new_figure, save_figure, time_unit
from tflms_sft._util.byte_sizes import format_bytes

BEFORE, AFTER, BUDGET = "#7a808b", "#1d5fd1", "#c62828"
LABELS = (("original step", BEFORE), ("rewritten step", AFTER))
SHADES = ("#f2b134", "#3aa17e", "#b35fb5", "#e07a5f", "#5b8def", "#7f9c3b")
"""Shades of the segments, repeated cyclically."""

FORWARD_SHADE, BACKWARD_SHADE = 0.1, 0.2
"""Opacity of the shades of forward and backward loops."""

MAX_LARGEST = 5
"""Number of bars with a name of their own."""

MIN_FRACTION = 0.01
"""Fraction of the peak below which an item is not named."""

MAX_NAME_LENGTH = 96
"""Number of characters above which the middle of a bar's name is left out."""

MIN_LABEL_WIDTH = 0.07
"""Width of a loop, as a fraction of the axis, below which its name is written vertically."""

MIN_VERTICAL_WIDTH = 0.015
"""Width of a loop, as a fraction of the axis, below which its name is left out."""

MAX_SPAN_GAP = 0.01
"""Gap, as a fraction of the axis, up to which loops of one segment are drawn as one."""

AXIS_TOP_RATIO = 1.18
"""Upper end of the vertical axis over the highest value; leaves room for the names of loops."""

WIDTH_INCHES, CURVES_INCHES, BAR_INCHES = 9.0, 4.4, 0.21
"""Width of the figure, height of the curves of a panel with their legend, and height of a bar."""

FIXED_NAME, OTHERS_NAME = "weights and optimizer slots", "everything else"

UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))

_LOOP = re.compile(r"sft/([^/]+)/(forward|backward)[^/]*/")


class Span(NamedTuple):
    """The span of the forward or the backward loops of a segment on the time axis."""

    segment: str
    backward: bool
    begin: float
    end: float


class Curve(NamedTuple):
    """Bytes alive over a step.

    `places` are the starts of the values on the time axis, and the end of the last one. `at_peak` is (name, bytes) of
    all memory in use at the peak, largest first.
    """

    step: str
    label: str
    color: str
    places: Sequence[float]
    values: Sequence[int]
    spans: Sequence[Span]
    at_peak: Sequence[tuple[str, int]]
    peak_bytes: int


class Panel(NamedTuple):
    """Curves on one time axis, with loops and peak of the last one, and horizontal lines at (bytes, label, color)."""

    title: str
    time: str
    curves: Sequence[Curve]
    lines: Sequence[tuple[int, str, str]]


def draw(
    plan: PlanRecord,
    path: str | os.PathLike[str] | None,
    before: Measurement | None,
    after: Measurement | None,
    *,
    bars: bool = True,
) -> Any:
    """Draw the schedule of a pipeline, or the memory of any other plan; see `Plan.plot` and `draw_plan`."""
    if plan.pipeline is not None:
        return draw_schedule(plan.pipeline.simulation(), path, plan.pipeline.peak_bytes)
    return draw_plan(plan, path, before, after, bars=bars)


def draw_plan(
    plan: PlanRecord,
    path: str | os.PathLike[str] | None,
    before: Measurement | None,
    after: Measurement | None,
    *,
    bars: bool = True,
) -> Any:
    """Draw the predicted bytes of the original and the rewritten step, the measured ones below them, and the budget.

    With `bars`, the memory in use at the peak is drawn below each panel.
    """
    measurements = [m for m in (before, after) if m is not None]
    panels = [_predicted_panel(plan, before, after)]
    if any(m.timelines for m in measurements):
        panels.append(_measured_panel(plan, before, after))
    traced_peaks = [measurement.timelines[0].peak_bytes for measurement in measurements if measurement.timelines]
    peaks = [plan.original.peak_bytes, plan.predicted.peak_bytes, *(m.peak_bytes for m in measurements), *traced_peaks]
    highest = max(peaks)
    unit = next((unit for unit in UNITS if highest >= unit[1]), UNITS[-1])
    if plan.memory_budget is not None and plan.memory_budget <= AXIS_TOP_RATIO * highest:
        highest = max(highest, plan.memory_budget)
    heights = []
    for panel in panels:
        heights += [CURVES_INCHES, *([BAR_INCHES * (len(panel.curves[-1].at_peak) + 2.5)] if bars else [])]
    figure = new_figure("`plan.plot()`", WIDTH_INCHES, sum(heights))
    rows = iter(figure.add_gridspec(len(heights), 1, height_ratios=heights))
    for panel in panels:
        axes = figure.add_subplot(next(rows))
        axes.set_ylim(0, AXIS_TOP_RATIO * highest / unit[1])
        _draw(axes, panel, plan.memory_budget, unit)
        if bars:
            _bars(figure.add_subplot(next(rows)), panel.curves[-1])
    save_figure(figure, path)
    return figure


def _predicted_panel(plan: PlanRecord, before: Measurement | None, after: Measurement | None) -> Panel:
    """Return bytes over the predicted time of a step, and measured peaks without a timeline as lines."""
    predictions = (plan.original, plan.predicted) if plan.changed else (plan.original,)
    curves = [
        _predicted(prediction, *label, has_swaps=bool(plan.swaps) and prediction is predictions[-1])
        for prediction, label in zip(predictions, LABELS, strict=False)
    ]
    lines = []
    for measurement, (label, color) in zip((before, after), LABELS, strict=True):
        if measurement is not None and not measurement.timelines:
            text = f"{label}: measured peak {format_bytes(measurement.peak_bytes)}"
            lines.append((measurement.peak_bytes, text, color))
    time = "predicted time (original step = 1)"
    if plan.swaps:
        time += ", waits for swaps spread evenly over the step"
    return Panel("Predicted memory of a training step", time, curves, lines)


def _predicted(prediction: Prediction, label: str, color: str, *, has_swaps: bool) -> Curve:
    begins: Sequence[float] = prediction.progress or [
        n / max(len(prediction.timeline), 1) for n in range(len(prediction.timeline))
    ]
    if has_swaps:  # `time_ratio` includes waits for swaps, the starts of ops do not.
        begins = _stretched(begins, prediction.time_ratio)
    places = [*begins, prediction.time_ratio]
    spans = []
    for (name, _), (begin, end) in zip(prediction.timeline, itertools.pairwise(places), strict=True):
        match = _LOOP.match(name)
        if match:
            spans.append(Span(match[1], match[2] == "backward", begin, end))
    text = f"{label}: peak {format_bytes(prediction.peak_bytes)}"
    at_peak = memory_at_peak([*prediction.own[:1], *prediction.largest], prediction.fixed_bytes, prediction.peak_bytes)
    values = [amount for _, amount in prediction.timeline]
    return Curve(label, text, color, places, values, spans, at_peak, prediction.peak_bytes)


def _stretched(begins: Sequence[float], end: float) -> Sequence[float]:
    """Return the starts of ops stretched to the end of the step, so that the last op gets the mean width."""
    if not begins or not begins[-1]:
        return begins
    factor = end * (1 - 1 / len(begins)) / begins[-1]
    return [begin * factor for begin in begins]


def _measured_panel(plan: PlanRecord, before: Measurement | None, after: Measurement | None) -> Panel:
    """Return measured bytes over the time of a step."""
    pairs = [
        (measurement, *label)
        for measurement, label in zip((before, after), LABELS, strict=True)
        if measurement is not None and measurement.timelines
    ]
    ends = [measurement.timelines[0].points[-1][0] for measurement, *_ in pairs if measurement.timelines[0].points]
    unit = time_unit(max(ends, default=0.0))
    curves, lines = [], []
    for measurement, label, color in pairs:
        timeline = measurement.timelines[0]
        curves.append(_measured(timeline, label, color, unit, plan.predicted.fixed_bytes))
        if measurement.peak_bytes != timeline.peak_bytes:  # Measured in another run, which was not traced.
            text = f"{label}: peak {format_bytes(measurement.peak_bytes)} in a run without tracing"
            lines.append((measurement.peak_bytes, text, color))
    title = f"Measured memory of a training step on {pairs[-1][0].timelines[0].device}"
    return Panel(title, f"time of a fully traced run, in which ops take longer ({unit[0]})", curves, lines)


def _measured(timeline: Timeline, label: str, color: str, unit: tuple[str, float], fixed_bytes: int) -> Curve:
    points = timeline.points or ((0.0, timeline.peak_bytes),)
    places = [seconds / unit[1] for seconds, _ in points]
    spans = []
    for loop, begin, end in timeline.loops:
        segment, _, name = loop.partition("/")
        spans.append(Span(segment, name.startswith("backward"), begin / unit[1], end / unit[1]))
    text = f"{label}: peak {format_bytes(timeline.peak_bytes)}"
    text_of = short_op_names(name for name, _ in timeline.largest)
    named = [(text_of[name], size) for name, size in timeline.largest]
    at_peak = memory_at_peak(named, fixed_bytes, timeline.peak_bytes)
    values = [amount for _, amount in points]
    return Curve(label, text, color, [*places, places[-1]], values, spans, at_peak, timeline.peak_bytes)


def memory_at_peak(
    items: Sequence[tuple[str, int]], fixed_bytes: int, peak_bytes: int, most: int = MAX_LARGEST
) -> list[tuple[str, int]]:
    """Return the memory in use at a peak as (name, bytes): the largest items, and last the sum of all others.

    All variables, of `fixed_bytes`, are one item.
    """
    named = sorted([*items, (FIXED_NAME, fixed_bytes)], key=lambda item: -item[1])
    shown = [item for item in named[:most] if item[1] >= MIN_FRACTION * peak_bytes]
    others = peak_bytes - sum(size for _, size in shown)
    return [*shown, *([(OTHERS_NAME, others)] if others >= MIN_FRACTION * peak_bytes else [])]


def percentage(num_bytes: int, peak_bytes: int) -> str:
    """Return the size of an item in use at a peak as a percentage of the peak."""
    return f"{100 * num_bytes / max(peak_bytes, 1):.0f} %"


def _draw(axes: Any, panel: Panel, budget: int | None, unit: tuple[str, int]) -> None:
    """Draw the curves and lines of a panel, the budget, and the loops of the last curve."""
    name, size = unit
    end = max(curve.places[-1] for curve in panel.curves) or 1.0
    for curve in panel.curves:
        values = [amount / size for amount in (*curve.values, curve.values[-1])]
        worst = max(range(len(curve.values)), key=curve.values.__getitem__)
        axes.fill_between(curve.places, values, step="post", color=curve.color, alpha=0.22, lw=0)
        style = {"drawstyle": "steps-post", "lw": 1.4, "marker": "o", "ms": 4.5, "markevery": [worst]}
        axes.plot(curve.places, values, color=curve.color, label=curve.label, **style)
    for amount, label, color in panel.lines:
        axes.axhline(amount / size, color=color, ls=":", lw=1.6, label=label)
    if budget is not None:
        style = {"color": BUDGET, "ls": "--", "lw": 1.4}
        if budget / size <= axes.get_ylim()[1]:
            axes.axhline(budget / size, label=f"budget: {format_bytes(budget)}", **style)
        else:
            axes.plot([], [], label=f"budget: {format_bytes(budget)}, above the chart", **style)
    axes.set_title(panel.title, loc="left", fontweight="bold")
    axes.set_xlabel(panel.time)
    axes.set_xlim(0, 1.01 * end)
    axes.set_ylabel(f"memory in use ({name})")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e3e5e8", lw=0.7)
    axes.set_axisbelow(True)
    _shade(axes, merge_spans(panel.curves[-1].spans, MAX_SPAN_GAP * end), end)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize="small", frameon=False)


def merge_spans(spans: Sequence[Span], max_gap: float) -> list[Span]:
    """Return the spans with those of one segment and direction merged that are at most `max_gap` apart."""
    merged: list[Span] = []
    for span in sorted(spans, key=lambda span: span.begin):
        last = merged[-1] if merged else None
        if last is not None and last[:2] == span[:2] and span.begin - last.end <= max_gap:
            merged[-1] = last._replace(end=max(last.end, span.end))
        else:
            merged.append(span)
    return merged


def _shade(axes: Any, spans: Sequence[Span], end: float) -> None:
    """Shade the spans of segments behind the curves, and label them."""
    shades = dict(zip(dict.fromkeys(span.segment for span in spans), itertools.cycle(SHADES), strict=False))
    for span in spans:
        alpha = BACKWARD_SHADE if span.backward else FORWARD_SHADE
        axes.axvspan(span.begin, span.end, color=shades[span.segment], alpha=alpha, lw=0, zorder=0)
        width = (span.end - span.begin) / end
        if width < MIN_VERTICAL_WIDTH:
            continue
        axes.text(
            (span.begin + span.end) / 2,
            0.985,
            f"{span.segment}{chr(10) if width > MIN_LABEL_WIDTH else ' '}{'backward' if span.backward else 'forward'}",
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="top",
            fontsize=7,
            rotation=0 if width > MIN_LABEL_WIDTH else 90,
            color="#40444c",
        )


def _bars(axes: Any, curve: Curve) -> None:
    """Draw the memory in use at the peak of a curve."""
    axes.set_title(f"In use at the peak of the {curve.step}", loc="left", fontsize=8.5)
    for row, (name, size) in enumerate(curve.at_peak):
        axes.barh(row, size, color=curve.color, alpha=0.1 if name == OTHERS_NAME else 0.25, height=0.82)
        text = f" {format_bytes(size):>8} {percentage(size, curve.peak_bytes):>5}  {_without_middle(name)}"
        axes.text(0, row, text, va="center", ha="left", fontsize=7.5, family="monospace", color="#1f2329")
    axes.set_ylim(len(curve.at_peak) + 0.4, -0.6)  # Leaves room above the title of the next panel.
    axes.set_xlim(left=0)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def _without_middle(name: str) -> str:
    """Return a name of at most `MAX_NAME_LENGTH` characters."""
    if len(name) <= MAX_NAME_LENGTH:
        return name
    end = MAX_NAME_LENGTH // 3
    return f"{name[: MAX_NAME_LENGTH - end - 5]} ... {name[-end:]}"
