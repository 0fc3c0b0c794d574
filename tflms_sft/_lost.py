"""Workers that are lost while a step runs.

A process that ends closes its connections, and TensorFlow's calls fail at once, with one of several errors. A process
that is stopped and a machine that is cut off close nothing, and the step would wait for them without end: so somebody
asks the workers while it runs, and cancels it.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping

import tensorflow as tf

from rewriters import _tf_private
from rewriters.errors import WorkerError
from tflms_sft._reach import missing

ASKED_EVERY_SECONDS = 5.0
"""How long a step runs before the workers are asked, and again."""

ANSWER_SECONDS = 5.0
"""How long a worker may take."""

_MISSED = 2
"""So many times in a row, because a machine that works hard may be slow once."""

_WORKER = re.compile(r"/job:(\w+)/replica:0/task:(\d+)")
_STARTED_AGAIN = "Unable to find a context_id"
_REMEDY = (
    "The weights and the optimizer's slots that were on it are gone. Start it again (`tflms-sft worker --cluster ... "
    "--task K`), and run this program again, in a new process: with `keras.callbacks.BackupAndRestore` among the "
    "callbacks of `fit` training goes on from the last backup."
)


@contextlib.contextmanager
def workers_watched() -> Iterator[None]:
    """A block that runs a step: ends with an error that names the workers that were lost meanwhile.

    Without a cluster it does nothing.

    Raises:
        WorkerError: If some were.
    """
    addresses = _tf_private.workers() if tf.executing_eagerly() else {}
    if not addresses:
        yield
        return
    silent: dict[str, str] = {}
    done = threading.Event()
    with _tf_private.cancellable() as cancel:
        watch = threading.Thread(target=_ask, args=(addresses, silent, done, cancel), daemon=True)
        watch.start()
        try:
            yield
        except (StopIteration, tf.errors.OutOfRangeError):
            raise
        except tf.errors.OpError as error:
            done.set()
            lost = silent or _lost(addresses, error)
            if lost:
                raise lost_error(addresses, lost) from error
            raise
        finally:
            done.set()


def check_workers() -> None:
    """See whether all workers answer now.

    Raises:
        WorkerError: If some do not.
    """
    addresses = _tf_private.workers()
    reasons = missing(addresses, ANSWER_SECONDS)
    if reasons:
        raise lost_error(addresses, reasons)


def _ask(
    addresses: Mapping[str, str], silent: dict[str, str], done: threading.Event, cancel: Callable[[], None]
) -> None:
    missed: dict[str, int] = {}
    while not done.wait(ASKED_EVERY_SECONDS):
        reasons = missing(addresses, ANSWER_SECONDS)
        missed = {name: missed.get(name, 0) + 1 for name in reasons}
        lost = {name: why for name, why in reasons.items() if missed[name] >= _MISSED}
        if lost and not done.is_set():
            silent.update(lost)
            cancel()
            return


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
