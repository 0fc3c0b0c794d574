"""Delays ops that TensorFlow's executor would start early, so that their results do not occupy memory while they wait.

The executor runs every op whose operands exist. An optimizer's `momentum * velocity` can run when a step begins:
without a control edge, a copy of all weights waits for the gradients through the forward and the backward phase.
Factors of a gradient that depend on activations alone wait in the same way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from rewriters.analysis import summation_order
from rewriters.analysis.autodiff_roles import data_dependent_nodes, reads_shape_only
from rewriters.analysis.convex_sets import descendants
from rewriters.analysis.graph_analysis import GraphAnalysis, require_analysed
from rewriters.device.merged_kernels import may_merge, may_move_constant
from rewriters.device.op_buffers import forwards_input_buffer
from rewriters.ir.graph import LOOPS, Graph, Node, predecessors
from rewriters.ir.loop_bodies import is_folded
from rewriters.ir.static_values import add_constant, constant, op_attrs
from rewriters.scheduling.control_edges import ControlEdge, EdgePass

__all__: list[str] = []

NO_LEVEL = -1
"""Level of ops that depend on no data, and position of ops that wait for no loop."""

MIN_DELAYED_BYTES = 4 * 2**10
"""Smallest result of an op on variables alone that is delayed."""


def earliest_forward_level(analysis: GraphAnalysis) -> dict[Node, int]:
    """Return for each op how far the forward phase must have come before the op can run.

    The level is γ of the last forward op that the op depends on. Gradients have the level of the loss. The shape of an
    activation, which autodiff reads, belongs to the backward phase and has the level of the activation.
    """
    levels: dict[Node, int] = {}
    for node in analysis.order:
        if node in analysis.data and node not in analysis.backward:
            levels[node] = analysis.level[node]
        else:
            # TensorFlow may fold a product with a constant into a constant, and what waits for it does not wait then.
            waits = [control for control in node.control_inputs if not may_move_constant(control)]
            before = [*(tensor.node for tensor in node.inputs), *waits]
            levels[node] = max((levels[other] for other in before), default=NO_LEVEL)
    return levels


@dataclasses.dataclass(frozen=True)
class DelayEarlyOps(EdgePass):
    """Lets each large value that could exist early wait for the value that it is combined with.

    Attributes:
        analysis: Analysis of the graph that the pass is run on.
        min_bytes: Size from which on results are delayed. Results that depend on variables alone are delayed from
            `MIN_DELAYED_BYTES` on: a network has one for each weight, and all of them together are large.
        batch: Batch size, where the graph leaves it open.
    """

    new_stateful_ops = frozenset(("Empty",))

    analysis: GraphAnalysis
    min_bytes: int
    batch: int

    def requires(self, graph: Graph) -> None:
        """Check that the analysis belongs to the graph."""
        require_analysed(graph, self.analysis)

    def edges(self, graph: Graph) -> Iterator[ControlEdge]:
        """Yield one edge for each op that is delayed, between ops of the analysed graph."""
        del graph
        return _DelayPlanner(self).edges()

    def edit(self, graph: Graph, node: Node) -> None:
        """Keep TensorFlow from folding a delayed op."""
        _keep_unfolded(graph, node)


def _keep_unfolded(graph: Graph, node: Node) -> None:
    """Let an op that fills a tensor with zeros read the zero from a stateful op.

    TensorFlow folds a tensor of constant zeros into the graph, where it occupies memory as long as the step exists.
    """
    value = constant(node.inputs[1].node) if node.outputs and is_folded(node.out()) else None
    if value is None or any(value.tobytes()):  # Of other values large tensors are rare.
        return
    dtype = node.out().dtype
    shape = add_constant(graph, f"{node.name}/shape", (), tf.int32)
    attrs, outputs = op_attrs(dtype=dtype, init=True), [(dtype, ())]
    zero = graph.new_node(f"{node.name}/zero", "Empty", [shape], attrs=attrs, device=node.device, outputs=outputs)
    node.inputs[1] = zero.out()


@dataclasses.dataclass(frozen=True)
class DelayOptimizerOps(EdgePass):
    """Lets each large value of the update that depends on variables alone wait for its gradient.

    Does what `DelayEarlyOps` does, for the update alone and in one walk: the planner runs it for every plan it tries.

    Attributes:
        analysis: Analysis of the step without tile loops.
    """

    analysis: GraphAnalysis

    def edges(self, graph: Graph) -> Iterator[ControlEdge]:
        """Yield one edge for each op that is delayed."""
        order = graph.execution_order()
        position = {node: index for index, node in enumerate(order)}
        data, consumers, (_, successors) = data_dependent_nodes(graph, order), graph.consumers(), graph.dependencies()
        fixed = {node.name for node in summation_order.flattenable_sums(self.analysis)}
        early = [
            node
            for node in _update_ops(order, successors, self.analysis)
            if node not in data and node.inputs and _is_large_value(node) and node.name not in fixed
        ]
        later = descendants(early, successors)
        waits: dict[Node, Node] = {}
        for node in early:  # A delayed op delays its operands as well.
            readers = {reader for reader, _ in consumers.get(node.out(), ())}
            if not readers or set(successors[node]) - readers:
                continue
            first = min(readers, key=position.__getitem__)
            control = waits.get(first) or _last_data_operand(first, data, position)
            while control is not None and (control in later or may_merge(control) or control.name in fixed):
                control = _last_data_operand(control, data, position)
            if control is not None:
                waits[node] = control
                yield ControlEdge(node, control)


class EmittedLoop(NamedTuple):
    """A tile loop in a graph.

    Attributes:
        loop: Name of the loop's node.
        start: Name of the `NoOp` that the loop begins after.
        device: Device of the loop.
        backward: Whether the loop belongs to the backward phase.
    """

    loop: str
    start: str
    device: str
    backward: bool


@dataclasses.dataclass(frozen=True)
class RunUpdatesBeforeLoops(EdgePass):
    """Lets each backward loop wait for updates whose gradients exist before it, and need no memory afterwards.

    Otherwise gradients and the optimizer's intermediate values occupy memory beside the loop, in some runs.

    Attributes:
        analysis: Analysis of the step without tile loops.
        loops: All tile loops in the order in which they run.
    """

    analysis: GraphAnalysis
    loops: Sequence[EmittedLoop]

    def edges(self, graph: Graph) -> Iterator[ControlEdge]:
        """Yield edges from updates to the starts of loops."""
        order = graph.execution_order()
        update = set(_update_ops(order, graph.dependencies()[1], self.analysis))
        number = {graph.nodes[loop.loop]: position for position, loop in enumerate(self.loops)}
        starts = {
            graph.nodes[loop.start]: (position, loop.device)
            for position, loop in enumerate(self.loops)
            if loop.backward
        }
        # Edges lead to later loops alone, so that they close no cycles.
        last_loop: dict[Node, int] = {}
        for node in order:
            loop = number.get(node, starts[node][0] if node in starts else NO_LEVEL)
            last_loop[node] = max((last_loop[before] for before in predecessors(node)), default=NO_LEVEL)
            last_loop[node] = max(last_loop[node], loop)
        for node, last in last_loop.items():
            if last != NO_LEVEL and node.stateful and not node.outputs and node in update:
                later = [
                    start for start, (position, device) in starts.items() if position > last and device == node.device
                ]
                if later:
                    yield ControlEdge(later[0], node)


def _update_ops(order: Sequence[Node], successors: Mapping[Node, list[Node]], analysis: GraphAnalysis) -> list[Node]:
    """Return the ops whose results reach variables and results of the step alone, last one first.

    `order` and `successors` are those of a graph with tile loops, `analysis` that of the step without them.
    """
    forward = {node.name for node in analysis.data if node not in analysis.backward}
    update: dict[Node, None] = {}
    for node in reversed(order):
        if node.op not in LOOPS and node.name not in forward and all(after in update for after in successors[node]):
            update[node] = None
    return list(update)


def _is_large_value(node: Node) -> bool:
    """Return whether an op makes a single, large value and has no effect."""
    if node.stateful or len(node.outputs) != 1 or reads_shape_only(node):
        return False
    return not forwards_input_buffer(node) and node.out().num_bytes() >= MIN_DELAYED_BYTES


def _last_data_operand(node: Node, data: Container[Node], position: Mapping[Node, int]) -> Node | None:
    """Return the last of the predecessors that depend on data."""
    before = [other for other in predecessors(node) if other in data and other.op != "Placeholder"]
    return max(before, key=position.__getitem__, default=None)


class _DelayPlanner:
    """Selects for each op of a step the op that it should wait for.

    Attributes:
        ready: Earliest level of each op, with the edges added so far.
        waits: Op that each delayed op waits for.
        fixed: Sums that TensorFlow may flatten, which must get no more edges.
        successors: Nodes that wait for each node, with the edges added so far.
    """

    def __init__(self, spec: DelayEarlyOps) -> None:
        self.spec = spec
        self.analysis = spec.analysis
        self.ready = earliest_forward_level(spec.analysis)
        self.waits: dict[Node, Node] = {}
        self.fixed = summation_order.flattenable_sums(spec.analysis)
        _, self.successors = spec.analysis.graph.dependencies()

    def edges(self) -> Iterator[ControlEdge]:
        """Yield the edges to add."""
        for node in reversed(self.analysis.order):  # A delayed op delays its operands as well.
            control = self._control(node)
            if control is not None:
                self.waits[node] = control
                self.successors[control].append(node)
                self.ready[node] = self.ready[control]
                yield ControlEdge(node, control)

    def _control(self, node: Node) -> Node | None:
        """Return the op that a node should wait for; `None` if the node is not delayed."""
        forward = node in self.analysis.data and node not in self.analysis.backward
        if forward or node.stateful or not node.inputs or reads_shape_only(node) or node in self.fixed:
            return None
        outputs = [node.out(index) for index in range(len(node.outputs))]
        readers = {reader for tensor in outputs for reader, _ in self.analysis.consumers.get(tensor, ())}
        min_bytes = MIN_DELAYED_BYTES if self.ready[node] == NO_LEVEL else self.spec.min_bytes
        num_bytes = sum(tensor.num_bytes(self.spec.batch) for tensor in outputs)
        if not readers or num_bytes < min(min_bytes, self.spec.min_bytes):
            return None
        if set(self.analysis.successors[node]) - readers:
            return None
        if min(self.ready[reader] for reader in readers) <= self.ready[node]:
            return None
        first = min(readers, key=self.analysis.position.__getitem__)
        others = [tensor.node for tensor in first.inputs] + ([self.waits[first]] if first in self.waits else [])
        control = self._last(others)
        while control is not None and may_merge(control):
            # Fused with a consumer of both, the control op would wait for a node that waits for it.
            control = self._last(predecessors(control))
        if control is None or self.ready[control] <= self.ready[node]:
            return None
        if control.op == "Placeholder" or control in self.fixed or self._reaches(node, control):
            return None
        return control

    def _last(self, nodes: list[Node]) -> Node | None:
        """Return the node that can run last."""
        return max(nodes, key=lambda node: (self.ready[node], self.analysis.position[node]), default=None)

    def _reaches(self, node: Node, target: Node) -> bool:
        """Return whether a path, added edges included, leads from one node to another.

        Most delayed ops reach the update alone, so that the search is short. An added edge may lead from a later to an
        earlier position, so that positions cannot bound it.
        """
        stack, seen = [node], {node}
        while stack:
            for other in self.successors[stack.pop()]:
                if other is target:
                    return True
                if other not in seen:
                    seen.add(other)
                    stack.append(other)
        return False
