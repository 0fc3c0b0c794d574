"""How much arithmetic a plan adds, from the op rules.

Convolutions count their multiplications, everything else counts the bytes it
touches at an exchange rate. Only ratios of costs are used.
"""

from __future__ import annotations

from collections.abc import Iterable

from rewriters.analysis import Analysis
from rewriters.errors import NotTileableError
from rewriters.graph import Node
from rewriters.registry import find_rule
from rewriters.tiles import Phase

__all__: list[str] = []

FLOPS_PER_BYTE = 8.0
"""Arithmetic that takes as long as moving one byte, on machines of this decade within a factor of two."""


def op_cost(analysis: Analysis, node: Node, batch: int) -> float:
    """Cost of the full-size op."""
    if (node, batch) not in analysis.costs:
        analysis.costs[node, batch] = _op_cost(analysis, node, batch)
    return analysis.costs[node, batch]


def _op_cost(analysis: Analysis, node: Node, batch: int) -> float:
    moved = sum(node.out(i).num_bytes(batch) for i in range(len(node.outputs)))
    moved += sum(t.num_bytes(batch) for t in node.inputs)
    try:
        flops = find_rule(node).flops(analysis.view(node), batch)
    except NotTileableError:
        flops = 0.0
    return flops + FLOPS_PER_BYTE * moved


def step_cost(analysis: Analysis, nodes: Iterable[Node], batch: int) -> float:
    """Cost of many full-size ops."""
    return sum(op_cost(analysis, node, batch) for node in nodes)


def phase_cost(analysis: Analysis, phase: Phase, batch: int) -> float:
    """Cost of all turns of a loop: every op by the part of the image that it covers, halos included."""
    return sum(turn_cost(analysis, phase, node, batch) for node in phase.body)


def turn_cost(analysis: Analysis, phase: Phase, node: Node, batch: int) -> float:
    """Cost of one op in all turns of a loop."""
    return op_cost(analysis, node, batch) * _coverage(analysis, phase, node)


def overlapped_bytes(analysis: Analysis, phase: Phase, batch: int) -> int:
    """Bytes of images that the turns of a loop make more than once."""
    extra = 0.0
    for node in phase.body:
        results = (node.out(index) for index in range(len(node.outputs)))
        made = sum(tensor.num_bytes(batch) for tensor in results if tensor in phase.regions)
        extra += max(_coverage(analysis, phase, node) - 1, 0) * made
    return int(extra)


def _coverage(analysis: Analysis, phase: Phase, node: Node) -> float:
    """Rows times columns that an op runs on in all turns, over those of the image."""
    result = 1.0
    worked = find_rule(node).work(analysis.view(node))
    for axis, plan in enumerate(phase.plans[node]):
        rows, tensor = plan.out, node.out()
        if worked is not None:
            rows, tensor = plan.needs[worked], node.inputs[worked]
        elif rows is None:
            position = next(p for p, need in reversed(list(enumerate(plan.needs))) if need is not None)
            rows, tensor = plan.needs[position], node.inputs[position]
        assert rows is not None
        extent = analysis.view(node).extent(tensor, axis)
        result *= float(rows.size.sum()) / extent
    return result
