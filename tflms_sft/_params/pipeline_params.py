"""`PipelineParams`: the parameters of a pipeline, checked at construction."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence

from rewriters.pipelining.schedules import Schedule, make
from tflms_sft._params.device_names import parse_device

_CHOICES = {
    "loss_reduction": ("mean", "sum"),
    "batch_norm": ("refuse", "micro"),
    "placement": ("check", "copy"),
}


REDUCTIONS = ("mean", "sum", "rows")
"""Ways to combine an output of several micro-batches."""


@dataclasses.dataclass(frozen=True)
class PipelineParams:
    """Parameters of a pipeline: stages of a network on several devices, and a schedule of micro-batches.

    `SFTParams` and `LMSParams` in the same list, at any position, tile and swap inside the stages. `AutoParams` cannot
    be combined with it.

    Args:
        stages: Names to cut at, from the input to the loss: layers, ops or tensors, each of which ends a stage. A layer
            called for several batches in a step, such as real and generated images, is cut at each call. An empty list
            is one stage. Or a number of stages: cuts then lie where one tensor crosses, balance the bytes saved for the
            backward pass, and prefer small tensors. `"auto"`: as many stages as devices.
        schedule: Order of forward and backward passes on the devices.

            - `"basic"`: one device works at a time, on one micro-batch after another.
            - `"gpipe"`: all forward passes, then all backward passes (Huang et al., "GPipe", 2019).
            - `"1f1b"`: forward and backward passes alternate, so that fewer micro-batches are saved at a time.
            - `"mast"`, `"master"`: two replications of the network in opposite order on the same devices (Jain et al.,
              "GEMS", 2020), for micro-batches that barely fit.
        micro_batches: Number of micro-batches of a batch, of equal size; with `"master"` its number of replications η.
            With `data_replicas`, each replica has as many. More micro-batches leave devices idle for less of the time.
            A batch that is no multiple of them runs as one micro-batch if the step is traced for any batch size
            (`None`), and is an error otherwise.
        devices: Device names such as `"GPU:0"`: one per stage of the first data replica, then those of the next. A
            device may occur several times. `None`: the GPUs in order, or the logical CPUs on a machine without GPUs.
        data_replicas: Number of copies of the pipeline, each of which trains on its share of the batch. The first copy
            holds the weights.
        loss_reduction: `"mean"` if losses are averaged over the batch, `"sum"` if they are added; determines how the
            gradients of micro-batches are combined. The value is compared with the graph, and a wrong one is an error.
            The plan has a note where the graph does not show it.
        batch_norm: Treatment of layers, losses and variables that mix samples, such as BatchNormalization, with several
            micro-batches. `"refuse"` raises an error that names them. `"micro"` computes them per micro-batch, with an
            update of moving statistics for each, and also accepts loops that accumulate gradients by hand; the plan has
            a note.
        placement: `"check"` requires variables on the device of their stage, where `stage_devices` puts them. `"copy"`
            accepts them anywhere and sends them to the stages in each step.
        batched: Arguments of the step whose first axis is the batch, by name or by position among its tensors, such as
            `["images", "labels"]` or `[0, 1]`; all others are the same for every micro-batch. Only used with several
            micro-batches. `None`: the arguments whose first axis is as long as the batch, or is open if the batch size
            is. Under `fit` all data has the batch axis.
        per_sample: With several micro-batches, names of layers or ops that keep samples apart although no rule shows
            it. One run of the whole batch on random data confirms it before training.
        reductions: With several micro-batches, reductions of outputs of the step: a `dict` from the name of an output
            to `"mean"`, `"sum"` or `"rows"`. Names are keys or positions in the structure that the step returns, joined
            by `"/"`, such as `"loss"` or `"1/logits"`. Confirmed like `per_sample`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range. Names are resolved in `rewrite`, which raises `PipelineError`.

    Examples:
        >>> params = tflms_sft.PipelineParams(stages=4, schedule="1f1b", micro_batches=8)
        >>> step = tflms_sft.rewrite(train_step, params, images, labels)
    """

    stages: str | int | Sequence[str] = "auto"
    schedule: str = "basic"
    micro_batches: int = 1
    devices: Sequence[str] | None = None
    data_replicas: int = 1
    loss_reduction: str = "mean"
    batch_norm: str = "refuse"
    placement: str = "check"
    batched: Sequence[str | int] | None = None
    per_sample: Sequence[str] | None = None
    reductions: dict[str, str] | None = None

    def __post_init__(self) -> None:
        """Check every argument as far as possible without a graph."""
        self._check_stages()
        for argument, choices in _CHOICES.items():
            value = getattr(self, argument)
            if value not in choices:
                shown = " or ".join(f'"{choice}"' for choice in choices)
                raise ValueError(f"`{argument}` must be {shown}. Received: {argument}={value!r}.")
        self._check_batched()
        self._check_declared()
        if self.devices is not None:
            devices = self.devices
            if isinstance(devices, str) or not isinstance(devices, Sequence) or not devices:
                raise TypeError(f"`devices` must be a list of at least one device name. Received: devices={devices!r}.")
            for name in devices:
                parse_device(name)
            object.__setattr__(self, "devices", tuple(devices))
        make(self.schedule, self.num_stages or 1, self.micro_batches, self.data_replicas)
        if self.devices is not None and self.num_stages is not None:
            self.check_devices(len(self.devices), self.num_stages)

    def _check_stages(self) -> None:
        stages = self.stages
        if isinstance(stages, str):
            if stages != "auto":
                raise ValueError(
                    '`stages` must be a number, "auto", or a list of names to cut at. '
                    f"Received: stages={stages!r}. To cut there: stages=[{stages!r}]."
                )
        elif isinstance(stages, numbers.Integral) and not isinstance(stages, bool):
            if stages < 1:
                raise ValueError(f"`stages` must be at least 1. Received: stages={stages!r}.")
            object.__setattr__(self, "stages", int(stages))
        elif isinstance(stages, (list, tuple)) and all(isinstance(name, str) and name for name in stages):
            duplicates = sorted({name for name in stages if list(stages).count(name) > 1})
            if duplicates:
                raise ValueError(f"`stages` names a cut twice: {duplicates}. Received: stages={stages!r}.")
            object.__setattr__(self, "stages", tuple(stages) or 1)
        else:
            raise TypeError(
                f'`stages` must be a number, "auto", or a list of names to cut at. Received: stages={stages!r}.'
            )

    def _check_batched(self) -> None:
        batched = self.batched
        if batched is None:
            return
        if isinstance(batched, str) or not isinstance(batched, Sequence):
            raise TypeError(f"`batched` must be a list of names or positions. Received: batched={batched!r}.")
        if not batched:
            raise ValueError("`batched` must name at least one argument with a batch axis. Received: batched=[].")
        for item in batched:
            position = isinstance(item, numbers.Integral) and not isinstance(item, bool)
            if not position and not (isinstance(item, str) and item):
                raise TypeError(f"`batched` must be a list of names or positions. Received: batched={batched!r}.")
        object.__setattr__(self, "batched", tuple(i if isinstance(i, str) else int(i) for i in batched))

    def _check_declared(self) -> None:
        if self.has_declarations and self.batch_norm == "micro":
            raise ValueError(
                '`per_sample` and `reductions` cannot be combined with `batch_norm="micro"`, which changes the results '
                f"that they are checked against. Received: per_sample={self.per_sample!r}, "
                f'reductions={self.reductions!r}. Omit `batch_norm="micro"`, or these declarations.'
            )
        names = self.per_sample
        if names is not None:
            if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(n, str) for n in names):
                raise TypeError(
                    f"`per_sample` must be a list of names of layers or ops. Received: per_sample={names!r}."
                )
            object.__setattr__(self, "per_sample", tuple(names) or None)
        reductions = self.reductions
        if reductions is not None:
            if not isinstance(reductions, dict) or not all(isinstance(name, str) for name in reductions):
                raise TypeError(
                    '`reductions` must be a dict from names of outputs to "mean", "sum" or "rows". Received: '
                    f"reductions={reductions!r}."
                )
            if not {*reductions.values()} <= {*REDUCTIONS}:
                raise ValueError(
                    f'`reductions` must map to "mean", "sum" or "rows". Received: reductions={reductions!r}.'
                )
            object.__setattr__(self, "reductions", dict(reductions) or None)

    @property
    def has_declarations(self) -> bool:
        """Return whether the user declares facts about the step that a run has to confirm."""
        return self.per_sample is not None or self.reductions is not None

    @property
    def num_stages(self) -> int | None:
        """Number of stages; `None` if the devices of the machine determine it."""
        if self.stages == "auto":
            return None if self.devices is None else max(len(self.devices) // self.data_replicas, 1)
        return self.stages if isinstance(self.stages, int) else len(self.stages) + 1

    @property
    def total_micro_batches(self) -> int:
        """Number of micro-batches of all data replicas together."""
        return self.micro_batches * self.data_replicas

    def schedule_for(self, num_stages: int) -> Schedule:
        """Return the schedule for a number of stages.

        Args:
            num_stages: Number of stages, with `"auto"` resolved.
        """
        return make(self.schedule, num_stages, self.micro_batches, self.data_replicas)

    def check_devices(self, count: int, num_stages: int) -> None:
        """Refuse a number of devices that does not match the stages.

        Args:
            count: Number of devices.
            num_stages: Number of stages.

        Raises:
            ValueError: With both numbers.
        """
        needed = num_stages * self.data_replicas
        if count != needed:
            replicas = f" of each of {self.data_replicas} data replicas" if self.data_replicas > 1 else ""
            raise ValueError(
                f"`devices` must have one device for each of {num_stages} stage(s){replicas}: {needed} in total. "
                f"Received: {count} in devices={self.devices!r}."
            )
