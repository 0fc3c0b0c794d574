"""Which stage of a pipeline each operation belongs to."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from pipelined import compiled, hand_step, net, train_step

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize import canonicalize
from rewriters.errors import PipelineError
from rewriters.pipelining.stage_assignment import assign_stages, separators, stage_transfers

HERE = ["CPU:0"] * 4


def analysed(step, shape=(4, 8, 8, 3)):
    specs = tf.TensorSpec(shape, "float32"), tf.TensorSpec(shape[:1], "int32")
    return GraphAnalysis(
        canonicalize.read_canonical(step.get_concrete_function(*specs), canonicalize.CanonicalMode.EXACT)
    )


def written(body, *specs):
    return GraphAnalysis(
        canonicalize.read_canonical(
            tf.function(body, autograph=False).get_concrete_function(*specs), canonicalize.CanonicalMode.EXACT
        )
    )


def tensor(analysis, name):
    """The first tensor of the op whose name ends like this."""
    return next(node.out() for node in analysis.order if re.search(rf"(^|/){name}$", node.name))


def stage_cuts(analysis):
    return [[tensor(analysis, f"(?<!gradient_tape/functional_1/)stage{number}_1/Tanh")] for number in range(3)]


def stages_by(analysis, stages, pattern, backward=None):
    """Stages of the operations whose names match, without constants."""
    return {
        stages.of[node]
        for node in analysis.order
        if re.search(pattern, node.name) and node in stages.of and backward in (None, node in analysis.backward)
    }


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("batch", [4, None])
def test_layers_and_their_gradients_are_in_one_stage(skip, batch):
    analysis = analysed(hand_step(compiled(net(HERE, skip), "adam")), (batch, 8, 8, 3))
    stages = assign_stages(analysis, stage_cuts(analysis))
    assert stages.count == 4
    for number in range(4):
        assert stages_by(analysis, stages, f"conv{number}_1/", backward=False) == {number}
        gradients = [n for n in analysis.order if f"conv{number}_1/" in n.name and n in analysis.backward]
        gradients = [n for n in gradients if re.search("Backprop|BiasAddGrad", n.op)]
        assert {stages.of[n] for n in gradients} == {number}
        assert stages_by(analysis, stages, f"gradient_tape.*stage{number}_1/TanhGrad") == {number}
    assert stages_by(analysis, stages, "head|SparseSoftmax|Multiply") == {3}
    owners = {handle.node.name: stage for handle, stage in stages.owner.items()}
    for number in range(4):
        kernel, bias = (stage for name, stage in owners.items() if f"conv{number}_1" in name)
        assert kernel == bias == number
    slots = sorted(stages.beside.values())
    assert slots == sorted(2 * [*stages.owner.values()]), "two of Adam's beside each weight"


@pytest.mark.parametrize("skip", [False, True])
def test_transfers_are_gradients_and_skip_connections(skip):
    analysis = analysed(hand_step(compiled(net(HERE, skip), "momentum")))
    stages = assign_stages(analysis, stage_cuts(analysis))
    found = stage_transfers(analysis, stages)
    forward = [(t, a, b) for t, a, b in found if t.node not in analysis.backward]
    cuts = [cut for (cut,) in stage_cuts(analysis)]
    want = {(cuts[number], number, number + 1) for number in range(3)} | ({(cuts[0], 0, 3)} if skip else set())
    assert set(forward) == want
    backward = [(a, b) for t, a, b in found if t.node in analysis.backward]
    assert all(a > b for a, b in backward), "never up"
    assert {(3, 2), (2, 1), (1, 0)} <= set(backward)
    for node in analysis.backward:
        if node in stages.of and node not in stages.shape_only:
            above = [stages.of[t.node] for t in node.inputs if t.node in analysis.backward and t.node in stages.of]
            assert stages.of[node] <= min(above, default=3)


def test_ops_of_labels_alone_are_in_the_stage_of_their_consumer():
    analysis = analysed(train_step(compiled(net(HERE), "momentum")), (4, 8, 8, 3))
    stages = assign_stages(analysis, stage_cuts(analysis))
    labels = analysis.graph.inputs[1]
    assert {stages.of[node] for node, _ in analysis.consumers[labels]} == {3}


def test_shared_weight_is_in_the_first_stage_and_penalty_with_its_weight():
    w, last = tf.Variable(np.eye(4)), tf.Variable(np.ones((4, 4)))

    def body(x):
        with tf.GradientTape() as tape:
            cut = tf.tanh(x @ w, name="cut")
            penalty = tf.reduce_sum(w * w, name="penalty")
            loss = tf.reduce_sum((cut @ last) @ w) + penalty
        for variable, gradient in zip([w, last], tape.gradient(loss, [w, last]), strict=True):
            variable.assign_sub(gradient)
        return loss

    analysis = written(body, tf.TensorSpec((3, 4), "float64"))
    stages = assign_stages(analysis, [[tensor(analysis, "cut")]])
    assert sorted(stages.owner.values()) == [0, 1]
    assert stages_by(analysis, stages, "penalty") == {0}
    (add,) = (n for n in analysis.order if n.op == "AddV2" and n not in analysis.backward)
    assert stages.of[add] == 1


def test_gradient_that_reads_an_early_tensor_keeps_its_stage():
    """The gradient of a gate that reads what skipped stages: all that follows it would be pulled down with it."""
    ws = [tf.Variable(np.eye(4)) for _ in range(3)]

    def body(x):
        with tf.GradientTape() as tape:
            early = tf.tanh(x @ ws[0], name="early")
            middle = tf.tanh(early @ ws[1], name="middle")
            gated = tf.tanh(middle @ ws[2], name="late") * early
            loss = tf.reduce_sum(gated)
        for variable, gradient in zip(ws, tape.gradient(loss, ws), strict=True):
            variable.assign_sub(gradient)
        return loss

    analysis = written(body, tf.TensorSpec((3, 4), "float64"))
    stages = assign_stages(analysis, [[tensor(analysis, "early")], [tensor(analysis, "middle")]])
    products = [n for n in analysis.order if n.op == "Mul" and n in analysis.backward and n in stages.of]
    assert [stages.of[n] for n in products] == [2, 2]
    assert sorted(stages.of[n] for n in analysis.order if n.op == "TanhGrad") == [0, 1, 2]


def test_sizes_are_computed_where_they_are_read():
    analysis = analysed(hand_step(compiled(net(HERE), "momentum")), (None, 8, 8, 3))
    stages = assign_stages(analysis, stage_cuts(analysis))
    asked = [node for node in analysis.order if node.op == "Shape" and node in stages.of]
    assert asked, "with an unknown batch there are some"
    for node in asked:
        source = node.inputs[0]
        there = {stages.of[r] for r, _ in analysis.consumers[source] if r in stages.of and r is not node}
        assert stages.of[node] in there | {stages.of.get(source.node)}
    (input_gradient,) = (n for n in analysis.order if n.op == "Conv2DBackpropInput" and "conv2_1" in n.name)
    sizes = input_gradient.inputs[0].node
    assert sizes.op == "Const" or stages.of[sizes] == 2


def test_separating_tensors_are_the_cut_points():
    plain = analysed(hand_step(compiled(net(HERE), "momentum")))
    found = separators(plain, 4)
    cuts = [cut for (cut,) in stage_cuts(plain)]
    assert set(cuts) <= set(found.tensors)
    assert found.before == sorted(found.before) and found.before[-1] <= found.total
    skipping = analysed(hand_step(compiled(net(HERE, skip=True), "momentum")))
    first, second, third = (cut for (cut,) in stage_cuts(skipping))
    alone = separators(skipping, 4).tensors
    assert first in alone and second not in alone and third not in alone


@pytest.mark.parametrize("shared", [False, True])
def test_last_stage_with_linear_layer_and_loss_is_cut(shared):
    """As those of a critic are: no gradient reads what it makes. Its weight may be that of an earlier one."""
    first, last = tf.Variable(np.eye(4)), tf.Variable(np.ones((4, 4)))
    weights = [first, first] if shared else [first, last]

    def body(x):
        with tf.GradientTape() as tape:
            scores = tf.tanh(x @ weights[0], name="cut") @ weights[1]
            loss = tf.reduce_mean(scores)
        changed = weights[:1] if shared else weights
        for variable, gradient in zip(changed, tape.gradient(loss, changed), strict=True):
            variable.assign_sub(gradient)
        return loss

    analysis = written(body, tf.TensorSpec((3, 4), "float64"))
    stages = assign_stages(analysis, [[tensor(analysis, "cut")]])
    assert sorted(stages.owner.values()) == ([0] if shared else [0, 1])
    products = [n for n in analysis.order if n.op == "MatMul"]
    assert [stages.of[n] for n in products if n not in analysis.backward] == [0, 1]
    back = sorted(stages.of[n] for n in products if n in analysis.backward)
    assert back == ([0, 0, 0] if shared else [0, 1, 1])


def two_branches():
    w = [tf.Variable(np.eye(4)) for _ in range(3)]

    def body(x):
        with tf.GradientTape() as tape:
            stem = tf.tanh(x @ w[0], name="stem")
            left, right = tf.tanh(stem @ w[1], name="left"), tf.tanh(stem @ w[2], name="right")
            aside = tf.exp(left, name="aside")
            loss = tf.reduce_sum(left * right)
        for variable, gradient in zip(w, tape.gradient(loss, w), strict=True):
            variable.assign_sub(gradient)
        return loss, aside

    return written(body, tf.TensorSpec((3, 4), "float64"))


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["left", "right"], r"does not separate the network: the cut 2 of 2, `right:0` \(Tanh\), does not depend on the"
         r" one before it, \['left:0'\]. Cut at tensors that follow each other"),
        (["left", "stem"], r"from the input to the loss. The cut 1 of 2, `left:0` \(Tanh\), depends on a later cut"),
        (["x"], "cut 1 of 1, `x:0` .* leaves no layer in the stage before it"),
        ([".*TanhGrad"], "is computed in the backward pass. Cut at outputs of layers"),
        (["stem", "aside"], "no gradient depends on ops after"),
    ],
)  # fmt: skip
def test_invalid_cuts_are_refused(names, text):
    analysis = two_branches()
    with pytest.raises(PipelineError, match=text):
        assign_stages(analysis, [[tensor(analysis, name)] for name in names])


def test_dropout_draws_in_the_stage_of_its_layer():
    keras.utils.set_random_seed(0)
    image = keras.Input((6,))
    x = layers.Dense(4, activation="relu", name="stage0")(image)
    x = layers.Dropout(0.5, name="drop")(layers.Dense(4, name="inner")(x))
    model = keras.Model(image, layers.Dense(3)(x))
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    analysis = analysed(hand_step(model), (4, 6))
    stages = assign_stages(analysis, [[tensor(analysis, "stage0_1/Relu")]])
    assert stages_by(analysis, stages, "drop_1/.*(Random|Greater|Select)", backward=False) == {1}
    assert all(h.node.name.find("drop") < 0 for h in stages.owner), "a seed is no weight"
