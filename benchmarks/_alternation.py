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
"""Files that ask the process of the short step for another one, or to end."""


def repeat(run: Callable[[], None], folder: str, emit: _child.Emit) -> None:
    """Child's side of the short step: run it when asked, and emit its seconds.

    Args:
        run: Runs the step once.
        folder: Where `alternate` creates its files.
        emit: Sends an event to the parent.
    """
    run()  # The first step takes noticeably longer.
    go, end = Path(folder, GO), Path(folder, END)
    while not end.exists():
        if go.exists():
            go.unlink()
            began = time.perf_counter()
            run()
            emit({"seconds": time.perf_counter() - began})
        time.sleep(POLL_SECONDS)


def alternate(long: Measurement, short: Measurement, folder: str) -> tuple[Figures, list[float]]:
    """Measure a long step while its process is stopped for a short one, again and again.

    Args:
        long: The measurement of the long step. Its child emits its process as "pid" before the step, and returns
            "began" and "ended", both of `time.perf_counter`.
        short: The measurement of the short step, whose child calls `repeat`.
        folder: Folder of the files that ask for a short step.

    Returns:
        Figures of the long step, whose "seconds" are without the time in which it was stopped. Seconds of the short
        steps: the first ran before the long step and the last after it.

    Raises:
        ChildError: If a child fails.
    """
    pids: queue.SimpleQueue[_child.Event] = queue.SimpleQueue()
    times: queue.SimpleQueue[_child.Event] = queue.SimpleQueue()
    with futures.ThreadPoolExecutor(2) as pool:
        reference = pool.submit(short, times.put)

        def short_seconds() -> float:
            Path(folder, GO).touch()
            return float(_next_event(times, reference)["seconds"])

        pid, pauses = None, []
        try:
            seconds = [short_seconds()]
            measurement = pool.submit(long, pids.put)
            pid = _next_event(pids, measurement)["pid"]
            while not futures.wait([measurement], PIECE_SECONDS).done:
                with _stopped(pid) as pause:
                    seconds.append(short_seconds())
                pauses.append(pause)
            figures = measurement.result()
            seconds.append(short_seconds())
        except BaseException:
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise
        finally:
            Path(folder, END).touch()
    began, ended = figures.pop("began"), figures.pop("ended")
    stopped = sum(max(min(stop, ended) - max(start, began), 0.0) for start, stop in pauses)
    return {**figures, "seconds": ended - began - stopped}, seconds


def _next_event(events: queue.SimpleQueue[_child.Event], measurement: futures.Future[Figures]) -> _child.Event:
    """Wait for the next event of a child; raise if the child ends without one."""
    while True:
        has_ended = measurement.done()
        with contextlib.suppress(queue.Empty):
            return events.get(timeout=1)
        if has_ended:
            raise _child.ChildError(f"The child ended without an event, with result {measurement.result()}.")


@contextlib.contextmanager
def _stopped(pid: int) -> Iterator[list[float]]:
    """Stop a process; yield a list that holds the moments of its stop and, afterwards, of its continuation."""
    pause = [time.perf_counter()]
    with contextlib.suppress(ProcessLookupError):  # It may just have ended.
        os.kill(pid, signal.SIGSTOP)
    try:
        yield pause
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        pause.append(time.perf_counter())
