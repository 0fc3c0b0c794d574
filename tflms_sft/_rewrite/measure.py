"""`measure`: the measured peak of a step, from allocator statistics or allocation records."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from rewriters.device import properties
from rewriters.device.gpu_kernels import without_gpu_optimizers
from rewriters.errors import RewriteError
from rewriters.ir import tf_internals
from rewriters.swapping.tiers import Tier
from tflms_sft._params.device_names import remote_devices
from tflms_sft._report.plan import amend_plan
from tflms_sft._report.plan_records import Measurement, Timeline
from tflms_sft._rewrite.measured_timeline import timelines as device_timelines
from tflms_sft._rewrite.rewritten_step import RewrittenStep
from tflms_sft._trace.step_tracing import is_concrete
from tflms_sft._util.text import shortened

STATISTICS_SOURCE = "allocator statistics"
RECORDS_SOURCE = "allocation records of one step"

_MAX_NAMES = 4


def earlier_peak(devices: Sequence[str] = ()) -> int:
    """Return the peak since the process began or the last `reset_peak`, in bytes; 0 without memory statistics."""
    try:
        return _statistic("peak", devices)
    except (ValueError, RuntimeError, tf.errors.OpError):
        return 0


def _statistic(key: str, devices: Sequence[str] = ()) -> int:
    """Return a sum over devices of a number of `get_memory_info`; by default that of the planned device."""
    names = devices or (properties.name(),)
    return sum(int(tf.config.experimental.get_memory_info(name)[key]) for name in names)


def reset_peak(tiers: Iterable[Tier] = (), devices: Sequence[str] = ()) -> int | None:
    """Start a measurement; return the bytes in use, or `None` if the device keeps no memory statistics."""
    try:
        for name in devices or (properties.name(),):
            tf.config.experimental.reset_memory_stats(name)
        in_use = _statistic("current", devices)
    except (ValueError, RuntimeError, tf.errors.OpError):
        return None
    for tier in tiers:
        watch_tier(tier)
    return in_use


def watch_tier(tier: Tier) -> None:
    """Include a tier that was created after `reset_peak` in the measurement."""
    tier.reset_peak(_take_allocator_peak)


def _take_allocator_peak() -> int:
    """Return the allocator's peak in bytes since the last call, and reset it."""
    peak = int(tf.config.experimental.get_memory_info(properties.name())["peak"])
    tf.config.experimental.reset_memory_stats(properties.name())
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
    try:
        peak = max(swapped, _statistic("peak", devices))
    except (ValueError, RuntimeError, tf.errors.OpError):
        return None
    pool, min_counted_bytes = properties.pool(), properties.min_counted_bytes()
    counted = [num_bytes for num_bytes in step_bytes if num_bytes >= min_counted_bytes]
    for num_bytes in counted:
        pool.allocate(num_bytes)
    others = max(in_use - pool.in_use, 0)
    if not peak or peak - others < sum(counted):
        return None  # The allocator counts only blocks above a size: the peak would be too low.
    names = " + ".join(devices) or properties.name()
    source = f"{STATISTICS_SOURCE} of {names}" + (", and arrays read from disk" if swapped else "")
    return Measurement(peak - others + sum(step_bytes) - sum(counted), source)


def measure(step: Any, *args: Any, timelines: bool = False, **kwargs: Any) -> Measurement:
    """Run a step and return the peak of the bytes alive on the device.

    The variables of the step are restored afterwards: weights, optimizer slots, metrics and seeds. The measurement of
    a rewritten step is also stored in its `plan.measured`.

    Args:
        step (RewrittenStep | tf.function | ConcreteFunction): A training step, rewritten or not.
        *args: Arguments of the step.
        timelines: Whether to record the bytes alive over time on each device. This takes two more runs on a copy of the
            variables, in which ops take longer than usual.
        **kwargs: Keyword arguments of the step.

    Returns:
        A `Measurement`: `peak_bytes` in bytes, variables included, and its `source`. The source is the allocator's
        statistics on devices that keep them (GPUs, and CPUs with oneDNN). Elsewhere it is the sum of the allocation
        records of one fully traced run, which also yields `timelines`.

    Raises:
        RewriteError: If the step runs on other machines too.
        TypeError: If `step` is not a step that can be traced.

    Examples:
        >>> measured = tflms_sft.measure(tiled, images, labels)
        >>> print(measured.peak_bytes, measured.source)
    """
    concrete_fn = _concrete(step, args, kwargs)
    remote = remote_devices(concrete_fn)
    if remote:
        raise RewriteError(
            f"The step also runs on other machines, {shortened(remote, _MAX_NAMES)}, whose memory cannot be measured "
            "from here. `plan.pipeline.peak_bytes` has predictions for each device."
        )
    run = step if callable(step) else concrete_fn
    saved = [
        (handle, tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype))
        for handle, dtype in tf_internals.captured_variables(concrete_fn)
    ]
    tiers = step.tiers if isinstance(step, RewrittenStep) else []
    arguments = tf.nest.flatten((args, kwargs))
    step_bytes = [
        *tf_internals.variable_sizes(concrete_fn),
        *(_num_bytes(t) for t in arguments if isinstance(t, tf.Tensor)),
    ]
    try:
        measurement = None
        if reset_peak() is not None:
            run(*args, **kwargs)  # The first run includes TensorFlow's graph optimisation.
            in_use = reset_peak(tiers)
            run(*args, **kwargs)
            measurement = read_peak(in_use or 0, step_bytes, tiers)
        if measurement is None or timelines:
            with without_gpu_optimizers() if isinstance(step, RewrittenStep) else contextlib.nullcontext():
                lines = _timelines(concrete_fn, arguments)
            peak = Measurement(lines[0].peak_bytes, RECORDS_SOURCE) if measurement is None else measurement
            measurement = dataclasses.replace(peak, timelines=lines)
    finally:
        for handle, value in saved:
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)
    if isinstance(step, RewrittenStep):
        step.plan = amend_plan(step.plan, measured=measurement)
    return measurement


def _timelines(concrete_fn: Any, arguments: list[Any]) -> tuple[Timeline, ...]:
    """Return the timelines of one run, which include variables and arguments."""
    fixed_bytes = collections.Counter[str]()
    for device, num_bytes in tf_internals.variable_places(concrete_fn):
        fixed_bytes[device] += num_bytes
    for value in arguments:
        device = tf_internals.short_device(value.device) if isinstance(value, tf.Tensor) else properties.name()
        fixed_bytes[device] += _num_bytes(value)
    return device_timelines(concrete_fn, arguments, fixed_bytes)


def _num_bytes(value: Any) -> int:
    """Return the bytes of an argument."""
    array = tf.convert_to_tensor(value)
    return int(tf.size(array)) * array.dtype.size


def _concrete(step: Any, args: Any, kwargs: Any) -> Any:
    """Return the `ConcreteFunction` of a step for these arguments."""
    if isinstance(step, RewrittenStep):
        return step.concrete_function
    if is_concrete(step):
        return step
    if hasattr(step, "get_concrete_function"):
        return step.get_concrete_function(*args, **kwargs)
    raise TypeError(
        "`step` must be a rewritten step, a `tf.function` or a `ConcreteFunction`. "
        f"Received: step={step!r} of type {type(step).__name__}."
    )
