"""The ops of a step that barriers cut into levels, and segments of them with any set of stored tensors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Container, Iterable

from rewriters.ir.graph import Node, Tensor
from rewriters.tiling.barrier_levels import assign_levels
from rewriters.tiling.barrier_planner import barrier_segment, has_barriers, has_nonlinear_gradients
from rewriters.tiling.checkpoint_selection import CheckpointSelection
from rewriters.tiling.ft_segments import refused
from rewriters.tiling.segment import Segment
from tflms_sft._search.traced_step import TracedStep

CHEAP_FLOPS_PER_BYTE = (0.0, 40.0, 500.0)
"""Work per byte of its result up to which an op is recomputed rather than stored, in three families of plans.

A convolution of one tap from few channels to many is below the second, such as the last one of a bottleneck, or a
transposed one on the way up: it reads little, and its result is large. A convolution of three taps along each axis
between few channels is below the third, as those of a U-Net at full resolution, whose results fill most of the memory.
"""


class Barriers:
    """All ops of a step that run in tiles, with the levels that barriers give them.

    Args:
        traced: The step.
        allowed: Ops that may run in tiles; by default all.
        stored: Tensors to store in any case.

    Attributes:
        levels: Sorts and levels of the ops.
        left: Forward ops on images that cannot be tiled, with reasons.
    """

    def __init__(
        self, traced: TracedStep, allowed: Container[Node] | None = None, stored: Iterable[Tensor] = ()
    ) -> None:
        self._traced = traced
        self._allowed = allowed
        self._extra = frozenset(stored)
        self.levels = assign_levels(traced.analysis, allowed)
        self.left = [refused(traced.analysis, node, why) for node, why in self.levels.refused.items()]
        self._segments: dict[CheckpointSelection, Segment] = {}

    @functools.cached_property
    def selections(self) -> list[CheckpointSelection]:
        """Stored tensors in families: first the results of all expensive ops, then of fewer and fewer."""
        first, *others = [self._selection(cheap_flops=flops) for flops in CHEAP_FLOPS_PER_BYTE]
        return [first, *(other for other in others if other.stored != first.stored)]

    def _selection(self, *, cheap_flops: float = 0.0, wanted: frozenset[Tensor] | None = None) -> CheckpointSelection:
        batch, analysis = self._traced.batch, self._traced.analysis
        return CheckpointSelection(
            analysis, self.levels, batch=batch, extra=self._extra, cheap_flops=cheap_flops, wanted=wanted
        )

    @property
    def present(self) -> bool:
        """Return whether there is a barrier, or an op that needs true values of gradients, and a backward pass."""
        analysis, levels = self._traced.analysis, self.levels
        if not any(node in analysis.backward for node in (*levels.tiled, *levels.sums)):
            return False
        return has_barriers(analysis, levels) or has_nonlinear_gradients(analysis, levels)

    def segment(self, name: str, selection: CheckpointSelection, dropped: frozenset[Tensor] = frozenset()) -> Segment:
        """Return the segment with a selection, of whose tensors some are dropped until the backward pass."""
        if selection not in self._segments:
            self._segments[selection] = barrier_segment(self._traced.analysis, name, self.levels, selection)
        loops = selection.loop_specs(selection.droppable() - dropped)
        return dataclasses.replace(self._segments[selection], name=name, loop_specs=loops, dropped=dropped)

    def segment_storing(self, name: str, stored: frozenset[Tensor], dropped: frozenset[Tensor]) -> Segment:
        """Return the segment that stores these tensors, and others as far as it has to."""
        return self.segment(name, self._selection(wanted=stored), dropped)

    def without(self, nodes: Container[Node]) -> Barriers:
        """Return the levels of the other ops, if these run untiled."""
        order, allowed = self._traced.analysis.order, self._allowed
        others = {node for node in order if node not in nodes and (allowed is None or node in allowed)}
        return Barriers(self._traced, others, self._extra)

    def stores(self, tensor: Tensor) -> bool:
        """Return whether a tensor is stored at some time."""
        return tensor in self.selections[0].stored

    @property
    def nodes(self) -> set[Node]:
        """Ops that run in tiles, or reduce over tiles."""
        return {*self.levels.tiled, *self.levels.sums}

    @property
    def exits(self) -> set[Tensor]:
        """Images that ops outside read, and all reductions."""
        return self.selections[0].exits | {node.out() for node in self.levels.sums}
