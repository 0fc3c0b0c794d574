"""Ends a search on Ctrl-C, SIGTERM or after a time limit, so that the best result so far can be printed."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from collections.abc import Iterator
from types import FrameType

from tflms_sft._cli.exit_status import INTERRUPTED, TERMINATED

__all__: list[str] = []

REASONS = {
    signal.SIGINT: ("stopped with Ctrl-C", INTERRUPTED),
    signal.SIGTERM: ("stopped with SIGTERM", TERMINATED),
}
"""Text of each signal, and its exit code."""

TIME_LIMIT = "stopped by --time-limit", None
"""Text of the end of the time, and no exit code: that of the result holds."""

_HAS_TIMER = hasattr(signal, "SIGALRM")
"""Whether the system has a timer that interrupts a call, unlike Windows."""


@dataclasses.dataclass
class Stop:
    """End of a search: reason and exit code.

    Attributes:
        reason: Text of the signal that stopped it; empty if it ended by itself.
        code: Exit code of that signal; `None` for that of the result.
    """

    reason: str = ""
    code: int | None = None


class _StopError(BaseException):
    """Raised by a signal; no handler of `Exception` may catch it."""


@contextlib.contextmanager
def stoppable(seconds: float | None) -> Iterator[Stop]:
    """Run a block until it ends, a signal arrives, or `seconds` pass. The block must store its results outside.

    Windows has no timer that interrupts the block, and ignores `seconds`.
    """
    stop = Stop()

    def on_signal(number: int, frame: FrameType | None) -> None:
        stop.reason, stop.code = REASONS.get(signal.Signals(number), TIME_LIMIT)
        raise _StopError

    numbers = [*REASONS, *([signal.SIGALRM] if _HAS_TIMER else [])]
    previous = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        if _HAS_TIMER:
            signal.setitimer(signal.ITIMER_REAL, seconds or 0)
        yield stop
    except _StopError:
        pass
    finally:
        if _HAS_TIMER:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous.items():
            signal.signal(number, handler)
