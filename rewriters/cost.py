"""How much work a plan adds, from the op rules.

Work is the arithmetic of convolutions and dense layers, and the bytes that every op
touches at an exchange rate. Only ratios of it are used, as guesses of time.
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

WEIGHTS_FACTOR = 5.0
"""Cost of moving a byte of the weights, or of their gradient, of an op that counts arithmetic, over other bytes.

Kernels copy weights into a layout of their own in every call before they read them. docs/decisions.md has the
measurement: "Every turn pays for its weights".
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
        tensors = _tensors(node)
        moved = _bytes(tensors, batch) * FLOPS_PER_BYTE
        if flops:
            weights = [tensor for tensor in tensors if not analysis.is_image(tensor)]
            moved += _bytes(weights, batch) * FLOPS_PER_BYTE * (WEIGHTS_FACTOR - 1)
        analysis.costs[node, batch] = flops, flops + moved
    return analysis.costs[node, batch]


def _tensors(node: Node) -> list[Tensor]:
    """What an op reads and makes."""
    return [*node.inputs, *(node.out(index) for index in range(len(node.outputs)))]


def _bytes(tensors: Iterable[Tensor], batch: int) -> int:
    return sum(tensor.num_bytes(batch) for tensor in tensors)


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
    rebuilt = [node.inputs[position] for position in find_rule(node).rebuilt(analysis.view(node))]
    whole = [tensor for tensor in _tensors(node) if tensor not in phase.regions and tensor not in rebuilt]
    each_turn = FLOPS_PER_BYTE * _bytes(whole, batch) * (WEIGHTS_FACTOR if flops else 1.0)
    return (cost - each_turn) * _coverage(analysis, phase, node) + turns * each_turn


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
