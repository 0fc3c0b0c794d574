"""Names of devices, as users write them and as TensorFlow does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from rewriters import _tf_private

if TYPE_CHECKING:
    from tflms_sft._pipeline_params import PipelineParams

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


def parsed(name: object) -> Device:
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


def same(one: str, other: str) -> bool:
    """Whether two names mean one device."""
    return parsed(one) == parsed(other)


def machine_of(name: str) -> str:
    """Such as `"/job:worker/task:1"`; empty for a device of this one, and for no name of a device."""
    found = _NAME.match(name)
    machine = f"/job:{found['job']}/task:{int(found['task'] or 0)}" if found is not None and found["job"] else ""
    return machine if machine in _tf_private.workers() else ""


def elsewhere(concrete_fn: Any) -> list[str]:
    """Devices of other machines that a traced step has variables or operations on."""
    if not _tf_private.workers():
        return []
    names = [getattr(tensor, "device", "") for tensor in concrete_fn.captured_inputs]
    names += [operation.device for _, operation in _tf_private.operations(concrete_fn.graph)]
    return sorted({name for name in names if name and machine_of(name)})


def available() -> list[str]:
    """Devices that a pipeline takes if none are named: accelerators, or else logical CPUs."""
    found = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    return [device.name for device in found]


def found(names: Sequence[str]) -> list[str]:
    """The names as TensorFlow writes them.

    Raises:
        ValueError: If there is no such device.
    """
    known = {parsed(device.name): device.name for device in tf.config.list_logical_devices()}
    missing = [name for name in names if parsed(name) not in known]
    if missing:
        afar = any(parsed(name).job != "localhost" for name in missing)
        made = "Logical devices are made by `tf.config.set_logical_device_configuration`"
        if afar:
            made = "Those of other machines are there after `tflms_sft.connect(...)`"
        raise ValueError(
            f"`devices` names {missing}, which this program does not have. It has: {list(known.values())}. {made}, "
            "before anything else is done."
        )
    return [known[parsed(name)] for name in names]


def chosen(params: PipelineParams, num_stages: int) -> list[str]:
    """The devices of a pipeline: those named, or the first ones.

    Raises:
        ValueError: If there are too few of them, or one does not exist.
    """
    if params.devices is not None:
        params.check_devices(len(params.devices), num_stages)
        return found(params.devices)
    known = available()
    needed = num_stages * params.data_replicas
    if len(known) < needed:
        raise ValueError(
            f"`devices` was not given, and {needed} devices are needed, one for each stage of each data replica. "
            f"This program has {len(known)}: {known}. Ask for fewer stages, or name devices, one several times maybe."
        )
    return known[:needed]
