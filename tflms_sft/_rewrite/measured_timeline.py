"""Timelines: the bytes alive on each device over one fully traced run of a step."""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rewriters.ir import tf_internals
from rewriters.ir.device_detection import planned_device
from rewriters.ir.op_traits import Trait, ops_with
from tflms_sft._report.plan_records import Timeline

_MAX_NAMED_TENSORS = 10

_LOOP = re.compile(r"(?:micro_\d+/)?sft/([^/]+/[^/]+)/while/body/")
"""Ops of the iterations of a loop, which each micro-batch has its own of. The ops that allocate its buffers may run
long before and do not match."""


class _Change(NamedTuple):
    """Bytes that an op allocates at a time; negative where it frees them."""

    micros: int
    num_bytes: int
    name: str


def timelines(concrete_fn: Any, arguments: Sequence[Any], fixed: Mapping[str, int]) -> tuple[Timeline, ...]:
    """Run a step on a copy of its variables, fully traced, and accumulate its allocations.

    Returns one timeline for each device with allocations, that of the measured device first. It includes the `fixed`
    bytes of variables and arguments on the device.
    """
    stats = tf_internals.step_stats(concrete_fn, arguments)
    changes = collections.defaultdict[str, list[_Change]](list)
    changes[planned_device().name] = []
    for device, micros, num_bytes, name in tf_internals.allocations(stats):
        changes[device].append(_Change(micros, num_bytes, name))
    changes["CPU:0"].extend(_python_arrays(concrete_fn.graph, stats))
    begin = min((change.micros for on_device in changes.values() for change in on_device), default=0)
    loops = _loops(stats, begin)
    return tuple(
        _accumulated(device, on_device, begin, fixed.get(device, 0), loops) for device, on_device in changes.items()
    )


def _loops(stats: Any, begin: int) -> tuple[tuple[str, float, float], ...]:
    """Return (loop, start, end) of each tile loop in seconds: from the first op of its iterations to the last."""
    spans: dict[tuple[str, str], tuple[int, int]] = {}
    for name, begun, ended in tf_internals.runs(stats):
        match = _LOOP.match(tf_internals.without_branch_prefix(name))
        if match:
            first, last = spans.get((match[0], match[1]), (begun, ended))
            spans[match[0], match[1]] = min(first, begun), max(last, ended)
    seconds = ((loop, (first - begin) * 1e-6, (last - begin) * 1e-6) for (_, loop), (first, last) in spans.items())
    return tuple(sorted(seconds, key=lambda loop: loop[1]))


def _python_arrays(graph: Any, stats: Any) -> Iterator[_Change]:
    """Yield the lifetimes of arrays that Python functions return, such as tensors read from disk.

    No allocator records them. An array is alive until its last consumer has ended. If a Python function that waits for
    the consumer releases it, it is alive until that function runs.
    """
    times = tf_internals.times(stats)
    names = {operation: name for name, operation in tf_internals.operations(graph) if name in times}
    python = [operation for operation in names if operation.type in ops_with(Trait.PYTHON_CALL)]
    releaser = {
        consumer: operation for operation in python if not operation.inputs for consumer in operation.control_inputs
    }
    for operation in python:
        _, ended, num_bytes = times[names[operation]]
        consumers = [consumer for consumer in _consumers(operation) if consumer in names]
        released = [times[names[releaser[consumer]]].begun for consumer in consumers if consumer in releaser]
        last = max(released or [times[names[consumer]].ended for consumer in consumers], default=ended)
        yield _Change(ended, num_bytes, names[operation])
        yield _Change(last, -num_bytes, names[operation])


def _consumers(operation: Any) -> Iterator[Any]:
    """Yield the ops that read the outputs of an op, through aliases."""
    for output in operation.outputs:
        for consumer in output.consumers():
            if consumer.type in ops_with(Trait.FORWARDS_BUFFER):
                yield from _consumers(consumer)
            else:
                yield consumer


def _accumulated(
    device: str, changes: list[_Change], begin: int, fixed: int, loops: tuple[tuple[str, float, float], ...]
) -> Timeline:
    """Return the timeline of a device: `fixed` bytes and the running sum of its changes."""
    changes = sorted(changes)  # At equal times, frees before allocations.
    alive = list(itertools.accumulate((change.num_bytes for change in changes), initial=fixed))
    peak = max(alive)
    alive_at_peak: collections.Counter[str] = collections.Counter()
    for change in changes[: alive.index(peak)]:
        alive_at_peak[change.name] += change.num_bytes
    largest = sorted(
        ((tf_internals.without_branch_prefix(name), size) for name, size in alive_at_peak.items() if size > 0),
        key=lambda item: -item[1],
    )
    points = [((c.micros - begin) * 1e-6, amount) for c, amount in zip(changes, alive[1:], strict=True)]
    return Timeline(device, peak, tuple(largest[:_MAX_NAMED_TENSORS]), tuple(points), loops)
