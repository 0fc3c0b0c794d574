"""Peaks of the executions of a step, and their comparison with the budget where the step has no graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rewriters.errors import BudgetError
from rewriters.swapping.tiers import Tier
from tflms_sft._keras.model_checks import reason_runs_eagerly, variable_bytes
from tflms_sft._params.tile_params import AutoParams
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
        highest: Highest peak of the present epoch; `None` before the first one, and without statistics.
        has_earlier_work: Whether others had much memory in use before the first execution, which fragments memory;
            `None` before its end, and without statistics.
    """

    def __init__(self, devices: Sequence[str] = ()) -> None:
        self.devices = devices
        self.highest: Measurement | None = None
        self.has_earlier_work: bool | None = None
        self._bytes_in_use: int | None = None
        self._earlier_peak: int | None = None

    def note_earlier_work(self) -> None:
        """Read the peak of all work before the first execution, its preparation included."""
        if self._earlier_peak is None:
            self._earlier_peak = peak_statistics.earlier_peak(self.devices)

    def start(self, tiers: Iterable[Tier]) -> bool:
        """Start the measurement of an execution; return whether the device keeps statistics."""
        self._bytes_in_use = peak_statistics.reset_peak(tiers, self.devices)
        return self._bytes_in_use is not None

    def stop(self, step_bytes: Sequence[int], tiers: Iterable[Tier]) -> Measurement | None:
        """End the measurement of an execution, and return its peak; arguments as for `read_peak`."""
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


def check_eager_step(model: Any, params: AutoParams, watch: PeakWatch) -> None:
    """End the measurement of the first step of a model that runs eagerly, and compare the peak with the budget.

    Raises:
        BudgetError: If the peak is above the budget.
    """
    sizes = variable_bytes(model)
    limit = params.resolved(sum(sizes)).memory_budget
    measured = watch.stop(sizes, ())
    if measured is not None and measured.peak_bytes > limit:
        used, budget = format_excess(measured.peak_bytes, limit)
        raise BudgetError(
            f"The first step used {used}, which is more than `memory_budget`. Received: memory_budget={budget}. "
            f"{reason_runs_eagerly(model)}"
        )
