"""Tests of training with barriers: callbacks, budgets, named segments, swaps, half precision."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import TOLERANCE, error
from keras import layers
from nets import Compiled, conv_norm, momentum
from one_op import Const, OneOp

import tflms_sft
from rewriters.tiling.tile_planner import Grid, Halo

IMAGES, LABELS = np.random.default_rng(0).normal(size=(4, 40, 36, 3)), np.array([0, 1, 2, 0])


def model_of(floatx="float64"):
    keras.config.set_floatx(floatx)
    keras.utils.set_random_seed(1)
    image = x = keras.Input((40, 36, 3), name="photo")
    for number in range(6):
        x = layers.Conv2D(8, 3, padding="same", name=f"conv{number}")(x)
        x = layers.ReLU(name=f"relu{number}")(layers.BatchNormalization()(x))
    pooled = layers.GlobalAveragePooling2D(name="pooled")(x)
    model = keras.Model(image, layers.Dense(3, dtype=floatx, name="scores")(pooled))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(momentum(), loss, jit_compile=False)
    return model


def trained(callbacks, floatx="float64", images=IMAGES):
    model = model_of(floatx)
    model.fit(images, LABELS, batch_size=2, epochs=2, verbose=0, shuffle=False, callbacks=callbacks)
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)  # inside of one that scales losses
    return [np.array(v) for v in (*model.variables, *optimizer.variables)]


def furthest(callbacks, floatx="float64"):
    return max(error(got, want) for got, want in zip(trained(callbacks, floatx), trained([], floatx), strict=True))


def test_fit_named_segments_with_barriers_equals_original():
    specs = [
        tflms_sft.SegmentSpec("photo", "relu2", num_tiles=(4, 3)),
        tflms_sft.SegmentSpec("relu2", "relu4", num_tiles=(3, 1), stored="conv4"),
    ]
    callback = tflms_sft.SFT(segments=specs, verbose=0)
    assert furthest([callback]) < TOLERANCE
    assert [segment.exits for segment in callback.plan.segments] == [("relu2",), ("relu4",)]
    assert all(segment.num_loops > 2 for segment in callback.plan.segments)


def test_segment_spec_exit_at_reduction_is_accepted():
    spec = tflms_sft.SegmentSpec("relu1", "pooled", num_tiles=(4, 3))
    callback = tflms_sft.SFT(segments=[spec], verbose=0)
    assert furthest([callback]) < TOLERANCE
    assert callback.plan.segments[0].entries == ("relu1",)


def test_segment_spec_exit_at_untileable_op_is_refused():
    spec = tflms_sft.SegmentSpec("relu1", "scores", num_tiles=(4, 3))
    with pytest.raises(
        tflms_sft.SegmentError, match="'scores', Dense.* does not run in tiles.*End the segment at an op"
    ):
        trained([tflms_sft.SFT(segments=[spec], verbose=0)])


def test_segment_spec_stored_untileable_tensor_is_refused():
    image = keras.Input((20, 18, 3), name="photo")
    x = layers.ReLU()(conv_norm(image, 4))
    x = Compiled(name="compiled")(x)
    x = layers.ReLU(name="out")(conv_norm(x, 4))
    model = keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    spec = tflms_sft.SegmentSpec("photo", "out", num_tiles=(2, 2), stored="compiled")
    with pytest.raises(tflms_sft.SegmentError, match="`stored` must name tensors that run in tiles"):
        model.fit(IMAGES[:, :20, :18], LABELS, verbose=0, callbacks=[tflms_sft.SFT(segments=[spec], verbose=0)])


def test_segment_spec_grouped_convolution_resolves():
    """Grouped convolutions are traced as calls, so that no op has the name of their layer."""
    image = keras.Input((20, 18, 3), name="photo")
    x = layers.ReLU()(conv_norm(image, 4))
    x = layers.Conv2D(4, 3, padding="same", groups=2, use_bias=False, name="grouped")(x)
    x = layers.ReLU(name="out")(conv_norm(x, 4))
    model = keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    specs = [
        tflms_sft.SegmentSpec("photo", "grouped", num_tiles=(2, 2)),
        tflms_sft.SegmentSpec("grouped", "out", num_tiles=(3, 3)),
    ]
    callback = tflms_sft.SFT(segments=specs, verbose=0)
    model.fit(IMAGES[:, :20, :18], LABELS, verbose=0, callbacks=[callback])
    assert [segment.exits for segment in callback.plan.segments] == [("grouped",), ("out",)]


def plan_within(part):
    """The plan of a budget without swaps, whose training equals the original one."""
    plain = tflms_sft.MemoryBudget("1GiB", verbose=0)
    trained([plain])
    callback = tflms_sft.MemoryBudget(int(part * plain.plan.original.peak_bytes / 0.9), swap=False, verbose=0)
    assert furthest([callback]) < TOLERANCE
    assert callback.plan.predicted.peak_bytes <= 0.9 * callback.plan.memory_budget
    return callback.plan


@pytest.mark.parametrize("part", (pytest.param(0.85, marks=pytest.mark.slow), 0.6))
def test_memory_budget_without_swaps_equals_original(part):
    plan = plan_within(part)
    assert plan.segments and not plan.swaps


def test_memory_budget_with_strips_equals_original(monkeypatch):
    """The search selects strips because tiles are made more expensive here."""
    from tflms_sft._barriers import barrier_search

    found = []

    def dear_tiles(candidate):
        found.append(candidate.plans[0].halo)
        return found[-1] is Halo.RECOMPUTE, candidate.time_ratio

    monkeypatch.setattr(barrier_search, "_rank", dear_tiles)
    (segment,) = plan_within(0.6).segments
    assert set(found) == set(Halo), "both were tried"
    assert segment.halo == "carry" and segment.backward_num_tiles[1] > 1


@pytest.mark.slow
def test_budget_error_smallest_bytes_is_feasible():
    with pytest.raises(tflms_sft.BudgetError) as caught:
        trained([tflms_sft.MemoryBudget("1kB", swap=False, verbose=0)])
    callback = tflms_sft.MemoryBudget(caught.value.smallest_bytes, swap=False, max_slowdown=math.inf, verbose=0)
    trained([callback])
    assert callback.plan.segments


def test_rewrite_barriers_and_swaps_equal_original(tmp_path):
    model, plain = model_of(), model_of()
    for each in (model, plain):
        each.optimizer.build(each.trainable_variables)
    params = [
        tflms_sft.SFTParams(num_tiles=(4, 2)),
        tflms_sft.LMSParams(tier="disk", spill_dir=tmp_path, min_bytes=0, ctrld_strategy="direct_order"),
    ]
    step = tf.function(lambda x, y: model.train_step((x, y))["loss"])
    fast = tflms_sft.rewrite(step, params, IMAGES[:2], LABELS[:2])
    assert fast.plan.segments and fast.plan.swaps
    for _ in range(2):
        fast(IMAGES[:2], LABELS[:2])
        plain.train_step((IMAGES[:2], LABELS[:2]))
    for got, want in zip(model.variables, plain.variables, strict=True):
        assert error(np.array(got), np.array(want)) < TOLERANCE


@pytest.mark.parametrize("policy", ("mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.slow)))
def test_fit_half_precision_error_is_at_most_that_of_original(policy):
    """Compare with float32; the reference distance is that of images perturbed by less than one rounding."""
    exact = trained([], "float32")
    keras.config.set_dtype_policy(policy)

    def off(callbacks, images):
        found = trained(callbacks, "float32", images)
        return np.mean([error(got, want) for got, want in zip(found, exact, strict=True)])

    noise = np.random.default_rng(1).normal(size=(2, *IMAGES.shape))
    plain = max(off([], images) for images in (IMAGES, *(IMAGES * (1 + 2e-4 * noise))))
    assert 0 < off([tflms_sft.SFT(num_tiles=(4, 3), verbose=0)], IMAGES) < 1.5 * plain


def test_mean_of_many_float16_values_equals_original():
    """The count exceeds the range of float16: TensorFlow's own mean is zero on a CPU."""
    one = OneOp("Mean", {"input": np.full((2, 300, 300, 1), 0.5, "float16"), "axis": Const([1, 2])})
    _, (means,) = one.run([one.gathered(Grid(1, (3, 1)))])
    assert np.all(means == 0.5)
