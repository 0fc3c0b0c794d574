"""Ops that could run long before their consumers are delayed, and the step computes the same bits."""

import keras
import pytest
from devices import ONEDNN
from equivalence import Cut, differing, keras_step
from graph_rewrites import passes
from keras import layers

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.scheduling.delay_early_ops import DelayEarlyOps, DelayOptimizerOps, EmittedLoop, RunUpdatesBeforeLoops
from rewriters.scheduling.separate_gradients import SeparateGradients
from rewriters.scheduling.updates_after_reads import RunUpdatesAfterReads


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1, clipnorm=0.1),
        lambda: keras.optimizers.Adam(1e-2, amsgrad=True),
        lambda: keras.optimizers.Ftrl(1e-2),
    ],
    ids=("nesterov", "clipped", "adam", "ftrl"),
)
def test_delay_optimizer_ops_any_optimizer_computes_same_results(make):
    def net(x):
        for name in ("first", "second", "third"):
            x = layers.Conv2D(16, 3, padding="same", kernel_regularizer="l2", activation="silu", name=name)(x)
        return x

    step = keras_step(net, (12, 16), 2, optimizer=make(), steps=3)
    assert not differing(step, Cut("input", "second", (3, 2)), Cut("second", "third", (2, 2)))


def delaying(min_bytes=1, run=True):
    return passes(lambda graph: DelayEarlyOps(GraphAnalysis(graph), min_bytes, 2), run)


def test_delay_early_ops_momentum_waits_for_gradient():
    delaying(2**20).check("""
        graph(x: float32[2,40], w: resource of float32[40,40], v: resource of float32[40,40])
        weight = float32[40,40] ReadVariableOp(w)
        y = float32[2,40] MatMul(x, weight)
        gradient_tape/dy = float32[2,40] Cos(y)
        gradient_tape/dw = float32[40,40] MatMul(x, gradient_tape/dy) {transpose_a=True}
        gradient = float32[40,40] Sign(gradient_tape/dw)
        old = float32[40,40] ReadVariableOp(v)
      - root = float32[40,40] Sqrt(old)
      + root = float32[40,40] Sqrt(old) after [gradient]
      - momentum = float32[40,40] Mul(root, 0.9)
      + momentum = float32[40,40] Mul(root, 0.9) after [gradient]
        new = float32[40,40] AddV2(momentum, gradient)
        update = AssignVariableOp(v, new) after [old]
        effects update
        return y
    """)


def test_delay_early_ops_factor_of_a_gradient_waits_for_the_gradient():
    delaying().check("""
        graph(x: float32[2,8], w: float32[8,8])
        hidden = float32[2,8] MatMul(x, w)
        sigmoid = float32[2,8] Sigmoid(hidden)
        silu = float32[2,8] Mul(hidden, sigmoid)
        y = float32[2,8] MatMul(silu, w)
        gradient_tape/dy = float32[2,8] Cos(y)
        gradient_tape/dsilu = float32[2,8] MatMul(gradient_tape/dy, w) {transpose_b=True}
      - rest = float32[2,8] Sub(1.0, sigmoid)
      + rest = float32[2,8] Sub(1.0, sigmoid) after [gradient_tape/dy]
      - factor = float32[2,8] Mul(rest, hidden)
      + factor = float32[2,8] Mul(rest, hidden) after [gradient_tape/dy]
        gradient_tape/dhidden = float32[2,8] Mul(gradient_tape/dsilu, factor)
        return y, gradient_tape/dhidden
    """)


def test_delay_early_ops_small_or_awaited_or_returned_are_not_delayed():
    delaying(2**20).check("""
        graph(x: float32[2,40], w: resource of float32[40,40])
        weight = float32[40,40] ReadVariableOp(w)
        y = float32[2,40] Cos(x)
        small = float32[2,40] Slice(weight, [0, 0], [2, 40])
        sum = float32[2,40] Sub(y, small)
        awaited = float32[40,40] Exp(weight)
        late = float32[2,40] Sin(x) after [awaited]
        product = float32[2,40] MatMul(sum, awaited)
        returned = float32[40,40] Sin(weight)
        return product, late, returned
    """)


def test_delay_early_ops_zeros_are_filled_by_a_stateful_op():
    delaying().check("""
        graph(x: float32[2,3])
      - zeros = float32[2,3] Fill([2, 3], 0.0)
      - ones = float32[2,3] Fill([2, 3], 1.0)
      + zeros/zero = float32[] Empty([]) {init=True}
      + zeros = float32[2,3] Fill([2, 3], zeros/zero) after [ones]
      + ones = float32[2,3] Fill([2, 3], 1.0) after [exp]
        exp = float32[2,3] Exp(x)
        stack = float32[3,2,3] Pack(exp, zeros, ones) {N=3}
        return stack
    """)


def test_delay_early_ops_wait_for_a_product_with_a_constant_does_not_count():
    delaying().check("""
        graph(x: float32[2,8], w: float32[8,8])
        y = float32[2,8] MatMul(x, w)
        gradient_tape/dy = float32[2,8] Cos(y)
        gradient_tape/scaled = float32[2,8] Mul(gradient_tape/dy, 0.5)
      - shifted = float32[2,8] Sub(x, 1.0) after [gradient_tape/scaled]
      + shifted = float32[2,8] Sub(x, 1.0) after [gradient_tape/dy, gradient_tape/scaled]
        gradient_tape/dx = float32[2,8] MatMul(gradient_tape/scaled, w) {transpose_b=True}
        gradient_tape/sum = float32[2,8] Mul(gradient_tape/dx, shifted)
        return gradient_tape/sum
    """)


def test_delay_early_ops_bias_does_not_wait_for_its_convolution():
    delaying().check("""
        graph(x: float32[2,8,8,3], w: float32[3,3,3,4], b: resource of float32[4])
        bias = float32[4] ReadVariableOp(b)
      - root = float32[4] Sqrt(bias)
      + root = float32[4] Sqrt(bias) after [exp]
        exp = float32[2,8,8,3] Exp(x)
        pad = float32[2,10,10,3] Pad(exp, [[0, 0], [1, 1], [1, 1], [0, 0]])
        conv = float32[2,8,8,4] Conv2D(pad, w) {padding="VALID", strides=[1, 1, 1, 1]}
        biased = float32[2,8,8,4] BiasAdd(conv, root)
        return biased
    """)


def test_delay_optimizer_ops_values_of_variables_wait_for_gradients():
    passes(lambda graph: DelayOptimizerOps(GraphAnalysis(graph))).check("""
        graph(x: float32[2,40], w: resource of float32[40,40])
        weight = float32[40,40] ReadVariableOp(w)
        y = float32[2,40] MatMul(x, weight)
        gradient_tape/dy = float32[2,40] Cos(y)
        gradient_tape/dw = float32[40,40] MatMul(x, gradient_tape/dy) {transpose_a=True}
      - half = float32[40,40] Mul(weight, 0.5)
      + half = float32[40,40] Mul(weight, 0.5) after [gradient_tape/dy]
      - decay = float32[40,40] Mul(half, 0.01)
      + decay = float32[40,40] Mul(half, 0.01) after [gradient_tape/dy]
        small = float32[40] Sum(weight, 0)
        sum = float32[40,40] AddV2(gradient_tape/dw, decay)
        shifted = float32[40,40] Sub(sum, small)
        update = AssignSubVariableOp(w, shifted) after [weight]
        effects update
        return y
    """)


def before_loops(graph):
    loops = [EmittedLoop(f"loop{n}", f"start{n}", "", n > 0) for n in range(3)]
    return RunUpdatesBeforeLoops(GraphAnalysis(graph, ("loop1", "loop2")), loops)


def test_run_updates_before_loops_loop_waits_for_updates_of_earlier_loops():
    passes(before_loops, run=False).check("""
        graph(x: float32[2,3], v: resource of float32[2,3], w: resource of float32[2,3])
        other = AssignSubVariableOp(v, [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
        start0 = NoOp()
        loop0 = float32[2,3] While(x) after [start0]
        start1 = NoOp() after [loop0]
        loop1 = float32[2,3] While(loop0) after [start1]
        scaled = float32[2,3] Mul(loop1, 0.1)
        first = AssignSubVariableOp(v, scaled)
      - start2 = NoOp() after [loop1]
      + start2 = NoOp() after [first, loop1]
        loop2 = float32[2,3] While(loop1) after [start2]
        last = AssignSubVariableOp(w, loop2)
        effects first, last, other
        return loop0
    """)


def test_run_updates_after_reads_assignments_wait_for_loops_that_read_files():
    passes(lambda graph: RunUpdatesAfterReads(["loop", "other"]), run=False).check("""
        graph(x: float32[2,3], seed: resource of int64[2], w: resource of float32[2,3])
        drawn = AssignAddVariableOp(seed, int64:[1, 1])
        loop = float32[2,3] While(x) after [drawn]
        other = float32[2,3] While(x) after [loop]
      - update = AssignSubVariableOp(w, loop)
      + update = AssignSubVariableOp(w, loop) after [loop, other]
        effects drawn, update
        return other
    """)


def test_separate_gradients_of_filter_and_bias(plan_with):
    plan_with(**ONEDNN)
    passes(lambda graph: SeparateGradients(), run=False).check("""
        graph(x: float32[2,8,8,3], dy: float32[2,8,8,4])
        dw = float32[3,3,3,4] Conv2DBackpropFilter(x, [3, 3, 3, 4], dy) {padding="SAME", strides=[1, 1, 1, 1]}
      - db = float32[4] BiasAddGrad(dy)
      - first = float32[4] BiasAddGrad(dy)
      + db = float32[4] BiasAddGrad(dy) after [dw, late]
      + first = float32[4] BiasAddGrad(dy) after [dw]
        late = float32[3,3,3,4] Conv2DBackpropFilter(x, [3, 3, 3, 4], dy) {padding="SAME", strides=[1, 1, 1, 1]} after
              [first]
        return dw, db, late
    """)
