"""Leads of swap-ins and the simulator, on graphs worked out by hand and on a device that sleeps."""

import pytest
import tensorflow as tf
from children import printed
from equivalence import keras_step
from keras import layers

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize import canonicalize
from rewriters.ir.graph import Graph, Node
from rewriters.scheduling.memory_order import in_memory_order
from rewriters.swapping.swap_pass import SwapOptions, plan_swaps, without_copies
from rewriters.swapping.transfer_schedule import Fetch, LeadPlanner, LeadTimes, concurrent_swap_outs, simulate


def graph_of(edges):
    """Build a graph from `"name": "operand operand ^control"`, in topological order."""
    nodes = {}
    for name, operands in edges.items():
        before = operands.split()
        inputs = [nodes[operand].out() for operand in before if operand[0] != "^"]
        controls = [nodes[operand[1:]] for operand in before if operand[0] == "^"]
        nodes[name] = Node(name, "AddN", inputs, control_inputs=controls, outputs=[(tf.float32, (1,))])
    return Graph(nodes, [], [], list(nodes.values()), tf.compat.v1.GraphDef().library, None)


SWAPPED = {"a": "", "out": "a", "b": "a", "c": "b", "d": "c", "in": "out ^c", "e": "d in", "f": "e"}
"""`a` is swapped out, and returns after `c` for `e`. All ops take a second, transfers take two."""


def begins(edges, **options):
    graph = graph_of(edges)
    outs, ins = ({node: 2.0 for name, node in graph.nodes.items() if name.startswith(kind)} for kind in ("out", "in"))
    table = simulate(graph, lambda node: 1.0, outs, ins, **options)
    return {node.name: begin for node, begin in table.begins.items()} | {"": table.seconds}


def test_simulate_consumer_waits_for_the_rest_of_its_transfer():
    assert begins(SWAPPED) == {"a": 0, "out": 1, "b": 1, "c": 2, "in": 3, "d": 3, "e": 5, "f": 6, "": 7}


def test_simulate_transfers_of_a_direction_run_one_after_another():
    two = {**SWAPPED, "in2": "out ^c", "g": "in2 f"}
    assert begins(two)["in2"] == 5 and begins(two)["g"] == 7
    assert begins({**SWAPPED, "out2": "b", "g": "out2 f"})["out2"] == 3


def test_simulate_device_that_runs_ahead_delays_transfers():
    """`d` is launched before `c` ends, so that the swap-in waits for it, too."""
    assert begins(SWAPPED, runs_ahead=True)["in"] == 4
    assert begins(SWAPPED, runs_ahead=True)["e"] == 6


@pytest.mark.parametrize("runs_ahead", (True, False))
def test_simulate_without_transfer_times_is_the_sum_of_all_ops(runs_ahead):
    graph = graph_of(SWAPPED)
    free = [{graph.nodes[name]: 0.0} for name in ("out", "in")]
    assert simulate(graph, lambda node: 1.0, *free, runs_ahead=runs_ahead).seconds == 6


ORDER = {name: "" for name in ("f0", "f1", "f2", "loss", "d2", "d1", "d0")}


def starts(transfer_seconds, lead=1.0, consumers=("d0", "d1")):
    """Return latest starts of the swap-ins of `f0` and `f1` for two consumers; the ops take a second each."""
    nodes = graph_of(ORDER).nodes
    fetches = [Fetch(nodes[f"f{number}"], nodes[name], transfer_seconds) for number, name in enumerate(consumers)]
    backward = [node for name, node in nodes.items() if name[0] == "d"]
    ready = {node: 3 if name[0] == "d" else 0 for name, node in nodes.items()}
    planner = LeadPlanner(list(nodes.values()), lambda node: 1.0, ready, backward, fetches)
    latest = planner.latest_starts(lead)
    return [latest[fetch] for fetch in fetches], {node.name: end for node, end in planner.ends.items()}


def test_latest_starts_short_transfers_start_as_late_as_possible():
    assert starts(0.5)[0] == [5.5, 4.5]
    assert starts(0.5, lead=2.0)[0] == [5.0, 4.0]


def test_latest_starts_of_queueing_transfers_are_earlier():
    assert starts(0.5, consumers=("d0", "d0"))[0] == [5.5, 5.0]


def test_latest_starts_with_slow_link_move_with_their_consumers():
    """`d2` begins after 4 s. Either transfer takes 1.5 s, so `d1` waits 0.5 s, and `d0` begins when its own ends."""
    latest, ends = starts(1.5)
    assert latest == [5.5, 4.0] and ends["d1"] == 6.5 and ends["d0"] == 8.0


def test_latest_starts_with_full_link_are_not_before_the_backward_phase():
    """Consumers wait for the link. An earlier swap-in would not shorten the step, and hold more memory."""
    latest, ends = starts(5.0)
    assert latest[1] == ends["f1"] + 5 and latest[0] == latest[1] + 5


def test_concurrent_swap_outs_keep_the_link_busy():
    nodes = graph_of({name: "" for name in "abcde"}).nodes
    order = list(nodes.values())

    def number(seconds):
        return concurrent_swap_outs(order, lambda node: 1.0, dict.fromkeys(order, seconds))

    assert [number(seconds) for seconds in (0.0, 0.5, 1.0, 1.5, 5.0)] == [1, 2, 2, 3, 5]


def convolutions(x):
    for _ in range(6):
        x = layers.Conv2D(4, 3, padding="same", activation="relu")(x)
    return x


@pytest.fixture(scope="module")
def analysis():
    step = keras_step(convolutions, (16, 24), 2)
    graph = canonicalize.read_canonical(step.concrete_fn)
    return in_memory_order(without_copies(GraphAnalysis(graph).graph), 1, 2)


def op_seconds(node):
    return 1.0 if node.op.startswith("Conv2D") else 0.0


def distances(analysis, times, **options):
    """Return the distance in γ from each swap-in's trigger to its consumer."""
    swaps = plan_swaps(analysis, SwapOptions(**{"ctrld_strategy": "direct_order", **options}), 2, times).swaps
    level = analysis.level
    return [level[way.readers[0]] - level[way.control] for swap in swaps for way in swap.swap_ins]


def lead_times(analysis, seconds, lead=1.0):
    size = max(swap.tensor.num_bytes(2) for swap in plan_swaps(analysis, SwapOptions(), 2).swaps)
    return LeadTimes(op_seconds, size / seconds, lead)


def test_plan_swaps_leads_respect_bounds(analysis):
    times = lead_times(analysis, 1.5)
    assert max(distances(analysis, None)) == 2
    assert max(distances(analysis, times)) == 8
    assert min(distances(analysis, times, lb=4)) >= 4, "an explicit lower bound holds"
    assert max(distances(analysis, times, ub=7)) == 5, "and so does an upper bound: the largest distance is `ub` - 2"


def test_plan_swaps_longer_transfers_have_longer_leads(analysis):
    times = [None, *(lead_times(analysis, seconds) for seconds in (0.5, 1.5, 2.5))]
    totals = [sum(distances(analysis, of, n_tensors=2)) for of in times]
    assert totals == sorted(set(totals))


@pytest.mark.parametrize("strategy", ("chain_rule", "direct_order"))
def test_plan_swaps_lead_of_either_strategy_can_be_longer(analysis, strategy):
    totals = [sum(distances(analysis, lead_times(analysis, 0.5, n), ctrld_strategy=strategy)) for n in (1.0, 4.0)]
    assert totals[1] > totals[0]


def test_overlap_on_a_sleeping_device_hides_transfers():
    """Sleeps depend little on the load of the machine; a busy machine makes the rest of the ops slower."""
    figures = printed("overlapped.py")
    print(figures)
    assert figures["lb swaps"] == figures["lead swaps"] >= 10
    assert figures["lead hidden"] >= 0.8 and figures["lb hidden"] <= 0.4
    assert figures["lead waited"] < 0.5 * figures["lb waited"]
    for name in ("lb", "lead", "full link"):
        assert figures[f"{name} difference"] == 0.0
        assert figures[f"{name} seconds"] == pytest.approx(figures[f"{name} simulated"], rel=0.2)
    assert figures["lb by rates"] < 0.8 * figures["lb simulated"], "the sums of all times miss the waiting"
