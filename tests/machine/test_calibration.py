"""Rates of a machine: measured, kept, read."""

import dataclasses
import io
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tensorflow as tf

from rewriters.device.cards import CARDS
from rewriters.estimates.op_cost import NOMINAL
from tflms_sft._machine import calibration, rate_benchmarks
from tflms_sft._machine.calibration import VARIABLE, machine_rates
from tflms_sft._machine.card_rates import card_rates
from tflms_sft._machine.cpu_load import OtherProcesses
from tflms_sft._machine.rate_benchmarks import measured_rates

SLOW = dataclasses.replace(NOMINAL, first_touch=1e9, unfolded={"Conv2DBackpropFilter": 3e9})


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """Set an empty cache folder, and return it with a list of measurements."""
    times = []
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "_rates_by_path", {})
    monkeypatch.setattr(calibration, "_measure_in_child", lambda: times.append("apart") or SLOW)
    monkeypatch.setattr(OtherProcesses, "busy_fraction", lambda self: 0.0)  # Other tests may run meanwhile.
    return tmp_path, times


def test_machine_rates_are_measured_once_and_stored(cache, monkeypatch):
    folder, times = cache
    told = []
    assert machine_rates(told.append) == machine_rates(told.append) == SLOW
    (file,) = (folder / "tflms-sft").iterdir()
    assert times == ["apart"] and len(told) == 1 and str(file) in told[0]
    monkeypatch.setattr(calibration, "_rates_by_path", {})
    assert machine_rates() == SLOW and times == ["apart"], "another process reads them"


def test_infinite_rate_is_stored(cache, monkeypatch):
    monkeypatch.setattr(calibration, "_measure_in_child", lambda: NOMINAL)
    assert math.isinf(machine_rates().first_touch)
    monkeypatch.setattr(calibration, "_rates_by_path", {})
    assert machine_rates() == NOMINAL


@pytest.mark.parametrize("text", ["", "{}", '{"version": 0}', '{"version": 1, "flops": {}}', "[1]"])
def test_unreadable_rates_file_is_measured_again(cache, text, monkeypatch):
    folder, times = cache
    machine_rates()
    (file,) = (folder / "tflms-sft").iterdir()
    file.write_text(text)
    monkeypatch.setattr(calibration, "_rates_by_path", {})
    assert machine_rates() == SLOW and len(times) == 2
    assert json.loads(file.read_text())["version"] == calibration.VERSION


def test_unwritable_cache_does_not_fail(cache, monkeypatch):
    folder, times = cache
    (folder / "tflms-sft").write_text("a file in the place of the folder")
    assert machine_rates() == machine_rates() == SLOW and times == ["apart"]


def test_volume_convolutions_have_rates_for_each_kernel(monkeypatch, plan_with):
    for unfolds in (False, True):
        plan_with(has_allocator_stats=not unfolds)
        monkeypatch.setattr(rate_benchmarks, "_enough_images", lambda: 2)
        flops, _, _ = rate_benchmarks._arithmetic({"": 1e10}, math.inf)
        assert {"Conv3D", "Conv3DBackpropInputV2", "Conv3DBackpropFilterV2"} <= set(flops)


def aged(file, seconds):
    os.utime(file, (time.time() - seconds,) * 2)


def test_rates_of_busy_machine_expire(cache, monkeypatch):
    folder, times = cache
    told = []
    monkeypatch.setattr(OtherProcesses, "busy_fraction", lambda self: 0.375)
    assert machine_rates(told.append) == SLOW
    assert "other processes used 38% of the machine" in told[1] and len(told) == 2
    (file,) = (folder / "tflms-sft").iterdir()
    assert calibration.busy_when_measured(file) == 0.38
    aged(file, calibration.BUSY_RATES_SECONDS + 60)
    monkeypatch.setattr(calibration, "_rates_by_path", {})
    assert calibration.stored_rates() == SLOW and times == ["apart"], "nothing is chosen by them"
    for age, measured in ((0, 1), (calibration.BUSY_RATES_SECONDS - 60, 1), (calibration.BUSY_RATES_SECONDS + 60, 2)):
        aged(file, age)
        monkeypatch.setattr(calibration, "_rates_by_path", {})
        assert machine_rates() == SLOW and len(times) == measured
    monkeypatch.setattr(OtherProcesses, "busy_fraction", lambda self: 0.1)
    aged(file, calibration.BUSY_RATES_SECONDS + 60)
    monkeypatch.setattr(calibration, "_rates_by_path", {})
    assert machine_rates(told.append) == SLOW and len(times) == 3 and len(told) == 3, "nothing more to say"
    aged(file, 10 * calibration.BUSY_RATES_SECONDS)
    monkeypatch.setattr(calibration, "_rates_by_path", {})
    assert machine_rates() == SLOW and len(times) == 3, "measured while the machine was idle"


def test_named_rates_file_never_expires(cache, monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine.json"))
    monkeypatch.setattr(OtherProcesses, "busy_fraction", lambda self: 0.9)
    machine_rates()
    aged(tmp_path / "mine.json", 10 * calibration.BUSY_RATES_SECONDS)
    monkeypatch.setattr(calibration, "_rates_by_path", {})
    assert machine_rates() == SLOW and cache[1] == ["apart"]


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
def test_busy_fraction_of_samples_equals_expected(now, part, monkeypatch):
    """This process used two of ten seconds of all cores."""
    found = iter([(100, 30, 10), now])
    monkeypatch.setattr("tflms_sft._machine.cpu_load._seconds", lambda: next(found))
    assert OtherProcesses().busy_fraction() == pytest.approx(part)


@pytest.mark.parametrize("text", ["", "cpu 1 2\n", "cpus 1 2 3 4 5 6 7 8 9\n"])
def test_busy_fraction_without_proc_stat_is_zero(text, monkeypatch):
    monkeypatch.setattr("builtins.open", lambda *args, **options: io.StringIO(text))
    assert OtherProcesses().busy_fraction() == 0


def test_rates_file_of_environment_is_used(cache, monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine.json"))
    assert machine_rates() == SLOW
    values = json.loads((tmp_path / "mine.json").read_text())
    values["flops"][""] = 5e11
    (tmp_path / "mine.json").write_text(json.dumps(values))
    monkeypatch.setattr(calibration, "_rates_by_path", {})
    assert machine_rates().flops == {"": 5e11}
    (tmp_path / "mine.json").write_text("no rates")
    monkeypatch.setattr(calibration, "_rates_by_path", {})
    with pytest.raises(ValueError, match=f"{VARIABLE} must name a file with rates.*mine.json.*{VARIABLE}=nominal"):
        machine_rates()
    monkeypatch.setenv(VARIABLE, "nominal")
    assert machine_rates() is NOMINAL


@pytest.fixture(params=[(7.5, "rtx2080ti"), (8.9, "rtx3090"), (6.1, "v100-16"), (12.0, "h200")])
def card(request, plan_with):
    """Pretend that there is a GPU, and return the name of the nearest card."""
    capability, name = request.param
    plan_with(name="GPU:0", compute_capability=capability)
    return name


def test_gpu_without_stored_rates_has_those_of_the_nearest_card(cache, card, monkeypatch):
    rates = card_rates(CARDS[card])
    assert calibration.stored_rates() == rates != NOMINAL
    monkeypatch.setenv(VARIABLE, "nominal")
    assert machine_rates() == calibration.stored_rates() == rates


def test_gpu_with_too_little_memory_to_measure_has_rates_of_the_nearest_card(cache, card, monkeypatch):
    def failing():
        raise tf.errors.ResourceExhaustedError(None, None, "OOM")

    monkeypatch.setattr(calibration, "measured_rates", failing)
    assert machine_rates() == card_rates(CARDS[card])


def test_failed_child_measures_in_this_process(monkeypatch):
    def failing(*args, **options):
        raise subprocess.CalledProcessError(1, args)

    monkeypatch.setattr(calibration.subprocess, "run", failing)
    assert calibration._measure_in_child() is None


@pytest.mark.slow
def test_rates_are_measured_in_child_process(cache, monkeypatch):
    monkeypatch.undo()
    found = calibration._measure_in_child()
    assert found is not None and found.call < 1e-3 and found.flops["Conv2D"] > 1e8


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


def test_child_process_measures_with_threads_of_parent(monkeypatch, tmp_path):
    commands = []

    def run(command, env, **options):
        commands.append((command, env["CUDA_VISIBLE_DEVICES"]))
        calibration._write(Path(command[3]), NOMINAL)

    monkeypatch.setattr(calibration.subprocess, "run", run)
    monkeypatch.setattr(calibration, "_threads", lambda: (3, 2))
    assert calibration._measure_in_child() == NOMINAL
    ((command, visible),) = commands
    assert command[4:] == ["3", "2"] and visible == "-1"


@pytest.mark.parametrize("text", ["5", "null", '"x"', "[1]", "{}"])
def test_rates_file_without_rates_is_refused_or_replaced(text, monkeypatch, tmp_path):
    path = tmp_path / "rates.json"
    path.write_text(text)
    assert calibration._stored(path, "") is None
    with pytest.raises(ValueError, match="must name a file with rates of this version"):
        calibration._stored(path, "rates.json")
