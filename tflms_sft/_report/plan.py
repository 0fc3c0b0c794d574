"""What was done to a step, in words, numbers and a picture."""

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


@dataclasses.dataclass(eq=False, repr=False)
class Plan(PlanRecord):
    """How a step was rewritten. Printed it is its summary; in a notebook, its page.

    Attributes:
        changed: Whether anything was rewritten.
        batch: Batch size that the bytes hold for. Smaller ones run too; larger ones if there is no budget, or nothing
            was rewritten and they are predicted to keep to it.
        batch_is_fixed: Whether the step was traced for this batch alone.
        segments: What runs tile by tile.
        left_alone: (name, reason) of image ops that stay as they were.
        original: Prediction for the step as it was.
        predicted: Prediction for the step as it is.
        measured: Peak of a real step, once there was one.
        memory_budget: Bytes, if there was a budget.
        notes: Remarks.
        swaps: Tensors that leave the device in every step.
        swap_tier: Where they go: `"host"` or `"disk"`; empty if there are none.
        not_swapped: (tensor, why it stays) of those that could not be swapped.
        rest_waiting_bytes: As in `PlannedSegment`, of what is in no segment; what is swapped is counted.
        rest_time_share: The same for time.
        pipeline: Stages on several devices, if that is what was done.
    """

    def headline(self) -> str:
        """One line: what was done and what is expected."""
        return headline(self)

    def __repr__(self) -> str:
        """One line."""
        return f"<Plan for {batch_text(self)}: {self.headline()}>"

    def __str__(self) -> str:
        """The summary."""
        return self.summary()

    def _repr_html_(self) -> str:
        """The page in a frame of its own, whose style a notebook does not take over."""
        return f'<iframe srcdoc="{html.escape(self.to_html())}" width="100%" height="600" frameborder="0"></iframe>'

    def summary(self) -> str:
        """A report of several lines: a table of the segments, and what a reader should know of them.

        docs/reports.md tells what the columns mean.
        """
        return summary(self)

    def to_json(self, indent: int | None = 2) -> str:
        """The whole plan as JSON, timelines included.

        Args:
            indent: Spaces per level; `None` puts all into one line. Defaults to 2.

        Returns:
            The text; sizes are bytes, times seconds.
        """
        return json.dumps(dataclasses.asdict(self), indent=indent)

    def plot(
        self,
        path: str | os.PathLike[str] | None = None,
        before: Measurement | None = None,
        after: Measurement | None = None,
    ) -> Any:
        """Draw memory over a step, before and after: as predicted, and as measured if there are timelines of it.

        Args:
            path: File to write; `None` only returns the figure.
            before: Of the step as it was: `tflms_sft.measure(step, *batch, timelines=True)`.
            after: Of the rewritten step. Defaults to `measured`.

        Returns:
            The matplotlib figure.

        Raises:
            ImportError: Without matplotlib (`pip install "tflms-sft[plot]"`).
            TypeError: If `before` or `after` is no `Measurement`.

        Example:
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
        """The whole report as one page: table, picture, swaps, what is left alone and why, largest tensors.

        The page asks for nothing from elsewhere. Without matplotlib it has no picture, and says so.

        Args:
            path: File to write; `None` only returns the text.
            before: As for `plot`.
            after: As for `plot`.

        Returns:
            The text of the page.

        Raises:
            TypeError: If `before` or `after` is no `Measurement`.

        Example:
        >>> callback.plan.to_html("plan.html")
        """
        _check_measurements(before, after)
        text = page(self, before, after or self.measured)
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        return text


def amend_plan(plan: Plan, *notes: str, **changes: Any) -> Plan:
    """Return a copy of a plan with more notes and other fields changed.

    Args:
        plan: The plan; it is not modified.
        *notes: Appended to `plan.notes`; empty ones are skipped.
        **changes: Other fields, as for `dataclasses.replace`.
    """
    return dataclasses.replace(plan, notes=(*plan.notes, *filter(None, notes)), **changes)


def _check_measurements(before: Any, after: Any) -> None:
    for argument, value in (("before", before), ("after", after)):
        if not isinstance(value, Measurement | None):
            raise TypeError(
                f"`{argument}` must be what `tflms_sft.measure` returned. Received: {argument}={value!r} of type "
                f"{type(value).__name__}."
            )
