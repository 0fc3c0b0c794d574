"""Networks that train on tiles of images, on four devices; a helper, no test.

Run as a program it prints, for `test_sample_dataset.py`, how far the cases that it is given are from training on whole
images.
"""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable

os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # As in conftest.py: a process of its own does not read that.

import keras
import numpy as np
import tensorflow as tf
from children import say
from keras import layers
from sample_nets import described

import tflms_sft
from tflms_sft import unets
from tflms_sft._verify.differences import difference as error

SIZES = 46, 62  # Neither goes evenly into the parts below.
IMAGES, BATCH = 9, 2  # Five steps, of which the last has one image.


def net(case):
    """A U-Net, compiled."""
    keras.utils.set_random_seed(1)
    body = described(case.architecture, None, filters=2)
    head = layers.Conv2D(2, 1, kernel_regularizer=case.regularizer)
    model = keras.Model(body.inputs, head(body.layers[-2].output))
    loss = case.loss()
    model.compile(case.optimizer(), loss, weighted_metrics=["accuracy" if case.classes else "mae"], jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    return model


def batches(case):
    """Images, labels and perhaps weights."""
    random = np.random.default_rng(0)
    rows = [case.architecture.result_rows(own) for own in SIZES]
    arrays = [random.normal(size=(case.images, *SIZES, 1))]
    arrays.append(
        random.integers(2, size=(case.images, *rows)) if case.classes else random.normal(size=(case.images, *rows, 2))
    )
    if case.weighted:
        arrays.append(random.uniform(size=(case.images, *rows)))
    data = tf.data.Dataset.from_tensor_slices(tuple(arrays))
    return data.batch(BATCH, drop_remainder=not case.images % BATCH)


def fitted(model, data, callbacks=()):
    """Losses of each step, losses and metrics of the epoch, and what `evaluate` says."""
    steps = []
    each = keras.callbacks.LambdaCallback(on_train_batch_end=lambda step, logs: steps.append(logs["loss"]))
    history = model.fit(data, shuffle=False, verbose=0, callbacks=[*callbacks, each]).history
    return [*steps, *np.ravel([*history.values()]), *model.evaluate(data, verbose=0)]


def looped(model, data):
    """Return the losses of each step of a custom loop."""
    strategy = model.distribute_strategy

    def replica_step(x, y, weights=None):
        with tf.GradientTape() as tape:
            value = model.loss(y, model(x, training=True), sample_weight=weights)
        gradients = tape.gradient(value, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)
        return value

    @tf.function
    def step(batch):
        return strategy.reduce("SUM", strategy.run(replica_step, batch), axis=None)

    return [step(batch).numpy() for batch in strategy.experimental_distribute_dataset(data)]


def state(model):
    """All weights, slots and counters, of each replica."""
    kept = [*model.variables, *model.optimizer.variables]
    return [[own.numpy() for own in model.distribute_strategy.experimental_local_results(v.value)] for v in kept]


def adam():
    return keras.optimizers.Adam(0.01)


def momentum():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def momentum_of_sums():
    return keras.optimizers.SGD(1e-4, momentum=0.9)


@dataclasses.dataclass
class Case:
    """A way to train, by `fit` or by a custom loop."""

    parts: tuple[int, int]
    optimizer: Callable = adam
    loss: Callable = keras.losses.MeanSquaredError
    train: Callable = fitted
    architecture: unets.Architecture = unets.Architecture("least", 2, 1)
    regularizer: str | None = None
    classes: bool = False
    weighted: bool = False
    images: int = IMAGES
    replicas: tuple[int, ...] = (4,)
    callbacks: tuple = ()
    loss_reduction: str = "mean"


def classes():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def sums():
    return keras.losses.MeanSquaredError(reduction="sum")


LITTLE = unets.Architecture("little", 3, 1)
CASES = {
    "fit": Case((2, 2), regularizer="l2"),
    "loop": Case((1, 4), train=looped),
    "row": Case((1, 4), momentum, classes, classes=True, weighted=True, replicas=(1, 4)),
    "two for each": Case((4, 2), momentum_of_sums, sums, loss_reduction="sum"),
    "half of the batch": Case((1, 2), momentum, images=8),
    "tiles of tiles": Case(
        (2, 2), momentum, architecture=LITTLE, images=4, callbacks=(tflms_sft.SFT((2, 2), verbose=0),)
    ),
}


def compare(case, strategy):
    """Compare training on tiles, on one device or four, with training on whole images on one device."""
    plain = net(case)
    want = case.train(plain, batches(case))
    found = {}
    for replicas in case.replicas:
        with strategy.scope() if replicas > 1 else contextlib.nullcontext():
            model = net(case)
        start = [v.numpy() for v in model.trainable_variables]
        data = unets.sample_parallel(model, batches(case), case.parts, case.loss_reduction)
        got = case.train(model, data, *[case.callbacks] * bool(case.callbacks))
        pairs = [(own, one) for every, (one,) in zip(state(model), state(plain), strict=True) for own in every]
        found[str(replicas)] = {
            "losses": max(error(np.array(a), np.array(b)) for a, b in zip(got, want, strict=True)),
            "variables": max(error(a, b) for a, b in pairs),
            "copies": {len(every) for every in state(model)} == {replicas},
            "steps": int(model.optimizer.iterations.numpy()),
            "moved": min(error(v.numpy(), old) for v, old in zip(model.trainable_variables, start, strict=True)),
        }
    return found


def refusal(case, data, strategy):
    """Return the error for a model of the strategy."""
    with strategy.scope():
        model = net(case)
    try:
        unets.sample_parallel(model, data, case.parts)
    except ValueError as error:
        return str(error)
    return ""


def clipped(strategy):
    """Return the error of clipped gradients, and check that clipping is refused."""
    case = Case((2, 2), lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.01), images=2)
    plain = net(case)
    with strategy.scope():
        model = net(case)
    tiles = unets.sample_parallel(net(case), batches(case), case.parts)
    fitted(plain, batches(case))
    fitted(model, tiles)
    errors = [error(a.numpy(), b.numpy()) for a, b in zip(model.variables, plain.variables, strict=True)]
    return {"error": max(errors), "refusal": refusal(case, batches(case), strategy)}


def uneven(strategy):
    """Three tiles on four replicas, of batches of one or two images and of two."""
    cases = [Case((1, 3), momentum), Case((1, 3), momentum, images=8)]
    return [refusal(case, batches(case), strategy) for case in cases]


def main():
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
    keras.config.set_floatx("float64")
    strategy = tf.distribute.MirroredStrategy([f"CPU:{number}" for number in range(4)])
    others = {"clipped": clipped, "uneven": uneven}
    for name in sys.argv[1:]:
        say(name, compare(CASES[name], strategy) if name in CASES else others[name](strategy))


if __name__ == "__main__":
    main()
