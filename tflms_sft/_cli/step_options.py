"""Traces the training step of a model for shapes alone: creates no batch and runs no step."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from rewriters.device.kernel_audit import MAX_SMALL_BYTES, audit_graph
from rewriters.errors import RewriteError
from rewriters.ir.device_detection import planned_device
from rewriters.ir.op_traits import Trait, ops_with
from tflms_sft._cli import model_loading
from tflms_sft._cli.exit_status import Progress, UsageError
from tflms_sft._cli.model_loading import shape_text
from tflms_sft._cli.parser import budget_options
from tflms_sft._keras.model_checks import check_model, reason_runs_eagerly
from tflms_sft._machine.calibration import machine_rates
from tflms_sft._params.request import parse_request
from tflms_sft._params.tile_params import AutoParams
from tflms_sft._planner.budget_search import least_memory
from tflms_sft._planner.curve_points import budgets_between, curve_points
from tflms_sft._report.budget_curve import CurvePoint
from tflms_sft._report.plan import Plan
from tflms_sft._rewrite.rewrite import rewrite_traced
from tflms_sft._search.traced_step import Candidate, TracedStep, analyse_step, collector_paused
from tflms_sft._trace.step_tracing import trace_step
from tflms_sft._util.byte_sizes import format_bytes
from tflms_sft._util.keras_internals import build_for_batch, origin_of
from tflms_sft._util.text import shortened

__all__: list[str] = []

_LOSSES = {
    "softmax": ("sparse_categorical_crossentropy", "its output is a softmax"),
    "sigmoid": ("binary_crossentropy", "its output is a sigmoid"),
}
_DEFAULT_LOSS = ("mean_squared_error", "its output is neither a softmax nor a sigmoid")

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Assumed:
    """Model, signature and device for which a step was traced.

    Attributes:
        model: Name of the model.
        num_weights: Number of elements of its weights.
        inputs: Name, shape and dtype of each input.
        targets: Shape and dtype of each target.
        optimizer: Class of the optimizer.
        loss: The loss and its origin, as text.
        device: Device whose memory is planned.
    """

    model: str
    num_weights: int
    inputs: list[tuple[str, list[int], str]]
    targets: list[tuple[list[int], str]]
    optimizer: str
    loss: str
    device: str

    def text(self) -> str:
        """Return a description in two lines."""
        images = ", ".join(f"{name} {shape_text(shape)} {dtype}" for name, shape, dtype in self.inputs)
        targets = ", ".join(f"{shape_text(shape)} {dtype}" for shape, dtype in self.targets)
        return (
            f"Model {self.model!r}: {self.num_weights:,} weights, {self.optimizer}, {self.loss}\n"
            f"Step traced for {images}; targets {targets}; on {self.device}"
        )


@dataclasses.dataclass
class PlannableStep:
    """A traced step that can be planned repeatedly, and the signature that it was traced for."""

    traced: TracedStep
    assumed: Assumed

    @functools.cached_property
    def plain_bytes(self) -> int:
        """Predicted peak of the plain step in bytes, by the measure of a budget."""
        return self.traced.plain.peak.peak_bytes

    def python_calls(self) -> list[str]:
        """Return the types of ops that call Python."""
        return sorted({node.op for node in self.traced.analysis.order} & ops_with(Trait.PYTHON_CALL))

    def without_gpu_kernel(self) -> list[str]:
        """Return the types of ops on larger tensors that have no GPU kernel; nothing for a build without kernels."""
        if not tf.test.is_built_with_cuda():
            return []
        graph, batch = self.traced.analysis.graph, self.traced.batch
        nodes = [graph.nodes[kernel.name] for kernel in audit_graph(graph).missing if kernel.name in graph.nodes]
        return sorted(
            {node.op for node in nodes if any(tensor.num_bytes(batch) > MAX_SMALL_BYTES for tensor in node.inputs)}
        )

    def plan(self, params: Any, progress: Progress, advise: bool = True) -> Plan:
        """Return the plan for this machine, whose rates are measured if they are unknown.

        Raises:
            RewriteError: If the step cannot be rewritten; `BudgetError` for a budget that no plan meets.
            UsageError: For parameters that do not fit the model.
        """
        try:
            self._use_rates(progress)
            with collector_paused():
                return rewrite_traced(self.traced, parse_request(params), advise)[1]
        except ValueError as error:  # For example tiles along axes that the images lack.
            raise UsageError(str(error)) from error

    def least_memory(self, params: AutoParams, progress: Progress) -> Candidate:
        """Return the plan that needs least memory, in less time than `plan` takes."""
        self._use_rates(progress)
        with collector_paused():
            return least_memory(self.traced, params)

    def curve(self, params: AutoParams, budgets: int | Sequence[int], progress: Progress) -> Iterator[CurvePoint]:
        """Yield the point of each budget, the smallest first; of a number of budgets, `budgets_between`."""
        self._use_rates(progress)
        with collector_paused():
            chosen = budgets_between(self.traced, params, budgets) if isinstance(budgets, int) else budgets
            yield from curve_points(self.traced, params, chosen)

    def _use_rates(self, progress: Progress) -> None:
        rates = machine_rates(lambda line: progress.say(line.removeprefix("tflms-sft: ")))
        self.traced = dataclasses.replace(self.traced, rates=rates)


def budget_params(options: argparse.Namespace) -> AutoParams:
    """Return the budget of a command line."""
    try:
        return AutoParams(options.budget, **budget_options(options))
    except (TypeError, ValueError) as error:
        raise UsageError(str(error).replace("`memory_budget`", "--budget")) from None


def check_output_files(paths: Mapping[str, str | None]) -> None:
    """Refuse unusable output files, by the option that names each, before planning, which may take minutes."""
    if paths.get("--plot") and importlib.util.find_spec("matplotlib") is None:
        raise UsageError('--plot needs matplotlib. Install it with: pip install "tflms-sft[plot]".')
    for option, path in paths.items():
        if path and not os.path.isdir(os.path.dirname(os.path.abspath(path))):
            raise UsageError(f"{option} must be a file in a directory that exists. Received: {path!r}.")


def load(options: argparse.Namespace) -> tuple[Any, str]:
    """Return the compiled model of a command line, and its loss with the reason for it, as text.

    Compiles a model that is not compiled, and recompiles a model for another optimizer or loss.

    Raises:
        UsageError: If there is no such model, it runs eagerly, or Keras does not know the optimizer or loss.
    """
    model = model_loading.load(options.model, dict(options.arg), options.imports)
    if getattr(model, "run_eagerly", False):
        raise UsageError(reason_runs_eagerly(model))
    return model, _compile(model, options)


def _compile(model: Any, options: argparse.Namespace) -> str:
    is_compiled = bool(model.compiled) and model.optimizer is not None
    if is_compiled and not options.optimizer and not options.loss:
        return "the model's own loss"
    loss, why = _fitting_loss(model) if not options.loss else (options.loss, "loss as given")
    try:
        keras.optimizers.get(options.optimizer or "adam")  # `compile` accepts unknown names and fails later.
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
    """Return a loss for each output by its activation, and the reason as text."""
    outputs = getattr(model, "outputs", None) or [None]
    losses = [_LOSSES.get(_activation(output), _DEFAULT_LOSS) for output in outputs]
    reasons = "; ".join(dict.fromkeys(reason for _, reason in losses))
    names = [name for name, _ in losses]
    return names[0] if len(names) == 1 else names, f"the model is not compiled: {reasons}"


def _activation(output: Any) -> str:
    layer, position = origin_of(output)
    while isinstance(layer, keras.Model) and getattr(layer, "outputs", None):  # A nested model.
        layer, position = origin_of(layer.outputs[position])
    if isinstance(layer, keras.layers.Softmax):
        return "softmax"
    return getattr(getattr(layer, "activation", None), "__name__", "")


def of_given_size(model: Any, shapes: Sequence[tuple[str | None, Shape]]) -> Any:
    """Return the model, rebuilt if it has one input of a fixed size and another size is given."""
    inputs = list(getattr(model, "inputs", None) or ())
    if len(inputs) != 1 or len(shapes) != 1 or shapes[0][0] not in (None, _name(inputs[0])):
        return model
    declared, shape = tuple(inputs[0].shape[1:]), shapes[0][1]
    changed = {axis for axis, pair in enumerate(zip(declared, shape, strict=False)) if pair[0] not in (None, pair[1])}
    if len(declared) != len(shape) or not changed or not changed <= set(model_loading.spatial_axes(len(declared))):
        return model
    return model_loading.resized(model, shape)


def input_specs(model: Any, shapes: Sequence[tuple[str | None, Shape]], batch: int | None) -> Any:
    """Return tensor specs of the images in the structure of the model's inputs.

    The name of a model's only input may be `None` in `shapes`. Without a batch size it is that of the model, or 1.

    Raises:
        UsageError: For sizes that are missing or contradict the model.
    """
    given = dict(shapes)
    if len(given) < len(shapes):
        raise UsageError("--input-shape must be given once per input. Name the inputs: --input-shape NAME=64,64,3.")
    inputs = list(getattr(model, "inputs", None) or ())
    if not inputs:
        return _undeclared(model, given, batch)
    names = [_name(tensor) for tensor in inputs]
    unknown = [name for name in given if name is not None and name not in names]
    if unknown or (None in given and len(inputs) > 1):
        raise UsageError(
            f"--input-shape must name one of the inputs of model {model.name!r}: {', '.join(names)}, such as "
            f"{names[0]}=64,64,3. Received: {', '.join(map(_option_text, shapes))}."
        )
    specs = [_input_spec(model, tensor, given.get(_name(tensor), given.get(None)), batch) for tensor in inputs]
    if isinstance(model, keras.Sequential):
        return specs[0]
    by_tensor = dict(zip(map(id, inputs), specs, strict=True))
    return keras.tree.map_structure(lambda tensor: by_tensor[id(tensor)], model.input)


def _option_text(named: tuple[str | None, Shape]) -> str:
    """Return a shape as the command line has it."""
    name, shape = named
    return (f"{name}=" if name else "") + ",".join(map(str, shape))


def _undeclared(model: Any, given: Mapping[str | None, Shape], batch: int | None) -> Any:
    """Return the spec for a subclassed model, which declares no inputs."""
    if set(given) != {None}:
        raise UsageError(
            f"Model {model.name!r} does not declare its input. Give one --input-shape without a name, such as 64,64,3."
        )
    return tf.TensorSpec((batch or 1, *given[None]), keras.config.floatx())


def _input_spec(model: Any, tensor: Any, shape: Shape | None, batch: int | None) -> Any:
    (batch_size, *sizes), subject = tuple(tensor.shape), f"Input {_name(tensor)!r} of model {model.name!r}"
    if batch is not None and batch_size not in (None, batch):
        raise UsageError(f"{subject} has a fixed batch size of {batch_size}. Received: --batch {batch}.")
    if shape is None:
        if None in sizes:
            raise UsageError(f"{subject} has free sizes: {shape_text(sizes)}. Give --input-shape, such as 512,512,3.")
        shape = tuple(sizes)
    if len(shape) != len(sizes) or any(size not in (None, s) for size, s in zip(sizes, shape, strict=True)):
        raise UsageError(
            f"{subject} is {shape_text(sizes)}. Received: --input-shape {','.join(map(str, shape))}. Give matching "
            "sizes, or build the model with free sizes, such as keras.Input((None, None, 3))."
        )
    return tf.TensorSpec((batch_size or batch or 1, *shape), tensor.dtype)


def trace(model: Any, why: str, images: Any, options: argparse.Namespace) -> PlannableStep:
    """Trace the training step of a compiled model for specs of images; `why` is the text of `load` about the loss.

    Raises:
        RewriteError: If the step cannot be rewritten, or computes no gradients.
        UsageError: If the model does not accept such images, or no target fits its loss.
    """
    outputs = _outputs(model, images)
    failures = []
    for targets in _targets(model, outputs, options):
        try:
            build_for_batch(model, (images, targets))  # `fit` does so, too; it saves a second trace.
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
    shown = ", ".join(f"{shape_text(spec.shape)} {spec.dtype.name}" for spec in keras.tree.flatten(targets))
    raise UsageError(
        f"The training step of model {model.name!r} cannot be traced for {_listed(images)} and targets of {shown}: "
        f"{type(error).__name__}: {str(error)[:700]} - For other targets give --target-shape and --target-dtype, or "
        "--loss."
    ) from error


def _outputs(model: Any, images: Any) -> Any:
    symbols = keras.tree.map_structure(lambda spec: keras.KerasTensor(spec.shape, spec.dtype.name), images)
    try:
        return model(symbols)
    except Exception as error:
        raise UsageError(
            f"Model {model.name!r} does not accept {_listed(images)}: {type(error).__name__}: {str(error)[:700]}"
        ) from error


def _targets(model: Any, outputs: Any, options: argparse.Namespace) -> list[Any]:
    """Return candidate targets in the structure of the outputs, the one that suits the loss first."""
    flat = keras.tree.flatten(outputs)
    if options.target_shape is not None or options.target_dtype:
        if len(flat) > 1:
            raise UsageError(
                f"--target-shape and --target-dtype need a model with one output. Received: model {model.name!r} with "
                f"{len(flat)} outputs."
            )
        shape = flat[0].shape[1:] if options.target_shape is None else options.target_shape
        return [_given_target((flat[0].shape[0], *shape), options.target_dtype or flat[0].dtype)]
    sparse = [_is_sparse(loss) for loss in _losses(model, outputs)]
    return [
        keras.tree.pack_sequence_as(outputs, [_target(*pair) for pair in zip(flat, candidate, strict=True)])
        for candidate in (sparse, [not is_sparse for is_sparse in sparse])
    ]


def _given_target(shape: Shape, dtype: str) -> Any:
    try:
        return tf.TensorSpec(shape, dtype)
    except TypeError:
        raise UsageError(f"--target-dtype must be a numeric dtype, such as int32. Received: {dtype!r}.") from None


def _target(output: Any, is_sparse: bool) -> Any:
    """Return the spec of class indices, or the spec of the output itself."""
    if is_sparse and len(output.shape) > 1:
        return tf.TensorSpec(output.shape[:-1], "int32")
    return tf.TensorSpec(output.shape, output.dtype)


def _losses(model: Any, outputs: Any) -> list[Any]:
    """Return the loss of each output."""
    flat = keras.tree.flatten(outputs)
    loss = model.loss
    if isinstance(loss, dict):
        names = list(outputs) if isinstance(outputs, dict) else list(getattr(model, "output_names", ()))
        return [loss.get(name) for name in (sorted(names) if isinstance(outputs, dict) else names)]
    if isinstance(loss, (list, tuple)) and len(loss) == len(flat):
        return list(loss)
    return [loss] * len(flat)


def _is_sparse(loss: Any) -> bool:
    """Return whether a loss takes class indices, judged by its name."""
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
        _device(),
    )


def _device() -> str:
    """Return the device whose memory is planned, as text."""
    device = planned_device()
    card = device.card
    if card is None:
        return device.name
    tf32 = card.tf32 and tf.config.experimental.tensor_float_32_execution_enabled()
    limit = format_bytes(card.memory_limit)
    return f"{card.title} by its data sheet, {'with' if tf32 else 'without'} TF32, {limit} for TensorFlow"


def _input_names(model: Any) -> list[str]:
    """Return the names of the inputs in the order of `keras.tree.flatten`."""
    inputs = list(getattr(model, "inputs", None) or ())
    if len(inputs) < 2:
        return [_name(tensor) for tensor in inputs] or ["input"]
    return [_name(tensor) for tensor in keras.tree.flatten(model.input)]


def _name(tensor: Any) -> str:
    """Return the name of an input's layer in `model.summary()`. The tensor itself may have a numbered name."""
    return (origin_of(tensor)[0] or tensor).name


def _listed(images: Any) -> str:
    return shortened([f"{shape_text(spec.shape)} {spec.dtype.name}" for spec in keras.tree.flatten(images)], 4)
