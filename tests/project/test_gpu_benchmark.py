"""The acceptance on a GPU (`benchmarks.gpu`), with its measurements on a CPU or replaced."""

import importlib
import json

import pytest

from benchmarks import _gpu_checks, gpu


@pytest.fixture
def ran(monkeypatch):
    """Return the names of the checks that ran; those without the layout optimizer fail."""
    names = []

    def run(check, device, lock):
        names.append(check.name)
        return {"passed": "layout" not in check.name, "name": "NVIDIA A100-40", "peak_bytes": [2**20, 3 * 2**20]}

    monkeypatch.setattr(gpu, "run", run)
    return names


def test_hidden_time_is_that_beside_kernels():
    assert _gpu_checks.hidden_fraction([], [(0, 9)]) == 1
    assert _gpu_checks.hidden_fraction([(0, 10)], []) == 0
    assert _gpu_checks.hidden_fraction([(0, 10), (20, 30)], [(5, 8), (6, 25), (29, 40)]) == (5 + 5 + 1) / 20


def test_interrupted_run_goes_on_with_missing_checks(ran, tmp_path, capsys):
    path = tmp_path / "results.json"
    arguments = ["--device", "cpu", "--small", "--results", str(path), "--checks", "peak/vgg16", "memory"]
    assert gpu.main(arguments) == 1
    first = list(ran)
    chosen = [one.name for one in gpu.checks(small=True) if one.name.startswith(("peak/vgg16", "memory"))]
    assert sorted(first) == sorted(["device", *chosen])
    without_layout = sum("layout" in name for name in chosen)
    assert without_layout == 2
    stored = json.loads(path.read_text())
    del stored["peak/vgg16"]
    path.write_text(json.dumps(stored))
    assert gpu.main(arguments) == 1
    assert ran[len(first) :] == ["device", "peak/vgg16"]
    printed = capsys.readouterr().out
    assert "FAILED  peak/vgg16-layout-off: name NVIDIA A100-40, peak bytes 1/3 MiB" in printed
    assert f"{len(chosen) - without_layout} of {len(chosen)} checks passed, 0 not run; {path}" in printed


def test_no_check_begins_after_the_last_minute(ran, tmp_path, capsys):
    assert gpu.main(["--small", "--minutes", "0", "--results", str(tmp_path / "none.json")]) == 0
    assert ran == ["device"]
    assert f"{len(gpu.checks(small=True)) - 1} not run" in capsys.readouterr().out


def test_checks_have_names_of_their_own_and_functions():
    for small in (True, False):
        checks = gpu.checks(small)
        assert len({one.name for one in checks}) == len(checks)
        for one in checks:
            module, function = one.function.split(":")
            assert callable(getattr(importlib.import_module(f"benchmarks.{module}"), function))


def test_rewritten_steps_are_compared_and_memory_runs_out_on_a_cpu(tmp_path, capsys):
    path = tmp_path / "results.json"
    arguments = ["--device", "cpu", "--small", "--workers", "2", "--results", str(path)]
    assert gpu.main([*arguments, "--checks", "equal/float64/vgg16", "memory"]) == 0
    stored = json.loads(path.read_text())
    assert set(stored) > {"device", "equal/float64/vgg16", "memory/loop", "tables"}
    assert "benchmarks.gpu --device cpu" in stored["command"]
    assert 0 < stored["equal/float64/vgg16"]["tiles"] < 1e-10
    assert stored["memory/loop"]["raised"] == "ResourceExhaustedError"
