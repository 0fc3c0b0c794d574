"""The picture of a plan: bytes alive over a step, before and after, and what is alive at the worst moment."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from tflms_sft._report.plan_records import Measurement, PlanRecord, Prediction, Timeline
from tflms_sft._report.schedule_chart import draw_schedule
from tflms_sft._util.byte_sizes import format_bytes

BEFORE, AFTER, BUDGET = "#8b909a", "#1d5fd1", "#c62828"
LABELS = (("original", BEFORE), ("rewritten", AFTER))
SHADES = ("#f2b134", "#3aa17e", "#b35fb5", "#e07a5f", "#5b8def", "#7f9c3b")
"""Of segments, in turn."""

MOST_LARGEST = 5
NARROW = 0.07
"""Part of the width below which a loop's name does not fit."""

APART = 0.01
"""Part of the width up to which loops of one segment are drawn as one."""

UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))

_LOOP = re.compile(r"sft/([^/]+)/(forward|backward)[^/]*/")


_IN_TURN = re.compile(r"(?:micro_\d+/)?sft/([^/]+)/([^/]+)/while/body/[^/]+/while/(.+)")


class Span(NamedTuple):
    """Where loops of a segment run.

    Attributes:
        segment: Its name.
        backward: Whether they belong to the backward phase.
        begin: On the axis of a curve.
        end: The same.
    """

    segment: str
    backward: bool
    begin: float
    end: float


class Curve(NamedTuple):
    """Memory over a step.

    Attributes:
        label: For the legend.
        color: Of the line.
        places: Where each value begins, and where the last one ends.
        values: Bytes.
        spans: Where tile loops run.
        largest: (name, bytes) of what is alive at the peak.
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
    """Draw memory before and after as predicted, beside it as measured if it was, with the budget."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('`plan.plot()` needs matplotlib: pip install "tflms-sft[plot]"') from error
    measured = [found for found in (before, after) if found is not None]
    panels = 2 if any(found.timelines for found in measured) else 1
    figure = Figure(figsize=(2 + 7 * panels, 6.4), layout="constrained")
    grid = figure.add_gridspec(2, panels, height_ratios=(3.6, 1))
    highest = max(plan.original.peak_bytes, plan.predicted.peak_bytes, *(found.peak_bytes for found in measured), 0)
    unit = next((unit for unit in UNITS if highest >= unit[1]), UNITS[-1])
    first = figure.add_subplot(grid[0, 0])
    first.set_ylim(0, 1.18 * highest / unit[1])  # Room for the names of loops.
    _draw_predicted(first, figure.add_subplot(grid[1, 0]), plan, before, after, unit)
    for column in range(1, panels):
        axes = figure.add_subplot(grid[0, column], sharey=first)
        _draw_measured(axes, figure.add_subplot(grid[1, column]), plan, before, after, unit)
    if path is not None:
        # Without a format matplotlib adds one to names that have none, and writes another file than was asked for.
        figure.savefig(path, dpi=140, format=os.path.splitext(path)[1][1:] or "png")
    return figure


def _draw_predicted(
    axes: Any, bars: Any, plan: PlanRecord, before: Measurement | None, after: Measurement | None, unit: tuple[str, int]
) -> None:
    """Bytes over the predicted time of a step, and measured peaks of which there is no timeline."""
    predictions = (plan.original, plan.predicted) if plan.changed else (plan.original,)
    curves = [_predicted(prediction, *label) for prediction, label in zip(predictions, LABELS, strict=False)]
    lines = []
    for found, (label, color) in zip((before, after), LABELS, strict=True):
        if found is not None and not found.timelines:
            lines.append((found.peak_bytes, f"{label}, measured peak {format_bytes(found.peak_bytes)}", color))
    axes.set_title("Predicted", loc="left", fontweight="bold")
    axes.set_xlabel("predicted time (1 is a step as it was)")
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
    largest = sorted([*prediction.own[:1], *prediction.largest], key=lambda one: -one[1])
    return Curve(text, color, places, [amount for _, amount in prediction.timeline], spans, largest)


def _draw_measured(
    axes: Any, bars: Any, plan: PlanRecord, before: Measurement | None, after: Measurement | None, unit: tuple[str, int]
) -> None:
    """Bytes over the time of a step."""
    curves, lines, devices = [], [], []
    for found, (label, color) in zip((before, after), LABELS, strict=True):
        if found is not None and found.timelines:
            timeline = found.timelines[0]
            devices.append(timeline.device)
            curves.append(_measured(timeline, label, color))
            if found.peak_bytes != timeline.peak_bytes:  # Of another run, untraced, in another state of the memory.
                text = f"{label}, peak by statistics {format_bytes(found.peak_bytes)}"
                lines.append((found.peak_bytes, text, color))
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
    """Curves with the loops of the last one shaded, lines across, and the largest of the last one below."""
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
        axes.plot([], [], color=BUDGET, ls="--", lw=1.4, label=f"budget {format_bytes(budget)} (above the picture)")
    axes.set_xlim(0, 1.01 * end)
    axes.set_ylabel(f"memory alive ({name})")
    axes.tick_params(labelleft=True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e3e5e8", lw=0.7)
    axes.set_axisbelow(True)
    _shade(axes, joined(curves[-1].spans, APART * end), end)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, fontsize="small", frameon=False)
    _bars(bars, curves[-1])


def joined(spans: Sequence[Span], apart: float) -> list[Span]:
    """The same with loops of one segment and direction that follow each other as one."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda span: span.begin):
        last = found[-1] if found else None
        if last is not None and last[:2] == span[:2] and span.begin - last.end <= apart:
            found[-1] = last._replace(end=max(last.end, span.end))
        else:
            found.append(span)
    return found


def _shade(axes: Any, spans: Sequence[Span], end: float) -> None:
    """Segments behind the curves, named where there is room."""
    shades = dict(zip(dict.fromkeys(span.segment for span in spans), itertools.cycle(SHADES), strict=False))
    for span in spans:
        axes.axvspan(span.begin, span.end, color=shades[span.segment], alpha=0.13, lw=0, zorder=0)
        wide = span.end - span.begin > NARROW * end
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
    """The largest things alive at the peak, largest first."""
    largest = list(curve.largest[:MOST_LARGEST])
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


def readable(name: str) -> str:
    """The operation of a turn of a loop, without the scopes that the runtime adds."""
    match = _IN_TURN.match(name)
    return f"{match[3]} (in {match[1]}, {match[2]})" if match else name


def _tail(name: str, length: int = 84) -> str:
    return name if len(name) <= length else "..." + name[3 - length :]
