"""Symbolic leading sizes: decides which unknown leading sizes are equal.

With an unknown batch size most tensors of a step have an unknown leading size, nearly always that of the arguments.
There are exceptions: `x[:1]`, a gather or a boolean mask have a leading size of their own. Sizes are propagated from
the arguments through the graph. Two *arguments* are assumed to have equal sizes only where a rewriting rests on it.
Such an assumption is recorded in the graph, and checked when the step runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from rewriters.ir.graph import PER_PIXEL, Graph, Node, Tensor
from rewriters.ir.op_traits import Trait, has_own_leading_size, ops_with, traits_of

__all__: list[str] = []


class SymbolicDim:
    """A leading size that is unknown before the step runs. Compared by identity; see `LeadingSizes.provably_equal`.

    Attributes:
        arguments: Positions of the graph's inputs that have this size. They are several if an op combined them, which
            works if their sizes are equal. Empty for a size that is no argument's.
    """

    def __init__(self, *arguments: int) -> None:
        self.arguments = frozenset(arguments)

    def __repr__(self) -> str:
        return f"Size{sorted(self.arguments)}"


class LeadingSizes:
    """The leading size of every tensor of a graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._sizes: dict[Tensor, SymbolicDim] = {}
        self._multiples: dict[tuple[SymbolicDim, int], SymbolicDim] = {}
        """Products of a size and a factor, as after space-to-batch folding, or of images and windows."""
        self._factors: dict[SymbolicDim, tuple[SymbolicDim, int]] = {}
        """Size and factor of each product."""
        self._groups: list[set[int]] = []
        self._combined: list[set[int]] = []
        """Groups of arguments whose images some op combines."""
        for pair in graph.same_size:
            self._join(set(pair))
            self._combined.append(set(pair))

    def find(self, order: Iterable[Node], evaluate: Callable[[Tensor], Any]) -> None:
        """Propagate the sizes through the nodes, in topological order."""
        positions = {tensor.node: position for position, tensor in enumerate(self._graph.inputs)}
        for node in order:
            for index, (_, shape) in enumerate(node.outputs):
                if shape and shape[0] is None:
                    position = positions.get(node)
                    known = SymbolicDim(position) if position is not None else self._made(node, evaluate)
                    self._sizes[node.out(index)] = known or SymbolicDim()

    def of(self, tensor: Tensor) -> int | SymbolicDim | None:
        """Return the leading size; `None` if the rank is unknown or zero."""
        if not tensor.shape:
            return None
        size = tensor.shape[0]
        return self._sizes.setdefault(tensor, SymbolicDim()) if size is None else size

    def of_images(self, tensor: Tensor, entries: int) -> int | SymbolicDim | None:
        """Return the batch size of a tensor that has `entries` entries of its first dimension per image."""
        size = self.of(tensor)
        return (self._divided(size, entries) or size) if isinstance(size, SymbolicDim) else size

    def provably_equal(self, a: Any, b: Any) -> bool:
        """Return whether two sizes are equal by value or by assumptions recorded before. Records nothing."""
        if not isinstance(a, SymbolicDim) or not isinstance(b, SymbolicDim):
            return not isinstance(a, SymbolicDim) and not isinstance(b, SymbolicDim) and a == b
        if a is b:
            return True
        pair = self._common_factor(a, b)
        if pair is not None:
            return self.provably_equal(*pair)
        if not a.arguments or not b.arguments:
            return False
        arguments = a.arguments | b.arguments
        return len(arguments) == 1 or any(arguments <= group for group in self._groups)

    def assume_equal(self, a: Any, b: Any) -> bool:
        """Return whether two sizes are equal, or record the assumption that they are.

        The assumption concerns arguments. `Graph.same_size` holds it, and the rewritten step checks it when it runs.

        Returns:
            Whether the sizes are equal or now assumed to be: false for different numbers, for sizes of no argument, and
            for arguments whose sizes in `Graph.sizes` differ.
        """
        if self.provably_equal(a, b):
            return True
        pair = self._common_factor(a, b)
        if pair is not None:
            return self.assume_equal(*pair)
        if not isinstance(a, SymbolicDim) or not isinstance(b, SymbolicDim) or not a.arguments or not b.arguments:
            return False
        first, *others = sorted(a.arguments | b.arguments)
        if len({self._graph.sizes.get(position) for position in (first, *others)}) > 1:
            return False
        self._graph.same_size.update((first, other) for other in others)
        self._join({first, *others})
        return True

    def are_combined(self, a: Any, b: Any) -> bool:
        """Return whether sizes are equal, or some op combines images of both. Records nothing."""
        if not isinstance(a, SymbolicDim) or not isinstance(b, SymbolicDim):
            return self.provably_equal(a, b)
        if a is b or a.arguments & b.arguments:
            return True
        return any(a.arguments & group and b.arguments & group for group in self._combined)

    def _common_factor(self, a: Any, b: Any) -> tuple[SymbolicDim, SymbolicDim] | None:
        """Return the base sizes of two multiples with equal factors; `None` for other sizes."""
        (one, factor), (other, another) = (self._factors.get(size, (size, 1)) for size in (a, b))
        return (one, other) if factor == another != 1 else None

    def multiple(self, size: SymbolicDim, factor: int) -> SymbolicDim:
        """Return a multiple of a size."""
        base, known = self._factors.get(size, (size, 1))
        if factor == 1:
            return size
        multiple = self._multiples.setdefault((base, known * factor), SymbolicDim())
        self._factors[multiple] = base, known * factor
        return multiple

    def _divided(self, size: SymbolicDim, divisor: int) -> SymbolicDim | None:
        """Return a part of a multiple; `None` if a size is not known to be a multiple of the divisor."""
        base, factor = self._factors.get(size, (size, 1))
        if factor % divisor:
            return None
        return base if factor == divisor else self.multiple(base, factor // divisor)

    def _join(self, positions: set[int]) -> None:
        touched = [group for group in self._groups if group & positions]
        self._groups = [group for group in self._groups if group not in touched]
        self._groups.append(positions.union(*touched))

    def _made(self, node: Node, evaluate: Callable[[Tensor], Any]) -> SymbolicDim | None:
        """Return the leading size of a node's outputs if it is an operand's, otherwise `None`."""
        position = _shape_operand(node.op)
        if position is not None:
            return self._from_shape(node, position, evaluate)
        if node.op in ("SpaceToBatchND", "BatchToSpaceND"):
            return self._in_blocks(node, evaluate(node.inputs[1]))
        if PER_PIXEL in node.attrs:
            size = self.of(node.inputs[0])
            return size if isinstance(size, SymbolicDim) else None
        keeps = _KEEPS.get(node.op)
        if keeps is None and has_own_leading_size(node.op):
            return None
        if keeps is not None and not _holds(keeps, node, [evaluate(tensor) for tensor in node.inputs]):
            return None
        sizes = dict.fromkeys(self.of(tensor) for tensor in node.inputs if tensor.shape and tensor.shape[0] is None)
        if len(sizes) == 1:
            return next(iter(sizes))
        if not sizes or not all(size.arguments for size in sizes):  # type: ignore[union-attr]
            return None
        together = frozenset[int]().union(*(size.arguments for size in sizes))  # type: ignore[union-attr]
        if sum(len(tensor.shape or ()) > 2 for tensor in node.inputs) > 1:
            self._combined.append(set(together))
        return SymbolicDim(*together)

    def _in_blocks(self, node: Node, block: Any) -> SymbolicDim | None:
        """Return the operand's size times or divided by the block size."""
        size = self.of(node.inputs[0])
        if (
            not isinstance(size, SymbolicDim)
            or not isinstance(block, tuple)
            or not all(isinstance(b, int) for b in block)
        ):
            return None
        factor = math.prod(block)
        return self._divided(size, factor) if node.op == "BatchToSpaceND" else self.multiple(size, factor)

    def _from_shape(self, node: Node, position: int, evaluate: Callable[[Tensor], Any]) -> SymbolicDim | None:
        shape = evaluate(node.inputs[position])
        if not isinstance(shape, tuple) or not shape:
            return None
        first, source = shape[0], self.of(node.inputs[0])
        if node.op == "Tile":
            size = first if source == 1 else source if first == 1 else None
        elif node.op == "Slice" and first == -1:
            size = source if _first(evaluate(node.inputs[1])) == 0 else None
        elif node.op == "Reshape" and first == -1:
            size = self._reshaped(source, node.inputs[0].shape, shape)
        else:
            size = first
        return size if isinstance(size, SymbolicDim) else None

    def _reshaped(self, source: Any, shape: Sequence[Any] | None, target: Sequence[Any]) -> SymbolicDim | None:
        """Return the leading size after a `Reshape` to (-1, ...): the operand's, a multiple or a part of it."""
        inner = [*(shape or ())[1:], *target[1:]]
        if not shape or not isinstance(source, SymbolicDim) or not all(isinstance(n, int) and n > 0 for n in inner):
            return None
        factor = Fraction(math.prod(shape[1:]), math.prod(target[1:]))
        if factor.denominator == 1:
            return self.multiple(source, factor.numerator)
        return self._divided(source, factor.denominator) if factor.numerator == 1 else None


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) and value else None


def _shape_operand(op_type: str) -> int | None:
    """Return the position of the operand that holds the shape of the output."""
    if "Random" in op_type or "TruncatedNormal" in op_type:
        return None if op_type == "RandomShuffle" else 0
    return traits_of(op_type).shape_operand


def _holds(keeps: Callable[[Node, Sequence[Any]], bool], node: Node, values: Sequence[Any]) -> bool:
    try:
        return bool(keeps(node, values))
    except (TypeError, IndexError):
        return False  # An operand is unknown.


def _ints(value: Any) -> tuple[int, ...]:
    numbers = value if isinstance(value, tuple) else (value,)
    if not all(isinstance(number, int) for number in numbers):
        raise TypeError("unknown")
    return numbers


def _strided(node: Node, values: Sequence[Any]) -> bool:
    """Return whether a slice keeps the full first axis: `x[:, ...]`."""
    masks = {key: node.attrs[f"{key}_mask"].i & 1 for key in ("begin", "end", "shrink_axis", "new_axis", "ellipsis")}
    if masks["ellipsis"]:
        return True
    if masks["shrink_axis"] or masks["new_axis"]:
        return False
    return bool((masks["begin"] or _ints(values[1])[0] == 0) and masks["end"]) and _ints(values[3])[0] == 1


def _reduced(node: Node, values: Sequence[Any]) -> bool:
    rank = len(node.inputs[0].shape or ())
    return 0 not in {axis % rank for axis in _ints(values[1])}


def _axis_elsewhere(position: int) -> Callable[[Node, Sequence[Any]], bool]:
    """Return a test for an axis, in operand `position`, that is not the first."""

    def keeps(node: Node, values: Sequence[Any]) -> bool:
        return _ints(values[position])[0] % len(node.outputs[0][1] or ()) != 0

    return keeps


def _einsum(node: Node, _values: Sequence[Any]) -> bool:
    """Return whether the unknown sizes share the first letter of the result."""
    *operands, out = node.attrs["equation"].s.decode().replace("->", ",").replace(" ", "").split(",")
    unknown = [letters for letters, t in zip(operands, node.inputs, strict=True) if t.shape and t.shape[0] is None]
    return "." not in out[:1] and all(letters[:1] == out[:1] for letters in unknown)


def _gathered(node: Node, values: Sequence[Any]) -> bool:
    """Return whether a lookup has the leading size of its indices, or else that of the image it selects from."""
    indices_lead = _ints(values[2]) == (0,) and not node.attrs["batch_dims"].i
    fixed = node.inputs[0 if indices_lead else 1].shape
    return fixed is not None and fixed[:1] != (None,)


_KEEPS: dict[str, Callable[[Node, Sequence[Any]], bool]] = {
    "Einsum": _einsum,
    "GatherV2": _gathered,
    "StridedSlice": _strided,
    "ConcatV2": _axis_elsewhere(-1),
    "Split": _axis_elsewhere(0),
    "SplitV": _axis_elsewhere(2),
    "Transpose": lambda _node, values: values[1][0] == 0,
    "MatMul": lambda node, _values: not node.attrs["transpose_a"].b,
    "Unpack": lambda node, _values: node.attrs["axis"].i != 0,
    "Squeeze": lambda node, _values: 0 not in (node.attrs["squeeze_dims"].list.i or (0,)),
    **dict.fromkeys(ops_with(Trait.PADDING), lambda _node, values: not np.any(values[1][0])),
    **dict.fromkeys(ops_with(Trait.REDUCTION), _reduced),
}
"""Conditions under which an op keeps the leading size. Ops without a row keep it always or never."""
