"""Decides whether a step in micro-batches computes what the step for the batch computes.

It does if samples stay apart until losses are summed. BatchNormalization in training mixes samples, and so does a loss
over a sum of weights or masks. A value without a batch axis that is computed from one with a batch axis is a sum over
samples: it may be added to others and scaled by values that do not depend on the batch. Any other use mixes samples.

Two traces, for the batch and for a micro-batch, show whether a sum is a mean: the divisor of a mean is larger in one of
them. `interpreter.py` infers abstract values. This module checks all that leaves a micro-batch: gradients, other
operands of the update, results, and what is written to variables.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Iterable, Sequence
from fractions import Fraction

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.batch_semantics.axis_rules import SHAPE_OPERANDS
from rewriters.batch_semantics.domain import AbstractValue, BatchKind, Exponent, TraceComparison
from rewriters.batch_semantics.interpreter import BatchInterpreter, draws
from rewriters.ir.graph import Node, Tensor, ancestors, predecessors, producers
from rewriters.ir.static_values import is_inexact
from rewriters.ir.variables import may_write_variable, variable_handles
from rewriters.pipelining.step_partition import StepPartition

__all__: list[str] = []

SUM_OR_MEAN = Fraction(0), Fraction(-1)
"""Combining exponents of a sum and of a mean."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EquivalenceReport:
    """Findings about a step in micro-batches.

    Attributes:
        cross_sample: Ops, in order, that mix samples and that gradients, the update, variables or results depend on.
        inexact_variables: Handles of variables that micro-batches change otherwise than the batch does, each with an
            op that writes or reads it. Variables that the update writes too are left out: no pipeline can have them.
        inexact_metrics: Such handles of metrics, and ops that mix samples on the way to metrics alone.
        is_mean: Whether a value that is summed over samples is a mean; without values of unknown reduction.
        adds_invariant: Ops that add a data-independent value to a sum over samples; adding micro-batches would count it
            several times.
        mixed: Ops that add a mean to a sum, on the way to a gradient or the update.
        nonlinear: Ops whose result does not scale as the gradient that they read does.
        exponents: Exponent of the factor that gradients and other operands of the update need when they are added up;
            `None` if unknown.
        unknown: Ops that may mix samples, and ops after which an exponent is unknown.
        transposed: Per-sample operands of the update whose batch axis is not the first.
        factors: Factor by which each micro-batch multiplies an operand that it adds to a variable.
        irregular: Ops that compute with a number which depends on the batch size by no power, each with that number.
        indexed: Ops that read a data-independent value which differs between samples, each with that value.
        summed: Sums over samples.
        size_dependent_state: Results of what micro-batches have written and of a size that each of them has for itself.
    """

    cross_sample: list[Node]
    inexact_variables: list[tuple[Tensor, Node]]
    inexact_metrics: list[Node | Tensor]
    is_mean: dict[Tensor, bool]
    adds_invariant: list[Node]
    mixed: list[Node]
    nonlinear: list[Node]
    exponents: dict[Tensor, Exponent]
    unknown: list[Node]
    transposed: list[Tensor]
    factors: dict[tuple[Node, int], float]
    irregular: dict[Node, Tensor]
    indexed: dict[Node, Tensor]
    summed: set[Tensor]
    size_dependent_state: list[Tensor]


def analyse_equivalence(
    analysis: GraphAnalysis,
    parts: StepPartition,
    sizes: TraceComparison,
    *,
    metrics: Container[str] = (),
    per_sample: Container[Node] = (),
    declared_outputs: Container[int] = (),
) -> EquivalenceReport:
    """Report what keeps a step in micro-batches from computing what the step for the batch computes.

    Args:
        analysis: Analysis of the step as traced for one micro-batch.
        parts: Partition of the step.
        sizes: Comparison of the traces for the batch and for a micro-batch.
        metrics: Names of the ops of metrics.
        per_sample: Ops that the user declares to keep samples apart.
        declared_outputs: Positions of the outputs whose reduction the user declares, which are not checked.
    """
    interpreter = BatchInterpreter(analysis, parts, sizes, per_sample)
    outputs = [t for position, t in enumerate(analysis.graph.outputs) if position not in declared_outputs]
    return _EquivalenceCheck(interpreter, metrics, outputs).run()


class _EquivalenceCheck:
    def __init__(self, interpreter: BatchInterpreter, metrics: Container[str], outputs: Sequence[Tensor]) -> None:
        self.analysis = interpreter.analysis
        self.parts = interpreter.parts
        self.sizes = interpreter.sizes
        self.metrics = metrics
        self.outputs = outputs
        self.interpreter = interpreter
        self.values = self.interpreter.values
        self.writers = self._writers()
        self.inexact_variables: dict[Tensor, Node] = {}
        self.inexact_metrics: dict[Node | Tensor, None] = {}
        self.factors: dict[tuple[Node, int], float] = {}

    def run(self) -> EquivalenceReport:
        """Check all that leaves a micro-batch."""
        inside, parts = self.interpreter, self.parts
        operands = [t for node in self.analysis.order if node in parts.update for t in node.inputs]
        read = [t for t in dict.fromkeys((*parts.gradients, *operands)) if t.node in parts.per_micro_batch]
        added, added_to_metrics = self._check_writes()
        needed = self._ancestors([*read, *added])
        results = self._ancestors(self.outputs) | needed
        cross_sample = [n for n in inside.cross_sample if n in results]
        forward = [n for n in cross_sample if n not in self.analysis.backward]
        self._check_reads([t for t in read if not self._is_read_after_writes(t)] + added)
        self._check_order()
        rewritten = {h for node in parts.update if may_write_variable(node) for h in variable_handles(node)}
        for_metrics = self._ancestors(added_to_metrics) - results
        exponents = {
            t: self.values[t]
            for t in read
            if t.node in parts.batch_dependent and is_inexact(t.dtype) and not self.values[t].is_zero
        }
        leaving = [t for t in dict.fromkeys((*self.outputs, *read)) if self._is_state(t)]
        unknown = [n for n in inside.unknown if n in results]
        unknown += [v.unknown_since for v in exponents.values() if v.exponent is None and v.unknown_since]
        return EquivalenceReport(
            cross_sample=forward or cross_sample,
            inexact_variables=[(h, node) for h, node in self.inexact_variables.items() if h not in rewritten],
            inexact_metrics=[*(n for n in inside.cross_sample if n in for_metrics), *self.inexact_metrics],
            is_mean={t: v.combining_exponent == -1 for t, v in self.values.items() if self._is_sum_or_mean(t, v)},
            adds_invariant=[n for n in inside.adds_invariant if n in results],
            mixed=[n for n in inside.mixed if n in needed],
            nonlinear=[n for n in inside.nonlinear if n in needed],
            exponents={t: v.combining_exponent for t, v in exponents.items()},
            unknown=list(dict.fromkeys(unknown)),
            transposed=[t for t in read if (axis := self.values[t].layout.axis) is not None and axis.dim],
            factors=self.factors,
            irregular={n: t for n, t in inside.irregular.items() if n in results},
            indexed={n: t for n, t in inside.indexed.items() if n in results},
            summed={t for t, v in self.values.items() if v.kind is BatchKind.SUMMED},
            size_dependent_state=[t for t in leaving if self.values[t].exponent not in (0, math.inf)],
        )

    def _is_sum_or_mean(self, tensor: Tensor, value: AbstractValue) -> bool:
        is_zero_result = value.is_zero and tensor.node not in self.analysis.backward
        return tensor.node in self.parts.batch_dependent and (value.combining_exponent in SUM_OR_MEAN or is_zero_result)

    def _is_state(self, tensor: Tensor) -> bool:
        """Return whether a tensor depends on what micro-batches have written, and not on the batch itself."""
        is_counted = tensor.node in self.parts.per_micro_batch and tensor.node not in self.parts.batch_dependent
        return is_counted and bool(tensor.dtype.size)

    def _ancestors(self, tensors: Iterable[Tensor], through_draws: bool = True) -> set[Node]:
        """Return the ops that values depend on, shape operands left out, and seeds too unless `through_draws`."""

        def operands(node: Node) -> Iterable[Node]:
            if not through_draws and draws(node):
                return []
            shapes = SHAPE_OPERANDS.get(node.op, ())
            return [before for p, before in enumerate(producers(node)) if p not in shapes]

        return ancestors((t.node for t in tensors), operands)

    # Variables ------------------------------------------------------------------------------------------------

    def _writers(self) -> dict[Tensor, list[Node]]:
        """Return the ops that write each carried variable, by its handle."""
        writers: dict[Tensor, list[Node]] = {}
        for node in self.analysis.order:
            if node in self.parts.per_micro_batch and may_write_variable(node):
                for handle in variable_handles(node):
                    if handle in self.parts.carried_variables:
                        writers.setdefault(handle, []).append(node)
        return writers

    def _check_writes(self) -> tuple[list[Tensor], list[Tensor]]:
        """Check that writes add up; return the values added to variables, and those written to metrics."""
        added: list[Tensor] = []
        added_to_metrics: list[Tensor] = []
        writes = ((node, handle) for handle, nodes in self.writers.items() for node in nodes)
        for node, handle in sorted(writes, key=lambda write: self.analysis.position[write[0]]):
            is_metric = node.name in self.metrics
            if not is_metric and node not in self.parts.batch_dependent:
                continue  # A seed: each micro-batch draws its own numbers.
            addend = self._addend(node, handle)
            if addend is None or not self._adds_up(node, *addend):
                self._report(handle, node)
            (added_to_metrics if is_metric else added).extend([addend[1]] if addend is not None else node.inputs[1:])
        return added, added_to_metrics

    def _report(self, handle: Tensor, node: Node) -> None:
        if node.name in self.metrics:
            self.inexact_metrics[handle] = None
        else:
            self.inexact_variables.setdefault(handle, node)

    def _check_reads(self, leaving: Sequence[Tensor]) -> None:
        """Check that no value depends on a variable between the writes of two micro-batches.

        A result that depends on the batch itself is computed by each micro-batch, with its own value of the variable.
        """
        for node in dict.fromkeys(state for t in leaving if (state := self.values[t].state) is not None):
            for handle in variable_handles(node):
                self.inexact_variables.setdefault(handle, node)
        for result in self.outputs:
            if result.node not in self.parts.per_micro_batch:
                continue
            depends_on_batch = result.node in self.parts.batch_dependent
            for node in self.analysis.sorted(self._ancestors([result], through_draws=False)):
                for handle in variable_handles(node) if node.outputs else ():
                    writers = self.writers.get(handle)
                    if writers and (depends_on_batch or not self._runs_after(node, writers)):
                        self.inexact_variables.setdefault(handle, node)

    def _check_order(self) -> None:
        """Check that a variable is not written twice, nor from another one that changes in the step.

        Each of two writes may add up, as that of a sum after that of zero does not: micro-batches start from another
        value than the batch. Several sums that are added count as one write.
        """
        counted = {
            *self.parts.batch_dependent,
            *(node for node in self.parts.per_micro_batch if node.name in self.metrics),
        }
        of_data = {handle for handle, nodes in self.writers.items() if not counted.isdisjoint(nodes)}  # Others: seeds.
        for handle, nodes in self.writers.items():
            if handle in of_data and len(nodes) > 1 and not all(self._adds_samples(node, handle) for node in nodes):
                self._report(handle, nodes[-1])
            for node in nodes:
                addend = self._addend(node, handle)
                before = self._ancestors([addend[1]] if addend is not None else node.inputs[1:], through_draws=False)
                if any(other in of_data and other != handle for n in before for other in variable_handles(n)):
                    self._report(handle, node)

    def _adds_samples(self, node: Node, handle: Tensor) -> bool:
        addend = self._addend(node, handle)
        return addend is not None and self.values[addend[1]].kind is BatchKind.SUMMED and self._adds_up(node, *addend)

    def _is_read_after_writes(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a variable after all writes, so that the last micro-batch has the batch's value.

        Entries that data choose are read by each micro-batch before later ones have written.
        """
        handles = variable_handles(tensor.node)
        if not handles or tensor.node in self.parts.batch_dependent:
            return False
        return all(self._runs_after(tensor.node, self.writers[h]) for h in handles if h in self.writers)

    def _runs_after(self, node: Node, others: Sequence[Node]) -> bool:
        """Return whether an op is one of some others, or runs after all of them."""
        begin = min(self.analysis.position[other] for other in others)
        seen, stack = {node}, [node]
        while stack:
            for before in predecessors(stack.pop()):
                if before not in seen and self.analysis.position[before] >= begin:
                    seen.add(before)
                    stack.append(before)
        return seen.issuperset(others)

    def _addend(self, node: Node, handle: Tensor) -> tuple[tuple[Node, int], Tensor] | None:
        """Return the value that a write adds to a variable, after the op and position that read it; else `None`."""
        position = {
            "AssignAddVariableOp": 1,
            "AssignSubVariableOp": 1,
            "ResourceScatterAdd": 2,
            "ResourceScatterSub": 2,
        }
        if node.op in position:
            return (node, position[node.op]), node.inputs[position[node.op]]
        if node.op != "AssignVariableOp":
            return None
        value = _without_casts(node.inputs[1].node)
        for place in {"Add": (0, 1), "AddV2": (0, 1), "Sub": (0,)}.get(value.op, ()):
            before = _without_casts(value.inputs[place].node)
            if before.op == "ReadVariableOp" and before.inputs[0] == handle:
                return (value, 1 - place), value.inputs[1 - place]
        return None

    def _adds_up(self, node: Node, place: tuple[Node, int], tensor: Tensor) -> bool:
        """Return whether what micro-batches add makes what the batch adds, each times a factor where needed."""
        value = self.values[tensor]
        is_per_sample = value.kind is BatchKind.PER_SAMPLE
        if value.state is not None or value.exponent is None:
            return False
        if is_per_sample and not node.op.startswith("ResourceScatter"):
            return False
        exponent = value.exponent if is_per_sample else value.exponent - 1
        if exponent not in (0, math.inf):
            if not is_inexact(tensor.dtype):
                return False
            self.factors[place] = float(self.sizes.count) ** float(exponent)
        return value.is_exact


def _without_casts(node: Node) -> Node:
    while node.op in ("Identity", "Cast"):
        node = node.inputs[0].node
    return node
