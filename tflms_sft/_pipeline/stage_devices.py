"""Placement of a model's variables on the devices of their stages.

A variable stays on the device on which it was created, and Keras creates all variables on one device. An optimizer
creates its slots on the device of the weight, so that only the weights have to be moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from rewriters.canonicalize.canonicalize import CanonicalMode
from rewriters.pipelining.stage_assignment import Stages, assign_stages
from tflms_sft._params import device_names
from tflms_sft._params.pipeline_params import PipelineParams
from tflms_sft._pipeline import device_selection
from tflms_sft._pipeline.stage_cuts import cut_names, requested_cuts
from tflms_sft._search.traced_step import TracedStep, analyse_step
from tflms_sft._trace.layer_names import captured
from tflms_sft._trace.step_tracing import trace_step
from tflms_sft._util.keras_internals import forget_functions, replace_value

_BATCH = 2
"""Batch size for which a model with an open batch is traced; the stage of a layer does not depend on it."""


def stage_devices(
    model: Any,
    cuts: str | int | Sequence[str] = "auto",
    devices: Sequence[str] | None = None,
    *,
    inputs: Any = None,
) -> tuple[str, ...]:
    """Move the variables of a Keras model to the devices of their stages, with their values.

    Call it before the optimizer is built, because the optimizer creates its slots on the devices of the weights. Keras
    traces `fit`, `evaluate` and `predict` again afterwards. A `tf.function` of yours that was called before still uses
    the old variables: define it again.

    Args:
        model (keras.Model): A built model.
        cuts: Names of layers that stages end with, or a number of stages, as `stages` of `PipelineParams`. `"auto"`:
            as many stages as devices.
        devices: Names of devices, one per stage; with data replicas those of the first one, which holds the weights.
            `None`: the GPUs in order, or the logical CPUs on a machine without GPUs.
        inputs: Inputs of the model, or `tf.TensorSpec`s of them. `None`: the inputs that a functional model declares;
            other models need the argument.

    Returns:
        Names of the cuts, for `PipelineParams(stages=...)`; empty for one stage.

    Raises:
        PipelineError: If the model cannot be cut there.
        TypeError: If `model` is not a Keras model, or declares no inputs and `inputs` is missing.
        ValueError: For wrong devices, and if the model is not built or its optimizer is.

    Examples:
        >>> cuts = tflms_sft.stage_devices(model, ["block1_pool", "block3_pool"], ["GPU:0", "GPU:1", "GPU:2"])
        >>> model.compile("adam", "mse")
    """
    params = PipelineParams(cuts, devices=devices)
    _check_model(model)
    traced = _probe(model, _specs(model, inputs))
    chosen = requested_cuts(traced, params)
    stages = assign_stages(traced.analysis, chosen)
    places = device_selection.select_devices(params, stages.count)
    moved = [_move(variable, places[stage]) for variable, stage in _stage_of_variables(model, traced, stages)]
    if any(moved):
        forget_functions(model)  # They hold the old variables.
    return cut_names(traced, chosen)


def _check_model(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(f"`model` must be a Keras model. Received: model={model!r} of type {type(model).__name__}.")
    if not model.built:
        raise ValueError("`model` must be built, because it has no variables yet. Call it once, or `model.build(...)`.")
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and getattr(optimizer, "built", False):
        raise ValueError(
            "The optimizer of `model` is built, so its slots would stay on the previous device. Call `stage_devices` "
            "before training, and compile the model again afterwards."
        )


def _specs(model: Any, inputs: Any) -> Any:
    if inputs is not None:
        return tf.nest.map_structure(lambda value: tf.TensorSpec(value.shape, value.dtype), inputs)
    if not getattr(model, "inputs", None):
        raise TypeError(
            f"`model` must declare its inputs, or `inputs` must be given. Received: model={model!r}. Pass example "
            "`inputs`, or `tf.TensorSpec`s of them."
        )
    specs = [tf.TensorSpec((t.shape[0] or _BATCH, *t.shape[1:]), t.dtype) for t in model.inputs]
    # Before a `Sequential` is called it knows its `inputs`, and no `input`.
    return specs[0] if isinstance(model, keras.Sequential) else tf.nest.pack_sequence_as(model.input, specs)


def _probe(model: Any, specs: Any) -> TracedStep:
    """Return a step of the model with a placeholder loss, which leaves layers and saved tensors as they are."""

    def step(data: Any) -> Any:
        with tf.GradientTape() as tape:
            results = tf.nest.flatten(model(data, training=True))
            loss = tf.add_n([tf.reduce_sum(tf.square(tf.cast(result, tf.float32))) for result in results])
        return [g for g in tape.gradient(loss, model.trainable_variables) if g is not None]

    concrete_fn, record = trace_step(tf.function(step, autograph=False), (specs,), {})
    return analyse_step(concrete_fn, record, None, CanonicalMode.BATCH_ANALYSIS, merge_constants=False)


def _stage_of_variables(model: Any, traced: TracedStep, stages: Stages) -> list[tuple[Any, int]]:
    captures = captured(traced.concrete_fn, traced.analysis.graph)
    stage_of = {id(tensor): stages.owner[handle] for handle, tensor in captures if handle in stages.owner}
    pairs = ((variable, stage_of.get(id(variable.value.handle))) for variable in model.variables)
    return [(variable, stage) for variable, stage in pairs if stage is not None]


def _move(variable: Any, device: str) -> bool:
    """Replace the TensorFlow variable of a Keras variable; return whether it was on another device."""
    old = variable.value
    if device_names.is_same_device(old.device, device):
        return False
    with tf.device(device):
        new = tf.Variable(
            tf.identity(old.read_value()),
            trainable=old.trainable,
            name=old.name.split(":")[0],
            dtype=old.dtype,
            aggregation=old.aggregation,
            synchronization=old.synchronization,
        )
    replace_value(variable, new)
    return True
