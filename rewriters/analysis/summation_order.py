"""Summation order, which determines rounding.

Grappler flattens additions that follow one another into one sum (`AddOpsRewrite`), and sorts the operands of a sum by
name. The kernel of `AddN` begins with the first operand that has no other consumer. So the bits of a result depend on
names, shapes and consumers of the operands, which rewriting changes.
"""

from __future__ import annotations

from collections.abc import Iterator

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.device.op_buffers import forwards_input_buffer
from rewriters.ir.graph import Node, Tensor
from rewriters.ir.op_traits import Trait, ops_with

__all__: list[str] = []

SUMS = ops_with(Trait.SUM)

MAX_ADDN_OPERANDS = 8
"""Operands that the kernel of `AddN` adds in one pass; more operands are added in groups."""


def may_be_flattened(analysis: GraphAnalysis, node: Node) -> bool:
    """Return whether Grappler may flatten a sum with another."""
    return node.op in SUMS and (_next(analysis, node) is not None or any(_joins(analysis, t) for t in node.inputs))


def flattenable_sums(analysis: GraphAnalysis) -> set[Node]:
    """Return the sums that may be flattened with others, which a control edge from or to them would prevent."""
    return {node for node in analysis.order if may_be_flattened(analysis, node)}


def is_order_sensitive(analysis: GraphAnalysis, node: Node, operand: Tensor) -> bool:
    """Return whether a sum depends on the order of its operands, one of which is given.

    Operands of one shape are added first, and two numbers have the same sum in either order.
    """
    if node.op not in SUMS:
        return False
    while (consumer := _next(analysis, node)) is not None:
        node = consumer
    return sum(tensor.shape == operand.shape for tensor in _operands(analysis, node)) > 2


def _operands(analysis: GraphAnalysis, node: Node) -> Iterator[Tensor]:
    """Yield the operands of a sum, and of the sums that it may be flattened with."""
    for tensor in node.inputs:
        yield from _operands(analysis, tensor.node) if _joins(analysis, tensor) else (tensor,)


def _joins(analysis: GraphAnalysis, tensor: Tensor) -> bool:
    """Return whether a sum has only one consumer, into which it may be flattened."""
    return (
        tensor.node.op in SUMS and len(analysis.consumers.get(tensor, ())) == 1 and tensor not in analysis.graph.outputs
    )


def _next(analysis: GraphAnalysis, node: Node) -> Node | None:
    """Return the sum into which a sum may be flattened."""
    if not _joins(analysis, node.out()):
        return None
    ((consumer, _),) = analysis.consumers[node.out()]
    return consumer if consumer.op in SUMS else None


def summation_order(analysis: GraphAnalysis, node: Node) -> list[Tensor]:
    """Return the operands of an `AddN` in the order in which they are added.

    Grappler sorts them by name. The kernel then swaps the first one with the first whose buffer it may use for the sum.
    For an operand with other consumers that depends on whether these have ended; here they are assumed to be running.
    """
    operands = sorted(node.inputs, key=lambda tensor: tensor.name.removesuffix(":0"))
    first = next((index for index, tensor in enumerate(operands) if _is_alone(analysis, tensor)), 0)
    operands[0], operands[first] = operands[first], operands[0]
    return operands


def _is_alone(analysis: GraphAnalysis, tensor: Tensor) -> bool:
    """Return whether a sum is the only consumer of a tensor, and of its buffer."""
    if len(analysis.consumers[tensor]) != 1 or tensor in analysis.graph.outputs or not tensor.node.inputs:
        return False
    return not forwards_input_buffer(tensor.node) or _is_alone(analysis, tensor.node.inputs[0])
