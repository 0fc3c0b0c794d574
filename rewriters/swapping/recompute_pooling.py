"""Recomputes a max-pooling for its gradient, so that swapping its output does not lose oneDNN's fast gradient kernel.

oneDNN's forward kernel records the position of each maximum, and its gradient kernel reads that workspace. TensorFlow
passes the workspace on only if the gradient reads the output of a pooling directly. With the output swapped out and in,
TensorFlow's own kernel runs, which takes ten times as long, and fifty times in volumes. A tile loop always recomputes
the maximum (`rules.pooling.MaxPoolGrad`). This pass does it in the whole graph, before swaps are planned. The output is
then saved for its other consumers alone, and the workspace for none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.ir.graph import Graph, Node
from rewriters.ir.graph_pass import GraphPass, PassResult
from rewriters.ir.op_traits import traits_of

__all__: list[str] = []

_INPUT, _OUTPUT, _GRADIENT = range(3)


@dataclasses.dataclass(frozen=True)
class RecomputePooling(GraphPass[PassResult]):
    """Gives each gradient of a max-pooling a pooling of its own, which waits for the incoming gradient.

    Attributes:
        analyse: Returns the analysis of a graph.
    """

    analyse: Callable[[Graph], GraphAnalysis]

    def call(self, graph: Graph) -> PassResult:
        """Add the poolings."""
        if not graph.device.uses_onednn:
            return PassResult(graph, changed=False)
        backward = self.analyse(graph).backward
        gradients = [
            node
            for node in graph.nodes.values()
            if (pool := forward_pool_of(node)) is not None and node in backward and pool not in backward
        ]
        if not gradients:
            return PassResult(graph, changed=False)
        new = graph.copy()
        for node in gradients:
            _recompute(new, new.nodes[node.name])
        return PassResult(new, changed=True)


def _recompute(graph: Graph, gradient: Node) -> None:
    """Let a gradient read a pooling of its own, in place."""
    pool = forward_pool_of(gradient)
    assert pool is not None
    waits = [*pool.control_inputs, gradient.inputs[_GRADIENT].node]
    copy = graph.new_node(
        recomputed_pool_name(gradient),
        pool.op,
        [gradient.inputs[_INPUT]],
        control_inputs=waits,
        attrs=pool.attrs,
        device=gradient.device,
        outputs=pool.outputs,
    )
    gradient.inputs = [*gradient.inputs[:_OUTPUT], copy.out(), *gradient.inputs[_OUTPUT + 1 :]]


def forward_pool_of(node: Node) -> Node | None:
    """Return the pooling whose output a gradient reads, if both have the same input; `None` for all other ops."""
    forward_op = traits_of(node.op).gradient_of
    if forward_op is None:
        return None
    pool = node.inputs[_OUTPUT].node
    same = pool.op == forward_op and pool.inputs[0] == node.inputs[_INPUT]
    return pool if same else None


def recomputed_pool_name(gradient: Node) -> str:
    """Return the name of the pooling that is added for a gradient."""
    return f"{gradient.name}/pool"
