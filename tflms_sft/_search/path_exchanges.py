"""Exchanges of single options, or of a few stretches in a row, that make a path fit, or make it faster."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tflms_sft._search.stretch_graph import ROUNDING, Picks, StretchGraph

MAX_REPLACED_STRETCHES = 3
"""Stretches in a row that an exchange replaces."""

MIN_REDUCTION = 0.01
"""Least reduction of the excess over a limit, over the excess, that a repair takes."""


class PathExchanges:
    """Exchanges between paths of a graph."""

    def __init__(self, graph: StretchGraph) -> None:
        self._graph = graph
        self._known_between: dict[tuple[int, int], list[list[int]]] = {}

    def repaired(self, path: Picks, prices: np.ndarray, limits: np.ndarray, *, same_stretches: bool = False) -> Picks:
        """Return a path after replacements that reduce its excess, each by the most bytes for its time."""
        cheapest = self._cheapest_ways(prices)
        while not path.fits(limits):
            excess, best, lowest = _excess(path.usage, limits), None, np.inf
            for others in (self._other_options(path), *self._all_other_stretches(path, cheapest, same_stretches)):
                reduction = excess - np.maximum(path.usage + others.usage - limits, 0.0).sum(axis=1)
                reduces = reduction > MIN_REDUCTION * excess
                if reduces.any():
                    rates = np.where(reduces, others.seconds / np.where(reduces, reduction, 1.0), np.inf)
                    index = int(np.argmin(rates))
                    if rates[index] < lowest:
                        lowest, best = rates[index], functools.partial(others.picks, [index])
            if best is None:
                return path
            path = best()
        return path

    def improved(self, path: Picks, prices: np.ndarray, limits: np.ndarray, *, same_stretches: bool = False) -> Picks:
        """Return a path that fits after replacements that make it faster and fit, up to the last one found."""
        cheapest, allowed, before = self._cheapest_ways(prices), (1 + ROUNDING) * limits, np.inf
        while path.seconds < (1 - ROUNDING) * before:
            before = path.seconds
            first = 0
            while first < len(path.stretches) and not same_stretches:
                path = self._with_faster_stretches(path, first, cheapest, allowed)
                first += 1
            path = self._with_faster_options(path, allowed)
        return path

    def _with_faster_options(self, path: Picks, allowed: np.ndarray) -> Picks:
        """Return a path with all faster options that fit; those that save most time come first."""
        others, usage = self._other_options(path), path.usage
        chosen, places = list[int](), set[int]()
        for index in np.argsort(others.seconds)[: np.count_nonzero(others.seconds < 0)].tolist():
            if others.places[index] not in places and np.all(usage + others.usage[index] <= allowed):
                usage = usage + others.usage[index]
                places.add(others.places[index])
                chosen.append(index)
        return others.picks(chosen) if chosen else path

    def _with_faster_stretches(self, path: Picks, first: int, cheapest: _CheapestWays, allowed: np.ndarray) -> Picks:
        """Return a path with the fastest stretches that fit in the place of some from a position on, if any are."""
        best, least = None, -ROUNDING * path.seconds
        for others in self._other_stretches(path, first, cheapest):
            faster = np.flatnonzero(others.seconds < least)
            fits = faster[np.all(path.usage + others.usage[faster] <= allowed, axis=1)]
            if fits.size:
                index = int(fits[np.argmin(others.seconds[fits])])
                least, best = others.seconds[index], functools.partial(others.picks, [index])
        return path if best is None else best()

    def _cheapest_ways(self, prices: np.ndarray) -> _CheapestWays:
        """Return the cheapest options of all stretches at fixed prices."""
        chosen = self._graph.cheapest_options(self._graph.costs(prices))
        return _CheapestWays([chosen[span] for span in self._graph.spans], self._graph.seconds, self._graph.usage)

    def _other_options(self, path: Picks) -> _Others:
        """Return the paths with another option in one place."""
        groups = np.concatenate([self._graph.group_numbers[self._graph.spans[one]] for one in path.stretches])
        sizes = self._graph.group_sizes[groups]
        sizes[sizes == 1] = 0
        places = np.repeat(np.arange(len(groups)), sizes)
        inner = np.arange(len(places)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        options = self._graph.group_begins[groups[places]] + inner

        def picks(indices: Sequence[int]) -> Picks:
            new = path.options.copy()
            new[places[indices]] = options[indices]
            return self._graph.picks(path.stretches, [new])

        old = path.options[places]
        seconds = self._graph.seconds[options] - self._graph.seconds[old]
        return _Others(seconds, self._graph.usage[options] - self._graph.usage[old], picks, places)

    def _all_other_stretches(self, path: Picks, cheapest: _CheapestWays, same_stretches: bool) -> Iterator[_Others]:
        """Yield the exchanges of stretches at all positions; none if the stretches have to stay."""
        for first in range(0 if same_stretches else len(path.stretches)):
            yield from self._other_stretches(path, first, cheapest)

    def _other_stretches(self, path: Picks, first: int, cheapest: _CheapestWays) -> Iterator[_Others]:
        """Yield the paths with one or two stretches, at their cheapest, in the place of some from a position on."""
        before = sum(map(self._graph.counts.__getitem__, path.stretches[:first]))
        begin, behind = self._graph.stretches[path.stretches[first]].begin, before
        for last, old in enumerate(path.stretches[first : first + MAX_REPLACED_STRETCHES], first + 1):
            behind += self._graph.counts[old]
            replacements = self._between(begin, self._graph.stretches[old].end)
            if replacements:
                picks = functools.partial(
                    self._replaced, path, first, last, slice(before, behind), replacements, cheapest
                )
                replaced = path.options[before:behind]
                seconds, usage = cheapest.sums((begin, self._graph.stretches[old].end), replacements)
                yield _Others(
                    seconds - self._graph.seconds[replaced].sum(),
                    usage - self._graph.usage[replaced].sum(axis=0),
                    picks,
                )

    def _between(self, begin: int, end: int) -> list[list[int]]:
        """Return the stretches between two frontiers, and the pairs of stretches that meet in between."""
        if (begin, end) not in self._known_between:
            result: list[list[int]] = []
            for first, middle in self._graph.leaving[begin]:
                if middle == end:
                    result.append([first])
                elif middle < end:
                    result += ([first, second] for second, last in self._graph.leaving[middle] if last == end)
            self._known_between[begin, end] = result
        return self._known_between[begin, end]

    def _replaced(
        self,
        path: Picks,
        first: int,
        last: int,
        options: slice,
        replacements: Sequence[Sequence[int]],
        cheapest: _CheapestWays,
        indices: Sequence[int],
    ) -> Picks:
        """Return a path with other stretches at the positions from `first` up to `last`, in the place of `options`."""
        (numbers,) = (replacements[index] for index in indices)
        return self._graph.picks(
            (*path.stretches[:first], *numbers, *path.stretches[last:]),
            [
                path.options[: options.start],
                *(cheapest.chosen[number] for number in numbers),
                path.options[options.stop :],
            ],
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

    def sums(self, frontiers: tuple[int, int], replacements: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Return time and bytes of the stretches that lead from one frontier to another one."""
        if frontiers not in self._sums:
            options = [np.concatenate([self.chosen[number] for number in numbers]) for numbers in replacements]
            flat, begins = np.concatenate(options), np.cumsum([0, *map(len, options)])[:-1]
            sums = (np.add.reduceat(of_option[flat], begins) for of_option in (self._seconds, self._usage))
            self._sums[frontiers] = next(sums), next(sums)
        return self._sums[frontiers]


@dataclasses.dataclass(frozen=True)
class _Others:
    """Paths that differ little from another one.

    Attributes:
        seconds: Time of each, beyond that of the other path.
        usage: Bytes of each at each moment, beyond those of the other path.
        picks: Returns the path with some of the differences.
        places: Place of the option in which each differs.
    """

    seconds: np.ndarray
    usage: np.ndarray
    picks: Callable[[Sequence[int]], Picks]
    places: np.ndarray = dataclasses.field(default_factory=lambda: np.arange(0))


def _excess(usage: np.ndarray, limits: np.ndarray) -> float:
    """Return the sum of the bytes above the limits."""
    return float(np.maximum(usage - limits, 0.0).sum())
