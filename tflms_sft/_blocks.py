"""Which backward ops belong to which forward ops of a component."""

from __future__ import annotations

import contextlib
import math

from rewriters.analysis import Analysis
from rewriters.errors import NotTileableError
from rewriters.ft import Component
from rewriters.graph import Node
from rewriters.registry import Kind, find_rule
from rewriters.roles import reads_shape_only

__all__: list[str] = []


def backward_positions(analysis: Analysis, component: Component) -> dict[Node, float]:
    """Position in the component of the forward op that each backward op belongs to.

    A gradient goes back through the positions whose results it reads: infinity is behind the component, -1 before
    it. Sums over the image, such as the gradient of a filter, read what comes in, which lies before their op, and
    belong where the gradient is that they read.
    """
    position = {node: index for index, node in enumerate(component.nodes)}
    start = analysis.position[component.nodes[0]]
    found: dict[Node, float] = {}
    for node in analysis.order:
        if node not in analysis.backward or reads_shape_only(node):
            continue
        operands = [tensor.node for tensor in node.inputs]
        came = min((found[n] for n in operands if n in found), default=math.inf)
        read = [n for n in operands if n in analysis.data and n not in analysis.backward]
        if not read or _is_sum(analysis, node):
            found[node] = came
        else:
            elsewhere = {n: -1 if analysis.position[n] < start else math.inf for n in read if n not in position}
            found[node] = min(came, max(elsewhere.get(n, position.get(n, 0)) for n in read))
    return found


def _is_sum(analysis: Analysis, node: Node) -> bool:
    """Whether a backward op sums over images, as the gradient of a filter does."""
    view = analysis.view(node)
    with contextlib.suppress(NotTileableError):
        data = find_rule(node).data(view)
        made = [Kind.PARTIAL if tensor.node in analysis.backward else Kind.FULL for tensor in node.inputs]
        kinds = [kind if position in data else Kind.INVARIANT for position, kind in enumerate(made)]
        return find_rule(node).result(view, kinds) is Kind.REDUCED
    return False
