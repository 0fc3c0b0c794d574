"""Functions of while loops as graphs: bodies and conditions, the number of iterations, and new bodies."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from rewriters.ir import tf_internals
from rewriters.ir.graph import BRANCHES, Graph, Node, Shape, Tensor
from rewriters.ir.graph_reader import from_tf_graph
from rewriters.ir.static_values import Dim, StaticEvaluator, Value
from rewriters.ir.symbolic_dims import SymbolicDim

__all__: list[str] = []

_NUMBERS = itertools.count(1)
"""Numbers of new functions: TensorFlow holds those of all graphs by name."""

MAX_EVALUATED_ITERATIONS = 10_000
"""Iterations of which each is evaluated to count the runs of branches; with more the branches are unknown."""

_COUNTS: dict[str, Callable[[int, int, int], int | None]] = {
    "Less": lambda start, limit, step: _num_steps(limit - start, step),
    "LessEqual": lambda start, limit, step: _num_steps(limit - start + 1, step),
    "Greater": lambda start, limit, step: _num_steps(start - limit, -step),
    "GreaterEqual": lambda start, limit, step: _num_steps(start - limit + 1, -step),
}
"""Functions that return the number of steps after which a counter no longer fulfils a comparison with a limit."""


def _num_steps(distance: int, step: int) -> int | None:
    """Return the number of steps that cover a distance; `None` for steps in the other direction."""
    return max(-(-distance // step), 0) if step > 0 else None


def function_names(attribute: Any) -> list[str]:
    """Return the names of the functions that an `AttrValue` refers to."""
    return [function.name for function in ([attribute.func] if attribute.HasField("func") else attribute.list.func)]


def function_of(graph: Graph, node: Node, attr: str) -> Graph | None:
    """Return the `"body"` or the `"cond"` of a loop as a graph with shapes, named by the attribute `attr`.

    `None` if the library lacks it or it cannot be imported.
    """
    return _function(graph, node.attrs[attr].func.name, node.inputs, node.outputs)


def branches_of(graph: Graph, node: Node) -> list[Graph] | None:
    """Return the branches of a conditional as graphs with shapes, that of a true condition first.

    `None` as for `function_of`.
    """
    either = [node.attrs[attr].func.name for attr in ("then_branch", "else_branch") if attr in node.attrs]
    functions = either or [function.name for function in node.attrs["branches"].list.func]
    operands = node.inputs[1:]
    branches = [_function(graph, name, operands, [(t.dtype, t.shape) for t in operands]) for name in functions]
    return None if None in branches else [branch for branch in branches if branch is not None]


def called_function(graph: Graph, node: Node) -> Graph | None:
    """Return the function that an op calls as a graph with shapes; `None` as for `function_of`."""
    return _function(graph, node.attrs["f"].func.name, node.inputs, [(t.dtype, t.shape) for t in node.inputs])


def _function(
    graph: Graph, name: str, operands: Sequence[Tensor], specs: Sequence[tuple[tf.DType, Shape]]
) -> Graph | None:
    definition = _definition(graph, name)
    if definition is None:
        return None
    handles = [graph.variables.get(source_of(t).node.name) or element_spec(t) for t in operands]
    try:
        return _imported(definition, graph, specs, handles)
    except (ValueError, TypeError, RuntimeError, tf.errors.OpError):
        return None


def element_spec(tensor: Tensor) -> tuple[tf.DType, Shape] | None:
    """Return (dtype, shape) of the elements of a tensor list; `None` for another tensor, or if it is unknown."""
    tensor = source_of(tensor)
    return None if tensor.node.loop is None else tensor.node.loop.element_specs.get(tensor.index)


def _definition(graph: Graph, name: str) -> Any:
    return next((f for f in graph.library.function if f.signature.name == name), None)


def is_folded(tensor: Tensor) -> bool:
    """Return whether constant folding fills a tensor once, for all steps, so that it is never freed."""
    return tensor.node.op == "Fill" and all(operand.node.op == "Const" for operand in tensor.node.inputs)


def folded_tensors(graph: Graph) -> Iterator[Tensor]:
    """Yield the tensors of a graph and of the bodies of its loops for which `is_folded` holds.

    TensorFlow merges equal ones of a graph, or of a body: each value is yielded once.
    """
    seen: set[tuple[str, ...]] = set()
    for node in graph.nodes.values():
        if node.outputs and is_folded(node.out()):
            operands = (str(operand.node.attrs["value"].SerializeToString()) for operand in node.inputs)
            value = (node.device, *operands)
            if value not in seen:
                yield node.out()
            seen.add(value)
        if node.loop is not None and node.loop.body is not None:
            yield from folded_tensors(node.loop.body)


def function_reads(graph: Graph, node: Node, attr: str, position: int) -> bool:
    """Return whether an op in a function of a loop reads the operand at a position; `attr` as for `function_of`."""
    definition = _definition(graph, node.attrs[attr].func.name)
    if definition is None:
        return True
    argument = definition.signature.input_arg[position].name
    return any(argument in inner.input for inner in definition.node_def)


def _imported(
    definition: Any,
    graph: Graph,
    specs: Sequence[tuple[tf.DType, Shape]],
    handles: Sequence[tuple[tf.DType, Shape] | None],
) -> Graph:
    """Import a function of a graph; only TensorFlow infers the shapes."""
    body, flat_names = tf_internals.function_body(
        definition, {function.signature.name: function for function in graph.library.function}
    )
    names = [argument.name for argument in definition.signature.input_arg]
    graph_def = tf.compat.v1.GraphDef(versions=body.versions)
    graph_def.node.extend(node for node in body.node if node.name not in names)
    if any(value.HasField("func") or value.list.func for node in graph_def.node for value in node.attr.values()):
        graph_def.library.CopyFrom(graph.library)
    results = [flat_names[definition.ret[output.name]] for output in definition.signature.output_arg]
    used = {name.removeprefix("^").partition(":")[0] for node in graph_def.node for name in node.input}
    outputs: list[Any] = []
    effects: list[Any] = []

    def build(*arguments: Any) -> list[Any]:
        by_name = dict(zip(names, arguments, strict=True))
        for argument, spec in zip(arguments, handles, strict=True):
            if spec is not None:
                tf_internals.set_handle_spec(argument, *spec)
        computed = [name for name in results if name.partition(":")[0] not in by_name]
        mapping = {f"{name}:0": value for name, value in by_name.items() if name in used}
        wanted = [*computed, *definition.control_ret.values()]
        imported = tf.graph_util.import_graph_def(graph_def, input_map=mapping, return_elements=wanted or None, name="")
        values = dict(zip(computed, imported or (), strict=False))
        outputs.extend(by_name[n.partition(":")[0]] if n not in values else values[n] for n in results)
        effects.extend((imported or [])[len(computed) :])
        return []

    traced = tf_internals.trace_func_graph("function", build, [tf.TensorSpec(s, d) for d, s in specs])
    function = from_tf_graph(traced, traced.inputs, outputs, effects, graph.device)
    function.prune()
    return function


def infer_shapes(graph: Graph, lengths: Mapping[str, int]) -> None:
    """Infer the shapes of a graph in place, for its `sizes` and for lengths of lists that `TensorListStack` stacks.

    Args:
        graph: A copy of a graph, which is of no use if TensorFlow cannot infer its shapes.
        lengths: Lengths by the name of the `TensorListStack`.
    """
    for position, size in graph.sizes.items():
        tensor = graph.inputs[position]
        assert tensor.shape
        tensor.node.outputs = [(tensor.dtype, (size, *tensor.shape[1:]))]
    for name, length in lengths.items():
        node = graph.nodes[name]
        node.attrs = {**node.attrs, "num_elements": tf.compat.v1.AttrValue(i=length)}
    fed = {tensor.node.name for tensor in graph.inputs}
    graph_def = graph.to_graph_def()
    wanted = [node.out(index).name for node in graph.nodes.values() for index in range(len(node.outputs))]
    inferred: list[Any] = []

    def build(*arguments: Any) -> list[Any]:
        for argument, tensor in zip(arguments, graph.inputs, strict=True):
            if tensor.node.name in graph.variables:
                tf_internals.set_handle_spec(argument, *graph.variables[tensor.node.name])
        mapping = {tensor.name: argument for tensor, argument in zip(graph.inputs, arguments, strict=True)}
        inferred.extend(tf.graph_util.import_graph_def(graph_def, mapping, wanted, name=""))
        return []

    tf_internals.trace_func_graph("lengths", build, [tf.TensorSpec(t.shape, t.dtype) for t in graph.inputs])
    shapes = {name: tensor.shape for name, tensor in zip(wanted, inferred, strict=True)}
    for node in graph.nodes.values():
        if node.name not in fed:
            outputs = enumerate(node.outputs)
            node.outputs = [(d, _refined(shape, shapes[node.out(index).name])) for index, (d, shape) in outputs]


def _refined(shape: Shape, inferred: Any) -> Shape:
    """Return a shape with the sizes that are unknown in it, but have been inferred."""
    if inferred.rank is None or (shape is not None and len(shape) != inferred.rank):
        return shape
    sizes = tuple(inferred)
    return tuple(size if known is None else known for known, size in zip(shape or sizes, sizes, strict=True))


def source_of(tensor: Tensor) -> Tensor:
    """Return the tensor that identities have passed on."""
    while tensor.node.op == "Identity":
        tensor = tensor.node.inputs[0]
    return tensor


def readers_of(tensor: Tensor, consumers: Mapping[Tensor, Sequence[tuple[Node, int]]]) -> list[Node]:
    """Return the ops that read a tensor, directly or through identities, without these."""
    readers: list[Node] = []
    for node, _ in consumers.get(tensor, ()):
        readers += readers_of(node.out(), consumers) if node.op == "Identity" else [node]
    return readers


def add_body(graph: Graph, body: Graph, name: str) -> str:
    """Add a function to the library of a graph, and return its name, which begins with `name` and is unique.

    Inputs and outputs of the function are those of the loop.
    """
    name = f"{name}_{next(_NUMBERS)}"
    fed = {tensor.node.name for tensor in body.inputs}
    graph_def = tf.compat.v1.GraphDef(library=body.library, versions=body.versions)
    graph_def.node.extend(node for node in body.to_graph_def().node if node.name not in fed)
    read = {tensor.node.name for node in body.nodes.values() for tensor in node.inputs}
    positions = {tensor: position for position, tensor in enumerate(body.inputs)}

    def build(*arguments: Any) -> list[Any]:
        mapping = {t.name: a for t, a in zip(body.inputs, arguments, strict=True) if t.node.name in read}
        computed = [t.name for t in body.outputs if t not in positions]
        wanted = [*computed, *(node.name for node in body.keep)]
        imported = tf.graph_util.import_graph_def(graph_def, input_map=mapping, return_elements=wanted or None, name="")
        values = iter(imported or ())
        results = [arguments[positions[t]] if t in positions else next(values) for t in body.outputs]
        tf.compat.v1.get_default_graph().control_outputs.extend(values)
        return results

    traced = tf_internals.trace_func_graph(name, build, [tf.TensorSpec(t.shape, t.dtype) for t in body.inputs])
    graph.library.function.add().CopyFrom(tf_internals.function_definition(name, traced))
    return name


def num_iterations(body: Graph, condition: Graph, initial: Sequence[Value]) -> Dim:
    """Return the largest number of iterations that counters allow; `None` if no counter bounds it.

    `initial` are the static values of the loop's operands.
    """
    counts = _counts(source_of(condition.outputs[0]), body, condition, initial)
    numbers = [count for count in counts if isinstance(count, int)]
    return min(numbers) if numbers else next(iter(counts), None)


def _counts(tensor: Tensor, body: Graph, condition: Graph, initial: Sequence[Value]) -> list[int | SymbolicDim]:
    """Return the number of iterations after which each comparison of a condition fails."""
    node = tensor.node
    if node.op == "LogicalAnd":
        return [count for t in node.inputs for count in _counts(source_of(t), body, condition, initial)]
    if node.op not in _COUNTS:
        return []
    evaluate = StaticEvaluator(condition)
    positions = {t: position for position, t in enumerate(condition.inputs)}

    def value(operand: Tensor) -> Value:
        position = positions.get(operand)
        if position is None:
            return evaluate(operand)
        unchanged = source_of(body.outputs[position]) == body.inputs[position]
        return initial[position] if unchanged else None

    for sign, (counter, bound) in ((1, node.inputs), (-1, node.inputs[::-1])):
        position, limit = positions.get(source_of(counter)), value(source_of(bound))
        step = None if position is None else _step(body, position)
        start = None if position is None else initial[position]
        if isinstance(limit, SymbolicDim) and (sign, start, step) == (1, 0, 1):
            return [limit]
        if isinstance(start, int) and isinstance(limit, int) and step:
            count = _COUNTS[node.op](sign * start, sign * limit, sign * step)
            return [] if count is None else [count]
    return []


def branch_runs(body: Graph, initial: Sequence[Value], length: int) -> dict[str, list[int]]:
    """Return how often each branch runs of the conditionals whose condition depends on counters alone, by name.

    `initial` are the static values of the loop's operands.
    """
    conditionals = [node for node in body.nodes.values() if node.op in BRANCHES]
    counters: list[tuple[Tensor, int, int]] = []
    for position, (argument, start) in enumerate(zip(body.inputs, initial, strict=True)):
        step = 0 if source_of(body.outputs[position]) == argument else _step(body, position)
        if isinstance(start, int) and step is not None:
            counters.append((argument, start, step))
    if not conditionals or not counters or length > MAX_EVALUATED_ITERATIONS:
        return {}
    evaluate, runs = StaticEvaluator(body), dict[str, list[int] | None]()
    for node in conditionals:
        runs[node.name] = [0] * (len(node.attrs["branches"].list.func) if "branches" in node.attrs else 2)
    for number in range(length):
        in_iteration = evaluate.given({argument: start + step * number for argument, start, step in counters})
        for node in conditionals:
            counts, chosen = runs[node.name], in_iteration(node.inputs[0])
            if counts is None or not isinstance(chosen, int):
                runs[node.name] = None
            elif "branches" in node.attrs:
                counts[chosen if 0 <= chosen < len(counts) else -1] += 1  # Out of range, the last branch runs.
            else:
                counts[0 if chosen else 1] += 1
    return {name: counts for name, counts in runs.items() if counts is not None}


def _step(body: Graph, position: int) -> int | None:
    """Return the number that an iteration adds to a counter; `None` for another state."""
    node, argument = source_of(body.outputs[position]).node, body.inputs[position]
    signs: dict[str, Callable[[int], int]] = {"Add": int, "AddV2": int, "Sub": lambda number: -number}
    if node.op not in signs or argument not in map(source_of, node.inputs):
        return None
    if node.op == "Sub" and source_of(node.inputs[0]) != argument:
        return None
    other = node.inputs[1] if source_of(node.inputs[0]) == argument else node.inputs[0]
    added = StaticEvaluator(body)(other)
    return signs[node.op](added) if isinstance(added, int) else None
