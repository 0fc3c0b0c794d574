"""Selects the tensors that are stored between the tile loops of a segment with barriers, and for how long.

A tensor that a loop needs of an earlier one is stored in full size or recomputed. Any set of stored tensors is correct;
sets differ in memory and time:

- The results of expensive ops (convolutions, pools, their gradients) that a later loop needs are stored.
- The results of cheap ops are recomputed, unless the recomputation reads more bytes than the result has. Otherwise each
  block of a residual network would recompute the sums of all blocks before it.
- Forward tensors that are saved for the backward phase may be dropped after their last forward consumer. The first
  backward loop that needs them recomputes them from the *checkpoints*, and stores them for the loops after it.
- Before a backward loop, several tensors that no later loop reads may be replaced by one tensor computed from them, if
  it is smaller.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rewriters.analysis.autodiff_roles import reads_shape_only
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.ir.graph import Node, Tensor
from rewriters.rules.registry import find_rule
from rewriters.tiling.barrier_levels import BarrierLevels, MomentPair

__all__: list[str] = []

MIN_FREED_RATIO = 1 / 2
"""Bytes that an additional loop has to free, over the bytes of the largest stored tensor."""

MAX_ROUNDS = 20
"""Iterations of the fixpoint of stored tensors."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LoopSpec:
    """A loop before its tiles are planned.

    Attributes:
        level: Level of the loop; loops of smaller levels have ended.
        backward: Whether the loop belongs to the backward phase.
        writes: Tensors that the loop stores.
        sums: Reductions of the loop.
        moments: Variances among the reductions that are computed together with their means.
        body: Ops of an iteration, in topological order.
        reads: Full-size tensors that an iteration slices.
        device: Device of the results.
        replaces: Ops of the graph that the loop replaces; control edges from them start at the loop.
    """

    level: int
    backward: bool
    writes: list[Tensor]
    sums: list[Node]
    moments: list[MomentPair]
    body: list[Node]
    reads: list[Tensor]
    device: str = ""
    replaces: list[Node] = dataclasses.field(default_factory=list)

    @property
    def plain_sums(self) -> list[Node]:
        """Reductions that are not computed together with another one."""
        merged = {node for pair in self.moments for node in (pair.mean.node, pair.variance.node)}
        return [node for node in self.sums if node not in merged]


_level = operator.attrgetter("level")


def _contents(spec: LoopSpec) -> tuple[Any, ...]:
    """Return a key that loops of one selection share if they are equal."""
    return spec.level, *spec.writes, None, *spec.sums, None, *spec.body, None, *spec.reads, None, *spec.replaces


@dataclasses.dataclass(frozen=True)
class LiveRange:
    """Levels at which a stored tensor is alive if no stored tensor is dropped.

    Attributes:
        producer: Level of the loop that computes the tensor first.
        forward: Last forward level that reads it; `producer` if none does.
        backward: Last level that reads it; `producer` if none does.
    """

    producer: int
    forward: int
    backward: int


class CheckpointSelection:
    """Selects stored tensors and checkpoints, and the loops that follow from them.

    Attributes:
        exits: Tensors that an untiled op reads.
        stored: Tensors that exist in full size at some time.
        live_ranges: Live ranges of the stored tensors.
    """

    def __init__(
        self,
        analysis: GraphAnalysis,
        roles: BarrierLevels,
        *,
        batch: int,
        extra: frozenset[Tensor] = frozenset(),
        cheap_flops: float = 0.0,
        wanted: frozenset[Tensor] | None = None,
    ) -> None:
        """Select the stored tensors.

        Args:
            analysis: Analysis of the graph.
            roles: Sorts and levels of its ops.
            batch: Batch size where the graph leaves it open.
            extra: Tensors that are stored in any case.
            cheap_flops: Flops per byte of a result up to which an op counts as cheap, whatever its rule says.
            wanted: Tensors to store beside those that have to be; by default the results of expensive ops that a later
                loop reads, and of cheap ones that are smaller than what they are computed from.
        """
        self._analysis = analysis
        self._cheap_flops = cheap_flops
        self._wanted = wanted
        self._roles = roles
        self._batch = batch
        self._position = analysis.position
        self._tiled_results = {node.out(index) for node in roles.tiled for index in range(len(node.outputs))}
        # The images of an iteration are not contiguous in a folded tensor (space to batch).
        self._storable = {t for t in self._tiled_results if analysis.entries_per_image(t) == 1}
        self._sums = set(roles.sums)
        self._consumers = self._find_consumers()
        self._extra = (extra | roles.read_whole) & self._storable
        self._compared = self._compared_tensors()
        self.exits = self._find_exits()
        self._last_forward = max(
            (roles.level[n] for n in (*roles.tiled, *roles.sums) if n not in analysis.backward), default=-1
        )
        self.stored = self._find_stored()
        self.live_ranges = self._find_live_ranges()
        self._gathered: dict[tuple[Any, ...], list[Tensor]] = {}
        self._loops: dict[tuple[Any, ...], LoopSpec] = {}

    # Stored tensors ------------------------------------------------------------------------------------------

    def _find_consumers(self) -> dict[Tensor, list[Node]]:
        """Return the tiled ops and reductions that read each image."""
        consumers: dict[Tensor, list[Node]] = {}
        for node in (*self._roles.tiled, *self._roles.sums):
            for tensor in self._roles.operands(node):
                consumers.setdefault(tensor, []).append(node)
        return consumers

    def _compared_tensors(self) -> set[Tensor]:
        """Return operands of comparisons, such as `x == max(x)`: recomputed values may differ in the last bit."""
        comparisons = {"Equal", "NotEqual", *self._analysis.graph.device.comparing_kernels}
        consumers = (node for node in self._roles.tiled if node.op in comparisons)
        operands = {t for node in consumers for t in self._roles.operands(node)}
        return {t for t in operands & self._storable if t.dtype.is_floating}

    def _find_exits(self) -> set[Tensor]:
        inside = {*self._roles.tiled, *self._roles.sums}
        results = set(self._analysis.graph.outputs)

        def is_exit(tensor: Tensor) -> bool:
            consumers = [node for node, _ in self._analysis.consumers.get(tensor, ()) if not reads_shape_only(node)]
            return tensor in results or any(node not in inside for node in consumers)

        return {tensor for tensor in self._tiled_results if is_exit(tensor)}

    def _find_stored(self) -> set[Tensor]:
        """Return the stored tensors: a fixpoint, because they decide in which loops ops are recomputed."""
        level = self._roles.level
        required = self.exits | self._extra
        is_wanted = self._wanted.__contains__ if self._wanted is not None else lambda t: not self._is_cheap(t)
        stored = required | self._compared | set(filter(is_wanted, self._storable))
        seen = []
        for _ in range(MAX_ROUNDS):
            last = self._last_levels(stored)
            needed = {t for t in stored | self._compared if t in required or last.get(t, -1) > level[t.node]}
            if self._wanted is None:
                needed |= self._smaller_than_sources(needed, last)
            if needed in seen:
                break
            seen.append(needed)
            stored = needed
        return stored

    def _is_cheap(self, tensor: Tensor) -> bool:
        rule = find_rule(tensor.node)
        if rule.cheap:
            return True
        flops = rule.flops(self._analysis.view(tensor.node), self._batch)
        return 0 < flops <= self._cheap_flops * tensor.num_bytes(self._batch)

    def _last_levels(self, stored: set[Tensor]) -> dict[Tensor, int]:
        """Return the last level at which each tensor is needed; negative if no op needs it."""
        last: dict[Tensor, int] = {}
        for node in reversed(self._roles.tiled):
            for index in range(len(node.outputs)):
                consumers = self._consumers.get(node.out(index), ())
                last[node.out(index)] = max((self._last_run(other, stored, last) for other in consumers), default=-1)
        return last

    def _last_run(self, node: Node, stored: set[Tensor], last: dict[Tensor, int]) -> int:
        """Return the last level at which an op runs; negative if no op needs its results."""
        level = self._roles.level[node]
        if node in self._sums:
            return level
        results = [node.out(index) for index in range(len(node.outputs))]
        return max(level if t in stored else -1 if last[t] < 0 else max(level, last[t]) for t in results)

    def _smaller_than_sources(self, stored: set[Tensor], last: dict[Tensor, int]) -> set[Tensor]:
        """Return cheap tensors that a later loop would recompute from more bytes than they have."""
        sources: dict[Tensor, frozenset[Tensor]] = {}
        small: set[Tensor] = set()
        for node in self._roles.tiled:
            operands = self._roles.operands(node)
            stored_sources = frozenset().union(*(sources.get(t, frozenset((t,))) for t in operands))
            for index in range(len(node.outputs)):
                tensor = node.out(index)
                is_candidate = tensor in self._storable and tensor not in stored
                if is_candidate and last.get(tensor, -1) > self._roles.level[node]:
                    if self._num_bytes(stored_sources) > tensor.num_bytes(self._batch):
                        small.add(tensor)
                is_stored = tensor in stored or tensor in small
                sources[tensor] = frozenset((tensor,)) if is_stored else stored_sources
        return small

    def _num_bytes(self, tensors: Iterable[Tensor]) -> int:
        return sum(tensor.num_bytes(self._batch) for tensor in tensors)

    def _find_live_ranges(self) -> dict[Tensor, LiveRange]:
        levels: dict[Tensor, list[int]] = {}
        for level, roots in self._roots(self.stored).items():
            _, reads = self._slice(roots, functools.partial(self._is_stored_before, level=level))
            for tensor in reads:
                levels.setdefault(tensor, []).append(level)
        live_ranges = {}
        for tensor in self.stored:
            producer, consumers = self._roles.level[tensor.node], levels.get(tensor, ())
            forward = [level for level in consumers if level <= self._last_forward]
            live_ranges[tensor] = LiveRange(producer, max([producer, *forward]), max([producer, *consumers]))
        return live_ranges

    def _is_stored_before(self, tensor: Tensor, level: int) -> bool:
        return tensor in self.stored and self._roles.level[tensor.node] < level

    # Loops ---------------------------------------------------------------------------------------------------

    def _roots(self, stored: Iterable[Tensor]) -> dict[int, list[Node]]:
        """Return the ops whose results have to be computed, by level in ascending order."""
        roots: dict[int, dict[Node, None]] = {}
        for node in (*self._analysis.sorted({t.node for t in stored}), *self._roles.sums):
            roots.setdefault(self._roles.level[node], {})[node] = None
        return {level: list(roots[level]) for level in sorted(roots)}

    def _slice(self, roots: Sequence[Node], is_available: Callable[[Tensor], bool]) -> tuple[list[Node], list[Tensor]]:
        """Return the ops that compute the roots, the roots included, and the full-size tensors that they read."""
        body: set[Node] = set()
        reads: dict[Tensor, None] = {}
        stack = list(roots)
        while stack:
            node = stack.pop()
            if node in body:
                continue
            body.add(node)
            for tensor in self._roles.operands(node):
                if tensor not in self._tiled_results or is_available(tensor):
                    reads[tensor] = None
                else:
                    stack.append(tensor.node)
        return self._analysis.sorted(body), self._by_position(reads)

    def _by_position(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        return sorted(tensors, key=lambda t: (self._position[t.node], t.index))

    def loop_specs(self, checkpoints: set[Tensor] | None = None) -> list[LoopSpec]:
        """Return the loops in the order in which they run; sets of checkpoints share equal loops.

        Args:
            checkpoints: Forward tensors that stay alive until the backward phase; all if `None`. The others are
                dropped, and recomputed when a backward loop needs them.
        """
        dropped = set() if checkpoints is None else {t for t in self.droppable() if t not in checkpoints}
        specs: list[LoopSpec] = []
        for level, roots in self._roots(self.stored).items():

            def is_available(tensor: Tensor, level: int = level) -> bool:
                is_dropped = level > self._last_forward and tensor in dropped
                return not is_dropped and self._is_stored_before(tensor, level)

            for device_roots in self._by_device(roots, is_available):
                if level > self._last_forward:
                    specs += self._backward_loops(level, device_roots, dropped, is_available)
                else:
                    specs.append(self._loop_of(level, device_roots, is_available))
        self._assign_replaced_ops(specs)
        return [self._loops.setdefault(_contents(spec), spec) for spec in specs]

    def _assign_replaced_ops(self, specs: list[LoopSpec]) -> None:
        """Add each op to the last loop of its device, of its level or below, which replaces it."""
        if not specs:
            return
        specs_of_device: dict[str, list[LoopSpec]] = {}
        for spec in specs:
            specs_of_device.setdefault(spec.device, []).append(spec)
        for node in (*self._roles.tiled, *self._roles.sums):
            candidates = specs_of_device.get(node.device, specs)
            number = bisect.bisect_right(candidates, self._roles.level[node], key=_level) - 1
            candidates[max(number, 0)].replaces.append(node)

    def _by_device(self, roots: Sequence[Node], is_available: Callable[[Tensor], bool]) -> list[list[Node]]:
        """Split the roots by device, for a loop on each, unless devices share ops, as replicas do not."""
        by_device: dict[str, list[Node]] = {}
        for node in roots:
            by_device.setdefault(node.device, []).append(node)
        bodies = [self._slice(device_roots, is_available)[0] for device_roots in by_device.values()]
        if len({node for body in bodies for node in body}) < sum(map(len, bodies)):
            return [list(roots)]
        return list(by_device.values())

    def _loop_of(self, level: int, roots: list[Node], is_available: Callable[[Tensor], bool]) -> LoopSpec:
        """Return the loop that computes the roots."""
        body, reads = self._slice(roots, is_available)
        return self._spec(level, [t for t in self._outputs(roots) if t in self.stored], roots, body, reads)

    def _backward_loops(
        self, level: int, roots: list[Node], dropped: set[Tensor], is_available: Callable[[Tensor], bool]
    ) -> Iterator[LoopSpec]:
        """Yield the loop of a backward level, after loops that gather tensors or recompute dropped ones.

        Args:
            level: The level.
            roots: Ops whose results the loop computes.
            dropped: Dropped tensors; the method removes those that it recomputes.
            is_available: Whether a tensor exists in full size.
        """
        gathered: set[Tensor] = set()

        def is_available_now(tensor: Tensor) -> bool:
            return tensor in gathered or is_available(tensor)

        for tensor in self._gathered_tensors(level, roots):
            yield from self._recomputation(level, [tensor.node], dropped, is_available_now)
            body, reads = self._slice([tensor.node], is_available_now)
            yield self._spec(level, [tensor], [tensor.node], body, reads)
            gathered.add(tensor)
        yield from self._recomputation(level, roots, dropped, is_available_now)
        yield self._loop_of(level, roots, is_available_now)

    def _gathered_tensors(self, level: int, roots: Sequence[Node]) -> list[Tensor]:
        """Return tensors to compute before the loop of a level, each from larger tensors that die with it.

        An example is the operand of the gradients of a convolution, computed from the results of the convolution and
        from the gradient of the normalisation after it. The loop reads one tensor with a halo instead of two, and has
        memory for larger tiles.
        """
        key = (level, *roots)
        if key not in self._gathered:
            self._gathered[key] = self._find_gathered_tensors(level, roots)
        return self._gathered[key]

    def _find_gathered_tensors(self, level: int, roots: Sequence[Node]) -> list[Tensor]:
        """Select gathered tensors greedily, the one that frees most bytes first."""
        gathered: list[Tensor] = []
        min_freed = MIN_FREED_RATIO * max((t.num_bytes(self._batch) for t in self.stored), default=0)
        while True:

            def is_available(tensor: Tensor) -> bool:
                return tensor in gathered or self._is_stored_before(tensor, level)

            body, reads = self._slice(roots, is_available)
            if self._dying_bytes(reads, level) < min_freed:  # True of most levels; the code below is slow.
                return self._by_position(gathered)
            expensive = {t for node in body if not find_rule(node).cheap for t in self._roles.operands(node)}
            candidates = [t for t in self._outputs(body) if t in expensive & self._storable and t.node not in roots]
            freed = {t: self._freed_bytes(t, level, roots, is_available) for t in candidates}
            best = max(candidates, key=freed.__getitem__, default=None)
            if best is None or freed[best] < max(min_freed, 1):
                return self._by_position(gathered)
            gathered.append(best)

    def _freed_bytes(
        self, tensor: Tensor, level: int, roots: Sequence[Node], is_available: Callable[[Tensor], bool]
    ) -> int:
        """Return the bytes that the loop of a level needs less if `tensor` is computed before it."""
        body, reads = self._slice([tensor.node], is_available)
        remaining_body, remaining_reads = self._slice(roots, lambda t: t == tensor or is_available(t))
        if any(not find_rule(node).cheap for node in set(body) & set(remaining_body)):
            return 0
        return self._dying_bytes(set(reads) - set(remaining_reads), level) - tensor.num_bytes(self._batch)

    def _dying_bytes(self, tensors: Iterable[Tensor], level: int) -> int:
        """Return the bytes of those tensors that no later level reads."""
        ranges = self.live_ranges
        return self._num_bytes(t for t in tensors if t in ranges and ranges[t].backward <= level)

    def _recomputation(
        self, level: int, roots: Sequence[Node], dropped: set[Tensor], is_available: Callable[[Tensor], bool]
    ) -> Iterator[LoopSpec]:
        """Yield loops that recompute dropped tensors which a backward loop needs, and remove them from `dropped`.

        There is one for each forward loop that computed them. In a single loop, an iteration would pay for the halos
        of all their convolutions. The backward loop itself recomputes tensors of the last of these forward loops that
        no later level reads.
        """
        body, _ = self._slice(roots, is_available)
        missing = [t for t in self._outputs(body) if t in dropped]
        producers = sorted({self.live_ranges[t].producer for t in missing})
        for producer in producers:
            tensors = [t for t in missing if self.live_ranges[t].producer == producer]
            if producer == producers[-1]:
                tensors = [t for t in tensors if self.live_ranges[t].backward > level]
            if not tensors:
                continue
            nodes = list(dict.fromkeys(t.node for t in tensors))
            inner, reads = self._slice(nodes, is_available)
            dropped.difference_update(tensors)
            yield self._spec(level, tensors, nodes, inner, reads)

    def _outputs(self, nodes: Iterable[Node]) -> list[Tensor]:
        return [node.out(index) for node in nodes if node not in self._sums for index in range(len(node.outputs))]

    def _spec(
        self, level: int, writes: list[Tensor], roots: list[Node], body: list[Node], reads: list[Tensor]
    ) -> LoopSpec:
        sums = [node for node in roots if node in self._sums]
        moments = [self._roles.moments[node] for node in sums if node in self._roles.moments]
        merged = {node for pair in moments for node in (pair.mean.node, pair.variance.node)}
        return LoopSpec(
            level=level,
            backward=level > self._last_forward,
            writes=writes,
            sums=sums,
            moments=moments,
            body=[node for node in body if node not in self._sums or (node in sums and node not in merged)],
            reads=reads,
            device=roots[0].device,
        )

    # Checkpoints ---------------------------------------------------------------------------------------------

    def droppable(self) -> set[Tensor]:
        """Return the forward tensors that the backward phase can recompute."""
        required = self.exits | self._extra | self._compared
        ranges = self.live_ranges.items()
        return {t for t, live_range in ranges if t not in required and live_range.producer <= self._last_forward}
