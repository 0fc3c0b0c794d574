"""Atomic saving of weights whose values come from other machines.

Keras writes directly into the target file. If a worker is lost while it writes, a truncated file replaces the last
complete backup. Keras may then restore the weights alone, with a warning that the optimizer state is missing. The guard
writes to a file beside the target and renames it once it is complete.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from rewriters.ir import tf_internals
from tflms_sft._cluster.worker_watch import workers_watched
from tflms_sft._util.keras_internals import ABSENT, override, overriding

_TEMPORARY_PREFIX = "part-of-"


class BackupGuard:
    """Replaces `model.save_weights` during a training on several machines."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._original_save = model.save_weights

    def __call__(self, filepath: Any, overwrite: bool = True, **options: Any) -> None:
        """Save the weights as `keras.Model.save_weights` does, and replace the file only when it is complete.

        Raises:
            WorkerError: If a worker is lost meanwhile; the previous file is unchanged.
        """
        path = os.fspath(filepath)
        folder, name = os.path.split(path)
        with workers_watched():
            if not overwrite or options or "://" in path or not name.endswith(".weights.h5"):
                self._original_save(filepath, overwrite=overwrite, **options)
                return
            temporary = os.path.join(folder, _TEMPORARY_PREFIX + name)
            try:
                self._original_save(temporary, overwrite=True)
                os.replace(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.remove(temporary)
                raise

    def remove(self) -> None:
        """Restore Keras's `save_weights`."""
        if overriding(self._model, "save_weights") is self:
            override(self._model, "save_weights", ABSENT)


def guard_backups(model: Any) -> BackupGuard | None:
    """Install a `BackupGuard` in a model that uses other machines, and return it.

    A guard that a failed training left behind is replaced, because Keras calls no callback at that end. A
    `save_weights` of the user's own is kept; then, and without other machines, the result is `None`.
    """
    present = overriding(model, "save_weights")
    if isinstance(present, BackupGuard):
        present.remove()
    elif present is not ABSENT:
        return None
    if not tf_internals.workers():
        return None
    guard = BackupGuard(model)
    override(model, "save_weights", guard)
    return guard
