"""The chart of a plan: bytes alive over a step, original and rewritten, and the largest tensors at the peak."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from tflms_sft._report.plan_records import Measurement, PlanRecord, Prediction, Timeline
from tflms_sft._report.schedule_chart import draw_schedule
from tflms_sft._util.byte_sizes import format_bytes
from tflms_sft._util.text import readable

BEFORE, AFTER, BUDGET = "#8b909a", "#1d5fd1", "#c62828"
LABELS = (("original", BEFORE), ("rewritten", AFTER))
SHADES = ("#f2b134", "#3aa17e", "#b35fb5", "#e07a5f", "#5b8def", "#7f9c3b")
"""Shades of the segments, repeated cyclically."""

MAX_LARGEST = 5
"""Number of bars."""

MIN_LABEL_WIDTH = 0.07
"""Width of a loop, as a fraction of the axis, below which its name is written vertically."""

MAX_SPAN_GAP = 0.01
"""Gap, as a fraction of the axis, up to which loops of one segment are drawn as one."""

UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))

_LOOP = re.compile(r"sft/([^/]+)/(forward|backward)[^/]*/")


class Span(NamedTuple):
    """The time span of the loops of a segment.

    Attributes:
        segment: Name of the segment.
        backward: Whether they are backward loops.
        begin: Start on the time axis.
        end: End on the time axis.
    """

    segment: str
    backward: bool
    begin: float
    end: float


class Curve(NamedTuple):
    """Bytes alive over a step.

    Attributes:
        label: Label in the legend.
        color: Color of the line.
        places: Start of each value on the time axis, and the end of the last one.
        values: Bytes.
        spans: Time spans of tile loops.
        largest: (name, bytes) of the largest tensors alive at the peak.
    """

    label: str
    color: str
    places: Sequence[float]
    values: Sequence[int]
    spans: Sequence[Span]
    largest: Sequence[tuple[str, int]]


def draw(
    plan: PlanRecord, path: str | os.PathLike[str] | None, before: Measurement | None, after: Measurement | None
) -> Any:
    """Draw the schedule of a pipeline, or the memory of any other plan; see `Plan.plot`."""
    if plan.pipeline is not None:
        return draw_schedule(plan.pipeline.simulation(), path)
    return draw_plan(plan, path, before, after)


def draw_plan(
    plan: PlanRecord, path: str | os.PathLike[str] | None, before: Measurement | None, after: Measurement | None
) -> Any:
    """Draw the predicted bytes of the original and the rewritten step, the measured ones beside them, and the budget.

    Args:
        plan: The plan.
        path: File to write, or `None`.
        before: Measurement of the original step, or `None`.
        after: Measurement of the rewritten step, or `None`.

    Returns:
        The `matplotlib.figure.Figure`.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('`plan.plot()` needs matplotlib: pip install "tflms-sft[plot]"') from error
    measurements = [m for m in (before, after) if m is not None]
    panels = 2 if any(m.timelines for m in measurements) else 1
    figure = Figure(figsize=(2 + 7 * panels, 6.4), layout="constrained")
    grid = figure.add_gridspec(2, panels, height_ratios=(3.6, 1))
    highest = max(plan.original.peak_bytes, plan.predicted.peak_bytes, *(m.peak_bytes for m in measurements), 0)
    unit = next((unit for unit in UNITS if highest >= unit[1]), UNITS[-1])
    first = figure.add_subplot(grid[0, 0])
    first.set_ylim(0, 1.18 * highest / unit[1])  # Leaves room for the names of loops.
    _draw_predicted(first, figure.add_subplot(grid[1, 0]), plan, before, after, unit)
    for column in range(1, panels):
        axes = figure.add_subplot(grid[0, column], sharey=first)
        _draw_measured(axes, figure.add_subplot(grid[1, column]), plan, before, after, unit)
    if path is not None:
        # Without a format, matplotlib would append one to a name that has none.
        figure.savefig(path, dpi=140, format=os.path.splitext(path)[1][1:] or "png")
    return figure


def _draw_predicted(
    axes: Any, bars: Any, plan: PlanRecord, before: Measurement | None, after: Measurement | None, unit: tuple[str, int]
) -> None:
    """Draw bytes over the predicted time of a step, and measured peaks without a timeline as lines."""
    predictions = (plan.original, plan.predicted) if plan.changed else (plan.original,)
    curves = [_predicted(prediction, *label) for prediction, label in zip(predictions, LABELS, strict=False)]
    lines = []
    for measurement, (label, color) in zip((before, after), LABELS, strict=True):
        if measurement is not None and not measurement.timelines:
            text = f"{label}, measured peak {format_bytes(measurement.peak_bytes)}"
            lines.append((measurement.peak_bytes, text, color))
    axes.set_title("Predicted", loc="left", fontweight="bold")
    axes.set_xlabel("predicted time (1 = original step)")
    _draw(axes, bars, curves, lines, plan.memory_budget, unit)


def _predicted(prediction: Prediction, label: str, color: str) -> Curve:
    begins = prediction.progress or [n / max(len(prediction.timeline), 1) for n in range(len(prediction.timeline))]
    places = [*begins, prediction.time_ratio]
    spans = []
    for (name, _), (begin, end) in zip(prediction.timeline, itertools.pairwise(places), strict=True):
        match = _LOOP.match(name)
        if match:
            spans.append(Span(match[1], match[2] == "backward", begin, end))
    text = f"{label}, peak {format_bytes(prediction.peak_bytes)}"
    largest = sorted([*prediction.own[:1], *prediction.largest], key=lambda item: -item[1])
    return Curve(text, color, places, [amount for _, amount in prediction.timeline], spans, largest)


def _draw_measured(
    axes: Any, bars: Any, plan: PlanRecord, before: Measurement | None, after: Measurement | None, unit: tuple[str, int]
) -> None:
    """Draw measured bytes over the time of a step."""
    curves, lines, devices = [], [], []
    for measurement, (label, color) in zip((before, after), LABELS, strict=True):
        if measurement is not None and measurement.timelines:
            timeline = measurement.timelines[0]
            devices.append(timeline.device)
            curves.append(_measured(timeline, label, color))
            if measurement.peak_bytes != timeline.peak_bytes:  # Measured in another run, which was not traced.
                text = f"{label}, peak by statistics {format_bytes(measurement.peak_bytes)}"
                lines.append((measurement.peak_bytes, text, color))
    axes.set_title(f"Measured, by allocation records of {devices[-1]}", loc="left", fontweight="bold")
    axes.set_xlabel("time of one training step (s), fully traced")
    _draw(axes, bars, curves, lines, plan.memory_budget, unit)


def _measured(timeline: Timeline, label: str, color: str) -> Curve:
    points = timeline.points or ((0.0, timeline.peak_bytes),)
    places, values = zip(*points, strict=True)
    spans = []
    for loop, begin, end in timeline.loops:
        segment, _, name = loop.partition("/")
        spans.append(Span(segment, name.startswith("backward"), begin, end))
    text = f"{label}, peak {format_bytes(timeline.peak_bytes)}"
    return Curve(text, color, [*places, places[-1]], values, spans, timeline.largest)


def _draw(
    axes: Any,
    bars: Any,
    curves: Sequence[Curve],
    lines: Sequence[tuple[int, str, str]],
    budget: int | None,
    unit: tuple[str, int],
) -> None:
    """Draw curves with horizontal lines, and the loops and largest tensors of the last curve."""
    name, size = unit
    end = max(curve.places[-1] for curve in curves) or 1.0
    for curve in curves:
        values = [amount / size for amount in (*curve.values, curve.values[-1])]
        axes.fill_between(curve.places, values, step="post", color=curve.color, alpha=0.22, lw=0)
        axes.plot(curve.places, values, drawstyle="steps-post", color=curve.color, lw=1.4, label=curve.label)
        worst = max(range(len(curve.values)), key=curve.values.__getitem__)
        axes.plot(curve.places[worst], values[worst], "o", color=curve.color, ms=4.5)
    for amount, label, color in lines:
        axes.axhline(amount / size, color=color, ls=":", lw=1.6, label=label)
    if budget is not None and budget / size <= axes.get_ylim()[1]:
        axes.axhline(budget / size, color=BUDGET, ls="--", lw=1.4, label=f"budget {format_bytes(budget)}")
    elif budget is not None:
        axes.plot([], [], color=BUDGET, ls="--", lw=1.4, label=f"budget {format_bytes(budget)} (above the chart)")
    axes.set_xlim(0, 1.01 * end)
    axes.set_ylabel(f"memory in use ({name})")
    axes.tick_params(labelleft=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e3e5e8", lw=0.7)
    axes.set_axisbelow(True)
    _shade(axes, merge_spans(curves[-1].spans, MAX_SPAN_GAP * end), end)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, fontsize="small", frameon=False)
    _bars(bars, curves[-1])


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
        axes.axvspan(span.begin, span.end, color=shades[span.segment], alpha=0.13, lw=0, zorder=0)
        wide = span.end - span.begin > MIN_LABEL_WIDTH * end
        axes.text(
            (span.begin + span.end) / 2,
            0.985,
            f"{span.segment}\n{'backward' if span.backward else 'forward'}" if wide else span.segment,
            transform=axes.get_xaxis_transform(),
            ha="center",
            va="top",
            fontsize=7,
            rotation=0 if wide else 90,
            color="#40444c",
        )


def _bars(axes: Any, curve: Curve) -> None:
    """Draw the largest tensors alive at the peak, largest first."""
    largest = list(curve.largest[:MAX_LARGEST])
    axes.set_title(f"largest at the peak of the {curve.label.split(',')[0]} step", loc="left", fontsize=8.5)
    axes.barh(range(len(largest)), [size for _, size in largest], color=curve.color, alpha=0.3, height=0.82)
    for number, (name, size) in enumerate(largest):
        text = f" {format_bytes(size):>8}  {_tail(readable(name))}"
        axes.text(0, number, text, va="center", ha="left", fontsize=7.5, family="monospace", color="#1f2329")
    axes.set_ylim(max(len(largest), 1) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def _tail(name: str, length: int = 84) -> str:
    return name if len(name) <= length else "..." + name[3 - length :]
