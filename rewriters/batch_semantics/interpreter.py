"""Abstract interpretation of a step: visits its ops in order and infers how each tensor relates to the samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from fractions import Fraction

import numpy as np

from rewriters.analysis.autodiff_roles import is_random, is_seed, reads_shape_only
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.batch_semantics import movement_rules
from rewriters.batch_semantics.axis_rules import LENGTH_OPERANDS, SHAPE_OPERANDS, infer_layouts
from rewriters.batch_semantics.batch_indices import are_batch_indices
from rewriters.batch_semantics.domain import (
    DATA_INDEPENDENT,
    AbstractValue,
    BatchAxis,
    BatchKind,
    BatchLayout,
    BatchOp,
    CrossSampleError,
    IrregularScalingError,
    MixedScalingError,
    NonlinearError,
    TraceComparison,
    UnsupportedUseError,
)
from rewriters.batch_semantics.scaling_rules import (
    exponent_between,
    is_structurally_zero,
    scaled_operands,
    scaling_exponent,
)
from rewriters.ir.graph import BRANCHES, LOOPS, Node, Tensor
from rewriters.ir.op_traits import Trait, ops_with
from rewriters.ir.static_values import is_inexact
from rewriters.ir.variables import variable_handles
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
        if any(h in self._carried for h in variable_handles(node)):
            return [AbstractValue(state=node) for _ in outs]
        if draws(node):
            return [AbstractValue(self._random_layout(node, t)) for t in outs]
        shapes = SHAPE_OPERANDS.get(node.op, ())
        operands = [AbstractValue() if p in shapes else self._operand(node, t) for p, t in enumerate(node.inputs)]
        return self._transfer(BatchOp(self.analysis, self.sizes, node, operands))

    def _transfer(self, op: BatchOp) -> list[AbstractValue]:
        """Return the abstract values of an op's results."""
        static = self._static_values(op)
        if all(static) and not reads_shape_only(op.node) and not any(map(self.sizes.axis, op.outs)):
            return [value for value in static if value is not None]
        layouts, is_exact = self._layouts(op, all(v.is_exact for v in op.values))
        is_zero = is_structurally_zero(op)
        exponent, unknown_since, is_mixed = (Fraction(0), None, False) if is_zero else self._exponent(op, is_exact)
        state = next((v.state for v in op.values if v.state is not None), None)
        decider = self._deciding_size(op)
        irregular_since = self._irregular_since(op, exponent, decider)
        results: list[AbstractValue] = []
        for tensor, layout, value in zip(op.outs, layouts, static, strict=True):
            if value is not None and layout.kind in DATA_INDEPENDENT:
                results.append(dataclasses.replace(value, layout=layout, is_exact=is_exact))
                continue
            results.append(
                AbstractValue(
                    layout,
                    exponent if exponent is None or not layout.adds_samples else exponent + 1,
                    is_exact,
                    state,
                    unknown_since or irregular_since,
                    is_mixed,
                    is_irregular=irregular_since is not None and layout.kind in DATA_INDEPENDENT,
                    is_zero=is_zero and is_inexact(tensor.dtype),
                )
            )
        if any(value.kind is not BatchKind.INDEXED for value in results):
            self._note_irregular_operands(op)
        # Integers may be sizes or indices, so their consumers are checked instead.
        has_integers_only = all(v.is_irregular and t.dtype.is_integer for v, t in zip(results, op.outs, strict=True))
        if decider is not None and not has_integers_only:
            self.irregular.setdefault(op.node, decider)
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
            return AbstractValue(exponent=None, unknown_since=tensor.node, is_irregular=True)
        if exponent is None:
            return None
        return AbstractValue(exponent=exponent, is_zero=not np.any(self.sizes.values(tensor)[0]))

    def _static_values(self, op: BatchOp) -> list[AbstractValue | None]:
        """Return the values of results that depend on sizes and constants alone, `None` for others."""
        if reads_shape_only(op.node) and op.node.op != "Rank":
            return [self._static_value(t) or AbstractValue(exponent=None, unknown_since=op.node) for t in op.outs]
        if op.node.stateful or any(value.kind not in DATA_INDEPENDENT for value in op.values):
            return [None] * len(op.outs)
        results = [self._static_value(tensor) for tensor in op.outs]
        if any(v.is_irregular and self._is_number(op, t) for v, t in zip(op.values, op.node.inputs, strict=True)):
            # An exponent of the result would be a coincidence.
            results = [
                dataclasses.replace(v, exponent=None, is_irregular=True) if v and v.exponent else v for v in results
            ]
        first = next((v.unknown_since for v in op.values if v.is_irregular), None)
        return [dataclasses.replace(v, unknown_since=first) if first and v and v.is_irregular else v for v in results]

    def _is_number(self, op: BatchOp, tensor: Tensor) -> bool:
        """Return whether an operand is used as a number or a condition, and not as a part of a shape."""
        is_scalar = np.size(self.sizes.values(tensor)[0]) == 1
        return tensor.dtype.name == "bool" or (is_inexact(tensor.dtype) and (is_scalar or op.node.op in ELEMENTWISE))

    def _operand(self, node: Node, tensor: Tensor) -> AbstractValue:
        """Return the value that a micro-batch reads; note one that differs between samples and is no index."""
        value = self.values[tensor]
        if value.kind is not BatchKind.INDEXED or node in self._independent or reads_shape_only(node):
            return value
        if not are_batch_indices(self.analysis, self.sizes, tensor, self.parts.update):
            self.indexed.setdefault(node, tensor)
        return AbstractValue(dataclasses.replace(value.layout, kind=BatchKind.UNIFORM))

    def _random_layout(self, node: Node, tensor: Tensor) -> BatchLayout:
        """Return the layout of random numbers: data-independent with a fixed seed, else drawn by each micro-batch."""
        if node not in self._independent:
            return self._layout_by_size(tensor, BatchKind.INVARIANT)
        axis = self.sizes.axis(tensor)
        return BatchLayout(BatchKind.INDEXED, axis) if axis else BatchLayout()

    # Numbers that depend on the batch size by no power ----------------------------------------------------------

    def _irregular_since(self, op: BatchOp, exponent: Fraction | None, decider: Tensor | None) -> Node | None:
        """Return the first op after which a data-independent value depends on the batch size by an unknown power."""
        if any(value.kind not in DATA_INDEPENDENT for value in op.values):
            return None
        for value in op.values:
            if value.is_irregular:
                return value.unknown_since or op.node
        is_first = exponent is None and all(value.exponent is not None for value in op.values)
        return op.node if is_first or decider is not None else None

    def _note_irregular_operands(self, op: BatchOp) -> None:
        for value, tensor in zip(op.values, op.node.inputs, strict=True):
            if value.is_irregular and value.unknown_since and (is_inexact(tensor.dtype) or op.node.op in ELEMENTWISE):
                self.irregular.setdefault(op.node, value.unknown_since.out())

    def _deciding_size(self, op: BatchOp) -> Tensor | None:
        """Return an operand that depends on the batch size and decides which values the results have.

        Examples are the condition of a branch, the iterations of a loop or an index. The length of a result decides no
        value.
        """
        node, inputs = op.node, op.node.inputs
        if node.op in ELEMENTWISE or reads_shape_only(node) or not op.outs:
            return None
        if node.op not in BRANCHES and any(t.dtype.name == "variant" for t in op.outs):
            return None
        has_batch_axis = any(map(self.sizes.axis, op.outs))
        harmless = {*scaled_operands(op), *(LENGTH_OPERANDS.get(node.op, ()) if has_batch_axis else ())}
        if node.op in BRANCHES and any(value.kind not in DATA_INDEPENDENT for value in op.values):
            harmless.update(range(1, len(inputs)))  # A note covers what the branch does with samples.
        shapes = SHAPE_OPERANDS.get(node.op, ())
        for position, tensor in enumerate(inputs):
            value = self.values[tensor]
            if position in shapes:
                decides = node.op in ("Slice", "StridedSlice") and self._moves_slice(op, position)
            else:
                depends = value.depends_on_size or (value.kind is BatchKind.PER_SAMPLE and bool(value.exponent))
                decides = depends and position not in harmless and not is_inexact(tensor.dtype)
            if decides:
                return tensor if value.unknown_since is None else value.unknown_since.out()
        return None

    def _moves_slice(self, op: BatchOp, position: int) -> bool:
        """Return whether a slice has other bounds for the batch, in another dimension than the batch axis."""
        tensor = op.node.inputs[position]
        here, whole = self.sizes.values(tensor)
        axes = [axis for axis in (op.axis(0), self.sizes.axis(op.node.inputs[0]), self.sizes.axis(op.outs[0])) if axis]
        if any(op.node.attrs[mask].i for mask in ("ellipsis_mask", "new_axis_mask") if mask in op.node.attrs):
            return not axes and self.values[tensor].depends_on_size
        if not isinstance(here, np.ndarray) or not isinstance(whole, np.ndarray) or here.shape != whole.shape:
            return self.values[tensor].is_irregular
        return not set(np.flatnonzero(here != whole)) <= {axis.dim for axis in axes}

    # Layouts ----------------------------------------------------------------------------------------------------

    def _layouts(self, op: BatchOp, is_exact: bool) -> tuple[list[BatchLayout], bool]:
        """Return the layouts of the results, and whether these are exact; `is_exact` tells whether the operands are."""
        try:
            layouts = infer_layouts(op)
            for layout, tensor in zip(layouts, op.outs, strict=True):
                self._check_sizes(layout, tensor)
        except (CrossSampleError, UnsupportedUseError) as error:
            return self._layouts_without_rule(op, is_exact, isinstance(error, CrossSampleError))
        return layouts, is_exact

    def _layouts_without_rule(self, op: BatchOp, is_exact: bool, mixes_samples: bool) -> tuple[list[BatchLayout], bool]:
        """Return the layouts of an op that mixes samples, or that no rule covers."""
        node = op.node
        layouts = [self._layout_by_size(t, BatchKind.SUMMED) for t in op.outs]
        is_sum = [layout.kind is BatchKind.SUMMED for layout in layouts]
        if node in self.per_sample and not any(is_sum):
            return layouts, is_exact
        if mixes_samples and node.op not in _DECISIONS:
            return self._mixing_layouts(op, is_exact)
        if mixes_samples or all(value.kind in DATA_INDEPENDENT for value in op.values):
            if mixes_samples:
                self.unknown[node] = None
            return [BatchLayout() for _ in op.outs], is_exact
        has_lists = any(t.dtype.name == "variant" for t in op.outs)
        if any(is_sum) and not has_lists and node not in self.analysis.backward:
            return self._mixing_layouts(op, is_exact)
        self.unknown[node] = None
        if has_lists or node.op in LOOPS:
            sums = BatchLayout(BatchKind.SUMMED, adds_samples=True)
            layouts = [sums if adds else layout for adds, layout in zip(is_sum, layouts, strict=True)]
        return layouts, is_exact

    def _mixing_layouts(self, op: BatchOp, is_exact: bool) -> tuple[list[BatchLayout], bool]:
        """Note an op that mixes samples, if it is the first one on its path."""
        if is_exact:
            self.cross_sample[op.node] = None
        return [self._layout_by_size(t, BatchKind.SUMMED) for t in op.outs], False

    def _check_sizes(self, layout: BatchLayout, tensor: Tensor) -> None:
        """Check a layout by rule against the sizes in both traces.

        Raises:
            CrossSampleError: If they contradict each other.
        """
        if tensor.shape is None:
            return
        grown, unknown = self.sizes.batch_dims(tensor)
        if layout.kind is BatchKind.SUMMED and grown:
            raise CrossSampleError
        if layout.kind is BatchKind.PER_SAMPLE and layout.axis is not None and not layout.is_ragged:
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

    def _exponent(self, op: BatchOp, is_exact: bool) -> tuple[Fraction | None, Node | None, bool]:
        """Return the exponent, or the op after which it is unknown, and whether that op added sums to means."""
        node = op.node
        invariants = [p for p in op.of_kind(BatchKind.INVARIANT) if not op.values[p].is_zero]
        sums = {op.values[p].exponent for p in op.of_kind(BatchKind.SUMMED) if not op.values[p].is_zero}
        if node.op in ops_with(Trait.ADDITIVE) and sums == {1} and not op.of_kind(BatchKind.PER_SAMPLE):
            if any(op.values[p].exponent == 0 for p in invariants):
                self.adds_invariant[node] = None
                return Fraction(1), None, False
        try:
            exponent = self._gradient_exponent(op) if node in self.unknown else scaling_exponent(op)
        except MixedScalingError:
            self.mixed[node] = None
            return None, node, True
        except NonlinearError:
            if any(v.kind not in DATA_INDEPENDENT for v in op.values) and is_exact and node not in self.cross_sample:
                self.nonlinear[node] = None
            return None, node, False
        if exponent is not None:
            return exponent, None, False
        before = next((v for v in op.values if v.exponent is None and v.unknown_since is not None), None)
        return None, node if before is None else before.unknown_since, before is not None and before.is_mixed

    def _gradient_exponent(self, op: BatchOp) -> Fraction | None:
        """Return the exponent of an op without a rule, which is taken to be linear in gradients if autodiff made it."""
        operands = zip(op.values, op.node.inputs, strict=True)
        exponents = {v.exponent for v, t in operands if is_inexact(t.dtype) or v.exponent} - {Fraction(0)}
        if not exponents:
            return Fraction(0)
        return exponents.pop() if len(exponents) == 1 and is_seed(op.node) else None


def draws(node: Node) -> bool:
    """Return whether an op draws random numbers, different ones for each sample."""
    return is_random(node) and node.op != "RandomShuffle"
