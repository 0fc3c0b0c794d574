"""Swaps of the tensor lists that a loop saves for its backward pass, element by element.

A swapped element leaves the device in the iteration that computes it, and comes back in the iteration of the backward
loop that reads it. In its place the list holds a number. The lists of one loop share a record per iteration: the first
of them holds its number, the others stay empty. Iterations must not overlap, or elements would come back early.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import tensorflow as tf

from rewriters.device.loop_lists import loop_facts
from rewriters.ir.graph import LOOPS, Graph, Node, Tensor, predecessors
from rewriters.ir.loop_bodies import add_body, function_reads, readers_of, source_of
from rewriters.ir.static_values import add_constant, op_attrs
from rewriters.swapping.tiers import Tier

__all__: list[str] = []

Consumers = Mapping[Tensor, Sequence[tuple[Node, int]]]
"""(node, operand position) pairs that read each tensor."""


@dataclasses.dataclass(frozen=True)
class SavedList:
    """A list that a forward loop fills and a backward loop empties.

    Attributes:
        tensor: The list, a result of the forward loop.
        reader: The backward loop.
        position: Operand of the backward loop that the list is.
        push: Op in the forward body that appends an element.
        pop: Op in the backward body that removes it.
    """

    tensor: Tensor
    reader: Node
    position: int
    push: Node
    pop: Node

    @property
    def element(self) -> Tensor:
        """Tensor of the forward body that an iteration appends."""
        return self.push.inputs[1]


def is_filled_by_loop(tensor: Tensor) -> bool:
    """Return whether a tensor is a list with elements that a loop has appended."""
    facts = tensor.node.loop
    if tensor.node.op not in LOOPS or tensor.dtype != tf.variant or facts is None or facts.body is None:
        return False
    size = facts.lists.get(tensor.index)
    return size is not None and bool(size.elements) and _push(facts.body, tensor.index) is not None


def saved_list(graph: Graph, tensor: Tensor, consumers: Consumers) -> SavedList | str:
    """Return a list that can be swapped element by element, or the reason why it cannot.

    `is_filled_by_loop` holds for the tensor.
    """
    loop, index = tensor
    created = loop.inputs[index]
    assert loop.loop is not None and loop.loop.body is not None
    push = _push(loop.loop.body, index)
    assert push is not None
    if created.node.op != "EmptyTensorList" or list(consumers[created]) != [(loop, index)]:
        return "the list is not empty before the loop"
    if function_reads(graph, loop, "cond", index) or not _only_changed_by(loop.loop.body, index, push):
        return "the loop also reads the list"
    readers = list(consumers.get(tensor, ()))
    if not readers:
        return "the step does not compute its gradient"
    if len(readers) != 1 or readers[0][0].op not in LOOPS:
        return "its consumer is no loop of the backward pass"
    reader, position = readers[0]
    body = None if reader.loop is None else reader.loop.body
    pop = None if body is None else source_of(body.outputs[position]).node
    if body is None or pop is None or pop.op != "TensorListPopBack" or not _only_changed_by(body, position, pop):
        return "the backward loop does more with the list than remove its last element"
    if function_reads(graph, reader, "cond", position) or consumers.get(reader.out(position)):
        return "the list is read after the backward loop"
    if push.inputs[1].dtype in (tf.variant, tf.resource, tf.string):
        return "its elements are lists of an inner loop"
    return SavedList(tensor, reader, position, push, pop)


def _push(body: Graph, index: int) -> Node | None:
    """Return the op that appends the only new element to a list; `None` for another change."""
    node = source_of(body.outputs[index]).node
    if node.op != "TensorListPushBack" or source_of(node.inputs[0]) != body.inputs[index]:
        return None
    return node


def _only_changed_by(body: Graph, index: int, change: Node) -> bool:
    """Return whether one op alone reads a list in a body, and nothing in the body reads its result."""
    argument, consumers = body.inputs[index], body.consumers()
    if source_of(change.inputs[0]) != argument or body.outputs.count(body.outputs[index]) != 1:
        return False
    return readers_of(argument, consumers) == [change] and not readers_of(change.out(), consumers)


def swap_lists(new: Graph, lists: Sequence[SavedList], tier: Tier) -> None:
    """Swap the elements of lists that one loop fills and one loop empties, in a copy of the graph that has them."""
    loop, reader = new.nodes[lists[0].tensor.node.name], new.nodes[lists[0].reader.name]
    name = f"lms/{loop.name}"
    created = loop.inputs[lists[0].tensor.index].node
    created.attrs = {**created.attrs, **op_attrs(element_dtype=tf.int64)}
    created.inputs[0] = add_constant(new, f"{name}/element_shape", (), tf.int32)
    _set_body(new, loop, _swapping_out(loop, lists, tier, f"{name}/swap_out"), tier)
    _set_body(new, reader, _swapping_in(reader, lists, tier, f"{name}/swap_in"), tier)
    # TensorFlow begins a loop when its first operand exists: elements would be swapped in during the forward pass.
    reader.control_inputs = [node for node in dict.fromkeys(predecessors(reader)) if node.op != "Const"]


def _swapping_out(loop: Node, lists: Sequence[SavedList], tier: Tier, name: str) -> Graph:
    """Return the body of the forward loop, which swaps elements out and appends their numbers to the first list."""
    assert loop.loop is not None and loop.loop.body is not None
    body = loop.loop.body.copy()
    first, *others = (body.nodes[saved.push.name] for saved in lists)
    elements = [body.nodes[saved.push.name].inputs[1] for saved in lists]
    first.inputs[1] = tier.swap_out_elements(body, elements, name)
    first.attrs = {**first.attrs, **op_attrs(element_dtype=tf.int64)}
    _replace(body, {push.out(): push.inputs[0] for push in others}, first)
    return body


def _swapping_in(reader: Node, lists: Sequence[SavedList], tier: Tier, name: str) -> Graph:
    """Return the body of the backward loop, which removes a number from the first list and swaps elements in."""
    assert reader.loop is not None and reader.loop.body is not None
    body = reader.loop.body.copy()
    pops = [body.nodes[saved.pop.name] for saved in lists]
    number = body.new_node(
        f"{name}/number",
        "TensorListPopBack",
        [pops[0].inputs[0], add_constant(body, f"{name}/element_shape", (), tf.int32)],
        attrs={**pops[0].attrs, **op_attrs(element_dtype=tf.int64)},
        device=pops[0].device,
        outputs=[pops[0].outputs[0], (tf.int64, ())],
    )
    copies = tier.swap_in_elements(
        body, number.out(1), [_element(saved, pop) for saved, pop in zip(lists, pops, strict=True)], name
    )
    mapping = {pop.out(1): copy for pop, copy in zip(pops, copies, strict=True)}
    mapping.update({pop.out(0): pop.inputs[0] for pop in pops[1:]})
    _replace(body, {**mapping, pops[0].out(0): number.out(0)}, number)
    return body


def _element(saved: SavedList, pop: Node) -> Tensor:
    """Return the tensor with the static shape of an element."""
    shape = pop.out(1).shape
    return pop.out(1) if shape is not None and None not in shape else saved.element


def _replace(body: Graph, mapping: Mapping[Tensor, Tensor], instead: Node) -> None:
    """Replace tensors in a loop body, redirect control edges of their producers to `instead`, and prune the body."""
    replaced = {tensor.node for tensor in mapping}
    for node in body.nodes.values():
        if any(before in replaced for before in node.control_inputs):
            node.control_inputs = list(dict.fromkeys(instead if b in replaced else b for b in node.control_inputs))
    body.replace_tensors(mapping)
    body.prune()


def _set_body(graph: Graph, loop: Node, body: Graph, tier: Tier) -> None:
    """Give a loop a body that calls Python, and iterations that do not overlap."""
    assert loop.loop is not None
    if not tier.is_skeleton:
        added = add_body(graph, body, f"{loop.attrs['body'].func.name}_swapped")
        loop.attrs = {**loop.attrs, "body": tf.compat.v1.AttrValue(func=tf.compat.v1.NameAttrList(name=added))}
    loop.op = "While"
    loop.attrs = {**loop.attrs, **op_attrs(parallel_iterations=1)}
    if not loop.variable_handles:  # A loop that reads a variable waits for earlier writes, as of the step before.
        graph.unordered.add(loop.name)
    loop.loop = loop_facts(loop, body, loop.loop.lengths)
