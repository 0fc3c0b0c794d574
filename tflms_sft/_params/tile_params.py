"""What a user asks for, checked when it is written down."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any

from rewriters.tiling.tile_planner import Halo
from tflms_sft._machine.memory_info import free_device_memory
from tflms_sft._params.swap_params import SwapParams
from tflms_sft._params.tile_counts import parse_num_tiles
from tflms_sft._util.byte_sizes import parse_bytes

AUTO = "auto"
"""As a budget: what the device has free."""

PART_OF_FREE = 0.9
"""Of that, what `"auto"` takes."""


def _check_halo(value: Any) -> None:
    if not isinstance(value, str) or value not in {halo.value for halo in Halo}:
        raise ValueError(
            '`halo` must be "recompute", where each tile computes what it shares with its neighbours, or "carry", '
            f"where rows of full width hand it on. Received: halo={value!r}."
        )


def _names(value: Any, argument: str) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) and name for name in names):
        raise TypeError(
            f"`{argument}` must be the name of a layer, op or tensor, or a tuple of names. "
            f"Received: {argument}={value!r}."
        )
    return tuple(names)


@dataclasses.dataclass(frozen=True)
class SegmentSpec:
    """A part of the network to run tile by tile.

    Names are those that `Plan.summary` prints, and can be pasted from there.

    Args:
        entry: Name of the tensor that goes in (it is kept, not recomputed): a Keras layer, whose output
            it is, or an op, or a tensor. A tuple for several.
        exit: Name of the tensor that comes out, likewise.
        num_tiles: Number of tiles along the exit: `(height, width)`, of volumes `(depth, height, width)`, of
            sequences `(length,)`; with one more in front for the batch; or a mapping from axis names. `None` takes
            that of `SFTParams`.
        halo: `"recompute"` or `"carry"`. `None` takes that of `SFTParams`.
        backward_num_tiles: A number of its own for the backward loop. `None` takes that of `SFTParams`.
        stored: Names of tensors between entry and exit that are kept whole instead of recomputed, which costs
            their bytes and saves work. Defaults to `()`.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a wrong value. Names are looked up when a step is rewritten, which raises `SegmentError`.

    Example:
    >>> SegmentSpec("input_layer", "block3_pool", num_tiles=(4, 4))
    """

    entry: str | tuple[str, ...]
    exit: str | tuple[str, ...]
    num_tiles: Any = None
    halo: str | None = None
    backward_num_tiles: Any = None
    stored: str | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check everything that can be checked without a network."""
        _names(self.entry, "entry")
        _names(self.exit, "exit")
        if self.stored not in ((), []):
            _names(self.stored, "stored")
        for argument in ("num_tiles", "backward_num_tiles"):
            if getattr(self, argument) is not None:
                parse_num_tiles(getattr(self, argument), argument)
        if self.halo is not None:
            _check_halo(self.halo)

    @property
    def entries(self) -> tuple[str, ...]:
        """Entry names as a tuple."""
        return _names(self.entry, "entry")

    @property
    def exits(self) -> tuple[str, ...]:
        """Exit names as a tuple."""
        return _names(self.exit, "exit")

    @property
    def stored_names(self) -> tuple[str, ...]:
        """Names of stored tensors as a tuple."""
        return () if self.stored in ((), []) else _names(self.stored, "stored")


@dataclasses.dataclass(frozen=True)
class SFTParams:
    """Segmented fused-tiled execution (Xu et al., CC '22).

    Args:
        num_tiles: Number of tiles along the exit of each segment, split as evenly as possible, or with
            `halo="carry"` and no barriers so that their memory is even:
            `(height, width)`, of volumes `(depth, height, width)`, of sequences `(length,)`; with one more in
            front for the batch, as in `(batch, height, width)`; or a mapping such as
            `{"batch": 1, "height": 4, "width": 4}`. `"auto"`, the default, takes the fewest tiles whose turn needs no
            more memory than the segment's own entry and exit, or than `memory_capacity` if that is given.
        segments: `"auto"`, the default, or a list of `SegmentSpec`.
        memory_capacity: Bytes (or a string such as `"1GiB"`). With automatic segments: tensors larger than
            this must be tiled, and segments end at smaller ones (the paper's Listing 3). `None`, the default, makes
            segments as long as can be.
        halo: Where a tile has the rows from that its first operations share with the tile above. `"recompute"`, the
            default: it computes them again (full-width tiles are then LR-CNN's overlapping rows). `"carry"`: the tile
            above hands them on, so that only what costs next to nothing is computed for halos; tiles are rows of full
            width then (LR-CNN's two-phase sharing). What is handed on waits for the backward loop.
        backward_num_tiles: A number of tiles of its own for the backward loop. Defaults to `None`: the same.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a wrong value.
    """

    num_tiles: Any = "auto"
    segments: Any = "auto"
    memory_capacity: Any = None
    halo: str = "recompute"
    backward_num_tiles: Any = None

    def __post_init__(self) -> None:
        """Check everything that can be checked without a network."""
        parse_num_tiles(self.num_tiles, "num_tiles")
        if self.backward_num_tiles is not None:
            parse_num_tiles(self.backward_num_tiles, "backward_num_tiles")
        _check_halo(self.halo)
        if self.memory_capacity is not None:
            object.__setattr__(self, "memory_capacity", parse_bytes(self.memory_capacity, "memory_capacity"))
        if isinstance(self.segments, str):
            if self.segments != "auto":
                raise ValueError(f'`segments` must be "auto" or a list of `SegmentSpec`. Received: {self.segments!r}.')
            return
        if not isinstance(self.segments, (list, tuple)) or not all(isinstance(s, SegmentSpec) for s in self.segments):
            raise TypeError(f'`segments` must be "auto" or a list of `SegmentSpec`. Received: {self.segments!r}.')
        if not self.segments:
            raise ValueError('`segments` is empty: name at least one segment, or use "auto". Received: segments=[].')
        object.__setattr__(self, "segments", tuple(self.segments))


@dataclasses.dataclass(frozen=True)
class AutoParams:
    """A memory budget; how it is met is found out.

    Args:
        memory_budget: Most bytes that may be alive on the device at any moment of a step, weights and
            optimizer slots included: an int, or a string such as `"8GiB"`; or `"auto"`: 90 % of what the device has
            free when the step is planned, on a CPU of the machine's free memory. Defaults to `"auto"`.
        headroom: Part of the budget that the prediction leaves free, because the order in which ready ops run,
            and so the peak, varies from run to run. Defaults to 0.1.
        swap: Whether activations may be swapped to host memory or disk where tiles do not do, or would cost much:
            `True`, `False`, or `LMSParams` that say which, and where to. Defaults to `True`.

    Raises:
        TypeError: For a value of the wrong type.
        ValueError: For a wrong value.
    """

    memory_budget: Any = AUTO
    headroom: float = 0.1
    swap: bool | SwapParams = True

    def __post_init__(self) -> None:
        """Check and convert."""
        if not isinstance(self.swap, (bool, SwapParams)):
            raise TypeError(f"`swap` must be a bool or `LMSParams(...)`. Received: swap={self.swap!r}.")
        if self.memory_budget != AUTO:
            object.__setattr__(self, "memory_budget", parse_bytes(self.memory_budget, "memory_budget"))
        if isinstance(self.headroom, bool) or not isinstance(self.headroom, numbers.Real):
            raise TypeError(f"`headroom` must be a number from 0 to below 1. Received: headroom={self.headroom!r}.")
        object.__setattr__(self, "headroom", float(self.headroom))
        if not 0 <= self.headroom < 1:
            raise ValueError(f"`headroom` must be a number from 0 to below 1. Received: headroom={self.headroom!r}.")

    def resolved(self, fixed_bytes: int) -> AutoParams:
        """The same with a budget in bytes, which `"auto"` finds out.

        Args:
            fixed_bytes: Bytes of the step's variables, which are in memory already and part of the budget.

        Returns:
            Parameters whose `memory_budget` is an int.
        """
        if self.memory_budget != AUTO:
            return self
        return dataclasses.replace(self, memory_budget=int(PART_OF_FREE * (free_device_memory() + fixed_bytes)))
