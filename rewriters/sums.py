"""The order of additions, which rounding depends on.

TensorFlow's own optimizer makes one sum of additions that follow one another (`AddOpsRewrite`), and sorts the
operands of a sum by name; the kernel of `AddN` begins with the first operand that nobody else reads. So whether the
same bits come out depends on names, shapes and readers of the operands, which rewriting changes.
"""

from __future__ import annotations

from rewriters.analysis import Analysis
from rewriters.graph import Node, Tensor

__all__: list[str] = []

OPS = frozenset(("Add", "AddN", "AddV2"))

MOST_AT_ONCE = 8
"""Operands that the kernel of `AddN` adds up in one go; more it takes in groups."""


def follows_another(analysis: Analysis, node: Node) -> bool:
    """Whether a sum may be made one with another, of which it is the only reader, or the other of it."""
    if node.op not in OPS:
        return False
    pairs = [(tensor, node) for tensor in node.inputs]
    pairs += [(node.out(), reader) for reader, _ in analysis.readers.get(node.out(), ())]
    return any(t.node.op in OPS and r.op in OPS and len(analysis.readers[t]) == 1 for t, r in pairs)


def has_an_order(analysis: Analysis, node: Node) -> bool:
    """Whether the sum of its operands depends on their order: two numbers give the same sum either way."""
    return node.op in OPS and (len(node.inputs) > 2 or follows_another(analysis, node))


def in_order(node: Node) -> list[Tensor]:
    """Operands of a sum as TensorFlow's optimizer sorts them."""
    return sorted(node.inputs, key=lambda tensor: tensor.name.removesuffix(":0"))
