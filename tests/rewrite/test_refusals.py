"""Tests of the errors of `rewrite`."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from test_rewrite import (
    BATCH,
    IMAGES,
    LABELS,
    TILES,
    close,
    gradients,
    net,
    plain_body,
    segments,
    summed_body,
    training,
)

import tflms_sft
from tflms_sft import AutoParams, LMSParams, RewriteError, SegmentError, SegmentSpec, SFTParams


def test_rewrite_swaps_without_gradients_are_refused():
    model = net()
    with pytest.raises(RewriteError, match="no backward part.*Pass the function that computes gradients and updates"):
        tflms_sft.rewrite(tf.function(lambda images: model(images)), LMSParams(), IMAGES)


def test_rewrite_gradients_inside_loop_are_refused():
    model = net()

    @tf.function
    def step(images):
        def turn(number, total):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(images))
            return number + 1, total + tf.reduce_sum(tape.gradient(loss, model.trainable_variables)[0])

        return tf.while_loop(lambda number, _: number < 2, turn, (0, 0.0))[1]

    with pytest.raises(RewriteError, match="`while` computes gradients inside of a loop, .* Rewrite one iteration"):
        tflms_sft.rewrite(step, TILES, IMAGES)


@pytest.mark.parametrize("step", [lambda images, labels: images, "step", None])
def test_rewrite_python_function_is_refused(step):
    with pytest.raises(TypeError, match=r"must be a `tf.function` or a `ConcreteFunction`.*Wrap it: `tf.function") as e:
        tflms_sft.rewrite(step, TILES, *BATCH)
    assert f"of type {type(step).__name__}" in str(e.value)


@pytest.mark.parametrize("params", [None, (2, 2), [], [TILES, TILES], "8GiB"])
def test_parse_request_other_objects_are_refused(params):
    text = r"`params` must be `SFTParams\(...\)`, `AutoParams\(...\)`, `LMSParams\(...\)` or `PipelineParams\(...\)`"
    with pytest.raises(TypeError, match=text) as error:
        tflms_sft.rewrite(gradients(), params, *BATCH)
    assert f"params={params!r}" in str(error.value)


@pytest.mark.parametrize("shape", [(2, None, 24, 3), (2, 24, None, 3), (None, None, None, 3)])
def test_rewrite_unknown_image_size_is_refused(shape):
    image = keras.Input((None, None, 3))
    model = keras.Model(image, layers.Dense(2)(layers.GlobalAveragePooling2D()(plain_body(image))))
    specs = tf.TensorSpec(shape), tf.TensorSpec((shape[0],), tf.int32)
    with pytest.raises(RewriteError, match="image size of argument .* is unknown.*gives height and width"):
        tflms_sft.rewrite(gradients(model), TILES, *specs)


def test_rewrite_budget_with_unknown_batch_is_refused():
    specs = tf.TensorSpec((None, 24, 24, 3)), tf.TensorSpec((None,), tf.int32)
    step = gradients()
    with pytest.raises(RewriteError, match="batch size is unknown, and a budget needs one.*`tf.TensorSpec`"):
        tflms_sft.rewrite(step, AutoParams("1MiB"), *specs)
    with pytest.raises(RewriteError, match="batch size is unknown"):
        tflms_sft.rewrite(step.get_concrete_function(*specs), AutoParams("1MiB"))


def test_segment_spec_unknown_name_is_refused():
    with pytest.raises(SegmentError, match="`exit` names nothing in the step.*exit='pol'.*Nearest: 'pool'"):
        tflms_sft.rewrite(gradients(), segments(SegmentSpec("photo", "pol")), *BATCH)


def test_segment_specs_overlapping_are_refused():
    specs = SegmentSpec("photo", "two"), SegmentSpec("one", "pool")
    with pytest.raises(SegmentError, match="entry='one', exit='pool' overlaps .*exit='two' at `.*two"):
        tflms_sft.rewrite(gradients(), segments(*specs), *BATCH)


@pytest.mark.parametrize(("entry", "exit_"), [("pool", "one"), ("two", "two")])
def test_segment_spec_independent_exit_is_refused(entry, exit_):
    with pytest.raises(SegmentError, match="no path of forward ops leads from the entry.*Name an exit that"):
        tflms_sft.rewrite(gradients(), segments(SegmentSpec(entry, exit_)), *BATCH)


def test_segment_spec_between_branches_is_refused():
    def body(x):
        left = layers.Conv2D(3, 3, padding="same", name="left")(x)
        right = layers.Conv2D(3, 3, padding="same", name="right")(x)
        return layers.Add(name="sum")([left, right])

    with pytest.raises(SegmentError, match="no path of forward ops"):
        tflms_sft.rewrite(gradients(net(body)), segments(SegmentSpec("left", "right")), *BATCH)


def test_segment_spec_untileable_op_is_named_with_layer():
    with pytest.raises(SegmentError, match="entry='photo', exit='pool' cannot be tiled: .*`.*summed") as error:
        tflms_sft.rewrite(gradients(net(summed_body)), segments(SegmentSpec("photo", "pool")), *BATCH)
    assert "layer 'summed', Summed" in str(error.value)


def test_segment_spec_exit_without_axes_is_refused():
    with pytest.raises(SegmentError, match="entry='photo', exit='head' cannot be tiled"):
        tflms_sft.rewrite(gradients(), segments(SegmentSpec("photo", "head")), *BATCH)


@pytest.mark.parametrize("options", [{"num_tiles": (13, 1)}, {"backward_num_tiles": (1, 13)}])
def test_segment_spec_more_tiles_than_rows_is_refused(options):
    axis = "height" if "num_tiles" in options else "width"
    with pytest.raises(ValueError, match=f"must be at most 12 along the {axis}, the rows of .* Received: .*13"):
        tflms_sft.rewrite(gradients(), segments(SegmentSpec("photo", "pool", **options)), *BATCH)


def test_segment_spec_as_many_tiles_as_rows_works():
    step = gradients()
    fast = tflms_sft.rewrite(step, segments(SegmentSpec("photo", "pool", num_tiles=(12, 1))), *BATCH)
    assert fast.plan.segments[0].num_tiles == (1, 12, 1)
    assert close(fast(*BATCH), step(*BATCH))


def test_rewritten_step_inside_tape_is_refused():
    fast = tflms_sft.rewrite(gradients(), TILES, *BATCH)
    images, labels = map(tf.constant, BATCH)
    with tf.GradientTape() as tape:
        tape.watch(images)
        with pytest.raises(RewriteError, match="cannot be differentiated, .*outside of the tape"):
            fast(images, labels)
        with tape.stop_recording():
            fast(images, labels)


def test_batch_larger_than_the_budget_was_planned_for_is_refused():
    """A smaller one is not, and SFT, which has no budget, runs any batch."""
    model = net()
    specs = [tf.TensorSpec((None, 24, 24, 3), tf.float32), tf.TensorSpec((None,), tf.int32)]
    step = tf.function(training(model), input_signature=specs)
    images, labels = np.repeat(IMAGES, 2, axis=0), np.repeat(LABELS, 2)
    budget = int(0.7 * tflms_sft.rewrite(step, SFTParams(num_tiles=(1, 1)), *BATCH).plan.original.peak_bytes)
    rewritten = tflms_sft.rewrite(step, AutoParams(budget, headroom=0), *BATCH)
    assert rewritten.plan.changed
    rewritten(*BATCH)
    rewritten(IMAGES[:1], LABELS[:1])
    weights = [w.numpy() for w in model.weights]
    text = "^The plan holds for batches of up to 2 images. Rewrite it with example arguments of the largest batch. Rec"
    with pytest.raises(RewriteError, match=text):
        rewritten(images, labels)
    assert all((before == after.numpy()).all() for before, after in zip(weights, model.weights, strict=True))
    tflms_sft.rewrite(step, SFTParams(num_tiles=(2, 2)), *BATCH)(images, labels)


def test_larger_leading_sizes_of_a_step_that_is_not_rewritten_run():
    """Rows of a table and samples have sizes of their own; one that is predicted to exceed the budget is told once."""
    weight = tf.Variable(np.ones((8, 256), np.float32))

    @tf.function(
        input_signature=[tf.TensorSpec((None, 8)), tf.TensorSpec((None,), tf.int32), tf.TensorSpec((None, 256))]
    )
    def step(rows, owner, targets):
        with tf.GradientTape() as tape:
            samples = tf.math.unsorted_segment_sum(tf.tanh(rows @ weight), owner, tf.shape(targets)[0])
            loss = tf.reduce_mean((samples - targets) ** 2)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    def batch(rows, samples):
        return np.ones((rows, 8), np.float32), np.arange(rows, dtype=np.int32) % samples, np.ones((samples, 256), "f4")

    peak = tflms_sft.rewrite(step, AutoParams("1GiB"), *batch(64, 4)).plan.predicted.peak_bytes
    rewritten = tflms_sft.rewrite(step, AutoParams(int(1.2 * peak), headroom=0), *batch(64, 4))
    assert not rewritten.plan.changed
    rewritten(*batch(60, 3))
    with pytest.warns(
        UserWarning, match="a batch of 6400, 6400, 4 is predicted to need .*runs this batch, too. Rewrite"
    ):
        assert np.isfinite(rewritten(*batch(6400, 4)))
