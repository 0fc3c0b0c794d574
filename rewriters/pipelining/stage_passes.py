"""Tiling and swapping inside the stages of a pipeline.

Both passes rewrite the step of one micro-batch, which is unrolled and scheduled afterwards: a loop is planned and
traced once for all micro-batches, and each micro-batch swaps the same tensors. The traced step decides partition and
stages, which are carried over to rewritten ops. A loop has the stage of the ops that it replaces, a swap-out that of
the producer, a swap-in that of the consumer. No ordering edge of a pass leads from one stage to another: a device would
wait for another device without need.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from rewriters.analysis import summation_order
from rewriters.analysis.autodiff_roles import in_scope, shape_computations
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.emission.tile_pass import SegmentPlan, tile_stages
from rewriters.ir.graph import Graph, Node, Tensor
from rewriters.ir.graph_pass import GraphPass, PassResult, check_effects, check_interface, run_pass, run_passes
from rewriters.pipelining.stage_assignment import Stages, scheduled_ops
from rewriters.pipelining.step_partition import StepPartition
from rewriters.scheduling.control_edges import EdgePass
from rewriters.scheduling.separate_gradients import SeparateGradients
from rewriters.scheduling.serialize_ops import SerializeLargeOps
from rewriters.swapping.swap_pass import Swap, SwapIn, SwapOptions, insert_swaps, plan_swaps
from rewriters.swapping.tiers import Tier
from rewriters.tiling.tile_planner import TileLoop

__all__: list[str] = []


_BACKWARD_ROLES = ("backward", "update")


@dataclasses.dataclass(frozen=True)
class StagedStep:
    """Step of a micro-batch with its partition, stages, tile loops and swaps.

    Attributes:
        analysis: Analysis of the step.
        parts: Partition of the step.
        stages: Stages of the step.
        batched: Positions of the arguments that have the batch axis.
        origin: Traced tensor of each tensor that a pass has replaced.
        tile_loops: Tile loop of each op that belongs to one.
        swaps: Planned swaps.
        left: (tensor, reason why it is not swapped).
        outs: Swap-out ops.
    """

    analysis: GraphAnalysis
    parts: StepPartition
    stages: Stages
    batched: Sequence[int]
    origin: Mapping[Tensor, Tensor] = dataclasses.field(default_factory=dict)
    tile_loops: Mapping[Node, TileLoop] = dataclasses.field(default_factory=dict)
    swaps: Sequence[Swap] = ()
    left: Sequence[tuple[str, str]] = ()
    outs: frozenset[Node] = frozenset()

    def traced(self, tensor: Tensor) -> Tensor:
        """Return the traced tensor that a tensor replaces; a new tensor itself."""
        return self.origin.get(tensor, tensor)


def with_tiles(staged: StagedStep, plans: list[SegmentPlan]) -> StagedStep:
    """Return the step with segments of its analysis, each of one stage, replaced by tile loops."""
    tiled = tile_stages(staged.analysis, plans, staged.stages.of)
    return _transfer_metadata(staged, tiled.graph, tiled.tile_loops)


def with_swaps(
    staged: StagedStep,
    options: SwapOptions,
    *,
    tier: Tier,
    batch: int,
    max_in_flight: int,
    backward_scopes: tuple[str, ...] = (),
) -> StagedStep:
    """Return the step with swaps of tensors that are saved for the backward pass.

    Args:
        staged: The step, tiled or not.
        options: What to swap.
        tier: Where to.
        batch: Samples of a micro-batch, if its size is open.
        max_in_flight: As for `insert_swaps`, in each stage.
        backward_scopes: Name scopes that count as backward where swaps are planned.
    """
    staged = _in_order(staged, options.min_bytes, batch)
    before = staged.analysis
    scoped = {n for n in before.order if any(in_scope(n.name, scope) for scope in backward_scopes)}
    analysis = GraphAnalysis(before.graph, backward=before.backward | scoped)
    plan = plan_swaps(analysis, options, batch)
    if not plan.swaps:
        return dataclasses.replace(staged, left=plan.left)
    for swap in plan.swaps:
        swap.swap_ins = [part for swap_in in swap.swap_ins for part in _of_stages(swap_in, staged.stages.of)]
    result = insert_swaps(analysis, plan.swaps, tier, max_in_flight)
    graph = run_pass(_DropEdgesBetweenStages(staged), result.graph).graph
    staged = _transfer_metadata(staged, graph, {})
    fixed = frozenset(node for node in graph.nodes.values() if node.device and node in staged.stages.of)
    stages = dataclasses.replace(staged.stages, fixed=fixed)
    outs = frozenset(graph.nodes[node.name] for node in result.swap_outs)
    return dataclasses.replace(staged, stages=stages, swaps=plan.swaps, left=plan.left, outs=outs)


def _of_stages(swap_in: SwapIn, stages: Mapping[Node, int]) -> list[SwapIn]:
    """Split a swap-in into one for each stage: a device reads a tensor from the host, and not from another device."""
    readers: dict[int | None, list[Node]] = {}
    for reader in swap_in.readers:
        readers.setdefault(stages.get(reader), []).append(reader)
    return [SwapIn(part, swap_in.control) for part in readers.values()]


def _in_order(staged: StagedStep, min_bytes: int, batch: int) -> StagedStep:
    """Serialise the large ops of each stage, as swapping requires (`serialize_ops.py`)."""
    analysis, stages = staged.analysis, staged.stages
    backward = {node.name for node in analysis.backward}
    merged = {node.name for node in summation_order.flattenable_sums(analysis)}
    ordered = scheduled_ops(analysis, staged.parts, stages)
    passes: list[EdgePass] = [SeparateGradients()]
    for stage in range(stages.count):
        inside = {node.name for node in ordered if stages.of[node] == stage}
        fixed = (analysis.graph.nodes.keys() - inside) | merged
        passes.append(SerializeLargeOps(backward=backward, fixed=fixed, min_bytes=min_bytes, batch=batch))
    return _transfer_metadata(staged, run_passes(analysis.graph, passes).graph, {})


class _DropEdgesBetweenStages(GraphPass[PassResult]):
    """Removes the control edges of swaps that lead to other stages, or that delay counters and metrics.

    `staged` is the step before swaps were inserted.
    """

    def __init__(self, staged: StagedStep) -> None:
        self._graph = staged.analysis.graph
        self._update = {node.name for node in staged.parts.update}
        self._scheduled = {node.name for node in scheduled_ops(staged.analysis, staged.parts, staged.stages)}

    def call(self, graph: Graph) -> PassResult:
        """Return a copy of the graph without these edges."""
        new = graph.copy()
        for node in new.nodes.values():
            node.control_inputs = [before for before in node.control_inputs if self._keeps(node, before)]
        changed = any(
            len(node.control_inputs) < len(graph.nodes[node.name].control_inputs) for node in new.nodes.values()
        )
        return PassResult(new, changed=True) if changed else PassResult(graph, changed=False)

    def ensures(self, before: Graph, after: Graph) -> None:
        """Check the interface, and the order of the effects that the step has without swaps."""
        check_interface(before, after)
        swaps = frozenset(node.op for name, node in after.nodes.items() if name not in self._graph.nodes)
        check_effects(self._graph, after, swaps)

    def _keeps(self, node: Node, before: Node) -> bool:
        original = self._graph.nodes.get(node.name)
        if node.name in self._update or (original is None and node.op == "NoOp"):
            return True
        if original is not None and any(before.name == other.name for other in original.control_inputs):
            return True
        stage = self._stage(node)
        return stage is not None and self._stage(before) == stage

    def _stage(self, node: Node) -> int | None:
        """Return the stage of an op in a slot, or of a swap; `None` for other ops."""
        is_placed = node.name in self._scheduled or node.name not in self._graph.nodes
        return node.metadata.stage if is_placed else None


def _transfer_metadata(staged: StagedStep, graph: Graph, tile_loops: Mapping[Node, TileLoop]) -> StagedStep:
    """Return the step with its partition and stages carried over to the graph of a pass, in which ops kept their names.

    `tile_loops` are new ops of tile loops, each with its loop.
    """
    old = staged.analysis
    nodes = graph.nodes
    backward = {nodes[node.name] for node in old.backward if node.name in nodes}
    backward |= {n for n in nodes.values() if n.name not in old.graph.nodes and n.metadata.role in _BACKWARD_ROLES}
    of = {node: node.metadata.stage for node in nodes.values() if node.metadata.stage is not None}
    analysis = GraphAnalysis(graph, backward=backward)
    new = [node for node in analysis.order if node.name not in old.graph.nodes]

    def kept(group: Iterable[Node]) -> set[Node]:
        return {nodes[node.name] for node in group if node.name in nodes}

    def moved(tensor: Tensor) -> Tensor:
        node = nodes.get(tensor.node.name)
        return graph.aliases[tensor.name] if node is None else node.out(tensor.index)

    repeated = kept(staged.parts.per_micro_batch)
    sources = {graph.inputs[position].node for position in staged.batched}
    for node in new:
        if node in of or any(before.node in repeated or before.node in sources for before in node.inputs):
            repeated.add(node)
        elif node.op == "NoOp" and any(before in repeated for before in node.control_inputs):
            repeated.add(node)
    parts = StepPartition(
        frozenset(repeated),
        frozenset(kept(staged.parts.batch_dependent).union(node for node in new if node in repeated)),
        frozenset(kept(staged.parts.update)),
        tuple(dict.fromkeys(map(moved, staged.parts.gradients))),
        tuple(map(moved, staged.parts.carried_variables)),
        frozenset(sources),
    )
    sizes = shape_computations(analysis.order)
    for node in reversed(new):  # Sizes that loops read are computed where they are read.
        if node in sizes and node not in of:
            reading = [r for index in range(len(node.outputs)) for r, _ in analysis.consumers.get(node.out(index), ())]
            consumer_stages = [of[reader] for reader in reading if reader in of]
            if consumer_stages:
                of[node] = min(consumer_stages)
                node.metadata = dataclasses.replace(node.metadata, stage=of[node])
    stages = Stages(
        staged.stages.count,
        of,
        {moved(handle): stage for handle, stage in staged.stages.owner.items()},
        {moved(handle): stage for handle, stage in staged.stages.beside.items()},
        frozenset(sizes),
    )
    origin: dict[Tensor, Tensor] = {}
    for node in old.order:
        for index in range(len(node.outputs)):
            tensor = node.out(index)
            if node.name in nodes or tensor.name in graph.aliases:
                origin[moved(tensor)] = staged.traced(tensor)
    loops = {nodes[n.name]: tile_loop for n, tile_loop in staged.tile_loops.items() if n.name in nodes} | dict(
        tile_loops
    )
    return StagedStep(analysis, parts, stages, staged.batched, origin, loops)
