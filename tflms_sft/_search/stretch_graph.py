"""Stretches of a step between frontiers, at which tensors are saved, and paths over them.

A plan is a path over frontiers. An edge is a stretch of the step between two frontiers. A stretch has several ways to
run, and each tensor that it saves has several homes. A way or a home takes seconds, and bytes at some of the moments of
the step.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from tflms_sft._search.moments import StepMoments

ROUNDING = 1e-9
"""Relative difference below which sums count as equal."""


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


@dataclasses.dataclass(frozen=True, eq=False)
class Picks:
    """A path by numbers.

    Attributes:
        stretches: Numbers of its stretches.
        options: Numbers of the chosen way and homes of the first stretch, then of the next.
        seconds: Time of all options.
        usage: Bytes of all options at each moment.
    """

    stretches: tuple[int, ...]
    options: np.ndarray
    seconds: float
    usage: np.ndarray

    def fits(self, limits: np.ndarray) -> bool:
        """Return whether the bytes stay within the limits of all moments."""
        return bool(np.all(self.usage <= (1 + ROUNDING) * limits))


class StretchGraph:
    """Stretches as edges between frontiers, and their options in arrays.

    Args:
        stretches: All stretches; each ends at a later frontier than it begins.

    Attributes:
        stretches: Stretches by number.
        last: The last frontier.
        leaving: For each frontier, the numbers of the stretches that begin there, each with its end.
        groups: For each stretch, the first option of its ways and one past the last, then those of each tensor's homes.
        counts: Number of groups of each stretch.
        spans: Groups of each stretch in `group_numbers`.
        group_numbers: Numbers of the groups of all stretches, which may share them.
        group_begins: First option of each group.
        group_sizes: Options of each group.
        seconds: Time of each option, corrections included.
        usage: Bytes of each option at each moment, corrections included.
    """

    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self.stretches = sorted(stretches, key=lambda stretch: stretch.begin)
        self._numbers = {id(stretch): number for number, stretch in enumerate(self.stretches)}
        self.last = max(stretch.end for stretch in stretches)
        of_stretch = [(stretch.ways, *stretch.homes) for stretch in self.stretches]
        groups = {id(group): group for group in itertools.chain(*of_stretch)}  # Stretches may share them.
        self._options = [option for group in groups.values() for option in group]
        self._times = np.array([option.seconds for option in self._options])
        self._sums = np.array([option.usage for option in self._options], dtype=float)
        self.usage, self.seconds = self._sums.copy(), self._times.copy()
        self._known_changes: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
        begins = [0, *itertools.accumulate(len(group) for group in groups.values())]
        self.group_begins, self.group_sizes = np.array(begins[:-1]), np.diff(begins)
        self._group_of = np.repeat(np.arange(len(groups)), self.group_sizes)
        spans = dict(zip(groups, itertools.pairwise(begins), strict=True))
        self.groups = [[spans[id(group)] for group in of_one] for of_one in of_stretch]
        positions = {one: position for position, one in enumerate(groups)}
        self.group_numbers = np.array([positions[id(group)] for group in itertools.chain(*of_stretch)])
        self.counts = list(map(len, self.groups))
        ends = list(itertools.accumulate(self.counts, initial=0))
        self._stretch_begins, self.spans = np.array(ends[:-1]), [slice(*span) for span in itertools.pairwise(ends)]
        self.leaving: list[list[tuple[int, int]]] = [[] for _ in range(self.last)]
        for number, stretch in enumerate(self.stretches):
            self.leaving[stretch.begin].append((number, stretch.end))

    def correct(self, path: Path, bytes_at: np.ndarray, moments: StepMoments) -> None:
        """Add bytes to all ways of the stretches of a path, in the place of earlier ones.

        Paths found from then on include them.

        Args:
            path: A path.
            bytes_at: Bytes at each moment; a stretch gets those at its own moments.
            moments: Moments of the step.
        """
        for stretch in (step.stretch for step in path.steps):
            (begin, end), *_ = self.groups[self._numbers[id(stretch)]]
            self.usage[begin:end] = self._sums[begin:end]
            for of_pass in (moments.forward, moments.backward):
                covered = of_pass(stretch.begin, stretch.end)
                self.usage[begin:end, covered] += bytes_at[covered]
        self._known_changes = None

    def correct_seconds(self, path: Path, seconds: Sequence[float]) -> None:
        """Add seconds to all ways of each stretch of a path, in the place of earlier ones."""
        for stretch, added in zip((step.stretch for step in path.steps), seconds, strict=True):
            (begin, end), *_ = self.groups[self._numbers[id(stretch)]]
            self.seconds[begin:end] = self._times[begin:end] + added

    def forget_corrections(self) -> None:
        """Undo all corrections."""
        self.usage[:] = self._sums
        self.seconds[:] = self._times
        self._known_changes = None

    def path(self, picks: Picks) -> Path:
        """Return a path with the options that its numbers stand for."""
        remaining = iter(picks.options.tolist())
        steps = (
            Step(self.stretches[one], tuple(self._options[next(remaining)] for _ in self.groups[one]))
            for one in picks.stretches
        )
        return Path(tuple(steps), picks.seconds, picks.usage)

    def picks(self, stretches: Iterable[int], options: Sequence[np.ndarray]) -> Picks:
        """Return a path of stretches with the options of each."""
        flat = np.concatenate(options)
        return Picks(tuple(stretches), flat, float(self.seconds[flat].sum()), self.usage[flat].sum(axis=0))

    def numbered(self, path: Path) -> Picks:
        """Return a path by the numbers of its stretches and options."""
        stretches = [self._numbers[id(step.stretch)] for step in path.steps]
        groups = itertools.chain.from_iterable(self.groups[one] for one in stretches)
        chosen = itertools.chain.from_iterable(step.options for step in path.steps)
        pairs = zip(groups, chosen, strict=True)
        options = [next(one for one in range(*span) if self._options[one] is option) for span, option in pairs]
        return self.picks(stretches, [np.array(options)])

    def costs(self, prices: np.ndarray) -> np.ndarray:
        """Return the cost of each option at fixed prices.

        The bytes of an option change at few moments, so that they are multiplied by sums of prices there.
        """
        options, moments, changes = self._changes
        until_end = np.cumsum(prices[::-1])[::-1]
        return self.seconds + np.bincount(options, changes * until_end[moments], len(self.seconds))

    def sums(self, of_chosen: np.ndarray) -> np.ndarray:
        """Return sums over the options of each stretch, given a row for each group of the stretches, in order."""
        result: np.ndarray = np.add.reduceat(of_chosen, self._stretch_begins)
        return result

    def least_usage(self) -> np.ndarray:
        """Return the least bytes at each moment of all paths from each frontier on, of each moment by itself."""
        groups = np.minimum.reduceat(self.usage, self.group_begins)
        stretches = self.sums(groups[self.group_numbers])
        least = np.full((self.last + 1, self.usage.shape[1]), np.inf)
        least[self.last] = 0.0
        for frontier in reversed(range(self.last)):
            for number, end in self.leaving[frontier]:
                np.minimum(least[frontier], stretches[number] + least[end], out=least[frontier])
        return least

    @property
    def _changes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Options whose bytes change at a moment, these moments, and the changes."""
        if self._known_changes is None:
            changes = np.diff(self.usage, axis=1, prepend=0.0)
            options, moments = np.nonzero(changes)
            self._known_changes = options, moments, changes[options, moments]
        return self._known_changes

    def shortest(self, costs: np.ndarray) -> Picks:
        """Return the shortest path if each option has a cost of its own."""
        chosen = self.cheapest_options(costs)
        lengths = self.sums(costs[chosen]).tolist()
        total, before = [0.0, *[np.inf] * self.last], [-1] * (self.last + 1)
        for so_far, leaving in zip(total, self.leaving, strict=False):  # `total` changes.
            for number, end in leaving:
                if so_far + lengths[number] < total[end]:
                    total[end], before[end] = so_far + lengths[number], number
        numbers, end = list[int](), self.last
        while end > 0:
            numbers.append(before[end])
            end = self.stretches[numbers[-1]].begin
        numbers.reverse()
        return self.picks(numbers, [chosen[self.spans[number]] for number in numbers])

    def cheapest_options(self, costs: np.ndarray) -> np.ndarray:
        """Return the cheapest way and the cheapest home of each tensor, for one stretch after another."""
        least = np.minimum.reduceat(costs, self.group_begins)
        cheapest = np.flatnonzero(costs == np.repeat(least, self.group_sizes))
        first = np.searchsorted(self._group_of[cheapest], np.arange(len(least)))
        result: np.ndarray = cheapest[first][self.group_numbers]
        return result
