"""Large ops run one after another: the step computes the same bits with a lower peak."""

import keras
import pytest
from equivalence import keras_step
from graph_rewrites import Rewriting, passes
from keras import layers

from rewriters.analysis import summation_order
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize import canonicalize
from rewriters.device.peak_memory import graph_peak, graph_schedule
from rewriters.ir.graph_pass import run_pass
from rewriters.scheduling.memory_order import in_memory_order
from rewriters.scheduling.serialize_ops import SerializeLargeOps, SerializeScratchGroups
from rewriters.swapping.swap_pass import without_copies


def forked(x):
    """Two branches, each with large temporary tensors."""
    x = layers.Conv2D(8, 3, padding="same")(x)
    a, b = (layers.BatchNormalization()(layers.Conv2D(8, 1)(x)) for _ in range(2))
    return layers.ReLU()(a * b)


@pytest.mark.parametrize("known", (True, False), ids=("known", "unknown"))
def test_serialize_large_ops_peak_of_a_network_is_no_higher(known):
    step = keras_step(forked, (16, 16), 2, known, keras.optimizers.Adam())
    before = GraphAnalysis(canonicalize.read_canonical(step.concrete_fn))
    names = [{n.name for n in nodes} for nodes in (before.backward, summation_order.flattenable_sums(before))]
    serialize = SerializeLargeOps(backward=names[0], fixed=names[1], min_bytes=1, batch=2)
    graphs = before.graph, run_pass(serialize, before.graph).graph
    peaks = [graph_peak(graph_schedule(graph, (), 2, []), {}, limit=0).peak_bytes for graph in graphs]
    assert peaks[1] <= peaks[0]


def test_serialize_scratch_groups_gradients_of_one_convolution_run_together():
    passes(lambda graph: SerializeScratchGroups(), run=False).check("""
        graph(x: float64[2,8,8,3], dy: float64[2,8,8,3], w: float64[3,3,3,3])
        dw = float64[3,3,3,3] Conv2DBackpropFilter(x, [3, 3, 3, 3], dy) {padding="SAME", strides=[1, 1, 1, 1]}
        dx = float64[2,8,8,3] Conv2DBackpropInput([2, 8, 8, 3], w, dy) {padding="SAME", strides=[1, 1, 1, 1]}
      - other = float64[3,3,3,3] Conv2DBackpropFilter(dy, [3, 3, 3, 3], x) {padding="SAME", strides=[1, 1, 1, 1]}
      + other = float64[3,3,3,3] Conv2DBackpropFilter(dy, [3, 3, 3, 3], x) {padding="SAME", strides=[1, 1, 1, 1]} after
              [dw, dx]
        return dw, dx, other
    """)


def in_order(min_bytes=400, backward=(), fixed=(), run=True):
    return passes(lambda graph: SerializeLargeOps(backward=backward, fixed=fixed, min_bytes=min_bytes, batch=1), run)


def test_serialize_large_ops_branch_ends_before_the_next():
    in_order().check("""
        graph(x: float32[100])
        zero = int32[] Const() {value=0} on CPU:0
      - a1 = float32[100] Roll(x, zero, zero)
      + a1 = float32[100] Roll(x, zero, zero) after [b3]
        a2 = float32[100] Roll(a1, zero, zero)
      - a3 = float32[100] Roll(a1, zero, zero)
      + a3 = float32[100] Roll(a1, zero, zero) after [a4]
        a4 = float32[] Max(a2, zero)
        a5 = float32[] Max(a3, zero)
        b1 = float32[100] Roll(x, zero, zero)
        b2 = float32[100] Roll(b1, zero, zero)
        b3 = float32[] Max(b2, zero)
        end = float32[3] Pack(a4, a5, b3) {N=3}
        return end
    """)


def test_serialize_large_ops_small_consumer_of_a_large_tensor_ends_before_the_next():
    in_order().check("""
        graph(x: float32[100])
        zero = int32[] Const() {value=0} on CPU:0
        gradient = float32[100] Roll(x, zero, zero)
        small = float32[10] Slice(gradient, [0], [10])
      - first = float32[100] Roll(gradient, zero, zero)
      + first = float32[100] Roll(gradient, zero, zero) after [small]
        second = float32[100] Roll(first, zero, zero)
        return small, second
    """)


def test_serialize_large_ops_operand_with_the_largest_peak_runs_first():
    in_order().check("""
        graph(x: float32[100])
        zero = int32[] Const() {value=0} on CPU:0
        gradient = float32[100] Roll(x, zero, zero)
      - scaled = float32[100] Roll(gradient, zero, zero)
      + scaled = float32[100] Roll(gradient, zero, zero) after [narrow]
        wide = float32[300] ConcatV2(gradient, x, x, zero) {N=3}
        narrow = float32[100] Slice(wide, [50], [100])
        end = float32[200] ConcatV2(scaled, narrow, zero) {N=2}
        return end
    """)


def test_serialize_large_ops_updates_of_one_variable_end_before_the_next_gradient():
    in_order().check("""
        graph(x: float32[100])
        zero = int32[] Const() {value=0} on CPU:0
        a = float32[100] Roll(x, zero, zero)
        a/mean = float32[] Max(a, zero)
      - b = float32[100] Roll(x, zero, zero)
      + b = float32[100] Roll(x, zero, zero) after [a/variance]
        b/mean = float32[] Max(b, zero)
      - a/square = float32[100] Square(a)
      + a/square = float32[100] Square(a) after [a/mean]
        a/variance = float32[] Max(a/square, zero)
      - b/square = float32[100] Square(b)
      + b/square = float32[100] Square(b) after [b/mean]
        b/variance = float32[] Max(b/square, zero)
        return a/mean, b/mean, a/variance, b/variance
    """)


def test_serialize_large_ops_copy_of_a_variable_is_computed_when_it_is_needed():
    in_order().check("""
        graph(x: float32[100], v: resource of float32[100])
        zero = int32[] Const() {value=0} on CPU:0
        read = float32[100] ReadVariableOp(v)
        early = float32[] Max(read, zero)
      - root = float32[100] Exp(read)
      - gradient = float32[100] Roll(x, zero, zero)
      + root = float32[100] Exp(read) after [small]
      + gradient = float32[100] Roll(x, zero, zero) after [early]
        small = float32[] Max(gradient, zero)
        end = float32[100] Mul(root, small)
        return early, end
    """)


def test_serialize_large_ops_small_and_fixed_and_forward_ops_do_not_wait_for_backward_ones():
    in_order(backward={"back", "gradient"}, fixed={"sum"}).check("""
        graph(x: float32[100])
        zero = int32[] Const() {value=0} on CPU:0
        back = float32[100] Roll(x, zero, zero)
        a = float32[100] Roll(x, zero, zero)
        b = float32[100] Roll(a, zero, zero)
      - c = float32[100] Roll(a, zero, zero)
      + c = float32[100] Roll(a, zero, zero) after [b]
        sum = float32[100] AddV2(b, c)
      - gradient = float32[100] Roll(sum, zero, zero)
      + gradient = float32[100] Roll(sum, zero, zero) after [c]
        small = float32[10] Slice(x, [0], [10])
        return back, gradient, small
    """)


def test_serialize_large_ops_fused_ops_stay_adjacent():
    in_order().check("""
        graph(x: float32[2,4,4,3], w: float32[3,3,3,4], b: float32[64])
      - pad = float32[2,6,6,3] Pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]])
      - taps = float32[3,3,3,4] Exp(w)
      + pad = float32[2,6,6,3] Pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]]) after [taps]
      + taps = float32[3,3,3,4] Exp(w) after [bias]
        conv = float32[2,4,4,4] Conv2D(pad, taps) {padding="VALID", strides=[1, 1, 1, 1]}
        wide = float32[640] Tile(b, [10])
        bias = float32[4] Slice(wide, [0], [4])
        biased = float32[2,4,4,4] BiasAdd(conv, bias)
        return biased
    """)


def test_in_memory_order_devices_and_ops_behind_exchanges_do_not_wait():
    Rewriting(lambda graph: in_memory_order(without_copies(graph), 1, 2).graph, run=False).check("""
        graph(x: float32[100])
        zero = int32[] Const() {value=0} on CPU:0
        a = float32[100] Exp(x) on GPU:0
        a/sum = float32[100] CollectiveReduceV2(a, zero, zero, zero) on GPU:0
        a/after = float32[100] Exp(a/sum) on GPU:0
      - b = float32[100] Sin(x) on GPU:0
      + b = float32[100] Sin(x) after [a] on GPU:0
        b/sum = float32[100] CollectiveReduceV2(b, zero, zero, zero) on GPU:0
        b/after = float32[100] Exp(b/sum) on GPU:0
        c = float32[100] Cos(x) on GPU:1
      - d = float32[100] Tan(x) on GPU:1
      + d = float32[100] Tan(x) after [c] on GPU:1
        return a/after, b/after, c, d
    """)


def test_in_memory_order_additions_that_may_be_flattened_get_no_edges():
    Rewriting(lambda graph: in_memory_order(without_copies(graph), 1, 2).graph, True).check("""
        graph(x: float32[2,4])
        a = float32[2,4] Exp(x)
      - b = float32[2,4] Sin(x)
      + b = float32[2,4] Sin(x) after [a]
        c = float32[2,4] Cos(x)
        first = float32[2,4] AddV2(a, b)
        second = float32[2,4] AddV2(first, c)
      - product = float32[2,4] Mul(second, c)
      + product = float32[2,4] Mul(second, c) after [b]
        return product
    """)
