"""Which variables an operation touches, and whether it changes them.

A variable is known by the placeholder of its handle, which every operation on it reads.
"""

from __future__ import annotations

import tensorflow as tf

from rewriters.ir.graph import Node, Tensor
from rewriters.ir.op_traits import Trait, ops_with

__all__: list[str] = []

_READERS = ops_with(Trait.READS_VARIABLE)


def variable_handles(node: Node) -> list[Tensor]:
    """Handles of the variables that an operation is given."""
    return [t for t in node.inputs if t.dtype == tf.resource]


def may_write_variable(node: Node) -> bool:
    """Whether an operation may change the variables that it is given; one with a body may do anything."""
    return node.op not in _READERS and bool(variable_handles(node))
