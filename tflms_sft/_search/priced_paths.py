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
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from tflms_sft._search.moments import StepMoments

MAX_ROUNDS = 120
"""Rounds of prices for one limit."""

MAX_FITTED = 20_000
"""Rounds without a higher bound that seek a path that fits, times the number of stretches."""

PATIENCE = 6
"""Rounds without a higher bound after which the step length is halved."""

SMALL_GAP = 0.005
"""Distance of plan and bound, over the bound, at which the search ends."""

ROUNDING = 1e-9
"""Relative difference below which sums count as equal."""

MAX_REPLACED_STRETCHES = 3
"""Stretches in a row that an improvement of a plan replaces."""

MIN_REDUCTION = 0.01
"""Least reduction of the excess over a limit, over the excess, that a repair of a plan takes."""

WORTH_IMPROVING = 1.1
"""Time of a path that fits, over the least so far, up to which it is improved."""

MAX_IMPROVED = 1500
"""Stretches of all paths that are improved for one limit."""

MAX_PRICE_FACTOR, FACTOR_BISECTIONS = 1e9, 5
"""Factor of prices up to which a path that fits is sought, and the bisections for the smallest one."""


LIMIT_BISECTIONS = 10
"""Bisections for the smallest limit that a path meets."""


@dataclasses.dataclass(frozen=True, eq=False)
class Option:
    """A way to run a stretch, or a home of a tensor.

    Attributes:
        seconds: Time that it takes.
        usage: Bytes at each moment of the step.
        choice: Object that the option stands for, such as tiles, or a tensor in a file.
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


SpanOf = Callable[[Stretch], tuple[int, int]]
"""Returns the first interval of a stretch, and one past its last."""


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


@dataclasses.dataclass(frozen=True)
class _Picks:
    """A path by numbers.

    Attributes:
        stretches: Numbers of its stretches.
        options: For each stretch, the numbers of the chosen way and homes.
        seconds: Time of all options.
        usage: Bytes of all options at each moment.
    """

    stretches: tuple[int, ...]
    options: tuple[tuple[int, ...], ...]
    seconds: float
    usage: np.ndarray

    def fits(self, limits: np.ndarray) -> bool:
        """Return whether the bytes stay within the limits of all moments."""
        return bool(np.all(self.usage <= (1 + ROUNDING) * limits))


class PricedPaths:
    """Plans of one step over given stretches.

    Args:
        stretches: All stretches; each ends at a later frontier than it begins.
    """

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self.stretches = sorted(stretches, key=lambda stretch: stretch.begin)
        self._numbers = {id(stretch): number for number, stretch in enumerate(self.stretches)}
        self._last = max(stretch.end for stretch in stretches)
        of_stretch = [(stretch.ways, *stretch.homes) for stretch in self.stretches]
        groups = {id(group): group for group in itertools.chain(*of_stretch)}  # Stretches may share them.
        self._options = [option for group in groups.values() for option in group]
        self._seconds = np.array([option.seconds for option in self._options])
        self._sums = np.array([option.usage for option in self._options], dtype=float)
        self._usage = self._sums.copy()
        begins = [0, *itertools.accumulate(len(group) for group in groups.values())]
        self._group_begins = np.array(begins[:-1])
        spans = dict(zip(groups, itertools.pairwise(begins), strict=True))
        self._known_between: dict[tuple[int, int], list[list[int]]] = {}
        self._groups = [[spans[id(group)] for group in of_one] for of_one in of_stretch]
        positions = {one: position for position, one in enumerate(groups)}
        self._group_numbers = np.array([positions[id(group)] for group in itertools.chain(*of_stretch)])
        self._stretch_begins = np.cumsum([0, *map(len, self._groups)])[:-1]
        self._from: list[list[int]] = [[] for _ in range(self._last)]
        for number, stretch in enumerate(self.stretches):
            self._from[stretch.begin].append(number)

    def correct(self, path: Path, bytes_at: np.ndarray, moments: StepMoments, span: SpanOf) -> None:
        """Add bytes to all ways of the stretches of a path, each at its own moments, in the place of earlier ones.

        Paths found from then on include them in their usage.

        Args:
            path: A path.
            bytes_at: Bytes at each moment.
            moments: Moments of the step.
            span: Returns the first interval of a stretch, and one past its last.
        """
        for stretch in (step.stretch for step in path.steps):
            (begin, end), *_ = self._groups[self._numbers[id(stretch)]]
            self._usage[begin:end] = self._sums[begin:end]
            for covered in (moments.forward(*span(stretch)), moments.backward(*span(stretch))):
                self._usage[begin:end, covered] += bytes_at[covered]

    def forget_corrections(self) -> None:
        """Undo all corrections."""
        self._usage[:] = self._sums

    def least_limit(self, high: float) -> float:
        """Return the smallest limit found that some path meets at all moments without corrections, `high` if none."""
        self.forget_corrections()
        low = 0.0
        for _ in range(LIMIT_BISECTIONS):
            middle = (low + high) / 2
            path = self._least_usage(np.full(self._usage.shape[1], middle))
            low, high = (middle, high) if path is None else (low, middle)
        return high

    def fastest_within(self, limits: np.ndarray) -> Solution:
        """Return the fastest plan found whose bytes stay within the limits of all moments."""
        fastest, bound, prices = self._ascent(limits)
        return Solution(None if fastest is None else self._as_path(fastest), bound, prices)

    def _as_path(self, picks: _Picks) -> Path:
        """Return a path with the options that its numbers stand for."""
        pairs = zip(picks.stretches, picks.options, strict=True)
        steps = (Step(self.stretches[number], tuple(self._options[one] for one in chosen)) for number, chosen in pairs)
        return Path(tuple(steps), picks.seconds, picks.usage)

    def _picks(self, stretches: Iterable[int], options: Iterable[tuple[int, ...]]) -> _Picks:
        options = tuple(options)
        flat = list(itertools.chain.from_iterable(options))
        return _Picks(tuple(stretches), options, float(self._seconds[flat].sum()), self._usage[flat].sum(axis=0))

    # Prices --------------------------------------------------------------------------------------------------

    def _ascent(self, limits: np.ndarray) -> tuple[_Picks | None, float, np.ndarray]:
        """Raise the lower bound by prices, and improve the paths that they propose.

        Returns:
            The fastest path found that fits, if any; the bound; and its prices.
        """
        prices, top = np.zeros(len(limits)), np.zeros(len(limits))
        bound, length, stale = -np.inf, 1.0, 0
        best = self._least_usage(limits)
        tried, least, improved, fitted = set[tuple[tuple[int, ...], ...]](), np.inf, 0, 0
        for _ in range(MAX_ROUNDS):
            path = self._cheapest(prices)
            value = path.seconds + float(prices @ (path.usage - limits))
            stale = 0 if value > bound else stale + 1
            if value > bound:
                bound, top = value, prices
            fitted += len(self.stretches) if stale else 0
            for fitting in self._fitting(path, prices, limits) if fitted <= MAX_FITTED or not stale else ():
                is_worth = fitting.seconds < WORTH_IMPROVING * least and improved < MAX_IMPROVED
                if is_worth and fitting.options not in tried:
                    tried.add(fitting.options)
                    improved += len(fitting.stretches)
                    least = min(least, fitting.seconds)
                    best = min(filter(None, (best, self._improved(fitting, prices, limits))), key=_rank)
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
        return best, bound, top

    def _cheapest(self, prices: np.ndarray) -> _Picks:
        """Return the path with the lowest cost at fixed prices."""
        return self._shortest(self._seconds + self._usage @ prices)

    def _shortest(self, costs: np.ndarray) -> _Picks:
        """Return the shortest path if each option has a cost of its own."""
        cheapest = np.minimum.reduceat(costs, self._group_begins)
        lengths = np.add.reduceat(cheapest[self._group_numbers], self._stretch_begins)
        total, before = np.full(self._last + 1, np.inf), np.full(self._last + 1, -1)
        total[0] = 0.0
        for begin, numbers in enumerate(self._from):
            for number in numbers:
                end, length = self.stretches[number].end, total[begin] + lengths[number]
                if length < total[end]:
                    total[end], before[end] = length, number
        numbers, end = list[int](), self._last
        while end > 0:
            numbers.append(int(before[end]))
            end = self.stretches[numbers[-1]].begin
        numbers.reverse()
        return self._picks(numbers, (self._cheapest_options(number, costs) for number in numbers))

    def _cheapest_options(self, number: int, costs: np.ndarray) -> tuple[int, ...]:
        """Return the cheapest way of a stretch and the cheapest home of each tensor."""
        return tuple(begin + int(np.argmin(costs[begin:end])) for begin, end in self._groups[number])

    def _fitting(self, path: _Picks, prices: np.ndarray, limits: np.ndarray) -> Iterator[_Picks]:
        """Yield the path if it fits, or else the first paths that fit as the prices rise by a common factor."""
        if path.fits(limits):
            yield path
            return
        low, high, fitting = 1.0, 2.0, None
        while fitting is None and high < MAX_PRICE_FACTOR and prices.any():
            dearer = self._cheapest(high * prices)
            low, high, fitting = (low, high, dearer) if dearer.fits(limits) else (high, 2 * high, None)
        if fitting is None:
            return
        for _ in range(FACTOR_BISECTIONS):
            middle = (low * high) ** 0.5
            dearer = self._cheapest(middle * prices)
            low, high, fitting = (low, middle, dearer) if dearer.fits(limits) else (middle, high, fitting)
        yield fitting

    def _least_usage(self, limits: np.ndarray) -> _Picks | None:
        """Return a path that fits, found by a growing weight of moments that exceed the limit; `None` if none is found.

        The weights multiply, so that the worst moment dominates after some rounds (S. A. Plotkin, D. B. Shmoys and
        E. Tardos, "Fast Approximation Algorithms for Fractional Packing and Covering Problems", 1995).
        """
        scaled = self._usage / np.maximum(limits, 1.0)
        weights = np.full(len(limits), 1.0 / len(limits))
        for _ in range(MAX_ROUNDS):
            path = self._shortest(scaled @ weights)
            if path.fits(limits):
                return path
            load = path.usage / np.maximum(limits, 1.0)
            weights = weights * np.exp2(load / load.max())
            weights /= weights.sum()
        return None

    # Improvement ---------------------------------------------------------------------------------------------

    def near(self, path: Path, limits: np.ndarray, prices: np.ndarray) -> Path:
        """Return a path within the limits that differs little from another one; the nearest found if none fits.

        Args:
            path: A path of these stretches.
            limits: Bytes at each moment.
            prices: Seconds for each byte at each moment, by which replacements are compared.
        """
        stretches = [self._numbers[id(step.stretch)] for step in path.steps]
        options = [
            tuple(
                begin + next(i for i, option in enumerate(group) if option is chosen)
                for (begin, _), group, chosen in zip(
                    self._groups[one], (step.stretch.ways, *step.stretch.homes), step.options, strict=True
                )
            )
            for one, step in zip(stretches, path.steps, strict=True)
        ]
        start = self._picks(stretches, options)
        picks = self._repaired(start, prices, limits, same_stretches=True)
        if not picks.fits(limits):
            picks = self._repaired(start, prices, limits)
        if picks.fits(limits):
            picks = self._improved(picks, prices, limits, same_stretches=True)
        return self._as_path(picks)

    def _repaired(
        self, path: _Picks, prices: np.ndarray, limits: np.ndarray, *, same_stretches: bool = False
    ) -> _Picks:
        """Return a path after replacements that reduce its excess, each by the most bytes for its time."""
        cheapest = self._cheapest_ways(prices)
        while not path.fits(limits):
            excess, best, lowest = _excess(path.usage, limits), None, np.inf
            for others in self._others(path, cheapest, same_stretches=same_stretches):
                reduction = excess - np.maximum(others.usage - limits, 0.0).sum(axis=1)
                reduces = reduction > MIN_REDUCTION * excess
                if reduces.any():
                    slower = others.seconds - path.seconds
                    rates = np.where(reduces, slower / np.where(reduces, reduction, 1.0), np.inf)
                    index = int(np.argmin(rates))
                    if rates[index] < lowest:
                        lowest, best = rates[index], functools.partial(others.picks, index)
            if best is None:
                return path
            path = best()
        return path

    def _improved(
        self, path: _Picks, prices: np.ndarray, limits: np.ndarray, *, same_stretches: bool = False
    ) -> _Picks:
        """Return a path that fits after all replacements that make it faster and fit."""
        cheapest, allowed = self._cheapest_ways(prices), (1 + ROUNDING) * limits
        while True:
            best, least = None, (1 - ROUNDING) * path.seconds
            for others in self._others(path, cheapest, same_stretches=same_stretches):
                seconds = np.where(others.seconds < least, others.seconds, np.inf)
                faster = np.flatnonzero(seconds < np.inf)
                fits = faster[np.all(others.usage[faster] <= allowed, axis=1)]
                if fits.size:
                    index = int(fits[np.argmin(seconds[fits])])
                    least, best = seconds[index], functools.partial(others.picks, index)
            if best is None:
                return path
            path = best()

    def _cheapest_ways(self, prices: np.ndarray) -> _CheapestWays:
        """Return the cheapest options of all stretches at fixed prices."""
        costs = self._seconds + self._usage @ prices
        least = np.minimum.reduceat(costs, self._group_begins)
        sizes = np.diff(self._group_begins, append=len(costs))
        cheapest = np.flatnonzero(costs == np.repeat(least, sizes))
        _, first = np.unique(np.repeat(np.arange(len(sizes)), sizes)[cheapest], return_index=True)
        chosen = np.split(cheapest[first][self._group_numbers], self._stretch_begins[1:])
        return _CheapestWays(chosen, self._seconds, self._usage)

    def _others(self, path: _Picks, cheapest: _CheapestWays, *, same_stretches: bool) -> Iterator[_Others]:
        """Yield the paths with another option, and those with one or two other stretches for a few in a row."""
        yield self._other_options(path)
        if same_stretches:
            return
        for first in range(len(path.stretches)):
            for last in range(first + 1, min(first + MAX_REPLACED_STRETCHES, len(path.stretches)) + 1):
                others = self._other_stretches(path, first, last, cheapest)
                if others is not None:
                    yield others

    def _other_options(self, path: _Picks) -> _Others:
        """Return the paths with another option in one place."""
        places = [
            (position, group, span)
            for position, number in enumerate(path.stretches)
            for group, span in enumerate(self._groups[number])
            if span[1] - span[0] > 1
        ]
        options = np.concatenate([np.arange(*span) for _, _, span in places] or [np.arange(0)])
        sizes = [end - begin for _, _, (begin, end) in places]
        chosen = np.repeat(np.array([path.options[position][group] for position, group, _ in places], int), sizes)
        place = np.repeat(np.arange(len(places)), sizes)

        def picks(index: int) -> _Picks:
            position, group, _ = places[place[index]]
            old = path.options[position]
            new = (*old[:group], int(options[index]), *old[group + 1 :])
            return self._replaced(path, position, position + 1, [path.stretches[position]], [new])

        seconds = path.seconds + self._seconds[options] - self._seconds[chosen]
        return _Others(seconds, path.usage + self._usage[options] - self._usage[chosen], picks)

    def _other_stretches(self, path: _Picks, first: int, last: int, cheapest: _CheapestWays) -> _Others | None:
        """Return the paths with one or two stretches, at their cheapest, in the place of some of a path."""
        begin, end = self.stretches[path.stretches[first]].begin, self.stretches[path.stretches[last - 1]].end
        replacements = self._between(begin, end)
        if not replacements:
            return None
        old = self._picks(path.stretches[first:last], path.options[first:last])

        def picks(index: int) -> _Picks:
            numbers = replacements[index]
            options = [tuple(cheapest.chosen[number].tolist()) for number in numbers]
            return self._replaced(path, first, last, numbers, options)

        seconds, usage = cheapest.sums(begin, end, replacements)
        return _Others(path.seconds - old.seconds + seconds, path.usage - old.usage + usage, picks)

    def _between(self, begin: int, end: int) -> list[list[int]]:
        """Return the stretches between two frontiers, and the pairs of stretches that meet in between."""
        if (begin, end) not in self._known_between:
            result: list[list[int]] = []
            for first in self._from[begin]:
                middle = self.stretches[first].end
                if middle == end:
                    result.append([first])
                elif middle < end:
                    result += ([first, second] for second in self._from[middle] if self.stretches[second].end == end)
            self._known_between[begin, end] = result
        return self._known_between[begin, end]

    def _replaced(
        self, path: _Picks, first: int, last: int, numbers: Sequence[int], options: Sequence[tuple[int, ...]]
    ) -> _Picks:
        """Return a path with other stretches at the positions from `first` up to `last`."""
        return self._picks(
            (*path.stretches[:first], *numbers, *path.stretches[last:]),
            (*path.options[:first], *options, *path.options[last:]),
        )


class _CheapestWays:
    """Stretches with their cheapest options.

    Args:
        chosen: For each stretch, the numbers of its way and homes.
        seconds: Time of each option.
        usage: Bytes of each option at each moment.
    """

    def __init__(self, chosen: list[np.ndarray], seconds: np.ndarray, usage: np.ndarray) -> None:
        self.chosen = chosen
        self._seconds = seconds
        self._usage = usage
        self._sums: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def sums(self, begin: int, end: int, replacements: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Return time and bytes of the stretches that lead from one frontier to another one."""
        if (begin, end) not in self._sums:
            options = [np.concatenate([self.chosen[number] for number in numbers]) for numbers in replacements]
            flat, begins = np.concatenate(options), np.cumsum([0, *map(len, options)])[:-1]
            sums = (np.add.reduceat(of_option[flat], begins) for of_option in (self._seconds, self._usage))
            self._sums[begin, end] = next(sums), next(sums)
        return self._sums[begin, end]


@dataclasses.dataclass(frozen=True)
class _Others:
    """Paths that differ little from another one.

    Attributes:
        seconds: Time of each.
        usage: Bytes of each at each moment.
        picks: Returns one of them.
    """

    seconds: np.ndarray
    usage: np.ndarray
    picks: Callable[[int], _Picks]


def _rank(path: _Picks) -> tuple[float, float]:
    """Return a sort key: faster first, and among equals the one that needs less memory."""
    return path.seconds, float(path.usage.max())


def _excess(usage: np.ndarray, limits: np.ndarray) -> float:
    """Return the sum of the bytes above the limits."""
    return float(np.maximum(usage - limits, 0.0).sum())
