"""Criteria, lengths and tables of `benchmarks.sequences`, with measurements replaced, and its networks."""

import json

import pytest

from benchmarks import _child, _sequence_nets, sequences

MIB = 2**20


@pytest.fixture
def measured(monkeypatch):
    """Replace measurements: peaks and times of original steps grow with the square of the size, others linearly."""

    def call(target, kwargs, env=None):
        size, budget = kwargs["size"], kwargs["budget"]
        plain, rewritten = size**2, 8 * size
        if target.endswith("peaks"):
            return [plain if budget is None else rewritten] * kwargs["runs"]
        if target.endswith("times"):
            times = {"plain": size / 1000, "rewritten": 1.1 * size / 1000, "two loops": 1.3 * size / 1000}
            figures = {"medians": times, "ratios": {"rewritten": 1.1, "two loops": 1.3}}
            return figures if kwargs.get("base") is None else {**figures, "base_ratio": 1.15}
        budget = budget * plain if budget < 1 else budget
        figures = {"original_bytes": plain, "budget_bytes": budget}
        if rewritten > budget:
            return {**figures, "error": "too small", "smallest_bytes": rewritten}
        predicted = {"predicted_bytes": rewritten, "predicted_ratio": 1.1, "predicted_seconds": 1.0}
        return {**figures, **predicted, "headline": "1 segment(s) in 1x4 tiles, ...", "saved_bytes": [plain, 0]}

    monkeypatch.setattr(_child, "call_in_child", call)


def test_every_line_has_a_network():
    assert list(sequences.LINES) == list(_sequence_nets.NETS)
    assert set(_sequence_nets.REAL_TARGETS) <= set(_sequence_nets.NETS)


def test_lengths_grow_until_the_budget_is_too_small(measured):
    figures = sequences.language_model("language-model", 1, {})
    assert [length["size"] for length in figures["lengths"]] == [256, 512, 1024, 1536, 2048, 4096]
    assert figures["size"] == 2048
    assert list(figures["criteria"].values()) == [True, True]


def test_results_are_stored_and_continued(measured, tmp_path, capsys):
    path = tmp_path / "results.json"
    arguments = ["--results", str(path)]
    assert sequences.main([*arguments, "--lines", "unet", "attention", "language-model"]) == 0
    stored = json.loads(path.read_text())
    assert "| unet, two loops " in stored["tables"]["networks"]
    assert "| 2,048 " in stored["tables"]["lengths"]
    stored["lines"]["unet"]["criteria"]["faster than two loops"] = False
    path.write_text(json.dumps(stored))
    capsys.readouterr()
    assert sequences.main(arguments) == 1
    printed = capsys.readouterr().out
    assert "passed    decoder" in printed and "language-model, " not in printed
    assert "failed: unet, head; " in printed


def test_network_without_a_plan_fails(measured, monkeypatch):
    monkeypatch.setitem(sequences.LINES, "decoder", sequences.Line(16))
    figures = sequences.network("decoder", 1, {})
    assert sequences.status(figures) == "FAILED"
    assert sequences.row(figures)[-2:] == ["no plan", "-"]
