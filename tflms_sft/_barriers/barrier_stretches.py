"""Stretches of a training step with barriers: untiled levels, and levels in tiles that are saved or recomputed.

A node of a path is a level and a family (`CHEAP_FLOPS_PER_BYTE`): the tensors of that family cross the frontier before
the level. A stretch of a family stores the tensors of the family within it, and at its end those of the next one. Each
loop runs in tiles of its own, which take bytes at one moment only.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import numpy as np

from rewriters.device.allocator import ExactAllocator
from rewriters.device.op_buffers import forwards_input_buffer
from rewriters.device.peak_memory import replay
from rewriters.ir.graph import Node, Tensor
from rewriters.tiling.segment import Segment
from tflms_sft._barriers.barriers import Barriers
from tflms_sft._barriers.step_levels import StepLevels
from tflms_sft._search.stretch_graph import Option, Path, Stretch
from tflms_sft._search.traced_step import TracedStep, original_allocations

MAX_FRONTIERS = 24
"""Frontiers between which levels are recomputed together."""

MIN_BYTES_SAVED = 0.1
"""Fraction of the bytes of the iterations at a moment that more tiles have to save."""


@dataclasses.dataclass(frozen=True)
class LevelChoice:
    """A way to run the levels of a stretch.

    Attributes:
        tiled: Whether they run in tiles.
        stored: Tensors that their loops write.
        dropped: Those of them that are dropped after their last forward reader, and recomputed.
    """

    tiled: bool
    stored: frozenset[Tensor] = frozenset()
    dropped: frozenset[Tensor] = frozenset()


@dataclasses.dataclass(frozen=True)
class LevelPlan:
    """The loops of a plan, in any number of tiles.

    Attributes:
        untiled: Levels that stay untiled.
        stored: Tensors that loops write.
        dropped: Those of them that are dropped after their last forward reader, and recomputed.
        in_files: Those of them that lie in files.
    """

    untiled: frozenset[int]
    stored: frozenset[Tensor]
    dropped: frozenset[Tensor]
    in_files: frozenset[Tensor]


@dataclasses.dataclass(frozen=True)
class FamilyPlan:
    """A plan that saves all tensors of a family.

    Attributes:
        plan: The plan.
        seconds: Lower bound of the time of the step.
        num_bytes: Sum of its bytes in small iterations at the worst moment, without variables and arguments.
    """

    plan: LevelPlan
    seconds: float
    num_bytes: float


@dataclasses.dataclass(frozen=True)
class _Life:
    """Moments at which a stored tensor is used.

    Attributes:
        first: The moment whose loop computes it.
        reads: Moments that read it.
        is_gradient: Whether a backward op computes it.
    """

    first: int
    reads: frozenset[int]
    is_gradient: bool

    @property
    def last(self) -> int:
        """Last moment at which it is alive."""
        return max((self.first, *self.reads))


GridCosts = Sequence[tuple[float, float]]
"""Bytes of an iteration and time of a loop, for more and more tiles."""


class BarrierStretches:
    """All stretches of a training step with barriers.

    Args:
        traced: The step.
        barriers: Ops that run in tiles.
        costs_of: Returns the tiles to choose from for each loop of a segment.

    Attributes:
        levels: Levels of the step.
        stretches: Stretches with their ways, the grids of their loops, and the homes of the tensors at their end.
        outside_seconds: Time of the ops that belong to no level.
    """

    def __init__(
        self, traced: TracedStep, barriers: Barriers, costs_of: Callable[[Segment], Sequence[GridCosts]]
    ) -> None:
        self._traced = traced
        self._barriers = barriers
        self.levels = StepLevels(traced.analysis, barriers.levels)
        segments = [barriers.segment("segment1", selection) for selection in barriers.selections]
        self._grids = [self._grid_options(segment, costs_of(segment)) for segment in segments]
        self._lives = [self._lives_of(segment) for segment in segments]
        self._homes = [self._homes_of(one, lives) for one, lives in zip(segments, self._lives, strict=True)]
        untiled = list(self._untiled())
        self._untiled_seconds = [stretch.ways[0].seconds for stretch in untiled]
        self.stretches = [*untiled, *self._tiled()]
        self.outside_seconds = traced.seconds - sum(self._untiled_seconds)

    def is_tiled(self, stretch: Stretch) -> bool:
        """Return whether a stretch runs in tiles."""
        return cast(LevelChoice, stretch.ways[0].choice).tiled

    def bounds(self, stretch: Stretch) -> tuple[int, int]:
        """Return the first level of a stretch, and one past its last."""
        return stretch.begin // len(self._lives), stretch.end // len(self._lives)

    def _frontier(self, level: int, family: int) -> int:
        """Return the number of a node of the path."""
        return level * len(self._lives) + (family if level < self.levels.count else 0)

    # Untiled levels -------------------------------------------------------------------------------------------

    def _untiled(self) -> Iterator[Stretch]:
        """Yield each level as it is; the bytes beside saved tensors are those of the original step."""
        count, moments, usages = self.levels.count, self.levels.moments, self._saved_usages()
        ops: list[set[Node]] = [set() for _ in range(count)]
        for node, level in self.levels.of.items():
            ops[level].add(node)
        trace, pool = original_allocations(self._traced), ExactAllocator()
        pool.map(self._traced.held_bytes)
        peaks = moments.peaks(replay(trace.events, pool).timeline, {})
        others = np.nan_to_num(peaks - self._traced.held_bytes) - np.sum(usages, axis=0)
        for level, usage in enumerate(usages):
            for moment in (level, self.levels.backward(level)):
                usage[moment] += max(others[moment], 0.0)
            seconds = self._traced.costs.step(ops[level])
            begin, end = self._frontier(level, 0), self._frontier(level + 1, 0)
            yield Stretch(begin, end, [Option(seconds, usage, LevelChoice(False))])

    def _saved_usages(self) -> list[np.ndarray]:
        """Return the bytes of the tensors that each level saves for the backward pass, or for later levels."""
        analysis, of, batch = self._traced.analysis, self.levels.of, self._traced.batch
        usages = [self.levels.moments.usage() for _ in range(self.levels.count)]
        for node, level in of.items():
            if node in analysis.backward or forwards_input_buffer(node):
                continue
            for tensor in (node.out(index) for index in range(len(node.outputs))):
                readers = [reader for reader, _ in analysis.consumers.get(tensor, ()) if reader in of]
                later = [of[reader] for reader in readers if reader in analysis.backward or of[reader] > level]
                if later:
                    usages[level][self.levels.moments.saved(level, min(later))] += tensor.num_bytes(batch)
        return usages

    # Loops and tensors of a family ----------------------------------------------------------------------------

    def _grid_options(self, segment: Segment, costs: Sequence[GridCosts]) -> dict[int, list[Option]]:
        """Return the options for the bytes of iterations at each moment, with the time of its loops."""
        at: dict[int, list[GridCosts]] = {}
        for moment, of_loop in zip(self.levels.of_loops(segment.loop_specs), costs, strict=True):
            at.setdefault(moment, []).append(of_loop)
        return {moment: list(self._options_at(moment, of_loops)) for moment, of_loops in at.items()}

    def _options_at(self, moment: int, loops: Sequence[GridCosts]) -> Iterator[Option]:
        """Yield options with fewer and fewer bytes, each with the fastest grids of the loops of a moment."""
        before = math.inf
        for most in sorted({num_bytes for loop in loops for num_bytes, _ in loop}, reverse=True):
            fitting = [[seconds for num_bytes, seconds in loop if num_bytes <= most] for loop in loops]
            if most <= (1 - MIN_BYTES_SAVED) * before and all(fitting):
                before = most
                usage = self.levels.moments.usage((slice(moment, moment + 1), most))
                yield Option(sum(map(min, fitting)), usage, round(most))

    def _lives_of(self, segment: Segment) -> dict[Tensor, _Life]:
        """Return the lives of the tensors that the loops of a family write if none is dropped."""
        specs = segment.loop_specs
        moments = self.levels.of_loops(specs)
        reads: dict[Tensor, set[int]] = {}
        for loop, moment in zip(specs, moments, strict=True):
            for tensor in loop.reads:
                reads.setdefault(tensor, set()).add(moment)
        backward = self._traced.analysis.backward
        return {
            tensor: _Life(moment, frozenset(reads.get(tensor, ())), tensor.node in backward)
            for loop, moment in zip(specs, moments, strict=True)
            for tensor in loop.writes
        }

    def _homes_of(self, segment: Segment, lives: Mapping[Tensor, _Life]) -> dict[Tensor, list[Option]]:
        """Return the homes of the tensors that the loops of a family write."""
        reads = collections.Counter(tensor for loop in segment.loop_specs for tensor in loop.reads)
        return {tensor: self._places(tensor, life, reads[tensor]) for tensor, life in lives.items()}

    def _places(self, tensor: Tensor, life: _Life, reads: int) -> list[Option]:
        """Return a tensor in memory, and in a file if that is allowed."""
        num_bytes = tensor.num_bytes(self._traced.batch)
        places = [Option(0.0, self.levels.moments.usage((slice(life.first, life.last + 1), num_bytes)))]
        if self._traced.files is not None and self._traced.files.holds(tensor):
            seconds = (1 + reads) * num_bytes / self._traced.rates.copied
            places.append(Option(seconds, self.levels.moments.usage(), tensor))
        return places

    # Levels in tiles ------------------------------------------------------------------------------------------

    def _tiled(self) -> Iterator[Stretch]:
        """Yield levels whose tensors are saved one by one, and those that are recomputed up to a later frontier.

        Only the former lead from the tensors of one family to those of another one.
        """
        count = self.levels.count
        spans = [span for span in itertools.combinations(self._frontiers(), 2) if span[1] - span[0] > 1]
        for family in range(len(self._lives)):
            for level in range(count):
                for frontiers in [(0, 0)] if family == 0 else [(0, family), (family, family), (family, 0)]:
                    if level + 1 < count or frontiers[1] == 0:
                        yield self._stretch(level, level + 1, family, frontiers)
            for begin, end in spans:
                yield self._stretch(begin, end, family, (family, family if end < count else 0))

    def _frontiers(self) -> list[int]:
        """Return frontiers that few bytes cross, spread over the levels."""
        count, batch = self.levels.count, self._traced.batch
        if count < MAX_FRONTIERS:
            return list(range(count + 1))
        crossing = np.zeros(count + 1)
        for tensor, life in self._lives[0].items():
            last = max((moment for moment in life.reads if moment < count), default=life.first)
            crossing[life.first + 1 : last + 1] += tensor.num_bytes(batch)
        inner = range(1, count)
        minima = [level for level in inner if crossing[level - 1] >= crossing[level] <= crossing[level + 1]]
        stride = -(-count // MAX_FRONTIERS)
        groups = itertools.groupby(minima, key=lambda level: level // stride)
        return [0, *(min(group, key=crossing.__getitem__) for _, group in groups), count]

    def _stretch(self, begin: int, end: int, family: int, frontiers: tuple[int, int]) -> Stretch:
        """Return levels in tiles: one whose tensors are saved, or several whose inner tensors are recomputed."""
        before, after = frontiers
        top, batch, drop = self.levels.moments_count, self._traced.batch, end - begin > 1
        produced = (*range(begin, end), *range(top - end, top - begin))
        exits = [t for t, life in self._produced(after, produced) if self._leaves(life, begin, end)]
        parts, dropped, stored = list[tuple[slice, float]](), set[Tensor](), set(exits)
        homes = [self._homes[after][tensor] for tensor in exits]
        for tensor, life in self._produced(family, produced):
            if self._leaves(life, begin, end):
                continue
            stored.add(tensor)
            num_bytes = tensor.num_bytes(batch)
            if drop and not life.is_gradient and life.last >= self.levels.count:
                dropped.add(tensor)
                last = max((moment for moment in life.reads if moment < end), default=life.first)
                parts += [(slice(life.first, last + 1), num_bytes), (slice(top - end, life.last + 1), num_bytes)]
            else:
                homes.append(self._homes[family][tensor])
        grids = self._grids[family]
        seconds = sum(grids[level][0].seconds for level in range(begin, end - 1) if level in grids)
        for level in range(begin, end):  # Levels are no faster in tiles than untiled.
            tiled = sum(grids[moment][0].seconds for moment in (level, top - 1 - level) if moment in grids)
            seconds += max(self._untiled_seconds[level] - tiled, 0.0)
        choice = LevelChoice(True, frozenset(stored), frozenset(dropped))
        way = Option(seconds, self.levels.moments.usage(*parts), choice)
        homes += [grids[moment] for moment in produced if moment in grids]
        return Stretch(self._frontier(begin, before), self._frontier(end, after), [way], homes)

    def _produced(self, family: int, moments: Sequence[int]) -> Iterator[tuple[Tensor, _Life]]:
        """Yield the tensors of a family that are computed at some moments."""
        for moment in moments:
            yield from self._by_moment[family].get(moment, ())

    @functools.cached_property
    def _by_moment(self) -> list[dict[int, list[tuple[Tensor, _Life]]]]:
        result: list[dict[int, list[tuple[Tensor, _Life]]]] = []
        for lives in self._lives:
            result.append({})
            for tensor, life in lives.items():
                result[-1].setdefault(life.first, []).append((tensor, life))
        return result

    def _leaves(self, life: _Life, begin: int, end: int) -> bool:
        """Return whether levels other than those from `begin` up to `end` read a tensor that these compute."""
        top = self.levels.moments_count
        if life.is_gradient:
            return life.last >= top - begin
        return any(end <= moment < top - end or moment >= top - begin for moment in life.reads)

    # Plans ----------------------------------------------------------------------------------------------------

    def plan(self, path: Path) -> LevelPlan:
        """Return the loops of a path."""
        untiled, stored, dropped, in_files = set[int](), set[Tensor](), set[Tensor](), set[Tensor]()
        for step in path.steps:
            choice = cast(LevelChoice, step.options[0].choice)
            untiled |= set() if choice.tiled else set(range(*self.bounds(step.stretch)))
            stored |= choice.stored
            dropped |= choice.dropped
            in_files |= {home.choice for home in step.options[1:] if isinstance(home.choice, Tensor)}
        return LevelPlan(*map(frozenset, (untiled, stored, dropped, in_files)))  # type: ignore[arg-type]

    def segment(self, name: str, plan: LevelPlan) -> Segment:
        """Return the loops of a plan."""
        barriers = self._barriers
        if plan.untiled:
            barriers = barriers.without({node for node, level in self.levels.of.items() if level in plan.untiled})
        return barriers.segment_storing(name, plan.stored, plan.dropped)

    @functools.cached_property
    def of_families(self) -> list[FamilyPlan]:
        """The plans that save all tensors of a family, in memory or in files."""
        plans = []
        for lives, grids, homes in zip(self._lives, self._grids, self._homes, strict=True):
            seconds = self.outside_seconds + sum(options[0].seconds for options in grids.values())
            iterations = sum((options[-1].usage for options in grids.values()), self.levels.moments.usage())
            for number in (0, -1):
                places = {tensor: options[number] for tensor, options in homes.items()}
                in_files = frozenset(tensor for tensor, home in places.items() if isinstance(home.choice, Tensor))
                if number == 0 or in_files:
                    plan = LevelPlan(frozenset(), frozenset(lives), frozenset(), in_files)
                    usage = iterations + np.sum([home.usage for home in places.values()], axis=0)
                    in_time = seconds + sum(home.seconds for home in places.values())
                    plans.append(FamilyPlan(plan, in_time, float(usage.max())))
        return plans

    def seconds_beyond(self, path: Path, coarsest: np.ndarray) -> list[float]:
        """Return for each stretch of a path the time of its loops beyond that of the options, all in the fewest tiles.

        Args:
            path: A path.
            coarsest: Time of the loops at each moment in the fewest tiles.
        """
        moments, result = self.levels.moments, list[float]()
        for step in path.steps:
            grids = [group[0].seconds for group in step.stretch.homes if isinstance(group[0].choice, int)]
            covered = (moments.forward(*self.bounds(step.stretch)), moments.backward(*self.bounds(step.stretch)))
            known = step.stretch.ways[0].seconds + sum(grids)
            result.append(sum(coarsest[one].sum() for one in covered) - known if self.is_tiled(step.stretch) else 0.0)
        return result

    def usage_in_small_iterations(self, path: Path) -> np.ndarray:
        """Return the bytes of a path at each moment with its loops in as many tiles as are estimated."""
        usage = self.levels.moments.usage()
        for step in path.steps:
            for group, option in zip((step.stretch.ways, *step.stretch.homes), step.options, strict=True):
                usage += group[-1].usage if isinstance(option.choice, int) else option.usage
        return usage
