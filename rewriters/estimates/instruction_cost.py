"""Work of the instructions of a tile loop beside its ops: bytes that they move, and ops that they start."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.emission.loop_program import (
    Accumulate,
    AddRows,
    Carry,
    Fit,
    Instruction,
    Join,
    LoopProgram,
    MergeMoments,
    Output,
    Part,
    Receive,
    Reduce,
    Run,
    Save,
    Slice,
    Write,
)
from rewriters.ir.graph import Tensor
from rewriters.tiling.tile_planner import Region

__all__: list[str] = []

HOST_OPS_PER_AXIS, HOST_OPS_OF_BATCH, HOST_OPS_PER_REGION = 14, 3, 6.5
"""Ops on integers that an iteration runs for each tiled axis of the image, for a tiled batch, and for each region that
it slices, fits or writes. `tests/estimates/test_op_cost.py` compares their sum with emitted loops."""

MOMENT_OPS = 12
"""Ops that merge the moments of a tile into those of the tiles before."""


@dataclasses.dataclass(frozen=True)
class InstructionWork:
    """Work of one or more instructions.

    Attributes:
        moved_bytes: Bytes that they read and write, in all iterations.
        calls: Ops that an iteration starts on the device.
        regions: Regions whose places an iteration computes.
    """

    moved_bytes: float = 0.0
    calls: int = 0
    regions: int = 0

    def __add__(self, other: InstructionWork) -> InstructionWork:
        """Return the work of both."""
        return InstructionWork(
            self.moved_bytes + other.moved_bytes, self.calls + other.calls, self.regions + other.regions
        )


class InstructionCosts:
    """Work of instructions.

    Args:
        analysis: Analysis of the step.
        batch: Batch size where the graph leaves it open.
        iterations: Number of iterations.
    """

    def __init__(self, analysis: GraphAnalysis, batch: int, iterations: int) -> None:
        self._analysis = analysis
        self._batch = batch
        self._iterations = iterations

    def of_program(self, program: LoopProgram, *, with_fits: bool = True) -> InstructionWork:
        """Return the work of all instructions of a loop but its ops; without crops and pads unless `with_fits`."""
        work = InstructionWork()
        for instruction in (*program.instructions, *program.outputs):
            if with_fits or not isinstance(instruction, Fit):
                work += self.of_instruction(instruction)
        return work

    def of_instruction(self, instruction: Instruction | Output) -> InstructionWork:
        """Return the work of one instruction; none for an op, which the cost model knows."""
        in_place = self._analysis.graph.device.writes_in_place
        match instruction:
            case Run() | Slice(is_full=True) | Write(is_full=True) | Carry():
                return InstructionWork()
            case Slice(result=part) | Write(part=part) | Join(received=part):
                return InstructionWork(2 * self._part_bytes(part), 1, 1)
            case Fit():
                return self._fit(instruction)
            case Receive(result=part, carry=carry):
                is_saved = carry.saved is not None
                return InstructionWork(2 * self._part_bytes(part) * is_saved, int(is_saved), 1)
            case AddRows(received=part, in_place=adds_in_place):
                return InstructionWork(3 * self._part_bytes(part), 1 if adds_in_place and in_place else 3, 1)
            case Accumulate(part=part, is_full=is_full):
                calls = 1 if in_place or is_full else 3
                return InstructionWork(3 * self._part_bytes(part), calls, int(not is_full))
            case Reduce(part=part, is_full=is_full):
                moved_bytes = 3 * self._iterations * part.tensor.num_bytes(self._batch)
                return InstructionWork(moved_bytes, 1 if is_full else 3, int(not is_full))
            case Save(parts=parts):
                return sum((InstructionWork(2 * self._part_bytes(part), 1, 1) for part in parts), InstructionWork())
            case MergeMoments():
                return InstructionWork(calls=MOMENT_OPS)
        raise TypeError(instruction)

    def _fit(self, fit: Fit) -> InstructionWork:
        """Return the work of a crop and a pad, which copy nothing in a tile where they change nothing."""
        assert fit.part.region is not None and fit.result.region is not None
        work, sizes = InstructionWork(), [change.size for change in fit.changes]
        if any(change.crops for change in fit.changes):
            work += InstructionWork(2 * self._changed_bytes(fit.part.tensor, sizes, fit.part.region), 1, 1)
        if any(change.pads for change in fit.changes):
            padded = [rows.size for rows in fit.result.region]
            work += InstructionWork(2 * self._changed_bytes(fit.part.tensor, padded, sizes), 1, 1)
        return work

    def _changed_bytes(
        self, tensor: Tensor, sizes: Sequence[np.ndarray], before: Region | Sequence[np.ndarray]
    ) -> float:
        """Return the bytes of parts of some sizes in all tiles where the sizes differ from those `before`."""
        others = [rows if isinstance(rows, np.ndarray) else rows.size for rows in before]
        unchanged = [size * (size == other) for size, other in zip(sizes, others, strict=True)]
        return self._bytes(tensor, sizes) - self._bytes(tensor, unchanged)

    def _part_bytes(self, part: Part) -> float:
        """Return the bytes of a part in all iterations."""
        assert part.region is not None
        return self._bytes(part.tensor, [rows.size for rows in part.region])

    def _bytes(self, tensor: Tensor, sizes: Sequence[np.ndarray]) -> float:
        """Return the bytes of the parts of a tensor with some rows in each tile, in all iterations."""
        extents = self._analysis.extents(tensor) or ()
        fractions = (float(size.sum()) / (extent or 1) for size, extent in zip(sizes, extents, strict=True))
        return math.prod(fractions) * tensor.num_bytes(self._batch)
