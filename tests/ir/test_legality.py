"""Each rule of the table of legality refuses a graph that breaks it, at the stages at which it holds."""

import pytest
from graph_text import parsed

from rewriters.ir.graph import LoopName, Metadata
from rewriters.ir.legality import RULES, Stage, violations

LEGAL = """
graph(
  x: float32[4],
  v: resource of float32[4],
):
  a = float32[4] Relu(x)
  assign = AssignSubVariableOp(v, a)
  effects assign
  return a
"""

LOOPS = """
graph(
  x: float32[4],
):
  buffer = float32[4] Empty([4])
  one = float32[4] While(buffer, x)
  two = float32[4] While(x)
  return one, two
"""

SWAP = """
graph(
  x: float32[4],
):
  lms/a/swap_out = int64[] PyFunc(x)
  lms/a/swap_in = float32[4] PyFunc(lms/a/swap_out) after [{}]
  return lms/a/swap_in
"""


def with_metadata(graph, **of_nodes):
    for name, metadata in of_nodes.items():
        graph.nodes[name].metadata = metadata
    return graph


def tiled(text=LOOPS, two="backward"):
    first, second = Metadata(loop=LoopName("s", "forward")), Metadata(loop=LoopName("s", two))
    return with_metadata(parsed(text), buffer=first, one=first, two=second)


def broken_alias():
    graph = parsed(LEGAL)
    graph.aliases["old:0"] = parsed(LEGAL).nodes["a"].out()
    return graph


def renamed():
    graph = parsed(LEGAL)
    graph.nodes["a b"] = graph.nodes.pop("a")
    return graph


LEGAL_AFTER = LOOPS.replace("While(x)", "While(x) after [one]")
CASES = {
    "_known_roles": (lambda: with_metadata(parsed(LEGAL), a=Metadata(role="both")), "the role of `a` is 'both'"),
    "_aliases_in_graph": (broken_alias, "`old:0` was replaced by `a:0`, which is not in the graph"),
    "_uniform_ops": (lambda: parsed(LEGAL.replace("a = float32[4] Relu", "a = int32[1] Size")), "`a` is a `Size`"),
    "_live_ops": (
        lambda: parsed(LEGAL.replace("  effects", "  dead = float32[4] Relu(a)\n  effects")),
        "`dead` is dead",
    ),
    "_buffers_of_loops": (
        lambda: tiled(LEGAL_AFTER.replace("While(x)", "While(buffer)")),
        "`buffer` is the buffer of a tile loop, and is read by ['one', 'two']",
    ),
    "_one_loop_at_a_time": (tiled, "the tile loops `two` and `one` may run concurrently"),
    "_triggered_swap_ins": (
        lambda: parsed(SWAP.format("lms/a/swap_out")),
        "the swap-in `lms/a/swap_in` waits for its swap-out `lms/a/swap_out` alone",
    ),
    "_importable_names": (renamed, "'a b' is no name that TensorFlow accepts"),
    "_defined_functions": (lambda: parsed(LEGAL_AFTER), "the loop `one` has no body"),
    "_known_ops": (lambda: unknown_op(), "`a` has the type `Rolu`"),
}


def unknown_op():
    graph = parsed(LEGAL)
    graph.nodes["a"].op = "Rolu"
    return graph


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_violations_each_rule_refuses_a_graph_at_its_stages(rule):
    make, text = CASES[rule.__name__]
    graph = make()
    for stage in Stage:
        first, last = RULES[rule]
        assert any(text in found for found in violations(graph, stage)) == (first <= stage <= last), stage


@pytest.mark.parametrize("stage", Stage)
def test_violations_legal_graph_has_none(stage):
    assert violations(parsed(LEGAL), stage) == []


def test_violations_ordered_loops_and_triggered_swaps_are_legal():
    assert violations(tiled(LEGAL_AFTER), Stage.TILED) == []
    assert violations(parsed(SWAP.format("x")), Stage.SWAPPED) == []
