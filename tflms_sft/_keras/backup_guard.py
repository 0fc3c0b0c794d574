"""Weights that are saved while they come from other machines.

Keras writes into the file that it is given. If a worker is lost meanwhile, a part of a file is left in the place of the
last good one; and what Keras then restores from it may be the weights alone, with a warning that the optimizer's were
left out. So they are written beside it, and take its place when all of them are there.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from rewriters.ir import tf_internals
from tflms_sft._cluster.worker_watch import workers_watched

_PART = "part-of-"


class BackupGuard:
    """Stands for `model.save_weights` during a training on several machines.

    Args:
        model: The model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._plain = model.save_weights

    def __call__(self, filepath: Any, overwrite: bool = True, **options: Any) -> None:
        """As `keras.Model.save_weights`.

        Raises:
            WorkerError: If a worker is lost meanwhile; the file is as it was.
        """
        path = os.fspath(filepath)
        folder, name = os.path.split(path)
        with workers_watched():
            if not overwrite or options or "://" in path or not name.endswith(".weights.h5"):
                self._plain(filepath, overwrite=overwrite, **options)
                return
            part = os.path.join(folder, _PART + name)
            try:
                self._plain(part, overwrite=True)
                os.replace(part, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.remove(part)
                raise

    def remove(self) -> None:
        """Put Keras's own back."""
        if self._model.__dict__.get("save_weights") is self:
            object.__delattr__(self._model, "save_weights")


def watch_saves(model: Any) -> BackupGuard | None:
    """Have weights that a model saves be whole; does nothing without other machines, nor to somebody else's saves.

    One that is there from a training that failed, whose end Keras tells nobody of, is taken over.
    """
    there = model.__dict__.get("save_weights")
    if isinstance(there, BackupGuard):
        there.remove()
    elif there is not None:
        return None
    if not tf_internals.workers():
        return None
    saves = BackupGuard(model)
    object.__setattr__(model, "save_weights", saves)
    return saves
