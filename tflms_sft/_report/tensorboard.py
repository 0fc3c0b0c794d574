"""TensorBoard logs of a training: peaks, swapped bytes, step times, and the plan.

A run of TensorBoard is a directory, in which it follows one file at a time. If a `keras.callbacks.TensorBoard` takes
part in the training, the log therefore goes into its file. The package `tensorboard`, which TensorFlow does not
install, is not needed, because summaries are written with explicit metadata.
"""

from __future__ import annotations

import io
import os
import sys
import textwrap
import time
from typing import Any

import keras
import tensorflow as tf

from tflms_sft._report.memory_chart import draw_plan
from tflms_sft._report.plan import Plan
from tflms_sft._report.plan_records import Measurement
from tflms_sft._util.keras_internals import training_writer

_SCALAR, _TENSOR, _BLOBS = 1, 2, 3
"""Values of `tensorboard.compat.proto.summary_pb2.DataClass`."""

_DESCRIPTIONS = {
    "memory/peak_bytes": "Measured peak of the bytes in use on the device, over the training steps of the epoch.",
    "memory/predicted_peak_bytes": "Predicted peak of the plan: everything alive, with weights and optimizer slots.",
    "memory/budget_bytes": "Budget of the plan.",
    "memory/swapped_bytes": "Bytes that each step swaps out of the device's memory.",
    "memory/plan": "Summary of the plan.",
    "memory/plan_picture": "Predicted memory in use over the time of a step; dotted: measured peak of the first step.",
    "time/step_seconds": "Mean time of a step, if possible without the first execution.",
}
"""Descriptions that TensorBoard displays beside a tag."""

_MAX_FRAMES = 12
"""Number of calling frames that are searched for the list of callbacks."""


def checked_log_dir(log_dir: Any) -> str | None:
    """Return the directory as a string, or `None`; refuse any other value."""
    if log_dir is not None and not isinstance(log_dir, (str, os.PathLike)):
        raise TypeError(
            f"`log_dir` must be a directory for TensorBoard, or None. Received: log_dir={log_dir!r} of type "
            f"{type(log_dir).__name__}."
        )
    return None if log_dir is None else os.fspath(log_dir)


def tensorboard_of_this_fit() -> Any:
    """Return the `keras.callbacks.TensorBoard` of the `fit` whose callback calls this function, or `None`.

    Keras gives callbacks no access to each other, but the list that calls them is on the call stack.
    """
    frame = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        caller = frame.f_locals.get("self")
        if isinstance(caller, keras.callbacks.CallbackList):
            boards = [c for c in caller.callbacks if isinstance(c, keras.callbacks.TensorBoard)]
            return boards[0] if boards else None
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


class TrainingLog:
    """Logs peaks, swapped bytes and step times of a training per epoch, and its plan once.

    Args:
        log_dir: Directory of the log; `None` for that of `board`.
        board: The `keras.callbacks.TensorBoard` of the training, or `None`.

    Attributes:
        active: Whether there is a directory to write to.
    """

    def __init__(self, log_dir: str | None, board: Any) -> None:
        same = board is not None and (log_dir is None or os.path.abspath(log_dir) == os.path.abspath(board.log_dir))
        self.board = board if same else None
        self._log_dir = log_dir if log_dir is not None or board is None else board.log_dir
        self.active = self._log_dir is not None
        self._own_writer: Any = None
        self._plan_is_written = False
        self._began = 0.0
        self._seconds: list[float] = []
        self._steps = 1

    def epoch_begins(self) -> None:
        """Discard the step times of the previous epoch."""
        self._seconds.clear()

    def batch_begins(self) -> None:
        """Start the clock of an execution."""
        self._began = time.perf_counter()

    def batch_ends(self, epoch: int, plan: Plan | None, steps: int) -> None:
        """Stop the clock after `steps` steps; write the plan after its first step, when it has been measured."""
        self._seconds.append(time.perf_counter() - self._began)
        self._steps = steps
        if plan is not None and not self._plan_is_written:
            self._plan_is_written = True
            self._write_plan(plan, epoch)

    def epoch_ends(self, epoch: int, plan: Plan | None, peak: Measurement | None) -> None:
        """Write a point of every curve; `peak` is `None` on devices without memory statistics."""
        if plan is None:
            return
        values = {
            "memory/peak_bytes": None if peak is None else peak.peak_bytes,
            "memory/predicted_peak_bytes": plan.predicted.peak_bytes,
            "memory/budget_bytes": plan.memory_budget,
            "memory/swapped_bytes": plan.swapped_bytes,
            "time/step_seconds": self._step_seconds(),
        }
        with self._writer().as_default(), tf.summary.record_if(True):
            for tag, value in values.items():
                if value is not None:
                    _write(tag, tf.constant(value, tf.float32), epoch, "scalars", _SCALAR)
            tf.summary.flush()

    def close(self) -> None:
        """Close the writer, unless it belongs to the Keras callback."""
        if self._own_writer is not None:
            self._own_writer.close()

    def _step_seconds(self) -> float | None:
        """Return the mean step time, if possible without the first execution, which may include planning."""
        counted = self._seconds[1:] or self._seconds
        return sum(counted) / (len(counted) * self._steps) if counted else None

    def _write_plan(self, plan: Plan, epoch: int) -> None:
        with self._writer().as_default(), tf.summary.record_if(True):
            text = textwrap.indent(plan.summary(), "    ")  # A code block in Markdown.
            _write("memory/plan", tf.constant([text]), epoch, "text", _TENSOR)
            chart = _chart(plan)
            if chart is not None:
                _write("memory/plan_picture", tf.constant(chart), epoch, "images", _BLOBS)
            tf.summary.flush()

    def _writer(self) -> Any:
        """Return the writer of the Keras callback, or one for a run of the same log directory."""
        shared = training_writer(self.board)
        if shared is not None:
            return shared
        if self._own_writer is None:
            # A run of its own, because TensorBoard follows only the newer of two files in a run.
            run = "train" if self.board is None else "tflms-sft"
            self._own_writer = tf.summary.create_file_writer(os.path.join(str(self._log_dir), run))
        return self._own_writer


def _write(tag: str, tensor: Any, step: int, plugin: str, data_class: int) -> None:
    metadata = tf.compat.v1.SummaryMetadata(data_class=data_class, summary_description=_DESCRIPTIONS[tag])
    metadata.plugin_data.plugin_name = plugin
    tf.summary.write(tag, tensor, step=step, metadata=metadata)


def _chart(plan: Plan) -> list[bytes] | None:
    """Return width, height and PNG of the chart, the format of TensorBoard images; `None` without matplotlib."""
    try:
        figure = draw_plan(plan, None, None, plan.measured)
    except ImportError:
        return None
    pixels = io.BytesIO()
    figure.savefig(pixels, format="png", dpi=110)
    width, height = (round(110 * size) for size in figure.get_size_inches())
    return [str(width).encode(), str(height).encode(), pixels.getvalue()]
