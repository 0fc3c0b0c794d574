"""Comparison of the trace for the batch with the trace for a micro-batch: sizes and static values that differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rewriters.analysis.constant_folding import ConstantFolder
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize.canonicalize import CanonicalMode, read_canonical
from rewriters.ir.graph import Node, Tensor
from rewriters.ir.static_values import StaticEvaluator
from rewriters.pipelining.micro_batch_reduction import BatchGrowth

__all__: list[str] = []


@dataclasses.dataclass(frozen=True)
class BatchAxis:
    """Position of the samples in a tensor.

    Attributes:
        dim: Dimension.
        repeats: Number of whole batches that follow each other along it; `None` if that does not matter.
        entries: Number of consecutive entries of one sample in it.
    """

    dim: int
    repeats: int | None = None
    entries: int | None = None

    def moved(self, dim: int) -> BatchAxis:
        """Return this axis in another dimension."""
        return dataclasses.replace(self, dim=dim)


class TraceComparison:
    """Compares a step for the batch with the step for a micro-batch.

    Two traces of one function give an op one name, by which sizes and values are compared.

    Args:
        analysis: Analysis of the step for a micro-batch.
        micro: Trace for a micro-batch.
        whole: Trace for the batch.
        batched: Positions of the arguments that have the batch axis.
        count: Number of micro-batches.
        mode: Canonicalization that the analysis was read with.

    Attributes:
        count: Number of micro-batches.
        samples: Samples of a micro-batch; `None` if unknown.
    """

    def __init__(
        self,
        analysis: GraphAnalysis,
        micro: Any,
        *,
        whole: Any,
        batched: Sequence[int],
        count: int,
        mode: CanonicalMode = CanonicalMode.BATCH_ANALYSIS,
    ) -> None:
        self.count = count
        self.samples = next((micro.inputs[p].shape[0] for p in batched if micro.inputs[p].shape.rank), None)
        self._whole = analysis.graph.nodes
        self._evaluate = self._evaluate_whole = analysis.evaluate
        self._fold = self._fold_whole = ConstantFolder(analysis.graph)
        if micro is not whole:
            graph = read_canonical(whole, mode)
            self._whole = graph.nodes
            self._evaluate_whole = StaticEvaluator(graph)
            self._fold_whole = ConstantFolder(graph)
        pairs = zip(micro.outputs, whole.outputs, strict=True)
        shapes = [tuple(tuple(t.shape) if t.shape.rank is not None else None for t in pair) for pair in pairs]
        self._outputs = dict(zip(analysis.graph.outputs, shapes, strict=True))

    def counterpart(self, node: Node) -> Node | None:
        """Return the op of the step for the batch that corresponds to an op; `None` if there is none.

        A captured constant is named by a number, and found by its value.
        """
        if node.op == "Const" and node.name.isdigit() and node.name not in self._whole:
            captured = (n for n in self._whole.values() if n.op == "Const" and n.name.isdigit())
            return next((n for n in captured if n.attrs["value"] == node.attrs["value"]), None)
        return self._whole.get(node.name)

    def values(self, tensor: Tensor) -> tuple[Any, Any]:
        """Return the static values of a tensor for a micro-batch and for the batch; `None` for an unknown one."""
        whole = self.counterpart(tensor.node)
        here = _static_value(tensor, self._fold, self._evaluate)
        if whole is None or tensor.index >= len(whole.outputs):
            return here, None
        return here, _static_value(whole.out(tensor.index), self._fold_whole, self._evaluate_whole)

    def whole_shape(self, tensor: Tensor) -> Any:
        """Return the shape of a tensor in the trace for the batch; its own if that has no such tensor."""
        if tensor in self._outputs:
            return self._outputs[tensor][1]
        other = self._whole.get(tensor.node.name)
        return tensor.shape if other is None or tensor.index >= len(other.outputs) else other.outputs[tensor.index][1]

    def growth(self, tensor: Tensor) -> BatchGrowth | None:
        """Return the axes along which a tensor is as many times longer for the batch as there are micro-batches.

        `None` stands for any other difference, and for unknown sizes.
        """
        here, whole = self._outputs.get(tensor, (tensor.shape, self.whole_shape(tensor)))
        other = self._whole.get(tensor.node.name)
        if tensor not in self._outputs and (other is None or other.op != tensor.node.op):
            return None
        if here is None or whole is None or len(here) != len(whole):
            return None
        axes = []
        for axis, (size, batch_size) in enumerate(zip(here, whole, strict=True)):
            if size is None or batch_size is None or batch_size not in (size, size * self.count):
                return None
            if batch_size != size:
                axes.append(axis)
        has_rows = axes[:1] == [0] and self.samples and here[0] % self.samples == 0
        return BatchGrowth(tuple(axes), here[0] // self.samples if has_rows else 0)

    def batch_dims(self, tensor: Tensor) -> tuple[set[int], set[int]]:
        """Return the dimensions that grow with the batch, and those of unknown size."""
        if tensor.shape is None:
            return set(), set()
        whole = self.whole_shape(tensor)
        if whole is None or len(whole) != len(tensor.shape):
            whole = tensor.shape
        pairs = list(enumerate(zip(tensor.shape, whole, strict=True)))
        return {d for d, (a, b) in pairs if a is not None and a != b}, {d for d, (a, _) in pairs if a is None}

    def axis(self, tensor: Tensor) -> BatchAxis | None:
        """Return the axis along which a tensor grows with the batch, by sizes alone; `None` if none is known."""
        grown, unknown = self.batch_dims(tensor)
        dims = grown or (unknown if len(unknown) == 1 else set())
        return BatchAxis(min(dims)) if dims else None


def _static_value(tensor: Tensor, fold: ConstantFolder, evaluate: StaticEvaluator) -> Any:
    """Return the numbers that a tensor holds, or the symbolic size; `None` if unknown."""
    value = fold(tensor)
    if value is not None:
        return value
    while tensor.node.op in ("Cast", "Identity"):
        tensor = tensor.node.inputs[0]
    return evaluate(tensor)
