"""The base of all callbacks: installs a rewritten step at the start of a training and takes it out at its end."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tflms_sft._keras.forward_step_patch import (
    CALLED,
    EVALUATION,
    PREDICTION,
    VALIDATION,
    ForwardInstallation,
    tiles_alone,
    why_plain,
)
from tflms_sft._keras.messages import forward_line, over_line, peak_line, start_line
from tflms_sft._keras.train_step_patch import TRAINING, StepKind, StepPatch
from tflms_sft._params.request import parse_request
from tflms_sft._params.tile_params import AutoParams
from tflms_sft._report.plan import Plan
from tflms_sft._report.plan_records import Measurement
from tflms_sft._report.tensorboard import TrainingLog, checked_log_dir, tensorboard_of_this_fit
from tflms_sft._rewrite.trained import Trained


class RewritingCallback(keras.callbacks.Callback):
    """Installs a rewritten step at the start of training and takes it out at the end."""

    def __init__(self, params: Any, batch_shape: Sequence[int] | None, verbose: int, log_dir: Any) -> None:
        super().__init__()
        self._rewrite_params = parse_request(params)
        self._batch_shape = checked_shape(batch_shape)
        self._verbose = checked_verbose(verbose)
        self._log_dir = checked_log_dir(log_dir)
        self._log: TrainingLog | None = None
        self._epoch = 0
        self._in_use: int | None = None
        self._peak: Measurement | None = None
        self._installation: StepPatch | None = None
        self._last_plan: Plan | None = None
        self._told_plain = ""
        self._forward: dict[StepKind, ForwardInstallation] = {}
        self._corrections: dict[Any, float] = {}
        self._forward_plans: dict[StepKind, Plan | None] = {}

    @property
    def plan(self) -> Plan | None:
        """The plan of the latest training; `None` before its first step."""
        return self._last_plan

    @property
    def evaluate_plan(self) -> Plan | None:
        """The plan of the latest evaluation or validation; `None` before its first step, and if it runs plain."""
        return self._forward_plans.get(EVALUATION)

    @property
    def predict_plan(self) -> Plan | None:
        """The plan of the latest prediction; `None` before its first step, and if it runs plain."""
        return self._forward_plans.get(PREDICTION)

    def on_train_begin(self, logs: Any = None) -> None:
        """Install."""
        self._last_plan = None
        self._told_plain = ""
        self._forward.clear()
        self._installation = StepPatch(
            self.model,
            self._rewrite_params,
            self._batch_shape,
            self._planned,
            self._measured,
            owner=f"the callback `{type(self).__name__}`",
            training=self.params or object(),  # All callbacks of a `fit` are given the same one.
            say=say if self._verbose else None,
            corrections=self._corrections,
        )
        self._installation.install()
        log = TrainingLog(self._log_dir, tensorboard_of_this_fit())
        self._log = log if log.active else None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Start to measure for TensorBoard."""
        self._epoch = epoch
        if self._log is not None and self._installation is not None:
            self._log.epoch_begins()
            self._peak = None
            self._in_use = self._installation.reset_peak()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Install again if another callback ran a training of its own."""
        if self._installation is not None:
            self._installation.resume()
        if self._log is not None:
            self._log.batch_begins()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Tell TensorBoard; validation comes after, and is not in the peak."""
        if self._log is not None and self._installation is not None:
            self._log.batch_ends(self._epoch, self._last_plan, self.model.steps_per_execution)
            self._peak = self._installation.peak_since(self._in_use)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Tell TensorBoard."""
        if self._log is not None:
            self._log.epoch_ends(epoch, self._last_plan, self._peak)

    def on_train_end(self, logs: Any = None) -> None:
        """Take out."""
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._installation is not None:
            self._installation.restore()
            self._installation = None  # It holds the graph.
        self._forward.clear()

    def on_test_begin(self, logs: Any = None) -> None:
        """Install for an evaluation, or the validation of a training."""
        self._begin(EVALUATION)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Install again if another callback ran an evaluation of its own."""
        self._resume(EVALUATION)

    def on_test_end(self, logs: Any = None) -> None:
        """Take out."""
        self._end(EVALUATION)

    def on_predict_begin(self, logs: Any = None) -> None:
        """Install for a prediction."""
        self._begin(PREDICTION)

    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Install again if another callback ran a prediction of its own."""
        self._resume(PREDICTION)

    def on_predict_end(self, logs: Any = None) -> None:
        """Take out."""
        self._end(PREDICTION)

    def _begin(self, kind: StepKind) -> None:
        training = self._installation is not None and self._installation.is_placed
        why = why_plain(self.model, self._rewrite_params)
        chosen = tiles_alone(self._rewrite_params)
        if why or chosen is None:
            self._forward.pop(kind, None)
            self._tell_plain(VALIDATION if training else CALLED[kind], why)
            return
        if not training or kind not in self._forward:
            self._forward_plans[kind] = None
            self._forward[kind] = ForwardInstallation(
                kind,
                training,
                self._take_out,
                self._tell,
                self.model,
                chosen,
                self._batch_shape,
                lambda plan: self._planned_forward(kind, plan),
                lambda plan: self._tell(over_line(CALLED[kind], plan)),
                f"the callback `{type(self).__name__}`",
                self.params or object(),
                say if self._verbose else None,
                self._corrections,
            )
        self._forward[kind].begin()

    def _resume(self, kind: StepKind) -> None:
        if kind in self._forward:
            self._forward[kind].resume()

    def _end(self, kind: StepKind) -> None:
        if kind in self._forward:
            self._forward[kind].restore()
            if self._installation is None:
                del self._forward[kind]

    def _take_out(self) -> None:
        """After a step has failed Keras calls no callback any more."""
        for installation in (*self._forward.values(), self._installation):
            if installation is not None:
                installation.restore()
        self._forward.clear()
        self._installation = None

    def _planned_forward(self, kind: StepKind, plan: Plan) -> None:
        self._forward_plans[kind] = plan
        forward = self._forward[kind]
        self._tell(forward_line(forward.called, plan, is_jit_off=forward.turned_off_jit))

    def _tell_plain(self, called: str, why: str) -> None:
        if called != self._told_plain:
            self._told_plain = called
            self._tell(f"tflms-sft: {called} runs plain, outside of the plan: {why}")

    def _tell(self, text: str) -> None:
        if self._verbose and text:
            print(text, flush=True)

    def _planned(self, plan: Plan) -> None:
        self._last_plan = plan
        if self._verbose:
            assert self._installation is not None
            say(started(self._installation, plan))

    def _measured(self, plan: Plan) -> None:
        if self._verbose:
            assert self._installation is not None
            self._tell(peak_line(plan, planned_again=self._installation.planned_again))


def trained_by(callback: Any, model: Any) -> Trained | None:
    """What a model was trained with; `None` for what is no callback that rewrites steps.

    Raises:
        ValueError: If it has trained nothing yet.
    """
    if not isinstance(callback, RewritingCallback):
        return None
    plan, chosen = callback.plan, callback._rewrite_params
    if plan is None:
        raise ValueError(
            f"`params` is a callback without a plan: there is one from the first step of a `fit` on. Received: "
            f"params={callback!r}. Train with it before, or give parameters, such as `AutoParams(...)`."
        )
    if isinstance(chosen.tiles, AutoParams):  # "auto" was what was free then.
        chosen = dataclasses.replace(chosen, tiles=dataclasses.replace(chosen.tiles, memory_budget=plan.memory_budget))
    return Trained(chosen, plan, callback._corrections.get((id(model), TRAINING.slot), 1.0))


def started(installation: StepPatch, plan: Plan) -> str:
    """Return the line that tells what a training does."""
    return start_line(plan, is_jit_off=installation.turned_off_jit, planning_time=installation.planning.text())


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def checked_shape(batch_shape: Sequence[int] | None) -> tuple[int, ...] | None:
    """`(batch, ..., channels)` as positive integers.

    Raises:
        TypeError: For another type.
        ValueError: For another length or numbers below one.
    """
    if batch_shape is None:
        return None
    expected = (
        "`batch_shape` must be (batch, height, width, channels), the shape of the largest batch of images, or that of "
        "a batch of volumes or sequences."
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
    """0 or 1.

    Raises:
        ValueError: For anything else.
    """
    if verbose not in (0, 1):
        raise ValueError(f"`verbose` must be 0 or 1. Received: verbose={verbose!r}.")
    return int(verbose)
