"""The line about a step that takes much longer than `max_slowdown` accepts."""

import dataclasses
import re
import types

import numpy as np
import pytest
from training import SETTINGS, X, Y, budgeted, net

import tflms_sft
from tflms_sft._keras import slow_steps
from tflms_sft._machine.step_profile import OpSpan
from tflms_sft._params.request import parse_request


def lines_of(capsys, **options):
    """Train for four steps with a budget; return the lines about slow steps, and the weights."""
    model = net()
    callback = budgeted(verbose=1, **options)
    model.fit(X[:8], Y[:8], batch_size=4, epochs=2, callbacks=[callback], **SETTINGS)
    assert callback.plan.changed
    return [line for line in capsys.readouterr().out.splitlines() if "a step takes" in line], model.get_weights()


def test_slow_step_is_told_once_with_its_ops(capsys, monkeypatch):
    for name, value in (("MIN_SECONDS", 0), ("SLOW_STEP_RATIO", 1e-9)):
        monkeypatch.setattr(slow_steps, name, value)
    (line,), weights = lines_of(capsys)
    assert re.search(r"a step takes \S+ s, \d+ times as long as .* \(max_slowdown=10\); most of it: \d+% `", line)
    assert len(re.findall(r"\d+% `[^`]+ \(\w+\)`", line)) == slow_steps.NUM_CAUSES
    monkeypatch.undo()
    lines, plain = lines_of(capsys)
    assert not lines, "the steps of this network are short"
    assert all(np.array_equal(a, b) for a, b in zip(weights, plain, strict=True))


@dataclasses.dataclass(eq=False)
class Step:
    changed: bool
    original: types.SimpleNamespace


def plan_of(seconds):
    """A plan, as far as it is read, whose original step is predicted to take so many seconds."""
    return Step(True, types.SimpleNamespace(seconds=seconds))


def test_line_names_ops_with_most_time():
    spans = [
        OpSpan("model/conv/convolution", "Conv2D", 0.0, 6.0),
        OpSpan("sft/segment1/backward/while/body/_3/while/model/act/Relu", "Relu", 6.0, 9.0),
        OpSpan("model/loss", "Mean", 9.0, 10.0),
        OpSpan("model/other", "Sum", 10.0, 10.5),
    ]
    text = slow_steps.slow_step_line(20.0, plan_of(0.5), 10.0, spans)
    assert "a step takes 20 s, 40 times as long" in text
    assert "57% `conv/convolution (Conv2D)`, 29% `act/Relu (in the backward loop of segment1) (Relu)`" in text


@pytest.mark.parametrize("seconds", [0.5, 1.5])
def test_short_steps_are_not_told(seconds, monkeypatch):
    told = []
    steps = slow_steps.SlowSteps(parse_request(tflms_sft.AutoParams("1GiB", max_slowdown=1)), 1, told.append)
    clock, plan = iter([0.0, seconds, seconds, 2 * seconds]), plan_of(0.01)
    monkeypatch.setattr(slow_steps.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(slow_steps, "profiled", lambda run: (run(), []))
    assert [steps.run(plan, lambda: 5) for _ in range(4)] == [5] * 4
    assert len(told) == (seconds > slow_steps.MIN_SECONDS)
