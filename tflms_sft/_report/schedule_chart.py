"""The chart of a pipeline schedule: the passes of each device over time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from rewriters.pipelining.schedule_simulator import Simulation
from rewriters.pipelining.schedules import Direction
from tflms_sft._util.byte_sizes import format_bytes

COLORS = {Direction.FORWARD: "#3568c9", Direction.BACKWARD: "#1f7a5c"}
LIGHTER = {Direction.FORWARD: "#b9cff8", Direction.BACKWARD: "#addccc"}
"""Colors of the stages of a device other than its first."""

NAMES = {Direction.FORWARD: "forward", Direction.BACKWARD: "backward"}
EXCHANGED, CRITICAL, TEXT, SECONDARY_TEXT = "#f2b134", "#c62828", "#1f2329", "#6b717c"

BOX_HEIGHT = 0.72
"""Height of a box, relative to the distance between devices."""

REPLICA_GAP = 0.35
"""Additional distance between devices of different data replicas."""

TIME_UNITS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))

DEVICE_INCHES, MAX_INCHES = 0.52, 9.0
"""Height of a device, and maximum height of all devices."""

POINTS_PER_DIGIT = 6.5
"""Width of a digit in a box, with its margins."""

MIN_BORDERED_POINTS = 5
"""Width of a box below which its border is thinner."""


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the largest unit that is at most `seconds`, and its length in seconds."""
    return next((unit for unit in TIME_UNITS if seconds >= unit[1]), TIME_UNITS[-1])


def new_figure(subject: str, width: float, height: float) -> Any:
    """Return an empty `matplotlib.figure.Figure` for the chart of a subject, with its size in inches.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f'{subject} needs matplotlib: pip install "tflms-sft[plot]"') from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: str | os.PathLike[str] | None) -> None:
    """Write a figure in the format of the extension of a path; nothing without a path."""
    if path is not None:
        # Without a format, matplotlib would append one to a name that has none.
        figure.savefig(path, dpi=140, format=os.path.splitext(path)[1][1:] or "png")


def draw_schedule(
    simulation: Simulation, path: str | os.PathLike[str] | None = None, peak_bytes: Sequence[int] = ()
) -> Any:
    """Draw devices over time, with the numbers of the micro-batches in the boxes, and return the figure.

    The peaks of the devices are those of the simulation by default.
    """
    schedule = simulation.schedule
    height = min(DEVICE_INCHES * (schedule.num_devices + REPLICA_GAP * (schedule.data_replicas - 1)), MAX_INCHES)
    figure = new_figure("the chart of a schedule", 11, height + 1.55)
    axes = figure.add_subplot()
    end = simulation.seconds or 1.0
    axes.set_xlim(0, end)
    rows = _rows(simulation)
    axes.set_ylim(rows[-1] + 0.62, -0.62)
    _boxes(axes, simulation, rows, points=72 * 8.6 / end)
    _frame(axes, simulation, rows, peak_bytes or simulation.peak_bytes)
    save_figure(figure, path)
    return figure


def _rows(simulation: Simulation) -> list[float]:
    """Return the vertical position of each device, downwards."""
    schedule = simulation.schedule
    replica_devices = schedule.num_devices // schedule.data_replicas
    return [device + REPLICA_GAP * (device // replica_devices) for device in range(schedule.num_devices)]


def _boxes(axes: Any, simulation: Simulation, rows: list[float], points: float) -> None:
    """Draw slots and exchanges of gradients; `points`, the width of a second, decides where numbers fit."""
    critical = set(simulation.critical_path)
    for row, slots in zip(rows, simulation.schedule.devices, strict=True):
        axes.axhspan(row - BOX_HEIGHT / 2, row + BOX_HEIGHT / 2, color="#f1f2f4", lw=0, zorder=0)
        spans = [(simulation.begins[slot], simulation.ends[slot] - simulation.begins[slot]) for slot in slots]
        shades = [(COLORS if slot.stage == slots[0].stage else LIGHTER)[slot.kind] for slot in slots]
        border = 0.8 if all(length * points > MIN_BORDERED_POINTS for _, length in spans) else 0.2
        box = (row - BOX_HEIGHT / 2, BOX_HEIGHT)
        axes.broken_barh(spans, box, facecolors=shades, edgecolor="white", lw=border)
        above = (row - BOX_HEIGHT / 2 - 0.055, 0.035)  # An outline would hide the border of the next box.
        axes.broken_barh(
            [span for span, slot in zip(spans, slots, strict=True) if slot in critical], above, color=CRITICAL
        )
        for slot, (begin, length), shade in zip(slots, spans, shades, strict=True):
            if length * points >= POINTS_PER_DIGIT * len(str(slot.micro_batch)):
                color = "white" if shade in COLORS.values() else TEXT
                place = (begin + length / 2, row)
                axes.text(*place, str(slot.micro_batch), ha="center", va="center_baseline", fontsize=8.5, color=color)
    for exchange in simulation.exchanges:
        for device in exchange.devices:
            span = (exchange.begin, exchange.end - exchange.begin)
            axes.broken_barh([span], (rows[device] + BOX_HEIGHT / 2 + 0.02, 0.1), color=EXCHANGED, lw=0)


def _frame(axes: Any, simulation: Simulation, rows: list[float], peak_bytes: Sequence[int]) -> None:
    """Draw titles, axes and legend."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    schedule = simulation.schedule
    replicas = f", {schedule.data_replicas} data replicas" if schedule.data_replicas > 1 else ""
    counts = f"{_counted(schedule.num_stages, 'stage')}, {_counted(schedule.micro_batches, 'micro-batch')}{replicas}"
    unit, unit_seconds = time_unit(simulation.seconds)
    axes.set_title(f"Schedule {schedule.name}: {counts}", loc="left", fontweight="bold")
    total = f"step {simulation.seconds / unit_seconds:.3g} {unit}, {100 * simulation.bubble:.0f} % idle"
    axes.set_title(total, loc="right", fontsize=10, color=SECONDARY_TEXT)
    axes.set_xlabel(f"predicted time ({unit})")
    axes.xaxis.set_major_formatter(lambda seconds, _: f"{seconds / unit_seconds:g}")
    axes.set_yticks(rows, [f"device {device}" for device in range(schedule.num_devices)])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    right = axes.twinx()
    right.set_ylim(axes.get_ylim())
    labels = [_device_label(simulation, device, peak) for device, peak in enumerate(peak_bytes)]
    right.set_yticks(rows, labels)
    right.tick_params(axis="y", length=0, labelsize=8, labelcolor=SECONDARY_TEXT)
    right.spines[:].set_visible(False)
    entries: list[Any] = [Patch(color=COLORS[kind], label=NAMES[kind]) for kind in Direction]
    if any(len(schedule.stages_on(device)) > 1 for device in range(schedule.num_devices)):
        entries += [Patch(color=LIGHTER[kind], label=f"{NAMES[kind]} of the other stage") for kind in Direction]
    if any(exchange.end > exchange.begin for exchange in simulation.exchanges):
        entries.append(Patch(color=EXCHANGED, label="exchange of gradients"))
    number = Line2D([], [], ls="", marker="$0$", ms=6, color=TEXT, label="number of the micro-batch")
    entries += [Patch(color=CRITICAL, label="critical path"), number]
    place = {"loc": "outside lower center", "ncols": len(entries), "frameon": False, "columnspacing": 1.4}
    axes.figure.legend(handles=entries, fontsize="small", handlelength=1.2, **place)


def _counted(count: int, word: str) -> str:
    plural = "es" if word.endswith("ch") else "s"
    return f"{count} {word}{'' if count == 1 else plural}"


def _device_label(simulation: Simulation, device: int, peak_bytes: int) -> str:
    idle = simulation.idle[device] / simulation.seconds if simulation.seconds else 0.0
    return f"{100 * idle:.0f} % idle" + (f", peak {format_bytes(peak_bytes)}" if peak_bytes else "")
