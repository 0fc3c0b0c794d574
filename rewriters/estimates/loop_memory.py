"""Memory of one iteration of a tile loop.

The model of an iteration holds the body of the planned loop and the ops that the emission adds: slices of full-size
tensors, cropped and padded operands, sums into full-size gradients. A tile at the border is padded and a tile inside is
larger, so that each tile has its own sizes. Of tensors in files, the pages that an iteration reads or writes stay in
memory until it ends.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from rewriters.device.allocator import ExactAllocator
from rewriters.device.kernel_scratch import (
    KernelShape,
    is_convolution,
    may_take_scratch,
    product_scratch,
    scratch_bytes,
    slid_over,
    softmax_scratch,
)
from rewriters.device.op_buffers import forwards_input_buffer
from rewriters.device.peak_memory import (
    AllocationEvent,
    IterationTrace,
    concurrent_scratch,
    peak_bytes_of,
    schedule,
    with_delayed_frees,
    worst_kernel,
)
from rewriters.emission.file_buffers import FileBuffers
from rewriters.emission.loop_outputs import loop_state_dtype
from rewriters.emission.loop_tensors import repeated_number
from rewriters.ir.device_model import DeviceModel
from rewriters.ir.graph import PER_PIXEL, Node, Tensor
from rewriters.ir.region_reads import NUM_BUFFERED_REGIONS, is_region_read
from rewriters.rules.intervals import Interval, fit
from rewriters.tiling.barrier_levels import MomentPair
from rewriters.tiling.tile_planner import Region, TileLoop, covers, with_rows

__all__: list[str] = []

R = TypeVar("R")

Tile = tuple[int, ...]
"""Index of a tile along each spatial axis."""


def loop_iterations(
    tile_loop: TileLoop, batch: int, device: DeviceModel, files: FileBuffers | None = None
) -> list[IterationTrace]:
    """Return traces of iterations that together meet every border of the image, in the order of the loop."""
    model = IterationModel(tile_loop, device, files)
    marks = [sorted({0, count // 2, count - 1}) for count in tile_loop.grid.spatial]
    traces = (model.events(tile, batch) for tile in itertools.product(*marks))
    return [IterationTrace(events, with_delayed_frees(events)) for events in traces]


def iteration_peak_bytes(tile_loop: TileLoop, batch: int, device: DeviceModel, files: FileBuffers | None = None) -> int:
    """Return the peak of one iteration in bytes, without the buffers and the full-size operands of the loop."""
    model = IterationModel(tile_loop, device, files)
    tiles = {tuple(0 for _ in tile_loop.grid.spatial), tuple(count // 2 for count in tile_loop.grid.spatial)}
    return max(peak_bytes_of(model.events(tile, batch), ExactAllocator()) for tile in tiles)


def kernel_at_worst(iterations: Iterable[IterationTrace]) -> tuple[str, int]:
    """Return the op that runs at the peak of the largest iteration, and the bytes of its kernel's scratch."""
    traces = (events for iteration in iterations for events in (iteration.events, iteration.late))
    _, name, scratch = max(map(worst_kernel, traces))
    return name, scratch


Results = dict[tuple[str, int], Any]
"""Results by function and batch size."""


class IterationModelCache:
    """Memory estimates of tile loops, computed once for each loop or, where loops are bound together, each program.

    An entry lives as long as its loop. The models themselves are not cached: a search plans hundreds of loops.

    Args:
        device: The device.
        files: Rule that selects the tensors in files; `None` if all are in memory.
    """

    def __init__(self, device: DeviceModel, files: FileBuffers | None = None) -> None:
        self._device = device
        self._files = files
        self._results = weakref.WeakKeyDictionary[TileLoop, Results]()

    def bind(self, tile_loop: TileLoop, results: Results) -> None:
        """Let a loop use the results of equal loops; new results are added to `results`."""
        self._results[tile_loop] = results

    def iterations(self, tile_loop: TileLoop, batch: int) -> list[IterationTrace]:
        """Return `loop_iterations`."""
        return self._cached(loop_iterations, tile_loop, batch)

    def peak_bytes(self, tile_loop: TileLoop, batch: int) -> int:
        """Return `iteration_peak_bytes`."""
        return self._cached(iteration_peak_bytes, tile_loop, batch)

    def _cached(self, function: Callable[..., R], tile_loop: TileLoop, batch: int) -> R:
        results, key = self._results.setdefault(tile_loop, {}), (function.__name__, batch)
        if key not in results:
            results[key] = function(tile_loop, batch, self._device, self._files)
        return results[key]


class IterationModel:
    """Ops of an iteration, as stand-in nodes with the rows of their results for every tile.

    Args:
        tile_loop: The loop.
        device: The device.
        files: Rule that selects the tensors in files; `None` if all are in memory.

    Attributes:
        order: Stand-in nodes in the order in which they run.
        originals: Op that each of them stands for; helpers stand for themselves.
        ends: Stand-ins of the tensors that live until the iteration ends.
    """

    def __init__(self, tile_loop: TileLoop, device: DeviceModel, files: FileBuffers | None = None) -> None:
        self.tile_loop = tile_loop
        self._device = device
        self._files = files
        self.order: list[Node] = []
        self.originals: list[Node] = []
        self.ends: list[Tensor] = []
        self._rows: dict[Tensor, tuple[np.ndarray, ...]] = {}
        self._pixel_bytes: dict[Tensor, int] = {}
        self._images: dict[Tensor, int | None] = {}
        # For each crop or pad and axis, the tiles in which it changes nothing.
        self._unchanged: dict[Node, tuple[np.ndarray, ...]] = {}
        self._values: dict[Tensor, Tensor] = {}
        self._fits: dict[tuple[object, ...], Tensor] = {}
        self._joined: dict[Tensor, tuple[Tensor, Region]] = {}
        # Carried rows are alive from the beginning of the iteration. Saved rows are read when an op needs them.
        self._received = {
            tensor: self._rows_of(tensor, carry.received)
            for tensor, carry in tile_loop.carries.items()
            if carry.saved is None
        }
        for node in tile_loop.body:
            self._add_op(node)
        for tensor, carry in tile_loop.carries.items():
            if carry.saved is None and not self._is_gradient(tensor):
                rows = with_rows(tile_loop.regions[tensor], tile_loop.row_axis, carry.passed)
                self.ends.append(self._fitted(tensor, rows))
        for tensor in tile_loop.writes:
            self.ends.append(
                self._crop_and_pad(self._value(tensor), tile_loop.regions[tensor], tile_loop.cells[tensor])
            )
            self._add_pages(tensor, tile_loop.cells[tensor])
        for tensor in tile_loop.accumulates:
            self.ends.append(self._accumulated(tensor))
        for pair in tile_loop.moments:
            self._add_moments(pair)

    def events(self, tile: Tile, batch: int) -> list[AllocationEvent]:
        """Return the allocations and frees of the iteration of one tile, in order."""

        def alias(node: Node) -> bool:
            unchanged = self._unchanged.get(node)
            if unchanged is None:
                return forwards_input_buffer(node)
            return all(tiles[index] for tiles, index in zip(unchanged, tile, strict=True))

        def num_bytes(tensor: Tensor) -> int:
            return self._num_bytes(tensor, tile, batch)

        scratch = dict.fromkeys(self.order, 0)
        for node, original in zip(self.order, self.originals, strict=True):
            if may_take_scratch(original):
                scratch[node] = scratch_bytes(original, self._kernel_shape(original, tile, batch), self._device)
                result_bytes = num_bytes(node.out())
                scratch[node] += softmax_scratch(original, result_bytes, self._device)
                regions = iter(node.inputs)
                operands = (next(regions) if self._is_cut(original, p) else t for p, t in enumerate(original.inputs))
                scratch[node] += product_scratch(original, list(map(num_bytes, operands)), result_bytes, self._device)
        blocks = concurrent_scratch(scratch, self.originals, self._device)
        return schedule(self.order, num_bytes, blocks, self.ends, alias)

    def _num_bytes(self, tensor: Tensor, tile: Tile, batch: int) -> int:
        rows = self._rows.get(tensor)
        if rows is None or tensor.shape is None:
            return tensor.num_bytes(batch)
        pixels = math.prod(int(count[index]) for count, index in zip(rows, tile, strict=True))
        return self._max_images(self._images[tensor] or batch) * pixels * self._pixel_bytes[tensor]

    def _bytes_of_pixel(self, tensor: Tensor) -> int:
        """Return the bytes of all channels of a pixel, times the pixels that are folded into the batch."""
        layout = self.tile_loop.layouts.of(tensor)
        assert layout is not None and tensor.shape is not None
        channels = (int(tensor.shape[dim] or 1) for dim in layout.others(len(tensor.shape)))
        return layout.batch_fold * math.prod(channels) * tensor.dtype.size

    def _known_images(self, tensor: Tensor) -> int | None:
        """Return the images of a tensor: more than samples if these are folded into it, as frames of an episode are."""
        layout = self.tile_loop.layouts.of(tensor)
        assert layout is not None and tensor.shape is not None
        return None if tensor.shape[0] is None else max(tensor.shape[0] // layout.batch_fold, 1)

    def _max_images(self, images: int) -> int:
        """Return the number of images of the largest tile, from those of a tensor."""
        return -(-images // min(self.tile_loop.grid.batch, images))

    def _kernel_shape(self, node: Node, tile: Tile, batch: int) -> KernelShape:
        """Return the shape of a kernel call: of convolutions, their gradients, those of pools, and cross-entropies."""
        known = [self._known_images(t) for t in (*node.inputs, node.out()) if t in self.tile_loop.regions]
        images = self._max_images(max((count or batch for count in known), default=batch))
        plan = self.tile_loop.plans.get(node)
        if plan is not None and PER_PIXEL in node.attrs:
            rows = [p.computed.size[i] for p, i in zip(plan, tile, strict=True) if p.computed is not None]
            return KernelShape(images, math.prod(map(int, rows)), 0)
        if plan is not None and is_convolution(node):
            small, large = [p.computed for p in plan], [p.needs[0] for p in plan]
        elif plan is not None and len(plan[0].needs) == 3 and plan[0].needs[2] is not None:
            position = slid_over(node)
            small, large = (
                [p.needs[2] for p in plan],
                [p.computed if position is None else p.needs[position] for p in plan],
            )
        else:
            return KernelShape(images, 0, 0)
        windows, pixels = (
            math.prod(int(rows.size[i]) for rows, i in zip(region, tile, strict=True) if rows is not None)
            for region in (small, large)
        )
        return KernelShape(images, windows, pixels, is_tile=True)

    def _append(self, node: Node, original: Node, rows: Iterable[np.ndarray] | None) -> Tensor:
        """Append a stand-in whose results have `rows` along each axis; `None` for results of constant size."""
        self.order.append(node)
        self.originals.append(original)
        if rows is not None:
            sizes = tuple(rows)
            for index in range(len(node.outputs)):
                self._rows[node.out(index)] = sizes
                self._pixel_bytes[node.out(index)] = self._bytes_of_pixel(original.out(index))
                self._images[node.out(index)] = self._known_images(original.out(index))
        return node.out()

    def _helper(self, op: str, like: Tensor, operands: Sequence[Tensor], rows: Iterable[np.ndarray]) -> Tensor:
        """Append an op that the emission adds, whose result has the pixels of `like`."""
        outputs = [like.node.outputs[like.index]]
        node = Node(f"{op}/{like.name}/{len(self.order)}", op, operands, outputs=outputs)
        self._append(node, node, None)
        self._rows[node.out()] = tuple(rows)
        self._pixel_bytes[node.out()] = self._pixel_bytes.get(like) or self._bytes_of_pixel(like)
        self._images[node.out()] = self._images[like] if like in self._images else self._known_images(like)
        return node.out()

    def _value(self, tensor: Tensor) -> Tensor:
        """Return the stand-in of the rows that the iteration holds; slice full-size tensors when first needed."""
        if tensor not in self._values:
            self._values[tensor] = self._slice(tensor, self.tile_loop.regions[tensor])
        return self._values[tensor]

    def _slice(self, tensor: Tensor, region: Region) -> Tensor:
        layout = self.tile_loop.layouts.of(tensor)
        assert layout is not None
        if is_region_read(tensor.node):
            value, *ahead = (
                self._helper(tensor.node.op, tensor, (), (i.size for i in region)) for _ in range(NUM_BUFFERED_REGIONS)
            )
            self.ends += ahead
            return value
        self._add_pages(tensor, region)
        is_full = all(np.all(i.size == extent) for i, extent in zip(region, layout.extents(tensor), strict=True))
        is_argument = is_full and self.tile_loop.grid.batch == 1 and repeated_number(tensor) is None
        op = "Placeholder" if is_argument else "StridedSlice"
        return self._helper(op, tensor, (), (i.size for i in region))

    def _add_pages(self, tensor: Tensor, region: Region) -> None:
        """Append the pages of a region if the tensor lies in a file."""
        if self._files is not None and self._files.holds(tensor):
            self.ends.append(self._helper("Pages", tensor, (), (i.size for i in region)))

    def _add_op(self, node: Node) -> None:
        plan = self.tile_loop.plans[node]
        operands = []
        meets_gradient = any(t in self.tile_loop.regions and self._is_gradient(t) for t in node.inputs)
        for position, tensor in enumerate(node.inputs):
            need = tuple(p.needs[position] for p in plan)
            if self._is_cut(node, position):
                operands.append(self._fitted(tensor, need, meets_gradient))  # type: ignore[arg-type]
        copy = Node(node.name, node.op, operands, outputs=node.outputs)
        if plan[0].kept is None:
            self._append(copy, node, None)
            self._add_casts_of_sums(node, copy)
            return
        computed: Region = tuple(p.computed for p in plan)  # type: ignore[misc]
        tile_rows: Region = tuple(p.kept for p in plan)  # type: ignore[misc]
        self._append(copy, node, (i.size for i in computed))
        for index in range(len(node.outputs)):
            tensor = node.out(index)
            if tensor in self.tile_loop.reads:
                continue
            if tensor in self.tile_loop.carries and self._is_gradient(tensor):
                self._values[tensor] = self._finished(tensor, copy.out(index), computed)
            else:
                self._values[tensor] = self._crop_and_pad(copy.out(index), computed, tile_rows)

    def _add_casts_of_sums(self, node: Node, copy: Node) -> None:
        """Append the parts of sums in half precision as they are added, in float32."""
        for index, (dtype, shape) in enumerate(node.outputs):
            state = loop_state_dtype(self.tile_loop, node.out(index))
            if state != dtype:
                cast = Node(f"{node.name}/{index}/Cast", "Cast", [copy.out(index)], outputs=[(state, shape)])
                self._append(cast, cast, None)

    def _is_cut(self, node: Node, position: int) -> bool:
        """Return whether an op reads rows of an operand; otherwise it reads an operand of constant size."""
        plan = self.tile_loop.plans.get(node)
        return (
            plan is not None and node.inputs[position] in self.tile_loop.regions and plan[0].needs[position] is not None
        )

    def _is_gradient(self, tensor: Tensor) -> bool:
        """Return whether the rows of a tensor may be partial sums."""
        return tensor not in self.tile_loop.values

    def _rows_of(self, tensor: Tensor, rows: Interval) -> Tensor:
        region = with_rows(self.tile_loop.regions[tensor], self.tile_loop.row_axis, rows)
        return self._helper("StridedSlice", tensor, (), (i.size for i in region))

    def _fitted(self, tensor: Tensor, need: Region, meets_gradient: bool = False) -> Tensor:
        """Return the rows of a tensor that an op needs.

        Of a carried tensor, the received halo rows are written into the padding of the computed rows. An op that also
        reads a gradient reuses the rows assembled for an earlier op.
        """
        if meets_gradient and tensor in self._joined:
            value, have = self._joined[tensor]
            if covers(have, need):
                return self._crop_and_pad(value, have, need)
        value, have = self._value(tensor), self.tile_loop.regions[tensor]
        carry = self.tile_loop.carries.get(tensor)
        if carry is None or self._is_gradient(tensor):
            result = self._crop_and_pad(value, have, need)
            may_join = not self._is_gradient(tensor) and tensor not in self.tile_loop.reads
            if self.tile_loop.carries and may_join and not covers(have, need):
                self._joined.setdefault(tensor, (result, need))
            return result
        if tensor not in self._received:
            self._received[tensor] = self._rows_of(tensor, carry.received)
        axis = self.tile_loop.row_axis
        computed = with_rows(have, axis, Interval(carry.received.hi, have[axis].hi))
        result = self._crop_and_pad(value, computed, need)
        if np.any((need[axis].lo < carry.received.hi) & (need[axis].size > 0)):
            result = self._helper("Identity", result, [result, self._received[tensor]], self._rows[result])
            self._joined.setdefault(tensor, (result, need))
        return result

    def _finished(self, tensor: Tensor, value: Tensor, computed: Region) -> Tensor:
        """Return the rows of a gradient that the iteration completes; the rows that it passes on stay alive."""
        carry, region = self.tile_loop.carries[tensor], self.tile_loop.regions[tensor]
        passed = self._crop_and_pad(value, computed, with_rows(region, self.tile_loop.row_axis, carry.passed))
        if passed != value:
            self.ends.append(passed)
        return self._crop_and_pad(value, computed, region)

    def _add_moments(self, pair: MomentPair) -> None:
        """Append the slice of the image, and its squared differences from the mean."""
        cell = self.tile_loop.cells[pair.image]
        image = self._crop_and_pad(self._value(pair.image), self.tile_loop.regions[pair.image], cell)
        self._helper("SquaredDifference", pair.image, [image], (i.size for i in cell))

    def _crop_and_pad(self, value: Tensor, have: Region, need: Region) -> Tensor:
        """Append a crop and a pad; in a tile where they change nothing, their kernels forward the operand's buffer."""
        if all(h.same(n) for h, n in zip(have, need, strict=True)):
            return value
        key = (value, *(i.key for i in (*have, *need)))
        if key not in self._fits:
            fits = [fit(h, n) for h, n in zip(have, need, strict=True)]
            result = value
            if any(change.crops for change in fits):
                result = self._helper("StridedSlice", value, [result], (change.size for change in fits))
                self._unchanged[result.node] = tuple(
                    change.size == h.size for change, h in zip(fits, have, strict=True)
                )
            if any(change.pads for change in fits):
                result = self._helper("PadV2", value, [result], (n.size for n in need))
                self._unchanged[result.node] = tuple(
                    change.size == n.size for change, n in zip(fits, need, strict=True)
                )
            self._fits[key] = result
        return self._fits[key]

    def _accumulated(self, tensor: Tensor) -> Tensor:
        """Append the sum of a part of a gradient and the slice of the full-size gradient."""
        rows = [i.size for i in self.tile_loop.regions[tensor]]
        total = self._slice(tensor, self.tile_loop.regions[tensor])
        result = self._helper("AddV2", tensor, [total, self._value(tensor)], rows)
        scale = loop_state_dtype(self.tile_loop, tensor).size // tensor.dtype.size
        for part in (total, result):
            self._pixel_bytes[part] = scale * self._bytes_of_pixel(tensor)
        return result
