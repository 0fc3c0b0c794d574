"""Records of a pipeline in a plan, and their report as text."""

from __future__ import annotations

import dataclasses

from rewriters.pipelining.schedule_simulator import Simulation, simulate
from rewriters.pipelining.schedules import make
from tflms_sft._util.byte_sizes import format_bytes
from tflms_sft._util.text import shortened, table

_MAX_TRANSFERS = 4


@dataclasses.dataclass(frozen=True)
class PlannedStage:
    """A stage of a pipeline.

    Attributes:
        number: Index of the stage, from 0, in the order of the forward pass.
        devices: Devices that run the stage, the owner of its weights first.
        entries: Names of the tensors that it receives from earlier stages.
        exit: Name of the tensor that it ends with; empty for the last stage.
        forward_ops: Number of forward ops.
        backward_ops: Number of backward ops.
        weight_bytes: Bytes of its variables, optimizer slots included.
        waiting_bytes: Bytes saved for the backward pass, for one micro-batch.
        forward_seconds: Predicted time of the forward pass of one micro-batch.
        backward_seconds: Predicted time of the backward pass of one micro-batch.
        transfer_bytes: Bytes sent to later stages, for one micro-batch.
        transfer_seconds: Predicted time of that transfer.
        segments: Names of its segments that run as tile loops.
    """

    number: int
    devices: tuple[str, ...]
    entries: tuple[str, ...]
    exit: str
    forward_ops: int
    backward_ops: int
    weight_bytes: int
    waiting_bytes: int
    forward_seconds: float
    backward_seconds: float
    transfer_bytes: int
    transfer_seconds: float
    segments: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class PlannedPipeline:
    """A step in pipeline stages on several devices.

    Attributes:
        schedule: Name of the schedule.
        micro_batches: Number of micro-batches of all data replicas together.
        data_replicas: Number of copies of the pipeline.
        stages: The stages.
        devices: Names of the devices, in the order of `slots` and `peak_bytes`.
        slots: Passes that each device runs, in order: `"F0.1"` is the forward pass of micro-batch 0 in stage 1.
        peak_bytes: Predicted peak of each device in bytes: its variables, copies of weights from other devices,
            accumulated gradients, and the largest need of a slot or of the update.
        seconds: Predicted time of a step, without the update.
        idle: Fraction of the time of all devices in which they idle.
        crossing: (tensor, producing stage, consuming stage, bytes for one micro-batch) of each transfer.
        results: (result of the step, combination of its values for the micro-batches).
        chart: Slots of each device over time, as text.
    """

    schedule: str
    micro_batches: int
    data_replicas: int
    stages: tuple[PlannedStage, ...]
    devices: tuple[str, ...]
    slots: tuple[tuple[str, ...], ...]
    peak_bytes: tuple[int, ...]
    seconds: float
    idle: float
    crossing: tuple[tuple[str, int, int, int], ...]
    results: tuple[tuple[str, str], ...]
    chart: str = dataclasses.field(repr=False, default="")

    def simulation(self) -> Simulation:
        """Simulate the schedule with the predicted times."""
        num_stages, micro_batches = len(self.stages), self.micro_batches // self.data_replicas
        return simulate(
            make(self.schedule, num_stages, micro_batches, self.data_replicas),
            [stage.forward_seconds for stage in self.stages],
            [stage.backward_seconds for stage in self.stages],
            [stage.transfer_seconds for stage in self.stages[:-1]],
        )

    def headline(self) -> str:
        """Return one line: stages, schedule, peak and idle time."""
        devices = len(set(self.devices))
        return (
            f"{len(self.stages)} stage(s) on {devices} device(s), {self.micro_batches} micro-batch(es), schedule "
            f"{self.schedule!r}, predicted peak {format_bytes(max(self.peak_bytes))} per device, "
            f"{100 * self.idle:.0f} % idle"
        )

    def stage_rows(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Return headings and rows of the table of the stages."""
        headings: tuple[str, ...] = ("stage", "device", "ends with", "weights", "saved", "forward", "backward")
        rows: list[tuple[str, ...]] = [
            (
                str(stage.number),
                ", ".join(stage.devices),
                stage.exit or "the loss",
                format_bytes(stage.weight_bytes),
                format_bytes(stage.waiting_bytes),
                f"{1000 * stage.forward_seconds:.3g} ms",
                f"{1000 * stage.backward_seconds:.3g} ms",
            )
            for stage in self.stages
        ]
        if any(stage.segments for stage in self.stages):
            headings = (*headings, "tiled")
            rows = [(*row, ", ".join(stage.segments) or "-") for row, stage in zip(rows, self.stages, strict=True)]
        return headings, rows

    def lines(self) -> list[str]:
        """Return the table of the stages, the schedule, and peaks and transfers."""
        headings, rows = self.stage_rows()
        lines = table([headings, *rows], (3, 4, 5, 6))
        lines += [f"  {line}" for line in self.chart.splitlines()]
        for name, size in zip(self.devices, self.peak_bytes, strict=True):
            lines.append(f"  {name}: predicted peak {format_bytes(size)}")
        transfers = [f"{name} ({stages}, {size})" for name, stages, size in sent_forward(self)]
        lines.append(f"  sent forward: {shortened(transfers, _MAX_TRANSFERS) or 'nothing'}")
        lines += [f"  result {name}: {combination}" for name, combination in self.results]
        return lines


def sent_forward(pipeline: PlannedPipeline) -> list[tuple[str, str, str]]:
    """Return the transfers of a forward pass as text: tensor, stages, and size for one micro-batch."""
    return [
        (name, f"{sender} -> {receiver}", format_bytes(size))
        for name, sender, receiver, size in pipeline.crossing
        if sender < receiver
    ]
