"""Moments of a step, at which a plan counts its bytes.

Frontiers cut the forward pass into intervals. There is a moment for the forward pass of each interval, then one for the
backward pass of each interval if the step has one, in the order of the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np


@dataclasses.dataclass(frozen=True)
class StepMoments:
    """Moments of a step.

    Attributes:
        intervals: Number of intervals between frontiers.
        of_op: Moment of each op of the original step that belongs to an interval and reads images, by name. Others,
            such as shapes of gradients, may run long before their interval.
        has_backward: Whether the step has a backward pass; without it, the slices for it are empty.
    """

    intervals: int
    of_op: Mapping[str, int]
    has_backward: bool = True

    @property
    def count(self) -> int:
        """Number of moments."""
        return 2 * self.intervals if self.has_backward else self.intervals

    def forward(self, begin: int, end: int) -> slice:
        """Return the moments of the forward pass between two frontiers."""
        return slice(begin, end)

    def backward(self, begin: int, end: int) -> slice:
        """Return the moments of the backward pass between two frontiers."""
        return slice(self.count - end, self.count - begin) if self.has_backward else slice(0)

    def saved(self, begin: int, end: int) -> slice:
        """Return the moments from the forward pass after a frontier to the backward pass after another one."""
        return slice(begin, max(self.count - end, begin + 1))

    def waiting_updates(self, begin: int) -> slice:
        """Return the moment after the backward pass down to a frontier, until which updates of weights may wait."""
        return slice(self.count - begin, self.count - begin + 1) if self.has_backward else slice(0)

    def usage(self, *parts: tuple[slice, float]) -> np.ndarray:
        """Return the bytes at each moment of parts that take some bytes at some moments."""
        bytes_at = np.zeros(self.count)
        for moments, num_bytes in parts:
            bytes_at[moments] += num_bytes
        return bytes_at

    def peaks(self, timeline: Iterable[tuple[str, int]], of_loop: Mapping[str, slice]) -> np.ndarray:
        """Return the largest bytes of a timeline at each moment, NaN at moments without an op.

        An op that belongs to no interval, such as an update of a weight, counts at the moment of the op before it.

        Args:
            timeline: Names of ops and bytes while they run, in order.
            of_loop: Moments of each tile loop, by name.
        """
        most, now = np.full(self.count, np.nan), slice(0, 1)
        for name, num_bytes in timeline:
            if name in of_loop:
                now = of_loop[name]
            elif name in self.of_op:
                now = slice(self.of_op[name], self.of_op[name] + 1)
            most[now] = np.fmax(most[now], num_bytes)
        return most
