"""The picture of a plan: bytes alive over a step, before and after."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tflms_sft._units import format_bytes

if TYPE_CHECKING:
    from tflms_sft._plan import Plan, Prediction


def draw_plan(plan: Plan, path: str | os.PathLike[str] | None) -> Any:
    """Draw predicted memory before and after, the budget, and the measured peak."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('`plan.plot()` needs matplotlib: pip install "tflms-sft[plot]"') from error
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.add_subplot()
    _draw(axes, plan.original, "original", "tab:gray")
    if plan.changed:
        _draw(axes, plan.predicted, "rewritten", "tab:blue")
    if plan.memory_budget is not None:
        axes.axhline(plan.memory_budget / 2**20, color="tab:red", ls="--", lw=1, label="budget")
    if plan.measured is not None:
        label = f"measured peak, {format_bytes(plan.measured.peak_bytes)}"
        axes.axhline(plan.measured.peak_bytes / 2**20, color="tab:green", ls=":", lw=1.5, label=label)
    axes.set_xlabel("progress of one training step (share of its ops)")
    axes.set_ylabel("memory alive (MiB)")
    axes.set_ylim(0, 1.35 * max(plan.original.peak_bytes, plan.predicted.peak_bytes) / 2**20)  # Room for the text.
    axes.set_xlim(0, 1)
    biggest = "\n".join(f"{format_bytes(size):>9}  {_tail(name)}" for name, size in plan.predicted.largest[:4])
    axes.set_title("Predicted memory of a step, by liveness")
    axes.legend(loc="upper left")
    axes.text(
        0.99,
        0.98,
        "largest at the peak:\n" + biggest,
        transform=axes.transAxes,
        ha="right",
        va="top",
        fontsize=7,
        family="monospace",
        bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none"},
    )
    if path is not None:
        # Without a format matplotlib adds one to names that have none, and writes another file than was asked for.
        figure.savefig(path, dpi=120, format=os.path.splitext(path)[1][1:] or "png")
    return figure


def _draw(axes: Any, prediction: Prediction, label: str, color: str) -> None:
    values = [amount / 2**20 for _, amount in prediction.timeline]
    steps = [index / max(len(values) - 1, 1) for index in range(len(values))]
    axes.fill_between(steps, values, step="mid", color=color, alpha=0.25)
    axes.plot(
        steps,
        values,
        drawstyle="steps-mid",
        color=color,
        lw=1,
        label=f"{label}, peak {format_bytes(prediction.peak_bytes)}",
    )


def _tail(name: str, length: int = 44) -> str:
    return name if len(name) <= length else "..." + name[3 - length :]
