"""Selection of the devices of a pipeline: those named by the user, or those of the machine."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tflms_sft._params.device_names import parse_device
from tflms_sft._params.pipeline_params import PipelineParams


def available_devices() -> list[str]:
    """Return the devices of a pipeline if none are named: accelerators, or else logical CPUs."""
    devices = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    return [device.name for device in devices]


def find_devices(names: Sequence[str]) -> list[str]:
    """Return device names in TensorFlow's spelling.

    Raises:
        ValueError: If there is no such device.
    """
    known = {parse_device(device.name): device.name for device in tf.config.list_logical_devices()}
    missing = [name for name in names if parse_device(name) not in known]
    if missing:
        afar = any(parse_device(name).job != "localhost" for name in missing)
        hint = "Create logical devices with `tf.config.set_logical_device_configuration`"
        if afar:
            hint = "Connect to the other machines with `tflms_sft.connect(...)`"
        raise ValueError(
            f"`devices` must name devices of this program: {list(known.values())}. Received: {missing}. {hint}, before "
            "any other use of TensorFlow."
        )
    return [known[parse_device(name)] for name in names]


def select_devices(params: PipelineParams, num_stages: int) -> list[str]:
    """Return the devices of a pipeline: those named, or the first available ones.

    Raises:
        ValueError: If there are too few of them, or one does not exist.
    """
    if params.devices is not None:
        params.check_devices(len(params.devices), num_stages)
        return find_devices(params.devices)
    known = available_devices()
    needed = num_stages * params.data_replicas
    if len(known) < needed:
        raise ValueError(
            f"The pipeline needs {needed} devices, one for each stage of each data replica. This program has "
            f"{len(known)}: {known}. Use fewer stages, or pass `devices=`, which may name a device several times."
        )
    return known[:needed]
