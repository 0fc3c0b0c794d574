"""Small values that are repeated to the size of an image only to meet one: they stay small, and give the same bits.

The gradient of a mean is a few numbers, repeated over the image, divided by a count and added to another gradient;
normalisation in training mode has two of them in each layer. Elementwise operations repeat their operands themselves,
so that the copies are not needed: less memory at the worst moment of a step, and fewer passes over it.

Additions have to be made in the same order (`summation_order.py`). Those that follow one another are left alone; an
`AddN` of several is taken apart, so that its order no longer depends on who else reads its operands, and when.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from rewriters.analysis import summation_order
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.ir.graph import Graph, Node, Tensor
from rewriters.ir.op_traits import Trait, ops_with

__all__: list[str] = []


class _Small(NamedTuple):
    """What a tensor is repeated from.

    Attributes:
        tensor: Of the new graph.
        shape: Its sizes, symbols for unknown ones.
    """

    tensor: Tensor
    shape: tuple[Any, ...]


def shrink_broadcasts(analysis: GraphAnalysis) -> Graph:
    """A new graph in which elementwise operations read small operands as they are."""
    return _BroadcastShrinker(analysis).run()


class _BroadcastShrinker:
    def __init__(self, analysis: GraphAnalysis) -> None:
        self.analysis = analysis
        self.evaluate = analysis.evaluate
        self.graph = analysis.graph.copy()
        self.small: dict[Tensor, _Small] = {}
        """By tensor of the original graph."""

    def run(self) -> Graph:
        for node in self.analysis.order:
            if len(node.outputs) != 1 or node.outputs[0][1] is None:
                continue
            source = self._repeated(node)
            if source is not None:
                self.small[node.out()] = self._operand(source)
            elif any(tensor in self.small for tensor in node.inputs) or (node.op == "AddN" and len(node.inputs) > 2):
                self._through(node)
        self._wait_for_small()
        self.graph.same_size |= self.analysis.graph.same_size
        self.graph.prune()
        return self.graph

    def _repeated(self, node: Node) -> Tensor | None:
        """What an operation repeats, if it does nothing else, such as to wait for others."""
        if node.control_inputs:
            return None
        if node.op == "Fill":
            return node.inputs[1]
        if node.op not in ("BroadcastTo", "Tile"):
            return None
        source, counts = node.inputs[0], self.evaluate(node.inputs[1])
        if source.shape is None:
            return None
        if node.op == "BroadcastTo":
            return source
        if not isinstance(counts, tuple) or len(counts) != len(source.shape):
            return None
        return source if all(d == 1 or n == 1 for d, n in zip(source.shape, counts, strict=True)) else None

    def _operand(self, tensor: Tensor) -> _Small:
        """The tensor, or what it is repeated from."""
        if tensor in self.small:
            return self.small[tensor]
        return _Small(Tensor(self.graph.nodes[tensor.node.name], tensor.index), self._sizes(tensor))

    def _wait_for_small(self) -> None:
        """Who waits for a repeated value, without reading it, waits for what it is repeated from."""
        instead = {self.graph.nodes[whole.node.name]: small.tensor.node for whole, small in self.small.items()}
        for node in self.graph.nodes.values():
            if any(before in instead for before in node.control_inputs):
                node.control_inputs = [instead.get(before, before) for before in node.control_inputs]

    def _sizes(self, tensor: Tensor) -> tuple[Any, ...]:
        """Sizes of a tensor: an integer, a symbol, or `None`."""
        return self.evaluate.shape(tensor) or ()

    def _through(self, node: Node) -> None:
        """Let an elementwise operation read what its operands are repeated from.

        Its result is then as large as before, or small as well; in between it is left as it was.
        """
        if node.op not in ops_with(Trait.SHRINKABLE) | summation_order.SUMS or node.outputs[0][0] == tf.variant:
            return  # Lists of tensors are added up too, and by `AddN` alone.
        if any(tensor.shape is None for tensor in node.inputs):
            return
        if (
            summation_order.may_be_flattened(self.analysis, node)
            or len(node.inputs) > summation_order.MAX_ADDN_OPERANDS
        ):
            return
        ordered = summation_order.summation_order(self.analysis, node) if node.op == "AddN" else node.inputs
        operands = [self._operand(tensor) for tensor in ordered]
        shape, wanted = self._together(operands), self._sizes(node.out())
        if shape is None or None in wanted:
            return
        mine = self.graph.nodes[node.name]
        if not self._is(shape, wanted):
            self.small[node.out()] = self._apply(node, operands)
        elif node.op != "AddN":
            mine.inputs = [operand.tensor for operand in operands]
        else:
            first = self._apply(node, operands[:-1])
            mine.op, mine.attrs, mine.inputs = "AddV2", {"T": mine.attrs["T"]}, [first.tensor, operands[-1].tensor]

    def _apply(self, node: Node, operands: Sequence[_Small]) -> _Small:
        """The operation on small operands. `AddN` takes equal shapes only: it becomes additions in the same order."""
        if node.op != "AddN":
            return self._added(node, node.op, operands, node.attrs)
        total = operands[0]
        for operand in operands[1:]:
            attrs = {"T": node.attrs["T"]}
            # A snapshot is no copy; between additions it keeps them from being made one sum.
            total = self._added(node, "Snapshot", [self._added(node, "AddV2", [total, operand], attrs)], attrs)
        return total

    def _added(self, node: Node, op: str, operands: Sequence[_Small], attrs: Mapping[str, Any]) -> _Small:
        shape = self._together(operands)
        assert shape is not None
        static = tuple(size if isinstance(size, int) else None for size in shape)
        controls = [self.graph.nodes[before.name] for before in node.control_inputs]
        name = self.graph.unique_name(f"{node.name}/small")
        inputs = [operand.tensor for operand in operands]
        new = Node(name, op, inputs, controls, attrs, node.device, [(node.outputs[0][0], static)])
        return _Small(self.graph.add(new).out(), shape)

    def _together(self, operands: Sequence[_Small]) -> tuple[Any, ...] | None:
        """The shape that operands are repeated to; `None` if that is not known."""
        rank = max(len(operand.shape) for operand in operands)
        padded = [(1,) * (rank - len(operand.shape)) + operand.shape for operand in operands]
        shape: list[Any] = []
        for sizes in zip(*padded, strict=True):
            others = [size for size in sizes if size != 1]
            if None in others or not all(self.evaluate.sizes.assume_equal(others[0], size) for size in others):
                return None
            shape.append(others[0] if others else 1)
        return tuple(shape)

    def _is(self, shape: tuple[Any, ...], wanted: tuple[Any, ...]) -> bool:
        same = self.evaluate.sizes.assume_equal
        return len(shape) == len(wanted) and all(same(a, b) for a, b in zip(shape, wanted, strict=True))
