"""The base class of all callbacks, and the checks of their common arguments."""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tflms_sft._keras.forward_step_patch import (
    CALLED,
    VALIDATION,
    ForwardStepPatch,
    forward_request,
    reason_not_rewritten,
)
from tflms_sft._keras.messages import eager_line
from tflms_sft._keras.model_checks import check_trainer, reason_runs_eagerly
from tflms_sft._keras.peak_watch import PeakWatch, check_eager_step
from tflms_sft._keras.step_planner import Excesses
from tflms_sft._keras.train_step_patch import StepPatch
from tflms_sft._params.request import parse_request
from tflms_sft._report.plan import Plan
from tflms_sft._report.plan_records import Measurement
from tflms_sft._report.tensorboard import TrainingLog, checked_log_dir, tensorboard_of_this_fit
from tflms_sft._rewrite.trained import Trained
from tflms_sft._util.keras_internals import EVALUATION, PREDICTION, TRAINING, StepKind


class RewritingCallback(keras.callbacks.Callback):
    """Installs a rewritten step when training, evaluation or prediction begins, and restores the model at the end.

    Args:
        params: Parameter objects, as for `tflms_sft.rewrite`.
        batch_shape: Shape of the largest batch of images; `None` for that of the first batch.
        verbose: 0 prints nothing, 1 prints lines about plans and peaks.
        log_dir: Directory for TensorBoard, or `None`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.
    """

    def __init__(self, params: Any, *, batch_shape: Sequence[int] | None, verbose: int, log_dir: Any) -> None:
        super().__init__()
        self._request = parse_request(params)
        self._batch_shape = checked_shape(batch_shape)
        self._verbose = checked_verbose(verbose)
        self._log_dir = checked_log_dir(log_dir)
        self._log: TrainingLog | None = None
        self._epoch = 0
        self._peak: Measurement | None = None
        self._patch: StepPatch | None = None
        self._eager_watch: PeakWatch | None = None
        self._last_plan: Plan | None = None
        self._announced = ""
        self._forward_patches: dict[StepKind, ForwardStepPatch] = {}
        self._excesses = Excesses()
        self._forward_plans: dict[StepKind, Plan | None] = {}

    @property
    def plan(self) -> Plan | None:
        """Plan of the latest training, of the size planned last; `None` before its first step."""
        return self._last_plan

    @property
    def evaluate_plan(self) -> Plan | None:
        """Plan of the latest evaluation or validation; `None` before its first step and if it is not rewritten."""
        return self._forward_plans.get(EVALUATION)

    @property
    def predict_plan(self) -> Plan | None:
        """Plan of the latest prediction; `None` before its first step and if it is not rewritten."""
        return self._forward_plans.get(PREDICTION)

    def on_train_begin(self, logs: Any = None) -> None:
        """Install the patch of the train step."""
        self._last_plan = None
        self._announced = ""
        self._forward_patches.clear()
        check_trainer(self.model)
        reason = reason_runs_eagerly(self.model)
        self._eager_watch = PeakWatch() if reason and self._request.budget else None
        if self._eager_watch is not None:  # Its first step is compared with the budget.
            self._print(eager_line(reason))
            return
        self._patch = StepPatch(self.model, self._request, on_plan=self._set_plan, **self._patch_options())
        self._patch.installer.install()
        log = TrainingLog(self._log_dir, tensorboard_of_this_fit())
        self._log = log if log.active else None

    def _set_plan(self, plan: Plan) -> None:
        self._last_plan = plan

    def _patch_options(self) -> dict[str, Any]:
        """Return the keyword arguments that the patches of all steps share."""
        return {
            "batch_shape": self._batch_shape,
            "owner": f"the callback `{type(self).__name__}`",
            "training": self.params or object(),  # Keras gives all callbacks of a `fit` the same object.
            "say": say if self._verbose else None,
            "excesses": self._excesses,
        }

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Plan again if a step of the previous epoch exceeded the budget, and start the measurement of an epoch."""
        self._epoch = epoch
        if self._patch is not None:
            self._patch.begin_epoch()
        if self._log is not None:
            self._log.epoch_begins()
            self._peak = None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Install the patch again if another callback ran a training of its own."""
        if self._patch is not None:
            self._patch.installer.resume()
        if self._log is not None:
            self._log.batch_begins()
        if self._eager_watch is not None:
            self._eager_watch.start(())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Log a batch for TensorBoard; the peak is read before validation, which it excludes."""
        if self._eager_watch is not None and self._request.budget is not None:
            watch, self._eager_watch = self._eager_watch, None
            check_eager_step(self.model, self._request.budget, watch)
        if self._log is not None and self._patch is not None:
            self._log.batch_ends(self._epoch, self._patch.plan, self.model.steps_per_execution)
            self._peak = self._patch.watch.highest

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log an epoch for TensorBoard."""
        if self._log is not None:
            self._log.epoch_ends(epoch, self._last_plan, self._peak)

    def on_train_end(self, logs: Any = None) -> None:
        """Restore the model."""
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._patch is not None:
            self._patch.installer.restore()
            self._patch = None  # Frees the graph.
        self._eager_watch = None
        self._forward_patches.clear()

    def _begin_forward(self, kind: StepKind, logs: Any = None) -> None:
        """Install the patch for an evaluation, a prediction, or the validation of a training."""
        within_fit = self._patch is not None and self._patch.installer.is_installed
        reason = reason_not_rewritten(self.model, self._request)
        if reason:
            self._forward_patches.pop(kind, None)
            self._announce_not_rewritten(VALIDATION if within_fit else CALLED[kind], reason)
            return
        if within_fit and kind in self._forward_patches:  # A `fit` validates after every epoch.
            self._forward_patches[kind].installer.resume()
            return
        self._forward_plans[kind] = None
        self._forward_patches[kind] = ForwardStepPatch(
            self.model,
            forward_request(self._request),
            kind,
            within_fit=within_fit,
            on_failure=self._remove_patches,
            on_plan=functools.partial(self._forward_plans.__setitem__, kind),
            **self._patch_options(),
        )
        self._forward_patches[kind].installer.install()

    def _resume_forward(self, kind: StepKind, batch: int, logs: Any = None) -> None:
        """Install the patch again if another callback ran an evaluation or a prediction of its own."""
        if kind in self._forward_patches:
            self._forward_patches[kind].installer.resume()

    def _end_forward(self, kind: StepKind, logs: Any = None) -> None:
        """Restore the model."""
        if kind in self._forward_patches:
            self._forward_patches[kind].installer.restore()
            if self._patch is None:
                del self._forward_patches[kind]

    on_test_begin = functools.partialmethod(_begin_forward, EVALUATION)
    on_test_batch_begin = functools.partialmethod(_resume_forward, EVALUATION)
    on_test_end = functools.partialmethod(_end_forward, EVALUATION)
    on_predict_begin = functools.partialmethod(_begin_forward, PREDICTION)
    on_predict_batch_begin = functools.partialmethod(_resume_forward, PREDICTION)
    on_predict_end = functools.partialmethod(_end_forward, PREDICTION)

    def _remove_patches(self) -> None:
        """Restore the model after a failed step, because Keras calls no callback then."""
        for patch in (*self._forward_patches.values(), self._patch):
            if patch is not None:
                patch.installer.restore()
        self._forward_patches.clear()
        self._patch = None

    def _announce_not_rewritten(self, called: str, reason: str) -> None:
        if called != self._announced:
            self._announced = called
            self._print(f"tflms-sft: {called} is not rewritten: {reason}")

    def _print(self, text: str) -> None:
        if self._verbose:
            say(text)


def trained_by(callback: Any, model: Any) -> Trained | None:
    """Return the request and the plan that a callback trained a model with; `None` for any other object.

    Raises:
        ValueError: If the callback has trained nothing yet.
    """
    if not isinstance(callback, RewritingCallback):
        return None
    plan, request = callback.plan, callback._request
    if plan is None:
        raise ValueError(
            f"`params` must be a callback that has trained, because its plan is made in the first step of a `fit`. "
            f"Received: params={callback!r}. Train with it first, or pass parameters, such as `AutoParams(...)`."
        )
    if request.budget is not None:  # "auto" depends on the memory that was free then.
        tiles = dataclasses.replace(request.budget, memory_budget=plan.memory_budget)
        request = dataclasses.replace(request, tiles=tiles)
    return Trained(request, plan, callback._excesses.of(model, TRAINING))


def say(text: str) -> None:
    """Print a line without buffering."""
    print(text, flush=True)


def checked_shape(batch_shape: Sequence[int] | None) -> tuple[int, ...] | None:
    """Return `(batch, ..., channels)` as positive integers, or `None`.

    Raises:
        TypeError: If it is not a sequence of integers.
        ValueError: If it has not three to five sizes, or one below 1.
    """
    if batch_shape is None:
        return None
    expected = (
        "`batch_shape` must be (batch, height, width, channels) of the largest batch, for volumes (batch, depth, "
        "height, width, channels), for sequences (batch, length, channels)."
    )
    if isinstance(batch_shape, tf.TensorShape) and batch_shape.rank is not None:
        batch_shape = batch_shape.as_list()
    if not isinstance(batch_shape, (tuple, list)) or not all(
        isinstance(size, numbers.Integral) and not isinstance(size, bool) for size in batch_shape
    ):
        raise TypeError(f"{expected} Received: batch_shape={batch_shape!r}.")
    if len(batch_shape) not in (3, 4, 5) or min(batch_shape) < 1:
        raise ValueError(f"{expected} Received: batch_shape={batch_shape!r}.")
    return tuple(map(int, batch_shape))


def checked_verbose(verbose: int) -> int:
    """Return 0 or 1.

    Raises:
        ValueError: If it is anything else.
    """
    if verbose not in (0, 1):
        raise ValueError(f"`verbose` must be 0 or 1. Received: verbose={verbose!r}.")
    return int(verbose)
