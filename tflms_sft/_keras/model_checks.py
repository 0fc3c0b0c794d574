"""Checks that a Keras model has a step that can be rewritten."""

from __future__ import annotations

from typing import Any

import keras

from rewriters.errors import RewriteError
from tflms_sft._trace.step_tracing import check_graphs_run

__all__: list[str] = []


def check_model(model: Any) -> None:
    """Refuse a model whose train step cannot be rewritten.

    Raises:
        RewriteError: With the remedy.
    """
    check_keras(model)
    if not getattr(model, "compiled", False) or model.optimizer is None:
        raise RewriteError(f"Model {model.name!r} is not compiled with an optimizer. Call `model.compile` first.")
    check_runs(model)
    if not model.trainable_variables:
        raise RewriteError(f"Model {model.name!r} has no trainable weights, so a step computes no gradients.")


def check_keras(model: Any) -> None:
    """Refuse objects that are not a Keras model on the TensorFlow backend.

    Raises:
        RewriteError: If Keras uses another backend.
        TypeError: If `model` is not a `keras.Model`.
    """
    if keras.backend.backend() != "tensorflow":
        raise RewriteError(
            f"Keras runs on {keras.backend.backend()!r}; only TensorFlow graphs can be rewritten. "
            'Set the environment variable KERAS_BACKEND="tensorflow".'
        )
    if not isinstance(model, keras.Model):
        raise TypeError(f"`model` must be a compiled `keras.Model`. Received: {model!r}.")


def check_runs(model: Any) -> None:
    """Refuse a model that runs eagerly or has no weights.

    Raises:
        RewriteError: With the remedy.
    """
    if model.run_eagerly:
        raise RewriteError(
            f"Model {model.name!r} runs eagerly, so there is no graph to rewrite. Compile it with `run_eagerly=False`."
        )
    check_graphs_run()
    if not model.built or not model.weights:
        raise RewriteError(f"Model {model.name!r} has no weights yet. Call it on a batch first.")
