"""Names the tensors, and the transient memory of ops, that make up a predicted peak, by layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.device.peak_memory import Peak
from rewriters.emission.tile_pass import SegmentPlan, loop_nodes
from rewriters.estimates.loop_memory import IterationModelCache, kernel_at_worst
from rewriters.ir.graph import LOOPS, Graph, Tensor
from tflms_sft._trace.layer_names import LayerRecord, part_name

__all__: list[str] = []

NamedSizes = tuple[tuple[str, int], ...]
"""(name, bytes), largest first."""


class PeakNames:
    """Display names of tensors and ops of a step.

    Args:
        analysis: Analysis of the original step.
        record: Its layer calls.
        layers: Layer names of the tensors that layers return.
    """

    def __init__(self, analysis: GraphAnalysis, record: LayerRecord, layers: Mapping[Tensor, str]) -> None:
        self._analysis = analysis
        self._record = record
        self._layers = layers

    def tensor(self, tensor: Tensor) -> str:
        """Return the layer that returns a tensor, else the layer and op that compute it, else its own name."""
        return self._layers.get(tensor) or self._op(tensor.node.name) or tensor.name

    def is_known(self, tensor: str) -> bool:
        """Tell whether the original step has a tensor of that name."""
        return tensor.rpartition(":")[0] in self._analysis.graph.nodes

    def tensor_called(self, name: str) -> str:
        """Return the display name of a tensor given by name, which may be from a rewritten graph."""
        if name in self._analysis.graph.nodes:
            return f"saved inside {self.loop(name)}"
        if not self.is_known(name):
            return name
        op, _, index = name.rpartition(":")
        return self.tensor(self._analysis.graph.nodes[op].out(int(index)))

    def loop(self, name: str) -> str:
        """Return a loop with the layer or the loss that it belongs to; else with its own name."""
        return f"the loop of {part_name(self._record, name) or f'`{name}`'}"

    def op(self, name: str) -> str:
        """Return the layer and type of an op, such as `conv1 (Conv2DBackpropFilter, backward)`; else its name."""
        return self._op(name) or name

    def _op(self, name: str) -> str:
        call, node = self._record.call_of(name), self._analysis.graph.nodes.get(name)
        if call is None or node is None:
            return ""
        return f"{call.layer} ({node.op}{', backward' if node in self._analysis.backward else ''})"


def largest_tensors(names: PeakNames, graph: Graph, peak: Peak) -> NamedSizes:
    """Return the largest tensors alive at a peak; outputs of loops are named after the tensors they replace.

    Args:
        names: Display names of the original step.
        graph: The rewritten graph, or its skeleton.
        peak: Predicted peak of that graph.
    """
    replaced = {new.name: old for old, new in graph.aliases.items() if names.is_known(old)}
    return tuple((names.tensor_called(replaced.get(name, name)), size) for name, size in peak.largest)


def saved_in_loops(names: PeakNames, graph: Graph, peak: Peak) -> NamedSizes:
    """Return the loops whose tensor lists are among the largest tensors at a peak, with the bytes of the lists."""
    return tuple((names.loop(name), size) for name, size in peak.largest if name in graph.nodes)


def transient_memory(
    names: PeakNames, plans: Sequence[SegmentPlan], graph: Graph, peak: Peak, memory: IterationModelCache, batch: int
) -> NamedSizes:
    """Return the memory in use at the peak only while its op runs: a loop iteration, and kernel scratch inside it.

    Args:
        names: Display names of the original step.
        plans: Its segments.
        graph: The rewritten graph, or its skeleton.
        peak: Predicted peak of that graph.
        memory: Models of loop iterations.
        batch: Batch size.

    Returns:
        Nothing, or the iteration or the scratch; or both, where the scratch is a part of the iteration.
    """
    if not peak.own_bytes:
        return ()
    loops = loop_nodes(graph)
    for plan in plans:
        for tile_loop in plan.loops:
            if loops.get((plan.segment.name, tile_loop.name)) == peak.at:
                sides = plan.segment.entries, plan.segment.exits
                ends = " -> ".join(", ".join(map(names.tensor, side)) for side in sides if side)
                iteration = f"an iteration of {plan.segment.name}/{tile_loop.name} ({ends})", peak.own_bytes
                op, scratch_bytes = kernel_at_worst(memory.iterations(tile_loop, batch))
                return (iteration, (_scratch(names, op), scratch_bytes)) if scratch_bytes else (iteration,)
    node = graph.nodes.get(peak.at)
    if node is not None and node.op in LOOPS:
        return ((f"an iteration of {names.loop(peak.at)}", peak.own_bytes),)
    return ((_scratch(names, peak.at), peak.own_bytes),)


def _scratch(names: PeakNames, op: str) -> str:
    return f"kernel scratch of {names.op(op)}"
