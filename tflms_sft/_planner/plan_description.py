"""Carries out a plan, and describes it for reports: prediction, largest tensors, reasons."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from rewriters.device.peak_memory import Peak
from rewriters.emission.tile_pass import SegmentPlan, loop_nodes, tile_segments, tile_skeleton
from rewriters.estimates.unmodelled import unmodelled
from rewriters.ir.graph import Graph
from rewriters.ir.graph_pass import run_pass
from rewriters.scheduling.updates_after_reads import RunUpdatesAfterReads
from rewriters.tiling.ft_segments import SkippedOps
from tflms_sft._report.peak_report import (
    FRAGMENTATION,
    NamedSizes,
    PeakNames,
    largest_tensors,
    saved_in_loops,
    transient_memory,
)
from tflms_sft._report.plan import Plan
from tflms_sft._report.plan_records import PlannedSegment, Prediction
from tflms_sft._report.segment_report import Share, describe_segment, shares
from tflms_sft._report.summary import MAX_LARGEST
from tflms_sft._report.summary import transient_memory as transient_texts
from tflms_sft._search.traced_step import (
    Candidate,
    TracedStep,
    in_order,
    op_times,
    peak_file_bytes,
    predict,
    predicted_peak,
    skeleton,
    time_ratio,
)
from tflms_sft._trace.layer_names import part_name
from tflms_sft._util.byte_sizes import format_bytes
from tflms_sft._util.text import shortened

MAX_NAMES = 3
"""Names after which a list in a note is cut short."""


def emit_and_describe(
    traced: TracedStep, plans: list[SegmentPlan], left: Sequence[SkippedOps], budget: int | None
) -> tuple[Graph, Plan]:
    """Emit the graph, and return it with its plan, which may have been made for a budget.

    `left` has the ops that cannot be tiled, with reasons.
    """
    analysis = traced.analysis
    if plans:
        graph = in_order(traced, tile_segments(analysis, plans, traced.files))
    else:
        graph = run_pass(RunUpdatesAfterReads(()), analysis.graph).graph
    # For a budget, predict as the search did: by a skeleton, and for every state of the device's memory.
    # Otherwise memory is assumed to be fresh.
    limit = None if budget else 0
    plain = traced.plain if budget else predict(traced, [], limit=limit)
    original = predicted = prediction(traced, plain, analysis.graph)
    if plans:
        seen = skeleton(traced, plans) if budget else graph
        peak = predicted_peak(traced, plans, limit=limit, graph=seen)
        predicted = prediction(traced, Candidate(plans, peak, time_ratio(traced, plans)), seen)
    segments, outside = described_segments(traced, plans)
    plan = Plan(
        changed=bool(plans),
        batch=traced.batch,
        batch_is_fixed=traced.batch_is_fixed,
        segments=segments,
        rest_waiting_bytes=outside.waiting_bytes,
        rest_time_share=outside.time_share,
        left_alone=reasons(traced, left),
        original=original,
        predicted=predicted,
        memory_budget=budget,
        file_bytes=peak_file_bytes(traced, plans),
        notes=(*_loop_note(traced, plain.peak), *_notes(traced)),
    )
    return graph, plan


def described_segments(traced: TracedStep, plans: Sequence[SegmentPlan]) -> tuple[tuple[PlannedSegment, ...], Share]:
    """Return the segments of a step as a plan reports them, and the share of all other ops."""
    *parts, outside = shares(traced.costs, plans, traced.seconds)
    pairs = zip(plans, parts, strict=True)
    described = (
        describe_segment(traced.costs, traced.loop_memory, plan, share=share, names=traced.names)
        for plan, share in pairs
    )
    return tuple(described), outside


def _loop_note(traced: TracedStep, peak: Peak) -> tuple[str, ...]:
    """Return a note of the loop whose tensor lists are among the largest tensors at the original step's peak."""
    if not traced.loop_iterations:
        return ()
    _, loops, _ = at_peak(traced, [], dataclasses.replace(peak, largest=peak.largest[:MAX_LARGEST]))
    return tuple(f"the original step saves {format_bytes(size)} inside {name}" for name, size in loops[:1])


def _notes(traced: TracedStep) -> tuple[str, ...]:
    """Return a note of the layers whose memory the prediction leaves out."""
    ops = [node.name for node in unmodelled(traced.analysis)]
    if not ops:
        return ()
    names = dict.fromkeys(_layer_name(traced, op) for op in ops)
    shown = shortened(list(names), MAX_NAMES)
    return (f"not in the predicted peak: memory inside of {shown}, which `tflms_sft.measure` shows",)


def peak_names(traced: TracedStep) -> PeakNames:
    """Return the display names of tensors and ops of the step."""
    return PeakNames(traced.analysis, traced.record, traced.names)


def prediction(traced: TracedStep, candidate: Candidate, graph: Graph) -> Prediction:
    """Return the prediction of a candidate as a plan reports it, by the rewritten graph or skeleton predicted."""
    plans, peak, ratio = candidate.plans, candidate.peak, candidate.time_ratio
    shown = peak_names(traced)
    largest = largest_tensors(shown, plans, graph, peak)
    if peak.fragmentation_bytes:
        largest = tuple(sorted((*largest, (FRAGMENTATION, peak.fragmentation_bytes)), key=lambda item: -item[1]))
    return Prediction(
        peak_bytes=peak.peak_bytes,
        fixed_bytes=traced.fixed_bytes,
        time_ratio=ratio,
        largest=largest,
        timeline=peak.timeline,
        progress=_progress(traced, plans, graph, peak.timeline),
        seconds=ratio * traced.seconds,
        own=transient_memory(shown, plans, graph, peak, traced.loop_memory, traced.batch),
    )


def at_peak(traced: TracedStep, plans: list[SegmentPlan], peak: Peak) -> tuple[NamedSizes, NamedSizes, NamedSizes]:
    """Return what takes most memory at a predicted peak, as a plan reports it.

    Returns:
        The largest tensors, tensor lists excluded; the loops with the bytes of their lists; memory of running ops.
    """
    graph = tile_skeleton(traced.analysis, plans, traced.files) if plans else traced.analysis.graph
    shown = peak_names(traced)
    transient = transient_memory(shown, plans, graph, peak, traced.loop_memory, traced.batch)
    tensors = dataclasses.replace(peak, largest=tuple(item for item in peak.largest if item[0] not in graph.nodes))
    return largest_tensors(shown, plans, graph, tensors), saved_in_loops(shown, graph, peak), transient


def _progress(
    traced: TracedStep, plans: list[SegmentPlan], graph: Graph, timeline: Sequence[tuple[str, int]]
) -> tuple[float, ...]:
    """Return the time at which each op begins, over that of the original step."""
    seconds = op_times(traced, plans, loop_nodes(graph))
    *begins, _ = itertools.accumulate((seconds(name) for name, _ in timeline), initial=0.0)
    return tuple(round(done / traced.seconds, 6) for done in begins)


def reasons(traced: TracedStep, left: Sequence[SkippedOps]) -> tuple[tuple[str, str], ...]:
    """Return pairs of a layer and the first reason why it cannot be tiled."""
    reasons: dict[str, str] = {}
    shown = peak_names(traced)
    for item in left:
        names = list(dict.fromkeys(_layer_name(traced, op) for op in (item.name, item.last) if op))
        reasons.setdefault(" to ".join(names), shown.in_text(item.reason, traced.analysis.graph))
    return tuple(reasons.items())


def _layer_name(traced: TracedStep, op: str) -> str:
    return part_name(traced.record, op) or f"op {op!r}"


def takes_most(traced: TracedStep, plans: list[SegmentPlan], peak: Peak) -> tuple[str, str]:
    """Return a text about the largest users of memory at a peak, for an error, and the name of the largest tensor.

    Memory of running ops, and the tensor lists of the loop that saves most, are part of the text if they exceed the
    largest tensor.
    """
    tensors, loops, running_sizes = at_peak(traced, plans, peak)
    name, size = tensors[0] if tensors else ("the variables", traced.fixed_bytes)
    others = [(num_bytes, f"saved inside {loop}") for loop, num_bytes in loops[:1]]
    others += [(num_bytes, text) for text, num_bytes in transient_texts(running_sizes)]
    larger = [f"{format_bytes(num_bytes)} are {text}, " for num_bytes, text in others if num_bytes > size]
    return f"{''.join(larger)}`{name}` is {format_bytes(size)}", name
