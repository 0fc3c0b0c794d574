"""All uses of private TensorFlow interfaces.

If a new TensorFlow breaks the project, it breaks here. Each function names the public interface that it replaces, and
why that is not enough.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.core.framework import full_type_pb2
from tensorflow.python import pywrap_tfe
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import func_graph, function_def_to_graph, kernels, op_def_registry, ops
from tensorflow.python.ops import cond_v2, handle_data_util, resource_variable_ops

from rewriters.errors import RewriteError
from rewriters.ir.op_traits import Trait, ops_with

__all__: list[str] = []

_NUMBER = re.compile(r"/(then|else|branch\d+)/_\d+/")

_BRANCH_OF_STEP = re.compile(r"^[^/]+/(?:then|else)/_/")


def is_stateful(op_type: str) -> bool:
    """Return whether TensorFlow registers `op_type` as stateful (unknown types count as stateful)."""
    op_def = op_def_registry.get(op_type)
    return True if op_def is None else bool(op_def.is_stateful)


def is_registered(op_type: str) -> bool:
    """Return whether TensorFlow knows an op type."""
    return op_def_registry.get(op_type) is not None


def has_outputs(op_type: str) -> bool:
    """Return whether an op type has results (unknown types count as having some)."""
    op_def = op_def_registry.get(op_type)
    return True if op_def is None else bool(op_def.output_arg)


class Kernel(NamedTuple):
    """A registered kernel of an op type.

    Attributes:
        types: Allowed types by the attribute that they are the value of.
        host_arguments: Names of operands and results in host memory.
    """

    types: Mapping[str, frozenset[int]]
    host_arguments: frozenset[str]


@functools.cache
def registered_kernels(op_type: str, device: str) -> tuple[Kernel, ...]:
    """Return the kernels of an op type for a kind of device, such as `"GPU"`, in the order in which TensorFlow looks.

    Nothing public lists kernels; `tf.config` knows devices alone. A build for a device registers its kernels on
    machines without one, too. Kernels for any device (`DEFAULT`) come last.
    """
    records = [record for record in kernels.get_registered_kernels_for_op(op_type).kernel if not record.label]
    chosen = sorted((r for r in records if r.device_type == device), key=lambda record: -record.priority)
    chosen += [record for record in records if record.device_type == "DEFAULT"]
    return tuple(
        Kernel(
            {constraint.name: frozenset(constraint.allowed_values.list.type) for constraint in record.constraint},
            frozenset(record.host_memory_arg),
        )
        for record in chosen
    )


def argument_names(op_type: str, attrs: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the name of each operand and of each result of an op; a list of tensors repeats its name.

    `tf.Operation` has positions only. Both are empty for an unknown type, such as the name of a function.
    """
    op_def = op_def_registry.get(op_type)

    def names(arguments: Iterable[Any]) -> list[str]:
        result: list[str] = []
        for argument in arguments:
            count = 1
            if argument.number_attr:
                count = attrs[argument.number_attr].i
            elif argument.type_list_attr:
                count = len(attrs[argument.type_list_attr].list.type)
            result += [argument.name] * count
        return result

    return ([], []) if op_def is None else (names(op_def.input_arg), names(op_def.output_arg))


def type_attributes(op_type: str) -> dict[str, tuple[int, ...]]:
    """Return the default types of each attribute that holds types; a node may lack an attribute with a default."""
    op_def = op_def_registry.get(op_type)
    attributes = [] if op_def is None else [attr for attr in op_def.attr if attr.type in ("type", "list(type)")]
    return {attr.name: types_in(attr.default_value) for attr in attributes}


def default_attributes(op_type: str) -> dict[str, Any]:
    """Return the default values of the attributes of an op type, by name."""
    op_def = op_def_registry.get(op_type)
    attributes = [] if op_def is None else op_def.attr
    return {attr.name: attr.default_value for attr in attributes if attr.HasField("default_value")}


def types_in(attribute: Any) -> tuple[int, ...]:
    """Return the types that an `AttrValue` holds."""
    return (attribute.type,) if attribute.type else tuple(attribute.list.type)


def control_outputs(concrete_fn: Any) -> list[Any]:
    """Return the operations that a traced function runs for their effect alone."""
    return list(concrete_fn.graph.control_outputs)


def operations(graph: Any, way: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name in a run, operation) of a graph and of the branches of its conditionals, such as those of `tf.cond`.

    A run replaces a conditional by the operations of one branch. Their names begin with that of the branch and a number
    that exists only in the run. Here and in the names read from `step_stats` the number is replaced by `_`.
    """
    for operation in graph.get_operations():
        yield way + operation.name, operation
        if operation.type in ops_with(Trait.CONDITIONAL):
            for number, branch in enumerate(cond_v2.get_func_graphs(operation)):
                name = ("then", "else")[number] if operation.type.endswith("If") else f"branch{number}"
                yield from operations(branch, f"{way}{operation.name}/{name}/_/")


def without_branch_prefix(name: str) -> str:
    """Return a name in a run without its branch prefix: a step for any batch size is one of two branches."""
    return _BRANCH_OF_STEP.sub("", name)


def _in_run(node: Any) -> str:
    """Return the name of a node that ran, in the form that `operations` yields."""
    return _NUMBER.sub(r"/\1/_/", node.node_name)


def trace_func_graph(name: str, function: Callable[..., Any], specs: Sequence[tf.TypeSpec]) -> Any:
    """Trace `function` into a graph of its own, without automatic control dependencies.

    A `tf.function` would chain the loop's operations to effects that are not there.
    """
    return func_graph.func_graph_from_py_func(name, function, list(specs), {}, add_control_dependencies=False)


def function_body(function_def: Any, functions: Mapping[str, Any]) -> tuple[Any, dict[str, str]]:
    """Return a library function as a `GraphDef`, and flat names of its tensors.

    `FunctionDef` names tensors `node:output_arg:index`; a graph needs `node:index`.

    Args:
        function_def: The function.
        functions: Definitions of the library by name. TensorFlow looks for those that the function refers to, such as
            the bodies of its loops, in the default graph.
    """
    values = (value for node in function_def.node_def for value in node.attr.values())
    names = {func.name for value in values for func in (value.func, *value.list.func) if func.name}
    library = tf.compat.v1.GraphDef()
    library.library.function.extend(functions[name] for name in names if name in functions)
    with tf.Graph().as_default():
        tf.graph_util.import_graph_def(library, name="")
        return function_def_to_graph.function_def_to_graph_def(function_def)


def untraced(function: Any) -> Any:
    """Return a copy of a `tf.function` without traces: layers can be watched only while a step is traced."""
    return function._clone(None)


def default_func_graph() -> Any:
    """Return the function graph being traced, or None outside of a trace."""
    graph = tf.compat.v1.get_default_graph()
    return graph if isinstance(graph, func_graph.FuncGraph) else None


def run_independently(operations: Iterable[Any]) -> None:
    """Let stateful operations of the function being traced run as soon as their edges allow.

    Automatic control dependencies would chain them to all others, in creation order.
    """
    graph = default_func_graph()
    manager = getattr(graph, "experimental_acd_manager", None)
    if manager is not None:
        for operation in operations:
            manager.run_independently(operation)


def copy_handle_data(source: Any, target: Any) -> None:
    """Associate a resource placeholder with its variable; reads have no shape otherwise."""
    if source.dtype == tf.resource:
        handle_data_util.copy_handle_data(source, target)


def variable_spec(tensor: Any) -> tuple[Any, tuple[int | None, ...] | None] | None:
    """Return (dtype, shape) of the variable behind a handle; `None` for another tensor, or if it is unknown."""
    specs = _variable_specs(tensor)
    if len(specs) != 1:
        return None
    ((dtype, shape),) = specs
    return dtype, None if shape.rank is None else tuple(shape)


def set_handle_spec(handle: Any, dtype: Any, shape: tuple[int | None, ...] | None) -> None:
    """Set type and shape of the variable, or of the elements of the list, that a placeholder stands for.

    Reads have no shape otherwise.
    """
    data = handle_data_util.create_handle_data(tf.TensorShape(shape), dtype)
    if handle.dtype == tf.variant:
        data.shape_and_type[0].type.type_id = full_type_pb2.TFT_ARRAY
    handle_data_util.set_handle_data(handle, data)


def function_definition(name: str, graph: Any) -> Any:
    """Return the definition of a traced function graph, as the library of a graph holds it."""
    return atomic_function.from_func_graph(name, graph, {}).definition


def no_cse_attrs(name: str) -> dict[str, Any]:
    """Return attributes that exclude an op, whose result is changed in place, from common subexpression elimination."""
    return {"_tflms_sft_own": tf.compat.v1.AttrValue(s=name.encode())}


def prevent_cse(tensor: Any) -> None:
    """Exclude an existing op from common subexpression elimination."""
    for key, value in no_cse_attrs(tensor.op.name).items():
        set_attr(tensor.op, key, value)


def set_attr(operation: Any, name: str, value: Any) -> None:
    """Set an attribute of an existing op; nothing public does so for an op that `tf.numpy_function` has added."""
    operation._set_attr(name, value)


def attr_value(value: tf.DType | bool | int | str | Sequence[int]) -> Any:
    """Return a Python value as an attribute."""
    attr = tf.compat.v1.AttrValue
    if isinstance(value, tf.DType):
        return attr(type=value.as_datatype_enum)
    if isinstance(value, bool):
        return attr(b=value)
    if isinstance(value, int):
        return attr(i=value)
    return attr(s=value.encode()) if isinstance(value, str) else attr(list=attr.ListValue(i=value))


def create_op(
    op_type: str, operands: Sequence[Any], dtypes: Sequence[Any], attrs: Any, name: str, device: str
) -> list[Any]:
    """Add any op, by type, to the graph being traced. `tf.raw_ops` requires attributes as Python values."""
    graph = tf.compat.v1.get_default_graph()
    values = [tf.convert_to_tensor(t) for t in operands]
    with tf.device(device or None):
        operation = graph._create_op_internal(op_type, values, list(dtypes), attrs=dict(attrs), name=name)
    return list(operation.outputs)


def pack_outputs(concrete_fn: Any, flat: Sequence[Any]) -> Any:
    """Return flat results in the structure that the traced function returned (`None` leaves stay)."""
    structured = concrete_fn.structured_outputs
    remaining = iter(flat)
    parts = tf.nest.flatten(structured, expand_composites=True)  # Components of composites, such as `tf.IndexedSlices`.
    leaves = [None if leaf is None else next(remaining) for leaf in parts]
    if next(remaining, None) is not None:
        raise RewriteError(
            f"The step has {len(flat)} results, but its structure {structured!r} has fewer. Please report it."
        )
    return tf.nest.pack_sequence_as(structured, leaves, expand_composites=True)


def register_functions(library: Any) -> None:
    """Register loop bodies with the eager runtime; importing a graph registers them with the graph only.

    They are registered already while the graph that they were traced in is alive. Adding them again counts a reference,
    so that they outlive it.
    """
    eager = context.context()
    eager.ensure_initialized()
    for function_def in library.function:
        eager.add_function_def(function_def)


def _variable_specs(tensor: Any) -> list[tuple[Any, tf.TensorShape]]:
    """Return (dtype, shape) of the variables behind a tensor, eager or symbolic; empty if it is no known handle."""
    if tensor.dtype != tf.resource:
        return []
    is_eager = isinstance(tensor, ops.EagerTensor)
    data = tensor._handle_data if is_eager else handle_data_util.get_resource_handle_data(tensor)
    if data is None or not data.is_set:
        return []
    return [(tf.dtypes.as_dtype(item.dtype), tf.TensorShape(item.shape)) for item in data.shape_and_type]


def must_compile(concrete_fn: Any) -> bool:
    """Return whether XLA must compile a traced function."""
    attrs = concrete_fn.function_def.attr
    return "_XlaMustCompile" in attrs and bool(attrs["_XlaMustCompile"].b)


def captured_variables(concrete_fn: Any) -> list[tuple[Any, Any]]:
    """Return (handle, dtype) of each variable that a traced function reads or writes.

    `FuncGraph.variables` holds only variables that were used as Python objects during tracing.
    """
    specs = ((tensor, variable_spec(tensor)) for tensor in concrete_fn.captured_inputs)
    return [(tensor, spec[0]) for tensor, spec in specs if spec is not None]


def eager_variable(**creator_arguments: Any) -> Any:
    """Create a variable outside of all traces from the arguments of a variable creator.

    `tf.Variable` calls all creators again, that which calls this function included.
    """
    with tf.init_scope():
        return resource_variable_ops.ResourceVariable(**creator_arguments)


def living_variables(concrete_fn: Any) -> list[Any]:
    """Return the variables that a traced function was created with and that are still referenced elsewhere."""
    return [variable for reference in concrete_fn.graph._weak_variables if (variable := reference()) is not None]


def share_variables(concrete_fn: Any, other: Any) -> None:
    """Give a traced function the variables of the function that it was built from, of which it has only handles."""
    other.graph.variables = living_variables(concrete_fn)


def variable_sizes(concrete_fn: Any) -> list[int]:
    """Return the bytes of each variable that a traced function reads or writes."""
    return [size for _, size in variable_places(concrete_fn)]


def variable_places(concrete_fn: Any) -> list[tuple[str, int]]:
    """Return (device, bytes) of each variable that a traced function reads or writes."""
    return [
        (short_device(tensor.device), size) for tensor in concrete_fn.captured_inputs for size in _sizes_behind(tensor)
    ]


def sizes_of_variables(concrete_fn: Any) -> list[int]:
    """Return the bytes of the variable of each captured handle; 0 for other tensors and for unknown shapes."""
    return [sum(_sizes_behind(tensor)) for tensor in concrete_fn.captured_inputs]


def _sizes_behind(handle: Any) -> list[int]:
    """Return the bytes of the variables behind a tensor whose shapes are known."""
    return [
        int(shape.num_elements() or 0) * dtype.size
        for dtype, shape in _variable_specs(handle)
        if shape.is_fully_defined()
    ]


def memory_limits() -> dict[str, int]:
    """Return the bytes that TensorFlow may allocate on each of its devices.

    Replaces `tf.config.list_logical_devices`, whose devices have no limit.
    """
    runtime = context.context()
    runtime.ensure_initialized()
    devices = pywrap_tfe.TFE_ContextListDevices(runtime._handle)
    try:
        return {
            short_device(pywrap_tfe.TF_DeviceListName(devices, index)): int(
                pywrap_tf_session.TF_DeviceListMemoryBytes(devices, index)
            )
            for index in range(pywrap_tfe.TF_DeviceListCount(devices))
        }
    finally:
        pywrap_tfe.TF_DeleteDeviceList(devices)


def short_device(name: str) -> str:
    """Return `GPU:0` for `/job:localhost/replica:0/task:0/device:GPU:0`; the host's name if there is no device."""
    match = re.search(r"(CPU|GPU|TPU|XPU):\d+", name, re.IGNORECASE)
    return match.group().upper() if match else "CPU:0"


def has_begun() -> bool:
    """Return whether TensorFlow has initialised its devices, after which no device can be added."""
    return bool(context.context()._initialized)


def workers() -> dict[str, str]:
    """Return the addresses of the workers that this program is connected to, by name, without its own."""
    server = context.get_server_def()
    if server is None:
        return {}
    tasks = ((job.name, task, address) for job in server.cluster.job for task, address in job.tasks.items())
    this_task = server.job_name, server.task_index
    return {f"/job:{job}/task:{task}": address for job, task, address in sorted(tasks) if (job, task) != this_task}


def _captured_value(tensor: Any) -> tuple[bool, Any]:
    """Return whether a captured tensor stands for a variable, and its value."""
    if tensor.dtype != tf.resource:
        return False, tensor.numpy()
    specs = _variable_specs(tensor)
    if not specs:
        raise TypeError(
            "The step uses a resource that is no variable (a lookup table, an iterator), which cannot be copied for "
            "the traced run. Take it out, or measure without `timelines`."
        )
    return True, tf.raw_ops.ReadVariableOp(resource=tensor, dtype=specs[0][0]).numpy()


def allocations(stats: Any) -> list[tuple[str, int, int, str]]:
    """Return (device, microseconds, bytes, operation) of each allocation in `StepStats`, negative bytes for a free."""
    records = []
    for device in stats.dev_stats:
        for node in device.node_stats:
            for memory in node.memory:
                # Operations on a GPU allocate host memory too.
                place = "CPU:0" if "GPU" in device.device and "GPU" not in memory.allocator_name else device.device
                for micros, amount in _freed([(r.alloc_micros, r.alloc_bytes) for r in memory.allocation_records]):
                    records.append((short_device(place), micros, amount, _in_run(node)))
    return records


class Times(NamedTuple):
    """Begin and end of an operation in microseconds, and the bytes of its results."""

    begun: int
    ended: int
    num_bytes: int


def times(stats: Any) -> dict[str, Times]:
    """Return the times of each operation that ran, by name."""
    result = {}
    for device in stats.dev_stats:
        for node in device.node_stats:
            begun = node.all_start_micros
            num_bytes = sum(output.tensor_description.allocation_description.requested_bytes for output in node.output)
            result[_in_run(node)] = Times(begun, begun + node.op_end_rel_micros, num_bytes)
    return result


def runs(stats: Any) -> Iterator[tuple[str, int, int]]:
    """Yield (operation, begin, end), in microseconds, of each run of an operation, one per iteration of a loop."""
    for device in stats.dev_stats:
        for node in device.node_stats:
            yield _in_run(node), node.all_start_micros, node.all_start_micros + node.op_end_rel_micros


def step_stats(concrete_fn: Any, arguments: Sequence[Any]) -> Any:
    """Return `StepStats` of one run: when each operation ran, on which device, and its allocations.

    Metadata of an eagerly run function contain no allocation records; those of a session do. The step runs on a copy of
    the variables, fed with their values.
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
        # A session ignores the options of the eager runtime.
        config.graph_options.rewrite_options.CopyFrom(function_config().graph_options.rewrite_options)
        with tf.compat.v1.Session(graph=graph, config=config) as session:
            session.run(assign)
            # Fetch tensors, not their ops: Grappler drops ops without effect that are not fetched.
            targets = [f.op if getattr(f, "dtype", None) in (tf.resource, tf.variant) else f for f in fetched]
            session.run(targets, feed)
            session.run(assign)
            metadata = tf.compat.v1.RunMetadata()
            session.run(targets, feed, options=options, run_metadata=metadata)
    return metadata.step_stats


def function_config() -> Any:
    """Return a copy of the `ConfigProto` of functions that this thread calls.

    `tf.config.optimizer.get_experimental_options` lacks some options of graph optimizers, and those of a thread.
    """
    return tf.compat.v1.ConfigProto.FromString(context.context().function_call_options.config_proto_serialized)


def switch_off(options: Any, optimizers: Iterable[str]) -> None:
    """Switch graph optimizers off in a `RewriterConfig`, by the names of its fields."""
    for name in optimizers:
        is_memory = name == "memory_optimization"  # Not a toggle, because it has several methods.
        setattr(options, name, options.NO_MEM_OPT if is_memory else options.OFF)


@contextlib.contextmanager
def functions_without(optimizers: Iterable[str]) -> Iterator[None]:
    """Switch graph optimizers off for functions that this thread calls, or adds calls of to a graph, within.

    `tf.config.optimizer.set_experimental_options` has no option for the memory optimizer, and changes all threads.
    """
    eager = context.context()
    before, config = eager.function_call_options, function_config()
    switch_off(config.graph_options.rewrite_options, optimizers)
    options = context.FunctionCallOptions(before.executor_type, config)
    eager.function_call_options = options
    try:
        yield
    finally:
        if eager.function_call_options is options:  # `tf.config` resets them: the caller's new options stay.
            eager.function_call_options = before


def _freed(records: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the records of one node without its permanent allocation.

    That is the new value of a variable, whose old value is freed without a record.
    """
    stays = sum(amount for _, amount in records)
    result = []
    for micros, amount in records:
        if amount > 0 and amount == stays:
            stays = 0
            continue
        result.append((micros, amount))
    return result
