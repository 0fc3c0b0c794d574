"""Stages on two machines, which are processes here: the same numbers, and what happens when one is lost."""

import contextlib
import functools
import json
import os
import pathlib
import queue
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import tensorflow as tf
from listening import SETTINGS, free, listener
from pipelined import CUTS

import tflms_sft
from rewriters.ir import tf_internals
from tflms_sft._cli.main import main
from tflms_sft._cluster import reachability
from tflms_sft._cluster.spec import read_cluster
from tflms_sft._params.device_names import machine_of
from tflms_sft._params.pipeline_params import PipelineParams

TOLERANCE = 1e-12
HELPERS = pathlib.Path(__file__).parents[1] / "helpers"
STARTS = 90
"""Seconds in which a process has imported TensorFlow, on a busy machine."""


class Program:
    """A process, and the lines that it prints."""

    def __init__(self, *command):
        path = os.pathsep.join(sys.path)
        env = os.environ | {"PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        hear = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # Children of a background shell do not.
        self.process = subprocess.Popen([sys.executable, *command], text=True, env=env, preexec_fn=hear, **pipes)
        self.lines, self.errors = queue.Queue(), []
        self.readers = [
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=self._hear, daemon=True),
        ]
        for reader in self.readers:
            reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.put(line.rstrip("\n"))
        self.lines.put(None)

    def _hear(self):
        self.errors.extend(self.process.stderr)

    def line(self, seconds=STARTS):
        """The next line; `None` at the end."""
        try:
            return self.lines.get(timeout=seconds)
        except queue.Empty:
            pytest.fail(f"nothing within {seconds} s: {''.join(self.errors)[-3000:]}")

    def until(self, name, seconds=STARTS):
        """Return the output of a program of `clustered.py` for a name, after reading all lines before it."""
        found = {}
        end = time.monotonic() + seconds
        while name not in found:
            line = self.line(max(end - time.monotonic(), 0.1))
            if line is None:
                pytest.fail(f"{name!r} was not said: {''.join(self.errors)[-3000:]}")
            if line.startswith("["):
                key, value = json.loads(line)
                found[key] = value
        return found

    def end(self, seconds=30):
        """The exit code."""
        code = self.process.wait(seconds)
        for reader in self.readers:
            reader.join(10)
        return code

    def kill(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(30)
        for reader in self.readers:
            reader.join(10)
        with contextlib.suppress(OSError):  # What was not sent any more.
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.stderr.close()


@pytest.fixture(scope="module")
def start():
    """Starts programs, and ends them all."""
    programs = []

    def begin(*command):
        programs.append(Program(*command))
        return programs[-1]

    yield begin
    for program in programs:
        program.kill()


@pytest.fixture(scope="module")
def addresses():
    """Reserve ports for two workers with bound sockets that do not listen.

    Such a port is shared with whoever asks to share it, as gRPC does.
    """
    with contextlib.ExitStack() as held:
        found = [held.enter_context(socket.socket()) for _ in range(2)]
        for one in found:
            one.bind(("127.0.0.1", 0))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        yield [f"127.0.0.1:{one.getsockname()[1]}" for one in found]


def worker(start, addresses, task, *options):
    """One that will serve."""
    return start("-m", "tflms_sft", "worker", "--cluster", ",".join(addresses), "--task", str(task), *options)


@pytest.fixture(scope="module")
def workers(start, addresses):
    """Two that serve."""
    found = [worker(start, addresses, task, "--quiet") for task in range(2)]
    for task, program in enumerate(found):
        text = f"tflms-sft worker: task {task} of 2 serves its CPU at {addresses[task]}; Ctrl-C ends it"
        assert program.line() == text
    return found


def chief(start, what, addresses, *more):
    return start(str(HELPERS / "clustered.py"), what, ",".join(addresses), *map(str, more))


# On workers -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(start, workers, addresses):
    """Return the output of a program with two workers."""
    program = chief(start, "equal", addresses)
    values = program.until("fit", 120)
    assert program.end() == 0, "".join(program.errors)[-3000:]
    return values


def test_connect_returns_worker_devices_in_order(found):
    assert found["devices"] == [f"/job:worker/replica:0/task:{task}/device:CPU:0" for task in range(2)]


def test_stage_devices_moves_variables_to_workers(found):
    assert {*found["devices"]} <= {*found["variables"]}


@pytest.mark.parametrize("schedule", ["basic", "1f1b"])
def test_step_on_two_machines_equals_plain(found, schedule):
    result = found[f"rewrite {schedule}"]
    assert result["error"] < TOLERANCE
    assert result["devices"] == found["devices"]


def test_fit_on_two_machines_equals_plain(found):
    """Four micro-batches do not cut the last batch evenly."""
    assert found["fit"] < TOLERANCE


def test_swaps_and_measurements_on_other_machines_are_refused(found):
    kind, text = found["disk"]
    assert kind == "SwapError" and "The step also runs on other machines, /job:worker/replica:0/task:0" in text
    kind, text = found["disk in stages"]
    assert kind == "SwapError" and "The step also runs on other machines, /job:worker/replica:0/task:0" in text
    assert found["tiles in stages"]["error"] < 1e-10 and found["tiles in stages"]["devices"] == 2
    kind, text = found["measure"]
    assert kind == "RewriteError" and "whose memory cannot be measured" in text
    kind, text = found["measure any size"]
    assert kind == "RewriteError" and "whose memory cannot be measured" in text
    kind, text = found["twice"]
    assert kind == "RuntimeError" and "must be called once" in text


@pytest.mark.parametrize("when", ["step", pytest.param("save", marks=pytest.mark.slow)])
def test_killed_worker_is_reported_and_training_resumes(start, workers, addresses, tmp_path, when):
    """The worker is lost in a step or in a backup, which block on a stopped worker until it is killed."""
    backup = tmp_path / "backup"
    program = chief(start, "train", addresses, backup, when)
    program.until("ready", 120)
    assert {path.name for path in backup.iterdir()} == {"latest.weights.h5", "training_metadata.json"}
    with replaced(start, workers, addresses, 1):
        workers[1].process.send_signal(signal.SIGSTOP)
        go_on(program)
        time.sleep(1)
        began = time.monotonic()
        workers[1].kill()
        lost = program.until("lost", 30)["lost"]
        assert time.monotonic() - began < 30
        assert program.end() != 0, "it ends by itself"
    gone = f"/job:worker/task:1 at {addresses[1]}"
    assert lost["workers"] == [gone]
    assert f"Lost 1 worker(s) of 2 during training: {gone} (Connection refused)" in lost["text"]
    for part in ("tflms-sft worker --cluster", "in a new process", "BackupAndRestore"):
        assert part in lost["text"]

    program = chief(start, "train", addresses, backup, "on")
    values = program.until("error", 120)
    assert program.end() == 0
    assert values["epochs"] == [2, 3], "it goes on from the backup"
    assert values["error"] < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("when", ["step", "save"])
def test_silent_worker_ends_training(start, workers, addresses, tmp_path, when):
    """The connection stays open, as with a disconnected machine. A backup reads weights one by one."""
    program = chief(start, "train", addresses, tmp_path / "backup", when)
    program.until("ready", 120)
    with replaced(start, workers, addresses, 1):
        workers[1].process.send_signal(signal.SIGSTOP)
        go_on(program)
        lost = program.until("lost", 30)["lost"]
        assert lost["workers"] == [f"/job:worker/task:1 at {addresses[1]}"]
        assert "(no answer within 5 s)" in lost["text"]
        assert program.end() != 0
        workers[1].kill()


def go_on(program):
    program.process.stdin.write("\n")
    program.process.stdin.flush()


@contextlib.contextmanager
def replaced(start, workers, addresses, task):
    """Afterwards another worker is in the place of one that was killed."""
    yield
    workers[task] = worker(start, addresses, task, "--json")
    served = ""
    while not served.endswith("}"):
        served += workers[task].line()
    assert json.loads(served) == {"command": "worker", "task": task, "tasks": 2, "address": addresses[task], "gpus": 0}


def test_worker_does_not_share_port_and_exits_on_interrupt(workers, addresses, capsys):
    """The last test with workers: one of them ends."""
    assert main(["worker", "--cluster", ",".join(addresses), "--task", "0"]) == 1
    assert f"Task 0 cannot serve at {addresses[0]}: Address already in use" in capsys.readouterr().err
    workers[0].process.send_signal(signal.SIGINT)
    assert workers[0].end() == 130
    assert "tflms-sft: interrupted" in "".join(workers[0].errors)


# Without workers --------------------------------------------------------------------------------------------


def test_missing_of_various_servers_gives_reasons():
    with listener(SETTINGS) as good, listener() as silent, listener(b"220 mail ready\r\n") as other:
        asked = {"good": good, "silent": silent, "other": other, "nobody": free(), "unknown": "nowhere.invalid:1"}
        found = reachability.missing(asked, 0.5)
    assert found.keys() == {"silent", "other", "nobody", "unknown"}
    assert found["silent"] == "no answer within 0.5 s" and found["nobody"] == "Connection refused"
    assert found["other"] == "a program that is not a worker answers there"


def test_wait_for_late_worker_returns_nothing():
    address = free()
    host, port = address.split(":")

    def late():
        time.sleep(0.5)
        with socket.create_server((host, int(port))) as server:
            connection, _ = server.accept()
            with connection:
                connection.sendall(SETTINGS)
                connection.recv(1)
                time.sleep(0.2)

    thread = threading.Thread(target=late)
    thread.start()
    assert reachability.wait_for({"late": address}, 10) == {}
    thread.join()


def test_connect_to_unreachable_workers_names_them(monkeypatch):
    """Here TensorFlow has begun long ago, and would not be asked for anything."""
    monkeypatch.setattr(tf_internals, "has_begun", lambda: False)
    with listener(SETTINGS) as good, listener() as silent:
        began = time.monotonic()
        gone = free()
        with pytest.raises(tflms_sft.WorkerError) as caught:
            tflms_sft.connect([good, gone, silent], timeout=1.5)
    assert time.monotonic() - began < 5
    assert caught.value.workers == (f"/job:worker/task:1 at {gone}", f"/job:worker/task:2 at {silent}")
    text = str(caught.value)
    assert "2 of 3 worker(s) did not answer within 1.5 s" in text and "Connection refused" in text
    assert "tflms-sft worker --cluster ... --task K" in text
    assert not tf_internals.workers()


def test_connect_after_tensorflow_use_is_refused():
    tf.constant(0)
    with pytest.raises(RuntimeError, match="must be called once, before any other use of TensorFlow"):
        tflms_sft.connect(["127.0.0.1:1"])


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"timeout": 0}, ValueError, "`timeout` must be above 0, in seconds. Received: timeout=0"),
        ({"timeout": "60"}, TypeError, "`timeout` must be a number of seconds. Received: timeout='60'"),
        ({"address": "here"}, ValueError, "`address` must be an address .* Received: 'here'"),
        ({"address": "192.0.2.1:2222"}, ValueError, "`address` cannot be used on this machine: Cannot assign"),
    ],
)
def test_connect_with_wrong_arguments_is_refused(arguments, error, text, monkeypatch):
    monkeypatch.setattr(tf_internals, "has_begun", lambda: False)
    with pytest.raises(error, match=text):
        tflms_sft.connect(["127.0.0.1:1"], **arguments)


TWO = ("10.0.0.2:2222", "10.0.0.3:2222")


def test_read_cluster_accepts_all_forms(tmp_path):
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({"cluster": {"worker": TWO, "chief": ["10.0.0.1:2222"]}, "task": {"type": "chief"}}))
    for form in (list(TWO), TWO, ", ".join(TWO), {"worker": TWO}, tf.train.ClusterSpec({"worker": list(TWO)})):
        assert read_cluster(form).workers == TWO and read_cluster(form).chief is None
    for form in (path, str(path)):
        assert read_cluster(form).workers == TWO and read_cluster(form).chief == "10.0.0.1:2222"
    assert read_cluster(["[fd00::2]:2222"]).names == {"/job:worker/task:0": "[fd00::2]:2222"}


@pytest.mark.parametrize(
    ("cluster", "error", "text"),
    [
        ("nowhere.json", ValueError, "must name a readable file: No such file .* cluster='nowhere.json'"),
        (__file__, ValueError, "`cluster` must name a JSON file"),
        (["10.0.0.2"], ValueError, "each worker in `cluster` must be an address .* Received: '10.0.0.2'"),
        (["10.0.0.2:0"], ValueError, "must be an address"),
        (["10.0.0.2:2222", 3], TypeError, "must be an address .* Received: 3"),
        ([], ValueError, "`cluster` has no workers"),
        ({"chief": "10.0.0.2:1"}, TypeError, "`cluster` must be a list of addresses"),
        ({"ps": TWO}, ValueError, r"may have the jobs \"worker\" and \"chief\" only. Received: \['ps'\]"),
        (7, TypeError, "Received: cluster=7"),
        ([TWO[0], TWO[0]], ValueError, r"without duplicates: \['10.0.0.2:2222'\]"),
        ([TWO[0], "127.0.0.1:2222"], ValueError, "must not mix loopback addresses with other addresses"),
    ],
)
def test_read_cluster_of_wrong_value_is_refused(cluster, error, text):
    with pytest.raises(error, match=text):
        read_cluster(cluster)


@pytest.mark.parametrize(
    ("cluster", "task", "code", "text"),
    [
        ("nowhere.json", "0", 2, "--cluster must name a readable file"),
        ("10.0.0.2", "0", 2, "each worker in --cluster must be an address"),
        (",".join(TWO), "2", 2, "--task must be from 0 to 1, one of the workers in --cluster: 10.0.0.2:2222"),
        ("192.0.2.1:2222", "0", 1, "Task 0 cannot serve at 192.0.2.1:2222: Cannot assign requested address"),
    ],
)
def test_worker_command_with_wrong_address_reports_reason(cluster, task, code, text, capsys):
    assert main(["worker", "--cluster", cluster, "--task", task]) == code
    out = capsys.readouterr()
    assert text in " ".join(out.err.split()) and not out.out
    assert main(["worker", "--cluster", cluster, "--task", task, "--json"]) == code
    assert text in json.loads(capsys.readouterr().out)["error"]["message"]


@pytest.mark.parametrize("arguments", [["--task", "0"], ["--cluster", "a:1"], ["--cluster", "a:1", "--task", "-1"]])
def test_worker_command_with_unreadable_arguments_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["worker", *arguments])
    assert stop.value.code == 2 and "usage" in capsys.readouterr().err


def test_stage_devices_of_unconnected_machine_is_refused():
    with pytest.raises(ValueError, match="Connect to the other machines with `tflms_sft.connect"):
        tflms_sft.stage_devices(_small(), 2, ["CPU:0", "/job:worker/task:0/device:CPU:0"])
    assert PipelineParams(CUTS, devices=[f"/job:worker/task:{n}/device:CPU:0" for n in range(4)]).num_stages == 4
    assert machine_of("/job:worker/task:0/device:CPU:0") == ""


def _small():
    from pipelined import net

    return net(["CPU:0"] * 4)
