"""`--device-model`: plans for a graphics card that is not in this machine."""

import json

import pytest

from tflms_sft._cli.main import main

NET = """
import keras

def build():
    layers = [keras.layers.Conv2D(16, 3, padding="same", activation="relu") for _ in range(4)]
    return keras.Sequential([keras.Input((None, None, 3)), *layers, keras.layers.GlobalAveragePooling2D()])
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a command with a network of four convolutions; returns its exit code and output."""
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)

    def command(name, *options):
        return main([name, "net.py:build", *options]), *capsys.readouterr()

    return command


def test_plan_names_the_card_and_predicts_seconds(run):
    options = ("--input-shape", "4096,4096,3", "--device-model", "rtx2080ti")
    code, out, _ = run("plan", *options, "--budget", "3GiB")
    assert code == 0
    assert "NVIDIA GeForce RTX 2080 Ti by its data sheet, without TF32" in out
    assert "Predicted time of a step: " in out and "s, without rewriting " in out
    plan = json.loads(run("plan", *options, "--budget", "3GiB", "--json")[1])["plan"]
    assert plan["predicted"]["peak_bytes"] < 3 * 2**30 < plan["original"]["peak_bytes"]
    assert plan["predicted"]["seconds"] > plan["original"]["seconds"] > 0


def test_plan_without_card_has_other_device_and_no_nominal_seconds(run):
    code, out, _ = run("plan", "--input-shape", "128,128,3", "--budget", "1GiB")
    assert code == 0 and "on CPU:0" in out
    assert "Seconds are not predicted" in out


def test_faster_card_trains_faster(run):
    seconds = []
    for card in ("rtx2080ti", "h200"):
        options = ("--input-shape", "2048,2048,3", "--num-tiles", "4,1", "--device-model", card, "--json")
        seconds.append(json.loads(run("plan", *options)[1])["plan"]["predicted"]["seconds"])
    assert seconds[0] > 3 * seconds[1]


def test_larger_card_takes_larger_images(run):
    sides = []
    for card in ("rtx2080ti", "a100-40"):
        code, out, _ = run("max-input", "--budget", "auto", "--within", "0.3", "--device-model", card, "--json")
        assert code == 0
        sides.append(json.loads(out)["plain"]["size"])
    assert sides[1] > 1.5 * sides[0]


def test_unknown_card_is_refused_with_the_known_ones(run, capsys):
    with pytest.raises(SystemExit) as stop:
        run("plan", "--budget", "1GiB", "--device-model", "rtx9999")
    assert stop.value.code == 2
    assert "rtx2080ti" in capsys.readouterr().err
