"""`LMSParams.tuned`: swaps for a budget, by the memory model and confirmed by a run."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from rewriters.errors import BudgetError
from tflms_sft._machine.calibration import machine_rates
from tflms_sft._params.swap_params import SwapParams
from tflms_sft._params.tile_params import AutoParams
from tflms_sft._planner.budget_search import takes_most
from tflms_sft._planner.swap_planner import apply_swaps
from tflms_sft._planner.swap_search import SwapSearch
from tflms_sft._planner.traced_step import TracedStep, analyse_step, collector_paused
from tflms_sft._rewrite.measure import measure
from tflms_sft._rewrite.rewrite import require_batch, rewrite
from tflms_sft._trace.step_tracing import batch_of, trace_step
from tflms_sft._util.byte_sizes import format_bytes

ROUNDS = 3
"""Runs, each after one that went over the budget."""


class LMSParams(SwapParams):
    __doc__ = SwapParams.__doc__

    @classmethod
    def tuned(
        cls, step: Any, memory_budget: Any, *example_args: Any, headroom: float = 0.1, **params: Any
    ) -> LMSParams:
        """The fewest tensors, and for them the largest `lb`, with which a step stays within a budget (section 5.2).

        The memory model finds them, and a run of the step confirms them, after which its variables are put back.

        Args:
            step: A `tf.function` or `ConcreteFunction`, as for `rewrite`.
            memory_budget: Most bytes alive on the device: an int, or a string such as `"8GiB"`.
            *example_args: Arguments of a step. With `tf.TensorSpec`s of them, and for a `ConcreteFunction`, nothing
                is run.
            headroom: Part of the budget that the prediction leaves free. Defaults to 0.1.
            **params: As in `LMSParams`. `n_tensors` and `lb` are where the search begins: no more tensors are
                swapped, and none is fetched later.

        Returns:
            Parameters for `rewrite`.

        Raises:
            BudgetError: If the step does not fit with all tensors swapped.
            SwapError: If nothing can be swapped.
            TypeError: For an argument of the wrong type.
            ValueError: For a wrong value.

        Example:
        >>> params = tflms_sft.LMSParams.tuned(train_step, "2GiB", images, labels)
        >>> step = tflms_sft.rewrite(train_step, params, images, labels)
        """
        base = cls(**params)
        fitting = _tuned(step, memory_budget, example_args, headroom, base)
        return dataclasses.replace(base, n_tensors=fitting.n_tensors, lb=fitting.lb)


def _tuned(step: Any, memory_budget: Any, example_args: Any, headroom: float, base: SwapParams) -> SwapParams:
    auto = AutoParams(memory_budget, headroom, base)
    concrete_fn, record = trace_step(step, example_args, {})
    batch = batch_of(example_args)
    with collector_paused():
        traced = analyse_step(concrete_fn, record, batch)
        traced.analysis.require_backward()
        traced.go_by(machine_rates())
        require_batch(traced, batch)
        budget = int(auto.resolved(traced.fixed_bytes).memory_budget)
        apply_swaps(traced, traced.analysis.graph, base)  # For its errors, before the search.
        swaps = SwapSearch(traced, [], base)
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


def _measured(step: Any, params: SwapParams, example_args: Any) -> int:
    """Measured peak of the rewritten step; 0 where there is nothing to run it with."""
    leaves = tf.nest.flatten(example_args)
    if not leaves or any(isinstance(leaf, tf.TypeSpec) for leaf in leaves):
        return 0
    arguments = tf.nest.map_structure(lambda leaf: leaf if leaf is None else tf.convert_to_tensor(leaf), example_args)
    return measure(rewrite(step, params, *arguments), *arguments).peak_bytes


def _too_small(traced: TracedStep, swaps: SwapSearch, budget: int, headroom: float) -> BudgetError:
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
