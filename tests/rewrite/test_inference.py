"""Tests of rewriting functions without gradients, such as the call of a model."""

import keras
import nets
import numpy as np
import pytest
import tensorflow as tf
from equivalence import error
from keras import layers
from test_rewrite import BATCH, gradients

import tflms_sft
from tflms_sft import AutoParams, BudgetError, LMSParams, RewriteError, SegmentSpec, SFTParams

RNG = np.random.default_rng(3)


def built(body, size=(96, 96), classes=0):
    """Build a float64 model with changed moving statistics."""
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(2)
    image = keras.Input((*size, 3))
    x = body(image)
    if classes:
        x = layers.Dense(classes)(layers.GlobalAveragePooling2D()(x))
    model = keras.Model(image, x)
    for weight in model.non_trainable_variables:
        if "moving" in weight.path:
            weight.assign(RNG.uniform(0.5, 2.0, weight.shape))
    return model


def call_of(model):
    return tf.function(lambda images: model(images, training=False))


def images_of(model, batch=2):
    return RNG.normal(size=(batch, *model.input_shape[1:]))


def checked(model, params, batch=2, spec=None):
    """Rewrite the call of a model and compare it with the original."""
    images, call = images_of(model, batch), call_of(model)
    fast = tflms_sft.rewrite(call, params, images if spec is None else spec)
    wrong = max(error(got, want) for got, want in zip(*map(tf.nest.flatten, (fast(images), call(images))), strict=True))
    assert wrong <= 1e-10
    return fast


def whole(model):
    """Return the segment from the first to the last layer."""
    return SegmentSpec(model.layers[0].name, model.layers[-1].name)


def volumes(x):
    for filters in (2, 3):
        x = layers.Conv3D(filters, 3, padding="same", activation="relu")(x)
        x = layers.Conv3D(filters, 3, padding="same", activation="relu")(x)
    return layers.Conv3D(2, 2, strides=2)(x)


# Tiles as told ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [nets.vgg, nets.residual, nets.chain, nets.unet, nets.u_net], ids=lambda b: b.__name__)
@pytest.mark.parametrize("size", [(24, 24), (33, 21)], ids=["even", "odd"])
def test_rewrite_call_without_gradients_has_forward_loops_only(body, size):
    model = built(body, size)
    plan = checked(model, SFTParams((3, 2), [whole(model)])).plan
    assert plan.segments and sum(segment.forward_ops for segment in plan.segments) > 8
    assert all(s.num_loops == 1 and not s.backward_num_tiles and not s.backward_ops for s in plan.segments)
    assert max(segment.num_tiles for segment in plan.segments) == (1, 3, 2)


def test_rewrite_call_large_image_has_lower_peak():
    plan = checked(built(nets.vgg, (96, 96)), SFTParams((4, 4))).plan
    assert plan.predicted.peak_bytes < 0.7 * plan.original.peak_bytes


def test_rewrite_call_batch_norm_statistics_are_unchanged():
    model = built(nets.bottlenecks)
    before = [np.array(weight) for weight in model.weights]
    plan = checked(model, SFTParams((3, 3), [whole(model)])).plan
    assert len(plan.segments) == 1  # With frozen statistics no sum lies in between.
    assert all(np.array_equal(a, b) for a, b in zip(before, model.weights, strict=True))


def test_rewrite_call_with_carried_rows_equals_original():
    model = built(nets.vgg)
    carried, again = (checked(model, SFTParams((4, 1), halo=halo)).plan.segments[0] for halo in ("carry", "recompute"))
    assert carried.halo == "carry" and carried.saved_bytes == 0  # No backward loop that would read them.
    assert carried.overlapped_bytes < 0.2 * again.overlapped_bytes


def test_rewrite_call_volumes_equals_original():
    keras.config.set_floatx("float64")
    image = keras.Input((9, 12, 10, 2))
    plan = checked(keras.Model(image, volumes(image)), SFTParams((2, 3, 2))).plan
    assert plan.segments[0].num_tiles == (1, 2, 3, 2)


def test_rewrite_call_reduction_over_image_ends_segment():
    plan = checked(built(nets.vgg, classes=3), SFTParams((4, 4))).plan
    assert len(plan.segments) == 1 and any("Mean" in reason for _, reason in plan.left_alone)
    plan = checked(built(nets.squeeze_and_excite), SFTParams((4, 4))).plan
    assert len(plan.segments) > 1


def test_rewrite_call_unknown_batch_accepts_any_size():
    model = built(nets.residual)
    fast = checked(model, SFTParams((2, 2, 2)), spec=tf.TensorSpec((None, 96, 96, 3), tf.float64))
    for batch in (5, 1):
        images = images_of(model, batch)
        assert error(fast(images), model(images, training=False)) <= 1e-10


def test_rewrite_test_step_loss_and_metrics_equal_original():
    model = built(nets.vgg, classes=3)
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    batch = images_of(model, 3), np.array([0, 2, 1])
    model.evaluate(*batch, verbose=0)  # Builds the metrics.
    found = []
    step = tf.function(lambda images, labels: model.test_step((images, labels)))
    for function in (step, tflms_sft.rewrite(step, SFTParams((3, 3)), *batch)):
        model.reset_metrics()
        for _ in range(2):
            results = function(*map(tf.constant, batch))
        found.append([*map(np.array, tf.nest.flatten(results)), *map(np.array, model.metrics_variables)])
    assert len(found[0]) > 4 and all(error(got, want) <= 1e-10 for want, got in zip(*found, strict=True))


def test_rewrite_call_named_segment_is_tiled():
    model = built(nets.vgg)
    spec = SegmentSpec(model.layers[0].name, "pool3", num_tiles=(2, 2))
    plan = checked(model, SFTParams(segments=[spec])).plan
    assert [segment.exits for segment in plan.segments] == [("pool3",)]


# Within a budget -------------------------------------------------------------------------------------------


def deeper(x):
    """Skip connections over two levels keep many tensors alive."""
    first = nets.conv(4)(nets.conv(4)(x))
    second = nets.conv(6)(layers.MaxPool2D(2)(first))
    x = nets.conv(8)(nets.conv(8)(layers.MaxPool2D(2)(second)))
    x = layers.Concatenate()([second, layers.Conv2DTranspose(6, 2, strides=2)(x)])
    x = layers.Concatenate()([first, layers.Conv2DTranspose(4, 2, strides=2)(nets.conv(6)(x))])
    return nets.conv(2, name="out")(nets.conv(4)(x))


def wide_bottlenecks(x):
    return nets.bottlenecks(nets.conv(12)(x))


MANY, FEW = (0.95, 0.9, 0.8, 0.7, 0.65, 0.6, 0.55), (0.9, 0.6)


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        (nets.vgg, FEW),
        (deeper, FEW),
        *(pytest.param(body, MANY, marks=pytest.mark.slow) for body in (nets.vgg, deeper, wide_bottlenecks)),
    ],
)
def test_rewrite_call_larger_budget_is_not_slower(body, parts):
    model = built(body, (128, 96))
    call, images = call_of(model), images_of(model, 1)
    plain = tflms_sft.rewrite(call, AutoParams("1TiB"), images)
    assert not plain.plan.changed
    slowest, met = 1.0, 0
    for part in parts:
        budget = int(part * plain.plan.original.peak_bytes)
        try:
            fast = tflms_sft.rewrite(call, AutoParams(budget), images)
        except BudgetError as error_:
            assert error_.smallest_bytes > budget
            continue
        met += 1
        assert fast.plan.predicted.peak_bytes <= 0.9 * budget and fast.plan.memory_budget == budget
        assert fast.plan.predicted.time_ratio >= slowest - 1e-9
        slowest = fast.plan.predicted.time_ratio
        assert error(fast(images), call(images)) <= 1e-10
    assert met >= 2


def test_rewrite_call_infeasible_budget_names_feasible_one():
    model = built(nets.vgg, (96, 96))
    call, images = call_of(model), images_of(model, 1)
    with pytest.raises(BudgetError, match="`memory_budget` is too small for this step") as refused:
        tflms_sft.rewrite(call, AutoParams("1KiB"), images)
    plan = tflms_sft.rewrite(call, AutoParams(refused.value.smallest_bytes), images).plan
    assert plan.segments and not plan.swaps


def test_rewrite_call_budget_does_not_swap():
    model = built(nets.vgg, (96, 96))
    peak = checked(model, AutoParams("1TiB"), 1).plan.original.peak_bytes
    plan = checked(model, AutoParams(int(0.8 * peak), swap=LMSParams(min_bytes=1)), 1).plan
    assert plan.segments and not plan.swaps
    assert plan.notes == ("nothing is swapped: a step without a backward pass saves no tensors",)


# What is left as it is -------------------------------------------------------------------------------------


def test_rewrite_call_without_images_is_unchanged():
    step = tf.function(lambda x: tf.tensordot(x, tf.transpose(x), 1))
    x = RNG.normal(size=(4, 5))
    fast = tflms_sft.rewrite(step, SFTParams((2, 2)), x)
    assert not fast.plan.changed and np.array_equal(fast(x), step(x))


def test_rewrite_call_untileable_op_is_named():
    model = built(lambda x: layers.Lambda(lambda t: tf.image.adjust_contrast(t, 2.0))(x))
    plan = checked(model, SFTParams((2, 2))).plan
    assert not plan.changed and plan.left_alone and "nothing rewritten" in plan.summary()


def test_rewrite_call_without_saving_is_not_rewritten():
    model = built(lambda x: layers.Conv2D(4, 3, padding="same", activation="relu")(x))
    plan = checked(model, SFTParams((2, 2))).plan
    assert not plan.changed and plan.left_alone[0][1] == "a tiled segment would need as many bytes as the original ops"


def test_rewrite_call_swaps_are_refused():
    model = built(nets.vgg)
    with pytest.raises(RewriteError, match="no backward part"):
        tflms_sft.rewrite(call_of(model), LMSParams(), images_of(model))
    plan = checked(model, [SFTParams((3, 3)), LMSParams()]).plan
    assert plan.segments and not plan.swaps
    assert plan.notes == ("nothing is swapped: a step without a backward pass saves no tensors",)


def test_rewrite_training_step_segments_have_backward_ops():
    plan = tflms_sft.rewrite(gradients(), SFTParams((2, 2)), *BATCH).plan
    assert plan.segments and all(segment.backward_ops for segment in plan.segments)
