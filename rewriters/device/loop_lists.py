"""Memory of the loops and conditionals of a step, such as loops of recurrent layers and of `tf.map_fn`.

A loop appends the tensors that its backward pass reads to tensor lists, one element per iteration. The lists live from
the loop to the loop of the backward pass. The size of a list is that of the tensors appended by the loop's body, times
the number of iterations. Elements may be buffers that exist anyway: variables, operands of the loop, slices of a
stacked input, and the state of the loop, which is also its output. A conditional (`tf.cond`) saves tensors of the
branch that runs as optionals, which are lists of at most one element.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence

import tensorflow as tf

from rewriters.device.kernel_scratch import op_scratch
from rewriters.device.op_buffers import forwards_input_buffer
from rewriters.device.peak_memory import (
    Action,
    AllocationEvent,
    IterationTrace,
    concurrent_scratch,
    schedule,
    sizes_at_peak,
)
from rewriters.ir.graph import BRANCHES, LOOPS, Graph, ListSize, LoopFacts, Node, Shape, Tensor, shape_bytes
from rewriters.ir.loop_bodies import (
    branch_runs,
    branches_of,
    element_spec,
    function_of,
    infer_shapes,
    is_folded,
    num_iterations,
    readers_of,
    source_of,
)
from rewriters.ir.op_traits import Trait, ops_with
from rewriters.ir.static_values import Dim, StaticEvaluator, Value, constant, is_inexact
from rewriters.ir.symbolic_dims import SymbolicDim

__all__: list[str] = []

SLICE_ALIGNMENT_BYTES = 64
"""Elements whose size is a multiple are slices of the stacked tensor; others are copies (`EIGEN_MAX_ALIGN_BYTES`)."""

MAX_PENDING_ITERATIONS = 15
"""Iterations whose weight gradients wait to be added; measured with a GRU of 512 units on two cores."""

_NOTHING = ListSize((), 0)


def add_loop_facts(graph: Graph, runs: Mapping[str, Sequence[int]] | None = None) -> None:
    """Set the facts about loops, and about ops that create tensor lists, in place; unknown ones stay `None`.

    The length of a list that grows in a loop is in no shape. The shapes of tensors that depend on it, or on the `sizes`
    of the graph, are estimated.

    Args:
        graph: A step, or the body of a loop.
        runs: How often each branch of conditionals of a body runs, by name, where it is known.
    """
    nodes = graph.nodes.values()
    has_lists = any(
        node.op in LOOPS | BRANCHES or any(dtype == tf.variant for dtype, _ in node.outputs) for node in nodes
    )
    if not has_lists and not graph.sizes:
        return
    _set_facts(graph, runs or {})
    estimate, lengths = graph, _open_lengths(graph)
    try:
        while lengths or graph.sizes and estimate is graph:  # A loop over a stacked list has as many iterations.
            estimate = estimate.copy()
            infer_shapes(estimate, lengths)
            _set_facts(estimate, runs or {})
            lengths = _open_lengths(estimate)
    except (ValueError, TypeError, RuntimeError, tf.errors.OpError):
        return
    if estimate is not graph:
        _take_estimates(graph, estimate)


def _take_estimates(graph: Graph, estimate: Graph) -> None:
    """Set facts about memory that hold for estimated shapes; bodies of loops keep the shapes that are certain."""
    least = min(graph.sizes.values(), default=None)
    for node in graph.nodes.values():
        other = estimate.nodes[node.name]
        specs = enumerate(zip(node.outputs, other.outputs, strict=True))
        estimates = ((index, before, _with_one_open_size(shape, least)) for index, ((_, before), (_, shape)) in specs)
        shapes = {index: shape for index, before, shape in estimates if before != shape}
        facts = node.loop
        if other.loop is not None and (facts is not None or other.loop.body is None):
            known = {key: getattr(other.loop, key) for key in ("lists", "lengths", "operand_buffers", "output_buffers")}
            facts = dataclasses.replace(facts or other.loop, **known)
        if shapes:
            facts = dataclasses.replace(facts or LoopFacts({}), estimated_shapes=shapes)
        node.loop = facts


def _with_one_open_size(shape: Shape, least: int | None) -> Shape:
    """Return a shape with `least`, if given, for its second and later unknown sizes.

    Sizes that depend on data, such as those of a padded table of groups of rows, multiply to about the number of rows.
    """
    if shape is None or least is None or None not in shape:
        return shape
    first = shape.index(None) + 1
    return (*shape[:first], *(least if size is None else size for size in shape[first:]))


def _set_facts(graph: Graph, runs: Mapping[str, Sequence[int]]) -> None:
    evaluate = StaticEvaluator(graph)
    for node in graph.execution_order():
        if node.op in LOOPS:
            node.loop = _loop_facts(graph, node, evaluate)
        else:
            node.loop = _branch_facts(graph, node, runs.get(node.name)) if node.op in BRANCHES else _list_facts(node)


def _open_lengths(graph: Graph) -> dict[str, int]:
    """Return the lengths of the lists that are stacked to tensors of unknown length, by the name of the op.

    A list that grows in a loop whose number of iterations is unknown counts as one element, of which the step's
    prediction says that it leaves out the loop.
    """
    lengths: dict[str, int] = {}
    for node in graph.nodes.values():
        if node.op != "TensorListStack" or node.attrs["num_elements"].i >= 0:
            continue
        tensor = source_of(node.inputs[0])
        facts, size = tensor.node.loop, list_size(tensor)
        if size is not None and size.length is not None and size.elements:
            lengths[node.name] = size.length * len(size.elements)
        elif size is None and facts is not None and facts.body is not None and not facts.lengths:
            lengths[node.name] = 1
    return lengths


def list_size(tensor: Tensor) -> ListSize | None:
    """Return the size of a tensor list; `None` if it is unknown."""
    tensor = source_of(tensor)
    return None if tensor.node.loop is None else tensor.node.loop.lists.get(tensor.index)


def _list_facts(node: Node) -> LoopFacts | None:
    """Return the facts about an op outside of loops that creates a list."""
    if not any(dtype == tf.variant for dtype, _ in node.outputs):
        return None
    if node.op in ("EmptyTensorList", "TensorListReserve", "OptionalNone"):
        return LoopFacts({0: _NOTHING})
    if node.op == "OptionalFromValue":
        spec = _element(node.inputs[0]) if len(node.inputs) == 1 else None
        return None if spec is None else LoopFacts({0: ListSize((spec,), 1)}, {0: 0})
    if node.op == "TensorListFromTensor":
        stacked = node.inputs[0]
        if not stacked.shape:
            return None
        slices = ListSize(((stacked.dtype, stacked.shape[1:]),), stacked.shape[0])
        return LoopFacts({0: slices}, {0: 0} if _is_aligned(slices) else {}, element_specs={0: slices.elements[0]})
    if node.op in ops_with(Trait.SETS_ELEMENT):
        before, spec = list_size(node.inputs[0]), (node.inputs[-1].dtype, node.inputs[-1].shape)
        if before is None or before.length is None or spec[0] == tf.variant or spec[1] is None:
            return None
        if not before.elements:
            return LoopFacts({0: ListSize((spec,), 1)}, {0: len(node.inputs) - 1})
        return (
            LoopFacts({0: ListSize((spec,), before.length + 1)})
            if _grows(node) and before.elements == (spec,)
            else None
        )
    if node.op in ("ZerosLike", "AddN"):
        sizes = [size for t in node.inputs if (size := list_size(t)) is not None and size.elements]
        return LoopFacts({0: sizes[0]}) if sizes else None
    if node.op == "Identity":
        passed = list_size(node.inputs[0])
        return None if passed is None else LoopFacts({0: passed}, {0: 0}, element_specs=_specs(node.inputs[0]))
    return None


def _grows(node: Node) -> bool:
    """Return whether a list grows by the element that an op sets."""
    return node.op == "TensorListPushBack" or node.attrs["resize_if_index_out_of_bounds"].b


def _element(tensor: Tensor) -> tuple[tf.DType, Shape] | None:
    """Return the type and shape of an element; that of a list of lists is all of the inner list."""
    if tensor.dtype != tf.variant:
        return None if tensor.shape is None else (tensor.dtype, tensor.shape)
    size = list_size(tensor)
    if size is None or len(size.elements) > 1:
        return None
    ((dtype, shape),) = size.elements or ((tf.int32, (0,)),)
    return dtype, None if shape is None else (size.length, *shape)


def _specs(tensor: Tensor, index: int = 0) -> dict[int, tuple[tf.DType, Shape]]:
    spec = element_spec(tensor)
    return {} if spec is None else {index: spec}


def _branch_facts(graph: Graph, node: Node, runs: Sequence[int] | None) -> LoopFacts | None:
    """Return the facts about a conditional.

    Where it is unknown which branch runs, it is the one that saves most for the backward pass.
    """
    if all(dtype == tf.bool and shape == () for dtype, shape in node.outputs):
        return None  # An assertion.
    branches = branches_of(graph, node)
    if not branches:
        return None
    for branch in branches:
        add_loop_facts(branch)
    facts = [_facts_of_branch(branch) for branch in branches]
    heaviest = max(facts, key=_branch_bytes)
    buffers = {index: at for index, at in heaviest.operand_buffers.items() if all(_may_be(f, index, at) for f in facts)}
    heaviest = dataclasses.replace(heaviest, operand_buffers=buffers)
    return heaviest if runs is None else _facts_of_runs(heaviest, [p for p in zip(facts, runs, strict=True) if p[1]])


def _facts_of_runs(heaviest: LoopFacts, branches: Sequence[tuple[LoopFacts, int]]) -> LoopFacts:
    """Return the facts about a conditional of which each branch runs in a known number of iterations."""
    runs: dict[int, int] = {}
    lists: dict[int, ListSize] = {}
    operand_buffers, output_buffers = dict(heaviest.operand_buffers), dict(heaviest.output_buffers)
    for index in heaviest.lists:
        filled = [(facts, count) for facts, count in branches if index in facts.lists and facts.lists[index].elements]
        runs[index] = sum(count for _, count in filled)
        lists[index] = _NOTHING
        for facts, _ in filled[:1]:
            lists[index] = facts.lists[index]
            for mine, theirs in (
                (operand_buffers, facts.operand_buffers),
                (output_buffers, facts.output_buffers),
            ):
                mine.pop(index, None)
                mine.update({index: theirs[index]} if index in theirs else {})
    return dataclasses.replace(
        heaviest, lists=lists, operand_buffers=operand_buffers, output_buffers=output_buffers, runs=runs
    )


def _branch_bytes(facts: LoopFacts) -> tuple[int, int]:
    """Return the bytes that a branch saves, and those of all its results."""
    nodes = () if facts.body is None else facts.body.nodes.values()
    results = sum(node.out(index).num_bytes(1) for node in nodes for index in range(len(node.outputs)))
    shared = facts.operand_buffers.keys() | facts.output_buffers.keys()
    return sum(size.num_bytes(1) for index, size in facts.lists.items() if index not in shared), results


def _may_be(facts: LoopFacts, index: int, operand: int) -> bool:
    """Return whether a result of a branch is the buffer of an operand, or an optional without a value."""
    is_empty = index in facts.lists and not facts.lists[index].elements
    return is_empty or facts.operand_buffers.get(index) == operand


def _facts_of_branch(branch: Graph) -> LoopFacts:
    """Return the facts about a conditional that runs one of its branches."""
    position = {tensor: number + 1 for number, tensor in enumerate(branch.inputs)}
    lists: dict[int, ListSize] = {}
    operand_buffers: dict[int, int] = {}
    output_buffers: dict[int, int] = {}
    owner: dict[Tensor, int] = {}
    for index, tensor in enumerate(branch.outputs):
        size = list_size(tensor) if tensor.dtype == tf.variant else None
        lists.update({} if size is None else {index: size})
        value = _value_of(tensor)
        if value in position:
            operand_buffers[index] = position[value]
        elif owner.setdefault(value, index) != index:
            output_buffers[index] = owner[value]
    return LoopFacts(lists, operand_buffers, output_buffers, branch)


def _value_of(tensor: Tensor) -> Tensor:
    """Return the tensor whose buffer a result of a branch is, or holds as an optional."""
    while tensor.node.op == "OptionalFromValue" or (forwards_input_buffer(tensor.node) and tensor.node.inputs):
        tensor = tensor.node.inputs[0]
    return tensor


def _is_aligned(size: ListSize) -> bool:
    return all(shape_bytes(*element, 1) % SLICE_ALIGNMENT_BYTES == 0 for element in size.elements)


def _loop_facts(graph: Graph, node: Node, evaluate: StaticEvaluator) -> LoopFacts | None:
    body, condition = function_of(graph, node, "body"), function_of(graph, node, "cond")
    if body is None or condition is None:
        return None
    initial = [evaluate(t) if t.dtype.is_integer else None for t in node.inputs]
    lengths = _lengths(node, body, condition, initial, evaluate)
    length = lengths[0] if lengths else None
    add_loop_facts(body, None if length is None else branch_runs(body, initial, length))
    return loop_facts(node, body, lengths)


def loop_facts(node: Node, body: Graph, lengths: tuple[int | None, ...]) -> LoopFacts:
    """Return the facts about a loop with a body; `lengths` as in `LoopFacts`."""
    return _LoopReader(node, body, lengths).facts()


def _lengths(
    node: Node, body: Graph, condition: Graph, initial: Sequence[Value], evaluate: StaticEvaluator
) -> tuple[int | None, ...]:
    """Return the largest number of iterations, as `LoopFacts` holds it.

    Where no counter bounds the loop, its lists do: one that it fills, or one that it reads.
    """
    bounds: list[Dim | Value] = [num_iterations(body, condition, initial)]
    for tensor in map(source_of, node.inputs):
        size = list_size(tensor)
        if tensor.node.op in ("EmptyTensorList", "TensorListReserve"):
            bounds.append(evaluate(tensor.node.inputs[1]) or None)  # A list that grows begins with no element.
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
        self._sharing: dict[Tensor, list[int]] = {}
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
        for indices in self._sharing.values():
            owner = max(indices, key=lambda index: self._lists[index].num_bytes(1))
            self._output_buffers.update((index, owner) for index in indices if index != owner)
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
        self._lists[index] = ListSize(tuple(spec for _, spec in stored), self._length(index, appended) if stored else 0)
        if len(stored) == 1:
            ((root, _),) = stored
            if isinstance(root, int):
                self._operand_buffers[index] = root
            else:
                self._sharing.setdefault(root, []).append(index)

    def _length(self, index: int, appended: Sequence[Tensor]) -> int | None:
        """Return the number of elements that a list has after the loop, by each of the ops that append to it."""
        length, before = self._lengths[0], list_size(self._node.inputs[index])
        if len(appended) == 1 and (facts := source_of(appended[0]).node.loop) is not None:
            length = facts.runs.get(source_of(appended[0]).index, length)
        last = source_of(self._body.outputs[index]).node
        if length is None or before is None or last.op not in ops_with(Trait.SETS_ELEMENT) or not _grows(last):
            return length
        return length + (before.length or 0)

    def _root(self, tensor: Tensor) -> Tensor | int | None:
        """Return the tensor whose buffer an element is: an operand's position, or `None` for a variable or constant."""
        for _ in range(len(self._body.nodes)):
            while forwards_input_buffer(tensor.node) and tensor.node.inputs:
                tensor = tensor.node.inputs[0]
            position = self._position.get(tensor)
            if position is not None:
                if self._outputs[position] == tensor:
                    return position
                tensor = self._outputs[position]  # The result of the iteration before.
            elif tensor.node.op in BRANCHES and tensor != (passed := _passed_on(tensor)):
                tensor = passed
            elif tensor.node.op == "TensorListGetItem" and source_of(tensor.node.inputs[0]) in self._position:
                tensor = source_of(tensor.node.inputs[0])
                if self._outputs[self._position[tensor]] != tensor:
                    return tensor
            else:
                is_held = tensor.node.op in ("Const", "ReadVariableOp") or is_folded(tensor)
                return None if is_held else self._repeated.get(tensor, tensor)
        return tensor

    def _spec(self, tensor: Tensor, index: int) -> tuple[tf.DType, Shape] | None:
        """Return the type and shape of an element."""
        if tensor.dtype == tf.variant or tensor.shape is not None:
            return _element(tensor)
        shape = self._declared_shape(index)
        return None if shape is None and tensor.dtype not in (tf.resource, tf.string) else (tensor.dtype, shape)

    def _declared_shape(self, index: int) -> Shape:
        """Return the shape of the elements that the list was created for."""
        created = source_of(self._node.inputs[index]).node
        declared = constant(created.inputs[0].node) if created.op in ("EmptyTensorList", "TensorListReserve") else None
        return None if declared is None or not declared.ndim else tuple(None if d < 0 else int(d) for d in declared)


def _passed_on(tensor: Tensor) -> Tensor:
    """Return the operand or earlier result of a conditional whose buffer a result is; by default the result."""
    node, index = tensor
    facts = node.loop or LoopFacts({})
    if index in facts.operand_buffers:
        return node.inputs[facts.operand_buffers[index]]
    return node.out(facts.output_buffers.get(index, index))


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
    """Return the tensors that an iteration appends to the list at a position; `None` if other ops change the list."""
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

    That of a conditional is the memory of its branch beside the results.

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
    """Return the sizes of the tensors that an iteration needs beside elements of lists, or a branch beside results."""
    if node.loop is None or node.loop.body is None:
        return []
    body = node.loop.body
    order = body.execution_order()
    scratch = {inner: op_scratch(inner, batch, body.device) + sum(_iteration_sizes(inner, batch)) for inner in order}
    appended = [appended_elements(body, index) or () for index in range(len(body.outputs))] if node.op in LOOPS else []
    elements = {tensor for tensors in appended for tensor in tensors if tensor.shape}

    def num_bytes(tensor: Tensor) -> int:
        return 0 if tensor.dtype == tf.variant or is_folded(tensor) else tensor.num_bytes(batch)

    events = schedule(order, num_bytes, concurrent_scratch(scratch, order, body.device), [*body.outputs, *elements])
    sizes = sizes_at_peak(events)
    if node.op in BRANCHES:
        counted = [num_bytes(tensor) for tensor in {_value_of(t) for t in body.outputs}.difference(body.inputs)]
    else:  # Complete lists count elements that are appended or removed. Others take the memory of removed ones.
        counted = [shape_bytes(*e, batch) for size in _own_lists(node.loop) for e in size.elements]
        counted += [num_bytes(inner.out(1)) for inner in order if inner.op == "TensorListPopBack"]
    for counted_bytes in counted:
        if counted_bytes in sizes:
            sizes.remove(counted_bytes)
    if node.op in LOOPS:
        sizes += _pending(node, batch) * [tensor.num_bytes(batch) for tensor in _accumulated(body)]
    return sizes


def _pending(node: Node, batch: int) -> int:
    """Return the number of iterations of a loop whose terms of sums wait to be added."""
    pending = min(node.attrs["parallel_iterations"].i - 1, MAX_PENDING_ITERATIONS)
    lengths = () if node.loop is None else node.loop.lengths
    return min(pending, (lengths[0] or batch) - 1) if lengths else pending


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
