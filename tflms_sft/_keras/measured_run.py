"""Runs of a step whose peak is measured and compared with the budget."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from rewriters.device import properties
from rewriters.errors import BudgetError
from rewriters.swapping.tiers import Tier
from tflms_sft._batches.first_batches import PeekedBatches
from tflms_sft._batches.planned_step import PlannedStep
from tflms_sft._keras.model_checks import variable_bytes
from tflms_sft._keras.slow_steps import SlowSteps
from tflms_sft._keras.step_planner import Replanner
from tflms_sft._params.tile_params import AutoParams
from tflms_sft._report.plan import Plan
from tflms_sft._report.plan_records import Measurement
from tflms_sft._rewrite import peak_statistics
from tflms_sft._util.byte_sizes import format_excess

MIN_EARLIER_FRACTION = 0.25
"""Memory that others had in use before the first execution, over its peak, from which on the process counts as used."""


class PeakWatch:
    """Measures executions of a train function one after another, on devices with memory statistics.

    Args:
        devices: GPUs of several replicas, whose peaks are added up; otherwise the planned device is measured.

    Attributes:
        devices: As given.
        highest: Highest peak since `begin_epoch`; `None` before the first one, and without statistics.
        has_earlier_work: Whether others had much memory in use before the first execution, which fragments memory;
            `None` before its end, and without statistics.
    """

    def __init__(self, devices: Sequence[str] = ()) -> None:
        self.devices = devices
        self.highest: Measurement | None = None
        self.has_earlier_work: bool | None = None
        self._bytes_in_use: int | None = None
        self._earlier_peak: int | None = None

    def begin_epoch(self) -> None:
        """Forget the peaks of the previous epoch."""
        self.highest = None

    def note_earlier_work(self) -> None:
        """Read the peak of all work before the first execution, its preparation included."""
        if self._earlier_peak is None:
            self._earlier_peak = peak_statistics.earlier_peak(self.devices)

    def start(self, tiers: Iterable[Tier]) -> bool:
        """Start the measurement of an execution; return whether the device keeps statistics."""
        self._bytes_in_use = peak_statistics.reset_peak(tiers, self.devices)
        return self._bytes_in_use is not None

    def stop(self, step_bytes: Sequence[int], tiers: Iterable[Tier]) -> Measurement | None:
        """End the measurement of an execution and return its peak.

        Args:
            step_bytes: Sizes of the step's own tensors that were in memory at its start.
            tiers: Swap tiers of the step.
        """
        if self._bytes_in_use is None:
            return None
        measured = peak_statistics.read_peak(self._bytes_in_use, step_bytes, tiers, self.devices)
        self._bytes_in_use = None
        if measured is not None and self.has_earlier_work is None:
            others = (self._earlier_peak or 0) - sum(step_bytes)
            self.has_earlier_work = others > MIN_EARLIER_FRACTION * measured.peak_bytes
        if measured is not None and (self.highest is None or measured.peak_bytes > self.highest.peak_bytes):
            self.highest = measured
        return measured


@dataclasses.dataclass(eq=False)
class MeasuredRun:
    """Runs planned steps, and compares their peaks with the budget.

    Attributes:
        is_pipeline: Whether a step runs on several devices, whose peaks are not measured.
        prepare: Called before the first step of a plan, to do work that would allocate memory during the step.
        on_measured: Called with a plan after its first step; if no peak can be measured, only with the first plan.
    """

    is_pipeline: bool
    watch: PeakWatch
    slow_steps: SlowSteps
    replanner: Replanner
    prepare: Callable[[], object]
    on_measured: Callable[[Plan], None]
    _has_reported: bool = dataclasses.field(init=False, default=False)

    def run(self, step: PlannedStep, batches: Any, peeked: PeekedBatches | None) -> Any:
        """Run the steps of one execution, and report the measured peak of the first execution of a plan.

        The arguments `batches` and `peeked` are results of `SizeSelector.take`.

        Raises:
            BudgetError: If the plan exceeds the budget and has been corrected before.
        """
        is_first = not step.has_run
        self.watch.note_earlier_work()
        if is_first:
            self.prepare()
        # The statistics are those of one device, or of one GPU per replica.
        has_statistics = not self.is_pipeline and self.watch.start(step.tiers)
        if is_first and has_statistics and peeked is not None:
            peeked.wait_until_prefetched()
            self.watch.start(step.tiers)
        result = self.slow_steps.run(step.plan, functools.partial(step.run, batches))
        if is_first:  # Reading the result waits for a GPU.
            tf.nest.map_structure(lambda value: value.numpy() if hasattr(value, "numpy") else value, result)
        step_bytes = [*step.variable_bytes, *(peeked.bytes_on_device() if peeked is not None else ())]
        measured = self.watch.stop(step_bytes, step.tiers) if step.plan is not None else None
        if is_first:
            step.note_first_run(measured)
        if step.plan is None:
            return result
        if not is_first:
            self.replanner.check_later_run(step, step.plan, measured)
            return result
        if measured is not None or not self._has_reported:
            self._has_reported = True
            self.on_measured(step.plan)
        self.replanner.check_first_run(step, step.plan)
        return result


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
        subject = "The peak of the first step is" if properties.has_allocator_stats() else "No peak can be"
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
