"""SFT's analyses: what can be fused and tiled together, and where segments end.

After Xu et al., "Training of Deep Learning Pipelines on Memory-Constrained GPUs via
Segmented Fused-Tiled Execution" (CC '22):

- FT-compatible dimensions of an operator (4.1.1): an output slice of extent `T` along
  a dimension needs an input slice of extent `sigma * T + delta`.
- FT-compatible segments (4.1.2, Listing 2): connected operators with a common
  FT-compatible dimension.
- Partition from a memory capacity (4.2, Listing 3): tensors that exceed it must be
  tiled, and a segment ends at a tensor that may be checkpointed and through which
  everything flows (a post-dominator).

Two things differ from the paper. The printed Listing 3 marks a node as "must tile" if
its output is *smaller* than the capacity; the prose says the opposite and is right.
And a network here may come back from outside (squeeze-and-excite, a control
dependency): ops are grouped by level, the number of times that happened before.
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
"""Dimensions by the number of axes; a sequence is an image of one row."""


@dataclasses.dataclass(frozen=True)
class SkippedOps:
    """Something that stays as it was.

    Attributes:
        name: Op, the first one of a range.
        reason: Why.
        last: Last op of the range.
    """

    name: str
    reason: str
    last: str = ""


def refused(analysis: GraphAnalysis, node: Node, why: object) -> SkippedOps:
    """An operation that stays as it was; one that no gradient depends on costs a training little."""
    alone = analysis.backward and node not in analysis.before_backward
    return SkippedOps(node.name, f"{node.op}: {why}" + ("; only metrics or results need it" if alone else ""))


def ft_dimensions(analysis: GraphAnalysis, node: Node) -> frozenset[str]:
    """FT-compatible dimensions of an operator (4.1.1); empty if it cannot be tiled."""
    try:
        check_forward(analysis, node)
    except NotTileableError:
        return frozenset()
    return DIMS[len(analysis.extents(node.out()) or ())]


def segment_dimensions(analysis: GraphAnalysis, nodes: Iterable[Node]) -> frozenset[str]:
    """FT-compatible dimensions of a segment: the common ones of its operators (4.1.2, `FTdimsIntersect`)."""
    return frozenset.intersection(*(ft_dimensions(analysis, node) for node in nodes))


def scale_and_delta(analysis: GraphAnalysis, node: Node, operand: int, axis: int) -> tuple[int, int]:
    """`(sigma, delta)` of 4.1.1 and Table 4: rows of an operand per output row, and rows on top.

    Read off the op's rule in the interior of the image.
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
        cuts: Positions after which a single tensor goes on, the last one included.
    """

    nodes: list[Node]
    cuts: list[int]

    def cut_tensor(self, analysis: GraphAnalysis, cut: int) -> Tensor:
        """The tensor that leaves a cut."""
        node = self.nodes[cut]
        inside = set(self.nodes)
        for index in range(len(node.outputs)):
            if any(r in inside for r, _ in analysis.consumers.get(node.out(index), ())):
                return node.out(index)
        return node.out()


def find_components(
    analysis: GraphAnalysis, allowed: Container[Node] | None = None
) -> tuple[list[TileableComponent], list[SkippedOps]]:
    """All maximal FT-compatible segments of the forward pass, and image ops that end them.

    Args:
        analysis: Of the graph.
        allowed: Operations that may run on tiles; all if it is not given.
    """
    tiled: set[Node] = set()
    level: dict[Node, int] = {}
    left: list[SkippedOps] = []
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
                left.append(refused(analysis, node, error))
            continue
        tiled.add(node)
        level[node] = max((level[p] for p in (*data, *node.control_inputs) if p in level), default=0)
    return [_component(analysis, group) for group in _connected(analysis, tiled, level)], left


def _connected(analysis: GraphAnalysis, tiled: set[Node], level: dict[Node, int]) -> list[list[Node]]:
    """Groups of tileable ops of one level that hand tensors to each other (connected components)."""
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
        return False  # Its images are made of pixels: turns could not take their part of it.
    read = [i for i in range(len(node.outputs)) if any(r in inside for r, _ in analysis.consumers.get(node.out(i), ()))]
    return len(read) <= 1


def post_dominators(analysis: GraphAnalysis, nodes: Sequence[Node]) -> list[int]:
    """Positions of the ops through which every path of the group's data flows.

    These are the post-dominators of the group's start that also dominate its end. In
    topological order they are where no tensor but the op's own crosses to later ops.
    """
    position = {node: index for index, node in enumerate(nodes)}
    reach = list(range(len(nodes)))  # Last reader of what each op makes.
    for index, node in enumerate(nodes):
        for i in range(len(node.outputs)):
            for reader, _ in analysis.consumers.get(node.out(i), ()):
                if reader in position:
                    reach[index] = max(reach[index], position[reader])
    result = []
    furthest = 0
    for index in range(len(nodes)):
        if furthest <= index:  # Nothing made earlier is read later.
            result.append(index)
        furthest = max(furthest, reach[index])
    return result


def find_segments(
    analysis: GraphAnalysis, component: TileableComponent, memory_capacity: int | None, batch: int
) -> list[range]:
    """Partition of a component by memory capacity (Listing 3).

    Args:
        analysis: Of the graph.
        component: A maximal FT-compatible segment.
        memory_capacity: Bytes; a tensor that exceeds it must be tiled. `None` tiles everything.
        batch: Batch size where the graph does not say.

    Returns:
        Ranges of positions in `component.nodes`.
    """
    size = len(component.nodes)
    if memory_capacity is None:
        return [range(size)]
    must = [
        max((node.out(i).num_bytes(batch) for i in range(len(node.outputs))), default=0) > memory_capacity
        for node in component.nodes
    ]
    ends = [cut for cut in component.cuts if not must[cut]]
    if not ends or ends[-1] != size - 1:
        ends.append(size - 1)
    result: list[range] = []
    start = 0
    for end in ends:
        # A segment of ops that all fit needs no tiling ("may tile" and not asked to).
        if any(must[start : end + 1]):
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
    """Segments for the whole graph; what cannot be one is cut smaller, then left alone.

    Args:
        analysis: Of the graph.
        memory_capacity: As in `find_segments`.
        batch: Batch size where the graph does not say.
        name_of: Counter of segment names, shared with segments given by hand.
        allowed: Operations that may run on tiles, of the backward pass too; all if it is not given.
    """
    components, left = find_components(analysis, allowed)
    segments: list[Segment] = []
    taken: set[Node] = set() if allowed is None else {node for node in analysis.backward if node not in allowed}
    for component in components:
        for part in find_segments(analysis, component, memory_capacity, batch):
            for segment in _largest(analysis, component, part, taken, left, name_of, batch):
                taken.update(segment.backward)
                segments.append(segment)
    return segments, left


def next_name(name_of: dict[str, int]) -> str:
    """`segment1`, `segment2`, ..."""
    name_of["segment"] = name_of.get("segment", 0) + 1
    return f"segment{name_of['segment']}"


def try_segment(
    analysis: GraphAnalysis, component: TileableComponent, part: range, taken: set[Node], name: str
) -> Segment:
    """The segment of a range of a component.

    Raises:
        NotTileableError: If it has no backward part that can be tiled, though the step has one.
    """
    segment = build_segment(analysis, name, {component.nodes[i] for i in part}, taken)
    if analysis.backward and not segment.backward:
        raise NotTileableError("nothing inside of it is needed in the backward pass")
    return segment


def saved_bytes(analysis: GraphAnalysis, segment: Segment, batch: int) -> int:
    """Bytes that a step keeps less for its backward pass when a segment is tiled.

    What lies inside need not be kept any more. An entry that nothing but the recomputation reads later must. In a step
    without a backward pass nothing is kept: they are those of what is whole at a time, less the entries and exits.
    """
    if not analysis.backward:
        order = [*dict.fromkeys(t.node for t in segment.entries), *segment.forward]
        return most_alive(order, batch, segment.exits) - _ends(segment, batch)

    def kept(tensor: Tensor) -> bool:
        return any(r in analysis.backward and not reads_shape_only(r) for r, p in analysis.consumers.get(tensor, ()))

    made = [node.out(i) for node in segment.forward for i in range(len(node.outputs))]
    inside = [t for t in made if t not in segment.available and kept(t)]
    newly = [t for t in segment.entries if t.node.op != "Placeholder" and not kept(t)]
    return sum(t.num_bytes(batch) for t in inside) - sum(t.num_bytes(batch) for t in newly)


def _ends(segment: Segment, batch: int) -> int:
    """Bytes of entries and exits; arguments are there anyway."""
    entries = (t for t in segment.entries if t.node.op != "Placeholder")
    return sum(t.num_bytes(batch) for t in (*entries, *segment.exits))


def _largest(
    analysis: GraphAnalysis,
    component: TileableComponent,
    part: range,
    taken: set[Node],
    left: list[SkippedOps],
    name_of: dict[str, int],
    batch: int,
) -> list[Segment]:
    """The range as one segment, or as few as possible, cut where a single tensor goes on."""
    bounds = [cut + 1 for cut in component.cuts if cut in part and cut + 1 < part.stop]
    try:
        segment = try_segment(analysis, component, part, taken, next_name(name_of))
        if saved_bytes(analysis, segment, batch) > 0:
            return [segment]
        bounds = []  # Parts of it would keep more, not less.
        purpose = "for the backward pass as it does now" if analysis.backward else "as is alive now"
        reason = f"tiles would keep as much {purpose}"
    except NotTileableError as error:
        reason = str(error)
    name_of["segment"] -= 1
    if not bounds:
        first, last = component.nodes[part.start], component.nodes[part.stop - 1]
        left.append(SkippedOps(first.name, reason, last.name))
        return []
    middle = min(bounds, key=lambda b: abs(2 * b - part.start - part.stop))
    found: list[Segment] = []
    for half in (range(part.start, middle), range(middle, part.stop)):
        used = taken | {n for s in found for n in s.backward}
        more = _largest(analysis, component, half, used, left, name_of, batch)
        found.extend(more)
    return found
