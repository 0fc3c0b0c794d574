"""The registry of op rules, and the words they are written in.

A rule says everything about one op type that tiling needs: which operands carry
image data, which rows of them an output needs or a gradient reaches, whether the
op is linear in a gradient, and how it runs on a tile. There is one rule per op
type; what kernels do with memory, tiled or not, is in `properties.py`.

Inside a tile loop every tensor has a kind:

- `FULL`: the true forward values of a region of the image.
- `PARTIAL`: one tile's part of a gradient, zero outside its region. Parts add up
  to the gradient, because backward ops are linear in it.
- `INVARIANT`: the same for all tiles (weights, scalars).
- `REDUCED`: a sum over the image, one summand per tile (weight gradients).

Kinds guard correctness: an op that adds `FULL` and `PARTIAL` is affine, adding its
tiles up would count the full part more than once, and its rule refuses.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from rewriters.errors import NotTileableError
from rewriters.ir.graph import PER_PIXEL, Node, Tensor
from rewriters.ir.static_values import StaticEvaluator
from rewriters.rules.axis_layouts import Anchor, AxisMap, Layout, Layouts
from rewriters.rules.intervals import Interval

__all__: list[str] = []


class TileKind(enum.Enum):
    """What a tensor holds inside a tile loop."""

    FULL = "full"
    PARTIAL = "partial"
    INVARIANT = "invariant"
    REDUCED = "reduced"


class Combination(enum.Enum):
    """How the parts of a reduction over the image become one."""

    ADD = "add"
    MULTIPLY = "multiply"
    MAXIMUM = "maximum"
    MINIMUM = "minimum"


@dataclasses.dataclass(frozen=True)
class OpView:
    """A node as a rule sees it: full-size shapes and static operand values.

    Attributes:
        node: The operation.
        evaluate: Static evaluation of its small integer operands.
        layouts: Where the axes lie.
    """

    node: Node
    evaluate: StaticEvaluator
    layouts: Layouts

    def layout(self, tensor: Tensor) -> Layout:
        """Where the axes of `tensor` lie."""
        layout = self.layouts.of(tensor)
        if layout is None:
            raise NotTileableError(f"`{tensor.name}` of shape {tensor.shape} is no image")
        return layout

    def dim(self, tensor: Tensor, axis: int) -> int | None:
        """The dimension of `tensor` that is `axis`; `None` if it has one row and no dimension for it."""
        return self.layout(tensor).dims[axis]

    def extent(self, tensor: Tensor, axis: int) -> int:
        """Full size of `tensor` along an axis (the first is height, or depth)."""
        size = self.layout(tensor).extents(tensor)[axis]
        if size is None:
            raise NotTileableError(f"`{tensor.name}` has an unknown image size {tensor.shape}")
        return size

    def check_axes(self, images: Sequence[Tensor]) -> None:
        """Refuse images of which some have more axes than others.

        Raises:
            NotTileableError: With their names.
        """
        numbers = {len(self.layout(tensor).dims) for tensor in images}
        if len(numbers) > 1:
            names = ", ".join(f"`{tensor.name}`" for tensor in images)
            raise NotTileableError(f"{names} have different numbers of axes")

    def axes(self, tensor: Tensor) -> range:
        """All axes."""
        return range(len(self.layout(tensor).dims))

    def ints(self, operand: int) -> tuple[int, ...]:
        """Value of an integer operand that must be known when the step is traced."""
        value = self.evaluate.ints(self.node.inputs[operand])
        if value is None:
            raise NotTileableError(f"operand {operand} (`{self.node.inputs[operand].name}`) is computed at run time")
        return value

    def attr_ints(self, name: str) -> list[int]:
        """A list attribute."""
        return list(self.node.attrs[name].list.i)


@dataclasses.dataclass
class AxisPlan:
    """What one op does along one axis.

    Attributes:
        kept: Rows of the output that the tile holds afterwards; `None` for a reduction.
        computed: Rows that the op itself yields, before cropping and zero-padding to `kept`.
        needs: Per operand the rows to hand over, padding included; `None` for an
            operand that is passed whole.
    """

    kept: Interval | None
    computed: Interval | None
    needs: list[Interval | None]


class Emitter(Protocol):
    """What a rule may ask for while it emits an op inside a loop."""

    def is_whole(self, node: Node) -> bool:
        """Whether the op runs on the full image in every tile, so that it can be copied as it is."""

    def clone(self, node: Node, operands: Sequence[Any], **attrs: Any) -> list[Any]:
        """The op with other operands and, where given, other attributes."""

    def axis_values(self, node: Node, position: int | None, values: Any, axis: int, dtype: Any) -> Any:
        """The part of a per-row vector for the rows of operand `position` (`None`: that the op makes).

        Shaped to broadcast against the image.
        """

    def batch_size(self, operand: Any) -> Any:
        """Run-time batch size of a tile tensor."""

    def axis_positions(self, node: Node, position: int, rows: np.ndarray, axis: int) -> Any:
        """For the rows that the op makes, the positions in operand `position` of the rows that a table names."""

    def has_all_images(self) -> bool:
        """Whether the batch is not split."""

    def whole_batch(self) -> Any:
        """Run-time size of the whole batch."""

    def made_shape(self, node: Node) -> Any:
        """Shape of what the op makes."""


class Rule:
    """Base of all rules: an op that works element by element.

    Subclasses override what differs. `data` are the positions of operands that hold
    image data; the others are weights, shapes or parameters and must be invariant.
    """

    fill: float | str = 0.0
    """Value of padding outside of the image: a number or `"lowest"`."""

    moves_rows: bool = False
    """Whether fitting the operand is part of the op, so that it is never copied as it is."""

    own_memory: bool = False
    """Whether the result is never in the memory of an operand, so that its only reader may change it in place."""

    cheap: bool = False
    """Whether to run the op again costs no more than to read its operands."""

    def anchors(self, op: OpView) -> list[Anchor]:
        """Tensors of which the op says where their axes lie."""
        del op
        return []

    def links(self, op: OpView) -> list[AxisMap]:
        """Tensors whose axes lie as those of another; of the same rank, in the same dimensions."""
        out = op.node.out()
        if out.shape is None:
            return []
        same = {dim: dim for dim in range(len(out.shape))}
        operands = [op.node.inputs[position] for position in self.data(op)]
        others = [*operands, *(op.node.out(index) for index in range(1, len(op.node.outputs)))]
        return [AxisMap(t, out, same) for t in others if t.shape is not None and len(t.shape) == len(same)]

    def shape_operands(self, op: OpView) -> list[int]:
        """Positions of the operands (shapes, offsets) that `emit` makes anew for a tile."""
        del op
        return []

    def data(self, op: OpView) -> list[int]:
        """Positions of the operands that may hold image data."""
        return list(range(len(op.node.inputs)))

    def result_kind(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Kind of the outputs for operands of these kinds.

        Raises:
            NotTileableError: If the op cannot run on tiles this way, with the reason.
        """
        raise NotImplementedError

    def result_kind_gathered(self, op: OpView, kinds: Sequence[TileKind]) -> TileKind:
        """Kind of the outputs where gradients are true values of their rows as well: no operand is `PARTIAL`.

        Raises:
            NotTileableError: If the op cannot run on tiles this way, with the reason.
        """
        return self.result_kind(op, kinds)

    def operand_rows_for_result(self, op: OpView, axis: int, out: Interval) -> AxisPlan:
        """Plan for a `FULL` result of which rows `out` are wanted."""
        raise NotImplementedError

    def summed(self, op: OpView) -> int:
        """Of a sum over the image: the operand of which every turn sums up its own part."""
        raise NotImplementedError

    def operand_rows_for_reduction(self, op: OpView, axis: int, cell: Interval) -> AxisPlan:
        """Plan for the part of a sum over the image that the rows `cell` of operand `summed` make."""
        needs: list[Interval | None] = [None] * len(op.node.inputs)
        needs[self.summed(op)] = cell
        return AxisPlan(None, None, needs)

    def combined(self, op: OpView) -> Combination:
        """How the parts become one."""
        del op
        return Combination.ADD

    def per_image(self, op: OpView) -> bool:
        """Whether a sum over the image has one result for each image of the batch, along its first dimension."""
        del op
        return False

    def per_pixel(self, op: OpView) -> bool:
        """Whether a sum is one over the batch alone, and has one result for each pixel."""
        del op
        return False

    def result_rows_from_operands(self, op: OpView, axis: int, parts: Sequence[Interval | None]) -> AxisPlan:
        """Plan for a `PARTIAL` or `REDUCED` result, given the rows `parts` of its partial operands."""
        raise NotImplementedError

    def operand_fill(self, op: OpView, position: int) -> float | str:
        """Value that pads operand `position` outside of the image."""
        del op, position
        return self.fill

    def emit(self, emitter: Emitter, op: OpView, operands: Sequence[Any]) -> list[Any]:
        """Run the op on operands that hold exactly the planned rows."""
        return emitter.clone(op.node, operands)

    def cost_operand(self, op: OpView) -> int | None:
        """The operand of which each row takes the same time; `None` if each row of the result does."""
        del op
        return None

    def flops(self, op: OpView, batch: int) -> float:
        """Floating point operations of the full-size op (0 counts as cheap)."""
        del op, batch
        return 0.0

    def weights(self, op: OpView) -> list[Tensor]:
        """Of an op with arithmetic: what it reads or makes that every turn of a loop has whole."""
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
    """Register one rule; a second one for the same type is a mistake."""
    if op_type in _RULES or op_type in _REFUSED:
        raise ValueError(f"`{op_type}` already has a rule. Received: {rule!r}. Remove one of the two.")
    _RULES[op_type] = rule


def not_tileable(reason: str, *op_types: str) -> None:
    """Register op types that are known and end a segment, with the reason that users see."""
    for op_type in op_types:
        if op_type in _RULES or op_type in _REFUSED:
            raise ValueError(f"`{op_type}` already has a rule. Received: {reason!r}. Remove one of the two.")
        _REFUSED[op_type] = reason


def find_rule(node: Node) -> Rule:
    """The rule for a node.

    Raises:
        NotTileableError: If there is none, or the op is known not to be tileable.
    """
    # A call of a function that runs one op on the pixels of an image has the rule of that op.
    op = node.attrs[PER_PIXEL].s.decode() if PER_PIXEL in node.attrs else node.op
    rule = _RULES.get(op)
    if rule is None:
        raise NotTileableError(_REFUSED.get(op, f"no tiling rule for op type {op}"))
    return rule


def registered() -> dict[str, Rule]:
    """All rules by op type."""
    return dict(_RULES)
