"""What has to exist whole between the loops of a segment with barriers, and from when to when.

What a later loop needs of an earlier one is stored or computed again. Any set of stored tensors is correct; they
differ in memory and time:

- What is dear to compute (convolutions, pools, their gradients) and needed in a later loop is stored.
- What is cheap is computed again, unless that would read more bytes than it has itself: else the sums of a residual
  network, cheap from end to end, would be computed from all blocks before them, in each block.
- Forward tensors that wait for the backward phase may be dropped after their last forward reader: the first backward
  loop that needs them computes them again, from the *checkpoints* that stay, and stores them for the loops after it.
- Before a backward loop, what several tensors that end there are read for is made one tensor, if that is smaller.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rewriters.analysis.autodiff_roles import reads_shape_only
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.device import properties
from rewriters.ir.graph import Node, Tensor
from rewriters.rules.registry import find_rule
from rewriters.tiling.barrier_levels import BarrierLevels, MomentPair

__all__: list[str] = []

FINER = 0.85
"""Part of the bytes of one set of checkpoints that the next one is to need."""

LEAST_FREED = 1 / 2
"""Part of the bytes of the largest tensor below which it is not worth a loop to have them free."""

MAX_ROUNDS = 20
"""Attempts to find a set of stored tensors of which each is needed."""


@dataclasses.dataclass
class LoopSpec:
    """What one loop makes, before anything is said of tiles.

    Attributes:
        level: Loops with a smaller one have ended.
        backward: Whether it belongs to the backward phase.
        writes: Tensors that are stored.
        sums: Reductions that it makes.
        moments: Variances among them that come with their means.
        body: Operations of a turn, in topological order.
        reads: Tensors that exist whole, of which a turn takes its rows.
        device: Of what it makes.
        replaces: Operations of the graph that the loop stands for: who waited for one of them waits for the loop.
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
        """Sums that are not made together with another one."""
        apart = {node for pair in self.moments for node in (pair.mean.node, pair.variance.node)}
        return [node for node in self.sums if node not in apart]


@dataclasses.dataclass(frozen=True)
class LiveRange:
    """The loops in which a stored tensor is wanted, all stored tensors being there.

    Attributes:
        made: Level of the loop that makes it first.
        forward: Last level of the forward phase that reads it; `made` if none does.
        backward: Last level of all that reads it; `made` if none does.
    """

    made: int
    forward: int
    backward: int


class CheckpointSelection:
    """Finds what to store, and the loops that come of it.

    Attributes:
        exits: Tensors that an operation outside reads.
        stored: All tensors that exist whole at some time.
        needs: When they are wanted.
    """

    def __init__(
        self,
        analysis: GraphAnalysis,
        roles: BarrierLevels,
        batch: int,
        extra: frozenset[Tensor] = frozenset(),
        cheap_flops: float = 0.0,
    ) -> None:
        """Find them.

        Args:
            analysis: Of the graph.
            roles: Of its operations.
            batch: Images where the graph does not say.
            extra: Tensors that are stored in any case.
            cheap_flops: Operations that take no more for each byte that they make are cheap to run again, whatever
                their rules say.
        """
        self._analysis = analysis
        self._cheap_flops = cheap_flops
        self._roles = roles
        self._batch = batch
        self._position = analysis.position
        self._made = {node.out(index) for node in roles.tiled for index in range(len(node.outputs))}
        self._storable = {t for t in self._made if analysis.entries_per_image(t) == 1}
        """Where pixels have been made images, the images of a turn do not lie together."""
        self._sums = set(roles.sums)
        self._readers = self._find_readers()
        self._extra = (extra & self._storable) | self._compared()
        self.exits = self._find_exits()
        self._last_forward = max(
            (roles.level[n] for n in (*roles.tiled, *roles.sums) if n not in analysis.backward), default=-1
        )
        self.stored = self._find_stored()
        self.needs = self._find_needs()
        self._found_narrowest: dict[tuple[Any, ...], list[Tensor]] = {}

    # What to store -------------------------------------------------------------------------------------------

    def _find_readers(self) -> dict[Tensor, list[Node]]:
        """Tiled operations and sums by the images that they read."""
        readers: dict[Tensor, list[Node]] = {}
        for node in (*self._roles.tiled, *self._roles.sums):
            for tensor in self._roles.operands(node):
                readers.setdefault(tensor, []).append(node)
        return readers

    def _compared(self) -> set[Tensor]:
        """Numbers that are compared with others, such as all with the largest: made again they may differ in a bit."""
        compared = {"Equal", "NotEqual", *properties.comparing_kernels()}
        readers = (node for node in self._roles.tiled if node.op in compared)
        operands = {t for node in readers for t in self._roles.operands(node)}
        return {t for t in operands & self._storable if t.dtype.is_floating}

    def _find_exits(self) -> set[Tensor]:
        inside = {*self._roles.tiled, *self._roles.sums}
        results = set(self._analysis.graph.outputs)

        def is_exit(tensor: Tensor) -> bool:
            readers = [r for r, _ in self._analysis.consumers.get(tensor, ()) if not reads_shape_only(r)]
            return tensor in results or any(reader not in inside for reader in readers)

        return {tensor for tensor in self._made if is_exit(tensor)}

    def _find_stored(self) -> set[Tensor]:
        """A fixpoint: what is stored decides in which loops operations run again, and that what has to be stored."""
        level = self._roles.level
        always = self.exits | self._extra
        stored = always | {t for t in self._storable if not self._is_cheap(t)}
        seen = []
        for _ in range(MAX_ROUNDS):
            last = self._last_needed(stored)
            wanted = {t for t in stored if t in always or last.get(t, -1) > level[t.node]}
            wanted |= self._not_worth_it(wanted, last)
            if wanted in seen:
                break
            seen.append(wanted)
            stored = wanted
        return stored

    def _is_cheap(self, tensor: Tensor) -> bool:
        rule = find_rule(tensor.node)
        if rule.cheap:
            return True
        flops = rule.flops(self._analysis.view(tensor.node), self._batch)
        return 0 < flops <= self._cheap_flops * tensor.num_bytes(self._batch)

    def _last_needed(self, stored: set[Tensor]) -> dict[Tensor, int]:
        """The last level at which each tensor is wanted; below zero if nobody wants it."""
        last: dict[Tensor, int] = {}
        for node in reversed(self._roles.tiled):
            for index in range(len(node.outputs)):
                readers = self._readers.get(node.out(index), ())
                last[node.out(index)] = max((self._run_last(r, stored, last) for r in readers), default=-1)
        return last

    def _run_last(self, node: Node, stored: set[Tensor], last: dict[Tensor, int]) -> int:
        """The last level at which an operation runs; below zero if nobody wants what it makes."""
        own = self._roles.level[node]
        if node in self._sums:
            return own
        outs = [node.out(index) for index in range(len(node.outputs))]
        return max(own if t in stored else -1 if last[t] < 0 else max(own, last[t]) for t in outs)

    def _not_worth_it(self, stored: set[Tensor], last: dict[Tensor, int]) -> set[Tensor]:
        """Cheap tensors that would be computed from more bytes than they have."""
        sources: dict[Tensor, frozenset[Tensor]] = {}
        found: set[Tensor] = set()
        for node in self._roles.tiled:
            operands = self._roles.operands(node)
            read = frozenset().union(*(sources.get(t, frozenset((t,))) for t in operands))
            for index in range(len(node.outputs)):
                tensor = node.out(index)
                crosses = last.get(tensor, -1) > self._roles.level[node]
                size = tensor.num_bytes(self._batch)
                if tensor in self._storable - stored and crosses and sum(t.num_bytes(self._batch) for t in read) > size:
                    found.add(tensor)
                whole = tensor in stored or tensor in found
                sources[tensor] = frozenset((tensor,)) if whole else read
        return found

    def _find_needs(self) -> dict[Tensor, LiveRange]:
        """Who wants the stored tensors, if all of them are there."""
        last: dict[Tensor, list[int]] = {}
        for level, roots in self._roots(self.stored).items():
            _, reads = self._slice(roots, functools.partial(self._is_before, level=level))
            for tensor in reads:
                last.setdefault(tensor, []).append(level)
        needs = {}
        for tensor in self.stored:
            made = self._roles.level[tensor.node]
            forward = [at for at in last.get(tensor, ()) if at <= self._last_forward]
            needs[tensor] = LiveRange(made, max([made, *forward]), max([made, *last.get(tensor, ())]))
        return needs

    def _is_before(self, tensor: Tensor, level: int) -> bool:
        return tensor in self.stored and self._roles.level[tensor.node] < level

    # Loops ---------------------------------------------------------------------------------------------------

    def _roots(self, stored: Iterable[Tensor]) -> dict[int, list[Node]]:
        """What has to be made, by level in order."""
        roots: dict[int, dict[Node, None]] = {}
        for node in (*self._analysis.sorted({t.node for t in stored}), *self._roles.sums):
            roots.setdefault(self._roles.level[node], {})[node] = None
        return {level: list(roots[level]) for level in sorted(roots)}

    def _slice(self, roots: Sequence[Node], is_there: Callable[[Tensor], bool]) -> tuple[list[Node], list[Tensor]]:
        """Operations that make the roots, and whole tensors that they read."""
        body: set[Node] = set()
        reads: dict[Tensor, None] = {}
        stack = list(roots)
        while stack:
            node = stack.pop()
            if node in body:
                continue
            body.add(node)
            for tensor in self._roles.operands(node):
                if tensor not in self._made or is_there(tensor):
                    reads[tensor] = None
                else:
                    stack.append(tensor.node)
        return self._analysis.sorted(body), self._by_position(reads)

    def _by_position(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        return sorted(tensors, key=lambda t: (self._position[t.node], t.index))

    def loop_specs(self, kept: set[Tensor] | None = None) -> list[LoopSpec]:
        """The loops in the order they run in.

        Args:
            kept: Forward tensors that wait for the backward phase where they are; all if it is not given. Others are
                dropped, and made again when they are needed.
        """
        gone = set() if kept is None else {t for t in self.droppable() if t not in kept}
        found: list[LoopSpec] = []
        for level, roots in self._roots(self.stored).items():

            def is_there(tensor: Tensor, level: int = level) -> bool:
                return not (level > self._last_forward and tensor in gone) and self._is_before(tensor, level)

            for own in self._apart(roots, is_there):
                if level > self._last_forward:
                    found += self._backward(level, own, gone, is_there)
                else:
                    found.append(self._own(level, own, is_there))
        homes: dict[str, list[LoopSpec]] = {}
        for loop in found:
            homes.setdefault(loop.device, []).append(loop)
        for node in (*self._roles.tiled, *self._roles.sums):
            if found:
                loops = homes.get(node.device, found)
                number = bisect.bisect_right([loop.level for loop in loops], self._roles.level[node]) - 1
                loops[max(number, 0)].replaces.append(node)
        return found

    def _apart(self, roots: Sequence[Node], is_there: Callable[[Tensor], bool]) -> list[list[Node]]:
        """What replicas make is made by loops of their own: devices that share nothing."""
        by_device: dict[str, list[Node]] = {}
        for node in roots:
            by_device.setdefault(node.device, []).append(node)
        bodies = [self._slice(own, is_there)[0] for own in by_device.values()]
        if len({node for body in bodies for node in body}) < sum(map(len, bodies)):
            return [list(roots)]
        return list(by_device.values())

    def _own(self, level: int, roots: list[Node], is_there: Callable[[Tensor], bool]) -> LoopSpec:
        """The loop that makes the roots."""
        body, reads = self._slice(roots, is_there)
        return self._loop(level, [t for t in self._outputs(roots) if t in self.stored], roots, body, reads)

    def _backward(
        self, level: int, roots: list[Node], gone: set[Tensor], is_there: Callable[[Tensor], bool]
    ) -> Iterator[LoopSpec]:
        """The loop of a backward level, and before it those that let go of tensors and that make dropped ones again."""
        gathered: set[Tensor] = set()

        def is_there_now(tensor: Tensor) -> bool:
            return tensor in gathered or is_there(tensor)

        for tensor in self._narrowest(level, roots):
            yield from self._again(level, [tensor.node], gone, is_there_now)
            body, reads = self._slice([tensor.node], is_there_now)
            yield self._loop(level, [tensor], [tensor.node], body, reads)
            gathered.add(tensor)
        yield from self._again(level, roots, gone, is_there_now)
        yield self._own(level, roots, is_there_now)

    def _narrowest(self, level: int, roots: Sequence[Node]) -> list[Tensor]:
        """Tensors to make before the loop of a level, each of several larger ones that nobody reads after that.

        Such as what goes into the gradients of a convolution, made of its results and of the gradient behind the
        normalisation that follows: the loop has one tensor to read with a halo instead of two, and room for larger
        turns.
        """
        key = (level, *roots)
        if key not in self._found_narrowest:
            self._found_narrowest[key] = self._find_narrowest(level, roots)
        return self._found_narrowest[key]

    def _find_narrowest(self, level: int, roots: Sequence[Node]) -> list[Tensor]:
        """One after another, that which lets go of most first."""
        found: list[Tensor] = []
        least = LEAST_FREED * max((t.num_bytes(self._batch) for t in self.stored), default=0)
        while True:

            def is_there(tensor: Tensor) -> bool:
                return tensor in found or self._is_before(tensor, level)

            body, reads = self._slice(roots, is_there)
            if self._ending(reads, level) < least:  # Most levels of a deep network: the rest takes time.
                return self._by_position(found)
            dear = {t for node in body if not find_rule(node).cheap for t in self._roles.operands(node)}
            made = [t for t in self._outputs(body) if t in dear & self._storable and t.node not in roots]
            freed = {t: self._freed(t, level, roots, is_there) for t in made}
            best = max(made, key=freed.__getitem__, default=None)
            if best is None or freed[best] < max(least, 1):
                return self._by_position(found)
            found.append(best)

    def _freed(self, tensor: Tensor, level: int, roots: Sequence[Node], is_there: Callable[[Tensor], bool]) -> int:
        """Bytes that are free while the loop of a level runs if a tensor is made before; its own taken off."""
        body, reads = self._slice([tensor.node], is_there)
        others, still_read = self._slice(roots, lambda t: t == tensor or is_there(t))
        if any(not find_rule(node).cheap for node in set(body) & set(others)):
            return 0
        return self._ending(set(reads) - set(still_read), level) - tensor.num_bytes(self._batch)

    def _ending(self, tensors: Iterable[Tensor], level: int) -> int:
        """Bytes of those that no later level reads."""
        ended = (t for t in tensors if t in self.needs and self.needs[t].backward <= level)
        return sum(t.num_bytes(self._batch) for t in ended)

    def _again(
        self, level: int, roots: Sequence[Node], gone: set[Tensor], is_there: Callable[[Tensor], bool]
    ) -> Iterator[LoopSpec]:
        """Loops that make dropped tensors again which a backward loop needs, and take them out of `gone`.

        One for each of the forward loops that made them: in a single loop a turn would pay for the halos of all of
        these convolutions together. Only a tensor that nobody wants later, made of what is there, is left to the turns.
        """
        body, _ = self._slice(roots, is_there)
        missing = [t for t in self._outputs(body) if t in gone]
        for made in sorted({self.needs[t].made for t in missing}):
            tensors = [t for t in missing if self.needs[t].made == made]
            if made == max(self.needs[t].made for t in missing):
                tensors = [t for t in tensors if self.needs[t].backward > level]
            if not tensors:
                continue
            nodes = list(dict.fromkeys(t.node for t in tensors))
            inner, reads = self._slice(nodes, is_there)
            gone.difference_update(tensors)
            yield self._loop(level, tensors, nodes, inner, reads)

    def _outputs(self, nodes: Iterable[Node]) -> list[Tensor]:
        return [node.out(index) for node in nodes if node not in self._sums for index in range(len(node.outputs))]

    def _loop(
        self, level: int, writes: list[Tensor], roots: list[Node], body: list[Node], reads: list[Tensor]
    ) -> LoopSpec:
        sums = [node for node in roots if node in self._sums]
        moments = [self._roles.moments[node] for node in sums if node in self._roles.moments]
        loop = LoopSpec(level, level > self._last_forward, writes, sums, moments, body, reads, roots[0].device)
        plain = set(loop.plain_sums)
        loop.body = [node for node in body if node not in self._sums or node in plain]
        return loop

    # Checkpoints ---------------------------------------------------------------------------------------------

    def droppable(self) -> set[Tensor]:
        """Forward tensors that the backward phase can make again."""
        fixed = self.exits | self._extra
        return {t for t, need in self.needs.items() if t not in fixed and need.made <= self._last_forward}

    def checkpoints(self) -> list[set[Tensor]]:
        """Sets of forward tensors to keep, the first one all; of each of the next the backward phase needs less.

        Between two checkpoints everything is made again, and is there at once. What is alive then is that, and the
        checkpoints before it: those after it are not needed any more.
        """
        steps = self._steps()
        found = [self.droppable()]
        most = sum(step.made_again for step in steps)
        while most > 0 and (kept := self._cut(steps, most)) is not None:
            if kept not in found:
                found.append(kept)
            most = int(most * FINER)
        return found

    def _steps(self) -> list[_ForwardLoop]:
        """The forward loops, as far as checkpoints are concerned."""
        dropped = [t for t in self.droppable() if self.needs[t].backward > self._last_forward]
        return [
            _ForwardLoop(
                frozenset(t for t, need in self.needs.items() if need.made <= level < need.forward),
                sum(t.num_bytes(self._batch) for t in dropped if self.needs[t].made == level),
            )
            for level in range(self._last_forward + 1)
        ]

    def _cut(self, steps: list[_ForwardLoop], most: int) -> set[Tensor] | None:
        """The checkpoints of least bytes with which no more than `most` are ever needed, by dynamic programming."""
        sizes = [sum(t.num_bytes(self._batch) for t in step.frontier) for step in steps]
        total = [0, *itertools.accumulate(step.made_again for step in steps)]
        kept: list[int | None] = [0]  # With a cut after so many loops: bytes of all checkpoints so far.
        cut_before = [0]
        for end in range(1, len(steps) + 1):
            options = [
                (before + (sizes[end - 1] if end < len(steps) else 0), begin)
                for begin, before in enumerate(kept)
                if before is not None and before + total[end] - total[begin] <= most
            ]
            size, begin = min(options, default=(None, 0))
            kept.append(size)
            cut_before.append(begin)
        if kept[-1] is None:
            return None
        end = last = cut_before[-1]
        found = {t for t, need in self.needs.items() if need.made >= last}  # Wanted at once.
        while end > 0:
            found |= steps[end - 1].frontier
            end = cut_before[end]
        return found & self.droppable()


@dataclasses.dataclass(frozen=True)
class _ForwardLoop:
    """A forward loop.

    Attributes:
        frontier: Tensors that later forward loops read: with them the backward phase can begin again after it.
        made_again: Bytes of what it makes for the backward phase.
    """

    frontier: frozenset[Tensor]
    made_again: int
