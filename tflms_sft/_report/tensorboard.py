"""What a training does with memory, written for TensorBoard, next to its losses.

A run of TensorBoard is a directory, of which it follows one file at a time. So where a `keras.callbacks.TensorBoard`
takes part in the training, everything goes into the file that it writes its losses to. The `tensorboard` package,
which TensorFlow does not install, is not needed: summaries are written with their metadata.
"""

from __future__ import annotations

import io
import os
import sys
import time
from typing import Any

import keras
import tensorflow as tf

from tflms_sft._report.memory_chart import draw_plan
from tflms_sft._report.plan import Plan
from tflms_sft._report.plan_records import Measurement

_SCALAR, _TENSOR, _BLOBS = 1, 2, 3
"""Classes of data, of `tensorboard.compat.proto.summary_pb2.DataClass`."""

_MOST_FRAMES = 12


def checked_log_dir(log_dir: Any) -> str | None:
    """A path, or `None`.

    Raises:
        TypeError: For anything else.
    """
    if log_dir is not None and not isinstance(log_dir, (str, os.PathLike)):
        raise TypeError(
            f"`log_dir` must be a directory for TensorBoard, or None. Received: log_dir={log_dir!r} of type "
            f"{type(log_dir).__name__}."
        )
    return None if log_dir is None else os.fspath(log_dir)


def tensorboard_of_this_fit() -> Any:
    """The `keras.callbacks.TensorBoard` of the training that calls this from a callback; `None` without one.

    Callbacks are not told of each other; the list that calls them is among the callers.
    """
    frame = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        found = frame.f_locals.get("self")
        if isinstance(found, keras.callbacks.CallbackList):
            boards = [c for c in found.callbacks if isinstance(c, keras.callbacks.TensorBoard)]
            return boards[0] if boards else None
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


class TrainingLog:
    """Peaks, swaps and times of a training, epoch by epoch, and its plan.

    Attributes:
        active: Whether anything is written.
    """

    def __init__(self, log_dir: str | None, board: Any) -> None:
        """Write to the training run of a log directory, or to that of a `keras.callbacks.TensorBoard`."""
        same = board is not None and (log_dir is None or os.path.abspath(log_dir) == os.path.abspath(board.log_dir))
        self._board = board if same else None
        self._log_dir = log_dir if log_dir is not None or board is None else board.log_dir
        self.active = self._log_dir is not None
        self._own: Any = None
        self._told = False
        self._began = 0.0
        self._seconds: list[float] = []
        self._steps = 1

    def epoch_begins(self) -> None:
        """Forget the steps of the last epoch."""
        self._seconds.clear()

    def batch_begins(self) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def batch_ends(self, epoch: int, plan: Plan | None, steps: int) -> None:
        """Stop it after so many steps; the plan is written once, when its first step has been measured."""
        self._seconds.append(time.perf_counter() - self._began)
        self._steps = steps
        if plan is not None and not self._told:
            self._told = True
            self._write_plan(plan, epoch)

    def epoch_ends(self, epoch: int, plan: Plan | None, peak: Measurement | None) -> None:
        """Write a point of every curve; `peak` is that of the epoch, `None` where the device keeps no statistics."""
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
        """Close the own writer; that of Keras is closed by its callback."""
        if self._own is not None:
            self._own.close()

    def _step_seconds(self) -> float | None:
        """Mean of the epoch, without its first call if there are more: it may have traced and planned."""
        counted = self._seconds[1:] or self._seconds
        return sum(counted) / (len(counted) * self._steps) if counted else None

    def _write_plan(self, plan: Plan, epoch: int) -> None:
        with self._writer().as_default(), tf.summary.record_if(True):
            text = "\n".join(f"    {line}" for line in plan.summary().splitlines())  # Markdown's code.
            _write("memory/plan", tf.constant([text]), epoch, "text", _TENSOR)
            picture = _picture(plan)
            if picture is not None:
                _write("memory/plan_picture", tf.constant(picture), epoch, "images", _BLOBS)
            tf.summary.flush()

    def _writer(self) -> Any:
        """That of the losses, or one for the same place in a log directory."""
        shared = getattr(self._board, "_train_writer", None)
        if shared is not None:
            return shared
        if self._own is None:
            # Without a file to share, a run of its own: of two files in one run TensorBoard follows the newer.
            run = "train" if self._board is None else "tflms-sft"
            self._own = tf.summary.create_file_writer(os.path.join(str(self._log_dir), run))
        return self._own


def _write(tag: str, tensor: Any, step: int, plugin: str, data_class: int) -> None:
    metadata = tf.compat.v1.SummaryMetadata(data_class=data_class)
    metadata.plugin_data.plugin_name = plugin
    tf.summary.write(tag, tensor, step=step, metadata=metadata)


def _picture(plan: Plan) -> list[bytes] | None:
    """Width, height and PNG of the plan's picture, as TensorBoard has images; `None` without matplotlib."""
    try:
        figure = draw_plan(plan, None, None, plan.measured)
    except ImportError:
        return None
    pixels = io.BytesIO()
    figure.savefig(pixels, format="png", dpi=110)
    width, height = (round(110 * size) for size in figure.get_size_inches())
    return [str(width).encode(), str(height).encode(), pixels.getvalue()]
