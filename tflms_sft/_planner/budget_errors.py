"""Texts that errors about budgets have in common: who takes the memory, and the remedy after a measured excess."""

from __future__ import annotations

import math

from rewriters.device.peak_memory import Peak
from rewriters.emission.tile_pass import SegmentPlan
from tflms_sft._planner.traced_step import TracedStep, at_peak
from tflms_sft._report.summary import transient_memory
from tflms_sft._util.byte_sizes import format_bytes

__all__: list[str] = []


def excess_remedy(excess_bytes: int, budget: int, least: int = 0, *, is_used: bool) -> str:
    """Return the remedy, and for a used process the usual reason, where a step exceeds its predicted memory.

    Args:
        excess_bytes: Measured less predicted memory.
        budget: Bytes.
        least: Predicted bytes of the plan that needs least, if known.
        is_used: Whether much memory had been in use before the step began; else there is no reason to name, and no
            remedy if `headroom` does not help.
    """
    headroom = f"`headroom={min(math.ceil(100 * excess_bytes / budget) / 100, 0.99):g}`"
    suffices = least + excess_bytes <= budget
    if not is_used:
        return f"Leave more of the budget free, such as {headroom}." if suffices else ""
    text = (
        "In a process that has trained before, even if that training was interrupted, memory is more fragmented: "
        "train in a fresh process"
    )
    if not suffices:
        return f"{text}. More `headroom` does not help, because no plan is smaller."
    return f"{text}, or leave more of the budget free, such as {headroom}."


def takes_most(traced: TracedStep, plans: list[SegmentPlan], peak: Peak) -> tuple[str, str]:
    """Return a text about the largest users of memory at a peak, for an error, and the name of the largest tensor.

    Memory of running ops, and the tensor lists of the loop that saves most, are part of the text if they exceed the
    largest tensor.
    """
    tensors, loops, running_sizes = at_peak(traced, plans, peak)
    name, size = tensors[0] if tensors else ("the variables", traced.fixed_bytes)
    others = [(num_bytes, f"saved inside {loop}") for loop, num_bytes in loops[:1]]
    others += [(num_bytes, text) for text, num_bytes in transient_memory(running_sizes)]
    larger = [f"{format_bytes(num_bytes)} are {text}, " for num_bytes, text in others if num_bytes > size]
    return f"{''.join(larger)}`{name}` is {format_bytes(size)}", name
