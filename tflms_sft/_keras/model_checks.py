"""Checks that a Keras model has a step that can be rewritten."""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any

import keras
import tensorflow as tf

from rewriters.errors import RewriteError
from tflms_sft._trace.step_tracing import reason_without_graph
from tflms_sft._util.keras_internals import layers_of
from tflms_sft._util.requirements import check_backend

__all__: list[str] = []

_TRAINER_METHODS = ("train_step", "make_train_function", "compile", "fit")


def check_model(model: Any) -> None:
    """Refuse a model whose steps cannot be rewritten.

    A model may have no weights yet, since its first step creates them, as in a `fit` of Keras alone.

    Raises:
        RewriteError: If the model is not compiled, runs eagerly, or Keras uses another backend.
        TypeError: If `model` is no Keras trainer.
    """
    check_trainer(model)
    if not model.compiled:
        raise RewriteError(f"Model {model.name!r} is not compiled with an optimizer. Call `model.compile` first.")
    check_runs_graph(model)


def check_trainer(model: Any) -> None:
    """Refuse objects that are no Keras trainer on the TensorFlow backend.

    A trainer is a `keras.Model`, or a layer that derives from Keras's class `Trainer`, which Keras does not export.

    Raises:
        RewriteError: If Keras uses another backend.
        TypeError: If `model` is no trainer.
    """
    check_backend()
    if not is_trainer(model):
        raise TypeError(f"`model` must be a compiled `keras.Model`. Received: {model!r}.")


def is_trainer(model: Any) -> bool:
    """Tell whether an object trains as a `keras.Model` does."""
    return isinstance(model, keras.layers.Layer) and all(hasattr(model, name) for name in _TRAINER_METHODS)


def build_optimizer(model: Any) -> None:
    """Create the slots of the optimizer beside the weights, if the step is Keras's own, which updates all weights.

    A step of the model's own may use the optimizer for some weights only, and builds it for them when it is traced. So
    does a step that builds layers, such as those of a recurrent cell, when it is traced for the first time.
    """
    has_own_step = type(model).train_step is not keras.Model.train_step
    is_complete = model.built and all(layer.built for layer in layers_of(model))
    if is_complete and not has_own_step and model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def variable_bytes(model: Any, without: Container[int] = ()) -> list[int]:
    """Return the bytes of each variable of a model and its optimizer, except those with a handle's id in `without`."""
    optimizer = getattr(model, "optimizer", None)
    variables = [*model.variables, *(optimizer.variables if optimizer is not None else [])]
    values = {id(variable.value): variable.value for variable in variables}
    return [
        math.prod(value.shape) * value.dtype.size
        for value in values.values()
        if isinstance(value, tf.Variable) and id(value.handle) not in without
    ]


def reason_runs_eagerly(model: Any) -> str:
    """Return why the steps of a model have no graph; empty if they have one."""
    if model.run_eagerly:
        return (
            f"Model {model.name!r} runs eagerly, so there is no graph to rewrite. Compile it with `run_eagerly=False`."
        )
    return reason_without_graph()


def check_runs_graph(model: Any) -> None:
    """Refuse a model that runs eagerly.

    Raises:
        RewriteError: With the remedy.
    """
    reason = reason_runs_eagerly(model)
    if reason:
        raise RewriteError(reason)
