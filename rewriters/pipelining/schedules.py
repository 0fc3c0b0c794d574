"""Schedules: the order in which each device runs the stages of a pipeline, as data.

A training step is cut into n *stages* and run for m *micro-batches*. Each micro-batch goes forward through stages 0 to
n-1 and backward through n-1 to 0; which of these slots a device runs, and in which order, is a schedule. TensorFlow's
executor starts whatever is ready, which is no order at all, so a pass holds it to one of these lists. Nothing here
knows a graph: `schedule_simulator.py` executes the same lists for their time, their memory and their deadlocks.

Rows are devices and columns are time where forward and backward take a unit each; `F1` is the forward of micro-batch 1
in the stage of that device, `B1` its backward, and dots are idle. n = 4 stages:

`basic`, m = 1: one device works at a time (Jain et al., "GEMS", section IV-A); m micro-batches take m times as long,
which GEMS calls delayed synchronisation (IV-C).

    device 0  F0 .. .. .. .. .. .. B0
    device 1  .. F0 .. .. .. .. B0 ..
    device 2  .. .. F0 .. .. B0 .. ..
    device 3  .. .. .. F0 B0 .. .. ..

`gpipe`, m = 4: all forwards, then all backwards from the last micro-batch to the first (Huang et al., "GPipe"; Seal et
al., "Toward Large-Scale Image Segmentation on Summit", figure 5).

    device 0  F0 F1 F2 F3 .. .. .. .. .. .. B3 B2 B1 B0
    device 1  .. F0 F1 F2 F3 .. .. .. .. B3 B2 B1 B0 ..
    device 2  .. .. F0 F1 F2 F3 .. .. B3 B2 B1 B0 .. ..
    device 3  .. .. .. F0 F1 F2 F3 B3 B2 B1 B0 .. .. ..

`1f1b`, m = 4: as long, but stage s never holds the activations of more than n - s micro-batches (Narayanan et al.,
"PipeDream", section 3.2, with one update at the end).

    device 0  F0 F1 F2 F3 .. .. .. B0 .. B1 .. B2 .. B3
    device 1  .. F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3 ..
    device 2  .. .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 .. ..
    device 3  .. .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. .. ..

`mast`, m = 2: a second replication of the network lies the other way round, its stage s on device n - 1 - s, and starts
where the first one's backward has left memory and time (GEMS, V-A and figure 8b).

    device 0  F0 .. .. .. .. .. .. B0 F1 B1 .. .. ..
    device 1  .. F0 .. .. .. .. B0 F1 .. .. B1 .. ..
    device 2  .. .. F0 .. .. B0 F1 .. .. .. .. B1 ..
    device 3  .. .. .. F0 B0 F1 .. .. .. .. .. .. B1

`master`: the same with m replications, odd ones inverted (GEMS, V-B and figure 8c; its eta is m).

    device 0  F0 .. .. .. .. .. .. B0 F1 B1 F2 .. .. .. .. .. .. B2
    device 1  .. F0 .. .. .. .. B0 F1 .. .. B1 F2 .. .. .. .. B2 ..
    device 2  .. .. F0 .. .. B0 F1 .. .. .. .. B1 F2 .. .. B2 .. ..
    device 3  .. .. .. F0 B0 F1 .. .. .. .. .. .. B1 F2 B2 .. .. ..

`hybrid` puts copies of any of these beside each other, for data parallelism (GEMS, V-C).
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import numbers
import types
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

__all__: list[str] = []


class Direction(enum.Enum):
    """Directions of a micro-batch through a stage."""

    FORWARD = "F"
    BACKWARD = "B"


class Slot(NamedTuple):
    """Unit of work of a device: one micro-batch through one stage, forward or backward.

    Attributes:
        kind: Forward or backward.
        micro_batch: Number of the micro-batch, from 0.
        stage: Number of the stage, from 0, in the order of the forward pass.
    """

    kind: Direction
    micro_batch: int
    stage: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_batch} of stage {self.stage}"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Slots of each device, in their order.

    Attributes:
        name: Name of its rule, such as `"gpipe"`.
        num_stages: Stages of the step, at least 1. Each data replica has all of them.
        micro_batches: Micro-batches of all data replicas together, at least 1. Replica r of R has the contiguous run of
            `micro_batches // R` that starts at `r * micro_batches // R`.
        devices: Slots of each device, in the order in which it runs them.
        data_replicas: Copies of a pipeline that stand beside each other, at least 1, each on its own contiguous run of
            `num_devices // data_replicas` devices. The replications of MAST and MASTER, which share devices, do not
            count.
    """

    name: str
    num_stages: int
    micro_batches: int
    devices: tuple[tuple[Slot, ...], ...]
    data_replicas: int = 1

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return len(self.devices)

    def slots(self) -> Iterator[Slot]:
        """Yield all slots, device by device, in the order of each."""
        for slots in self.devices:
            yield from slots

    @functools.cached_property
    def _devices_of_slots(self) -> Mapping[Slot, int]:
        return {slot: device for device, slots in enumerate(self.devices) for slot in slots}

    def device_of(self, slot: Slot) -> int:
        """Return the index of the device that runs a slot.

        Raises:
            KeyError: If none does.
        """
        return self._devices_of_slots[slot]

    def devices_of(self, stage: int) -> tuple[int, ...]:
        """Return the devices that run a stage for any micro-batch, ascending: each reads its weights.

        The first holds the weights where only one copy is kept.
        """
        return tuple(d for d, slots in enumerate(self.devices) if any(slot.stage == stage for slot in slots))

    def stages_on(self, device: int) -> tuple[int, ...]:
        """Return the stages of which a device runs any micro-batch, ascending."""
        return tuple(sorted({slot.stage for slot in self.devices[device]}))

    def check(self) -> None:
        """Check that each slot exists once, with its backward on the device of its forward.

        Whether the orders fit together is not checked: a cycle of waiting is found by `simulator.simulate`.

        Raises:
            ValueError: With all faults.
        """
        counts = collections.Counter(self.slots())
        wanted = [
            Slot(kind, micro_batch, stage)
            for micro_batch in range(self.micro_batches)
            for stage in range(self.num_stages)
            for kind in Direction
        ]
        faults = [f"{slot} is missing" for slot in wanted if slot not in counts]
        faults += [f"{slot} is there {count} times" for slot, count in counts.items() if count > 1]
        faults += [f"{slot} does not exist" for slot in counts.keys() - set(wanted)]
        homes = self._devices_of_slots
        for slot in wanted:
            forward = slot._replace(kind=Direction.FORWARD)
            if slot.kind is Direction.BACKWARD and slot in homes and homes.get(forward, homes[slot]) != homes[slot]:
                faults.append(f"{slot} is on device {homes[slot]}, its forward on device {homes[forward]}")
        faults += self._faults_of_replicas()
        if faults:
            raise ValueError(
                f"The schedule {self.name!r} of {self.num_stages} stages and {self.micro_batches} micro-batches needs "
                f"each slot once, and forward and backward on one device. Received: {'; '.join(faults)}."
            )

    def _faults_of_replicas(self) -> list[str]:
        replicas = self.data_replicas
        if replicas < 1 or self.num_devices % replicas or self.micro_batches % replicas:
            shared = f"{self.num_devices} devices and {self.micro_batches} micro-batches"
            return [f"{shared} do not divide among {replicas} data replicas"]
        devices, micro_batches = self.num_devices // replicas, self.micro_batches // replicas
        return [
            f"{slot} is on device {device}, outside those of replica {slot.micro_batch // micro_batches}"
            for device, slots in enumerate(self.devices)
            for slot in slots
            if slot.micro_batch // micro_batches != device // devices
        ]


def basic(num_stages: int, micro_batches: int = 1) -> Schedule:
    """Return a schedule that runs micro-batches one after another, each forward through all stages, then backward."""
    turns = [slot for j in range(micro_batches) for slot in ((Direction.FORWARD, j), (Direction.BACKWARD, j))]
    return _upright("basic", micro_batches, [turns] * num_stages)


def gpipe(num_stages: int, micro_batches: int) -> Schedule:
    """Return a schedule of all forwards, then all backwards from the last micro-batch to the first."""
    turns = _filled_and_drained(range(micro_batches))
    return _upright("gpipe", micro_batches, [turns] * num_stages)


def one_f_one_b(num_stages: int, micro_batches: int) -> Schedule:
    """Return a schedule in which stage s runs n - s forwards, then backwards and forwards alternately."""

    def turns(stage: int) -> list[tuple[Direction, int]]:
        warm_up = min(micro_batches, num_stages - stage)
        order = [(Direction.FORWARD, j) for j in range(warm_up)]
        for j in range(micro_batches):
            order.append((Direction.BACKWARD, j))
            if warm_up + j < micro_batches:
                order.append((Direction.FORWARD, warm_up + j))
        return order

    return _upright("1f1b", micro_batches, [turns(stage) for stage in range(num_stages)])


def mast(num_stages: int, micro_batches: int = 2) -> Schedule:
    """Return GEMS-MAST: two replications, the second one inverted and after the first.

    GEMS gives each replication one micro-batch. With more, an even number, each gets half of them and runs it as
    `gpipe` does; GEMS says in VIII-A and X that it pipelines where the batch allows it. (`master` instead keeps to one
    micro-batch at a time.)
    """
    half = micro_batches // 2
    first, second = _filled_and_drained(range(half)), _filled_and_drained(range(half, micro_batches))
    devices = [
        [Slot(kind, j, d) for kind, j in first] + [Slot(kind, j, num_stages - 1 - d) for kind, j in second]
        for d in range(num_stages)
    ]
    return Schedule("mast", num_stages, micro_batches, tuple(map(tuple, devices)))


def master(num_stages: int, eta: int) -> Schedule:
    """Return GEMS-MASTER: eta replications of a micro-batch each, odd ones with the devices in reverse order."""
    devices = [
        [Slot(kind, j, num_stages - 1 - d if j % 2 else d) for j in range(eta) for kind in Direction]
        for d in range(num_stages)
    ]
    return Schedule("master", num_stages, eta, tuple(map(tuple, devices)))


def hybrid(schedule: Schedule, data_replicas: int) -> Schedule:
    """Return copies of a schedule on devices of their own, for data parallelism.

    Replica r runs the schedule on devices r*n to (r+1)*n - 1 for micro-batches r*m to (r+1)*m - 1, where n and m are
    the devices and micro-batches that it has; `Schedule.micro_batches` of the result counts those of all replicas.
    """
    devices = tuple(
        tuple(slot._replace(micro_batch=r * schedule.micro_batches + slot.micro_batch) for slot in slots)
        for r in range(data_replicas)
        for slots in schedule.devices
    )
    return dataclasses.replace(
        schedule,
        micro_batches=data_replicas * schedule.micro_batches,
        devices=devices,
        data_replicas=data_replicas * schedule.data_replicas,
    )


SCHEDULES: Mapping[str, Callable[[int, int], Schedule]] = types.MappingProxyType(
    {"basic": basic, "gpipe": gpipe, "1f1b": one_f_one_b, "mast": mast, "master": master}
)
"""Builders by the names that users write; each takes the numbers of stages and micro-batches."""


def make(name: str, num_stages: int, micro_batches: int, data_replicas: int = 1) -> Schedule:
    """Return the schedule of a name.

    Args:
        name: A key of `SCHEDULES`.
        num_stages: Stages of the step.
        micro_batches: Micro-batches of each data replica; MASTER's number of replications. Even for `"mast"`.
        data_replicas: Copies on devices of their own. The schedule has `data_replicas * micro_batches` micro-batches.

    Raises:
        ValueError: If there is no such schedule, or not for these numbers.
        TypeError: If a number is not an integer.
    """
    if name not in SCHEDULES:
        raise ValueError(f"`schedule` must be one of {', '.join(map(repr, SCHEDULES))}. Received: schedule={name!r}.")
    _check_count("num_stages", num_stages)
    _check_count("micro_batches", micro_batches)
    _check_count("data_replicas", data_replicas)
    if name == "mast" and micro_batches % 2:
        raise ValueError(
            '`micro_batches` must be even for schedule="mast", which gives each of its two replications half of them. '
            f'Received: micro_batches={micro_batches}. Give an even number, or schedule="master", which takes any.'
        )
    schedule = SCHEDULES[name](int(num_stages), int(micro_batches))
    return hybrid(schedule, int(data_replicas)) if data_replicas > 1 else schedule


def _check_count(argument: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"`{argument}` must be an integer of at least 1. Received: {argument}={value!r}.")
    if value < 1:
        raise ValueError(f"`{argument}` must be at least 1. Received: {argument}={value!r}.")


def _filled_and_drained(micro_batches: range) -> list[tuple[Direction, int]]:
    """Return all forwards, then all backwards in reverse."""
    return [(Direction.FORWARD, j) for j in micro_batches] + [(Direction.BACKWARD, j) for j in reversed(micro_batches)]


def _upright(name: str, micro_batches: int, turns: list[list[tuple[Direction, int]]]) -> Schedule:
    """Return the device of stage s: s."""
    devices = tuple(tuple(Slot(kind, j, stage) for kind, j in order) for stage, order in enumerate(turns))
    return Schedule(name, len(turns), micro_batches, devices)
