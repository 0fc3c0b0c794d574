"""What each tensor of a step is with regard to the samples of a batch: the graph is gone through once, in order."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import numpy as np

from rewriters.analysis.autodiff_roles import is_random, is_seed, reads_shape_only
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.batch_semantics import movement_rules
from rewriters.batch_semantics.axis_rules import LENGTHS, SHAPE_OPERANDS, batch_kind_of
from rewriters.batch_semantics.batch_sized_values import BatchSizedValues, is_offset_by_micro_batch
from rewriters.batch_semantics.domain import (
    WITHOUT_DATA,
    AbstractValue,
    Axis,
    BatchKind,
    CrossSampleError,
    Made,
    MixedError,
    NoPowerError,
    NotKnownError,
    NotLinearError,
    Op,
    Sizes,
)
from rewriters.batch_semantics.scaling_rules import counted, is_structurally_zero, power_of, scaling_exponent
from rewriters.errors import PipelineError
from rewriters.ir.graph import BRANCHES, LOOPS, Node, Tensor
from rewriters.ir.static_values import is_inexact
from rewriters.ir.variables import variable_handles
from rewriters.pipelining.step_partition import MicroBatchUse, StepPartition
from rewriters.rules.elementwise import ELEMENTWISE

__all__: list[str] = []

_ = movement_rules  # Importing it fills the table.

_ADDS = ("Add", "AddN", "AddV2", "Sub")
_DECISIONS = ("All", "Any")
"""Checks of a batch, mostly, such as whether all labels are 0 or 1: that is said, and not refused."""


class BatchInterpreter:
    """Goes through a step and finds out what each tensor is."""

    def __init__(self, analysis: GraphAnalysis, parts: StepPartition, sizes: Sizes) -> None:
        self.analysis = analysis
        self.parts = parts
        self.sizes = sizes
        self.of: dict[Tensor, AbstractValue] = {}
        self.joined: dict[Node, None] = {}
        self.unlike: dict[Node, None] = {}
        self.mixed: dict[Node, None] = {}
        self.scaled: dict[Node, None] = {}
        self.unknown: dict[Node, None] = {}
        self.odd: dict[Node, Tensor] = {}
        self.batch_sized = BatchSizedValues(
            analysis, parts, sizes.growth, lambda t: self.of[t].kind is not BatchKind.PLACES
        )
        self._chained = set(parts.carried_variables)
        self._batched = {t for t in analysis.graph.inputs if t.node in parts.sources}
        for node in analysis.order:
            if node not in parts.update:
                for index, value in enumerate(self._made(node)):
                    self.of[node.out(index)] = value

    def _made(self, node: Node) -> list[AbstractValue]:
        outs = [node.out(index) for index in range(len(node.outputs))]
        if not node.inputs:
            rows = Made(BatchKind.ROWS, Axis(0, 1, 1))
            return [AbstractValue(rows) if t in self._batched else self._given(t) for t in outs]
        if any(h in self._chained for h in variable_handles(node)):
            return [AbstractValue(state=node) for _ in outs]
        if draws(node):
            return [AbstractValue(self._drawn(node, t)) for t in outs]
        sizes = SHAPE_OPERANDS.get(node.op, ())
        values = [AbstractValue() if p in sizes else self._read(node, t) for p, t in enumerate(node.inputs)]
        return self._computed(Op(self.analysis, self.sizes, node, values))

    def _computed(self, op: Op) -> list[AbstractValue]:
        known = self._all_known(op)
        if all(known) and not reads_shape_only(op.node) and not any(map(self.sizes.axis, op.outs)):
            return [value for value in known if value is not None]
        found, exact = self._samples(op, all(v.exact for v in op.values))
        zero = is_structurally_zero(op)
        own, lost, mixed = (Fraction(0), None, False) if zero else self._power(op, exact)
        state = next((v.state for v in op.values if v.state is not None), None)
        chosen = self._chosen_by(op)
        odd = self._odd(op, own, chosen)
        lost = lost or odd
        made_of: list[AbstractValue] = []
        for tensor, what, told in zip(op.outs, found, known, strict=True):
            if told is not None and what.kind in WITHOUT_DATA:
                made_of.append(dataclasses.replace(told, made=what, exact=exact))
                continue
            total = own if own is None or not what.added else own + 1
            made_of.append(
                AbstractValue(
                    what,
                    total,
                    exact,
                    state,
                    lost,
                    mixed,
                    odd=odd is not None and what.kind in WITHOUT_DATA,
                    zero=zero and is_inexact(tensor.dtype),
                )
            )
        if any(value.kind is not BatchKind.PLACES for value in made_of):
            self._mark_odd(op)
        pairs = zip(made_of, op.outs, strict=True)  # Whole numbers may be sizes and places, and are judged where read.
        if chosen is not None and not all(value.odd and t.dtype.is_integer for value, t in pairs):
            self.odd.setdefault(op.node, chosen)
        return made_of

    def _odd(self, op: Op, power: Fraction | None, chosen: Tensor | None) -> Node | None:
        """After which operation it is not known by which power what is not of data goes with the size of the batch."""
        if any(value.kind not in WITHOUT_DATA for value in op.values):
            return None
        before = next((value.lost or op.node for value in op.values if value.odd), None)
        here = chosen is not None or (power is None and all(value.power is not None for value in op.values))
        return before or (op.node if here else None)

    def _all_known(self, op: Op) -> list[AbstractValue | None]:
        """What is known of the numbers of each result, if it is made of sizes and constants."""
        if reads_shape_only(op.node) and op.node.op != "Rank":
            return [self._known(t) or AbstractValue(power=None, lost=op.node) for t in op.outs]
        if op.node.stateful or any(value.kind not in WITHOUT_DATA for value in op.values):
            return [None] * len(op.outs)
        first = next((v.lost for v in op.values if v.odd), None)
        known = [self._known(tensor) for tensor in op.outs]
        if any(v.odd and self._is_number(op, t) for v, t in zip(op.values, op.node.inputs, strict=True)):
            # What looks like a power is one by chance.
            known = [dataclasses.replace(v, power=None, odd=True) if v and v.power else v for v in known]
        return [dataclasses.replace(v, lost=first) if first and v and v.odd else v for v in known]

    def _is_number(self, op: Op, tensor: Tensor) -> bool:
        """Whether an operand is taken as a number, or as something that is so or not; others are parts of shapes."""
        single = np.size(self.sizes.values(tensor)[0]) == 1
        return tensor.dtype.name == "bool" or (is_inexact(tensor.dtype) and (single or op.node.op in ELEMENTWISE))

    def _given(self, tensor: Tensor) -> AbstractValue:
        """Of a constant, or an argument that is no batch."""
        if tensor.node.op != "Const":
            return AbstractValue()
        value, axis = self._known(tensor) or AbstractValue(power=None, lost=tensor.node), self.sizes.axis(tensor)
        if axis is None:
            return value
        here, _ = self.sizes.values(tensor)
        uniform = here is not None and bool((here == here.flat[:1]).all())
        return dataclasses.replace(value, made=Made(BatchKind.ALIKE if uniform else BatchKind.PLACES, axis))

    def _known(self, tensor: Tensor) -> AbstractValue | None:
        """What is the same for all, if it is known for a micro-batch and for the batch."""
        try:
            own = power_of(*self.sizes.values(tensor), self.sizes.parts)
        except NoPowerError:
            return AbstractValue(power=None, lost=tensor.node, odd=True)
        return None if own is None else AbstractValue(power=own, zero=not np.any(self.sizes.values(tensor)[0]))

    def _read(self, node: Node, tensor: Tensor) -> AbstractValue:
        """An operand; of what is not of data and is not the same for each sample, the part of a micro-batch."""
        value = self.of[tensor]
        if value.kind is not BatchKind.PLACES or node in self.batch_sized.forward or reads_shape_only(node):
            return value
        try:
            use = self.batch_sized.use(tensor)
        except PipelineError:  # Raised again when it is to be cut, if nothing that tells more is found before.
            return AbstractValue(dataclasses.replace(value.made, kind=BatchKind.ALIKE))
        if use is MicroBatchUse.INDEX and is_offset_by_micro_batch(*self.sizes.values(tensor), self.sizes.parts):
            return AbstractValue(dataclasses.replace(value.made, kind=BatchKind.ALIKE))
        if use is MicroBatchUse.SLICE:
            growth = self.sizes.growth(tensor)
            rows = growth.rows if growth is not None else 0
            return AbstractValue(Made(BatchKind.ROWS, Axis(0, 1, rows) if rows else Axis(0)), cut=True)
        return value

    def _drawn(self, node: Node, tensor: Tensor) -> Made:
        """Noise: of a fixed seed it is not of data, else each micro-batch draws its own."""
        if node not in self.batch_sized.forward:
            return self._by_size(tensor, BatchKind.EVEN)
        axis = self.sizes.axis(tensor)
        return Made(BatchKind.PLACES, axis) if axis else Made()

    def _mark_odd(self, op: Op) -> None:
        """Note who computes with a number that is known to be larger for the batch by what is no power."""
        for value, tensor in zip(op.values, op.node.inputs, strict=True):
            if value.odd and value.lost and (is_inexact(tensor.dtype) or op.node.op in ELEMENTWISE):
                self.odd.setdefault(op.node, value.lost.out())

    def _chosen_by(self, op: Op) -> Tensor | None:
        """What goes with the size of the batch and decides, as no power can tell, which numbers the results are.

        The condition of a branch, the turns of a loop, the place of an entry; and not how long a result is.
        """
        node, inputs = op.node, op.node.inputs
        if node.op in ELEMENTWISE or reads_shape_only(node) or not op.outs:
            return None
        if node.op not in BRANCHES and any(t.dtype.name == "variant" for t in op.outs):
            return None
        told = set(counted(op)).union(LENGTHS.get(node.op, ()) if any(map(self.sizes.axis, op.outs)) else ())
        if node.op in BRANCHES and any(value.kind not in WITHOUT_DATA for value in op.values):
            told.update(range(1, len(inputs)))  # What a branch does with samples is not known, which is said.
        sizes = SHAPE_OPERANDS.get(node.op, ())
        for position, tensor in enumerate(inputs):
            value = self.of[tensor]
            if position in sizes:
                decides = node.op in ("Slice", "StridedSlice") and self._is_elsewhere(op, position)
            else:
                own = value.goes_with_size or (value.kind is BatchKind.ROWS and bool(value.power))
                decides = own and position not in told and not is_inexact(tensor.dtype)
            if decides:
                return tensor if value.lost is None else value.lost.out()
        return None

    def _is_elsewhere(self, op: Op, position: int) -> bool:
        """Whether a slice begins or ends elsewhere in the step for the batch, in another dimension than that of it."""
        tensor = op.node.inputs[position]
        here, whole = self.sizes.values(tensor)
        axes = [axis for axis in (op.axis(0), self.sizes.axis(op.node.inputs[0]), self.sizes.axis(op.outs[0])) if axis]
        if any(op.node.attrs[mask].i for mask in ("ellipsis_mask", "new_axis_mask") if mask in op.node.attrs):
            return not axes and self.of[tensor].goes_with_size
        if not isinstance(here, np.ndarray) or not isinstance(whole, np.ndarray) or here.shape != whole.shape:
            return self.of[tensor].odd
        return not set(np.flatnonzero(here != whole)) <= {axis.dim for axis in axes}

    # Samples ----------------------------------------------------------------------------------------------------

    def _samples(self, op: Op, exact: bool) -> tuple[list[Made], bool]:
        """What an operation makes, and whether that is exact if its operands are."""
        node = op.node
        try:
            found = batch_kind_of(op)
            for what, tensor in zip(found, op.outs, strict=True):
                self._check(what, tensor)
        except CrossSampleError:
            if node.op in _DECISIONS:
                self.unknown[node] = None
                return [Made() for _ in op.outs], exact
            if exact:
                self.joined[node] = None
            return [self._by_size(t, BatchKind.SUM) for t in op.outs], False
        except NotKnownError:
            if all(value.kind in WITHOUT_DATA for value in op.values):
                return [Made() for _ in op.outs], exact
            found = [self._by_size(t, BatchKind.SUM) for t in op.outs]
            lists = any(t.dtype.name == "variant" for t in op.outs)
            if any(what.kind is BatchKind.SUM and not lists and node not in self.analysis.backward for what in found):
                if exact:
                    self.joined[node] = None
                return found, False
            self.unknown[node] = None
            if lists or node.op in LOOPS:
                found = [
                    w if w.kind is BatchKind.ROWS else Made(BatchKind.SUM, added=w.kind is BatchKind.SUM) for w in found
                ]
        return found, exact

    def _check(self, what: Made, tensor: Tensor) -> None:
        """Hold what a rule says against the sizes of the two traces."""
        if tensor.shape is None:
            return
        certain, maybe = self.sizes.dims(tensor)
        if what.kind is BatchKind.SUM and certain:
            raise CrossSampleError
        if what.kind is BatchKind.ROWS and what.axis is not None and not what.ragged:
            if not certain <= {what.axis.dim} or what.axis.dim not in certain | maybe:
                raise CrossSampleError

    def _by_size(self, tensor: Tensor, other: BatchKind) -> Made:
        """By the size alone: with rows for samples, or not; one of unknown rank is taken to have them."""
        if tensor.shape is None:
            return Made(BatchKind.ROWS, Axis(0))
        certain, maybe = self.sizes.dims(tensor)
        dims = certain or maybe
        return Made(BatchKind.ROWS, Axis(min(dims))) if dims else Made(other)

    # Powers -----------------------------------------------------------------------------------------------------

    def _power(self, op: Op, exact: bool) -> tuple[Fraction | None, Node | None, bool]:
        """The power, or the operation after which it is not known, and whether that added sums to means."""
        node = op.node
        sums = {op.values[p].power for p in op.of(BatchKind.SUM) if not op.values[p].zero}
        if node.op in _ADDS and len(sums) == 1 and op.of(BatchKind.EVEN) and not op.of(BatchKind.ROWS):
            (own,) = sums
            if own == 1 and any(op.values[p].power == 0 and not op.values[p].zero for p in op.of(BatchKind.EVEN)):
                self.unlike[node] = None
                return own, None, False
        try:
            found = self._of_loop(op) if node in self.unknown else scaling_exponent(op)
        except MixedError:
            self.mixed[node] = None
            return None, node, True
        except NotLinearError:
            if any(v.kind not in WITHOUT_DATA for v in op.values) and exact and node not in self.joined:
                self.scaled[node] = None
            return None, node, False
        if found is not None:
            return found, None, False
        before = next((v for v in op.values if v.power is None and v.lost is not None), None)
        return None, node if before is None else before.lost, before is not None and before.mixed

    def _of_loop(self, op: Op) -> Fraction | None:
        """Of an operation without a rule: one that autodiff made is taken to be linear in gradients."""
        powers = {v.power for v, t in zip(op.values, op.node.inputs, strict=True) if is_inexact(t.dtype) or v.power}
        powers.discard(Fraction(0))
        if not powers:
            return Fraction(0)
        return powers.pop() if len(powers) == 1 and is_seed(op.node) else None


def draws(node: Node) -> bool:
    """Whether an operation makes random numbers: each sample has its own."""
    return is_random(node) and node.op != "RandomShuffle"
