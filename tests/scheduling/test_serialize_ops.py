"""Large ops run one after another: the step computes the same bits with a lower peak."""

import graphlib

import keras
import pytest
import tensorflow as tf
from equivalence import keras_step
from graph_changes import changed
from keras import layers

from rewriters.analysis import summation_order
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize import canonicalize
from rewriters.device.peak_memory import graph_peak, graph_schedule
from rewriters.ir.graph import Graph, Node, ancestors, predecessors
from rewriters.ir.graph_pass import run_pass
from rewriters.scheduling.delay_early_ops import earliest_forward_level
from rewriters.scheduling.serialize_ops import SerializeLargeOps
from rewriters.swapping.swap_pass import in_swap_order, without_copies

LIBRARY = tf.compat.v1.GraphDef().library


def serialising(analysis, min_bytes=1):
    backward, fixed = (
        {n.name for n in nodes} for nodes in (analysis.backward, summation_order.flattenable_sums(analysis))
    )
    return SerializeLargeOps(backward=backward, fixed=fixed, min_bytes=min_bytes, batch=2)


def serialised(analysis, min_bytes=1):
    return run_pass(serialising(analysis, min_bytes), analysis.graph).graph


def forked(x):
    """Two branches, each with large temporary tensors."""
    x = layers.Conv2D(8, 3, padding="same")(x)
    a, b = (layers.BatchNormalization()(layers.Conv2D(8, 1)(x)) for _ in range(2))
    return layers.ReLU()(a * b)


@pytest.mark.parametrize("known", (True, False), ids=("known", "unknown"))
def test_serialize_large_ops_computes_same_bits_with_no_higher_peak(known):
    step = keras_step(forked, (16, 16), 2, known, keras.optimizers.Adam(), steps=4)
    before = GraphAnalysis(canonicalize.read_canonical(step.concrete_fn))
    graph, same = changed(step, serialising)
    assert same
    peaks = [graph_peak(graph_schedule(g, (), 2, []), {}, limit=0).peak_bytes for g in (before.graph, graph)]
    assert peaks[1] <= peaks[0]


def test_serialize_large_ops_forward_does_not_wait_for_backward():
    """With an unknown batch the backward phase has ops that run early."""
    step = keras_step(forked, (16, 16), 2, known_batch=False)
    before = GraphAnalysis(canonicalize.read_canonical(step.concrete_fn))
    graph = serialised(before)
    after = GraphAnalysis(graph)
    assert {n.name for n in after.backward} == {n.name for n in before.backward}
    ready = earliest_forward_level(after)
    assert all(ready[n] == after.graph.levels()[n] for n in after.order if n in after.data - after.backward)


def test_serialize_large_ops_flattenable_sums_get_no_edges():
    def net(x):
        return layers.Conv2D(4, 1)(x) + layers.Conv2D(4, 1)(x) + layers.Conv2D(4, 1)(x)

    step = keras_step(net, (8, 8), 2)
    analysis = GraphAnalysis(canonicalize.read_canonical(step.concrete_fn))
    names = {node.name for node in summation_order.flattenable_sums(analysis)}
    graph = serialised(analysis)
    assert len(names) >= 2 and not any(graph.nodes[name].control_inputs for name in names)
    assert not any(before.name in names for node in graph.nodes.values() for before in node.control_inputs)


def test_serialize_large_ops_small_ops_get_no_edges():
    step = keras_step(forked, (16, 16), 2)
    analysis = GraphAnalysis(canonicalize.read_canonical(step.concrete_fn))
    large = 2 * 16 * 16 * 8 * 8
    few, all_ = (sum(len(n.control_inputs) for n in serialised(analysis, m).nodes.values()) for m in (large, 1))
    none = sum(len(n.control_inputs) for n in analysis.graph.nodes.values())
    assert none < few < all_


def by_hand():
    """Build a graph of a large tensor and two branches, each with two more large tensors and a small result."""
    graph = Graph({}, [], [], [], LIBRARY, None)

    def add(name, op, inputs, size):
        return graph.add(Node(name, op, [n.out() for n in inputs], outputs=[(tf.float64, (size,))]))

    source = add("source", "Const", [], 1)
    x = add("x", "Roll", [source], 100)
    ends = []
    for branch in "ab":
        first, second = (add(f"{branch}{n}", "Roll", [x], 100) for n in (1, 2))
        ends.append(add(f"{branch}3", "Roll", [first, second], 1))
    graph.outputs = [add("end", "Roll", ends, 1).out()]
    return graph


def test_serialize_large_ops_branch_ends_before_next():
    graph = by_hand()
    graph = run_pass(SerializeLargeOps(backward=(), fixed=(), min_bytes=800, batch=1), graph).graph
    order = [node.name for node in graph.execution_order() if node.name[0] in "ab"]
    assert order in (["a1", "a2", "a3", "b1", "b2", "b3"], ["a2", "a1", "a3", "b1", "b2", "b3"])
    assert [c.name for c in graph.nodes["b1"].control_inputs] == ["a3"]
    peaks = [graph_peak(graph_schedule(g, (), 1, []), {}, limit=0).peak_bytes for g in (by_hand(), graph)]
    assert peaks[0] >= 5 * 800 and peaks[1] < 3 * 800 + 100
    assert all(len(set(predecessors(node))) == len(predecessors(node)) for node in graph.nodes.values())


def test_serialize_large_ops_small_consumer_ends_before_next_large_op():
    """A filter's gradient keeps the gradient that it reads alive; the other consumer of that may end first."""
    graph = Graph({}, [], [], [], LIBRARY, None)

    def add(name, inputs, size):
        return graph.add(Node(name, "Roll", [n.out() for n in inputs], outputs=[(tf.float64, (size,))]))

    source = graph.add(Node("source", "Const", outputs=[(tf.float64, (1,))]))
    gradient = add("gradient", [source], 100)
    small = add("small", [gradient], 1)
    first = add("first", [gradient], 100)
    second = add("second", [first], 100)
    graph.outputs = [small.out(), second.out()]
    graph = run_pass(SerializeLargeOps(backward=(), fixed=(), min_bytes=800, batch=1), graph).graph
    first, second, small = (graph.nodes[name] for name in ("first", "second", "small"))
    assert small in first.control_inputs + second.control_inputs
    assert graph.nodes["gradient"] not in small.control_inputs, "both readers may run at once"


def test_serialize_large_ops_updates_of_one_variable_end_before_next_gradient():
    """The second slot's chain begins in place, so it frees the gradient before another variable's gradient exists."""
    graph = Graph({}, [], [], [], LIBRARY, None)

    def add(name, op, inputs, size=100):
        return graph.add(Node(name, op, [n.out() for n in inputs], outputs=[(tf.float64, (size,))]))

    source = graph.add(Node("source", "Const", outputs=[(tf.float64, (1,))]))
    slots: dict[str, list[Node]] = {"mean": [], "variance": []}
    for variable in "ab":
        gradient = add(f"{variable}/gradient", "Roll", [source])
        slots["mean"].append(add(f"{variable}/mean", "Roll", [gradient], 1))
        square = add(f"{variable}/square", "Square", [gradient])
        slots["variance"].append(add(f"{variable}/variance", "Roll", [square], 1))
    graph.outputs = [node.out() for nodes in slots.values() for node in nodes]
    graph = run_pass(SerializeLargeOps(backward=(), fixed=(), min_bytes=800, batch=1), graph).graph
    order = [node.name for node in graph.execution_order()]
    assert order.index("a/variance") < order.index("b/gradient") or order.index("b/variance") < order.index(
        "a/gradient"
    )
    assert graph_peak(graph_schedule(graph, (), 1, []), {}, limit=0).peak_bytes < 2 * 800


def test_serialize_large_ops_copies_of_variables_wait():
    """An op never writes over a variable that it reads, so it takes memory, and runs when its result is needed."""
    graph = Graph({}, [], [], [], LIBRARY, None)

    def add(name, op, inputs, size=100):
        return graph.add(Node(name, op, [n.out() for n in inputs], outputs=[(tf.float64, (size,))]))

    handle = graph.add(Node("handle", "Placeholder", outputs=[(tf.resource, ())]))
    source = graph.add(Node("source", "Const", outputs=[(tf.float64, (1,))]))
    read = add("read", "ReadVariableOp", [handle])
    early = add("early", "Roll", [read], 1)
    root = add("root", "Sqrt", [read])
    gradient = add("gradient", "Roll", [source])
    small = add("small", "Roll", [gradient], 1)
    end = add("end", "Roll", [small, root], 1)
    graph.outputs = [early.out(), end.out()]
    graph = run_pass(SerializeLargeOps(backward=(), fixed=(), min_bytes=800, batch=1), graph).graph
    order = [node.name for node in graph.execution_order()]
    assert order.index("small") < order.index("root")


def test_serialize_large_ops_operand_with_largest_peak_runs_first():
    """The gradient of a normalisation: `scaled` could run early, and would stay allocated beside the other operand."""
    graph = Graph({}, [], [], [], LIBRARY, None)

    def add(name, op, inputs, size):
        return graph.add(Node(name, op, [n.out() for n in inputs], outputs=[(tf.float64, (size,))]))

    source = graph.add(Node("source", "Const", outputs=[(tf.float64, (1,))]))
    gradient = add("gradient", "Roll", [source], 100)
    scaled = add("scaled", "Roll", [gradient], 100)
    wide = add("wide", "Roll", [gradient], 300)
    narrow = add("narrow", "Roll", [wide], 100)
    end = add("end", "Roll", [scaled, narrow], 100)
    graph.outputs = [end.out()]
    graph = run_pass(SerializeLargeOps(backward=(), fixed=(), min_bytes=800, batch=1), graph).graph
    order = [node.name for node in graph.execution_order()]
    assert order.index("narrow") < order.index("scaled")
    assert graph_peak(graph_schedule(graph, (), 1, []), {}, limit=0).peak_bytes < 8 * (100 + 300 + 100) + 8 * 50


def test_in_swap_order_ops_fused_by_onednn_stay_adjacent():
    """A padding and its convolution, a convolution and its bias: the fused op would wait for itself."""
    kernel, bias = tf.Variable(tf.ones((3, 3, 4, 4))), tf.Variable(tf.ones((4,)))

    def function(x):
        with tf.GradientTape() as tape:
            y = tf.nn.conv2d(tf.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))), kernel * 2.0, 1, "VALID")
            loss = tf.reduce_sum(tf.nn.relu(tf.nn.bias_add(y, bias * 2.0)))
        kernel.assign_sub(tape.gradient(loss, kernel))
        return loss

    concrete_fn = tf.function(function).get_concrete_function(tf.TensorSpec((2, 8, 8, 4)))
    graph = in_swap_order(without_copies(canonicalize.read_canonical(concrete_fn)), 1, 2).graph
    pairs = [(t.node, n) for n in graph.nodes.values() for t in n.inputs if (t.node.op, n.op) in PAIRS]
    assert len(pairs) == 2
    for node, reader in pairs:
        others = [before for before in predecessors(reader) if before is not node]
        assert node not in ancestors(others)


PAIRS = (("Pad", "Conv2D"), ("Conv2D", "BiasAdd"))


def two_devices_with_exchanges():
    """Two branches on each of two devices, each with an exchange in its middle, in opposite orders of creation."""
    nodes, exchanged = {}, []

    def add(name, op, *inputs, device=0):
        place = f"/job:localhost/replica:0/task:0/device:CPU:{device}"
        outputs = [(tf.float32, (64,))]
        nodes[name] = Node(name, op, [nodes[i].out() for i in inputs], attrs={}, device=place, outputs=outputs)
        return name

    for device, branches in ((0, "ab"), (1, "ba")):
        source = add(f"x{device}", "Placeholder", device=device)
        for branch in branches:
            before = add(f"{branch}{device}/before", "Exp", source, device=device)
            middle = add(f"{branch}{device}/sum", "CollectiveReduceV2", before, device=device)
            exchanged += [middle, add(f"{branch}{device}/after", "Exp", middle, device=device)]
    return Graph(nodes, [], [node.out() for node in nodes.values()], [], LIBRARY, None), exchanged


def waits_for_itself(graph):
    """Whether some op waits for itself if each exchange waits for what its twin on the other device waits for."""
    twins = {name: f"{name[0]}{1 - int(name[1])}/sum" for name, node in graph.nodes.items() if "Collective" in node.op}
    edges = {node.name: {p.name for p in predecessors(node)} for node in graph.nodes.values()}
    for name, twin in twins.items():
        edges[name] |= {p.name for p in predecessors(graph.nodes[twin])}
    try:
        tuple(graphlib.TopologicalSorter(edges).static_order())
    except graphlib.CycleError:
        return True
    return False


def test_serialize_large_ops_keeps_devices_and_exchanges_apart():
    graph, exchanged = two_devices_with_exchanges()
    assert not waits_for_itself(graph)

    def serialised(fixed):
        serialise = SerializeLargeOps(backward=(), fixed=fixed, min_bytes=1, batch=1)
        return run_pass(serialise, graph).graph

    after = serialised(set(exchanged))
    assert not waits_for_itself(after)
    edges = [(node, before) for node in after.nodes.values() for before in node.control_inputs]
    assert edges and all(graph.device_of(node) == graph.device_of(before) for node, before in edges)
    assert waits_for_itself(serialised(())), "with edges behind exchanges the devices would be in a deadlock"
