"""Connects the frames of an unrolled loop directly, so that they are ordinary images.

`TimeDistributed` and unrolled recurrent layers slice a sequence into frames, run a layer on each, and stack the results
for the next layer, which slices them again. Around each layer the batch and the time change places. Autodiff pads the
gradient of each frame with zeros to the whole sequence and adds them up. The rewritten graph slices and stacks along
the time where it is, reads frames directly where they were stacked before, and stacks gradients. Numbers are equal, but
for the sign of a zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from rewriters.errors import NotTileableError
from rewriters.ir.graph import Graph, Node, Shape, Tensor
from rewriters.ir.static_values import StaticEvaluator, add_constant, op_attrs
from rewriters.rules.slicing import cuts

__all__: list[str] = []


def connect_frames(graph: Graph, evaluate: StaticEvaluator) -> dict[Tensor, Tensor]:
    """Return the tensors that may replace slices, stacks and transpositions of frames; their ops join the graph."""
    return _FrameConnector(graph, evaluate).run()


def wait_for_single_frames(graph: Graph, mapping: Mapping[Tensor, Tensor]) -> None:
    """Let ops that wait for all frames of an `Unpack` wait for the frame that `mapping` replaces behind them, in place.

    Functions with a gradient of their own, such as `tf.nn.silu`, let their ops wait for the gradient of their result.
    """
    consumers = graph.consumers()
    unpacks = {tensor.node for tensor in mapping if tensor.node.op == "Unpack"}
    for node in graph.nodes.values():
        for before in unpacks.intersection(() if node.stateful else node.control_inputs):
            frames = [mapping[frame].node for frame in _frames_read_behind(node, before, consumers) if frame in mapping]
            if frames:
                others = [other for other in node.control_inputs if other is not before]
                node.control_inputs = list(dict.fromkeys([*others, *frames]))


def _frames_read_behind(
    node: Node, unpack: Node, consumers: Mapping[Tensor, Sequence[tuple[Node, int]]]
) -> list[Tensor]:
    """Return the results of an `Unpack` that a node reads, or the first of its descendants that read any."""
    level, seen = [node], {node}
    while level:
        frames = [tensor for reader in level for tensor in reader.inputs if tensor.node is unpack]
        if frames:
            return frames
        results = (reader.out(index) for reader in level for index in range(len(reader.outputs)))
        level = list(dict.fromkeys(reader for result in results for reader, _ in consumers.get(result, ())))
        level = [reader for reader in level if reader not in seen]
        seen.update(level)
    return []


class _FrameConnector:
    """One walk over a graph, in the order of its edges.

    Attributes:
        replaced: New tensor for each replaced one.
    """

    def __init__(self, graph: Graph, evaluate: StaticEvaluator) -> None:
        self.graph = graph
        self.evaluate = evaluate
        self.replaced: dict[Tensor, Tensor] = {}
        self._consumers = graph.consumers()

    def run(self) -> dict[Tensor, Tensor]:
        """Walk over the graph once, and return the replacements."""
        for node in self.graph.execution_order():
            results = [node.out(index) for index in range(len(node.outputs))]
            is_read = any(tensor in self._consumers or tensor in self.graph.outputs for tensor in results)
            if node.control_inputs or not is_read:  # Nodes that nothing reads were replaced in an earlier round.
                continue
            replacements = self._rewritten(node)
            if all(new.shape == old.shape for old, new in zip(results, replacements, strict=False)):
                self.replaced.update(zip(results, replacements, strict=False))
        return self.replaced

    def _rewritten(self, node: Node) -> Sequence[Tensor]:
        """Return the tensors that replace the results of a node; none if the node stays."""
        if node.op == "StridedSlice":
            return self._slice(node)
        if node.op == "Unpack":
            return self._unpack(node)
        if node.op == "Transpose":
            return self._transpose(node)
        return self._sum_of_frames(node) if node.op == "AddN" else ()

    def _operand(self, node: Node, position: int = 0) -> Tensor:
        return self.replaced.get(node.inputs[position], node.inputs[position])

    def _slice(self, node: Node) -> Sequence[Tensor]:
        """Read one frame: the stacked tensor itself, or a slice of the sequence before it was transposed."""
        frame = self._frame(node, node.inputs[0].shape)
        if frame is None:
            return ()
        sequence, (dim, index) = self._operand(node), frame
        if _stacks_along(sequence.node, dim):
            return [self.replaced.get(sequence.node.inputs[index], sequence.node.inputs[index])]
        source = self._before_transposition(sequence, dim)
        if source is not None:
            return [self._sliced(node, source[0], source[1], index)]
        return self._slice_of_moved_batch(node, sequence, dim, index)

    def _slice_of_moved_batch(self, node: Node, sequence: Tensor, dim: int, index: int) -> Sequence[Tensor]:
        """Slice the operand of a transposition that moves the batch, and transpose the slice."""
        order = self._order(sequence.node)
        if order is None or order[0] == 0:
            return ()
        sliced_dim, shape = order[dim], sequence.node.inputs[0].shape or ()
        frame_shape = tuple(size for other, size in enumerate(shape) if other != sliced_dim)
        frame = self._sliced(node, self._operand(sequence.node), sliced_dim, index, frame_shape)
        return [self._transposed(node, frame, _order_without(order, sliced_dim))]

    def _order(self, node: Node) -> tuple[int, ...] | None:
        """Return the order of a transposition; `None` for another op, or if it is unknown."""
        if node.op != "Transpose" or node.control_inputs:
            return None
        return self.evaluate.ints(node.inputs[1])

    def _transposed(self, node: Node, tensor: Tensor, order: tuple[int, ...]) -> Tensor:
        """Add a transposition."""
        attrs = op_attrs(T=tensor.dtype, Tperm=tf.int32)
        shape = tuple((tensor.shape or ())[dim] for dim in order)
        operands = [tensor, add_constant(self.graph, f"{node.name}/order", order, tf.int32)]
        return self.graph.add_beside(node, "Transpose", operands, attrs, [(tensor.dtype, shape)]).out()

    def _unpack(self, node: Node) -> Sequence[Tensor]:
        """Read all frames: the stacked tensors themselves, or those of the sequence before it was transposed."""
        sequence = self._operand(node)
        if sequence.shape is None:
            return ()
        dim = node.attrs["axis"].i % len(sequence.shape)
        if _stacks_along(sequence.node, dim):
            return [self.replaced.get(tensor, tensor) for tensor in sequence.node.inputs]
        source = self._before_transposition(sequence, dim)
        if source is None:
            return ()
        attrs = {**node.attrs, **op_attrs(axis=source[1])}
        frames = self.graph.add_beside(node, "Unpack", [source[0]], attrs, node.outputs)
        return [frames.out(index) for index in range(len(node.outputs))]

    def _transpose(self, node: Node) -> Sequence[Tensor]:
        """Stack frames along another dimension instead of transposing the stack."""
        order, stack = self._order(node), self._operand(node).node
        if order is None or stack.op != "Pack" or stack.control_inputs:
            return ()
        stacked = stack.attrs["axis"].i % len(order)
        dim, frames = order.index(stacked), list(stack.inputs)
        if not _keeps_order_beside(order, dim):
            if order[0] == 0:
                return ()
            frames = [self._transposed(node, frame, _order_without(order, stacked)) for frame in frames]
        attrs = {**stack.attrs, **op_attrs(axis=dim)}
        return [self.graph.add_beside(node, "Pack", frames, attrs, node.outputs).out()]

    def _sum_of_frames(self, node: Node) -> Sequence[Tensor]:
        """Stack gradients of frames instead of adding them, each padded with zeros, and at most one other gradient."""
        frames: dict[tuple[int, int], Tensor] = {}
        others = []
        for tensor in self._terms(node):
            padded, frame = tensor.node, self._padded_frame(tensor)
            if frame is None or frame in frames:
                others.append(tensor)
            else:
                frames[frame] = self.replaced.get(padded.inputs[4], padded.inputs[4])
        dims, shape = {dim for dim, _ in frames}, node.outputs[0][1]
        if len(dims) != 1 or len(others) > 1 or shape is None:
            return ()
        (dim,) = dims
        if {index for _, index in frames} != set(range(len(frames))) or len(frames) != shape[dim]:
            return ()
        attrs = {"T": node.attrs["T"], **op_attrs(axis=dim, N=len(frames))}
        operands = [frames[dim, index] for index in range(len(frames))]
        stack = self.graph.add_beside(node, "Pack", operands, attrs, node.outputs).out()
        if not others:
            return [stack]
        attrs = {**node.attrs, **op_attrs(N=2)}
        return [self.graph.add_beside(node, "AddN", [stack, *others], attrs, node.outputs).out()]

    def _terms(self, node: Node) -> list[Tensor]:
        """Return the terms of a sum, instead of a sum of padded frames its terms: autodiff adds up large ones early."""
        terms: list[Tensor] = []
        for position in range(len(node.inputs)):
            term = self._operand(node, position)
            is_inner = term.node.op == "AddN" and not term.node.control_inputs
            inner = self._terms(term.node) if is_inner and len(self._consumers.get(term, ())) == 1 else []
            terms += inner if any(map(self._padded_frame, inner)) else [term]
        return terms

    def _padded_frame(self, tensor: Tensor) -> tuple[int, int] | None:
        """Return dimension and index of the frame that a tensor pads with zeros; `None` for other tensors."""
        node = tensor.node
        if node.op != "StridedSliceGrad" or node.control_inputs:
            return None
        return self._frame(node, tensor.shape)

    def _frame(self, node: Node, shape: Sequence[int | None] | None) -> tuple[int, int] | None:
        """Return dimension and index of the only frame that a slice takes, or that its gradient pads."""
        bounds = [self.evaluate.ints(tensor) for tensor in node.inputs[1:4]]
        if shape is None or None in bounds:
            return None
        try:
            slices = cuts(node, shape, bounds)  # type: ignore[arg-type]
        except NotTileableError:
            return None
        single = [cut for cut in slices if cut.dim is not None and cut.out is None]
        are_full = all(
            cut.dim is not None and (cut.begin, cut.stride) == (0, 1) and cut.size == shape[cut.dim]
            for cut in slices
            if cut not in single
        )
        return (single[0].dim, single[0].begin) if are_full and len(single) == 1 else None  # type: ignore[return-value]

    def _before_transposition(self, sequence: Tensor, dim: int) -> tuple[Tensor, int] | None:
        """Return the operand of a transposition and its dimension of frames, if all frames stay as they are."""
        order = self._order(sequence.node)
        if order is None or not _keeps_order_beside(order, dim):
            return None
        return self._operand(sequence.node), order[dim]

    def _sliced(self, node: Node, source: Tensor, dim: int, index: int, shape: Shape = None) -> Tensor:
        """Add a slice of one entry of a dimension; without a shape its result has that of the result of `node`."""
        bounds = [[0] * dim + [index], [0] * dim + [index + 1], [1] * (dim + 1)]
        dtype = node.inputs[1].dtype
        operands = [add_constant(self.graph, f"{node.name}/bound", bound, dtype) for bound in bounds]
        before = (1 << dim) - 1
        masks = {"begin_mask": before, "end_mask": before, "shrink_axis_mask": 1 << dim}
        masks = {key: masks.get(key, 0) for key in node.attrs if key.endswith("_mask")}
        outputs = node.outputs if shape is None else [(source.dtype, shape)]
        attrs = {**node.attrs, **op_attrs(**masks)}
        return self.graph.add_beside(node, "StridedSlice", [source, *operands], attrs, outputs).out()


def _stacks_along(node: Node, dim: int) -> bool:
    """Return whether a node stacks frames along a dimension of its result."""
    if node.op != "Pack" or node.control_inputs or node.out().shape is None:
        return False
    return bool(node.attrs["axis"].i % len(node.out().shape or ()) == dim)


def _keeps_order_beside(order: Sequence[int], dim: int) -> bool:
    """Return whether a transposition moves one dimension, to `dim`, and keeps the others in order."""
    others = [source for place, source in enumerate(order) if place != dim]
    return others == sorted(others)


def _order_without(order: Sequence[int], dim: int) -> tuple[int, ...]:
    """Return the order in which a transposition leaves all dimensions but one."""
    return tuple(other - (other > dim) for other in order if other != dim)
