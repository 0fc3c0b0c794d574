"""Tests of the mapping between layer names and tensors of a traced step."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tflms_sft
from tflms_sft import SegmentError, SegmentSpec, SFTParams
from tflms_sft._trace.layer_names import display_names, lookup, part_name, recorded_layers, resolve


def conv(name, filters=3):
    return layers.Conv2D(filters, 3, padding="same", activation="relu", name=name)


def classifier(body, **options):
    image = keras.Input((16, 16, 3), name="photo", **options)
    return keras.Model(image, layers.Dense(2, name="head")(layers.GlobalAveragePooling2D()(body(image))))


def step_of(model):
    """A `tf.function` that returns the loss and the gradients."""
    if not model.built:
        model.build((2, 16, 16, 3))

    @tf.function
    def step(images, labels):
        with tf.GradientTape() as tape:
            outputs = model(images, training=True)
            loss = tf.reduce_mean((outputs - labels) ** 2)
        return loss, tape.gradient(loss, model.trainable_variables)

    return step


BATCH = np.random.default_rng(0).normal(size=(2, 16, 16, 3)).astype("float32"), np.ones((2, 2), "float32")


def rewritten(model, *specs):
    return tflms_sft.rewrite(step_of(model), SFTParams(num_tiles=(2, 2), segments=list(specs)), *BATCH)


def same_gradients(model, *specs):
    """Tell whether the step with these segments equals the original; each segment must exist."""
    fast = rewritten(model, *specs)
    assert len(fast.plan.segments) == len(specs)
    got, want = fast(*BATCH), step_of(model)(*BATCH)
    return all(np.allclose(a, b, atol=1e-6) for a, b in zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True))


def chain(x):
    return layers.MaxPool2D(2, name="pool")(conv("second")(conv("first")(x)))


def test_resolve_layer_returns_output():
    assert same_gradients(classifier(chain), SegmentSpec("first", "pool"))
    (segment,) = rewritten(classifier(chain), SegmentSpec("first", "pool")).plan.segments
    assert segment.entries == ("first",)
    assert segment.exits == ("pool",)


def test_resolve_input_layer_returns_image():
    (segment,) = rewritten(classifier(chain), SegmentSpec("photo", "second")).plan.segments
    assert segment.entries == ("photo",)
    assert segment.tile_rows == ((8, 8), (10, 10))  # Two 3x3 convolutions, at the border on one side.


def test_resolve_sequential_input_has_name():
    head = layers.GlobalAveragePooling2D(), layers.Dense(2)
    model = keras.Sequential([keras.Input((16, 16, 3), name="photo"), conv("first"), conv("second"), *head])
    (segment,) = rewritten(model, SegmentSpec("photo", "second")).plan.segments
    assert segment.entries == ("photo",)
    unnamed = keras.Sequential([conv("first"), conv("second"), *head])
    (segment,) = tflms_sft.rewrite(step_of(unnamed), SFTParams(num_tiles=(2, 2)), *BATCH).plan.segments
    (entry,) = segment.entries
    assert entry == unnamed.inputs[0]._keras_history.operation.name
    for name in (entry, unnamed.inputs[0].name):
        assert rewritten(unnamed, SegmentSpec(name, unnamed.layers[1].name)).plan.segments[0].entries == (entry,)


def test_resolve_unnamed_input_has_name_of_layer():
    """The name is that of `model.summary()`."""
    keras.backend.clear_session()
    image = keras.Input((16, 16, 3))
    model = keras.Model(image, layers.Dense(2)(layers.GlobalAveragePooling2D()(chain(image))))
    (segment,) = rewritten(model, SegmentSpec("input_layer", "pool")).plan.segments
    assert segment.entries == ("input_layer",)


def test_resolve_op_and_tensor_names():
    model = classifier(chain)
    operations = step_of(model).get_concrete_function(*BATCH).graph.get_operations()
    relu = next(o.name for o in operations if o.type == "Relu")
    pool = next(o.name for o in operations if o.type == "MaxPool")
    for entry, exit_ in ((relu, pool), (relu + ":0", pool + ":0"), (relu, "pool")):
        assert same_gradients(model, SegmentSpec(entry, exit_))


@pytest.mark.parametrize("name", ["no_such:0", "no_such:x"])
def test_resolve_unknown_tensor_is_refused(name):
    with pytest.raises(SegmentError, match=f"`entry` names nothing in the step.*entry='{name}'"):
        rewritten(classifier(chain), SegmentSpec(name, "pool"))


def test_resolve_missing_output_is_refused():
    model = classifier(chain)
    operations = step_of(model).get_concrete_function(*BATCH).graph.get_operations()
    relu = next(o.name for o in operations if o.type == "Relu")
    with pytest.raises(SegmentError, match="names nothing in the step"):
        rewritten(model, SegmentSpec(f"{relu}:7", "pool"))


@pytest.mark.parametrize(("wrong", "near"), [("frist", "'first'"), ("pol", "'pool'"), ("foto", "'photo'")])
@pytest.mark.parametrize("argument", ["entry", "exit"])
def test_resolve_unknown_name_suggests_nearest(wrong, near, argument):
    names = {"entry": "photo", "exit": "pool", argument: wrong}
    with pytest.raises(SegmentError, match=f"`{argument}` names nothing") as error:
        rewritten(classifier(chain), SegmentSpec(**names))
    assert f"Received: {argument}={wrong!r}" in str(error.value)
    offered = str(error.value).partition("Nearest:")[2].strip(" .").split(", ")
    layer_names = ["photo", "first", "second", "pool", "head", "functional"]
    assert near in offered and {*offered} <= {*map(repr, layer_names)}, "no operations"


def test_resolve_misspelt_op_suggests_op():
    model = classifier(chain)
    relu = next(o.name for o in step_of(model).get_concrete_function(*BATCH).graph.get_operations() if o.type == "Relu")
    with pytest.raises(SegmentError, match=f"Nearest: .*'{relu}'"):
        rewritten(model, SegmentSpec("photo", f"{relu}x"))
    with pytest.raises(SegmentError) as error:
        rewritten(model, SegmentSpec("photo", "inner/second"))
    assert str(error.value).endswith("Nearest: 'second'.")


def test_resolve_without_layers_suggests_ops():
    kernel = tf.Variable(tf.ones((3, 3, 1, 2)))

    @tf.function(autograph=False)
    def step(images):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.relu(tf.nn.conv2d(images, kernel, 1, "SAME", name="conv1"), name="relu1"))
        kernel.assign_sub(tape.gradient(loss, kernel))
        return loss

    params = SFTParams(segments=[SegmentSpec("conv_1", "relu1", (2, 1))])
    with pytest.raises(SegmentError, match="Nearest: .*'conv1'"):
        tflms_sft.rewrite(step, params, tf.ones((1, 8, 8, 1)))


def test_resolve_dissimilar_name_suggests_layers():
    with pytest.raises(SegmentError, match="Nearest: '.+'"):
        rewritten(classifier(chain), SegmentSpec("@@@@", "pool"))


def shared(x):
    twice = conv("conv")
    return layers.MaxPool2D(2, name="pool")(twice(conv("between")(twice(x))))


def test_resolve_layer_called_twice_is_ambiguous():
    with pytest.raises(SegmentError, match="layer 'conv' is called 2 times") as error:
        rewritten(classifier(shared), SegmentSpec("conv", "pool"))
    assert "`entry` is ambiguous" in str(error.value)
    assert "'conv/1', 'conv/2'" in str(error.value)
    with pytest.raises(SegmentError, match="`exit` is ambiguous"):
        rewritten(classifier(shared), SegmentSpec("photo", "conv"))


def test_resolve_numbered_call_returns_output():
    (segment,) = rewritten(classifier(shared), SegmentSpec("conv/1", "conv/2")).plan.segments
    assert (segment.entries, segment.exits) == (("conv/1",), ("conv/2",))
    assert same_gradients(classifier(shared), SegmentSpec("conv/1", "conv/2"))
    with pytest.raises(SegmentError, match="names nothing.*'conv/"):
        rewritten(classifier(shared), SegmentSpec("conv/3", "pool"))


def nested(x):
    inside = keras.Input((16, 16, 3), name="inside_input")
    backbone = keras.Model(inside, conv("deep")(conv("inner")(inside)), name="backbone")
    return layers.MaxPool2D(2, name="pool")(backbone(conv("outer")(x)))


@pytest.mark.parametrize(
    ("entry", "exit_"),
    [("inner", "pool"), ("photo", "inner"), ("outer", "backbone"), ("backbone", "pool"), ("inside_input", "deep")],
)
def test_resolve_layers_of_nested_model(entry, exit_):
    assert same_gradients(classifier(nested), SegmentSpec(entry, exit_))


def two_branches(x):
    left, right = conv("left")(x), conv("right")(x)
    return layers.Concatenate(name="both")([conv("left2")(left), conv("right2")(right)])


def test_segment_spec_several_entries_and_exits_resolve():
    (segment,) = rewritten(classifier(two_branches), SegmentSpec(("left", "right"), "both")).plan.segments
    assert set(segment.entries) == {"left", "right"}
    assert same_gradients(classifier(two_branches), SegmentSpec(("left", "right"), "both"))
    assert same_gradients(classifier(two_branches), SegmentSpec("photo", ("left2", "right2")))


@pytest.mark.parametrize("body", [chain, shared, nested, two_branches], ids=lambda body: body.__name__)
def test_plan_names_are_valid_in_segment_spec(body):
    step = step_of(classifier(body))
    automatic = tflms_sft.rewrite(step, SFTParams(num_tiles=(2, 2)), *BATCH).plan
    assert automatic.segments
    for segment in automatic.segments:
        assert all(name in automatic.summary() for name in (*segment.entries, *segment.exits))
        spec = SegmentSpec(segment.entries, segment.exits)
        (again,) = tflms_sft.rewrite(step, SFTParams((2, 2), [spec]), *BATCH).plan.segments
        assert (again.entries, again.exits) == (segment.entries, segment.exits)
        assert (again.forward_ops, again.backward_ops) == (segment.forward_ops, segment.backward_ops)


def test_display_names_resolve_to_their_tensors():
    from rewriters.canonicalize.canonicalize import read_canonical

    step = step_of(classifier(nested))
    with recorded_layers() as record:
        concrete_fn = step.get_concrete_function(*BATCH)
    record.finish(concrete_fn.graph)
    graph = read_canonical(concrete_fn)
    shown = display_names(graph, record)
    assert {"photo", "outer", "inner", "pool", "head"} <= set(shown.values())
    for tensor, name in shown.items():
        assert resolve(name, "entry", graph, record) == [tensor]
    assert lookup(graph, "no_such") is None


def test_call_of_gradient_op_is_forward_layer():
    """For a layer inside a model, and for each call of a layer that is called twice."""

    def body(x):
        twice = conv("conv")
        return nested(twice(conv("between")(twice(x))))

    step = step_of(classifier(body))
    with recorded_layers() as record:
        concrete_fn = step.get_concrete_function(*BATCH)
    record.finish(concrete_fn.graph)
    found = {}
    for operation in concrete_fn.graph.get_operations():
        call = record.call_of(operation.name)
        found.setdefault(operation.type, []).append(None if call is None else call.layer)
    convolutions = ["conv", "between", "conv", "outer", "inner", "deep"]
    assert found["Conv2D"] == convolutions and found["BiasAddGrad"][0] == "head"
    for gradient in ("Conv2DBackpropFilter", "ReluGrad"):
        assert found[gradient] == convolutions[::-1]
    assert record.call_of("gradient_tape/elsewhere/conv/Mul") is None and record.call_of("conv") is None


def test_call_of_gradient_function_op_is_forward_layer():
    model = classifier(chain)

    @tf.function
    def step(images):
        loss = tf.reduce_sum(model(images, training=True) ** 2)
        return tf.gradients(loss, [variable.value for variable in model.trainable_variables])

    with recorded_layers() as record:
        traced = step.get_concrete_function(BATCH[0]).graph
    record.finish(traced)
    filters = [operation.name for operation in traced.get_operations() if operation.type == "Conv2DBackpropFilter"]
    assert [record.call_of(name).layer for name in filters] == ["second", "first"]


def test_part_name_of_loss_ops_is_loss():
    image = keras.Input((4,))
    model = keras.Model(image, layers.Dense(3, name="head")(image))
    model.compile("sgd", keras.losses.Dice(), jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    step = tf.function(lambda x, y: model.train_step((x, y)), autograph=False)
    with recorded_layers() as record:
        concrete_fn = step.get_concrete_function(tf.zeros((2, 4)), tf.zeros((2, 3)))
    record.finish(concrete_fn.graph)
    names = [op.name for op in concrete_fn.graph.get_operations()]
    forward = [name for name in names if name.startswith("compile_loss/dice/")]
    backward = [name for name in names if name.startswith("gradient_tape/compile_loss/dice/")]
    assert forward and backward
    assert {part_name(record, name) for name in (*forward, *backward)} == {"loss 'dice'"}
    assert {part_name(record, name) for name in names if name.endswith("/MatMul")} == {"layer 'head' (Dense)"}
    assert part_name(record, "compile_loss/mul") == part_name(record, "x") == ""


def test_recorded_layers_restores_layer_call():
    call = layers.Layer.__call__
    with pytest.raises(RuntimeError, match="inside"):
        with recorded_layers():
            assert layers.Layer.__call__ is not call
            raise RuntimeError("inside")
    assert layers.Layer.__call__ is call


def test_recorded_layers_two_threads_are_serialised():
    """`Layer.__call__` is restored."""
    before = keras.layers.Layer.__call__
    inside, may_end = threading.Event(), threading.Event()

    def other():
        with recorded_layers():
            inside.set()
            may_end.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    ended = threading.Timer(0.1, may_end.set)
    ended.start()
    with recorded_layers():
        assert may_end.is_set()  # One at a time.
    thread.join()
    assert keras.layers.Layer.__call__ is before
