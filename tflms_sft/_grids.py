"""Numbers of tiles to try."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

from rewriters.graph import Tensor
from rewriters.registry import SPATIAL_DIMS
from rewriters.segments import Segment
from rewriters.tiles import Grid

AUTO_TILES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
"""Tiles per axis that are tried, fewest first."""


def most_tiles(segment: Segment) -> tuple[int, ...]:
    shapes = [t.shape for t in (*segment.exits, *segment.grad_entries) if t.shape is not None]
    return tuple(min(int(shape[axis] or 1) for shape in shapes) for axis in (1, 2))


def clamped(segment: Segment, grid: Grid) -> Grid:
    """A grid with no more tiles than the segment's exits have rows."""
    most = most_tiles(segment)
    return Grid(grid.batch, tuple(min(count, rows) for count, rows in zip(grid.spatial, most, strict=True)))


def auto_grids(segment: Segment, batch: int) -> list[Grid]:
    """Grids to try, from one tile up, each with more tiles than the one before.

    The batch is split first, which costs no halo; then the longer side of a tile, so that halos stay small.
    """
    most = [min(rows, AUTO_TILES[-1]) for rows in most_tiles(segment)]
    counts = [[n for n in AUTO_TILES if n < rows] + [rows] for rows in most]
    shapes = [t.shape for t in segment.exits or segment.grad_entries if t.shape is not None]
    shape = max(shapes, key=lambda s: int(s[1] or 1) * int(s[2] or 1))
    extents = [int(shape[1] or 1), int(shape[2] or 1)]
    at = [0, 0]
    grids = [Grid(images, (counts[0][0], counts[1][0])) for images in (*(n for n in AUTO_TILES if n < batch), batch)]
    while any(index + 1 < len(steps) for index, steps in zip(at, counts, strict=True)):
        _, axis = max(
            (extents[axis] / counts[axis][at[axis]], -axis) for axis in (0, 1) if at[axis] + 1 < len(counts[axis])
        )
        at[-axis] += 1
        grids.append(Grid(batch, (counts[0][at[0]], counts[1][at[1]])))
    return grids


def fewest(grids: Sequence[Grid], fits: Callable[[Grid], bool]) -> Grid | None:
    """The first grid that fits, given that with it all later ones do.

    Halos make that nearly true and not always: a grid before may fit as well.
    """
    index = bisect.bisect_left(grids, True, key=fits)
    return grids[index] if index < len(grids) else None


def loop_grids(tensors: Sequence[Tensor], batch: int) -> list[Grid]:
    """Grids to try for a loop that splits these tensors, each with more tiles than the one before.

    The batch first, which costs no halo. Then rows: a tile of full width is one piece of memory.
    """
    shapes = [t.shape for t in tensors if t.shape is not None]
    rows, columns = (min(int(shape[dim] or 1) for shape in shapes) for dim in SPATIAL_DIMS)

    def counts(most: int) -> list[int]:
        return [n for n in AUTO_TILES if n < most] + [most]

    grids = [Grid(images, (1, 1)) for images in counts(batch)]
    grids += [Grid(batch, (count, 1)) for count in counts(rows)[1:]]
    return grids + [Grid(batch, (rows, count)) for count in counts(columns)[1:]]
