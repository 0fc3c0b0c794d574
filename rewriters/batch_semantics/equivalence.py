"""Whether micro-batches can be put together again: what joins samples of a batch, and how losses are added up.

A step in micro-batches is the same step if every sample goes its own way until losses are added up. BatchNormalization
is the usual exception; a loss that is divided by a sum of weights or masks is another one. A value without a batch
axis that is made of some with one is a sum over samples: it may be added to others, and scaled by what does not depend
on the batch. Whatever else is done with it, or that it meets single samples again, joins them.

Whether sums are means tells the step itself: it is traced for the batch and for a part of it, and what a mean divides
by is larger there by as much. What tensors are is found out in `interpreter.py`; here it is asked of all that leaves
a micro-batch: gradients, what the update reads besides, results, and what is written to variables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.batch_semantics.axis_rules import SHAPE_OPERANDS
from rewriters.batch_semantics.domain import AbstractValue, BatchKind, Sizes
from rewriters.batch_semantics.interpreter import BatchInterpreter, draws
from rewriters.ir.graph import Node, Tensor, ancestors, predecessors, producers
from rewriters.ir.static_values import is_inexact
from rewriters.ir.variables import may_write_variable, variable_handles
from rewriters.pipelining.step_partition import MicroBatchUse, StepPartition

__all__: list[str] = []

_EITHER = Fraction(0), Fraction(-1)
"""Powers of a sum and of a mean."""


@dataclasses.dataclass(frozen=True)
class EquivalenceReport:
    """How samples of a batch come together.

    Attributes:
        joined: Operations, in order, after which samples do not go their own ways any more: gradients, the update,
            variables or results depend on them.
        written: Variables, by their handles, with who writes or reads them, that micro-batches change otherwise than
            the batch does, by more than adding up; without those that the update changes too, which no pipeline can do.
        in_metrics: The same for those of metrics, and operations that join samples on the way to them alone.
        is_mean: Of values that are added up over samples, whether they are means; not of those of which that is not
            known.
        unlike: Operations that add something that is not of the batch to a sum over it: micro-batches added up would
            have it several times.
        mixed: Operations that add what is a mean to what is a sum, on the way to a gradient or the update.
        scaled: Operations to which it matters that a gradient over a micro-batch is larger than over the batch.
        powers: Of gradients and of what the update reads besides: power of the number of micro-batches that their sum
            is to be multiplied by; `None` if it is not known.
        unknown: Operations of which it is not known what they do to samples, or after which such a power is not known.
        turned: What the update reads of single samples that do not lie in its first dimension.
        factors: By what a micro-batch has to multiply an operand that it adds to a variable.
        odd: Operations that gradients, the update, variables or results depend on, and of each an operand that is known
            to be larger for the batch, by no power of the number of micro-batches.
        use: Returns how micro-batches read a value that does not depend on data; raises `PipelineError` for one that
            cannot be split.
        sums: Sums over samples.
        zero: Gradients that are all zero.
        half: What leaves micro-batches and is made of what they have written, and of a size, of which each has its own.
    """

    joined: list[Node]
    written: list[tuple[Tensor, Node]]
    in_metrics: list[Node | Tensor]
    is_mean: dict[Tensor, bool]
    unlike: list[Node]
    mixed: list[Node]
    scaled: list[Node]
    powers: dict[Tensor, Fraction | None]
    unknown: list[Node]
    turned: list[Tensor]
    factors: dict[tuple[Node, int], float]
    odd: dict[Node, Tensor]
    use: Callable[[Tensor], MicroBatchUse]
    sums: set[Tensor]
    zero: set[Tensor]
    half: list[Tensor]


def analyse_equivalence(
    analysis: GraphAnalysis, parts: StepPartition, sizes: Sizes, metrics: Container[str] = ()
) -> EquivalenceReport:
    """Find out how samples come together.

    Args:
        analysis: Of the step as traced for one micro-batch.
        parts: Its parts.
        sizes: What is known of sizes.
        metrics: Names of operations that belong to metrics.
    """
    values = BatchInterpreter(analysis, parts, sizes)
    return _Leaving(analysis, parts, sizes, metrics, values).run()


class _Leaving:
    """Asks of all that leaves a micro-batch whether it can be put together."""

    def __init__(
        self,
        analysis: GraphAnalysis,
        parts: StepPartition,
        sizes: Sizes,
        metrics: Container[str],
        values: BatchInterpreter,
    ) -> None:
        self.analysis = analysis
        self.parts = parts
        self.sizes = sizes
        self.metrics = metrics
        self.values = values
        self.of = values.of
        self.written: dict[Tensor, Node] = {}
        self.in_metrics: dict[Node | Tensor, None] = {}
        self.factors: dict[tuple[Node, int], float] = {}

    def run(self) -> EquivalenceReport:
        read = [t for node in self.analysis.order if node in self.parts.update for t in node.inputs]
        read = [t for t in dict.fromkeys((*self.parts.gradients, *read)) if t.node in self.parts.per_micro_batch]
        added, of_metrics = self._written()
        needed = self._ancestors([*read, *added])
        results = self._ancestors(self.analysis.graph.outputs) | needed
        joined = [n for n in self.values.joined if n in results]
        forward = [n for n in joined if n not in self.analysis.backward]
        left = [t for t in read if not self._is_total(t)]
        states = dict.fromkeys(s for t in (*left, *added) if (s := self.of[t].state) is not None)
        for node in states:
            self.written.update((h, node) for h in variable_handles(node) if h not in self.written)
        self.written.update((h, node) for h, node in self._half_written() if h not in self.written)
        for handle, node in self._entangled():
            if node.name in self.metrics:
                self.in_metrics[handle] = None
            else:
                self.written.setdefault(handle, node)
        again = {h for node in self.parts.update if may_write_variable(node) for h in variable_handles(node)}
        alone = self._ancestors(of_metrics) - results
        notes = [n for n in self.values.joined if n in alone]
        reads = {t: self.of[t] for t in read if t.node in self.parts.batch_dependent and is_inexact(t.dtype)}
        reads = {t: value for t, value in reads.items() if not value.zero}
        left_last = [t for t in dict.fromkeys((*self.analysis.graph.outputs, *read)) if self._is_last(t)]
        unknown = [n for n in self.values.unknown if n in results]
        unknown += [v.lost for v in reads.values() if v.power is None and v.lost is not None and not v.mixed]
        return EquivalenceReport(
            joined=forward or joined,
            written=[(handle, node) for handle, node in self.written.items() if handle not in again],
            in_metrics=[*notes, *self.in_metrics],
            is_mean={t: v.to_sum == -1 for t, v in self.of.items() if self._is_either(t, v)},
            unlike=[n for n in self.values.unlike if n in results],
            mixed=[n for n in self.values.mixed if n in needed],
            scaled=[n for n in self.values.scaled if n in needed],
            powers={t: v.to_sum for t, v in reads.items()},
            unknown=list(dict.fromkeys(unknown)),
            turned=[t for t in read if (axis := self.of[t].made.axis) is not None and axis.dim],
            factors=self.factors,
            odd={n: t for n, t in self.values.odd.items() if n in results},
            use=self.values.batch_sized.use,
            sums={t for t, v in self.of.items() if v.kind is BatchKind.SUM},
            zero={t for t, v in self.of.items() if self._is_no_gradient(t, v)},
            half=[t for t in left_last if self.of[t].power != 0],
        )

    def _is_either(self, tensor: Tensor, value: AbstractValue) -> bool:
        """Whether it is known to be a sum or a mean; of gradients that are all zero it does not matter."""
        either = tensor.node in self.parts.batch_dependent and value.to_sum in _EITHER
        return either and not self._is_no_gradient(tensor, value)

    def _is_last(self, tensor: Tensor) -> bool:
        """Whether it is made of what micro-batches have written, and not of the batch: the last one has its value."""
        return (
            tensor.node in self.parts.per_micro_batch
            and tensor.node not in self.parts.batch_dependent
            and bool(tensor.dtype.size)
        )

    def _is_no_gradient(self, tensor: Tensor, value: AbstractValue) -> bool:
        return value.zero and tensor.node in self.analysis.backward

    def _ancestors(self, tensors: Iterable[Tensor], through_draws: bool = True) -> set[Node]:
        """Operations that values depend on, sizes left out; not `through_draws`, also what random numbers come from."""

        def waits_for(node: Node) -> Iterable[Node]:
            if not through_draws and draws(node):
                return []
            left_out = SHAPE_OPERANDS.get(node.op, ())
            return [before for p, before in enumerate(producers(node)) if p not in left_out]

        return ancestors((t.node for t in tensors), waits_for)

    # Variables ------------------------------------------------------------------------------------------------

    def _written(self) -> tuple[list[Tensor], list[Tensor]]:
        """What is added to variables, and the same for those of metrics; the latter with all that they write."""
        added: list[Tensor] = []
        of_metrics: list[Tensor] = []
        for node, handle in self._writes():
            metric = node.name in self.metrics
            if not metric and node not in self.parts.batch_dependent:
                continue  # A seed: each micro-batch draws anew.
            found = self._added(node, handle)
            exact = found is not None and self._adds_up(node, *found)
            if not exact:
                if metric:
                    self.in_metrics[handle] = None
                else:
                    self.written.setdefault(handle, node)
            (of_metrics if metric else added).extend([found[1]] if found is not None else node.inputs[1:])
        return added, of_metrics

    def _is_total(self, tensor: Tensor) -> bool:
        """Whether a variable is read after all writes, so that its value after the last micro-batch is the batch's.

        Of what of it is chosen by data, each micro-batch reads a part, before the others have written.
        """
        read, writing = variable_handles(tensor.node), self._writing()
        if not read or tensor.node in self.parts.batch_dependent:
            return False
        return all(self._runs_after(tensor.node, writing[handle]) for handle in read if handle in writing)

    def _writing(self) -> dict[Tensor, list[Node]]:
        """Who writes each variable that micro-batches change, by its handle."""
        written: dict[Tensor, list[Node]] = {}
        for node, handle in self._writes():
            written.setdefault(handle, []).append(node)
        return written

    def _half_written(self) -> Iterator[tuple[Tensor, Node]]:
        """Variables that a result is made of before all micro-batches have written them, with who reads them.

        One that is read after the last write, as a metric is, is what it is for the batch. If a result is also made of
        the batch itself, each micro-batch makes its part of it with a value of its own.
        """
        written = self._writing()
        for result in self.analysis.graph.outputs:
            if result.node not in self.parts.per_micro_batch:
                continue
            for node in self.analysis.sorted(self._ancestors([result], through_draws=False)):
                for handle in variable_handles(node) if node.outputs else ():
                    writing = written.get(handle, [])
                    if writing and (result.node in self.parts.batch_dependent or not self._runs_after(node, writing)):
                        yield handle, node

    def _entangled(self) -> Iterator[tuple[Tensor, Node]]:
        """Variables that are written twice, or by what another one has become meanwhile, with who writes them.

        What each write does may add up, as that of a sum after that of zero does not: after it micro-batches have
        another value to go on from than the batch. Several sums that are added are one.
        """
        written = self._writing()
        counted = {
            *self.parts.batch_dependent,
            *(node for node in self.parts.per_micro_batch if node.name in self.metrics),
        }
        of_data = {handle for handle, nodes in written.items() if not counted.isdisjoint(nodes)}  # Others are seeds.
        for handle, nodes in written.items():
            if handle in of_data and len(nodes) > 1 and not all(self._adds_samples(node, handle) for node in nodes):
                yield handle, nodes[-1]
            for node in nodes:
                found = self._added(node, handle)
                before = self._ancestors([found[1]] if found is not None else node.inputs[1:], through_draws=False)
                if any(other in of_data and other != handle for n in before for other in variable_handles(n)):
                    yield handle, node

    def _adds_samples(self, node: Node, handle: Tensor) -> bool:
        """Whether a write adds something that is made of samples, so that micro-batches add their parts of it."""
        found = self._added(node, handle)
        return found is not None and self.of[found[1]].kind is BatchKind.SUM and self._adds_up(node, *found)

    def _runs_after(self, node: Node, others: Sequence[Node]) -> bool:
        """Whether an operation waits for some others, or is one of them."""
        begin = min(self.analysis.position[other] for other in others)
        seen, stack = {node}, [node]
        while stack:
            for before in predecessors(stack.pop()):
                if before not in seen and self.analysis.position[before] >= begin:
                    seen.add(before)
                    stack.append(before)
        return seen.issuperset(others)

    def _writes(self) -> Iterator[tuple[Node, Tensor]]:
        for node in self.analysis.order:
            if node in self.parts.per_micro_batch and may_write_variable(node):
                for handle in variable_handles(node):
                    if handle in self.parts.carried_variables:
                        yield node, handle

    def _added(self, node: Node, handle: Tensor) -> tuple[tuple[Node, int], Tensor] | None:
        """The operand that is added to a variable, and who reads it; `None` if something else is done."""
        if node.op in ("AssignAddVariableOp", "AssignSubVariableOp"):
            return (node, 1), node.inputs[1]
        if node.op in ("ResourceScatterAdd", "ResourceScatterSub"):
            return (node, 2), node.inputs[2]
        if node.op != "AssignVariableOp":
            return None
        value = node.inputs[1].node
        while value.op in ("Identity", "Cast"):
            value = value.inputs[0].node
        if value.op not in ("Add", "AddV2", "Sub"):
            return None
        for position in (0, 1) if value.op != "Sub" else (0,):
            before = value.inputs[position].node
            while before.op in ("Identity", "Cast"):
                before = before.inputs[0].node
            if before.op == "ReadVariableOp" and before.inputs[0] == handle:
                return (value, 1 - position), value.inputs[1 - position]
        return None

    def _adds_up(self, node: Node, place: tuple[Node, int], tensor: Tensor) -> bool:
        """Whether what micro-batches add makes what the batch adds, each times some factor if need be."""
        value = self.of[tensor]
        rows = node.op.startswith("ResourceScatter") and value.kind is BatchKind.ROWS
        if value.state is not None or value.power is None or (value.kind is BatchKind.ROWS and not rows):
            return False
        factor = value.power if rows else value.power - 1
        if factor:
            if not is_inexact(tensor.dtype):
                return False
            self.factors[place] = float(self.sizes.parts) ** float(factor)
        return value.exact


def unfit(powers: dict[Tensor, Any]) -> list[Tensor]:
    """Of what leaves micro-batches, what is neither a sum nor a mean for sure."""
    return [tensor for tensor, own in powers.items() if own is not None and own not in _EITHER]
