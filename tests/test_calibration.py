"""Rates of a machine: measured, kept, read."""

import dataclasses
import json
import math
import subprocess
from pathlib import Path

import pytest
import tensorflow as tf

from rewriters.cost import NOMINAL
from tflms_sft import _calibration
from tflms_sft._calibration import VARIABLE, machine_rates, measured_rates

SLOW = dataclasses.replace(NOMINAL, fresh=1e9, unfolded={"Conv2DBackpropFilter": 3e9})


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache, and how often rates were measured."""
    times = []
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(_calibration, "_known", {})
    monkeypatch.setattr(_calibration, "_measured_apart", lambda: times.append("apart") or SLOW)
    return tmp_path, times


def test_rates_are_measured_once_and_kept(cache, monkeypatch):
    folder, times = cache
    told = []
    assert machine_rates(told.append) == machine_rates(told.append) == SLOW
    (file,) = (folder / "tflms-sft").iterdir()
    assert times == ["apart"] and len(told) == 1 and str(file) in told[0]
    monkeypatch.setattr(_calibration, "_known", {})
    assert machine_rates() == SLOW and times == ["apart"], "another process reads them"


def test_infinite_rates_are_kept_too(cache, monkeypatch):
    monkeypatch.setattr(_calibration, "_measured_apart", lambda: NOMINAL)
    assert math.isinf(machine_rates().fresh)
    monkeypatch.setattr(_calibration, "_known", {})
    assert machine_rates() == NOMINAL


@pytest.mark.parametrize("text", ["", "{}", '{"version": 0}', '{"version": 1, "flops": {}}', "[1]"])
def test_a_file_that_cannot_be_read_is_measured_anew(cache, text, monkeypatch):
    folder, times = cache
    machine_rates()
    (file,) = (folder / "tflms-sft").iterdir()
    file.write_text(text)
    monkeypatch.setattr(_calibration, "_known", {})
    assert machine_rates() == SLOW and len(times) == 2
    assert json.loads(file.read_text())["version"] == _calibration.VERSION


def test_a_cache_that_cannot_be_written_costs_time_alone(cache, monkeypatch):
    folder, times = cache
    (folder / "tflms-sft").write_text("a file in the place of the folder")
    assert machine_rates() == machine_rates() == SLOW and times == ["apart"]


def test_a_file_of_rates_may_be_named(cache, monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine.json"))
    assert machine_rates() == SLOW
    values = json.loads((tmp_path / "mine.json").read_text())
    values["flops"][""] = 5e11
    (tmp_path / "mine.json").write_text(json.dumps(values))
    monkeypatch.setattr(_calibration, "_known", {})
    assert machine_rates().flops == {"": 5e11}
    (tmp_path / "mine.json").write_text("no rates")
    monkeypatch.setattr(_calibration, "_known", {})
    with pytest.raises(ValueError, match=f"{VARIABLE} names holds no rates.*mine.json.*{VARIABLE}=nominal"):
        machine_rates()
    monkeypatch.setenv(VARIABLE, "nominal")
    assert machine_rates() is NOMINAL


def test_where_no_other_process_can_measure_this_one_does(monkeypatch):
    def failing(*args, **options):
        raise subprocess.CalledProcessError(1, args)

    monkeypatch.setattr(_calibration.subprocess, "run", failing)
    assert _calibration._measured_apart() is None


@pytest.mark.slow
def test_a_machine_is_measured_by_another_process(cache, monkeypatch):
    monkeypatch.undo()
    found = _calibration._measured_apart()
    assert found is not None and found.call < 1e-3 and found.flops["Conv2D"] > 1e8


def test_rates_are_of_a_plausible_size(monkeypatch):
    """While a function is traced, as under `fit`; within a factor that any machine and load stays in."""
    monkeypatch.setattr(_calibration, "MEDIUM", 2**20)
    monkeypatch.setattr(_calibration, "LARGE", 3 * 2**20)
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
    assert rates.flops["Conv2D"] > rates.flops["DepthwiseConv2dNative"], "which does little with what it reads"


def test_another_process_measures_with_the_threads_of_this_one(monkeypatch, tmp_path):
    commands = []

    def run(command, env, **options):
        commands.append((command, env["CUDA_VISIBLE_DEVICES"]))
        _calibration._write(Path(command[3]), NOMINAL)

    monkeypatch.setattr(_calibration.subprocess, "run", run)
    monkeypatch.setattr(_calibration, "_threads", lambda: (3, 2))
    assert _calibration._measured_apart() == NOMINAL
    ((command, visible),) = commands
    assert command[4:] == ["3", "2"] and visible == "-1"


@pytest.mark.parametrize("text", ["5", "null", '"x"', "[1]", "{}"])
def test_files_that_hold_something_else_are_measured_anew(text, monkeypatch, tmp_path):
    path = tmp_path / "rates.json"
    path.write_text(text)
    assert _calibration._kept(path, "") is None
    with pytest.raises(ValueError, match="holds no rates of this version"):
        _calibration._kept(path, "rates.json")
