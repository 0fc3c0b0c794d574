"""Criteria and table of `benchmarks.sources`, with measurements replaced, and its steps on a small image."""

import os
from pathlib import Path

import pytest

from benchmarks import _alternation, _child, _source_steps, sources
from examples import slide


@pytest.fixture
def measured(monkeypatch):
    """Figures that replace those of the children."""
    figures = {
        "write": None,
        "memory": {
            "headline": "1 segment(s) in 16x16 tiles, predicted peak 148 MiB",
            "predicted_bytes": 148 * sources.MIB,
            "original_bytes": 26 * sources.GIB,
            "tile_bytes": sources.MIB,
            "rss_bytes": 2 * sources.MIB,
            "seconds per large pixel": 1.099e-6,
        },
        "times": {"losses": {"memory": [1.0, 0.9], "file": [1.0, 0.9]}, "ratio": 1.1, "seconds": {}},
    }

    def call(target, kwargs, env, on_event):
        if target.endswith("repeat"):
            assert kwargs["size"] == sources.SMALLEST_VGG
            return kwargs["folder"]
        result = figures[target.partition(":")[2]]
        if not target.endswith("memory"):
            return result
        budget, pixels = kwargs["budget"], kwargs["size"] ** 2
        ended = 1 + (1e-6 if pixels < 10_000**2 else result["seconds per large pixel"]) * pixels
        return {**result, "budget": budget, "rss_bytes": result["rss_bytes"] + budget, "began": 1, "ended": ended}

    def alternate(long, short, folder):
        assert short(print) == folder and Path(folder).is_dir()
        figures = long(print)
        small = sources.SMALLEST_VGG**2 * 1e-6
        # The mean of these speeds is that of the mocked steps.
        times = {"small_seconds": [small / 0.9, small / 1.1], "small_first_seconds": 2 * small}
        return {**figures, "seconds": figures.pop("ended") - figures.pop("began"), **times}

    monkeypatch.setattr(_child, "call_in_child", call)
    monkeypatch.setattr(_alternation, "alternate", alternate)
    return figures


def test_lines_pass_and_are_stored(measured, tmp_path, capsys):
    results = tmp_path / "results.json"
    arguments = ["--folder", str(tmp_path), "--results", str(results)]
    assert sources.main(arguments) == 0
    printed = capsys.readouterr().out
    assert all(f"passed    {name}" in printed for name in sources.LINES)
    assert "16x16 tiles" in results.read_text()
    assert sources.main(arguments) == 0  # Nothing is missing.
    assert capsys.readouterr().out == ""
    assert [path.name for path in tmp_path.iterdir()] == [results.name]


def test_lines_fail(measured, tmp_path):
    results = ["--folder", str(tmp_path), "--results", str(tmp_path / "results.json")]
    measured["memory"]["seconds per large pixel"] = 1.101e-6
    assert sources.main(["--lines", "vgg16 2048", "vgg16 4096", "vgg16 20480", *results]) == 0
    assert sources.main(["--lines", "vgg16 10240", *results]) == 1
    measured["memory"]["rss_bytes"] += 1
    measured["times"]["ratio"] = 1.11
    assert sources.main(["--lines", "4GB", *results]) == 1
    assert sources.main(["--lines", "time", *results]) == 1
    measured["times"] |= {"ratio": 1.0, "losses": {"memory": [1.0], "file": [1.001]}}
    assert sources.time_line(str(tmp_path), 1)["criteria"]["equal losses"] is False


def test_steps_in_files_and_in_memory_have_equal_losses(tmp_path, monkeypatch):
    monkeypatch.setattr(slide, "CHUNK", 64)
    _source_steps.write(folder=str(tmp_path), size=160, emit=print)
    figures = _source_steps.times(folder=str(tmp_path), size=160, budget=16 * 2**20, runs=1, emit=print)
    assert figures["losses"]["memory"] == pytest.approx(figures["losses"]["file"], rel=1e-5)
    assert "tiles" in figures["headlines"]["file"]
    events = []
    arguments = {"folder": str(tmp_path), "size": 160, "budget": 16 * 2**20, "net": "unet", "emit": events.append}
    memory = _source_steps.memory(**arguments)
    assert memory["loss"] == pytest.approx(figures["losses"]["file"][0], rel=1e-5)
    assert events == [{"pid": os.getpid()}, {"ready": True}] and memory["began"] < memory["ended"]
    Path(tmp_path, _alternation.END).touch()
    _source_steps.repeat(**arguments)
    assert [list(event) for event in events[2:]] == [["pid"], ["first_seconds"]]


def test_tensors_of_the_classifier_lie_in_files(tmp_path):
    _source_steps.write(folder=str(tmp_path), size=1024, emit=print)
    figures = _source_steps.memory(folder=str(tmp_path), size=1024, budget=24 * 2**20, net="residual", emit=print)
    assert figures["file_bytes"] > 24 * 2**20 and figures["predicted_bytes"] < 24 * 2**20


def test_vgg16_has_at_most_a_quarter_of_the_original_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(slide, "CHUNK", 64)
    _source_steps.write(folder=str(tmp_path), size=384, emit=print)
    figures = _source_steps.memory(folder=str(tmp_path), size=384, budget=2**40, net="vgg16", emit=print)
    assert figures["predicted_bytes"] <= figures["budget"] == figures["original_bytes"] // 4
