"""Sums over the image (one summand per tile) and reductions over the channels (pointwise)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rewriters.errors import NotTileableError
from rewriters.intervals import Interval, hull_of
from rewriters.registry import SPATIAL_DIMS, AxisPlan, Emitter, Kind, OpView, Rule, tiling_rule
from rewriters.rules.elementwise import require_nhwc

__all__: list[str] = []

BARRIER = "it reduces over the image, so that everything after it waits for all tiles"


class SumOverImage(Rule):
    """Adds up a gradient over batch, height and width."""

    def reach(self, op: OpView, axis: int, parts: Sequence[Interval | None]) -> AxisPlan:
        """The gradient's rows."""
        rows = [part for part in parts if part is not None]
        needs: list[Interval | None] = [None] * len(op.node.inputs)
        needs[0] = hull_of(rows)
        return AxisPlan(None, None, needs)

    def data(self, op: OpView) -> list[int]:
        """The image."""
        return [0]


@tiling_rule("BiasAddGrad")
class BiasAddGrad(SumOverImage):
    """The gradient of a bias."""

    def result(self, op: OpView, kinds: Sequence[Kind]) -> Kind:
        """A sum of a gradient."""
        require_nhwc(op.node)
        if kinds[0] is not Kind.PARTIAL:
            raise NotTileableError(BARRIER)
        return Kind.REDUCED


@tiling_rule("Sum", "Mean", "Max", "Min", "Prod")
class Reduce(SumOverImage):
    """Over channels: pointwise. Over the whole image: a reduction, for sums of gradients. Else a barrier."""

    def _over_channels(self, op: OpView) -> bool:
        return all(axis % 4 == 3 for axis in self._axes(op))

    def _axes(self, op: OpView) -> tuple[int, ...]:
        value = op.evaluate(op.node.inputs[1])
        axes = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(axis, int) for axis in axes):
            raise NotTileableError("a reduction over axes computed at run time")
        return axes  # type: ignore[return-value]

    def result(self, op: OpView, kinds: Sequence[Kind]) -> Kind:
        """By the axes, and by linearity."""
        shape = op.node.inputs[0].shape
        if shape is None or len(shape) != 4:
            raise NotTileableError("a reduction of a tensor that is not (batch, height, width, channels)")
        if self._over_channels(op):
            if not op.node.attrs["keep_dims"].b:
                raise NotTileableError("a reduction over channels that drops the axis")
            if kinds[0] is Kind.PARTIAL and op.node.op not in ("Sum", "Mean"):
                raise NotTileableError(f"{op.node.op} is not linear in a gradient")
            return kinds[0]
        summed = {axis % 4 for axis in self._axes(op)}
        if op.node.op == "Sum" and kinds[0] is Kind.PARTIAL and summed >= {0, *SPATIAL_DIMS}:
            return Kind.REDUCED
        raise NotTileableError(BARRIER)

    def demand(self, op: OpView, axis: int, out: Interval) -> AxisPlan:
        """The same rows."""
        return AxisPlan(out, out, [out, None])

    def reach(self, op: OpView, axis: int, parts: Sequence[Interval | None]) -> AxisPlan:
        """The same rows, or a sum over them."""
        plan = super().reach(op, axis, parts)
        if self._over_channels(op):
            return AxisPlan(plan.needs[0], plan.needs[0], plan.needs)
        return plan

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """On the tile as on the image."""
        return emitter.clone(op.node, operands)
