"""How much arithmetic a plan adds, from the op rules.

Convolutions count their arithmetic, and every op the bytes that it touches at an
exchange rate. Only ratios of costs are used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from rewriters.analysis import Analysis
from rewriters.errors import NotTileableError
from rewriters.graph import Node, Tensor
from rewriters.registry import find_rule
from rewriters.tiles import Phase

__all__: list[str] = []

FLOPS_PER_BYTE = 8.0
"""Arithmetic that takes as long as moving one byte, on machines of this decade within a factor of two."""


FILTER_FACTOR = 5.0
"""Cost of moving a byte of a convolution's filter, or of its gradient, over that of other bytes.

Kernels have a layout of their own for it, so that it is read and written before it is read, each time in memory that is
new to them. Measured on a CPU, by the time that convolutions over ever fewer rows keep.
"""


def op_cost(analysis: Analysis, node: Node, batch: int) -> float:
    """Cost of the full-size op."""
    return _flops_and_cost(analysis, node, batch)[1]


def _flops_and_cost(analysis: Analysis, node: Node, batch: int) -> tuple[float, float]:
    if (node, batch) not in analysis.costs:
        try:
            flops = find_rule(node).flops(analysis.view(node), batch)
        except NotTileableError:
            flops = 0.0
        moved = sum(t.num_bytes(batch) for t in _tensors(node))
        analysis.costs[node, batch] = flops, flops + FLOPS_PER_BYTE * moved
    return analysis.costs[node, batch]


def _tensors(node: Node) -> list[Tensor]:
    """What an op reads and makes."""
    return [*node.inputs, *(node.out(index) for index in range(len(node.outputs)))]


def step_cost(analysis: Analysis, nodes: Iterable[Node], batch: int) -> float:
    """Cost of many full-size ops."""
    return sum(op_cost(analysis, node, batch) for node in nodes)


def phase_cost(analysis: Analysis, phase: Phase, batch: int) -> float:
    """Cost of all turns of a loop: every op by the part of the image that it covers, halos included."""
    return sum(turn_cost(analysis, phase, node, batch) for node in phase.body)


def turn_cost(analysis: Analysis, phase: Phase, node: Node, batch: int) -> float:
    """Cost of one op in all turns of a loop.

    Turns share what is cut into tiles. Weights are read in each of them, and sums over the image, such as the gradients
    of weights, are made in each: in deep layers that may take longer than the arithmetic.
    """
    flops, cost = _flops_and_cost(analysis, node, batch)
    turns = min(phase.grid.batch, batch) * math.prod(phase.grid.spatial)
    whole = FLOPS_PER_BYTE * sum(t.num_bytes(batch) for t in _tensors(node) if t not in phase.regions)
    again = (turns - 1) * whole * (FILTER_FACTOR if flops else 1.0)
    return (cost - whole) * _coverage(analysis, phase, node) + whole + again


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
