"""Keras callbacks, and a context manager for hand-written loops."""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tflms_sft._inference import (
    CALLED,
    EVALUATION,
    PREDICTION,
    VALIDATION,
    ForwardInstallation,
    forward_line,
    over_line,
    tiles_alone,
    why_plain,
)
from tflms_sft._install import TRAINING, Installation, Kind, peak_line, start_line
from tflms_sft._lms_params import SwapParams
from tflms_sft._lost import check_workers, refuse_lost
from tflms_sft._params import AUTO, AutoParams, SegmentSpec, SFTParams
from tflms_sft._pipeline_params import PipelineParams
from tflms_sft._plan import Plan
from tflms_sft._plan_records import Measurement
from tflms_sft._request import chosen_of
from tflms_sft._saves import Saves, watch_saves
from tflms_sft._tensorboard import TrainingLog, checked_log_dir, tensorboard_of_this_fit
from tflms_sft._trained import Trained


class _Rewriting(keras.callbacks.Callback):
    """Installs a rewritten step at the start of training and takes it out at the end."""

    def __init__(self, params: Any, batch_shape: Sequence[int] | None, verbose: int, log_dir: Any) -> None:
        super().__init__()
        self._rewrite_params = chosen_of(params)
        self._batch_shape = checked_shape(batch_shape)
        self._verbose = checked_verbose(verbose)
        self._log_dir = checked_log_dir(log_dir)
        self._log: TrainingLog | None = None
        self._epoch = 0
        self._in_use: int | None = None
        self._peak: Measurement | None = None
        self._installation: Installation | None = None
        self._last_plan: Plan | None = None
        self._told_plain = ""
        self._forward: dict[Kind, ForwardInstallation] = {}
        self._corrections: dict[Any, float] = {}
        self._forward_plans: dict[Kind, Plan | None] = {}

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
        self._installation = Installation(
            self.model,
            self._rewrite_params,
            self._batch_shape,
            self._planned,
            self._measured,
            owner=f"the callback `{type(self).__name__}`",
            training=self.params or object(),  # All callbacks of a `fit` are given the same one.
            say=_say if self._verbose else None,
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

    def _begin(self, kind: Kind) -> None:
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
                _say if self._verbose else None,
                self._corrections,
            )
        self._forward[kind].begin()

    def _resume(self, kind: Kind) -> None:
        if kind in self._forward:
            self._forward[kind].resume()

    def _end(self, kind: Kind) -> None:
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

    def _planned_forward(self, kind: Kind, plan: Plan) -> None:
        self._forward_plans[kind] = plan
        self._tell(forward_line(self._forward[kind]))

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
            print(start_line(self._installation), flush=True)

    def _measured(self, plan: Plan) -> None:
        if self._verbose:
            assert self._installation is not None
            self._tell(peak_line(self._installation))


def trained_by(callback: Any, model: Any) -> Trained | None:
    """What a model was trained with; `None` for what is no callback that rewrites steps.

    Raises:
        ValueError: If it has trained nothing yet.
    """
    if not isinstance(callback, _Rewriting):
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


def _say(text: str) -> None:
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


class MemoryBudget(_Rewriting):
    """Train, evaluate or predict within a memory budget, with the same results to rounding.

    Args:
        memory_budget: Most bytes alive on the device at any moment of a step, weights and optimizer
            slots included: an int, or a string such as `"8GiB"` (B, kB, MB, GB, TB, KiB, MiB, GiB, TiB). Defaults to
            `"auto"`: 90 % of what the device, or on a CPU the machine, has free.
        headroom: Part of the budget that the prediction leaves free. Defaults to 0.1.
        swap: Whether activations may go to host memory or disk where tiles do not do, or would cost much: a bool, or
            `LMSParams` that say which, and where to. Defaults to `True`.
        batch_shape: `(batch, height, width, channels)` of the largest batch, or as many sizes as its images have.
            Defaults to `None`: that of the first batch.
        verbose: 0 prints nothing, 1 one line at the start and one after the first step, and one while a plan is
            searched for if that takes long. Defaults to 1.
        log_dir: Directory for TensorBoard. Defaults to `None`: that of a `keras.callbacks.TensorBoard` in the same
            `fit`, if there is one.

    Attributes:
        plan: What was done to the training; see `Plan.summary()`.
        evaluate_plan: What was done to `evaluate`, or to the validation of a `fit`.
        predict_plan: What was done to `predict`.

    Raises:
        BudgetError: In the first step, if no plan fits; it names the smallest budget that works. After the second, if
            the first was measured to need more than the budget, was planned again with what was measured, and needs
            more still.
        RewriteError: In the first step, for a model that cannot be rewritten.
        TypeError: For a value of the wrong type.
        ValueError: For a wrong value.

    Example:
    >>> model.fit(data, callbacks=[tflms_sft.MemoryBudget("8GiB")])
    """

    def __init__(
        self,
        memory_budget: Any = AUTO,
        *,
        headroom: float = 0.1,
        swap: bool | SwapParams = True,
        batch_shape: Sequence[int] | None = None,
        verbose: int = 1,
        log_dir: Any = None,
    ) -> None:
        super().__init__(AutoParams(memory_budget, headroom, swap), batch_shape, verbose, log_dir)


class SFT(_Rewriting):
    """Train, evaluate or predict with segmented fused-tiled execution, as told.

    Args:
        num_tiles: Number of tiles along the exit of each segment, such as `(height, width)`, or `"auto"`, the default;
            `SFTParams` has all forms.
        segments: `"auto"`, the default, or a list of `SegmentSpec`.
        memory_capacity: Bytes that a turn of a loop may need: an int, or a string such as `"1GiB"`; see `SFTParams`.
            Defaults to `None`.
        halo: `"recompute"`, the default: each tile computes what it shares with its neighbours; or `"carry"`: rows of
            full width hand it on.
        backward_num_tiles: Number of tiles of the backward loops. Defaults to `None`: `num_tiles`.
        batch_shape: `(batch, height, width, channels)` of the largest batch, or as many sizes as its images have.
            Defaults to `None`: that of the first batch.
        verbose: 0 prints nothing, 1 one line at the start and one after the first step, and one while a plan is
            searched for if that takes long. Defaults to 1.
        log_dir: Directory for TensorBoard. Defaults to `None`: that of a `keras.callbacks.TensorBoard` in the same
            `fit`, if there is one.

    Attributes:
        plan: What was done to the training; see `Plan.summary()`.
        evaluate_plan: What was done to `evaluate`, or to the validation of a `fit`.
        predict_plan: What was done to `predict`.

    Raises:
        SegmentError: In the first step, for a named segment that cannot be tiled.
        RewriteError: In the first step, for a model that cannot be rewritten.
        TypeError: For a value of the wrong type.
        ValueError: For a wrong value; in the first step also for more tiles than an exit has rows.

    Example:
    >>> spec = tflms_sft.SegmentSpec("input_layer", "block3_pool", num_tiles=(4, 4))
    >>> model.fit(data, callbacks=[tflms_sft.SFT(segments=[spec])])
    """

    def __init__(
        self,
        num_tiles: Any = "auto",
        segments: str | Sequence[SegmentSpec] = "auto",
        memory_capacity: Any = None,
        halo: str = "recompute",
        backward_num_tiles: Any = None,
        *,
        batch_shape: Sequence[int] | None = None,
        verbose: int = 1,
        log_dir: Any = None,
    ) -> None:
        params = SFTParams(num_tiles, segments, memory_capacity, halo, backward_num_tiles)
        super().__init__(params, batch_shape, verbose, log_dir)


class LMS(_Rewriting):
    """Train with swapping to host memory or disk (TFLMS), as told.

    Args:
        tiles: `SFTParams` to tile with before; what is left between the segments is swapped. Defaults to `None`.
        batch_shape: `(batch, height, width, channels)` of the largest batch, or as many sizes as its images have.
            Defaults to `None`: that of the first batch.
        verbose: 0 prints nothing, 1 one line at the start and one after the first step, and one while a plan is
            searched for if that takes long. Defaults to 1.
        log_dir: Directory for TensorBoard. Defaults to `None`: that of a `keras.callbacks.TensorBoard` in the same
            `fit`, if there is one.
        **params: As in `LMSParams`.

    Attributes:
        plan: What was done to the training; see `Plan.summary()`.
        evaluate_plan: What was done to `evaluate`, or to the validation of a `fit`.
        predict_plan: What was done to `predict`.

    Raises:
        SwapError: In the first step, if nothing can be swapped as asked for.
        RewriteError: In the first step, for a model that cannot be rewritten.
        TypeError: For a value of the wrong type.
        ValueError: For a wrong value, and a directory that cannot be written to.

    Example:
    >>> model.fit(data, callbacks=[tflms_sft.LMS(tier="disk", spill_dir="/scratch")])
    """

    def __init__(
        self,
        *,
        tiles: SFTParams | None = None,
        batch_shape: Sequence[int] | None = None,
        verbose: int = 1,
        log_dir: Any = None,
        **params: Any,
    ) -> None:
        if not isinstance(tiles, SFTParams | None):
            raise TypeError(f"`tiles` must be `SFTParams(...)` or None. Received: tiles={tiles!r}.")
        swaps = SwapParams(**params)
        super().__init__(swaps if tiles is None else [tiles, swaps], batch_shape, verbose, log_dir)


class Pipeline(_Rewriting):
    """Train in stages on several devices, as told.

    The first batch has to be a multiple of the number of micro-batches; a later one of another size, such as the last
    one of an epoch, runs as one micro-batch. `evaluate`, `predict` and validation run plain.

    Args:
        stages: Number of stages, `"auto"`, the default, or a list of names to cut at; see `PipelineParams`.
        schedule: `"basic"`, the default, `"gpipe"`, `"1f1b"`, `"mast"` or `"master"`.
        micro_batches: Parts that a batch is cut into; η of MASTER. Defaults to 1.
        devices: Names of devices, one for each stage. Defaults to `None`: the GPUs in order, on a machine without any
            the logical CPUs.
        data_replicas: Copies of the pipeline beside each other. Defaults to 1.
        loss_reduction: Whether losses are a `"mean"` over the batch, the default, or a `"sum"`.
        batch_norm: `"refuse"`, the default, or `"micro"`: layers that join samples of a batch work on micro-batches.
        placement: `"check"`, the default: variables must lie on the device of their stage. `"copy"`: stages read them
            from where they are.
        tiles: `SFTParams` by which stages run tile by tile. Defaults to `None`.
        swaps: `LMSParams` by which tensors leave the devices between their stages' forward and backward phase. Defaults
            to `None`.
        verbose: 0 prints nothing, 1 one line at the start, and one while a plan is made if that takes long. Defaults
            to 1.
        log_dir: Directory for TensorBoard. Defaults to `None`: that of a `keras.callbacks.TensorBoard` in the same
            `fit`, if there is one.

    Attributes:
        plan: What was done to the training; see `Plan.summary()`.
        evaluate_plan: `None`.
        predict_plan: `None`.

    Raises:
        PipelineError: In the first step, for a model that cannot be cut or put together again as asked for.
        RewriteError: In the first step, for a model that cannot be rewritten.
        TypeError: For a value of the wrong type.
        ValueError: For a wrong value; in the first step also for devices that do not exist, and for a batch that
            micro-batches do not cut evenly.
        WorkerError: In the step in which a machine is lost, or at the end of an epoch; it names the machine.

    Example:
    >>> cuts = tflms_sft.stage_devices(model, 4)
    >>> model.compile("adam", "mse")
    >>> model.fit(data, callbacks=[tflms_sft.Pipeline(cuts, "1f1b", micro_batches=8)])
    """

    def __init__(
        self,
        stages: Any = "auto",
        schedule: str = "basic",
        micro_batches: int = 1,
        devices: Any = None,
        data_replicas: int = 1,
        *,
        loss_reduction: str = "mean",
        batch_norm: str = "refuse",
        placement: str = "check",
        tiles: SFTParams | None = None,
        swaps: SwapParams | None = None,
        verbose: int = 1,
        log_dir: Any = None,
    ) -> None:
        if not isinstance(tiles, SFTParams | None):
            raise TypeError(f"`tiles` must be `SFTParams(...)` or None. Received: tiles={tiles!r}.")
        if not isinstance(swaps, SwapParams | None):
            raise TypeError(f"`swaps` must be `LMSParams(...)` or None. Received: swaps={swaps!r}.")
        params = PipelineParams(
            stages, schedule, micro_batches, devices, data_replicas, loss_reduction, batch_norm, placement
        )
        super().__init__([item for item in (tiles, swaps, params) if item is not None], None, verbose, log_dir)
        self._saves: Saves | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Install, and see to it that a backup is whole, or that from before.

        Args:
            logs: Keras's; not used.

        Raises:
            WorkerError: If a worker was lost before in this process.
        """
        refuse_lost()
        super().on_train_begin(logs)
        self._saves = watch_saves(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Also see whether all workers are there: what comes next may be a callback that reads weights from them.

        Args:
            epoch: Its number.
            logs: Keras's; not used.

        Raises:
            WorkerError: If some do not answer.
        """
        super().on_epoch_end(epoch, logs)
        try:
            check_workers()
        except BaseException:
            self._take_out()
            raise

    def on_train_end(self, logs: Any = None) -> None:
        """Take out.

        Args:
            logs: Keras's; not used.
        """
        super().on_train_end(logs)
        if self._saves is not None:
            self._saves.remove()
            self._saves = None


@contextlib.contextmanager
def budget(
    model: Any,
    memory_budget: Any = AUTO,
    *,
    headroom: float = 0.1,
    swap: bool | SwapParams = True,
    batch_shape: Sequence[int] | None = None,
    verbose: int = 1,
) -> Iterator[Installation]:
    """Rewrite a model's train step for `train_on_batch` and hand-written loops over `model.train_step`.

    Args:
        model: A compiled Keras model with weights.
        memory_budget: Most bytes alive on the device at any moment of a step: an int, a string such as `"8GiB"`, or
            `"auto"`, the default, as in `MemoryBudget`.
        headroom: Part of the budget that the prediction leaves free. Defaults to 0.1.
        swap: Whether activations may be swapped, or `LMSParams`. Defaults to `True`.
        batch_shape: `(batch, height, width, channels)` of the largest batch. Defaults to `None`: that of the first.
        verbose: 0 prints nothing. Defaults to 1.

    Yields:
        An object whose `plan` is set after the first step.

    Raises:
        BudgetError: In the first step, if no plan fits.
        RewriteError: For a model that cannot be rewritten.
        TypeError: For a value of the wrong type.
        ValueError: For a wrong value, and if something else rewrites the model at the time.

    Example:
    >>> with tflms_sft.budget(model, "2GiB"):
    ...     for images, labels in data:
    ...         model.train_on_batch(images, labels)
    """
    installation: Installation
    verbose = checked_verbose(verbose)

    def planned(plan: Plan) -> None:
        if verbose:
            print(start_line(installation), flush=True)

    def measured(plan: Plan) -> None:
        if verbose:
            print(peak_line(installation), flush=True)

    params = chosen_of(AutoParams(memory_budget, headroom, swap))
    say = _say if verbose else None
    shape = checked_shape(batch_shape)
    installation = Installation(model, params, shape, planned, measured, owner="`budget`", say=say)
    installation.install()
    try:
        yield installation
    finally:
        installation.restore()
