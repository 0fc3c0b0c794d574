"""Turn a planned phase into TensorFlow ops: one `tf.while_loop` over tiles."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from rewriters.analysis import summation_order
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.device.kernel_scratch import ConcurrencyGroup
from rewriters.device.properties import forwards_input_buffer
from rewriters.emission.buffers import DeviceBuffer, Span, stacked
from rewriters.emission.loop_outputs import LoopOutput, MergedMoments, ReductionOutput, ScatterAddOutput, TiledOutput
from rewriters.emission.row_carries import CarriedState, SavedState, finish_gradient_rows, joined, received
from rewriters.emission.while_loop import emit_while_loop
from rewriters.ir import tf_internals
from rewriters.ir.graph import Node, Tensor
from rewriters.rules.intervals import CropPad, Interval, fit
from rewriters.rules.registry import TileKind, find_rule
from rewriters.tiling.row_frontiers import CarriedRows
from rewriters.tiling.segment import Segment
from rewriters.tiling.tile_planner import Region, TileLoop, covers, with_rows

__all__: list[str] = []

BATCH_DIM = 0


def loop_input_tensors(tile_loop: TileLoop, segment: Segment) -> list[Tensor]:
    """Whole tensors that the loop reads, in the order of the traced function's arguments."""
    source = batch_source(tile_loop, segment)
    batch = [] if source is None else [source]
    saved = [carry.saved for carry in tile_loop.carries.values() if carry.saved is not None]
    return list(dict.fromkeys([*batch, *tile_loop.reads, *tile_loop.invariants, *saved]))


def batch_source(tile_loop: TileLoop, segment: Segment) -> Tensor | None:
    """A tensor whose leading size is the batch at run time; `None` if no image goes in."""
    for candidates in (
        tile_loop.reads,
        segment.entries,
    ):  # Entries of another device may have another number of images.
        shaped = [(t.shape[BATCH_DIM], t) for t in candidates if t.shape]
        unknown = [t for size, t in shaped if size is None]
        if shaped:
            return unknown[0] if unknown else max(shaped, key=lambda pair: pair[0] or 0)[1]
    return None


def loop_output_tensors(tile_loop: TileLoop) -> list[Tensor]:
    """Tensors that the loop makes, in the order of the traced function's results."""
    return [*tile_loop.writes, *tile_loop.accumulates, *tile_loop.reductions, *(save.saved for save in tile_loop.saves)]


def trace_loop(analysis: GraphAnalysis, segment: Segment, tile_loop: TileLoop) -> Any:
    """A function graph that computes `loop_output_tensors` from `loop_input_tensors`."""
    inputs = loop_input_tensors(tile_loop, segment)
    specs = [tf.TensorSpec(t.shape, t.dtype) for t in inputs]

    def build(*args: Any) -> list[Any]:
        return LoopEmitter(analysis, segment, tile_loop, dict(zip(inputs, args, strict=True))).run()

    return tf_internals.trace_func_graph(f"{segment.name}_{tile_loop.name}", build, specs)


class LoopEmitter:
    """The loop around the tiles: batch, state, results."""

    def __init__(
        self, analysis: GraphAnalysis, segment: Segment, tile_loop: TileLoop, outer: dict[Tensor, Any]
    ) -> None:
        self.analysis = analysis
        self.segment = segment
        self.tile_loop = tile_loop
        self.outer = outer
        self.batch = self._images()
        self.batch_tiles = 1 if tile_loop.grid.batch == 1 else tf.minimum(tile_loop.grid.batch, self.batch)

    def _images(self) -> Any:
        """Number of images in the batch."""
        source = batch_source(self.tile_loop, self.segment)
        if source is None:
            return max(int(tensor.shape[BATCH_DIM] or 1) for tensor in self.tile_loop.writes if tensor.shape)
        value = self.outer[source]
        static = value.shape[BATCH_DIM]
        return static if static is not None else tf.shape(value)[BATCH_DIM]

    def run(self) -> list[Any]:
        """Emit the loop; results in the dtype of the original tensors."""
        results = loop_results(self.analysis, self.tile_loop)
        states = [result.initial(self) for result in results]
        sizes = [len(own) for own in states]

        def turn(index: Any, values: list[Any]) -> list[Any]:
            parts = list(zip(results, _grouped(values, sizes), strict=True))
            carried = {result.tensor: own[0] for result, own in parts if isinstance(result, CarriedState)}
            tile = IterationEmitter(self, index, carried)
            tile.run()
            return [value for result, own in parts for value in result.update(tile, own)]

        spatial = int(np.prod(self.tile_loop.grid.spatial))
        values = emit_while_loop(self.batch_tiles * spatial, list(itertools.chain(*states)), turn, self.tile_loop.order)
        made: dict[Tensor, Any] = {}
        for result, own in zip(results, _grouped(values, sizes), strict=True):
            made.update(zip(result.tensors, result.final(own), strict=True))
        return [made[tensor] for tensor in loop_output_tensors(self.tile_loop)]


def _grouped(values: Sequence[Any], sizes: Sequence[int]) -> Iterator[list[Any]]:
    """The values by the results that they belong to."""
    rest = iter(values)
    return (list(itertools.islice(rest, size)) for size in sizes)


def loop_results(analysis: GraphAnalysis, tile_loop: TileLoop) -> list[LoopOutput]:
    """What a loop makes."""
    results: list[LoopOutput] = [TiledOutput(tensor, tile_loop.cells[tensor]) for tensor in tile_loop.writes]
    results += [ScatterAddOutput(tensor, tile_loop.regions[tensor]) for tensor in tile_loop.accumulates]
    alone = tile_loop.grid.num_tiles == 1
    results += [MergedMoments(moments, tile_loop.cells[moments.image], alone) for moments in tile_loop.moments]
    together = {tensor for moments in tile_loop.moments for tensor in (moments.mean, moments.variance)}
    for tensor in tile_loop.reductions:
        if tensor not in together:
            rule, view = find_rule(tensor.node), analysis.view(tensor.node)
            cell = tile_loop.cells[tensor.node.inputs[rule.summed(view)]] if rule.per_pixel(view) else None
            results.append(ReductionOutput(tensor, rule.combined(view), rule.per_image(view), cell))
    results += [SavedState(save) for save in tile_loop.saves]
    for tensor, carry in tile_loop.carries.items():
        layout = analysis.layouts.of(tensor)
        assert layout is not None
        if carry.saved is None:
            results.append(CarriedState(tensor, layout.dims, tile_loop.regions[tensor], tile_loop.row_axis))
    return results


class IterationEmitter:
    """One turn: slices, ops, fits. Implements what rules ask of an emitter."""

    def __init__(self, loop: LoopEmitter, index: Any, carried: Mapping[Tensor, Any]) -> None:
        self.loop = loop
        self.tile_loop = loop.tile_loop
        self.segment = loop.segment
        self.row_axis = loop.tile_loop.row_axis
        self.values: dict[Tensor, Any] = {}
        self._lookups: dict[tuple[int, bytes], Any] = {}
        self._fits: dict[Any, Any] = {}
        self._outers: dict[Tensor, Any] = {}
        self._carried = carried
        self._received: dict[Tensor, Any] = {}
        self._passed: dict[Tensor, Any] = {}
        self._joined: dict[tuple[Tensor, float | str], tuple[Any, Region]] = {}
        self._summed: list[Any] = []
        self._waits: list[Any] = []
        self._group = ConcurrencyGroup[Any]()
        self._indices: list[Any] = []
        for count in reversed(self.tile_loop.grid.spatial):
            self._indices.insert(0, index % count if count > 1 else 0)
            index = index // count if count > 1 else index
        self._batch: Span = None
        if loop.tile_loop.grid.batch > 1:
            number = index
            begin = number * loop.batch // loop.batch_tiles
            self._batch = (begin, (number + 1) * loop.batch // loop.batch_tiles - begin)

    def run(self) -> None:
        """Read the slices and run the body."""
        readers: dict[Tensor, list[Node]] = {}
        for node in self.tile_loop.body:
            for tensor in node.inputs:
                readers.setdefault(tensor, []).append(node)
        for tensor in self.tile_loop.reads:
            whole = DeviceBuffer(self._outer(tensor, readers.get(tensor, ())))
            value = whole.read(self.spans(tensor, self.tile_loop.regions[tensor]), shared=True)
            self.values[tensor] = self._counted_once(tensor, value)
        for node in self.tile_loop.body:
            self._waits = self._ended(node)
            self._run_op(node)
            if node.op not in summation_order.OPS:  # An edge would change how they are added up.
                results = (node.out(index) for index in range(len(node.outputs)))
                self._summed += [self.values[tensor] for tensor in results if tensor in self.tile_loop.reductions]

    def _ended(self, node: Node) -> list[Any]:
        """What has to have ended before an operation may begin: for a gradient of a layer's input, earlier sums.

        Those of the filters above, say. The executor would run them when it likes, and what they read is there until
        then.
        """
        rule, view = find_rule(node), self.loop.analysis.view(node)
        if not self._is_gradient(node.out()) or not rule.flops(view, 1):
            return []
        ended, self._summed = self._summed, []
        return ended

    def _outer(self, tensor: Tensor, readers: Iterable[Node]) -> Any:
        """A tensor that is the same in every turn; for operations that add it up, behind an op.

        TensorFlow's arithmetic optimizer makes 2 * k of two equal summands, however deep they are in a sum, and has the
        factor wait for k. Where k is a variable of the loop itself, that may be its value after the last turn: the
        factor never comes, and the step returns empty tensors without an error.
        """
        value = self.loop.outer[tensor]
        if not any(node.op in summation_order.OPS or forwards_input_buffer(node) for node in readers):
            return value
        if tensor not in self._outers:
            self._outers[tensor] = tf.ensure_shape(value, value.shape, tensor.node.name)
        return self._outers[tensor]

    def _counted_once(self, tensor: Tensor, value: Any) -> Any:
        """Zeros for a tile beyond the last row (or the only image) of a gradient: another tile has what it holds."""
        if self.segment.kinds.get(tensor) is not TileKind.PARTIAL:
            return value
        assert tensor.shape is not None
        if self._batch is not None and tensor.shape[BATCH_DIM] == 1:
            value = tf.where(self._batch[0] == 0, value, tf.zeros_like(value))
        for axis, (tiles, extent) in enumerate(zip(self.tile_loop.grid.spatial, self._extents(tensor), strict=True)):
            if tiles > extent:
                value = tf.where(self._indices[axis] < extent, value, tf.zeros_like(value))
        return value

    def _run_op(self, node: Node) -> None:
        rule, view = find_rule(node), self.loop.analysis.view(node)
        plan = self.tile_loop.plans[node]
        rebuilt = rule.shape_operands(view)
        operands: list[Any] = []
        gradients = [self.values[t] for t in node.inputs if self._is_gradient(t) and t in self.values]
        for position, tensor in enumerate(node.inputs):
            if position in rebuilt:
                operands.append(None)
            elif tensor in self.values and plan[0].needs[position] is not None:
                need: Region = tuple(p.needs[position] for p in plan)  # type: ignore[misc]
                fill = rule.operand_fill(view, position)
                again = self._cut_again(tensor, need, fill, gradients)
                operands.append(self.fit(tensor, need, fill) if again is None else again)
            else:
                operands.append(self._outer(tensor, [node]))
        results = rule.emit(self, view, operands)
        for index, value in enumerate(results):
            tensor = node.out(index)
            if tensor in self.tile_loop.reads:
                continue  # It exists whole and was sliced.
            if plan[0].kept is not None:
                if value.shape.rank is None:  # Inferred from a shape that is computed.
                    value.set_shape([None] * len(tensor.shape))  # type: ignore[arg-type]
                made = tuple(p.computed for p in plan)
                out = tuple(p.kept for p in plan)
                if tensor in self.tile_loop.carries and self._is_gradient(tensor):
                    value = self._completed(tensor, value, made)  # type: ignore[arg-type]
                else:
                    value = self.moved(value, made, out, 0.0, tensor)  # type: ignore[arg-type]
            self.values[tensor] = value

    # Rows of tensors -----------------------------------------------------------------------------------------

    def value(self, tensor: Tensor) -> Any:
        """What the turn made of a tensor."""
        return self.values[tensor]

    def images(self) -> Span:
        """The images of the batch that the turn works on; `None` for all."""
        return self._batch

    def lookup(self, values: np.ndarray, axis: int) -> Any:
        """Number of this tile in a vector over the tiles of an axis; a constant if all agree."""
        values = np.asarray(values, np.int32)
        if np.all(values == values[0]):
            return int(values[0])
        key = (axis, values.tobytes())
        if key not in self._lookups:
            self._lookups[key] = tf.gather(tf.constant(values), self._indices[axis])
        return self._lookups[key]

    def spans(self, tensor: Tensor, region: Region) -> list[Span]:
        """Where this tile's region lies in the whole tensor."""
        assert tensor.shape is not None
        spans: list[Span] = [None] * len(tensor.shape)
        if self._batch is not None and tensor.shape[BATCH_DIM] != 1:
            spans[BATCH_DIM] = self._batch
        places = zip(self.dims(tensor), region, self._extents(tensor), strict=True)
        for axis, (dim, interval, extent) in enumerate(places):
            if dim is not None and not (np.all(interval.lo == 0) and np.all(interval.hi == extent)):
                spans[dim] = (self.lookup(interval.lo, axis), self.lookup(interval.size, axis))
        return spans

    def dims(self, tensor: Tensor) -> tuple[int | None, ...]:
        """The dimensions of a tensor that are its axes."""
        layout = self.loop.analysis.layouts.of(tensor)
        assert layout is not None
        return layout.dims

    def _extents(self, tensor: Tensor) -> tuple[int, ...]:
        extents = self.loop.analysis.extents(tensor)
        assert extents is not None and None not in extents
        return extents  # type: ignore[return-value]

    def fit(self, tensor: Tensor, need: Region, fill: float | str) -> Any:
        """The rows `need` of a tensor from those that the tile holds.

        Forward values may be padded outside of the image only; gradients are zero
        wherever the tile holds none.
        """
        have = self.tile_loop.regions[tensor]
        if self.segment.kinds.get(tensor) is TileKind.FULL:
            for held, wanted, extent in zip(have, need, self._extents(tensor), strict=True):
                assert held.covers(wanted.clip(extent)), f"{tensor.name} lacks rows that an op needs"
        carry = self.tile_loop.carries.get(tensor)
        if carry is None or self._is_gradient(tensor):
            value = self.moved(self.values[tensor], have, need, fill, tensor)
            if self.tile_loop.carries and tensor not in self.tile_loop.reads and not covers(have, need):
                self._joined.setdefault((tensor, fill), (value, need))
            return value
        rows = need[self.row_axis]
        if np.all((rows.lo >= carry.received.hi) | (rows.size == 0)):
            new = with_rows(have, self.row_axis, Interval(carry.received.hi, have[self.row_axis].hi))
            return self.moved(self.values[tensor], new, need, fill, tensor)
        key = (tensor, fill, "joined", *(array.tobytes() for i in need for array in (i.lo, i.hi)))
        if key not in self._fits:
            above = self._rows_received(tensor, self.values[tensor])
            self._fits[key] = joined(self, tensor, self.values[tensor], above, have, need, fill)
            self._joined.setdefault((tensor, fill), (self._fits[key], need))
        return self._fits[key]

    def moved(
        self, value: Any, have: Region, need: Region, fill: float | str, tensor: Tensor, shared: bool = True
    ) -> Any:
        """Crop and pad a value from the rows it has to those that are needed; `shared` as for `DeviceBuffer.read`."""
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
        for axis, (way, dim) in enumerate(zip(fits, dims, strict=True)):
            if way.crops:
                assert dim is not None, f"{value.name} lacks the dimension that an op crops"
                spans[dim] = (self.lookup(way.begin, axis), self.lookup(way.size, axis))
        return DeviceBuffer(value).read(spans, shared)

    def _padded(self, value: Any, fits: Sequence[CropPad], dims: Sequence[int | None], fill: float | str) -> Any:
        if not any(way.pads for way in fits):
            return value
        paddings: list[list[Any]] = [[0, 0] for _ in range(value.shape.rank)]
        for axis, (way, dim) in enumerate(zip(fits, dims, strict=True)):
            if dim is not None:
                paddings[dim] = [self.lookup(way.before, axis), self.lookup(way.after, axis)]
        # Rows that are handed on may be of any type, which zeros are of, too.
        filled = tf.constant(value.dtype.min if fill == "lowest" else fill, value.dtype) if fill else None
        return tf.raw_ops.PadV2(
            input=value,
            paddings=tf.reshape(stacked([number for pair in paddings for number in pair]), [-1, 2]),
            constant_values=tf.zeros([], value.dtype) if filled is None else filled,
        )

    # Rows from and for other turns ----------------------------------------------------------------------------

    def row_dim(self, tensor: Tensor) -> int:
        """The dimension along which rows of a tensor are carried."""
        dim = self.dims(tensor)[self.row_axis]
        assert dim is not None
        return dim

    def _is_gradient(self, tensor: Tensor) -> bool:
        return self.segment.kinds.get(tensor) is TileKind.PARTIAL

    def _cut_again(self, tensor: Tensor, need: Region, fill: float | str, gradients: Sequence[Any]) -> Any:
        """Rows of a forward value that a gradient meets, out of those that were joined for an operation before.

        Otherwise the rows as they were made would wait for the gradient beside the joined ones, which mostly do.
        `None` for other operands.
        """
        if (tensor, fill) not in self._joined or not gradients or self._is_gradient(tensor):
            return None
        value, have = self._joined[tensor, fill]
        if not covers(have, need):
            return None
        with tf.control_dependencies(gradients):
            return self.moved(value, have, need, fill, tensor)

    def _rows_received(self, tensor: Tensor, like: Any) -> Any:
        """Rows of a tensor that another turn, or another loop, has made."""
        if tensor not in self._received:
            carry = self.tile_loop.carries[tensor]
            source = self._carried[tensor] if carry.saved is None else self.loop.outer[carry.saved]
            self._received[tensor] = received(self, tensor, carry, source, self.batch_size(like))
        return self._received[tensor]

    def _completed(self, tensor: Tensor, value: Any, made: Region) -> Any:
        """The rows of a gradient that this turn completes."""
        rows = self._rows_received(tensor, value)
        region, in_place = self.tile_loop.regions[tensor], find_rule(tensor.node).own_memory
        result, self._passed[tensor] = finish_gradient_rows(self, tensor, value, rows, made, region, in_place)
        return result

    def carry(self, tensor: Tensor) -> CarriedRows:
        """Which rows of a tensor come and go."""
        return self.tile_loop.carries[tensor]

    def passed_on(self, tensor: Tensor) -> Any:
        """Rows of a tensor for the next turn."""
        if tensor in self._passed:
            return self._passed[tensor]
        region = self.tile_loop.regions[tensor]
        above = self._rows_received(tensor, self.values[tensor])
        need = with_rows(region, self.row_axis, self.carry(tensor).passed)
        return joined(self, tensor, self.values[tensor], above, region, need, 0.0, shared=False)

    # What rules ask for --------------------------------------------------------------------------------------

    def is_whole(self, node: Node) -> bool:
        """One tile: nothing is cut, and the original op with its own padding gives the same bits."""
        return all(count == 1 for count in self.tile_loop.grid.spatial) and not find_rule(node).moves_rows

    def clone(self, node: Node, operands: Sequence[Any], **attrs: Any) -> list[Any]:
        """The op with other operands and, where given, other attributes (those that it has)."""
        changed = {key: _attr(value) for key, value in attrs.items() if key in node.attrs}
        results = (node.out(index) for index in range(len(node.outputs)))
        if any(tensor in self.tile_loop.carries and self._is_gradient(tensor) for tensor in results):
            changed |= tf_internals.kept_apart(node.name)  # Rows from other turns are added in place.
        dtypes = [dtype for dtype, _ in node.outputs]
        # Alone: what makes its operands may serve others, too. oneDNN makes the gradients of a filter and its bias one
        # operation, which must not wait for itself.
        with tf.control_dependencies([*self._waits, *self._group.before(node)]):
            made = tf_internals.create_op(node.op, operands, dtypes, {**node.attrs, **changed}, node.name, node.device)
        self._group.add(node, made[0])
        return made

    def axis_values(self, node: Node, position: int | None, values: Any, axis: int, dtype: Any) -> Any:
        """The part of a per-row vector for the rows that an op makes or that operand `position` holds."""
        plan = self.tile_loop.plans[node][axis]
        rows = plan.computed if position is None else plan.needs[position]
        assert rows is not None
        begin, size = self.lookup(rows.lo, axis), self.lookup(rows.size, axis)
        part = tf.slice(tf.constant(values, dtype), stacked([begin]), stacked([size]))
        tensor = node.out() if position is None else node.inputs[position]
        dim, rank = self.dims(tensor)[axis], len(tensor.shape or ())
        return part if dim is None else tf.reshape(part, [-1 if at == dim else 1 for at in range(rank)])

    def axis_positions(self, node: Node, position: int, rows: np.ndarray, axis: int) -> Any:
        """For the rows that an op makes, where the rows that a table names are in what operand `position` holds."""
        plan = self.tile_loop.plans[node][axis]
        held = plan.needs[position]
        assert plan.computed is not None and held is not None
        begin, size = self.lookup(plan.computed.lo, axis), self.lookup(plan.computed.size, axis)
        part = tf.slice(tf.constant(rows, tf.int32), stacked([begin]), stacked([size]))
        return part - self.lookup(held.lo, axis)

    def has_all_images(self) -> bool:
        """Whether the batch is not split."""
        return self._batch is None

    def whole_batch(self) -> Any:
        """Run-time size of the whole batch."""
        return self.loop.batch

    def made_shape(self, node: Node) -> Any:
        """Shape of what the op makes."""
        tensor = node.out()
        assert tensor.shape is not None
        sizes: list[Any] = list(tensor.shape)
        if sizes[BATCH_DIM] != 1:
            images = self.loop.batch if self._batch is None else self._batch[1]
            layout = self.loop.analysis.layouts.of(tensor)
            sizes[BATCH_DIM] = images if layout is None or layout.batch_fold == 1 else images * layout.batch_fold
        for axis, (dim, plan) in enumerate(zip(self.dims(tensor), self.tile_loop.plans[node], strict=True)):
            if dim is not None:
                sizes[dim] = self.lookup(plan.computed.size, axis)  # type: ignore[union-attr]
        return stacked(sizes)

    def batch_size(self, operand: Any) -> Any:
        """Run-time batch size of a tile tensor."""
        static = operand.shape[BATCH_DIM]
        return static if static is not None else tf.shape(operand)[BATCH_DIM]


def _attr(value: Any) -> Any:
    if isinstance(value, str):
        return tf.compat.v1.AttrValue(s=value.encode())
    return tf.compat.v1.AttrValue(list=tf.compat.v1.AttrValue.ListValue(i=value))
