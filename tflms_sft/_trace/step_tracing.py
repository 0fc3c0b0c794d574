"""Traces a step for one signature, and refuses signatures that cannot be rewritten."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from rewriters.errors import RewriteError
from rewriters.ir import tf_internals
from tflms_sft._sources.open_shapes import UnknownSizes, in_order_of_signature
from tflms_sft._trace.layer_names import LayerRecord, recorded_layers


def is_concrete(step: Any) -> bool:
    """Tell whether `step` is a `ConcreteFunction`."""
    return hasattr(step, "structured_input_signature") and hasattr(step, "captured_inputs")


def spec_of(value: Any) -> Any:
    """Return the `TensorSpec` of a tensor, array or variable; any other value unchanged.

    Raises:
        RewriteError: If the value is a ragged, sparse or other composite tensor.
    """
    composite = isinstance(value, (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices))
    if composite or (isinstance(value, tf.TypeSpec) and not isinstance(value, tf.TensorSpec)):
        raise RewriteError(
            f"Arguments of a rewritten step must be dense tensors. Received: a {type(value).__name__}. Pass its "
            "components as arguments and assemble them inside the step."
        )
    if isinstance(value, tf.TypeSpec) or value is None:
        return value
    if tf.is_tensor(value) or hasattr(value, "__array_interface__") or isinstance(value, tf.Variable):
        return tf.TensorSpec(value.shape, value.dtype)
    return value


def reason_without_graph() -> str:
    """Return why functions have no graph: a setting of TensorFlow runs them eagerly. Empty if they have one."""
    if not tf.config.functions_run_eagerly():
        return ""
    return (
        "`tf.config.run_functions_eagerly(True)` is on, so there is no graph to rewrite. "
        "Call `tf.config.run_functions_eagerly(False)`."
    )


def keras_function(step: Callable[[Any], Any]) -> Any:
    """Return the `tf.function` of a step of a Keras model, which may create variables when it is first traced.

    They are created eagerly. TensorFlow would create them inside the graph and lift their initial values out of it,
    which fails where an assertion of the step precedes them.
    """

    def run(data: Any) -> Any:
        with tf.variable_creator_scope(_create_eagerly):
            return step(data)

    return tf.function(run, autograph=False)


def _create_eagerly(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
    if not callable(kwargs.get("initial_value")):  # A tensor of the graph, which only TensorFlow can lift.
        return next_creator(**kwargs)
    return tf_internals.eager_variable(**kwargs)


def arguments_of(concrete_fn: Any) -> list[Any]:
    """Return the symbolic arguments of a traced function, without those that it captures."""
    return list(concrete_fn.inputs[: len(concrete_fn.inputs) - len(concrete_fn.captured_inputs)])


def check_image_sizes(concrete_fn: Any) -> None:
    """Refuse images of unknown height or width, because tiles need static sizes.

    Raises:
        RewriteError: With the argument and the remedy.
    """
    for tensor in arguments_of(concrete_fn):
        shape = tensor.shape
        if shape.rank in (4, 5) and None in shape.as_list()[1:-1]:
            raise RewriteError(
                f"The image size of argument `{tensor.name}` is unknown: {shape}. Tiles are planned for known sizes. "
                "Trace with a `tf.TensorSpec` that gives height and width; under `fit`, pass `batch_shape=`."
            )


def trace_step(
    step: Any, example_args: Any, example_kwargs: Any, image_args: Sequence[Any] | None = None
) -> tuple[Any, LayerRecord]:
    """Trace a step for one signature; return its `ConcreteFunction` and the Keras layers called meanwhile.

    Args:
        step: A `tf.function` or a `ConcreteFunction`.
        example_args: Arguments or specs of them; none for a `ConcreteFunction`. Readers of unknown sizes need
            arguments that name images.
        example_kwargs: Keyword arguments, likewise.
        image_args: Arguments that name images where `example_args` are specs; `None` for `example_args`.

    Raises:
        RewriteError: If an argument is not a dense tensor, or its image size is unknown.
        TypeError: If `step` cannot be traced, or a `ConcreteFunction` comes with arguments.
    """
    reason = reason_without_graph()
    if reason:
        raise RewriteError(reason)
    record = LayerRecord()
    if is_concrete(step):
        if example_args or example_kwargs:
            raise TypeError("`step` is a `ConcreteFunction`, for which example arguments have no effect. Omit them.")
        concrete_fn = step
        tf.nest.map_structure(spec_of, step.structured_input_signature)
    elif hasattr(step, "get_concrete_function"):
        args, kwargs = tf.nest.map_structure(spec_of, (example_args, example_kwargs))
        unknown_sizes = UnknownSizes()
        named = example_args if image_args is None else image_args
        unknown_sizes.set_arguments(in_order_of_signature(step, named, example_kwargs))
        with recorded_layers() as record, unknown_sizes.used_in_trace():
            concrete_fn = tf_internals.untraced(step).get_concrete_function(*args, **kwargs)
        record.finish(concrete_fn.graph)
    else:
        raise TypeError(
            "`step` must be a `tf.function` or a `ConcreteFunction`. "
            f"Received: step={step!r} of type {type(step).__name__}. Wrap it: `tf.function(step)`."
        )
    check_image_sizes(concrete_fn)
    return concrete_fn, record


def trace_keras_step(method: Any, specs: Any, unknown_sizes: UnknownSizes) -> tuple[Any, LayerRecord]:
    """Trace a step of a Keras model for the specs of a batch; return it and the layers called meanwhile.

    Raises:
        RewriteError: If the size of an image is unknown.
    """
    with recorded_layers() as record, unknown_sizes.used_in_trace():
        traced = keras_function(method).get_concrete_function(specs)
    record.finish(traced.graph)
    check_image_sizes(traced)
    return traced, record


def batch_of(example_args: Any) -> int | None:
    """Return the leading size of the argument with the most axes, so of images rather than labels; `None` if open."""
    shapes = [tf.TensorShape(getattr(value, "shape", None)) for value in tf.nest.flatten(example_args)]
    known = [shape for shape in shapes if shape.rank and shape[0] is not None]
    return int(max(known, key=lambda shape: shape.rank)[0]) if known else None


def leading_sizes(example_args: Any) -> dict[int, int]:
    """Return the known leading sizes of positional arguments, by the position of the argument of the traced step."""
    leaves = [leaf for leaf in tf.nest.flatten(example_args) if hasattr(leaf, "shape")]
    shapes = enumerate(tf.TensorShape(leaf.shape) for leaf in leaves)
    return {position: shape[0] for position, shape in shapes if shape.rank and shape[0] is not None}
