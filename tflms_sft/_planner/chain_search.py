"""A component as a chain of blocks, and the cheapest way through it within a budget.

Between two cuts the blocks either stay as they are (their activations wait for the backward pass) or
lie in a segment with some number of tiles (its exit waits, and every turn recomputes). Along the chain,
bytes that wait add up. The cheapest way is a shortest path over (bytes waiting, time) pairs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterator

import numpy as np

from rewriters.analysis.autodiff_roles import reads_shape_only
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.device.kernel_scratch import op_scratch
from rewriters.device.peak_memory import concurrent_scratch
from rewriters.errors import NotTileableError
from rewriters.ir.graph import Node, Tensor
from rewriters.rules.registry import TileKind, find_rule
from rewriters.tiling.ft_segments import TileableComponent, try_segment
from tflms_sft._planner.segment_tilings import BlockChoice, EstimateCache, SegmentTilings, tilings
from tflms_sft._planner.traced_step import TracedStep

MAX_CUTS = 8
"""Most places where a segment may end; in a longer network they are spread over what it keeps."""

MOST_UNITED = 80
"""Forward operations of a segment that goes past a cut. Where as many lie between two cuts already, what one more
tensor takes that waits is little, and what longer halos take is much.
"""


@dataclasses.dataclass(frozen=True)
class Path:
    """Choices from the start of a component up to a cut."""

    waits: int
    cost: float
    choices: tuple[BlockChoice, ...]

    def followed_by(self, choice: BlockChoice) -> Path:
        """The path up to the end of what is chosen."""
        return Path(self.waits + choice.waits, self.cost + choice.cost, (*self.choices, choice))


class Chain:
    """One component as a chain of blocks."""

    def __init__(self, traced: TracedStep, component: TileableComponent) -> None:
        self.traced = traced
        self.component = component
        self.bounds = self._bounds()
        self._known = EstimateCache()
        self._tiled: dict[tuple[int, int], list[SegmentTilings]] = {}
        self._plain: dict[tuple[int, int], BlockChoice] = {}
        self._rest: dict[int, float] = {}
        self._positions: dict[Node, float] | None = None

    def _bounds(self) -> list[int]:
        """Where segments may begin and end: `MAX_CUTS` of the component's cuts.

        First those that keep less than the cuts on both sides, such as pools; then, of each stretch of
        the network that keeps about as much for the backward pass, the one that keeps least.
        """
        analysis, batch, component = self.traced.analysis, self.traced.batch, self.component
        size = len(component.nodes)
        inner = [cut for cut in component.cuts if cut < size - 1]
        # What nobody waits for, such as a convolution before its bias, would wait as the entry of a segment.
        inner = [cut for cut in inner if self._saved(component.cut_tensor(analysis, cut).node)] or inner
        kept = {cut: component.cut_tensor(analysis, cut).num_bytes(batch) for cut in inner}
        # Of neighbours that keep the same amount the first and the last are mostly enough: the last leaves more to
        # recompute, the first less for rows to hand on. Not if all there is are blocks of the same size.
        ends = [
            cut
            for i, cut in enumerate(inner)
            if 0 in (i, i + 1 - len(inner)) or not kept[inner[i - 1]] == kept[cut] == kept[inner[i + 1]]
        ]
        around = [np.inf, *(kept[cut] for cut in ends), np.inf]
        lows = [c for i, c in enumerate(ends) if around[i] >= kept[c] <= around[i + 2]]
        own = np.array([sum(t.num_bytes(batch) for t in self._saved(node)) for node in component.nodes])
        before = np.cumsum(own) - own
        # Of as many blocks each, if these keep the same: what is known of one stretch is then known of all.
        block = max(int(np.median(np.diff(before[inner]))), 1) if len(inner) > 1 else 1
        most = -(-int(before[-1] + 1) // (MAX_CUTS * block)) * block
        stretches: dict[int, int] = {}
        for cut in (*ends, *inner):
            stretch = int(before[cut] // most)
            stretches[stretch] = min(stretches.get(stretch, cut), cut, key=kept.__getitem__)
        ranked = [*sorted(lows, key=kept.__getitem__), *sorted(stretches.values(), key=kept.__getitem__)]
        return [0, *(cut + 1 for cut in sorted(list(dict.fromkeys(ranked))[:MAX_CUTS])), size]

    def _saved(self, node: Node) -> list[Tensor]:
        """Outputs of a forward op that wait for the backward pass."""
        analysis = self.traced.analysis
        outputs = [node.out(index) for index in range(len(node.outputs))]
        return [t for t in outputs if any(r in analysis.backward for r, _ in analysis.consumers.get(t, ()))]

    def cheapest(self, budget: int) -> Path | None:
        """The cheapest path of which every block fits.

        Paths grow in the order of what they cost at least (A*, P. E. Hart, N. J. Nilsson and B. Raphael, "A Formal
        Basis for the Heuristic Determination of Minimum Cost Paths", 1968), so that few ways to tile are planned: the
        rest of a path costs no less than its blocks do at best, nor a tiling than its loops do (`Costs.least`). Several
        tiles may leave out rows that no result needs, which convolutions without padding and with strides have: of
        two paths that differ by no more than those the dearer may be returned.
        """
        end = self.bounds[-1]
        least_waiting: dict[int, int] = {}
        order = itertools.count()
        queue: list[tuple[float, int, Path, int, int | None]] = [(0.0, next(order), Path(0, 0.0, ()), 0, None)]
        while queue:
            _, _, path, first, last = heapq.heappop(queue)
            if last is None:
                if first == end:
                    return path
                if path.waits >= least_waiting.get(first, path.waits + 1):
                    continue
                least_waiting[first] = path.waits
                found = list(self._extended(path, first, budget))
            else:
                tilings = (tiles.fitting(budget - path.waits) for tiles in self._tilings(first, last))
                found = [(path.followed_by(choice), last, None) for choice in itertools.chain(*tilings)]
            for new, at, following in found:
                least = self._least(new, at, following, budget)
                heapq.heappush(queue, (least, next(order), new, at, following))
        return None

    def _extended(self, path: Path, first: int, budget: int) -> Iterator[tuple[Path, int, int | None]]:
        """Each with where it is and, if the blocks from there are still to be tiled, where those end."""
        for last in self.bounds[self.bounds.index(first) + 1 :]:
            plain = self._plain_choice(first, last)
            if path.waits + plain.waits + plain.needs <= budget:
                yield path.followed_by(plain), last, None
            if self._tilings(first, last):
                yield path, first, last

    def _least(self, path: Path, at: int, last: int | None, budget: int) -> float:
        """Least cost of all paths that go on from one; `last` as for `_extended`."""
        cost = path.cost
        if last is not None:
            cost += self._tilings(at, last)[0].least_cost(budget - path.waits)
            at = last
        return cost if at == self.bounds[-1] else cost + self._least_cost(at)

    def _least_cost(self, first: int) -> float:
        """Least cost of the blocks from one on, whole or in tiles."""
        if first not in self._rest:
            nodes = (*self.component.nodes[first:], *self._backward(first, self.bounds[-1]))
            self._rest[first] = self.traced.costs.lower_bound.step(nodes)
        return self._rest[first]

    def lowest(self) -> int:
        """Bytes without which no choice does."""
        low, high = 1.0, 4.0 * max(self._plain_choice(self.bounds[0], self.bounds[-1]).waits, 1)
        while high > 1.01 * low:
            middle = math.sqrt(low * high)
            if self.cheapest(int(middle)) is None:
                low = middle
            else:
                high = middle
        return int(high)

    def _plain_choice(self, first: int, last: int) -> BlockChoice:
        if (first, last) not in self._plain:
            analysis, batch = self.traced.analysis, self.traced.batch
            nodes = self.component.nodes[first:last]
            backward = self._backward(first, last)
            waits = sum(tensor.num_bytes(batch) for node in nodes for tensor in self._saved(node))
            made = [node.out(index) for node in (*nodes, *backward) for index in range(len(node.outputs))]
            # What comes back from behind the blocks is there, too.
            made += [tensor for node in backward for tensor in node.inputs if tensor.node in analysis.backward]
            pairs = concurrent_scratch({node: op_scratch(node, batch) for node in backward}, backward)
            scratch = max((*map(sum, pairs.values()), *(op_scratch(node, batch) for node in nodes)))
            # Two gradients at once, and both kernels of a convolution.
            needs = 2 * max(tensor.num_bytes(batch) for tensor in made) + scratch
            costs = self.traced.costs.step((*nodes, *backward))
            self._plain[first, last] = BlockChoice(first, last, None, waits, needs, costs)
        return self._plain[first, last]

    def _backward(self, first: int, last: int) -> list[Node]:
        """Backward ops of blocks."""
        if self._positions is None:
            self._positions = backward_positions(self.traced.analysis, self.component)
        return [node for node, position in self._positions.items() if first <= position < last]

    def _tilings(self, first: int, last: int) -> list[SegmentTilings]:
        """Ways to tile the blocks; none if they are no segment."""
        if (first, last) not in self._tiled:
            found: list[SegmentTilings] = []
            if last - first > MOST_UNITED and self.bounds.index(last) > self.bounds.index(first) + 1:
                return found
            with contextlib.suppress(NotTileableError):
                segment = try_segment(self.traced.analysis, self.component, range(first, last), set(), "candidate")
                found = tilings(self.traced, segment, (first, last), self._known)
            self._tiled[first, last] = found
        return self._tiled[first, last]


def backward_positions(analysis: GraphAnalysis, component: TileableComponent) -> dict[Node, float]:
    """Position in the component of the forward op that each backward op belongs to.

    A gradient goes back through the positions whose results it reads: infinity is behind the component, -1 before
    it. Sums over the image, such as the gradient of a filter, read what comes in, which lies before their op, and
    belong where the gradient is that they read.
    """
    position = {node: index for index, node in enumerate(component.nodes)}
    start = analysis.position[component.nodes[0]]
    found: dict[Node, float] = {}
    for node in analysis.order:
        if node not in analysis.backward or reads_shape_only(node):
            continue
        operands = [tensor.node for tensor in node.inputs]
        came = min((found[n] for n in operands if n in found), default=math.inf)
        read = [n for n in operands if n in analysis.data and n not in analysis.backward]
        if not read or _is_sum(analysis, node):
            found[node] = came
        else:
            elsewhere = {n: -1 if analysis.position[n] < start else math.inf for n in read if n not in position}
            found[node] = min(came, max(elsewhere.get(n, position.get(n, 0)) for n in read))
    return found


def _is_sum(analysis: GraphAnalysis, node: Node) -> bool:
    """Whether a backward op sums over images, as the gradient of a filter does."""
    view = analysis.view(node)
    with contextlib.suppress(NotTileableError):
        data = find_rule(node).data(view)
        made = [TileKind.PARTIAL if tensor.node in analysis.backward else TileKind.FULL for tensor in node.inputs]
        kinds = [kind if position in data else TileKind.INVARIANT for position, kind in enumerate(made)]
        return find_rule(node).result_kind(view, kinds) is TileKind.REDUCED
    return False
