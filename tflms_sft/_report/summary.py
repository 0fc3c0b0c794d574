"""What a plan says in words: the table of segments, and the lines below it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tflms_sft._report.plan_records import PlannedSegment, PlanRecord, Prediction
from tflms_sft._util.byte_sizes import format_bytes
from tflms_sft._util.text import shortened, table

MOST_SWAPS = 5
"""Swaps that a report names."""

MOST_LARGEST = 5
"""Tensors, and what else takes memory at the peak, that a report names."""

_MOST_NAMES = 4
"""Names after which a list in a report is cut short."""


class Row(NamedTuple):
    """One line of the table, each cell as text.

    Attributes:
        segment: Its name.
        layers: Where it begins and ends.
        decision: What was done.
        tiles: Numbers of tiles.
        before: What waits for the backward phase in the step as it was.
        after: The same now.
        time: Time of it in the step as it was, over that of the whole step, and now.
    """

    segment: str
    layers: str
    decision: str
    tiles: str
    before: str
    after: str
    time: str


HEADINGS = Row("segment", "layers", "decision", "tiles", "waits before", "after", "time")
RIGHT = (4, 5, 6)
"""Columns of numbers."""


def rows(plan: PlanRecord) -> list[Row]:
    """The table: a line for each segment, one for what stays as it was, one for swaps, and the sum."""
    found = [
        Row(
            segment.name,
            f"{_joined(segment.entries)} -> {_joined(segment.exits)}",
            decision(segment),
            _tiles(segment),
            *_numbers(segment.waiting_bytes, segment.time_share),
        )
        for segment in plan.segments
    ]
    rest = "everything else" if plan.segments else "everything"
    found.append(Row("-", rest, "as it was", "-", *_numbers(plan.rest_waiting_bytes, plan.rest_time_share)))
    if plan.swaps:
        text = f"{len(plan.swaps)} tensor(s)"
        found.append(Row("-", text, f"swap to {plan.swap_tier}", "-", "-", f"-{format_bytes(plan.swapped_bytes)}", "-"))
    if len(found) > 1:
        found.append(Row("step", "", "", "", *_numbers(waiting_bytes(plan), whole_time(plan))))
    return found


def waiting_bytes(plan: PlanRecord) -> tuple[int, int]:
    """What waits for the backward phase on the device, before and after."""
    before, after = zip(plan.rest_waiting_bytes, *(segment.waiting_bytes for segment in plan.segments), strict=True)
    return sum(before), max(sum(after) - plan.swapped_bytes, 0)


def whole_time(plan: PlanRecord) -> tuple[float, float]:
    """Work of the step over that of the step as it was: 1, and now."""
    before, after = zip(plan.rest_time_share, *(segment.time_share for segment in plan.segments), strict=True)
    return sum(before), sum(after)


def _numbers(waiting: tuple[int, int], shares: tuple[float, float]) -> tuple[str, str, str]:
    before, after = map(format_bytes, waiting)
    once, now = (f"{100 * part:.0f}" for part in shares)
    return before, after, f"{once} %" if once == now else f"{once} -> {now} %"


def decision(segment: PlannedSegment) -> str:
    """What was done to a segment, in a few words."""
    counts = [math.prod(loop) for loop in (segment.num_tiles, segment.backward_num_tiles) if loop]
    if segment.kept or segment.num_loops > len(counts):
        text = f"{segment.num_loops} loops between barriers"
    elif max(counts) == 1:
        text = "recompute"
    elif not segment.backward_num_tiles:
        text = "tiles, forward alone"
    elif not segment.num_tiles:
        text = "tiles, backward alone"
    else:
        text = "rows, recompute" if segment.halo == "carry" else "tiles, recompute"
    return text + (f", {len(segment.stored)} stored" if segment.stored else "")


def _tiles(segment: PlannedSegment) -> str:
    forward, backward = (grid_text(counts) if counts else "-" for counts in _grids(segment))
    return forward if forward == backward else f"{forward} / {backward}"


def _grids(segment: PlannedSegment) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return segment.num_tiles, segment.backward_num_tiles


def summary(plan: PlanRecord) -> str:
    """The whole report."""
    if plan.pipeline is not None:
        lines = [f"Plan for {batch_text(plan)}: {headline(plan)}", *plan.pipeline.lines(), *inside_stages(plan)]
        return "\n".join([*lines, *(f"  {note}" for note in plan.notes)])
    cells = table([HEADINGS, *rows(plan)], RIGHT)
    return "\n".join([f"Plan for {batch_text(plan)}: {headline(plan)}", *cells, *_details(plan)])


def inside_stages(plan: PlanRecord) -> Iterator[str]:
    """What is done inside of the stages of a pipeline; nothing if nothing is."""
    if not plan.segments and not plan.swaps and not plan.left_alone:
        return
    yield "  inside of stages, of one micro-batch:"
    yield from (f"  {line}" for line in table([HEADINGS, *rows(plan)], RIGHT))
    yield from _passes(plan)
    yield from _left(plan)


def _passes(plan: PlanRecord) -> Iterator[str]:
    for segment in plan.segments:
        yield from (f"  {line}" for line in segment_lines(segment))
    yield from (f"  {line}" for line in swap_lines(plan))


def _left(plan: PlanRecord) -> Iterator[str]:
    if plan.left_alone:
        yield "  left alone:"
        for reason, names in left_by_reason(plan).items():
            yield f"    {reason}" if reason.startswith(f"{names}: ") else f"    {names}: {reason}"


def _details(plan: PlanRecord) -> Iterator[str]:
    yield from _passes(plan)
    fixed = format_bytes(plan.predicted.fixed_bytes)
    yield f"  weights and optimizer slots: {fixed}; largest at the predicted peak:"
    yield from (f"    {format_bytes(size):>9}  {name}" for name, size in most(plan.predicted)[:MOST_LARGEST])
    if plan.measured is not None:
        yield f"  measured peak: {format_bytes(plan.measured.peak_bytes)} ({plan.measured.source})"
    yield from _left(plan)
    yield from (f"  {note}" for note in plan.notes)


def most(prediction: Prediction) -> list[tuple[str, int]]:
    """What takes most at the predicted peak, largest first: tensors, and what is taken only while something runs."""
    return sorted([*whole(prediction.own), *prediction.largest], key=lambda one: -one[1])


def whole(own: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """What is taken only while something runs, with its parts in the text."""
    if not own:
        return []
    (text, size), *inner = own
    for kernel, part in inner:
        amount = format_bytes(part)
        text += f", {'nearly all' if amount == format_bytes(size) else amount} of it {kernel}"
    return [(text, size)]


def segment_lines(segment: PlannedSegment) -> Iterator[str]:
    """What the table has no column for."""
    between = segment.kept or segment.num_loops > sum(map(bool, _grids(segment)))
    loops = [name for name, counts in zip(("forward", "backward"), _grids(segment), strict=True) if counts]
    sizes = zip(segment.tile_bytes, loops, strict=True)
    turns = "turn " + ", ".join(f"{format_bytes(size)} {name}" for size, name in sizes)
    rows, in_rows = ("x".join(map(str, size)) for size in segment.tile_rows)
    end = "exit" if segment.num_tiles else "gradient"
    tile = "" if between else f"{end} tile {rows} from {in_rows} of the entry; "
    yield f"{segment.name}: {tile}{turns}; {segment.forward_ops} + {segment.backward_ops} ops"
    if segment.halo == "carry" and math.prod((*segment.num_tiles[1:], *segment.backward_num_tiles[1:])) > 1:
        saved = f"; {format_bytes(segment.saved_bytes)} of them saved" if segment.saved_bytes else ""
        most = f"; more than {segment.most_rows} tiles would need more memory" if segment.most_rows else ""
        yield f"  rows that tiles share are handed on{saved}{most}"
    elif segment.most_rows:
        yield f"  with more than {segment.most_rows} tiles the work would double"
    if segment.stored:
        yield f"  stored: {', '.join(segment.stored)}"
    if segment.kept:
        yield f"  wait for the backward phase: {shortened(segment.kept, _MOST_NAMES)}"
    yield from (f"  {note}" for note in segment.notes)


def swap_lines(plan: PlanRecord) -> Iterator[str]:
    """What is swapped, largest first, and what could not be."""
    largest = sorted(plan.swaps, key=lambda swap: -swap.num_bytes)
    for swap in largest[:MOST_SWAPS]:
        yield f"swapped: {format_bytes(swap.num_bytes):>9}  {swap.tensor}, back after {swap.controls[0]}"
    if len(largest) > MOST_SWAPS:
        rest = format_bytes(sum(swap.num_bytes for swap in largest[MOST_SWAPS:]))
        yield f"swapped: {rest:>9}  in {len(largest) - MOST_SWAPS} more"
    yield from (f"not swapped: {tensor}: {reason}" for tensor, reason in plan.not_swapped[:MOST_SWAPS])
    if len(plan.not_swapped) > MOST_SWAPS:
        yield f"not swapped: {len(plan.not_swapped) - MOST_SWAPS} more (`plan.not_swapped`)"


def left_by_reason(plan: PlanRecord) -> dict[str, str]:
    """Names of what stays as it was, by why."""
    found: dict[str, list[str]] = {}
    for name, reason in plan.left_alone:
        found.setdefault(reason, []).append(name)
    return {reason: shortened(names, _MOST_NAMES) for reason, names in found.items()}


def headline(plan: PlanRecord) -> str:
    """One line: what was done and what is expected."""
    if plan.pipeline is not None:
        inside = [segments_text(plan)] if plan.segments else []
        inside += [swap_text(plan)] if plan.swaps else []
        return ", ".join([plan.pipeline.headline(), *inside])
    before, after = format_bytes(plan.original.peak_bytes), format_bytes(plan.predicted.peak_bytes)
    if not plan.changed:
        return f"nothing rewritten, predicted peak {after}" + budget_text(plan)
    grew = before != after and plan.predicted.peak_bytes > plan.original.peak_bytes
    more = " (MORE than before)" if grew else ""
    peaks = f"predicted peak {after} instead of {before}{more}"
    time = f"about {plan.predicted.time_ratio:.2f}x the time"
    if not plan.segments:
        return f"{swap_text(plan)}, {peaks}, {time}" + budget_text(plan)
    swaps = f", {swap_text(plan)}" if plan.swaps else ""
    return f"{segments_text(plan)}{swaps}, {peaks}, {time}" + budget_text(plan)


def batch_text(plan: PlanRecord) -> str:
    """Which batches a plan holds for."""
    if plan.batch_is_fixed:
        return f"batch {plan.batch}"
    if plan.memory_budget is not None:
        return f"batches of up to {plan.batch}"
    return f"any batch, with the bytes of batch {plan.batch}"


def budget_text(plan: PlanRecord) -> str:
    """The end of a headline."""
    return "" if plan.memory_budget is None else f", budget {format_bytes(plan.memory_budget)}"


def swap_text(plan: PlanRecord) -> str:
    """How much is swapped, where to and how often."""
    ways = sum(len(swap.controls) for swap in plan.swaps)
    often = "a step" if plan.pipeline is None else "for each micro-batch"
    return (
        f"{len(plan.swaps)} tensor(s) of {format_bytes(plan.swapped_bytes)} swapped to {plan.swap_tier} and "
        f"in again {ways} time(s) {often}"
    )


def segments_text(plan: PlanRecord) -> str:
    """How many segments there are, and in which tiles."""
    distinct = list(dict.fromkeys(grid_text(s.backward_num_tiles or s.num_tiles) for s in plan.segments))
    grids = ", ".join(distinct[:4]) + (", ..." if len(distinct) > 4 else "")
    return f"{len(plan.segments)} segment(s) in {grids} tiles"


def grid_text(counts: tuple[int, ...]) -> str:
    """`4x4`, or `2x4x4` with several batch tiles."""
    return "x".join(map(str, counts if counts[0] != 1 else counts[1:]))


def _joined(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"({', '.join(names)})" if names else "nothing"
