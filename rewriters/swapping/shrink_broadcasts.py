"""Lets elementwise ops read small operands directly, without a copy that is broadcast to the size of an image.

The gradient of a mean is a few numbers that are broadcast over the image, divided by a count and added to another
gradient. Normalisation in training mode has two of them in each layer. Elementwise ops broadcast their operands
themselves, so that the copies are not needed. That lowers the peak and saves passes over the image.

The pass keeps every bit, so additions must stay in their order (`summation_order.py`). Additions that TensorFlow may
flatten are not rewritten. An `AddN` of several operands becomes a chain of additions, whose order does not depend on
other readers of the operands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from rewriters.analysis import summation_order
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.ir.graph import Graph, Node, Tensor
from rewriters.ir.graph_pass import GraphPass, PassResult
from rewriters.ir.op_traits import Trait, ops_with

__all__: list[str] = []


class _Small(NamedTuple):
    """Source of a broadcast tensor.

    Attributes:
        tensor: Tensor of the new graph.
        shape: Sizes, with symbols for unknown ones.
    """

    tensor: Tensor
    shape: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class ShrinkBroadcasts(GraphPass[PassResult]):
    """Lets elementwise ops read the sources of broadcast operands, so that no broadcast copy is saved.

    Attributes:
        analyse: Returns the analysis of a graph.
    """

    analyse: Callable[[Graph], GraphAnalysis]

    def call(self, graph: Graph) -> PassResult:
        """Rewrite elementwise ops, and drop the copies that no op reads any more."""
        shrinker = _BroadcastShrinker(self.analyse(graph))
        new = shrinker.run()
        return PassResult(new if shrinker.changed else graph, shrinker.changed)


class _BroadcastShrinker:
    """Rewrites a copy of an analysed graph.

    Attributes:
        graph: The copy.
        small: Sources of broadcast tensors, by tensor of the original graph.
        changed: Whether the copy differs from the original.
    """

    def __init__(self, analysis: GraphAnalysis) -> None:
        self.analysis = analysis
        self.evaluate = analysis.evaluate
        self.graph = analysis.graph.copy()
        self.small: dict[Tensor, _Small] = {}
        self.changed = False

    def run(self) -> Graph:
        for node in self.analysis.order:
            if len(node.outputs) != 1 or node.outputs[0][1] is None:
                continue
            source = self._broadcast_source(node)
            if source is not None:
                self.small[node.out()] = self._operand(source)
            elif any(tensor in self.small for tensor in node.inputs) or (node.op == "AddN" and len(node.inputs) > 2):
                self._shrink_operands(node)
        self._redirect_controls()
        self.graph.same_size |= self.analysis.graph.same_size
        self.graph.prune()  # Small results that no op reads go, and the graph may be equal to the original again.
        self.changed |= any(name not in self.graph.nodes for name in self.analysis.graph.nodes)
        return self.graph

    def _broadcast_source(self, node: Node) -> Tensor | None:
        """Return the operand that an op broadcasts; `None` for other ops, and for those that wait for an effect."""
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
        """Return the source that a tensor is broadcast from, or else the tensor."""
        if tensor in self.small:
            return self.small[tensor]
        return _Small(Tensor(self.graph.nodes[tensor.node.name], tensor.index), self._sizes(tensor))

    def _redirect_controls(self) -> None:
        """Let ops that wait for a broadcast value without reading it wait for its source."""
        sources = {self.graph.nodes[full.node.name]: small.tensor.node for full, small in self.small.items()}
        for node in self.graph.nodes.values():
            if any(before in sources for before in node.control_inputs):
                node.control_inputs = [sources.get(before, before) for before in node.control_inputs]
                self.changed = True

    def _sizes(self, tensor: Tensor) -> tuple[Any, ...]:
        """Return the sizes of a tensor, each an integer, a symbol, or `None`."""
        return self.evaluate.shape(tensor) or ()

    def _shrink_operands(self, node: Node) -> None:
        """Let an elementwise op read the sources of its operands.

        The result has the size it had before, or is small as well. An op whose result would have a size in between
        is not rewritten.
        """
        if node.op not in ops_with(Trait.SHRINKABLE) | summation_order.SUMS or node.outputs[0][0] == tf.variant:
            return  # `AddN` also adds lists of tensors, which no other op does.
        if any(tensor.shape is None for tensor in node.inputs):
            return
        if (
            summation_order.may_be_flattened(self.analysis, node)
            or len(node.inputs) > summation_order.MAX_ADDN_OPERANDS
        ):
            return
        ordered = summation_order.summation_order(self.analysis, node) if node.op == "AddN" else node.inputs
        operands = [self._operand(tensor) for tensor in ordered]
        shape, full_shape = self._broadcast_shape(operands), self._sizes(node.out())
        if shape is None or None in full_shape:
            return
        copy = self.graph.nodes[node.name]
        if not self._same_shape(shape, full_shape):
            self.small[node.out()] = self._apply(node, operands)
            return
        self.changed = True
        if node.op != "AddN":
            copy.inputs = [operand.tensor for operand in operands]
        else:
            first = self._apply(node, operands[:-1])
            copy.op, copy.attrs, copy.inputs = "AddV2", {"T": copy.attrs["T"]}, [first.tensor, operands[-1].tensor]

    def _apply(self, node: Node, operands: Sequence[_Small]) -> _Small:
        """Add the op on small operands. `AddN` needs equal shapes, so it becomes additions in the same order."""
        if node.op != "AddN":
            return self._add_small_op(node, node.op, operands, node.attrs)
        total = operands[0]
        for operand in operands[1:]:
            attrs = {"T": node.attrs["T"]}
            # A snapshot copies nothing; between additions it keeps TensorFlow from flattening them into one sum.
            addition = self._add_small_op(node, "AddV2", [total, operand], attrs)
            total = self._add_small_op(node, "Snapshot", [addition], attrs)
        return total

    def _add_small_op(self, node: Node, op: str, operands: Sequence[_Small], attrs: Mapping[str, Any]) -> _Small:
        shape = self._broadcast_shape(operands)
        assert shape is not None
        static = tuple(size if isinstance(size, int) else None for size in shape)
        new = self.graph.new_node(
            f"{node.name}/small",
            op,
            [operand.tensor for operand in operands],
            control_inputs=[self.graph.nodes[before.name] for before in node.control_inputs],
            attrs=attrs,
            device=node.device,
            outputs=[(node.outputs[0][0], static)],
        )
        return _Small(new.out(), shape)

    def _broadcast_shape(self, operands: Sequence[_Small]) -> tuple[Any, ...] | None:
        """Return the shape that operands broadcast to; `None` if it is unknown."""
        rank = max(len(operand.shape) for operand in operands)
        padded = [(1,) * (rank - len(operand.shape)) + operand.shape for operand in operands]
        shape: list[Any] = []
        for sizes in zip(*padded, strict=True):
            others = [size for size in sizes if size != 1]
            if None in others or not all(self.evaluate.sizes.assume_equal(others[0], size) for size in others):
                return None
            shape.append(others[0] if others else 1)
        return tuple(shape)

    def _same_shape(self, shape: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
        same = self.evaluate.sizes.assume_equal
        return len(shape) == len(other) and all(same(a, b) for a, b in zip(shape, other, strict=True))
