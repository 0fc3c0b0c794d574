"""Numbers of tiles as users write them, before anybody knows how many axes the images have."""

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

_KNOWN = ("batch", "depth", "height", "width", "length")
_EXPECTED = (
    'expected "auto", one count for each axis such as (height, width) or (depth, height, width), one more in front '
    'for the batch, or a mapping such as {"height": 4, "width": 4}'
)


@dataclasses.dataclass(frozen=True)
class NumTiles:
    """What a user wrote.

    Attributes:
        given: Counts by position or by the names of axes.
        argument: Where it was written.
    """

    given: tuple[int, ...] | Mapping[str, int]
    argument: str

    def grid(self, names: Sequence[str | None]) -> Grid:
        """For images with these axes; `None` stands for an axis that nothing has more than one row of.

        Raises:
            ValueError: If the images have other axes.
        """
        own = [name for name in names if name is not None]
        if isinstance(self.given, Mapping):
            unknown = [name for name in self.given if name not in ("batch", *own)]
            if unknown:
                raise ValueError(
                    f"`{self.argument}` names {unknown}, and what is tiled has the axes batch, {', '.join(own)}. "
                    f"Received: {self.argument}={self.given!r}."
                )
            counts = dict(self.given)
        elif len(self.given) in (len(own), len(own) + 1):
            counts = dict(zip(("batch", *own)[-len(self.given) :], self.given, strict=True))
        else:
            shown = ", ".join(own)
            raise ValueError(
                f"`{self.argument}` has {len(self.given)} count(s), and what is tiled has {len(own)} axes. Give "
                f"({shown}) or (batch, {shown}). Received: {self.argument}={self.given!r}."
            )
        return Grid(counts.get("batch", 1), tuple(1 if name is None else counts.get(name, 1) for name in names))


def parse_num_tiles(value: Any, argument: str) -> NumTiles | None:
    """Counts from `"auto"` (`None`), a tuple, or a mapping of axis names.

    Raises:
        TypeError: For another type, or counts that are not integers.
        ValueError: For counts below one, unknown axes, or the wrong number of them.
    """
    if isinstance(value, str) and value == "auto":
        return None
    if isinstance(value, Mapping):
        unknown = [axis for axis in value if axis not in _KNOWN]
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
            raise TypeError(f"`{argument}` counts tiles in integers. Received: {argument}={value!r}.")
        if count < 1:
            raise ValueError(f"`{argument}` must be at least 1 along every axis. Received: {argument}={value!r}.")
    if isinstance(value, Mapping):
        return NumTiles({name: int(count) for name, count in value.items()}, argument)
    return NumTiles(tuple(map(int, counts)), argument)


def axis_names(analysis: GraphAnalysis, segment: Segment) -> list[str | None]:
    """Names of the axes of what a segment tiles; `None` for the height of sequences, which have none."""
    tensors = [*segment.entries, *segment.exits, *segment.grad_entries]
    tensors += [tensor for loop in segment.loop_specs for tensor in loop.writes]
    extents = [rows for rows in map(analysis.extents, tensors) if rows is not None]
    axes = len(extents[0])
    # Also where each tensor of the segment has the axis: between `ExpandDims` and `Squeeze` sequences are images.
    missing = [axis for axis in analysis.layouts.lacking(axes) if all(rows[axis] == 1 for rows in extents)]
    names = AXIS_NAMES[axes] if not missing else AXIS_NAMES[1]
    if axes - len(missing) != len(names):  # Values of whole images are among them: they have no axes.
        return list(AXIS_NAMES[axes])
    own = iter(names)
    return [None if axis in missing else next(own) for axis in range(axes)]
