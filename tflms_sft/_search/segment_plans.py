"""Plans the tile loops of chosen blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rewriters.emission.tile_pass import SegmentPlan, plan_segment
from rewriters.errors import NotTileableError
from rewriters.ir.graph import Node
from rewriters.tiling.ft_segments import TileableComponent, try_segment
from rewriters.tiling.one_loop import in_one_loop, with_final_sums
from rewriters.tiling.tile_planner import Halo
from tflms_sft._search.block_choices import BlockChoice
from tflms_sft._search.traced_step import TracedStep


def segment_plans(
    traced: TracedStep, choices: Sequence[tuple[TileableComponent, BlockChoice]]
) -> list[SegmentPlan | None]:
    """Plan the loops of choices that tile, each with its component; `None` for one that stays untiled.

    Such a segment has no backward ops of its own, because a neighbour took them.
    """
    backward_ops: set[Node] = set()
    plans: list[SegmentPlan | None] = []
    for number, (component, choice) in enumerate(choices, 1):
        positions = range(choice.first, choice.last)
        try:
            segment = try_segment(traced.analysis, component, positions, backward_ops, f"segment{number}")
        except NotTileableError:
            plans.append(None)
            continue
        if choice.one_loop:
            segment = in_one_loop(traced.analysis, segment, backward_ops) or segment
        elif not segment.backward and choice.halo is Halo.RECOMPUTE and choice.last == len(component.nodes):
            segment = with_final_sums(traced.analysis, segment)
        backward_ops.update(segment.backward)
        segment = dataclasses.replace(segment, stored=choice.checkpoints - set(segment.exits))
        assert choice.grid is not None
        plans.append(
            plan_segment(traced.analysis, segment, choice.forward_grid or choice.grid, choice.grid, choice.halo)
        )
    return plans
