"""A callback that measures the peak and the time of training steps."""

from __future__ import annotations

import statistics
import time
from typing import Any

import keras
import tensorflow as tf

from tflms_sft._keras.rewriting_callback import RewritingCallback

DEVICE = "CPU:0"


class PeakOfSteps(keras.callbacks.Callback):
    """Measures each step with the allocator's statistics.

    Swaps reset these statistics while a step runs. The peaks of a rewritten step are therefore those that its callback
    measures.

    Args:
        rewriting: Callback that rewrites the step; `None` for plain training.

    Attributes:
        peak_bytes: Peak of all steps so far.
        loss: Loss of the last step.
    """

    def __init__(self, rewriting: RewritingCallback | None = None) -> None:
        super().__init__()
        self._rewriting = rewriting
        self.peak_bytes = 0
        self.loss = float("nan")
        self._seconds: list[float] = []
        self._begun = 0.0

    @property
    def step_seconds(self) -> float:
        """Median time of all steps but the first, which includes tracing."""
        return statistics.median(self._seconds[1:] or self._seconds)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Start a measurement."""
        tf.config.experimental.reset_memory_stats(DEVICE)
        self._begun = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """End a measurement."""
        self.loss = float((logs or {}).get("loss", float("nan")))
        self._seconds.append(time.monotonic() - self._begun)
        self.peak_bytes = max(self.peak_bytes, self._peak())

    def _peak(self) -> int:
        if self._rewriting is None or self._rewriting._patch is None:
            return int(tf.config.experimental.get_memory_info(DEVICE)["peak"])
        highest = self._rewriting._patch.watch.highest
        return 0 if highest is None else highest.peak_bytes
