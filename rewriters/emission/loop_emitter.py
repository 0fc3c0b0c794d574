"""Emits a planned tile loop as TensorFlow ops: one `tf.while_loop` over the tiles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from rewriters.analysis import summation_order
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.device.kernel_audit import reads_gpu_memory
from rewriters.device.kernel_scratch import ConcurrencyGroup, takes_memory
from rewriters.device.merged_kernels import may_fuse_with_consumer
from rewriters.device.op_buffers import forwards_input_buffer
from rewriters.emission.buffers import DeviceBuffer, Span, corner_and_size, host_scalar, stacked, static_sizes
from rewriters.emission.file_buffers import FileBuffers, return_pages
from rewriters.emission.loop_tensors import (
    BATCH_DIM,
    batch_source,
    loop_input_tensors,
    loop_operand,
    loop_output_tensors,
    real_number,
    repeated_number,
)
from rewriters.emission.output_selection import outputs_of
from rewriters.emission.row_carries import CarriedState, finish_gradient_rows, joined, received
from rewriters.emission.while_loop import emit_while_loop
from rewriters.errors import RewriteError
from rewriters.ir import tf_internals
from rewriters.ir.graph import Node, Tensor
from rewriters.ir.region_reads import is_region_read
from rewriters.rules.intervals import CropPad, Interval, fit
from rewriters.rules.registry import TileKind, find_rule
from rewriters.tiling.row_frontiers import CarriedRows
from rewriters.tiling.segment import Segment
from rewriters.tiling.tile_planner import IterationOrder, Region, TileLoop, covers, with_rows

__all__: list[str] = []


def is_awaited(analysis: GraphAnalysis, node: Node) -> bool:
    """Return whether slices, crops and pads of an op's other operands wait for an operand that `node` computes."""
    # A control edge from a sum would change the order of summation.
    return node in analysis.backward and not summation_order.may_be_flattened(analysis, node)


def trace_loop(analysis: GraphAnalysis, segment: Segment, tile_loop: TileLoop, files: FileBuffers | None = None) -> Any:
    """Return a function graph that computes `loop_output_tensors` from `loop_input_tensors`."""
    inputs = loop_input_tensors(tile_loop, segment)
    specs = [tf.TensorSpec(t.shape, t.dtype) for t in inputs]

    def build(*args: Any) -> list[Any]:
        outer = dict(zip(inputs, args, strict=True))
        return LoopEmitter(analysis, segment, tile_loop=tile_loop, outer=outer, files=files).run()

    return tf_internals.trace_func_graph(f"{segment.name}_{tile_loop.name}", build, specs)


class LoopEmitter:
    """Emits the `tf.while_loop`: its state variables, its iterations and its results.

    Args:
        analysis: Analysis of the step.
        segment: Segment of the loop.
        tile_loop: The planned loop.
        outer: Symbolic value of each tensor that the loop reads.
        files: Rule that selects the results in files; `None` to hold all in memory.

    Attributes:
        device: The device.
        batch: Batch size, an integer or a scalar tensor.
        batch_tiles: Number of tiles along the batch, an integer or a scalar tensor.
        num_iterations: Number of tiles, an integer or a scalar tensor.
    """

    def __init__(
        self,
        analysis: GraphAnalysis,
        segment: Segment,
        *,
        tile_loop: TileLoop,
        outer: dict[Tensor, Any],
        files: FileBuffers | None = None,
    ) -> None:
        self.analysis = analysis
        self.device = analysis.graph.device
        self.segment = segment
        self.tile_loop = tile_loop
        self.outer = {tensor: self._sliceable(tensor, value) for tensor, value in outer.items()}
        self.batch = self._batch_size()
        self.batch_tiles = 1 if tile_loop.grid.batch == 1 else tf.minimum(tile_loop.grid.batch, self.batch)
        self.num_iterations = self.batch_tiles * int(np.prod(tile_loop.grid.spatial))
        self.files = files
        self.in_files = frozenset() if files is None else files.results(tile_loop)

    def _sliceable(self, tensor: Tensor, value: Any) -> Any:
        """Return a full-size tensor in a type whose slices stay in the GPU's memory, if all ops read it there.

        Kernels for slices of int32 read host memory, from which each iteration would copy its part of a label map.
        """
        consumers = [node for node in self.tile_loop.body if tensor in node.inputs]
        is_sliced = tensor in self.tile_loop.reads and tensor not in self.tile_loop.invariants
        in_gpu_memory = is_sliced and all(reads_gpu_memory(self.analysis.graph, node, tensor) for node in consumers)
        return tf.bitcast(value, tf.uint32) if tensor.dtype == tf.int32 and in_gpu_memory else value

    def _batch_size(self) -> Any:
        source = batch_source(self.tile_loop, self.segment)
        if source is None:
            return max(int(tensor.shape[BATCH_DIM] or 1) for tensor in self.tile_loop.writes if tensor.shape)
        value = self.outer[loop_operand(source)]
        static = value.shape[BATCH_DIM]
        return static if static is not None else tf.shape(value)[BATCH_DIM]

    def run(self) -> list[Any]:
        """Emit the loop; return its results in the dtypes of the original tensors."""
        outputs = outputs_of(self.analysis, self.tile_loop)
        states = [output.initial(self) for output in outputs]

        def iterate(index: Any, values: list[list[Any]]) -> list[list[Any]]:
            groups = list(zip(outputs, values, strict=True))
            carried = {output.tensor: group[0] for output, group in groups if isinstance(output, CarriedState)}
            iteration = IterationEmitter(self, index, carried)
            iteration.run()
            return self._with_pages_returned([output.update(iteration, group) for output, group in groups])

        values = emit_while_loop(self.num_iterations, states, iterate, self.tile_loop.order)
        results: dict[Tensor, Any] = {}
        for output, group in zip(outputs, values, strict=True):
            results.update(zip(output.tensors, output.final(group), strict=True))
        return [results[tensor] for tensor in loop_output_tensors(self.tile_loop)]

    def _with_pages_returned(self, values: list[list[Any]]) -> list[list[Any]]:
        """Return the new values of the state variables; the next iteration waits until pages of files are returned."""
        if self.files is None or not any(map(self.files.holds, {*self.tile_loop.reads, *self.in_files})):
            return values
        first, *others = tf.nest.flatten(values)
        with tf.control_dependencies([return_pages([first, *others])]):
            return tf.nest.pack_sequence_as(values, [tf.identity(first), *others])


class IterationEmitter:
    """Emits the ops of one iteration; implements `rules.registry.Emitter`, which op rules call.

    Args:
        loop: Emitter of the loop.
        index: Index of the tile, a scalar tensor.
        carried: Rows that the previous iteration passes on, by tensor.
    """

    def __init__(self, loop: LoopEmitter, index: Any, carried: Mapping[Tensor, Any]) -> None:
        self.loop = loop
        self.tile_loop = loop.tile_loop
        self.segment = loop.segment
        self.row_axis = loop.tile_loop.row_axis
        self.values: dict[Tensor, Any] = {}
        self._carried = carried
        self._received: dict[Tensor, Any] = {}
        self._passed: dict[Tensor, Any] = {}
        self._joined: dict[tuple[Tensor, float | str], tuple[Any, Region]] = {}
        self._pending_reductions: list[Any] = []
        self._control_inputs: list[Any] = []
        self._concurrency = ConcurrencyGroup[Any](lambda node: takes_memory(node, loop.device))
        # Emitted ops by their arguments, so that equal ones are emitted once.
        self._lookups: dict[tuple[int, bytes], Any] = {}
        self._fits: dict[Any, Any] = {}
        self._invariants: dict[Tensor, Any] = {}
        self._consumers: dict[Tensor, list[Node]] = {}
        for node in self.tile_loop.body:
            for tensor in node.inputs:
                self._consumers.setdefault(tensor, []).append(node)
        self._index = index
        self._indices, index = self._tile_indices(index)
        self._batch_span = self._images_of(index)

    def _tile_indices(self, index: Any) -> tuple[list[Any], Any]:
        """Split the index of a tile into its index along each axis, and along the batch."""
        indices: list[Any] = []
        for count in reversed(self.tile_loop.grid.spatial):
            indices.insert(0, index % count if count > 1 else 0)
            index = index // count if count > 1 else index
        return indices, index

    def _images_of(self, index: Any) -> Span:
        if self.tile_loop.grid.batch == 1:
            return None
        batch, tiles = self.loop.batch, self.loop.batch_tiles
        begin = index * batch // tiles
        return (begin, (index + 1) * batch // tiles - begin)

    def run(self) -> None:
        """Emit the body."""
        for node in self.tile_loop.body:
            self._control_inputs = self._reductions_before(node)
            self._run_op(node)
            if node.op not in summation_order.SUMS:  # A control edge would change the order of summation.
                results = (node.out(index) for index in range(len(node.outputs)))
                self._pending_reductions += [self.value(t) for t in results if t in self.tile_loop.reductions]

    def _reductions_before(self, node: Node) -> list[Any]:
        """Return the reductions that have to end before an op begins; only gradients of layer inputs wait.

        An example is the gradient of a later layer's filter. The executor may run it at any time, and its operands
        stay alive until then.
        """
        rule, view = find_rule(node), self.loop.analysis.view(node)
        if not self._is_gradient(node.out()) or not rule.flops(view, 1):
            return []
        reductions, self._pending_reductions = self._pending_reductions, []
        return reductions

    def _outer(self, tensor: Tensor, consumers: Iterable[Node]) -> Any:
        """Return a loop-invariant tensor: a number as a constant of the iteration, a summand behind a guard.

        TensorFlow's arithmetic optimizer turns powers by a constant into products, as in the original step. It rewrites
        a sum of two equal summands k, however deep in an expression, into 2 * k. It also adds a control edge from k to
        the factor 2. If k is a variable of the loop itself, the edge may refer to its value after the last iteration.
        The factor then never runs, and the step returns empty tensors without an error.
        """
        value, number = self.loop.outer[tensor], real_number(tensor)
        is_summand = any(node.op in summation_order.SUMS or forwards_input_buffer(node) for node in consumers)
        if number is None and not is_summand:
            return value
        if tensor not in self._invariants:
            if number is None:
                value = tf.ensure_shape(value, value.shape, tensor.node.name)
            self._invariants[tensor] = value if number is None else tf.constant(number, tensor.dtype)
        return self._invariants[tensor]

    def _counted_once(self, tensor: Tensor, value: Any) -> Any:
        """Zero the slice of a gradient in a tile beyond the last row or the only image, which repeats another tile."""
        if self.segment.kinds.get(tensor) is not TileKind.PARTIAL:
            return value
        assert tensor.shape is not None
        if self._batch_span is not None and tensor.shape[BATCH_DIM] == 1:
            value = tf.where(self._batch_span[0] == 0, value, tf.zeros_like(value))
        for axis, (tiles, extent) in enumerate(zip(self.tile_loop.grid.spatial, self._extents(tensor), strict=True)):
            if tiles > extent:
                value = tf.where(self._indices[axis] < extent, value, tf.zeros_like(value))
        return value

    def _run_op(self, node: Node) -> None:
        results = find_rule(node).emit(self, self.loop.analysis.view(node), self._operands(node))
        for index, value in enumerate(results):
            tensor = node.out(index)
            if tensor not in self.tile_loop.reads:  # A full-size tensor was sliced already.
                self.values[tensor] = self._held_rows(node, tensor, value)

    def _operands(self, node: Node) -> list[Any]:
        """Return the operands of an op in the rows that it needs; `None` for those that its rule rebuilds."""
        rule, view, plan = find_rule(node), self.loop.analysis.view(node), self.tile_loop.plans[node]
        rebuilt = rule.shape_operands(view)
        meets_gradient = any(self._is_gradient(t) and t in self.tile_loop.regions for t in node.inputs)
        operands: list[Any] = []
        for position, tensor in enumerate(node.inputs):
            if position in rebuilt:
                operands.append(None)
            elif tensor in self.tile_loop.regions and plan[0].needs[position] is not None:
                need: Region = tuple(p.needs[position] for p in plan)  # type: ignore[misc]
                fill = rule.operand_fill(view, position)
                with tf.control_dependencies(self._gradients_beside(node, tensor)):
                    value = self._rows_from_joined(tensor, need, fill) if meets_gradient else None
                    operands.append(self.fit(tensor, need, fill) if value is None else value)
            else:
                operands.append(self._outer(tensor, [node]))
        return operands

    def _gradients_beside(self, node: Node, tensor: Tensor) -> list[Any]:
        """Return the other gradients that an op reads, for which the rows that it needs of an operand wait.

        The executor would slice a full-size tensor when the iteration begins, and crop and pad a recomputed activation
        as soon as it exists. The copies would occupy memory until the gradient exists. TensorFlow may fuse two ops, and
        the fused op must not wait for itself.
        """
        return [
            self.values[t]
            for t in node.inputs
            if t != tensor and t in self.values and is_awaited(self.loop.analysis, t.node)
            if not may_fuse_with_consumer(t.node, node)
        ]

    def _held_rows(self, node: Node, tensor: Tensor, value: Any) -> Any:
        """Return the rows of a result that the tile holds, from those that the op computed."""
        plan = self.tile_loop.plans[node]
        if plan[0].kept is None:
            return value
        if value.shape.rank is None:  # The rank is unknown where the op's shape operand is computed.
            value.set_shape([None] * len(tensor.shape))  # type: ignore[arg-type]
        computed: Region = tuple(p.computed for p in plan)  # type: ignore[misc]
        if tensor in self.tile_loop.carries and self._is_gradient(tensor):
            return self._finished(tensor, value, computed)
        tile_rows: Region = tuple(p.kept for p in plan)  # type: ignore[misc]
        return self.crop_and_pad(value, computed, tile_rows, 0.0, tensor)

    # Rows of tensors -----------------------------------------------------------------------------------------

    def value(self, tensor: Tensor) -> Any:
        """Return the rows of a tensor that the iteration holds; slice a full-size tensor when first needed."""
        if tensor not in self.values and tensor in self.tile_loop.reads:
            self.values[tensor] = self._counted_once(tensor, self._sliced(tensor))
        return self.values[tensor]

    def _sliced(self, tensor: Tensor) -> Any:
        """Return the region of an image of full size, of one in a file, or of one that repeats a single number."""
        if is_region_read(tensor.node):
            return self._read(tensor)
        if repeated_number(tensor) is not None:
            return self._filled(tensor)
        buffer = DeviceBuffer(self._outer(tensor, self._consumers.get(tensor, ())), self.loop.device)
        value = buffer.read(self.spans(tensor, self.tile_loop.regions[tensor]), shared=True)
        return value if value.dtype == tensor.dtype else tf.bitcast(value, tensor.dtype)

    def _read(self, tensor: Tensor) -> Any:
        """Read the region of an image in a file, and name the next region, which is empty after the last iteration."""
        node, region, batch = tensor.node, self.tile_loop.regions[tensor], self.loop.batch
        assert tensor.shape is not None
        index = self._index + (1 if self.tile_loop.order is IterationOrder.ASCENDING else -1)
        exists = tf.cast((index >= 0) & (index < self.loop.num_iterations), tf.int32)
        following = [
            None if span is None else (span[0], span[1] * exists)
            for span in IterationEmitter(self.loop, index, {}).spans(tensor, region)
        ]
        if following[BATCH_DIM] is None:
            following[BATCH_DIM] = (0, batch * exists)
        spans, sizes = self.spans(tensor, region), [batch, *tensor.shape[1:]]
        corners = [*corner_and_size(spans, sizes), *corner_and_size(following, sizes)]
        operands = [self.loop.outer[loop_operand(tensor)], *(tf.cast(vector, tf.int64) for vector in corners)]
        (value,) = tf_internals.create_op(node.op, operands, [tensor.dtype], node.attrs, node.name, "")
        value.set_shape(static_sizes(spans, tensor.shape))
        return value

    def _filled(self, tensor: Tensor) -> Any:
        """Repeat a number over the region of an image."""
        assert tensor.shape is not None
        spans = self.spans(tensor, self.tile_loop.regions[tensor])
        _, sizes = corner_and_size(spans, [self.loop.batch, *tensor.shape[1:]])
        number = self._outer(loop_operand(tensor), self._consumers.get(tensor, ()))
        value = tf.fill(sizes, tf.reshape(number, []))
        value.set_shape(static_sizes(spans, tensor.shape))
        return value

    def batch_span(self) -> Span:
        """Return the span of the batch that the iteration covers; `None` for the full batch."""
        return self._batch_span

    def lookup(self, values: np.ndarray, axis: int) -> Any:
        """Return this tile's element of a vector over the tiles of an axis; a constant if all elements agree."""
        values = np.asarray(values, np.int32)
        if np.all(values == values[0]):
            return int(values[0])
        key = (axis, values.tobytes())
        if key not in self._lookups:
            with tf.control_dependencies(None):  # Later ops share it.
                # On a GPU `GatherV2` reads int32 from the GPU's memory, and consumers wait for the copy to the host.
                self._lookups[key] = tf.constant(values)[self._indices[axis]]
        return self._lookups[key]

    def spans(self, tensor: Tensor, region: Region) -> list[Span]:
        """Return the place of this tile's region in the full-size tensor."""
        assert tensor.shape is not None
        spans: list[Span] = [None] * len(tensor.shape)
        if self._batch_span is not None and tensor.shape[BATCH_DIM] != 1:
            spans[BATCH_DIM] = self._batch_span
        places = zip(self.dims(tensor), region, self._extents(tensor), strict=True)
        for axis, (dim, interval, extent) in enumerate(places):
            if dim is not None and not (np.all(interval.lo == 0) and np.all(interval.hi == extent)):
                spans[dim] = (self.lookup(interval.lo, axis), self.lookup(interval.size, axis))
        return spans

    def dims(self, tensor: Tensor) -> tuple[int | None, ...]:
        """Return the index of the dimension of each spatial axis; `None` for an axis that the tensor lacks."""
        layout = self.loop.analysis.layouts.of(tensor)
        assert layout is not None
        return layout.dims

    def _extents(self, tensor: Tensor) -> tuple[int, ...]:
        extents = self.loop.analysis.extents(tensor)
        assert extents is not None and None not in extents
        return extents  # type: ignore[return-value]

    def fit(self, tensor: Tensor, need: Region, fill: float | str) -> Any:
        """Return the rows `need` of a tensor from the rows that the tile holds.

        Forward values may be padded outside of the image only. Gradients are zero wherever the tile holds no rows.
        """
        have = self.tile_loop.regions[tensor]
        if self.segment.kinds.get(tensor) is TileKind.FULL:
            axes = zip(have, need, self._extents(tensor), strict=True)
            if not all(held.covers(needed.clip(extent)) for held, needed, extent in axes):
                raise RewriteError(
                    f"A tile loop holds fewer rows of `{tensor.name}` than an op in it reads, and would compute other "
                    "results than the original step. Please report it."
                )
        carry = self.tile_loop.carries.get(tensor)
        if carry is None or self._is_gradient(tensor):
            value = self.crop_and_pad(self.value(tensor), have, need, fill, tensor)
            if self.tile_loop.carries and tensor not in self.tile_loop.reads and not covers(have, need):
                self._joined.setdefault((tensor, fill), (value, need))
            return value
        rows = need[self.row_axis]
        if np.all((rows.lo >= carry.received.hi) | (rows.size == 0)):
            computed = with_rows(have, self.row_axis, Interval(carry.received.hi, have[self.row_axis].hi))
            return self.crop_and_pad(self.value(tensor), computed, need, fill, tensor)
        key = (tensor, fill, "joined", *(array.tobytes() for i in need for array in (i.lo, i.hi)))
        if key not in self._fits:
            above = self._rows_received(tensor, self.value(tensor))
            self._fits[key] = joined(
                self, tensor, value=self.value(tensor), above=above, region=have, need=need, fill=fill
            )
            self._joined.setdefault((tensor, fill), (self._fits[key], need))
        return self._fits[key]

    def crop_and_pad(
        self, value: Any, have: Region, need: Region, fill: float | str, tensor: Tensor, shared: bool = True
    ) -> Any:
        """Crop and pad a value of `tensor` from the rows `have` to the rows `need`.

        Args:
            value: The value.
            have: Its rows.
            need: The rows of the result.
            fill: Value of padding, a number or `"lowest"`.
            tensor: The tensor whose rows these are.
            shared: As in `DeviceBuffer.read`.
        """
        if all(h.same(n) for h, n in zip(have, need, strict=True)):
            return value
        key = (tensor, value.ref(), fill, shared, *(array.tobytes() for i in (*have, *need) for array in (i.lo, i.hi)))
        if key not in self._fits:
            fits = [fit(h, n) for h, n in zip(have, need, strict=True)]
            dims = self.dims(tensor)
            self._fits[key] = self._padded(self._cropped(value, fits, dims, shared), fits, dims, fill)
        return self._fits[key]

    def _cropped(self, value: Any, fits: Sequence[CropPad], dims: Sequence[int | None], shared: bool) -> Any:
        spans: list[Span] = [None] * value.shape.rank
        for axis, (change, dim) in enumerate(zip(fits, dims, strict=True)):
            if change.crops:
                assert dim is not None, f"{value.name} lacks the dimension that an op crops"
                spans[dim] = (self.lookup(change.begin, axis), self.lookup(change.size, axis))
        return DeviceBuffer(value, self.loop.device).read(spans, shared)

    def _padded(self, value: Any, fits: Sequence[CropPad], dims: Sequence[int | None], fill: float | str) -> Any:
        if not any(change.pads for change in fits):
            return value
        paddings: list[list[Any]] = [[0, 0] for _ in range(value.shape.rank)]
        for axis, (change, dim) in enumerate(zip(fits, dims, strict=True)):
            if dim is not None:
                paddings[dim] = [self.lookup(change.before, axis), self.lookup(change.after, axis)]
        return tf.raw_ops.PadV2(
            input=value,
            paddings=tf.reshape(stacked([size for pair in paddings for size in pair]), [-1, 2]),
            constant_values=host_scalar(value.dtype.min if fill == "lowest" else fill, value.dtype, self.loop.device),
        )

    # Carried rows --------------------------------------------------------------------------------------------

    def row_dim(self, tensor: Tensor) -> int:
        """Return the dimension along which rows of a tensor are carried."""
        dim = self.dims(tensor)[self.row_axis]
        assert dim is not None
        return dim

    def _is_gradient(self, tensor: Tensor) -> bool:
        return self.segment.kinds.get(tensor) is TileKind.PARTIAL

    def _rows_from_joined(self, tensor: Tensor, need: Region, fill: float | str) -> Any:
        """Return rows of a forward operand of a gradient op, cut out of rows that were joined for a forward op.

        The joined rows mostly stay alive until the gradient in any case. Reading them releases the rows as they were
        computed. Returns `None` for other operands.
        """
        if (tensor, fill) not in self._joined or self._is_gradient(tensor):
            return None
        value, have = self._joined[tensor, fill]
        return self.crop_and_pad(value, have, need, fill, tensor) if covers(have, need) else None

    def _rows_received(self, tensor: Tensor, like: Any) -> Any:
        """Return the rows of a tensor from the previous iteration or from another loop; `like` has its batch size."""
        if tensor not in self._received:
            carry = self.tile_loop.carries[tensor]
            source = self._carried[tensor] if carry.saved is None else self.loop.outer[carry.saved]
            self._received[tensor] = received(self, tensor, carry, source, self.batch_size(like))
        return self._received[tensor]

    def _finished(self, tensor: Tensor, value: Any, computed: Region) -> Any:
        """Return the rows of a gradient that this iteration completes, and note those that it passes on."""
        result, self._passed[tensor] = finish_gradient_rows(
            self,
            tensor,
            value=value,
            partial_sums=self._rows_received(tensor, value),
            computed=computed,
            region=self.tile_loop.regions[tensor],
            in_place=find_rule(tensor.node).own_memory,
        )
        return result

    def carried_rows(self, tensor: Tensor) -> CarriedRows:
        """Return the rows of a tensor that are received and passed on."""
        return self.tile_loop.carries[tensor]

    def rows_to_pass(self, tensor: Tensor) -> Any:
        """Return the rows of a tensor for the next iteration."""
        if tensor in self._passed:
            return self._passed[tensor]
        value, region = self.value(tensor), self.tile_loop.regions[tensor]
        need = with_rows(region, self.row_axis, self.carried_rows(tensor).passed)
        above = self._rows_received(tensor, value)
        return joined(self, tensor, value=value, above=above, region=region, need=need, fill=0.0, shared=False)

    # The interface for op rules ------------------------------------------------------------------------------

    def is_whole(self, node: Node) -> bool:
        """Return whether an op runs untiled: with a single tile, its own padding gives the same bits."""
        return all(count == 1 for count in self.tile_loop.grid.spatial) and not find_rule(node).moves_rows

    def clone(self, node: Node, operands: Sequence[Any], **attrs: Any) -> list[Any]:
        """Emit a copy of an op with other operands and with those of the given attributes that it has."""
        changed = {key: tf_internals.attr_value(value) for key, value in attrs.items() if key in node.attrs}
        results = (node.out(index) for index in range(len(node.outputs)))
        if any(tensor in self.tile_loop.carries and self._is_gradient(tensor) for tensor in results):
            changed |= tf_internals.no_cse_attrs(node.name)  # Carried rows are added in place.
        dtypes = [dtype for dtype, _ in node.outputs]
        # The op alone waits, not the ops that compute its operands, which other ops may read as well. oneDNN fuses the
        # gradients of a filter and of its bias into one op, which must not wait for itself.
        with tf.control_dependencies([*self._control_inputs, *self._concurrency.before(node)]):
            copies = tf_internals.create_op(
                node.op, operands, dtypes, {**node.attrs, **changed}, node.name, node.device
            )
        self._concurrency.add(node, copies[0])
        return copies

    def axis_values(self, node: Node, position: int | None, values: Any, axis: int, dtype: Any) -> Any:
        """Return the part of a per-row vector for the rows of operand `position`, or that the op computes if `None`."""
        plan = self.tile_loop.plans[node][axis]
        rows = plan.computed if position is None else plan.needs[position]
        assert rows is not None
        begin, size = self.lookup(rows.lo, axis), self.lookup(rows.size, axis)
        part = tf.slice(tf.constant(values, dtype), stacked([begin]), stacked([size]))
        tensor = node.out() if position is None else node.inputs[position]
        axis_dim, rank = self.dims(tensor)[axis], len(tensor.shape or ())
        return part if axis_dim is None else tf.reshape(part, [-1 if dim == axis_dim else 1 for dim in range(rank)])

    def axis_positions(self, node: Node, position: int, rows: np.ndarray, axis: int) -> Any:
        """Return the rows that a table names for each computed row, as positions in operand `position`."""
        plan = self.tile_loop.plans[node][axis]
        held = plan.needs[position]
        assert plan.computed is not None and held is not None
        begin, size = self.lookup(plan.computed.lo, axis), self.lookup(plan.computed.size, axis)
        part = tf.slice(tf.constant(rows, tf.int32), stacked([begin]), stacked([size]))
        return part - self.lookup(held.lo, axis)

    def has_all_images(self) -> bool:
        """Return whether each iteration holds the full batch."""
        return self._batch_span is None

    def whole_batch(self) -> Any:
        """Return the run-time size of the full batch."""
        return self.loop.batch

    def operand_spans(self, node: Node, position: int) -> list[Span]:
        """Return the place in the full-size operand of the rows that an op needs."""
        need: Region = tuple(plan.needs[position] for plan in self.tile_loop.plans[node])  # type: ignore[misc]
        return self.spans(node.inputs[position], need)

    def result_spans(self, node: Node) -> list[Span]:
        """Return the place in the full-size result of the rows that an op computes."""
        computed: Region = tuple(plan.computed for plan in self.tile_loop.plans[node])  # type: ignore[misc]
        return self.spans(node.out(), computed)

    def made_shape(self, node: Node) -> Any:
        """Return the shape of the rows that an op computes."""
        tensor = node.out()
        assert tensor.shape is not None
        sizes: list[Any] = list(tensor.shape)
        if sizes[BATCH_DIM] != 1:
            images = self.loop.batch if self._batch_span is None else self._batch_span[1]
            layout = self.loop.analysis.layouts.of(tensor)
            sizes[BATCH_DIM] = images if layout is None or layout.batch_fold == 1 else images * layout.batch_fold
        for axis, (dim, plan) in enumerate(zip(self.dims(tensor), self.tile_loop.plans[node], strict=True)):
            if dim is not None:
                sizes[dim] = self.lookup(plan.computed.size, axis)  # type: ignore[union-attr]
        return stacked(sizes)

    def batch_size(self, operand: Any) -> Any:
        """Return the run-time batch size of a tile."""
        static = operand.shape[BATCH_DIM]
        return static if static is not None else tf.shape(operand)[BATCH_DIM]
