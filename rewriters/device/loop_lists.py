"""Memory of the loops of a step, such as those of recurrent layers and of `tf.map_fn`.

A loop appends the tensors that its backward pass reads to tensor lists, one element per iteration. The lists live from
the loop to the loop of the backward pass. The size of a list is that of the tensors appended by the loop's body, times
the number of iterations. Elements may be buffers that exist anyway: variables, operands of the loop, slices of a
stacked input, and the state of the loop, which is also its output.
"""

from __future__ import annotations

from collections.abc import Hashable

import tensorflow as tf

from rewriters.device import properties
from rewriters.device.kernel_scratch import op_scratch
from rewriters.device.peak_memory import (
    Action,
    AllocationEvent,
    IterationTrace,
    concurrent_scratch,
    schedule,
    sizes_at_peak,
)
from rewriters.ir.graph import LOOPS, Graph, ListSize, LoopFacts, Node, Shape, Tensor, shape_bytes
from rewriters.ir.loop_bodies import element_spec, function_of, is_folded, num_iterations, readers_of, source_of
from rewriters.ir.op_traits import Trait, ops_with
from rewriters.ir.static_values import Dim, StaticEvaluator, Value, constant, is_inexact
from rewriters.ir.symbolic_dims import SymbolicDim

__all__: list[str] = []

SLICE_ALIGNMENT_BYTES = 64
"""Elements whose size is a multiple are slices of the stacked tensor; others are copies (`EIGEN_MAX_ALIGN_BYTES`)."""

MAX_PENDING_ITERATIONS = 15
"""Iterations whose weight gradients wait to be added; measured with a GRU of 512 units on two cores."""

_NOTHING = ListSize((), 0)


def add_loop_facts(graph: Graph) -> None:
    """Set the facts about loops, and about ops that create tensor lists, in place; unknown ones stay `None`."""
    nodes = graph.nodes.values()
    if not any(node.op in LOOPS or any(dtype == tf.variant for dtype, _ in node.outputs) for node in nodes):
        return
    evaluate = StaticEvaluator(graph)
    for node in graph.execution_order():
        if node.loop is None:
            node.loop = _loop_facts(graph, node, evaluate) if node.op in LOOPS else _list_facts(node)


def list_size(tensor: Tensor) -> ListSize | None:
    """Return the size of a tensor list; `None` if it is unknown."""
    tensor = source_of(tensor)
    return None if tensor.node.loop is None else tensor.node.loop.lists.get(tensor.index)


def _list_facts(node: Node) -> LoopFacts | None:
    """Return the facts about an op outside of loops that creates a list."""
    if not any(dtype == tf.variant for dtype, _ in node.outputs):
        return None
    if node.op in ("EmptyTensorList", "TensorListReserve"):
        return LoopFacts({0: _NOTHING})
    if node.op == "TensorListFromTensor":
        stacked = node.inputs[0]
        if not stacked.shape:
            return None
        slices = ListSize(((stacked.dtype, stacked.shape[1:]),), stacked.shape[0])
        return LoopFacts({0: slices}, {0: 0} if _is_aligned(slices) else {}, element_specs={0: slices.elements[0]})
    if node.op in ("ZerosLike", "AddN"):
        sizes = [size for t in node.inputs if (size := list_size(t)) is not None and size.elements]
        return LoopFacts({0: sizes[0]}) if sizes else None
    if node.op == "Identity":
        passed = list_size(node.inputs[0])
        return None if passed is None else LoopFacts({0: passed}, {0: 0}, element_specs=_specs(node.inputs[0]))
    return None


def _specs(tensor: Tensor, index: int = 0) -> dict[int, tuple[tf.DType, Shape]]:
    spec = element_spec(tensor)
    return {} if spec is None else {index: spec}


def _is_aligned(size: ListSize) -> bool:
    return all(shape_bytes(*element, 1) % SLICE_ALIGNMENT_BYTES == 0 for element in size.elements)


def _loop_facts(graph: Graph, node: Node, evaluate: StaticEvaluator) -> LoopFacts | None:
    body, condition = function_of(graph, node, "body"), function_of(graph, node, "cond")
    if body is None or condition is None:
        return None
    add_loop_facts(body)
    return loop_facts(node, body, _lengths(node, body, condition, evaluate))


def loop_facts(node: Node, body: Graph, lengths: tuple[int | None, ...]) -> LoopFacts:
    """Return the facts about a loop with a body.

    Args:
        node: The loop.
        body: Function of one iteration.
        lengths: See `LoopFacts`.
    """
    return _LoopReader(node, body, lengths).facts()


def _lengths(node: Node, body: Graph, condition: Graph, evaluate: StaticEvaluator) -> tuple[int | None, ...]:
    """Return the largest number of iterations, as `LoopFacts` holds it.

    Where no counter bounds the loop, its lists do: one that it fills, or one that it reads.
    """
    initial = [evaluate(t) if t.dtype.is_integer else None for t in node.inputs]
    bounds: list[Dim | Value] = [num_iterations(body, condition, initial)]
    for tensor in map(source_of, node.inputs):
        size = list_size(tensor)
        if tensor.node.op in ("EmptyTensorList", "TensorListReserve"):
            bounds.append(evaluate(tensor.node.inputs[1]))
        elif size is not None and size.elements:
            bounds.append(SymbolicDim() if size.length is None else size.length)
    known = [bound for bound in bounds if isinstance(bound, SymbolicDim) or (isinstance(bound, int) and bound >= 0)]
    return tuple(bound if isinstance(bound, int) else None for bound in known[:1])


class _LoopReader:
    """Reads which buffers the results of a loop consist of."""

    def __init__(self, node: Node, body: Graph, lengths: tuple[int | None, ...]) -> None:
        self._node = node
        self._body = body
        self._lengths = lengths
        self._position = {tensor: position for position, tensor in enumerate(body.inputs)}
        self._outputs = [source_of(tensor) for tensor in body.outputs]
        self._owner: dict[Tensor, int] = {}
        self._repeated = _common_subexpressions(body)
        self._lists: dict[int, ListSize] = {}
        self._operand_buffers: dict[int, int] = {}
        self._output_buffers: dict[int, int] = {}
        self._element_specs: dict[int, tuple[tf.DType, Shape]] = {}

    def facts(self) -> LoopFacts:
        """Return the facts about the loop."""
        changed = [index for index, tensor in enumerate(self._outputs) if tensor != self._body.inputs[index]]
        for index, tensor in enumerate(self._outputs):
            if index not in changed:
                self._operand_buffers[index] = index
                size = list_size(self._node.inputs[index])
                self._lists.update({} if size is None else {index: size})
                self._element_specs.update(_specs(self._node.inputs[index], index))
            elif tensor.dtype == tf.variant:
                self._read_list(index)
        return LoopFacts(
            self._lists, self._operand_buffers, self._output_buffers, self._body, self._lengths, self._element_specs
        )

    def _read_list(self, index: int) -> None:
        """Set the size of a list that the loop changes, and the buffers of its elements."""
        appended = appended_elements(self._body, index)
        specs = None if appended is None else [self._spec(tensor, index) for tensor in appended]
        if appended is None or specs is None or None in specs:
            return
        alike = {spec for spec, tensor in zip(specs, appended, strict=True) if tensor.dtype != tf.variant}
        if len(alike) == 1 and (spec := alike.pop()) is not None:
            self._element_specs[index] = spec
        if not appended:
            self._lists[index] = _NOTHING
            return
        if not self._lengths:
            return
        roots = [self._root(tensor) for tensor in appended]
        stored = [
            (root, spec) for root, spec in zip(roots, specs, strict=True) if root is not None and spec is not None
        ]
        self._lists[index] = ListSize(tuple(spec for _, spec in stored), self._lengths[0] if stored else 0)
        if len(stored) == 1:
            ((root, _),) = stored
            if isinstance(root, int):
                self._operand_buffers[index] = root
            elif self._owner.setdefault(root, index) != index:
                self._output_buffers[index] = self._owner[root]

    def _root(self, tensor: Tensor) -> Tensor | int | None:
        """Return the tensor whose buffer an element is: an operand's position, or `None` for a variable or constant."""
        for _ in range(len(self._body.nodes)):
            while properties.forwards_input_buffer(tensor.node) and tensor.node.inputs:
                tensor = tensor.node.inputs[0]
            position = self._position.get(tensor)
            if position is not None:
                if self._outputs[position] == tensor:
                    return position
                tensor = self._outputs[position]  # The result of the iteration before.
            elif tensor.node.op == "TensorListGetItem" and source_of(tensor.node.inputs[0]) in self._position:
                tensor = source_of(tensor.node.inputs[0])
                if self._outputs[self._position[tensor]] != tensor:
                    return tensor
            else:
                is_held = tensor.node.op in ("Const", "ReadVariableOp") or is_folded(tensor)
                return None if is_held else self._repeated.get(tensor, tensor)
        return tensor

    def _spec(self, tensor: Tensor, index: int) -> tuple[tf.DType, Shape] | None:
        """Return the type and shape of an element; that of a list of lists is all of the inner list."""
        if tensor.dtype != tf.variant:
            shape = tensor.shape if tensor.shape is not None else self._declared_shape(index)
            return None if shape is None and tensor.dtype not in (tf.resource, tf.string) else (tensor.dtype, shape)
        size = list_size(tensor)
        if size is None or len(size.elements) > 1:
            return None
        ((dtype, shape),) = size.elements or ((tf.int32, (0,)),)
        return dtype, None if shape is None else (size.length, *shape)

    def _declared_shape(self, index: int) -> Shape:
        """Return the shape of the elements that the list was created for."""
        created = source_of(self._node.inputs[index]).node
        declared = constant(created.inputs[0].node) if created.op in ("EmptyTensorList", "TensorListReserve") else None
        return None if declared is None or not declared.ndim else tuple(None if d < 0 else int(d) for d in declared)


def _common_subexpressions(body: Graph) -> dict[Tensor, Tensor]:
    """Return the first of equal results for each result that repeats another; TensorFlow computes them once."""
    first: dict[Hashable, Node] = {}
    repeated: dict[Tensor, Tensor] = {}
    for node in body.execution_order():
        if node.stateful or not node.inputs or any(value.HasField("func") for value in node.attrs.values()):
            continue
        operands = tuple(repeated.get(source_of(tensor), source_of(tensor)) for tensor in node.inputs)
        values = tuple(_constant_bytes(tensor) or tensor for tensor in operands)
        attrs = tuple(sorted((key, value.SerializeToString()) for key, value in node.attrs.items()))
        other = first.setdefault((node.op, attrs, values), node)
        if other is not node:
            repeated.update((node.out(index), other.out(index)) for index in range(len(node.outputs)))
    return repeated


def _constant_bytes(tensor: Tensor) -> bytes | None:
    return tensor.node.attrs["value"].SerializeToString() if tensor.node.op == "Const" else None


def appended_elements(body: Graph, index: int) -> list[Tensor] | None:
    """Return the tensors that an iteration appends to a list; `None` if other ops change the list.

    Args:
        body: Function of one iteration.
        index: Position of the list among the states of the loop.
    """
    return _appended(body.outputs[index], body.inputs[index])


def _appended(result: Tensor, argument: Tensor) -> list[Tensor] | None:
    result = source_of(result)
    node = result.node
    if result == argument or node.op in ("TensorListReserve", "EmptyTensorList"):
        return []
    if node.op in ("TensorListPopBack", "TensorListResize"):
        return _appended(node.inputs[0], argument)
    if node.op in ops_with(Trait.SETS_ELEMENT):
        before = _appended(node.inputs[0], argument)
        return None if before is None else [*before, node.inputs[-1]]
    if node.op == "AddN":
        parts = [_appended(tensor, argument) for tensor in node.inputs]
        return None if None in parts else [tensor for part in parts if part is not None for tensor in part]
    return None


def loop_iterations(graph: Graph, batch: int) -> dict[str, list[IterationTrace]]:
    """Return the memory of an iteration of each loop of the step, by the loop's name, beside complete lists.

    The last iteration computes the last elements of the lists: its own memory is that above its elements. Where
    iterations overlap, as those of `tf.map_fn` do, the lists are incomplete meanwhile. The tensors of an iteration are
    allocated one by one: each may occupy up to twice its bytes.
    """
    traces: dict[str, list[IterationTrace]] = {}
    for node in graph.nodes.values():
        sizes = _iteration_sizes(node, batch)
        if sizes:
            events = [
                *(AllocationEvent(Action.ALLOCATE, key, size, node.name) for key, size in enumerate(sizes)),
                AllocationEvent(Action.RUN, -1, 0, node.name),
                *(AllocationEvent(Action.FREE, key, 0, node.name) for key in range(len(sizes))),
            ]
            traces[node.name] = [IterationTrace(events, events)]
    return traces


def _iteration_sizes(node: Node, batch: int) -> list[int]:
    """Return the sizes of the tensors that an iteration of a loop needs beside the elements of its lists."""
    if node.op not in LOOPS or node.loop is None or node.loop.body is None:
        return []
    body = node.loop.body
    order = body.execution_order()
    scratch = {inner: op_scratch(inner, batch) + sum(_iteration_sizes(inner, batch)) for inner in order}
    elements = {
        tensor for index in range(len(body.outputs)) for tensor in appended_elements(body, index) or () if tensor.shape
    }

    def num_bytes(tensor: Tensor) -> int:
        return 0 if tensor.dtype == tf.variant or is_folded(tensor) else tensor.num_bytes(batch)

    events = schedule(order, num_bytes, concurrent_scratch(scratch, order), [*body.outputs, *elements])
    sizes = sizes_at_peak(events)
    # Complete lists count the elements that an iteration appends or removes. Others take the memory of removed ones.
    appended = (shape_bytes(*e, batch) for size in _own_lists(node.loop) for e in size.elements)
    removed = (num_bytes(inner.out(1)) for inner in order if inner.op == "TensorListPopBack")
    for element_bytes in (*appended, *removed):
        if element_bytes in sizes:
            sizes.remove(element_bytes)
    pending = min(node.attrs["parallel_iterations"].i - 1, MAX_PENDING_ITERATIONS)
    if node.loop.lengths:
        pending = min(pending, (node.loop.lengths[0] or batch) - 1)
    return sizes + pending * [tensor.num_bytes(batch) for tensor in _accumulated(body)]


def _accumulated(body: Graph) -> list[Tensor]:
    """Return the states that are sums over all iterations, such as weight gradients.

    Nothing else depends on such a state. Iterations overlap, and their terms wait: adding takes longer than computing.
    """
    consumers = body.consumers()
    return [
        argument
        for argument, result in zip(body.inputs, map(source_of, body.outputs), strict=True)
        if is_inexact(argument.dtype)
        and result.node.op in ops_with(Trait.SUM)
        and readers_of(argument, consumers) == [result.node]
    ]


def _own_lists(facts: LoopFacts) -> list[ListSize]:
    """Return the sizes of the lists whose elements a loop allocates."""
    return [
        size
        for index, size in facts.lists.items()
        if index not in facts.operand_buffers and index not in facts.output_buffers
    ]
