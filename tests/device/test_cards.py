"""Plans for graphics cards that are not in this machine: their properties, rates and predicted times."""

import json

import pytest
import tensorflow as tf
from devices import planning_for_card

import tflms_sft
from benchmarks import _nets, _results
from rewriters.device.allocator import BestFitAllocator, empty_pool, pools
from rewriters.device.cards import CARDS, GIB
from rewriters.ir.device_detection import planned_device
from tflms_sft._machine import calibration
from tflms_sft._machine.card_rates import card_rates


@pytest.fixture
def tf32():
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    yield tf.config.experimental.enable_tensor_float_32_execution
    tf.config.experimental.enable_tensor_float_32_execution(before)


def test_planned_device_is_the_card_only_within_the_context():
    before = planned_device()
    with planning_for_card("rtx2080ti"):
        device = planned_device()
    assert device.name == "GPU:0" and device.card == CARDS["rtx2080ti"] and device.compute_capability == 7.5
    assert device.has_allocator_stats and device.min_counted_bytes == 0
    assert not device.unfolds_convolutions and not device.writes_in_place
    pool = empty_pool(device)
    assert isinstance(pool, BestFitAllocator) and len(list(pools(device, GIB))) == 1, "one region"
    assert planned_device() == before and not before.card


@pytest.mark.parametrize(("name", "limit_mib"), [("rtx2080ti", 9648), ("a100-40", 38341)])
def test_memory_limit_is_near_what_tensorflow_reports_on_such_a_card(name, limit_mib):
    """Public logs of TensorFlow have "Created device ... with 9648 MB memory", and 38341 on an A100 SXM4."""
    assert CARDS[name].memory_limit / 2**20 == pytest.approx(limit_mib, rel=0.03)


def test_rates_use_tensor_cores_only_if_the_card_and_tensorflow_do(tf32):
    tf32(True)
    with_tf32 = {name: card_rates(card).flops[""] for name, card in CARDS.items()}
    tf32(False)
    without = {name: card_rates(card).flops[""] for name, card in CARDS.items()}
    assert {name for name in CARDS if with_tf32[name] > 1.5 * without[name]} == {"a100-40", "h200"}
    assert all(with_tf32[name] >= without[name] for name in CARDS)


def test_planner_takes_rates_of_the_card():
    with planning_for_card("a100-40"):
        assert calibration.machine_rates() == calibration.stored_rates() == card_rates(CARDS["a100-40"])
    assert calibration.machine_rates() != card_rates(CARDS["a100-40"])


@pytest.mark.parametrize(("net", "size", "batch"), [("vgg16", 512, 4), ("resnet50", 256, 16)])
def test_times_of_original_steps_are_near_those_of_the_card(net, size, batch, tf32):
    tf32(True)
    measured = json.loads((_results.RESULTS / "gpu_nvidia_h200.json").read_text())[f"peak/{net}"]["seconds"][0]
    step = _nets.TASKS[net].step(size, batch)
    with planning_for_card("h200"):
        rewritten = tflms_sft.rewrite(step, tflms_sft.AutoParams("1TiB"), *step.input_signature)
    assert rewritten.plan.original.seconds == pytest.approx(measured, rel=0.25)
