"""`tflms-sft plan`, and what all commands do with wrong options and errors."""

import dataclasses
import json
import re
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tflms_sft
from rewriters.estimates.op_cost import NOMINAL


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


def test_plan_dump_passes_writes_graphs_and_a_script(cli, tmp_path):
    arguments = ("--arg", "size=64", "--arg", "compiled=True", "--budget", "2MiB", "--dump-passes", tmp_path / "dump")
    code, out, _ = cli("plan", "zoo.py:build", *arguments)
    assert code == 0 and f"Written: {tmp_path / 'dump'}" in out
    (step,) = (tmp_path / "dump").iterdir()
    assert {"00-traced.txt", "summary.txt", "reproduce.py"} <= {path.name for path in step.iterdir()}
    assert (step / "summary.txt").read_text(encoding="utf-8").startswith("Plan for batch 1: 1 segment(s)")


def test_plan_of_huge_image_creates_no_batch(cli):
    """One image alone would be 48 GiB."""
    shape = ("--input-shape", "65536,65536,3")
    code, out, _ = cli("plan", "zoo:build", *shape, "--num-tiles", "height=2,width=1", "--halo", "carry")
    assert code == 0 and re.search(r"2 rows of tiles, predicted peak .* TiB instead of .* TiB", out)


def test_plan_of_keras_file_keeps_compiled_optimizer(cli, directory):
    sys.path.insert(0, str(directory))
    import zoo

    model = zoo.build(32, compiled=True)
    model.train_on_batch(np.zeros((1, 32, 32, 3)), np.zeros((1, 5)))
    model.save("net.keras")
    code, out, _ = cli("plan", "net.keras", "--num-tiles", "2,2", "--plot", "plan.png", "--html", "plan.html")
    assert code == 0 and "SGD, the model's own loss" in out and "1 segment(s) in 2 rows x 2 columns of tiles" in out
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
        (["plan", "zoo:flat"], "one of the arguments --budget/--memory-budget --num-tiles is required"),
        (["plan", "zoo:flat", "--budget", "0B"], "`--budget` must be at least one byte"),
        (["plan", "zoo:flat", "--budget", "5"], "a size needs a unit, such as --budget 5GiB or --budget 900MB (bytes"),
        (["plan", "zoo:flat", "--budget", "8e9"], "(bytes: --budget 8000000000B). Received: '8e9'"),
        (["plan", "zoo:flat", "--budget", "8G"], 'Received: --budget=\'8G\'. Write "8GiB" or "8GB".'),
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
    arguments = ("plan", "zoo:build", "--input-shape", "48,48,3", "--budget", "20kB", "--json")
    code, out, err = cli(*arguments)
    assert code == 1
    error = json.loads(out)["error"]
    assert error["type"] == "BudgetError" and f"needs {error['smallest_bytes'] / 1024:.0f} KiB" in error["message"]
    assert "error: --budget is too small for this step. Received: --budget 20 KiB" in err and "Traceback" not in err
    smallest = error["smallest_bytes"]
    assert cli(*arguments[:5], f"{smallest}B", "--max-slowdown", "1000")[0] == 0
    code, _, err = cli(*arguments[:5], f"{smallest}B", "--max-slowdown", "1")
    assert code == 1 and "Expected: at most --max-slowdown 1. Pass --budget " in err
    assert "max_slowdown" not in err


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
