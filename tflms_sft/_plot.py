"""The picture of a plan: bytes alive over a step, before and after."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tflms_sft._units import format_bytes

if TYPE_CHECKING:
    from tflms_sft._plan import Measurement, Plan

MIB = 2**20
LABELS = (("original", "tab:gray"), ("rewritten", "tab:blue"))


def draw_plan(
    plan: Plan, path: str | os.PathLike[str] | None, before: Measurement | None, after: Measurement | None
) -> Any:
    """Draw memory before and after as predicted, beside it as measured if it was, with the budget."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('`plan.plot()` needs matplotlib: pip install "tflms-sft[plot]"') from error
    measured = [found for found in (before, after) if found is not None]
    panels = 2 if any(found.timelines for found in measured) else 1
    figure = Figure(figsize=(4 + 5 * panels, 4.5), layout="constrained")
    left, *others = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    _draw_predicted(left, plan, before, after)
    for axes in others:
        _draw_measured(axes, plan, before, after)
    for axes in (left, *others):
        if plan.memory_budget is not None:
            axes.axhline(plan.memory_budget / MIB, color="tab:red", ls="--", lw=1, label="budget")
        axes.legend(loc="upper left", fontsize="small")
    highest = max(plan.original.peak_bytes, plan.predicted.peak_bytes, *(found.peak_bytes for found in measured), 0)
    left.set_ylim(0, 1.45 * highest / MIB)  # Room for the text.
    left.set_ylabel("memory alive (MiB)")
    if path is not None:
        # Without a format matplotlib adds one to names that have none, and writes another file than was asked for.
        figure.savefig(path, dpi=120, format=os.path.splitext(path)[1][1:] or "png")
    return figure


def _draw_predicted(axes: Any, plan: Plan, before: Measurement | None, after: Measurement | None) -> None:
    """Bytes over the operations of a step, and measured peaks of which there is no timeline."""
    predictions = (plan.original, plan.predicted) if plan.changed else (plan.original,)
    for prediction, (label, color) in zip(predictions, LABELS, strict=False):
        values = [amount / MIB for _, amount in prediction.timeline]
        shares = [index / max(len(values) - 1, 1) for index in range(len(values))]
        _fill(axes, shares, values, f"{label}, peak {format_bytes(prediction.peak_bytes)}", color)
    for found, (label, color) in zip((before, after), LABELS, strict=True):
        if found is not None and not found.timelines:
            _peak_line(axes, found, f"{label}, measured peak {format_bytes(found.peak_bytes)}", color)
    axes.set_title("Predicted, by liveness")
    axes.set_xlabel("progress of one training step (share of its ops)")
    axes.set_xlim(0, 1)
    _name(axes, plan.predicted.largest)


def _draw_measured(axes: Any, plan: Plan, before: Measurement | None, after: Measurement | None) -> None:
    """Bytes over the time of a step."""
    last = None
    for found, (label, color) in zip((before, after), LABELS, strict=True):
        if found is not None and found.timelines:
            last = found.timelines[0]
            seconds, alive = zip(*last.points, strict=True) if last.points else ((0.0,), (last.peak_bytes,))
            text = f"{label}, peak {format_bytes(last.peak_bytes)}"
            _fill(axes, seconds, [amount / MIB for amount in alive], text, color)
            if found.peak_bytes != last.peak_bytes:  # Of another run, untraced, in another state of the memory.
                _peak_line(axes, found, f"{label}, peak by statistics {format_bytes(found.peak_bytes)}", color)
    assert last is not None
    axes.set_title(f"Measured, by allocation records of {last.device}")
    axes.set_xlabel("time of one training step (s), fully traced")
    axes.set_xlim(left=0)
    axes.tick_params(labelleft=True)
    _name(axes, last.largest)


def _fill(axes: Any, places: Sequence[float], values: Sequence[float], label: str, color: str) -> None:
    axes.fill_between(places, values, step="post", color=color, alpha=0.25)
    axes.plot(places, values, drawstyle="steps-post", color=color, lw=1, label=label)


def _peak_line(axes: Any, found: Measurement, label: str, color: str) -> None:
    axes.axhline(found.peak_bytes / MIB, color=color, ls=":", lw=1.5, label=label)


def _name(axes: Any, largest: Sequence[tuple[str, int]]) -> None:
    """Write the largest things alive at the peak into the upper right corner."""
    text = "\n".join(f"{format_bytes(size):>9}  {_tail(name)}" for name, size in largest[:4])
    axes.text(
        0.99,
        0.98,
        "largest at the peak:\n" + text,
        transform=axes.transAxes,
        ha="right",
        va="top",
        fontsize=6,
        family="monospace",
        bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none"},
    )


def _tail(name: str, length: int = 44) -> str:
    return name if len(name) <= length else "..." + name[3 - length :]
