"""All op rules. Importing this package fills the registry; add a new module here."""

from rewriters.rules import convolution, elementwise, pooling, reductions, shaping

__all__: list[str] = []

_ = (convolution, elementwise, pooling, reductions, shaping)
