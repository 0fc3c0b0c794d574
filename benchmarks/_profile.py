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
"""What an op's time counts as, by a pattern in its type; the first that is found."""

WAITING = "no operation runs"

Span = tuple[str, float, float]
"""Of an operation: group, begin and end in seconds."""


def seconds_by_group(run: Callable[[], object], steps: int) -> dict[str, float]:
    """Returns seconds of a step by what was done, the mean of several.

    Convolutions in the backward loops are recomputations. Where several ops run at a time each has its part of it.

    Args:
        run: Runs one step; it has run before.
        steps: How often it is run.
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
        found = shared_time(span for path in Path(folder).glob("**/*.xplane.pb") for span in _spans(path.read_bytes()))
    if not found:
        raise RuntimeError("TensorFlow's profile names no operation: its events are called otherwise than before.")
    found[WAITING] = max(0.0, seconds - sum(found.values()))
    return {group: total / steps for group, total in found.items()}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what the profiler's own options make it print, from C++."""
    sys.stderr.flush()
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _spans(profile: bytes) -> Iterator[Span]:
    """Yield the time span of every operation in a profile."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space: Any = xplane_pb2.XSpace.FromString(profile)
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                if (group := group_of(plane.event_metadata[event.metadata_id].name)) is not None:
                    begin = 1e-9 * line.timestamp_ns + 1e-12 * event.offset_ps
                    yield group, begin, begin + 1e-12 * event.duration_ps


def group_of(event: str) -> str | None:
    """Returns what the time of an operation counts as, which TensorFlow calls `name:type`; None for other events."""
    from rewriters.ir.graph import LOOPS

    operation = re.fullmatch(r"(?P<name>[^:]+):(?P<type>\w+)", event)
    if operation is None or operation["type"] in LOOPS:
        return None
    group = next((group for group, pattern in GROUPS.items() if re.search(pattern, operation["type"])), "others")
    again = group == "convolutions" and re.search(r"/backward\d*/while", operation["name"])
    return "convolutions computed again" if again else group


def shared_time(spans: Iterable[Span]) -> dict[str, float]:
    """Returns the time of each group, where every moment is divided among all spans that it is in."""
    # At the same moment beginnings come first: a span may be over as it begins.
    events = sorted((at, -change, group) for group, begin, end in spans for at, change in ((begin, 1), (end, -1)))
    running: collections.Counter[str] = collections.Counter()
    seconds: dict[str, float] = {}
    before = 0.0
    for at, less, group in events:
        for other, number in running.items():
            if number:
                seconds[other] = seconds.get(other, 0.0) + (at - before) * number / running.total()
        running[group] -= less
        before = at
    return seconds
