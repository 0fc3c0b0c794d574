"""Shapes of images in files where a reader leaves sizes unknown.

A batch of paths does not show the shape of its images. While a step is traced for a batch, each reader with unknown
sizes looks at the files that the batch names, and reads images of their shape. Later batches run the same step if
their images have this shape.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from rewriters.errors import RewriteError
from rewriters.ir.region_reads import source_of_keys
from tflms_sft._util.keras_internals import layers_of

__all__: list[str] = []

Shape = tuple[int, ...]


class Reader(Protocol):
    """A layer that reads images from files.

    Attributes:
        name: Name of the layer.
        image_shape: Shape of each image in its file; `None` for unknown sizes.
    """

    name: str
    image_shape: tuple[int | None, ...]

    def shape_in_files(self, keys: Any) -> Shape:
        """Return the shape of the images of a batch."""


class UnknownSizes:
    """Readers with unknown sizes in one step, and the arguments of the step that they get as keys."""

    def __init__(self) -> None:
        self._arguments: list[Any] = []
        self._readers: dict[tuple[int, int], Reader] = {}
        self._outer_graph: Any = None

    def set_arguments(self, arguments: Any) -> None:
        """Set the arguments of the present step, in the order of its signature: tensors, arrays, or specs of them."""
        leaves = tf.nest.flatten(arguments, expand_composites=True)
        # Images and labels are not held: they would stay in memory until the next batch.
        self._arguments = [leaf if _may_be_keys(leaf) else None for leaf in leaves if hasattr(leaf, "shape")]

    def shapes(self) -> list[Shape]:
        """Return the shapes of the images of the present batch, the batch size first, one for each reader so far."""
        shapes = []
        for (position, _), reader in self._readers.items():
            keys = self._arguments[position] if position < len(self._arguments) else None
            if keys is not None:
                shapes.append((len(keys), *reader.shape_in_files(keys)))
        return shapes

    def shape(self, reader: Reader, keys: Any) -> Shape:
        """Return the shape of the images with these paths or indices in the step that is traced now.

        Raises:
            RewriteError: If the keys are no argument of the step, or if only their spec is known.
            ImageReadError: If a file cannot be read.
        """
        source, begin = source_of_keys(keys), f"The sizes of the images that `{reader.name}` reads are unknown: "
        inputs: Sequence[Any] = keys.graph.inputs if keys.graph.outer_graph is self._outer_graph else ()
        position = next((number for number, tensor in enumerate(inputs) if tensor is source), None)
        remedy = f"Or give the reader all sizes instead of shape={reader.image_shape}."
        if position is None:
            raise RewriteError(
                f"{begin}its paths or indices are computed in the step, or in a function that the step calls. Pass "
                f"them as an argument of the step. {remedy}"
            )
        example = self._arguments[position] if position < len(self._arguments) else None
        if not hasattr(example, "__array__"):
            raise RewriteError(
                f"{begin}no files are known when the step is traced. Pass example paths or indices. `fit`, `evaluate` "
                f"and `predict` look at each batch, but not with `steps_per_execution`, replicas or stages. {remedy}"
            )
        self._readers[position, id(reader)] = reader
        return reader.shape_in_files(example)

    @contextlib.contextmanager
    def used_in_trace(self) -> Iterator[None]:
        """Let readers take the shapes of the present batch while a step is traced."""
        self._outer_graph = tf.compat.v1.get_default_graph()
        token = _OF_TRACED_STEP.set(self)
        try:
            yield
        finally:
            self._outer_graph = None
            _OF_TRACED_STEP.reset(token)


_OF_TRACED_STEP: contextvars.ContextVar[UnknownSizes | None] = contextvars.ContextVar("unknown_sizes", default=None)


def unknown_sizes_of_traced_step() -> UnknownSizes | None:
    """Return the unknown sizes of the step that is traced; `None` if the shapes of a batch are not looked up."""
    return _OF_TRACED_STEP.get()


def has_unknown_sizes(model: Any) -> bool:
    """Return whether a layer of a model reads images of unknown sizes."""
    return any(None in layer.image_shape for layer in layers_of(model) if hasattr(layer, "shape_in_files"))


def in_order_of_signature(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return arguments in the order in which a `tf.function` passes them to its graph.

    Raises:
        TypeError: If the arguments do not match the signature.
    """
    signature = inspect.signature(function.python_function)
    bound = signature.bind_partial(*args, **kwargs)  # None are passed to a function with an input signature.
    kinds = inspect.Parameter
    by_name: dict[str, Any] = {}
    ordered = []
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is kinds.VAR_KEYWORD:
            by_name |= value
        elif kind is kinds.KEYWORD_ONLY:
            by_name[name] = value
        else:
            ordered.append(value)
    return [*ordered, *(by_name[name] for name in sorted(by_name))]


def _may_be_keys(leaf: Any) -> bool:
    """Return whether an argument may be a vector of paths or indices."""
    dtype = tf.as_dtype(leaf.dtype)
    return len(leaf.shape) == 1 and (dtype == tf.string or dtype.is_integer)
