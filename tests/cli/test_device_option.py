"""`--device-model`: plans for a graphics card that is not in this machine."""

import json

import pytest

from tflms_sft._cli.main import main

NET = """
import keras
import tensorflow as tf

def build(dtype="float32"):
    layers = [keras.layers.Conv2D(16, 3, padding="same", activation="relu", dtype=dtype) for _ in range(4)]
    return keras.Sequential(
        [keras.Input((None, None, 3), dtype=dtype), *layers, keras.layers.GlobalAveragePooling2D(dtype=dtype)]
    )

def double():
    return build("float64")

def with_python():
    image = keras.Input((None, None, 3))
    double = keras.layers.Lambda(lambda x: tf.ensure_shape(tf.numpy_function(lambda x: 2 * x, [x], x.dtype), x.shape))
    return keras.Model(image, keras.layers.Conv2D(4, 3)(double(image)))

def with_host_op():
    image = keras.Input((None, None, 3))
    boxes = keras.layers.Lambda(lambda x: x + tf.image.draw_bounding_boxes(x, tf.zeros([1, 1, 4]), tf.ones([1, 3])))
    return keras.Model(image, keras.layers.Conv2D(4, 3)(boxes(image)))

def compiled(**options):
    model = build()
    model.compile("sgd", "mse", **options)
    return model

def eager():
    return compiled(run_eagerly=True)

def with_xla():
    return compiled(jit_compile=True)
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a command with a network of four convolutions; returns its exit code and output."""
    (tmp_path / "net.py").write_text(NET)
    monkeypatch.chdir(tmp_path)

    def command(name, *options, net="build"):
        return main([name, f"net.py:{net}", *options]), *capsys.readouterr()

    return command


def test_plan_names_the_card_and_predicts_seconds(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TFLMS_SFT_PLAN_CACHE", str(tmp_path / "plans"))  # The second plan needs no search.
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


@pytest.mark.parametrize("name", ["rtx9999", "H100"])
def test_unknown_card_is_refused_with_the_known_ones(run, capsys, name):
    with pytest.raises(SystemExit) as stop:
        run("plan", "--budget", "1GiB", "--device-model", name)
    assert stop.value.code == 2
    text = capsys.readouterr().err
    assert "rtx2080ti" in text and "nearest generation" in text


def test_double_precision_takes_the_time_of_the_data_sheet(run):
    seconds = {}
    for net in ("build", "double"):
        options = ("--input-shape", "1024,1024,3", "--budget", "9GiB", "--device-model", "RTX2080Ti", "--json")
        seconds[net] = json.loads(run("plan", *options, net=net)[1])["plan"]["original"]["seconds"]
    assert 5 < seconds["double"] / seconds["build"] < 32


def test_largest_plan_of_a_card_names_the_card(run):
    options = ("--input-shape", "24000,24000,3", "--device-model", "rtx2080ti")
    _, _, error = run("plan", *options, "--budget", "11GiB")
    assert "all that TensorFlow allocates on NVIDIA GeForce RTX 2080 Ti" in error and "GPU:0" not in error
    _, out, _ = run("plan", *options, "--num-tiles", "2,2")
    assert "Note: the plan needs " in out and "TensorFlow allocates 9.58 GiB on NVIDIA GeForce RTX 2080 Ti" in out


@pytest.mark.parametrize(
    ("net", "note"),
    [
        ("with_python", "Note: PyFunc runs Python code, whose time and memory are not predicted"),
        ("with_host_op", "Note: TensorFlow has no GPU kernel for DrawBoundingBoxesV2, which runs on the host"),
        ("with_xla", "Note: the model has jit_compile=True"),
    ],
)
def test_notes_say_what_the_prediction_lacks(run, net, note):
    code, out, _ = run("plan", "--input-shape", "128,128,3", "--budget", "1GiB", "--device-model", "rtx2080ti", net=net)
    assert code == 0 and note in out


def test_model_that_runs_eagerly_is_refused(run):
    code, _, error = run("plan", "--input-shape", "128,128,3", "--budget", "1GiB", net="eager")
    assert code == 2 and "run_eagerly=False" in error
