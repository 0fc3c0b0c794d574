"""Numbers of tiles to try."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.ir.graph import Tensor
from rewriters.tiling.extents import known_extents, max_tiles
from rewriters.tiling.segment import Segment
from rewriters.tiling.tile_planner import Grid

AUTO_TILES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
"""Tiles per axis that are tried, fewest first."""


def auto_grids(analysis: GraphAnalysis, segment: Segment, batch: int, rows_only: bool = False) -> list[Grid]:
    """Grids to try, from one tile up, each with more tiles than the one before.

    The batch is split first, which costs no halo; then the longest side of a tile, so that halos stay small, or with
    `rows_only` the first.
    """
    most = max_tiles(analysis, segment)
    counts = [_counts(min(rows, AUTO_TILES[-1])) for rows in (_along_one(most) if rows_only else most)]
    extents = max(known_extents(analysis, segment.exits or segment.grad_entries), key=math.prod)
    at = [0] * len(counts)
    grids = [Grid(images, (1,) * len(counts)) for images in (*(n for n in AUTO_TILES if n < batch), batch)]
    while open_axes := [axis for axis, steps in enumerate(counts) if at[axis] + 1 < len(steps)]:
        axis = max(open_axes, key=lambda axis: (extents[axis] / counts[axis][at[axis]], -axis))
        at[axis] += 1
        grids.append(Grid(batch, tuple(steps[index] for steps, index in zip(counts, at, strict=True))))
    return grids


def _along_one(most: Sequence[int]) -> list[int]:
    """No tiles but along the first axis that can be split."""
    first = first_axis(most)
    return [rows if axis == first else 1 for axis, rows in enumerate(most)]


def first_axis(most: Sequence[int]) -> int:
    """The first axis that can be split."""
    return next((axis for axis, rows in enumerate(most) if rows > 1), 0)


def _counts(most: int) -> list[int]:
    return [n for n in AUTO_TILES if n < most] + [most]


def fewest(grids: Sequence[Grid], fits: Callable[[Grid], bool]) -> Grid | None:
    """The first grid that fits, given that with it all later ones do.

    Halos make that nearly true and not always: a grid before may fit as well.
    """
    index = bisect.bisect_left(grids, True, key=fits)
    return grids[index] if index < len(grids) else None


def fastest(grids: Sequence[Grid], fewest: Grid, seconds: Callable[[Grid], tuple[float, float]]) -> Grid:
    """Of some number of tiles, and more, the one that takes least; the fewest of them.

    Args:
        grids: Each with more tiles than the one before.
        fewest: The one to begin with.
        seconds: Of a grid, its time, and one that neither it nor any grid after it falls below.
    """
    best, found = math.inf, fewest
    for grid in grids[grids.index(fewest) :]:
        own, least = seconds(grid)
        if own < best:
            best, found = own, grid
        if least >= best:
            break
    return found


def thinned(grids: Sequence[Grid], more: float) -> list[Grid]:
    """Grids of which each has so many times the tiles of the one before, and the last."""
    found = list(grids[:1])
    for grid in grids[1:]:
        if grid is grids[-1] or grid.num_tiles >= more * found[-1].num_tiles:
            found.append(grid)
    return found


def loop_grids(analysis: GraphAnalysis, tensors: Sequence[Tensor], batch: int, rows_only: bool = False) -> list[Grid]:
    """Grids to try for a loop that splits these tensors, each with more tiles than the one before.

    The batch first, which costs no halo. Then rows: a tile of full width is one piece of memory.
    """
    most = [min(rows) for rows in zip(*known_extents(analysis, tensors), strict=True)]
    grids = [Grid(images, (1,) * len(most)) for images in _counts(batch)]
    for axis, rows in enumerate(_along_one(most) if rows_only else most):
        rest = (1,) * (len(most) - axis - 1)
        grids += [Grid(batch, (*most[:axis], count, *rest)) for count in _counts(rows)[1:]]
    return grids
