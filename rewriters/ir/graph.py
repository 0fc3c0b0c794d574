"""The joint graph of a training step as plain Python objects.

`tf.Graph` cannot be edited, and a `GraphDef` has neither shapes nor edges in both directions. Passes work on `Graph`:
nodes with typed outputs, data edges and control edges, read from a traced `tf.function` and written back as a
`GraphDef`. A pass copies the graph that it receives and edits the copy.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import graphlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from rewriters.errors import RewriteError
from rewriters.ir import tf_internals
from rewriters.ir.device_detection import planned_device
from rewriters.ir.device_model import DeviceModel
from rewriters.ir.op_traits import Trait, ops_with

__all__: list[str] = []

IN_FILES = "_in_files"
"""Attribute of a loop without a body: indices of the results that lie in files and take no memory."""

PER_PIXEL = "_per_pixel"
"""Attribute of a call (`matrices_to_images.py`): the op type that its function applies to the pixels of images."""

LOOPS = ops_with(Trait.LOOP)
"""While loops: those of the step and those of tiles."""

BRANCHES = ops_with(Trait.CONDITIONAL)

Shape = tuple[int | None, ...] | None

_KEEP_SIZE = ops_with(Trait.FORWARDS_BUFFER) | ops_with(Trait.REORDERS)
"""Ops whose result has the entries of operand 0."""

_REDUCTIONS = ops_with(Trait.REDUCTION)
"""Ops whose result has at most the entries of operand 0."""

_VARIABLE_READERS = ops_with(Trait.READS_VARIABLE)

_OPAQUE = frozenset(dtype.as_datatype_enum for dtype in (tf.resource, tf.variant, tf.string))

ELEMENT_ALIGNMENT_BYTES = 256
"""Multiple of the size of an allocation, as in `device/allocator.py`; elements of a list are allocated one by one."""


@dataclasses.dataclass(frozen=True)
class ListSize:
    """Size of a tensor list when its last element is in place.

    Attributes:
        elements: (dtype, shape) of each tensor that one iteration of a loop appends.
        length: Number of iterations; `None` for the batch size.
    """

    elements: tuple[tuple[tf.DType, Shape], ...]
    length: int | None

    def num_bytes(self, batch: int) -> int:
        """Return the bytes of all elements, each rounded up as an allocator does."""
        unit = ELEMENT_ALIGNMENT_BYTES
        rounded = sum(-(-shape_bytes(dtype, shape, batch) // unit) * unit for dtype, shape in self.elements)
        return rounded * (batch if self.length is None else self.length)


@dataclasses.dataclass(frozen=True)
class LoopFacts:
    """Memory of the results of a loop, of a conditional, or of an op that creates a tensor list or an optional.

    Attributes:
        lists: Sizes of the lists among the outputs, by output index.
        operand_buffers: Operand whose buffer an output is, or whose buffer holds the elements of a list.
        output_buffers: Other output whose elements a list consists of, or whose buffer an output is.
        body: Function of one iteration, or the branch of a conditional that is assumed to run, without nodes that no
            result needs; `None` for other ops.
        lengths: Largest number of iterations as the only element, `None` for the batch size; empty if unknown.
        element_specs: (dtype, shape) of the elements of the lists among the outputs, by output index, where all are
            alike.
        runs: Number of iterations of the loop around a conditional in which an output is no empty optional, by output
            index, where it is known.
        estimated_shapes: Estimates of the shapes that depend on the length of a list or on `Graph.sizes`, by output
            index of any op.
    """

    lists: Mapping[int, ListSize]
    operand_buffers: Mapping[int, int] = dataclasses.field(default_factory=dict)
    output_buffers: Mapping[int, int] = dataclasses.field(default_factory=dict)
    body: Graph | None = None
    lengths: tuple[int | None, ...] = ()
    element_specs: Mapping[int, tuple[tf.DType, Shape]] = dataclasses.field(default_factory=dict)
    runs: Mapping[int, int] = dataclasses.field(default_factory=dict)
    estimated_shapes: Mapping[int, Shape] = dataclasses.field(default_factory=dict)


def shape_bytes(dtype: tf.DType, shape: Shape, batch: int) -> int:
    """Return the bytes of a tensor, with `batch` for each unknown size; 0 for an unknown rank."""
    if shape is None:
        return 0
    size = _element_bytes(dtype)
    for dim in shape:
        size *= batch if dim is None else dim
    return size


@functools.cache
def _element_bytes(dtype: tf.DType) -> int:
    return 0 if dtype.as_datatype_enum in _OPAQUE else int(dtype.size)


class LoopName(NamedTuple):
    """Name of a tile loop: its segment, its name in the segment, and its grid of tiles."""

    segment: str
    loop: str
    grid: str = ""


@dataclasses.dataclass(frozen=True)
class Metadata:
    """Origin of an op, which copies keep and kernels do not see.

    Attributes:
        layer: Keras layer whose call added the op, or the op that it is a gradient of.
        role: Phase of the step: `"forward"`, `"backward"` or `"update"`; empty before roles are known.
        stage: Pipeline stage.
        loop: Tile loop that the op belongs to.
    """

    layer: str = ""
    role: str = ""
    stage: int | None = None
    loop: LoopName | None = None

    def __str__(self) -> str:
        loop = "" if self.loop is None else f"tile loop {self.loop.segment}/{self.loop.loop} {self.loop.grid}"
        stage = "" if self.stage is None else f"stage {self.stage}"
        layer = self.layer and f"layer {self.layer}"
        return ", ".join(part for part in (layer, self.role, stage, loop) if part)


NO_METADATA = Metadata()


class Node:
    """One operation. Compared by identity.

    Attributes:
        name: Unique name in its graph.
        op: Type of the operation, such as `"Conv2D"`.
        inputs: Data operands in order.
        control_inputs: Nodes that must have run before.
        attrs: `AttrValue` messages by name; copies share the mapping, which is replaced and never edited.
        device: Requested device, or an empty string.
        outputs: (dtype, shape) of every output.
        loop: Facts about results whose memory is not in their shapes, such as those of a loop; `None` for other ops.
        metadata: Origin of the op.
    """

    __slots__ = ("attrs", "control_inputs", "device", "inputs", "loop", "metadata", "name", "op", "outputs")

    def __init__(
        self,
        name: str,
        op: str,
        inputs: Sequence[Tensor] = (),
        *,
        control_inputs: Sequence[Node] = (),
        attrs: Mapping[str, Any] | None = None,
        device: str = "",
        outputs: Sequence[tuple[tf.DType, Shape]] = (),
    ) -> None:
        self.name = name
        self.op = op
        self.inputs = list(inputs)
        self.control_inputs = list(control_inputs)
        self.attrs: Mapping[str, Any] = attrs or {}
        self.device = device
        self.outputs = list(outputs)
        self.loop: LoopFacts | None = None
        self.metadata = NO_METADATA

    def __repr__(self) -> str:
        return f"Node({self.op} {self.name!r})"

    @property
    def stateful(self) -> bool:
        """Return whether TensorFlow registers the op as stateful."""
        return tf_internals.is_stateful(self.op)

    @property
    def kernel(self) -> str:
        """Return the type of the op whose kernel runs; for a call per pixel, the op that its function applies."""
        return self.attrs[PER_PIXEL].s.decode() if PER_PIXEL in self.attrs else self.op

    @property
    def variable_handles(self) -> list[Tensor]:
        """Return the handles of variables among the operands; placeholders of handles identify variables."""
        return [tensor for tensor in self.inputs if tensor.dtype == tf.resource]

    @property
    def may_write_variable(self) -> bool:
        """Return whether the op may write one of its variables; one with a function body may do anything."""
        return self.op not in _VARIABLE_READERS and bool(self.variable_handles)

    def without_edges(self) -> Node:
        """Return a copy without operands and control inputs."""
        copied = Node.__new__(Node)  # `__init__` would take half of the time of a copy.
        copied.name = self.name
        copied.op = self.op
        copied.inputs = []
        copied.control_inputs = []
        copied.attrs = self.attrs
        copied.device = self.device
        copied.outputs = self.outputs[:]
        copied.loop = self.loop
        copied.metadata = self.metadata
        return copied

    def out(self, index: int = 0) -> Tensor:
        """Return output `index` as a tensor."""
        return tuple.__new__(Tensor, (self, index))  # Skips the slow constructor of a named tuple.


class Tensor(NamedTuple):
    """One output of a node."""

    node: Node
    index: int  # type: ignore[assignment]  # Shadows `tuple.index`, which is not used.

    @property
    def name(self) -> str:
        """`node:index`, as TensorFlow writes it."""
        return f"{self.node.name}:{self.index}"

    @property
    def dtype(self) -> tf.DType:
        """Element type."""
        return self.node.outputs[self.index][0]

    @property
    def shape(self) -> Shape:
        """Static shape; `None` if the rank is unknown, with `None` for unknown sizes."""
        return self.node.outputs[self.index][1]

    def estimated_size(self) -> LoopFacts | None:
        """Return facts for an op whose result has the size of this tensor; `None` if that is in the shape."""
        shapes = {} if self.node.loop is None else self.node.loop.estimated_shapes
        return LoopFacts({}, estimated_shapes={0: shapes[self.index]}) if self.index in shapes else None

    @property
    def estimated_shape(self) -> Shape:
        """Static shape, with estimates of unknown sizes where there are some."""
        shape = self.node.outputs[self.index][1]
        return shape if self.node.loop is None else self.node.loop.estimated_shapes.get(self.index, shape)

    def num_bytes(self, batch: int = 1) -> int:
        """Return the bytes of the tensor, with `batch` for each unknown size; 0 for an unknown rank.

        The bytes of a tensor list are those of its elements. Where several sizes are unknown, the operand of a reshape
        or transposition may have fewer unknown ones. A reduction has at most the bytes of its operand.
        """
        dtype, shape = self.dtype, self.estimated_shape
        if self.node.op in _KEEP_SIZE and not self.index and shape is not None and shape.count(None) > 1:
            operand = self.node.inputs[0]
            if operand.estimated_shape is not None and operand.estimated_shape.count(None) <= shape.count(None):
                return operand.num_bytes(batch)
        if self.node.loop is not None and dtype == tf.variant and self.index in self.node.loop.lists:
            return self.node.loop.lists[self.index].num_bytes(batch)
        num_bytes = shape_bytes(dtype, shape, batch)
        if self.node.op in _REDUCTIONS and self.node.inputs and shape is not None and None in shape:
            operand = self.node.inputs[0]
            if operand.shape is not None and operand.dtype == dtype:
                return min(num_bytes, operand.num_bytes(batch))
        return num_bytes


@dataclasses.dataclass
class Graph:
    """Nodes with the interface of the function that they were read from.

    Attributes:
        nodes: By name, in creation order.
        inputs: Placeholders of the arguments, then of the captured tensors.
        outputs: Flat results.
        keep: Nodes that must run for their effect.
        library: Function definitions that nodes refer to.
        versions: Producer versions, needed for import.
        aliases: Tensors that canonicalization replaced, by their old name.
        same_size: Pairs of positions in `inputs` whose unknown leading sizes are assumed to be equal.
        unordered: Names of stateful nodes that are ordered by their edges alone.
        variables: (dtype, shape) of the variable behind the handle that an input is, by the input's name.
        sizes: Unknown leading sizes of the arguments that the step is planned for, by position in `inputs`; empty if
            all of them are the batch size.
        device: The device that the graph is rewritten for; that of ops which name none.
        history: Earlier states, oldest first; empty unless they are recorded (`graph_pass.dumping_to`).
    """

    nodes: dict[str, Node]
    inputs: list[Tensor]
    outputs: list[Tensor]
    keep: list[Node]
    library: Any
    versions: Any
    aliases: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    same_size: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    unordered: set[str] = dataclasses.field(default_factory=set)
    variables: dict[str, tuple[tf.DType, Shape]] = dataclasses.field(default_factory=dict)
    sizes: Mapping[int, int] = dataclasses.field(default_factory=dict)
    device: DeviceModel = dataclasses.field(default_factory=planned_device)
    history: tuple[GraphState, ...] = ()

    def copy(self) -> Graph:
        """Return a copy with its own nodes, so that edits do not reach this graph."""
        new = {name: node.without_edges() for name, node in self.nodes.items()}
        for copied, node in zip(new.values(), self.nodes.values(), strict=True):
            copied.inputs = [new[source.name].out(index) for source, index in node.inputs]
            if node.control_inputs:
                copied.control_inputs = [new[before.name] for before in node.control_inputs]

        def moved(tensors: Iterable[Tensor]) -> list[Tensor]:
            return [Tensor(new[t.node.name], t.index) for t in tensors]

        library = type(self.library)()
        library.CopyFrom(self.library)
        return dataclasses.replace(
            self,
            nodes=new,
            inputs=moved(self.inputs),
            outputs=moved(self.outputs),
            keep=[new[n.name] for n in self.keep],
            library=library,
            aliases={old: Tensor(new[t.node.name], t.index) for old, t in self.aliases.items() if t.node.name in new},
            same_size=set(self.same_size),
            unordered=set(self.unordered),
            variables=dict(self.variables),
        )

    def device_of(self, node: Node) -> str:
        """Return the device that an op runs on, such as `"GPU:1"`."""
        return node.device.rpartition("/")[2].removeprefix("device:") or self.device.name

    def add(self, node: Node) -> Node:
        """Add `node`; its name must be new."""
        if node.name in self.nodes:
            raise AssertionError(f"two nodes named {node.name!r}")
        self.nodes[node.name] = node
        return node

    def new_node(self, name: str, op: str, inputs: Sequence[Tensor] = (), **fields: Any) -> Node:
        """Add a node with a unique name that begins with `name`; `fields` as for `Node`."""
        return self.add(Node(self.unique_name(name), op, inputs, **fields))

    def add_beside(
        self, near: Node, op: str, inputs: Sequence[Tensor], attrs: Mapping[str, Any], outputs: Sequence[Any]
    ) -> Node:
        """Add a node with a name derived from `near`, on the same device."""
        node = self.new_node(f"{near.name}/{op}", op, inputs, attrs=attrs, device=near.device, outputs=outputs)
        node.metadata = near.metadata
        return node

    def unique_name(self, name: str) -> str:
        """Return `name`, or `name_1`, `name_2`, ... if it is taken."""
        candidate, count = name, 0
        while candidate in self.nodes:
            count += 1
            candidate = f"{name}_{count}"
        return candidate

    def consumers(self) -> dict[Tensor, list[tuple[Node, int]]]:
        """Return the (node, operand position) pairs that read each tensor."""
        result: dict[Tensor, list[tuple[Node, int]]] = {}
        for node in self.nodes.values():
            for position, tensor in enumerate(node.inputs):
                result.setdefault(tensor, []).append((node, position))
        return result

    def dependencies(self) -> tuple[dict[Node, int], dict[Node, list[Node]]]:
        """Return the number of nodes that each node waits for, and its successors; a repeated operand counts twice."""
        waiting: dict[Node, int] = {}
        after: dict[Node, list[Node]] = {node: [] for node in self.nodes.values()}
        for node in self.nodes.values():
            waiting[node] = len(node.inputs) + len(node.control_inputs)
            for other, _ in node.inputs:
                after[other].append(node)
            for other in node.control_inputs:
                after[other].append(node)
        return waiting, after

    def levels(self) -> dict[Node, int]:
        """Return the topological order γ of TFLMS (Le et al., 2018, section 3): the longest distance from a source.

        Data and control edges count alike. Nodes of a lower level come first.

        Raises:
            RewriteError: If the graph has a cycle.
        """
        level: dict[Node, int] = {}
        for node in self.execution_order():
            highest = -1
            for before, _ in node.inputs:
                highest = max(highest, level[before])
            for before in node.control_inputs:
                highest = max(highest, level[before])
            level[node] = highest + 1
        return level

    def execution_order(
        self, slow: Mapping[Node, float] | None = None, seconds: Callable[[Node], float] | None = None
    ) -> list[Node]:
        """Return the order of TensorFlow's executor: the op that is ready first runs first.

        Without `slow` it is the order by level, as in `levels`.

        Args:
            slow: Seconds of nodes that run concurrently with others, one of them at a time.
            seconds: Duration of each other node. Without it slow nodes end only when all others wait for them.

        Raises:
            RewriteError: If the graph has a cycle.
        """
        waiting, after = self.dependencies()
        order = [node for node, count in waiting.items() if not count]
        if slow:
            order = list(_concurrent_order(order, after, waiting, slow, seconds or (lambda node: 0.0)))
        else:
            for node in order:  # The list is its own queue (Kahn's algorithm).
                for other in after[node]:
                    waiting[other] -= 1
                    if not waiting[other]:
                        order.append(other)
        if len(order) < len(self.nodes):
            cycle = cycle_in({node: predecessors(node) for node in self.nodes.values()})
            raise RewriteError(f"The graph has a cycle through {cycle}.")
        return order

    def replace_tensors(self, mapping: Mapping[Tensor, Tensor], *, waits: bool = False) -> None:
        """Replace operands, in one pass over the graph: each consumer of a key reads its value.

        Args:
            mapping: New tensor for each replaced one.
            waits: Whether ops that wait for the producer of a key wait for the producers of the new tensors instead.
        """
        if not mapping:
            return
        sources: dict[Node, list[Node]] = {}
        for old, new in mapping.items() if waits else ():
            sources.setdefault(old.node, []).append(new.node)
        for node in self.nodes.values():
            if any(t in mapping for t in node.inputs):
                node.inputs = [mapping.get(t, t) for t in node.inputs]
            if any(c in sources for c in node.control_inputs):
                node.control_inputs = list(dict.fromkeys(s for c in node.control_inputs for s in sources.get(c, [c])))
        self.outputs = [mapping.get(t, t) for t in self.outputs]
        self.aliases = {name: mapping.get(t, t) for name, t in self.aliases.items()}
        for old, new in mapping.items():
            self.aliases[old.name] = new

    def prune(self) -> int:
        """Remove dead nodes, which neither an output nor an effect needs; return their number."""
        live = ancestors([t.node for t in self.outputs] + self.keep)
        live.update(t.node for t in self.inputs)
        dropped = [name for name, node in self.nodes.items() if node not in live]
        for name in dropped:
            del self.nodes[name]
        self.aliases = {name: t for name, t in self.aliases.items() if t.node in live}
        return len(dropped)

    def to_graph_def(self) -> Any:
        """Return the graph as a `GraphDef`, nodes in topological order.

        Inputs are fed, so control edges from their placeholders are left out: such an edge would require the
        placeholder.
        """
        fed = {tensor.node for tensor in self.inputs}
        graph_def = tf.compat.v1.GraphDef(library=self.library, versions=self.versions)
        for node in self.execution_order():
            node_def = graph_def.node.add(name=node.name, op=node.op, device=node.device)
            for tensor in node.inputs:
                suffix = f":{tensor.index}" if tensor.index else ""
                node_def.input.append(tensor.node.name + suffix)
            node_def.input.extend(sorted("^" + before.name for before in set(node.control_inputs) - fed))
            for key, value in node.attrs.items():
                node_def.attr[key].CopyFrom(value)
        return graph_def


class GraphState(NamedTuple):
    """State of a graph after a pass, or after a step of one.

    Attributes:
        title: Name of the pass or of the step.
        purpose: First line of its docstring.
        graph: A copy of the graph.
    """

    title: str
    purpose: str
    graph: Graph


def _concurrent_order(
    sources: Iterable[Node],
    after: Mapping[Node, Sequence[Node]],
    waiting: dict[Node, int],
    slow: Mapping[Node, float],
    seconds: Callable[[Node], float],
) -> Iterator[Node]:
    """Simulate an executor that runs slow ops beside the others; yield nodes in the order in which they end.

    Begins with `sources`, and counts `waiting` down. `slow` and `seconds` as for `Graph.execution_order`.
    """
    ready = collections.deque(sources)
    running = collections.deque[tuple[float, Node]]()  # (end time, node)
    now = 0.0
    while ready or running:
        if running and (not ready or running[0][0] <= now):
            ended, node = running.popleft()
            now = max(now, ended)
        else:
            node = ready.popleft()
            now += seconds(node)
        yield node
        for other in after[node]:
            waiting[other] -= 1
            if not waiting[other] and other in slow:
                begin = max(now, running[-1][0]) if running else now
                running.append((begin + slow[other], other))
            elif not waiting[other]:
                ready.append(other)


def cycle_in(waits_for: Mapping[Node, Iterable[Node]]) -> list[str]:
    """Return the names of up to eight nodes of a cycle; empty without one."""
    try:
        graphlib.TopologicalSorter(waits_for).prepare()
    except graphlib.CycleError as error:
        return [node.name for node in error.args[1][:8]]
    return []


def predecessors(node: Node) -> list[Node]:
    """Return the nodes that must run before `node`."""
    return [t.node for t in node.inputs] + node.control_inputs


def producers(node: Node) -> list[Node]:
    """Return the nodes that produce the operands of `node`."""
    return [tensor.node for tensor in node.inputs]


def ancestors(nodes: Iterable[Node], waits_for: Callable[[Node], Iterable[Node]] | None = None) -> set[Node]:
    """Return `nodes` and all nodes that must run before them.

    `waits_for` gives the direct predecessors of a node; by default those by data and control edges.
    """
    waits_for = predecessors if waits_for is None else waits_for
    seen: set[Node] = set(nodes)
    stack = list(seen)
    while stack:
        for before in waits_for(stack.pop()):
            if before not in seen:
                seen.add(before)
                stack.append(before)
    return seen
