"""Exceptions of the compiler.

The classes have no `__init__`. AutoGraph rebuilds exceptions that are raised inside a trace from their message alone.
It turns every other kind (a `ValueError` subclass, one with a constructor of its own) into its own error. Details are
attributes, set after construction.
"""

from __future__ import annotations

__all__ = ["BudgetError", "PipelineError", "RewriteError", "ScheduleError", "SegmentError", "SwapError", "WorkerError"]


class RewriteError(Exception):
    """Raised for a graph that the compiler cannot rewrite. The message holds the reason and a remedy."""


class SegmentError(RewriteError):
    """Raised for a segment that was requested by name and cannot be tiled."""


class SwapError(RewriteError):
    """Raised for a request for swapping that cannot be met."""


class PipelineError(RewriteError):
    """Raised for a pipeline that cannot be built from the step."""


class WorkerError(RewriteError):
    """Raised for a worker that does not respond, at the start of a step or during it.

    Attributes:
        workers: Names and addresses of those workers, such as `"/job:worker/task:1 at 10.0.0.3:2222"`.
    """

    workers: tuple[str, ...]


class ScheduleError(RewriteError):
    """Raised for an order of stages on devices that never ends.

    Attributes:
        slots: The `rewriters.pipelining.schedules.Slot`s that wait for each other, one per device of the cycle.
    """

    slots: tuple


class BudgetError(RewriteError):
    """Raised for a memory budget that no plan meets.

    Attributes:
        smallest_bytes: The smallest `peak_bytes` of any plan.
        tensor: The largest tensor alive at the peak of that plan, by the layer that computes it. If kernel scratch or
            an iteration of a loop takes more, the message says so.
    """

    smallest_bytes: int
    tensor: str


class NotTileableError(Exception):
    """Raised by a rule for a use of an op that cannot be tiled. The message is the reason."""
