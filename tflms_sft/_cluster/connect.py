"""Connect this program, the chief, to workers on other machines."""

from __future__ import annotations

import numbers
import threading
import time
from typing import Any

import tensorflow as tf

from rewriters.errors import WorkerError
from rewriters.ir import tf_internals
from tflms_sft._cluster.reachability import fail_fast, own_address, wait_for, why_not_bound
from tflms_sft._cluster.spec import Cluster, checked_address, read_cluster
from tflms_sft._cluster.worker_watch import WATCH


def connect(cluster: Any, *, address: str | None = None, timeout: float = 60.0) -> tuple[str, ...]:
    """Connect to workers that `tflms-sft worker` started, so that pipelines can have stages on them.

    Call it before any other use of TensorFlow, because devices cannot be added later.

    Args:
        cluster: Addresses `"HOST:PORT"` of the workers, in the order of their tasks: a list, a string separated by
            commas, a mapping `{"worker": [...]}` with an optional `"chief"`, a `tf.train.ClusterSpec`, or the path of a
            JSON file with a list or a mapping, also in the form of `TF_CONFIG`. It must equal the cluster that the
            workers were started with.
        address: `"HOST:PORT"` under which the workers reach this program. `None`: the address of the `"chief"` in
            `cluster`, otherwise a free port of the interface that reaches the first worker.
        timeout: Seconds to wait for workers that have not started yet.

    Returns:
        Names of the workers' devices in the order of tasks, for `devices=` of `PipelineParams` and `stage_devices`:
        the GPUs of each worker, or its CPU if it has no GPU.

    Raises:
        RuntimeError: If TensorFlow has been used already.
        TypeError: For a value of the wrong type.
        ValueError: For a wrong value, or a file that cannot be read.
        WorkerError: If workers do not answer in time, or cannot reach each other or this program. It names them.

    Examples:
        >>> devices = tflms_sft.connect(["10.0.0.2:2222", "10.0.0.3:2222"])
        >>> cuts = tflms_sft.stage_devices(model, 2, devices)
        >>> model.fit(data, callbacks=[tflms_sft.Pipeline(cuts, "1f1b", 8, devices)])
    """
    parsed = read_cluster(cluster)
    timeout = _checked_timeout(timeout)
    end = time.monotonic() + timeout
    chief = parsed.chief if address is None else checked_address(address, "`address`")
    if tf_internals.has_begun():
        raise RuntimeError(
            "`tflms_sft.connect` must be called once, before any other use of TensorFlow: devices cannot be added "
            "later. Call it before you create tensors, variables or models, and before you list devices."
        )
    chief = chief or own_address(list(parsed.workers))
    why = why_not_bound(chief)
    if why:
        raise ValueError(f"`address` cannot be used on this machine: {why}. Received: {chief!r}.")
    _refuse(wait_for(parsed.names, timeout), parsed, f"did not answer within {timeout:g} s")
    fail_fast()
    jobs = {"localhost": [chief], "worker": list(parsed.workers)}
    tf.config.experimental_connect_to_cluster(tf.train.ClusterSpec(jobs), job_name="localhost")
    _connect_all(parsed, chief, max(end - time.monotonic(), 10.0))
    WATCH.begin()
    return tuple(name for task in range(len(parsed.workers)) for name in _devices_of(task))


def _checked_timeout(timeout: Any) -> float:
    if not isinstance(timeout, numbers.Real) or isinstance(timeout, bool):
        raise TypeError(f"`timeout` must be a number of seconds. Received: timeout={timeout!r}.")
    seconds = float(timeout)
    if not 0 < seconds < float("inf"):
        raise ValueError(f"`timeout` must be above 0, in seconds. Received: timeout={timeout!r}.")
    return seconds


def _refuse(reasons: dict[str, str], cluster: Cluster, problem: str) -> None:
    if reasons:
        names = tuple(f"{name} at {cluster.names[name]}" for name in reasons)
        details = "; ".join(f"{name}: {reason}" for name, reason in zip(names, reasons.values(), strict=True))
        error = WorkerError(
            f"{len(reasons)} of {len(cluster.workers)} worker(s) {problem}: {details}. Start each with `tflms-sft "
            "worker --cluster ... --task K`, and open its port for the other machines."
        )
        error.workers = names
        raise error


def _connect_all(cluster: Cluster, chief: str, seconds: float) -> None:
    """Create the devices and exchange a number between all machines, in a thread, because it may block forever."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            tf.config.list_logical_devices()
            _exchange(cluster)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not thread.is_alive() and not failed:
        return
    cause = f"TensorFlow's error: {failed[0]}" if failed else f"The exchange did not end within {seconds:.0f} s."
    error = WorkerError(
        f"The workers answer, but the machines of the cluster do not all reach each other: the chief at {chief} and "
        f"{', '.join(f'{name} at {address}' for name, address in cluster.names.items())}. All pairs connect by these "
        "addresses: open the ports, set `address=` if that of the chief is wrong, and install the same version of "
        f"TensorFlow ({tf.__version__} here). {cause}"
    )
    error.workers = tuple(f"{name} at {address}" for name, address in cluster.names.items())
    raise error from (failed[0] if failed else None)


def _exchange(cluster: Cluster) -> None:
    """Send a number between each pair of machines."""
    places = ["/job:localhost/task:0/device:CPU:0", *(f"{name}/device:CPU:0" for name in cluster.names)]

    @tf.function(autograph=False)
    def exchange(number: Any) -> Any:
        sent = []
        for place in places:
            with tf.device(place):
                sent.append(number + 1)
        received = []
        for place in places:
            with tf.device(place):
                received.append(tf.add_n(sent))
        with tf.device(places[0]):
            return tf.add_n(received)

    total = int(exchange(tf.constant(0)))
    assert total == len(places) ** 2, total


def _devices_of(task: int) -> list[str]:
    devices = [
        device
        for device in tf.config.list_logical_devices()
        if device.name.startswith(f"/job:worker/replica:0/task:{task}/")
    ]
    device_type = "GPU" if any(device.device_type == "GPU" for device in devices) else "CPU"
    return [device.name for device in devices if device.device_type == device_type]
