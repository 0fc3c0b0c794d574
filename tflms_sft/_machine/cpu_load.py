"""CPU cores of this process, and the load by other processes from `/proc/stat`."""

from __future__ import annotations

import os
from collections.abc import Callable

__all__: list[str] = []

_IDLE, _WAITING, _NUM_FIELDS = 3, 4, 8
"""Columns of idle time and of time waiting for disks in `/proc/stat`, and number of columns that make up all time."""


def cpu_seconds(path: str = "/proc/stat") -> tuple[float, float, float] | None:
    """Return the seconds of all cores, their busy seconds, and those of this process and its finished children."""
    try:
        with open(path, encoding="ascii") as file:
            fields = file.readline().split()
    except OSError:
        return None
    if fields[:1] != ["cpu"] or len(fields) <= _NUM_FIELDS:
        return None
    seconds = [int(field) / os.sysconf("SC_CLK_TCK") for field in fields[1 : _NUM_FIELDS + 1]]
    return sum(seconds), sum(seconds) - seconds[_IDLE] - seconds[_WAITING], sum(os.times()[:4])


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class OtherProcesses:
    """Measures the CPU time of other processes since its construction."""

    def __init__(self, seconds: Callable[[], tuple[float, float, float] | None] = cpu_seconds) -> None:
        self._seconds, self._start = seconds, seconds()

    def busy_fraction(self) -> float:
        """Return the fraction of all cores that other processes used; 0 on systems without `/proc/stat`."""
        end = self._seconds()
        if end is None or self._start is None:
            return 0.0
        total, busy, by_this = (after - before for before, after in zip(self._start, end, strict=True))
        return max(busy - by_this, 0.0) / total if total > 0 else 0.0
