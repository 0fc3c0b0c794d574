"""Builds a pipeline and its plan from a step and `PipelineParams`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.batch_semantics import TraceComparison
from rewriters.canonicalize.canonicalize import CanonicalMode
from rewriters.emission.tile_pass import SegmentPlan
from rewriters.errors import PipelineError
from rewriters.ir.graph import Tensor
from rewriters.ir.graph_pass import run_pass
from rewriters.pipelining.micro_batch_reduction import UnrollSpec
from rewriters.pipelining.pipeline_pass import Devices, PipelinePass, owner_device
from rewriters.pipelining.schedules import Schedule
from rewriters.pipelining.stage_assignment import Stages, assign_stages
from rewriters.pipelining.stage_passes import StagedStep, with_tiles
from rewriters.pipelining.step_partition import StepPartition, split_step
from rewriters.step_importer import StepImporter
from rewriters.tiling.ft_segments import SkippedOps
from tflms_sft._machine.calibration import stored_rates
from tflms_sft._params import device_names
from tflms_sft._params.pipeline_params import PipelineParams
from tflms_sft._params.request import RewriteRequest
from tflms_sft._params.tile_params import SFTParams
from tflms_sft._pipeline import device_selection
from tflms_sft._pipeline.declarations import check_declarations
from tflms_sft._pipeline.micro_batch_check import check_micro_batches
from tflms_sft._pipeline.report import Inside, Planned, plan_of
from tflms_sft._pipeline.stage_cuts import cut_names, requested_cuts
from tflms_sft._planner.requested_tiles import StageBounds, plan_sft
from tflms_sft._planner.swap_planner import swap_in_stages
from tflms_sft._report.pass_dump import write_dump
from tflms_sft._report.plan import Plan, amend_plan
from tflms_sft._search.traced_step import TracedStep, analyse_step
from tflms_sft._trace.batch_traces import BatchTraces, require_even, trace
from tflms_sft._trace.layer_names import captured, variable_names
from tflms_sft._util.text import shortened

_MAX_NAMES = 4


def build_pipeline(
    step: Any, chosen: RewriteRequest, args: Any, kwargs: Any, batch: int | None = None
) -> tuple[Any, StepImporter, Plan]:
    """Rewrite a step as a pipeline, and confirm what the user declares about it by a run.

    A full batch has `batch` samples where the example arguments leave that open.

    Returns:
        The step as a concrete function, the importer of the pipeline, and the plan.

    Raises:
        PipelineError: If the step cannot be split into stages or micro-batches as requested.
        ValueError: If micro-batches do not divide a known batch size.
    """
    params = chosen.pipeline
    assert params is not None
    traces = trace(step, params, args, kwargs, batch)
    traces.batch = traces.batch or batch
    if traces.batch:
        require_even(params, traces.batch)
    known = traces.known
    planned, notes = _built(known or traces, chosen, params)
    importer, plan = _importer(planned), amend_plan(plan_of(planned), *notes)
    write_dump(planned.built.graph, plan, planned.inside.plans)
    if known is not None:
        importer.sizes, importer.other = known.sizes, _for_any_batch(traces, chosen, planned)
        note = f"a batch of another size than {traces.batch}, such as the last one of an epoch, runs as one micro-batch"
        plan = amend_plan(plan, note, batch_is_fixed=False)
    if params.has_declarations and params.total_micro_batches > 1:
        check_declarations(traces.whole, importer, {} if known is None else known.sizes)
    return traces.whole, importer, plan


def _importer(planned: Planned) -> StepImporter:
    return StepImporter(planned.built.graph, planned.traces.micro, planned.inside.tier)


def _for_any_batch(traces: BatchTraces, chosen: RewriteRequest, like: Planned) -> StepImporter:
    """Return an importer that runs other batch sizes as one micro-batch, in the stages of a pipeline."""
    assert chosen.pipeline is not None
    named = chosen.pipeline.stages
    params = dataclasses.replace(
        chosen.pipeline,
        stages=named if isinstance(named, tuple) else cut_names(like.traced, like.cuts),
        schedule="basic",
        micro_batches=1,
        devices=like.devices[: like.stages.count],
        data_replicas=1,
        placement="copy",  # They are where they should be: that has been checked.
    )
    return _importer(_built(dataclasses.replace(traces, known=None, count=1), chosen, params)[0])


def _built(traces: BatchTraces, chosen: RewriteRequest, params: PipelineParams) -> tuple[Planned, tuple[str, ...]]:
    """Return the pipeline and notes for its plan."""
    samples = max(traces.batch // params.total_micro_batches, 1) if traces.batch else None
    mode = CanonicalMode.BATCH_ANALYSIS if chosen.tiles is None else CanonicalMode.TILING
    is_rewritten = chosen.tiles is not None or chosen.swaps is not None
    # Stages have devices, and those of the trace would stay in the bodies of loops.
    traced = analyse_step(
        traces.micro, traces.record, samples, mode, merge_constants=False, keep_devices=not is_rewritten
    )
    traced = dataclasses.replace(traced, rates=stored_rates())
    analysis = traced.analysis
    analysis.require_backward()
    sizes = TraceComparison(
        analysis, traces.micro, whole=traces.whole, batched=traces.batched, count=traces.count, mode=mode
    )
    parts = split_step(analysis, traces.batched, traces.hints)
    cuts = requested_cuts(traced, params)
    stages = assign_stages(analysis, cuts)
    as_checked = sizes if mode is CanonicalMode.BATCH_ANALYSIS else None
    judgement = check_micro_batches(traces, params, analysis, as_checked)
    devices = device_selection.select_devices(params, stages.count)
    schedule = params.schedule_for(stages.count)
    where = _variable_devices(traces.micro, analysis)
    if params.placement == "check":
        _check_placement(
            traces.micro, analysis, parts=parts, stages=stages, schedule=schedule, devices=devices, where=where
        )
    inside = Inside(StagedStep(analysis, parts, stages, traces.batched))
    if is_rewritten:
        inside = _inside_of_stages(traced, inside.staged, chosen, cuts, devices, schedule)
        where = _variable_devices(traces.micro, inside.staged.analysis)
    staged = inside.staged
    request = UnrollSpec(
        params.total_micro_batches,
        growth=lambda tensor: sizes.growth(staged.traced(tensor)),
        is_mean=lambda tensor: judgement.is_mean(staged.traced(tensor)),
        counterpart=sizes.counterpart,
        factors=judgement.factors,
        gradients_are_means=params.loss_reduction == "mean",
        reductions=judgement.reductions,
    )
    pipelining = PipelinePass(
        analysis=staged.analysis,
        parts=staged.parts,
        stages=staged.stages,
        request=request,
        schedule=schedule,
        devices=Devices(devices, where),
    )
    built = run_pass(pipelining, staged.analysis.graph)
    return Planned(traces, traced, inside, cuts, schedule, devices, built, where), judgement.notes


def _inside_of_stages(
    traced: TracedStep,
    staged: StagedStep,
    chosen: RewriteRequest,
    cuts: Sequence[Sequence[Tensor]],
    devices: Sequence[str],
    schedule: Schedule,
) -> Inside:
    """Tile the step of a micro-batch, and swap tensors that remain between tile loops."""
    plans: list[SegmentPlan] = []
    left: list[SkippedOps] = []
    if chosen.tiles is not None:
        assert isinstance(chosen.tiles, SFTParams)
        shown = [", ".join(traced.names.get(t, t.name) for t in cut) for cut in cuts]
        plans, left = plan_sft(traced, chosen.tiles, StageBounds(staged.stages, shown))
        staged = with_tiles(staged, plans) if plans else staged
    tier = None
    if chosen.swaps is not None:
        staged, tier = swap_in_stages(traced, staged, chosen.swaps, devices, schedule.micro_batches)
    return Inside(staged, plans, left, tier, chosen.swaps)


def _variable_devices(concrete_fn: Any, analysis: GraphAnalysis) -> dict[Tensor, str]:
    """Return the device of each variable, by its handle."""
    captures = captured(concrete_fn, analysis.graph)
    places = {handle: getattr(tensor, "device", "") for handle, tensor in captures if handle.dtype == tf.resource}
    return {handle: name for handle, name in places.items() if name}


def _check_placement(
    concrete_fn: Any,
    analysis: GraphAnalysis,
    *,
    parts: StepPartition,
    stages: Stages,
    schedule: Schedule,
    devices: Sequence[str],
    where: dict[Tensor, str],
) -> None:
    """Refuse weights and optimizer slots that are not on the device of their stage; metrics may be anywhere.

    Raises:
        PipelineError: With all of them, and what to do.
    """
    names = variable_names(concrete_fn, analysis.graph)
    wrong = []
    for handle, stage in {**stages.owner, **stages.beside}.items():
        wanted = devices[owner_device(schedule, stage)]
        if (
            handle in where
            and handle not in parts.carried_variables
            and not device_names.is_same_device(where[handle], wanted)
        ):
            name = names.get(handle, handle.node.name)
            wrong.append(f"{name!r} of stage {stage} is on {where[handle]} and should be on {wanted}")
    if wrong:
        shown = shortened(wrong, _MAX_NAMES)
        raise PipelineError(
            f"{len(wrong)} variable(s) are not on the device of their stage: {shown}. Call "
            "`tflms_sft.stage_devices(model, cuts, devices)` before the optimizer is built, make layers inside of "
            '`tf.device(...)`, or pass `placement="copy"`, which sends weights in each step.'
        )
