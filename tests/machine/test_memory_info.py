"""Memory of devices: budgets of several replicas, each of which has a GPU."""

from types import SimpleNamespace

import pytest
from devices import device_with, planning_for_card
from tensorflow.python.client import device_lib

from rewriters.device.cards import CARDS
from rewriters.ir import tf_internals
from tflms_sft import AutoParams
from tflms_sft._keras.replicas import Replicas
from tflms_sft._machine.memory_info import device_memory_limit, free_device_memory

GPUS = ("GPU:0", "GPU:1")


@pytest.fixture
def two_gpus(monkeypatch, plan_with):
    """Pretend that there are two GPUs, of which the second has less memory, and the first more in use."""
    limits, in_use = {"GPU:0": 1000, "GPU:1": 800}, {"GPU:0": 300, "GPU:1": 50}
    plan_with(name="GPU:0", memory_limit=limits["GPU:0"])
    other = device_with(memory_limit=limits["GPU:1"])
    monkeypatch.setattr("tflms_sft._machine.memory_info.detect_device", {"GPU:1": other}.__getitem__)
    monkeypatch.setattr("tensorflow.config.experimental.get_memory_info", lambda name: {"current": in_use[name]})


def test_auto_budget_of_replicas_is_bound_by_the_fullest_gpu(two_gpus):
    assert (free_device_memory(), free_device_memory(GPUS)) == (700, 2 * 700)
    assert AutoParams().resolved(100).memory_budget == 0.9 * (700 + 100)
    assert AutoParams().resolved(100, GPUS).memory_budget == 0.9 * (2 * 700 + 100)


def test_budget_of_replicas_is_bound_by_the_smallest_gpu(two_gpus):
    assert (device_memory_limit(), device_memory_limit(GPUS)) == (1000, 2 * 800)
    assert AutoParams(5000).resolved(0).memory_budget == 1000
    both = AutoParams(5000).resolved(0, GPUS)
    assert both.memory_budget == 1600
    assert AutoParams(5000).reduction_note(both, GPUS).endswith("TensorFlow allocates no more on GPU:0, GPU:1")
    assert AutoParams(1500).resolved(0, GPUS) == AutoParams(1500)


def test_budget_on_a_cpu_has_no_limit():
    assert device_memory_limit() is None
    assert AutoParams(2**60).resolved(0).memory_budget == 2**60


def test_memory_of_a_planned_card_needs_no_device():
    card = CARDS["rtx2080ti"]
    with planning_for_card("rtx2080ti"):
        assert free_device_memory() == device_memory_limit() == card.memory_limit
        assert AutoParams().resolved(2**30).memory_budget == int(0.9 * card.memory_limit)


@pytest.mark.parametrize(("workers", "devices"), [(GPUS, GPUS), (GPUS[:1], ()), (("CPU:0", "CPU:1"), ())])
def test_replicas_name_their_gpus(workers, devices):
    """Logical CPU devices share one memory."""
    names = [f"/job:localhost/replica:0/task:0/device:{name}" for name in workers]
    strategy = SimpleNamespace(extended=SimpleNamespace(worker_devices=names))
    assert Replicas(strategy, None).devices == devices


def test_memory_limits_equal_those_of_new_devices():
    want = {device.name.rpartition("device:")[2]: device.memory_limit for device in device_lib.list_local_devices()}
    assert tf_internals.memory_limits() == want and want["CPU:0"] > 0
