"""The summary of a plan as text: headline, table of segments, and details."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from tflms_sft._report.op_names import short_op_names
from tflms_sft._report.plan_records import PlannedSegment, PlanRecord, Prediction
from tflms_sft._util.byte_sizes import format_bytes
from tflms_sft._util.text import shortened, table

MAX_SWAPS = 5
"""Number of swaps that a report names."""

MAX_LARGEST = 5
"""Number of tensors and other contributions to the peak that a report names."""

ONE_TILE = "1 tile"
"""Text of a loop of a single iteration."""

_MAX_NAMES = 4
"""Number of names after which a list is truncated."""


HEADINGS = ("segment", "layers", "decision", "tiles", "saved for backward", "after", "time")
RIGHT = (4, 5, 6)
"""Indices of right-aligned columns."""


def rows(plan: PlanRecord) -> list[tuple[str, ...]]:
    """Return the rows of the table: segments, all other ops, swaps, and the sum."""
    result: list[tuple[str, ...]] = [
        (
            segment.name,
            f"{_joined(segment.entries)} -> {_joined(segment.exits)}",
            decision(segment),
            _tiles(plan, segment),
            *_numbers(segment.waiting_bytes, segment.time_share),
        )
        for segment in plan.segments
    ]
    other_ops = "everything else" if plan.segments else "everything"
    result.append(("-", other_ops, "not rewritten", "-", *_numbers(plan.rest_waiting_bytes, plan.rest_time_share)))
    if plan.swaps:
        text = f"{len(plan.swaps)} tensor(s)"
        swapped = f"-{format_bytes(plan.swapped_bytes)}"
        result.append(("-", text, f"swap to {plan.swap_tier}", "-", "-", swapped, "-"))
    if len(result) > 1:
        result.append(("step", "", "", "", *_numbers(waiting_bytes(plan), whole_time(plan))))
    return result


def waiting_bytes(plan: PlanRecord) -> tuple[int, int]:
    """Return the bytes saved for the backward pass on the device, in the original and the rewritten step."""
    before, after = zip(plan.rest_waiting_bytes, *(segment.waiting_bytes for segment in plan.segments), strict=True)
    return sum(before), max(sum(after) - plan.swapped_bytes, 0)


def whole_time(plan: PlanRecord) -> tuple[float, float]:
    """Return the time of the original step, 1, and of the rewritten step, relative to it."""
    before, after = zip(plan.rest_time_share, *(segment.time_share for segment in plan.segments), strict=True)
    return sum(before), sum(after)


def _numbers(waiting: tuple[int, int], shares: tuple[float, float]) -> tuple[str, str, str]:
    before, after = map(format_bytes, waiting)
    original, rewritten = (f"{100 * share:.0f}" for share in shares)
    return before, after, f"{original} %" if original == rewritten else f"{original} -> {rewritten} %"


def decision(segment: PlannedSegment) -> str:
    """Return the transformation of a segment in a few words."""
    counts = [math.prod(loop) for loop in (segment.num_tiles, segment.backward_num_tiles) if loop]
    if segment.kept or segment.num_loops > len(counts):
        text = f"{segment.num_loops} loops between barriers"
    elif segment.one_loop:
        text = "forward and backward in one loop"
    elif max(counts) == 1:
        text = "recompute"
    elif not segment.backward_num_tiles:
        text = "tiles, forward only"
    elif not segment.num_tiles:
        text = "tiles, backward only"
    else:
        text = "strips, recompute" if segment.halo == "carry" else "tiles, recompute"
    return text + (f", {len(segment.stored)} saved" if segment.stored else "")


def _tiles(plan: PlanRecord, segment: PlannedSegment) -> str:
    forward, backward = (grid_text(plan, segment, counts) if counts else "-" for counts in _grids(segment))
    return forward if forward == backward else f"{forward} / {backward}"


def _grids(segment: PlannedSegment) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return segment.num_tiles, segment.backward_num_tiles


def summary(plan: PlanRecord) -> str:
    """Return the whole report."""
    if plan.pipeline is not None:
        lines = [f"Plan for {batch_text(plan)}: {headline(plan)}", *plan.pipeline.lines(), *inside_stages(plan)]
        return "\n".join([*lines, *(f"  {note}" for note in plan.notes)])
    cells = table([HEADINGS, *rows(plan)], RIGHT)
    return "\n".join([f"Plan for {batch_text(plan)}: {headline(plan)}", *cells, *_details(plan)])


def inside_stages(plan: PlanRecord) -> Iterator[str]:
    """Yield the report of tiles and swaps inside the stages of a pipeline; nothing without any."""
    if not plan.segments and not plan.swaps and not plan.left_alone:
        return
    yield "  inside the stages, for one micro-batch:"
    yield from (f"  {line}" for line in table([HEADINGS, *rows(plan)], RIGHT))
    yield from _transformations(plan)
    yield from _not_rewritten(plan)


def _transformations(plan: PlanRecord) -> Iterator[str]:
    for segment in plan.segments:
        yield from (f"  {line}" for line in segment_lines(segment))
    yield from (f"  {line}" for line in swap_lines(plan))


def _not_rewritten(plan: PlanRecord) -> Iterator[str]:
    if plan.left_alone:
        yield "  not rewritten:"
        for reason, names in not_rewritten_by_reason(plan).items():
            yield f"    {names}: {reason}"


def _details(plan: PlanRecord) -> Iterator[str]:
    yield from _transformations(plan)
    fixed = format_bytes(plan.predicted.fixed_bytes)
    yield f"  weights and optimizer slots: {fixed}; largest at the predicted peak:"
    yield from (f"    {format_bytes(size):>9}  {name}" for name, size in largest_at_peak(plan.predicted)[:MAX_LARGEST])
    if plan.measured is not None:
        yield f"  measured peak: {format_bytes(plan.measured.peak_bytes)} ({plan.measured.source})"
    yield from _not_rewritten(plan)
    yield from (f"  {note}" for note in plan.notes)


def largest_at_peak(prediction: Prediction) -> list[tuple[str, int]]:
    """Return the largest contributions to the predicted peak, largest first: tensors and transient memory."""
    return sorted([*transient_memory(prediction.own), *prediction.largest], key=lambda item: -item[1])


def transient_memory(transient: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the transient memory at a peak as one item, whose text names its parts; empty without any."""
    if not transient:
        return []
    (text, size), *parts = transient
    for kernel, part_bytes in parts:
        amount = format_bytes(part_bytes)
        text += f", {'nearly all' if amount == format_bytes(size) else amount} of it {kernel}"
    return [(text, size)]


def segment_lines(segment: PlannedSegment) -> Iterator[str]:
    """Yield the details of a segment that the table has no column for."""
    has_barriers = segment.kept or segment.num_loops > sum(map(bool, _grids(segment)))
    phases = [name for name, counts in zip(("forward", "backward"), _grids(segment), strict=True) if counts]
    loops = [""] if segment.one_loop else [f" {phase}" for phase in phases]
    sizes = zip(segment.tile_bytes, loops, strict=True)
    memory = "takes " + ", ".join(f"{format_bytes(size)}{name}" for size, name in sizes)
    rows, in_rows = ("x".join(map(str, size)) for size in segment.tile_rows)
    end = "exit" if segment.num_tiles else "gradient"
    tile = "" if has_barriers else f"reads {in_rows} of the entry, writes {rows} of the {end} and "
    ops = f"{segment.forward_ops} forward and {segment.backward_ops} backward ops"
    yield f"{segment.name}: an iteration {tile}{memory}; {ops}"
    if segment.halo == "carry" and math.prod((*segment.num_tiles[1:], *segment.backward_num_tiles[1:])) > 1:
        saved = f"; {format_bytes(segment.saved_bytes)} of them saved" if segment.saved_bytes else ""
        bound = f"; more than {segment.most_rows} strips would need more memory" if segment.most_rows else ""
        yield f"  halo rows are carried{saved}{bound}"
    elif segment.most_rows:
        yield f"  more than {segment.most_rows} strips would double the work"
    if segment.stored:
        yield f"  saved for backward: {', '.join(segment.stored)}"
    if segment.kept:
        yield f"  saved for backward: {shortened(segment.kept, _MAX_NAMES)}"
    yield from (f"  {note}" for note in segment.notes)


def swap_lines(plan: PlanRecord) -> Iterator[str]:
    """Yield the swapped tensors, largest first, and the tensors that could not be swapped."""
    largest = sorted(plan.swaps, key=lambda swap: -swap.num_bytes)
    text_of = short_op_names(swap.controls[0] for swap in largest[:MAX_SWAPS])
    for swap in largest[:MAX_SWAPS]:
        control = text_of[swap.controls[0]]
        yield f"swapped: {format_bytes(swap.num_bytes):>9}  {swap.tensor}, swapped in after {control}"
    if len(largest) > MAX_SWAPS:
        remaining = format_bytes(sum(swap.num_bytes for swap in largest[MAX_SWAPS:]))
        yield f"swapped: {remaining:>9}  in {len(largest) - MAX_SWAPS} more"
    yield from (f"not swapped: {tensor}: {reason}" for tensor, reason in plan.not_swapped[:MAX_SWAPS])
    if len(plan.not_swapped) > MAX_SWAPS:
        yield f"not swapped: {len(plan.not_swapped) - MAX_SWAPS} more (`plan.not_swapped`)"


def not_rewritten_by_reason(plan: PlanRecord) -> dict[str, str]:
    """Return the names of ops that were not rewritten, by reason."""
    names_by_reason: dict[str, list[str]] = {}
    for name, reason in plan.left_alone:
        names_by_reason.setdefault(reason, []).append(name)
    return {reason: shortened(names, _MAX_NAMES) for reason, names in names_by_reason.items()}


def headline(plan: PlanRecord) -> str:
    """Return one line: segments, swaps, predicted peak and time."""
    if plan.pipeline is not None:
        inside = [segments_text(plan)] if plan.segments else []
        inside += [swap_text(plan)] if plan.swaps else []
        return ", ".join([plan.pipeline.headline(), *inside])
    before, after = format_bytes(plan.original.peak_bytes), format_bytes(plan.predicted.peak_bytes)
    if not plan.changed:
        return f"nothing rewritten, predicted peak {after}" + budget_text(plan)
    is_larger = before != after and plan.predicted.peak_bytes > plan.original.peak_bytes
    warning = " (MORE than before)" if is_larger else ""
    peaks = f"predicted peak {after} instead of {before}{warning}"
    time = time_text(plan.predicted.time_ratio)
    if not plan.segments:
        return f"{swap_text(plan)}, {peaks}, {time}" + budget_text(plan)
    swaps = f", {swap_text(plan)}" if plan.swaps else ""
    return f"{segments_text(plan)}{swaps}, {peaks}, {time}" + budget_text(plan)


def time_text(time_ratio: float) -> str:
    """Return the text of a predicted time over that of the original step."""
    ratio = f"{time_ratio:.2f}x"
    return "about the same time" if ratio == "1.00x" else f"about {ratio} the time"


def batch_text(plan: PlanRecord) -> str:
    """Return the text of the batch sizes that a plan holds for."""
    if plan.batch_is_fixed:
        return f"batch {plan.batch}"
    if plan.memory_budget is not None:
        return f"batches of up to {plan.batch}"
    return f"any batch, bytes for batch {plan.batch}"


def budget_text(plan: PlanRecord) -> str:
    """Return the end of a headline: the budget, if there is one."""
    return "" if plan.memory_budget is None else f", budget {format_bytes(plan.memory_budget)}"


def swap_text(plan: PlanRecord) -> str:
    """Return the number, bytes and destination of swapped tensors, and the number of swap-ins."""
    swap_ins = sum(len(swap.controls) for swap in plan.swaps)
    unit = "step" if plan.pipeline is None else "micro-batch"
    return (
        f"{len(plan.swaps)} tensor(s) of {format_bytes(plan.swapped_bytes)} swapped to {plan.swap_tier}, "
        f"{swap_ins} swap-in(s) per {unit}"
    )


def segments_text(plan: PlanRecord) -> str:
    """Return the number of segments, and of tiles in the loop of each that has most of them."""
    grids = (grid_text(plan, s, max(filter(None, _grids(s)), key=math.prod)) for s in plan.segments)
    distinct = sorted(dict.fromkeys(grids), key=lambda text: text != ONE_TILE)
    text = ", ".join(distinct[:4]) + (", ..." if len(distinct) > 4 else "")
    return f"{len(plan.segments)} segment(s) in {text}" + ("" if distinct[-1] == ONE_TILE else " of tiles")


def grid_text(plan: PlanRecord, segment: PlannedSegment, counts: tuple[int, ...]) -> str:
    """Return the numbers of tiles of a loop of a segment with their axes, such as `2 images x 8 rows`."""
    batch, *spatial = counts
    is_sequence = len(spatial) < 3 and all(size[0] == 1 for size in (*segment.tile_rows, spatial) if len(size) > 1)
    axes = ["rows", "spans"] if is_sequence else ["slices", "rows", "columns"]
    samples = "groups" if batch < plan.batch else "sequences" if is_sequence else "images"
    numbered = zip([batch, *spatial], [samples, *axes[-len(spatial) :]], strict=True)
    return " x ".join(f"{count} {axis}" for count, axis in numbered if count > 1) or ONE_TILE


def _joined(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"({', '.join(names)})" if names else "nothing"


def excess_remedy(excess_bytes: int, budget: int, least: int = 0, *, is_used: bool) -> str:
    """Return the remedy, and for a used process the usual reason, where a step exceeds its predicted memory.

    Args:
        excess_bytes: Measured less predicted memory.
        budget: Bytes.
        least: Predicted bytes of the plan that needs least, if known.
        is_used: Whether the process had much memory in use before the step. If not, no reason is named, and no remedy
            if `headroom` does not help.
    """
    headroom = f"`headroom={min(math.ceil(100 * excess_bytes / budget) / 100, 0.99):g}`"
    suffices = least + excess_bytes <= budget
    if not is_used:
        return f"Leave more of the budget free, such as {headroom}." if suffices else ""
    text = (
        "In a process that has trained before, even if that training was interrupted, memory is more fragmented: "
        "train in a fresh process"
    )
    if not suffices:
        return f"{text}. More `headroom` does not help, because no plan is smaller."
    return f"{text}, or leave more of the budget free, such as {headroom}."
