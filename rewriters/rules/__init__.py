"""All op rules. Importing this package fills the registry; add a new module here."""

from rewriters.rules import blocks, convolution, elementwise, pixels, pooling, reductions, resizing, shaping, slices

__all__: list[str] = []

_ = (blocks, convolution, elementwise, pixels, pooling, reductions, resizing, shaping, slices)
