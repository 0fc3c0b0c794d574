"""What a peak is made of, by the names of layers: tensors, and what is taken only while something runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.device.peak_memory import Peak
from rewriters.emission.tile_pass import SegmentPlan, loop_nodes
from rewriters.estimates.loop_memory import IterationModelCache, kernel_at_worst
from rewriters.ir.graph import Graph, Tensor
from tflms_sft._trace.layer_names import LayerRecord

__all__: list[str] = []

Sizes = tuple[tuple[str, int], ...]
"""(what, bytes), largest first."""


class PeakNames:
    """Names to print.

    Args:
        analysis: Of a step.
        record: Layers that were seen while it was traced.
        layers: Names of tensors that are what a layer returns.
    """

    def __init__(self, analysis: GraphAnalysis, record: LayerRecord, layers: Mapping[Tensor, str]) -> None:
        self._analysis = analysis
        self._record = record
        self._layers = layers

    def tensor(self, tensor: Tensor) -> str:
        """A layer if it returns the tensor, else what makes it."""
        return self._layers.get(tensor) or self._op(tensor.node.name) or tensor.name

    def is_known(self, tensor: str) -> bool:
        """Whether the original has a tensor of that name."""
        return tensor.rpartition(":")[0] in self._analysis.graph.nodes

    def tensor_called(self, name: str) -> str:
        """The same for a name, which may be one of a rewritten graph."""
        if not self.is_known(name):
            return name
        op, _, index = name.rpartition(":")
        return self.tensor(self._analysis.graph.nodes[op].out(int(index)))

    def op(self, name: str) -> str:
        """The layer with what it runs, such as `conv1 (Conv2DBackpropFilter, backward)`."""
        return self._op(name) or name

    def _op(self, name: str) -> str:
        call, node = self._record.call_of(name), self._analysis.graph.nodes.get(name)
        if call is None or node is None:
            return ""
        return f"{call.layer} ({node.op}{', backward' if node in self._analysis.backward else ''})"


def largest(names: PeakNames, graph: Graph, peak: Peak) -> Sizes:
    """The largest tensors; those that loops made by what they are in the original.

    Args:
        names: Of the original.
        graph: The rewritten graph, or an outline of it.
        peak: Of that graph.
    """
    made = {new.name: old for old, new in graph.aliases.items() if names.is_known(old)}
    return tuple((names.tensor_called(made.get(name, name)), size) for name, size in peak.largest)


def own(
    names: PeakNames, plans: Sequence[SegmentPlan], graph: Graph, peak: Peak, memory: IterationModelCache, batch: int
) -> Sizes:
    """What is taken only while the op at the worst moment runs: a turn of a loop, kernels' own memory (in it)."""
    if not peak.own_bytes:
        return ()
    loops = loop_nodes(graph)
    for plan in plans:
        for tile_loop in plan.loops:
            if loops.get((plan.segment.name, tile_loop.name)) == peak.at:
                sides = plan.segment.entries, plan.segment.exits
                ends = " -> ".join(", ".join(map(names.tensor, side)) for side in sides if side)
                turn = f"a turn of {plan.segment.name}/{tile_loop.name} ({ends})", peak.own_bytes
                op, taken = kernel_at_worst(memory.iterations(tile_loop, batch))
                return (turn, (_kernel(names, op), taken)) if taken else (turn,)
    return ((_kernel(names, peak.at), peak.own_bytes),)


def _kernel(names: PeakNames, op: str) -> str:
    return f"kernels' own memory in {names.op(op)}"
