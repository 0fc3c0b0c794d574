"""How much memory there is."""

from __future__ import annotations

import contextlib
import os

import tensorflow as tf

from rewriters.device import properties

_MEMINFO = "/proc/meminfo"
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_STATISTICS = ("/sys/fs/cgroup/memory.stat", "/sys/fs/cgroup/memory/memory.stat")
_USAGES = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")


def free_memory() -> int:
    """Bytes of the machine's memory that a process may still take, a container's limit included."""
    free = _available()
    for limit, used, statistics in zip(map(_number, _LIMITS), map(_number, _USAGES), _STATISTICS, strict=True):
        if limit is not None and used is not None:
            free = min(free, max(limit - used + _cached(statistics), 0))
    return free


def _cached(statistics: str) -> int:
    """Bytes of files that a container counts as used, and that give way to what a process needs."""
    found = 0
    with contextlib.suppress(OSError, ValueError), open(statistics, encoding="ascii") as lines:
        for name, value in map(str.split, lines):
            found += int(value) if name in ("inactive_file", "active_file") else 0
    return found


def free_device_memory() -> int:
    """Bytes that are free on the device whose memory counts."""
    if properties.name().startswith("CPU"):
        return free_memory()
    in_use = int(tf.config.experimental.get_memory_info(properties.name())["current"])
    return max(properties.memory_limit() - in_use, 0)


def _available() -> int:
    with contextlib.suppress(OSError, ValueError), open(_MEMINFO, encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return int(os.sysconf("SC_AVPHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))


def _number(path: str) -> int | None:
    with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
        return int(file.read())
    return None
