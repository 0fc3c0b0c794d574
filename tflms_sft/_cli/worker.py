"""`tflms-sft worker`: serves the devices of this machine to a program on another machine.

TensorFlow's server does the work. This module first checks two mistakes that the server accepts without an error: an
address that no other machine can reach, and a port that another process uses.
"""

from __future__ import annotations

import argparse
import functools
import threading
from typing import Any

from rewriters.errors import WorkerError
from tflms_sft._cli.exit_status import Outcome, Progress, UsageError
from tflms_sft._cluster.reachability import fail_fast, why_not_bound
from tflms_sft._cluster.spec import Cluster, read_cluster

__all__: list[str] = []


def execute(options: argparse.Namespace) -> Outcome:
    """Start the server.

    Raises:
        UsageError: If the cluster cannot be read, or the task is not in it.
        WorkerError: If this machine cannot serve at the address.
    """
    cluster = _cluster(options)
    address = cluster.workers[options.task]
    why = why_not_bound(address)
    if why:
        raise WorkerError(
            f"Task {options.task} cannot serve at {address}: {why}. The address must be one of this machine, with a "
            "free port. Check that --task is the position of this machine in --cluster, counted from 0."
        )
    Progress(options.quiet).say("starting TensorFlow ...")
    fail_fast()
    server, gpus = _start_server(cluster, options.task)
    devices = f"{gpus} GPU(s)" if gpus else "its CPU"
    count = len(cluster.workers)
    text = f"tflms-sft worker: task {options.task} of {count} serves {devices} at {address}; Ctrl-C ends it"
    data = {"command": "worker", "task": options.task, "tasks": count, "address": address, "gpus": gpus}
    return Outcome(text, data, then=functools.partial(_wait, server))


def _cluster(options: argparse.Namespace) -> Cluster:
    try:
        cluster = read_cluster(options.cluster)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error).replace("`cluster`", "--cluster").replace("cluster=", "--cluster ")) from None
    if options.task >= len(cluster.workers):
        raise UsageError(
            f"--task must be from 0 to {len(cluster.workers) - 1}, one of the workers in --cluster: "
            f"{', '.join(cluster.workers)}. Received: --task {options.task}."
        )
    return cluster


def _start_server(cluster: Cluster, task: int) -> tuple[Any, int]:
    import tensorflow as tf

    jobs = {"worker": list(cluster.workers)}
    server = tf.distribute.Server(tf.train.ClusterSpec(jobs), job_name="worker", task_index=task)
    return server, len(tf.config.list_physical_devices("GPU"))


def _wait(server: Any) -> None:
    """Wait forever. In Python, because `server.join` ignores Ctrl-C."""
    del server  # The caller's reference keeps it alive.
    threading.Event().wait()
