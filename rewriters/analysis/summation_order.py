"""The order of additions, which rounding depends on.

TensorFlow's own optimizer makes one sum of additions that follow one another (`AddOpsRewrite`), and sorts the
operands of a sum by name; the kernel of `AddN` begins with the first operand that nobody else reads. So whether the
same bits come out depends on names, shapes and readers of the operands, which rewriting changes.
"""

from __future__ import annotations

from collections.abc import Iterator

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.device.properties import forwards_input_buffer
from rewriters.ir.graph import Node, Tensor
from rewriters.ir.op_traits import Trait, ops_with

__all__: list[str] = []

OPS = ops_with(Trait.SUM)

MOST_AT_ONCE = 8
"""Operands that the kernel of `AddN` adds up in one go; more it takes in groups."""


def may_be_flattened(analysis: GraphAnalysis, node: Node) -> bool:
    """Whether a sum may be made one with another."""
    return node.op in OPS and (_next(analysis, node) is not None or any(_joins(analysis, t) for t in node.inputs))


def flattenable_sums(analysis: GraphAnalysis) -> set[Node]:
    """Sums that may be made one with others, which a control edge from or to them would prevent."""
    return {node for node in analysis.order if may_be_flattened(analysis, node)}


def is_order_sensitive(analysis: GraphAnalysis, node: Node, operand: Tensor) -> bool:
    """Whether a sum depends on the order of its operands, one of which is given.

    Operands of one shape are added up first, and two numbers give the same sum either way.
    """
    if node.op not in OPS:
        return False
    while (reader := _next(analysis, node)) is not None:
        node = reader
    return sum(tensor.shape == operand.shape for tensor in _operands(analysis, node)) > 2


def _operands(analysis: GraphAnalysis, node: Node) -> Iterator[Tensor]:
    """Of a sum, and of the sums that it may be made one with."""
    for tensor in node.inputs:
        yield from _operands(analysis, tensor.node) if _joins(analysis, tensor) else (tensor,)


def _joins(analysis: GraphAnalysis, tensor: Tensor) -> bool:
    """Whether a sum has one reader only, into which it may be taken."""
    return (
        tensor.node.op in OPS and len(analysis.consumers.get(tensor, ())) == 1 and tensor not in analysis.graph.outputs
    )


def _next(analysis: GraphAnalysis, node: Node) -> Node | None:
    """The sum into which a sum may be taken."""
    if not _joins(analysis, node.out()):
        return None
    ((reader, _),) = analysis.consumers[node.out()]
    return reader if reader.op in OPS else None


def summation_order(analysis: GraphAnalysis, node: Node) -> list[Tensor]:
    """Operands of an `AddN` as they are added up.

    TensorFlow's optimizer sorts them by name; the kernel changes the first one with the first whose memory it may
    have for the sum. Of an operand with other readers that depends on whether they have ended by then: here it is
    taken that they have not.
    """
    operands = sorted(node.inputs, key=lambda tensor: tensor.name.removesuffix(":0"))
    own = next((index for index, tensor in enumerate(operands) if _is_alone(analysis, tensor)), 0)
    operands[0], operands[own] = operands[own], operands[0]
    return operands


def _is_alone(analysis: GraphAnalysis, tensor: Tensor) -> bool:
    """Whether a sum is the only reader of a tensor, and of the memory that it is in."""
    if len(analysis.consumers[tensor]) != 1 or tensor in analysis.graph.outputs or not tensor.node.inputs:
        return False
    return not forwards_input_buffer(tensor.node) or _is_alone(analysis, tensor.node.inputs[0])
