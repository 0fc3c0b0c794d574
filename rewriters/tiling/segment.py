"""A segment: forward ops that run tile by tile, and the backward ops that go with them.

The backward part is found by dataflow. Its core are the backward ops that read an
activation inside of the segment; those activations will not exist any more.
From there it grows to a convex set, then *downward* (an op fed by the loop's
gradients moves in if then the gradient need not be made whole) and *upward* (an op
that makes the loop's incoming gradient moves in if it needs nothing from
elsewhere). Growth changes memory and time, never the result.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable

from rewriters.analysis.autodiff_roles import reads_shape_only
from rewriters.analysis.graph_analysis import GraphAnalysis, check_forward, forward_kinds
from rewriters.errors import NotTileableError
from rewriters.ir.graph import Node, Tensor, ancestors, nodes_between
from rewriters.rules.registry import TileKind, find_rule
from rewriters.tiling.checkpoint_selection import LoopSpec

__all__: list[str] = []


@dataclasses.dataclass(eq=False)
class Segment:
    """Planned as one unit: a forward loop and a backward loop.

    Attributes:
        name: For scopes and reports.
        entries: Image tensors that go in, whole; they are sliced, not recomputed.
        exits: Tensors that come out, whole; none if only the backward part needs what the forward part makes.
        forward: Forward ops in topological order.
        backward: Backward ops in topological order.
        kinds: Kind of every tensor that an op of the segment reads or makes.
        grad_entries: Gradients that the backward loop reads, whole outside.
        grad_exits: Gradients that it makes whole.
        reductions: Sums over the image that it makes (weight gradients).
        invariants: Tensors that are the same for all tiles.
        stored: Forward tensors kept whole and sliced instead of recomputed.
        notes: What a reader of the plan should know.
        loop_specs: With barriers, the loops in the order they run in; all kinds are `FULL` or `INVARIANT` then.
    """

    name: str
    entries: list[Tensor]
    exits: list[Tensor]
    forward: list[Node]
    backward: list[Node]
    kinds: dict[Tensor, TileKind]
    grad_entries: list[Tensor]
    grad_exits: list[Tensor]
    reductions: list[Tensor]
    invariants: list[Tensor]
    stored: frozenset[Tensor] = frozenset()
    notes: list[str] = dataclasses.field(default_factory=list)
    loop_specs: list[LoopSpec] = dataclasses.field(default_factory=list)

    @property
    def available(self) -> set[Tensor]:
        """Forward tensors that exist whole when the backward loop runs."""
        return {*self.entries, *self.exits, *self.stored}


def forward_ops(analysis: GraphAnalysis, entries: Iterable[Tensor], exits: Iterable[Tensor]) -> set[Node]:
    """Ops on a data path from an entry to an exit, entries' producers excluded."""
    entries = set(entries)
    above: set[Node] = set()

    def value_readers(tensor: Tensor) -> list[Node]:
        return [r for r, p in analysis.consumers.get(tensor, ()) if not reads_shape_only(r)]

    stack = [reader for entry in entries for reader in value_readers(entry)]
    while stack:
        node = stack.pop()
        if node in above or node in analysis.backward:
            continue
        above.add(node)
        for index in range(len(node.outputs)):
            if node.out(index) not in entries:
                stack.extend(value_readers(node.out(index)))
    found: set[Node] = set()
    stack = [tensor.node for tensor in exits]
    while stack:
        node = stack.pop()
        if node in above and node not in found:
            found.add(node)
            stack.extend(t.node for t in node.inputs if t not in entries)
    return found


def build_segment(
    analysis: GraphAnalysis,
    name: str,
    ops: set[Node],
    taken: set[Node],
    stored: frozenset[Tensor] = frozenset(),
) -> Segment:
    """Make a segment of the forward ops `ops`.

    Args:
        analysis: Of the graph.
        name: Of the segment.
        ops: Forward ops, convex.
        taken: Backward ops that belong to other segments; the caller adds this segment's.
        stored: Tensors inside to keep whole.

    Raises:
        NotTileableError: With the op and the reason.
    """
    for node in analysis.sorted(ops):
        try:
            check_forward(analysis, node)
        except NotTileableError as error:
            raise NotTileableError(f"`{node.name}` ({node.op}): {error}") from None
    blockers = analysis.sorted(nodes_between(ops, analysis.successors, analysis.position))
    if blockers:
        shown = ", ".join(f"`{node.name}` ({node.op})" for node in blockers[:3])
        raise NotTileableError(f"values leave the segment and come back through {shown}")
    exits = _exits(analysis, ops)
    notes: list[str] = []
    for _ in range(len(ops) + 1):
        part = BackwardRegion(analysis, ops, set(exits) | stored, taken)
        part.build()
        if not part.must_materialise:
            break
        for tensor, reason in part.must_materialise.items():
            notes.append(f"`{tensor.name}` stays whole: {reason}")
            exits.append(tensor)
    segment = _assemble(analysis, name, ops, exits, part, stored, notes)
    borders = (*segment.entries, *segment.exits, *segment.stored, *segment.grad_entries, *segment.grad_exits)
    mixed = [t.name for t in borders if analysis.entries_per_image(t) != 1]
    if mixed:
        raise NotTileableError(f"at its border pixels have been made images (`{mixed[0]}`)")
    sizes = analysis.evaluate.sizes
    unknown = [sizes.of(t) for t in segment.entries if t.shape is not None and t.shape[0] is None]
    if not all(sizes.same(unknown[0], size) for size in unknown):
        raise NotTileableError("its entries may be of different numbers of images when the step runs")
    if not segment.exits and not segment.grad_entries:
        raise NotTileableError("nothing that it makes is needed outside of it")
    return segment


def _exits(analysis: GraphAnalysis, ops: set[Node]) -> list[Tensor]:
    """Tensors of the segment that a forward op outside reads, or that the function returns."""
    results = set(analysis.graph.outputs)
    exits = []
    for node in analysis.sorted(ops):
        for index in range(len(node.outputs)):
            tensor = node.out(index)
            outside = any(
                reader not in ops and reader not in analysis.backward and not reads_shape_only(reader)
                for reader, position in analysis.consumers.get(tensor, ())
            )
            if outside or tensor in results:
                exits.append(tensor)
    return exits


class BackwardRegion:
    """Grows the set of backward ops of one segment."""

    def __init__(self, analysis: GraphAnalysis, ops: set[Node], whole: set[Tensor], taken: set[Node]) -> None:
        self.analysis = analysis
        self.ops = ops
        self.whole = whole
        self.taken = taken
        self.nodes: set[Node] = set()
        self.made: dict[Tensor, TileKind] = {}
        self.must_materialise: dict[Tensor, str] = {}
        self.owned: set[Tensor] = {t for node in ops for t in node.inputs}

    def build(self) -> None:
        """Core, closure, growth."""
        self._core()
        if self.must_materialise:
            return
        self._close()
        self._settle()
        saved = set(self.nodes), dict(self.made)
        try:
            while self._grow_down() or self._grow_up():
                self._close()
            self._settle()
        except NotTileableError:
            self.nodes, self.made = saved  # Growth is optional: what it cannot close it takes back.

    def kind(self, tensor: Tensor) -> TileKind:
        """Kind of an operand of a backward op, as things stand."""
        if tensor in self.made:
            return self.made[tensor]
        if tensor.node in self.ops:
            return TileKind.FULL
        if not self.analysis.is_image(tensor):
            return TileKind.INVARIANT
        gradient = tensor.node in self.analysis.backward and tensor.node not in self.analysis.forward_derived
        return TileKind.PARTIAL if gradient else TileKind.FULL

    def kinds(self, node: Node) -> list[TileKind]:
        """Kinds of the operands of a backward op."""
        data = find_rule(node).data(self.analysis.view(node))
        return [self.kind(t) if p in data or t in self.made else TileKind.INVARIANT for p, t in enumerate(node.inputs)]

    def _try(self, node: Node) -> TileKind:
        """Kind of a node's outputs if it moved in.

        Raises:
            NotTileableError: If it cannot.
        """
        if node in self.taken:
            raise NotTileableError("it belongs to another segment")
        if node.stateful:
            raise NotTileableError("it has side effects")
        kinds = self.kinds(node)
        if TileKind.REDUCED in kinds:
            raise NotTileableError("it waits for a sum over the image")
        for tensor, kind in zip(node.inputs, kinds, strict=True):
            if kind is not TileKind.INVARIANT and not self.analysis.has_known_size(tensor):
                raise NotTileableError(f"`{tensor.name}` has an unknown image size {tensor.shape}")
        images = [t for t, kind in zip(node.inputs, kinds, strict=True) if kind is not TileKind.INVARIANT]
        self.analysis.view(node).check_axes(images)
        result = find_rule(node).result_kind(self.analysis.view(node), kinds)
        if result is not TileKind.FULL and not all(dtype.is_floating for dtype, _ in node.outputs):
            raise NotTileableError("it makes a gradient that is no floating point number: parts of it are rounded")
        results = [] if result is TileKind.REDUCED else [node.out(index) for index in range(len(node.outputs))]
        if not all(map(self.analysis.is_image, results)):
            raise NotTileableError("its result is not an image")
        return result

    def _add(self, node: Node, kind: TileKind) -> None:
        self.nodes.add(node)
        for index in range(len(node.outputs)):
            self.made[node.out(index)] = kind

    def _core(self) -> None:
        """Backward ops that read inside tensors, and what they derive from forward values alone."""
        position = self.analysis.position
        waiting = {r for node in self.ops for i in range(len(node.outputs)) for r in self._value_readers(node.out(i))}
        heap = [(position[node], node) for node in waiting]
        heapq.heapify(heap)
        while heap:
            _, node = heapq.heappop(heap)
            operands = self.operands(node)
            # Also what it would make again in a loop: outside of all of them, it would need that whole.
            needed = operands if node in self.taken else node.inputs
            inside = [t for t in needed if t.node in self.ops and t not in self.whole]
            derived = [t for t in operands if self.made.get(t) is TileKind.FULL]
            if not inside and not derived:
                continue
            try:
                kind = self._try(node)
                self._add(node, kind)
                if kind is TileKind.FULL:
                    for reader in {r for i in range(len(node.outputs)) for r in self._value_readers(node.out(i))}:
                        if reader not in waiting:
                            waiting.add(reader)
                            heapq.heappush(heap, (position[reader], reader))
            except NotTileableError as error:
                for tensor in inside:
                    self.must_materialise.setdefault(tensor, f"`{node.name}` ({node.op}) reads it and {error}")
                if not inside:
                    self._leak_sources(derived, node, error)

    def _value_readers(self, tensor: Tensor) -> list[Node]:
        """Backward ops that read more than a tensor's shape."""
        return [node for node in self._readers(tensor) if node in self.analysis.backward]

    def _leak_sources(self, derived: list[Tensor], node: Node, error: Exception) -> None:
        """A derived value is read outside: keep the forward tensors that it was derived from."""
        reach = ancestors([t.node for t in derived])
        for tensor in {t for n in reach & self.nodes for t in n.inputs if t.node in self.ops} - self.whole:
            self.must_materialise.setdefault(tensor, f"`{node.name}` ({node.op}) needs it and {error}")

    def _close(self) -> None:
        """Make the set convex.

        Raises:
            NotTileableError: If an op in between cannot move in.
        """
        while True:
            missing = nodes_between(self.nodes, self.analysis.successors, self.analysis.position)
            if not missing:
                return
            for node in self.analysis.sorted(missing):
                if reads_shape_only(node) or node.op == "Const":
                    self.nodes.add(node)  # Control edges alone: nothing to run in the loop.
                    continue
                try:
                    self._add(node, self._try(node))
                except NotTileableError as error:
                    raise NotTileableError(
                        f"its backward pass goes through `{node.name}` ({node.op}): {error}"
                    ) from None

    def _settle(self) -> None:
        """Kinds once more, in order: an op that moved in late may have changed what an earlier one reads.

        Raises:
            NotTileableError: If an op cannot do with what it reads.
        """
        for node in self.analysis.sorted({t.node for t in self.made}):
            try:
                self._add(node, self._try(node))
            except NotTileableError as error:
                raise NotTileableError(f"its backward pass goes through `{node.name}` ({node.op}): {error}") from None

    def _readers(self, tensor: Tensor) -> list[Node]:
        return [r for r, p in self.analysis.consumers.get(tensor, ()) if not reads_shape_only(r)]

    def _belongs(self, tensor: Tensor) -> bool:
        """Whether an operand comes from this segment rather than from elsewhere."""
        return (
            tensor in self.made
            or tensor.node in self.ops
            or tensor in self.owned
            or tensor in self.whole
            or tensor.node in self.analysis.constants
        )

    def operands(self, node: Node) -> list[Tensor]:
        """Operands that an op would read inside of the loop: sizes and the like are made anew there."""
        try:
            rebuilt = find_rule(node).shape_operands(self.analysis.view(node))
        except NotTileableError:
            rebuilt = []
        return [tensor for position, tensor in enumerate(node.inputs) if position not in rebuilt]

    def _grad_entries(self) -> set[Tensor]:
        return {t for n in self.nodes for t in n.inputs if t not in self.made and self.kind(t) is TileKind.PARTIAL}

    def _absorbable(self, node: Node, incoming: set[Tensor]) -> TileKind | None:
        """Kind of the result if an optional op may move in, else `None`."""
        if node not in self.analysis.backward:
            return None
        if not all(self._belongs(t) or t in incoming for t in self.operands(node)):
            return None
        try:
            kind = self._try(node)
        except NotTileableError:
            return None
        return kind if kind in (TileKind.PARTIAL, TileKind.REDUCED) else None

    def _grow_down(self) -> bool:
        """Take in all readers of a gradient, so that it is never whole."""
        incoming = self._grad_entries()
        grown = False
        for tensor, kind in sorted(self.made.items(), key=lambda item: self.analysis.position[item[0].node]):
            if kind is not TileKind.PARTIAL or tensor in self.analysis.graph.outputs:
                continue
            outside = [node for node in self._readers(tensor) if node not in self.nodes]
            results = [self._absorbable(node, incoming) for node in outside]
            if outside and None not in results:
                for node, result in zip(outside, results, strict=True):
                    assert result is not None
                    self._add(node, result)
                grown = True
        return grown

    def _grow_up(self) -> bool:
        """Take in the op that makes an incoming gradient, if it works on this segment's own tensors."""
        for tensor in sorted(self._grad_entries(), key=lambda t: self.analysis.position[t.node]):
            node = tensor.node
            own = [t for t in node.inputs if t in self.owned or t in self.whole or t.node in self.ops]
            others = [t for t in self.operands(node) if not self._belongs(t)]
            partial = [t for t in others if self.kind(t) is TileKind.PARTIAL]
            if not own or others != partial or node in self.nodes or tensor in self.analysis.graph.outputs:
                continue
            try:
                kind = self._try(node)
            except NotTileableError:
                continue
            if kind is not TileKind.PARTIAL:
                continue
            saved = set(self.nodes), dict(self.made)
            incoming = self._grad_entries() | set(partial)
            self._add(node, kind)
            results = {r: self._absorbable(r, incoming) for r in self._readers(tensor) if r not in self.nodes}
            if None in results.values():
                self.nodes, self.made = saved
                continue
            for reader, result in results.items():
                assert result is not None
                self._add(reader, result)
            return True
        return False


def _assemble(
    analysis: GraphAnalysis,
    name: str,
    ops: set[Node],
    exits: list[Tensor],
    part: BackwardRegion,
    stored: frozenset[Tensor],
    notes: list[str],
) -> Segment:
    """Collect what crosses the border of the two loops."""
    kinds: dict[Tensor, TileKind] = dict(part.made)
    entries: dict[Tensor, None] = {}
    invariants: dict[Tensor, None] = {}
    grad_entries: dict[Tensor, None] = {}
    forward = analysis.sorted(ops)
    backward = [n for n in analysis.sorted(part.nodes) if n.out(0) in part.made] if part.nodes else []
    for node in forward:
        for tensor, kind in zip(node.inputs, forward_kinds(analysis, node, ops), strict=True):
            kinds.setdefault(tensor, kind)
            if tensor.node not in ops:
                (entries if kind is TileKind.FULL else invariants)[tensor] = None
        for index in range(len(node.outputs)):
            kinds[node.out(index)] = TileKind.FULL
    for node in backward:
        operands = set(part.operands(node))
        for tensor, kind in zip(node.inputs, part.kinds(node), strict=True):
            kinds.setdefault(tensor, kind)
            if tensor in part.made or tensor.node in ops or tensor not in operands:
                continue
            group = {TileKind.FULL: entries, TileKind.PARTIAL: grad_entries}.get(kind, invariants)
            group[tensor] = None
    grad_exits: list[Tensor] = []
    reductions: list[Tensor] = []
    outputs = set(analysis.graph.outputs)
    for node in backward:
        for index in range(len(node.outputs)):
            tensor = node.out(index)
            outside = tensor in outputs or any(
                r not in part.nodes and not reads_shape_only(r) for r, p in analysis.consumers.get(tensor, ())
            )
            if outside and part.made[tensor] is TileKind.FULL:
                raise NotTileableError(f"`{tensor.name}`, derived from recomputed values, is needed elsewhere")
            if outside:
                (reductions if part.made[tensor] is TileKind.REDUCED else grad_exits).append(tensor)
    return Segment(
        name,
        list(entries),
        exits,
        forward,
        backward,
        kinds,
        list(grad_entries),
        grad_exits,
        reductions,
        list(invariants),
        stored,
        notes,
    )
