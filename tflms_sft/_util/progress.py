"""Progress lines that appear only for slow work."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

SLOW_SECONDS = 2.0
"""Duration after which a progress line is printed."""

UPDATE_SECONDS = 1.0
"""Time between two updates of the line on a terminal."""

SPARSE_SECONDS = 15.0
"""Time from the first line to the second where the output is no terminal; it doubles for each further line."""


class Stopwatch:
    """Duration of a block, and the fastest plan that it has found so far.

    Attributes:
        seconds: The duration; 0 until the block has ended.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._start = time.monotonic()
        self._best: float | None = None

    def found(self, time_ratio: float) -> None:
        """Note a plan that fits, by its time over that of the original step."""
        self._best = time_ratio if self._best is None else min(self._best, time_ratio)

    def text(self) -> str:
        """Return a text such as `"planned in 12 s"`; empty for a fast block."""
        return f"planned in {self.seconds:.0f} s" if self.seconds > SLOW_SECONDS else ""

    def state(self) -> str:
        """Return a text such as `"12 s, best plan so far 1.21x the time"`."""
        best = "" if self._best is None else f", best plan so far {max(self._best, 1.0):.2f}x the time"
        return f"{time.monotonic() - self._start:.0f} s{best}"

    def stop(self) -> None:
        """Set the duration."""
        self.seconds = time.monotonic() - self._start


@contextlib.contextmanager
def told_if_slow(text: str, say: Callable[[str], None] | None, stream: TextIO | None = None) -> Iterator[Stopwatch]:
    """Measure a block, and print `text` if the block is slow, then the time at intervals.

    Args:
        text: The line.
        say: Prints a line on `stream`; `None` prints nothing.
        stream: Where `say` prints; by default stdout. On a terminal, one line is updated instead.
    """
    stream = sys.stdout if stream is None else stream
    watch, done, thread = Stopwatch(), threading.Event(), None
    if say is not None:
        thread = threading.Thread(target=_tell, args=(text, say, stream, watch, done), daemon=True)
        thread.start()
    try:
        yield watch
    finally:
        watch.stop()
        done.set()
        if thread is not None:
            thread.join()


def _tell(text: str, say: Callable[[str], None], stream: TextIO, watch: Stopwatch, done: threading.Event) -> None:
    """Print progress until `done` is set; nothing if the block is fast."""
    if done.wait(SLOW_SECONDS):
        return
    if not stream.isatty():
        say(text)
        pause = SPARSE_SECONDS
        while not done.wait(pause):
            say(f"{text} {watch.state()}")
            pause *= 2
        return
    width = 0
    while True:
        line = f"{text} {watch.state()}"
        stream.write(f"\r{line.ljust(width)}")
        stream.flush()
        width = len(line)
        if done.wait(UPDATE_SECONDS):
            break
    stream.write("\n")
    stream.flush()
