"""TFLMS's Algorithms 1 and 2, on graphs worked out by hand and by what holds for every graph."""

import itertools

import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from rewriters.ir.graph import Graph, Node, ancestors
from rewriters.swapping.trigger_search import TriggerSearch

EDGE = [(tf.float32, (1,))]


def graph_of(edges, controls=()):
    """Build a graph from `"name": "operand operand"`, in topological order."""
    nodes = {}
    for name, operands in edges.items():
        nodes[name] = Node(name, "AddN", [nodes[operand].out() for operand in operands.split()], outputs=EDGE)
    for before, after in controls:
        nodes[after].control_inputs.append(nodes[before])
    return Graph(nodes, [], [], list(nodes.values()), tf.compat.v1.GraphDef().library, None)


CHAIN = {"x": "", "a": "x", "b": "a", "c": "b", "loss": "c", "dc": "loss c", "db": "dc b", "da": "db a", "dx": "da x"}
"""γ: x 0, a 1, b 2, c 3, loss 4, dc 5, db 6, da 7, dx 8."""


def search(edges=CHAIN, controls=(), backward=None):
    graph = graph_of(edges, controls)
    return graph.nodes, TriggerSearch(graph, {graph.nodes[n] for n in (backward or [n for n in edges if n[0] == "d"])})


def trigger(strategy, source, target, lb, ub, **options):
    nodes, both = search(**options)
    control = getattr(both, strategy)(nodes[source], nodes[target], lb, ub)
    return None if control is None else control.name


@pytest.mark.parametrize(
    ("lb", "ub", "control"),
    [
        (1, 10000, "db"),  # γ(da) - 1
        (2, 10000, "dc"),
        (3, 10000, "loss"),
        (5, 10000, "b"),
        (6, 10000, None),  # γ(a) itself is out of range.
        (2, 4, "dc"),  # l = 7 - 4 + 1 = 4, and γ(dc) = 5 is above it.
        (2, 3, None),  # l = 5.
        (1, 3, "db"),
        (1, 2, None),  # l = 6.
        (7, 6, None),
    ],
)
def test_direct_order_small_graph_returns_expected_trigger(lb, ub, control):
    assert trigger("direct_order", "a", "da", lb, ub) == control


@pytest.mark.parametrize(
    ("lb", "ub", "control"),
    [
        (0, 10000, "db"),  # Readers of a: b and da, which is the target; so it goes on to b.
        (1, 10000, "db"),  # b is 1 after a, and db reads it.
        (2, 10000, "dc"),
        (3, 10000, "dc"),  # The gradient of the loss reads the loss.
        (4, 10000, None),
        (1, 2, "db"),
        (1, 1, None),  # σ_u is 0 when the search reaches b.
        (2, 3, "dc"),
        (3, 2, None),
        (1, 0, None),
    ],
)
def test_chain_rule_small_graph_returns_expected_trigger(lb, ub, control):
    assert trigger("chain_rule", "a", "da", lb, ub) == control


FIGURE = {
    **{"f1": "", "g1": "f1", "g2": "g1", "g3": "g2", "g4": "g3", "fi": "g4"},
    **{"f2": "fi f1", "g7": "f2", "fj": "g7", "f3": "fj f1"},
}
"""Graph of Figure 4: edges from f1 to f2 and f3 are longer than 5; γ: f1 0, ..., fi 5, f2 6, g7 7, fj 8, f3 9."""


@pytest.mark.parametrize(("target", "lb", "control"), [("f2", 1, "fi"), ("f3", 1, "fj"), ("f3", 4, "fi")])
def test_direct_order_figure_4_returns_trigger_of_paper(target, lb, control):
    assert trigger("direct_order", "f1", target, lb, 10000, edges=FIGURE, backward=["fi"]) == control


def test_trigger_search_op_without_path_to_target_is_no_trigger():
    """`e` has the same level γ, and no path leads from it to the target."""
    edges = {**CHAIN, "e": "dc", "de": "e a"}
    assert trigger("direct_order", "a", "da", 1, 10000, edges=edges) == "db"
    edges = {"x": "", "a": "x", "e": "a", "loss": "a", "de": "loss e", "dl": "loss", "d2": "dl", "da": "d2 a"}
    assert trigger("chain_rule", "a", "da", 1, 10000, edges=edges) == "dl"


def test_direct_order_path_of_control_edges_is_followed():
    edges = {"x": "", "a": "x", "loss": "a", "dl": "loss", "de": "loss", "df": "de", "da": "dl a"}
    assert trigger("direct_order", "a", "da", 1, 10000, edges=edges) == "dl"
    assert trigger("direct_order", "a", "da", 1, 10000, edges=edges, controls=[("df", "da")]) == "df"


def test_trigger_search_many_paths_visits_each_op_once():
    """From the source to the last op lead 2**20 paths."""
    edges = {"s": ""}
    last = "s"
    for number in range(20):
        edges |= {f"l{number}": last, f"r{number}": last, f"m{number}": f"l{number} r{number}"}
        last = f"m{number}"
    edges |= {"d1": last, "d2": "d1 s"}
    assert trigger("chain_rule", "s", "d2", 1, 10000, edges=edges) == "d1"
    assert trigger("direct_order", "s", "d2", 3, 10000, edges=edges) in ("l19", "r19")


@st.composite
def training_graphs(draw):
    """Draw random forward ops, and for each a backward op that reads its result."""
    size = draw(st.integers(2, 9))
    edges = {"f0": ""}
    for number in range(1, size):
        operands = draw(st.sets(st.integers(max(0, number - 3), number - 1), min_size=1, max_size=2))
        edges[f"f{number}"] = " ".join(f"f{operand}" for operand in sorted(operands))
    readers = {number: [n for n in range(size) if f"f{number}" in edges[f"f{n}"].split()] for number in range(size)}
    for number in reversed(range(size)):
        gradients = [f"d{reader}" for reader in readers[number]] or [f"f{size - 1}"]
        edges[f"d{number}"] = " ".join([*gradients, f"f{number}"])
    return edges, draw(st.integers(0, 4)), draw(st.sampled_from([2, 4, 10000]))


@settings(deadline=None, max_examples=200, derandomize=True)
@given(training_graphs())
def test_trigger_search_random_graph_trigger_lies_between_source_and_target(case):
    edges, lb, ub = case
    nodes, both = search(edges)
    again, other = search(edges)
    pairs = [(t.node, node) for node in nodes.values() for t in node.inputs if node.name[0] == "d" != t.node.name[0]]
    for (source, target), strategy in itertools.product(pairs, ("direct_order", "chain_rule")):
        control = getattr(both, strategy)(source, target, lb, ub)
        if control is None:
            continue
        assert both.level[source] < both.level[control] < both.level[target]
        assert control in ancestors([target])
        assert getattr(other, strategy)(again[source.name], again[target.name], lb, ub).name == control.name
        if strategy == "chain_rule":
            assert control.name[0] == "d"
        else:
            assert lb <= both.level[target] - both.level[control] < ub - 1
