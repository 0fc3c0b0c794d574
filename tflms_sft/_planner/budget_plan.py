"""A plan for a budget: tiles and swaps of a step, with the predicted time and peak."""

from __future__ import annotations

import dataclasses
import shutil
from typing import Protocol

from rewriters.emission.file_buffers import FileBuffers
from rewriters.emission.tile_pass import SegmentPlan
from rewriters.scheduling.memory_order import MemoryOrder
from rewriters.tiling.ft_segments import SkippedOps
from tflms_sft._params.swap_params import SwapParams
from tflms_sft._search.traced_step import Candidate, TracedStep, peak_file_bytes, sizes_in_files
from tflms_sft._util.byte_sizes import format_bytes


class TileSearch(Protocol):
    """A search for tile plans of one step.

    Attributes:
        left: Ops that cannot be tiled, with reasons.
    """

    left: list[SkippedOps]

    @property
    def in_memory(self) -> TileSearch:
        """The search among plans without files: the search itself unless it decides on files, too."""

    @property
    def smallest(self) -> Candidate:
        """Plan with the lowest peak found."""

    def fastest_within(self, limit: int) -> Candidate | None:
        """Return the fastest plan found whose step stays within `limit` bytes."""

    def proposed(self, target: int) -> Candidate | None:
        """Return the plan for a target, whether its step meets it or not."""


@dataclasses.dataclass(frozen=True)
class BudgetPlan:
    """Tiles and swaps of a step.

    Attributes:
        plans: Segments to tile.
        left: Ops that cannot be tiled, with reasons.
        swaps: Tensors to swap in the tiled step, if any.
        files: Rule that selects the results of tile loops that lie in files, if any.
        order: Control edges of the step in tiles.
        why: Reason for this kind of plan, as a note.
        advice: Note of the time with larger budgets, if the step is slow.
    """

    plans: list[SegmentPlan]
    left: list[SkippedOps]
    swaps: SwapParams | None = None
    files: FileBuffers | None = None
    order: MemoryOrder = MemoryOrder.EXECUTOR
    why: str = ""
    advice: str = ""


@dataclasses.dataclass(frozen=True)
class FeasiblePlan:
    """A plan that fits, with the predicted time and peak of the step."""

    plan: BudgetPlan
    seconds: float
    peak_bytes: int


def of_tiles(traced: TracedStep, tiles: Candidate, left: list[SkippedOps]) -> FeasiblePlan:
    """Return a plan of tiles, with a note of the results that lie in files."""
    why = ""
    if tiles.files is not None:
        traced = dataclasses.replace(traced, files=tiles.files)
        number = len(sizes_in_files(traced, tiles.plans))
        where = f"files of {tiles.files.directory!r}"
        room = f"which take up to {format_bytes(peak_file_bytes(traced, tiles.plans))}"
        why = f"{number} tensor{'s' * (number > 1)} between tile loops lie in {where}, {room}"
    plan = BudgetPlan(tiles.plans, left, files=tiles.files, order=tiles.order, why=why)
    return FeasiblePlan(plan, max(tiles.time_ratio, 1.0) * traced.seconds, tiles.peak.peak_bytes)


def have_room(traced: TracedStep, tiles: Candidate | BudgetPlan) -> bool:
    """Return whether the disk has room for the files of a plan."""
    if tiles.files is None:
        return True
    num_bytes = peak_file_bytes(dataclasses.replace(traced, files=tiles.files), tiles.plans)
    return num_bytes <= shutil.disk_usage(tiles.files.directory).free
