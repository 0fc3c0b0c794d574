"""A line while a plan is searched for, only if that takes long."""

import time

import pytest
from training import BUDGET, SETTINGS, X, Y, net

import tflms_sft
from tflms_sft import LMSParams, SFTParams
from tflms_sft._params.request import parse_request
from tflms_sft._util import progress
from tflms_sft._util.progress import told_if_slow


def test_slow_block_prints_once_and_is_timed(monkeypatch):
    monkeypatch.setattr(progress, "SLOW_SECONDS", 0.05)
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
def test_slow_search_prints_before_plan(verbose, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SLOW_SECONDS", 0.01)
    callback = tflms_sft.MemoryBudget(BUDGET, verbose=verbose)
    net().fit(X[:4], Y[:4], batch_size=4, callbacks=[callback], **SETTINGS)
    lines = capsys.readouterr().out.splitlines()
    if not verbose:
        assert not lines
        return
    assert lines[0] == "tflms-sft: planning for a budget of 700 KiB ..."
    assert lines[1].startswith("tflms-sft: 1 segment(s)") and "; planned in " in lines[1]


@pytest.mark.parametrize(
    ("params", "text"), [(SFTParams(), "planning tiles"), (LMSParams(), "planning swaps")], ids=["tiles", "swaps"]
)
def test_planning_line_names_request(params, text):
    assert parse_request(params).aim() == text
