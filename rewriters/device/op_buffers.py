"""Buffers of op types on every device: ops that allocate a result, forward an operand's buffer, or may overwrite it."""

from __future__ import annotations

from rewriters.ir.graph import Node
from rewriters.ir.op_traits import Trait, ops_with

__all__: list[str] = []

_ALIASES = ops_with(Trait.FORWARDS_BUFFER)
_IN_PLACE = ops_with(Trait.IN_PLACE)
_NO_ALLOCATION = ops_with(Trait.NO_ALLOCATION)


def allocates(node: Node) -> bool:
    """Return whether an op allocates its result."""
    return node.op not in _NO_ALLOCATION


def forwards_input_buffer(node: Node) -> bool:
    """Return whether the output of an op is its operand's buffer (an alias)."""
    return node.op in _ALIASES and len(node.outputs) == 1


def may_run_in_place(node: Node) -> bool:
    """Return whether the kernel may write into an operand's buffer that has no other consumer."""
    return node.op in _IN_PLACE
