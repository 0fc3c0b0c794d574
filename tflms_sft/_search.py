"""The fewest tiles that fit: which segments, how many tiles, what stays as it is.

A network is a chain of blocks between points where a single tensor goes on. Each
block either stays as it is (its activations wait for the backward pass) or lies in a
segment with some number of tiles (its exit waits, and every turn recomputes). Along
the chain, bytes that wait add up; a plan fits if at every block what waits plus what
the block needs while it runs stays within the budget. That makes it a shortest path
over (bytes waiting, time) pairs, of which only the undominated ones are kept.

The chain's sums are an estimate. A plan is accepted when the liveness model of the
whole rewritten step agrees; otherwise the search is repeated with what it missed.
"""

from __future__ import annotations

import dataclasses

from rewriters.cost import op_cost, phase_cost, step_cost
from rewriters.errors import BudgetError, NotTileableError
from rewriters.ft import Component, LeftAlone, find_components, try_segment
from rewriters.graph import Node, Tensor
from rewriters.memory import Peak
from rewriters.segments import Segment
from rewriters.sft import SegmentPlan, plan_segment, tile_segments
from rewriters.tiles import Grid
from rewriters.turns import phase_scratch
from tflms_sft._compile import AUTO_TILES, Traced, clamped, predict, unsupported_layers
from tflms_sft._params import AutoParams
from tflms_sft._units import format_bytes

MAX_CUTS = 12
"""Places where a segment may end; with more, those where the least is kept are taken."""

MAX_ROUNDS = 12


@dataclasses.dataclass(frozen=True)
class Choice:
    """What to do with the blocks from one cut to another.

    Attributes:
        first: First position in the component.
        last: One past the last position.
        grid: Tiles, or `None` to leave the blocks as they are.
        waits: Bytes that it leaves waiting for the backward pass.
        needs: Bytes that it needs on top while it runs.
        cost: Arithmetic.
    """

    first: int
    last: int
    grid: Grid | None
    waits: int
    needs: int
    cost: float


@dataclasses.dataclass(frozen=True)
class Path:
    """Choices from the start of a component up to a cut."""

    waits: int
    cost: float
    peak: int
    choices: tuple[Choice, ...]


def search(traced: Traced, params: AutoParams) -> tuple[list[SegmentPlan], list[LeftAlone]]:
    """Plans of segments whose whole step fits, with the least arithmetic found.

    Raises:
        BudgetError: If none fits; it names the smallest that does and its largest tensor.
    """
    budget = int(params.memory_budget * (1 - params.headroom))
    components, left = find_components(traced.analysis)
    original, _ = predict(traced, traced.analysis.graph, [])
    if original.peak_bytes <= budget:
        return [], left
    chains = [_Chain(traced, component) for component in components]
    best: tuple[Peak, list[SegmentPlan]] | None = None
    target = budget
    for _ in range(MAX_ROUNDS):
        plans = _plans(traced, chains, target)
        if plans is None:
            break
        peak, _ = predict(traced, tile_segments(traced.analysis, plans) if plans else traced.analysis.graph, plans)
        if best is None or peak.peak_bytes < best[0].peak_bytes:
            best = (peak, plans)
        if peak.peak_bytes <= budget:
            return plans, left
        target = min(int(target * 0.9), target - (peak.peak_bytes - budget))
    smallest = _smallest(traced, chains)
    if best is None or smallest[0].peak_bytes < best[0].peak_bytes:
        best = smallest
    if best[0].peak_bytes <= budget:
        return best[1], left
    raise _too_small(traced, params, best[0], left)


def _too_small(traced: Traced, params: AutoParams, peak: Peak, left: list[LeftAlone]) -> BudgetError:
    smallest = int(peak.peak_bytes / (1 - params.headroom)) + 1
    name, size = peak.largest[0] if peak.largest else ("the variables", traced.fixed_bytes)
    layers = unsupported_layers(traced, left)
    stuck = f" Left as they are: {', '.join(layers[:6])}{' and others' if len(layers) > 6 else ''}." if layers else ""
    error = BudgetError(
        f"`memory_budget` is too small for this step. Received: memory_budget={format_bytes(params.memory_budget)}. "
        f"The smallest plan found needs {format_bytes(smallest)} ({smallest} bytes, headroom of "
        f"{params.headroom:.0%} included), of which `{name}` is {format_bytes(size)} and variables are "
        f"{format_bytes(traced.fixed_bytes)}. Raise the budget, or shrink the batch or the image.{stuck}"
    )
    error.smallest_bytes = smallest
    error.tensor = name
    return error


def _smallest(traced: Traced, chains: list[_Chain]) -> tuple[Peak, list[SegmentPlan]]:
    """The plan with the lowest peak over a range of targets."""
    best: tuple[Peak, list[SegmentPlan]] | None = None
    floor = min((chain.lowest() for chain in chains), default=0)
    for factor in (1.0, 1.1, 1.3, 1.6, 2.0):
        plans = _plans(traced, chains, int((floor + traced.fixed_bytes) * factor)) or []
        graph = tile_segments(traced.analysis, plans) if plans else traced.analysis.graph
        peak, _ = predict(traced, graph, plans)
        if best is None or peak.peak_bytes < best[0].peak_bytes:
            best = (peak, plans)
    assert best is not None
    return best


def _plans(traced: Traced, chains: list[_Chain], target: int) -> list[SegmentPlan] | None:
    """The cheapest plan whose chains fit, or `None`."""
    waiting = traced.fixed_bytes + sum(t.num_bytes(traced.batch) for t in traced.analysis.graph.inputs)
    chosen: list[tuple[_Chain, Choice]] = []
    for chain in chains:
        path = chain.cheapest(target - waiting)
        if path is None:
            return None
        waiting += path.waits
        chosen.extend((chain, choice) for choice in path.choices if choice.grid is not None)
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
        plans.append(plan_segment(traced.analysis, segment, clamped(segment, choice.grid)))
    return plans


class _Chain:
    """One component as a chain of blocks."""

    def __init__(self, traced: Traced, component: Component) -> None:
        self.traced = traced
        self.component = component
        self.bounds = self._bounds()
        self._segments: dict[tuple[int, int], Segment | None] = {}
        self._tiled: dict[tuple[int, int, int], Choice | None] = {}
        self._plain: dict[tuple[int, int], Choice] = {}

    def _bounds(self) -> list[int]:
        """Where segments may begin and end: cuts at which less is kept than around them, smallest first."""
        size = len(self.component.nodes)
        inner = [cut for cut in self.component.cuts if cut < size - 1]
        kept = {cut: self.component.cut_tensor(self.traced.analysis, cut).num_bytes(self.traced.batch) for cut in inner}
        # Of neighbours that keep the same amount the last one is enough: it leaves more to recompute.
        inner = [c for i, c in enumerate(inner) if i + 1 == len(inner) or kept[inner[i + 1]] != kept[c]]
        inner = sorted(sorted(inner, key=lambda c: kept[c])[: MAX_CUTS - 1])
        return [0, *(cut + 1 for cut in inner), size]

    def cheapest(self, budget: int) -> Path | None:
        """The cheapest path whose peak fits."""
        fronts: dict[int, list[Path]] = {self.bounds[0]: [Path(0, 0.0, 0, ())]}
        for start, first in enumerate(self.bounds[:-1]):
            for path in fronts.get(first, []):
                for last in self.bounds[start + 1 :]:
                    for choice in self._options(first, last, budget - path.waits):
                        peak = max(path.peak, path.waits + choice.waits + choice.needs)
                        new = Path(path.waits + choice.waits, path.cost + choice.cost, peak, (*path.choices, choice))
                        _keep(fronts.setdefault(last, []), new)
        ends = fronts.get(self.bounds[-1], [])
        return min(ends, key=lambda path: path.cost) if ends else None

    def lowest(self) -> int:
        """Bytes without which no choice does."""
        low, high = 1, max(self._plain_choice(self.bounds[0], self.bounds[-1]).waits * 4, 1)
        while low < high:
            middle = (low + high) // 2
            if self.cheapest(middle) is None:
                low = middle + max(middle // 100, 1)
            else:
                high = middle
        return low

    def _options(self, first: int, last: int, budget: int) -> list[Choice]:
        """Leaving the blocks as they are, and the fewest tiles with which they fit."""
        result = []
        plain = self._plain_choice(first, last)
        if plain.waits + plain.needs <= budget:
            result.append(plain)
        for count in AUTO_TILES:
            choice = self._tiled_choice(first, last, count)
            if choice is None:
                break
            if choice.waits + choice.needs <= budget:
                result.append(choice)
                break
        return result

    def _plain_choice(self, first: int, last: int) -> Choice:
        if (first, last) not in self._plain:
            analysis, batch = self.traced.analysis, self.traced.batch
            nodes = self.component.nodes[first:last]
            saved: dict[Tensor, None] = {}
            grads: list[int] = [0]
            costs = 0.0
            readers: dict[Node, None] = {}
            for node in nodes:
                costs += op_cost(analysis, node, batch)
                for index in range(len(node.outputs)):
                    tensor = node.out(index)
                    later = [r for r, _ in analysis.readers.get(tensor, ()) if r in analysis.backward]
                    readers.update(dict.fromkeys(later))
                    if later:
                        saved[tensor] = None
                    grads.append(tensor.num_bytes(batch))
            waits = sum(tensor.num_bytes(batch) for tensor in saved)
            costs += step_cost(analysis, readers, batch)
            self._plain[first, last] = Choice(first, last, None, waits, 2 * max(grads), costs)
        return self._plain[first, last]

    def _segment(self, first: int, last: int) -> Segment | None:
        if (first, last) not in self._segments:
            try:
                segment = try_segment(self.traced.analysis, self.component, range(first, last), set(), "candidate")
            except NotTileableError:
                segment = None
            self._segments[first, last] = segment
        return self._segments[first, last]

    def _tiled_choice(self, first: int, last: int, count: int) -> Choice | None:
        key = (first, last, count)
        if key not in self._tiled:
            self._tiled[key] = self._make(first, last, count)
        return self._tiled[key]

    def _make(self, first: int, last: int, count: int) -> Choice | None:
        segment = self._segment(first, last)
        if segment is None:
            return None
        analysis, batch = self.traced.analysis, self.traced.batch
        grid = clamped(segment, Grid(1, (count, count)))
        if count > 1 and max(grid.spatial) < count:
            return None
        plan = plan_segment(analysis, segment, grid)
        scratch = max(phase_scratch(phase, batch) for phase in plan.phases)
        waits = sum(t.num_bytes(batch) for t in segment.exits)
        grads = sum(t.num_bytes(batch) for t in (*segment.grad_entries, *segment.grad_exits, *segment.reductions))
        cost = sum(phase_cost(analysis, phase, batch) for phase in plan.phases)
        return Choice(first, last, grid, waits, scratch + grads, cost)


def _keep(front: list[Path], new: Path) -> None:
    """Add a path unless one with less waiting costs no more; drop those that it beats."""
    if any(old.waits <= new.waits and old.cost <= new.cost for old in front):
        return
    front[:] = [old for old in front if not (new.waits <= old.waits and new.cost <= old.cost)]
    front.append(new)
