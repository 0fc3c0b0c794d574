"""Abstract interpretation of a step: visits its ops in order and infers how each tensor relates to the samples."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container
from fractions import Fraction

import numpy as np

from rewriters.analysis.autodiff_roles import is_random, is_seed, reads_shape_only
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.batch_semantics import movement_rules
from rewriters.batch_semantics.axis_rules import SHAPE_OPERANDS, infer_layouts
from rewriters.batch_semantics.batch_indices import are_batch_indices
from rewriters.batch_semantics.domain import (
    DATA_INDEPENDENT,
    AbstractValue,
    BatchKind,
    BatchLayout,
    BatchOp,
    CrossSampleError,
    Exponent,
    IrregularScalingError,
    MixedScalingError,
    NonlinearError,
    UnsupportedUseError,
)
from rewriters.batch_semantics.scaling_rules import exponent_between, linear_operands, scaling_exponent
from rewriters.batch_semantics.trace_comparison import BatchAxis, TraceComparison
from rewriters.ir.graph import BRANCHES, Node, Tensor
from rewriters.ir.op_traits import Trait, ops_with
from rewriters.ir.static_values import is_inexact
from rewriters.pipelining.step_partition import StepPartition, data_independent_ops
from rewriters.rules.elementwise import ELEMENTWISE

__all__: list[str] = []

_ = movement_rules  # Its import registers the rules.

_DECISIONS = ("All", "Any")
"""Checks of a batch, such as whether all labels are 0 or 1: the plan notes them, and they are not refused."""


class BatchInterpreter:
    """Infers the abstract value of each tensor that the update does not compute.

    Args:
        analysis: Analysis of the step as traced for one micro-batch.
        parts: Partition of the step.
        sizes: Comparison of the traces for the batch and for a micro-batch.
        per_sample: Ops that the user declares to keep samples apart.

    Attributes:
        values: Abstract value of each tensor.
        cross_sample: Ops that mix samples, in order.
        adds_invariant: Ops that add a data-independent value to a sum over samples.
        mixed: Ops that add values of different exponents.
        nonlinear: Ops whose result for a micro-batch does not scale as their operand does.
        unknown: Ops without a rule.
        irregular: Ops that compute with a number which depends on the batch size by no power, each with that number.
        indexed: Ops that read a data-independent tensor which differs between samples, each with that tensor.
    """

    def __init__(
        self,
        analysis: GraphAnalysis,
        parts: StepPartition,
        *,
        sizes: TraceComparison,
        per_sample: Container[Node] = (),
    ) -> None:
        self.analysis = analysis
        self.per_sample = per_sample
        self.parts = parts
        self.sizes = sizes
        self.values: dict[Tensor, AbstractValue] = {}
        self.cross_sample: dict[Node, None] = {}
        self.adds_invariant: dict[Node, None] = {}
        self.mixed: dict[Node, None] = {}
        self.nonlinear: dict[Node, None] = {}
        self.unknown: dict[Node, None] = {}
        self.irregular: dict[Node, Tensor] = {}
        self.indexed: dict[Node, Tensor] = {}
        # Autodiff's values belong to one micro-batch, such as one over the number of its samples.
        self._independent = data_independent_ops(analysis, parts) - analysis.backward
        self._carried = set(parts.carried_variables)
        self._batches = {t for t in analysis.graph.inputs if t.node in parts.sources}
        for node in analysis.order:
            if node not in parts.update:
                for index, value in enumerate(self._visit(node)):
                    self.values[node.out(index)] = value

    def _visit(self, node: Node) -> list[AbstractValue]:
        outs = [node.out(index) for index in range(len(node.outputs))]
        if not node.inputs:
            rows = BatchLayout(BatchKind.PER_SAMPLE, BatchAxis(0, 1, 1))
            return [AbstractValue(rows) if t in self._batches else self._source(t) for t in outs]
        shapes = SHAPE_OPERANDS.get(node.op, ())
        sizes = [node.inputs[p] for p in shapes if node.inputs[p].dtype.is_integer]
        if any(self.values[size].kind not in DATA_INDEPENDENT for size in sizes):
            self.cross_sample[node] = None  # Data decide a size or a position.
        operands = [AbstractValue() if p in shapes else self._operand(node, t) for p, t in enumerate(node.inputs)]
        if any(h in self._carried for h in node.variable_handles):
            return [AbstractValue() for _ in outs]
        op = BatchOp(self.analysis, self.sizes, node=node, values=operands)
        return self._draw(op) if draws(node) else self._transfer(op)

    def _transfer(self, op: BatchOp) -> list[AbstractValue]:
        """Return the abstract values of an op's results."""
        static = self._static_values(op)
        if all(static) and not reads_shape_only(op.node) and not any(map(self.sizes.axis, op.outs)):
            return [value for value in static if value is not None]
        layouts, is_exact = self._layouts(op, all(v.is_exact for v in op.values))
        exponent = self._exponent(op, is_exact)
        if not all(static) and any(layout.kind is not BatchKind.INDEXED for layout in layouts):
            number = self._irregular_number(op)
            if number is not None:
                self.irregular.setdefault(op.node, number)
                exponent = None
        unknown = (v for v in op.values if v.exponent is None and v.unknown_since is not None)
        since = next((v.unknown_since for v in unknown), op.node) if exponent is None else None
        results: list[AbstractValue] = []
        for layout, value in zip(layouts, static, strict=True):
            if value is not None and layout.kind in DATA_INDEPENDENT:
                results.append(dataclasses.replace(value, layout=layout, is_exact=is_exact))
            else:
                scale = exponent if exponent is None or not layout.adds_samples else exponent + 1
                results.append(AbstractValue(layout, scale, is_exact, since))
        return results

    # Data-independent values ------------------------------------------------------------------------------------

    def _source(self, tensor: Tensor) -> AbstractValue:
        """Return the value of a constant, or of an argument without a batch axis."""
        if tensor.node.op != "Const":
            return AbstractValue()
        value = self._static_value(tensor) or AbstractValue(exponent=None, unknown_since=tensor.node)
        axis = self.sizes.axis(tensor)
        if axis is None:
            return value
        here, _ = self.sizes.values(tensor)
        is_uniform = here is not None and bool((here == here.flat[:1]).all())
        return dataclasses.replace(
            value, layout=BatchLayout(BatchKind.UNIFORM if is_uniform else BatchKind.INDEXED, axis)
        )

    def _static_value(self, tensor: Tensor) -> AbstractValue | None:
        """Return the value of a tensor whose numbers are known for a micro-batch and for the batch."""
        try:
            exponent = exponent_between(*self.sizes.values(tensor), self.sizes.count)
        except IrregularScalingError:
            return AbstractValue(exponent=None, unknown_since=tensor.node)
        return None if exponent is None else AbstractValue(exponent=exponent)

    def _static_values(self, op: BatchOp) -> list[AbstractValue | None]:
        """Return the values of results that depend on sizes and constants alone, `None` for others."""
        if reads_shape_only(op.node) and op.node.op != "Rank":
            return [self._static_value(t) or AbstractValue(exponent=None, unknown_since=op.node) for t in op.outs]
        if op.node.stateful or any(value.kind not in DATA_INDEPENDENT for value in op.values):
            return [None] * len(op.outs)
        first = next((value.unknown_since for value in op.values if value.is_irregular), None)
        results = [self._static_value(tensor) for tensor in op.outs]
        return [dataclasses.replace(v, unknown_since=first) if first and v and v.is_irregular else v for v in results]

    def _operand(self, node: Node, tensor: Tensor) -> AbstractValue:
        """Return the value that a micro-batch reads; note one that differs between samples and is no index."""
        value = self.values[tensor]
        is_computed_once = node in self._independent and not node.stateful
        if value.kind is not BatchKind.INDEXED or is_computed_once or reads_shape_only(node):
            return value
        if not are_batch_indices(self.analysis, self.sizes, tensor, self.parts.update):
            self.indexed.setdefault(node, tensor)
        return AbstractValue(dataclasses.replace(value.layout, kind=BatchKind.UNIFORM))

    def _draw(self, op: BatchOp) -> list[AbstractValue]:
        """Return the values of random numbers; parameters of their distribution must not depend on the batch size."""
        node = op.node
        for value, tensor in zip(op.values, node.inputs, strict=True):
            if value.kind is BatchKind.SUMMED:
                self.cross_sample[node] = None
            elif value.exponent not in (0, math.inf, *(() if value.kind in DATA_INDEPENDENT else (None,))):
                self.irregular.setdefault(node, tensor)
        return [AbstractValue(self._random_layout(node, t), is_exact=node not in self.cross_sample) for t in op.outs]

    def _random_layout(self, node: Node, tensor: Tensor) -> BatchLayout:
        """Return the layout of random numbers: data-independent with a fixed seed, else drawn by each micro-batch."""
        if node not in self._independent:
            return self._layout_by_size(tensor, BatchKind.INVARIANT)
        axis = self.sizes.axis(tensor)
        return BatchLayout(BatchKind.INDEXED, axis) if axis else BatchLayout()

    # Numbers that depend on the batch size by no power ----------------------------------------------------------

    def _irregular_number(self, op: BatchOp) -> Tensor | None:
        """Return a number which the op computes with and that depends on the batch size in an unknown way.

        That includes an operand that depends on the batch size and decides which values the results have, such as the
        condition of a branch, the iterations of a loop or an index. The length of a result decides no value.
        """
        node, is_elementwise = op.node, op.node.op in ELEMENTWISE
        has_samples = any(value.kind not in DATA_INDEPENDENT for value in op.values)
        # A note covers what a branch does with samples.
        harmless = {*linear_operands(op), *(range(1, len(op.values)) if node.op in BRANCHES and has_samples else ())}
        for position, (value, tensor) in enumerate(zip(op.values, node.inputs, strict=True)):
            if position in SHAPE_OPERANDS.get(node.op, ()):
                decides = node.op in ("Slice", "StridedSlice") and self._moves_slice(op, position)
            elif is_elementwise or is_inexact(tensor.dtype):
                decides = value.is_irregular
            else:
                depends = value.exponent not in (0, math.inf, *(() if value.kind in DATA_INDEPENDENT else (None,)))
                decides = depends and value.kind is not BatchKind.SUMMED and position not in harmless
            if decides:
                return tensor if value.unknown_since is None else value.unknown_since.out()
        return None

    def _moves_slice(self, op: BatchOp, position: int) -> bool:
        """Return whether a slice has other bounds for the batch, in another dimension than the batch axis."""
        tensor = op.node.inputs[position]
        here, whole = self.sizes.values(tensor)
        axes = [axis for axis in (op.axis(0), self.sizes.axis(op.node.inputs[0]), self.sizes.axis(op.outs[0])) if axis]
        if any(op.node.attrs[mask].i for mask in ("ellipsis_mask", "new_axis_mask") if mask in op.node.attrs):
            return not axes and self.values[tensor].exponent not in (0, math.inf)
        if not isinstance(here, np.ndarray) or not isinstance(whole, np.ndarray) or here.shape != whole.shape:
            return self.values[tensor].is_irregular
        return not set(np.flatnonzero(here != whole)) <= {axis.dim for axis in axes}

    # Layouts ----------------------------------------------------------------------------------------------------

    def _layouts(self, op: BatchOp, is_exact: bool) -> tuple[list[BatchLayout], bool]:
        """Return the layouts of the results, and whether these are exact; `is_exact` tells whether the operands are."""
        node, mixes_samples = op.node, False
        try:
            layouts = infer_layouts(op)
            for layout, tensor in zip(layouts, op.outs, strict=True):
                self._check_sizes(layout, tensor)
            return layouts, is_exact
        except CrossSampleError:
            mixes_samples = True
        except UnsupportedUseError:
            if all(value.kind in DATA_INDEPENDENT for value in op.values):
                axes = map(self.sizes.axis, op.outs)
                return [BatchLayout(BatchKind.INDEXED, axis) if axis else BatchLayout() for axis in axes], is_exact
        layouts = [self._layout_by_size(t, BatchKind.SUMMED) for t in op.outs]
        has_sums = any(layout.kind is BatchKind.SUMMED for layout in layouts)
        if node in self.per_sample and not has_sums:
            return layouts, is_exact
        if mixes_samples and node.op in _DECISIONS:
            self.unknown[node] = None
            return [BatchLayout() for _ in op.outs], is_exact
        # Without a rule: pairs of samples, and an op of the step that may not be linear in a sum.
        has_pairs = any(len(self.sizes.batch_dims(t)[0]) > 1 for t in op.outs)
        reads_sum = bool(op.of_kind(BatchKind.SUMMED)) and not is_seed(node)
        if mixes_samples or has_pairs or reads_sum or (has_sums and node not in self.analysis.backward):
            if is_exact:  # The first one on its path.
                self.cross_sample[node] = None
            return layouts, False
        self.unknown[node] = None
        return layouts, is_exact

    def _check_sizes(self, layout: BatchLayout, tensor: Tensor) -> None:
        """Check a layout by rule against the sizes in both traces.

        Raises:
            CrossSampleError: If they contradict each other.
        """
        if tensor.shape is None:
            return
        grown, unknown = self.sizes.batch_dims(tensor)
        if layout.kind is BatchKind.SUMMED and (grown or unknown):
            raise CrossSampleError
        if layout.kind is BatchKind.PER_SAMPLE and layout.axis is not None:
            if not grown <= {layout.axis.dim} or layout.axis.dim not in grown | unknown:
                raise CrossSampleError

    def _layout_by_size(self, tensor: Tensor, otherwise: BatchKind) -> BatchLayout:
        """Return per-sample rows for a tensor that may grow with the batch, else a layout of another kind."""
        if tensor.shape is None:
            return BatchLayout(BatchKind.PER_SAMPLE, BatchAxis(0))
        grown, unknown = self.sizes.batch_dims(tensor)
        dims = grown or unknown
        return BatchLayout(BatchKind.PER_SAMPLE, BatchAxis(min(dims))) if dims else BatchLayout(otherwise)

    # Exponents --------------------------------------------------------------------------------------------------

    def _exponent(self, op: BatchOp, is_exact: bool) -> Exponent:
        """Return the exponent of the results, not counting samples that the op adds; `None` if unknown."""
        node, invariants = op.node, [op.values[p].exponent for p in op.of_kind(BatchKind.INVARIANT)]
        sums = {op.values[p].exponent for p in op.of_kind(BatchKind.SUMMED)} - {math.inf}
        if node.op in ops_with(Trait.ADDITIVE) and sums == {1} and not op.of_kind(BatchKind.PER_SAMPLE):
            if 0 in invariants:
                self.adds_invariant[node] = None
                return Fraction(1)
        try:
            return self._gradient_exponent(op) if node in self.unknown else scaling_exponent(op)
        except MixedScalingError:
            self.mixed[node] = None
        except NonlinearError:
            if any(v.kind not in DATA_INDEPENDENT for v in op.values) and is_exact and node not in self.cross_sample:
                self.nonlinear[node] = None
        return None

    def _gradient_exponent(self, op: BatchOp) -> Exponent:
        """Return the exponent of an op without a rule, which is taken to be linear in gradients if autodiff made it."""
        operands = zip(op.values, op.node.inputs, strict=True)
        exponents = {v.exponent for v, t in operands if is_inexact(t.dtype) or v.exponent} - {Fraction(0), math.inf}
        if not exponents:
            return Fraction(0)
        return exponents.pop() if len(exponents) == 1 and is_seed(op.node) else None


def draws(node: Node) -> bool:
    """Return whether an op draws random numbers, different ones for each sample."""
    return is_random(node) and node.op != "RandomShuffle"
