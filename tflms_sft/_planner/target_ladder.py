"""Targets that searches aim at: the same for all budgets, so that a larger one finds nothing slower."""

from __future__ import annotations

import math

RUNG = 1.03
"""A target over the one below."""


def rung(num_bytes: int) -> int:
    """The number of the target below some bytes; target `n` is `RUNG**n` bytes."""
    return int(math.log(max(num_bytes, 1), RUNG))
