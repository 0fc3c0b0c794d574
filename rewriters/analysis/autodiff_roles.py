"""Forward and backward roles of operations.

Autodiff marks the operations that it creates: gradient tapes and `tf.gradients` open name scopes, and some op types
exist only as gradients. These are the seeds. Backward are their descendants, and nodes computed for them alone
(`forward_derived_nodes`). Two kinds of edges are not followed: variables that an assignment writes (a second forward
pass after an update is still forward), and control edges out of stateful ops.

A step may differentiate gradients, as gradient penalties and physics-informed networks do. Such a gradient is part of
the loss, and the ops that compute it are forward (`differentiated_gradient_ops`).
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from rewriters.ir import op_traits, tf_internals
from rewriters.ir.graph import LOOPS, Graph, Node, Tensor
from rewriters.ir.loop_bodies import function_names
from rewriters.ir.static_values import constant, is_inexact
from rewriters.rules.elementwise import Pointwise
from rewriters.rules.registry import registered

__all__: list[str] = []

_SHAPE_QUERIES = op_traits.ops_with(op_traits.Trait.SHAPE_QUERY)

_VARIABLE_OPS = op_traits.ops_with(op_traits.Trait.READS_VARIABLE) | op_traits.ops_with(op_traits.Trait.SOURCE)
"""Ops that return variables, their handles or constants."""

_SCOPE = re.compile(r"(^|/)(gradient_tape|gradients(_\d+)?)/")
_TYPE = re.compile(r"(Grad|BackpropFilter|BackpropFilterV2)$")
_INITIAL = re.compile(r"(^|/)gradients(_\d+)?/grad_ys_\d+$")
"""Name that `tf.gradients` gives to the initial gradient of a result; tapes use no scope for theirs."""


def is_seed(node: Node) -> bool:
    """Return whether autodiff created a node, by its scope or its type."""
    return _made_by_autodiff(node.name, node.op)


def gradient_seed_constants(graph: Graph) -> list[Tensor]:
    """Return the constants that gradients start from: ones that only gradients read."""
    consumers = graph.consumers()
    sources = (node for node in graph.nodes.values() if node.op == "Const" and _is_initial_gradient(node, consumers))
    return [node.out() for node in sources]


def _is_initial_gradient(node: Node, consumers: Mapping[Tensor, Sequence[tuple[Node, int]]]) -> bool:
    """Return whether a gradient starts from a node: ones that only gradients read."""
    is_outside = not is_seed(node) or bool(_INITIAL.search(node.name))  # `gradients/sub/x` is part of a derivative.
    return is_outside and _has_value(node, 1) and all(is_seed(reader) for reader, _ in consumers.get(node.out(), ()))


def is_zero_gradient(node: Node) -> bool:
    """Return whether autodiff created a tensor of zeros, such as the derivative of ReLU's gradient by its features."""
    return is_seed(node) and _has_value(node, 0)


def _has_value(node: Node, value: int) -> bool:
    """Return whether an op without data operands fills a tensor of floating point numbers with a value."""
    if node.op not in ("Const", "Fill", "OnesLike", "ZerosLike") or not node.outputs[0][0].is_floating:
        return False
    if node.op.endswith("Like"):
        return node.op == ("ZerosLike", "OnesLike")[value]
    number = constant(node.inputs[1].node if node.op == "Fill" else node)
    return number is not None and bool(np.all(number == value))


def _made_by_autodiff(name: str, op: str) -> bool:
    return bool(_SCOPE.search(name)) or (bool(_TYPE.search(op)) and op != "StopGradient")


def is_autodiff_name(name: str) -> bool:
    """Return whether a name scope of this name looks like one that autodiff opens."""
    return bool(_SCOPE.search(f"{name}/"))


def forward_scope_of_gradient(name: str) -> str:
    """Return the forward operation, or its scope, of a gradient op; empty if the name does not contain it.

    Autodiff names gradient ops after forward ops. Only reports depend on it.
    """
    *_, last = [None, *_SCOPE.finditer(name)]
    return "" if last is None else name[last.end() :].rpartition("/")[0].removesuffix("_grad")


def in_scope(name: str, scope: str) -> bool:
    """Return whether an operation lies in a name scope, at any depth, or has that name."""
    return f"/{name}/".find(f"/{scope.strip('/')}/") >= 0


def scope_test(scopes: Iterable[str]) -> Callable[[str], bool]:
    """Return a function that tells whether an operation lies in one of many scopes, at any depth."""
    starting: dict[str, list[str]] = {}
    for scope in scopes:
        starting.setdefault(scope.strip("/").partition("/")[0], []).append(scope)

    def test(name: str) -> bool:
        parts = starting.keys() & set(name.split("/")) if starting else ()
        return any(in_scope(name, scope) for part in parts for scope in starting[part])

    return test


def backward_nodes(
    graph: Graph,
    order: list[Node],
    scopes: tuple[str, ...] = (),
    forward: Container[str] = (),
    differentiated: Set[Node] = frozenset(),
) -> set[Node]:
    """Return the seeds and their descendants.

    Args:
        graph: The joint graph.
        order: Its nodes in topological order.
        scopes: Name scopes that count as backward too (`optimizer_scopes`).
        forward: Names of ops that are certainly forward: a user may call a layer `gradients`.
        differentiated: The result of `differentiated_gradient_ops`: seeds that are forward.
    """
    result: set[Node] = set()
    exempt = _created_for_forward_loops(graph) | differentiated
    is_scoped = scope_test(scopes)
    for node in order:
        seed = is_seed(node) and node.name not in forward and node not in exempt
        if node.op != "Const" and (seed or is_scoped(node.name)):  # A constant may have consumers of both phases.
            result.add(node)
        elif any(t.node in result for t in node.inputs) or (
            # custom_gradient functions order their ops after the incoming gradient by control edges.
            not node.stateful and any(c in result and not c.stateful for c in node.control_inputs)
        ):
            result.add(node)
    return result


def differentiated_gradient_ops(graph: Graph, order: Sequence[Node]) -> set[Node]:
    """Return the ops created by autodiff that compute a gradient which the loss of a later backward pass depends on.

    Each call of autodiff is a backward pass, which starts from initial gradients. If an op of a later pass depends on
    an initial gradient of an earlier one, the earlier pass is part of the forward computation of the later one. Its ops
    are those that depend on initial gradients of earlier passes alone and lead to an op of the user's function.

    Args:
        graph: The joint graph.
        order: Its nodes in topological order.
    """
    passes = _backward_passes(graph)
    if len(set(passes.values())) < 2:
        return set()
    sources: dict[Node, int] = {}  # Set of passes, one bit each, on whose initial gradients a node depends.
    earlier = 0
    for node in order:
        pass_bit = 1 << passes[node] if node in passes else 0
        operands = () if reads_shape_only(node) else node.inputs
        sources[node] = functools.reduce(operator.or_, (sources[t.node] for t in operands), pass_bit)
        if is_seed(node) and sources[node]:
            earlier |= sources[node] ^ 1 << sources[node].bit_length() - 1
    readers = graph.consumers()
    result: set[Node] = set()
    for node in reversed(order) if earlier else ():
        if not is_seed(node) or sources[node] & ~earlier:
            continue
        consumers = (reader for index in range(len(node.outputs)) for reader, _ in readers.get(node.out(index), ()))
        if any(reader in result or not (is_seed(reader) or sources[reader] & ~earlier) for reader in consumers):
            result.add(node)
    return result


def _backward_passes(graph: Graph) -> dict[Node, int]:
    """Return the number of the backward pass, in creation order, that each initial or zero gradient belongs to.

    A call of autodiff creates the initial gradients of all its results before any other op.
    """
    consumers = graph.consumers()
    passes: dict[Node, int] = {}
    number, has_started = 0, False
    for node in graph.nodes.values():
        if _is_initial_gradient(node, consumers):
            number, has_started = number + has_started, False
            passes[node] = number
        elif passes and is_seed(node):
            has_started |= node.op != "Const"
            if is_zero_gradient(node):
                passes[node] = number
    return passes


def _created_for_forward_loops(graph: Graph) -> set[Node]:
    """Return the lists that forward loops fill for their gradients, with the constants that they are created from.

    Autodiff creates them, under its scope, and adds them to the operands of the forward loop.
    """
    loops = (node for node in graph.nodes.values() if node.op in LOOPS and not is_seed(node))
    lists = {t.node for loop in loops for t in loop.inputs if t.node.op == "EmptyTensorList"}
    return lists | {t.node for node in lists for t in node.inputs if t.node.op == "Const"}


def hidden_gradients(graph: Graph, order: list[Node]) -> Node | None:
    """Return the first node with a function body, such as a loop, that contains operations created by autodiff."""
    has_gradients = _function_test(graph, lambda node: _made_by_autodiff(node.name, node.op), unknown=False)
    return next((node for node in order if any(map(has_gradients, _bodies(node.attrs)))), None)


def _function_test(graph: Graph, is_sought: Callable[[Any], bool], *, unknown: bool) -> Callable[[str], bool]:
    """Return a function that tells whether a function of the graph's library, by name, contains an op of a kind.

    Args:
        graph: The graph.
        is_sought: Tells whether the `NodeDef` of an op is of that kind.
        unknown: Result for a function that is not in the library.
    """
    functions = {function.signature.name: function for function in graph.library.function}
    containing: dict[str, bool] = {}

    def contains(name: str) -> bool:
        if name not in containing:
            containing[name] = unknown and name not in functions  # A function may call itself.
            body = functions[name].node_def if name in functions else ()
            containing[name] |= any(
                is_sought(node) or any(contains(inner) for inner in _bodies(node.attr)) for node in body
            )
        return containing[name]

    return contains


def _bodies(attrs: Mapping[str, Any]) -> list[str]:
    """Return the names of the functions that an operation runs."""
    return [name for value in attrs.values() for name in function_names(value)]


def forward_derived_nodes(graph: Graph, order: list[Node], backward: set[Node]) -> set[Node]:
    """Return nodes that backward functions compute from forward values alone, such as silu's `beta * features`.

    They count as backward, and are not gradients. No gradient is an operand of such an op, and no scope names it. It is
    elementwise, was created after the backward pass had begun, and no forward op reads it.
    """
    created = {node: number for number, node in enumerate(graph.nodes.values())}
    begin = min((created[node] for node in backward), default=0)
    consumers_of = graph.consumers()
    results = set(graph.outputs)
    derived: set[Node] = set()
    for node in reversed(order):
        if node in backward or created[node] < begin or not isinstance(registered().get(node.op), Pointwise):
            continue
        outs = [node.out(index) for index in range(len(node.outputs))]
        reading = [consumer for out in outs for consumer, _ in consumers_of.get(out, ())]
        if reading and not results.intersection(outs) and all(r in backward or r in derived for r in reading):
            derived.add(node)
    return derived


def update_nodes(graph: Graph, order: list[Node], backward: set[Node]) -> set[Node]:
    """Return the update: clipping of gradients, the optimizer's arithmetic, assignments.

    An update descends from autodiff's ops and has no descendant among them. Sums of gradients alone, as of weights that
    layers share, belong to the backward pass, though no scope says so.

    Args:
        graph: The joint graph.
        order: Its nodes in topological order.
        backward: Its backward nodes.
    """
    consumers = graph.consumers()
    update: set[Node] = set()
    for node in reversed(order):
        outs = [node.out(index) for index in range(len(node.outputs))]
        if node in backward and not is_seed(node) and all(r in update for t in outs for r, _ in consumers.get(t, ())):
            update.add(node)
    for node in order:
        if node in update and node.op == "AddN" and all(t.node in backward - update for t in node.inputs):
            update.discard(node)
    return update


def update_descendants(order: list[Node], update: set[Node]) -> set[Node]:
    """Return an update with all its descendants, by values and by variables that it writes.

    Adam computes the change of a weight from slots that it has written before.

    Args:
        order: All nodes in topological order.
        update: The result of `update_nodes`.
    """
    descendants: set[Node] = set()
    for node in order:
        through_variable = any(
            before in descendants
            and before.may_write_variable
            and not set(before.variable_handles).isdisjoint(node.variable_handles)
            for before in node.control_inputs
        )
        if node in update or through_variable or any(t.node in descendants for t in node.inputs):
            descendants.add(node)
    return descendants


def gradients(graph: Graph, order: list[Node], backward: set[Node]) -> list[Tensor]:
    """Return the gradients in which the backward pass ends: an update reads them, or the step returns them.

    Args:
        graph: The joint graph.
        order: Its nodes in topological order.
        backward: Its backward nodes.
    """
    consumers = graph.consumers()
    update = update_nodes(graph, order, backward)
    results = set(graph.outputs)
    backward_pass = backward - update
    outputs = (node.out(index) for node in order if node in backward_pass for index in range(len(node.outputs)))
    return [
        t
        for t in outputs
        if is_inexact(t.dtype) and (t in results or any(consumer in update for consumer, _ in consumers.get(t, ())))
    ]


def data_dependent_nodes(graph: Graph, order: list[Node]) -> set[Node]:
    """Return the nodes that depend on data: arguments, captured constants fed per step, random draws, iterators.

    The others depend on variables and constants alone. A filter is rank 4 like an activation; only its ancestors
    distinguish them.

    Args:
        graph: The graph.
        order: Its nodes in topological order.
    """
    result: set[Node] = set()
    draws = _function_test(graph, lambda node: not _bodies(node.attr) and _yields_new_value(node.op), unknown=True)
    for node in order:
        if node.op in ("Const", "ReadVariableOp", "NoOp"):
            continue
        if node.op == "Placeholder":
            if node.outputs[0][0].name != "resource":
                result.add(node)
        elif any(t.node in result for t in node.inputs):
            result.add(node)
        else:
            bodies = _bodies(node.attrs)
            if any(map(draws, bodies)) if bodies else _yields_new_value(node.op):
                result.add(node)
    return result


def _yields_new_value(op_type: str) -> bool:
    """Return whether an op yields a new value in each step, whatever its operands, and apart from those of variables.

    A stateless draw does if its seed is a variable.
    """
    if op_type in _VARIABLE_OPS or not tf_internals.has_outputs(op_type):
        return False
    return tf_internals.is_stateful(op_type) or op_traits.is_stateless_random(op_type)


def is_random(node: Node) -> bool:
    """Return whether an operation draws random numbers, from a seed operand or from none."""
    return op_traits.is_random(node.op)


def reads_shape_only(node: Node) -> bool:
    """Return whether an operation reads only the shape of its operands."""
    return node.op in _SHAPE_QUERIES


def shape_computations(order: Iterable[Node]) -> set[Node]:
    """Return the operations that compute integers from shapes and constants.

    Args:
        order: Nodes in topological order.
    """
    computations: set[Node] = set()
    for node in order:
        if node.stateful or not node.outputs or not node.inputs:
            continue
        if not all(dtype.is_integer for dtype, _ in node.outputs):
            continue
        from_sizes = any(t.node in computations for t in node.inputs)
        if reads_shape_only(node) or (
            from_sizes and all(t.node in computations or t.node.op == "Const" for t in node.inputs)
        ):
            computations.add(node)
    return computations
