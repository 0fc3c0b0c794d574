"""`rewrite`: rewriting of any traced training step."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rewriters.canonicalize.canonicalize import CanonicalMode
from rewriters.emission.tile_pass import loop_nodes
from rewriters.errors import BudgetError, RewriteError
from rewriters.ir import tf_internals
from rewriters.ir.graph import BRANCHES, LOOPS, PER_PIXEL, Graph
from rewriters.ir.graph_pass import record_state, run_pass
from rewriters.ir.graph_reader import from_concrete_function, is_call
from rewriters.ir.legality import is_swap
from rewriters.ir.region_reads import has_known_shape, region_reads
from rewriters.scheduling.updates_after_reads import RunUpdatesAfterReads
from rewriters.step_importer import StepImporter
from tflms_sft._batches.batch_limits import BatchLimit
from tflms_sft._machine.calibration import machine_rates, stored_rates
from tflms_sft._params.request import RewriteRequest, parse_request
from tflms_sft._params.tile_params import AutoParams, SFTParams
from tflms_sft._pipeline.build import build_pipeline
from tflms_sft._planner.budget_plan import BudgetPlan
from tflms_sft._planner.budget_search import NO_SWAPS, limit_of, plans_within_budget
from tflms_sft._planner.plan_description import emit_and_describe, prediction
from tflms_sft._planner.requested_tiles import plan_sft
from tflms_sft._planner.swap_planner import NothingToSwapError, apply_swaps, swapped_seconds, with_swap_records
from tflms_sft._report.pass_dump import write_dump
from tflms_sft._report.plan import Plan, amend_plan
from tflms_sft._rewrite.plan_cache import cached_recipe, read_recipe, store_recipe
from tflms_sft._rewrite.plan_recipe import plan_from, recipe_of
from tflms_sft._rewrite.rewritten_step import RewrittenStep
from tflms_sft._rewrite.saved_step import save_step
from tflms_sft._search.traced_step import (
    Candidate,
    TracedStep,
    analyse_step,
    collector_paused,
    predicted_peak,
    seconds_of,
)
from tflms_sft._trace.layer_names import LayerRecord
from tflms_sft._trace.step_tracing import arguments_of, batch_of, leading_sizes, trace_step
from tflms_sft._util.byte_sizes import format_excess
from tflms_sft._util.progress import told_if_slow


def rewrite(step: Any, params: Any, *example_args: Any, **example_kwargs: Any) -> RewrittenStep:
    """Return a step that computes the same as `step`, up to rounding, with less memory.

    Tracing and planning print a line on stderr if they take more than two seconds.

    Args:
        step (tf.function | ConcreteFunction): A training step, which computes gradients and updates. A step without
            gradients, such as the call of a model, gets forward loops only.
        params (AutoParams | SFTParams | LMSParams | PipelineParams | list): The transformation: a memory budget
            (`AutoParams`), tile loops (`SFTParams`), swaps (`LMSParams`), or stages on several devices
            (`PipelineParams`). Or a list of them:

            - `[SFTParams(...), LMSParams(...)]` tiles first, then swaps the tensors saved between segments.
            - `[AutoParams(...), LMSParams(...)]` restricts the swaps that the budget search may use.
            - `[SFTParams(...), LMSParams(...), PipelineParams(...)]`, or fewer of them, tiles and swaps inside the
              stages.
        *example_args: For a `tf.function`: arguments of a step, or their `tf.TensorSpec`s, with the largest batch size.
            For a `ConcreteFunction`: nothing.
        **example_kwargs: Keyword arguments, in the same forms.

    Returns:
        A callable for this one signature, with the attributes `plan` and `concrete_function`.

    Raises:
        RewriteError: If the graph cannot be rewritten, or one of its subclasses: `BudgetError`, `SegmentError`,
            `SwapError`, `PipelineError`.
        TypeError: If an argument has the wrong type.
        ValueError: If the order of `params` is wrong, or a value does not suit the step.

    Examples:
        >>> step = tf.function(train_step)
        >>> tiled = tflms_sft.rewrite(step, tflms_sft.SFTParams(num_tiles=(4, 4)), images, labels)
        >>> loss = tiled(images, labels)
    """
    request = parse_request(params)
    if request.pipeline is not None:
        with collector_paused():
            return RewrittenStep(*build_pipeline(step, request, example_args, example_kwargs))
    with told_if_slow("tflms-sft: tracing the step ...", print_to_stderr, sys.stderr):
        concrete_fn, record = trace_step(step, example_args, example_kwargs)
    batch, sizes = batch_of((example_args, example_kwargs)), {} if example_kwargs else leading_sizes(example_args)
    return rewrite_concrete(concrete_fn, record, batch, request, sizes=sizes)


def rewrite_traced(traced: TracedStep, request: RewriteRequest, advise: bool = True) -> tuple[StepImporter, Plan]:
    """Plan and rewrite an analysed step: tiles first, then swaps of the tensors saved between segments.

    With `advise`, the plan of a slow step notes the times under larger budgets; that search takes time.

    Raises:
        SegmentError: If a named segment cannot be tiled.
        BudgetError: If no plan keeps the budget.
        SwapError: If no tensor can be swapped with these parameters.
    """
    if request.budget is not None:
        params = request.budget.resolved(traced.fixed_bytes, traced.devices)
        importer, plan = _within_budget(traced, params, advise)
        return importer, amend_plan(plan, request.budget.reduction_note(params, traced.devices))
    choice = BudgetPlan([], [], request.swaps)
    if isinstance(request.tiles, SFTParams):
        choice = BudgetPlan(*plan_sft(traced, request.tiles), request.swaps)
        if choice.swaps is not None and not traced.analysis.backward:
            choice = BudgetPlan(choice.plans, choice.left, why=NO_SWAPS)
    return carry_out(traced, choice, None)


def _within_budget(traced: TracedStep, params: AutoParams, advise: bool) -> tuple[StepImporter, Plan]:
    """Rewrite a step by a saved plan, or by the fastest within the budget that has something to swap where it swaps."""
    stored = _stored_plan(traced, params)
    if stored is not None:
        return stored
    candidates = plans_within_budget(traced, params, advise)
    while True:
        choice = next(candidates)  # Raises `BudgetError` instead of ending.
        with contextlib.suppress(NothingToSwapError):
            importer, plan = carry_out(traced, choice, params.memory_budget)
            recipe = recipe_of(traced, choice, params.memory_budget)
            store_recipe(traced, params, recipe)
            return importer, amend_plan(plan, recipe=recipe)


def _stored_plan(traced: TracedStep, params: AutoParams) -> tuple[StepImporter, Plan] | None:
    """Rewrite a step by the plan that a user saved, or by that of the cache; return `None` if there is none that fits.

    Raises:
        RewriteError: If the user's plan is for another step, or swaps although swaps are forbidden.
        BudgetError: If the user's plan needs more than the budget.
    """
    is_given = params.plan is not None and traced.excess_bytes == 0
    recipe = read_recipe(Path(params.plan)) if is_given else cached_recipe(traced, params)
    choice = None if recipe is None else plan_from(traced, recipe)
    if recipe is None or choice is None:
        if not is_given:
            return None
        raise _unusable_plan(params.plan, is_read=recipe is not None)
    if is_given and choice.swaps is not None and params.swap is False:
        raise RewriteError(
            f"`plan` must not swap with `swap=False`. Received: plan={os.fspath(params.plan)!r}, which swaps tensors. "
            "Plan again without `plan=`, or allow swaps."
        )
    with contextlib.suppress(NothingToSwapError):
        importer, plan = carry_out(traced, choice, params.memory_budget)
        if is_given:
            _check_saved_plan(plan, params)
            plan = amend_plan(plan, f"plan read from '{os.fspath(params.plan)}', without a search")
        if is_given or plan.predicted.peak_bytes <= limit_of(traced, params):
            return importer, amend_plan(plan, recipe={**recipe, "memory_budget": params.memory_budget})
    return None


def _check_saved_plan(plan: Plan, params: AutoParams) -> None:
    """Refuse a saved plan whose predicted peak is above a budget. Headroom was left when the plan was made.

    Raises:
        BudgetError: With the predicted peak.
    """
    needed, budget = plan.predicted.peak_bytes, int(params.memory_budget)
    if needed > budget:
        texts = format_excess(needed, budget)
        error = BudgetError(
            f"`memory_budget` is too small for the saved plan. Received: memory_budget={texts[1]}, "
            f"plan={os.fspath(params.plan)!r}, which is predicted to need {texts[0]}. Raise the budget, or plan again "
            "without `plan=`."
        )
        error.smallest_bytes = needed
        error.tensor = plan.predicted.largest[0][0] if plan.predicted.largest else ""
        raise error


def _unusable_plan(file: str | os.PathLike[str], is_read: bool) -> RewriteError:
    """Return the error for a plan file that cannot be used for a step."""
    why = "holds no plan that can be read"
    if is_read:
        why = "is for another step, batch size (that of a smaller last batch counts, too) or version of `tflms_sft`"
    elif not os.path.exists(file):
        why = "does not exist"
    return RewriteError(
        "`plan` must name a file that `Plan.save` wrote for this step, with this batch size and this version. "
        f"Received: plan={os.fspath(file)!r}, which {why}. Plan again without `plan=`, and save that plan."
    )


def carry_out(traced: TracedStep, choice: BudgetPlan, budget: int | None) -> tuple[StepImporter, Plan]:
    """Emit the loops and swaps of a choice, describe them in a plan, and write a dump of the passes if requested.

    The choice may have been made for a budget.
    """
    importer, plan = _emitted(traced, choice, budget)

    def peak_bytes(graph: Graph) -> int | None:
        """Return the peak of a graph without swaps and called functions, whose loops have facts or are tile loops."""
        for node in graph.nodes.values():
            is_open = node.op in LOOPS | BRANCHES and node.loop is None and node.metadata.loop is None
            if is_open or is_swap(node) or (is_call(node) and PER_PIXEL not in node.attrs):
                return None
        plans = choice.plans if loop_nodes(graph) else []
        return predicted_peak(traced, plans, limit=None if budget else 0, graph=graph).peak_bytes

    folder = write_dump(importer.graph, plan, choice.plans, peak_bytes)
    if folder is not None:
        save_step(folder, traced, recipe_of(traced, choice, budget))
    return importer, plan


def _emitted(traced: TracedStep, choice: BudgetPlan, budget: int | None) -> tuple[StepImporter, Plan]:
    traced = dataclasses.replace(traced, files=choice.files or traced.files, order=choice.order)
    graph, plan = emit_and_describe(traced, choice.plans, choice.left, budget)
    plan = amend_plan(plan, choice.why, choice.advice)
    files = None if traced.files is None else traced.files.pool
    if choice.swaps is None:
        if graph.same_size and not plan.changed:  # The original step runs batches that canonicalization excludes.
            original = from_concrete_function(traced.concrete_fn)
            record_state(original, "traced", "The graph that TensorFlow traced.")
            graph = run_pass(RunUpdatesAfterReads(()), original).graph
        return StepImporter(graph, traced.concrete_fn, files=files), plan
    swapped = apply_swaps(traced, graph, choice.swaps, choice.plans)
    # With a budget, predict for every state of the allocator, as the search did.
    limit = 0 if budget is None else None
    seconds = seconds_of(traced, choice.plans)
    seconds = swapped_seconds(traced, swapped.graph, swapped.swaps, choice.swaps, seconds, swapped.waiting)
    ratio = seconds / traced.seconds
    predicted = prediction(traced, Candidate(choice.plans, swapped.peak(limit), ratio), swapped.graph)
    plan = with_swap_records(plan, traced, graph, swapped.swaps, swapped.left, swapped.tier)
    plan = amend_plan(plan, changed=True, predicted=predicted)
    return StepImporter(swapped.graph, traced.concrete_fn, swapped.tier, files), plan


def rewrite_concrete(
    concrete_fn: Any,
    record: LayerRecord,
    batch: int | None,
    request: RewriteRequest,
    excess_bytes: int = 0,
    sizes: Mapping[int, int] | None = None,
) -> RewrittenStep:
    """Analyse, plan and rewrite the step that `trace_step` returned.

    Args:
        concrete_fn: The step.
        record: Its Keras layers.
        batch: Batch size to plan for if the trace leaves it open.
        request: Tiles and swaps.
        excess_bytes: Measured peak less predicted peak of an earlier plan.
        sizes: Leading sizes of the arguments to plan for, by position, as far as they are known.
    """
    aim = f"tflms-sft: {request.aim()} ..."
    with collector_paused(), told_if_slow(aim, print_to_stderr, sys.stderr) as stopwatch:
        traced = analysed(concrete_fn, record, batch, request, sizes=sizes)
        traced = dataclasses.replace(traced, excess_bytes=excess_bytes, found=stopwatch.found)
        importer, plan = rewrite_traced(traced, request)
        if tf_internals.must_compile(concrete_fn):
            plan = amend_plan(plan, "the step was compiled by XLA (`jit_compile`); the rewritten step runs without XLA")
        limit = None
        if request.budget is not None and not traced.batch_is_fixed:
            remedy = "Rewrite it with example arguments of the largest batch."
            limit = BatchLimit(plan, traced, request.budget, remedy)
        return RewrittenStep(concrete_fn, importer, plan, limit)


def analysed(
    concrete_fn: Any,
    record: LayerRecord,
    batch: int | None,
    request: RewriteRequest,
    sizes: Mapping[int, int] | None = None,
) -> TracedStep:
    """Return the analysis of a traced step, with the rates of this machine; the arguments are those of `rewrite`.

    Raises:
        RewriteError: If the step cannot be rewritten, or a size that a budget needs is unknown.
    """
    mode = CanonicalMode.EXACT if request.tiles is None else CanonicalMode.TILING
    traced = analyse_step(concrete_fn, record, batch, mode, sizes=sizes)
    require_image_shapes(traced.analysis.graph)
    if request.budget is None:
        return dataclasses.replace(traced, rates=stored_rates())
    traced = dataclasses.replace(traced, rates=machine_rates(print_to_stderr))
    require_batch(traced, batch)
    require_sizes(concrete_fn)
    return traced


def print_to_stderr(text: str) -> None:
    """Print a progress line."""
    print(text, file=sys.stderr, flush=True)


def require_batch(traced: TracedStep, batch: int | None) -> None:
    """Refuse a step whose batch size is unknown.

    Raises:
        RewriteError: With the remedy.
    """
    if batch is None and not traced.batch_is_fixed:
        raise RewriteError(
            "The batch size is unknown, and a budget needs one. Trace with a `tf.TensorSpec` that gives it, "
            "or pass example arguments of the largest batch."
        )


def require_image_shapes(graph: Graph) -> None:
    """Refuse readers of images of any shape: a plan holds for one shape.

    Raises:
        RewriteError: With the reader and the remedy.
    """
    unknown = [node for node in region_reads(graph) if not has_known_shape(node)]
    if unknown:
        raise RewriteError(
            f"The shape of the images that `{unknown[0].name}` reads is unknown: {unknown[0].out().shape}. Give the "
            "`ImageReader` all sizes as `shape`, or rewrite a `tf.function` with paths or indices as example arguments."
        )


def require_sizes(concrete_fn: Any) -> None:
    """Refuse arguments of which another size than the batch size is unknown, such as the length of sequences.

    The memory model would count 1 for it.

    Raises:
        RewriteError: With the argument and the remedy.
    """
    for tensor in arguments_of(concrete_fn):
        shape = tensor.shape
        if shape.rank and None in shape.as_list()[1:]:
            raise RewriteError(
                f"The size of argument `{tensor.name}` is unknown: {shape}. A budget needs all sizes but that of the "
                "batch. Trace with a `tf.TensorSpec` that gives them; under `fit`, each length has a plan of its own."
            )
