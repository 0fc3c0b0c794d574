"""Networks with a layer between two convolutions, as whole steps; a helper, no test."""

from collections.abc import Callable
from typing import Any

import keras
from equivalence import TOLERANCE, Step, batches_of, error, model_step
from keras import layers

import tflms_sft
from benchmarks._longest_segments import longest_segments

SIZES = {1: (37,), 2: (13, 12), 3: (9, 8, 7)}
CONV = {1: layers.Conv1D, 2: layers.Conv2D, 3: layers.Conv3D}
POOL = {1: layers.GlobalAveragePooling1D, 2: layers.GlobalAveragePooling2D, 3: layers.GlobalAveragePooling3D}


def plain(x: Any) -> Any:
    return x


def normed(x: Any) -> Any:
    return layers.BatchNormalization()(x)


def step_between(
    rank: int,
    norm: Callable[[Any], Any],
    middle: Callable[[Any], Any],
    *,
    known_batch: bool = False,
    size: tuple[int, ...] | None = None,
    steps: int = 2,
) -> Step:
    """The step of a classifier with `middle` between two convolutions, each followed by `norm`, in float64."""
    size = size or SIZES[rank]
    keras.config.set_floatx("float64")
    image = keras.Input((*size, 2), batch_size=3 if known_batch else None)
    x = layers.ReLU()(norm(CONV[rank](4, 3, padding="same")(image)))
    x = layers.ReLU()(norm(CONV[rank](5, 3, padding="same")(middle(x))))
    model = keras.Model(image, layers.Dense(3)(POOL[rank]()(x)))
    arguments = {
        "optimizer": keras.optimizers.SGD(0.1, momentum=0.9),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    }
    return model_step(model, batches_of([3] * steps, (*size, 2)), known_batch, arguments)


def check_on_tiles(
    step: Step,
    num_tiles: tuple[int, ...],
    tolerance: float = TOLERANCE,
    *,
    left_alone: tuple[str, ...] = (),
    **params: Any,
) -> Any:
    """Compare a step with its rewritten twin; return the latter.

    All ops on images have to run on tiles, except those with a name that contains one of `left_alone`.
    """
    with longest_segments():
        fast = tflms_sft.rewrite(step.concrete_fn, tflms_sft.SFTParams(num_tiles=num_tiles, **params))
    left = [reason for where, reason in fast.plan.left_alone if not any(name in where for name in left_alone)]
    assert fast.plan.segments and not [reason for reason in left if "reduces over the image" not in reason]
    want, got = step.run(step.concrete_fn), step.run(fast.concrete_function)
    assert list(want) == list(got)
    assert max(error(got[key], want[key]) for key in want) < tolerance
    return fast
