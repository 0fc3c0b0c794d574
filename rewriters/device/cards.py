"""Graphics cards to plan for, by the data sheets of their manufacturer: a plan needs no card in the machine."""

from __future__ import annotations

from rewriters.ir.device_model import Card

__all__: list[str] = []

GIB = 2**30

_PCIE_3, _PCIE_4, _PCIE_5 = 15.75e9, 31.5e9, 63e9
"""Bytes/s of 16 lanes in one direction."""

_ROWS = (
    ("rtx2080ti", "NVIDIA GeForce RTX 2080 Ti", 7.5, 11, 616e9, _PCIE_3, 13.4e12, 0.42e12, 0.0),
    ("rtx3090", "NVIDIA GeForce RTX 3090", 8.6, 24, 936e9, _PCIE_4, 35.6e12, 0.556e12, 35.6e12),
    ("v100-16", "NVIDIA Tesla V100 SXM2 16 GB", 7.0, 16, 900e9, _PCIE_3, 15.7e12, 7.8e12, 0.0),
    ("a100-40", "NVIDIA A100 SXM4 40 GB", 8.0, 40, 1555e9, _PCIE_4, 19.5e12, 9.7e12, 156e12),
    ("h200", "NVIDIA H200 SXM 141 GB", 9.0, 140, 4800e9, _PCIE_5, 67e12, 34e12, 494e12),
)
"""Name, title, compute capability, GiB of memory, and rates: of the memory and of the host link in bytes/s, of float32,
float64 and TF32 in flop/s."""

CARDS = {
    name: Card(name, title, capability, memory_gib * GIB, *rates)
    for name, title, capability, memory_gib, *rates in _ROWS
}
"""Cards by name."""


def nearest_card(compute_capability: float) -> Card:
    """Return the card of the nearest compute capability, if possible of the same generation, such as 8."""

    def distance(card: Card) -> tuple[int, float]:
        generations = int(card.compute_capability) - int(compute_capability)
        return abs(generations), abs(card.compute_capability - compute_capability)

    return min(CARDS.values(), key=distance)
