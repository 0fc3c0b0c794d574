"""Networks of `_nets` in PyTorch, equal layer by layer: a sequence of blocks, and a head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks import _nets

RESNET50 = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
"""Filters, number of residual blocks, and stride of the first block, for each stage."""

EPSILON = 1.001e-5
"""Epsilon of the normalisation in Keras's ResNets."""


def vgg16() -> tuple[Any, Any]:
    """Build the convolutions and pools of VGG-16, with a block for each pool, and a head."""
    from torch import nn

    blocks, channels = [], 3
    for depth, filters in zip((2, 2, 3, 3, 3), (64, 128, 256, 512, 512), strict=True):
        layers: list[Any] = []
        for _ in range(depth):
            layers += [nn.Conv2d(channels, filters, 3, padding=1), nn.ReLU()]
            channels = filters
        blocks.append(nn.Sequential(*layers, nn.MaxPool2d(2)))
    return nn.Sequential(*blocks), _head(channels)


def resnet50() -> tuple[Any, Any]:
    """Build ResNet-50 of Keras: convolutions have biases, and the first one of a block has the stride."""
    from torch import nn

    class Residual(nn.Module):
        def __init__(self, channels: int, filters: int, stride: int, project: bool) -> None:
            super().__init__()
            wide = 4 * filters
            self.shortcut = nn.Sequential(*_normed(channels, wide, 1, stride)) if project else nn.Identity()
            self.body = nn.Sequential(
                *_normed(channels, filters, 1, stride),
                nn.ReLU(),
                *_normed(filters, filters, 3, 1),
                nn.ReLU(),
                *_normed(filters, wide, 1, 1),
            )

        def forward(self, x: Any) -> Any:
            return nn.functional.relu(self.shortcut(x) + self.body(x))

    blocks: list[Any] = [nn.Sequential(*_normed(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))]
    channels = 64
    for filters, depth, stride in RESNET50:
        for number in range(depth):
            blocks.append(Residual(channels, filters, stride if number == 0 else 1, number == 0))
            channels = 4 * filters
    return nn.Sequential(*blocks), _head(channels)


def _normed(channels: int, filters: int, size: int, stride: int) -> list[Any]:
    from torch import nn

    return [nn.Conv2d(channels, filters, size, stride, size // 2), nn.BatchNorm2d(filters, EPSILON, 0.01)]


def _head(channels: int) -> Any:
    from torch import nn

    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, _nets.CLASSES))


NETS: dict[str, Callable[[], tuple[Any, Any]]] = {"vgg16": vgg16, "resnet50": resnet50}
