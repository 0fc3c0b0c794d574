"""Forward and backward ops of networks with a loss per pixel in one tile loop: three steps equal the original."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import Step, differences, model_step, rewrite_as
from keras import layers, losses
from nets import conv

import tflms_sft
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize import canonicalize
from rewriters.emission import tile_pass
from rewriters.errors import NotTileableError
from rewriters.tiling.ft_segments import auto_segments
from rewriters.tiling.one_loop import in_one_loop
from rewriters.tiling.segment import build_segment, forward_ops
from rewriters.tiling.tile_planner import Grid

pytestmark = pytest.mark.usefixtures("double_precision")

SIZE, BATCH, CLASSES, STEPS = (21, 18), 3, 3, 3


def scores(image, classes=CLASSES, activation=None):
    """Return class scores per pixel, of a network with a pool, a shortcut and odd sizes."""
    first = conv(4)(image)
    x = layers.MaxPooling2D(2, padding="same")(first)
    x = layers.UpSampling2D(2)(conv(6, strides=1)(x))
    x = layers.Cropping2D(((0, SIZE[0] % 2), (0, SIZE[1] % 2)))(x)
    return layers.Conv2D(classes, 1, activation=activation, name=f"out{classes}")(layers.Concatenate()([x, first]))


def net_step(outputs, targets, known_batch=True, batch=BATCH, **arguments):
    """Return three training steps of a network with some outputs; `targets` draws a batch of labels, and weights."""
    keras.utils.set_random_seed(0)
    image = keras.Input((*SIZE, 3), batch_size=batch if known_batch else None)
    model = keras.Model(image, outputs(image))
    random = np.random.default_rng(1)
    batches = [(random.normal(size=(batch, *SIZE, 3)), *targets(random, (batch, *SIZE))) for _ in range(STEPS)]
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    return model_step(model, batches, known_batch, {"optimizer": optimizer, "jit_compile": False, **arguments})


def classes_of(random, shape):
    return (random.integers(CLASSES, size=shape).astype("int32"),)


def one_hot(random, shape):
    return (np.eye(CLASSES)[classes_of(random, shape)[0]],)


def binary(random, shape):
    return (random.integers(2, size=(*shape, 1)).astype("float64"),)


def real(random, shape):
    return (random.normal(size=(*shape, CLASSES)),)


def weighted(random, shape):
    """Draw classes with a weight for each pixel, half of which are zero."""
    return (*classes_of(random, shape), random.uniform(size=shape) * random.integers(2, size=shape))


def sigmoid(image):
    return scores(image, 1, "sigmoid")


def masked(labels, logits):
    """Return the mean cross-entropy of the pixels that have a label; class 0 stands for none."""
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(labels, tf.int32), logits)
    mask = tf.cast(tf.cast(labels, tf.int32) > 0, loss.dtype)
    return tf.reduce_sum(loss * mask) / tf.reduce_sum(mask)


SPARSE = functools.partial(losses.SparseCategoricalCrossentropy, from_logits=True)


def among_best(labels, logits):
    """Return which labels are among the best two, computed in the only type that TensorFlow has a kernel for."""
    return keras.metrics.sparse_top_k_categorical_accuracy(labels, keras.ops.cast(logits, "float32"), 2)


STEP_OF = {
    "sparse": lambda **options: net_step(scores, classes_of, loss=SPARSE(), **options),
    "sum": lambda: net_step(scores, classes_of, loss=SPARSE(reduction="sum")),
    "ignored class": lambda: net_step(scores, classes_of, loss=SPARSE(ignore_class=1)),
    "accuracy": lambda: net_step(scores, classes_of, loss=SPARSE(), metrics=["accuracy"]),
    "intersection over union": lambda: net_step(
        scores, classes_of, loss=SPARSE(), metrics=[keras.metrics.MeanIoU(CLASSES, sparse_y_pred=False)]
    ),
    "best classes": lambda: net_step(scores, classes_of, loss=SPARSE(), metrics=[among_best]),
    "area under the curve": lambda: net_step(
        sigmoid, binary, loss=losses.BinaryCrossentropy(), metrics=[keras.metrics.AUC(), keras.metrics.BinaryIoU()]
    ),
    "weights": lambda: net_step(scores, weighted, loss=SPARSE(), weighted_metrics=["accuracy"]),
    "masked mean": lambda: net_step(scores, classes_of, loss=masked),
    "smoothed": lambda: net_step(
        scores, one_hot, loss=losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    ),
    "focal": lambda: net_step(scores, one_hot, loss=losses.CategoricalFocalCrossentropy(from_logits=True)),
    "probabilities": lambda: net_step(
        lambda image: layers.Softmax()(scores(image)), one_hot, loss=losses.CategoricalCrossentropy()
    ),
    "binary": lambda: net_step(sigmoid, binary, loss=losses.BinaryCrossentropy(), metrics=["binary_accuracy"]),
    "binary focal": lambda: net_step(sigmoid, binary, loss=losses.BinaryFocalCrossentropy()),
    "squares": lambda: net_step(scores, real, loss="mse", metrics=["mae"]),
    "absolute": lambda: net_step(scores, real, loss="mae"),
    "huber": lambda: net_step(scores, real, loss=losses.Huber()),
    "two heads": lambda: net_step(
        lambda image: [scores(image), sigmoid(image)],
        lambda random, shape: (*classes_of(random, shape), *binary(random, shape)),
        loss=[SPARSE(), losses.BinaryCrossentropy()],
        loss_weights=[1.0, 0.5],
    ),
    "unknown batch": lambda: STEP_OF["sparse"](known_batch=False),
}
GRIDS = {"tiles": Grid(1, (2, 3)), "images": Grid(BATCH, (1, 1)), "both": Grid(2, (3, 1)), "one": Grid(1, (1, 1))}


def one_loop(analysis, grid, must_fuse=True):
    """Plan the segments of a step, each in one loop."""
    plans, excluded = [], set()
    for segment in auto_segments(analysis, None, BATCH, {})[0]:
        only_one = in_one_loop(analysis, segment, excluded)
        assert only_one is not None or not must_fuse
        plans.append(tile_pass.plan_segment(analysis, only_one or segment, grid))
        excluded.update(plans[-1].segment.backward)
    return plans


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", STEP_OF)
def test_one_loop_equals_the_original(name, grid):
    step = STEP_OF[name]()
    rewritten = rewrite_as(step.concrete_fn, lambda analysis: one_loop(analysis, GRIDS[grid]))
    loops = [node for node in rewritten.graph.nodes.values() if node.op in ("While", "StatelessWhile")]
    assert len(loops) == len(rewritten.segments) >= 1
    assert not differences(step, rewritten)


def test_a_gradient_that_depends_on_all_pixels_needs_two_loops():
    step = net_step(sigmoid, binary, loss=losses.Dice())
    analysis = GraphAnalysis(canonicalize.read_canonical(step.concrete_fn))
    segments, _ = auto_segments(analysis, None, BATCH, {})
    assert segments
    assert not any(in_one_loop(analysis, segment, set()) for segment in segments)


def test_a_loss_that_scales_its_own_gradient_needs_two_loops():
    """The loss is the logarithm of a mean, whose gradient divides by the mean."""

    def logarithm(labels, logits):
        return tf.math.log(tf.reduce_mean((tf.cast(labels, logits.dtype)[..., None] - logits) ** 2))

    step = net_step(scores, classes_of, loss=logarithm)
    analysis = GraphAnalysis(canonicalize.read_canonical(step.concrete_fn))
    segments, _ = auto_segments(analysis, None, BATCH, {})
    assert segments
    assert not any(in_one_loop(analysis, segment, set()) for segment in segments)
    rewritten = rewrite_as(step.concrete_fn, lambda analysis: one_loop(analysis, GRIDS["tiles"], must_fuse=False))
    assert not differences(step, rewritten)


def test_a_budget_uses_one_loop():
    step = STEP_OF["accuracy"]()
    unlimited = tflms_sft.rewrite(step.function, tflms_sft.AutoParams("1GiB"), *step.specs)
    budget = int(0.6 * unlimited.plan.original.peak_bytes)
    plan = tflms_sft.rewrite(step.function, tflms_sft.AutoParams(budget), *step.specs).plan
    assert any(segment.one_loop for segment in plan.segments)
    assert "forward and backward in one loop" in str(plan)


def test_loss_per_image_with_weights_and_an_unknown_batch():
    """The gradient needs the size of the weighted losses, which are computed after the image's loop."""
    x, y, weights = np.random.default_rng(0).normal(size=(4, 24, 24, 3)), np.ones((4, 24, 24, 2)), np.arange(1.0, 5.0)

    def trained(callbacks):
        keras.utils.set_random_seed(0)
        image = keras.Input((24, 24, 3))
        model = keras.Model(image, layers.Conv2D(2, 3, padding="same")(conv(4)(image)))

        def loss(true, found):
            return keras.ops.mean(keras.ops.square(true - found), (1, 2, 3))

        model.compile("sgd", loss, jit_compile=False)
        data = tf.data.Dataset.from_tensor_slices((x, y, weights)).batch(2)
        history = model.fit(data, epochs=2, shuffle=False, verbose=0, callbacks=callbacks).history
        return [*history["loss"], *map(np.array, model.weights)]

    callback = tflms_sft.MemoryBudget(180_000, verbose=0)
    for value, expected in zip(trained([callback]), trained([]), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-10, atol=1e-10)
    assert callback.plan.segments


def hand_written(body):
    """Return a step with a convolution; `body` maps its result and a variable to a loss and further results."""
    random = np.random.default_rng(2)
    filters, v = tf.Variable(random.normal(size=(3, 3, 3, 4))), tf.Variable(random.normal(size=(4,)))

    def function(image):
        with tf.GradientTape() as tape:
            loss, results = body(tf.nn.relu(tf.nn.conv2d(image, filters, 1, "SAME")), v)
        gradients = tape.gradient(loss, [filters, v])
        filters.assign_sub(0.1 * gradients[0])
        return {"loss": loss, "gradients": gradients, **results}

    batches = [(random.normal(size=(BATCH, *SIZE, 3)),) for _ in range(STEPS)]
    specs = [tf.TensorSpec((BATCH, *SIZE, 3), tf.float64)]
    concrete_fn = tf.function(function, autograph=False).get_concrete_function(*specs)
    return Step(concrete_fn, [filters, v], batches, function, specs)


def up_to(exit_type):
    """Return a planner of one segment in one loop, from the image to the first op of a type."""

    def plan(analysis):
        exit_ = next(n for n in analysis.order if n.op == exit_type and n not in analysis.backward).out()
        entry = next(t for t in analysis.graph.inputs if t.shape is not None and len(t.shape) == 4)
        segment = build_segment(analysis, "segment1", forward_ops(analysis, [entry], [exit_]), set())
        only_one = in_one_loop(analysis, segment, set())
        assert only_one is not None
        return [tile_pass.plan_segment(analysis, only_one, GRIDS["tiles"])]

    return plan


def test_result_of_the_step_is_written_and_summed():
    def body(x, v):
        squares = tf.square(x)
        return tf.reduce_mean(squares) + tf.reduce_sum(v * v * v), {"squares": squares, "total": tf.reduce_sum(squares)}

    step = hand_written(body)
    rewritten = rewrite_as(step.concrete_fn, up_to("Square"))
    (segment,) = rewritten.segments
    assert segment.exits
    assert not differences(step, rewritten)


def test_result_that_a_gradient_outside_reads_is_written():
    """The gradient of `v` reads the segment's result; the sum beside it is no reason to drop the result."""
    step = hand_written(lambda x, v: (tf.reduce_mean(x * v), {"total": tf.reduce_sum(x)}))
    rewritten = rewrite_as(step.concrete_fn, up_to("Relu"))
    (segment,) = rewritten.segments
    assert segment.exits
    assert not differences(step, rewritten)


def test_more_tiles_than_rows_are_refused():
    """A tile beyond the last row would count that row twice."""
    step = STEP_OF["accuracy"]()
    with pytest.raises(NotTileableError, match="more tiles than rows"):
        rewrite_as(step.concrete_fn, lambda analysis: one_loop(analysis, Grid(1, (SIZE[0] + 1, 1))))
