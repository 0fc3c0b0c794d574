"""How much of the machine other processes keep busy, as Linux tells it."""

from __future__ import annotations

import os

__all__: list[str] = []

_IDLE, _WAITING, _FIELDS = 3, 4, 8
"""Where `/proc/stat` has the time without work and the time spent waiting for disks, and how many of its fields add up
to all there is."""


class OtherProcesses:
    """What other processes take, from now on."""

    def __init__(self) -> None:
        self._begun = _seconds()

    def part(self) -> float:
        """Part of all cores since then; 0 where the system does not tell."""
        now = _seconds()
        if now is None or self._begun is None:
            return 0.0
        total, worked, own = (after - before for before, after in zip(self._begun, now, strict=True))
        return max(worked - own, 0.0) / total if total > 0 else 0.0


def _seconds() -> tuple[float, float, float] | None:
    """Of all cores, those that they worked, and those for this process and for the ones whose end it has seen."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            fields = file.readline().split()
    except OSError:
        return None
    if fields[:1] != ["cpu"] or len(fields) <= _FIELDS:
        return None
    each = [int(field) / os.sysconf("SC_CLK_TCK") for field in fields[1 : _FIELDS + 1]]
    return sum(each), sum(each) - each[_IDLE] - each[_WAITING], sum(os.times()[:4])
