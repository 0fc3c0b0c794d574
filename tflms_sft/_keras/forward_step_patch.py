"""Rewritten steps without gradients: `evaluate`, `predict`, and the validation of a `fit`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from rewriters.errors import BudgetError, RewriteError
from tflms_sft._keras import messages
from tflms_sft._keras.model_checks import check_runs_graph, check_trainer, reason_runs_eagerly
from tflms_sft._keras.train_step_patch import StepPatch
from tflms_sft._params.request import RewriteRequest
from tflms_sft._report.plan import Plan
from tflms_sft._util.keras_internals import EVALUATION, PREDICTION, StepKind

CALLED = {EVALUATION: "evaluate", PREDICTION: "predict"}
VALIDATION = "validation"


class ForwardStepPatch(StepPatch):
    """A rewritten step without gradients in a model.

    Args:
        model: As for `StepPatch`.
        params: As for `StepPatch`.
        kind: The step: `EVALUATION` or `PREDICTION`.
        within_fit: Whether it is the validation of a `fit`, which keeps its original step if it cannot be rewritten.
        **options: Keyword arguments of `StepPatch`.
    """

    def __init__(self, model: Any, params: RewriteRequest, kind: StepKind, *, within_fit: bool, **options: Any) -> None:
        super().__init__(model, params, kind, **options)
        self._kind, self._within_fit, self._runs_original = kind, within_fit, False
        self._called = VALIDATION if within_fit else CALLED[kind]

    def _check(self, model: Any) -> None:
        """Refuse a model whose step cannot be rewritten; it need not be compiled to predict."""
        check_trainer(model)
        check_runs_graph(model)

    def _is_step(self, function: Any) -> bool:
        """Tell whether a function is the step; Keras wraps that of `predict`, and passes nothing else to a strategy."""
        return self._is_running if self._kind is PREDICTION else super()._is_step(function)

    def _plan_line(self, plan: Plan) -> str:
        return messages.plan_line(plan, self._called, is_jit_off=self.installer.has_disabled_jit)

    def _peak_line(self, plan: Plan) -> str:
        return messages.forward_over_budget_line(self._called, plan)

    @tf.autograph.experimental.do_not_convert
    def step(self, data: Any) -> Any:
        """Run the rewritten step; a validation that cannot be rewritten runs its original step instead of failing.

        Raises:
            BudgetError: If no plan fits. In a `fit` the training may fit, and its first epoch is over.
        """
        if self._runs_original:
            return self._original_step(data)
        try:
            return super().step(data)
        except BudgetError as error:
            smaller = "`validation_batch_size=`" if self._within_fit else "a smaller `batch_size=`"
            error.args = (f"{self._called}: {error} Or pass {smaller}.",)
            raise
        except RewriteError as error:
            if not self._within_fit:
                raise
            self._runs_original = True
            self.sizes.stop_selecting()
            text = f"tflms-sft: {self._called} is not rewritten, and the budget does not hold for it: {error}"
            messages.tell(self._say, text)
            return self._original_step(data)


def forward_request(params: RewriteRequest) -> RewriteRequest:
    """Return the part of a request that applies to a step without gradients: its tiles."""
    return RewriteRequest(params.without_plan().tiles)  # A saved plan is that of the training.


def reason_not_rewritten(model: Any, params: RewriteRequest) -> str:
    """Return why steps without gradients of this model are not rewritten; empty if they are."""
    if params.pipeline is not None:
        return "pipelines are for training only"
    if params.budget is not None and reason_runs_eagerly(model):
        return reason_runs_eagerly(model)
    if params.tiles is None:
        return "without a backward pass there are no saved tensors to swap"
    return ""
