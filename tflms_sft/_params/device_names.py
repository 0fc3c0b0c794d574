"""Parsing and comparison of device names, in the short and the full form of TensorFlow."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from rewriters.ir import tf_internals

_NAME = re.compile(
    r"^(?:/job:(?P<job>[^/:]+))?(?:/replica:(?P<replica>\d+))?(?:/task:(?P<task>\d+))?"
    r"(?:/|/device:|device:)?(?P<type>[A-Za-z_]+):(?P<index>\d+)$"
)


class Device(NamedTuple):
    """A parsed device name.

    Attributes:
        job: Name of the job; `"localhost"` without one.
        task: Index of the task.
        kind: Type in capitals, such as `"GPU"`.
        number: Index of the device.
    """

    job: str
    task: int
    kind: str
    number: int


def parse_device(name: object) -> Device:
    """Parse a device name.

    Raises:
        TypeError: If it is not a string.
        ValueError: If it is not a device name.
    """
    if not isinstance(name, str):
        raise TypeError(f"`devices` must be a list of device names. Received an item {name!r}.")
    match = _NAME.match(name)
    if match is None:
        raise ValueError(
            '`devices` must have names such as "GPU:0", "/device:CPU:1" or "/job:worker/task:0/device:GPU:0". '
            f"Received an item {name!r}."
        )
    return Device(match["job"] or "localhost", int(match["task"] or 0), match["type"].upper(), int(match["index"]))


def is_same_device(one: str, other: str) -> bool:
    """Tell whether two names denote one device."""
    return parse_device(one) == parse_device(other)


def machine_of(name: str) -> str:
    """Return the remote machine of a device, such as `"/job:worker/task:1"`; empty for local devices and other text."""
    match = _NAME.match(name)
    machine = f"/job:{match['job']}/task:{int(match['task'] or 0)}" if match is not None and match["job"] else ""
    return machine if machine in tf_internals.workers() else ""


def remote_devices(concrete_fn: Any) -> list[str]:
    """Return the devices of other machines that hold variables or run ops of a traced step, sorted."""
    if not tf_internals.workers():
        return []
    names = [getattr(tensor, "device", "") for tensor in concrete_fn.captured_inputs]
    names += [operation.device for _, operation in tf_internals.operations(concrete_fn.graph)]
    return sorted({name for name in names if name and machine_of(name)})
