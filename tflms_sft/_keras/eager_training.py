"""A training without a graph under a budget: its step runs as it is, and its first batch is measured."""

from __future__ import annotations

from typing import Any

from rewriters.errors import BudgetError
from rewriters.ir.device_detection import planned_device
from tflms_sft._keras.model_checks import variable_bytes
from tflms_sft._keras.peak_watch import PeakWatch
from tflms_sft._params.tile_params import AutoParams
from tflms_sft._util.byte_sizes import format_excess


class EagerTraining:
    """Holds the first step of a model that runs eagerly against a budget.

    Args:
        model: The model.
        params: The budget.
        reason: Sentence that tells why there is no graph, and the remedy.
    """

    def __init__(self, model: Any, params: AutoParams, reason: str) -> None:
        self._model, self._params, self._reason = model, params, reason
        self._watch = PeakWatch()
        self._is_measured = False

    def line(self) -> str:
        """Return the line that announces the training."""
        subject = "The peak of the first step is" if planned_device().has_allocator_stats else "No peak can be"
        return f"tflms-sft: training is not rewritten: {self._reason} {subject} compared with the budget."

    def begin_batch(self) -> None:
        """Start the measurement of the first batch."""
        if not self._is_measured:
            self._watch.start(())

    def end_batch(self) -> None:
        """Compare the measured peak of the first batch with the budget.

        Raises:
            BudgetError: If the peak is above the budget.
        """
        if self._is_measured:
            return
        self._is_measured = True
        sizes = variable_bytes(self._model)
        limit = self._params.resolved(sum(sizes)).memory_budget
        measured = self._watch.stop(sizes, ())
        if measured is not None and measured.peak_bytes > limit:
            used, budget = format_excess(measured.peak_bytes, limit)
            raise BudgetError(
                f"The first step used {used}, which is more than `memory_budget`. Received: memory_budget={budget}. "
                f"{self._reason}"
            )
