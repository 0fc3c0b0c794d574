"""The public callbacks: `MemoryBudget`, `SFT`, `LMS`, `Pipeline`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from tflms_sft._cluster.backup_guard import BackupGuard, guard_backups
from tflms_sft._cluster.worker_watch import check_workers, refuse_lost
from tflms_sft._keras.rewriting_callback import RewritingCallback
from tflms_sft._params.pipeline_params import PipelineParams
from tflms_sft._params.swap_params import SwapParams
from tflms_sft._params.tile_params import AutoParams, SegmentSpec, SFTParams
from tflms_sft._rewrite.swap_tuning import LMSParams


class MemoryBudget(RewritingCallback):
    """Train, evaluate or predict within a memory budget; results equal those without it up to rounding.

    Before the first step, the planner selects the fastest predicted combination of tile loops and swaps whose peak
    keeps the budget. If the measured peak of the first step exceeds the budget, the planner corrects its memory model
    and plans again. The callback can be used for several trainings.

    Args:
        memory_budget: Upper bound for the bytes alive on the device at any moment of a step, weights and optimizer
            slots included. An int, or a string such as `"8GiB"` (units B, kB, MB, GB, TB, KiB, MiB, GiB, TiB).
            More than TensorFlow may allocate on a GPU is reduced to that. `"auto"`: 90 % of the memory that is free
            when the first step is planned, on the device, or on a CPU in the machine or container. Pass a number if
            other programs need memory, or if every run must get the same plan. Under `MirroredStrategy` all replicas
            share the budget.
        headroom: Fraction of the budget that the prediction leaves free, from 0 to below 1. Raise it if the measured
            peak of the first step exceeds the budget; lower it if predictions are accurate for your network.
        swap: Whether activations may be swapped to host memory or disk, and large results of tile loops may lie in
            files, if tiles alone do not keep the budget or cost much time. `LMSParams` select tensors and destination.
        plan: File that `Plan.save` wrote for this training; see `AutoParams`. Evaluation and prediction have plans of
            their own.
        max_slowdown: Longest time of a step, over that of the original step, that the planner accepts by prediction. If
            all plans within the budget take longer, a `BudgetError` names a budget that is faster. If a measured step
            takes twice as long as that, a line names the ops that take most of its time. `math.inf` accepts any time.
        batch_shape: `(batch, height, width, channels)` of the largest batch, of volumes `(batch, depth, height, width,
            channels)`, of sequences `(batch, length, channels)`. `None`: the shape of the first batch. Pass it if a
            later batch is larger and does not fit without rewriting. Under `MirroredStrategy` it is the shape of a
            batch of all replicas, and required, except in `predict`, if the data set has no static batch size.
        verbose: 0 prints nothing. 1 prints the plan before the first step, the measured peak after it, and a line
            while planning if that takes more than two seconds.
        log_dir: Directory for TensorBoard logs of peaks and step times. `None`: the directory of a
            `keras.callbacks.TensorBoard` in the same `fit`; without that callback nothing is logged.

    Attributes:
        plan: `Plan` of the latest training; `None` before its first step.
        evaluate_plan: `Plan` of the latest `evaluate` or validation; `None` before its first step and if it was not
            rewritten.
        predict_plan: `Plan` of the latest `predict`; `None` before its first step and if it was not rewritten.

    Raises:
        BudgetError: In the first step, if no plan fits; the message gives the smallest feasible budget. After the
            second step, if the measured peak of the corrected plan exceeds the budget too.
        RewriteError: In the first step, if the model cannot be rewritten.
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.

    Examples:
        >>> model.fit(data, callbacks=[tflms_sft.MemoryBudget("8GiB")])
    """

    def __init__(
        self,
        memory_budget: int | str = "auto",
        *,
        headroom: float = 0.1,
        swap: bool | LMSParams = True,
        plan: str | os.PathLike[str] | None = None,
        max_slowdown: float = 10.0,
        batch_shape: Sequence[int] | None = None,
        verbose: int = 1,
        log_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(
            AutoParams(memory_budget, headroom, swap, plan, max_slowdown),
            batch_shape=batch_shape,
            verbose=verbose,
            log_dir=log_dir,
        )


class SFT(RewritingCallback):
    """Train, evaluate or predict with segmented fused-tiled execution and explicit parameters.

    Segments of the network run as loops over tiles of their images, and the backward loops recompute the inner
    tensors (Xu et al., CC '22). `MemoryBudget` chooses these parameters itself.

    Args:
        num_tiles: Number of tiles along each axis of the exit of each segment, such as `(height, width)`, a mapping
            from axis names, or `"auto"`; see `SFTParams`.
        segments: `"auto"` or a list of `SegmentSpec`. `"auto"`: segments that end where the halos of longer ones would
            cost more time than they save memory.
        memory_capacity: Upper bound for the bytes of one iteration of a tile loop: an int, or a string such as
            `"1GiB"`; see `SFTParams`. `None`: no bound.
        halo: Source of the halo rows that neighbouring tiles share: `"recompute"` computes them in every tile,
            `"carry"` carries them from strip to strip; see `SFTParams`.
        backward_num_tiles: Number of tiles of the backward loops. `None`: `num_tiles`.
        batch_shape: `(batch, ..., channels)` of the largest batch. `None`: that of the first batch. See `MemoryBudget`.
        verbose: 0 prints nothing, 1 prints lines about plans and peaks. See `MemoryBudget`.
        log_dir: Directory for TensorBoard logs. `None`: that of a `keras.callbacks.TensorBoard` in the same `fit`.

    Attributes:
        plan: `Plan` of the latest training; `None` before its first step.
        evaluate_plan: See `MemoryBudget`.
        predict_plan: See `MemoryBudget`.

    Raises:
        SegmentError: In the first step, if a named segment cannot be tiled.
        RewriteError: In the first step, if the model cannot be rewritten.
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range; in the first step also if there are more tiles than rows.

    Examples:
        >>> spec = tflms_sft.SegmentSpec("input_layer", "block3_pool", num_tiles=(4, 4))
        >>> model.fit(data, callbacks=[tflms_sft.SFT(segments=[spec])])
    """

    def __init__(
        self,
        num_tiles: str | Sequence[int] | Mapping[str, int] = "auto",
        segments: str | Sequence[SegmentSpec] = "auto",
        memory_capacity: int | str | None = None,
        halo: str = "recompute",
        backward_num_tiles: str | Sequence[int] | Mapping[str, int] | None = None,
        *,
        batch_shape: Sequence[int] | None = None,
        verbose: int = 1,
        log_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        params = SFTParams(num_tiles, segments, memory_capacity, halo, backward_num_tiles)
        super().__init__(params, batch_shape=batch_shape, verbose=verbose, log_dir=log_dir)


class LMS(RewritingCallback):
    """Train with activations swapped to host memory or disk, with explicit parameters (Le et al., "TFLMS", 2018).

    `evaluate` and `predict` are not rewritten, unless `tiles` is given: without a backward pass there are no saved
    tensors to swap. A printed line says so.

    Args:
        tiles: `SFTParams` of tile loops that are built first; then the tensors saved between segments are swapped.
            `None`: swaps alone.
        batch_shape: `(batch, ..., channels)` of the largest batch. `None`: that of the first batch. See `MemoryBudget`.
        verbose: 0 prints nothing, 1 prints lines about plans and peaks. See `MemoryBudget`.
        log_dir: Directory for TensorBoard logs. `None`: that of a `keras.callbacks.TensorBoard` in the same `fit`.
        **params: Arguments of `LMSParams`.

    Attributes:
        plan: `Plan` of the latest training; `None` before its first step.
        evaluate_plan: See `MemoryBudget`.
        predict_plan: See `MemoryBudget`.

    Raises:
        SwapError: In the first step, if no tensor can be swapped with these parameters.
        RewriteError: In the first step, if the model cannot be rewritten.
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or the directory is not writable.

    Examples:
        >>> model.fit(data, callbacks=[tflms_sft.LMS(tier="disk", spill_dir="/scratch")])
    """

    def __init__(
        self,
        *,
        tiles: SFTParams | None = None,
        batch_shape: Sequence[int] | None = None,
        verbose: int = 1,
        log_dir: str | os.PathLike[str] | None = None,
        **params: Any,
    ) -> None:
        if not isinstance(tiles, SFTParams | None):
            raise TypeError(f"`tiles` must be `SFTParams(...)` or None. Received: tiles={tiles!r}.")
        swaps = SwapParams(**params)
        super().__init__(
            swaps if tiles is None else [tiles, swaps], batch_shape=batch_shape, verbose=verbose, log_dir=log_dir
        )


class Pipeline(RewritingCallback):
    """Train in pipeline stages on several devices, with micro-batches.

    The first batch must be a multiple of the number of micro-batches. A later batch of another size, such as the last
    one of an epoch, runs as one micro-batch. `evaluate`, `predict` and validation are not rewritten; a printed line
    says so.

    Args:
        stages: Number of stages, or a list of names of layers, ops or tensors to cut at. `"auto"`: one stage per
            device. See `PipelineParams`.
        schedule: Order of micro-batches on the devices: `"basic"`, `"gpipe"`, `"1f1b"`, `"mast"` or `"master"`; see
            `PipelineParams`.
        micro_batches: Number of micro-batches of a batch; η of MASTER.
        devices: Names of devices, one per stage and data replica, such as `"GPU:0"`. `None`: the GPUs in order, or the
            logical CPUs on a machine without GPUs.
        data_replicas: Number of copies of the pipeline, each of which trains on its share of the batch.
        loss_reduction: `"mean"` if losses are averaged over the batch, `"sum"` if they are added.
        batch_norm: Treatment of layers that mix samples, such as BatchNormalization, with several micro-batches:
            `"refuse"` raises an error, `"micro"` computes their statistics per micro-batch.
        placement: `"check"` requires variables on the device of their stage; `"copy"` sends them there in each step.
        per_sample: Names of layers or ops that keep samples apart although no rule shows it; see `PipelineParams`.
        reductions: Reductions of outputs by name; see `PipelineParams`.
        tiles: `SFTParams` of tile loops inside the stages.
        swaps: `LMSParams` of tensors that are swapped between the forward and the backward pass of their stage.
        verbose: 0 prints nothing. 1 prints the plan before the first step, and a line while planning if that takes
            more than two seconds.
        log_dir: Directory for TensorBoard logs. `None`: that of a `keras.callbacks.TensorBoard` in the same `fit`.

    Attributes:
        plan: `Plan` of the latest training; `None` before its first step.
        evaluate_plan: `None`.
        predict_plan: `None`.

    Raises:
        PipelineError: In the first step, if the model cannot be cut at these places, or micro-batches would change its
            results.
        RewriteError: In the first step, if the model cannot be rewritten.
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range; in the first step also if a device does not exist, or the batch is
            no multiple of the number of micro-batches.
        WorkerError: In the step during which a worker is lost, or at the end of an epoch; the message names it.

    Examples:
        >>> cuts = tflms_sft.stage_devices(model, 4)
        >>> model.compile("adam", "mse")
        >>> model.fit(data, callbacks=[tflms_sft.Pipeline(cuts, "1f1b", micro_batches=8)])
    """

    def __init__(
        self,
        stages: str | int | Sequence[str] = "auto",
        schedule: str = "basic",
        micro_batches: int = 1,
        devices: Sequence[str] | None = None,
        data_replicas: int = 1,
        *,
        loss_reduction: str = "mean",
        batch_norm: str = "refuse",
        placement: str = "check",
        per_sample: Sequence[str] | None = None,
        reductions: dict[str, str] | None = None,
        tiles: SFTParams | None = None,
        swaps: LMSParams | None = None,
        verbose: int = 1,
        log_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(tiles, SFTParams | None):
            raise TypeError(f"`tiles` must be `SFTParams(...)` or None. Received: tiles={tiles!r}.")
        if not isinstance(swaps, SwapParams | None):
            raise TypeError(f"`swaps` must be `LMSParams(...)` or None. Received: swaps={swaps!r}.")
        params = PipelineParams(
            stages,
            schedule,
            micro_batches,
            devices,
            data_replicas,
            loss_reduction,
            batch_norm,
            placement,
            per_sample=per_sample,
            reductions=reductions,
        )
        super().__init__(
            [item for item in (tiles, swaps, params) if item is not None],
            batch_shape=None,
            verbose=verbose,
            log_dir=log_dir,
        )
        self._backup_guard: BackupGuard | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Install the patch, and a guard against truncated backups.

        Args:
            logs: Ignored.

        Raises:
            WorkerError: If a worker has been lost in this process before.
        """
        refuse_lost()
        super().on_train_begin(logs)
        self._backup_guard = guard_backups(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log the epoch, and check that all workers respond before other callbacks read weights from them.

        Args:
            epoch: Number of the epoch, from 0.
            logs: Ignored.

        Raises:
            WorkerError: If a worker does not respond.
        """
        super().on_epoch_end(epoch, logs)
        try:
            check_workers()
        except BaseException:
            self._remove_patches()
            raise

    def on_train_end(self, logs: Any = None) -> None:
        """Restore the model.

        Args:
            logs: Ignored.
        """
        super().on_train_end(logs)
        if self._backup_guard is not None:
            self._backup_guard.remove()
            self._backup_guard = None
