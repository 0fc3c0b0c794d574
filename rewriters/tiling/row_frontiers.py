"""Rows that one row tile hands to the next, instead of each computing its halo (LR-CNN's two-phase sharing).

The algebra of *frontiers*. For each tensor and each border between two row tiles, a frontier says which rows are done
when the tiles above the border are, and from which row on tiles below it still need them. What lies between the two is
carried across the border: of a forward value downwards, of a gradient, which those tiles add to, upwards.
`docs/rows.md` derives both from one rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from rewriters.ir.graph import Node, Tensor
from rewriters.rules.intervals import Interval, partition

__all__: list[str] = []

HALVINGS = 40
"""Steps to find the lightest heaviest tile."""

SAVED = "CarriedRows"
"""Type of the stand-in for the tensor that keeps carried rows from the forward loop to the backward loop."""


@dataclasses.dataclass(frozen=True, eq=False)
class Frontier:
    """Of one tensor along the axis of the rows, at the borders of row tiles; the first and last border are the image's.

    Attributes:
        done: Rows before this one are made by the tiles above the border.
        kept: Rows from this one on are needed by (or, of gradients, added to by) the tiles below it as well.
    """

    done: np.ndarray
    kept: np.ndarray

    @classmethod
    def of(cls, rows: Interval, start: int, end: int | None = None) -> Frontier:
        """From the rows that each tile needs of a value, or adds to in a gradient.

        Args:
            rows: One non-empty interval for each tile.
            start: The first row that is made.
            end: One past the last one, if it is not the last that is needed.
        """
        done = np.concatenate([[start], np.maximum(np.maximum.accumulate(rows.hi), start)])
        if end is not None:
            done[-1] = end
        kept = np.concatenate([np.minimum.accumulate(rows.lo[::-1])[::-1], done[-1:]])
        return cls(done, np.minimum(kept, done))

    def new(self, borders: np.ndarray) -> Interval:
        """Rows that each of the tiles between some of the borders makes."""
        return Interval(self.done[borders[:-1]], self.done[borders[1:]])

    def carried(self, borders: np.ndarray) -> Interval:
        """Rows that are carried across some of the borders."""
        return Interval(self.kept[borders], self.done[borders])


@dataclasses.dataclass(frozen=True, eq=False)
class CarriedRows:
    """Rows of one tensor that the turns of a loop hand on.

    Attributes:
        received: What each tile has from its neighbour: of forward values the rows above those it makes itself; of
            gradients rows that it completes.
        passed: What it hands on in turn; empty for rows that were saved.
        saved: What the rows are read from if not from the turn before: all of them, one tile's after the other's.
    """

    received: Interval
    passed: Interval
    saved: Tensor | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class SavedRows:
    """Carried rows that a forward loop keeps for the backward loop.

    Attributes:
        tensor: Whose rows they are.
        saved: Where they go.
        slots: For each tile as many times as needed (backward tiles may be smaller): rows, and where they go.
        region: What the backward loop holds of the tensor, which along other axes may be less than the forward loop.
    """

    tensor: Tensor
    saved: Tensor
    slots: list[tuple[Interval, np.ndarray]]
    region: tuple[Interval, ...]


def balanced_partition(weights: np.ndarray, tiles: int) -> np.ndarray:
    """Borders of tiles, each of some of the finest ones, of which the heaviest is as light as can be.

    LR-CNN, section IV-A: the first tile makes all the rows that those below it share with it, the last one fewer than
    others, so that tiles of even size at the exit are of uneven size everywhere else.

    Args:
        weights: Of all that is above each border of the finest tiles; never falls.
        tiles: At most as many as the finest.
    """
    low, high = 0.0, float(weights[-1] - weights[0])
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if _packed(weights, tiles, middle)[-1] == len(weights) - 1:
            high = middle
        else:
            low = middle
    return _packed(weights, tiles, high)


def _packed(weights: np.ndarray, tiles: int, most: float) -> np.ndarray:
    """Borders of tiles no heavier than `most`, as far as they go; at least one of the finest for each of the others."""
    found = [0]
    for later in reversed(range(tiles)):
        begin = found[-1]
        end = int(np.searchsorted(weights, weights[begin] + most, side="right")) - 1
        found.append(min(max(end, begin + 1), len(weights) - 1 - later))
    return np.array(found)


def cells(extent: int, fine: int, at: np.ndarray) -> Interval:
    """`extent` rows split at these borders of `fine` tiles, which are as even as can be."""
    ends = np.concatenate([[0], partition(extent, fine).hi])[at]
    return Interval(ends[:-1], ends[1:])


def refilled(rows: Interval) -> Interval:
    """With the row above it for a tile that is empty: kernels want non-empty operands."""
    empty = rows.size == 0
    lo = np.where(empty, np.maximum(rows.lo - 1, 0), rows.lo)
    return Interval(lo, np.where(empty, lo + 1, rows.hi))


def offsets(rows: Interval) -> np.ndarray:
    """Where each tile's rows begin if all are put one after the other."""
    ends = np.cumsum(rows.size)
    return ends - rows.size


def shape_of(tensor: Tensor, dims: Sequence[int | None], sizes: Sequence[int | None]) -> tuple[int | None, ...]:
    """The shape of so many rows of a tensor along each of its axes, which lie along `dims`."""
    assert tensor.shape is not None
    found = list(tensor.shape)
    for dim, size in zip(dims, sizes, strict=True):
        if dim is not None:
            found[dim] = size
    return tuple(found)


def stand_in(tensor: Tensor, dims: Sequence[int | None], sizes: Sequence[int]) -> Tensor:
    """A tensor for so many carried rows of another one; it is in no graph."""
    outputs = [(tensor.dtype, shape_of(tensor, dims, sizes))]
    return Node(f"carried/{tensor.name}", SAVED, outputs=outputs, device=tensor.node.device).out()


def slots(frontier: Frontier, forward: np.ndarray, backward: np.ndarray) -> list[tuple[Interval, np.ndarray]]:
    """What each forward tile saves: the rows at those borders of backward tiles that it meets first."""
    rows = frontier.carried(backward[:-1])
    places = offsets(rows)
    meets: Sequence[list[int]] = [
        [s for s in range(1, len(backward) - 1) if begin < backward[s] <= end]
        for begin, end in zip(forward[:-1], forward[1:], strict=True)
    ]
    found = []
    for number in range(max(map(len, meets))):
        own = [tile[number] if number < len(tile) else None for tile in meets]
        lo = np.array([0 if s is None else rows.lo[s] for s in own])
        hi = np.array([0 if s is None else rows.hi[s] for s in own])
        # A tile that saves nothing says so with no rows where it has some: nothing is padded.
        held = np.array([frontier.done[end] for end in forward[1:]])
        empty = np.array([s is None for s in own])
        found.append(
            (
                Interval(np.where(empty, held, lo), np.where(empty, held, hi)),
                np.array([0 if s is None else places[s] for s in own]),
            )
        )
    return found
