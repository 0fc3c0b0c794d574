"""Segments that run forward and backward ops in one loop, down to the sums of a loss and of metrics."""

from __future__ import annotations

import dataclasses
import heapq

from rewriters.analysis.autodiff_roles import reads_shape_only
from rewriters.analysis.convex_sets import descendants, nodes_between
from rewriters.analysis.graph_analysis import GraphAnalysis, check_forward
from rewriters.errors import NotTileableError
from rewriters.ir.graph import Node, Tensor, ancestors
from rewriters.ir.op_traits import Trait, ops_with
from rewriters.rules.registry import TileKind, find_rule
from rewriters.tiling.segment import Segment, build_segment

__all__: list[str] = []

_VARIABLE_READS = ops_with(Trait.READS_VARIABLE)


def in_one_loop(analysis: GraphAnalysis, segment: Segment, excluded: set[Node]) -> Segment | None:
    """Return a segment with one loop for its forward and its backward ops; `None` if its gradients need its results.

    Independent gradients are those of a mean or a sum over pixels, such as a loss
    without a network after it: the gradient of each pixel does not depend on the values of others. A mean over the
    pixels that a mask selects divides by their number, so that the ops of the mask stay outside of the segment. They
    are cheap: products, such as convolutions, are not left outside.

    Args:
        analysis: Analysis of the graph.
        segment: The segment with two loops.
        excluded: Backward ops of other segments.
    """
    if not segment.backward or not segment.exits or segment.loop_specs:
        return None
    between = _between(analysis, segment)
    if between:
        forward = set(segment.forward)
        sources = ancestors(between)
        products = (node for node in forward & sources if find_rule(node).flops(analysis.view(node), 1))
        if any(node.op in _VARIABLE_READS for node in sources) or forward <= sources or any(products):
            return None
        try:
            segment = build_segment(analysis, segment.name, forward - sources, excluded)
        except NotTileableError:
            return None
        if _between(analysis, segment):
            return None
    segment = with_final_sums(analysis, dataclasses.replace(segment, one_loop=True))
    return None if _gradients_wait_for_shape(analysis, segment) else segment


def _between(analysis: GraphAnalysis, segment: Segment) -> set[Node]:
    """Return the ops outside of a segment that lie on a path between its ops."""
    nodes = {*segment.forward, *segment.backward}
    between = nodes_between(nodes, analysis.successors, analysis.position)
    return {node for node in between if not reads_shape_only(node) and node.op != "Const"}


def _gradients_wait_for_shape(analysis: GraphAnalysis, segment: Segment) -> bool:
    """Return whether an incoming gradient needs the shape of a tensor that is computed after the loop.

    An example is the batch size of a loss per image, outside of the segment. Shapes inside are those of an entry.
    """
    inside = {*segment.forward, *segment.backward}
    after = descendants(inside, analysis.successors) - inside
    shapes = [n for n in analysis.order if reads_shape_only(n) and any(t.node in after for t in n.inputs)]
    return bool(shapes) and not ancestors(inside).isdisjoint(shapes)


def with_final_sums(analysis: GraphAnalysis, segment: Segment) -> Segment:
    """Return a segment whose only loop also reduces its results over the image.

    Each iteration adds its part to a sum or a mean, so that a loss or a metric per pixel never has full size. The
    pointwise ops between a result and the reduction join the loop as well.

    Args:
        analysis: Analysis of the graph.
        segment: A segment with one loop, or without backward ops.
    """
    joined = _FinalOps(analysis, segment).find()
    inside = {*segment.forward, *segment.backward, *joined}
    outputs = analysis.graph.outputs
    exits = [exit_ for exit_ in segment.exits if exit_ in outputs or not _readers(analysis, exit_) <= inside]
    if len(exits) == len(segment.exits):
        return segment
    kinds = dict(segment.kinds)
    for node, kind in joined.items():
        for tensor in node.inputs:
            kinds.setdefault(tensor, TileKind.INVARIANT)
        kinds.update((node.out(index), kind) for index in range(len(node.outputs)))
    forward = [*segment.forward, *joined]
    return dataclasses.replace(segment, forward=forward, exits=exits, kinds=kinds, final=list(joined))


def _readers(analysis: GraphAnalysis, tensor: Tensor) -> set[Node]:
    """Return the ops that read a tensor, and not its shape alone."""
    return {node for node, _ in analysis.consumers.get(tensor, ()) if not reads_shape_only(node)}


class _FinalOps:
    """Finds the reductions of a segment's results over the image, and the ops between a result and its reduction.

    Args:
        analysis: Analysis of the graph.
        segment: A segment with one loop.
    """

    def __init__(self, analysis: GraphAnalysis, segment: Segment) -> None:
        self.analysis = analysis
        self.segment = segment
        self.inside = {*segment.forward, *segment.backward}
        self.joined: dict[Node, TileKind] = {}
        self._dependent = descendants(self.inside, analysis.successors)

    def find(self) -> dict[Node, TileKind]:
        """Return the ops in topological order, with the kinds of their results."""
        position = self.analysis.position
        heap = [(position[node], node) for exit_ in self.segment.exits for node in self._outside(exit_)]
        heapq.heapify(heap)
        seen: set[Node] = set()
        while heap:
            _, node = heapq.heappop(heap)
            if node in seen:
                continue
            seen.add(node)
            try:
                self.joined[node] = self._kind(node)
            except NotTileableError:
                continue
            if self.joined[node] is TileKind.FULL:
                for other in self._readers_of(node):
                    heapq.heappush(heap, (position[other], other))
        while unused := [node for node in self.joined if not self._can_stay(node)]:
            for node in unused:
                del self.joined[node]
        return self.joined

    def _outside(self, tensor: Tensor) -> set[Node]:
        """Return the ops outside of the segment that read a tensor."""
        return _readers(self.analysis, tensor) - self.inside

    def _readers_of(self, node: Node) -> set[Node]:
        return set().union(*(self._outside(node.out(index)) for index in range(len(node.outputs))))

    def _kind(self, node: Node) -> TileKind:
        """Return the kind of an op's results if the op joined the loop.

        Raises:
            NotTileableError: If the op cannot join.
        """
        if node in self.analysis.backward or node.stateful or node.control_inputs:
            raise NotTileableError("it is no forward op, has side effects, or waits for an op")
        rule, view = find_rule(node), self.analysis.view(node)
        data, kinds = rule.data(view), []
        for position, tensor in enumerate(node.inputs):
            is_result = tensor.node in self.inside or self.joined.get(tensor.node) is TileKind.FULL
            is_image = position in data and self.analysis.is_image(tensor)
            if is_result != is_image or (not is_result and tensor.node in self._dependent):
                raise NotTileableError(f"it reads `{tensor.name}`, which the loop does not compute")
            kinds.append(TileKind.FULL if is_result else TileKind.INVARIANT)
        kind = rule.result_kind_gathered(view, kinds)
        if kind is TileKind.REDUCED:
            if rule.per_pixel(view) or rule.summed(view) != 0:
                raise NotTileableError("it reduces over some axes only")
            return kind
        if rule.flops(view, 1):
            raise NotTileableError("it is a product, which another segment may compute")
        check_forward(self.analysis, node)
        return kind

    def _can_stay(self, node: Node) -> bool:
        """Return whether the loop computes an op's operands, and only ops of the loop read them and its results."""
        outputs = set(self.analysis.graph.outputs)
        for tensor in node.inputs:
            is_exit = tensor in self.segment.exits
            if is_exit and (tensor in outputs or not self._outside(tensor) <= self.joined.keys()):
                return False
            if not is_exit and tensor.node in self._dependent and tensor.node not in self.joined:
                return False
        if self.joined[node] is TileKind.REDUCED:
            return True
        results = {node.out(index) for index in range(len(node.outputs))}
        return results.isdisjoint(outputs) and self._readers_of(node) <= self.joined.keys()
