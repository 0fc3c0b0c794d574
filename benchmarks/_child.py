"""Runs a function in a child process, samples the child's memory, and returns the function's result.

Every measurement has a process of its own. TensorFlow keeps memory that it once allocated, and reads the settings of
its allocators on import. A step that runs out of memory may kill its process. The function is named as
`module:function`. It gets its keyword arguments and `emit`, which sends a JSON-able dict to the parent at any time.

`run_child` starts a new interpreter. `run_forked` forks a process that has imported TensorFlow and has not used it.
"""

import ctypes
import dataclasses
import importlib
import json
import multiprocessing
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent

Event = dict[str, Any]
Emit = Callable[[Event], None]

# The process returns the memory of a freed tensor, so that RSS follows the tensors in use. By default the pool of
# TensorFlow and the heap of glibc keep freed memory.
TRUE_RSS_ENV = {"TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}

# Messages that TensorFlow and absl print in every run.
_NOISE = re.compile(
    r"^(I\d{4} |W\d{4} .*op_kernel|WARNING: All log messages|To enable the following instructions"
    r"|E\d{4} .*(cuInit|CUDA|cuda)|\d{4}-\d\d-\d\d .*: I )"
)
# Messages of TensorFlow, of oneDNN (status 1 is dnnl_out_of_memory), of the C++ and C libraries, and of NumPy.
_OOM = re.compile(
    r"OOM when allocating tensor with shape\[[\d,]*\] and type \w+"
    r"|Status: 1, message: [^,]*|std::bad_alloc|Cannot allocate memory|Unable to allocate [^\n]* for an array"
)
_PR_SET_PDEATHSIG = 1
_FORKS = multiprocessing.get_context("forkserver")


class Sample(NamedTuple):
    """Memory of a process at one moment.

    Attributes:
        seconds: Time since the process was started.
        rss: Bytes of resident pages.
        anonymous: Bytes of resident pages that belong to no file: heap and tensors, but not code.
        data: Bytes of private writable mappings, resident or not. RLIMIT_DATA limits these.
    """

    seconds: float
    rss: int
    anonymous: int
    data: int


@dataclasses.dataclass
class Outcome:
    """Exit status and output of a child process.

    Attributes:
        returncode: Exit status as in `subprocess`, negative for a signal.
        result: Result of the function; `None` if it did not return.
        error: Type and message of the exception that ended the function, or `None`.
        log: Output of the child on stdout and stderr.
        samples: Memory over time; empty without sampling.
        seconds: Lifetime of the process.
    """

    returncode: int
    result: Any
    error: dict[str, str] | None
    log: str
    samples: list[Sample]
    seconds: float

    @property
    def ok(self) -> bool:
        """Return whether the function returned."""
        return self.returncode == 0 and self.error is None

    def how_it_ended(self) -> str:
        """Return how the child ended, in one line."""
        if self.error:
            return f"{self.error['type']}: {first_line(self.error['message'])}"
        if self.returncode < 0:
            return f"killed by {signal.Signals(-self.returncode).name}"
        return f"exit code {self.returncode}"

    def log_tail(self, lines: int = 15) -> str:
        """Return the last lines of the log, without messages that every run prints."""
        messages = [line for line in self.log.splitlines() if line.strip() and not _NOISE.match(line)]
        return "\n".join(messages[-lines:])


def out_of_memory(outcome: Outcome) -> str | None:
    """Return the message of a child that ran out of memory; `None` if it did not.

    After a failed allocation TensorFlow's oneDNN kernels may continue with a null pointer. A signal then kills the
    child, with the failed allocation in the last line of its log.
    """
    if outcome.ok:
        return None
    text = (outcome.error["message"] if outcome.error else "") + outcome.log
    match = _OOM.search(text)
    if match is None and outcome.error and outcome.error["type"] == "MemoryError":
        return "MemoryError"
    if match is None:
        return None
    ended = outcome.error["type"] if outcome.error else outcome.how_it_ended()
    return f"{ended}: {match.group(0)}"


def leave_with(main: Callable[[], int]) -> None:
    """Run a program and exit with its exit code; print the failure of a child process, or an interruption."""
    try:
        sys.exit(main())
    except ChildError as error:
        sys.exit(f"A child process failed: {error}")
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        sys.exit(130)


class ChildError(RuntimeError):
    """Failure of a child process that had to succeed."""


def first_line(text: str) -> str:
    """Return the first line of a text that is not blank."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def status_bytes(field: str, pid: int | str = "self") -> int:
    """Read a size from /proc/PID/status.

    Args:
        field: Name of the line, such as "VmRSS" or "VmHWM".
        pid: The process.

    Returns:
        Bytes; 0 if the line is missing, as for a process that just ended.
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    match = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    return int(match.group(1)) * 1024 if match else 0


def reset_peak_rss() -> None:
    """Reset VmHWM, the peak of this process's RSS, to its present RSS."""
    Path("/proc/self/clear_refs").write_text("5")


def child_env(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a child: the parent's, with fewer messages and without GPUs, updated with `extra`."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    env["TF_CPP_MIN_LOG_LEVEL"] = "1"  # Keeps warnings: TensorFlow reports a failed allocation as one.
    env["CUDA_VISIBLE_DEVICES"] = "-1"
    env["KERAS_BACKEND"] = "tensorflow"
    env.setdefault("TFLMS_SFT_PLAN_CACHE", "off")  # Searches are measured, too.
    env.update(extra or {})
    return env


def run_child(
    target: str,
    kwargs: Mapping[str, Any],
    *,
    env: Mapping[str, str] | None = None,
    on_event: Callable[[Event], None] | None = None,
    sample_seconds: float | None = None,
) -> Outcome:
    """Call a function in a child process and wait for it.

    An interruption, for example by Ctrl-C, kills the child.

    Args:
        target: The function, as `module:function`.
        kwargs: Its keyword arguments, JSON-able.
        env: Environment variables that update those of `child_env`.
        on_event: Called in this process with each dict that the function emits.
        sample_seconds: Time between two samples of the child's memory; `None` for no samples.

    Returns:
        The outcome. A failure raises no exception.
    """
    read_fd, write_fd = os.pipe()
    command = [sys.executable, "-m", "benchmarks._child", target, json.dumps(dict(kwargs)), str(write_fd)]
    with tempfile.TemporaryFile("w+", errors="replace") as log, os.fdopen(read_fd, "rb", buffering=0) as pipe:
        began = time.monotonic()
        try:
            process = subprocess.Popen(
                command,
                env=child_env(env),
                pass_fds=(write_fd,),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        finally:
            os.close(write_fd)
        watch = _Watch(process.pid, began, on_event, sample_seconds)
        try:
            watch.follow(pipe)
            process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        seconds = time.monotonic() - began
        log.seek(0)
        text = log.read()
    return Outcome(process.returncode, watch.result, watch.error, text, watch.samples, seconds)


def start_fork_server(modules: Sequence[str]) -> None:
    """Start the process that imports `modules` and that `run_forked` forks.

    Variables that TensorFlow reads on import are those of `child_env` in all of its children.
    """
    environment = dict(os.environ)
    os.environ.update(child_env())
    try:
        _FORKS.set_forkserver_preload(list(modules))
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(environment)


def run_forked(target: str, kwargs: Mapping[str, Any], *, env: Mapping[str, str]) -> Outcome:
    """Call a function in a child of the fork server and wait for it.

    The child saves the import of TensorFlow. Devices, allocators and process-wide settings are its own.

    Args:
        target: The function, as `module:function`.
        kwargs: Its keyword arguments, JSON-able.
        env: Environment variables that update those of the server. TensorFlow has read some of these on import.

    Returns:
        The outcome. A failure raises no exception.
    """
    reader, writer = _FORKS.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile("r", errors="replace") as log, reader:
        began = time.monotonic()
        process = _FORKS.Process(target=_forked, args=(writer, log.name, dict(env), target, json.dumps(dict(kwargs))))
        with writer:
            process.start()
        watch = _Watch(process.pid or 0, began, None, None)
        try:
            with os.fdopen(os.dup(reader.fileno()), "rb", buffering=0) as pipe:
                watch.follow(pipe)
            process.join()
        finally:
            if process.is_alive():
                process.kill()
                process.join()
        seconds = time.monotonic() - began
        text = log.read()
    return Outcome(process.exitcode or 0, watch.result, watch.error, text, watch.samples, seconds)


def _forked(writer: Connection, log: str, env: dict[str, str], target: str, kwargs: str) -> None:
    """Child's side of `run_forked`."""
    os.environ.update(env)
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    main([target, kwargs, str(os.dup(writer.fileno()))])


def call_in_child(target: str, kwargs: Mapping[str, Any], **options: Any) -> Any:
    """Call a function in a child process that has to succeed.

    Args:
        target: The function, as `module:function`.
        kwargs: Its keyword arguments, JSON-able.
        **options: Further arguments of `run_child`.

    Returns:
        Result of the function.

    Raises:
        ChildError: If the child fails. The message ends with its last output.
    """
    outcome = run_child(target, kwargs, **options)
    if not outcome.ok:
        message = outcome.error["message"] if outcome.error else outcome.how_it_ended()
        raise ChildError(f"{target}: {message}\n{outcome.log_tail()}".rstrip())
    return outcome.result


class _Watch:
    """Parent's side: reads events from the pipe and samples the memory, in one loop."""

    def __init__(
        self,
        pid: int,
        began: float,
        on_event: Callable[[Event], None] | None,
        sample_seconds: float | None,
    ) -> None:
        self.result: Any = None
        self.error: dict[str, str] | None = None
        self.samples: list[Sample] = []
        self._pid = pid
        self._began = began
        self._on_event = on_event
        self._sample_seconds = sample_seconds

    def follow(self, pipe: IO[bytes]) -> None:
        """Read until the child closes the pipe, at the latest when it ends."""
        buffered = b""
        while True:
            ready, _, _ = select.select([pipe], [], [], self._sample_seconds)
            if self._sample_seconds is not None:
                self._sample()
            if not ready:
                continue
            chunk = pipe.read(65536)
            if not chunk:
                return
            *lines, buffered = (buffered + chunk).split(b"\n")
            for line in lines:
                self._take(json.loads(line))

    def _take(self, message: Event) -> None:
        if message["kind"] == "result":
            self.result = message["value"]
        elif message["kind"] == "error":
            self.error = message["value"]
        elif self._on_event is not None:
            self._on_event(message["value"])

    def _sample(self) -> None:
        seconds = time.monotonic() - self._began
        rss, anonymous, data = (status_bytes(field, self._pid) for field in ("VmRSS", "RssAnon", "VmData"))
        if rss and data:  # Zero in a process that is about to end.
            self.samples.append(Sample(seconds, rss, anonymous, data))


def _die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies, even by SIGKILL."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main(arguments: list[str]) -> int:
    """Child's side: call the function and send its result or its error."""
    target, kwargs, fd = arguments
    _die_with_parent()
    os.set_inheritable(int(fd), False)
    with os.fdopen(int(fd), "w", buffering=1) as channel:

        def send(kind: str, value: Any) -> None:
            channel.write(json.dumps({"kind": kind, "value": value}) + "\n")

        module, _, name = target.partition(":")
        try:
            function = getattr(importlib.import_module(module), name)
            send("result", function(**json.loads(kwargs), emit=lambda event: send("event", event)))
        except Exception as error:
            send("error", {"type": type(error).__name__, "message": str(error)})
            raise
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
