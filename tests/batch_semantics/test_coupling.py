"""Ops that mix samples, and reductions of losses: found in the graph, and refused where micro-batches differ."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from micro_batched import X, first, judge, mean, net, params, same, size, spectrum, step_of

import tflms_sft
from rewriters.errors import PipelineError

# Joined -----------------------------------------------------------------------------------------------------


def contrast(x, w, _):
    z = net(x, w)
    logits = tf.matmul(z, z, transpose_b=True)
    return mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(8)[: tf.shape(x)[0]], logits))


def halves(x, w, _):
    a, b = tf.split(net(x, w), 2)
    return mean(tf.square(a - b))


def neighbours(x, w, _):
    z = tf.reshape(net(x, w), [-1, 2, 3])
    return mean(tf.square(z[:, 0] - z[:, 1]))


def pairs(x, w, _):
    z = net(x, w)
    return mean(tf.abs(z[:, None] - z[None]))


def few(x, w, _):
    return tf.reduce_sum(tf.gather(net(x, w), tf.where(x[:, 0] > 0)[:2, 0])) / size(x)


def masked(x, w):
    return tf.boolean_mask(net(x, w)[:, 0], x[:, 0] > 0)


def chosen(x, w, _):
    return mean(masked(x, w))


def turns(number):
    return tf.while_loop(lambda i, _: i < number, lambda i, a: (i + 1, 1.1 * a), [0, tf.ones((), "float64")])[1]


def python(number):
    return tf.ensure_shape(tf.numpy_function(lambda n: np.float64(n * n + 1), [number], tf.float64), [])


def written(x):
    return tf.strings.as_string(tf.shape(x)[0])


def noise(x):
    return tf.random.stateless_normal(tf.shape(x), [1, 2], dtype="float64")


def alike(x):
    return tf.cast(tf.unique(tf.round(x[:, 0]))[1], "float64")


JOINED = {
    "all pairs by a product": (contrast, "MatMul"),
    "all pairs by broadcasting": (pairs, "Sub"),
    "turned around": (lambda x, w, _: mean(tf.square(net(x, w) - tf.reverse(x, [0]))), "ReverseV2"),
    "rolled": (lambda x, w, _: mean(tf.square(net(x, w) * tf.roll(x, 1, 0))), "Roll"),
    "softmax over samples": (lambda x, w, _: mean(tf.nn.softmax(net(x, w), axis=0) * x), "Softmax"),
    "added up on the way": (lambda x, w, _: mean(tf.square(tf.cumsum(net(x, w)))), "Cumsum"),
    "sorted": (lambda x, w, _: mean(tf.sort(net(x, w), axis=0) * x), "TopKV2"),
    "the largest": (lambda x, w, _: mean(tf.reduce_max(net(x, w), axis=0)), "Max"),
    "the hardest": (lambda x, w, _: mean(tf.math.top_k(mean(net(x, w), 1), k=x.shape[0] // 2)[0]), "TopKV2"),
    "halves": (halves, "Split"),
    "neighbours": (neighbours, "Reshape"),
    "shuffled": (lambda x, w, _: mean(net(x, w) * tf.random.shuffle(x)), "RandomShuffle"),
    "numbered by their like": (lambda x, w, _: mean(net(x, w)[:, 0] * alike(x)), "Unique"),
    "every second": (lambda x, w, _: mean(tf.square(net(x, w)[::2] - net(x, w)[1::2])), "StridedSlice"),
    "the first": (lambda x, w, _: mean(tf.square(net(x, w) - x[:1])), "StridedSlice"),
    "one that is looked up": (lambda x, w, _: mean(net(x, w) * tf.gather(x, [0])), "GatherV2"),
    "centred": (lambda x, w, _: mean(tf.square(net(x, w) - tf.stop_gradient(mean(net(x, w), 0)))), "Sub"),
    "a square of a mean": (lambda x, w, _: tf.square(mean(net(x, w))), "Square"),
    "a mean of those that a mask chooses": (chosen, "Where"),
    "the first that a mask chooses": (few, "Where"),
    "a sum of those that a mask chooses": (lambda x, w, _: 0.1 * tf.reduce_sum(masked(x, w)), "Where"),
    "a batch tiled behind itself": (lambda x, w, _: mean(tf.tile(net(x, w), [2, 1])), "Tile"),
    "a list of samples": (lambda x, w, _: mean(net(x, w) * tf.map_fn(tf.tanh, x)), "TensorListFromTensor"),
    "a decision": (lambda x, w, _: mean(tf.where(tf.reduce_max(x) > 1, net(x, w), x @ w[1])), "Max"),
}


@pytest.mark.parametrize("name", JOINED)
def test_ops_that_mix_samples_are_refused_by_name(name):
    loss, op = JOINED[name]
    with pytest.raises(PipelineError, match=rf"they mix samples of the batch: `[\w/]+` \({op}\)"):
        judge(step_of(loss)[0])


def test_ops_that_keep_samples_apart_equal_original_step():
    """Transposed and back, folded into other axes, two batches behind each other, weighted by a mask and summed up."""

    def loss(x, w, _):
        h = tf.transpose(tf.transpose(first(x, w)) * 2.0)
        h = tf.reshape(tf.reshape(h[:, :, None] * tf.ones((1, 3, 2), "float64"), [-1, 2]), [-1, 3, 2])[:, :, 0]
        both = tf.concat([h, 2 * h], axis=0) @ w[1]
        one, other = both[: tf.shape(x)[0]], both[tf.shape(x)[0] :]
        h = tf.stack([one, tf.tile(other, [1, 1])], axis=1)
        h = tf.einsum("bki,ij->bkj", h, w[1])
        h = tf.linalg.matmul(h, h, transpose_b=True)
        return tf.reduce_sum(h[:, 0, 1] * tf.cast(x[:, 0] > 0, "float64")) + tf.reduce_sum(tf.cumsum(h, axis=1))

    assert same(*step_of(loss), loss_reduction="sum") == ()


def test_op_without_rule_is_noted():
    def loss(x, w, _):
        weights = tf.numpy_function(np.abs, [x], "float64", stateful=False)
        return mean(net(x, w) * tf.ensure_shape(weights, x.shape))

    notes = judge(step_of(loss)[0]).notes
    assert any("without a rule: `PyFuncStateless` (PyFuncStateless)" in note for note in notes)


def test_check_of_all_samples_is_noted():
    """As Keras's hinge loss looks whether all labels are 0 or 1."""
    notes = judge(step_of(lambda x, w, _: mean(tf.where(tf.reduce_all(x > -9), net(x, w), x)))[0]).notes
    assert notes == ("assumed to keep samples independent, without a rule: `All` (All)",)


def test_resized_images_are_per_sample():
    def loss(x, w, _):
        image = tf.reshape(net(x, w), [-1, 3, 1, 1])
        return mean(tf.image.resize(tf.cast(image, "float32"), [6, 2]))

    assert judge(step_of(loss)[0]).notes == ()


# Means and sums ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "reduction"),
    [
        (lambda x, w, _: mean(tf.square(net(x, w))), "mean"),
        (lambda x, w, _: tf.reduce_sum(tf.square(net(x, w))), "sum"),
        (lambda x, w, _: tf.reduce_sum(tf.math.log(2 + net(x, w)) * net(x, w)), "sum"),
        (lambda x, w, _: tf.reduce_sum(net(x, w) / size(x)), "mean"),
        (lambda x, w, own: tf.reduce_sum(net(x, w)) * (own / size(x)), "mean"),
        (lambda x, w, own: tf.reduce_sum(net(x, w)) * (own / (8.0 if x.shape[0] == 8 else 4.0)), "mean"),
        (lambda x, w, _: mean(net(x, w)) * tf.cast(tf.size(x), "float64"), "sum"),
        (lambda x, w, _: tf.reduce_sum(tf.math.imag(spectrum(x, w) * tf.complex(np.float64(0), 1 / size(x)))), "mean"),
        (lambda x, w, _: mean(tf.abs(spectrum(x, w) * (1 + 2j))), "mean"),
        (lambda x, w, _: tf.math.real(mean(spectrum(x, w) * tf.math.conj(spectrum(x, w)))), "mean"),
        (lambda x, w, _: tf.reduce_sum(tf.abs(tf.signal.irfft(spectrum(x, w)))), "sum"),
    ],
)
@pytest.mark.filterwarnings("error::numpy.exceptions.ComplexWarning")
def test_loss_reduction_is_inferred(loss, reduction):
    step, variables = step_of(loss, state=2.0)
    assert same(step, variables, loss_reduction=reduction) == ()
    other = "sum" if reduction == "mean" else "mean"
    with pytest.raises(PipelineError, match=f'Gradients are a {reduction} .*: pass `loss_reduction="{reduction}"`'):
        judge(step, loss_reduction=other)


def test_micro_batches_of_one_sample_equal_original_step():
    """For one sample autodiff makes another graph than for several."""
    step, variables = step_of(lambda x, w, own: mean(tf.square(net(x, w) * w[0][0, 0])))
    assert same(step, variables, count=8) == ()


@pytest.mark.parametrize(
    ("loss", "power"),
    [
        (lambda x, w, _: tf.reduce_sum(net(x, w)) / tf.sqrt(size(x)), "1/2"),
        (lambda x, w, _: mean(net(x, w)) / size(x), "-1"),
    ],
)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_of_another_power_is_refused(loss, power, reduction):
    with pytest.raises(PipelineError, match=f"is neither a sum nor a mean over the batch, .* the power of {power}"):
        judge(step_of(loss)[0], loss_reduction=reduction)


@pytest.mark.parametrize(
    ("loss", "number"),
    [
        (lambda x, w, _: tf.reduce_sum(net(x, w)) / (size(x) - 1), r"`sub\w*:0` \(3 for a micro-batch, 7 for"),
        (lambda x, w, _: tf.reduce_sum(net(x, w)) / (x.shape[0] - 1), r"\(3 for a micro-batch, 7 for the batch\)"),
        (lambda x, w, _: mean(net(x, w)) / tf.math.log(size(x)), r"`Log:0` \(1.38629 for"),
        (lambda x, w, _: mean(net(x, w) * mean(noise(x))), "Mean"),
        (lambda x, w, _: mean(net(x, w)) * tf.cond(size(x) > 5, lambda: w[0][0, 0], lambda: w[1][0, 0]), "Greater"),
        (lambda x, w, _: mean(net(x, w)) * turns(tf.shape(x)[0]), r"`strided_slice\w*:0` \(4 for"),
        (lambda x, w, _: mean(net(x, w)) * w[0][tf.shape(x)[0] // 4, 0], r"`strided_slice_\d/stack:0`"),
        (lambda x, w, _: mean(net(x, w)) * python(tf.shape(x)[0]), r"`strided_slice\w*:0` \(4 for"),
        (lambda x, w, _: mean(net(x, w)) * tf.strings.to_number(written(x), tf.float64), r"`strided_slice\w*:0` \(4"),
    ],
)
@pytest.mark.parametrize("returned", [True, False])
def test_number_without_scaling_exponent_is_refused(loss, number, returned):
    with pytest.raises(PipelineError, match=f"computes with .*{number}.* that micro-batches cannot reproduce"):
        judge(step_of(loss, None if returned else lambda x, w: ())[0])


@pytest.mark.parametrize(("axis", "reduction"), [(0, "mean"), (1, "sum")])
def test_unstacked_shape_yields_loss_reduction(axis, reduction):
    def loss(x, w, _):
        return tf.reduce_sum(net(x, w)) / tf.cast(tf.unstack(tf.shape(x))[axis], "float64")

    step, other = step_of(loss, lambda x, w: ())[0], "sum" if reduction == "mean" else "mean"
    assert judge(step, loss_reduction=reduction).notes == ()
    with pytest.raises(PipelineError, match=f"Gradients are a {reduction}"):
        judge(step, loss_reduction=other)


def test_gradient_of_sum_and_mean_is_refused():
    def loss(x, w, _):
        return mean(net(x, w)) + 0.1 * tf.reduce_sum(tf.square(first(x, w)))

    for reduction in ("mean", "sum"):
        with pytest.raises(PipelineError, match=r"some are means, .*: `AddN\w*` \(AddN\) adds both"):
            judge(step_of(loss)[0], loss_reduction=reduction)


def discriminated(x, w, _):
    """Fakes and reals as a discriminator has them: labels of zeros make gradients of zeros, which go by any power."""
    fake, real = net(x, w), net(0.5 * x, w)
    entropy = tf.nn.sigmoid_cross_entropy_with_logits
    return mean(entropy(tf.zeros_like(fake), fake)) + mean(entropy(tf.ones_like(real), real))


def probable(x, w, _):
    fake, real = tf.sigmoid(net(x, w)), tf.sigmoid(net(0.5 * x, w))
    entropy = keras.losses.BinaryCrossentropy(dtype="float64")
    return entropy(tf.zeros_like(fake), fake) + entropy(tf.ones_like(real), real)


def penalised(x, w, _):
    """Gradients of gradients, whose squares are a loss, as in R1 and WGAN-GP."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        scores = tf.nn.leaky_relu(net(x, w)) @ w[0]
    norms = tf.norm(tape.gradient(scores, x), axis=1)
    return mean(scores) + 10.0 * mean(tf.square(norms - 1.0))


@pytest.mark.parametrize("loss", [discriminated, probable, penalised])
def test_adversarial_losses_equal_original_step(loss):
    step, variables = step_of(loss)
    assert same(step, variables, steps=4) == ()
    with pytest.raises(PipelineError, match="Gradients are a mean"):
        judge(step, loss_reduction="sum")


def test_zero_gradients_are_accepted_as_sums():
    step, variables = step_of(lambda x, w, _: tf.reduce_sum(net(x, w)) + mean(tf.zeros_like(x) * first(x, w)))
    assert same(step, variables, loss_reduction="sum") == ()


# The way back -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda dy: tf.clip_by_value(dy, -0.01, 0.01),
            r"Minimum\) is not linear and reads a value that scales with the batch size",
        ),
        (lambda dy: tf.clip_by_norm(dy, 0.1), r"they mix samples of the batch: `clip_by_norm"),
        (lambda dy: 0.01 * tf.sign(dy), r"Sign\) is not linear and reads a value that scales with the batch size"),
        (lambda dy: tf.abs(dy), r"Abs\) is not linear and reads a value that scales with the batch size"),
        (lambda dy: tf.square(dy), r"Square\) is not linear and reads a value that scales with the batch size"),
    ],
)
def test_gradients_changed_in_backward_pass_are_refused(function, message):
    @tf.custom_gradient
    def changed(z):
        return tf.identity(z), function

    def loss(x, w, _):
        return mean(tf.tanh(changed(first(x, w)) @ w[1]))

    with pytest.raises(PipelineError, match=message):
        judge(step_of(loss)[0])


def test_custom_gradient_of_first_layer_is_refused():
    @tf.custom_gradient
    def dense(x, w):
        return x @ w, lambda dy: (dy @ tf.transpose(w), tf.transpose(x) @ dy)

    with pytest.raises(PipelineError, match=r"\(MatMul\) seems to be a part of the update and reads samples of"):
        judge(step_of(lambda x, w, _: mean(tf.tanh(dense(x, w[0]) @ w[1])))[0])


@pytest.mark.parametrize(
    ("update", "op"),
    [
        (lambda g, x, value, w: [a / (1 + tf.norm(first(x, w))) for a in g], "Sqrt"),
        (lambda g, x, value, w: [a * tf.reduce_max(x) for a in g], "Max"),
    ],
)
def test_update_operand_that_mixes_samples_is_refused(update, op):
    with pytest.raises(PipelineError, match=rf"they mix samples of the batch: `[\w/]+` \({op}\)"):
        judge(step_of(lambda x, w, _: mean(net(x, w)), update=update)[0])


def test_xla_call_is_refused_by_name():
    @tf.function(jit_compile=True)
    def twice(z):
        return 2 * tf.tanh(z)

    step, _ = step_of(lambda x, w, _: mean(tf.square(net(twice(x @ w[0]), w))))
    with pytest.raises(PipelineError, match=r"\w*PartitionedCall\w*` .* runs in a function that XLA compiles"):
        judge(step)


def test_differentiated_loop_is_refused_by_name():
    image = keras.Input((4, 2))
    model = keras.Model(image, layers.Dense(1)(layers.LSTM(2, name="words")(image)))

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            loss = mean(model(x, training=True))
        return tape.gradient(loss, model.trainable_variables)

    with pytest.raises(PipelineError, match=r"through a loop, layer 'words' \(LSTM\), .*`unroll=True`"):
        judge(step, np.ones((4, 4, 2), "float32"))


# Arguments --------------------------------------------------------------------------------------------------


def test_argument_without_batch_axis_is_refused():
    w = tf.Variable(np.eye(3))

    def step_with(use):
        @tf.function(autograph=False)
        def step(x, other):
            with tf.GradientTape() as tape:
                loss = mean(use(tf.tanh(x @ w), other))
            w.assign_sub(0.1 * tape.gradient(loss, w))
            return loss

        return step

    def far(z, other):
        return tf.reduce_min(tf.norm(z[:, None] - other[None], axis=-1), axis=1)

    with pytest.raises(PipelineError, match=r"they mix samples of the batch: `sub` \(Sub\)"):
        judge(step_with(far), X, X)
    step = step_with(lambda z, other: z + other)
    same(step, [w], X, X)
    open_step = tf.function(step.python_function, input_signature=[tf.TensorSpec((None, 3), "float64")] * 2)
    rewritten = tflms_sft.rewrite(open_step, params(), X, X)
    with pytest.raises(tf.errors.InvalidArgumentError, match="have the same leading size"):
        rewritten(X, X[:4])
