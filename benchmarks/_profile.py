"""Time of steps by kind of work, from TensorFlow's profiler."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from tflms_sft._machine.step_profile import profiled, shared_time

GROUPS = {
    "gradients of convolutions": r"Backprop",
    "convolutions": r"Conv",
    "pools and their gradients": r"Pool",
    "crops, pads, joins": r"Slice|Pad|Concat|Update|Identity|Empty",
}
"""Kinds of work, each with a pattern for the types of its ops; the first match decides."""

WAITING = "no operation runs"


def seconds_by_group(run: Callable[[], object], steps: int) -> dict[str, float]:
    """Return the mean seconds of a step by kind of work.

    Convolutions in backward loops count as recomputed. Concurrent ops share their time equally.

    Args:
        run: Runs a step, which has run before.
        steps: Number of runs.
    """

    def run_all() -> float:
        began = time.perf_counter()
        for _ in range(steps):
            run()
        return time.perf_counter() - began

    seconds, spans = profiled(run_all)
    totals = shared_time((group_of(span.name, span.op), span.begin, span.end) for span in spans)
    if not totals:
        raise RuntimeError("TensorFlow's profile names no operation. Expected events with names such as `name:type`.")
    totals[WAITING] = max(0.0, seconds - sum(totals.values()))
    return {group: total / steps for group, total in totals.items()}


def group_of(name: str, op: str) -> str:
    """Return the kind of work of an op with a name and a type."""
    group = next((group for group, pattern in GROUPS.items() if re.search(pattern, op)), "others")
    is_recomputed = group == "convolutions" and re.search(r"/backward\d*/while", name)
    return "convolutions computed again" if is_recomputed else group
