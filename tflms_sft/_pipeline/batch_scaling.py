"""Comparison of the trace for the batch with the trace for a micro-batch: sizes and static values that differ."""

from __future__ import annotations

from typing import Any

from rewriters.analysis.constant_folding import ConstantFolder
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.batch_semantics import TraceComparison
from rewriters.canonicalize.canonicalize import CanonicalMode, read_canonical
from rewriters.ir.graph import Node, Tensor
from rewriters.ir.static_values import StaticEvaluator
from rewriters.ir.symbolic_dims import SymbolicDim
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
        self._sizes = analysis.evaluate.sizes
        self._whole: dict[str, Node] = {}
        self._evaluate = self._evaluate_whole = analysis.evaluate
        self._fold = self._fold_whole = ConstantFolder(analysis.graph)
        if traces.micro is not traces.whole:
            graph = read_canonical(traces.whole, mode)
            self._whole = graph.nodes
            self._evaluate_whole = StaticEvaluator(graph)
            self._fold_whole = ConstantFolder(graph)
        self._outputs = _shapes_of_outputs(analysis, traces.whole)
        self._compared = analysis.graph.nodes, self._whole
        self._compared_outputs = _shapes_of_outputs(analysis, traces.micro), self._outputs
        if traces.known is not None:
            pair = traces.known.micro, traces.known.whole
            self._compared = tuple(read_canonical(one, mode).nodes for one in pair)  # type: ignore[assignment]
            self._compared_outputs = tuple(_shapes_of_outputs(analysis, one) for one in pair)  # type: ignore[assignment]
        inputs = (traces.known or traces).micro.inputs
        self._samples = next((inputs[p].shape[0] for p in traces.batched if inputs[p].shape.rank), None)

    def comparison(self) -> TraceComparison:
        """Return the comparison that batch semantics reads."""
        samples = self._traces.batch // self._traces.count if self._traces.batch else None
        return TraceComparison(self.whole_shape, self.values, self.growth, self._traces.count, samples)

    def counterpart(self, node: Node) -> Node | None:
        """Return the op of the step for the batch that corresponds to an op; `None` if there is none.

        A captured constant is named by a number, and found by its value.
        """
        if not self._whole:
            return node
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
        """Return the shape of a tensor in the trace for the batch."""
        other = self._whole.get(tensor.node.name)
        if tensor in self._outputs:
            return self._outputs[tensor]
        return tensor.shape if other is None or tensor.index >= len(other.outputs) else other.outputs[tensor.index][1]

    def growth(self, tensor: Tensor) -> BatchGrowth | None:
        """Return the axes along which a tensor is as many times longer for the batch as there are micro-batches.

        `None` stands for any other difference, and for unknown sizes.
        """
        if not self._compared[1]:
            return self._symbolic_growth(tensor)
        here, whole = self._shapes(tensor)
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

    def _shapes(self, tensor: Tensor) -> tuple[Any, Any]:
        """Return the shapes of a tensor in two traces for known sizes; outputs correspond by position."""
        if tensor in self._outputs:
            return tuple(outputs[tensor] for outputs in self._compared_outputs)
        here, whole = (nodes.get(tensor.node.name) for nodes in self._compared)
        if here is None or whole is None or max(tensor.index + 1, len(here.outputs)) > len(whole.outputs):
            return None, None
        if here.op != tensor.node.op or not _is_compatible(tensor.shape, here.outputs[tensor.index][1]):
            return None, None  # In the step for any batch size the name belongs to another op.
        return here.outputs[tensor.index][1], whole.outputs[tensor.index][1]

    def _symbolic_growth(self, tensor: Tensor) -> BatchGrowth | None:
        """Return the growth of a tensor in a step with one trace, by symbolic sizes."""
        if tensor.shape is None or None in tensor.shape[1:]:
            return None
        if None not in tensor.shape:
            return BatchGrowth(())
        size = self._sizes.of(tensor)
        is_batch = isinstance(size, SymbolicDim) and not size.arguments.isdisjoint(self._traces.batched)
        return BatchGrowth((0,), 1) if is_batch else None


def _is_compatible(shape: Any, known: Any) -> bool:
    """Return whether an open shape may be a known one."""
    if shape is None or known is None:
        return True
    return len(shape) == len(known) and all(a is None or a == b for a, b in zip(shape, known, strict=True))


def _shapes_of_outputs(analysis: GraphAnalysis, concrete_fn: Any) -> dict[Tensor, Any]:
    """Return the shapes of the outputs of a trace, by the corresponding tensors of the analysis."""
    outputs = zip(analysis.graph.outputs, concrete_fn.outputs, strict=True)
    return {tensor: tuple(t.shape) if t.shape.rank is not None else None for tensor, t in outputs}


def _static_value(tensor: Tensor, fold: ConstantFolder, evaluate: StaticEvaluator) -> Any:
    """Return the numbers that a tensor holds, or the symbolic size; `None` if unknown."""
    value = fold(tensor)
    if value is not None:
        return value
    while tensor.node.op in ("Cast", "Identity"):
        tensor = tensor.node.inputs[0]
    return evaluate(tensor)
