"""TensorFlow's graph optimizers, run for a GPU that need not be in the machine, and counts of their changes.

The eager runtime lowers loops to `Switch` and `Merge`, places all ops, and then optimizes one graph. `placed` does the
first two: a test holds its ops against those of the runtime. All ops are placed on the GPU except those with the device
of the host, such as swaps; the optimizers ask for no kernels.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.core.protobuf import device_properties_pb2, meta_graph_pb2, rewriter_config_pb2
from tensorflow.python.grappler import cluster, item, tf_optimizer

from rewriters.device.gpu_kernels import SWITCHED_OFF
from rewriters.ir import tf_internals
from rewriters.ir.device_model import Card

OPTIMIZERS = tuple(
    field.name
    for field in rewriter_config_pb2.RewriterConfig.DESCRIPTOR.fields
    if field.enum_type is not None and field.enum_type.name in ("Toggle", "MemOptType")
)
"""Fields of `RewriterConfig`, one for each optimizer."""

SWAPPED = "_CopyFromGpuToHost"
"""First copy of a swap that the memory optimizer adds."""
CONVOLUTION = re.compile(r"_?(Native|Fused)*(Depthwise)?(C|c)onv[23][dD]")
"""Op types of convolutions and of their gradients, fused ones included."""

Pair = tuple[int, int]
"""A number of the main graph, and one of the bodies of loops."""

_DEVICE = "/job:localhost/replica:0/task:0/device:"
_MEGAHERTZ = 1500
_OPERATIONS_PER_CORE = 2 * 64
"""Floating point operations of a multiprocessor in a cycle; the memory optimizer estimates times."""


class PlacedGraph(NamedTuple):
    """A graph as the graph optimizers get it.

    Attributes:
        graph_def: The graph with lowered loops, in which each op has a device.
        fetches: Ops that must stay.
    """

    graph_def: Any
    fetches: tuple[str, ...]


def placed(concrete_fn: Any) -> PlacedGraph:
    """Return the graph of a traced function with lowered loops, on the first GPU."""
    graph_def = concrete_fn.graph.as_graph_def()
    nodes = {node.name: node for node in graph_def.node}
    for number, tensor in enumerate(concrete_fn.inputs):
        _make_argument(nodes[tensor.op.name], number, tensor)
    results = [f"result_{number}" for number in range(len(concrete_fn.outputs))]
    for number, (name, tensor) in enumerate(zip(results, concrete_fn.outputs, strict=True)):
        node = graph_def.node.add(name=name, op="_Retval", input=[tensor.name])
        node.attr["T"].type = tensor.dtype.as_datatype_enum
        node.attr["index"].i = number
    fetches = (*results, *(op.name for op in tf_internals.control_outputs(concrete_fn)))
    lowered = _optimize_graph(graph_def, fetches, _devices(None, 0), _lowering())
    for node in lowered.node:
        node.device = _DEVICE + ("CPU:0" if "CPU" in node.device else "GPU:0")
    return PlacedGraph(lowered, fetches)


def _make_argument(node: Any, number: int, tensor: Any) -> None:
    """Replace a placeholder by an argument: the runtime tells it the shape of its variable, a placeholder has none."""
    node.op = "_Arg"
    node.ClearField("attr")
    node.attr["T"].type = tensor.dtype.as_datatype_enum
    node.attr["index"].i = number
    node.attr["_output_shapes"].list.shape.append(tensor.shape.as_proto())
    variable = tf_internals.variable_spec(tensor)
    if variable is not None:
        node.attr["_handle_dtypes"].list.type.append(variable[0].as_datatype_enum)
        node.attr["_handle_shapes"].list.shape.append(tf.TensorShape(variable[1]).as_proto())


def _lowering() -> Any:
    """Return options with which the optimizers inline functions and lower loops, and nothing else."""
    options = rewriter_config_pb2.RewriterConfig(meta_optimizer_iterations=1, min_graph_nodes=-1)
    options.optimizers.append("function")
    return options


def _devices(card: Card | None, memory_bytes: int) -> list[Any]:
    """Return a host, and a GPU as the runtime describes it: memory is what TensorFlow may allocate."""
    properties, named = device_properties_pb2.DeviceProperties, device_properties_pb2.NamedDevice
    gpu = properties(type="GPU", vendor="NVIDIA", memory_size=memory_bytes)
    if card is not None:
        gpu.environment.update(architecture=str(card.compute_capability), cuda="12050", cudnn="9000")
        gpu.frequency, gpu.num_cores = _MEGAHERTZ, round(card.float32 / (_MEGAHERTZ * 1e6 * _OPERATIONS_PER_CORE))
        gpu.bandwidth = round(card.memory_rate / 1e3)
    host = properties(type="CPU", frequency=2000, num_cores=8, memory_size=2**36)
    return [named(name=f"{_DEVICE}CPU:0", properties=host), named(name=f"{_DEVICE}GPU:0", properties=gpu)]


def _meta_graph(graph_def: Any, fetches: Iterable[str]) -> Any:
    meta_graph = meta_graph_pb2.MetaGraphDef(graph_def=graph_def)
    meta_graph.collection_def["train_op"].node_list.value.extend(fetches)  # The graph optimizers keep these ops.
    return meta_graph


def _optimize_graph(graph_def: Any, fetches: Iterable[str], devices: Sequence[Any], options: Any) -> Any:
    """Return a graph as TensorFlow's graph optimizers change it.

    TensorFlow optimizes graphs only when it runs them, on devices of this machine.

    Args:
        graph_def: The graph.
        fetches: Names of ops that are kept.
        devices: Devices as `NamedDevice` protos; they need not be in this machine.
        options: The optimizers, as `RewriterConfig`.

    Raises:
        tf.errors.OpError: If an optimizer fails and `options.fail_on_optimizer_errors` is set.
    """
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.CopyFrom(options)
    virtual = cluster.Cluster(devices=devices)
    try:
        return tf_optimizer.OptimizeGraph(config, _meta_graph(graph_def, fetches), verbose=False, cluster=virtual)
    finally:
        virtual.Shutdown()


def _inferred_shapes(graph_def: Any, fetches: Iterable[str]) -> dict[str, list[tuple[int, ...] | None]]:
    """Return the shapes of the results of each op, also in lowered loops; a negative size is unknown.

    `tf.graph_util.import_graph_def` infers no shapes of the state variables of lowered loops.
    """
    properties = item.Item(_meta_graph(graph_def, fetches)).GetOpProperties()
    return {
        name: [None if p.shape.unknown_rank else tuple(dim.size for dim in p.shape.dim) for p in results]
        for name, results in properties.items()
    }


def optimized(
    graph: PlacedGraph,
    card: Card,
    off: Iterable[str] = (),
    *,
    memory_bytes: int | None = None,
    is_strict: bool = False,
) -> PlacedGraph:
    """Return a graph after the optimizers.

    Args:
        graph: The graph before.
        card: The GPU.
        off: Optimizers that are off, as fields of `RewriterConfig`; others are as by default.
        memory_bytes: Bytes that TensorFlow may allocate; by default those of the card.
        is_strict: Whether the failure of an optimizer is an error. TensorFlow ignores it, and all of its changes.
    """
    options = rewriter_config_pb2.RewriterConfig(min_graph_nodes=-1, fail_on_optimizer_errors=is_strict)
    tf_internals.switch_off(options, off)
    devices = _devices(card, card.memory_limit if memory_bytes is None else memory_bytes)
    return graph._replace(graph_def=_optimize_graph(graph.graph_def, graph.fetches, devices, options))


def all_but(optimizer: str) -> tuple[str, ...]:
    """Return all optimizers except one."""
    return tuple(name for name in OPTIMIZERS if name != optimizer)


def failure(graph: PlacedGraph, card: Card, off: Iterable[str] = ()) -> str:
    """Return the error of the first optimizer that fails; an empty text if none does."""
    try:
        optimized(graph, card, off, is_strict=True)
    except tf.errors.OpError as error:
        return error.message
    return ""


def loop_frames(graph_def: Any) -> dict[str, tuple[str, ...]]:
    """Return the lowered loops around each op, outermost first; empty for an op of the main graph."""
    nodes = {node.name: node for node in graph_def.node}
    readers: dict[str, list[str]] = collections.defaultdict(list)
    for node in graph_def.node:
        for operand in node.input:
            readers[_producer(operand)].append(node.name)
    frames: dict[str, tuple[str, ...]] = {}
    waiting = [(node.name, ()) for node in graph_def.node if not node.input]
    while waiting:
        name, outer = waiting.pop()
        if name in frames:
            continue
        node = nodes[name]
        frames[name] = outer
        if node.op == "Enter":
            frames[name] = (*outer, node.attr["frame_name"].s.decode())
        elif node.op == "Exit":
            frames[name] = outer[:-1]
        waiting += [(reader, frames[name]) for reader in readers[name]]
    return frames


def _producer(operand: str) -> str:
    return operand.removeprefix("^").partition(":")[0]


def changes(before: PlacedGraph, after: PlacedGraph) -> dict[str, Any]:
    """Return the numbers of ops that an optimizer added, removed, and moved between loops or devices."""
    frames = [loop_frames(graph.graph_def) for graph in (before, after)]
    common = frames[0].keys() & frames[1].keys()
    devices = [{node.name: node.device for node in graph.graph_def.node} for graph in (before, after)]
    return {
        "added": _split(frames[1], frames[1].keys() - common),
        "removed": _split(frames[0], frames[0].keys() - common),
        "moved": sum(frames[0][name] != frames[1][name] for name in common),
        "placed_elsewhere": sum(devices[0][name] != devices[1][name] for name in common),
    }


def _split(frames: Mapping[str, Sequence[str]], names: Iterable[str]) -> Pair:
    """Return how many ops are in the main graph, and how many in bodies."""
    in_loops = [bool(frames[name]) for name in names]
    return in_loops.count(False), in_loops.count(True)


def largest_constant(graph: PlacedGraph) -> int:
    """Return the bytes of the largest constant."""
    tensors = [node.attr["value"].tensor for node in graph.graph_def.node if node.op == "Const"]
    return max(
        math.prod(dim.size for dim in tensor.tensor_shape.dim) * tf.dtypes.as_dtype(tensor.dtype).size
        for tensor in tensors
        if tensor.dtype != tf.string
    )


def reaches(graph: PlacedGraph, first: str, last: str) -> bool:
    """Return whether an op runs before another one: along edges of data, or of control."""
    operands = {node.name: [_producer(operand) for operand in node.input] for node in graph.graph_def.node}
    seen, waiting = set(), [last]
    while waiting:
        name = waiting.pop()
        if name == first:
            return True
        if name not in seen:
            seen.add(name)
            waiting += operands[name]
    return False


def optimizer_figures(graph: PlacedGraph) -> dict[str, Any]:
    """Return counts of an optimized graph; pairs are of the main graph and of bodies.

    Returns:
        `transposes`: Transposes that the layout optimizer added. `transposed_bytes`: Their bytes where shapes are
        static. `unknown_sizes`: Transposes without a static shape, such as those of tiles whose size varies.
        `convolutions`: Convolutions and gradients of them; `channels_first`, `fused`: those of them. `swaps`: Pairs of
        copies that the memory optimizer added. `sums`: Sums that it replaced by updates of a temporary variable.
    """
    frames = loop_frames(graph.graph_def)
    convolutions = [node for node in graph.graph_def.node if CONVOLUTION.match(node.op)]
    added = [node.name for node in graph.graph_def.node if node.op == "Transpose" and "LayoutOptimizer" in node.name]
    shapes = _inferred_shapes(graph.graph_def, graph.fetches) if added else {}
    sizes = {name: _num_elements(shapes.get(name)) for name in added}
    types = {
        node.name: tf.dtypes.as_dtype(node.attr["T"].type).size for node in graph.graph_def.node if "T" in node.attr
    }
    num_bytes = [0, 0]
    for name, size in sizes.items():
        num_bytes[bool(frames[name])] += (size or 0) * types[name]
    return {
        "transposes": _split(frames, added),
        "transposed_bytes": tuple(num_bytes),
        "unknown_sizes": sum(size is None for size in sizes.values()),
        "convolutions": len(convolutions),
        "channels_first": sum(node.attr["data_format"].s in (b"NCHW", b"NCDHW") for node in convolutions),
        "fused": sum(node.op.startswith("_") for node in convolutions),
        "swaps": sum(node.op == SWAPPED for node in graph.graph_def.node),
        "sums": _split(frames, [node.name for node in graph.graph_def.node if node.op == "TemporaryVariable"]),
    }


def _num_elements(shapes: Sequence[Sequence[int] | None] | None) -> int | None:
    """Return the number of entries of the only result of an op; `None` if it is unknown."""
    if not shapes or shapes[0] is None or any(size < 0 for size in shapes[0]):
        return None
    return math.prod(shapes[0])


def layout_figures(concrete_fn: Any, card: Card, memory_bytes: int | None = None) -> dict[str, Any]:
    """Return what TensorFlow's optimizers do to a step on a GPU, by default and with the options of rewritten steps.

    Args:
        concrete_fn: The original or the rewritten step, traced.
        card: The GPU.
        memory_bytes: Bytes that TensorFlow may allocate; by default those of the card.

    Returns:
        `ops` and `loops` of the step; `default` and `rewritten`: `optimizer_figures` with either options; `failure`:
        the error of an optimizer that fails by default, whose changes TensorFlow drops.

    Raises:
        tf.errors.OpError: If an optimizer fails with the options of rewritten steps.
    """
    graph = placed(concrete_fn)
    figures: dict[str, Any] = {
        "ops": len(graph.graph_def.node),
        "loops": sum(node.op == "LoopCond" for node in graph.graph_def.node),
        "failure": "",
    }
    try:
        by_default = optimized(graph, card, memory_bytes=memory_bytes, is_strict=True)
    except tf.errors.OpError as error:
        figures["failure"] = error.message.partition(" {")[0]  # The rest are names of thousands of ops.
        by_default = optimized(graph, card, memory_bytes=memory_bytes)
    rewritten = optimized(graph, card, SWITCHED_OFF, memory_bytes=memory_bytes, is_strict=True)
    return figures | {"default": optimizer_figures(by_default), "rewritten": optimizer_figures(rewritten)}
