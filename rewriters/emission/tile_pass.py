"""The tile pass: replaces planned segments by tile loops.

Segmented fused-tiled execution (SFT) after Xu et al., "Training of Deep Learning Pipelines on Memory-Constrained GPUs
via Segmented Fused-Tiled Execution" (CC '22), on the joint graph of forward and backward phase. The split and join
nodes of section 5 are the reads and writes of a loop. The backward functions are the graph's own backward ops.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Mapping, Sequence, Set
from typing import Any

import tensorflow as tf

from rewriters.analysis.autodiff_roles import reads_shape_only
from rewriters.analysis.graph_analysis import GraphAnalysis, require_analysed
from rewriters.emission.file_buffers import FILE_OP, FileBuffers
from rewriters.emission.loop_emitter import trace_loop
from rewriters.emission.loop_outputs import loop_state_dtype
from rewriters.emission.loop_signature import program_signature
from rewriters.emission.loop_tensors import loop_input_tensors, loop_operand, loop_output_tensors
from rewriters.errors import RewriteError
from rewriters.ir.graph import IN_FILES, LOOPS, Graph, LoopName, Metadata, Node, Tensor
from rewriters.ir.graph_pass import GraphPass, PassResult, record_state, run_pass
from rewriters.ir.graph_reader import from_tf_graph
from rewriters.ir.legality import Stage
from rewriters.ir.region_reads import is_region_read
from rewriters.ir.static_values import add_constant, op_attrs
from rewriters.scheduling.control_edges import add_edges
from rewriters.scheduling.delay_early_ops import DelayOptimizerOps, EmittedLoop, RunUpdatesBeforeLoops
from rewriters.scheduling.serialize_ops import SerializeScratchGroups
from rewriters.scheduling.updates_after_reads import RunUpdatesAfterReads
from rewriters.tiling.barrier_planner import BarrierPlanner
from rewriters.tiling.row_frontiers import SAVED
from rewriters.tiling.row_planner import RowBarrierPlanner, RowPlanner
from rewriters.tiling.segment import Segment
from rewriters.tiling.tile_planner import Grid, Halo, TileLoop, TilePlanner

__all__: list[str] = []

LOOP_SCOPE = "sft/"
"""Name scope of all tile loops."""


@dataclasses.dataclass
class SegmentPlan:
    """A segment with its tile loops.

    Attributes:
        segment: The segment.
        loops: Tile loops in the order in which they run.
        halo: Source of the rows that neighbouring tiles share.
    """

    segment: Segment
    loops: list[TileLoop]
    halo: Halo = Halo.RECOMPUTE

    def loop(self, name: str) -> TileLoop | None:
        """Return the loop with a name; `None` if the segment has no such loop."""
        return next((tile_loop for tile_loop in self.loops if tile_loop.name == name), None)


def plan_segment(
    analysis: GraphAnalysis,
    segment: Segment,
    grid: Grid,
    backward_grid: Grid | None = None,
    halo: Halo = Halo.RECOMPUTE,
) -> SegmentPlan:
    """Plan the loops of one segment with `grid` tiles, and backward loops with `backward_grid` unless it is `None`."""
    backward = backward_grid or grid
    if segment.loop_specs:
        planner = (RowBarrierPlanner if halo is Halo.CARRY else BarrierPlanner)(analysis, segment)
        return SegmentPlan(segment, planner.tile_loops(lambda spec: backward if spec.backward else grid), halo)
    return SegmentPlan(segment, planner_for(analysis, segment, halo).tile_loops(grid, backward), halo)


def planner_for(analysis: GraphAnalysis, segment: Segment, halo: Halo) -> TilePlanner:
    """Return the planner of a segment without barriers; it plans any number of tiles."""
    return (RowPlanner if halo is Halo.CARRY else TilePlanner)(analysis, segment)


def tile_segments(analysis: GraphAnalysis, plans: list[SegmentPlan], files: FileBuffers | None = None) -> Graph:
    """Return a new graph in which the planned segments run tile by tile; arguments as in `TilePass`.

    Raises:
        RewriteError: If an op outside of a segment needs an op inside that has no full-size result.
    """
    return run_pass(TilePass(analysis, plans, files=files), analysis.graph).graph


@dataclasses.dataclass(frozen=True)
class Tiled(PassResult):
    """A step with tile loops.

    Attributes:
        tile_loops: Ops that were added for loops in stages, each with the loop that it belongs to.
    """

    tile_loops: Mapping[Node, TileLoop] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class TilePass(GraphPass[Tiled]):
    """Replaces planned segments by tile loops.

    Attributes:
        analysis: Analysis of the graph that the plans refer to.
        plans: Plans of segments that share no op.
        bodies: Whether to trace the bodies of loops.
        files: Rule that selects the results of loops in files; `None` to hold all in memory.
        stages: Pipeline stage of each op that has one; `None` without a pipeline.
    """

    new_stateful_ops = frozenset((*LOOPS, "Empty", FILE_OP))
    stage = Stage.TILED

    analysis: GraphAnalysis
    plans: Sequence[SegmentPlan]
    bodies: bool = True
    files: FileBuffers | None = None
    stages: Mapping[Node, int] | None = None

    def requires(self, graph: Graph) -> None:
        """Check that the analysis belongs to the graph."""
        require_analysed(graph, self.analysis)

    def call(self, graph: Graph) -> Tiled:
        """Splice the loops in; without stages, order the update with them."""
        if not self.plans:
            return Tiled(graph, changed=False)
        splicer = _LoopSplicer(self)
        return Tiled(splicer.run(), changed=True) if self.stages is None else splicer.in_stages()


def tile_stages(analysis: GraphAnalysis, plans: list[SegmentPlan], stages: Mapping[Node, int]) -> Tiled:
    """Return a step whose segments run tile by tile; only loops of the same pipeline stage wait for each other.

    Ops outside of the loops, such as the optimizer update, get no new order. The slots of the pipeline order them.
    """
    return run_pass(TilePass(analysis, plans, stages=stages), analysis.graph)


def tile_skeleton(analysis: GraphAnalysis, plans: list[SegmentPlan], files: FileBuffers | None = None) -> Graph:
    """Return the graph of `tile_segments` with each loop as a single op without a body.

    The memory model needs no more. It takes a fraction of the time, because TensorFlow traces no loop bodies.
    """
    return run_pass(TilePass(analysis, plans, bodies=False, files=files), analysis.graph).graph


class _LoopSplicer:
    """Replaces the planned segments in a copy of one graph by tile loops, as `TilePass` specifies."""

    def __init__(self, spec: TilePass) -> None:
        self.spec = spec
        self.analysis = spec.analysis
        self.graph = spec.analysis.graph.copy()
        self.replaced: dict[Tensor, Tensor] = {}
        self.moved: dict[Node, Node] = {}
        self.programs: dict[Hashable, Graph] = {}
        self.starts: dict[Node, Node] = {}
        self.devices: dict[Node, str] = {}
        self.backward: set[Node] = set()
        self.tile_loops: dict[Node, TileLoop] = {}

    def run(self) -> Graph:
        """Insert the loops, and order the optimizer update with respect to them."""
        order = self._with_loops()
        loops = [
            EmittedLoop(loop.name, self.starts[loop].name, self.devices[loop], loop in self.backward) for loop in order
        ]
        readers = [loop.name for loop in order if self._uses_files(loop)]
        scheduling = (
            DelayOptimizerOps(self.analysis),
            RunUpdatesAfterReads(readers),
            RunUpdatesBeforeLoops(self.analysis, loops),
            SerializeScratchGroups(),
        )
        add_edges(self.graph, scheduling)
        return self.graph

    def _uses_files(self, loop: Node) -> bool:
        """Return whether a loop reads images from files, or creates files for its results. Both may fail."""
        tile_loop = self.tile_loops[self.starts[loop]]
        return bool(self._in_files(tile_loop)) or any(is_region_read(tensor.node) for tensor in tile_loop.reads)

    def _in_files(self, tile_loop: TileLoop) -> Set[Tensor]:
        """Return the results of a loop that lie in files."""
        return frozenset() if self.spec.files is None else self.spec.files.results(tile_loop)

    def in_stages(self) -> Tiled:
        """Insert the loops alone."""
        self._with_loops()
        nodes = self.graph.nodes
        tile_loops = {node: loop for node, loop in self.tile_loops.items() if nodes.get(node.name) is node}
        return Tiled(self.graph, changed=True, tile_loops=tile_loops)

    def _with_loops(self) -> list[Node]:
        """Insert all loops, redirect the consumers of replaced ops and remove these; return the loops in order."""
        self._repoint_shapes()
        loops = [self._splice_all(plan) for plan in self.spec.plans]
        self._redirect_controls()
        self.graph.replace_tensors(self.replaced)
        order = self._chain(loops)
        self.graph.prune()
        self._check_removed()
        record_state(self.graph, "insert_tile_loops", "Replace the ops of planned segments by tile loops.")
        return order

    def _copied(self, node: Node) -> Node:
        """Return the copy of an op in the new graph."""
        return self.graph.nodes[node.name]

    def _tensor(self, tensor: Tensor) -> Tensor:
        return Tensor(self._copied(tensor.node), tensor.index)

    def _repoint_shapes(self) -> None:
        """Let `Shape` ops of tensors inside a segment read the batch size from an entry of the segment.

        Some of the tensors are never materialised. The loop itself may depend on the shape of its own exit, for
        instance through the mask of a dropout.
        """
        for plan in self.spec.plans:
            segment = plan.segment
            inside = {n.out(i) for n in (*segment.forward, *segment.backward) for i in range(len(n.outputs))}
            inside |= {tensor for tensor in segment.entries if is_region_read(tensor.node)}
            full_size = {*segment.exits, *segment.stored, *segment.grad_exits, *segment.reductions}
            for tensor in sorted(inside, key=lambda t: t.name):
                for consumer, _ in self.analysis.consumers.get(tensor, ()):
                    if consumer.op != "Shape":  # Canonicalization leaves no other shape op on a tensor of known rank.
                        continue
                    source = self._same_batch_entry(segment, tensor)
                    if source is not None:
                        self._repoint(consumer, tensor, source)
                    elif tensor not in full_size:
                        raise RewriteError(
                            f"Op `{consumer.name}` reads the batch size of `{tensor.name}`, but tiling never "
                            f"materialises `{tensor.name}`. Expected: an entry of `{segment.name}` with that batch "
                            "size. Please report this."
                        )

    def _same_batch_entry(self, segment: Segment, tensor: Tensor) -> Tensor | None:
        """Return an entry with the batch size of a tensor, of which nothing but the batch size is unknown."""
        if not tensor.shape or tensor.shape[0] is not None or None in tensor.shape[1:]:
            return None
        sizes = self.analysis.evaluate.sizes
        size = sizes.of_images(tensor, self.analysis.entries_per_image(tensor))
        entries = [t for t in segment.entries if t.shape and t.shape[0] is None]
        local_entries = [t for t in entries if t.node.device == tensor.node.device]
        devices = {node.device for node in (*segment.forward, *segment.backward)}
        for entry in entries:
            if sizes.are_combined(sizes.of(entry), size) and sizes.assume_equal(sizes.of(entry), size):
                return entry
        # On a single device, all unknown batch sizes in a segment are equal.
        return next(iter(entries if len(devices) == 1 else local_entries), None)

    def _repoint(self, consumer: Node, tensor: Tensor, source: Tensor) -> None:
        """Compute the shape of `tensor`, which the `Shape` op `consumer` reads, from the batch size of `source`."""
        shape, source = tensor.shape, loop_operand(source)
        assert shape is not None and source.shape is not None
        dtype = consumer.outputs[0][0]
        graph, name = self.graph, f"{consumer.name}/of_tile"

        def added(op: str, operands: Sequence[Tensor], attrs: Mapping[str, Any], length: int) -> Tensor:
            return graph.new_node(name, op, operands, attrs=attrs, outputs=[(dtype, (length,))]).out()

        size = added("Shape", [self._tensor(source)], op_attrs(T=source.dtype, out_type=dtype), len(source.shape))
        begin = add_constant(graph, f"{name}/begin", (0,), tf.int32)
        count = add_constant(graph, f"{name}/size", (1,), tf.int32)
        batch = added("Slice", [size, begin, count], op_attrs(T=dtype, Index=tf.int32), 1)
        entries = self.analysis.entries_per_image(tensor)
        if entries != 1:
            operands = [batch, add_constant(graph, f"{name}/entries", entries, dtype)]
            batch = graph.add_beside(batch.node, "Mul", operands, op_attrs(T=dtype), [(dtype, (1,))]).out()
        inner_sizes = add_constant(graph, f"{name}/rest", [int(d or 0) for d in shape[1:]], dtype)
        operands = [batch, inner_sizes, add_constant(graph, f"{name}/axis", 0, tf.int32)]
        attrs = op_attrs(T=dtype, Tidx=tf.int32, N=2)
        self.replaced[self._copied(consumer).out()] = added("ConcatV2", operands, attrs, len(shape))

    def _splice_all(self, plan: SegmentPlan) -> list[Node]:
        """Insert the loops of a segment; return their nodes.

        A later loop may recompute a tensor that an earlier loop has written. The loops after it read the new tensor,
        so that the old one is released earlier.
        """
        newest: dict[Tensor, Tensor] = {}
        all_ops = {*plan.segment.forward, *plan.segment.backward} if plan.segment.loop_specs else frozenset()
        return [self._splice(plan.segment, tile_loop, newest, all_ops) for tile_loop in plan.loops]

    def _splice(self, segment: Segment, tile_loop: TileLoop, newest: dict[Tensor, Tensor], all_ops: Set[Node]) -> Node:
        """Insert a loop in its name scope; return its node. `all_ops` are those of a segment with barriers."""
        num_nodes = len(self.graph.nodes)
        prefix = self.graph.unique_name(f"{LOOP_SCOPE}{segment.name}/{tile_loop.name}")
        start = self.graph.add(Node(f"{prefix}/start", "NoOp"))
        start.control_inputs = self._waits(segment, tile_loop, all_ops)
        inputs = [newest[t] if t in newest else self._tensor(t) for t in loop_input_tensors(tile_loop, segment)]
        if self.spec.bodies:
            loop, results = self._traced(segment, tile_loop, prefix, start, inputs)
        else:
            loop, results = self._without_body(tile_loop, prefix, start, inputs)
        for old, new in zip(loop_output_tensors(tile_loop), results, strict=True):
            if old.node.op != SAVED:
                self.replaced.setdefault(self._tensor(old), new)
            newest[old] = new
        for node in tile_loop.replaces:
            self.moved[self._copied(node)] = loop
        self.starts[loop] = start
        self.devices[loop] = self._device(tile_loop)
        if self.spec.stages is None:
            loop.device = self.devices[loop]
        self.tile_loops[start] = tile_loop
        role = "backward" if tile_loop.backward else "forward"
        name = LoopName(segment.name, tile_loop.name, str(tile_loop.grid))
        stage = None if self.spec.stages is None else int(self.devices[loop])
        for node in itertools.islice(self.graph.nodes.values(), num_nodes, None):
            node.metadata = Metadata(role=role, stage=None if node.op == "Const" else stage, loop=name)
        if tile_loop.backward:
            self.backward.add(loop)
        return loop

    def _device(self, tile_loop: TileLoop) -> str:
        """Return the device of a loop; in a pipeline the number of its stage, whose device is not known yet."""
        nodes = (*tile_loop.body, *tile_loop.replaces)
        if self.spec.stages is None:
            return next((node.device for node in nodes), "")
        return next((str(self.spec.stages[node]) for node in nodes if node in self.spec.stages), "")

    def _without_body(
        self, tile_loop: TileLoop, prefix: str, start: Node, inputs: list[Tensor]
    ) -> tuple[Node, list[Tensor]]:
        """Insert a loop as one op without a body; return it with its results."""
        tensors = loop_output_tensors(tile_loop)
        outputs = [(loop_state_dtype(tile_loop, tensor), tensor.shape) for tensor in tensors]
        in_files = self._in_files(tile_loop)
        indices = [index for index, tensor in enumerate(tensors) if tensor in in_files]
        attrs = op_attrs(**{IN_FILES: indices})
        loop = Node(f"{prefix}/while", "While", inputs, control_inputs=[start], attrs=attrs, outputs=outputs)
        self.graph.add(loop)
        return loop, [self._cast(loop.out(index), tensor.dtype) for index, tensor in enumerate(tensors)]

    def _cast(self, tensor: Tensor, dtype: tf.DType) -> Tensor:
        """Return a tensor in another type, as loops return sums in half precision that they add up in float32."""
        if tensor.dtype == dtype:
            return tensor
        attrs, outputs = op_attrs(SrcT=tensor.dtype, DstT=dtype), [(dtype, tensor.shape)]
        return self.graph.new_node(f"{tensor.node.name}/Cast", "Cast", [tensor], attrs=attrs, outputs=outputs).out()

    def _traced(
        self, segment: Segment, tile_loop: TileLoop, prefix: str, start: Node, inputs: list[Tensor]
    ) -> tuple[Node, list[Tensor]]:
        """Insert a loop as TensorFlow traces it; return it with its results."""
        program = self._program(segment, tile_loop)
        outer = dict(zip(program.inputs, inputs, strict=True))
        placeholders = {t.node for t in program.inputs}
        loop: Node | None = None
        for node in program.nodes.values():
            if node in placeholders:
                continue
            node.name = self.graph.unique_name(f"{prefix}/{node.name}")
            node.inputs = [outer.get(t, t) for t in node.inputs]
            if node.op in ("Empty", FILE_OP) or node.op in LOOPS:
                node.control_inputs = [*node.control_inputs, start]
            loop = node if node.op in LOOPS else loop
            self.tile_loops[node] = tile_loop
            self.graph.add(node)
        assert loop is not None
        return loop, [outer.get(tensor, tensor) for tensor in program.outputs]

    def _program(self, segment: Segment, tile_loop: TileLoop) -> Graph:
        """Return a loop in a graph of its own; equal loops of several segments are traced once and share their body."""
        key = program_signature(self.analysis, segment, tile_loop)
        if key not in self.programs:
            traced = trace_loop(self.analysis, segment, tile_loop, self.spec.files)
            self.programs[key] = from_tf_graph(traced, traced.inputs, traced.outputs, [], self.graph.device)
            self.graph.library.MergeFrom(self.programs[key].library)
        return self.programs[key].copy()

    def _waits(self, segment: Segment, tile_loop: TileLoop, all_ops: Set[Node]) -> list[Node]:
        """Return the control inputs of a loop: those of its ops, and the producers of its operands.

        The latter keep the runtime from allocating the loop's buffers at the start of the step.
        """
        inside = all_ops or {*segment.forward, *tile_loop.replaces}
        waits = [c for node in tile_loop.replaces for c in node.control_inputs if c not in inside]
        waits += [loop_operand(t).node for t in tile_loop.reads if t.node not in inside]
        if tile_loop.backward and not segment.loop_specs:
            waits += [loop_operand(t).node for t in segment.grad_entries]
        return [self._copied(node) for node in dict.fromkeys(waits) if node.op != "Placeholder"]

    def _redirect_controls(self) -> None:
        """Replace control edges from ops of a segment by edges from their loops.

        Constants and shape ops lose the edges: the loop may read them.
        """
        for node in self.graph.nodes.values():
            if node in self.moved or not any(c in self.moved for c in node.control_inputs):
                continue
            if node.op == "Const" or reads_shape_only(node):
                node.control_inputs = [c for c in node.control_inputs if c not in self.moved]
            else:
                node.control_inputs = list(dict.fromkeys(self.moved.get(c, c) for c in node.control_inputs))

    def _chain(self, loops: list[list[Node]]) -> list[Node]:
        """Run one loop at a time, those of a segment in their order, because the peaks of concurrent loops add up."""
        for segment_loops in loops:
            self._one_after_another(segment_loops)
        position = {node: index for index, node in enumerate(self.graph.execution_order())}
        order = sorted(itertools.chain(*loops), key=position.__getitem__)
        self._one_after_another(order)
        return order

    def _one_after_another(self, loops: list[Node]) -> None:
        """Chain the loops of each device, or of each stage, with their buffers."""
        last: dict[str, Node] = {}
        for after in loops:
            device = self.devices[after]
            waits = self.starts[after].control_inputs
            if device in last and last[device] not in waits:
                waits.append(last[device])
            last[device] = after

    def _check_removed(self) -> None:
        names = [node.name for node in self.moved if self.graph.nodes.get(node.name) is node]
        if names:
            raise RewriteError(f"Ops outside of a segment read ops inside that no loop outputs: {names[:5]}.")


def loop_nodes(graph: Graph) -> dict[tuple[str, str], str]:
    """Return the names of the loops in a rewritten graph by names of segment and tile loop."""
    loops = [(node, node.metadata.loop) for node in graph.nodes.values() if node.op in LOOPS]
    return {(loop.segment, loop.loop): node.name for node, loop in loops if loop is not None}
