"""SFT's analyses: segments of ops that can be fused and tiled together, and their ends.

After Xu et al., "Training of Deep Learning Pipelines on Memory-Constrained GPUs via Segmented Fused-Tiled Execution"
(CC '22):

- FT-compatible dimensions of an operator (4.1.1): an output slice of extent `T` along a dimension needs an input slice
  of extent `sigma * T + delta`.
- FT-compatible segments (4.1.2, Listing 2): connected operators with a common FT-compatible dimension.
- Partition from a memory capacity (4.2, Listing 3): tensors that exceed it must be tiled. A segment ends at a
  post-dominator, a tensor through which all data flows, that may be checkpointed.

Two things differ from the paper. The printed Listing 3 marks a node as "must tile" if its output is *smaller* than the
capacity; the prose says the opposite and is right. Here, data may also leave the tiled ops and come back
(squeeze-and-excite, a control dependency). Ops are therefore grouped by level, the number of such detours before them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Sequence

import numpy as np

from rewriters.analysis.autodiff_roles import reads_shape_only
from rewriters.analysis.graph_analysis import GraphAnalysis, check_forward
from rewriters.device.peak_memory import most_alive
from rewriters.errors import NotTileableError
from rewriters.ir.graph import Node, Tensor
from rewriters.rules.intervals import Interval
from rewriters.rules.registry import find_rule
from rewriters.tiling.segment import Segment, build_segment

__all__: list[str] = []

DIMS = {2: frozenset({"batch", "height", "width"}), 3: frozenset({"batch", "depth", "height", "width"})}
"""Dimensions by the number of spatial axes; a sequence is an image of one row."""


@dataclasses.dataclass(frozen=True)
class SkippedOps:
    """An op, or a range of ops, that is not rewritten.

    Attributes:
        name: Name of the op, or of the first op of the range.
        reason: Reason why it is not rewritten.
        last: Name of the last op of the range; empty for a single op.
    """

    name: str
    reason: str
    last: str = ""


def refused(analysis: GraphAnalysis, node: Node, reason: object) -> SkippedOps:
    """Return the record of an op that is not tiled; the reason mentions it if no gradient depends on the op."""
    is_unused_by_gradients = analysis.backward and node not in analysis.before_backward
    suffix = "; only metrics or results need it" if is_unused_by_gradients else ""
    return SkippedOps(node.name, f"{node.op}: {reason}{suffix}")


def ft_dimensions(analysis: GraphAnalysis, node: Node) -> frozenset[str]:
    """Return the FT-compatible dimensions of an operator (4.1.1); empty if it cannot be tiled."""
    try:
        check_forward(analysis, node)
    except NotTileableError:
        return frozenset()
    return DIMS[len(analysis.extents(node.out()) or ())]


def segment_dimensions(analysis: GraphAnalysis, nodes: Iterable[Node]) -> frozenset[str]:
    """Return the FT-compatible dimensions that all operators of a segment share (4.1.2, `FTdimsIntersect`)."""
    return frozenset.intersection(*(ft_dimensions(analysis, node) for node in nodes))


def scale_and_delta(analysis: GraphAnalysis, node: Node, operand: int, axis: int) -> tuple[int, int]:
    """Return `(sigma, delta)` of 4.1.1 and Table 4: rows of an operand for each output row, and additional rows.

    They are computed from the op's rule in the interior of the image.
    """
    view = analysis.view(node)
    sizes = []
    for rows in (8, 16):
        out = Interval(np.array([64]), np.array([64 + rows]))
        need = find_rule(node).operand_rows_for_result(view, axis, out).needs[operand]
        assert need is not None
        sizes.append(int(need.size[0]))
    sigma = (sizes[1] - sizes[0]) // 8
    return sigma, sizes[0] - 8 * sigma


@dataclasses.dataclass
class TileableComponent:
    """A maximal FT-compatible segment (4.1.2) with the points where it can be cut.

    Attributes:
        nodes: Operators in topological order.
        cuts: Positions after which a single tensor is alive, the last position included.
    """

    nodes: list[Node]
    cuts: list[int]

    def cut_tensor(self, analysis: GraphAnalysis, cut: int) -> Tensor:
        """Return the tensor that is alive after a cut."""
        node = self.nodes[cut]
        inside = set(self.nodes)
        for index in range(len(node.outputs)):
            if any(r in inside for r, _ in analysis.consumers.get(node.out(index), ())):
                return node.out(index)
        return node.out()


def find_components(
    analysis: GraphAnalysis, allowed: Container[Node] | None = None
) -> tuple[list[TileableComponent], list[SkippedOps]]:
    """Return all maximal FT-compatible segments of the forward pass, and the image ops that are not tiled.

    Args:
        analysis: Analysis of the graph.
        allowed: Ops that may run on tiles; all if `None`.
    """
    tiled: set[Node] = set()
    level: dict[Node, int] = {}
    skipped: list[SkippedOps] = []
    for node in analysis.order:
        if node in analysis.backward:
            continue
        data = [] if reads_shape_only(node) else [t.node for t in node.inputs]
        level[node] = max(
            (level[p] + (1 if p in tiled else 0) for p in (*data, *node.control_inputs) if p in level), default=0
        )
        if node not in analysis.data or not any(analysis.is_image(t) for t in node.inputs):
            continue
        if allowed is not None and node not in allowed:
            continue
        try:
            check_forward(analysis, node)
        except NotTileableError as error:
            if not reads_shape_only(node):
                skipped.append(refused(analysis, node, error))
            continue
        tiled.add(node)
        level[node] = max((level[p] for p in (*data, *node.control_inputs) if p in level), default=0)
    return [_component(analysis, group) for group in _connected(analysis, tiled, level)], skipped


def _connected(analysis: GraphAnalysis, tiled: set[Node], level: dict[Node, int]) -> list[list[Node]]:
    """Return the connected components of the tileable ops of each level."""
    parent: dict[Node, Node] = {node: node for node in tiled}

    def root(node: Node) -> Node:
        while parent[node] is not node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for node in tiled:
        for tensor in node.inputs:
            if tensor.node in tiled and level[tensor.node] == level[node]:
                parent[root(tensor.node)] = root(node)
    groups: dict[Node, list[Node]] = {}
    for node in analysis.order:
        if node in tiled:
            groups.setdefault(root(node), []).append(node)
    return list(groups.values())


def _component(analysis: GraphAnalysis, nodes: list[Node]) -> TileableComponent:
    post = post_dominators(analysis, nodes)
    cuts = [position for position in post if _single_output(analysis, nodes, position)]
    return TileableComponent(nodes, cuts)


def _single_output(analysis: GraphAnalysis, nodes: list[Node], position: int) -> bool:
    inside = set(nodes)
    node = nodes[position]
    if analysis.entries_per_image(node.out()) != 1:
        return False  # An iteration cannot slice its images out of a folded tensor (space to batch).
    read = [i for i in range(len(node.outputs)) if any(r in inside for r, _ in analysis.consumers.get(node.out(i), ()))]
    return len(read) <= 1


def post_dominators(analysis: GraphAnalysis, nodes: Sequence[Node]) -> list[int]:
    """Return the positions of the ops through which every data path of a group leads.

    These ops post-dominate the start of the group and dominate its end. In topological order, only results of such an
    op cross from the ops up to it to the ops after it.
    """
    position = {node: index for index, node in enumerate(nodes)}
    reach = list(range(len(nodes)))  # Position of the last consumer of each op's results.
    for index, node in enumerate(nodes):
        for i in range(len(node.outputs)):
            for consumer, _ in analysis.consumers.get(node.out(i), ()):
                if consumer in position:
                    reach[index] = max(reach[index], position[consumer])
    result = []
    furthest = 0
    for index in range(len(nodes)):
        if furthest <= index:  # No later op reads the result of an earlier one.
            result.append(index)
        furthest = max(furthest, reach[index])
    return result


def find_segments(
    analysis: GraphAnalysis, component: TileableComponent, memory_capacity: int | None, batch: int
) -> list[range]:
    """Partition a component by memory capacity (Listing 3).

    Args:
        analysis: Analysis of the graph.
        component: A maximal FT-compatible segment.
        memory_capacity: Bytes above which a tensor must be tiled. `None` tiles everything.
        batch: Batch size where the graph leaves it open.

    Returns:
        Ranges of positions in `component.nodes`.
    """
    size = len(component.nodes)
    if memory_capacity is None:
        return [range(size)]
    must_tile = [
        max((node.out(i).num_bytes(batch) for i in range(len(node.outputs))), default=0) > memory_capacity
        for node in component.nodes
    ]
    ends = [cut for cut in component.cuts if not must_tile[cut]]
    if not ends or ends[-1] != size - 1:
        ends.append(size - 1)
    result: list[range] = []
    start = 0
    for end in ends:
        # A segment whose tensors all fit is not tiled ("may tile").
        if any(must_tile[start : end + 1]):
            result.append(range(start, end + 1))
        start = end + 1
    return result


def auto_segments(
    analysis: GraphAnalysis,
    memory_capacity: int | None,
    batch: int,
    name_of: dict[str, int],
    allowed: Container[Node] | None = None,
) -> tuple[list[Segment], list[SkippedOps]]:
    """Return segments for the entire graph, and the ops that are not rewritten.

    A range of ops that cannot be a segment is cut into smaller ranges.

    Args:
        analysis: Analysis of the graph.
        memory_capacity: As in `find_segments`.
        batch: Batch size where the graph leaves it open.
        name_of: Counter of segment names, shared with segments that the user requests.
        allowed: Forward and backward ops that may run on tiles; all if `None`.
    """
    components, skipped = find_components(analysis, allowed)
    segments: list[Segment] = []
    excluded: set[Node] = set() if allowed is None else {node for node in analysis.backward if node not in allowed}
    splitter = _RangeSplitter(analysis, batch=batch, name_of=name_of, skipped=skipped)
    for component in components:
        for positions in find_segments(analysis, component, memory_capacity, batch):
            for segment in splitter.split(component, positions, excluded):
                excluded.update(segment.backward)
                segments.append(segment)
    return segments, skipped


def next_name(name_of: dict[str, int]) -> str:
    """Return the next of the names `segment1`, `segment2`, ..."""
    name_of["segment"] = name_of.get("segment", 0) + 1
    return f"segment{name_of['segment']}"


def try_segment(
    analysis: GraphAnalysis, component: TileableComponent, positions: range, excluded: set[Node], name: str
) -> Segment:
    """Return the segment of a range of a component.

    Raises:
        NotTileableError: If the ops cannot be a segment, or if the step has a backward pass and the segment has none.
    """
    segment = build_segment(analysis, name, {component.nodes[i] for i in positions}, excluded)
    if analysis.backward and not segment.backward:
        raise NotTileableError("the backward pass reads no tensor inside of it")
    return segment


def recomputes(segment: Segment) -> bool:
    """Return whether the backward ops of a segment read forward tensors that its tiles recompute."""
    forward, available = set(segment.forward), segment.available
    return any(t.node in forward and t not in available for node in segment.backward for t in node.inputs)


def saved_bytes(analysis: GraphAnalysis, segment: Segment, batch: int) -> int:
    """Return the bytes that a step saves less for its backward pass if a segment is tiled.

    Tensors inside of the segment are not saved. An entry is saved if only the recomputation reads it later. In a step
    without a backward pass, these are the bytes of the full-size tensors that are alive together, minus those of
    entries and exits.
    """
    if not analysis.backward:
        order = [*dict.fromkeys(t.node for t in segment.entries), *segment.forward]
        return most_alive(order, batch, segment.exits) - _entry_and_exit_bytes(segment, batch)

    def is_saved(tensor: Tensor) -> bool:
        consumers = (node for node, _ in analysis.consumers.get(tensor, ()) if not reads_shape_only(node))
        return any(node in analysis.backward for node in consumers)

    results = [node.out(i) for node in segment.forward for i in range(len(node.outputs))]
    released = [t for t in results if t not in segment.available and is_saved(t)]
    newly_saved = [t for t in segment.entries if t.node.op != "Placeholder" and not is_saved(t)]
    return sum(t.num_bytes(batch) for t in released) - sum(t.num_bytes(batch) for t in newly_saved)


def _entry_and_exit_bytes(segment: Segment, batch: int) -> int:
    """Return the bytes of entries and exits, without arguments of the step, which are alive in any case."""
    entries = (t for t in segment.entries if t.node.op != "Placeholder")
    return sum(t.num_bytes(batch) for t in (*entries, *segment.exits))


class _RangeSplitter:
    """Splits ranges of a component into as few segments as possible.

    Args:
        analysis: Analysis of the graph.
        batch: Batch size where the graph leaves it open.
        name_of: Counter of segment names.
        skipped: Gets the ranges that are not rewritten.
    """

    def __init__(
        self, analysis: GraphAnalysis, *, batch: int, name_of: dict[str, int], skipped: list[SkippedOps]
    ) -> None:
        self._analysis = analysis
        self._batch = batch
        self._name_of = name_of
        self._skipped = skipped

    def split(self, component: TileableComponent, positions: range, excluded: set[Node]) -> list[Segment]:
        """Return a range as one segment or, cut near its middle where a single tensor is alive, as several.

        Args:
            component: The component.
            positions: Positions of its ops.
            excluded: Backward ops of other segments.
        """
        bounds = [cut + 1 for cut in component.cuts if cut in positions and cut + 1 < positions.stop]
        try:
            segment = try_segment(self._analysis, component, positions, excluded, next_name(self._name_of))
            if saved_bytes(self._analysis, segment, self._batch) > 0:
                return [segment]
            bounds = []  # Smaller segments would save more tensors.
            verb = "save" if self._analysis.backward else "need"
            reason = f"a tiled segment would {verb} as many bytes as the original ops"
        except NotTileableError as error:
            reason = str(error)
        self._name_of["segment"] -= 1
        if not bounds:
            first, last = component.nodes[positions.start], component.nodes[positions.stop - 1]
            self._skipped.append(SkippedOps(first.name, reason, last.name))
            return []
        middle = min(bounds, key=lambda bound: abs(2 * bound - positions.start - positions.stop))
        segments: list[Segment] = []
        for half in (range(positions.start, middle), range(middle, positions.stop)):
            used = excluded | {node for segment in segments for node in segment.backward}
            segments += self.split(component, half, used)
        return segments
