"""Segments: forward ops that run tile by tile, with the backward ops that belong to them.

Dataflow determines the backward region of a segment. Its core are the backward ops that read an activation inside of
the segment, which will no longer exist in full size. Without such an op, as for a single convolution, the core consists
of the gradients of convolutions and pools that read an entry: their kernels take less scratch memory for a tile. The
core is completed to a convex set and then grows:

- *downward*: all consumers of an outgoing gradient join, if the gradient then need not exist in full size;
- *upward*: the producer of an incoming gradient joins, if it reads nothing from outside of the segment.

Growth changes memory and time, never the result.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable

from rewriters.analysis.autodiff_roles import reads_shape_only
from rewriters.analysis.convex_sets import nodes_between
from rewriters.analysis.graph_analysis import GraphAnalysis, check_forward, forward_kinds
from rewriters.device.kernel_scratch import is_conv_or_pool_grad
from rewriters.errors import NotTileableError
from rewriters.ir.graph import Node, Tensor, ancestors
from rewriters.ir.op_traits import Trait, ops_with
from rewriters.rules.registry import TileKind, find_rule
from rewriters.tiling.checkpoint_selection import LoopSpec

__all__: list[str] = []

_VARIABLE_READS = ops_with(Trait.READS_VARIABLE)


@dataclasses.dataclass(eq=False, kw_only=True)
class Segment:
    """Ops that are planned as one unit, in a forward loop and a backward loop or, with barriers, in several loops.

    Attributes:
        name: Name in scopes and reports.
        entries: Full-size images that the segment reads.
        exits: Full-size results; none if only the backward ops of the segment read the forward results.
        forward: Forward ops in topological order.
        backward: Backward ops in topological order.
        kinds: Kind of every operand and result of its ops.
        grad_entries: Full-size gradients that the backward loop reads.
        grad_exits: Full-size gradients that it computes.
        reductions: Reductions over the image that it computes (weight gradients).
        invariants: Tensors that every tile reads in full.
        stored: Forward tensors that are stored in full size instead of recomputed.
        one_loop: Whether one loop runs all ops, so that an iteration recomputes nothing but halos.
        final: With one loop, or without a backward loop, the last forward ops: reductions of results over the image,
            such as a loss or a metric, and the ops before them.
        notes: Notes for the user.
        loop_specs: With barriers, the loops in the order in which they run. All kinds are `FULL` or `INVARIANT` then.
        dropped: With barriers, the stored forward tensors that are dropped after their last forward reader, and
            recomputed before the backward ops that read them.
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
    one_loop: bool = False
    final: list[Node] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    loop_specs: list[LoopSpec] = dataclasses.field(default_factory=list)
    dropped: frozenset[Tensor] = frozenset()

    @property
    def sums(self) -> list[Node]:
        """Forward ops that reduce results over the image."""
        return [node for node in self.final if self.kinds[node.out()] is TileKind.REDUCED]

    @property
    def split(self) -> list[Tensor]:
        """Images that each tile of a segment without barriers computes, reads as a gradient, or reduces."""
        return [*self.exits, *self.grad_entries, *(node.inputs[0] for node in self.sums)]

    @property
    def available(self) -> set[Tensor]:
        """Forward tensors that exist in full size when the backward loop runs."""
        return set(self.entries) if self.one_loop else {*self.entries, *self.exits, *self.stored}


def forward_ops(analysis: GraphAnalysis, entries: Iterable[Tensor], exits: Iterable[Tensor]) -> set[Node]:
    """Return the ops on data paths from an entry to an exit, without the producers of entries."""
    entries = set(entries)
    reachable: set[Node] = set()

    def data_consumers(tensor: Tensor) -> list[Node]:
        return [node for node, _ in analysis.consumers.get(tensor, ()) if not reads_shape_only(node)]

    stack = [node for entry in entries for node in data_consumers(entry)]
    while stack:
        node = stack.pop()
        if node in reachable or node in analysis.backward:
            continue
        reachable.add(node)
        for index in range(len(node.outputs)):
            if node.out(index) not in entries:
                stack.extend(data_consumers(node.out(index)))
    ops: set[Node] = set()
    stack = [tensor.node for tensor in exits]
    while stack:
        node = stack.pop()
        if node in reachable and node not in ops:
            ops.add(node)
            stack.extend(t.node for t in node.inputs if t not in entries)
    return ops


def build_segment(
    analysis: GraphAnalysis,
    name: str,
    ops: set[Node],
    excluded: set[Node],
    stored: frozenset[Tensor] = frozenset(),
) -> Segment:
    """Build the segment of some forward ops.

    Args:
        analysis: Analysis of the graph.
        name: Name of the segment.
        ops: Forward ops, a convex set.
        excluded: Backward ops of other segments, and those that must not be tiled. The caller adds this segment's.
        stored: Tensors inside of the segment to store in full size.

    Raises:
        NotTileableError: If an op cannot be tiled. The message names the op and the reason.
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
        region = BackwardRegion(analysis, ops, materialised=set(exits) | stored, excluded=excluded)
        region.build()
        if not region.must_materialise:
            break
        for tensor, reason in region.must_materialise.items():
            notes.append(f"`{tensor.name}` is computed in full size: {reason}")
            exits.append(tensor)
    segment = _assemble(analysis, name, ops, exits=exits, region=region, stored=stored, notes=notes)
    _check_borders(analysis, segment)
    return segment


def _check_borders(analysis: GraphAnalysis, segment: Segment) -> None:
    borders = (*segment.entries, *segment.exits, *segment.stored, *segment.grad_entries, *segment.grad_exits)
    folded = [t.name for t in borders if analysis.entries_per_image(t) != 1]
    if folded:
        raise NotTileableError(f"at its border, images are folded into the batch (space to batch, `{folded[0]}`)")
    sizes = analysis.evaluate.sizes
    unknown = [sizes.of(t) for t in segment.entries if t.shape is not None and t.shape[0] is None]
    if not all(sizes.assume_equal(unknown[0], size) for size in unknown):
        raise NotTileableError("its entries may have different batch sizes")
    if not segment.exits and not segment.grad_entries:
        raise NotTileableError("no op outside of it reads its results")


def _exits(analysis: GraphAnalysis, ops: set[Node]) -> list[Tensor]:
    """Return the tensors of the segment that a forward op outside reads or that the function returns."""
    results = set(analysis.graph.outputs)
    exits = []
    for node in analysis.sorted(ops):
        for index in range(len(node.outputs)):
            tensor = node.out(index)
            has_outer_consumer = any(
                other not in ops and other not in analysis.backward and not reads_shape_only(other)
                for other, _ in analysis.consumers.get(tensor, ())
            )
            if has_outer_consumer or tensor in results:
                exits.append(tensor)
    return exits


class BackwardRegion:
    """Finds the backward ops that run in the tile loops of one segment.

    Args:
        analysis: Analysis of the graph.
        ops: Forward ops of the segment.
        materialised: Forward tensors of the segment that exist in full size.
        excluded: Backward ops to leave outside.

    Attributes:
        nodes: Backward ops of the region.
        results: Kinds of their results.
        must_materialise: Forward tensors that must exist in full size, each with the reason. If there are any, `build`
            stops early.
        forward_operands: Operands of the forward ops.
    """

    def __init__(
        self, analysis: GraphAnalysis, ops: set[Node], *, materialised: set[Tensor], excluded: set[Node]
    ) -> None:
        self.analysis = analysis
        self.ops = ops
        self.materialised = materialised
        self.excluded = excluded
        self.nodes: set[Node] = set()
        self.results: dict[Tensor, TileKind] = {}
        self.must_materialise: dict[Tensor, str] = {}
        self.forward_operands: set[Tensor] = {t for node in ops for t in node.inputs}

    def build(self) -> None:
        """Find the core, make it convex and let it grow.

        Raises:
            NotTileableError: If the core cannot be made convex.
        """
        self._add_core()
        if self.must_materialise:
            return
        if not self.nodes:
            self._add_gradients_of_entries()
            try:
                self._make_convex()
                self._update_kinds()
            except NotTileableError:  # They lower scratch memory alone.
                self.nodes, self.results = set(), {}
        self._make_convex()
        self._update_kinds()
        before_growth = set(self.nodes), dict(self.results)
        try:
            while self._grow_down() or self._grow_up():
                self._make_convex()
            self._update_kinds()
        except NotTileableError:  # Growth is optional.
            self.nodes, self.results = before_growth

    def kind(self, tensor: Tensor) -> TileKind:
        """Return the kind of an operand of a backward op, given the current region."""
        if tensor in self.results:
            return self.results[tensor]
        if tensor.node in self.ops:
            return TileKind.FULL
        if not self.analysis.is_image(tensor):
            return TileKind.INVARIANT
        gradient = tensor.node in self.analysis.backward and tensor.node not in self.analysis.forward_derived
        return TileKind.PARTIAL if gradient else TileKind.FULL

    def kinds(self, node: Node) -> list[TileKind]:
        """Return the kinds of the operands of a backward op, given the current region."""
        data = find_rule(node).data(self.analysis.view(node))
        return [
            self.kind(t) if p in data or t in self.results or self._holds_samples(t) else TileKind.INVARIANT
            for p, t in enumerate(node.inputs)
        ]

    def _holds_samples(self, tensor: Tensor) -> bool:
        """Return whether an iteration has some samples of a tensor, which then is no matrix or table for all tiles."""
        return self.analysis.layouts.are_rows and tensor.node in self.ops and self.analysis.is_image(tensor)

    def _result_kind(self, node: Node) -> TileKind:
        """Return the kind of an op's results if the op joined the region.

        Raises:
            NotTileableError: If the op cannot join.
        """
        if node in self.excluded:
            raise NotTileableError("it belongs to another segment")
        if node.stateful:
            raise NotTileableError("it has side effects")
        kinds = self.kinds(node)
        if TileKind.REDUCED in kinds:
            raise NotTileableError("it depends on a reduction over the image")
        for tensor, kind in zip(node.inputs, kinds, strict=True):
            if kind is not TileKind.INVARIANT and not self.analysis.has_known_size(tensor):
                raise NotTileableError(f"`{tensor.name}` has an unknown image size {tensor.shape}")
        images = [t for t, kind in zip(node.inputs, kinds, strict=True) if kind is not TileKind.INVARIANT]
        self.analysis.view(node).check_axes(images)
        result_kind = find_rule(node).result_kind(self.analysis.view(node), kinds)
        if result_kind is not TileKind.FULL and not all(dtype.is_floating for dtype, _ in node.outputs):
            raise NotTileableError("its gradient has an integer dtype, so that partial sums would be rounded")
        results = [node.out(index) for index in range(len(node.outputs))]
        if result_kind is not TileKind.REDUCED and not all(map(self.analysis.is_image, results)):
            raise NotTileableError("its result is not an image")
        return result_kind

    def _add(self, node: Node, kind: TileKind) -> None:
        self.nodes.add(node)
        for index in range(len(node.outputs)):
            self.results[node.out(index)] = kind

    def _add_core(self) -> None:
        """Add the backward ops that read forward tensors inside of the segment, or values derived from these alone."""
        position = self.analysis.position
        queued = {other for node in self.ops for other in self._backward_consumers(node)}
        heap = [(position[node], node) for node in queued]
        heapq.heapify(heap)
        while heap:
            _, node = heapq.heappop(heap)
            operands = self.operands(node)
            # In a loop, an excluded op recomputes some operands. Any other op outside of all loops reads all of them.
            needed = operands if node in self.excluded else node.inputs
            inside = [t for t in needed if t.node in self.ops and t not in self.materialised]
            derived = [t for t in operands if self.results.get(t) is TileKind.FULL]
            if not inside and not derived:
                continue
            try:
                kind = self._result_kind(node)
            except NotTileableError as error:
                reason = f"`{node.name}` ({node.op}) reads it and cannot be tiled: {error}"
                for tensor in inside:
                    self.must_materialise.setdefault(tensor, reason)
                if not inside:
                    self._materialise_sources(derived, node, error)
                continue
            self._add(node, kind)
            if kind is TileKind.FULL:
                for other in self._backward_consumers(node) - queued:
                    queued.add(other)
                    heapq.heappush(heap, (position[other], other))

    def _add_gradients_of_entries(self) -> None:
        """Add the gradients of convolutions and pools that read an entry, and those that read the same gradient.

        An entry that convolutions or pools outside read, too, has gradients of theirs, and none is added.
        """
        entries = {t for t in self.forward_operands if t.node not in self.ops and self.analysis.is_image(t)}
        for entry in sorted(entries, key=lambda t: t.name):
            consumers = self._data_consumers(entry)
            forward = [other for other in consumers if other not in self.analysis.backward]
            gradients = [other for other in consumers if other not in forward and is_conv_or_pool_grad(other)]
            if not self.ops.issuperset(forward):
                continue
            for node in self.analysis.sorted(set(gradients)):
                incoming = {t for t in node.inputs if self.kind(t) is TileKind.PARTIAL}
                siblings = {n for t in incoming for n in self._data_consumers(t) if is_conv_or_pool_grad(n)}
                for other in self.analysis.sorted({node, *siblings}):
                    kind = self._absorbable(other, incoming)
                    if kind is not None:
                        self._add(other, kind)

    def _backward_consumers(self, node: Node) -> set[Node]:
        """Return the backward ops that read results of an op, and not their shapes alone."""
        consumers = (other for index in range(len(node.outputs)) for other in self._data_consumers(node.out(index)))
        return {other for other in consumers if other in self.analysis.backward}

    def _materialise_sources(self, derived: list[Tensor], node: Node, error: Exception) -> None:
        """Materialise the forward tensors from which the derived operands of an op outside are computed."""
        producers = ancestors([t.node for t in derived]) & self.nodes
        reason = f"`{node.name}` ({node.op}) depends on it and cannot be tiled: {error}"
        for tensor in {t for n in producers for t in n.inputs if t.node in self.ops} - self.materialised:
            self.must_materialise.setdefault(tensor, reason)

    def _make_convex(self) -> None:
        """Add the ops on paths between ops of the region.

        Raises:
            NotTileableError: If one of them cannot join.
        """
        while True:
            missing = nodes_between(self.nodes, self.analysis.successors, self.analysis.position)
            if not missing:
                return
            for node in self.analysis.sorted(missing):
                if reads_shape_only(node) or node.op == "Const":
                    self.nodes.add(node)  # The path has a control edge here, so that the loop need not run the op.
                    continue
                try:
                    self._add(node, self._result_kind(node))
                except NotTileableError as error:
                    raise NotTileableError(
                        f"its backward pass goes through `{node.name}` ({node.op}): {error}"
                    ) from None

    def _update_kinds(self) -> None:
        """Compute all kinds again, in topological order: an op that joined late may change the kinds of operands.

        Raises:
            NotTileableError: If an op cannot be tiled with the new kinds of its operands.
        """
        for node in self.analysis.sorted({t.node for t in self.results}):
            try:
                self._add(node, self._result_kind(node))
            except NotTileableError as error:
                raise NotTileableError(f"its backward pass goes through `{node.name}` ({node.op}): {error}") from None

    def _data_consumers(self, tensor: Tensor) -> list[Node]:
        return [node for node, _ in self.analysis.consumers.get(tensor, ()) if not reads_shape_only(node)]

    def _belongs(self, tensor: Tensor) -> bool:
        """Return whether a tensor is computed or read by the segment."""
        return (
            tensor in self.results
            or tensor.node in self.ops
            or tensor in self.forward_operands
            or tensor in self.materialised
            or tensor.node in self.analysis.constants
        )

    def operands(self, node: Node) -> list[Tensor]:
        """Return the operands that an op reads inside of the loop; its rule rebuilds the others, such as sizes."""
        try:
            rebuilt = find_rule(node).shape_operands(self.analysis.view(node))
        except NotTileableError:
            rebuilt = []
        return [tensor for position, tensor in enumerate(node.inputs) if position not in rebuilt]

    def _grad_entries(self) -> set[Tensor]:
        return {t for n in self.nodes for t in n.inputs if t not in self.results and self.kind(t) is TileKind.PARTIAL}

    def _absorbable(self, node: Node, incoming: set[Tensor]) -> TileKind | None:
        """Return the kind of an op's results if the op may join the region, else `None`."""
        if node not in self.analysis.backward:
            return None
        if not all(self._belongs(t) or t in incoming for t in self.operands(node)):
            return None
        try:
            kind = self._result_kind(node)
        except NotTileableError:
            return None
        return kind if kind in (TileKind.PARTIAL, TileKind.REDUCED) else None

    def _grow_down(self) -> bool:
        """Add all consumers of an outgoing gradient, which then need not exist in full size; tell if one joined."""
        incoming = self._grad_entries()
        grown = False
        for tensor, kind in sorted(self.results.items(), key=lambda item: self.analysis.position[item[0].node]):
            if kind is not TileKind.PARTIAL or tensor in self.analysis.graph.outputs:
                continue
            consumers = [node for node in self._data_consumers(tensor) if node not in self.nodes]
            kinds = [self._absorbable(node, incoming) for node in consumers]
            if consumers and None not in kinds:
                for node, result_kind in zip(consumers, kinds, strict=True):
                    assert result_kind is not None
                    self._add(node, result_kind)
                grown = True
        return grown

    def _grow_up(self) -> bool:
        """Add a producer of an incoming gradient that reads tensors of the segment alone; tell whether one joined."""
        for tensor in sorted(self._grad_entries(), key=lambda t: self.analysis.position[t.node]):
            node = tensor.node
            reads_segment = any(
                t in self.forward_operands or t in self.materialised or t.node in self.ops for t in node.inputs
            )
            others = [t for t in self.operands(node) if not self._belongs(t)]
            partial = [t for t in others if self.kind(t) is TileKind.PARTIAL]
            is_candidate = reads_segment and others == partial and node not in self.nodes
            if not is_candidate or tensor in self.analysis.graph.outputs:
                continue
            try:
                kind = self._result_kind(node)
            except NotTileableError:
                continue
            if kind is not TileKind.PARTIAL:
                continue
            before = set(self.nodes), dict(self.results)
            incoming = self._grad_entries() | set(partial)
            self._add(node, kind)
            consumers = [other for other in self._data_consumers(tensor) if other not in self.nodes]
            kinds = {other: self._absorbable(other, incoming) for other in consumers}
            if None in kinds.values():
                self.nodes, self.results = before
                continue
            for other, result_kind in kinds.items():
                assert result_kind is not None
                self._add(other, result_kind)
            return True
        return False


def _assemble(
    analysis: GraphAnalysis,
    name: str,
    ops: set[Node],
    *,
    exits: list[Tensor],
    region: BackwardRegion,
    stored: frozenset[Tensor],
    notes: list[str],
) -> Segment:
    """Return the segment, with the tensors that cross the borders of its two loops."""
    kinds: dict[Tensor, TileKind] = dict(region.results)
    entries: dict[Tensor, None] = {}
    invariants: dict[Tensor, None] = {}
    grad_entries: dict[Tensor, None] = {}
    forward = analysis.sorted(ops)
    backward = [n for n in analysis.sorted(region.nodes) if n.out(0) in region.results] if region.nodes else []
    for node in forward:
        for tensor, kind in zip(node.inputs, forward_kinds(analysis, node, ops), strict=True):
            kinds.setdefault(tensor, kind)
            if tensor.node not in ops:
                (entries if kind is TileKind.FULL else invariants)[tensor] = None
        for index in range(len(node.outputs)):
            kinds[node.out(index)] = TileKind.FULL
    for node in backward:
        operands = set(region.operands(node))
        for tensor, kind in zip(node.inputs, region.kinds(node), strict=True):
            kinds.setdefault(tensor, kind)
            if tensor in region.results or tensor.node in ops or tensor not in operands:
                continue
            group = {TileKind.FULL: entries, TileKind.PARTIAL: grad_entries}.get(kind, invariants)
            group[tensor] = None
    grad_exits, reductions = _backward_exits(analysis, region, backward)
    return Segment(
        name=name,
        entries=list(entries),
        exits=exits,
        forward=forward,
        backward=backward,
        kinds=kinds,
        grad_entries=list(grad_entries),
        grad_exits=grad_exits,
        reductions=reductions,
        invariants=list(invariants),
        stored=stored,
        notes=notes,
    )


def _backward_exits(
    analysis: GraphAnalysis, region: BackwardRegion, nodes: Iterable[Node]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients and the reductions of a backward region that ops outside read or the function returns."""
    gradients: list[Tensor] = []
    reductions: list[Tensor] = []
    outputs = set(analysis.graph.outputs)
    for node in nodes:
        for index in range(len(node.outputs)):
            tensor = node.out(index)
            consumers = [other for other, _ in analysis.consumers.get(tensor, ()) if not reads_shape_only(other)]
            if tensor not in outputs and region.nodes.issuperset(consumers):
                continue
            kind = region.results[tensor]
            if kind is TileKind.FULL:
                raise NotTileableError(
                    f"ops outside of the segment read `{tensor.name}`, which depends on recomputed tensors"
                )
            (reductions if kind is TileKind.REDUCED else gradients).append(tensor)
    return gradients, reductions
