"""What a plan tells of a segment."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rewriters.analysis.autodiff_roles import reads_shape_only
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.device import properties
from rewriters.emission.loop_emitter import loop_input_tensors
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
    """What a part of the step has of it, before and after.

    Attributes:
        waiting_bytes: Of what it makes in the forward phase, what waits for the backward phase.
        time_share: Predicted time, over that of the whole step before.
    """

    waiting_bytes: tuple[int, int]
    time_share: tuple[float, float]


def shares(costs: CostModel, plans: Sequence[SegmentPlan], whole: float) -> list[Share]:
    """One for each segment, and at the end that of what stays as it was; `whole` is the time of the step."""
    analysis, batch = costs.analysis, costs.batch
    owner: dict[Node, int] = {node: number for number, plan in enumerate(plans) for node in plan.segment.forward}
    before = _waiting(analysis, batch, owner, _read_before(analysis))
    after = _waiting(analysis, batch, owner, _read_after(analysis, plans))
    after.update({number: _saved_bytes(plan, batch) for number, plan in enumerate(plans)})
    parts = [_work(costs, plan, whole) for plan in plans]
    rest = max(1.0 - sum(once for once, _ in parts), 0.0)  # Not -0.
    return [Share((before[number], after[number]), work) for number, work in [*enumerate(parts), (_REST, (rest, rest))]]


_REST = -1
"""Number of the part that is in no segment."""


def _work(costs: CostModel, plan: SegmentPlan, whole: float) -> tuple[float, float]:
    """Time of a segment's ops, once and in its loops."""
    once = costs.step((*plan.segment.forward, *plan.segment.backward))
    return once / whole, sum(map(costs.tile_loop, plan.loops)) / whole


def _waiting(analysis: GraphAnalysis, batch: int, owner: Mapping[Node, int], read: Iterator[Tensor]) -> Counter[int]:
    """Bytes that wait for the backward phase, by the segment that makes them; what shares a buffer counts once."""
    sources = dict.fromkeys(map(_source, read))
    found = Counter[int]()
    for tensor in sources:
        node = tensor.node
        if node in analysis.data and node not in analysis.backward and properties.allocates(node):
            found[owner.get(node, _REST)] += tensor.num_bytes(batch)
    return found


def _source(tensor: Tensor) -> Tensor:
    """The tensor in whose buffer this one is."""
    while properties.forwards_input_buffer(tensor.node) and tensor.node.inputs:
        tensor = tensor.node.inputs[0]
    return tensor


def _read_before(analysis: GraphAnalysis) -> Iterator[Tensor]:
    """What the backward phase of the original reads."""
    for node in analysis.backward:
        yield from () if reads_shape_only(node) else node.inputs


def _read_after(analysis: GraphAnalysis, plans: Sequence[SegmentPlan]) -> Iterator[Tensor]:
    """What backward loops read, and what is left of the backward phase."""
    inside = {node for plan in plans for node in plan.segment.backward}
    for node in analysis.backward - inside:
        yield from () if reads_shape_only(node) else node.inputs
    for plan in plans:
        again = set[Tensor]()
        for tile_loop in plan.loops:
            if tile_loop.backward:
                yield from (t for t in loop_input_tensors(tile_loop, plan.segment) if t not in again)
                again.update(tile_loop.writes)


def describe_segment(
    costs: CostModel, memory: IterationModelCache, plan: SegmentPlan, *, share: Share, names: Mapping[Tensor, str]
) -> PlannedSegment:
    """Return the record of one planned segment; `names` are the layers of tensors."""
    analysis, batch, segment = costs.analysis, costs.batch, plan.segment
    forward, backward = (_finest(plan, which) for which in (False, True))

    def shown(tensors: Sequence[Tensor]) -> tuple[str, ...]:
        return tuple(names.get(t, t.name) for t in tensors)

    return PlannedSegment(
        name=segment.name,
        entries=shown(segment.entries),
        exits=shown(segment.exits),
        num_tiles=_counts(forward, batch),
        backward_num_tiles=_counts(backward, batch),
        stored=() if segment.loop_specs else shown(sorted(segment.stored, key=lambda t: t.name)),
        forward_ops=len(segment.forward),
        backward_ops=len(segment.backward),
        tile_bytes=tuple(
            max(memory.peak_bytes(tile_loop, batch) for tile_loop in plan.loops if tile_loop.backward == which)
            for which, loop in ((False, forward), (True, backward))
            if loop is not None
        ),
        tile_rows=_tile_rows(plan, forward or plan.loops[0]),
        notes=(*segment.notes, *_too_many(plan, batch)),
        num_loops=len(plan.loops),
        kept=shown(_kept(plan)),
        halo=plan.halo.value,
        saved_bytes=_saved_bytes(plan, batch),
        overlapped_bytes=sum(overlapped_bytes(analysis, tile_loop, batch) for tile_loop in plan.loops),
        most_rows=_most_rows(costs, memory, plan),
        waiting_bytes=share.waiting_bytes,
        time_share=share.time_share,
    )


def _saved_bytes(plan: SegmentPlan, batch: int) -> int:
    """What waits for the backward loop of the rows that are handed on."""
    return sum(save.saved.num_bytes(batch) for tile_loop in plan.loops for save in tile_loop.saves)


def _most_rows(costs: CostModel, memory: IterationModelCache, plan: SegmentPlan) -> int | None:
    """About how many row tiles pay, extrapolated from those of the backward loop.

    Z. Wang et al., "LR-CNN" (2024), bound the number in IV-A and IV-B. Every border saves as much, and a turn needs
    memory by its part of the rows, so that with rows handed on the sum is least where both are equal. Where rows are
    recomputed, each turn adds as much work, by its halos and by the weights that it reads; the bound is where the work
    has doubled.
    """
    backward = _finest(plan, backward=True)
    if backward is None or plan.segment.loop_specs:
        return None
    split = [(count, axis) for axis, count in enumerate(backward.grid.spatial) if count > 1]
    if len(split) != 1:
        return None
    ((count, axis),) = split
    if plan.halo is Halo.CARRY:
        each_border = _saved_bytes(plan, costs.batch) / (count - 1)
        best = math.sqrt(memory.peak_bytes(backward, costs.batch) * count / each_border) if each_border else math.inf
    else:
        once = costs.step(backward.body)
        added = (costs.body(backward) - once) / (count - 1)
        best = 1 + once / added if added > 0 else math.inf
    return max(1, int(best)) if best < max_tiles(costs.analysis, plan.segment)[axis] else None


def _finest(plan: SegmentPlan, backward: bool) -> TileLoop | None:
    """The loop of a phase with the most tiles."""
    tile_loops = [tile_loop for tile_loop in plan.loops if tile_loop.backward == backward]
    return max(tile_loops, key=lambda tile_loop: tile_loop.grid.num_tiles, default=None)


def _tile_rows(plan: SegmentPlan, tile_loop: TileLoop) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Largest rows along each axis of a tile of what a loop makes, and of what it makes it from."""
    segment = plan.segment
    if segment.loop_specs:
        ends, begins = [*tile_loop.cells], [t for t in tile_loop.reads if t in tile_loop.regions]
    else:
        ends, begins = (segment.grad_entries if tile_loop.backward else tile_loop.writes), segment.entries

    def rows(tensors: Sequence[Tensor]) -> tuple[int, ...]:
        if not tensors:
            return tuple(0 for _ in tile_loop.grid.spatial)
        region = tile_loop.cells.get(tensors[0]) or tile_loop.regions[tensors[0]]
        return tuple(int(interval.size.max()) for interval in region)

    return rows(ends), rows(begins)


def _kept(plan: SegmentPlan) -> list[Tensor]:
    """Tensors that wait, between barriers, from the forward phase for the backward phase."""
    if not plan.segment.loop_specs:
        return []
    made, again = dict[Tensor, None](), set[Tensor]()
    kept: dict[Tensor, None] = {}
    for tile_loop in plan.loops:
        if tile_loop.backward:
            kept.update((t, None) for t in tile_loop.reads if t in made and t not in again)
            again.update(tile_loop.writes)
        else:
            made.update((t, None) for t in tile_loop.writes)
    return list(kept)


def _counts(tile_loop: TileLoop | None, batch: int) -> tuple[int, ...]:
    """Tiles along the batch, of which there are no more than images, and each axis; nothing without a loop."""
    return () if tile_loop is None else (min(tile_loop.grid.batch, batch), *tile_loop.grid.spatial)


def _too_many(plan: SegmentPlan, batch: int) -> list[str]:
    """That there are fewer images than tiles along the batch."""
    most = max(tile_loop.grid.batch for tile_loop in plan.loops)
    return [f"a batch of {batch} has {batch} of the {most} tiles that it may have"] if most > batch else []
