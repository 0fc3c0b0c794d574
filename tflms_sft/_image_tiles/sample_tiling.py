"""Image tiles for any Keras model without padding: their halos, their sizes, and where they may begin.

All three follow from the op rules, applied to the graph of the model (`rewriters.analysis.receptive_field`).
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

FIRST_PROBED_ROWS = 1024
"""Rows of the first image for which a model with free sizes is traced."""

MAX_PROBED_SIZES = 128
"""Number of consecutive sizes that are tried until the model can be traced."""


class SampleTile(NamedTuple):
    """A tile of an image along one axis, and the rows of the whole result that it contributes.

    Attributes:
        begin: First row of the tile in the image.
        end: One past the last row of the tile.
        first: First row of the whole result that is taken from this tile.
        last: One past the last row of the whole result that is taken from this tile.
        skip: Rows of the tile's result before `first`.
    """

    begin: int
    end: int
    first: int
    last: int
    skip: int

    @property
    def keep(self) -> slice:
        """Rows of the tile's result that are taken; adjacent tiles compute the other rows as well."""
        return slice(self.skip, self.skip + self.last - self.first)


@dataclasses.dataclass(frozen=True)
class AxisTiling(ImageSizes):
    """Tiling of the images of a network along one axis.

    Attributes:
        axis: Index of the axis: height and width, or depth, height and width.
        halo_before: Rows of the image before the rows that correspond to the result; the paper's ε.
        halo_after: Rows of the image behind the rows that correspond to the result.
        alignment: Divisor, in rows of the image, of the beginnings of tiles and of differences between their sizes.
        scale: Rows of the image per row of the result; a fraction if the result has more rows.
        smallest: Rows of the smallest valid image.
        smallest_result: Rows of the result of the smallest image.
        dim: Dimension of the axis in the image tensor, where the batch is dimension 0.
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
        """Check that the network computes for a tile what it computes for these rows of the whole image.

        Args:
            begin: First row of the tile.
            end: One past the last row.

        Raises:
            ValueError: For a wrong tile, with all faults and the nearest valid values.
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
            raise ValueError(f"Rows {begin} to {end} of axis {self.axis} are not a valid tile: {'; '.join(faults)}")

    def tiles(self, rows: int, tile_rows: int) -> tuple[SampleTile, ...]:
        """Return tiles of a given size that cover the result of an image, each row taken from one tile.

        Args:
            rows: Rows of the image.
            tile_rows: Rows of each tile, with its halo.

        Raises:
            ValueError: If a size is not valid, or the tiles are too small to be adjacent.
        """
        self.check_rows(rows)
        if tile_rows > rows:
            raise ValueError(f"`tile_rows` must be at most the image's {rows}. Received: tile_rows={tile_rows}.")
        step = self.result_rows(tile_rows) // self._every
        if tile_rows < rows and not step:
            raise ValueError(
                f"`tile_rows` must be at least {self._smallest_tile}, so that the results of adjacent tiles touch: "
                f"tiles begin {self._every} rows of the result apart. Received: tile_rows={tile_rows}, which yields "
                f"{self.result_rows(tile_rows)} rows of the result."
            )
        last = rows - tile_rows
        return self._beginning_at([*range(0, last, step * self.alignment or 1), last], tile_rows)

    def split(self, rows: int, parts: int) -> tuple[SampleTile, ...]:
        """Return a given number of equal tiles of the smallest size, at nearly equal distances.

        Tiles overlap further if the image is not divisible; each row of the result is still taken from one tile.

        Args:
            rows: Rows of the image.
            parts: Number of tiles.

        Raises:
            ValueError: If the size of the image is not valid, or too small for so many tiles.
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
            f"`parts` must be from 1 to {most}: {rows} rows of axis {self.axis} cannot be cut into more tiles. "
            f"Received: parts={parts!r}."
        )

    def result_of(self, tile: SampleTile) -> tuple[int, int]:
        """Return the rows of the whole result that a tile computes, with those that adjacent tiles compute as well.

        Args:
            tile: A tile along this axis.
        """
        begin = tile.first - tile.skip
        return begin, begin + self.result_rows(tile.end - tile.begin)

    @property
    def _every(self) -> int:
        """Rows of the result between adjacent possible beginnings."""
        return int(self.alignment / self.scale)

    @property
    def _smallest_tile(self) -> int:
        """Rows of the smallest tile whose result reaches the next possible beginning."""
        sizes = itertools.count(self.smallest, self.alignment)
        return next(rows for rows in sizes if self.result_rows(rows) >= self._every)

    def _beginning_at(self, begins: Iterable[int], tile_rows: int) -> tuple[SampleTile, ...]:
        tiles: list[SampleTile] = []
        for begin in begins:
            result_begin = int(begin / self.scale)
            first, last = tiles[-1].last if tiles else 0, result_begin + self.result_rows(tile_rows)
            tiles.append(SampleTile(begin, begin + tile_rows, first, last, first - result_begin))
        return tuple(tiles)


@dataclasses.dataclass(frozen=True)
class SampleTiling:
    """Tiling of the images of a network.

    Attributes:
        axes: Tiling along each axis with more than one row.
        draws: Layers, with their classes, that draw random numbers, which differ between tiles.
    """

    axes: tuple[AxisTiling, ...]
    draws: tuple[str, ...] = ()

    def check(self, *bounds: tuple[int, int]) -> None:
        """Check that the network computes for a tile what it computes for that part of the whole image.

        Args:
            *bounds: First row, and one past the last row, along each axis.

        Raises:
            ValueError: For a wrong tile, with the first wrong axis and the nearest valid values.
        """
        for axis, (begin, end) in zip(self.axes, bounds, strict=True):
            axis.check(begin, end)

    def tiles(self, sizes: Sequence[int], tile_sizes: Sequence[int]) -> tuple[tuple[SampleTile, ...], ...]:
        """Return all tiles of an image, each as a tuple of tiles along the axes, in row-major order.

        Args:
            sizes: Size of the image along each axis.
            tile_sizes: Size of each tile along each axis, with its halo.

        Raises:
            ValueError: As `AxisTiling.tiles`.
        """
        along = [axis.tiles(*pair) for axis, *pair in zip(self.axes, sizes, tile_sizes, strict=True)]
        return tuple(itertools.product(*along))

    def split(self, sizes: Sequence[int], parts: Sequence[int]) -> tuple[tuple[SampleTile, ...], ...]:
        """Return a given number of tiles of the smallest size, in row-major order.

        Args:
            sizes: Size of the image along each axis.
            parts: Number of tiles along each axis.

        Raises:
            ValueError: As `AxisTiling.split`.
        """
        along = [axis.split(*pair) for axis, *pair in zip(self.axes, sizes, parts, strict=True)]
        return tuple(itertools.product(*along))


def sample_tiling(model: Any, size: int | Sequence[int] | None = None, training: bool = False) -> SampleTiling:
    """Return the tiling with which a model can run on tiles of an image as images of their own.

    The model is traced, not run. The op rules then tell which rows each operation needs.

    Args:
        model: A Keras model with one image and one result, without padding.
        size: Rows of an image to trace the model for: one number for all free axes, or one per axis. The smallest
            tensor of the model should have ten rows or more. Defaults to the first size from 1024 on that the model
            accepts.
        training: Whether to trace the model in training mode, which changes normalisation and dropout.

    Returns:
        The halo, the alignment and the valid sizes along each axis.

    Raises:
        RewriteError: If an operation pads, mixes rows of the whole image, or has no rule.
        ValueError: If the model has a fixed size that is not valid, or does not run on `size`.
    """
    if len(getattr(model, "inputs", None) or ()) != 1 or len(model.outputs) != 1:
        raise ValueError(
            f"`model` must be a functional Keras model with one image and one result. Received: model={model!r}. Wrap "
            "a subclassed model: keras.Model(image, model(image))."
        )
    traced, draws = _first_that_runs(model, size, training)
    wasteful = {dim: view for dim, view in zip(traced.dims, traced.views, strict=True) if view.wasteful}
    left_open = _open_dimensions(model)
    for dim, view in wasteful.items():
        if dim not in left_open:
            raise ValueError(
                f"`model` has a fixed size of {view.extent} rows, of which {view.wasteful} drops the last ones, so "
                f"that tiles would have other results. Received: model={model!r}. Build it for {view.admissible} or "
                f"{view.admissible + view.alignment} rows, the nearest sizes without a remainder."
            )
    if wasteful:
        fitting = {dim: view.admissible for dim, view in zip(traced.dims, traced.views, strict=True)}
        traced, draws = _field(model, [fitting.get(dim, 1) for dim in left_open], training)
    return SampleTiling(tuple(map(_axis_tiling, traced.axes, traced.dims, traced.views)), draws)


def _axis_tiling(axis: int, dim: int, view: Any) -> AxisTiling:
    halo = math.ceil(view.extent - view.scale * view.out_extent)
    first, end = view.needs
    before = first + (halo - first - (view.extent - end)) // 2  # The cropped rows, and half of the remaining halo.
    smallest_result = view.out_extent - int((view.extent - view.smallest) / view.scale)
    return AxisTiling(axis, before, halo - before, view.alignment, view.scale, view.smallest, smallest_result, dim)


def _open_dimensions(model: Any) -> list[int]:
    """Return the free dimensions of the image, without the batch."""
    return [dim for dim, rows in enumerate(model.inputs[0].shape) if dim and rows is None]


def _first_that_runs(model: Any, size: int | Sequence[int] | None, training: bool) -> tuple[Any, tuple[str, ...]]:
    """Return the receptive field and the random layers of a model, by default for the first size that it accepts."""
    left_open = _open_dimensions(model)
    if size is None:
        last_rows = FIRST_PROBED_ROWS + (MAX_PROBED_SIZES if left_open else 1)
        sizes = [[rows] * len(left_open) for rows in range(FIRST_PROBED_ROWS, last_rows)]
        tried = f"Tried: {FIRST_PROBED_ROWS} to {last_rows - 1} rows. Pass a `size` that the model accepts."
        if not left_open:
            shape = tuple(model.inputs[0].shape)[1:]
            tried = f"Tried: an image of shape {shape}. Call the model on one to find the cause."
    else:
        sizes = [[int(rows) for rows in size] if isinstance(size, Sequence) else [int(size)] * len(left_open)]
        tried = f"Received: size={size!r}."
        if len(sizes[0]) != len(left_open):
            needed = f"needs {len(left_open)} numbers, one for each free dimension"
            raise ValueError(f"`size` {needed if left_open else 'must be None for an image of fixed size'}. {tried}")
    for rows in sizes:
        try:
            return _field(model, rows, training)
        except ValueError as error:  # Keras raises it for shapes that do not fit together.
            last = error
    raise ValueError(f"`model` cannot be traced. {tried} Keras's error: {' '.join(str(last).split())}") from last


def _field(model: Any, rows: Sequence[int], training: bool) -> tuple[Any, tuple[str, ...]]:
    """Return the `ReceptiveField` of the model for an image, and the layers that draw random numbers."""
    # Imported here, because the formulas of a paper need no TensorFlow, whose import takes seconds.
    import tensorflow as tf

    from rewriters.analysis.autodiff_roles import is_random
    from rewriters.analysis.graph_analysis import GraphAnalysis
    from rewriters.analysis.receptive_field import ReceptiveField
    from rewriters.canonicalize.canonicalize import read_canonical
    from tflms_sft._trace.layer_names import part_name, recorded_layers

    image = model.inputs[0]
    shape = [1, *image.shape[1:]]
    for dim, length in zip(_open_dimensions(model), rows, strict=True):
        shape[dim] = length
    step = tf.function(lambda images: model(images, training=training), autograph=False)
    with recorded_layers() as record:
        traced = step.get_concrete_function(tf.TensorSpec(shape, image.dtype))
    record.finish(traced.graph)
    graph = read_canonical(traced)
    draws = (part_name(record, node.name) or f"`{node.name}`" for node in graph.nodes.values() if is_random(node))
    return ReceptiveField(GraphAnalysis(graph), graph.inputs[0], graph.outputs[0]), tuple(dict.fromkeys(draws))
