"""Workers that are lost while a step runs.

A process that ends closes its connections, and TensorFlow's calls fail at once, with one of several errors. A process
that is stopped and a machine that is cut off close nothing, and whoever waits for them waits without end. A step could
be cancelled, but not a weight that is read; so somebody asks the workers all the time, and closes the connections to
one that does not answer.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping

import tensorflow as tf

from rewriters.errors import WorkerError
from rewriters.ir import tf_internals
from tflms_sft._cluster.reachability import break_connections, missing

ASKED_EVERY_SECONDS = 5.0
"""From an answer to the next question."""

ANSWER_SECONDS = 5.0
"""How long a worker may take."""

_PAUSE_SECONDS = 1.0
"""The same once it did not answer."""

_MISSED = 2
"""So many times in a row, because a machine that works hard may be slow once."""

_WORKER = re.compile(r"/job:(\w+)/replica:0/task:(\d+)")
_STARTED_AGAIN = "Unable to find a context_id"
_REMEDY = (
    "The weights and the optimizer's slots that were on it are gone. Start it again (`tflms-sft worker --cluster ... "
    "--task K`), and run this program again, in a new process: with `keras.callbacks.BackupAndRestore` among the "
    "callbacks of `fit` training goes on from the last backup."
)


class WorkerWatch:
    """Asks the workers, as long as the program is connected to any.

    Attributes:
        silent: Those that do not answer, with the reasons.
        lost: Those without which a step has failed. What was on them is gone, so that they stay lost.
    """

    def __init__(self) -> None:
        self.silent: Mapping[str, str] = {}
        self.lost: Mapping[str, str] = {}
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Begin to ask, if nobody does."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._ask, name="tflms_sft workers", daemon=True)
            self._thread.start()

    def _ask(self) -> None:
        missed: dict[str, int] = {}
        while True:
            if not missed or self.silent:
                time.sleep(_PAUSE_SECONDS if self.silent else ASKED_EVERY_SECONDS)
            addresses = tf_internals.workers()
            if not addresses:
                self._thread = None
                return
            try:
                missed = self._asked(addresses, missed)
            except RuntimeError:  # The interpreter ends, and there are no new threads.
                return
            except Exception as error:  # Without somebody who asks, a step might wait without end.
                print(f"tflms-sft: whether workers answer could not be found out: {error!r}", file=sys.stderr)
                missed = {}

    def _asked(self, addresses: Mapping[str, str], missed: Mapping[str, int]) -> dict[str, int]:
        """Ask once; how often each worker that does not answer has missed in a row."""
        self._break(addresses)  # TensorFlow connects again, and waits again.
        reasons = missing(addresses, ANSWER_SECONDS)
        found = {name: missed.get(name, 0) + 1 for name in reasons}
        self.silent = {name: why for name, why in reasons.items() if found[name] >= _MISSED}
        self._break(addresses)
        return found

    def _break(self, addresses: Mapping[str, str]) -> None:
        for name in self.silent:
            if name in addresses:
                break_connections(addresses[name])


GUARD = WorkerWatch()


@contextlib.contextmanager
def workers_watched() -> Iterator[None]:
    """A block that runs a step: ends with an error that names the workers that were lost meanwhile.

    Without a cluster it does nothing.

    Raises:
        WorkerError: If some were, or are since a step before.
    """
    addresses = tf_internals.workers() if tf.executing_eagerly() else {}
    if not addresses:
        yield
        return
    refuse_lost()
    GUARD.begin()
    try:
        yield
    except (StopIteration, tf.errors.OutOfRangeError):
        raise
    except tf.errors.OpError as error:
        lost = GUARD.silent or _lost(addresses, error)
        if lost:
            raise _found_lost(addresses, lost) from error
        raise


def refuse_lost() -> None:
    """Begin nothing more once a worker was lost: TensorFlow would wait for it, or for what it no longer has.

    Raises:
        WorkerError: If one was.
    """
    if GUARD.lost:
        raise lost_error(tf_internals.workers(), GUARD.lost)


def check_workers() -> None:
    """See whether all workers answer now.

    Raises:
        WorkerError: If some do not.
    """
    addresses = tf_internals.workers()
    reasons = missing(addresses, ANSWER_SECONDS)
    if reasons:
        raise _found_lost(addresses, reasons)


def _found_lost(addresses: Mapping[str, str], reasons: Mapping[str, str]) -> WorkerError:
    GUARD.lost = dict(reasons)
    return lost_error(addresses, reasons)


def _lost(addresses: Mapping[str, str], error: tf.errors.OpError) -> dict[str, str]:
    """Workers without which a step has failed, with reasons.

    TensorFlow has a question for whether a worker still knows this program, which holds up all of Python while it is
    not answered. So what it says in errors has to do.
    """
    reasons = missing(addresses, ANSWER_SECONDS)
    if reasons:
        return reasons
    text = str(error)
    named = sorted({f"/job:{job}/task:{task}" for job, task in _WORKER.findall(text)} & addresses.keys())
    if _STARTED_AGAIN in text:
        return dict.fromkeys(named or addresses, "started again meanwhile")
    if isinstance(error, tf.errors.UnavailableError):
        return dict.fromkeys(named, "the connection broke")
    return {}


def lost_error(addresses: Mapping[str, str], reasons: Mapping[str, str]) -> WorkerError:
    """The error for workers, with reasons."""
    names = tuple(f"{name} at {addresses[name]}" for name in reasons)
    told = "; ".join(f"{name} ({why})" for name, why in zip(names, reasons.values(), strict=True))
    error = WorkerError(f"Lost {len(names)} worker(s) of {len(addresses)} during training: {told}. {_REMEDY}")
    error.workers = names
    return error
