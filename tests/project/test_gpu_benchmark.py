"""The acceptance on a GPU (`benchmarks.gpu`), with its measurements on a CPU or replaced."""

import importlib
import json

import pytest

from benchmarks import _gpu_checks, gpu, gpu_graphs


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


# Graphs for a GPU -------------------------------------------------------------------------------------------


def kernels(**changed):
    empty = {"missing": {}, "host_tensors": {}, "copies": {}}
    return {"ops": 1200, **empty, "small_to_host": 0, "small_to_gpu": 1, "swaps": 0, **changed}


def test_interrupted_check_of_graphs_goes_on_with_missing_steps(monkeypatch, tmp_path, capsys):
    names = []

    def run(case):
        names.append(case.name)
        return {"failed": "no plan"} if case.plan == "strips" else {"kernels": kernels(missing={"Split int32": 2})}

    monkeypatch.setattr(gpu_graphs, "run", run)
    path = tmp_path / "graphs.json"
    arguments = ["--nets", "DenseNet121", "--results", str(path)]
    assert gpu_graphs.main(arguments) == 1
    assert names == [f"DenseNet121/float32/{plan}" for plan in gpu_graphs.PLANS]
    assert gpu_graphs.main(arguments) == 1 and names[len(gpu_graphs.PLANS) :] == ["DenseNet121/float32/strips"]
    assert f"3 of 4 steps measured; {path}" in capsys.readouterr().out
    (line,) = json.loads(path.read_text())["tables"]["kernels"].splitlines()[2:]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["DenseNet121", "float32", "1,200 / 1,200 / - / 1,200", "2 Split int32", "0", "0", "0", "1", "0"]


def test_graphs_of_every_case_are_named_once():
    names = [case.name for case in gpu_graphs.cases()]
    assert len(set(names)) == len(names) and {name.split("/")[0] for name in names} == set(gpu.NETWORKS)


def test_table_counts_the_most_of_each_op_over_plans():
    stored = {
        "vgg16/float32/original": {"kernels": kernels(copies={"Cast int32": 1})},
        "vgg16/float32/tiles": {"kernels": kernels(copies={"Cast int32": 3, "Equal bool": 1}, swaps=2)},
    }
    (line,) = gpu_graphs.kernel_table(stored).splitlines()[2:]
    assert "3 Cast int32, 1 Equal bool" in line and line.endswith("| 2     |")
