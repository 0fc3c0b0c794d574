"""Trains a small classifier with and without a callback, and compares the results."""

import types

import keras
import numpy as np
import pytest
from keras import layers

from tflms_sft import SFT, Measurement, MemoryBudget

X = np.random.default_rng(0).normal(size=(10, 24, 24, 3))
Y = np.arange(10) % 3
SETTINGS = {"verbose": 0, "shuffle": False}
BUDGET = "700KiB"
"""For float64 batches of 4: less than the plain step needs, enough for tiles."""

KINDS = ("train", "test", "predict")


def net(norm=False, blocks=1, size=24, floatx="float64", **compiled):
    """A compiled classifier, with the same initial weights every time."""
    keras.config.set_floatx(floatx)
    keras.utils.set_random_seed(1)
    image = x = keras.Input((size, size, 3), name="photo")
    for number in range(blocks):
        x = layers.Conv2D(6, 3, padding="same", activation="relu", name=f"conv{number}a")(x)
        if norm:
            x = layers.BatchNormalization(name=f"norm{number}")(x)
        x = layers.Conv2D(6, 3, padding="same", activation="relu", name=f"conv{number}b")(x)
        x = layers.MaxPool2D(2, name=f"pool{number}")(x)
    model = keras.Model(image, layers.Dense(3, name="head")(layers.GlobalAveragePooling2D()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    arguments = {"optimizer": sgd, "loss": loss, "metrics": ["accuracy"], "weighted_metrics": [], **compiled}
    model.compile(**{"jit_compile": False, **arguments})
    return model


def tiles(**options):
    return SFT((2, 3), **{"verbose": 0, **options})


def budgeted(**options):
    return MemoryBudget(BUDGET, **{"verbose": 0, **options})


both = pytest.mark.parametrize("make", [tiles, budgeted], ids=["SFT", "MemoryBudget"])


each_slowly = pytest.mark.parametrize(
    "make", [tiles, pytest.param(budgeted, marks=pytest.mark.slow)], ids=["SFT", "MemoryBudget"]
)
"""Explicit tiles, and in the long list a budget, whose search takes several times as long."""


def state(model):
    """Return every variable: weights, optimizer slots, seeds, states of metrics."""
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return [np.array(variable) for variable in variables]


def same(model, plain, tolerance=1e-10):
    got, want = state(model), state(plain)
    assert len(got) == len(want) and len(plain.optimizer.variables) > 2  # Slots too.
    return all(np.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in zip(got, want, strict=True))


def same_history(got, want):
    assert list(got.history) == list(want.history) and "loss" in want.history
    return all(np.allclose(got.history[key], want.history[key], rtol=1e-10, atol=0) for key in want.history)


def is_plain(model):
    """Nothing of a rewritten step is in the model."""
    replaced = {f"{name}_step" for name in KINDS} | {f"make_{name}_function" for name in KINDS}
    functions = [getattr(model, f"{name}_function") for name in KINDS]
    return not any("tflms" in name for name in model.__dict__) and not (
        replaced & set(model.__dict__) or "StepPatch" in repr(functions)
    )


def measure_steps(monkeypatch, peak, earlier=0):
    """Replace the memory statistics of the device.

    Args:
        monkeypatch: The fixture.
        peak: Returns the peak of a step from the sizes of its own tensors; `None` for a device without statistics.
        earlier: Peak before the first step.
    """
    statistics = types.SimpleNamespace(
        earlier_peak=lambda devices: earlier,
        reset_peak=lambda tiers, devices: None if peak is None else 0,
        read_peak=lambda in_use, step_bytes, tiers, devices: Measurement(peak(step_bytes), "a test"),
    )
    monkeypatch.setattr("tflms_sft._keras.peak_watch.peak_statistics", statistics)


def fitted(callback, fit, **compiled):
    """A model trained with the callback and one without, compared."""
    model, plain = net(**compiled), net(**compiled)
    got, want = fit(model, [callback]), fit(plain, [])
    assert callback.plan.changed and callback.plan.segments
    assert same_history(got, want)
    assert same(model, plain)
    assert is_plain(model)
    return callback.plan
