"""What a user asks of a pipeline, checked when it is written down."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any

from rewriters.pipelining.schedules import Schedule, make
from tflms_sft._params.device_names import parse_device

_CHOICES = {
    "loss_reduction": ("mean", "sum"),
    "batch_norm": ("refuse", "micro"),
    "placement": ("check", "copy"),
}


@dataclasses.dataclass(frozen=True)
class PipelineParams:
    """Stages of a network on several devices, micro-batches in the order of a schedule.

    Args:
        stages: Number of stages, whose cuts are then chosen so that forward activations are even; `"auto"`, the
            default: as many as there are devices; or a list of names to cut at: layers, operations or tensors, each of
            which a stage ends with, from the input to the loss; a layer that is called for several batches in a step,
            such as fakes and reals, at each of its calls. An empty list is one stage.
        schedule: `"basic"`, the default: one device works at a time, with micro-batches after another; `"gpipe"`: all
            forwards, then all backwards (Huang et al., "GPipe", 2019); `"1f1b"`: in turn, so that fewer micro-batches
            wait at a time; `"mast"` and `"master"`: replications of the network that lie the other way round on the
            same devices (Jain et al., "GEMS", 2020), for micro-batches that barely fit.
        micro_batches: Parts of one size that a batch is cut into; with `"master"` its number of replications η. With
            `data_replicas` each has as many. In a step for batches of any size (`None`) one that they do not cut evenly
            is one micro-batch. Defaults to 1.
        devices: Names such as `"GPU:0"`, one for each stage, and so on for each data replica; a device may come twice.
            Defaults to `None`: the GPUs in order, on a machine without any the logical CPUs.
        data_replicas: Copies of the pipeline beside each other, each with its part of the batch. Defaults to 1.
        loss_reduction: Whether losses are a `"mean"` over the batch, the default, or a `"sum"`, so that gradients of
            micro-batches can be made one.
        batch_norm: With more than one micro-batch, what is done with layers, losses and variables that join samples
            of a batch, such as BatchNormalization, and are something else for a part of it. `"refuse"`, the default:
            an error. `"micro"`: they work on micro-batches, and moving statistics are updated for each; so does a
            loop that accumulates gradients by hand.
        placement: `"check"`, the default: variables must lie on the device of their stage, where `stage_devices` puts
            them. `"copy"`: wherever they are, and stages read them from there in each step.
        batched: With more than one micro-batch, which arguments of the step have the batch as their first axis, the
            others being the same for all micro-batches: a list of their names, or of their positions among the tensors
            that the step is called with. Defaults to `None`: those that are as long as the batch, or if that is open
            those of which the first axis is.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a wrong value. Names are looked up when a step is rewritten.
    """

    stages: Any = "auto"
    schedule: str = "basic"
    micro_batches: int = 1
    devices: Any = None
    data_replicas: int = 1
    loss_reduction: str = "mean"
    batch_norm: str = "refuse"
    placement: str = "check"
    batched: Any = None

    def __post_init__(self) -> None:
        """Check everything that can be checked without a graph."""
        self._check_stages()
        for argument, choices in _CHOICES.items():
            value = getattr(self, argument)
            if value not in choices:
                shown = " or ".join(f'"{choice}"' for choice in choices)
                raise ValueError(f"`{argument}` must be {shown}. Received: {argument}={value!r}.")
        self._check_batched()
        if self.devices is not None:
            devices = self.devices
            if isinstance(devices, str) or not isinstance(devices, Sequence) or not devices:
                raise TypeError(f"`devices` must be a list of names of devices. Received: devices={devices!r}.")
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
            twice = sorted({name for name in stages if list(stages).count(name) > 1})
            if twice:
                raise ValueError(f"`stages` names a cut twice: {twice}. Received: stages={stages!r}.")
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
            raise ValueError("`batched` is empty: name at least one argument that has a batch. Received: batched=[].")
        for item in batched:
            position = isinstance(item, numbers.Integral) and not isinstance(item, bool)
            if not position and not (isinstance(item, str) and item):
                raise TypeError(f"`batched` must be a list of names or positions. Received: batched={batched!r}.")
        object.__setattr__(self, "batched", tuple(i if isinstance(i, str) else int(i) for i in batched))

    @property
    def num_stages(self) -> int | None:
        """Number of stages; `None` if the devices tell."""
        if self.stages == "auto":
            return None if self.devices is None else max(len(self.devices) // self.data_replicas, 1)
        return self.stages if isinstance(self.stages, int) else len(self.stages) + 1

    @property
    def total_micro_batches(self) -> int:
        """Micro-batches of all data replicas."""
        return self.micro_batches * self.data_replicas

    def made(self, num_stages: int) -> Schedule:
        """The schedule for a number of stages.

        Args:
            num_stages: How many, where `"auto"` has been found out.
        """
        return make(self.schedule, num_stages, self.micro_batches, self.data_replicas)

    def check_devices(self, count: int, num_stages: int) -> None:
        """Refuse another number of devices than the stages need.

        Args:
            count: How many devices there are.
            num_stages: How many stages.

        Raises:
            ValueError: With both numbers.
        """
        needed = num_stages * self.data_replicas
        if count != needed:
            replicas = f" of each of {self.data_replicas} data replicas" if self.data_replicas > 1 else ""
            raise ValueError(
                f"`devices` must have one device for each of {num_stages} stage(s){replicas}, {needed} in all. "
                f"Received: {count} in devices={self.devices!r}."
            )
