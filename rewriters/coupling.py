"""Whether micro-batches can be put together again: what joins samples of a batch, and how losses are added up.

A step in micro-batches is the same step if every sample goes its own way until losses are added up. BatchNormalization
is the usual exception; a loss that is divided by a sum of weights or masks is another one. A value without a batch
axis that is made of some with one is a sum over samples: it may be added to others, and scaled by what does not depend
on the batch. Whatever else is done with it, or that it meets single samples again, joins them.

Whether sums are means tells the step itself: it is traced for the batch and for a part of it, and what a mean divides
by is larger there by as much. What tensors are is found out in `samples.py`; here it is asked of all that leaves a
micro-batch: gradients, what the update reads besides, results, and what is written to variables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from rewriters import sample_moves
from rewriters.analysis import Analysis
from rewriters.errors import PipelineError
from rewriters.graph import BRANCHES, LOOPS, Node, Tensor, ancestors, operands, predecessors
from rewriters.micro import Parts
from rewriters.positions import Borders, Use, counts_on, without_data
from rewriters.resources import handles, writes
from rewriters.roles import is_random, is_seed, reads_shape_only
from rewriters.rules.elementwise import ELEMENTWISE
from rewriters.sample_powers import counted, power, power_of, vanishes
from rewriters.sample_rules import SHAPE_OPERANDS, made
from rewriters.samples import (
    WITHOUT_DATA,
    Axis,
    JoinsError,
    Kind,
    Made,
    MixedError,
    NoPowerError,
    NotKnownError,
    NotLinearError,
    Op,
    Sizes,
    Value,
)
from rewriters.values import is_rounded

__all__: list[str] = []

_ = sample_moves  # Importing it fills the table.

_ADDS = ("Add", "AddN", "AddV2", "Sub")
_DECISIONS = ("All", "Any")
"""Checks of a batch, mostly, such as whether all labels are 0 or 1: that is said, and not refused."""

_BODIES = frozenset(("body", "then_branch", "branches", "token"))
"""Attributes that name what an operation runs: of a loop, of branches, and of Python code."""

_EITHER = Fraction(0), Fraction(-1)
"""Powers of a sum and of a mean."""


@dataclasses.dataclass(frozen=True)
class Samples:
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
        places: What is as long as the batch and not made of its data, and is not the same for each sample.
        sums: Sums over samples.
        zero: Gradients that are all zero.
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
    places: set[Tensor]
    sums: set[Tensor]
    zero: set[Tensor]


def samples(analysis: Analysis, parts: Parts, sizes: Sizes, metrics: Container[str] = ()) -> Samples:
    """Find out how samples come together.

    Args:
        analysis: Of the step as traced for one micro-batch.
        parts: Its parts.
        sizes: What is known of sizes.
        metrics: Names of operations that belong to metrics.
    """
    values = _Values(analysis, parts, sizes)
    return _Leaving(analysis, parts, sizes, metrics, values).run()


class _Values:
    """Goes through a step and finds out what each tensor is."""

    def __init__(self, analysis: Analysis, parts: Parts, sizes: Sizes) -> None:
        self.analysis = analysis
        self.parts = parts
        self.sizes = sizes
        self.of: dict[Tensor, Value] = {}
        self.joined: dict[Node, None] = {}
        self.unlike: dict[Node, None] = {}
        self.mixed: dict[Node, None] = {}
        self.scaled: dict[Node, None] = {}
        self.unknown: dict[Node, None] = {}
        self.odd: dict[Node, Tensor] = {}
        without = without_data(analysis, parts, set(parts.sources))
        self.borders = Borders(analysis, parts, without, sizes.growth, lambda t: self.of[t].kind is not Kind.PLACES)
        self._chained = set(parts.chained)
        self._batched = {t for t in analysis.graph.inputs if t.node in parts.sources}
        for node in analysis.order:
            if node not in parts.update:
                for index, value in enumerate(self._made(node)):
                    self.of[node.out(index)] = value

    def _made(self, node: Node) -> list[Value]:
        outs = [node.out(index) for index in range(len(node.outputs))]
        if not node.inputs:
            rows = Made(Kind.ROWS, Axis(0, 1, 1))
            return [Value(rows) if t in self._batched else self._given(t) for t in outs]
        if any(h in self._chained for h in handles(node)):
            return [Value(state=node) for _ in outs]
        if _draws(node):
            return [Value(self._drawn(node, t)) for t in outs]
        sizes = SHAPE_OPERANDS.get(node.op, ())
        values = [Value() if p in sizes else self._read(node, t) for p, t in enumerate(node.inputs)]
        return self._computed(Op(self.analysis, self.sizes, node, values))

    def _computed(self, op: Op) -> list[Value]:
        known = self._all_known(op)
        if all(known) and not reads_shape_only(op.node) and not any(map(self.sizes.axis, op.outs)):
            return [value for value in known if value is not None]
        found, exact = self._samples(op, all(v.exact for v in op.values))
        zero = vanishes(op)
        own, lost, mixed = (Fraction(0), None, False) if zero else self._power(op, exact)
        state = next((v.state for v in op.values if v.state is not None), None)
        made_of: list[Value] = []
        for tensor, what, told in zip(op.outs, found, known, strict=True):
            if told is not None and what.kind in WITHOUT_DATA:
                made_of.append(dataclasses.replace(told, made=what, exact=exact))
                continue
            total = own if own is None or not what.added else own + 1
            made_of.append(Value(what, total, exact, state, lost, mixed, zero=zero and is_rounded(tensor.dtype)))
        if any(value.kind is not Kind.PLACES for value in made_of):
            self._mark_odd(op)
        chosen = self._chosen_by(op)
        if chosen is not None:
            self.odd.setdefault(op.node, chosen)
        return made_of

    def _all_known(self, op: Op) -> list[Value | None]:
        """What is known of the numbers of each result, if it is made of sizes and constants."""
        if reads_shape_only(op.node) and op.node.op != "Rank":
            return [self._known(t) or Value(power=None, lost=op.node) for t in op.outs]
        if op.node.stateful or any(value.kind not in WITHOUT_DATA for value in op.values):
            return [None] * len(op.outs)
        first = next((v.lost for v in op.values if v.odd), None)
        known = map(self._known, op.outs)
        return [dataclasses.replace(v, lost=first) if first and v and v.odd else v for v in known]

    def _given(self, tensor: Tensor) -> Value:
        """Of a constant, or an argument that is no batch."""
        if tensor.node.op != "Const":
            return Value()
        value, axis = self._known(tensor) or Value(power=None, lost=tensor.node), self.sizes.axis(tensor)
        if axis is None:
            return value
        here, _ = self.sizes.values(tensor)
        uniform = here is not None and bool((here == here.flat[:1]).all())
        return dataclasses.replace(value, made=Made(Kind.ALIKE if uniform else Kind.PLACES, axis))

    def _known(self, tensor: Tensor) -> Value | None:
        """What is the same for all, if it is known for a micro-batch and for the batch."""
        try:
            own = power_of(*self.sizes.values(tensor), self.sizes.parts)
        except NoPowerError:
            return Value(power=None, lost=tensor.node, odd=True)
        return None if own is None else Value(power=own, zero=not np.any(self.sizes.values(tensor)[0]))

    def _read(self, node: Node, tensor: Tensor) -> Value:
        """An operand; of what is not of data and is not the same for each sample, the part of a micro-batch."""
        value = self.of[tensor]
        if value.kind is not Kind.PLACES or not self.borders.cross(node):
            return value
        try:
            use = self.borders.use(tensor)
        except PipelineError:  # Raised again when it is to be cut, if nothing that tells more is found before.
            return Value(dataclasses.replace(value.made, kind=Kind.ALIKE))
        if use is Use.PLACE and counts_on(*self.sizes.values(tensor), self.sizes.parts):
            return Value(dataclasses.replace(value.made, kind=Kind.ALIKE))
        if use is Use.CUT:
            growth = self.sizes.growth(tensor)
            rows = growth.rows if growth is not None else 0
            return Value(Made(Kind.ROWS, Axis(0, 1, rows) if rows else Axis(0)), cut=True)
        return value

    def _drawn(self, node: Node, tensor: Tensor) -> Made:
        """Noise: of a fixed seed it is not of data, else each micro-batch draws its own."""
        if node not in self.borders.forward:
            return self._by_size(tensor, Kind.EVEN)
        axis = self.sizes.axis(tensor)
        return Made(Kind.PLACES, axis) if axis else Made()

    def _mark_odd(self, op: Op) -> None:
        """Note who computes with a number that is known to be larger for the batch by what is no power."""
        for value, tensor in zip(op.values, op.node.inputs, strict=True):
            if value.odd and value.lost and (is_rounded(tensor.dtype) or op.node.op in ELEMENTWISE):
                self.odd.setdefault(op.node, value.lost.out())

    def _chosen_by(self, op: Op) -> Tensor | None:
        """What goes with the size of the batch and decides, as no power can tell, which numbers the results are.

        The condition of a branch, the turns of a loop, the place of an entry; and not how long a result is.
        """
        numbers = any(is_rounded(t.dtype) or t.dtype.name in ("bool", "string") for t in op.outs)
        if not (numbers or op.node.attrs.keys() & _BODIES) or op.node.op in ELEMENTWISE or reads_shape_only(op.node):
            return None
        lists = op.node.op not in BRANCHES and any(t.dtype.name == "variant" for t in op.outs)
        if lists or any(map(self.sizes.axis, op.outs)):
            return None
        judged = counted(op)
        for position, tensor in enumerate(op.node.inputs):
            value = self.of[tensor]
            if position not in judged and not is_rounded(tensor.dtype) and value.kind in WITHOUT_DATA:
                if value.odd or value.power:
                    return tensor if value.lost is None else value.lost.out()
        return None

    # Samples ----------------------------------------------------------------------------------------------------

    def _samples(self, op: Op, exact: bool) -> tuple[list[Made], bool]:
        """What an operation makes, and whether that is exact if its operands are."""
        node = op.node
        try:
            found = made(op)
            for what, tensor in zip(found, op.outs, strict=True):
                self._check(what, tensor)
        except JoinsError:
            if node.op in _DECISIONS:
                self.unknown[node] = None
                return [Made() for _ in op.outs], exact
            if exact:
                self.joined[node] = None
            return [self._by_size(t, Kind.SUM) for t in op.outs], False
        except NotKnownError:
            if all(value.kind in WITHOUT_DATA for value in op.values):
                return [Made() for _ in op.outs], exact
            found = [self._by_size(t, Kind.SUM) for t in op.outs]
            lists = any(t.dtype.name == "variant" for t in op.outs)
            if any(what.kind is Kind.SUM and not lists and node not in self.analysis.backward for what in found):
                if exact:
                    self.joined[node] = None
                return found, False
            self.unknown[node] = None
            if lists or node.op in LOOPS:
                found = [w if w.kind is Kind.ROWS else Made(Kind.SUM, added=w.kind is Kind.SUM) for w in found]
        return found, exact

    def _check(self, what: Made, tensor: Tensor) -> None:
        """Hold what a rule says against the sizes of the two traces."""
        if tensor.shape is None:
            return
        certain, maybe = self.sizes.dims(tensor)
        if what.kind is Kind.SUM and certain:
            raise JoinsError
        if what.kind is Kind.ROWS and what.axis is not None and not what.ragged:
            if not certain <= {what.axis.dim} or what.axis.dim not in certain | maybe:
                raise JoinsError

    def _by_size(self, tensor: Tensor, other: Kind) -> Made:
        """By the size alone: with rows for samples, or not; one of unknown rank is taken to have them."""
        if tensor.shape is None:
            return Made(Kind.ROWS, Axis(0))
        certain, maybe = self.sizes.dims(tensor)
        dims = certain or maybe
        return Made(Kind.ROWS, Axis(min(dims))) if dims else Made(other)

    # Powers -----------------------------------------------------------------------------------------------------

    def _power(self, op: Op, exact: bool) -> tuple[Fraction | None, Node | None, bool]:
        """The power, or the operation after which it is not known, and whether that added sums to means."""
        node = op.node
        sums = {op.values[p].power for p in op.of(Kind.SUM) if not op.values[p].zero}
        if node.op in _ADDS and len(sums) == 1 and op.of(Kind.EVEN) and not op.of(Kind.ROWS):
            (own,) = sums
            if own == 1 and any(op.values[p].power == 0 and not op.values[p].zero for p in op.of(Kind.EVEN)):
                self.unlike[node] = None
                return own, None, False
        try:
            found = self._of_loop(op) if node in self.unknown else power(op)
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
        powers = {v.power for v, t in zip(op.values, op.node.inputs, strict=True) if is_rounded(t.dtype) or v.power}
        powers.discard(Fraction(0))
        if not powers:
            return Fraction(0)
        return powers.pop() if len(powers) == 1 and is_seed(op.node) else None


class _Leaving:
    """Asks of all that leaves a micro-batch whether it can be put together."""

    def __init__(
        self, analysis: Analysis, parts: Parts, sizes: Sizes, metrics: Container[str], values: _Values
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

    def run(self) -> Samples:
        read = [t for node in self.analysis.order if node in self.parts.update for t in node.inputs]
        read = [t for t in dict.fromkeys((*self.parts.gradients, *read)) if t.node in self.parts.repeated]
        added, of_metrics = self._written()
        needed = self._ancestors([*read, *added])
        results = self._ancestors(self.analysis.graph.outputs) | needed
        joined = [n for n in self.values.joined if n in results]
        forward = [n for n in joined if n not in self.analysis.backward]
        left = [t for t in read if not self._is_total(t)]
        states = dict.fromkeys(s for t in (*left, *added) if (s := self.of[t].state) is not None)
        for node in states:
            self.written.update((h, node) for h in handles(node) if h not in self.written)
        self.written.update((h, node) for h, node in self._half_written() if h not in self.written)
        for handle, node in self._entangled():
            if node.name in self.metrics:
                self.in_metrics[handle] = None
            else:
                self.written.setdefault(handle, node)
        again = {h for node in self.parts.update if writes(node) for h in handles(node)}
        alone = self._ancestors(of_metrics) - results
        notes = [n for n in self.values.joined if n in alone]
        reads = {t: self.of[t] for t in read if t.node in self.parts.direct and is_rounded(t.dtype)}
        reads = {t: value for t, value in reads.items() if not value.zero}
        unknown = [n for n in self.values.unknown if n in results]
        unknown += [v.lost for v in reads.values() if v.power is None and v.lost is not None and not v.mixed]
        return Samples(
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
            places={t for t, v in self.of.items() if v.kind is Kind.PLACES},
            sums={t for t, v in self.of.items() if v.kind is Kind.SUM},
            zero={t for t, v in self.of.items() if self._is_no_gradient(t, v)},
        )

    def _is_either(self, tensor: Tensor, value: Value) -> bool:
        """Whether it is known to be a sum or a mean; of gradients that are all zero it does not matter."""
        either = tensor.node in self.parts.direct and value.to_sum in _EITHER
        return either and not self._is_no_gradient(tensor, value)

    def _is_no_gradient(self, tensor: Tensor, value: Value) -> bool:
        return value.zero and tensor.node in self.analysis.backward

    def _ancestors(self, tensors: Iterable[Tensor], through_draws: bool = True) -> set[Node]:
        """Operations that values depend on, sizes left out; not `through_draws`, also what random numbers come from."""

        def waits_for(node: Node) -> Iterable[Node]:
            if not through_draws and _draws(node):
                return []
            left_out = SHAPE_OPERANDS.get(node.op, ())
            return [before for p, before in enumerate(operands(node)) if p not in left_out]

        return ancestors((t.node for t in tensors), waits_for)

    # Variables ------------------------------------------------------------------------------------------------

    def _written(self) -> tuple[list[Tensor], list[Tensor]]:
        """What is added to variables, and the same for those of metrics; the latter with all that they write."""
        added: list[Tensor] = []
        of_metrics: list[Tensor] = []
        for node, handle in self._writes():
            metric = node.name in self.metrics
            if not metric and node not in self.parts.direct:
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
        read, writing = handles(tensor.node), self._writing()
        if not read or tensor.node in self.parts.direct:
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
            if result.node not in self.parts.repeated:
                continue
            for node in self.analysis.sorted(self._ancestors([result], through_draws=False)):
                for handle in handles(node) if node.outputs else ():
                    writing = written.get(handle, [])
                    if writing and (result.node in self.parts.direct or not self._runs_after(node, writing)):
                        yield handle, node

    def _entangled(self) -> Iterator[tuple[Tensor, Node]]:
        """Variables that are written twice, or by what another one has become meanwhile, with who writes them.

        What each write does may add up, as that of a sum after that of zero does not: after it micro-batches have
        another value to go on from than the batch. Several sums that are added are one.
        """
        written = self._writing()
        counted = {*self.parts.direct, *(node for node in self.parts.repeated if node.name in self.metrics)}
        of_data = {handle for handle, nodes in written.items() if not counted.isdisjoint(nodes)}  # Others are seeds.
        for handle, nodes in written.items():
            if handle in of_data and len(nodes) > 1 and not all(self._adds_samples(node, handle) for node in nodes):
                yield handle, nodes[-1]
            for node in nodes:
                found = self._added(node, handle)
                before = self._ancestors([found[1]] if found is not None else node.inputs[1:], through_draws=False)
                if any(other in of_data and other != handle for n in before for other in handles(n)):
                    yield handle, node

    def _adds_samples(self, node: Node, handle: Tensor) -> bool:
        """Whether a write adds something that is made of samples, so that micro-batches add their parts of it."""
        found = self._added(node, handle)
        return found is not None and self.of[found[1]].kind is Kind.SUM and self._adds_up(node, *found)

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
            if node in self.parts.repeated and writes(node):
                for handle in handles(node):
                    if handle in self.parts.chained:
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
        rows = node.op.startswith("ResourceScatter") and value.kind is Kind.ROWS
        if value.state is not None or value.power is None or (value.kind is Kind.ROWS and not rows):
            return False
        factor = value.power if rows else value.power - 1
        if factor:
            if not is_rounded(tensor.dtype):
                return False
            self.factors[place] = float(self.sizes.parts) ** float(factor)
        return value.exact


def _draws(node: Node) -> bool:
    """Whether an operation makes random numbers: each sample has its own."""
    return is_random(node) and node.op != "RandomShuffle"


def unfit(powers: dict[Tensor, Any]) -> list[Tensor]:
    """Of what leaves micro-batches, what is neither a sum nor a mean for sure."""
    return [tensor for tensor, own in powers.items() if own is not None and own not in _EITHER]
