"""Time of steps by kind of work, from TensorFlow's profiler."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

GROUPS = {
    "gradients of convolutions": r"Backprop",
    "convolutions": r"Conv",
    "pools and their gradients": r"Pool",
    "crops, pads, joins": r"Slice|Pad|Concat|Update|Identity|Empty",
}
"""Kinds of work, each with a pattern for the types of its ops; the first match decides."""

WAITING = "no operation runs"

Span = tuple[str, float, float]
"""Group of an op, and its begin and end in seconds."""


def seconds_by_group(run: Callable[[], object], steps: int) -> dict[str, float]:
    """Return the mean seconds of a step by kind of work.

    Convolutions in backward loops count as recomputed. Concurrent ops share their time equally.

    Args:
        run: Runs a step, which has run before.
        steps: Number of runs.
    """
    import tensorflow as tf

    with tempfile.TemporaryDirectory() as folder:
        with _quiet():
            tf.profiler.experimental.start(folder)
        try:
            began = time.perf_counter()
            for _ in range(steps):
                run()
            seconds = time.perf_counter() - began
        finally:
            with _quiet():
                tf.profiler.experimental.stop()
        totals = shared_time(span for path in Path(folder).glob("**/*.xplane.pb") for span in _spans(path.read_bytes()))
    if not totals:
        raise RuntimeError("TensorFlow's profile names no operation. Expected events with names such as `name:type`.")
    totals[WAITING] = max(0.0, seconds - sum(totals.values()))
    return {group: total / steps for group, total in totals.items()}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the messages that the profiler prints from C++."""
    sys.stderr.flush()
    stderr_copy = os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(stderr_copy, 2)
        os.close(stderr_copy)
        os.close(null)


def _spans(profile: bytes) -> Iterator[Span]:
    """Yield the time span of every op in a profile."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space: Any = xplane_pb2.XSpace.FromString(profile)
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                if (group := group_of(plane.event_metadata[event.metadata_id].name)) is not None:
                    begin = 1e-9 * line.timestamp_ns + 1e-12 * event.offset_ps
                    yield group, begin, begin + 1e-12 * event.duration_ps


def group_of(event: str) -> str | None:
    """Return the kind of work of an op's event, which TensorFlow names `name:type`; `None` for other events."""
    from rewriters.ir.graph import LOOPS

    operation = re.fullmatch(r"(?P<name>[^:]+):(?P<type>\w+)", event)
    if operation is None or operation["type"] in LOOPS:
        return None
    group = next((group for group, pattern in GROUPS.items() if re.search(pattern, operation["type"])), "others")
    is_recomputed = group == "convolutions" and re.search(r"/backward\d*/while", operation["name"])
    return "convolutions computed again" if is_recomputed else group


def shared_time(spans: Iterable[Span]) -> dict[str, float]:
    """Return the time of each group; concurrent spans share it equally."""
    # At equal times begins sort before ends, because a span may be empty.
    events = sorted((at, -change, group) for group, begin, end in spans for at, change in ((begin, 1), (end, -1)))
    running: collections.Counter[str] = collections.Counter()
    seconds: dict[str, float] = {}
    before = 0.0
    for at, negated_change, group in events:
        for other, number in running.items():
            if number:
                seconds[other] = seconds.get(other, 0.0) + (at - before) * number / running.total()
        running[group] -= negated_change
        before = at
    return seconds
