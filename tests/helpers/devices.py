"""Devices that tests plan for, in place of the one of this machine."""

import dataclasses

from rewriters.device.cards import CARDS
from rewriters.ir.device_detection import planned_device
from rewriters.ir.device_model import planning_for

NO_CACHES = {"l3_bytes": 0, "last_level_cache_bytes": 0}
"""Facts of a processor whose convolution gradients unfold one image at a time, in little scratch memory."""

ONEDNN = {"has_allocator_stats": True, "min_counted_bytes": 0, "maps_pages": True}
"""Facts of a processor with oneDNN, without the fragmentation of its allocator."""


def planning_with(**facts):
    """Return the context of plans for the planned device with other facts, as the fields of `DeviceModel`."""
    return planning_for(lambda device: dataclasses.replace(device, **facts))


def planning_for_card(name, **facts):
    """Return the context of plans for a graphics card, with other facts."""
    return planning_for(lambda device: dataclasses.replace(CARDS[name].device_model(device), **facts))


def device_with(**facts):
    """Return the planned device with other facts."""
    return dataclasses.replace(planned_device(), **facts)
