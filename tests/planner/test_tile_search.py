"""Test the search for tiles within a budget: grids, paths through blocks, and preferences."""

import dataclasses
import functools
import gc
import itertools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from checkpoint_sets import smallest_segment
from equivalence import keras_step
from gradients import gradient_step, model_of
from keras import layers
from nets import chain

import tflms_sft
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize.canonicalize import read_canonical
from rewriters.emission.tile_pass import plan_segment
from rewriters.tiling import ft_segments, tile_grids
from rewriters.tiling.ft_segments import find_components
from rewriters.tiling.tile_grids import auto_grids, coarsest_fitting, loop_grids, thinned
from rewriters.tiling.tile_planner import Grid, Halo, TileLoop
from tflms_sft import AutoParams
from tflms_sft._barriers.barriers import Barriers
from tflms_sft._search.block_chain import BlockChain, backward_positions
from tflms_sft._search.chain_stretches import ChainStretches
from tflms_sft._search.priced_search import PricedSearch
from tflms_sft._search.segment_tilings import _checkpoint_candidates
from tflms_sft._search.traced_step import MAX_SKELETONS, analyse_step, predict


def step_of(height, width, depth=3, filters=8, batch=1, pooled=True):
    image = x = keras.Input((height, width, 3), batch_size=batch)
    for _ in range(depth):
        for _ in range(2):
            x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = layers.MaxPool2D(2)(x) if pooled else x
    return gradient_step(model_of(image, x))


@functools.cache
def segment_of(height, width):
    step = step_of(height, width)
    analysis = GraphAnalysis(read_canonical(step.get_concrete_function(tf.TensorSpec((1, height, width, 3)))))
    (segment,), _ = ft_segments.auto_segments(analysis, None, 1, {})
    return analysis, segment


@pytest.mark.parametrize("shape", [(64, 64), (256, 64), (64, 40), (8, 8), (800, 8)])
def test_auto_grids_grow_from_one_tile_and_keep_tiles_square(shape):
    grids = [grid.spatial for grid in auto_grids(*segment_of(*shape), 1)]
    rows, columns = shape[0] // 8, shape[1] // 8  # The exit, after three pools.
    assert grids[0] == (1, 1)
    most = 64 if columns > 1 else 4096
    assert grids[-1] == (min(rows, most), min(columns, most)), "as many tiles as the exit has rows"
    for before, after in zip(grids, grids[1:], strict=False):
        assert sorted(b - a > 0 for a, b in zip(before, after, strict=True)) == [False, True], "one axis at a time"
    for high, wide in grids:
        if 1 < high < min(rows, most) and 1 < wide < min(columns, most):
            assert 0.3 < (rows / high) / (columns / wide) < 3


@pytest.mark.parametrize("batch", [2, 7, 100])
def test_auto_grids_split_batch_before_image(batch):
    grids = auto_grids(*segment_of(64, 64), batch)
    images = [grid.batch for grid in grids]
    assert images == sorted(images) and images[0] == 1 and images[-1] == batch
    assert all(grid.spatial == (1, 1) for grid in grids if grid.batch < batch)
    alone = [grid.spatial for grid in auto_grids(*segment_of(64, 64), 1)]
    assert [grid.spatial for grid in grids if grid.batch == batch] == alone


def test_grids_of_sequence_grow_evenly_to_one_token_per_tile():
    """A sequence is split along one axis only, more often than an image along each; tiles of one token are slow."""
    tokens = keras.Input((3000, 4), batch_size=1)
    step = gradient_step(keras.Model(tokens, layers.Conv1D(4, 3, padding="same")(tokens)))
    analysis = GraphAnalysis(read_canonical(step.get_concrete_function(tf.TensorSpec((1, 3000, 4)))))
    (segment,), _ = ft_segments.auto_segments(analysis, None, 1, {})
    for grids in (auto_grids(analysis, segment, 1), loop_grids(analysis, segment.exits, 1)):
        counts = [grid.num_tiles for grid in grids]
        assert counts[0] == 1 and counts[-1] == 3000
        assert all(before < after <= 2 * before for before, after in itertools.pairwise(counts))


@pytest.mark.parametrize("batch", [1, 4, 6, 50])
def test_thinned_grids_keep_whole_images_and_finest_grid(batch):
    grids = auto_grids(*segment_of(64, 64), batch)
    thin = thinned(grids, 1.9)
    assert Grid(batch, (1, 1)) in thin and thin[0] == grids[0] and thin[-1] == grids[-1]
    assert thin == [grid for grid in grids if grid in thin] and len(thin) < len(grids)


@pytest.mark.parametrize("limit", [0, 1, 7, 30, 64, 99, 100, 4000])
@pytest.mark.parametrize("constant", [0, 5, 90])
def test_coarsest_fitting_returns_first_fitting_grid(limit, constant):
    grids = [Grid(1, (count, 1)) for count in range(1, 60)]
    asked = []

    def num_bytes(grid):
        asked.append(grid)
        return constant + 100 // grid.num_tiles

    first = next((grid for grid in grids if constant + 100 // grid.num_tiles <= limit), None)
    assert coarsest_fitting(grids, num_bytes, limit) == first
    assert len(asked) == len(set(asked)) <= 12


def test_budget_splits_long_side_of_image_first():
    step = step_of(512, 32)
    images = np.zeros((1, 512, 32, 3), "float32")
    plain = tflms_sft.rewrite(step, AutoParams("1GiB"), images).plan.original.peak_bytes
    plan = tflms_sft.rewrite(step, AutoParams(plain // 2), images).plan
    _, rows, columns = plan.segments[0].backward_num_tiles
    assert rows > columns


def test_backward_positions_lie_behind_their_forward_ops():
    analysis, _ = segment_of(64, 64)
    (component,), _ = ft_segments.find_components(analysis)
    position = {node: index for index, node in enumerate(component.nodes)}
    positions = backward_positions(analysis, position, analysis.position[component.nodes[0]])
    forward = [index for index, node in enumerate(component.nodes) if node.op == "Conv2D"]
    filters = [positions[node] for node in analysis.order if node.op == "Conv2DBackpropFilter"]
    assert len(filters) == len(forward) == 6
    # Behind their convolution and before the next one, though what they read lies before it.
    for position, here, following in zip(sorted(filters), forward, [*forward[1:], len(component.nodes)], strict=True):
        assert here < position < following


def dilated_step():
    image = x = keras.Input((48, 40, 3))
    for _ in range(4):
        x = layers.Conv2D(8, 3, dilation_rate=2, padding="same", activation="silu")(x)
    return gradient_step(model_of(image, x), tf.TensorSpec((None, 48, 40, 3)))


def test_space_to_batch_tensors_are_not_checkpointed():
    """Space-to-batch folding of dilated convolutions scatters the images of an iteration."""
    traced = analyse_step(dilated_step().get_concrete_function(tf.TensorSpec((4, 48, 40, 3))))
    (segment,), _ = ft_segments.auto_segments(traced.analysis, None, 4, {})
    folded = [node for node in segment.forward if traced.analysis.entries_per_image(node.out()) != 1]
    tensors = [candidate.tensor for candidate in _checkpoint_candidates(traced, segment)]
    assert folded and tensors and {tensor.node for tensor in tensors}.isdisjoint(folded)


def test_budgets_of_dilated_convolutions_compute_the_same():
    step, images = dilated_step(), np.random.default_rng(0).normal(size=(4, 48, 40, 3)).astype("float32")
    want = step(images)
    plain = tflms_sft.rewrite(step, AutoParams("1GiB"), images).plan.original.peak_bytes
    for part in (0.9, 0.7, 0.6):
        fast = tflms_sft.rewrite(step, AutoParams(int(part * plain), swap=False), images)
        for a, b in zip(tf.nest.flatten(fast(images)), tf.nest.flatten(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_priced_search_keeps_loops_of_its_plan_only():
    """Loops of rejected plans would stay in memory during training."""
    traced = analyse_step(step_of(128, 128).get_concrete_function(tf.TensorSpec((1, 128, 128, 3))))
    gc.collect()
    before = {id(one) for one in gc.get_objects() if isinstance(one, TileLoop)}
    search = PricedSearch(traced)
    plan = search.fastest_within(predict(traced, []).peak.peak_bytes // 2)
    gc.collect()
    loops = [one for one in gc.get_objects() if isinstance(one, TileLoop) and id(one) not in before]
    assert plan.plans and len(loops) == sum(len(segment.loops) for segment in plan.plans)


def test_smaller_budget_is_met_and_slower():
    step = step_of(128, 128)
    images = np.zeros((1, 128, 128, 3), "float32")
    plain = tflms_sft.rewrite(step, AutoParams("1GiB"), images).plan.original.peak_bytes
    plans = [tflms_sft.rewrite(step, AutoParams(int(plain * part)), images).plan for part in (0.6, 0.4, 0.25)]
    assert all(plan.predicted.peak_bytes <= 0.9 * plan.memory_budget for plan in plans)
    ratios = [plan.predicted.time_ratio for plan in plans]
    assert 1 <= ratios[0] < ratios[1] < ratios[2]


def test_forward_loop_has_at_most_tiles_of_backward_loop():
    step = step_of(128, 128)
    images = np.zeros((1, 128, 128, 3), "float32")
    plain = tflms_sft.rewrite(step, AutoParams("1GiB"), images).plan.original.peak_bytes
    segments = tflms_sft.rewrite(step, AutoParams(int(plain * 0.4)), images).plan.segments
    tiles = [(np.prod(s.num_tiles), np.prod(s.backward_num_tiles)) for s in segments]
    assert all(forward <= backward for forward, backward in tiles)
    assert any(forward < backward for forward, backward in tiles)


def test_budget_splits_batch_before_image():
    step = step_of(64, 64, batch=8)
    images = np.zeros((8, 64, 64, 3), "float32")
    plain = tflms_sft.rewrite(step, AutoParams("1GiB"), images).plan.original.peak_bytes
    plan = tflms_sft.rewrite(step, AutoParams(plain // 2), images).plan
    tiles = [segment.backward_num_tiles for segment in plan.segments]
    assert any(images > 1 for images, _, _ in tiles)
    assert all(images == 8 or grid == [1, 1] for images, *grid in tiles)
    assert plan.predicted.time_ratio < 1.5  # The recomputation of the forward pass, and hardly anything twice.


@pytest.mark.parametrize(
    ("size", "batch", "depth"), [(64, 1, 3), pytest.param(64, 8, 3, marks=pytest.mark.slow), (33, 3, 1)]
)
def test_smallest_budget_is_below_original_peak_and_met(size, batch, depth):
    step = step_of(size, size, depth, batch=batch)
    images = np.zeros((batch, size, size, 3), "float32")
    plain = tflms_sft.rewrite(step, AutoParams("1GiB"), images).plan.original.peak_bytes
    with pytest.raises(tflms_sft.BudgetError) as caught:
        tflms_sft.rewrite(step, AutoParams(1), images)
    smallest = caught.value.smallest_bytes
    assert smallest < plain
    assert tflms_sft.rewrite(step, AutoParams(smallest, max_slowdown=math.inf), images).plan.changed
    with pytest.raises(tflms_sft.BudgetError) as caught:
        tflms_sft.rewrite(step, AutoParams(int(0.9 * smallest)), images)
    assert 0.9 * smallest < caught.value.smallest_bytes <= smallest


def test_predict_with_cached_skeleton_equals_fresh_one():
    """Compare the prediction with that of a step without cached skeletons."""
    traced = analyse_step(keras_step(chain, (24, 20), 2, steps=1).concrete_fn)
    barriers = Barriers(traced)
    segments = [barriers.segment("segment1", barriers.selections[0]), smallest_segment(barriers)]
    counts = []
    for segment in segments:
        for halo, grid in ((h, Grid(1, (n, 1))) for h in Halo for n in (1, 2, 3, 6)):
            plan = plan_segment(traced.analysis, segment, grid, Grid(1, (2 * grid.spatial[0], 1)), halo)
            prediction = predict(traced, [plan])
            assert prediction == predict(dataclasses.replace(traced), [plan])
            counts.append(len(traced.models.skeletons))
    assert counts == [1] * 8 + [2] * 8, "one for each set of checkpoints"


def test_predict_caches_limited_number_of_skeletons():
    traced = analyse_step(keras_step(chain, (24, 20), 2, steps=1).concrete_fn)
    barriers = Barriers(traced)
    for _ in range(MAX_SKELETONS + 2):
        segment = smallest_segment(barriers)
        predict(traced, [plan_segment(traced.analysis, segment, Grid(1, (2, 1)))])
    assert len(traced.models.skeletons) == MAX_SKELETONS


def equal_blocks():
    step = step_of(48, 48, 16, pooled=False)
    return step, analyse_step(step.get_concrete_function(tf.TensorSpec((1, 48, 48, 3))))


def test_bounds_of_equal_blocks_have_equal_distance():
    (chain,) = PricedSearch(equal_blocks()[1])._chains
    inner = [b - a for a, b in itertools.pairwise(chain.bounds[1:-2])]
    assert len(inner) > 3 and len(set(inner[:-1])) == 1, "as many blocks each, so that one is planned for all"


def test_priced_search_of_equal_blocks_keeps_several_checkpoints():
    (step, traced), images = equal_blocks(), np.random.default_rng(0).normal(size=(1, 48, 48, 3))
    search = PricedSearch(traced)
    limit = traced.fixed_bytes + (traced.plain.peak.peak_bytes - traced.fixed_bytes) * 2 // 5
    plan = search.fastest_within(limit)
    assert plan is not None and len(plan.plans) > 2, "a checkpoint here and there is enough"
    assert plan.time_ratio < 1.6
    same = tflms_sft.verify(step, (tf.constant(images, tf.float32),), AutoParams(limit, 0, swap=False))
    assert same and len(same.plan.segments) > 2, same.summary()


@pytest.mark.parametrize("scratch_bytes", [lambda rows: 10**9, lambda rows: 10**9 + rows * 10**8])
def test_default_tiles_are_few_where_more_save_nothing(scratch_bytes, monkeypatch):
    """Assume kernels whose scratch memory exceeds all tensors that tiles split."""

    def scratch(analysis, tile_loop, batch):
        return scratch_bytes(64 // math.prod(tile_loop.grid.spatial))

    monkeypatch.setattr("tflms_sft._planner.requested_tiles.iteration_peak_bytes", scratch)
    plan = tflms_sft.rewrite(step_of(32, 32, 1), tflms_sft.SFTParams(), tf.TensorSpec((1, 32, 32, 3))).plan
    tiles = {math.prod(segment.num_tiles[-2:]) for segment in plan.segments}
    assert tiles <= ({1} if scratch_bytes(64) == scratch_bytes(1) else set(range(32, 64)))


def test_budget_tiles_a_single_convolution_for_the_scratch_of_its_gradients(plan_with):
    """Between two ops that cannot run in tiles; TensorFlow's own kernels unfold the image."""
    keras.config.set_floatx("float32")
    image = keras.Input((64, 64, 8), batch_size=4)
    x = layers.Conv2D(32, 9, padding="same", activation="relu", name="single")(keras.ops.roll(image, 3, axis=1))
    x = keras.ops.roll(x, 3, axis=2)
    step = gradient_step(model_of(image, x), tf.TensorSpec(image.shape))
    plan_with(l3_bytes=30 * 2**20)
    original = tflms_sft.rewrite(step, AutoParams("1TiB")).plan.original
    assert any("kernel scratch of single" in name and "BackpropFilter" in name for name, _ in original.own)
    plan = tflms_sft.rewrite(step, AutoParams(int(0.9 * original.peak_bytes), headroom=0, swap=False)).plan
    (segment,) = plan.segments
    assert segment.backward_ops and plan.predicted.peak_bytes <= 0.9 * original.peak_bytes


def test_only_the_last_blocks_of_a_step_without_gradients_sum_their_results():
    """Sums may run ops of later blocks, which may be a segment of their own."""

    @tf.function
    def step(image):
        first = tf.nn.relu(tf.nn.conv2d(image, tf.ones((3, 3, 3, 4)), 1, "SAME"))
        second = tf.nn.relu(tf.nn.conv2d(first, tf.ones((3, 3, 4, 4)), 1, "SAME"))
        return tf.reduce_sum(tf.square(first)), tf.reduce_sum(tf.square(second))

    traced = analyse_step(step.get_concrete_function(tf.TensorSpec((1, 64, 64, 3))))
    (component,), _ = find_components(traced.analysis)
    chain, end, summed = BlockChain(traced, component), len(component.nodes), {}
    for first in range(end):
        for last in range(first + 1, end + 1):
            if tilings := chain.tilings(first, last):
                summed[first, last] = any(tiling.segment.final for tiling in tilings)
    assert summed[0, end]
    assert not any(is_summed for (_, last), is_summed in summed.items() if last < end)


def test_thin_strips_of_a_large_image_are_split_along_their_longest_side(monkeypatch):
    monkeypatch.setattr(tile_grids, "known_extents", lambda *_: [(512, 2048)])
    grids = [grid.spatial for grid in tile_grids.loop_grids(None, [], batch=1)]
    assert (64, 1) in grids and (96, 1) not in grids and grids[-1] == (512, 2048)
    strips = [grid.spatial for grid in tile_grids.loop_grids(None, [], batch=1, rows_only=True)]
    assert (96, 1) in strips and strips[-1] == (512, 1)


@pytest.mark.parametrize("skips", [False, True])
def test_skip_without_gradients_takes_memory_until_the_last_layer_that_reads_it(skips):
    image = x = keras.Input((128, 128, 3), batch_size=1)
    x = first = layers.Conv2D(16, 3, padding="same", activation="relu")(x)
    for _ in range(4):
        x = layers.Conv2D(16, 3, padding="same", activation="relu")(x)
    x = layers.Add()([first, x]) if skips else x
    model = model_of(image, layers.Conv2D(2, 3, padding="same")(x))
    call = tf.function(lambda images: model(images, training=False), autograph=False)
    traced = analyse_step(call.get_concrete_function(tf.TensorSpec((1, 128, 128, 3))))
    (component,), _ = find_components(traced.analysis)
    chain = BlockChain(traced, component)
    stretches = ChainStretches(traced, [chain])
    relu, add = (
        next(number for number, node in enumerate(component.nodes) if node.op in ops)
        for ops in (("Relu",), ("AddV2", "AddN", "Add") if skips else ("Conv2D",))
    )
    begins = [one for one in stretches.stretches if one.begin == 0 and chain.bounds[one.end] == relu + 1]
    assert len(begins) > 1, "untiled, and in tiles"
    last = next(number for number, bound in enumerate(chain.bounds) if bound > add) - 1 if skips else 1
    for stretch in begins:
        usage = sum(options[0].usage for options in (stretch.ways, *stretch.homes))
        assert np.all(usage[1 : last + 1] >= 128 * 128 * 16 * 4) and not usage[last + 1 :].any()
