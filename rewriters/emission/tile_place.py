"""Emits the place of a tile: its index along each axis, its images, and its rows in full-size tensors."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.emission.buffers import Span
from rewriters.emission.file_buffers import FileBuffers
from rewriters.emission.loop_tensors import BATCH_DIM
from rewriters.ir.device_model import DeviceModel
from rewriters.ir.graph import Tensor
from rewriters.tiling.tile_planner import Region, TileLoop

__all__: list[str] = []


class LoopContext(Protocol):
    """The loop, as its tiles and outputs see it.

    Attributes:
        analysis: Analysis of the step.
        device: The device.
        tile_loop: The planned loop.
        batch: Batch size, an integer or a scalar tensor.
        batch_tiles: Number of tiles along the batch, an integer or a scalar tensor.
        files: Rule that selects the results in files; `None` if all are in memory.
        in_files: Results in files.
    """

    analysis: GraphAnalysis
    device: DeviceModel
    tile_loop: TileLoop
    batch: Any
    batch_tiles: Any
    files: FileBuffers | None
    in_files: Set[Tensor]


class TilePlace:
    """The place of one tile.

    Args:
        loop: The loop.
        index: Index of the tile, a scalar tensor.

    Attributes:
        index: Index of the tile.
        indices: Its index along each axis.
        batch_span: Its images; `None` for the full batch.
    """

    def __init__(self, loop: LoopContext, index: Any) -> None:
        self.index = index
        self.indices: list[Any] = []
        self._analysis = loop.analysis
        # Emitted ops by their arguments, so that equal ones are emitted once.
        self._lookups: dict[tuple[int, bytes], Any] = {}
        for count in reversed(loop.tile_loop.grid.spatial):
            self.indices.insert(0, index % count if count > 1 else 0)
            index = index // count if count > 1 else index
        self.batch_span: Span = None
        if loop.tile_loop.grid.batch != 1:
            begin = index * loop.batch // loop.batch_tiles
            self.batch_span = (begin, (index + 1) * loop.batch // loop.batch_tiles - begin)

    def lookup(self, values: np.ndarray, axis: int) -> Any:
        """Return this tile's element of a vector over the tiles of an axis; a constant if all elements agree."""
        values = np.asarray(values, np.int32)
        if np.all(values == values[0]):
            return int(values[0])
        key = (axis, values.tobytes())
        if key not in self._lookups:
            with tf.control_dependencies(None):  # Later ops share it.
                # On a GPU `GatherV2` reads int32 from the GPU's memory, and consumers wait for the copy to the host.
                self._lookups[key] = tf.constant(values)[self.indices[axis]]
        return self._lookups[key]

    def spans(self, tensor: Tensor, region: Region) -> list[Span]:
        """Return the place of this tile's region in the full-size tensor."""
        assert tensor.shape is not None
        spans: list[Span] = [None] * len(tensor.shape)
        if tensor.shape[BATCH_DIM] != 1:
            spans[BATCH_DIM] = self.batch_span
        places = zip(self.dims(tensor), region, self.extents(tensor), strict=True)
        for axis, (dim, interval, extent) in enumerate(places):
            if dim is not None and not (np.all(interval.lo == 0) and np.all(interval.hi == extent)):
                spans[dim] = (self.lookup(interval.lo, axis), self.lookup(interval.size, axis))
        return spans

    def spans_in(self, tensor: Tensor, *, have: Region, rows: Region) -> list[Span]:
        """Return the place of `rows` in a part of a tensor that holds `have`."""
        spans: list[Span] = [None] * len(tensor.shape or ())
        for axis, (dim, held, part) in enumerate(zip(self.dims(tensor), have, rows, strict=True)):
            if dim is not None and not held.same(part):
                spans[dim] = (self.lookup(part.lo - held.lo, axis), self.lookup(part.size, axis))
        return spans

    def image_spans(self, tensor: Tensor) -> list[Span]:
        """Return the place of this tile's images in a tensor with a result for each image."""
        assert tensor.shape is not None
        return [self.batch_span, *([None] * (len(tensor.shape) - 1))]

    def dims(self, tensor: Tensor) -> tuple[int | None, ...]:
        """Return the index of the dimension of each spatial axis; `None` for an axis that the tensor lacks."""
        layout = self._analysis.layouts.of(tensor)
        assert layout is not None
        return layout.dims

    def extents(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the rows of a full-size tensor along each axis."""
        extents = self._analysis.extents(tensor)
        assert extents is not None and None not in extents
        return extents  # type: ignore[return-value]
