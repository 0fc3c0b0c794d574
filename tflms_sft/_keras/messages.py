"""Lines that callbacks print about a plan and its first step, and the error for an exceeded budget."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from rewriters.errors import BudgetError
from rewriters.ir.device_detection import planned_device
from tflms_sft._report.plan import Plan
from tflms_sft._report.plan_records import Measurement
from tflms_sft._report.summary import excess_remedy
from tflms_sft._util.byte_sizes import format_bytes, format_excess

MIN_COUNTED_FRACTION = 0.5
"""Measured peak, over the predicted one, below which a line names the smallest tensors that the device counts."""

NO_SMALLER_PLAN = "tflms-sft: no plan has a smaller peak; training continues with the present plan."
"""Line after a later step above the budget, if no plan fits by its peak."""


def plan_line(plan: Plan, called: str = "", *, is_jit_off: bool, planning_time: str = "") -> str:
    """Return the line that summarises the plan of a training, or of an evaluation or prediction, named `called`."""
    text = f"tflms-sft: {called}: {plan.headline()}" if called else f"tflms-sft: {plan.headline()}"
    if is_jit_off:
        text += f"; XLA (`jit_compile`) is off for this {called or 'training'}"
    return "; ".join(filter(None, [text, *plan.notes, planning_time]))


def eager_line(reason: str) -> str:
    """Return the line that announces a training without a graph; `reason` tells why there is none, and the remedy."""
    subject = "The peak of the first step is" if planned_device().has_allocator_stats else "No peak can be"
    return f"tflms-sft: training is not rewritten: {reason} {subject} compared with the budget."


def exceeds_budget(plan: Plan, measured: Measurement | None = None) -> bool:
    """Tell whether a measured peak, by default that of the first step, is above the budget of a plan."""
    budget, measured = plan.memory_budget, measured or plan.measured
    return budget is not None and measured is not None and measured.peak_bytes > budget


def over_budget_warning(plan: Plan) -> str:
    """Return the warning for an exceeded budget, for trainings that print no lines."""
    assert plan.measured is not None
    used, budget = format_excess(plan.measured.peak_bytes, plan.memory_budget or 0)
    return f"tflms-sft: the step used {used}, more than its budget of {budget}; planning again with the measured peak."


def later_excess_line(plan: Plan, measured: Measurement, *, has_epochs: bool) -> str:
    """Return the line about a later step that exceeded the budget; with epochs, each epoch may have a new plan."""
    used, budget = format_excess(measured.peak_bytes, plan.memory_budget or 0)
    remedy = "the next epoch is planned again with this peak" if has_epochs else "pass a larger `headroom`"
    return f"tflms-sft: a later step used {used}, more than its budget of {budget}; {remedy}."


def over_budget_error(plan: Plan, *, is_used: bool) -> BudgetError:
    """Return the error for a second plan that exceeds the budget although it accounts for the measured peak.

    Args:
        plan: The second plan.
        is_used: Whether much other memory had been in use in the process before the first step.
    """
    assert plan.memory_budget is not None and plan.measured is not None
    used, budget = format_excess(plan.measured.peak_bytes, plan.memory_budget)
    error = BudgetError(
        f"The step exceeds `memory_budget`, although its plan was corrected by the first measurement: measured "
        f"{used} ({plan.measured.source}), predicted {format_bytes(plan.predicted.peak_bytes)}. Received: "
        f"memory_budget={budget}. "
        + excess_remedy(plan.measured.peak_bytes - plan.predicted.peak_bytes, plan.memory_budget, is_used=is_used)
        + " Or raise the budget."
    )
    error.smallest_bytes = plan.measured.peak_bytes
    error.tensor = plan.predicted.largest[0][0] if plan.predicted.largest else ""
    return error


def rewritten_twice_error(step: str, model: str, first: str, second: str) -> ValueError:
    """Return the error for a step of a model that two callbacks or contexts rewrite."""
    return ValueError(
        f"The {step.replace('_', ' ')} of model {model!r} is rewritten twice: by {first} and by {second}. Use one of "
        "them: `MemoryBudget` and `budget` choose segments and swaps (`swap=LMSParams(...)` restricts the swaps), "
        "`SFT` accepts several segments in `segments=`, and `LMS(tiles=SFTParams(...))` tiles first."
    )


def peak_line(plan: Plan, *, is_replanned: bool) -> str:
    """Return the line with the measured and the predicted peak; empty for a pipeline, which has one per device."""
    if plan.pipeline is not None:
        return ""
    if plan.measured is None:
        reason = "this device has no memory statistics, or they omit tensors as small as those of this step"
        return f"tflms-sft: peak of the first step not measured: {reason}. `tflms_sft.measure` measures it."
    text, predicted = "tflms-sft: measured peak", format_bytes(plan.predicted.peak_bytes)
    if not exceeds_budget(plan):
        text += f" {format_bytes(plan.measured.peak_bytes)} in the first step, predicted {predicted}"
        uncounted = planned_device().min_counted_bytes
        if uncounted and plan.measured.peak_bytes < MIN_COUNTED_FRACTION * plan.predicted.peak_bytes:
            text += f"; this device does not count tensors below {format_bytes(uncounted)}"
        return text
    used, budget = format_excess(plan.measured.peak_bytes, plan.memory_budget or 0)
    text += f" {used} in the first step, predicted {predicted} - OVER the budget of {budget}"
    text += "" if is_replanned else ": planning again with the measured peak"
    return text


def forward_over_budget_line(called: str, plan: Plan) -> str:
    """Return the line for an evaluation or a prediction that exceeded the budget; empty if it did not."""
    if plan.measured is None or not exceeds_budget(plan):
        return ""
    used, budget = format_excess(plan.measured.peak_bytes, plan.memory_budget or 0)
    predicted = format_bytes(plan.predicted.peak_bytes)
    return f"tflms-sft: {called}: measured peak {used}, predicted {predicted} - OVER the budget of {budget}"


def tell(say: Callable[[str], None] | None, text: str) -> None:
    """Print a line with `say`, or warn where no lines are printed."""
    if say is None:
        warnings.warn(text, stacklevel=2)
    else:
        say(text)
