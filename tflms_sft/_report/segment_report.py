"""Describes a segment for a plan: its bytes saved for the backward pass, its share of the time, its tiles."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rewriters.analysis.autodiff_roles import reads_shape_only
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.device.op_buffers import allocates, forwards_input_buffer
from rewriters.emission.loop_tensors import loop_input_tensors
from rewriters.emission.tile_pass import SegmentPlan
from rewriters.estimates.loop_memory import IterationModelCache
from rewriters.estimates.op_cost import CostModel, overlapped_bytes
from rewriters.ir.graph import Node, Tensor
from rewriters.tiling.extents import max_tiles
from rewriters.tiling.tile_planner import Halo, TileLoop
from tflms_sft._report.plan_records import PlannedSegment

__all__: list[str] = []


@dataclasses.dataclass(frozen=True)
class Share:
    """The share of a part of the step in memory and time, in the original and in the rewritten step.

    Attributes:
        waiting_bytes: Bytes of its forward tensors that are saved for the backward pass.
        time_share: Predicted time over that of the original step.
    """

    waiting_bytes: tuple[int, int]
    time_share: tuple[float, float]


def shares(costs: CostModel, plans: Sequence[SegmentPlan], step_seconds: float) -> list[Share]:
    """Return the share of each segment, and last that of all other ops."""
    analysis, batch = costs.analysis, costs.batch
    owner: dict[Node, int] = {node: number for number, plan in enumerate(plans) for node in plan.segment.forward}
    before = _waiting(analysis, batch, owner, _read_before(analysis))
    after = _waiting(analysis, batch, owner, _read_after(analysis, plans))
    after.update({number: _saved_bytes(plan, batch) for number, plan in enumerate(plans)})
    parts = [_time(costs, plan, step_seconds) for plan in plans]
    outside = max(1.0 - sum(once for once, _ in parts), 0.0)  # Rounding may give a negative zero.
    return [
        Share((before[number], after[number]), time)
        for number, time in [*enumerate(parts), (_OUTSIDE, (outside, outside))]
    ]


_OUTSIDE = -1
"""Key of the ops outside of segments."""


def _time(costs: CostModel, plan: SegmentPlan, step_seconds: float) -> tuple[float, float]:
    """Return the time of a segment's ops over `step_seconds`: each run once, and in its loops."""
    once = costs.step((*plan.segment.forward, *plan.segment.backward))
    return once / step_seconds, sum(map(costs.tile_loop, plan.loops)) / step_seconds


def _waiting(analysis: GraphAnalysis, batch: int, owner: Mapping[Node, int], read: Iterator[Tensor]) -> Counter[int]:
    """Return the bytes of the tensors that the backward pass reads, by segment.

    Tensors that share a buffer count once. `owner` is the index of the segment that each forward op belongs to.
    """
    sources = dict.fromkeys(map(_source, read))
    num_bytes = Counter[int]()
    for tensor in sources:
        node = tensor.node
        if node in analysis.data and node not in analysis.backward and allocates(node):
            num_bytes[owner.get(node, _OUTSIDE)] += tensor.num_bytes(batch)
    return num_bytes


def _source(tensor: Tensor) -> Tensor:
    """Return the tensor whose buffer holds this one."""
    while forwards_input_buffer(tensor.node) and tensor.node.inputs:
        tensor = tensor.node.inputs[0]
    return tensor


def _read_before(analysis: GraphAnalysis) -> Iterator[Tensor]:
    """Yield the tensors that the backward pass of the original step reads."""
    for node in analysis.backward:
        yield from () if reads_shape_only(node) else node.inputs


def _read_after(analysis: GraphAnalysis, plans: Sequence[SegmentPlan]) -> Iterator[Tensor]:
    """Yield the tensors that backward loops, and backward ops outside of segments, read."""
    inside = {node for plan in plans for node in plan.segment.backward}
    for node in analysis.backward - inside:
        yield from () if reads_shape_only(node) else node.inputs
    for plan in plans:
        recomputed = set[Tensor]()
        for tile_loop in plan.loops:
            if tile_loop.backward:
                yield from (t for t in loop_input_tensors(tile_loop, plan.segment) if t not in recomputed)
                recomputed.update(tile_loop.writes)


def describe_segment(
    costs: CostModel, memory: IterationModelCache, plan: SegmentPlan, *, share: Share, names: Mapping[Tensor, str]
) -> PlannedSegment:
    """Return the record of one segment, with the layer names of tensors."""
    analysis, batch, segment = costs.analysis, costs.batch, plan.segment
    forward, backward = (_finest(plan, is_backward) for is_backward in (segment.one_loop, True))

    def shown(tensors: Sequence[Tensor]) -> tuple[str, ...]:
        return tuple(names.get(t, t.name) for t in tensors)

    return PlannedSegment(
        name=segment.name,
        entries=shown(segment.entries),
        exits=shown([*segment.exits, *(node.out() for node in segment.sums)]),
        num_tiles=_counts(forward, batch),
        backward_num_tiles=_counts(backward, batch),
        stored=() if segment.loop_specs else shown(sorted(segment.stored, key=lambda t: t.name)),
        forward_ops=len(segment.forward),
        backward_ops=len(segment.backward),
        tile_bytes=tuple(
            max(memory.peak_bytes(tile_loop, batch) for tile_loop in plan.loops if tile_loop.backward == is_backward)
            for is_backward in (False, True)
            if _finest(plan, is_backward) is not None
        ),
        tile_rows=_tile_rows(plan, forward or plan.loops[0]),
        notes=(*segment.notes, *_unused_batch_tiles(plan, batch)),
        num_loops=len(plan.loops),
        one_loop=segment.one_loop,
        kept=shown(_saved_tensors(plan)),
        halo=plan.halo.value,
        saved_bytes=_saved_bytes(plan, batch),
        overlapped_bytes=sum(overlapped_bytes(analysis, tile_loop, batch) for tile_loop in plan.loops),
        most_rows=_most_rows(costs, memory, plan),
        waiting_bytes=share.waiting_bytes,
        time_share=share.time_share,
    )


def _saved_bytes(plan: SegmentPlan, batch: int) -> int:
    """Return the bytes of carried rows that are saved for the backward loop."""
    return sum(save.saved.num_bytes(batch) for tile_loop in plan.loops for save in tile_loop.saves)


def _most_rows(costs: CostModel, memory: IterationModelCache, plan: SegmentPlan) -> int | None:
    """Return the approximate number of useful strips, extrapolated from those of the backward loop.

    The bounds are those of Z. Wang et al., "LR-CNN" (2024), IV-A and IV-B. Carried rows: each border saves equal bytes,
    and an iteration needs memory proportional to its rows, so that the sum is smallest where both are equal. Recomputed
    rows: each strip adds equal work for halos and for reading weights, and the bound doubles the work.
    """
    backward = _finest(plan, backward=True)
    if backward is None or plan.segment.loop_specs:
        return None
    split = [(count, axis) for axis, count in enumerate(backward.grid.spatial) if count > 1]
    if len(split) != 1:
        return None
    ((count, axis),) = split
    if plan.halo is Halo.CARRY:
        border_bytes = _saved_bytes(plan, costs.batch) / (count - 1)
        iteration_bytes = memory.peak_bytes(backward, costs.batch)
        best = math.sqrt(iteration_bytes * count / border_bytes) if border_bytes else math.inf
    else:
        once = costs.step(backward.body)
        added = (costs.body(backward) - once) / (count - 1)
        best = 1 + once / added if added > 0 else math.inf
    return max(1, int(best)) if best < max_tiles(costs.analysis, plan.segment)[axis] else None


def _finest(plan: SegmentPlan, backward: bool) -> TileLoop | None:
    """Return the forward or backward loop with the most tiles; `None` if there is none."""
    tile_loops = [tile_loop for tile_loop in plan.loops if tile_loop.backward == backward]
    return max(tile_loops, key=lambda tile_loop: tile_loop.grid.num_tiles, default=None)


def _tile_rows(plan: SegmentPlan, tile_loop: TileLoop) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the largest sizes along each axis of a tile of a loop's results, and of its operands."""
    segment = plan.segment
    if segment.loop_specs:
        ends, begins = [*tile_loop.cells], [t for t in tile_loop.reads if t in tile_loop.regions]
    else:
        ends, begins = tile_loop.writes or segment.grad_entries, segment.entries

    def rows(tensors: Sequence[Tensor]) -> tuple[int, ...]:
        regions = (tile_loop.cells.get(tensor) or tile_loop.regions.get(tensor) for tensor in tensors)
        sizes = [tuple(int(interval.size.max()) for interval in region) for region in regions if region is not None]
        return max(sizes, key=math.prod, default=tuple(0 for _ in tile_loop.grid.spatial))

    return rows(ends), rows(begins)


def _saved_tensors(plan: SegmentPlan) -> list[Tensor]:
    """Return the tensors of a segment with barriers that its forward loops save for its backward loops."""
    if not plan.segment.loop_specs:
        return []
    forward, recomputed = dict[Tensor, None](), set[Tensor]()
    saved: dict[Tensor, None] = {}
    for tile_loop in plan.loops:
        if tile_loop.backward:
            saved.update((t, None) for t in tile_loop.reads if t in forward and t not in recomputed)
            recomputed.update(tile_loop.writes)
        else:
            forward.update((t, None) for t in tile_loop.writes)
    return list(saved)


def _counts(tile_loop: TileLoop | None, batch: int) -> tuple[int, ...]:
    """Return the tiles along the batch, at most one per image, and along each axis; empty without a loop."""
    return () if tile_loop is None else (min(tile_loop.grid.batch, batch), *tile_loop.grid.spatial)


def _unused_batch_tiles(plan: SegmentPlan, batch: int) -> list[str]:
    """Return a remark if there are more tiles along the batch than images."""
    count = max(tile_loop.grid.batch for tile_loop in plan.loops)
    return [f"a batch of {batch} uses only {batch} of the {count} tiles along the batch"] if count > batch else []
