"""Receptive field: the image rows that a network reads, and the shifts of an image that only shift the result.

A network without padding that runs on part of an image computes part of the result, so that each device can process a
part of one image (Seal et al., "Toward Large-Scale Image Segmentation on Summit", ICPP '20, section 4). Two things may
be wrong with a part. It may begin where pools and strides would group other rows. Or it has rows that a pool or stride
leaves over, which shifts the skip connections. Both follow from the op rules: the rows of the operand that a row needs
(`Rule.operand_rows_for_result`) repeat periodically. So an operation is described by two numbers, `advance` rows of the
operand per `period` rows of the result, and by the rows that each row of one period needs.

Axes are independent (`intervals.py`). Along each there is

- the *scale* of a tensor: image rows per row of the tensor, a fraction;
- the *alignment*: the fewest image rows that are an integer number of rows of every tensor. Only a shift by a multiple
of the alignment shifts the result unchanged;
- the rows that an operation leaves over, and the image sizes for which there are none. Sizes that differ by a multiple
of the alignment leave over the same rows.
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

MIN_ROWS_PER_PERIOD = 8
"""Rows of a result, in multiples of its upsampling factor, from which on a period is detected."""


class PeriodicNeed(NamedTuple):
    """Operand rows that each result row needs, away from the borders.

    Attributes:
        period: Rows of the result after which the pattern repeats, `advance` rows further.
        advance: Rows of the operand.
        lo: First needed row for each of the rows 0 to `period - 1`.
        hi: One past the last needed row for each of them.
    """

    period: int
    advance: int
    lo: tuple[int, ...]
    hi: tuple[int, ...]

    def needs(self, begin: int, end: int) -> tuple[int, int]:
        """Return the operand rows for rows `begin` to `end` of the result; they may lie outside of it: padding."""
        first = [self._moved(self.lo, row) for row in range(begin, min(end, begin + self.period))]
        last = [self._moved(self.hi, row) for row in range(max(begin, end - self.period), end)]
        return min(first), max(last)

    def _moved(self, rows: Sequence[int], row: int) -> int:
        times, phase = divmod(row, self.period)
        return rows[phase] + times * self.advance


@dataclasses.dataclass(frozen=True)
class AxisReceptiveField:
    """Receptive field of a network along one axis.

    Attributes:
        extent: Image rows for which the network was traced.
        out_extent: Rows of its result.
        scale: Image rows per row of the result.
        alignment: Rows by which an image may be shifted.
        needs: First image row that the result needs, and one past the last; the others are cropped.
        admissible: A size, at most `extent`, that leaves no rows over. So do sizes that are larger by multiples of
            `alignment`. If every size leaves rows over, `extent`.
        smallest: The smallest such size; if every size leaves rows over, `admissible`.
        wasteful: The first operation that leaves rows over; empty if there is none, or if no other size is better.
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
    """Receptive field of the network between an image and a result.

    Args:
        analysis: Of a graph without gradients.
        source: The image.
        target: The result.

    Raises:
        RewriteError: If an operation between them pads, has no rule on rows, or has too few rows.
    """

    def __init__(self, analysis: GraphAnalysis, source: Tensor, target: Tensor) -> None:
        self._analysis = analysis
        self._source = source
        self._target = target
        for tensor in (source, target):
            if not analysis.has_known_size(tensor):
                raise RewriteError(
                    f"`{tensor.name}` of shape {tensor.shape} is not an image of static size, or no convolution or "
                    "pooling determines its axes. Pass a network that begins and ends at such images."
                )
        self._nodes = self._between()
        self.axes = [axis for axis, rows in enumerate(self._extents(source)) if rows > 1]
        """Axes with more than one row."""
        self.dims = [analysis.layouts.of(source).dims[axis] for axis in self.axes]  # type: ignore[union-attr]
        """Dimensions of the image that hold the axes."""
        self._repetitions = {axis: self._periods(axis) for axis in self.axes}

    def _extents(self, tensor: Tensor) -> tuple[int, ...]:
        return self._analysis.extents(tensor)  # type: ignore[return-value]

    def _between(self) -> list[Node]:
        """Return the operations that compute the target from the source, in topological order."""
        after: set[Tensor] = {self._source}
        for node in self._analysis.order:
            if after.intersection(node.inputs) and not reads_shape_only(node):
                after.update(node.out(index) for index in range(len(node.outputs)))
        path: set[Node] = set()
        stack = [self._target]
        while stack:
            tensor = stack.pop()
            if tensor in after and tensor != self._source and tensor.node not in path:
                path.add(tensor.node)
                stack.extend(self._images(tensor.node, after))
        if self._target not in after:
            raise RewriteError(f"`{self._target.name}` does not depend on `{self._source.name}`.")
        return self._analysis.sorted(path)

    def _images(self, node: Node, after: Container[Tensor]) -> list[Tensor]:
        """Return the images that an operation reads; its other operands must be equal for all tiles."""
        data = self._data(node)
        others = {*range(len(node.inputs))}.difference(data, find_rule(node).shape_operands(self._analysis.view(node)))
        for position in sorted(others):
            if node.inputs[position] in after:
                raise self._not_of_rows(node, f"it reads `{node.inputs[position].name}`, which depends on all rows")
        return [node.inputs[position] for position in data]

    def _data(self, node: Node) -> list[int]:
        """Return the positions of the images that an operation reads."""
        try:
            check_forward(self._analysis, node)
            kinds = forward_kinds(self._analysis, node)
        except NotTileableError as error:
            raise self._not_of_rows(node, str(error)) from error
        return [position for position, kind in enumerate(kinds) if kind is TileKind.FULL]

    def _not_of_rows(self, node: Node, why: str) -> RewriteError:
        return RewriteError(
            f"`{node.name}` ({node.op}) cannot run on tiles of an image: {why}. Pass a network that ends before it."
        )

    def _periods(self, axis: int) -> Mapping[tuple[Node, int], PeriodicNeed]:
        result = {}
        for node in self._nodes:
            rows = np.arange(self._extents(node.out())[axis], dtype=np.int64)
            plan = find_rule(node).operand_rows_for_result(self._analysis.view(node), axis, Interval(rows, rows + 1))
            for position in self._data(node):
                need = plan.needs[position]
                extent = self._extents(node.inputs[position])[axis]
                if need is not None and (extent > 1 or len(rows) == 1):
                    if len(rows) > 1 and need.lo[-1] < need.lo[0]:
                        raise self._not_of_rows(node, "it reverses its rows")
                    pattern = repetition(need, extent)
                    if pattern is None:
                        raise RewriteError(
                            f"`{node.name}` ({node.op}) computes {len(rows)} rows from {extent}, too few to find "
                            "their periodic pattern away from the border. Trace the network for a larger image."
                        )
                    result[node, position] = pattern
        return result

    def needs(self, axis: int, begin: int, end: int) -> tuple[int, int]:
        """Return the image rows for rows `begin` to `end` of the result, which may exceed the traced size."""
        wanted = {self._target: (begin, end)}
        for node in reversed(self._nodes):
            self._want(node, axis, wanted)
        return wanted[self._source]

    def _want(self, node: Node, axis: int, wanted: dict[Tensor, tuple[int, int]]) -> None:
        """Add the rows that an operation needs of its operands."""
        outs = [wanted[t] for t in map(node.out, range(len(node.outputs))) if t in wanted]
        if not outs:
            return
        begin, end = min(lo for lo, _ in outs), max(hi for _, hi in outs)
        for position, tensor in enumerate(node.inputs):
            need = self._repetitions[axis].get((node, position))
            if need is not None:
                lo, hi = need.needs(begin, end)
                old = wanted.get(tensor, (lo, hi))
                wanted[tensor] = (min(lo, old[0]), max(hi, old[1]))

    def _refuse_padding(self, axis: int) -> None:
        """Refuse rows outside of the tensors that they belong to, for the full result."""
        wanted = {self._target: (0, self._extents(self._target)[axis])}
        for node in reversed(self._nodes):
            self._want(node, axis, wanted)
            for tensor in (node.inputs[position] for position in self._data(node)):
                lo, hi = wanted.get(tensor, (0, 0))
                if lo < 0 or hi > self._extents(tensor)[axis]:
                    raise RewriteError(
                        f"`{node.name}` ({node.op}) pads its image, and would pad tiles inside of the image, too. "
                        "Use layers with padding='valid', or tile the network with `SFTParams`."
                    )

    @functools.cached_property
    def views(self) -> tuple[AxisReceptiveField, ...]:
        """Return the receptive field along each of `axes`.

        Raises:
            RewriteError: If something is padded, or branches of different resolution are combined.
        """
        return tuple(self._view(axis) for axis in self.axes)

    def _view(self, axis: int) -> AxisReceptiveField:
        self._refuse_padding(axis)
        walked = _Walk(self._analysis, self._source, axis)
        for node in self._nodes:
            walked.through(node, self._repetitions[axis])
        extent, scale = self._extents(self._source)[axis], walked.scales[self._target]
        alignment = math.lcm(*(fraction.numerator for fraction in walked.scales.values()))
        admissible, wasteful = walked.admissible(extent, alignment), walked.wasteful
        if admissible is None:  # Sizes that differ by the alignment leave over the same rows.
            admissible, wasteful = extent, ""

        def less(tensor: Tensor) -> int:
            """Return the number of alignments by which the image may shrink before a tensor has no row."""
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
    """Propagation of scales and left-over rows from the image on.

    Attributes:
        scales: Image rows per row of a tensor.
        left: Image rows that are not part of any row of a tensor, because an operation before it left them over.
        wasteful: The first operation that left rows over.
    """

    def __init__(self, analysis: GraphAnalysis, source: Tensor, axis: int) -> None:
        self._analysis = analysis
        self._axis = axis
        self.scales: dict[Tensor, Fraction] = {source: Fraction(1)}
        self.left: dict[Tensor, Fraction] = {source: Fraction(0)}
        self.wasteful = ""
        self._conditions: list[tuple[Fraction, Fraction]] = []
        """(left over, period) in image rows: an image without the left-over rows, plus any number of periods, leaves
        none."""

    def through(self, node: Node, repetitions: Mapping[tuple[Node, int], PeriodicNeed]) -> None:
        """Propagate to the results of an operation."""
        scales, left = set(), Fraction(0)
        for position, tensor in enumerate(node.inputs):
            need = repetitions.get((node, position))
            if need is None or tensor not in self.scales:
                continue
            remainder = self._rest(node, tensor, need)
            if remainder and not self.wasteful:
                self.wasteful = f"{node.name} ({node.op})"
            left_over = self.left[tensor] + remainder * self.scales[tensor]
            self._conditions.append((left_over, self.scales[tensor] * need.advance))
            scales.add(self.scales[tensor] * need.advance / need.period)
            left = max(left, left_over)
        if len(scales) != 1:
            raise RewriteError(
                f"`{node.name}` ({node.op}) reads images of different resolutions, or none. Pass a network that ends "
                "before it."
            )
        (scale,) = scales
        for index in range(len(node.outputs)):
            self.scales[node.out(index)], self.left[node.out(index)] = scale, left

    def _rest(self, node: Node, tensor: Tensor, need: PeriodicNeed) -> int:
        """Return the last rows of an operand, too few for another result row; cropping leaves none over."""
        if find_rule(node).moves_rows:
            return 0
        rows = (self._analysis.extents(node.out()) or ())[self._axis]
        extent = (self._analysis.extents(tensor) or ())[self._axis]
        assert rows is not None and extent is not None
        return max(extent - need.needs(0, rows)[1], 0)

    def admissible(self, extent: int, alignment: int) -> int | None:
        """Return the largest size up to `extent` that leaves no rows over; `None` if every size does."""
        sizes = range(extent, extent - alignment, -1)
        return next((size for size in sizes if self._leaves_nothing(size - extent)), None)

    def _leaves_nothing(self, added: int) -> bool:
        """Return whether a size leaves no rows over."""
        return all((added + left) % every == 0 for left, every in self._conditions)


def repetition(need: Interval, extent: int) -> PeriodicNeed | None:
    """Return the periodic pattern of needed rows.

    Args:
        need: Operand rows for each single row of the result, in order.
        extent: Rows of the operand.

    Returns:
        `None` if there are too few rows for a period. Rows near the border are ignored: there a transposed convolution
            has fewer windows, and a resized image repeats a row.
    """
    rows = len(need.lo)
    if rows == 1 and extent == 1:
        return PeriodicNeed(1, 1, (0,), (1,))
    trim = rows // 4
    lo, hi = (np.asarray(side)[trim : rows - trim] for side in (need.lo, need.hi))
    if rows < MIN_ROWS_PER_PERIOD * max(-(-rows // extent), 1):
        return None
    for period in range(1, len(lo) // 2 + 1):
        steps = np.concatenate([lo[period:] - lo[:-period], hi[period:] - hi[:-period]])
        if np.all(steps == steps[0]):
            advance = int(steps[0])
            first = -trim % period  # First remaining row that is a multiple of the period.
            back = (trim + first) // period * advance
            one = slice(first, first + period)
            return PeriodicNeed(period, advance, *(tuple(int(row) - back for row in side[one]) for side in (lo, hi)))
    return None
