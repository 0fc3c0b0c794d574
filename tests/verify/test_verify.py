"""Tests of `verify`: it detects differences and restores all variables."""

import dataclasses

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from training import BUDGET, X, Y, net, state

import tflms_sft
from rewriters.emission.loop_emitter import IterationEmitter
from rewriters.rules.intervals import Window
from rewriters.rules.registry import TileKind
from rewriters.step_importer import StepImporter
from tflms_sft import LMS, LMSParams, MemoryBudget, RewriteError, SFTParams, verify
from tflms_sft._keras.rewriting_callback import trained_by
from tflms_sft._verify.differences import KINDS, Difference, Verification, difference

BATCH = X[:4], Y[:4]
TILES = SFTParams((2, 3))


def test_verify_batch_norm_model_is_equal_in_float64():
    result = verify(net(norm=True), BATCH, TILES)
    assert result and result.ok and result.dtype == "float64" and result.plan.segments
    for worst in (result.outputs, result.gradients, result.variables):
        assert worst.relative < 1e-12 and worst.limit >= 1e-10
    names = {kind: [d.name for d in result.differences if d.kind == kind] for kind in KINDS}
    assert sorted(names["output"]) == ["accuracy", "loss"]
    weights = [f"conv0{part}/{of}" for part in "ab" for of in ("kernel", "bias")]
    assert set(weights) < set(names["gradient"]) and len(names["gradient"]) == 8 and not result.not_compared
    # Keras before 3.15 names the optimizer "SGD".
    variables = {name.replace("SGD", "sgd") for name in names["variable"]}
    assert {"norm0/moving_mean", "sgd/conv0a_kernel_momentum", *weights} < variables
    first, headline, rewriting, *_ = result.summary().splitlines()
    assert first == "Equal up to float64 rounding: 34 tensors compared, after 1 step(s)"
    assert headline == f"  {result.plan.headline()}"
    assert rewriting == "  compared with the original step: tiles of 1 segment(s), no swaps"


def test_verify_restores_all_variables():
    model, plain = net(), net()
    for one in (model, plain):
        one.fit(*BATCH, verbose=0)
    before = state(model)
    assert verify(model, BATCH, TILES, steps=2)
    assert all(np.array_equal(a, b) for a, b in zip(before, state(model), strict=True))
    assert model.train_on_batch(*BATCH) == plain.train_on_batch(*BATCH)


def test_verify_swaps_are_bitwise_equal():
    result = verify(net(), BATCH, LMSParams(min_bytes="1KiB", tier="disk"))
    assert result and result.plan.swaps and all(d.relative == 0 for d in result.differences)
    number = len(result.plan.swaps)
    assert f"compared with the original step: no tiles, swaps of {number} tensor(s)\n" in result.summary()


def test_verify_accepts_budget_in_bytes():
    result = verify(net(), (*BATCH, np.ones(4)), BUDGET)
    assert result and result.plan.memory_budget == 700 * 2**10 and result.plan.segments


def test_verify_callback_plan_on_any_batch_size():
    model, callback = net(norm=True), MemoryBudget(BUDGET, verbose=0)
    with pytest.raises(ValueError, match="must be a callback that has trained"):
        verify(model, BATCH, callback)
    model.fit(X, Y, batch_size=4, verbose=0, callbacks=[callback])
    assert callback.plan.batch == 4 and callback.plan.segments
    result = verify(model, (X[:1], Y[:1]), callback)
    assert result and result.plan.batch == 4 and result.plan.segments == callback.plan.segments
    assert verify(model, (X[:1], Y[:1]), BUDGET).plan.segments != result.plan.segments
    callback._last_plan = dataclasses.replace(callback.plan, segments=())
    with pytest.raises(RewriteError, match="another plan than the training; .* Trained: .* Received: "):
        verify(model, (X[:1], Y[:1]), callback)


def test_trained_check_other_plan_is_refused():
    """Plans are compared by names: equally many tiles of another layer are another plan."""
    model, callback = net(), LMS(tiles=SFTParams((2, 3)), min_bytes=64, tier="disk", verbose=0)
    model.fit(*BATCH, verbose=0, callbacks=[callback])
    plan = verify(model, (X[:1], Y[:1]), callback).plan
    segments, swaps = plan.segments, plan.swaps
    assert segments and swaps and (segments, swaps) == (callback.plan.segments, callback.plan.swaps)
    trained = trained_by(callback, model)
    others = (dataclasses.replace(segments[0], exits=("another",)), *segments[1:])
    with pytest.raises(RewriteError, match="they differ in segment 'segment1'. Trained: .* Received: "):
        trained.check(dataclasses.replace(plan, segments=others))
    others = (dataclasses.replace(swaps[0], tensor="another"), *swaps[1:])
    with pytest.raises(RewriteError, match=f"they differ in swap of '{swaps[0].tensor}', swap of 'another'. Trained"):
        trained.check(dataclasses.replace(plan, swaps=others))


def test_verify_without_rewriting_is_false():
    result = verify(net(), BATCH, 2**30)
    assert not result.plan.changed and result.summary().startswith("Nothing was rewritten, so nothing was verified")
    assert not result and result.verdict == "nothing rewritten"


def test_verify_adam_with_zero_gradient_is_equal_in_float32():
    """Adam's update of a bias before a normalisation has full size."""
    keras.config.set_dtype_policy("float32")
    model = net(norm=True, floatx="float32", optimizer=keras.optimizers.Adam(0.01))
    result = verify(model, [a.astype("float32") for a in BATCH], TILES, steps=2)
    assert result.dtype == "float32" and result, result.summary()
    assert 1e-9 < result.gradients.relative < 1e-4


# It can fail ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clipped", [False, True])
def test_verify_sum_of_equal_terms_is_within_noise(clipped):
    """All additions for a bias behind a maximum round in one direction. Clipping must not widen the limit."""
    bias = tf.Variable(tf.fill([2], 0.5))

    @tf.custom_gradient
    def clip(value):
        return tf.identity(value), lambda gradient: tf.clip_by_value(gradient, 0.0, 1e-7)

    @tf.function
    def step(image):
        with tf.GradientTape() as tape:
            made = tf.nn.max_pool2d(tf.nn.relu(tf.nn.bias_add(image, bias)), 2, 2, "SAME")
            loss = 0.1 * tf.reduce_mean(clip(made) if clipped else made)
        bias.assign_sub(tape.gradient(loss, bias))
        return loss

    image = tf.constant(np.random.default_rng(0).random((1, 1024, 1024, 2)).astype("float32"))
    result = verify(step, image, SFTParams((4, 4)))
    (row,) = (row for row in result.differences if row.kind == "gradient")
    expected = 4 * 2.0**-23 * np.sqrt(2 * 2**20)
    if clipped:
        assert row.limit == expected
    else:
        assert result and expected < row.relative < row.limit


def test_verify_broken_rule_is_detected_and_named(monkeypatch):
    """Shift every window by one row."""
    gather = Window.rows_covered
    monkeypatch.setattr(Window, "rows_covered", lambda self, rows: gather(self, rows).shift(1))
    result = verify(net(blocks=2), BATCH, TILES)
    assert not result and not result.ok and result.verdict == "different"
    assert not result.outputs.ok and not result.gradients.ok and result.gradients.relative > 1e-3
    lines = result.summary().splitlines()
    assert lines[0].startswith("DIFFERENT: rounding does not explain ")
    assert "  wrong: output loss: " in result.summary() and "  wrong: gradient head/bias: " in result.summary()


def test_verify_wrong_gradient_is_detected(monkeypatch):
    """Drop carried rows of gradients."""

    rows_received = IterationEmitter.rows_received

    def forgotten(iteration, receive):
        received = rows_received(iteration, receive)
        is_partial = iteration.loop.segment.kinds.get(receive.result.tensor) is TileKind.PARTIAL
        return tf.zeros_like(received) if is_partial else received

    monkeypatch.setattr(IterationEmitter, "rows_received", forgotten)
    result = verify(net(), BATCH, SFTParams((3, 1), halo="carry"))
    assert not result and result.outputs.ok and not result.gradients.ok
    assert result.gradients.name.startswith("conv0a/")


def test_verify_wrong_update_is_detected(monkeypatch):
    init = StepImporter.__init__

    def broken(self, graph, *arguments, **options):
        if any(name.startswith("sft/") for name in graph.nodes):
            next(node for node in graph.nodes.values() if node.op == "AssignAddVariableOp").op = "AssignSubVariableOp"
        init(self, graph, *arguments, **options)

    monkeypatch.setattr(StepImporter, "__init__", broken)
    result = verify(net(), BATCH, TILES)
    assert not result and result.gradients.ok and not result.variables.ok
    assert result.variables.name == "conv0a/kernel"


def test_verify_non_finite_values_are_inconclusive():
    result = verify(net(), (X[:4] * np.nan, Y[:4]), TILES)
    assert not result and "the original step yields values that are not finite" in result.summary()
    assert result.summary().startswith("CANNOT TELL: ")


def test_verify_chaotic_step_in_float32_cannot_tell():
    """Weights that change by one rounding turn the sine by a tenth of a radian; an update by the sign amplifies it."""
    kernel = tf.Variable(np.random.default_rng(0).normal(size=(3, 3, 3, 3)).astype("float32"))

    @tf.function
    def step(images):
        with tf.GradientTape() as tape:
            x = tf.nn.conv2d(tf.nn.conv2d(images, kernel, 1, "SAME"), kernel, 1, "SAME")
            loss = tf.reduce_mean(tf.sin(1e5 * x))
        kernel.assign_sub(tf.sign(tape.gradient(loss, kernel)))
        return loss

    result = verify(step, tf.cast(IMAGES, tf.float32), TILES)
    assert result.plan.segments and result.gradients.noise > 1e-2
    assert not result and result.summary().startswith("CANNOT TELL: float32 rounding could hide a wrong result in ")
    assert result.variables.ok and result.variables.limit < 1e-3, "a wrong update would show in spite of the noise"


@pytest.mark.parametrize(
    ("relative", "noise", "verdict"),
    [
        (1e-3, 5e-4, "equal"),
        (1.2e-2, 1e-3, "cannot tell"),
        (3.1e-2, 1e-3, "different"),
        (1e-3, 2e-2, "cannot tell"),
        (0.7, 2e-2, "different"),
        (np.inf, 1e-3, "different"),
    ],
)
def test_verdict_near_the_limit_and_above_noise(relative, noise, verdict):
    """Noise is a sample, so that the limit of ten times the noise is an estimate."""
    plan = tflms_sft.rewrite(hand_written, TILES, IMAGES).plan
    loss = Difference("output", "loss", 0, 0, 1e-4)
    result = Verification((loss, Difference("gradient", "kernel", relative, noise, 10 * noise)), "float32", 1, plan)
    assert result.verdict == verdict and bool(result) == (verdict == "equal")
    text = result.summary()
    assert text.startswith({"equal": "Equal", "different": "DIFFERENT"}.get(verdict, "CANNOT TELL: float32 rounding"))
    assert ("repeat in float64: call `keras.config.set_floatx" in text) == (verdict == "cannot tell")
    assert ("unclear: " in text) == bool(result.unclear) == (verdict == "cannot tell")


def test_summary_explains_a_loss_over_many_pixels():
    plan = tflms_sft.rewrite(hand_written, TILES, IMAGES).plan
    result = Verification((Difference("output", "loss", 1.1e-3, 0, 1.3e-3),), "float32", 1, plan)
    text = "  loss differs by 1.1e-03, as sums over height and width of large images do in float32: tiles add fewer"
    assert result and text in result.summary()


@pytest.mark.parametrize(
    ("got", "want", "expected"),
    [
        (1.0, 1.0, 0.0),
        (1.1, 1.0, 0.1),
        (1e-6, 0.0, 1e-3),  # Below the floor of 1e-3 differences are absolute.
        (np.nan, np.nan, np.inf),
        (np.zeros(2), np.zeros(3), np.inf),
        (np.int32(1), np.int64(1), np.inf),
        (True, False, np.inf),
        (b"a", b"a", 0.0),
    ],
)
def test_difference_of_two_tensors_is_relative_to_maximum(got, want, expected):
    assert difference(got, want) == pytest.approx(expected)


# Steps ----------------------------------------------------------------------------------------------------------


@tf.function
def hand_written(images, power=2, *, scale=None):
    """A training step that returns a nest with `None`."""
    with tf.GradientTape() as tape:
        x = images
        for weight in WEIGHTS:
            x = tf.tanh(tf.nn.conv2d(x, weight, 1, "SAME"))
        loss = tf.reduce_sum(x**power)
    gradients = tape.gradient(loss, WEIGHTS)
    for weight, gradient in zip(WEIGHTS, gradients, strict=True):
        weight.assign_sub(0.1 * gradient)
    return {"loss": loss, "none": scale, "first": gradients[0]}


WEIGHTS = [tf.Variable(np.random.default_rng(0).normal(size=(3, 3, 3, 3)) / 3) for _ in range(2)]
IMAGES = tf.constant(X[:2])


def test_verify_accepts_functions_and_rewritten_steps():
    traced = hand_written.get_concrete_function(IMAGES)
    for result in (
        verify(hand_written, IMAGES, TILES),
        verify(hand_written, (IMAGES, 4), TILES),
        verify(traced, (IMAGES,), TILES),
        verify(tflms_sft.rewrite(hand_written, TILES, IMAGES), IMAGES),
    ):
        assert result and result.plan.segments and result.gradients.relative < 1e-12
        assert [d.name for d in result.differences if d.kind == "output"] == ["first", "loss"]
        assert sum(d.kind == "gradient" for d in result.differences) == 2 and not result.not_compared


def test_verify_random_ops_are_listed():
    @tf.function
    def drawing(images):
        with tf.GradientTape() as tape:
            x = tf.tanh(tf.nn.conv2d(images, WEIGHTS[0], 1, "SAME"))
            loss = tf.reduce_sum(tf.tanh(x) ** 2) * tf.random.uniform([], 1, 2, dtype="float64")
        WEIGHTS[0].assign_sub(0.1 * tape.gradient(loss, WEIGHTS[0]))
        return loss

    result = verify(drawing, IMAGES, TILES)
    assert len(result.random_ops) == 1 and "draw(s) new random numbers in every run" in result.summary()
    assert result.unclear[0].noise > 1e-2 and result.verdict == "cannot tell"
    assert not result and result.summary().startswith("CANNOT TELL: the step draws new random numbers in every run")


def test_verify_gradients_inside_calls_are_not_compared():
    inner = tf.function(lambda x: tf.reduce_sum(tf.tanh(tf.nn.conv2d(x, WEIGHTS[1], 1, "SAME")) ** 2))

    @tf.function
    def calling(images):
        with tf.GradientTape() as tape:
            loss = inner(tf.tanh(tf.nn.conv2d(images, WEIGHTS[0], 1, "SAME")))
        for weight, gradient in zip(WEIGHTS, tape.gradient(loss, WEIGHTS), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    result = verify(calling, IMAGES, TILES)
    gradients = sum(found.kind == "gradient" for found in result.differences)
    assert result and gradients + len(result.not_compared) == 2
    assert all(f"not compared: the gradient {name}: {why}" in result.summary() for name, why in result.not_compared)
    assert sum(found.kind == "variable" for found in result.differences) == 2


# Arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((BATCH,), {}, TypeError, "`params` must be `SFTParams.* Received: params=None"),
        ((BATCH, 0.5), {}, TypeError, "`params` must be `SFTParams"),
        ((BATCH, "5 apples"), {}, ValueError, "memory_budget"),
        (((*BATCH, 1, 2), TILES), {}, ValueError, "`batch` must be .x, y. .* Received: a tuple of 4"),
        (((X[:4], [0, 1, 0, 1]), TILES), {}, TypeError, "`batch` must contain arrays or tensors.* type int"),
        ((BATCH, TILES), {"steps": 0}, ValueError, "`steps` must be at least 1. Received: steps=0"),
        ((BATCH, TILES), {"steps": 1.0}, TypeError, "`steps` must be an integer. Received: steps=1.0"),
    ],
)
def test_verify_invalid_arguments_are_refused(arguments, options, error, text):
    with pytest.raises(error, match=text):
        verify(net(), *arguments, **options)


def test_verify_batch_without_targets_is_refused():
    model = net()
    for batch in (X[:4], (X[:4],), (X[:4], None)):
        with pytest.raises(ValueError, match="`batch` must be .images, targets., .* Received: images alone,") as e:
            verify(model, batch, TILES)
        assert str(e.value).endswith(f"raised {type(e.value.__cause__).__name__}: {e.value.__cause__}")
    assert verify(model, BATCH, TILES)
    with pytest.raises(ValueError, match="`batch` must be .images, targets., .* Received: images alone,"):
        verify(model, X[:4], TILES)


def classifier(*last, **compiled):
    image = keras.Input((24, 24, 3))
    x = layers.Conv2D(4, 3, activation="relu")(layers.Conv2D(4, 3, activation="relu")(image))
    x = layers.Dense(3)(layers.GlobalAveragePooling2D()(x))
    for layer in last:
        x = layer(x)
    model = keras.Model(image, x)
    model.compile("sgd", **{"jit_compile": False, **compiled})
    return model


@pytest.mark.parametrize("batch", [X[:4].astype("float32"), BATCH], ids=["images alone", "with targets"])
def test_verify_model_without_loss_is_refused(batch):
    with pytest.raises(tflms_sft.RewriteError, match="is compiled without a loss, .* Compile it with `loss=`"):
        verify(classifier(), batch, TILES)


def test_verify_step_without_targets_accepts_images():
    """A step with a loss of the model or of a layer; metrics need targets in both cases."""

    class OfOutputs(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return tf.reduce_mean(y_pred**2)

    model = classifier()
    model = OfOutputs(model.inputs, model.outputs)
    model.compile("sgd", jit_compile=False)
    assert verify(model, X[:4].astype("float32"), TILES)
    assert verify(classifier(layers.ActivityRegularization(l2=1.0)), X[:4].astype("float32"), TILES)
    model.compile("sgd", metrics=["mae"], jit_compile=False)
    with pytest.raises(ValueError, match="`batch` must be .images, targets., "):
        verify(model, X[:4].astype("float32"), TILES)


def test_verify_other_object_or_patched_model_is_refused():
    with pytest.raises(TypeError, match="`step` must be a `tf.function`"):
        verify(lambda x: x, IMAGES, TILES)
    model = net()
    with pytest.raises(tflms_sft.RewriteError, match="is not compiled"):
        verify(keras.Sequential([keras.Input((4,)), layers.Dense(1)]), BATCH, TILES)
    with tflms_sft.budget(model, BUDGET, verbose=0):
        with pytest.raises(tflms_sft.RewriteError, match="is currently rewritten by `budget`"):
            verify(model, BATCH, TILES)
