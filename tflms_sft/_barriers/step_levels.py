"""Levels of a training step, at whose moments a plan counts its bytes.

A level of the forward pass is the ops between two barriers. Its backward ops are those that read its results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rewriters.analysis.graph_analysis import GraphAnalysis
from rewriters.ir.graph import Node, Tensor
from rewriters.tiling.barrier_levels import BarrierLevels
from rewriters.tiling.checkpoint_selection import LoopSpec
from tflms_sft._search.block_chain import backward_positions
from tflms_sft._search.moments import StepMoments


def _results(node: Node) -> list[Tensor]:
    return [node.out(index) for index in range(len(node.outputs))]


class StepLevels:
    """Levels with their moments.

    Attributes:
        count: Number of levels.
        of: Level of each op that runs in tiles or reduces over them.
        moments: A moment for the forward pass of each level, and one for its backward pass.
    """

    def __init__(self, analysis: GraphAnalysis, levels: BarrierLevels) -> None:
        self._backward = analysis.backward
        inside = analysis.sorted({*levels.tiled, *levels.sums})
        forward: dict[Node, float] = {node: levels.level[node] for node in inside if node not in analysis.backward}
        for node in reversed(list(forward)):
            readers = (reader for t in _results(node) for reader, _ in analysis.consumers.get(t, ()))
            # A squared difference from a mean is of the level of the variance, which one loop computes with the mean.
            forward[node] = min(forward[node], max((forward[r] for r in readers if r in forward), default=math.inf))
        self.count = 1 + int(max(forward.values(), default=0))
        positions = backward_positions(analysis, forward)
        backward = {node: int(min(max(positions[node], 0), self.count - 1)) for node in inside if node in positions}
        self.of = {**{node: int(level) for node, level in forward.items()}, **backward}
        self.moments = StepMoments(self.count, {node.name: self.moment(node) for node in self.of})

    def moment(self, node: Node) -> int:
        """Return the moment at which an op runs untiled."""
        level = self.of[node]
        return self.backward(level) if node in self._backward else level

    def backward(self, level: int) -> int:
        """Return the moment of the backward pass of a level."""
        return self.moments_count - 1 - level

    @property
    def moments_count(self) -> int:
        """Number of moments."""
        return 2 * self.count

    def of_loops(self, loops: Sequence[LoopSpec]) -> list[int]:
        """Return the moment of each loop, in order; one that recomputes tensors has that of the next that does not."""
        result, following = list[int](), self.moments_count - 1
        for loop in reversed(loops):
            roots = [tensor.node for tensor in loop.writes] + loop.sums
            if not loop.backward:
                following = max(self.of[node] for node in roots)
            else:
                gradients = [self.of[node] for node in roots if node in self._backward]
                following = self.backward(max(gradients)) if gradients else following
            result.append(following)
        return result[::-1]
