"""The first of the random networks of `fuzz.py`; `make fuzz` runs others."""

import collections
import dataclasses

import fuzz
import keras
import pytest
from equivalence import keras_step

import tflms_sft
from benchmarks._longest_segments import longest_segments
from rewriters.rules.intervals import Window


def test_fuzz_networks_equal_plain_or_are_refused():
    outcomes = collections.Counter()
    fuzz.run(2, None, outcomes, shrink=False)
    assert outcomes.total() == 2 and outcomes["exact"] > 0, outcomes


def test_fuzz_finds_broken_rule(monkeypatch, capsys):
    gather = Window.rows_covered
    monkeypatch.setattr(Window, "rows_covered", lambda self, rows: gather(self, rows).shift(-1))
    with pytest.raises(AssertionError, match="differs by|lacks rows|lacks the dimension"):
        fuzz.run(100, None, collections.Counter(), shrink=False)
    script = capsys.readouterr().out
    assert "compare(keras.Model(" in script and "PYTHONPATH=tests:." in script


def test_fuzz_refuses_plan_that_needs_as_much_as_plain():
    step = keras_step(lambda x: keras.layers.Conv2D(4, 3)(keras.layers.Conv2D(4, 3, activation="relu")(x)))
    with longest_segments():
        plan = tflms_sft.rewrite(step.concrete_fn, tflms_sft.SFTParams(num_tiles=(4, 4))).plan
    fuzz.check_saves(plan)
    with pytest.raises(AssertionError):
        fuzz.check_saves(dataclasses.replace(plan, predicted=plan.original))
    with pytest.raises(AssertionError):
        fuzz.check_saves(dataclasses.replace(plan, segments=()))
