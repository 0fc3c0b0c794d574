"""Rates of a graphics card that is not in this machine, from its data sheet."""

from __future__ import annotations

import math

import tensorflow as tf

from rewriters.estimates.op_cost import NOMINAL, MachineRates
from rewriters.ir.device_model import Card

__all__: list[str] = []

TENSOR_CORE_FRACTION, FLOAT32_FRACTION = 0.4, 0.6
"""Fractions of the data sheet's operations/s that convolutions reach with tensor cores, and without.

Those without were measured in float32 and are assumed for float64, whose tensor cores are not counted.
"""

MEMORY_FRACTION = 0.7
"""Fraction of the data sheet's bytes/s that kernels reach."""

HOST_FRACTION = 0.6
"""Fraction of the data sheet's bytes/s that copies to and from pinned host memory reach."""

CALL_SECONDS, HOST_CALL_SECONDS = 1.15e-5, 2.6e-6
"""Seconds in which TensorFlow starts a kernel, and in which it computes with a few integers, measured on a server with
an H200. Without a GPU the latter takes 1.1e-6 to 1.5e-6."""


def card_rates(card: Card) -> MachineRates:
    """Return the rates of a card, with tensor cores if it has them for float32 and TensorFlow may use them.

    The fractions are fitted to original steps on an H200 (docs/benchmarks/gpu.md): three of networks of images take 0.9
    to 1.1 times as long, one of a network of volumes 1.6 times.
    """
    flops = FLOAT32_FRACTION * card.float32
    if tf.config.experimental.tensor_float_32_execution_enabled():
        flops = max(flops, TENSOR_CORE_FRACTION * card.tf32)
    touched = MEMORY_FRACTION * card.memory_rate
    return MachineRates(
        flops={"": flops},
        float64_slowdown=flops / (FLOAT32_FRACTION * card.float64),
        touched={"": touched},
        weights=touched,
        first_touch=math.inf,
        call=CALL_SECONDS,
        host_call=HOST_CALL_SECONDS,
        copied=HOST_FRACTION * card.host_rate,
        overlapped=True,
        disk_write=NOMINAL.disk_write,
        disk_read=NOMINAL.disk_read,
    )
