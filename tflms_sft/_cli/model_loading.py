"""Loads the Keras model that a command line names, and rebuilds it for images of another size."""

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
    """Return the model of a file, of `package.module:function` or of `path/to/file.py:function`.

    Raises:
        UsageError: If the file or function does not exist, or yields no Keras model.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for module_name in imports:
        _import(module_name, "--import")
    if os.path.exists(name):
        if name.endswith(".py"):
            raise UsageError(f"MODEL must name the function that builds the model: {name}:function.")
        if arguments:
            raise UsageError(f"--arg needs a function as MODEL. Received: the file {name!r}.")
        return _load_file(name)
    place, colon, function = name.rpartition(":")
    if not colon or not place or not function:
        raise UsageError(
            f"MODEL must be a .keras file that exists, or package.module:function. Received: {name!r}, which does not "
            "exist."
        )
    module = _import_file(place) if place.endswith(".py") else _import(place, "MODEL")
    model = _build(name, _member(module, function, place), arguments)
    if not isinstance(model, keras.Model):
        raise UsageError(
            f"MODEL must name a function that returns a `keras.Model`. {name!r} returned {_type_name(model)}."
            + (" Keras 2 (`tf_keras`) is not supported." if "tf_keras" in _type_name(model) else "")
        )
    return model


def _type_name(value: Any) -> str:
    return f"an object of type {type(value).__module__}.{type(value).__qualname__}"


def _load_file(path: str) -> Any:
    try:
        return keras.models.load_model(path)
    except Exception as error:
        raise UsageError(
            f"Keras cannot load {path!r} ({type(error).__name__}: {str(error)[:700]}). Register custom layers in a "
            "module and name it with --import, or give package.module:function, which builds the model."
        ) from error


def _import(name: str, argument: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}.")
        where = f" Searched {os.getcwd()} and the import path of {sys.executable}." if missing else ""
        raise UsageError(
            f"{argument} names the module {name!r}, which cannot be imported: {type(error).__name__}: {error}.{where}"
        ) from error


def _import_file(path: str) -> ModuleType:
    if not os.path.exists(path):
        raise UsageError(f"MODEL names the file {path!r}, which does not exist.")
    name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    sys.modules.setdefault(name, module)  # Pickles and dataclasses look a module up there.
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(
            f"MODEL names the file {path!r}, which cannot be imported: {type(error).__name__}: {error}."
        ) from error
    return module


def _member(module: ModuleType, function: str, place: str) -> Any:
    try:
        member = functools.reduce(getattr, function.split("."), module)
    except AttributeError:
        names = [name for name in dir(module) if not name.startswith("_") and callable(getattr(module, name))]
        hint = nearest(function, names) if names else "The module has no functions."
        raise UsageError(f"MODEL names {function!r} in {place!r}, which does not exist. {hint}") from None
    if not callable(member) and not isinstance(member, keras.Model):
        raise UsageError(
            f"MODEL must name a function. Received: {function!r} in {place!r}, which is {_type_name(member)}."
        )
    return member


def _build(name: str, function: Any, arguments: Mapping[str, Any]) -> Any:
    if isinstance(function, keras.Model):  # A model is callable, too.
        if arguments:
            raise UsageError(f"--arg needs a function as MODEL. Received: {name!r}, which is a model.")
        return function
    try:
        return function(**arguments)
    except Exception as error:
        shown = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise UsageError(f"{name}({shown}) raised {type(error).__name__}: {error}") from error


def resized(model: Any, shape: Sequence[int]) -> Any:
    """Return a clone of a model for images of another shape, with new weights, and compiled like the model.

    The model is a compiled functional or sequential one with one input of fixed size.

    Raises:
        UsageError: If its layers cannot be built for that size, or only with weights of other shapes.
    """
    image = keras.Input(tuple(shape), dtype=model.inputs[0].dtype, name=model.inputs[0].name)
    subject = f"Model {model.name!r} takes images of {shape_text(model.inputs[0].shape[1:])}"
    try:
        clone = keras.models.clone_model(model, input_tensors=image, clone_function=_clone_for_any_size)
    except Exception as error:
        raise UsageError(
            f"{subject}. Its layers cannot be built for {shape_text(shape)}: {type(error).__name__}: {error}. Build "
            "the model with free sizes, `keras.Input((None, None, channels))`, or ask for sizes that its strides "
            "divide, such as multiples of 32."
        ) from error
    for old, new in zip(model.weights, clone.weights, strict=True):
        if old.shape != new.shape:
            raise UsageError(
                f"{subject}. For {shape_text(shape)} the weight {old.path!r} would be {shape_text(new.shape)} instead "
                f"of {shape_text(old.shape)}, which makes another network. Replace `Flatten` before a dense layer by "
                "global pooling."
            )
    compile_as(clone, model)
    return clone


def _clone_for_any_size(layer: Any) -> Any:
    """Return a copy of a layer; the copy of a nested model accepts images of any size."""
    if not isinstance(layer, keras.Model) or len(getattr(layer, "inputs", None) or ()) != 1:
        return layer.__class__.from_config(layer.get_config())
    symbol = layer.inputs[0]
    if len(symbol.shape) < 3:
        return layer.__class__.from_config(layer.get_config())
    axes = spatial_axes(len(symbol.shape) - 1)
    shape = [None if axis in axes else size for axis, size in enumerate(symbol.shape[1:])]
    image = keras.Input(tuple(shape), dtype=symbol.dtype, name=symbol.name)
    clone = keras.models.clone_model(layer, input_tensors=image, clone_function=_clone_for_any_size)
    clone.trainable = layer.trainable
    return clone


def compile_as(clone: Any, model: Any, optimizer: Any = None, loss: Any = None) -> None:
    """Compile `clone` like `model`, with a copy of the optimizer, or with the given optimizer and loss."""
    if optimizer is None:
        optimizer = model.optimizer.__class__.from_config(model.optimizer.get_config())
    clone.compile(optimizer, model.loss if loss is None else loss, jit_compile=False)


def spatial_axes(rank: int) -> tuple[int, ...]:
    """Return the axes of height, width and depth in the shape of one image."""
    first = keras.config.image_data_format() == "channels_first"
    return tuple(range(1, rank)) if first else tuple(range(rank - 1))


def shape_text(shape: Sequence[int | None]) -> str:
    """Return a shape as text, such as `?x64x64x3`."""
    return "x".join("?" if size is None else str(size) for size in shape) or "scalar"
