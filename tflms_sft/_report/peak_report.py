"""Names the tensors, and the transient memory of ops, that make up a predicted peak, by layers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.device.peak_memory import Peak
from rewriters.emission.loop_tensors import loop_output_tensors
from rewriters.emission.tile_pass import SegmentPlan, loop_nodes
from rewriters.estimates.loop_memory import IterationModelCache, kernel_at_worst
from rewriters.ir.graph import BRANCHES, LOOPS, Graph, Node, Tensor
from tflms_sft._report.op_names import loop_text
from tflms_sft._trace.layer_names import LayerCall, LayerRecord, part_name

__all__: list[str] = []

FRAGMENTATION = "free chunks between tensors (fragmentation)"
"""Name of `Peak.fragmentation_bytes`."""

NamedSizes = tuple[tuple[str, int], ...]
"""(name, bytes), largest first."""

_SWAPPED_IN = re.compile(r"lms/(.+)/swap_in_\d+(?::\d+)?")
"""Names of the tensors that `insert_swaps` adds. That of the swapped tensor lacks `:0`, or has `_` for `:`."""

_LOOP_OUTPUT = re.compile(r"(?:micro_\d+/)?sft/([^/]+)/([^/]+)/while:(\d+)")
"""Names of outputs of tile loops: segment, loop and position. Most outputs replace tensors of the original step."""


class PeakNames:
    """Display names of tensors and ops of a step, from its layer calls and the names of tensors that layers return."""

    def __init__(self, analysis: GraphAnalysis, record: LayerRecord, layers: Mapping[Tensor, str]) -> None:
        self._analysis = analysis
        self._record = record
        self._layers = layers

    def tensor(self, tensor: Tensor) -> str:
        """Return the layer that returns a tensor, else the layer and op that compute it."""
        return self._layers.get(tensor) or self.op(tensor.node.name)

    def is_known(self, tensor: str) -> bool:
        """Tell whether the original step has a tensor of that name."""
        return tensor.rpartition(":")[0] in self._analysis.graph.nodes

    def tensor_called(self, name: str, graph: Graph) -> str:
        """Return the display name of a tensor given by name, or of the lists of a loop.

        Args:
            name: Name of the tensor, or of the loop.
            graph: Graph that it is from: the original one, or one with loops or swaps. Outputs of tile loops are named
                after the tensors they replace.
        """
        if name in self._analysis.graph.nodes:
            return f"saved inside {self.loop(name)}"
        replaced = {new.name: old for old, new in graph.aliases.items() if self.is_known(old)}
        swapped_in = _SWAPPED_IN.fullmatch(name)
        for source in _sources(swapped_in[1]) if swapped_in else (name,):
            original = replaced.get(source, source)
            if self.is_known(original):
                op, _, index = original.rpartition(":")
                shown = self.tensor(self._analysis.graph.nodes[op].out(int(index)))
                return f"{shown}, swapped in" if swapped_in else shown
            output = _LOOP_OUTPUT.fullmatch(source)
            if output:
                text = f"output {output[3]} of the {loop_text(output[1], output[2])}"
                return f"{text}, swapped in" if swapped_in else text
        return name

    def in_text(self, text: str, graph: Graph) -> str:
        """Return a text with display names for the names in backticks: the layer of an op, a tensor of `graph`."""

        def shown(match: re.Match[str]) -> str:
            name, call = match[1], self._record.call_of(match[1])
            if name in self._analysis.graph.nodes:
                return f"`{name if call is None else call.layer}`"
            return f"`{self.tensor_called(name, graph)}`"

        return re.sub("`([^`]+)`", shown, text)

    def element(self, loop: str, element: Tensor) -> str:
        """Return the display name of a tensor that a loop computes, or receives, in every iteration."""
        call = self._record.call_of(loop)
        part = "a state" if element.node.op == "Placeholder" else element.node.op
        return f"{loop if call is None else call.layer} ({part}) in every iteration"

    def loop(self, name: str) -> str:
        """Return a loop with the layer or the loss that it belongs to; else with its own name."""
        return f"the loop of {part_name(self._record, name) or f'`{name}`'}"

    def op(self, name: str) -> str:
        """Return the layer and type of an op, such as `conv1 (Conv2DBackpropFilter, backward)`.

        An op outside of layers is described by its name and type, an argument by its name.
        """
        node = self._analysis.graph.nodes.get(name)
        if node is None:
            return name
        if node.op == "Placeholder" and node.out() in self._analysis.graph.inputs:
            return f"argument {name!r} of the step"
        call = self._record.call_of(name) or self._call_of_gradients(node)
        layer = part_name(self._record, name) if call is None else call.layer
        if not layer:
            return f"op {name!r} ({node.op})"
        return f"{layer} ({node.op}{', backward' if node in self._analysis.backward else ''})"

    def _call_of_gradients(self, node: Node) -> LayerCall | None:
        """Return the layer call whose gradients alone read an op, such as the zeros for a result that has none."""
        outputs = (node.out(index) for index in range(len(node.outputs)))
        readers = {reader for tensor in outputs for reader, _ in self._analysis.consumers.get(tensor, ())}
        calls = [self._record.call_of(reader.name) for reader in readers]
        same = bool(calls) and readers <= self._analysis.backward and all(call is calls[0] for call in calls)
        return calls[0] if same else None


def _sources(base: str) -> list[str]:
    """Return the possible names of a swapped tensor, given the scope of its swaps."""
    op, _, index = base.rpartition("_")
    return [f"{base}:0", *([f"{op}:{index}"] if index.isdigit() else [])]


def largest_tensors(names: PeakNames, plans: Sequence[SegmentPlan], graph: Graph, peak: Peak) -> NamedSizes:
    """Return the largest tensors alive at the peak of a rewritten graph, or of its skeleton, with display names."""
    results = _loop_results(names, plans, graph)
    return tuple((results.get(name) or names.tensor_called(name, graph), size) for name, size in peak.largest)


def _loop_results(names: PeakNames, plans: Sequence[SegmentPlan], graph: Graph) -> dict[str, str]:
    """Return the display names of the results of tile loops in a skeleton, whose outputs are in a known order."""
    loops = loop_nodes(graph)
    shown: dict[str, str] = {}
    for plan in plans:
        for tile_loop in plan.loops:
            node = graph.nodes.get(loops.get((plan.segment.name, tile_loop.name), ""))
            results = loop_output_tensors(tile_loop)
            if node is not None and len(node.outputs) == len(results):
                saved = {save.saved: f"halo rows of {names.tensor(save.tensor)}" for save in tile_loop.saves}
                texts = (saved.get(tensor) or names.tensor(tensor) for tensor in results)
                shown.update({node.out(index).name: text for index, text in enumerate(texts)})
    return shown


def saved_in_loops(names: PeakNames, graph: Graph, peak: Peak) -> NamedSizes:
    """Return the loops whose tensor lists are among the largest tensors at a peak, with the bytes of the lists."""
    return tuple((names.loop(name), size) for name, size in peak.largest if name in graph.nodes)


def transient_memory(
    names: PeakNames, plans: Sequence[SegmentPlan], graph: Graph, peak: Peak, memory: IterationModelCache, batch: int
) -> NamedSizes:
    """Return the memory in use at the peak only while its op runs: a loop iteration, and kernel scratch inside it.

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
                loop = loop_text(plan.segment.name, tile_loop.name)
                iteration = f"an iteration of the {loop} ({ends})", peak.own_bytes
                op, scratch_bytes = kernel_at_worst(memory.iterations(tile_loop, batch))
                return (iteration, (_scratch(names, op, graph), scratch_bytes)) if scratch_bytes else (iteration,)
    node = graph.nodes.get(peak.at)
    if node is not None and node.op in LOOPS:
        return ((f"an iteration of {names.loop(peak.at)}", peak.own_bytes),)
    if node is not None and node.op in BRANCHES:
        return ((f"a branch of {names.op(peak.at)}", peak.own_bytes),)
    return ((_scratch(names, peak.at, graph), peak.own_bytes),)


def _scratch(names: PeakNames, op: str, graph: Graph) -> str:
    parts = " (copies, cuDNN workspace)" if graph.device.is_gpu else ""
    return f"kernel scratch{parts} of {names.op(op)}"
