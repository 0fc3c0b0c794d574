"""Names of devices, as users write them and as TensorFlow does."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from rewriters.ir import tf_internals

_NAME = re.compile(
    r"^(?:/job:(?P<job>[^/:]+))?(?:/replica:(?P<replica>\d+))?(?:/task:(?P<task>\d+))?"
    r"(?:/|/device:|device:)?(?P<type>[A-Za-z_]+):(?P<index>\d+)$"
)


class Device(NamedTuple):
    """A device, however its name is written."""

    job: str
    task: int
    kind: str
    number: int


def parse_device(name: object) -> Device:
    """What a name means.

    Raises:
        TypeError: If it is no string.
        ValueError: If it is no name of a device.
    """
    if not isinstance(name, str):
        raise TypeError(f"`devices` must be a list of names of devices. Received: {name!r} among them.")
    found = _NAME.match(name)
    if found is None:
        raise ValueError(
            '`devices` must have names such as "GPU:0", "/device:CPU:1" or "/job:worker/task:0/device:GPU:0". '
            f"Received: {name!r} among them."
        )
    return Device(found["job"] or "localhost", int(found["task"] or 0), found["type"].upper(), int(found["index"]))


def is_same_device(one: str, other: str) -> bool:
    """Whether two names mean one device."""
    return parse_device(one) == parse_device(other)


def machine_of(name: str) -> str:
    """Such as `"/job:worker/task:1"`; empty for a device of this one, and for no name of a device."""
    found = _NAME.match(name)
    machine = f"/job:{found['job']}/task:{int(found['task'] or 0)}" if found is not None and found["job"] else ""
    return machine if machine in tf_internals.workers() else ""


def elsewhere(concrete_fn: Any) -> list[str]:
    """Devices of other machines that a traced step has variables or operations on."""
    if not tf_internals.workers():
        return []
    names = [getattr(tensor, "device", "") for tensor in concrete_fn.captured_inputs]
    names += [operation.device for _, operation in tf_internals.operations(concrete_fn.graph)]
    return sorted({name for name in names if name and machine_of(name)})
