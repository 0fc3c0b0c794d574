"""A line while a plan is searched for, only if that takes long."""

import io
import time

import pytest
from gradients import gradient_step
from training import BUDGET, SETTINGS, X, Y, net

import tflms_sft
from tflms_sft import LMSParams, SFTParams
from tflms_sft._params.request import parse_request
from tflms_sft._util import progress
from tflms_sft._util.progress import told_if_slow


@pytest.fixture
def soon(monkeypatch):
    """Make blocks slow after a hundredth of a second."""
    monkeypatch.setattr(progress, "SLOW_SECONDS", 0.01)


@pytest.fixture
def often(soon, monkeypatch):
    """Print lines about slow blocks often, too."""
    for name, seconds in (("UPDATE_SECONDS", 0.05), ("SPARSE_SECONDS", 0.1)):
        monkeypatch.setattr(progress, name, seconds)


def test_slow_block_prints_once_and_is_timed(soon):
    said = []
    with told_if_slow("thinking", said.append) as watch:
        time.sleep(0.3)
    assert said == ["thinking"] and watch.seconds >= 0.3 and watch.text() == "planned in 0 s"
    with told_if_slow("nobody listens", None) as watch:
        time.sleep(0.1)
    assert said == ["thinking"] and watch.text()


@pytest.mark.parametrize("error", [None, RuntimeError])
def test_fast_or_failed_block_prints_nothing(error):
    said = []
    try:
        with told_if_slow("thinking", said.append) as watch:
            if error:
                raise error
    except RuntimeError:
        pass
    time.sleep(0.05)
    assert not said and not watch.text()


@pytest.mark.parametrize("verbose", [0, 1])
def test_slow_search_prints_before_plan(verbose, soon, capsys):
    callback = tflms_sft.MemoryBudget(BUDGET, verbose=verbose)
    net().fit(X[:4], Y[:4], batch_size=4, callbacks=[callback], **SETTINGS)
    lines = capsys.readouterr().out.splitlines()
    if not verbose:
        assert not lines
        return
    assert lines[:2] == ["tflms-sft: tracing the step ...", "tflms-sft: planning for a budget of 700 KiB ..."]
    assert lines[2].startswith("tflms-sft: 1 segment(s)") and "; planned in " in lines[2]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_terminal_has_one_line_with_time_and_best_plan(often):
    stream, said = Terminal(), []
    with told_if_slow("planning ...", said.append, stream) as watch:
        time.sleep(0.1)
        watch.found(1.504)
        watch.found(1.213)
        watch.found(2.0)
        time.sleep(0.2)
    first, *_, last = stream.getvalue().split("\r")[1:]
    assert (first, last) == ("planning ... 0 s", "planning ... 0 s, best plan so far 1.21x the time\n") and not said


def test_other_output_has_sparse_lines(often):
    said = []
    with told_if_slow("planning ...", said.append, io.StringIO()) as watch:
        watch.found(0.9)
        time.sleep(0.6)
    assert said == ["planning ...", *["planning ... 0 s, best plan so far 1.00x the time"] * 2]


def test_rewrite_tells_of_slow_work_on_stderr(soon, monkeypatch, capsys):
    found = []
    monkeypatch.setattr(progress.Stopwatch, "found", lambda watch, ratio: found.append(ratio))
    model = net()
    step = tflms_sft.rewrite(gradient_step(model), tflms_sft.AutoParams(BUDGET), X[:4])
    out, err = capsys.readouterr()
    assert out == "" and step.plan.changed and min(found) == pytest.approx(step.plan.predicted.time_ratio)
    assert err.splitlines() == ["tflms-sft: tracing the step ...", "tflms-sft: planning for a budget of 700 KiB ..."]


@pytest.mark.parametrize(
    ("params", "text"), [(SFTParams(), "planning tiles"), (LMSParams(), "planning swaps")], ids=["tiles", "swaps"]
)
def test_planning_line_names_request(params, text):
    assert parse_request(params).aim() == text


def test_planning_line_names_second_plan():
    again = parse_request(tflms_sft.AutoParams(BUDGET)).aim(again=True)
    assert again == "planning again with the measured peak, for a budget of 700 KiB"
