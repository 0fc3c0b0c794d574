"""`rewrite`: what is refused, and the words for it."""

import keras
import pytest
import tensorflow as tf
from keras import layers
from test_rewrite import BATCH, IMAGES, TILES, close, gradients, net, normed_body, plain_body, segments

import tflms_sft
from tflms_sft import AutoParams, LMSParams, RewriteError, SegmentError, SegmentSpec, SFTParams


def test_swaps_in_a_forward_function_are_refused_with_the_remedy():
    model = net()
    with pytest.raises(RewriteError, match="no backward part.*Pass the function that computes gradients and updates"):
        tflms_sft.rewrite(tf.function(lambda images: model(images)), LMSParams(), IMAGES)


def test_gradients_inside_of_a_loop_are_told_as_such():
    model = net()

    @tf.function
    def step(images):
        def turn(number, total):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(images))
            return number + 1, total + tf.reduce_sum(tape.gradient(loss, model.trainable_variables)[0])

        return tf.while_loop(lambda number, _: number < 2, turn, (0, 0.0))[1]

    with pytest.raises(RewriteError, match="Gradients inside of a loop, as `while`, are not seen: rewrite what a turn"):
        tflms_sft.rewrite(step, TILES, IMAGES)


@pytest.mark.parametrize("step", [lambda images, labels: images, "step", None])
def test_what_is_no_function_of_tensorflow_is_refused_with_the_remedy(step):
    with pytest.raises(TypeError, match=r"must be a `tf.function` or a `ConcreteFunction`.*Wrap it: `tf.function") as e:
        tflms_sft.rewrite(step, TILES, *BATCH)
    assert f"of type {type(step).__name__}" in str(e.value)


@pytest.mark.parametrize("params", [None, (2, 2), [], [TILES, TILES], "8GiB"])
def test_other_parameters_are_refused(params):
    text = r"`params` must be `SFTParams\(...\)`, `AutoParams\(...\)`, `LMSParams\(...\)` or `PipelineParams\(...\)`"
    with pytest.raises(TypeError, match=text) as error:
        tflms_sft.rewrite(gradients(), params, *BATCH)
    assert f"params={params!r}" in str(error.value)


@pytest.mark.parametrize("shape", [(2, None, 24, 3), (2, 24, None, 3), (None, None, None, 3)])
def test_an_unknown_image_size_is_refused_with_the_remedy(shape):
    image = keras.Input((None, None, 3))
    model = keras.Model(image, layers.Dense(2)(layers.GlobalAveragePooling2D()(plain_body(image))))
    specs = tf.TensorSpec(shape), tf.TensorSpec((shape[0],), tf.int32)
    with pytest.raises(RewriteError, match="image size of argument .* is unknown.*gives height and width"):
        tflms_sft.rewrite(gradients(model), TILES, *specs)


def test_a_budget_for_an_unknown_batch_is_refused_with_the_remedy():
    specs = tf.TensorSpec((None, 24, 24, 3)), tf.TensorSpec((None,), tf.int32)
    step = gradients()
    with pytest.raises(RewriteError, match="batch size is unknown, and a budget needs one.*`tf.TensorSpec`"):
        tflms_sft.rewrite(step, AutoParams("1MiB"), *specs)
    with pytest.raises(RewriteError, match="batch size is unknown"):
        tflms_sft.rewrite(step.get_concrete_function(*specs), AutoParams("1MiB"))


def test_names_that_do_not_exist():
    with pytest.raises(SegmentError, match="`exit` names nothing in the step.*exit='pol'.*Nearest: 'pool'"):
        tflms_sft.rewrite(gradients(), segments(SegmentSpec("photo", "pol")), *BATCH)


def test_segments_that_overlap():
    specs = SegmentSpec("photo", "two"), SegmentSpec("one", "pool")
    with pytest.raises(SegmentError, match="entry='one', exit='pool' overlaps .*exit='two' at `.*two"):
        tflms_sft.rewrite(gradients(), segments(*specs), *BATCH)


@pytest.mark.parametrize(("entry", "exit_"), [("pool", "one"), ("two", "two")])
def test_segments_whose_exit_does_not_depend_on_the_entry(entry, exit_):
    with pytest.raises(SegmentError, match="no path of forward operations leads from the entry.*Name an exit that"):
        tflms_sft.rewrite(gradients(), segments(SegmentSpec(entry, exit_)), *BATCH)


def test_segments_between_branches_are_not_connected():
    def body(x):
        left = layers.Conv2D(3, 3, padding="same", name="left")(x)
        right = layers.Conv2D(3, 3, padding="same", name="right")(x)
        return layers.Add(name="sum")([left, right])

    with pytest.raises(SegmentError, match="no path of forward operations"):
        tflms_sft.rewrite(gradients(net(body)), segments(SegmentSpec("left", "right")), *BATCH)


def test_an_op_inside_that_cannot_be_tiled_is_named_with_its_layer():
    with pytest.raises(SegmentError, match="entry='photo', exit='pool' cannot be tiled: .*`.*norm") as error:
        tflms_sft.rewrite(gradients(net(normed_body)), segments(SegmentSpec("photo", "pool")), *BATCH)
    assert "layer 'norm', LayerNormalization" in str(error.value)


def test_an_exit_that_is_no_image_is_refused():
    with pytest.raises(SegmentError, match="entry='photo', exit='head' cannot be tiled"):
        tflms_sft.rewrite(gradients(), segments(SegmentSpec("photo", "head")), *BATCH)


@pytest.mark.parametrize("options", [{"num_tiles": (13, 1)}, {"backward_num_tiles": (1, 13)}])
def test_more_tiles_than_rows_is_an_error_with_the_numbers(options):
    axis = "height" if "num_tiles" in options else "width"
    with pytest.raises(ValueError, match=f"asks for 13 tiles along the {axis}.* has 12 row.* Use at most 12"):
        tflms_sft.rewrite(gradients(), segments(SegmentSpec("photo", "pool", **options)), *BATCH)


def test_as_many_tiles_as_rows_work():
    step = gradients()
    fast = tflms_sft.rewrite(step, segments(SegmentSpec("photo", "pool", num_tiles=(12, 1))), *BATCH)
    assert fast.plan.segments[0].num_tiles == (1, 12, 1)
    assert close(fast(*BATCH), step(*BATCH))


def test_automatic_segments_take_fewer_tiles_where_there_are_fewer_rows():
    def body(x):
        x = layers.Lambda(lambda t: tf.reverse(t, [1]))(plain_body(x))  # No rule tiles it.
        for _ in range(2):
            x = layers.Conv2D(6, 3, padding="same", activation="relu")(x)
        return layers.MaxPool2D(2)(x)

    fast = tflms_sft.rewrite(gradients(net(body)), SFTParams(num_tiles=(12, 1)), *BATCH)
    assert [segment.num_tiles for segment in fast.plan.segments] == [(1, 12, 1), (1, 6, 1)]


def test_a_step_in_a_tape_is_told_where_to_be_called():
    fast = tflms_sft.rewrite(gradients(), TILES, *BATCH)
    images, labels = map(tf.constant, BATCH)
    with tf.GradientTape() as tape:
        tape.watch(images)
        with pytest.raises(RewriteError, match="cannot be differentiated again.*outside of the tape"):
            fast(images, labels)
        with tape.stop_recording():
            fast(images, labels)
