"""What a network reads of its image, row by row, and by how much an image may be moved so that its result only moves.

Where nothing is padded, a network run on a part of its image makes a part of its result, so that devices can have parts
of one image each (Seal et al., "Toward Large-Scale Image Segmentation on Summit", ICPP '20, section 4). Two things may
be wrong with a part: it begins where pools and strides would take other rows together, or it has rows that some pool or
stride leaves over, which shifts what skips bring along. Both are found from the rules of operations: which rows of its
operand a row needs (`Rule.demand`) repeats itself every few rows. So every operation is two numbers, `advance` rows of
the operand for `period` rows of the result, and the rows that each row of one period needs.

Axes are independent, as everywhere (`intervals.py`). Along each there is

- the *scale* of a tensor: rows of the image for each of its rows, a fraction;
- the *alignment*: the fewest rows of the image that are whole rows of every tensor. An image moved by them is made the
  same of, only moved; moved by less it is not;
- what an operation leaves over, and with it the sizes of images of which nothing is. Sizes that are a multiple of the
  alignment apart leave over the same.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Container, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from rewriters.analysis.autodiff_roles import reads_shape_only
from rewriters.analysis.graph_analysis import GraphAnalysis, check_forward, forward_kinds
from rewriters.errors import NotTileableError, RewriteError
from rewriters.ir.graph import Node, Tensor
from rewriters.rules.intervals import Interval
from rewriters.rules.registry import TileKind, find_rule

__all__: list[str] = []

LEAST_ROWS = 8
"""Rows of a result, for each that a row of the operand becomes, in which a repetition is seen for certain."""


class PeriodicNeed(NamedTuple):
    """Which rows of an operand a row needs, at any distance from the border.

    Attributes:
        period: Rows of the result after which all is the same again, `advance` rows further.
        advance: Rows of the operand.
        lo: First needed row for each of the rows 0 to `period - 1`.
        hi: One past the last needed row for each of them.
    """

    period: int
    advance: int
    lo: tuple[int, ...]
    hi: tuple[int, ...]

    def needs(self, begin: int, end: int) -> tuple[int, int]:
        """Rows of the operand for rows `begin` to `end` of the result; they may lie outside of it: padding."""
        first = [self._moved(self.lo, row) for row in range(begin, min(end, begin + self.period))]
        last = [self._moved(self.hi, row) for row in range(max(begin, end - self.period), end)]
        return min(first), max(last)

    def _moved(self, rows: Sequence[int], row: int) -> int:
        times, rest = divmod(row, self.period)
        return rows[rest] + times * self.advance


@dataclasses.dataclass(frozen=True)
class AxisReceptiveField:
    """A network along one axis.

    Attributes:
        extent: Rows of the image for which it was traced.
        out_extent: Rows of its result.
        scale: Rows of the image for each row of the result.
        alignment: Rows by which an image may be moved.
        needs: First row of the image that the result needs, and one past the last; the others are cropped.
        admissible: A size of which nothing is left over, at most `extent`; with any number of alignments more, too. If
            something is left over of all sizes, `extent`.
        smallest: The smallest such size; where something is left over it is not known, and `admissible` is given.
        wasteful: The first operation that leaves rows over; empty if none does, or no other size is better.
    """

    extent: int
    out_extent: int
    scale: Fraction
    alignment: int
    needs: tuple[int, int]
    admissible: int
    smallest: int
    wasteful: str


class ReceptiveField:
    """A network between an image and what is made of it.

    Args:
        analysis: Of a graph without gradients.
        source: The image.
        target: What is made of it.

    Raises:
        RewriteError: If an operation between them pads, is no operation on rows, or is seen in too few rows.
    """

    def __init__(self, analysis: GraphAnalysis, source: Tensor, target: Tensor) -> None:
        self._analysis = analysis
        self._source = source
        self._target = target
        for tensor in (source, target):
            if not analysis.has_known_size(tensor):
                raise RewriteError(
                    f"`{tensor.name}` of shape {tensor.shape} is no image whose size is known and whose axes a "
                    "convolution or pool has shown. Begin and end the network at one that is."
                )
        self._nodes = self._between()
        self.axes = [axis for axis, rows in enumerate(self._extents(source)) if rows > 1]
        """Those along which there is more than one row."""
        self.dims = [analysis.layouts.of(source).dims[axis] for axis in self.axes]  # type: ignore[union-attr]
        """Dimensions of the image in which they lie."""
        self._repetitions = {axis: self._found(axis) for axis in self.axes}

    def _extents(self, tensor: Tensor) -> tuple[int, ...]:
        return self._analysis.extents(tensor)  # type: ignore[return-value]

    def _between(self) -> list[Node]:
        """The operations that make the target of the source, in topological order."""
        after: set[Tensor] = {self._source}
        for node in self._analysis.order:
            if after.intersection(node.inputs) and not reads_shape_only(node):
                after.update(node.out(index) for index in range(len(node.outputs)))
        found: set[Node] = set()
        stack = [self._target]
        while stack:
            tensor = stack.pop()
            if tensor in after and tensor != self._source and tensor.node not in found:
                found.add(tensor.node)
                stack.extend(self._images(tensor.node, after))
        if self._target not in after:
            raise RewriteError(f"`{self._target.name}` is not made of `{self._source.name}`.")
        return self._analysis.sorted(found)

    def _images(self, node: Node, after: Container[Tensor]) -> list[Tensor]:
        """The images that an operation reads; everything else that it reads has to be the same for all of them."""
        data = self._data(node)
        others = {*range(len(node.inputs))}.difference(data, find_rule(node).shape_operands(self._analysis.view(node)))
        for position in sorted(others):
            if node.inputs[position] in after:
                raise self._not_of_rows(node, f"it reads `{node.inputs[position].name}`, which all rows have a part in")
        return [node.inputs[position] for position in data]

    def _data(self, node: Node) -> list[int]:
        """Positions of the images that an operation reads."""
        try:
            check_forward(self._analysis, node)
            kinds = forward_kinds(self._analysis, node)
        except NotTileableError as error:
            raise self._not_of_rows(node, str(error)) from error
        return [position for position, kind in enumerate(kinds) if kind is TileKind.FULL]

    def _not_of_rows(self, node: Node, why: str) -> RewriteError:
        return RewriteError(
            f"`{node.name}` ({node.op}) does not make rows of rows: {why}. Parts of an image are not enough for it: "
            "ask for the network up to it."
        )

    def _found(self, axis: int) -> Mapping[tuple[Node, int], PeriodicNeed]:
        result = {}
        for node in self._nodes:
            rows = np.arange(self._extents(node.out())[axis], dtype=np.int64)
            plan = find_rule(node).operand_rows_for_result(self._analysis.view(node), axis, Interval(rows, rows + 1))
            for position in self._data(node):
                need = plan.needs[position]
                extent = self._extents(node.inputs[position])[axis]
                if need is not None and (extent > 1 or len(rows) == 1):
                    found = repetition(need, extent)
                    if found is None:
                        raise RewriteError(
                            f"`{node.name}` ({node.op}) makes {len(rows)} rows of {extent}, too few to see what "
                            "becomes of which row away from the border. Trace the network for a larger image."
                        )
                    result[node, position] = found
        return result

    def needs(self, axis: int, begin: int, end: int) -> tuple[int, int]:
        """Rows of the image for rows `begin` to `end` of the result, which may lie beyond those it was traced for."""
        wanted = {self._target: (begin, end)}
        for node in reversed(self._nodes):
            self._want(node, axis, wanted)
        return wanted[self._source]

    def _want(self, node: Node, axis: int, wanted: dict[Tensor, tuple[int, int]]) -> None:
        """Add what an operation needs of its operands."""
        outs = [wanted[t] for t in map(node.out, range(len(node.outputs))) if t in wanted]
        if not outs:
            return
        begin, end = min(lo for lo, _ in outs), max(hi for _, hi in outs)
        for position, tensor in enumerate(node.inputs):
            found = self._repetitions[axis].get((node, position))
            if found is not None:
                lo, hi = found.needs(begin, end)
                old = wanted.get(tensor, (lo, hi))
                wanted[tensor] = (min(lo, old[0]), max(hi, old[1]))

    def _refuse_padding(self, axis: int) -> None:
        """Refuse rows that lie outside of the tensors they are of, for the whole result."""
        wanted = {self._target: (0, self._extents(self._target)[axis])}
        for node in reversed(self._nodes):
            self._want(node, axis, wanted)
            for tensor in (node.inputs[position] for position in self._data(node)):
                lo, hi = wanted.get(tensor, (0, 0))
                if lo < 0 or hi > self._extents(tensor)[axis]:
                    raise RewriteError(
                        f"`{node.name}` ({node.op}) pads its image, and a part of it where the image goes on. Networks "
                        "without padding (padding='valid') can be run on parts; `SFTParams` tiles others."
                    )

    @functools.cached_property
    def views(self) -> tuple[AxisReceptiveField, ...]:
        """Along each of `axes`.

        Raises:
            RewriteError: If something is padded, or branches of different resolution meet.
        """
        return tuple(self._view(axis) for axis in self.axes)

    def _view(self, axis: int) -> AxisReceptiveField:
        self._refuse_padding(axis)
        walked = _Walk(self._analysis, self._source, axis)
        for node in self._nodes:
            walked.through(node, self._repetitions[axis])
        extent, scale = self._extents(self._source)[axis], walked.scales[self._target]
        alignment = math.lcm(*(own.numerator for own in walked.scales.values()))
        admissible, wasteful = walked.admissible(extent, alignment), walked.wasteful
        if admissible is None:  # Sizes an alignment apart leave the same over, so these go together all the same.
            admissible, wasteful = extent, ""

        def less(tensor: Tensor) -> int:
            """By how many alignments the image may be smaller until a tensor has no row."""
            return math.floor((self._extents(tensor)[axis] - 1) * walked.scales[tensor] / alignment)

        fewer = 0 if wasteful else min(map(less, walked.scales))
        return AxisReceptiveField(
            extent=extent,
            out_extent=self._extents(self._target)[axis],
            scale=scale,
            alignment=alignment,
            needs=self.needs(axis, 0, self._extents(self._target)[axis]),
            admissible=admissible,
            smallest=admissible - alignment * fewer,
            wasteful=wasteful,
        )


class _Walk:
    """Scales, and what is left over, from the image on.

    Attributes:
        scales: Rows of the image for each row of a tensor.
        left: Rows of the image that no row of a tensor has a part of, because they were left over before it.
        wasteful: The first operation that left some.
    """

    def __init__(self, analysis: GraphAnalysis, source: Tensor, axis: int) -> None:
        self._analysis = analysis
        self._axis = axis
        self.scales: dict[Tensor, Fraction] = {source: Fraction(1)}
        self.left: dict[Tensor, Fraction] = {source: Fraction(0)}
        self.wasteful = ""
        self._conditions: list[tuple[Fraction, Fraction]] = []
        """(left over, every so many rows): an image without that and with any number of these leaves nothing there."""

    def through(self, node: Node, repetitions: Mapping[tuple[Node, int], PeriodicNeed]) -> None:
        """To the results of an operation."""
        scales, left = set(), Fraction(0)
        for position, tensor in enumerate(node.inputs):
            found = repetitions.get((node, position))
            if found is None or tensor not in self.scales:
                continue
            rest = self._rest(node, tensor, found)
            if rest and not self.wasteful:
                self.wasteful = f"{node.name} ({node.op})"
            own = self.left[tensor] + rest * self.scales[tensor]
            self._conditions.append((own, self.scales[tensor] * found.advance))
            scales.add(self.scales[tensor] * found.advance / found.period)
            left = max(left, own)
        if len(scales) != 1:
            raise RewriteError(f"`{node.name}` ({node.op}) reads images of different resolutions, or none.")
        (scale,) = scales
        for index in range(len(node.outputs)):
            self.scales[node.out(index)], self.left[node.out(index)] = scale, left

    def _rest(self, node: Node, tensor: Tensor, found: PeriodicNeed) -> int:
        """Rows at the end of an operand that are too few to make one more; what only cuts leaves nothing over."""
        if find_rule(node).moves_rows:
            return 0
        rows = (self._analysis.extents(node.out()) or ())[self._axis]
        extent = (self._analysis.extents(tensor) or ())[self._axis]
        assert rows is not None and extent is not None
        return max(extent - found.needs(0, rows)[1], 0)

    def admissible(self, extent: int, alignment: int) -> int | None:
        """The largest size up to `extent` of which nothing is left over; `None` if something always is."""
        sizes = range(extent, extent - alignment, -1)
        return next((size for size in sizes if self._leaves_nothing(size - extent)), None)

    def _leaves_nothing(self, more: int) -> bool:
        """With so many rows more."""
        return all((more + left) % every == 0 for left, every in self._conditions)


def repetition(need: Interval, extent: int) -> PeriodicNeed | None:
    """How needed rows repeat themselves.

    Args:
        need: Of the operand, for each single row of the result, in order.
        extent: Rows of the operand.

    Returns:
        `None` if there are too few rows to tell. The rows near the border are not looked at: there a transposed
        convolution has fewer windows, and a resized image the same row twice.
    """
    rows = len(need.lo)
    if rows == 1 and extent == 1:
        return PeriodicNeed(1, 1, (0,), (1,))
    trim = rows // 4
    lo, hi = (np.asarray(side)[trim : rows - trim] for side in (need.lo, need.hi))
    if rows < LEAST_ROWS * max(-(-rows // extent), 1):
        return None
    for period in range(1, len(lo) // 2 + 1):
        steps = np.concatenate([lo[period:] - lo[:-period], hi[period:] - hi[:-period]])
        if np.all(steps == steps[0]):
            advance = int(steps[0])
            first = -trim % period  # Of those that are looked at, the first whose row is a multiple of the period.
            back = (trim + first) // period * advance
            one = slice(first, first + period)
            return PeriodicNeed(period, advance, *(tuple(int(row) - back for row in side[one]) for side in (lo, hi)))
    return None
