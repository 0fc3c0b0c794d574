"""Catalogue of all op rules. Importing it fills the registry; add new rule modules here."""

from rewriters.rules import (
    contraction,
    convolution,
    data_movement,
    elementwise,
    pooling,
    random_numbers,
    reduction,
    reshape,
    slicing,
)
from rewriters.rules.pixel_maps import bicubic, channels, mirror, patches, resize, subpixel

__all__: list[str] = []

_ = (
    reshape,
    convolution,
    elementwise,
    contraction,
    pooling,
    reduction,
    resize,
    data_movement,
    slicing,
    random_numbers,
    mirror,
    subpixel,
    bicubic,
    channels,
    patches,
)
