"""`measure`: the measured peak of a step, from allocator statistics or allocation records."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from typing import Any

import tensorflow as tf

from rewriters.device.gpu_kernels import without_gpu_optimizers
from rewriters.errors import RewriteError
from rewriters.ir import tf_internals
from rewriters.ir.device_detection import planned_device
from tflms_sft._params.device_names import remote_devices
from tflms_sft._report.plan import amend_plan
from tflms_sft._report.plan_records import Measurement, Timeline
from tflms_sft._rewrite import peak_statistics
from tflms_sft._rewrite.measured_timeline import timelines as device_timelines
from tflms_sft._rewrite.rewritten_step import RewrittenStep
from tflms_sft._trace.step_tracing import is_concrete
from tflms_sft._util.text import shortened

RECORDS_SOURCE = "allocation records of one step"

_MAX_NAMES = 4


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
        if peak_statistics.reset_peak() is not None:
            run(*args, **kwargs)  # The first run includes TensorFlow's graph optimisation.
            in_use = peak_statistics.reset_peak(tiers)
            run(*args, **kwargs)
            measurement = peak_statistics.read_peak(in_use or 0, step_bytes, tiers)
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
        device = tf_internals.short_device(value.device) if isinstance(value, tf.Tensor) else planned_device().name
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
