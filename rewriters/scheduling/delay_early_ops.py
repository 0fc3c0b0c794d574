"""When operations can run, and those held back that could run long before anybody needs them.

The executor runs what is ready. An optimizer's `momentum * velocity` is ready when a step begins: without an edge that
holds it back, a copy of all weights waits through the forward and the backward phase for the gradients to come. So it
is with what a gradient is multiplied with, where that depends on activations alone.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from rewriters.analysis import summation_order
from rewriters.analysis.autodiff_roles import data_dependent_nodes, reads_shape_only
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.device.properties import forwards_input_buffer, may_fuse_with_consumer
from rewriters.ir.graph import LOOPS, Graph, Node, Tensor, predecessors

__all__: list[str] = []

FROM_THE_START = -1
"""Of operations that depend on no data."""

LEAST = 4 * 2**10
"""Bytes below which a copy of a variable may wait."""


def earliest_forward_level(analysis: GraphAnalysis) -> dict[Node, int]:
    """How far the forward phase has to have come before an operation can run.

    The level γ of the last forward operation that it depends on. Gradients have that of the loss; the shape of an
    activation, which autodiff asks for, has that of the activation, though it belongs to the backward phase.
    """
    level = analysis.level
    found: dict[Node, int] = {}
    for node in analysis.order:
        if node in analysis.data and node not in analysis.backward:
            found[node] = level[node]
        else:
            found[node] = max((found[before] for before in predecessors(node)), default=FROM_THE_START)
    return found


def delay_early_ops(analysis: GraphAnalysis, min_bytes: int, batch: int) -> Graph:
    """A new graph in which large values that could be there early wait for what they are combined with.

    Args:
        analysis: Of a step.
        min_bytes: Results below are left alone, but for those that depend on variables alone: of each weight there is
            one, so that many small ones are as much as a large one.
        batch: Size of an unknown batch.
    """
    return _DelayPlanner(analysis, min_bytes, batch).run()


def delay_optimizer_ops(graph: Graph, analysis: GraphAnalysis) -> set[Node]:
    """Let large values that depend on variables alone wait for the gradients that they are combined with.

    What `delay_early_ops` does, for the update alone and in one walk, as it is done for every plan that is tried.

    Args:
        graph: Of a step with tile loops; it is edited.
        analysis: Of the graph without loops.

    Returns:
        The operations of the update: their results go nowhere but into variables, or out of the step.
    """
    order = graph.topological()
    position = {node: index for index, node in enumerate(order)}
    data, readers, successors = data_dependent_nodes(order), graph.consumers(), _successors(order)
    forward = {node.name for node in analysis.data if node not in analysis.backward}
    untouched = {node.name for node in summation_order.flattenable_sums(analysis)}
    update: set[Node] = set()
    found: list[Node] = []
    for node in reversed(order):
        if node.op not in LOOPS and node.name not in forward and update.issuperset(successors[node]):
            update.add(node)
            if node not in data and node.inputs and _is_large_value(node) and node.name not in untouched:
                found.append(node)
    behind = _descendants(found, successors)
    waits: dict[Node, Node] = {}
    for node in found:  # Who waits lets what it reads wait as well.
        reading = {reader for reader, _ in readers.get(node.out(), ())}
        if not reading or set(successors[node]) - reading:
            continue
        first = min(reading, key=position.__getitem__)
        control = waits.get(first) or _last_of(first, data, position)
        while control is not None and (
            control in behind or may_fuse_with_consumer(control) or control.name in untouched
        ):
            control = _last_of(control, data, position)
        if control is not None:
            waits[node] = control
            node.control_inputs.append(control)
    return update


def run_updates_before_loops(
    graph: Graph, update: Container[Node], loops: Sequence[Node], backward: Sequence[tuple[Node, Node, str]]
) -> None:
    """Let each backward loop wait until the variables are updated whose gradients are there before it.

    Gradients and what an optimizer makes of them would wait beside the loop otherwise, or not, as it happens.

    Args:
        graph: Of a step with tile loops; it is edited.
        update: Operations whose results go nowhere but into variables.
        loops: All tile loops, in the order in which they run.
        backward: Of those of the backward phase, in that order, the loop, what it waits with, and its device.
    """
    number = {loop: position for position, loop in enumerate(loops)}
    begins = {start: (number[loop], device) for loop, start, device in backward}
    # The last loop that an operation waits for. Edges lead to later loops alone, so that they close no cycles.
    behind: dict[Node, int] = {}
    for node in graph.execution_order():
        own = number.get(node, begins[node][0] if node in begins else FROM_THE_START)
        behind[node] = max((behind[before] for before in predecessors(node)), default=FROM_THE_START)
        behind[node] = max(behind[node], own)
    for node, last in behind.items():
        if last != FROM_THE_START and node.stateful and not node.outputs and node in update:
            later = [start for start, (position, device) in begins.items() if position > last and device == node.device]
            if later:
                later[0].control_inputs.append(node)


def _successors(order: list[Node]) -> dict[Node, list[Node]]:
    result: dict[Node, list[Node]] = {node: [] for node in order}
    for node in order:
        for before in predecessors(node):
            result[before].append(node)
    return result


def _descendants(nodes: list[Node], successors: Mapping[Node, list[Node]]) -> set[Node]:
    """Nodes and all that wait for them: an edge from anything else to one of them closes no cycle."""
    found, stack = set(nodes), list(nodes)
    while stack:
        new = [node for node in successors[stack.pop()] if node not in found]
        found.update(new)
        stack.extend(new)
    return found


def _is_large_value(node: Node) -> bool:
    """Whether an operation makes a single, large value without any effect."""
    if node.stateful or len(node.outputs) != 1 or reads_shape_only(node):
        return False
    return not forwards_input_buffer(node) and node.out().num_bytes() >= LEAST


def _last_of(node: Node, data: Container[Node], position: Mapping[Node, int]) -> Node | None:
    """Of the operations before a node that depend on data the one that runs last."""
    before = [other for other in predecessors(node) if other in data and other.op != "Placeholder"]
    return max(before, key=position.__getitem__, default=None)


class _DelayPlanner:
    def __init__(self, analysis: GraphAnalysis, min_bytes: int, batch: int) -> None:
        self.analysis = analysis
        self.min_bytes = min_bytes
        self.batch = batch
        self.ready = earliest_forward_level(analysis)
        self.waits: dict[Node, Node] = {}
        self.untouched = summation_order.flattenable_sums(analysis)
        self.successors = _successors(analysis.order)

    def run(self) -> Graph:
        graph = self.analysis.graph.copy()
        for node in reversed(self.analysis.order):  # Who waits lets what it reads wait as well.
            control = self._control(node)
            if control is not None:
                self.waits[node] = control
                self.successors[control].append(node)
                self.ready[node] = self.ready[control]
                graph.nodes[node.name].control_inputs.append(graph.nodes[control.name])
        return graph

    def _control(self, node: Node) -> Node | None:
        """The operation that a node should wait for; `None` if it may run at once."""
        forward = node in self.analysis.data and node not in self.analysis.backward
        if forward or node.stateful or not node.inputs or reads_shape_only(node) or node in self.untouched:
            return None
        outputs = [node.out(index) for index in range(len(node.outputs))]
        readers = {reader for tensor in outputs for reader, _ in self.analysis.consumers.get(tensor, ())}
        least = LEAST if self.ready[node] == FROM_THE_START else self.min_bytes
        if not readers or self._num_bytes(outputs) < min(least, self.min_bytes):
            return None
        if set(self.analysis.successors[node]) - readers:
            return None
        if min(self.ready[reader] for reader in readers) <= self.ready[node]:
            return None
        first = min(readers, key=self.analysis.position.__getitem__)
        others = [tensor.node for tensor in first.inputs] + ([self.waits[first]] if first in self.waits else [])
        control = self._last(others)
        while control is not None and may_fuse_with_consumer(control):
            # Made one with what reads both, it would wait for a node that waits for it.
            control = self._last(predecessors(control))
        if control is None or self.ready[control] <= self.ready[node]:
            return None
        if control.op == "Placeholder" or control in self.untouched or self._reaches(node, control):
            return None
        return control

    def _last(self, nodes: list[Node]) -> Node | None:
        """The one that can run last."""
        return max(nodes, key=lambda node: (self.ready[node], self.analysis.position[node]), default=None)

    def _num_bytes(self, outputs: list[Tensor]) -> int:
        return sum(tensor.num_bytes(self.batch) for tensor in outputs)

    def _reaches(self, node: Node, target: Node) -> bool:
        """Whether there is a path from a node to another, by the edges added so far too.

        What is held back mostly goes nowhere but into an update, so that little comes after it. An edge that was added
        may lead from a later to an earlier position, so that positions limit nothing.
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
