"""All uses of private Keras interfaces.

If a new Keras breaks the project, it breaks here. Each function names the part of Keras that it relies on, and why the
public interface is not enough. Nothing is imported from Keras: the functions read objects that they receive.
"""

from __future__ import annotations

import dataclasses
from typing import Any


def layers_of(model: Any) -> list[Any]:
    """Return a model and all layers in it.

    Relies on `Layer._flatten_layers`. The public `Model.layers` lacks layers inside of other layers.
    """
    return list(model._flatten_layers())


def origin_of(tensor: Any) -> tuple[Any, int]:
    """Return the layer that a symbolic tensor is an output of, and its position; `(None, 0)` for another tensor.

    Relies on `KerasTensor._keras_history`. Nothing public leads from a tensor to its layer.
    """
    history = getattr(tensor, "_keras_history", None)
    return (None, 0) if history is None else (history.operation, history.tensor_index)


def has_mask(value: Any) -> bool:
    """Tell whether a tensor has a mask.

    Relies on the attribute `_keras_mask` of tensors. `Layer.compute_mask` computes a mask instead of reading it.
    """
    return getattr(value, "_keras_mask", None) is not None


def build_for_batch(model: Any, batch: Any) -> None:
    """Create the variables of a compiled model, its metrics and its optimizer for the specs of a batch.

    Relies on `Trainer._symbolic_build`, which `fit` calls. `Model.build` creates those of the layers alone.
    """
    model._symbolic_build(data_batch=batch)


def replace_value(variable: Any, value: Any) -> None:
    """Replace the TensorFlow variable behind a Keras variable.

    Relies on `keras.Variable._value`. `Variable.assign` copies into the present one, on its device.
    """
    variable._value = value


def training_writer(board: Any) -> Any:
    """Return the summary writer of a `keras.callbacks.TensorBoard` for training; `None` without a callback.

    Relies on `TensorBoard._train_writer`. A second writer of one run hides the file of the first.
    """
    return getattr(board, "_train_writer", None)


@dataclasses.dataclass(frozen=True)
class StepKind:
    """Names of the undocumented attributes of a Keras model that define one of its steps.

    Keras calls the method `make` before it trains, evaluates or predicts. The method builds the compiled function from
    the method `step`, unless there is one already; `make(force=True)` always builds it. The argument of the function is
    an iterator of a data set, a generator for `train_on_batch`, or the list of the batches of a prediction.

    Attributes:
        step: Name of the method for one batch.
        function: Name of the compiled function that runs one or several steps.
        make: Name of the method that builds this function.
    """

    step: str
    function: str
    make: str


TRAINING = StepKind("train_step", "train_function", "make_train_function")
EVALUATION = StepKind("test_step", "test_function", "make_test_function")
PREDICTION = StepKind("predict_step", "predict_function", "make_predict_function")

DISTRIBUTE_STRATEGY = "_distribute_strategy"
"""Attribute that `Model.distribute_strategy` reads, a property that cannot be set."""


def forget_functions(model: Any) -> None:
    """Have Keras build the compiled functions of a model and of the models in it again on demand.

    Relies on the attributes that a `StepKind` names.
    """
    for layer in layers_of(model):
        for kind in (TRAINING, EVALUATION, PREDICTION):
            if hasattr(layer, kind.make):
                setattr(layer, kind.function, None)


ABSENT = object()
"""Stands for an attribute that a model does not have of its own."""


def override(model: Any, name: str, value: Any) -> None:
    """Set an attribute of one model, which hides that of its class; `ABSENT` removes it.

    Relies on the storage of attributes in `__dict__`. `Layer.__setattr__` would track the value as a part of the model.
    """
    if value is not ABSENT:
        object.__setattr__(model, name, value)
    elif name in model.__dict__:
        object.__delattr__(model, name)


def overriding(model: Any, name: str) -> Any:
    """Return the attribute of one model that hides that of its class; `ABSENT` if there is none."""
    return model.__dict__.get(name, ABSENT)
