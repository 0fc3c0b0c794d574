"""A step of several replicas, as `tf.distribute` traces it: one graph, with an image batch for each."""

import os
import subprocess
import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf

import tflms_sft

TWO_DEVICES = """
    import sys
    import keras, numpy as np, tensorflow as tf, tflms_sft
    from keras import layers
    from equivalence import error
    from devices import NO_CACHES, planning_with

    planning = planning_with(**NO_CACHES)
    planning.__enter__()  # As in conftest.py: a process of its own does not read that.

    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    keras.config.set_floatx("float64")
    numbers = np.random.RandomState(0)

    def new_model():
        keras.utils.set_random_seed(0)
        with strategy.scope():
            x = image = keras.Input((16, 14, 3))
            for filters in (4, 5, 4):
                x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
                x = layers.ReLU()(layers.BatchNormalization()(x) if sys.argv[1] == "normed" else x)
            if sys.argv[1] == "attention":
                x = x + layers.MultiHeadAttention(2, 2, attention_axes=(1, 2))(x, x)
            model = keras.Model(image, layers.Dense(3)(layers.GlobalAveragePooling2D()(x)))
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
            model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
        return model
"""

REPLICAS = """
    images = [tf.constant(numbers.normal(size=(2, 16, 14, 3))) for _ in range(2)]
    labels = [tf.constant([0, 1]), tf.constant([2, 1])]

    def trained_by_hand(rewritten):
        model = new_model()
        with strategy.scope():
            model.optimizer.build(model.trainable_variables)
            model._symbolic_build(data_batch=(images[0], labels[0]))

        @tf.function(autograph=False)
        def step(images, labels):
            def of_replicas(values):
                return strategy.experimental_distribute_values_from_function(
                    lambda context: values[context.replica_id_in_sync_group]
                )

            results = strategy.run(model.train_step, args=((of_replicas(images), of_replicas(labels)),))
            return strategy.reduce("MEAN", results["loss"], axis=None)

        if rewritten:
            step = tflms_sft.rewrite(step, tflms_sft.SFTParams(num_tiles=(2, 2), memory_capacity=1), images, labels)
            segments = step.plan.segments
            graph = step.concrete_function.graph
            starts = [op for op in graph.get_operations() if op.name.endswith("/start")]
            first = [op for op in starts if not any("while" in before.name for before in op.control_inputs)]
            print(len(segments), sum(segment.num_loops for segment in segments), len(first), end=" ")
        losses = [np.asarray(step(images, labels)) for _ in range(2)]
        return losses + [np.asarray(v.numpy()) for v in (*model.variables, *model.optimizer.variables)]

    plain, tiled = trained_by_hand(False), trained_by_hand(True)
    print(max(error(got, want) for got, want in zip(tiled, plain, strict=True)))
"""


FIT = """
    images, labels = numbers.normal(size=(11, 16, 14, 3)), np.arange(11) % 3

    def trained(callbacks):
        model = new_model()
        # The last batch has two images for one replica and one for the other.
        options = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
        history = model.fit(images, labels, callbacks=callbacks, **options).history
        told = [np.array(history[key]) for key in ("loss", "accuracy")]
        assert model.distribute_strategy is strategy
        told.append(np.array(model.evaluate(images, labels, batch_size=4, verbose=0)))
        return told + [np.asarray(v.numpy()) for v in (*model.variables, *model.optimizer.variables)]

    plain = trained([])
    tiled = tflms_sft.SFT(num_tiles=(2, 2), verbose=0)
    budget = tflms_sft.MemoryBudget("220KiB", batch_shape=(4, 16, 14, 3), verbose=0)
    for callback in (tiled, budget):
        off = max(error(got, want) for got, want in zip(trained([callback]), plain, strict=True))
        (segment,) = callback.plan.segments
        print(callback.plan.batch, segment.num_loops, len(callback.plan.left_alone), off)
    swapping = tflms_sft.LMS(tier="disk", min_bytes=2**10, verbose=0)
    both = tflms_sft.LMS(tier="host", min_bytes=2**10, tiles=tflms_sft.SFTParams(num_tiles=(2, 2)), verbose=0)
    for callback in (swapping, both):
        off = max(error(got, want) for got, want in zip(trained([callback]), plain, strict=True))
        print(len(callback.plan.swaps), off)
    for call, callback in (
        ("evaluate", tflms_sft.SFT(num_tiles=(2, 2), verbose=0)),
        ("predict", tflms_sft.SFT(num_tiles=(2, 2), verbose=0)),
        ("evaluate", tflms_sft.MemoryBudget("80KiB", batch_shape=(4, 16, 14, 3), verbose=0)),
    ):
        model, data = new_model(), (images,) if call == "predict" else (images, labels)
        want = np.array(getattr(model, call)(*data, batch_size=4, verbose=0))
        got = np.array(getattr(model, call)(*data, batch_size=4, verbose=0, callbacks=[callback]))
        plan = getattr(callback, f"{call}_plan")
        print(sum(segment.num_loops for segment in plan.segments), plan.batch, error(got, want))
    validated = tflms_sft.SFT(num_tiles=(2, 2), verbose=0)
    for callbacks in ([], [validated]):
        model = new_model()
        options = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0, "validation_batch_size": 6}
        history = model.fit(images, labels, callbacks=callbacks, validation_data=(images, labels), **options).history
        print(*(repr(float(x)) for key in ("val_loss", "val_accuracy") for x in history[key]))
    print(sum(segment.num_loops for segment in validated.evaluate_plan.segments))
"""


BUDGETS = """
    from rewriters.device.cards import CARDS
    from devices import planning_for_card
    from tflms_sft._keras.replicas import Replicas

    Replicas.devices = ("GPU:0", "GPU:1")
    images, labels = numbers.normal(size=(4, 16, 14, 3)), np.arange(4) % 3
    for budget in ("auto", "30GiB"):
        with planning_for_card("rtx2080ti"):
            callback = tflms_sft.MemoryBudget(budget, batch_shape=(4, 16, 14, 3), verbose=0)
            new_model().fit(images, labels, batch_size=4, verbose=0, callbacks=[callback])
        print(callback.plan.memory_budget / CARDS["rtx2080ti"].memory_limit, *callback.plan.notes[:1])
"""


def run(script, net):
    """Return the output of a script in a child process, because devices must be set before TensorFlow starts."""
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(TWO_DEVICES + script), net],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def normed():
    """The output for a network with normalisation: of a step of replicas, and of budgets."""
    return run(REPLICAS + BUDGETS, "normed").splitlines()


def test_step_of_two_replicas_equals_plain(normed):
    check_step("normed", normed[0])


@pytest.mark.slow
@pytest.mark.parametrize("net", ("plain", "attention"))
def test_step_of_two_replicas_of_other_networks_equals_plain(net):
    check_step(net, run(REPLICAS, net))


def check_step(net, line):
    segments, loops, first, off = line.split()
    assert (segments, loops) == ("2", "4") if net == "plain" else int(loops) > 6
    assert first == "2", "one replica does not wait for the other"
    assert float(off) < 1e-10


def test_budget_on_gpus_is_bound_by_their_memory(normed):
    _, automatic, large = normed
    assert float(automatic) == pytest.approx(2 * 0.9)
    ratio, note = large.split(maxsplit=1)
    assert float(ratio) == 2 and "instead of 30 GiB" in note and "GPU:0, GPU:1" in note


def test_fit_on_two_replicas_equals_plain():
    """Each replica has loops of its own, and a batch of its own of an unknown size."""
    tiled, budget, swapped, both, *forward, plain, validated, loops = run(FIT, "normed").splitlines()
    for line in (tiled, budget):
        _, loops_in_backward, left, off = line.split()
        assert int(loops_in_backward) >= 8 and int(loops_in_backward) % 2 == 0 and left == "0"
        assert float(off) < 1e-10
    assert budget.split()[0] == "2", "a replica has half of the batch"
    for line, fewest in ((swapped, 12), (both, 4)):
        count, off = line.split()
        assert int(count) >= fewest and int(count) % 2 == 0 and float(off) < 1e-10
    for line in forward:
        num_loops, batch, off = line.split()
        assert int(num_loops) >= 2 and int(num_loops) % 2 == 0 and batch in ("1", "2") and float(off) < 1e-12
    np.testing.assert_allclose(*([float(x) for x in line.split()] for line in (plain, validated)), rtol=1e-10)
    assert int(loops) >= 2 and int(loops) % 2 == 0


@pytest.mark.parametrize("make", (lambda: tflms_sft.SFT(num_tiles=(2, 2)), lambda: tflms_sft.LMS(min_bytes=0)))
def test_fit_on_one_mirrored_device_equals_plain(make, capsys):
    """A strategy of one device, as on a machine with one GPU, merges replicas in the update as well."""
    numbers = np.random.default_rng(0)
    images, labels = numbers.normal(size=(4, 16, 16, 3)), np.arange(4) % 2

    def trained(callbacks):
        keras.utils.set_random_seed(0)
        with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
            image = keras.Input((16, 16, 3))
            x = keras.layers.BatchNormalization()(keras.layers.Conv2D(4, 3, activation="relu")(image))
            x = keras.layers.GlobalAveragePooling2D()(keras.layers.Conv2D(4, 3, activation="relu")(x))
            model = keras.Model(image, keras.layers.Dense(2)(x))
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
        model.fit(images, labels, batch_size=2, verbose=0, shuffle=False, callbacks=callbacks)
        return model.get_weights()

    keras.config.set_floatx("float64")
    callback = make()
    plain, rewritten = trained([]), trained([callback])
    assert callback.plan.changed
    for want, got in zip(plain, rewritten, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)
