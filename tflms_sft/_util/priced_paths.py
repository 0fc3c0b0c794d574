"""Fastest plan within a memory limit: a shortest path whose bytes have a price at each moment of the step.

A plan is a path over frontiers, at which tensors are saved. An edge is a stretch of the step between two frontiers. A
stretch has several ways to run, and each tensor that it saves has several homes. A way or a home takes seconds, and
bytes at some of the moments of the step. The sum of bytes has to stay within a limit at every moment.

Lagrange multipliers turn the limits into prices, in seconds for each byte and moment (H. Everett, "Generalized Lagrange
Multiplier Method for Solving Problems of Optimum Allocation of Resources", 1963). At fixed prices every stretch and
every tensor chooses on its own, and a shortest path chooses the frontiers. Its cost, less the price of the whole limit,
is a lower bound of the time of every plan that fits. Prices rise where the path exceeds the limit, and fall where it is
below (M. Held and R. M. Karp, "The Traveling-Salesman Problem and Minimum Spanning Trees: Part II", 1971). The length
of a step is that of B. T. Polyak, "Minimization of Unsmooth Functionals", 1969, equation 6.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

MAX_ROUNDS = 120
"""Rounds of prices for one limit."""

PATIENCE = 6
"""Rounds without a higher bound after which the step length is halved."""

SMALL_GAP = 0.005
"""Distance of plan and bound, over the bound, at which the search ends."""

ROUNDING = 1e-9
"""Relative difference below which sums count as equal."""

MAX_REPLACED_STRETCHES = 3
"""Stretches in a row that an improvement of a plan replaces."""


@dataclasses.dataclass(frozen=True, eq=False)
class Option:
    """A way to run a stretch, or a home of a tensor.

    Attributes:
        seconds: Time that it takes.
        usage: Bytes at each moment of the step.
        choice: What it stands for.
    """

    seconds: float
    usage: np.ndarray
    choice: object = None


@dataclasses.dataclass(frozen=True, eq=False)
class Stretch:
    """Ops between two frontiers.

    Attributes:
        begin: Number of the frontier before it.
        end: Number of the frontier after it.
        ways: Ways to run it.
        homes: For each tensor that it saves, the homes between its uses.
    """

    begin: int
    end: int
    ways: Sequence[Option]
    homes: Sequence[Sequence[Option]] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """A stretch as a plan runs it.

    Attributes:
        stretch: The stretch.
        options: The chosen way, then the chosen home of each saved tensor.
    """

    stretch: Stretch
    options: tuple[Option, ...]

    @property
    def seconds(self) -> float:
        """Time of all options."""
        return sum(option.seconds for option in self.options)

    @property
    def usage(self) -> np.ndarray:
        """Bytes of all options at each moment."""
        return np.sum([option.usage for option in self.options], axis=0)


@dataclasses.dataclass(frozen=True, eq=False)
class Path:
    """A plan.

    Attributes:
        steps: Stretches from the first frontier to the last.
        seconds: Time of all of them.
        usage: Bytes at each moment.
    """

    steps: tuple[Step, ...]
    seconds: float
    usage: np.ndarray

    @classmethod
    def of(cls, steps: Iterable[Step]) -> Path:
        """Return the path of some steps."""
        steps = tuple(steps)
        return cls(steps, sum(step.seconds for step in steps), np.sum([step.usage for step in steps], axis=0))

    def fits(self, limits: np.ndarray) -> bool:
        """Return whether the bytes stay within the limits of all moments."""
        return bool(np.all(self.usage <= (1 + ROUNDING) * limits))


@dataclasses.dataclass(frozen=True)
class Solution:
    """Result of a search.

    Attributes:
        path: The fastest plan found that fits; `None` if none was found.
        bound: Lower bound of the time of every plan that fits.
        prices: Seconds for each byte at each moment, with which the bound was found.
    """

    path: Path | None
    bound: float
    prices: np.ndarray


class PricedPaths:
    """Plans of one step over given stretches.

    Args:
        stretches: All stretches; each ends at a later frontier than it begins.
    """

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self.stretches = sorted(stretches, key=lambda stretch: stretch.begin)
        self._last = max(stretch.end for stretch in stretches)
        groups = [group for stretch in self.stretches for group in (stretch.ways, *stretch.homes)]
        options = [option for group in groups for option in group]
        self._seconds = np.array([option.seconds for option in options])
        self._usage = np.array([option.usage for option in options], dtype=float)
        self._group_begins = np.cumsum([0, *(len(group) for group in groups)])
        self._stretch_begins = np.cumsum([0, *(1 + len(stretch.homes) for stretch in self.stretches)])
        self._from: list[list[int]] = [[] for _ in range(self._last)]
        for number, stretch in enumerate(self.stretches):
            self._from[stretch.begin].append(number)

    def fastest_within(self, limits: np.ndarray, known: Iterable[Path] = ()) -> Solution:
        """Return the fastest plan found whose bytes stay within the limits.

        Args:
            limits: Bytes at each moment.
            known: Plans of other limits; those that fit are candidates.
        """
        limits = np.asarray(limits, float)
        fitting = [path for path in known if path.fits(limits)]
        fitting += filter(None, [self._least_usage(limits)])
        best = min(fitting, key=_rank, default=None)
        return self._ascent(limits, best)

    # Prices --------------------------------------------------------------------------------------------------

    def _ascent(self, limits: np.ndarray, best: Path | None) -> Solution:
        """Raise the lower bound by prices, and improve each path that they propose."""
        prices, top = np.zeros(len(limits)), np.zeros(len(limits))
        bound, length, stale = -np.inf, 1.0, 0
        tried: set[tuple[int, ...]] = set()
        for _ in range(MAX_ROUNDS):
            path = self._cheapest(prices)
            value = path.seconds + float(prices @ (path.usage - limits))
            stale = 0 if value > bound else stale + 1
            if value > bound:
                bound, top = value, prices
            key = tuple(id(option) for step in path.steps for option in step.options)
            if key not in tried:
                tried.add(key)
                best = self._better(best, path, limits)
            if best is not None and best.seconds - bound <= SMALL_GAP * abs(bound):
                break
            if stale >= PATIENCE:
                prices, length, stale = top, length / 2, 0
                continue
            excess = path.usage - limits
            excess[(prices == 0) & (excess < 0)] = 0.0
            squares = float(excess @ excess)
            if not squares:
                break
            target = best.seconds if best is not None else max(2 * abs(bound), 1e-9)
            prices = np.maximum(prices + length * max(target - value, SMALL_GAP * abs(value)) / squares * excess, 0.0)
        return Solution(best, bound, top)

    def _cheapest(self, prices: np.ndarray) -> Path:
        """Return the path with the lowest cost at fixed prices."""
        return self._path(self._seconds + self._usage @ prices)

    def _path(self, costs: np.ndarray) -> Path:
        """Return the shortest path if each option has a cost of its own."""
        cheapest = np.minimum.reduceat(costs, self._group_begins[:-1])
        lengths = np.add.reduceat(cheapest, self._stretch_begins[:-1])
        total, before = np.full(self._last + 1, np.inf), np.full(self._last + 1, -1)
        total[0] = 0.0
        for begin, numbers in enumerate(self._from):
            for number in numbers:
                end, length = self.stretches[number].end, total[begin] + lengths[number]
                if length < total[end]:
                    total[end], before[end] = length, number
        steps, end = list[Step](), self._last
        while end > 0:
            number = int(before[end])
            steps.append(self._step(number, costs))
            end = self.stretches[number].begin
        return Path.of(reversed(steps))

    def _step(self, number: int, costs: np.ndarray) -> Step:
        """Return a stretch with the cheapest option of each group."""
        stretch, options = self.stretches[number], list[Option]()
        first = self._stretch_begins[number]
        for group, choices in enumerate((stretch.ways, *stretch.homes), first):
            begin, end = self._group_begins[group], self._group_begins[group + 1]
            options.append(choices[int(np.argmin(costs[begin:end]))])
        return Step(stretch, tuple(options))

    def _least_usage(self, limits: np.ndarray) -> Path | None:
        """Return a path that fits, found by a growing weight of moments that exceed the limit; `None` if none is found.

        The weights multiply, so that the worst moment dominates after some rounds (S. A. Plotkin, D. B. Shmoys and
        E. Tardos, "Fast Approximation Algorithms for Fractional Packing and Covering Problems", 1995).
        """
        scaled = self._usage / np.maximum(limits, 1.0)
        weights = np.full(len(limits), 1.0 / len(limits))
        for _ in range(MAX_ROUNDS):
            path = self._path(scaled @ weights)
            if path.fits(limits):
                return path
            load = path.usage / np.maximum(limits, 1.0)
            weights = weights * np.exp2(load / load.max())
            weights /= weights.sum()
        return None

    # Improvement ---------------------------------------------------------------------------------------------

    def _better(self, best: Path | None, path: Path, limits: np.ndarray) -> Path | None:
        """Return the faster of the best path and another one after its improvement."""
        repaired = self._repaired(path, limits)
        if repaired is None:
            return best
        improved = self._improved(repaired, limits)
        return min(filter(None, (best, improved)), key=_rank)

    def _repaired(self, path: Path, limits: np.ndarray) -> Path | None:
        """Return a path that fits, by replacing stretches where one exceeds the limits; `None` if that fails."""
        while not path.fits(limits):
            excess = _excess(path.usage, limits)
            most = (1 - ROUNDING) * excess
            replacements = (other for other in self._neighbours(path) if _excess(other.usage, limits) < most)
            best = min(replacements, key=lambda other: _slope(other, path, limits, excess), default=None)
            if best is None:
                return None
            path = best
        return path

    def _improved(self, path: Path, limits: np.ndarray) -> Path:
        """Return the path after all replacements that make it faster and fit."""
        while True:
            most = (1 - ROUNDING) * path.seconds
            faster = (other for other in self._neighbours(path) if other.seconds < most and other.fits(limits))
            best = min(faster, key=_rank, default=None)
            if best is None:
                return path
            path = best

    def _neighbours(self, path: Path) -> Iterator[Path]:
        """Yield the paths that differ in one option, or in a few stretches in a row by one or two others."""
        for position, step in enumerate(path.steps):
            for number, choices in enumerate((step.stretch.ways, *step.stretch.homes)):
                for option in choices:
                    if option is not step.options[number]:
                        options = (*step.options[:number], option, *step.options[number + 1 :])
                        yield self._replaced(path, position, position + 1, [Step(step.stretch, options)])
        for first in range(len(path.steps)):
            for last in range(first + 1, min(first + MAX_REPLACED_STRETCHES, len(path.steps)) + 1):
                begin, end = path.steps[first].stretch.begin, path.steps[last - 1].stretch.end
                for stretches in self._between(begin, end):
                    if [step.stretch for step in path.steps[first:last]] != stretches:
                        for ways in itertools.product(*(stretch.ways for stretch in stretches)):
                            pairs = zip(stretches, ways, strict=True)
                            steps = [Step(s, (way, *(homes[0] for homes in s.homes))) for s, way in pairs]
                            yield self._replaced(path, first, last, steps)

    def _between(self, begin: int, end: int) -> Iterator[list[Stretch]]:
        """Yield the stretch between two frontiers, and the pairs of stretches that meet in between."""
        for number in self._from[begin]:
            first = self.stretches[number]
            if first.end == end:
                yield [first]
            elif first.end < end:
                seconds = (self.stretches[other] for other in self._from[first.end])
                yield from ([first, second] for second in seconds if second.end == end)

    def _replaced(self, path: Path, first: int, last: int, steps: Sequence[Step]) -> Path:
        """Return a path with other steps at the positions from `first` up to `last`."""
        old, new = path.steps[first:last], Path.of(steps)
        usage = path.usage + new.usage - np.sum([step.usage for step in old], axis=0)
        seconds = path.seconds + new.seconds - sum(step.seconds for step in old)
        return Path((*path.steps[:first], *steps, *path.steps[last:]), seconds, usage)


def _rank(path: Path) -> tuple[float, float]:
    """Return a sort key: faster first, and among equals the one that needs less memory."""
    return path.seconds, float(path.usage.max())


def _excess(usage: np.ndarray, limits: np.ndarray) -> float:
    """Return the sum of the bytes above the limits."""
    return float(np.maximum(usage - limits, 0.0).sum())


def _slope(other: Path, path: Path, limits: np.ndarray, excess: float) -> float:
    """Return the seconds that a replacement takes for each byte of excess that it removes."""
    return (other.seconds - path.seconds) / (excess - _excess(other.usage, limits))
