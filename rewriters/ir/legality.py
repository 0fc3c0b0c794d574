"""Legality of a graph at each stage of compilation: which ops, edges and metadata may occur.

The table `RULES` lists the rules with the stages at which they hold. In tests, the runner of passes and the importer
check them (`graph_pass.py`). A dump names violations.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import tensorflow as tf

from rewriters.ir import tf_internals
from rewriters.ir.graph import LOOPS, PER_PIXEL, Graph, Node, ancestors
from rewriters.ir.loop_bodies import function_names
from rewriters.ir.op_traits import Trait, ops_with

__all__: list[str] = []

_CALLS, _PYTHON_CALLS = ops_with(Trait.CALL), ops_with(Trait.PYTHON_CALL)
_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")

ROLES = frozenset(("", "forward", "backward", "update"))


class Stage(enum.IntEnum):
    """Stage of compilation of a graph, in order.

    Attributes:
        TRACED: As TensorFlow traced it.
        CANONICAL: After canonicalization, merged constants and other passes that precede a plan.
        TILED: After tile loops were inserted, if there are any.
        SWAPPED: After swaps were inserted, if there are any.
        PIPELINED: After micro-batches were unrolled and scheduled.
        IMPORTABLE: Before TensorFlow imports it.
    """

    TRACED = 0
    CANONICAL = 1
    TILED = 2
    SWAPPED = 3
    PIPELINED = 4
    IMPORTABLE = 5


Rule = Callable[[Graph], Iterable[str]]
"""Yields the violations of a rule by a graph."""


def violations(graph: Graph, stage: Stage) -> list[str]:
    """Return the violations of the rules of a stage."""
    return [text for rule, (first, last) in RULES.items() if first <= stage <= last for text in rule(graph)]


def _known_roles(graph: Graph) -> Iterator[str]:
    """Roles in the metadata are those of `Metadata`."""
    for node in graph.nodes.values():
        if node.metadata.role not in ROLES:
            yield f"the role of `{node.name}` is {node.metadata.role!r}, which is none of {sorted(ROLES)}"


def _aliases_in_graph(graph: Graph) -> Iterator[str]:
    """Replaced tensors lead to nodes of the graph."""
    for old, tensor in graph.aliases.items():
        if graph.nodes.get(tensor.node.name) is not tensor.node:
            yield f"`{old}` was replaced by `{tensor.name}`, which is not in the graph"


def _uniform_ops(graph: Graph) -> Iterator[str]:
    """Ops that canonicalization expands do not occur."""
    for node in graph.nodes.values():
        if node.op in ("ShapeN", "Size"):
            yield f"`{node.name}` is a `{node.op}`, which canonicalization replaces by `Shape`"
        elif node.op in _CALLS and not (PER_PIXEL in node.attrs or node.attrs.get("_XlaMustCompile", _NO_VALUE).b):
            yield f"`{node.name}` calls a function, which canonicalization inlines"


def _live_ops(graph: Graph) -> Iterator[str]:
    """An output, an effect or an argument needs each op but constants, which cost nothing."""
    needed = ancestors([tensor.node for tensor in (*graph.outputs, *graph.inputs)] + graph.keep)
    for node in graph.nodes.values():
        if node not in needed and node.op != "Const":
            yield f"`{node.name}` is dead: neither an output nor an effect needs it"


def _buffers_of_loops(graph: Graph) -> Iterator[str]:
    """An uninitialised buffer is an initial value of one tile loop, and nothing else reads it."""
    readers = graph.consumers()
    for node in graph.nodes.values():
        if node.op == "Empty" and node.metadata.loop is not None:
            reading = {reader for reader, _ in readers.get(node.out(), ())}
            if len(reading) != 1 or any(reader.metadata.loop != node.metadata.loop for reader in reading):
                names = sorted(reader.name for reader in reading)
                yield f"`{node.name}` is the buffer of a tile loop, and is read by {names}"


def _one_loop_at_a_time(graph: Graph) -> Iterator[str]:
    """Tile loops of one device and one stage run one after another: their peaks would add up."""
    loops: dict[tuple[str, int | None], list[Node]] = {}
    for node in graph.execution_order():
        if node.op in LOOPS and node.metadata.loop is not None:
            loops.setdefault((node.device, node.metadata.stage), []).append(node)
    for ordered in loops.values():
        for before, after in zip(ordered, ordered[1:], strict=False):
            if before not in ancestors([after]):
                yield f"the tile loops `{before.name}` and `{after.name}` may run concurrently"


def _triggered_swap_ins(graph: Graph) -> Iterator[str]:
    """A swap-in waits for an op beside its swap-out, so that the copy does not exist from the swap-out on."""
    for node in graph.nodes.values():
        held = [tensor.node for tensor in node.inputs if tensor.node.op in _PYTHON_CALLS]
        if node.op in _PYTHON_CALLS and held and is_swap(node) and not set(node.control_inputs) - set(held):
            yield f"the swap-in `{node.name}` waits for its swap-out `{held[0].name}` alone"


def is_swap(node: Node) -> bool:
    """Return whether swapping has added an op."""
    return node.name.startswith("lms/")


def _importable_names(graph: Graph) -> Iterator[str]:
    """Names of nodes are names of TensorFlow."""
    for name in graph.nodes:
        if not _NAME.fullmatch(name):
            yield f"{name!r} is no name that TensorFlow accepts"


def _defined_functions(graph: Graph) -> Iterator[str]:
    """The library defines each function that an attribute names, and each loop has a body."""
    defined = {function.signature.name for function in graph.library.function}
    for node in graph.nodes.values():
        if node.op in LOOPS and "body" not in node.attrs:
            yield f"the loop `{node.name}` has no body"
        for key, value in node.attrs.items():
            for name in function_names(value):
                if name not in defined:
                    yield f"`{node.name}` names the function `{name}` as `{key}`, which the library lacks"


def _known_ops(graph: Graph) -> Iterator[str]:
    """TensorFlow registers each type of op."""
    for node in graph.nodes.values():
        if not tf_internals.is_registered(node.op):
            yield f"`{node.name}` has the type `{node.op}`, which TensorFlow does not register"


_NO_VALUE = tf.compat.v1.AttrValue()

RULES: Mapping[Rule, tuple[Stage, Stage]] = {
    _known_roles: (Stage.TRACED, Stage.IMPORTABLE),
    _aliases_in_graph: (Stage.TRACED, Stage.IMPORTABLE),
    _uniform_ops: (Stage.CANONICAL, Stage.PIPELINED),
    _live_ops: (Stage.CANONICAL, Stage.SWAPPED),  # Micro-batches compute results of which only one is returned.
    _buffers_of_loops: (Stage.TILED, Stage.IMPORTABLE),
    _one_loop_at_a_time: (Stage.TILED, Stage.SWAPPED),  # Stages of a pipeline run concurrently.
    _triggered_swap_ins: (Stage.SWAPPED, Stage.IMPORTABLE),
    _importable_names: (Stage.IMPORTABLE, Stage.IMPORTABLE),
    _defined_functions: (Stage.IMPORTABLE, Stage.IMPORTABLE),
    _known_ops: (Stage.IMPORTABLE, Stage.IMPORTABLE),
}
"""First and last stage at which each rule holds. An unchanged step is imported as it was traced."""
