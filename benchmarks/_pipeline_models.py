"""Predictions for pipelines of the papers' networks, from plans of one image in stages.

Times of stages follow from the rates of this machine, so that only their ratios are valid for other machines.
Predictions for many devices scale them to a time that the paper reports. `benchmarks.pipeline` names the papers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import _child
from rewriters.pipelining.schedule_simulator import simulate
from rewriters.pipelining.schedules import make
from tflms_sft import gems, unets

GIB = 2**30

Stage = Mapping[str, Any]
"""Figures of a stage, from `_staged.stages_of`."""

SCHEDULES = (
    ("basic", 1),
    ("basic", 4),
    ("gpipe", 4),
    ("1f1b", 4),
    ("mast", 2),
    ("mast", 4),
    ("master", 4),
    ("master", 16),
)
"""Names of schedules, and numbers of micro-batches of one image each."""

SUMMIT_TILE, SUMMIT_STAGES = 1434, 6
"""Rows of a tile, and the largest number of stages: section 6.2 of Seal et al."""

PATHOLOGY_SIZE, PATHOLOGY_STAGES, PATHOLOGY_ETA = 1024, 4, 16
"""Rows of an image, GPUs of a node, and η of MASTER: section IX-B of Jain et al."""

PATHOLOGY = {"basic": 1.04, "mast": 1.19, "master": 1.56}
"""Images per second on 4 GPUs: Table II of Jain et al."""

PATHOLOGY_HYBRID = {2: 2.99, 4: 5.65, 8: 10.69, 16: 19.18, 32: 34.51}
"""Images per second by number of replicas, of 4 GPUs each: Table II of Jain et al."""

LARGEST_STAGES, LARGEST_REPLICAS = 8, 128
"""Stages and replicas on 1,024 GPUs: section VII-F of Jain et al."""

LINK_BYTES_PER_SECOND, LINK_LATENCY = 12.5e9, 10e-6
"""Assumed bandwidth and latency of a link between nodes: 100 Gbit/s, and 10 µs per message."""


@dataclasses.dataclass(frozen=True)
class Predicted:
    """Prediction for a network's stages under a schedule.

    Attributes:
        schedule: Name of the schedule.
        micro_batches: Number of micro-batches, of one image each.
        seconds: Time of a step.
        speedup: Speedup over the basic schedule with as many images.
        peak_bytes: Peak of each device.
    """

    schedule: str
    micro_batches: int
    seconds: float
    speedup: float
    peak_bytes: tuple[int, ...]


def predicted(stages: Sequence[Stage], name: str, micro_batches: int) -> Predicted:
    """Simulate a schedule with the times and bytes of a plan.

    The plan has one micro-batch. Its working memory, which a slot needs beyond weights and saved tensors, is added to
    the simulated peak of weights and saved tensors.
    """
    forward, backward = ([stage[key] for stage in stages] for key in ("forward", "backward"))
    transfer = [stage["transfer"] for stage in stages[:-1]]
    schedule = make(name, len(stages), micro_batches)
    weights, saved = ([stage[key] for stage in stages] for key in ("weight_bytes", "waiting_bytes"))
    simulation = simulate(schedule, forward, backward, transfer, weights=weights, activations=saved)
    working = [max(stage["peak_bytes"] - w - a, 0) for stage, w, a in zip(stages, weights, saved, strict=True)]
    peaks = tuple(
        peak + max(working[stage] for stage in schedule.stages_on(device))
        for device, peak in enumerate(simulation.peak_bytes)
    )
    basic = gems.total(forward, backward, transfer, micro_batches)
    return Predicted(name, micro_batches, simulation.seconds, basic / simulation.seconds, peaks)


def balanced(amounts: Sequence[float], count: int) -> list[int]:
    """Return the contiguous partition that minimises the largest sum, as the ends of all runs but the last.

    Args:
        amounts: At least `count` numbers.
        count: Number of runs.
    """
    if count == 1:
        return []
    best: tuple[float, list[int]] | None = None
    for end in range(1, len(amounts) - count + 2):
        ends = [end, *(end + offset for offset in balanced(amounts[end:], count - 1))]
        sums = [sum(amounts[a:b]) for a, b in zip([0, *ends], [*ends, len(amounts)], strict=True)]
        if best is None or max(sums) < best[0]:
            best = max(sums), ends
    assert best is not None
    return best[1]


def level_cuts(architecture: unets.Architecture, rows: int, stages: int) -> list[str]:
    """Return the layers of `_staged.unet` to cut at: ends of levels that balance memory.

    Equations 9 and 10 of Seal et al. give the memory of a level. On the way down a level ends with its pool, so that
    a quarter of its pixels are transferred.

    Args:
        architecture: Architecture of the U-Net.
        rows: Rows of the image.
        stages: Number of stages.
    """
    down = [f"level{level}" for level in range(architecture.levels - 1)]
    names = [*down, "the deepest", *(f"{name}_up" for name in reversed(down))]
    ends = balanced(architecture.memory(rows), stages)
    # The deepest level has no pool. It ends with the upsampling to the level above.
    return [names[end - 1] if names[end - 1] != "the deepest" else f"up{architecture.levels - 2}" for end in ends]


def pathology(*, image_size: int, blocks: int, stages: int) -> dict[str, Any]:
    """Return the stages of the ResNet, planned in a child process."""
    kwargs = {"network": "resnet_v2", "options": {"blocks": blocks}, "stages": stages, "image_size": image_size}
    return _child.call_in_child("benchmarks._staged:stages_of", kwargs)


def segmentation(architecture: unets.Architecture, *, tile: int, stages: int) -> dict[str, Any]:
    """Return the stages of a U-Net for the largest valid image that is no larger than a tile."""
    rows = architecture.nearest(tile)[0]
    options = {"levels": architecture.levels, "convolutions": architecture.convolutions}
    options |= {"filters": architecture.filters, "kernel": architecture.kernel}
    cuts = level_cuts(architecture, rows, stages)
    kwargs = {"network": "unet", "options": options, "stages": cuts, "image_size": rows}
    return {"rows": rows, "cuts": cuts, **_child.call_in_child("benchmarks._staged:stages_of", kwargs)}


# Many devices -------------------------------------------------------------------------------------------------------


def scaled(stages: Sequence[Stage], seconds: float) -> tuple[list[float], list[float], list[float]]:
    """Return forward, backward and transfer times of stages, scaled to a total work of `seconds` for an image."""
    factor = seconds / sum(stage["forward"] + stage["backward"] for stage in stages)
    forward, backward = ([factor * stage[key] for stage in stages] for key in ("forward", "backward"))
    return forward, backward, [factor * stage["transfer"] for stage in stages[:-1]]


def images_per_second(stages: Sequence[Stage], seconds: float, eta: int, replicas: int) -> float:
    """Return the throughput of GEMS-Hybrid by `gems.hybrid`: parallel pipelines, each with η images per step.

    Args:
        stages: Stages for one image.
        seconds: Total work of the stages for one image.
        eta: Replications η of each pipeline.
        replicas: Number of pipelines.
    """
    forward, backward, transfer = scaled(stages, seconds)
    gradients = [stage["weight_bytes"] for stage in stages]
    step = gems.hybrid(
        forward, backward, eta, replicas, gradients, LINK_BYTES_PER_SECOND, LINK_LATENCY, transfer=transfer
    )
    return eta * replicas / step


def speedup(stages: Sequence[Stage], seconds: float, eta: int, replicas: int) -> float:
    """Return the throughput of several pipelines over that of one pipeline, by `gems.scaling`."""
    forward, backward, transfer = scaled(stages, seconds)
    gradients = [stage["weight_bytes"] for stage in stages]
    return gems.scaling(
        forward, backward, eta, replicas, gradients, LINK_BYTES_PER_SECOND, LINK_LATENCY, transfer=transfer
    )
