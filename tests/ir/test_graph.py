"""Graphs as plain objects: order, copies, convexity, pruning."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import toposort
from equivalence import keras_step
from hypothesis import given, settings
from hypothesis import strategies as st

from rewriters.analysis.convex_sets import nodes_between
from rewriters.errors import RewriteError
from rewriters.ir import tf_internals
from rewriters.ir.graph import Graph, Node, Tensor, ancestors, predecessors
from rewriters.ir.graph_reader import from_concrete_function
from rewriters.step_importer import StepImporter

FLOAT = [(tf.float32, (None, 3))]


def graph_of(nodes, outputs=(), keep=(), inputs=()):
    library = tf.compat.v1.GraphDef().library
    return Graph({n.name: n for n in nodes}, list(inputs), list(outputs), list(keep), library, None)


def chain(*names):
    """Return nodes that read each other in order."""
    nodes = []
    for name in names:
        nodes.append(Node(name, "Identity", [nodes[-1].out()] if nodes else [], outputs=FLOAT))
    return nodes


@st.composite
def dags(draw):
    """Return a few nodes with random data and control edges to earlier ones."""
    nodes = []
    for number in range(draw(st.integers(1, 8))):
        before = draw(st.sets(st.sampled_from(range(number)))) if number else set()
        control = draw(st.sets(st.sampled_from(range(number)), max_size=2)) if number else set()
        inputs = [nodes[n].out() for n in sorted(before)]
        nodes.append(
            Node(f"n{number}", "AddN", inputs, control_inputs=[nodes[n] for n in sorted(control)], outputs=FLOAT)
        )
    return nodes


def small_net(x):
    return keras.layers.Conv2D(2, 3, activation="silu")(keras.layers.MaxPool2D(2)(x))


def test_levels_of_training_step_equal_toposort():
    step = keras_step(small_net, (9, 9), optimizer=keras.optimizers.Adam())
    graph = from_concrete_function(step.concrete_fn)
    levels = graph.levels()
    assert len(levels) == len(graph.nodes) > 100
    expected = toposort.toposort({node: set(predecessors(node)) for node in graph.nodes.values()})
    for number, level in enumerate(expected):
        assert level == {node for node, found in levels.items() if found == number}


@settings(deadline=None)
@given(dags())
def test_execution_order_respects_edges_and_is_by_level(nodes):
    graph = graph_of(reversed(nodes))
    order = graph.execution_order()
    position = {node: index for index, node in enumerate(order)}
    assert len(position) == len(nodes)
    assert all(position[p] < position[n] for n in nodes for p in predecessors(n))
    assert list(graph.levels()) == order
    assert list(graph.levels().values()) == sorted(graph.levels().values())


def test_execution_order_slow_nodes_end_in_sequence():
    a, b, c, d = nodes = chain("a", "b", "c", "d")
    first, second = (Node(name, "NoOp", control_inputs=[a]) for name in ("first", "second"))
    graph = graph_of([*nodes, first, second])

    def order(slow, seconds=None):
        return "".join(node.name[0] for node in graph.execution_order(slow, seconds))

    assert order({}) == "abfscd" and order({first: 0.5, second: 0.5}) == "abcdfs"
    assert order({first: 1.5, second: 1.0}, lambda node: 1.0) == "abcfds"
    assert order({first: 0.0, second: 5.0}, lambda node: 1.0) == "afbcds"


def test_execution_order_with_cycle_raises_with_its_names():
    first, _, last = nodes = chain("first", "middle", "last")
    first.control_inputs = [last]
    with pytest.raises(RewriteError, match="cycle through .*middle"):
        graph_of(nodes).levels()


def test_copy_is_independent_of_original():
    step = keras_step(small_net, (9, 9))
    graph = from_concrete_function(step.concrete_fn)
    before = graph.to_graph_def().SerializeToString(deterministic=True)
    interface = list(graph.inputs), list(graph.outputs), list(graph.keep)
    copy = graph.copy()
    assert copy.to_graph_def().SerializeToString(deterministic=True) == before
    assert not {id(n) for n in copy.nodes.values()} & {id(n) for n in graph.nodes.values()}
    for node in copy.nodes.values():
        node.inputs, node.control_inputs, node.op = [], [], "NoOp"
        node.attrs = {}
        node.outputs.clear()
    copy.inputs.clear()
    copy.outputs.clear()
    copy.keep.clear()
    copy.library.function.add().signature.name = "new"
    assert graph.to_graph_def().SerializeToString(deterministic=True) == before
    assert (graph.inputs, graph.outputs, graph.keep) == interface


def reachable(nodes, start):
    """Return the nodes on a path from `start`, without it, by following every edge."""
    found, grown = set(), {start}
    while grown:
        grown = {n for n in nodes for p in predecessors(n) if p in grown} - found
        found |= grown
    return found


@settings(deadline=None)
@given(dags(), st.data())
def test_nodes_between_equals_all_paths_out_and_back(nodes, data):
    inside = data.draw(st.sets(st.sampled_from(nodes)))
    graph = graph_of(nodes)
    successors = {n: [m for m in nodes for p in predecessors(m) if p is n] for n in nodes}
    order = {node: index for index, node in enumerate(graph.execution_order())}
    after = set().union(*(reachable(nodes, node) for node in inside))
    expected = {n for n in after - inside if reachable(nodes, n) & inside}
    found = nodes_between(inside, successors, order)
    assert found == expected
    assert not nodes_between(inside | found, successors, order)


@settings(deadline=None)
@given(dags(), st.data())
def test_prune_keeps_ancestors_of_outputs_effects_and_inputs(nodes, data):
    outputs = [node.out() for node in data.draw(st.sets(st.sampled_from(nodes), max_size=2))]
    keep = list(data.draw(st.sets(st.sampled_from(nodes), max_size=2)))
    inputs = [nodes[0].out()]
    graph = graph_of(nodes, outputs, keep, inputs)
    roots = {t.node for t in outputs} | set(keep)
    needed = {n for n in nodes if n in roots or reachable(nodes, n) & roots} | {nodes[0]}
    dropped = graph.prune()
    assert set(graph.nodes.values()) == needed and dropped == len(nodes) - len(needed)
    assert ancestors(roots) <= needed


def test_replace_tensors_updates_consumers_outputs_and_aliases():
    a, b, c = nodes = chain("a", "b", "c")
    graph = graph_of(nodes, [b.out(), c.out()])
    graph.replace_tensors({b.out(): a.out()})
    assert c.inputs == [a.out()] and graph.outputs == [a.out(), c.out()]
    assert graph.aliases == {"b:0": a.out()}
    assert graph.consumers() == {a.out(): [(b, 0), (c, 0)]}


def test_unique_name_appends_number():
    graph = graph_of(chain("a", "b"))
    graph.add(Node(graph.unique_name("a"), "NoOp"))
    assert graph.unique_name("a") == "a_2" and graph.unique_name("new") == "new"
    with pytest.raises(AssertionError, match="two nodes named 'b'"):
        graph.add(Node("b", "NoOp"))


def test_num_bytes_counts_unknown_size_as_batch():
    node = Node("n", "Any", outputs=[(tf.float32, (None, 5)), (tf.float16, (2, 3)), (tf.resource, ()), (tf.int8, None)])
    assert [Tensor(node, index).num_bytes(batch=7) for index in range(4)] == [140, 12, 0, 0]


def test_graph_def_round_trip_computes_same_values():
    step = keras_step(small_net, (9, 9), optimizer=keras.optimizers.Adam())
    importer = StepImporter(from_concrete_function(step.concrete_fn), step.concrete_fn)
    specs = [tf.TensorSpec(t.shape, t.dtype) for t in step.concrete_fn.inputs[: importer.num_arguments]]
    again = tf.function(lambda *args: importer(args), input_signature=specs)
    want, got = step.run(step.concrete_fn), step.run(again)
    assert all(np.array_equal(want[name], got[name]) for name in want)


def test_from_concrete_function_keeps_effects_without_reads():
    v = tf.Variable(1.0)

    @tf.function
    def body(x):
        v.read_value()
        v.assign_add(x)
        tf.print("x")

    kept = [node.op for node in from_concrete_function(body.get_concrete_function(tf.constant(1.0))).keep]
    assert sorted(kept) == ["AssignAddVariableOp", "PrintV2"]


def test_from_concrete_function_drops_colocation():
    @tf.function
    def body(x):
        with tf.compat.v1.colocate_with(x.op):
            return tf.add(x, 1.0, name="beside")

    concrete_fn = body.get_concrete_function(tf.constant(1.0))
    written = concrete_fn.graph.as_graph_def()
    assert "_class" in next(n for n in written.node if n.name == "beside").attr
    assert "_class" not in from_concrete_function(concrete_fn).nodes["beside"].attrs


def test_bytes_where_transpositions_of_open_batch_have_several_unknown_sizes():
    """The gradient of patches moves the batch axis, and TensorFlow infers no other size of its transpositions."""

    @tf.function(input_signature=[tf.TensorSpec((None, 12, 12, 3)), tf.TensorSpec((None, 4, 108))])
    def step(images, weights):
        with tf.GradientTape() as tape:
            tape.watch(images)
            patches = tf.image.extract_patches(images, [1, 6, 6, 1], [1, 6, 6, 1], [1, 1, 1, 1], "VALID")
            loss = tf.reduce_sum(tf.reshape(patches, (-1, 4, 108)) * weights)
        return tape.gradient(loss, images)

    graph = from_concrete_function(step.get_concrete_function())
    moved = [node.out() for node in graph.nodes.values() if node.op == "Transpose"]
    assert any(tensor.shape.count(None) > 1 for tensor in moved)
    assert [tensor.num_bytes(16) for tensor in moved] == [16 * 12 * 12 * 3 * 4] * 2


def test_bytes_where_the_operand_of_a_reshape_is_less_known():
    @tf.function(input_signature=[tf.TensorSpec((None,))])
    def step(x):
        (array,) = tf.numpy_function(lambda x: x, [x], [tf.float32])
        return tf.ensure_shape(array, (None, None, 8))

    graph = from_concrete_function(step.get_concrete_function())
    assert graph.outputs[0].num_bytes(4) == 4 * 4 * 8 * 4


def test_pack_outputs_more_results_than_structure_are_refused():
    traced = tf.function(lambda x: {"loss": x, "none": None}).get_concrete_function(tf.constant(1.0))
    assert tf_internals.pack_outputs(traced, [2.0]) == {"loss": 2.0, "none": None}
    with pytest.raises(RewriteError, match="The step has 2 results, but its structure .*'loss'.* has fewer"):
        tf_internals.pack_outputs(traced, [2.0, 3.0])
