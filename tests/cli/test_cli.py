"""The command line: its output, exit codes, and side effects."""

import argparse
import dataclasses
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tflms_sft
from rewriters.device import kernel_scratch
from rewriters.estimates.op_cost import NOMINAL
from tflms_sft._cli.main import main
from tflms_sft._cli.parser import make

ROOT = Path(__file__).parents[2]

NETS = """
import keras
from keras import layers

def build(size=None, classes=5, top="softmax", compiled=False):
    print("noise of the user's")
    image = x = keras.Input((size, size, 3), name="image")
    for name in ("conv1", "conv2"):
        x = layers.Conv2D(8, 3, padding="same", activation="relu", name=name)(x)
    x = layers.GlobalAveragePooling2D()(layers.MaxPool2D(name="pool")(x))
    model = keras.Model(image, layers.Dense(classes, activation=top)(x), name="small")
    if compiled:
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"], jit_compile=False)
    return model

def flat():
    return keras.Sequential([keras.Input((32, 32, 3)), layers.Conv2D(4, 3), layers.Flatten(), layers.Dense(3)])

def nested():
    inner = build(32)
    inner.get_layer("conv1").trainable = False
    return keras.Sequential([keras.Input((32, 32, 3)), layers.Rescaling(2.0), inner])

def text():
    tokens = keras.Input((None,), dtype="int32")
    x = layers.Embedding(50, 8)(tokens)
    x = layers.Add()([x, layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True)])
    return keras.Model(tokens, layers.Dense(50, activation="softmax")(x), name="text")

def two_inputs():
    a, b = keras.Input((16, 16, 2), name="a"), keras.Input((None, None, 2), name="b")
    parts = [layers.GlobalMaxPooling2D()(layers.Conv2D(4, 3)(x)) for x in (a, b)]
    outputs = {"class": layers.Dense(3, activation="softmax")(parts[0]), "size": layers.Dense(1)(parts[1])}
    return keras.Model({"b": b, "a": a}, outputs)

class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.conv = layers.Conv2D(4, 3, activation="relu")
        self.head = layers.Conv2D(2, 1)

    def call(self, x):
        return self.head(self.conv(x))

def custom_loss():
    model = build(16, top=None)
    def loss(labels, logits):
        return keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
    model.compile("sgd", loss)
    return model

def number():
    return 3

def broken():
    raise KeyError("no such thing")
"""


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    """A directory of a user's, with networks in it."""
    (tmp_path / "zoo.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("zoo", None)


@pytest.fixture
def cli(capsys):
    """Runs a command; returns its exit code, stdout and stderr."""

    def run(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return run


# plan -------------------------------------------------------------------------------------------------------


def test_plan_of_compiled_model_equals_plan_of_fit(cli):
    code, out, err = cli("plan", "zoo.py:build", "--arg", "size=64", "--arg", "compiled=True", "--budget", "2MiB")
    assert code == 0
    assert "noise" not in out and "noise of the user's" in err and "tracing the training step" in err
    assert out.startswith("Model 'small': 853 weights, SGD, the model's own loss\nStep traced for image 1x64x64x3")

    keras.backend.clear_session()
    model = sys.modules["zoo"].build(64, compiled=True)
    data = tf.data.Dataset.from_tensors((np.zeros((1, 64, 64, 3), "float32"), np.zeros((1, 5), "float32")))
    callback = tflms_sft.MemoryBudget("2MiB", verbose=0)
    model.fit(data, verbose=0, shuffle=False, callbacks=[callback])
    assert callback.plan.changed and callback.plan.headline() in out


def test_plan_json_lists_assumptions(cli):
    arguments = ("--arg", "top='sigmoid'", "--input-shape", "48x32x3", "--batch", 2, "--budget", "1GiB")
    code, out, err = cli("plan", "zoo:build", *arguments, "--json", "--quiet")
    found = json.loads(out)
    assert code == 0 and "tflms-sft" not in err
    assert found["assumed"]["inputs"] == [["image", [2, 48, 32, 3], "float32"]]
    assert found["assumed"]["targets"] == [[[2, 5], "float32"]]
    assert found["assumed"]["optimizer"] == "Adam"
    assert found["assumed"]["loss"] == "binary_crossentropy (the model is not compiled: its output is a sigmoid)"
    assert found["plan"]["changed"] is False and found["plan"]["memory_budget"] == 2**30


def test_plan_uses_measured_rates(cli, monkeypatch):
    arguments = ("plan", "zoo:build", "--arg", "size=32", "--budget", "1GiB", "--json")
    usual = json.loads(cli(*arguments)[1])["plan"]["predicted"]["seconds"]

    def measured(tell):
        tell("tflms-sft: measuring this machine")
        return dataclasses.replace(NOMINAL, call=NOMINAL.call + 1.0)

    monkeypatch.setattr("tflms_sft._cli.step_options.machine_rates", measured)
    code, out, err = cli(*arguments)
    assert code == 0 and "tflms-sft: measuring this machine\n" in err
    assert json.loads(out)["plan"]["predicted"]["seconds"] > usual + 1


def test_budget_auto_uses_free_memory(cli):
    options = ("--budget", "auto", "--headroom", 0, "--max-size", 2, "--json")
    code, out, _ = cli("max-batch", "zoo:build", "--arg", "size=32", *options)
    found = json.loads(out)
    assert code == 0 and 2**20 < found["budget_bytes"] < 2**50
    assert found["plain"]["size"] == found["rewritten"]["size"] == 2 and found["plain"]["is_limit"]


def test_plan_of_huge_image_creates_no_batch(cli):
    """One image alone would be 48 GiB."""
    shape = ("--input-shape", "65536,65536,3")
    code, out, _ = cli("plan", "zoo:build", *shape, "--num-tiles", "height=2,width=1", "--halo", "carry")
    assert code == 0 and re.search(r"2x1 tiles, predicted peak .* TiB instead of .* TiB", out)


def test_plan_of_keras_file_keeps_compiled_optimizer(cli, directory):
    sys.path.insert(0, str(directory))
    import zoo

    model = zoo.build(32, compiled=True)
    model.train_on_batch(np.zeros((1, 32, 32, 3)), np.zeros((1, 5)))
    model.save("net.keras")
    code, out, _ = cli("plan", "net.keras", "--num-tiles", "2,2", "--plot", "plan.png", "--html", "plan.html")
    assert code == 0 and "SGD, the model's own loss" in out and "1 segment(s) in 2x2 tiles" in out
    assert Path("plan.png").read_bytes().startswith(b"\x89PNG") and out.endswith("Written: plan.html\n")
    assert "segment1" in Path("plan.html").read_text() and "Written: plan.png" in out
    code, out, _ = cli("plan", "net.keras", "--num-tiles", "2,2", "--loss", "huber", "--optimizer", "adam")
    assert code == 0 and "Adam, huber (loss as given)" in out


@pytest.mark.parametrize(
    ("model", "options", "assumed"),
    [
        ("two_inputs", ["--input-shape", "b=8,8,2"], r"a 1x16x16x2 float32, b 1x8x8x2 float32; targets 1 int32, 1x1"),
        ("Subclassed", ["--input-shape", "12,12,3"], r"mean_squared_error .*\n.* 1x12x12x3.*; targets 1x10x10x2 "),
        ("nested", [], r"sparse_categorical_crossentropy .*its output is a softmax"),
        ("custom_loss", [], r"image 1x16x16x3 float32; targets 1 int32; on"),
        ("flat", ["--target-shape", "3", "--target-dtype", "float64"], "targets 1x3 float64"),
    ],
)
def test_plan_of_model_infers_targets(cli, model, options, assumed):
    code, out, err = cli("plan", f"zoo:{model}", *options, "--budget", "1GiB")
    assert code == 0, err
    assert re.search(assumed, out)


WRONG = [
    (["none.keras"], "MODEL must be a .keras file that exists, or package.module:function. Received: 'none.keras'"),
    (["zoo.py"], "MODEL must name the function that builds the model: zoo.py:function."),
    (["none.py:build"], "MODEL names the file 'none.py', which does not exist."),
    (["nonesuch.zoo:build"], "cannot be imported: ModuleNotFoundError: No module named 'nonesuch'. Searched"),
    (["zoo:biuld"], "MODEL names 'biuld' in 'zoo', which does not exist. Nearest: 'build'"),
    (["zoo:number"], "'zoo:number' returned an object of type builtins.int"),
    (["zoo:broken"], "zoo:broken() raised KeyError: 'no such thing'"),
    (["zoo:build", "--arg", "sise=3"], "unexpected keyword argument 'sise'"),
    (["zoo:build"], "Input 'image' of model 'small' has free sizes: ?x?x3. Give --input-shape"),
    (["zoo:flat", "--input-shape", "64,64,3"], "For 64x64x3 the weight 'sequential/dense/kernel' would be "),
    (["zoo:flat", "--input-shape", "32,32,4"], "is 32x32x3. Received: --input-shape 32,32,4."),
    (["zoo:build", "--input-shape", "64,64"], "is ?x?x3. Received: --input-shape 64,64."),
    (["zoo:two_inputs", "--input-shape", "8,8,2"], "must name one of the inputs of model"),
    (["zoo:two_inputs", "--input-shape", "c=8,8,2"], "a, b, such as a=64,64,3. Received: c=8,8,2."),
    (["zoo:Subclassed"], "does not declare its input. Give one --input-shape without a name"),
    (["zoo:Subclassed", "--input-shape", "1,1,3"], "does not accept 1x1x1x3 float32: "),
    (["zoo:flat", "--loss", "nonesuch"], "cannot be compiled with --optimizer and --loss"),
    (["zoo:flat", "--target-shape", "7,7"], "cannot be traced for 1x32x32x3 float32 and targets of 1x7x7 float32"),
    (["zoo:flat", "--target-dtype", "int33"], "--target-dtype must be a numeric dtype, such as int32. Received: "),
    (["zoo:flat", "--plot", "none/plan.png"], "--plot must be a file in a directory that exists"),
    (["zoo:flat", "--input-shape", "32,x"], "expected integers of at least 1, separated by commas"),
    (["zoo:flat", "--batch", "0"], "expected an integer of at least 1. Received: '0'"),
    (["zoo:flat", "--headroom", "1"], "expected a fraction from 0 to below 1. Received: '1'"),
    (["zoo:flat", "--arg", "3"], "expected name=value. Received: '3'"),
    (["zoo:flat", "--halo", "carry"], "--halo needs --num-tiles; with --budget the planner chooses the halo mode"),
]


@pytest.mark.parametrize(("arguments", "text"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG])
def test_wrong_arguments(cli, arguments, text):
    code, out, err = cli("plan", *arguments, "--budget", "1GiB")
    assert code == 2 and out == ""
    assert text in err and "Traceback" not in err
    assert len(err.strip().splitlines()[-1]) < 2100


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["plan", "zoo:flat"], "one of the arguments --budget --num-tiles is required"),
        (["plan", "zoo:flat", "--budget", "0B"], "`--budget` must be at least one byte"),
        (["plan", "zoo:flat", "--budget", "5"], "argument --budget: a size needs a unit, such as --budget 5GiB or"),
        (["max-input", "zoo:build", "--budget", "5"], "(bytes: --budget 5B). Received: '5'"),
        (["max-batch", "zoo:flat", "--budget", "5"], "(bytes: --budget 5B). Received: '5'"),
        (["run", "--budget", "5", "train.py"], "(bytes: --budget 5B). Received: '5'"),
        (["plan", "zoo:flat", "--budget", "-5MiB"], "must be a positive number followed by one of B, kB"),
        (["run", "--json", "--budget", "1GiB", "train.py"], "usage: tflms-sft run --budget SIZE [options]"),
        (["run", "--json", "--budget", "1GiB", "train.py"], "unrecognized arguments: --json (--report FILE writes"),
        (["plan", "zoo:flat", "--budget", "0.5"], "must be a positive number followed by one of B, kB"),
        (["plan", "zoo:flat", "--budget", "8GiBs"], "must be a positive number followed by one of B, kB"),
        (["plan", "zoo:flat", "--num-tiles", "4,0"], "expected integers of at least 1"),
        (["plan", "zoo:flat", "--num-tiles", "hieght=4"], "--num-tiles names unknown axes ['hieght']"),
        (["plan", "zoo:custom_loss", "--num-tiles", "4,4,4,4"], "4 count(s), but the tiled tensor has 2 axes"),
        (["max-input", "zoo:build", "--budget", "1MiB", "--max-size", "16"], "--max-size must be at least --multi"),
        (["run", "train.py", "--budget", "1GiB"], "run needs --budget SIZE in front of SCRIPT"),
        (["run", "--budget", "1GiB"], "the following arguments are required: SCRIPT\n"),
        (["run", "--budget", "1GiB", "none.py"], "SCRIPT must be a file that exists. Received: 'none.py'."),
    ],
)
def test_command_line_with_wrong_options_exits_with_2(cli, arguments, text):
    code, out, err = cli(*arguments)
    assert code == 2 and text in err
    assert out == "" and "Traceback" not in err


def test_example_with_too_small_budget_exits_with_1(cli):
    arguments = ("plan", "zoo:build", "--input-shape", "64,64,3", "--budget", "20kB", "--json")
    code, out, err = cli(*arguments)
    assert code == 1
    error = json.loads(out)["error"]
    assert error["type"] == "BudgetError" and f"needs {error['smallest_bytes'] / 1024:.0f} KiB" in error["message"]
    assert "error: --budget is too small for this step. Received: --budget 20 KiB" in err and "Traceback" not in err
    smallest = error["smallest_bytes"]
    assert cli(*arguments[:5], f"{smallest}B")[0] == 0


def test_interrupt_exits_with_130(cli, monkeypatch):
    def stopped(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("tflms_sft._cli.step_options.trace", stopped)
    code, out, err = cli("plan", "zoo:flat", "--budget", "1GiB")
    assert (code, out) == (130, "") and err.endswith("tflms-sft: interrupted\n")


def test_unexpected_error_prints_traceback_on_request(cli, monkeypatch):
    def wrong(*arguments):
        raise LookupError("something that nobody thought of")

    monkeypatch.setattr("tflms_sft._cli.step_options.trace", wrong)
    code, out, err = cli("plan", "zoo:flat", "--budget", "1GiB")
    assert (code, out) == (1, "") and "Traceback" not in err
    assert "error: LookupError: something that nobody thought of (--traceback shows where this was raised)" in err
    code, out, err = cli("plan", "zoo:flat", "--budget", "1GiB", "--traceback")
    assert (code, out) == (1, "") and "Traceback" in err and "in wrong" in err


# max-input, max-batch ---------------------------------------------------------------------------------------


def fits(cli, model, size, batch, budget):
    """Return whether `plan` meets the budget, and whether it does so without rewriting."""
    found = cli("plan", model, *size, "--batch", batch, "--budget", budget, "--json", "--quiet")
    return found[0] == 0, found[0] == 0 and not json.loads(found[1])["plan"]["changed"]


def test_max_input_equals_largest_plannable_image(cli):
    options = ("--budget", "1MiB", "--multiple-of", 8, "--within", 0, "--max-size", 56)
    code, out, err = cli("max-input", "zoo:build", *options, "--json")
    found = json.loads(out)
    assert code == 0 and "56x56x3, original: " in err
    plain, rewritten = found["plain"], found["rewritten"]
    assert 8 < plain["size"] < rewritten["size"] and plain["size"] % 8 == 0 and not plain["is_limit"]
    assert rewritten["size"] == 56 and rewritten["is_limit"] and rewritten["time_ratio"] > 1 == plain["time_ratio"]
    assert max(plain["peak_bytes"], rewritten["peak_bytes"]) <= 0.9 * 2**20
    for size, unchanged in ((plain["size"], True), (plain["size"] + 8, False)):
        assert fits(cli, "zoo:build", ("--input-shape", f"{size},{size},3"), 1, "1MiB") == (True, unchanged)


def test_max_input_finds_the_longest_sequence_of_tokens(cli):
    options = ("--budget", "8MiB", "--multiple-of", 64, "--within", 0.1, "--max-size", 4096)
    code, out, err = cli("max-input", "zoo:text", *options, "--json")
    found = json.loads(out)
    plain, rewritten = found["plain"], found["rewritten"]
    assert code == 0 and "128, original: " in err
    assert rewritten["size"] > 2 * plain["size"] > 0 and not plain["is_limit"]
    assert fits(cli, "zoo:text", ("--input-shape", str(rewritten["size"])), 1, "8MiB") == (True, False)


def test_size_search_skips_larger_budgets(cli, monkeypatch):
    looked = []
    monkeypatch.setattr(
        "tflms_sft._planner.budget_search._larger_budgets", lambda *arguments: looked.append(1) or "more is faster"
    )
    options = ("--arg", "size=32", "--budget", "1MiB", "--max-size", 2, "--no-swap")
    assert cli("max-batch", "zoo:build", *options)[0] == 0 and not looked
    code, out, _ = cli("plan", "zoo:build", *options[:4])
    assert code == 0 and looked and "\n  more is faster\n" in out


@pytest.mark.slow
def test_max_batch_equals_largest_plannable_batch(cli):
    """The loss has a number for each pixel of the largest tensor, so that tiles help little."""
    options = ("--input-shape", "64,64,3", "--budget", "1MiB", "--no-swap", "--within", 0)
    code, out, err = cli("max-batch", "zoo:Subclassed", *options)
    assert code == 0, err
    plain, rewritten = (int(n) for n in re.findall(r"^(?:original|rewritten) +batch (\d+) ", out, re.MULTILINE))
    assert 1 <= plain < rewritten
    for batch, expected in ((rewritten, (True, False)), (rewritten + 1, (False, False))):
        assert fits(cli, "zoo:Subclassed", (*options[:2], "--no-swap"), batch, "1MiB") == expected


def test_plan_of_fixed_size_model_for_other_size_equals_free_model(cli):
    found = [
        cli("plan", "zoo:build", *size, "--input-shape", "64,64,3", "--budget", "2MiB", "--json")
        for size in ((), ("--arg", "size=32"))
    ]
    assert [code for code, _, _ in found] == [0, 0]
    free, fixed = (json.loads(out) for _, out, _ in found)
    assert fixed["assumed"]["inputs"] == free["assumed"]["inputs"] and fixed["plan"]["segments"]
    assert abs(free["plan"]["predicted"]["peak_bytes"] - fixed["plan"]["predicted"]["peak_bytes"]) < 100


@pytest.mark.slow
def test_max_input_of_fixed_size_model_equals_free_model(cli):
    options = ("--budget", "1MiB", "--within", 0.3, "--max-size", 64, "--json")
    found = [cli("max-input", "zoo:build", *size, *options) for size in ((), ("--arg", "size=32"))]
    assert [code for code, _, _ in found] == [0, 0]
    free, fixed = (json.loads(out) for _, out, _ in found)
    for way in ("plain", "rewritten"):
        assert free[way]["size"] == fixed[way]["size"] >= 32
        assert abs(free[way]["peak_bytes"] - fixed[way]["peak_bytes"]) < 100  # Names of layers differ.


def test_resized_model_computes_same_and_keeps_frozen_layers():
    from tflms_sft._cli import model_loading

    model = model_loading.load("zoo:nested", {})
    model.compile(keras.optimizers.SGD(0.5), "mse")
    copy = model_loading.resized(model, (48, 40, 3))
    assert copy.input_shape == (None, 48, 40, 3)
    assert [w.trainable for w in copy.weights] == [w.trainable for w in model.weights]
    assert sum(w.trainable for w in copy.weights) == 4 and len(copy.weights) == 6
    assert copy.loss == "mse" and float(copy.optimizer.learning_rate) == 0.5 and copy.optimizer is not model.optimizer
    copy.set_weights(model.get_weights())
    inner = model.layers[-1]
    free = keras.Sequential([layers.Rescaling(2.0), *inner.layers[1:]])
    images = np.random.default_rng(0).normal(size=(2, 48, 40, 3)).astype("float32")
    np.testing.assert_allclose(copy(images), free(images), rtol=1e-6)


@pytest.mark.parametrize(
    ("command", "arguments", "code", "text"),
    [
        ("max-input", ["zoo:flat"], 2, "the weight 'sequential/dense/kernel' would be "),
        ("max-input", ["zoo:two_inputs"], 2, "needs a model with one input. Received: model"),
        ("max-input", ["zoo:Subclassed"], 2, "does not declare its input. Give one --input-shape"),
        ("max-batch", ["zoo:build"], 2, "has free sizes"),
        ("max-batch", ["zoo:build", "--arg", "size=32", "--budget", "1kB", "--max-size", 1], 1, ""),
    ],
)
def test_size_search_without_result_reports_reason(cli, command, arguments, code, text):
    found = cli(command, *arguments[:1], "--budget", "4MiB", "--max-size", 256, *arguments[1:])
    assert found[0] == code and text in found[2]
    assert ("none fits" in found[1]) == (code == 1)


# run --------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
import keras, numpy as np
import zoo, tflms_sft

class Told(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        print("trains as", type(self.model).__name__, "rewritten" if "train_step" in vars(self.model) else "plain")

def main(way):
    model = zoo.build(64, compiled=True)
    x, y = np.zeros((2, 64, 64, 3), "float32"), np.zeros((2, 5), "float32")
    last = {
        "none": None, "list": [Told()], "single": Told(), "own": [tflms_sft.SFT((2, 2), verbose=0)],
        "container": keras.callbacks.CallbackList([Told()], add_history=True, model=model),
    }[way]
    if way == "single":
        model.fit(x, y, 1, 1, 0, last)  # By position.
    else:
        model.fit(x, y, batch_size=1, verbose=0, callbacks=last)

if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1] in ("raise", "exit", "text", "stop"):
        if sys.argv[1] == "raise":
            raise ValueError("of the script's own")
        if sys.argv[1] == "stop":
            raise KeyboardInterrupt
        sys.exit(7 if sys.argv[1] == "exit" else "this went wrong")
    for way in sys.argv[1:]:
        main(way)
    print(__name__, *sys.argv, sys.path[0], __file__)
"""


UNBUILT = """
import sys
import keras, numpy as np, tensorflow as tf
import zoo

keras.utils.set_random_seed(3)
x, y = np.random.rand(2, 24, 24, 3), np.random.rand(2, 22, 22, 2)
data = tf.data.Dataset.from_tensor_slices((x.astype("float32"), y)).batch(1)
for given in ({"x": x, "y": y, "batch_size": 1, "shuffle": False}, {"x": data, "shuffle": False}):
    model = zoo.Subclassed()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    print("loss", model.fit(**given, epochs=2, verbose=0).history["loss"])
"""


@pytest.fixture
def script(directory):
    path = directory / "scripts" / "train.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    (path.parent / "zoo.py").write_text(NETS)
    return path


def test_run_script_puts_every_fit_under_budget(cli, script):
    ways = ("none", "list", "single", "container", "own")
    before = keras.Model.fit, list(sys.argv), list(sys.path)
    given = os.path.relpath(script)  # As `python` has it in `sys.argv`.
    code, out, err = cli("run", "--budget", "2MiB", "--report", "plans.json", given, *ways)
    assert code == 0, err
    assert (keras.Model.fit, sys.argv, sys.path) == before and "fit" not in vars(keras.Model)
    assert out.endswith(f"__main__ {given} {' '.join(ways)} {script.parent} {script}\n")
    assert out.count("tiles, predicted peak") == 4 and out.count("budget 2.00 MiB") == 4
    assert out.count("trains as Functional") == 3
    report = json.loads(Path("plans.json").read_text())
    assert report["exit_code"] == 0 and len(report["fits"]) == 4
    assert all(plan["changed"] and plan["memory_budget"] == 2 * 2**20 for plan in report["fits"])


def test_run_unbuilt_model_trains_as_plain(cli, capsys, directory):
    def losses(text):
        return [float(number) for line in re.findall("^loss (.*)", text, re.MULTILINE) for number in json.loads(line)]

    (directory / "unbuilt.py").write_text(UNBUILT)
    sys.path.insert(0, str(directory))
    runpy.run_path("unbuilt.py")
    plain = losses(capsys.readouterr().out)
    assert len(plain) == 4 and plain[1] < plain[0]
    code, out, err = cli("run", "--budget", "60KiB", "unbuilt.py")
    assert code == 0, err
    assert out.count("predicted peak") == 2 and "nothing rewritten" not in out
    np.testing.assert_allclose(losses(out), plain, rtol=1e-5)


def test_run_module_sets_main_and_arguments(cli, directory):
    package = directory / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text("import sys\nprint(__name__, __package__, sys.argv[1:])")
    code, out, err = cli("run", "--budget", "2MiB", "-m", "package.train", "--budget", "x")
    assert (code, out) == (0, "__main__ package ['--budget', 'x']\n")
    assert err == "tflms-sft run: no `fit` of a Keras model ran under the budget\n"


def test_run_script_keeps_evaluated_annotations(cli, directory):
    """`run` must not pass its own `from __future__ import annotations` on to the script."""
    text = "import dataclasses\n@dataclasses.dataclass\nclass C:\n    a: int\nprint(dataclasses.fields(C)[0].type)"
    (directory / "annotated.py").write_text(text)
    assert cli("run", "--budget", "2MiB", "annotated.py")[:2] == (0, "<class 'int'>\n")


EXITS = [("exit", 7, ""), ("text", 1, "this went wrong"), ("stop", 130, "KeyboardInterrupt")]


@pytest.mark.parametrize(("how", "code", "text"), EXITS)
def test_run_returns_exit_code_of_script(cli, script, how, code, text):
    found = cli("run", "--budget", "3MiB", "--quiet", script, how)
    assert found[0] == code and text in found[2]


def test_run_prints_traceback_of_script_alone(cli, script):
    code, _, err = cli("run", "--budget", "3MiB", "--quiet", script, "raise")
    assert code == 1 and "fit" not in vars(keras.Model)
    lines = err.splitlines()
    assert lines[0] == "Traceback (most recent call last):" and lines[-1] == "ValueError: of the script's own"
    number = SCRIPT.split("\n").index('            raise ValueError("of the script\'s own")') + 1
    assert [line for line in lines if "File" in line] == [f'  File "{script}", line {number}, in <module>']
    script.write_text("def broken(:\n")
    code, _, err = cli("run", "--budget", "3MiB", script)
    assert code == 1 and err.startswith(f'  File "{script}", line 1') and "SyntaxError" in err


# doctor -----------------------------------------------------------------------------------------------------


def test_doctor_on_supported_machine_is_ok(cli):
    code, out, _ = cli("doctor", "--json")
    found = json.loads(out)
    lines = {line["name"]: line for line in found["lines"]}
    assert (code, found["ok"]) == (0, True)
    assert {"Python", "tensorflow", "keras", "numpy", "memory", "devices", "XLA", "spill directory"} <= set(lines)
    for name in ("small step, tiles", "small step, swaps"):
        assert lines[name]["status"] == "ok" and re.match(r"[1-9]\d* (segment|tensor)\(s\); ", lines[name]["text"])
    assert lines["tensorflow"]["text"] == tf.__version__


def test_doctor_tiles_small_step_beside_kernel_scratch(cli, monkeypatch):
    """TensorFlow's own kernels take as much scratch memory as a cache has, which other tests leave out."""
    monkeypatch.setattr(kernel_scratch, "L3_BYTES", 30 * 2**20)
    monkeypatch.setattr(kernel_scratch, "last_level_cache", lambda: 30 * 2**20)
    code, out, _ = cli("doctor")
    assert code == 0 and re.search(r"^ok +small step, tiles +1 segment\(s\); ", out, flags=re.MULTILINE)


def test_doctor_with_wrong_results_fails(cli, monkeypatch):
    monkeypatch.setattr("tflms_sft._cli.doctor.MAX_RELATIVE_ERROR", -1.0)
    code, out, _ = cli("doctor", "--spill-dir", "none")
    failed = [line for line in out.splitlines() if line.startswith("FAILED")]
    assert code == 1 and out.endswith(f"{len(failed)} of {len(out.splitlines()) - 1} FAILED\n")
    for pattern in ("spill directory .*'none'", "small step, tiles .* differ", "small step, swaps .*'none'"):
        assert any(re.search(pattern, line) for line in failed), pattern


def test_doctor_with_old_or_missing_packages_fails_without_further_checks(cli, monkeypatch):
    supported = {"tensorflow": ((2, 90), (2, 91)), "nonesuch": ((1, 0), (2, 0))}
    monkeypatch.setattr("tflms_sft._cli.doctor.SUPPORTED_RELEASES", supported)
    monkeypatch.setattr("tflms_sft._util.requirements.SUPPORTED_RELEASES", supported)
    code, out, _ = cli("doctor")
    failed = [line for line in out.splitlines() if line.startswith("FAILED")]
    install = 'pip install --upgrade "tensorflow>=2.90,<3" "nonesuch>=1.0,<3"'
    assert code == 1 and [" ".join(line.split()) for line in failed] == [
        f"FAILED tensorflow {tf.__version__}; supported: 2.90 to 2.91; install with: {install}",
        f"FAILED nonesuch not installed; install it with: {install}",
    ]
    assert "small step" not in out and "; other checks need supported versions of TensorFlow and Keras\n" in out


def test_doctor_with_newer_packages_prints_note(cli, monkeypatch):
    monkeypatch.setattr(
        "tflms_sft._util.requirements.SUPPORTED_RELEASES", {"tensorflow": ((2, 0), (2, 1)), "keras": ((3, 0), (9, 0))}
    )
    monkeypatch.setattr("tflms_sft._cli.doctor.PYTHON_RELEASES", ((3, 0), (3, 1)))
    code, out, _ = cli("doctor", "--json")
    lines = {line["name"]: (line["status"], line["text"]) for line in json.loads(out)["lines"]}
    assert code == 0 and lines["small step, tiles"][0] == "ok"
    assert lines["tensorflow"] == ("note", f"{tf.__version__}; newer than the tested versions, 2.0 to 2.1")
    assert lines["Python"][0] == "note" and lines["Python"][1].endswith("; newer than the tested versions, 3.0 to 3.1")


# Documentation ----------------------------------------------------------------------------------------------


def test_options_of_all_commands_are_documented():
    """The page is generated from the parser: every argument has a row with its meaning."""
    hooks = runpy.run_path(str(ROOT / "docs" / "site_hooks.py"))
    page = hooks["with_generated_parts"]((ROOT / "docs" / "reference" / "command-line.md").read_text(encoding="utf-8"))
    parts = dict(re.findall(r"^## (\S+)$(.*?)(?=^## |\Z)", page, flags=re.MULTILINE | re.DOTALL))
    commands = make().commands
    assert set(commands) == {"plan", "max-input", "max-batch", "run", "worker", "doctor"}
    for name, command in commands.items():
        rows = dict(re.findall(r"^\| `([^`\s]+)[^`]*` \| ([^|]+) \|", parts[name], flags=re.MULTILINE))
        arguments = {(*action.option_strings, action.metavar)[0]: action.help for action in command._actions}
        hidden = {"-h", *(argument for argument, text in arguments.items() if text == argparse.SUPPRESS)}
        assert set(rows) == {*arguments} - hidden
        assert all(rows[key].replace("`", "")[:20] in arguments[key].replace("`", "") for key in rows)
        assert f"usage: tflms-sft {name} " in parts[name] and command.description.split(".")[0] in parts[name]
        assert f"tflms-sft {name}" in command.format_help() and "exit codes:" in command.format_help()
    assert "| 130 | stopped with Ctrl-C |" in page and "network.keras  " in parts["MODEL"]
    plan = parts["plan"]
    assert "| fraction of the budget that the prediction leaves free | 0.1 |" in plan and "see [MODEL](#model)" in plan


# As processes -----------------------------------------------------------------------------------------------


def child(*command, **environment):
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, env=environment)


def test_help_imports_no_tensorflow():
    program = "import sys, tflms_sft._cli.main as m\ntry:\n    m.main(sys.argv[1:])\nfinally:\n    " + (
        "print(sorted({'tensorflow', 'keras', 'numpy'} & set(sys.modules)))"
    )
    for arguments, code in ((["--help"], 0), (["plan", "--help"], 0), (["plan", "zoo:build"], 2)):
        done = child("-c", program, *arguments)
        assert done.returncode == code and done.stdout.endswith("[]\n")
    done = child("-m", "tflms_sft", "--version")
    assert (done.returncode, done.stdout) == (0, f"tflms-sft {tflms_sft.__version__}\n")


def test_run_script_sets_variables_before_tensorflow_import(directory):
    first = """
import os, sys
assert not {"tensorflow", "keras"} & set(sys.modules)
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
import keras
assert keras.__spec__.loader is keras.__loader__
import tensorflow as tf
tf.config.threading.set_inter_op_parallelism_threads(2)  # Only before the first operation.
"""
    (directory / "train.py").write_text(first + SCRIPT)
    done = child("-m", "tflms_sft", "run", "--budget", "24MiB", "train.py", "list")
    assert done.returncode == 0, done.stderr
    assert "budget 24 MiB" in done.stdout and done.stdout.endswith(
        f"__main__ train.py list {directory} {directory / 'train.py'}\n"
    )


@pytest.mark.slow
def test_plan_process_prints_json_alone():
    done = child("-m", "tflms_sft", "plan", "zoo.py:build", "--arg", "size=32", "--budget", "1GiB", "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["command"] == "plan"
