"""The contract of every pass over a graph, and the runner that checks it.

A pass takes a graph and returns another one; it does not edit the graph that it is given. The runner checks each pass
after it has run:

- the given graph has not been edited, and `changed` tells the truth;
- the result is well formed: each value has one producer, and all nodes that are read are in the graph;
- `ensures`: arguments, captured variables and results are the same; each stateful op runs once, in the same order.

Checks that take longer than a walk over the nodes run in tests alone (`FULL_CHECKS`).
"""

from __future__ import annotations

import abc
import contextlib
import contextvars
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import tensorflow as tf

from rewriters.errors import RewriteError
from rewriters.ir import tf_internals
from rewriters.ir.graph import Graph, GraphState, Node, Shape, Tensor, predecessors
from rewriters.ir.legality import Stage, violations
from rewriters.ir.op_traits import Trait, ops_with

__all__: list[str] = []

FULL_CHECKS = False
"""Switch for the dear checks: all nodes, and the order of stateful ops. They take as long as a copy of the graph."""

_READS = ops_with(Trait.READS_VARIABLE) | {"Placeholder"}
"""Stateful ops that a pass may drop or move: they have no effect."""


DUMP_VARIABLE = "TFLMS_SFT_DUMP"
"""Environment variable: directory for the graphs between passes."""

_directory: contextvars.ContextVar[str] = contextvars.ContextVar("directory for graphs", default="")


def dump_directory() -> str:
    """Return the directory for the graphs between passes; empty if they are not recorded."""
    return _directory.get() or os.environ.get(DUMP_VARIABLE, "")


@contextlib.contextmanager
def dumping_to(directory: str) -> Iterator[None]:
    """Record the graphs between passes for a directory, within this context."""
    token = _directory.set(directory)
    try:
        yield
    finally:
        _directory.reset(token)


def record_state(graph: Graph, title: str, purpose: str) -> None:
    """Add a copy of a graph to its history, if graphs are recorded.

    Args:
        graph: The graph; a pass or one of its steps has just edited it.
        title: Name of the pass or the step.
        purpose: Docstring of the pass or the step. Its first line is recorded, without what the step returns.
    """
    if dump_directory():
        copied = dataclasses.replace(graph.copy(), history=())
        first, _, _ = purpose.strip().partition("\n")
        does, returns, _ = first.partition("; return ")
        graph.history = (*graph.history, GraphState(title, f"{does}." if returns else first, copied))


def _record_pass(graph_pass: GraphPass[Any], before: Graph, after: Graph) -> None:
    """Let the history of a new graph begin with that of the given one, and end with the pass or with its steps."""
    if after.history[: len(before.history)] != before.history:  # The pass built the graph from nothing.
        after.history = (*before.history, *after.history)
    if len(after.history) == len(before.history):
        record_state(after, graph_pass.name, type(graph_pass).__doc__ or "")
    broken_rules = violations(after, graph_pass.stage) if dump_directory() else []
    if broken_rules:
        last = after.history[-1]
        purpose = f"{last.purpose} ILLEGAL at stage {graph_pass.stage.name}: {'; '.join(broken_rules)}"
        after.history = (*after.history[:-1], last._replace(purpose=purpose))


class PassError(RewriteError):
    """A pass that broke its contract; the message names the pass and those that ran before it."""


@dataclasses.dataclass(frozen=True)
class PassResult:
    """Result of a pass.

    Attributes:
        graph: The new graph, or the given one if nothing changed.
        changed: Whether the graph differs from the given one.
        notes: Remarks for the plan.
    """

    graph: Graph
    changed: bool
    notes: tuple[str, ...] = ()


Result_co = TypeVar("Result_co", bound=PassResult, covariant=True)


class GraphPass(abc.ABC, Generic[Result_co]):
    """A rewriting of a graph.

    Attributes:
        new_stateful_ops: Types of stateful ops that the pass may add.
        stage: Stage of the graphs that the pass returns.
    """

    new_stateful_ops: frozenset[str] = frozenset()
    stage: Stage = Stage.CANONICAL

    @property
    def name(self) -> str:
        """Name for messages."""
        return type(self).__name__

    def requires(self, graph: Graph) -> None:
        """Check what the pass needs of a graph beyond a well-formed one.

        Raises:
            PassError: If the graph does not meet it.
        """

    @abc.abstractmethod
    def call(self, graph: Graph) -> Result_co:
        """Return the rewritten graph, without an edit to the given one."""

    def ensures(self, before: Graph, after: Graph) -> None:
        """Check what the pass promises: the same interface and effects.

        Raises:
            PassError: If the result does not keep it.
        """
        check_interface(before, after)
        check_effects(before, after, self.new_stateful_ops)


def run_pass(graph_pass: GraphPass[Result_co], graph: Graph, ran_before: Sequence[str] = ()) -> Result_co:
    """Run one pass and check its contract; messages name the passes that `ran_before`.

    Raises:
        PassError: If the pass, or the graph it is given, breaks the contract.
    """
    try:
        graph_pass.requires(graph)
        fingerprint = _fingerprint(graph)
        result = graph_pass.call(graph)
        if _fingerprint(graph) != fingerprint:
            raise PassError("it edited the graph that it was given")
        if result.changed is (result.graph is graph):
            given = "the given graph" if result.graph is graph else "another graph"
            raise PassError(f"it returned {given} and `changed` is {str(result.changed).lower()}")
        if result.changed:
            check_well_formed(result.graph)
            if FULL_CHECKS and _fingerprint(result.graph) == fingerprint:
                raise PassError("it returned an equal graph and `changed` is true")
            graph_pass.ensures(graph, result.graph)
            check_legal(result.graph, graph_pass.stage)
            _record_pass(graph_pass, graph, result.graph)
    except PassError as error:
        raise PassError(
            f"The pass `{graph_pass.name}` broke its contract: {error}. {_history(ran_before)} Please report it."
        ) from None
    except RewriteError:
        raise  # A refusal that explains itself.
    except Exception as error:
        _add_note(error, f"Raised in the pass `{graph_pass.name}`. {_history(ran_before)}")
        raise
    return result


def run_passes(graph: Graph, passes: Iterable[GraphPass[PassResult]]) -> PassResult:
    """Run passes one after another and check the contract of each.

    Returns:
        The last graph, whether any pass changed it, and the notes of all passes.

    Raises:
        PassError: Naming the pass that broke its contract and those that ran before it.
    """
    names: list[str] = []
    notes: list[str] = []
    changed = False
    for graph_pass in passes:
        result = run_pass(graph_pass, graph, names)
        graph, changed = result.graph, changed or result.changed
        notes.extend(result.notes)
        names.append(graph_pass.name)
    return PassResult(graph, changed, tuple(notes))


def _add_note(error: Exception, text: str) -> None:
    """Add a line below the message of an error; Python 3.10 has no notes, so there the line becomes part of it."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    elif len(error.args) == 1:
        error.args = (f"{error.args[0]}\n{text}",)


def _history(ran_before: Sequence[str]) -> str:
    return f"Passes that ran before: {', '.join(ran_before) or 'none'}."


def _fingerprint(graph: Graph) -> Any:
    """Return a value that is equal for equal graphs: counts, or with `FULL_CHECKS` every node."""
    if FULL_CHECKS:
        return (
            [_described(node) for node in graph.nodes.values()],
            [tensor.name for tensor in (*graph.inputs, *graph.outputs)],
            [node.name for node in graph.keep],
        )
    edges = sum([len(node.inputs) for node in graph.nodes.values()])
    controls = sum([len(node.control_inputs) for node in graph.nodes.values()])
    return len(graph.nodes), edges, controls, graph.inputs[:], graph.outputs[:], len(graph.keep)


def _described(node: Node) -> tuple[Any, ...]:
    """Return the parts of a node; attributes are compared by identity, since copies of a graph share them."""
    return (
        node.name,
        node.op,
        [tensor.name for tensor in node.inputs],
        [before.name for before in node.control_inputs],
        {key: id(value) for key, value in node.attrs.items()},
        node.device,
        list(node.outputs),
    )


def check_well_formed(graph: Graph) -> None:
    """Check that each value has one producer, which is in the graph; with `FULL_CHECKS`, that there is no cycle.

    Raises:
        PassError: Naming the first node at fault.
    """
    nodes = graph.nodes
    for name, node in nodes.items():
        if node.name != name:
            raise PassError(f"the node `{node.name}` is registered as `{name}`")
        for source, index in node.inputs:
            if nodes.get(source.name) is not source or index >= len(source.outputs):
                raise PassError(f"`{name}` reads `{source.name}:{index}`, which no node of the graph produces")
        for before in node.control_inputs:
            if nodes.get(before.name) is not before:
                raise PassError(f"`{name}` waits for `{before.name}`, which is not in the graph")
    for node, index in (*graph.inputs, *graph.outputs):
        if nodes.get(node.name) is not node or index >= len(node.outputs):
            raise PassError(f"the argument or result `{node.name}:{index}` is not in the graph")
    for node in graph.keep:
        if nodes.get(node.name) is not node:
            raise PassError(f"`{node.name}`, which must run for its effect, is not in the graph")
    if FULL_CHECKS:
        try:
            graph.execution_order()
        except RewriteError as error:
            raise PassError(str(error).rstrip(".")) from None


def check_legal(graph: Graph, stage: Stage) -> None:
    """With `FULL_CHECKS`, check the rules of a stage (`legality.py`).

    Raises:
        PassError: Naming the first violations.
    """
    broken_rules = violations(graph, stage) if FULL_CHECKS else []
    if broken_rules:
        raise PassError(f"the graph is illegal at stage {stage.name}: {'; '.join(broken_rules[:3])}")


def check_interface(before: Graph, after: Graph, same_shapes: bool = True) -> None:
    """Check that arguments, captured variables and results are the same, and static shapes as far as they are known.

    Raises:
        PassError: Naming the first difference.
    """
    for what, old, new in (
        ("arguments", _values(before.inputs), _values(after.inputs)),
        ("captured variables", _variables(before.inputs), _variables(after.inputs)),
        ("results", before.outputs, after.outputs),
    ):
        if len(old) != len(new):
            raise PassError(f"the graph has {len(new)} {what} instead of {len(old)}")
        for expected, received in zip(old, new, strict=True):
            named = what == "results" or expected.name == received.name
            agree = not same_shapes or _compatible(expected.shape, received.shape)
            if not named or expected.dtype != received.dtype or not agree:
                raise PassError(f"its {what} differ: {_signature(received)} instead of {_signature(expected)}")


def _values(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.dtype != tf.resource]


def _variables(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.dtype == tf.resource]


def _signature(tensor: Tensor) -> str:
    return f"`{tensor.name}` ({tensor.dtype.name}, {tensor.shape})"


def _compatible(old: Shape, new: Shape) -> bool:
    """Return whether two static shapes may be the same one."""
    if old is None or new is None:
        return True
    return len(old) == len(new) and all(a == b or None in (a, b) for a, b in zip(old, new, strict=True))


def check_effects(before: Graph, after: Graph, new_stateful_ops: frozenset[str] = frozenset()) -> None:
    """Check that each stateful op of a graph runs once in the new one, which may have more of types `new_stateful_ops`.

    With `FULL_CHECKS`, check also that they run in the same order.

    Raises:
        PassError: Naming ops that are missing, new, or out of order.
    """
    old, new = _effects(before), _effects(after)
    missing = [name for name in old if name not in new]
    if missing:
        raise PassError(f"stateful ops are missing: {missing[:5]}")
    added = [name for name, node in new.items() if name not in old and node.op not in new_stateful_ops]
    if added:
        raise PassError(f"stateful ops are new: {added[:5]}")
    if FULL_CHECKS:
        # An assertion only ends a step. A folded shape may drop the path from it to an update.
        ordered = [name for name, node in old.items() if node.op != "Assert"]
        bits = {name: 1 << number for number, name in enumerate(ordered)}
        order, new_order = _earlier_effects(before, bits), _earlier_effects(after, bits)
        for name in ordered:
            lost = order[name] & ~new_order[name]
            if lost:
                first = next(other for other, bit in bits.items() if bit & lost)
                raise PassError(f"the stateful op `{name}` no longer runs after `{first}`")


def _effects(graph: Graph) -> dict[str, Node]:
    types = {op for op in {node.op for node in graph.nodes.values()} - _READS if tf_internals.is_stateful(op)}
    return {name: node for name, node in graph.nodes.items() if node.op in types}


def _earlier_effects(graph: Graph, bits: Mapping[str, int]) -> dict[str, int]:
    """Return for each node the stateful ops that must run before it, as a set of bits."""
    earlier: dict[Node, int] = {}
    for node in graph.execution_order():
        mask = 0
        for other in predecessors(node):
            mask |= earlier[other] | bits.get(other.name, 0)
        earlier[node] = mask
    return {node.name: mask for node, mask in earlier.items()}
