"""Decides whether a step in micro-batches computes what the step for the batch computes.

It does if samples stay apart until losses are summed. BatchNormalization in training mixes samples, and so does a loss
over a sum of weights or masks. A value without a batch axis that is computed from one with a batch axis is a sum over
samples: it may be added to others and scaled by values that do not depend on the batch. Any other use mixes samples.

Two traces, for the batch and for a micro-batch, show whether a sum is a mean: the divisor of a mean is larger in one of
them. `interpreter.py` infers abstract values. This module checks all that leaves a micro-batch: gradients, other
operands of the update, results, and what is written to variables.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from fractions import Fraction

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.batch_semantics.axis_rules import SHAPE_OPERANDS
from rewriters.batch_semantics.domain import AbstractValue, BatchKind
from rewriters.batch_semantics.interpreter import BatchInterpreter, draws
from rewriters.batch_semantics.trace_comparison import TraceComparison
from rewriters.ir.graph import Node, Tensor, ancestors, predecessors, producers
from rewriters.ir.static_values import is_inexact
from rewriters.pipelining.step_partition import StepPartition

__all__: list[str] = []

SUM_OR_MEAN = Fraction(0), Fraction(-1)
"""Combining exponents of a sum and of a mean."""


class EquivalenceReport:
    """Obstacles to a step in micro-batches that equals the step for the batch, and factors that it needs.

    Args:
        analysis: Analysis of the step as traced for one micro-batch.
        parts: Partition of the step.
        sizes: Comparison of the traces for the batch and for a micro-batch.
        metrics: Names of the ops of metrics.
        per_sample: Ops that the user declares to keep samples apart.
        declared_outputs: Positions of the outputs whose reduction the user declares, which are not checked.

    Attributes:
        cross_sample: Ops, in order, that mix samples and that gradients, the update, variables or results depend on.
        inexact_variables: Handles of variables that micro-batches change otherwise than the batch does, each with an
            op that writes or reads it. Variables that the update writes too are left out: no pipeline can have them.
        inexact_metrics: Such handles of metrics, and ops that mix samples on the way to metrics alone.
        is_mean: Whether a value that is summed over samples is a mean; without values of unknown reduction.
        gradient_reductions: Values of `is_mean` for gradients that are sums over samples.
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
        scaled_rows: Results and operands of the update, other than gradients, with rows that scale with the batch size.
        size_dependent_state: Results of what micro-batches have written and of a size that each of them has for itself.
    """

    def __init__(
        self,
        analysis: GraphAnalysis,
        parts: StepPartition,
        sizes: TraceComparison,
        *,
        metrics: Container[str] = (),
        per_sample: Container[Node] = (),
        declared_outputs: Container[int] = (),
    ) -> None:
        interpreter = BatchInterpreter(analysis, parts, sizes=sizes, per_sample=per_sample)
        self._analysis, self._parts, self._count = analysis, parts, sizes.count
        self._metrics = metrics
        self._values = values = interpreter.values
        self._writers = self._find_writers()
        self.factors: dict[tuple[Node, int], float] = {}
        self._inexact: dict[Tensor, Node] = {}
        inexact_metrics: dict[Node | Tensor, None] = {}
        outputs = [t for position, t in enumerate(analysis.graph.outputs) if position not in declared_outputs]
        operands = [t for node in analysis.order if node in parts.update for t in node.inputs]
        read = [t for t in dict.fromkeys((*parts.gradients, *operands)) if t.node in parts.per_micro_batch]
        added, added_to_metrics = self._check_writes(inexact_metrics)
        self._check_reads([*read, *added, *(t for t in outputs if t.node in parts.per_micro_batch)])
        needed = self._ancestors([*read, *added])
        writers = [node for nodes in self._writers.values() for node in nodes if self._is_counted(node)]
        places = [node.inputs[1] for node in writers if node.op.startswith("ResourceScatter")]
        results = self._ancestors([*outputs, *places]) | needed
        for_metrics = self._ancestors(added_to_metrics) - results
        anywhere = {*results, *for_metrics, *writers}
        cross_sample = [n for n in interpreter.cross_sample if n in results]
        updated = {h for node in parts.update if node.may_write_variable for h in node.variable_handles}
        self.cross_sample = [n for n in cross_sample if n not in analysis.backward] or cross_sample
        self.inexact_variables = [(h, node) for h, node in self._inexact.items() if h not in updated]
        self.inexact_metrics = [*(n for n in interpreter.cross_sample if n in for_metrics), *inexact_metrics]
        self.is_mean = {t: v.combining_exponent == -1 for t, v in values.items() if self._is_sum_or_mean(t, v)}
        sums = (t for t in parts.gradients if t in self.is_mean and values[t].kind is BatchKind.SUMMED)
        self.gradient_reductions = {self.is_mean[t] for t in sums}
        self.adds_invariant = [n for n in interpreter.adds_invariant if n in results]
        self.mixed = [n for n in interpreter.mixed if n in needed]
        self.nonlinear = [n for n in interpreter.nonlinear if n in needed]
        scaled = [t for t in read if t.node in parts.batch_dependent and is_inexact(t.dtype) and not values[t].is_zero]
        self.exponents = {t: values[t].combining_exponent for t in scaled}
        since = (values[t].unknown_since for t in scaled if values[t].exponent is None)
        unknown = (*(n for n in interpreter.unknown if n in results), *(n for n in since if n is not None))
        self.unknown = list(dict.fromkeys(unknown))
        self.transposed = [t for t in read if (axis := values[t].layout.axis) is not None and axis.dim]
        self.irregular = {n: t for n, t in interpreter.irregular.items() if n in anywhere}
        self.indexed = {n: t for n, t in interpreter.indexed.items() if n in anywhere}
        self.scaled_rows = [t for t in dict.fromkeys((*outputs, *read)) if self._has_scaled_rows(t)]
        counted = parts.per_micro_batch - parts.batch_dependent
        state = [t for t in dict.fromkeys((*outputs, *read)) if t.node in counted and t.dtype.size]
        self.size_dependent_state = [t for t in state if values[t].exponent not in (0, math.inf)]

    def _has_scaled_rows(self, tensor: Tensor) -> bool:
        """Return whether a value other than a gradient has rows for samples that depend on the batch size."""
        value = self._values.get(tensor)  # `None` for results of the update.
        if value is None or value.kind is not BatchKind.PER_SAMPLE or tensor in self._parts.gradients:
            return False
        return value.exponent not in (0, math.inf, None)

    def _is_sum_or_mean(self, tensor: Tensor, value: AbstractValue) -> bool:
        if tensor.dtype.is_integer and value.kind is not BatchKind.SUMMED:
            return False
        is_zero_result = value.is_zero and tensor.node not in self._analysis.backward
        return tensor.node in self._parts.batch_dependent and (
            value.combining_exponent in SUM_OR_MEAN or is_zero_result
        )

    def _ancestors(self, tensors: Iterable[Tensor], through_draws: bool = True) -> set[Node]:
        """Return the ops that values depend on, shape operands left out, and seeds too unless `through_draws`."""

        def operands(node: Node) -> Iterable[Node]:
            if not through_draws and draws(node):
                return []
            shapes = SHAPE_OPERANDS.get(node.op, ())
            return [before for p, before in enumerate(producers(node)) if p not in shapes]

        return ancestors((t.node for t in tensors), operands)

    def _find_writers(self) -> dict[Tensor, list[Node]]:
        """Return the ops that write each carried variable, by its handle."""
        writers: dict[Tensor, list[Node]] = {}
        for node in self._analysis.order:
            if node in self._parts.per_micro_batch and node.may_write_variable:
                for handle in node.variable_handles:
                    if handle in self._parts.carried_variables:
                        writers.setdefault(handle, []).append(node)
        return writers

    def _check_writes(self, inexact_metrics: dict[Node | Tensor, None]) -> tuple[list[Tensor], list[Tensor]]:
        """Check that writes add up; return the values added to variables, and those written to metrics.

        A variable that is written twice starts from another value in later micro-batches, unless all writes add sums. A
        seed, which does not depend on data, is not checked: each micro-batch draws its own numbers.
        """
        added: list[Tensor] = []
        added_to_metrics: list[Tensor] = []
        of_data = {h for h, nodes in self._writers.items() if any(map(self._is_counted, nodes))}
        for handle, nodes in self._writers.items():
            addends = [self._addend(node, handle) for node in nodes]
            sums = [addend is not None and self._values[addend[1]].kind is BatchKind.SUMMED for addend in addends]
            is_single = len(nodes) == 1 or all(sums) or handle not in of_data
            for node, addend in zip(nodes, addends, strict=True):
                written = [addend[1]] if addend is not None else node.inputs[1:]
                reads_total = any(other in of_data for _, other in self._reads(written))
                if not self._is_counted(node) and not reads_total and is_single:
                    continue
                is_exact = is_single and not reads_total and addend is not None and self._adds_up(node, *addend)
                if node.name in self._metrics:
                    added_to_metrics += written
                    inexact_metrics.update({} if is_exact else {handle: None})
                else:
                    added += written
                    self._inexact.update({} if is_exact else {handle: node})
        return added, added_to_metrics

    def _is_counted(self, node: Node) -> bool:
        """Return whether a write depends on data, or belongs to a metric."""
        return node in self._parts.batch_dependent or node.name in self._metrics

    def _reads(self, tensors: Sequence[Tensor]) -> list[tuple[Node, Tensor]]:
        """Return the ops, with handles, that read carried variables which values depend on, other than by draws."""
        before = self._analysis.sorted(self._ancestors(tensors, through_draws=False))
        return [(n, h) for n in before if n.outputs for h in n.variable_handles if h in self._writers]

    def _check_reads(self, leaving: Sequence[Tensor]) -> None:
        """Check that no value that leaves micro-batches depends on a variable between the writes of two of them.

        A value that depends on the batch itself is computed by each micro-batch, with its own value of the variable.
        """
        for tensor in leaving:
            depends_on_batch = tensor.node in self._parts.batch_dependent
            for node, handle in self._reads([tensor]):
                if depends_on_batch or not self._runs_after(node, self._writers[handle]):
                    self._inexact.setdefault(handle, node)

    def _runs_after(self, node: Node, others: Sequence[Node]) -> bool:
        """Return whether an op is one of some others, or runs after all of them."""
        begin = min(self._analysis.position[other] for other in others)
        seen, stack = {node}, [node]
        while stack:
            for before in predecessors(stack.pop()):
                if before not in seen and self._analysis.position[before] >= begin:
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
        value = self._values[tensor]
        is_per_sample = value.kind in (BatchKind.PER_SAMPLE, BatchKind.UNIFORM)
        if value.exponent is None:
            return False
        if node.op.startswith("ResourceScatter"):
            places = self._values[node.inputs[1]]
            if places.kind is BatchKind.SUMMED or places.exponent not in (0, math.inf):
                return False
        elif is_per_sample:
            return False
        exponent = value.exponent if is_per_sample else value.exponent - 1
        if exponent not in (0, math.inf):
            if not is_inexact(tensor.dtype):
                return False
            self.factors[place] = float(self._count) ** float(exponent)
        return value.is_exact


def _without_casts(node: Node) -> Node:
    while node.op in ("Identity", "Cast"):
        node = node.inputs[0].node
    return node
