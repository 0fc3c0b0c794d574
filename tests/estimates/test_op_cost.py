"""Seconds of ops and of tile loops."""

import dataclasses
import math
import random

import pytest
import tensorflow as tf
from devices import ONEDNN, planning_for_card
from equivalence import Cut, keras_step, plan
from keras import layers
from nets import chain, conv
from tensorflow.python.framework.function_def_to_graph import function_def_to_graph

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize import canonicalize
from rewriters.device import kernel_scratch
from rewriters.emission.loop_emitter import trace_loop
from rewriters.emission.loop_program import MergeMoments
from rewriters.emission.lowering import lower
from rewriters.estimates.instruction_cost import InstructionCosts
from rewriters.estimates.op_cost import DIRECT, NOMINAL, CostModel, _coverage, sum_in_order
from rewriters.ir.device_detection import planned_device
from rewriters.tiling.barrier_levels import assign_levels
from rewriters.tiling.barrier_planner import BarrierPlanner, barrier_segment
from rewriters.tiling.checkpoint_selection import CheckpointSelection
from rewriters.tiling.tile_planner import Grid, Halo

IMAGES = 4
FILTERS = ((3, 3, 3, 4), (3, 3, 4, 5), (1, 1, 3, 4), (1, 1, 4, 5))


def two(size):
    """Return a body of two convolutions with square filters of `size` pixels a side."""
    return lambda x: conv(5, size, name="out")(conv(4, size)(x))


def pooled(x):
    return layers.MaxPooling2D(2, name="out")(conv(4)(x))


def tile_loops(body, grid, batch=1, halo=Halo.RECOMPUTE, **options):
    """Return the analysis of a step and the loops of its segment."""
    step = keras_step(body, (12, 10), IMAGES, steps=1, **options)
    analysis = GraphAnalysis(canonicalize.read_canonical(step.concrete_fn))
    (segment_plan,) = plan(analysis, [Cut(grid=grid, batch=batch, halo=halo)])
    return analysis, segment_plan.loops


@pytest.mark.parametrize("body", [two(3), pooled])
def test_cost_single_iteration_is_sum_of_ops(body):
    analysis, loops = tile_loops(body, (1, 1))
    costs = CostModel(analysis, IMAGES)
    for tile_loop in loops:
        adding = sum(3 * tensor.num_bytes(IMAGES) for tensor in (*tile_loop.reductions, *tile_loop.accumulates))
        assert costs.tile_loop(tile_loop) == pytest.approx(costs.step(tile_loop.body) + adding / NOMINAL.touched[""])


# Tiles of the batch have no halos, nor have convolutions of single pixels.
@pytest.mark.parametrize(
    ("size", "grid", "batch", "halo"),
    [
        (3, (1, 1), 2, Halo.RECOMPUTE),
        (3, (1, 1), 9, Halo.RECOMPUTE),
        (1, (4, 1), 1, Halo.RECOMPUTE),
        (1, (4, 1), 1, Halo.CARRY),
        (1, (4, 2), 2, Halo.RECOMPUTE),
    ],
)
def test_cost_each_iteration_moves_weights_and_gradients(size, grid, batch, halo):
    analysis, loops = tile_loops(two(size), grid, batch, halo)
    costs, turns, seen = CostModel(analysis, IMAGES), min(batch, IMAGES) * grid[0] * grid[1], set()
    for tile_loop in loops:
        for node in tile_loop.body:
            if "Conv2D" in node.op:
                (filter_,) = [t for t in (*node.inputs, node.out()) if t.shape in FILTERS]
                additional = (turns - 1) * filter_.num_bytes(IMAGES) / NOMINAL.weights
                # Operands that hold a shape count as well.
                assert costs.op_in_loop(tile_loop, node) == pytest.approx(costs.op(node) + additional, rel=0.05)
                seen.add(node.op)
    assert seen == {"Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter"}


def test_cost_recomputed_pool_moves_its_fraction_only():
    analysis, loops = tile_loops(pooled, (1, 1), IMAGES)
    (pool,) = [node for tile_loop in loops for node in tile_loop.body if node.op == "MaxPoolGrad"]
    assert pool.inputs[1] not in loops[-1].regions, "the pool's result, which nothing else reads"
    costs = CostModel(analysis, IMAGES)
    assert costs.op_in_loop(loops[-1], pool) == pytest.approx(costs.op(pool))


CONVOLUTIONS = two(3)


def one_op(op, rates, body=CONVOLUTIONS, **options):
    """Return the seconds of the ops of a type, each with the op."""
    analysis, _ = tile_loops(body, (1, 1), **options)
    nodes = [node for node in analysis.order if node.op == op]
    costs = CostModel(analysis, IMAGES, rates)
    return [(costs.op(node), node) for node in nodes]


def changed(**rates):
    return dataclasses.replace(NOMINAL, **rates)


def test_cost_uses_rate_of_op_type():
    half = changed(flops={"": 1e11, "Conv2D": 5e10}, touched={"": 1.25e10, "MaxPoolGrad": 1.25e9})
    for op, body in (("Conv2D", two(3)), ("MaxPoolGrad", pooled), ("BiasAddGrad", two(3))):
        for (plain, node), (slower, _) in zip(one_op(op, NOMINAL, body), one_op(op, half, body), strict=True):
            touched = sum(t.num_bytes(IMAGES) for t in (*node.inputs, node.out()))
            taps = math.prod(node.inputs[1].shape[:3]) if op == "Conv2D" else 0
            arithmetic = 2 * taps * node.out().num_bytes(IMAGES) / 8
            expected = {"Conv2D": arithmetic / 1e11, "MaxPoolGrad": 9 * touched / 1.25e10, "BiasAddGrad": 0.0}[op]
            assert slower - plain == pytest.approx(expected, rel=1e-6, abs=1e-15), op


def test_cost_includes_seconds_per_call():
    ((plain, _), *_), ((slow, _), *_) = one_op("Conv2D", NOMINAL), one_op("Conv2D", changed(call=1e-3))
    assert slow - plain == pytest.approx(1e-3)


def test_cost_includes_the_start_of_a_kernel_in_each_iteration(plan_with):
    analysis, loops = tile_loops(two(1), (2, 3))
    rates = NOMINAL, changed(kernel_call={"Conv2D": 1.0, "Relu": 5.0})  # A Relu counts no arithmetic.
    plain, slow = (CostModel(analysis, IMAGES, changed_rates) for changed_rates in rates)
    iterations = slow.num_iterations(loops[0])
    convolutions = sum(node.op == "Conv2D" for tile_loop in loops for node in tile_loop.body)
    extra = sum(slow.tile_loop(tile_loop) - plain.tile_loop(tile_loop) for tile_loop in loops)
    assert convolutions and extra == pytest.approx(iterations * convolutions)
    plan_with(**ONEDNN)
    analysis, _ = tile_loops(two(1), (2, 3))
    of_onednn = CostModel(analysis, IMAGES, rates[1])
    assert of_onednn.step(analysis.order) < 1, "not for float64"


def test_cost_large_results_include_first_touch():
    """A convolution has a new result; a bias is added in place."""
    slow = changed(first_touch=1e6, first_touch_min_bytes=1000)
    for (plain, node), (fresh, _) in zip(one_op("Conv2D", NOMINAL), one_op("Conv2D", slow), strict=True):
        assert fresh - plain == pytest.approx(node.out().num_bytes(IMAGES) / 1e6)
    assert one_op("BiasAdd", slow)[0][0] == one_op("BiasAdd", NOMINAL)[0][0]


@pytest.fixture
def onednn(plan_with):
    """Plan for kernels of oneDNN, as by default outside of tests."""
    plan_with(**ONEDNN)


def row_of(node):
    """Return the bytes of a row of the image and of the gradient that a filter gradient reads."""
    numbers = sum(math.prod(operand.shape[-2:]) for operand in (node.inputs[0], node.inputs[2]))
    return numbers * node.outputs[0][0].size


def long_rows(num_bytes):
    return changed(long_row_bytes=num_bytes, long_row_slowdown=3.0)


@pytest.mark.parametrize(("times", "slowdown"), [(1.0, 1.0), (1.5, 2.0), (2.0, 3.0), (50.0, 3.0)])
def test_filter_gradients_of_long_rows_are_slower(onednn, times, slowdown):
    analysis, _ = tile_loops(two(3), (1, 1), floatx="float32")
    nodes = [node for node in analysis.order if node.op == "Conv2DBackpropFilter"]
    assert len(nodes) == 2
    for node in nodes:
        plain, slow = (CostModel(analysis, IMAGES, r).op(node) for r in (NOMINAL, long_rows(row_of(node) / times)))
        pixels = math.prod(node.inputs[2].shape[1:3]) * IMAGES
        arithmetic = 2 * math.prod(node.out().shape) * pixels / 1e11
        assert slow - plain == pytest.approx((slowdown - 1) * arithmetic, rel=1e-6, abs=1e-15)


@pytest.mark.parametrize(
    ("op", "body"), [("Conv2D", two(3)), ("Conv2DBackpropInput", two(3)), ("Conv2DBackpropFilter", two(1))]
)
def test_other_ops_of_long_rows_are_as_fast(onednn, op, body):
    slow, plain = ([s for s, _ in one_op(op, rates, body, floatx="float32")] for rates in (long_rows(1), NOMINAL))
    assert slow == plain and plain


@pytest.mark.skipif(not planned_device().unfolds_convolutions, reason="oneDNN computes the gradients")
def test_filter_gradients_of_other_kernels_do_not_depend_on_rows():
    op = "Conv2DBackpropFilter"
    assert [seconds for seconds, _ in one_op(op, long_rows(1))] == [seconds for seconds, _ in one_op(op, NOMINAL)]


@pytest.mark.parametrize(("grid", "is_slower"), [((5, 1), True), ((1, 5), False)])
def test_narrow_tiles_have_short_rows(onednn, grid, is_slower):
    """Two columns of ten, with a halo of at most three."""
    analysis, loops = tile_loops(two(3), grid, floatx="float32")
    gradients = [node for node in loops[-1].body if node.op == "Conv2DBackpropFilter"]
    assert len(gradients) == 2
    for node in gradients:
        plain, slow = (CostModel(analysis, IMAGES, r) for r in (NOMINAL, long_rows(0.6 * row_of(node))))
        assert (slow.op_in_loop(loops[-1], node) > plain.op_in_loop(loops[-1], node)) is is_slower
        assert slow.lower_bound.op_in_loop(loops[-1], node) == plain.lower_bound.op_in_loop(loops[-1], node)


def test_cost_small_results_have_no_first_touch():
    analysis, loops = tile_loops(two(3), (4, 1), 4)
    conv_ = next(node for node in loops[0].body if node.op == "Conv2D")
    size = conv_.out().num_bytes(IMAGES)
    plain = CostModel(analysis, IMAGES).op_in_loop(loops[0], conv_)
    assert (
        CostModel(analysis, IMAGES, changed(first_touch=1e3, first_touch_min_bytes=size // 2)).op_in_loop(
            loops[0], conv_
        )
        == plain
    )
    assert (
        CostModel(analysis, IMAGES, changed(first_touch=1e3, first_touch_min_bytes=size // 64)).op_in_loop(
            loops[0], conv_
        )
        > plain + 1
    )


@pytest.mark.parametrize("op", ["Conv2D", "Conv2DBackpropFilter"])
def test_cost_convolutions_include_copied_windows(op):
    slow = changed(unfolded={op: 1e6})
    for (plain, node), (copying, _) in zip(one_op(op, NOMINAL), one_op(op, slow), strict=True):
        few, filters = (node.inputs[2], node.out()) if op.endswith("Filter") else (node.out(), node.inputs[1])
        windows = math.prod(few.shape[1:3]) * math.prod(filters.shape[:3])
        assert copying - plain == pytest.approx(IMAGES * windows * 8 / 1e6)


def test_cost_direct_volume_gradients_use_direct_rate(monkeypatch):
    """Direct kernels copy windows of the other gradient, and none of the image."""

    def step(x, kernel):
        grad = tf.raw_ops.Conv3D(input=x, filter=kernel, strides=[1] * 5, padding="SAME")
        return tf.raw_ops.Conv3DBackpropFilterV2(
            input=x, filter_sizes=kernel.shape, out_backprop=grad, strides=[1] * 5, padding="SAME"
        )

    specs = [tf.TensorSpec(shape, tf.float64) for shape in ((1, 8, 8, 8, 4), (3, 3, 3, 4, 6))]
    analysis = GraphAnalysis(canonicalize.read_canonical(tf.function(step).get_concrete_function(*specs)))
    (node,) = (node for node in analysis.order if node.op == "Conv3DBackpropFilterV2")
    for overhead, op, other_op, channels in ((1000, node.op, DIRECT, 4), (0, DIRECT, node.op, 6)):
        monkeypatch.setattr(kernel_scratch, "MAX_UNFOLDING_RATIO", overhead)
        plain, slow, same = (
            CostModel(analysis, 1, changed(unfolded=rates)).op(node) for rates in ({}, {op: 1e6}, {other_op: 1e6})
        )
        assert same == plain
        assert slow - plain == pytest.approx(8**3 * 27 * channels * 8 / 1e6)


def test_cost_of_aliases_and_shapes_is_zero():
    analysis, _ = tile_loops(two(3), (1, 1))
    costs = CostModel(analysis, IMAGES, changed(call=1.0))
    free = [node for node in analysis.order if node.op in ("Reshape", "Shape", "Const", "ReadVariableOp")]
    assert free and {costs.op(node) for node in free} == {0}


def test_cost_of_loop_includes_slices_and_writes():
    analysis, loops = tile_loops(two(3), (2, 1), 2)
    costs = CostModel(analysis, IMAGES)
    forward = loops[0]
    around = costs.tile_loop(forward) - sum(costs.op_in_loop(forward, node) for node in forward.body)
    whole = sum(t.num_bytes(IMAGES) for t in (*forward.reads, *forward.writes))
    assert 2 * whole / 1.25e10 <= around < 4 * whole / 1.25e10


@pytest.mark.parametrize("count", [1, 4])
def test_cost_of_loop_includes_merged_moments(count):
    step = keras_step(lambda x: conv(4)(layers.BatchNormalization()(conv(4)(x))), (12, 10), IMAGES, steps=1)
    analysis = GraphAnalysis(canonicalize.read_canonical(step.concrete_fn))
    roles = assign_levels(analysis)
    segment = barrier_segment(analysis, "segment1", roles, CheckpointSelection(analysis, roles, batch=IMAGES))
    loops = BarrierPlanner(analysis, segment).tile_loops(lambda loop: Grid(1, (count, 1)))
    (tile_loop,) = (tile_loop for tile_loop in loops if tile_loop.moments)
    ((pair, *others),) = [[pair.image for pair in tile_loop.moments]]
    assert not others
    for rate, times in (("Mean", 2), ("SquaredDifference", 2)):
        slow = changed(touched={**NOMINAL.touched, rate: 1e6})
        others = sum(
            t.num_bytes(IMAGES) for n in tile_loop.body if n.op == rate for t in (*n.inputs, n.out()) if t.shape
        )
        assert not others, "what merges the moments of the turns does without these operations"
        difference = CostModel(analysis, IMAGES, slow).tile_loop(tile_loop) - CostModel(analysis, IMAGES).tile_loop(
            tile_loop
        )
        size = pair.num_bytes(IMAGES)
        assert difference == pytest.approx(times * size / 1e6 - times * size / NOMINAL.touched[""])
    (merging,) = (one for one in lower(analysis, tile_loop).outputs if isinstance(one, MergeMoments))
    assert InstructionCosts(analysis, IMAGES, count).of_instruction(merging).calls == 12


@pytest.mark.parametrize("grid", [(1, 1), (4, 1)])
def test_cost_convolution_gradients_share_cores(grid, plan_with):
    """While one gradient copies windows of one image after another, on one core, the other uses the remaining cores.

    Tests take caches to be so small that images are unfolded one by one.
    """
    rates = changed(unfolded={"Conv2DBackpropInput": 1e6, "Conv2DBackpropFilter": 2e6})
    for threads, idle in ((1, 0.0), (2, 0.5), (4, 0.75)):
        plan_with(intra_op_threads=threads)
        analysis, loops = tile_loops(two(3), grid)
        costs = CostModel(analysis, IMAGES, rates)
        (pair,) = costs.gradient_pairs.items()
        assert {node.op for node in pair} == rates.unfolded.keys()
        for whole, alone in (
            (costs.step(analysis.order), {node: costs.op(node) for node in analysis.order}),
            (costs.body(loops[-1]), {node: costs.op_in_loop(loops[-1], node) for node in loops[-1].body}),
        ):
            times = [alone[node] for node in pair]
            assert sum(alone.values()) - whole == pytest.approx(min(*times, idle * sum(times)), rel=1e-3)


def added(x):
    """Apply two convolutions whose results have the same gradient."""
    x = conv(4)(x)
    return layers.Add(name="out")([conv(5)(x), conv(5, 1)(x)])


def test_gradient_pairs_belong_to_one_convolution():
    analysis, _ = tile_loops(added, (1, 1))
    pairs = CostModel(analysis, IMAGES).gradient_pairs
    assert len(pairs) == 3 - 1  # No op reads the gradient of the first convolution's image.
    for first, second in pairs.items():
        kernel = second.inputs[1] if second.op == "Conv2DBackpropInput" else first.inputs[1]
        filters = first if first.op == "Conv2DBackpropFilter" else second
        assert {first.op, second.op} == {"Conv2DBackpropInput", "Conv2DBackpropFilter"}
        assert filters.out().shape == kernel.shape and first.inputs[-1] == second.inputs[-1]


@pytest.mark.parametrize("body", [two(3), pooled, added])
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_lower_bound_holds_for_all_grids(body, threads, plan_with):
    plan_with(intra_op_threads=threads)
    unfolded = {"Conv2DBackpropInput": 1e8, "Conv2DBackpropFilter": 3e8}
    rates = changed(first_touch=1e6, first_touch_min_bytes=2**11, unfolded=unfolded, call=1e-7)
    faster = 0
    for grid, batch in (((1, 1), 1), ((1, 1), 2), ((1, 1), IMAGES), ((2, 1), IMAGES), ((6, 5), 1)):
        analysis, loops = tile_loops(body, grid, batch)
        costs = CostModel(analysis, IMAGES, rates)
        one, whole = tile_loops(body, (1, 1))
        for tile_loop, alone in zip(loops, whole, strict=True):
            least = CostModel(one, IMAGES, rates).lower_bound.tile_loop(alone)
            assert least <= costs.tile_loop(tile_loop) * (1 + 1e-9)
            faster += costs.tile_loop(tile_loop) < CostModel(one, IMAGES, rates).tile_loop(alone)
        assert costs.lower_bound.step(analysis.order) <= costs.step(analysis.order)
    assert faster, "one turn is not always the fastest"


def test_lower_bound_holds_for_finer_grids():
    step = keras_step(two(3), (120, 100), IMAGES, steps=1)
    analysis = GraphAnalysis(canonicalize.read_canonical(step.concrete_fn))
    costs = CostModel(analysis, IMAGES)
    plans = [plan(analysis, [Cut(grid=(count, count))])[0].loops for count in (2, 3, 4, 6, 8)]
    for number, coarse in enumerate(plans):
        least = [costs.lower_bound.tile_loop(tile_loop) for tile_loop in coarse]
        for fine in plans[number:]:
            assert all(bound <= costs.tile_loop(one) for bound, one in zip(least, fine, strict=True))


@pytest.mark.parametrize("first", ["seconds", "lower bound"])
def test_cached_times_of_loop_equal_those_of_a_new_model(first):
    analysis, (tile_loop, *_) = tile_loops(two(3), (2, 1), 2)
    rates = changed(first_touch=1e6, first_touch_min_bytes=2**11, call=1e-7)

    def seconds(costs):
        return costs.tile_loop(tile_loop)

    def least(costs):
        return costs.lower_bound.tile_loop(tile_loop)

    costs = CostModel(analysis, IMAGES, rates)
    before, after = (seconds, least) if first == "seconds" else (least, seconds)
    before(costs)
    assert after(costs) == after(CostModel(analysis, IMAGES, rates)) == after(costs)
    assert seconds(costs) != least(costs)
    assert seconds(CostModel(analysis, IMAGES, changed(call=1.0))) > 10 * seconds(costs)


@pytest.mark.parametrize(("batch", "grid"), [(IMAGES, (1, 1)), (2, (1, 1)), (3, (1, 1)), (IMAGES, (3, 1))])
def test_iteration_call_has_images_of_one_tile(batch, grid):
    analysis, loops = tile_loops(two(1), grid, batch)
    costs, call = CostModel(analysis, IMAGES), kernel_scratch.KernelShape(IMAGES, 120, 120)
    gradients = [
        (tile_loop, node) for tile_loop in loops for node in tile_loop.body if node.op == "Conv2DBackpropFilter"
    ]
    assert gradients
    for tile_loop, node in gradients:
        pixels = 120 // math.prod(grid)
        coverage = _coverage(analysis, tile_loop, node)
        assert costs.iteration_call(call, tile_loop, coverage) == kernel_scratch.KernelShape(
            math.ceil(IMAGES / batch), pixels, pixels, is_tile=True
        )


def test_concurrency_savings_are_zero_for_busy_kernels(plan_with):
    plan_with(intra_op_threads=IMAGES, l3_bytes=2**25)
    analysis, _ = tile_loops(two(3), (1, 1))
    costs = CostModel(analysis, IMAGES, changed(unfolded={"Conv2DBackpropInput": 1e6, "Conv2DBackpropFilter": 1e6}))
    assert costs.gradient_pairs and costs.concurrency_savings(analysis.order) == 0, "all images at once"
    assert costs.concurrency_savings(node for node in analysis.order if node.op != "Conv2DBackpropFilter") == 0


def test_time_of_a_step_does_not_depend_on_the_order_of_its_ops():
    """Sets have another order in each process, and rounding decides between equally fast plans."""
    analysis = GraphAnalysis(canonicalize.read_canonical(keras_step(chain, (24, 20), 2, steps=1).concrete_fn))
    costs, nodes = CostModel(analysis, 2, NOMINAL), list(analysis.order)
    shuffled = [random.Random(seed).sample(nodes, len(nodes)) for seed in range(5)]
    assert len({sum_in_order(map(costs.op, order)) for order in shuffled}) > 1
    assert {costs.step(order) for order in shuffled} == {costs.step(nodes)}


def test_sum_in_order_rounds_after_each_addition():
    assert sum_in_order([0.1] * 10) == 0.9999999999999999
    assert sum_in_order(iter(())) == 0.0


def emitted_ops(analysis, segment_plan):
    """Yield (loop, number of its ops on integers, number of its other ops); views and constants are free."""
    free = {"Const", "Identity", "NoOp", "Placeholder", "EnsureShape", "Reshape"}
    for tile_loop in segment_plan.loops:
        graph = trace_loop(analysis, segment_plan.segment, tile_loop)
        (loop,) = (op for op in graph.get_operations() if op.type in ("While", "StatelessWhile"))
        name = loop.get_attr("body").name
        (body,) = (body for body in graph.as_graph_def().library.function if body.signature.name == name)
        ops = [op for op in function_def_to_graph(body).get_operations() if op.type not in free]
        host = [op for op in ops if op.outputs and all(t.dtype in (tf.int32, tf.bool) for t in op.outputs)]
        yield tile_loop, len(host), len(ops) - len(host)


@pytest.mark.parametrize(
    "cut",
    [Cut(grid=(2, 2)), Cut(grid=(1, 1), batch=2), Cut(grid=(2, 2), batch=2), Cut(grid=(3, 1), halo="carry")],
    ids=["tiles", "images", "both", "strips"],
)
@pytest.mark.parametrize("body", [two(3), pooled, lambda x: conv(4, name="out")(conv(4)(layers.ReLU()(conv(4)(x))))])
def test_cost_of_starting_ops_is_near_number_of_emitted_ops(body, cut):
    step = keras_step(body, (12, 10), IMAGES, steps=1)
    with planning_for_card("rtx2080ti"):
        analysis = GraphAnalysis(canonicalize.read_canonical(step.concrete_fn))
    (segment_plan,) = plan(analysis, [cut])
    free = {"flops": {"": math.inf}, "touched": {"": math.inf}, "weights": math.inf}
    for tile_loop, num_host, num_device in emitted_ops(analysis, segment_plan):
        tiles = tile_loop.grid.num_tiles
        calls, host_calls = (
            CostModel(analysis, IMAGES, changed(**free, **{rate: 1.0})).tile_loop(tile_loop) / tiles
            for rate in ("call", "host_call")
        )
        assert calls == pytest.approx(num_device, rel=0.2), tile_loop.name
        assert host_calls == pytest.approx(num_host, rel=0.4), tile_loop.name


def test_accelerator_starts_ops_while_it_computes():
    analysis, _ = tile_loops(two(3), (1, 1))
    (first, *_) = (node for node in analysis.order if node.op == "Conv2D")
    alone = CostModel(analysis, IMAGES).op(first)
    for call, together in ((alone / 2, alone), (3 * alone, 3 * alone)):
        assert CostModel(analysis, IMAGES, changed(call=call)).op(first) == pytest.approx(alone + call)
        assert CostModel(analysis, IMAGES, changed(call=call, overlapped=True)).op(first) == pytest.approx(together)


def test_time_with_files_waits_for_reads_and_overlaps_writes():
    rates = changed(copied=100.0, disk_write=10.0, disk_read=20.0)
    assert rates.with_files(5.0, written=200, read=400, to_disk=False) == pytest.approx(5 + (200 + 400) / 100)
    written, read = 200 / 10, 400 / 20
    assert rates.with_files(5.0, 200, 400, to_disk=True) == pytest.approx(written + 200 / 100 + 400 / 100 + read)
    assert rates.with_files(50.0, 200, 400, to_disk=True) == pytest.approx(50 + 200 / 100 + 400 / 100 + read)
