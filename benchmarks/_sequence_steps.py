"""Measurements of `benchmarks.sequences`, each in a child process of its own.

A budget is a number of bytes, or a fraction of the original step's predicted peak. `headroom` is that of
`tflms_sft.AutoParams`. With `two_loops` the planner runs forward and backward ops in loops of their own, and the
backward loops recompute what the forward loops computed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks import _child

Figures = dict[str, Any]

MAX_SECONDS = 120.0
"""Time after which a child begins no further run of its steps."""


def _unlimited(step: Any) -> Any:
    """Return the plan of a budget that the original step keeps."""
    import tflms_sft

    return tflms_sft.rewrite(step, tflms_sft.AutoParams("1TiB")).plan


def _bytes_of(budget: float, step: Any) -> int:
    return int(budget * _unlimited(step).original.peak_bytes) if budget < 1 else int(budget)


def _rewritten(step: Any, budget: float, headroom: float, two_loops: bool) -> Any:
    """Rewrite a step with tiles alone."""
    import tflms_sft
    from tflms_sft._search import segment_tilings

    if two_loops:
        segment_tilings.in_one_loop = lambda *_: None  # type: ignore[assignment]
    return tflms_sft.rewrite(step, tflms_sft.AutoParams(_bytes_of(budget, step), headroom=headroom, swap=False))


def planned(
    *, net: str, size: int, budget: float, headroom: float, two_loops: bool = False, emit: _child.Emit
) -> Figures:
    """Plan a step within a budget; return the predicted figures, or the error."""
    del emit
    import tflms_sft
    from benchmarks._sequence_nets import training_step
    from tflms_sft._report.summary import waiting_bytes

    step, _ = training_step(net, size)
    figures = {"original_bytes": _unlimited(step).original.peak_bytes, "budget_bytes": _bytes_of(budget, step)}
    began = time.perf_counter()
    try:
        plan = _rewritten(step, budget, headroom, two_loops).plan
    except tflms_sft.BudgetError as error:
        reasons = sorted({why for _, why in _unlimited(step).left_alone})
        return {**figures, "error": str(error), "smallest_bytes": error.smallest_bytes, "reasons": reasons}
    return {
        **figures,
        "headline": plan.headline(),
        "predicted_bytes": plan.predicted.peak_bytes,
        "predicted_ratio": plan.predicted.time_ratio,
        "predicted_seconds": plan.predicted.seconds,
        "saved_bytes": waiting_bytes(plan),
        "loops": sum(segment.num_loops for segment in plan.segments),
        "one_loop": any(segment.one_loop for segment in plan.segments),
        "plan_seconds": time.perf_counter() - began,
    }


def peaks(
    *,
    net: str,
    size: int,
    budget: float | None,
    headroom: float,
    runs: int,
    two_loops: bool = False,
    emit: _child.Emit,
) -> list[int]:
    """Measure the peak of a step in bytes several times; without a budget, that of the original step."""
    del emit
    import tflms_sft
    from benchmarks._sequence_nets import training_step

    step, batch = training_step(net, size)
    fast = step if budget is None else _rewritten(step, budget, headroom, two_loops)
    return [tflms_sft.measure(fast, *batch).peak_bytes for _ in range(runs)]


def times(
    *,
    net: str,
    size: int,
    budget: float,
    headroom: float,
    runs: int,
    two_loops: bool = False,
    plain: bool = True,
    base: int | None = None,
    emit: _child.Emit,
) -> Figures:
    """Run original and rewritten steps alternately.

    Args:
        net: Name of the network.
        size: Its size.
        budget: Budget of the rewritten steps.
        headroom: Their headroom.
        runs: Runs of each that are counted, after one that is not; fewer, but at least one, after `MAX_SECONDS`.
        two_loops: Whether to run also a step with two loops.
        plain: Whether to run the original step.
        base: Tokens of a shorter sequence whose original step runs as often as yields `size` tokens; `None` for none.
        emit: Not used.

    Returns:
        Seconds of all counted runs and their median by step; the median ratio of times to those of the original step,
        and to those of the shorter sequence.
    """
    del emit
    from benchmarks._sequence_nets import training_step

    step, batch = training_step(net, size)
    steps: dict[str, Callable[[], Any]] = {"plain": lambda: step(*batch)} if plain else {}
    if base is not None:
        shorter, tokens = training_step(net, base)
        steps["base"] = lambda: [shorter(*tokens) for _ in range(size // base)][-1]
    for name, loops in {"rewritten": False, "two loops": True}.items():
        if two_loops or not loops:
            fast = _rewritten(step, budget, headroom, loops)
            steps[name] = lambda fast=fast: fast(*batch)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    begin = time.perf_counter()
    for run in range(runs + 1):
        if run > 1 and time.perf_counter() - begin > MAX_SECONDS:
            break
        for name, function in steps.items():
            began = time.perf_counter()
            function()["loss"].numpy()
            seconds[name].append(time.perf_counter() - began)
    counted = {name: values[1:] for name, values in seconds.items()}
    medians = {name: statistics.median(values) for name, values in counted.items()}
    figures: Figures = {"seconds": counted, "medians": medians}
    if plain:
        figures["ratios"] = {
            name: _ratio(counted, name, "plain") for name in ("rewritten", "two loops")[: 1 + two_loops]
        }
    if base is not None:
        figures["base_ratio"] = _ratio(counted, "rewritten", "base")
    return figures


def _ratio(seconds: dict[str, list[float]], name: str, other: str) -> float:
    """Return the median ratio of the times of two steps that ran alternately."""
    return statistics.median(b / a for a, b in zip(seconds[other], seconds[name], strict=True))
