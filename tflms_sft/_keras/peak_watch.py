"""Measured peaks of the steps of a training, each against its budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rewriters.swapping.tiers import Tier
from tflms_sft._report.plan_records import Measurement
from tflms_sft._rewrite.peak_statistics import earlier_peak, read_peak, reset_peak

MIN_EARLIER_FRACTION = 0.25
"""Memory that others had in use before the first execution, over its peak, from which on the process counts as used."""


class PeakWatch:
    """Measures executions of a train function one after another, on devices with memory statistics.

    Attributes:
        devices: GPUs of several replicas, whose peaks are added up; otherwise the planned device is measured.
        highest: Highest peak since `begin_epoch`; `None` before the first one, and without statistics.
        has_earlier_work: Whether others had much memory in use before the first execution, which fragments memory;
            `None` before its end, and without statistics.
    """

    def __init__(self) -> None:
        self.devices: Sequence[str] = ()
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
            self._earlier_peak = earlier_peak(self.devices)

    def start(self, tiers: Iterable[Tier]) -> bool:
        """Start the measurement of an execution; return whether the device keeps statistics."""
        self._bytes_in_use = reset_peak(tiers, self.devices)
        return self._bytes_in_use is not None

    def stop(self, step_bytes: Sequence[int], tiers: Iterable[Tier]) -> Measurement | None:
        """End the measurement of an execution and return its peak.

        Args:
            step_bytes: Sizes of the step's own tensors that were in memory at its start.
            tiers: Swap tiers of the step.
        """
        if self._bytes_in_use is None:
            return None
        measured = read_peak(self._bytes_in_use, step_bytes, tiers, self.devices)
        self._bytes_in_use = None
        if measured is not None and self.has_earlier_work is None:
            others = (self._earlier_peak or 0) - sum(step_bytes)
            self.has_earlier_work = others > MIN_EARLIER_FRACTION * measured.peak_bytes
        if measured is not None and (self.highest is None or measured.peak_bytes > self.highest.peak_bytes):
            self.highest = measured
        return measured
