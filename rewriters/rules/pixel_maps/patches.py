"""Patches of an image as channels: a window without a filter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rewriters.rules.axis_layouts import Anchor, AxisMap
from rewriters.rules.convolution import padding_before
from rewriters.rules.elementwise import require_format, sides_by_format
from rewriters.rules.intervals import Interval, Window
from rewriters.rules.registry import AxisPlan, Emitter, OpView, Rule, TileKind, tiling_rule

__all__: list[str] = []


@tiling_rule("ExtractImagePatches", "ExtractVolumePatches")
class ExtractPatches(Rule):
    """Extraction of patches, which may overlap, as channels of one pixel each."""

    def window(self, op: OpView, axis: int) -> Window:
        """Return the geometry along one axis."""
        image, dim = op.node.inputs[0], axis + 1
        kernel, stride = op.attr_ints("ksizes")[dim], op.attr_ints("strides")[dim]
        dilation = op.attr_ints("rates")[dim] if "rates" in op.node.attrs else 1
        rows = op.extent(image, axis)
        pad = padding_before(op.node, dim, rows, (kernel - 1) * dilation + 1, stride)
        return Window(kernel, stride, dilation, pad, rows, op.extent(op.node.out(), axis))

    def anchors(self, op: OpView) -> list[Anchor]:
        """Anchor both sides with channels last."""
        return sides_by_format(op.node, [op.node.inputs[0], op.node.out()])

    def links(self, op: OpView) -> list[AxisMap]:
        """Return no links: both sides are anchored."""
        return []

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return the kind of the image, because moving pixels is linear."""
        require_format(op, [op.node.inputs[0], op.node.out()])
        return kinds[0]

    def operand_rows_for_result(self, op: OpView, axis: int, out: Interval) -> AxisPlan:
        """Require the rows below the windows `out`."""
        return AxisPlan(out, out, [self.window(op, axis).rows_covered(out)])

    def result_rows_from_operands(self, op: OpView, axis: int, parts: Sequence[Interval | None]) -> AxisPlan:
        """Plan for the windows that overlap the gradient's rows; its other rows are zero."""
        assert parts[0] is not None
        return self.operand_rows_for_result(op, axis, self.window(op, axis).windows_overlapping(parts[0]))

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Run without padding, which is part of the operand."""
        return emitter.clone(op.node, operands, **({} if emitter.is_whole(op.node) else {"padding": "VALID"}))
