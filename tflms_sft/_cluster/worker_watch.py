"""Detects workers that are lost while a step runs.

A process that ends closes its connections, and TensorFlow's calls fail at once, with one of several errors. A stopped
process or a disconnected machine closes nothing, and calls to it block forever. TensorFlow can cancel a step, but not
the reading of a weight. So a thread polls the workers and shuts down the connections to a worker that does not answer.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import tensorflow as tf

from rewriters.errors import WorkerError
from rewriters.ir import tf_internals
from tflms_sft._cluster.reachability import break_connections, missing
from tflms_sft._util.open_files import open_descriptors

POLL_SECONDS = 5.0
"""Time from an answer to the next poll."""

ANSWER_SECONDS = 5.0
"""Time limit of an answer."""

_PAUSE_SECONDS = 1.0
"""Time to the next poll after a missing answer."""

_MAX_MISSED = 2
"""Number of missing answers in a row that counts as silence; a busy machine may miss one."""

_NO_DESCRIPTORS = (
    "tflms-sft: {} does not answer, and this system does not list the connections of a process (/proc/self/fd or "
    "/dev/fd), so that they cannot be ended. A step may wait for the worker forever: end this program."
)

_WORKER = re.compile(r"/job:(\w+)/replica:0/task:(\d+)")
_RESTARTED = "Unable to find a context_id"
_REMEDY = (
    "The weights and optimizer slots on it are lost. Restart it (`tflms-sft worker --cluster ... --task K`), and run "
    "this program again in a new process. With the callback `keras.callbacks.BackupAndRestore`, `fit` continues from "
    "the last backup."
)


class WorkerWatch:
    """Polls the workers in a thread while the program is connected to any.

    Args:
        workers: Returns the addresses of the workers that the program is connected to.

    Attributes:
        silent: Workers that do not answer, with reasons.
        lost: Workers whose loss made a step fail, with reasons. They stay lost, because their weights are lost.
    """

    def __init__(self, workers: Callable[[], Mapping[str, str]] = tf_internals.workers) -> None:
        self.workers = workers
        self.silent: Mapping[str, str] = {}
        self.lost: Mapping[str, str] = {}
        self._thread: threading.Thread | None = None
        self._announced: set[str] = set()

    def begin(self) -> None:
        """Start the thread unless it runs."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="tflms_sft workers", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        missed: dict[str, int] = {}
        while True:
            if not missed or self.silent:
                time.sleep(_PAUSE_SECONDS if self.silent else POLL_SECONDS)
            addresses = self.workers()
            if not addresses:
                self._thread = None
                return
            try:
                missed = self._poll(addresses, missed)
            except RuntimeError:  # The interpreter is shutting down and starts no threads.
                return
            except Exception as error:  # Without polls a step might block forever, so the loop must go on.
                print(f"tflms-sft: polling the workers failed: {error!r}", file=sys.stderr)
                missed = {}

    def _poll(self, addresses: Mapping[str, str], missed: Mapping[str, int]) -> dict[str, int]:
        """Poll once, and return the number of missing answers in a row of each worker that does not answer."""
        self._break(addresses)  # TensorFlow reconnects and blocks again.
        reasons = self.missing(addresses)
        counts = {name: missed.get(name, 0) + 1 for name in reasons}
        self.silent = {name: reason for name, reason in reasons.items() if counts[name] >= _MAX_MISSED}
        self._break(addresses)
        return counts

    def missing(self, addresses: Mapping[str, str]) -> dict[str, str]:
        """Return the workers that do not answer, with reasons."""
        return missing(addresses, ANSWER_SECONDS)

    def _break(self, addresses: Mapping[str, str]) -> None:
        for name in self.silent:
            if name in addresses:
                break_connections(addresses[name])
                if open_descriptors() is None and name not in self._announced:
                    self._announced.add(name)
                    print(_NO_DESCRIPTORS.format(name), file=sys.stderr, flush=True)


WATCH = WorkerWatch()


@contextlib.contextmanager
def workers_watched() -> Iterator[None]:
    """Run a step in a block, and turn its failure into an error that names the lost workers.

    Without a cluster the block runs unchanged.

    Raises:
        WorkerError: If a worker was lost in this step or before.
    """
    addresses = WATCH.workers() if tf.executing_eagerly() else {}
    if not addresses:
        yield
        return
    refuse_lost()
    WATCH.begin()
    try:
        yield
    except (StopIteration, tf.errors.OutOfRangeError):
        raise
    except tf.errors.OpError as error:
        lost = WATCH.silent or _lost(addresses, error)
        if lost:
            raise _record_lost(addresses, lost) from error
        raise


def refuse_lost() -> None:
    """Refuse further steps after the loss of a worker, because TensorFlow would block on it."""
    if WATCH.lost:
        raise lost_error(WATCH.workers(), WATCH.lost)


def check_workers() -> None:
    """Refuse to go on if a worker does not answer."""
    addresses = WATCH.workers()
    reasons = WATCH.missing(addresses)
    if reasons:
        raise _record_lost(addresses, reasons)


def _record_lost(addresses: Mapping[str, str], reasons: Mapping[str, str]) -> WorkerError:
    WATCH.lost = dict(reasons)
    return lost_error(addresses, reasons)


def _lost(addresses: Mapping[str, str], error: tf.errors.OpError) -> dict[str, str]:
    """Return the workers whose loss made a step fail, with reasons.

    TensorFlow can check whether a worker still knows this program, but that call blocks the whole interpreter until it
    is answered. So the text of the error decides.
    """
    reasons = WATCH.missing(addresses)
    if reasons:
        return reasons
    text = str(error)
    named = sorted({f"/job:{job}/task:{task}" for job, task in _WORKER.findall(text)} & addresses.keys())
    if _RESTARTED in text:
        return dict.fromkeys(named or addresses, "restarted during training")
    if isinstance(error, tf.errors.UnavailableError):
        return dict.fromkeys(named, "the connection broke")
    return {}


def lost_error(addresses: Mapping[str, str], reasons: Mapping[str, str]) -> WorkerError:
    """Return the error for lost workers with reasons."""
    names = tuple(f"{name} at {addresses[name]}" for name in reasons)
    details = "; ".join(f"{name} ({reason})" for name, reason in zip(names, reasons.values(), strict=True))
    error = WorkerError(f"Lost {len(names)} worker(s) of {len(addresses)} during training: {details}. {_REMEDY}")
    error.workers = names
    return error
