"""Parts of an image of any Keras model without padding: what a part needs, and where it may begin.

The rules by which this package cuts tiles tell it, asked of the model's graph (`rewriters.analysis.receptive_field`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from tflms_sft._image_tiles.valid_sizes import ImageSizes

__all__: list[str] = []

PROBED = 1024
"""Rows of the smallest image for which a model that takes any is looked at."""

MOST_PROBED = 128
"""Sizes that are tried, one after the other, until a model runs."""


class SampleTile(NamedTuple):
    """A part of an image, and what of its result is for the whole.

    Attributes:
        begin: First row of the image.
        end: One past its last.
        first: First row of the whole result that is taken from this tile.
        last: One past the last of them.
        skip: Rows of the tile's own result before `first`.
    """

    begin: int
    end: int
    first: int
    last: int
    skip: int

    @property
    def keep(self) -> slice:
        """Of the tile's own result the rows that count; its neighbours make the others as well."""
        return slice(self.skip, self.skip + self.last - self.first)


@dataclasses.dataclass(frozen=True)
class AxisTiling(ImageSizes):
    """How a network can be run on parts of its image, along one axis.

    Attributes:
        axis: Which one, from 0: height and width, or depth, height and width.
        halo_before: Rows before those that the result has rows for; the paper's ε.
        halo_after: The same behind them.
        alignment: Tiles begin at multiples of so many rows of the image, and their sizes differ by multiples of it.
        scale: Rows of the image for each row of the result; a fraction where there are more in the result.
        smallest: Rows of the smallest image.
        smallest_result: Rows of the result that it has.
        dim: Dimension of the image that it is, where the batch is 0.
    """

    axis: int
    halo_before: int
    halo_after: int
    alignment: int
    scale: Fraction
    smallest: int
    smallest_result: int
    dim: int

    def check(self, begin: int, end: int) -> None:
        """See that the network makes of a tile what it makes of these rows in the whole image.

        Args:
            begin: First row of the tile.
            end: One past its last.

        Raises:
            ValueError: With all faults, and what would go instead.
        """
        faults = []
        if begin % self.alignment or begin < 0:
            below = max(begin // self.alignment, 0) * self.alignment
            faults.append(
                f"tiles begin at multiples of {self.alignment}, the nearest at {below} and {below + self.alignment}"
            )
        try:
            self.check_rows(end - begin, "end - begin")
        except ValueError as error:
            faults.append(str(error))
        if faults:
            raise ValueError(
                f"Rows {begin} to {end} of axis {self.axis} would not give what they give in the whole image: "
                f"{'; '.join(faults)}"
            )

    def tiles(self, rows: int, tile_rows: int) -> tuple[SampleTile, ...]:
        """An image cut into tiles of one size that together make its result, each row taken from one of them.

        Args:
            rows: Of the image.
            tile_rows: Of each tile, its halo included.

        Raises:
            ValueError: If one of them leaves something over, or tiles are too small to go on from one to the next.
        """
        self.check_rows(rows)
        if tile_rows > rows:
            raise ValueError(f"`tile_rows` must be at most the image's {rows}. Received: tile_rows={tile_rows}.")
        step = self.result_rows(tile_rows) // self._every
        if tile_rows < rows and not step:
            raise ValueError(
                f"`tile_rows` must be at least {self._smallest_tile}: tiles begin {self._every} rows of the result "
                f"apart, and {tile_rows} rows give {self.result_rows(tile_rows)}. Received: tile_rows={tile_rows}."
            )
        last = rows - tile_rows
        return self._beginning_at([*range(0, last, step * self.alignment or 1), last], tile_rows)

    def split(self, rows: int, parts: int) -> tuple[SampleTile, ...]:
        """An image cut into so many tiles of one size, as small as they can be, about as far from each other.

        Where they do not go evenly into the image they overlap further; each row is taken from one of them still.

        Args:
            rows: Of the image.
            parts: How many.

        Raises:
            ValueError: If the image leaves something over, or is too small for so many.
        """
        self.check_rows(rows)
        if parts == 1:
            return self._beginning_at([0], rows)
        for tile_rows in range(self._smallest_tile, rows, self.alignment):
            places, reach = (rows - tile_rows) // self.alignment, self.result_rows(tile_rows) // self._every
            if 0 < parts - 1 <= places <= reach * (parts - 1):
                begins = [number * places // (parts - 1) * self.alignment for number in range(parts)]
                return self._beginning_at(begins, tile_rows)
        most = 1 + max(rows - self._smallest_tile, 0) // self.alignment
        raise ValueError(
            f"`parts` must be from 1 to {most}, the tiles that {rows} rows of axis {self.axis} can be cut into. "
            f"Received: parts={parts!r}."
        )

    def result_of(self, tile: SampleTile) -> tuple[int, int]:
        """Rows of the whole result that a tile makes, those that its neighbours make as well among them.

        Args:
            tile: One of this axis.
        """
        begin = tile.first - tile.skip
        return begin, begin + self.result_rows(tile.end - tile.begin)

    @property
    def _every(self) -> int:
        """Rows of the result between beginnings that are next to each other."""
        return int(self.alignment / self.scale)

    @property
    def _smallest_tile(self) -> int:
        """Rows of the smallest tile that reaches to where the next one can begin."""
        sizes = itertools.count(self.smallest, self.alignment)
        return next(rows for rows in sizes if self.result_rows(rows) >= self._every)

    def _beginning_at(self, begins: Iterable[int], tile_rows: int) -> tuple[SampleTile, ...]:
        found: list[SampleTile] = []
        for begin in begins:
            own = int(begin / self.scale)
            first = found[-1].last if found else 0
            found.append(SampleTile(begin, begin + tile_rows, first, own + self.result_rows(tile_rows), first - own))
        return tuple(found)


@dataclasses.dataclass(frozen=True)
class SampleTiling:
    """How a network can be run on parts of its image.

    Attributes:
        axes: Along each axis that has more than one row.
        draws: What draws random numbers, which are others for each part: layers, with their classes.
    """

    axes: tuple[AxisTiling, ...]
    draws: tuple[str, ...] = ()

    def check(self, *bounds: tuple[int, int]) -> None:
        """See that the network makes of a part of an image what it makes of it in the whole.

        Args:
            *bounds: First row, and one past the last, along each axis.

        Raises:
            ValueError: With the first axis along which it does not, and what would go instead.
        """
        for axis, (begin, end) in zip(self.axes, bounds, strict=True):
            axis.check(begin, end)

    def tiles(self, sizes: Sequence[int], tile_sizes: Sequence[int]) -> tuple[tuple[SampleTile, ...], ...]:
        """All tiles of an image, each as its rows along each axis; the last axis varies first.

        Args:
            sizes: Of the image, along each axis.
            tile_sizes: Of each tile, its halo included.

        Raises:
            ValueError: As `AxisTiling.tiles`.
        """
        along = [axis.tiles(*pair) for axis, *pair in zip(self.axes, sizes, tile_sizes, strict=True)]
        return tuple(itertools.product(*along))

    def split(self, sizes: Sequence[int], parts: Sequence[int]) -> tuple[tuple[SampleTile, ...], ...]:
        """So many tiles of an image, as small as they can be; the last axis varies first.

        Args:
            sizes: Of the image, along each axis.
            parts: How many tiles, along each axis.

        Raises:
            ValueError: As `AxisTiling.split`.
        """
        along = [axis.split(*pair) for axis, *pair in zip(self.axes, sizes, parts, strict=True)]
        return tuple(itertools.product(*along))


def sample_tiling(model: Any, size: int | Sequence[int] | None = None, training: bool = False) -> SampleTiling:
    """How a model can be run on parts of its image, each as an image of its own.

    The model is traced, not run, and each of its operations asked which rows it needs.

    Args:
        model: A Keras model of one image and one result, without padding.
        size: Rows, or the rows along each axis that the model leaves open, of an image to trace it for: large enough
            that its smallest tensor has some ten rows. Defaults to the first size from 1024 on that the model takes.
        training: Whether it is looked at as in training, where normalisation and dropout do something else.

    Returns:
        The halo, the alignment and the sizes along each axis.

    Raises:
        RewriteError: If an operation pads, mixes rows of the whole image, or has no rule.
        ValueError: If the model is of one size alone, of which something is left over, or does not run on `size`.
    """
    if len(getattr(model, "inputs", None) or ()) != 1 or len(model.outputs) != 1:
        raise ValueError(
            "`model` must be a Keras model of one image and one result. A subclassed one becomes that with "
            f"keras.Model(image, model(image)). Received: model={model!r}."
        )
    traced, draws = _first_that_runs(model, size, training)
    wasteful = {dim: view for dim, view in zip(traced.dims, traced.views, strict=True) if view.wasteful}
    left_open = _open_dimensions(model)
    for dim, view in wasteful.items():
        if dim not in left_open:
            raise ValueError(
                f"`model` takes {view.extent} rows and leaves some over, first in {view.wasteful}, so that tiles would "
                f"not give what the image gives. The nearest sizes of which nothing is left are {view.admissible} and "
                f"{view.admissible + view.alignment}. Received: model={model!r}."
            )
    if wasteful:
        fitting = {dim: view.admissible for dim, view in zip(traced.dims, traced.views, strict=True)}
        traced, draws = _field(model, [fitting.get(dim, 1) for dim in left_open], training)
    return SampleTiling(tuple(map(_axis_tiling, traced.axes, traced.dims, traced.views)), draws)


def _axis_tiling(axis: int, dim: int, view: Any) -> AxisTiling:
    halo = math.ceil(view.extent - view.scale * view.out_extent)
    first, end = view.needs
    before = first + (halo - first - (view.extent - end)) // 2  # What is cropped, and half of what lies around.
    smallest_result = view.out_extent - int((view.extent - view.smallest) / view.scale)
    return AxisTiling(axis, before, halo - before, view.alignment, view.scale, view.smallest, smallest_result, dim)


def _open_dimensions(model: Any) -> list[int]:
    """Dimensions of the image, the batch aside, that the model leaves open."""
    return [dim for dim, rows in enumerate(model.inputs[0].shape) if dim and rows is None]


def _first_that_runs(model: Any, size: int | Sequence[int] | None, training: bool) -> tuple[Any, tuple[str, ...]]:
    """What `_field` gives, for the size that was asked for or the first that the model takes."""
    left_open = _open_dimensions(model)
    if size is None:
        sizes = [[PROBED + more] * len(left_open) for more in range(MOST_PROBED if left_open else 1)]
        asked = f"Tried: {PROBED} to {PROBED + MOST_PROBED - 1} rows. Give a `size` that it runs on."
    else:
        sizes = [[int(own) for own in size] if isinstance(size, Sequence) else [int(size)] * len(left_open)]
        asked = f"Received: size={size!r}."
        if len(sizes[0]) != len(left_open):
            raise ValueError(f"`size` needs {len(left_open)} numbers, one for each dimension left open. {asked}")
    for rows in sizes:
        try:
            return _field(model, rows, training)
        except ValueError as error:  # Keras, of layers whose shapes do not go together.
            last = error
    raise ValueError(f"`model` does not run. {asked} It says: {' '.join(str(last).split())}") from last


def _field(model: Any, rows: Sequence[int], training: bool) -> tuple[Any, tuple[str, ...]]:
    """A `ReceptiveField` of the model for an image, and what draws random numbers in it."""
    # Imported here: formulas need no TensorFlow, which takes seconds.
    import tensorflow as tf

    from rewriters.analysis.autodiff_roles import is_random
    from rewriters.analysis.graph_analysis import GraphAnalysis
    from rewriters.analysis.receptive_field import ReceptiveField
    from rewriters.canonicalize.canonicalize import read_canonical
    from tflms_sft._trace.layer_names import part_name, recorded_layers

    image = model.inputs[0]
    shape = [1, *image.shape[1:]]
    for dim, own in zip(_open_dimensions(model), rows, strict=True):
        shape[dim] = own
    step = tf.function(lambda images: model(images, training=training), autograph=False)
    with recorded_layers() as record:
        traced = step.get_concrete_function(tf.TensorSpec(shape, image.dtype))
    record.finish(traced.graph)
    graph = read_canonical(traced)
    draws = (part_name(record, node.name) or f"`{node.name}`" for node in graph.nodes.values() if is_random(node))
    return ReceptiveField(GraphAnalysis(graph), graph.inputs[0], graph.outputs[0]), tuple(dict.fromkeys(draws))
