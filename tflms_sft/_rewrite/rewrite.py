"""`rewrite`: any traced training step, rewritten."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from typing import Any

from rewriters.canonicalize.canonicalize import CanonicalMode
from rewriters.errors import RewriteError
from rewriters.ir import tf_internals
from rewriters.step_importer import StepImporter
from rewriters.swapping.tiers import HostTier
from tflms_sft._machine.calibration import kept_rates, machine_rates
from tflms_sft._params.request import RewriteRequest, parse_request
from tflms_sft._params.tile_params import AutoParams
from tflms_sft._pipeline.build import build_pipeline
from tflms_sft._planner.budget_search import NO_SWAPS, BudgetPlan, plans_within_budget
from tflms_sft._planner.requested_tiles import plan_sft
from tflms_sft._planner.swap_planner import NothingToSwapError, apply_swaps, described, notes, swapped_seconds
from tflms_sft._planner.traced_step import (
    TracedStep,
    analyse_step,
    collector_paused,
    emit_and_describe,
    predict,
    prediction,
)
from tflms_sft._report.plan import Plan
from tflms_sft._rewrite.rewritten_step import RewrittenStep
from tflms_sft._trace.layer_names import LayerRecord, display_names
from tflms_sft._trace.step_tracing import batch_of, trace_step


def rewrite(step: Any, params: Any, *example_args: Any, **example_kwargs: Any) -> RewrittenStep:
    """Rewrite a step so that it needs less memory and computes the same.

    Args:
        step: A `tf.function` that computes gradients (and updates), or a `ConcreteFunction` of one. One that computes
            no gradients, such as a call of a model, can be tiled too, in forward loops only.
        params: `SFTParams`, `AutoParams` or `LMSParams`, or a list: `SFTParams` and `LMSParams` tile first, then
            swap what is left between the segments; with `AutoParams`, `LMSParams` say what may be swapped. Or
            `PipelineParams`, alone or in a list with `SFTParams`, `LMSParams` or both, which then work inside of
            stages; where in the list it is does not matter.
        *example_args: For a `tf.function`: arguments of a step, or `tf.TensorSpec`s of them.
        **example_kwargs: The same by keyword.

    Returns:
        A callable for that one signature, with `.plan` and `.concrete_function`.

    Raises:
        RewriteError: If the graph cannot be rewritten; its subclasses say more.
        TypeError: For arguments of the wrong type.

    Example:
    >>> step = tf.function(train_step)
    >>> fast_enough = tflms_sft.rewrite(step, tflms_sft.SFTParams(num_tiles=(4, 4)), images, labels)
    >>> loss = fast_enough(images, labels)
    """
    chosen = parse_request(params)
    if chosen.pipeline is not None:
        with collector_paused():
            return RewrittenStep(*build_pipeline(step, chosen, example_args, example_kwargs))
    concrete_fn, record = trace_step(step, example_args, example_kwargs)
    return compiled(concrete_fn, record, batch_of((example_args, example_kwargs)), chosen)


def rewrite_traced(traced: TracedStep, chosen: RewriteRequest, advise: bool = True) -> tuple[StepImporter, Plan]:
    """Rewrite a step: tiles first, then swaps of what is left between the segments.

    Args:
        traced: The step.
        chosen: What to do with it.
        advise: Whether a plan that is slow says what larger budgets would give, which takes its time.

    Raises:
        SegmentError: For a segment given by name that cannot be tiled.
        BudgetError: For a budget that no plan meets.
        SwapError: If nothing can be swapped as asked for.
    """
    if isinstance(chosen.tiles, AutoParams):
        return _within_budget(traced, chosen.tiles.resolved(traced.fixed_bytes), advise)
    choice = BudgetPlan([], [], chosen.swaps)
    if chosen.tiles is not None:
        choice = BudgetPlan(*plan_sft(traced, chosen.tiles), chosen.swaps)
        if choice.swaps is not None and not traced.analysis.backward:
            choice = BudgetPlan(choice.plans, choice.left, why=NO_SWAPS)
    return _carried_out(traced, choice, None)


def _within_budget(traced: TracedStep, params: AutoParams, advise: bool) -> tuple[StepImporter, Plan]:
    """The fastest way to keep to a budget that can be carried out."""
    found = plans_within_budget(traced, params, advise)
    while True:
        choice = next(found)  # It ends with a `BudgetError`.
        with contextlib.suppress(NothingToSwapError):
            return _carried_out(traced, choice, params.memory_budget)


def _carried_out(traced: TracedStep, choice: BudgetPlan, budget: int | None) -> tuple[StepImporter, Plan]:
    """The rewritten step and its plan."""
    graph, plan = emit_and_describe(traced, choice.plans, choice.left, budget)
    plan.notes += tuple(filter(None, (choice.why, choice.more)))
    if choice.swaps is None:
        return StepImporter(graph, traced.concrete_fn), plan
    swapped = apply_swaps(traced, graph, choice.swaps)
    # A budget has to be kept in every state of the device's memory, as the search saw to.
    limit = 0 if budget is None else None
    peak, ratio = predict(traced, choice.plans, limit, swapped.graph, swapped.away, swapped.outs)
    ratio = swapped_seconds(traced, swapped.graph, swapped.swaps, choice.swaps, ratio * traced.seconds) / traced.seconds
    names = display_names(traced.analysis.graph, traced.record)
    plan = dataclasses.replace(
        plan,
        changed=True,
        predicted=prediction(traced, choice.plans, swapped.graph, names, (peak, ratio)),
        swaps=described(swapped.swaps, traced.batch, display_names(graph, traced.record)),
        swap_tier="host" if isinstance(swapped.tier, HostTier) else "disk",
        not_swapped=tuple(swapped.left),
        notes=(*plan.notes, *notes(swapped.tier)),
    )
    return StepImporter(swapped.graph, traced.concrete_fn, swapped.tier), plan


def compiled(
    concrete_fn: Any, record: LayerRecord, batch: int | None, chosen: RewriteRequest, correction: float = 1.0
) -> RewrittenStep:
    """Analyse, plan and emit what `trace_step` gave, for batches of that size where it leaves the size open.

    `correction` is what an earlier plan was measured to take, over what was predicted.
    """
    with collector_paused():
        return _compiled(concrete_fn, record, batch, chosen, correction)


def _compiled(
    concrete_fn: Any, record: LayerRecord, batch: int | None, chosen: RewriteRequest, correction: float
) -> RewrittenStep:
    mode = CanonicalMode.EXACT if chosen.tiles is None else CanonicalMode.TILING
    traced = analyse_step(concrete_fn, record, batch, mode)
    traced.correction = correction
    traced.go_by(machine_rates(_say) if chosen.has_budget else kept_rates())
    if chosen.has_budget:
        require_batch(traced, batch)
    importer, plan = rewrite_traced(traced, chosen)
    if tf_internals.must_compile(concrete_fn):
        plan.notes += ("the step was compiled by XLA (`jit_compile`); rewritten it runs without",)
    return RewrittenStep(concrete_fn, importer, plan)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def require_batch(traced: TracedStep, batch: int | None) -> None:
    """Refuse a step of which nobody says how large its batches are.

    Raises:
        RewriteError: With the remedy.
    """
    if batch is None and not traced.batch_is_fixed:
        raise RewriteError(
            "The batch size is unknown, and a budget needs one. Trace with a `tf.TensorSpec` that gives it, "
            "or pass example arguments of the largest batch."
        )
