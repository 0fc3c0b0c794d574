"""`tflms-sft max-input` and `max-batch`: the largest input and the largest batch that fit."""

import json
import re

import keras
import numpy as np
import pytest
from keras import layers


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


def test_resized_model_computes_same_and_keeps_frozen_layers(directory):
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
