"""The fewest tiles that fit: which segments, how many tiles, what stays as it is.

The network is a chain of blocks (`chain_search.py`), whose sums of bytes are an estimate. A plan
is accepted when the liveness model of the whole rewritten step agrees; what the chain
aims at is found by bisection.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from rewriters.emission.tile_pass import SegmentPlan, planner_for
from rewriters.errors import NotTileableError
from rewriters.ir.graph import Node
from rewriters.tiling.ft_segments import find_components, try_segment
from rewriters.tiling.segment import Segment
from rewriters.tiling.tile_planner import Grid, Halo
from tflms_sft._planner.chain_search import Chain
from tflms_sft._planner.segment_tilings import BlockChoice
from tflms_sft._planner.target_ladder import RUNG, rung
from tflms_sft._planner.traced_step import Candidate, TracedStep, predict

MOST_SMALLEST = 3
"""Plans among which the smallest is looked for first."""

LOWER_ROUNDS = 4
"""Attempts to go below the smallest plan found, before an error names it."""


class TileSearch:
    """Tile plans of one step.

    Attributes:
        left: What cannot be tiled.
    """

    def __init__(self, traced: TracedStep) -> None:
        self._traced = traced
        components, self.left = find_components(traced.analysis)
        self._chains = [Chain(traced, component) for component in components]

    def cheapest(self, limit: int) -> Candidate | None:
        """The plan with the least work found whose step stays below `limit` bytes."""
        if not self._chains:
            return None
        found = _fitting(self._traced, self._chains, limit)
        if found is None and self.smallest.peak.peak_bytes <= limit:
            return self.smallest
        return found

    @functools.cached_property
    def smallest(self) -> Candidate:
        """The plan with the lowest peak that is found."""
        return _smallest(self._traced, self._chains)

    def proposed(self, target: int) -> Candidate | None:
        """What is proposed for a target, whether its step meets it or not."""
        return _candidate(self._traced, self._chains, target, {}) if self._chains else None


def _fitting(traced: TracedStep, chains: list[Chain], limit: int) -> Candidate | None:
    """The cheapest plan for the whole step that is found to fit.

    The chains' sums may be too low or too high, so what they aim at is found by bisection, until the model of the
    whole step says that one target fits and the next one does not. The targets are the same for all limits, and with
    a higher limit the same are tried until one fits that did not before: what is found aims no lower.
    """
    low, high = rung(_held(traced)), rung(2 * traced.plain.peak.peak_bytes) + 1
    seen: dict[Any, Candidate] = {}
    found: Candidate | None = None
    while high - low > 1:
        middle = (low + high) // 2
        candidate = _candidate(traced, chains, int(RUNG**middle), seen, limit)
        if candidate is not None and candidate.peak.peak_bytes > limit:
            high = middle
        else:
            low, found = middle, candidate
    return found


def _candidate(
    traced: TracedStep, chains: list[Chain], target: int, seen: dict[Any, Candidate], budget: int | None = None
) -> Candidate | None:
    """What the chains propose for a target; `seen` has what was modelled before."""
    plans = _plans(traced, chains, target)
    if plans is None:
        return None
    key = tuple(
        (plan.segment.forward[0], plan.segment.forward[-1], plan.segment.stored, plan.halo)
        + tuple(tile_loop.grid for tile_loop in plan.loops)
        for plan in plans
    )
    if key not in seen:
        seen[key] = _modelled(traced, plans, budget)
    return seen[key]


def _modelled(traced: TracedStep, plans: list[SegmentPlan], budget: int | None = None) -> Candidate:
    return Candidate(plans, *predict(traced, plans, budget))


def _smallest(traced: TracedStep, chains: list[Chain]) -> Candidate:
    """The plan with the lowest peak that is found: from the first targets that can be met, then below."""
    seen: dict[Any, Candidate] = {}
    target = _held(traced) + max((chain.lowest() for chain in chains), default=0)
    while chains and len(seen) < MOST_SMALLEST and target < 2**62:
        _candidate(traced, chains, target, seen)
        target = int(target * 1.1) + 1
    smallest = min([*seen.values(), _modelled(traced, [])], key=lambda candidate: candidate.peak.peak_bytes)
    for _ in range(LOWER_ROUNDS):
        lower = _fitting(traced, chains, int(smallest.peak.peak_bytes * 0.95))
        if lower is None:
            break
        smallest = lower
    return smallest


def _held(traced: TracedStep) -> int:
    """Bytes that are there throughout a step: variables and arguments."""
    return traced.fixed_bytes + sum(t.num_bytes(traced.batch) for t in traced.analysis.graph.inputs)


def _plans(traced: TracedStep, chains: list[Chain], target: int) -> list[SegmentPlan] | None:
    """The cheapest plan whose chains fit, or `None`."""
    waiting = _held(traced)
    chosen: list[tuple[Chain, BlockChoice]] = []
    for chain in chains:
        path = chain.cheapest(target - waiting)
        if path is None:
            return None
        waiting += path.waits
        chosen.extend((chain, choice) for choice in path.choices if choice.grid is not None)
    return built(traced, chosen)


def built(traced: TracedStep, chosen: list[tuple[Chain, BlockChoice]]) -> list[SegmentPlan]:
    """The segments of choices that tile."""
    taken: set[Node] = set()
    plans = []
    for number, (chain, choice) in enumerate(chosen, 1):
        assert choice.grid is not None
        name = f"segment{number}"
        try:
            segment = try_segment(traced.analysis, chain.component, range(choice.first, choice.last), taken, name)
        except NotTileableError:
            continue  # A neighbour took its backward ops: it stays as it is, and the model counts it so.
        taken.update(segment.backward)
        segment = dataclasses.replace(segment, stored=choice.stored - set(segment.exits))
        plans.append(_planned(traced, segment, (choice.forward or choice.grid, choice.grid), choice.halo))
    return plans


def _planned(traced: TracedStep, segment: Segment, grids: tuple[Grid, Grid], halo: Halo) -> SegmentPlan:
    return SegmentPlan(segment, planner_for(traced.analysis, segment, halo).tile_loops(*grids), halo)
