"""Frontiers: the rows that a strip carries to the next one instead of recomputing its halo (LR-CNN, 2PS).

For each tensor and each border between two strips, a frontier holds two rows. The strips above the border complete all
rows before the first. The strips below the border still need the rows from the second on. The rows between them are
carried across the border: downwards for a forward value, upwards for a gradient, which the strips add to.
`docs/explanation/strips.md` derives both from one rule.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence

import numpy as np

from rewriters.ir.graph import Node, Tensor
from rewriters.rules.intervals import Interval, partition

__all__: list[str] = []

MAX_BISECTIONS = 40
"""Bisection steps to find the smallest maximum weight of a strip."""

SAVED = "CarriedRows"
"""Op type of the stand-in for a tensor of carried rows that are saved for the backward loop."""


@dataclasses.dataclass(frozen=True, eq=False)
class Frontier:
    """Frontier of one tensor along the row axis, at every border of strips, those of the image included.

    Attributes:
        done: The strips above the border complete the rows before this one.
        needed: The strips below the border also need, or add to, the rows from this one on.
    """

    done: np.ndarray
    needed: np.ndarray

    @classmethod
    def of(cls, rows: Interval, start: int, end: int | None = None) -> Frontier:
        """Return the frontier of a value from the rows that each strip needs, or of a gradient that it adds to.

        Args:
            rows: A non-empty interval for each strip.
            start: The first row that is computed.
            end: One past the last row that is computed, if not the last one that is needed.
        """
        done = np.concatenate([[start], np.maximum(np.maximum.accumulate(rows.hi), start)])
        if end is not None:
            done[-1] = end
        needed = np.concatenate([np.minimum.accumulate(rows.lo[::-1])[::-1], done[-1:]])
        return cls(done, np.minimum(needed, done))

    def new(self, borders: np.ndarray) -> Interval:
        """Return the rows that each strip between the given borders computes."""
        return Interval(self.done[borders[:-1]], self.done[borders[1:]])

    def carried(self, borders: np.ndarray) -> Interval:
        """Return the rows that are carried across the given borders."""
        return Interval(self.needed[borders], self.done[borders])


@dataclasses.dataclass(frozen=True, eq=False)
class CarriedRows:
    """Rows of one tensor that the iterations of a loop carry.

    Attributes:
        received: Rows that each strip receives: of a forward value those above the rows it computes, of a gradient
            those that it completes.
        passed: Rows that each strip passes on; empty for saved rows.
        saved: Tensor with the saved rows of all strips, one strip after the other; `None` if the previous iteration
            passes the rows on.
    """

    received: Interval
    passed: Interval
    saved: Tensor | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class SavedRows:
    """Carried rows that a forward loop saves for the backward loop.

    Attributes:
        tensor: Tensor whose rows are saved.
        saved: Tensor that they are saved in.
        slots: Rows that each forward strip saves, and their positions in `saved`. There are several slots if backward
            strips are smaller than forward strips.
        region: Region of the tensor in the backward loop, which may be smaller along other axes.
    """

    tensor: Tensor
    saved: Tensor
    slots: list[tuple[Interval, np.ndarray]]
    region: tuple[Interval, ...]


def balanced_partition(weights: np.ndarray, tiles: int) -> np.ndarray:
    """Return the borders of a contiguous partition into strips that minimises the largest weight of a strip.

    LR-CNN, section IV-A: the first strip computes all rows that it shares with those below it, the last one fewer than
    the others. Strips of even size at the exit have uneven sizes everywhere else. Of several such partitions it is one
    whose smallest strip is as large as possible: all rows of a small last strip may have been computed before it.

    Args:
        weights: Weight of all rows above each border of the finest strips; non-decreasing.
        tiles: Number of strips, at most the number of the finest strips.
    """
    fine = len(weights) - 1
    low, high = 0.0, float(weights[-1] - weights[0])
    for _ in range(MAX_BISECTIONS):
        middle = (low + high) / 2
        if _packed(weights, tiles, middle)[-1] == fine:
            high = middle
        else:
            low = middle
    least = bisect.bisect(range(2, fine // tiles + 1), False, key=lambda size: not _fits(weights, tiles, high, size))
    return _packed(weights, tiles, high, 1 + least)


def _fits(weights: np.ndarray, tiles: int, max_weight: float, least: int) -> bool:
    """Return whether strips after the first may have `least` finest strips each, and none more weight."""
    borders = _packed(weights, tiles, max_weight, least)
    return bool(borders[-1] == len(weights) - 1 and np.all(np.diff(borders)[1:] >= least))


def _packed(weights: np.ndarray, tiles: int, max_weight: float, least: int = 1) -> np.ndarray:
    """Return the borders of strips filled up to `max_weight` one after another.

    Each has one finest strip at least, and leaves `least` to each strip after it.
    """
    borders = [0]
    for remaining in reversed(range(tiles)):
        begin = borders[-1]
        end = int(np.searchsorted(weights, weights[begin] + max_weight, side="right")) - 1
        borders.append(max(min(end, len(weights) - 1 - remaining * least), begin + 1))
    return np.array(borders)


def cells(extent: int, fine: int, borders: np.ndarray) -> Interval:
    """Return `extent` rows split at some borders of an even partition into `fine` strips."""
    ends = np.concatenate([[0], partition(extent, fine).hi])[borders]
    return Interval(ends[:-1], ends[1:])


def refilled(rows: Interval) -> Interval:
    """Return rows in which an empty tile gets the row above it, because kernels need non-empty operands."""
    empty = rows.size == 0
    lo = np.where(empty, np.maximum(rows.lo - 1, 0), rows.lo)
    return Interval(lo, np.where(empty, lo + 1, rows.hi))


def offsets(rows: Interval) -> np.ndarray:
    """Return the position of each tile's first row if the rows of all tiles are concatenated."""
    ends = np.cumsum(rows.size)
    return ends - rows.size


def shape_of(tensor: Tensor, dims: Sequence[int | None], sizes: Sequence[int | None]) -> tuple[int | None, ...]:
    """Return the shape of a tensor with other sizes along its spatial axes, which lie along `dims`."""
    assert tensor.shape is not None
    shape = list(tensor.shape)
    for dim, size in zip(dims, sizes, strict=True):
        if dim is not None:
            shape[dim] = size
    return tuple(shape)


def stand_in(tensor: Tensor, dims: Sequence[int | None], sizes: Sequence[int]) -> Tensor:
    """Return a tensor, in no graph, for carried rows of another tensor."""
    outputs = [(tensor.dtype, shape_of(tensor, dims, sizes))]
    return Node(f"carried/{tensor.name}", SAVED, outputs=outputs, device=tensor.node.device).out()


def slots(frontier: Frontier, forward: np.ndarray, backward: np.ndarray) -> list[tuple[Interval, np.ndarray]]:
    """Return the rows that each forward strip saves, and their positions, in as many slots as a strip needs.

    A strip saves the rows at the borders of backward strips that lie inside it or at its end.

    Args:
        frontier: Frontier of the tensor.
        forward: Borders of the forward strips.
        backward: Borders of the backward strips.
    """
    rows = frontier.carried(backward[:-1])
    positions = offsets(rows)
    borders_of: Sequence[list[int]] = [
        [border for border in range(1, len(backward) - 1) if begin < backward[border] <= end]
        for begin, end in zip(forward[:-1], forward[1:], strict=True)
    ]
    result = []
    for number in range(max(map(len, borders_of))):
        borders = [inside[number] if number < len(inside) else None for inside in borders_of]
        lo = np.array([0 if border is None else rows.lo[border] for border in borders])
        hi = np.array([0 if border is None else rows.hi[border] for border in borders])
        # The empty interval of a strip that saves nothing lies inside the rows that it holds, so that none are padded.
        held = np.array([frontier.done[end] for end in forward[1:]])
        empty = np.array([border is None for border in borders])
        saved = Interval(np.where(empty, held, lo), np.where(empty, held, hi))
        result.append((saved, np.array([0 if border is None else positions[border] for border in borders])))
    return result
