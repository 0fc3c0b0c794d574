"""Traces a training step op by op, with every iteration of its tile loops, from the models of the planner.

A plan predicts a tile loop as one op with the peak of its iterations. Here each iteration runs, in the memory model and
with the cost model that the planner uses.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rewriters.device.allocator import Allocator, pools
from rewriters.device.peak_memory import Action, AllocationEvent, graph_schedule, with_delayed_frees
from rewriters.emission.tile_pass import SegmentPlan, loop_nodes, tile_skeleton
from rewriters.estimates.loop_memory import IterationModel, Tile
from rewriters.tiling.tile_planner import TileLoop
from tflms_sft._search.traced_step import TracedStep, op_times


class Moment(NamedTuple):
    """The run of one op.

    Attributes:
        op: Name of the op.
        loop: Name of the tile loop that it runs in, such as `segment1/forward`; empty outside of loops.
        tile: Index of the tile along each axis; empty outside of loops.
        begin: Start, as a fraction of the predicted time of the original step.
        end: End, likewise.
        num_bytes: Bytes in use while it runs.
        alive: Names of the full-size tensors in memory.
        in_tile: Names of the tensors of the iteration in memory.
    """

    op: str
    loop: str
    tile: Tile
    begin: float
    end: float
    num_bytes: int
    alive: frozenset[str]
    in_tile: frozenset[str]


def step_trace(traced: TracedStep, plans: Sequence[SegmentPlan] = ()) -> list[Moment]:
    """Return the ops of a step in the order in which they run, in the state of memory with the highest peak.

    Args:
        traced: The step.
        plans: Segments that run as tile loops; none for the original step.
    """
    plans = list(plans)
    graph = tile_skeleton(traced.analysis, plans) if plans else traced.analysis.graph
    loops = loop_nodes(graph)
    seconds = op_times(traced, plans, loops)
    tile_loops = {
        loops[plan.segment.name, tile_loop.name]: _LoopTrace(traced, plan.segment.name, tile_loop)
        for plan in plans
        for tile_loop in plan.loops
    }
    trace = graph_schedule(graph, tile_loops.keys(), traced.batch, traced.variables)
    candidates = []
    for pool in pools(trace.device, sum(trace.held) + max(event.num_bytes for event in trace.events)):
        for num_bytes in trace.held:
            pool.allocate(num_bytes)
        pool.map(trace.folded_bytes)
        for is_late in (False, True):
            runs = list(_replayed(trace.late if is_late else trace.events, pool, tile_loops, is_late=is_late))
            candidates.append(runs)
    worst = max(candidates, key=lambda runs: max(run.num_bytes for run in runs))
    lengths = [run.end if run.loop else seconds(run.op) for run in worst]
    ends = list(itertools.accumulate(length / traced.seconds for length in lengths))
    begins = [0.0, *ends[:-1]]
    return [run._replace(begin=begin, end=end) for run, begin, end in zip(worst, begins, ends, strict=True)]


class _LoopTrace:
    """Iterations of a tile loop: allocations and seconds of each op."""

    def __init__(self, traced: TracedStep, segment: str, tile_loop: TileLoop) -> None:
        self.name = f"{segment}/{tile_loop.name}"
        self.tiles: list[Tile] = list(itertools.product(*map(range, tile_loop.grid.spatial)))
        if tile_loop.order.value < 0:
            self.tiles.reverse()
        model = IterationModel(traced.analysis, tile_loop)
        self.events = {tile: model.events(tile, traced.batch) for tile in self.tiles}
        in_loop = {node.name: traced.costs.op_in_loop(tile_loop, node) for node in tile_loop.body}
        # Copies between tiles and full-size tensors, and savings by concurrency, are shared among the ops.
        scale = traced.costs.tile_loop(tile_loop) / sum(in_loop.values()) / len(self.tiles)
        self.seconds: Mapping[str, float] = {name: scale * seconds for name, seconds in in_loop.items()}


def _replayed(
    events: Sequence[AllocationEvent], pool: Allocator, tile_loops: Mapping[str, _LoopTrace], *, is_late: bool
) -> Iterator[Moment]:
    """Yield the ops of a step; `end` is the length in seconds of an op of a loop, and 0 of any other op."""
    handles: dict[int, object] = {}
    names: dict[int, str] = {}
    for event in events:
        if event.action is not Action.RUN:
            _apply(event, pool, handles, names)
        elif event.name in tile_loops:
            loop = tile_loops[event.name]
            for tile in loop.tiles:
                yield from _iteration(loop, tile, pool, frozenset(names.values()), is_late=is_late)
        else:
            yield Moment(event.name, "", (), 0, 0, _with_scratch(event, pool), frozenset(names.values()), frozenset())


def _iteration(
    loop: _LoopTrace, tile: Tile, pool: Allocator, alive: frozenset[str], *, is_late: bool
) -> Iterator[Moment]:
    events = loop.events[tile]
    handles: dict[int, object] = {}
    names: dict[int, str] = {}
    for event in with_delayed_frees(events) if is_late else events:
        if event.action is Action.RUN:
            seconds = loop.seconds.get(event.name, 0.0)
            in_use = _with_scratch(event, pool)
            yield Moment(event.name, loop.name, tile, 0, seconds, in_use, alive, frozenset(names.values()))
        else:
            _apply(event, pool, handles, names)


def _apply(event: AllocationEvent, pool: Allocator, handles: dict[int, object], names: dict[int, str]) -> None:
    """Allocate or free a buffer."""
    if event.action is Action.FREE:
        pool.free(handles.pop(event.key))
        del names[event.key]
    else:
        take = pool.map if event.action is Action.MAP else pool.allocate
        handles[event.key] = take(event.num_bytes)
        names[event.key] = event.name


def _with_scratch(event: AllocationEvent, pool: Allocator) -> int:
    """Return the bytes in use while an op runs, its scratch included."""
    blocks = [pool.allocate(block) for block in event.blocks]
    in_use = pool.in_use
    for block in blocks:
        pool.free(block)
    return in_use
