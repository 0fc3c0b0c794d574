"""Simulator of schedules: executes a schedule with durations in place of work.

Each device runs its list in order, as it will when the graph runs; nothing else is decided here. A slot starts when its
device is free and its input is there:

    F(s)    after F(s-1) of the same micro-batch
    B(s)    after B(s+1); in the last stage after F(n-1)

and `transfer` seconds later where the input comes from another device; sending occupies neither of them. When the last
backward of a stage that lies on several devices (MAST, MASTER, data replicas) is over, its gradients are exchanged,
`reduce` seconds beside what the devices compute, a device in one exchange at a time.

Not modelled: the update, tensors that skip stages (they arrive before the chain does), links that transfers share.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rewriters.errors import ScheduleError
from rewriters.pipelining.schedules import Direction, Schedule, Slot

__all__: list[str] = []

MAX_COLUMNS = 64
"""Approximate width of a drawing; longer schedules are drawn coarser."""


class Exchange(NamedTuple):
    """Exchange of a stage's gradients between its devices.

    Attributes:
        stage: Number of the stage.
        devices: Devices that run it.
        begin: Begin in seconds from the start of the step.
        end: End in seconds from the start of the step.
    """

    stage: int
    devices: tuple[int, ...]
    begin: float
    end: float


@dataclasses.dataclass(frozen=True)
class Simulation:
    """Times and memory of an executed schedule.

    Attributes:
        schedule: The schedule.
        seconds: Duration from the start of the step to the end of the last slot or exchange.
        begins: Begin of each slot, in seconds from the start of the step.
        ends: End of each slot.
        busy: Seconds in which each device computes.
        peak_bytes: Weights of its stages plus the peak of activations, for each device.
        critical_path: Slots that follow each other without a pause but for transfers, from the start of the step to
            what ends last; the step becomes shorter only if one of them does, or starts from something else.
        exchanges: Of the gradients, in the order of their beginning; none where every stage has one device.
    """

    schedule: Schedule
    seconds: float
    begins: Mapping[Slot, float]
    ends: Mapping[Slot, float]
    busy: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    critical_path: tuple[Slot, ...]
    exchanges: tuple[Exchange, ...]

    @property
    def idle(self) -> tuple[float, ...]:
        """Seconds in which each device does not compute."""
        return tuple(self.seconds - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """Idle fraction of the time of all devices, from 0 to 1."""
        total = self.seconds * len(self.busy)
        return sum(self.idle) / total if total else 0.0


def simulate(
    schedule: Schedule,
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: float | Sequence[float] = 0.0,
    *,
    reduce: float | Sequence[float] = 0.0,
    weights: Sequence[int] | None = None,
    activations: Sequence[int] | None = None,
) -> Simulation:
    """Simulate a schedule.

    Args:
        schedule: What each device runs, in order. It is checked.
        forward: Seconds of each stage's forward for one micro-batch.
        backward: Seconds of each stage's backward for one micro-batch.
        transfer: Seconds from a device to another one, either way: one number, or one for each border between stages s
            and s + 1.
        reduce: Seconds in which the gradients of a stage are exchanged, for stages on several devices: one number, or
            one for each stage.
        weights: Bytes that a device holds for each stage of which it runs any micro-batch. Defaults to 0.
        activations: Bytes that each stage keeps for one micro-batch from its forward to its backward. Defaults to 0.

    Raises:
        ScheduleError: If slots wait for each other.
        ValueError: If a list has another length than the stages, a number is negative, or the schedule has faults.
    """
    schedule.check()
    n = schedule.num_stages
    times = {
        Direction.FORWARD: _numbers("forward", forward, n, "stage"),
        Direction.BACKWARD: _numbers("backward", backward, n, "stage"),
    }
    transfers = _numbers("transfer", transfer, n - 1, "border between stages")
    reduces = _numbers("reduce", reduce, n, "stage")
    weight_bytes = _numbers("weights", 0 if weights is None else weights, n, "stage")
    held = _numbers("activations", 0 if activations is None else activations, n, "stage")

    begins, ends, causes = _executed(schedule, times, transfers)
    exchanges, waited = _exchanged(schedule, ends, reduces)
    last = max(ends, key=lambda slot: (ends[slot], slot.kind is Direction.BACKWARD))
    seconds = ends[last]
    for exchange, slot in zip(exchanges, waited, strict=True):
        if exchange.end > seconds:
            seconds, last = exchange.end, slot
    busy = tuple(sum(times[slot.kind][slot.stage] for slot in slots) for slots in schedule.devices)
    peaks = tuple(_peak(schedule, device, weight_bytes, held) for device in range(schedule.num_devices))
    path = _path(last, causes)
    exchanges.sort(key=lambda exchange: (exchange.begin, exchange.stage))
    return Simulation(schedule, seconds, begins, ends, busy, peaks, path, tuple(exchanges))


def _numbers(argument: str, given: float | Sequence[float], count: int, of: str) -> tuple:
    values = (given,) * count if isinstance(given, (int, float)) else tuple(given)
    if len(values) != count:
        raise ValueError(f"`{argument}` needs {count} numbers, one for each {of}. Received: {argument}={given!r}.")
    if any(not number >= 0 or math.isinf(number) for number in values):
        raise ValueError(f"`{argument}` must be finite and not negative. Received: {argument}={given!r}.")
    return values


def _input(slot: Slot, num_stages: int) -> Slot | None:
    """Return the slot that another one waits for, besides its device."""
    if slot.kind is Direction.FORWARD:
        return slot._replace(stage=slot.stage - 1) if slot.stage else None
    if slot.stage == num_stages - 1:
        return slot._replace(kind=Direction.FORWARD)
    return slot._replace(stage=slot.stage + 1)


def _executed(
    schedule: Schedule, times: Mapping[Direction, Sequence[float]], transfers: Sequence[float]
) -> tuple[dict[Slot, float], dict[Slot, float], dict[Slot, Slot | None]]:
    """Return begin and end of each slot, and the slot that it waited for last.

    Devices take turns as their inputs come; since each has its order, the order of the turns changes nothing.
    """
    begins: dict[Slot, float] = {}
    ends: dict[Slot, float] = {}
    causes: dict[Slot, Slot | None] = {}
    done = [0] * schedule.num_devices
    waiting: dict[Slot, int] = {}
    """Devices by what they wait for: an input has one reader."""
    ready = collections.deque(range(schedule.num_devices))
    while ready:
        device = ready.popleft()
        slots = schedule.devices[device]
        while done[device] < len(slots):
            slot = slots[done[device]]
            source = _input(slot, schedule.num_stages)
            if source is not None and source not in ends:
                waiting[source] = device
                break
            before = slots[done[device] - 1] if done[device] else None
            begins[slot], causes[slot] = 0.0, None
            if before is not None:
                begins[slot], causes[slot] = ends[before], before
            if source is not None:
                across = transfers[min(slot.stage, source.stage)] if schedule.device_of(source) != device else 0.0
                if ends[source] + across >= begins[slot]:
                    begins[slot], causes[slot] = ends[source] + across, source
            ends[slot] = begins[slot] + times[slot.kind][slot.stage]
            done[device] += 1
            if slot in waiting:
                ready.append(waiting.pop(slot))
    if waiting:
        raise _deadlock(schedule, {device: source for source, device in waiting.items()}, done)
    return begins, ends, causes


def _deadlock(schedule: Schedule, sources: Mapping[int, Slot], done: Sequence[int]) -> ScheduleError:
    """Return the slots of one cycle of waiting.

    Every device that is not done waits for something that another one, or itself, has not come to; following that
    leads round a circle.
    """
    device = next(iter(sources))
    seen: list[int] = []
    while device not in seen:
        seen.append(device)
        device = schedule.device_of(sources[device])
    circle = seen[seen.index(device) :]
    heads = {device: schedule.devices[device][done[device]] for device in circle}
    lines = []
    for device in circle:
        home = schedule.device_of(sources[device])
        behind = "" if sources[device] == heads[home] else f", which device {home} runs after {heads[home]}"
        lines.append(f"device {device} is at {heads[device]}, which waits for {sources[device]}{behind}")
    error = ScheduleError(
        f"The slots of schedule {schedule.name!r} wait for each other: {'; '.join(lines)}. Change the order on one of "
        'these devices, or take a schedule that is known to end, such as "gpipe".'
    )
    error.slots = tuple(heads.values())
    return error


def _exchanged(
    schedule: Schedule, ends: Mapping[Slot, float], reduces: Sequence[float]
) -> tuple[list[Exchange], list[Slot]]:
    """Return exchanges in the order in which their gradients exist, each with the slot that it waited for."""
    exchanges, waited = [], []
    last: dict[int, Slot] = {}
    for slot in schedule.slots():
        if slot.kind is Direction.BACKWARD and (slot.stage not in last or ends[slot] > ends[last[slot.stage]]):
            last[slot.stage] = slot
    free: dict[int, tuple[float, Slot]] = {}
    for stage, slot in sorted(last.items(), key=lambda item: (ends[item[1]], -item[0])):
        devices = schedule.devices_of(stage)
        if len(devices) > 1:
            begin, slot = max([(ends[slot], slot), *(free[d] for d in devices if d in free)], key=lambda one: one[0])
            end = begin + reduces[stage]
            free.update(dict.fromkeys(devices, (end, slot)))
            exchanges.append(Exchange(stage, devices, begin, end))
            waited.append(slot)
    return exchanges, waited


def _peak(schedule: Schedule, device: int, weights: Sequence[int], activations: Sequence[int]) -> int:
    alive = most = sum(weights[stage] for stage in schedule.stages_on(device))
    for slot in schedule.devices[device]:
        alive += activations[slot.stage] if slot.kind is Direction.FORWARD else -activations[slot.stage]
        most = max(most, alive)
    return most


def _path(last: Slot, causes: Mapping[Slot, Slot | None]) -> tuple[Slot, ...]:
    path: list[Slot] = []
    slot: Slot | None = last
    while slot is not None:
        path.append(slot)
        slot = causes[slot]
    return tuple(reversed(path))


def draw(simulation: Simulation) -> str:
    """Draw devices over time, like the docstring of `schedules`.

    A column is the shortest slot, or more where that would make too many; `F1---` lasts two or more of them, dots are
    idle. The last line has the seconds and the part of them that is idle.
    """
    schedule, ends = simulation.schedule, simulation.ends
    lengths = [ends[slot] - begin for slot, begin in simulation.begins.items()]
    shortest = min((length for length in lengths if length > 0), default=1.0)
    unit = max(shortest, simulation.seconds / MAX_COLUMNS)
    width = len(f"F{schedule.micro_batches - 1} ")
    idle = "." * (width - 1) + " "

    def column(seconds: float) -> int:
        return math.floor(seconds / unit + 0.5)

    lines = []
    for device, slots in enumerate(schedule.devices):
        cells, here = "", 0
        for slot in slots:
            begin, end = column(simulation.begins[slot]), column(ends[slot])
            cells += idle * (begin - here)
            if end > begin:
                label = f"{slot.kind.value}{slot.micro_batch}"
                length = (end - begin) * width - 1
                cells += f"{label:{' ' if end == begin + 1 else '-'}<{length}} "
            here = end
        cells += idle * (column(max(ends.values())) - here)
        lines.append(f"device {device:<{len(str(schedule.num_devices - 1))}}  {cells}".rstrip())
    return "\n".join([*lines, f"{simulation.seconds:.6g} s, {simulation.bubble:.1%} idle"])
