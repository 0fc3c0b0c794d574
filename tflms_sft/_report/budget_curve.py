"""Time of a step against its memory budget, as a table and a picture."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any

from tflms_sft._report.schedule_chart import new_figure, save_figure
from tflms_sft._util.byte_sizes import format_bytes
from tflms_sft._util.text import table

ORIGINAL_STEP = "original step"

MARKERS = {ORIGINAL_STEP: "s", "tiles": "o", "tiles, files": "D", "swaps": "^", "tiles, swaps": "v"}
"""Marker of each kind of plan; other kinds have a star."""

LINE, LIMIT = "#1d5fd1", "#7a808b"

MAX_LINEAR_RATIO = 4.0
"""Longest time, over that of the original step, up to which the axis of time is linear."""


@dataclasses.dataclass(frozen=True)
class CurvePoint:
    """The fastest plan for one budget.

    Attributes:
        budget_bytes: The budget.
        peak_bytes: Predicted peak of the plan; `None` if no plan meets the budget.
        time_ratio: Predicted time of a step over that of the original step; `None` if no plan meets the budget.
        kind: What the plan uses: tiles, files, swaps, or the original step.
        planning_seconds: Duration of the search.
    """

    budget_bytes: int
    peak_bytes: int | None = None
    time_ratio: float | None = None
    kind: str = "no plan"
    planning_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class BudgetCurve:
    """Time of a step against its memory budget.

    Attributes:
        original_bytes: Predicted peak of the original step.
        headroom: Fraction of each budget that predictions leave free.
        points: Points, the largest budget first.
    """

    original_bytes: int
    headroom: float
    points: Sequence[CurvePoint]

    def table(self) -> str:
        """Return a table with a line for each budget."""
        rows = [["budget", "peak", "of original", "time", "plan"]]
        for point in self.points:
            peak = part = ratio = "-"
            if point.peak_bytes is not None and point.time_ratio is not None:
                peak, part = format_bytes(point.peak_bytes), f"{point.peak_bytes / self.original_bytes:.2f}"
                ratio = f"{point.time_ratio:.2f}x"
            rows.append([format_bytes(point.budget_bytes), peak, part, ratio, point.kind])
        return "\n".join(table(rows, right=range(4)))

    def to_json(self) -> str:
        """Return all attributes as a JSON object."""
        return json.dumps(dataclasses.asdict(self))

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draw the time against the budget, and return the figure.

        Args:
            path: File to write, in the format of its extension; by default none.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        figure = new_figure("the chart of a curve", 7.5, 4.4)
        axes = figure.add_subplot()
        met = [(one.budget_bytes, one.time_ratio, one.kind) for one in self.points if one.time_ratio is not None]
        axes.plot([size for size, _, _ in met], [ratio for _, ratio, _ in met], "-", color=LINE, linewidth=1.2)
        for kind in dict.fromkeys(kind for _, _, kind in met):
            of_kind = [(size, ratio) for size, ratio, other in met if other == kind]
            axes.plot(*zip(*of_kind, strict=True), MARKERS.get(kind, "*"), color=LINE, label=kind)
        axes.axvline(self.original_bytes, color=LIMIT, linestyle=":", label="peak of the original step")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: format_bytes(value))
        if max((ratio for _, ratio, _ in met), default=1.0) > MAX_LINEAR_RATIO:
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
        axes.set_xlabel("memory budget")
        axes.set_ylabel("time of a step (1 = original)")
        axes.grid(visible=True, which="major", color="0.9")
        axes.legend(frameon=False)
        save_figure(figure, path)
        return figure

    def __str__(self) -> str:
        return self.table()
