"""`LMSParams.tuned`: swaps for a budget, by the memory model and confirmed by a run."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from rewriters.errors import BudgetError
from tflms_sft._calibration import machine_rates
from tflms_sft._choose import takes_most
from tflms_sft._compile import Traced, analyse, collector_paused
from tflms_sft._lms_params import LMSParams
from tflms_sft._measure import measure
from tflms_sft._params import AutoParams
from tflms_sft._rewrite import batch_of, require_batch, rewrite, traced_once
from tflms_sft._swap import swap
from tflms_sft._tuning import Swaps
from tflms_sft._units import format_bytes

ROUNDS = 3
"""Runs, each after one that went over the budget."""


def tuned(step: Any, memory_budget: Any, example_args: Any, headroom: float, base: LMSParams) -> LMSParams:
    """See `LMSParams.tuned`."""
    auto = AutoParams(memory_budget, headroom, base)
    concrete_fn, record = traced_once(step, example_args, {})
    batch = batch_of(example_args)
    with collector_paused():
        traced = analyse(concrete_fn, record, batch)
        traced.analysis.require_backward()
        traced.go_by(machine_rates())
        require_batch(traced, batch)
        budget = int(auto.resolved(traced.fixed_bytes).memory_budget)
        swap(traced, traced.analysis.graph, base)  # For its errors, before the search.
        swaps = Swaps(traced, [], base)
    limit = int(budget * (1 - auto.headroom))
    for _ in range(ROUNDS):
        with collector_paused():
            found = swaps.tuned(limit)
        if found is None:
            break
        over = _measured(step, found, example_args) - budget
        if over <= 0:
            return found
        limit -= over
    raise _too_small(traced, swaps, budget, auto.headroom)


def _measured(step: Any, params: LMSParams, example_args: Any) -> int:
    """Measured peak of the rewritten step; 0 where there is nothing to run it with."""
    leaves = tf.nest.flatten(example_args)
    if not leaves or any(isinstance(leaf, tf.TypeSpec) for leaf in leaves):
        return 0
    arguments = tf.nest.map_structure(lambda leaf: leaf if leaf is None else tf.convert_to_tensor(leaf), example_args)
    return measure(rewrite(step, params, *arguments), *arguments).peak_bytes


def _too_small(traced: Traced, swaps: Swaps, budget: int, headroom: float) -> BudgetError:
    best = swaps.smallest()
    assert best is not None, "there was something to swap"
    count, peak = best
    smallest = int(peak.peak_bytes / (1 - headroom)) + 1
    parts, name = takes_most(traced, [], peak)
    error = BudgetError(
        f"`memory_budget` is too small for this step with swaps alone. Received: {format_bytes(budget)} ({budget} "
        f"bytes). With {count} tensors swapped it needs {format_bytes(smallest)} ({smallest} bytes, headroom of "
        f"{headroom:.0%} included) by prediction, of which {parts}. Raise the budget, lower "
        "`min_bytes`, or use `AutoParams`, which tiles as well."
    )
    error.smallest_bytes = smallest
    error.tensor = name
    return error
