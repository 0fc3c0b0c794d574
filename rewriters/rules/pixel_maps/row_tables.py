"""Linear maps of rows: each row of the result is a weighted sum of a few rows of the operand, which a table names.

Mirroring, reversing and resizing are such maps, along each axis by itself. A tile gathers its rows by their positions
in the rows that it holds. The gradient of a map is the transposed map.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from rewriters.rules.intervals import Interval
from rewriters.rules.registry import AxisPlan, Emitter, OpView, Rule

__all__: list[str] = []


@dataclasses.dataclass(frozen=True, eq=False)
class RowTable:
    """Sparse matrix between the rows of an operand and the rows of a result, along one axis.

    Attributes:
        rows: Operand rows of each result row, of shape `(taps, result rows)`.
        weights: Weight of each of them; `None` if all are one.
        in_extent: Rows of the operand.
    """

    rows: np.ndarray
    weights: np.ndarray | None
    in_extent: int

    @functools.cached_property
    def is_identity(self) -> bool:
        """Return whether each row of the result is the row of the operand at the same place."""
        return self.weights is None and np.array_equal(self.rows, [np.arange(self.in_extent)])

    @functools.cached_property
    def _ends(self) -> tuple[np.ndarray, np.ndarray]:
        """First and last operand row of each result row, followed by an entry that `reduceat` needs and ignores."""
        return np.append(self.rows.min(axis=0), 0), np.append(self.rows.max(axis=0), 0)

    @functools.cached_property
    def transposed(self) -> RowTable:
        """Table of the gradient."""
        count = self.rows.shape[1]
        rows_of: list[list[tuple[int, float]]] = [[] for _ in range(self.in_extent)]
        for tap, sources in enumerate(self.rows):
            for row, source in enumerate(sources):
                weight = 1.0 if self.weights is None else float(self.weights[tap, row])
                if weight:
                    rows_of[source].append((row, weight))
        return _padded(rows_of, count)

    def sources(self, out: Interval) -> Interval:
        """Return the operand rows that rows `out` of the result need; rows outside of the result need nothing."""
        inside = out.inside(self.rows.shape[1])
        first, last = self._ends
        pairs = np.stack([inside.lo, inside.hi], axis=1).ravel()
        return Interval(np.minimum.reduceat(first, pairs)[::2], np.maximum.reduceat(last, pairs)[::2] + 1)


def _padded(rows_of: list[list[tuple[int, float]]], in_extent: int) -> RowTable:
    """Return a table from lists of operand rows and weights, filled up with weights of zero.

    A row without an operand row takes one of the row before it, so that tiles need no distant rows.
    """
    taps = max(map(len, rows_of))
    near = next(entries[0][0] for entries in rows_of if entries)
    rows = np.zeros((taps, len(rows_of)), np.int64)
    weights = np.zeros((taps, len(rows_of)))
    for row, entries in enumerate(rows_of):
        near = entries[-1][0] if entries else near
        rows[:, row] = [*(source for source, _ in entries), *[near] * (taps - len(entries))]
        weights[: len(entries), row] = [weight for _, weight in entries]
    return RowTable(rows, None if np.all(weights == 1) else weights, in_extent)


class RowMap(Rule):
    """Base of ops that are a linear map of rows along each axis."""

    cheap = True

    axes_in_order = False
    """Whether the first axis is mapped first rather than last."""

    def data(self, op: OpView) -> list[int]:
        """Return the image."""
        return [0]

    def shape_operands(self, op: OpView) -> list[int]:
        """Return the operands that describe the map."""
        return list(range(1, len(op.node.inputs)))

    def table(self, op: OpView, axis: int) -> RowTable:
        """Return the map along an axis."""
        raise NotImplementedError

    def operand_rows_for_result(self, op: OpView, axis: int, out: Interval) -> AxisPlan:
        """Require the rows of which `out` consists."""
        others: list[Interval | None] = [None] * (len(op.node.inputs) - 1)
        return AxisPlan(out, out, [self.table(op, axis).sources(out), *others])

    def result_rows_from_operands(self, op: OpView, axis: int, parts: Sequence[Interval | None]) -> AxisPlan:
        """Plan for the rows that the gradient's rows are a part of."""
        assert parts[0] is not None
        return self.operand_rows_for_result(op, axis, self.table(op, axis).transposed.sources(parts[0]))

    def mapped(self, emitter: Emitter, op: OpView, value: Any) -> Any:
        """Apply the maps along all axes to the operand of a tile."""
        axes = op.axes(op.node.out())
        for axis in axes if self.axes_in_order else reversed(axes):
            table, dim = self.table(op, axis), op.dim(op.node.out(), axis)
            if dim is None or table.is_identity:
                continue
            total = None
            for tap, rows in enumerate(table.rows):
                part = tf.gather(value, emitter.axis_positions(op.node, 0, rows, axis), axis=dim)
                if table.weights is not None:
                    part *= emitter.axis_values(op.node, None, table.weights[tap], axis, part.dtype)
                total = part if total is None else total + part
            value = total
        return value
