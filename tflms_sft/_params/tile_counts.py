"""Parsing of numbers of tiles, and their conversion to a grid once the axes of the images are known."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.tiling.segment import Segment
from rewriters.tiling.tile_planner import Grid

AXIS_NAMES = {1: ("length",), 2: ("height", "width"), 3: ("depth", "height", "width")}
"""Names of the axes of a sequence, an image and a volume."""

_KNOWN_AXES = ("batch", "depth", "height", "width", "length")
_EXPECTED = (
    'expected "auto", one count for each axis such as (height, width) or (depth, height, width), one more in front '
    'for the batch, or a mapping such as {"height": 4, "width": 4}'
)


@dataclasses.dataclass(frozen=True)
class NumTiles:
    """Numbers of tiles by position or by axis name.

    Attributes:
        given: Counts in the order of the axes, or by axis name.
        argument: Name of the argument, for errors.
    """

    given: tuple[int, ...] | Mapping[str, int]
    argument: str

    def __str__(self) -> str:
        counts = self.given.values() if isinstance(self.given, Mapping) else self.given
        return "x".join(map(str, counts))

    def grid(self, names: Sequence[str | None]) -> Grid:
        """Return the grid for images with these axes.

        Args:
            names: Names of the spatial axes; `None` for an axis of size 1 that does not count.

        Raises:
            ValueError: If the counts do not match the axes.
        """
        axes = [name for name in names if name is not None]
        if isinstance(self.given, Mapping):
            unknown = [name for name in self.given if name not in ("batch", *axes)]
            if unknown:
                raise ValueError(
                    f"`{self.argument}` names {unknown}, but the tiled tensor has the axes batch, {', '.join(axes)}. "
                    f"Received: {self.argument}={self.given!r}."
                )
            counts = dict(self.given)
        elif len(self.given) in (len(axes), len(axes) + 1):
            counts = dict(zip(("batch", *axes)[-len(self.given) :], self.given, strict=True))
        else:
            shown = ", ".join(axes)
            raise ValueError(
                f"`{self.argument}` has {len(self.given)} count(s), but the tiled tensor has {len(axes)} axes. Give "
                f"({shown}) or (batch, {shown}). Received: {self.argument}={self.given!r}."
            )
        return Grid(counts.get("batch", 1), tuple(1 if name is None else counts.get(name, 1) for name in names))


def parse_num_tiles(value: Any, argument: str) -> NumTiles | None:
    """Parse the value of an argument: `"auto"` (returns `None`), a tuple of counts, or a mapping from axis names.

    Raises:
        TypeError: If it is of another type, or a count is not an integer.
        ValueError: If a count is below 1, an axis is unknown, or there are too many counts.
    """
    if isinstance(value, str) and value == "auto":
        return None
    if isinstance(value, Mapping):
        unknown = [axis for axis in value if axis not in _KNOWN_AXES]
        if unknown:
            raise ValueError(f"`{argument}` names unknown axes {unknown}; {_EXPECTED}. Received: {argument}={value!r}.")
        if not value:
            raise ValueError(f"`{argument}` names no axis; {_EXPECTED}. Received: {argument}={value!r}.")
        counts = tuple(value.values())
    elif isinstance(value, (tuple, list)):
        if not 1 <= len(value) <= 4:
            raise ValueError(f"`{argument}` has {len(value)} counts; {_EXPECTED}. Received: {argument}={value!r}.")
        counts = tuple(value)
    else:
        raise TypeError(f"`{argument}`: {_EXPECTED}. Received: {argument}={value!r} of type {type(value).__name__}.")
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, numbers.Integral):
            raise TypeError(f"`{argument}` must consist of integers. Received: {argument}={value!r}.")
        if count < 1:
            raise ValueError(f"`{argument}` must be at least 1 along every axis. Received: {argument}={value!r}.")
    if isinstance(value, Mapping):
        return NumTiles({name: int(count) for name, count in value.items()}, argument)
    return NumTiles(tuple(map(int, counts)), argument)


def axis_names(analysis: GraphAnalysis, segment: Segment) -> list[str | None]:
    """Return the names of the spatial axes that a segment tiles; `None` for the missing height of sequences."""
    tensors = [*segment.entries, *segment.split]
    tensors += [tensor for loop in segment.loop_specs for tensor in loop.writes]
    extents = [rows for rows in map(analysis.extents, tensors) if rows is not None]
    axes = len(extents[0])
    # Sequences have a height of 1 between `ExpandDims` and `Squeeze`, even if every tensor of the segment has it.
    missing = [axis for axis in analysis.layouts.lacking(axes) if all(rows[axis] == 1 for rows in extents)]
    names = AXIS_NAMES[axes] if not missing else AXIS_NAMES[1]
    if axes - len(missing) != len(names):  # Some tensors have one value per image and no spatial axes.
        return list(AXIS_NAMES[axes])
    present = iter(names)
    return [None if axis in missing else next(present) for axis in range(axes)]
