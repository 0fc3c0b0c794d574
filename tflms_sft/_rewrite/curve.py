"""`curve`: the time of a step against its memory budget."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from tflms_sft._params.request import parse_request
from tflms_sft._params.tile_params import AutoParams
from tflms_sft._planner.curve_points import budgets_between, curve_points
from tflms_sft._report.budget_curve import BudgetCurve
from tflms_sft._rewrite.rewrite import analysed, print_to_stderr
from tflms_sft._search.traced_step import collector_paused
from tflms_sft._trace.step_tracing import batch_of, leading_sizes, trace_step
from tflms_sft._util.byte_sizes import parse_bytes
from tflms_sft._util.progress import told_if_slow

DEFAULT_BUDGETS = 8
"""Budgets of a curve."""


def curve(
    step: Any,
    *example_args: Any,
    budgets: int | Sequence[int | str] = DEFAULT_BUDGETS,
    swap: bool = True,
    headroom: float | None = None,
) -> BudgetCurve:
    """Return the predicted time of a step within several budgets, without running it.

    Each point is the plan that `rewrite` makes within that budget. Planning takes seconds for each budget, and up to a
    minute for networks of hundreds of layers.

    Args:
        step (tf.function | ConcreteFunction): A training step, as for `rewrite`.
        *example_args: For a `tf.function`: arguments of a step, or their `tf.TensorSpec`s.
        budgets (int | Sequence[int | str]): Budgets in bytes, as ints or strings such as `"8GiB"`. Or their number:
            they are spread from the smallest budget that a plan meets to that of the original step.
        swap: Whether plans may swap tensors to host memory or disk.
        headroom: Fraction of each budget that the prediction leaves free. `None`: that of `AutoParams`.

    Returns:
        A `BudgetCurve` with a point for each budget. No point takes longer than one of a smaller budget.

    Raises:
        RewriteError: If the graph cannot be rewritten.
        TypeError: If an argument has the wrong type.
        ValueError: If a budget or `headroom` is out of range.

    Examples:
        >>> curve = tflms_sft.curve(step, images, labels, budgets=["2GiB", "4GiB", "8GiB"])
        >>> print(curve)
        >>> curve.plot("curve.png")
    """
    sizes = _checked_budgets(budgets)
    # The budget is replaced by that of each point.
    params = AutoParams("1TiB", swap=swap, **({} if headroom is None else {"headroom": headroom}))
    with told_if_slow("tflms-sft: tracing the step ...", print_to_stderr, sys.stderr):
        concrete_fn, record = trace_step(step, example_args, {})
    aim = "tflms-sft: planning for several budgets ..."
    with collector_paused(), told_if_slow(aim, print_to_stderr, sys.stderr):
        leading = leading_sizes(example_args)
        traced = analysed(concrete_fn, record, batch_of((example_args, {})), parse_request(params), sizes=leading)
        if isinstance(sizes, int):
            sizes = budgets_between(traced, params, sizes)
        points = list(curve_points(traced, params, sizes))
    return BudgetCurve(traced.plain.peak.peak_bytes, params.headroom, points[::-1])


def _checked_budgets(budgets: int | Sequence[int | str]) -> int | list[int]:
    """Return budgets in bytes, or their number.

    Raises:
        TypeError: If they are neither a number nor a sequence.
        ValueError: If there is none, or one is no size.
    """
    if isinstance(budgets, int) and not isinstance(budgets, bool):
        if budgets < 1:
            raise ValueError(f"`budgets` must be at least 1, or a list of sizes. Received: budgets={budgets!r}.")
        return budgets
    if isinstance(budgets, (str, bool)) or not isinstance(budgets, Sequence):
        raise TypeError(
            "`budgets` must be a number of budgets, or a list of sizes such as "
            f'["2GiB", "4GiB"]. Received: budgets={budgets!r} of type {type(budgets).__name__}.'
        )
    if not budgets:
        raise ValueError("`budgets` must have at least one size. Received: budgets=[].")
    return [parse_bytes(size, "budgets") for size in budgets]
