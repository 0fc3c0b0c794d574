"""Rates of a machine: measured, kept, read."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import tensorflow as tf

from rewriters.device.cards import CARDS
from rewriters.estimates.op_cost import NOMINAL
from tflms_sft._machine import calibration, rate_benchmarks
from tflms_sft._machine.calibration import VARIABLE, Calibration, machine_rates, measure_in_child
from tflms_sft._machine.card_rates import card_rates
from tflms_sft._machine.cpu_load import OtherProcesses, cpu_seconds
from tflms_sft._machine.rate_benchmarks import measured_rates

SLOW = dataclasses.replace(NOMINAL, first_touch=1e9, unfolded={"Conv2DBackpropFilter": 3e9})


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Set an empty cache folder, and return the folder of rates in it."""
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "tflms-sft"


@pytest.fixture
def times():
    """Measurements by the processes of a test."""
    return []


@pytest.fixture
def process(times):
    """Constructor of a process that knows no rates, on a machine of which others use a fraction."""

    def process(rates=SLOW, busy=0.0):
        others = SimpleNamespace(busy_fraction=lambda: busy)
        return Calibration(lambda: times.append("apart") or rates, other_processes=lambda: others)

    return process


def test_machine_rates_are_measured_once_and_stored(folder, times, process):
    told, one = [], process()
    assert one.machine_rates(told.append) == one.machine_rates(told.append) == SLOW
    (file,) = folder.iterdir()
    assert times == ["apart"] and len(told) == 1 and str(file) in told[0]
    assert process().machine_rates() == SLOW and times == ["apart"], "another process reads them"


def test_infinite_rate_is_stored(folder, process):
    assert math.isinf(process(NOMINAL).machine_rates().first_touch)
    assert process().machine_rates() == NOMINAL


@pytest.mark.parametrize("text", ["", "{}", '{"version": 0}', '{"version": 1, "flops": {}}', "[1]", "5", "null", '"x"'])
def test_unreadable_rates_file_is_measured_again(folder, times, process, text, monkeypatch):
    process().machine_rates()
    (file,) = folder.iterdir()
    file.write_text(text)
    assert process().machine_rates() == SLOW and len(times) == 2
    assert json.loads(file.read_text())["version"] == calibration.VERSION
    file.write_text(text)
    monkeypatch.setenv(VARIABLE, str(file))
    with pytest.raises(ValueError, match=f"{VARIABLE} must name a file with rates of this version"):
        process().machine_rates()


def test_unwritable_cache_does_not_fail(folder, times, process):
    folder.write_text("a file in the place of the folder")
    one = process()
    assert one.machine_rates() == one.machine_rates() == SLOW and times == ["apart"]


def test_volume_convolutions_have_rates_for_each_kernel(monkeypatch, plan_with):
    for unfolds in (False, True):
        plan_with(has_allocator_stats=not unfolds)
        monkeypatch.setattr(rate_benchmarks, "_enough_images", lambda: 2)
        flops, _, _ = rate_benchmarks._arithmetic({"": 1e10}, math.inf)
        assert {"Conv3D", "Conv3DBackpropInputV2", "Conv3DBackpropFilterV2"} <= set(flops)


def aged(file, seconds):
    os.utime(file, (time.time() - seconds,) * 2)


def test_rates_of_busy_machine_expire(folder, times, process):
    told = []
    assert process(busy=0.375).machine_rates(told.append) == SLOW
    assert "other processes used 38% of the machine" in told[1] and len(told) == 2
    (file,) = folder.iterdir()
    assert calibration.busy_when_measured(file) == 0.38
    aged(file, calibration.BUSY_RATES_SECONDS + 60)
    assert process().stored_rates() == SLOW and times == ["apart"], "nothing is chosen by them"
    for age, measured in ((0, 1), (calibration.BUSY_RATES_SECONDS - 60, 1), (calibration.BUSY_RATES_SECONDS + 60, 2)):
        aged(file, age)
        assert process(busy=0.375).machine_rates() == SLOW and len(times) == measured
    aged(file, calibration.BUSY_RATES_SECONDS + 60)
    assert process(busy=0.1).machine_rates(told.append) == SLOW and len(times) == 3 and len(told) == 3, "nothing to say"
    aged(file, 10 * calibration.BUSY_RATES_SECONDS)
    assert process().machine_rates() == SLOW and len(times) == 3, "measured while the machine was idle"


def test_named_rates_file_never_expires(folder, times, process, monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine.json"))
    process(busy=0.9).machine_rates()
    aged(tmp_path / "mine.json", 10 * calibration.BUSY_RATES_SECONDS)
    assert process().machine_rates() == SLOW and times == ["apart"]


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="only Linux tells")
def test_other_processes_load_excludes_this_process():
    command = [sys.executable, "-c", "import time\nwhile time.process_time() < 1: pass"]
    others = OtherProcesses()
    with subprocess.Popen(command) as another:
        time.sleep(0.7)
        beside = others.busy_fraction()
        another.wait()
    assert beside > 0.3 / os.cpu_count(), "a process that has not ended yet"


@pytest.mark.parametrize(("now", "part"), [((110, 36, 12), 0.4), ((110, 32, 12), 0.0), ((110, 31, 12), 0.0)])
def test_busy_fraction_of_samples_equals_expected(now, part):
    """This process used two of ten seconds of all cores."""
    samples = iter([(100, 30, 10), now])
    assert OtherProcesses(lambda: next(samples)).busy_fraction() == pytest.approx(part)


@pytest.mark.parametrize("text", ["", "cpu 1 2\n", "cpus 1 2 3 4 5 6 7 8 9\n"])
def test_busy_fraction_without_proc_stat_is_zero(text, tmp_path):
    (tmp_path / "stat").write_text(text)
    assert OtherProcesses(lambda: cpu_seconds(str(tmp_path / "stat"))).busy_fraction() == 0


def test_rates_file_of_environment_is_used(folder, process, monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine.json"))
    assert process().machine_rates() == SLOW
    values = json.loads((tmp_path / "mine.json").read_text())
    values["flops"][""] = 5e11
    (tmp_path / "mine.json").write_text(json.dumps(values))
    assert process().machine_rates().flops == {"": 5e11}
    (tmp_path / "mine.json").write_text("no rates")
    with pytest.raises(ValueError, match=f"{VARIABLE} must name a file with rates.*mine.json.*{VARIABLE}=nominal"):
        process().machine_rates()
    monkeypatch.setenv(VARIABLE, "nominal")
    assert machine_rates() is NOMINAL


@pytest.fixture(params=[(7.5, "rtx2080ti"), (8.9, "rtx3090"), (6.1, "v100-16"), (12.0, "h200")])
def card(request, plan_with):
    """Pretend that there is a GPU, and return the name of the nearest card."""
    capability, name = request.param
    plan_with(name="GPU:0", compute_capability=capability)
    return name


def test_gpu_without_stored_rates_has_those_of_the_nearest_card(folder, card, monkeypatch):
    rates = card_rates(CARDS[card])
    assert calibration.stored_rates() == rates != NOMINAL
    monkeypatch.setenv(VARIABLE, "nominal")
    assert machine_rates() == calibration.stored_rates() == rates


def test_gpu_with_too_little_memory_to_measure_has_rates_of_the_nearest_card(folder, card, monkeypatch):
    def failing():
        raise tf.errors.ResourceExhaustedError(None, None, "OOM")

    assert Calibration(pytest.fail, failing).machine_rates() == card_rates(CARDS[card])


def test_failed_child_measures_in_this_process(folder):
    def failing(*args, **options):
        raise subprocess.CalledProcessError(1, args)

    one = Calibration(lambda: measure_in_child(run=failing), lambda: SLOW)
    assert one.machine_rates() == SLOW


@pytest.mark.slow
def test_rates_are_measured_in_child_process():
    rates = measure_in_child()
    assert rates is not None and rates.call < 1e-3 and rates.flops["Conv2D"] > 1e8


def test_measured_rates_are_plausible(monkeypatch):
    """While a function is traced, as under `fit`; within a factor that any machine and load stays in."""
    monkeypatch.setattr(rate_benchmarks, "HEAP_BYTES", 2**20)
    monkeypatch.setattr(rate_benchmarks, "MAPPED_BYTES", 3 * 2**20)
    found = []

    @tf.function(autograph=False)
    def traced(x):
        found.append(measured_rates())
        return x + 1

    traced(tf.ones(1))
    (rates,) = found
    assert {"", "Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter", "Conv3D"} <= set(rates.flops)
    assert all(1e7 < rate < 1e16 for rate in (*rates.flops.values(), *rates.touched.values(), rates.weights))
    assert all(1e5 < rate for rate in (rates.disk_write, rates.disk_read, rates.copied))
    assert rates.kernel_call.keys() > {"Conv2D", "Conv2DBackpropFilter", "Conv3DBackpropInputV2"}
    assert all(0 <= seconds < 0.1 for seconds in rates.kernel_call.values())
    assert 1 <= rates.long_row_slowdown < 100 and rates.long_row_bytes >= 2**14
    assert rates.flops["Conv2D"] > rates.flops["DepthwiseConv2dNative"], "which does little with what it reads"


def test_slowdown_of_long_rows_leaves_out_memory_time(monkeypatch, plan_with):
    """Images of equal size, of which the one with long rows takes 0.3 s, 0.1 s of it for its memory."""
    cache, images = 2**13, []
    plan_with(has_allocator_stats=True, second_level_cache_bytes=cache)

    def seconds(run):
        (image,) = run.args
        run()
        images.append(image.shape)
        return 0.3 if image.shape[2] * image.shape[3] * 4 * 2 > cache else 0.2

    monkeypatch.setattr(rate_benchmarks, "_seconds", seconds)
    size = 8 * rate_benchmarks.LONG_ROWS * cache
    assert rate_benchmarks._long_row_slowdown(size / 0.1) == pytest.approx(2.0)
    assert {math.prod(shape) * 4 * 2 for shape in images} == {size}
    plan_with(has_allocator_stats=False)
    assert rate_benchmarks._long_row_slowdown(1.0) == 1.0, "these kernels do not depend on rows"


def test_child_process_measures_with_threads_of_parent(process, tmp_path, monkeypatch):
    commands = []

    def run(command, env, **options):
        commands.append((command, env["CUDA_VISIBLE_DEVICES"]))
        monkeypatch.setenv(VARIABLE, command[3])
        process(NOMINAL).machine_rates()

    assert measure_in_child((3, 2), run) == NOMINAL
    ((command, visible),) = commands
    assert command[4:] == ["3", "2"] and visible == "-1"
