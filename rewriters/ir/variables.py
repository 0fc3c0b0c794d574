"""Variable access: the variables that an operation reads or may write.

The placeholder of its handle identifies a variable: every operation on it reads that.
"""

from __future__ import annotations

import tensorflow as tf

from rewriters.ir.graph import Node, Tensor
from rewriters.ir.op_traits import Trait, ops_with

__all__: list[str] = []

_READERS = ops_with(Trait.READS_VARIABLE)


def variable_handles(node: Node) -> list[Tensor]:
    """Return the handles of variables among the operands."""
    return [t for t in node.inputs if t.dtype == tf.resource]


def may_write_variable(node: Node) -> bool:
    """Return whether an operation may write one of its variables; one with a function body may do anything."""
    return node.op not in _READERS and bool(variable_handles(node))
