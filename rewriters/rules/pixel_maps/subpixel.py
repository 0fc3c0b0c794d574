"""Moving pixels between space and channels: `DepthToSpace` (sub-pixel convolution) and its inverse."""

from __future__ import annotations

from collections.abc import Sequence

from rewriters.errors import NotTileableError
from rewriters.ir.graph import Tensor
from rewriters.rules.elementwise import require_format
from rewriters.rules.intervals import Interval, Window
from rewriters.rules.registry import AxisPlan, OpView, Rule, TileKind, tiling_rule

__all__: list[str] = []


class Blocks(Rule):
    """Base of two ops with windows of `block_size` that do not overlap; each is the gradient of the other."""

    cheap = True

    def large(self, op: OpView) -> Tensor:
        """Return the tensor with more pixels."""
        raise NotImplementedError

    def window(self, op: OpView, axis: int) -> Window:
        """Return the geometry along one axis."""
        block = int(op.node.attrs["block_size"].i)
        rows = op.extent(self.large(op), axis)
        return Window(block, block, 1, 0, rows, rows // block)

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return the kind of the operand, because moving pixels is linear."""
        require_format(op, [op.node.inputs[0], op.node.out()])
        if kinds[0] not in (TileKind.FULL, TileKind.PARTIAL):
            raise NotTileableError(f"{op.node.op} of a tensor that does not vary between tiles")
        return kinds[0]


@tiling_rule("SpaceToDepth")
class SpaceToDepth(Blocks):
    """Moves each block into the channels of one pixel."""

    def large(self, op: OpView) -> Tensor:
        """Return the operand."""
        return op.node.inputs[0]

    def operand_rows_for_result(self, op: OpView, axis: int, out: Interval) -> AxisPlan:
        """Return the rows of the blocks."""
        return AxisPlan(out, out, [self.window(op, axis).rows_covered(out)])

    def result_rows_from_operands(self, op: OpView, axis: int, parts: Sequence[Interval | None]) -> AxisPlan:
        """Return the blocks that overlap the gradient's rows; their other rows are zero."""
        assert parts[0] is not None
        return self.operand_rows_for_result(op, axis, self.window(op, axis).windows_overlapping(parts[0]))


@tiling_rule("DepthToSpace")
class DepthToSpace(Blocks):
    """Spreads the channels of each pixel over a block."""

    def large(self, op: OpView) -> Tensor:
        """Return the output."""
        return op.node.out()

    def operand_rows_for_result(self, op: OpView, axis: int, out: Interval) -> AxisPlan:
        """Return full blocks, of which the tile keeps the rows `out`."""
        window = self.window(op, axis)
        small = window.windows_overlapping(out)
        return AxisPlan(out, window.rows_covered(small), [small])

    def result_rows_from_operands(self, op: OpView, axis: int, parts: Sequence[Interval | None]) -> AxisPlan:
        """Return all rows of the gradient's blocks."""
        assert parts[0] is not None
        rows = self.window(op, axis).rows_covered(parts[0])
        return AxisPlan(rows, rows, [parts[0]])
