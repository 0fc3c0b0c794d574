"""Reads the facts of the present machine into a `DeviceModel`."""

from __future__ import annotations

import contextlib
import functools
import os
import sys

import tensorflow as tf

from rewriters.ir import tf_internals
from rewriters.ir.device_model import DEFAULT_CACHE_BYTES, DeviceModel, gpu_maps_pages, planned_instead

__all__: list[str] = []

_SC_LEVEL2_CACHE_SIZE, _SC_LEVEL3_CACHE_SIZE = 191, 194
"""Numbers of the sysconf names in the C library; Python does not export them."""


def planned_device() -> DeviceModel:
    """Return the device that plans are made for: that of `planning_for`, otherwise the first GPU, otherwise the CPU."""
    return planned_instead(detect_device("GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"))


@functools.cache
def detect_device(name: str) -> DeviceModel:
    """Return a device of this machine by its name. Its facts are final, because this function starts TensorFlow."""
    is_gpu, gpus = name.startswith("GPU"), tf.config.list_physical_devices("GPU")
    has_stats = _has_allocator_stats(name)
    threading, processors = tf.config.threading, os.cpu_count() or 1
    return DeviceModel(
        name=name,
        compute_capability=_compute_capability() if is_gpu else 0.0,
        has_allocator_stats=has_stats,
        min_counted_bytes=_min_counted_bytes(name) if has_stats else 0,
        memory_limit=tf_internals.memory_limits().get(name) if is_gpu else None,
        grows=not is_gpu or all(map(tf.config.experimental.get_memory_growth, gpus[:1])),
        maps_pages=is_gpu and gpu_maps_pages(),
        processor_flags=frozenset(proc_fields("/proc/cpuinfo").get("flags", "").split()),
        intra_op_threads=threading.get_intra_op_parallelism_threads() or processors,
        inter_op_threads=threading.get_inter_op_parallelism_threads() or processors,
        last_level_cache_bytes=_cache_bytes(_SC_LEVEL3_CACHE_SIZE) or DEFAULT_CACHE_BYTES,
        second_level_cache_bytes=_cache_bytes(_SC_LEVEL2_CACHE_SIZE),
    )


def _compute_capability() -> float:
    """Return the compute capability of the first GPU of this machine; 0 if all are in other machines."""
    gpus = tf.config.get_visible_devices("GPU")
    details = tf.config.experimental.get_device_details(gpus[0]) if gpus else {}
    major, minor = details.get("compute_capability", (0, 0))
    return major + minor / 10


def _has_allocator_stats(device: str) -> bool:
    try:
        tf.config.experimental.get_memory_info(device)
    except (ValueError, RuntimeError, tf.errors.OpError):
        return False
    return True


def _min_counted_bytes(device: str) -> int:
    for size in (2**power for power in range(8, 21)):
        before = tf.config.experimental.get_memory_info(device)["current"]
        # While a step is traced, an op without this scope would allocate nothing.
        with tf.init_scope(), tf.device(device):
            block = tf.identity(tf.zeros(size, tf.uint8))
        after = tf.config.experimental.get_memory_info(device)["current"]
        del block
        if after - before >= size:
            return size if size > 256 else 0
    return 0


def proc_fields(path: str) -> dict[str, str]:
    """Return the first value of each field of a file in /proc; empty if the file does not exist."""
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    return fields


def _cache_bytes(name: int) -> int:
    """Return the size of a cache by its sysconf name; 0 if it is unknown."""
    if sys.platform == "linux":  # The number means something else in other C libraries.
        with contextlib.suppress(OSError, ValueError):
            return max(os.sysconf(name), 0)
    return 0
