"""Graphics cards to plan for, by the data sheets of their manufacturer: a plan needs no card in the machine."""

from __future__ import annotations

from rewriters.ir.device_model import Card

__all__: list[str] = []

GIB = 2**30

_PCIE_3, _PCIE_4, _PCIE_5 = 15.75e9, 31.5e9, 63e9
"""Bytes/s of 16 lanes in one direction."""

CARDS = {
    card.name: card
    for card in (
        Card(
            name="rtx2080ti",
            title="NVIDIA GeForce RTX 2080 Ti",
            compute_capability=7.5,
            memory_bytes=11 * GIB,
            memory_rate=616e9,
            host_rate=_PCIE_3,
            float32=13.4e12,
            float64=0.42e12,
        ),
        Card(
            name="rtx3090",
            title="NVIDIA GeForce RTX 3090",
            compute_capability=8.6,
            memory_bytes=24 * GIB,
            memory_rate=936e9,
            host_rate=_PCIE_4,
            float32=35.6e12,
            float64=0.556e12,
            tf32=35.6e12,
        ),
        Card(
            name="v100-16",
            title="NVIDIA Tesla V100 SXM2 16 GB",
            compute_capability=7.0,
            memory_bytes=16 * GIB,
            memory_rate=900e9,
            host_rate=_PCIE_3,
            float32=15.7e12,
            float64=7.8e12,
        ),
        Card(
            name="a100-40",
            title="NVIDIA A100 SXM4 40 GB",
            compute_capability=8.0,
            memory_bytes=40 * GIB,
            memory_rate=1555e9,
            host_rate=_PCIE_4,
            float32=19.5e12,
            float64=9.7e12,
            tf32=156e12,
        ),
        Card(
            name="h200",
            title="NVIDIA H200 SXM 141 GB",
            compute_capability=9.0,
            memory_bytes=140 * GIB,
            memory_rate=4800e9,
            host_rate=_PCIE_5,
            float32=67e12,
            float64=34e12,
            tf32=494e12,
        ),
    )
}
"""Cards by name."""


def nearest_card(compute_capability: float) -> Card:
    """Return the card of the nearest compute capability, if possible of the same generation, such as 8."""

    def distance(card: Card) -> tuple[int, float]:
        generations = int(card.compute_capability) - int(compute_capability)
        return abs(generations), abs(card.compute_capability - compute_capability)

    return min(CARDS.values(), key=distance)
