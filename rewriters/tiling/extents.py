"""Rows of tensors along the axes that tiles split, and the numbers of tiles that they allow."""

from __future__ import annotations

from collections.abc import Sequence

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.ir.graph import Tensor
from rewriters.tiling.segment import Segment

__all__: list[str] = []


def known_extents(analysis: GraphAnalysis, tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Return the rows along each axis of those tensors whose size is known."""
    all_extents = (analysis.extents(tensor) for tensor in tensors)
    return [tuple(int(rows or 1) for rows in extents) for extents in all_extents if extents is not None]


def max_tiles(analysis: GraphAnalysis, segment: Segment) -> tuple[int, ...]:
    """Return the largest number of tiles along each axis: the rows of the smallest image that tiles split."""
    return min_rows(analysis, segment.split)


def min_rows(analysis: GraphAnalysis, tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the smallest number of rows along each axis."""
    return tuple(min(rows) for rows in zip(*known_extents(analysis, tensors), strict=True))
