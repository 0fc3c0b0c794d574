"""Memory of one iteration of a tile loop, from its program.

A tile at the border is padded and a tile inside is larger, so that each tile has its own sizes. Of tensors in files,
the pages that an iteration reads or writes stay in memory until it ends.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.device.allocator import ExactAllocator, pools
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
from rewriters.emission.loop_program import (
    Accumulate,
    AddRows,
    Carry,
    Fit,
    Instruction,
    Join,
    MergeMoments,
    Output,
    Part,
    Receive,
    Reduce,
    Run,
    Save,
    Slice,
    Write,
)
from rewriters.emission.lowering import lower
from rewriters.ir.graph import PER_PIXEL, Node, Tensor
from rewriters.ir.region_reads import NUM_BUFFERED_REGIONS, is_region_read
from rewriters.tiling.tile_planner import Region, TileLoop

__all__: list[str] = []

R = TypeVar("R")

MAX_STATES = 3
"""States of the memory in which an iteration of a search's candidate is tried; peaks of the others differ little."""

Tile = tuple[int, ...]
"""Index of a tile along each spatial axis."""


def loop_iterations(
    analysis: GraphAnalysis, tile_loop: TileLoop, batch: int, files: FileBuffers | None = None
) -> list[IterationTrace]:
    """Return traces of iterations that together meet every border of the image, in the order of the loop."""
    model = IterationModel(analysis, tile_loop, files)
    marks = [sorted({0, count // 2, count - 1}) for count in tile_loop.grid.spatial]
    traces = (model.events(tile, batch) for tile in itertools.product(*marks))
    return [IterationTrace(events, with_delayed_frees(events)) for events in traces]


def iteration_peak_bytes(
    analysis: GraphAnalysis, tile_loop: TileLoop, batch: int, files: FileBuffers | None = None
) -> int:
    """Return the peak of one iteration in bytes, without the buffers and the full-size operands of the loop."""
    model = IterationModel(analysis, tile_loop, files)
    tiles = {tuple(0 for _ in tile_loop.grid.spatial), tuple(count // 2 for count in tile_loop.grid.spatial)}
    return max(peak_bytes_of(model.events(tile, batch), ExactAllocator()) for tile in tiles)


def iteration_allocated_bytes(
    analysis: GraphAnalysis, tile_loop: TileLoop, batch: int, files: FileBuffers | None = None
) -> int:
    """Return the bytes that the device's allocator takes for one iteration at most, alone in its memory.

    TensorFlow's allocator may give a tensor twice its size. Few large tensors take up to twice their bytes.
    """
    model = IterationModel(analysis, tile_loop, files)
    tiles = {tuple(0 for _ in tile_loop.grid.spatial), tuple(count // 2 for count in tile_loop.grid.spatial)}
    traces = [model.events(tile, batch) for tile in tiles]
    exact = max(peak_bytes_of(events, ExactAllocator()) for events in traces)
    states = itertools.islice(pools(analysis.graph.device, max(2 * exact, 1)), MAX_STATES)
    return max(exact, *(peak_bytes_of(events, pool) for pool in states for events in traces))


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
        analysis: Analysis of the step.
        files: Rule that selects the tensors in files; `None` if all are in memory.
    """

    def __init__(self, analysis: GraphAnalysis, files: FileBuffers | None = None) -> None:
        self._analysis = analysis
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

    def allocated_bytes(self, tile_loop: TileLoop, batch: int) -> int:
        """Return `iteration_allocated_bytes`."""
        return self._cached(iteration_allocated_bytes, tile_loop, batch)

    def _cached(self, function: Callable[..., R], tile_loop: TileLoop, batch: int) -> R:
        results, key = self._results.setdefault(tile_loop, {}), (function.__name__, batch)
        if key not in results:
            results[key] = function(self._analysis, tile_loop, batch, self._files)
        return results[key]


class IterationModel:
    """Instructions of an iteration as stand-in nodes, with the rows of their results for every tile.

    Args:
        analysis: Analysis of the step.
        tile_loop: The loop.
        files: Rule that selects the tensors in files; `None` if all are in memory.

    Attributes:
        order: Stand-in nodes in the order in which they run.
        originals: Op that each of them stands for; those of other instructions stand for themselves.
        ends: Stand-ins of the tensors that live until the iteration ends.
    """

    def __init__(self, analysis: GraphAnalysis, tile_loop: TileLoop, files: FileBuffers | None = None) -> None:
        self.tile_loop = tile_loop
        self._device = analysis.graph.device
        self._files = files
        self.order: list[Node] = []
        self.originals: list[Node] = []
        self.ends: list[Tensor] = []
        self._rows: dict[Tensor, tuple[np.ndarray, ...]] = {}
        self._pixel_bytes: dict[Tensor, int] = {}
        self._images: dict[Tensor, int | None] = {}
        # For each crop or pad and axis, the tiles in which it changes nothing.
        self._unchanged: dict[Node, tuple[np.ndarray, ...]] = {}
        self._values: dict[Part, Tensor] = {}
        # Operands of the stand-ins of ops, those included that are read in full.
        self._operands: dict[Node, list[Tensor]] = {}
        program = lower(analysis, tile_loop)
        # Carried rows are alive from the beginning of the iteration. Saved rows are read when an op needs them.
        received = [one for one in program.instructions if isinstance(one, Receive) and one.carry.saved is None]
        for instruction in (*received, *program.instructions):
            self._add(instruction)
        for output in program.outputs:
            self._add_output(output)

    # Instructions --------------------------------------------------------------------------------------------

    def _add(self, instruction: Instruction) -> None:
        """Append the nodes of an instruction; those of an early `Receive` exist already."""
        match instruction:
            case Run():
                self._add_op(instruction)
            case Slice(result=part):
                self._values[part] = self._slice(part, instruction.is_full)
            case Receive(result=part) if part not in self._values:
                self._values[part] = self._helper("StridedSlice", part, ())
            case Fit(result=part):
                self._values[part] = self._fitted(instruction)
            case Join(result=part, padded=changed, received=rows) | AddRows(result=part, part=changed, received=rows):
                # The rows are written into memory that exists.
                self._values[part] = self._helper("Identity", part, [self._values[changed], self._values[rows]])
            case Receive():
                pass
            case _:
                raise TypeError(instruction)

    def _add_output(self, output: Output) -> None:
        match output:
            case Write(part=part):
                self.ends.append(self._values[part])
                self._add_pages(part)
            case Accumulate(part=part, is_full=is_full):
                self.ends.append(self._accumulated(part, is_full))
            case MergeMoments(part=part):
                self._helper("SquaredDifference", part, [self._values[part]])
            case Carry(part=part):
                self.ends.append(self._values[part])
            case Reduce() | Save():  # Sums over the tile are small, and saved rows are written when they exist.
                pass
            case _:
                raise TypeError(output)

    def _add_op(self, run: Run) -> None:
        node = run.node
        operands = [self._values[operand] for operand in run.operands if isinstance(operand, Part)]
        copy = Node(node.name, node.op, operands, outputs=node.outputs)
        self._operands[copy] = [
            self._values[operand] if isinstance(operand, Part) else tensor
            for operand, tensor in zip(run.operands, node.inputs, strict=True)
        ]
        plan = self.tile_loop.plans[node]
        if plan[0].kept is None:
            self._append(copy, node, None)
            self._add_casts_of_sums(node, copy)
        else:
            self._append(copy, node, (p.computed.size for p in plan if p.computed is not None))
        for index, part in enumerate(run.results):
            if part is not None:
                self._values[part] = copy.out(index)

    def _add_casts_of_sums(self, node: Node, copy: Node) -> None:
        """Append the parts of sums in half precision as they are added, in float32."""
        for index, (dtype, shape) in enumerate(node.outputs):
            state = loop_state_dtype(self.tile_loop, node.out(index))
            if state != dtype:
                cast = Node(f"{node.name}/{index}/Cast", "Cast", [copy.out(index)], outputs=[(state, shape)])
                self._append(cast, cast, None)

    def _slice(self, part: Part, is_full: bool) -> Tensor:
        op = part.tensor.node.op
        if is_region_read(part.tensor.node):
            value, *ahead = (self._helper(op, part, ()) for _ in range(NUM_BUFFERED_REGIONS))
            self.ends += ahead
            return value
        self._add_pages(part)
        return self._helper("Placeholder" if is_full else "StridedSlice", part, ())

    def _add_pages(self, part: Part) -> None:
        """Append the pages of a region if its tensor lies in a file."""
        if self._files is not None and self._files.holds(part.tensor):
            self.ends.append(self._helper("Pages", part, ()))

    def _fitted(self, change: Fit) -> Tensor:
        """Append a crop and a pad; in a tile where they change nothing, their kernels forward the operand's buffer."""
        assert change.part.region is not None and change.result.region is not None
        result = self._values[change.part]
        if any(axis.crops for axis in change.changes):
            cropped = [axis.size for axis in change.changes]
            result = self._helper("StridedSlice", change.part, [result], cropped)
            self._unchanged[result.node] = _equal_sizes(cropped, change.part.region)
        if any(axis.pads for axis in change.changes):
            result = self._helper("PadV2", change.result, [result])
            self._unchanged[result.node] = _equal_sizes([axis.size for axis in change.changes], change.result.region)
        return result

    def _accumulated(self, part: Part, is_full: bool) -> Tensor:
        """Append the sum of a part of a gradient and the slice of the full-size gradient."""
        tensor = part.tensor
        total = self._slice(part, is_full)
        result = self._helper("AddV2", part, [total, self._values[part]])
        scale = loop_state_dtype(self.tile_loop, tensor).size // tensor.dtype.size
        for summand in (total, result):
            self._pixel_bytes[summand] *= scale
        return result

    def _append(self, node: Node, original: Node, rows: Iterable[np.ndarray] | None) -> None:
        """Append a stand-in whose results have `rows` along each axis; `None` for results of constant size."""
        self.order.append(node)
        self.originals.append(original)
        if rows is not None:
            sizes = tuple(rows)
            for index in range(len(node.outputs)):
                self._set_rows(node.out(index), original.out(index), sizes)

    def _helper(
        self, op: str, part: Part, operands: Sequence[Tensor], rows: Iterable[np.ndarray] | None = None
    ) -> Tensor:
        """Append an op that the emission adds, whose result has the pixels of `part` and its rows, or other `rows`."""
        like, region = part.tensor, part.region
        outputs = [like.node.outputs[like.index]]
        node = Node(f"{op}/{like.name}/{len(self.order)}", op, operands, outputs=outputs)
        self._append(node, node, None)
        assert region is not None
        self._set_rows(node.out(), like, tuple(rows or (i.size for i in region)))
        return node.out()

    def _set_rows(self, tensor: Tensor, original: Tensor, rows: tuple[np.ndarray, ...]) -> None:
        self._rows[tensor] = rows
        self._pixel_bytes[tensor] = self._bytes_of_pixel(original)
        self._images[tensor] = self._known_images(original)

    # Sizes ---------------------------------------------------------------------------------------------------

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
                operand_bytes = list(map(num_bytes, self._operands[node]))
                scratch[node] += product_scratch(original, operand_bytes, result_bytes, self._device)
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


def _equal_sizes(sizes: Sequence[np.ndarray], region: Region) -> tuple[np.ndarray, ...]:
    """Return for each axis the tiles in which rows of some sizes are as many as those of a region."""
    return tuple(size == rows.size for size, rows in zip(sizes, region, strict=True))
