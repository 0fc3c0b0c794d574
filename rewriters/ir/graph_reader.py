"""Reads graphs from TensorFlow: traced functions, with or without inlining of the functions that they call.

A `tf.function` called inside the step is one opaque node (two with its gradient). Grappler can inline too, but it keeps
only the ancestors of the fetched tensors, and drops the effects of a training step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import tensorflow as tf

from rewriters.ir import tf_internals
from rewriters.ir.device_model import DeviceModel
from rewriters.ir.graph import Graph, Node, Tensor
from rewriters.ir.op_traits import Trait, ops_with

__all__: list[str] = []

_CALLS = ops_with(Trait.CALL)

_DROPPED_ATTRS = ("_output_shapes", "_class")
"""Attributes that `Node` does not hold: shapes are fields, and colocation with a node that moved is impossible."""


def is_call(node: Any) -> bool:
    """Return whether a node (or node definition) is a call that can be inlined.

    A function that XLA must compile uses other kernels: it stays a call.
    """
    return node.op in _CALLS and not is_xla_call(node)


def is_xla_call(node: Any) -> bool:
    """Return whether a node (or node definition) calls a function that XLA must compile."""
    attrs = node.attr if hasattr(node, "attr") else node.attrs
    return node.op in _CALLS and "_XlaMustCompile" in attrs and bool(attrs["_XlaMustCompile"].b)


def from_tf_graph(
    tf_graph: Any, inputs: Sequence[Any], outputs: Sequence[Any], keep: Sequence[Any], device: DeviceModel | None = None
) -> Graph:
    """Read a `tf.Graph` with an interface of its tensors and operations, for a device, by default the planned one."""
    graph_def = tf_graph.as_graph_def()
    nodes: dict[str, Node] = {}
    node_defs = {node_def.name: node_def for node_def in graph_def.node}
    operations = tf_graph.get_operations()
    for operation in operations:
        node_def = node_defs[operation.name]
        specs = [(t.dtype, tuple(t.shape) if t.shape.rank is not None else None) for t in operation.outputs]
        attrs = {key: value for key, value in node_def.attr.items() if key not in _DROPPED_ATTRS}
        nodes[operation.name] = Node(
            operation.name, operation.type, (), attrs=attrs, device=node_def.device, outputs=specs
        )
    for operation in operations:
        node = nodes[operation.name]
        node.inputs = [Tensor(nodes[t.op.name], t.value_index) for t in operation.inputs]
        node.control_inputs = [nodes[c.name] for c in operation.control_inputs]

    def view(tensors: Sequence[Any]) -> list[Tensor]:
        return [Tensor(nodes[t.op.name], t.value_index) for t in tensors]

    # Automatic control dependencies order reads of variables like effects; an unused read may be dropped.
    effects = [nodes[op.name] for op in keep if op.type not in ("ReadVariableOp", "Placeholder")]
    effects = [node for node in effects if node.stateful]
    graph = Graph(nodes, view(inputs), view(outputs), effects, graph_def.library, graph_def.versions)
    graph.device = device or graph.device
    for tensor, handle in zip(graph.inputs, inputs, strict=True):
        spec = tf_internals.variable_spec(handle)
        if spec is not None:
            graph.variables[tensor.node.name] = spec
    return graph


def from_concrete_function(concrete_fn: Any) -> Graph:
    """Read a traced function; `inputs` are its arguments followed by its captures."""
    return from_tf_graph(
        concrete_fn.graph, concrete_fn.inputs, concrete_fn.outputs, tf_internals.control_outputs(concrete_fn)
    )


def inline_calls(
    concrete_fn: Any, also: Callable[[str, Any], bool] | None = None, as_calls: Callable[[Any], bool] | None = None
) -> Graph:
    """Return the graph of `concrete_fn` without calls, with shapes inferred again.

    Args:
        concrete_fn: A traced function.
        also: Decides whether a call that XLA must compile is inlined too, by its name and its function definition.
        as_calls: Replaces ops of a definition without calls by calls, in place, and returns whether there were any.
    """
    graph_def = concrete_fn.graph.as_graph_def()
    outputs = [_flat(t.name) for t in concrete_fn.outputs]
    keep = [op.name for op in tf_internals.control_outputs(concrete_fn)]
    interface = _Interface(outputs, keep, {})
    has_calls = True
    while has_calls:
        functions = {f.signature.name: f for f in graph_def.library.function}
        calls = {node.name for node in graph_def.node if _opens(node, functions, also)}
        if calls:
            graph_def, interface = _inline_once(graph_def, interface, calls, functions)
        has_calls = bool(calls) or (as_calls is not None and as_calls(graph_def))
    return _imported(concrete_fn, graph_def, interface)


def _opens(node: Any, functions: Mapping[str, Any], also: Callable[[str, Any], bool] | None) -> bool:
    if not is_xla_call(node):
        return is_call(node)
    return also is not None and also(node.name, functions[node.attr["f"].func.name])


def _flat(name: str) -> str:
    return name.removesuffix(":0")


@dataclasses.dataclass(frozen=True)
class _Interface:
    """Names that are visible outside of a definition.

    Attributes:
        outputs: Flat results.
        keep: Nodes that must run for their effect.
        results: New names of the results of calls, by which layers are identified.
    """

    outputs: list[str]
    keep: list[str]
    results: dict[str, str]


def _inline_once(
    graph_def: Any, interface: _Interface, calls: Container[str], functions: Mapping[str, Any]
) -> tuple[Any, _Interface]:
    """Expand calls; bodies may contain further calls."""
    result = tf.compat.v1.GraphDef(library=graph_def.library, versions=graph_def.versions)
    tensors: dict[str, str] = {}
    controls: dict[str, list[str]] = {}
    for node in graph_def.node:
        if node.name in calls:
            _expand(node, functions, result, tensors, controls)
        else:
            result.node.add().CopyFrom(node)

    def resolve(name: str) -> str:
        while name in tensors:  # An output of a call may be its argument, the output of another call.
            name = tensors[name]
        return name

    def before(name: str) -> list[str]:
        """Return the nodes that replace a control input; those of a call without effects are its own control inputs."""
        return [n for c in controls[name] for n in before(c)] if name in controls else [_node_of(resolve(name))]

    for node in result.node:
        node.attr.pop("_class", None)  # It may refer to a call, or to a node of a body that is renamed.
        names: list[str] = []
        for name in node.input:
            names.extend([f"^{n}" for n in before(name[1:])] if name.startswith("^") else [resolve(name)])
        data = [name for name in names if not name.startswith("^")]
        del node.input[:]
        node.input.extend(data + sorted({name for name in names if name.startswith("^")}))
    effects: list[str] = []
    for name in interface.keep:
        effects.extend(before(name))
    results = {name: resolve(new) for name, new in (interface.results | {name: name for name in tensors}).items()}
    return result, _Interface([resolve(name) for name in interface.outputs], effects, results)


def _node_of(tensor_name: str) -> str:
    return tensor_name.split(":")[0]


def _expand(
    call: Any, functions: Mapping[str, Any], result: Any, tensors: dict[str, str], controls: dict[str, list[str]]
) -> None:
    """Add the body of one call; record the replacements of its outputs and of its control edge."""
    function_def = functions[call.attr["f"].func.name]
    body, flat_names = tf_internals.function_body(function_def, functions)
    data = [name for name in call.input if not name.startswith("^")]
    waits = [name for name in call.input if name.startswith("^")]
    arguments = {arg.name: name for arg, name in zip(function_def.signature.input_arg, data, strict=True)}

    def moved(name: str) -> str:
        base, _, index = name.partition(":")
        if base in arguments:
            return arguments[base]
        return f"{call.name}/{base}" + (f":{index}" if index and index != "0" else "")

    for node in body.node:
        if node.name in arguments:
            continue
        new = result.node.add()
        new.CopyFrom(node)
        new.name = f"{call.name}/{node.name}"
        new.device = new.device or call.device
        del new.input[:]
        for name in node.input:
            new.input.append(f"^{_node_of(moved(name[1:]))}" if name.startswith("^") else moved(name))
        if not new.input or tf_internals.is_stateful(new.op):
            new.input.extend(waits)
    for index, output in enumerate(function_def.signature.output_arg):
        source = moved(flat_names[function_def.ret[output.name]])
        tensors[f"{call.name}:{index}" if index else call.name] = source
    # Control edges from a call become edges from its effects, not from activations that it returns.
    types = {node.name: node.op for node in body.node}
    effects = [name for name in function_def.control_ret.values() if tf_internals.is_stateful(types[name])]
    controls[call.name] = [f"{call.name}/{name}" for name in effects] or [name[1:] for name in waits]


def _imported(concrete_fn: Any, graph_def: Any, interface: _Interface) -> Graph:
    """Import the definition again, because only TensorFlow infers shapes."""
    outputs, keep, results = interface.outputs, interface.keep, interface.results
    names = [t.op.name for t in concrete_fn.inputs]
    specs = [tf.TensorSpec(t.shape, t.dtype) for t in concrete_fn.inputs]
    imported: list[Any] = []

    def build(*args: Any) -> list[Any]:
        for placeholder, source in zip(args, concrete_fn.inputs, strict=True):
            tf_internals.copy_handle_data(source, placeholder)
        mapping = {f"{name}:0": arg for name, arg in zip(names, args, strict=True)}
        tensors = [name if ":" in name else f"{name}:0" for name in [*outputs, *results.values()]]
        imported.extend(
            tf.graph_util.import_graph_def(graph_def, input_map=mapping, return_elements=tensors + keep, name="")
        )
        return []

    traced = tf_internals.trace_func_graph("inlined", build, specs)
    number, tensors = len(outputs), len(outputs) + len(results)
    graph = from_tf_graph(traced, traced.inputs, imported[:number], imported[tensors:])
    old = [t.name for t in concrete_fn.inputs] + [name if ":" in name else f"{name}:0" for name in results]
    for name, new in zip(old, [*traced.inputs, *imported[number:tensors]], strict=True):
        graph.aliases[name] = graph.nodes[new.op.name].out(new.value_index)
    return graph
