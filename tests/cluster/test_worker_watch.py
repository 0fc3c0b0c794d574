"""Workers that are lost while a step runs: what they are told from, and what is left alone. Without workers."""

import contextlib
import json
import os
import socket
import threading
import time

import keras
import pytest
import tensorflow as tf
from listening import SETTINGS, free, listener

import tflms_sft
from rewriters.ir import tf_internals
from tflms_sft._cluster import reachability, worker_watch
from tflms_sft._cluster.spec import split_address


@pytest.fixture
def one_worker(monkeypatch):
    """Simulate a connection to one worker, which answers."""
    with listener(SETTINGS) as address:
        watch(monkeypatch, lambda: {"/job:worker/task:0": address})
        yield address


def watch(monkeypatch, workers):
    """Watch workers as in a new process."""
    monkeypatch.setattr(worker_watch, "WATCH", worker_watch.WorkerWatch(workers))
    return worker_watch.WATCH


def raised(error):
    with worker_watch.workers_watched():
        raise error


def test_workers_watched_keeps_unrelated_error(one_worker):
    with pytest.raises(tf.errors.InvalidArgumentError, match="a wrong batch"):
        raised(tf.errors.InvalidArgumentError(None, None, "a wrong batch"))
    with pytest.raises(tf.errors.OutOfRangeError):
        raised(tf.errors.OutOfRangeError(None, None, "the end"))


def test_restarted_worker_is_lost(one_worker):
    text = "Unable to find a context_id matching the specified one (7). Perhaps the worker was restarted?"
    with pytest.raises(tflms_sft.WorkerError, match=f"task:0 at {one_worker} .restarted during training"):
        raised(tf.errors.InvalidArgumentError(None, None, text))


def test_broken_connection_is_lost(one_worker):
    text = "Socket closed. Additional GRPC error information from remote target /job:worker/replica:0/task:0"
    with pytest.raises(tflms_sft.WorkerError, match=f"task:0 at {one_worker} .the connection broke"):
        raised(tf.errors.UnavailableError(None, None, text))


def test_step_after_lost_worker_is_refused(one_worker):
    """TensorFlow might wait without end for what was on it."""
    text = "Socket closed. Additional GRPC error information from remote target /job:worker/replica:0/task:0"
    with pytest.raises(tflms_sft.WorkerError):
        raised(tf.errors.UnavailableError(None, None, text))
    begun, model = [], dense()
    with (
        pytest.raises(tflms_sft.WorkerError, match="the connection broke.* in a new process"),
        worker_watch.workers_watched(),
    ):
        begun.append("a step")
    with pytest.raises(tflms_sft.WorkerError, match="the connection broke"):
        fitted(model, [Gone(0, begun.append), tflms_sft.Pipeline(["one"], devices=["CPU:0"] * 2, verbose=0)])
    assert not begun and "train_step" not in model.__dict__


@pytest.fixture
def quick_answers(monkeypatch):
    """Poll workers often, and expect an answer within 0.2 seconds."""
    for name, seconds in (("POLL_SECONDS", 0.01), ("ANSWER_SECONDS", 0.2)):
        monkeypatch.setattr(worker_watch, name, seconds)


def test_connections_to_silent_worker_are_shut_down(quick_answers, monkeypatch):
    """The pending call ends; connections to other workers stay open."""
    with listener() as silent, listener(SETTINGS) as good:
        asked = {"/job:worker/task:0": good, "/job:worker/task:1": silent}
        guard = watch(monkeypatch, lambda: asked)
        ours = [socket.create_connection(split_address(address), timeout=10) for address in (silent, good)]
        with worker_watch.workers_watched():
            assert ours[0].recv(1) == b"", "it ends"
        ours[1].settimeout(0.1)
        assert ours[1].recv(100) == SETTINGS
        with pytest.raises(TimeoutError):
            ours[1].recv(1)
        assert guard.silent == {"/job:worker/task:1": "no answer within 0.2 s"}
        with pytest.raises(tflms_sft.WorkerError, match=f"task:1 at {silent} .no answer within 0.2 s"):
            raised(tf.errors.UnavailableError(None, None, "Socket closed"))
        for connection in ours:
            connection.close()
        asked.clear()
    assert reachability.break_connections("nowhere.invalid:1") == 0


def test_break_connections_leaves_no_descriptor_open():
    with contextlib.ExitStack() as open_things:
        address = open_things.enter_context(listener(SETTINGS))
        ours = open_things.enter_context(socket.create_connection(split_address(address), timeout=10))
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):  # One of them is not connected.
            open_things.enter_context(socket.socket(socket.AF_INET6, kind))
        for connection in (*socket.socketpair(), socket.socket(socket.AF_UNIX)):
            open_things.enter_context(connection)
        for descriptor in os.pipe():
            open_things.callback(os.close, descriptor)
        assert ours.recv(100) == SETTINGS, "what the listener holds is open by now"
        before = len(os.listdir("/proc/self/fd"))
        assert [reachability.break_connections(free()) for _ in range(3)] == [0, 0, 0]
        assert reachability.break_connections(address) == 1
        assert len(os.listdir("/proc/self/fd")) == before
        assert ours.recv(1) == b"", "it ends"


def test_silent_worker_is_announced_once_where_connections_cannot_be_ended(capsys, monkeypatch):
    guard = worker_watch.WorkerWatch()
    guard.silent = {"/job:worker/task:1": "no answer within 5 s"}
    with monkeypatch.context() as patched:
        patched.setattr(worker_watch, "open_descriptors", lambda: None)
        for _ in range(2):
            guard._break({"/job:worker/task:1": free()})
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "tflms-sft: /job:worker/task:1 does not answer, and this system does not list the connections"
    )
    guard = worker_watch.WorkerWatch()
    guard.silent = {"/job:worker/task:1": "no answer within 5 s"}
    guard._break({"/job:worker/task:1": free()})
    assert capsys.readouterr().err == ""


def test_worker_watch_survives_error_and_restarts(quick_answers, capsys):
    asked, done = [], threading.Event()

    class Failing(worker_watch.WorkerWatch):
        def missing(self, addresses):
            asked.append(addresses)
            done.set() if len(asked) > 2 else None
            raise ValueError("no such thing")

    workers = {"/job:worker/task:0": free()}
    guard = Failing(lambda: workers)
    guard.begin()
    assert done.wait(10)
    workers = {}
    assert "polling the workers failed: ValueError('no such thing')" in capsys.readouterr().err


def test_watch_that_ended_begins_again(quick_answers):
    watched = threading.Semaphore(0)
    guard = worker_watch.WorkerWatch(lambda: watched.release() or {})
    for _ in range(2):
        guard.begin()
        assert watched.acquire(timeout=10)
        time.sleep(0.1)


class Gone(keras.callbacks.Callback):
    """From some epoch on there is a worker that does not answer."""

    def __init__(self, epoch, then):
        super().__init__()
        self.epoch, self.then = epoch, then

    def on_train_batch_end(self, batch, logs=None):
        if self.epoch == 0:
            self.then(self.model)

    def on_epoch_end(self, epoch, logs=None):
        self.epoch -= 1


def dense():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="one"), keras.layers.Dense(1)])
    model.compile("adam", "mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    return model


def fitted(model, callbacks):
    model.fit(tf.zeros((2, 2)), tf.zeros((2, 1)), epochs=3, verbose=0, callbacks=callbacks)


def test_epoch_end_checks_workers(monkeypatch):
    gone, model, workers = free(), dense(), {}
    watch(monkeypatch, lambda: workers)

    def lose(model):
        workers["/job:worker/task:0"] = gone

    pipeline = tflms_sft.Pipeline(["one"], devices=["CPU:0"] * 2, verbose=0)
    plain = model.__dict__.get("train_step")
    with pytest.raises(tflms_sft.WorkerError, match="Lost 1 worker"):
        fitted(model, [Gone(0, lose), pipeline])
    assert model.__dict__.get("train_step") is plain, "the model is as it was"


def test_incomplete_backup_does_not_replace_last(one_worker, tmp_path, monkeypatch):
    """Keras would go on from it, without what the optimizer has."""
    monkeypatch.setattr(tf_internals, "workers", worker_watch.WATCH.workers)
    model = dense()

    def lose(model):
        def save(store):
            raise tf.errors.UnavailableError(None, None, "remote target /job:worker/replica:0/task:0")

        model.optimizer.save_own_variables = save

    def callbacks(epoch):
        pipeline = tflms_sft.Pipeline(["one"], devices=["CPU:0"] * 2, verbose=0)
        return [pipeline, Gone(epoch, lose), keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)]

    with pytest.raises(tflms_sft.WorkerError, match="the connection broke"):
        fitted(model, callbacks(1))
    assert json.loads((tmp_path / "training_metadata.json").read_text())["epoch"] == 1
    model = dense()
    model.load_weights(tmp_path / "latest.weights.h5")
    assert int(model.optimizer.iterations) == 1
    watch(monkeypatch, worker_watch.WATCH.workers)
    fitted(model, callbacks(-1))
    assert int(model.optimizer.iterations) == 3
    assert "save_weights" not in model.__dict__
