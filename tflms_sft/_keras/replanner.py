"""Corrects the memory model by measured peaks, and plans steps again."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from rewriters.errors import BudgetError
from rewriters.step_importer import StepImporter
from tflms_sft._batches.planned_step import PlannedStep
from tflms_sft._keras import messages
from tflms_sft._params.request import RewriteRequest
from tflms_sft._planner.traced_step import TracedStep
from tflms_sft._report.plan import Plan
from tflms_sft._report.plan_records import Measurement
from tflms_sft._rewrite.rewrite import rewrite_traced
from tflms_sft._util.keras_internals import StepKind


class Excesses:
    """Bytes by which measured peaks exceed predicted ones of earlier plans, by model and kind of step.

    Models are weak keys: Python may give the address of a deleted model to the next one. A copy starts empty.
    """

    def __init__(self) -> None:
        self._by_model: weakref.WeakKeyDictionary[Any, dict[StepKind, int]] = weakref.WeakKeyDictionary()

    def of(self, model: Any, kind: StepKind) -> int:
        """Return the excess of the latest plan of a step; 0 without one."""
        return self._by_model.get(model, {}).get(kind, 0)

    def set(self, model: Any, kind: StepKind, excess_bytes: int) -> None:
        """Set the excess that the next plans of a step expect."""
        self._by_model.setdefault(model, {})[kind] = excess_bytes

    def __reduce__(self) -> Any:
        """Copy and pickle as an empty object: weak keys can be neither."""
        return Excesses, ()


@dataclasses.dataclass
class _Correction:
    """The measured peaks of one planned step.

    Attributes:
        excess_bytes: Measured peak less the predicted peak of the previous plan; `None` before there is one.
        excess_before: `excess_bytes` of the plan that was discarded because a later step exceeded the budget.
        later_peak: Peak of a later step of the present plan that exceeded the budget.
        is_replanned: Whether the plan is corrected by the measured peak of an earlier one.
        keeps_plan: Whether no corrected plan fits, so that the present one stays.
    """

    excess_bytes: int | None = None
    excess_before: int | None = None
    later_peak: Measurement | None = None
    is_replanned: bool = False
    keeps_plan: bool = False


@dataclasses.dataclass(eq=False)
class Replanner:
    """Has a step planned again after it exceeded its budget, with a memory model that accounts for the measured peak.

    Attributes:
        excesses: Measured less predicted peaks of earlier plans, which this object extends.
        has_epochs: Whether `plan_again` is called for each epoch.
        is_used: Tells whether much other memory had been in use in the process before the first step.
        say: Called with lines; `None` warns.
    """

    model: Any
    kind: StepKind
    excesses: Excesses
    has_epochs: bool
    is_used: Callable[[], bool]
    say: Callable[[str], None] | None
    _corrections: weakref.WeakKeyDictionary[PlannedStep, _Correction] = dataclasses.field(
        init=False, default_factory=weakref.WeakKeyDictionary
    )

    def _of(self, step: PlannedStep) -> _Correction:
        return self._corrections.setdefault(step, _Correction())

    def excess_bytes(self, step: PlannedStep) -> int:
        """Return measured less predicted peak of an earlier plan: of this step, else of the latest one of the model."""
        of_step = self._of(step).excess_bytes
        return self.excesses.of(self.model, self.kind) if of_step is None else of_step

    def is_replanned(self, step: PlannedStep) -> bool:
        """Tell whether a plan is corrected by the measured peak of the first step of an earlier one."""
        return self._of(step).is_replanned

    def is_corrected(self, step: PlannedStep) -> bool:
        """Tell whether the next plan of a step replaces one that exceeded the budget."""
        return self.is_replanned(step) or self._of(step).excess_before is not None

    def _correct(self, step: PlannedStep, excess_bytes: int) -> None:
        """Correct the next plan of this step, and the first plans of other sizes and trainings."""
        self._of(step).excess_bytes = excess_bytes
        self.excesses.set(self.model, self.kind, excess_bytes)

    def check_first_run(self, step: PlannedStep, plan: Plan) -> None:
        """Discard a plan whose first step exceeded the budget, so that the next step is planned with a corrected model.

        Raises:
            BudgetError: If the plan was corrected before.
        """
        correction = self._of(step)
        if plan.measured is None or not messages.exceeds_budget(plan) or correction.keeps_plan:
            return
        if correction.is_replanned:
            raise messages.over_budget_error(plan, is_used=self.is_used())
        if self.say is None:  # Otherwise `on_measured` has printed a line.
            warnings.warn(messages.over_budget_warning(plan), stacklevel=2)
        correction.is_replanned = True
        self._correct(step, plan.measured.peak_bytes - plan.predicted.peak_bytes)
        step.plan_again()

    def check_later_run(self, step: PlannedStep, plan: Plan, measured: Measurement | None) -> None:
        """Say once for each plan that a later step exceeded the budget; the next epoch, if any, is planned again."""
        correction = self._of(step)
        is_done = correction.later_peak is not None or correction.keeps_plan
        if measured is None or is_done or not messages.exceeds_budget(plan, measured):
            return
        correction.later_peak = measured
        messages.tell(self.say, messages.later_excess_line(plan, measured, has_epochs=self.has_epochs))

    def plan_again(self, steps: Iterable[PlannedStep]) -> None:
        """Discard the plans that a later step exceeded the budget with, so that the next step is planned again.

        The peak of that step corrects the memory model. If no corrected plan fits, the present one stays.
        """
        for step in steps:
            correction = self._of(step)
            peak, correction.later_peak = correction.later_peak, None
            if peak is not None and step.plan is not None:
                correction.excess_before = self.excess_bytes(step)
                self._correct(step, peak.peak_bytes - step.plan.predicted.peak_bytes)
                step.plan_again()

    def rewrite(self, step: PlannedStep, traced: TracedStep, request: RewriteRequest) -> tuple[StepImporter, Plan]:
        """Rewrite a step with the corrected model; if no plan fits after a later peak, as before that peak.

        Raises:
            BudgetError: If no plan fits.
        """
        correction = self._of(step)
        traced.excess_bytes = self.excess_bytes(step)
        before, correction.excess_before = correction.excess_before, None
        try:
            return rewrite_traced(traced, request)
        except BudgetError:
            if before is None:
                raise
        correction.keeps_plan = True
        messages.tell(self.say, messages.NO_SMALLER_PLAN)
        self._correct(step, before)
        traced.excess_bytes = before
        return rewrite_traced(traced, request)
