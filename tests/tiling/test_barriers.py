"""Segments with barriers: BatchNorm in training mode and other reductions over the image in a forward pass."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from checkpoint_sets import checkpoint_sets
from equivalence import TOLERANCE, error, keras_step
from keras import layers
from nets import NORMALISED, Compiled, bottlenecks, chain, conv_norm, momentum, u_net

import tflms_sft
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize import canonicalize
from rewriters.emission import loop_outputs, tile_pass
from rewriters.emission.loop_program import MergeMoments, Part, Reduce
from rewriters.errors import RewriteError
from rewriters.ir.device_model import DeviceModel
from rewriters.ir.graph_reader import from_tf_graph
from rewriters.rules import reduction
from rewriters.rules.registry import Combination
from rewriters.step_importer import StepImporter
from rewriters.tiling import barrier_levels, checkpoint_selection, tile_planner
from rewriters.tiling.barrier_levels import MomentPair, assign_levels
from rewriters.tiling.barrier_planner import barrier_segment, has_barriers
from rewriters.tiling.checkpoint_selection import CheckpointSelection
from rewriters.tiling.tile_planner import Grid

# Rewriting --------------------------------------------------------------------------------------------------


class Parts:
    """A step with the levels of its ops and its stored tensors."""

    def __init__(self, concrete_fn, batch=2, merge=True, cheap_flops=0.0):
        self.concrete_fn = concrete_fn
        self.analysis = GraphAnalysis(canonicalize.read_canonical(concrete_fn))
        self.roles = assign_levels(self.analysis, merge=merge)
        self.storage = CheckpointSelection(self.analysis, self.roles, batch=batch, cheap_flops=cheap_flops)

    def segment(self, checkpoints=None):
        return barrier_segment(self.analysis, "segment1", self.roles, self.storage, checkpoints)

    def rewritten(self, grid, backward_grid=None, checkpoints=None):
        plan = tile_pass.plan_segment(self.analysis, self.segment(checkpoints), grid, backward_grid)
        importer = StepImporter(tile_pass.tile_segments(self.analysis, [plan]), self.concrete_fn)
        specs = [tf.TensorSpec(t.shape, t.dtype) for t in self.concrete_fn.inputs[: importer.num_arguments]]
        function = tf.function(lambda *args: importer(args), input_signature=specs, autograph=False)
        return function.get_concrete_function()


def differing(step, function, tolerance=TOLERANCE):
    want, got = step.run(step.concrete_fn), step.run(function)
    assert list(want) == list(got)
    errors = {name: error(got[name], want[name]) for name in want}
    return {name: value for name, value in errors.items() if not value <= tolerance}


DEEP_IS_SLOW = [pytest.param(net, marks=pytest.mark.slow) if net is bottlenecks else net for net in NORMALISED]


@pytest.mark.parametrize("net", DEEP_IS_SLOW)
@pytest.mark.parametrize("known_batch", (pytest.param(True, marks=pytest.mark.slow), False), ids=("known", "unknown"))
def test_barrier_loops_equal_original_step(net, known_batch):
    step = keras_step(net, (17, 14), 3, known_batch, momentum())
    parts = Parts(step.concrete_fn, 3)
    assert has_barriers(parts.analysis, parts.roles)
    fewest = checkpoint_sets(parts.storage)[-1]
    assert not differing(step, parts.rewritten(Grid(1, (3, 2)), Grid(2, (4, 3))))
    assert not differing(step, parts.rewritten(Grid(2, (5, 1)), checkpoints=fewest))
    assert not differing(step, parts.rewritten(Grid(1, (17, 14)), checkpoints=set()))


@pytest.mark.parametrize("net", NORMALISED)
def test_barrier_loops_single_tile_forward_is_bit_identical(net):
    step = keras_step(net, (10, 9), 2, True, momentum(), steps=1)
    want, got = step.run(step.concrete_fn), step.run(Parts(step.concrete_fn).rewritten(Grid(1, (1, 1))))
    for name, value in want.items():
        is_forward = "loss" in name or "moving" in name
        assert error(got[name], value) <= (0 if is_forward else 1e-12), name


def test_assign_levels_without_merge_separates_variances():
    step = keras_step(chain, (9, 8), 2, True, momentum())
    merged, apart = Parts(step.concrete_fn), Parts(step.concrete_fn, merge=False)
    assert len(apart.segment().loop_specs) == len(merged.segment().loop_specs) + 3
    assert not differing(step, apart.rewritten(Grid(1, (2, 3))))


def test_barrier_loops_two_losses_and_frozen_norm_equal_original_step():
    def net(x):
        x = layers.ReLU()(conv_norm(x, 4))
        frozen = layers.BatchNormalization()
        frozen.trainable = False
        x = layers.Dropout(0.3, seed=3)(frozen(layers.Conv2D(3, 3)(x)))
        return layers.ActivityRegularization(l2=0.1)(conv_norm(x, 3))

    step = keras_step(net, (12, 11), 2, True, momentum(), steps=1)
    assert not differing(step, Parts(step.concrete_fn).rewritten(Grid(1, (3, 2)), checkpoints=set()))


class OfTheImage(layers.Layer):
    """Reductions over all axes, without keepdims, that ops on images read."""

    def call(self, x):
        x = (x - tf.reduce_mean(x, [0, 1, 2])) / tf.reduce_max(x)
        steps = tf.reduce_mean(tf.cast(10 * x, tf.int32), [1, 2], keepdims=True)
        return x * tf.cast(1 + steps, x.dtype) + tf.math.reduce_prod(1 + 1e-4 * tf.abs(x), [1, 2], keepdims=True)


class OfEachImage(layers.Layer):
    """Moments of each image, with as many channels as fill a cache line."""

    def call(self, x):
        mean, variance = tf.nn.moments(x, [1, 2], keepdims=True)
        return (x - mean) * tf.math.rsqrt(variance + 1e-3)


class Doubled(layers.Layer):
    """The batch twice, as a discriminator reads real and generated images."""

    def call(self, x):
        return tf.concat([x, 2 * x], 0)


class Halved(layers.Layer):
    def call(self, x):
        return x[: tf.shape(x)[0] // 2]


class Reference(layers.Layer):
    """A single image beside the batch, with its own weights."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(3, 3, 3, shape[-1]))
        self.image = tf.constant(np.random.default_rng(1).normal(size=(1, *shape[1:3], 3)))

    def call(self, x):
        one = tf.nn.conv2d(self.image + 0 * tf.reduce_mean(x), self.kernel, 1, "SAME")
        return x * tf.tanh(one)


ODD = {
    "reductions without axes": lambda x: OfTheImage()(layers.ReLU()(conv_norm(x, 4))),
    "moments of each image": lambda x: layers.ReLU()(OfEachImage()(layers.Conv2D(16, 3, padding="same")(x))),
    "twice the batch": lambda x: Halved()(layers.ReLU()(conv_norm(Doubled()(layers.ReLU()(conv_norm(x, 4))), 4))),
    "an image beside the batch": lambda x: Reference()(layers.ReLU()(conv_norm(x, 4))),
    "one pixel to the end": lambda x: layers.Conv2D(5, 1)(layers.GlobalAveragePooling2D(keepdims=True)(chain(x))),
}


@pytest.mark.parametrize("net", ODD)
@pytest.mark.parametrize("known_batch", (True, False), ids=("known", "unknown"))
def test_barrier_loops_unusual_steps_equal_original_step(net, known_batch):
    """Run steps in which the global gradient norm makes filter gradients depend on images, too."""
    optimizer = keras.optimizers.Adam(0.01, epsilon=1e-2, global_clipnorm=0.5)
    step = keras_step(ODD[net], (12, 11), 3, known_batch, optimizer)
    parts = Parts(step.concrete_fn, 3)
    assert has_barriers(parts.analysis, parts.roles)
    for grid in (Grid(1, (1, 1)), Grid(2, (3, 2))):
        assert not differing(step, parts.rewritten(grid, checkpoints=set()))


def test_max_reduction_of_minus_infinity_stays_minus_infinity():
    image = tf.constant(np.full((2, 6, 5, 1), -np.inf))
    whole = tf.function(lambda x: tf.reduce_max(x, [1, 2]), autograph=False).get_concrete_function(image)
    tensor = from_tf_graph(whole.graph, whole.inputs, [whole.graph.get_operation_by_name("Max").outputs[0]], [])
    part = Part(tensor.outputs[0], None)
    reduce = Reduce(part=part, combination=Combination.MAXIMUM, per_image=True, cell=None, is_full=True)
    output = loop_outputs.ReductionOutput(reduce)
    assert np.all(np.array(output.initial(FakeIteration(None))[0].initial) == -np.inf)


def test_assign_levels_two_batch_sizes_are_not_mixed():
    """Use labelled images and seven times as many unlabelled ones, as in semi-supervised training."""
    kernel = tf.Variable(np.random.default_rng(0).normal(size=(3, 3, 3, 4)), dtype=tf.float64)

    @tf.function(autograph=False)
    def step(few, many):
        with tf.GradientTape() as tape:
            parts = [normalised(tf.nn.conv2d(x, kernel, 1, "SAME")) for x in (few, many)]
            loss = sum(tf.reduce_mean(tf.square(part) * 0.5 * part) for part in parts)
        return loss, tape.gradient(loss, kernel)

    random = np.random.default_rng(0)
    few, many = (tf.constant(random.normal(size=(n, 9, 8, 3))) for n in (2, 14))
    spec = tf.TensorSpec((None, 9, 8, 3), tf.float64)
    fast = tflms_sft.rewrite(step, tflms_sft.SFTParams(num_tiles={"batch": 2, "height": 2, "width": 1}), spec, spec)
    assert fast.plan.segments
    for got, want in zip(fast(few, many), step(few, many), strict=True):
        assert error(got, want) < TOLERANCE


def normalised(x):
    mean, variance = tf.nn.moments(x, [0, 1, 2], keepdims=True)
    return tf.nn.relu((x - mean) * tf.math.rsqrt(variance + 1e-3))


def gradients_of(loss_of, *kernels, largest=np.inf):
    """Return a step that computes a loss and its gradients, and images for it."""
    random = np.random.default_rng(0)
    weights = [tf.Variable(random.normal(size=shape)) for shape in kernels]

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            loss = loss_of(x, *weights)
        checks = [] if largest == np.inf else [tf.debugging.assert_less(loss, tf.constant(largest, tf.float64))]
        with tf.control_dependencies(checks):
            return loss, tape.gradient(loss, weights)

    return step, tf.constant(random.normal(size=(4, 9, 8, 3))), tf.TensorSpec((None, 9, 8, 3), tf.float64)


def furthest_of(step, images, spec, num_tiles=(2, 2)):
    fast = tflms_sft.rewrite(step, tflms_sft.SFTParams(num_tiles=num_tiles), spec)
    assert fast.plan.segments
    pairs = zip(tf.nest.flatten(fast(images)), tf.nest.flatten(step(images)), strict=True)
    return max(error(got, want) for got, want in pairs)


def test_barrier_loops_linear_loss_equal_original_step():
    """Use the loss of a critic: most backward ops depend on shapes of forward results alone."""

    def loss_of(x, first, second, dense):
        x = normalised(tf.nn.conv2d(normalised(tf.nn.conv2d(x, first, 1, "SAME")), second, 2, "SAME"))
        return -tf.reduce_mean(tf.reshape(x, (tf.shape(x)[0], 80)) @ dense)

    assert furthest_of(*gradients_of(loss_of, (3, 3, 3, 4), (3, 3, 4, 4), (80, 1))) < TOLERANCE


def test_barrier_loops_gradient_penalty_equal_original_step():
    """A gradient that the loss reads counts as a forward op, and runs on tiles."""

    def loss_of(x, first, second):
        with tf.GradientTape() as tape:
            tape.watch(x)
            features = tf.nn.softplus(tf.nn.conv2d(normalised(tf.nn.conv2d(x, first, 1, "SAME")), second, 1, "SAME"))
            score = tf.reduce_mean(features)
        slope = tape.gradient(score, x)
        return score + tf.reduce_mean((tf.sqrt(tf.reduce_sum(slope**2, [1, 2, 3])) - 1.0) ** 2)

    step, images, spec = gradients_of(loss_of, (3, 3, 3, 4), (3, 3, 4, 4))
    for known in (images, spec):
        assert furthest_of(step, images, known) < TOLERANCE


@pytest.mark.parametrize("axes", ([0], [0, 1], [0, 3]))
def test_barrier_loops_batch_mean_equal_original_step(axes):
    """The mean has rows but no batch; its gradient is broadcast over the batch."""

    def loss_of(x, first, second):
        x = normalised(tf.nn.conv2d(x, first, 1, "SAME"))
        x = x + tf.reduce_mean(x, axes, keepdims=True)
        return tf.reduce_mean(tf.square(tf.nn.relu(tf.nn.conv2d(x, second, 1, "SAME"))))

    step, images, spec = gradients_of(loss_of, (3, 3, 3, 4), (3, 3, 4, 4))
    for known in (images, spec):
        assert furthest_of(step, images, known) < TOLERANCE


@pytest.mark.parametrize("known", (True, False))
def test_barrier_loops_second_device_with_larger_batch_equal_original_step(known):
    """The branch has its own loops and its own batch size."""

    def branch(x, kernels):
        for kernel in kernels:
            x = normalised(tf.nn.conv2d(x, kernel, 1, "SAME"))
        return tf.reduce_mean(x)

    def loss_of(x, *kernels):
        few = branch(x, kernels[:2])
        with tf.device("/CPU:0"):
            many = branch(tf.concat([x, x[::-1] * 0.5, x + 1.0], 0), kernels[2:])
        return tf.square(few + 1.0) + tf.square(many + 2.0) + few * many

    step, images, spec = gradients_of(loss_of, *[(3, 3, 3, 4), (3, 3, 4, 4)] * 2)
    assert furthest_of(step, images, images if known else spec, (2, 3, 2)) < TOLERANCE


def test_barrier_loops_gradients_after_assertion_equal_original_step():
    """The shapes of the gradients depend on an assertion, and are static all the same."""

    def loss_of(x, first, second):
        x = normalised(tf.nn.conv2d(normalised(tf.nn.conv2d(x, first, 1, "SAME")), second, 1, "SAME"))
        return tf.reduce_mean(tf.square(x))

    step, images, spec = gradients_of(loss_of, (3, 3, 3, 4), (3, 3, 4, 4), largest=1e9)
    for known in (images, spec):
        assert furthest_of(step, images, known) < TOLERANCE


# Loops ------------------------------------------------------------------------------------------------------


def test_assign_levels_batch_norm_is_one_barrier_per_phase():
    parts = Parts(keras_step(chain, (9, 8)).concrete_fn)
    loops = parts.segment().loop_specs
    levels = {loop.level: loop.backward for loop in loops}
    assert list(levels.values()) == [False] * 4 + [True] * 4
    assert all(len(loop.moments) == (number < 3) for number, loop in enumerate(loops))
    assert [len(loop.writes) for loop in loops[:4]] == [1, 1, 1, 0]  # The results of the convolutions alone.
    assert all(tensor.node.op == "Conv2D" for loop in loops[:4] for tensor in loop.writes)


def test_checkpoint_selection_stores_tensors_smaller_than_their_sources():
    """The sums of a residual network are stored, so that no block reads all blocks before it."""
    parts = Parts(keras_step(bottlenecks, (24, 24)).concrete_fn)
    written = [tensor for loop in parts.segment().loop_specs if not loop.backward for tensor in loop.writes]
    assert sum(tensor.node.op in ("Add", "AddV2") for tensor in written) == 3
    most = max(len(loop.reads) for loop in parts.segment().loop_specs)
    assert most <= 6


@pytest.mark.parametrize(("axes", "is_stored"), [(-1, False), ((1, 2), True)], ids=["channels", "image"])
def test_checkpoint_selection_stores_compared_tensors_for_later_loops_alone(axes, is_stored):
    """Recomputed operands of `x == max(x)` may differ in the last bit; within one loop nothing is recomputed."""
    kernel = tf.Variable(np.random.default_rng(0).random((3, 3, 2, 4)))

    def step(images):
        with tf.GradientTape() as tape:
            features = normalised(tf.nn.conv2d(images, kernel, 1, "SAME"))
            loss = tf.reduce_mean(features**2)
        scores = tf.tanh(features, name="scores")
        largest = scores == tf.reduce_max(scores, axes, keepdims=True)
        return loss, tape.gradient(loss, kernel), tf.reduce_sum(tf.cast(largest, tf.float64))

    parts = Parts(tf.function(step).get_concrete_function(tf.TensorSpec((2, 8, 8, 2), tf.float64)))
    assert ("scores" in {tensor.node.name for tensor in parts.storage.stored}) == is_stored


def test_loop_specs_gather_gradient_before_loop_with_halo(monkeypatch):
    """The gathered tensor is the gradient of a normalisation, which the gradients of a convolution read."""
    concrete_fn, ways = keras_step(deep, (24, 24)).concrete_fn, []
    for least in (checkpoint_selection.MIN_FREED_RATIO, 100.0):
        monkeypatch.setattr(checkpoint_selection, "MIN_FREED_RATIO", least)
        parts = Parts(concrete_fn)
        ways.append(parts.segment(checkpoint_sets(parts.storage)[-1]).loop_specs)
    at = [[any(node.op == "Conv2DBackpropInput" for node in loop.body) for loop in loops] for loops in ways]
    images = [[len(loop.reads) for loop in itertools.compress(*way)] for way in zip(ways, at, strict=True)]
    assert np.median(images[0]) == 2 and np.median(images[1]) == 3
    there = [list(itertools.compress(held(loops), which)) for loops, which in zip(ways, at, strict=True)]
    assert np.sum(there[0]) < 0.9 * np.sum(there[1]) and all(few <= many for few, many in zip(*there, strict=True))


def readable(loops):
    """Return the tensors that each loop reads although no earlier loop wrote them."""
    written = {tensor for loop in loops for tensor in loop.writes}
    seen, missing = set(), []
    for loop in loops:
        missing += [tensor for tensor in loop.reads if tensor in written - seen]
        seen.update(loop.writes)
    return missing


@pytest.mark.parametrize("net", NORMALISED)
def test_loop_specs_read_written_tensors_and_compute_reductions_once(net):
    parts = Parts(keras_step(net, (17, 14)).concrete_fn)
    for checkpoints in [None, set(), *checkpoint_sets(parts.storage)]:
        loops = parts.segment(checkpoints).loop_specs
        assert not readable(loops)
        assert [loop.level for loop in loops] == sorted(loop.level for loop in loops)
        again = [loop for loop, after in zip(loops, loops[1:], strict=False) if loop.level == after.level]
        assert all(loop.backward and loop.writes and not loop.sums for loop in again), "these make tensors again"
        sums = [node for loop in loops for node in loop.sums]
        assert len(sums) == len(set(sums)) == len(parts.roles.sums)


def held(loops, batch=2):
    """Return the bytes of full-size tensors from loops that are alive while each loop runs."""
    producers, alive = {}, [set() for _ in loops]
    for number, loop in enumerate(loops):
        for tensor in loop.reads:
            for between in range(producers.get(tensor, number), number + 1):
                alive[between].add((tensor, producers.get(tensor)))
        producers.update((tensor, number) for tensor in loop.writes)
    return [sum(tensor.num_bytes(batch) for tensor, loop in every if loop is not None) for every in alive]


def test_checkpoints_sets_have_decreasing_bytes():
    parts = Parts(keras_step(deep, (24, 24)).concrete_fn)
    loops = [parts.segment(checkpoints).loop_specs for checkpoints in checkpoint_sets(parts.storage)]
    sizes = [max(held(every)) for every in loops]
    assert len(sizes) >= 3 and sizes[-1] < 0.6 * sizes[0]
    first, last = (sum(len(loop.writes) for loop in every) for every in (loops[0], loops[-1]))
    assert first < last < 1.5 * first, "recomputed, and each once"


def test_loop_specs_recompute_dropped_tensors_in_separate_loops():
    """A single loop would pay for the halos of all convolutions between two checkpoints."""
    parts = Parts(keras_step(deep, (24, 24)).concrete_fn)
    for checkpoints in (set(), *checkpoint_sets(parts.storage)):
        loops = parts.segment(checkpoints).loop_specs
        convolutions = [sum(node.op == "Conv2D" for node in loop.body) for loop in loops]
        assert max(convolutions) <= 2
        written = [tensor for loop in loops for tensor in loop.writes]
        assert max(map(written.count, written)) <= 2


@pytest.mark.parametrize("net", (pytest.param(bottlenecks, marks=pytest.mark.slow), u_net))
def test_checkpoint_selection_cheap_convolutions_are_recomputed(net):
    step = keras_step(net, (17, 14), 3, True, momentum())
    dear, cheap = Parts(step.concrete_fn, 3), Parts(step.concrete_fn, 3, cheap_flops=1e9)
    fewer = dear.storage.stored - cheap.storage.stored
    assert any("Conv2D" in tensor.node.op for tensor in fewer)
    for checkpoints in (None, checkpoint_sets(cheap.storage)[-1]):
        assert not differing(step, cheap.rewritten(Grid(2, (3, 2)), checkpoints=checkpoints))


def test_checkpoints_without_stored_tensors_terminates():
    def grouped(x):
        return layers.Conv2D(6, 3, groups=3)(x)

    parts = Parts(keras_step(grouped, (17, 14)).concrete_fn)
    assert not has_barriers(parts.analysis, parts.roles)
    assert len(checkpoint_sets(parts.storage)) == 1


def deep(x):
    for _ in range(12):
        x = layers.ReLU()(conv_norm(x, 4))
    return x


def test_assign_levels_filter_gradients_are_not_images():
    """Filter gradients have four dimensions, as images have, and the optimizer reads them elementwise."""
    optimizer = keras.optimizers.Adam(0.01, global_clipnorm=1.0)
    parts = Parts(keras_step(chain, (9, 8), 3, optimizer=optimizer).concrete_fn, 3)
    for node in parts.roles.tiled:
        shape = node.outputs[0][1]
        assert shape is not None and shape[0] == 3 and shape[1] > 3, node


def test_tile_pass_later_loops_read_recomputed_tensors():
    parts = Parts(keras_step(deep, (24, 24)).concrete_fn)
    plan = tile_pass.plan_segment(parts.analysis, parts.segment(set()), Grid(1, (2, 2)))
    graph = tile_pass.tile_skeleton(parts.analysis, [plan])
    loops = [graph.nodes[tile_pass.loop_nodes(graph)["segment1", tile_loop.name]] for tile_loop in plan.loops]
    readers, checked = graph.consumers(), 0
    for number, tile_loop in enumerate(plan.loops):
        for position, tensor in enumerate(tile_loop.writes):
            later = [n for n in range(number + 1, len(loops)) if tensor in plan.loops[n].writes]
            if later:
                reading = {loops.index(r) for r, _ in readers[loops[number].out(position)] if r in loops}
                assert reading and max(reading) < later[0]
                checked += 1
    assert checked > 5


def test_assign_levels_refused_ops_have_reasons_and_run_untiled():
    def net(x):
        x = layers.ReLU()(conv_norm(x, 4))
        x = Compiled()(x)
        return layers.ReLU()(conv_norm(x, 4))

    step = keras_step(net, (9, 8), 2, True, momentum())
    parts = Parts(step.concrete_fn)
    assert any("XLA" in reason for reason in parts.roles.refused.values())
    assert not differing(step, parts.rewritten(Grid(1, (3, 3))))


# Moments ----------------------------------------------------------------------------------------------------


class FakeIteration:
    """A fake loop whose iterations are the parts of an array."""

    batch, files, in_files, device = 1, None, frozenset(), DeviceModel(name="CPU:0")

    def __init__(self, part):
        self.part, self.loop = part, self

    def value(self, part):
        return self.part


def merged_moments(pair):
    return loop_outputs.MergedMoments(MergeMoments(part=Part(pair.image, ()), pair=pair, has_one_tile=False))


def moments_of(parts, dtype="float32"):
    """Return the moments that `MergedMoments` computes from parts of an image."""
    graph = tf.Graph()
    with graph.as_default():
        image = tf.constant(np.concatenate(parts, 1).astype(dtype))
        mean = tf.reduce_mean(image, [0, 1, 2], keepdims=True)
        variance = tf.reduce_mean(tf.math.squared_difference(image, mean), [0, 1, 2])
        moments = pair(graph, [image, mean, variance])
    merged = merged_moments(moments)
    values = [state.initial for state in merged.initial(FakeIteration(None))]
    for part in parts:
        values = merged.update(FakeIteration(tf.constant(part.astype(dtype))), values)
    return [np.array(value).ravel()[0] for value in merged.final(values)]


def pair(graph, tensors):
    outputs = from_tf_graph(graph, [], tensors, []).outputs
    return MomentPair(*outputs, axes=(0, 1, 2), keep_dims=False)


def test_merged_moments_uneven_tiles_have_no_cancellation():
    """With a ratio of mean and deviation of 4,000, a difference of mean squares has no correct digit in float32."""
    random = np.random.default_rng(0)
    parts = [random.normal(4000, 1, (2, rows, 50, 1)) for rows in (7, 1, 30, 6)]
    whole = np.concatenate(parts, 1).astype("float32").astype("float64")
    mean, variance = moments_of(parts)
    assert abs(mean / whole.mean() - 1) < 1e-6 and abs(variance / whole.var() - 1) < 1e-4
    squares = np.mean(np.square(whole.astype("float32"))) - np.square(np.mean(whole.astype("float32")))
    assert abs(squares / whole.var() - 1) > 1e-2


# Broken on purpose ------------------------------------------------------------------------------------------


def ancestors(op):
    """Return the ops that an op waits for, directly or through others."""
    found, stack = set(), [op]
    while stack:
        one = stack.pop()
        new = {t.op for t in one.inputs} | set(one.control_inputs)
        stack += new - found
        found |= new
    return found


def test_merged_moments_differences_wait_for_all_readers_of_the_image():
    # TensorFlow overwrites the image with the differences only if no other op holds it.
    with tf.Graph().as_default() as graph:
        image, mean, variance = (tf.compat.v1.placeholder("float32", [None, None, None, 3]) for _ in range(3))
        merged = merged_moments(pair(graph, [image, mean, variance]))
        merged.update(FakeIteration(image), [tf.zeros([]), tf.zeros([1, 1, 1, 3]), tf.zeros([1, 1, 1, 3])])
    (differences,) = (op for op in graph.get_operations() if op.type == "SquaredDifference")
    readers = {op for op in image.consumers() if op is not differences}
    assert {op.type for op in readers} == {"Mean", "Shape"} and readers <= ancestors(differences)


CELLS, MERGE = tile_planner.RowDemand.cells_of, loop_outputs.MergedMoments.update
BREAKS = {
    "nothing waits for a sum": (
        barrier_levels._KindAssigner,
        "_level_after",
        lambda self, producer, sort, level: level[producer],
    ),
    "tiles overlap where they are summed": (
        tile_planner.RowDemand,
        "cells_of",
        lambda self, t, grid: tuple(i.hull(i.shift(-1).clip(99)) for i in CELLS(self, t, grid)),
    ),
    "means that are not merged": (
        loop_outputs.MergedMoments,
        "update",
        lambda self, iteration, values: [*MERGE(self, iteration, values)[:1], *values[1:]],
    ),
    "a mean over a tile for one over the image": (
        reduction.Reduce,
        "emit",
        lambda self, emitter, op, operands: emitter.clone(op.node, operands),
    ),
}


@pytest.mark.parametrize("what", BREAKS)
def test_barrier_loops_broken_on_purpose_differ(what, monkeypatch):
    def net(x):
        x = chain(x)
        return layers.Multiply()([x, layers.GlobalAveragePooling2D(keepdims=True)(x)])

    step = keras_step(net, (9, 8), 2, True, momentum())
    monkeypatch.setattr(*BREAKS[what])
    try:
        assert differing(step, Parts(step.concrete_fn).rewritten(Grid(1, (3, 2))))
    except RewriteError as refused:
        assert "cycle" in str(refused)
