"""`Plan`: the record of a rewriting, with its reports as text, JSON, chart and web page."""

from __future__ import annotations

import dataclasses
import html
import json
import os
from typing import Any

from tflms_sft._report.html_page import page
from tflms_sft._report.memory_chart import draw
from tflms_sft._report.plan_records import Measurement, PlanRecord
from tflms_sft._report.summary import batch_text, headline, summary


@dataclasses.dataclass(eq=False, repr=False, frozen=True)
class Plan(PlanRecord):
    """The record of a rewriting: segments, swaps, predictions and measurements.

    Printing a plan prints its summary; a notebook displays its web page. Sizes are bytes, times seconds.

    Attributes:
        changed: Whether the step was rewritten.
        batch: Batch size that the bytes are predicted for. Smaller batches run too. Larger ones run without a budget,
            or if nothing was rewritten and their predicted peak keeps the budget.
        batch_is_fixed: Whether the step was traced for this batch size alone.
        segments: Segments that run as tile loops.
        left_alone: (name, reason) of image ops that were not rewritten.
        original: Prediction for the original step.
        predicted: Prediction for the rewritten step.
        measured: Measured memory of a real step; `None` before one was measured, and on devices without memory
            statistics.
        memory_budget: Budget in bytes, or `None`.
        notes: Remarks, such as the reason for swaps, or the time under a larger budget for a step that takes more than
            twice as long as the original one.
        swaps: Tensors that are swapped in every step.
        swap_tier: Destination of swaps: `"host"` or `"disk"`; empty without swaps.
        swapped_bytes: Bytes of all tensors that are swapped out in a step.
        not_swapped: (tensor, reason) of tensors that could not be swapped.
        file_bytes: Bytes that files with results of tile loops take on the disk at most.
        rest_waiting_bytes: Bytes outside of segments that are saved for the backward pass, swapped tensors included, in
            the original and the rewritten step.
        rest_time_share: Predicted time of ops outside of segments over that of the original step, in the original and
            the rewritten step.
        pipeline: Stages on several devices, or `None`.
        recipe: Decisions of a plan for a budget, which `save` writes; `None` for other plans.
    """

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the decisions of a plan for a budget to a file, for `MemoryBudget(plan=path)` and `AutoParams`.

        A training that reads the file rewrites an equal step, of the same batch size and version of the package,
        without a search. Save the plan of a callback after `fit`: before the first step `callback.plan` is `None`.

        Args:
            path: File to write.

        Raises:
            ValueError: If the plan is not for a budget.

        Examples:
            >>> callback.plan.save("plan.json")
        """
        if self.recipe is None:
            raise ValueError(
                f"Only a plan for a budget can be saved. Received: {self!r}. Explicit parameters need no search: pass "
                "them again."
            )
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.recipe, file, indent=1)

    def headline(self) -> str:
        """Return one line: segments, swaps, predicted peak and time."""
        return headline(self)

    def __repr__(self) -> str:
        """Return the headline with the batch size."""
        return f"<Plan for {batch_text(self)}: {self.headline()}>"

    def __str__(self) -> str:
        """Return the summary."""
        return self.summary()

    def _repr_html_(self) -> str:
        """Return the web page in a frame, which isolates its style from the notebook's."""
        return f'<iframe srcdoc="{html.escape(self.to_html())}" width="100%" height="600" frameborder="0"></iframe>'

    def summary(self) -> str:
        """Return a report of several lines: a table of segments, swaps, the largest tensors, and remarks.

        The page "Reports" of the documentation explains the columns.
        """
        return summary(self)

    def to_json(self, indent: int | None = 2) -> str:
        """Return the plan as JSON, timelines included.

        Args:
            indent: Spaces per level; `None` for a single line.

        Returns:
            The text, with the attributes of `Plan` as fields, without `recipe`. Sizes are bytes, times seconds.
        """
        fields = dataclasses.asdict(self)
        del fields["recipe"]
        return json.dumps(fields, indent=indent)

    def plot(
        self,
        path: str | os.PathLike[str] | None = None,
        before: Measurement | None = None,
        after: Measurement | None = None,
    ) -> Any:
        """Draw the bytes alive over a step, of the original and the rewritten step; of a pipeline its schedule.

        The prediction is always drawn. Timelines of `before` and `after` add a second panel.

        Args:
            path: File to write, in the format of its extension. `None`: no file.
            before: Measurement of the original step: `tflms_sft.measure(step, *batch, timelines=True)`.
            after: Measurement of the rewritten step. `None`: `measured`.

        Returns:
            The `matplotlib.figure.Figure`.

        Raises:
            ImportError: If matplotlib is not installed (`pip install "tflms-sft[plot]"`).
            TypeError: If `before` or `after` is not a `Measurement`.

        Examples:
            >>> fast = tflms_sft.rewrite(step, tflms_sft.LMSParams(), images, labels)
            >>> before, after = (tflms_sft.measure(s, images, labels, timelines=True) for s in (step, fast))
            >>> fast.plan.plot("plan.png", before, after)
        """
        _check_measurements(before, after)
        return draw(self, path, before, after or self.measured)

    def to_html(
        self,
        path: str | os.PathLike[str] | None = None,
        before: Measurement | None = None,
        after: Measurement | None = None,
    ) -> str:
        """Return the report as one self-contained HTML page: summary, chart, swaps, largest tensors, remarks.

        Without matplotlib, a line replaces the chart.

        Args:
            path: File to write. `None`: no file.
            before: Measurement of the original step, as for `plot`.
            after: Measurement of the rewritten step, as for `plot`.

        Returns:
            The HTML text.

        Raises:
            TypeError: If `before` or `after` is not a `Measurement`.

        Examples:
            >>> callback.plan.to_html("plan.html")
        """
        _check_measurements(before, after)
        text = page(self, before, after or self.measured)
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        return text


def amend_plan(plan: Plan, *notes: str, **changes: Any) -> Plan:
    """Return a copy of a plan with more notes, except for empty ones, and with other fields changed."""
    return dataclasses.replace(plan, notes=(*plan.notes, *filter(None, notes)), **changes)


def _check_measurements(before: Any, after: Any) -> None:
    for argument, value in (("before", before), ("after", after)):
        if not isinstance(value, Measurement | None):
            raise TypeError(
                f"`{argument}` must be a `Measurement`, as `tflms_sft.measure` returns. Received: {argument}={value!r} "
                f"of type {type(value).__name__}."
            )
