"""Emits a planned tile loop as TensorFlow ops: one `tf.while_loop` over the tiles, whose body is the loop's program."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from rewriters.analysis import summation_order
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.device.kernel_audit import reads_gpu_memory
from rewriters.device.kernel_scratch import ConcurrencyGroup, takes_memory
from rewriters.device.op_buffers import forwards_input_buffer
from rewriters.emission.buffers import DeviceBuffer, Span, corner_and_size, host_scalar, replaced, stacked, static_sizes
from rewriters.emission.file_buffers import FileBuffers, return_pages
from rewriters.emission.loop_outputs import CarriedState, outputs_of
from rewriters.emission.loop_program import AddRows, Fit, Instruction, Join, Part, Receive, Run, Slice
from rewriters.emission.loop_tensors import (
    BATCH_DIM,
    batch_source,
    loop_input_tensors,
    loop_operand,
    loop_output_tensors,
    real_number,
    repeated_number,
)
from rewriters.emission.lowering import lower
from rewriters.emission.tile_place import TilePlace
from rewriters.emission.while_loop import emit_while_loop
from rewriters.ir import tf_internals
from rewriters.ir.graph import Node, Tensor
from rewriters.ir.region_reads import is_region_read
from rewriters.rules.registry import find_rule
from rewriters.tiling.row_frontiers import offsets
from rewriters.tiling.segment import Segment
from rewriters.tiling.tile_planner import IterationOrder, Region, TileLoop

__all__: list[str] = []


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
        self.program = lower(analysis, tile_loop)
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
        outputs = outputs_of(self.program)
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
    """Emits the instructions of one iteration; implements `rules.registry.Emitter`, which op rules call.

    Args:
        loop: Emitter of the loop.
        index: Index of the tile, a scalar tensor.
        carried: Rows that the previous iteration carries, by tensor.

    Attributes:
        loop: Emitter of the loop.
        place: Place of the tile.
    """

    def __init__(self, loop: LoopEmitter, index: Any, carried: Mapping[Tensor, Any]) -> None:
        self.loop = loop
        self.place = TilePlace(loop, index)
        self._tile_loop = loop.tile_loop
        self._values: dict[Part, Any] = {}
        self._carried = carried
        self._control_inputs: list[Any] = []
        self._concurrency = ConcurrencyGroup[Any](lambda node: takes_memory(node, loop.device))
        self._invariants: dict[Tensor, Any] = {}
        self._consumers: dict[Tensor, list[Node]] = {}
        for node in self._tile_loop.body:
            for tensor in node.inputs:
                self._consumers.setdefault(tensor, []).append(node)

    def run(self) -> None:
        """Emit the instructions."""
        for waits, instructions in itertools.groupby(self.loop.program.instructions, lambda one: one.waits):
            with tf.control_dependencies([self._values[part] for part in waits]):
                for instruction in instructions:
                    self._emit(instruction)

    def value(self, part: Part) -> Any:
        """Return the value of a part."""
        return self._values[part]

    # Instructions --------------------------------------------------------------------------------------------

    def _run_op(self, run: Run) -> None:
        self._control_inputs = [self._values[part] for part in run.reductions]
        operands = [
            None if t is None else self._values[t] if isinstance(t, Part) else self._outer(t, [run.node])
            for t in run.operands
        ]
        values = find_rule(run.node).emit(self, self.loop.analysis.view(run.node), operands)
        for part, value in zip(run.results, values, strict=False):
            if part is not None:
                if part.region is not None and value.shape.rank is None:
                    # The rank is unknown where the op's shape operand is computed.
                    value.set_shape([None] * len(part.tensor.shape or ()))
                self._values[part] = value

    def _emit(self, instruction: Instruction) -> None:
        match instruction:
            case Run():
                self._run_op(instruction)
            case Slice(result=part):
                self._values[part] = self._counted_once(part.tensor, self._sliced(part))
            case Fit(result=part):
                self._values[part] = self._padded(instruction, self._cropped(instruction))
            case Receive(result=part):
                self._values[part] = self.rows_received(instruction)
            case Join(result=part, padded=padded, received=received):
                assert part.region is not None and received.region is not None
                tf_internals.prevent_cse(self._values[padded])
                spans = self.place.spans_in(part.tensor, have=part.region, rows=received.region)
                buffer = DeviceBuffer(self._values[padded], self.loop.device)
                self._values[part] = buffer.write(spans, self._values[received])
            case AddRows(result=part):
                self._values[part] = self._with_partial_sums(instruction)
            case _:
                raise TypeError(instruction)

    def rows_received(self, receive: Receive) -> Any:
        """Return the rows that the iteration receives."""
        tensor, carry, axis = receive.result.tensor, receive.carry, self._tile_loop.row_axis
        dim, size = self.place.dims(tensor)[axis], self.place.lookup(carry.received.size, axis)
        assert dim is not None
        if carry.saved is not None:
            source = self.loop.outer[carry.saved]
            spans: list[Span] = [None] * len(source.shape)
            spans[BATCH_DIM] = self.place.batch_span if tensor.shape and tensor.shape[BATCH_DIM] != 1 else None
            spans[dim] = (self.place.lookup(offsets(carry.received), axis), size)
            return DeviceBuffer(source, self.loop.device).read(spans)
        # The last tile of some images carries no rows. Its batch size may differ from that of the next images.
        images = 1 if tensor.shape and tensor.shape[BATCH_DIM] == 1 else self.batch_size(self._values[receive.like])
        sizes = [images, *self._carried[tensor].shape[1:]]
        sizes[dim] = size
        return tf.reshape(self._carried[tensor], stacked(sizes))

    def _with_partial_sums(self, add: AddRows) -> Any:
        """Return the rows of a gradient with the partial sums of earlier iterations."""
        value, sums, (have, rows) = self._values[add.part], self._values[add.received], (add.part, add.received)
        assert have.region is not None and rows.region is not None
        spans = self.place.spans_in(have.tensor, have=have.region, rows=rows.region)
        buffer = DeviceBuffer(value, self.loop.device)
        if add.in_place:
            return buffer.accumulate(spans, sums)
        return replaced(value, spans, buffer.read(spans) + sums)

    def _cropped(self, change: Fit) -> Any:
        spans: list[Span] = [None] * self._values[change.part].shape.rank
        for axis, (crop, dim) in enumerate(zip(change.changes, self.place.dims(change.part.tensor), strict=True)):
            if crop.crops:
                assert dim is not None, f"{change.part.tensor.name} lacks the dimension that an op crops"
                spans[dim] = (self.place.lookup(crop.begin, axis), self.place.lookup(crop.size, axis))
        return DeviceBuffer(self._values[change.part], self.loop.device).read(spans, change.may_be_view)

    def _padded(self, change: Fit, value: Any) -> Any:
        if not any(pad.pads for pad in change.changes):
            return value
        paddings: list[list[Any]] = [[0, 0] for _ in range(value.shape.rank)]
        for axis, (pad, dim) in enumerate(zip(change.changes, self.place.dims(change.part.tensor), strict=True)):
            if dim is not None:
                paddings[dim] = [self.place.lookup(pad.before, axis), self.place.lookup(pad.after, axis)]
        fill = value.dtype.min if change.fill == "lowest" else change.fill
        return tf.raw_ops.PadV2(
            input=value,
            paddings=tf.reshape(stacked([size for pair in paddings for size in pair]), [-1, 2]),
            constant_values=host_scalar(fill, value.dtype, self.loop.device),
        )

    # Full-size tensors ---------------------------------------------------------------------------------------

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
        if tensor in self._tile_loop.values:
            return value
        assert tensor.shape is not None
        batch_span = self.place.batch_span
        if batch_span is not None and tensor.shape[BATCH_DIM] == 1:
            value = tf.where(batch_span[0] == 0, value, tf.zeros_like(value))
        for axis, (tiles, extent) in enumerate(
            zip(self._tile_loop.grid.spatial, self.place.extents(tensor), strict=True)
        ):
            if tiles > extent:
                value = tf.where(self.place.indices[axis] < extent, value, tf.zeros_like(value))
        return value

    def _sliced(self, part: Part) -> Any:
        """Return the region of an image of full size, of one in a file, or of one that repeats a single number."""
        tensor, region = part.tensor, part.region
        assert region is not None
        if is_region_read(tensor.node):
            return self._read(tensor, region)
        if repeated_number(tensor) is not None:
            return self._filled(tensor, region)
        buffer = DeviceBuffer(self._outer(tensor, self._consumers.get(tensor, ())), self.loop.device)
        value = buffer.read(self.place.spans(tensor, region), shared=True)
        return value if value.dtype == tensor.dtype else tf.bitcast(value, tensor.dtype)

    def _read(self, tensor: Tensor, region: Region) -> Any:
        """Read the region of an image in a file, and name the next region, which is empty after the last iteration."""
        node, batch = tensor.node, self.loop.batch
        assert tensor.shape is not None
        index = self.place.index + (1 if self._tile_loop.order is IterationOrder.ASCENDING else -1)
        exists = tf.cast((index >= 0) & (index < self.loop.num_iterations), tf.int32)
        following = [
            None if span is None else (span[0], span[1] * exists)
            for span in TilePlace(self.loop, index).spans(tensor, region)
        ]
        if following[BATCH_DIM] is None:
            following[BATCH_DIM] = (0, batch * exists)
        spans, sizes = self.place.spans(tensor, region), [batch, *tensor.shape[1:]]
        corners = [*corner_and_size(spans, sizes), *corner_and_size(following, sizes)]
        operands = [self.loop.outer[loop_operand(tensor)], *(tf.cast(vector, tf.int64) for vector in corners)]
        (value,) = tf_internals.create_op(node.op, operands, [tensor.dtype], node.attrs, node.name, "")
        value.set_shape(static_sizes(spans, tensor.shape))
        return value

    def _filled(self, tensor: Tensor, region: Region) -> Any:
        """Repeat a number over the region of an image."""
        assert tensor.shape is not None
        spans = self.place.spans(tensor, region)
        _, sizes = corner_and_size(spans, [self.loop.batch, *tensor.shape[1:]])
        number = self._outer(loop_operand(tensor), self._consumers.get(tensor, ()))
        value = tf.fill(sizes, tf.reshape(number, []))
        value.set_shape(static_sizes(spans, tensor.shape))
        return value

    # The interface for op rules ------------------------------------------------------------------------------

    def is_whole(self, node: Node) -> bool:
        """Return whether an op runs untiled: with a single tile, its own padding gives the same bits."""
        return all(count == 1 for count in self._tile_loop.grid.spatial) and not find_rule(node).moves_rows

    def clone(self, node: Node, operands: Sequence[Any], **attrs: Any) -> list[Any]:
        """Emit a copy of an op with other operands and with those of the given attributes that it has."""
        changed = {key: tf_internals.attr_value(value) for key, value in attrs.items() if key in node.attrs}
        tensors = (node.out(index) for index in range(len(node.outputs)))
        if any(tensor in self._tile_loop.carries and tensor not in self._tile_loop.values for tensor in tensors):
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
        plan = self._tile_loop.plans[node][axis]
        rows = plan.computed if position is None else plan.needs[position]
        assert rows is not None
        begin, size = self.place.lookup(rows.lo, axis), self.place.lookup(rows.size, axis)
        part = tf.slice(tf.constant(values, dtype), stacked([begin]), stacked([size]))
        tensor = node.out() if position is None else node.inputs[position]
        axis_dim, rank = self.place.dims(tensor)[axis], len(tensor.shape or ())
        return part if axis_dim is None else tf.reshape(part, [-1 if dim == axis_dim else 1 for dim in range(rank)])

    def axis_positions(self, node: Node, position: int, rows: np.ndarray, axis: int) -> Any:
        """Return the rows that a table names for each computed row, as positions in operand `position`."""
        plan = self._tile_loop.plans[node][axis]
        held = plan.needs[position]
        assert plan.computed is not None and held is not None
        begin, size = self.place.lookup(plan.computed.lo, axis), self.place.lookup(plan.computed.size, axis)
        part = tf.slice(tf.constant(rows, tf.int32), stacked([begin]), stacked([size]))
        return part - self.place.lookup(held.lo, axis)

    def has_all_images(self) -> bool:
        """Return whether each iteration holds the full batch."""
        return self.place.batch_span is None

    def whole_batch(self) -> Any:
        """Return the run-time size of the full batch."""
        return self.loop.batch

    def operand_spans(self, node: Node, position: int) -> list[Span]:
        """Return the place in the full-size operand of the rows that an op needs."""
        need: Region = tuple(plan.needs[position] for plan in self._tile_loop.plans[node])  # type: ignore[misc]
        return self.place.spans(node.inputs[position], need)

    def result_spans(self, node: Node) -> list[Span]:
        """Return the place in the full-size result of the rows that an op computes."""
        computed: Region = tuple(plan.computed for plan in self._tile_loop.plans[node])  # type: ignore[misc]
        return self.place.spans(node.out(), computed)

    def made_shape(self, node: Node) -> Any:
        """Return the shape of the rows that an op computes."""
        tensor = node.out()
        assert tensor.shape is not None
        sizes: list[Any] = list(tensor.shape)
        if sizes[BATCH_DIM] != 1:
            images = self.loop.batch if self.place.batch_span is None else self.place.batch_span[1]
            layout = self.loop.analysis.layouts.of(tensor)
            sizes[BATCH_DIM] = images if layout is None or layout.batch_fold == 1 else images * layout.batch_fold
        for axis, (dim, plan) in enumerate(zip(self.place.dims(tensor), self._tile_loop.plans[node], strict=True)):
            if dim is not None:
                sizes[dim] = self.place.lookup(plan.computed.size, axis)  # type: ignore[union-attr]
        return stacked(sizes)

    def batch_size(self, operand: Any) -> Any:
        """Return the run-time batch size of a tile."""
        static = operand.shape[BATCH_DIM]
        return static if static is not None else tf.shape(operand)[BATCH_DIM]
