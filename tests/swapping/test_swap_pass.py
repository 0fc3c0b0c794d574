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
from keras import layers
from swapping import same_bits, swapped

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize import canonicalize
from rewriters.device.peak_memory import graph_peak, graph_schedule
from rewriters.ir.graph import Graph, Node, ancestors
from rewriters.scheduling.delay_early_ops import earliest_forward_level
from rewriters.swapping.spill_store import SpillStore
from rewriters.swapping.swap_pass import Swap, SwapIn, SwapOptions, insert_swaps, plan_swaps
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
        assert tier.store.num_unread() == 0 < tier.store.file_bytes(), "each written tensor has been read"
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


def test_insert_swaps_swap_in_waits_for_control_op():
    step = keras_step(plain, (16, 24), 2)
    result = swapped(step)
    for swap in result.plan.swaps:
        for swap_in in swap.swap_ins:
            reader = result.graph.nodes[swap_in.readers[0].name]
            (copy,) = (t.node for t in reader.inputs if t.node.name.startswith(f"lms/{swap.tensor.node.name}/swap_in"))
            assert [c.name for c in copy.control_inputs] == [swap_in.control.name]
            assert copy.inputs[0].node.name.endswith("swap_out")
            assert result.graph.nodes[swap_in.control.name] in ancestors([reader])


def test_insert_swaps_imported_swaps_wait_for_their_edges_alone(tmp_path):
    """Automatic control dependencies would run swaps serially, so that a tensor is swapped in after a later one."""
    step = keras_step(plain, (16, 16), 2)
    result = swapped(step, DiskTier(SpillStore(str(tmp_path))))
    imported = {operation.name: operation for operation in result.function.graph.get_operations()}
    calls = [node for node in result.graph.nodes.values() if node.op == "PyFunc"]
    assert len(calls) >= 3 * len(result.plan.swaps) >= 15
    for node in calls:
        assert {c.name for c in imported[node.name].control_inputs} == {c.name for c in node.control_inputs}


def test_insert_swaps_swap_in_waits_for_releases_before(tmp_path):
    step = keras_step(plain, (16, 16), 2)
    result = swapped(step, DiskTier(SpillStore(str(tmp_path))), ctrld_strategy="direct_order", fuse_swapins=True)
    swap_ins, waited = {}, set()
    for swap in result.plan.swaps:
        index = f"_{swap.tensor.index}" if swap.tensor.index else ""
        for number, swap_in in enumerate(swap.swap_ins):
            swap_ins[f"lms/{swap.tensor.node.name}{index}/swap_in_{number}"] = swap_in
    for name, swap_in in swap_ins.items():
        for before in result.graph.nodes[name].control_inputs:
            if "/given_back_" in before.name:
                waited.add(before)
                ran = {node.name for node in ancestors([result.graph.nodes[swap_in.control.name]])}
                readers = swap_ins[before.name.replace("given_back", "swap_in")].readers
                assert {reader.name for reader in readers} <= ran
    given = [node for node in result.graph.nodes.values() if "/given_back_" in node.name and node.op == "PyFunc"]
    assert 0.5 * len(given) <= len(waited) < len(given)


@pytest.mark.parametrize("strategy", ("chain_rule", "direct_order"))
@pytest.mark.parametrize("net", NETS)
def test_swapped_step_forward_phase_has_no_swap_in(net, strategy, monkeypatch):
    """With an unknown batch gradients read shapes of activations, which exist as soon as the activations do."""
    monkeypatch.setattr("rewriters.device.peak_memory.op_scratch", lambda *_: 0)  # Other gradients run at once then.
    peaks = {}
    for known in (True, False):
        keras.backend.clear_session()
        step = keras_step(NETS[net], (16, 24), 2, known)
        result = swapped(step, ctrld_strategy=strategy)
        graph = result.graph
        analysis = GraphAnalysis(graph)
        ready = earliest_forward_level(analysis)
        outs = [node for node in graph.nodes.values() if node.name.endswith("swap_out")]
        ways = [graph.nodes[way.control.name] for swap in result.plan.swaps for way in swap.swap_ins]
        deepest = max(ready[graph.nodes[swap.tensor.node.name]] for swap in result.plan.swaps)
        assert len(outs) >= 4 and all(ready[node] >= deepest for node in ways)
        peaks[known] = graph_peak(graph_schedule(graph, (), 2, [], away=outs), {}, limit=0).peak_bytes
    assert peaks[False] <= 1.3 * peaks[True]


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


def test_insert_swaps_producer_waits_for_swap_outs_in_flight(traced):
    def waiting(max_in_flight):
        nodes = swapped(traced, max_in_flight=max_in_flight).graph.nodes.values()
        others = [node for node in nodes if not node.op.startswith(("Assign", "NoOp"))]
        return sum(before.name.endswith("swap_out") for node in others for before in node.control_inputs)

    assert waiting(1) > waiting(4) > waiting(100) == 0


def test_insert_swaps_update_before_swap_in_does_not_wait_for_its_swap_out():
    """The second consumer of the swap-in depends on the update through the control edge of the swap-in alone."""
    empty = tf.compat.v1.GraphDef()
    graph = Graph({}, [], [], [], empty.library, empty.versions)

    def add(name, op, inputs, controls=(), dtype=tf.float64):
        return graph.add(
            Node(name, op, [n.out() for n in inputs], control_inputs=controls, attrs={}, outputs=[(dtype, (100,))])
        )

    image, handle = add("image", "Placeholder", []), add("handle", "Placeholder", [], dtype=tf.resource)
    first = add("first", "Roll", [image])
    update = add("update", "AssignVariableOp", [handle, add("mean", "Roll", [image])])
    control = add("control", "Roll", [image], [update])
    reader = add("reader", "AddV2", [control, first])
    other = add("other", "Roll", [first])
    second = add("second", "Roll", [other])
    end = add("end", "AddV2", [reader, second])
    graph.outputs, graph.keep = [end.out()], [update]
    swaps = [Swap(first.out(), [SwapIn([reader, other], control)]), Swap(second.out(), [SwapIn([end], reader)])]
    result = insert_swaps(GraphAnalysis(graph), swaps, HostTier(), 2)
    new, outs = result.graph, result.swap_outs
    waited = ancestors([new.nodes["update"]])
    assert {out.name for out in outs} - {node.name for node in waited} == {"lms/second/swap_out"}


def test_plan_swaps_parameters_stay(traced):
    result = swapped(traced)
    assert all(swap.tensor.node.op not in ("ReadVariableOp", "Placeholder", "Const") for swap in result.plan.swaps)
    kept = [node for node in result.graph.keep if node.name.lower().startswith("sgd/assign")]
    outs = {node.name for node in result.graph.nodes.values() if node.name.endswith("swap_out")}
    assert kept and all(outs <= {before.name for before in ancestors([node])} for node in kept), "updates come last"


def test_insert_swaps_generators_and_loops_that_write_come_last():
    """A `tf.random.Generator` advances its state in one op with the draw, and a loop may assign in its body."""
    generator, rounds = tf.random.Generator.from_seed(1), tf.Variable(0)
    weights = [tf.Variable(np.random.default_rng(n).normal(size=(3, 3, 2, 2))) for n in range(3)]

    def train(x):
        with tf.GradientTape() as tape:
            for kernel in weights:
                x = tf.sin(tf.nn.conv2d(x, kernel, 1, "SAME"))
            loss = tf.reduce_mean(x * x) + generator.normal([], dtype=tf.float64)
        for kernel, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            kernel.assign_sub(0.1 * gradient)
        tf.while_loop(lambda i: i < 2, lambda i: (i + rounds.assign_add(1) * 0 + 1,), (0,))
        return loss

    x = np.random.default_rng(9).normal(size=(2, 8, 12, 2))
    variables = [*weights, generator.state, rounds]
    step = Step(tf.function(train).get_concrete_function(tf.constant(x)), variables, [(x,)] * 3)
    result = swapped(step)
    outs = {node.name for node in result.graph.nodes.values() if node.name.endswith("swap_out")}
    writers = [node for node in result.graph.nodes.values() if node.op in ("RngReadAndSkip", "While")]
    assert len(outs) >= 3 and len(writers) == 2 and same_bits(step, result.function)
    assert all(outs <= {before.name for before in ancestors([node])} for node in writers)


def test_insert_swaps_updates_wait_for_few_ops(traced):
    result = swapped(traced)
    edges = sum(c.name.startswith("lms/") for node in result.graph.keep for c in node.control_inputs)
    swaps, updates = len(result.plan.swaps), sum(node.op.startswith("Assign") for node in result.graph.keep)
    assert 0 < edges <= swaps + 2 * updates < swaps * updates


@pytest.mark.parametrize("rank", [2, 3])
def test_recompute_pooling_swapped_step_computes_same_bits(rank, plan_with):
    """The pass is for oneDNN's kernels; the test runs it with TensorFlow's, in float64 where there is one."""
    plan_with(**ONEDNN)
    convolve, pool = {2: (layers.Conv2D, layers.MaxPooling2D), 3: (layers.Conv3D, layers.MaxPooling3D)}[rank]

    def pooled(x):
        x = x if rank == 2 else layers.Reshape((16, 12, 2, -1))(x)
        for _ in range(2):
            x = pool((3, 2, 1)[:rank], strides=2, padding="same")(convolve(4, 3, padding="same", activation="relu")(x))
        return x if rank == 2 else layers.Reshape((4, 3, -1))(x)

    step = keras_step(pooled, (16, 24), 2, floatx="float64" if rank == 2 else "float32")
    result = swapped(step)
    again = [node for node in result.graph.nodes.values() if node.name.endswith("Grad/pool")]
    assert len(again) == 2 and len(result.plan.swaps) >= 3
    assert same_bits(step, result.function)
