"""Which part of a training step runs once for each micro-batch, and which once for all of them.

A joint graph is split at its gradients. What depends on the batch runs for each micro-batch, and so does everything
that touches a variable which it changes: counters of metrics, moving statistics, seeds. What is done with gradients
runs once, and what depends on neither, such as reading a weight or counting steps, is shared. Which of these a counter
is, its variable tells: one that the update touches belongs to the optimizer, one that random numbers are drawn by is a
seed, unless it is counted up, as steps are; which belongs to a metric, only who calls it knows.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Container, Iterable, Sequence

from rewriters.analysis.autodiff_roles import gradients, is_seed, reads_shape_only, update_descendants, update_nodes
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.errors import PipelineError
from rewriters.ir.graph import LOOPS, Node, Tensor
from rewriters.ir.variables import may_write_variable, variable_handles

__all__: list[str] = []

_SHARED = frozenset(("Placeholder", "Const", "NoOp", "VarHandleOp"))
_COUNTS = frozenset(("AssignAddVariableOp", "AssignSubVariableOp"))
"""They are repeated only if they add what is of the batch: noise of a step that they count is that of the step."""
_DRAWING = "Rng", "StatefulRandom", "StatefulStandard", "StatefulTruncated", "StatefulUniform"
"""What draws from a variable, which it sets on: each micro-batch draws its own."""
_CONDITIONS = frozenset(("StatelessCase", "StatelessIf"))


class MicroBatchUse(enum.Enum):
    """Ways in which a micro-batch reads a value that does not depend on the data of the batch."""

    SAME = "all micro-batches read one value, or each computes it from its own size"
    SLICE = "each micro-batch reads its slice of the value for the batch"
    INDEX = "the value indexes a tensor of the micro-batch"


@dataclasses.dataclass(frozen=True)
class StepPartition:
    """A step in parts; what is in neither of them is shared by all micro-batches.

    Attributes:
        per_micro_batch: Operations that run for each micro-batch.
        batch_dependent: Those of them that depend on the batch itself, not only on what was counted before.
        update: Operations that run once, when all gradients are there.
        gradients: What the update reads, or the step returns.
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
        is_pure = bool(node.inputs) and not node.stateful and not variable_handles(node)
        if is_shared or reads_shape_only(node) or (is_pure and all(t.node in result for t in node.inputs)):
            result.add(node)
    return result


def with_sliced_values(analysis: GraphAnalysis, parts: StepPartition, sliced: Iterable[Tensor]) -> StepPartition:
    """Return the partition in which all consumers of sliced values, direct or not, run for each micro-batch."""
    values = set(sliced)
    consumers: set[Node] = set()
    for node in analysis.order if values else ():
        if node not in parts.update and not reads_shape_only(node):
            if any(t in values or t.node in consumers for t in node.inputs):
                consumers.add(node)
    return dataclasses.replace(
        parts, per_micro_batch=parts.per_micro_batch | consumers, batch_dependent=parts.batch_dependent | consumers
    )


@dataclasses.dataclass(frozen=True)
class EffectHints:
    """What is known of operations from elsewhere.

    Attributes:
        once: Names of operations that belong to an optimizer.
        per_micro_batch: Names of operations that belong to a metric.
    """

    once: Container[str] = ()
    per_micro_batch: Container[str] = ()


def split_step(
    analysis: GraphAnalysis, batched: Sequence[int], hints: EffectHints | None = None, several: bool = True
) -> StepPartition:
    """Find the parts of a step.

    Args:
        analysis: Of the joint graph of a micro-batch.
        batched: Positions of the arguments that have the batch axis.
        hints: What is known from elsewhere of counters that neither data nor gradients reach.
        several: Whether there are several micro-batches.

    Raises:
        PipelineError: If gradients are computed from what an update has changed.
    """
    splitter = _Splitter(analysis, batched, hints or EffectHints())
    if several:
        splitter.take_what_writes_sizes()
    return splitter.run()


class _Splitter:
    def __init__(self, analysis: GraphAnalysis, batched: Sequence[int], hints: EffectHints) -> None:
        self.analysis = analysis
        self.hints = hints
        self.sources = {analysis.graph.inputs[position].node for position in batched}
        graph, order = analysis.graph, analysis.order
        self.gradients = gradients(graph, order, analysis.backward)
        self.update = self._update(update_nodes(graph, order, analysis.backward))
        self.of_update = {h for node in self.update for h in variable_handles(node)}

    def take_what_writes_sizes(self) -> None:
        """Count what depends on the batch by its size alone, and is written to a variable, as an update.

        Else each micro-batch would write its own size. Of a batch of known size it is a constant, and written once.

        Raises:
            PipelineError: If gradients are computed from it.
        """
        order = [node for node in self.analysis.order if node not in self.update]
        sized = self._descendants(order, self.sources)
        measured = self._descendants((node for node in order if not reads_shape_only(node)), self.sources)
        writing = [
            n
            for n in order
            if may_write_variable(n) and n in sized and n not in measured and not n.op.startswith(_DRAWING)
        ]
        found = {node for node in writing if node.name not in self.hints.per_micro_batch}
        again = next((node for node in update_descendants(order, found) if is_seed(node)), None)
        if again is not None:
            names = " or ".join(f"`{node.name}`" for node in writing if node in found)
            raise PipelineError(
                f"`{again.name}` computes gradients of what {names} may write to a variable, which goes with the "
                "size of the batch. Give the step example arguments, or specifications, of a known batch, or use "
                "`micro_batches=1`."
            )
        self.update = self._update(self.update | found)
        self.of_update = {h for node in self.update for h in variable_handles(node)}

    def run(self) -> StepPartition:
        order = [node for node in self.analysis.order if node not in self.update]
        direct = self._descendants(order, self.sources)
        drawn = {n for n in order if n.stateful and n.outputs and not variable_handles(n) and n.op not in _SHARED}
        self.draws = drawn | {n for n in order if n.op.startswith("Stateless") and n.op not in LOOPS | _CONDITIONS}
        chained: dict[Tensor, None] = {}
        while True:
            touching = {n for n in order if any(h in chained for h in variable_handles(n))}
            repeated = direct | self._descendants(order, drawn | touching) | drawn | touching
            written = ((n, h) for n in order if may_write_variable(n) for h in variable_handles(n) if h not in chained)
            more = [h for n, h in written if self._many(n, h, repeated)]
            if not more:
                break
            chained.update(dict.fromkeys(more))
        return StepPartition(
            frozenset(repeated),
            frozenset(direct),
            frozenset(self.update),
            tuple(self.gradients),
            tuple(chained),
            frozenset(self.sources),
        )

    def _update(self, update: set[Node]) -> set[Node]:
        """With all that descends from it, of which no gradients may be computed."""
        found = update_descendants(self.analysis.order, update)
        again = next((node for node in found if is_seed(node)), None)
        if again is not None:
            raise PipelineError(
                f"The step computes gradients again after an update, as in `{again.name}`: a pipeline has one backward "
                "phase. Make each phase a step of its own."
            )
        return found

    def _descendants(self, order: Iterable[Node], of: Container[Node]) -> set[Node]:
        found: set[Node] = set()
        for node in order:
            if node.op != "Placeholder" and any(t.node in found or t.node in of for t in node.inputs):
                found.add(node)
        return found

    def _many(self, node: Node, handle: Tensor, repeated: set[Node]) -> bool:
        """Whether a variable that an operation writes is written by each micro-batch."""
        if node in repeated or node.name in self.hints.per_micro_batch:
            return True
        if node.name in self.hints.once or handle in self.of_update or node.op in _COUNTS:
            return False
        reads = [n for n, _ in self.analysis.consumers[handle] if n not in self.update and n.outputs]
        return any(self._draws_from(n) for n in reads)

    def _draws_from(self, node: Node) -> bool:
        """Whether a value reaches what draws random numbers, as a seed does; what only counts steps is written once."""
        stack, seen = [node], {node}
        while stack:
            for index in range(len((current := stack.pop()).outputs)):
                for reader, _ in self.analysis.consumers.get(current.out(index), ()):
                    if reader in self.draws:
                        return True
                    if reader not in seen and reader not in self.update:
                        seen.add(reader)
                        stack.append(reader)
        return False
