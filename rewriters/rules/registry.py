"""Registry of op rules, and the vocabulary of rules.

A rule describes how one op type is tiled: the operands that hold images, the rows of them that a result needs or a
gradient affects, linearity in a gradient, and the op on a tile. Each op type has one rule. Facts that hold without
tiles are in `ir/op_traits.py`, properties of kernels in `device/`.

Inside a tile loop every tensor has a kind:

- `FULL`: the true forward values of a region of the image.
- `PARTIAL`: one tile's part of a gradient, zero outside its region. Parts add up to the gradient, because backward ops
are linear in it.
- `INVARIANT`: equal for all tiles (weights, scalars).
- `REDUCED`: a reduction over the image, one summand per tile (weight gradients).

Kinds guard correctness. An op that adds `FULL` and `PARTIAL` is affine: the sum over its tiles would count the full
part more than once. Its rule refuses.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from rewriters.errors import NotTileableError
from rewriters.ir.device_model import DeviceModel
from rewriters.ir.graph import Node, Tensor
from rewriters.ir.static_values import StaticEvaluator
from rewriters.rules.axis_layouts import Anchor, AxisMap, Layout, Layouts
from rewriters.rules.intervals import Interval

__all__: list[str] = []

T = TypeVar("T")


class TileKind(enum.Enum):
    """Content of a tensor inside a tile loop."""

    FULL = "full"
    PARTIAL = "partial"
    INVARIANT = "invariant"
    REDUCED = "reduced"


class Combination(enum.Enum):
    """Combination of the parts of a reduction over the image."""

    ADD = "add"
    MULTIPLY = "multiply"
    MAXIMUM = "maximum"
    MINIMUM = "minimum"


@dataclasses.dataclass(frozen=True)
class OpView:
    """View of a node for its rule: full-size shapes and static operand values.

    Attributes:
        node: The operation.
        evaluate: Static evaluation of its small integer operands.
        layouts: Axis layouts of all tensors.
        device: The device that the step is rewritten for.
    """

    node: Node
    evaluate: StaticEvaluator
    layouts: Layouts
    device: DeviceModel
    _known: dict[Hashable, Any] = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, name: Hashable, compute: Callable[[], T]) -> T:
        """Return a fact that depends on nothing but the op and complete layouts, computed when it is first needed."""
        if name not in self._known:
            self._known[name] = compute()
        result: T = self._known[name]
        return result

    def layout(self, tensor: Tensor) -> Layout:
        """Return the layout of `tensor`."""
        layout = self.layouts.of(tensor)
        if layout is None:
            raise NotTileableError(f"`{tensor.name}` of shape {tensor.shape} is no image")
        return layout

    def dim(self, tensor: Tensor, axis: int) -> int | None:
        """Return the dimension of `tensor` that holds `axis`; `None` for an axis of one row without a dimension."""
        return self.layout(tensor).dims[axis]

    def extent(self, tensor: Tensor, axis: int) -> int:
        """Return the full size of `tensor` along an axis (the first is height, or depth)."""
        size = self.layout(tensor).extent(tensor, axis)
        if size is None:
            raise NotTileableError(f"`{tensor.name}` has an unknown image size {tensor.shape}")
        return size

    def check_axes(self, images: Sequence[Tensor]) -> None:
        """Refuse images with different numbers of axes.

        Raises:
            NotTileableError: With their names.
        """
        numbers = {len(self.layout(tensor).dims) for tensor in images}
        if len(numbers) > 1:
            names = ", ".join(f"`{tensor.name}`" for tensor in images)
            raise NotTileableError(f"{names} have different numbers of axes")

    def axes(self, tensor: Tensor) -> range:
        """Return all axes."""
        return range(len(self.layout(tensor).dims))

    def ints(self, operand: int) -> tuple[int, ...]:
        """Return the value of an integer operand; refuse one that is unknown when the step is traced."""
        value = self.evaluate.ints(self.node.inputs[operand])
        if value is None:
            raise NotTileableError(f"operand {operand} (`{self.node.inputs[operand].name}`) is computed at run time")
        return value

    def attr_ints(self, name: str) -> list[int]:
        """Return a list attribute."""
        return list(self.node.attrs[name].list.i)


@dataclasses.dataclass
class AxisPlan:
    """Rows of one op along one axis.

    Attributes:
        kept: Rows of the output that the tile keeps; `None` for a reduction.
        computed: Rows that the op itself yields, before cropping and zero-padding to `kept`.
        needs: Rows of each operand, padding included; `None` for an operand that is passed in full size.
    """

    kept: Interval | None
    computed: Interval | None
    needs: list[Interval | None]


class Emitter(Protocol):
    """Services for a rule that emits its op inside a loop."""

    def is_whole(self, node: Node) -> bool:
        """Return whether the op runs on the full image in every tile, so that it can be copied unchanged."""

    def clone(self, node: Node, operands: Sequence[Any], **attrs: Any) -> list[Any]:
        """Emit the op with other operands and, where given, other attributes."""

    def axis_values(self, node: Node, position: int | None, values: Any, axis: int, dtype: Any) -> Any:
        """Return the part of a per-row vector for the rows of operand `position` (`None`: of the op's result).

        Shaped to broadcast against the image.
        """

    def batch_size(self, operand: Any) -> Any:
        """Return the run-time batch size of a tile tensor."""

    def axis_positions(self, node: Node, position: int, rows: np.ndarray, axis: int) -> Any:
        """Return positions in operand `position` of the rows that a table names, for the rows that the op computes."""

    def has_all_images(self) -> bool:
        """Return whether the batch is not split."""

    def whole_batch(self) -> Any:
        """Return the run-time size of the full batch."""

    def operand_spans(self, node: Node, position: int) -> Sequence[tuple[Any, Any] | None]:
        """Return begin and size along each dimension of an operand's rows that the op needs; `None` for all of them."""

    def result_spans(self, node: Node) -> Sequence[tuple[Any, Any] | None]:
        """Return begin and size of the rows that the op computes along each dimension; `None` for all of them."""

    def made_shape(self, node: Node) -> Any:
        """Return the shape of the result that the op computes."""


class Rule:
    """Base of all rules.

    Subclasses override what differs. `data` are the positions of operands that hold images; the others are weights,
    shapes or parameters and must be invariant.
    """

    fill: float | str = 0.0
    """Value of padding outside of the image: a number or `"lowest"`."""

    moves_rows: bool = False
    """Whether fitting the operand is part of the op, so that it is never copied unchanged."""

    own_memory: bool = False
    """Whether the result never shares an operand's buffer, so that its only consumer may change it in place."""

    cheap: bool = False
    """Whether recomputing the op costs no more than reading its operands."""

    def anchors(self, op: OpView) -> list[Anchor]:
        """Return the tensors whose axes the op fixes, with their dimensions."""
        del op
        return []

    def channels(self, op: OpView) -> list[tuple[Tensor, int]]:
        """Return channel dimensions of operands: those whose entries the op mixes."""
        del op
        return []

    def sequences(self, op: OpView) -> list[Tensor]:
        """Return the tensors that hold a sequence if nothing else tells their axes."""
        del op
        return []

    def links(self, op: OpView) -> list[AxisMap]:
        """Return the axis maps between operands and results: equal dimensions of tensors of equal rank."""
        out = op.node.out()
        if out.shape is None:
            return []
        same = {dim: dim for dim in range(len(out.shape))}
        operands = [op.node.inputs[position] for position in self.data(op)]
        others = [*operands, *(op.node.out(index) for index in range(1, len(op.node.outputs)))]
        return [AxisMap(t, out, same) for t in others if t.shape is not None and len(t.shape) == len(same)]

    def shape_operands(self, op: OpView) -> list[int]:
        """Return the positions of the operands (shapes, offsets) that `emit` rebuilds for a tile."""
        del op
        return []

    def data(self, op: OpView) -> list[int]:
        """Return the positions of the operands that may hold images."""
        return list(range(len(op.node.inputs)))

    def read_whole(self, op: OpView) -> list[int]:
        """Return the positions of the images of which each tile reads all rows, as the keys of attention."""
        del op
        return []

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return the kind of the outputs for operands of these kinds.

        Raises:
            NotTileableError: If the op cannot run on tiles this way, with the reason.
        """
        raise NotImplementedError

    def result_kind_gathered(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Return the kind of the outputs if gradients are true values of their rows too: no operand is `PARTIAL`.

        Raises:
            NotTileableError: If the op cannot run on tiles this way, with the reason.
        """
        return self.result_kind(op, kinds)

    def operand_rows_for_result(self, op: OpView, axis: int, out: Interval) -> AxisPlan:
        """Return the plan for rows `out` of a `FULL` result."""
        raise NotImplementedError

    def summed(self, op: OpView) -> int:
        """Return the operand of a reduction over the image that is split among the iterations."""
        raise NotImplementedError

    def operand_rows_for_reduction(self, op: OpView, axis: int, cell: Interval) -> AxisPlan:
        """Return the plan for the part of a reduction that rows `cell` of operand `summed` contribute."""
        needs: list[Interval | None] = [None] * len(op.node.inputs)
        needs[self.summed(op)] = cell
        return AxisPlan(None, None, needs)

    def combined(self, op: OpView) -> Combination:
        """Return how partial results of a reduction are combined: by default they are added."""
        del op
        return Combination.ADD

    def per_image(self, op: OpView) -> bool:
        """Return whether a reduction over the image has one result per image, along the first dimension."""
        del op
        return False

    def per_pixel(self, op: OpView) -> bool:
        """Return whether a reduction leaves some axes, with one result per pixel, row or column."""
        del op
        return False

    def result_dims(self, op: OpView) -> tuple[int | None, ...]:
        """Return the dimension of a reduction's result that holds each axis; `None` for an axis that is reduced."""
        raise NotImplementedError

    def result_rows_from_operands(self, op: OpView, axis: int, parts: Sequence[Interval | None]) -> AxisPlan:
        """Return the plan for a `PARTIAL` or `REDUCED` result, given the rows `parts` of its partial operands."""
        raise NotImplementedError

    def operand_fill(self, op: OpView, position: int) -> float | str:
        """Return the value that pads operand `position` outside of the image."""
        del op, position
        return self.fill

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Run the op on operands that hold exactly the planned rows."""
        return emitter.clone(op.node, operands)

    def cost_operand(self, op: OpView) -> int | None:
        """Return the operand whose rows determine the time; `None` if those of the result do."""
        del op
        return None

    def flops(self, op: OpView, batch: int) -> float:
        """Return the floating point operations of the full-size op (0: its cost is memory traffic)."""
        del op, batch
        return 0.0

    def weights(self, op: OpView) -> list[Tensor]:
        """Return the tensors, of an op with arithmetic, that every iteration of a loop holds in full size."""
        del op
        return []


_RULES: dict[str, Rule] = {}
_REFUSED: dict[str, str] = {}

R = TypeVar("R", bound=type[Rule])


def tiling_rule(*op_types: str, **options: Any) -> Callable[[R], R]:
    """Register a rule class for op types; `options` go to its constructor."""

    def add(rule_class: R) -> R:
        for op_type in op_types:
            add_rule(op_type, rule_class(**options))
        return rule_class

    return add


def add_rule(op_type: str, rule: Rule) -> None:
    """Register one rule; a second one for an op type is an error."""
    if op_type in _RULES or op_type in _REFUSED:
        raise ValueError(f"`{op_type}` already has a rule. Received: {rule!r}. Remove one of the two.")
    _RULES[op_type] = rule


def not_tileable(reason: str, *op_types: str) -> None:
    """Register op types that always end a segment, with the reason that users see."""
    for op_type in op_types:
        if op_type in _RULES or op_type in _REFUSED:
            raise ValueError(f"`{op_type}` already has a rule. Received: {reason!r}. Remove one of the two.")
        _REFUSED[op_type] = reason


def find_rule(node: Node) -> Rule:
    """Return the rule for a node.

    Raises:
        NotTileableError: If there is none, or the op is registered as not tileable.
    """
    rule = _RULES.get(node.kernel)
    if rule is None:
        raise NotTileableError(_REFUSED.get(node.kernel, f"no tiling rule for op type {node.kernel}"))
    return rule


def registered() -> dict[str, Rule]:
    """Return all rules by op type."""
    return dict(_RULES)
