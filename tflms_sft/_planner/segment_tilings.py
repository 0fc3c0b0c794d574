"""The numbers of tiles that a stretch of a network may run in: what each needs, and how long it takes.

Planning loops is what a search spends its time on, so few are planned: of the numbers of tiles that may be chosen only
some (the rest is interpolated), and of stretches that are alike, as the blocks of a deep network are, only one. What
is chosen in the end is planned itself, and modelled with the whole step.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence

from rewriters.emission.loop_signature import segment_signature
from rewriters.emission.tile_pass import planner_for
from rewriters.estimates.op_cost import CostModel
from rewriters.ir.graph import Node, Tensor
from rewriters.tiling.segment import Segment
from rewriters.tiling.tile_planner import Grid, Halo, TileLoop
from tflms_sft._planner.tile_grids import auto_grids, fastest, thinned
from tflms_sft._planner.traced_step import TracedStep

MORE = 1.4
"""Tiles of a grid that is tried, over those of the one before."""

PLANNED = 3
"""Of so many grids one is planned, where planning takes its time."""

RISEN = 1.1
"""What tiles and the borders that they save need, over the least in fewer tiles, from which on more tiles need more."""

FEW_OPERATIONS = 40
"""Operations of a segment of which every grid is planned."""

FORWARD = (4, 2, 1)
"""Backward tiles along each axis over forward ones that are tried: a forward turn keeps less."""

MOST_STORED = 8
"""Inner tensors of a segment that may be stored."""

LEAST_SAVED = 0.005
"""Part of a step's time below which a tensor is not worth storing."""


@dataclasses.dataclass(frozen=True)
class Storable:
    """An inner tensor of a segment that is worth storing.

    Attributes:
        tensor: The tensor.
        spared: Operations that are not to be run again once it is stored, too, after those that come before it.
    """

    tensor: Tensor
    spared: frozenset[Node]


@dataclasses.dataclass(frozen=True)
class BlockChoice:
    """What to do with the blocks from one cut to another.

    Attributes:
        first: First position in the component.
        last: One past the last position.
        grid: Tiles, or `None` to leave the blocks as they are.
        forward: Tiles of the forward loop, if they are others.
        waits: Bytes that it leaves waiting for the backward pass.
        needs: Bytes that it needs on top while it runs.
        cost: Seconds (`rewriters/estimates/op_cost.py`).
        halo: Where tiles have the rows from that they share.
        stored: Inner tensors that wait, too, instead of being recomputed.
    """

    first: int
    last: int
    grid: Grid | None
    waits: int
    needs: int
    cost: float
    halo: Halo = Halo.RECOMPUTE
    stored: frozenset[Tensor] = frozenset()
    forward: Grid | None = None


@dataclasses.dataclass(frozen=True)
class TilingEstimate:
    """What a segment takes in some number of tiles, nothing stored.

    Attributes:
        scratch: Bytes of a turn of its backward loop.
        saved: Bytes of rows that one loop saves for the other.
        seconds: Of both loops.
        part: Backward tiles along each axis over forward ones.
        savings: Seconds that storing each of the storable tensors saves, after those before it.
        least: Seconds that both loops do not fall below in that number of tiles, nor in more, with none of these
            tensors stored, with one, and so on.
    """

    scratch: float
    saved: float
    seconds: float
    part: int
    savings: tuple[float, ...]
    least: tuple[float, ...]

    def towards(self, other: TilingEstimate, tiles: float, own: int, others: int) -> TilingEstimate:
        """In a number of tiles between its `own` and those of the `other`.

        A turn takes about a part of the whole. Time and borders grow with the number of turns.
        """
        share = (tiles - own) / (others - own)
        logarithmic = math.log(tiles / own) / math.log(others / own)

        def between(first: float, second: float) -> float:
            return first + share * (second - first)

        return TilingEstimate(
            self.scratch ** (1 - logarithmic) * other.scratch**logarithmic,
            between(self.saved, other.saved),
            between(self.seconds, other.seconds),
            min(self.part, other.part),
            tuple(map(between, self.savings, other.savings)),
            tuple(map(between, self.least, other.least)),
        )


class EstimateCache:
    """What is known of stretches; those that differ in their names alone are one."""

    def __init__(self) -> None:
        self._samples: dict[Hashable, dict[Grid, TilingEstimate]] = {}
        self._storable: dict[Hashable, list[tuple[int, int, list[int]]]] = {}

    def samples(self, key: Hashable) -> dict[Grid, TilingEstimate]:
        """Of a stretch and its halo, by numbers of tiles."""
        return self._samples.setdefault(key, {})

    def storable(self, traced: TracedStep, key: Hashable, segment: Segment) -> list[Storable]:
        """What is worth storing of a segment."""
        nodes = [*segment.forward, *segment.backward]
        if key not in self._storable:
            number = {node: position for position, node in enumerate(nodes)}
            self._storable[key] = [
                (number[one.tensor.node], one.tensor.index, sorted(number[node] for node in one.spared))
                for one in _worth_storing(traced, segment)
            ]
        return [
            Storable(nodes[position].out(index), frozenset(nodes[other] for other in spared))
            for position, index, spared in self._storable[key]
        ]


def tilings(
    traced: TracedStep, segment: Segment, blocks: tuple[int, int], known: EstimateCache
) -> list[SegmentTilings]:
    """A segment in tiles, for each of the ways to have the rows that tiles share."""
    key = segment_signature(traced.analysis, segment)
    stored = known.storable(traced, key, segment)
    return [SegmentTilings(traced, segment, blocks, halo, stored, known.samples((key, halo))) for halo in Halo]


class SegmentTilings:
    """A segment in any number of tiles, with any of its inner tensors stored.

    Only the numbers of tiles that are asked for are looked at: more tiles need less, and cost more.

    Args:
        traced: The step.
        segment: The segment.
        blocks: First position in its component, and one past the last.
        halo: Where tiles have the rows from that they share.
        stored: What may be stored, in this order.
        samples: What is known of such segments; it is added to.
    """

    def __init__(
        self,
        traced: TracedStep,
        segment: Segment,
        blocks: tuple[int, int],
        halo: Halo,
        stored: Sequence[Storable],
        samples: dict[Grid, TilingEstimate],
    ) -> None:
        self._traced = traced
        self._segment = segment
        self._blocks = blocks
        self._halo = halo
        self._planner = planner_for(traced.analysis, segment, halo)
        self._grids = thinned(auto_grids(traced.analysis, segment, traced.batch, halo is Halo.CARRY), MORE)
        self._exits = sum(tensor.num_bytes(traced.batch) for tensor in segment.exits)
        grads = (*segment.grad_entries, *segment.grad_exits, *segment.reductions)
        self._gradients = sum(tensor.num_bytes(traced.batch) for tensor in grads)
        self._choices: dict[Grid, BlockChoice] = {}
        self._samples = samples
        self._stored = stored
        self._every = 1 if len(segment.forward) + len(segment.backward) <= FEW_OPERATIONS else PLANNED

    def fitting(self, budget: int) -> Iterator[BlockChoice]:
        """The fewest tiles that fit; and the fewest with the tensors stored that save most for their size.

        More tiles where those are faster.
        """
        sizes = [storable.tensor.num_bytes(self._traced.batch) for storable in self._stored]
        for number, taken in enumerate(itertools.accumulate(sizes, initial=0)):
            grid = self._fewest(budget - taken)
            if grid is None:
                return
            grid = fastest(self._grids, grid, functools.partial(self._seconds, number))
            yield self._storing(self._choice(grid), number)

    def _seconds(self, number: int, grid: Grid) -> tuple[float, float]:
        """In some number of tiles, and at least in these and more, with the first so many tensors stored."""
        return self._storing(self._choice(grid), number).cost, self._sample(grid).least[number]

    def least_cost(self, budget: int) -> float:
        """What any number of tiles costs at least, with as much stored as fits."""
        choice, batch = self._choice(self._grids[0]), self._traced.batch
        sizes = itertools.accumulate(storable.tensor.num_bytes(batch) for storable in self._stored)
        fitting = sum(size <= budget - choice.waits for size in sizes)
        return self._planned(self._grids[0]).least[fitting]

    def _storing(self, choice: BlockChoice, number: int) -> BlockChoice:
        """A choice with the first so many tensors stored."""
        assert choice.grid is not None
        stored = self._stored[:number]
        return dataclasses.replace(
            choice,
            waits=choice.waits + sum(storable.tensor.num_bytes(self._traced.batch) for storable in stored),
            cost=choice.cost - sum(self._sample(choice.grid).savings[:number]),
            stored=frozenset(storable.tensor for storable in stored),
        )

    def _fewest(self, budget: int) -> Grid | None:
        """The fewest tiles that fit; from few to many, as planning many takes its time.

        More tiles need less, but more rows save more borders: what both come to falls first and rises then.
        """
        lowest = math.inf
        for grid in self._grids:
            choice = self._choice(grid)
            if choice.waits + choice.needs <= budget:
                return grid
            split = choice.waits + choice.needs - self._exits - self._gradients  # The rest is there in any case.
            if choice.waits > budget or split > RISEN * lowest:
                return None
            lowest = min(lowest, split)
        return None

    def _choice(self, grid: Grid) -> BlockChoice:
        if grid not in self._choices:
            sample = self._sample(grid)
            waits, needs = self._exits + math.ceil(sample.saved), math.ceil(sample.scratch) + self._gradients
            forward = _coarser(grid, sample.part)
            self._choices[grid] = BlockChoice(
                *self._blocks, grid, waits, needs, sample.seconds, self._halo, forward=forward
            )
        return self._choices[grid]

    def _sample(self, grid: Grid) -> TilingEstimate:
        """Planned, or between two that are."""
        index = self._grids.index(grid)
        before = index - index % self._every
        after = min(before + self._every, len(self._grids) - 1)
        if index in (before, after):
            return self._planned(grid)
        first, last = self._grids[before], self._grids[after]
        return self._planned(first).towards(self._planned(last), grid.num_tiles, first.num_tiles, last.num_tiles)

    def _planned(self, grid: Grid) -> TilingEstimate:
        if grid not in self._samples:
            batch, costs = self._traced.batch, self._traced.costs
            part, tile_loops = self._loops(grid)  # Not kept: they are large, and a search plans hundreds.
            saved = sum(save.saved.num_bytes(batch) for tile_loop in tile_loops for save in tile_loop.saves)
            savings = [self._saving(costs, tile_loops[-1], storable) for storable in self._stored]
            less = [self._saving(costs.lower_bound, tile_loops[-1], storable) for storable in self._stored]
            seconds, least = (sum(map(own.tile_loop, tile_loops)) for own in (costs, costs.lower_bound))
            without = itertools.accumulate(less, operator.sub, initial=least)
            scratch = self._traced.loop_memory.peak_bytes(tile_loops[-1], batch)
            self._samples[grid] = TilingEstimate(scratch, saved, seconds, part, tuple(savings), tuple(without))
        return self._samples[grid]

    def _saving(self, costs: CostModel, backward: TileLoop, storable: Storable) -> float:
        """Seconds that a loop does not take once a tensor is stored, too, after those that come before it."""
        return sum(costs.op_in_loop(backward, node) for node in storable.spared.intersection(backward.body))

    def _loops(self, grid: Grid) -> tuple[int, list[TileLoop]]:
        """Loops with as few forward tiles, of some numbers, as need no more memory than the backward ones.

        Each tile has halos and reads the weights once more.
        """
        batch = self._traced.batch
        for part in FORWARD:
            forward = _coarser(grid, part)
            tile_loops = self._planner.tile_loops(forward, grid)
            if forward == grid or len(tile_loops) == 1:
                break
            if self._traced.loop_memory.peak_bytes(tile_loops[0], batch) <= self._traced.loop_memory.peak_bytes(
                tile_loops[-1], batch
            ):
                break
        return part, tile_loops


def _coarser(grid: Grid, part: int) -> Grid:
    """A grid with so many times fewer tiles along each axis."""
    return Grid(grid.batch, tuple(-(-count // part) for count in grid.spatial))


def _worth_storing(traced: TracedStep, segment: Segment) -> list[Storable]:
    """Inner tensors to store, one after the other: those first that save most work for their size, in one tile."""
    analysis, batch = traced.analysis, traced.batch
    grid = auto_grids(analysis, segment, batch)[0]
    backward = planner_for(analysis, segment, Halo.RECOMPUTE).tile_loops(grid, grid)[-1]
    cost = {n: traced.costs.op_in_loop(backward, n) for n in backward.body if n not in analysis.backward}
    wanted = [t for n in backward.body if n in analysis.backward for t in n.inputs if t.node in cost]
    available, left = set(segment.available), _recomputed(wanted, segment.available, cost)
    found: list[Storable] = []
    while len(found) < MOST_STORED:
        options, before = [], _cost_of(left, cost)
        for tensor in (node.out(index) for node in left for index in range(len(node.outputs))):
            if analysis.entries_per_image(tensor) != 1:
                continue  # Where pixels have been made images, the images of a turn do not lie together.
            rest = _recomputed(wanted, available | {tensor}, cost)
            saved = before - _cost_of(rest, cost)
            if saved > LEAST_SAVED * traced.seconds:
                options.append((saved / tensor.num_bytes(batch), tensor.name, saved, tensor))
        if not options:
            break
        _, _, _, tensor = max(options)
        available.add(tensor)
        rest = _recomputed(wanted, available, cost)
        found.append(Storable(tensor, frozenset(left - rest)))
        left = rest
    return found


def _cost_of(nodes: Iterable[Node], cost: Mapping[Node, float]) -> float:
    """Work of those that have a cost."""
    return sum(cost.get(node, 0.0) for node in nodes)


def _recomputed(wanted: Iterable[Tensor], available: Container[Tensor], within: Container[Node]) -> set[Node]:
    """Operations of some that have to run for the wanted tensors."""
    found: set[Node] = set()
    stack = list(wanted)
    while stack:
        tensor = stack.pop()
        if tensor not in available and tensor.node in within and tensor.node not in found:
            found.add(tensor.node)
            stack.extend(tensor.node.inputs)
    return found
