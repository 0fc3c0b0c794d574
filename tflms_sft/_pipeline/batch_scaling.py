"""Comparison of the trace for the batch with the trace for a micro-batch: sizes and static values that differ."""

from __future__ import annotations

from typing import Any

from rewriters.analysis.constant_folding import ConstantFolder
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.batch_semantics import TraceComparison
from rewriters.canonicalize.canonicalize import CanonicalMode, read_canonical
from rewriters.ir.graph import Node, Tensor
from rewriters.ir.static_values import StaticEvaluator
from rewriters.pipelining.micro_batch_reduction import BatchGrowth
from tflms_sft._trace.batch_traces import BatchTraces


class BatchScaling:
    """Compares a step for the batch with the step for a micro-batch.

    Two traces of one function give an op one name, by which sizes and values are compared.

    Args:
        traces: Traces of the step.
        analysis: Analysis of the step for a micro-batch.
        mode: Canonicalization that the analysis was read with.
    """

    def __init__(
        self, traces: BatchTraces, analysis: GraphAnalysis, mode: CanonicalMode = CanonicalMode.BATCH_ANALYSIS
    ) -> None:
        self._traces = traces
        self._whole = analysis.graph.nodes
        self._evaluate = self._evaluate_whole = analysis.evaluate
        self._fold = self._fold_whole = ConstantFolder(analysis.graph)
        if traces.micro is not traces.whole:
            graph = read_canonical(traces.whole, mode)
            self._whole = graph.nodes
            self._evaluate_whole = StaticEvaluator(graph)
            self._fold_whole = ConstantFolder(graph)
        pairs = zip(traces.micro.outputs, traces.whole.outputs, strict=True)
        shapes = [tuple(tuple(t.shape) if t.shape.rank is not None else None for t in pair) for pair in pairs]
        self._outputs = dict(zip(analysis.graph.outputs, shapes, strict=True))
        inputs = traces.micro.inputs
        self._samples = next((inputs[p].shape[0] for p in traces.batched if inputs[p].shape.rank), None)

    def comparison(self) -> TraceComparison:
        """Return the comparison that batch semantics reads."""
        return TraceComparison(self.whole_shape, self.values, self.growth, self._traces.count, self._samples)

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
            if size is None or batch_size is None or batch_size not in (size, size * self._traces.count):
                return None
            if batch_size != size:
                axes.append(axis)
        has_rows = axes[:1] == [0] and self._samples and here[0] % self._samples == 0
        return BatchGrowth(tuple(axes), here[0] // self._samples if has_rows else 0)


def _static_value(tensor: Tensor, fold: ConstantFolder, evaluate: StaticEvaluator) -> Any:
    """Return the numbers that a tensor holds, or the symbolic size; `None` if unknown."""
    value = fold(tensor)
    if value is not None:
        return value
    while tensor.node.op in ("Cast", "Identity"):
        tensor = tensor.node.inputs[0]
    return evaluate(tensor)
