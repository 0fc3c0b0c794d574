"""A normalised step computes the same, with nothing left in it that would mislead the rules."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import Step, error, keras_step
from hypothesis import given, settings
from hypothesis import strategies as st

from rewriters.canonicalize import canonicalize
from rewriters.ir.graph import Graph, Node, ancestors
from rewriters.ir.graph_reader import from_concrete_function, is_call
from rewriters.ir.static_values import StaticEvaluator
from rewriters.step_importer import StepImporter


def imported(concrete_fn, graph):
    importer = StepImporter(graph, concrete_fn)
    specs = [tf.TensorSpec(t.shape, t.dtype) for t in concrete_fn.inputs[: importer.num_arguments]]
    return tf.function(lambda *args: importer(args), input_signature=specs, autograph=False)


def ops(graph):
    return [node.op for node in graph.nodes.values()]


def net(x):
    x = keras.layers.Conv2D(4, 3, activation="silu")(x)
    y = keras.layers.Conv2DTranspose(4, 3, padding="same", activation="gelu")(x)
    x = keras.layers.PReLU(shared_axes=[1, 2])(keras.layers.Concatenate()([x, y]))
    return keras.layers.LayerNormalization()(x * 2.0 + y[:, :1, :1, :1])


@pytest.fixture(params=[True, False], ids=["known", "unknown"])
def step(request):
    return keras_step(net, (9, 10), 3, request.param, keras.optimizers.Adam(global_clipnorm=1.0))


def test_read_canonical_step_computes_same_values(step):
    want = step.run(step.concrete_fn)
    got = step.run(imported(step.concrete_fn, canonicalize.read_canonical(step.concrete_fn)))
    assert not {name: error(got[name], want[name]) for name in want if error(got[name], want[name]) > 1e-12}


def test_read_canonical_step_has_no_ops_without_effect(step):
    graph = canonicalize.read_canonical(step.concrete_fn)
    evaluate = StaticEvaluator(graph)
    before = from_concrete_function(step.concrete_fn)
    assert "Sum" in ops(before) and "IdentityN" in ops(before)
    assert not {"IdentityN", "ShapeN"} & set(ops(graph))
    for node in graph.nodes.values():
        if node.op == "Sum":
            assert evaluate(node.inputs[1]) != ()
        if node.op == "Reshape":
            assert node.inputs[0].shape is None or node.outputs[0][1] != node.inputs[0].shape
        if node.op in ("Shape", "BroadcastGradientArgs", "ConcatOffset"):
            readers = graph.consumers()
            outs = [node.out(i) for i in range(len(node.outputs))]
            assert all(evaluate.ints(out) is None or out not in readers for out in outs)


def test_canonicalize_graph_sum_over_no_axes_is_bypassed():
    step = keras_step(lambda x: keras.layers.Conv2D(2, 3)(x) * x[:, 2:, 2:, :2], (9, 9), 3, known_batch=False)
    graph = from_concrete_function(step.concrete_fn)
    evaluate = StaticEvaluator(graph)
    assert any(n.op == "Sum" and evaluate(n.inputs[1]) == () for n in graph.nodes.values())
    after = canonicalize.canonicalize_graph(graph)
    assert not any(n.op == "Sum" and evaluate(n.inputs[1]) == () for n in after.nodes.values())


def test_canonicalize_graph_given_graph_is_not_edited(step):
    graph = from_concrete_function(step.concrete_fn)
    before = graph.to_graph_def().SerializeToString(deterministic=True)
    canonicalize.canonicalize_graph(graph)
    assert graph.to_graph_def().SerializeToString(deterministic=True) == before


def test_read_canonical_dead_ops_are_dropped():
    v = tf.Variable(1.0)

    @tf.function(autograph=False)
    def body(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.sin(x) * v
        tape.gradient(y, [x, v])
        return y

    concrete_fn = body.get_concrete_function(tf.TensorSpec((3,), tf.float32))
    assert "Cos" in ops(Graph.copy(from_concrete_function(concrete_fn)))
    assert "Cos" not in ops(canonicalize.read_canonical(concrete_fn))


def test_canonicalize_graph_control_edges_of_bypassed_node_move_to_source():
    """The bypassed nodes form a chain."""
    spec = [(tf.float32, (2,))]
    source, other = (Node(name, "Placeholder", outputs=spec) for name in ("source", "other"))
    first = Node("first", "IdentityN", [source.out(), other.out()], outputs=spec * 2)
    second = Node("second", "IdentityN", [first.out(1)], outputs=spec)
    reader = Node("reader", "Neg", [second.out()], control_inputs=[second], outputs=spec)
    late = Node("late", "Neg", [source.out()], control_inputs=[first], outputs=spec)
    nodes = {n.name: n for n in (source, other, first, second, reader, late)}
    library = tf.compat.v1.GraphDef().library
    outputs = [reader.out(), late.out(), first.out(0)]
    graph = canonicalize.canonicalize_graph(Graph(nodes, [source.out(), other.out()], outputs, [], library, None))
    names = {node.name: {c.name for c in node.control_inputs} for node in graph.nodes.values()}
    assert set(names) == {"source", "other", "reader", "late"}
    assert [t.name for t in graph.nodes["reader"].inputs] == ["other:0"]
    assert names["reader"] >= {"other"} and names["late"] == {"source", "other"}
    assert graph.outputs[2].name == "source:0"


def test_read_canonical_assertion_stays_before_consumers():
    """Consumers wait for an assertion through an op that changes nothing."""
    variable = tf.Variable(tf.ones((2, 3)))

    @tf.function(autograph=False)
    def body(x):
        with tf.control_dependencies([tf.debugging.assert_positive(x)]):
            same = tf.reshape(x, (2, 3))
        variable.assign_sub(same)
        return same

    graph = canonicalize.read_canonical(body.get_concrete_function(tf.TensorSpec((2, 3))))
    update = next(node for node in graph.nodes.values() if node.op == "AssignSubVariableOp")
    assert "If" in {node.op for node in ancestors([update])}  # The guard around the assertion.


def test_read_canonical_assertion_stays_before_slice_that_waits_by_its_constants():
    """TensorFlow lets begin, end and strides wait, and not the slice, which reads them."""
    variable = tf.Variable(tf.ones((2, 2)))

    @tf.function(autograph=False)
    def body(x):
        with tf.control_dependencies([tf.debugging.assert_positive(x)]):
            part = x[:, 1:]
        variable.assign_sub(part)
        return part

    graph = canonicalize.read_canonical(body.get_concrete_function(tf.TensorSpec((2, 3))))
    update = next(node for node in graph.nodes.values() if node.op == "AssignSubVariableOp")
    update.control_inputs = []
    assert "If" in {node.op for node in ancestors([update])}


def test_read_canonical_padding_of_unknown_rank_keeps_its_shape():
    @tf.function(autograph=False)
    def body(x):
        unknown = tf.numpy_function(lambda x: x, [x], tf.float32)
        return tf.shape(tf.pad(unknown, [[1, 1], [0, 2]]))[0]

    concrete_fn = body.get_concrete_function(tf.TensorSpec((2, 3)))
    graph = canonicalize.read_canonical(concrete_fn)
    assert int(imported(concrete_fn, graph)(tf.zeros((2, 3)))) == 4


def test_read_canonical_shape_n_becomes_one_shape_per_operand():
    @tf.function(autograph=False)
    def body(x, y):
        return tf.raw_ops.ShapeN(input=[x, tf.exp(y)])[0]

    spec = tf.TensorSpec((None, 3), tf.float32)
    graph = canonicalize.read_canonical(body.get_concrete_function(spec, spec))
    assert "Exp" not in ops(graph) and "Shape" in ops(graph)


def test_read_canonical_rank_becomes_constant_with_control_edges():
    @tf.function(autograph=False)
    def body(x):
        hidden = tf.exp(x)
        with tf.control_dependencies([tf.debugging.assert_positive(x)]):
            return tf.raw_ops.Rank(input=hidden)

    concrete_fn = body.get_concrete_function(tf.TensorSpec((None, 3), tf.float32))
    graph = canonicalize.read_canonical(concrete_fn)
    assert not {"Rank", "Exp"} & set(ops(graph))
    assert "If" in {node.op for node in ancestors([graph.outputs[0].node])}  # The guard around the assertion.
    assert imported(concrete_fn, graph)(tf.ones((1, 3))).numpy() == 2


# Inlining --------------------------------------------------------------------------------------------------


def checked(body, variables, *specs):
    """Compare the inlined step with the original one, over two steps."""
    concrete_fn = tf.function(body, autograph=False).get_concrete_function(*specs)
    graph = canonicalize.read_canonical(concrete_fn)
    assert not any(is_call(node) for node in graph.nodes.values())
    random = np.random.default_rng(0)
    batches = [[random.normal(size=spec.shape) for spec in specs] for _ in range(2)]
    step = Step(concrete_fn, variables, batches)
    want, got = step.run(concrete_fn), step.run(imported(concrete_fn, graph))
    assert list(want) == list(got)
    assert not {name for name in want if error(got[name], want[name]) > 1e-12}
    return graph


VECTOR = tf.TensorSpec((4,), tf.float64)


def test_read_canonical_nested_calls_are_inlined():
    @tf.function
    def inner(x):
        return tf.sin(x), x

    @tf.function
    def outer(x, y):
        a, b = inner(x)
        c, d = inner(b + y)
        return d, a * c, y  # An argument as it came.

    def body(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            a, b, c = outer(x, x**2)
            d, *_ = outer(c, b)
            loss = tf.reduce_sum(a * b + c * d)
        return loss, tape.gradient(loss, x), outer(x, x)

    graph = checked(body, [], VECTOR)
    assert ops(graph).count("Sin") > 2


def test_read_canonical_function_without_results_keeps_effects():
    v = tf.Variable([1.0] * 4, dtype="float64")

    @tf.function
    def bump():
        v.assign_add(v)

    def body(x):
        before = v.read_value()
        bump()
        between = v * x
        bump()
        bump()
        return before, between, v.read_value()

    checked(body, [v], VECTOR)


class Machine:
    """Draw effects on two variables, each directly or in a call, which may be nested."""

    def __init__(self):
        self.v = [tf.Variable(1.0, dtype="float64"), tf.Variable(2.0, dtype="float64")]

    def do(self, what, which):
        variable, other = self.v[which], self.v[1 - which]
        match what:
            case "add":
                variable.assign_add(1.0)
            case "double":
                variable.assign(variable * 2.0)
            case "copy":
                variable.assign(other)
        return variable + 0.0 if what == "read" else tf.constant(0.0, tf.float64)

    def run(self, what, which, depth):
        if depth == 0:
            return self.do(what, which)
        return tf.function(lambda: self.run(what, which, depth - 1), autograph=False)()


programs = st.lists(
    st.tuples(st.sampled_from(["add", "double", "copy", "read"]), st.integers(0, 1), st.integers(0, 2)),
    min_size=1,
    max_size=7,
)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(programs)
def test_read_canonical_inlined_effects_keep_order(program):
    machine = Machine()
    checked(lambda: [machine.run(*line) for line in program], machine.v)


def test_read_canonical_prints_and_assertions_in_calls_stay(capfd):
    @tf.function
    def speak(x):
        tf.print("sum is", tf.reduce_sum(x))
        tf.debugging.assert_less(x, tf.constant(1e3, x.dtype), "too large")
        return x + 1.0

    concrete_fn = tf.function(lambda x: speak(speak(x))).get_concrete_function(VECTOR)
    function = imported(concrete_fn, canonicalize.read_canonical(concrete_fn))
    function(tf.zeros(4, tf.float64))
    assert capfd.readouterr().err.split("\n")[:2] == ["sum is 0", "sum is 4"]
    with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
        function(tf.fill([4], tf.constant(1e4, tf.float64)))


def test_read_canonical_xla_call_is_not_inlined():
    @tf.function(jit_compile=True)
    def compiled(x):
        return x * 2.0

    concrete_fn = tf.function(lambda x: compiled(x)).get_concrete_function(VECTOR)
    assert any("PartitionedCall" in op for op in ops(canonicalize.read_canonical(concrete_fn)))


# Convolutions in groups ---------------------------------------------------------------------------------


def compiled_groups(image_shape, strides=1, dilations=1):
    @tf.function(jit_compile=True)
    def convolved(image, taps):
        return tf.raw_ops.Conv2D(
            input=image,
            filter=taps,
            strides=[1, strides, strides, 1],
            padding="SAME",
            dilations=[1, dilations, dilations, 1],
        )

    @tf.function(autograph=False)
    def step(image, taps):
        with tf.GradientTape() as tape:
            tape.watch([image, taps])
            value = tf.reduce_sum(tf.sin(convolved(image, taps)))
        return value, *tape.gradient(value, [image, taps])

    return step.get_concrete_function(tf.TensorSpec(image_shape), tf.TensorSpec((3, 3, 2, 6)))


def test_expand_grouped_conv_compiled_becomes_one_conv_per_group():
    graph = canonicalize.read_canonical(compiled_groups((None, 8, 7, 4)))
    ops = [node.op for node in graph.nodes.values()]
    assert not any("Call" in op for op in ops)
    assert [ops.count(op) for op in ("Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter")] == [2, 2, 2]


@pytest.mark.parametrize(("shape", "dilations"), [((None, 8, 7, None), 1), ((1, 8, 7, 4), 2)])
def test_expand_grouped_conv_unknown_channels_or_no_kernel_stays_compiled(shape, dilations):
    graph = canonicalize.read_canonical(compiled_groups(shape, dilations=dilations))
    calls = [node for node in graph.nodes.values() if "Call" in node.op]
    assert len(calls) == 2 and all(node.attrs["_XlaMustCompile"].b for node in calls)
    assert not any(node.op.startswith("Conv") for node in graph.nodes.values())


def test_expand_grouped_conv_call_of_unknown_channels_does_not_affect_others():
    @tf.function(jit_compile=True)
    def convolved(image, taps):
        return tf.nn.conv2d(image, taps, 1, "SAME")

    step = tf.function(lambda a, b, taps: (convolved(a, taps), convolved(b, taps)), autograph=False)
    specs = [tf.TensorSpec(shape) for shape in ((1, 8, 7, 4), (1, 8, 7, None), (3, 3, 2, 6))]
    graph = canonicalize.read_canonical(step.get_concrete_function(*specs))
    ops = [node.op for node in graph.nodes.values()]
    assert ops.count("Conv2D") == 2 and sum("Call" in op for op in ops) == 1


def test_expand_grouped_conv_channels_first_is_not_grouped():
    """Another call causes the calls of the step to be inlined."""

    @tf.function(jit_compile=True)
    def convolved(image, taps):
        return tf.nn.conv2d(image, taps, 1, "SAME")

    def step(first, last, taps, grouped_taps):
        return tf.nn.conv2d(first, taps, 1, "SAME", data_format="NCHW"), convolved(last, grouped_taps)

    specs = [tf.TensorSpec(shape) for shape in ((1, 4, 8, 12), (1, 8, 7, 4), (3, 3, 4, 6), (3, 3, 2, 6))]
    graph = canonicalize.read_canonical(tf.function(step, autograph=False).get_concrete_function(*specs))
    formats = [node.attrs["data_format"].s for node in graph.nodes.values() if node.op == "Conv2D"]
    assert sorted(formats) == [b"NCHW", b"NHWC", b"NHWC"]


def test_read_canonical_inlined_call_keeps_control_edges():
    @tf.function
    def check(x):
        tf.debugging.assert_greater(tf.reduce_sum(tf.abs(x)), 0.0, "only zeros")

    @tf.function
    def noise():
        return tf.random.uniform((2, 8)) * 0.0

    @tf.function(autograph=False)
    def step(x):
        check(x)
        x = x + noise()
        tf.debugging.assert_less(tf.reduce_sum(x), 100.0, "too much")
        return x * 2.0

    concrete_fn = step.get_concrete_function(tf.TensorSpec((2, 8)))
    rewritten = imported(concrete_fn, canonicalize.read_canonical(concrete_fn))
    assert np.all(np.array(rewritten(tf.ones((2, 8)))) == 2.0)
    for number, words in ((0.0, "only zeros"), (50.0, "too much")):
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            rewritten(tf.fill((2, 8), number))


def test_expand_grouped_conv_other_compiled_functions_stay_compiled():
    compiled = tf.function(lambda x, y: tf.nn.conv2d(tf.tanh(x), y, 1, "SAME"), jit_compile=True)
    step = tf.function(lambda x, y: compiled(x, y) + 1.0, autograph=False)
    specs = tf.TensorSpec((1, 8, 7, 4)), tf.TensorSpec((3, 3, 2, 6))
    graph = canonicalize.read_canonical(step.get_concrete_function(*specs))
    assert any("Call" in node.op for node in graph.nodes.values())


def test_expand_grouped_conv_half_precision_stays_compiled():
    """TensorFlow's own kernels add up a filter's gradient in half precision."""
    step = tf.function(
        lambda x, w: tf.function(lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"), jit_compile=True)(x, w), autograph=False
    )
    specs = tf.TensorSpec((1, 8, 7, 4), tf.float16), tf.TensorSpec((3, 3, 2, 6), tf.float16)
    assert any("Call" in op for op in ops(canonicalize.read_canonical(step.get_concrete_function(*specs))))


# Coming to rest ------------------------------------------------------------------------------------------


def test_read_canonical_pairs_of_unknown_batch_is_stable():
    step = tf.function(lambda y: tf.expand_dims(y, 1) * y, autograph=False)
    graph = canonicalize.read_canonical(step.get_concrete_function(tf.TensorSpec((None,))))
    assert graph.outputs[0].shape == (None, None)


def test_read_canonical_sum_with_control_consumer_is_stable():
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.sin(tf.tile(x, [1, 3, 1, 1])))
        gradient = tape.gradient(loss, x)
        with tf.control_dependencies([gradient]):
            return gradient, tf.identity(loss)

    concrete_fn = tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec((2, 1, 5, 3)))
    assert "Sum" in ops(canonicalize.read_canonical(concrete_fn))
