"""Measures a long step and a short one alternately, in two child processes.

The speed of a shared machine varies while a long step runs. The process of the long step is therefore stopped every two
minutes, until the process of the short step has run its step once more.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

from benchmarks import _child

Figures = dict[str, Any]
Measurement = Callable[[Callable[[_child.Event], None]], Figures]
"""Runs a measurement in a child process, and passes the events of the child to a function."""

PIECE_SECONDS = 120.0
"""Seconds for which the long step runs between two of the short one."""
POLL_SECONDS = 0.05
GO, END = "go", "end"
"""Files that request another short step, and the end of its process."""


def repeat(run: Callable[[], None], folder: str, emit: _child.Emit) -> None:
    """Run the short step once, and then whenever it is requested; emit the seconds of each run. For the child process.

    Args:
        run: Runs the step once.
        folder: Folder of the files that request a run, and the end of the process.
        emit: Sends an event to the parent.
    """
    began = time.perf_counter()
    run()  # The first step takes longer.
    emit({"first_seconds": time.perf_counter() - began})
    go, end = Path(folder, GO), Path(folder, END)
    while not end.exists():
        if go.exists():
            go.unlink()
            began = time.perf_counter()
            run()
            emit({"seconds": time.perf_counter() - began})
        time.sleep(POLL_SECONDS)


def alternate(long: Measurement, short: Measurement, folder: str) -> Figures:
    """Measure a long step whose process is stopped for a short one, again and again.

    The children emit their process id as "pid" first.

    Args:
        long: The measurement of the long step. Its child emits "ready" before the step, and returns "began" and
            "ended", readings of `time.perf_counter`.
        short: The measurement of the short step, whose child calls `repeat`.
        folder: Folder of the files that request a short step.

    Returns:
        Figures of the long step. "seconds" is its time without that in which it was stopped, "small_seconds" the times
        of the short steps, from the beginning of the long step to its end, and "small_first_seconds" that of the
        first short step in its process.

    Raises:
        ChildError: If a child fails.
    """
    with futures.ThreadPoolExecutor(2) as pool:

        def short_seconds() -> float:
            Path(folder, GO).touch()
            return float(reference.event("seconds"))

        reference = _Measured(pool, short)
        children = [reference]
        try:
            first = float(reference.event("first_seconds"))
            measurement = _Measured(pool, long)
            children.append(measurement)
            measurement.event("ready")
            seconds, pauses = [], []
            while not measurement.future.done():
                with measurement.stopped() as pause:
                    seconds.append(short_seconds())
                pauses.append(pause)
                futures.wait([measurement.future], PIECE_SECONDS)
            figures = measurement.future.result()
            seconds.append(short_seconds())
        except BaseException:
            for child in children:
                child.kill()
            raise
        finally:
            Path(folder, END).touch()
    began, ended = figures.pop("began"), figures.pop("ended")
    stopped = sum(max(min(stop, ended) - max(start, began), 0.0) for start, stop in pauses)
    return {**figures, "seconds": ended - began - stopped, "small_seconds": seconds, "small_first_seconds": first}


class _Measured:
    """A measurement in a child process, which runs in a thread."""

    def __init__(self, pool: futures.Executor, measure: Measurement) -> None:
        self._events: queue.SimpleQueue[_child.Event] = queue.SimpleQueue()
        self._pid: int | None = None
        self.future = pool.submit(measure, self._receive)

    def _receive(self, event: _child.Event) -> None:
        """Record the process id, in the thread of the measurement: an interruption does not lose it."""
        self._pid = event.get("pid", self._pid)
        self._events.put(event)

    def event(self, key: str) -> Any:
        """Wait for the event with this key and return its value; raise if the child ends without one."""
        while True:
            has_ended = self.future.done()
            try:
                event = self._events.get(timeout=POLL_SECONDS)
            except queue.Empty:
                if has_ended:
                    result = self.future.result()
                    raise _child.ChildError(f"The child ended without the event {key!r}: {result}.") from None
                continue
            if key in event:
                return event[key]

    @contextlib.contextmanager
    def stopped(self) -> Iterator[list[float]]:
        """Pause the process; yield a list of the times at which it paused and, after the block, continued."""
        pause = [time.perf_counter()]
        self._send(signal.SIGSTOP)
        try:
            yield pause
        finally:
            self._send(signal.SIGCONT)
            pause.append(time.perf_counter())

    def kill(self) -> None:
        """Kill the process if it runs."""
        while self._pid is None and not self.future.done():
            time.sleep(POLL_SECONDS)
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self._pid is not None and not self.future.done():
            with contextlib.suppress(ProcessLookupError):  # It may just have ended.
                os.kill(self._pid, number)
