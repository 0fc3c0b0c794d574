"""Time of each op of a step, from TensorFlow's profiler."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

from rewriters.ir.graph import LOOPS

__all__: list[str] = []

R = TypeVar("R")


class OpSpan(NamedTuple):
    """One run of an op: name of the op in its graph or function, its type, begin and end in seconds."""

    name: str
    op: str
    begin: float
    end: float


def profiled(run: Callable[[], R]) -> tuple[R, list[OpSpan]]:
    """Return the result of a function and the runs of all ops meanwhile, without those of loops.

    If the profile cannot be written or read, there are none.

    Raises:
        tf.errors.AlreadyExistsError: If another profile is being recorded; the function has not been called.
    """
    with tempfile.TemporaryDirectory() as folder:
        with _quiet():
            tf.profiler.experimental.start(folder)
        try:
            result = run()
        except BaseException:
            with _quiet():
                tf.profiler.experimental.stop(save=False)
            raise
        try:
            with _quiet():
                tf.profiler.experimental.stop()
            paths = Path(folder).glob("**/*.xplane.pb")
            return result, [span for path in paths for span in _spans(path.read_bytes())]
        except (tf.errors.OpError, OSError, ImportError, ValueError):  # The run has had its effects.
            return result, []


def shared_time(spans: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Return the seconds of each key of (key, begin, end); concurrent spans share their time equally."""
    # At equal times begins sort before ends, because a span may be empty.
    events = sorted((at, -change, key) for key, begin, end in spans for at, change in ((begin, 1), (end, -1)))
    running: collections.Counter[str] = collections.Counter()
    seconds: dict[str, float] = {}
    before = 0.0
    for at, negated_change, key in events:
        total = running.total()
        for other, number in running.items():
            seconds[other] = seconds.get(other, 0.0) + (at - before) * number / total
        running[key] -= negated_change
        if not running[key]:
            del running[key]
            seconds.setdefault(key, 0.0)
        before = at
    return seconds


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


def _spans(profile: bytes) -> Iterator[OpSpan]:
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space: Any = xplane_pb2.XSpace.FromString(profile)
    for plane in space.planes:
        for line in plane.lines:
            for event in line.events:
                if (op := op_of(plane.event_metadata[event.metadata_id].name)) is not None:
                    begin = 1e-9 * line.timestamp_ns + 1e-12 * event.offset_ps
                    yield OpSpan(*op, begin, begin + 1e-12 * event.duration_ps)


def op_of(event: str) -> tuple[str, str] | None:
    """Return name and type of the op of an event, which TensorFlow names `name:type`; `None` for other events."""
    operation = re.fullmatch(r"(?P<name>[^:]+):(?P<type>\w+)", event)
    return None if operation is None or operation["type"] in LOOPS else (operation["name"], operation["type"])
