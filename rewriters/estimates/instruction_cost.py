"""Work of the instructions of a tile loop beside its ops: bytes that they move, and ops that they start."""

from __future__ import annotations

import dataclasses
import math

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

    def of_program(self, program: LoopProgram) -> InstructionWork:
        """Return the work of all instructions of a loop but its ops."""
        work = map(self.of_instruction, (*program.instructions, *program.outputs))
        return sum(work, InstructionWork())

    def of_instruction(self, instruction: Instruction | Output) -> InstructionWork:
        """Return the work of one instruction; none for an op, which the cost model knows."""
        in_place = self._analysis.graph.device.writes_in_place
        match instruction:
            case Run() | Slice(is_full=True) | Write(is_full=True) | Carry():
                return InstructionWork()
            case Slice(result=part) | Write(part=part) | Join(received=part):
                return InstructionWork(2 * self._part_bytes(part), 1, 1)
            case Fit(changes=changes):  # Tiles that an op has just computed lie in a cache, so that copies cost little.
                calls = any(axis.crops for axis in changes) + any(axis.pads for axis in changes)
                return InstructionWork(0.0, calls, calls)
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

    def _part_bytes(self, part: Part) -> float:
        """Return the bytes of a part in all iterations."""
        assert part.region is not None
        extents = self._analysis.extents(part.tensor) or ()
        axes = zip(part.region, extents, strict=True)
        fraction = math.prod(float(rows.size.sum()) / (extent or 1) for rows, extent in axes)
        return fraction * part.tensor.num_bytes(self._batch)
