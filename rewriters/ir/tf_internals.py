"""Every use of a TensorFlow interface that is not public, in one place.

If a new TensorFlow breaks the project, it breaks here. Each function says what
it stands in for and why the public interface is not enough.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.client import device_lib
from tensorflow.python.eager import context
from tensorflow.python.framework import func_graph, function_def_to_graph, op_def_registry, ops
from tensorflow.python.ops import cond_v2, handle_data_util

from rewriters.ir.op_traits import Trait, ops_with

__all__: list[str] = []

_NUMBER = re.compile(r"/(then|else|branch\d+)/_\d+/")

_BRANCH_OF_STEP = re.compile(r"^[^/]+/(?:then|else)/_/")


def is_stateful(op_type: str) -> bool:
    """Whether TensorFlow registers `op_type` as stateful (unknown types count as stateful)."""
    op_def = op_def_registry.get(op_type)
    return True if op_def is None else bool(op_def.is_stateful)


def control_outputs(concrete_fn: Any) -> list[Any]:
    """Operations that a traced function runs for their effect alone."""
    return list(concrete_fn.graph.control_outputs)


def operations(graph: Any, way: str = "") -> Iterator[tuple[str, Any]]:
    """(name in a run, operation) of all in a graph, and in the branches that it takes one of, such as `tf.cond`'s.

    A run has the operations of branches in the place of what chooses. Their names then begin with the branch's and a
    number that only the run knows, in the place of which `_` stands, here and in what is read from `step_stats`.
    """
    for operation in graph.get_operations():
        yield way + operation.name, operation
        if operation.type in ops_with(Trait.CONDITIONAL):
            for number, branch in enumerate(cond_v2.get_func_graphs(operation)):
                name = ("then", "else")[number] if operation.type.endswith("If") else f"branch{number}"
                yield from operations(branch, f"{way}{operation.name}/{name}/_/")


def own_name(name: str) -> str:
    """A name in a run without the branch at its begin: a step for batches of any size is one of two."""
    return _BRANCH_OF_STEP.sub("", name)


def _in_run(node: Any) -> str:
    """The name of what ran, as `operations` has it."""
    return _NUMBER.sub(r"/\1/_/", node.node_name)


def trace_func_graph(name: str, function: Callable[..., Any], specs: Sequence[tf.TypeSpec]) -> Any:
    """Trace `function` into a graph of its own, without automatic control dependencies.

    A `tf.function` would chain the loop's operations to effects that are not there.
    """
    return func_graph.func_graph_from_py_func(name, function, list(specs), {}, add_control_dependencies=False)


def function_body(function_def: Any) -> tuple[Any, dict[str, str]]:
    """A library function as a `GraphDef`, and flat names of its tensors.

    `FunctionDef` names tensors `node:output_arg:index`; a graph needs `node:index`.
    """
    return function_def_to_graph.function_def_to_graph_def(function_def)


def untraced(function: Any) -> Any:
    """The same `tf.function` without its traces: layers can be watched only while a step is traced."""
    return function._clone(None)


def default_func_graph() -> Any:
    """The function graph being traced, or None outside of a trace."""
    graph = tf.compat.v1.get_default_graph()
    return graph if isinstance(graph, func_graph.FuncGraph) else None


def run_independently(operations: Iterable[Any]) -> None:
    """Let stateful operations of the function that is being traced run as soon as their edges allow.

    Automatic control dependencies bring all others into one line, in the order in which they were made.
    """
    graph = default_func_graph()
    manager = getattr(graph, "experimental_acd_manager", None)
    if manager is not None:
        for operation in operations:
            manager.run_independently(operation)


def copy_handle_data(source: Any, target: Any) -> None:
    """Tell a resource placeholder which variable it stands for; reads have no shape otherwise."""
    if source.dtype == tf.resource:
        handle_data_util.copy_handle_data(source, target)


def kept_apart(name: str) -> dict[str, Any]:
    """Attributes that keep an op from being made one with an equal one, because its result is changed in place."""
    return {"_tflms_sft_own": tf.compat.v1.AttrValue(s=name.encode())}


def prevent_cse(tensor: Any) -> None:
    """The same for an op that exists."""
    for key, value in kept_apart(tensor.op.name).items():
        tensor.op._set_attr(key, value)


def create_op(
    op_type: str, operands: Sequence[Any], dtypes: Sequence[Any], attrs: Any, name: str, device: str
) -> list[Any]:
    """Add any op, by type, to the graph being traced. `tf.raw_ops` wants attributes as Python values."""
    graph = tf.compat.v1.get_default_graph()
    values = [tf.convert_to_tensor(t) for t in operands]
    with tf.device(device or None):
        operation = graph._create_op_internal(op_type, values, list(dtypes), attrs=dict(attrs), name=name)
    return list(operation.outputs)


def pack_outputs(concrete_fn: Any, flat: Sequence[Any]) -> Any:
    """Flat results in the structure that the traced function returned (`None` leaves kept)."""
    structured = concrete_fn.structured_outputs
    remaining = iter(flat)
    parts = tf.nest.flatten(structured, expand_composites=True)  # Of `tf.IndexedSlices` and the like.
    leaves = [None if leaf is None else next(remaining) for leaf in parts]
    assert next(remaining, None) is None, "more results than the structure has"
    return tf.nest.pack_sequence_as(structured, leaves, expand_composites=True)


def register_functions(library: Any) -> None:
    """Make loop bodies known to the eager runtime; importing a graph tells only the graph.

    They are known already while the graph that they were traced in is alive. Adding
    them again counts a reference, so that they outlive it.
    """
    eager = context.context()
    eager.ensure_initialized()
    for function_def in library.function:
        eager.add_function_def(function_def)


def _handle_data(tensor: Any) -> Any:
    """Shape and dtype of the variable behind a resource tensor, eager or symbolic."""
    if isinstance(tensor, ops.EagerTensor):
        return tensor._handle_data
    return handle_data_util.get_resource_handle_data(tensor)


def must_compile(concrete_fn: Any) -> bool:
    """Whether XLA has to compile a traced function."""
    attrs = concrete_fn.function_def.attr
    return "_XlaMustCompile" in attrs and bool(attrs["_XlaMustCompile"].b)


def captured_variables(concrete_fn: Any) -> list[tuple[Any, Any]]:
    """(handle, dtype) of each variable that a traced function reads or writes.

    `FuncGraph.variables` knows only those that were used as Python objects while it was traced.
    """
    found = []
    for tensor in concrete_fn.captured_inputs:
        data = _handle_data(tensor) if tensor.dtype == tf.resource else None
        if data is not None and data.is_set and len(data.shape_and_type) == 1:
            found.append((tensor, tf.dtypes.as_dtype(data.shape_and_type[0].dtype)))
    return found


def living_variables(concrete_fn: Any) -> list[Any]:
    """Variables that a traced function was made with, which it does not keep, as far as somebody does."""
    return [variable for reference in concrete_fn.graph._weak_variables if (variable := reference()) is not None]


def share_variables(concrete_fn: Any, other: Any) -> None:
    """Let a traced function know the variables of one that it was made of, which has handles of them alone."""
    other.graph.variables = living_variables(concrete_fn)


def variable_sizes(concrete_fn: Any) -> list[int]:
    """Bytes of each variable that a traced function reads or writes."""
    return [size for _, size in variable_places(concrete_fn)]


def variable_places(concrete_fn: Any) -> list[tuple[str, int]]:
    """(device, bytes) of each variable that a traced function reads or writes."""
    found = []
    for tensor in concrete_fn.captured_inputs:
        if tensor.dtype != tf.resource:
            continue
        data = _handle_data(tensor)
        if data is None or not data.is_set:
            continue
        for item in data.shape_and_type:
            shape = tf.TensorShape(item.shape)
            if shape.is_fully_defined():
                size = int(shape.num_elements() or 0) * tf.dtypes.as_dtype(item.dtype).size
                found.append((short_device(tensor.device), size))
    return found


def sizes_of_variables(concrete_fn: Any) -> list[int]:
    """Bytes of the variable behind each captured tensor; 0 for one that is none."""
    found = []
    for tensor in concrete_fn.captured_inputs:
        data = _handle_data(tensor) if tensor.dtype == tf.resource else None
        size = 0
        for item in data.shape_and_type if data is not None and data.is_set else ():
            shape = tf.TensorShape(item.shape)
            if shape.is_fully_defined():
                size += int(shape.num_elements() or 0) * tf.dtypes.as_dtype(item.dtype).size
        found.append(size)
    return found


def memory_limits() -> dict[str, int]:
    """Bytes that TensorFlow may take of each of its devices."""
    return {short_device(found.name): int(found.memory_limit) for found in device_lib.list_local_devices()}


def short_device(name: str) -> str:
    """`GPU:0` of `/job:localhost/replica:0/task:0/device:GPU:0`; the host's if there is none."""
    found = re.search(r"(CPU|GPU|TPU|XPU):\d+", name, re.IGNORECASE)
    return found.group().upper() if found else "CPU:0"


def has_begun() -> bool:
    """Whether TensorFlow has made its devices, after which there can be no others."""
    return bool(context.context()._initialized)


def workers() -> dict[str, str]:
    """Addresses of the machines that this program is connected to, by their names; without its own."""
    server = context.get_server_def()
    if server is None:
        return {}
    tasks = ((job.name, task, address) for job in server.cluster.job for task, address in job.tasks.items())
    own = server.job_name, server.task_index
    return {f"/job:{job}/task:{task}": address for job, task, address in sorted(tasks) if (job, task) != own}


def _captured_value(tensor: Any) -> tuple[bool, Any]:
    """Whether a captured tensor stands for a variable, and its value."""
    if tensor.dtype != tf.resource:
        return False, tensor.numpy()
    data = _handle_data(tensor)
    if data is None or not data.is_set:
        raise TypeError(
            "The step uses a resource that is no variable (a lookup table, an iterator): the run that is traced needs "
            "a copy of what it uses, and of this there is none. Take it out, or measure without `timelines`."
        )
    dtype = tf.dtypes.as_dtype(data.shape_and_type[0].dtype)
    return True, tf.raw_ops.ReadVariableOp(resource=tensor, dtype=dtype).numpy()


def allocations(stats: Any) -> list[tuple[str, int, int, str]]:
    """(device, microseconds, bytes, operation) of everything that was taken or, below zero, given back in a step.

    Args:
        stats: What `step_stats` returned.
    """
    found = []
    for device in stats.dev_stats:
        for node in device.node_stats:
            for memory in node.memory:
                # Operations on a GPU take host memory too.
                place = "CPU:0" if "GPU" in device.device and "GPU" not in memory.allocator_name else device.device
                for micros, amount in _freed([(r.alloc_micros, r.alloc_bytes) for r in memory.allocation_records]):
                    found.append((short_device(place), micros, amount, _in_run(node)))
    return found


class Times(NamedTuple):
    """When an operation began and ended, in microseconds, and the bytes of its results."""

    begun: int
    ended: int
    num_bytes: int


def times(stats: Any) -> dict[str, Times]:
    """The same for what ran, by the operation's name."""
    found = {}
    for device in stats.dev_stats:
        for node in device.node_stats:
            begun = node.all_start_micros
            made = sum(output.tensor_description.allocation_description.requested_bytes for output in node.output)
            found[_in_run(node)] = Times(begun, begun + node.op_end_rel_micros, made)
    return found


def runs(stats: Any) -> Iterator[tuple[str, int, int]]:
    """(operation, microseconds at its begin, at its end) of everything that ran, each turn of a loop by itself."""
    for device in stats.dev_stats:
        for node in device.node_stats:
            yield _in_run(node), node.all_start_micros, node.all_start_micros + node.op_end_rel_micros


def step_stats(concrete_fn: Any, arguments: Sequence[Any]) -> Any:
    """`StepStats` of one run: when each operation ran, where, and what it allocated.

    Metadata of an eagerly run function come back without records; a session's have them. The step runs
    on a copy of the variables, fed with their values.
    """
    graph_def = concrete_fn.graph.as_graph_def()
    held = [_captured_value(tensor) for tensor in concrete_fn.captured_inputs]
    with tf.Graph().as_default() as graph:
        handles: list[Any] = []
        values: list[tuple[Any, Any]] = []
        for number, (is_variable, value) in enumerate(held):
            if not is_variable:
                handles.append(tf.constant(value))
                continue
            handle = tf.raw_ops.VarHandleOp(dtype=value.dtype, shape=value.shape, shared_name=f"copy_{number}")
            handles.append(handle)
            values.append((handle, value))
        names = [t.name for t in concrete_fn.inputs]
        split = len(names) - len(handles)
        feeds = [tf.compat.v1.placeholder(t.dtype, t.shape) for t in concrete_fn.inputs[:split]]
        mapping = dict(zip(names, [*feeds, *handles], strict=True))
        wanted = [t.name for t in concrete_fn.outputs] + [op.name for op in concrete_fn.graph.control_outputs]
        fetched = tf.graph_util.import_graph_def(graph_def, input_map=mapping, return_elements=wanted, name="")
        assign = [tf.raw_ops.AssignVariableOp(resource=h, value=tf.constant(v)) for h, v in values]
        feed = {f: a.numpy() if hasattr(a, "numpy") else a for f, a in zip(feeds, arguments, strict=True)}
        options = tf.compat.v1.RunOptions(trace_level=tf.compat.v1.RunOptions.FULL_TRACE)
        config = tf.compat.v1.ConfigProto(device_count={"CPU": len(tf.config.list_logical_devices("CPU"))})
        with tf.compat.v1.Session(graph=graph, config=config) as session:
            session.run(assign)
            # Tensors, not their ops: Grappler drops what is run for no value and has no effect.
            targets = [f.op if getattr(f, "dtype", None) in (tf.resource, tf.variant) else f for f in fetched]
            session.run(targets, feed)
            session.run(assign)
            metadata = tf.compat.v1.RunMetadata()
            session.run(targets, feed, options=options, run_metadata=metadata)
    return metadata.step_stats


def _freed(records: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Records of one node without what stays: a variable's new value, whose old one is freed unrecorded."""
    stays = sum(amount for _, amount in records)
    result = []
    for micros, amount in records:
        if amount > 0 and amount == stays:
            stays = 0
            continue
        result.append((micros, amount))
    return result
