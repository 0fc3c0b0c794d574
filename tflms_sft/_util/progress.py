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
        slow_seconds: The duration above which the block is slow.
    """

    def __init__(self, slow_seconds: float = SLOW_SECONDS) -> None:
        self.seconds = 0.0
        self.slow_seconds = slow_seconds
        self._start = time.monotonic()
        self._best: float | None = None

    def found(self, time_ratio: float) -> None:
        """Note a plan that fits, by its time over that of the original step."""
        self._best = time_ratio if self._best is None else min(self._best, time_ratio)

    def text(self) -> str:
        """Return a text such as `"planned in 12 s"`; empty for a fast block."""
        return f"planned in {self.seconds:.0f} s" if self.seconds > self.slow_seconds else ""

    def state(self) -> str:
        """Return a text such as `"12 s, best plan so far 1.21x the time"`."""
        best = "" if self._best is None else f", best plan so far {max(self._best, 1.0):.2f}x the time"
        return f"{time.monotonic() - self._start:.0f} s{best}"

    def stop(self) -> None:
        """Set the duration."""
        self.seconds = time.monotonic() - self._start


@contextlib.contextmanager
def told_if_slow(
    text: str,
    say: Callable[[str], None] | None,
    stream: TextIO | None = None,
    slow_seconds: float | None = None,
    pause_seconds: float | None = None,
) -> Iterator[Stopwatch]:
    """Measure a block, and print `text` if the block is slow, then the time at intervals.

    Args:
        text: The line.
        say: Prints a line on `stream`; `None` prints nothing.
        stream: Where `say` prints; by default stdout. On a terminal, one line is updated instead.
        slow_seconds: Duration after which the line is printed; by default `SLOW_SECONDS`.
        pause_seconds: Time to the next update; by default `UPDATE_SECONDS` on a terminal, otherwise `SPARSE_SECONDS`.
    """
    slow_seconds = SLOW_SECONDS if slow_seconds is None else slow_seconds
    stream = sys.stdout if stream is None else stream
    watch, done, thread = Stopwatch(slow_seconds), threading.Event(), None
    if say is not None:
        pause = pause_seconds or (UPDATE_SECONDS if stream.isatty() else SPARSE_SECONDS)
        thread = threading.Thread(target=_tell, args=(text, say, stream, watch, done, pause), daemon=True)
        thread.start()
    try:
        yield watch
    finally:
        watch.stop()
        done.set()
        if thread is not None:
            thread.join()


def _tell(
    text: str, say: Callable[[str], None], stream: TextIO, watch: Stopwatch, done: threading.Event, pause: float
) -> None:
    """Print progress until `done` is set; nothing if the block is fast."""
    if done.wait(watch.slow_seconds):
        return
    if not stream.isatty():
        say(text)
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
        if done.wait(pause):
            break
    stream.write("\n")
    stream.flush()
