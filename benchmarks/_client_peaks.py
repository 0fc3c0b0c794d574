"""A callback that measures the peak and the time of training steps."""

from __future__ import annotations

import statistics
import time
from typing import Any

import keras
import tensorflow as tf

DEVICE = "CPU:0"


class PeakOfSteps(keras.callbacks.Callback):
    """Measures each step by the allocator's statistics, which count all tensors of the process.

    Attributes:
        peak_bytes: Peak of all steps so far.
        loss: Loss of the last step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self.loss = float("nan")
        self._seconds: list[float] = []
        self._begun = 0.0

    @property
    def step_seconds(self) -> float:
        """Median time of the steps behind the first one, which is traced."""
        return statistics.median(self._seconds[1:] or self._seconds)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Start a measurement."""
        tf.config.experimental.reset_memory_stats(DEVICE)
        self._begun = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """End a measurement."""
        self.loss = float((logs or {}).get("loss", float("nan")))
        self._seconds.append(time.monotonic() - self._begun)
        self.peak_bytes = max(self.peak_bytes, tf.config.experimental.get_memory_info(DEVICE)["peak"])
