"""Tests of `guard_backups`: saving weights of a model that trains on several machines."""

import keras

from rewriters.ir import tf_internals
from tflms_sft._cluster.backup_guard import guard_backups


def test_guard_backups_after_failed_training_replaces_old_guard(monkeypatch, fresh_keras):
    """Keras calls no callback at the end of a failed training."""
    monkeypatch.setattr(tf_internals, "workers", lambda: {"/job:worker/task:0": "127.0.0.1:1"})
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    left = guard_backups(model)
    again = guard_backups(model)
    assert model.__dict__["save_weights"] is again is not left
    left.remove()
    assert model.__dict__["save_weights"] is again
    again.remove()
    assert "save_weights" not in model.__dict__
    guard_backups(model)
    monkeypatch.setattr(tf_internals, "workers", dict)
    assert guard_backups(model) is None and "save_weights" not in model.__dict__
    object.__setattr__(model, "save_weights", print)
    assert guard_backups(model) is None and model.__dict__["save_weights"] is print
