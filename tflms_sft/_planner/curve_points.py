"""Fastest plans of one step for several budgets."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence

from tflms_sft._params.tile_params import AutoParams
from tflms_sft._planner.budget_plan import FeasiblePlan
from tflms_sft._planner.budget_search import fitting_plans, least_memory
from tflms_sft._report.budget_curve import ORIGINAL_STEP, CurvePoint
from tflms_sft._search.traced_step import TracedStep


def budgets_between(traced: TracedStep, params: AutoParams, count: int) -> list[int]:
    """Return budgets in geometric order, from the smallest one that a plan meets to that of the original step."""
    least, most = (
        math.ceil(peak.peak_bytes / (1 - params.headroom)) + 1
        for peak in (least_memory(traced, params).peak, traced.plain.peak)
    )
    ratio = (most / least) ** (1 / max(count - 1, 1))
    return sorted({most, *(int(least * ratio**number) for number in range(count - 1))})


def curve_points(traced: TracedStep, params: AutoParams, budgets: Sequence[int]) -> Iterator[CurvePoint]:
    """Yield the point of each budget, the smallest budget first.

    A plan of a smaller budget fits a larger one. Hence no point takes longer than one of a smaller budget.
    """
    for budget in sorted(budgets):
        began = time.monotonic()
        plan = next(fitting_plans(traced, dataclasses.replace(params, memory_budget=budget)), None)
        yield _point(traced, budget, plan, time.monotonic() - began)


def _point(traced: TracedStep, budget: int, plan: FeasiblePlan | None, planning_seconds: float) -> CurvePoint:
    if plan is None:
        return CurvePoint(budget, planning_seconds=planning_seconds)
    parts = {
        "tiles": bool(plan.plan.plans),
        "files": plan.plan.files is not None,
        "swaps": plan.plan.swaps is not None,
    }
    kind = ", ".join(name for name, is_used in parts.items() if is_used) or ORIGINAL_STEP
    time_ratio = max(plan.seconds / traced.seconds, 1.0)
    return CurvePoint(budget, plan.peak_bytes, time_ratio, kind, planning_seconds)
