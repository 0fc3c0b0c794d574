"""A normalised step computes the same, with nothing left in it that would mislead the rules."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import Step, error, keras_step
from graph_rewrites import step as rewriting
from hypothesis import given, settings
from hypothesis import strategies as st

from rewriters.canonicalize import canonicalize
from rewriters.canonicalize.expand_grouped_conv import _replace_grouped
from rewriters.ir.graph_reader import is_call
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


def grouped(run):
    return rewriting(lambda graph: _replace_grouped(graph) == [], run)


def test_replace_grouped_two_groups_are_two_convolutions():
    grouped(run=True).check("""
        graph(x: float32[2,8,7,4], w: float32[3,3,2,6])
      + y/Split = (float32[2,8,7,2], float32[2,8,7,2]) Split(3, x) {num_split=2}
      + y/Split_1 = (float32[3,3,2,3], float32[3,3,2,3]) Split(3, w) {num_split=2}
      - y = float32[2,8,7,6] Conv2D(x, w) {padding="SAME", strides=[1, 1, 1, 1]}
      + y/Conv2D = float32[2,8,7,3] Conv2D(y/Split, y/Split_1) {padding="SAME", strides=[1, 1, 1, 1]}
      - return y
      + y/Conv2D_1 = float32[2,8,7,3] Conv2D(y/Split:1, y/Split_1:1) {padding="SAME", strides=[1, 1, 1, 1]}
      + y/ConcatV2 = float32[2,8,7,6] ConcatV2(y/Conv2D, y/Conv2D_1, 3) {N=2}
      + return y/ConcatV2
    """)


def test_replace_grouped_gradients_but_not_channels_first():
    grouped(run=False).check("""
        graph(x: float32[?,8,7,4], w: float32[3,3,2,6], dy: float32[?,8,7,6], first: float32[2,4,8,7])
        sizes = int32[4] Shape(x)
        y = float32[2,6,8,7] Conv2D(first, w) {data_format="NCHW", padding="SAME", strides=[1, 1, 1, 1]}
      - dx = float32[?,8,7,4] Conv2DBackpropInput(sizes, w, dy) {padding="SAME", strides=[1, 1, 1, 1]}
      + dx/Slice = int32[3] Slice(sizes, [0], [3])
      + dx/ConcatV2 = int32[4] ConcatV2(dx/Slice, [2], 0) {N=2}
      + dx/Split = (float32[3,3,2,3], float32[3,3,2,3]) Split(3, w) {num_split=2}
      + dx/Split_1 = (float32[?,8,7,3], float32[?,8,7,3]) Split(3, dy) {num_split=2}
      + dx/Conv2DBackpropInput = float32[?,8,7,2] Conv2DBackpropInput(dx/ConcatV2, dx/Split, dx/Split_1)
              {padding="SAME", strides=[1, 1, 1, 1]}
      + dx/Conv2DBackpropInput_1 = float32[?,8,7,2] Conv2DBackpropInput(dx/ConcatV2, dx/Split:1, dx/Split_1:1)
              {padding="SAME", strides=[1, 1, 1, 1]}
      + dx/ConcatV2_1 = float32[?,8,7,4] ConcatV2(dx/Conv2DBackpropInput, dx/Conv2DBackpropInput_1, 3) {N=2}
      + dw/Split = (float32[?,8,7,2], float32[?,8,7,2]) Split(3, x) {num_split=2}
      + dw/Split_1 = (float32[?,8,7,3], float32[?,8,7,3]) Split(3, dy) {num_split=2}
      - dw = float32[3,3,2,6] Conv2DBackpropFilter(x, [3, 3, 2, 6], dy) {padding="SAME", strides=[1, 1, 1, 1]}
      + dw/Conv2DBackpropFilter = float32[3,3,2,3] Conv2DBackpropFilter(dw/Split, [3, 3, 2, 3], dw/Split_1)
              {padding="SAME", strides=[1, 1, 1, 1]}
      - return y, dx, dw
      + dw/Conv2DBackpropFilter_1 = float32[3,3,2,3] Conv2DBackpropFilter(dw/Split:1, [3, 3, 2, 3], dw/Split_1:1)
              {padding="SAME", strides=[1, 1, 1, 1]}
      + dw/ConcatV2 = float32[3,3,2,6] ConcatV2(dw/Conv2DBackpropFilter, dw/Conv2DBackpropFilter_1, 3) {N=2}
      + return y, dx/ConcatV2_1, dw/ConcatV2
    """)


def test_replace_grouped_one_channel_per_group_is_depthwise():
    grouped(run=False).check("""
        graph(x: float32[2,8,7,4], w: float32[3,3,1,8], dy: float32[2,8,7,8])
      - y = float32[2,8,7,8] Conv2D(x, w) {padding="SAME", strides=[1, 1, 1, 1]}
      + y/Reshape = float32[3,3,4,2] Reshape(w, [3, 3, 4, 2])
      + y/DepthwiseConv2dNative = float32[2,8,7,8] DepthwiseConv2dNative(x, y/Reshape)
              {padding="SAME", strides=[1, 1, 1, 1]}
      - dw = float32[3,3,1,8] Conv2DBackpropFilter(x, [3, 3, 1, 8], dy) {padding="SAME", strides=[1, 1, 1, 1]}
      + dw/DepthwiseConv2dNativeBackpropFilter = float32[3,3,4,2] DepthwiseConv2dNativeBackpropFilter(x, [3, 3, 4, 2],
              dy) {padding="SAME", strides=[1, 1, 1, 1]}
      - return y, dw
      + dw/Reshape = float32[3,3,1,8] Reshape(dw/DepthwiseConv2dNativeBackpropFilter, [3, 3, 1, 8])
      + return y/DepthwiseConv2dNative, dw/Reshape
    """)


@pytest.mark.parametrize(
    ("shape", "dtype", "dilation"),
    [((1, 8, 7, None), "float32", 1), ((1, 8, 7, 4), "float32", 2), ((1, 8, 7, 4), "float16", 1)],
    ids=("unknown channels", "dilations", "half precision"),
)
def test_expand_grouped_conv_without_kernels_stays_compiled(shape, dtype, dilation):
    """Another call, of a function that does more, stays as well; one of a grouped convolution alone is expanded."""
    convolved = tf.function(lambda x, w: tf.nn.conv2d(x, w, 1, "SAME", dilations=dilation), jit_compile=True)
    others = tf.function(lambda x, w: tf.nn.conv2d(tf.tanh(x), w, 1, "SAME"), jit_compile=True)
    plain = tf.function(lambda x, w: tf.nn.conv2d(x, w, 1, "SAME"), jit_compile=True)

    def step(x, w, known, taps):
        return convolved(x, w), others(known, taps), plain(known, taps)

    images = tf.TensorSpec(shape, dtype), tf.TensorSpec((3, 3, 2, 6), dtype)
    known = tf.TensorSpec((1, 8, 7, 4)), tf.TensorSpec((3, 3, 2, 6))
    concrete_fn = tf.function(step, autograph=False).get_concrete_function(*images, *known)
    types = ops(canonicalize.read_canonical(concrete_fn))
    assert sum("Call" in op for op in types) == 2 and types.count("Conv2D") == 2
