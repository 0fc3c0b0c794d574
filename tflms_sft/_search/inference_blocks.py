"""Blocks of a component in a step without gradients, and the ways to tile them.

Nothing is saved for a backward pass, so bytes do not add up along the network (as in `training_blocks.py`). Only what
later ops read, such as the skips of a U-Net, stays alive. Each stretch of blocks has to fit by itself: its entries, its
exits, the tensors alive across it, and one iteration. A stretch may begin and end at any op.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from rewriters.analysis.autodiff_roles import reads_shape_only
from rewriters.device.kernel_scratch import op_scratch
from rewriters.device.op_buffers import allocates, forwards_input_buffer, may_run_in_place
from rewriters.device.peak_memory import most_alive
from rewriters.emission.loop_signature import segment_signature
from rewriters.emission.loop_tensors import loop_operand
from rewriters.emission.tile_pass import planner_for
from rewriters.errors import NotTileableError
from rewriters.ir.graph import Tensor
from rewriters.tiling.ft_segments import TileableComponent, try_segment
from rewriters.tiling.one_loop import with_final_sums
from rewriters.tiling.segment import Segment
from rewriters.tiling.tile_grids import auto_grids, thinned
from rewriters.tiling.tile_planner import Grid, Halo, TileLoop
from tflms_sft._search.block_choices import BlockChoice, select_cuts
from tflms_sft._search.segment_tilings import LoopEstimate, LoopEstimates, fastest_fitting
from tflms_sft._search.traced_step import TracedStep

MAX_CUTS = 6
"""Most positions between the ends of a component where a segment may begin or end."""

GRID_GROWTH = 2.0
"""Tiles of a grid that is tried, over those of the one before."""


class LiveTensors:
    """Lifetimes of the tensors of a step, which tell what is alive across a stretch of blocks."""

    def __init__(self, traced: TracedStep) -> None:
        analysis, batch = traced.analysis, traced.batch
        self._analysis = analysis
        end = len(analysis.order)
        last = {tensor: end for tensor in analysis.graph.outputs}
        for node in reversed(analysis.order):  # A consumer of a forwarded buffer reads the original.
            for tensor in () if reads_shape_only(node) else node.inputs:
                until = last.get(node.out(), -1) if forwards_input_buffer(node) else -1
                last[tensor] = max(last.get(tensor, -1), until, analysis.position[node])
        self._last = last
        self._tensors = [
            t for t in last if allocates(t.node) and not forwards_input_buffer(t.node) and t.node in analysis.data
        ]
        self._positions = np.array([analysis.position[t.node] for t in self._tensors])
        self._last_positions = np.array([last[t] for t in self._tensors])
        self._sizes = np.array([t.num_bytes(batch) for t in self._tensors], dtype=np.int64)

    def bytes_across(self, segment: Segment) -> int:
        """Return the bytes of tensors from before a segment that ops after it read, without those of its entries."""
        first, last = (self._analysis.position[segment.forward[i]] for i in (0, -1))
        index = np.flatnonzero((self._positions < first) & (self._last_positions > last))
        ends = {*segment.entries, *segment.forward}
        return sum(int(self._sizes[i]) for i in index if not {self._tensors[i], self._tensors[i].node} & ends)

    def entries(self, segment: Segment) -> list[Tensor]:
        """Return the entries that take memory, without arguments, which are alive anyway."""
        return [t for t in segment.entries if allocates(t.node)]

    def entries_read_later(self, segment: Segment) -> list[Tensor]:
        """Return the entries that ops after the segment read as well."""
        end = self._analysis.position[segment.forward[-1]]
        return [t for t in self.entries(segment) if self._last.get(t, -1) > end]


class InferenceTilings:
    """Blocks of a step without gradients in any number of tiles.

    Args:
        estimates: Estimates of loops.
        segment: The blocks.
        halo: Source of halo rows.
        untiled: The blocks as they are.
        whole_bytes: Bytes alive while a loop runs, without its iterations.
    """

    def __init__(
        self, estimates: LoopEstimates, segment: Segment, halo: Halo, *, untiled: BlockChoice, whole_bytes: int
    ) -> None:
        analysis, batch, costs = estimates.traced.analysis, estimates.traced.batch, estimates.traced.costs
        self._estimates = estimates
        self._segment = segment
        self._halo = halo
        self._untiled = untiled
        self._whole_bytes = whole_bytes
        self._least = costs.lower_bound.step(segment.forward)
        self._grids = thinned(auto_grids(analysis, segment, batch, halo is Halo.CARRY), GRID_GROWTH)
        self._planner = planner_for(analysis, segment, halo)

    @functools.cached_property
    def _signature(self) -> Hashable:
        return segment_signature(self._estimates.traced.analysis, self._segment)

    def least_seconds(self, budget: int) -> float:
        """Return a lower bound of the time in tiles; infinity if untiled blocks are as fast, or no tiles fit."""
        is_untiled_best = self._untiled.fits(budget) and self._least >= self._untiled.seconds
        return math.inf if is_untiled_best or self._whole_bytes > budget else self._least

    def fitting(self, budget: int) -> Iterator[BlockChoice]:
        """Yield the fewest tiles that fit, or more tiles where those are faster."""
        grid = fastest_fitting(self._grids, budget - self._whole_bytes, self._estimate)
        if grid is not None:
            estimate = self._estimate(grid)
            working_bytes = self._whole_bytes + estimate.num_bytes
            yield dataclasses.replace(
                self._untiled, grid=grid, halo=self._halo, working_bytes=working_bytes, seconds=estimate.seconds
            )

    def _estimate(self, grid: Grid) -> LoopEstimate:
        def plan() -> TileLoop:
            (loop,) = self._planner.tile_loops(grid, grid)
            return loop

        return self._estimates.of((self._signature, self._halo, grid), plan)


@dataclasses.dataclass(frozen=True)
class BlockOptions:
    """All ways to run the blocks from one bound to another.

    Attributes:
        untiled: The blocks as they are.
        tilings: The blocks in tiles; the first has the lower bound of all. Empty if they are no segment.
    """

    untiled: BlockChoice
    tilings: Sequence[InferenceTilings]


class InferenceBlocks:
    """A component of a step without gradients as a chain of blocks.

    Attributes:
        component: The component.
        bounds: Positions where segments may begin and end, from 0 to the number of ops.
    """

    def __init__(self, estimates: LoopEstimates, component: TileableComponent, live: LiveTensors) -> None:
        self.component = component
        self.bounds = _bounds(estimates.traced, component)
        self._traced = estimates.traced
        self._estimates = estimates
        self._live = live
        self._options: dict[tuple[int, int], BlockOptions | None] = {}
        self._least: dict[int, float] = {}

    def options(self, first: int, last: int) -> BlockOptions | None:
        """Return the ways to run the blocks between two bounds; `None` if they cannot be separated from others."""
        if (first, last) not in self._options:
            self._options[first, last] = self._options_between(first, last)
        return self._options[first, last]

    def least_seconds(self, first: int) -> float:
        """Return a lower bound of the time of all blocks from a bound on, tiled or not."""
        if first not in self._least:
            self._least[first] = self._traced.costs.lower_bound.step(self.component.nodes[first:])
        return self._least[first]

    def _options_between(self, first: int, last: int) -> BlockOptions | None:
        traced, batch = self._traced, self._traced.batch
        try:
            segment = try_segment(traced.analysis, self.component, range(first, last), set(), "candidate")
        except NotTileableError:
            return None
        entries, bytes_across = self._live.entries(segment), self._live.bytes_across(segment)
        order = [*dict.fromkeys(t.node for t in entries), *segment.forward]
        scratch = {node: (op_scratch(node, batch, traced.device),) for node in segment.forward}
        peak = most_alive(order, batch, [*segment.exits, *self._live.entries_read_later(segment)], scratch)
        seconds = traced.costs.step(segment.forward)
        untiled = BlockChoice(first=first, last=last, working_bytes=bytes_across + peak, seconds=seconds)
        sliced = [t for t in entries if loop_operand(t) == t]
        tilings = []
        for halo in Halo:
            is_last = last == len(self.component.nodes) and halo is Halo.RECOMPUTE
            blocks = with_final_sums(traced.analysis, segment) if is_last else segment
            whole_bytes = bytes_across + sum(t.num_bytes(batch) for t in (*sliced, *blocks.exits))
            tilings.append(InferenceTilings(self._estimates, blocks, halo, untiled=untiled, whole_bytes=whole_bytes))
        return BlockOptions(untiled, tilings)


def _bounds(traced: TracedStep, component: TileableComponent) -> list[int]:
    """Return the ends of a component, and up to `MAX_CUTS` places between its ops.

    A stretch of the network, of which the smallest cut is taken, takes about as long as each other.
    """
    nodes = component.nodes
    num_bytes = _bytes_between(traced, component)
    cuts = [p for p in range(len(nodes) - 1) if not _is_overwritten(traced, component, p)]
    extremes = [list(group)[-1] for _, group in itertools.groupby(cuts, key=num_bytes.__getitem__)]
    seconds = np.cumsum([traced.costs.op(node) for node in nodes])

    def stretch(cut: int) -> int:
        return int(seconds[cut] * MAX_CUTS / (seconds[-1] * 1.001))

    selected = select_cuts(extremes, reversed(cuts), stretch, num_bytes, MAX_CUTS)
    return [0, *(cut + 1 for cut in selected), len(nodes)]


def _bytes_between(traced: TracedStep, component: TileableComponent) -> dict[int, int]:
    """Return for each position the bytes of the results of ops up to it that later ops of the component read."""
    analysis, batch = traced.analysis, traced.batch
    position = {node: number for number, node in enumerate(component.nodes)}
    change = [0] * (len(position) + 1)
    for node, number in position.items():
        for tensor in (node.out(index) for index in range(len(node.outputs))):
            last = max((position.get(r, -1) for r, _ in analysis.consumers.get(tensor, ())), default=-1)
            if last > number:
                change[number] += tensor.num_bytes(batch)
                change[last] -= tensor.num_bytes(batch)
    return dict(enumerate(itertools.accumulate(change[:-1])))


def _is_overwritten(traced: TracedStep, component: TileableComponent, position: int) -> bool:
    """Return whether the only consumer of an op may run in place, such as an activation after a bias."""
    node = component.nodes[position]
    consumers = {consumer for consumer, _ in traced.analysis.consumers.get(node.out(), ())}
    return len(consumers) == 1 and all(map(may_run_in_place, consumers))
