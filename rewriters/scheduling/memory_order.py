"""Orders of large ops that need little memory, by control edges."""

from __future__ import annotations

import enum
from collections.abc import Container

from rewriters.analysis import summation_order
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.ir.graph import Node, predecessors
from rewriters.ir.graph_pass import run_pass
from rewriters.ir.op_traits import is_collective
from rewriters.scheduling.control_edges import EdgePass, EdgePasses
from rewriters.scheduling.delay_early_ops import DelayEarlyOps
from rewriters.scheduling.separate_gradients import SeparateGradients
from rewriters.scheduling.serialize_ops import SerializeLargeOps, SerializeScratchGroups

__all__: list[str] = []


class MemoryOrder(enum.Enum):
    """Control edges for less memory.

    Attributes:
        EXECUTOR: No edges: TensorFlow's executor runs every op that is ready.
        DELAYED: Large ops that could run early wait for the values that they are combined with.
        SERIAL: As `DELAYED`, and large ops run one after another. The gradient of a filter may run late, so that the
            images that it reads stay in memory.
    """

    EXECUTOR = "executor"
    DELAYED = "delayed"
    SERIAL = "serial"


def in_memory_order(
    analysis: GraphAnalysis,
    min_bytes: int,
    batch: int,
    scopes: tuple[str, ...] = (),
    forward: Container[str] = (),
    order: MemoryOrder = MemoryOrder.SERIAL,
) -> GraphAnalysis:
    """Return the analysis of a graph with the control edges of an order.

    Results of at least `min_bytes` are delayed and ordered. `scopes` and `forward` as for `GraphAnalysis`.
    """
    if order is MemoryOrder.EXECUTOR:
        return analysis
    backward = {node.name for node in analysis.backward}
    exchanged = after_exchanges(analysis)
    fixed = {node.name for node in summation_order.flattenable_sums(analysis)} | exchanged
    scheduling: list[EdgePass] = [DelayEarlyOps(analysis, min_bytes, batch)]
    if order is MemoryOrder.SERIAL:
        scheduling += [
            SeparateGradients(),
            SerializeLargeOps(backward=backward, fixed=fixed, min_bytes=min_bytes, batch=batch),
            SerializeScratchGroups(fixed=exchanged),
        ]
    graph = run_pass(EdgePasses(scheduling), analysis.graph).graph
    if graph is analysis.graph:
        return analysis
    # The edges are no roles: a second forward pass that waits for gradients of the first one is still forward.
    return GraphAnalysis(graph, scopes, forward, backward={graph.nodes[name] for name in backward})


def after_exchanges(analysis: GraphAnalysis) -> set[str]:
    """Return the names of the ops that wait for an exchange between devices.

    Two devices may come to different orders of their ops. If an op of each waited for an exchange that the other one's
    op precedes, neither would ever run.
    """
    after: set[Node] = set()
    if not any(is_collective(node.op) for node in analysis.order):
        return set()
    for node in analysis.order:
        if is_collective(node.op) or any(before in after for before in predecessors(node)):
            after.add(node)
    return {node.name for node in after}
