"""Which sizes and numbers of a step go with the size of the batch, by two traces of it."""

from __future__ import annotations

from typing import Any

from rewriters.analysis.constant_folding import ConstantFolder
from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.canonicalize.canonicalize import CanonicalMode, read_canonical
from rewriters.ir.graph import Node, Tensor
from rewriters.ir.static_values import StaticEvaluator
from rewriters.ir.symbolic_dims import SymbolicDim
from rewriters.pipelining.micro_batch_reduction import BatchGrowth
from tflms_sft._trace.batch_traces import BatchTraces


class BatchScaling:
    """Whether a tensor's size goes with that of the batch.

    Two traces of one function name what they make alike, so that sizes can be compared.
    """

    def __init__(
        self, traces: BatchTraces, analysis: GraphAnalysis, mode: CanonicalMode = CanonicalMode.BATCH_ANALYSIS
    ) -> None:
        self._traces = traces
        self._sizes = analysis.evaluate.sizes
        self._whole: dict[str, Node] = {}
        self._evaluate = self._evaluate_whole = analysis.evaluate
        self._known = self._known_whole = ConstantFolder(analysis.graph)
        if traces.micro is not traces.whole:
            graph = read_canonical(traces.whole, mode)
            self._whole = graph.nodes
            self._evaluate_whole = StaticEvaluator(graph)
            self._known_whole = ConstantFolder(graph)
        self._outputs = _by_result(analysis, traces.whole)
        self._compared = analysis.graph.nodes, self._whole
        self._compared_outputs = _by_result(analysis, traces.micro), self._outputs
        if traces.known is not None:
            pair = traces.known.micro, traces.known.whole
            self._compared = tuple(read_canonical(one, mode).nodes for one in pair)  # type: ignore[assignment]
            self._compared_outputs = tuple(_by_result(analysis, one) for one in pair)  # type: ignore[assignment]
        inputs = (traces.known or traces).micro.inputs
        self._samples = next((inputs[p].shape[0] for p in traces.batched if inputs[p].shape.rank), None)

    def counterpart(self, node: Node) -> Node | None:
        """The operation of that name in the step for the batch; a captured constant has a number for a name."""
        if not self._whole:
            return node
        if node.op == "Const" and node.name.isdigit() and node.name not in self._whole:
            captured = (n for n in self._whole.values() if n.op == "Const" and n.name.isdigit())
            return next((n for n in captured if n.attrs["value"] == node.attrs["value"]), None)
        return self._whole.get(node.name)

    def values(self, tensor: Tensor) -> tuple[Any, Any]:
        """The value of a tensor that is computed from constants and sizes, here and there."""
        whole = self.counterpart(tensor.node)
        here = _value(tensor, self._known, self._evaluate)
        if whole is None or tensor.index >= len(whole.outputs):
            return here, None
        return here, _value(whole.out(tensor.index), self._known_whole, self._evaluate_whole)

    def whole_shape(self, tensor: Tensor) -> Any:
        """The shape of a tensor in that trace."""
        other = self._whole.get(tensor.node.name)
        if tensor in self._outputs:
            return self._outputs[tensor]
        return tensor.shape if other is None or tensor.index >= len(other.outputs) else other.outputs[tensor.index][1]

    def growth(self, tensor: Tensor) -> BatchGrowth | None:
        """How much larger it is there; `None` if not just longer along some axes by the number of micro-batches."""
        if not self._compared[1]:
            return self._open_growth(tensor)
        here, whole = self._shapes(tensor)
        if here is None or whole is None or len(here) != len(whole):
            return None
        axes = []
        for axis, (size, of_batch) in enumerate(zip(here, whole, strict=True)):
            if size is None or of_batch is None or of_batch not in (size, size * self._traces.count):
                return None
            if of_batch != size:
                axes.append(axis)
        whole_rows = axes[:1] == [0] and self._samples and here[0] % self._samples == 0
        return BatchGrowth(tuple(axes), here[0] // self._samples if whole_rows else 0)

    def _shapes(self, tensor: Tensor) -> tuple[Any, Any]:
        """Its shapes in two traces for known sizes; results are the same one by their place."""
        if tensor in self._outputs:
            return tuple(outputs[tensor] for outputs in self._compared_outputs)
        here, whole = (nodes.get(tensor.node.name) for nodes in self._compared)
        if here is None or whole is None or max(tensor.index + 1, len(here.outputs)) > len(whole.outputs):
            return None, None
        if here.op != tensor.node.op or not _may_be(tensor.shape, here.outputs[tensor.index][1]):
            return None, None  # A step for any batch makes something else under that name.
        return here.outputs[tensor.index][1], whole.outputs[tensor.index][1]

    def _open_growth(self, tensor: Tensor) -> BatchGrowth | None:
        """The same of a step that there is one trace of."""
        if tensor.shape is None or None in tensor.shape[1:]:
            return None
        if None not in tensor.shape:
            return BatchGrowth(())
        size = self._sizes.of(tensor)
        of_batch = isinstance(size, SymbolicDim) and not size.arguments.isdisjoint(self._traces.batched)
        return BatchGrowth((0,), 1) if of_batch else None


def _may_be(shape: Any, known: Any) -> bool:
    """Whether an open shape may be a known one."""
    if shape is None or known is None:
        return True
    return len(shape) == len(known) and all(a is None or a == b for a, b in zip(shape, known, strict=True))


def _by_result(analysis: GraphAnalysis, concrete_fn: Any) -> dict[Tensor, Any]:
    """Shapes of the results of a trace, by what they are in the analysis."""
    results = zip(analysis.graph.outputs, concrete_fn.outputs, strict=True)
    return {own: tuple(t.shape) if t.shape.rank is not None else None for own, t in results}


def _value(tensor: Tensor, known: ConstantFolder, evaluate: StaticEvaluator) -> Any:
    """The numbers that a tensor holds, or the size that it is."""
    found = known(tensor)
    if found is not None:
        return found
    while tensor.node.op in ("Cast", "Identity"):
        tensor = tensor.node.inputs[0]
    return evaluate(tensor)
