"""Which operations are forward and which are backward, decided once, here.

Autodiff marks what it makes: gradient tapes and `tf.gradients` open name
scopes, and some op types exist only as gradients. Those are the seeds;
backward is what descends from them, and what is computed for them alone
(`forward_derived_nodes`). Two things are not followed: effects that an assignment orders
(a second forward pass after an update reads variables after it, and is still a
forward pass), and control edges out of stateful ops.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from typing import Any

import numpy as np

from rewriters.ir import op_traits
from rewriters.ir.graph import Graph, Node, Tensor
from rewriters.ir.static_values import constant, is_inexact
from rewriters.ir.variables import may_write_variable, variable_handles
from rewriters.rules.elementwise import Pointwise
from rewriters.rules.registry import registered

__all__: list[str] = []

_SHAPE_QUERIES = op_traits.ops_with(op_traits.Trait.SHAPE_QUERY)

_SCOPE = re.compile(r"(^|/)(gradient_tape|gradients(_\d+)?)/")
_TYPE = re.compile(r"(Grad|BackpropFilter|BackpropFilterV2)$")


def is_seed(node: Node) -> bool:
    """Whether autodiff made this node, by its scope or its type."""
    return _made_by_autodiff(node.name, node.op)


def gradient_seed_constants(graph: Graph) -> list[Tensor]:
    """What gradients begin with: ones that nothing but gradients reads."""
    found = []
    for tensor, readers in graph.consumers().items():
        begins = tensor.node.op == "Const" and tensor.dtype.is_floating and not is_seed(tensor.node)
        if begins and all(is_seed(reader) for reader, _ in readers):
            value = constant(tensor.node)
            if value is not None and bool(np.all(value == 1)):
                found.append(tensor)
    return found


def _made_by_autodiff(name: str, op: str) -> bool:
    return bool(_SCOPE.search(name)) or (bool(_TYPE.search(op)) and op != "StopGradient")


def is_autodiff_name(name: str) -> bool:
    """Whether a name scope of this name looks like one that autodiff opens."""
    return bool(_SCOPE.search(f"{name}/"))


def forward_scope_of_gradient(name: str) -> str:
    """Path of the forward operation, or of its scope, that autodiff made an op for; empty if the name does not tell.

    It names what it makes after that. Only reports go by it.
    """
    *_, last = [None, *_SCOPE.finditer(name)]
    return "" if last is None else name[last.end() :].rpartition("/")[0].removesuffix("_grad")


def in_scope(name: str, scope: str) -> bool:
    """Whether an operation lies in a name scope, at any depth, or has that name."""
    return f"/{name}/".find(f"/{scope.strip('/')}/") >= 0


def backward_nodes(
    graph: Graph, order: list[Node], scopes: tuple[str, ...] = (), forward: Container[str] = ()
) -> set[Node]:
    """Seeds and what descends from them.

    Args:
        graph: The joint graph.
        order: Its nodes in topological order.
        scopes: Name scopes that count as backward too (`optimizer_scopes`).
        forward: Names of ops that are forward for sure: a user may call a layer `gradients`.
    """
    result: set[Node] = set()
    for node in order:
        seed = is_seed(node) and node.name not in forward
        if seed or any(in_scope(node.name, scope) for scope in scopes):
            result.add(node)
        elif any(t.node in result for t in node.inputs) or (
            # custom_gradient functions order their ops after the incoming gradient by control edges.
            not node.stateful and any(c in result and not c.stateful for c in node.control_inputs)
        ):
            result.add(node)
    return result


def hidden_gradients(graph: Graph, order: list[Node]) -> Node | None:
    """The first node with a body, such as a loop, inside of which autodiff made something."""
    functions = {function.signature.name: function for function in graph.library.function}
    guilty: dict[str, bool] = {}

    def has_gradients(name: str) -> bool:
        if name not in guilty:
            guilty[name] = False  # While it is looked at: a function may call itself.
            body = functions[name].node_def if name in functions else ()
            own = any(_made_by_autodiff(node.name, node.op) for node in body)
            guilty[name] = own or any(has_gradients(inner) for node in body for inner in _bodies(node.attr))
        return guilty[name]

    return next((node for node in order if any(map(has_gradients, _bodies(node.attrs)))), None)


def _bodies(attrs: Mapping[str, Any]) -> list[str]:
    """Names of the functions that an operation runs."""
    return [
        function.name
        for value in attrs.values()
        for function in ([value.func] if value.HasField("func") else value.list.func)
    ]


def forward_derived_nodes(graph: Graph, order: list[Node], backward: set[Node]) -> set[Node]:
    """What backward functions compute from forward values alone, such as silu's `beta * features`.

    It counts as backward, and is no gradient. No gradient goes into such an op and no
    scope names it: it is elementwise, was made after the backward pass had begun, and no
    forward op reads it.
    """
    created = {node: number for number, node in enumerate(graph.nodes.values())}
    begin = min((created[node] for node in backward), default=0)
    readers = graph.consumers()
    results = set(graph.outputs)
    found: set[Node] = set()
    for node in reversed(order):
        if node in backward or created[node] < begin or not isinstance(registered().get(node.op), Pointwise):
            continue
        outs = [node.out(index) for index in range(len(node.outputs))]
        reading = [reader for out in outs for reader, _ in readers.get(out, ())]
        if reading and not results.intersection(outs) and all(r in backward or r in found for r in reading):
            found.add(node)
    return found


def update_nodes(graph: Graph, order: list[Node], backward: set[Node]) -> set[Node]:
    """What is done with the gradients: clipping, the optimizer's arithmetic, assignments.

    An update descends from autodiff's ops and none of them descends from it. Sums of gradients alone, as of weights
    that layers share, belong to the backward pass, though no scope says so.

    Args:
        graph: The joint graph.
        order: Its nodes in topological order.
        backward: Its backward nodes.
    """
    readers = graph.consumers()
    update: set[Node] = set()
    for node in reversed(order):
        outs = [node.out(index) for index in range(len(node.outputs))]
        if node in backward and not is_seed(node) and all(r in update for t in outs for r, _ in readers.get(t, ())):
            update.add(node)
    for node in order:
        if node in update and node.op == "AddN" and all(t.node in backward - update for t in node.inputs):
            update.discard(node)
    return update


def update_descendants(order: list[Node], update: set[Node]) -> set[Node]:
    """An update with all that descends from it: through values, and through variables that it writes.

    Adam computes the change of a weight from its slots, which it has changed.

    Args:
        order: All nodes in topological order.
        update: What `update_nodes` found.
    """
    found: set[Node] = set()
    for node in order:
        through_variable = any(
            before in found
            and may_write_variable(before)
            and not set(variable_handles(before)).isdisjoint(variable_handles(node))
            for before in node.control_inputs
        )
        if node in update or through_variable or any(t.node in found for t in node.inputs):
            found.add(node)
    return found


def gradients(graph: Graph, order: list[Node], backward: set[Node]) -> list[Tensor]:
    """What the backward pass ends in: gradients that an update reads (`update_nodes`), or that the step returns.

    Args:
        graph: The joint graph.
        order: Its nodes in topological order.
        backward: Its backward nodes.
    """
    readers = graph.consumers()
    update = update_nodes(graph, order, backward)
    results = set(graph.outputs)
    rest = backward - update
    found = (node.out(index) for node in order if node in rest for index in range(len(node.outputs)))
    return [
        t
        for t in found
        if is_inexact(t.dtype) and (t in results or any(reader in update for reader, _ in readers.get(t, ())))
    ]


def data_dependent_nodes(order: list[Node]) -> set[Node]:
    """Nodes whose value depends on data: arguments, captured constants fed per step, random draws, iterators.

    The others depend on variables and constants alone. A filter is rank 4 like an
    activation; only its descent tells them apart.
    """
    result: set[Node] = set()
    for node in order:
        if node.op in ("Const", "ReadVariableOp", "NoOp"):
            continue
        if node.op == "Placeholder":
            if node.outputs[0][0].name != "resource":
                result.add(node)
        elif any(t.node in result for t in node.inputs) or is_random_source(node):
            result.add(node)
    return result


def is_random_source(node: Node) -> bool:
    """Whether a node makes something new in each step; stateless draws count on with a seed that is a variable."""
    return bool(node.outputs) and (node.stateful or op_traits.is_stateless_random(node.op))


def is_random(node: Node) -> bool:
    """Whether an operation draws random numbers, from a seed that it is given or from none."""
    return op_traits.is_random(node.op)


def reads_shape_only(node: Node) -> bool:
    """Whether the operands matter only by their shape."""
    return node.op in _SHAPE_QUERIES


def shape_computations(order: Iterable[Node]) -> set[Node]:
    """Operations that compute integers from sizes and constants.

    Args:
        order: Nodes in topological order.
    """
    found: set[Node] = set()
    for node in order:
        if node.stateful or not node.outputs or not node.inputs:
            continue
        if not all(dtype.is_integer for dtype, _ in node.outputs):
            continue
        from_sizes = any(t.node in found for t in node.inputs)
        if reads_shape_only(node) or (from_sizes and all(t.node in found or t.node.op == "Const" for t in node.inputs)):
            found.add(node)
    return found
