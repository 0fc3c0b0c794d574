"""Shapes of images in files, where they differ from batch to batch.

A batch of paths does not show the shape of its images. While a step is traced for a batch, each reader of images of any
shape looks at the files that this batch names, and reads images of their shape. The next batches run the same step if
their images have this shape.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import tensorflow as tf

from rewriters.errors import RewriteError
from rewriters.ir.region_reads import source_of_keys

__all__: list[str] = []

Shape = tuple[int, ...]


class Reader(Protocol):
    """A layer that reads images from files."""

    name: str

    def shape_in_files(self, keys: Any) -> Shape:
        """Return the shape of the images of a batch."""


class BatchImages:
    """The readers of images of any shape in a step, and the part of a batch that each of them gets as its keys."""

    def __init__(self) -> None:
        self._batch: list[Any] = []
        self._readers: dict[tuple[int, int], Reader] = {}

    def use(self, batch: Any) -> list[Shape]:
        """Set the present batch; return the shapes of its images, the batch size first, one for each known reader.

        Args:
            batch: Arguments of the step in any structure: tensors, arrays, or specs of them.
        """
        self._batch = [leaf for leaf in tf.nest.flatten(batch, expand_composites=True) if hasattr(leaf, "shape")]
        return self.shapes()

    def shapes(self) -> list[Shape]:
        """Return the shapes of the images of the present batch, one for each known reader."""
        keys_of_readers = [(reader, self._batch[position]) for (position, _), reader in self._readers.items()]
        return [(len(keys), *reader.shape_in_files(keys)) for reader, keys in keys_of_readers]

    def shape(self, reader: Reader, keys: Any) -> Shape:
        """Return the shape of the images that a reader gets in the step that is traced now.

        Args:
            reader: The reader.
            keys: Its keys, a tensor of the graph.

        Raises:
            RewriteError: If the keys are no part of the batch, or if only their spec is known.
        """
        source = source_of_keys(keys)
        inputs: Sequence[Any] = getattr(keys.graph, "inputs", ())
        positions = [number for number, tensor in enumerate(inputs[: len(self._batch)]) if tensor is source]
        if not positions or not hasattr(self._batch[positions[0]], "__array__"):
            raise RewriteError(
                f"The shape of the images that `{reader.name}` reads is unknown when the step is planned. Give the "
                "`ImageReader` all sizes as `shape`, or pass paths or indices as example arguments of the step. Under "
                "`fit` without replicas and `steps_per_execution`, each shape has a plan of its own."
            )
        (position,) = positions
        self._readers[position, id(reader)] = reader
        return reader.shape_in_files(self._batch[position])


def has_open_readers(model: Any) -> bool:
    """Return whether a layer of a model reads images of any shape."""
    return any(None in layer.image_shape for layer in model._flatten_layers() if hasattr(layer, "shape_in_files"))


_TRACED: contextvars.ContextVar[BatchImages | None] = contextvars.ContextVar("batch_images", default=None)


@contextlib.contextmanager
def traced_for(images: BatchImages) -> Iterator[None]:
    """Let readers take the shapes of a batch while a step is traced."""
    token = _TRACED.set(images)
    try:
        yield
    finally:
        _TRACED.reset(token)


def traced_images() -> BatchImages | None:
    """Return the images that a step is traced for; `None` outside of `traced_for`."""
    return _TRACED.get()
