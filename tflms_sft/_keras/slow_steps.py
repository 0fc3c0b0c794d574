"""Names the ops of a step that takes much longer than `max_slowdown` accepts; predicted times may be wrong."""

from __future__ import annotations

import enum
import math
import time
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tflms_sft._machine.step_profile import OpSpan, profiled, shared_time
from tflms_sft._params.request import RewriteRequest
from tflms_sft._report.op_names import short_op_names
from tflms_sft._report.plan import Plan

SLOW_STEP_RATIO = 2.0
"""Measured time, over the longest one that is accepted, above which a step is slow."""

MIN_SECONDS = 1.0
"""Time from which on a step may be slow; a short step takes many times as long on a machine with other work to do."""

NUM_CAUSES = 3
"""Ops that the line about a slow step names."""


class _Stage(enum.Enum):
    """Action in the next execution of a plan."""

    MEASURE = enum.auto()
    PROFILE = enum.auto()
    DONE = enum.auto()


class SlowSteps:
    """Measures the second execution of each plan; if it is slow, profiles the third one.

    The first execution traces the step and has no plan yet. Without a budget no step counts as slow.

    Args:
        request: Tiles, swaps or budget of the steps.
        steps: Number of steps of an execution.
        tell: Called with the line about a slow step.
    """

    def __init__(self, request: RewriteRequest, steps: int, tell: Callable[[str], None]) -> None:
        self._max_slowdown = math.inf if request.budget is None else request.budget.max_slowdown
        self._steps = steps
        self._tell = tell
        self._stages: weakref.WeakKeyDictionary[Plan, _Stage] = weakref.WeakKeyDictionary()

    def run(self, plan: Plan | None, run: Callable[[], Any]) -> Any:
        """Run the steps of one execution, and return their result."""
        if plan is None or not plan.changed or not plan.original.seconds:
            return run()
        stage = self._stages.get(plan, _Stage.MEASURE)
        self._stages[plan] = _Stage.DONE
        if stage is _Stage.PROFILE:
            return self._profile(plan, run)
        if stage is _Stage.DONE:
            return run()
        result, seconds = self._timed(run)
        if self._is_slow(plan, seconds):
            self._stages[plan] = _Stage.PROFILE
        return result

    def _timed(self, run: Callable[[], Any]) -> tuple[Any, float]:
        """Run the steps of one execution; return their result, and the seconds of a step."""
        began = time.perf_counter()
        result = run()
        # Reading the result waits for a GPU.
        tf.nest.map_structure(lambda value: value.numpy() if tf.is_tensor(value) else value, result)
        return result, (time.perf_counter() - began) / self._steps

    def _is_slow(self, plan: Plan, seconds: float) -> bool:
        return seconds > max(SLOW_STEP_RATIO * self._max_slowdown * plan.original.seconds, MIN_SECONDS)

    def _profile(self, plan: Plan, run: Callable[[], Any]) -> Any:
        try:
            (result, seconds), spans = profiled(lambda: self._timed(run))
        except tf.errors.AlreadyExistsError:  # Another profile is being recorded; the step has not run.
            return run()
        if self._is_slow(plan, seconds):
            self._tell(slow_step_line(seconds, plan, self._max_slowdown, spans))
        return result


def slow_step_line(seconds: float, plan: Plan, max_slowdown: float, spans: list[OpSpan]) -> str:
    """Return the line about a step that takes `seconds`, with the ops whose `spans` take most of them."""
    kinds = {span.name: span.op for span in spans}
    shares = shared_time((span.name, span.begin, span.end) for span in spans)
    total, names = sum(shares.values()) or 1.0, short_op_names(shares)
    largest = sorted(shares, key=shares.__getitem__, reverse=True)[:NUM_CAUSES]
    causes = ", ".join(f"{shares[name] / total:.0%} `{names[name]} ({kinds[name]})`" for name in largest)
    return (
        f"tflms-sft: a step takes {seconds:.3g} s, {seconds / plan.original.seconds:.0f} times as long as the original "
        f"step is predicted to take (max_slowdown={max_slowdown:g}); most of it: {causes or 'no op'}. Pass a larger "
        "`memory_budget`, or stop other programs if they use this machine."
    )
