"""Schedules that are executed: times, memory, deadlocks, drawings."""

import dataclasses
import graphlib
import itertools
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_hex

from rewriters.errors import RewriteError, ScheduleError
from rewriters.pipelining import schedules
from rewriters.pipelining.schedule_simulator import draw, simulate
from rewriters.pipelining.schedules import Direction, Slot, make
from tflms_sft._report.schedule_chart import COLORS, EXCHANGED, draw_schedule

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


@st.composite
def cases(draw, names=tuple(schedules.SCHEDULES), replicas=(1, 2)):
    """A schedule, and whole seconds for its stages and borders: sums of them are exact."""
    n = draw(st.integers(1, 5))
    m = draw(st.integers(1, 6))
    name = draw(st.sampled_from(names))
    schedule = make(name, n, m + m % 2 if name == "mast" else m, draw(st.sampled_from(replicas)))
    seconds = st.lists(st.integers(0, 9), min_size=n, max_size=n)
    transfer = draw(st.lists(st.integers(0, 3), min_size=n - 1, max_size=n - 1))
    return schedule, draw(seconds), draw(seconds), transfer


def by_the_clock(schedule, forward, backward, transfer):
    """Begins of all slots, found in another way: second by second, each device sees whether it can start its next slot.

    `None` if they never end.
    """
    durations = {FORWARD: forward, BACKWARD: backward}
    last = schedule.num_stages - 1
    queues = [list(slots) for slots in schedule.devices]
    free = [0] * schedule.num_devices
    begins, ends = {}, {}

    def there(slot, device):
        """When the input of a slot is on its device."""
        if slot.kind is FORWARD:
            if slot.stage == 0:
                return 0
            source, border = Slot(FORWARD, slot.micro_batch, slot.stage - 1), slot.stage - 1
        elif slot.stage == last:
            source, border = Slot(FORWARD, slot.micro_batch, last), None
        else:
            source, border = Slot(BACKWARD, slot.micro_batch, slot.stage + 1), slot.stage
        if source not in ends:
            return float("inf")
        home = next(d for d, slots in enumerate(schedule.devices) if source in slots)
        return ends[source] + (transfer[border] if home != device else 0)

    for now in range(2 + 2 * sum(sum(durations[s.kind]) + sum(transfer) for s in schedule.slots())):
        moved = True
        while moved:
            moved = False
            for device, queue in enumerate(queues):
                if queue and free[device] <= now and there(queue[0], device) <= now:
                    slot = queue.pop(0)
                    begins[slot] = now
                    free[device] = ends[slot] = now + durations[slot.kind][slot.stage]
                    moved = True
        if not any(queues):
            return begins
    return None


@settings(deadline=None)
@given(cases())
def test_simulated_times_equal_hand_computed_ones(case):
    assert simulate(*case).begins == by_the_clock(*case)


@settings(deadline=None)
@given(cases())
def test_step_time_is_at_least_that_of_a_device_and_of_a_micro_batch(case):
    schedule, forward, backward, transfer = case
    found = simulate(*case)
    slots = set(schedule.slots())
    assert set(found.begins) == set(found.ends) == slots
    work = {FORWARD: forward, BACKWARD: backward}
    assert all(found.ends[slot] - found.begins[slot] == work[slot.kind][slot.stage] for slot in slots)
    assert sum(found.busy) == schedule.micro_batches * sum(forward + backward)
    assert found.seconds >= max(found.busy)
    assert found.seconds >= sum(forward) + sum(backward) + 2 * sum(transfer)
    assert found.seconds <= schedule.micro_batches * (sum(forward) + sum(backward) + 2 * sum(transfer))
    assert [busy + idle for busy, idle in zip(found.busy, found.idle, strict=True)] == [found.seconds] * len(found.busy)
    assert 0 <= found.bubble <= 1


@settings(deadline=None)
@given(cases())
def test_critical_path_covers_the_step_without_a_gap(case):
    schedule, _, _, transfer = case
    found = simulate(*case)
    path = found.critical_path
    assert found.begins[path[0]] == 0 and found.ends[path[-1]] == found.seconds
    for before, after in itertools.pairwise(path):
        pause = found.begins[after] - found.ends[before]
        same = schedule.device_of(before) == schedule.device_of(after)
        assert pause == 0 if same else pause in (0, transfer[min(before.stage, after.stage)])
        assert same or before.micro_batch == after.micro_batch


@settings(deadline=None)
@given(st.integers(1, 7), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_equal_stages_take_the_closed_form_time(n, m, forward, backward):
    def seconds(name):
        return simulate(make(name, n, m), [forward] * n, [backward] * n).seconds

    assert seconds("basic") == m * n * (forward + backward)
    assert seconds("gpipe") == (m + n - 1) * (forward + backward)
    assert seconds("1f1b") == (m + n - 1) * (forward + backward)
    bubble = simulate(make("gpipe", n, m), [forward] * n, [backward] * n).bubble
    assert bubble == pytest.approx((n - 1) / (m + n - 1))  # Huang et al., section 2.3.


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 8))
def test_schedules_hold_the_known_number_of_activations(n, m):
    def held(name, m=m):
        peaks = []
        for stage in range(n):
            counted = [int(s == stage) for s in range(n)]
            peaks.append(simulate(make(name, n, m), [1] * n, [1] * n, activations=counted).peak_bytes)
        return peaks

    assert [max(peaks) for peaks in held("basic")] == [1] * n
    assert [max(peaks) for peaks in held("gpipe")] == [m] * n
    assert [max(peaks) for peaks in held("1f1b")] == [min(m, n - stage) for stage in range(n)]
    assert [max(peaks) for peaks in held("master")] == [1] * n
    assert [max(peaks) for peaks in held("mast", m + m % 2)] == [(m + m % 2) // 2] * n


def test_mast_holds_weights_of_two_stages_and_activations_of_one():
    """The idea of GEMS (V-A): a second micro-batch in the memory that the first one's backward has freed."""
    weights, activations = [1, 2, 4, 8], [1000, 300, 200, 500]
    alone = simulate(make("basic", 4, 1), [1] * 4, [1] * 4, weights=weights, activations=activations)
    both = simulate(make("mast", 4, 2), [1] * 4, [1] * 4, weights=weights, activations=activations)
    assert alone.peak_bytes == (1001, 302, 204, 508)
    assert both.peak_bytes == (1009, 306, 306, 1009)


@st.composite
def shuffled(draw):
    """Any order on each device of a small schedule."""
    schedule = make(draw(st.sampled_from(("gpipe", "mast"))), draw(st.integers(1, 3)), 2)
    seed = random.Random(draw(st.integers(0, 10**6)))
    devices = [list(slots) for slots in schedule.devices]
    for slots in devices:
        seed.shuffle(slots)
    if draw(st.booleans()):  # Forwards first, or next to none of the orders would end.
        for slots in devices:
            slots.sort(key=lambda slot: slot.kind is BACKWARD)
    schedule = dataclasses.replace(schedule, devices=tuple(map(tuple, devices)))
    n = schedule.num_stages
    seconds = st.lists(st.integers(0, 5), min_size=n, max_size=n)
    return schedule, draw(seconds), draw(seconds), [1] * (n - 1)


def follows(slot, last):
    """The slots that read a slot's result."""
    if slot.kind is FORWARD:
        return slot._replace(stage=slot.stage + 1) if slot.stage < last else slot._replace(kind=BACKWARD)
    return slot._replace(stage=slot.stage - 1) if slot.stage else None


@settings(deadline=None, max_examples=200)
@given(shuffled())
def test_random_orders_finish_or_report_their_cycle(case):
    schedule = case[0]
    graph = {slot: set() for slot in schedule.slots()}
    for slot in graph:
        after = follows(slot, schedule.num_stages - 1)
        if after:
            graph[after].add(slot)
    for slots in schedule.devices:
        for before, after in itertools.pairwise(slots):
            graph[after].add(before)
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError:
        with pytest.raises(ScheduleError) as error:
            simulate(*case)
        assert by_the_clock(*case) is None
        # Each of the slots that are named waits for the next one: there is a way to it, and back.
        circle = error.value.slots
        for one, other in zip(circle, circle[1:] + circle[:1], strict=True):
            assert _reaches(graph, one, other)
            assert str(one) in str(error.value)
    else:
        assert simulate(*case).begins == by_the_clock(*case)


def _reaches(graph, slot, other):
    """Whether a slot waits for another one, or for itself, in one step or more."""
    seen, stack = set(), list(graph[slot])
    while stack:
        one = stack.pop()
        if one not in seen:
            seen.add(one)
            stack.extend(graph[one])
    return other in seen


def test_deadlock_names_the_slots_of_the_cycle():
    schedule = make("gpipe", 2, 2)
    first, second = schedule.devices
    turned = dataclasses.replace(schedule, name="mine", devices=(first, second[2:3] + second[:2] + second[3:]))
    text = "device 1 is at B1 of stage 1, which waits for F1 of stage 1, which device 1 runs after B1 of stage 1"
    with pytest.raises(ScheduleError, match=f"schedule 'mine' wait for each other: {text}. .*\"gpipe\"") as error:
        simulate(turned, [1, 1], [1, 1])
    assert error.value.slots == (Slot(BACKWARD, 1, 1),)
    assert isinstance(error.value, RewriteError) and type(error.value).__init__ is Exception.__init__

    late, early = dataclasses.replace(schedule, devices=((first[0], first[3], *first[1:3]), second)), schedule
    simulate(early, [1, 1], [1, 1])
    with pytest.raises(ScheduleError) as error:
        simulate(late, [1, 1], [1, 1])
    assert (
        "device 0 is at B0 of stage 0, which waits for B0 of stage 1, which device 1 runs after F1 of stage 1; "
        "device 1 is at F1 of stage 1, which waits for F1 of stage 0, which device 0 runs after B0 of stage 0"
    ) in str(error.value)


def test_gpipe_is_optimal_for_equal_stages():
    """All 576 orders of two micro-batches in two stages."""
    schedule = make("gpipe", 2, 2)
    found = []
    for devices in itertools.product(*(itertools.permutations(slots) for slots in schedule.devices)):
        try:
            found.append(simulate(dataclasses.replace(schedule, devices=devices), [1, 1], [2, 2]).seconds)
        except ScheduleError:
            found.append(float("inf"))
    assert len(found) == 576 and min(found) == 9 == simulate(schedule, [1, 1], [2, 2]).seconds
    assert sum(seconds < float("inf") for seconds in found) > 1


def test_transfers_take_time_between_devices_only():
    pair = make("basic", 3, 1)
    assert simulate(pair, [1] * 3, [1] * 3, 0.25).seconds == 7
    assert simulate(pair, [1] * 3, [1] * 3, [0.5, 0.25]).seconds == 7.5
    together = schedules.Schedule("mine", 3, 1, (tuple(sorted(pair.slots(), key=_as_one_device)),))
    assert simulate(together, [1] * 3, [1] * 3, 0.25).seconds == 6


def _as_one_device(slot):
    return (slot.kind is BACKWARD, slot.stage if slot.kind is FORWARD else -slot.stage)


def test_gradient_exchange_starts_when_the_gradients_exist():
    plain = simulate(make("basic", 2, 2), [1, 1], [1, 1], reduce=5)
    assert plain.exchanges == () and plain.seconds == 8
    copies = simulate(make("basic", 2, 1, data_replicas=3), [1, 1], [1, 1], reduce=[5, 0.5])
    assert copies.exchanges == ((1, (1, 3, 5), 3, 3.5), (0, (0, 2, 4), 4, 9))
    assert copies.seconds == 9 and copies.critical_path[-1] == Slot(BACKWARD, 0, 0)
    # MAST's two stages share both devices, so that their exchanges follow each other.
    mast = simulate(make("mast", 2, 2), [1, 1], [1, 1], reduce=3)
    assert mast.exchanges == ((1, (0, 1), 6, 9), (0, (0, 1), 9, 12))
    assert mast.seconds == 12 and mast.critical_path[-1] == Slot(BACKWARD, 1, 1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"forward": [1]}, r"`forward` needs 2 numbers, one for each stage. Received: forward=\[1\]"),
        ({"backward": [1, -1]}, "`backward` must be finite and not negative"),
        ({"backward": [1, float("nan")]}, "`backward` must be finite and not negative"),
        ({"transfer": [1, 1]}, "`transfer` needs 1 numbers, one for each border between stages"),
        ({"reduce": [1]}, "`reduce` needs 2"),
        ({"weights": [1]}, "`weights` needs 2"),
        ({"activations": [1, 2, 3]}, "`activations` needs 2"),
    ],
)
def test_lists_of_wrong_length_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        simulate(**({"schedule": make("gpipe", 2, 2), "forward": [1, 1], "backward": [1, 1]} | arguments))


def test_schedules_with_faults_are_not_simulated():
    schedule = make("gpipe", 2, 2)
    with pytest.raises(ValueError, match="F0 of stage 1 is missing"):
        simulate(dataclasses.replace(schedule, devices=schedule.devices[:1]), [1, 1], [1, 1])


DRAWN = re.findall(r"^`(\w+)`.*?\n\n((?:    device [^\n]*\n)+)", schedules.__doc__, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("name", "micro_batches"), {"basic": 1, "gpipe": 4, "1f1b": 4, "mast": 2, "master": 3}.items())
def test_drawings_of_the_docstring_equal_the_simulation(name, micro_batches):
    drawn = draw(simulate(make(name, 4, micro_batches), [1] * 4, [1] * 4)).splitlines()
    assert dict(DRAWN)[name].replace("    device", "device").splitlines() == drawn[:-1]


def test_drawing_is_to_scale_and_states_its_length():
    drawn = draw(simulate(make("mast", 2, 2), [1, 1], [2, 2.5]))
    assert drawn.splitlines() == [
        "device 0  F0 .. .. .. .. B0--- F1 B1--- .. ..",
        "device 1  .. F0 B0------ F1 .. .. .. .. B1---",
        "12 s, 45.8% idle",
    ]
    wide = draw(simulate(make("gpipe", 2, 12), [1e-3, 1], [1, 1])).splitlines()
    assert all(len(line) < 320 for line in wide)


def test_schedule_chart_has_a_numbered_box_for_each_slot(tmp_path):
    simulation = simulate(make("mast", 2, 2, 2), [1, 1], [2, 2], reduce=0.5, weights=[2**20] * 2)
    figure = draw_schedule(simulation, tmp_path / "schedule")
    assert (tmp_path / "schedule").read_bytes()[:4] == b"\x89PNG"
    axes, beside = figure.axes
    numbers = [int(text.get_text()) for text in axes.texts]
    assert sorted(numbers) == sorted(slot.micro_batch for slot in simulation.schedule.slots())
    assert [len(boxes.get_paths()) for boxes in axes.collections if len(boxes.get_facecolors()) == 4] == [4, 4, 4, 4]
    assert axes.get_title(loc="left") == "Schedule mast: 2 stages, 4 micro-batches, 2 data replicas"
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"device {d}" for d in range(4)]
    idle = 100 * simulation.idle[0] / simulation.seconds
    assert beside.get_yticklabels()[0].get_text() == f"{idle:.0f} % idle, peak 2.00 MiB"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "forward",
        "backward",
        "forward of the other stage",
        "backward of the other stage",
        "exchange of gradients",
        "critical path",
        "number of the micro-batch",
    ]
    assert [to_hex(legend.legend_handles[n].get_facecolor()) for n in (0, 4)] == [COLORS[FORWARD], EXCHANGED]


def test_schedule_chart_without_matplotlib_names_the_extra(monkeypatch):
    figure = draw_schedule(simulate(make("basic", 1, 1), [1], [2]))
    assert figure.axes[0].get_title(loc="left") == "Schedule basic: 1 stage, 1 micro-batch"
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["forward", "backward", "critical path", "number of the micro-batch"]
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'needs matplotlib: pip install "tflms-sft\[plot\]"'):
        draw_schedule(simulate(make("basic", 1, 1), [1], [2]))
