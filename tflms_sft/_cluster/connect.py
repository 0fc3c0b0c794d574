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
from tflms_sft._cluster.worker_watch import GUARD


def connect(cluster: Any, *, address: str | None = None, timeout: float = 60.0) -> tuple[str, ...]:
    """Connect to workers that `tflms-sft worker` started, so that pipelines can have stages on them.

    Call it before anything else is done with TensorFlow: devices cannot be added later.

    Args:
        cluster: Addresses `"HOST:PORT"` of the workers, in the order of their tasks: a list, a string with commas
            between, a mapping `{"worker": [...]}`, a `tf.train.ClusterSpec`, or the path of a JSON file with a list or
            a mapping, the one that the workers were started with.
        address: `"HOST:PORT"` under which the workers reach this program. Defaults to `None`: that of the `"chief"` in
            `cluster`, or else of the network by which the first worker is reached, with a port that is free.
        timeout: Seconds to wait for workers that are not there yet. Defaults to 60.

    Returns:
        Names of the workers' devices in order, for `devices=` of `PipelineParams` and `stage_devices`: their GPUs, of
        those without any the CPUs.

    Raises:
        RuntimeError: If TensorFlow has begun to work already.
        TypeError: For a value of the wrong type.
        ValueError: For a wrong value, and a file that cannot be read.
        WorkerError: If workers do not answer in time, or do not reach each other or this program; it names them.

    Example:
    >>> devices = tflms_sft.connect(["10.0.0.2:2222", "10.0.0.3:2222"])
    >>> cuts = tflms_sft.stage_devices(model, 2, devices)
    >>> model.fit(data, callbacks=[tflms_sft.Pipeline(cuts, "1f1b", 8, devices)])
    """
    found = read_cluster(cluster)
    timeout = _checked_timeout(timeout)
    end = time.monotonic() + timeout
    chief = found.chief if address is None else checked_address(address, "`address`")
    if tf_internals.has_begun():
        raise RuntimeError(
            "`tflms_sft.connect` was called after TensorFlow has begun to work, or a second time, and devices cannot "
            "be added then. Call it first, before any tensor, variable or model is made and before devices are listed."
        )
    chief = chief or own_address(list(found.workers))
    why = why_not_bound(chief)
    if why:
        raise ValueError(f"`address` cannot be used on this machine: {why}. Received: {chief!r}.")
    _refuse(wait_for(found.names, timeout), found, f"did not answer within {timeout:g} s")
    fail_fast()
    jobs = {"localhost": [chief], "worker": list(found.workers)}
    tf.config.experimental_connect_to_cluster(tf.train.ClusterSpec(jobs), job_name="localhost")
    _begin(found, chief, max(end - time.monotonic(), 10.0))
    GUARD.begin()
    return tuple(name for task in range(len(found.workers)) for name in _devices_of(task))


def _checked_timeout(timeout: Any) -> float:
    if not isinstance(timeout, numbers.Real) or isinstance(timeout, bool):
        raise TypeError(f"`timeout` must be a number of seconds. Received: timeout={timeout!r}.")
    seconds = float(timeout)
    if not 0 < seconds < float("inf"):
        raise ValueError(f"`timeout` must be above 0, in seconds. Received: timeout={timeout!r}.")
    return seconds


def _refuse(reasons: dict[str, str], cluster: Cluster, what: str) -> None:
    if reasons:
        names = tuple(f"{name} at {cluster.names[name]}" for name in reasons)
        told = "; ".join(f"{name}: {why}" for name, why in zip(names, reasons.values(), strict=True))
        error = WorkerError(
            f"{len(reasons)} of {len(cluster.workers)} worker(s) {what}: {told}. Start each with `tflms-sft worker "
            "--cluster ... --task K`, and see that its port is open for the other machines."
        )
        error.workers = names
        raise error


def _begin(cluster: Cluster, chief: str, seconds: float) -> None:
    """Make devices, and have each machine send something to each other: in a thread, for it may never end."""
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
    why = f"TensorFlow says: {failed[0]}" if failed else f"Nothing came of it within {seconds:.0f} s."
    error = WorkerError(
        f"The workers answer, but the machines of the cluster do not all reach each other: the chief at {chief} and "
        f"{', '.join(f'{name} at {address}' for name, address in cluster.names.items())}. Each connects to each by "
        "these addresses, the workers to the chief, too; `address=` tells which is the chief's. See that ports are "
        f"open, and that all have the same version of TensorFlow ({tf.__version__} here). {why}"
    )
    error.workers = tuple(f"{name} at {address}" for name, address in cluster.names.items())
    raise error from (failed[0] if failed else None)


def _exchange(cluster: Cluster) -> None:
    """A number from each machine to each other."""
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
    own = [
        device
        for device in tf.config.list_logical_devices()
        if device.name.startswith(f"/job:worker/replica:0/task:{task}/")
    ]
    kinds = {"GPU"} if any(device.device_type == "GPU" for device in own) else {"CPU"}
    return [device.name for device in own if device.device_type in kinds]
