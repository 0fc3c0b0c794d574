"""Partition of a training step into ops that run once per micro-batch and ops that run once per step.

A joint graph is split at its gradients. Ops that depend on the batch run for each micro-batch, and so do all ops that
touch a variable which they change: counters of metrics, moving statistics, seeds. Ops that depend on gradients run
once. Ops that depend on neither, such as reading a weight or counting steps, are shared.

The variable of a counter decides where it belongs: to the optimizer if the update touches it, to the random numbers if
they are drawn from it, unless it is incremented as a step counter is. Only the caller knows which counters belong to
metrics (`EffectHints`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Sequence

from rewriters.analysis.autodiff_roles import gradients, is_seed, reads_shape_only, update_descendants, update_nodes
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.errors import PipelineError
from rewriters.ir.graph import BRANCHES, LOOPS, Node, Tensor
from rewriters.ir.op_traits import Trait, ops_with

__all__: list[str] = []

_COUNTS = ops_with(Trait.COUNTS)
"""Ops that increment. They run per micro-batch only if their operand depends on the batch: a step counter that seeds
random numbers stays a step counter."""
_SOURCES = ops_with(Trait.SOURCE)


@dataclasses.dataclass(frozen=True)
class StepPartition:
    """Partition of a step; ops in no part are shared by all micro-batches.

    Attributes:
        per_micro_batch: Ops that run for each micro-batch.
        batch_dependent: Subset of them that depends on the batch itself, not only on counters.
        update: Ops that run once, after all gradients.
        gradients: Gradients that the update reads or the step returns.
        carried_variables: Handles of variables that one micro-batch after another changes.
        sources: Arguments that have the batch axis.
    """

    per_micro_batch: frozenset[Node]
    batch_dependent: frozenset[Node]
    update: frozenset[Node]
    gradients: tuple[Tensor, ...]
    carried_variables: tuple[Tensor, ...]
    sources: frozenset[Node]


def data_independent_ops(analysis: GraphAnalysis, parts: StepPartition) -> set[Node]:
    """Return the ops whose results depend on the batch by its size at most."""
    result: set[Node] = set()
    for node in analysis.order:
        if node in parts.update or node in parts.sources:
            continue
        is_shared = node not in parts.per_micro_batch
        is_pure = bool(node.inputs) and not node.stateful and not node.variable_handles
        if is_shared or reads_shape_only(node) or (is_pure and all(t.node in result for t in node.inputs)):
            result.add(node)
    return result


@dataclasses.dataclass(frozen=True)
class EffectHints:
    """Owners of ops, which a graph does not tell.

    Attributes:
        once: Names of ops that belong to an optimizer.
        per_micro_batch: Names of ops that belong to a metric.
    """

    once: Container[str] = ()
    per_micro_batch: Container[str] = ()


def split_step(analysis: GraphAnalysis, batched: Sequence[int], hints: EffectHints | None = None) -> StepPartition:
    """Return the partition of a step.

    Args:
        analysis: Analysis of the joint graph of a micro-batch.
        batched: Positions of the arguments that have the batch axis.
        hints: Owners of counters that depend neither on data nor on gradients.

    Raises:
        PipelineError: If gradients depend on what the update has changed.
    """
    return _StepSplitter(analysis, batched, hints or EffectHints()).run()


class _StepSplitter:
    def __init__(self, analysis: GraphAnalysis, batched: Sequence[int], hints: EffectHints) -> None:
        self.analysis = analysis
        self.hints = hints
        self.sources = {analysis.graph.inputs[position].node for position in batched}
        graph, order = analysis.graph, analysis.order
        self.gradients = gradients(graph, order, analysis.backward)
        self._set_update(update_nodes(graph, order, analysis.backward))

    def _set_update(self, update: set[Node]) -> None:
        """Set the update to some ops and all their descendants.

        Raises:
            PipelineError: If one of these computes gradients.
        """
        self.update = update_descendants(self.analysis.order, update)
        seed = next((node for node in self.update if is_seed(node)), None)
        if seed is not None:
            raise PipelineError(
                f"`{seed.name}` computes gradients after an update of the same step, but a pipeline has one backward "
                "pass. Split the step into one step per update."
            )
        self.update_handles = {h for node in self.update for h in node.variable_handles}

    def run(self) -> StepPartition:
        """Find the carried variables, and the ops that depend on them, until neither grows."""
        order = [node for node in self.analysis.order if node not in self.update]
        batch_dependent = self._descendants(order, self.sources)
        stateful = {n for n in order if n.stateful and n.outputs and not n.variable_handles and n.op not in _SOURCES}
        self.draws = stateful | {n for n in order if n.op.startswith("Stateless") and n.op not in LOOPS | BRANCHES}
        carried: dict[Tensor, None] = {}
        while True:
            roots = stateful | {n for n in order if any(h in carried for h in n.variable_handles)}
            repeated = batch_dependent | self._descendants(order, roots) | roots
            writes = ((n, h) for n in order if n.may_write_variable for h in n.variable_handles if h not in carried)
            new = [h for n, h in writes if self._is_written_per_micro_batch(n, h, repeated)]
            if not new:
                break
            carried.update(dict.fromkeys(new))
        return StepPartition(
            frozenset(repeated),
            frozenset(batch_dependent),
            frozenset(self.update),
            tuple(self.gradients),
            tuple(carried),
            frozenset(self.sources),
        )

    def _descendants(self, order: Iterable[Node], roots: Container[Node]) -> set[Node]:
        result: set[Node] = set()
        for node in order:
            if node.op != "Placeholder" and any(t.node in result or t.node in roots for t in node.inputs):
                result.add(node)
        return result

    def _is_written_per_micro_batch(self, node: Node, handle: Tensor, repeated: set[Node]) -> bool:
        """Return whether each micro-batch writes the variable that an op writes."""
        if node in repeated or node.name in self.hints.per_micro_batch:
            return True
        if node.name in self.hints.once or handle in self.update_handles or node.op in _COUNTS:
            return False
        reads = [n for n, _ in self.analysis.consumers[handle] if n not in self.update and n.outputs]
        return any(self._seeds_random_numbers(n) for n in reads)

    def _seeds_random_numbers(self, node: Node) -> bool:
        stack, seen = [node], {node}
        while stack:
            for index in range(len((current := stack.pop()).outputs)):
                for consumer, _ in self.analysis.consumers.get(current.out(index), ()):
                    if consumer in self.draws:
                        return True
                    if consumer not in seen and consumer not in self.update:
                        seen.add(consumer)
                        stack.append(consumer)
        return False
