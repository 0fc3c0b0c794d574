"""Strips that carry rows instead of recomputing them (LR-CNN's 2PS): equal results, no row computed twice."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import TOLERANCE, Cut, differing, error, find, keras_step, model_step, plan, rewrite
from gradients import gradient_step, model_of
from keras import layers
from nets import NORMALISED, PLAIN, cell, conv, dense_block, dilated, enlarged, masked, separable, unet, vgg

import tflms_sft
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize import canonicalize
from rewriters.device.allocator import ExactAllocator
from rewriters.device.peak_memory import peak_bytes_of
from rewriters.emission.loop_emitter import IterationEmitter
from rewriters.errors import NotTileableError
from rewriters.estimates.loop_memory import loop_iterations
from rewriters.estimates.op_cost import CostModel
from rewriters.ir.graph import Node
from rewriters.rules.intervals import Interval
from rewriters.rules.registry import TileKind
from rewriters.tiling import row_frontiers
from rewriters.tiling.row_frontiers import Frontier
from rewriters.tiling.row_planner import MAX_RECOMPUTE_FLOPS_PER_BYTE, cheap_to_recompute
from tflms_sft import SegmentSpec, SFTParams
from tflms_sft._util.byte_sizes import format_bytes


def rows(number, backward=None, batch=1, **options):
    back = None if backward is None else (backward, 1)
    return Cut(grid=(number, 1), backward_grid=back, batch=batch, halo="carry", **options)


def analysed(step):
    return GraphAnalysis(canonicalize.read_canonical(step.concrete_fn))


def planned(step, cut):
    return plan(analysed(step), [cut])[0]


def rewritten_by(step, **params):
    """Return the differences of a step rewritten by `SFTParams`, and its plan."""
    fast = tflms_sft.rewrite(step.function, SFTParams(halo="carry", **params), *step.specs)
    want, got = step.run(step.concrete_fn), step.run(fast.concrete_function)
    assert list(want) == list(got)
    errors = {name: error(got[name], want[name]) for name in want}
    return {name: value for name, value in errors.items() if not value <= TOLERANCE}, fast.plan


# Equal results ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", PLAIN, ids=lambda net: net.__name__)
def test_row_planner_equals_original_step(net):
    step = keras_step(net, (50, 21), 3, False, keras.optimizers.Adam(0.01), steps=2)
    thin = min(planned(step, rows(1)).segment.exits[0].shape[1], 12)
    assert not differing(step, rows(thin, 4, batch=2))
    assert not differing(step, rows(2, 5))


OTHER = {"masked": (masked, TOLERANCE), "dilated": (dilated, TOLERANCE), "enlarged": (enlarged, 1e-5)}


@pytest.mark.parametrize(("net", "tolerance"), OTHER.values(), ids=OTHER)
def test_row_planner_other_ops_equal_original_step(net, tolerance):
    step = keras_step(net, (50, 21), 3, False, keras.optimizers.Adam(0.01), steps=2)
    assert not differing(step, rows(5, 3, batch=2), tolerance=tolerance)
    assert not differing(step, rows(2, 6), tolerance=tolerance)


@pytest.mark.parametrize("net", [separable, unet, cell], ids=lambda net: net.__name__)
@pytest.mark.parametrize("numbers", [(1, 4), (4, 1)], ids=str)
def test_row_planner_one_strip_in_one_phase_equals_original_step(net, numbers):
    """A single iteration computes full-size tensors, rows at their end that no result needs included."""
    assert not differing(keras_step(net, (50, 21), steps=1), rows(*numbers))


def joined_exits(x):
    """The gradient of the convolution needs one column less than the pool."""
    x = conv(4, activation=None)(conv(3)(x))
    first = conv(5, strides=2, padding="valid", name="first")(x)
    return layers.Concatenate(name="out")([first, layers.AveragePooling2D(2, name="second")(x)[:, 1:, 1:]])


def test_row_planner_saved_rows_narrower_than_forward_rows():
    step = keras_step(joined_exits, (30, 18), steps=1)
    assert not differing(step, rows(3, exit=("first", "second")))
    assert not differing(step, rows(5, 3, exit=("first", "second")))


def split_exit(x):
    """One result of a split is an exit, the other one is read inside."""
    exit_, x = keras.ops.split(conv(4)(conv(3)(x)), 2, axis=-1)
    x = layers.AveragePooling2D(2, name="out")(conv(2, name="inner")(conv(2, 5)(x)))
    return layers.Concatenate()([keras.ops.flip(exit_, 1)[:, ::2, ::2][:, : x.shape[1], : x.shape[2]], x])


def test_row_planner_op_with_one_exit_of_several_results():
    step = keras_step(split_exit, (30, 18), steps=1)
    assert {tensor.node.op for tensor in planned(step, rows(4)).segment.exits} == {"Split", "AvgPool"}
    assert not differing(step, rows(4))
    assert not differing(step, rows(2, 5))


def test_row_planner_without_carried_rows_has_even_borders():
    step = keras_step(vgg, (224, 22), steps=1)
    segment_plan = planned(step, rows(4, exit="conv2d"))
    assert not segment_plan.loops[0].carries
    (exit_,) = segment_plan.segment.exits
    assert np.ptp(segment_plan.loops[0].cells[exit_][0].size) <= 1


@pytest.mark.parametrize(
    "few_flops", [pytest.param(MAX_RECOMPUTE_FLOPS_PER_BYTE, marks=pytest.mark.slow), -1.0], ids=["dear", "all"]
)
@pytest.mark.parametrize("net", NORMALISED, ids=lambda net: net.__name__)
def test_row_barrier_planner_equals_original_step(net, few_flops, monkeypatch):
    """Carry the rows of expensive ops alone, or of all ops."""
    monkeypatch.setattr("rewriters.tiling.row_planner.MAX_RECOMPUTE_FLOPS_PER_BYTE", few_flops)
    step = keras_step(net, (17, 14), 3, False, keras.optimizers.SGD(0.1, momentum=0.9))
    wrong, step_plan = rewritten_by(step, num_tiles=(2, 3, 1), backward_num_tiles=(1, 9, 1))
    assert not wrong
    assert step_plan.segments


def test_row_planner_single_strip_is_bit_identical():
    step = keras_step(vgg, (19, 22), steps=1)
    assert not differing(step, rows(1), tolerance=0)


def test_row_planner_max_strips_is_rows_of_exit():
    """Strips are thinner than the rows they share, and some tensors have no rows in the last strip."""
    step = keras_step(vgg, (34, 9), steps=1)
    assert not differing(step, rows(8))
    with pytest.raises(NotTileableError, match="8 rows, fewer than the 9 tiles"):
        planned(step, rows(9))
    with pytest.raises(ValueError, match="at most 8 along the height"):
        rewritten_by(step, num_tiles=(9, 1), segments=[SegmentSpec("conv2d", "out")])


@pytest.mark.parametrize("stored", [("conv3",), ("pool3", "conv4")], ids=str)
def test_row_planner_stored_tensors_are_not_recomputed(stored):
    step = keras_step(vgg, (50, 22), steps=2)
    assert not differing(step, rows(5, stored=stored))
    assert not differing(step, rows(2, 6, stored=stored))


def test_row_planner_mixed_with_tiled_segments_equals_original_step():
    step = keras_step(vgg, (50, 22), steps=2)
    tiles = Cut("pool3", "out", grid=(2, 2))
    assert not differing(step, rows(6, exit="pool3"), tiles)
    assert not differing(step, Cut(exit="pool3", grid=(3, 2)), rows(4, entry="pool3"))


def test_row_planner_exit_read_inside_equals_original_step():
    """The frontier of an exit that is read inside is ahead of an even partition."""
    step = keras_step(unet, (50, 22), steps=2)
    analysis = GraphAnalysis(canonicalize.read_canonical(step.concrete_fn))
    skip = find(analysis, "conv2d")
    segment = plan(analysis, [rows(4, exit=("max_pooling2d",))])[0].segment
    assert skip in segment.exits
    assert not differing(step, rows(4, exit="max_pooling2d"))


def test_row_planner_saved_rows_can_be_swapped():
    """The swap pass treats saved rows like any other tensor."""
    step = keras_step(vgg, (50, 22), steps=2)
    whole = [SegmentSpec("conv2d", "out")]
    params = [SFTParams(num_tiles=(5, 1), segments=whole, halo="carry"), tflms_sft.LMSParams(min_bytes=1)]
    fast = tflms_sft.rewrite(step.function, params, *step.specs)
    (segment,) = fast.plan.segments
    assert segment.saved_bytes
    assert f"halo rows are carried; {format_bytes(segment.saved_bytes)} of them" in fast.plan.summary()
    assert fast.plan.swapped_bytes > segment.saved_bytes
    want, got = step.run(step.concrete_fn), step.run(fast.concrete_function)
    assert max(error(got[name], want[name]) for name in want) < TOLERANCE


def test_row_planner_volumes_equal_original_step():
    keras.config.set_floatx("float64")
    x = image = keras.Input((13, 6, 5, 2), batch_size=2)
    for filters, strides in ((3, 1), (4, 2)):
        x = layers.Conv3D(filters, 3, strides=strides, padding="same", activation="silu")(x)
    x = layers.Conv3DTranspose(3, 3, strides=2, padding="same", activation="relu")(x)
    model = keras.Model(image, layers.Dense(2)(layers.GlobalAveragePooling3D()(x)))
    numbers = np.random.default_rng(0)
    batches = [(numbers.normal(size=(2, 13, 6, 5, 2)), np.array([0, 1], "int32")) for _ in range(2)]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = model_step(model, batches, True, {"optimizer": keras.optimizers.SGD(0.1), "loss": loss})
    wrong, step_plan = rewritten_by(step, num_tiles={"depth": 5})
    assert not wrong
    assert step_plan.segments[0].num_tiles == (1, 5, 1, 1)


def test_row_planner_sequences_carry_along_length():
    keras.config.set_floatx("float64")
    x = image = keras.Input((31, 2))
    for strides in (1, 2):
        x = layers.Conv1D(3, 5, strides=strides, padding="same", activation="tanh")(x)
    model = keras.Model(image, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))
    numbers = np.random.default_rng(0)
    batches = [(numbers.normal(size=(size, 31, 2)), np.arange(size, dtype="int32") % 2) for size in (3, 2)]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = model_step(model, batches, False, {"optimizer": keras.optimizers.SGD(0.1), "loss": loss})
    wrong, step_plan = rewritten_by(step, num_tiles={"length": 4})
    assert not wrong
    assert step_plan.segments


def test_row_planner_equal_gradient_ops_stay_separate():
    """TensorFlow merges equal ops; carried rows must not be added twice to a merged result."""

    def net(x):
        shared = layers.Conv2D(3, 3, padding="same", name="shared")
        x = conv(3)(x)
        return layers.Add(name="out")([shared(x), shared(x)])

    assert not differing(keras_step(net, (30, 11), steps=2), rows(4))


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_row_planner_half_precision_equals_original_step(policy):
    """The error against float32 is as small as that of the original step."""
    keras.config.set_dtype_policy("float32")
    exact = keras_step(vgg, (34, 22), steps=1, floatx="float32")
    want = exact.run(exact.concrete_fn)
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    try:
        step = keras_step(vgg, (34, 22), steps=1, floatx="float32")
        fast = rewrite(step.concrete_fn, rows(4))
        plain, got = step.run(step.concrete_fn), step.run(fast.function)
    finally:
        keras.config.set_dtype_policy("float32")
    off = {name: (error(got[name], plain[name]), error(want[name], plain[name])) for name in plain if name in want}
    assert len(off) > 12  # Losses, gradients and weights of six layers; a loss scale has variables of its own.
    assert all(ours <= max(2 * theirs, 2e-2) for ours, theirs in off.values()), off


# No row twice ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", PLAIN, ids=lambda net: net.__name__)
def test_row_planner_computes_each_row_once(net):
    """Neither loop computes a row twice, except of cheap ops."""
    step = keras_step(net, (50, 22), steps=1)
    analysis = GraphAnalysis(canonicalize.read_canonical(step.concrete_fn))
    segment_plan = plan(analysis, [rows(3)])[0]
    recomputed = cheap_to_recompute(analysis, segment_plan.segment.forward)
    for tile_loop in segment_plan.loops:
        assert tile_loop.carries
        for node, plans in tile_loop.plans.items():
            computed, tensor = plans[0].computed, node.out()
            if computed is None or node in recomputed or tensor not in tile_loop.values:
                continue
            # A transposed convolution computes complete windows, here of 3 rows, across borders, too.
            shared = (4 * (len(computed.size) - 1) + 2) * (node.op == "Conv2DBackpropInput")
            assert computed.size.sum() <= tensor.shape[1] + shared, node.name


def test_row_planner_saved_rows_are_window_overlap():
    """A 3x3 convolution saves two rows at each border; a 2x2 pool and the first convolution save none."""
    step = keras_step(vgg, (48, 22), steps=1)
    forward, backward = planned(step, rows(4)).loops
    windows = [node for node in forward.body if node.op == "Conv2D"][2:]
    carried = {node.inputs[0] for node in windows if node.inputs[0] not in forward.reads}
    assert {save.tensor for save in forward.saves} == carried
    assert all(save.saved.shape[1] == 3 * 2 for save in forward.saves)
    assert {carry.saved for carry in backward.carries.values()} >= {save.saved for save in forward.saves}
    assert all(np.all(carry.received.size <= 2) for carry in backward.carries.values())


def test_row_planner_gradient_cells_match_forward_rows():
    """An average pool saves nothing, so that the gradient enters below it; its cells are no even partition."""
    step = keras_step(separable, (50, 37), steps=1)
    forward, backward = planned(step, rows(2)).loops
    assert len(forward.saves) == 2
    assert len(backward.carries) == 5


def test_row_planner_dense_block_carries_rows_of_all_layers():
    step = keras_step(dense_block, (50, 22), steps=1)
    forward, _ = planned(step, rows(4)).loops
    assert {save.tensor.node.op for save in forward.saves} <= {"ConcatV2", "BiasAdd"}


# Frontiers --------------------------------------------------------------------------------------------------


def interval(*pairs):
    lo, hi = zip(*pairs, strict=True)
    return Interval(np.array(lo), np.array(hi))


def test_frontier_is_monotonic():
    frontier = Frontier.of(interval((2, 6), (3, 5), (4, 9)), start=2)
    assert frontier.done.tolist() == [2, 6, 6, 9]
    assert frontier.needed.tolist() == [2, 3, 4, 9]
    computed = frontier.new(np.arange(4))
    assert computed.size.tolist() == [4, 0, 3]
    assert row_frontiers.refilled(computed).lo.tolist() == [2, 5, 6]
    assert frontier.carried(np.array([0, 2, 3])).size.tolist() == [0, 2, 0]


def test_frontier_of_written_tensor_covers_all_rows():
    frontier = Frontier.of(interval((2, 4), (4, 6)), start=0, end=8)
    assert frontier.done.tolist() == [0, 4, 8]


@pytest.mark.parametrize(
    ("weights", "tiles", "want"),
    [
        ([0, 1, 2, 3, 4, 5, 6], 3, [2, 2, 2]),
        ([0, 1, 2, 3, 4, 5, 6, 7], 3, [3, 2, 2]),
        ([0, 4, *range(5, 14)], 4, [1, 3, 3, 3]),
        ([0, 6, 7, 8, 9, 10, 10], 3, [1, 2, 3]),
        ([0, 6, 7, 8, 9, 10, 10], 6, [1] * 6),
        ([0, 0, 0, 5], 2, [2, 1]),
        ([0, 9], 1, [1]),
    ],
)
def test_balanced_partition_minimises_largest_weight_with_no_small_strip(weights, tiles, want):
    assert np.diff(row_frontiers.balanced_partition(np.array(weights), tiles)).tolist() == want


def test_balanced_partition_first_strip_is_smaller():
    analysis = analysed(keras_step(vgg, (96, 22), steps=1))
    forward, backward = plan(analysis, [rows(4)])[0].loops
    iterations = loop_iterations(analysis, backward, 2)
    peaks = [peak_bytes_of(iteration.events, ExactAllocator()) for iteration in iterations]
    assert max(peaks) < 1.35 * min(peaks)
    assert forward.cells[forward.writes[0]][0].size[0] < 24 / 4


@pytest.mark.parametrize(("forward", "backward"), [(2, 6), (6, 2), (3, 4), (5, 5), (1, 4)])
def test_slots_save_each_backward_border_once(forward, backward):
    fine = 12
    frontier = Frontier.of(interval(*((max(4 * t - 2, 0), 4 * t + 4) for t in range(fine))), start=0)
    back = row_frontiers.balanced_partition(np.arange(fine + 1), backward)
    saved = {}
    for lines, places in row_frontiers.slots(
        frontier, row_frontiers.balanced_partition(np.arange(fine + 1), forward), back
    ):
        for lo, size, place in zip(lines.lo, lines.size, places, strict=True):
            if size:
                assert place not in saved
                saved[place] = (lo, size)
    want = frontier.carried(back[:-1])
    assert sorted(saved.items()) == [
        (place, (lo, size))
        for place, lo, size in zip(row_frontiers.offsets(want), want.lo, want.size, strict=True)
        if size
    ]


# Refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"num_tiles": (2, 3)}, r"cannot split the width.*num_tiles=2x3.*num_tiles=\([56], 1\).*recompute"),
        ({"num_tiles": {"width": 2}}, "cannot split the width"),
        ({"num_tiles": (4, 1), "backward_num_tiles": (2, 2)}, "cannot split the width"),
    ],
)
@pytest.mark.parametrize("net", [vgg, NORMALISED[0]], ids=["plain", "normalised"])
def test_row_planner_tiles_over_width_are_refused(net, params, words):
    step = keras_step(net, (20, 22), steps=1)
    with pytest.raises(ValueError, match=words):
        rewritten_by(step, **params)


# Broken on purpose ------------------------------------------------------------------------------------------


def _shifted(self, at):
    rows = _carried(self, at)
    return Interval(np.maximum(rows.lo - (rows.size > 0), 0), np.maximum(rows.hi - (rows.size > 0), 0))


_carried = Frontier.carried


def test_row_planner_off_by_one_rows_differ(monkeypatch):
    step = keras_step(vgg, (34, 22), steps=1)
    monkeypatch.setattr(Frontier, "carried", _shifted)
    try:
        wrong = differing(step, rows(3))
    except AssertionError as error:
        assert "lacks rows" in str(error)  # The emitter's own check fails first.
    except tf.errors.InvalidArgumentError:
        pass  # A kernel fails.
    else:
        assert len(wrong) > 3


@pytest.mark.parametrize("kind", [TileKind.FULL, TileKind.PARTIAL], ids=["values", "gradients"])
def test_row_planner_zeroed_carried_rows_differ(kind, monkeypatch):
    """LR-CNN V-D: strips that share no rows train another network."""
    rows_received = IterationEmitter.rows_received

    def forgotten(iteration, receive):
        received = rows_received(iteration, receive)
        kinds = iteration.loop.segment.kinds
        return tf.zeros_like(received) if kinds.get(receive.result.tensor) is kind else received

    monkeypatch.setattr(IterationEmitter, "rows_received", forgotten)
    assert len(differing(keras_step(vgg, (34, 22), steps=1), rows(3))) > 3


def test_stand_in_is_in_no_graph():
    image = Node("image", "Placeholder", outputs=[(tf.float32, (2, 30, 20, 3))]).out()
    saved = row_frontiers.stand_in(image, (1, 2), (6, 20))
    assert saved.shape == (2, 6, 20, 3)
    assert saved.node.op == row_frontiers.SAVED


# Reports of strips.


def conv_pair(height, width=24, channels=8):
    """Return a step of two 3x3 convolutions, each with a ReLU."""
    x = image = keras.Input((height, width, channels), batch_size=1)
    for name in ("first", "second"):
        x = layers.ReLU(name=f"{name}_relu")(layers.Conv2D(channels, 3, padding="same", use_bias=False, name=name)(x))
    return gradient_step(model_of(image, x), tf.TensorSpec(image.shape))


def segment_of(step, number, halo):
    params = SFTParams((number, 1), [SegmentSpec("images", "second_relu")], halo=halo)
    return tflms_sft.rewrite(step, params).plan.segments[0]


@pytest.mark.parametrize("number", [1, 2, 5, 16])
def test_overlapped_bytes_are_rows_computed_twice(number):
    step, row = conv_pair(64), 24 * 8 * 4
    overlapped = segment_of(step, number, "recompute").overlapped_bytes
    # Two rows at each border: the first convolution and its ReLU in both loops, and the gradient of the ReLU.
    assert overlapped == 5 * (number - 1) * 2 * row
    assert segment_of(step, number, "carry").overlapped_bytes == 0


def test_most_rows_carry_minimises_memory():
    step = keras_step(vgg, (2048, 22), steps=1)
    counts = (2, 4, 8, 16, 32, 64, 128, 256)
    segments = {number: plan_of_rows(step, number) for number in counts}
    memory = {number: max(segment.tile_bytes) + segment.saved_bytes for number, segment in segments.items()}
    best = min(memory, key=memory.get)
    assert 2 < best < 256, "neither end"
    for segment in segments.values():
        assert best / 3 < segment.most_rows < best * 3


def plan_of_rows(step, number):
    params = SFTParams(num_tiles=(number, 1), segments=[SegmentSpec("conv2d", "out")], halo="carry")
    return tflms_sft.rewrite(step.function, params, *step.specs).plan.segments[0]


def test_most_rows_recompute_doubles_work_beyond():
    step = conv_pair(64)
    most = segment_of(step, 4, "recompute").most_rows
    assert 4 < most < 64
    whole = SFTParams((4, 1), [SegmentSpec("images", "second_relu")])
    summary = tflms_sft.rewrite(step, whole).plan.summary()
    assert f"more than {most} strips would double the work" in summary
    analysis = GraphAnalysis(canonicalize.read_canonical(step.get_concrete_function()))
    (segment_plan,) = plan(analysis, [Cut("images", "second_relu", grid=(most, 1))])
    loop = segment_plan.loops[-1]
    costs = CostModel(analysis, 1)
    assert 1.8 < costs.body(loop) / costs.step(loop.body) < 2.1


@pytest.mark.parametrize(("tiles", "halo"), [((2, 2), "recompute"), ((1, 1), "recompute"), ((1, 1), "carry")])
def test_most_rows_is_none_without_strips(tiles, halo):
    spec = SegmentSpec("images", "second_relu")
    plan = tflms_sft.rewrite(conv_pair(64), SFTParams(tiles, [spec], halo=halo)).plan
    assert plan.segments[0].most_rows is None
    assert "rows that tiles share" not in plan.summary() and "more than" not in plan.summary()


def test_backward_num_tiles_error_names_argument():
    step = conv_pair(64)
    with pytest.raises(ValueError, match=r"Received: backward_num_tiles=2x2.*such as backward_num_tiles=\(4, 1\)"):
        tflms_sft.rewrite(step, SFTParams(num_tiles=(4, 1), backward_num_tiles=(2, 2), halo="carry"))


def test_row_planner_one_row_images_carry_along_width():
    step = conv_pair(1, 64)
    plan = tflms_sft.rewrite(step, SFTParams(num_tiles=(1, 4), halo="carry")).plan
    assert plan.segments[0].num_tiles == (1, 1, 4) and not plan.segments[0].overlapped_bytes


def test_row_barrier_planner_reduction_loops_split_operand():
    """Two inputs have unknown batch sizes, so that an op outside multiplies the squeezed images."""
    keras.config.set_floatx("float64")
    images = [keras.Input((4, 1)) for _ in range(2)]
    x = layers.Activation("relu")(images[0])
    x = x * layers.Dense(1, "sigmoid")(layers.GlobalAveragePooling1D(keepdims=True)(x))
    pooled = layers.Dense(3)(layers.GlobalAveragePooling1D()(layers.ZeroPadding1D((0, 0))(images[1])))
    model = keras.Model(images, layers.Conv1D(3, 1)(layers.Conv1D(1, 1)(x)) + layers.Reshape((1, 3))(pooled))
    numbers = np.random.default_rng(0)
    draw = [(*numbers.normal(size=(2, n, 4, 1)), numbers.integers(0, 3, (n, 4))) for n in (3, 2)]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = model_step(model, draw, False, {"optimizer": "sgd", "loss": loss})
    assert not rewritten_by(step, num_tiles=(2,))[0]
