"""From what a user names to a Keras model, and to the same model for images of another size."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import keras

from tflms_sft._cli.exit_status import UsageError
from tflms_sft._util.text import nearest

__all__: list[str] = []


def load(name: str, arguments: Mapping[str, Any], imports: Sequence[str] = ()) -> Any:
    """The model that a command line names.

    Args:
        name: A file, or `package.module:function`, or `path/to/file.py:function`.
        arguments: Keyword arguments of the function.
        imports: Modules to import first.

    Raises:
        UsageError: If there is no such file or function, or if no model comes of it.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for wanted in imports:
        _imported(wanted, "--import")
    if os.path.exists(name):
        if name.endswith(".py"):
            raise UsageError(f"MODEL has to name the function that builds the model: {name}:function.")
        if arguments:
            raise UsageError(f"--arg is for functions, and MODEL is a file. Received: {name!r}.")
        return _saved(name)
    place, colon, function = name.rpartition(":")
    if not colon or not place or not function:
        raise UsageError(
            f"MODEL must be a .keras file that exists, or package.module:function. Received: {name!r}, and there is "
            "no such file."
        )
    module = _from_file(place) if place.endswith(".py") else _imported(place, "MODEL")
    model = _made(name, _member(module, function, place), arguments)
    if not isinstance(model, keras.Model):
        raise UsageError(
            f"MODEL must name a function that returns a `keras.Model`. {name!r} returned {_kind(model)}."
            + (" A `tf_keras` model is one of Keras 2, which is not supported." if "tf_keras" in _kind(model) else "")
        )
    return model


def _kind(value: Any) -> str:
    return f"an object of type {type(value).__module__}.{type(value).__qualname__}"


def _saved(path: str) -> Any:
    try:
        return keras.models.load_model(path)
    except Exception as error:
        raise UsageError(
            f"Keras cannot load {path!r} ({type(error).__name__}: {str(error)[:700]}). Layers of your own have to be "
            "registered by a module that `--import` names; or give package.module:function, which builds the model."
        ) from error


def _imported(name: str, argument: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}.")
        where = f" It is looked for in {os.getcwd()} and on the path of {sys.executable}." if missing else ""
        raise UsageError(
            f"{argument} names the module {name!r}, which cannot be imported: {type(error).__name__}: {error}.{where}"
        ) from error


def _from_file(path: str) -> ModuleType:
    if not os.path.exists(path):
        raise UsageError(f"MODEL names the file {path!r}, which does not exist.")
    name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    sys.modules.setdefault(name, module)  # Where pickles and dataclasses look for it.
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(
            f"MODEL names the file {path!r}, which cannot be imported: {type(error).__name__}: {error}."
        ) from error
    return module


def _member(module: ModuleType, function: str, place: str) -> Any:
    try:
        found = functools.reduce(getattr, function.split("."), module)
    except AttributeError:
        names = [name for name in dir(module) if not name.startswith("_") and callable(getattr(module, name))]
        has = nearest(function, names) if names else "It has no functions."
        raise UsageError(f"MODEL names {function!r} in {place!r}, and there is none. {has}") from None
    if not callable(found) and not isinstance(found, keras.Model):
        raise UsageError(f"MODEL names {function!r} in {place!r}, which is {_kind(found)} and no function.")
    return found


def _made(name: str, function: Any, arguments: Mapping[str, Any]) -> Any:
    if isinstance(function, keras.Model):  # Which is callable, on images.
        if arguments:
            raise UsageError(f"--arg is for functions, and {name!r} is a model already.")
        return function
    try:
        return function(**arguments)
    except Exception as error:
        shown = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise UsageError(f"{name}({shown}) raised {type(error).__name__}: {error}") from error


def resized(model: Any, shape: Sequence[int]) -> Any:
    """The same layers for images of another size, with weights of their own, compiled as the model is.

    Args:
        model: A compiled functional or sequential model with one input of fixed size.
        shape: Of one image.

    Raises:
        UsageError: If its layers cannot be built for that size, or only with weights of other shapes.
    """
    image = keras.Input(tuple(shape), dtype=model.inputs[0].dtype, name=model.inputs[0].name)
    what = f"Model {model.name!r} has images of {_shape(model.inputs[0].shape[1:])}"
    try:
        clone = keras.models.clone_model(model, input_tensors=image, clone_function=_of_any_size)
    except Exception as error:
        raise UsageError(
            f"{what}, and its layers cannot be built for {_shape(shape)}: {type(error).__name__}: {error}. Build it "
            "with sizes left open, `keras.Input((None, None, channels))`; or try other sizes with --multiple-of."
        ) from error
    for old, new in zip(model.weights, clone.weights, strict=True):
        if old.shape != new.shape:
            raise UsageError(
                f"{what}, and for {_shape(shape)} the weight {old.path!r} would be {_shape(new.shape)} instead of "
                f"{_shape(old.shape)}: that is another network. A dense layer after `Flatten` does that; global "
                "pooling in its place leaves the size of images free."
            )
    compile_as(clone, model)
    return clone


def _of_any_size(layer: Any) -> Any:
    """A copy of a layer; of a model inside of the model, one that takes images of any size."""
    if not isinstance(layer, keras.Model) or len(getattr(layer, "inputs", None) or ()) != 1:
        return layer.__class__.from_config(layer.get_config())
    given = layer.inputs[0]
    spatial = len(given.shape) - 2
    if spatial < 1:
        return layer.__class__.from_config(layer.get_config())
    axes = spatial_axes(len(given.shape) - 1)
    shape = [None if axis in axes else size for axis, size in enumerate(given.shape[1:])]
    image = keras.Input(tuple(shape), dtype=given.dtype, name=given.name)
    clone = keras.models.clone_model(layer, input_tensors=image, clone_function=_of_any_size)
    clone.trainable = layer.trainable
    return clone


def compile_as(clone: Any, model: Any, optimizer: Any = None, loss: Any = None) -> None:
    """Compile a model as another one is, with an optimizer of its own, or with what is given."""
    own = model.optimizer
    given = optimizer if optimizer is not None else own.__class__.from_config(own.get_config())
    clone.compile(given, model.loss if loss is None else loss, jit_compile=False)


def spatial_axes(rank: int) -> tuple[int, ...]:
    """Axes of height, width and depth in the shape of one image of that rank."""
    first = keras.config.image_data_format() == "channels_first"
    return tuple(range(1, rank)) if first else tuple(range(rank - 1))


def _shape(shape: Sequence[int | None]) -> str:
    return "x".join("?" if size is None else str(size) for size in shape) or "one number"
