"""The acceptance on a GPU (`benchmarks.gpu`): the whole of it on a CPU, and parts with measurements replaced."""

import collections
import importlib
import json
import os
import re
import subprocess
import sys

import pytest
import tensorflow as tf

from benchmarks import _child, _gpu_checks, _gpu_trace, gpu

MINUTES = 15
"""Time limit of the whole acceptance beside other tests. It takes less than two minutes on two cores of its own."""


@pytest.fixture
def ran(monkeypatch):
    """Return the names of the checks that ran; those without the layout optimizer fail."""
    names = []

    def run(check, device, env):
        names.append(check.name)
        figures = {"criteria": {"peak": "layout" not in check.name}, "name": "NVIDIA A100-40"}
        return {"status": gpu.status(figures), **figures, "peak_bytes": [2**20, 3 * 2**20]}

    monkeypatch.setattr(gpu, "run", run)
    monkeypatch.setattr(_child, "start_fork_server", lambda modules: None)
    return names


def test_whole_small_acceptance_passes_on_cpu_and_is_not_repeated(tmp_path):
    path = tmp_path / "results.json"
    # The first is of this process, for comparisons of sums. Peaks are those of TensorFlow as it is by default.
    env = {name: value for name, value in os.environ.items() if name != "TF_ENABLE_ONEDNN_OPTS"}
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--small", "--results", str(path)]
    command += ["--minutes", str(MINUTES)]
    done = subprocess.run(command, cwd=_child.ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    stored = json.loads(path.read_text())
    for check in gpu.checks(small=True):
        status = "measured" if check.function.endswith(("plain_times", "workspaces")) else "passed"
        assert stored[check.name]["status"] == status
        assert f"{status:8}  {check.name}: " in done.stdout
    assert "benchmarks.gpu --device cpu --small" in stored["command"]
    assert 0 < stored["equal/float64/small-vgg"]["tiles"] < 1e-10
    assert stored["memory/loop"]["raised"] == "ResourceExhaustedError"
    assert stored["overlap/small-vgg"]["copies"] > 0 and 0 < stored["overlap/small-vgg"]["hideable"] <= 1
    again = subprocess.run(command, cwd=_child.ROOT, env=env, capture_output=True, text=True, check=False)
    assert again.returncode == 0
    assert re.findall(r"^(?:passed|measured|FAILED) +(\S+):", again.stdout, re.MULTILINE) == ["device"]


def test_small_acceptance_has_every_line_of_the_full_one():
    def lines(small):
        networks = gpu.SMALL_NETWORKS if small else gpu.NETWORKS
        names = "|".join(sorted(map(re.escape, [*networks]), key=len, reverse=True))
        checks = gpu.checks(small)
        return collections.Counter(re.sub(r"\d+$", "PX", re.sub(names, "NET", one.name)) for one in checks), checks

    (small, small_checks), (full, full_checks) = lines(True), lines(False)
    assert set(small) == set(full)
    assert small["large/PX"] == full["large/PX"] == 4
    assert {(one.function, one.workspace_mib) for one in small_checks} == {
        (one.function, one.workspace_mib) for one in full_checks
    }
    assert full["equal/float32/NET"] == full["equal/tf32/NET"] == len(gpu.NETWORKS) == 12


def test_hidden_time_is_that_beside_kernels():
    assert _gpu_trace.hidden_fraction([], [(0, 9)]) is None
    assert _gpu_trace.hidden_fraction([(0, 10)], []) == 0
    assert _gpu_trace.hidden_fraction([(0, 10), (20, 30)], [(5, 8), (6, 25), (29, 40)]) == (5 + 5 + 1) / 20


def test_kernels_can_hide_copies_no_longer_than_they_last():
    assert _gpu_trace.hideable_fraction([], [(0, 9)]) is None
    assert _gpu_trace.hideable_fraction([(0, 10), (20, 30)], [(5, 8), (6, 10)]) == 5 / 20
    assert _gpu_trace.hideable_fraction([(0, 10)], [(20, 50)]) == 1


@pytest.mark.parametrize(("swapped", "hidden"), [(1.0, 1.0), (0.9, 1.0), (1.5, 0.75), (3.0, 0.0), (9.0, 0.0)])
def test_hidden_time_is_that_which_does_not_prolong_the_step(swapped, hidden):
    assert _gpu_trace.hidden_fraction_by_times(1.0, swapped, 2.0) == hidden
    assert _gpu_trace.hidden_fraction_by_times(1.0, swapped, 0.0) is None


def _stats(*nodes):
    """Return `StepStats` of (device, name, label, begin, end)."""
    stats = tf.compat.v1.RunMetadata().step_stats
    devices = {}
    for device, name, label, begin, end in nodes:
        part = devices[device] = devices.get(device) or stats.dev_stats.add(device=device)
        part.node_stats.add(node_name=name, timeline_label=label, all_start_micros=begin, op_end_rel_micros=end - begin)
    return stats


EXECUTOR = (
    ("/job:localhost/replica:0/task:0/device:GPU:0", "conv", "conv = Conv2D(x, y)", 0, 1),
    ("/job:localhost/replica:0/task:0/device:CPU:0", "swap", "swap = Identity(x)", 0, 99),
)


def test_copies_of_gpu_trace_are_those_of_streams():
    stats = _stats(
        *EXECUTOR,
        ("/device:GPU:0/stream:13", "conv", "sm90_xmma grid:1,2", 10, 30),
        ("/device:GPU:0/stream:all", "conv", "sm90_xmma grid:1,2", 10, 59),
        ("/device:GPU:0/stream:13<MemcpyD2D>", "pad", "MemcpyD2D size:64", 30, 31),
        ("/device:GPU:0/stream:14<MemcpyD2H>", "swap", "MemcpyD2H kind_src:device kind_dst:pinned size:64", 20, 40),
        ("/device:GPU:0/stream:15<MemcpyH2D>", "swap_in", "MemcpyH2D size:64", 50, 60),
        ("/device:GPU:0/memcpy", "swap_in", "MemcpyH2D size:64", 50, 60),
    )
    activity = _gpu_trace.activity(stats, "gpu")
    assert activity.copies == {(20, 40), (50, 60)}
    assert activity.kernels == {(10, 30), (30, 31)}
    assert activity.devices["/device:GPU:0/stream:all"] == 1
    assert _gpu_trace.hidden_fraction(activity.copies, activity.kernels) == 11 / 30


def test_trace_without_streams_has_no_copies_but_tells_what_it_has():
    activity = _gpu_trace.activity(_stats(*EXECUTOR), "gpu")
    assert not activity.copies and not activity.kernels
    assert activity.devices == {device: 1 for device, *_ in EXECUTOR}
    on_cpu = _gpu_trace.activity(_stats(*EXECUTOR), "cpu")
    assert on_cpu.copies == {(0, 99)} and on_cpu.kernels == {(0, 1)}


def test_check_without_criteria_does_not_pass():
    assert gpu.status({"criteria": {}}) == "measured"
    assert gpu.status({"criteria": {"one": True, "other": False}}) == "FAILED"
    assert gpu.status({"failed": "killed by SIGKILL"}) == "FAILED"
    assert gpu.status({"criteria": {"one": True}}) == "passed"


@pytest.mark.parametrize(("measured", "near"), [(84, False), (86, True), (114, True), (116, False)])
def test_peaks_are_near_predictions_in_both_directions(measured, near):
    assert _gpu_checks.is_near(measured, 100, _gpu_checks.MAX_PEAK_ERROR_FRACTION) == near


def test_preloaded_modules_use_no_device_when_they_are_imported():
    # TensorFlow accepts this setting as long as it has no threads and devices, which no fork would survive.
    text = (
        f"import {', '.join(gpu.PRELOADED)}, tensorflow as tf; tf.config.threading.set_inter_op_parallelism_threads(1)"
    )
    subprocess.run([sys.executable, "-c", text], cwd=_child.ROOT, check=True)


def test_forked_child_that_is_killed_or_raises_fails():
    raised = _child.run_forked("os:abort", {}, env={})
    assert not raised.ok and raised.how_it_ended() == "TypeError: posix.abort() takes no keyword arguments"
    killed = _child.run_forked("tests.project.test_gpu_benchmark:die", {}, env={"WHY": "said"})
    assert not killed.ok and killed.how_it_ended() == "killed by SIGABRT" and "said" in killed.log_tail()


def die(*, emit):
    """End as a child that ran out of memory does."""
    os.system("echo $WHY >&2")
    os.abort()


def test_interrupted_run_goes_on_with_missing_checks(ran, tmp_path, capsys):
    path = tmp_path / "results.json"
    arguments = ["--device", "cpu", "--small", "--results", str(path), "--checks", "peak/small-vgg", "memory"]
    assert gpu.main(arguments) == 1
    first = list(ran)
    chosen = [one.name for one in gpu.checks(small=True) if one.name.startswith(("peak/small-vgg", "memory"))]
    assert sorted(first) == sorted(["device", *chosen])
    without_layout = sum("layout" in name for name in chosen)
    assert without_layout == 2
    stored = json.loads(path.read_text())
    del stored["peak/small-vgg"]
    path.write_text(json.dumps(stored))
    assert gpu.main(arguments) == 1
    assert ran[len(first) :] == ["device", "peak/small-vgg"]
    printed = capsys.readouterr().out
    assert "FAILED    peak/small-vgg-layout-off: NOT peak, name NVIDIA A100-40, peak bytes 1/3 MiB" in printed
    counts = f"2 FAILED, {len(chosen) - without_layout} passed, 0 not run"
    assert f"{len(chosen)} checks: {counts}; {path}" in printed


def test_no_check_begins_after_the_last_minute(ran, tmp_path, capsys):
    assert gpu.main(["--small", "--minutes", "0", "--results", str(tmp_path / "none.json")]) == 3
    assert ran == ["device"]
    assert f"{len(gpu.checks(small=True)) - 1} not run" in capsys.readouterr().out


def test_checks_have_names_of_their_own_and_functions():
    for small in (True, False):
        checks = gpu.checks(small)
        assert len({one.name for one in checks}) == len(checks)
        for one in checks:
            module, function = one.function.split(":")
            assert callable(getattr(importlib.import_module(f"benchmarks.{module}"), function))
