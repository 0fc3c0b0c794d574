"""Lower bounds of the peak of a step with tile loops, without a model of the whole step, which takes far longer.

While a loop runs, variables, arguments, the tensors that it reads, its results and an iteration are in memory. So are
tensors that an earlier loop has written and a later one reads, unless they are swapped.
"""

from __future__ import annotations

from collections.abc import Sequence

from rewriters.emission.loop_emitter import loop_output_tensors
from rewriters.emission.tile_pass import SegmentPlan
from rewriters.ir.graph import Tensor
from tflms_sft._planner.traced_step import TracedStep


def least_peak(traced: TracedStep, plans: Sequence[SegmentPlan], *, swapped: bool = False) -> int:
    """Return bytes that the memory model's peak of a step does not fall below.

    Args:
        traced: The step.
        plans: Its segments.
        swapped: Whether any tensor may be swapped while no loop uses it.
    """
    iterations = (
        num_bytes + traced.loop_memory.peak_bytes(tile_loop, traced.batch)
        for plan in plans
        for tile_loop, num_bytes in zip(plan.loops, bytes_beside_iterations(traced, plan, swapped=swapped), strict=True)
    )
    return max(iterations, default=0)


def bytes_beside_iterations(traced: TracedStep, plan: SegmentPlan, *, swapped: bool = False) -> list[int]:
    """Return such bytes for each loop of a segment, in any number of tiles, without those of its iterations.

    Each result of a loop counts as a tensor of its own, because a later loop may recompute a tensor. Results that no
    loop reads do not count, and neither do operands from outside, which may share the memory of an argument.
    """
    fixed_bytes = traced.fixed_bytes + sum(t.num_bytes(traced.batch) for t in traced.analysis.graph.inputs)
    uses: dict[tuple[Tensor, int], list[int]] = {}  # By tensor and loop that writes it: that loop, then its readers.
    writer: dict[Tensor, int] = {}
    for number, tile_loop in enumerate(plan.loops):
        for tensor in tile_loop.reads:
            if tensor in writer:
                uses.setdefault((tensor, writer[tensor]), [writer[tensor]]).append(number)
        writer.update(dict.fromkeys(loop_output_tensors(tile_loop), number))
    # Loops run one after another on each device.
    ordered = len({node.device for tile_loop in plan.loops for node in tile_loop.body}) == 1
    sizes = [fixed_bytes] * len(plan.loops)
    for (tensor, first), numbers in uses.items():
        for number in range(first, numbers[-1] + 1) if ordered and not swapped else numbers:
            sizes[number] += tensor.num_bytes(traced.batch)
    return sizes
