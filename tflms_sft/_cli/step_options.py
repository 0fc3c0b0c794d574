"""The training step of a model, traced for shapes alone: no batch is made and nothing runs."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from rewriters.device import properties
from rewriters.errors import RewriteError
from tflms_sft._cli import model_loading
from tflms_sft._cli.exit_status import Progress, UsageError
from tflms_sft._keras.model_checks import check_model
from tflms_sft._machine.calibration import machine_rates
from tflms_sft._params.request import parse_request
from tflms_sft._params.tile_params import AutoParams
from tflms_sft._planner.traced_step import TracedStep, analyse_step, collector_paused, predict
from tflms_sft._report.plan import Plan
from tflms_sft._rewrite.rewrite import rewrite_traced
from tflms_sft._trace.step_tracing import trace_step
from tflms_sft._util.text import shortened

__all__: list[str] = []

_LOSSES = {
    "softmax": ("sparse_categorical_crossentropy", "its output is a softmax"),
    "sigmoid": ("binary_crossentropy", "its output is a sigmoid"),
}
_OTHER = ("mean_squared_error", "its output is neither a softmax nor a sigmoid")

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Assumed:
    """What a step was traced for.

    Attributes:
        model: Name of the model.
        num_weights: Numbers in its weights.
        inputs: Name, shape and type of each input.
        targets: Shape and type of each target.
        optimizer: Its class.
        loss: In words, and where it comes from.
        device: Whose memory the plan is for.
    """

    model: str
    num_weights: int
    inputs: list[tuple[str, list[int], str]]
    targets: list[tuple[list[int], str]]
    optimizer: str
    loss: str
    device: str

    def text(self) -> str:
        """In two lines."""
        images = ", ".join(f"{name} {_shown(shape)} {dtype}" for name, shape, dtype in self.inputs)
        targets = ", ".join(f"{_shown(shape)} {dtype}" for shape, dtype in self.targets)
        return (
            f"Model {self.model!r}: {self.num_weights:,} weights, {self.optimizer}, {self.loss}\n"
            f"Step traced for {images}; targets {targets}; on {self.device}"
        )


@dataclasses.dataclass(frozen=True)
class PlannableStep:
    """A traced step, ready to be planned."""

    traced: TracedStep
    assumed: Assumed

    @functools.cached_property
    def plain_bytes(self) -> int:
        """Predicted peak of the step as it is, judged as a budget judges it."""
        return predict(self.traced, [])[0].peak_bytes

    def plan(self, params: Any, progress: Progress, advise: bool = True) -> Plan:
        """What would be done with it on this machine, whose rates are measured if they are not known.

        Args:
            params: What to do with it.
            progress: Is told what takes long.
            advise: As for `rewrite_traced`.

        Raises:
            RewriteError: If it cannot be done; `BudgetError` for a budget that no plan meets.
            UsageError: For parameters that do not go with the model.
        """
        try:
            self.traced.go_by(machine_rates(lambda line: progress.say(line.removeprefix("tflms-sft: "))))
            with collector_paused():
                return rewrite_traced(self.traced, parse_request(params), advise)[1]
        except ValueError as error:  # Such as tiles for axes that the images do not have.
            raise UsageError(str(error)) from error


def budget_params(options: argparse.Namespace) -> AutoParams:
    """The budget of a command line.

    Raises:
        UsageError: For one that is not understood.
    """
    headroom = {} if options.headroom is None else {"headroom": options.headroom}
    try:
        return AutoParams(options.budget, swap=not options.no_swap, **headroom)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error).replace("`memory_budget`", "--budget")) from None


def load(options: argparse.Namespace) -> tuple[Any, str]:
    """The model of a command line, compiled, and what was taken for its loss, and why.

    A model that is not compiled is compiled here, and so is one for which the command line asks for another optimizer
    or loss.

    Args:
        options: `optimizer` and `loss` may be `None`.

    Raises:
        UsageError: If no model comes of it, or for names that Keras does not know.
    """
    model = model_loading.load(options.model, dict(options.arg), options.imports)
    return model, _compiled(model, options)


def _compiled(model: Any, options: argparse.Namespace) -> str:
    is_compiled = bool(model.compiled) and model.optimizer is not None
    if is_compiled and not options.optimizer and not options.loss:
        return "the model's own loss"
    loss, why = _fitting_loss(model) if not options.loss else (options.loss, "loss as given")
    try:
        keras.optimizers.get(options.optimizer or "adam")  # What is not known would be told later, and less clearly.
        keras.losses.get(options.loss)
        if is_compiled:
            loss, why = (options.loss, why) if options.loss else (None, "the model's own loss")
            model_loading.compile_as(model, model, options.optimizer, loss)
        else:
            model.compile(options.optimizer or "adam", loss, jit_compile=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"The model cannot be compiled with --optimizer and --loss: {error}") from error
    return why if not loss else f"{loss if isinstance(loss, str) else ', '.join(loss)} ({why})"


def _fitting_loss(model: Any) -> tuple[Any, str]:
    """A loss for each output, by its activation, and why."""
    outputs = getattr(model, "outputs", None) or [None]
    found = [_LOSSES.get(_activation(output), _OTHER) for output in outputs]
    reasons = "; ".join(dict.fromkeys(why for _, why in found))
    why = f"the model is not compiled: {reasons}"
    if len(found) == 1:
        return found[0][0], why
    names = [loss for loss, _ in found]
    return names, why


def _activation(output: Any) -> str:
    history: Any = getattr(output, "_keras_history", None)
    layer = getattr(history, "operation", None)
    while isinstance(layer, keras.Model) and getattr(layer, "outputs", None):  # A model inside of the model.
        history = layer.outputs[history.tensor_index]._keras_history
        layer = history.operation
    if isinstance(layer, keras.layers.Softmax):
        return "softmax"
    return getattr(getattr(layer, "activation", None), "__name__", "")


def of_given_size(model: Any, shapes: Sequence[tuple[str | None, Shape]]) -> Any:
    """The model, built again if it has one input of a fixed size and another size is given.

    Raises:
        UsageError: If it cannot be built for that size.
    """
    inputs = list(getattr(model, "inputs", None) or ())
    if len(inputs) != 1 or len(shapes) != 1 or shapes[0][0] not in (None, _name(inputs[0])):
        return model
    own, shape = tuple(inputs[0].shape[1:]), shapes[0][1]
    other = [axis for axis, pair in enumerate(zip(own, shape, strict=False)) if pair[0] not in (None, pair[1])]
    if len(own) != len(shape) or not other or not set(other) <= set(model_loading.spatial_axes(len(own))):
        return model
    return model_loading.resized(model, shape)


def input_specs(model: Any, shapes: Sequence[tuple[str | None, Shape]], batch: int | None) -> Any:
    """What a step takes for images, in the structure of the model's inputs.

    Args:
        model: Any model.
        shapes: (name of an input, shape of one example) as given; the name may be left out if there is one input.
        batch: Examples; `None` for the model's own, or 1.

    Raises:
        UsageError: For sizes that are missing, or other ones than the model's.
    """
    given = _by_name(shapes)
    inputs = list(getattr(model, "inputs", None) or ())
    if not inputs:
        return _undeclared(model, given, batch)
    names = [_name(tensor) for tensor in inputs]
    unknown = [name for name in given if name is not None and name not in names]
    if unknown or (None in given and len(inputs) > 1):
        raise UsageError(
            f"--input-shape has to name one of the inputs of model {model.name!r}: {', '.join(names)}, such as "
            f"{names[0]}=64,64,3. Received: {', '.join(str(name) for name in given)}."
        )
    specs = [_input_spec(model, tensor, given.get(_name(tensor), given.get(None)), batch) for tensor in inputs]
    if isinstance(model, keras.Sequential):
        return specs[0]
    by_tensor = dict(zip(map(id, inputs), specs, strict=True))
    return keras.tree.map_structure(lambda tensor: by_tensor[id(tensor)], model.input)


def _by_name(shapes: Sequence[tuple[str | None, Shape]]) -> Mapping[str | None, Shape]:
    given = dict(shapes)
    if len(given) < len(shapes):
        raise UsageError("--input-shape is given twice for the same input; name inputs: --input-shape NAME=64,64,3.")
    return given


def _undeclared(model: Any, given: Mapping[str | None, Shape], batch: int | None) -> Any:
    """For a model that is a Python program, and does not tell what it takes."""
    if set(given) != {None}:
        raise UsageError(
            f"Model {model.name!r} does not tell its input; give one --input-shape without a name, such as 64,64,3."
        )
    return tf.TensorSpec((batch or 1, *given[None]), keras.config.floatx())


def _input_spec(model: Any, tensor: Any, shape: Shape | None, batch: int | None) -> Any:
    own, what = tuple(tensor.shape), f"Input {_name(tensor)!r} of model {model.name!r}"
    if batch is not None and own[0] not in (None, batch):
        raise UsageError(f"{what} is made for batches of {own[0]}. Received: --batch {batch}.")
    if shape is None:
        if None in own[1:]:
            raise UsageError(
                f"{what} leaves sizes open: {_shown(own[1:])}. Give them as --input-shape, such as 512,512,3."
            )
        shape = own[1:]
    if len(shape) != len(own) - 1 or any(o not in (None, s) for o, s in zip(own[1:], shape, strict=True)):
        raise UsageError(
            f"{what} is {_shown(own[1:])}. Received: --input-shape {','.join(map(str, shape))}. Give sizes that match, "
            "or the model an input of free ones, such as keras.Input((None, None, 3))."
        )
    return tf.TensorSpec((own[0] or batch or 1, *shape), tensor.dtype)


def trace(model: Any, why: str, images: Any, options: argparse.Namespace) -> PlannableStep:
    """The training step of a model for one batch.

    Args:
        model: Compiled.
        why: What `load` said of its loss.
        images: What `input_specs` returned.
        options: `target_shape` and `target_dtype` may be `None`.

    Raises:
        RewriteError: If its step cannot be rewritten, or computes no gradients.
        UsageError: If the model does not take such images, or no target fits its loss.
    """
    outputs = _outputs(model, images)
    failures = []
    for targets in _targets(model, outputs, options):
        try:
            model._symbolic_build(data_batch=(images, targets))  # As `fit` does, so that one trace is enough.
            check_model(model)
            step = tf.function(lambda x, y: model.train_step((x, y)), autograph=False)
            concrete_fn, record = trace_step(step, (images, targets), {})
        except RewriteError:
            raise
        except Exception as failure:
            failures.append((targets, failure))
            continue
        flat = keras.tree.flatten(images)
        traced = analyse_step(concrete_fn, record, flat[0].shape[0])
        return PlannableStep(traced, _assumed(model, images, targets, why))
    targets, error = failures[0]
    shown = ", ".join(f"{_shown(spec.shape)} {spec.dtype.name}" for spec in keras.tree.flatten(targets))
    raise UsageError(
        f"The training step of model {model.name!r} cannot be traced for {_listed(images)} and targets of {shown}: "
        f"{type(error).__name__}: {str(error)[:700]} - If the targets are others, give --target-shape and "
        "--target-dtype, or --loss."
    ) from error


def _outputs(model: Any, images: Any) -> Any:
    symbols = keras.tree.map_structure(lambda spec: keras.KerasTensor(spec.shape, spec.dtype.name), images)
    try:
        return model(symbols)
    except Exception as error:
        raise UsageError(
            f"Model {model.name!r} does not take {_listed(images)}: {type(error).__name__}: {str(error)[:700]}"
        ) from error


def _targets(model: Any, outputs: Any, options: argparse.Namespace) -> list[Any]:
    """Targets to try, in the structure of the outputs: what the loss seems to want first."""
    flat = keras.tree.flatten(outputs)
    if options.target_shape is not None or options.target_dtype:
        if len(flat) > 1:
            raise UsageError(f"--target-shape and --target-dtype are for one output; model {model.name!r} has several.")
        shape = flat[0].shape[1:] if options.target_shape is None else options.target_shape
        return [_given_target((flat[0].shape[0], *shape), options.target_dtype or flat[0].dtype)]
    kinds = [_wants_classes(loss) for loss in _losses(model, outputs)]
    choices = (kinds, [not kind for kind in kinds])
    return [
        keras.tree.pack_sequence_as(outputs, [_target(*pair) for pair in zip(flat, choice, strict=True)])
        for choice in choices
    ]


def _given_target(shape: Shape, dtype: str) -> Any:
    try:
        return tf.TensorSpec(shape, dtype)
    except TypeError:
        raise UsageError(f"--target-dtype must be a type of numbers, such as int32. Received: {dtype!r}.") from None


def _target(output: Any, classes: bool) -> Any:
    """Numbers of classes, or what an output is itself."""
    if classes and len(output.shape) > 1:
        return tf.TensorSpec(output.shape[:-1], "int32")
    return tf.TensorSpec(output.shape, output.dtype)


def _losses(model: Any, outputs: Any) -> list[Any]:
    """The loss of each output."""
    flat = keras.tree.flatten(outputs)
    loss = model.loss
    if isinstance(loss, dict):
        names = list(outputs) if isinstance(outputs, dict) else list(getattr(model, "output_names", ()))
        return [loss.get(name) for name in (sorted(names) if isinstance(outputs, dict) else names)]
    if isinstance(loss, (list, tuple)) and len(loss) == len(flat):
        return list(loss)
    return [loss] * len(flat)


def _wants_classes(loss: Any) -> bool:
    names = (loss, getattr(loss, "name", ""), getattr(loss, "__name__", ""), type(loss).__name__)
    return any("sparse" in name.lower() for name in names if isinstance(name, str))


def _assumed(model: Any, images: Any, targets: Any, why: str) -> Assumed:
    return Assumed(
        model.name,
        int(model.count_params()),
        [
            (name, list(spec.shape), spec.dtype.name)
            for name, spec in zip(_input_names(model), keras.tree.flatten(images), strict=True)
        ],
        [(list(spec.shape), spec.dtype.name) for spec in keras.tree.flatten(targets)],
        type(model.optimizer).__name__,
        why,
        properties.name(),
    )


def _input_names(model: Any) -> list[str]:
    """As `keras.tree.flatten` has them."""
    inputs = list(getattr(model, "inputs", None) or ())
    if len(inputs) < 2:
        return [_name(tensor) for tensor in inputs] or ["input"]
    return [_name(tensor) for tensor in keras.tree.flatten(model.input)]


def _name(tensor: Any) -> str:
    """Of an input, as its layer is called in `model.summary()`; the tensor may have been numbered instead."""
    return getattr(getattr(tensor, "_keras_history", None), "operation", tensor).name


def _listed(images: Any) -> str:
    return shortened([f"{_shown(spec.shape)} {spec.dtype.name}" for spec in keras.tree.flatten(images)], 4)


def _shown(shape: Sequence[int | None]) -> str:
    return "x".join("?" if size is None else str(size) for size in shape) or "scalar"
