"""Stretches of a step without barriers: untiled intervals, and segments in tiles.

The bytes of a stretch are sums of estimates. A tensor that a segment writes stays until the backward pass of the
segment that reads it, in memory or in a file; without gradients, until the last op that reads it. The bytes of untiled
intervals are those of the original step.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

import numpy as np

from rewriters.analysis.autodiff_roles import reads_shape_only
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.device.allocator import ExactAllocator
from rewriters.device.op_buffers import allocates, forwards_input_buffer
from rewriters.device.peak_memory import replay
from rewriters.emission.loop_tensors import loop_operand
from rewriters.emission.tile_pass import SegmentPlan
from rewriters.ir.graph import Node, Tensor
from rewriters.tiling.segment import Segment
from tflms_sft._search.block_chain import BlockChain, SegmentTiling
from tflms_sft._search.block_choices import BlockChoice
from tflms_sft._search.moments import StepMoments
from tflms_sft._search.segment_plans import segment_plans
from tflms_sft._search.stretch_graph import Option, Path, Stretch
from tflms_sft._search.traced_step import TracedStep, original_allocations

MAX_SECONDS_GROWTH = 16.0
"""Time of a segment, over its time in the fewest tiles, from which on no more tiles are tried."""

MAX_BYTES_GROWTH = 1.1
"""Bytes of an iteration and of saved rows, over the fewest with fewer tiles, from which on they count as grown."""

MAX_GROWN = 2
"""Grids in a row with grown bytes, after which no more tiles are tried. Unequal strips may need more than equal."""

MIN_BYTES_SAVED = 0.03
"""Fraction of the fewest bytes that more and slower tiles have to save."""


@dataclasses.dataclass(frozen=True)
class StretchChoice:
    """A way to run a stretch.

    Attributes:
        component: Number of the component.
        blocks: The blocks, tiled or not.
        rows_in_files: Whether the rows that its loops save for each other lie in files.
    """

    component: int
    blocks: BlockChoice
    rows_in_files: bool = False


class ChainStretches:
    """All stretches of a step without barriers.

    Attributes:
        moments: Moments of the step.
        stretches: Stretches with their ways and homes.
        outside_seconds: Time of the ops that belong to no stretch.
    """

    def __init__(self, traced: TracedStep, chains: Sequence[BlockChain]) -> None:
        self._traced = traced
        self._chains = chains
        self._begins = [0]
        for chain in chains:
            self._begins.append(self._begins[-1] + len(chain.bounds) - 1)
        has_backward = bool(traced.analysis.backward)
        self.moments = StepMoments(self._begins[-1], dict(self._moments_of_ops()), has_backward)
        self._last_reads = {} if has_backward else _last_reads(traced.analysis, self.moments)
        untiled = list(self._untiled())
        self.stretches = [*untiled, *self._tiled()]
        self.outside_seconds = traced.seconds - sum(stretch.ways[0].seconds for stretch in untiled)

    def in_memory(self) -> ChainStretches:
        """Return the same stretches without files."""
        stretches = copy.copy(self)
        stretches._traced = dataclasses.replace(self._traced, files=None)
        stretches.stretches = [
            dataclasses.replace(
                stretch,
                ways=[way for way in stretch.ways if not cast(StretchChoice, way.choice).rows_in_files],
                homes=[places[:1] for places in stretch.homes],
            )
            for stretch in self.stretches
        ]
        return stretches

    def _intervals(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield the number, the component and the bounds of each interval."""
        for component, chain in enumerate(self._chains):
            for number, (first, last) in enumerate(itertools.pairwise(chain.bounds)):
                yield self._begins[component] + number, component, first, last

    def _moments_of_ops(self) -> Iterator[tuple[str, int]]:
        for number, component, first, last in self._intervals():
            chain = self._chains[component]
            yield from ((node.name, number) for node in chain.component.nodes[first:last])
            backward, is_image = 2 * self._begins[-1] - 1 - number, self._traced.analysis.is_image
            yield from ((n.name, backward) for n in chain.backward(first, last) if any(map(is_image, n.inputs)))

    def _untiled(self) -> Iterator[Stretch]:
        """Yield the intervals as they are; the bytes beside saved tensors are those of the original step."""
        choices = [
            StretchChoice(component, self._chains[component].untiled(first, last))
            for _, component, first, last in self._intervals()
        ]
        saved = [list(self._saved(number, choice)) for number, choice in enumerate(choices)]
        trace, pool = original_allocations(self._traced), ExactAllocator()
        pool.map(self._traced.held_bytes)
        peaks = self.moments.peaks(replay(trace.events, pool).timeline, {})
        others = np.nan_to_num(peaks - self._traced.held_bytes) - self.moments.usage(*itertools.chain(*saved))
        for number, choice in enumerate(choices):
            usage = self.moments.usage(*saved[number])
            for moments in (self.moments.forward(number, number + 1), self.moments.backward(number, number + 1)):
                usage[moments] += np.maximum(others[moments], 0.0)
            yield Stretch(number, number + 1, [Option(choice.blocks.seconds, usage, choice)])

    def _saved(self, number: int, choice: StretchChoice) -> Iterator[tuple[slice, float]]:
        """Yield the bytes of the results of an untiled interval, with the moments at which they are in memory."""
        blocks, batch = choice.blocks, self._traced.batch
        yield self.moments.saved(number, number), blocks.saved_bytes
        yield self.moments.waiting_updates(number), self._update_bytes(choice)
        nodes = self._chains[choice.component].component.nodes[blocks.first : blocks.last]
        for tensor in (node.out(index) for node in nodes for index in range(len(node.outputs))):
            if (last := self._last_reads.get(tensor, number)) > number:
                yield slice(number, last + 1), tensor.num_bytes(batch)

    def _update_bytes(self, choice: StretchChoice) -> int:
        """Return the bytes of gradients of weights, sums over the image, that untiled blocks compute."""
        is_image, batch = self._traced.analysis.is_image, self._traced.batch
        nodes = self._chains[choice.component].backward(choice.blocks.first, choice.blocks.last)
        reducing = (node for node in nodes if node.outputs and any(map(is_image, node.inputs)))
        sums = (node.out() for node in reducing if not is_image(node.out()))
        return sum(tensor.num_bytes(batch) for tensor in sums)

    def _tiled(self) -> Iterator[Stretch]:
        for component, chain in enumerate(self._chains):
            for first in range(len(chain.bounds) - 1):
                for last in range(first + 1, len(chain.bounds)):
                    tilings = chain.tilings(chain.bounds[first], chain.bounds[last])
                    begin, end = self._begins[component] + first, self._begins[component] + last
                    for segment in dict.fromkeys(tiling.segment for tiling in tilings):
                        same = (tiling for tiling in tilings if tiling.segment is segment)
                        ways = [way for tiling in same for way in self._ways(component, tiling, begin, end)]
                        seconds = self._seconds_beside(segment, chain.ops(chain.bounds[first], chain.bounds[last]))
                        ways = [dataclasses.replace(way, seconds=way.seconds + seconds) for way in ways]
                        yield Stretch(begin, end, _undominated(ways), self._homes(segment, begin, end))

    def _seconds_beside(self, segment: Segment, ops: Sequence[Node]) -> float:
        """Return the time of an interval's ops outside of a segment, minus that of the segment's ops outside of it."""
        tiled, interval, costs = {*segment.forward, *segment.backward}, set(ops), self._traced.costs
        return costs.step(interval - tiled) - costs.step(tiled - interval)

    # Ways ----------------------------------------------------------------------------------------------------

    def _ways(self, component: int, tiling: SegmentTiling, begin: int, end: int) -> Iterator[Option]:
        """Yield a segment in more and more tiles, with none, one, ... of its candidates checkpointed."""
        lowest, fastest, coarsest, grown = math.inf, math.inf, None, 0
        for grid in tiling.grids:
            choice = tiling.choice(grid)
            num_bytes = choice.working_bytes + choice.saved_bytes
            coarsest = coarsest or choice.seconds
            grown = grown + 1 if num_bytes > MAX_BYTES_GROWTH * lowest else 0
            if grown > MAX_GROWN or choice.seconds > MAX_SECONDS_GROWTH * coarsest:
                return
            if num_bytes > (1 - MIN_BYTES_SAVED) * lowest and choice.seconds >= fastest:
                continue
            lowest, fastest = min(lowest, num_bytes), min(fastest, choice.seconds)
            for count in range(len(tiling.candidates) + 1):
                yield from self._with_checkpoints(component, tiling, tiling.with_checkpoints(choice, count), begin, end)

    def _with_checkpoints(
        self, component: int, tiling: SegmentTiling, choice: BlockChoice, begin: int, end: int
    ) -> Iterator[Option]:
        """Yield a way with the rows that its loops save in memory, and in files if they are allowed."""
        moments, batch = self.moments, self._traced.batch
        reductions = sum(tensor.num_bytes(batch) for tensor in tiling.segment.reductions)
        forward, backward = moments.forward(begin, end), moments.backward(begin, end)
        # With one loop the forward ops run in the backward loop.
        parts = [(backward, choice.working_bytes), *([] if choice.one_loop else [(forward, choice.working_bytes)])]
        parts += [(backward, reductions), (moments.waiting_updates(begin), reductions)]
        rows = tiling.row_bytes(choice)
        for in_files in (False, True) if self._in_file(rows) else (False,):
            saved = choice.saved_bytes - (rows if in_files else 0)
            usage = moments.usage(*parts, (moments.saved(begin, begin), saved))
            seconds = choice.seconds + (self._file_seconds(rows, reads=1) if in_files else 0.0)
            yield Option(seconds, usage, StretchChoice(component, choice, in_files))

    # Homes ---------------------------------------------------------------------------------------------------

    def _in_file(self, num_bytes: int) -> bool:
        """Return whether a tensor of this size may lie in a file."""
        return self._traced.files is not None and self._traced.files.takes(num_bytes)

    def _file_seconds(self, num_bytes: int, reads: int, writes: int = 1) -> float:
        """Return the time that a file takes for a tensor that loops write, and read some times."""
        return (writes + reads) * num_bytes / self._traced.rates.copied

    def _homes(self, segment: Segment, begin: int, end: int) -> list[list[Option]]:
        """Return the homes of the results of a segment, and of the gradients that it reads and computes."""
        moments, homes = self.moments, list[list[Option]]()
        if not moments.has_backward:
            alive = itertools.chain(self._entries(segment, begin, end), self._exits(segment, begin, end))
            return [[Option(0.0, moments.usage(*alive))]]
        read_backward = {tensor for node in segment.backward for tensor in node.inputs}
        for tensor in segment.exits:
            resident = moments.saved(begin, begin if tensor in read_backward else end)
            homes.append(self._places(tensor, resident, reads=2 + (tensor in read_backward), writes=1))
        backward = moments.backward(begin, end)
        # The loop that computes a gradient pays for the write, and the one that reads it for the read.
        homes += [
            self._places(tensor, backward, reads=1, writes=0) for tensor in map(loop_operand, segment.grad_entries)
        ]
        homes += [self._places(tensor, backward, reads=0, writes=1) for tensor in segment.grad_exits]
        return homes

    def _entries(self, segment: Segment, begin: int, end: int) -> Iterator[tuple[slice, float]]:
        """Yield the bytes that the entries of a segment without gradients take while it runs, where no other op does.

        An op before the segment pays until the last moment at which the original step reads an entry.
        """
        operands = (tensor for tensor in map(loop_operand, segment.entries) if allocates(tensor.node))
        for tensor in dict.fromkeys(operands):
            is_paid = tensor.node.name in self.moments.of_op
            first = max(self._last_reads.get(tensor, begin) + 1, begin) if is_paid else begin
            yield slice(first, max(first, end)), tensor.num_bytes(self._traced.batch)

    def _exits(self, segment: Segment, begin: int, end: int) -> Iterator[tuple[slice, float]]:
        """Yield the bytes of the results of a segment without gradients until the last op that reads each."""
        for tensor in segment.exits:
            last = max(self._last_reads.get(tensor, end - 1), end - 1)
            yield slice(begin, last + 1), tensor.num_bytes(self._traced.batch)

    def _places(self, tensor: Tensor, resident: slice, reads: int, writes: int) -> list[Option]:
        """Return a tensor in memory, and in a file if that is allowed."""
        num_bytes = tensor.num_bytes(self._traced.batch)
        places = [Option(0.0, self.moments.usage((resident, num_bytes)))]
        if self._in_file(num_bytes):
            places.append(Option(self._file_seconds(num_bytes, reads, writes), self.moments.usage(), tensor))
        return places

    # Plans ---------------------------------------------------------------------------------------------------

    def planned(self, path: Path) -> tuple[list[SegmentPlan | None], frozenset[Tensor]]:
        """Return the segments of the tiled stretches of a path, and the tensors that lie in files."""
        choices = [choice for choice in _choices(path) if choice.blocks.grid is not None]
        pairs = [(self._chains[choice.component].component, choice.blocks) for choice in choices]
        plans = segment_plans(self._traced, pairs)
        in_files = {home.choice for step in path.steps for home in step.options[1:] if isinstance(home.choice, Tensor)}
        for plan, choice in zip(plans, choices, strict=True):
            if plan is not None and choice.rows_in_files:
                in_files |= {save.saved for loop in plan.loops for save in loop.saves}
        return plans, frozenset(in_files)

    def moments_of_loops(
        self, path: Path, plans: Sequence[SegmentPlan | None], names: Mapping[tuple[str, str], str]
    ) -> dict[str, slice]:
        """Return the moments of the loops of a path's segments; `names` has the loops by segment and loop."""
        tiled = (step.stretch for step, choice in zip(path.steps, _choices(path), strict=True) if choice.blocks.grid)
        result = {}
        for plan, stretch in zip(plans, tiled, strict=True):
            if plan is not None:
                for loop in plan.loops:
                    moments = self.moments.backward if loop.backward else self.moments.forward
                    result[names[plan.segment.name, loop.name]] = moments(stretch.begin, stretch.end)
        return result


def _last_reads(analysis: GraphAnalysis, moments: StepMoments) -> dict[Tensor, int]:
    """Return for each tensor of a step without gradients the moment at which its memory is read last.

    An op that belongs to no interval counts at the moment of the op before it.
    """
    last = dict.fromkeys(analysis.graph.outputs, moments.count - 1)
    of_node, now = dict[Node, int](), 0
    for node in analysis.order:
        now = max(now, moments.of_op.get(node.name, now))
        of_node[node] = now
    for node in reversed(analysis.order):
        # A consumer of a forwarded buffer reads the original.
        until = last.get(node.out(), 0) if forwards_input_buffer(node) else 0
        for tensor in () if reads_shape_only(node) else node.inputs:
            last[tensor] = max(last.get(tensor, 0), until, of_node[node])
    return {tensor: moment for tensor, moment in last.items() if _is_allocated(tensor.node)}


def _is_allocated(node: Node) -> bool:
    """Return whether the result of an op has memory of its own."""
    return allocates(node) and not forwards_input_buffer(node)


def _choices(path: Path) -> list[StretchChoice]:
    """Return the ways of the stretches of a path."""
    return [cast(StretchChoice, step.options[0].choice) for step in path.steps]


def _undominated(ways: Iterable[Option]) -> list[Option]:
    """Return the ways that no other one beats in time and in the bytes of all moments."""
    faster_ways: list[Option] = []
    for way in sorted(ways, key=lambda way: way.seconds):
        if not any(np.all(other.usage <= way.usage) for other in faster_ways):
            faster_ways.append(way)
    return faster_ways
