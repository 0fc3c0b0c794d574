"""What a plan says of a pipeline."""

from __future__ import annotations

import dataclasses

from rewriters.pipelining.schedule_simulator import Simulation, simulate
from rewriters.pipelining.schedules import make
from tflms_sft._util.byte_sizes import format_bytes
from tflms_sft._util.text import shortened, table

_MOST_CROSSING = 4


@dataclasses.dataclass(frozen=True)
class PlannedStage:
    """A stage of a pipeline.

    Attributes:
        number: From 0, in the order of the forward phase.
        devices: Those that run it, the one that keeps its weights first.
        entries: Names of what comes in from the stages before.
        exit: Name of the tensor that it ends with; empty for the last one.
        forward_ops: Number of forward operations.
        backward_ops: Number of backward operations.
        weight_bytes: Of its variables, optimizer slots included.
        waiting_bytes: What waits for the backward phase, for one micro-batch.
        forward_seconds: Predicted time for one micro-batch.
        backward_seconds: The same.
        transfer_bytes: What is sent on to later stages, for one micro-batch.
        transfer_seconds: Predicted time of that.
        segments: Names of the segments of it that run tile by tile.
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
    """A step in stages on several devices.

    Attributes:
        schedule: Its name.
        micro_batches: Micro-batches of all data replicas.
        data_replicas: Copies beside each other.
        stages: The stages.
        devices: Names of the devices in the order of `slots` and `peak_bytes`.
        slots: What each device runs, in order: `"F0.1"` is the forward phase of micro-batch 0 in stage 1.
        peak_bytes: Predicted for each device: weights, gradients, and what waits, at the worst moment.
        seconds: Predicted time of a step, without the update.
        idle: Part of all devices' time in which they wait.
        crossing: (tensor, stage that makes it, stage that reads it, bytes of one micro-batch).
        results: How each result of the step was put together.
        chart: Devices over time, as text.
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
        """The schedule executed with the predicted times."""
        count, own = len(self.stages), self.micro_batches // self.data_replicas
        return simulate(
            make(self.schedule, count, own, self.data_replicas),
            [stage.forward_seconds for stage in self.stages],
            [stage.backward_seconds for stage in self.stages],
            [stage.transfer_seconds for stage in self.stages[:-1]],
        )

    def headline(self) -> str:
        """One line."""
        devices = len(set(self.devices))
        return (
            f"{len(self.stages)} stage(s) on {devices} device(s), {self.micro_batches} micro-batch(es) in the order "
            f"{self.schedule!r}, predicted peak {format_bytes(max(self.peak_bytes))} of a device, "
            f"{100 * self.idle:.0f} % idle"
        )

    def lines(self) -> list[str]:
        """The table of the stages, and what a reader should know of them."""
        headings: tuple[str, ...] = ("stage", "device", "ends with", "weights", "waits", "forward", "backward")
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
            rows = [(*row, ", ".join(own.segments) or "-") for row, own in zip(rows, self.stages, strict=True)]
        found = table([headings, *rows], (3, 4, 5, 6))
        found += [f"  {line}" for line in self.chart.splitlines()]
        for name, size in zip(self.devices, self.peak_bytes, strict=True):
            found.append(f"  {name}: predicted peak {format_bytes(size)}")
        crossing = [f"{name} ({a} -> {b}, {format_bytes(size)})" for name, a, b, size in self.crossing if a < b]
        found.append(f"  cross forward: {shortened(crossing, _MOST_CROSSING) or 'nothing'}")
        found += [f"  result {name}: {how}" for name, how in self.results]
        return found
