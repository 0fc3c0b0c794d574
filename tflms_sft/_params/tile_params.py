"""`SegmentSpec`, `SFTParams` and `AutoParams`: tiles or a budget, checked at construction."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import numbers
import os
from collections.abc import Mapping, Sequence
from typing import Any

from rewriters.tiling.tile_planner import Halo
from tflms_sft._machine.memory_info import device_memory_limit, device_names, free_device_memory
from tflms_sft._params.swap_params import SwapParams
from tflms_sft._params.tile_counts import parse_num_tiles
from tflms_sft._util.byte_sizes import format_bytes, parse_bytes

AUTO = "auto"
"""Value of `memory_budget` for a fraction of the free memory."""

AUTO_BUDGET_FRACTION = 0.9
"""Fraction of the free memory that the budget `"auto"` is."""


def _check_halo(value: Any) -> None:
    if not isinstance(value, str) or value not in {halo.value for halo in Halo}:
        raise ValueError(
            '`halo` must be "recompute", which computes halo rows in each tile, or "carry", which carries them from '
            f"strip to strip. Received: halo={value!r}."
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
    """A segment: a connected part of the network that runs as one loop over tiles.

    Use the names that `Plan.summary` prints. A name is a Keras layer, which stands for its output, an op, or a tensor.

    Args:
        entry: Name of the tensor that the segment reads, which is saved rather than recomputed; a tuple for several.
        exit: Name of the tensor that the segment computes; a tuple for several.
        num_tiles: Number of tiles along each axis of the exit, in the forms of `SFTParams`. `None`: that of
            `SFTParams`.
        halo: `"recompute"` or `"carry"`. `None`: that of `SFTParams`.
        backward_num_tiles: Number of tiles of the backward loop. `None`: that of `SFTParams`.
        stored: Names of tensors between entry and exit that are checkpointed: saved instead of recomputed, for more
            memory and less work.

    Attributes:
        entries: `entry` as a tuple.
        exits: `exit` as a tuple.
        stored_names: `stored` as a tuple.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range. Names are resolved in `rewrite`, which raises `SegmentError`.

    Examples:
        >>> spec = tflms_sft.SegmentSpec("input_layer", "block3_pool", num_tiles=(4, 4))
        >>> params = tflms_sft.SFTParams(segments=[spec])
    """

    entry: str | tuple[str, ...]
    exit: str | tuple[str, ...]
    num_tiles: str | Sequence[int] | Mapping[str, int] | None = None
    halo: str | None = None
    backward_num_tiles: str | Sequence[int] | Mapping[str, int] | None = None
    stored: str | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check every argument as far as possible without a graph."""
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
        """Names of the entries."""
        return _names(self.entry, "entry")

    @property
    def exits(self) -> tuple[str, ...]:
        """Names of the exits."""
        return _names(self.exit, "exit")

    @property
    def stored_names(self) -> tuple[str, ...]:
        """Names of the checkpointed tensors."""
        return () if self.stored in ((), []) else _names(self.stored, "stored")


@dataclasses.dataclass(frozen=True)
class SFTParams:
    """Parameters of segmented fused-tiled execution (Xu et al., CC '22).

    Each segment of the network runs as a forward loop and a backward loop over tiles of its exit. An iteration computes
    one tile through all ops of the segment, and the backward loop recomputes the inner tensors of a tile.

    Args:
        num_tiles: Number of tiles along each axis of the exit of each segment: `(height, width)` of images,
            `(depth, height, width)` of volumes, `(length,)` of sequences. One more number in front counts tiles along
            the batch, as in `(batch, height, width)`. A mapping such as `{"batch": 1, "height": 4, "width": 4}` is
            accepted too. Tiles have equal sizes as far as possible; strips with `halo="carry"` have equal memory. More
            tiles take less memory and more time. `"auto"`: the fewest tiles whose iteration needs no more memory than
            the segment's entry and exit, or than `memory_capacity` if that is given.
        segments (str | Sequence[SegmentSpec]): `"auto"`, or a list of `SegmentSpec`.
        memory_capacity (int | str | None): Size in bytes, an int or a string such as `"1GiB"`. Automatic segments tile
            all tensors that are larger, and end at smaller ones (Xu et al., Listing 3). It also bounds an iteration,
            but not the step. `None`: segments of a training step end where the halos of longer ones would cost more
            time than they save memory, and levels between barriers stay untiled where tiles do. Those of other steps,
            and those in stages of a pipeline, are as long as possible.
        halo: Source of the halo rows that a tile shares with the tile above.

            - `"recompute"`: each tile computes them itself (for strips: LR-CNN's overlapping rows, OverL).
            - `"carry"`: they are carried from strip to strip, and only cheap ops are recomputed (LR-CNN's two-phase
              sharing, 2PS; Z. Wang et al., 2024). Tiles are strips of full width. Carried rows are saved for the
              backward loop. Use it for many tiles.
        backward_num_tiles: Number of tiles of the backward loops. An iteration of these needs about three times as
            much memory, so that fewer forward tiles save time. `None`: `num_tiles`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.

    Examples:
        >>> params = tflms_sft.SFTParams(num_tiles=(8, 1), halo="carry")
        >>> step = tflms_sft.rewrite(train_step, params, images, labels)
    """

    num_tiles: str | Sequence[int] | Mapping[str, int] = "auto"
    segments: Any = "auto"
    memory_capacity: Any = None
    halo: str = "recompute"
    backward_num_tiles: str | Sequence[int] | Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        """Check every argument as far as possible without a graph."""
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
            raise ValueError('`segments` must name at least one segment, or be "auto". Received: segments=[].')
        object.__setattr__(self, "segments", tuple(self.segments))


@dataclasses.dataclass(frozen=True)
class AutoParams:
    """A memory budget, for which the planner searches tiles and swaps.

    `rewrite` follows the prediction. Where the device keeps memory statistics, the first call of the rewritten step is
    compared with the budget, and an excess is a warning; `measure` measures any call on any device.

    Args:
        memory_budget (int | str): Upper bound for the bytes alive on the device at any moment of a step, weights and
            optimizer slots included: an int, or a string such as `"8GiB"`. More than TensorFlow may allocate on a GPU
            is reduced to that. `"auto"`: 90 % of the memory that is free when the step is planned, on the device, or
            on a CPU in the machine or container.
        headroom: Fraction of the budget that the prediction leaves free, from 0 to below 1. It covers the
            variation of the peak between runs: TensorFlow's executor runs ready ops in no fixed order.
        swap (bool | LMSParams): Whether activations may be swapped to host memory or disk, and large results of tile
            loops may lie in files, if tiles alone do not keep the budget or cost much time. `LMSParams` select tensors
            and destination.
        plan (str | os.PathLike[str] | None): File that `Plan.save` wrote for this step: its decisions are applied
            without a search. If `memory_budget` is `"auto"`, the budget is that of the file. A plan that needs more
            than the budget is refused. `None`: a search, or the plan that an earlier process found for an equal step,
            budget and machine.
        max_slowdown: Longest time of a step that a search accepts, over that of the original step, by prediction; a
            number from 1 on. If all plans within the budget take longer, a `BudgetError` names a budget that is faster.
            `math.inf` accepts any time.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.

    Examples:
        >>> step = tflms_sft.rewrite(train_step, tflms_sft.AutoParams("8GiB"), images, labels)
    """

    memory_budget: Any = "auto"
    headroom: float = 0.1
    swap: bool | SwapParams = True
    plan: Any = None
    max_slowdown: float = 10.0

    def __post_init__(self) -> None:
        """Check and convert every argument."""
        expected = f"`max_slowdown` must be a number from 1 on. Received: max_slowdown={self.max_slowdown!r}."
        if isinstance(self.max_slowdown, bool) or not isinstance(self.max_slowdown, numbers.Real):
            raise TypeError(expected)
        object.__setattr__(self, "max_slowdown", float(self.max_slowdown))
        if not self.max_slowdown >= 1:
            raise ValueError(expected)
        if not isinstance(self.swap, (bool, SwapParams)):
            raise TypeError(f"`swap` must be a bool or `LMSParams(...)`. Received: swap={self.swap!r}.")
        if self.plan is not None and not isinstance(self.plan, (str, os.PathLike)):
            raise TypeError(f"`plan` must be a path. Received: plan={self.plan!r}.")
        if self.plan is not None and not os.path.isfile(self.plan):
            raise ValueError(
                f"`plan` must be an existing file that `Plan.save` wrote. Received: plan={os.fspath(self.plan)!r}."
            )
        if self.memory_budget != AUTO:
            object.__setattr__(self, "memory_budget", parse_bytes(self.memory_budget, "memory_budget"))
        if isinstance(self.headroom, bool) or not isinstance(self.headroom, numbers.Real):
            raise TypeError(f"`headroom` must be a number from 0 to below 1. Received: headroom={self.headroom!r}.")
        object.__setattr__(self, "headroom", float(self.headroom))
        if not 0 <= self.headroom < 1:
            raise ValueError(f"`headroom` must be a number from 0 to below 1. Received: headroom={self.headroom!r}.")

    def _saved_budget(self) -> int | None:
        """Return the budget of the saved plan; `None` if there is none."""
        if self.plan is None:
            return None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), open(self.plan, encoding="utf-8") as file:
            return int(json.load(file)["memory_budget"])
        return None

    def without_plan(self) -> AutoParams:
        """Return a copy without the saved plan; a budget of `"auto"` becomes that of the plan."""
        budget = self._saved_budget() if self.memory_budget == AUTO else None
        return dataclasses.replace(self, plan=None, memory_budget=self.memory_budget if budget is None else budget)

    def resolved(self, fixed_bytes: int, devices: Sequence[str] = ()) -> AutoParams:
        """Return a copy whose budget is in bytes, at most the memory of a GPU; `"auto"` depends on the free memory.

        Args:
            fixed_bytes: Bytes of the step's variables, which are allocated already and count towards the budget.
            devices: GPUs of several replicas, which share the budget equally.

        Returns:
            Parameters whose `memory_budget` is an int.
        """
        budget, limit = self.without_plan().memory_budget, device_memory_limit(devices)
        if budget == AUTO:
            total = free_device_memory(devices) + fixed_bytes
            budget = int(AUTO_BUDGET_FRACTION * (total if limit is None else min(total, limit)))
        budget = budget if limit is None else min(budget, limit)
        return self if budget == self.memory_budget else dataclasses.replace(self, memory_budget=budget)

    def reduction_note(self, resolved: AutoParams, devices: Sequence[str] = ()) -> str:
        """Return a note for a budget that `resolved` has reduced to the memory of the device; empty for others.

        Args:
            resolved: Result of the method `resolved`.
            devices: GPUs of several replicas.
        """
        if self.memory_budget == AUTO or resolved.memory_budget == self.memory_budget:
            return ""
        return (
            f"planned for {format_bytes(resolved.memory_budget)} instead of {format_bytes(self.memory_budget)}: "
            f"TensorFlow allocates no more on {device_names(devices)}"
        )
