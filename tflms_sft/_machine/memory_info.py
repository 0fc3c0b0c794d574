"""Free memory of the machine and of the device."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

import tensorflow as tf

from rewriters.errors import RewriteError
from rewriters.ir.device_detection import detect_device, planned_device, proc_fields

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_STATISTICS = ("/sys/fs/cgroup/memory.stat", "/sys/fs/cgroup/memory/memory.stat")
_USAGES = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")

MAX_PAGE_CACHE_FRACTION = 0.5
"""Fraction of the machine's free memory that the page cache may take before writes reach the disk."""


def free_memory() -> int | None:
    """Return the free host memory in bytes, within the limit of a container; `None` where the system reports none."""
    free = _available()
    if free is None:
        return None
    for limit, used, statistics in zip(map(_number, _LIMITS), map(_number, _USAGES), _STATISTICS, strict=True):
        if limit is not None and used is not None:
            free = min(free, max(limit - used + _cached(statistics), 0))
    return free


def exceeds_page_cache(num_bytes: int) -> bool:
    """Return whether written bytes reach the disk itself, and not the page cache alone."""
    free = free_memory()
    return free is not None and num_bytes > free * MAX_PAGE_CACHE_FRACTION


def _cached(statistics: str) -> int:
    """Return the bytes of the page cache, which a container counts as used although they can be reclaimed."""
    size = 0
    with contextlib.suppress(OSError, ValueError), open(statistics, encoding="ascii") as lines:
        for name, value in map(str.split, lines):
            size += int(value) if name in ("inactive_file", "active_file") else 0
    return size


def device_memory_limit(devices: Sequence[str] = ()) -> int | None:
    """Return the bytes that TensorFlow may allocate on the planned GPU; `None` on a CPU.

    Args:
        devices: GPUs of several replicas, which all get what the smallest one has; the result is their sum.
    """
    limits = [_memory_limit(device) for device in devices or (planned_device().name,)]
    known = [limit for limit in limits if limit is not None]
    return len(known) * min(known) if known else None


def device_names(devices: Sequence[str] = ()) -> str:
    """Return the names of the devices whose memory is planned, for a message."""
    card, names = planned_device().card, ", ".join(devices) or planned_device().name
    if card is None:
        return names
    return f"{card.title} ({names})" if len(devices) > 1 else card.title


def free_device_memory(devices: Sequence[str] = ()) -> int:
    """Return the free bytes of the device whose memory is planned.

    Args:
        devices: As for `device_memory_limit`.

    Raises:
        RewriteError: If the system does not report its free memory.
    """
    if not planned_device().is_gpu:
        free = free_memory()
        if free is None:
            raise RewriteError(
                'The budget "auto" needs the free memory of the machine, which this system does not report. Give a '
                'size instead: `memory_budget="4GiB"`, on the command line `--budget 4GiB`.'
            )
        return free
    names = devices or (planned_device().name,)
    return len(names) * min(map(_free_bytes_of_gpu, names))


def _memory_limit(name: str) -> int | None:
    """Return the bytes that TensorFlow may allocate on a device; those of a planned card for each name."""
    planned = planned_device()
    return (planned if planned.card or planned.name == name else detect_device(name)).memory_limit


def _free_bytes_of_gpu(device: str) -> int:
    limit = _memory_limit(device)
    assert limit is not None
    in_use = 0 if planned_device().card else int(tf.config.experimental.get_memory_info(device)["current"])
    return max(limit - in_use, 0)


def _available() -> int | None:
    available = proc_fields("/proc/meminfo").get("MemAvailable")
    if available is not None:
        return int(available.split()[0]) * 1024
    with contextlib.suppress(AttributeError, OSError, ValueError):  # Windows has no `sysconf`, macOS not this value.
        return int(os.sysconf("SC_AVPHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))
    return None


def _number(path: str) -> int | None:
    with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
        return int(file.read())
    return None
