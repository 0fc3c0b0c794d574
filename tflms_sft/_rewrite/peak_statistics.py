"""The peak of a device by the statistics of its allocator."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf

from rewriters.device.allocator import empty_pool
from rewriters.ir.device_detection import planned_device
from rewriters.swapping.tiers import Tier
from tflms_sft._report.plan_records import Measurement

STATISTICS_SOURCE = "allocator statistics"


def earlier_peak(devices: Sequence[str] = ()) -> int:
    """Return the peak since the process began or the last `reset_peak`, in bytes; 0 without memory statistics."""
    return _statistic("peak", devices) or 0


def _statistic(key: str, devices: Sequence[str]) -> int | None:
    """Return a sum over devices, by default the planned one, of a number of `get_memory_info`; `None` without it."""
    try:
        return sum(int(tf.config.experimental.get_memory_info(name)[key]) for name in _names(devices))
    except (ValueError, RuntimeError, tf.errors.OpError):
        return None


def _names(devices: Sequence[str]) -> Sequence[str]:
    return devices or (planned_device().name,)


def reset_peak(tiers: Iterable[Tier] = (), devices: Sequence[str] = ()) -> int | None:
    """Start a measurement; return the bytes in use, or `None` if the device keeps no memory statistics."""
    in_use = _statistic("current", devices)
    if in_use is None:
        return None
    for name in _names(devices):
        tf.config.experimental.reset_memory_stats(name)
    for tier in tiers:
        watch_tier(tier)
    return in_use


def watch_tier(tier: Tier) -> None:
    """Include a tier that was created after `reset_peak` in the measurement."""
    tier.reset_peak(_take_allocator_peak)


def _take_allocator_peak() -> int:
    """Return the allocator's peak in bytes since the last call, and reset it."""
    peak = int(tf.config.experimental.get_memory_info(planned_device().name)["peak"])
    tf.config.experimental.reset_memory_stats(planned_device().name)
    return peak


def read_peak(
    in_use: int, step_bytes: Sequence[int], tiers: Iterable[Tier] = (), devices: Sequence[str] = ()
) -> Measurement | None:
    """Return the peak of a step since `reset_peak`, without memory of others (data sets, other models).

    Blocks below the size that the allocator's statistics count are added for the step's own tensors only.

    Args:
        in_use: Bytes in use when the step began.
        step_bytes: Sizes of the step's own tensors that were in memory then, such as its variables.
        tiers: Swap tiers of the step, which know the bytes of arrays that they hold.
        devices: GPUs whose peaks are added up; by default the planned device alone.

    Returns:
        The peak, or `None` if the device keeps no statistics, or none of blocks so small.
    """
    swapped = max((tier.peak_bytes() for tier in tiers), default=0)
    allocated = _statistic("peak", devices)
    if allocated is None:
        return None
    peak, device = max(swapped, allocated), planned_device()
    pool, min_counted_bytes = empty_pool(device), device.min_counted_bytes
    counted = [num_bytes for num_bytes in step_bytes if num_bytes >= min_counted_bytes]
    for num_bytes in counted:
        pool.allocate(num_bytes)
    others = max(in_use - pool.in_use, 0)
    if not peak or peak - others < sum(counted):
        return None  # The allocator counts only blocks above a size: the peak would be too low.
    names = " + ".join(devices) or device.name
    source = f"{STATISTICS_SOURCE} of {names}" + (", and arrays read from disk" if swapped else "")
    return Measurement(peak - others + sum(step_bytes) - sum(counted), source)
