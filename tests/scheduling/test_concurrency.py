"""Ops of a tiled step that must not run concurrently: loops and earlier updates, gradients of two convolutions."""

import itertools

import keras
import pytest
from equivalence import Cut, keras_step, plan
from nets import conv

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize import canonicalize
from rewriters.device.kernel_scratch import takes_memory
from rewriters.emission import tile_pass
from rewriters.ir.graph import ancestors

LAYERS = 4
LOOPS = [Cut("input", "middle", (2, 2)), Cut("middle", "out", (2, 2))]


def net(x):
    return conv(6, name="out")(conv(6)(conv(5, name="middle")(conv(4)(x))))


def rewritten(cuts, optimizer=None):
    """Return the graph of a tiled step in float64, whose convolutions unfold images with oneDNN too."""
    step = keras_step(net, (12, 10), 2, optimizer=optimizer, steps=1)
    analysis = GraphAnalysis(canonicalize.read_canonical(step.concrete_fn))
    return tile_pass.tile_segments(analysis, plan(analysis, cuts))


def updates_before_the_last_loop(optimizer):
    """Return the updates of the second segment's variables, and those of them that the first segment's loop awaits."""
    graph = rewritten(LOOPS, optimizer)
    loops = tile_pass.loop_nodes(graph)
    first, second = (graph.nodes[loops[name, "backward"]] for name in ("segment0", "segment1"))
    assigns = [node for node in graph.nodes.values() if node.op.startswith("Assign") and second in ancestors([node])]
    updates = [node for node in assigns if first not in ancestors([node])]
    return updates, [node for node in updates if node in ancestors([first])]


@pytest.mark.parametrize("make", [keras.optimizers.SGD, keras.optimizers.Adam])
def test_run_updates_before_loops_loop_waits_for_updates_of_earlier_loops(make):
    updates, awaited = updates_before_the_last_loop(make())
    assert len(updates) >= 4 and awaited == updates  # Two filters and their biases.


def test_run_updates_before_loops_clipped_updates_are_not_awaited():
    updates, awaited = updates_before_the_last_loop(keras.optimizers.SGD(global_clipnorm=1.0))
    assert not updates and not awaited


def concurrent_pairs(nodes, before):
    """Return the pairs of nodes that may run concurrently."""
    return [pair for pair in itertools.combinations(nodes, 2) if not any(a in before(b) for a, b in (pair, pair[::-1]))]


def test_serialize_scratch_groups_gradients_of_different_convs_run_serially():
    """Outside of loops; the two gradients of one convolution may run concurrently."""
    graph = rewritten([Cut("middle", "out", (1, 2))])
    nodes = [node for node in graph.nodes.values() if takes_memory(node, graph.device)]
    assert len(nodes) == 3
    pairs = concurrent_pairs(nodes, lambda node: ancestors([node]))
    assert all(a.inputs[-1] == b.inputs[-1] for a, b in pairs) and len(pairs) == 1


@pytest.mark.parametrize("halo", ["recompute", "carry"])
def test_loop_body_gradients_of_different_convs_run_serially(halo):
    graph = rewritten([Cut("input", "out", (2, 1), halo=halo)])
    bodies = [_unfolding(function) for function in graph.library.function]
    (nodes, before), *others = (pair for pair in bodies if pair[0])
    assert not others and len(nodes) == 2 * LAYERS - 1
    pairs = concurrent_pairs(nodes, before.get)
    assert len(pairs) == LAYERS - 1
    for pair in pairs:
        assert {"BackpropFilter", "BackpropInput"} == {name.split("Conv2D")[-1] for name in pair}


def _unfolding(function):
    """Return the gradients of convolutions in a function, and the ancestors of each of its nodes."""
    direct = {n.name: {i.lstrip("^").partition(":")[0] for i in n.input} for n in function.node_def}
    before = {}

    def all_before(name):
        if name not in before:
            before[name] = set().union(*({b} | all_before(b) for b in direct.get(name, ())))
        return before[name]

    nodes = [node.name for node in function.node_def if node.op.startswith("Conv2DBackprop")]
    for name in nodes:
        all_before(name)
    return nodes, before
