"""`tflms-sft max-input` and `max-batch`: the largest input and the largest batch that fit."""

import json
import os
import re
import signal
import time
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from keras import layers

from rewriters.device.peak_memory import Peak
from rewriters.errors import BudgetError
from tflms_sft._cli import max_size, step_options
from tflms_sft._cli.stop_signals import stoppable
from tflms_sft._search.traced_step import Candidate


def fits(cli, model, size, batch, budget):
    """Return whether `plan` meets the budget, and whether it does so without rewriting."""
    found = cli("plan", model, *size, "--batch", batch, "--budget", budget, "--json", "--quiet")
    return found[0] == 0, found[0] == 0 and not json.loads(found[1])["plan"]["changed"]


def test_max_input_equals_largest_plannable_image(cli):
    options = ("--budget", "1MiB", "--multiple-of", 8, "--within", 0, "--max-size", 56)
    code, out, err = cli("max-input", "zoo:build", *options, "--json")
    found = json.loads(out)
    assert code == 0 and "56x56x3, original: does not fit, " in err
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
    assert code == 0 and "128, original: fits, " in err
    assert rewritten["size"] > 2 * plain["size"] > 0 and not plain["is_limit"]
    assert fits(cli, "zoo:text", ("--input-shape", str(rewritten["size"])), 1, "8MiB") == (True, False)


def test_size_search_skips_larger_budgets(cli, monkeypatch):
    looked = []
    monkeypatch.setattr(
        "tflms_sft._planner.budget_search.larger_budgets", lambda *arguments: looked.append(1) or "more is faster"
    )
    options = ("--arg", "size=32", "--budget", "1MiB", "--max-size", 2, "--no-swap")
    assert cli("max-batch", "zoo:build", *options)[0] == 0 and not looked
    code, out, _ = cli("plan", "zoo:build", *options[:4])
    assert code == 0 and looked and "\n  more is faster\n" in out


class Axis:
    """Sizes of a step whose smallest plan needs `size` MiB times a factor; each try takes no time."""

    unit = power = first = 1

    def __init__(self, factor, ratio=lambda size: 1.5, stop_at=None):
        self.tried, self._factor, self._ratio, self._stop_at = [], factor, ratio, stop_at

    def shown(self, size):
        return f"batch {size}"

    def step(self, size):
        self.tried.append(size)
        return Step(size, self._factor(size), self._ratio(size), self._stop_at)


class Step:
    def __init__(self, size, factor, ratio, stop_at):
        self.traced = SimpleNamespace(fixed_bytes=0)
        self.plain_bytes, self._peak, self.ratio = 4 * size * 2**20, int(factor * size * 2**20), ratio
        self.assumed = step_options.Assumed("small", 7, [], [], "Adam", "mse", "CPU:0")
        self._size, self._stop_at = size, stop_at

    def least_memory(self, params, progress):
        if self._size == self._stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return Candidate([], Peak(self._peak, "", (), (), 0), self.ratio)

    def plan(self, params, progress, advise):
        if self._peak > 0.9 * params.memory_budget:
            error = BudgetError("too small")
            error.smallest_bytes = self._peak
            raise error
        predicted = SimpleNamespace(peak_bytes=self._peak, time_ratio=self.ratio / 1.25)
        return SimpleNamespace(predicted=predicted, headline=lambda: "in tiles")


def found(monkeypatch, cli, axis, *options):
    monkeypatch.setattr(max_size, "BatchSizes", lambda *arguments: axis)
    return cli("max-batch", "zoo:build", "--arg", "size=8", "--budget", "1000MiB", "--within", "0.02", *options)


@pytest.mark.parametrize(
    "factor", [lambda size: 0.5, lambda size: 0.1 + size / 1e4, lambda size: 0.2 if size < 990 else 99]
)
def test_size_search_tries_few_sizes(factor, cli, monkeypatch):
    axis = Axis(factor)
    code, out, err = found(monkeypatch, cli, axis, "--json")
    result = json.loads(out)["rewritten"]
    most = max(size for size in range(1, 65536) if factor(size) * size <= 900)
    assert code == 0 and 0.97 * most <= result["size"] <= most and len(set(axis.tried)) < 13
    assert (result["how"], result["time_ratio"]) == ("in tiles", 1.2)
    assert "tflms-sft: batch 900, rewritten: fits, smallest plan 450 MiB at 1.50x the time\n" in err or factor(9) != 0.5


def test_size_search_skips_sizes_that_are_too_slow(cli, monkeypatch):
    axis = Axis(lambda size: 0.5, ratio=lambda size: size / 100)
    code, out, err = found(monkeypatch, cli, axis, "--max-slowdown", "4", "--json")
    found_slowdown = json.loads(out)
    assert code == 0 and found_slowdown["max_slowdown"] == 4
    assert 0.97 * 500 <= found_slowdown["rewritten"]["size"] <= 500
    assert "tflms-sft: batch 900, rewritten: too slow, fastest plan 450 MiB at 7.20x the time\n" in err


def test_stopped_search_prints_the_best_size_so_far(cli, monkeypatch):
    axis = Axis(lambda size: 0.5, stop_at=1800)
    code, out, err = found(monkeypatch, cli, axis, "--within", "0")
    assert (
        code == 143
        and "tflms-sft: stopped with SIGTERM\n" in err
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    assert "predicted on CPU:0, stopped with SIGTERM, larger ones may fit\n" in out
    assert re.search(r"^original   batch 225  900 MiB +1.00x$", out, re.MULTILINE)
    assert out.endswith("rewritten: the smallest plan; the fastest one was not searched for\n")


@pytest.mark.parametrize(
    ("number", "reason", "code"),
    [(signal.SIGINT, "stopped with Ctrl-C", 130), (signal.SIGALRM, "stopped by --time-limit", None)],
)
def test_signals_end_a_block_and_are_restored(number, reason, code):
    before, ended = signal.getsignal(number), False
    with stoppable(0.01 if number == signal.SIGALRM else None) as stop:
        if number == signal.SIGINT:
            os.kill(os.getpid(), number)
        time.sleep(10)
        ended = True
    assert (stop.reason, stop.code, ended, signal.getsignal(number)) == (reason, code, False, before)


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
