"""The measured peak of a step, and where the number comes from."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from rewriters.device import properties
from rewriters.errors import RewriteError
from rewriters.ir import tf_internals
from rewriters.swapping.tiers import Tier
from tflms_sft._params.device_names import elsewhere
from tflms_sft._report.plan_records import Measurement, Timeline
from tflms_sft._rewrite.measured_timeline import timelines as device_timelines
from tflms_sft._rewrite.rewritten_step import RewrittenStep
from tflms_sft._trace.step_tracing import is_concrete
from tflms_sft._util.text import shortened

ALLOCATOR = "allocator statistics"
RECORDS = "allocation records of one step"

_MOST_NAMES = 4


def reset_peak(tiers: Iterable[Tier] = ()) -> int | None:
    """Start a new measurement; returns the bytes in use, or `None` if this device keeps no statistics."""
    try:
        tf.config.experimental.reset_memory_stats(properties.name())
        in_use = int(tf.config.experimental.get_memory_info(properties.name())["current"])
    except (ValueError, RuntimeError, tf.errors.OpError):
        return None
    for tier in tiers:
        watch(tier)
    return in_use


def watch(tier: Tier) -> None:
    """Have a tier that came after `reset_peak` take part in the measurement."""
    tier.reset_peak(_allocated)


def _allocated() -> int:
    """The allocator's peak since this was asked last."""
    peak = int(tf.config.experimental.get_memory_info(properties.name())["peak"])
    tf.config.experimental.reset_memory_stats(properties.name())
    return peak


def read_peak(in_use: int, own: Sequence[int], tiers: Iterable[Tier] = ()) -> Measurement | None:
    """The peak since `reset_peak`, less what was in use that is not the step's (data sets, other models).

    Args:
        in_use: Bytes in use when the step began.
        own: Sizes of what the step itself had in use then, such as its variables.
        tiers: Where the step swaps to, which know what they have in memory.

    Returns:
        The peak, or `None` if this device keeps no statistics. Small blocks that its allocator does not count are in it
        as far as they are the step's own.
    """
    swapped = max((tier.peak_bytes() for tier in tiers), default=0)
    try:
        peak = max(swapped, int(tf.config.experimental.get_memory_info(properties.name())["peak"]))
    except (ValueError, RuntimeError, tf.errors.OpError):
        return None
    pool, least = properties.pool(), properties.counted_from()
    counted = [num_bytes for num_bytes in own if num_bytes >= least]
    for num_bytes in counted:
        pool.allocate(num_bytes)
    others = max(in_use - pool.in_use, 0)
    if not peak or peak - others < sum(counted):
        return None  # Some allocators count only blocks above a size: the figure would be too low.
    source = f"{ALLOCATOR} of {properties.name()}" + (", and what was read from disk" if swapped else "")
    return Measurement(peak - others + sum(own) - sum(counted), source)


def measure(step: Any, *args: Any, timelines: bool = False, **kwargs: Any) -> Measurement:
    """Run one step and tell the peak of what was alive on the device.

    The step's variables are put back afterwards, so that weights, optimizer slots,
    metrics and seeds are as before.

    Args:
        step: What `rewrite` returned, a `tf.function`, or a `ConcreteFunction`.
        *args: Arguments of a step.
        timelines: Whether to tell what was alive when, on each device. That takes two more runs, on a copy of the
            variables, in which operations take longer than otherwise.
        **kwargs: Arguments of a step by keyword.

    Returns:
        `peak_bytes`, variables included; `source` says which of two it is. Allocator statistics are used
        where the device has them (a GPU; a CPU with oneDNN). Otherwise the step runs once with a full
        trace and its allocation records are added up, which also gives `timelines`. The measurement of a
        rewritten step is its `plan.measured` too.

    Raises:
        RewriteError: If the step is also on other machines.
        TypeError: If `step` cannot be traced.
    """
    concrete_fn = _concrete(step, args, kwargs)
    afar = elsewhere(concrete_fn)
    if afar:
        raise RewriteError(
            f"The step is also on other machines, {shortened(afar, _MOST_NAMES)}, and only what this one allocates can "
            "be measured. `plan.pipeline.peak_bytes` has predictions for each device."
        )
    run = step if callable(step) else concrete_fn
    saved = [
        (handle, tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype))
        for handle, dtype in tf_internals.captured_variables(concrete_fn)
    ]
    tiers = step.tiers if isinstance(step, RewrittenStep) else []
    sizes = tf_internals.variable_sizes(concrete_fn)
    given = tf.nest.flatten((args, kwargs))
    try:
        found = None
        if reset_peak() is not None:
            run(*args, **kwargs)  # The first run also pays for graph optimisation.
            in_use = reset_peak(tiers)
            run(*args, **kwargs)
            found = read_peak(in_use or 0, [*sizes, *(_size(t) for t in given if isinstance(t, tf.Tensor))], tiers)
        if found is None or timelines:
            lines = _timelines(concrete_fn, given)
            peak = Measurement(lines[0].peak_bytes, RECORDS) if found is None else found
            found = dataclasses.replace(peak, timelines=lines)
    finally:
        for handle, value in saved:
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)
    if isinstance(step, RewrittenStep):
        step.plan.measured = found
    return found


def _timelines(concrete_fn: Any, given: list[Any]) -> tuple[Timeline, ...]:
    """What one run allocates, with the variables and arguments, which are there already."""
    fixed = collections.Counter[str]()
    for place, num_bytes in tf_internals.variable_places(concrete_fn):
        fixed[place] += num_bytes
    for value in given:
        place = tf_internals.short_device(value.device) if isinstance(value, tf.Tensor) else properties.name()
        fixed[place] += _size(value)
    return device_timelines(concrete_fn, given, fixed)


def _size(value: Any) -> int:
    """Bytes of an argument."""
    array = tf.convert_to_tensor(value)
    return int(tf.size(array)) * array.dtype.size


def _concrete(step: Any, args: Any, kwargs: Any) -> Any:
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
