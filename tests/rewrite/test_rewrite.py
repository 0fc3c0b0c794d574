"""Tests of `rewrite`: step types, calls and results. Errors are in `test_refusals.py`."""

import copy
import functools
import gc
import itertools
import pickle
import re
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tflms_sft
from tflms_sft import AutoParams, BudgetError, RewriteError, SegmentError, SegmentSpec, SFTParams

TILES = SFTParams(num_tiles=(2, 2))
IMAGES = np.random.default_rng(0).normal(size=(2, 24, 24, 3)).astype("float32")
LABELS = np.array([0, 1], "int32")
BATCH = IMAGES, LABELS


def net(body=None, size=24, batch_size=None):
    image = keras.Input((size, size, 3), batch_size=batch_size, name="photo")
    x = (body or plain_body)(image)
    return keras.Model(image, layers.Dense(2, name="head")(layers.GlobalAveragePooling2D(name="mean")(x)))


def plain_body(x):
    for name in ("one", "two", "three"):
        x = layers.Conv2D(6, 3, padding="same", activation="relu", name=name)(x)
    return layers.MaxPool2D(2, name="pool")(x)


class Summed(layers.Layer):
    """A layer that no rule tiles."""

    def call(self, x):
        return keras.ops.cumsum(x, axis=1)


def summed_body(x):
    x = layers.Conv2D(4, 3, padding="same", name="one")(x)
    x = Summed(name="summed")(x)
    return layers.MaxPool2D(2, name="pool")(x)


def loss_of(model, images, labels):
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images, training=True))
    return tf.reduce_mean(losses)


def training(model, optimizer=None):
    """A hand-written training step; it returns the loss."""
    optimizer = optimizer or keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)

    def step(images, labels):
        weights = model.trainable_variables
        with tf.GradientTape() as tape:
            loss = loss_of(model, images, labels)
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    step.optimizer = optimizer
    return step


def gradients(model=None):
    """A step that changes nothing: it returns the loss and the gradients."""
    model = model or net()

    @tf.function
    def step(images, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(model, images, labels)
        return loss, tape.gradient(loss, model.trainable_variables)

    step.model = model  # TensorFlow keeps variables by weak references only.
    return step


@functools.cache
def rewritten_once():
    """A step and the rewritten one, which tests share."""
    step = gradients()
    return step, tflms_sft.rewrite(step, TILES, *BATCH)


def close(got, want, tolerance=1e-6):
    tf.nest.assert_same_structure(got, want)
    pairs = zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True)
    return all(np.allclose(a, b, rtol=0, atol=tolerance) for a, b in pairs)


def segments(*specs, **options):
    return SFTParams(num_tiles=(2, 2), segments=list(specs), **options)


# Ways to hand a step over -------------------------------------------------------------------------------------


def test_rewrite_function_with_arrays_equals_original():
    step, fast = rewritten_once()
    assert fast.plan.changed and fast.plan.batch == 2 and fast.plan.batch_is_fixed
    assert close(fast(*BATCH), step(*BATCH))


def test_rewrite_function_with_params_in_list_equals_original():
    step = gradients()
    fast = tflms_sft.rewrite(step, [TILES], *map(tf.constant, BATCH))
    assert close(fast(*map(tf.constant, BATCH)), step(*BATCH))


def test_rewrite_specs_with_unknown_batch_accept_any_size():
    step = gradients()
    specs = tf.TensorSpec((None, 24, 24, 3)), tf.TensorSpec((None,), tf.int32)
    fast = tflms_sft.rewrite(step, TILES, *specs)
    assert not fast.plan.batch_is_fixed
    for size in (2, 1):
        assert close(fast(IMAGES[:size], LABELS[:size]), step(IMAGES[:size], LABELS[:size]))


def test_rewrite_unknown_batch_is_planned_for_example():
    inner = gradients()
    specs = tf.TensorSpec((None, 24, 24, 3)), tf.TensorSpec((None,), tf.int32)
    step = tf.function(inner.python_function, input_signature=specs)
    assert tflms_sft.rewrite(step, TILES, *BATCH).plan.batch == 2
    assert tflms_sft.rewrite(step, TILES, images=IMAGES, labels=LABELS).plan.batch == 2


def test_rewrite_concrete_function_equals_original():
    step = gradients()
    fast = tflms_sft.rewrite(step.get_concrete_function(*BATCH), TILES)
    assert fast.plan.changed
    assert close(fast(*BATCH), step(*BATCH))


def test_rewrite_concrete_function_with_arguments_is_refused():
    with pytest.raises(TypeError, match="`ConcreteFunction`, for which example arguments have no effect. Omit them"):
        tflms_sft.rewrite(gradients().get_concrete_function(*BATCH), TILES, *BATCH)


def test_rewrite_keyword_arguments_equal_original():
    step = gradients()
    fast = tflms_sft.rewrite(step, TILES, labels=LABELS, images=IMAGES)
    want = step(*BATCH)
    assert close(fast(images=IMAGES, labels=LABELS), want)
    assert close(fast(IMAGES, labels=LABELS), want)
    assert close(fast(*BATCH), want)
    assert close(tflms_sft.rewrite(step, TILES, *BATCH)(labels=LABELS, images=IMAGES), want)


def test_rewrite_keyword_only_arguments_equal_original():
    inner = gradients()
    step = tf.function(lambda images, *, labels: inner(images, labels))
    fast = tflms_sft.rewrite(step, TILES, IMAGES, labels=LABELS)
    assert close(fast(IMAGES, labels=LABELS), inner(*BATCH))


def test_rewrite_nested_structures_are_preserved():
    inner = gradients()

    @tf.function
    def step(batch):
        loss, found = inner(batch["x"], batch["y"][0])
        return {"loss": loss, "nothing": None, "found": tuple(found)}

    batch = {"x": IMAGES, "y": [LABELS]}
    fast = tflms_sft.rewrite(step, TILES, batch)
    got = fast(batch)
    assert got["nothing"] is None and isinstance(got["found"], tuple)
    assert close(got["found"], step(batch)["found"])


def test_rewrite_composite_results_are_preserved():
    """The gradient of an embedding is a `tf.IndexedSlices`."""
    model, table = net(), tf.Variable(tf.ones((7, 2)))

    @tf.function
    def step(images, labels):
        with tf.GradientTape() as tape:
            scores = model(images, training=True) * tf.gather(table, labels)
            loss = tf.reduce_sum(scores**2)
        of_table, of_model = tape.gradient(loss, [table, model.trainable_variables])
        ragged = tf.RaggedTensor.from_row_lengths(labels, [1, 0, 1])
        return {"gradients": [of_table, of_model], "ragged": ragged, "last": loss, "none": None}

    got, want = tflms_sft.rewrite(step, TILES, *BATCH)(*BATCH), step(*BATCH)
    assert isinstance(got["gradients"][0], tf.IndexedSlices) and isinstance(got["ragged"], tf.RaggedTensor)
    assert got["none"] is None and got["last"].shape == ()
    tf.nest.assert_same_structure(got, want, expand_composites=True)
    flat = [tf.nest.flatten(result, expand_composites=True) for result in (got, want)]
    assert all(np.allclose(a, b, atol=1e-5) for a, b in zip(*flat, strict=True) if a is not None)


@pytest.mark.parametrize("value", (tf.ragged.constant([[1.0], []]), tf.sparse.eye(3), tf.RaggedTensorSpec((2, None))))
def test_rewrite_sparse_arguments_are_refused(value):
    step = tf.function(lambda images, more: tf.reduce_sum(images))
    with pytest.raises(RewriteError, match="must be dense tensors. Received.*Pass its components"):
        tflms_sft.rewrite(step, TILES, IMAGES, value)
    with pytest.raises(RewriteError, match="must be dense tensors"):
        tflms_sft.rewrite(step.get_concrete_function(IMAGES, value), TILES)


def test_rewrite_jit_compiled_step_is_noted():
    model = net()

    @tf.function(jit_compile=True)
    def step(images, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(model, images, labels)
        return loss, tape.gradient(loss, model.trainable_variables)

    fast = tflms_sft.rewrite(step, TILES, *BATCH)
    assert "compiled by XLA" in fast.plan.summary() and fast.plan.changed
    assert close(fast(*BATCH), step(*BATCH), tolerance=1e-5)
    assert rewritten_once()[1].plan.notes == ()


def test_rewrite_eager_functions_are_refused():
    tf.config.run_functions_eagerly(True)
    try:
        with pytest.raises(RewriteError, match=r"Call `tf.config.run_functions_eagerly\(False\)`"):
            tflms_sft.rewrite(gradients(), TILES, *BATCH)
    finally:
        tf.config.run_functions_eagerly(False)


def test_rewritten_step_non_tensor_arguments_are_constants():
    inner = gradients()

    @tf.function
    def step(images, labels, scale=2.0, flag=None):
        loss, found = inner(images, labels)
        return loss * scale, found

    fast = tflms_sft.rewrite(step, TILES, *BATCH)
    want = step(*BATCH)
    assert close(fast(*BATCH), want)
    assert close(fast(*BATCH, 2.0), want)
    assert close(fast(*BATCH, scale=2.0, flag=None), want)
    with pytest.raises(TypeError, match="rewritten for one signature"):
        fast(*BATCH, 3.0)
    tripled = tflms_sft.rewrite(step, TILES, *BATCH, scale=3.0)
    assert close(tripled(*BATCH, scale=3.0)[0], inner(*BATCH)[0] * 3.0)


def test_rewritten_step_returned_argument_is_unchanged():
    inner = gradients()
    step = tf.function(lambda images, labels: (labels, inner(images, labels)))
    fast = tflms_sft.rewrite(step, TILES, *BATCH)
    assert np.array_equal(fast(*BATCH)[0], LABELS)


# Ways to use the result ---------------------------------------------------------------------------------------


def test_rewritten_step_inside_tf_function_equals_original():
    step, fast = rewritten_once()

    @tf.function
    def twice(images, labels):
        return fast(images, labels)[0] + fast(images, labels)[0]

    assert close(twice(*BATCH), 2 * step(*BATCH)[0])


def test_rewritten_step_concrete_function_accepts_flat_tensors():
    step, fast = rewritten_once()
    assert close(fast.concrete_function(*map(tf.constant, BATCH)), step(*BATCH))
    types = {op.type for op in fast.concrete_function.graph.get_operations()}
    assert {"While", "StatelessWhile"} & types


def test_rewrite_loops_have_name_scopes():
    _, fast = rewritten_once()
    names = [op.name for op in fast.concrete_function.graph.get_operations() if op.type.endswith("While")]
    assert [name.split("/")[:3] for name in names] == [["sft", "segment1", "forward"], ["sft", "segment1", "backward"]]


@pytest.mark.parametrize(
    "arguments",
    [
        (np.zeros((2, 24, 25, 3), "float32"), LABELS),
        (np.zeros((3, 24, 24, 3), "float32"), LABELS),
        (np.zeros((2, 24, 24), "float32"), LABELS),
        (tf.zeros((2, 24, 24, 3), tf.float64), LABELS),
        (IMAGES, np.array([0.5, 1.5], "float32")),
        (IMAGES, tf.constant([0, 1], tf.int64)),
        (IMAGES, ["a", "b"]),
        (IMAGES, None),
        (IMAGES,),
        (IMAGES, LABELS, LABELS),
        ([IMAGES], LABELS),
        ((IMAGES, LABELS),),
        (),
    ],
    ids=range(13),
)
def test_rewritten_step_other_arguments_raise_with_signature(arguments):
    _, fast = rewritten_once()
    with pytest.raises(TypeError, match="rewritten for one signature") as error:
        fast(*arguments)
    expected = str(error.value).partition("Expected: ")[2].partition("Received: ")[0]
    assert "shape=(2, 24, 24, 3), dtype=tf.float32" in expected
    assert "shape=(2,), dtype=tf.int32" in expected
    assert "Rewrite the step for these arguments too" in str(error.value)


@pytest.mark.parametrize("keywords", [{"image": IMAGES}, {"labels": LABELS, "images": IMAGES, "more": LABELS}])
def test_rewritten_step_other_keywords_raise(keywords):
    with pytest.raises(TypeError, match="rewritten for one signature.*Expected: .*images"):
        rewritten_once()[1](**keywords)


def test_rewritten_step_error_truncates_arguments():
    with pytest.raises(TypeError, match=r"Received: .*\[\.\.\.\]. Rewrite the step") as error:
        rewritten_once()[1](IMAGES.tolist(), LABELS)
    assert len(str(error.value)) < 1500


def test_rewritten_step_arrays_are_cast_within_kind():
    _, fast = rewritten_once()
    assert close(fast(IMAGES.astype("float64"), LABELS.astype("int64")), fast(*BATCH))


def test_rewritten_step_pickle_and_copy_are_refused():
    for attempt in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be pickled. Rewrite the step again"):
            attempt(rewritten_once()[1])


def test_rewritten_step_keeps_variables_alive():
    model = net()
    reference = weakref.ref(model)
    fast = tflms_sft.rewrite(tf.function(training(model)), TILES, *BATCH)
    del model
    keras.backend.clear_session()
    gc.collect()
    first, second = float(fast(*BATCH)), float(fast(*BATCH))
    assert np.isfinite(first) and second < first
    assert tflms_sft.verify(fast, BATCH).ok, "which traces the original anew"
    del fast
    gc.collect()
    assert reference() is None, "and no longer than itself"


# What comes out -----------------------------------------------------------------------------------------------


def test_rewrite_one_tile_is_bitwise_equal():
    step = gradients()
    fast = tflms_sft.rewrite(step, segments(SegmentSpec("photo", "pool", num_tiles=(1, 1))), *BATCH)
    assert fast.plan.changed
    assert close(fast(*BATCH), step(*BATCH), tolerance=0)


def test_auto_segments_one_tile_leaves_step_as_it_is_with_reason():
    plan = tflms_sft.rewrite(gradients(), SFTParams(num_tiles=(1, 1)), *BATCH).plan
    assert not plan.changed
    assert any(reason == "in 1x1 tiles these ops would need as much memory as untiled" for _, reason in plan.left_alone)


def test_segment_spec_values_override_sft_params():
    specs = SegmentSpec("photo", "two", num_tiles=(3, 1)), SegmentSpec("two", "pool", backward_num_tiles=(1, 4))
    fast = tflms_sft.rewrite(gradients(), segments(*specs, backward_num_tiles=(2, 3)), *BATCH)
    tiles = [(segment.num_tiles, segment.backward_num_tiles) for segment in fast.plan.segments]
    assert tiles == [((1, 3, 1), (1, 2, 3)), ((1, 2, 2), (1, 1, 4))]


def test_auto_params_large_budget_rewrites_nothing():
    step = gradients()
    fast = tflms_sft.rewrite(step, AutoParams("1GiB"), *BATCH)
    assert not fast.plan.changed and not fast.plan.segments
    assert fast.plan.predicted.peak_bytes == fast.plan.original.peak_bytes
    assert close(fast(*BATCH), step(*BATCH), tolerance=0)


def test_auto_params_infeasible_budget_names_smallest():
    step = gradients(net(size=48))
    images = np.zeros((2, 48, 48, 3), "float32")
    with pytest.raises(BudgetError, match="`memory_budget` is too small.*smallest plan found needs") as error:
        tflms_sft.rewrite(step, AutoParams("10kB"), images, LABELS)
    smallest, tensor = error.value.smallest_bytes, error.value.tensor
    assert f"({smallest} bytes, headroom of 10% included)" in str(error.value)
    assert f"`{tensor}` is " in str(error.value)
    assert "memory_budget=9.77 KiB" in str(error.value)
    slowdown = re.search(r"with `max_slowdown=(\d+)", str(error.value))
    params = AutoParams(smallest, max_slowdown=int(slowdown[1]) if slowdown else 10)
    plan = tflms_sft.rewrite(step, params, images, LABELS).plan
    assert plan.changed and plan.predicted.peak_bytes <= 0.9 * smallest + 1
    assert plan.predicted.peak_bytes < plan.original.peak_bytes


@pytest.mark.parametrize("headroom", [0, 0.5])
def test_auto_params_headroom_stays_free(headroom):
    step = gradients(net(size=48))
    images = np.zeros((2, 48, 48, 3), "float32")
    plain = tflms_sft.rewrite(step, AutoParams("1GiB"), images, LABELS).plan.original.peak_bytes
    budget = int(0.8 * plain / (1 - headroom))
    plan = tflms_sft.rewrite(step, AutoParams(budget, headroom), images, LABELS).plan
    assert plan.changed and plan.memory_budget == budget
    assert plan.predicted.peak_bytes <= 0.8 * plain + 1


def test_budget_error_names_untileable_layers():
    with pytest.raises(BudgetError, match=r"Not tiled: layer .summed. \(Summed\): .*a cumulative sum or product"):
        tflms_sft.rewrite(gradients(net(summed_body)), AutoParams("1kB"), *BATCH)


def test_rewrite_cumulative_sum_along_axis_is_not_rewritten():
    plan = tflms_sft.rewrite(gradients(net(summed_body)), TILES, *BATCH).plan
    reasons = dict(plan.left_alone)
    assert "needs all rows before each row" in reasons["layer 'summed' (Summed)"]
    assert "layer 'summed' (Summed)" in plan.summary()


def three_steps(step, function, start, batches):
    variables = [*step.model.variables, *step.optimizer.variables]
    for variable, value in zip(variables, start or map(np.array, variables), strict=True):
        variable.assign(value)
    losses = [np.array(function(*batch)) for batch in batches]
    return losses + [np.array(variable) for variable in variables]


@pytest.mark.parametrize("make", [lambda: keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.Adam])
def test_auto_params_equals_original(make):
    keras.config.set_floatx("float64")
    model = net(size=32)
    step = training(model, make())
    step.model = model
    random = np.random.default_rng(1)
    batches = [(random.normal(size=(2, 32, 32, 3)), LABELS) for _ in range(3)]
    plain = tf.function(step)
    limit = tflms_sft.rewrite(plain, AutoParams("1GiB"), *batches[0]).plan.original.peak_bytes * 0.8
    fast = tflms_sft.rewrite(plain, AutoParams(int(limit)), *batches[0])
    assert fast.plan.changed and max(fast.plan.segments[0].backward_num_tiles) > 1
    start = [np.array(variable) for variable in [*model.variables, *step.optimizer.variables]]
    want, got = (three_steps(step, function, start, batches) for function in (plain, fast))
    assert len(got) > 3 + len(start) - 1
    assert not np.array_equal(start[0], want[3]), "the step trains"
    assert close(got, want, 1e-10)


# What a budget stores ---------------------------------------------------------------------------------------


def test_auto_params_spare_budget_is_used_for_saved_tensors():
    """A spare budget is used to save inner tensors, with less work."""
    step = gradients(net(size=48))
    images = np.zeros((2, 48, 48, 3), "float32")
    plain = tflms_sft.rewrite(step, AutoParams("1GiB"), images, LABELS).plan.original.peak_bytes
    plans = [
        tflms_sft.rewrite(step, AutoParams(int(plain * part), headroom=0), images, LABELS).plan
        for part in (0.75, 0.8, 0.85, 0.9, 0.95)
    ]
    assert all(plan.changed and plan.predicted.peak_bytes <= plan.memory_budget for plan in plans)
    assert any(segment.stored for plan in plans for segment in plan.segments)
    ratios = [plan.predicted.time_ratio for plan in plans]
    slower = [more - less for less, more in itertools.pairwise(ratios)]
    assert max(slower) < 1e-12, "more memory never costs more time"


def test_auto_params_with_saved_tensors_equals_original():
    keras.config.set_floatx("float64")
    step = gradients(net(size=48))
    images = np.random.default_rng(3).normal(size=(2, 48, 48, 3))
    plain = tflms_sft.rewrite(step, AutoParams("1GiB"), images, LABELS).plan.original.peak_bytes
    fast = tflms_sft.rewrite(step, AutoParams(int(plain * 0.9), headroom=0), images, LABELS)
    assert any(segment.stored for segment in fast.plan.segments)
    assert close(fast(images, LABELS), step(images, LABELS), tolerance=1e-10)


def test_segment_spec_stored_tensors_are_saved():
    step = gradients()
    spec = SegmentSpec("photo", "pool", stored="two")
    fast = tflms_sft.rewrite(step, segments(spec), *BATCH)
    assert fast.plan.segments[0].stored == ("two",)
    assert close(fast(*BATCH), step(*BATCH), tolerance=1e-5)


@pytest.mark.parametrize("name", ["photo", "head"])
def test_segment_spec_stored_outside_segment_is_refused(name):
    spec = SegmentSpec("photo", "pool", stored=("one", name))
    with pytest.raises(
        SegmentError, match=rf"`stored` must name tensors that the segment computes. Received: \['{name}'\]"
    ):
        tflms_sft.rewrite(gradients(), segments(spec), *BATCH)


# Unknown batches --------------------------------------------------------------------------------------------


def test_auto_params_unknown_batch_is_planned_like_static_one():
    def plan(batch):
        specs = tf.TensorSpec((batch, 24, 24, 3)), tf.TensorSpec((batch,), tf.int32)
        spec = SegmentSpec("one", "pool"), SegmentSpec("photo", "one")
        return tflms_sft.rewrite(gradients(), segments(*spec), *specs).plan

    known, unknown = plan(1), plan(None)
    assert [s.backward_ops for s in unknown.segments] == [s.backward_ops for s in known.segments]


def test_auto_segments_more_tiles_than_rows_are_lowered_with_note():
    step = gradients()
    for params in (SFTParams((30, 1)), SFTParams((2, 2), backward_num_tiles=(10**9, 1))):
        fast = tflms_sft.rewrite(step, params, *BATCH)
        assert fast.plan.changed and "tiles instead of" in fast.plan.summary()
        assert close(fast(*BATCH), step(*BATCH))
