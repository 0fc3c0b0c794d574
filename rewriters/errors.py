"""What the compiler refuses, as a family of plain exceptions.

The classes have no `__init__`: AutoGraph rebuilds exceptions that are raised
inside a trace from their message alone and turns every other kind (a
`ValueError` subclass, one with a constructor of its own) into its own error.
Details are attributes, set after construction.
"""

from __future__ import annotations

__all__ = ["BudgetError", "PipelineError", "RewriteError", "ScheduleError", "SegmentError", "SwapError", "WorkerError"]


class RewriteError(Exception):
    """A graph that the compiler cannot rewrite, with the reason and a remedy."""


class SegmentError(RewriteError):
    """A segment that was asked for by name and cannot be tiled."""


class SwapError(RewriteError):
    """Swapping as it was asked for cannot be done."""


class PipelineError(RewriteError):
    """A pipeline as it was asked for cannot be built from this step."""


class WorkerError(RewriteError):
    """A machine of a cluster that does not answer, at the start or in the middle of a step.

    Attributes:
        workers: Names and addresses of those machines, such as `"/job:worker/task:1 at 10.0.0.3:2222"`.
    """

    workers: tuple[str, ...]


class ScheduleError(RewriteError):
    """An order of stages on devices that never ends.

    Attributes:
        slots: The `rewriters.pipelining.schedules.Slot`s that wait for each other, one for each device of the circle.
    """

    slots: tuple


class BudgetError(RewriteError):
    """A memory budget that no plan meets.

    Attributes:
        smallest_bytes: The smallest `peak_bytes` of any plan found.
        tensor: The largest tensor alive at that plan's worst moment, by the layer that makes it; what kernels, or turns
            of a loop, take for themselves then is in the message if it is more.
    """

    smallest_bytes: int
    tensor: str


class NotTileableError(Exception):
    """Raised by a rule: this use of the op cannot be tiled. The message is the reason."""
