"""`benchmarks.compare`: what it computes and says; what it measures is not tested."""

import dataclasses
import importlib.util

import numpy as np
import pytest

from benchmarks import _child, _compare, compare


def ended(returncode, error=None):
    return _child.Outcome(returncode, None, error, "", [], 0.0)


def figures_of(memory, seconds, **more):
    return {"net_rss_bytes": memory * 2**20, "seconds": seconds, "losses": [2.0, 1.0], **more}


@pytest.fixture
def trained(tmp_path):
    """`benchmarks.compare`: two methods with different statistics, failures, and missing PyTorch."""
    gradient, statistic = np.ones((3, 4)), np.full(5, 2.0)
    np.savez(tmp_path / "plain.npz", **{"gradient/0": gradient, "statistic/0": statistic})
    np.savez(tmp_path / "other.npz", **{"gradient/0": gradient, "statistic/0": 3 * statistic})
    plain, given, *rest = compare.ways(["1/2"])
    found = {
        plain.title: figures_of(100, 2.0, saved=tmp_path / "plain.npz"),
        given.title: figures_of(40, 2.5, saved=tmp_path / "other.npz"),
        **{way.title: {"failed": "RuntimeError: no such thing"} for way in rest},
    }
    compare.compared([plain, given, *rest], found)
    return [plain, given, *rest], found


def test_methods_are_compared_with_plain_training_of_their_framework(trained):
    chosen, found = trained
    own = found[chosen[1].title]
    assert own["memory_ratio"] == 0.4 and own["time_ratio"] == 1.25
    assert own["differences"] == {"loss": 0.0, "gradient": 0.0, "statistic": pytest.approx(2.0)}
    lines = compare.table(*trained).splitlines()
    assert len(lines[0].split("|")) == len(lines[2].split("|")) == 10
    (line,) = (line for line in lines if "MemoryBudget" in line)
    assert [cell.strip() for cell in line.split("|")[2:6]] == ["40 MiB", "0.40", "2.50 s", "1.25"]
    assert "RematScope full: RuntimeError: no such thing" in lines
    with pytest.raises(ValueError, match="has other gradients than plain training"):
        compare.differences({"gradient/1": np.ones(1)}, {"gradient/0": np.ones(1)})


def test_comparison_chart_is_drawn(trained, tmp_path):
    compare.draw(tmp_path / "picture.png", "a network", *trained)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_failure_of_a_method_is_reported_in_one_line():
    wrapped = "Exception encountered when calling Functional.call().\n\n\x1b[1mNo gradient.\x1b[0m\n\nArguments"
    assert compare.why(ended(1, {"type": "ValueError", "message": wrapped})) == "ValueError: No gradient."
    assert compare.why(ended(-9)) == "killed by SIGKILL"


def test_pytorch_methods_without_pytorch_are_skipped(monkeypatch, tmp_path):
    ran = []

    def run_child(target, kwargs, env):
        ran.append(kwargs["way"])
        return ended(1, {"type": "ValueError", "message": "not run"})

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(_child, "run_child", run_child)
    chosen = compare.ways(["1GiB"])
    found = compare.measured(_compare.Spec("vgg16", 32, 1, 1, 1, "cpu"), chosen, 1, tmp_path)
    assert "torch" not in ran and len(ran) == len(chosen) - 2
    assert found["PyTorch, plain"]["failed"].startswith("skipped: PyTorch is not installed")


@pytest.mark.parametrize("way", ["plain", "recompute_grad", "budget"])
def test_method_trains_and_saves_its_result(way, tmp_path):
    spec = dataclasses.asdict(_compare.Spec("vgg16", 32, 1, 1, 1, "cpu"))
    kwargs = {"spec": spec, "way": way, "budget_bytes": 2**31, "save": str(tmp_path / "saved.npz")}
    result = _child.call_in_child("benchmarks._others:train", kwargs)
    assert len(result["losses"]) == 2 and all(np.isfinite(result["losses"])) and len(result["step_seconds"]) == 1
    with np.load(tmp_path / "saved.npz") as arrays:
        assert len(arrays) == 28 and any(np.any(arrays[name]) for name in arrays)
