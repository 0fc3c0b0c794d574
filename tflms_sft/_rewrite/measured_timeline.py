"""What was alive when in a run of a step, device by device."""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rewriters.device import properties
from rewriters.ir import tf_internals
from tflms_sft._report.plan_records import Timeline

_MOST_NAMED = 10

_LOOP = re.compile(r"(?:micro_\d+/)?sft/([^/]+/[^/]+)/while/body/")
"""Operations of the turns of a loop; what makes its buffers may run long before. Micro-batches have their own loops."""


class _Change(NamedTuple):
    """Bytes that an operation takes (or, below zero, gives back) at a time."""

    micros: int
    num_bytes: int
    name: str


def timelines(concrete_fn: Any, arguments: Sequence[Any], fixed: Mapping[str, int]) -> tuple[Timeline, ...]:
    """Run a step on a copy of its variables, fully traced, and add up its allocations.

    Args:
        concrete_fn: The step.
        arguments: Its arguments, flat.
        fixed: Bytes of variables and arguments on each device.

    Returns:
        One for each device that something was allocated on, after that of the device whose memory counts.
    """
    stats = tf_internals.step_stats(concrete_fn, arguments)
    changes = collections.defaultdict[str, list[_Change]](list)
    changes[properties.name()] = []
    for place, micros, num_bytes, name in tf_internals.allocations(stats):
        changes[place].append(_Change(micros, num_bytes, name))
    changes["CPU:0"].extend(_arrays(concrete_fn.graph, stats))
    begin = min((change.micros for found in changes.values() for change in found), default=0)
    loops = _loops(stats, begin)
    return tuple(_summed(place, found, begin, fixed.get(place, 0), loops) for place, found in changes.items())


def _loops(stats: Any, begin: int) -> tuple[tuple[str, float, float], ...]:
    """When each tile loop runs: from the first of its turns' operations to the last."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for name, begun, ended in tf_internals.runs(stats):
        match = _LOOP.match(tf_internals.own_name(name))
        if match:
            first, last = found.get((match[0], match[1]), (begun, ended))
            found[match[0], match[1]] = min(first, begun), max(last, ended)
    seconds = ((loop, (first - begin) * 1e-6, (last - begin) * 1e-6) for (_, loop), (first, last) in found.items())
    return tuple(sorted(seconds, key=lambda loop: loop[1]))


def _arrays(graph: Any, stats: Any) -> Iterator[_Change]:
    """What Python functions made, which no allocator knows of: tensors that were read from disk.

    They are alive until the last reader has ended, or, if a Python function waits for that to give them back, until it
    runs.
    """
    times = tf_internals.times(stats)
    ran = {operation: name for name, operation in tf_internals.operations(graph) if name in times}
    python = [operation for operation in ran if operation.type in properties.PYTHON]
    giver = {reader: operation for operation in python if not operation.inputs for reader in operation.control_inputs}
    for operation in python:
        _, ended, num_bytes = times[ran[operation]]
        readers = [reader for reader in _readers(operation) if reader in ran]
        given_back = [times[ran[giver[reader]]].begun for reader in readers if reader in giver]
        last = max(given_back or [times[ran[reader]].ended for reader in readers], default=ended)
        yield _Change(ended, num_bytes, ran[operation])
        yield _Change(last, -num_bytes, ran[operation])


def _readers(operation: Any) -> Iterator[Any]:
    for output in operation.outputs:
        for reader in output.consumers():
            if reader.type in properties.ALIASES:
                yield from _readers(reader)
            else:
                yield reader


def _summed(
    place: str, changes: list[_Change], begin: int, fixed: int, loops: tuple[tuple[str, float, float], ...]
) -> Timeline:
    changes = sorted(changes)  # At one time, what is given back first.
    alive = list(itertools.accumulate((change.num_bytes for change in changes), initial=fixed))
    peak = max(alive)
    held: collections.Counter[str] = collections.Counter()
    for change in changes[: alive.index(peak)]:
        held[change.name] += change.num_bytes
    named = sorted(
        ((tf_internals.own_name(name), size) for name, size in held.items() if size > 0), key=lambda item: -item[1]
    )
    points = [((c.micros - begin) * 1e-6, amount) for c, amount in zip(changes, alive[1:], strict=True)]
    return Timeline(place, peak, tuple(named[:_MOST_NAMED]), tuple(points), loops)
