"""The picture of `benchmarks.pipeline`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import _pipeline_models

COLOURS = {"basic": "0.45", "gpipe": "C0", "1f1b": "C9", "mast": "C1", "master": "C3"}


def draw(path: Path, report: dict[str, Any]) -> None:
    """A panel for each part that was run, and one for many devices."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [(part, panel) for part, panel in _PANELS if part in report]
    size = 5.6 * len(panels), 4.8
    figure, axes = pyplot.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for own, (part, panel) in zip(axes[0], panels, strict=True):
        panel(own, report[part])
        own.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)


def _schedules(axes: Any, found: Sequence[dict[str, Any]]) -> None:
    """Times of the most stages, over micro-batches: simulated as lines, measured as points."""
    stages = max(own["stages"] for own in found)
    for name, colour in COLOURS.items():
        own = [one for one in found if (one["schedule"], one["stages"]) == (name, stages)]
        if not own:
            continue
        counts = [one["micro_batches"] for one in own]
        dashes = {"1f1b": "--"}.get(name, "-")
        per_image = ([one[key] / one["micro_batches"] for one in own] for key in ("simulated", "median"))
        axes.plot(counts, next(per_image), dashes, color=colour, lw=1.5)
        axes.plot(counts, next(per_image), "v" if name == "1f1b" else "o", color=colour, ms=7, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({one["micro_batches"] for one in found}))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("micro-batches (η of MASTER)")
    axes.set_ylabel("seconds of a step, over micro-batches")
    axes.set_title(f"{stages} stages that sleep: lines simulated, points measured", fontsize=10)
    axes.legend(frameon=False)


def _memory(axes: Any, found: Sequence[dict[str, Any]]) -> None:
    """Peaks of each device: predicted as outlines, measured filled."""
    width = 0.8 / max(len(own["measured_bytes"]) for own in found)
    for group, own in enumerate(found):
        colour = COLOURS[own["schedule"]]
        for device, pair in enumerate(zip(own["predicted_bytes"], own["measured_bytes"], strict=True)):
            predicted, measured = (amount / 2**20 for amount in pair)
            place = group - 0.4 + (device + 0.5) * width
            axes.bar(place, measured, 0.85 * width, color=colour, alpha=0.75, lw=0)
            axes.bar(place, predicted, 0.85 * width, color="none", edgecolor="0.1", lw=1.1)
    names = [f"{own['schedule']}\n{own['micro_batches']} x {own['samples'] // own['micro_batches']}" for own in found]
    axes.set_xticks(range(len(found)), names)
    axes.set_xlabel("schedule, micro-batches x samples; a bar for each device")
    axes.set_ylabel("peak (MiB)")
    axes.set_title("Memory of each device: outlines predicted, filled measured", fontsize=10)


def _models(axes: Any, found: dict[str, Any]) -> None:
    """Images a second of GEMS-Hybrid: by formula, and measured in the paper."""
    stages = found["resnet"][str(_pipeline_models.PATHOLOGY_STAGES)]["stages"]
    seconds, eta = 1 / _pipeline_models.PATHOLOGY["basic"], _pipeline_models.PATHOLOGY_ETA
    replicas = [2**power for power in range(9)]
    devices = [_pipeline_models.PATHOLOGY_STAGES * count for count in replicas]
    for own, dashes in ((1, ":"), (2, "--"), (eta, "-")):
        rates = [_pipeline_models.images_per_second(stages, seconds, own, count) for count in replicas]
        axes.plot(devices, rates, dashes, color="0.35", label=f"by formula, η = {own}")
    measured = {1: _pipeline_models.PATHOLOGY["master"], **_pipeline_models.PATHOLOGY_HYBRID}
    places = [_pipeline_models.PATHOLOGY_STAGES * count for count in measured]
    axes.plot(places, list(measured.values()), "o", color="C3", label=f"Table II of GEMS, η = {eta}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("devices, in pipelines of four")
    axes.set_ylabel("images a second")
    axes.set_title(f"ResNet-{9 * found['blocks'] + 2}-v2, {found['image_size']} px", fontsize=10)
    axes.legend(frameon=False)


_PANELS = (("schedules", _schedules), ("memory", _memory), ("models", _models))
