"""Whether micro-batches can be put together again: what joins samples of a batch, and how losses are added up.

A step in micro-batches is the same step if every sample goes its own way until losses are added up. BatchNormalization
is the usual exception; a loss that is divided by a sum of weights or masks is another one. A value without a batch
axis that is made of some with one is a sum over samples: it may be added to others, and scaled by what does not depend
on the batch. Whatever else is done with it, or that it meets single samples again, joins them.

Whether sums are means tells the step itself: it is traced for the batch and for a part of it, and what a mean divides
by is larger there by as much.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable
from typing import Any

import numpy as np

from rewriters.analysis import Analysis
from rewriters.graph import Node, Tensor
from rewriters.micro import Parts

__all__: list[str] = []

_SUM, _MEAN = 0, -1
"""Power of the number of micro-batches that their values, added up, are multiplied by to give that of the batch."""

_PASSES = frozenset(
    ("Cast", "CheckNumerics", "ExpandDims", "Identity", "Neg", "PreventGradient", "Reshape", "Snapshot", "Squeeze")
) | frozenset(("StopGradient", "Mean", "Sum"))
_ADDS = frozenset(("Add", "AddN", "AddV2", "Sub"))
_SCALES = frozenset(("DivNoNan", "Mul", "RealDiv"))
_CONTRACTS = frozenset(("BatchMatMulV2", "Einsum", "MatMul"))


@dataclasses.dataclass(frozen=True)
class Samples:
    """How samples of a batch come together.

    Attributes:
        joined: Forward operations, in order, after which samples do not go their own ways any more.
        is_mean: Of values that are added up over samples, whether they are means; not of those of which that is not
            known.
        unlike: Operations that add something that is not of the batch to a sum over it: micro-batches added up would
            have it several times.
    """

    joined: list[Node]
    is_mean: dict[Tensor, bool]
    unlike: list[Node]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the traces for the batch and for a part of it tell of a tensor.

    Attributes:
        scale: Whether its size goes with that of the batch.
        values: Of a tensor that is computed from constants, its value here and in the step as traced for the batch, if
            that is another trace; `None` for one that is not known.
        parts: Number of micro-batches.
    """

    scale: Callable[[Tensor], bool]
    values: Callable[[Tensor], tuple[Any, Any]]
    parts: int


def samples(analysis: Analysis, parts: Parts, sizes: Sizes, shape_only: Container[Node] = ()) -> Samples:
    """Find out how samples come together.

    Args:
        analysis: Of the step as traced for one micro-batch.
        parts: Its parts.
        sizes: What is known of sizes.
        shape_only: Operations that compute sizes.
    """
    return _Samples(analysis, parts, sizes, shape_only).run()


class _Samples:
    def __init__(self, analysis: Analysis, parts: Parts, sizes: Sizes, shape_only: Container[Node]) -> None:
        self.analysis = analysis
        self.parts = parts
        self.sizes = sizes
        self.even = {n for n in analysis.order if n in shape_only}
        self.found = Samples([], {}, [])
        self.power: dict[Tensor, int | None] = {}
        """Of sums over samples, and backward of all gradients."""

    def run(self) -> Samples:
        needed = self._needed()
        for node in self.analysis.order:
            if node in needed and not self._is_even(node):
                self._forward(node)
        gradients = {n for n in self.analysis.backward - self.parts.update - self.even if n.op != "Const"}
        for node in self.analysis.order:
            if node in gradients:
                self._backward(node, gradients)
        self.found.is_mean.update({t: power == _MEAN for t, power in self.power.items() if power is not None})
        return self.found

    def _needed(self) -> set[Node]:
        """Forward operations that gradients or results depend on, and that depend on the batch."""
        seen: set[Node] = set()
        stack = [t.node for t in (*self.parts.gradients, *self.analysis.graph.outputs)]
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                stack.extend(t.node for t in node.inputs)
        return {n for n in seen if n in self.parts.direct and n not in self.analysis.backward}

    def _is_even(self, node: Node) -> bool:
        """Whether a value is made of sizes and constants, and so is the same for all micro-batches."""
        if node.inputs and all(t.node in self.even or t.node.op == "Const" for t in node.inputs):
            self.even.add(node)
        return node in self.even

    # Forward --------------------------------------------------------------------------------------------------

    def _forward(self, node: Node) -> None:
        outs = [node.out(index) for index in range(len(node.outputs))]
        sums = [t for t in node.inputs if t in self.power]
        scales = any(map(self.sizes.scale, outs))
        if _is_batch_norm(node):
            self.found.joined.append(node)
        elif sums:
            power = self._of_sums(node, sums) if not scales and self._is_linear(node, sums) else ...
            if power is ...:
                self.found.joined.append(node)  # What follows is not looked at: it is named once.
            else:
                self.power.update(dict.fromkeys(outs, power))
        elif not scales:
            if node.op in ("Sum", "Mean") or node.op in _CONTRACTS:
                self.power.update(dict.fromkeys(outs, _MEAN if node.op == "Mean" else _SUM))
            elif any(map(self.sizes.scale, node.inputs)) and outs and outs[0].dtype.is_floating:
                self.found.joined.append(node)

    def _is_linear(self, node: Node, sums: list[Tensor]) -> bool:
        """Whether an operation on sums over samples gives such a sum again."""
        others = [t for t in node.inputs if t not in sums]
        if any(t.node in self.parts.direct and t.node not in self.even for t in others):
            return False
        if node.op in _PASSES | _ADDS:
            return True
        return node.op in _SCALES and len(sums) == 1 and (node.op == "Mul" or node.inputs[0] == sums[0])

    def _of_sums(self, node: Node, sums: list[Tensor]) -> int | None:
        power = self._same(self.power[t] for t in sums)
        others = [t for t in node.inputs if t not in sums]
        if node.op in _ADDS:
            if others and power == _SUM:
                self.found.unlike.append(node)
            return power
        return self._scaled(node, power, others)

    def _scaled(self, node: Node, power: int | None, others: Iterable[Tensor]) -> int | None:
        """The power after an operation that may scale by a size of the batch."""
        for other in others if node.op in _SCALES else ():
            ratio = self._ratio(other)
            if power is None or ratio is None:
                return None
            power += ratio if node.op == "Mul" else -ratio
        return power if power in (_SUM, _MEAN) else None

    def _ratio(self, tensor: Tensor) -> int | None:
        """Power of the number of micro-batches by which a value is larger for the batch; `None` if not known."""
        if tensor.node not in self.analysis.constants:
            return None if tensor.node in self.even else 0
        mine, whole = self.sizes.values(tensor)
        if mine is None or whole is None or np.shape(mine) != np.shape(whole):
            return None
        for ratio in (0, 1, -1):
            if np.allclose(whole, np.multiply(mine, float(self.sizes.parts) ** ratio), rtol=1e-6, atol=0):
                return ratio
        return None

    @staticmethod
    def _same(powers: Iterable[int | None]) -> int | None:
        several = set(powers)
        return several.pop() if len(several) == 1 else None

    # Backward -------------------------------------------------------------------------------------------------

    def _backward(self, node: Node, gradients: Container[Node]) -> None:
        """By what a gradient is larger for the batch than for a micro-batch, of one sample or added up."""
        incoming = [t for t in node.inputs if t.node in gradients]
        known = [self.power.get(t, _SUM) for t in incoming]
        power: int | None = self._same(known) if known else _SUM
        if node.op in _ADDS and power == _SUM and node in self.parts.direct:
            if any(t.node not in self.parts.direct and t.node.op != "Const" for t in incoming):
                self.found.unlike.append(node)
        elif node.op in _ADDS and len(incoming) > 1:  # A penalty's gradient is the same for a part of the batch.
            own = [self.power.get(t, _SUM) for t in incoming if t.node in self.parts.direct]
            power = self._same(own) if own else power
        power = self._scaled(node, power, [t for t in node.inputs if t not in incoming])
        for index in range(len(node.outputs)):
            self.power[node.out(index)] = power


def _is_batch_norm(node: Node) -> bool:
    return node.op.startswith("FusedBatchNorm") and "is_training" in node.attrs and bool(node.attrs["is_training"].b)
