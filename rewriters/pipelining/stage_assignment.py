"""Assignment of the ops of a joint graph to the stages of a pipeline.

A model is cut at tensors. Forward, an operation is in the highest stage of what it reads, one more for a tensor that
is cut. Backward, it is in the stage of the forward tensors and weights that it reads, and never above the gradients
that come in, so that gradients flow from the last stage to the first. A connection may skip stages. A weight belongs
to the first stage that reads it, and its gradient ends there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Mapping, Sequence

from rewriters.analysis.autodiff_roles import (
    gradients,
    reads_shape_only,
    shape_computations,
    update_descendants,
    update_nodes,
)
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.errors import PipelineError
from rewriters.ir.graph import Node, Tensor, ancestors, producers
from rewriters.pipelining.step_partition import StepPartition

__all__: list[str] = []


@dataclasses.dataclass(frozen=True)
class Stages:
    """Stages of a step.

    Attributes:
        count: Number of stages.
        of: Stage of each forward and backward op, and of ops that depend on weights alone. Constants, arguments and
            the update have none.
        owner: Stage of each weight, by its handle.
        beside: Stage of each variable that is updated with a weight, such as an optimizer slot, by its handle.
        shape_only: Ops that compute shapes, which slots do not order.
        fixed: Ops with a device of their own, such as the host ops of swaps.
    """

    count: int
    of: Mapping[Node, int]
    owner: Mapping[Tensor, int]
    beside: Mapping[Tensor, int]
    shape_only: frozenset[Node]
    fixed: frozenset[Node] = frozenset()


def assign_stages(analysis: GraphAnalysis, cuts: Sequence[Sequence[Tensor]]) -> Stages:
    """Return the stage of every op; `cuts` are the tensors that each stage but the last ends with.

    Raises:
        PipelineError: If a cut is no forward tensor, or does not follow the one before it.
    """
    return _Assignment(analysis, cuts).run()


class _Assignment:
    def __init__(self, analysis: GraphAnalysis, cuts: Sequence[Sequence[Tensor]]) -> None:
        self.analysis = analysis
        self.cuts = cuts
        self.last = len(cuts)
        graph, order = analysis.graph, analysis.order
        self.update = update_descendants(order, update_nodes(graph, order, analysis.backward))
        self.gradients = gradients(graph, order, analysis.backward)
        self.backward = [n for n in order if n in analysis.backward and n not in self.update]
        self.forward = [n for n in order if n not in analysis.backward and n not in self.update]
        self.shape_only = shape_computations(order)
        self.of: dict[Node, int] = {}
        self.owner: dict[Tensor, int] = {}
        self.beside: dict[Tensor, int] = {}

    def run(self) -> Stages:
        weights = self._weights()
        self._place_forward(weights)
        self._place_preprocessing()
        self._check_cuts()
        self._place_weights(weights)
        self._check_last(weights)
        self._place_backward()
        self._place_shapes()
        self.analysis.mark_roles()
        for node, stage in self.of.items():
            node.metadata = dataclasses.replace(node.metadata, stage=stage)
        return Stages(self.last + 1, self.of, self.owner, self.beside, frozenset(self.shape_only))

    def _weights(self) -> set[Node]:
        """Return the ops that depend on weights and constants alone, reads included; seeds are no weights."""
        nodes: set[Node] = set()
        for node in self.forward:
            if node in self.analysis.data or node in self.shape_only:
                continue
            read = node.op == "ReadVariableOp" and node.outputs[0][0].is_floating
            if read or any(t.node in nodes for t in node.inputs):
                nodes.add(node)
        return nodes

    def _place_forward(self, weights: set[Node]) -> None:
        """Place forward ops in the highest stage of their operands, the first readers of weights in the first stage."""
        after = {t: stage + 1 for stage, cut in enumerate(self.cuts) for t in cut}
        for node in self.forward:
            if node not in self.analysis.data or node.op == "Placeholder" or node in self.shape_only:
                continue
            operand_stages = [
                after.get(t, self.of.get(t.node, -1)) for t in node.inputs if t.node in self.analysis.data
            ]
            stage = max(operand_stages, default=-1)
            reads_weight = any(t.node in weights for t in node.inputs) or bool(node.variable_handles)
            if stage >= 0 or reads_weight or any(node.out(i) in after for i in range(len(node.outputs))):
                self.of[node] = max(stage, 0)

    def _place_preprocessing(self) -> None:
        """Place ops that depend on arguments alone, such as preprocessing of labels, with their first consumer."""
        for node in reversed(self.forward):
            known = node in self.analysis.data and node.op != "Placeholder" and node not in self.shape_only
            if known and node not in self.of:
                consumer_stages = [self.of[r] for r in self._consumers(node) if r in self.of]
                self.of[node] = min(consumer_stages, default=self.last)

    def _consumers(self, node: Node) -> Iterable[Node]:
        for index in range(len(node.outputs)):
            for consumer, _ in self.analysis.consumers.get(node.out(index), ()):
                yield consumer

    def _check_cuts(self) -> None:
        for number, cut in enumerate(self.cuts):
            for tensor in cut:
                self._check_cut(number, tensor)

    def _check_last(self, weights: Container[Node]) -> None:
        """Check the last cut: gradients of a linear last stage with a linear loss read none of its results."""
        changed = {handle for gradient in self.gradients for handle in self._touched(gradient)}
        reached = self._stages_of_the_loss() if changed.isdisjoint(self._weights_of_last(weights)) else self.last
        if self.cuts and reached < self.last:
            names = [t.name for t in self.cuts[reached]]
            raise PipelineError(
                f"A cut does not separate the network: no gradient depends on ops after {names}. "
                "Cut at a tensor between the input and the loss."
            )

    def _weights_of_last(self, weights: Container[Node]) -> set[Tensor]:
        """Return the handles of the weights that the last stage reads, those of earlier stages included."""
        last = [node for node, stage in self.of.items() if stage == self.last]
        read = ancestors(last, lambda node: [before for before in producers(node) if before in weights])
        return {handle for node in read for handle in node.variable_handles}

    def _check_cut(self, number: int, tensor: Tensor) -> None:
        node = tensor.node
        where = f"cut {number + 1} of {self.last}, `{tensor.name}` ({node.op}),"
        if node in self.analysis.backward or node in self.update:
            phase = "in the backward pass" if node not in self.update else "after the update of the weights"
            raise PipelineError(f"The {where} is computed {phase}. Cut at outputs of layers in the forward pass.")
        if node not in self.of:
            raise PipelineError(f"The {where} leaves no layer in the stage before it. Cut at the output of a layer.")
        stage = self.of[node]
        if stage > number:
            raise PipelineError(
                f"Cuts must be given from the input to the loss. The {where} depends on a later cut. Reorder them, "
                "or leave one out if each depends on the other, as with networks that are called in both orders."
            )
        if stage < number:
            before = [t.name for t in self.cuts[number - 1]]
            raise PipelineError(
                f"A cut does not separate the network: the {where} does not depend on the one before it, {before}. "
                "Cut at tensors that follow each other."
            )

    def _stages_of_the_loss(self) -> int:
        """Return the highest stage that a gradient depends on."""
        needed = ancestors((t.node for t in self.gradients), producers)
        return max((self.of.get(node, 0) for node in needed), default=0)

    def _place_weights(self, weights: set[Node]) -> None:
        """Place each weight in the first stage that reads it, values of several weights in the last of their stages."""
        users: dict[Node, int] = {}
        for node in reversed(self.forward):
            if node in weights:
                consumer_stages = [users[r] for r in self._consumers(node) if r in users]
                consumer_stages += [
                    self.of[r] for r in self._consumers(node) if self._is_forward_data(r) and r in self.of
                ]
                if consumer_stages:
                    users[node] = min(consumer_stages)
        for node in self.forward:
            for handle in node.variable_handles:
                stage = users.get(node) if node in weights else self.of.get(node) if _gathers(node) else None
                if stage is not None:
                    self.owner[handle] = min(stage, self.owner.get(handle, stage))
        for node in self.forward:
            if node in weights and node in users:
                weight_stages = [self.owner[h] for h in node.variable_handles if h in self.owner]
                weight_stages += [self.of[t.node] for t in node.inputs if t.node in weights and t.node in self.of]
                self.of[node] = max(weight_stages, default=users[node])

    def _is_forward_data(self, node: Node) -> bool:
        return node in self.analysis.data and node not in self.analysis.backward and node not in self.update

    def _place_backward(self) -> None:
        """Place backward ops by their operands, and by the producers and consumers of their gradients."""
        inner = set(self.backward)
        owners = {t: self._owner(t) for t in self.gradients}
        least: dict[Node, int] = {}
        fixed: set[Node] = set()
        for node in reversed(self.backward):
            operand_stages = [self.of[t.node] for t in node.inputs if t.node not in inner and t.node in self.of]
            operand_stages += [self.owner[h] for h in node.variable_handles if h in self.owner]
            for index in range(len(node.outputs)):
                owner = owners.get(node.out(index))
                operand_stages += [] if owner is None else [owner]
            if operand_stages and node not in self.shape_only:
                fixed.add(node)
            operand_stages += [least[r] for r in self._consumers(node) if r in least and node not in self.shape_only]
            if operand_stages:
                least[node] = max(operand_stages)
        for node in self.backward:
            if node in self.shape_only or node.op == "Const":
                continue
            above = [self.of[t.node] for t in node.inputs if t.node in inner and t.node in self.of]
            if node in fixed or not above:
                self.of[node] = least.get(node, self.last)
            else:
                self.of[node] = min(above)

    def _owner(self, gradient: Tensor) -> int | None:
        """Return the stage of the weight that a gradient updates; the variables updated with it get that stage too."""
        touched = self._touched(gradient)
        stages = {self.owner[handle] for handle in touched if handle in self.owner}
        if len(stages) != 1:
            # None, or an operation with a body has those of all weights: an update that loss scaling may leave out.
            return None
        (stage,) = stages
        self.beside.update((handle, stage) for handle in touched if handle not in self.owner)
        return stage

    def _touched(self, gradient: Tensor) -> list[Tensor]:
        """Return the handles of the variables that a gradient reaches in its own shape.

        Through variables too: of Adam's slots, which it changes first, the weight's change is computed.
        """
        seen = {gradient}
        queue = [gradient]
        touched: dict[Tensor, None] = {}
        for tensor in queue:
            for consumer, _ in self.analysis.consumers.get(tensor, ()):
                if consumer not in self.update:
                    continue
                for handle in consumer.variable_handles:
                    touched[handle] = None
                    again = (node for node, _ in self.analysis.consumers[handle] if node in self.update)
                    seen_again = [node.out(i) for node in again for i in range(len(node.outputs))]
                    queue += [t for t in seen_again if t not in seen and t.shape == tensor.shape]
                    seen.update(seen_again)
                for index in range(len(consumer.outputs)):
                    out = consumer.out(index)
                    # A sparse gradient is the only one of another shape than its weight, before it is summed up.
                    if out not in seen and (out.shape == tensor.shape or consumer.op == "UnsortedSegmentSum"):
                        seen.add(out)
                        queue.append(out)
        return list(touched)

    def _place_shapes(self) -> None:
        """Place shape ops in the stage of their consumers, unless an operand would be sent for its shape alone."""
        for node in reversed(self.analysis.order):
            if node not in self.shape_only:
                continue
            stage = min((self.of[r] for r in self._consumers(node) if r in self.of), default=None)
            if reads_shape_only(node):
                source = node.inputs[0]
                there = {self.of[r] for r, _ in self.analysis.consumers[source] if r in self.of and r != node}
                if stage not in there and source.node in self.of:
                    stage = self.of[source.node]
            if stage is not None:
                self.of[node] = stage


def _gathers(node: Node) -> bool:
    """Return whether an op reads some rows of a weight, as an embedding does."""
    return node.op.startswith("ResourceGather")


def stage_transfers(analysis: GraphAnalysis, stages: Stages) -> list[tuple[Tensor, int, int]]:
    """Return (tensor, producing stage, consuming stage) for each tensor sent between stages, shapes left out."""
    transfers: dict[tuple[Tensor, int, int], None] = {}
    for node in analysis.order:
        if node not in stages.of or node in stages.shape_only:
            continue
        for tensor in node.inputs:
            source = tensor.node
            if source in stages.of and source not in stages.shape_only and stages.of[source] != stages.of[node]:
                transfers[tensor, stages.of[source], stages.of[node]] = None
    return list(transfers)


def scheduled_ops(analysis: GraphAnalysis, parts: StepPartition, stages: Stages) -> list[Node]:
    """Return the ops that slots order, in execution order.

    What gradients depend on of what runs for each micro-batch, but for sizes, constants and variables; and what ends a
    swap, on which nothing depends.
    """
    repeated = parts.per_micro_batch
    last = [t.node for t in parts.gradients] + [node for node in analysis.graph.keep if node in stages.fixed]
    needed = ancestors(repeated.intersection(last), lambda node: repeated.intersection(producers(node)))
    order = (node for node in analysis.order if node in needed and node in stages.of)
    return [node for node in order if node not in stages.shape_only and not node.variable_handles]


@dataclasses.dataclass(frozen=True)
class Separators:
    """Tensors, in order, each of which alone separates the ops before it from the loss.

    Attributes:
        tensors: The tensors.
        num_bytes: Size of each.
        before: Bytes that wait for the backward phase of what is made up to each.
        total: The same of all.
    """

    tensors: list[Tensor]
    num_bytes: list[int]
    before: list[int]
    total: int

    def only(self, tensors: Container[Tensor]) -> Separators:
        """Return the separators of some tensors."""
        indices = [index for index, tensor in enumerate(self.tensors) if tensor in tensors]
        return Separators(
            [self.tensors[index] for index in indices],
            [self.num_bytes[index] for index in indices],
            [self.before[index] for index in indices],
            self.total,
        )


def separators(analysis: GraphAnalysis, batch: int) -> Separators:
    """Return the cuts of a network that a single tensor crosses."""
    whole = assign_stages(analysis, [])
    wanted = _needed_forward(analysis, whole)
    weighted = _after_weights(analysis, wanted)
    open_readers: dict[Tensor, int] = {}
    tensors, sizes, before = [], [], []
    waiting = 0
    for node in (n for n in analysis.order if n in weighted):
        for tensor in node.inputs:
            if tensor in open_readers:
                open_readers[tensor] -= 1
                if not open_readers[tensor]:
                    del open_readers[tensor]
        for index in range(len(node.outputs)):
            out = node.out(index)
            readers = analysis.consumers.get(out, ())
            if any(consumer in analysis.backward for consumer, _ in readers):
                waiting += out.num_bytes(batch)
            count = sum(consumer in weighted for consumer, _ in readers)
            if count:
                open_readers[out] = count
        if len(open_readers) == 1:
            (tensor,) = open_readers
            if tensor.node is node and tensor.dtype.is_floating and tensor.shape and len(tensor.shape) > 1:
                tensors.append(tensor)
                sizes.append(tensor.num_bytes(batch))
                before.append(waiting)
    return Separators(tensors, sizes, before, waiting)


def _needed_forward(analysis: GraphAnalysis, stages: Stages) -> set[Node]:
    """Return the forward ops that gradients depend on."""
    seeds = gradients(analysis.graph, analysis.order, analysis.backward)
    needed = ancestors((t.node for t in seeds), producers)
    forward = {node for node in stages.of if node in analysis.data and node not in analysis.backward}
    return (forward & needed) - stages.shape_only


def _after_weights(analysis: GraphAnalysis, wanted: set[Node]) -> set[Node]:
    """Return the ops that depend on a weight; preprocessing is no layer."""
    nodes: set[Node] = set()
    weights: set[Node] = set()
    for node in analysis.order:
        if node.op == "ReadVariableOp" or (node not in analysis.data and any(t.node in weights for t in node.inputs)):
            weights.add(node)
        elif node in wanted and any(t.node in nodes or t.node in weights for t in node.inputs):
            nodes.add(node)
    return nodes
