"""The maximum of a pooling is made again for its gradient, where both have a kernel in common.

oneDNN's kernel for the gradient takes from the forward kernel where each maximum was found. TensorFlow gives it that
only if the gradient reads the output of a pooling as it is: one that was swapped out, and in again, leaves TensorFlow's
own kernel, which takes ten times as long, in volumes fifty times. A tile loop makes the maximum again in any case
(`rules.pooling.MaxPoolGrad`); here it is done in a whole graph, before swaps are planned for it. The output then waits
for nobody but other readers, and what oneDNN notes beside it for nobody.
"""

from __future__ import annotations

from collections.abc import Container

from rewriters.device import properties
from rewriters.ir.graph import Graph, Node
from rewriters.ir.op_traits import traits_of

__all__: list[str] = []

_INPUT, _OUTPUT, _GRADIENT = range(3)


def recompute_pooling(graph: Graph, backward: Container[Node]) -> None:
    """Let each gradient of a pooling have a pooling of its own, which waits for the gradient that comes in.

    Args:
        graph: A step; it is edited.
        backward: Its backward operations.
    """
    if not properties.pool_grad_needs_forward_workspace():
        return
    for node in list(graph.nodes.values()):
        pool = pooled_for(node)
        if pool is None or node not in backward or pool in backward:
            continue
        waits = [*pool.control_inputs, node.inputs[_GRADIENT].node]
        again = Node(graph.unique_name(again_name(node)), pool.op, [node.inputs[_INPUT]], waits, pool.attrs)
        again.device, again.outputs = node.device, list(pool.outputs)
        node.inputs = [*node.inputs[:_OUTPUT], graph.add(again).out(), *node.inputs[_OUTPUT + 1 :]]


def pooled_for(node: Node) -> Node | None:
    """The pooling whose output a gradient reads, of the same input; `None` for all else."""
    forward_op = traits_of(node.op).gradient_of
    if forward_op is None:
        return None
    pool = node.inputs[_OUTPUT].node
    same = pool.op == forward_op and pool.inputs[0] == node.inputs[_INPUT]
    return pool if same else None


def again_name(node: Node) -> str:
    """What the pooling that is made for a gradient is called."""
    return f"{node.name}/pool"
