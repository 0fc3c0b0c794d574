"""Measurements around each training step, in a child process of a benchmark."""

from __future__ import annotations

import time
from typing import Any

from benchmarks import _child


class StepMeter:
    """Reads the clock and the memory around each step of `model.fit`.

    The counted steps follow the warm-up. The *cold* figures are measured from the start of `fit` to the end of the
    first step, and include tracing and planning.
    """

    def __init__(self, warmup: int, device: str, emit: _child.Emit) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.net_rss: list[int] = []
        self.peaks: list[int] = []
        self.cold_seconds = 0.0
        self.cold_net_rss = 0
        self._warmup = warmup
        self._emit = emit
        self._device = f"{device.upper()}:0"

    def start(self) -> None:
        """Mark the start of `fit`."""
        self._before_fit = _child.status_bytes("VmRSS")
        _child.reset_peak_rss()
        self._fit_began = time.perf_counter()

    def begin(self, _: int, logs: dict[str, Any] | None = None) -> None:
        """Mark the start of a step."""
        if len(self.losses) >= self._warmup:
            if not self.seconds:
                self._warm_rss = _child.status_bytes("VmRSS")
            _child.reset_peak_rss()
            self._reset_allocator_peak()
        self._began = time.perf_counter()
        self._cpu_began = time.process_time()

    def end(self, _: int, logs: dict[str, Any] | None = None) -> None:
        """Mark the end of a step; reading the loss waits for the step."""
        loss = float((logs or {})["loss"])
        seconds = time.perf_counter() - self._began
        cpu_seconds = time.process_time() - self._cpu_began
        peak_rss = _child.status_bytes("VmHWM")
        if not self.losses:
            self.cold_seconds = time.perf_counter() - self._fit_began
            self.cold_net_rss = peak_rss - self._before_fit
        if len(self.losses) >= self._warmup:
            self.seconds.append(seconds)
            self.cpu_seconds.append(cpu_seconds)
            self.net_rss.append(peak_rss - self._warm_rss)
            peak = self._allocator_peak()
            if peak:
                self.peaks.append(peak)
        self.losses.append(loss)
        self._emit({"step": len(self.losses), "seconds": seconds, "loss": loss})

    def _reset_allocator_peak(self) -> None:
        import tensorflow as tf

        try:
            tf.config.experimental.reset_memory_stats(self._device)
        except ValueError:
            pass  # The allocator in use keeps no statistics.

    def _allocator_peak(self) -> int:
        """Return the peak in bytes; 0 if the allocator in use keeps no statistics."""
        import tensorflow as tf

        try:
            return tf.config.experimental.get_memory_info(self._device)["peak"]
        except ValueError:
            return 0
