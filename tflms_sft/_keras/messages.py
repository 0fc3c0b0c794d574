"""The lines that callbacks print about a plan and its first step, and the error for a budget that was not kept."""

from __future__ import annotations

from rewriters.errors import BudgetError
from tflms_sft._planner.budget_search import fragmentation_hint
from tflms_sft._report.plan import Plan
from tflms_sft._util.byte_sizes import format_bytes


def start_line(plan: Plan, *, is_jit_off: bool, planning_time: str) -> str:
    """Return the line that tells what the plan of a training does."""
    text = f"tflms-sft: {plan.headline()}"
    if is_jit_off:
        text += "; XLA (`jit_compile`) is off for this training"
    return "; ".join(filter(None, [text, *plan.notes, planning_time]))


def is_over(plan: Plan) -> bool:
    """Whether a step was measured to take more than its budget."""
    budget, found = plan.memory_budget, plan.measured
    return budget is not None and found is not None and found.peak_bytes > budget


def over_text(plan: Plan) -> str:
    """That a step took more than its budget, of which nothing has been said yet."""
    assert plan.measured is not None
    return (
        f"tflms-sft: the step took {format_bytes(plan.measured.peak_bytes)}, more than its budget of "
        f"{format_bytes(plan.memory_budget or 0)}; the next one goes by a plan that leaves more free."
    )


def over_again(plan: Plan) -> BudgetError:
    """The error for a plan that goes by what was measured and still takes more than the budget."""
    assert plan.memory_budget is not None and plan.measured is not None
    error = BudgetError(
        f"The step takes more than `memory_budget`: measured {format_bytes(plan.measured.peak_bytes)} "
        f"({plan.measured.source}), predicted {format_bytes(plan.predicted.peak_bytes)}, with a plan that went by what "
        f"the first one was measured to take. Received: memory_budget={format_bytes(plan.memory_budget)}. "
        + fragmentation_hint(plan.measured.peak_bytes / plan.predicted.peak_bytes, plan.memory_budget)
        + " Or raise the budget."
    )
    error.smallest_bytes = plan.measured.peak_bytes
    error.tensor = plan.predicted.largest[0][0] if plan.predicted.largest else ""
    return error


def peak_line(plan: Plan, *, planned_again: bool) -> str:
    """Return the line with the measured and the predicted peak; empty for a pipeline, which has several."""
    if plan.pipeline is not None:
        return ""
    if plan.measured is None:
        why = "this device keeps no memory statistics, or none of tensors so small"
        return f"tflms-sft: peak of the first step not measured ({why})"
    text = f"tflms-sft: measured peak {format_bytes(plan.measured.peak_bytes)}"
    text += f" in the first step, predicted {format_bytes(plan.predicted.peak_bytes)}"
    if is_over(plan):
        text += f" - OVER the budget of {format_bytes(plan.memory_budget or 0)}"
        text += "" if planned_again else ": planning again by what was measured"
    return text


def forward_line(called: str, plan: Plan, *, is_jit_off: bool) -> str:
    """Return the line that tells what the plan of an evaluation or a prediction does."""
    text = f"tflms-sft: {called}: {plan.headline()}"
    if is_jit_off:
        text += "; XLA (`jit_compile`) is off meanwhile"
    return "; ".join([text, *plan.notes])


def over_line(called: str, plan: Plan) -> str:
    """That a step was measured to take more than the budget; empty if it was not."""
    if plan.measured is None or not is_over(plan):
        return ""
    return (
        f"tflms-sft: {called}: measured peak {format_bytes(plan.measured.peak_bytes)}, predicted "
        f"{format_bytes(plan.predicted.peak_bytes)} - OVER the budget of {format_bytes(plan.memory_budget or 0)}"
    )
