"""Predictions for pipelines of the papers' networks, from the plan of one image in stages.

Times of stages are those of the machine's rates, so that only their ratios say something of other machines. Where
seconds are needed, for what many devices do to each other, they are scaled to a time that the paper has measured.
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
"""As `_staged.stages_of` returns it."""

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
"""Names and numbers of micro-batches, each of one image."""

SUMMIT_TILE, SUMMIT_STAGES = 1434, 6
"""Seal et al., section 6.2: rows of their tiles, and the most stages."""

PATHOLOGY_SIZE, PATHOLOGY_STAGES, PATHOLOGY_ETA = 1024, 4, 16
"""Jain et al., section IX-B: rows of the images, GPUs of a node, MASTER's batch."""

PATHOLOGY = {"basic": 1.04, "mast": 1.19, "master": 1.56}
"""Table II: images a second on 4 GPUs."""

PATHOLOGY_HYBRID = {2: 2.99, 4: 5.65, 8: 10.69, 16: 19.18, 32: 34.51}
"""Table II: images a second of so many replicas on 4 GPUs each."""

LARGEST_STAGES, LARGEST_REPLICAS = 8, 128
"""Section VII-F: 1,024 GPUs."""

LINK_BYTES_PER_SECOND, LINK_LATENCY = 12.5e9, 10e-6
"""Assumed of a link between nodes: 100 Gbit/s, and 10 µs for a message."""


@dataclasses.dataclass(frozen=True)
class Predicted:
    """A schedule of a network's stages.

    Attributes:
        schedule: Its name.
        micro_batches: Of one image each.
        seconds: Of a step.
        speedup: Over the basic schedule, image by image.
        peak_bytes: Of each device.
    """

    schedule: str
    micro_batches: int
    seconds: float
    speedup: float
    peak_bytes: tuple[int, ...]


def predicted(stages: Sequence[Stage], name: str, micro_batches: int) -> Predicted:
    """Executes a schedule with the times and bytes of a plan.

    What a slot needs besides what waits is known of the plan's one micro-batch; it is taken to be needed beside the
    most that waits.
    """
    forward, backward = ([stage[key] for stage in stages] for key in ("forward", "backward"))
    transfer = [stage["transfer"] for stage in stages[:-1]]
    schedule = make(name, len(stages), micro_batches)
    weights, waiting = ([stage[key] for stage in stages] for key in ("weight_bytes", "waiting_bytes"))
    found = simulate(schedule, forward, backward, transfer, weights=weights, activations=waiting)
    working = [max(stage["peak_bytes"] - w - a, 0) for stage, w, a in zip(stages, weights, waiting, strict=True)]
    peaks = tuple(
        peak + max(working[stage] for stage in schedule.stages_on(device))
        for device, peak in enumerate(found.peak_bytes)
    )
    basic = gems.total(forward, backward, transfer, micro_batches)
    return Predicted(name, micro_batches, found.seconds, basic / found.seconds, peaks)


def balanced(amounts: Sequence[float], count: int) -> list[int]:
    """Cuts a row of amounts into runs whose largest sum is as small as can be; returns where all but the last end.

    Args:
        amounts: At least as many as `count`.
        count: Number of runs.
    """
    if count == 1:
        return []
    best: tuple[float, list[int]] | None = None
    for end in range(1, len(amounts) - count + 2):
        rest = balanced(amounts[end:], count - 1)
        ends = [end, *(end + more for more in rest)]
        sums = [sum(amounts[a:b]) for a, b in zip([0, *ends], [*ends, len(amounts)], strict=True)]
        if best is None or max(sums) < best[0]:
            best = max(sums), ends
    assert best is not None
    return best[1]


def level_cuts(architecture: unets.Architecture, rows: int, stages: int) -> list[str]:
    """Layers of `_staged.unet` to cut at: after levels, as even as the paper's equations 9 and 10 can tell.

    On the way down a level ends with its pool, so that a quarter of what it made is sent.

    Args:
        architecture: Of the U-Net.
        rows: Of the image.
        stages: Their number.
    """
    down = [f"level{level}" for level in range(architecture.levels - 1)]
    names = [*down, "the deepest", *(f"{name}_up" for name in reversed(down))]
    ends = balanced(architecture.memory(rows), stages)
    # The deepest level has no pool; it goes with the level above, whose way up it leads to.
    return [names[end - 1] if names[end - 1] != "the deepest" else f"up{architecture.levels - 2}" for end in ends]


def pathology(*, image_size: int, blocks: int, stages: int) -> dict[str, Any]:
    """The stages of the ResNet, from a child."""
    kwargs = {"network": "resnet_v2", "options": {"blocks": blocks}, "stages": stages, "image_size": image_size}
    return _child.call_in_child("benchmarks._staged:stages_of", kwargs)


def segmentation(architecture: unets.Architecture, *, tile: int, stages: int) -> dict[str, Any]:
    """The stages of a U-Net for the largest image that is no larger than a tile and leaves nothing over."""
    rows = architecture.nearest(tile)[0]
    options = {"levels": architecture.levels, "convolutions": architecture.convolutions}
    options |= {"filters": architecture.filters, "kernel": architecture.kernel}
    cuts = level_cuts(architecture, rows, stages)
    kwargs = {"network": "unet", "options": options, "stages": cuts, "image_size": rows}
    return {"rows": rows, "cuts": cuts, **_child.call_in_child("benchmarks._staged:stages_of", kwargs)}


# Many devices -------------------------------------------------------------------------------------------------------


def scaled(stages: Sequence[Stage], seconds: float) -> tuple[list[float], list[float], list[float]]:
    """Forward, backward and transfer times of stages, whose work together takes so many seconds for an image."""
    factor = seconds / sum(stage["forward"] + stage["backward"] for stage in stages)
    forward, backward = ([factor * stage[key] for stage in stages] for key in ("forward", "backward"))
    return forward, backward, [factor * stage["transfer"] for stage in stages[:-1]]


def images_per_second(stages: Sequence[Stage], seconds: float, eta: int, replicas: int) -> float:
    """Return the throughput of GEMS-Hybrid: parallel pipelines, each with η images a step, by `gems.hybrid`.

    Args:
        stages: Of one image.
        seconds: That all of them take together.
        eta: Replications of each pipeline.
        replicas: Pipelines.
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
