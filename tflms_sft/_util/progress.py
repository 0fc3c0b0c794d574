"""Progress lines that appear only for slow work."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

SLOW_SECONDS = 2.0
"""Duration after which a progress line is printed."""


class Stopwatch:
    """Duration of a block.

    Attributes:
        seconds: The duration; 0 until the block has ended.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def text(self) -> str:
        """Return a text such as `"planned in 12 s"`; empty for a fast block."""
        return f"planned in {self.seconds:.0f} s" if self.seconds > SLOW_SECONDS else ""


@contextlib.contextmanager
def told_if_slow(text: str, say: Callable[[str], None] | None) -> Iterator[Stopwatch]:
    """Measure a block, and print `text` if it takes longer than `SLOW_SECONDS` and `say` is not `None`."""
    watch, start = Stopwatch(), time.monotonic()
    timer = None
    if say is not None:
        timer = threading.Timer(SLOW_SECONDS, say, [text])
        timer.daemon = True  # The timer must not keep the process alive.
        timer.start()
    try:
        yield watch
    finally:
        if timer is not None:
            timer.cancel()
        watch.seconds = time.monotonic() - start
