"""Orders of stages on devices, drawn out; the drawings are those of the papers where there is one."""

import dataclasses

import pytest

from rewriters.pipelining import schedules
from rewriters.pipelining.schedules import Direction, Schedule, Slot, hybrid, make

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


def order(schedule):
    """A line for each device: what it does for which micro-batch in which stage, `F` or `B`, micro-batch, stage."""
    return [
        " ".join(f"{slot.kind.value}{slot.micro_batch}{slot.stage}" for slot in slots) for slots in schedule.devices
    ]


# Jain et al., figure 4 and section IV-C; Seal et al., figure 5 (whose F and B name the device first); Narayanan et al.,
# figure 4; Jain et al., figures 8b and 8c.
GRIDS = {
    ("basic", 4, 1): ["F00 B00", "F01 B01", "F02 B02", "F03 B03"],
    ("basic", 2, 2): ["F00 B00 F10 B10", "F01 B01 F11 B11"],
    ("gpipe", 4, 4): [
        "F00 F10 F20 F30 B30 B20 B10 B00",
        "F01 F11 F21 F31 B31 B21 B11 B01",
        "F02 F12 F22 F32 B32 B22 B12 B02",
        "F03 F13 F23 F33 B33 B23 B13 B03",
    ],
    ("1f1b", 4, 4): [
        "F00 F10 F20 F30 B00 B10 B20 B30",
        "F01 F11 F21 B01 F31 B11 B21 B31",
        "F02 F12 B02 F22 B12 F32 B22 B32",
        "F03 B03 F13 B13 F23 B23 F33 B33",
    ],
    ("1f1b", 3, 2): ["F00 F10 B00 B10", "F01 F11 B01 B11", "F02 B02 F12 B12"],
    ("mast", 4, 2): ["F00 B00 F13 B13", "F01 B01 F12 B12", "F02 B02 F11 B11", "F03 B03 F10 B10"],
    ("mast", 2, 4): ["F00 F10 B10 B00 F21 F31 B31 B21", "F01 F11 B11 B01 F20 F30 B30 B20"],
    ("master", 4, 4): [
        "F00 B00 F13 B13 F20 B20 F33 B33",
        "F01 B01 F12 B12 F21 B21 F32 B32",
        "F02 B02 F11 B11 F22 B22 F31 B31",
        "F03 B03 F10 B10 F23 B23 F30 B30",
    ],
    ("master", 3, 3): ["F00 B00 F12 B12 F20 B20", "F01 B01 F11 B11 F21 B21", "F02 B02 F10 B10 F22 B22"],
}


@pytest.mark.parametrize("case", GRIDS)
def test_schedules_equal_the_figures_of_the_papers(case):
    name, num_stages, micro_batches = case
    schedule = make(name, num_stages, micro_batches)
    assert order(schedule) == GRIDS[case]
    assert (schedule.name, schedule.num_stages, schedule.micro_batches) == case
    assert (schedule.num_devices, schedule.data_replicas) == (num_stages, 1)


def test_mast_with_two_micro_batches_equals_master_with_two_replications():
    for num_stages in range(1, 6):
        assert schedules.mast(num_stages).devices == schedules.master(num_stages, 2).devices


def test_hybrid_replicas_share_no_device_and_no_micro_batch():
    schedule = make("gpipe", 2, 2, data_replicas=2)
    assert order(schedule) == ["F00 F10 B10 B00", "F01 F11 B11 B01", "F20 F30 B30 B20", "F21 F31 B31 B21"]
    assert (schedule.num_stages, schedule.micro_batches, schedule.num_devices) == (2, 4, 4)
    assert schedule.data_replicas == 2
    twice = hybrid(schedule, 2)
    assert twice.devices == make("gpipe", 2, 2, data_replicas=4).devices
    assert twice.data_replicas == 4


@pytest.mark.parametrize("name", schedules.SCHEDULES)
@pytest.mark.parametrize("data_replicas", [1, 3])
def test_schedules_have_each_slot_once_on_one_device(name, data_replicas):
    for num_stages in range(1, 6):
        for micro_batches in (2, 4, 6):
            schedule = make(name, num_stages, micro_batches, data_replicas)
            schedule.check()
            assert len(set(schedule.slots())) == 2 * num_stages * micro_batches * data_replicas
            for device, slots in enumerate(schedule.devices):
                assert {schedule.device_of(slot) for slot in slots} == {device}


def test_stage_and_device_maps_are_inverse():
    schedule = make("master", 4, 2)
    assert [schedule.devices_of(stage) for stage in range(4)] == [(0, 3), (1, 2), (1, 2), (0, 3)]
    assert [schedule.stages_on(device) for device in range(4)] == [(0, 3), (1, 2), (1, 2), (0, 3)]
    assert make("gpipe", 2, 2, data_replicas=2).devices_of(1) == (1, 3)
    with pytest.raises(KeyError):
        schedule.device_of(Slot(FORWARD, 2, 0))


def test_faults_are_listed_together():
    first, second = make("basic", 2, 1).devices
    broken = Schedule("mine", 2, 1, (first[:1] + second[1:] + first[:1], second[:1] + (Slot(FORWARD, 1, 0),)))
    with pytest.raises(ValueError) as error:
        broken.check()
    for fault in (
        "schedule 'mine' of 2 stages and 1 micro-batches",
        "B0 of stage 0 is missing",
        "F0 of stage 0 is there 2 times",
        "F1 of stage 0 does not exist",
        "B0 of stage 1 is on device 0, its forward on device 1",
    ):
        assert fault in str(error.value)


def test_replicas_with_shared_devices_or_uneven_counts_are_faults():
    schedule = make("basic", 1, 1, data_replicas=2)
    swapped = dataclasses.replace(schedule, devices=schedule.devices[::-1])
    with pytest.raises(ValueError, match="F1 of stage 0 is on device 0, outside those of replica 1"):
        swapped.check()
    with pytest.raises(ValueError, match="2 devices and 2 micro-batches do not divide among 3 data replicas"):
        dataclasses.replace(schedule, data_replicas=3).check()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("zigzag", 2, 2), ValueError, r"one of 'basic', 'gpipe', '1f1b', 'mast', 'master'.*schedule='zigzag'"),
        (("gpipe", 0, 2), ValueError, "`num_stages` must be at least 1. Received: num_stages=0"),
        (("gpipe", 2, 0), ValueError, "`micro_batches` must be at least 1. Received: micro_batches=0"),
        (("gpipe", 2, 2, 0), ValueError, "`data_replicas` must be at least 1"),
        (("gpipe", 2.0, 2), TypeError, "`num_stages` must be an integer of at least 1. Received: num_stages=2.0"),
        (("gpipe", 2, True), TypeError, "Received: micro_batches=True"),
        (("mast", 2, 3), ValueError, 'must be even for schedule="mast".*micro_batches=3.*schedule="master"'),
    ],
)
def test_invalid_schedules_are_refused_with_a_remedy(arguments, error, text):
    with pytest.raises(error, match=text):
        make(*arguments)
