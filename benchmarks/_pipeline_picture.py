"""Picture of `benchmarks.pipeline`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import _pipeline_models

COLOURS = {"basic": "0.45", "gpipe": "C0", "1f1b": "C9", "mast": "C1", "master": "C3"}


def draw(path: Path, report: dict[str, Any]) -> None:
    """Draw a panel for each part of the report."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [(part, panel) for part, panel in _PANELS if part in report]
    size = 5.6 * len(panels), 4.8
    figure, axes = pyplot.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for panel_axes, (part, panel) in zip(axes[0], panels, strict=True):
        panel(panel_axes, report[part])
        panel_axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)


def _schedules(axes: Any, runs: Sequence[dict[str, Any]]) -> None:
    """Draw step times over micro-batches for the largest number of stages: simulated as lines, measured as points."""
    stages = max(run["stages"] for run in runs)
    for name, colour in COLOURS.items():
        shown = [run for run in runs if (run["schedule"], run["stages"]) == (name, stages)]
        if not shown:
            continue
        counts = [run["micro_batches"] for run in shown]
        dashes = {"1f1b": "--"}.get(name, "-")
        per_image = ([run[key] / run["micro_batches"] for run in shown] for key in ("simulated", "median"))
        axes.plot(counts, next(per_image), dashes, color=colour, lw=1.5)
        axes.plot(counts, next(per_image), "v" if name == "1f1b" else "o", color=colour, ms=7, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({run["micro_batches"] for run in runs}))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("micro-batches (η of MASTER)")
    axes.set_ylabel("seconds of a step, over micro-batches")
    axes.set_title(f"{stages} stages that sleep: lines simulated, points measured", fontsize=10)
    axes.legend(frameon=False)


def _memory(axes: Any, runs: Sequence[dict[str, Any]]) -> None:
    """Draw the peak of each device: predicted as outlines, measured as filled bars."""
    width = 0.8 / max(len(run["measured_bytes"]) for run in runs)
    for group, run in enumerate(runs):
        colour = COLOURS[run["schedule"]]
        for device, pair in enumerate(zip(run["predicted_bytes"], run["measured_bytes"], strict=True)):
            predicted, measured = (amount / 2**20 for amount in pair)
            place = group - 0.4 + (device + 0.5) * width
            axes.bar(place, measured, 0.85 * width, color=colour, alpha=0.75, lw=0)
            axes.bar(place, predicted, 0.85 * width, color="none", edgecolor="0.1", lw=1.1)
    names = [f"{run['schedule']}\n{run['micro_batches']} x {run['samples'] // run['micro_batches']}" for run in runs]
    axes.set_xticks(range(len(runs)), names)
    axes.set_xlabel("schedule, micro-batches x samples; a bar for each device")
    axes.set_ylabel("peak (MiB)")
    axes.set_title("Memory of each device: outlines predicted, filled measured", fontsize=10)


def _models(axes: Any, models: dict[str, Any]) -> None:
    """Draw images per second of GEMS-Hybrid: by formula as lines, measured in the paper as points."""
    stages = models["resnet"][str(_pipeline_models.PATHOLOGY_STAGES)]["stages"]
    seconds, eta = 1 / _pipeline_models.PATHOLOGY["basic"], _pipeline_models.PATHOLOGY_ETA
    replicas = [2**power for power in range(9)]
    devices = [_pipeline_models.PATHOLOGY_STAGES * count for count in replicas]
    for line_eta, dashes in ((1, ":"), (2, "--"), (eta, "-")):
        rates = [_pipeline_models.images_per_second(stages, seconds, line_eta, count) for count in replicas]
        axes.plot(devices, rates, dashes, color="0.35", label=f"by formula, η = {line_eta}")
    measured = {1: _pipeline_models.PATHOLOGY["master"], **_pipeline_models.PATHOLOGY_HYBRID}
    places = [_pipeline_models.PATHOLOGY_STAGES * count for count in measured]
    axes.plot(places, list(measured.values()), "o", color="C3", label=f"Table II of GEMS, η = {eta}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("devices, in pipelines of four")
    axes.set_ylabel("images a second")
    axes.set_title(f"ResNet-{9 * models['blocks'] + 2}-v2, {models['image_size']} px", fontsize=10)
    axes.legend(frameon=False)


_PANELS = (("schedules", _schedules), ("memory", _memory), ("models", _models))
