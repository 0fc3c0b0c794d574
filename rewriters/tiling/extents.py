"""Rows of tensors along the axes that tiles split, and how many tiles they allow."""

from __future__ import annotations

from collections.abc import Sequence

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.ir.graph import Tensor
from rewriters.tiling.segment import Segment

__all__: list[str] = []


def known_extents(analysis: GraphAnalysis, tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Rows along each axis, of tensors of known size."""
    found = (analysis.extents(tensor) for tensor in tensors)
    return [tuple(int(rows or 1) for rows in extents) for extents in found if extents is not None]


def most_tiles(analysis: GraphAnalysis, segment: Segment) -> tuple[int, ...]:
    """Rows along each axis of the smallest image that is split."""
    return fewest_rows(analysis, [*segment.exits, *segment.grad_entries])


def fewest_rows(analysis: GraphAnalysis, tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Along each axis those of the tensor that has fewest."""
    return tuple(min(rows) for rows in zip(*known_extents(analysis, tensors), strict=True))
