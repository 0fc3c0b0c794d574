"""All op rules. Importing this package fills the registry; add a new module here."""

from rewriters.rules import (
    contraction,
    convolution,
    data_movement,
    elementwise,
    pooling,
    reduction,
    reshape,
    resize,
    slicing,
)

__all__: list[str] = []

_ = (reshape, convolution, elementwise, contraction, pooling, reduction, resize, data_movement, slicing)
