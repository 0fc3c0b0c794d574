"""Grids of tiles that searches try, and the choice of one among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.ir.graph import Tensor
from rewriters.tiling.extents import known_extents, max_tiles
from rewriters.tiling.segment import Segment
from rewriters.tiling.tile_planner import Grid

__all__: list[str] = []

AUTO_TILES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64)
"""Tiles per axis that are tried, fewest first. For sequences, batches and loops between barriers they go on: 96, 128,
192, 256, ..."""


MAX_GUESSES = 5
"""Grids that a power law of their bytes proposes; bisection follows."""


def auto_grids(analysis: GraphAnalysis, segment: Segment, batch: int, rows_only: bool = False) -> list[Grid]:
    """Return grids to try, from one tile up, each with more tiles than the one before.

    The batch is split first, which costs no halo. Then the longest side of a tile is split, which keeps halos small,
    or with `rows_only` the first axis alone.
    """
    limits = max_tiles(analysis, segment)
    is_sequence = sum(rows > 1 for rows in limits) == 1
    most = AUTO_TILES[-1] ** (2 if is_sequence else 1)
    counts = [_counts(min(rows, most)) for rows in (_first_axis_only(limits) if rows_only else limits)]
    extents = max(known_extents(analysis, segment.exits or segment.split), key=math.prod)
    indices = [0] * len(counts)
    grids = [Grid(images, (1,) * len(counts)) for images in _counts(batch)]
    while open_axes := [axis for axis, steps in enumerate(counts) if indices[axis] + 1 < len(steps)]:
        axis = max(open_axes, key=lambda axis: (extents[axis] / counts[axis][indices[axis]], -axis))
        indices[axis] += 1
        grids.append(Grid(batch, tuple(steps[index] for steps, index in zip(counts, indices, strict=True))))
    return grids


def loop_grids(analysis: GraphAnalysis, tensors: Sequence[Tensor], batch: int, rows_only: bool = False) -> list[Grid]:
    """Return grids to try for a loop that splits these tensors, each with more tiles than the one before.

    The batch is split first, which costs no halo; then the first axis, as a strip of full width is one piece of memory.
    Of thin strips of a large image most rows would be halos: then the longest side of a tile is split.
    """
    limits = [min(rows) for rows in zip(*known_extents(analysis, tensors), strict=True)]
    counts = [_counts(rows) for rows in (_first_axis_only(limits) if rows_only else limits)]
    first, indices = first_axis(limits), [0] * len(limits)
    grids = [Grid(images, (1,) * len(limits)) for images in _counts(batch)]
    while open_axes := [axis for axis, steps in enumerate(counts) if indices[axis] + 1 < len(steps)]:
        axis = max(open_axes, key=lambda axis: (limits[axis] / counts[axis][indices[axis]], -axis))
        if first in open_axes and counts[first][indices[first] + 1] <= AUTO_TILES[-1]:
            axis = first
        indices[axis] += 1
        grids.append(Grid(batch, tuple(steps[index] for steps, index in zip(counts, indices, strict=True))))
    return grids


def _counts(limit: int) -> list[int]:
    """Return numbers of tiles to try, up to the limit."""
    longer = (factor * 2**exponent for exponent in range(limit.bit_length()) for factor in (96, 128))
    return [n for n in (*AUTO_TILES, *longer) if n < limit] + [limit]


def _first_axis_only(limits: Sequence[int]) -> list[int]:
    """Return the limits with one tile for all axes but the first that can be split."""
    first = first_axis(limits)
    return [rows if axis == first else 1 for axis, rows in enumerate(limits)]


def first_axis(limits: Sequence[int]) -> int:
    """Return the first axis that can be split."""
    return next((axis for axis, rows in enumerate(limits) if rows > 1), 0)


def thinned(grids: Sequence[Grid], growth: float) -> list[Grid]:
    """Return the grids that have at least `growth` times the tiles of the one kept before.

    The last grid, and the last one of whole images, which has no halos, are kept too.
    """
    whole_images = max((n for n, grid in enumerate(grids) if math.prod(grid.spatial) == 1), default=0)
    thin = list(grids[:1])
    for number, grid in enumerate(grids[1:], 1):
        is_kept = number in (whole_images, len(grids) - 1)
        if is_kept or grid.num_tiles >= growth * thin[-1].num_tiles:
            thin.append(grid)
    return thin


def coarsest_fitting(grids: Sequence[Grid], num_bytes: Callable[[Grid], float], limit: float) -> Grid | None:
    """Return the grid with the fewest tiles that needs at most `limit` bytes; `None` if none does.

    Bytes are assumed not to rise with the number of tiles. Halos break that now and then: an earlier grid may fit as
    well. A power law through the bytes of two grids proposes the next one to try.
    """
    low, high, bytes_at = -1, len(grids), dict[int, float]()
    while high - low > 1:
        index = _guess(grids, low, high, bytes_at, limit)
        bytes_at[index] = num_bytes(grids[index])
        low, high = (low, index) if bytes_at[index] <= limit else (index, high)
    return grids[high] if high < len(grids) else None


def _guess(grids: Sequence[Grid], low: int, high: int, bytes_at: Mapping[int, float], limit: float) -> int:
    """Return the position of the next grid to try.

    Args:
        grids: Grids with more and more tiles.
        low: Position of a grid that does not fit; -1 if none is known.
        high: Position of a later one that fits; the number of grids if none is known.
        bytes_at: Bytes of the grids that were tried, by position.
        limit: Bytes that the grid may need.
    """
    if low < 0:
        return 0
    if len(bytes_at) > MAX_GUESSES:
        return (low + high) // 2
    limit, most, power = max(limit, 1.0), bytes_at[low], 1.0
    least = max(bytes_at.get(high, 0.0), 1.0)
    if high in bytes_at and least < most:  # Bytes are taken to be a power of the number of tiles.
        power = math.log(most / least) / math.log(grids[high].num_tiles / grids[low].num_tiles)
    tiles = grids[low].num_tiles * (most / limit) ** (1 / power)
    return next((index for index in range(low + 1, high) if grids[index].num_tiles >= tiles), high - 1)


def fastest(grids: Sequence[Grid], start: Grid, seconds: Callable[[Grid], tuple[float, float]]) -> Grid:
    """Return the fastest grid from `start` on; of equally fast ones the first.

    Args:
        grids: Grids, each with more tiles than the one before.
        start: Grid to begin with.
        seconds: Returns the time in a grid, and a lower bound for it and all later grids.
    """
    best, best_seconds = start, math.inf
    for grid in grids[grids.index(start) :]:
        grid_seconds, least_seconds = seconds(grid)
        if grid_seconds < best_seconds:
            best, best_seconds = grid, grid_seconds
        if least_seconds >= best_seconds:
            break
    return best
