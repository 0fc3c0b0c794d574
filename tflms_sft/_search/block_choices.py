"""Choices for the blocks of a component.

A component of a network is a chain of blocks between bounds. The blocks between any two bounds run untiled, or form a
segment in tiles.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from rewriters.ir.graph import Tensor
from rewriters.tiling.tile_planner import Grid, Halo


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockChoice:
    """One way to run the blocks from one bound to another.

    Attributes:
        first: First position in the component.
        last: One past the last position.
        grid: Tiles of the only loop, or of the backward loop; `None` leaves the blocks untiled.
        forward_grid: Tiles of the forward loop, if they differ.
        halo: How tiles get the rows that they share.
        one_loop: Whether one loop runs the forward and the backward ops.
        checkpoints: Inner tensors that are saved, too, instead of being recomputed.
        saved_bytes: Bytes that stay for the backward pass.
        working_bytes: Bytes needed on top while the blocks run.
        seconds: Time (`rewriters/estimates/op_cost.py`).
    """

    first: int
    last: int
    grid: Grid | None = None
    forward_grid: Grid | None = None
    halo: Halo = Halo.RECOMPUTE
    one_loop: bool = False
    checkpoints: frozenset[Tensor] = frozenset()
    saved_bytes: int = 0
    working_bytes: int
    seconds: float


def select_cuts(
    extremes: Sequence[int],
    cuts: Iterable[int],
    stretch: Callable[[int], int],
    num_bytes: Mapping[int, int],
    count: int,
) -> list[int]:
    """Return up to `count` cuts of a component, in order.

    Local minima of the bytes at a cut come first, such as pools; then the smallest cut of each stretch.

    Args:
        extremes: Cuts among which neighbours are compared for local minima.
        cuts: All cuts; of equal ones in a stretch the first is taken.
        stretch: Maps a cut to the number of its stretch.
        num_bytes: Bytes at each cut.
        count: Maximum number of cuts.
    """
    around = [math.inf, *(num_bytes[cut] for cut in extremes), math.inf]
    minima = [cut for i, cut in enumerate(extremes) if around[i] >= num_bytes[cut] <= around[i + 2]]
    smallest: dict[int, int] = {}
    for cut in cuts:
        number = stretch(cut)
        smallest[number] = min(smallest.get(number, cut), cut, key=num_bytes.__getitem__)
    ranked = [cut for group in (minima, smallest.values()) for cut in sorted(group, key=num_bytes.__getitem__)]
    return sorted(list(dict.fromkeys(ranked))[:count])
