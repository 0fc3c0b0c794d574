"""Blocks of a component: what they save for the backward pass, and the ways to tile them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from rewriters.analysis.autodiff_roles import reads_shape_only
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.device.op_buffers import may_run_in_place
from rewriters.errors import NotTileableError
from rewriters.ir.graph import Node, Tensor
from rewriters.rules.registry import TileKind, find_rule
from rewriters.tiling.ft_segments import TileableComponent, try_segment
from rewriters.tiling.segment import Segment
from rewriters.tiling.tile_planner import Grid
from tflms_sft._search.block_choices import BlockChoice, select_cuts
from tflms_sft._search.segment_tilings import EstimateCache, segment_tilings
from tflms_sft._search.traced_step import TracedStep


class SegmentTiling(Protocol):
    """Ways to run a segment in tiles.

    Attributes:
        segment: The segment.
        grids: Grids to try, each with more tiles than the one before.
    """

    segment: Segment
    grids: list[Grid]

    @property
    def candidates(self) -> Sequence[object]:
        """Inner tensors that may be checkpointed, the best first."""

    def choice(self, grid: Grid) -> BlockChoice:
        """Return the segment in a grid: the saved bytes are those of rows, and the working bytes of an iteration."""

    def with_checkpoints(self, choice: BlockChoice, count: int) -> BlockChoice:
        """Return a choice with the first `count` candidates checkpointed."""

    def row_bytes(self, choice: BlockChoice) -> int:
        """Return the bytes of the rows that one loop of a choice saves for the other."""


MAX_CUTS = 8
"""Most positions between the ends of a component where a segment may end, in a search for tiles as well."""

MAX_CUTS_WITHOUT_GRADIENTS, CUTS_OF_STEP = 6, 24
"""The same in a step without gradients, and such positions of all components, which share them by their time."""

MAX_OPS_ACROSS_CUTS = 80
"""Forward ops of a segment that goes past a cut. With more ops longer halos cost much, and one saved tensor less saves
little.
"""


class BlockChain:
    """A component as a chain of blocks.

    Args:
        traced: The step.
        component: The component.
        max_cuts: Places in the component where a segment may end; a longer network has them spread over the bytes that
            it saves, or over its time if it saves none.

    Attributes:
        component: The component.
        bounds: Positions where segments may begin and end, from 0 to the number of ops.
    """

    def __init__(self, traced: TracedStep, component: TileableComponent, max_cuts: int = MAX_CUTS) -> None:
        self.component = component
        if traced.analysis.backward:
            self.bounds = _bounds(traced, component, max_cuts)
        else:
            self.bounds = _bounds_without_gradients(traced, component)
        self._traced = traced
        self._estimates = EstimateCache()

    def ops(self, first: int, last: int) -> list[Node]:
        """Return the ops of blocks, backward ones included."""
        return [*self.component.nodes[first:last], *self.backward(first, last)]

    def untiled(self, first: int, last: int) -> BlockChoice:
        """Return blocks as they are, with the bytes that they save for the backward pass."""
        analysis, batch = self._traced.analysis, self._traced.batch
        nodes = self.component.nodes[first:last]
        return BlockChoice(
            first=first,
            last=last,
            saved_bytes=sum(tensor.num_bytes(batch) for node in nodes for tensor in _saved(analysis, node)),
            working_bytes=0,
            seconds=self._traced.costs.step(self.ops(first, last)),
        )

    @functools.cached_property
    def _positions(self) -> dict[Node, float]:
        nodes, analysis = self.component.nodes, self._traced.analysis
        position = {node: index for index, node in enumerate(nodes)}
        return backward_positions(analysis, position, analysis.position[nodes[0]])

    def backward(self, first: int, last: int) -> list[Node]:
        """Return the backward ops of blocks."""
        return [node for node, position in self._positions.items() if first <= position < last]

    def _is_too_long(self, first: int, last: int) -> bool:
        """Return whether blocks are too many for a segment that goes past a cut."""
        is_long = last - first > MAX_OPS_ACROSS_CUTS and bool(self._traced.analysis.backward)
        return is_long and self.bounds.index(last) > self.bounds.index(first) + 1

    def tilings(self, first: int, last: int) -> Sequence[SegmentTiling]:
        """Return the ways to tile the blocks; none if they are no segment, or too long a one."""
        if self._is_too_long(first, last):
            return []
        with contextlib.suppress(NotTileableError):
            segment = try_segment(self._traced.analysis, self.component, range(first, last), set(), "candidate")
            is_last = last == len(self.component.nodes)
            return segment_tilings(self._traced, segment, (first, last), self._estimates, is_last=is_last)
        return []


def _bounds(traced: TracedStep, component: TileableComponent, max_cuts: int) -> list[int]:
    """Return the ends of the component, and up to `max_cuts` of its cuts.

    A stretch of the network, of which the smallest cut is taken, saves about as much as each other.
    """
    analysis, batch = traced.analysis, traced.batch
    size = len(component.nodes)
    inner = [cut for cut in component.cuts if cut < size - 1]
    # A tensor that is not saved, such as a convolution before its bias, would be as the entry of a segment.
    inner = [cut for cut in inner if _saved(analysis, component.cut_tensor(analysis, cut).node)] or inner
    num_bytes = {cut: component.cut_tensor(analysis, cut).num_bytes(batch) for cut in inner}
    # Of neighbours of equal size the first and the last are mostly enough: the last leaves more to recompute, the
    # first fewer rows to carry. A network of blocks of one size needs the others.
    ends = [
        cut
        for i, cut in enumerate(inner)
        if 0 in (i, i + 1 - len(inner)) or not num_bytes[inner[i - 1]] == num_bytes[cut] == num_bytes[inner[i + 1]]
    ]
    saved = np.array([sum(t.num_bytes(batch) for t in _saved(analysis, node)) for node in component.nodes])
    saved_before = np.cumsum(saved) - saved
    # Stretches of equal blocks get the same number of blocks, so that the estimates of one serve all.
    block = max(int(np.median(np.diff(saved_before[inner]))), 1) if len(inner) > 1 else 1
    stretch_bytes = -(-int(saved_before[-1] + 1) // (max_cuts * block)) * block
    cuts = select_cuts(ends, (*ends, *inner), lambda cut: int(saved_before[cut] // stretch_bytes), num_bytes, max_cuts)
    return [0, *(cut + 1 for cut in cuts), size]


def _bounds_without_gradients(traced: TracedStep, component: TileableComponent) -> list[int]:
    """Return the ends of a component, and some places between its ops, across which any number of tensors is read.

    A stretch of the network, of which the smallest cut is taken, takes about as long as each other.
    """
    nodes = component.nodes
    share = traced.costs.step(nodes) / traced.seconds
    count = min(math.ceil(CUTS_OF_STEP * share), MAX_CUTS_WITHOUT_GRADIENTS)
    num_bytes = _bytes_between(traced, component)
    cuts = [p for p in range(len(nodes) - 1) if not _is_overwritten(traced, component, p)]
    extremes = [list(group)[-1] for _, group in itertools.groupby(cuts, key=num_bytes.__getitem__)]
    seconds = np.cumsum([traced.costs.op(node) for node in nodes])

    def stretch(cut: int) -> int:
        return int(seconds[cut] * count / (seconds[-1] * 1.001))

    selected = select_cuts(extremes, reversed(cuts), stretch, num_bytes, count)
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


def _saved(analysis: GraphAnalysis, node: Node) -> list[Tensor]:
    """Return the outputs of a forward op that the backward pass reads."""
    outputs = [node.out(index) for index in range(len(node.outputs))]
    return [t for t in outputs if any(r in analysis.backward for r, _ in analysis.consumers.get(t, ()))]


def backward_positions(
    analysis: GraphAnalysis, position: Mapping[Node, float], start: int | None = None
) -> dict[Node, float]:
    """Return for each backward op the position of its forward op.

    A gradient passes the positions whose results it reads, from infinity (behind all of them) down to -1 (before them).
    A reduction over the image, such as the gradient of a filter, reads the input of its forward op, which lies before
    that op; it gets the position of the gradient that it reads.

    Args:
        analysis: Analysis of the graph.
        position: Positions of forward ops.
        start: Position in the graph of the first of them. Other forward ops lie before or behind it; without it they do
            not count.
    """
    positions: dict[Node, float] = {}
    for node in analysis.order:
        if node not in analysis.backward or reads_shape_only(node):
            continue
        operands = [tensor.node for tensor in node.inputs]
        gradient_position = min((positions[n] for n in operands if n in positions), default=math.inf)
        forward = [n for n in operands if n in analysis.data and n not in analysis.backward]
        forward = [n for n in forward if start is not None or n in position]
        if not forward or _is_reduction(analysis, node):
            positions[node] = gradient_position
        else:
            others = (n for n in forward if n not in position)
            outside = {n: -1 if analysis.position[n] < (start or 0) else math.inf for n in others}
            positions[node] = min(gradient_position, max(outside.get(n, position.get(n, 0)) for n in forward))
    return positions


def _is_reduction(analysis: GraphAnalysis, node: Node) -> bool:
    """Return whether a backward op reduces over images, as the gradient of a filter does."""
    view = analysis.view(node)
    with contextlib.suppress(NotTileableError):
        data = find_rule(node).data(view)
        operands = [TileKind.PARTIAL if tensor.node in analysis.backward else TileKind.FULL for tensor in node.inputs]
        kinds = [kind if position in data else TileKind.INVARIANT for position, kind in enumerate(operands)]
        return find_rule(node).result_kind(view, kinds) is TileKind.REDUCED
    return False
