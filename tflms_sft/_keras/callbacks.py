"""The public callbacks: `MemoryBudget`, `SFT`, `LMS`, `Pipeline`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tflms_sft._cluster.worker_watch import check_workers, refuse_lost
from tflms_sft._keras.backup_guard import BackupGuard, watch_saves
from tflms_sft._keras.rewriting_callback import RewritingCallback
from tflms_sft._params.pipeline_params import PipelineParams
from tflms_sft._params.swap_params import SwapParams
from tflms_sft._params.tile_params import AUTO, AutoParams, SegmentSpec, SFTParams


class MemoryBudget(RewritingCallback):
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


class SFT(RewritingCallback):
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


class LMS(RewritingCallback):
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


class Pipeline(RewritingCallback):
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
        self._saves: BackupGuard | None = None

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
