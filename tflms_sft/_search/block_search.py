"""Best-first search for the fastest way to run the blocks of a component within a budget.

A component of a network is a chain of blocks between bounds. The blocks between any two bounds run untiled, or form a
segment in tiles. Along the chain the bytes saved for the backward pass add up; inference saves none.

Estimates along a chain differ from the memory of the whole step, so a search tries several *targets*: peaks that the
estimates must meet. Targets are the rungs of one geometric ladder that all budgets share. A larger budget thus finds no
slower plan.
"""

from __future__ import annotations

import abc
import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from rewriters.ir.graph import Node, Tensor
from rewriters.tiling.ft_segments import TileableComponent
from rewriters.tiling.tile_planner import Grid, Halo
from tflms_sft._search.traced_step import TracedStep

RUNG_RATIO = 1.03
"""A target over the next lower one."""


def rung(num_bytes: int) -> int:
    """Return the rung of the highest target of at most `num_bytes`."""
    return int(math.log(max(num_bytes, 1), RUNG_RATIO))


def target_bytes(rung: int) -> int:
    """Return the bytes of the target on a rung."""
    return int(RUNG_RATIO**rung)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockChoice:
    """One way to run the blocks from one bound to another.

    Attributes:
        first: First position in the component.
        last: One past the last position.
        grid: Tiles of the only loop, or of the backward loop; `None` leaves the blocks untiled.
        forward_grid: Tiles of the forward loop, if they differ.
        halo: How tiles get the rows that they share.
        one_loop: Whether one loop runs the forward and the backward ops.
        checkpoints: Inner tensors that are saved, too, instead of being recomputed.
        saved_bytes: Bytes that stay for the backward pass.
        working_bytes: Bytes needed on top while the blocks run.
        seconds: Time (`rewriters/estimates/op_cost.py`).
    """

    first: int
    last: int
    grid: Grid | None = None
    forward_grid: Grid | None = None
    halo: Halo = Halo.RECOMPUTE
    one_loop: bool = False
    checkpoints: frozenset[Tensor] = frozenset()
    saved_bytes: int = 0
    working_bytes: int
    seconds: float

    def fits(self, budget: int) -> bool:
        """Return whether saved and working bytes are within a budget."""
        return self.saved_bytes + self.working_bytes <= budget


class Tilings(Protocol):
    """Ways to run consecutive blocks in tiles."""

    def least_seconds(self, budget: int) -> float:
        """Return a lower bound of the time of all tilings that fit; infinity if none does."""

    def fitting(self, budget: int) -> Iterable[BlockChoice]:
        """Yield tilings that fit."""


@dataclasses.dataclass(frozen=True)
class BlockOptions:
    """All ways to run the blocks from one bound to another.

    Attributes:
        untiled: The blocks as they are.
        tilings: The blocks in tiles; the first has the lower bound of all. Empty if they are no segment.
    """

    untiled: BlockChoice
    tilings: Sequence[Tilings]


@dataclasses.dataclass(frozen=True)
class BlockPath:
    """Choices from the start of a component up to a bound."""

    saved_bytes: int = 0
    seconds: float = 0.0
    choices: tuple[BlockChoice, ...] = ()

    @property
    def end(self) -> int:
        """Position in the component that the path has reached."""
        return self.choices[-1].last if self.choices else 0

    def followed_by(self, choice: BlockChoice) -> BlockPath:
        """Return the path extended by a choice."""
        saved_bytes, seconds = self.saved_bytes + choice.saved_bytes, self.seconds + choice.seconds
        return BlockPath(saved_bytes, seconds, (*self.choices, choice))


class ComponentBlocks(abc.ABC):
    """A component as a chain of blocks.

    Args:
        traced: The step.
        component: The component.
        bounds: Positions where segments may begin and end, from 0 to the number of ops.
    """

    def __init__(self, traced: TracedStep, component: TileableComponent, bounds: list[int]) -> None:
        self.component = component
        self.bounds = bounds
        self._traced = traced
        self._options: dict[tuple[int, int], BlockOptions | None] = {}
        self._least: dict[int, float] = {}

    def options(self, first: int, last: int) -> BlockOptions | None:
        """Return the ways to run the blocks between two bounds; `None` if they cannot be separated from others."""
        if (first, last) not in self._options:
            self._options[first, last] = self._options_between(first, last)
        return self._options[first, last]

    @abc.abstractmethod
    def _options_between(self, first: int, last: int) -> BlockOptions | None: ...

    def least_seconds(self, first: int) -> float:
        """Return a lower bound of the time of all blocks from a bound on, tiled or not."""
        if first not in self._least:
            self._least[first] = self._traced.costs.lower_bound.step(self.ops(first, self.bounds[-1]))
        return self._least[first]

    def ops(self, first: int, last: int) -> list[Node]:
        """Return the ops of blocks, backward ones included."""
        return list(self.component.nodes[first:last])


def fastest_path(blocks: ComponentBlocks, budget: int) -> BlockPath | None:
    """Return the fastest path through a component of which every choice fits.

    A* (P. E. Hart, N. J. Nilsson and B. Raphael, "A Formal Basis for the Heuristic Determination of Minimum Cost
    Paths", 1968) over states of a bound and the bytes saved so far. Tilings are expensive to estimate, so the queue
    holds a stretch with the lower bound of its tilings, and only the stretches that get to its head are expanded.
    The bound ignores that tiles may skip rows that no result needs, as convolutions with strides and without padding
    leave behind: of two paths that differ by no more than those rows the slower may be returned.
    """
    order = itertools.count()
    queue: list[tuple[float, int, BlockPath, int | None]] = [(0.0, next(order), BlockPath(), None)]
    least_saved: dict[int, int] = {}

    def push(path: BlockPath, seconds: float, end: int, tiled_end: int | None = None) -> None:
        heapq.heappush(queue, (seconds + blocks.least_seconds(end), next(order), path, tiled_end))

    while queue:
        _, _, path, tiled_end = heapq.heappop(queue)
        available = budget - path.saved_bytes
        if tiled_end is not None:
            options = blocks.options(path.end, tiled_end)
            for tilings in options.tilings if options is not None else ():
                for longer in map(path.followed_by, tilings.fitting(available)):
                    push(longer, longer.seconds, longer.end)
        elif path.end == blocks.bounds[-1]:
            return path
        elif path.saved_bytes < least_saved.get(path.end, path.saved_bytes + 1):
            least_saved[path.end] = path.saved_bytes
            for last in blocks.bounds[blocks.bounds.index(path.end) + 1 :]:
                options = blocks.options(path.end, last)
                if options is None:
                    continue
                if options.untiled.fits(available):
                    longer = path.followed_by(options.untiled)
                    push(longer, longer.seconds, last)
                least = options.tilings[0].least_seconds(available) if options.tilings else math.inf
                if least < math.inf:
                    push(path, path.seconds + least, last, last)
    return None


def select_cuts(
    extremes: Sequence[int],
    cuts: Iterable[int],
    stretch: Callable[[int], int],
    num_bytes: Mapping[int, int],
    count: int,
) -> list[int]:
    """Return up to `count` cuts of a component, in order.

    Local minima of the bytes at a cut come first, such as pools; then the smallest cut of each stretch.

    Args:
        extremes: Cuts among which neighbours are compared for local minima.
        cuts: All cuts; of equal ones in a stretch the first is taken.
        stretch: Maps a cut to the number of its stretch.
        num_bytes: Bytes at each cut.
        count: Maximum number of cuts.
    """
    around = [math.inf, *(num_bytes[cut] for cut in extremes), math.inf]
    minima = [cut for i, cut in enumerate(extremes) if around[i] >= num_bytes[cut] <= around[i + 2]]
    smallest: dict[int, int] = {}
    for cut in cuts:
        number = stretch(cut)
        smallest[number] = min(smallest.get(number, cut), cut, key=num_bytes.__getitem__)
    ranked = [cut for group in (minima, smallest.values()) for cut in sorted(group, key=num_bytes.__getitem__)]
    return sorted(list(dict.fromkeys(ranked))[:count])
