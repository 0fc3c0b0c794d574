"""Copies between a GPU and the host beside computation, in the trace of a step."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

Period = tuple[int, int]
"""Begin and end in microseconds."""

_STREAM = re.compile(r"/device:GPU:\d+/stream:\d+")
"""Devices of TensorFlow's GPU tracer with the activities of one stream, such as `/device:GPU:0/stream:13<MemcpyH2D>`.
It lists them again under `stream:all` and `memcpy`."""
_HOST_COPY = re.compile(r"memcpy(h2d|d2h|htod|dtoh)", re.IGNORECASE)
_SWAP = re.compile(r"swap", re.IGNORECASE)


class Activity(NamedTuple):
    """Periods of copies and of computation.

    Attributes:
        copies: Copies between device and host; on a CPU the swap ops.
        kernels: Other activities of the device; on a CPU all other ops.
        devices: Number of trace entries of each device in the trace.
    """

    copies: frozenset[Period]
    kernels: frozenset[Period]
    devices: dict[str, int]


def activity(stats: Any, device: str) -> Activity:
    """Return the copies and the computation in `StepStats`.

    The times of TensorFlow's executor are not used on a GPU: they are those of launches. Without CUPTI there is nothing
    else in the trace, and no copy is returned.

    Args:
        stats: `StepStats` of a fully traced run.
        device: "gpu" or "cpu".
    """
    copies: set[Period] = set()
    kernels: set[Period] = set()
    devices: dict[str, int] = {}
    for part in stats.dev_stats:
        devices[part.device] = devices.get(part.device, 0) + len(part.node_stats)
        if device == "gpu" and not _STREAM.search(part.device):
            continue
        for node in part.node_stats:
            text = f"{part.device} {node.node_name} {node.timeline_label}"
            is_copy = (_HOST_COPY if device == "gpu" else _SWAP).search(text)
            period = node.all_start_micros, node.all_start_micros + node.op_end_rel_micros
            (copies if is_copy else kernels).add(period)
    return Activity(frozenset(copies), frozenset(kernels), devices)


def hidden_fraction(copies: Iterable[Period], kernels: Iterable[Period]) -> float | None:
    """Return the fraction of the time of `copies` in which one of `kernels` runs; `None` without copies."""
    union = _union(kernels)
    ends = [end for _, end in union]
    total = hidden = 0
    for begin, end in copies:
        total += end - begin
        for start, stop in union[bisect.bisect_right(ends, begin) :]:
            if start >= end:
                break
            hidden += min(end, stop) - max(begin, start)
    return hidden / total if total else None


def hideable_fraction(copies: Iterable[Period], kernels: Iterable[Period]) -> float | None:
    """Return the fraction of the time of `copies` that `kernels` last at most, so that they can hide it.

    Returns:
        A number from 0 to 1; `None` without copies.
    """
    total = sum(end - begin for begin, end in copies)
    return min(1.0, sum(end - begin for begin, end in _union(kernels)) / total) if total else None


def _union(periods: Iterable[Period]) -> list[list[int]]:
    """Return disjoint periods that cover the given ones, in order."""
    union: list[list[int]] = []
    for begin, end in sorted(periods):
        if union and begin <= union[-1][1]:
            union[-1][1] = max(union[-1][1], end)
        else:
            union.append([begin, end])
    return union


def hidden_fraction_by_times(plain: float, swapped: float, copying: float) -> float | None:
    """Return the fraction of the time of copies that does not prolong the step, from 0 to 1; `None` without copies.

    Args:
        plain: Seconds of the original step.
        swapped: Seconds of the step with swaps.
        copying: Seconds of the copies of its swaps alone.
    """
    return min(1.0, max(0.0, 1 - (swapped - plain) / copying)) if copying > 0 else None
