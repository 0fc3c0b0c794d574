"""A line for those who wait: only when it takes long."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

SLOW_SECONDS = 2.0
"""From then on a user wonders what is going on."""


class Stopwatch:
    """How long something took.

    Attributes:
        seconds: 0 until it has ended.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def text(self) -> str:
        """Such as `"planned in 12 s"`; empty if it was not slow."""
        return f"planned in {self.seconds:.0f} s" if self.seconds > SLOW_SECONDS else ""


@contextlib.contextmanager
def told_if_slow(text: str, say: Callable[[str], None] | None) -> Iterator[Stopwatch]:
    """Say `text` if what is inside takes longer than `SLOW_SECONDS`; nobody hears it without `say`."""
    watch, begun = Stopwatch(), time.monotonic()
    timer = None
    if say is not None:
        timer = threading.Timer(SLOW_SECONDS, say, [text])
        timer.daemon = True  # It keeps no process alive.
        timer.start()
    try:
        yield watch
    finally:
        if timer is not None:
            timer.cancel()
        watch.seconds = time.monotonic() - begun
