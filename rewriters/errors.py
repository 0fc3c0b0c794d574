"""Exceptions of the compiler.

The classes have no `__init__`. AutoGraph rebuilds exceptions that are raised inside a trace from their message alone.
It turns every other kind (a `ValueError` subclass, one with a constructor of its own) into its own error. Details are
attributes, set after construction.
"""

from __future__ import annotations

__all__ = ["BudgetError", "PipelineError", "RewriteError", "ScheduleError", "SegmentError", "SwapError", "WorkerError"]


class RewriteError(Exception):
    """Raised for a step, or versions of TensorFlow and Keras, that the compiler does not support.

    The message holds the reason and a remedy. Base class of the other errors. All are raised before a variable changes,
    with these exceptions:

    - a `BudgetError` after a measured step,
    - a `WorkerError` during a step,
    - the error of a disk from which a tensor is read back,
    - the error of a step that receives a batch of a size that its plan does not hold for: weights are as before, but
      the number of iterations of the optimizer and the states of random seeds may have changed.
    """


class SegmentError(RewriteError):
    """Raised for a segment that was requested by name and cannot be tiled."""


class SwapError(RewriteError):
    """Raised if no tensor can be swapped with the given parameters on this device."""


class PipelineError(RewriteError):
    """Raised for a pipeline that cannot be built from the step.

    A cut does not separate the graph, variables lie on other devices, an op mixes samples, or values of micro-batches
    cannot be combined.
    """


class WorkerError(RewriteError):
    """Raised for a worker that does not respond: in `connect`, during a step, or at the end of an epoch.

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
    """Raised for a memory budget that no plan meets, or that a measured step exceeds.

    Attributes:
        smallest_bytes: The smallest feasible budget in bytes; after a measured step, its peak; for plans slower than
            `max_slowdown`, a budget that is faster. Not set, like `tensor`, for a model that runs eagerly.
        tensor: The largest tensor alive at the peak of that plan, or of the original step if plans are slow, by the
            layer that computes it. If kernel scratch or an iteration of a loop takes more, the message says so.
    """

    smallest_bytes: int
    tensor: str


class NotTileableError(Exception):
    """Raised by a rule for a use of an op that cannot be tiled. The message is the reason."""
