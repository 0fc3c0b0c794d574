"""The program of a tile loop: the instructions of one iteration.

A planned loop holds the rows that each op computes and reads. The program holds the way to get these rows: regions that
an iteration slices, crops and pads, rows that it joins with those of the iteration before, and results that it writes.
Emission, memory model, cost model and signatures read the program. Casts of half-precision sums and the ops that a rule
adds to its own op are no instructions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rewriters.ir.graph import Node, Tensor
from rewriters.rules.intervals import CropPad, Interval, fit
from rewriters.rules.registry import Combination
from rewriters.tiling.barrier_levels import MomentPair
from rewriters.tiling.row_frontiers import CarriedRows, SavedRows
from rewriters.tiling.tile_planner import Region

__all__: list[str] = []


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Part:
    """A value of an iteration.

    Attributes:
        tensor: Tensor of which it is a part.
        region: Its rows for every tile; `None` for a tensor without rows, such as a sum over the image.
    """

    tensor: Tensor
    region: Region | None


@dataclasses.dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Waiting:
    """Base of the instructions that compute parts.

    Attributes:
        waits: Parts that exist before any op of the instruction runs.
    """

    waits: tuple[Part, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Slice(_Waiting):
    """Slice a full-size image, or read or fill its region if it lies in a file or repeats a number.

    Attributes:
        is_full: Whether every iteration reads the full image, so that nothing is copied.
    """

    result: Part
    is_full: bool


@dataclasses.dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Receive(_Waiting):
    """Take the rows that the iteration before carries, or that another loop has saved.

    Attributes:
        like: Part with the batch size of the rows.
    """

    result: Part
    carry: CarriedRows
    like: Part


@dataclasses.dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Fit(_Waiting):
    """Crop and pad a part.

    Attributes:
        fill: Value of padding, a number or `"lowest"`.
        may_be_view: Whether the result may be a view of the part (`shared` of `DeviceBuffer.read`).
    """

    result: Part
    part: Part
    fill: float | str
    may_be_view: bool

    @property
    def changes(self) -> tuple[CropPad, ...]:
        """Crop and pad along each axis."""
        assert self.part.region is not None and self.result.region is not None
        return tuple(map(fit, self.part.region, self.result.region))


@dataclasses.dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Join(_Waiting):
    """Write received rows into the padding of the computed rows, in place.

    Attributes:
        padded: Computed rows with padding.
        received: Received rows.
    """

    result: Part
    padded: Part
    received: Part


@dataclasses.dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class AddRows(_Waiting):
    """Add the partial sums of earlier iterations to some rows of a gradient.

    Attributes:
        part: Rows that the iteration computed.
        received: Partial sums.
        in_place: Whether no other op reads the computed rows.
    """

    result: Part
    part: Part
    received: Part
    in_place: bool


@dataclasses.dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Run(_Waiting):
    """Run an op of the graph.

    Attributes:
        node: The op.
        operands: Parts, and tensors that the op reads in full; `None` for those that its rule rebuilds.
        results: Its results as the op computes them; `None` for those that exist in full size.
        reductions: Sums over the tile that have to end before the op itself begins.
    """

    node: Node
    operands: tuple[Part | Tensor | None, ...]
    results: tuple[Part | None, ...]
    reductions: tuple[Part, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Write:
    """Write a cell of a full-size tensor.

    Attributes:
        is_full: Whether every iteration writes the full tensor.
    """

    part: Part
    is_full: bool


@dataclasses.dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Accumulate:
    """Add rows to a full-size gradient; rows of several tiles may overlap.

    Attributes:
        is_full: Whether every iteration adds to the full gradient.
    """

    part: Part
    is_full: bool


@dataclasses.dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Reduce:
    """Combine a reduction over the image with that of the tiles before.

    Attributes:
        part: Reduction over the tile.
        combination: Combines the results of two iterations.
        per_image: Whether each image has a result of its own.
        cell: For each axis its dimension in the result, `None` if it is reduced, and the rows of an iteration. `None`
            for a reduction over all axes.
        is_full: Whether every iteration combines the full result.
    """

    part: Part
    combination: Combination
    per_image: bool
    cell: tuple[tuple[int | None, Interval], ...] | None
    is_full: bool


@dataclasses.dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class MergeMoments:
    """Merge mean and variance of a tile with those of the tiles before.

    Attributes:
        part: Pixels of the tile.
        pair: The reductions.
        has_one_tile: Whether there is a single tile, of which the moments have the bits of the original step.
    """

    part: Part
    pair: MomentPair
    has_one_tile: bool


@dataclasses.dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Save:
    """Save rows for another loop: one part for each slot of `SavedRows`."""

    parts: tuple[Part, ...]
    save: SavedRows


@dataclasses.dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Carry:
    """Carry rows to the next iteration."""

    part: Part


Instruction = Slice | Receive | Fit | Join | AddRows | Run
"""Instruction that computes parts."""

Output = Write | Accumulate | Reduce | MergeMoments | Save | Carry
"""Instruction that changes state variables of the loop."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class LoopProgram:
    """Program of a loop.

    Attributes:
        instructions: Instructions of an iteration, in order.
        outputs: Instructions that change state variables. They run last.
    """

    instructions: Sequence[Instruction]
    outputs: Sequence[Output]

    def __str__(self) -> str:
        """Return one line for each instruction: its result, its type, its operands, and the rows of the first tile."""
        names: dict[Part, str] = {}
        lines = []
        for one in (*self.instructions, *self.outputs):
            fields = {field.name: getattr(one, field.name) for field in dataclasses.fields(one)}
            results = [part for part in (fields.pop("result", None), *fields.pop("results", ())) if part is not None]
            waits = [names[part] for key in ("waits", "reductions") for part in fields.pop(key, ())]
            read = [value for field in fields.values() for value in (field if isinstance(field, tuple) else (field,))]
            operands = [names[value] if isinstance(value, Part) else value.name for value in read if _is_operand(value)]
            names.update((part, f"%{number}") for number, part in enumerate(results, len(names)))
            shown = [f"{names[part]} {part.tensor.name}{_rows_text(part)}" for part in results]
            op = f"{type(one).__name__}({', '.join(operands)})"
            line = f"{', '.join(shown)} = {op}" if shown else op
            lines.append(f"{line} after {', '.join(waits)}" if waits else line)
        return "\n".join(lines)


def _is_operand(value: object) -> bool:
    return isinstance(value, (Part, Tensor, Node))


def _rows_text(part: Part) -> str:
    """Return the rows of a part in the first tile."""
    if part.region is None:
        return ""
    return f"[{', '.join(f'{rows.lo[0]}:{rows.hi[0]}' for rows in part.region)}]"
