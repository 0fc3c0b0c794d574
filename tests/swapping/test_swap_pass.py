"""The swap pass: the step computes the same bits, and parameters select tensors and triggers."""

import functools
import operator
import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from devices import ONEDNN
from equivalence import Cut, Step, keras_step
from graph_rewrites import passes
from keras import layers
from swapping import same_bits, swapped

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize import canonicalize
from rewriters.swapping.recompute_pooling import RecomputePooling
from rewriters.swapping.spill_store import SpillStore
from rewriters.swapping.swap_pass import InsertSwaps, SwapOptions, plan_swaps
from rewriters.swapping.tiers import DiskTier, HostTier
from rewriters.swapping.transfer_schedule import LeadTimes
from rewriters.swapping.trigger_search import TriggerSearch


@pytest.fixture(params=["host", "disk"])
def tier(request, tmp_path):
    return HostTier() if request.param == "host" else DiskTier(SpillStore(str(tmp_path)))


def plain(x):
    for filters in (4, 6, 8):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = layers.Conv2D(filters, 3, padding="same", activation="silu")(x)
        x = layers.MaxPooling2D(2)(x)
    return x


def normed(x):
    x = layers.BatchNormalization()(layers.Conv2D(4, 3)(x))
    return layers.Dropout(0.5, seed=1)(layers.ReLU()(x))


def branches(x):
    """A small U-Net: the result of the first level is read at the end."""
    first = layers.Conv2D(4, 3, padding="same", activation="relu")(x)
    low = layers.Conv2D(8, 3, padding="same", activation="relu")(layers.MaxPooling2D(2)(first))
    low = layers.Conv2D(8, 3, padding="same", activation="relu")(low)
    return layers.Concatenate()([first, layers.Conv2DTranspose(4, 2, strides=2, activation="relu")(low)])


NETS = {"plain": plain, "normed": normed, "branches": branches}


@pytest.mark.parametrize("strategy", ("chain_rule", "direct_order"))
@pytest.mark.parametrize("known_batch", (True, False), ids=("known", "unknown"))
@pytest.mark.parametrize("net", NETS)
def test_swapped_step_any_tier_and_strategy_computes_same_bits(net, known_batch, strategy, tier):
    step = keras_step(NETS[net], (16, 24), 2, known_batch, keras.optimizers.Adam(), steps=4)
    result = swapped(step, tier, ctrld_strategy=strategy, swap_branches=True)
    assert len(result.plan.swaps) >= 4
    assert same_bits(step, result.function)
    if isinstance(tier, DiskTier):
        assert all(held.reads == 0 for held in tier.store._held.values()), "each written tensor has been read"
        assert os.listdir(tier.store.directory) == []


def test_swapped_step_with_tile_loops_swaps_tensors_between_segments(tier):
    step = keras_step(plain, (16, 24), 2)
    cuts = (Cut("input", "max_pooling2d", (2, 2)),)
    result = swapped(step, tier, cuts=cuts)
    assert any(swap.tensor.node.name.startswith("sft/") for swap in result.plan.swaps)
    tiled = swapped(step, tier, cuts=cuts, n_tensors=0)
    assert same_bits(Step(tiled.function, step.variables, step.batches), result.function)


def one_by_one(tensors):
    return functools.reduce(operator.add, tensors)


@pytest.mark.parametrize("add", (tf.add_n, one_by_one))
def test_swapped_step_sums_of_swapped_tensors_keep_order(add):
    weights = [tf.Variable(np.random.default_rng(n).normal(size=(3, 3, 4, 4))) for n in range(4)]

    def function(x):
        """A sum of three tensors and a fourth, late one; the gradients of the three are late too."""
        with tf.GradientTape() as tape:
            held = [tf.exp(tf.nn.conv2d(x, w, 1, "SAME")) for w in weights[:3]]
            y = x
            for _ in range(4):
                y = tf.tanh(tf.nn.conv2d(y, weights[3], 1, "SAME"))
            loss = tf.reduce_sum(add([y, *held]) ** 2)
        gradients = tape.gradient(loss, weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(1e-5 * gradient)
        return loss

    x = 0.1 * np.random.default_rng(9).normal(size=(2, 8, 8, 4))
    step = Step(tf.function(function).get_concrete_function(tf.constant(x)), weights, [(x,)] * 4)
    result = swapped(step, swap_branches=True, branch_threshold=3)
    assert len(result.plan.swaps) >= 3 and same_bits(step, result.function)
    left = [reason for _, reason in result.plan.left if "swapping might change the order of additions" in reason]
    assert bool(left) == (add is one_by_one)


def test_plan_swaps_sums_with_other_consumers_are_swapped():
    """Pre-activation blocks: each sum is read by the next one and by a normalisation."""

    def net(x):
        x = layers.Conv2D(4, 3, padding="same")(x)
        for _ in range(3):
            y = layers.ReLU()(layers.BatchNormalization()(x))
            x = x + layers.Conv2D(4, 3, padding="same")(y)
        return x

    step = keras_step(net, (12, 16), 2, steps=4)
    result = swapped(step)
    assert len([swap for swap in result.plan.swaps if swap.tensor.node.name.split("/")[1].startswith("Add")]) == 2
    assert same_bits(step, result.function)


@pytest.mark.parametrize("rate_of", (layers.Dropout, layers.SpatialDropout2D), ids=lambda layer: layer.__name__)
def test_plan_swaps_draws_are_swapped(rate_of):
    """A mask depends on no argument, and is saved for the backward pass like an activation."""

    def net(x):
        x = layers.Conv2D(4, 3, padding="same", activation="relu")(x)
        return layers.Conv2D(4, 3, padding="same")(rate_of(0.5, seed=1)(x))

    step = keras_step(net, (16, 24), 2, steps=3)
    result = swapped(step)
    assert any("dropout" in swap.tensor.node.name and swap.tensor.dtype == tf.bool for swap in result.plan.swaps)
    assert same_bits(step, result.function)


def test_plan_swaps_draws_come_after_what_depends_on_arguments():
    def net(x):
        x = layers.Conv2D(4, 3, padding="same", activation="relu")(x)
        for _ in range(3):
            x = layers.Conv2D(4, 3, padding="same", activation="relu")(layers.Dropout(0.5, seed=1)(x))
        return x

    swaps = swapped(keras_step(net, (16, 24), 2)).plan.swaps
    is_mask = [swap.tensor.dtype == tf.bool for swap in swaps]
    assert any(is_mask) and is_mask == sorted(is_mask)


def test_insert_swaps_imported_swaps_wait_for_their_edges_alone(tmp_path):
    """Automatic control dependencies would run swaps serially, so that a tensor is swapped in after a later one."""
    step = keras_step(plain, (16, 16), 2)
    result = swapped(step, DiskTier(SpillStore(str(tmp_path))))
    imported = {operation.name: operation for operation in result.function.graph.get_operations()}
    calls = [node for node in result.graph.nodes.values() if node.op == "PyFunc"]
    assert len(calls) >= 3 * len(result.plan.swaps) >= 15
    for node in calls:
        assert {c.name for c in imported[node.name].control_inputs} == {c.name for c in node.control_inputs}


# Every parameter shows in the graph ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traced():
    keras.backend.clear_session()
    return keras_step(branches, (16, 24), 2)


def swapped_tensors(step, **options):
    return [swap.tensor.name for swap in swapped(step, **options).plan.swaps]


def test_plan_swaps_n_tensors_limits_reachable_tensors(traced):
    everything = swapped_tensors(traced)
    assert len(everything) >= 5
    assert swapped_tensors(traced, n_tensors=3) == everything[:3]


def test_plan_swaps_scopes_and_types_select_tensors(traced):
    everything = swapped_tensors(traced)
    relus = [name for name in everything if "Relu" in name]
    assert 0 < len(relus) < len(everything)
    assert swapped_tensors(traced, incl_types=("Relu",)) == relus
    assert swapped_tensors(traced, excl_types=("Relu",)) == [name for name in everything if name not in relus]
    first = [name for name in everything if "/conv2d_1/" in name]
    assert 0 < len(first) < len(everything)
    assert swapped_tensors(traced, incl_scopes=("conv2d_1",)) == first
    assert swapped_tensors(traced, excl_scopes=("conv2d_1",)) == [name for name in everything if name not in first]
    assert swapped_tensors(traced, incl_scopes=("conv2d_1",), incl_types=("Relu",)) == [
        name for name in everything if name in {*first, *relus}
    ]
    assert swapped_tensors(traced, incl_types=("Relu",), excl_scopes=("conv2d_1",)) == [
        name for name in relus if name not in first
    ]


def test_plan_swaps_starting_ops_limit_search(traced):
    everything = swapped_tensors(traced)
    (start,) = (name.split(":")[0] for name in everything if name.endswith("max_pooling2d_1/MaxPool2d:0"))
    later = swapped_tensors(traced, starting_op_names=(start,))
    assert later[0].startswith(start) and set(later) < set(everything)
    assert swapped_tensors(traced, starting_scope=start.rpartition("/")[0]) == later


def test_plan_swaps_backward_scopes_are_inferred_or_given():
    weight = tf.Variable(np.random.default_rng(0).normal(size=(3, 3, 4, 4)))

    def by_hand(x):
        """A gradient that no tape made: nothing marks it but the scope it is in."""
        y = tf.nn.relu(tf.nn.conv2d(x, weight, 1, "SAME"))
        z = tf.nn.conv2d(tf.tanh(tf.exp(y)), weight, 1, "SAME")
        with tf.name_scope("net"), tf.name_scope("by_hand"):
            weight.assign_sub(tf.ones((3, 3, 4, 4), y.dtype) * tf.reduce_sum(y * tf.sin(z)) * 1e-6)
        return tf.reduce_sum(z)

    x = np.random.default_rng(1).normal(size=(4, 8, 8, 4))
    step = Step(tf.function(by_hand).get_concrete_function(tf.constant(x)), [weight], [(x,)] * 4)
    assert not swapped(step).plan.swaps
    graph = canonicalize.read_canonical(step.concrete_fn)
    for scope in ("net/by_hand", "by_hand", "net"):
        analysis = GraphAnalysis(graph, (scope,))
        swaps = plan_swaps(analysis, SwapOptions(), 4).swaps
        assert [swap.tensor.node.op for swap in swaps][:1] == ["Relu"]
    assert not plan_swaps(GraphAnalysis(graph, ("hand",)), SwapOptions(), 4).swaps, "a scope is a whole name"


def controls(step, **options):
    result = swapped(step, **options)
    search = TriggerSearch(result.graph, ())
    return [
        search.level[result.graph.nodes[way.readers[0].name]] - search.level[result.graph.nodes[way.control.name]]
        for swap in result.plan.swaps
        for way in swap.swap_ins
    ]


@pytest.mark.parametrize("strategy", ("chain_rule", "direct_order"))
def test_plan_swaps_larger_lb_triggers_earlier(traced, strategy):
    near, far = (controls(traced, ctrld_strategy=strategy, lb=lb) for lb in (1, 4))
    assert np.mean(far) > np.mean(near) + 1


def test_plan_swaps_small_ub_lists_tensors_without_trigger(traced):
    result = swapped(traced, ctrld_strategy="direct_order", lb=5, ub=6).plan
    assert not result.swaps and all("no op can trigger its swap-in" in reason for _, reason in result.left)
    assert {name for name, _ in result.left} >= set(swapped_tensors(traced, ctrld_strategy="direct_order"))


def test_plan_swaps_strategies_select_different_triggers(traced):
    by = {s: swapped(traced, ctrld_strategy=s).plan.swaps for s in ("chain_rule", "direct_order")}
    names = {s: [way.control.name for swap in swaps for way in swap.swap_ins] for s, swaps in by.items()}
    assert names["chain_rule"] != names["direct_order"]


def test_plan_swaps_close_consumers_share_swap_in(traced):
    def ways(**options):
        return [len(swap.swap_ins) for swap in swapped(traced, **options).plan.swaps]

    alone, fused = ways(), ways(fuse_swapins=True, fuse_distance=100)
    assert max(alone) > 1 and set(fused) == {1} and len(alone) == len(fused)
    assert ways(fuse_swapins=True, fuse_distance=0) != fused
    result = swapped(traced, fuse_swapins=True, fuse_distance=100)
    assert same_bits(traced, result.function)


@pytest.mark.parametrize("lead", (None, 1.0, 4.0))
def test_plan_swaps_consumers_with_one_trigger_share_swap_in(lead):
    """Their copies would exist at the same time, so that one copy takes less memory and fewer transfers."""
    step = keras_step(plain, (16, 24), 2)
    result = swapped(step, times=None if lead is None else LeadTimes(lambda node: 1e-3, 1e6, lead))
    shared = 0
    for swap in result.plan.swaps:
        triggers = [swap_in.control for swap_in in swap.swap_ins]
        assert len(set(triggers)) == len(triggers)
        shared += any(len(swap_in.readers) > 1 for swap_in in swap.swap_ins)
    assert shared >= 3
    assert same_bits(step, result.function)


def test_plan_swaps_swap_branches_adds_long_branches(traced):
    def forward_readers(**options):
        result = swapped(traced, **options)
        ways = [way for swap in result.plan.swaps for way in swap.swap_ins]
        return [r.op for way in ways for r in way.readers if not r.name.startswith("gradient_tape")]

    assert "ConcatV2" not in forward_readers()
    assert "ConcatV2" in forward_readers(swap_branches=True, branch_threshold=3)
    assert "ConcatV2" not in forward_readers(swap_branches=True, branch_threshold=50)


def test_plan_swaps_tensors_below_min_bytes_stay(traced):
    sizes = [swap.tensor.num_bytes(2) for swap in swapped(traced).plan.swaps]
    limit = sorted(sizes)[len(sizes) // 2]
    large = swapped(traced, min_bytes=limit).plan.swaps
    assert len(large) == sum(size >= limit for size in sizes) < len(sizes)


def test_recompute_pooling_gradient_reads_a_pooling_of_its_own(plan_with):
    plan_with(**ONEDNN)
    passes(lambda graph: RecomputePooling(GraphAnalysis)).check("""
        graph(x: float32[2,4,4,3], w: float32[3,3])
        pool = float32[2,2,2,3] MaxPool(x) {ksize=[1, 2, 2, 1], padding="VALID", strides=[1, 2, 2, 1]}
        y = float32[2,2,2,3] Einsum(pool, w) {N=2, equation="abcd,de->abce"}
        gradient_tape/dy = float32[2,2,2,3] Cos(y)
        gradient_tape/dw = float32[3,3] Einsum(pool, gradient_tape/dy) {N=2, equation="abcd,abce->de"}
      + gradient_tape/dx/pool = float32[2,2,2,3] MaxPool(x) {ksize=[1, 2, 2, 1], padding="VALID", strides=[1, 2, 2, 1]}
              after [gradient_tape/dy]
      - gradient_tape/dx = float32[2,4,4,3] MaxPoolGrad(x, pool, gradient_tape/dy)
              {ksize=[1, 2, 2, 1], padding="VALID", strides=[1, 2, 2, 1]}
      + gradient_tape/dx = float32[2,4,4,3] MaxPoolGrad(x, gradient_tape/dx/pool, gradient_tape/dy)
              {ksize=[1, 2, 2, 1], padding="VALID", strides=[1, 2, 2, 1]}
        return gradient_tape/dw, gradient_tape/dx
    """)


def swapping(tier, max_in_flight=2, **options):
    def make(graph):
        analysis = GraphAnalysis(graph)
        return InsertSwaps(
            analysis, plan_swaps(analysis, SwapOptions(**options), 2).swaps, tier=tier, max_in_flight=max_in_flight
        )

    return passes(make)


def test_insert_swaps_disk_tier_waits_for_swap_outs_in_flight_and_for_releases():
    swapping(DiskTier(SpillStore("/tmp")), max_in_flight=1).check("""
        graph(x: float32[2,8])
        a = float32[2,8] Exp(x)
      - b = float32[2,8] Sin(a)
      + b = float32[2,8] Sin(a) after [lms/a/swap_out]
        c = float32[2,8] Tan(b)
        y = float32[2,8] Cos(c)
        gradient_tape/dy = float32[2,8] Cos(y)
        gradient_tape/dc = float32[2,8] Tanh(gradient_tape/dy)
      - gradient_tape/db = float32[2,8] Mul(gradient_tape/dc, b)
      + lms/b/swap_out = int64[] PyFunc(b) on /device:CPU:0
      + lms/b/swap_in_0 = float32[2,8] PyFunc(lms/b/swap_out) after [gradient_tape/dy] on /device:CPU:0
      + lms/b/swap_in_0/EnsureShape = float32[2,8] EnsureShape(lms/b/swap_in_0) {shape=[2,8]}
      + gradient_tape/db = float32[2,8] Mul(gradient_tape/dc, lms/b/swap_in_0/EnsureShape)
        gradient_tape/d = float32[2,8] Sin(gradient_tape/db)
      - gradient_tape/da = float32[2,8] Mul(gradient_tape/d, a)
      + lms/a/swap_out = int64[] PyFunc(a) on /device:CPU:0
      + lms/a/swap_in_0 = float32[2,8] PyFunc(lms/a/swap_out) after [gradient_tape/db, lms/b/given_back_0] on
              /device:CPU:0
      + lms/a/swap_in_0/EnsureShape = float32[2,8] EnsureShape(lms/a/swap_in_0) {shape=[2,8]}
      + gradient_tape/da = float32[2,8] Mul(gradient_tape/d, lms/a/swap_in_0/EnsureShape)
      + lms/a/given_back_0 = int64[] PyFunc() after [gradient_tape/da] on /device:CPU:0
      + lms/b/given_back_0 = int64[] PyFunc() after [gradient_tape/db] on /device:CPU:0
      + effects lms/a/given_back_0, lms/b/given_back_0
        return gradient_tape/da
    """)


def test_insert_swaps_host_tier_variables_change_last():
    swapping(HostTier()).check("""
        graph(x: float32[2,8], w: resource of float32[2,8], state: resource of int64[3])
        weight = float32[2,8] ReadVariableOp(w)
        a = float32[2,8] Mul(x, weight)
        b = float32[2,8] Exp(a)
        y = float32[2,8] Sin(b)
        gradient_tape/dy = float32[2,8] Cos(y)
        gradient_tape/db = float32[2,8] Tanh(gradient_tape/dy)
      - gradient_tape/dw = float32[2,8] Mul(gradient_tape/db, a)
      - gradient_tape/dx = float32[2,8] Sub(gradient_tape/db, a)
      - update = AssignSubVariableOp(w, gradient_tape/dw) after [weight]
      - draw = int64[3] RngReadAndSkip(state, 1, uint64:1)
      + lms/a/swap_out = float32[2,8] Identity(a) on /device:CPU:0
      + lms/a/swap_in_0 = float32[2,8] Identity(lms/a/swap_out) after [gradient_tape/dy] on /device:CPU:0
      + gradient_tape/dw = float32[2,8] Mul(gradient_tape/db, lms/a/swap_in_0)
      + gradient_tape/dx = float32[2,8] Sub(gradient_tape/db, lms/a/swap_in_0)
      + update = AssignSubVariableOp(w, gradient_tape/dw) after [lms/swapped_out, weight]
      + draw = int64[3] RngReadAndSkip(state, 1, uint64:1) after [lms/swapped_out]
      + lms/swapped_out = NoOp() after [lms/a/swap_out]
        effects draw, update
        return y, gradient_tape/dx
    """)


def test_insert_swaps_update_before_a_swap_in_does_not_wait_for_its_swap_out():
    swapping(HostTier(), swap_branches=True, excl_types=("Cos",)).check("""
        graph(x: float32[2,8], v: resource of float32[2,8])
        a = float32[2,8] Exp(x)
        y = float32[2,8] Cos(a)
      - update = AssignVariableOp(v, y)
      + update = AssignVariableOp(v, y) after [lms/swapped_out]
        c = float32[2,8] Tanh(y) after [update]
        d = float32[2,8] Cos(c)
        e = float32[2,8] Cos(d)
      - f = float32[2,8] ClipByValue(c, a, e)
      + lms/c/swap_out = float32[2,8] Identity(c) on /device:CPU:0
      + lms/c/swap_in_0 = float32[2,8] Identity(lms/c/swap_out) after [e] on /device:CPU:0
      + lms/a/swap_out = float32[2,8] Identity(a) on /device:CPU:0
      + lms/a/swap_in_0 = float32[2,8] Identity(lms/a/swap_out) after [e] on /device:CPU:0
      + f = float32[2,8] ClipByValue(lms/c/swap_in_0, lms/a/swap_in_0, e)
      + lms/swapped_out = NoOp() after [lms/a/swap_out]
        effects update
        return f
    """)


def test_insert_swaps_gradient_of_shapes_alone_is_no_trigger():
    swapping(HostTier(), ctrld_strategy="direct_order").check("""
        graph(x: float32[?,8])
        a = float32[?,8] Exp(x)
        b = float32[?,8] Sin(a)
        y = float32[?,8] Cos(b)
        gradient_tape/dy = float32[?,8] Tanh(y)
        size = int32[2] Shape(a)
        gradient_tape/ones = float32[?,8] Fill(size, 1.0)
        gradient_tape/early = float32[?,8] Sinh(gradient_tape/ones)
        gradient_tape/later = float32[?,8] Tanh(gradient_tape/early)
      + lms/a/swap_out = float32[?,8] Identity(a) on /device:CPU:0
      + lms/a/swap_in_0 = float32[?,8] Identity(lms/a/swap_out) after [gradient_tape/dy] on /device:CPU:0
      - gradient_tape/dx = float32[?,8] ClipByValue(a, gradient_tape/dy, gradient_tape/later)
      + gradient_tape/dx = float32[?,8] ClipByValue(lms/a/swap_in_0, gradient_tape/dy, gradient_tape/later)
        return gradient_tape/dx
    """)
