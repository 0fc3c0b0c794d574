"""Tests of the TensorBoard log, read back with TensorBoard's data API if it is installed."""

import os
import sys

import keras
import pytest
import tensorflow as tf
from training import BUDGET, SETTINGS, X, Y, budgeted, measure_steps, net, tiles

import tflms_sft
from tflms_sft._report import tensorboard
from tflms_sft._report.plan_records import Measurement
from tflms_sft._report.tensorboard import TrainingLog, tensorboard_of_this_fit

SCALARS = {"memory/predicted_peak_bytes", "memory/budget_bytes", "memory/swapped_bytes", "time/step_seconds"}


@pytest.fixture
def statistics(monkeypatch):
    """Simulate a device with statistics: 1000 bytes more in each epoch."""
    peaks = iter(range(1000, 10**6, 1000))
    measure_steps(monkeypatch, lambda step_bytes: next(peaks))


def read(run):
    """Return (scalars by tag as (step, value), images, texts) of the only file of a run."""
    (path,) = run.iterdir()
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(path), {"tensors": 0})
    events.Reload()
    found = {}
    for tag in events.Tags()["tensors"]:
        metadata = events.SummaryMetadata(tag)
        assert metadata.summary_description or not tag.startswith(("memory/", "time/"))
        plugin = metadata.plugin_data.plugin_name
        points = [(event.step, tf.make_ndarray(event.tensor_proto)) for event in events.Tensors(tag)]
        found.setdefault(plugin, {})[tag] = points
    return found


@pytest.mark.usefixtures("statistics")
def test_training_log_writes_to_run_of_losses(tmp_path):
    pytest.importorskip("tensorboard")
    pytest.importorskip("matplotlib")
    callback, board = budgeted(), keras.callbacks.TensorBoard(tmp_path, write_graph=False)
    validated = {"validation_data": (X[:4], Y[:4])}
    net().fit(X[:8], Y[:8], batch_size=4, epochs=2, callbacks=[callback, board], **validated, **SETTINGS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train", "validation"]
    found = read(tmp_path / "train")
    scalars = {tag: [(step, float(value)) for step, value in points] for tag, points in found["scalars"].items()}
    assert set(scalars) >= {*SCALARS, "memory/peak_bytes", "epoch_loss"}
    assert all([step for step, _ in scalars[tag]] == [0, 1] for tag in SCALARS)
    assert scalars["memory/predicted_peak_bytes"] == [(n, callback.plan.predicted.peak_bytes) for n in (0, 1)]
    assert scalars["memory/budget_bytes"] == [(0, 700 * 1024), (1, 700 * 1024)]
    (_, first), (_, second) = scalars["memory/peak_bytes"]
    assert 1000 <= first < second and all(0 < seconds < 60 for _, seconds in scalars["time/step_seconds"])
    ((step, picture),) = found["images"]["memory/plan_picture"]
    width, height, png = picture
    shape = tf.io.decode_png(png).shape
    assert step == 0 and shape[:2] == (int(height), int(width)) and shape[0] > 300
    ((_, (text,)),) = found["text"]["memory/plan"]
    assert text.decode() == "\n".join(f"    {line}" for line in callback.plan.summary().splitlines())


def test_training_log_writes_to_own_log_dir(tmp_path):
    """Without statistics there is no measured peak."""
    callback = tiles(log_dir=tmp_path / "logs")
    net().fit(X[:4], Y[:4], batch_size=4, epochs=2, initial_epoch=1, callbacks=[callback], **SETTINGS)
    (run,) = (tmp_path / "logs").iterdir()
    assert run.name == "train"
    found = read(run)
    assert set(found["scalars"]) - {"memory/peak_bytes"} == SCALARS - {"memory/budget_bytes"}
    assert [step for step, _ in found["scalars"]["time/step_seconds"]] == [1]


def test_training_log_without_log_dir_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net().fit(X[:4], Y[:4], batch_size=4, callbacks=[tiles()], **SETTINGS)
    assert not os.listdir(tmp_path)


def test_training_log_without_tensorboard_package_works(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # An import of it fails.
    log = TrainingLog(str(tmp_path), None)
    plan = tflms_sft.Plan(
        False, 2, True, (), (), *(tflms_sft.Prediction(2**20, 2**10, 1.0, (), (("op", 2**20),)) for _ in range(2))
    )
    log.epoch_begins()
    for _ in range(2):
        log.batch_begins()
        log.batch_ends(3, plan, 1)
    log.epoch_ends(3, plan, Measurement(2**20, "a test"))
    log.close()
    monkeypatch.undo()
    found = read(tmp_path / "train")
    assert [(step, float(value)) for step, value in found["scalars"]["memory/peak_bytes"]] == [(3, 2**20)]
    assert len(found["text"]["memory/plan"]) == 1, "once, not in every step"


def test_training_log_step_time_excludes_first_execution(monkeypatch):
    clock = iter([0.0, 9.0, 10.0, 12.0, 20.0, 24.0])
    monkeypatch.setattr(tensorboard.time, "perf_counter", lambda: next(clock))
    log = TrainingLog("unused", None)
    for _ in range(3):
        log.batch_begins()
        log.batch_ends(0, None, steps=2)
    assert log._step_seconds() == pytest.approx((2.0 + 4.0) / 2 / 2)


def test_tensorboard_of_this_fit_returns_callback():
    found = []

    class Asking(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            found.append(tensorboard_of_this_fit())

    class Board(keras.callbacks.TensorBoard):
        def on_train_begin(self, logs=None):
            """Without a model."""

    board = Board("logs")
    for callbacks in ([Asking()], [Asking(), board]):
        keras.callbacks.CallbackList(callbacks).on_train_begin()
    assert found == [None, board] and tensorboard_of_this_fit() is None


def test_training_log_other_log_dir_is_own_run(tmp_path):
    board = keras.callbacks.TensorBoard(tmp_path / "a")
    assert TrainingLog(str(tmp_path / "a"), board).board is board
    assert TrainingLog(str(tmp_path / "b"), board).board is None
    assert TrainingLog(None, board).board is board and not TrainingLog(None, None).active


@pytest.mark.parametrize("make", [tflms_sft.SFT, tflms_sft.LMS, lambda **o: tflms_sft.MemoryBudget(BUDGET, **o)])
def test_checked_log_dir_invalid_value_is_refused(make):
    with pytest.raises(TypeError, match="`log_dir` must be a directory for TensorBoard, or None. Received: log_dir=3"):
        make(log_dir=3)


def test_training_log_without_plan_writes_nothing(tmp_path):
    log = TrainingLog(str(tmp_path), None)
    log.epoch_ends(0, None, None)
    log.close()
    assert not os.listdir(tmp_path)
